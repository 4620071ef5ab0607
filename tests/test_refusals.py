"""A mistake of the user ends in one sentence that says what is wrong, and changes nothing.

A row has the flags, words of the sentence, and perhaps a function that spoils files before. The
programs start in a folder with runs/mine, a finished run of three steps, and a few data files.
"""
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation  # the module has the name of a builtin
import explore
import minirl
from course import simulate
from helpers import HANG, ROOT, contents
from parts.config import parse
from parts.files import append
from parts.models import load_tokenizer, tiny_folder
from recipes import export
from world import Grader, small_run

MINE = Path("runs/mine")
LAST = MINE / "checkpoints" / "step-000003"
PROGRAMS = {
    "minirl.py": lambda flags: minirl.main(parse(flags)),
    "eval.py": evaluation.main,
    "explore.py": lambda flags: explore.main(explore.parse(flags)),
    "recipes.export": lambda flags: export.export(flags[0], Path(flags[1])),
    "course/simulate.py": simulate.main,
}


# ------------------------------------------------------------------------------ ways to spoil it
def text(file: Path, content: str):
    def spoil():
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content.encode("latin-1"))
    return spoil


def gone(file: Path):
    return lambda: shutil.rmtree(file) if file.is_dir() else file.unlink()


def a_folder(file: Path):
    """Where a file should be, there is a folder."""
    def spoil():
        file.unlink(missing_ok=True)
        file.mkdir()
    return spoil


def adapter_of(value: float, fewer: int = 0):
    def spoil():
        file = LAST / "adapter_model.safetensors"
        kept = [*load_file(file).items()][fewer:]
        save_file({name: torch.full_like(w, value) for name, w in kept}, file)
    return spoil


def changed(file: Path, **values):
    return lambda: file.write_text(json.dumps(json.loads(file.read_text()) | values))


def setting(name: str, value):
    """The run has this setting in config.json; None: it is not there."""
    def spoil():
        stored = json.loads((MINE / "config.json").read_text())
        stored["config"].pop(name, None)
        stored["config"] |= {} if value is None else {name: value}
        (MINE / "config.json").write_text(json.dumps(stored))
    return spoil


def a_token_more():
    """A model whose tokenizer has got tokens that its embedding has no rows for."""
    shutil.copytree(tiny_folder(), "grown")
    words = load_tokenizer("grown")
    words.add_tokens([f"<{i}>" for i in range(40)])
    words.save_pretrained("grown")
    append(Path("grown.jsonl"), dict(problem="1<39>+1=?", answer="2"), dict(
        problem="2+<39>1=?", answer="3"))


# ------------------------------------------------------------------------------ the rows
OUT = "--out out --data sums.jsonl"
FITS = f"{OUT} --template chat --max-tokens 9 --max-prompt-tokens 40"
# What eval.py refuses of a user's own files, as minirl.py does: (name, what is in it, words).
BAD_DATA = [
    ("empty.jsonl", "", "empty.jsonl can be used: it has none"),
    ("broken.jsonl", '{"problem": "a", "answer": "1"}\n{"problem": oops}\n',
     "broken.jsonl: Expecting value: line 2 column 13"),
    ("open.csv", 'problem,answer\na,1\n"b,2\nc,3\n', "open.csv: row 2"),
    ("comma.csv", 'problem,answer\n"p,\nq",1\nWhat is 1,2?,3\n', "row 2 after the header: more"),
    ("twice.csv", "problem,answer,answer\na,1,2\n", "have the same name"),
    ("broken.parquet", "not parquet", "broken.parquet"),
    ("numbers.json", "[1, 2]", "one JSON object per problem"),
    ("wrapped.json", '{"train": [{"problem": "a"}], "test": [{"problem": "b"}]}', "(train, test)"),
    ("columns.json", '{"problem": ["a", "b"], "answer": [1, 2]}', "1 without a problem"),
    ("twice.jsonl", '{"problem": "a", "answer": 1, "answer": 2}', "same name among problem"),
    ("comma.jsonl", '{"problem": "a", "answer": "1"}\n{"problem": "b", "answer": "2"},\n',
     "Expecting value: line 2 column 32"),
    ("deep.jsonl", '{"problem": "a", "answer": ' + "[" * 900 + "]" * 900 + "}", "without a gold"),
    ("odd.jsonl", '{"text": "a", "label": "1"}', "--columns QUESTION,ANSWER"),
    ("odd.jsonl", '{"problem": "a", "label": "1"}', "without golds, use --reward FILE.py:FUNCTI"),
    ("sly.jsonl", '{"frage\\u001b]0;owned\\u0007\\ud800": "a"}', "frage\\x1b]0;owned"),
]
BAD_TEMPLATES = [
    ("a.jinja", "{{ problem }", "a.jinja cannot be rendered (line 1, TemplateSyntaxError"),
    ("a.jinja", "{{ problem }}{{ ''.__class__.__mro__ }}", "cannot be rendered"),  # no code
    ("a.jinja", "{{ question }}", "a.jinja does not show the problem"),
    ("a.jinja", "\xff\xfe{{ problem }}", "no text in UTF-8"),
    ("a.txt", "{problem}", "a .jinja file, or a .json file with"),
    *(("a.json", content, "or no turns with {problem}") for content in (
        "{", "[1]", '[{"role": "user"}]', '[{"role": "user", "content": 3}]', "{}",
        '[{"role": "user", "content": "{question}"}]')),
]
BAD_REWARDS = [  # what is in a.py, and why `--reward a.py:score` cannot be used
    ("scores = lambda: 0", "AttributeError: module 'a.py' has no attribute 'score'"),
    ("score = 3", "TypeError: 3 is not a callable object"),
    ("\ndef score(a, b)\n  pass", "SyntaxError: expected ':' (a.py, line 2)"),
    ("import numpty", "ModuleNotFoundError: No module named 'numpty'"),
    ("import os; os._exit(1)", "its process ended with exit code 1"),
    ("import sys; sys.exit(5)", "SystemExit: 5"),
]
REFUSED = {
    "minirl.py": [
        ("--temperature 0 --threshold 0.5", "temperature must be from 0.01 to 100.0, not 0.0"),
        ("--threshold 0.5", "threshold has no effect without reward"),
        ("--sampler uniform --M 9", "M has no effect with sampler uniform"),
        ("--sampler dapo --weighting unbiased", "no effect where all answers are kept"),
        ("--max-rounds-all-correct 4", "has no effect with only N = 4 rounds"),
        ("--mini-batches 25", "mini_batches = 25 is more than the 24 prompts"),
        ("--objective cispo --weight-cap 4", "weight_cap has no effect with objective cispo"),
        ("--importance none --weight-cap 4", "no effect with importance none"),
        ("--no-clip --eps-low 0.1 --mini-batches 2", "eps_low has no effect without clip"),
        ("--no-clip", "clip has no effect with one mini-batch"),
        ("--replay r2", "replay has no effect with one mini-batch"),
        ("--replay r3", "tiny, which is no MoE model that can be replayed: leave it out"),
        ("--model NoSuchModel", "NoSuchModel"),
        ("--model runs/mime", "There is no folder runs/mime; did you mean runs/mine?"),
        ("--model ~nobody/x", "--model tiny"),
        ("--eval-data missing.jsonl", "data file missing.jsonl: No such file or directory; --data"),
        ("--columns a,b", "columns has no effect with data whose columns are known"),
        ("--stop <|nothing|>", "--stop: the model has no token '<|nothing|>'; known ends: <|endo"),
        ("--model grown --data grown.jsonl --template chat --max-tokens 9 --max-prompt-tokens 40",
         "token <39> (id 390), but the model's embedding has 384 rows", a_token_more),
        ("--columns frage --data sums.jsonl",
         "its columns (problem, answer) have other names than frage, use"),
        ("--data odd.jsonl", "--columns QUESTION,ANSWER", text(
            Path("odd.jsonl"), '{"alpha": "1+1", "beta": 2}')),
        ("--data sums.jsonl --eval-data builtin --max-prompt-tokens 3", "over 3 tokens"),
        ("--data english.jsonl", "tiny reads only problems like ", text(
            Path("english.jsonl"), "".join(json.dumps(dict(
                problem=f"Tom has {i} pens. How many?", answer="1")) + "\n" for i in range(9)))),
        ("--eval-data builtin,long.jsonl", "Every prompt of long.jsonl is over", text(
            Path("long.jsonl"), json.dumps(dict(problem="1+" * 999 + "1=?", answer="1000")))),
        *((f"--reward {name}", f"--reward takes FILE.py:FUNCTION of an existing file, not {name}.")
          for name in ("a.py", "a.py:", "a:score", ".:x", "a.py:score")),
        *(("--reward a.py:score", f"a.py:score cannot be used: {words}",
           text(Path("a.py"), content)) for content, words in BAD_REWARDS),
        ("--name note", "Cannot use runs/note (File exists)", text(Path("runs/note"), "mine")),
        *((f"--name other {flag}", "Cannot use runs/other (it holds eval.jsonl but no run): name "
           "another folder by --name", text(Path("runs/other/eval.jsonl"), "{}"))
          for flag in ("", "--resume")),  # an evaluation, whose log would be cut back to nothing
        *((f"--name made {flag}", "runs/made (it holds config.json but no run): name another",
           text(Path("runs/made/config.json"), '{"model_type": "qwen2"}'))
          for flag in ("", "--resume")),  # an exported model
        ("--name mine", "exists already: add --resume"),
        ("--name mine", "exists already: add --resume", gone(MINE / "metrics.jsonl")),
        ("--name mine --resume", "has logs but no checkpoint: put one back, or choose another",
         gone(MINE / "checkpoints")),
        ("--name mine --resume", "M must be from 1", setting("M", -1)),
        ("--name mine --resume", "another version has started run mine", setting("gone", 1)),
        ("--name mine --resume", "another version has started run mine", setting("clip", None)),
        ("--name mine --resume", "another version has started run mine", setting("edition", None)),
        ("--name mine --resume", "another version has started run mine", setting("edition", 4)),
        ("--name mine --resume --lora-rank 3", "was started with --lora-rank 16, not 3"),
        ("--name mine --resume --no-eval-first", "was started with --eval-first True, not False"),
        ("--name mine --resume", "config.json", text(MINE / "config.json", "{")),
    ],
    "eval.py": [
        ("--k 0", "k must be from 1 to 1000000, not 0"),
        ("--columns a,b", "columns has no effect with data whose columns are known"),
        ("--sync merge", "sync has no effect without adapter"),
        ("--engine-memory 0.3", "engine_memory has no effect without a GPU"),
        ("--temperature 0", "use --k 1"),
        ("--threshold 0.5", "threshold has no effect without reward"),
        ("--base", "base has no effect without adapter, which names a run or a PEFT folder"),
        ("--adapter runs/mine --base --against out", "base and against cannot be used together"),
        *((f"--out out --data {name}", words, text(Path(name), content))
          for name, content, words in BAD_DATA),
        *((f"--out out --data {name}", "builtin-words, math500") for name in (
            "x" * 5000, "a" * 5000 + "/b", "mth500")),
        *((f"--out out --data {name}.jsonl", "Cannot read") for name in ("x" * 5000, "~nobody/x")),
        *((f"{FITS} --limit 1 --template {name}", words, text(Path(name), content))
          for name, content, words in BAD_TEMPLATES),
        (f"{FITS} --template missing.jinja", "cannot read"),
        ("--out out --data held-out", "--data held-out needs --adapter RUN"),
        ("--out out --data held-out --adapter runs/mine", "--data held-out needs --adapter RUN"),
        (FITS, "Cannot use out (it holds notes.txt but no evaluation): name another folder by --",
         text(Path("out/notes.txt"), "mine")),
        *((f"{OUT} --{flag} {'x' * 5000}", "There is no folder xxx")
          for flag in ("adapter", "against")),
        *((f"{OUT} --{flag} runs/mime", "There is no folder runs/mime; did you mean runs/mine?")
          for flag in ("adapter", "model")),
        (f"{OUT} --adapter runs", "runs has no adapter_config.json: name a PEFT"),
        (f"{OUT} --model ./nowhere", "There is no model"),
        (f"{FITS} --template poem", "cannot read poem (No such file or directory): it takes"),
        (f"{FITS} --max-tokens 5000", "40 + 5000: add --max-prompt-tokens 256 --max-tokens 768"),
        (f"{FITS} --max-prompt-tokens 3", "over 3 tokens"),
        (f"{FITS} --stop <|nothing|>", "no token '<|nothing|>'; known ends: <|endoftext|>"),
        ("--out out --data grown.jsonl --model grown --template chat --max-tokens 9 "
         "--max-prompt-tokens 40", "token <39> (id 390), but the model's embe", a_token_more),
        (f"{FITS} --against runs/mine", "runs/mine/protocol.json is missing or damaged"),
        (f"{FITS} --against runs", "damaged", text(Path("runs/protocol.json"), "[]")),
        (f"{FITS} --against runs", "runs has other questions (gsm8k = 5 questions, abc) than this "
         "evaluation (sums.jsonl = 21 questions, ", text(
             Path("runs/protocol.json"), '{"questions": {"gsm8k": "5 questions, abc"}}')),
    ],
    "explore.py": [
        ("runs/mine --steps 5-2", "--steps takes a step such as 7"),
        ("runs/none", "no folder of a run"),
        ("runs/mine", "no folder of a run", gone(MINE / "config.json")),
        ("runs/mine", "no folder of a run that has finished a step", lambda: [
            gone(MINE / f"{log}.jsonl")() for log in ("metrics", "eval")]),
        ("runs/mine", "missing or damaged", text(MINE / "config.json", "{")),
        ("runs/mine", "missing or damaged", a_folder(MINE / "config.json")),
        ("runs/mine", "-> 'runs/mine/explore.html'", a_folder(MINE / "explore.html")),
        *(("runs/mine", f"The page cannot be made: [Errno 21] Is a directory: 'runs/mine/{log}.j",
           a_folder(MINE / f"{log}.jsonl")) for log in ("groups", "eval")),
    ],
    "recipes.export": [
        ("runs/main out", "There is no folder runs/main; did you mean runs/mine?"),
        ("strange out", "is no checkpoint of a run", lambda: LAST.rename("strange")),
        ("runs/mine out", "does not fit", text(LAST / "adapter_model.safetensors", "half")),
        ("runs/mine out", "does not fit", changed(LAST / "adapter_config.json", r=4)),
        ("runs/mine out", "their layers differ", changed(
            LAST / "adapter_config.json", target_modules=["q_proj"])),
        ("runs/mine out", "their layers differ", adapter_of(0.1, fewer=1)),
        ("runs/mine out", "holds numbers that are not finite", adapter_of(math.inf)),
        ("runs/mine runs", "exists already"),
        ("runs/mine sums.jsonl", "exists already"),
        ("runs/mine sums.jsonl/out", "Could not write"),
    ],
    "course/simulate.py": [
        ("--pass-rate 0.5 2", "--pass-rate takes numbers from 0 to 1"),
    ],
}
ROWS = [(program, *row) for program, rows in REFUSED.items() for row in rows]


# ------------------------------------------------------------------------------ the one body
@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder that every program starts in."""
    place = tmp_path_factory.mktemp("finished")
    small_run(place, steps=3, log_groups="all")
    append(place / "sums.jsonl", *(dict(problem=f"{a}+{b}=?", answer=str(a + b))
                                   for a in range(1, 8) for b in (1, 2, 3)))
    return place


@pytest.mark.parametrize("program, flags, words, spoil", [
    pytest.param(*row, *[None] * (4 - len(row)), id=f"{row[0]}: {row[2][:50]}") for row in ROWS])
def test_it_is_refused_in_one_sentence_and_nothing_has_changed(
        program, flags, words, spoil, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("parts.engine.start", lambda *_: pytest.fail("an engine was started"))
    monkeypatch.setattr("rewards.Grader", Grader)
    place = finished
    if spoil:
        place = shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(place)
    if spoil:
        spoil()
    before = contents(place)
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program](flags.split())
    code, (promised, said) = ended.value.code, capsys.readouterr()
    if isinstance(code, str):
        code, said = 1, code
    assert code in (1, 2) and words in said and "starts a new run" not in promised
    assert said.rstrip("\n").isprintable() and len(said) < 1000
    assert contents(place) == before


@pytest.mark.parametrize("program, flags, words", [
    *((program, *rows[0][:2]) for program, rows in REFUSED.items() if program != "recipes.export"),
    *((program, f"--data {name}", words) for program in ("minirl.py", "eval.py")
      for name, words in (("missing.jsonl", "Cannot read"), ("mth500", "builtin-words, math500"))),
    *((program, "--template missing.jinja", "cannot read") for program in ("minirl.py", "eval.py")),
    ("minirl.py", "--eval-data missing.jsonl", "Cannot read")])
def test_a_program_answers_before_torch_is_imported(program, flags, words, tmp_path):
    """Which here could not be."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = subprocess.run([sys.executable, ROOT / program, *flags.split()], text=True, timeout=HANG,
                          capture_output=True, cwd=tmp_path,
                          env=dict(PATH="", PYTHONPATH=str(tmp_path)))
    assert (done.returncode in (1, 2), done.stdout) == (True, "")
    assert words in done.stderr and done.stderr.count("\n") == 1
