"""Grades a lab: points, and for what is wrong the smallest counterexample, in numbers.

    python course/check.py 3              # course/labs/lab_3.py
    python course/check.py 3 my/file.py   # another file with the same functions
    python course/check.py all            # every lab, a line each
    python course/check.py all class/*    # a folder per student, in each lab_1.py, lab_2.py ...
    python course/check.py 3 class/*      # one lab of everybody's

Your function is put in the place of the project's, and the project is asked. There is no stored
solution: what is checked is mathematics (exact expectations, brute force, autograd) or follows from
the function's docstring. Ends with code 0 if all points are there.
"""
import argparse
import contextlib
import functools
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from course import place  # noqa: E402
from course.checks import Wrong, spelled  # noqa: E402

SECONDS = 6  # of CPU time per check; the slowest needs one


class Overtime(BaseException):
    """Not an Exception, so that a student's `except Exception` cannot catch it."""


class Result(NamedTuple):
    points: int
    title: str
    problem: str  # "" = passed


def grade(lab: str, functions: dict, file: Path | None = None) -> list[Result]:
    """Every check of a lab, with these functions in the place of the project's."""
    checks = importlib.import_module(f"course.checks.{lab}").CHECKS
    calls = Calls()
    watched = {name: calls.watch(name, function) for name, function in functions.items()}
    with place.in_place(lab, watched):
        return [Result(points, check.__doc__.splitlines()[0],
                       problem_of(check, watched, calls, file)) for points, check in checks]


class Calls:
    """Remembers the last call, to say what it was that raised or never returned."""

    def __init__(self):
        self.last = ""

    def watch(self, name: str, function):
        @functools.wraps(function)
        def watched(*args, **kwargs):
            before, self.last = self.last, (name, args, kwargs)
            result = function(*args, **kwargs)
            self.last = before
            return result
        return watched

    def __str__(self):
        name, args, kwargs = self.last
        said = [*map(spelled, args), *(f"{key}={spelled(value)}" for key, value in kwargs.items())]
        return f"{name}({', '.join(said)})"


def problem_of(check, functions: dict, calls: Calls, file: Path | None) -> str:
    """What is wrong, in words; "" if nothing is."""
    calls.last = ("the check", (), {})
    try:
        with time_limit(SECONDS):
            check(functions)
    except Wrong as found:
        return str(found)
    except NotImplementedError:
        return f"{calls.last[0]} is not written yet"
    except Overtime:
        return f"{calls}: no answer after {SECONDS} seconds of computing. Does a loop never end?"
    except Exception as error:
        line = place.line_in(file, error) if file else None
        where = f"\nThat was in line {line} of {file.name}." if line else ""
        return f"{calls} raised {type(error).__name__}: {str(error)[:300]}{where}"
    return ""


@contextlib.contextmanager
def time_limit(seconds: float):
    """Raises Overtime inside after so much CPU time, and again every second until it is heard."""
    def over(*_):
        raise Overtime

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def show(results: list[Result]) -> None:
    for points, title, problem in results:
        print(f"  {0 if problem else points}/{points}  {title}")
        if problem:
            print("       " + problem.replace("\n", "\n       "))


def score(results: list[Result]) -> str:
    reached = sum(result.points for result in results if not result.problem)
    return f"{reached} of {sum(result.points for result in results)} points"


def in_detail(lab: str, file: Path) -> bool:
    """Prints every check of a lab, and says whether all points are there."""
    results = grade(lab, place.load(lab, file), file)
    print(importlib.import_module(f"course.checks.{lab}").__doc__.splitlines()[0])
    show(results)
    print(score(results))
    return not any(result.problem for result in results)


def in_a_line(lab: str, file: Path, name: str) -> bool:
    """The same in one line. A file that cannot be read is no reason to leave out the others."""
    try:
        with time_limit(SECONDS):
            functions = place.load(lab, file)
    except (SystemExit, Overtime) as reason:
        print(f"{name}: 0 points. {reason or 'It computes without end when it is read.'}")
        return False
    results = grade(lab, functions, file)
    print(f"{name}: {score(results)}")
    return not any(result.problem for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description="Points for labs.")
    parser.add_argument("lab", help="its number, or all")
    parser.add_argument("files", nargs="*", type=Path, metavar="file",
                        help="files, or folders with lab_N.py in them; default: course/labs")
    args = parser.parse_args()
    labs = list(place.HOMES) if args.lab == "all" else [f"lab_{args.lab.removeprefix('lab_')}"]
    paths = args.files or [place.LABS]
    complete = True
    for path in paths:
        for lab in labs:
            file = (path / f"{lab}.py" if path.is_dir() else path).resolve()
            if len(labs) == len(paths) == 1:
                complete = in_detail(lab, file)
            else:
                name = lab if len(paths) == 1 else f"{path.name} {lab}"
                complete = in_a_line(lab, file, name) and complete
    raise SystemExit(0 if complete else 1)


if __name__ == "__main__":
    main()
