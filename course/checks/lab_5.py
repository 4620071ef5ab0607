"""Lab 5: the objective, with mask and cap"""
import math

import torch

import minirl
from course.checks import Wrong, must_be, spelled
from parts.config import Config

CASES = [  # r = pi_theta / pi_old, advantage, M
    (1.0, 1.0, 1), (1.28, 1.0, 0), (1.26, 1.0, 1), (0.5, 1.0, 1), (1.0, -1.0, 1), (0.79, -1.0, 0),
    (0.81, -1.0, 1), (2.0, -1.0, 1), (0.5, 0.0, 1), (2.0, 0.0, 1)]
SWITCHES = [  # (pi_theta, pi_old, mu), advantage, M, gradient, settings
    ((0.8, 0.4, 0.4), 1.0, 1, 2, dict(clip=False, mini_batches=2)),
    ((0.2, 0.4, 0.4), -1.0, 1, -0.5, dict(clip=False, mini_batches=2)),
    ((0.5, 0.4, 0.4), 1.0, 0, 0, dict(eps_high=0.2)),  # r = 1.25
    ((0.35, 0.4, 0.4), -1.0, 0, 0, dict(eps_low=0.1)),  # r = 0.875
    ((0.44, 0.4, 0.2), 1.0, 1, 1.1, dict(importance="staleness")),
    ((0.4, 0.4, 0.2), 1.0, 1, 1, dict(importance="none"))]


def tokens(*triples):
    """(lp with gradient, old, mu) from probabilities (pi_theta, pi_old, mu)."""
    lp, old, mu = torch.tensor(triples, dtype=torch.float64).log().T
    return lp.clone().requires_grad_(), old, mu


def ask(triple, A: float, **settings):
    """(call, d term / d log pi, mask, weight) of one token."""
    lp, old, mu = tokens(triple)
    A_T = torch.tensor([A], dtype=torch.float64)
    term, mask, weight = minirl.objective(lp, old, mu, A_T, Config(**settings))
    said = "".join(f", {name}={value}" for name, value in settings.items())
    pi, pi_old, m = triple
    call = f"objective(pi_theta={pi:.4g}, pi_old={pi_old:.4g}, mu={m:.4g}, A={A:g}{said})"
    must_be(f"{call}: A after the call, which needs it again", A_T, [A])
    if not term.requires_grad:
        raise Wrong(f"{call}: the term has no gradient, so nothing could be learnt from it")
    slope, = torch.autograd.grad(term.sum(), lp)
    return call, slope, mask, weight


def check_weights():
    """the three kinds of weight, none with a gradient"""
    known = (0.5, 0.5, 0.25), (0.5, 0.25, 0.5), (0.6, 0.3, 0.2)
    for triples in ([known[0]], [known[1]], [known[2]], known):
        lp, old, mu = tokens(*triples)
        pi, pi_old, m = (spelled(x.exp()) for x in (lp, old, mu))
        for kind, right in (("full", lp - mu), ("staleness", lp - old), ("none", 0 * lp)):
            yours = minirl.importance_weight(lp, old, mu, kind)
            call = f"importance_weight(pi_theta={pi}, pi_old={pi_old}, mu={m}, {kind!r})"
            must_be(call, yours, right.exp())
            if yours.requires_grad:
                raise Wrong(f"{call} carries a gradient: detach it")


def check_gradient():
    """d term / d log pi is M w A, and nothing else"""
    for triple, A in (((0.5, 0.5, 0.5), 1.0), ((0.5, 0.5, 0.25), 1.0), ((0.5, 0.45, 0.25), -2.0),
                      ((0.01, 0.01, 0.01), 1.0)):
        call, slope, _, _ = ask(triple, A)
        must_be(f"d/d(log pi) of {call}", slope, [triple[0] / triple[2] * A],
                why="That is M w A: w is a constant to autograd, and M = 1, for r is "
                    "within its bounds.")


def check_mask():
    """the mask, at many r: for each sign of A it closes on one side of 1 only"""
    for r, A, right in CASES:
        call, slope, mask, weight = ask((0.4 * r, 0.4, 0.4 * r), A)
        must_be(f"{call}, r = {r:g}: M", mask, [right])
        must_be(f"{call}, r = {r:g}: gradient", slope, [right * A])
        must_be(f"{call}, r = {r:g}: the weight that is returned", weight, [1])
    rs, A_T, right = torch.tensor(CASES, dtype=torch.float64).T
    lp, old, mu = tokens(*((0.4 * r, 0.4, 0.4 * r) for r in rs.tolist()))
    _, mask, _ = minirl.objective(lp, old, mu, A_T.clone(), Config())
    must_be(f"M of several tokens at once, r = {spelled(rs)}, A = {spelled(A_T)}", mask, right)


def check_engine():
    """the mask does not look at mu: the engine's noise is no movement"""
    for mu in (0.2, 0.4, 0.8):
        for A in (1.0, -1.0):
            call, _, mask, _ = ask((0.4, 0.4, mu), A)
            must_be(f"{call}, r = 1: M", mask, [1])


def check_cap():
    """the cap bounds the weight and keeps the gradient; the weight is reported as it was"""
    for ratio, cap, bounded in ((4.0, 5.0, 4.0), (8.0, 5.0, 5.0), (8.0, 2.0, 2.0), (0.1, 5.0, 0.1),
                                (8.0, 7.0, 7.0), (8.0, 0.0, 8.0)):
        for A in (1.0, -2.0, 2.0):
            call, slope, _, weight = ask((0.1 * ratio, 0.1 * ratio, 0.1), A, weight_cap=cap)
            must_be(f"d/d(log pi) of {call}", slope, [bounded * A])
            must_be(f"{call}: the weight that is returned", weight, [ratio])


def check_switches():
    """clip=False, other eps_low and eps_high, other kinds of weight"""
    for triple, A, M, right, settings in SWITCHES:
        call, slope, mask, _ = ask(triple, A, **settings)
        must_be(f"{call}: [M, gradient]", [mask.item(), slope.item()], [M, right])


def check_unbiased():
    """three actions drawn from another mu: the expectation is the true gradient"""
    theta = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reward = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    true, = torch.autograd.grad((theta.softmax(0) * reward).sum(), theta)
    lp = theta.log_softmax(0)
    term, _, _ = minirl.objective(lp, lp.detach(), mu.log(), reward, Config())
    found, = torch.autograd.grad((mu * term).sum(), theta)
    must_be(f"E_mu[gradient], mu = {spelled(mu)}, rewards {spelled(reward)}", found, true)


def check_ppo():
    """with an exact engine it is PPO's clipped objective, token by token"""
    for r in (0.5, 0.9, 1.0, 1.2, 1.5):
        for A in (1.0, -1.0):
            call, slope, _, _ = ask((0.4 * r, 0.4, 0.4), A, weight_cap=0.0, mini_batches=2)
            leaf = torch.tensor(math.log(0.4 * r), dtype=torch.float64, requires_grad=True)
            ratio = (leaf - math.log(0.4)).exp()
            ppo, = torch.autograd.grad(torch.minimum(ratio * A, ratio.clamp(0.8, 1.27) * A), leaf)
            must_be(f"d/d(log pi) of {call}, r = {r:g}, against PPO's", slope, [ppo.item()])


CHECKS = [(1, check_weights), (2, check_gradient), (2, check_mask), (1, check_engine),
          (1, check_cap), (1, check_switches), (1, check_unbiased), (1, check_ppo)]
