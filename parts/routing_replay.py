"""Routing replay: the trainer sends every token to the same experts as before (MiniRL section 2.4,
R2 and R3).

In a mixture-of-experts layer a router scores all experts, and a token passes through the k best.
That choice is a step function: a difference in the last bits between engine and trainer, or one
optimizer step, moves a few tokens to other experts, and their probabilities jump. The importance
weight then compares two different networks (Eq. 6):

    pi_theta(y_t | e_theta)     pi_old(y_t | e_old)     pi_theta(y_t | e_theta)
    -----------------------  =  -------------------  x  -----------------------
       mu(y_t | e_mu)             mu(y_t | e_mu)          pi_old(y_t | e_old)

    e_theta, e_old, e_mu: the experts that the trainer chooses now, that it chose before the
    update, and that the engine used

    --replay r2     pi_theta uses e_old: what the trainer chose in its own pi_old pass.
                    Repairs the second factor.
    --replay r3     pi_old and pi_theta both use e_mu: what the engine used.
                    Repairs both.
    --replay none

The price: we improve the policy under the replayed experts, which is not exactly the one that will
be sampled. With r2 the two are the same in the first mini-batch and drift apart later; with r3 they
always differ (Table 1).

Only the *choice* is replayed. How much each chosen expert counts is computed anew from the router's
logits,

    g_e = exp(s_e) / sum over the chosen e' of exp(s_e'),

so gradients flow through the router as ever. With one mini-batch e_old = e_theta, and r2 would
change nothing.

On the trainer's side each router has a forward hook. It notes what the router chose, and while
`replaying` it hands on the recorded experts instead. On the engine's side vLLM itself records the
routed experts on a GPU; its CPU build does not, so `CpuRecorder` attaches to the same place.

Routes are integers [tokens, layers, k]: row t has the experts that token t passed through, and so
those that predicted token t + 1. The last token of a response is never fed back, so a sequence of T
tokens has T - 1 rows. The axis `layers` counts all decoder layers; entries of dense ones are
ignored. -1 means not known: the router decides.
"""
import contextlib
from functools import partial

import torch

ROUTERS = {  # model_type -> its router, whose forward returns (logits, gates, experts)
    "qwen3_moe": "Qwen3MoeTopKRouter", "olmoe": "OlmoeTopKRouter", "mixtral": "MixtralTopKRouter"}


def is_supported(config) -> bool:
    """Whether a model of this transformers config is a mixture whose routes can be replayed."""
    return config.model_type in ROUTERS


# -------------------------------------------------------------------------------------- the trainer
class RoutingReplay:
    """Hooks on all routers of `model`, a Hugging Face model of one of ROUTERS."""

    def __init__(self, model):
        routers = {name: m for name, m in model.named_modules()
                   if type(m).__name__ in ROUTERS.values()}
        self.decoder_layers = model.config.num_hidden_layers
        self.layers = [int(name.split("layers.")[1].split(".")[0]) for name in routers]
        self.chosen = {}  # layer -> [B*T, k], what its router chose in the last forward pass
        self.forced = None  # [B*T, layers, k] while replaying
        for layer, router in zip(self.layers, routers.values()):
            router.register_forward_hook(partial(self.hook, layer))
        self.experts, self.k = router.num_experts, router.top_k

    def hook(self, layer: int, router, _, output):
        """Called with the router's logits [B*T, experts], gates [B*T, k] and experts [B*T, k];
        may replace them.
        """
        logits, gates, experts = output
        self.chosen[layer] = experts.detach()
        if self.forced is None:
            return None
        forced = self.forced[:, layer].to(experts.device)
        experts = torch.where(forced < 0, experts, forced)
        live = logits.float().softmax(-1).gather(-1, experts)  # with gradient, unlike the choice
        if getattr(router, "norm_topk_prob", True):  # Mixtral always does, and has no switch
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
        """What the routers chose in the last forward pass, of these `rows`: for each of them
        [len(row.ids) - 1, layers, k].
        """
        some = next(iter(self.chosen.values()))
        routes = torch.zeros((len(some), self.decoder_layers, self.k), dtype=torch.int16)
        for layer, experts in self.chosen.items():
            routes[:, layer] = experts.cpu()
        return [route[:len(row.ids) - 1]
                for row, route in zip(rows, routes.view(len(rows), -1, *routes.shape[1:]))]

    def agreement(self, own, engine):
        """Have both chosen the same set of experts, in any order? [tokens, MoE layers] of bool."""
        return (own.sort(-1).values == engine.sort(-1).values).all(-1)[:, self.layers]

    def check(self, route, length: int) -> None:
        """Raises ValueError unless `route` can be that of a sequence of `length` tokens."""
        found, wanted = list(getattr(route, "shape", ())), [length - 1, self.decoder_layers, self.k]
        if found != wanted:
            raise ValueError(f"the engine recorded {found} as the routes of a sequence, "
                             f"instead of {wanted}")
        twice = self.k > 1 and (route[:, self.layers, 0] == route[:, self.layers, 1]).any()
        if twice or route.max() >= self.experts:  # a row of zeros above all
            raise ValueError("the engine recorded one expert twice for the same token, or one that "
                             "there is not: its kernel does not report them")


@contextlib.contextmanager
def replaying(policy, rows: list):
    """Force the routes in `row.replay` on the forward passes of these `rows`, if they have any.

    Keep it open until after the backward pass: with gradient checkpointing, that runs the routers
    again. A dense policy has none.
    """
    routing = getattr(policy, "routing", None)
    if routing and rows[0].replay is not None:
        routing.force(rows)
    try:
        yield
    finally:
        if routing:
            routing.forced = None


def note_routes(policy, rows: list, replay: str) -> None:
    """Notes on each row which experts the trainer chose, after the pass that gave its log pi_old.

    `agrees`: were they the engine's? (Under R3 the earlier layers were already forced to the
    engine's experts.) Under R2 they are what will be replayed. A dense policy has none.
    """
    routing = getattr(policy, "routing", None)
    if not routing:
        return
    for row, own in zip(rows, routing.recorded(rows)):
        if row.routes is not None:
            row.agrees = routing.agreement(own, row.routes)[row.prompt_length - 1:]
        if replay == "r2":
            row.replay = own


def require_routes(policy, groups: list) -> None:
    """Raises ValueError unless the engine has recorded the experts of all that was drawn."""
    for group in groups:
        for s in group.pool:
            length = len(group.problem.prompt_ids) + len(s.rollout.token_ids)
            policy.routing.check(s.rollout.routes, length)


# --------------------------------------------------------------------------------------- the engine
class CpuRecorder:
    """The experts that vLLM's CPU build used, by request: vLLM itself returns them on GPUs only.

    Every router of vLLM can report its choice for the rows of a batch. Which rows belong to which
    request is known where the batch is put together. This needs the engine in this process, eager
    mode, no prefix caching (cached tokens are not routed again), and one batch at a time (vLLM's
    CPU platform has no asynchronous scheduling). It reads internals of vLLM 0.32.
    """

    def __init__(self, llm):
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self.runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.decoder_layers = llm.llm_engine.model_config.hf_text_config.num_hidden_layers
        self.batch, self.layers = None, {}  # the last batch's requests, and its routes by layer
        self.found = {}  # request id -> list of [tokens, layers, k]
        for module in self.runner.model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self.note, module.layer_id))
        self.prepare, self.runner._prepare_inputs = self.runner._prepare_inputs, self.next_batch

    def note(self, layer: int, experts) -> None:
        self.layers[layer] = experts.to(torch.int16, copy=True)  # [tokens of the batch, k]

    def next_batch(self, scheduled, count_R, *args, **kwargs):
        """In place of the runner's `_prepare_inputs`; count_R: tokens per request in this step."""
        self.file_away()
        batch = self.runner.input_batch
        names = [name.rsplit("-", 1)[0] for name in batch.req_ids]  # without vLLM's random suffix
        self.batch = (
            names, count_R.tolist(), batch.num_computed_tokens_cpu[:len(count_R)].tolist())
        return self.prepare(scheduled, count_R, *args, **kwargs)

    def file_away(self) -> None:
        """Cut the last batch's routes up by request."""
        if self.batch is None or not self.layers:
            return
        (names, counts, starts), self.batch = self.batch, None
        some = next(iter(self.layers.values()))
        routes = torch.zeros((len(some), self.decoder_layers, some.shape[1]), dtype=torch.int16)
        for layer, experts in self.layers.items():
            routes[:, layer] = experts
        for name, start, rows in zip(names, starts, routes.split(counts)):
            if start == 0:  # also when a preempted request begins anew
                self.found[name] = []
            self.found[name].append(rows)

    def routes_of(self, request_id: str):
        """[prompt + response - 1, layers, k] of a request that has just finished."""
        self.file_away()
        return torch.cat(self.found.pop(request_id))
