"""The worker processes: limits, deaths, order, threads, what a worker may see."""
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from parts.grader import WorkerPool
from rewards import Grader

ROOT = Path(__file__).parent.parent
HANG = r"\int_0^1 \frac{\sin(x^3)}{e^{x^2}+\ln(x+2)}dx"


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=2) as grader:
        yield grader


def boxed(answer: str) -> str:
    return f"So the answer is \\boxed{{{answer}}}."


def undecided(n: int) -> tuple[list, list]:
    """Pairs that only a worker can judge, and their rewards."""
    pairs = [(rf"2\sqrt{{2}}+{k}", rf"\boxed{{\sqrt{{8}}+{k + k % 2}}}") for k in range(n)]
    return pairs, [1.0 - k % 2 for k in range(n)]


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_batch_changes_nothing():
    pairs, expected = undecided(80)
    with Grader(workers=2) as grader:
        for key, pair in enumerate(pairs):
            grader.submit(key, *pair)
        first = grader.result(0)                                       # the batch is under way
        for worker in list(grader.workers):
            os.kill(worker.process.pid, signal.SIGKILL)
        verdicts = [first] + [grader.result(key) for key in range(1, len(pairs))]
    assert [verdict.reward for verdict in verdicts] == expected
    assert {verdict.status for verdict in verdicts} == {"correct", "wrong"}


@pytest.mark.slow
def test_results_come_in_order_from_any_thread_and_are_the_same_again(grader):
    pairs, expected = undecided(30)
    pairs += [("5", r"\boxed{5}"), ("5", "5"), ("5", r"\boxed{6}")]
    expected += [1.0, 0.0, 0.0]
    results = {}

    def grade(k: int) -> None:
        results[k] = grader.grade(pairs)
    threads = [threading.Thread(target=grade, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all([verdict.reward for verdict in results[k]] == expected for k in range(4))
    with Grader(workers=1) as other:
        assert [(v.reward, v.status, v.why) for v in other.grade(pairs[::-1])][::-1] \
            == [(v.reward, v.status, v.why) for v in results[0]]
    for key in reversed(range(len(pairs))):
        grader.submit(("any", key), *pairs[key])
    assert [grader.result(("any", key)).reward for key in range(len(pairs))] == expected
    with pytest.raises(KeyError):
        grader.result(("any", 0))


def test_closing_ends_the_workers_and_what_they_still_had_to_do():
    grader = Grader(workers=1)
    for k in range(5):
        grader.submit(k, r"\sqrt{2}", boxed(f"{HANG}+{k}"))
    pid = grader.workers[0].process.pid
    grader.close()
    assert [grader.result(k).reward for k in range(5)] == [0.0] * 5
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def runs(pid: str) -> bool:
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc/self/limits"), reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting", "working"])
def test_ctrl_c_in_a_terminal_does_not_reach_the_workers(moment, tmp_path):
    """A terminal sends it to the whole process group. Then the parent is killed:
    the workers end too."""
    script = f"""
import os, signal, sys, tempfile, time; sys.path.insert(0, {str(ROOT)!r})
tempfile.tempdir = {str(tmp_path)!r}
signal.signal(signal.SIGINT, lambda *_: None)
from rewards import Grader
grader = Grader(workers=2)
if {moment!r} == "starting":
    time.sleep(0.2)
else:
    grader.grade([("4", r"\\boxed{{\\sqrt{{16}}}}")] * 2)
before = [worker.process.pid for worker in grader.workers]
for k in range(4):
    grader.submit(k, r"\\sqrt{{12}}", rf"\\boxed{{{{2\\sqrt{{{{3}}}}+{{k}}-{{k}}}}}}")
os.killpg(0, signal.SIGINT)
verdicts = [grader.result(k).status for k in range(4)]
after = [worker.process.pid for worker in grader.workers]  # those that died are replaced by now
print(verdicts, before == after)
grader.submit("hangs", r"\\sqrt{{2}}", {boxed(HANG)!r})
time.sleep(0.3)
print(*before, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          start_new_session=True)
    verdicts, pids = done.stdout.splitlines()
    assert verdicts == "['correct', 'correct', 'correct', 'correct'] True"
    assert (done.stderr, done.returncode) == ("", -signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(runs, pids.split())):
        assert time.monotonic() < deadline, "a worker has outlived its parent"
        time.sleep(0.1)
    assert not list(tmp_path.iterdir()), "a folder is left behind"


@pytest.mark.skipif(not os.path.exists("/proc/self/limits"), reason="reads /proc")
def test_a_worker_is_fresh_poor_and_limited(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with Grader(workers=1) as grader:
        grader.grade([(r"\sqrt{2}", r"\boxed{\sqrt{3}}")])
        worker, process = grader.workers[0], Path(f"/proc/{grader.workers[0].process.pid}")
        assert "secret" not in (process / "environ").read_text()
        assert os.readlink(process / "cwd") == f"{os.path.realpath(worker.folder.name)} (deleted)"
        lines = (process / "limits").read_text().splitlines()
        limits = {line[:25].strip(): line[26:].split()[0] for line in lines}
        assert limits["Max address space"] == str(2 ** 30)
        assert limits["Max core file size"] == limits["Max file size"] == "0"
        assert "torch" not in (process / "maps").read_text()
    assert not os.path.exists(worker.folder.name)


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
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, (tmp_path / "started").read_text()) == ("correct\n", "x"), done.stderr


def test_a_missing_verifier_says_so(monkeypatch):
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: start(
        ["/bin/sh", "-c", "echo '\"ModuleNotFoundError: No module named math_verify\"'; read job"],
        **how))
    with Grader(workers=1) as grader, pytest.raises(RuntimeError, match="math_verify.*pip install"):
        grader.grade([(r"\sqrt{2}", r"\boxed{\sqrt{3}}")])


# ------------------------------------------------------------------------------ any function
JUDGE = """
import os, signal, time

def judge(what, value=0):
    if what == "sleep":
        time.sleep(value)
    while what == "compute":
        pass
    if what == "die unless" and not os.path.exists(value):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "die once" and os.path.exists(value):
        os.unlink(value)
        os.kill(os.getpid(), signal.SIGKILL)
    return "correct", str(os.getpid())
"""


@pytest.fixture
def pool(tmp_path):
    """One worker with a function that does as it is told: 1 s of the clock, 3/8 s of CPU time."""
    (tmp_path / "judge.py").write_text(JUDGE)
    with WorkerPool(f"{tmp_path / 'judge.py'}:judge", ["x"], 1, timeout=1, memory_gb=1) as made:
        yield made


@pytest.mark.slow
def test_a_worker_that_gets_no_cpu_time_has_three_times_as_long(pool):
    """As on a busy machine; what computes is cut off, and the next question is answered."""
    assert pool.ask("sleep", 1.6).result().status == "correct"
    assert pool.ask("compute").result().status == "timeout"
    assert pool.ask("x").result().status == "correct"


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(pool):
    """A worker that is still at it when the clock has run out is replaced."""
    worker = pool.ask("x").result().why
    pool.workers[0].timeout = 0.2
    assert pool.ask("sleep", 0.9).result().status == "timeout"
    after = pool.ask("x", 1).result()
    assert after.status == "correct" and after.why != worker


def test_what_a_kill_from_outside_prevented_is_judged_again(pool, tmp_path):
    marker = tmp_path / "marker"
    first = pool.ask("die unless", str(marker)).result()
    assert (first.status, first.reward) == ("killed", 0.0)
    marker.touch()
    assert pool.ask("die unless", str(marker)).result().status == "correct", "not remembered"
    assert pool.ask("die once", str(marker)).result().status == "correct", "asked a second time"


def test_a_full_cache_forgets_what_was_asked_longest_ago(pool, monkeypatch):
    monkeypatch.setattr("parts.grader.CACHE", 2)
    a, b = pool.ask("x", 1), pool.ask("x", 2)
    assert pool.ask("x", 1) is a and pool.ask("x", 2) is b and pool.ask("x", 1) is a
    c = pool.ask("x", 3)
    assert pool.ask("x", 1) is a and pool.ask("x", 3) is c and pool.ask("x", 2) is not b


def test_a_worker_is_replaced_after_many_questions(pool, monkeypatch):
    """The function may keep caches: those of sympy grow."""
    monkeypatch.setattr("parts.grader.RECYCLE", 3)
    pids = [pool.ask("x", n).result().why for n in range(7)]
    assert len(set(pids[:3])) == len(set(pids[3:6])) == 1 and len(set(pids)) == 3
