"""Two later answers to the question which tokens to stop, beside MiniRL's: --mask dppo, icepop.

DPPO (arXiv 2602.04879) objects that a ratio says little about how far a policy has moved: a token
of probability 0.001 that has become 0.002 has doubled, and nothing has happened; one that rose from
0.78 to 0.98 has moved a lot, and its ratio is within the bounds. It looks at the difference of the
probabilities, which bounds the total variation, and from mu, the policy that has sampled.

IcePop (Ring-1T, arXiv 2510.18855) objects that a token on which engine and trainer disagree is
noise, whichever way it pushes. It drops what MiniRL cuts off at its cap.
"""
import torch

# IcePop: pi_old/mu of a token that engine and trainer agree on. Both
# ends are this project's choice; the upper one is MiniRL's cap.
AGREE = (0.5, 5.0)


def other_mask(mask_T, lp_T, old_T, mu_T, advantage_T, config):
    """M_t by `config.mask`: 0 for the tokens that are stopped. All [T], log-probs in nats.

        dppo    stops A > 0 where pi_theta - mu > delta, and A < 0 where it is < -delta
        icepop  stops what MiniRL's `mask_T` does, and pi_old/mu outside [1/2, 5]
    """
    if config.mask == "icepop":
        mismatch_T = (old_T - mu_T).exp()
        agree_T = (mismatch_T >= AGREE[0]) & (mismatch_T <= AGREE[1])
        return mask_T * agree_T
    moved_T = lp_T.detach().exp() - mu_T.exp()
    too_far_T = torch.where(advantage_T > 0, moved_T > config.delta, moved_T < -config.delta)
    return (~too_far_T).to(mask_T)
