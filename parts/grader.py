"""Grades answers in processes with limits, so that no answer can stop a training run.

**Threat model: the text is hostile, but the judge is not.** The judge is the verifier or the user's
function (--reward), which may have mistakes. An answer of the model may make the judge compute for
ever, even inside C code, fill the memory or crash. This is no sandbox for programs of the model.

    worker   one per thread of the grader, `python -m parts.grader`: a fresh interpreter without
             CUDA and secrets. It loads the judge and handles questions (in JSON)
    fork     a child of a worker that judges one answer, with limits of memory, CPU time and clock
             time. The last is wide, so that a busy machine gives the same verdicts as an idle one
"""
import contextlib
import functools
import gc
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import tokenize
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from inspect import signature
from pathlib import Path
from statistics import fmean
from types import ModuleType, SimpleNamespace

from parts.text import shown

NO_VERDICT = ("timeout", "killed", "raised", "no_number")  # the grader failed, not the answer
PART = "reward/"  # precedes the name of a part of the reward in all logs
WORKERS = min(8, len(os.sched_getaffinity(0)))  # each judges one answer at a time
MEMORY_BYTES = 2 ** 30
LARGEST, MOST_PARTS = 1e6, 7  # of a reward: its square does not overflow; each part has a colour
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TMPDIR")  # no secrets
DETERMINED = {"PYTHONHASHSEED": "0", "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1",
              "OMP_NUM_THREADS": "1"}  # 64 threads of numpy would need 1 GB of stacks
ENDED = OSError, EOFError  # raised if the process at the other end is gone
OF_OTHERS = {"completions", "solution_str"}  # parameters of functions for TRL and verl


@dataclass
class Verdict:
    status: str
    why: str = ""
    reward: float = math.nan  # as it stays with a status of NO_VERDICT
    parts: dict[str, float] = field(default_factory=dict)  # {"reward/NAME": number}, if named

    def __post_init__(self):
        if math.isnan(self.reward) and self.status not in NO_VERDICT:  # the verifier gives none
            self.reward = float(self.status == "correct")


def lost(verdicts: dict[str, int]) -> int:
    """How many answers have no verdict, by the number of answers of each status."""
    return sum(verdicts.get(status, 0) for status in NO_VERDICT)


# ------------------------------------------------------------------------------------ in a worker
def serve() -> None:
    """The main loop of a worker. It ends when its client closes the socket that is its stdin."""
    client, nothing = Connection(os.dup(0)), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # a judge may read stdin
    how = SimpleNamespace(**json.loads(client.recv_bytes()))
    load(how)  # an error ends the worker with a traceback
    os.dup2(nothing, 2)  # from now on nothing is shown
    for question in how.examples:  # to fill the judge's caches
        how.judge(*question)
    gc.freeze()  # or a fork's garbage collector would copy what was loaded
    client.send_bytes(b"loaded")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM ends the fork, too
    while True:
        question, answer = json.loads(client.recv_bytes()), None
        if how.may_decide:
            signal.setitimer(signal.ITIMER_PROF, how.cpu_seconds)  # ends a worker that is too slow
            with contextlib.suppress(Exception):  # a fork says what it was
                answer = decide(how.judge, question)
        answer = answer or judge_in_fork(question, client, how)
        client.send_bytes(json.dumps(answer).encode())


def load(how: SimpleNamespace) -> None:
    """Set how.judge, which returns the arguments of a Verdict."""
    path, _, function = how.name.rpartition(":")
    folder, file = os.path.split(path)
    module = sys.modules[file] = ModuleType(file)
    module.__file__ = path
    sys.path.insert(0, folder)  # the file may import its neighbours
    exec(compile(how.source, path, "exec"), vars(module))
    how.judge = getattr(module, function)
    if how.threshold is not None:
        how.judge = functools.partial(score, how.judge, how.threshold, takes_raw(how.judge))
    how.may_decide = "compare" in signature(how.judge).parameters


def takes_raw(function) -> bool:
    """Whether a user's function has a parameter `raw`. Raises TypeError if it cannot be called."""
    takes = signature(function)
    names = list(takes.parameters)[:2]
    if names[:1] == ["completion"] or names[1:] == ["problem"] or OF_OTHERS.intersection(names):
        raise TypeError("its parameters are not (problem, completion)")
    raw = {"raw": ""} if "raw" in takes.parameters else {}
    takes.bind({}, "", **raw)
    return bool(raw)


class Undecided(Exception):
    """The judge has to compute what may take for ever."""


def decide(judge, question) -> tuple | None:
    """The verdict of a judge that can tell without its function `compare`; otherwise None."""
    def undecided(*_):
        raise Undecided
    with contextlib.suppress(Undecided):
        return judge(*question, compare=undecided)


def judge_in_fork(question: list, client: Connection, how: SimpleNamespace) -> tuple:
    """What the judge returns for one question, in a new process; else (status, why)."""
    ours, theirs = Pipe()
    with ours, tempfile.TemporaryDirectory(prefix="rewards-", ignore_cleanup_errors=True) as folder:
        pid = os.fork()
        if not pid:
            live(question, theirs, folder, how, (ours, client))
        theirs.close()
        answer = "timeout", f"past the time limit of {how.clock_seconds:g} s"
        try:
            if ours.poll(how.clock_seconds):
                answer = json.loads(ours.recv_bytes(2 ** 17))
        except ENDED:
            answer = None
        finally:  # end the fork with all processes that it has started
            os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return answer or ending(code)


def ending(code: int) -> tuple[str, str]:
    """(status, why) for a process that ended before it replied; code -N means signal N."""
    if -code == signal.SIGPROF:
        return "timeout", "past its time limit"
    end = f"exit code {code}" if code >= 0 else signal.strsignal(-code)
    return "killed", f"its process ended with {end}"


def live(question: list, worker: Connection, folder: str, how: SimpleNamespace, others) -> None:
    """The life of a fork, which judges one question."""
    try:
        os.setpgid(0, 0)
        os.register_at_fork(after_in_child=worker.close)  # so its own children cannot reply
        for other in others:
            other.close()
        os.chdir(folder)
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        signal.setitimer(signal.ITIMER_PROF, how.cpu_seconds)  # ends the fork, even inside C code
        try:
            answer = json.dumps(how.judge(*question))
        except BaseException as error:
            answer = json.dumps(["raised", f"{type(error).__name__}: {error}"[:200]])
        worker.send_bytes(answer.encode())
    finally:
        os._exit(1)


# ---------------------------------------------------------------------------------- in its client
class ForkingGrader(contextlib.AbstractContextManager):
    """Runs a judge in at most `workers` processes, from any thread. Use it in a `with`.

    name: "FILE.py:FUNCTION". threshold: a reward above it counts as correct; None for a function
    that returns (status, why). If that has a parameter `compare`, a function that may take for
    ever, it gets no fork until it needs this. examples: questions that each worker judges first.
    """

    def __init__(self, name: str, threshold: float | None = None, examples: list = (),
                 workers: int = WORKERS, cpu_seconds: float = 1.5, clock_seconds: float = 60.0):
        path = os.path.abspath(name)
        with tokenize.open(path.rpartition(":")[0]) as file:
            source = file.read()  # the file may change during the run
        self.how = dict(name=path, source=source, threshold=threshold, examples=examples,
                        cpu_seconds=cpu_seconds, clock_seconds=clock_seconds)
        self.name, self.pending, self.workers = name, {}, []
        self.threads, self.here = ThreadPoolExecutor(workers), threading.local()

    def ask(self, *question) -> Future:
        """A Future of the verdict."""
        return self.threads.submit(self.ask_worker, *question)

    def ask_worker(self, *question) -> Verdict:
        """The verdict on a question. Runs in a thread, and each thread has one worker."""
        worker, process = getattr(self.here, "worker", None) or self.start_worker()
        try:
            worker.send_bytes(json.dumps(question).encode())
            return Verdict(*json.loads(worker.recv_bytes()))
        except ENDED:
            self.here.worker = None
            return Verdict(*ending(process.wait()))

    def start_worker(self) -> tuple[Connection, subprocess.Popen]:
        """A new worker. Raises SystemExit if it cannot load the judge."""
        worker, theirs = Pipe()
        environment = {key: os.environ[key] for key in INHERITED if key in os.environ}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "parts.grader"], cwd=Path(__file__).parents[1],
                env=environment | DETERMINED, stdin=theirs, stdout=subprocess.DEVNULL,
                start_new_session=True)  # so that a terminal's Ctrl-C reaches only the client
        self.workers.append(process)
        try:
            worker.send_bytes(json.dumps(self.how).encode())
            worker.recv_bytes()  # "loaded"
        except ENDED:
            raise SystemExit(f"{shown(self.name)} cannot be used: {ending(process.wait())[1]}."
                             ) from None
        self.here.worker = worker, process
        return worker, process

    def result(self, key) -> Verdict:
        """Wait for the verdict of `key`, which was submitted, and forget the key."""
        return self.pending.pop(key).result()

    def grade(self, questions: list[tuple]) -> list[Verdict]:
        """The verdicts of all questions, in their order."""
        futures = [self.ask(*question) for question in questions]
        return [future.result() for future in futures]

    def close(self, *_) -> None:
        """End all workers. A running question becomes "killed", a waiting one is cancelled."""
        for wait in (False, True):  # twice, because a thread may just have started a worker
            self.threads.shutdown(wait, cancel_futures=True)
            while self.workers:
                worker = self.workers.pop()
                worker.terminate()
                worker.wait()

    __exit__ = close


# --------------------------------------------------------------- --reward: the user's own function
class OwnReward(ForkingGrader):
    """Runs the function of --reward on rows of the data and on answers to them."""

    def __init__(self, name: str, threshold: float, **how):
        super().__init__(name, threshold, **how)
        self.threads.submit(self.start_worker).result()  # raises if it cannot be loaded

    def submit(self, key, problem, rollout, **_) -> None:
        """Start judging this answer. `key` is any hashable, and `result(key)` gives the verdict."""
        self.pending[key] = self.ask(problem.row, rollout.text, rollout.raw)


def require_function(name: str) -> None:
    """Raises SystemExit unless it is "" or names a function of a file that exists."""
    if name and not os.path.isfile(name.rpartition(":")[0]):
        raise SystemExit(f"--reward takes FILE.py:FUNCTION of an existing file, not {shown(name)}.")


def score(function, threshold: float, takes_raw: bool, problem, completion, raw="") -> tuple:
    """The arguments of a Verdict. `function` returns a number or a dict of them. Runs in a fork."""
    value = function(problem, completion, **dict(raw=raw) if takes_raw else {})
    named = isinstance(value, dict)
    parts = {PART + name: as_number(part) for name, part in value.items()} if named else {}
    reward = as_number(math.fsum(parts.values()) if named else value)
    if math.isnan(reward) or named and not 0 < len(parts) <= MOST_PARTS:
        return "no_number", f"it returned {value!r}"[:200] + "; see docs/rewards.md"
    told = ", ".join(f"{name.removeprefix(PART)} {part:g}" for name, part in parts.items())
    return "correct" if reward > threshold else "wrong", told, reward, parts


def as_number(value) -> float:
    """A reward as a float; NaN if it is no number, not finite, or larger than LARGEST."""
    with contextlib.suppress(TypeError, ValueError, ArithmeticError):
        number = math.nan if isinstance(value, str | bytes) else float(value)
        return number + 0.0 if abs(number) <= LARGEST else math.nan  # -0.0 becomes 0.0
    return math.nan


def mean_parts(rows: list[dict]) -> dict[str, float]:
    """The mean of each part of the reward over all rows; a row without this part counts as 0."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith(PART))
    return {name: fmean(row.get(name, 0.0) for row in rows) for name in names}


if __name__ == "__main__":
    serve()
