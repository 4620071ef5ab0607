"""A run's logs: whatever a model writes can be logged, and read back after a crash."""
import json
import math

import pytest

from parts import logs

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"  # sets a terminal's title, clears it, colours it


def test_logs_are_cut_back_to_the_checkpoint(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert logs.cut_back(log, 3) == []  # nothing there yet
    for step in (1, 2, 3, 3, 4):
        logs.append(log, dict(step=step, loss=math.nan, text="ü"))
    log.write_text(log.read_text() + '{"step": 5, "lo')
    wanted = [dict(step=step, loss=None, text="ü") for step in (1, 2, 3, 3)]
    assert logs.cut_back(log, 3) == wanted
    assert [json.loads(line) for line in log.read_text().splitlines()] == wanted


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_becomes_null(tmp_path, value):
    row = dict(step=1, loss=value, zero=0.0, count=3, text="inf", none=None)
    logs.append(tmp_path / "log", row)
    assert json.loads((tmp_path / "log").read_text(), parse_constant=pytest.fail) == dict(
        step=1, loss=None, zero=0.0, count=3, text="inf", none=None)


@pytest.mark.parametrize("text", ["\u2028\x85", "ü" * 9, ESCAPE, "\ud800", "\x00", "a\nb\r"])
def test_any_completion_can_be_logged_and_read_back(tmp_path, text):
    log = tmp_path / "samples.jsonl"
    logs.append(log, dict(step=1, completion=text))
    logs.append(log, dict(step=2, completion=text))
    log.write_bytes(log.read_bytes()[:-7])
    assert logs.cut_back(log, 5) == [dict(step=1, completion=text)]
    assert all(32 <= byte < 127 or byte == 10 for byte in log.read_bytes())  # `cat` does no harm


@pytest.mark.parametrize("line", [
    "[" * 100_000, '{"step": ' + "[" * 100_000, "[]", "7", "null", '"x"', "{}", '{"step": "2"}',
    '{"step": null}', '{"step": NaN}', "\x00", "{", ""])
def test_a_strange_line_is_dropped_and_the_others_stay(tmp_path, line):
    log = tmp_path / "log.jsonl"
    log.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    assert logs.cut_back(log, 2) == [dict(step=1), dict(step=2)]
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_bytes_that_are_no_text_do_not_stop_the_resumption(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"step": 1}\n\xff\xfe\n{"step": 2}\n')
    assert logs.cut_back(log, 2) == [dict(step=1), dict(step=2)]
