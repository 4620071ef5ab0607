"""A run's folder: one process at a time, and no start is forgotten."""
import json
import subprocess
import sys
from dataclasses import asdict, fields, replace
from typing import get_args

import pytest

from conftest import ROOT
from parts import folder
from parts.config import RESUMABLE, Config, go_on, parse, resolve, stored_settings
from parts.run import settings_of


ABC = dict(problems="2 questions, abc")


def other_value(field, value):
    """Another value of the same kind, whether or not it makes sense."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    choices = get_args(field.type)
    return next((choice for choice in choices if choice not in (value, "auto")), f"{value}-2")


def stepped(run):
    """A run that has learnt something."""
    (run / "metrics.jsonl").write_text('{"step": 1}\n')


@pytest.mark.parametrize("field", fields(Config), ids=lambda field: field.name)
def test_on_resume_each_setting_is_free_or_refused_with_both_values(field):
    config = resolve(Config(name="mine", advantage="pool-mean"))
    known = settings_of(config)
    changed = replace(config, **{field.name: other_value(field, getattr(config, field.name))})
    if field.name in RESUMABLE:
        assert go_on(changed, known) == changed
        return
    flag = "--" + field.name.replace("_", "-")
    was, now = known[field.name], getattr(changed, field.name)
    with pytest.raises(ValueError) as refused:
        go_on(changed, known)
    assert f"{flag} {was}, not {now}" in str(refused.value) and "\n" not in str(refused.value)


def test_what_may_change_cannot_change_what_the_logs_mean():
    """The settings that are free on resume, by name: a new one has to be put here on purpose."""
    assert set(asdict(Config())) - set(settings_of(Config())) == {"resume"}
    assert RESUMABLE == {
        "name", "resume", "steps", "lr", "eval_every", "checkpoint_every", "keep_checkpoints",
        "sync", "engine_memory", "sleep", "engine_sequences", "micro_tokens",
        "graders", "log_groups", "report_to", "train_anyway"}


def test_auto_on_resume_is_what_the_run_has_made_of_it():
    config = replace(resolve(Config(name="mine")), replay="r3", dtype="bfloat16")
    again = replace(config, replay="auto", dtype="auto", batch_prompts=0, lr=0.0, steps=0)
    assert go_on(again, settings_of(config)) == config
    never = replace(config, eval_every=0)  # no "auto": a number of its own
    assert go_on(never, settings_of(config)) == never


@pytest.mark.parametrize("flags", [
    ["--batch-prompts", "7", "--steps", "30"], ["--objective", "cispo", "--sampler", "uniform"]])
def test_defaults_on_resume_are_those_of_the_last_start(tmp_path, monkeypatch, flags):
    """Also where a flag stands for several settings."""
    monkeypatch.chdir(tmp_path)
    first = parse(["--name", "mine", *flags])
    run = folder.Path("runs", "mine")
    held = folder.claim(run, resume=False)
    folder.note_start(run, settings_of(first), after_step=0, inputs=ABC)
    stepped(run)
    assert parse(["--name", "mine", *flags, "--resume"]) == replace(first, resume=True)
    again = parse(["--name", "mine", "--resume", "--lr", "0.5"])
    assert again == replace(first, resume=True, lr=0.5)
    folder.note_start(run, settings_of(again), after_step=20, inputs=ABC)
    assert parse(["--name", "mine", "--resume"]) == again
    held.close()


def test_a_run_that_was_given_no_name_is_found_by_the_one_it_got(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = parse(["--lr", "0.5"])
    with folder.claim(folder.Path("runs", first.name), resume=False):
        folder.note_start(folder.Path("runs", first.name), settings_of(first), 0, ABC)
        stepped(folder.Path("runs", first.name))
        assert parse(["--resume"]) == replace(first, resume=True)


def test_config_json_keeps_every_start_as_it_was(tmp_path):
    first = settings_of(Config(name="mine", lr=0.1))
    folder.note_start(tmp_path, first, after_step=0, inputs=ABC)
    before = json.loads((tmp_path / "config.json").read_text())
    for after_step, changed in ((20, dict(lr=0.01, steps=300)), (40, dict(lr=0.01, steps=300)),
                                (60, dict(steps=300))):
        folder.note_start(tmp_path, first | changed, after_step, ABC)
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["config"] == before["config"] == first
    (first_start,) = before["starts"]
    assert found["starts"][0] == first_start
    assert set(first_start) == {"time", "versions", "inputs"} and first_start["inputs"] == ABC
    assert [(start["after_step"], start["changed"]) for start in found["starts"][1:]] == [
        (20, dict(lr=0.01, steps=300)), (40, {}), (60, dict(lr=0.1))]
    assert found["starts"][3]["versions"]["python"] == sys.version.split()[0]
    assert {"torch", "peft", "transformers", "math-verify"} <= set(found["starts"][3]["versions"])
    assert folder.settings(tmp_path) == first | dict(steps=300)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": []}', '{"config": {}, "starts": [1]}',
                                  '{"config": {}, "starts": [{"changed": 1}]}', "[" * 100_000])
def test_a_broken_config_json_is_named_in_one_sentence(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    for read in (folder.settings, lambda run: folder.note_start(run, {}, 0, {})):
        with pytest.raises(SystemExit, match="config.json") as ended:
            read(tmp_path)
        assert "\n" not in str(ended.value)
    assert (tmp_path / "config.json").read_text() == text


def test_a_run_of_another_version_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    known = settings_of(Config(name="mine"))
    assert stored_settings("mine") is None
    fewer = {name: known[name] for name in known if name != "lr"}
    for other, odd in ((known | dict(gone=1), "gone"), (fewer, "lr"), (known | dict(lr="x"), "lr"),
                       (known | dict(objective=[]), ""), (known | dict(M=-1), "M must be")):
        stored = dict(config=other, starts=[])
        (tmp_path / "runs/mine/config.json").write_text(json.dumps(stored))
        stepped(tmp_path / "runs/mine")
        with pytest.raises(ValueError, match=f"(another version|config.json is damaged).*{odd}"):
            stored_settings("mine")


def test_a_run_without_a_step_is_started_anew_with_any_settings(tmp_path, monkeypatch):
    """Such as one that was short of memory, and was told to lower --max-tokens."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    folder.note_start(run, settings_of(resolve(Config(name="mine"))), 0,
                      inputs=ABC)
    for name in ("eval.jsonl", "answers.jsonl", "error.txt"):
        (run / name).write_text("{}\n")
    (run / "metrics.jsonl").write_text("")
    assert parse(["--name", "mine", "--resume", "--max-tokens", "32"]).max_tokens == 32
    folder.claim(run, resume=False).close()
    assert {path.name for path in run.rglob("*")} == {".lock", "metrics.jsonl"}


def test_a_run_whose_log_is_gone_but_not_its_checkpoints_is_not_started_anew(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    kept = tmp_path / "checkpoints" / "step-000020"
    kept.mkdir(parents=True)
    with pytest.raises(SystemExit, match="exists already: add --resume"):
        folder.claim(tmp_path, resume=False)
    folder.claim(tmp_path, resume=True).close()
    assert kept.exists() and (tmp_path / "config.json").exists()


@pytest.mark.parametrize("name, sentence", [
    ("problems", "The problems of --data and --eval-data are not those"),
    ("model", "The weights of --model are not those"),
    ("reward", "The contents of the --reward file are not those"),
    ("template", "The contents of the --template file are not those")])
def test_a_run_goes_on_with_what_it_was_started_with(tmp_path, name, sentence):
    now = {**ABC, "model": "m", "reward": "r", "template": "t"}
    other = now | {name: "3 questions, def"}
    folder.require_same(tmp_path, now)  # nothing was started yet
    for inputs in (now, other):
        folder.note_start(tmp_path, {}, 0, inputs)  # a second start does not count
    folder.require_same(tmp_path, now)
    with pytest.raises(SystemExit, match=f"^{sentence} .*now 3 questions, def.*--name"):
        folder.require_same(tmp_path, other)


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_weights_are_known_by_their_bytes(tmp_path, monkeypatch, place):
    """An adapter means nothing on others: a folder may be trained again, a name on the hub move."""
    one, two = tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path))

    def hash_of(first, second, readme=""):
        one.write_bytes(first)
        two.write_bytes(second)
        (tmp_path / "README.md").write_text(readme)
        return folder.weights_of(str(tmp_path) if place == "folder" else "org/name")

    known = hash_of(bytes(100_000), b"two")
    assert hash_of(bytes(100_000), b"two", "no weights") == known
    assert hash_of(bytes(99_999) + b"1", b"two") != known
    assert hash_of(bytes(100_000), b"") != known


# ------------------------------------------------------------------------------ whose folder it is
def test_no_run_is_started_in_a_folder_that_holds_something_else(tmp_path):
    """Such as an evaluation: resuming would cut its eval.jsonl back to nothing."""
    (tmp_path / "eval.jsonl").write_text("{}\n")
    for resume in (False, True):
        with pytest.raises(SystemExit, match="eval.jsonl but no config.json.*--name"):
            folder.claim(tmp_path, resume)
    assert [path.name for path in tmp_path.iterdir()] == ["eval.jsonl"]


def test_a_first_start_that_was_killed_is_in_nobodys_way(tmp_path):
    for name in (".lock", ".config.json.writing"):
        (tmp_path / name).write_text("{")
    folder.claim(tmp_path, resume=False).close()


def test_a_run_that_exists_is_resumed_or_left_alone(tmp_path):
    folder.claim(tmp_path / "new" / "run", resume=False).close()
    folder.note_start(tmp_path / "new" / "run", {}, 0, inputs=ABC)
    stepped(tmp_path / "new" / "run")
    with pytest.raises(SystemExit, match="exists already: add --resume"):
        folder.claim(tmp_path / "new" / "run", resume=False)
    folder.claim(tmp_path / "new" / "run", resume=True).close()


HOLD = """
import sys, time; sys.path.insert(0, sys.argv[1])
from pathlib import Path; from parts.folder import claim
held = claim(Path(sys.argv[2]), resume=True); print("mine", flush=True); time.sleep(60)
"""


def test_the_lock_goes_with_its_process_even_if_it_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLD, str(ROOT), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "mine\n"
        with pytest.raises(SystemExit, match="Another program.*run.*--name"):
            folder.claim(tmp_path / "run", resume=True)
        holder.kill()
        holder.wait()
    folder.claim(tmp_path / "run", resume=True).close()


PROTOCOL = dict(k=1, stop=[1], graders=1, engine_sequences=9)


def test_other_evaluations_are_not_mixed(tmp_path):
    folder.open_folder(tmp_path, PROTOCOL).close()
    folder.open_folder(tmp_path, PROTOCOL | dict(graders=2, engine_sequences=4)).close()
    with pytest.raises(SystemExit, match="another k, stop"):
        folder.open_folder(tmp_path, PROTOCOL | {"k": 8, "stop": [2]})
    with pytest.raises(SystemExit, match="another style"):  # of which an older version knew nothing
        folder.open_folder(tmp_path, PROTOCOL | {"style": "minerva"})


def test_a_foreign_folder_is_left_alone(tmp_path):
    for name in ("summary.json", "notes.txt", "eval.jsonl"):
        place = tmp_path / name.split(".")[0]
        place.mkdir()
        (place / name).write_text("precious")
        with pytest.raises(SystemExit, match=f"holds {name} but no protocol.json.*another --out"):
            folder.open_folder(place, PROTOCOL)
        assert [(file.name, file.read_text()) for file in place.iterdir()] == [(name, "precious")]
