"""Checkpoints: complete or not there at all, checked before they are trusted."""
import json
import math

import pytest
import torch

from parts import checkpoint
from parts.config import Config
from parts.run import learner


class OneWeight(torch.nn.Module):
    """Stands in for the PEFT model; saving is PEFT's business."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def save_pretrained(self, folder, save_embedding_layers):
        (folder / "adapter_model.safetensors").write_bytes(self.w.detach().numpy().tobytes())


def save(folder, steps, keep=3):
    policy = OneWeight()
    optimizer, schedule = learner(policy, Config(lr=0.1))
    for step in steps:
        policy.w.grad = torch.ones(3)
        optimizer.step()
        checkpoint.save(folder, policy, optimizer, schedule, dict(step=step, cursor=step * 8), keep)


def test_newest_sound_one_is_used_and_old_ones_go(tmp_path):
    assert checkpoint.newest_sound(tmp_path) is None
    save(tmp_path, [2, 4, 6, 8], keep=2)
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-000006", "step-000008"]
    assert checkpoint.newest_sound(tmp_path).name == "step-000008"
    assert json.loads((tmp_path / "checkpoints/step-000008/state.json").read_text()) == dict(step=8, cursor=64)


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "no manifest"])
def test_a_damaged_one_is_reported_and_the_one_before_is_used(tmp_path, capsys, harm):
    save(tmp_path, [2, 4])
    file = tmp_path / "checkpoints/step-000004" / ("manifest.json" if harm == "no manifest" else "optimizer.pt")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    dict(flip=lambda: file.write_bytes(data), cut=lambda: file.write_bytes(data[:-7])).get(harm, file.unlink)()
    assert checkpoint.newest_sound(tmp_path).name == "step-000002"
    out = capsys.readouterr().out
    assert "step-000004 is damaged" in out and file.name in out


def test_all_damaged_is_not_silently_a_new_start(tmp_path):
    save(tmp_path, [2])
    (tmp_path / "checkpoints/step-000002/state.json").write_text("{}")
    with pytest.raises(SystemExit, match="are damaged"):
        checkpoint.newest_sound(tmp_path)


def test_a_crash_inside_the_write_leaves_the_old_one(tmp_path, monkeypatch):
    save(tmp_path, [2])

    def dies(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "flush", dies)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, [4])
    monkeypatch.undo()
    assert checkpoint.newest_sound(tmp_path).name == "step-000002"
    save(tmp_path, [4])  # and the remains are in nobody's way
    assert checkpoint.newest_sound(tmp_path).name == "step-000004"


def test_a_full_disk_is_one_sentence_and_the_old_one_is_intact(tmp_path, monkeypatch):
    save(tmp_path, [2])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit, match="No space left.*intact.*--resume"):
        save(tmp_path, [4])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    assert checkpoint.newest_sound(tmp_path).name == "step-000002"


def test_logs_are_cut_back_to_the_checkpoint(tmp_path):
    log = tmp_path / "metrics.jsonl"
    checkpoint.cut_back(log, 3)  # nothing there yet
    for step in (1, 2, 3, 3, 4):
        checkpoint.append(log, dict(step=step, loss=math.nan, text="ü"))
    log.write_text(log.read_text() + '{"step": 5, "lo')
    checkpoint.cut_back(log, 3)
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        dict(step=step, loss=None, text="ü") for step in (1, 2, 3, 3)]
