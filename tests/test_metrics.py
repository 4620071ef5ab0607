"""The logged metrics of a step are correct, by synthetic groups and by the log itself."""
import json
import math
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from ada_sampler import Group, Sample, set_advantages
from minirl import objective, train_step
from models import make
from parts.config import OBJECTIVES
from parts.metrics import group_row, pieces, summarize, warn, why_broken
from parts.policy import START_SCALE
from world import Words, ready, silent


def group(rewards_of_rounds, **changes):
    """A group whose rounds had these rewards, each answer as many tokens long as it is late."""
    pool, status = [], {1: "correct", 0: "wrong"}
    for number, rewards in enumerate(rewards_of_rounds):
        for reward in rewards:
            rollout = SimpleNamespace(token_ids=[0] * (len(pool) + 1), finished=0,
                                      finish_reason="length" if len(pool) == 2 else "stop")
            pool.append(Sample(len(pool), number, rollout, reward, status.get(reward, "raised")))
    return replace(Group(0, None, pool, rounds=len(rewards_of_rounds)), **changes)


def test_a_step_in_numbers_by_hand():
    """Every prompt counts once in the means of first rounds. An answer without a verdict counts
    for no mean, and one that lacks a part of the reward counts 0. Aborted is not truncated."""
    resolved = group([[1, 0], [1, 1]], outcome="resolved", advantages=[0.5, 0], weights=[1, 1])
    silent = group([[0, math.nan], [1, 0], [1, 1]], outcome="too few wrong", advantages=[0],
                   weights=[1])
    resolved.kept, silent.kept = resolved.pool[:2], silent.pool[2:3]
    for s, finished, reason in zip(resolved.pool, (3, 9, 7), ("stop", "length", "abort")):
        s.rollout.finished, s.rollout.finish_reason = finished, reason
    last = group([[0]], outcome="too few wrong")
    groups = [resolved, silent, group([[1]], outcome="too few correct"),
              group([[math.nan]], outcome="out of budget"), last]
    for s, parts in zip((*resolved.pool, silent.pool[1], last.pool[0]), (
            dict(a=1, b=0), dict(a=0, b=0.5), dict(a=9, c=9), {}, dict(a=7), dict(a=1))):
        s.parts = {f"reward/{name}": value for name, value in parts.items()}
    assert json.loads(json.dumps(summarize(groups))) == {
        "prompts": 5, "samples": 13, "tokens": 10 + 21 + 3, "engine_steps": 9, "kept": 3,
        "rounds_histogram": [3, 1, 1], "verdicts": dict(correct=7, raised=2, wrong=4),
        "unresolved": 4 / 5, "unresolved_too_few_correct": 1 / 5, "unresolved_too_few_wrong": 2 / 5,
        "reward_first_round": fmean([0.5, 0, 1, 0]), "reward_pool": 7 / 11, "reward_kept": 2 / 3,
        "response_length": 34 / 13, "truncated": 2 / 13, "zero_signal": 4 / 5,
        "reward/a": fmean([0.5, 0, 0, 1]), "reward/b": fmean([0.25, 0, 0, 0])}
    assert summarize([silent])["rounds_histogram"] == [0, 0, 1]


# ------------------------------------------------------------------------------ groups.jsonl
def stepped(**settings):
    """One real step in the small world: (config, groups, rows of the log, metrics)."""
    run = ready(**settings)
    groups, metrics = train_step(1, run)
    lines = [json.dumps(group_row(1, group, Words())) for group in groups]
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    return run.config, groups, rows, metrics


def trained(rows):
    return [s for row in rows for s in row["pool"] if "theta" in s]


FAR = dict(mini_batches=3, lr=0.1, warmup_steps=0)  # so far that tokens are stopped
SAMPLING = [
    *(dict(sampler=name) for name in ("uniform", "ada-pos", "ada-est", "gvm")),
    dict(sampler="dapo", batch_prompts=5, seed=1), dict(weighting="log"),
    dict(advantage="leave-one-out", drop_unresolved=True), dict(judge=silent)]  # without signal
WEIGHTS = [dict(sampler="ada-est"), dict(weighting="log")]
UPDATING = [
    *(dict(objective=name) for name in OBJECTIVES), dict(importance="none"),
    dict(importance="staleness", weight_cap=1.0), dict(clip=False),
    dict(length_norm="response"), dict(length_norm="batch"), dict(replay="r2"),
    dict(replay="r3")]


def words(settings: dict) -> str:
    return " ".join(f"{name}={getattr(value, '__name__', value)}"
                    for name, value in settings.items()) or "default"


@pytest.mark.parametrize("settings", WEIGHTS + [FAR | more for more in UPDATING], ids=words)
def test_mask_weight_and_loss_follow_from_the_log_alone(settings):
    config, groups, rows, metrics = stepped(mixture="replay" in settings, **settings)
    whole, size = 0.0, 0.0
    for s in trained(rows):
        names = ("ids", "tokens", "mu", "theta", "old", "mask", "weight", "entropy", "agrees")
        assert {len(s[name]) for name in names if name in s} == {s["length"]}
        columns = [s["theta"], s.get("old", s["theta"]), s["mu"], [s["coefficient"]] * s["length"],
                   s["weight"], list(map(int, s["mask"]))]
        theta, old, mu, A, weight, mask = (
            torch.tensor(column, dtype=torch.float64) for column in columns)
        term, mask_again, weight_again = objective(theta, old, mu, A, config)
        assert torch.equal(mask_again, mask)
        torch.testing.assert_close(weight_again, weight, rtol=1e-6, atol=1e-7)
        whole += s["scale"] * term.sum().item()
        size += s["scale"] * term.abs().sum().item()
    minis = metrics["optimizer_steps"]
    assert {s["mini"] for s in trained(rows)} == set(range(minis)) and minis == config.mini_batches
    assert abs(metrics["loss"] + whole / minis) < 1e-6 * size
    if settings.get("mini_batches") and config.clip:
        masks = config.objective != "cispo"  # its weights are bounded, and `cut_off` counts them
        assert any("0" in s["mask"] for s in trained(rows)) == masks
    assert all(("agrees" in s) == ("replay" in settings) for s in trained(rows))
    shares = {x for s in trained(rows) for x in s.get("agrees", [])}  # of the two layers of experts
    assert shares == ({0, 0.5, 1} if "replay" in settings else set())


@pytest.mark.parametrize("settings", SAMPLING, ids=words)
def test_the_log_is_enough_to_keep_and_to_compare_anew(settings):
    """What a counterfactual sampler needs: rewards in the order of drawing, with their rounds."""
    config, groups, rows, _ = stepped(**settings)
    assert any(row["refill"] for row in rows) == (config.sampler == "dapo")
    for group, row in zip(groups, rows):
        pool = [Sample(i, s["round"], reward=s["reward"], correct=s["reward"] > config.threshold)
                for i, s in enumerate(row["pool"])]
        again = Group(row["place"], None, pool, outcome=row["outcome"])
        set_advantages(again, config)
        logged = [(i, s["coefficient"]) for i, s in enumerate(row["pool"]) if s["kept"]]
        assert logged == [(s.index, coefficient) for s, coefficient in again.rows()]
        assert [s["advantage"] for s in row["pool"] if s["kept"]] == again.advantages
        for one in (again, group):
            assert (row["baseline"], row["p_hat"], row["outcome"]) == (
                one.baseline, one.p_hat, one.outcome)
        assert {s["reason"] for s in row["pool"]} == {"because"}  # the verifier's
        assert all(s["reward/half"] == s["reward"] / 2 == s["reward/rest"] for s in row["pool"])
        one = group.problem
        assert [row[key] for key in ("step", "place", "id", "problem", "prompt", "gold")] == [
            1, group.index, one.id, f"problem {one.id}", f"<{one.id}>", ""]
        for s, one in zip(group.pool, row["pool"], strict=True):
            wanted = dict(text=s.rollout.text, length=len(s.rollout.token_ids), status=s.status,
                          finish_reason=s.rollout.finish_reason, submit=s.rollout.submitted)
            if "theta" in one:
                wanted |= dict(ids=s.rollout.token_ids, mini=0,
                               tokens=[f"<{i}>" for i in s.rollout.token_ids],
                               mu=[round(x, 7) for x in s.rollout.logprobs],
                               entropy=[round(x, 4) for x in s.row.entropy.tolist()])
            assert one == one | wanted
        submits = [s["submit"] for s in row["pool"]]
        assert submits == sorted(submits) and len({*submits}) == row["pool"][-1]["round"] + 1
        assert all(s["finish"] - s["submit"] == s["length"] for s in row["pool"])
    assert all("theta" in s for row in rows for s in row["pool"] if s.get("coefficient"))


# ------------------------------------------------------------------------------ tokens as text
class Spaced:
    """A tokenizer that puts a space before each word but the first."""

    def decode(self, ids) -> str:
        return " ".join("so is it".split()[i] for i in ids)


def test_the_pieces_of_an_answer_make_the_answer():
    assert pieces([0, 1, 2, 1, 1], Spaced()) == ["so", " is", " it", " is", " is"]
    made, ids = make.build_tokenizer(), [*range(40, 347)]
    found = pieces(ids, made)
    assert len(found) == len(ids) and "".join(found) == made.decode(ids)


# ------------------------------------------------------------------------------ what goes wrong
@pytest.mark.parametrize("status, failed, warned", [
    ("timeout", 2, False), ("timeout", 3, True), ("unparseable", 100, False)])
def test_answers_without_a_verdict_are_reported(capsys, status, failed, warned):
    """The warning shows the end of one, without characters that could control a terminal."""
    statuses = [status] * failed + ["wrong"] * (100 - failed)
    pool = [Sample(i, 0, SimpleNamespace(text="so " * 40 + "\\boxed{3}\x07"), 0, status,
                   why="why\x1b[2J") for i, status in enumerate(statuses)]
    warn(dict(step=2, loss=0.5), [Group(0, None, pool[:50]), Group(1, None, pool[50:])])
    text = ("so " * 40)[-110:] + "\\boxed{3}\x07"
    assert capsys.readouterr().out == warned * (
        f"WARNING, step 2: 3 of 100 answers got no verdict, such as {text!r}: "
        "timeout, why\\x1b[2J\n")


@pytest.mark.parametrize("step, first", [
    (1, f", and the first is 'so \\x07{996 * '.'}' (gold '12\\x1b[2J')"), (2, "")])
def test_a_step_without_a_gradient_says_what_the_answers_were(capsys, step, first):
    rollout = SimpleNamespace(text="so \x07" + 1000 * ".")
    pool = [Sample(i, 0, rollout, 0, "no_box", i < 1) for i in range(8)]
    row = dict(step=step, truncated=0.25, verdicts=dict(no_box=4, wrong=4))
    warn(row, [Group(0, SimpleNamespace(answer="12\x1b[2J"), pool)])
    assert capsys.readouterr().out == (
        f"WARNING, step {step}: no prompt has a gradient. Of 8 answers 25% are truncated, 50% have "
        f"no box, and 12% are right{first}: docs/learning.md says what helps\n")


@pytest.mark.parametrize("scale, loss, ends", [
    (None, math.nan, True), (0.5, 1.0, True), (START_SCALE, math.nan, True),
    (START_SCALE, 1.0, False)])
def test_only_broken_steps_in_a_row_end_a_run(capsys, scale, loss, ends):
    """An overflow of float16, which lowers the scale, does not. One of no scale or of loss does."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
    history, said = [], []
    for step, skipped in enumerate([1, 1, 0, 1, 1, 1], 1):
        history.append(dict(step=step, skipped_steps=skipped, loss=loss))
        said.append(why_broken(history, scaler))
    assert said == [""] * 5 + ends * [
        "3 steps in a row had a gradient that is not finite; everything up to step 6 is saved: "
        "continue with --resume and a lower --lr."] + (not ends) * [""]
    why = "not finite" if ends else "too large for float16"
    assert capsys.readouterr().out == "".join(
        f"step {step}: 1 optimizer step(s) skipped, because the gradient is {why}\n"
        for step in (1, 2, 4, 5, 6))
