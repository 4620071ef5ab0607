"""Lab 8: pass@k, and how sure a score is"""
import itertools
from math import comb

import numpy as np

from parts import evaluation
from course.checks import Raised, Wrong, asked, must_be, must_give


def ask_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        hits = sum(min(chosen) < c for chosen in itertools.combinations(range(n), k))
        must_give(hits / comb(n, k), evaluation.pass_at_k, n, c, k)


def ask_large():
    must_give(0.5, evaluation.pass_at_k, 2000, 1, 1000)
    must_give(0.5, evaluation.pass_at_k, 4000, 2000, 1)
    for n, c, k in ((4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)):
        try:
            found = evaluation.pass_at_k(n, c, k)
        except Raised as error:
            if error.kind == "ValueError":
                continue
            raise
        raise Wrong(f"pass_at_k(n={n}, c={c}, k={k}): yours is {found}, and it must raise "
                    "ValueError")


AVERAGES = [(None, 0.375), ([1, 1], 0.375), ([3, 1], 0.4375), ([30, 10], 0.4375)]
# The sets, weights, [avg, ci_low, ci_high]; some rows have resamples and what a mistake gives. The
# ends are values of a discrete distribution, and with as many resamples they are certain.
INTERVALS = [
    ([[0.0, 1.0]], None, [0.5, 0, 1]),
    ([[1.0] * 2 + [0.0] * 8], None, [0.2, 0, 0.5], 8000,
     {"That is an interval of 90 %.": [0.2, 0, 0.4]}),
    ([[0.5] * 6], None, [0.5, 0.5, 0.5])]
SETS = [
    ([[0.0] * 5, [1.0] * 5], [1, 3], [0.75, 0.75, 0.75]),
    ([[0.0, 1.0], [0.0] * 4], [1, 1], [0.25, 0, 0.5]),
    ([[0.0, 1.0], [1.0, 0.0]], None, [0.5, 0, 1]),
    ([[1.0] * 2 + [0.0] * 3] * 2, None, [0.4, 0.1, 0.7], 2000,
     {"Those are the means of the ends of each set's interval.": [0.4, 0, 0.8]})]


def ask_average(weights, right):
    sets = [[1.0, 0.0], [0.25, 0.25, 0.25, 0.25]]
    found = evaluation.bootstrap([np.array(one) for one in sets], weights, resamples=50)
    must_be(f"avg of the sets {sets}, weights={weights}", found["avg"], right)


def ask_interval(sets, weights, right, resamples=1000, causes={}):
    found = evaluation.bootstrap([np.array(one) for one in sets], weights, resamples=resamples)
    must_be(f"[avg, ci_low, ci_high] of the sets {sets}, weights={weights}",
            [found["avg"], found["ci_low"], found["ci_high"]], right, causes=causes)


def ask_seed():
    values = np.arange(30.0)
    first, again = (evaluation.bootstrap([values], resamples=200, seed=3) for _ in range(2))
    must_be("ci_low, the same seed twice", first["ci_low"], again["ci_low"])
    other = evaluation.bootstrap([values], resamples=200, seed=4)
    if (other["ci_low"], other["ci_high"]) == (first["ci_low"], first["ci_high"]):
        raise Wrong("seed=3 and seed=4 give exactly the same interval: the seed is not used")
    one = evaluation.bootstrap([values], resamples=1)
    must_be("ci_high - ci_low of one resample", one["ci_high"] - one["ci_low"], 0)
    must_be("the data after the calls: their sum", asked.sum_after_bootstrap(values), 435)


CHECKS = [
    (3, "pass@k is the share of all choices of k samples that contain a right one", ask_subsets,
     [*zip((1, 2, 4, 5))]),
    (1, "large n, without overflow, and numbers that make no sense are refused", ask_large,
     [()]),
    (2, "avg: the mean of the sets' means, by weight", ask_average, AVERAGES),
    (2, "the interval: 95 % of all ways to draw the questions again, exactly", ask_interval,
     INTERVALS),
    (1, "every set is drawn from by itself and has its weight", ask_interval, SETS),
    (1, "`resamples` and the seed are used; the data stay as they are",
     ask_seed, [()])]
