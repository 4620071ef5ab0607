"""Logging, saving, resuming and ending around the loop, with a mock engine."""
import contextlib
import gc
import io
import json
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy
import pytest
import torch

from ada_sampler import Group
from eval import bootstrap
from models import make
from parts import folder as folders
from parts import provenance
from parts import run as running
from parts.config import Flags, parse_flags
from parts.data import Stream, count_trained, load_problems
from parts.run import Estimator, Run
from helpers import lines
from test_folder import taught
from world import Engine, known_model, settled, small_run


def begun(folder, config):
    """A run at the start of its process, with a mock engine; training and saving are real."""
    policy, optimizer, schedule = taught(config, 0)
    return Run(folder=folder, lock=None, config=config, engine=Engine(), policy=policy,
               optimizer=optimizer, schedule=schedule, grader=None, held_out=[], probe=None,
               stream=Stream(list(range(50)), seed=0), estimator=Estimator())


@pytest.fixture
def run(tmp_path, monkeypatch):
    made = begun(tmp_path, settled(name="mine", steps=30, lr=0.1, sampler="ada-est"))
    made.drawn = []
    monkeypatch.setattr(running, "draw_run", made.drawn.append)
    monkeypatch.setattr(running, "watch", lambda *_: "")
    return made


def rows(run, name):
    return lines(run.folder / name)


def groups(count):
    return [Group(i, SimpleNamespace(prompt=f"<{i}>", answer="7", id=str(i)))
            for i in range(count)]


def metrics_of(**changes):
    return dict(samples=8, tokens=100, seconds=2.0, skipped_steps=0, loss=0.5) | changes


# ------------------------------------------------------------------------------ the logs
@pytest.mark.parametrize("count, places", [(0, []), (2, [0, 1]), ("all", [0, 1, 2])])
def test_so_many_prompts_of_a_step_are_recorded_and_not_more(run, count, places):
    run.config = replace(run.config, log_groups=count)
    running.log(dict(step=5), groups(3), run)
    found = rows(run, "groups.jsonl") if places else []
    assert [(row["step"], row["place"], row["prompt"], row["gold"]) for row in found] == [
        (5, i, f"<{i}>", "7") for i in places]


def test_every_held_out_set_is_logged_with_what_the_training_has_cost(run, capsys):
    run.state |= dict(step=20, samples_total=500, tokens_total=9000, seconds_total=12.0)
    easy = dict(avg=0.5, ci_low=0.4, ci_high=0.6, k=8)
    run.held_out = [SimpleNamespace(id=id, level="", problem="Q", answer="7") for id in "ab"]
    run.config = replace(run.config, eval_k=2)
    # with a reward of one's own, those above the threshold are correct
    answers = [dict(status=word, text=word, data=data, reward=reward, why="it fell")
               for word, data, reward in zip("wrong correct correct raised".split(),
                                             ("easy", "easy", "hard", "hard"), (-1, 4, 2, 0))]
    running.record_evaluation(answers, dict(easy=easy, hard=easy | dict(avg=0.25)), run)
    keys = ("id", "right", "text", "data", "reward")
    assert [[row[key] for key in keys] for row in rows(run, "answers.jsonl")] == [
        ["a", 1, "wrong", "easy", 1.5], ["b", 1, "correct", "hard", 1]]
    first, second = rows(run, "eval.jsonl")
    assert first == dict(step=20, samples_total=500, tokens_total=9000, seconds_total=12.0,
                         data="easy", temperature=run.config.temperature, **easy)
    assert (second["data"], second["avg"], run.evaluated) == ("hard", 0.25, 20)
    lines = capsys.readouterr().out.splitlines()
    assert "avg@2 on easy 50.0% [40.0%, 60.0%]" in lines[0] and "on hard 25.0%" in lines[1]
    assert lines[2] == "WARNING: 1 of these 4 answers got no verdict: raised, it fell"
    assert (run.accuracy, run.drawn) == (dict(easy=0.5, hard=0.25), [run.folder])
    run.bar, run.config = MagicMock(), replace(run.config, reward="mine.py:score")
    metrics = dict(reward_first_round=0.1, reward_pool=0.2, samples=9, zero_signal=0.3)
    running.update_bar(metrics, run)
    assert run.bar.set_postfix_str.call_args.args == (
        "reward 0.10  held-out 0.50, 0.25  samples 9  no gradient 30%",)
    line = running.evaluation_line("", dict(avg=-3.5, ci_low=-4, ci_high=9, correct=0.25), run)
    assert "avg@2 -3.5 [-4, 9], 25.0% above the threshold   500 samples, 12 s" in line


# ------------------------------------------------------------------------------ after a step
def test_every_step_ends_in_a_log_and_then_in_a_checkpoint(run, monkeypatch):
    """Also the one that ends the run. The caller's numbers stay as they are."""
    for step in (1, 2, 3):
        monkeypatch.setattr(running, "watch", lambda *_: "no hope" * (step == 3))
        metrics = metrics_of(samples=step, tokens=9 * step, seconds=0.5)
        with pytest.raises(SystemExit) if step == 3 else contextlib.nullcontext():
            running.log_and_save(step, [], metrics, run)
        assert metrics == metrics_of(samples=step, tokens=9 * step, seconds=0.5)
        assert run.state["step"] == step
    assert [folders.step_of(path) for path in folders.checkpoints(run.folder)] == [2, 3]
    logged = rows(run, "metrics.jsonl")
    assert [[row[key] for key in ("step", "samples_total", "tokens_total", "seconds_total")]
            for row in logged] == [[1, 1, 9, 0.5], [2, 3, 27, 1.0], [3, 6, 54, 1.5]]
    seconds = [row["seconds_save"] for row in logged]
    assert seconds[0] == 0 and min(seconds[1:]) > 0  # of the checkpoint before


@pytest.mark.parametrize("after, seconds, steps, every, words", [
    (0, 22.0, 20, 10, "the other 19 steps will take about 7 minutes, not counting 2 evaluations"),
    (10, 22.0, 20, 10, "the other 9 steps will take about 3 minutes, not counting 1 evaluation"),
    (0, 0.6, 3, 1, "the other 2 steps will take about 1 second, not counting 3 evaluations"),
    (0, 700.0, 200, 40, "the other 199 steps will take about 39 hours, not counting 5 evaluations"),
    (0, 2000.0, 200, 0, "the other 199 steps will take about 5 days, not counting 1 evaluation"),
    (0, 100.0, 2, 20, "the other step will take about 100 seconds, not counting 1 evaluation"),
    (0, 22.0, 1, 10, "")])
def test_the_first_step_of_a_start_says_how_long_the_others_may_take(
        run, capsys, after, seconds, steps, every, words):
    run.config = replace(run.config, steps=steps, eval_every=every)
    run.state["step"] = run.after_step = after
    for step in (after + 1, after + 2):
        running.log_and_save(step, [], metrics_of(seconds=seconds), run)
        said = capsys.readouterr().out
        assert said == (f"estimated from step {step} alone: {words}\n" if words else "")
        words = ""  # once


# ------------------------------------------------------------------------------ the last words
ENDS = [  # how it ends (a signal, an error, or more bytes than there are), exit code, words
    (signal.SIGINT, 130, "stopped; "),
    (signal.SIGTERM, 143, "stopped; "),
    (OSError(28, "No space left on device", "a.jsonl"), 1, "No space left on device: 'a.jsonl'; "),
    (2**46, 1, "Out of memory: lower --micro-tokens, then --engine-sequences, then "
               "--max-tokens; "),
    (BrokenPipeError(32, "Broken pipe"), 1, "Broken pipe; "),
    (RuntimeError("shapes differ"), 1, "RuntimeError; ")]


def end(how) -> None:
    if isinstance(how, signal.Signals):
        os.kill(os.getpid(), how)
        signal.pause()  # the handler is called between two lines of Python
    if isinstance(how, Exception):
        raise how
    torch.empty(how, dtype=torch.uint8)  # the allocator has an error of its own


@pytest.fixture
def handlers():
    """Those of the tests come back afterwards."""
    before = {number: signal.getsignal(number) for number in running.STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("how, code, words", ENDS, ids=str)
def test_however_a_run_ends_it_says_what_is_saved(
        tmp_path, monkeypatch, capsys, handlers, how, code, words, saved):
    monkeypatch.chdir(tmp_path)
    for step in (9, 12) if saved else ():
        (tmp_path / f"runs/mine/checkpoints/step-{step:06d}").mkdir(parents=True)
    closed = []
    with pytest.raises(SystemExit) as ended, \
            running.say_how_to_resume(settled(name="mine")), \
            contextlib.ExitStack() as stack:
        stack.callback(closed.append, True)  # as the temporary folders' are
        end(how)
    promise = ("everything up to step 12 is saved: continue with --name mine --resume."
               if saved else "nothing was saved yet: start again.")
    said = capsys.readouterr().err
    assert ended.value.code == code and said.splitlines()[-1].endswith(words + promise)
    assert ("Traceback" in said) == isinstance(how, RuntimeError) and closed == [True]


def test_a_launchers_signal_does_not_cut_the_words_short(monkeypatch, capsys, handlers):
    """torchrun sends SIGTERM to all when one process has died, and each has an error by then."""
    monkeypatch.setattr(running.traceback, "print_exception",
                        lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended, running.say_how_to_resume(settled(name="mine")):
        raise RuntimeError("Connection closed by peer")
    assert ended.value.code == 1 and "RuntimeError; nothing was saved" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # nothing is left to be said


@pytest.mark.parametrize("out, said", [
    (io.TextIOWrapper(io.BytesIO(), encoding="latin-1"), "\\u6570\n"), (io.StringIO(), "\u6570\n")])
def test_a_terminal_without_a_sign_for_it_ends_no_run(monkeypatch, handlers, out, said):
    monkeypatch.setattr(sys, "stdout", out)
    with running.say_how_to_resume(settled(name="mine")):
        print("\u6570")
    assert out.seek(0) == 0 and out.read() == said


def test_a_sentence_of_the_programs_own_stays(handlers):
    with pytest.raises(SystemExit, match="^Engine and trainer disagree.$"), \
            running.say_how_to_resume(settled(name="mine")):
        raise SystemExit("Engine and trainer disagree.")


# ------------------------------------------------------------------------------ a tracker
class Tracker:
    """trackio; or wandb, which drops what comes at an earlier step than it has seen, here 22."""

    def __init__(self, wandb):
        self.starts, self.points, self.finish = [], {}, MagicMock()
        self.axis, self.seen = None, 22 if wandb else 0

    def init(self, **how):
        self.starts.append(how)

    def define_metric(self, name, step_metric):
        assert name == "*" and self.seen
        self.axis = step_metric

    def log(self, row, step=None):
        if step is None or step >= self.seen:
            at = row[self.axis] if step is None else step
            self.points |= {(name, at): value for name, value in row.items()}


EVALUATED = dict(avg=0.5, ci_low=0.4, ci_high=0.6)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_each_step_and_evaluation_under_one_name(run, monkeypatch, capsys, name):
    """Also an evaluation that is repeated after a kill."""
    tracker = Tracker(name == "wandb")
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    run.config, run.state["step"] = replace(run.config, report_to=name), 20
    monkeypatch.setattr(provenance, "datetime", MagicMock(**{
        "now.return_value.isoformat.side_effect": ["10:00", "11:00"]}))
    for step in range(2):  # again as a resumed run
        provenance.note_start(run.folder, running.settings_of(run.config), step, {})
        run.tracker = running.open_tracker(run.folder, run.config)
    first, again = tracker.starts
    assert first == again and first["name"] == os.environ["WANDB_RUN_ID"] == "mine-1000"
    assert first["resume"] == "allow"
    running.record_evaluation([], dict(builtin=EVALUATED), run)
    running.log_and_save(21, [], metrics_of(verdicts=dict(correct=7)), run)
    running.record_evaluation([], dict(a=EVALUATED, b=EVALUATED), run)
    assert tracker.points["held_out/avg", 20] == tracker.points["train/loss", 21] == 0.5
    assert ("train/verdicts", 21) not in tracker.points
    assert {("held_out/a/avg", 21), ("held_out/b/avg", 21)} <= tracker.points.keys()
    running.close_run(run, bootstrap)
    assert tracker.finish.call_count == 1
    tracker.log = tracker.init = MagicMock(side_effect=ConnectionError("no network\x1b[2J"))
    running.log_and_save(22, [], metrics_of(), run)  # one that fails costs a warning
    said = capsys.readouterr().out
    assert f"WARNING: step 22 did not reach {name} (ConnectionError: no network" in said
    assert "\x1b" not in said and rows(run, "metrics.jsonl")[-1]["step"] == 22
    with pytest.raises(SystemExit, match=f"^{name} did not start .*install or fix it.*--report"):
        running.open_tracker(run.folder, run.config)


@pytest.mark.slow
def test_the_real_wandb_keeps_a_step_that_goes_back(run, tmp_path, monkeypatch):
    """Without a network: what it has kept is in its file, as JSON."""
    pytest.importorskip("wandb", reason="wandb is not installed: make extras")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_RUN_ID", "back")
    run.config = replace(run.config, report_to="wandb")
    provenance.note_start(run.folder, {}, 0, {})
    run.tracker = running.open_tracker(run.folder, run.config)
    for prefix, step in (("train", 21), ("held_out", 20)):
        running.track(run, prefix, step, dict(avg=step / 1024))
    run.tracker.finish()
    run.tracker.teardown()  # waits for wandb's own process, which may still be writing
    (kept,) = tmp_path.glob("wandb/offline*/*.wandb")
    # Blocks of 32 KiB, each of which begins with a header of 7 bytes, may cut a number in two.
    written, block = kept.read_bytes(), 2**15
    records = b"".join(written[at + 7:at + block] for at in range(0, len(written), block))
    assert all(str(step / 1024).encode() in records for step in (20, 21))


# ------------------------------------------------------------------------------ resumed
def newest(run):
    return folders.checkpoints(run.folder)[-1]


def test_a_resumed_run_knows_all_that_decides_what_comes_next(run, capsys):
    run.stream.take(21)
    run.estimator.counts = {"a": [1.0, 2.0]}
    for step in range(1, 11):
        running.log_and_save(step, groups(1), metrics_of(), run)
    for name in ("metrics.jsonl", "groups.jsonl"):  # killed before the checkpoint of step 11
        folders.append(run.folder / name, dict(step=11))

    again = begun(run.folder, run.config)
    running.resume(again, newest(run))
    assert "continuing after step 10" in capsys.readouterr().out
    assert (again.state["step"], again.after_step, again.stream.cursor) == (10, 10, 21)
    assert again.estimator.state_dict() == run.estimator.state_dict()
    assert again.state["samples_total"] == 80
    for name in ("metrics.jsonl", "groups.jsonl"):
        assert [row["step"] for row in rows(run, name)] == list(range(1, 11))
    assert [*again.history] == [*run.history] == rows(run, "metrics.jsonl")[-3:]
    assert list(again.steps()) == list(range(11, 31))
    again.config = replace(again.config, steps=10)
    running.resume(again, newest(run))
    said = capsys.readouterr().out
    assert "after step 10: all of --steps 10 are done" in said


@pytest.mark.parametrize("written, finished", [
    ([], False), (["answers"], False), (["answers", "a"], False), (["answers", "a", "b"], True)])
def test_an_evaluation_that_a_crash_has_cut_short_is_made_again(
        run, monkeypatch, written, finished):
    """It follows the checkpoint of its step: whatever it has written of itself goes."""
    monkeypatch.setattr(running, "expand", dict(both="ab").get)  # one name for several sets
    run.config = replace(run.config, eval_data="both", eval_every=5)
    for step in range(1, 11):
        running.log_and_save(step, [], metrics_of(), run)
    for step, parts in ((5, ["answers", "a", "b"]), (10, written)):
        for name in parts:
            log = "answers.jsonl" if name == "answers" else "eval.jsonl"
            folders.append(run.folder / log, dict(step=step, data=name, avg=step / 20))
    again = begun(run.folder, run.config)
    running.resume(again, newest(run))
    assert again.evaluated == (10 if finished else 5)
    assert running.evaluation_is_due(again) != finished
    last = 10 if finished else 5
    assert rows(run, "answers.jsonl")[-1]["step"] == rows(run, "eval.jsonl")[-1]["step"] == last
    assert len(rows(run, "eval.jsonl")) == 2 + 2 * finished
    assert again.accuracy == dict(a=last / 20, b=last / 20)


def test_config_json_says_after_which_step_each_start_went_on(tmp_path, capsys):
    """A chat template that has changed is noticed, and so is a name that was perhaps misspelt."""
    (tmp_path / "runs/demos").mkdir(parents=True)  # no run
    (tmp_path / "runs/demo/checkpoints/step-000003").mkdir(parents=True)
    how = dict(name="demoo", eval_every=0, resume=True, lora_rank=2, lora_alpha=5)
    folder = small_run(tmp_path, steps=1, **how)
    said = capsys.readouterr().out  # as `make demo` begins
    assert "no checkpoint of demoo: this starts a new run with --model tiny, --data builtin" in said
    assert "; runs/demo has a similar name\n" in said and "from here on" not in said
    made = folders.read_json(folder / "checkpoints/step-000001/adapter_config.json")
    assert (made["r"], made["lora_alpha"]) == (2, 5)
    gc.collect()  # its lock goes with it, as with its process
    small_run(tmp_path, steps=2, lr=0.5, **how)
    said = capsys.readouterr().out
    assert "WARNING: the prompts" not in said and "no checkpoint" not in said
    assert "from here on --lr is 0.5 (it was 0.001), --steps is 2 (it was 1)\n" in said
    file = folder / "config.json"
    prompts = provenance.read_config(folder)["inputs"]["prompts"]
    file.write_text(file.read_text().replace(prompts, "others"))
    gc.collect()
    small_run(tmp_path, steps=2, lr=0.5, **how)
    assert "WARNING: the prompts have changed since the run started" in capsys.readouterr().out
    found = provenance.read_config(folder)
    starts = found["starts"]
    assert found["inputs"]["prompts"] == "others"
    # before the first step, and once after the last of each start
    assert [row["step"] for row in lines(folder / "eval.jsonl")] == [0, 1, 2]
    assert [(start["after_step"], start["changed"]) for start in starts] == [
        (0, {}), (1, dict(lr=[0.001, 0.5], steps=[1, 2])), (2, {})]
    assert {"python", "torch", "peft", "math-verify"} <= {*starts[1]["versions"]}
    trained = load_problems("builtin")[:3]
    assert count_trained(folder, trained) == 3


INPUTS = {  # the files that a run is started with
    "train.jsonl": '{"problem": "1+2=?", "answer": "3", "hint": 1, "note": "a"}',
    "test.jsonl": '{"problem": "4+2=?", "answer": "6", "hint": 1}',
    "mine.py": "def score(problem, completion): return 1",
    "mine.jinja": "<|user|>{{ row.hint }} {{ problem }}<|assistant|>",
    "mine.json": '[{"role": "user", "content": "{problem}"}]'}


@pytest.mark.parametrize("file, old, new, flag", [
    ("train.jsonl", "1+2", "2+1", "data"), ("train.jsonl", '"hint": 1', '"hint": 2', "data"),
    ("train.jsonl", '"a"', '"b"', ""),  # which no template shows
    ("test.jsonl", '"6"', '"7"', "data"), ("mine.py", "1", "2", "reward"),
    ("mine.json", "{problem}", "Solve {problem}", "template")])
def test_a_run_is_known_by_what_it_was_started_with(
        tmp_path, monkeypatch, capsys, file, old, new, flag):
    """Other contents under the same name are told apart; so small a data set is announced."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, text in INPUTS.items():
        (tmp_path / name).write_text(text)
    settings = dict(steps=1, eval_every=0, data="~/train.jsonl", eval_data="~/test.jsonl",
                    template="~/mine.jinja" if file.endswith(".jsonl") else "~/mine.json",
                    reward="~/mine.py:score" if file == "mine.py" else "")
    small_run(tmp_path, **settings)
    said = capsys.readouterr().out
    assert "a step takes 4 prompts (--batch-prompts), but only 1 are there to train on" in said
    gc.collect()
    (tmp_path / file).write_text(INPUTS[file].replace(old, new))
    with contextlib.nullcontext() if not flag else pytest.raises(
            SystemExit, match=f"started with other contents of --{flag} .*; now .*--name"):
        small_run(tmp_path, resume=True, **settings)


# ------------------------------------------------------------------------------ ended
def test_a_run_that_is_over_says_how_to_look_into_it_and_how_to_go_on(run, capsys):
    for step, more, lacking in ((30, 200, "before step 1 (--no-eval-first); "),
                                (150, 300, "after step 150; ")):
        run.state["step"], run.config = step, replace(run.config, steps=step)
        running.close_run(run, bootstrap)
        answered(run, 0, a=[0.5])
        compared, _, look, go_on = capsys.readouterr().out.splitlines()
        assert f"is not known, because answers.jsonl has no evaluation {lacking}" in compared
        assert f"eval.py --adapter {run.folder} --base compares it with its base" in compared
        assert look.endswith(f"explore.py {run.folder}")
        flags = go_on.split("minirl.py ")[1].split()
        again = parse_flags(Flags, flags, "minirl.py", "")
        assert (again.name, again.resume, again.steps) == ("mine", True, more)


def answered(run, step, **sets):
    """The answers of an evaluation: set -> the mean reward of each of its problems."""
    folders.append(run.folder / "answers.jsonl", *(
        dict(step=step, data=name, id=f"{name}/{i}", reward=reward, right=0, k=4)
        for name, rewards in sets.items() for i, reward in enumerate(rewards)))


THEN = [0, 0.25, 0.5, 1] * 10


@pytest.mark.parametrize("then, now, words", [
    (THEN, [1] * 40, "The model is better than before the training, because"),
    (THEN, THEN[::-1], "There is no clear difference from before the training, because"),
    (THEN, [0] * 40, "The model is worse than before the training, because"),
    (THEN[:20], [1] * 20, "looks better than before the training, but little can be concluded"),
    (THEN[:20], [0] * 20, "looks worse than before the training, but little can be concluded")])
def test_a_run_ends_with_what_it_has_gained_question_by_question(run, capsys, then, now, words):
    run.state["step"], run.config = 30, replace(run.config, steps=30)
    for step, rewards in ((0, then), (20, [0.5] * len(then)), (30, now)):
        answered(run, step, a=rewards)
    running.close_run(run, bootstrap)
    said = capsys.readouterr().out
    change = bootstrap([[after - before for before, after in zip(then, now)]])
    numbers = [f"{100 * change[key]:+.1f}" for key in ("avg", "ci_low", "ci_high")]
    assert ("held-out accuracy, last evaluation minus first, question by question, in points: "
            "{} [{}, {}]".format(*numbers)) in said and words in said
    fallen = "worse" in words
    assert ("have clearly fallen" in said and "lower --lr than " in said) == fallen
    assert ("--resume" in said) != fallen


def test_what_was_gained_is_said_of_each_held_out_set_and_of_rewards_of_ones_own(run, capsys):
    """A line that a power cut has taken leaves a problem out."""
    run.state["step"], run.config = 30, replace(run.config, reward="mine.py:score")
    answered(run, 0, b=[1] * 40, a=[-2.5, 4])
    answered(run, 30, a=[1], b=[0.5] * 40)
    running.close_run(run, bootstrap)
    first, second = [line for line in capsys.readouterr().out.splitlines() if "minus first" in line]
    assert "reward on a, last evaluation minus first, question by question: +3.5 (no" in first
    assert second == (
        "held-out reward on b, last evaluation minus first, question by question: -0.5 (no "
        "interval, because all problems have the same result). The model is worse than before the "
        "training, because all problems have the same difference.")


def test_which_steps_are_followed_by_an_evaluation():
    for first, every, wanted in ((True, 3, [0, 3, 6, 7]), (True, 0, [0, 7]), (False, 3, [3, 6, 7]),
                                 (False, 0, [7])):
        config = settled(steps=7, eval_every=every, eval_first=first)
        assert [step for step in range(8) if running.is_evaluated(step, config)] == wanted


# ------------------------------------------------------------------ before the first step
def test_every_phase_of_every_step_has_its_own_random_state():
    def drawn(*parts):
        rng = running.seed_all(*parts)
        return rng.random(), torch.rand(1).item(), numpy.random.rand()

    first = drawn(0, 1, "training")
    assert drawn(0, 1, "training") == first
    for other in ((1, 1, "training"), (0, 2, "training"), (0, 1, "evaluation")):
        assert all(a != b for a, b in zip(drawn(*other), first))


def test_odd_golds_are_not_trained_on_and_stay_among_the_held_out(tmp_path, capsys):
    """The columns that --columns names are read in both files."""
    for name in ("mine", "other"):
        rows = [dict(frage=f"Of {name}, {gold}", gold=gold) for gold in ("7", "??", "?")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    grader = SimpleNamespace(check_golds=lambda golds: [gold.isdigit() for gold in golds])
    config = settled(data=str(tmp_path / "mine.jsonl"), eval_data=str(tmp_path / "other.jsonl"),
                    columns="frage,gold", template="chat", max_prompt_tokens=200,
                        train_anyway=True)
    train, held_out = running.load_data(config, make.build_tokenizer(), grader)
    assert [p.answer for p in train] == ["7"] and len(held_out) == 3
    around = {p.prompt.replace(p.problem, "...") for p in (*train, *held_out)}
    assert around == {"<|user|>...<|assistant|>"}  # one template for both
    said = capsys.readouterr().out
    assert all(f"2 of 3 golds cannot be read by math-verify, such as '??', '?': {fate}" in said
               for fate in ("dropped", "only the same string is right"))
    assert "too few to see progress" in said
    config = replace(config, reward="mine.py:score")  # decides alone what is right
    assert [*map(len, running.load_data(config, make.build_tokenizer(), grader))] == [3, 3]


@pytest.mark.parametrize("max_tokens, context", [(1, 12), (2, 12), (5, 15)])
def test_the_probe_can_score_the_longest_prompt_with_its_response(monkeypatch, max_tokens, context):
    """A prompt, a response of at least one token, and what vLLM adds to what it scores. All else
    that engine and probe are told is as the run's settings say."""
    started = {}
    monkeypatch.setattr(running, "Engine", lambda path, **options: started.update(options))
    own = dict(temperature=0.5, kv_cache_dtype="fp8", lora_rank=5, seed=9, sleep=True)
    config = settled(max_prompt_tokens=10, max_tokens=max_tokens, dtype="float32",
                     rollout_dtype="bfloat16", sync="adapter", engine_memory=0.3,
                     engine_sequences=7, **own)
    running.start_engine(config, known_model("tiny"), [0])
    assert started == own | dict(
        max_model_len=context, dtype="bfloat16", sync_mode="adapter", memory_share=0.3,
        max_num_seqs=7, stop_token_ids=[0], routes=False, architecture=known_model("tiny").config)
    monkeypatch.setattr(running, "tolerances", lambda *asked: asked)
    monkeypatch.setattr(running, "Probe", lambda *given, **how: (given, how, torch.rand(1)))
    policy, held_out = SimpleNamespace(routing=None), [*range(99)]
    (found, how, state), (*_, again) = (
        running.start_probe(config, "engine", policy, held_out) for _ in range(2))
    assert found == ("engine", policy, held_out[:64]) and state == again  # of a resumed run too
    assert how == dict(tolerances=("float32", "bfloat16", "fp8", False), temperature=0.5,
                       max_tokens=max(1, max_tokens - 1))
