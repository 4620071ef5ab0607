"""Trackers are sent each row of the logs once, whatever happens; the run never suffers for it."""
import itertools
import json
import sqlite3
import sys

import pytest

from helpers import run_program
from parts import run as running
from parts import held_out, track
from parts.files import append
from test_run import group, metrics_of, run, sample  # noqa: F401  (run is a fixture)


def log_step(folder, step, loss=0.5):
    """What training writes at a step, in the order in which it does."""
    append(folder / "metrics.jsonl", dict(
        step=step, loss=loss + step, bad=float("nan"), rounds_histogram=[3, 4],
        verdicts=dict(correct=7)))


def log_evaluation(folder, step):
    append(folder / "eval.jsonl", {"step": step, "avg": 0.25, "data": "builtin", "pass": {"8": .5}})


def as_sent(step, evaluated=False):
    sent = {"train/loss": 0.5 + step, "train/verdicts/correct": 7,
            "train/rounds_histogram/1": 3, "train/rounds_histogram/2": 4}
    return sent | ({"held_out/avg": 0.25, "held_out/pass/8": 0.5} if evaluated else {})


class Memory:
    """A tracker that remembers, and fails while it is told to."""

    broken = False

    def __init__(self, folder, name, known):
        self.name, self.rows, self.closed = name, [], False

    def log(self, numbers, step):
        if self.broken:
            raise OSError(28, "No space left on device")
        self.rows.append((step, numbers))

    def finish(self):
        self.closed = True


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setitem(track.TRACKERS, "memory", Memory)


# ------------------------------------------------------------------------------ the real trackers
def trackio_rows(place, folder):
    found = {}
    with sqlite3.connect(place / "trackio" / "minirl.db") as db:
        for step, text in db.execute("select step, metrics from metrics order by id"):
            row = json.loads(text)
            assert not found.get(step, {}).keys() & row.keys(), f"step {step} twice"
            found.setdefault(step, {}).update(row)
        assert db.execute("select count(distinct run_name) from metrics").fetchone() == (1,)
    return found


def tensorboard_rows(place, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tracker"), size_guidance=dict(scalars=0, tensors=0))
    events.Reload()
    found = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in found.get(event.step, {}), f"step {event.step} twice"
            found.setdefault(event.step, {})[name] = event.value
    settings = events.Tensors("settings/text_summary")[0]
    assert b'"lr": 0.5' in settings.tensor_proto.string_val[0]
    return found


READERS = dict(trackio=trackio_rows, tensorboard=tensorboard_rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
def test_a_real_tracker_gets_each_step_once_also_when_a_run_is_resumed(tmp_path, kind):
    """Killed after step 3, resumed after the checkpoint of step 1: 2 and 3 are done again."""
    folder = begun(tmp_path, kind)
    log_evaluation(folder, 0)
    for step in (1, 2, 3):
        log_step(folder, step)
    send(tmp_path, folder, kind)
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text().split("\n")[0] + "\n")
    log_step(folder, 2, loss=99)
    for step in (3, 4):
        log_step(folder, step)
    log_evaluation(folder, 4)
    send(tmp_path, folder, kind)
    wanted = {step: as_sent(step) for step in (1, 2, 3)} | {4: as_sent(4, evaluated=True)}
    wanted[0] = {key: value for key, value in as_sent(4, True).items() if "held_out" in key}
    assert READERS[kind](tmp_path, folder) == wanted


@pytest.mark.slow
def test_wandb_goes_on_in_the_same_run(tmp_path):
    """Its calls are those of trackio; what it writes only itself can read."""
    folder = begun(tmp_path, "wandb")
    for step in (1, 2):
        log_step(folder, step)
        send(tmp_path, folder, "wandb")
    places = sorted(folder.glob("tracker/wandb/offline-run-*"))
    assert len(places) == 2 and len({place.name.split("-", 3)[3] for place in places}) == 1
    for place in places:
        (file,) = place.glob("*.wandb")
        assert b"train/loss" in file.read_bytes()


def begun(place, kind):
    """The folder of a run, for a tracker that is installed."""
    pytest.importorskip(kind, reason=f"{kind} is not installed: make extras")
    folder = place / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"config": {"lr": 0.5, "name": "mine"}, "starts": []}')
    return folder


def send(place, folder, kind):
    """As a user does it, without a network and without a login."""
    mine = dict(TRACKIO_DIR=place / "trackio", WANDB_MODE="offline", HOME=place)
    done = run_program("parts.track", folder, kind, env=mine)
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout


@pytest.mark.parametrize("kind", track.TRACKERS)
def test_a_tracker_that_does_not_start_is_one_sentence(tmp_path, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SystemExit, match=f"{kind} did not start .*pip install {kind}.*leave --rep"):
        track.Tracker(tmp_path, kind, {})


# ------------------------------------------------------------------------------ when it goes wrong
def test_a_tracker_that_fails_costs_one_warning_and_no_row(tmp_path, memory, capsys, monkeypatch):
    tracker = track.Tracker(tmp_path, "memory", {})
    for step in range(1, 7):
        monkeypatch.setattr(Memory, "broken", step in (2, 3, 5))
        log_step(tmp_path, step)
        tracker.send()
    assert tracker.tracker.rows == [(step, as_sent(step)) for step in range(1, 7)]
    out = capsys.readouterr().out
    assert tracker.failed and out.count("WARNING") == 1 and "No space left" in out
    tracker.close()
    assert tracker.tracker.closed and capsys.readouterr().out == ""


def test_what_never_arrived_is_said_at_the_end_and_can_be_sent_later(tmp_path, memory, capsys,
                                                                     monkeypatch):
    tracker = track.Tracker(tmp_path, "memory", {})
    log_step(tmp_path, 1)
    tracker.send()
    monkeypatch.setattr(Memory, "broken", True)
    log_step(tmp_path, 2)
    tracker.send()
    tracker.close()
    assert f"did not reach memory: send them with `python -m parts.track {tmp_path}" in (
        capsys.readouterr().out)
    monkeypatch.setattr(Memory, "broken", False)
    again = track.Tracker(tmp_path, "memory", {})
    again.send()
    assert [step for step, _ in again.tracker.rows] == [2]
    assert again.tracker.name == tracker.tracker.name


@pytest.mark.parametrize("fails_at", [1, 2])
def test_several_held_out_sets_do_not_overwrite_each_other(tmp_path, memory, fails_at):
    """Nor is one lost where the tracker fails among them."""
    tracker, calls = track.Tracker(tmp_path, "memory", {}), itertools.count(1)
    real = tracker.tracker.log

    def fails_once(numbers, step):
        if next(calls) == fails_at:
            raise OSError(28, "No space left on device")
        real(numbers, step)

    tracker.tracker.log = fails_once
    for step, sets in ((0, ["easy", "hard"]), (20, ["builtin"])):
        append(tmp_path / "eval.jsonl", *(
            dict(step=step, data=name, avg=i / 4) for i, name in enumerate(sets)))
        tracker.send()
    tracker.send()
    found = {}
    for step, numbers in tracker.tracker.rows:
        found.setdefault(step, {}).update(numbers)
    assert found == {
        0: {"held_out/easy/avg": 0, "held_out/hard/avg": 0.25}, 20: {"held_out/avg": 0}}


def test_an_evaluation_is_sent_although_its_step_was_sent_before(tmp_path, memory):
    """It follows the step, whose numbers are on their way by then."""
    tracker = track.Tracker(tmp_path, "memory", {})
    for log in (log_step, log_evaluation):
        log(tmp_path, 1)
        tracker.send()
    sent = as_sent(1, evaluated=True)
    assert [step for step, _ in tracker.tracker.rows] == [1, 1]
    assert tracker.tracker.rows[0][1] | tracker.tracker.rows[1][1] == sent


def test_half_a_line_waits_for_its_other_half(tmp_path, memory):
    tracker, log = track.Tracker(tmp_path, "memory", {}), tmp_path / "metrics.jsonl"
    for step in (1, 2):
        log_step(tmp_path, step)
    whole, steps = log.read_bytes(), []
    for end in (len(whole) // 2 - 2, len(whole) - 5, len(whole)):
        log.write_bytes(whole[:end])
        tracker.send()
        steps.append([step for step, _ in tracker.tracker.rows])
    assert steps == [[], [1], [1, 2]]


def test_damaged_lines_stop_nothing_and_what_is_no_number_is_not_sent(tmp_path, memory):
    tracker = track.Tracker(tmp_path, "memory", {})
    log_step(tmp_path, 1)
    damage = '{"step": 2, "lo\n[]\n{"step": "2"}\n' + "[" * 10**5 + "\n"
    for log in track.LOGS:
        (tmp_path / log).open("a").write(damage)
    append(tmp_path / "metrics.jsonl", dict(step=2, loss=10**400, grad_norm="high", lr=None))
    log_step(tmp_path, 3)
    tracker.send()
    sent = dict(tracker.tracker.rows)
    assert not tracker.failed and sorted(sent) == [1, 2, 3] and sent[2] == {}


def test_two_runs_of_one_name_are_two_in_the_tracker(tmp_path, memory):
    names = {track.Tracker(tmp_path / place / "demo", "memory", {}).tracker.name for place in "ab"}
    assert len(names) == 2 and all(name.startswith("demo-") for name in names)


# ------------------------------------------------------------------------------ in a run
def test_a_run_sends_its_steps_and_evaluations_and_closes(run, memory):  # noqa: F811
    run.tracker = track.open_tracker(run.folder, "memory", {})
    held_out.record_evaluation(dict(builtin=dict(avg=0.5, ci_low=0.4, ci_high=0.6, k=8)), run)
    running.record(1, [group("one", [(sample("a"), 1.0)], [])], metrics_of(), run)
    sent = run.tracker.tracker.rows
    assert [step for step, _ in sent] == [0, 1]
    assert sent[0][1]["held_out/avg"] == 0.5 and sent[1][1]["train/samples"] == 8
    with pytest.raises(SystemExit):  # not all steps are done
        running.finish(run)
    assert run.tracker.tracker.closed
    assert track.open_tracker(run.folder, "none", {}) is None
