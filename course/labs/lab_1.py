"""Lab 1: REINFORCE with a baseline.

    python course/check.py 1              # points, and the smallest counterexample
    python course/train.py --with lab_1   # your `advantages` trains the tiny model

Before text, a bandit: one state, K actions, pi = softmax(theta). What holds for a language model
holds here already, and can be checked exactly.
"""
import torch  # noqa: F401


def bandit_gradient(theta, actions, rewards, baseline: float):
    """The REINFORCE estimate of grad_theta E_pi[r] from n draws.

        g = 1/n sum_i (r_i - b) grad_theta log pi(a_i),     pi = softmax(theta)

    theta [K] float64 has the logits, actions [n] int64 were drawn from pi, and rewards [n] is
    float64. Returns g [K], in float64 or float32. For the softmax, grad log pi(a) = onehot(a) - pi.
    Derive it, or use autograd. The three tensors stay as they are, so that a second call gives the
    same g.

    The expectation of g must be the true gradient for *every* baseline b.
    """
    raise NotImplementedError


def advantages(kept_rewards: list[float], pool_rewards: list[float], kind: str) -> list[float]:
    """Each of the kept rewards r, compared with a baseline. Returns one number for each.

    pool_rewards has the rewards of all m answers to this prompt. kept_rewards has those of the n
    answers that go into the update, in any order. A rule that looked at the rewards has chosen them
    from the pool, so mean and std are those of the pool.

        pool-mean       r - mean                v1 section 2.3 of Reinforce-Ada
        leave-one-out   r - mean of the others = m/(m-1) (r - mean)     RLOO
        group-std       (r - mean) / (std + 1e-6), std with m - 1 in the denominator     GRPO
        positives-only  max(r, 0)               RAFT

    Two rules hold for the first three kinds, but not for positives-only, which has no baseline.
    In a pool of one there is nothing to compare with, so the result is 0. Where all rewards of the
    pool are equal the result is exactly 0 and not 1e-17, because a rounding error must not pass for
    a signal. (Three times 0.1, divided by 3, is not 0.1.)
    """
    raise NotImplementedError
