"""The policy: a frozen model with a LoRA adapter, and the log-probabilities of what was sampled.

Everything in policy-gradient training hangs on log pi(y_t), and most small projects get it wrong somewhere. The rules kept
here: the same token ids that the engine sampled (never re-tokenised text), the end token included, the prompt excluded,
the same temperature as the engine, no dropout, right padding that no token can see, float32 from the logits on, and never
a tensor of [batch, length, vocabulary].
"""
from dataclasses import dataclass

import torch


def load_policy(path: str, *, dtype: str, rank: int, alpha: int, seed: int, device: str, checkpointing: bool = False):
    """The trainer's model: frozen weights in `dtype`, a LoRA adapter in float32 on every linear layer but the head.

    Of a mixture of experts only the attention is adapted: engines serve adapters of stacked experts badly or not at all.
    Its `routing` (routing_replay.RoutingReplay) records and replays the choice of experts; None for any other model.
    """
    from peft import LoraConfig, get_peft_model
    from parts.routing_replay import FAMILIES, RoutingReplay
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)  # B starts at zero and A at random
    config = AutoConfig.from_pretrained(path)
    for noise in {"attention_dropout", "router_jitter_noise"} & set(vars(config)):
        setattr(config, noise, 0.0)  # like dropout in the adapter, it would make pi_old noisy
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=getattr(torch, dtype)).to(device)
    model.config.use_cache = False
    mixture = model.config.model_type in FAMILIES
    lora = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0,
                      target_modules=["q_proj", "k_proj", "v_proj", "o_proj"] if mixture else "all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(model, lora)
    policy.routing = RoutingReplay(model) if mixture else None
    if checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy.train()


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(h W^T / temperature)[y] and its entropy, a chunk of tokens at a time.

    A [tokens, vocabulary] tensor would be the largest of the whole program (8,192 tokens x 151,936 words: 5 GB, and
    softmax and its gradient need several). W is frozen under LoRA, so the only gradient is that of h,

        d log p(y) / d h = (W_y - sum_v p_v W_v) / temperature,

    which is as small as h itself and is computed while the chunk's logits are there. Nothing else is kept for backward.
    The entropy is a metric: no gradient flows through it.
    """

    @staticmethod
    def forward(ctx, h_T, weight, target_T, temperature, chunk):
        logprob_T, entropy_T = h_T.new_empty((2, len(h_T)), dtype=torch.float32)
        slope_T = torch.empty_like(h_T) if ctx.needs_input_grad[0] else None  # d log p(y) / d h, [T, hidden]
        for start in range(0, len(h_T), chunk):
            at = slice(start, start + chunk)
            logits = (h_T[at] @ weight.T).float().div_(temperature)  # [chunk, vocabulary]
            logp = logits.sub_(logits.logsumexp(-1, keepdim=True))  # in place: no second tensor of this size
            logprob_T[at] = logp.gather(-1, target_T[at, None])[:, 0]
            p = logp.exp()
            entropy_T[at] = -torch.linalg.vecdot(p, logp)  # sum of p log p, without their product as a tensor
            if slope_T is not None:
                slope_T[at] = (weight[target_T[at]] - p.to(weight.dtype) @ weight) / temperature
        ctx.save_for_backward(slope_T)
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, _):
        (slope_T,) = ctx.saved_tensors
        return (grad_T[:, None] * slope_T).to(slope_T.dtype), None, None, None, None


@dataclass
class Row:
    """One kept sample as the update sees it."""

    ids: list[int]  # prompt and response
    prompt_length: int
    mu: list[float]  # the engine's log-probs of the response
    advantage: float  # times the sampler's row weight
    scale: float = 1.0  # what one of its tokens counts in the loss (minirl.set_scales)
    routes: torch.Tensor | None = None  # experts that the engine used, [len(ids) - 1, layers, k] (routing_replay.py)
    replay: torch.Tensor | None = None  # likewise, those that the trainer is made to use
    # left by the pi_old pass:
    old: torch.Tensor | None = None  # log pi_old of the response [T]
    agrees: torch.Tensor | None = None  # [T, MoE layers], whether the trainer's routers chose what the engine used

    @property
    def length(self) -> int:
        return len(self.ids) - self.prompt_length


def response_states(policy, rows: list[Row]):
    """(h_T, target_T): the last hidden state [T, hidden] before each response token of all rows, and that token's id [T].

    Rows are padded on the right: with causal attention no token ever looks at padding, so no mask is needed.
    """
    model = policy.get_base_model()
    device, length = model.lm_head.weight.device, max(len(row.ids) for row in rows)
    ids = torch.zeros((len(rows), length), dtype=torch.long)
    predicts = torch.zeros((len(rows), length), dtype=torch.bool)  # positions whose next token belongs to a response
    for i, row in enumerate(rows):
        ids[i, :len(row.ids)] = torch.tensor(row.ids)
        predicts[i, row.prompt_length - 1:len(row.ids) - 1] = True
    target_T = ids.roll(-1, 1)[predicts].to(device)
    return model.model(input_ids=ids.to(device)).last_hidden_state[predicts.to(device)], target_T


def token_logprobs(policy, rows: list[Row], temperature: float = 1.0, chunk_bytes: int = 2**27):
    """(log pi_T, entropy_T) in nats of the response tokens of all rows, one row after the other."""
    h_T, target_T = response_states(policy, rows)
    weight = policy.get_base_model().lm_head.weight
    return ChunkedLogprobs.apply(h_T, weight, target_T, temperature, max(1, chunk_bytes // (4 * len(weight))))


@torch.no_grad()
def head_gradient_norms(policy, rows: list[Row], chunk: int = 8192) -> list[float]:
    """|| grad_W log pi(y|x) || of each row, for the language-model head W: the G of GVM, without a backward pass.

    With E = onehot(y) - p [T, vocabulary] and H [T, hidden] the gradient, summed over the response's tokens, is E^T H, so
    its squared Frobenius norm is the sum over token pairs (s, t) of (E E^T)_st (H H^T)_st. E is made in slices of W.
    """
    weight, norms = policy.get_base_model().lm_head.weight, []
    for row in rows:
        h, target = response_states(policy, [row])
        log_z = torch.logsumexp((h @ weight.T).float(), -1, keepdim=True)
        similarity = h.new_zeros((len(h), len(h)), dtype=torch.float32)  # E E^T
        for start in range(0, len(weight), chunk):
            E = -((h @ weight[start:start + chunk].T).float() - log_z).exp()
            mine = (target >= start) & (target < start + chunk)
            E[mine, target[mine] - start] += 1
            similarity += E @ E.T
        norms.append((similarity * (h.float() @ h.float().T)).sum().clamp(min=0).sqrt().item())
    return norms


def micro_batches(rows: list[Row], tokens: int, padding: float = 0.05) -> list[list[Row]]:
    """Rows in order of length, cut so that no batch (rows x longest row) exceeds `tokens` and at most a share `padding` is padding.

    Without the second rule a batch with room for everything could be mostly padding. The share is that of all batches so far:
    what rows of equal length leave of it, the others may use.
    """
    batches, real, closed = [[]], 0, 0  # tokens so far; and of the batches that are complete, with their padding
    for row in sorted(rows, key=lambda row: len(row.ids)):
        real += len(row.ids)
        area = (len(batches[-1]) + 1) * len(row.ids)  # of the last batch, were this row, its longest, added to it
        if batches[-1] and (area > tokens or real < (1 - padding) * (closed + area)):
            closed += len(batches[-1]) * len(batches[-1][-1].ids)
            batches.append([])
        batches[-1].append(row)
    return batches if rows else []


class Probe:
    """Do trainer and engine hold the same policy? Asked at the start and after every sync, on a few fixed texts.

    Made while the engine still has the base weights: it lets the engine write the texts (so that they are the same when a
    run is resumed) and compares the log-probs of sampling; `check` compares those of a prefill of the same texts, at
    temperature 1 and with the adapter.

    Raises SystemExit when they disagree by more than `tolerance`, ("max", "mean" or "median" over tokens, nats); or when the engine
    answers exactly as before although the trainer has moved.
    """

    def __init__(self, engine, policy, problems, *, tolerance: tuple[str, float], max_tokens: int = 16, temperature: float = 1.0):
        self.engine, self.policy, self.tolerance, self.last = engine, policy, tolerance, None
        rollouts = engine.generate([p.prompt_ids for p in problems], n=1, max_tokens=min(16, max_tokens))
        sampled = [Row(p.prompt_ids + r.token_ids, len(p.prompt_ids), r.logprobs, 0.0) for p, (r,) in zip(problems, rollouts)]
        with policy.disable_adapter():
            self.require_close(torch.tensor([x for row in sampled for x in row.mu]), self.trainer_logprobs(sampled, temperature))
        self.rows = [Row(row.ids, prompt_length=1, mu=[], advantage=0.0) for row in sampled]  # score every token but the first

    def trainer_logprobs(self, rows, temperature: float = 1.0):
        with torch.no_grad():
            return token_logprobs(self.policy, rows, temperature)[0].cpu()

    def check(self) -> dict:
        """Compare on the prompts and responses of the probe; returns the gaps in nats."""
        mine = self.trainer_logprobs(self.rows)
        theirs = torch.tensor([x for row in self.engine.score([row.ids for row in self.rows]) for x in row])
        if self.last is not None and torch.equal(theirs, self.last[1]) and (mine - self.last[0]).abs().max() > 1e-5:
            raise SystemExit("The new weights did not reach the engine: its log-probs are exactly those from before the sync. "
                             "Try the other --sync (merge or adapter).")
        self.last = mine, theirs
        return self.require_close(theirs, mine)

    def require_close(self, theirs, mine) -> dict:
        gap, (statistic, most) = (theirs - mine).abs(), self.tolerance
        if not getattr(gap, statistic)() < most:  # also when it is NaN
            raise SystemExit(f"Engine and trainer disagree: |log mu - log pi_old| is {gap.mean():.1e} on average and "
                             f"{gap.max():.1e} at most. Training would be wrong; try the other --sync, or --dtype float32.")
        return dict(probe_gap_mean=gap.mean().item(), probe_gap_max=gap.max().item())
