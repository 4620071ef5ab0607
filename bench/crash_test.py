"""Kill real runs with SIGKILL, resume them, and compare the end with runs that were never touched.

    python bench/crash_test.py --kills 20                 # five minutes or more on a CPU

A run is killed five times, at moments drawn from the seed: while it starts ("start"), while it
writes a checkpoint ("write"), or anywhere in a step or an evaluation ("step"). After every kill the
newest checkpoint and the logs up to it must equal those of the untouched run, and no worker process
may be left. At the end everything but times and memory must be equal, bit by bit. A kill counts as
equal when both hold.
"""
import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT

from parts import checkpoint
from parts.files import read_rows

SMALL = ["--batch-prompts", "8", "--max-tokens", "24", "--eval-questions", "6", "--eval-k", "2",
         "--eval-every", "3", "--checkpoint-every", "2", "--graders", "1"]
SETTINGS = {  # what a checkpoint has to hold: weights, old log-probs and refills, estimates
    "balance, merge": [],
    "dapo, adapter, 2 mini-batches": ["--sampler", "dapo", "--sync", "adapter",
                                      "--mini-batches", "2"],
    "ada-est, 24 problems": ["--sampler", "ada-est", "--data", "few.jsonl"],
}
KINDS = ["write", "write", "step", "step", "start"]
DELAY = dict(start=10, write=0.04, step=2)  # seconds, at most, from what is seen to the kill


# ---------------------------------------------------------------------------------------- comparing
def rows(path: Path) -> list[dict]:
    """The rows of a log, without times and memory."""
    timed = ("tokens_per_second", "memory_gb")
    return [{key: value for key, value in row.items()
             if not key.startswith("seconds") and key not in timed}
            for row in read_rows(path)]


def difference(run: Path, reference: Path, step: int) -> str:
    """The first thing in which two runs differ up to `step`; empty if they are equal."""
    for log in ("metrics.jsonl", "groups.jsonl", "eval.jsonl"):
        mine, other = ([row for row in rows(folder / log) if row["step"] <= step]
                       for folder in (run, reference))
        if log == "eval.jsonl" and mine == other[:-1] and other[-1]["step"] == step:
            continue  # an evaluation follows the checkpoint of its step; --resume makes up for it
        if mine != other:
            return f"{log} differs"
    for name in ("adapter_model.safetensors", "optimizer.pt") if step else ():
        file = f"checkpoints/step-{step:06d}/{name}"
        if (run / file).read_bytes() != (reference / file).read_bytes():
            return f"{file} differs"
    return ""


def examine(run: Path, reference: Path) -> tuple[int, str]:
    """(step of the newest checkpoint, what is wrong with it) after a kill."""
    found = checkpoint.complete(run)
    for each in found:
        problem = checkpoint.damage(each)
        if problem:
            return 0, f"{each.name}: {problem}"
    step = checkpoint.step_of(found[-1]) if found else 0
    return step, difference(run, reference, step) if step else ""


# ------------------------------------------------------------------------------------------ killing
def start(cwd: Path, *flags: str) -> subprocess.Popen:
    with open(cwd / "out.txt", "w") as out:
        return subprocess.Popen([sys.executable, str(ROOT / "minirl.py"), "--resume", *flags],
                                cwd=cwd, stdout=out, stderr=out)


def finish(cwd: Path, *flags: str) -> None:
    if start(cwd, *flags).wait() != 0:
        raise SystemExit((cwd / "out.txt").read_text()[-5000:])


def strike(cwd: Path, flags: list[str], kind: str, rng: random.Random) -> str:
    """Start or resume the run `killed`, kill it, and return what is wrong, or nothing."""
    run = cwd / "runs" / "killed"
    before = checkpoint.complete(run)
    seen = dict(start=lambda: True, step=lambda: checkpoint.complete(run) != before,
                write=lambda: any(run.glob("checkpoints/.*.writing")))[kind]
    process = start(cwd, "--name", run.name, *flags)
    while not seen() and process.poll() is None:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, DELAY[kind]))
    if process.poll() is not None:
        raise SystemExit("It ended before it could be killed:\n" + (cwd / "out.txt").read_text())
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    step, problem = examine(run, cwd / "runs" / "whole")
    deadline, survivors = time.time() + 10, children
    while survivors and time.time() < deadline:
        survivors = [pid for pid in children if Path(f"/proc/{pid}").exists()]
        time.sleep(0.05)
    problem = f"worker processes have survived: {survivors}" if survivors else problem
    print(f"   {kind:5}  newest checkpoint {step:3}: {problem or 'sound'}", flush=True)
    return problem


def torture(cwd: Path, flags: list[str], kinds: list[str], rng: random.Random) -> list[str]:
    """Kill a run at moments of these kinds, then finish it. Returns a problem or "" per kill."""
    run, reference = cwd / "runs" / "killed", cwd / "runs" / "whole"
    shutil.rmtree(run, ignore_errors=True)
    problems = [strike(cwd, flags, kind, rng) for kind in kinds]
    finish(cwd, "--name", run.name, *flags)
    end = difference(run, reference, rows(reference / "metrics.jsonl")[-1]["step"])
    print(f"   finished: {end or 'equal to the run that was never touched'}", flush=True)
    return [problem or end for problem in problems]


def workplace(folder: Path) -> Path:
    """A folder with a data file so small that a short run sees every problem several times."""
    from parts.problems import chains

    lines = [json.dumps(dict(problem=p["problem"], answer=p["answer"]))
             for p in chains("train", 24)]
    folder.mkdir(exist_ok=True)
    (folder / "few.jsonl").write_text("\n".join(lines))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=16, help="of every run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, began, problems = random.Random(args.seed), time.time(), []
    with tempfile.TemporaryDirectory(prefix="crash-test-") as folder:
        for name, own in itertools.cycle(SETTINGS.items()):
            if len(problems) >= args.kills:
                break
            print(name, flush=True)
            cwd, flags = Path(folder, name), [*SMALL, "--steps", str(args.steps), *own]
            if not cwd.exists():  # the run to compare with keeps all its checkpoints
                finish(workplace(cwd), "--name", "whole", "--keep-checkpoints", "1000", *flags)
            kinds = rng.sample(KINDS, len(KINDS))[:args.kills - len(problems)]
            problems += torture(cwd, flags, kinds, rng)
    equal = problems.count("")
    print(f"{equal} of {len(problems)} equal, {time.time() - began:.0f} s")
    sys.exit(equal < len(problems))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
