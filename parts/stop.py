"""How a run is stopped, and how it shows that it is alive."""
import contextlib
import os
import signal
import threading
import time

from tqdm import tqdm


class Stop:
    """Ctrl-C or SIGTERM: finish what cannot be left half done, save, leave.

    A second one ends the program at once.
    """

    requested = False
    words = b"\nstopping after this phase with a checkpoint (once more: at once) ...\n"
    second = signal.SIG_DFL

    @classmethod
    def install(cls) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, cls.request)

    @classmethod
    def request(cls, number, frame) -> None:
        cls.requested = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, cls.second)
        # not print: it fails where the signal comes while something else is being printed
        os.write(2, cls.words)


class Interrupted(Exception):
    """Raised out of the sampling phase: nothing was learnt from its samples, draw them again."""


@contextlib.contextmanager
def timed(seconds: dict, phase: str, every: float = 60.0):
    """Adds the wall time of a phase to seconds["seconds_PHASE"].

    A phase that takes minutes says `every` so many seconds that it is still alive.
    """
    start, done = time.perf_counter(), threading.Event()

    def heartbeat():
        while not done.wait(every):
            tqdm.write(f"... {phase}: running for {time.perf_counter() - start:.0f} s "
                       f"(kill -USR1 {os.getpid()} shows where)")

    threading.Thread(target=heartbeat, daemon=True).start()
    try:
        yield
    finally:
        done.set()
        key = f"seconds_{phase}"
        seconds[key] = seconds.get(key, 0.0) + time.perf_counter() - start
