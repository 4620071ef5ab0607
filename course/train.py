"""Trains the tiny model with your functions in the place of the project's: two curves.

    python course/train.py --with lab_3                 # two real runs, a minute or two
    python course/train.py --with lab_3 lab_5           # functions of several labs at once
    python course/train.py --with lab_1 --steps 60      # any setting of minirl.py, for both runs

The same seed decides both runs. So where your functions do what the project's do, the curves are
the same, number for number, and where they part, the first step that differs is named. The runs
are runs/course-...; one that is made again replaces the old one.
"""
import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from course import place  # noqa: E402

SHORT = "--steps 20 --batch-prompts 12 --eval-every 20 --eval-questions 60 --eval-k 4".split()
FLAGS = {  # with what a lab's functions have something to do
    "lab_4": ["--weighting", "log"],
    "lab_5": ["--mini-batches", "4"],
    "lab_6": ["--mini-batches", "2"],
    "lab_7": ["--model", "tiny-moe", "--mini-batches", "2", "--replay", "r3"],
}
COMPARED = ("samples", "reward_first_round", "reward_kept", "loss", "grad_norm", "entropy_trained")


def written(labs: list[str]) -> dict:
    """lab -> the functions that have been written. Says which have not; SystemExit if none has."""
    found = {}
    for lab in labs:
        functions = place.load(lab)
        empty = [name for name, function in functions.items() if place.is_empty(function)]
        for name in empty:
            print(f"{lab}: {name} is not written yet, so the project's own is used")
        found[lab] = {name: own for name, own in functions.items() if name not in empty}
    if not any(found.values()):
        raise SystemExit("Nothing to train with: write a function first.")
    return found


def flags_of(labs: list[str], rest: list[str]) -> list[str]:
    """Flags of minirl.py; the later of two equal ones counts, so that the user's own do."""
    flags = dict(zip(SHORT[::2], SHORT[1::2]))
    for lab in labs:
        own = FLAGS.get(lab, [])
        flags |= dict(zip(own[::2], own[1::2]))
    return [part for pair in flags.items() for part in pair] + rest


def version() -> str:
    """A digest of the project's code: a run of other code is no comparison."""
    files = [file for pattern in ("*.py", "parts/*.py", "verifier/*.py")
             for file in place.ROOT.glob(pattern)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def run_own(flags: list[str]) -> Path:
    """The project's own run with these flags, made in a process of its own, once."""
    key = hashlib.sha256(" ".join([version(), *flags]).encode()).hexdigest()[:8]
    folder = place.ROOT / "runs" / f"course-own-{key}"
    if not (folder / "curves.png").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "minirl.py", "--name", folder.name, *flags]
        if subprocess.run(command, cwd=place.ROOT).returncode:
            raise SystemExit("The project's own run did not end well: see above.")
    return folder


def run_with(found: dict, flags: list[str]) -> Path:
    """A run with the student's functions, in this process."""
    import contextlib

    import minirl
    from parts.config import parse
    from parts.run import last_words

    folder = place.ROOT / "runs" / f"course-{'-'.join(found)}"
    shutil.rmtree(folder, ignore_errors=True)
    config = parse(["--name", folder.name, *flags])
    with contextlib.ExitStack() as stack:
        for lab, functions in found.items():
            stack.enter_context(place.in_place(lab, functions))
        stack.enter_context(last_words(config))
        minirl.main(config)
    return folder


def first_difference(own: Path, yours: Path) -> str:
    """Where the two runs part, in words."""
    rows = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (own, yours)]
    for a, b in zip(*rows):
        for key in COMPARED:
            if a.get(key) != b.get(key):
                return (f"The runs part at step {a['step']}: {key} is {b.get(key)} with yours and "
                        f"{a.get(key)} with the project's.")
    return "The runs are the same, number for number."


def draw(own: Path, yours: Path, out: Path) -> None:
    """Held-out accuracy and the first round's reward of both runs."""
    from matplotlib.figure import Figure

    from parts.plot import COLORS, draw_interval, label_panel, read_run, save, series, smooth

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for folder, color in ((own, COLORS[0]), (yours, COLORS[1])):
        run, label = read_run(folder), "the project's own" if folder == own else yours.name
        dashes = "-" if folder == own else "--"  # both show where they are one
        left.plot(*series(run["evals"], "avg"), dashes, color=color, label=label, marker="o")
        draw_interval(left, run["evals"], color)
        steps, rewards = series(run["metrics"], "reward_first_round")
        right.plot(steps, smooth(rewards), dashes, color=color)
    label_panel(left, "Held-out problems", "accuracy, 95 % interval")
    label_panel(right, "Reward of the first round", "share of answers that are correct")
    left.legend(frameon=False)
    save(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with the functions of a lab.")
    parser.add_argument("--with", dest="labs", nargs="+", required=True, metavar="lab_N")
    args, rest = parser.parse_known_args()
    os.chdir(place.ROOT)
    found = written(args.labs)
    flags = flags_of(args.labs, rest)
    own = run_own(flags)
    yours = run_with(found, flags)
    picture = yours / "both.png"
    draw(own, yours, picture)
    print(first_difference(own, yours))
    print(f"both curves: {picture.relative_to(place.ROOT)}")


if __name__ == "__main__":
    main()
