"""Lab 5: the objective, with mask and cap, and what one token counts.

    python course/check.py 5
    python course/train.py --with lab_5   # four mini-batches: there is something to mask
"""
import torch  # noqa: F401


def importance_weight(lp_T, old_T, mu_T, kind: str):
    """The weight of each token, [T], a constant to autograd.

        full       pi_theta / mu        corrects for both differences (Eq. 5)
        staleness  pi_theta / pi_old    only for the steps since the batch was drawn
        none       1

    lp_T = log pi_theta (has a gradient), old_T = log pi_old, mu_T = log mu, all [T] in nats. The
    result may be float32 or float64.
    """
    raise NotImplementedError


def objective(lp_T, old_T, mu_T, advantage_T, config):
    """MiniRL, Eq. 7, for each token. The caller sums the terms and maximises the sum.

        M_t * sg[min(w_t, cap)] * A_t * log pi_theta(y_t)        sg: no gradient through it

        w_t   importance_weight(..., config.importance)
        cap   config.weight_cap; 0 = no cap
        M_t   0 if A > 0 and r > 1 + config.eps_high
              0 if A < 0 and r < 1 - config.eps_low
              1 otherwise, and always 1 if config.clip is False        r = pi_theta / pi_old

    The mask looks at how far the *trainer* has moved, that is at r, not at w. It is 0 only where a
    token has moved in the direction in which the advantage pushes. The cap holds for every kind of
    weight.

    lp_T, old_T and mu_T are as above, and advantage_T [T] has an A for each token. The tokens of
    several answers stand one after the other in these tensors, so the A's differ.
    Returns (term_T, M_T, w_T), each [T]. The value of a term counts, not only its gradient. w_T is
    the weight before the cap, for the log. The arguments stay as they are.
    The project's own function has more objectives and masks. Leave them out.
    """
    raise NotImplementedError


def set_norms(rows: list, config) -> None:
    """Set row.norm, the factor of each of its tokens in the loss -sum(term_T * norm_T).

    rows has all kept samples of a step, and row.length is the number of response tokens, at least
    1. The caller cuts the rows into config.mini_batches optimizer steps. Each step's loss is a mean
    over responses, divided by a length that config.length_norm names:

        constant   config.max_tokens: the sum over tokens, up to one constant factor (MiniRL)
        response   the response's own length: the mean over its tokens (GRPO)
        batch      the mean length of all rows: the mean over all tokens

    Divide by the responses of an *average* mini-batch, len(rows) / config.mini_batches, which need
    not be a whole number. Do not divide by the number of responses in the row's own mini-batch,
    because some samplers give important prompts more rows, and that would cancel it. Without rows
    there is nothing to set.
    """
    raise NotImplementedError
