"""Lab 5: the objective, with mask and cap, and what one token counts"""
import itertools

import torch

from course.checks import Wrong, asked, must_be, spelled
from course.checks.scenes import tensors
from parts.config import Config

# Numbers for which different mistakes give different weights: pi_theta, pi_old, mu
TRIPLES = (0.6, 0.3, 0.2), (0.2, 0.4, 0.5), (0.5, 0.5, 0.4)
# A row of `ask` is (tokens, settings); a token is (pi_theta, pi_old, mu, A, M).
OPEN = [([token],) for token in (
    (0.5, 0.5, 0.5, 1.0, 1), (0.5, 0.5, 0.25, 1.0, 1), (0.5, 0.45, 0.25, -2.0, 1),
    (0.01, 0.01, 0.01, 1.0, 1))]
SEVERAL = [  # w = 2, 1, 3 without a mask; then r = 1, 1.5, 1, 0.5
    ([(0.5, 0.5, 0.25, 0.5, 1), (0.4, 0.4, 0.4, -2.0, 1), (0.6, 0.6, 0.2, 1.0, 1)],
     dict(clip=False, weight_cap=10.0)),
    ([(0.4, 0.4, 0.4, -1.0, 1), (0.6, 0.4, 0.6, 1.0, 0), (0.4, 0.4, 0.1, 2.0, 1),
      (0.2, 0.4, 0.4, -0.5, 0)],)]
MASKS = [  # r = pi_theta / pi_old, advantage, M
    (1.0, 1.0, 1), (1.28, 1.0, 0), (1.26, 1.0, 1), (0.5, 1.0, 1), (1.0, -1.0, 1), (0.79, -1.0, 0),
    (0.81, -1.0, 1), (2.0, -1.0, 1), (0.5, 0.0, 1), (2.0, 0.0, 1)]
MASKED = [([(0.4 * r, 0.4, 0.4 * r, A, M)],) for r, A, M in MASKS]
ENGINES = [([(0.4, 0.4, mu, A, 1)],) for mu in (0.2, 0.4, 0.8) for A in (1.0, -1.0)]
CAPS = [([(0.1 * ratio, 0.1 * ratio / r, 0.1, A, 1)], dict(weight_cap=cap))
        for ratio, cap, r in ((4, 5.0, 1), (8, 5.0, 1), (8, 2.0, 1), (0.1, 5.0, 1), (8, 7.0, 1),
                              (8, 0.0, 1), (8, 5.0, 1.25), (3, 5.0, 1.25))
        for A in (1.0, -2.0, 2.0)]
SWITCHES = [
    ([(0.8, 0.4, 0.4, 1.0, 1)], dict(clip=False)),
    ([(0.2, 0.4, 0.4, -1.0, 1)], dict(clip=False)),
    ([(0.5, 0.4, 0.4, 1.0, 0)], dict(eps_high=0.2)),  # r = 1.25
    ([(0.35, 0.4, 0.4, -1.0, 0)], dict(eps_low=0.1)),  # r = 0.875
    ([(0.44, 0.4, 0.2, 1.0, 1)], dict(importance="staleness")),
    ([(0.4, 0.4, 0.2, 1.0, 1)], dict(importance="none")),
    ([(0.6, 0.4, 0.2, 1.0, 0)], dict(importance="none"))]
NORMS = {  # --length-norm -> the norm of every row, for lengths, N mini-batches and max_tokens
    "constant": lambda lengths, N, most: [N / len(lengths) / most for _ in lengths],
    "response": lambda lengths, N, most: [N / len(lengths) / length for length in lengths],
    "batch": lambda lengths, N, most: [N / sum(lengths) for _ in lengths]}
BATCHES = [  # lengths of the rows, mini-batches
    *itertools.product(((4,), (2, 6), (1, 2, 9)), (1,)),
    *itertools.product(((2, 6), (3, 3, 3, 3), (1, 2, 9), (1, 2, 3, 4, 5), (4,), ()), (2,))]


def spoken(values) -> str:
    """The only number, or all of them."""
    return spelled([*values] if len(values) > 1 else values[0])


def weights_of(lp, old, mu, kind: str):
    """By the docstring."""
    return dict(full=lp - mu, staleness=lp - old, none=0 * lp)[kind].detach().exp()


def ask(tokens, settings={}):
    """Mask, term, d term / d log pi, and the weight that is returned, of these tokens at once."""
    *probabilities, As, Ms = zip(*tokens)
    triples = [*zip(*probabilities)]
    lp, old, mu = tensors(triples)
    A_T, M_T = torch.tensor([As, Ms], dtype=torch.float64)
    config = Config(**settings)
    found = asked.terms(triples, As, settings)
    w = weights_of(lp, old, mu, config.importance)
    cap = config.weight_cap or float("inf")
    slope = M_T * w.clamp(max=cap) * A_T
    call = described([*probabilities, As], config, settings)
    call += f", r = {spoken((lp - old).exp().tolist())}, w = {spoken(w.tolist())}"
    must_be(f"{call}: A after the call, when it is still needed", found["A"], A_T)
    if found["slope"] is None:
        raise Wrong(f"{call}: the term has no gradient, so nothing could be learnt from it")
    must_be(f"{call}: M", found["mask"], M_T)
    must_be(f"{call}: the term", found["term"], slope * lp,
            causes=mistaken_terms(lp, w, slope, A_T))
    if not found["weight_has_gradient"]:  # otherwise `ask_one` says so, once
        must_be(f"{call}: d(term)/d(log pi), which is M min(w, cap) A", found["slope"], slope)
    must_be(f"{call}: the weight that is returned", found["weight"], w)


def described(values, config, settings) -> str:
    """The call of objective, with the bounds that decide about its result."""
    bounds = {name: getattr(config, name) for name in ("eps_low", "eps_high", "weight_cap")}
    given = dict(zip(("pi_theta", "pi_old", "mu", "A"), map(spoken, values))) | bounds | settings
    return f"objective({', '.join(f'{name}={value}' for name, value in given.items())})"


def mistaken_terms(lp, w, slope, A_T) -> dict:
    """What some mistakes give. With one token several of them would give the same."""
    terms = slope * lp
    causes = {"That is the term without log pi.": slope}
    if len(lp) > 1:
        causes |= {
            "That has the sign of a loss, but the caller takes -sum(term).": -terms,
            "That is divided by the number of tokens, which is not in the formula.":
                terms / len(lp),
            "That is what the first token's A gives for all tokens.": terms / A_T * A_T[0],
            "That is what the product of all weights gives as each token's weight.":
                terms / w * w.prod(),
            "That is the term without A.": terms / A_T}
    return causes


def ask_one(tokens):
    ask(tokens)
    found = asked.terms([tokens[0][:3]], [tokens[0][3]], {})
    must_be_constant("the weight that objective returns", found["weight_has_gradient"])


def must_be_constant(what: str, has_gradient: bool) -> None:
    if has_gradient:
        raise Wrong(f"{what} must be a constant to autograd, and yours has a gradient")


def ask_weights(*triples):
    lp, old, mu = tensors(triples)
    said = [f"{name}={spelled(x.exp())}" for name, x in
            (("pi_theta", lp), ("pi_old", old), ("mu", mu))]
    for kind in ("full", "staleness", "none"):
        (yours, has_gradient), right = asked.weight(triples, kind), weights_of(lp, old, mu, kind)
        call = f"importance_weight({', '.join(said)}, {kind!r})"
        must_be(call, yours, right, causes={
            "That is the product over the tokens. Each token has the weight of one token.":
                right.prod().expand(len(lp)),
            "That is the ratio upside down.": 1 / right,
            "That is the logarithm of the weight.": right.log()})
        must_be_constant(call, has_gradient)


def ask_norms(norm: str):
    for (lengths, N), most in itertools.product(BATCHES, (10, 64)):
        settings = dict(length_norm=norm, mini_batches=N, max_tokens=most)
        said = ", ".join(f"{name}={value}" for name, value in settings.items())
        must_be(f"norms of rows with {spelled(lengths)} response tokens, {said}",
                asked.norms(lengths, settings), NORMS[norm](lengths, N, most))


CHECKS = [
    (1, "the three kinds of weight, each a constant to autograd", ask_weights,
     [*zip(TRIPLES), TRIPLES]),
    (1, "one token: d term / d log pi is w A where the mask is 1", ask_one, OPEN),
    (1, "for each sign of A the mask is 0 on one side of 1", ask, MASKED),
    (1, "the mask does not look at mu: the engine's noise is no movement", ask, ENGINES),
    (1, "the cap bounds the weight, not the one that is reported", ask, CAPS),
    (1, "clip=False, other eps_low and eps_high, other kinds of weight", ask, SWITCHES),
    (2, "several tokens at once: each has its own weight, A and mask, and no token is divided",
     ask, SEVERAL),
    (1, "constant: sums over tokens, a mean over responses, over max_tokens", ask_norms,
     [("constant",)]),
    (1, "response: every response adds up to the same; batch: every token", ask_norms,
     [("response",), ("batch",)])]
