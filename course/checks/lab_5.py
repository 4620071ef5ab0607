"""Lab 5: the objective, with mask and cap, and what one token counts"""
import itertools

import torch

import minirl
from course.checks import Wrong, must_be, spelled
from parts.config import Settings

TRIPLES = (0.5, 0.5, 0.25), (0.5, 0.25, 0.5), (0.6, 0.3, 0.2)  # pi_theta, pi_old, mu
MASKS = [  # r = pi_theta / pi_old, advantage, M
    (1.0, 1.0, 1), (1.28, 1.0, 0), (1.26, 1.0, 1), (0.5, 1.0, 1), (1.0, -1.0, 1), (0.79, -1.0, 0),
    (0.81, -1.0, 1), (2.0, -1.0, 1), (0.5, 0.0, 1), (2.0, 0.0, 1)]
# rows of `ask`: (pi_theta, pi_old, mu), advantage, M, gradient, settings, weight
OPEN = [
    ((0.5, 0.5, 0.5), 1.0, 1, 1.0), ((0.5, 0.5, 0.25), 1.0, 1, 2.0),
    ((0.5, 0.45, 0.25), -2.0, 1, -4.0), ((0.01, 0.01, 0.01), 1.0, 1, 1.0)]
ENGINES = [((0.4, 0.4, mu), A, 1, 0.4 / mu * A) for mu in (0.2, 0.4, 0.8) for A in (1.0, -1.0)]
CAPS = [((0.1 * ratio, 0.1 * ratio, 0.1), A, 1, bounded * A, dict(weight_cap=cap))
        for ratio, cap, bounded in ((4, 5.0, 4), (8, 5.0, 5), (8, 2.0, 2), (0.1, 5.0, 0.1),
                                    (8, 7.0, 7), (8, 0.0, 8))
        for A in (1.0, -2.0, 2.0)]
SWITCHES = [
    ((0.8, 0.4, 0.4), 1.0, 1, 2, dict(clip=False, mini_batches=2)),
    ((0.2, 0.4, 0.4), -1.0, 1, -0.5, dict(clip=False, mini_batches=2)),
    ((0.5, 0.4, 0.4), 1.0, 0, 0, dict(eps_high=0.2)),  # r = 1.25
    ((0.35, 0.4, 0.4), -1.0, 0, 0, dict(eps_low=0.1)),  # r = 0.875
    ((0.44, 0.4, 0.2), 1.0, 1, 1.1, dict(importance="staleness"), 1.1),
    ((0.4, 0.4, 0.2), 1.0, 1, 1, dict(importance="none"), 1),
    ((0.6, 0.4, 0.2), 1.0, 0, 0, dict(importance="none"), 1)]
NORMS = {  # --length-norm -> the norm of every row, for lengths, N mini-batches and max_tokens
    "constant": lambda lengths, N, most: [N / len(lengths) / most for _ in lengths],
    "response": lambda lengths, N, most: [N / len(lengths) / length for length in lengths],
    "batch": lambda lengths, N, most: [N / sum(lengths) for _ in lengths]}


def tokens(*triples):
    """(lp with gradient, old, mu) from probabilities (pi_theta, pi_old, mu)."""
    lp, old, mu = torch.tensor(triples, dtype=torch.float64).log().T
    return lp.clone().requires_grad_(), old, mu


def ask(triple, A: float, M, slope, settings={}, weight=None):
    """One token: its mask, d term / d log pi, and weight (pi_theta / mu unless given)."""
    lp, old, mu = tokens(triple)
    A_T = torch.tensor([A], dtype=torch.float64)
    term, mask, found = minirl.objective(lp, old, mu, A_T, Settings(**settings))
    pi, pi_old, m = triple
    said = "".join(f", {name}={value}" for name, value in settings.items())
    call = (f"objective(pi_theta={pi:.4g}, pi_old={pi_old:.4g}, mu={m:.4g}, A={A:g}{said}), "
            f"r = {pi / pi_old:.4g}")
    must_be(f"{call}: A after the call, when it is still needed", A_T, [A])
    if not term.requires_grad:
        raise Wrong(f"{call}: the term has no gradient, so nothing could be learnt from it")
    must_be(f"{call}: M", mask, [M])
    must_be(f"{call}: the term", term, (slope * lp).detach())
    must_be(f"{call}: d(term)/d(log pi), which is M min(w, cap) A",
            torch.autograd.grad(term.sum(), lp)[0], [slope])
    must_be(f"{call}: the weight that is returned", found, [pi / m if weight is None else weight])


def ask_weights(*triples):
    lp, old, mu = tokens(*triples)
    pi, pi_old, m = (spelled(x.exp()) for x in (lp, old, mu))
    for kind, right in (("full", lp - mu), ("staleness", lp - old), ("none", 0 * lp)):
        yours = minirl.importance_weight(lp, old, mu, kind)
        call = f"importance_weight(pi_theta={pi}, pi_old={pi_old}, mu={m}, {kind!r})"
        must_be(call, yours, right.exp())
        if yours.requires_grad:
            raise Wrong(f"{call} carries a gradient: detach it")


def ask_mask(*rows):
    """The same tokens one at a time, and then all at once."""
    for r, A, M in rows:
        ask((0.4 * r, 0.4, 0.4 * r), A, M, M * A)
    rs, A_T, right = torch.tensor(rows, dtype=torch.float64).T
    lp, old, mu = tokens(*((0.4 * r, 0.4, 0.4 * r) for r in rs.tolist()))
    _, mask, _ = minirl.objective(lp, old, mu, A_T.clone(), Settings())
    must_be(f"M of several tokens at once, r = {spelled(rs)}, A = {spelled(A_T)}", mask, right)


def ask_norms(norm: str):
    for lengths, N, most in itertools.product(
            ((4,), (2, 6), (3, 3, 3, 3), (1, 2, 9), (1, 2, 3, 4, 5), ()), (1, 2), (10, 64)):
        settings = dict(length_norm=norm, mini_batches=N, max_tokens=most)
        rows = [minirl.Row(ids=[0] * (2 + i + n), prompt_length=2 + i, mu_logprobs=[0.0] * n,
                           coefficient=i % 2)  # rows without a gradient count
                for i, n in enumerate(lengths)]
        minirl.set_norms(rows, Settings(**settings))
        said = ", ".join(f"{name}={value}" for name, value in settings.items())
        must_be(f"norms of rows with {spelled(lengths)} response tokens, {said}",
                [row.norm for row in rows], NORMS[norm](lengths, N, most))


CHECKS = [
    (1, "the three kinds of weight, none with a gradient", ask_weights,
     [*zip(TRIPLES), TRIPLES]),
    (1, "d term / d log pi is w A where the mask is open", ask, OPEN),
    (2, "the mask closes for each sign of A on one side of 1", ask_mask,
     [MASKS]),
    (1, "the mask does not look at mu: the engine's noise is no movement", ask, ENGINES),
    (2, "the cap bounds the weight, not the one that is reported", ask,
     CAPS),
    (1, "clip=False, other eps_low and eps_high, other kinds of weight", ask, SWITCHES),
    (1, "constant: sums over tokens, a mean over responses, over max_tokens", ask_norms,
     [("constant",)]),
    (1, "response: every response adds up to the same; batch: every token", ask_norms,
     [("response",), ("batch",)])]
