"""Lab 4: what is really optimised, and where the next sample should go"""
import itertools

import ada_sampler as ada
from course.checks import Wrong, must_be, spelled


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


def call_of(correct, p, n, kind) -> str:
    return f"row_weights(correct={spelled(correct)}, p_hat={p:.4g}, n={n}, {kind!r})"


def check_plain():
    """none and inv_p: the same for every row"""
    for correct, p, n in kept_rows():
        for kind, weight in (("none", 1.0), ("inv_p", 1 / p)):
            yours = ada.row_weights(correct, p, n, kind)
            must_be(call_of(correct, p, n, kind), yours, [weight] * len(correct))


def shares(correct, p, n, kind):
    """(call, weights of the right rows / n, of the wrong rows / n)."""
    w = ada.row_weights(correct, p, n, kind)
    right = sum(x for x, c in zip(w, correct) if c) / n
    return f"{call_of(correct, p, n, kind)} = {spelled(w)}", right, sum(w) / n - right


def check_unbiased():
    """unbiased: the weighted rows have the pool's mean again, of whatever is measured on them"""
    for correct, p, n in kept_rows():
        call, right, wrong = shares(correct, p, n, "unbiased")
        must_be(f"{call}: weights of the right rows / n", right, p)
        must_be(f"{call}: weights of all rows / n", right + wrong, 1)


def check_log():
    """log: unbiased by p_hat, the gradient of log p"""
    for correct, p, n in kept_rows():
        call, right, wrong = shares(correct, p, n, "log")
        must_be(f"{call}: weights of the right rows / n", right, 1)
        must_be(f"{call}: weights of the wrong rows / n", wrong, (1 - p) / p)


def check_one_kind():
    """pools, or kept rows, of one kind divide by nothing that is 0"""
    for kind in ("none", "unbiased", "log", "inv_p"):
        for correct, p in (([False] * 2, 0.0), ([True] * 2, 1.0)):
            yours = ada.row_weights(correct, p, 2, kind)
            must_be(call_of(correct, p, 2, kind), yours, [1.0, 1.0])
    for kind, right in (("unbiased", 0.5), ("log", 1.0)):  # the pool had both kinds
        for correct in ([True], [False]):
            yours = ada.row_weights(correct, 0.5, 1, kind)
            must_be(call_of(correct, 0.5, 1, kind), yours, [right])


def sizes_of(p, norms, total, alpha=0.0, beta=2.0):
    call = (f"allocate_gvm(p={spelled(p)}, norms={spelled(norms)}, total={total}, alpha={alpha:g}, "
            f"beta={beta:g})")
    sizes = ada.allocate_gvm(p, norms, total, alpha, beta)
    if len(sizes) != len(p) or any(type(x) is not int or x < 0 for x in sizes):
        raise Wrong(f"{call}: yours is {spelled(sizes)}, and it must be {len(p)} whole numbers, "
                    "none of them negative")
    return sizes, call


def check_totals():
    """allocation: it adds up, and hopeless prompts get nothing"""
    for p in ([0.5], [0.5, 0.1], [0.0, 0.5], [0.3, 0.3, 0.3]):
        for total in (1, 7, 10):
            sizes, call = sizes_of(p, [1.0] * len(p), total, 1e-3)
            must_be(f"{call} = {spelled(sizes)}: its sum", sum(sizes), total)
            must_be(f"{call} = {spelled(sizes)}: of prompts with p = 0",
                    sum(s for s, x in zip(sizes, p) if x == 0), 0)
    sizes, call = sizes_of([0.0, 0.0], [1.0, 1.0], 8, 1e-3)
    must_be(call, sizes, [0, 0], why="Nobody has a right answer, so all weights are 0.")
    sizes, call = sizes_of([0.5, 0.5], [0.0, 0.0], 8, 1e-3)
    must_be(call, sizes, [0, 0], why="All norms are 0, so all weights are.")


def check_variance():
    """allocation: with alpha = 0, no move of 5 samples lowers the variance"""
    for p, norms in (([0.5, 0.1], [1.0, 1.0]), ([0.5, 0.5], [1.0, 3.0]),
                     ([0.9, 0.2, 0.05], [1.0, 2.0, 0.5])):
        sizes, call = sizes_of(p, norms, 1000)

        def variance(n):
            return sum(g * g / (x * k) if k > 0 else float("inf") for g, x, k in zip(norms, p, n))

        for i, j in itertools.permutations(range(len(p)), 2):
            moved = [k - 5 * (a == i) + 5 * (a == j) for a, k in enumerate(sizes)]
            if variance(moved) < variance(sizes):
                raise Wrong(f"{call}: yours is {spelled(sizes)}, with the variance "
                            f"{variance(sizes):.6g}; {spelled(moved)} has {variance(moved):.6g}")


def check_penalty():
    """allocation: with beta = 2, a prompt of p = sqrt(alpha) gets most"""
    for alpha, p in ((0.01, [0.05, 0.1, 0.2]), (1e-4, [0.005, 0.01, 0.02])):
        sizes, call = sizes_of(p, [1.0] * 3, 3000, alpha)
        if max(sizes) != sizes[1]:
            raise Wrong(f"{call}: yours is {spelled(sizes)}, and the prompt with p = sqrt(alpha) = "
                        f"{p[1]:g} must get most")
        ratio = sizes[0] / sizes[1]
        must_be(f"{call} = {spelled(sizes)}: first / second", ratio, 0.8 ** 0.5, 2e-3)
    sizes, call = sizes_of([0.1, 0.2], [1.0, 1.0], 3000, 0.01, 1.0)  # w = 1 / sqrt(p + alpha)
    must_be(f"{call} = {spelled(sizes)}: first / second", sizes[0] / sizes[1],
            (0.21 / 0.11) ** 0.5, 2e-3)


CHECKS = [(1, check_plain), (2, check_unbiased), (1, check_log), (1, check_one_kind),
          (1, check_totals), (2, check_variance), (2, check_penalty)]
