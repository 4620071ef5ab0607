"""The worker processes: limits, deaths, order, threads, what a worker may see."""
import inspect
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import HANG
from parts.grader import CPU_SHARE, Worker, WorkerPool

ROOT = Path(__file__).parent.parent
JUDGE = """
import os, signal, subprocess, time

def judge(code, value=0):  # which says what happens in the worker
    names = dict(globals(), value=value, found="correct", why=os.getpid())
    exec(code, names)
    return names["found"], str(names["why"])
"""
START_A_CHILD = """
child = subprocess.Popen(["sleep", "1000000"])
with open(value + ".new", "w") as file:
    file.write(str(child.pid))
os.rename(value + ".new", value)
"""
X, WRONG, SLEEP = "pass", "found = 'wrong'", "time.sleep(10**6)"
DIE_ONCE = "os.path.exists(value) and (os.unlink(value), os.kill(os.getpid(), signal.SIGKILL))"
LONG, SHORT = 10**6, 0.2    # s that a question may wait; 3/8 of it are for computing


@pytest.fixture
def judge(tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    return f"{tmp_path / 'judge.py'}:judge"


@pytest.fixture
def pool(judge):
    """One worker with a function that does as it is told."""
    with WorkerPool(judge, "", [X], 1, timeout=LONG, memory_gb=1) as made:
        yield made


def runs(pid: int) -> bool:
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(condition) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize("what, why, end", [
    (SLEEP, "past the time limit of 0.2 s", signal.SIGKILL),
    ("os.kill(os.getpid(), signal.SIGSTOP)", "past the time limit of 0.2 s", signal.SIGKILL),
    ("while True: pass", "past the time limit of 0.075 s of computing", signal.SIGPROF)])
def test_a_worker_that_hangs_is_killed_and_replaced(judge, monkeypatch, what, why, end):
    asked, ask = [], Worker.ask
    monkeypatch.setattr(Worker, "ask", lambda self, q: asked.append(q) or ask(self, q))
    with WorkerPool(judge, "", [X], 1, timeout=SHORT, memory_gb=1) as pool:
        hung = pool.workers[0].process
        found = pool.ask(what).result()
        assert (found.status, found.why) == ("timeout", why) and len(asked) == 1  # not once more
        assert hung.returncode == -end
        assert pool.ask(X).result().why not in ("", str(hung.pid))


def test_the_limits_are_those_of_the_documentation():
    defaults = {name: p.default for name, p in inspect.signature(WorkerPool).parameters.items()}
    assert (defaults["timeout"], defaults["memory_gb"], defaults["workers"]) == (4, 1, 2)
    assert CPU_SHARE * 4 == 1.5


def test_the_clock_stands_still_while_a_worker_computes(judge, monkeypatch):
    """Or is kept from it by others: the verdicts of a busy machine are those of an idle one."""
    monkeypatch.setattr("parts.grader.CPU_SHARE", 100)
    with WorkerPool(judge, "", [X], 1, timeout=SHORT, memory_gb=1) as pool:
        compute = "while time.process_time() < value: pass"
        assert pool.ask(compute, 4 * SHORT).result().status == "correct"


@pytest.mark.parametrize("what, why", [
    ("os._exit(3)", "its process ended with exit code 3"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "its process was ended by SIGSEGV"),
    ("bytearray(2**31)", "out of memory: it may take 1 GB")])
def test_a_death_is_named_for_what_it_is(pool, what, why):
    found = pool.ask(what).result()
    assert (found.status, found.why) == ("killed", why) and math.isnan(found.reward)
    assert pool.ask(X).result().status == "correct"


def test_what_a_worker_has_started_ends_with_it(pool, tmp_path):
    found = pool.ask(START_A_CHILD + "os._exit(1)", str(tmp_path / "pid")).result()
    assert found.status == "killed"
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not runs(child))


def test_only_one_of_two_processes_answers_after_a_fork(pool):
    answers = [pool.ask("os.fork(); why = value", n) for n in range(9)]
    assert [answer.result().why for answer in answers] == [str(n) for n in range(9)]


@pytest.mark.skipif(not os.path.exists("/proc/self/limits"), reason="reads /proc")
def test_a_worker_is_fresh_poor_and_limited(judge, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with WorkerPool(judge, "", [X], 1, timeout=LONG, memory_gb=1) as pool:
        worker, pid = pool.workers[0], pool.ask(X).result().why
        process = Path(f"/proc/{pid}")
        assert "secret" not in (process / "environ").read_text()
        assert os.readlink(process / "cwd") == os.path.realpath(worker.folder.name)
        assert os.listdir(worker.folder.name) == []
        lines = (process / "limits").read_text().splitlines()
        limits = {line[:25].strip(): line[26:].split()[0] for line in lines}
        assert limits["Max data size"] == str(2 ** 30)
        assert (limits["Max core file size"], limits["Max file size"]) == ("0", str(2 ** 20))
        assert worker.process.args[-2:] == [str(CPU_SHARE * LONG), str(2 ** 30)]
    assert not runs(int(pid)) and not os.path.exists(worker.folder.name)


# ---------------------------------------------------------------------------------- ends and deaths
@pytest.mark.skipif(not os.path.exists("/proc/self/limits"), reason="reads /proc")
@pytest.mark.parametrize("moment", ["starting", "working"])
def test_ctrl_c_in_a_terminal_does_not_reach_the_workers(moment, judge, tmp_path):
    """A terminal sends it to the whole process group. Then the parent is killed: the workers,
    what they have started and their folders go too."""
    (tmp_path / "folders").mkdir()
    script = f"""
import os, signal, sys, tempfile, time; sys.path.insert(0, {str(ROOT)!r})
tempfile.tempdir = {str(tmp_path / "folders")!r}
signal.signal(signal.SIGINT, lambda *_: None)
from parts.grader import WorkerPool
pool = WorkerPool({judge!r}, "", [{X!r}], 2, {LONG}, 1)
if {moment!r} == "working":
    pool.grade([({X!r}, 1), ({X!r}, 2)])
before = [worker.process.pid for worker in pool.workers]
answers = [pool.ask({X!r}, n) for n in range(10, 14)]
os.killpg(0, signal.SIGINT)
statuses = [answer.result().status for answer in answers]
after = [worker.process.pid for worker in pool.workers]  # those that died are replaced by now
print(statuses, before == after)
pool.ask({START_A_CHILD + SLEEP!r}, {str(tmp_path / "pid")!r})
while not os.path.exists({str(tmp_path / "pid")!r}):
    time.sleep(0.02)
print(*before, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          start_new_session=True, timeout=HANG)
    assert (done.stderr, done.returncode) == ("", -signal.SIGKILL)
    statuses, workers = done.stdout.splitlines()
    assert statuses == "['correct', 'correct', 'correct', 'correct'] True"
    left = [*map(int, workers.split()), int((tmp_path / "pid").read_text())]
    wait_until(lambda: not any(map(runs, left)) and not os.listdir(tmp_path / "folders"))


def test_closing_ends_the_workers_and_what_they_still_had_to_do(pool):
    asked = [pool.ask(SLEEP, n) for n in range(5)]
    pids = [worker.process.pid for worker in pool.workers]
    pool.close()
    assert {answer.result().status for answer in asked} == {"killed"}
    assert not any(map(runs, pids))


def test_workers_killed_in_the_middle_of_a_batch_change_nothing(judge):
    with WorkerPool(judge, "", [X], 2, timeout=LONG, memory_gb=1) as pool:
        asked = [pool.ask((X, WRONG)[n % 2], n) for n in range(400)]
        verdicts = [asked[0].result()]                                      # the batch is under way
        for worker in list(pool.workers):
            os.kill(worker.process.pid, signal.SIGKILL)
        verdicts += [future.result() for future in asked[1:]]
    assert [verdict.status for verdict in verdicts] == ["correct", "wrong"] * 200


def test_a_question_whose_worker_was_killed_is_asked_once_more(pool, tmp_path):
    marker = tmp_path / "marker"
    marker.touch()
    assert pool.ask(DIE_ONCE, str(marker)).result().status == "correct"


def test_a_missing_verifier_says_so(tmp_path):
    (tmp_path / "judge.py").write_text("import math_verifier")
    with WorkerPool(f"{tmp_path / 'judge.py'}:judge", workers=1) as pool:
        with pytest.raises(RuntimeError, match="No module named 'math_verifier' .line 1 of judge"):
            pool.grade([(X,)])


# -------------------------------------------------------------------------- order, threads, memory
def test_results_come_in_order_from_any_thread(judge):
    questions = [((X, WRONG)[n % 3 == 0], n) for n in range(90)]
    expected, results = [float(n % 3 > 0) for n in range(90)], {}
    with WorkerPool(judge, "", [X], 2, timeout=LONG, memory_gb=1) as pool:
        def grade(k: int) -> None:
            results[k] = [verdict.reward for verdict in pool.grade(questions)]
        threads = [threading.Thread(target=grade, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        assert results == dict.fromkeys(range(4), expected)
        for key in reversed(range(90)):
            problem, rollout = questions[key]
            pool.submit(("any", key), SimpleNamespace(judged_by=problem),
                        SimpleNamespace(text=rollout))
        assert [pool.result(("any", key)).reward for key in range(90)] == expected
        with pytest.raises(KeyError):
            pool.result(("any", 0))


def test_a_worker_is_replaced_after_many_questions(pool, monkeypatch):
    """The function may keep caches: those of sympy grow."""
    monkeypatch.setattr("parts.grader.RECYCLE", 3)
    pids = [pool.ask(X, n).result().why for n in range(7)]
    assert len(set(pids[:3])) == len(set(pids[3:6])) == 1 and len(set(pids)) == 3


def test_importing_is_light_and_workers_do_not_import_the_main_script(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(ROOT)!r}); open("started", "a").write("x")
from rewards import Grader
assert not {{"sympy", "torch", "math_verify"}} & set(sys.modules)
with Grader() as grader:
    print(grader.grade([(r"\\sqrt{{12}}", r"\\boxed{{2\\sqrt{{3}}}}")])[0].status)
assert "sympy" not in sys.modules
""")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True,
                          timeout=HANG)
    assert (done.stdout, (tmp_path / "started").read_text()) == ("correct\n", "x"), done.stderr
