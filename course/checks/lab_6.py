"""Lab 6: routing replay for a mixture of experts"""
from types import SimpleNamespace

import torch

from course.checks import Wrong, must_be, spelled
from parts.routing_replay import RoutingReplay

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
         (OTHER, OTHER, True, torch.bfloat16)]


class OlmoeTopKRouter(torch.nn.Module):
    """A stand-in with all that `RoutingReplay.__init__` reads; it looks for this class's name."""

    num_experts, top_k = 4, 2


def replay_of():
    """As its own __init__ makes it. Of the model's three layers the first is dense."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(
        [torch.nn.Identity(), OlmoeTopKRouter(), OlmoeTopKRouter()])
    model.config = SimpleNamespace(num_hidden_layers=3)
    return RoutingReplay(model)


class Routed:
    """One call of the hook for the two tokens, in this layer of three.

    norm: the router's norm_topk_prob; None: it has no such attribute.
    """

    def __init__(self, forced=None, norm=True, dtype=torch.float32, layer=1):
        self.leaf = torch.tensor(LOGITS, requires_grad=True)
        gates, experts = self.leaf.softmax(-1).topk(2)
        if norm is not False:
            gates = gates / gates.sum(-1, keepdim=True)
        self.replay, router = replay_of(), OlmoeTopKRouter()
        if norm is not None:
            router.norm_topk_prob = norm
        if forced is not None:
            self.replay.forced = torch.arange(3)[None, :, None].repeat(2, 1, 2)  # l in layer l
            self.replay.forced[:, layer] = torch.tensor(forced)
        said = "no norm_topk_prob" if norm is None else f"norm_topk_prob={norm}"
        self.call = (f"hook for layer {layer} of 0 (dense), 1, 2: logits {spelled(LOGITS)}, the "
                     f"router chose {spelled(experts)}, forced {forced}, {said}")
        result = self.replay.hook(layer, router, None, (self.leaf, gates.to(dtype), experts))
        kind = "NoneType" if forced is None else "tuple"
        must_be(f"{self.call}: the type of the result", type(result).__name__, kind)
        self.own_gates, self.own_experts = gates, experts
        if forced is not None:
            self.logits, self.gates, self.experts = result


def shares(logits, forced, normalise=True):
    """Gates of each token's forced experts, by hand."""
    every = logits.exp()
    chosen = every.gather(1, torch.tensor(forced))
    return chosen / (chosen if normalise else every).sum(1, keepdim=True)


def ask_note(forced, layer):
    routed = Routed(forced, layer=layer)
    must_be(f"{routed.call}: the router's own tensor of experts after the call",
            routed.own_experts, OWN)
    must_be(f"{routed.call}: layers noted", sorted(routed.replay.chosen), [layer])
    must_be(f"{routed.call}: what is noted", routed.replay.chosen[layer], OWN)
    next_batch = routed.leaf, torch.ones(2, 2), torch.tensor(OWN[::-1])
    routed.replay.hook(layer, OlmoeTopKRouter(), None, next_batch)
    must_be(f"the next call, in which the router chose {OWN[::-1]}: what is noted",
            routed.replay.chosen[layer], OWN[::-1])


def ask_experts(forced, used):
    for layer in (2, 1):
        routed = Routed(forced, layer=layer)
        must_be(f"{routed.call}: experts", routed.experts, used, causes={
            f"That is what stands in layer {other} of self.forced.": [[other] * 2] * 2
            for other in (0, 1, 2) if other != layer})


def ask_gates(forced, used, norm=True, dtype=torch.float32):
    routed = Routed(forced, norm, dtype)
    must_be(f"{routed.call}: gates", routed.gates, shares(routed.leaf, used, norm is not False),
            5e-3, causes={
                "Those are the router's own gates.": routed.own_gates,
                "They are divided by the sum over the chosen.": shares(routed.leaf, used),
                "They are not divided by the sum over the chosen.":
                    shares(routed.leaf, used, False)})
    must_be(f"{routed.call}: the gates' dtype", str(routed.gates.dtype), str(dtype))
    must_be(f"{routed.call}: logits", routed.logits, LOGITS)


def ask_gradient(forced):
    routed = Routed(forced)
    gate = routed.gates[0, 0]
    if not gate.requires_grad:
        raise Wrong(f"{routed.call}: the gates have no gradient, so the router could not learn")
    slope, = torch.autograd.grad(gate, routed.leaf)
    right, = torch.autograd.grad(shares(routed.leaf, forced)[0, 0], routed.leaf)
    must_be(f"{routed.call}: d(first gate)/d(logits)", slope, right, 1e-5)


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
    replay = replay_of()
    replay.layers, replay.k, replay.decoder_layers = layers, len(own[0][0]), len(own[0])
    yours = replay.agreement(torch.tensor(own), torch.tensor(engine))
    must_be(f"agreement(own={own}, engine={engine}), layers with experts {layers}", yours, right)


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
