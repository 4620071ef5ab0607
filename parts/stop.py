"""How a run is stopped, and how it shows that it is alive."""
import contextlib
import os
import signal
import stat
import threading
import time

from tqdm import tqdm


class Stop:
    """Ctrl-C, SIGTERM, or a terminal that closes (SIGHUP): save and exit. An update is finished
    before; sampling and evaluation are given up.

    A second Ctrl-C or SIGTERM ends the program at once. A second SIGHUP does not: when a terminal
    closes, the shell and the kernel send one each.
    """

    requested = 0  # the signal
    words = b"\nstopping with a checkpoint (once more: at once) ...\n"
    second = signal.SIG_DFL

    @classmethod
    def install(cls) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, cls.request)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup sets that
            signal.signal(signal.SIGHUP, cls.request)

    @classmethod
    def request(cls, number, frame) -> None:
        cls.requested = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, cls.second)
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
            leave_terminal()
        with contextlib.suppress(OSError):  # Ctrl-C may have ended the `tee` behind our pipe
            os.write(2, cls.words)  # `print` fails if the signal interrupts another print


def leave_terminal() -> None:
    """Send output nowhere, unless it goes to a file: writing to a closed terminal would raise an
    error, and the checkpoint would be lost.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        if not stat.S_ISREG(os.fstat(output).st_mode):
            os.dup2(nowhere, output)


class Interrupted(Exception):
    """Raised out of sampling when a stop is wanted. Nothing was learnt from these samples yet."""


@contextlib.contextmanager
def timed(seconds: dict, phase: str, every: float = 60.0):
    """Add the wall time of a phase to seconds["seconds_PHASE"].

    Every `every` seconds a line says that a long phase is still running; from the third on also
    how to see where.
    """
    start, done = time.perf_counter(), threading.Event()

    def heartbeat():
        lines = 0
        while not done.wait(every):
            lines += 1
            hint = f" (kill -USR1 {os.getpid()} shows where)" if lines >= 3 else ""
            tqdm.write(f"... {phase}: {time.perf_counter() - start:.0f} s so far{hint}")

    threading.Thread(target=heartbeat, daemon=True).start()
    try:
        yield
    finally:
        done.set()
        key = f"seconds_{phase}"
        seconds[key] = seconds.get(key, 0.0) + time.perf_counter() - start
