"""How a run is stopped, and how it shows that it is alive."""
import os
import signal
import time

import pytest

from parts.stop import Stop, timed

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def installed(monkeypatch):
    """`Stop` as the program installs it; the handlers of the tests come back afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(Stop, "requested", False)
    Stop.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_asks_and_the_second_of_either_kind_ends(installed, number, capfd):
    os.kill(os.getpid(), number)
    assert Stop.requested and "stopping after this phase" in capfd.readouterr().err
    assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_DFL] * 2


def test_a_phase_that_runs_twice_counts_twice_even_if_it_fails():
    seconds = dict(seconds_sample=100.0)
    with pytest.raises(ZeroDivisionError), timed(seconds, "sample"):
        1 / 0
    assert 100 < seconds["seconds_sample"] < 101
    with timed(seconds, "update"):
        time.sleep(0.01)
    assert seconds["seconds_update"] >= 0.01 and 100 < seconds["seconds_sample"] < 101


def test_a_long_phase_says_so_once_in_a_while_until_it_ends(capsys):
    seconds = {}
    with timed(seconds, "sample", every=0.1):
        time.sleep(0.35)
    said = capsys.readouterr().out.count("... sample: running")
    assert 1 <= said <= seconds["seconds_sample"] / 0.1
    time.sleep(0.25)
    assert not capsys.readouterr().out, "not after its end"
