"""Lab 1: REINFORCE with a baseline"""
import itertools
import statistics

import torch

import ada_sampler as ada
from course.checks import Wrong, called, must_be, must_give, spelled


def bandit_gradient(theta, actions, rewards, baseline):
    """The project has no bandit: the student's function replaces this one."""
    raise NotImplementedError


def bandit(K: int):
    """Logits and rewards of K actions."""
    theta = torch.tensor([0.0, 0.5, -1.0][:K], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0, 3.0][:K], dtype=torch.float64)
    return theta, rewards


def check_one_draw():
    """one draw: (r - b) times the gradient of log pi"""
    for K, b in itertools.product((2, 3), (0.0, 0.5)):
        theta, rewards = bandit(K)
        for a in range(K):
            leaf = theta.clone().requires_grad_()
            slope, = torch.autograd.grad(leaf.log_softmax(0)[a], leaf)
            must_give((rewards[a] - b) * slope,
                      bandit_gradient, theta, torch.tensor([a]), rewards[[a]], b)


def check_expectation():
    """two draws: the expectation is the true gradient, for every baseline"""
    for K, b in itertools.product((2, 3), (0.0, 1.0, -7.0)):
        theta, rewards = bandit(K)
        leaf, pi = theta.clone().requires_grad_(), theta.softmax(0)
        true, = torch.autograd.grad((leaf.softmax(0) * rewards).sum(), leaf)
        mean = torch.zeros_like(theta)
        for pair in itertools.product(range(K), repeat=2):  # all that can be drawn, exactly
            a = torch.tensor(pair)
            mean += pi[a].prod() * bandit_gradient(theta, a, rewards[a], b)
        must_be(f"E[bandit_gradient] over all pairs of draws, theta={spelled(theta)}, rewards of "
                f"the actions {spelled(rewards)}, baseline {b:g}", mean, true)


def pools():
    """Every pool of right and wrong, up to four, the small ones first; and other rewards."""
    for m in range(1, 5):
        for right in range(m + 1):
            yield [1.0] * right + [0.0] * (m - right)
    yield [3.0, 0.5, 1.0]


def check_pool_mean():
    """pool-mean: the mean of all that was drawn, whatever is kept"""
    for pool in pools():
        for kept in ([max(pool)], [min(pool), max(pool)]):
            must_give([r - sum(pool) / len(pool) for r in kept],
                      ada.advantages, kept, pool, "pool-mean",
                      why="The baseline is the mean of the pool, not of the kept ones.")


def check_leave_one_out():
    """leave-one-out: the mean of the others in the pool; unbiased for every pass rate"""
    for pool in pools():
        for r in set(pool) if len(pool) > 1 else ():
            others = (sum(pool) - r) / (len(pool) - 1)
            must_give([r - others], ada.advantages, [r], pool, "leave-one-out")
    for m, p in itertools.product((2, 3), (0.5, 0.1)):
        mean = 0.0
        for draws in itertools.product((0.0, 1.0), repeat=m):
            chance = p ** sum(draws) * (1 - p) ** (m - sum(draws))
            A = ada.advantages(list(draws), list(draws), "leave-one-out")
            mean += chance * sum(a * (x - p) for a, x in zip(A, draws)) / m
        must_be(f"E[A grad log pi] for {m} draws, right with probability {p}, as a derivative "
                "for the logit of p", mean, p * (1 - p))


def check_group_std():
    """group-std: mean 0 and standard deviation 1, with m - 1 in the denominator"""
    for pool in ([1.0, 0.0], [1.0, 0.0, 0.0], [3.0, 1.0, 1.0, 0.0]):
        A = ada.advantages(pool, pool, "group-std")
        must_give(A[:1], ada.advantages, pool[:1], pool, "group-std",
                  why="That is what yours gives when all are kept: the pool is the same.")
        call = f"{called(ada.advantages, pool, pool, 'group-std')} = {spelled(A)}"
        must_be(f"{call}: its mean", sum(A) / len(A), 0, 1e-6)
        must_be(f"{call}: its standard deviation", statistics.stdev(A), 1, 1e-4)


def check_edges():
    """positives-only, pools of one, and equal rewards that give exactly 0"""
    mixed = [-1.0, 0.0, 0.5]
    must_give([0, 0, 0.5], ada.advantages, mixed, mixed, "positives-only")
    must_give([1], ada.advantages, [1.0], [1.0], "positives-only")
    for kind in ("pool-mean", "leave-one-out", "group-std"):
        must_give([0], ada.advantages, [1.0], [1.0], kind)
        for value, m in itertools.product((0.1, 0.7), (3, 6)):
            A = ada.advantages([value] * m, [value] * m, kind)
            if any(A):
                raise Wrong(f"advantages(kept={m} times {value}, pool={m} times {value}, "
                            f"{kind!r}): yours begins with {A[0]!r}, and it must be exactly 0")


CHECKS = [(3, check_one_draw), (2, check_expectation), (2, check_pool_mean),
          (1, check_leave_one_out), (1, check_group_std), (1, check_edges)]
