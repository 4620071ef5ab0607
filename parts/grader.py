"""Worker processes with limits: they judge what a model wrote, and die instead of the trainer.

A `WorkerPool` is given a function by name, "path/to/file.py:function". Each worker loads that file
in a fresh interpreter, which imports nothing from the caller's main script, and answers one
question at a time. rewards.Grader asks math-verify; `OwnReward` asks the function of
--reward FILE.py:FUNCTION:

    def score(problem: dict, completion: str) -> float

Each question ends in an answer, or in one of four ways to fail (docs/own_reward.md): timeout,
killed, raised, no_number. Then there is no reward: it is NaN, and the sampler (`without_verdict`)
sees to it that no model gains by making its grader fail.

CPU time is limited because a busy machine must give the same verdicts as an idle one; libraries for
worker processes limit wall-clock time.
"""
import contextlib
import functools
import importlib.util
import inspect
import json
import math
import numbers
import os
import queue
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from parts.folder import digest_of, shown

RECYCLE = 5000  # questions after which a worker is replaced: sympy's caches grow
CPU_SHARE = 3 / 8  # share of the time limit that may be CPU time; honest answers take up to 0.3 s
START_SECONDS = 60  # limit of CPU time, and of waiting, while a worker loads its function
TICK = 0.05  # seconds between two looks at a worker that has not answered
FILE_BYTES = 2 ** 20  # the largest file that a worker can write
LARGEST = 1e6  # the largest reward: sums and squares of rewards must stay far from overflow
PATIENCE = 16  # if so many first verdicts all fail, --reward's function is broken
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME")  # of the environment: no secrets
DETERMINED = {"PYTHONHASHSEED": "0", "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1",
              "OMP_NUM_THREADS": "1"}  # 64 threads of numpy would need 1 GB of stacks
NO_VERDICT = ("timeout", "killed", "raised", "no_number")  # the grader failed, not the completion


@dataclass(frozen=True)
class Verdict:
    reward: float  # NaN with a status of NO_VERDICT
    status: str
    why: str = ""


# ------------------------------------------------------------------------------- in the worker

def load_function(name: str):
    """The function that "path/to/file.py:function" names. Its file may import its neighbours."""
    path, _, function = name.rpartition(":")
    sys.path[0], file = os.path.split(path)
    spec = importlib.util.spec_from_file_location(file.removesuffix(".py"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # the file may have a library's name, as json.py
    spec.loader.exec_module(module)
    return getattr(module, function)


def take_streams() -> tuple:
    """(requests, replies). Afterwards nothing else can read or write them by accident."""
    replies, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    return requests, replies


def end_with_parent(requests, folder: str) -> None:
    """Wait until the parent is gone; then remove the folder, and end with all children."""
    parent = select.poll()
    parent.register(requests, 0)  # reports only that the other end was closed
    parent.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def work(name: str, digest: str, example: list, cpu_seconds: float, memory: int) -> None:
    """The life of a worker: questions come in on stdin, answers go out on stdout, as lines of JSON.

    `digest` is the hash of --reward's file, "" for a judge of this project. `example` is a question
    that loads what the judge imports late. When a question runs out of CPU time, SIGPROF ends the
    process at once, even inside a long C call.
    """
    requests, replies = take_streams()
    me, folder = os.getpid(), os.getcwd()
    threading.Thread(target=end_with_parent, args=(requests, folder), daemon=True).start()

    def reply(answer) -> None:
        if os.getpid() != me:  # the function has forked: only one process may answer
            os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=replies, flush=True)

    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, START_SECONDS)
    try:
        judge = load_reward(name, digest) if digest else load_function(name)
        if example:
            judge(*example)
        hello = "ready"
    except BaseException as error:
        hello = explain(error, name)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    reply(hello)
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            answer = judge(*json.loads(line))
        except MemoryError:
            answer = "killed", f"out of memory: it may take {memory / 2 ** 30:g} GB"
        reply(answer)
    signal.pause()  # the other thread ends this process


def explain(error: BaseException, name: str) -> str:
    """The exception, and the last line of the function's file that it went through."""
    path = name.rpartition(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename == path]
    where = f"line {lines[-1]} of " if lines else ""
    try:
        said = str(error)[:200]
    except Exception:  # the user's own kind of exception
        said = "without words"
    return f"{type(error).__name__}: {said} ({where}{os.path.basename(path)})"


# --------------------------------------------------------------------------- its parent's view

class Worker:
    """A child process running `work`, in an empty folder, without the environment's secrets.

    A fresh interpreter, never a fork of a process that holds CUDA. It leads a process group: a
    terminal's Ctrl-C is for the parent alone, and what the function has started ends with it.
    """

    def __init__(self, name: str, digest: str, example: list, timeout: float, memory_gb: float):
        self.folder = tempfile.TemporaryDirectory(prefix="rewards-", ignore_cleanup_errors=True)
        self.timeout, self.hello, self.asked = timeout, "", 0
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        environment = {key: os.environ[key] for key in INHERITED if key in os.environ}
        limits = [str(timeout * CPU_SHARE), str(int(memory_gb * 2 ** 30))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "parts.grader", name, digest, json.dumps(example), *limits],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self.folder.name,
            env=environment | DETERMINED | {"PYTHONPATH": path, "TMPDIR": self.folder.name},
            start_new_session=True)

    def _waits(self) -> bool:
        """Whether it waits for something else than a processor: sleeps, reads, is stopped."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0] != "R"
        except OSError:
            return True

    def _receive(self, seconds: float):
        """The next value from the process. Only time in which it waits counts towards `seconds`.

        While it computes, or waits for a processor, its own limit of CPU time holds. Raises
        TimeoutError past either limit, and EOFError if the process has ended otherwise.
        """
        answer, waited = select.poll(), 0.0
        answer.register(self.process.stdout, select.POLLIN)
        while not answer.poll(1000 * TICK):
            waited += TICK * self._waits()
            if waited > seconds:
                raise TimeoutError(f"past the time limit of {seconds:g} s")
        line = self.process.stdout.readline()
        if line.endswith("\n"):
            return json.loads(line)
        self.end()
        code = self.process.wait()
        if code == -signal.SIGPROF:
            limit = seconds * CPU_SHARE if self.hello else START_SECONDS
            raise TimeoutError(f"past the time limit of {limit:g} s of computing")
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else (
            f"ended with exit code {code}")
        raise EOFError(f"its process {how}")

    def start(self) -> None:
        """Wait until the function is loaded; RuntimeError if it cannot be."""
        self.hello = self.hello or self._receive(START_SECONDS)
        if self.hello != "ready":
            raise RuntimeError(self.hello)

    def ask(self, question: str) -> tuple[str, str]:
        """(status, why) of one question, a line of JSON; status "killed" if the process died."""
        try:
            self.start()  # does not count against the limits
            self.asked += 1
            with contextlib.suppress(BrokenPipeError):  # `_receive` says why
                self.process.stdin.write(question + "\n")
                self.process.stdin.flush()
            status, why = self._receive(self.timeout)
            return status, why
        except TimeoutError as error:
            return "timeout", str(error)
        except (OSError, ValueError, EOFError) as error:
            return "killed", str(error)

    def end(self) -> None:
        """Kill the process and what it has started."""
        if self.process.returncode is None:  # else its number may belong to another by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """`end` it, and leave nothing behind: no pipe, no folder."""
        self.end()
        with contextlib.suppress(OSError), self.process:  # leaving it closes its pipes
            self.process.kill()
        self.folder.cleanup()


class WorkerPool(contextlib.AbstractContextManager):
    """Asks a function in `workers` processes, from any thread. Use it in a `with`, or `close` it.

    name: "path/to/file.py:function"; digest, example: see `work`. timeout: seconds that a question
    may wait for something; 3/8 of it may be CPU time. memory_gb: limit of a worker's data.
    """

    def __init__(self, name: str, digest: str = "", example: list = (), workers: int = 2,
                 timeout: float = 4.0, memory_gb: float = 1.0):
        self.recipe = (name, digest, example, timeout, memory_gb)
        self.closed, self.pending = False, {}
        self.workers = [Worker(*self.recipe) for _ in range(workers)]
        self.threads = ThreadPoolExecutor(workers)
        self.free: queue.SimpleQueue = queue.SimpleQueue()  # indices of idle workers
        for i in range(workers):
            self.free.put(i)

    def ask(self, *question) -> Future:
        """The verdict to come. A subclass answers here what needs no worker."""
        return self.threads.submit(self._answer, json.dumps(question))

    def verdict(self, status: str, why: str) -> Verdict:
        """What a worker's answer is worth."""
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

    def _answer(self, question: str) -> Verdict:
        """Ask an idle worker. If it dies, ask a fresh one: perhaps the question is not to blame."""
        i = self.free.get()
        try:
            status, why = self._ask(i, question)
            if status == "killed" and not self.closed:
                status, why = self._ask(i, question)
            return self.verdict(status, why)
        finally:
            self.free.put(i)

    def _ask(self, i: int, question: str) -> tuple[str, str]:
        """(status, why) from worker `i`, which is replaced if it cannot go on."""
        worker = self.workers[i]
        status, why = worker.ask(question)
        if status in ("timeout", "killed") or worker.asked >= RECYCLE:
            worker.kill()
            if not self.closed:
                self.workers[i] = Worker(*self.recipe)
        return status, why

    def close(self) -> None:
        """End the workers. Verdicts still to come become "killed"."""
        self.closed = True
        for worker in self.workers:
            worker.end()
        self.threads.shutdown()
        for worker in self.workers:
            worker.kill()

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


def load_reward(name: str, digest: str):
    """In a worker: a judge that asks this function.

    Raises what loading it raises, and TypeError or ValueError if it cannot be used.
    """
    if digest_of(name.rpartition(":")[0]) != digest:
        raise ValueError("the file was changed after the start: put it back")
    function = load_function(name)
    signature = inspect.signature(function)
    signature.bind({}, "")
    if next(iter(signature.parameters)).startswith("completion"):
        raise TypeError("it must take (problem, completion), in this order")
    return functools.partial(score, function, name)


def score(function, name: str, problem: dict, completion: str) -> tuple[str, str]:
    """In a worker: (status, why). Status "scored" has the number as its `why`."""
    try:
        value = function(problem, completion)
        number = as_number(value)
        if number is None:
            return "no_number", f"it returned {value!r}"[:200]
        return "scored", repr(number)
    except MemoryError:
        raise
    except BaseException as error:
        return "raised", explain(error, name)


def as_number(value) -> float | None:
    """A finite float of at most LARGEST in size; True is 1. None for anything else."""
    if hasattr(value, "item"):  # numpy, torch
        value = value.item()
    if not isinstance(value, numbers.Real) or not abs(value) <= LARGEST:  # as for NaN
        return None
    return float(value)


class OwnReward(WorkerPool):
    """Asks FILE.py:FUNCTION. A reward above `threshold` has the status correct, others wrong.

    Raises SystemExit, one sentence, if there is no such file or function, or if it cannot be loaded
    or called.
    """

    def __init__(self, name: str, threshold: float, workers: int = 2, **limits: float):
        require_function(name)
        path, _, function = name.rpartition(":")
        file = Path(path).expanduser().absolute()
        self.called, self.threshold = f"--reward {shown(name)}", threshold
        self.failed = 0  # verdicts without a number so far; None after the first number
        super().__init__(f"{file}:{function}", digest_of(file), workers=workers, **limits)
        try:
            self.workers[0].start()
        except (RuntimeError, EOFError, TimeoutError) as error:
            end = "used" if self.workers[0].hello else "loaded"
            self.close()
            raise SystemExit(f"{self.called} cannot be {end}: {shown(error, 400)}.") from None

    def ask(self, row: dict, completion: str, style: str = "") -> Future:
        """The verdict to come. `style` is the verifier's and means nothing here."""
        return super().ask(row, completion)

    def verdict(self, status: str, why: str) -> Verdict:
        if status != "scored":
            return super().verdict(status, why)
        reward = float(why)
        return Verdict(reward, "correct" if reward > self.threshold else "wrong")

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

    def try_out(self, problems: list) -> None:
        """Say what it gives for an empty completion, where a function may well fail."""
        found = self.grade([(problems[0].row, "")])[0]
        if found.status in NO_VERDICT:
            what = f"no number for an empty completion: {shown(found.why, 400)}"
        else:
            what = (f"{found.reward:g} for an empty completion; above {self.threshold:g} is "
                    "correct")
        print(f"{self.called} gives {what}")


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
