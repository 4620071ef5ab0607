"""Workers and forks: limits, crashes, threads, remaining processes, access of a judge.

Each failure is tried with both kinds of judges: one that returns (status, why), and a function of
--reward.
"""
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from helpers import HANG, ROOT
from parts.grader import ForkingGrader

JUDGE = """
import ctypes, os, resource, signal, subprocess, sys, tempfile, threading, time

def judge(code, value=0):  # which says what happens in the fork
    names = dict(globals(), value=value, status="correct")
    exec(code, names)
    return names["status"], str(names["value"])

def score(problem, completion):
    judge(completion, **problem)
    return 1

def quick(code, compare=None):
    exec(code, globals() | dict(compare=compare))
    return "correct", str(os.getpid())
"""
X, SLEEP = "pass", "time.sleep(10**6)"
START_A_PROGRAM = "subprocess.Popen(['sleep', '1000000']); open(value, 'w').close()\n"
COUNT = "sys.seen = value = getattr(sys, 'seen', 0) + 1"
LONG = dict(cpu_seconds=10.0**6)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    (path := tmp_path_factory.mktemp("judge") / "judge.py").write_text(JUDGE)
    return path


def open_judge(file, kind: str, workers=1, **how) -> ForkingGrader:
    name, threshold = ("judge", None) if kind == "verifier" else ("score", 0.5)
    return ForkingGrader(f"{file}:{name}", threshold, workers=workers, **how)


def questions(kind: str, *codes: str, value=0) -> list[tuple]:
    return [(code, value) if kind == "verifier" else (dict(value=value), code) for code in codes]


@pytest.fixture(scope="module", params=["verifier", "reward"])
def both(request, file):
    with open_judge(file, request.param, **LONG) as grader:
        yield grader, request.param


def session(leader: int) -> list[int]:
    """The processes of a worker: itself, its fork, and all that these have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has ended
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def wait_until(condition) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -------------------------------------------------------------------------- failures -> status, why
@pytest.mark.parametrize("what, status, why", [
    ("1/0", "raised", "ZeroDivisionError: division by zero"),
    ("sys.exit(5)", "raised", "SystemExit: 5"),
    ("raise ValueError('x' * 2**18)", "raised", "ValueError: xxx"),
    ("print('noise'); os.write(1, b'noise'); os.system('echo noise')", "correct", "0"),
    ("sys.stdin.read(); os.rmdir(os.getcwd()); os.environ.clear()", "correct", "0"),
    ("os.fork()", "correct", ""),  # a second process that answers too is not heard
    ("threading.Thread(target=time.sleep, args=[10**6]).start()", "correct", ""),
    ("os._exit(0)", "killed", "its process ended with exit code 0"),
    ("os.fork() or time.sleep(10**6)\nos._exit(3)", "killed", "its process ended with exit code 3"),
    ("ctypes.string_at(0)", "killed", "its process ended with Segmentation fault"),
    ("bytearray(2**31)", "raised", "MemoryError"),
    ("os.closerange(3, 99)", "killed", "its process "),
    ("os.kill(os.getppid(), signal.SIGKILL)", "killed", "its process ended with Killed")])
def test_a_failure_is_named_for_what_it_is_and_the_next_question_is_answered(
        both, what, status, why):
    grader, kind = both
    before, found, after = grader.grade(questions(kind, X, what, X))
    assert (before.status, found.status, after.status) == ("correct", status, "correct")
    assert math.isnan(found.reward) == (status != "correct")
    assert kind == "reward" and status == "correct" or found.why.startswith(why), found.why


def test_an_answer_that_cannot_be_sent_is_a_failure(file):
    with open_judge(file, "verifier") as grader:
        found = grader.grade([("status = {1}",), ("status = 'x' * 2**18",), (X,)])
    assert [one.status for one in found] == ["raised", "killed", "correct"]


def test_a_judge_gets_no_fork_until_it_needs_compare(file):
    busy = "while time.process_time() < 9: pass"
    codes = "pass", "compare and compare()", "1/0", busy, "pass"
    with ForkingGrader(f"{file}:quick", workers=1, cpu_seconds=0.3) as grader:
        here, forked, raised, slow, after = grader.grade([(code,) for code in codes])
        assert [here.why, after.why] == [str(worker.pid) for worker in grader.workers]
    assert (forked.status, raised.status) == ("correct", "raised") and forked.why != here.why
    assert (slow.status, slow.why) == ("timeout", "past its time limit")


@pytest.mark.parametrize("kind", ["verifier", "reward"])
@pytest.mark.parametrize("what", ["while True: pass", "10**10**9"])  # the second is in C code
def test_what_computes_for_ever_is_ended_by_its_processor_time(file, kind, what):
    with open_judge(file, kind, **LONG | dict(cpu_seconds=0.2)) as grader:
        found, after = grader.grade(questions(kind, what, X))
    assert (found.status, found.why, after.status) == ("timeout", "past its time limit", "correct")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["verifier", "reward"])
def test_what_waits_for_ever_is_ended_by_the_clock(file, kind):
    waits = SLEEP, f"os.fork() or {SLEEP}\nos.wait()", f"signal.alarm(1); signal.alarm(0); {SLEEP}"
    with open_judge(file, kind, workers=3, clock_seconds=3.0) as grader:
        found = grader.grade(questions(kind, *waits, *[X] * 3))
    assert {one.why for one in found[:3]} == {"past the time limit of 3 s"}
    assert [one.status for one in found] == ["timeout"] * 3 + ["correct"] * 3


@pytest.mark.parametrize("end, status", [
    ("pass", "correct"), ("os._exit(1)", "killed"), ("while True: pass", "timeout")])
def test_what_a_reward_has_started_or_written_ends_with_its_answer(file, tmp_path, end, status):
    started = str(tmp_path / "started")
    is_clean = f"{COUNT}\nassert sys.seen == 1 and os.listdir() == []"
    with open_judge(file, "reward", cpu_seconds=0.3) as grader:
        write = "open('file', 'w').close(); tempfile.mkdtemp()\n"
        asked = questions("reward", START_A_PROGRAM + write + end, is_clean, value=started)
        assert [one.status for one in grader.grade(asked)] == [status, "correct"]
        assert os.path.exists(started)
        worker, = grader.workers
        wait_until(lambda: len(session(worker.pid)) == 1)


def test_a_judge_has_no_secrets_and_limits(file, monkeypatch):
    inherited = dict(LD_LIBRARY_PATH="/a", PYTHONHOME=sys.base_prefix, PYTHONPATH="/b")
    for name, value in (inherited | dict(HF_TOKEN="secret", TMPDIR=str(file.parent))).items():
        monkeypatch.setenv(name, value)
    sees = inherited | dict(
        PATH=os.environ["PATH"], PYTHONHASHSEED="0", SYMPY_GROUND_TYPES="python",
        MPMATH_NOGMPY="1", OMP_NUM_THREADS="1")
    facts = {
        "sorted({*os.environ.items()} - {(x, os.environ.get(x)) for x in ('LC_CTYPE', 'TMPDIR')})":
            sorted(sees.items()),  # of these Python sets the first
        "os.environ['TMPDIR'] == tempfile.gettempdir() == os.getcwd()": True,
        "{os.readlink(f'/proc/self/fd/{n}') for n in range(3)}": {"/dev/null"},
        "resource.getrlimit(resource.RLIMIT_DATA)[0]": 2**30,
        "round(signal.getitimer(signal.ITIMER_PROF)[0], 1)": 1.5,
        "__import__('gc').get_freeze_count() > 0": True,
        "sys.seen": 7}
    with open_judge(file, "verifier", examples=[("sys.seen = 7",)]) as grader:
        assert grader.how["clock_seconds"] == 60  # docs/rewards.md
        for what, expected in facts.items():
            assert grader.ask(f"value = {what}").result().why == str(expected), what
        worker, = grader.workers
        assert b"secret" not in Path(f"/proc/{worker.pid}/environ").read_bytes()
        folder = Path(grader.ask("value = os.getcwd()").result().why)
    assert folder.parent == file.parent and not folder.exists() and not session(worker.pid)


# ---------------------------------------------------------------------------------- ends
CLIENT = """
import os, signal, sys, time
root, judge, started = sys.argv[1:]
sys.path.insert(0, root)
signal.signal(signal.SIGINT, lambda *_: None)
from parts.grader import ForkingGrader
grader = ForkingGrader(judge, workers=1, clock_seconds=2.0)
before, = grader.grade([("pass",)])
os.killpg(0, signal.SIGINT)
after, = grader.grade([("pass",)])
print(grader.workers[0].pid, before.status, after.status, flush=True)
grader.ask(f"open({started!r}, 'w').close(); time.sleep(10**6)")
while not os.path.exists(started):
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_client_that_is_killed_leaves_nothing(file, tmp_path):
    """Nor does Ctrl-C in its terminal, which reaches the whole process group, end a worker."""
    (tmp_path / "folders").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, ROOT, f"{file}:judge", tmp_path / "started"], text=True,
        env=os.environ | dict(TMPDIR=str(tmp_path / "folders")), capture_output=True,
        start_new_session=True, timeout=HANG)
    assert (done.stderr, done.returncode) == ("", -signal.SIGKILL)
    worker, *statuses = done.stdout.split()
    assert statuses == ["correct", "correct"]
    wait_until(lambda: not session(int(worker)) and not os.listdir(tmp_path / "folders"))


def test_closing_ends_all_that_still_had_to_be_judged(file, tmp_path):
    with open_judge(file, "verifier", **LONG) as grader:
        asked = [grader.ask(START_A_PROGRAM + SLEEP, str(tmp_path / "started")) for _ in range(3)]
        wait_until((tmp_path / "started").exists)
        worker, = grader.workers
    assert asked[0].result().status == "killed" and asked[1].cancelled() and asked[2].cancelled()
    assert not session(worker.pid)
