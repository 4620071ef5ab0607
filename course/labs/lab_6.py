"""Lab 6: routing replay for a mixture of experts.

    python course/check.py 6
    python course/train.py --with lab_6   # the tiny mixture of experts, with R3

Both functions are methods of `RoutingReplay` (parts/routing_replay.py): `self` is its instance.
Read that file's docstring and `__init__` first.
"""
import torch  # noqa: F401


def hook(self, layer: int, router, _, output):
    """A forward hook: called with what a router returned, it may return something else instead.

    output: (logits [B*T, experts], gates [B*T, k], experts [B*T, k])
    self.chosen    layer -> [B*T, k]: store here, without gradient, what the router itself chose
    self.forced    None: return None, and nothing changes. Otherwise [B*T, layers, k], the experts
                   to use in all layers of the model, also in dense ones; -1: unknown, the router's
                   own choice stays
    Returns (logits, gates, experts) with the forced experts and *their* gates, computed anew:

        g_e = exp(s_e) / sum over the chosen e' of exp(s_e')           s: logits

    and without the last normalisation (g_e = softmax over all experts) if router.norm_topk_prob is
    False; a router without that attribute normalises. Return the gates in the dtype of `output`'s.
    Only the choice is replayed: the gradient still flows through the gates to the router.
    """
    raise NotImplementedError


def agreement(self, own, engine):
    """[tokens, MoE layers] of bool: do both name the same *set* of experts?

    own, engine: [tokens, layers, k]; self.layers: indices of the layers that have experts. The
    others are dense: their entries mean nothing, so leave them out.
    """
    raise NotImplementedError
