"""Lab 4: what is really optimised, and where the next sample should go.

    python course/check.py 4
    python course/train.py --with lab_4   # your row_weights, with --weighting log

Both functions belong to the notes of session 4, and formula (1) is in those of session 3.
"""
from ada_sampler import largest_remainder  # noqa: F401


def row_weights(correct: list[bool], p_hat: float, rows_per_prompt: float, kind: str):
    """A weight for each kept row, from its kind and the pass rate of the *pool*.

    correct says of each kept row whether it is right. k_pos of them are, and k_neg are not. p_hat
    is the share of right answers in the pool. rows_per_prompt is n. It is an average over prompts,
    so it may differ from len(correct). Returns a list of numbers.

        none      1
        unbiased  right rows p_hat n / k_pos, wrong rows (1 - p_hat) n / k_neg: each kind stands for
                  its share of the pool, as if the n rows had not been chosen
        log       unbiased, times 1 / p_hat: nearly ascends E[log p]
        inv_p     1 / p_hat

    If p_hat is 0, leave out only the factor 1 / p_hat, so log gives the weights of unbiased and
    inv_p gives 1. All kept rows may be of one kind, although the pool has both. Then the formulas
    still hold for the kind that is there.
    """
    raise NotImplementedError


def allocate_gvm(p: list[float], norms: list[float], total: int, alpha: float,
                 beta: float) -> list[int]:
    """How many of `total` samples each prompt gets (GVM, arXiv 2505.02391, Prop. 1).

        n_i = total w_i / sum(w),      w_i = G_i / sqrt(p_i + alpha / p_i^(beta - 1))

    p has the pass rates and norms the G_i. Returns one whole number for each prompt. w_i is 0 where
    p_i = 0, and only there or where G_i = 0. If all w_i are 0, every prompt gets 0. Otherwise the
    numbers add up to `total`. largest_remainder(shares, total) makes whole numbers from shares that
    add up to `total`. (It rounds down, and then adds 1 where most was cut off.)

    Why: the estimator (1 / (n_i p_i)) sum over right samples of grad log pi has, summed over
    prompts, a variance of up to sum_i G_i^2 / (p_i n_i). With alpha = 0 this is its minimum under
    sum n_i = total (Lagrange). alpha > 0 keeps hopeless prompts from taking all samples.
    """
    raise NotImplementedError
