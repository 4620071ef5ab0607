"""Worker processes with limits: they judge untrusted text, and die instead of the trainer.

A `WorkerPool` is given a function by name, "path/to/file.py:function". Each worker loads that file
in a fresh interpreter, so nothing of the caller's main script is imported, and calls the function
with the arguments of one question at a time. It answers (status, why), and a subclass's `verdict`
makes a reward of that; here status "correct" is a reward of 1.

A question has four ways to end: an answer, "timeout" (too much CPU time, or it waited too long for
something else), "killed" (out of memory, or the worker died twice), or a RuntimeError where the
function's file cannot be loaded.

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
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CACHE = 100_000         # verdicts kept, by question
RECYCLE = 5000          # questions after which a worker is replaced: sympy's caches grow
CPU_SHARE = 3 / 8       # of a time limit that may be computing; honest answers take up to 0.3 s
START_SECONDS = 60      # of CPU time, and of waiting, for a worker to load its function
TICK = 0.05             # seconds between two looks at a worker that has not answered
FILE_BYTES = 2 ** 20    # of the largest file that a worker can write
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")    # no secrets
DETERMINED = {"PYTHONHASHSEED": "0", "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1",
              "OMP_NUM_THREADS": "1"}            # 64 threads of numpy would need 1 GB of stacks
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


def end_with_parent(requests, folder: str) -> None:
    """Wait until the parent is gone; then remove the folder, and end with all children."""
    parent = select.poll()
    parent.register(requests, 0)                  # it tells of the other end's close only
    parent.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def limit(name: int, value: int) -> None:
    resource.setrlimit(name, (value, value))


def work(name: str, example: list, cpu_seconds: float, memory: int) -> None:
    """The life of a worker: questions in on stdin, answers out on stdout, a JSON value per line.

    Limits precede the load. `example` is a question that loads what the function loads late. When a
    question runs out of CPU time, SIGPROF's default action ends the process at once, even inside a
    long C call. CPU time, unlike the clock, gives the same verdict on a busy machine.
    """
    requests, replies = take_streams()
    me, folder = os.getpid(), os.getcwd()
    watch = threading.Thread(target=end_with_parent, args=(requests, folder), daemon=True)
    watch.start()

    def reply(answer) -> None:
        if os.getpid() != me:                # the function has forked: only one of them answers
            os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=replies, flush=True)

    limit(resource.RLIMIT_DATA, memory)
    limit(resource.RLIMIT_CORE, 0)
    signal.setitimer(signal.ITIMER_PROF, START_SECONDS)
    try:
        judge = load_function(name)
        judge(*example)
        hello = "ready"
    except Exception as error:
        hello = f"{type(error).__name__}: {error}"
    limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    reply(hello)
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            answer = judge(*json.loads(line))
        except MemoryError:
            answer = "killed", f"out of memory: it may take {memory / 2 ** 30:g} GB"
        reply(answer)
    watch.join()


# --------------------------------------------------------------------------- its parent's view

class Worker:
    """A child process running `work`, in an empty folder, without the environment's secrets.

    A fresh interpreter, never a fork of a process that holds CUDA. It leads a process group: a
    terminal's Ctrl-C is for the parent alone, and what the function has started ends with it.
    """

    def __init__(self, name: str, example: list, timeout: float, memory_gb: float):
        self.folder = tempfile.TemporaryDirectory(prefix="rewards-", ignore_cleanup_errors=True)
        self.timeout, self.hello, self.asked, self.since = timeout, "", 0, 0.0
        environment = {key: os.environ[key] for key in INHERITED if key in os.environ}
        limits = [str(timeout * CPU_SHARE), str(int(memory_gb * 2 ** 30))]
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), name, json.dumps(example), *limits],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self.folder.name,
            env=environment | DETERMINED | {"TMPDIR": self.folder.name},
            start_new_session=True)

    def _waits(self) -> bool:
        """Is it neither computing nor in line for a processor?"""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0] != "R"
        except OSError:
            return True

    def _receive(self, seconds: float):
        """The next value from the process.

        While the process could compute the clock all but stands still: others may keep it from
        that, and CPU time has a limit of its own. TimeoutError past a limit, EOFError if it ended.
        """
        answer, waited = select.poll(), 0.0
        answer.register(self.process.stdout, select.POLLIN)
        while not answer.poll(1000 * TICK):
            waited += TICK if self._waits() else TICK / 100
            if waited > seconds:
                raise TimeoutError(f"past the time limit of {seconds:g} s")
        line = self.process.stdout.readline()
        if line.endswith("\n"):
            return json.loads(line)
        self.end()
        end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        if end.si_code == os.CLD_EXITED:
            raise EOFError(f"its process ended with exit code {end.si_status}")
        if end.si_status == signal.SIGPROF:
            seconds = START_SECONDS if not self.hello else seconds * CPU_SHARE
            raise TimeoutError(f"past the time limit of {seconds:g} s of computing")
        raise EOFError(f"its process was ended by {signal.Signals(end.si_status).name}")

    def start(self) -> None:
        """Wait until the function is loaded; RuntimeError if it cannot be."""
        self.hello = self.hello or self._receive(START_SECONDS)
        if self.hello != "ready":
            raise RuntimeError(f"the verifier cannot start ({self.hello}): "
                               "pip install -r requirements.txt")

    def ask(self, question: str) -> tuple[str, str]:
        """(status, why) of one question, a line of JSON; status "killed" if the process died."""
        try:
            self.since = time.perf_counter()
            self.start()                           # does not count against the limits
            self.asked, self.since = self.asked + 1, time.perf_counter()
            with contextlib.suppress(BrokenPipeError):           # `_receive` says why
                self.process.stdin.write(question + "\n")
                self.process.stdin.flush()
            status, why = self._receive(self.timeout)
            return status, why
        except TimeoutError as error:
            return "timeout", str(error) if self.hello else f"not loaded: {error}"
        except (OSError, ValueError, EOFError) as error:
            return "killed", str(error)

    def end(self) -> None:
        """Kill the process and what it has started."""
        if self.process.returncode is None:        # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        self.end()
        with contextlib.suppress(OSError), self.process:         # its pipes are closed
            self.process.kill()
        self.folder.cleanup()


class WorkerPool:
    """Asks a function on `workers` processes, from any thread. Use it in a `with`, or `close` it.

    name: "path/to/file.py:function"; example: a question that warms the function up. timeout:
    seconds that an answer may wait for something, and 3/8 of it is what it may compute. memory_gb:
    data of a worker.
    """

    def __init__(self, name: str, example: list, workers: int, timeout: float, memory_gb: float):
        self.recipe = (name, example, timeout, memory_gb)
        self.closed, self.lock = False, threading.Lock()
        self.cache: OrderedDict[bytes, Future] = OrderedDict()
        self.pending: dict = {}
        self.workers = [Worker(*self.recipe) for _ in range(workers)]
        self.threads = ThreadPoolExecutor(workers)
        self.free: queue.SimpleQueue = queue.SimpleQueue()       # places in `workers`
        for i in range(workers):
            self.free.put(i)

    def settle(self, *question) -> Future:
        """The verdict to come on a question. Subclasses answer here what needs no worker."""
        return self.ask(*question)

    def ask(self, *question) -> Future:
        """A worker's verdict, remembered for when the question comes again, time-outs included."""
        line = json.dumps(question)
        known_as = hashlib.sha256(line.encode()).digest()        # whole rows would fill memory
        with self.lock:
            if known_as not in self.cache:
                self.cache[known_as] = self.threads.submit(self._answer, line, known_as)
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

    def _answer(self, question: str, known_as: bytes) -> Verdict:
        """Ask a free worker; if it died, ask a fresh one once more: perhaps it was not to blame."""
        i, status = self.free.get(), "killed"
        try:
            status, why, seconds = self._ask(i, question)
            if status == "killed" and not self.closed:
                status, why, seconds = self._ask(i, question)
            return self.verdict(status, why, seconds)
        finally:
            self.free.put(i)
            if status == "killed":                 # or it raised: judge it anew next time
                with self.lock:
                    self.cache.pop(known_as, None)

    def _ask(self, i: int, question: str) -> tuple[str, str, float]:
        """(status, why, seconds) from worker `i`, which is replaced if it can't go on."""
        worker, status = self.workers[i], "killed"
        try:
            status, why = worker.ask(question)
            return status, why, time.perf_counter() - worker.since
        finally:
            if status in ("timeout", "killed") or worker.asked >= RECYCLE:
                self._replace(i)

    def _replace(self, i: int) -> None:
        self.workers[i].kill()
        if not self.closed:
            self.workers[i] = Worker(*self.recipe)

    def close(self) -> None:
        """End the workers. Verdicts still to come become "killed"."""
        self.closed = True
        for worker in self.workers:
            worker.end()
        self.threads.shutdown()
        for worker in self.workers:
            worker.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


if __name__ == "__main__":
    work(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
