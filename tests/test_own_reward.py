"""--reward FILE.py:FUNCTION: its arguments, its results, and the cost of its failures."""
import math
import re
import runpy
from types import SimpleNamespace

import pytest

from helpers import ROOT, lines, run_program
from models.problems import chains
from parts.config import Config
from parts.data import load_problems
from parts.files import append
from parts.grader import OwnReward, require_function
from rewards import open_grader


MINE = '''
import os, sys
from dataclasses import dataclass
from decimal import Decimal
import numpy as np
from rewards import extract_answer
from eval import TEN  # of its own folder, not the program

@dataclass
class It:
    x: "float"  # the module is looked up for this

def score(problem, completion):
    return eval(completion)

def row(problem: dict, completion: str) -> float:
    return problem["number"] + problem["nested"]["more"] + len(completion)
'''


def own_file(folder):
    (folder / "mine.py").write_text(MINE)
    (folder / "eval.py").write_text("TEN = 10\n")
    return folder / "mine.py"


@pytest.fixture
def mine(tmp_path):
    return own_file(tmp_path)


@pytest.fixture(scope="module")
def grader(tmp_path_factory):
    file = own_file(tmp_path_factory.mktemp("own"))
    with OwnReward(f"{file}:score", threshold=0.5, workers=1) as made:
        yield made


# ------------------------------------------------------------------------------ what it returns
@pytest.mark.parametrize("completion, number, parts", [
    *((completion, number, {}) for completion, number in [
        ("True", 1.0), ("0.5", 0.5), ("-3.25", -3.25), ("np.float32(0.25)", 0.25), ("TEN", 10.0),
        ("Decimal('0.75')", 0.75), ("np.array(2.0)", 2.0), ("-1e6", -1e6), ("-0.0", 0.0),
        (r"float(extract_answer('\\boxed{7}'))", 7.0), ("It(0.75).x", 0.75),
        ("__file__.endswith('/mine.py')", 1.0)]),
    ("dict(right=1, format=0.25)", 1.25, dict(right=1.0, format=0.25)),
    ("dict(right=False, length=-1e6)", -1e6, dict(right=0.0, length=-1e6)),
    ("{'a': 0.1, 'b': 0.2, 'c': 0.3}", 0.6, dict(a=0.1, b=0.2, c=0.3)),  # 0.1 + 0.2 + 0.3 > 0.6
    ("{'größe, $x_1$': Decimal('0.75')}", 0.75, {"größe, $x_1$": 0.75}),
    ("dict.fromkeys('abcdefg', 0)", 0.0, dict.fromkeys("abcdefg", 0.0))])
def test_a_reward_is_a_number_or_the_sum_of_named_ones_and_those_above_the_threshold_are_correct(
        grader, completion, number, parts):
    found = grader.grade([({}, completion)])[0]
    assert str(found.reward) == str(number)
    assert found.status == ("correct" if number > 0.5 else "wrong")
    assert found.parts == {f"reward/{name}": value for name, value in parts.items()}
    assert found.why == ", ".join(f"{name} {value:g}" for name, value in parts.items())


@pytest.mark.parametrize("completion, status, why", [
    *((odd, "no_number", f"it returned {odd}; see docs/rewards.md") for odd in (
        "None", "'0.5'", "b'1'", "[1.0]", "-1000001.0", "1j", "{}", "{'a': None}", "{'a': '1'}",
        "{'a': {'b': 1}}", "{'a': 1000001.0, 'b': -1.0}", "{'a': 1000000.0, 'b': 1}")),
    ("float('nan')", "no_number", "nan"), ("10**400", "no_number", "1000"),
    ("dict.fromkeys('abcdefgh', 0)", "no_number", "it returned {"),
    ("{}['missing']", "raised", "KeyError: 'missing'"),
    ("open('mine.py')", "raised", "directory: 'mine.py'"), ("{1: 1.0}", "raised", "TypeError"),
    ("np.ones(10**10)", "raised", "MemoryError: Unable to allocate")])
def test_whatever_else_happens_has_a_status_of_its_own_and_no_reward(
        grader, completion, status, why):
    found, after = grader.grade([({}, completion), ({}, "0.5")])
    assert math.isnan(found.reward) and found.status == status and why in found.why
    assert after.reward == 0.5


def test_the_function_is_given_all_columns_and_the_completion(mine, tmp_path, monkeypatch):
    rows = [dict(question="a?", number=3, nested=dict(more=0.5), tags=["x"]),
            dict(question="b?", number=-3, nested=dict(more=0.25), tags=[])]
    append(tmp_path / "data.jsonl", *rows)
    problems = load_problems(str(tmp_path / "data.jsonl"), whole=True)
    assert [problem.row for problem in problems] == rows
    built_in, = load_problems("builtin", whole=True, limit=1)
    assert built_in.row.items() >= dict(problem=built_in.problem, id=built_in.id).items()
    monkeypatch.chdir(tmp_path)
    for named in ("", f"{mine}:row", f"{mine.name}:row"):
        require_function(named)
    for odd in (f"{mine}", f"{tmp_path}/gone.py:row"):
        with pytest.raises(SystemExit, match=f"^--reward takes FILE.py:FUNCTION .*, not {odd}.$"):
            require_function(odd)
    with OwnReward(f"{mine.name}:row", 0, workers=1) as grader:
        for key, problem in enumerate(problems):
            answer = SimpleNamespace(text="four", raw="four<end>")
            grader.submit(key, problem, answer, style="minerva")
        assert [grader.result(key).reward for key in (0, 1)] == [3 + 0.5 + 4, -3 + 0.25 + 4]


@pytest.mark.parametrize("takes, sees", [
    ("problem, completion, raw", True), ("problem, completion, *, limit=3, raw='', **more", True),
    ("problem, completion, **more", False), ("*both", False)])
def test_a_function_with_a_parameter_raw_is_given_the_special_tokens(tmp_path, takes, sees):
    (tmp_path / "mine.py").write_text(f"score = lambda {takes}: len(locals().get('raw', ''))")
    with OwnReward(f"{tmp_path}/mine.py:score", 0, workers=1) as grader:
        for key, raw in enumerate(["<think>four</think><end>", ""]):
            grader.submit(key, SimpleNamespace(row={}), SimpleNamespace(text="four", raw=raw))
            assert grader.result(key).reward == (len(raw) if sees else 0)


@pytest.mark.parametrize("takes, why", [
    ("a", "too many positional arguments"), ("a, b, *, c", "missing a required"),
    ("a, raw", "multiple values for argument 'raw'"),
    ("completions, **kwargs", "its parameters are not"),  # TRL
    ("data_source, solution_str, ground_truth, extra_info=None", "its parameters are not"),  # verl
    ("prompts, completions", "its parameters are not"),
    *((takes, "its parameters are not") for takes in ("completion, gold", "answer, problem"))])
def test_what_cannot_be_called_is_refused_before_anything_is_sampled(tmp_path, takes, why, capfd):
    """Python's own traceback says why."""
    (tmp_path / "a.py").write_text(f"def score({takes}): pass")
    with pytest.raises(SystemExit, match="a.py:score cannot be used: its process ended with exit"):
        OwnReward(f"{tmp_path}/a.py:score", 0.5, workers=1)
    assert f"TypeError: {why}" in capfd.readouterr().err


def test_all_of_a_run_is_rewarded_by_one_function(mine):
    """Whatever becomes of its file, or of a worker."""
    with open_grader(f"{mine}:score", 0.5) as grader:
        mine.write_text(MINE.replace("eval(completion)", "2"))
        found = grader.grade([({}, "os.kill(os.getppid(), 9)"), ({}, "0.5"), ({}, "0.6")])
        assert [verdict.status for verdict in found] == ["killed", "wrong", "correct"]


# ------------------------------------------------------------------------------ the examples
def load(name):
    return runpy.run_path(ROOT / "examples" / f"{name}.py")["score"]


def test_the_pages_examples_do_what_it_says(tmp_path):
    """The first wants right answers that are short, the second sees tags."""
    codes = re.findall(r"```python\n(.*?)```", (ROOT / "docs/rewards.md").read_text(), re.S)
    long = "so " * 99
    right = {r"\boxed{\frac12}": 1.1, rf"{long}\boxed{{0.5}}": 1.0, r"\boxed{3}": 0.1,
             rf"{long}\boxed{{3}}": 0.0, r"\boxed{\sqrt{1/4}}": 0.1, "no box": 0.0, "": 0.0}
    tags = {("7 \\boxed{7}", "<think>7</think> \\boxed{7}<|im_end|>"): (1, 0.2),
            ("7 \\boxed{7}", "7 \\boxed{7}<|im_end|>"): (1, 0),
            ("7 \\boxed{8}", "<think>7\n</think>\n\\boxed{8}"): (0, 0.2),
            ("", ""): (0, 0), ("</think>", "</think><think>"): (0, 0)}
    rewarded = []
    for code, asked in zip(codes, ([(dict(answer="1/2"), completion) for completion in right],
                                   [(dict(answer="7"), *texts) for texts in tags]), strict=True):
        (tmp_path / "mine.py").write_text(code)
        with OwnReward(f"{tmp_path}/mine.py:score", Config.threshold, workers=1) as grader:
            rewarded.append(grader.grade(asked))
    assert [one.reward for one in rewarded[0]] == list(right.values())
    assert [one.status == "correct" for one in rewarded[0]] == [r >= 1 for r in right.values()]
    assert [tuple(one.parts.values()) for one in rewarded[1]] == list(tags.values())


@pytest.mark.parametrize("name, completion, reward", [
    ("calculator", "76 - 25 = 41. \\boxed{41}", 1), ("calculator", "76 + 25 = 51", 0),
    ("calculator", "5 / 0 = 51", 0), ("calculator", "\\boxed{51}", 0),
    ("calculator", "2 * 5 = 10, so 102 / 2 = 50", 1),
    ("last_number", "So 3 * 17 = 0,051.0", 1), ("last_number", "51 or 52", 0),
    ("last_number", "It is -51.", 0), ("last_number", "fifty-one", 0),
    ("steps", "1+2=3\n3+4=7\n\\boxed{7}", 1.0), ("steps", "1+2=9\n\\boxed{7}", 0.5),
    ("steps", "", 0.0), ("steps", "a=1\n" * 9, 1.0), ("steps", "\\boxed{7}\n1+2=3\n3+4=7", 0.0),
    ("people", '{"name": "Anna", "age": 57, "city": "Porto"}', 1.0),
    ("people", "[1]", 0.0), ("people", '{"name": "Anna", "age": 57}', 0.0),
    ("people", '{"name": "Ann", "age": 57, "city": "Porto"}', 0.8),
    ("people", '{"name": "Anna", "age": "57", "city": "x"}', 0.6),
    ("people", '{"name": 1, "age": 2, "city": 3}', 0.4),
    ("people", '{"name": "Anna", "age": 57, "city": "Porto", "job": ""}', 0.0)])
def test_the_examples_of_one_function(name, completion, reward):
    for answer in ("answer", "Answer")[:1 + (name == "calculator")]:  # a file's, and the hub's
        asked = {answer: "51", "level": 2, "name": "Anna", "age": 57, "city": "Porto"}
        assert load(name)(asked, completion) == pytest.approx(reward)


MORE = r'''
import re

def both(problem: dict, completion: str, raw: str) -> dict:
    assert re.sub(r"<\|\w+\|>", "", raw) == completion
    return dict(steps=score(problem, completion), ended=0.01 * raw.endswith("<|endoftext|>"))
'''


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.core
def test_the_tiny_model_learns_a_reward_of_ones_own_on_ones_own_file(tmp_path):
    """No gold answers, a prompt template from a file, a reward that is not about right answers."""
    rows = [dict(frage=row["problem"], level=row["level"])
            for row in chains("train", 200, seed=3)]
    append(tmp_path / "mine.jsonl", *rows)
    (tmp_path / "mine.jinja").write_text("<|user|>{{ problem }}<|assistant|>")
    (tmp_path / "mine.py").write_text((ROOT / "examples" / "steps.py").read_text() + MORE)
    flags = ("--data mine.jsonl --columns frage --reward mine.py:both --threshold 0.9 "
             "--template mine.jinja --name mine").split()
    small = ("--steps 10 --batch-prompts 12 --eval-every 0 --eval-k 4 "
             "--log-groups all").split()
    said = run_program("minirl.py", *flags, *small, cwd=tmp_path)
    assert " problems (dropped " in said and "as the model sees it" in said
    before, after = lines(tmp_path / "runs/mine/eval.jsonl")
    assert before["avg"] < 0.4 < after["ci_low"] and after["avg"] > before["avg"] + 0.25, (
        before["avg"], after["avg"])
    score, levels = load("steps"), {row["frage"]: row["level"] for row in rows}
    for group in lines(tmp_path / "runs/mine/groups.jsonl"):
        asked = group["prompt"].removeprefix("<|user|>").removesuffix("<|assistant|>")
        for s in group["pool"]:
            share, ended = score(dict(level=levels[asked]), s["text"]), "stop" == s["finish_reason"]
            assert (s["reward/steps"], s["reward/ended"]) == (share, 0.01 * ended)
            assert s["reward"] == share + 0.01 * ended
            assert s["status"] == ("correct" if s["reward"] > 0.9 else "wrong")
