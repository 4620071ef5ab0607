"""Processes with limits judge what a model wrote: they may hang or die, and the trainer goes on.

A server, `python -m parts.grader FILE.py:FUNCTION`, is a fresh interpreter that loads one function:
`rewards.judge`, or that of --reward, `score(problem: dict, completion: str) -> float`. What a model
wrote is read by its forks alone.

**No verdict depends on what was asked before.** With --reward each question has a child of its own.
A fork costs more than most questions, so math-verify, of which only caches are left, judges several
in one child, with the limits of one. What it answers in time, a new child would too: all that its
caches can spare was computed within that time. Where it fails, a new child is asked.

A question without an answer has a status of NO_VERDICT (docs/rewards.md) and NaN as its reward:
the sampler (`without_verdict`) sees to it that no model gains by making its grader fail.

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
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from parts.folder import digest_of, shown

SERVERS = min(8, len(os.sched_getaffinity(0)))  # each judges one answer at a time
START_SECONDS = 60  # limit of CPU time, and of waiting, while a server loads its function
FILE_BYTES = 2 ** 20  # the largest file that a child can write
LARGEST = 1e6  # the largest reward: sums and squares of rewards must stay far from overflow
PATIENCE = 16  # if so many first verdicts all fail, --reward's function is broken
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")  # no secrets
DETERMINED = {"PYTHONHASHSEED": "0", "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1",
              "OMP_NUM_THREADS": "1"}  # 64 threads of numpy would need 1 GB of stacks
NO_VERDICT = ("timeout", "killed", "raised", "no_number")  # the grader failed, not the completion


class Verdict(NamedTuple):
    reward: float  # NaN with a status of NO_VERDICT
    status: str
    why: str = ""


class Limits(NamedTuple):  # of a child
    cpu_seconds: float = 1.5  # honest answers take up to 0.3
    waiting_seconds: float = 15.0  # then it must be computing, or kept from it by others
    memory_gb: float = 1.0  # its data, with what the server has loaded
    questions: int = 1  # several, where a judge keeps nothing but caches


# ------------------------------------------------------------------------------- in the server

def load_function(name: str):
    """The function that "path/to/file.py:function" names. Its file may import its neighbours."""
    path, _, function = name.rpartition(":")
    sys.path.insert(0, os.path.dirname(path))
    return getattr(SimpleNamespace(**runpy.run_path(path)), function)


def serve(name: str, digest: str, examples: list, folder: str, limits: dict) -> None:
    """The life of a server: until its client closes the requests, or is no more.

    Requests and replies are lines of JSON. First comes one reply, why the function cannot be
    loaded, or "". Then one for each question.
    digest: of --reward's file, "" for a judge of this project. examples: questions that load what
    the judge imports late, and fill its caches once for all children.
    """
    streams = requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # nothing else can read or write them by accident
        os.dup2(null, stream)
    limits, child = Limits(**limits), None
    try:
        enter_empty(folder)
        judge, refusal = load_judge(name, digest, examples, limits)
        print(json.dumps(refusal), file=replies, flush=True)
        gc.freeze()  # a child's collector does not walk through, and so copy, what was loaded
        for question in requests:
            answer = child.answer(question) if child else None
            if not answer or answer[0] in NO_VERDICT:
                enter_empty(folder)
                child = Child(judge, question, limits, streams)
                answer = child.answer()
            child = child if child.left else None
            print(json.dumps(answer), file=replies, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def enter_empty(folder: str) -> None:
    """Make it the current folder, without what an earlier child has written."""
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder, 0o700)
    os.chdir(folder)


def limit(kind: int, most: int) -> None:
    """Set a limit of this process, unless it has a lower one already."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def load_judge(name: str, digest: str, examples: list, limits: Limits) -> tuple:
    """(`answer_of` it, ""), or (None, why it cannot be loaded). Sets what children inherit."""
    limit(resource.RLIMIT_DATA, int(limits.memory_gb * 2 ** 30))
    limit(resource.RLIMIT_CORE, 0)
    signal.setitimer(signal.ITIMER_PROF, START_SECONDS)
    try:
        judge = load_reward(name, digest) if digest else load_function(name)
        for question in examples:
            judge(*question)
    except BaseException as error:
        return None, explain(error, name)
    signal.setitimer(signal.ITIMER_PROF, 0)
    limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    return functools.partial(answer_of, judge, name, limits), ""


class Child:
    """A fork of the server that judges `question`, and then others if `limits` allow it.

    An answer is one packet: whole, and the only one if a second process of the child answers too.
    """

    def __init__(self, judge, question: str, limits: Limits, streams: tuple):
        self.limits, self.left, self.requests = limits, limits.questions, streams[0]
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self.socket.close()
            live(judge, question, limits, theirs, streams)
        theirs.close()

    def answer(self, question: str = "") -> tuple[str, str]:
        """(status, why) of its first question, or of another. After the last it is ended."""
        if question:
            with contextlib.suppress(OSError):  # it has gone
                self.socket.send(question.encode())
        ready = wait(self.limits.waiting_seconds, self.pid, self.socket, self.requests)
        packet = self.socket.recv(2 ** 18) if self.socket.fileno() in ready else b""
        status, why = json.loads(packet) if packet else ("", "")
        self.left = 0 if status in ("", *NO_VERDICT) else self.left - 1
        code = 0 if self.left else self.end()
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


def live(judge, question: str, limits: Limits, questions, streams: tuple) -> None:
    """The life of a child. SIGPROF ends it when its CPU time is used up, even inside C code."""
    try:
        os.setpgid(0, 0)
        for stream in streams:
            stream.close()
        limit(resource.RLIMIT_CPU, int(limits.cpu_seconds) + 1)  # for who stops the timer
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        while question:
            questions.send(json.dumps(judge(question)).encode())
            question = questions.recv(2 ** 18)
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
    return f"{type(error).__name__}: {str(told)[:200]} ({where}{os.path.basename(path)})"


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
            break
    return dict(ready)


def ending(code: int) -> str:
    """How a process ended, in words; `code` is -N for signal N."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"


# --------------------------------------------------------------------------- its client's view

class Server:
    """A process running `serve`: no fork of a process that holds CUDA, and without its secrets.

    It leads a session: a terminal's Ctrl-C is for its client alone.
    """

    def __init__(self, *asked):
        self.asked = asked
        self.start(*asked)

    def start(self, name: str, settings: dict) -> None:
        self.hello = None
        self.folder = tempfile.mkdtemp(prefix="rewards-")
        settings = json.dumps(settings | dict(folder=self.folder))
        environment = {key: os.environ[key] for key in INHERITED if key in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "parts.grader", name, settings], text=True, cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env=environment | DETERMINED | {"TMPDIR": self.folder})

    def load(self) -> None:
        """Wait until its function is loaded. RuntimeError, with the reason, if it cannot be."""
        if self.process.returncode is not None:  # it died of an earlier question
            self.start(*self.asked)
        if self.hello is None:
            if not wait(START_SECONDS, self.process.pid, self.process.stdout):
                raise RuntimeError(f"past the time limit of {START_SECONDS:g} s")
            line = self.process.stdout.readline()
            self.hello = json.loads(line) if line else f"its process {ending(self.end())}"
        if self.hello:
            raise RuntimeError(self.hello)

    def ask(self, question: str) -> tuple[str, str]:
        """(status, why) of one question, a line of JSON."""
        self.load()  # does not count against the limits
        try:
            self.process.stdin.write(question + "\n")
            self.process.stdin.flush()
            return tuple(json.loads(self.process.stdout.readline()))
        except (OSError, ValueError):  # nobody reads or writes at the other end
            return "killed", f"the process that it was forked from {ending(self.end())}"

    def end(self) -> int:
        """It ends its child, and what that has started, and itself. Returns its exit code."""
        if self.hello is None:  # what it loads may hang
            self.process.kill()
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        code = self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return code


class ForkingGrader(contextlib.AbstractContextManager):
    """Asks a function in children of at most `servers`, from any thread. Use it in a `with`.

    name: "path/to/file.py:function"; digest, examples: see `serve`; limits: those of `Limits`.
    """

    def __init__(self, name: str, digest: str = "", examples: list = (), servers: int = SERVERS,
                 **limits: float):
        settings = dict(digest=digest, examples=examples, limits=Limits(**limits)._asdict())

        def start() -> None:
            self.here.server = Server(name, settings)
            self.servers.append(self.here.server)

        self.servers, self.pending, self.here = [], {}, threading.local()
        # each thread has its own server, from the first question on that needs it
        self.threads = ThreadPoolExecutor(servers, initializer=start)

    def ask(self, *question) -> Future:
        """The verdict to come. A subclass answers here what needs no child."""
        line = json.dumps(question)
        return self.threads.submit(lambda: self.verdict(*self.here.server.ask(line)))

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
        """End the servers; what they were asked is "killed", what waits for one is cancelled."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for server in [*self.servers]:
            server.end()
        self.threads.shutdown()
        for server in self.servers:  # one that was only just starting
            server.end()

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
    """In a server: a judge that asks this function.

    Raises what loading it raises, and TypeError or ValueError if it cannot be used.
    """
    if digest_of(name.rpartition(":")[0]) != digest:
        raise ValueError("the file was changed after the start: put it back")
    function = load_function(name)
    signature = inspect.signature(function)
    signature.bind({}, "")
    if next(iter(signature.parameters)).startswith("completion"):
        raise TypeError("it must take (problem, completion), in this order")
    return functools.partial(score, function)


def score(function, problem: dict, completion: str) -> tuple[str, str]:
    """In a child: ("scored", a finite number of at most LARGEST in size), or status "no_number"."""
    value = function(problem, completion)
    number = value.item() if hasattr(value, "item") else value  # numpy, torch
    if isinstance(number, numbers.Real) and abs(number) <= LARGEST:  # NaN is not
        return "scored", repr(float(number))  # True is 1
    return "no_number", f"it returned {value!r}"[:200]


class OwnReward(ForkingGrader):
    """Asks FILE.py:FUNCTION. A reward above `threshold` has the status correct, others wrong.

    Raises SystemExit, one sentence, if there is no such file or function, or if it cannot be loaded
    or called.
    """

    def __init__(self, name: str, threshold: float, servers: int = SERVERS, **limits: float):
        require_function(name)
        path, _, function = name.rpartition(":")
        file = Path(path).expanduser().absolute()
        self.called, self.threshold = f"--reward {shown(name)}", threshold
        self.failed = 0  # verdicts without a number so far; None after the first number
        super().__init__(f"{file}:{function}", digest_of(file), servers=servers, **limits)
        try:
            self.threads.submit(lambda: self.here.server.load()).result()
        except RuntimeError as error:
            self.close()
            raise SystemExit(f"{self.called} cannot be used: {shown(error, 400)}.") from None

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


if __name__ == "__main__":
    serve(sys.argv[1], **json.loads(sys.argv[2]))
