"""Trains the tiny model twice, first with the project's functions and then with yours.

    python course/train.py --with lab_3                 # two runs, a minute or two
    python course/train.py --with lab_3 lab_5           # functions of several labs at once
    python course/train.py --with my/lab_3.py           # a file outside course/labs
    python course/train.py --with lab_1 --steps 60      # any flag of minirl.py, for both runs

Both runs have the same seed. If your functions do the same as the project's, all numbers agree,
often to the last digit. Otherwise the first step that differs is printed. The runs are
runs/course-own and runs/course-yours, each with its curves.png, and the next start replaces them.
"""
import argparse
import contextlib
import itertools
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from course import submission
from course.check import lab_and_file
from parts.files import read_rows

OWN, YOURS = (submission.ROOT / "runs" / f"course-{whose}" for whose in ("own", "yours"))
SHORT = "--steps 20 --batch-prompts 12 --eval-every 20 --eval-questions 60 --eval-k 4".split()
FLAGS = {  # flags with which a lab's functions make a difference
    "lab_4": ["--weighting", "log"],
    "lab_5": ["--mini-batches", "4"],
    "lab_6": ["--model", "tiny-moe", "--mini-batches", "2", "--replay", "r3"],
}
COMPARED = {  # the second is what lab 8's functions make
    "metrics.jsonl": ("samples", "reward_first_round", "reward_kept", "loss", "grad_norm",
                      "entropy_trained"),
    "eval.jsonl": ("avg", "ci_low", "ci_high", "pass")}


def written(labs: list[str]) -> dict:
    """lab -> the functions that are written. Names the others; SystemExit if none is written."""
    found = {}
    for lab, file in map(lab_and_file, labs):
        functions = submission.load(lab, file)
        found[lab] = {name: own for name, own in functions.items() if not submission.is_empty(own)}
        for name in functions.keys() - found[lab].keys():
            print(f"{lab}: {name} is not written yet, so the project's own is used")
    if not any(found.values()):
        raise SystemExit("Nothing to train with: write a function first.")
    return found


def flags_of(labs: list[str], rest: list[str]) -> list[str]:
    """Flags of minirl.py. A flag that is given twice has its last value: the user's are last."""
    return SHORT + [flag for lab in labs for flag in FLAGS.get(lab, [])] + rest


def run_both(found: dict, flags: list[str]) -> None:
    """Run with the project's functions in another process, then with the student's in this one."""
    import minirl
    from parts.config import parse
    from parts.log import say_how_to_resume

    if subprocess.run([sys.executable, "minirl.py", "--name", OWN.name, *flags]).returncode:
        raise SystemExit("The run with the project's functions failed: see above.")
    config = parse(["--name", YOURS.name, *flags])
    with contextlib.ExitStack() as stack:
        for lab, functions in found.items():
            stack.enter_context(submission.in_place(lab, functions))
        stack.enter_context(say_how_to_resume(config))
        minirl.main(config)


def first_difference(own: Path, yours: Path) -> str:
    for log, keys in COMPARED.items():
        rows = [read_rows(folder / log) for folder in (own, yours)]
        for (a, b), key in itertools.product(zip(*rows), keys):
            right, found = a.get(key), b.get(key)
            if right != found:
                numbers = isinstance(right, float) and isinstance(found, float)
                near = numbers and math.isclose(right, found, rel_tol=1e-5)
                how = " by rounding (a right function may add in another order)" if near else ""
                return (f"The runs part{how} at step {a['step']}: {key} is {found} with yours and "
                        f"{right} with the project's.")
    steps, done = (len(list(read_rows(folder / "metrics.jsonl"))) for folder in (own, yours))
    if done < steps:
        return f"The runs are the same, but yours ended after step {done}."
    return "The runs are the same, number for number."


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with the functions of a lab.")
    parser.add_argument("--with", dest="labs", nargs="+", required=True, metavar="lab_N")
    args, rest = parser.parse_known_args()
    found = written(args.labs)
    os.chdir(submission.ROOT)
    for folder in (OWN, YOURS):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        run_both(found, flags_of(list(found), rest))
    finally:  # also where your functions ended the run
        if (YOURS / "metrics.jsonl").exists():
            print(first_difference(OWN, YOURS))
            print("curves:", *sorted(Path("runs").glob("course-*/curves.png")))


if __name__ == "__main__":
    main()
