"""Processes with limits judge what a model wrote: they may hang or die, and the trainer goes on.

    server     `python -m parts.grader FILE.py:FUNCTION`, a fresh interpreter, loads one function
               once: `rewards.judge`, or --reward's `score(problem, completion)`
    workers    its forks, one for each thread that asks, take one question after the other
    children   their forks alone read what a model wrote, each under `Limits`

**No verdict depends on what was asked before.** With --reward each question has a child of its own.
A fork costs more than most questions, so math-verify, of which only caches are left, judges several
in one child, with the limits of one. What it answers in time, a new child would too: all that its
caches can spare was computed within that time. Where it fails, a new child is asked.

A question without an answer has a status of NO_VERDICT (docs/rewards.md) and NaN as its reward:
the sampler (`fill_missing`) sees to it that no model gains by making its grader fail.

CPU time is limited, not the clock's: a busy machine must give the same verdicts as an idle one.
"""
import contextlib
import functools
import gc
import inspect
import json
import math
import numbers
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from parts.folder import NO_VERDICT, PART
from parts.text import shown

WORKERS = min(8, len(os.sched_getaffinity(0)))  # each judges one answer at a time
START_SECONDS = 60  # limit of CPU time, and of waiting, while a server loads its function
FILE_BYTES = 2 ** 20  # the largest file that a child can write
LARGEST = 1e6  # the largest reward: sums and squares of rewards must stay far from overflow
MOST_PARTS, LONGEST_NAME = 7, 40  # of a reward; curves.png has so many colours
PATIENCE = 16  # if so many first verdicts all fail, --reward's function is broken
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")  # no secrets
DETERMINED = {"PYTHONHASHSEED": "0", "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1",
              "OMP_NUM_THREADS": "1"}  # 64 threads of numpy would need 1 GB of stacks


class Verdict(NamedTuple):
    reward: float  # NaN with a status of NO_VERDICT
    status: str
    why: str = ""
    parts: dict[str, float] = {}  # {"reward/NAME": number}, if --reward's function names several


class Limits(NamedTuple):  # of a child
    cpu_seconds: float = 1.5  # honest answers take up to 0.3
    waiting_seconds: float = 15.0  # then it must be computing, or kept from it by others
    memory_gb: float = 1.0  # its data, with what the server has loaded
    keep: bool = False  # the child for more questions: its judge remembers nothing but caches


# ------------------------------------------------------------------------------- in the server
def serve(name: str, examples: list, own: bool, folder: str, limits: dict) -> None:
    """The life of a server: until its client has gone, which sends a socket for each worker.

    examples: questions that load what the judge imports late, and fill its caches once for all.
    own: it is the function of --reward. folder: where children may write.
    """
    client, limits, loaded = socket.socket(fileno=os.dup(0)), Limits(**limits), None
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # nothing else can read or write them by accident
        os.dup2(null, stream)
    try:
        while sent := socket.recv_fds(client, 1, 1)[1]:
            loaded = loaded or load_judge(name, examples, own, limits)
            with socket.socket(fileno=sent[0]) as theirs:
                if not os.fork():
                    client.close()
                    work(*loaded, limits, tempfile.mkdtemp(dir=folder), theirs)
        with contextlib.suppress(ChildProcessError):  # there is none left
            while True:
                os.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_judge(name: str, examples: list, own: bool, limits: Limits) -> tuple:
    """(`answer_of` it, ""), or (None, why it cannot be loaded). Sets what children inherit."""
    limit(resource.RLIMIT_DATA, int(limits.memory_gb * 2 ** 30))
    limit(resource.RLIMIT_CORE, 0)
    signal.setitimer(signal.ITIMER_PROF, START_SECONDS)
    try:
        found = load_file(name)
        if own and (refusal := why_unusable(found, name)):
            return None, refusal
        judge = found[name.rpartition(":")[2]]
        judge = functools.partial(score, judge, takes_raw(judge)) if own else judge
        for question in examples:
            judge(*question)
    except BaseException as error:
        return None, explain(error, name)
    signal.setitimer(signal.ITIMER_PROF, 0)
    limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    gc.freeze()  # a child's collector does not walk through, and so copy, what was loaded
    return functools.partial(answer_of, judge, name, limits), ""


def load_file(name: str) -> dict:
    """What the file of "path/to/file.py:function" defines. It may import its neighbours."""
    path = name.rpartition(":")[0]
    sys.path.insert(0, os.path.dirname(path))
    return runpy.run_path(path)


def limit(kind: int, most: int) -> None:
    """Set a limit of this process, or its hard limit if that is lower."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


# ------------------------------------------------------------------------------- in its workers
def work(judge, refusal: str, limits: Limits, folder: str, client: socket.socket) -> None:
    """The life of a worker: until its client closes the socket.

    First it says why the function cannot be loaded, or "". Then it answers each question. All are
    lines of JSON.
    """
    child = None
    try:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        client.sendall(json.dumps(refusal).encode() + b"\n")
        for question in client.makefile():
            answer = child.answer(question) if child else None
            if not answer or answer[0] in NO_VERDICT:
                enter_empty(folder)
                child = Child(judge, limits, client)
                answer = child.answer(question)
            if answer[0] in NO_VERDICT or not limits.keep:
                child = None
            client.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


def enter_empty(folder: str) -> None:
    """Make it the current folder, without what an earlier child has written."""
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder, 0o700)
    os.chdir(folder)


class Child:
    """A fork of its worker that judges one question, or several if `limits` allow it."""

    def __init__(self, judge, limits: Limits, client: socket.socket):
        self.limits, self.client = limits, client
        self.socket, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            self.socket.close()
            os.close(client.fileno())
            live(judge, limits, theirs)
        theirs.close()

    def answer(self, question: str) -> tuple[str, str]:
        """(status, why) of a question. After the last, and after one without a verdict, it ends."""
        with contextlib.suppress(OSError):  # it has gone
            self.socket.sendall(question.encode())
        ready = wait(self.limits.waiting_seconds, self.pid, self.socket, self.client)
        said = self.socket.recv(2 ** 18) if self.socket.fileno() in ready else b""
        # a second process of the child may answer too, but later
        status, why = json.loads(said.splitlines()[0]) if said else ("", "")
        if self.limits.keep and status not in ("", *NO_VERDICT):
            return status, why
        code = self.end()
        if status:
            return status, why
        if not ready:
            return "timeout", f"past the time limit of {self.limits.waiting_seconds:g} s"
        if code == -signal.SIGPROF:
            most = self.limits.cpu_seconds
            return "timeout", f"past the time limit of {most:g} s of computing"
        return "killed", f"its process {ending(code)}"

    def end(self) -> int:
        """With all that it has started. Returns its exit code."""
        self.socket.close()
        for kill in (os.kill, os.killpg):  # it may have left its group
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def live(judge, limits: Limits, worker: socket.socket) -> None:
    """The life of a child. SIGPROF ends it when its CPU time is used up, even inside C code."""
    try:
        os.setpgid(0, 0)
        limit(resource.RLIMIT_CPU, int(limits.cpu_seconds) + 1)  # for who stops the timer
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        for question in worker.makefile():
            worker.send(json.dumps(judge(question)).encode() + b"\n")
    finally:
        os._exit(1)


def answer_of(judge, name: str, limits: Limits, question: str) -> tuple[str, str]:
    """In a child: (status, why), whatever happens in the function that `name` names."""
    try:
        return judge(*json.loads(question))
    except MemoryError:
        return "killed", f"out of memory: it may take {limits.memory_gb:g} GB"
    except BaseException as error:
        return "raised", explain(error, name)


def explain(error: BaseException, name: str) -> str:
    """The exception, and the last line of the function's file that it went through."""
    path = name.rpartition(":")[0]
    told = traceback.TracebackException.from_exception(error)  # str(error) may raise
    lines = [frame.lineno for frame in told.stack if frame.filename == path]
    where = f"line {lines[-1]} of " if lines else ""
    hint = ("; a relative path does not start in your folder, so build it from Path(__file__)"
            if isinstance(error, FileNotFoundError) else "")
    return f"{type(error).__name__}: {str(told)[:200]} ({where}{os.path.basename(path)}{hint})"


def wait(seconds: float, pid: int, *streams) -> dict:
    """Until one of `streams` can be read or was closed; its file number is a key of the result.

    Empty if process `pid` is found waiting, too, after so many seconds. While it computes, or
    others keep it from a processor, only its limit of CPU time holds.
    """
    poll = select.poll()
    for stream in streams:
        poll.register(stream, select.POLLIN)
    while not (ready := poll.poll(1000 * seconds)):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "R":
            ready = poll.poll(0)  # or it waits since it has just answered
            break
    return dict(ready)


def ending(code: int) -> str:
    """How a process ended, in words; `code` is -N for signal N."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"


# --------------------------------------------------------------------------- its client's view
class ForkingGrader(contextlib.AbstractContextManager):
    """Asks a function in children of at most `workers`, from any thread. Use it in a `with`.

    Its server is no fork of a process that holds CUDA, and has no secrets. It leads a session: a
    terminal's Ctrl-C is for its client alone. It loads the function when something is asked.
    name, examples, own: see `serve`; limits: those of `Limits`.
    """

    def __init__(self, name: str, examples: list = (), own: bool = False, workers: int = WORKERS,
                 **limits: float):
        self.folder = tempfile.mkdtemp(prefix="rewards-")
        settings = dict(examples=examples, own=own, folder=self.folder,
                        limits=Limits(**limits)._asdict())
        environment = {key: os.environ[key] for key in INHERITED if key in os.environ}
        self.server, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "parts.grader", name, json.dumps(settings)], cwd=ROOT,
                stdin=theirs, start_new_session=True,
                env=environment | DETERMINED | {"TMPDIR": self.folder})
        self.pending, self.sockets, self.loaded = {}, [], False
        self.threads, self.here = ThreadPoolExecutor(workers), threading.local()

    def ask(self, *question) -> Future:
        """The verdict to come. A subclass answers here what needs no child."""
        return self.threads.submit(self.ask_worker, json.dumps(question))

    def ask_worker(self, question: str) -> Verdict:
        """In a thread: the verdict of its worker."""
        worker = self.worker()  # loading does not count against the limits
        try:
            worker.sendall(question.encode() + b"\n")
            return self.verdict(*json.loads(self.here.answers.readline()))
        except (OSError, ValueError):  # nobody reads or writes at the other end
            self.here.worker = None
            return self.verdict("killed", "the process that it was forked from has ended")

    def worker(self) -> socket.socket:
        """This thread's. RuntimeError, with the reason, if the function cannot be loaded."""
        if getattr(self.here, "worker", None):
            return self.here.worker
        worker, theirs = socket.socketpair()
        self.sockets.append(worker)
        with theirs, contextlib.suppress(OSError):  # the server has gone
            socket.send_fds(self.server, [b"+"], [theirs.fileno()])
        if not wait(START_SECONDS, self.process.pid, worker):
            raise RuntimeError(f"past the time limit of {START_SECONDS:g} s")
        self.here.answers = worker.makefile()
        line = self.here.answers.readline()
        refusal = json.loads(line) if line else f"its process {ending(self.process.wait())}"
        self.loaded = True
        if refusal:
            raise RuntimeError(refusal)
        self.here.worker = worker
        return worker

    def verdict(self, status: str, why: str) -> Verdict:
        """What a judge's answer is worth."""
        reward = math.nan if status in NO_VERDICT else float(status == "correct")
        return Verdict(reward, status, why)

    def submit(self, key, problem, rollout, **how) -> None:
        """Start judging this answer to `problem` and return at once.

        `key` is any hashable; `result` takes it later. What `ask` is given is `problem.judged_by`
        (the gold answer, or a row of the data for --reward) and `rollout.text`.
        """
        self.pending[key] = self.ask(problem.judged_by, rollout.text, **how)

    def result(self, key) -> Verdict:
        """Wait for the verdict of `key`, and forget the key."""
        return self.pending.pop(key).result()

    def grade(self, questions: list[tuple], **how) -> list[Verdict]:
        """The verdicts of many questions, in their order."""
        futures = [self.ask(*question, **how) for question in questions]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End all; what is being judged is "killed", what waits for it is cancelled."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.server.close()  # before the others: from now on no thread gets a new worker
        if not self.loaded:  # what it loads may hang
            self.process.kill()
        for worker in self.sockets:
            worker.shutdown(socket.SHUT_RDWR)
        self.threads.shutdown()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __exit__(self, *_):
        self.close()


# ------------------------------------------------------------- --reward: the user's own function
def require_function(name: str) -> None:
    """Raises SystemExit unless it is "" or names a function of a file that exists."""
    path, _, function = name.rpartition(":")
    if name and not (path.endswith(".py") and function.isidentifier()):
        raise SystemExit(f"--reward takes FILE.py:FUNCTION, not {shown(name)}.")
    if name and not os.path.isfile(os.path.expanduser(path)):
        raise SystemExit(f"--reward: there is no file {shown(path)}.")


def why_unusable(found: dict, name: str) -> str:
    """Why the function that `name` names cannot be called, as `found` in its file; "" if it can."""
    path, _, function = name.rpartition(":")
    if function not in found:
        others = [key for key, value in found.items() if inspect.isfunction(value)
                  and value.__module__ == found["__name__"]]
        return (f"{os.path.basename(path)} has no function {function}; "
                f"it has: {', '.join(others) or 'none'}")
    own = found[function]
    if not callable(own) or any(is_one(own) for is_one in (
            inspect.isclass, inspect.iscoroutinefunction, inspect.isgeneratorfunction,
            inspect.isasyncgenfunction)):
        return (f"{function} must be a plain function that returns the reward, and not a class, "
                "a generator or async")
    signature = inspect.signature(own)
    try:
        signature.bind({}, "", **dict(raw="") if takes_raw(own) else {})
        first_two = [*signature.parameters][:2]
        swapped = first_two[0].startswith("completion")
        fits = not swapped and not {"raw", "completions"} & {*first_two}
    except TypeError:
        fits = False
    return "" if fits else (f"it is called as {function}(problem, completion) or {function}"
                            f"(problem, completion, raw), not as {function}{signature}")


def takes_raw(function) -> bool:
    """Whether it has a third or later parameter named raw, for the text with special tokens."""
    return "raw" in [*inspect.signature(function).parameters][2:]


def score(function, with_raw: bool, problem: dict, completion: str, raw: str) -> tuple[str, str]:
    """In a child: ("scored", JSON of the reward and of its named parts), or status "no_number"."""
    value = function(problem, completion, **dict(raw=raw) if with_raw else {})
    named, parts, reward = isinstance(value, dict), {}, as_number(value)
    if named and 1 <= len(value) <= MOST_PARTS and all(map(is_name, value)):
        parts = {PART + name: as_number(number) for name, number in value.items()}
        reward = as_number(math.fsum(parts.values()))
    if not math.isnan(reward):
        return "scored", json.dumps([reward, parts])
    rule = (f" (a dict holds 1 to {MOST_PARTS} numbers, each and their sum at most {LARGEST:g} in "
            f"size, under names of 1 to {LONGEST_NAME} characters)") if named else ""
    return "no_number", f"it returned {value!r}"[:200] + rule


def as_number(value) -> float:
    """A reward as a float; NaN for what is no number, not finite, or over LARGEST in size."""
    number = value.item() if hasattr(value, "item") else value  # numpy, torch
    number = float(number) if isinstance(number, Decimal) else number
    if isinstance(number, numbers.Real) and abs(number) <= LARGEST:  # NaN is not
        return float(number) + 0.0  # True is 1, and -0.0 becomes 0.0
    return math.nan


def is_name(name) -> bool:
    """Whether a part of a reward can have this name, in logs and pictures."""
    return isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_NAME


def mean_parts(rows: list[dict]) -> dict[str, float]:
    """The mean of each part of the reward over rows that may hold some; one that lacks is 0."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith(PART))
    return {name: fmean(row.get(name, 0.0) for row in rows) for name in names}


class OwnReward(ForkingGrader):
    """Asks FILE.py:FUNCTION. A reward above `threshold` has the status correct, others wrong.

    Raises SystemExit, one sentence, if there is no such file or function, or if it cannot be loaded
    or called.
    """

    def __init__(self, name: str, threshold: float, workers: int = WORKERS, **limits: float):
        require_function(name)
        path, _, function = name.rpartition(":")
        file = os.path.abspath(os.path.expanduser(path))
        self.called, self.threshold = f"--reward {shown(name)}", threshold
        self.failed = 0  # verdicts without a number so far; None after the first number
        super().__init__(f"{file}:{function}", own=True, workers=workers, **limits)
        try:
            self.threads.submit(self.worker).result()
        except RuntimeError as error:
            self.close()
            raise SystemExit(f"{self.called} cannot be used: {shown(error, 400)}.") from None

    def submit(self, key, problem, rollout, style: str = "") -> None:
        """As above. `style` is the verifier's and means nothing here."""
        super().submit(key, problem, rollout, raw=rollout.raw)

    def ask(self, row: dict, completion: str, raw: str | None = None) -> Future:
        """The verdict to come. raw: the completion with special tokens; None if it has none."""
        return super().ask(row, completion, completion if raw is None else raw)

    def verdict(self, status: str, why: str) -> Verdict:
        if status != "scored":
            return super().verdict(status, why)
        reward, parts = json.loads(why)
        told = ", ".join(f"{key.removeprefix(PART)} {part:g}" for key, part in parts.items())
        return Verdict(reward, "correct" if reward > self.threshold else "wrong", told, parts)

    def result(self, key) -> Verdict:
        """As above. Raises SystemExit if the function has failed on everything at the start."""
        found = super().result(key)
        if self.failed is None or found.status not in NO_VERDICT:
            self.failed = None
            return found
        self.failed += 1
        if self.failed == PATIENCE:
            raise SystemExit(f"{self.called} gave no number for any of the first {PATIENCE} "
                             f"completions: {shown(found.why, 400)}.")
        return found


if __name__ == "__main__":
    serve(sys.argv[1], **json.loads(sys.argv[2]))
