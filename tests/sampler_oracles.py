"""For the sampler's tests: other ways to drive it, and the exact mathematics of the rules."""
import math
import random
from unittest import mock

import ada_sampler as ada
from ada_sampler import Collector, Estimator, Sample, SamplerConfig, collect
from course.simulate import Coin
from world import Engine, Grader

ADVANTAGES = ("pool-mean", "leave-one-out", "group-std", "positives-only")
WEIGHTINGS = ("none", "unbiased", "log", "inv_p")
RULES = ("uniform", "dapo", "ada-pos", "ada-balance", "ada-est", "gvm")


def coins(rates):
    return [Coin(f"prompt {i}", p) for i, p in enumerate(rates)]


def mixed(count, seed=0):
    rng = random.Random(seed)
    return coins(rng.choice((0.0, 0.03, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0)) for _ in range(count))


def config(rule="ada-balance", **changes):
    return SamplerConfig(sampler=rule, **changes)


class WithBarrier(Collector):
    """Decides only when no prompt has an unfinished round, as the papers' code does."""

    waiting = frozenset()

    def advance(self, group):
        self.waiting |= {group.index}
        if any(s.rollout is None for group in self.groups for s in group.pool):
            return
        complete, self.waiting = sorted(self.waiting), frozenset()
        for index in complete:
            super().advance(self.groups[index])


class WithoutEarlyOpening(Collector):
    """Opens a prompt's next round only when its last one is complete."""

    def next_round_is_certain(self, group, missing):
        return False


WAYS = (WithBarrier, WithoutEarlyOpening, Collector)


def run(problems, cfg, engine=None, grader=None, way=Collector, **more):
    """collect() with what every rule may need. No draw is asked for twice, no verdict left over."""
    engine, grader = engine or Engine(), grader or Grader()
    spare = dict(estimator=Estimator(), more=lambda: Coin(f"spare {len(engine.asked)}", 0.4))
    with mock.patch.object(ada, "Collector", way):
        groups = collect(problems, cfg, engine, grader, **spare | more)
    assert not grader.open and not engine.busy
    assert len(engine.asked) == sum(map(len, engine.log)) == sum(len(g.pool) for g in groups)
    return groups


def outcomes(groups):
    return [
        (g.problem.id, g.outcome, g.rounds, [s.correct for s in g.pool], [s.index for s in g.kept])
        for g in groups
    ]


def sample(index, correct, reward=None):
    return Sample(index, 0, reward=float(correct) if reward is None else reward, status="",
                  correct=correct)


# -------------------------------------------------------------------- exact: what the rules do to p
def closed_pools(p, rule, n=4, M=8, N=4):
    """Exactly, without the sampler: the closed pool is [(probability, correct, wrong,
    resolved)]."""
    done = {
        "ada-balance": lambda c, w: c >= n // 2 and w >= n - n // 2,
        "ada-pos": lambda c, w: c >= 1,
        "uniform": lambda c, w: True,
    }[rule]
    M, N = (n, 1) if rule == "uniform" else (M, N)
    still_open, closed = {(0, 0): 1.0}, []
    for t in range(N):
        after = {}
        for (c, w), q in still_open.items():
            for k in range(M + 1):
                chance = q * math.comb(M, k) * p**k * (1 - p) ** (M - k)
                after[c + k, w + M - k] = after.get((c + k, w + M - k), 0.0) + chance
        closed += [(q, c, w, done(c, w)) for (c, w), q in after.items() if done(c, w) or t == N - 1]
        still_open = {(c, w): q for (c, w), q in after.items() if not done(c, w)}
    return closed


def exact(p, rule, **sizes):
    """(E[draws], its variance, P(unresolved), P(no signal))"""
    pools = closed_pools(p, rule, **sizes)
    draws = sum(q * (c + w) for q, c, w, _ in pools)
    variance = sum(q * (c + w - draws) ** 2 for q, c, w, _ in pools)
    unresolved, silent = sum(q for q, *_, ok in pools
                             if not ok), sum(q for q, c, w, _ in pools if not c * w)
    return draws, variance, unresolved, silent


def exact_weight(p, rule, weighting, n=4, advantage="pool-mean"):
    """The effective weight, over all pools, with the sampler's own keeping rule,
    advantages and weights."""
    total = 0.0
    for q, c, w, _ in closed_pools(p, rule, n=n):
        pool = [sample(i, i < c) for i in range(c + w)]
        kept = ada.keep(pool, n) if rule != "uniform" else pool
        a = ada.advantages([s.reward for s in kept], [s.reward for s in pool], advantage)
        weights = ada.row_weights([s.correct for s in kept], c / (c + w), n, weighting)
        score = [1 / p if s.correct else -1 / (1 - p) for s in kept]
        total += q * sum(x * y * z for x, y, z in zip(a, weights, score)) / n
    return total


# effective weights of balance with n=4, M=8, N=4; the number of digits is the precision
WEIGHTS = {
    0.02: dict(none="7.2", inv_p="169", unbiased="1.13", log="23.1"),
    0.05: dict(none="5.9", inv_p="96.7", unbiased="1.21", log="15.6"),
    0.10: dict(none="3.95", inv_p="41.4", unbiased="1.19", log="9.3"),
    0.30: dict(none="1.35", inv_p="5.1", unbiased="0.97", log="3.2"),
    0.50: dict(none="1.00", inv_p="2.2", unbiased="0.91", log="2.0"),
    0.90: dict(none="3.95", inv_p="4.6", unbiased="1.19", log="1.5"),
    0.95: dict(none="5.86", inv_p="6.5", unbiased="1.21", log="1.4"),
}
