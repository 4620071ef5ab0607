"""Rows become problems: bad ones are counted, ids are unique, a share is held out, in an order."""
import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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
def test_drops_are_counted_in_one_line_which_says_whether_all_rows_were_seen(tmp_path, capsys):
    file = write(tmp_path, [
        *rows("a b", "a  b ", f" {BOX}\n"), dict(problem="c", answer=None), *rows("1+2", "\ud800"),
        dict(problem="x", answer="\udfff"), dict(problem="x", answer="1", level="\ud800"),
        dict(problem="d", solution="no box\nin it"), dict(problem="1-2", answer="1", level=3)])
    for limit in (1, 2, 3, 4):
        found = load_problems(file, limit=limit)
        assert [p.problem for p in found] == ["a b", "1+2", "1-2"][:limit]
    assert (found[2].id, found[2].level) == ("set.jsonl/train/9", "3")
    few = "(dropped 1 double, 1 without a problem, 1 without a gold answer)"
    full = few.replace("1 without a gold answer)", "2 without a gold answer, "
                       "3 with broken characters)")
    said = [line for line in capsys.readouterr().out.splitlines() if "does not see" not in line]
    assert said == [f"data: set.jsonl: {line}" for line in (
        "1 problem of the first 1 row", f"2 problems of the first 5 rows {few}",
        f"3 problems of the first 10 rows {full}", f"3 problems of 10 rows {full}")]


@pytest.mark.parametrize("pairs, kept", [
    ([("What is 7 + 5?", "12"), ("what is 7+5?", "12")], 1),
    ([("7F4=?", "16"), ("7f4=?", "9")], 2), ([("Add 1 23", "24"), ("Add 12 3", "15")], 2),
    ([("a\u00a0b", "1"), ("a  b", "2")], 1),  # one text cannot have two golds
    ([("3\u00b2", "9"), ("32", "32")], 2),  # a power is no digit
    ([("Shout: ok", ""), ("Shout: OK", "")], 2)])  # with --reward, which needs no golds
def test_texts_that_differ_in_case_or_white_space_are_doubles_if_their_golds_agree(pairs, kept):
    """`7F4` and `7f4` may ask for two things: then their golds differ."""
    found = [dict(problem=text, answer=gold) for text, gold in pairs]
    assert len(data.sift(found, "s", whole_rows=not pairs[0][1])) == kept


# ---------------------------------------------------------- what of a row the model does not see
PICK = dict(question="Which of them is a fruit?", choices=["pear", "car"], answer=0, id=7, level=1,
            passage="A pear grows.", context="", hints=[], input=None)
TURNS = [dict(role="user", content="1+1=?"), dict(role="assistant", content="\\boxed{2}"),
         dict(role="user", content="2+3=?")]
LLAMA = ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nAnswer in verse.<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\n2+3=?<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n")


@pytest.mark.parametrize("row, keys, unread", [
    (PICK, {}, "choices, passage"), (PICK, dict(whole_rows=True), "choices, passage"),
    (PICK, dict(columns="passage,level"), "question, choices"),
    (PICK, dict(shows="{{ row }}"), ""), (PICK, dict(shows="{{ row.choices }}"), "passage"),
    (dict(Body="Tom has 2.", Question="How many?", Answer="2"), {}, ""),
    (dict(Question="?", reward_model=dict(ground_truth="5")), {}, ""),
    (dict(prompt=LLAMA, answer="5"), {}, "prompt"),
    (dict(messages=TURNS, answer="5"), {}, "messages"),
    (dict(prompt=TURNS, answer="5"), dict(shows="{{ row.prompt }}"), ""),
    (dict(prompt=TURNS[-1:], answer="5"), {}, ""), (dict(prompt="2+3=?", answer="5"), {}, "")])
def test_columns_and_turns_that_the_model_does_not_see_are_named(
        row, keys, unread, tmp_path, capsys):
    (problem,) = load_problems(write(tmp_path, [row]), **keys)
    said = capsys.readouterr().out.splitlines()[1:]
    assert len(said) == bool(unread)
    if unread:
        assert f"does not see these columns, or turns of a chat in them: {unread};" in said[0]
        first = unread.partition(",")[0]
        assert f".jinja file as --template can show {{{{ row.{first} }}}}" in said[0]
    assert "choices" in row or problem.problem in ("2+3=?", "Tom has 2. How many?", "?")


def test_a_column_that_a_template_names_must_be_there(tmp_path):
    file = write(tmp_path, [PICK])
    load_problems(file, shows="{% for row in row.choices %}{{ row.text }}{% endfor %}")
    for wrong in ("{{ row.choises }}", "{{ row['choises'] }}"):
        with pytest.raises(SystemExit, match="row.choises, but set.jsonl has no such.*passage"):
            load_problems(file, shows="{{ problem }}" + wrong)
    with pytest.raises(SystemExit, match="row.choices, but builtin has no such column"):
        load_problems("builtin", shows="{{ row.choices }}")


@pytest.mark.parametrize("shows, names", [
    *((shows, {*PICK}) for shows in (
        "{% set all = row %}", "{% for key, value in row.items() %}{{ key }}{% endfor %}",
        "{% for key in row.keys() %}{{ row[key] }}{% endfor %}", "{{ row.values() | join }}",
        "{{ row[ name ] }}", "{{ row.get(name) }}")),
    ("", set()), ("{{ row . choices }}", {"choices"}), ("{{ row.get('choices') }}", {"choices"}),
    ("{{ row[ 'choices' ] }}{{ row.passage }}", {"choices", "passage"})])
def test_a_template_is_given_the_columns_that_it_may_show_and_the_grader_is_not(
        shows, names, tmp_path):
    file = write(tmp_path, [PICK])
    (problem, rewarded, bare) = sum((load_problems(file, **keys) for keys in (
        dict(shows=shows), dict(shows=shows, whole_rows=True), {})), [])
    assert problem.shown == rewarded.shown == {name: PICK[name] for name in PICK if name in names}
    assert (problem.answer, problem.row, rewarded.row) == ("0", {}, PICK)
    assert data.digest([problem]) == data.digest([bare]) != data.digest([rewarded])


def test_what_a_template_shows_of_a_row_tells_problems_apart(tmp_path):
    """`Which is right?` with other choices is another problem; another id makes none."""
    pairs = [(choices, id) for choices in (["a", "b"], ["c", "d"], ["a", "b"]) for id in (1, 2)]
    file = write(tmp_path, [dict(problem="Which is right?", choices=choices, id=id, answer="a")
                            for choices, id in pairs])
    assert len(load_problems(file)) == 1
    one, other = load_problems(file, shows="{{ row.choices }}")
    assert one.shown == dict(choices=["a", "b"]) and other.shown == dict(choices=["c", "d"])
    assert data.fingerprint(one) != data.fingerprint(other)
    assert drop_overlap([one], [other]) == [one]
    data.remember(tmp_path, [one], [other])
    assert data.still_held_out(tmp_path, [one, other])[0].shown == other.shown
    assert data.count_trained(tmp_path, load_problems(file)) == 1  # with another template, too


def test_what_the_runs_before_have_trained_on_counts_as_trained_on(tmp_path):
    """A run that begins from a run has its weights, so also what that one has learnt."""
    begun, problems = None, [Problem(f"{i}+1=?", str(i + 1), f"{i}", "s") for i in range(4)]
    for count in (1, 2, 3):
        run = tmp_path / str(count)
        run.mkdir()
        data.remember(run, problems[count:count + 1], [], begun)
        assert data.count_trained(run, problems) == count
        begun = run


ENGLISH = ["Tom has 7 apples.", "What is 7+5-4?", "7*5=?", "Is it true?"]


@pytest.mark.parametrize("model, texts, count", [
    ("tiny-moe", ENGLISH, 4), ("tiny", ["7+5-4=?", "9-3=?\n", "Why?"], 0), ("tiny", ["7F4=?"], 1),
    ("tiny-skills", ["7F4=?", "1z9=?"], 0), ("tiny-skills", ["7+4=?"], 1),
    ("Qwen2.5-Math-1.5B", ENGLISH, 0)])
def test_a_built_in_model_is_not_trained_on_what_it_cannot_read(model, texts, count, capsys):
    problems = [Problem(text, "1", text, "s") for text in texts]
    if not count:
        data.check_readable(model, problems, refuse=True)
        return
    with pytest.raises(SystemExit, match=(
            rf"^{model} reads only problems like \d[\dA-Za-z+-]+=\?, but {count} of {len(texts)} .*"
            rf"{re.escape(repr(texts[0]))}: .* SmolLM2-135M-Instruct .*\.$")) as stop:
        data.check_readable(model, problems, refuse=True)
    data.check_readable(model, problems, refuse=False)
    assert capsys.readouterr().out == f"WARNING: {stop.value}\n"


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
    with pytest.raises(SystemExit, match="a.jsonl#2 can be used: 30 double"):
        load_problems(f"{one},{one}")
    names = f"{one},{two},{spaced}"
    loaded = load_problems(names)
    assert [p.problem for p in loaded] == [*(f"What is {i} times {i + 1}?" for i in range(50)), "x"]
    assert [p.id for p in loaded[29:31]] == ["a.jsonl/train/29", "b.jsonl/train/10"]
    said = capsys.readouterr().out
    assert "data: b.jsonl: 20 problems of 30 rows (dropped 10 double)" in said
    assert "c.jsonl: 1 problem of 2 rows (dropped 1 with another gold than the same text" in said
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


@pytest.mark.parametrize("drop, fate", [
    (True, "dropped"), (False, "only the same string is right")])
def test_odd_golds_are_counted_and_those_that_no_answer_meets_not_trained_on(drop, fate, capsys):
    problems = with_golds(*["TODO"] * 9, "nan", "2,0", "about 5", "12", r"\frac12", "(1,2)", "C",
                          "?\x1b[2J", "??")
    grader = SimpleNamespace(check_golds=lambda golds: ["?" not in gold for gold in golds])
    kept = data.check_golds(problems, grader, drop)
    assert kept == (problems[:-2] if drop else problems)
    assert capsys.readouterr().out.splitlines() == [
        rf"data: 2 of 18 golds cannot be read by math-verify, such as '?\x1b[2J', '??': {fate}",
        "data: 12 of 18 golds are no single number or formula, such as 'TODO', 'nan', '2,0': an "
        r"answer must repeat the words or give all values, as in \boxed{TODO}"]
    data.check_golds(with_golds("3h", "12 o'clock"), grader)  # a unit counts that has no space
    assert "2 of 2 golds are no" in capsys.readouterr().out
    data.check_golds(with_golds("TODO", source="math500"), grader)  # nobody can mend those
    assert data.check_golds(with_golds("12", "-3", "x^2"), grader, drop)
    assert capsys.readouterr().out == ""
    assert data.check_golds(problems[-1:], grader, drop) == problems[-1:]  # nothing else is left
    assert "1 of 1 gold cannot be read" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------- held out
def test_a_share_of_ones_own_file_is_held_out_at_least_one_and_never_all(tmp_path, capsys):
    file = numbered(tmp_path, 300)
    train, held_out = data.load_train_and_held_out(file, data.HELD_OUT)
    assert sorted(p.id for p in train + held_out) == sorted(p.id for p in load_problems(file))
    assert 20 <= len(held_out) <= 40
    assert (f"{len(held_out)} of the 300 problems held out for evaluation, by a hash of their "
            "texts: about a tenth, and at most --eval-questions (--eval-data") in capsys.readouterr().out
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
    known = data.sift(rows, "s")
    (train, held_out), (_, later) = [
        map(texts_of, data.hold_out(rng.sample(problems, len(problems)), most))
        for problems in (known, data.sift(more + rows, "s"))]
    assert not {*train} & {*later}
    small = [p for p in known if int(data.fingerprint(p), 16) < 0.1 * 2**256]
    if len(later) < most and small:
        assert {*map(str.casefold, held_out)} <= {*map(str.casefold, later)}


@given(ROWS, ROWS, MOST, st.data())
def test_whatever_happens_to_the_file_nothing_trained_on_is_asked_as_held_out(
        tmp_path_factory, rows, more, most, draw):
    """Rows go, come, come twice, change places, spaces and golds: what the run remembers counts."""
    folder = tmp_path_factory.mktemp("run")
    train, held_out = data.hold_out(data.sift(rows, "s"), most)
    train = drop_overlap(train, held_out)
    data.remember(folder, train, held_out)
    left = draw.draw(st.lists(st.builds(
        dict, problem=st.sampled_from(rows).map(lambda row: row["problem"].replace(" ", "  ")),
        answer=GOLDS), max_size=80))
    today = data.sift([*left, *more], "s")
    there = dict(zip(texts_of(today), (problem.answer for problem in today)))
    still = {text: there[text] for text in texts_of(held_out) if text in there}
    if still:
        asked = data.still_held_out(folder, today)
        assert {problem.source for problem in asked} == {data.HELD_OUT}
        assert dict(zip(texts_of(asked), (p.answer for p in asked))) == still
        assert not {*still} & {*texts_of(train)} and data.count_trained(folder, asked) == 0
    else:
        with pytest.raises(SystemExit, match="Nothing that .* held out is left in its data"):
            data.still_held_out(folder, today)
    assert data.count_trained(folder, train) == len(train)


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
    assert len(data.sift(rows(text, like), "s")) == 1
    data.remember(tmp_path, [], [one])
    assert [p.problem for p in data.still_held_out(tmp_path, [other])] == [like]


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


def test_other_golds_are_other_questions_and_prompts_are_not():
    one, two = Problem("a", "1", "x", "s"), Problem("b", "2", "y", "s")
    known = data.digest([one, two])
    other = replace(one, prompt="p", prompt_ids=[1], source="t")
    assert known == data.digest([other, two])
    assert data.digest_of_prompts([one]) != data.digest_of_prompts([other])
    for change in (dict(answer="3"), dict(problem="c"), dict(id="z"), dict(row=dict(key="x"))):
        other = replace(one, **change)
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
    again = data.Stream(problems, seed=1)
    for cursor in (3, 17, 3):  # where a run goes on, or what an interrupted step gives back
        again.cursor = cursor
        assert again.take(11) == sum(epochs, [])[cursor:cursor + 11]


# ------------------------------------------------------------------------------ defaults, built-in
def test_ones_own_data_is_held_out_of_itself():
    for own in ("mine.jsonl", "agentica-org/DeepScaleR-Preview-Dataset,mine.jsonl"):
        assert data.default_eval_data(own) == data.HELD_OUT
    skills = data.default_data("tiny-skills", small=False)
    assert data.default_eval_data(skills) == skills == "builtin-skills"
    for model in ("Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen3-4B"):
        assert data.default_eval_data(data.default_data(model, small=False)) == "math500"
        assert data.default_template(model, small=False) == "reinforce-ada"
        assert data.default_template(model, small=True, reward="mine.py:score") == "chat"
