"""Worker processes with limits: they judge untrusted text, and die instead of the trainer.

A `WorkerPool` is given a function by name, "path/to/file.py:function". Each worker loads that file
in a fresh interpreter, so nothing of the caller's main script is imported, and calls the function
with the arguments of one question at a time. It answers (status, why), and a subclass's `verdict`
makes a reward of that; here status "correct" is a reward of 1.

A question has four ways to end: an answer, "timeout" (too much CPU time, or the clock ran out),
"killed" (out of memory, or the worker died twice), or a RuntimeError where the function's file
cannot be loaded.

The same question is asked once: its verdict is remembered, by its hash.
"""
import contextlib
import hashlib
import importlib.util
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

CACHE = 100_000         # verdicts kept, by question
RECYCLE = 5000          # questions after which a worker is replaced: sympy's caches grow
CPU_SHARE = 3 / 8       # of the clock limit that an answer may compute
START_SECONDS = 120     # for a worker to load its function, on a busy machine
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")    # no secrets
DETERMINED = {"PYTHONHASHSEED": "0", "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}
# what a file may import from
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NO_VERDICT = ("timeout", "killed", "raised", "no_number")    # the grader failed, not the completion


@dataclass(frozen=True)
class Verdict:
    """`reward`, NaN if there is none, `status` and `why` in words, `seconds` it took to judge."""
    reward: float
    status: str
    seconds: float
    why: str = ""


def verdict(status: str, why: str, seconds: float) -> Verdict:
    return Verdict(float(status == "correct"), status, seconds, why)


# ------------------------------------------------------------------------------- in the worker

def load_function(name: str):
    """The function that "path/to/file.py:function" names.

    Its file may import its neighbours, and whatever this project has.
    """
    path, _, function = name.rpartition(":")
    sys.path[0] = os.path.dirname(path)                          # was the folder of this script
    if ROOT not in sys.path:
        sys.path.append(ROOT)
    spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                              # as an ordinary import would do
    spec.loader.exec_module(module)
    return getattr(module, function)


def take_streams() -> tuple:
    """(requests, replies). Nothing else can read from or write into the protocol after this."""
    replies, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    return requests, replies


def work(name: str, cpu_seconds: float, memory: int, example: list) -> None:
    """The life of a worker: questions in on stdin, answers out on stdout, a JSON value per line.

    Limits precede the load. `example` is a question that loads what the function loads late. When a
    question runs out of CPU time, SIGPROF's default action ends the process at once, even inside a
    long C call. CPU time, unlike the clock, gives the same verdict on a busy machine.
    """
    requests, replies = take_streams()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        judge = load_function(name)
        judge(*example)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))    # from here on it cannot write a file
        os.rmdir(os.getcwd())              # nothing is left behind, however this process ends
        hello = "ready"
    except Exception as error:
        hello = f"{type(error).__name__}: {error}"
    print(json.dumps(hello), file=replies, flush=True)
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = judge(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=replies, flush=True)


# --------------------------------------------------------------------------- its parent's view

class Worker:
    """A child process running `work`, in an empty folder, without the environment's secrets.

    A fresh interpreter, never a fork of a process that holds CUDA. It ends when its parent does,
    however that happens: its input ends, or the CPU limit stops what it was doing.
    """

    def __init__(self, name: str, example: list, timeout: float, memory_gb: float):
        self.folder = tempfile.TemporaryDirectory(prefix="rewards-")
        self.timeout, self.hello, self.asked, self.since = timeout, "", 0, 0.0
        environment = {key: os.environ[key] for key in INHERITED if key in os.environ}
        limits = [str(timeout * CPU_SHARE), str(int(memory_gb * 2 ** 30))]
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), name, *limits, json.dumps(example)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=self.folder.name, env=environment | DETERMINED,
            start_new_session=True)              # a terminal's Ctrl-C is for the parent alone

    def _cpu(self) -> float:
        """CPU seconds the process has used (Linux derives a clock from its id); nan if unknown."""
        try:
            return time.clock_gettime((~self.process.pid << 3) | 2)
        except OSError:
            return float("nan")

    def _receive(self, timeout: float):
        """The next value from the process, None if it died. TimeoutError past a limit."""
        poll, line, start = select.poll(), None, self._cpu()
        poll.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        for _ in range(3):                         # more time if others took most of the CPU
            if poll.poll(timeout * 1000):
                line = self.process.stdout.readline()
            if line is not None or not self._cpu() - start < timeout * CPU_SHARE / 2:
                break
        if line is None:
            raise TimeoutError
        if not line.endswith("\n") and self.process.wait() == -signal.SIGPROF:
            raise TimeoutError
        return json.loads(line or "null")

    def start(self) -> None:
        """Wait until the function is loaded; RuntimeError if it cannot be."""
        self.hello = self.hello or self._receive(START_SECONDS) or "died"
        if self.hello not in ("ready", "died"):
            raise RuntimeError(f"the verifier cannot start ({self.hello}): "
                               "pip install -r requirements.txt")

    def ask(self, question: str) -> tuple[str, str]:
        """(status, why) of one question, a line of JSON; status "killed" if the process died."""
        try:
            self.start()                           # does not count against the limits
            self.asked, self.since = self.asked + 1, time.perf_counter()
            self.process.stdin.write(question + "\n")
            self.process.stdin.flush()
            status, why = self._receive(self.timeout) or ("killed", "the worker died")
            return status, why
        except TimeoutError:
            return "timeout", "past the time limit"
        except (OSError, ValueError):
            return "killed", "the worker died"

    def kill(self) -> None:
        with contextlib.suppress(OSError), self.process:
            self.process.kill()
        self.folder.cleanup()


def name_of(question: str) -> bytes:
    """A question's place among those that are remembered: whole rows of data would fill memory."""
    return hashlib.sha256(question.encode()).digest()


class WorkerPool:
    """Asks a function on `workers` processes, from any thread. Use it in a `with`, or `close` it.

    name: "path/to/file.py:function"; example: a question that warms the function up. timeout:
    wall-clock seconds an answer may take. CPU is limited to 3/8 of that (honest answers take up
    to 0.3 s), and a worker that others starve gets up to three times the clock time, so that a busy
    machine gives the same verdicts. memory_gb: address space of a worker.
    """

    def __init__(self, name: str, example: list, workers: int, timeout: float, memory_gb: float):
        self.recipe = (name, example, timeout, memory_gb)
        self.closed, self.lock = False, threading.Lock()
        self.questions: queue.SimpleQueue = queue.SimpleQueue()
        self.cache: OrderedDict[bytes, Future] = OrderedDict()
        self.pending: dict = {}
        self.workers = [Worker(*self.recipe) for _ in range(workers)]
        self.threads = [threading.Thread(target=self._serve, args=(i,), daemon=True)
                        for i in range(workers)]
        for thread in self.threads:
            thread.start()

    def settle(self, *question) -> Future:
        """The verdict to come on a question. Subclasses answer here what needs no worker."""
        return self.ask(*question)

    def ask(self, *question) -> Future:
        """A worker's verdict, remembered for when the question comes again, time-outs included."""
        line = json.dumps(question)
        known_as = name_of(line)
        with self.lock:
            if known_as not in self.cache:
                self.cache[known_as] = Future()
                self.questions.put((self.cache[known_as], line))
            self.cache.move_to_end(known_as)
            if len(self.cache) > CACHE:
                self.cache.popitem(last=False)
            return self.cache[known_as]

    def verdict(self, status: str, why: str, seconds: float) -> Verdict:
        """What a worker's answer is worth."""
        return verdict(status, why, seconds)

    def submit(self, key, *question, **how) -> None:
        """Start judging and return at once. `key`: any hashable, handed to `result` later."""
        self.pending[key] = self.settle(*question, **how)

    def result(self, key) -> Verdict:
        """Wait for the verdict of `key`, and forget the key."""
        return self.pending.pop(key).result()

    def grade(self, questions: list[tuple], **how) -> list[Verdict]:
        """The verdicts of many questions, in their order."""
        futures = [self.settle(*question, **how) for question in questions]
        return [future.result() for future in futures]

    def _serve(self, i: int) -> None:
        """The life of one thread: it owns worker `i` and asks it one question after the other."""
        while True:
            with contextlib.suppress(Exception):                 # `_answer` reports it
                self.workers[i].start()          # a worker takes a question only when it can begin
            future, question = self.questions.get()
            if future is None:
                return
            try:
                answer = self._answer(i, question)
            except Exception as error:
                self._forget(question)
                future.set_exception(error)
                continue
            if answer.status == "killed":
                self._forget(question)             # perhaps not its doing: judge it anew next time
            future.set_result(answer)

    def _answer(self, i: int, question: str) -> Verdict:
        """Ask worker `i`; if it was killed from outside, ask a fresh one once more."""
        for _ in range(2):
            worker, start, status = self.workers[i], time.perf_counter(), "killed"
            try:
                status, why = worker.ask(question)
            finally:
                if status in ("timeout", "killed") or worker.asked >= RECYCLE:
                    self._replace(i)
            if status != "killed" or self.closed:
                break
        return self.verdict(status, why, time.perf_counter() - (worker.since or start))

    def _replace(self, i: int) -> None:
        self.workers[i].kill()
        if not self.closed:
            self.workers[i] = Worker(*self.recipe)

    def _forget(self, question: str) -> None:
        with self.lock:
            self.cache.pop(name_of(question), None)

    def close(self) -> None:
        """End the workers. Verdicts still under way become "killed"."""
        self.closed = True
        for worker in self.workers:
            worker.process.kill()
            self.questions.put((None, None))
        for thread in self.threads:
            thread.join(10)
        for worker in self.workers:
            worker.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


if __name__ == "__main__":
    work(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
