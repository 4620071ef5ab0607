"""Lab 4: what is really optimised, and where the next sample should go"""
import itertools

import ada_sampler as ada
from course import laws
from course.checks import Wrong, called, must_be, must_give, spelled


def kept_rows():
    """(which kept rows are right, p_hat of their pool, n), the small ones first.

    In the order of drawing: right ones may come first or last.
    """
    for k_pos, k_neg in ((1, 1), (2, 2), (1, 3), (3, 1)):
        rows = k_pos + k_neg
        for extra in range(4):
            for right in range(k_pos, k_pos + extra + 1):
                for n in (rows, rows + 2.5):
                    yield [True] * k_pos + [False] * k_neg, right / (rows + extra), n
                    yield [False] * k_neg + [True] * k_pos, right / (rows + extra), n


def ask_plain(correct, p, n):
    must_give([1.0] * len(correct), ada.row_weights, correct, p, n, "none")
    must_give([1 / p] * len(correct), ada.row_weights, correct, p, n, "inv_p")


def ask_shares(kind: str, rights):
    """Sums of weights over n, of right and of wrong rows; rights: p_hat -> these."""
    for correct, p, n in kept_rows():
        weights = ada.row_weights(correct, p, n, kind)
        call = f"{called(ada.row_weights, correct, p, n, kind)} = {spelled(weights)}"
        found = [sum(x for x, c in zip(weights, correct) if c == wanted) / n
                 for wanted in (True, False)]
        must_be(f"{call}: weights / n of the right rows, of the wrong rows", found, rights(p))


def ask_weights(right, *args):
    must_give(right, ada.row_weights, *args)


def sizes_of(*args):
    """(sizes, the call and its result in words)."""
    sizes, call = ada.allocate_gvm(*args), called(ada.allocate_gvm, *args)
    if len(sizes) != len(args[0]) or any(type(x) is not int or x < 0 for x in sizes):
        raise Wrong(f"{call}: yours is {spelled(sizes)}, and it must be {len(args[0])} whole "
                    "numbers, none of them negative")
    return sizes, f"{call} = {spelled(sizes)}"


def ask_totals(p, total):
    sizes, call = sizes_of(p, [1.0] * len(p), total, 1e-3, 2.0)
    must_be(f"{call}: its sum", sum(sizes), total)
    must_be(f"{call}: of prompts with p = 0", sum(s for s, x in zip(sizes, p) if not x), 0)
    for hopeless, norms in (([0.0, 0.0], [1.0, 1.0]), ([0.5, 0.5], [0.0, 0.0])):
        must_give([0, 0], ada.allocate_gvm, hopeless, norms, total, 1e-3, 2.0,
                  why="All weights are 0.")


def ask_variance(p, norms):
    sizes, call = sizes_of(p, norms, 1000, 0.0, 2.0)
    for i, j in itertools.permutations(range(len(p)), 2):
        moved = [k - 5 * (a == i) + 5 * (a == j) for a, k in enumerate(sizes)]
        now, then = (laws.gvm_variance(p, norms, n) for n in (sizes, moved))
        if then < now:
            raise Wrong(f"{call}: its variance is {now:.6g}; {spelled(moved)} has {then:.6g}")


def ask_penalty(p, alpha, beta, ratio):
    sizes, call = sizes_of(p, [1.0] * len(p), 3000, alpha, beta)
    must_be(f"{call}: first / second", sizes[0] / max(sizes[1], 1), ratio, 2e-3)
    if beta == 2 and max(sizes) != sizes[1]:
        raise Wrong(f"{call}: the prompt with p = sqrt(alpha) = {p[1]:g} must get most")


ONE_KIND = [  # weights, of rows that are right or not, p_hat, n, kind
    *(([1.0, 1.0], [right] * 2, float(right), 2, kind)
      for kind in ("none", "unbiased", "log", "inv_p") for right in (False, True)),
    *(([weight], [right], 0.5, 1, kind)  # the pool had both kinds
      for kind, weight in (("unbiased", 0.5), ("log", 1.0)) for right in (True, False))]
CHECKS = [
    (1, "none and inv_p: the same for every row", ask_plain, [*kept_rows()]),
    (2, "unbiased: the weighted rows have the pool's mean again",
     ask_shares, [("unbiased", lambda p: [p, 1 - p])]),
    (1, "log: unbiased divided by p_hat, the gradient of log p",
     ask_shares, [("log", lambda p: [1, (1 - p) / p])]),
    (1, "pools, or kept rows, of one kind: nothing is divided by 0", ask_weights,
     ONE_KIND),
    (1, "allocation: it adds up, and hopeless prompts get nothing", ask_totals,
     [*itertools.product(([0.5], [0.5, 0.1], [0.0, 0.5], [0.3, 0.3, 0.3]), (1, 7, 10))]),
    (2, "allocation: with alpha = 0, no move of 5 samples lowers the variance", ask_variance,
     [([0.5, 0.1], [1.0, 1.0]), ([0.5, 0.5], [1.0, 3.0]), ([0.9, 0.2, 0.05], [1.0, 2.0, 0.5])]),
    (2, "allocation: with beta = 2, a prompt of p = sqrt(alpha) gets most", ask_penalty,
     [([0.05, 0.1, 0.2], 0.01, 2.0, 0.8 ** 0.5), ([0.005, 0.01, 0.02], 1e-4, 2.0, 0.8 ** 0.5),
      ([0.1, 0.2], 0.01, 1.0, (0.21 / 0.11) ** 0.5)])]  # beta = 1: w = 1 / sqrt(p + alpha)
