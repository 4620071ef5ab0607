"""Lab 6: routing replay for a mixture of experts"""
import torch

from course.checks import Wrong, asked, must_be, spelled

LOGITS = [[0.0, 1.0, 2.0, -1.0],  # of two tokens for four experts; the first one's best are 2, 1
          [0.5, -0.5, 0.0, 1.5]]  # the second one's 3 and 0
OWN = [[2, 1], [3, 0]]
OTHER = [[0, 3], [1, 2]]
EXPERTS = [  # forced, used; -1: unknown
    (OWN, OWN), (OTHER, OTHER), ([[-1, -1]] * 2, OWN), ([[0, 3], [-1, -1]], [[0, 3], [3, 0]])]
GATES = [
    (OWN, OWN), (OTHER, OTHER), ([[3, 2], [3, 1]], [[3, 2], [3, 1]]),
    ([[0, 3], [-1, -1]], [[0, 3], [3, 0]])]
NORMS = [(OWN, OWN, False), (OTHER, OTHER, False), (OTHER, OTHER, None),
         (OTHER, OTHER, True, "bfloat16")]


class Routed:
    """One call of the hook for the two tokens, in this layer of three.

    norm: the router's norm_topk_prob; None: it has no such attribute.
    """

    def __init__(self, forced=None, norm=True, dtype="float32", layer=1, then=None):
        self.leaf = torch.tensor(LOGITS, requires_grad=True)
        said = "no norm_topk_prob" if norm is None else f"norm_topk_prob={norm}"
        self.call = (f"hook for layer {layer} of 0 (dense), 1, 2: logits {spelled(LOGITS)}, the "
                     f"router chose {spelled(OWN)}, forced {forced}, {said}")
        self.seen = asked.routed(LOGITS, forced, norm, dtype, layer, then)
        kind = "NoneType" if forced is None else "tuple"
        must_be(f"{self.call}: the type of the result", self.seen["kind"], kind)


def shares(logits, forced, normalise=True):
    """Gates of each token's forced experts, by hand."""
    every = logits.exp()
    chosen = every.gather(1, torch.tensor(forced))
    return chosen / (chosen if normalise else every).sum(1, keepdim=True)


def ask_note(forced, layer):
    routed = Routed(forced, layer=layer, then=OWN[::-1])
    must_be(f"{routed.call}: the router's own tensor of experts after the call",
            routed.seen["own_experts"], OWN)
    must_be(f"{routed.call}: layers noted", routed.seen["layers"], [layer])
    must_be(f"{routed.call}: what is noted", routed.seen["noted"], OWN)
    must_be(f"the next call, in which the router chose {OWN[::-1]}: what is noted",
            routed.seen["then"], OWN[::-1])


def ask_experts(forced, used):
    for layer in (2, 1):
        routed = Routed(forced, layer=layer)
        must_be(f"{routed.call}: experts", routed.seen["experts"], used, causes={
            f"That is what stands in layer {other} of self.forced.": [[other] * 2] * 2
            for other in (0, 1, 2) if other != layer})


def ask_gates(forced, used, norm=True, dtype="float32"):
    routed = Routed(forced, norm, dtype)
    must_be(f"{routed.call}: gates", routed.seen["gates"],
            shares(routed.leaf, used, norm is not False), 5e-3, causes={
                "Those are the router's own gates.": shares(routed.leaf, OWN, norm is not False),
                "They are divided by the sum over the chosen.": shares(routed.leaf, used),
                "They are not divided by the sum over the chosen.":
                    shares(routed.leaf, used, False)})
    must_be(f"{routed.call}: the gates' dtype", routed.seen["dtype"], dtype)
    must_be(f"{routed.call}: logits", routed.seen["logits"], LOGITS)


def ask_gradient(forced):
    routed = Routed(forced)
    if routed.seen["slope"] is None:
        raise Wrong(f"{routed.call}: the gates have no gradient, so the router could not learn")
    right, = torch.autograd.grad(shares(routed.leaf, forced)[0, 0], routed.leaf)
    must_be(f"{routed.call}: d(first gate)/d(logits)", routed.seen["slope"], right, 1e-5)


AGREEMENTS = [  # own, engine, layers with experts, right
    ([[[0, 1]]], [[[0, 1]]], [0], [[True]]),
    ([[[0, 1]]], [[[1, 0]]], [0], [[True]]),
    ([[[1, 0]]], [[[0, 1]]], [0], [[True]]),
    ([[[0, 1]]], [[[0, 2]]], [0], [[False]]),
    ([[[0, 3]]], [[[1, 2]]], [0], [[False]]),
    ([[[0, 1], [2, 3]]], [[[1, 0], [3, 1]]], [0, 1], [[True, False]]),
    ([[[0, 0], [2, 3]]], [[[1, 1], [3, 2]]], [1], [[True]]),
    ([[[0, 1]], [[2, 3]]], [[[0, 1]], [[2, 4]]], [0], [[True], [False]]),
    ([[[4, 0, 2]]], [[[2, 4, 0]]], [0], [[True]]),
    ([[[4, 0, 2]]], [[[4, 1, 0]]], [0], [[False]]),
    ([[[0, 1]], [[2, 3]]], [[[2, 3]], [[0, 1]]], [0], [[False], [False]]),
    ([[[0, 4, 5]]], [[[1, 2, 6]]], [0], [[False]])]  # with the same sums, of squares too


def ask_agreement(own, engine, layers, right):
    must_be(f"agreement(own={own}, engine={engine}), layers with experts {layers}",
            asked.agreed(own, engine, layers), right)


CHECKS = [
    (2, "the router's own choice is noted; without replay nothing changes",
     ask_note, [(None, 1), (OTHER, 1), (None, 2)]),
    (2, "each token and layer has its forced experts; -1: the router's choice",
     ask_experts, EXPERTS),
    (2, "their gates come from the logits, which are handed on", ask_gates,
     GATES),
    (1, "norm_topk_prob=False leaves the last division out; without it there is one",
     ask_gates, NORMS),
    (2, "the gradient flows through the gates to the forced experts' logits",
     ask_gradient, [(OWN,), (OTHER,)]),
    (1, "agreement is between sets, of the layers that have experts", ask_agreement,
     AGREEMENTS)]
