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
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT

from parts import checkpoint

SMALL = ["--batch-prompts", "8", "--max-tokens", "24", "--eval-questions", "6", "--eval-k", "2",
         "--eval-every", "3",
         "--checkpoint-every", "2", "--graders", "1"]
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
    """The whole rows of a .jsonl file, without times and memory;
    the half line of a crash is left out."""
    found = []
    for line in path.read_text(encoding="utf-8",
                               errors="replace").split("\n") if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found.append({key: value for key, value in row.items()
                      if not key.startswith("seconds")
                      and key not in ("tokens_per_second", "memory_gb")})
    return found


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


def children(pid: int) -> list[int]:
    try:
        return [int(child)
                for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


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


def kill(process, run: Path, kind: str) -> str:
    """SIGKILL to the main process alone, as the kernel does when memory is short.
    Returns where it was."""
    workers = children(process.pid)
    # SIGUSR1 shows where it is; while it starts, or within a write, that would take too long
    if kind == "step":
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.03)
    process.kill()
    process.wait()
    deadline = time.time() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        if time.time() > deadline:
            raise SystemExit(f"worker processes have survived: {workers}")
        time.sleep(0.05)
    if kind == "start":
        return "starting"
    if kind == "write":
        writing = list(run.glob("checkpoints/.*.writing/*"))
        return f"writing, files so far: {len(writing)}" if writing else "just after a write"
    stack = (run.parents[1] / "out.txt").read_text(errors="replace").rpartition("Current thread")[2]
    names = re.findall(r'/(?:minirl|run|logs|checkpoint|eval|plot)\.py", line \d+ in (\w+)', stack)
    return " > ".join(name for name in reversed(names)
                      if name not in ("main", "<module>")) or "between two steps"


def strike(cwd: Path, reference: Path, flags: list[str], kind: str, rng: random.Random) -> str:
    """Start or resume the run `killed` and kill it at a moment of this kind. Returns what is wrong
    then; empty if nothing is."""
    run = cwd / "runs" / "killed"
    process = start(cwd, "--name", run.name, *flags)
    wait_for_moment(process, run, kind, rng)
    if process.poll() is not None:
        raise SystemExit("It ended before it could be killed:\n"
                         + (cwd / "out.txt").read_text()[-5000:])
    where = kill(process, run, kind)
    step, problem = examine(run, reference)
    print(f"   {kind:5}  {len(rows(run / 'metrics.jsonl')):3} steps logged, newest checkpoint "
          f"{step:3}, {where}: "
          f"{problem or 'sound'}", flush=True)
    return problem


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


def untouched(cwd: Path, flags: list[str]) -> Path:
    """The run to compare with; it keeps all its checkpoints."""
    finish(cwd, "--name", "whole", "--keep-checkpoints", "1000", *flags)
    return cwd / "runs" / "whole"


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
    rng, began, problems, turn = random.Random(args.seed), time.time(), [], 0
    references = {name: None for name in SETTINGS}
    folders = {name: tempfile.TemporaryDirectory(prefix="crash-test-") for name in SETTINGS}
    while len(problems) < args.kills:
        name = list(SETTINGS)[turn % len(SETTINGS)]
        flags, cwd = [*SMALL, "--steps", str(args.steps),
                      *SETTINGS[name]], workplace(folders[name].name)
        references[name] = references[name] or untouched(cwd, flags)
        kinds = ["write", "write", "step", "step", "start"]
        rng.shuffle(kinds)
        print(f"run {turn + 1} ({name})", flush=True)
        problems += torture(cwd, references[name], flags, kinds[:args.kills - len(problems)], rng)
        turn += 1
    equal = problems.count("")
    print(f"{equal} of {len(problems)} equal, {time.time() - began:.0f} s")
    sys.exit(equal < len(problems))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
