"""The log's line about a step's sampling."""
import json
from statistics import fmean

from ada_sampler import Estimator, Group
from parts.summary import summarize
from sampler_oracles import Engine, coins, config, run


def test_summary():
    groups = run(coins([0.0, 0.5, 1.0, 0.5]), config())
    row = json.loads(json.dumps(summarize(groups)))
    samples = [s for g in groups for s in g.pool]
    assert row["samples"] == len(samples) and row["prompts"] == 4 and row["kept"] == 16
    assert row["tokens"] == sum(len(s.rollout.token_ids) for s in samples)
    assert row["reward_first_round"] == fmean(s.reward for g in groups for s in g.pool[:8])
    assert row["reward_pool"] == fmean(s.reward for s in samples) and row["reward_kept"] == 0.5
    assert row["unresolved_no_correct"] == row["unresolved_no_wrong"] == 0.25 and row["unresolved"] == 0.5
    assert row["zero_signal"] == 0.5 and row["rounds_histogram"] == [2, 0, 0, 2]
    assert row["verdicts"] == {k: sum(s.status == k for s in samples) for k in ("correct", "wrong")}
    assert row["truncated"] == fmean(s.rollout.finish_reason == "length" for s in samples)
    assert row["response_length"] == row["tokens"] / row["samples"]


def test_summary_of_nothing():
    assert summarize([])["samples"] == 0 and "reward_pool" not in summarize([])
    assert run([], config()) == [] and run([], config("ada-est")) == [] and run([], config("gvm")) == []
    assert json.dumps(summarize([Group(0, None, outcome="out of budget")]))


def test_first_round_reward_counts_every_prompt_once():
    """ada-est draws hard prompts more: the mean over samples falls although the model is the same."""
    cfg = config("ada-est")
    estimator, problems = Estimator(cfg), coins([0.05, 0.95] * 40)
    rows = [summarize(run(problems, cfg, Engine(seed), estimator=estimator)) for seed in range(4)]
    assert abs(rows[-1]["reward_first_round"] - 0.5) < 0.05 and rows[-1]["reward_pool"] < 0.35


