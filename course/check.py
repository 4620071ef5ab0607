"""Grades a lab: points, and for each mistake the smallest counterexample, in numbers.

    python course/check.py 3              # course/labs/lab_3.py
    python course/check.py my/lab_3.py    # the name of the file says which lab it is
    python course/check.py 3 my/file.py   # a file with another name

Your function takes the place of the project's, and then the project is called. There is no stored
solution: the checks use exact expectations, brute force, autograd and the function's docstring. The
exit code is 0 if the file has all points.
"""
import argparse
import contextlib
import functools
import importlib
import os
import pkgutil
import re
import resource
import runpy
import signal
import sys
import traceback
from collections import namedtuple
from pathlib import Path
from typing import Iterator
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from course.checks import Wrong, called
from parts.text import shown

LABS = ROOT / "course" / "labs"
SECONDS = 6  # of CPU time per check; the slowest needs one
MOST_SECONDS = 120  # per file: ends sum(range(10**12)), which no signal reaches
Result = namedtuple("Result", "points title problem")  # problem: "" = passed
HOMES = {  # lab -> its functions, each with the module (and class) that has the project's own
    "lab_1": {"bandit_gradient": "course.checks.lab_1", "advantages": "ada_sampler"},
    "lab_2": {"response_states": "parts.logprobs", "token_logprobs": "parts.logprobs"},
    "lab_3": {"exit_test": "ada_sampler", "keep": "ada_sampler"},
    "lab_4": {"row_weights": "ada_sampler", "allocate_gvm": "ada_sampler"},
    "lab_5": {"importance_weight": "minirl", "objective": "minirl", "set_norms": "minirl"},
    "lab_6": {"hook": "parts.routing_replay:RoutingReplay",
              "agreement": "parts.routing_replay:RoutingReplay"},
    "lab_7": {"extract_answer": "rewards", "exact": "rewards"},
    "lab_8": {"pass_at_k": "parts.evaluation", "bootstrap": "parts.evaluation"},
}
LAB = r"(?i)lab[ _-]?([1-8])(?!\d)"  # in the name of a file


class Overtime(BaseException):
    """Not an Exception, so that a student's `except Exception` does not catch it."""


# -------------------------------------------------- a student's functions in place of the project's
def load(lab: str, file: Path | None = None) -> dict:
    """name -> function, from the lab's file. SystemExit, one sentence, for a file without them."""
    file = file or LABS / f"{lab}.py"
    if not file.is_file():
        raise SystemExit(f"There is no file {file}.")
    try:
        with time_limit(SECONDS):
            found = runpy.run_path(str(file), run_name=f"student_{lab}")
    except (Exception, SystemExit, Overtime) as error:
        line = getattr(error, "lineno", None) or line_in(file, error)
        raise SystemExit(f"{file}, line {line}: {shown(words_of(error), 400)}") from None
    for name in HOMES[lab]:
        if not callable(found.get(name)):
            raise SystemExit(f"{file} has no function {name}: restore it from the original.")
    return {name: found[name] for name in HOMES[lab]}


def words_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except (Exception, SystemExit, Overtime):  # its __str__ is the student's, too
        return f"{type(error).__name__}, which cannot be printed"


def line_in(file: Path, error: BaseException) -> int | None:
    """The last line of `file` that the error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((one.lineno for one in reversed(frames) if one.filename == str(file)), None)


def is_empty(function) -> bool:
    """Whether the function is only a docstring and `raise NotImplementedError`."""
    code = getattr(function, "__code__", None)  # a partial has none
    return code is not None and code.co_names == ("NotImplementedError",)


@contextlib.contextmanager
def in_place(lab: str, functions: dict):
    """The project uses these functions for a while, also where it had imported its own by name."""
    with contextlib.ExitStack() as stack:
        for name, new in functions.items():
            owner = pkgutil.resolve_name(HOMES[lab][name])
            old = vars(owner)[name]
            for place in (owner, *sys.modules.values()):
                if getattr(place, "__dict__", {}).get(name) is old:
                    stack.enter_context(mock.patch.object(place, name, new))
        yield


# ----------------------------------------------------------------------------------------- grading
def grade(lab: str, functions: dict, file: Path | None = None) -> Iterator[Result]:
    """Every check of a lab, with these functions in place of the project's."""
    checks = importlib.import_module(f"course.checks.{lab}").CHECKS
    with in_place(lab, {name: noted(function) for name, function in functions.items()}):
        for points, title, ask, rows in checks:
            yield Result(points, title, problem_of(ask, rows, file))


def noted(function):
    """The same function; an error that it raises says in which call."""
    @functools.wraps(function)
    def calling(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            error.add_note(called(function, *args, **kwargs))
            raise
    return calling


def problem_of(ask, rows: list[tuple], file: Path | None) -> str:
    """What is wrong, in words; "" if nothing is."""
    try:
        with time_limit(SECONDS):
            for row in rows:
                ask(*row)
        return ""
    except Wrong as found:
        return str(found)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        call, *_ = getattr(error, "__notes__", ["The check of what you return"])  # the innermost
        if isinstance(error, NotImplementedError):
            return f"{call.partition('(')[0]} is not written yet"
        line = line_in(file, error) if file else None
        where = f"\nThat was in line {line} of {file.name}." if line else ""
        return f"{call} raised {words_of(error)[:400]}{where}"


@contextlib.contextmanager
def time_limit(seconds: float):
    """Raises Overtime inside after so much CPU time, and then again every second."""
    def over(*_):
        raise Overtime(f"no answer after {seconds} seconds of computing. Does a loop never end?")

    signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def grade_file(lab: str, file: Path) -> bool:
    """Prints every check of the file, and its points last. Whether it has all of them."""
    functions = load(lab, file)
    print(importlib.import_module(f"course.checks.{lab}").__doc__)
    reached = total = 0
    for points, title, problem in grade(lab, functions, file):
        reached, total = reached + points * (not problem), total + points
        print(f"  {0 if problem else points}/{points}  {title}")
        for line in problem.splitlines():
            print(f"       {shown(line, 1000)}")
    print(f"{reached} of {total} points", flush=True)
    return reached == total


def lab_in(name: str) -> str | None:
    """The lab that the name of a file says, for example lab_3 for Lab3_ann.py."""
    found = re.search(LAB, name)
    return found and f"lab_{found[1]}"


def lab_and_file(word: str, path: Path | None = None) -> tuple[str, Path]:
    """The lab that is meant by its number, its name, or its file; SystemExit if none is."""
    lab = lab_in(f"lab_{word}" if word.isdigit() else Path(word).name)
    if not lab:
        raise SystemExit(f"Which lab is {word}? Give a number from 1 to {len(HOMES)}, or a file "
                         "that is called lab_N.py, for example lab_3.py.")
    if not path:
        is_name = word in (lab, lab[-1], f"{lab}.py") and not Path(word).is_file()
        path = LABS if is_name else Path(word)
    return lab, (path / f"{lab}.py" if path.is_dir() else path).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description="Points for a lab.")
    parser.add_argument("lab", help="its number, or its file with lab_N in the name")
    parser.add_argument("path", nargs="?", type=Path, help="the file, if its name is another one")
    args = parser.parse_args()
    raise SystemExit(0 if grade_file(*lab_and_file(args.lab, args.path)) else 1)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    main()
