"""What is logged, and what a run says at its end, with a mock engine."""
import json
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ada_sampler import Group
from explorer.panels import drawn_rows, figure_of
from helpers import lines
from minirl import Run
from models import make
from parts import files, log
from parts.data import Problem, Stream, load_data
from parts.evaluation import bootstrap
from parts.log import Log
from parts.run_folder import restore, save
from test_folder import taught
from world import Engine, settled


def begun(folder, config):
    """A run at the start of its process, with a mock engine; training and saving are real."""
    policy, optimizer, schedule = taught(config, 0)
    return Run(folder=folder, config=config, engine=Engine(), policy=policy,
               optimizer=optimizer, schedule=schedule, grader=None, held_out=[], probe=None,
               stream=Stream(list(range(50)), seed=0))


@pytest.fixture
def run(tmp_path, monkeypatch):
    made = begun(tmp_path, settled(name="mine", steps=30, lr=0.1, sampler="ada-est"))
    monkeypatch.setattr(log, "warn", lambda *_: None)
    return made


def rows(run, name):
    return lines(run.folder / name)


def groups(count):
    return [Group(i, SimpleNamespace(prompt=f"<{i}>", answer="7", id=str(i)))
            for i in range(count)]


def metrics_of(**changes):
    return dict(samples=8, tokens=100, seconds=2.0, skipped_steps=0, loss=0.5,
                reward_first_round=0.5, zero_signal=0, verdicts=dict(wrong=8)) | changes


def test_a_signal_that_the_shell_ignores_stays_ignored(monkeypatch):
    """Ctrl-C for `tail -f log` goes to a training that a script has started in the background."""
    monkeypatch.setattr(log, "STOPS", [signal.SIGINT])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with log.say_how_to_resume(settled(name="mine")):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------ resumed
def step(run, log, count=1):
    for _ in range(count):
        run.state["step"] += 1
        log.step(groups(3), metrics_of())
        save(run)


@pytest.mark.parametrize("complete", [False, True])
def test_an_evaluation_after_the_checkpoint_is_kept_only_if_all_of_it_is_there(run, complete):
    """A kill may come while its answers are logged. Its last log is eval.jsonl. The line of a
    further step, which is not saved, goes in any case."""
    answered(run, 0, [0.5])
    files.append(run.folder / "eval.jsonl", dict(step=0, data="a", avg=0.5))
    step(run, Log(run), 2)
    files.append(run.folder / "metrics.jsonl", dict(step=3))
    before = (run.folder / "answers.jsonl").read_bytes()
    answered(run, 2, [1])
    if complete:
        files.append(run.folder / "eval.jsonl", dict(step=2, data="a", avg=1.0))
    after = (run.folder / "answers.jsonl").read_bytes()
    again = begun(run.folder, run.config)
    restore(again)
    assert (run.folder / "answers.jsonl").read_bytes() == (after if complete else before)
    assert Log(again).evaluated == (2 if complete else 0)
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == [1, 2]


def test_a_log_that_began_after_the_checkpoint_begins_again(run):
    step(run, Log(run), 1)
    answered(run, 1, [1])
    restore(begun(run.folder, run.config))
    assert rows(run, "answers.jsonl") == []


@pytest.mark.parametrize("failed, avg", [([3], 0.25), ([2, 3], 0.5), ([0, 1, 2, 3], None)])
def test_not_even_an_evaluation_without_any_verdict_ends_a_run_or_a_resumed_one(run, failed, avg):
    problems = [Problem("?", "1", name, "a") for name in ("p", "q")]
    run.held_out, run.config = problems, replace(run.config, eval_k=2, eval_data="a")
    answers = [dict(data="a", id=name, sample=s, reward=float(name == "p" and s), tokens=3, text="",
                    status="correct" if name == "p" and s else "wrong", finish_reason="stop")
               for name in ("p", "q") for s in range(2)]
    for i in failed:
        answers[i] |= dict(reward=None, status="raised", why="")
    for logged in (Log(run), Log(run)):
        logged.evaluation(answers)
        run.state["step"] += 1
        logged.step(groups(1), metrics_of())
        assert rows(run, "eval.jsonl")[-1]["avg"] == avg
    rewards = [row["reward"] for row in rows(run, "answers.jsonl")[-2:]]
    assert rewards == [None if {0, 1} <= {*failed} else 0.5, None if {2, 3} <= {*failed} else 0]
    drawn = [drawn_rows(run.folder / f"{name}.jsonl") for name in ("metrics", "eval")]
    assert figure_of(dict(name="mine", config={}, metrics=drawn[0], evals=drawn[1])).axes


# ------------------------------------------------------------------------------ a tracker
@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_tracker_that_fails_costs_a_run_nothing(run, monkeypatch, capsys, broken):
    def fail(*_, **__):
        raise ConnectionError("no network\x07")

    sent = []
    package = SimpleNamespace(init=lambda **_: None, log=sent.append, finish=lambda: None)
    setattr(package, broken, fail)
    monkeypatch.setitem(sys.modules, "wandb", package)
    run.config = replace(run.config, report_to="wandb")
    logged = Log(run)
    step(run, logged, 2)
    logged.close()
    said = capsys.readouterr().out
    assert f"WARNING: wandb.{broken} failed: no network\\x07" in said
    assert len(rows(run, "metrics.jsonl")) == 2
    assert [row["train/step"] for row in sent] == ([] if broken == "log" else [1, 2])


# ------------------------------------------------------------------------------ ended
def answered(run, step, rewards):
    """The answers of an evaluation, from the mean reward of each problem."""
    files.append(run.folder / "answers.jsonl", *(
        dict(step=step, data="a", id=f"a/{i}", reward=reward, right=0, k=4, problem="?",
             status="wrong", text="\\boxed{7}")
        for i, reward in enumerate(rewards)))


THEN = [0, 0.25, 0.5, 1] * 10


@pytest.mark.parametrize("then, now, words", [
    (THEN, THEN[::-1], "no clear difference from before"),
    (THEN[:20], [0] * 20, "looks worse than before"),
    ([None, *THEN], [1, *[0] * 40], "is worse than before"),
    ([1, *THEN], [None, *[1] * 40], "is better than before")])
def test_a_run_ends_with_what_it_has_gained_question_by_question(run, capsys, then, now, words):
    run.state["step"], run.config = 30, replace(run.config, steps=30)
    for step, rewards in ((0, then), (20, [0.5] * len(then)), (30, now)):  # None: no verdict
        answered(run, step, rewards)
    Log(run).close()
    said = capsys.readouterr().out
    change = bootstrap([[after - before for before, after in zip(then, now)
                         if None not in (before, after)]])
    numbers = [f"{100 * change[key]:+.1f}" for key in ("avg", "ci_low", "ci_high")]
    assert "in points: {} [{}, {}]".format(*numbers) in said and words in said


# ------------------------------------------------------------------ before the first step
def test_odd_golds_are_not_trained_on_and_stay_among_the_held_out(tmp_path, capsys):
    """The columns that --columns names are read in both files."""
    for name in ("mine", "other"):
        rows = [dict(frage=f"Of {name}, {gold}", gold=gold) for gold in ("7", "??", "?")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    grader = SimpleNamespace(check_golds=lambda golds: [gold.isdigit() for gold in golds])
    config = settled(model="SmolLM2-135M-Instruct", data=str(tmp_path / "mine.jsonl"),
                     eval_data=str(tmp_path / "other.jsonl"), columns="frage,gold", template="chat",
                     max_prompt_tokens=200)
    model = SimpleNamespace(tokenizer=make.build_tokenizer(), embedded=384)
    train, held_out = load_data(config, model, grader)
    assert [p.answer for p in train] == ["7"] and len(held_out) == 3
    around = {p.prompt.replace(p.problem, "...") for p in (*train, *held_out)}
    assert around == {"<|user|>...<|assistant|>"}  # one template for both
    assert capsys.readouterr().out.count("2 of 3 golds cannot be read") == 2
    grader.check_golds = lambda golds: [False for _ in golds]  # then there is nothing better
    for reward in ("", "mine.py:score"):
        assert [*map(len, load_data(replace(config, reward=reward), model, grader))] == [3, 3]
