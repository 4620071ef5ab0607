"""The simulator agrees with the exact mathematics of the rules; its command line."""
import math
from dataclasses import replace
from statistics import fmean, stdev

import pytest

from ada_sampler import Group, Sample
from course import laws
from course import simulate as simulator
from course.simulate import Coin, effective_weight, report, simulate
from sampler_oracles import RULES, WEIGHTINGS, config


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("rule, n", [("ada-balance", 4), ("ada-pos", 4), ("uniform", 16)])
def test_oracles_through_collect(p, rule, n):
    count = 400
    pools = laws.closed_pools(p, config(rule, n=n))
    draws = sum(q * (c + w) for (c, w, _), q in pools.items())
    variance = sum(q * (c + w - draws) ** 2 for (c, w, _), q in pools.items())
    unresolved = sum(q for (*_, outcome), q in pools.items() if outcome != "resolved")
    silent = sum(q for (c, w, _), q in pools.items() if not c * w)
    groups = simulate(config(rule, n=n), [p] * count, seed=round(1000 * p) + n)
    assert abs(fmean(len(g.pool) for g in groups) - draws) <= 3 * math.sqrt(variance / count) + 1e-9
    for share, got in ((unresolved, [g.outcome != "resolved" for g in groups]),
                       (silent, [g.zero_signal for g in groups])):
        assert abs(fmean(got) - share) <= 3 * math.sqrt(share * (1 - share) / count) + 1 / count


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_effective_weights_through_collect(p, weighting):
    cfg = config(weighting=weighting)
    groups = simulate(cfg, [p] * 400, seed=round(100 * p))
    weights = [effective_weight(g, cfg) for g in groups]
    error = stdev(weights) / math.sqrt(len(weights))
    assert abs(fmean(weights) - laws.expected_yield(p, cfg).weight) <= 3 * error + 1e-6


def test_what_is_reported_is_per_place_in_the_batch():
    cfg = config("dapo")
    groups = simulate(cfg, [0.05] * 30 + [0.5] * 30)
    tries = len(groups) / 60
    draws, unresolved, silent, weight, error = report(groups, cfg, 60)
    weights = [effective_weight(g, cfg) for g in groups]
    assert tries > 1 and draws == 4 * tries and unresolved == silent
    assert math.isclose(silent, 1 - sum(bool(g.kept) for g in groups) / 60)
    assert math.isclose(weight, tries * fmean(weights))
    assert math.isclose(error, tries * stdev(weights) / math.sqrt(len(groups)))


def test_est_is_shown_when_it_knows_something():
    sizes = [len(g.pool) for g in simulate(config("ada-est"), [0.0, 1.0] * 20)]
    assert min(sizes[::2]) > max(sizes[1::2]) and sum(sizes) == 8 * 40


def test_the_seed_decides_which_prompts_dapo_tries_in_the_place_of_dropped_ones():
    tried = [[g.problem.id for g in simulate(config("dapo"), [0.0] * 20, seed=seed) if g.refill]
             for seed in (0, 0, 1)]
    assert len(tried[0]) == 60 and tried[0] == tried[1] != tried[2]


def test_a_prompt_that_drew_twice_as_much_counts_twice():
    """Where all is kept, sizes are weights: the sum is divided by the average size, not by a
    prompt's own."""
    cfg = config("gvm", M=8)
    pool = [Sample(i, 1, None, float(i < 2), "", i < 2) for i in range(8)]
    once = Group(0, Coin(0, 0.25), pool, kept=pool, advantages=[s.reward - 0.25 for s in pool],
                 weights=[1.0] * 8)
    twice = replace(once, kept=once.kept * 2, advantages=once.advantages * 2,
                    weights=once.weights * 2)
    assert math.isclose(effective_weight(once, cfg), 1)
    assert math.isclose(effective_weight(twice, cfg), 2)


def test_command_line(capsys):
    def printed(flags: str) -> list[list[str]]:
        simulator.main(flags.split())
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    rows = {name: numbers for name, *numbers in printed("--pass-rate 0.05")}
    exact_and_error = ((27.31, 0.6), (0.52, 0.04), (0.194, 0.03), (5.9, 0.4))
    for number, (right, error) in zip(rows["ada-balance"], exact_and_error):
        assert abs(float(number) - right) < error
    first, _, *rows = printed("--beta 0.5 1.5")
    assert [row[0] for row in rows] == list(RULES) and 0.22 < float(first[4]) < 0.28  # 0.5 of 2
