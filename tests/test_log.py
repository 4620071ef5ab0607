"""What is logged, and what a run says at its end, with a mock engine."""
import io
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest import mock

import pytest

from ada_sampler import Group, Sample
from explorer.panels import drawn_rows, figure_of
from helpers import lines
from minirl import Run
from models import make
from parts import files, log, text
from parts.data import Problem, Stream, load_data
from parts.evaluation import bootstrap
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
def run(tmp_path):
    return begun(tmp_path, settled(name="mine", steps=30, lr=0.1, sampler="ada-est"))


GROUPS = [Group(i, SimpleNamespace(problem="?", prompt="<?>", answer="7", id=str(i)))
          for i in range(3)]
METRICS = dict(samples=8, tokens=100, seconds=2.0, skipped_steps=0, loss=0.5, zero_signal=0.25,
               verdicts=dict(wrong=8))  # none of them on an answer of a first round


@pytest.mark.parametrize("error, said", [
    (KeyboardInterrupt(), True), (SystemExit(143), True), (RuntimeError("out of memory"), True),
    (SystemExit("a sentence"), False)])
def test_whoever_ends_a_run_reads_what_is_saved_unless_a_sentence_says_it(
        monkeypatch, capsys, error, said):
    """A signal that the shell ignores stays ignored: Ctrl-C for `tail -f log` goes to a training
    that a script has started in the background, too."""
    monkeypatch.setattr(log, "STOPS", [signal.SIGINT])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(type(error)), log.say_how_to_resume(settled(name="mine")):
            os.kill(os.getpid(), signal.SIGINT)
            raise error
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "\nnothing was saved yet: start again.\n" * said


# ------------------------------------------------------------------------------ resumed
def step(run, log, count=1):
    for _ in range(count):
        run.state["step"] += 1
        log.step(GROUPS, METRICS)
        save(run)


@pytest.mark.parametrize("first, complete", [(0, False), (0, True), (None, False)])
def test_an_evaluation_after_the_checkpoint_is_kept_only_if_all_of_it_is_there(
        run, first, complete):
    """A kill may come while its answers are logged. Its last log is eval.jsonl. The line of a
    further step, which is not saved, goes in any case. A power cut may have shortened a log."""
    answers = run.folder / "answers.jsonl"
    if first == 0:
        answered(run, 0, [0.5])
        files.append(run.folder / "eval.jsonl", dict(step=0, data="a", avg=0.5))
    step(run, log.Log(run), 2)
    assert [g["place"] for g in lines(run.folder / "groups.jsonl")] == [0, 1] * 2  # --log-groups 2
    (run.folder / "groups.jsonl").write_bytes(b"{}\n")
    files.append(run.folder / "metrics.jsonl", dict(step=3))
    before = answers.read_bytes() if first == 0 else b""
    answered(run, 2, [1])
    if complete:
        files.append(run.folder / "eval.jsonl", dict(step=2, data="a", avg=1.0))
    after, again = answers.read_bytes(), begun(run.folder, run.config)
    restore(again)
    assert answers.read_bytes() == (after if complete else before)
    logged = log.Log(again)
    assert (logged.evaluated, logged.bar.n, logged.bar.total) == (2 if complete else first, 2, 30)
    assert [row["step"] for row in lines(run.folder / "metrics.jsonl")] == [1, 2]
    assert lines(run.folder / "groups.jsonl") == [{}]


def evaluated(run, sets="aa", failed=(), reward=1.0) -> list[dict]:
    """Two answers to p and two to q. Only the second one to p is right."""
    run.held_out = [Problem("?", "1", name, data, "3") for name, data in zip("pq", sets)]
    run.config = replace(run.config, eval_k=2)
    answers = [dict(data=p.source, id=p.id, sample=s, reward=0.0, tokens=3, text="\\boxed{7}",
                    status="wrong", finish_reason="stop") for p in run.held_out for s in range(2)]
    answers[1] |= dict(reward=reward, status="correct")
    for i in failed:
        answers[i] |= dict(reward=None, status="raised", why="")
    return answers


@pytest.mark.parametrize("failed, avg, said", [
    ([3], 0.25, "25.0% [0.0%, 50.0%], WARNING: no verdict on 1 of 4 answers"),
    ([2, 3], 0.5, "50.0% (no interval, because all problems have the same result), WARNING: "
                  "no verdict on 2 of 4 answers"),
    ([0, 1, 2, 3], None, "nan% [nan%, nan%], WARNING: no verdict on 4 of 4 answers")])
def test_not_even_an_evaluation_without_any_verdict_ends_a_run_or_a_resumed_one(
        run, capsys, failed, avg, said):
    answers = evaluated(run, failed=failed)
    run.config = replace(run.config, log_groups=0)
    run.state |= dict(samples_total=8800, seconds_total=1234.5)
    groups = [Group(0, None, [Sample(0, 0, SimpleNamespace(text="so"), 0, "raised", why="why")])]
    metrics = METRICS | dict(reward_first_round=0.5, verdicts=dict(wrong=7, raised=1))
    for logged in (log.Log(run), log.Log(run)):
        logged.evaluation(answers)
        run.state["step"] += 1
        logged.step(groups, metrics)
        assert lines(run.folder / "eval.jsonl")[-1]["avg"] == avg
    assert logged.bar.postfix == "reward 0.50  samples 8  no gradient 25%  no verdict 1"
    assert capsys.readouterr().out == "".join(
        f"step     {i}   held-out avg@2 {said}   8,800 samples, 1,234 s of training\n"
        f"WARNING, step {i + 1}: 1 of 1 answers got no verdict, such as 'so': raised, why\n"
        for i in range(2))
    p, q = lines(run.folder / "answers.jsonl")[-2:]
    assert not (run.folder / "groups.jsonl").exists()
    assert p == dict(step=1, data="a", id="p", level="3", problem="?", gold="1", k=2,
                     reward=avg and 0.5, right=int(avg is not None), text="\\boxed{7}",
                     status="wrong" if avg else "raised")
    assert (q["reward"], q["right"]) == (0 if avg == 0.25 else None, 0)
    drawn = [drawn_rows(run.folder / f"{name}.jsonl") for name in ("metrics", "eval")]
    assert figure_of(dict(name="mine", config={}, metrics=drawn[0], evals=drawn[1])).axes


@pytest.mark.parametrize("broken", ["", "init", "log", "finish"])
def test_a_tracker_gets_all_numbers_and_if_it_fails_it_costs_a_run_nothing(
        run, monkeypatch, capsys, broken):
    """Two held-out sets have two lines, with the share above the threshold beside a reward. They
    are logged last and in one write, by which a resumed run knows that the evaluation is whole."""
    package, written, real = mock.Mock(), [], log.append
    if broken:
        getattr(package, broken).side_effect = ConnectionError("no network\x07")
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr(log, "append", lambda file, *rows: (
        written.append((file.stem, len(rows))), real(file, *rows)))
    run.config = replace(run.config, report_to="wandb", log_groups="all", reward="mine.py:f")
    answers, logged = evaluated(run, "ab", reward=3.0), log.Log(run)
    logged.evaluation(answers)
    step(run, logged)
    logged.close()
    said, times = capsys.readouterr().out.splitlines(), dict(log=3).get(broken, bool(broken))
    assert said.count(f"WARNING: wandb.{broken} failed: no network\\x07") == times
    assert [line for line in said if "held-out" in line] == [
        f"step     0   held-out avg@2 on {name} {avg} (no interval, because all problems have the "
        f"same result), {share:.1%} above the threshold   0 samples, 0 s of training"
        for name, avg, share in (("a", 1.5, 0.5), ("b", 0, 0))]
    assert [row["place"] for row in lines(run.folder / "groups.jsonl")] == [0, 1, 2]
    logs = [(f"held_out/{row['data']}", row) for row in lines(run.folder / "eval.jsonl")]
    logs += [("train", row) for row in lines(run.folder / "metrics.jsonl")]
    assert package.mock_calls == [
        mock.call.init(project="minirl", name="mine", config=asdict(run.config)),
        *(mock.call.log({f"{prefix}/{key}": value for key, value in row.items()
                         if key not in ("verdicts", "pass", "data")}) for prefix, row in logs),
        mock.call.finish()]
    assert written[:3] == [("answers", 1), ("answers", 1), ("eval", 2)]


def answered(run, step, rewards, data="a"):
    """The answers of an evaluation, from the mean reward of each problem."""
    files.append(run.folder / "answers.jsonl", *(
        dict(step=step, data=data, id=f"{data}/{i}", reward=reward, problem=f"problem {i}",
             status="correct" if reward == 1 else "wrong", text=f"step {step}\n{reward}\x07")
        for i, reward in enumerate(rewards)))


THEN = [0, 0.25, 0.5, 1] * 10
BECAUSE = "than before the training, because the whole 95% interval is"


@pytest.mark.parametrize("then, now, words, shown", [  # None: no verdict
    (THEN, THEN[::-1], "There is no clear difference from before the training, because the 95% "
                       "interval contains 0.", 0),
    (THEN[:29], [0] * 29, "Little can be concluded from 29 problems.", 3),
    ([None, *THEN[:30]], [1, *[0] * 30], f"The model is worse {BECAUSE} below 0.", 4),
    ([1, *THEN], [None, *[0.9, 1, 1, 1] * 10], f"The model is better {BECAUSE} above 0.", 2)])
@pytest.mark.parametrize("reward, sets", [("", "a"), ("mine.py:f", "ab")])
def test_a_run_ends_with_what_it_has_gained_question_by_question(
        run, monkeypatch, capsys, then, now, words, shown, reward, sets):
    """And with the answers to one problem, if possible a right and a wrong one."""
    run.state["step"], run.config = 130, replace(run.config, steps=130, reward=reward)
    monkeypatch.setattr(sys, "executable", os.path.abspath(".venv/bin/python"))
    for step, rewards in ((0, then), (120, [0.5] * len(then)), (130, now)):
        for name in sets:
            answered(run, step, rewards, name)
    log.Log(run).close()
    change = bootstrap([[after - before for before, after in zip(then, now)
                         if None not in (before, after)]])
    unit, what = ("{:+.3g}", "reward{}") if reward else ("{:+.1%}", "accuracy")
    mean, low, high = (unit.format(change[key]).rstrip("%") for key in ("avg", "ci_low", "ci_high"))
    points = "" if reward else ", in points"
    (before, was), (after, became) = (
        (rewards[shown], "correct" if rewards[shown] == 1 else "wrong") for rewards in (then, now))
    assert capsys.readouterr().out.splitlines() == [
        *(f"held-out {what.format(f' on {name}')}, last evaluation minus first, question by "
          f"question{points}: {mean} [{low}, {high}]. {words}" for name in sets),
        f"for example problem {shown}", f"  before: step 0  {before}\\x07  ({was})",
        f"  after:  step 130  {after}\\x07  ({became})",
        f"adapter: {run.folder}/checkpoints; next: .venv/bin/python explore.py {run.folder}",
        "      continue it with  .venv/bin/python minirl.py --name mine --resume --steps 260"]


def test_any_text_is_printed_safely_on_any_terminal(monkeypatch):
    assert text.shown("\x1b" + "x" * 200) == "\\x1b" + "x" * 199 + "..."
    assert text.listed(dict(a=1, b="x" * 200)) == "a = 1, b = " + "x" * 200
    assert [text.counted(count, "gold") for count in (1, 0)] == ["1 gold", "0 golds"]
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    text.prepare_streams()
    print("π")
    assert written.getvalue() == b"\\u03c0\n"


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
