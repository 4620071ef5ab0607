"""The logged metrics of a step are correct, by synthetic groups and by the log itself."""
import json
import math
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from ada_sampler import Group, Sample, set_advantages
from minirl import Row, objective, train_step
from models import make
from parts.config import OBJECTIVES
from parts.files import append
from parts.metrics import group_row, pieces, summarize, token_columns, warn, why_broken
from parts.policy import START_SCALE
from world import Words, ready, silent


def group(rewards_of_rounds, **changes):
    """A group whose rounds had these rewards, each answer as many tokens long as it is late."""
    pool = []
    for number, rewards in enumerate(rewards_of_rounds):
        for reward in rewards:
            rollout = SimpleNamespace(token_ids=[0] * (len(pool) + 1), finished=0,
                                      finish_reason="length" if len(pool) == 2 else "stop")
            pool.append(Sample(len(pool), number, rollout, reward, "correct" if reward else "wrong",
                               reward > 0.7))
    found = Group(0, None, pool, rounds=len(rewards_of_rounds), outcome="resolved")
    found.p_hat = fmean(s.correct for s in pool)
    return replace(found, **changes)


def test_the_first_round_is_not_the_whole_pool():
    """Truncated is not what was given up."""
    groups = [group([[1, 0], [1, 1]]), group([[0, 0], [1, 0], [1, 1]]), group([[1]])]
    for s, finished, reason in zip(groups[0].pool, (3, 9, 7), ("stop", "length", "abort")):
        s.rollout.finished, s.rollout.finish_reason = finished, reason
    row = json.loads(json.dumps(summarize(groups)))
    assert row["reward_first_round"] == fmean([0.5, 0, 1])  # every prompt counts once
    assert row["reward_pool"] == fmean([1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1])
    assert row["rounds_histogram"] == [1, 1, 1] and (row["samples"], row["prompts"]) == (11, 3)
    assert row["tokens"] == 10 + 21 + 1 and row["truncated"] == 2 / 11
    assert (row["response_length"], row["engine_steps"]) == (32 / 11, 9)


def test_parts_of_the_reward_are_means_of_first_rounds_in_which_every_prompt_counts_once():
    """An answer that lacks a part counts 0 in its mean."""
    groups = [group([[1, 1], [1]]), group([[0, 1]]), group([[0]])]
    given = [[dict(a=1, b=0), dict(a=0, b=0.5), dict(a=9, c=9)], [{}, dict(a=1)], [{}]]
    for one, parts in zip(groups, given):
        for s, part in zip(one.pool, parts):
            s.parts = {f"reward/{name}": value for name, value in part.items()}
    found = {name: value for name, value in summarize(groups).items() if "/" in name}
    assert found == {"reward/a": fmean([0.5, 0.5, 0]), "reward/b": fmean([0.25, 0, 0])}


def test_an_answer_without_a_verdict_counts_for_no_mean():
    row = summarize([group([[1, 0, math.nan], [1]]), group([[math.nan]])])
    assert (row["reward_first_round"], row["reward_pool"], row["samples"]) == (0.5, 2 / 3, 5)


def test_shares_of_prompts():
    names = ["resolved", "too few correct", "too few wrong", "too few wrong", "out of budget",
             "resolved", "resolved", "resolved"]
    groups = [group([[1, 0]], outcome=name) for name in names]
    groups[0].kept, groups[0].advantages = groups[0].pool, [0.5, 0.0]
    groups[0].weights = [1.0, 1.0]
    row = summarize(groups)
    assert row["unresolved"] == 4 / 8 and row["unresolved_too_few_correct"] == 1 / 8
    assert row["unresolved_too_few_wrong"] == 2 / 8
    assert row["zero_signal"] == 7 / 8 and row["kept"] == 2 and row["reward_kept"] == 0.5
    assert row["verdicts"] == dict(correct=8, wrong=8)


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
    assert all(len(s.get("agrees", s["ids"])) == s["length"] for s in trained(rows))


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
        assert [(s["text"], s["length"]) for s in row["pool"]] == [
            (s.rollout.text, len(s.rollout.token_ids)) for s in group.pool]
        submits = [s["submit"] for s in row["pool"]]
        assert submits == sorted(submits) and len({*submits}) == row["pool"][-1]["round"] + 1
        assert all(s["submit"] < s["finish"] for s in row["pool"])
    for s in trained(rows):
        names = ("ids", "tokens", "mu", "theta", "old", "mask", "weight", "entropy", "agrees")
        assert {len(s[name]) for name in names if name in s} == {s["length"]}
    assert all("theta" in s for row in rows for s in row["pool"] if s.get("coefficient"))


def test_an_update_that_is_not_finite_is_recorded_as_null(tmp_path):
    broken = torch.tensor([math.nan, math.inf, 0.25])
    row = Row(ids=[1, 2, 3, 4], prompt_length=1, mu_logprobs=[-1.0, -math.inf, -2.0],
              coefficient=1.0, old_logprobs=torch.zeros(3), theta_logprobs=broken,
              weight=broken, entropy=broken, mask=torch.tensor([1.0, 0.0, 1.0]))
    columns = token_columns(row, row.ids[1:], Words())
    parts = {"reward": math.inf, "reward/a": -math.inf}
    append(tmp_path / "log", dict(step=1, baseline=math.nan, pool=[columns | parts]))
    line = json.loads((tmp_path / "log").read_text(), parse_constant=pytest.fail)
    (found,) = line["pool"]
    assert line["baseline"] is found["reward"] is found["reward/a"] is None
    assert found["theta"] == found["weight"] == found["entropy"] == [None, None, 0.25]
    assert found["mu"] == [-1.0, None, -2.0] and found["mask"] == "101"


# ------------------------------------------------------------------------------ tokens as text
def spaced():
    """A tokenizer whose tokens hold the space before a word, and which drops the first one."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"▁so": 0, "▁is": 1, "▁it": 2, ".": 3, "?": 4}
    inner = Tokenizer(models.WordLevel(words, unk_token="?"))
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("tokenizer, ids", [
    (spaced, [0, 1, 2, 3, 1, 1]), (spaced, [3]), (make.build_tokenizer, [*range(40, 347)])])
def test_the_pieces_of_an_answer_make_the_answer(tokenizer, ids):
    made = tokenizer()
    found = pieces(ids, made)
    assert len(found) == len(ids) and "".join(found) == made.decode(ids)


# ------------------------------------------------------------------------------ what goes wrong
@pytest.mark.parametrize("status, failed, warned", [
    ("timeout", 2, False), ("timeout", 3, True), ("unparseable", 100, False)])
def test_answers_without_a_verdict_are_reported(capsys, status, failed, warned):
    """The warning shows one, without the characters with which it could control a terminal."""
    rollout = SimpleNamespace(text="so \\boxed{3}\x07", finish_reason="stop", token_ids=[7],
                              finished=0)
    statuses = [status] * failed + ["wrong"] * (100 - failed)
    pool = [Sample(i, 0, rollout, 0, status, False, "why") for i, status in enumerate(statuses)]
    groups = [Group(0, SimpleNamespace(answer="12\x1b[2J"), pool, outcome="resolved")]
    warn(summarize(groups) | dict(step=2, loss=0.5), groups, None)
    said = capsys.readouterr().out
    assert all(line.isprintable() for line in said.splitlines())
    assert ("3 of 100 answers got no verdict" in said) == warned == bool(said)


@pytest.mark.parametrize("scale, loss, ends", [
    (None, math.nan, True), (0.5, 1.0, True), (START_SCALE, math.nan, True),
    (START_SCALE, 1.0, False)])
def test_only_broken_steps_in_a_row_end_a_run(scale, loss, ends):
    """An overflow of float16, which lowers the scale, does not. One of no scale or of loss does."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
    history, said = [], []
    for step, skipped in enumerate([1, 1, 0, 1, 1, 1], 1):
        history.append(dict(step=step, skipped_steps=skipped, loss=loss))
        said.append(why_broken(history, scaler))
    assert said[:5] == [""] * 5 and bool(said[5]) == ends
    assert not ends or "3 steps in a row" in said[5] and "up to step 6" in said[5]
