"""Lab 4: what is really optimised, and where the next sample should go"""
import itertools

import ada_sampler as ada
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


def check_plain():
    """none and inv_p: the same for every row"""
    for correct, p, n in kept_rows():
        must_give([1.0] * len(correct), ada.row_weights, correct, p, n, "none")
        must_give([1 / p] * len(correct), ada.row_weights, correct, p, n, "inv_p")


def check_shares(kind: str, rights):
    """Sums of weights over n, of the right and of the wrong rows; rights: p_hat -> what they are"""
    for correct, p, n in kept_rows():
        weights = ada.row_weights(correct, p, n, kind)
        call = f"{called(ada.row_weights, correct, p, n, kind)} = {spelled(weights)}"
        found = [sum(x for x, c in zip(weights, correct) if c == wanted) / n
                 for wanted in (True, False)]
        must_be(f"{call}: weights / n of the right rows, of the wrong rows", found, rights(p))


def check_unbiased():
    """unbiased: the weighted rows have the pool's mean again, whatever is measured on them"""
    check_shares("unbiased", lambda p: [p, 1 - p])


def check_log():
    """log: unbiased divided by p_hat, the gradient of log p"""
    check_shares("log", lambda p: [1, (1 - p) / p])


def check_one_kind():
    """pools, or kept rows, of one kind: nothing is divided by 0"""
    for kind in ("none", "unbiased", "log", "inv_p"):
        must_give([1.0, 1.0], ada.row_weights, [False] * 2, 0.0, 2, kind)
        must_give([1.0, 1.0], ada.row_weights, [True] * 2, 1.0, 2, kind)
    for kind, right in (("unbiased", 0.5), ("log", 1.0)):  # the pool had both kinds
        must_give([right], ada.row_weights, [True], 0.5, 1, kind)
        must_give([right], ada.row_weights, [False], 0.5, 1, kind)


def sizes_of(*args):
    """(sizes, the call and its result in words)."""
    sizes, call = ada.allocate_gvm(*args), called(ada.allocate_gvm, *args)
    if len(sizes) != len(args[0]) or any(type(x) is not int or x < 0 for x in sizes):
        raise Wrong(f"{call}: yours is {spelled(sizes)}, and it must be {len(args[0])} whole "
                    "numbers, none of them negative")
    return sizes, f"{call} = {spelled(sizes)}"


def check_totals():
    """allocation: it adds up, and hopeless prompts get nothing"""
    for p in ([0.5], [0.5, 0.1], [0.0, 0.5], [0.3, 0.3, 0.3]):
        for total in (1, 7, 10):
            sizes, call = sizes_of(p, [1.0] * len(p), total, 1e-3, 2.0)
            must_be(f"{call}: its sum", sum(sizes), total)
            must_be(f"{call}: of prompts with p = 0", sum(s for s, x in zip(sizes, p) if not x), 0)
    for p, norms in (([0.0, 0.0], [1.0, 1.0]), ([0.5, 0.5], [0.0, 0.0])):
        must_give([0, 0], ada.allocate_gvm, p, norms, 8, 1e-3, 2.0, why="All weights are 0.")


def check_variance():
    """allocation: with alpha = 0, no move of 5 samples lowers the variance"""
    for p, norms in (([0.5, 0.1], [1.0, 1.0]), ([0.5, 0.5], [1.0, 3.0]),
                     ([0.9, 0.2, 0.05], [1.0, 2.0, 0.5])):
        sizes, call = sizes_of(p, norms, 1000, 0.0, 2.0)

        def variance(n):
            return sum(g * g / (x * k) if k > 0 else float("inf") for g, x, k in zip(norms, p, n))

        for i, j in itertools.permutations(range(len(p)), 2):
            moved = [k - 5 * (a == i) + 5 * (a == j) for a, k in enumerate(sizes)]
            if variance(moved) < variance(sizes):
                raise Wrong(f"{call}: its variance is {variance(sizes):.6g}; {spelled(moved)} has "
                            f"{variance(moved):.6g}")


def check_penalty():
    """allocation: with beta = 2, a prompt of p = sqrt(alpha) gets most"""
    for p, alpha, beta, ratio in (
            ([0.05, 0.1, 0.2], 0.01, 2.0, 0.8 ** 0.5), ([0.005, 0.01, 0.02], 1e-4, 2.0, 0.8 ** 0.5),
            ([0.1, 0.2], 0.01, 1.0, (0.21 / 0.11) ** 0.5)):  # beta = 1: w = 1 / sqrt(p + alpha)
        sizes, call = sizes_of(p, [1.0] * len(p), 3000, alpha, beta)
        must_be(f"{call}: first / second", sizes[0] / max(sizes[1], 1), ratio, 2e-3)
        if beta == 2 and max(sizes) != sizes[1]:
            raise Wrong(f"{call}: the prompt with p = sqrt(alpha) = {p[1]:g} must get most")


CHECKS = [(1, check_plain), (2, check_unbiased), (1, check_log), (1, check_one_kind),
          (1, check_totals), (2, check_variance), (2, check_penalty)]
