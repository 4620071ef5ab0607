"""A line of the log; most of the update's part is tested with the objective: test_objective.py."""
import json
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from ada_sampler import Estimator, Group, Sample
from parts.config import Config
from parts.metrics import diagnostics, effective_share, mean_surprisal, summarize
from sampler_oracles import Engine, coins, config, run


def test_summary():
    groups = run(coins([0.0, 0.5, 1.0, 0.5]), config())
    row = json.loads(json.dumps(summarize(groups)))
    samples = [s for g in groups for s in g.pool]
    assert row["samples"] == len(samples) and row["prompts"] == 4 and row["kept"] == 16
    assert row["tokens"] == sum(len(s.rollout.token_ids) for s in samples)
    assert row["reward_first_round"] == fmean(s.reward for g in groups for s in g.pool[:8])
    assert row["reward_pool"] == fmean(s.reward for s in samples) and row["reward_kept"] == 0.5
    assert row["unresolved_too_few_correct"] == row["unresolved_too_few_wrong"] == 0.25
    assert row["unresolved"] == 0.5
    assert row["zero_signal"] == 0.5 and row["rounds_histogram"] == [2, 0, 0, 2]
    assert row["verdicts"] == {k: sum(s.status == k for s in samples) for k in ("correct", "wrong")}
    assert row["truncated"] == fmean(s.rollout.finish_reason == "length" for s in samples)
    assert row["response_length"] == row["tokens"] / row["samples"]


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
    groups = [group([[1, 0], [1, 1]]), group([[0, 0], [1, 0], [1, 1]]), group([[1]])]
    row = summarize(groups)
    assert row["reward_first_round"] == fmean([0.5, 0, 1])  # every prompt counts once
    assert row["reward_pool"] == fmean([1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1])
    assert row["rounds_histogram"] == [1, 1, 1] and row["samples"] == 11
    assert row["tokens"] == 10 + 21 + 1 and row["truncated"] == 2 / 11


def test_only_what_reached_the_limit_of_tokens_is_truncated():
    """Not what was given up, nor a coin of the simulator, which has no reason to end."""
    groups = [group([[1, 0, 0, 1]])]
    ends = [SimpleNamespace(finish_reason=reason) for reason in ("stop", "length", "abort")]
    for s, end in zip(groups[0].pool, [*ends, SimpleNamespace()]):
        s.rollout = SimpleNamespace(token_ids=[0], **vars(end))
    assert summarize(groups)["truncated"] == 1 / 4


def test_a_step_takes_as_many_engine_steps_as_its_last_answer():
    groups = [group([[1, 0]]), group([[0, 1, 1]])]
    for finished, s in zip((3, 9, 7, 2, 8), [s for g in groups for s in g.pool]):
        s.rollout.finished = finished
    assert summarize(groups)["engine_steps"] == 9


def test_where_the_draws_went():
    shares = {0: "none", 1: "0.0", 2: "0.2", 3: "0.2", 4: "0.4", 5: "0.4", 6: "0.6", 7: "0.6",
              8: "0.8", 9: "0.8", 10: "all"}
    for hits, name in shares.items():
        assert summarize([group([[1] * hits + [0]
                                 * (10 - hits)])])["spent_by_pass_rate"] == {name: 10}
    assert summarize([group([[1] * 31 + [0]])])["spent_by_pass_rate"] == {"0.8": 32}
    both = summarize([group([[0, 0]]), group([[0], [0], [0]]), group([[1]])])
    assert both["spent_by_pass_rate"] == {"all": 1, "none": 5}


def test_shares_of_prompts():
    names = ["resolved", "too few correct", "too few wrong", "too few wrong", "out of budget",
             "resolved", "resolved", "resolved"]
    groups = [group([[1, 0]], outcome=name) for name in names]
    groups[0].kept, groups[0].advantages, groups[0].weights = groups[0].pool, [
        0.5, -0.5], [1.0, 1.0]
    row = summarize(groups)
    assert row["unresolved"] == 4 / 8 and row["unresolved_too_few_correct"] == 1 / 8
    assert row["unresolved_too_few_wrong"] == 2 / 8 and row["unresolved_out_of_budget"] == 1 / 8
    assert row["zero_signal"] == 7 / 8 and row["kept"] == 2 and row["reward_kept"] == 0.5
    assert row["verdicts"] == dict(correct=8, wrong=8)


def test_summary_of_nothing():
    assert summarize([])["samples"] == 0 and "reward_pool" not in summarize([])
    assert run([], config()) == [] and run([], config("ada-est")) == []
    assert run([], config("gvm")) == []
    assert json.dumps(summarize([Group(0, None, outcome="out of budget")]))


def test_first_round_reward_counts_every_prompt_once():
    """ada-est draws hard prompts more: the mean over samples falls
    although the model is the same."""
    cfg = config("ada-est")
    estimator, problems = Estimator(cfg), coins([0.05, 0.95] * 40)
    rows = [summarize(run(problems, cfg, Engine(seed), estimator=estimator)) for seed in range(4)]
    assert abs(rows[-1]["reward_first_round"] - 0.5) < 0.05 and rows[-1]["reward_pool"] < 0.35


@pytest.mark.parametrize("gaps", [(0.25, -2.0, 0.5), (-0.25, 2.0, -0.5)])
def test_the_largest_gap_counts_in_either_direction(gaps):
    """An engine that finds a token far less likely than the trainer is as wrong as the opposite."""
    one, old = torch.ones(3), torch.full((3,), -3.0)
    facts = dict(old=old, mu=old + torch.tensor(gaps), coefficient=one, mask=one, weight=one,
                 entropy=one)
    found = diagnostics([facts], Config())
    assert found["logprob_gap"] == 2.0 and found["tokens_trained"] == len(facts["mu"])


@pytest.mark.parametrize("weights, wanted", [
    ([1, 1, 1], 1), ([5, 5], 1), ([0, 1, 0, 1], 1 / 2), ([1e6, 1e-6, 1e-6, 1e-6], 1 / 4),
    ([1, 3], 16 / 20)])
def test_the_effective_share_of_weights(weights, wanted):
    """Their effective sample size over their number, by Kong's formula 1 / (1 + cv^2)."""
    weight_T = torch.tensor(weights, dtype=torch.float64)
    assert effective_share(weight_T).item() == pytest.approx(wanted)
    cv2 = weight_T.var(unbiased=False) / weight_T.mean()**2
    assert wanted == pytest.approx(1 / (1 + cv2.item()))


def test_entropy_is_over_everything_that_was_drawn():
    rollouts = [[SimpleNamespace(logprobs=lp) for lp in pool]
                for pool in ([[-1.0, -2.0], [-3.0]], [[-6.0]])]
    groups = [SimpleNamespace(pool=[SimpleNamespace(rollout=r) for r in pool]) for pool in rollouts]
    assert mean_surprisal(groups) == 3.0
