"""Small random models of every family that can be trained, and the trainer's policy of one.

    policy()                                     a Qwen2 of two layers whose adapter does something
    policy("olmoe", dtype="bfloat16", moved=0)   of another family, as a run begins
    policy("qwen2", tie_word_embeddings=True)    with a config of its own
"""
import functools
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

import minirl
from models import make
from parts.models import own_class
from parts.policy import load_policy

SIZES = dict(vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
             initializer_range=0.15)  # wide, so that no answer is near to certain or to even
WIDE = dict(head_dim=32)  # else it does not follow from the other sizes
DENSE = dict(
    qwen2={}, qwen3=WIDE, llama={}, mistral=dict(sliding_window=None), olmo2={}, phi3={},
    smollm3={}, gemma=WIDE, gemma3_text=WIDE)
EXPERTS = dict(num_key_value_heads=2, num_experts_per_tok=2)
MIXTURES = dict(
    qwen3_moe=EXPERTS | WIDE | dict(num_experts=8, moe_intermediate_size=64, norm_topk_prob=True),
    olmoe=EXPERTS | dict(num_experts=8), mixtral=EXPERTS | dict(num_local_experts=8))
FAMILIES = DENSE | MIXTURES
ONE_LAYER = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                 num_attention_heads=1, num_key_value_heads=1, initializer_range=0.3,
                 eos_token_id=0, pad_token_id=1)
OF_EXPERTS = dict(head_dim=16, moe_intermediate_size=8, num_experts=4, num_hidden_layers=2)


def model(family: str = "qwen2", **config):
    """A Hugging Face model whose weights and biases are random."""
    torch.manual_seed(0)
    words = make.build_tokenizer()
    ids = dict(bos_token_id=None, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id)
    made = AutoConfig.for_model(family, **SIZES | ids | FAMILIES[family] | config)
    found = own_class(made)(made)  # an engine before this one may have changed the shared class
    for name, p in found.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.5)
    return found


def model_folder(family: str = "qwen2", **config) -> str:
    """The folder of this model with a built-in model's tokenizer. Tests share it: only read it."""
    return saved(family, json.dumps(config, sort_keys=True))


@functools.cache
def saved(family: str, config: str) -> str:
    folder = Path(PLACE.name, f"{family}-{saved.cache_info().currsize}")
    model(family, **json.loads(config)).save_pretrained(folder)
    make.build_tokenizer().save_pretrained(folder)
    return str(folder)


PLACE = tempfile.TemporaryDirectory(prefix="models-small-")


def policy(family: str = "qwen2", dtype: str = "float32", moved: float = 0.05, *, rank: int = 4,
           alpha: int | None = None, seed: int = 0, checkpointing: bool = False, **config):
    """What `load_policy` makes of such a model, or of a folder; see `move`."""
    folder = model_folder(family, **config) if family in FAMILIES else str(family)
    made = load_policy(folder, dtype=dtype, rank=rank, alpha=alpha or 2 * rank, seed=seed,
                       device="cpu", checkpointing=checkpointing)
    move(made, moved)
    torch.manual_seed(0)
    return made


def one_layer(mixture: bool = False):
    """The quickest policy: 32 words and one layer (two of experts), B = 0 as at a run's start."""
    config = ONE_LAYER | OF_EXPERTS if mixture else ONE_LAYER
    return policy("qwen3_moe" if mixture else "qwen2", moved=0, **config)


def tiny_policy():
    """A policy in float64, in which two computations of a gradient agree to many digits."""
    return policy(dtype="float64", hidden_size=32, initializer_range=0.02)


def second(policy) -> dict:
    """The B of every adapter: zero at the start, which hides the gradient of A."""
    return {name: p for name, p in policy.named_parameters() if "lora_B" in name}


def move(policy, size: float, seed: int = 0) -> None:
    """Replaces an optimizer step by a random change of the adapter."""
    generator = torch.Generator().manual_seed(seed)
    for p in second(policy).values():
        p.data += size * torch.randn(p.shape, generator=generator)


def trained_weights(policy) -> dict:
    """Copies of what an optimizer step changes."""
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}


def plain_logprobs(policy, row, temperature: float = 1.0):
    """log pi [T] of a row's response from the model's own logits, all at once."""
    logits = policy(input_ids=torch.tensor([row.ids])).logits[0, row.prompt_length - 1:-1]
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, torch.tensor(row.ids[row.prompt_length:])[:, None])[:, 0]


def random_groups(count: int, seed: int) -> list:
    """Groups as the sampler returns them, with responses of 1 to 20 random tokens."""
    rng, groups = random.Random(seed), []
    for _ in range(count):
        kept = []
        for _ in range(4):
            ids = [rng.randrange(300) for _ in range(rng.randint(1, 20))]
            rollout = SimpleNamespace(
                token_ids=ids, logprobs=[-5.8 + 0.2 * rng.random() for _ in ids], routes=None)
            kept.append((SimpleNamespace(rollout=rollout), rng.choice([-0.5, 0.5, 0.0])))
        problem = SimpleNamespace(prompt_ids=[rng.randrange(300) for _ in range(rng.randint(2, 9))])
        groups.append(SimpleNamespace(problem=problem, kept=kept, rows=lambda kept=kept: kept))
    return groups


def update(policy, optimizer, schedule, groups, config, rng=None) -> dict:
    """The metrics of a step of minirl with these groups, which have their advantages."""
    engine = SimpleNamespace(sleep=lambda: None, wake=lambda: None)
    run = SimpleNamespace(config=config, policy=policy, optimizer=optimizer, schedule=schedule,
                          engine=engine, state=Counter())
    around = dict(
        sample=lambda run: groups, set_advantages=lambda *_: None, sync=lambda run: {},
        seed_all=lambda *_: rng or random.Random(0), mean_surprisal=lambda groups: 0.0,
        summarize=lambda groups: dict(samples=0, tokens=0))
    with pytest.MonkeyPatch.context() as patch:
        for name, instead in around.items():
            patch.setattr(minirl, name, instead)
        return minirl.train_step(1, run)[1]


def gradients_of(policy, groups, **changes) -> tuple[list[dict], dict]:
    """The gradient of each optimizer step of `update`, which only records it; and the metrics."""
    recorded = []

    def record(policy, *_):
        recorded.append({name: p.grad.clone() for name, p in policy.named_parameters()
                         if p.grad is not None})
        policy.zero_grad()
        return 0.0

    from world import settled

    config = settled(**dict(max_tokens=20, micro_tokens=4096) | changes)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minirl, "optimizer_step", record)
        metrics = update(policy, optimizer, None, groups, config)
    return recorded, metrics


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation returned, also in the backward pass."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
        return out
