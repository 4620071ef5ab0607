"""A student's file in a process of its own, where the checker calls its functions.

    python course/submission.py lab_3 FILE CHANNEL SECONDS      # started by course/check.py

The checker sends the name of a function and its arguments, and gets back plain values. It compares
them in its own process, so no object of the student's, such as one that is equal to everything,
ever meets an expected value.
"""
import builtins
import contextlib
import functools
import json
import os
import pickle
import pkgutil
import resource
import runpy
import signal
import socket
import sys
import traceback
from fractions import Fraction
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from course.checks import Wrong, called, scenes
from parts.text import shown

LABS = ROOT / "course" / "labs"
SECONDS = 6  # of CPU time per call, imports aside; the slowest needs one
MEMORY = 8 * 2**30  # bytes
HOMES = {  # lab -> its functions, each with the module (and class) that has the project's own
    "lab_1": {"bandit_gradient": "course.checks.scenes", "advantages": "ada_sampler"},
    "lab_2": {"response_states": "parts.logprobs", "token_logprobs": "parts.logprobs"},
    "lab_3": {"exit_test": "ada_sampler", "keep": "ada_sampler"},
    "lab_4": {"row_weights": "ada_sampler", "allocate_gvm": "ada_sampler"},
    "lab_5": {"importance_weight": "minirl", "objective": "minirl", "set_norms": "minirl"},
    "lab_6": {"hook": "parts.routing_replay:RoutingReplay",
              "agreement": "parts.routing_replay:RoutingReplay"},
    "lab_7": {"extract_answer": "rewards", "exact": "rewards"},
    "lab_8": {"pass_at_k": "parts.evaluation", "bootstrap": "parts.evaluation"},
}
ANSWERS = [ROOT / name for name in ("course/checks", "course/answers", "tests")]
PROCESSES = ("os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn", "os.system", "pty.",
             "subprocess.")
CHANGES = ("os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink",
           "os.truncate")


class Overtime(BaseException):
    """Not an Exception, so that a student's `except Exception` does not catch it."""


# ------------------------------------------------------------------------------ the file
def load(lab: str, file: Path | None = None, seconds: float = SECONDS) -> dict:
    """name -> function, from the lab's file. SystemExit, one sentence, for a file without them."""
    file = file or LABS / f"{lab}.py"
    if not file.is_file():
        raise SystemExit(f"There is no file {file}.")
    try:
        with time_limit(seconds):
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


def project_functions(lab: str) -> dict:
    return {name: vars(pkgutil.resolve_name(home))[name] for name, home in HOMES[lab].items()}


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


@contextlib.contextmanager
def time_limit(seconds: float):
    """Raises Overtime inside after so much CPU time, and then again every second.

    Imports are not counted, because torch and transformers can take longer than a whole answer.
    """
    def over(*_):
        raise Overtime(f"no answer after {seconds:g} seconds of computing. Does a loop never end?")

    signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        with mock.patch.object(builtins, "__import__", functools.partial(uncounted, __import__)):
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def uncounted(find, name: str, *args, **how):
    """An import. While a module is loaded, the clock of `time_limit` stands still."""
    if name in sys.modules:
        return find(name, *args, **how)
    left = signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        return find(name, *args, **how)
    finally:
        signal.setitimer(signal.ITIMER_PROF, *left)


# ------------------------------------------------------------------------------ a call
def answer(functions: dict, file: Path, seconds: float, name: str, args, kwargs) -> dict:
    """What the checker gets for a call: its value, or why there is none."""
    function = functions.get(name) or getattr(scenes, name)
    try:
        with time_limit(seconds):
            return dict(value=encoded(function(*args, **kwargs)))
    except Wrong as found:
        return dict(wrong=str(found))
    except BaseException as error:  # SystemExit, too
        call, *_ = getattr(error, "__notes__", ["The check of what you return"])  # the innermost
        if isinstance(error, NotImplementedError):
            return dict(wrong=f"{call.partition('(')[0]} is not written yet")
        line = line_in(file, error)
        where = f"\nThat was in line {line} of {file.name}." if line else ""
        return dict(wrong=f"{call} raised {words_of(error)[:400]}{where}",
                    kind=type(error).__name__)


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


def encoded(value):
    """The value for JSON. Of what is no plain value, only the name of its type is left."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()  # of a tensor or an array
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Fraction):
        return dict(fraction=f"{value.numerator}/{value.denominator}")
    if isinstance(value, tuple):
        return dict(tuple=[*map(encoded, value)])
    if isinstance(value, list):
        return [*map(encoded, value)]
    if isinstance(value, dict):
        return dict(dict=[[encoded(key), encoded(one)] for key, one in value.items()])
    return dict(other=type(value).__name__)


def decoded(value):
    """The opposite of `encoded`. Whatever the student's process sends becomes a plain value."""
    if isinstance(value, list):
        return [*map(decoded, value)]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "fraction":  # of two integers, because Fraction("1e999999999") takes for ever
        return Fraction(*map(int, inside.split("/")))
    if kind == "tuple":
        return tuple(map(decoded, inside))
    if kind == "dict":
        return {decoded(key): decoded(one) for key, one in inside}
    return type(str(inside)[:80], (), {})()  # equal to nothing else, and printed as its type


# ------------------------------------------------------------------------------ the process
def guard(event: str, args: tuple) -> None:
    """An audit hook, which Python calls before it opens or changes a file or starts a process.

    It keeps answers and project out of reach of what is easy. No hook stops somebody who tampers
    with Python itself, but whoever can do that has more work than the lab would have been.
    """
    if event.startswith(PROCESSES):
        raise PermissionError(f"a submission may not use {event}")
    if event == "open" or event in CHANGES:
        writes = event in CHANGES or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        named = args[:1] if event == "open" else args[:2]
        for path in [path for path in named if isinstance(path, str | bytes | os.PathLike)]:
            path = Path(os.path.realpath(os.fsdecode(path)))
            for folder in [ROOT] if writes else ANSWERS:
                if path.is_relative_to(folder):
                    raise PermissionError(f"a submission may not open or change {path}")


def start(lab: str, file: Path, channel: socket.socket, seconds: float) -> None:
    """Load the file and serve its functions, or send the sentence that says why not."""
    project_functions(lab)  # imports their modules, which may open files and start processes
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    sys.addaudithook(guard)
    try:
        functions = load(lab, file, seconds)
    except SystemExit as refused:
        channel.sendall(line_of(dict(wrong=str(refused))))
    else:
        serve(lab, functions, file, channel, seconds)


def serve(lab: str, functions: dict, file: Path, channel: socket.socket, seconds: float) -> None:
    """Answer calls until the checker ends. The first line only says that the file is loaded."""
    functions = {name: noted(own) for name, own in functions.items()}
    with in_place(lab, functions):
        channel.sendall(line_of({}))
        for request in channel.makefile("rb"):
            call = pickle.loads(bytes.fromhex(request.decode()))
            channel.sendall(line_of(answer(functions, file, seconds, *call)))


def line_of(reply: dict) -> bytes:
    return json.dumps(reply).encode() + b"\n"


if __name__ == "__main__":
    which, path, number, limit = sys.argv[1:]
    start(which, Path(path), socket.socket(fileno=int(number)), float(limit))
