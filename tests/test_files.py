"""Files: what is written survives a crash; whatever a model writes can be logged and read back."""
import json
import math
import os

import pytest

from parts import files


def cut_back(log, step):
    files.keep_rows(log, lambda row: files.has_step(row) and row["step"] <= step)


ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"  # sets a terminal's title, clears it, colours it


def test_logs_are_cut_back_to_the_checkpoint(tmp_path):
    log = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3, 3, 4):
        files.append(log, dict(step=step, loss=math.nan, text="ü"))
    log.write_text(log.read_text() + '{"step": 5, "lo')
    wanted = [dict(step=step, loss=None, text="ü") for step in (1, 2, 3, 3)]
    cut_back(log, 3)
    assert list(files.read_rows(log)) == wanted
    assert [json.loads(line) for line in log.read_text().splitlines()] == wanted


def test_one_is_no_plural():
    assert [files.counted(count, "gold") for count in (0, 1, 2)] == ["0 golds", "1 gold", "2 golds"]


def test_what_json_has_no_number_for_becomes_null(tmp_path):
    row = dict(a=math.nan, b=math.inf, c=-math.inf, zero=0.0, count=3, text="inf", none=None)
    files.append(tmp_path / "log", row)
    assert json.loads((tmp_path / "log").read_text(), parse_constant=pytest.fail) == row | dict(
        a=None, b=None, c=None)


@pytest.mark.parametrize("text", ["\u2028\x85", "ü" * 9, ESCAPE, "\ud800", "\x00", "a\nb\r"])
def test_any_completion_can_be_logged_and_read_back(tmp_path, text):
    log = tmp_path / "groups.jsonl"
    files.append(log, dict(step=1, completion=text))
    files.append(log, dict(step=2, completion=text))
    log.write_bytes(log.read_bytes()[:-7])
    cut_back(log, 5)
    assert list(files.read_rows(log)) == [dict(step=1, completion=text)]
    assert len(log.read_bytes().splitlines()) == 1
    assert all(32 <= byte < 127 or byte == 10 for byte in log.read_bytes())  # `cat` does no harm


@pytest.mark.parametrize("line", [
    b'{"step": ' + b"[" * 100_000, b"[]", b"null", b"{}", b'{"step": "2"}', b'{"step": NaN}', b"{",
    b"", b"\xff\xfe"])
def test_a_strange_line_is_dropped_and_the_others_stay(tmp_path, line):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    cut_back(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_small_file_is_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, disk):
    file = tmp_path / "config.json"
    files.write_safely(file, "new")
    assert disk == [
        ("flush", tmp_path / ".config.json.writing"), ("rename", file), ("flush", tmp_path)]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("link", [True, False])
def test_what_a_crash_has_left_is_in_nobodys_way(tmp_path, link):
    """Nothing is written through a link, either: a run's folder may come from elsewhere."""
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("gold")
    folder.mkdir()
    for name in (".config.json.writing", ".metrics.jsonl.writing"):
        if link:
            (folder / name).symlink_to(precious)
        else:
            (folder / name).write_text("half a file of a crash, longer than the new one")
    files.write_safely(folder / "config.json", "new")
    cut_back(folder / "metrics.jsonl", 1)
    assert precious.read_text() == "gold" and (folder / "config.json").read_text() == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl"]


def test_a_crash_while_a_small_file_is_replaced_leaves_the_old_text(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text("old")

    def dies(*_):
        raise KeyboardInterrupt

    for moment in ((files, "flush"), (os, "replace")):
        monkeypatch.setattr(*moment, dies)
        with pytest.raises(KeyboardInterrupt):
            files.write_safely(file, "new")
        monkeypatch.undo()
        assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
