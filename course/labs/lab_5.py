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

    lp_T = log pi_theta (has a gradient), old_T = log pi_old, mu_T = log mu, all [T] in nats.
    """
    raise NotImplementedError


def objective(lp_T, old_T, mu_T, advantage_T, config):
    """MiniRL, Eq. 7, per token; to be summed and maximised.

        M_t * sg[min(w_t, cap)] * A_t * log pi_theta(y_t)        sg: no gradient through it

        w_t   importance_weight(..., config.importance)
        cap   config.weight_cap; 0 = no cap
        M_t   0 if A > 0 and r > 1 + config.eps_high
              0 if A < 0 and r < 1 - config.eps_low
              1 otherwise, and always 1 if config.clip is False        r = pi_theta / pi_old

    The mask looks at how far the *trainer* has moved: r, not w. It closes only in the direction in
    which the advantage pushes.

    lp_T, old_T, mu_T as above; advantage_T [T], A for each token.
    Returns (term_T, M_T, w_T), each [T]. w_T is the weight before the cap, for the log.
    The project's own function has more objectives and masks: leave them out.
    """
    raise NotImplementedError


def set_norms(rows: list, config) -> None:
    """Set row.norm, the factor of each of its tokens in the loss -sum(term_T * norm_T).

    rows: all kept samples of a step; row.length is the number of response tokens. They will be cut
    into config.mini_batches optimizer steps. Each step's loss is a mean over responses, divided by
    a length that config.length_norm names:

        constant   config.max_tokens: the sum over tokens, up to one constant factor (MiniRL)
        response   the response's own length: the mean over its tokens (GRPO)
        batch      the mean length of all rows: the mean over all tokens

    Divide by the responses of an *average* mini-batch, len(rows) / config.mini_batches, not by
    those of the row's own: some samplers give important prompts more rows, and dividing by the own
    count would cancel that. No rows: nothing to set.
    """
    raise NotImplementedError
