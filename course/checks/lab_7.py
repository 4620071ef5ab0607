"""Lab 7: routing replay for a mixture of experts"""
import math
from types import SimpleNamespace

import torch

from course.checks import Wrong, must_be, spelled
from parts.routing_replay import RoutingReplay

LOGITS = [0.0, 1.0, 2.0, -1.0]  # of one token for four experts; its own best two: 2 and 1


def route(forced=None, k=2, normalise=True, dtype=torch.float32, layer=0, layers=1):
    """(call, what the hook returned, what it noted, the logits' leaf) for one token."""
    logits = torch.tensor([LOGITS], requires_grad=True)
    gates, experts = logits.softmax(-1).topk(k)
    if normalise:
        gates = gates / gates.sum(-1, keepdim=True)
    own = SimpleNamespace(chosen={}, forced=None)
    if forced is not None:
        own.forced = torch.full((1, layers, k), 3)
        own.forced[0, layer] = torch.tensor(forced)
    router = SimpleNamespace(norm_topk_prob=normalise)
    if normalise == "unknown":
        del router.norm_topk_prob
    result = RoutingReplay.hook(own, layer, router, None, (logits, gates.to(dtype), experts))
    call = f"hook: logits {spelled(LOGITS)}, the router chose {spelled(experts)}, forced {forced}"
    if not normalise:
        call += ", norm_topk_prob=False"
    return call, result, own.chosen, logits


def triple(call, result):
    if not isinstance(result, tuple) or len(result) != 3:
        raise Wrong(f"{call}: yours returned {type(result).__name__}, and it must return "
                    "(logits, gates, experts)")
    return result


def share(*experts, normalise=True):
    """Gates of these experts, by hand."""
    total = sum(math.exp(LOGITS[e]) for e in (experts if normalise else range(4)))
    return [math.exp(LOGITS[e]) / total for e in experts]


def check_note(functions):
    """what the router chose by itself is noted, replay or not; without replay nothing changes"""
    for forced in (None, [0, 3]):
        call, result, chosen, _ = route(forced)
        if 0 not in chosen:
            raise Wrong(f"{call}: nothing is noted in self.chosen[0]")
        must_be(f"{call}: noted for layer 0", chosen[0], [[2, 1]])
        if forced is None and result is not None:
            raise Wrong(f"{call}: nothing is to be forced, so return None")
    call, _, chosen, _ = route(layer=1, layers=2)
    must_be("hook called for layer 1: layers noted", sorted(chosen), [1])


def check_experts(functions):
    """the forced experts are used, each layer its own; -1 leaves the router's choice"""
    for forced, right in (([2, 1], [2, 1]), ([0, 3], [0, 3]), ([-1, -1], [2, 1])):
        call, result, _, _ = route(forced)
        must_be(f"{call}: experts", triple(call, result)[2], [right])
    call, result, _, _ = route([0, 1], layer=1, layers=2)
    must_be("hook for layer 1 of 2, forced [3, 3] in layer 0 and [0, 1] in layer 1: experts",
            triple(call, result)[2], [[0, 1]])


def check_gates(functions):
    """their gates are computed from the logits of the forced experts"""
    for forced in ([2, 1], [0, 3], [3, 2]):
        call, result, _, _ = route(forced)
        must_be(f"{call}: gates", triple(call, result)[1], [share(*forced)], 1e-5)


def check_unnormalised(functions):
    """norm_topk_prob: False leaves the last division out, and a router without it divides"""
    for forced in ([2, 1], [0, 3]):
        call, result, _, _ = route(forced, normalise=False)
        must_be(f"{call}: gates", triple(call, result)[1], [share(*forced, normalise=False)], 1e-5)
    call, result, _, _ = route([0, 3], normalise="unknown")
    must_be(f"{call}, no norm_topk_prob: gates", triple(call, result)[1], [share(0, 3)], 1e-5)
    call, result, _, _ = route([0, 3], dtype=torch.bfloat16)
    if triple(call, result)[1].dtype != torch.bfloat16:
        raise Wrong(f"{call}: the gates came as bfloat16, and yours are {result[1].dtype}")


def check_gradient(functions):
    """the gradient flows through the gates to the router, and to the forced experts' logits"""
    for forced in ([2, 1], [0, 3]):
        call, result, _, logits = route(forced)
        gate = triple(call, result)[1][0, 0]
        if not gate.requires_grad:
            raise Wrong(f"{call}: the gates carry no gradient, so the router could not learn")
        slope, = torch.autograd.grad(gate, logits)
        a, b = share(*forced)
        right = [0.0] * 4
        right[forced[0]], right[forced[1]] = a * b, -a * b
        must_be(f"{call}: d(first gate)/d(logits)", slope, [right], 1e-5)


def check_agreement(functions):
    """agreement is between sets, of the layers that have experts"""
    def ask(own, engine, layers, right):
        self = SimpleNamespace(layers=layers)
        yours = RoutingReplay.agreement(self, torch.tensor(own), torch.tensor(engine))
        must_be(f"agreement(own={own}, engine={engine}), layers with experts {layers}", yours,
                right)

    ask([[[0, 1]]], [[[0, 1]]], [0], [[True]])
    ask([[[0, 1]]], [[[1, 0]]], [0], [[True]])
    ask([[[0, 1]]], [[[0, 2]]], [0], [[False]])
    ask([[[0, 1], [2, 3]]], [[[1, 0], [3, 1]]], [0, 1], [[True, False]])
    ask([[[0, 0], [2, 3]]], [[[1, 1], [3, 2]]], [1], [[True]])
    ask([[[0, 1]], [[2, 3]]], [[[0, 1]], [[2, 4]]], [0], [[True], [False]])


CHECKS = [(2, check_note), (2, check_experts), (2, check_gates), (1, check_unnormalised),
          (2, check_gradient), (1, check_agreement)]
