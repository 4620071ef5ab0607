"""How a run is stopped, and how it shows that it is alive."""
import contextlib
import os
import signal
import stat
import threading
import time

from tqdm import tqdm


class Stop:
    """Ctrl-C, SIGTERM, or SIGHUP of a terminal that closes: finish what cannot be left half done,
    save, leave.

    A second one ends the program at once. Not a second SIGHUP: shell and kernel send one each.
    """

    requested = 0  # the signal
    words = b"\nstopping after this phase with a checkpoint (once more: at once) ...\n"
    second = signal.SIG_DFL

    @classmethod
    def install(cls) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, cls.request)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(signal.SIGHUP, cls.request)

    @classmethod
    def request(cls, number, frame) -> None:
        cls.requested = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, cls.second)
        # An error here would end whatever is being done. The reader of a pipe may be gone: the same
        # Ctrl-C has ended the `tee` behind it.
        with contextlib.suppress(OSError):
            if number == signal.SIGHUP:
                signal.signal(number, signal.SIG_IGN)
                speak_to_nobody()
            # not print: it fails where the signal comes while something else is being printed
            os.write(2, cls.words)


def speak_to_nobody() -> None:
    """Without a terminal every print would fail, and with it what is to be saved. A file stays."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        if not stat.S_ISREG(os.fstat(output).st_mode):
            os.dup2(nobody, output)


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
