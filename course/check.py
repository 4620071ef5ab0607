"""Grades a lab: points, and for each mistake the smallest counterexample, in numbers.

    python course/check.py 3              # course/labs/lab_3.py
    python course/check.py 3 my/file.py   # another file with the same functions
    python course/check.py 3 class/ann    # lab_3.py of this folder

Your function takes the place of the project's, and then the project is called. There is no stored
solution: the checks use mathematics (exact expectations, brute force, autograd) and the function's
docstring. The exit code is 0 if the file has all points.
"""
import argparse
import contextlib
import functools
import importlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Iterator, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from course import place  # noqa: E402
from course.checks import Wrong, called  # noqa: E402
from parts.folder import shown  # noqa: E402

SECONDS = 6  # of CPU time per check; the slowest needs one
MOST_SECONDS = 120  # of CPU time per file: ends calls that no signal reaches, sum(range(10**12))


class Overtime(BaseException):
    """Not an Exception, so that a student's `except Exception` does not catch it."""


class Result(NamedTuple):
    points: int
    title: str
    problem: str  # "" = passed


def grade(lab: str, functions: dict, file: Path | None = None) -> Iterator[Result]:
    """Every check of a lab, with these functions in place of the project's."""
    checks = importlib.import_module(f"course.checks.{lab}").CHECKS  # imports the project's own
    calls = Calls()
    watched = {name: calls.watch(function) for name, function in functions.items()}
    with place.in_place(lab, watched):
        for points, check in checks:
            yield Result(points, check.__doc__.splitlines()[0], problem_of(check, calls, file))


class Calls:
    """Remembers the last call, to say which one raised or never returned."""

    def watch(self, function):
        @functools.wraps(function)
        def watched(*args, **kwargs):
            before, self.last = self.last, (function, args, kwargs)
            result = function(*args, **kwargs)
            self.last = before
            return result
        return watched

    def __str__(self):
        function, args, kwargs = self.last
        return called(function, *args, **kwargs)


def problem_of(check, calls: Calls, file: Path | None) -> str:
    """What is wrong, in words; "" if nothing is."""
    calls.last = (check, (), {})
    try:
        with time_limit(SECONDS):
            check()
    except Wrong as found:
        return str(found)
    except NotImplementedError:
        return f"{calls.last[0].__name__} is not written yet"
    except Overtime:
        return f"{calls}: no answer after {SECONDS} seconds of computing. Does a loop never end?"
    except BaseException as error:  # SystemExit too
        line = place.line_in(file, error) if file else None
        where = f"\nThat was in line {line} of {file.name}." if line else ""
        return f"{calls} raised {type(error).__name__}: {str(error)[:300]}{where}"
    return ""


@contextlib.contextmanager
def time_limit(seconds: float):
    """Raises Overtime inside after so much CPU time, and then again every second."""
    def over(*_):
        raise Overtime

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def grade_file(lab: str, file: Path) -> bool:
    """Prints every check of the file, and its points last. Whether it has all of them."""
    try:
        with time_limit(SECONDS):
            functions = place.load(lab, file)
    except Overtime:
        raise SystemExit(f"Reading {file} takes too long.") from None
    print(importlib.import_module(f"course.checks.{lab}").__doc__)
    reached = total = 0
    for points, title, problem in grade(lab, functions, file):
        reached, total = reached + points * (not problem), total + points
        print(f"  {0 if problem else points}/{points}  {title}")
        for line in problem.splitlines():
            print(f"       {shown(line, 1000)}")
    print(f"{reached} of {total} points", flush=True)
    return reached == total


def main() -> None:
    parser = argparse.ArgumentParser(description="Points for a lab.")
    parser.add_argument("lab", type=int, choices=range(1, len(place.HOMES) + 1), help="its number")
    parser.add_argument("path", nargs="?", type=Path, default=place.LABS,
                        help="a file, or a folder with lab_N.py in it; default: course/labs")
    args = parser.parse_args()
    lab, path = f"lab_{args.lab}", args.path.resolve()
    complete = grade_file(lab, path / f"{lab}.py" if path.is_dir() else path)
    raise SystemExit(0 if complete else 1)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    main()
