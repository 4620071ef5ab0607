"""Lab 8: pass@k, and how sure a score is.

    python course/check.py 8
    python course/train.py --with lab_8   # your run's curves.png has your interval
"""
import numpy as np  # noqa: F401


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k of n samples contain a right one, if c of the n are right.

        1 - C(n - c, k) / C(n, k)          k drawn without replacement (arXiv 2107.03374, Eq. 1)

    n, c and k are whole numbers. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    (1 - (1 - c/n)^k looks like it and is biased. Why?)
    """
    raise NotImplementedError


def bootstrap(sets: list, weights: list | None = None, resamples: int = 4000,
              seed: int = 0) -> dict:
    """dict(avg=, ci_low=, ci_high=): a weighted mean of sets' means, with its 95 % interval.

    sets has for each data set an array [Q] with one number per *question* (its avg@k). weights has
    one number per set. By default they are equal, and they need not add up to 1.

    avg is sum_s weight_s mean(set_s) / sum_s weight_s. The interval is a percentile bootstrap. In
    each of `resamples` rounds as many questions as a set has are drawn from it with replacement,
    for each set independently, and avg is computed again from the questions that were drawn. Of
    these averages 2.5 and 97.5 per cent lie below the ends of the interval (np.percentile). The
    same seed gives the same interval, another seed another one. The caller's data stay as they are.
    """
    raise NotImplementedError
