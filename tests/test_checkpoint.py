"""Checkpoints: complete or not there at all, checked before they are trusted."""
import json
import os
import shutil

import pytest
import torch

from small_policy import tiny_policy
from parts import checkpoint, files
from parts.config import Config
from parts.policy import loss_scale
from parts.run import make_optimizer


class OneWeight(torch.nn.Module):
    """Stands in for the PEFT model; saving is PEFT's business."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))
        self.loss_scale = loss_scale("float32", "cpu")

    def save_pretrained(self, folder, save_embedding_layers):
        assert not save_embedding_layers
        (folder / "adapter_model.safetensors").write_bytes(self.w.detach().numpy().tobytes())


def save(folder, steps, keep=3):
    policy = OneWeight()
    optimizer, schedule = make_optimizer(policy, Config(lr=0.1))
    for step in steps:
        policy.w.grad = torch.ones(3)
        optimizer.step()
        state = dict(step=step, cursor=step * 8)
        checkpoint.save(folder, policy, optimizer, schedule, state, keep)


def names(folder):
    return [path.name for path in checkpoint.complete(folder)]


def test_newest_sound_one_is_used_and_old_ones_go(tmp_path):
    assert checkpoint.newest_sound(tmp_path) is None
    save(tmp_path, [2, 4, 6, 8], keep=2)
    assert names(tmp_path) == ["step-000006", "step-000008"]
    newest = checkpoint.newest_sound(tmp_path)
    assert newest.name == "step-000008" and checkpoint.step_of(newest) == 8
    assert json.loads((newest / "state.json").read_text()) == dict(step=8, cursor=64)
    assert not list(tmp_path.glob("checkpoints/.*"))


# ------------------------------------------------------------------------------ damage
def flipped(data):
    data = bytearray(data)
    data[len(data) // 2] ^= 1
    return data


HARM = dict(flip=flipped, cut=lambda data: data[:-7], longer=lambda data: data + b"x")
NO_MANIFEST = ["{}", "[]", "null", "[" * 100_000, "", '{"state.json": [2, "0"]}',
               "a name less"]


@pytest.mark.parametrize("name", [*checkpoint.FILES, "manifest.json"])
@pytest.mark.parametrize("harm", [*HARM, "remove"])
def test_a_damaged_one_is_reported_and_the_one_before_is_used(tmp_path, capsys, harm, name):
    save(tmp_path, [2, 4])
    file = tmp_path / "checkpoints/step-000004" / name
    if harm == "remove":
        file.unlink()
    else:
        file.write_bytes(HARM[harm](file.read_bytes()))
    assert checkpoint.newest_sound(tmp_path).name == "step-000002"
    assert "step-000004 is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("manifest", NO_MANIFEST)
def test_a_manifest_that_vouches_for_nothing_is_damage(tmp_path, manifest):
    save(tmp_path, [2, 4])
    file = tmp_path / "checkpoints/step-000004/manifest.json"
    if manifest == "a name less":
        whole = json.loads(file.read_text())
        assert set(whole) == set(checkpoint.FILES) and not checkpoint.damage(file.parent)
        manifest = json.dumps({name: whole[name] for name in whole if name != "state.json"})
    file.write_text(manifest)
    assert checkpoint.newest_sound(tmp_path).name == "step-000002"


def test_damage_is_seen_far_behind_in_a_large_file(tmp_path):
    data = bytearray(os.urandom(100_000))
    (tmp_path / "weights").write_bytes(data)
    files.seal(tmp_path)
    assert not files.damage(tmp_path, ("weights",))
    data[70_000] ^= 1
    (tmp_path / "weights").write_bytes(data)
    assert "weights" in files.damage(tmp_path, ("weights",))


def test_a_damaged_one_of_the_same_step_is_written_again(tmp_path):
    save(tmp_path, [2, 4])
    state = tmp_path / "checkpoints/step-000004/state.json"
    sound = state.read_text()
    state.write_text("{}")
    save(tmp_path, [4])
    assert checkpoint.newest_sound(tmp_path).name == "step-000004" and state.read_text() == sound


def test_a_damaged_later_one_does_not_take_the_place_of_a_sound_one(tmp_path):
    """As after a resume: step 6 was damaged, so the run went on from step 4."""
    save(tmp_path, [2, 4, 6])
    (tmp_path / "checkpoints/step-000006/state.json").write_text("{}")
    save(tmp_path, [5], keep=2)
    assert names(tmp_path) == ["step-000004", "step-000005"]


# ------------------------------------------------------------------ what is a checkpoint
def test_only_what_save_has_named_is_a_checkpoint(tmp_path):
    """A user's own copies and notes are neither counted nor removed, nor do they stop a save."""
    save(tmp_path, [2, 4])
    place = tmp_path / "checkpoints"
    for copy in ("step-000009-best", "step-best", "step-9", "xstep-000009", "step-000009.old"):
        shutil.copytree(place / "step-000004", place / copy)
    (place / "step-notes.txt").write_text("the best so far")
    (place / "step-000007").write_text("a file")
    before = {path.name for path in place.iterdir()}
    assert names(tmp_path) == ["step-000002", "step-000004"]
    assert checkpoint.newest_sound(tmp_path).name == "step-000004"
    save(tmp_path, [5], keep=1)
    after = {path.name for path in place.iterdir()}
    assert after == before - {"step-000002", "step-000004"} | {"step-000005"}


@pytest.mark.parametrize("how", ["damaged", "only a copy", "a link to nowhere"])
def test_a_run_with_nothing_sound_is_not_silently_started_anew(tmp_path, how):
    save(tmp_path, [4])
    saved = tmp_path / "checkpoints/step-000004"
    if how == "damaged":
        (saved / "state.json").write_text("{}")
    else:
        saved.rename(saved.with_name("step-000004-best"))
    if how == "a link to nowhere":
        saved.symlink_to(tmp_path / "a disk that is not there")
    with pytest.raises(SystemExit, match="No checkpoint in .* can be used"):
        checkpoint.newest_sound(tmp_path)


def test_checkpoints_that_were_moved_to_another_disk_are_followed(tmp_path):
    save(tmp_path, [2, 4])
    for path in checkpoint.complete(tmp_path):
        moved = tmp_path / path.name
        path.rename(moved)
        path.symlink_to(moved)
    assert checkpoint.newest_sound(tmp_path).name == "step-000004"
    save(tmp_path, [6], keep=1)
    assert names(tmp_path) == ["step-000006"]
    assert (tmp_path / "step-000004/state.json").exists()  # the link is removed, not its target


def test_a_copy_under_a_later_number_is_not_the_newest(tmp_path, capsys):
    save(tmp_path, [2, 4])
    place = tmp_path / "checkpoints"
    shutil.copytree(place / "step-000002", place / "step-999999")
    assert checkpoint.newest_sound(tmp_path).name == "step-000004"
    assert "step-999999 is damaged (it is a copy of step 2)" in capsys.readouterr().out


def test_checkpoints_are_ordered_by_number(tmp_path):
    """As names, a million would come before the step before it."""
    save(tmp_path, [999_999, 1_000_000], keep=2)
    assert names(tmp_path) == ["step-999999", "step-1000000"]
    assert checkpoint.newest_sound(tmp_path).name == "step-1000000"


# ------------------------------------------------------------------ a crash, a full disk
def test_a_crash_inside_the_write_leaves_the_old_one(tmp_path, monkeypatch):
    save(tmp_path, [2])

    def dies(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "flush", dies)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, [4])
    monkeypatch.undo()
    assert checkpoint.newest_sound(tmp_path).name == "step-000002"
    left = tmp_path / "checkpoints/.step-000003.writing"  # by a kill
    left.mkdir()
    (left / "optimizer.pt").write_text("half")
    save(tmp_path, [4])
    assert checkpoint.newest_sound(tmp_path).name == "step-000004" and not left.exists()


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(tmp_path, disk):
    """Else a power cut could leave a checkpoint's name and files without content."""
    save(tmp_path, [2])
    final = tmp_path / "checkpoints/step-000002"
    writing = final.with_name(".step-000002.writing")
    named = disk.index(("rename", final))
    assert {path for _, path in disk[:named]} == {
        writing, *(writing / name for name in (*checkpoint.FILES, "manifest.json"))}
    assert ("flush", final.parent) in disk[named:]


# ------------------------------------------------------------------------------ taken up again
def taught(config: Config, steps: int):
    policy = tiny_policy()
    optimizer, schedule = make_optimizer(policy, config)
    for _ in range(steps):
        learn(policy, optimizer, schedule)
    return policy, optimizer, schedule


def learn(policy, optimizer, schedule) -> None:
    for i, p in enumerate(p for p in policy.parameters() if p.requires_grad):
        p.grad = torch.full_like(p, 0.1 + i)
    optimizer.step()
    schedule.step()


def test_what_is_restored_goes_on_as_if_it_had_never_stopped(tmp_path):
    config = Config(lr=0.1, warmup_steps=4)
    one, other = taught(config, 2), taught(config, 0)
    for (policy, *_), scale in ((one, 8.0), (other, 2.0)):  # as float16 has one
        policy.loss_scale = torch.amp.GradScaler("cpu", init_scale=scale)
    saved = checkpoint.save(tmp_path, *one, dict(step=2, cursor=5), keep=1)
    assert checkpoint.restore(saved, *other) == dict(step=2, cursor=5)
    assert other[0].loss_scale.get_scale() == 8
    for _ in range(3):
        learn(*one)
        learn(*other)
        assert one[1].param_groups[0]["lr"] == other[1].param_groups[0]["lr"]
    for a, b in zip(one[0].parameters(), other[0].parameters()):
        assert torch.equal(a, b)


def test_the_learning_rate_is_that_of_the_new_start(tmp_path):
    one = taught(Config(lr=0.1, warmup_steps=4), 2)
    saved = checkpoint.save(tmp_path, *one, dict(step=2), keep=1)
    policy, optimizer, schedule = taught(Config(lr=0.01, warmup_steps=4), 0)
    checkpoint.restore(saved, policy, optimizer, schedule)
    group = optimizer.param_groups[0]
    assert group["initial_lr"] == 0.01
    assert group["lr"] == pytest.approx(0.01 * 3 / 4)  # two steps are done: the third of four
    learn(policy, optimizer, schedule)
    assert group["lr"] == pytest.approx(0.01)


def test_a_run_of_a_gpu_can_be_read_where_there_is_none(tmp_path, monkeypatch):
    """Its optimizer holds tensors of the GPU; to the CPU first, and the optimizer moves them on."""
    policy, optimizer, schedule = learning = taught(Config(lr=0.1), 3)
    saved = checkpoint.save(tmp_path, *learning, dict(step=2), keep=1)
    real, places = torch.load, []
    monkeypatch.setattr(torch, "load",
                        lambda *a, **k: (places.append(k.get("map_location")), real(*a, **k))[1])
    checkpoint.restore(saved, *learning)
    assert places == ["cpu"]
