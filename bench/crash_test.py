"""Kill real runs with SIGKILL, resume them, and compare the end with runs that were never touched.

    python bench/crash_test.py --kills 20                 # five minutes or more on a CPU

A run is killed five times, at moments drawn from the seed: while it starts or mends its logs
("start"), while a checkpoint is being written ("write"), anywhere in a step or an evaluation
("step"). After every death what is on the disk must be sound: no half checkpoint under a
checkpoint's name, the newest one equal to that of the untouched run at the same step, the logs up
to it equal too, no worker process left. At the end all numbers but times and memory, all samples,
all evaluations and the final adapter must be equal, bit by bit. A kill counts as equal when both
hold.
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
# what a run has to carry over differs: weights only, old log-probs and refills, estimates of
# earlier epochs
SETTINGS = {
    "balance, merge": [],
    "dapo, adapter, 2 mini-batches": ["--sampler", "dapo", "--sync", "adapter", "--mini-batches",
                                      "2"],
    "ada-est, 24 problems": ["--sampler", "ada-est", "--data", "few.jsonl"],
}
LOGS = "metrics.jsonl", "groups.jsonl", "eval.jsonl"


# ---------------------------------------------------------------------------------------- comparing
def rows(path: Path) -> list[dict]:
    """The whole rows of a log, without times and memory."""
    timed = ("tokens_per_second", "memory_gb")
    return [{key: value for key, value in row.items()
             if not key.startswith("seconds") and key not in timed}
            for row in read_rows(path)]


def difference(run: Path, reference: Path, step: int) -> str:
    """The first thing in which two runs differ up to `step`; empty if they are equal."""
    for log in LOGS:
        mine, other = ([row for row in rows(folder / log) if row["step"] <= step]
                       for folder in (run, reference))
        if log == "eval.jsonl" and mine == other[:-1] and other[-1]["step"] == step:
            continue  # an evaluation comes after the checkpoint of its step, and is made up for
        if mine != other:
            return f"{log} differs"
    names = [f"checkpoints/step-{step:06d}/{name}"
             for name in ("adapter_model.safetensors", "optimizer.pt")] if step else []
    return next((f"{name} differs" for name in names
                 if (run / name).read_bytes() != (reference / name).read_bytes()), "")


def examine(run: Path, reference: Path) -> tuple[int, str]:
    """What a death has left: (step of the newest checkpoint, what is wrong with it)."""
    complete = checkpoint.complete(run)
    for folder in complete:
        if problem := checkpoint.damage(folder):
            return 0, f"{folder.name}: {problem}"
    step = int(complete[-1].name[5:]) if complete else 0
    return step, difference(run, reference, step) if step else ""


# ------------------------------------------------------------------------------------------ killing
def start(cwd: Path, *flags: str) -> subprocess.Popen:
    with open(cwd / "out.txt", "w") as out:
        return subprocess.Popen([sys.executable, str(ROOT / "minirl.py"), "--resume", *flags],
                                cwd=cwd, stdout=out, stderr=out)


def finish(cwd: Path, *flags: str) -> None:
    if start(cwd, *flags).wait() != 0:
        raise SystemExit((cwd / "out.txt").read_text()[-5000:])


def wait_for_moment(process, run: Path, kind: str, rng: random.Random) -> None:
    """Return at the moment to kill, soon after something that can be seen from outside; or when the
    process has ended."""
    delay = dict(start=rng.uniform(0, 10), write=rng.uniform(0, 0.04), step=rng.uniform(0, 2))[kind]
    steps, fewest, seen = rng.choice((1, 2)), sys.maxsize, kind == "start"
    while not seen and process.poll() is None:
        if kind == "write":
            seen = any(run.glob("checkpoints/.*.writing"))
            time.sleep(0.001)
        else:
            logged = len(rows(run / "metrics.jsonl"))
            fewest = min(fewest, logged)  # the logs are cut back first
            seen = logged >= fewest + steps
            time.sleep(0.01)
    time.sleep(delay)


def kill(process) -> str:
    """SIGKILL to the main process alone, as the kernel does when memory is short. Returns what is
    wrong if its workers survive it."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    process.kill()
    process.wait()
    deadline = time.time() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        if time.time() > deadline:
            return f"worker processes have survived: {workers}"
        time.sleep(0.05)
    return ""


def strike(cwd: Path, reference: Path, flags: list[str], kind: str, rng: random.Random) -> str:
    """Start or resume the run `killed` and kill it at a moment of this kind. Returns what is wrong
    then; empty if nothing is."""
    run = cwd / "runs" / "killed"
    process = start(cwd, "--name", run.name, *flags)
    wait_for_moment(process, run, kind, rng)
    if process.poll() is not None:
        raise SystemExit("It ended before it could be killed:\n"
                         + (cwd / "out.txt").read_text()[-5000:])
    survivors = kill(process)
    half = len(list(run.glob("checkpoints/.*.writing/*")))
    step, problem = examine(run, reference)
    print(f"   {kind:5}  {len(rows(run / 'metrics.jsonl')):3} steps logged, newest checkpoint "
          f"{step:3}, {half} files of a half one: {survivors or problem or 'sound'}", flush=True)
    return survivors or problem


def torture(cwd: Path, reference: Path, flags: list[str], kinds: list[str],
            rng: random.Random) -> list[str]:
    """A run that is killed at moments of these kinds and then finished. Returns a problem per kill,
    empty if none."""
    shutil.rmtree(cwd / "runs" / "killed", ignore_errors=True)
    problems = [strike(cwd, reference, flags, kind, rng) for kind in kinds]
    finish(cwd, "--name", "killed", *flags)
    end = difference(cwd / "runs" / "killed", reference,
                     max(row["step"] for row in rows(reference / "metrics.jsonl")))
    print(f"   finished: {end or 'equal to the run that was never touched'}", flush=True)
    return [problem or end for problem in problems]


def workplace(folder: str) -> Path:
    """A folder with a data file so small that a short run sees every problem several times."""
    from parts.problems import chains

    lines = [json.dumps(dict(problem=p["problem"], answer=p["answer"]))
             for p in chains("train", 24)]
    (Path(folder) / "few.jsonl").write_text("\n".join(lines))
    return Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=16,
                        help="of every run, which is killed five times on its way")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, began, problems = random.Random(args.seed), time.time(), []
    with tempfile.TemporaryDirectory(prefix="crash-test-") as folder:
        for name, own in itertools.cycle(SETTINGS.items()):
            cwd = Path(folder, name.split(",")[0])
            flags = [*SMALL, "--steps", str(args.steps), *own]
            if not cwd.exists():  # the run to compare with; it keeps all its checkpoints
                cwd.mkdir()
                finish(workplace(cwd), "--name", "whole", "--keep-checkpoints", "1000", *flags)
            kinds = ["write", "write", "step", "step", "start"]
            rng.shuffle(kinds)
            print(name, flush=True)
            missing = args.kills - len(problems)
            problems += torture(cwd, cwd / "runs" / "whole", flags, kinds[:missing], rng)
            if len(problems) >= args.kills:
                break
    equal = problems.count("")
    print(f"{equal} of {len(problems)} equal, {time.time() - began:.0f} s")
    sys.exit(equal < len(problems))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
