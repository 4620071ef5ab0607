"""What a run needs is foreseen: against what a pass really keeps, and what is free."""
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from parts import machine
from parts.logprobs import token_logprobs
from parts.models import tiny_folder
from parts.policy import Row, load_policy

SMOLLM = SimpleNamespace(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, head_dim=64, num_experts_per_tok=None)
SMOLLM.get_text_config = lambda: SMOLLM


def settings(**changes):
    return SimpleNamespace(**dict(
        dtype="float32", rollout_dtype="auto", engine_sequences=256, lora_rank=16,
        max_prompt_tokens=256, max_tokens=40, micro_tokens=0) | changes)


def kept_by_a_pass(policy, rows) -> int:
    """Bytes that autograd keeps for the backward pass, besides the model's own weights."""
    own = {p.untyped_storage().data_ptr() for p in [*policy.parameters(), *policy.buffers()]}
    seen = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(policy, rows)
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-skills"])
def test_a_pass_keeps_what_the_config_foretells(name):
    folder = tiny_folder(name)
    policy = load_policy(folder, dtype="float32", rank=16, alpha=32, seed=0, device="cpu")
    rows = [Row([7] * 128, 1, [], 1.0) for _ in range(4)]
    foreseen = machine.per_token(AutoConfig.from_pretrained(folder), 16, "float32") / machine.GAPS
    assert 0.7 < kept_by_a_pass(policy, rows) / (4 * 128) / foreseen <= 1


@pytest.mark.parametrize("free, tokens", [(64, 1024), (8, 1024), (5.5, None), (4, "lower"),
                                          (2, "take a smaller --model")])
def test_tokens_per_pass_come_from_what_is_free(free, tokens, monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: free * machine.GB)
    monkeypatch.setattr(machine, "parameters_of", lambda config: 134_515_008)
    chosen = settings()
    if isinstance(tokens, str):
        with pytest.raises(SystemExit, match=f"GiB are free for it: {tokens}"):
            machine.fit_in_memory(chosen, SMOLLM)
        return
    machine.fit_in_memory(chosen, SMOLLM)
    assert chosen.micro_tokens == tokens or 296 <= chosen.micro_tokens < 1024


def test_what_a_user_asks_for_is_kept_or_refused_with_what_would_fit(monkeypatch):
    monkeypatch.setattr(machine, "parameters_of", lambda config: 134_515_008)
    monkeypatch.setattr(machine, "free_memory", lambda: 16 * machine.GB)
    chosen = settings(micro_tokens=3000)
    machine.fit_in_memory(chosen, SMOLLM)
    assert chosen.micro_tokens == 3000
    with pytest.raises(SystemExit, match=r"lower --micro-tokens, to ([\d,]+)\.") as ended:
        machine.fit_in_memory(settings(micro_tokens=16384), SMOLLM)
    fitting = int(str(ended.value).rpartition(" ")[2].rstrip(".").replace(",", ""))
    machine.fit_in_memory(settings(micro_tokens=fitting), SMOLLM)


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_what_ulimit_leaves_is_all_that_is_free(limit):
    """In a process of its own: a limit cannot be taken back."""
    code = ("import resource; from parts.machine import free_memory; before = free_memory(); "
            f"resource.setrlimit(resource.{limit}, (3 << 30, 3 << 30)); print(free_memory())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 3 << 30
    assert resource.getrlimit(getattr(resource, limit))[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("line, limit, used, stat", [
    ("0::/box/inner", "memory.max", "memory.current", "inactive_file 100"),
    ("4:memory:/box/inner", "memory.limit_in_bytes", "memory.usage_in_bytes",
     "total_inactive_file 100")])
def test_a_containers_limit_counts_whichever_version_and_however_far_up(
        line, limit, used, stat, tmp_path, monkeypatch):
    def read(file):
        file = str(file)
        if file == "/proc/self/cgroup":
            return f"1:cpu:/elsewhere\n{line}\n"
        known = {f"/box/{limit}": "5000\n", f"/box/{used}": "3000\n", f"/box/memory.stat": stat,
                 f"/box/inner/{limit}": "max" if limit == "memory.max" else str(2**63 - 4096)}
        return next((text for end, text in known.items() if file.endswith(end)), "")

    monkeypatch.setattr(machine, "read", read)
    assert machine.group_limits() == [2100]
