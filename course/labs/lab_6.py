"""Lab 6: routing replay for a mixture of experts.

    python course/check.py 6
    python course/train.py --with lab_6   # the tiny mixture of experts, with R3

Both functions are methods of `RoutingReplay` (parts/routing_replay.py), and `self` is its instance.
Read that file's docstring and `__init__` first. What you need of `self` is below.
"""
import torch  # noqa: F401


def hook(self, layer: int, router, _, output):
    """A forward hook. It is called with what a router returned, and may return something else.

    output         (logits [B*T, experts], gates [B*T, k], experts [B*T, k]) of the router in the
                   layer with this number. These tensors stay as they are
    self.chosen    a dict: layer -> [B*T, k]. Always store here what the router itself chose
    self.forced    None: return None, and nothing changes. Otherwise [B*T, layers, k], the experts
                   to use in all layers of the model. Dense layers, which have no experts, count
                   too. A token with -1 in all k entries is unknown, and keeps the router's choice
    Returns (logits, gates, experts) with the router's logits, the forced experts in their order,
    and *their* gates, computed anew:

        g_e = exp(s_e) / sum over the chosen e' of exp(s_e')           s: logits

    If router.norm_topk_prob is False, the sum is over all experts. A router without that attribute
    has the sum over the chosen. Return the gates in the dtype of the gates in `output`. Only the
    choice is replayed, so the gradient still flows through the gates to the router.
    """
    raise NotImplementedError


def agreement(self, own, engine):
    """[tokens, MoE layers] of bool: do both name the same *set* of experts?

    own and engine are [tokens, layers, k], and name k different experts each time. self.layers is a
    list with the numbers of the layers that have experts. The other layers are dense, and their
    entries mean nothing, so leave them out. The columns are in the order of self.layers.
    """
    raise NotImplementedError
