"""Lab 1: REINFORCE with a baseline"""
import itertools
import statistics

import torch

import ada_sampler as ada
from course.checks import asked, called, must_be, must_give, scenes, spelled


def bandit(K: int):
    """Logits and rewards of K actions."""
    return torch.tensor([[0.0, 0.5, -1.0], [1.0, 0.0, 3.0]], dtype=torch.float64)[:, :K]


def gradient_of_log_pi(theta, a):
    leaf = theta.clone().requires_grad_()
    return torch.autograd.grad(leaf.log_softmax(0)[a], leaf)[0]


def ask_draws(actions, b):
    """The mean of what each draw gives."""
    theta, rewards = bandit(max(2, 1 + max(actions)))
    n, a = len(actions), torch.tensor(actions)
    scores = torch.stack([gradient_of_log_pi(theta, one) for one in actions])
    factors, pi, onehot = rewards[a] - b, theta.softmax(0), torch.eye(len(theta)).double()[a]
    right = factors @ scores / n
    must_give(right, scenes.bandit_gradient, theta, a, rewards[a], b, causes={
        "That is the gradient without the baseline.": rewards[a] @ scores / n,
        "That is the gradient without the baseline, minus the baseline.":
            rewards[a] @ scores / n - b,
        "That is the sum over the draws, not their mean.": factors @ scores,
        "That is the result with onehot(a) for grad log pi(a).": factors @ onehot / n,
        "That is the result with grad pi(a) for grad log pi(a).": factors @ (pi[a, None] * scores),
        "That has the opposite sign.": -right})


def ask_twice(actions, b):
    theta, rewards = bandit(2)
    a = torch.tensor(actions)
    given = theta, a, rewards[a]
    first, second = asked.twice(*given, b)
    call = called(scenes.bandit_gradient, *given, b)
    must_be(f"{call}, a second time with the same tensors", second, first)


def ask_expectation(K, b):
    theta, rewards = bandit(K)
    pi, mean = theta.softmax(0), torch.zeros_like(theta)
    for pair in itertools.product(range(K), repeat=2):  # all that can be drawn, exactly
        a = torch.tensor(pair)
        g = scenes.bandit_gradient(theta, a, rewards[a], b)
        mean += pi[a].prod() * torch.as_tensor(g)
    must_be(f"E[bandit_gradient] over all pairs of draws, theta={spelled(theta)}, rewards of "
            f"the actions {spelled(rewards)}, baseline {b:g}", mean, pi * (rewards - pi @ rewards))


def ask_pool_mean(kept, pool):
    causes = {"That is what the mean of the kept gives as the baseline.":
              [r - sum(kept) / len(kept) for r in kept]} if len(kept) > 1 else {}
    must_give([r - sum(pool) / len(pool) for r in kept],
              ada.advantages, list(kept), list(pool), "pool-mean", causes=causes)


def ask_leave_one_out(kept, pool):
    def less(gone: list):
        return [r - (sum(pool) - x) / (len(pool) - 1) for r, x in zip(kept, gone)]
    causes = {"That leaves out pool_rewards[i] for the i-th of the kept.": less(pool)}
    if {*kept} == {1.0, 0.0}:
        causes["That leaves out all with the same reward, not only one."] = [1.0, -1.0]
    if len(kept) > 1:
        factor = len(kept) / (len(kept) - 1)
        causes["That has the factor n / (n - 1), with the number of the kept for m."] = [
            factor * (r - sum(pool) / len(pool)) for r in kept]
    must_give(less(kept), ada.advantages, list(kept), list(pool), "leave-one-out", causes=causes)


def ask_group_std(pool):
    A = ada.advantages(list(pool), list(pool), "group-std")
    must_give(A[:1], ada.advantages, pool[:1], list(pool), "group-std",
              why="That is what yours gives when all are kept, and the pool is the same.")
    call = f"{called(ada.advantages, pool, pool, 'group-std')} = {spelled(A)}"
    must_be(f"{call}: its mean", sum(A) / len(A), 0)
    must_be(f"{call}: its standard deviation", statistics.stdev(A), 1, 1e-4, causes={
        "That is what a standard deviation with m in the denominator gives.":
            (len(A) / (len(A) - 1)) ** 0.5})


def ask_epsilon():
    """A pool whose standard deviation is so small that 1e-6 changes the result."""
    pool = [0.0, 1e-4]
    std = statistics.stdev(pool)
    must_give([r / (std + 1e-6) for r in (-5e-5, 5e-5)], ada.advantages, pool, pool, "group-std",
              causes={"That is the result without + 1e-6.": [r / std for r in (-5e-5, 5e-5)]})


def ask_edges():
    mixed = [-1.0, 0.0, 0.5]
    must_give([0, 0, 0.5], ada.advantages, mixed, mixed, "positives-only")
    for same in ([1.0], [1.0, 1.0]):
        must_give(same, ada.advantages, list(same), list(same), "positives-only")
    for kind in ("pool-mean", "leave-one-out", "group-std"):
        must_give([0], ada.advantages, [1.0], [1.0], kind)
        for value, m in itertools.product((0.1, 0.7), (3, 6)):
            A = ada.advantages([value] * m, [value] * m, kind)
            call = f"{kind} of {m} times {value}"
            must_be(call, A, [0.0] * m, tolerance=0, why="It must be exactly 0.")


def ask_std(pool=()):
    ask_group_std(pool) if pool else ask_epsilon()


# every pool of right and wrong, up to four, the small ones first; and other rewards
POOLS = [[1.0] * right + [0.0] * (m - right) for m in range(1, 5) for right in range(m + 1)]
POOLS += [[3.0, 0.5, 1.0]]
KEPT = [*((sorted({*pool}, reverse=True), pool) for pool in POOLS),  # kept rewards, pool
        *(([r], pool) for pool in POOLS for r in (max(pool), min(pool)))]
CHECKS = [
    (3, "one draw: (r - b) times the gradient of log pi", ask_draws,
     [([a], b) for K in (2, 3) for b in (0.0, 0.5) for a in range(K)]),
    (2, "two draws: their mean, whose expectation is the true gradient for every baseline",
     lambda ask, *row: ask(*row),
     [(ask_draws, pair, b) for b in (0.0, 0.5) for pair in ([0, 1], [0, 0], [1, 2], [2, 2])]
     + [(ask_twice, [0, 1], b) for b in (0.0, 0.5)]
     + [(ask_expectation, *row) for row in itertools.product((2, 3), (0.0, 1.0, -7.0))]),
    (2, "pool-mean: the mean of all that was drawn, whatever is kept", ask_pool_mean, KEPT),
    (1, "leave-one-out: the mean of the others in the pool", ask_leave_one_out,
     [(kept, pool) for kept, pool in KEPT if len(pool) > 1]),
    (1, "group-std: mean 0, standard deviation 1, with m - 1 below, and + 1e-6", ask_std,
     [*zip([[1.0, 0.0], [1.0, 0.0, 0.0], [3.0, 1.0, 1.0, 0.0]]), ()]),
    (1, "positives-only, pools of one, equal rewards: exactly 0", ask_edges,
     [()])]
