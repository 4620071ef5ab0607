"""Lab 4: what is really optimised, and where the next sample should go.

    python course/check.py 4
    python course/train.py --with lab_4   # your row_weights, with --weighting log

Both functions belong to the notes of session 4, and formula (1) is in those of session 3.
"""
from ada_sampler import largest_remainder  # noqa: F401


def row_weights(correct: list[bool], p_hat: float, rows_per_prompt: float, kind: str):
    """A weight for each kept row, from its kind and the pass rate of the *pool*.

    correct: says of each kept row whether it is right; k_pos are, k_neg are not. p_hat: share of
    right answers among all draws. rows_per_prompt (n): an average over prompts, so it may differ
    from len(correct). Returns a list.

        none      1
        unbiased  right rows p_hat n / k_pos, wrong rows (1 - p_hat) n / k_neg: each kind stands for
                  its share of the pool, as if the n rows had not been chosen
        log       unbiased, times 1 / p_hat: nearly ascends E[log p]
        inv_p     1 / p_hat

    With p_hat = 0 leave out the factor 1 / p_hat: there is no right row, and no signal.
    """
    raise NotImplementedError


def allocate_gvm(p: list[float], norms: list[float], total: int, alpha: float,
                 beta: float) -> list[int]:
    """How many of `total` samples each prompt gets (GVM, arXiv 2505.02391, Prop. 1).

        n_i = total w_i / sum(w),      w_i = G_i / sqrt(p_i + alpha / p_i^(beta - 1))

    p: pass rates; norms: G_i. w_i = 0 where p_i = 0; if all w_i are 0, nobody gets anything.
    Whole numbers that add up to `total`: largest_remainder(shares, total) makes them, if the shares
    add up to `total`. (It rounds down, then adds 1 where most was cut off.)

    Why: the estimator (1 / (n_i p_i)) sum over right samples of grad log pi has, summed over
    prompts, a variance of up to sum_i G_i^2 / (p_i n_i). With alpha = 0 this is its minimum under
    sum n_i = total (Lagrange). alpha > 0 keeps hopeless prompts from taking all samples.
    """
    raise NotImplementedError
