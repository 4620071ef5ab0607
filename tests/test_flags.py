"""Flags: every field is one, is explained and arrives; what is none is answered by the nearest."""
import os
import subprocess
import sys
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from helpers import HANG, ROOT
from parts.config import Config, ModelSettings
from parts.config import in_one_sentence, parse_flags


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(script: str, *flags, cwd=ROOT):
    """(exit code, what it printed, its errors) of `python script *flags`.

    It must answer before the large libraries are imported, which takes many seconds.
    """
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / script), *flags], capture_output=True,
        text=True, cwd=cwd, env=os.environ | dict(COLUMNS="100"), timeout=HANG)
    lines = done.stderr.splitlines()
    imported = {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}
    assert "tyro" in imported and not {"torch", "transformers", "vllm", "datasets"} & imported
    errors = [line for line in lines if not line.startswith("import time:")]
    return done.returncode, done.stdout, "\n".join(errors)


@pytest.fixture(scope="module")
def text():
    code, printed, _ = run("minirl.py", "--help")
    assert code == 0
    return printed


@pytest.mark.parametrize("name", [f.name for f in fields(Config)])
def test_every_flag_is_explained_by_the_words_under_its_field(name, text):
    lines = [line.strip(" │") for line in text.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.split(" ")[0].rstrip(",") == flag(name))
    entry = " ".join(lines[at:at + 6])
    entry = entry[:entry.index("(default")]
    words = entry.replace(flag(name), "").split()
    assert sum(word.isalpha() and word.islower() for word in words) >= 2, entry


def test_help_is_in_groups_with_a_title_each(text):
    for group in Config.__bases__:
        title = group.__name__.removesuffix("Settings")
        assert f"─ {title} options ─" in text
        assert " ".join(group.__doc__.split())[:40] in text


@pytest.mark.parametrize("flags, words", [
    (["--lrr", "1"], ["--lr"]), (["--modle", "x"], ["Perhaps you meant", "--model"]),
    (["--mini-batch", "2"], ["Perhaps you meant", "--mini-batches"]),
    (["--lr", "fast"], ["--lr", "'fast'"]), (["--n", "1.5"], ["--n", "'1.5'"]),
    (["--sampler", "magic"], ["'magic'", "--sampler", "ada-balance"]),
    (["--lr"], ["--lr"]), (["--clip", "yes"], ["yes"]), (["words"], ["words"]),
])
def test_what_is_no_flag_or_no_value_is_answered(flags, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_flags(Config, flags, "minirl.py", "")
    answer = capsys.readouterr().err
    assert ended.value.code == 2 and all(word in answer for word in words), answer


def test_help_of_the_evaluation():
    import eval as evaluation

    code, printed, _ = run("eval.py", "--help")
    assert code == 0
    for f in fields(evaluation.Config):
        assert flag(f.name) + " " in printed or flag(f.name) + "," in printed
    for group in evaluation.Config.__bases__:
        assert f"─ {group.__name__.removesuffix('Settings')} options ─" in printed


@pytest.mark.parametrize("flags, sentence", [
    ("--k 0", "k must be at least 1"), ("--max-tokens -1", "max_tokens must be at least 0"),
    ("--seed -1", "seed must be at least 0"), ("--engine-memory 1", "engine_memory must be below"),
    ("--engine-memory 0", "engine_memory must be above"), ("--limit -1", "limit must be at least"),
    ("--temperature 0.001 --k 1", "0 (greedy) or at least 0.01"),
    ("--temperature 0", "use --k 1"), ("--temperature nan", "finite"), ("--stop=", "not be empty"),
    ("--graders 0", "graders must be"), ("--engine-sequences 0", "engine_sequences must be"),
])
def test_an_evaluation_that_cannot_work_is_refused_in_one_sentence(flags, sentence, capsys):
    import eval as evaluation

    with pytest.raises(SystemExit) as ended:
        evaluation.parse(flags.split())
    error = capsys.readouterr().err
    assert ended.value.code == 2 and sentence in error and error.startswith("eval.py: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("script, flags, code, sentence", [
    ("minirl.py", ["--top-p", "0.9"], 2, "minirl.py: top_p must stay 1 in training"),
    ("minirl.py", ["--data", "missing.jsonl"], 1, "No data file missing.jsonl: --data takes a"),
    ("eval.py", ["--data", "missing.jsonl"], 1, "No data file missing.jsonl: --data takes a")])
def test_the_programs_answer_before_torch_is_imported(script, flags, code, sentence, tmp_path):
    found, printed, error = run(script, *flags, cwd=tmp_path)
    assert (found, printed) == (code, "") and error.startswith(sentence) and "\n" not in error


def another(name: str):
    """A value that is not the default, as text and as it should arrive."""
    hint, usual = get_type_hints(Config)[name], (getattr(Config, name), "auto")
    if get_origin(hint) is Literal:
        value = next(choice for choice in get_args(hint) if choice not in usual)
    else:
        value = {int: -97, float: -0.125, str: "words"}[hint]  # a minus begins no flag
    return str(value), value


def test_every_flag_arrives_in_its_own_field():
    hints, argv, wanted = get_type_hints(Config), [], {}
    for f in fields(Config):
        if hints[f.name] is bool:
            wanted[f.name] = not f.default
            argv.append(flag(f.name) if wanted[f.name] else flag("no_" + f.name))
        else:
            typed, wanted[f.name] = another(f.name)
            argv += [flag(f.name), typed]
    found = parse_flags(Config, argv, "minirl.py", "")
    assert {name: getattr(found, name) for name in wanted} == wanted


def test_without_flags_the_defaults_hold_and_others_can_take_their_place():
    assert parse_flags(Config, [], "p", "") == Config()
    stored = dict(lr=0.25, clip=False, resume=True)
    assert parse_flags(Config, [], "p", "", stored) == Config(**stored)
    given = parse_flags(Config, ["--no-resume", "--M-first", "9"], "p", "", stored)
    assert given == Config(lr=0.25, clip=False, M_first=9)
    one = parse_flags(ModelSettings, ["--lora-rank", "8"], "p", "")  # a class without groups
    assert one == ModelSettings(lora_rank=8)


def test_a_sentence_ends_the_program_with_code_2(capsys):
    with pytest.raises(SystemExit) as ended, in_one_sentence("prog"):
        raise ValueError("n must be at least 1, not 0")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "prog: n must be at least 1, not 0\n"
    with pytest.raises(KeyError), in_one_sentence("prog"):
        raise KeyError("a mistake of the program keeps its traceback")
