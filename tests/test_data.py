"""Every published column layout and gold format, every way a file can be wrong, exact prompts."""
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import ROOT
from parts import data, models, prompts, sources
from parts.columns import AFTER, find_gold, gold_text, last_boxed, problem_text
from parts.data import Problem, drop_overlap, load_problems
from parts.prompts import add_prompts, stop_ids

DAPO = ("Solve the following math problem step by step. The last line of your response should be "
        "of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is "
        "2+3?\n\nRemember "
        "to put your answer on its own line after \"Answer:\".")
CHAT = ("<|im_start|>system\nPlease reason step by step, and put your final answer within "
        "\\boxed{}.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+3? Let's think step by step and output the final answer "
        "within \\boxed{}."
        "<|im_end|>\n<|im_start|>assistant\n")
LLAMA_CHAT = ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 2+3?<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n")
Q = "What is 2+3?"


def write(folder: Path, rows: list[dict], name: str = "set.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


LAYOUTS = {  # one row as each published data set has it; all mean: What is 2+3? -> 5
    "reinforce_ada": dict(problem=Q, gt="5"),
    "math500": dict(problem=Q, solution="We add: $\\boxed{4}$", answer="5", level=2,
                    unique_id="a/1"),
    "gsm8k": dict(question=Q, answer="2+3 = <<2+3=5>>5\n#### 5"),
    "hendrycks": dict(problem=Q, level="Level 1", type="Algebra",
                      solution="First \\boxed{4}, no, $\\boxed{5}$."),
    "aime24 (solution only)": dict(id=60, problem=Q, solution="\\boxed{5}", url="x"),
    "minervamath": dict(question=Q, answer="5"),
    "olympiadbench": dict(question=Q, final_answer=["5"], modality="Text-only", unit=None,
                          error=None),
    "hothan": dict(question=Q, context=None, final_answer=["$5$"], is_multiple_answer=False),
    "amc (float)": dict(id=0, problem=Q, answer=5.0, url="x"),
    "capitals (int)": dict(ID="2024-I-1", Problem=Q, Solution="long", Answer=5),
    "matharena (int)": dict(problem_idx=1, problem=Q, answer=5, problem_type=["Algebra"]),
    "dr. grpo (list)": dict(problem=Q, answer=["5"]),
    "deepscaler, empty answer": dict(problem=Q, answer="", solution="so \\boxed{5}"),
    "dapo": dict(prompt=[dict(role="user", content=DAPO)],
                 reward_model=dict(ground_truth="5", style="rule")),
    "dapo with raw": dict(prompt=[dict(role="user", content="x")],
                          reward_model=dict(ground_truth="5"),
                          extra_info=dict(raw_problem=Q)),
    "dapo processed": dict(prompt=DAPO, solution="5"),
    "deepmath": dict(question=Q, final_answer="5", difficulty=4.5),
    "open-reasoner": dict(prompt=[{"from": "human", "value": Q}], final_answer="5"),
    "verl": dict(prompt=[dict(role="system", content="Be good."), dict(
        role="user",
        content=Q + " Let's think step by step and output the final answer within \\boxed{}.")],
        reward_model=dict(ground_truth=["5"])),
    "prompt selection (chat string)": dict(problem=CHAT, answer="5"),
    "a rendered chat of two turns": dict(input="<|im_start|>user\nHi<|im_end|>\n" + CHAT,
                                         target="5"),
    "llama chat string": dict(input=LLAMA_CHAT, target="5"),
    "qwen-boxed suffix": dict(
        input=Q + "\nPlease reason step by step, and put your final answer within \\boxed{}.",
        expected_answer="5"),
    "gvm (whole solution as answer)": dict(problem=Q,
                                           answer="We add.\nHence the sum is \\boxed{5}."),
    "svamp": dict(ID="chal-1", Body="What is", Question="2+3?", Answer="5.0", Equation="2+3"),
    "json inside a string": dict(problem=Q, ground_truth='["5"]'),
    "messages": dict(messages=[
        dict(role="system", content="Be good."), dict(role="user", content="Hi"),
        dict(role="assistant", content="\\boxed{4}?"), dict(role="user", content=Q),
        dict(role="assistant", content="We add: \\boxed{3}, no, $\\boxed{5}$.")]),
    "conversations": dict(conversations=[
        {"from": "human", "value": Q}, {"from": "gpt", "value": "2+3 = 5\n#### 5"}]),
    "question and answer": dict(Question=Q, Answer="5"),
    "metamath": dict(query=Q, response="We add.\n#### 5\nThe answer is: 5", type="x"),
    "alpaca": dict(instruction="What is", input="2+3?", output="5"),
    "alpaca, empty input": dict(instruction=Q, input="", output="It is \\boxed{5}."),
    "alpaca, no input": dict(instruction=Q, output="5"),
    "digits first, then marked": dict(question=Q, answer="#### 4 was wrong\n#### 5"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts(name, tmp_path):
    (problem,) = load_problems(write(tmp_path, [LAYOUTS[name]]))
    assert problem.problem == Q
    assert problem.answer in ("5", "5.0")
    assert problem.id and problem.source.startswith("set.")


@pytest.mark.parametrize("raw, gold", [
    ("#### 1,234", "1234"), ("so it is 7\n#### -12", "-12"), (27.0, "27"), (0, "0"), (0.5, "0.5"),
    ("033", "033"),
    ("$\\frac12$.", "\\frac12"), ("\\$32.50", "32.50"), ("$69$,$84$", "69,84"),
    (["1", "$2$"], "1, 2"),
    ("[1, 2]", "[1, 2]"), ("336^\\circ", "336^\\circ"), ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("a \\boxed{1} b \\boxed{ \\{1,2\\} }.", "\\{1,2\\}"), ("\\fbox{3}", "3"), ("$\\boxed 2$", "2"),
    ("\\boxed{}", ""), ("\\boxed{\\boxed{5}}", "5"), ("\\boxed{1", ""),
    ("\\left\\{x\\right.", "\\left\\{x\\right."),
    (None, ""), (float("nan"), ""), ([], ""), ("  ", ""), ("$", ""), ("1,\\!080", "1,\\!080"),
    ("p - q", "p - q"),
    # after #### a comma goes only from between the thousands of a number, alone or with a unit
    ("#### $1,234,567.50.", "1234567.50"), ("#### -\\$5,000", "-5000"),
    ("#### **1,234**", "**1234**"), ("#### 1,234 m^2\nin all", "1234 m^2"),
    ("#### 12,500%", "12500%"), ("#### 033", "033"),
    ("vertex #### (3,4)", "(3,4)"), ("#### (1,234)", "(1,234)"), ("#### [0,100)", "[0,100)"),
    ("#### 2, 5", "2, 5"), ("#### 1,2,300.", "1,2,300"), ("#### 1,234,5", "1,234,5"),
    ("#### 1,2345", "1,2345"), ("#### 1,234, 5", "1,234, 5"), ("#### {1,234}", "{1,234}"),
    ("#### 1{,}234", "1{,}234"), ("#### 1,\\!234", "1,\\!234"), ("#### f(x,y)=x+y", "f(x,y)=x+y"),
])
def test_gold_formats(raw, gold):
    assert gold_text(raw) == gold


@pytest.mark.parametrize("solution", [
    "#### Step 1\nAdd.\n#### Step 2: Solve\nso \\boxed{5}.", "\\boxed{5}\n#### Check\nIt fits.",
    "#### \\boxed{5}", "so \\boxed{5}.\n#### 5"])
def test_where_there_is_a_box_four_hashes_are_a_heading(solution):
    turns = [dict(role="user", content="2+3?"), dict(role="assistant", content=solution)]
    assert gold_text(solution) == gold_text(turns) == find_gold(dict(solution=solution)) == "5"


def test_last_boxed_counts_braces_but_not_escaped_ones():
    assert last_boxed("no box") is None
    assert last_boxed("\\boxed{a_{b_{c}}} and text }") == "a_{b_{c}}"
    assert last_boxed("\\boxed{\\left\\{ x \\right.}") == "\\left\\{ x \\right."
    assert last_boxed("\\boxed{a\\\\}") == "a\\\\"  # a line break, then the brace that closes


def test_long_unboxed_solution_is_no_gold(tmp_path, capsys):
    rows = [dict(problem="a", solution="x" * 101), dict(problem="b", solution="two\nlines"),
            dict(problem="c", solution="7")]
    assert [p.answer for p in load_problems(write(tmp_path, rows))] == ["7"]
    assert "1 problems of 3 rows (dropped 2 without a gold answer)" in capsys.readouterr().out


def test_drops_are_counted_in_one_line(tmp_path, capsys):
    rows = [dict(problem="a b", answer="1"), dict(problem="a  b ", answer="1"),
            dict(problem="", answer="1"),
            dict(problem="c", answer=None), dict(problem="1+2", answer="3"),
            dict(problem="1-2", answer="-1")]
    assert [p.problem for p in load_problems(write(tmp_path, rows))] == ["a b", "1+2", "1-2"]
    assert capsys.readouterr().out == (
        "data: set.jsonl: 3 problems of 6 rows (dropped 1 double, 1 without a problem, 1 without "
        "a gold answer)\n")


def test_ids_are_unique_and_limit_keeps_the_first(tmp_path):
    rows = [dict(id=i, problem=f"p{n}", answer="1")
            for n, i in enumerate(["x/1", "x/1", 7, "7", None])]
    problems = load_problems(write(tmp_path, rows))
    assert problems[0].id == "x/1" and len({p.id for p in problems}) == 5
    assert [p.problem for p in load_problems(write(tmp_path, rows), limit=2)] == ["p0", "p1"]


def test_a_number_behind_an_id_makes_no_id_that_another_problem_has(tmp_path):
    ids = ("x", "x#2", "x")
    rows = [dict(id=own, problem=f"p{n}", answer="1") for n, own in enumerate(ids)]
    assert [p.id for p in load_problems(write(tmp_path, rows))] == ["x", "x#2", "x#3"]


def test_the_limit_counts_problems_and_not_the_rows_that_were_dropped(tmp_path):
    rows = [dict(problem=text, answer="1") for text in ("a", "a", "", "b", "c")]
    assert [p.problem for p in load_problems(write(tmp_path, rows), limit=2)] == ["a", "b"]
    assert [p.problem for p in load_problems(write(tmp_path, rows), limit=3)] == ["a", "b", "c"]


def test_with_a_limit_the_line_says_that_not_all_rows_were_looked_at(tmp_path, capsys):
    file = numbered(tmp_path, 30)
    load_problems(file, limit=5)
    load_problems(file, limit=31)
    assert capsys.readouterr().out == ("data: train.jsonl: 5 problems of the first 5 rows\n"
                                       "data: train.jsonl: 30 problems of 30 rows\n")


def test_several_sets_joined_by_commas(tmp_path):
    a, b = (write(tmp_path, [dict(problem=n, answer="1")], f"{n}.jsonl") for n in "ab")
    assert [p.source for p in load_problems(f"{a},{b}")] == ["a.jsonl", "b.jsonl"]


def test_the_last_user_turn_is_the_problem_and_the_last_mark_the_gold(tmp_path):
    turns = [dict(role="user", content="first"), dict(role="assistant", content="\\boxed{1}"),
             dict(role="user", content="second")]
    (problem,) = load_problems(write(tmp_path,
                                     [dict(prompt=turns, answer="so #### 3, no\n#### 1,024")]))
    assert (problem.problem, problem.answer) == ("second", "1024")


def test_the_first_of_two_joined_columns_must_be_there(tmp_path):
    rows = [dict(Question="How many?", Answer="1"),
            dict(Body="Two apples.", Question="How many?", Answer="2")]
    (problem,) = load_problems(write(tmp_path, rows), problem_key="Body+Question")
    assert problem.problem == "Two apples. How many?"


def test_an_answer_to_an_earlier_question_is_no_gold(tmp_path):
    asked_again = [dict(role="user", content="a"), dict(role="assistant", content="\\boxed{1}"),
                   dict(role="user", content="b")]
    prose = [dict(role="user", content="c"), dict(role="assistant", content="It is 5.")]
    sound = [dict(role="user", content="d"), dict(role="assistant", content="It is \\boxed{5}.")]
    rows = [dict(messages=turns) for turns in (asked_again, prose, sound)]
    assert [(p.problem, p.answer) for p in load_problems(write(tmp_path, rows))] == [("d", "5")]


def test_a_long_gold_in_a_column_of_answers_is_one(tmp_path):
    """Only columns that may hold a worked solution are distrusted: a polynomial can be long."""
    gold = "+".join(f"x^{{{i}}}" for i in range(30))
    (problem,) = load_problems(write(tmp_path, [dict(problem="a", answer=gold, solution="7")]))
    assert problem.answer == gold and len(gold) > 100


@pytest.mark.parametrize("gold", ["[1, 2]", "[0,1)", "{1, 2}", "{}", '["a, b'])
def test_a_gold_in_brackets_is_text_and_not_a_nested_column(gold):
    assert find_gold(dict(answer=gold)) == gold


def test_an_instruction_is_taken_off_only_where_nothing_follows():
    asked = f"First this.\n\n{AFTER}.\nHow many are there?"
    assert problem_text(asked) == asked and problem_text(f"How many? {AFTER}.") == "How many?"


# ---------------------------------------------------------------------------- ids and held-out sets
def numbered(folder: Path, count: int, name: str = "train.jsonl", start: int = 0, **more) -> str:
    """A file of so many different problems; `more`: further columns,
    or a name of the problem's column."""
    folder.mkdir(parents=True, exist_ok=True)
    column = more.pop("column", "problem")
    return write(folder, [{column: f"What is {i} times {i + 1}?", "answer": str(i * i + i), **more}
                          for i in range(start, start + count)], name)


def test_a_plain_number_is_no_id(tmp_path):
    rows = [dict(problem=f"p{i}", answer="1", id=i) for i in ("17", 18, "x-19")]
    assert [p.id
            for p in load_problems(write(tmp_path, rows))] == ["set.jsonl/0", "set.jsonl/1", "x-19"]


def test_ids_differ_over_all_that_is_loaded_together(tmp_path):
    """Pass rates and reports are kept by id: one id for two problems would mix them up."""
    one, two = numbered(tmp_path / "a", 3), numbered(tmp_path / "b", 3, start=3)
    first, second = load_problems(f"{one},{two}")[::3]
    assert (first.source, first.id) == (one, f"{one}/0")
    assert (second.source, second.id) == (two, f"{two}/0")
    own = [write(tmp_path, [dict(problem=name, answer="1", id="x/1")], name)
           for name in ("c.jsonl", "d.jsonl")]
    assert [p.id for p in load_problems(",".join(own))] == ["x/1", "x/1#2"]
    again = load_problems(f"{one},{one}", for_training=False)
    assert len({p.id for p in again}) == 6 and len({p.source for p in again}) == 2
    train, held_out = data.load_train_and_held_out(one, two)
    assert len({p.id for p in train + held_out}) == 6 and [p.id for p in train] == [
        f"train.jsonl/{i}" for i in range(3)]


def test_sets_of_the_same_name_are_told_apart_in_an_evaluation(tmp_path):
    paths = [numbered(tmp_path / name, 2, start=start) for name, start in (("a", 0), ("b", 2))]
    sets = data.load_sets(",".join(paths), for_training=False)
    assert [{p.source for p in problems} for problems in sets] == [{paths[0]}, {paths[1]}]
    thrice = data.load_sets(",".join(paths[:1] * 3), for_training=False)
    assert [problems[0].source for problems in thrice] == [
        paths[0], f"{paths[0]}#2", f"{paths[0]}#3"]


def test_a_problem_of_two_sets_is_trained_on_once_and_evaluated_in_both(tmp_path, capsys):
    """A prompt that is there twice would have two memories in ada-est, and be drawn twice."""
    one, two = numbered(tmp_path, 30, "a.jsonl"), numbered(tmp_path, 30, "b.jsonl", start=20)
    spaced = write(tmp_path, [dict(problem=" What is\n3 times  4?", answer="12")], "c.jsonl")
    names = f"{one},{two},{spaced}"
    loaded = load_problems(names)
    assert [p.problem for p in loaded] == [f"What is {i} times {i + 1}?" for i in range(50)]
    assert [p.id for p in loaded[29:31]] == ["a.jsonl/29", "b.jsonl/10"]
    said = capsys.readouterr().out
    assert "data: b.jsonl: dropped 10 double, also in a set before it: 20 problems are left" in said
    assert "data: c.jsonl: dropped 1 double, also in a set before it: 0 problems are left" in said
    train, held_out = data.load_train_and_held_out(f"{one},{two}", data.HELD_OUT)
    assert len({p.problem for p in train + held_out}) == len(train + held_out) == 50
    capsys.readouterr()
    assert [len(s) for s in data.load_sets(names, for_training=False)] == [30, 30, 1]
    assert "double" not in capsys.readouterr().out


def test_built_in_problems_named_twice_are_dropped_as_well(capsys):
    assert len(load_problems("builtin,builtin", limit=5)) == len(load_problems("builtin", limit=5))
    assert "dropped 5 double" in capsys.readouterr().out


def test_columns_named_for_ones_own_file_are_not_looked_for_in_a_benchmark(tmp_path, hub):
    hub.sets["HuggingFaceH4/MATH-500", None] = dict(test=[dict(problem="known", answer="1")])
    mine = write(tmp_path, [dict(frage="mine", problem="not this", antwort="2", answer="3")])
    keys = dict(problem_key="frage", answer_key="antwort")
    loaded = load_problems(f"math500,{mine}", for_training=False, **keys)
    assert [(p.problem, p.answer) for p in loaded] == [("known", "1"), ("mine", "2")]


def test_column_names_reach_the_held_out_file(tmp_path, hub):
    train = numbered(tmp_path, 3, column="frage")
    held_out = numbered(tmp_path, 2, "test.jsonl", start=5, column="frage", question="not this one")
    loaded = data.load_train_and_held_out(train, held_out, problem_key="frage")
    assert [len(problems) for problems in loaded] == [3, 2]
    assert loaded[1][0].problem == "What is 5 times 6?"
    hub.sets["HuggingFaceH4/MATH-500", None] = dict(test=[dict(problem="known", answer="1")])
    _, benchmark = data.load_train_and_held_out(train, "math500", problem_key="frage")
    assert [p.problem for p in benchmark] == ["known"]
    with pytest.raises(SystemExit, match="columns of math500 are known: leave out --problem-key"):
        load_problems("math500", problem_key="frage")


def test_what_a_policy_is_evaluated_on_when_nothing_is_named():
    assert data.default_eval_data("builtin") == "builtin"
    for model in ("Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen3-4B"):
        assert data.default_eval_data(data.default_data(model)) == "math500"
    for own in ("mine.jsonl", "someone/chemistry",
                "agentica-org/DeepScaleR-Preview-Dataset,mine.jsonl"):
        assert data.default_eval_data(own) == data.HELD_OUT


def test_a_share_of_ones_own_file_is_held_out(tmp_path, capsys):
    train, held_out = data.load_train_and_held_out(numbered(tmp_path, 300), data.HELD_OUT,
                                                   eval_questions=100)
    assert len(train) + len(held_out) == 300 and 20 <= len(held_out) <= 40
    assert not {p.problem for p in train} & {p.problem for p in held_out}
    assert f"{len(held_out)} of the 300 problems are held out" in capsys.readouterr().out
    assert len(data.load_train_and_held_out(numbered(tmp_path, 300), data.HELD_OUT,
                                            eval_questions=5)[1]) == 5


def test_what_is_held_out_stays_so_when_rows_are_added(tmp_path):
    def split(count, most=100):
        problems = load_problems(numbered(tmp_path, count))
        random.Random(count).shuffle(problems)
        return [{p.problem for p in part} for part in data.hold_out(problems, most)]

    (train, held_out), (more_train, more_held_out) = split(200), split(400)
    assert held_out < more_held_out and train < more_train
    (train, held_out), (more_train, more_held_out) = split(400, most=10), split(800, most=10)
    # at the cap too, nothing that was trained on becomes a held-out problem
    assert train < more_train


@pytest.mark.parametrize("count", [2, 3, 10])
def test_at_least_one_is_held_out_and_one_is_left(tmp_path, count):
    train, held_out = data.hold_out(load_problems(numbered(tmp_path, count)), 100)
    assert train and held_out and len(train) + len(held_out) == count


def test_nothing_to_hold_out_or_to_train_on(tmp_path):
    with pytest.raises(SystemExit, match="--eval-data"):
        data.load_train_and_held_out(numbered(tmp_path, 1), data.HELD_OUT)
    same = numbered(tmp_path, 3)
    with pytest.raises(SystemExit, match="all of it is in the held-out set"):
        data.load_train_and_held_out(same, same)


def test_so_many_held_out_problems_are_used_of_each_set(tmp_path):
    """As the help of the flag says: with the first set alone, the second would never be asked."""
    one, two, three = (numbered(tmp_path, 9, f"{n}.jsonl", start=10 * n) for n in (1, 2, 3))
    _, held_out = data.load_train_and_held_out(one, f"{two},{three}", eval_questions=4)
    assert [p.source for p in held_out] == ["2.jsonl"] * 4 + ["3.jsonl"] * 4


def test_training_problems_that_are_held_out_are_dropped(tmp_path, capsys):
    train, held_out = data.load_train_and_held_out(
        numbered(tmp_path, 5), numbered(tmp_path, 4, "test.jsonl", start=3))
    assert len(train) == 3 and len(held_out) == 4
    assert "2 training problems are also" in capsys.readouterr().out


def test_other_golds_are_other_questions_and_prompts_are_not():
    one, two = Problem("a", "1", "x", "s"), Problem("b", "2", "y", "s")
    known = data.digest([one, two])
    assert known == data.digest([replace(one, prompt="p", prompt_ids=[1], source="t"), two])
    for other in (replace(one, answer="3"), replace(one, problem="c"), replace(one, id="z")):
        assert data.digest([other, two]) != known
    assert data.digest([two, one]) != known != data.digest([one])


# ---------------------------------------------------------------------------------------- the order
def test_a_stream_shows_every_problem_once_per_epoch():
    problems = list(range(10))
    stream = data.Stream(problems, seed=1)
    epochs = [stream.take(10) for _ in range(3)]
    assert all(sorted(epoch) == problems for epoch in epochs) and stream.cursor == 30
    assert epochs[0] != epochs[1] != epochs[2] and problems not in epochs
    assert data.Stream(problems, seed=2).take(10) != epochs[0]
    assert data.Stream(problems, seed=1).take(30) == sum(epochs, [])


def test_a_stream_goes_on_where_its_cursor_stands():
    whole, resumed = data.Stream(list("abcdefg"), seed=0), data.Stream(list("abcdefg"), seed=0)
    expected = whole.take(20)
    resumed.cursor = 9
    assert resumed.take(11) == expected[9:]
    whole.cursor = 3  # what an interrupted step gives back
    assert whole.take(5) == expected[3:8]


# ------------------------------------------------------------------------------------- strange rows
@pytest.mark.parametrize("problem", [
    "x" + " " * 100_000 + "y", "x" + "." * 100_000 + "y", "\n" * 100_000 + "y", "x" + " ." * 50_000,
    'Remember to put your answer on its own line after "Answer:"' * 2000 + "\n"])
def test_long_runs_of_one_character_take_no_time(tmp_path, problem):
    start = time.process_time()
    rows = [dict(problem=problem, answer=problem), dict(problem="a", answer="1")]
    assert load_problems(write(tmp_path, rows))[-1].problem == "a"
    assert time.process_time() - start < 1


def test_strange_rows_are_dropped_and_counted(tmp_path, capsys):
    deep = '{"problem": "d", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}"
    lines = [json.dumps(row) for row in (
        dict(problem="half \ud800 a pair", answer="1"), dict(problem="a", answer="\udfff"),
        dict(problem="b", answer="1", id="\ud800", level="\ud800"),
        dict(problem="c", answer='[{"a": ' + "[" * 100_000))]
    (tmp_path / "set.jsonl").write_text("\n".join([*lines, deep]))
    (problem,) = load_problems(str(tmp_path / "set.jsonl"))
    assert (problem.problem, problem.id, problem.level) == ("b", "set.jsonl/2", "")
    dropped = "1 problems of 5 rows (dropped 2 with broken characters, 2 nested too deep)"
    assert dropped in capsys.readouterr().out


@pytest.mark.parametrize("content", ["[" * 100_000, '{"problem": "a", "answer": ' + "[" * 100_000])
def test_a_file_that_is_nested_too_deep_gets_one_sentence(tmp_path, content):
    for suffix in ("json", "jsonl"):
        (tmp_path / f"deep.{suffix}").write_text(content)
        with pytest.raises(SystemExit, match="nested too deep"):
            load_problems(str(tmp_path / f"deep.{suffix}"))


ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


def test_columns_cannot_command_the_terminal(tmp_path):
    with pytest.raises(SystemExit) as stop:
        load_problems(write(tmp_path, [{f"frage{ESCAPE}\ud800": "a"}]))
    assert str(stop.value).isprintable() and "frage\\x1b]0;owned" in str(stop.value)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".jsonl", "~nobody/x.jsonl", "a\0b",
                                  "a" * 5000 + "/b"])
def test_odd_names_get_one_sentence(name):
    for load in (load_problems, models.resolve_model)[:1 if name.endswith("/b") else 2]:
        with pytest.raises(SystemExit) as stop:
            load(name)
        assert len(str(stop.value)) < 700 and str(stop.value).isprintable()


# --------------------------------------------------------------------------------------- file types
def test_json_list_json_lines_and_byte_order_mark(tmp_path):
    rows = [dict(problem="p", answer="1"), dict(problem="q", answer="2")]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines.json").write_text("\n\n".join(map(json.dumps, rows)))
    (tmp_path / "mark.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows[0]).encode()
                                          + b"\r\n\r\n")
    assert len(load_problems(str(tmp_path / "list.json"))) == len(
        load_problems(str(tmp_path / "lines.json"))) == 2
    assert load_problems(str(tmp_path / "mark.jsonl"))[0].problem == "p"


def test_csv_with_nested_columns_and_line_breaks(tmp_path):
    with open(tmp_path / "set.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["prompt", "reward_model", "extra_info.raw_problem"])
        table.writerow([json.dumps([dict(role="user", content="p,\nq")]),
                        json.dumps(dict(ground_truth="1,5")), ""])
        table.writerow(["unused", json.dumps(dict(ground_truth=27.0)), "raw " + "x" * 200_000])
    one, two = load_problems(str(tmp_path / "set.csv"))
    assert (one.problem, one.answer) == ("p,\nq", "1,5")
    assert two.problem.startswith("raw x") and two.answer == "27"


def test_parquet_of_verl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    two = dict(prompt=[dict(role="user", content="q")], reward_model=dict(ground_truth=["1", "2"]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([LAYOUTS["verl"], two]),
                                tmp_path / "set.parquet")
    problems = load_problems(str(tmp_path / "set.parquet"))
    assert [(p.problem, p.answer) for p in problems] == [(Q, "5"), ("q", "1, 2")]


def test_named_columns_win(tmp_path):
    path = write(tmp_path, [dict(problem="no", answer="no", meta=dict(text="yes", gold=3.0))])
    (problem,) = load_problems(path, problem_key="meta.text", answer_key="meta.gold")
    assert (problem.problem, problem.answer) == ("yes", "3")


# -------------------------------------------------------------------------------- what can be wrong
@pytest.mark.parametrize("content, name, words", [
    (None, "missing.jsonl", ["No data file", "missing.jsonl"]),
    ("", "empty.jsonl", ["empty.jsonl".removesuffix(".jsonl"), "no rows"]),
    ("[]", "empty.json", ["no rows"]),
    ("problem,answer\n", "empty.csv", ["no rows"]),
    ('{"problem": "a", "answer": "1"}\n{"problem": oops}\n', "broken.jsonl",
     ["broken.jsonl: line 2: Expecting value"]),
    ('[{"problem": "a",\n "answer": }]', "broken.json", ["broken.json", "line 2"]),
    ("not parquet", "broken.parquet", ["broken.parquet"]),
    ("\xff\xfe", "latin.jsonl", ["latin.jsonl"]),
    ("[1, 2]", "numbers.json", ["one JSON object per problem"]),
    ('{"text": "a", "label": "1"}', "odd.jsonl", ["text, label", "--problem-key", "--answer-key"]),
    ('{"problem": "a", "label": "1"}', "odd.jsonl",
     ["has a gold answer", "problem, label", "--answer-key"]),
    ('{"problem": "a", "answer": "$"}', "hollow.jsonl", ["has a gold answer", "problem, answer"]),
    ("x", "notes.txt", ["notes.txt", ".jsonl"]),
])
def test_bad_files_get_one_sentence(content, name, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(SystemExit) as stop:
        load_problems(str(tmp_path / name))
    message = str(stop.value)
    assert all(word in message for word in words), message
    assert message.endswith(".") and "\n" not in message and "Traceback" not in message


def test_wrong_key_is_named(tmp_path):
    with pytest.raises(SystemExit, match="the column txt.*problem, answer.*--problem-key"):
        load_problems(write(tmp_path, [dict(problem="a", answer="1")]), problem_key="txt")


def test_unknown_name_lists_the_benchmarks():
    with pytest.raises(SystemExit, match="no data set 'mth500'.*builtin, builtin-skills, builtin-words"):
        load_problems("mth500")


# ----------------------------------------------------------------------------------------- the hub
@pytest.fixture
def hub(monkeypatch):
    """A hub of Python dicts: {(repo, config): {split: rows}}; `asked` is what was loaded."""
    sets, asked = {}, []

    class NotFound(Exception):
        pass

    def load_dataset(repo, config=None):
        asked.append((repo, config))
        if config is None and (repo, None) not in sets:
            names = [c for r, c in sets if r == repo]
            raise ValueError("Config name is missing.\nPlease pick one of the available configs: "
                             f"{names}\nLike: x")
        return sets[repo, config]

    def dataset_info(self, repo, timeout):
        if not any(r == repo for r, _ in sets):
            raise NotFound

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(
        load_dataset=load_dataset, config=types.SimpleNamespace(HF_HUB_OFFLINE=False)))
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(
        HfApi=type("HfApi", (), dict(dataset_info=dataset_info)),
        constants=types.SimpleNamespace(HF_HUB_OFFLINE=False),
        errors=types.SimpleNamespace(RepositoryNotFoundError=NotFound)))
    return types.SimpleNamespace(sets=sets, asked=asked)


def row(text, gold="1"):
    return dict(question=text, answer=gold)


def test_splits_for_training_and_evaluation(hub):
    hub.sets["openai/gsm8k", "main"] = dict(train=[row("a", "#### 1,000")], test=[row("b")])
    hub.sets["me/only_train", None] = dict(train=[row("c")])
    hub.sets["me/odd", None] = dict(aime=[row("d")], amc=[row("e")])
    assert load_problems("gsm8k")[0] == Problem("a", "1000", "gsm8k/0", "gsm8k")
    assert load_problems("gsm8k", for_training=False)[0].problem == "b"
    assert load_problems("openai/gsm8k", split="test")[0].problem == "b"
    assert load_problems("me/only_train", for_training=False)[0].problem == "c"
    assert load_problems("me/odd@amc")[0].problem == "e"
    with pytest.raises(SystemExit,
                       match="no split train, only aime, amc: name one, as in me/odd@aime"):
        load_problems("me/odd")


def test_configs_are_joined_chosen_or_listed(hub):
    for number, config in enumerate(["AIME2025-I", "AIME2025-II"]):
        hub.sets["opencompass/AIME2025", config] = dict(test=[row(f"p{number}")])
    hub.sets["me/x", "en"] = hub.sets["me/x", "cn"] = dict(train=[row("a")])
    assert [p.problem
            for p in load_problems("opencompass/AIME2025", for_training=False)] == ["p0", "p1"]
    assert load_problems("me/x:cn")[0].source == "me/x:cn"
    with pytest.raises(SystemExit, match="has the configs en, cn: name one, as in me/x:en"):
        load_problems("me/x")


def test_group_expands_to_its_four_sets_with_weights(hub):
    for name in sources.GROUPS["reinforce-ada"]:
        hub.sets[sources.BENCHMARKS[name], None] = dict(train=[dict(problem=name, gt="1")])
    assert [p.problem for p in load_problems("reinforce-ada", for_training=False)] == [
        "ra-math500", "ra-minerva", "ra-olympiadbench", "ra-aime-like"]
    assert sources.expand("gsm8k,reinforce-ada") == [
        ("gsm8k", None), ("ra-math500", 500), ("ra-minerva", 272), ("ra-olympiadbench", 675),
        ("ra-aime-like", 230)]


def test_unknown_hub_set(hub):
    with pytest.raises(SystemExit, match="no dataset no/such"):
        load_problems("no/such")


@pytest.mark.slow
def test_unreachable_hub_ends_within_seconds(tmp_path):
    """The real libraries against a closed port."""
    pytest.importorskip("datasets")
    start = time.time()
    run = subprocess.run(
        [sys.executable, "-c", "from parts import data; data.load_problems('math500')"],
        capture_output=True, text=True,
        timeout=60, cwd=ROOT,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)})
    assert run.returncode == 1 and time.time() - start < 15
    assert "--data file.jsonl" in run.stderr and "--model tiny" in run.stderr
    assert "Traceback" not in run.stderr


# ------------------------------------------------------------------------- names, overlap, built-in
def test_model_names(tmp_path):
    assert models.resolve_model("Qwen2.5-Math-1.5B") == "Qwen/Qwen2.5-Math-1.5B"
    assert models.resolve_model("Qwen3-4B") == "Qwen/Qwen3-4B"
    assert models.resolve_model("Llama-3.2-3B-Instruct") == "meta-llama/Llama-3.2-3B-Instruct"
    assert models.resolve_model("Meta-Llama-3-8B") == "meta-llama/Meta-Llama-3-8B"
    assert models.resolve_model("someone/model") == "someone/model"
    assert models.resolve_model(str(tmp_path)) == str(tmp_path)
    assert models.resolve_model("tiny") == "tiny"
    for wrong in ("mystery-7b", str(tmp_path / "gone"), "./gone", "runs/a/checkpoints/step-1"):
        with pytest.raises(SystemExit, match="--model tiny"):
            models.resolve_model(wrong)


def test_code_of_a_model_is_never_run(tmp_path, capsys):
    """transformers would ask "run the custom code? [y/N]", and `yes |` would answer."""
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'owned')!r}, 'w')\nclass C: pass\nclass T: pass\n")
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="evil",
                                                          auto_map=dict(AutoConfig="evil.C"))))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(dict(auto_map=dict(AutoTokenizer=["evil.T", None]))))
    for load in (lambda path: models.fetch_model(path, 9), models.load_tokenizer):
        with pytest.raises(SystemExit, match="Python code of its own, which is never run"):
            load(str(tmp_path))
    assert not (tmp_path / "owned").exists() and "[y/N]" not in capsys.readouterr().out


@pytest.mark.parametrize("config", ["[]", "{", '{"model_type": "nothing"}', ""])
def test_a_broken_model_folder_gets_one_sentence(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    for load in (lambda path: models.fetch_model(path, 9), models.load_tokenizer):
        with pytest.raises(SystemExit, match="Cannot load the") as stop:
            load(str(tmp_path))
        assert "\n" not in str(stop.value)


def test_defaults_by_model():
    assert data.default_data("tiny") == data.default_data("tiny", for_training=False) == "builtin"
    assert data.default_data("Qwen/Qwen2.5-Math-1.5B") == "RLHFlow/reinforce_ada_simple_prompt_1-5b"
    assert data.default_data("Qwen/Qwen3-4B") == "agentica-org/DeepScaleR-Preview-Dataset"
    assert data.default_data("Qwen/Qwen3-4B", for_training=False) == "math500"
    assert (data.default_template("tiny"),
            data.default_template("Qwen/Qwen3-4B")) == ("chat", "reinforce-ada")


def test_overlap_ignores_typesetting_but_not_arithmetic():
    def problem(text, gold="1"):
        return Problem(text, gold, text, "s")

    held = [problem("Find all $x$ with \\(x^2 = 2\\), where $x$ is positive and real."),
            problem("7+15-4=?", "18")]
    train = [problem("find ALL x with $$x^2=2$$ where x is positive and real", "\\sqrt2"),
             problem("7+15-4=?", "18"), problem("71-5+4=?", "70"),
             problem("Find all $x$ with $x^2 = 3$.")]
    kept, dropped = drop_overlap(train, held)
    assert dropped == 2 and kept == train[2:]


def test_builtin_problems():
    pytest.importorskip("parts.tiny")
    train, test = load_problems("builtin", limit=300), load_problems("builtin", for_training=False)
    assert len(train) == 300 and len(test) == data.BUILTIN_COUNT["test"]
    assert len({p.id for p in train + test}) == len(train + test)
    assert not {p.problem for p in train} & {p.problem for p in test}
    assert all(p.answer and p.level for p in train)


def test_import_is_light():
    heavy = ("datasets", "transformers", "torch", "pyarrow")
    code = f"import sys; from parts import data; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.strip() == "[]", run.stderr


# ----------------------------------------------------------------------------------------- prompts
class ChatML:
    """A tokenizer of characters with Qwen's chat markup."""

    chat_template = "chatml"

    def apply_chat_template(self, chats, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        turns = ["".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in chat)
                 for chat in chats]
        return [text + "<|im_start|>assistant\n" for text in turns]

    def __call__(self, texts, add_special_tokens):
        return dict(input_ids=[[0] * add_special_tokens + [ord(char) for char in text]
                               for text in texts])


SYSTEM = ("<|im_start|>system\nPlease reason step by step, and put your final answer within "
          "\\boxed{}.<|im_end|>\n")
EXPECTED = {
    "reinforce-ada": SYSTEM
    + "<|im_start|>user\nQ? Let's think step by step and output the final answer within "
                              "\\boxed{}.<|im_end|>\n<|im_start|>assistant\n",
    "qwen25-math-cot": SYSTEM + "<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n",
    "qwen-boxed": "<|im_start|>system\nYou are a helpful "
                  "assistant.<|im_end|>\n<|im_start|>user\nQ?\nPlease reason "
                  "step by step, and put your final answer within "
                  "\\boxed{}.<|im_end|>\n<|im_start|>assistant\n",
    "llama": "<|im_start|>user\nQ?\nPlease reason step by step, and put your final answer within "
             "\\boxed{}.\n\n"
             "<|im_end|>\n<|im_start|>assistant\n",
    "three-examples": "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [
            ("user", "Tom has 7 apples and buys 5 more. How many apples does he have now?"),
            ("assistant", "7 + 5 = 12. The answer is \\boxed{12}."),
            ("user", "There are 15 birds on a tree. 6 of them fly away. How many birds are left on "
                     "the tree?"),
            ("assistant", "15 - 6 = 9. The answer is \\boxed{9}."),
            ("user", "A box holds 4 pens. How many pens are in 3 boxes?"),
            ("assistant", "4 * 3 = 12. The answer is \\boxed{12}."),
            ("user", "Q?")]) + "<|im_start|>assistant\n",
    "chat": "<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n",
    "none": "Q?",
}


@pytest.mark.parametrize("template", prompts.TEMPLATES)
def test_templates_to_the_letter(template):
    (problem,) = add_prompts([Problem("Q?", "1", "i", "s")], ChatML(), template, 1000)
    assert problem.prompt == EXPECTED[template]
    # only a bare problem gets the tokenizer's own start token
    start = [0] if template == "none" else []
    assert problem.prompt_ids == start + [ord(char) for char in problem.prompt]


def test_braces_in_a_problem_are_left_alone():
    (problem,) = add_prompts([Problem("{x} \\frac{1}{2}", "1", "i", "s")], ChatML(), "chat", 1000)
    assert "{x} \\frac{1}{2}" in problem.prompt


def test_over_long_prompts_are_dropped_and_counted(capsys):
    problems = [Problem("x" * n, "1", str(n), "s") for n in (3, 10, 11)]
    assert [p.id for p in add_prompts(problems, ChatML(), "none", 11)] == ["3", "10"]
    dropped = "dropped 1 of 3 problems with a prompt over 11 tokens (longest: 12)"
    assert dropped in capsys.readouterr().out
    with pytest.raises(SystemExit, match="raise --max-prompt-tokens"):
        add_prompts(problems, ChatML(), "none", 2)


def test_template_errors():
    with pytest.raises(SystemExit, match="no prompt template 'r1'; choose one of reinforce-ada"):
        add_prompts([Problem("Q", "1", "i", "s")], ChatML(), "r1", 10)
    bare = types.SimpleNamespace(chat_template=None)
    with pytest.raises(SystemExit, match="--template none"):
        add_prompts([Problem("Q", "1", "i", "s")], bare, "chat", 10)


def test_lengths_of_prompts_are_reported(capsys):
    add_prompts([Problem("x" * n, "1", str(n), "s") for n in (1, 5, 30)], ChatML(), "none", 20)
    assert "2 prompts of 2 to 6 tokens, median 4" in capsys.readouterr().out


@pytest.fixture
def with_template():
    """The built-in tokenizer with another chat template, rendered by transformers' own sandbox."""
    def make(template):
        from parts import tiny

        tokenizer = tiny.build_tokenizer()
        tokenizer.chat_template = template
        return tokenizer
    return make


@pytest.mark.parametrize("template, words", [
    ("{{ raise_exception('no system turn, please') }}", "no system turn, please"),
    ("{{ messages[7].content.x }}", "cannot render"), ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ("{% for x in %}", "TemplateSyntaxError"), ("{{ raise_exception('" + ESCAPE + "') }}", "owned"),
])
def test_a_template_that_fails_gets_one_sentence(with_template, template, words):
    with pytest.raises(SystemExit) as stop:
        add_prompts([Problem("1+1=?", "2", "i", "s")], with_template(template), "chat", 50)
    assert words in str(stop.value) and "--template" in str(stop.value)
    assert str(stop.value).isprintable()


def test_a_template_that_never_ends_is_stopped(with_template, monkeypatch):
    monkeypatch.setattr(prompts, "RENDERING_SECONDS", (0.3, 0))
    loops = "".join(f"{{% for a{i} in range(99999) %}}" for i in range(3)) + "{% endfor %}" * 3
    start = time.time()
    with pytest.raises(SystemExit, match="TimeoutError"):
        add_prompts([Problem("1+1=?", "2", "i", "s")], with_template(loops), "chat", 50)
    assert time.time() - start < 5 and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_no_alarm_is_left_behind_once_the_prompts_are_made(with_template):
    tokenizer = with_template("{{ messages[0].content }}")
    add_prompts([Problem("1+1=?", "2", "i", "s")], tokenizer, "chat", 50)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "it would end the program a while later"


def test_prompts_can_be_made_outside_the_main_thread(with_template):
    """Only the main thread can set an alarm; elsewhere there is none, and no error either."""
    tokenizer = with_template("{{ messages[0].content }}")
    problems = [Problem("1+1=?", "2", "i", "s")]
    with ThreadPoolExecutor(1) as pool:
        (problem,) = pool.submit(add_prompts, problems, tokenizer, "chat", 50).result()
    assert problem.prompt == "1+1=?"


def test_the_built_in_tokenizer():
    tiny = pytest.importorskip("parts.tiny")
    tokenizer = tiny.build_tokenizer()
    (problem,) = add_prompts([Problem("1+2=?", "3", "i", "s")], tokenizer, "chat", 50)
    assert problem.prompt == "<|user|>1+2=?<|assistant|>"
    assert tokenizer.decode(problem.prompt_ids) == problem.prompt and len(problem.prompt_ids) == 7


def test_stop_ids():
    vocabulary = {"<|endoftext|>": 7, "<|im_end|>": 5, "</s>": 2, "x": 1}
    qwen = types.SimpleNamespace(get_vocab=lambda: vocabulary, eos_token="</s>")
    assert stop_ids(qwen) == [2, 5, 7]
    assert stop_ids(types.SimpleNamespace(get_vocab=lambda: {"a": 0}, eos_token=None)) == []
    assert stop_ids(qwen, "</s>,x") == [1, 2]
    with pytest.raises(SystemExit, match="'y'"):
        stop_ids(qwen, "y")
