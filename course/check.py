"""Grades a lab: points, and for each mistake the smallest counterexample, in numbers.

    python course/check.py 3              # course/labs/lab_3.py
    python course/check.py 3 my/file.py   # another file with the same functions
    python course/check.py all            # every lab, a line each
    python course/check.py all class/*    # a folder per student, with lab_1.py, lab_2.py ... in it
    python course/check.py 3 class/*      # one lab of every student
    python course/check.py all class/* --json > scores.jsonl    # the same for a program

Your function takes the place of the project's, and then the project is called. There is no stored
solution: the checks use mathematics (exact expectations, brute force, autograd) and the function's
docstring. The exit code is 0 if the file has all points.

Each file is graded in its own process, so what it changes, prints or ends stays there.
"""
import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
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
PATIENCE = 600  # seconds until a check that sleeps is given up


class Overtime(BaseException):
    """Not an Exception, so that a student's `except Exception` does not catch it."""


class Result(NamedTuple):
    points: int
    title: str
    problem: str  # "" = passed


def checks_of(lab: str) -> list[tuple]:
    """[(points, check)] of a lab."""
    return importlib.import_module(f"course.checks.{lab}").CHECKS


def title_of(check) -> str:
    return check.__doc__.splitlines()[0]


def grade(lab: str, functions: dict, file: Path | None = None) -> Iterator[Result]:
    """Every check of a lab, with these functions in place of the project's."""
    calls, checks = Calls(), checks_of(lab)  # what they import must still be the project's own
    watched = {name: calls.watch(function) for name, function in functions.items()}
    with place.in_place(lab, watched):
        for points, check in checks:
            yield Result(points, title_of(check), problem_of(check, calls, file))


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


# ---------------------------------------------------------------------- one file, one process
def grade_here(lab: str, file: Path, answers, quiet: bool) -> None:
    """Sends each Result, or one sentence if the file cannot be read; then None."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # its input() reads nothing
    if quiet:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    try:
        with time_limit(SECONDS):
            functions = place.load(lab, file)
    except (SystemExit, Overtime) as reason:
        answers.send(str(reason) or f"Reading {file} takes too long.")
    else:
        for result in grade(lab, functions, file):
            answers.send(result)
    sys.stdout.flush()  # what the student printed, before the end
    answers.send(None)


def grade_file(lab: str, file: Path, quiet: bool) -> tuple[list[Result], str]:
    """(results, ""), or ([], why there are none). A check without a result is not passed."""
    checks, answers = checks_of(lab), []  # imported here, once for all forks
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=grade_here, args=(lab, file, theirs, quiet))
    process.start()
    theirs.close()
    with contextlib.suppress(EOFError):
        while ours.poll(PATIENCE) and (answer := ours.recv()) is not None:
            answers.append(answer)
    process.kill()
    process.join()
    if answers and isinstance(answers[0], str):
        return [], answers[0]
    lost = "Its code ended the process, or never came back from a call."
    rest = [Result(points, title_of(check), lost) for points, check in checks[len(answers):]]
    return answers + rest, ""


# -------------------------------------------------------------------------------------- to print
def score(results: list[Result]) -> str:
    reached = sum(result.points for result in results if not result.problem)
    return f"{reached} of {sum(result.points for result in results)} points"


def show(lab: str, results: list[Result]) -> None:
    print(importlib.import_module(f"course.checks.{lab}").__doc__)
    for points, title, problem in results:
        print(f"  {0 if problem else points}/{points}  {title}")
        if problem:
            print("".join(f"       {shown(line, 1000)}\n" for line in problem.split("\n")), end="")
    print(score(results))


def as_json(student: str, lab: str, results: list[Result], reason: str) -> str:
    """One line. `problem` is "" for a check that passed and for a file that could be read."""
    checks = [dict(points=0 if problem else points, of=points, title=title, problem=problem)
              for points, title, problem in results]
    return json.dumps(dict(
        student=student, lab=lab, points=sum(check["points"] for check in checks),
        of=sum(points for points, _ in checks_of(lab)), problem=reason, checks=checks))


def main() -> None:
    parser = argparse.ArgumentParser(description="Points for labs.")
    parser.add_argument("lab", help="its number, or all")
    parser.add_argument("files", nargs="*", type=Path, metavar="file", default=[place.LABS],
                        help="files, or folders with lab_N.py in them; default: course/labs")
    parser.add_argument("--json", action="store_true",
                        help="a line of JSON for each student and lab")
    args = parser.parse_args()
    labs = list(place.HOMES) if args.lab == "all" else [f"lab_{args.lab.removeprefix('lab_')}"]
    if labs[0] not in place.HOMES:
        parser.error(f"there is no {labs[0]}: choose one of {', '.join(place.HOMES)}")
    alone, complete = len(labs) == len(args.files) == 1, True
    for path in args.files:
        for lab in labs:
            file = (path / f"{lab}.py" if path.is_dir() else path).resolve()
            results, reason = grade_file(lab, file, quiet=args.json or not alone)
            complete &= bool(results) and not any(result.problem for result in results)
            if args.json:
                print(as_json(path.name, lab, results, reason), flush=True)
            elif alone and results:
                show(lab, results)
            else:
                said = score(results) if results else f"0 points. {reason}"
                print(shown(f"{path.name} {lab}: {said}", 1000), flush=True)
    raise SystemExit(0 if complete else 1)


if __name__ == "__main__":
    main()
