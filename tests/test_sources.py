"""Sources of rows and the meaning of columns: correct and broken files, a hub, golds."""
import http.server
import json
import os
import subprocess
import sys
import threading
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from helpers import HANG, ROOT, lines
from parts import sources
from parts.data import Problem, load_problems
from parts.sources import (
    AT_THE_END, find_gold, find_problem, gold_text, read_file, without_instruction)

ROWS = [dict(problem="p", answer="1"), dict(problem="q", answer="2")]
TWO_TURNS = [dict(role="user", content="first"), dict(role="assistant", content="\\boxed{1}"),
             dict(role="user", content="second")]
VERL = dict(prompt=TWO_TURNS, reward_model=dict(ground_truth=["1", "2"]))


# ------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("name, content", [
    ("list,of.json", json.dumps(ROWS, indent=1)), ("lines.txt", "\n\n".join(map(json.dumps, ROWS))),
    ("wrapped.json", json.dumps(dict(version=1, data=ROWS), indent=1)),
    ("mark.jsonl", "\ufeff" + "\r\n\r\n".join(map(json.dumps, ROWS))),
    ("break.jsonl", "\n".join(json.dumps(row | dict(note="a\u2028b"), ensure_ascii=False)
                              for row in ROWS)),  # a line's end for Python, not for JSON
    ("mark.csv", "\ufeffanswer,problem\r\n1,p\r\n2,q"),
    ("few.csv", "problem,answer,level\np,1\n\nq,2,3"),
    ("ends.csv", "problem,answer\np,1,\nq,2,,\n"),
    ("Table.CSV", "\ufeffsep=;\r\nProblem;Answer\np;1\nq;2"),  # Excel's own first line
    ("excel.csv", "\ufeff\nsep=;\n\nproblem;answer\np;1\nq;2"),
    ("index.csv", "\n\tquestion\tANSWER\n0\tp\t1\n1\tq\t2"),  # a first column without a name
    ("spaced.csv", "problem, answer,,\np,1\nq,2"),
    ("pandas.csv", ",problem,answer\n0,p,1\n1,q,2\n2,r,\n3,,4\n"),  # numbers of rows are no golds
    pytest.param("long.csv", 'problem,answer,note\np,1,"a,\n' + 200_000 * "b" + '"\nq,2,c',
                 id="a long cell with a line break"),
])
def test_files_of_text(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert [problem.problem for problem in load_problems(str(tmp_path / name))] == ["p", "q"]


@pytest.mark.parametrize("rows, text, gold, whole", [
    ([VERL], "second", "1, 2", VERL),
    ([dict(problem="ü".encode(), answer=b"5"), dict(problem=b"\xff", answer=b"6")],
     "ü", "5", dict(problem="ü", answer="5"))])  # columns of bytes; the second is no UTF-8
def test_parquet(tmp_path, rows, text, gold, whole):
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "set.parquet")
    (problem,) = load_problems(str(tmp_path / "set.parquet"), whole_rows=True)
    assert (problem.problem, problem.answer, problem.row) == (text, gold, whole)


def test_whatever_a_reader_raises_is_one_sentence(tmp_path, monkeypatch):
    """Arrow has errors that are a KeyError or a NotImplementedError."""
    (tmp_path / "set.parquet").touch()
    monkeypatch.setitem(sources.READERS, ".parquet", lambda path: {}["nested data"])
    with pytest.raises(SystemExit, match="set.parquet: .*nested data"):
        load_problems(str(tmp_path / "set.parquet"))


# --------------------------------------------------------------------- golds that are numbers
@pytest.mark.parametrize("written, gold", [
    ("6.022e23", r"6.022 \times 10^{23}"), ("6.022E+23", r"6.022 \times 10^{23}"),
    ("-2.50e-9", r"-2.5 \times 10^{-9}"), ("27.50", "27.5"), ("-0.0", "0"),
    ("1e400", r"1 \times 10^{400}"), ("98765432109876543210.0", "98765432109876543210"),
    ("0.1234567890123456789", "0.1234567890123456789"),
    ("true", "True"), ("NaN", ""), ("-Infinity", "")])
def test_a_number_in_json_or_csv_is_its_own_gold(tmp_path, written, gold):
    """A reader of JSON would make 602200000000000027262976 of the first."""
    (tmp_path / "one.jsonl").write_text(f'{{"problem": "p", "answer": {written}}}')
    row, = read_file(str(tmp_path / "one.jsonl"))
    assert find_gold(row) == gold
    if gold and written[0] in "-0123456789":
        (tmp_path / "one.csv").write_text(f"problem,answer\np,{written}\n")
        cell = find_gold(*read_file(str(tmp_path / "one.csv")))
        assert cell == (gold if "e" in written.lower() else written)
        found, = load_problems(str(tmp_path / "one.jsonl"), whole_rows=True)
        assert found.row["answer"] == json.loads(written)  # for --reward it is a number, as ever


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@given(draw=st.data())
def test_a_gold_of_a_parquet_file_is_the_shortest_text_that_is_this_number(
        tmp_path_factory, kind, draw):
    """At its own precision, also in a list or a nested column."""
    width = np.dtype(kind).itemsize * 8
    values = draw.draw(st.lists(st.floats(width=width, allow_nan=False, allow_infinity=False),
                                min_size=1, max_size=30))
    column = pa.array([kind(value) for value in values], pa.from_numpy_dtype(kind))
    nested = pa.StructArray.from_arrays(
        [pa.ListArray.from_arrays(list(range(len(values) + 1)), column)], names=["deep"])
    file = tmp_path_factory.mktemp("numbers") / "set.parquet"
    parquet.write_table(pa.table(dict(answer=column, more=nested)), file)
    for row, value in zip(read_file(str(file)), values, strict=True):
        gold = find_gold(row)
        plain = gold.replace(r" \times 10^{", "e").removesuffix("}")
        assert gold == find_gold(row, "more.deep") and kind(plain) == kind(value)
        assert Decimal(plain) == Decimal(str(kind(value)))  # numpy's is the shortest
        assert row["answer"] == float(plain)


def test_decimals_and_gaps_of_a_parquet_file(tmp_path):
    golds = ["1234.56", "0", "", "1234567890123456789012345678.1234", "-3"]
    decimals = pa.array([Decimal(gold) if gold else None for gold in golds], pa.decimal128(38, 4))
    floats = pa.array([1234.56, 0, None, float("nan"), -3], pa.float32())
    parquet.write_table(pa.table(dict(answer=decimals, few=floats)), tmp_path / "set.parquet")
    rows = read_file(str(tmp_path / "set.parquet"))
    assert [find_gold(row) for row in rows] == golds
    assert [find_gold(row, "few") for row in rows] == ["1234.56", "0", "", "", "-3"]


@pytest.mark.slow
def test_a_number_of_a_data_set_on_the_hub_is_its_own_gold(monkeypatch):
    import datasets

    kinds = datasets.Features(problem=datasets.Value("string"), answer=datasets.Value("float32"),
                              more=[datasets.Value("float16")])
    made = datasets.Dataset.from_dict(
        dict(problem=["p"], answer=[1234.56], more=[[0.1]]), features=kinds)
    monkeypatch.setattr(sources, "ask_hub", lambda repo: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: dict(train=made))
    (one,) = load_problems("me/numbers", whole_rows=True)
    assert one.answer == "1234.56"
    assert one.row == dict(problem="p", answer=1234.56, more=[0.1])


@given(st.sampled_from([*sources.READERS]), st.binary(max_size=60) | st.text(
    "[]{}:,;\"\n\t\\u0$ab1" + "problemanswer", max_size=60).map(str.encode))
def test_any_bytes_are_problems_or_one_sentence(tmp_path_factory, suffix, content):
    file = tmp_path_factory.mktemp("any") / f"set{suffix}"
    file.write_bytes(content)
    try:
        assert load_problems(str(file))
    except SystemExit as stop:
        assert str(stop).endswith(".") and str(stop).isprintable(), str(stop)


@pytest.mark.parametrize("name, make", [("org/name", os.makedirs), ("gsm8k", os.mknod)])
def test_a_folder_or_file_of_a_data_sets_name_does_not_hide_it(name, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(name)
    monkeypatch.setattr("parts.data.read_hub", lambda name, _: [dict(problem=name, answer="2")])
    assert load_problems(name)[0].problem == name


# ----------------------------------------------------------------------------------------- the hub
@pytest.fixture
def hub(monkeypatch):
    """A hub of Python dicts: {(repo, config): {split: rows}}."""
    sets = {}

    def load_dataset(repo, config=None):
        if (repo, config) not in sets:
            names = [c for r, c in sets if r == repo]
            raise ValueError(f"Config name is missing.\nPlease pick one of: {names}\nLike: x")
        return sets[repo, config]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(sources, "ask_hub", lambda repo: None)
    return sets


def row(text, gold="1"):
    return dict(question=text, answer=gold)


def test_names_lead_to_splits_for_training_and_evaluation(hub):
    hub["openai/gsm8k", "main"] = dict(train=[row("a", "#### 1,000")], test=[row("b")])
    hub["me/only_train", None] = dict(train=[row("c")])
    hub["me/odd", None] = dict(aime=[row("d")], amc=[row("e")])
    hub["me/x", "en"] = hub["me/x", "cn"] = dict(train=[row("f")])
    assert load_problems("gsm8k")[0] == Problem("a", "1,000", "gsm8k/train/0", "gsm8k")
    for name, for_training, text in (
            ("gsm8k", False, "b"), ("openai/gsm8k:main@test", True, "b"),
            ("me/only_train", False, "c"), ("me/odd@amc", True, "e")):
        assert load_problems(name, for_training=for_training)[0].problem == text
    with pytest.raises(SystemExit, match="no split train, only aime, amc. .*me/odd:CONFIG@SPLIT"):
        load_problems("me/odd")
    assert load_problems("me/x:cn")[0].source == "me/x:cn"
    with pytest.raises(SystemExit, match="'en', 'cn'.*config or a split as me/x:CONFIG"):
        load_problems("me/x")
    names = ["ra-math500", "ra-minerva", "ra-olympiadbench", "ra-aime-like"]
    for name in names:
        hub[sources.BENCHMARKS[name], None] = dict(train=[dict(problem=name, gt="1")])
    found = load_problems("reinforce-ada", for_training=False)  # a name for all four
    assert [p.problem for p in found] == names
    assert sources.expand("gsm8k,reinforce-ada") == [
        ("gsm8k", None), *zip(names, (500, 272, 675, 230))]


class Hub(http.server.BaseHTTPRequestHandler):
    """What it answers, the data set's name says; `asked` is the order of what it was asked."""

    asked = []

    def do_GET(self):
        name = self.path.split("?")[0].split("/")[-1]
        self.asked.append(name)
        self.send_response(dict(busy=429, gone=404).get(name, 200))
        self.send_header("Content-Type", "application/json")
        if name == "gone":
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(b'{"id": "a/b", "siblings": []}')


ASK = """
from huggingface_hub import constants
from parts import data, models, sources
sources.ask_hub("a/sound")
sources.ask_hub("a/model", "model")
print(constants.HF_HUB_OFFLINE)
for load, name in ((data.load_problems, ["a/gone"]), (data.load_problems, ["a/busy"]),
                   (models.find_model, ["a/busy", "a/busy"])):
    try:
        load(*name)
    except SystemExit as end:
        print(end)
print(constants.HF_HUB_OFFLINE)
"""


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_once_and_then_left_alone(tmp_path):
    """The real libraries. They would ask it again and again, for minutes."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK], capture_output=True, text=True, cwd=ROOT, timeout=HANG,
            env=os.environ | dict(HF_ENDPOINT=address, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0",
                                  NO_PROXY="*"))
    finally:
        server.shutdown()
    before, gone, silence, no_data, no_model, after = done.stdout.splitlines()
    assert (before, after) == ("False", "True") and "Traceback" not in done.stdout + done.stderr
    for said, words in ((gone, "The hub has no dataset a/gone: check its name"),
                        (silence, "the hub does not answer"), (silence, "429"),
                        (no_data, "--data file.jsonl, or --data builtin"),
                        (no_model, "Cannot load the model a/busy"), (no_model, "--model tiny")):
        assert words in said
    assert [name for name in Hub.asked if name in ("sound", "model", "gone", "busy")] == [
        "sound", "model", "gone", "busy"]


# ----------------------------------------------------------------------------- what a row means
PUBLISHED = lines(ROOT / "tests" / "published_rows.jsonl")  # all mean: What is 2+3? -> 5


@pytest.mark.parametrize("row", [pytest.param(one["row"], id=one["set"]) for one in PUBLISHED])
def test_published_layouts(row):
    """One row as each published data set has it."""
    assert without_instruction(find_problem(row)) == "What is 2+3?"
    assert find_gold(row) in ("5", "5.0")


LONG = "+".join(f"x^{{{i}}}" for i in range(30))  # only a solution is distrusted for its length


@pytest.mark.parametrize("row, gold", [
    (dict(solution="x" * 101), ""), (dict(solution="two\nlines"), ""), (dict(solution="7"), "7"),
    (dict(answer=LONG, solution="7"), LONG), (dict(answer=TWO_TURNS), ""),
    (dict(prompt=TWO_TURNS, answer="so #### 3, no\n#### 1,024"), "1,024")])
def test_which_column_is_the_gold(row, gold):
    assert find_gold(row) == gold


def test_named_columns_win_also_nested():
    assert find_problem(dict(prompt=TWO_TURNS)) == "second"
    row = dict(problem="no", answer="no", Body="no", meta=dict(text="yes", gold=3.0))
    assert find_problem(row, "meta.text") == "yes" and find_gold(row, "META.Gold") == "3"
    assert find_problem(row, "gone") == find_problem(row, "meta.gone") == ""
    assert find_problem(dict(Body="A story without a question.")) == ""
    row = dict(Meta=dict(Gold=3.0), gold="no", Gold="no")
    assert find_gold(row, "meta.gold") == "3"
    assert find_gold(dict(Gold="1", gold="2"), "Gold") == "1"  # exactly so, if there is one


@pytest.mark.parametrize("raw, gold", [
    ("#### 1,234", "1,234"), ("so it is 7\n#### -12", "-12"), (27.0, "27"), (0, "0"), (0.5, "0.5"),
    ("$\\frac12$.", "\\frac12"), ("\\$32.50", "32.50"), ("$69$,$84$", "69,84"),
    ("so #### 6.022e+23", r"6.022 \times 10^{23}"), ("e5", "e5"),
    (["$1$", 1e-7, 2.0], r"1, 1 \times 10^{-7}, 2"), ("1e5 m", "1e5 m"), (Decimal("0E-9"), "0"),
    ("a \\boxed{1} b \\boxed{ \\{1,2\\} }.", "\\{1,2\\}"), ("$\\boxed 2$", "2"),
    # beside a box, #### is a heading
    ("#### Step 1\nAdd.\n#### Step 2: Solve\nso \\boxed{5}.", "5"), ("#### \\boxed{5}", "5"),
    ("\\boxed{5}\n#### Check\nIt fits.", "5"),
    ("\\boxed{}", ""), ("\\boxed{1", ""), ("#### $1,234.50.\nin all", "1,234.50"),
    (None, ""), (float("nan"), ""), ([], ""), ("  ", ""), ("$", ""), ("1,\\!080", "1,\\!080")])
def test_gold_formats(raw, gold):
    assert gold_text(raw) == gold


def test_an_instruction_is_taken_off_only_where_nothing_follows():
    for words in AT_THE_END:
        asked = f"First this.\n\n{words}.\nHow many are there? Explain."
        assert without_instruction(asked) == asked
        for text in (f"How many? {words}.", f"How many?\n\n{words} \n", f"{words} How many?"):
            assert find_problem(dict(problem=text)) == text  # only a template knows if it is double
        assert without_instruction(f"How many? {words}.") == "How many?"


@pytest.mark.parametrize("text", [" 7+5=?", "7+5=?\n", "Q:  \n A: ", "\tx"])
def test_white_space_around_a_problem_stays(text):
    for row in (dict(problem=text), dict(prompt=[dict(role="user", content=text)]),
                dict(prompt=f"<|im_start|>user\n{text}<|im_end|>\n"),
                dict(problem="  \n", question=text)):  # which the first lacks
        assert find_problem(row) == text
