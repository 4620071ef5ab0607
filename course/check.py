"""Grades a lab, with the smallest counterexample in numbers for each mistake.

    python course/check.py 3              # course/labs/lab_3.py
    python course/check.py my/lab_3.py    # the name of the file says which lab it is
    python course/check.py 3 my/file.py   # a file with another name

Your functions run in a process of their own (course/submission.py). Here the project's functions
are replaced by messages to that process, and then the project is called. There is no stored
solution: the checks use exact expectations, brute force, autograd and the function's docstring. The
exit code is 0 if the file has all points.
"""
import argparse
import contextlib
import functools
import importlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from course import submission
from course.checks import Raised, Wrong, asked
from course.submission import HOMES, LABS, in_place
from parts.text import shown

MOST_SECONDS = 300  # by the clock, per file. A right one needs 0.1 to 6 s of processor time
MOST_BYTES = 2**24  # of an answer
LAB = r"(?i)lab[ _-]?([1-8])(?!\d)"  # in the name of a file
Result = namedtuple("Result", "points title problem")  # problem: "" = passed


# ------------------------------------------------------------------------------ the student's side
class Student:
    """The process at the other end of a channel: (name, args, kwargs) of a call -> its answer."""

    def __init__(self, channel: socket.socket):
        self.channel, self.end, self.unread = channel, time.monotonic() + MOST_SECONDS, b""

    def __call__(self, *call) -> dict:
        with contextlib.suppress(OSError):  # it has ended, and `answer` says so
            self.limit()
            self.channel.sendall(pickle.dumps(call).hex().encode() + b"\n")
        return self.answer()

    def answer(self) -> dict:
        """The next line that the process sends. Raises Wrong if none comes."""
        while b"\n" not in self.unread:
            self.limit()
            try:
                piece = self.channel.recv(2**16)
            except TimeoutError:
                raise Wrong(f"The file was stopped after {MOST_SECONDS} seconds.") from None
            except ConnectionError:
                piece = b""
            self.unread += piece
            if not piece or len(self.unread) > MOST_BYTES:
                raise Wrong("The code ended its process.")
        line, _, self.unread = self.unread.partition(b"\n")
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(reply := json.loads(line), dict):
                return reply
        raise Wrong("The code sent something else than an answer.")

    def limit(self) -> None:
        self.channel.settimeout(max(0.001, self.end - time.monotonic()))


@contextlib.contextmanager
def student(lab: str, file: Path, output: int = subprocess.DEVNULL):
    """A Student that has loaded the file. SystemExit, one sentence, if that is not possible."""
    ours, theirs = socket.socketpair()
    # A session of its own has no terminal, and can be killed with all that it started.
    process = subprocess.Popen(
        [sys.executable, submission.__file__, lab, file, str(theirs.fileno()),
         str(submission.SECONDS)], pass_fds=[theirs.fileno()], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    theirs.close()
    try:
        yield started(Student(ours), file)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        ours.close()


def started(answer_of: Student, file: Path) -> Student:
    """The same one, after its first line, which says whether the file could be loaded."""
    try:
        reply = answer_of.answer()
    except Wrong as error:
        raise SystemExit(f"{file}: {error}") from None
    if "wrong" in reply:
        raise SystemExit(shown(reply["wrong"], 1000))
    return answer_of


# ----------------------------------------------------------------------------------------- grading
def grade(lab: str, answer_of: Callable) -> Iterator[Result]:
    """Every check of a lab, where `answer_of` is a Student."""
    def ask(name: str, args: tuple, kwargs: dict):
        answer = answer_of(name, args, kwargs)
        if "wrong" in answer:
            raise Raised(str(answer["wrong"]), answer.get("kind"))
        return submission.decoded(answer["value"])

    checks, asked.ask = importlib.import_module(f"course.checks.{lab}").CHECKS, ask
    proxies = {name: functools.wraps(own)(getattr(asked, name))
               for name, own in submission.project_functions(lab).items()}
    with in_place(lab, proxies):
        for points, title, check, rows in checks:
            yield Result(points, title, problem_of(check, rows))


def problem_of(check, rows: list[tuple]) -> str:
    """What is wrong, in words; "" if nothing is."""
    try:
        for row in rows:
            check(*row)
        return ""
    except Wrong as found:
        return str(found)
    except Exception as error:
        return f"The check of what you return raised {submission.words_of(error)[:400]}"


def grade_file(lab: str, file: Path, say=print, output: int = 2) -> tuple[int, int]:
    """(points, of how many). Says every check, and the points last."""
    reached = total = 0
    with student(lab, file, output) as answer_of:
        say(importlib.import_module(f"course.checks.{lab}").__doc__)
        for points, title, problem in grade(lab, answer_of):
            reached, total = reached + points * (not problem), total + points
            say(f"  {0 if problem else points}/{points}  {title}")
            for line in problem.splitlines():
                say(f"       {shown(line, 1000)}")
    say(f"{reached} of {total} points")
    return reached, total


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
    reached, total = grade_file(*lab_and_file(args.lab, args.path))
    raise SystemExit(0 if reached == total else 1)


if __name__ == "__main__":
    main()
