"""Routing replay: the trainer sends each token to the same experts as before (MiniRL section 2.4).

In a mixture-of-experts (MoE) layer a router scores all experts, and a token passes through the k
best. This choice is a step function. A difference in the last bits between engine and trainer, or
one optimizer step, moves a few tokens to other experts, and their probabilities jump. Then the
importance weight compares two different networks (Eq. 6):

    pi_theta(y_t | e_theta)     pi_old(y_t | e_old)     pi_theta(y_t | e_theta)
    -----------------------  =  -------------------  x  -----------------------
       mu(y_t | e_mu)             mu(y_t | e_mu)          pi_old(y_t | e_old)

    e_theta, e_old     the experts that the trainer chooses now and chose before the update
    e_mu               the experts that the engine used
    --replay r2        pi_theta uses e_old, which repairs the second factor
    --replay r3        pi_old and pi_theta both use e_mu, which repairs both

The price is that the update improves the policy with the replayed experts, which is not exactly the
policy that will be sampled. Only the *choice* is replayed. The weights of the chosen experts are
recomputed, g_e = exp(s_e) / sum over the chosen e' of exp(s_e'), so the logits s have gradients
(in OLMoE the sum is over all e').

Routes are integers [tokens, decoder layers, k]. Row t has the experts of token t, which predicted
token t + 1. The last token is never an input and has no routes. -1 means that the router chooses.
"""
import contextlib
from functools import partial

import numpy
import torch

ROUTERS = {  # model_type -> its router, whose forward returns (logits, gates, experts)
    "qwen3_moe": "Qwen3MoeTopKRouter", "olmoe": "OlmoeTopKRouter", "mixtral": "MixtralTopKRouter"}


class RoutingReplay:
    """Hooks on all routers of `model`, a Hugging Face model of one of ROUTERS."""

    def __init__(self, model):
        routers = {name: m for name, m in model.named_modules()
                   if type(m).__name__ in ROUTERS.values()}
        self.decoder_layers = model.config.num_hidden_layers
        self.layers = [int(name.split("layers.")[1].split(".")[0]) for name in routers]
        self.chosen = {}  # layer -> [B*T, k], experts in the last forward pass
        self.forced = None  # [B*T, layers, k] while replaying
        for layer, router in zip(self.layers, routers.values()):
            router.register_forward_hook(partial(self.hook, layer))
        self.experts, self.k = router.num_experts, router.top_k

    def hook(self, layer: int, router, _, output):
        """output: the router's logits [B*T, experts], gates [B*T, k] and experts [B*T, k]."""
        logits, gates, experts = output
        self.chosen[layer] = experts.detach()
        if self.forced is None:
            return None
        forced = self.forced[:, layer].to(experts.device)
        experts = torch.where(forced < 0, experts, forced)
        live = logits.float().softmax(-1).gather(-1, experts)  # with gradient, unlike the choice
        if getattr(router, "norm_topk_prob", True):  # always in Mixtral, which has no such switch
            live = live / live.sum(-1, keepdim=True)
        return logits, live.to(gates.dtype), experts

    def force(self, rows: list) -> None:
        """Use `row.replay` [len(row.ids) - 1, layers, k] on the right-padded batch of `rows`."""
        length = max(len(row.ids) for row in rows)
        forced = torch.full((len(rows), length, self.decoder_layers, self.k), -1)
        for i, row in enumerate(rows):
            forced[i, :len(row.replay)] = row.replay
        self.forced = forced.flatten(0, 1)

    def recorded(self, rows: list) -> list:
        """The experts of each of these `rows` in the last forward pass."""
        routes = stacked(self.chosen, self.decoder_layers)
        return [route[:len(row.ids) - 1]
                for row, route in zip(rows, routes.unflatten(0, (len(rows), -1)))]

    def agreement(self, own, engine):
        """[tokens, MoE layers] of bool: whether both chose the same experts, in any order."""
        return (own.sort(-1).values == engine.sort(-1).values).all(-1)[:, self.layers]

    def check(self, route, length: int) -> None:
        """Raises ValueError unless `route` is possible for a sequence of `length` tokens."""
        shape, wanted = list(getattr(route, "shape", ())), [length - 1, self.decoder_layers, self.k]
        if shape == wanted:
            twice = self.k > 1 and (route[:, self.layers, 0] == route[:, self.layers, 1]).any()
            if not (twice or route.max() >= self.experts):  # twice: mostly a row of zeros
                return
        raise ValueError(f"the engine recorded wrong routes of a sequence: {shape} instead of "
                         f"{wanted}, or an expert twice for one token, or an unknown expert")


def stacked(experts: dict, decoder_layers: int):
    """{layer: [tokens, k]} as routes [tokens, layers, k]."""
    some = next(iter(experts.values()))
    routes = torch.zeros((len(some), decoder_layers, some.shape[1]), dtype=torch.int16)
    for layer, chosen in experts.items():
        routes[:, layer] = chosen.cpu()
    return routes


@contextlib.contextmanager
def replaying(policy, rows: list):
    """Force `row.replay`, if any, on all passes of these rows, also on the backward pass."""
    routing = getattr(policy, "routing", None)
    if routing and rows[0].replay is not None:
        routing.force(rows)
    try:
        yield
    finally:
        if routing:
            routing.forced = None


def note_routes(policy, rows: list, replay: str) -> None:
    """Store in each row the trainer's experts in the pass for log pi_old, and whether they are the
    engine's. (With R3 the earlier layers were already forced to the engine's.)
    """
    routing = getattr(policy, "routing", None)
    if not routing:
        return
    for row, chosen in zip(rows, routing.recorded(rows)):
        if row.routes is not None:
            row.agrees = routing.agreement(chosen, row.routes)[row.prompt_length - 1:]
        if replay == "r2":
            row.replay = chosen


def require_routes(policy, groups: list) -> None:
    """Raises ValueError unless the engine has recorded the experts of all sampled answers."""
    for group in groups:
        for s in group.pool:
            length = len(group.problem.prompt_ids) + len(s.rollout.token_ids)
            policy.routing.check(s.rollout.routes, length)


class CpuRecorder:
    """Records the experts of vLLM's CPU build by request, because vLLM returns them only on GPUs.

    It needs the engine in this process, eager mode, no prefix caching (cached tokens are not routed
    again), and one batch at a time. It reads vLLM 0.32's `MoERunner.layer_id`, `input_batch` and
    `query_start_loc`; without them no MoE runs on a CPU.
    """

    def __init__(self, llm):
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        [self.runner] = llm.collective_rpc(lambda worker: worker.model_runner)
        self.decoder_layers = self.runner.model_config.hf_text_config.num_hidden_layers
        self.layers = {}  # layer -> the experts of the last batch [tokens, k]
        self.routes = {}  # request id -> list of [tokens, layers, k]
        for module in self.runner.model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self.note, module.layer_id))
        self.runner.model.register_forward_hook(self.file_away)

    def note(self, layer: int, experts) -> None:
        self.layers[layer] = experts.clone()

    def file_away(self, *_) -> None:
        """Split the routes of the last batch by request."""
        routes = stacked(self.layers, self.decoder_layers)
        batch = self.runner.input_batch
        counts_R = numpy.diff(self.runner.query_start_loc.np[:len(batch.req_ids) + 1])
        for request_id, start, rows in zip(
                batch.req_ids, batch.num_computed_tokens_cpu, routes.split(counts_R.tolist())):
            name = request_id.rsplit("-", 1)[0]  # without vLLM's random suffix
            if start == 0:  # also when a preempted request begins anew
                self.routes[name] = []
            self.routes[name].append(rows)

    def routes_of(self, request_id: str):
        """Routes [prompt + answer - 1, layers, k] of a request that has just finished."""
        return torch.cat(self.routes.pop(request_id))
