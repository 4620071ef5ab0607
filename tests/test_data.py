"""Rows become problems: bad ones are counted, ids are unique, a share is held out, in an order."""
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parts import data
from parts.data import Problem, drop_overlap, load_problems


def write(folder: Path, rows: list[dict], name: str = "set.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(folder: Path, count: int, name: str = "train.jsonl", start: int = 0) -> str:
    """A file of so many different problems."""
    folder.mkdir(parents=True, exist_ok=True)
    return write(folder, [dict(problem=f"What is {i} times {i + 1}?", answer=str(i * i + i))
                          for i in range(start, start + count)], name)


def rows(*texts) -> list[dict]:
    return [dict(problem=text, answer="1") for text in texts]


BOX = "Let's think step by step and output the final answer within \\boxed{}."


# -------------------------------------------------------------------------------- rows, one by one
# ---------------------------------------------------------- what of a row the model does not see
PICK = dict(question="Which of them is a fruit?", choices=["pear", "car"], answer=0, id=7, level=1,
            passage="A pear grows.", context="", hints=[], input=None)
TURNS = [dict(role="user", content="1+1=?"), dict(role="assistant", content="\\boxed{2}"),
         dict(role="user", content="2+3=?")]
LLAMA = ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nAnswer in verse.<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\n2+3=?<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n")


ENGLISH = ["Tom has 7 apples.", "What is 7+5-4?", "7*5=?", "Is it true?"]


# -------------------------------------------------------------------------------- several sets
def test_ids_differ_over_all_that_is_loaded_together(tmp_path):
    """Pass rates and reports are kept by id."""
    one, two = numbered(tmp_path / "a", 3), numbered(tmp_path / "b", 3, start=3)
    assert [(p.source, p.id) for p in load_problems(f"{one},{two}")[::3]] == [
        ("train.jsonl", "train.jsonl/train/0"), ("train.jsonl#2", "train.jsonl#2/train/0")]
    problems = load_problems(f"{one},{two},{one}", for_training=False)
    assert len({p.id for p in problems}) == len(problems) == 9
    train, held_out = data.load_train_and_held_out(one, two)
    assert [p.id for p in train + held_out] == [
        f"train.jsonl/{split}/{i}" for split in ("train", "test") for i in range(3)]


def test_a_problem_of_two_sets_is_trained_on_once_and_evaluated_in_both(tmp_path, capsys):
    """A prompt that is there twice would have two memories in ada-est, and be drawn twice."""
    one, two = numbered(tmp_path, 30, "a.jsonl"), numbered(tmp_path, 30, "b.jsonl", start=20)
    spaced = write(tmp_path, rows(" What is\n3 times  4?", "x"), "c.jsonl")
    with pytest.raises(SystemExit, match="a.jsonl#2 can be used .30 double"):
        load_problems(f"{one},{one}")
    names = f"{one},{two},{spaced}"
    loaded = load_problems(names)
    assert [p.problem for p in loaded] == [*(f"What is {i} times {i + 1}?" for i in range(50)), "x"]
    assert [p.id for p in loaded[29:31]] == ["a.jsonl/train/29", "b.jsonl/train/10"]
    said = capsys.readouterr().out
    assert "data: b.jsonl: 20 problems (dropped 10 double)" in said
    assert "c.jsonl: 1 problem (dropped 1 with another gold than before" in said
    train, held_out = data.load_train_and_held_out(f"{one},{two}", data.HELD_OUT)
    assert len({p.problem for p in train + held_out}) == len(train + held_out) == 50
    capsys.readouterr()
    assert [len(s) for s in data.load_sets(names, for_training=False)] == [30, 30, 2]
    assert "double" not in capsys.readouterr().out


def test_columns_named_for_ones_own_file_are_not_looked_for_in_a_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "read_hub", lambda *_: rows("known"))
    mine = write(tmp_path, [dict(frage="mine", problem="not this", antwort="2", answer="3")])
    keys = dict(columns="frage,antwort")
    loaded = load_problems(f"math500,{mine}", for_training=False, **keys)
    assert [(p.problem, p.answer) for p in loaded] == [("known", "1"), ("mine", "2")]
    other = write(tmp_path, [dict(frage="theirs", answer="4", problem="not this")], "other.jsonl")
    for name, text in (("math500", "known"), (other, "theirs")):
        train, held_out = data.load_train_and_held_out(mine, name, columns="frage")
        assert [p.problem for p in train + held_out] == ["mine", text]


# ---------------------------------------------------------------------------------------- odd golds
def with_golds(*golds, source="s") -> list[Problem]:
    return [Problem(gold, gold, gold, source) for gold in golds]


# ----------------------------------------------------------------------------------------- held out
def test_a_share_of_ones_own_file_is_held_out_at_least_one_and_never_all(tmp_path, capsys):
    file = numbered(tmp_path, 300)
    train, held_out = data.load_train_and_held_out(file, data.HELD_OUT)
    assert sorted(p.id for p in train + held_out) == sorted(p.id for p in load_problems(file))
    assert 20 <= len(held_out) <= 40
    assert (f"{len(held_out)} of the 300 problems held out for evaluation, by a hash of their "
            "texts: about a tenth, and at most --eval-questions"
            ) in capsys.readouterr().out
    assert len(data.load_train_and_held_out(file, data.HELD_OUT, eval_questions=5)[1]) == 5
    for count in (2, 3, 10):
        train, held_out = data.hold_out(load_problems(numbered(tmp_path, count)), 100)
        assert train and held_out and len(train) + len(held_out) == count
    for held_out in (data.HELD_OUT, numbered(tmp_path, 1)):
        with pytest.raises(SystemExit, match="all of it is in the held-out set, too. Name another"):
            data.load_train_and_held_out(numbered(tmp_path, 1), held_out)


# Easily mixed up: the same digits, case or spaces aside, long texts and short ones.
TEXTS = st.builds(str.format, st.sampled_from([
    "A farmer has {a} cows and buys {b} more of them. How many cows are there now?", "{a}+{b}=?",
    "{a}{b}+1=?", "{a} + {b} = ?", "What is {a} and {b}?", "what is {a} and {b}?"]),
    a=st.integers(1, 30), b=st.integers(1, 30))
GOLDS = st.integers(0, 60).map(str)
ROWS = st.lists(st.builds(dict, problem=TEXTS, answer=GOLDS), min_size=2, max_size=80)
MOST = st.sampled_from([1, 3, 10, 100])


def texts_of(problems) -> list[str]:
    return [" ".join(problem.problem.split()) for problem in problems]


@given(ROWS, ROWS, MOST, st.randoms())
def test_what_is_held_out_stays_so_when_rows_are_added(rows, more, most, rng):
    """At the cap too nothing that was trained on is held out; below it, the other way round."""
    known = data.sift(rows, "s", "train", "", None, {}, False)
    (train, held_out), (_, later) = [
        map(texts_of, data.hold_out(rng.sample(problems, len(problems)), most))
        for problems in (known, data.sift(more + rows, "s", "train", "", None, {}, False))]
    assert not {*train} & {*later}
    small = [p for p in known if int(data.fingerprint(p), 16) < 0.1 * 2**256]
    if len(later) < most and small:
        assert {*map(str.casefold, held_out)} <= {*map(str.casefold, later)}


COWS = "A farmer has 12 cows and buys 5 more of them."


@pytest.mark.parametrize("text, like", [
    *(tuple(unicodedata.normalize(form, text) for form in ("NFC", "NFD"))  # as a Mac writes it
      for text in ("Un caf\u00e9 de plus ?", "\u00c5" * 40)),
    (COWS, f" {COWS}\n"), (COWS, f"{COWS} {BOX}")])
def test_another_way_to_write_a_text_makes_no_other_problem(text, like, tmp_path):
    """It is not there twice, nor held out and trained on."""
    one, other = (Problem(each, "8", each, "s") for each in (text, like))
    assert one.problem != other.problem and data.fingerprint(one) == data.fingerprint(other)
    assert drop_overlap([one], [other]) == []
    assert len(data.sift(rows(text, like), "s", "train", "", None, {}, False)) == 1


def test_the_first_of_each_held_out_set_are_used_and_not_trained_on(tmp_path, capsys):
    one, two, three = (numbered(tmp_path, 9, f"{n}.jsonl", start=7 * n) for n in (1, 2, 3))
    train, held_out = data.load_train_and_held_out(one, f"{two},{three}", eval_questions=4)
    assert [p.source for p in held_out] == ["2.jsonl"] * 4 + ["3.jsonl"] * 4
    assert len(train) == 7
    assert "dropped 2 training problems that the held-out" in capsys.readouterr().out


def test_overlap_ignores_typesetting_but_not_arithmetic():
    def problem(text, gold="1"):
        return Problem(text, gold, text, "s")

    held = [problem("Find all $x$ with \\(x^2 = 2\\), where $x$ is positive and real."),
            problem("7+15-4=?", "18")]
    train = [problem("find ALL x with $$x^2=2$$ where x is positive and real", "\\sqrt2"),
             problem("7+15-4=?", "18"), problem("71-5+4=?", "70"),
             problem("Find all $x$ with $x^2 = 3$."), problem("Is 3 < 4?", "")]
    assert data.fingerprint(held[1]) != data.fingerprint(train[2])
    for text, gold in (("7 + 15 - 4=?", "18"), ("7+15-4=?", "8")):  # nor a gold that is corrected
        assert data.fingerprint(held[1]) == data.fingerprint(problem(text, gold))
    held.append(problem("Is 3 > 4?", ""))  # --reward: no golds
    assert drop_overlap(train, held) == train[2:]


# ---------------------------------------------------------------------------------------- the order
def test_a_stream_shows_every_problem_once_per_epoch():
    problems = list(range(10))
    stream = data.Stream(problems, seed=1)
    epochs = [stream.take(10) for _ in range(3)]
    assert all(sorted(epoch) == problems for epoch in epochs) and stream.cursor == 30
    assert epochs[0] != epochs[1] != epochs[2] and problems not in epochs
    assert data.Stream(problems, seed=2).take(10) != epochs[0]
    again = data.Stream(problems, seed=1)
    for cursor in (3, 17, 3):  # where a run goes on, or what an interrupted step gives back
        again.cursor = cursor
        assert again.take(11) == sum(epochs, [])[cursor:cursor + 11]


# ------------------------------------------------------------------------------ defaults, built-in
