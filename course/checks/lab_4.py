"""Lab 4: what is really optimised, and where the next sample should go"""
import itertools

import ada_sampler as ada
from course import laws
from course.checks import Wrong, called, must_be, must_give, near, spelled


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


def ask_shares(kind: str, shares):
    """shares: p_hat -> what the weights of the right rows, and of the wrong ones, add up to / n."""
    for correct, p, n in kept_rows():
        kept = sum(correct) / len(correct)
        causes = {} if p in (0.5, kept) else {  # otherwise they would give the same
            "That is what the share of right rows among the kept gives for p_hat.":
                weights_of(correct, n, *shares(kept)),
            "That is the other kind's share.": weights_of(correct, n, *shares(p)[::-1])}
        must_give(weights_of(correct, n, *shares(p)), ada.row_weights, correct, p, n, kind,
                  causes=causes)


def weights_of(correct, n, of_right, of_wrong) -> list[float]:
    """Every row of a kind has the same weight, and n times their share is the sum."""
    k_pos, k_neg = sum(correct), len(correct) - sum(correct)
    return [of_right * n / k_pos if c else of_wrong * n / k_neg for c in correct]


def ask_weights(right, *args):
    must_give(right, ada.row_weights, *args)


def sizes_of(*args):
    """(sizes, the call and its result in words)."""
    sizes, call = ada.allocate_gvm(*args), called(ada.allocate_gvm, *args)
    if len(sizes) != len(args[0]) or any(type(x) is not int or x < 0 for x in sizes):
        raise Wrong(f"{call}: yours is {spelled(sizes)}, and it must be {len(args[0])} whole "
                    "numbers, none of them negative")
    return sizes, f"{call} = {spelled(sizes)}"


def ask_totals(p, norms, total):
    for alpha in (1e-3, 0.0):
        sizes, call = sizes_of(p, norms, total, alpha, 2.0)
        hopeless = sum(s for s, x in zip(sizes, p) if not x)
        must_be(f"{call}: what the prompts with p = 0 get", hopeless, 0)
        some = any(x * g for x, g in zip(p, norms))
        must_be(f"{call}: its sum", sum(sizes), total if some else 0,
                why="" if some else "All weights are 0.")


def ask_variance(p, norms):
    sizes, call = sizes_of(p, norms, 1000, 0.0, 2.0)
    for i, j in itertools.permutations(range(len(p)), 2):
        moved = [k - 5 * (a == i) + 5 * (a == j) for a, k in enumerate(sizes)]
        now, then = (laws.gvm_variance(p, norms, n) for n in (sizes, moved))
        if then < now:
            raise Wrong(f"{call}: sum G_i^2 / (p_i n_i) is {now:.6g}, but {then:.6g} for "
                        f"{spelled(moved)}{squared(sizes, p, norms)}")


def squared(sizes, p, norms) -> str:
    squares = [g * g / x for x, g in zip(p, norms)]  # alpha is 0
    found = near(sizes, [1000 * w / sum(squares) for w in squares], 0.01)
    return "\nThese sizes are proportional to the squares of w." if found else ""


def ask_penalty(p, alpha, beta, ratio):
    sizes, call = sizes_of(p, [1.0] * len(p), 3000, alpha, beta)
    must_be(f"{call}: first / second, which is w_1 / w_2", sizes[0] / max(sizes[1], 1), ratio,
            2e-3)
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
     [(p, [1.0] * len(p), total) for p in ([0.5], [0.5, 0.1], [0.0, 0.5], [0.3, 0.3, 0.3])
      for total in (1, 7, 10)] + [([0.0, 0.0], [1.0, 1.0], 7), ([0.5, 0.5], [0.0, 0.0], 7)]),
    (2, "allocation: with alpha = 0, no move of 5 samples lowers the variance", ask_variance,
     [([0.5, 0.1], [1.0, 1.0]), ([0.5, 0.5], [1.0, 3.0]), ([0.9, 0.2, 0.05], [1.0, 2.0, 0.5])]),
    (2, "allocation: with beta = 2, a prompt of p = sqrt(alpha) gets most", ask_penalty,
     [([0.05, 0.1, 0.2], 0.01, 2.0, 0.8 ** 0.5), ([1.0, 0.5], 0.25, 2.0, 0.8 ** 0.5),
      ([0.005, 0.01, 0.02], 1e-4, 2.0, 0.8 ** 0.5),
      ([0.1, 0.2], 0.01, 1.0, (0.21 / 0.11) ** 0.5)])]  # beta = 1: w = 1 / sqrt(p + alpha)
