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

    theta [K] float64, the logits; actions [n] int64, drawn from pi; rewards [n] float64.
    Returns g [K]. For the softmax, grad log pi(a) = onehot(a) - pi: derive it, or use autograd.

    Its expectation must be the true gradient for *every* baseline b.
    """
    raise NotImplementedError


def advantages(kept_rewards: list[float], pool_rewards: list[float], kind: str) -> list[float]:
    """The kept rewards, each compared with a baseline. One number for each of them.

    pool_rewards: of all m draws for this prompt. kept_rewards: of those that go into the update,
    chosen from the pool by a rule that looked at the rewards. So mean and std are the pool's.

        pool-mean       r - mean                v1 section 2.3 of Reinforce-Ada
        leave-one-out   r - mean of the others = m/(m-1) (r - mean)     RLOO
        group-std       (r - mean) / (std + 1e-6), std with m - 1 in the denominator     GRPO
        positives-only  max(r, 0)               RAFT

    In a pool of one there is nothing to compare with: 0 (except for positives-only).
    Where all rewards are equal the result is exactly 0 and not 1e-17: a rounding error must not
    pass for a signal. (Three times 0.1, divided by 3, is not 0.1.)
    """
    raise NotImplementedError
