"""Rows become problems: files are read as they mean, bad rows are counted, a share is held out."""
import contextlib
import csv
import json
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from helpers import ROOT, lines
from models import make
from parts import data
from parts.data import Problem, drop_overlap, gold_text, load_problems
from rewards import open_grader


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


MODEL = SimpleNamespace(tokenizer=make.build_tokenizer(), embedded=384)
BOX = "Let's think step by step and output the final answer within \\boxed{}."


def split(names: str, held_out: str, **how) -> list[list[Problem]]:
    """The problems that a run is trained on, and those that it has held out."""
    config = dict(data=names, eval_data=held_out, eval_questions=100, columns="", reward="",
                  template="none", max_prompt_tokens=999, model="small") | how
    grader = SimpleNamespace(check_golds=lambda golds: [True] * len(golds))
    return data.load_data(SimpleNamespace(**config), MODEL, grader)


def loaded(path: Path, content: str | bytes, **how) -> list[tuple[str, str]]:
    """(problem, gold) of each row of a file with this content."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(p.problem, p.answer) for p in load_problems(str(path), **how)]


# ------------------------------------------------------------------------------------------ files
ROWS = [dict(problem="p", answer="1"), dict(problem="q", answer="2")]


@pytest.mark.parametrize("name, content", [
    ("list.JSON", json.dumps(ROWS, indent=1)),
    ("mark.jsonl", "\ufeff" + "\r\n\r\n".join(map(json.dumps, ROWS))),
    ("break.jsonl", "\n".join(json.dumps(row | dict(note="a\u2028b"), ensure_ascii=False)
                              for row in ROWS)),  # a line's end for Python, not for JSON
    ("mark.csv", "\ufeffanswer,problem\r\n1,p\r\n2,q"), ("Table.CSV", "Problem,Answer\np,1\nq,2"),
    ("pandas.csv", ",problem,answer\n0,r,\n1,p,1\n2,,4\n3,q,2\n4,s,5\n")])  # numbers are no golds
def test_files_of_text(tmp_path, name, content):
    assert loaded(tmp_path / name, content, limit=2) == [("p", "1"), ("q", "2")]


def test_what_is_dropped_is_counted_by_its_reason(tmp_path, capsys):
    odd = [dict(problem=" ", answer="1"), dict(problem="q", answer="")]
    write(tmp_path, odd + rows("p", " p ", "p") + [dict(problem="p", answer="2")])
    assert len(load_problems(f"{tmp_path}/set.jsonl")) == 1
    assert capsys.readouterr().out == (
        "data: set.jsonl: 1 problem (dropped 1 without a problem, 1 without a gold answer, "
        "2 double, 1 with another gold than before); the first gold is '1'\n")


@pytest.mark.parametrize("name, content, words", [
    ("a.jsonl", '{"problem": "p", "answer": "1"}\n\n{"problem": "q',
     " at line 3: JSONDecodeError, Unterminated string starting at"),
    ("a.json", '[{"problem": "p"}, 2]', ": ValueError, every problem must be a JSON object"),
    ("a.csv", "problem,answer\np,1\nIs 1, 2 a list?,3\n",
     " at line 3: ValueError, more cells than the header: quote texts with a comma"),
    ("a.csv", 'problem,answer\np,1\n"q,2\n', " at line 2: Error, unexpected end of data")])
def test_a_damaged_row_ends_the_loading(tmp_path, name, content, words):
    with pytest.raises(SystemExit, match=f"^Cannot read .*{name}{words}$"):
        loaded(tmp_path / name, content)


# ------------------------------------------------------------------------------------------- rows
PUBLISHED = lines(ROOT / "tests" / "published_rows.jsonl")  # all mean: What is 2+3? -> 5


@pytest.mark.parametrize("row", [pytest.param(one["row"], id=one["set"]) for one in PUBLISHED])
def test_published_layouts(row):
    """One row as each published data set has it."""
    problem = data.problem_of(row, "s/train/0", "s")
    assert data.asked(problem) == "What is 2+3?" and problem.answer in ("5", "5.0")


def test_the_first_column_that_is_not_empty_counts_in_the_documented_order():
    problems = ["problem", "question", "prompt", "messages"]
    golds = ["gt", "answer", "final_answer", "reward_model", "solution"]
    row = {name: name for name in reversed(problems + golds)} | dict(level=3)
    row["reward_model"] = dict(ground_truth="reward_model")
    for names, read in ((problems, "problem"), (golds, "answer")):
        for name in names:
            assert vars(data.problem_of(row, "s/0", "s"))[read] == name
            row[name] = ""
    assert data.problem_of(row | dict(Body="story"), "s/0", "s") == Problem(
        "", "", "s/0", "s", level="3")


def test_named_columns_win_also_nested():
    row = dict(problem="no", answer="no", Body="no", meta=dict(text="yes", Gold=3.0))
    for columns in ("meta.text,meta.gold", "Meta.Text,META.GOLD"):
        problem = data.problem_of(row, "s/train/0", "s", columns)
        assert (problem.problem, problem.answer) == ("yes", "3")
    assert data.problem_of(row, "s/train/0", "s", "gone,meta.gone").problem == ""


@pytest.mark.parametrize("raw, gold", [
    ("#### 1,234", "1,234"), ("so it is 7\n#### -12", "-12"), (27.0, "27"), (0, "0"), (0.5, "0.5"),
    (True, "True"), ("$\\frac12$.", "\\frac12"), ("$5.$", "5"), ("-1e5", r"-1 \times 10^{5}"),
    ("1" * 200, "1" * 200), ("1" * 201, ""), (f"\\boxed{{{'1' * 201}}}", "1" * 201),
    ("a \\boxed{1} b \\boxed{ \\{1,2\\} }.", "\\{1,2\\}"),
    ("#### Step 1\nAdd.\n#### Step 2: Solve\nso \\boxed{5}.", "5"),  # beside a box, it is a heading
    (["$1$", 1e-7, 2.0], r"1, 1 \times 10^{-7}, 2"), ("6.022E+23", r"6.022 \times 10^{23}"),
    (1e23, r"1 \times 10^{23}"), ("e5", "e5"), ("1e5 m", "1e5 m"), (float("nan"), ""),
    ((3 / 2) ** 10, "57.6650390625"),  # a float32 could hold it, too
    (None, ""), ([], ""), ("  ", ""), ("$", ""), ("two\nlines", "")])
def test_gold_formats(raw, gold):
    assert gold_text(raw).strip() == gold


@pytest.mark.parametrize("cell, right, wrong", [  # as pandas and numpy write them to a .csv
    ("['70']", "70", "71"), ('["70"]', "70", "7"), ("[70]", "70", "[71]"), ("[0.5]", "1/2", "5"),
    (r"['\\frac{1}{2}']", "0.5", "2"), ("['[0, 1]']", "[0,1]", "(0,1)"),
    ("['1', '2']", "2, 1", "1"), ("['1' '2']", "1, 2", "12"), ("['1'\n '2']", "1, 2", "1"),
    ("[np.float64(70.0)]", "70", "71"), ("[np.str_('70') np.str_('8')]", "8, 70", "70"),
    ("""['1', "2"]""", "1, 2", "1"), ("[1 2 -3]", "1, 2, -3", "123"), ("[ 1. 25.]", "1, 25", "1"),
    ("['3 1/2']", "7/2", "3"), ("[0, 1]", "[0,1]", "0"), ("[1 2)", "[1 2)", "1")])  # an interval
def test_the_text_of_a_list_is_its_elements_from_the_file_to_a_verdict(
        tmp_path, cell, right, wrong):
    with open(tmp_path / "a.csv", "w") as file:
        csv.writer(file).writerows([("problem", "answer"), ("p", cell)])
    (problem,) = load_problems(f"{tmp_path}/a.csv")
    with open_grader("", 0.5) as grader:
        for answer in (right, wrong):
            grader.submit(answer, problem, SimpleNamespace(text=f"\\boxed{{{answer}}}"))
        assert [grader.result(answer).reward for answer in (right, wrong)] == [1, 0]


def test_numbers_of_a_parquet_file_are_the_shortest_with_this_value_and_dates_are_text(tmp_path):
    golds = ["1234.56", "27", "0.1", "16777216", r"1 \times 10^{23}", ""]
    column = pa.array([1234.56, 27, 0.1, 2**24, 1e23, np.nan], pa.float32())
    table = pa.table(dict(problem=[*"abcdef"], answer=column, day=pa.array([1] * 6, pa.date32())))
    parquet.write_table(table, tmp_path / "set.parquet")
    problems = load_problems(f"{tmp_path}/set.parquet", whole=True)
    assert [(p.answer, p.row["day"]) for p in problems] == [(gold, "1970-01-02") for gold in golds]


BROKEN = [r"\frac{5}{6}", r"Let $\theta = 1$", r"\nu", r"\beta", r"\right)", r"\boxed{5}",
          r"\\boxed{\frac12}", r"\u0007lpha", r"\u000bec v", r"a\u007f", r"\u0000", r"\u001b[2J"]


@pytest.mark.parametrize("column, broken", [("problem", text) for text in BROKEN] + [
    ("answer", text) for text in BROKEN + [r"\\boxed{ \nu}", r"\\boxed{1\to 2}", r"1 \tan 2"]])
def test_tex_with_single_backslashes_in_json_ends_the_loading(tmp_path, broken, column):
    """JSON reads "\\frac" as a form feed and "rac": the gold would be wrong, and nobody sees it."""
    sound, other = dict(problem="p", answer="1"), numbered(tmp_path / "other", 2, "a.jsonl")
    row = json.dumps(sound | dict(problem="q") | {column: "BROKEN"}).replace("BROKEN", broken)
    mine = tmp_path / "a.jsonl"
    mine.write_text(json.dumps(sound) + "\n" + row)
    for names, source in ((mine, "a.jsonl"), (f"{other},{mine}", "a.jsonl#2")):
        with pytest.raises(SystemExit, match=f"^Row 2 of {source} has .*of TeX twice") as stop:
            load_problems(str(names))
        assert str(stop.value).isprintable()
    doubled = row.replace("\\", "\\\\")
    assert len(loaded(mine, json.dumps(sound) + "\n" + doubled)) == 2


EVERYWHERE = (
    "theta times text textbf textit textrm texttt textstyle tau tfrac tbinom tag{ triangle "
    "triangleleft triangleright trianglelefteq tilde therefore thinspace neq nabla not notin notag "
    "ngeq nleq ngeqslant nleqslant nsubseteq nonumber natural newline rho right rightarrow "
    "rightleftharpoons rfloor rceil rbrace rbrack rvert rVert").split()
IN_A_FORMULA = "tan tanh to top nu ne neg nmid nsim ncong ngtr rangle root rm".split()


def test_the_commands_that_json_breaks_are_known():
    for name in EVERYWHERE + IN_A_FORMULA:
        broken = dict(t="\t", n="\n", r="\r")[name[0]] + name[1:]
        for text, refused in ((f"$1 {broken} 2$", True), (f"1 {broken} 2", name in EVERYWHERE)):
            with pytest.raises(ValueError) if refused else contextlib.nullcontext():
                data.require_sound(text)


@pytest.mark.parametrize("sound", [
    "Add.\n\tThen stop.\r\nWhat is it?\n", "Let\nu = 3 and\ne = 2,\ni.e. both.", "$$\nu = 3\n$$",
    "x\ty\tan\to\n1\t2", "For $3\neach\nunder\nequal\nnotes", "\\theta\n\\neq\t\\times",
    "He pays \\$5\nu = 3\tan apple \\$6", "a\tag b\nsim\nmid\neg"])
def test_white_space_of_sound_problems_stays(tmp_path, sound):
    assert loaded(tmp_path / "a.jsonl", json.dumps(rows(sound)[0])) == [(sound, "1")]


def test_html_entities_are_counted_and_stay(tmp_path, capsys):
    texts = ["3 &lt; 4?", "a&nbsp;b", "R&#38;D", "It&#x27;s up?", "5 &frac12; 6", "a & b; c", "&;"]
    write(tmp_path, rows(*texts))
    assert [p.problem for p in load_problems(f"{tmp_path}/set.jsonl")] == texts
    assert ("WARNING: 5 problems of set.jsonl with HTML entities, such as &lt;,"
            in capsys.readouterr().out)


# ---------------------------------------------------------------------------------------- the hub
def test_names_lead_to_splits_for_training_and_evaluation(monkeypatch, capsys):
    def rows(*texts):
        table = pa.table(dict(question=list(texts), answer=pa.array([1234.56] * len(texts), "f4")))
        return SimpleNamespace(with_format=lambda kind: table)

    hub = {("openai/gsm8k", "main"): dict(train=rows("a"), test=rows("b")),
           ("me/only_train", None): dict(train=rows("c", "$\x0crac$", "d")),
           ("me/odd", None): dict(aime=rows("e"), amc=rows("f"))}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(
        load_dataset=lambda repo, config: hub[repo, config]))
    monkeypatch.setattr(data, "ask_hub", (asked := []).append)
    assert load_problems("gsm8k")[0] == Problem("a", "1234.56", "gsm8k/train/0", "gsm8k")
    assert asked == ["openai/gsm8k"]  # whether it answers decides if only the cache is used
    for name, for_training, texts in (
            ("gsm8k", False, ["b"]), ("openai/gsm8k:main@test", True, ["b"]),
            ("me/only_train", False, ["c", "d"]),  # nobody can mend what is on the hub
            ("me/odd@amc", True, ["f"])):
        assert [p.problem for p in load_problems(name, for_training=for_training)] == texts
    assert ("data: me/only_train: 2 problems (dropped 1 with control characters); the first gold "
            "is '1234.56'\n") in capsys.readouterr().out
    for name, for_training, words in (
            ("me/odd", False, "has no split test or train, only aime, amc: "),
            ("me/odd", True, "has no split train, only aime, amc: "),
            ("openai/gsm8k", True, "could not be loaded: ")):  # without its config
        with pytest.raises(SystemExit, match=f"^{name} {words}"):
            load_problems(name, for_training=for_training)
    assert data.expand("gsm8k,reinforce-ada") == [
        "gsm8k", "ra-math500", "ra-minerva", "ra-olympiadbench", "ra-aime-like"]
    assert not data.is_own("builtin,gsm8k,held-out") and data.is_own("builtin,me/odd")


# -------------------------------------------------------------------------------- several sets
def test_ids_differ_over_all_that_is_loaded_together(tmp_path):
    """Pass rates and reports are kept by id."""
    one, two = numbered(tmp_path / "a", 3), numbered(tmp_path / "b", 3, start=3)
    assert [(p.source, p.id) for p in load_problems(f"{one},{two}")[::3]] == [
        ("train.jsonl", "train.jsonl/train/0"), ("train.jsonl#2", "train.jsonl#2/train/0")]
    problems = load_problems(f"{one},{two},{one}", for_training=False)
    assert len({p.id for p in problems}) == len(problems) == 9
    for reward in ("", "mine.py:score"):  # which may need any column
        train, held_out = split(one, two, reward=reward)
        assert [p.id for p in train + held_out] == [
            f"train.jsonl/{split}/{i}" for split in ("train", "test") for i in range(3)]
        assert {len(p.row) for p in train + held_out} == {2 if reward else 0}
    both = [load_problems("builtin", for_training=training) for training in (True, False)]
    assert [*map(len, both)] == [6000, 240] and len({p.id for p in sum(both, [])}) == 6240


def test_a_problem_of_two_sets_is_trained_on_once_and_evaluated_in_both(tmp_path):
    """A prompt that is there twice would have two memories in ada-est, and be drawn twice."""
    one, two = numbered(tmp_path, 30, "a.jsonl"), numbered(tmp_path, 30, "b.jsonl", start=20)
    spaced = write(tmp_path, rows(" What is\n3 times  4?", "x"), "c.jsonl")
    names = f"{one},{two},{spaced}"
    loaded = load_problems(names)
    assert [p.problem for p in loaded] == [*(f"What is {i} times {i + 1}?" for i in range(50)), "x"]
    assert [p.id for p in loaded[29:31]] == ["a.jsonl/train/29", "b.jsonl/train/10"]
    train, held_out = split(f"{one},{two}", data.HELD_OUT)
    assert len({p.problem for p in train + held_out}) == len(train + held_out) == 50
    loud = write(tmp_path, [dict(problem=p.problem.upper(), answer=p.answer) for p in train])
    train, held_out = split(f"{one},{two},{loud}", data.HELD_OUT)
    assert not {p.problem.upper() for p in train} & {p.problem.upper() for p in held_out}
    assert len(load_problems(names, for_training=False)) == 30 + 30 + 2


def test_columns_named_for_ones_own_file_are_not_looked_for_in_a_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "read_hub", lambda *_: rows("known"))
    mine = write(tmp_path, [dict(frage="mine", problem="not this", antwort="2", answer="3")])
    loaded = load_problems(f"math500,{mine}", for_training=False, columns="frage,antwort")
    assert [(p.problem, p.answer) for p in loaded] == [("known", "1"), ("mine", "2")]
    other = write(tmp_path, [dict(frage="theirs", answer="4", problem="not this")], "other.jsonl")
    for name, text in (("math500", "known"), (other, "theirs")):
        train, held_out = split(mine, name, columns="frage")
        assert [p.problem for p in train + held_out] == ["mine", text]


# ----------------------------------------------------------------------------------------- held out
def test_a_share_of_ones_own_file_is_held_out_at_least_one_and_never_all(tmp_path, capsys):
    file = numbered(tmp_path, 300)
    train, held_out = split(file, data.HELD_OUT)
    assert sorted(p.id for p in train + held_out) == sorted(p.id for p in load_problems(file))
    assert 20 <= len(held_out) <= 40
    capsys.readouterr()
    train, held_out = split(file, data.HELD_OUT, eval_questions=5)
    assert len(held_out) == 5 and capsys.readouterr().out == (
        "data: train.jsonl: 300 problems (dropped none); the first gold is '0'\n"
        "data: 5 of the 300 problems held out for evaluation, by a hash of their texts "
        "(--eval-data names another set instead)\n"
        f"the first prompt, as the model sees it: {train[0].problem!r}\n")
    with pytest.raises(SystemExit, match="^tiny reads only problems of --data builtin and builtin-"
                                         "skills, and not 'What is .*: use --model SmolLM2-135M"):
        split(file, data.HELD_OUT, model="tiny")
    with pytest.raises(SystemExit, match="^All of .*train.jsonl is held out: use another"):
        split(numbered(tmp_path, 1), data.HELD_OUT)
    for count in (2, 3, 10):
        train, held_out = data.hold_out(load_problems(numbered(tmp_path, count)), 100)
        assert train and held_out and len(train) + len(held_out) == count


@pytest.mark.parametrize("most", [3, 20, 100])
def test_what_is_held_out_stays_so_when_rows_are_added(tmp_path, most):
    """At the cap too nothing that was trained on is held out; below it, the other way round."""
    few, many = numbered(tmp_path, 500, "few.jsonl", start=100), numbered(tmp_path, 600)
    (train, held_out), (_, later) = [
        [{problem.problem for problem in part} for part in data.hold_out(problems, most)]
        for problems in (load_problems(few), load_problems(many)[::-1])]  # the order is free
    assert not train & later and len(later) <= most
    assert len(later) == most or held_out <= later


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
    assert len(data.sift(rows(text, like), "s", "train", "", False, None, {})) == 1


def test_the_first_of_each_held_out_set_are_used_and_not_trained_on(tmp_path):
    one, two, three = (numbered(tmp_path, 9, f"{n}.jsonl", start=7 * n) for n in (1, 2, 3))
    train, held_out = split(one, f"{two},{three}", eval_questions=4)
    assert [p.source for p in held_out] == ["2.jsonl"] * 4 + ["3.jsonl"] * 4
    assert len(train) == 7


def test_overlap_ignores_typesetting_but_not_arithmetic(capsys):
    def problem(text, gold="1"):
        return Problem(text, gold, text, "s")

    held = [problem("Find all $x$ with \\(x^2 = 2\\), where $x$ is positive and real."),
            problem("7+15-4=?", "18")]
    train = [problem("find ALL x with $$x^2=2$$ where x is positive and real", "\\sqrt2"),
             problem("7+15-4=?", "18"), problem("71-5+4=?", "70"),
             problem("Find $x$ with $x^2 = 3$."), problem("Is 3 < 4 right or is it wrong?", "")]
    assert data.fingerprint(held[1]) != data.fingerprint(train[2])
    for text, gold in (("7 + 15 - 4=?", "18"), ("7+15-4=?", "8")):  # nor a gold that is corrected
        assert data.fingerprint(held[1]) == data.fingerprint(problem(text, gold))
    held.append(problem("Is 3 > 4 right or is it wrong?", ""))  # --reward: no golds
    assert drop_overlap(train, held) == train[2:]
    assert capsys.readouterr().out == (
        "data: dropped 2 training problems that the held-out set contains, too (compared by "
        "letters and digits)\n")


@pytest.mark.parametrize("drop, what", [
    (False, "only the same string is right"), (True, "not trained on")])
def test_golds_that_cannot_be_read_are_counted(capsys, drop, what):
    grader = SimpleNamespace(check_golds=lambda golds: [gold.isdigit() for gold in golds])
    problems = [Problem("p", gold, "1", "s") for gold in ("?", "7", "", "8")]
    assert data.check_golds(problems, grader, drop) == (problems[1::2] if drop else problems)
    assert capsys.readouterr().out == (
        f"data: 2 of 4 golds cannot be read by math-verify, such as '?' ({what})\n")


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
    one, other = data.Stream(problems, seed=1), data.Stream(problems, seed=11)
    one.cursor, other.cursor = 110, 10  # in the epochs 11 and 1
    assert one.take(10) != other.take(10)


# -------------------------------------------------------------------------------------- for resume
def test_the_digest_notices_other_problems_and_other_prompts(tmp_path):
    file = write(tmp_path, [dict(problem="7+15-4=?", answer="18")])
    digests = [data.digest(*split(names, "builtin", **how)) for names, how in (
        ("builtin", {}), ("builtin", dict(eval_questions=5)), ("builtin", dict(template="chat")),
        (file, {}), ("builtin-skills", dict(model="tiny-skills")))]
    one, two = Problem("7+15-4=?", "18", "1", "a", prompt="p"), Problem("1+1=?", "2", "2", "a")
    others = [replace(one, **{name: "other"}) for name in ("problem", "answer", "id", "prompt")]
    sets = [[one, two]], [[two, one]], [[one], [two]], *([[other, two]] for other in others)
    assert len({data.digest(*each) for each in sets}) == len(sets)
    assert data.digest([one, two], [one]).startswith("2 + 1 problems, ")
    assert data.digest(*split("builtin", "builtin")) == digests[0] and len({*digests}) == 5
