"""What surrounds the loop: logging, saving, resuming, ending; the engine is a stand-in."""
import copy
import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch

from ada_sampler import Group, Sample
from parts import checkpoint, files, held_out
from parts import run as running
from parts.config import Config, parse, parse_flags
from parts.data import Stream, count_trained
from parts.engine import Rollout
from parts.run import Estimator, Run
from parts.stop import Interrupted, Stop
from helpers import lines
from test_checkpoint import learn, taught


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose engine does nothing; model, optimizer and checkpoints are real."""
    monkeypatch.setattr(running, "draw_run", lambda folder: drawn.append(folder))
    monkeypatch.setattr(running, "watch", lambda *_: "")
    monkeypatch.setenv("VIRTUAL_ENV", "active")
    drawn, closed = [], []
    config = Config(name="mine", steps=30, checkpoint_every=10, lr=0.1, sampler="ada-est")
    made = Run(
        folder=tmp_path, lock=None, config=config,
        engine=SimpleNamespace(close=lambda: closed.append(True), tokenizer=None), grader=None,
        held_out=[],
        stream=Stream(list(range(50)), seed=0), estimator=Estimator(), probe=None,
        **dict(zip(("policy", "optimizer", "schedule"), taught(config, 0))))
    made.drawn, made.closed = drawn, closed
    return made


def rows(run, name):
    return lines(run.folder / name)


def sample(text, status="wrong", reward=0.0):
    return Sample(0, 0, Rollout([1, 2], [-0.1, -0.2], "stop", text), reward, status)


def group(name, kept, pool, baseline=0.25):
    problem = SimpleNamespace(prompt=f"<{name}>", answer=f"gold {name}", id=name, prompt_ids=[7, 8])
    return Group(0, problem, pool, outcome="resolved", baseline=baseline,
                 kept=[s for s, _ in kept], advantages=[a for _, a in kept],
                 weights=[1.0] * len(kept))


def metrics_of(**changes):
    return dict(samples=8, tokens=100, seconds=2.0, skipped_steps=0, loss=0.5) | changes


# ------------------------------------------------------------------------------ the logs
def test_totals_add_up_over_the_steps(run):
    for step in (1, 2, 3):
        running.log(step, [], metrics_of(samples=step, tokens=10 * step, seconds=0.5), run)
    totals = [[row[key] for key in ("step", "samples_total", "tokens_total", "seconds_total")]
              for row in rows(run, "metrics.jsonl")]
    assert totals == [[1, 1, 10, 0.5], [2, 3, 30, 1.0], [3, 6, 60, 1.5]]
    assert run.state["samples_total"] == 6 and run.state["tokens_total"] == 60


@pytest.mark.parametrize("count, places", [("0", []), ("2", [0, 1]), ("all", [0, 1, 2])])
def test_so_many_prompts_of_a_step_are_recorded_and_not_more(run, count, places):
    run.config.log_groups = count
    groups = [Group(i, SimpleNamespace(prompt=f"<{i}>", answer="7", id=str(i))) for i in range(3)]
    running.log(5, groups, metrics_of(), run)
    found = rows(run, "groups.jsonl") if places else []
    assert [(row["step"], row["place"], row["prompt"], row["gold"]) for row in found] == [
        (5, i, f"<{i}>", "7") for i in places]


def test_every_held_out_set_is_logged_with_what_the_training_has_cost(run, capsys):
    run.state |= dict(step=20, samples_total=500, tokens_total=9000, seconds_total=12.0)
    easy = dict(avg=0.5, ci_low=0.4, ci_high=0.6, k=8)
    held_out.record_evaluation(dict(easy=easy, hard=easy | dict(avg=0.25)), run)
    first, second = rows(run, "eval.jsonl")
    assert first == dict(step=20, samples_total=500, tokens_total=9000, seconds_total=12.0,
                         data="easy", temperature=1.0, **easy)
    assert (second["data"], second["avg"], run.state["evaluated"]) == ("hard", 0.25, 20)
    lines = capsys.readouterr().out.splitlines()
    assert "avg@8 on easy  50.0% [40.0%, 60.0%]" in lines[0] and "on hard  25.0%" in lines[1]
    assert running.accuracy(run, ".0%") == "easy 50%, hard 25%"
    again = fresh(run)
    running.resume(again, None)
    assert again.state["accuracy"] == {} and running.accuracy(again, ".0%") == "not known yet"


def test_of_a_reward_of_ones_own_those_above_the_threshold_are_counted_as_right(run):
    run.held_out = [SimpleNamespace(id="a", level="", problem="Q", answer="7")]
    run.config.eval_k = 2
    held_out.record_answers([dict(reward=reward, status=status, text="") for reward, status in (
        (0.5, "wrong"), (0.9, "correct"))], run)
    assert [row["right"] for row in rows(run, "answers.jsonl")] == [1]


def answer(step, name, level, right, text):
    status = "correct" if "good" in text else "wrong"
    return dict(step=step, id=name, level=level, problem=f"Q {name}", right=right, k=4, text=text,
                status=status)


def test_the_change_is_told_by_level_and_by_the_answers_that_were_mended_most(tmp_path, capsys):
    log = tmp_path / "answers.jsonl"
    files.append(log, answer(0, "a", "easy", 1, "bad a"), answer(0, "b", "hard", 0, "bad b"),
                 answer(0, "c", "hard", 0, "bad c"))
    held_out.show_change(log)
    assert capsys.readouterr().out == ""  # one evaluation: no change yet
    files.append(log, answer(8, "a", "easy", 1, "other"), answer(16, "a", "easy", 2, "good a"),
                 answer(16, "b", "hard", 4, "1+1=2\ngood b"),
                 answer(16, "c", "hard", 0, "bad still"))
    held_out.show_change(log)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said == ["right answers by level of difficulty, at step 0 and at step 16:",
                    "easy 25% 50%", "hard 0% 50%", "Q b", "before: bad b", "after: 1+1=2",
                    "good b", "Q a", "before: bad a", "after: good a"]


def test_curves_are_drawn_with_every_checkpoint_and_not_in_between(run):
    run.bar = SimpleNamespace(set_postfix_str=lambda text, refresh: shown.append(text))
    shown, metrics = [], dict(reward_first_round=0.25, samples=8, zero_signal=0.5)
    for step in (9, 10, 11):
        run.state["step"], run.saved = step, 10
        running.show(metrics, run)
    assert run.drawn == [run.folder] and "reward 0.25" in shown[0] and "no signal 50%" in shown[0]
    run.state["step"] = run.saved = run.config.steps  # that is for `finish`, with the evaluation
    running.show(metrics, run)
    assert len(run.drawn) == 1


# ------------------------------------------------------------------------------ after a step
@pytest.mark.parametrize("step, stop, saved", [
    (9, False, False), (10, False, True), (30, False, True), (33, False, True), (9, True, True)])
def test_a_checkpoint_is_written_when_it_is_due(run, monkeypatch, step, stop, saved):
    monkeypatch.setattr(Stop, "requested", stop)
    run.config.steps = 33  # saved too, although it is none of every tenth
    running.record(step, [], metrics_of(), run)
    assert run.state["step"] == step
    found = [checkpoint.step_of(path) for path in checkpoint.complete(run.folder)]
    assert found == [step] * saved and run.saved == step * saved


@pytest.mark.parametrize("step", [0, 3])
def test_a_run_that_gives_up_loses_nothing_and_leaves_its_curves(run, step):
    run.state["step"] = step
    with pytest.raises(SystemExit, match="no hope"):
        running.give_up(run, "no hope")
    assert (run.saved, run.drawn, run.closed) == (step, [run.folder] * bool(step), [True])
    assert len(checkpoint.complete(run.folder)) == bool(step)


def test_a_step_that_ends_the_run_is_logged_and_saved(run, monkeypatch):
    monkeypatch.setattr(running, "watch", lambda *_: "it is broken")
    with pytest.raises(SystemExit, match="it is broken"):
        running.record(6, [group("one", [(sample("a"), 1.0)], [])], metrics_of(), run)
    assert rows(run, "metrics.jsonl")[-1]["step"] == run.saved == 6


# ------------------------------------------------------------------------------ nothing is lost
PHASES = ("sampling", "update", "sync")


def one_step(run, fails_in="", error=None):
    """As `train_step` does it: eight problems are drawn, and the adapter learns from them."""
    with running.phase(run, "sampling", {}):
        run.stream.take(8)
        if fails_in == "sampling":
            raise error
        run.estimator.counts[f"at {run.stream.cursor}"] = [8.0, 1.0]
    with running.phase(run, "update", {}):
        learn(run.policy, run.optimizer, run.schedule)
        if fails_in == "update":
            raise error
    with running.phase(run, "sync", {}):
        if fails_in == "sync":
            raise error


def all_of(run):
    """What a step changes, to be compared."""
    adapter = [p.detach().clone() for p in run.policy.parameters()]
    optimizer = copy.deepcopy(run.optimizer.state_dict()["state"])
    moments = [x for state in optimizer.values() for x in state.values()]
    return (run.stream.cursor, run.estimator.state_dict(), run.schedule.state_dict(),
            [x.tolist() for x in adapter + moments])


def test_a_step_that_ends_well_keeps_what_it_has_changed(run):
    before = all_of(run)
    one_step(run)
    assert all(a != b for a, b in zip(all_of(run), before)) and not list(run.folder.iterdir())


@pytest.mark.parametrize("phase", PHASES)
def test_a_step_that_is_interrupted_or_fails_never_happened(run, phase):
    one_step(run)
    before = all_of(run)
    with pytest.raises(Interrupted):
        one_step(run, phase, Interrupted())
    assert all_of(run) == before and not checkpoint.complete(run.folder)
    run.state["step"] = 7
    with pytest.raises(SystemExit) as ended:
        one_step(run, phase, ValueError("no block \ud800 is free\x1b[2J"))
    assert all_of(run) == before
    sentence = str(ended.value)
    assert f"The {phase} failed: ValueError: no block" in sentence and "\x1b" not in sentence
    assert "up to step 7 is saved: continue with --resume" in sentence
    assert "in one_step" in (run.folder / "error.txt").read_text()
    again = fresh(run)
    running.resume(again, checkpoint.newest_sound(run.folder))
    assert again.state["step"] == 7 and all_of(again) == before


def test_out_of_memory_in_an_update_names_the_flag_to_lower(run):
    run.state["step"] = 7
    said = r"Out of memory in the update: lower --micro-tokens \(now \d+\).*up to step 7 is saved"
    with pytest.raises(SystemExit, match=said + ": continue with --resume"):
        one_step(run, "update", torch.OutOfMemoryError("CUDA out of memory"))


def test_the_probes_own_sentence_is_kept_and_what_was_learnt_before_is_saved(run):
    run.state["step"] = 7
    with pytest.raises(SystemExit, match="^Engine and trainer disagree; everything up to step 7"):
        one_step(run, "sync", SystemExit("Engine and trainer disagree."))
    assert not (run.folder / "error.txt").exists()


def test_a_failure_before_the_first_step_leaves_nothing_that_a_new_start_would_find(run):
    """A checkpoint of step 0 would: of the old seed's adapter, and of an evaluation now gone."""
    with pytest.raises(SystemExit, match="nothing was saved yet: start again"), \
            running.phase(run, "evaluation", {}):
        raise ValueError("no block is free")
    assert not checkpoint.complete(run.folder) and (run.folder / "error.txt").exists()


# ------------------------------------------------------------------------------ the data
def test_both_sets_are_asked_in_the_same_words():
    """Training and held-out prompts differ in the problem alone: one template for both."""
    from models import make

    config = Config(data="builtin", eval_data="builtin", template="chat", max_prompt_tokens=256,
                    eval_questions=5)
    train, held_out = running.load_data(config, make.build_tokenizer(), GRADER)
    around = {p.prompt.replace(p.problem, "...") for p in (*train, *held_out)}
    assert len(held_out) == 5 and around == {"<|user|>...<|assistant|>"}


# ------------------------------------------------------------------------------ resumed
def fresh(run):
    """The same run as a new process begins it."""
    policy, optimizer, schedule = taught(run.config, 0)
    return Run(folder=run.folder, lock=None, config=run.config, engine=None, policy=policy,
               optimizer=optimizer, schedule=schedule, grader=None, held_out=[], probe=None,
               stream=Stream(list(range(50)), seed=0), estimator=Estimator())


def test_a_resumed_run_knows_all_that_decides_what_comes_next(run, capsys):
    run.stream.take(21)
    run.estimator.counts = {"a": [1.0, 2.0]}
    held_out.record_evaluation(dict(builtin=dict(avg=0.1, ci_low=0.0, ci_high=0.2)), run)
    for step in range(1, 11):
        running.record(step, [group("one", [], [sample("a")])], metrics_of(), run)
    held_out.record_evaluation(dict(builtin=dict(avg=0.5, ci_low=0.4, ci_high=0.6)), run)
    for step in (11, 12):  # after the checkpoint: they will be done again
        run.stream.take(3)
        running.record(step, [group("one", [], [sample("a")])], metrics_of(), run)
    run.state["step"] = 12
    held_out.record_evaluation(dict(builtin=dict(avg=0.9, ci_low=0.8, ci_high=1.0)), run)

    again = fresh(run)
    running.resume(again, checkpoint.newest_sound(run.folder))
    assert "continuing after step 10" in capsys.readouterr().out
    assert (again.state["step"], again.saved, again.stream.cursor) == (10, 10, 21)
    assert again.estimator.state_dict() == run.estimator.state_dict()
    assert again.state["samples_total"] == 80
    assert (again.state["evaluated"], again.state["accuracy"]) == (10, dict(builtin=0.5))
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == list(range(1, 11))
    assert [row["step"] for row in rows(run, "groups.jsonl")] == list(range(1, 11))
    assert [row["step"] for row in rows(run, "eval.jsonl")] == [0, 10]
    assert list(again.steps()) == list(range(11, 31))


def test_config_json_says_after_which_step_each_start_went_on(run, monkeypatch):
    problem = running.Problem("1+1=?", "2", "a", "s")
    found = SimpleNamespace(folder=run.folder, lock=None, path="any", tokenizer=None,
                            train=[problem], held_out=[], inputs={}, newest=None)
    for name, instead in dict(
            before_the_engine=lambda *_: found, start_probe=lambda *_: None,
            start_engine=lambda *_: SimpleNamespace(on_cpu=True),
            load_policy=lambda *_, **__: taught(run.config, 0)[0]).items():
        monkeypatch.setattr(running, name, instead)
    running.prepare(run.config, None)
    running.record(10, [], metrics_of(), run)
    found.newest = checkpoint.newest_sound(run.folder)
    assert running.prepare(run.config, None).state["step"] == 10
    starts = json.loads((run.folder / "config.json").read_text())["starts"]
    assert [start.get("after_step", 0) for start in starts] == [0, 10]
    assert count_trained(run.folder, [problem]) == 1, "an evaluation will know it"


def test_an_evaluation_that_a_crash_has_cut_short_is_not_taken_for_done(run):
    running.record(10, [], metrics_of(), run)
    again = fresh(run)
    running.resume(again, checkpoint.newest_sound(run.folder))
    assert again.state["evaluated"] == -1


def test_without_a_checkpoint_a_resumed_run_begins_at_the_beginning(run):
    for name in running.LOGS:
        files.append(run.folder / name, dict(step=0, avg=0.5), dict(step=1, avg=0.5))
    running.resume(run, None)
    assert (run.state["step"], run.state["evaluated"], run.stream.cursor) == (0, -1, 0)
    assert not any(rows(run, name) for name in running.LOGS)


# ------------------------------------------------------------------------------ ended
@pytest.mark.parametrize("step, evaluated, saved_before, saved", [
    (30, 30, 0, True), (30, 30, 30, False), (30, 20, 30, False), (12, 12, 0, True),
    (12, 12, 12, False), (0, 0, 0, False)])
def test_the_end_saves_draws_and_says_how_to_go_on(
        run, monkeypatch, capsys, step, evaluated, saved_before, saved):
    """Whoever waits for the program sees by its code whether all steps are done and evaluated."""
    monkeypatch.setattr(Stop, "requested", signal.SIGINT)
    run.state |= dict(step=step, evaluated=evaluated)
    run.saved, code = saved_before, None
    try:
        running.finish(run)
    except SystemExit as end:
        code = end.code
    assert bool(checkpoint.complete(run.folder)) == saved and bool(run.drawn) == bool(step)
    over = evaluated == 30
    assert run.closed == [True] and code == (None if over else 130)
    out = capsys.readouterr().out
    assert ("continue with: python minirl.py --name mine --resume" in out) == (not over)
    assert ("next:" in out) == over


def test_a_run_that_is_over_says_how_to_look_into_it_and_how_to_go_on(run, capsys):
    for step, more in ((30, 200), (150, 300)):
        run.state["step"] = run.state["evaluated"] = run.config.steps = run.saved = step
        running.finish(run)
        *_, look, go_on = capsys.readouterr().out.splitlines()
        assert look.endswith(f"explore.py {run.folder}")
        flags = go_on.split("minirl.py ")[1].split()
        again = parse_flags(Config, flags, "minirl.py", "")
        assert (again.name, again.resume, again.steps) == ("mine", True, more)


# ------------------------------------------------------------------ before the first step
def test_every_phase_of_every_step_has_its_own_random_state():
    def drawn(*parts):
        rng = running.reseed(*parts)
        return rng.random(), torch.rand(1).item(), numpy.random.rand()

    first = drawn(0, 1, "training")
    assert drawn(0, 1, "training") == first
    for other in ((1, 1, "training"), (0, 2, "training"), (0, 1, "evaluation")):
        assert all(a != b for a, b in zip(drawn(*other), first))


def test_the_learning_rate_warms_up_and_stays(run):
    config = Config(lr=0.1, warmup_steps=4)
    optimizer, schedule = running.make_optimizer(run.policy, config)
    seen = []
    for _ in range(6):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert optimizer.param_groups[0]["weight_decay"] == 0
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in run.policy.parameters() if p.requires_grad}
    at_once, _ = running.make_optimizer(run.policy, Config(lr=0.1, warmup_steps=0))
    assert at_once.param_groups[0]["lr"] == 0.1


GRADER = SimpleNamespace(check_golds=lambda golds: [True] * len(golds))
COLUMNS = dict(columns="frage,gold", template="chat", max_prompt_tokens=200,
               eval_questions=5)


def test_odd_golds_are_not_trained_on_and_stay_among_the_held_out(tmp_path, capsys):
    """The columns that --columns names are read in both files."""
    from models import make

    for name in ("mine", "other"):
        rows = [dict(frage=f"Of {name}, {gold}", gold=gold) for gold in ("7", "??", "?")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    grader = SimpleNamespace(check_golds=lambda golds: [gold.isdigit() for gold in golds])
    config = Config(data=str(tmp_path / "mine.jsonl"), eval_data=str(tmp_path / "other.jsonl"),
                    **COLUMNS)
    train, held_out = running.load_data(config, make.build_tokenizer(), grader)
    assert [p.answer for p in train] == ["7"] and len(held_out) == 3
    said = capsys.readouterr().out
    assert all(f"2 of 3 golds to {use} on cannot" in said for use in ("train", "evaluate"))


@pytest.mark.parametrize("max_tokens, context", [(1, 12), (2, 12), (5, 15)])
def test_the_probe_can_score_the_longest_prompt_with_its_response(monkeypatch, max_tokens, context):
    """A prompt, a response of at least one token, and what vLLM adds to what it scores."""
    started = {}
    monkeypatch.setattr(running, "Engine", lambda path, **options: started.update(options))
    monkeypatch.setattr(running, "stop_ids", lambda tokenizer: [0])
    monkeypatch.setattr(running, "is_supported", lambda path: False)
    config = replace(parse([]), max_prompt_tokens=10, max_tokens=max_tokens)
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda ids: ["<eos>"])
    running.start_engine(config, "model", tokenizer)
    assert started["max_model_len"] == context
