"""The logged metrics of a step are correct, by synthetic groups and by the log itself."""
import json
import math
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from ada_sampler import RULES, Group, Sample, set_advantages
from explore import OF_TOKENS
from minirl import Row, objective, train_step
from models import make
from parts.config import CLIPS, OBJECTIVES
from parts.metrics import (group_row, no_verdicts, pieces, summarize, token_columns, watch,
                           why_broken)
from parts.policy import START_SCALE
from world import Words, ready, settled, silent


def group(rewards_of_rounds, **changes):
    """A group whose rounds had these rewards, each answer as many tokens long as it is late."""
    pool = []
    for number, rewards in enumerate(rewards_of_rounds):
        for reward in rewards:
            rollout = SimpleNamespace(token_ids=[0] * (len(pool) + 1), finish_reason="length"
                                      if len(pool) == 2 else "stop")
            pool.append(Sample(len(pool), number, rollout, reward, "correct" if reward else "wrong",
                               reward > 0.7))
    found = Group(0, None, pool, rounds=len(rewards_of_rounds), outcome="resolved")
    found.p_hat = fmean(s.correct for s in pool)
    return replace(found, **changes)


def test_the_first_round_is_not_the_whole_pool():
    """Truncated is not what was given up, nor a simulated answer, which has no reason to end."""
    groups = [group([[1, 0], [1, 1]]), group([[0, 0], [1, 0], [1, 1]]), group([[1]])]
    for s, finished, reason in zip(groups[0].pool, (3, 9, 7), ("stop", "length", "abort")):
        s.rollout.finished, s.rollout.finish_reason = finished, reason
    del groups[0].pool[-1].rollout.finish_reason
    row = json.loads(json.dumps(summarize(groups)))
    assert row["reward_first_round"] == fmean([0.5, 0, 1])  # every prompt counts once
    assert row["reward_pool"] == fmean([1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1])
    assert row["rounds_histogram"] == [1, 1, 1] and (row["samples"], row["prompts"]) == (11, 3)
    assert row["tokens"] == 10 + 21 + 1 and row["truncated"] == 2 / 11
    assert (row["response_length"], row["engine_steps"]) == (32 / 11, 9)


def test_parts_of_the_reward_are_means_of_first_rounds_in_which_every_prompt_counts_once():
    """An answer that lacks a part, also because the grader failed, counts 0 in its mean."""
    groups = [group([[1, 1], [1]]), group([[0, 1]]), group([[0]])]
    given = [[dict(a=1, b=0), dict(a=0, b=0.5), dict(a=9, c=9)], [{}, dict(a=1)], [{}]]
    for one, parts in zip(groups, given):
        for s, part in zip(one.pool, parts):
            s.parts = {f"reward/{name}": value for name, value in part.items()}
    found = {name: value for name, value in summarize(groups).items() if "/" in name}
    assert found == {"reward/a": fmean([0.5, 0.5, 0]), "reward/b": fmean([0.25, 0, 0])}


def test_where_the_draws_went():
    pools = [[1] * right + [0] * (10 - right) for right in range(11)]
    pools += [[0, 0], [0], [0, 0], [1], [1] * 31 + [0]]
    row = summarize([group([pool]) for pool in pools])
    assert row["spent_by_pass_rate"] == {
        "none": 15, "0.0": 10, "0.2": 20, "0.4": 20, "0.6": 20, "0.8": 52, "all": 11}


def test_shares_of_prompts():
    names = ["resolved", "too few correct", "too few wrong", "too few wrong", "out of budget",
             "resolved", "resolved", "resolved"]
    groups = [group([[1, 0]], outcome=name) for name in names]
    groups[0].kept, groups[0].advantages = groups[0].pool, [0.5, 0.0]
    groups[0].weights = [1.0, 1.0]
    row = summarize(groups)
    assert row["unresolved"] == 4 / 8 and row["unresolved_too_few_correct"] == 1 / 8
    assert row["unresolved_too_few_wrong"] == 2 / 8 and row["unresolved_out_of_budget"] == 1 / 8
    assert row["zero_signal"] == 7 / 8 and row["kept"] == 2 and row["reward_kept"] == 0.5
    assert row["verdicts"] == dict(correct=8, wrong=8)
    assert summarize([])["samples"] == 0 and "reward_pool" not in summarize([])


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
    *(dict(sampler=name) for name in RULES if name != "dapo"),
    dict(sampler="dapo", batch_prompts=5, seed=1),
    dict(weighting="log"), dict(advantage="leave-one-out"), dict(drop_unresolved=True),
    dict(judge=silent)]  # a step without signal
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
        masks = CLIPS[config.objective] in ("mask", "term")
        assert any("0" in s["mask"] for s in trained(rows)) == masks, (
            f"say in CLIPS (parts/config.py) what --clip bounds with {config.objective}: here it "
            f"{'masks no token' if masks else 'masks tokens'}")
    assert all(("agrees" in s) == ("replay" in settings) for s in trained(rows))


@pytest.mark.parametrize("settings", SAMPLING, ids=words)
def test_the_log_is_enough_to_keep_and_to_compare_anew(settings):
    """What a counterfactual sampler needs: rewards in the order of drawing, with their rounds."""
    config, groups, rows, _ = stepped(**settings)
    assert [row["refill"] for row in rows] == [group.refill for group in groups]
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
        assert submits == sorted(submits) and all(s["submit"] < s["finish"] for s in row["pool"])
    for s in trained(rows):
        columns = [s[name] for name in OF_TOKENS if name in s]
        assert s["coefficient"] and {len(column) for column in columns} == {s["length"]}
    assert all("theta" in s for row in rows for s in row["pool"] if s.get("coefficient"))


def test_an_update_that_is_not_finite_is_recorded_as_null():
    broken = torch.tensor([math.nan, math.inf, 0.25])
    row = Row(ids=[1, 2, 3, 4], prompt_length=1, mu_logprobs=[-1.0, -math.inf, -2.0],
              coefficient=1.0, old_logprobs=torch.zeros(3), theta_logprobs=broken,
              weight=broken, entropy=broken, mask=torch.tensor([1.0, 0.0, 1.0]))
    line = json.dumps(token_columns(row, row.ids[1:], Words()))
    found = json.loads(line, parse_constant=pytest.fail)
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
@pytest.mark.parametrize("status, failed, reward, said", [
    ("unparseable", 100, "", ""), ("timeout", 2, "", ""),
    ("timeout", 3, "", "the verifier gave no verdict on 3 of 100 answers, such as gold 'gold 0'"),
    ("killed", 3, "", "the verifier gave no verdict on 3 of 100 answers, such as gold 'gold 0'"),
    ("no_number", 3, "mine.py:f", "--reward gave no verdict on 3 of 100 answers, such as problem "
     "'asked 0'")])
def test_no_verdict_on_more_than_a_fiftieth_is_reported(status, failed, reward, said):
    pool = [SimpleNamespace(status=status if i < failed else "wrong", why="because",
                            rollout=SimpleNamespace(text=f"...{i}")) for i in range(100)]
    groups = [SimpleNamespace(pool=pool[i:i + 50], problem=SimpleNamespace(
        problem=f"asked {i}", answer="" if reward else f"gold {i}")) for i in (0, 50)]
    found = no_verdicts(groups, reward)
    assert found.startswith(said) and bool(found) == bool(said) == ("because" in found)


@pytest.mark.parametrize("scale, loss, ends", [
    (None, math.nan, "a lower --lr."), (0.5, 1.0, "in another --dtype)."),
    (START_SCALE, math.nan, "in another --dtype)."), (START_SCALE, 1.0, "")])
def test_only_broken_steps_in_a_row_end_a_run(scale, loss, ends):
    """No overflow of float16, which lowers the scale: but one of no scale, or of the loss."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
    history, said = [], []
    for step, skipped in enumerate([1, 1, 0, 1, 1, 1], 1):
        history.append(dict(step=step, skipped_steps=skipped, loss=loss))
        said.append(why_broken(history, scaler))
    assert said[:5] == [""] * 5 and said[5].endswith(ends) and bool(said[5]) == bool(ends)
    assert not ends or "3 steps in a row" in said[5] and "up to step 6" in said[5]


# What a step's answers are like: rewards, status, why they end.
ODD = dict(e=([0, 1], "wrong", "stop"), S=([0, 0], "wrong", "stop"), c=([0, 1], "wrong", "length"),
           C=([0, 0], "wrong", "length"))


def watched(step, rewards, status, end, learnt, skipped=0, ess=1.0, **settings):
    """What `watch` says of a step with these answers, after `learnt` optimizer steps."""
    rollout = SimpleNamespace(text="so \\boxed{3}\x07", finish_reason=end, token_ids=[7])
    pool = [Sample(i, 0, rollout, reward, status) for i, reward in enumerate(rewards)]
    problem = SimpleNamespace(answer="12\x1b[2J", problem="?")
    groups = [Group(0, problem, pool, outcome="resolved")]
    run = SimpleNamespace(config=settled(max_tokens=64, **settings),
                          policy=SimpleNamespace(loss_scale=torch.amp.GradScaler("cpu")),
                          schedule=SimpleNamespace(last_epoch=learnt))
    row = summarize(groups) | dict(step=step, skipped_steps=skipped, loss=0.0, weight_ess=ess)
    run.history = [row]
    return watch(groups, run.history, run)


@pytest.mark.parametrize("rewards, status, settings, causes", [
    ([0] * 9, "no_box", {}, ["9 of 9 answers have no \\boxed{}", "--template"]),
    ([0] * 9, "timeout", {}, ["the verifier gave no verdict on 9 of 9 answers", "timeout"]),
    ([0.1, 0.2], "scored", dict(reward="own.py:f"),
     ["(0.1 to 0.2) are on one side of --threshold 0.7", "a threshold between them"]),
    ([0.8, 0.9, 1], "scored", dict(reward="own.py:f"), ["are on one side"]),
    ([0.1, 0.9], "scored", dict(reward="own.py:f"), ["no prompt has enough"]),
    ([0.1, 0.2], "scored", dict(reward="own.py:f", sampler="uniform"), ["no prompt has enough"]),
    ([0.1, 0.2], "scored", dict(reward="own.py:f", sampler="uniform", weighting="log"),
     ["are on one side"]),  # rows are weighted by right and wrong
    ([2, 2], "scored", dict(reward="own.py:f"), ["the same reward, 2: look into --reward"]),
    ([1, 1], "correct", {}, ["the same reward, 1: ", "gold", "easier or harder problems"]),
    ([0, 1], "wrong", {}, ["no prompt has enough right and wrong answers: sample more", "--M"]),
    ([0, 1], "wrong", dict(drop_unresolved=True), ["or leave out --drop-unresolved"])])
def test_a_run_that_cannot_learn_ends_with_an_answer_and_its_likely_cause(
        capsys, rewards, status, settings, causes):
    why = watched(3, rewards, status, "stop", 0, **settings)
    assert all(cause in why for cause in causes), why
    assert "after step 3" in why and why.endswith("anyway: --resume --train-anyway.")
    out = capsys.readouterr().out
    assert "\\boxed{3}" in out and not {"\x1b", "\x07"} & set(out) and status in out


@pytest.mark.parametrize("looks, last", [
    ("SSS", 3), ("eSSSS", None), ("SeSSSS", None), ("SSeSSS", None), ("C", 1), ("SC", 2),
    ("eC", None), ("cSSSS", None)])
def test_silence_has_to_last_and_a_step_of_the_optimizer_is_hope(looks, last):
    """Silent steps in capitals; c: answers mostly cut off, as SmolLM2's at first."""
    learnt = 0
    for step, look in enumerate(looks, 1):
        learnt += look.islower()
        why = watched(step, *ODD[look], learnt)
        assert bool(why) == (step == last)
        if why:
            return
    assert last is None


def test_what_costs_a_run_much_is_warned_of_and_whoever_wants_to_go_on_does(capsys):
    assert not watched(1, *ODD["c"], 1)
    assert "--max-tokens 64 truncates 100%" in capsys.readouterr().out
    assert not watched(2, *ODD["c"], 2) and capsys.readouterr().out == ""
    assert not watched(2, [0.1, 0.2], "scored", "stop", 2, reward="own.py:f")
    assert "WARNING, step 2: all rewards (0.1 to 0.2)" in capsys.readouterr().out
    assert not watched(2, [0.1, 0.9], "raised", "stop", 2, reward="own.py:f")
    assert "WARNING, step 2: --reward gave no verdict on 2 of 2" in capsys.readouterr().out
    for ess in (0.2, 0.3):  # with weights of which few count
        assert not watched(3, *ODD["e"], 3, ess=ess)
        assert ("WARNING, step 3: the effective sample size of the" in capsys.readouterr().out
                ) == (ess < 0.3)
    for mini_batches, remedy in ((1, "a higher precision"), (4, "use fewer --mini-batches")):
        watched(3, *ODD["e"], 3, ess=0.2, mini_batches=mini_batches)
        assert remedy in capsys.readouterr().out
    assert not watched(9, *ODD["C"], 0, train_anyway=True)
    assert not watched(9, *ODD["S"], 0, skipped=1)  # float16: the loss scale settles
