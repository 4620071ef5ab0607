"""Lab 7: routing replay for a mixture of experts"""
import math
from types import SimpleNamespace

import torch

from course.checks import Wrong, must_be, spelled
from parts.routing_replay import RoutingReplay

LOGITS = [[0.0, 1.0, 2.0, -1.0],  # of two tokens for four experts; the first one's best are 2, 1
          [0.5, -0.5, 0.0, 1.5]]  # the second one's 3 and 0
OWN = [[2, 1], [3, 0]]


class OlmoeTopKRouter(torch.nn.Module):
    """A stand-in with all that `RoutingReplay.__init__` reads; the name is one it looks for."""

    num_experts, top_k = 4, 2


def replay_of(layers=1):
    """A RoutingReplay as its own __init__ makes it, for a model of so many layers of experts."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(OlmoeTopKRouter() for _ in range(layers))
    model.config = SimpleNamespace(num_hidden_layers=layers)
    return RoutingReplay(model)


def route(forced=None, normalise=True, dtype=torch.float32, layer=0, layers=1):
    """(call, what the hook returned, what it noted, the logits' leaf) for the two tokens.

    In other layers than this one, all tokens are forced to expert 3.
    """
    logits = torch.tensor(LOGITS, requires_grad=True)
    gates, experts = logits.softmax(-1).topk(2)
    if normalise:
        gates = gates / gates.sum(-1, keepdim=True)
    own = replay_of(layers)
    if forced is not None:
        own.forced = torch.full((2, layers, 2), 3)
        own.forced[:, layer] = torch.tensor(forced)
    router = OlmoeTopKRouter()
    if normalise != "unknown":
        router.norm_topk_prob = normalise
    result = own.hook(layer, router, None, (logits, gates.to(dtype), experts))
    call = f"hook: logits {spelled(LOGITS)}, the router chose {spelled(experts)}, forced {forced}"
    if not normalise:
        call += ", norm_topk_prob=False"
    return call, result, own.chosen, logits


def triple(call, result):
    if not isinstance(result, tuple) or len(result) != 3:
        raise Wrong(f"{call}: yours returned {type(result).__name__}, and it must return "
                    "(logits, gates, experts)")
    return result


def shares(forced, normalise=True):
    """Gates of each token's forced experts, by hand."""
    found = []
    for s, experts in zip(LOGITS, forced):
        total = sum(math.exp(s[e]) for e in (experts if normalise else range(4)))
        found.append([math.exp(s[e]) / total for e in experts])
    return found


def check_note():
    """what the router chose by itself is noted, replay or not; without replay nothing changes"""
    for forced in (None, [[0, 3], [1, 2]]):
        call, result, chosen, _ = route(forced)
        if 0 not in chosen:
            raise Wrong(f"{call}: nothing is noted in self.chosen[0]")
        must_be(f"{call}: noted for layer 0", chosen[0], OWN)
        if forced is None and result is not None:
            raise Wrong(f"{call}: nothing is to be forced, so return None")
    call, _, chosen, _ = route(layer=1, layers=2)
    must_be("hook called for layer 1: layers noted", sorted(chosen), [1])


def check_experts():
    """the forced experts are used, each token and layer its own; -1 leaves the router's choice"""
    for forced, right in ((OWN, OWN), ([[0, 3], [1, 2]], [[0, 3], [1, 2]]), ([[-1, -1]] * 2, OWN),
                          ([[0, 3], [-1, -1]], [[0, 3], [3, 0]])):
        call, result, _, _ = route(forced)
        must_be(f"{call}: experts", triple(call, result)[2], right)
    forced = [[0, 1], [1, 2]]
    call, result, _, _ = route(forced, layer=1, layers=2)
    must_be(f"hook for layer 1 of 2, forced [3, 3] in layer 0 and {forced} in layer 1: experts",
            triple(call, result)[2], forced)


def check_gates():
    """their gates are computed from the logits, which are handed on as they came"""
    for forced in (OWN, [[0, 3], [1, 2]], [[3, 2], [3, 1]]):
        call, result, _, _ = route(forced)
        must_be(f"{call}: gates", triple(call, result)[1], shares(forced), 1e-5)
        must_be(f"{call}: logits", result[0], LOGITS)


def check_unnormalised():
    """norm_topk_prob: False leaves the last division out, and a router without it divides"""
    for forced in (OWN, [[0, 3], [1, 2]]):
        call, result, _, _ = route(forced, normalise=False)
        must_be(f"{call}: gates", triple(call, result)[1], shares(forced, False), 1e-5)
    call, result, _, _ = route(forced, normalise="unknown")
    must_be(f"{call}, no norm_topk_prob: gates", triple(call, result)[1], shares(forced), 1e-5)
    call, result, _, _ = route(forced, dtype=torch.bfloat16)
    if triple(call, result)[1].dtype != torch.bfloat16:
        raise Wrong(f"{call}: the gates came as bfloat16, and yours are {result[1].dtype}")


def check_gradient():
    """the gradient flows through the gates to the router, and to the forced experts' logits"""
    for forced in (OWN, [[0, 3], [1, 2]]):
        call, result, _, logits = route(forced)
        gate = triple(call, result)[1][0, 0]
        if not gate.requires_grad:
            raise Wrong(f"{call}: the gates carry no gradient, so the router could not learn")
        slope, = torch.autograd.grad(gate, logits)
        a, b = shares(forced)[0]
        right = [[0.0] * 4, [0.0] * 4]
        right[0][forced[0][0]], right[0][forced[0][1]] = a * b, -a * b
        must_be(f"{call}: d(first gate)/d(logits)", slope, right, 1e-5)


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
    ([[[4, 0, 2]]], [[[4, 1, 0]]], [0], [[False]])]


def check_agreement():
    """agreement is between sets, of the layers that have experts"""
    for own, engine, layers, right in AGREEMENTS:
        replay = replay_of()
        replay.layers, replay.k = layers, len(own[0][0])
        replay.decoder_layers = len(own[0])
        yours = replay.agreement(torch.tensor(own), torch.tensor(engine))
        must_be(f"agreement(own={own}, engine={engine}), layers with experts {layers}", yours,
                right)


CHECKS = [(2, check_note), (2, check_experts), (2, check_gates), (1, check_unnormalised),
          (2, check_gradient), (1, check_agreement)]
