"""Folders: a crash leaves no incomplete file, and every start is recorded."""
import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from helpers import lines
from models_small import one_layer
from parts import files, run_folder
from parts.config import Config, parse
from parts.policy import make_optimizer
from world import settle_flags, settled

ABC = dict(data="2 questions, abc")


@pytest.mark.parametrize("flags", [
    "--name mine --batch-prompts 7 --steps 30 --objective cispo --sampler uniform",
    "--name mine --model SmolLM2-135M-Instruct --rollout-dtype fp8"])
def test_a_name_is_enough_to_resume_and_the_settings_are_those_of_the_last_start(
        tmp_path, monkeypatch, flags):
    """Also where a flag, or a model's name, stands for several settings."""
    monkeypatch.chdir(tmp_path)
    first = settle_flags(parse(flags.split()))
    named = ["--resume", "--name", "mine"]
    run = Path("runs", first.name)
    with run_folder.claim(run, resume=False):
        run_folder.note_start(run, asdict(first), [], [], data=ABC)
    (run / "checkpoints/step-000001").mkdir(parents=True)
    assert settle_flags(parse([*flags.split(), "--resume"])) == replace(first, resume=True)
    again = settle_flags(parse([*named, "--lr", "0.5"]))
    assert again == replace(first, resume=True, lr=0.5)
    run_folder.note_start(run, asdict(again), [], [], data=ABC)
    assert settle_flags(parse(named)) == again


def test_a_run_goes_on_only_with_the_data_and_the_files_that_it_had(tmp_path):
    """Whoever resumes it names its files, because the folder may come from somebody else."""
    reward, template = tmp_path / "r.py", tmp_path / "t.jinja"
    for file in (reward, template):
        file.write_text("abc")
    config = asdict(settled(reward=f"{reward}:score", template=str(template)))
    for _ in range(2):
        run_folder.note_start(tmp_path, config, [], [], data="2 questions, abc")
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(SystemExit) as ended:
        run_folder.note_start(tmp_path, config, [], [], data="2 questions, abd")
    assert str(ended.value) == (
        f"{tmp_path} was started with other contents of data (2 questions, abc; now 2 questions, "
        "abd): put them back, or start a new run.")
    for name, file in dict(reward=reward, template=template).items():
        file.write_text("abd")
        with pytest.raises(SystemExit, match=f"started with other contents of {name} "):
            run_folder.note_start(tmp_path, config, [], [], data="2 questions, abc")
        file.write_text("abc")
    assert (tmp_path / "config.json").read_bytes() == before
    stored, digest = json.loads(before), sha256(b"abc").hexdigest()
    for start in (starts := stored.pop("starts")):
        assert datetime.fromisoformat(start["time"]).utcoffset() == timedelta(0)
        assert {name.removesuffix("-cpu") for name in start["versions"]} == {
            "python", "torch", "transformers", "peft", "vllm", "math-verify"}
        assert start["versions"]["torch"] == torch.__version__
    assert len(starts) == 2 and stored == dict(
        config=config, data="2 questions, abc", reward=digest, template=digest)


def test_a_run_without_a_checkpoint_starts_again_and_without_resume_with_any_settings(
        tmp_path, monkeypatch, capsys):
    """Such as one that was short of memory, and was told to lower --max-tokens."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    run_folder.note_start(run, asdict(settled(name="mine", batch_prompts=7)), [], [], data=ABC)
    for name in run_folder.LOGS:  # killed between the log of its first step and the checkpoint
        (run / name).write_text('{"step": 1}\n')
    assert parse(["--name", "mine", "--resume"]).batch_prompts == 7  # never another run
    with pytest.raises(SystemExit):
        parse(["--name", "mine", "--resume", "--max-tokens", "32"])
    assert "was started with --max-tokens" in capsys.readouterr().err
    again = parse(["--name", "mine", "--max-tokens", "32"])
    assert (again.max_tokens, again.batch_prompts) == (32, None)
    (run / "curves.png").touch()  # drawn at the evaluation before the first step
    (run / "explore.html").touch()  # a user's
    for _ in range(2):  # also if this start is killed at once
        run_folder.claim(run, resume=False).close()
        assert {path.name for path in run.rglob("*")} == {".lock", "problems.json", "explore.html"}


def test_a_folder_has_one_writer_and_a_killed_first_start_is_in_nobodys_way(
        tmp_path, monkeypatch, capsys):
    """A disk that has no locks, as Lustre, gets a warning."""
    (tmp_path / ".problems.json.writing").write_text("{")
    held = run_folder.claim(tmp_path, resume=False)
    with pytest.raises(SystemExit, match="Another program is writing to"):
        run_folder.claim(tmp_path, resume=True)
    held.close()
    run_folder.claim(tmp_path, resume=True).close()
    monkeypatch.setattr("fcntl.flock", lambda *_: os.close(-1))  # an OSError
    run_folder.claim(tmp_path, resume=False).close()
    assert capsys.readouterr().out == (
        f"no checkpoint in {tmp_path}: this starts at step 1\nthe disk of {tmp_path} cannot lock "
        "files, so do not start a second program that writes to this folder\n")


# ------------------------------------------------------------------------------ files and logs
@given(st.text(), st.binary() | st.just(b"\0" * 9), st.integers(0))
def test_whatever_is_written_can_be_read_and_any_other_bytes_are_dropped(text, strange, cut):
    """Any text that a model may write; a crash that cuts the last line; anything in between."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place, "log.jsonl")
        files.append(log, dict(step=1, text=text, nan=math.nan, low=-math.inf, zero=0.0))
        whole, strange = log.read_bytes(), b"{{" + strange.replace(b"\n", b"")
        assert all(32 <= byte < 127 for byte in whole[:-1])  # `cat` does no harm
        Path(place, ".log.jsonl.writing").write_text("half a file of a crash")
        log.write_bytes(whole + strange + b"\n" + whole + whole[:cut % (len(whole) - 1)])
        files.keep_rows(log)
        wanted = [dict(step=1, text=text, nan=None, low=None, zero=0.0)] * 2
        assert wanted == list(files.read_rows(log)) == lines(log)
        assert os.listdir(place) == ["log.jsonl"]


# ------------------------------------------------------------------------------ checkpoints
@pytest.fixture(scope="module")
def learning():
    return taught(settled(lr=0.1), 1)


def run_in(folder, learning, cursor=5, counts={"a": [8.0, 2.0]}, **state):
    """What `save` and `restore` see of a run."""
    policy, optimizer, schedule = learning
    return SimpleNamespace(
        folder=folder, policy=policy, optimizer=optimizer, schedule=schedule, state=state,
        config=SimpleNamespace(steps=9), stream=SimpleNamespace(cursor=cursor),
        estimator=SimpleNamespace(counts=counts))


def save(folder, steps, learning, keep_every=0):
    for step in steps:
        run_folder.save(run_in(folder, learning, step=step), keep_every)


def names(folder):
    return [path.name for path in run_folder.checkpoints(folder)]


def test_the_newest_two_stay_and_for_good_every_so_many_th(tmp_path, learning):
    save(tmp_path / "a", range(1, 8), learning)
    assert names(tmp_path / "a") == ["step-000006", "step-000007"]
    assert json.loads((tmp_path / "a/checkpoints/step-000007/state.json").read_text())["step"] == 7
    save(tmp_path / "b", range(1, 8), learning, keep_every=3)
    assert names(tmp_path / "b") == ["step-000003", "step-000006", "step-000007"]
    save(tmp_path / "b", range(20, 22), learning, keep_every=7)  # another at a later start
    assert names(tmp_path / "b") == ["step-000003", "step-000007", "step-000020", "step-000021"]
    save(tmp_path / "c", range(999_998, 1_000_001), learning)
    assert names(tmp_path / "c") == ["step-999999", "step-1000000"]  # by number, not as names
    assert "everything up to step 1000000 is saved" in run_folder.saved_so_far(tmp_path / "c")
    assert not list(tmp_path.glob("*/checkpoints/.*"))


def test_only_what_save_has_named_is_a_checkpoint(tmp_path, learning):
    """A user's copies and notes are neither counted nor removed. A link to another disk counts."""
    save(tmp_path, [2, 4], learning)
    place = tmp_path / "checkpoints"
    for copy in ("step-000009-best", "step-best", "step-9"):
        shutil.copytree(place / "step-000004", place / copy)
    (place / "step-000007").write_text("a file")
    (place / "step-000002").rename(tmp_path / "moved")
    (place / "step-000002").symlink_to(tmp_path / "moved")
    before = {path.name for path in place.iterdir()}
    assert names(tmp_path) == ["step-000002", "step-000004"]
    assert run_folder.find_adapter(str(tmp_path)) == str(place / "step-000004")
    with pytest.raises(SystemExit, match="checkpoints has no adapter_config.json: name a run"):
        run_folder.find_adapter(str(place))
    save(tmp_path, [5], learning)
    assert {path.name for path in place.iterdir()} == before - {"step-000002"} | {"step-000005"}
    assert (tmp_path / "moved/state.json").exists()  # the link is removed, not its target


# ------------------------------------------------------------------------------ taken up again
def taught(config: Config, steps: int):
    policy = one_layer()
    optimizer, schedule = make_optimizer(policy, config)
    for _ in range(steps):
        learn(policy, optimizer, schedule)
    return policy, optimizer, schedule


def learn(policy, optimizer, schedule) -> None:
    for i, p in enumerate(p for p in policy.parameters() if p.requires_grad):
        p.grad = torch.full_like(p, 0.1 + i)
    optimizer.step()
    schedule.step()


def test_what_is_restored_goes_on_as_if_it_had_never_stopped(tmp_path, capsys):
    """But with the learning rate of the new start."""
    one, other = (taught(settled(lr=lr, warmup_steps=4), steps) for lr, steps in (
        (0.1, 2), (0.01, 0)))
    for (policy, *_), scale in ((one, 8.0), (other, 2.0)):  # as float16 has one
        policy.loss_scale = torch.amp.GradScaler("cpu", init_scale=scale)
    saved = run_folder.save(run_in(tmp_path, one, step=2))
    assert len({file.stat().st_mode for file in saved.iterdir()}) == 1  # others may read all
    again = run_in(tmp_path, other, 0, {}, step=0, more=1)
    run_folder.restore(again)
    assert (again.state, again.stream.cursor) == (dict(step=2, more=1), 5)
    assert again.estimator.counts == {"a": [8.0, 2.0]}
    assert capsys.readouterr().out == "continuing after step 2 of 9\n"
    assert other[0].loss_scale.get_scale() == 8
    for a, b in zip(one[0].parameters(), other[0].parameters()):
        assert torch.equal(a, b)
    assert other[1].param_groups[0]["initial_lr"] == 0.01
    for rate in (0.01 * 3 / 4, 0.01):  # two of four steps of the warm-up are done
        assert other[1].param_groups[0]["lr"] == pytest.approx(rate)
        learn(*other)


@pytest.fixture(scope="module")
def saved(learning, tmp_path_factory):
    return run_folder.save(run_in(tmp_path_factory.mktemp("saved"), learning, step=2))


@pytest.mark.parametrize("error", [OSError, RuntimeError, SafetensorError])
def test_a_full_disk_costs_no_checkpoint(tmp_path, learning, monkeypatch, error):
    """Which is another error in each of three libraries."""
    save(tmp_path / "mine", [1], learning)
    monkeypatch.setattr(torch, "save", mock.Mock(side_effect=error("no space")))
    with pytest.raises(SystemExit, match="^Could not write .*/step-000002 .no space.: free some "
                       "space; everything .* 1 is saved: continue with --name mine --resume.$"):
        save(tmp_path / "mine", [2], learning)
    assert os.listdir(tmp_path / "mine/checkpoints") == ["step-000001"]


@pytest.mark.parametrize("spoil", [
    lambda weights: dict([*weights.items()][1:]),  # a layer is missing
    lambda weights: {name.replace("model.model.", "model."): w for name, w in weights.items()},
    lambda weights: weights | dict(other=torch.zeros(1)), lambda _: dict(other=torch.zeros(1))])
def test_a_run_does_not_go_on_with_an_adapter_of_other_layers(tmp_path, learning, saved, spoil):
    """PEFT would keep what it does not find, so the run would begin again without a word."""
    place = shutil.copytree(saved, tmp_path / "checkpoints" / saved.name)
    file = place / "adapter_model.safetensors"
    weights = load_file(file)
    save_file(spoil(weights), file)
    with pytest.raises(SystemExit, match="step-000002 is damaged .ValueError: its layers are not"):
        run_folder.restore(run_in(tmp_path, learning))
    save_file(weights, file)
    run_folder.restore(run_in(tmp_path, learning))
