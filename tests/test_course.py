"""The course: labs that grade fairly, and bugs that can be found.

The labs have no stored solutions. The project's functions are solutions and must pass. With one
line changed (course/mutants.jsonl) they make the mistakes of students, and each must fail with its
message. A change marked "right" is another correct way to write the line, and must pass.

tests/lab_solutions.jsonl has files by people who knew only the notes and the lab's file. These are
right files in different styles, and files with one mistake, of which it has the functions that
differ from a right file. `said` are the lines that explain the first counterexample, mostly none.
"""
import contextlib
import inspect
import itertools
import json
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import types
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import minirl
from bench.mutate import mutated
from course import bugs, check, grade, submission, train
from helpers import HANG, ROOT, lines
from parts import logprobs
from parts.config import Config, parse

CHANGED = lines(ROOT / "course/mutants.jsonl")
MUTANTS = [row for row in CHANGED if "right" not in row]
SOLUTIONS = lines(ROOT / "tests/lab_solutions.jsonl")
RIGHT = [row for row in SOLUTIONS if "right" in row]
LABS = list(submission.HOMES)
BUGS = bugs.bugs()


def from_text(text: str, file: str):
    """A module made of this text, beside the real one."""
    module = types.ModuleType(f"mutant_{Path(file).stem}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(text, file, "exec"), vars(module))
    return module


def bandit_of(objective):
    """The bandit's gradient by autograd, from the project's own objective at pi = pi_old = mu."""
    def bandit_gradient(theta, actions, rewards, baseline):
        leaf = theta.clone().requires_grad_()
        lp = leaf.log_softmax(0)[actions]
        term, _, _ = objective(lp, lp.detach(), lp.detach(), rewards - baseline, Config())
        return torch.autograd.grad(term.mean(), leaf)[0]
    return bandit_gradient


def solution(lab: str, mutant: dict | None = None) -> dict:
    """The lab's functions as the project has them, or with one line changed."""
    changed = None
    if mutant:
        text = mutated((ROOT / mutant["file"]).read_text(), mutant)
        changed = from_text(text, mutant["file"])

    def find(place_name: str, name: str):
        module, _, owner = place_name.partition(":")
        if mutant and mutant["file"] == module.replace(".", "/") + ".py":
            return vars(getattr(changed, owner) if owner else changed)[name]
        return vars(pkgutil.resolve_name(place_name))[name]

    found = {name: find(where, name) for name, where in submission.HOMES[lab].items()}
    if lab == "lab_1":
        found["bandit_gradient"] = bandit_of(find("minirl", "objective"))
    return found


@contextlib.contextmanager
def forked(lab: str, functions: dict):
    """A student whose process is a fork of this one, so that it can have any functions."""
    ours, theirs = socket.socketpair()
    if not (child := os.fork()):
        ours.close()
        try:
            submission.serve(lab, functions, Path("mine.py"), theirs, submission.SECONDS)
        finally:
            os._exit(0)
    theirs.close()
    try:
        yield check.started(check.Student(ours), Path("mine.py"))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ours.close()


def results_of(lab: str, functions: dict) -> list:
    with forked(lab, functions) as student:
        return list(check.grade(lab, student))


def problems(lab: str, functions: dict) -> list[str]:
    return [result.problem for result in results_of(lab, functions) if result.problem]


# ------------------------------------------------------------------------------- labs that grade
@pytest.mark.parametrize("lab", LABS)
def test_the_projects_own_functions_get_all_points(lab):
    results = results_of(lab, solution(lab))
    assert [result.problem for result in results if result.problem] == []
    assert sum(result.points for result in results) == 10


@pytest.mark.parametrize("way", [row for row in CHANGED if "right" in row], ids=lambda r: r["lab"])
def test_what_is_right_and_written_otherwise_does_too(way):
    assert problems(way["lab"], solution(way["lab"], way)) == []


def graded(row: dict) -> list[str]:
    """The first problem of a row of lab_solutions.jsonl, or nothing."""
    base = {one["right"]: one["code"] for one in RIGHT if one["lab"] == row["lab"]}
    space = {}
    for code in (base.get(row.get("of"), ""), row["code"]):
        exec(compile(code, row["lab"], "exec"), space)
    functions = {name: space[name] for name in submission.HOMES[row["lab"]]}
    with forked(row["lab"], functions) as student:
        found = (one.problem for one in check.grade(row["lab"], student) if one.problem)
        return list(itertools.islice(found, 1))


@pytest.mark.parametrize("row", RIGHT, ids=lambda row: f"{row['lab']}-{row['right']}")
def test_a_right_solution_of_any_style_gets_all_points(row):
    assert graded(row) == []


@pytest.mark.parametrize("lab", [
    pytest.param(lab, marks=[pytest.mark.slow] * (lab in ("lab_2", "lab_8"))) for lab in LABS])
def test_a_typical_mistake_costs_points_and_only_a_true_cause_is_named(lab):
    rows = [row for row in SOLUTIONS if row["lab"] == lab and "right" not in row]
    found = {row["why"]: graded(row) for row in rows}
    assert len(rows) >= 12 and [why for why, said in found.items() if not said] == []
    explained = {why: said[0].splitlines()[1:] for why, said in found.items()}
    assert explained == {row["why"]: row["said"] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("lab", LABS)
def test_what_students_get_wrong_fails_with_a_message_of_its_own(lab):
    mutants = [mutant for mutant in MUTANTS if mutant["lab"] == lab]
    said = {}
    for mutant in mutants:
        found = problems(lab, solution(lab, mutant))
        said.setdefault(found[0] if found else "nothing", []).append(mutant["why"])
    assert len(mutants) >= 5 and "nothing" not in said, said.get("nothing")
    assert [whys for whys in said.values() if len(whys) > 1] == []


@pytest.mark.parametrize("lab", LABS)
def test_an_empty_lab_gets_no_point_and_asks_for_functions_of_the_projects_signature(lab):
    functions = submission.load(lab)
    said = [result.problem for result in results_of(lab, functions)]
    assert all(problem.endswith("is not written yet") for problem in said)
    for name, where in submission.HOMES[lab].items():
        own = vars(pkgutil.resolve_name(where))[name]
        asked, real = inspect.signature(functions[name]), inspect.signature(own)
        assert list(asked.parameters) == list(real.parameters)
        assert [p.default for p in asked.parameters.values()] == [
            p.default for p in real.parameters.values()]


def test_the_project_has_its_own_functions_back_afterwards():
    before = minirl.token_logprobs, logprobs.token_logprobs
    functions = dict(response_states=len, token_logprobs=sorted)
    with submission.in_place("lab_2", functions):
        assert minirl.token_logprobs is logprobs.token_logprobs is sorted  # where it is imported
    assert before == (minirl.token_logprobs, logprobs.token_logprobs)


# -------------------------------------------------------------------- files that students hand in
ENDLESS = """
def exit_test(*_):
    try:
        while True: int()
    except: pass
    while True: int()
def keep(pool, n):
    raise ValueError("too few")
"""
FILES = [  # lab, its text, what is said
    (3, "def exit_test(:", ["line 1: SyntaxError"]),
    (3, "raise ValueError('\\ud800\\x1b[2J')", [r"line 1: ValueError: \ud800\x1b[2J"]),
    (3, "class Own(Exception): __str__ = len\ndef keep(*_): raise Own\nexit_test = keep",
     ["raised Own, which cannot be printed"]),
    (3, "while True: pass", ["line 1: Overtime: no answer after 0.1 seconds"]),
    (3, "import sympy\ndef exit_test(*_): raise ValueError('late')\nkeep = exit_test",
     ["raised ValueError: late"]),  # imports are not counted
    (3, ENDLESS, ["SamplerConfig(sampler='uniform')) raised Overtime: no answer after 0.1 seconds",
                  "0 of 10 points", "keep(pool=[], n=1) raised ValueError: too few",
                  "in line 8 of mine.py"])]


def said_by(main, capsys, monkeypatch, *words) -> str:
    """What this main prints with these arguments, and with what it ends."""
    monkeypatch.setattr(sys, "argv", ["", *map(str, words)])
    end = ""
    try:
        main()
    except SystemExit as stopped:
        end = stopped.code
    return f"{capsys.readouterr().out}{end}"


@pytest.mark.parametrize("lab, text, sentences", FILES)
def test_whatever_a_file_does_is_one_sentence(tmp_path, capsys, monkeypatch, lab, text, sentences):
    monkeypatch.setattr(submission, "SECONDS", 0.1)
    (tmp_path / "mine.py").write_text(text)
    said = said_by(check.main, capsys, monkeypatch, lab, tmp_path / "mine.py")
    assert [sentence for sentence in sentences if sentence not in said] == []


# ------------------------------------------------------------ submissions that want free points
EMPTY = "\ndef exit_test(*_): raise NotImplementedError\ndef keep(*_): raise NotImplementedError\n"
SAYS = "10 of 10 points"
HOSTILE = {  # student -> lab_3.py. None solves anything, so each of them gets 0 points
    "prints": f"print({SAYS!r}, flush=True); import os; os._exit(0)",
    "exits-in-a-call": "import os\ndef exit_test(*_): os._exit(0)\nkeep = exit_test",
    "equal": """
class Equal(list):
    __eq__ = __ge__ = __le__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = __len__ = lambda *_: 1
def exit_test(*_): return Equal()
keep = exit_test
""",
    "patches": """
import builtins, course.checks as checks, course.submission as submission
checks.near = checks.must_be = submission.answer = lambda *_, **__: True
builtins.all = builtins.any = lambda *_: True
def exit_test(*_): return []
keep = exit_test
""",
    "looks-up": """
import sys
def exit_test(*_):
    frame = sys._getframe()
    while frame:
        for names in (frame.f_locals, frame.f_globals):
            for name in ("outcome", "right", "ROUNDS", "ONE_ROUND", "SETTINGS", "CHECKS"):
                if name in names:
                    return names[name]
        frame = frame.f_back
def keep(*_): return exit_test()
""",
    "reads": f"open({str(ROOT / 'course/checks/lab_3.py')!r}).read()",
    "writes-everywhere": """
import os
for fd in range(3, 64):
    for text in (b"{}\\n", b'{"value": null}\\n' * 9, b"[" * 10**5 + b"\\n"):
        try: os.write(fd, text)
        except OSError: pass
""" + EMPTY,
    "forks": "import ctypes, time\nif not ctypes.CDLL(None).fork():\n    time.sleep(10**6)" + EMPTY,
    "floods": f"for _ in range(10**4): print({SAYS!r} * 1000)\n"
              "def exit_test(*_): return 'x' * 2**25\nkeep = exit_test",
    "recurses": "def exit_test(*_): return exit_test()\ndef keep(*_): return bytearray(9 * 2**30)",
    "rewrites": "from pathlib import Path\n"
                f"Path({str(ROOT / 'course/checks/lab_3.py')!r}).write_text('CHECKS = []')",
    "reads-by-another-path":
        f"open('/proc/self/root{ROOT / 'course/checks/lab_3.py'}').read()",
    "replaces": "import os, tempfile\n"
                f"os.rename(tempfile.mkstemp()[1], {str(ROOT / 'course/check.py')!r})",
}
REASONS = dict(prints="ended its process", zoe="SyntaxError", recurses="MemoryError",
               floods="ended its process", **dict.fromkeys(
                   ("reads", "reads-by-another-path", "rewrites", "replaces"), "PermissionError"))


def test_no_submission_gets_points_for_free_or_leaves_anything(tmp_path, capfd, monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **how: started.append(
        popen(*args, **how)) or started[-1])
    right = next(row["code"] for row in RIGHT if row["lab"] == "lab_3")
    handed_in = {f"{student}/lab_3.py": text for student, text in HOSTILE.items()} | {
        "zoe/lab_3.py": "def (:", "zoe/deeper/lab_3 (1).py": right, "lab_1_björn.py": "def (:",
        "x.py": "", "zoe/lab_2.ipynb": ""}
    for name, text in handed_in.items():
        (tmp_path / "class" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "class" / name).write_text(text)
    project = {file: file.read_bytes() for file in (ROOT / "course").rglob("*.py")}
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "class"), "--out", str(tmp_path)])
    grade.main()
    head, *table = (tmp_path / "points.csv").read_text(encoding="utf-8-sig").splitlines()
    assert head == "student," + ",".join(LABS)
    assert sorted(table) == sorted(
        ["björn,0,,,,,,,", "zoe,,,10,,,,,", *(f"{student},,,0,,,,," for student in HOSTILE)])
    for student, reason in REASONS.items():
        assert reason in (tmp_path / f"{student}.txt").read_text(), student
    said = capfd.readouterr().out
    assert SAYS * 2 not in said  # what they print is not shown
    assert "x.py is not graded, because its name does not say the lab" in said
    assert "lab_2.ipynb is not graded, because its name does not end with .py" in said
    assert {file: file.read_bytes() for file in (ROOT / "course").rglob("*.py")} == project
    groups = {process.pid for process in started}
    assert len(groups) == len(HOSTILE) + 3 and [one for one in alive() if one in groups] == []


def alive() -> list[int]:
    """The process groups of all processes that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            found += [int(group)] if state != "Z" else []
    return found


@pytest.mark.parametrize("sent", ["1e999999999", "1e-999999999", "9" * 10**6, "1/0", 7, ["1/2"]])
def test_no_number_that_a_submission_sends_takes_the_checker_for_ever(sent):
    with pytest.raises((ValueError, AttributeError, ZeroDivisionError)):
        submission.decoded(dict(fraction=sent))
    assert submission.decoded(submission.encoded(Fraction(-3, 7))) == Fraction(-3, 7)


def test_a_file_that_only_waits_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "MOST_SECONDS", 0.5)
    (tmp_path / "lab_3.py").write_text("import time; time.sleep(10**6)")
    points, said = grade.graded("lab_3", tmp_path / "lab_3.py")
    assert points == 0 and "The file was stopped after 0.5 seconds." in said


def test_training_uses_what_is_written_and_says_what_is_not(tmp_path, monkeypatch, capsys):
    text = (submission.LABS / "lab_3.py").read_text()
    exit_test, keep = text.rsplit("    raise NotImplementedError", 1)
    (tmp_path / "lab_3.py").write_text(f"{exit_test}    return pool[:n]{keep}")
    monkeypatch.setattr(check, "LABS", tmp_path)
    assert list(train.written(["lab_3"])["lab_3"]) == ["keep"]
    assert "exit_test is not written yet, so the project's own is used" in capsys.readouterr().out


@pytest.mark.parametrize("change, said", [
    (dict(seconds=9), "same, number for number"),
    (dict(loss=0.5 + 1e-9), "part by rounding (a right function may"),
    (dict(loss=0.4), "part at step 2: loss is 0.4 with yours and 0.5 with the project's")])
def test_the_first_number_that_differs_is_named_and_a_rounding_called_so(tmp_path, change, said):
    for name, last in dict(own={}, yours=change).items():
        rows = [dict(step=1, samples=8, loss=0.5), dict(step=2, samples=8, loss=0.5) | last]
        (tmp_path / name).mkdir()
        for log in train.COMPARED:
            (tmp_path / name / log).write_text("\n".join(map(json.dumps, rows)))
    assert said in train.first_difference(tmp_path / "own", tmp_path / "yours")


def test_flags_of_the_user_come_last():
    for labs, mini_batches in ((LABS[:5], 4), (LABS[5:], 2)):
        assert parse(train.flags_of(labs, ["--steps", "3"])).mini_batches == mini_batches
    config = parse(train.flags_of(LABS, ["--mini-batches", "3", "--steps", "7"]))
    assert (config.mini_batches, config.steps) == (3, 7)


# ------------------------------------------------------------------------------- bugs to be found
UPDATE = "tests/test_objective.py::test_an_update_is_finite"


@pytest.mark.long
def test_in_every_planted_copy_an_update_runs_and_the_named_test_fails(tmp_path):
    rows = [bug | dict(test=test) for bug in BUGS.values() for test in (UPDATE, bug["test"])]
    (tmp_path / "planted.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = subprocess.run([sys.executable, "bench/mutate.py", str(tmp_path / "planted.jsonl")],
                          cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    passed = [line.endswith(": SURVIVED") for line in done.stdout.splitlines()[:len(rows)]]
    assert passed == [True, False] * len(BUGS), done.stdout + done.stderr


def test_the_line_is_where_the_planted_file_differs():
    for number, bug in BUGS.items():
        before = (ROOT / bug["file"]).read_text()
        after = mutated(before, bug).splitlines()
        differ = {n for n, line in enumerate(after, 1) if line not in before.splitlines()}
        planted = bugs.planted_lines(bug)
        assert differ <= set(planted), number
        for line in planted:
            assert bugs.verdict(bug, f"{bug['file']}:{line}").startswith("Yes!")
        assert bugs.verdict(bug, f"{bug['file']}:1").startswith("No: the file is right")
        assert bugs.verdict(bug, "other.py:3").startswith("No: that file")


def test_a_hunt_from_plant_to_answer(tmp_path, capsys, monkeypatch):
    bug = BUGS[5]
    own = ["eval.py", bug["file"], "models/tiny/config.json", "docs/x.md", "course/README.md"]
    monkeypatch.setattr(bugs, "tracked", lambda: own)
    said = said_by(bugs.main, capsys, monkeypatch, "plant", 5, tmp_path / "copy")
    assert bug["symptom"] in said and bugs.command_of(bug) in said
    assert bug["why"] not in said and bug["file"] + ":" not in said  # nothing is given away
    copy = tmp_path / "copy"
    assert (copy / bug["file"]).read_text() == mutated((ROOT / bug["file"]).read_text(), bug)
    assert not (copy / "tests").exists() and not (copy / "course").exists()
    listed = said_by(bugs.main, capsys, monkeypatch, "list")
    assert all(one["symptom"] in listed and one["why"] not in listed for one in BUGS.values())


@pytest.mark.slow
def test_the_sketch_of_the_first_evening_runs_a_step():
    command = [sys.executable, "course/first_evening.py", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "may be ignored" not in done.stderr, done.stderr
    assert "before: '" in done.stdout and "after: '" in done.stdout
    kept = r"advantage [+-]\d\.\d{3}, reward [01]: '.*<\|endoftext\|>'"  # with their ends
    assert len(re.findall(kept, done.stdout)) == 4
