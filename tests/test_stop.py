"""How a run is stopped, and how it shows that it is alive."""
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

from conftest import ROOT
from helpers import HANG
from parts import stop
from parts.stop import Stop, timed

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def handlers(monkeypatch):
    """Those of the tests come back afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(Stop, "requested", 0)
    monkeypatch.setattr(stop, "leave_terminal", lambda: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_asks_and_the_second_of_either_kind_ends(handlers, number, capfd):
    Stop.install()
    os.kill(os.getpid(), number)
    assert Stop.requested == number and "stopping with a checkpoint" in capfd.readouterr().err
    assert [signal.getsignal(each) for each in SIGNALS[:2]] == [signal.SIG_DFL] * 2
    if number == signal.SIGHUP:  # of a terminal that closes, shell and kernel send one each
        assert signal.getsignal(number) == signal.SIG_IGN


def test_a_signal_does_no_harm_where_nobody_reads_any_more(handlers):
    """`minirl.py 2>&1 | tee log`: Ctrl-C ends tee first, and must not end half an update."""
    Stop.install()
    ours, theirs = os.pipe()
    os.close(ours)
    before = os.dup(2)
    os.dup2(theirs, 2)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(theirs)
    assert Stop.requested == signal.SIGINT


def test_what_nohup_has_set_stays(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Stop.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not Stop.requested


def child(code: str, **how) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-uc", f"import sys; sys.path.insert(0, '{ROOT}')\n"
                             + code], text=True, **how)


def test_a_second_ctrl_c_ends_the_program_at_once():
    process = child("import time; from parts.stop import Stop; Stop.install(); print()\n"
                    "while True: time.sleep(60)", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    lines = process.stderr.readline() + process.stderr.readline()
    assert "stopping with a checkpoint (once more: at once)" in lines
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG) == -signal.SIGTERM


IN_A_TERMINAL = """
import fcntl, termios, time; from parts.stop import Stop
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
Stop.install(); open("started", "w").close()
while not Stop.requested: time.sleep(.01)
print("not to be seen by anybody"); sys.stdout.flush(); sys.stderr.write("nor this\\n")
open("saved", "w").close()
"""


@pytest.mark.parametrize("log", [False, True], ids=["terminal", "log file"])
def test_a_terminal_that_closes_does_not_stop_the_saving(tmp_path, log):
    """Everything printed from then on would fail; what goes into a file is still wanted."""
    ours, theirs = pty.openpty()
    out = open(tmp_path / "log", "w") if log else theirs
    process = child(IN_A_TERMINAL, stdin=theirs, stdout=out, stderr=theirs, cwd=tmp_path,
                    start_new_session=True)
    os.close(theirs)
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.close(ours)
    assert process.wait(HANG) == 0 and (tmp_path / "saved").exists()
    assert not log or "not to be seen" in (tmp_path / "log").read_text()


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(tmp_path):
    """A torch that takes for ever to import stands in for one that takes seconds."""
    (tmp_path / "torch.py").write_text("import time; print('importing', flush=True)\n"
                                       "while True: time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, ROOT / "minirl.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | dict(PYTHONPATH=str(tmp_path)))
    said = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert said == "importing\n" and process.communicate(timeout=HANG)[0] == ""
    assert process.returncode == -signal.SIGINT


def test_a_phase_that_runs_twice_counts_twice_even_if_it_fails(monkeypatch):
    clock = iter([5.0, 5.5, 7.0, 8.0])
    monkeypatch.setattr(stop.time, "perf_counter", lambda: next(clock))
    seconds = dict(seconds_sample=100.0)
    with pytest.raises(ZeroDivisionError), timed(seconds, "sample"):
        1 / 0
    with timed(seconds, "update"):
        pass
    assert seconds == dict(seconds_sample=100.5, seconds_update=1.0)


def test_a_long_phase_says_that_it_is_alive_until_it_ends(monkeypatch):
    said, enough = [], threading.Event()

    def write(text):
        said.append(text)
        if len(said) == 3:
            enough.set()

    monkeypatch.setattr(stop.tqdm, "write", write)
    others = set(threading.enumerate())
    with timed({}, "sample", every=0.01):
        assert enough.wait(HANG)
        (heartbeat,) = set(threading.enumerate()) - others
    heartbeat.join(HANG)
    assert not heartbeat.is_alive()  # and says no more
    assert all(line.startswith("... sample: ") and line.endswith(" s so far") for line in said[:2])
    assert said[2].endswith(f" s so far (kill -USR1 {os.getpid()} shows where)")
