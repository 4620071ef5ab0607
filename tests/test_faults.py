"""Every fault is really made: what is left on the disk, what the user reads (docs/runs.md)."""
import ast
import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import eval as evaluation  # the module has the name of a builtin
import minirl
import world
from parts import folder as folders
from parts import machine
from conftest import ROOT
from parts import run as running
from parts.config import Config, resolve
from helpers import Program, run_program
from models_small import trained_weights
import whole_runs


ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"  # sets a terminal's title, clears it, colours it


def first_adapter_weight(policy):
    return next(p for name, p in policy.named_parameters() if "lora_B" in name)


# ---------------------------------------------------------------------------- numbers that are none
@pytest.mark.parametrize("broken", ["weight", "logprob of the engine"])
def test_nan_skips_the_step_and_changes_nothing(broken):
    run = world.ready(lr=0.1)
    groups, right = minirl.sample(run), first_adapter_weight(run.policy)[0, 0].item()

    def step():
        metrics = minirl.update(run.policy, run.optimizer, run.schedule, groups, run.config,
                                random.Random(0))
        assert all(p.grad is None for p in run.policy.parameters())
        return metrics["optimizer_steps"], metrics["skipped_steps"], metrics["grad_norm"]

    logprobs = next(s for group in groups for s, a in group.rows() if a).rollout.logprobs
    first = logprobs[0]
    if broken == "weight":
        first_adapter_weight(run.policy).data[0, 0] = math.nan
    else:
        logprobs[0] = math.nan
    before = {name: w.nan_to_num(7e7) for name, w in trained_weights(run.policy).items()}
    assert step() == (0, 1, pytest.approx(math.nan, nan_ok=True))
    after = {name: w.nan_to_num(7e7) for name, w in trained_weights(run.policy).items()}
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not run.optimizer.state_dict()["state"] and run.schedule.last_epoch == 0
    first_adapter_weight(run.policy).data[0, 0], logprobs[0] = right, first
    assert step()[:2] == (1, 0)  # and the next step is as good as ever
    assert any(not torch.equal(w, before[name])
               for name, w in trained_weights(run.policy).items())


# ------------------------------------------------------------------------------------ out of memory
def test_the_largest_micro_batch_is_rehearsed(monkeypatch):
    run = world.ready(micro_tokens=900, max_prompt_tokens=100, max_tokens=200)
    seen, real = [], running.token_logprobs

    def watched(policy, rows, temperature):
        seen.append([len(row.ids) for row in rows])
        return real(policy, rows, temperature)

    monkeypatch.setattr(running, "token_logprobs", watched)
    running.rehearse(run)
    assert seen == [[300] * 3] and run.events == ["sleep", "wake"]


# ---------------------------------------------------------------------------------- untrusted input
@pytest.mark.slow
def test_code_in_data_rows_stays_text(tmp_path, capsys):
    from models import make
    from parts.data import check_golds, load_problems
    from parts.prompts import add_prompts
    from rewards import Grader

    touch = f"__import__('os').mkdir('{tmp_path}/owned')"
    shell = f"$(mkdir {tmp_path}/owned)"
    golds = {touch: touch, "{{ 7*7 }}": rf"\boxed{{{touch}}}", "{problem}": f"lambda: {touch}",
             "{% for x in 'ab' %}x{% endfor %}": "1/0", shell: "9**9**9**9",
             "%s {0} \\boxed{3}": "10^{10^{10}}!", f"what is 1+1? {ESCAPE}": ESCAPE}
    rows = [dict(problem=text, answer=gold) for text, gold in golds.items()]
    (tmp_path / "evil.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = add_prompts(load_problems(str(tmp_path / "evil.jsonl")), make.build_tokenizer(),
                           "chat", 400)
    assert [p.problem for p in problems] == [text.strip() for text in golds]
    assert all(p.problem in p.prompt for p in problems)
    with Grader() as grader:
        problems = check_golds(problems, grader, drop=True)
        grader.grade([(p.answer, completion) for p in problems for completion in (
            touch, rf"\boxed{{{touch}}}", rf"\boxed{{{p.answer}}}", rf"\boxed{{{shell}}}")])
    assert not (tmp_path / "owned").exists()
    printed = capsys.readouterr()
    assert not set("\x1b\x07\x9b") & set(printed.out + printed.err)


def test_no_model_brings_code_of_its_own():
    """transformers asks whether to run it, and `yes |` would answer: every loader is told no."""
    loaders = {}
    for file in [*ROOT.glob("*.py"), *(ROOT / "parts").glob("*.py")]:
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and ".from_pretrained" in ast.unparse(call.func):
                if ast.unparse(call.func).startswith("Auto"):
                    told = {word.arg: ast.unparse(word.value) for word in call.keywords}
                    loaders[f"{file.name}:{call.lineno}"] = told.get("trust_remote_code")
    assert len(loaders) >= 4 and set(loaders.values()) == {"False"}, loaders


# ------------------------------------------------------------------- any phase, in the small world
class Fault(BaseException):
    """Which nobody catches."""


PHASES = {  # what is called in it
    "sampling": (world.Engine, "step"), "grading": (world.Grader, "submit"),
    "update": (torch.nn.utils, "clip_grad_norm_"), "sync": (world.Engine, "sync"),
    "log": (running, "append"), "checkpoint": (folders, "flush"),
    "evaluation": (evaluation, "as_row")}
RUN = dict(sampler="ada-est", steps=4, eval_data="builtin,builtin-skills")  # it has a memory


def failing(monkeypatch, phase: str, moment: int) -> list:
    """From now on the phase raises at this call. Returns the list of its calls."""
    (owner, name), calls = PHASES[phase], []
    real = getattr(owner, name)

    def called(*args, **how):
        calls.append(name)
        if len(calls) == moment:
            raise Fault
        return real(*args, **how)

    monkeypatch.setattr(owner, name, called)
    return calls


def logs_and_adapter(run: Path) -> list:
    last = folders.checkpoints(run)[-1]
    return [world.rows(run / log) for log in folders.LOGS] + [
        (last / file).read_bytes() for file in ("adapter_model.safetensors", "optimizer.pt")]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_in_any_phase_costs_the_running_step_and_no_bit(phase, tmp_path, monkeypatch):
    """In the middle of the run, and at its very end."""
    (tmp_path / "whole").mkdir()
    with monkeypatch.context() as patch:
        calls = failing(patch, phase, moment=0)
        wanted = logs_and_adapter(world.small_run(tmp_path / "whole", **RUN))
    for moment in (len(calls) // 2, len(calls)):
        place = tmp_path / str(moment)
        place.mkdir()
        with monkeypatch.context() as patch, pytest.raises(Fault):
            failing(patch, phase, moment)
            world.small_run(place, **RUN)
        gc.collect()  # the run's lock goes with it, as with its process
        assert logs_and_adapter(world.small_run(place, resume=True, **RUN)) == wanted


# --------------------------------------------------------------------------- real runs, real engine
engine_test = pytest.mark.engine
FLAGS = [*whole_runs.SMALL, "--steps", "6", *os.environ.get("RUN_FLAGS", "").split()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return whole_runs.workplace(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def reference(place):
    """A run that was never touched, with all its checkpoints."""
    program(place, 0, "--name", "whole", "--keep-every", "1", *FLAGS)
    return place / "runs/whole"


def program(cwd, code, *flags, before=""):
    """What minirl.py says, which has to end with this code and without a traceback."""
    done = run_program("minirl.py", *flags, cwd=cwd, before=before)
    assert done.returncode == code and "Traceback" not in done.stdout, done.stdout
    return done.stdout


def at(call: int, function: str, number: int) -> str:
    """Python that sends the program a signal at the `call`-th call of a function."""
    module, name = function.rsplit(".", 1)
    return f"""
import {module} as module, os
real, calls = module.{name}, []
def patched(*args, **how):
    calls.append(1)
    if len(calls) == {call}:
        os.kill(os.getpid(), {number})
    return real(*args, **how)
module.{name} = patched
"""


ENGINE_DIES = """
from parts import engine
def step(self, real=engine.WatchedEngine.step):
    if self.steps == 5:
        raise ValueError("the cache is on fire")
    return real(self)
engine.WatchedEngine.step = step
"""
SMALL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))"
CUTS = [  # one start after the other: (how it ends, exit code, the last step that is saved then)
    (at(2, "parts.run.save", signal.SIGKILL), -9, 1),  # the logs know a step more
    (at(2, "torch.save", signal.SIGKILL), -9, 2),  # in the middle of a checkpoint
    (at(5, "eval.as_row", signal.SIGTERM), 143, 3),  # in the evaluation after step 3
    (at(2, "torch.nn.utils.clip_grad_norm_", signal.SIGINT), 130, 4),  # in an update
    (ENGINE_DIES, 1, 4),
    (SMALL_DISK, 1, 4),
]


@engine_test
def test_a_run_that_is_cut_short_in_every_way_ends_as_if_it_had_never_been(place, reference):
    """Each time `--name cut --resume` goes on, without another flag."""
    run = place / "runs/cut"
    for start, (before, code, saved) in enumerate(CUTS):
        flags = ["--resume"] if start else FLAGS
        done = run_program("minirl.py", "--name", "cut", *flags, cwd=place, before=before)
        assert done.returncode == code, done.stdout
        assert whole_runs.examine(run, reference) == (saved, "")
        assert code < 0 or f"everything up to step {saved} is saved" in done.stdout, done.stdout
        assert ("Traceback" in done.stdout) == (before == ENGINE_DIES), done.stdout
        if code < 0:
            for log in ("metrics.jsonl", "groups.jsonl"):
                with open(run / log, "a") as file:
                    file.write('{"step": 5, "rew')
    assert "continuing after step 4" in program(place, 0, "--name", "cut", "--resume")
    assert whole_runs.difference(run, reference, 6) == ""
    assert len(folders.checkpoints(run)) == 2
    assert sum(row["optimizer_steps"] for row in whole_runs.rows(run / "metrics.jsonl")) >= 5


AFTER_CPU_SECONDS = """
import os, tempfile, threading, time
tempfile.tempdir = None  # the process that this one is forked from knows another
def cut(end=time.process_time() + {seconds}):
    while time.process_time() < end:
        time.sleep(0.001)
    os.kill(os.getpid(), {number})
threading.Thread(target=cut, daemon=True).start()
"""


@engine_test
def test_killed_at_random_moments_it_ends_as_if_it_had_never_been(place, reference, tmp_path):
    """KILLS=20 for the long version; RUN_FLAGS="--model tiny-moe ..." for another run.

    The moment is drawn in seconds of the run's own CPU time: whatever else the machine does.
    """
    left = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT] * int(os.environ.get("KILLS", 1))
    run, rng = place / "runs/random", random.Random(0)
    flags = ["--name", "random", *FLAGS, "--resume"]
    while left:
        before = AFTER_CPU_SECONDS.format(seconds=rng.uniform(0, 25), number=int(left[-1]))
        done = run_program("minirl.py", *flags, cwd=place, before=before,
                           env=dict(TMPDIR=tmp_path))
        if done.returncode == 0:  # it was over before: from the beginning
            shutil.rmtree(run)
            continue
        assert done.returncode in (-left[-1], 128 + left[-1]), done.stdout
        assert "Traceback" not in done.stdout, done.stdout
        assert not run.exists() or len(folders.checkpoints(run)) <= 3
        left.pop()
    program(place, 0, *flags)
    assert whole_runs.difference(run, reference, 6) == ""
    assert len(folders.checkpoints(run)) == 2 and not list(run.glob("**/.*.writing"))
    others = ("torchinductor_", "vllm_dist_")  # torch's cache; vLLM's, of 2 KB, after a kill -9
    while [file for file in tmp_path.iterdir() if not file.name.startswith(others)]:
        time.sleep(0.02)  # a grader's folder goes with it, once it has seen the end


ENGINE_HANGS = """
import pathlib, time; from parts import engine
real, hanging = engine.Engine.step, pathlib.Path("hanging")
log = pathlib.Path("runs/evil/metrics.jsonl")
def step(self):
    while log.exists() and len(log.read_text().splitlines()) == 3:
        hanging.touch()
        time.sleep(0.01)
    return real(self)
engine.Engine.step = step
"""


def wait_for(process, is_so):
    while not is_so():
        assert process.poll() is None, process.text()
        time.sleep(0.02)


@engine_test
def test_a_hanging_engine_hostile_rows_and_sigterm(place):
    """A data set that nobody can solve, with escape sequences in it: the run ends by itself. Told
    to go on, it meets an engine that hangs in step 4; SIGTERM meanwhile.
    """
    rows = [dict(problem=f"{i}+{i}{ESCAPE}", answer=str(10**6 + i)) for i in range(1, 30)]
    (place / "evil.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--name", "evil", "--data", "evil.jsonl", *whole_runs.SMALL, "--steps", "1000", "--N",
             "1", "--eval-every", "100"]
    log = place / "runs/evil/metrics.jsonl"
    hopeless = program(place, 1, *flags)
    assert "so this run ends after step 1: " in hopeless and "--max-tokens 24" in hopeless
    assert "same: --resume --train-anyway" in hopeless and "step 1 (gold '1000" in hopeless

    process = Program("minirl.py", *flags, "--resume", "--train-anyway", cwd=place,
                      before=ENGINE_HANGS)
    wait_for(process, (place / "hanging").exists)
    text = program(place, 1, "--name", "evil", "--resume")  # meanwhile somebody else
    assert "Cannot use runs/evil (another program is writing to it)" in text, text
    process.send_signal(signal.SIGUSR1)
    wait_for(process, lambda: "in train_step" in process.text().partition("Current thread")[2])
    process.send_signal(signal.SIGTERM)
    code, out = process.wait(), process.text()
    assert code == 128 + signal.SIGTERM, out
    assert "stopped; everything up to step 3 is saved: continue with --resume" in out, out
    assert out.count("Thread 0x") >= 2 and "in sample" in out.partition("Current thread")[2]
    assert repr(ESCAPE)[1:-1] in hopeless
    assert not any(sign in hopeless + out for sign in ("\x1b]", "\x07", "\x1b[2J", "\x9b"))
    metrics = whole_runs.rows(log)
    assert len(metrics) == 3  # the fourth was only being sampled: it will be sampled again
    assert all((row["zero_signal"], row["optimizer_steps"]) == (1, 0) and "loss" not in row
               for row in metrics)
    assert folders.checkpoints(place / "runs/evil")[-1].name == "step-000003"


# -------------------------------------------------------------------------- one engine, many faults
@pytest.fixture(scope="module")
def run(place):
    """A run before its first step, in this process, with adapters swapped into the engine."""
    from rewards import Grader

    config = resolve(Config(name="inside", sync="adapter", batch_prompts=4, max_tokens=16,
                            eval_questions=4, steps=1000, N=2))
    back = os.getcwd()
    os.chdir(place)
    try:
        with Grader(1) as grader:
            made = running.prepare(config, grader)
            yield made
    finally:
        os.chdir(back)


def holdings():
    """What this process holds: (open files, threads, adapter folders, memory in GB)."""
    folders = sum(len(list(Path(where).glob("minirl-adapter-*")))
                  for where in ("/dev/shm", os.environ.get("TMPDIR", "/tmp")))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), folders, machine.memory_gb()


@engine_test
def test_steps_and_new_shapes_leave_nothing_behind(run):
    """`MEMORY_STEPS=300` for the long version."""
    steps, seen = int(os.environ.get("MEMORY_STEPS", 32)), []
    for step in range(1, steps + 1):
        groups, metrics = minirl.train_step(step, run)
        running.log(step, groups, metrics, run)
        if step in (steps // 4, steps):
            seen.append(holdings())
    (files, threads, folders, memory), (files_end, threads_end, folders_end, memory_end) = seen
    assert files_end <= files + 2 and threads_end <= threads + 1, seen
    assert memory_end < 1.03 * memory, seen
    assert folders_end <= folders + 1  # others may be running on this machine
    # Every number of running requests is another shape: another kernel that oneDNN keeps.
    ids, seen = run.held_out[0].prompt_ids, []
    for count in range(1, 131):
        run.engine.generate([ids], n=count, max_tokens=2)
        if count in (60, 130):
            run.engine.sync(run.policy)
            seen.append(machine.memory_gb())
    assert seen[1] < 1.02 * seen[0], seen


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(tmp_path):
    """A torch that takes for ever to import stands in for one that takes seconds."""
    (tmp_path / "torch.py").write_text("import time; print('importing', flush=True)\n"
                                       "while True: time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, ROOT / "minirl.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | dict(PYTHONPATH=str(tmp_path)))
    said = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert said == "importing\n" and process.communicate()[0] == ""
    assert process.returncode == -signal.SIGINT
