"""A mistake of the user ends in one sentence that says what is wrong, and changes nothing.

A row has the flags, words of the sentence, and perhaps a function that spoils files before. The
programs start in a folder with runs/mine, a finished run of three steps, and a data file.
"""
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation  # the module has the name of a builtin
import minirl
from helpers import HANG, ROOT, contents
from parts.config import parse
from parts.files import append
from recipes import export
from world import Grader, small_run

MINE = Path("runs/mine")
LAST = MINE / "checkpoints" / "step-000003"
PROGRAMS = {
    "minirl.py": lambda flags: minirl.main(parse(flags)),
    "eval.py": evaluation.main,
    "recipes.export": lambda flags: export.export(flags[0], Path(flags[1])),
}


# ------------------------------------------------------------------------------ ways to spoil it
def text(file: str | Path, content: str):
    def spoil():
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_bytes(content.encode("latin-1"))
    return spoil


def adapter_of(value: float, fewer: int = 0, **more):
    def spoil():
        file = LAST / "adapter_model.safetensors"
        kept = [*load_file(file).items(), *more.items()][fewer:]
        save_file({name: torch.full_like(w, 0.1 if i else value)
                   for i, (name, w) in enumerate(kept)}, file)
    return spoil


def setting(**values):
    """The run has these settings in config.json; None: it is not there."""
    def spoil():
        stored = json.loads((MINE / "config.json").read_text())
        settings = stored["config"] | values
        stored["config"] = {name: value for name, value in settings.items() if value is not None}
        (MINE / "config.json").write_text(json.dumps(stored))
    return spoil


# ------------------------------------------------------------------------------ the rows
NO_CACHE = ("VLLM_CPU_KVCACHE_SPACE, in GiB, must be a whole number from 1, not '0'\n",
            lambda: os.environ.update(VLLM_CPU_KVCACHE_SPACE="0"))
FITS = "--out out --data sums.jsonl --template chat --max-tokens 9 --max-prompt-tokens 40"
REFUSED = {
    "minirl.py": [
        ("--threshold 0.5", "threshold has no effect without reward, because math-verify gives 0 or"
         " 1: leave it out\n"),
        ("--replay r3", "models/tiny, which is no MoE model"), ("--resume", "needs the --name of"),
        ("--model other", "of the family gpt2 cannot be trained here, but only those of qwen2, qw",
         text("other/config.json", '{"model_type": "gpt2"}')),
        *((f"--name other {flag}", "runs/other holds something else: choose another --name",
           text("runs/other/eval.jsonl", "{}"))
          for flag in ("", "--resume")),  # an evaluation, whose log would be cut back to nothing
        ("--name made", "runs/made holds something else: choose another --name",
         text("runs/made/config.json", '{"model_type": "qwen2"}')),  # an exported model
        ("--name mine", "exists already: add --resume"), ("--name other", *NO_CACHE),
        ("--name mine --resume", "has logs but no checkpoint: put one back, or choose another",
         lambda: shutil.rmtree(MINE / "checkpoints")),
        ("--name mine --resume", "M must be from 1", setting(M=-1)),
        *(("--name mine --resume", "another version has started run mine", setting(**odd))
          for odd in (dict(clip=None), dict(other=1))),
        ("--name mine --resume --lora-rank 3", "minirl.py: run mine was started with --lora-rank 16"
         ": resume it with the same, or choose another --name\n"),
        ("--name mine --resume", "names --reward a.py:f: give this", setting(reward="a.py:f")),
        ("--name mine --resume", "config.json", text(MINE / "config.json", "{")),
        ("--name mine --resume", "config.json cannot be read", (MINE / "config.json").unlink),
    ],
    "eval.py": [
        ("--k 0", "k must be from 1 to 1e+06, not 0"), ("", *NO_CACHE),
        ("--columns a,b", "columns has no effect with data whose columns are known"),
        ("--temperature 0", "use --k 1"), ("--temperature 0.001", "at least 0.01"),
        ("--data gsm9k", "There is no data set 'gsm9k': give a file"),
        ("--base", "base has no effect without adapter, which names a run or a PEFT folder"),
        ("--out out --data sly.jsonl", "frage\\x1b]0;owned",
         text("sly.jsonl", '{"frage\\u001b]0;owned\\u0007\\ud800": "a"}')),
        (f"{FITS} --limit 1 --template a.jinja", "cannot be rendered",  # it may not run code
         text("a.jinja", "{{ problem }}{{ ''.__class__.__mro__ }}")),
        (f"{FITS} --limit 1 --template a.json", "does not show the problem",
         text("a.json", '[{"role": "user", "content": "{question}"}]')),
        (FITS, "out holds something else: choose another --out", text("out/notes.txt", "mine")),
        ("--adapter runs/mine", "reward a.py:f: give this flag again", setting(reward="a.py:f")),
        ("--adapter runs/mine", "names --template a.jinja", setting(template="a.jinja")),
        ("--adapter runs/mine --model tiny-skills", "started with other contents of model"),
        ("--adapter runs/mine", "runs/mine is a run of another version",
         text(MINE / "config.json", '{"config": {}}')),
    ],
    "recipes.export": [
        ("runs/mine/kept/step-000003 made", "is no checkpoint of a run",
         lambda: LAST.parent.rename(MINE / "kept")),
        ("runs/mine made", "their layers differ", adapter_of(0.1, fewer=1)),
        ("runs/mine made", "their layers differ", adapter_of(0.1, further=torch.zeros(1))),
        ("runs/mine made", "holds numbers that are not finite", adapter_of(math.inf)),
        ("runs/mine runs", "exists already"),
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


def files(place: Path) -> dict:
    """A program may make the folder of a run before it knows that the run cannot start."""
    return {path: time for path, time in contents(place).items() if time}


@pytest.mark.parametrize("program, flags, words, spoil", [
    pytest.param(*row, *[None] * (4 - len(row)), id=f"{row[0]}: {row[2][:50]}") for row in ROWS])
def test_it_is_refused_in_one_sentence_and_nothing_has_changed(
        program, flags, words, spoil, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("parts.engine.start", lambda *_: pytest.fail("an engine was started"))
    monkeypatch.setattr("parts.machine.build_for_cpu", lambda: True)
    monkeypatch.setattr("rewards.Grader", Grader)
    place = shutil.copytree(finished, tmp_path, dirs_exist_ok=True) if spoil else finished
    monkeypatch.chdir(place)
    if spoil:
        spoil()
    before = files(place)
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program](flags.split())
    code, (promised, said) = ended.value.code, capsys.readouterr()
    if isinstance(code, str):
        code, said = 1, code
    assert code == 1 + said.startswith(f"{program}: ") and words in said
    assert "starts at step 1" not in promised
    assert said.rstrip("\n").isprintable() and len(said) < 1000
    assert files(place) == before


@pytest.mark.parametrize("program, flags, words", [
    *((program, *REFUSED[program][0]) for program in ("minirl.py", "eval.py")),
    ("minirl.py", "--eval-data builtin,gone.jsonl", "No such file or directory: 'gone.jsonl'"),
    *((program, *row) for program in ("minirl.py", "eval.py") for row in (
        ("--template missing.jinja", "cannot read missing.jinja"),
        ("--reward a.py:f", "--reward takes FILE.py:FUNCTION of an existing file, not a.py:f.")))])
def test_a_program_answers_before_torch_is_imported(program, flags, words, tmp_path):
    """Which here could not be."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = subprocess.run([sys.executable, ROOT / program, *flags.split()], text=True, timeout=HANG,
                          capture_output=True, cwd=tmp_path,
                          env=dict(PATH="", PYTHONPATH=str(tmp_path)))
    assert (done.returncode in (1, 2), done.stdout) == (True, "")
    assert words in done.stderr and done.stderr.count("\n") == 1
