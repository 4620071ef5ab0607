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
