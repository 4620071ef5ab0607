"""Logging, saving, resuming and ending around the loop, with a mock engine."""
import contextlib
import io
import json
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ada_sampler import Group
from explorer.panels import drawn_rows, figure_of
from helpers import lines
from minirl import Run
from models import make
from parts import files, log
from parts.config import Config, parse, parse_flags
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


# ------------------------------------------------------------------------------ the last words
ENDS = [  # how it ends (a signal, an error, or more bytes than there are), exit code, words
    (signal.SIGINT, 130, "stopped; "),
    (signal.SIGTERM, 143, "stopped; "),
    (OSError(28, "No space left on device", "a.jsonl"), 1, "No space left on device: 'a.jsonl'; "),
    (2**46, 1, "Out of memory: lower --micro-tokens, --engine-sequences or --max-tokens, and on "
               "a GPU --engine-memory; "),
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
    before = {number: signal.getsignal(number) for number in log.STOPS}
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
            log.say_how_to_resume(settled(name="mine")), \
            contextlib.ExitStack() as stack:
        stack.callback(closed.append, True)  # as the temporary folders' are
        end(how)
    promise = ("everything up to step 12 is saved: continue with --name mine --resume."
               if saved else "nothing was saved yet: start again.")
    said = capsys.readouterr().err
    assert ended.value.code == code and said.splitlines()[-1].endswith(words + promise)
    assert ("Traceback" in said) == isinstance(how, RuntimeError) and closed == [True]


def test_a_signal_that_the_shell_ignores_stays_ignored(handlers):
    """Ctrl-C for `tail -f log` goes to a training that a script has started in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with log.say_how_to_resume(settled(name="mine")):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.parametrize("out, said", [
    (io.TextIOWrapper(io.BytesIO(), encoding="latin-1"), "\\u6570\n"), (io.StringIO(), "\u6570\n")])
def test_a_terminal_without_a_sign_for_it_ends_no_run(monkeypatch, handlers, out, said):
    monkeypatch.setattr(sys, "stdout", out)
    with log.say_how_to_resume(settled(name="mine")):
        print("\u6570")
    assert out.seek(0) == 0 and out.read() == said


def test_a_sentence_of_the_programs_own_stays(handlers):
    with pytest.raises(SystemExit, match="^Engine and trainer disagree.$"), \
            log.say_how_to_resume(settled(name="mine")):
        raise SystemExit("Engine and trainer disagree.")


# ------------------------------------------------------------------------------ resumed
def step(run, log, count=1):
    for _ in range(count):
        run.state["step"] += 1
        log.step(groups(3), metrics_of())
        save(run)


@pytest.mark.parametrize("count, places", [(0, []), (2, [0, 1]), ("all", [0, 1, 2])])
def test_a_resumed_run_knows_all_that_decides_what_comes_next(run, count, places):
    run.config = replace(run.config, log_groups=count)
    run.stream.take(21)
    run.estimator.counts = {"a": [1.0, 2.0]}
    log = Log(run)
    step(run, log, 10)
    assert not places or [row["place"] for row in rows(run, "groups.jsonl")] == 10 * places
    again = begun(run.folder, run.config)
    restore(again)
    assert again.state == run.state and (run.state["step"], run.state["samples_total"]) == (10, 80)
    assert (again.stream.cursor, again.estimator.counts) == (21, run.estimator.counts)
    assert [*Log(again).history] == [*log.history] == rows(run, "metrics.jsonl")[-3:]


@pytest.mark.parametrize("complete", [False, True])
def test_an_evaluation_after_the_checkpoint_is_kept_only_if_all_of_it_is_there(run, complete):
    """A kill may come while its answers are logged. Its last log is eval.jsonl."""
    answered(run, 0, a=[0.5])
    step(run, Log(run), 2)
    before = (run.folder / "answers.jsonl").read_bytes()
    answered(run, 2, a=[1])
    if complete:
        files.append(run.folder / "eval.jsonl", dict(step=2, data="a", avg=1.0))
    after = (run.folder / "answers.jsonl").read_bytes()
    again = begun(run.folder, run.config)
    restore(again)
    assert (run.folder / "answers.jsonl").read_bytes() == (after if complete else before)
    assert Log(again).evaluated == (2 if complete else None)


# ------------------------------------------------------------------------------ no verdict
@pytest.mark.parametrize("verdicts, said", [
    (dict(correct=5, no_box=3), ""), (dict(wrong=7, timeout=1), "no verdict 1"),
    (dict(correct=1, killed=2, raised=3, no_number=2), "no verdict 7")])
def test_the_line_of_a_step_says_how_many_answers_have_no_verdict(run, verdicts, said):
    logged = Log(run)
    run.state["step"] += 1
    logged.step(groups(3), metrics_of(verdicts=verdicts))
    assert "reward 0.50" in logged.bar.postfix
    assert logged.bar.postfix.partition("no gradient 0%")[2].strip() == said


@pytest.mark.parametrize("failed, avg, said", [
    ([], 0.5, ""), ([3], 0.5, "WARNING: no verdict on 1 of 4 answers  "),
    ([2, 3], 1.0, "WARNING: no verdict on 2 of 4 answers, 1 question left out"),
    ([0, 1, 2, 3], None, "WARNING: no verdict on 4 of 4 answers, 2 questions left out")])
def test_the_line_of_an_evaluation_says_how_many_answers_have_no_verdict(
        run, capsys, failed, avg, said):
    """Not even an evaluation without any verdict ends a run, or a resumed one."""
    problems = [Problem("?", "1", name, "a") for name in ("p", "q")]
    run.held_out, run.config = problems, replace(run.config, eval_k=2, eval_data="a")
    answers = [dict(data="a", id=name, sample=s, reward=1.0 - (name == "q"), tokens=3, text="",
                    status="correct" if name == "p" else "wrong", finish_reason="stop")
               for name in ("p", "q") for s in range(2)]
    answers[1]["reward"] = 1.0
    for i in failed:
        answers[i] |= dict(reward=None, status="raised", why="")
    for logged in (Log(run), Log(run)):
        logged.evaluation(answers)
        run.state["step"] += 1
        logged.step(groups(1), metrics_of())
        assert said in capsys.readouterr().out and rows(run, "eval.jsonl")[-1]["avg"] == avg
    rewards = [row["reward"] for row in rows(run, "answers.jsonl")[-2:]]
    assert rewards == [None if {0, 1} <= {*failed} else 1, None if {2, 3} <= {*failed} else 0]
    drawn = [drawn_rows(run.folder / f"{name}.jsonl") for name in ("metrics", "eval")]
    assert figure_of(dict(name="mine", config={}, metrics=drawn[0], evals=drawn[1])).axes


# ------------------------------------------------------------------------------ a tracker
def noted(run, *times: str) -> None:
    """The run has been started at these times."""
    starts = [dict(time=time) for time in times]
    files.write_json(run.folder / "config.json", dict(config={}, starts=starts))


def test_a_tracker_gets_a_resumed_run_together_and_a_new_one_of_its_name_apart(run, monkeypatch):
    """A colleague in the same project, or whoever has removed the folder, has the same name."""
    sent, first, later = [], "2026-11-29T07:30:59+00:00", "2026-11-30T07:30:59+00:00"
    package = SimpleNamespace(init=lambda **how: sent.append(
        (how["name"], how["resume"], os.environ["WANDB_RUN_ID"])))
    monkeypatch.setitem(sys.modules, "trackio", package)
    run.config = replace(run.config, report_to="trackio")
    for times in ((first,), (first, later), (later,)):  # new, resumed, and new once more
        monkeypatch.delenv("WANDB_RUN_ID", raising=False)
        noted(run, *times)
        Log(run)
    name, other = "mine-2026-11-29T073059", "mine-2026-11-30T073059"
    assert sent == [(name, "allow", name), (name, "allow", name), (other, "allow", other)]
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-user")
    Log(run)
    assert sent[-1] == (other, "allow", "of-the-user")


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_tracker_that_fails_costs_a_run_nothing(run, monkeypatch, capsys, broken):
    def fail(*_, **__):
        raise ConnectionError("no network\x07")

    sent = []
    package = SimpleNamespace(init=lambda **how: sent.append("init"), log=sent.append,
                              finish=lambda: sent.append("finish"))
    setattr(package, broken, fail)
    monkeypatch.setitem(sys.modules, "wandb", package)
    run.config = replace(run.config, report_to="wandb")
    noted(run, "2026-11-29T07:30:59+00:00")
    logged = Log(run)
    step(run, logged, 2)
    logged.close()
    said = capsys.readouterr().out
    assert f"WARNING: wandb.{broken} failed: no network\\x07" in said and "continue it" in said
    assert len(rows(run, "metrics.jsonl")) == 2
    calls = [call if isinstance(call, str) else call["train/step"] for call in sent]
    wanted = dict(init=["init"], log=[1, 2], finish=["finish"])
    assert calls == sum((wanted[name] for name in wanted if name != broken), [])


def test_a_tracker_that_is_not_installed_is_missed_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit, match="2"):
        parse(["--report-to", "wandb"])
    assert "--report-to needs the package wandb: install it" in capsys.readouterr().err


# ------------------------------------------------------------------------------ ended
def test_a_run_that_is_over_says_how_to_look_into_it_and_how_to_go_on(run, capsys):
    for step, more in ((30, 200), (150, 300)):
        run.state["step"], run.config = step, replace(run.config, steps=step)
        Log(run).close()
        answered(run, 0, a=[0.5])
        compared, look, go_on = capsys.readouterr().out.splitlines()
        assert f"eval.py --adapter {run.folder} --base evaluates the base model, too" in compared
        assert look.endswith(f"explore.py {run.folder}")
        flags = go_on.split("minirl.py ")[1].split()
        again = parse_flags(Config, flags, "minirl.py", "")
        assert (again.name, again.resume, again.steps) == ("mine", True, more)


def answered(run, step, status="wrong", **sets):
    """The answers of an evaluation: set -> the mean reward of each of its problems."""
    files.append(run.folder / "answers.jsonl", *(
        dict(step=step, data=name, id=(id := f"{name}/{i}"), reward=reward, right=0, k=4,
             problem=f"What is {id}?", status=status, text=f"step {step}\n\\boxed{{7}}")
        for name, rewards in sets.items() for i, reward in enumerate(rewards)))


THEN = [0, 0.25, 0.5, 1] * 10


@pytest.mark.parametrize("then, now, words", [
    (THEN, [1] * 40, "The model is better than before the training, because"),
    (THEN, THEN[::-1], "There is no clear difference from before the training, because"),
    (THEN[:20], [0] * 20, "looks worse than before the training, but little can be concluded"),
    ([None, *THEN], [1, *[0] * 40], "is worse than before the training, because"),
    ([1, *THEN], [None, *[1] * 40], "is better than before the training, because")])
def test_a_run_ends_with_what_it_has_gained_question_by_question(run, capsys, then, now, words):
    run.state["step"], run.config = 30, replace(run.config, steps=30)
    for step, rewards in ((0, then), (20, [0.5] * len(then)), (30, now)):  # None: no verdict
        answered(run, step, a=rewards)
    Log(run).close()
    said = capsys.readouterr().out
    change = bootstrap([[after - before for before, after in zip(then, now)
                         if None not in (before, after)]])
    numbers = [f"{100 * change[key]:+.1f}" for key in ("avg", "ci_low", "ci_high")]
    assert ("held-out accuracy, last evaluation minus first, question by question, in points: "
            "{} [{}, {}]".format(*numbers)) in said and words in said


def test_a_run_ends_with_an_answer_before_and_after_the_training(run, capsys):
    """They come from the log, so a resumed run has both, too."""
    run.state["step"], run.config = 30, replace(run.config, steps=30)
    for step, status, rewards in ((0, "wrong", [0, 0.25, 0]), (30, "correct", [0.5, 1, 0.5])):
        answered(run, step, status, a=rewards)
    answered(run, 0, b=[0])  # changes more, but both of its answers are wrong
    answered(run, 30, b=[1])
    Log(run).close()
    *_, problem, before, after = capsys.readouterr().out.split("adapter:")[0].splitlines()
    assert problem == "for example What is a/1?"
    assert before == "  before: step 0  \\boxed{7}  (wrong)"
    assert after == "  after:  step 30  \\boxed{7}  (correct)"


def test_what_was_gained_is_said_of_each_held_out_set_and_of_rewards_of_ones_own(run, capsys):
    """A line that a power cut has taken leaves a problem out."""
    run.state["step"], run.config = 30, replace(run.config, reward="mine.py:score")
    answered(run, 0, b=[1] * 40, a=[-2.5, 4])
    answered(run, 30, a=[1], b=[0.5] * 40)
    Log(run).close()
    said = capsys.readouterr().out
    assert "reward on a, last evaluation minus first, question by question: +3.5 (no" in said
    assert "reward on b, last evaluation minus first, question by question: -0.5 (no" in said
    assert "The model is worse than before the training, because the whole 95% interval" in said


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
    said = capsys.readouterr().out
    assert said.count("2 of 3 golds cannot be read by math-verify, such as '??'") == 2
    config = replace(config, reward="mine.py:score")  # decides alone what is right
    assert [*map(len, load_data(config, model, grader))] == [3, 3]
