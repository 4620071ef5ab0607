"""Lab 9: pass@k, and how sure a score is"""
import itertools
from math import comb

import numpy as np

import eval as evaluation
from course.checks import Wrong, must_be


def check_subsets():
    """pass@k is the share of all choices of k samples that hold a right one"""
    for n in (1, 2, 4, 5):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            hits = sum(min(chosen) < c for chosen in itertools.combinations(range(n), k))
            must_be(f"pass_at_k(n={n}, c={c}, k={k})", evaluation.pass_at_k(n, c, k),
                    hits / comb(n, k))


def check_unbiased():
    """pass@k is unbiased: E over c of the estimate is 1 - (1-p)^k, with n = 3"""
    for p, k in itertools.product((0.5, 0.1), (1, 2, 3)):
        mean = sum(comb(3, c) * p**c * (1 - p)**(3 - c) * evaluation.pass_at_k(3, c, k)
                   for c in range(4))
        must_be(f"E[pass_at_k(n=3, c, k={k})] with p = {p}", mean, 1 - (1 - p)**k)


def check_large():
    """large n, without overflow, and numbers that make no sense are refused"""
    must_be("pass_at_k(n=2000, c=1, k=1000)", evaluation.pass_at_k(2000, 1, 1000), 0.5)
    must_be("pass_at_k(n=4000, c=2000, k=1)", evaluation.pass_at_k(4000, 2000, 1), 0.5)
    for n, c, k in ((4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)):
        try:
            found = evaluation.pass_at_k(n, c, k)
        except ValueError:
            continue
        raise Wrong(f"pass_at_k(n={n}, c={c}, k={k}): yours is {found}, and it must raise "
                    "ValueError")


def check_average():
    """avg: the mean of the sets' means, by weight"""
    sets = [[1.0, 0.0], [0.25, 0.25, 0.25, 0.25]]
    for weights, right in ((None, 0.375), ([1, 1], 0.375), ([3, 1], 0.4375), ([30, 10], 0.4375)):
        found = evaluation.bootstrap(sets, weights, resamples=50)
        must_be(f"avg of the sets {sets}, weights={weights}", found["avg"], right)


def check_interval():
    """the interval: 95 % of all ways to draw the questions again, exactly"""
    for values, low, high in (([0.0, 1.0], 0.0, 1.0), ([1.0] * 2 + [0.0] * 8, 0.0, 0.5),
                              ([0.5] * 6, 0.5, 0.5), ([1.0] * 4 + [0.0] * 16, 0.05, 0.4)):
        found = evaluation.bootstrap([np.array(values)], resamples=8000)
        must_be(f"[ci_low, ci_high] of {sum(values):g} of {len(values)} questions",
                [found["ci_low"], found["ci_high"]], [low, high], 1e-6)


def check_sets():
    """every set is drawn from by itself, `resamples` times, and weighs what it weighs"""
    found = evaluation.bootstrap([np.zeros(5), np.ones(5)], [1, 3], resamples=400)
    must_be("[avg, ci_low, ci_high] of five zeros (weight 1) and five ones (weight 3)",
            [found["avg"], found["ci_low"], found["ci_high"]], [0.75] * 3)
    found = evaluation.bootstrap([np.array([0.0, 1.0]), np.zeros(4)], [1, 1], resamples=4000)
    must_be("[ci_low, ci_high] of the sets [0, 1] and [0, 0, 0, 0], equal weights",
            [found["ci_low"], found["ci_high"]], [0, 0.5], 1e-6)
    found = evaluation.bootstrap([np.array([0.0, 1.0]), np.array([1.0, 0.0])], resamples=4000)
    must_be("[ci_low, ci_high] of the sets [0, 1] and [1, 0], equal weights",
            [found["ci_low"], found["ci_high"]], [0, 1], 1e-6)
    found = evaluation.bootstrap([np.arange(30.0)], resamples=1)
    must_be("ci_high - ci_low of one resample", found["ci_high"] - found["ci_low"], 0)


def check_seed():
    """the same seed, the same interval; the caller's data stay as they are"""
    values = np.arange(30.0)
    first, again = (evaluation.bootstrap([values], resamples=200, seed=3) for _ in range(2))
    must_be("ci_low, the same seed twice", first["ci_low"], again["ci_low"])
    other = evaluation.bootstrap([values], resamples=200, seed=4)
    if (other["ci_low"], other["ci_high"]) == (first["ci_low"], first["ci_high"]):
        raise Wrong("seed=3 and seed=4 give exactly the same interval: the seed is not used")
    must_be("the data after the call: their sum", float(values.sum()), 435)


CHECKS = [(2, check_subsets), (1, check_unbiased), (1, check_large), (2, check_average),
          (2, check_interval), (1, check_sets), (1, check_seed)]
