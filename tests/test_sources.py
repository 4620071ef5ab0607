"""Where rows come from: files of every kind, sound and broken; a hub that answers or does not."""
import csv
import http.server
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from helpers import HANG, ROOT
from parts import sources
from parts.data import Problem, load_problems

ROWS = [dict(problem="p", answer="1"), dict(problem="q", answer="2")]


def texts(file) -> list[str]:
    return [problem.problem for problem in load_problems(str(file))]


# ------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("name, content", [
    ("list.json", json.dumps(ROWS, indent=1)), ("lines.json", "\n\n".join(map(json.dumps, ROWS))),
    ("mark.jsonl", "\ufeff" + "\r\n\r\n".join(map(json.dumps, ROWS))),
    ("table.csv", "problem,answer\np,1\n\nq,2"), ("mark.csv", "\ufeffanswer,problem\r\n1,p\r\n2,q"),
    ("few.csv", "problem,answer,level\np,1\nq,2,3"), ("ends.csv", "problem,answer\np,1,\nq,2,,\n"),
])
def test_files_of_text(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert texts(tmp_path / name) == ["p", "q"]


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


def test_a_row_with_more_cells_than_columns_is_dropped_and_counted(tmp_path, capsys):
    """`What is 1,2?` without quotes: the gold would be the half of a question."""
    (tmp_path / "set.csv").write_text("problem,answer\nWhat is 1,2?,3\np,1\n")
    assert texts(tmp_path / "set.csv") == ["p"]
    assert "2 rows (dropped 1 with more cells than columns)" in capsys.readouterr().out


def test_parquet_of_verl(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = sys.modules["pyarrow"].Table.from_pylist([
        dict(prompt=[dict(role="user", content=text)], reward_model=dict(ground_truth=golds))
        for text, golds in (("p", ["5"]), ("q", ["1", "2"]))])
    parquet.write_table(table, tmp_path / "set.parquet")
    problems = load_problems(str(tmp_path / "set.parquet"))
    assert [(p.problem, p.answer) for p in problems] == [("p", "5"), ("q", "1, 2")]
    monkeypatch.setattr(sources, "MOST_VALUES", 6)  # role, content and golds: 2 + 2 + 3
    with pytest.raises(SystemExit, match="set.parquet: it holds 7 values, and 6 is the most"):
        load_problems(str(tmp_path / "set.parquet"))


QUOTE = "the row that begins in line 3: a quote is opened there and never closed"


@pytest.mark.parametrize("content, name, words", [
    (None, "missing.jsonl", ["No data file", "missing.jsonl"]),
    ("", "empty.jsonl", ["empty.jsonl is empty", "no rows"]),
    ("[]", "empty.json", ["no rows"]),
    ("problem,answer\n", "empty.csv", ["no rows"]),
    ('{"problem": "a", "answer": "1"}\n{"problem": oops}\n', "broken.jsonl",
     ["broken.jsonl: line 2: Expecting value"]),
    ('[{"problem": "a",\n "answer": }]', "broken.json", ["broken.json", "line 2"]),
    ('problem,answer\na,1\n"b,2\nc,3\n', "open.csv", ["open.csv", QUOTE]),
    ('problem,answer\n"a\n",1\n"b,2\n"c",3\n', "open.csv", ["the row that begins in line 4"]),
    ('"problem,answer\na,1\n', "open.csv", ["line 1: a quote is opened"]),
    ("not parquet", "broken.parquet", ["broken.parquet"]),
    ("\xff\xfe", "latin.jsonl", ["latin.jsonl"]),
    ("[1, 2]", "numbers.json", ["one JSON object per problem"]),
    ("[" * 100_000, "deep.json", ["nested too deep"]),
    ('{"problem": "a", "answer": ' + "[" * 100_000, "deep.jsonl", ["nested too deep"]),
    ('{"text": "a", "label": "1"}', "odd.jsonl", ["text, label", "--problem-key", "--answer-key"]),
    ('{"problem": "a", "label": "1"}', "odd.jsonl",
     ["has a gold answer", "problem, label", "--answer-key"]),
    ('{"problem": "a", "answer": "$"}', "hollow.jsonl", ["has a gold answer", "problem, answer"]),
    ('{"frage\\u001b]0;owned\\u0007\\ud800": "a"}', "sly.jsonl", ["frage\\x1b]0;owned"]),
    ("x", "notes.txt", ["notes.txt", ".jsonl"]),
])
def test_bad_files_get_one_sentence(content, name, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(SystemExit) as stop:
        load_problems(str(tmp_path / name))
    message = str(stop.value)
    assert all(word in message for word in words), message
    assert message.endswith(".") and message.isprintable() and "Traceback" not in message


def test_a_file_that_memory_cannot_hold_gets_one_sentence(tmp_path, monkeypatch):
    def too_large(path):
        raise MemoryError

    (tmp_path / "set.parquet").touch()
    monkeypatch.setattr(sources, "read_parquet", too_large)
    with pytest.raises(SystemExit, match="set.parquet: it is too large for the memory"):
        load_problems(str(tmp_path / "set.parquet"))


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".jsonl", "~nobody/x.jsonl", "a\0b",
                                  "a" * 5000 + "/b", "mth500"])
def test_a_name_that_is_none_gets_one_sentence(name):
    with pytest.raises(SystemExit) as stop:
        load_problems(name)
    said = str(stop.value)
    assert len(said) < 700 and said.isprintable()
    assert name.endswith("jsonl") or "builtin-words, math500" in said


# ----------------------------------------------------------------------------------------- the hub
@pytest.fixture
def hub(monkeypatch):
    """A hub of Python dicts: {(repo, config): {split: rows}}."""
    sets = {}

    def load_dataset(repo, config=None):
        if config is None and (repo, None) not in sets:
            names = [c for r, c in sets if r == repo]
            raise ValueError("Config name is missing.\nPlease pick one of the available configs: "
                             f"{names}\nLike: x")
        return sets[repo, config]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(sources, "go_offline_if_unreachable", lambda repo: None)
    return sets


def row(text, gold="1"):
    return dict(question=text, answer=gold)


def test_splits_for_training_and_evaluation(hub):
    hub["openai/gsm8k", "main"] = dict(train=[row("a", "#### 1,000")], test=[row("b")])
    hub["me/only_train", None] = dict(train=[row("c")])
    hub["me/odd", None] = dict(aime=[row("d")], amc=[row("e")])
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
        hub["opencompass/AIME2025", config] = dict(test=[row(f"p{number}")])
    hub["me/x", "en"] = hub["me/x", "cn"] = dict(train=[row("a")])
    problems = load_problems("opencompass/AIME2025", for_training=False)
    assert [p.problem for p in problems] == ["p0", "p1"]
    assert load_problems("me/x:cn")[0].source == "me/x:cn"
    with pytest.raises(SystemExit, match="has the configs en, cn: name one, as in me/x:en"):
        load_problems("me/x")


def test_group_expands_to_its_four_sets_with_weights(hub):
    names = ["ra-math500", "ra-minerva", "ra-olympiadbench", "ra-aime-like"]
    for name in names:
        hub[sources.BENCHMARKS[name], None] = dict(train=[dict(problem=name, gt="1")])
    found = load_problems("reinforce-ada", for_training=False)
    assert [p.problem for p in found] == names
    assert sources.expand("gsm8k,reinforce-ada") == [
        ("gsm8k", None), *zip(names, (500, 272, 675, 230))]


class Busy(http.server.BaseHTTPRequestHandler):
    """What it answers, the data set's name says; `asked` is the order of what it was asked."""

    asked = []

    def do_GET(self):
        name = self.path.split("?")[0].split("/")[-1]
        self.asked.append(name)
        if name in ("silent", "slow") and self.asked.count(name) == 1:
            return  # the connection is closed without a word; after that a proxy may say 403
        body = b'{"id": "a/b", "siblings": [{"rfilename": "model.safetensors"}]}'
        self.send_response(dict(busy=429, down=503, gone=404, silent=403).get(name, 200))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if name == "gone":
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


ASK = """
from huggingface_hub import constants
from parts import data, models, sources
for name in ("sound", "busy", "down", "slow"):
    print(name, sources.go_offline_if_unreachable("a/" + name) is not None)
print(models.files_on_hub("a/model"), constants.HF_HUB_OFFLINE)
for load in (lambda: data.load_problems("a/gone"), lambda: data.load_problems("a/silent"),
             lambda: models.fetch_model("a/silent", 9)):
    try:
        load()
    except SystemExit as end:
        print(end)
print(constants.HF_HUB_OFFLINE)
"""


@pytest.mark.slow
def test_only_silence_is_offline_and_it_is_asked_twice(tmp_path):
    """The real libraries. They would ask a silent hub again and again, for minutes."""
    pytest.importorskip("datasets")
    Busy.asked.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK], capture_output=True, text=True, cwd=ROOT, timeout=HANG,
            env=os.environ | dict(HF_ENDPOINT=address, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0",
                                  NO_PROXY="*"))
    finally:
        server.shutdown()
    sound, said, busy, also, down, slow, model, gone, silence, data, without, offline = (
        done.stdout.splitlines())
    assert [sound, busy, down, slow] == ["sound True", "busy False", "down False", "slow True"]
    assert said.startswith("the hub is busy: ") and "429" in said and "503" in also
    assert model == "['model.safetensors'] False"
    assert gone.startswith("The hub has no dataset a/gone: check its name")
    assert "the hub does not answer" in silence and "this machine's cache is used" in silence
    assert "--data file.jsonl" in data and "--model tiny" in data
    assert "Cannot load the model a/silent" in without and "--model tiny" in without
    assert offline == "True" and "Traceback" not in done.stdout + done.stderr
    names = ["sound", "busy", "down", "slow", "model", "gone", "silent"]
    assert [name for name in dict.fromkeys(Busy.asked) if name in names] == names
    assert Busy.asked.count("silent") == 2 <= Busy.asked.count("slow")
