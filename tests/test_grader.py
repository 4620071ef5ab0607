"""Server, workers, children: limits, deaths, order, threads, what a judge may see."""
import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import HANG, ROOT
from parts.grader import ForkingGrader

JUDGE = """
import os, resource, signal, subprocess, sys, threading, time

def judge(code, value=0):  # which says what happens in the child
    names = dict(globals(), value=value, found="correct", why="")
    exec(code, names)
    return names["found"], str(names["why"])
"""
START_A_PROGRAM = "subprocess.Popen(['sleep', '1000000']); open(value, 'w').close()\n"
X, WRONG, SLEEP = "pass", "found = 'wrong'", "time.sleep(10**6)"
LATE = "past the time limit of 0.2 s"
KILL_WORKER = "os.kill(os.getppid(), signal.SIGKILL)"
LONG, SHORT = 10.0**6, 0.2  # s
Patient = partial(ForkingGrader, cpu_seconds=LONG, waiting_seconds=LONG)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    file = tmp_path_factory.mktemp("judge") / "judge.py"
    file.write_text(JUDGE)
    return f"{file}:judge"


@pytest.fixture(scope="module")
def grader(judge):
    """A function that does as it is told, however long that takes."""
    with Patient(judge, [[X]], workers=1) as made:
        yield made


@pytest.fixture(scope="module")
def strict(judge):
    with ForkingGrader(judge, [[X]], workers=1, cpu_seconds=SHORT, waiting_seconds=SHORT) as made:
        yield made


def session(leader: int) -> list[int]:
    """The processes of a server: its own, its forks, and all that these have started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, *_, of = stat.read_text().rpartition(") ")[2].split()[:4]
            if int(of) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found


def wait_until(condition) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --------------------------------------------------------------- what it does -> status, why
@pytest.mark.parametrize("what, why", [
    (SLEEP, LATE),
    ("os.kill(os.getpid(), signal.SIGSTOP)", LATE),
    ("os.fork() or time.sleep(10**6)\nos.wait()", LATE),
    ("os.setpgid(0, os.getpgid(os.getppid())); time.sleep(10**6)", LATE),
    ("while True: pass", f"{LATE} of computing"),
    ("10**10**9", f"{LATE} of computing"),  # inside C code
    ("signal.signal(signal.SIGPROF, signal.SIG_IGN)\nwhile True: pass",  # it stops the timer
     "its process was ended by signal 9 (Killed)")])
def test_what_hangs_is_ended(strict, what, why):
    found = strict.ask(what).result()
    assert found.status == ("timeout" if LATE in why else "killed")
    assert found.why == why and math.isnan(found.reward)
    assert strict.ask(X).result().status == "correct"


@pytest.mark.parametrize("what, why", [
    ("os._exit(3)", "its process ended with exit code 3"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "its process was ended by signal 11 "),
    ("os.kill(os.getpid(), signal.SIGRTMIN)", "its process was ended by signal "),
    ("bytearray(2**31)", "out of memory: it may take 1 GB"),
    ("os.execvp('true', ['true'])", "its process "), ("os.closerange(0, 99)", "its process "),
    (KILL_WORKER, "the process that it was forked from has ended"),
    ("for fd in range(3, 30):\n try: os.write(fd, b'junk')\n except OSError: pass",
     "the process that it was forked from has ended")])
def test_a_death_is_named_for_what_it_is(grader, what, why):
    found = grader.ask(what).result()
    assert found.status == "killed" and math.isnan(found.reward)
    assert found.why.startswith(why), found.why
    assert grader.ask(X).result().status == "correct"


@pytest.mark.parametrize("what", [
    "print('noise'); os.write(1, b'noise\\n'); os.write(2, b'noise\\n')",
    "sys.stdin.read()", "os.fork()", "os.rmdir(os.getcwd())",
    "value += getattr(sys, 'seen', 0); sys.seen = 1",
    "os.setpgid(0, os.getpgid(os.getppid()))",
    "threading.Thread(target=time.sleep, args=[10**6]).start()",
    "open('file', 'w').close(); os.mkdir('folder'); os.symlink('/', 'link')",
    "os.environ.clear(); signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(0, 15)"])
def test_what_does_no_harm_is_judged_and_leaves_nothing_to_the_next(grader, what):
    """A second process answers too, for example, but is not heard."""
    asked = [grader.ask(f"{what}\nwhy = value", n) for n in range(3)]
    assert [answer.result().why for answer in asked] == ["0", "1", "2"]
    assert grader.ask("why = os.listdir(), os.listdir(os.environ['TMPDIR'])").result().why == (
        "([], [])")


def test_a_child_cannot_speak_for_its_worker(grader):
    """It may write into all files that it has: the next question gets its own answer."""
    forge = """for fd in range(3, 30):
        try: os.write(fd, b'["correct", "forged"]\\n')
        except OSError: pass"""
    asked = [grader.ask(what) for what in (forge, "why = 2", "why = 3")]
    assert [answer.result().why for answer in asked] == ["forged", "2", "3"]


def test_a_child_that_computes_is_not_ended_by_the_clock(judge):
    """Nor one that others keep from a processor: a busy machine's verdicts are an idle one's."""
    with ForkingGrader(judge, [], workers=1, cpu_seconds=LONG, waiting_seconds=SHORT) as grader:
        compute = "while time.process_time() < value: pass"
        assert grader.ask(compute, 4 * SHORT).result().status == "correct"


@pytest.mark.parametrize("end", ["pass", "os._exit(1)", SLEEP])
def test_what_a_child_has_started_ends_with_it(judge, tmp_path, end):
    with ForkingGrader(judge, workers=1, waiting_seconds=1) as grader:
        grader.ask(START_A_PROGRAM + end, str(tmp_path / "started")).result()
        assert (tmp_path / "started").exists()
        wait_until(lambda: len(session(grader.process.pid)) == 2)  # the server and its worker


def test_a_child_is_poor_and_limited(judge, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with ForkingGrader(judge, workers=1) as grader:
        for kind in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE):
            resource.prlimit(grader.process.pid, kind, (2**50, 2**50))  # as of the user's shell
        here = grader.ask("why = os.getcwd()").result().why
        for what, expected in {
                "'HF_TOKEN' in os.environ": False, "os.environ['TMPDIR']": here,
                "os.path.dirname(os.getcwd())": grader.folder,
                "os.stat('.').st_mode & 0o777": 0o700,
                "{os.readlink(f'/proc/self/fd/{n}') for n in range(3)}": {"/dev/null"},
                "resource.getrlimit(resource.RLIMIT_DATA)": (2**30, 2**30),
                "resource.getrlimit(resource.RLIMIT_CORE)": (0, 0),
                "resource.getrlimit(resource.RLIMIT_FSIZE)": (2**20, 2**20),
                "resource.getrlimit(resource.RLIMIT_CPU)": (2, 2),
                "signal.getitimer(signal.ITIMER_PROF)[0] > 0": True}.items():
            assert grader.ask(f"why = {what}").result().why == str(expected), what
        assert "secret" not in Path(f"/proc/{grader.process.pid}/environ").read_text()
    assert not session(grader.process.pid) and not os.path.exists(grader.folder)


# ---------------------------------------------------------------------------------- ends and deaths
CLIENT = """
import os, signal, sys, tempfile, time
root, folders, judge, started = sys.argv[1:]
sys.path.insert(0, root)
tempfile.tempdir = folders
signal.signal(signal.SIGINT, lambda *_: None)
from parts.grader import ForkingGrader
grader = ForkingGrader(judge, [["pass"]], workers=2, cpu_seconds=10.0**6, waiting_seconds=10.0**6)
print(grader.process.pid, flush=True)
if started:
    grader.ask("pass").result()
    os.killpg(0, signal.SIGINT)
    print({answer.status for answer in grader.grade([("pass", n) for n in range(9)])}, flush=True)
    grader.ask(f"open({started!r}, 'w').close(); time.sleep(10**6)")
    while not os.path.exists(started):
        time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["", "working"])
def test_a_client_that_is_killed_leaves_nothing(moment, judge, tmp_path):
    """Nor does Ctrl-C in its terminal, which reaches the whole process group, end a server."""
    (tmp_path / "folders").mkdir()
    started = moment and tmp_path / moment
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, ROOT, tmp_path / "folders", judge, started], text=True,
        capture_output=True, start_new_session=True, timeout=HANG)
    assert (done.stderr, done.returncode) == ("", -signal.SIGKILL)
    server, *said = done.stdout.splitlines()
    assert said == (["{'correct'}"] if moment else [])
    wait_until(lambda: not session(int(server)) and not os.listdir(tmp_path / "folders"))


def test_closing_ends_the_servers_and_what_they_still_had_to_do(judge, tmp_path):
    with Patient(judge, workers=1) as grader:
        asked = [grader.ask(START_A_PROGRAM + SLEEP, str(tmp_path / "started")) for _ in range(3)]
        wait_until((tmp_path / "started").exists)
    assert asked[0].result().status == "killed" and asked[1].cancelled() and asked[2].cancelled()
    wait_until(lambda: not session(grader.process.pid))
    assert not os.path.exists(grader.folder)


def test_without_a_server_nothing_more_is_judged(judge):
    with Patient(judge, workers=1) as grader:
        assert grader.ask(X).result().status == "correct"
        grader.process.kill()
        assert grader.ask(KILL_WORKER).result().status == "killed"
        with pytest.raises(RuntimeError, match="its process was ended by signal 9 "):
            grader.ask(X).result()


# ------------------------------------------------------------------------------- order, threads
COUNT = "sys.seen = getattr(sys, 'seen', 0) + 1; why = sys.seen"


@pytest.mark.parametrize("failure, status", [
    ("os._exit(1)", "killed"), ("1/0", "raised"), ("while True: pass", "timeout")])
def test_a_child_of_several_questions_fails_on_none_that_a_new_one_answers(judge, failure, status):
    """Its limits are those of one question, so all that it has kept was computed within them."""
    if_used = f"{COUNT}\nif sys.seen > 1: {failure}" if failure[0] != "w" else (
        f"{COUNT}\nwhile sys.seen > 1: pass")
    with ForkingGrader(judge, [[X]], workers=1, cpu_seconds=0.5, keep=True) as grader:
        assert [v.why for v in grader.grade([(COUNT,)] * 4)] == ["1", "2", "3", "4"]
        assert [v.why for v in grader.grade([(if_used,)] * 3)] == ["1", "1", "1"]
        burn = "while time.process_time() < value: pass"
        found = grader.grade([(f"value += time.process_time()\n{burn}", 0.2)] * 4)
        assert {verdict.status for verdict in found} == {"correct"}
        always, after = grader.grade([(failure,), (COUNT,)])
        assert (always.status, after.why) == (status, "1")


def test_results_come_in_order_from_any_thread(judge):
    questions = [((X, WRONG)[n % 3 == 0], n) for n in range(90)]
    expected = [float(n % 3 > 0) for n in range(90)]
    with Patient(judge, [[X]], workers=2) as grader, ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(grader.grade, questions) for _ in range(4)]
        for verdicts in asked:
            assert [verdict.reward for verdict in verdicts.result(HANG)] == expected
        for key in reversed(range(90)):
            problem, rollout = questions[key]
            grader.submit(("any", key), SimpleNamespace(judged_by=problem),
                          SimpleNamespace(text=rollout))
        assert [grader.result(("any", key)).reward for key in range(90)] == expected
        with pytest.raises(KeyError):
            grader.result(("any", 0))


def test_importing_is_light_and_servers_do_not_import_the_main_script(tmp_path):
    """Under a lower limit than our own, as on a full disk or by `ulimit -f`."""
    script = tmp_path / "trainer.py"
    script.write_text(f"""
import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
sys.path.insert(0, {str(ROOT)!r}); open("started", "a").write("x")
from rewards import Grader
assert not {{"sympy", "torch", "math_verify"}} & set(sys.modules)
with Grader() as grader:
    print(grader.grade([(r"\\sqrt{{12}}", r"\\boxed{{2\\sqrt{{3}}}}")])[0].status)
assert "sympy" not in sys.modules
""")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True,
                          timeout=HANG)
    assert (done.stdout, (tmp_path / "started").read_text()) == ("correct\n", "x"), done.stderr
