"""The policy: a frozen model with a LoRA adapter, and the log-probabilities of what was sampled.

Everything in policy-gradient training hangs on log pi(y_t), and most small projects get it wrong somewhere. The rules kept
here: the same token ids that the engine sampled (never re-tokenised text), the end token included, the prompt excluded,
the same temperature as the engine, no dropout, right padding that no token can see, float32 from the logits on, and never
a tensor of [batch, length, vocabulary].
"""
from dataclasses import dataclass

import torch


def load_policy(path: str, *, dtype: str, rank: int, alpha: int, seed: int, device: str, checkpointing: bool = False):
    """The trainer's model: frozen weights in `dtype`, a LoRA adapter in float32 on every linear layer but the head."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)  # B starts at zero and A at random
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device)
    model.config.use_cache = False
    lora = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0,  # dropout would make pi_old noisy
                      target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(model, lora)
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
            logits -= logits.logsumexp(-1, keepdim=True)  # now log p
            logprob_T[at] = logits.gather(-1, target_T[at, None])[:, 0]
            p = logits.exp()
            entropy_T[at] = -torch.linalg.vecdot(p, logits)
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
    old: torch.Tensor | None = None  # log pi_old of the response, where it differs from log pi_theta

    @property
    def length(self) -> int:
        return len(self.ids) - self.prompt_length


def token_logprobs(policy, rows: list[Row], temperature: float = 1.0, chunk_bytes: int = 2**27):
    """(log pi_T, entropy_T) in nats of the response tokens of all rows, one row after the other.

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
    h_T = model.model(input_ids=ids.to(device)).last_hidden_state[predicts.to(device)]
    chunk = max(1, chunk_bytes // (4 * model.lm_head.weight.shape[0]))
    return ChunkedLogprobs.apply(h_T, model.lm_head.weight, target_T, temperature, chunk)


def micro_batches(rows: list[Row], tokens: int) -> list[list[Row]]:
    """Rows in order of length, cut so that rows x longest row (padding included) stays within `tokens`."""
    batches = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if not batches or (len(batches[-1]) + 1) * len(row.ids) > tokens:
            batches.append([])
        batches[-1].append(row)
    return batches
