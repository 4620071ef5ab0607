"""Each fault of docs/runs.md is really produced: what stays on the disk, what the user reads."""
import contextlib
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import world
from helpers import HANG, ROOT, SMALL, run_program
from parts import evaluation, run_folder


# ------------------------------------------------------------------- any phase, in the small world
class Fault(BaseException):
    """Which nobody catches."""


MIDDLE, END = 1 / 2, 1
PHASES = {  # what is called in it, when it fails, and a run that has much to carry over
    "sampling": (world.Engine, "step", MIDDLE, dict(sampler="dapo", mini_batches=2)),
    "update": (torch.nn.utils, "clip_grad_norm_", MIDDLE,
               dict(sampler="ada-est", dtype="float16", batch_prompts=2, M=4)),
    "checkpoint": (os, "fsync", END, dict(
        sampler="gvm", dtype="bfloat16", warmup_steps=3, batch_prompts=2, M=4)),
    "evaluation": (evaluation, "as_row", END, dict(eval_data="builtin,builtin-skills"))}


def failing(owner, name: str, moment: int, folder: Path, **settings) -> int:
    """A run in which the `moment`-th call of a function raises: how many calls there were."""
    calls, real = itertools.count(1), getattr(owner, name)

    def called(*args, **how):
        if next(calls) == moment:
            raise Fault
        return real(*args, **how)

    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Fault):
        patch.setattr(owner, name, called)
        world.small_run(folder, log_groups="all", **settings)
    gc.collect()  # the run's lock goes with it, as with its process
    return next(calls) - 1


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_in_any_phase_costs_the_running_step_and_no_bit(phase, tmp_path):
    owner, name, when, settings = PHASES[phase]
    calls = failing(owner, name, 0, tmp_path / "whole", **settings)
    moment = int(when * calls)
    assert failing(owner, name, moment, tmp_path / "cut", **settings) == moment > 0
    again = world.small_run(tmp_path / "cut", resume=True, log_groups="all", **settings)
    assert world.difference(again, tmp_path / "whole/runs/mine", step=3) == ""


# --------------------------------------------------------------------------- real runs, real engine
FLAGS = [*SMALL, "--steps", "6"]


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


SMALL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))"
CUTS = [  # one start after the other: (how it ends, exit code, the last step that is saved then)
    (at(2, "parts.run_folder.save", signal.SIGKILL), -9, 1),  # the logs know a step more
    (at(1, "parts.policy.load_policy", signal.SIGKILL), -9, 1),  # while it starts
    (at(2, "torch.save", signal.SIGKILL), -9, 2),  # in the middle of a checkpoint
    (at(5, "parts.evaluation.as_row", signal.SIGTERM), 143, 3),  # in the evaluation after step 3
    (at(2, "torch.nn.utils.clip_grad_norm_", signal.SIGINT), 130, 4),  # in an update
    (SMALL_DISK, 1, 4),
]


@pytest.mark.engine
def test_a_run_that_is_cut_short_in_every_way_ends_as_if_it_had_never_been(tmp_path):
    """Each time `--name cut --resume` goes on, without another flag."""
    program = functools.partial(run_program, "minirl.py", cwd=tmp_path)
    program("--name", "whole", "--keep-every", "1", *FLAGS)
    run, reference = tmp_path / "runs/cut", tmp_path / "runs/whole"
    for number, (before, code, saved) in enumerate(CUTS):
        flags = ["--resume"] if number else FLAGS
        said = program("--name", "cut", *flags, before=before, code=code)
        assert run_folder.step_of(run_folder.checkpoints(run)[-1]) == saved
        assert world.difference(run, reference, saved, evaluated=False) == ""
        assert code < 0 or f"everything up to step {saved} is saved" in said, said
        if code < 0:
            for log in ("metrics.jsonl", "groups.jsonl"):
                with open(run / log, "a") as file:
                    file.write('{"step": 5, "rew')
    assert "continuing after step 4" in program("--name", "cut", "--resume")
    assert world.difference(run, reference, 6) == ""
    assert len(run_folder.checkpoints(run)) == 2 and not list(run.glob("**/.*.writing"))
    assert sum(row["optimizer_steps"] for row in world.rows(run / "metrics.jsonl")) >= 5


# ----------------------------------------------------------- what the shell has said at the start
SAID = "A standard stream is closed: redirect it to /dev/null.\n"


@pytest.mark.parametrize("program, closed, said", [
    ("minirl", ">&-", SAID), ("eval", "<&-", SAID), ("explore", "2>&-", "")])
def test_a_program_with_a_closed_stream_ends_at_once(program, closed, said):
    """What is printed would go into the next file that is opened."""
    ended = subprocess.run(f"{sys.executable} {ROOT / program}.py --help {closed}", shell=True,
                           text=True, capture_output=True, timeout=HANG)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", said)
