"""Lab 1: REINFORCE with a baseline"""
import itertools
import statistics

import torch

import ada_sampler as ada
from course.checks import called, must_be, must_give, spelled


def bandit_gradient(theta, actions, rewards, baseline):
    """The project has no bandit: the student's function replaces this one."""
    raise NotImplementedError


def bandit(K: int):
    """Logits and rewards of K actions."""
    return torch.tensor([[0.0, 0.5, -1.0], [1.0, 0.0, 3.0]], dtype=torch.float64)[:, :K]


def ask_one_draw(K, b):
    theta, rewards = bandit(K)
    for a in range(K):
        leaf = theta.clone().requires_grad_()
        slope, = torch.autograd.grad(leaf.log_softmax(0)[a], leaf)
        must_give((rewards[a] - b) * slope,
                  bandit_gradient, theta, torch.tensor([a]), rewards[[a]], b)


def ask_expectation(K, b):
    theta, rewards = bandit(K)
    pi, mean = theta.softmax(0), torch.zeros_like(theta)
    for pair in itertools.product(range(K), repeat=2):  # all that can be drawn, exactly
        a = torch.tensor(pair)
        mean += pi[a].prod() * bandit_gradient(theta, a, rewards[a], b)
    must_be(f"E[bandit_gradient] over all pairs of draws, theta={spelled(theta)}, rewards of "
            f"the actions {spelled(rewards)}, baseline {b:g}", mean, pi * (rewards - pi @ rewards))


def ask_pool_mean(pool):
    for kept in ([max(pool)], [min(pool), max(pool)]):
        must_give([r - sum(pool) / len(pool) for r in kept],
                  ada.advantages, kept, list(pool), "pool-mean",
                  why="The baseline is the mean of the pool, not of the kept ones.")


def ask_leave_one_out(pool):
    for r in set(pool) if len(pool) > 1 else ():
        others = (sum(pool) - r) / (len(pool) - 1)
        must_give([r - others], ada.advantages, [r], list(pool), "leave-one-out")


def ask_group_std(pool):
    A = ada.advantages(pool, pool, "group-std")
    must_give(A[:1], ada.advantages, pool[:1], pool, "group-std",
              why="That is what yours gives when all are kept: the pool is the same.")
    call = f"{called(ada.advantages, pool, pool, 'group-std')} = {spelled(A)}"
    must_be(f"{call}: its mean", sum(A) / len(A), 0, 1e-6)
    must_be(f"{call}: its standard deviation", statistics.stdev(A), 1, 1e-4)


def ask_edges():
    mixed = [-1.0, 0.0, 0.5]
    must_give([0, 0, 0.5], ada.advantages, mixed, mixed, "positives-only")
    must_give([1], ada.advantages, [1.0], [1.0], "positives-only")
    for kind in ("pool-mean", "leave-one-out", "group-std"):
        must_give([0], ada.advantages, [1.0], [1.0], kind)
        for value, m in itertools.product((0.1, 0.7), (3, 6)):
            A = ada.advantages([value] * m, [value] * m, kind)
            call = f"{kind} of {m} times {value}"
            must_be(call, A, [0.0] * m, tolerance=0, why="It must be exactly 0.")


# every pool of right and wrong, up to four, the small ones first; and other rewards
POOLS = [([1.0] * right + [0.0] * (m - right),) for m in range(1, 5) for right in range(m + 1)]
POOLS += [([3.0, 0.5, 1.0],)]
CHECKS = [
    (3, "one draw: (r - b) times the gradient of log pi", ask_one_draw,
     [(2, 0.0), (2, 0.5), (3, 0.0), (3, 0.5)]),
    (2, "two draws: the expectation is the true gradient, for every baseline", ask_expectation,
     [*itertools.product((2, 3), (0.0, 1.0, -7.0))]),
    (2, "pool-mean: the mean of all that was drawn, whatever is kept", ask_pool_mean, POOLS),
    (1, "leave-one-out: the mean of the others in the pool", ask_leave_one_out, POOLS),
    (1, "group-std: mean 0, standard deviation 1, with m - 1 below", ask_group_std,
     [*zip([[1.0, 0.0], [1.0, 0.0, 0.0], [3.0, 1.0, 1.0, 0.0]])]),
    (1, "positives-only, pools of one, equal rewards: exactly 0", ask_edges,
     [()])]
