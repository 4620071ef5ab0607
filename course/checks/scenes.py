"""What happens around a student's function, in the student's process. No expected value is here.

`in_place` (course/submission.py) has replaced the project's functions by the student's. A scene
calls them where the project would, and returns plain values, which the checks compare.
"""
from functools import cache
from types import SimpleNamespace

from course.checks import has_gradient, plain, results


def bandit_gradient(theta, actions, rewards, baseline):
    """The project has no bandit: the student's function replaces this one."""
    raise NotImplementedError


# ------------------------------------------------------------------------------ labs 1, 3 and 8
def twice(*args) -> list:
    """Two calls with the same tensors."""
    first = plain(bandit_gradient(*args))  # now, because the second call may change the same tensor
    return [first, bandit_gradient(*args)]


def kept(pool, n) -> list:
    """[(index, correct)] of the kept answers, and of the pool afterwards."""
    import ada_sampler

    return [[(s.index, s.correct) for s in some] for some in (ada_sampler.keep(pool, n), pool)]


def sum_after_bootstrap(values) -> float:
    from parts import evaluation

    evaluation.bootstrap([values], resamples=10)
    return values.sum()


# ------------------------------------------------------------------------------ lab 2
@cache
def model():
    """The tiny model with an adapter that is not 0."""
    import torch

    from parts.models import MODELS
    from parts.policy import load_policy

    tiny = str(MODELS / "tiny")
    policy = load_policy(tiny, dtype="float32", rank=2, alpha=4, seed=0, device="cpu")
    for name, weight in policy.named_parameters():
        if "lora_B" in name:  # an adapter begins with zeros there: make it do something
            torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(0))
    return policy


def adapter() -> list:
    return [p for p in model().parameters() if p.requires_grad]


def states(rows) -> tuple:
    from parts import logprobs

    return results(logprobs.response_states, "h_T target_T", model(), rows)


def log_probs(*args) -> tuple:
    """(log pi, entropy, whether each has a gradient)."""
    from parts import logprobs

    lp_T, entropy_T = results(logprobs.token_logprobs, "log_pi_T entropy_T", model(), *args)
    return lp_T, entropy_T, has_gradient(lp_T), has_gradient(entropy_T)


def gradient_of_log_probs(row, temperature):
    import torch

    from parts import logprobs

    lp_T, _ = logprobs.token_logprobs(model(), [row], temperature)
    return torch.cat([g.flatten() for g in torch.autograd.grad(lp_T.sum(), adapter())])


# ------------------------------------------------------------------------------ lab 5
def tensors(triples):
    """(lp with gradient, old, mu) from probabilities (pi_theta, pi_old, mu)."""
    import torch

    lp, old, mu = torch.tensor(triples, dtype=torch.float64).log().T
    return lp.clone().requires_grad_(), old, mu


def terms(triples, As, settings) -> dict:
    """What minirl.objective returns, A after the call, and the gradient of the term."""
    import torch

    import minirl
    from parts.config import Config

    lp, old, mu = tensors(triples)
    A_T = torch.tensor(As, dtype=torch.float64)
    term, mask, weight = results(
        minirl.objective, "term_T M_T w_T", lp, old, mu, A_T, Config(**settings))
    slope = torch.autograd.grad(term.sum(), lp)[0] if has_gradient(term) else None
    return dict(term=term, mask=mask, weight=weight, A=A_T, slope=slope,
                weight_has_gradient=has_gradient(weight))


def weight(triples, kind) -> tuple:
    """(importance weight, whether it has a gradient)."""
    import minirl

    found = minirl.importance_weight(*tensors(triples), kind)
    return found, has_gradient(found)


def norms(lengths, settings) -> list:
    import minirl
    from parts.config import Config

    rows = [minirl.Row(ids=[0] * (2 + i + n), prompt_length=2 + i, mu_logprobs=[0.0] * n,
                       coefficient=i % 2)  # rows without a gradient count
            for i, n in enumerate(lengths)]
    minirl.set_norms(rows, Config(**settings))
    return [row.norm for row in rows]


# ------------------------------------------------------------------------------ lab 6
def replay():
    """A RoutingReplay as its own __init__ makes it. Of the model's three layers the first is dense.
    """
    import torch

    from parts.routing_replay import RoutingReplay

    router = type("OlmoeTopKRouter", (torch.nn.Module,), dict(num_experts=4, top_k=2))
    whole = torch.nn.Module()
    whole.layers = torch.nn.ModuleList([torch.nn.Identity(), router(), router()])
    whole.config = SimpleNamespace(num_hidden_layers=3)
    return RoutingReplay(whole)


def routed(logits, forced, norm, dtype: str, layer: int, then=None) -> dict:
    """One call of the hook for two tokens, and perhaps one in which the router chose `then`.

    norm: the router's norm_topk_prob; None: it has no such attribute.
    """
    import torch

    leaf = torch.tensor(logits, requires_grad=True)
    gates, experts = leaf.softmax(-1).topk(2)
    if norm is not False:
        gates = gates / gates.sum(-1, keepdim=True)
    own, router = replay(), SimpleNamespace(num_experts=4, top_k=2)
    if norm is not None:
        router.norm_topk_prob = norm
    if forced is not None:
        own.forced = torch.arange(3)[None, :, None].repeat(2, 1, 2)  # l in layer l
        own.forced[:, layer] = torch.tensor(forced)
    result = own.hook(layer, router, None, (leaf, gates.to(getattr(torch, dtype)), experts))
    seen = dict(kind=type(result).__name__, own_experts=experts, own_gates=gates,
                layers=sorted(own.chosen), noted=plain(own.chosen.get(layer)))
    if then:
        own.hook(layer, router, None, (leaf, torch.ones(2, 2), torch.tensor(then)))
        seen["then"] = own.chosen.get(layer)
    if isinstance(result, tuple):
        seen |= dict(zip(("logits", "gates", "experts"), result))
        seen |= dict(dtype=str(result[1].dtype).removeprefix("torch."), slope=None)
        if has_gradient(result[1]):
            seen["slope"] = torch.autograd.grad(result[1][0, 0], leaf)[0]
    return seen


def agreed(own, engine, layers):
    import torch

    one = replay()
    one.layers, one.k, one.decoder_layers = layers, len(own[0][0]), len(own[0])
    return one.agreement(torch.tensor(own), torch.tensor(engine))
