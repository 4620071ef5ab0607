"""--reward FILE.py:FUNCTION: a completion is worth what a function of one's own returns.

    def score(problem: dict, completion: str) -> float

`problem` is the row of the data file with all its columns, as JSON gives it back; the reward is any
finite number. The function runs in worker processes with the limits of math-verify: 1.5 s of CPU
time, 4 s of waiting, 1 GB of memory, an empty folder, no secrets of the environment.

It must be pure: the same row and completion have the same reward. So a verdict is remembered, and a
resumed run draws and judges again what it would have judged. For the same reason the file must not
change during a run: a worker that is started later compares its hash.

A call without a number has a status of its own: raised (an exception), no_number (None, NaN, an
infinity, a text, more than a million), timeout, killed (out of memory, or died twice). Its reward
is NaN, which ada_sampler.without_verdict replaces, so that nobody gains by breaking the function.
"""
import functools
import inspect
import math
import numbers
import os
import traceback
from concurrent.futures import Future
from pathlib import Path

from parts.files import digest_of, shown
from parts.grader import NO_VERDICT, Verdict, WorkerPool, load_function

LARGEST = 1e6       # of a reward's size: sums and squares of it must stay far from overflow
PATIENCE = 16       # verdicts: if the first so many all fail, the function is broken
TRIED = 3           # problems on which it is tried before the engine starts


# ------------------------------------------------------------------------------- in the worker
def judge(name: str, digest: str, *question) -> tuple[str, str]:
    """(status, why) of a row and a completion; status "scored" has the number as its `why`.

    Without a question: can the function be called?
    """
    function, wrong = load(name, digest)
    if wrong or not question:
        return ("unusable", wrong) if wrong else ("loaded", "")
    try:
        value = function(*question)
        number = as_number(value)
        if number is None:
            return "no_number", f"it returned {value!r}"[:200]
        return "scored", repr(number)
    except MemoryError:
        raise
    except BaseException as error:
        return "raised", explain(error, name)


@functools.cache
def load(name: str, digest: str) -> tuple:
    """(the function, what is wrong with it: "" if nothing is)."""
    path, _, function = name.rpartition(":")
    try:
        if digest_of(path) != digest:
            return None, "the file was changed after the start: put it back"
        found = load_function(name)
        return found, misfit(found)
    except AttributeError as error:
        if error.name == function and getattr(error.obj, "__file__", "") == path:
            return None, f"the file has no {function}"
        return None, explain(error, name)
    except BaseException as error:
        return None, explain(error, name)


def misfit(function) -> str:
    """Why it cannot be called with (problem, completion); "" if it can."""
    if not callable(function):
        return f"it is no function but {type(function).__name__}"
    try:
        signature = inspect.signature(function)
        signature.bind({}, "")
    except TypeError as error:
        return f"it must take (problem, completion): {error}"
    except ValueError:  # a builtin that does not tell
        return ""
    if list(signature.parameters)[0].startswith("completion"):
        return "it must take (problem, completion), in this order"
    return ""


def explain(error: BaseException, name: str) -> str:
    """The exception and the last line of the user's file that it went through."""
    path = name.rpartition(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename == path]
    words = text_of(error)
    if isinstance(error, SyntaxError) and error.filename == path:
        lines, words = [error.lineno], error.msg
    where = f"line {lines[-1]} of " if lines else ""
    return f"{type(error).__name__}: {words[:200]} ({where}{os.path.basename(path)})"


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "its text cannot be shown"


def as_number(value) -> float | None:
    """A finite float of bearable size; True is 1. None for what is none."""
    if hasattr(value, "item"):  # numpy, torch
        value = value.item()
    if not isinstance(value, numbers.Real) or not abs(value) <= LARGEST:  # NaN is not either
        return None
    return float(value)


# --------------------------------------------------------------------------- its parent's view
def require_function(name: str) -> None:
    """Raises SystemExit unless it is "" or names a function of a file that exists."""
    path, _, function = name.rpartition(":")
    if name and not (path.endswith(".py") and function.isidentifier()):
        raise SystemExit(f"--reward takes FILE.py:FUNCTION, not {shown(name)}.")
    if name and not os.path.isfile(os.path.expanduser(path)):
        raise SystemExit(f"--reward: there is no file {shown(path)}.")


class OwnReward(WorkerPool):
    """Asks FILE.py:FUNCTION. A reward above `threshold` has the status correct, others wrong.

    Raises SystemExit, one sentence, where there is no such file or function, or where it cannot be
    loaded or called.
    """

    def __init__(self, name: str, threshold: float, workers: int = 2, timeout: float = 4.0,
                 memory_gb: float = 1.0):
        require_function(name)
        path, _, function = name.rpartition(":")
        file = Path(path).expanduser().absolute()
        self.called, self.threshold = name, threshold
        self.function = [f"{file}:{function}", digest_of(file)]
        self.failed = 0  # calls without a number so far; None once there was one with a number
        super().__init__(f"{__file__}:judge", self.function, workers, timeout, memory_gb)
        state = self.ask(*self.function).result()
        if state.status != "loaded":
            self.close()
            raise SystemExit(f"--reward {shown(name)} cannot be used: {shown(state.why, 400)}.")

    def settle(self, row: dict, completion: str, style: str = "") -> Future:
        """The verdict to come. `style` is the verifier's and means nothing here."""
        return self.ask(*self.function, row, completion)

    def verdict(self, status: str, why: str, seconds: float) -> Verdict:
        if status != "scored":
            return Verdict(math.nan, status, seconds, why)
        reward = float(why)
        return Verdict(reward, "correct" if reward > self.threshold else "wrong", seconds)

    def result(self, key) -> Verdict:
        """Wait for the verdict of `key`, and forget the key.

        Raises SystemExit if the function fails on everything at the start, RuntimeError if its
        file was changed.
        """
        found = super().result(key)
        if found.status == "unusable":
            raise RuntimeError(f"--reward {shown(self.called)} cannot be used: {shown(found.why)}")
        if self.failed is None or found.status not in NO_VERDICT:
            self.failed = None
            return found
        self.failed += 1
        if self.failed == PATIENCE:
            raise SystemExit(f"--reward {shown(self.called)} gave no number for any of the first "
                             f"{PATIENCE} completions: {shown(found.why, 400)}.")
        return found

    def try_out(self, problems: list) -> None:
        """Call it on a few problems with an empty completion, and say what it gives.

        It may fail on those, as a function that reads JSON would. Raises SystemExit if it takes
        too long on each, or its worker dies on each.
        """
        found = [self.settle(problem.row, "").result() for problem in problems[:TRIED]]
        failed = [verdict for verdict in found if verdict.status in NO_VERDICT]
        if len(failed) == len(found) and failed[0].status in ("timeout", "killed"):
            raise SystemExit(f"--reward {shown(self.called)} cannot be used, not even an empty "
                             f"completion has a reward: {shown(failed[0].why, 400)}.")
        if failed:
            print(f"reward: {shown(self.called)} gives no number for an empty completion: "
                  f"{shown(failed[0].why, 400)}")
        else:
            print(f"reward: {shown(self.called)} gives {found[0].reward:g} for an empty "
                  f"completion; above {self.threshold:g} is correct")
