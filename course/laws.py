"""The formulas of the lecture notes as functions, which course/figures.py draws.

tests/test_course_notes.py checks each one. The symbols are those of the notes: p is the pass rate
of a prompt, n samples are kept, and there are up to N rounds of M samples.
"""
import itertools
import math
from collections import Counter, namedtuple
from statistics import NormalDist
from typing import NamedTuple

from ada_sampler import Group, Sample, SamplerConfig, exit_test, set_advantages

Phi = NormalDist().cdf
Coin = namedtuple("Coin", "id p")  # a prompt that is solved with probability p


# ----------------------------------------------------------- session 1: how much a gradient varies
def variance_per_draw(p: float, b: float) -> float:
    """Second moment of one sample's gradient, E[(r - b)^2 |score|^2], in units of G^2."""
    return p * (1 - p) + (p - b) ** 2


def variance_leave_one_out(p: float, m: int) -> float:
    """The same, and the baseline is the mean of the other m - 1 rewards."""
    return p * (1 - p) * m / (m - 1)


def softmax(logits: list[float], tau: float = 1.0) -> list[float]:
    highest = max(logits)
    powers = [math.exp((z - highest) / tau) for z in logits]
    return [power / sum(powers) for power in powers]


def after_step(pi: list[float], answers: list[int], rewards: list[float]) -> list[float]:
    """A softmax policy after one step with learning rate 1; the mean reward is the baseline.

    pi holds the probability of each possible answer, and answers the indices of those sampled.
    """
    baseline = math.fsum(rewards) / len(rewards)
    logits = [math.log(q) for q in pi]
    for answer, reward in zip(answers, rewards):
        for k, q in enumerate(pi):
            logits[k] += (reward - baseline) * ((k == answer) - q) / len(answers)
    return softmax(logits)


# -------------------------------------------------------- session 2: the log-prob of another policy
def drift(logits: list[float], tau: float) -> list[float]:
    """E[grad_z log pi_1(v)] for v drawn at temperature tau: 0 only at tau = 1."""
    return [a - b for a, b in zip(softmax(logits, tau), softmax(logits))]


# ------------------------------------------------------- session 3: how many samples a prompt takes
def silent(p: float, n: int) -> float:
    """The probability that n answers are all right or all wrong, so there is no gradient."""
    return p**n + (1 - p) ** n


def closed_pools(p: float, config: SamplerConfig) -> dict[tuple, float]:
    """(right, wrong, outcome) of a finished pool -> its probability, by the project's exit test."""
    closed, waiting, M = Counter(), {(0, 0): 1.0}, config.rule.round_size
    law = [math.comb(M, k) * p**k * (1 - p) ** (M - k) for k in range(M + 1)]
    for t in range(1, config.rule.max_rounds + 1):
        for ((right, wrong), chance), k in itertools.product(waiting.items(), range(M + 1)):
            now = right + k, wrong + M - k
            closed[*now, exit_test(*now, t, config)] += chance * law[k]
        waiting = {pool[:2]: closed.pop(pool) for pool in [*closed] if not pool[2]}
    return closed


def group_of(p: float, right: int, wrong: int, outcome: str, config: SamplerConfig) -> Group:
    """A finished group with these counts, and with the project's kept answers and advantages."""
    pool = [Sample(i, 0, reward=float(i < right), status="", correct=i < right)
            for i in range(right + wrong)]
    group = Group(0, Coin(0, p), pool, 1, outcome)
    set_advantages(group, config)
    return group


def effective_weight(group: Group, config: SamplerConfig) -> float:
    """A prompt's share of the update, in units of grad p. Its mean over many prompts is w(p).

    Let g+ and g- be the mean of grad log pi over correct and over wrong answers. Then
    p g+ + (1-p) g- = 0 and grad p = p g+, so a correct row counts 1/p and a wrong one -1/(1-p).
    """
    p = group.problem.p
    scores = [c / p if s.correct else -c / (1 - p) for s, c in group.rows()]
    return math.fsum(scores) / config.rule.rows_per_prompt


class Yield(NamedTuple):
    """Expectations over all pools of a prompt with pass rate p."""

    weight: float  # w(p): the update is w(p) grad p
    noise: float  # C of the notes: the variance of the update, in units of G^2
    draws: float  # number of samples, E[D]
    trained: float  # kept answers with a coefficient other than 0
    silent: float  # probability of no gradient


def expected_yield(p: float, config: SamplerConfig) -> Yield:
    """The expected weight, variance and cost of a prompt under this rule (session 4)."""
    totals, n = [0.0] * 5, config.rule.rows_per_prompt
    for (right, wrong, outcome), chance in closed_pools(p, config).items():
        group = group_of(p, right, wrong, outcome, config)
        coefficients = [c for _, c in group.rows()]
        facts = (effective_weight(group, config), math.fsum(c * c for c in coefficients) / n**2,
                 len(group.pool), sum(map(bool, coefficients)), group.zero_signal)
        totals = [total + chance * fact for total, fact in zip(totals, facts)]
    return Yield(*totals)


def w_pool(p: float) -> float:
    """Balanced, pool mean: [p^2 + (1-p)^2] / [2p(1-p)]."""
    return (p**2 + (1 - p) ** 2) / (2 * p * (1 - p))


def w_kept(p: float) -> float:
    """Balanced, mean of the kept as baseline: 1 / [4p(1-p)]."""
    return 1 / (4 * p * (1 - p))


# ----------------------------------------------------------------------- session 4: signal per draw
def efficiency(p: float, config: SamplerConfig, per: str = "draws") -> float:
    """Squared signal over variance, per sample or per trained answer; the best per sample is 1.

    In units of |grad p|^2 / G^2 it is w^2 / (C * cost), and the best is 1 / (p (1-p)).
    """
    found = expected_yield(p, config)
    return found.weight**2 / (found.noise * getattr(found, per)) * p * (1 - p)


def gvm_variance(p: list[float], norms: list[float], sizes: list[float]) -> float:
    """sum_i G_i^2 / (p_i n_i)."""
    return sum(g * g / (x * n) if n > 0 else math.inf for x, g, n in zip(p, norms, sizes))


def gvm_least(p: list[float], norms: list[float], total: float) -> float:
    """Its minimum under sum n_i = total: (sum_i G_i / sqrt(p_i))^2 / total."""
    return sum(g / x**0.5 for x, g in zip(p, norms)) ** 2 / total


# -------------------------------------------------------------------- session 5: weights with a cap
def capped(sigma: float, cap: float) -> tuple[float, float]:
    """(mean, variance) of min(w, cap), log w normal with variance sigma^2 and E[w] = 1."""
    a = (math.log(cap) + sigma**2 / 2) / sigma
    above = 1 - Phi(a)
    first = Phi(a - sigma) + cap * above
    second = math.exp(sigma**2) * Phi(a - 2 * sigma) + cap**2 * above
    return first, second - first**2


# ---------------------------------------------------------------- session 6: routers change experts
def flip(kappa: float, sigma: float) -> float:
    """Probability that an error changes the chosen experts of a token in one layer.

    kappa: density, near 0, of the gap between the last chosen logit and the next one. sigma:
    standard deviation of the normal error of that gap, small against the gap's spread.
    """
    return kappa * sigma / math.sqrt(2 * math.pi)


# ------------------------------------------------------------------------ session 7: a false accept
def reward_flow(p: float, h: float, prompts: int, time: float, steps: int = 4000):
    """[(t, expected reward, accuracy)]: exact policy gradient of the model of session 7.

    Each prompt has a logit for the right answer, and all share one for the loophole. The logit of
    wrong answers is 0.
    """
    own, shared = math.log(p / (1 - p - h)), math.log(h / (1 - p - h))
    path, dt = [], time / steps
    for i in range(steps + 1):
        _, right, hack = softmax([0.0, own, shared])
        path.append((i * dt, right + hack, right))
        own += dt * right * (1 - right - hack)
        shared += dt * prompts * hack * (1 - right - hack)
    return path


# ------------------------------------------------------------------------------- session 8: a score
def avg_variance(spread: float, within: float, questions: int, k: int) -> float:
    """Var of avg@k: spread = Var of p over questions, within = mean of p (1-p)."""
    return (spread + within / k) / questions


def plug_in(p: float, n: int, k: int) -> float:
    """E[1 - (1 - c/n)^k] for c ~ Bin(n, p): c/n in place of p."""
    return math.fsum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * (1 - (1 - c / n) ** k)
                     for c in range(n + 1))
