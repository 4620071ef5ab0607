"""What a run of Qwen2.5-Math-1.5B takes on a 24 GB card, counted without one.

    python bench/cards.py

Bytes are counted: the trainer's own code runs on tensors without contents (torch's device "meta").
Engine steps are counted too: the real sampler draws, with the lengths and verdicts of bench/gpu.py.
Seconds are ESTIMATES: what the makers say of memory and arithmetic, times SHARE, and guesses for
what an engine step and a sync take besides. Nobody has measured any of them.
"""
import functools
import random
import weakref
from types import SimpleNamespace
from unittest.mock import patch

from gpu import FULL, coins, long_tailed  # and one thread, and the path

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ada_sampler import collect
from parts import logprobs, models, policy
from parts.config import Config

CARDS = {  # bytes of memory per second, 16-bit operations per second
    "L4": (0.30e12, 121e12), "A10": (0.60e12, 125e12), "4090": (1.01e12, 165e12)}
SHARE = dict(bytes=0.8, flops=0.4)  # of what the makers say
HOST, SYNC = 0.005, 2.0  # seconds of an engine step beside its reads; of a sync and its probe
LAYERS, WEIGHTS = FULL.size["num_hidden_layers"], 1.54e9
TOKEN = 2 * 2 * LAYERS * 2 * 128  # bytes of a token in the cache: keys and values of 2 heads, bf16
CHUNK = logprobs.CHUNK_BYTES // (4 * FULL.vocabulary)  # tokens of the head at a time
CONTEXT = 4024  # a row of full length: 1,024 tokens of prompt, 3,000 of response
ROWS = 4  # such rows in a pass of 16,384 tokens
HOW = dict(adapter="bfloat16", checkpointing=True)  # the adapter as in a run


# --------------------------------------------------------------------- bytes, on tensors of no size
class Count(TorchDispatchMode):
    """moved: bytes that operations read and write. live, peak: bytes of tensors that exist."""

    def __init__(self):
        super().__init__()
        self.moved = self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]
                       for x in ((args, kwargs), out))
        known = {t.untyped_storage()._cdata for t in given}
        new = {t.untyped_storage()._cdata: t.untyped_storage() for t in made
               if t.untyped_storage()._cdata not in known}  # none: a view
        for storage in new.values():
            self.live += storage.nbytes()
            weakref.finalize(storage, self.forget, storage.nbytes())
        self.peak = max(self.peak, self.live)
        if (new or func._schema.is_mutable) and "empty" not in func.name():
            self.moved += sum(t.numel() * t.element_size() for t in [*given, *made])
        return out

    def forget(self, size: int) -> None:
        self.live -= size


def fused(q, k, v, attn_mask=None, is_causal=False, scale=None, **_):
    """As a card's fused kernels: no score is stored. They take no mask."""
    assert attn_mask is None and is_causal
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, True, scale=scale)[0]


def card_product(h_T, weight):
    """As `float32_product` on a card."""
    return torch.mm(h_T, weight.T, out_dtype=torch.float32)


def trainer(layers: int, adapter: str, checkpointing: bool):
    """The trainer's model at 1.5B's shape, with so many layers.

    adapter: bfloat16 as in a run, float32 as PEFT would, or none.
    """
    from transformers import Qwen2Config

    config = Qwen2Config(vocab_size=FULL.vocabulary, max_position_embeddings=4096,
                         tie_word_embeddings=True, attn_implementation="sdpa",
                         **FULL.size | dict(num_hidden_layers=layers))
    torch.set_default_dtype(torch.bfloat16)
    model = models.own_class(config)(config)
    torch.set_default_dtype(torch.float32)
    model.to = lambda device: model
    adapt = (lambda _: None) if adapter == "float32" else policy.adapt_in_bfloat16
    with (patch.object(policy, "load_model", lambda *_: model),
          patch.object(policy, "adapt_in_bfloat16", adapt)):
        made = policy.load_policy("", dtype="bfloat16", rank=16, alpha=32, seed=0, device="cpu",
                                  checkpointing=checkpointing)
    if adapter == "none":
        made.base_model.disable_adapter_layers()
    return made


def a_pass(layers: int, rows: int, length: int, **how):
    """(bytes that `layers` layers move forward and backward, that the head moves, peak bytes)."""
    with (torch.device("meta"), Count() as count,
          patch.object(logprobs, "float32_product", card_product),
          patch.object(functional, "scaled_dot_product_attention", fused)):
        made = trainer(layers, **HOW | how)
        model, count.moved = made.get_base_model(), 0
        ids = torch.zeros((rows, length), dtype=torch.long)
        states = model.model.embed_tokens(ids).requires_grad_()
        h = model.model(inputs_embeds=states, attention_mask={"full_attention": None})
        layers_moved, count.moved = count.moved, 0
        lp_T, _ = logprobs.ChunkedLogprobs.apply(
            h.last_hidden_state.flatten(0, 1), logprobs.head_of(model), ids.flatten(), 1.0, CHUNK)
        head_moved, count.moved = count.moved, 0
        lp_T.sum().backward()
        return layers_moved + count.moved, head_moved, count.peak


@functools.cache
def moved(adapter="bfloat16") -> float:
    """Bytes per token of a layer."""
    one, two = (a_pass(n, 1, 1024, adapter=adapter)[0] for n in (1, 2))
    return (two - one) / 1024


def needed(**how) -> float:
    """GiB of the trainer in a pass. Every layer adds the same."""
    one, two = (a_pass(n, ROWS, CONTEXT, **how)[2] for n in (1, 2))
    adapters = 12 * 18.5e6  # gradient and AdamW's two, in float32
    return (one + (LAYERS - 1) * (two - one) + adapters) / 2**30


# ------------------------------------------------------------------------------ a step's rollouts
class Slots:
    """An engine that only counts: a step gives a token to every running request."""

    def __init__(self, slots: int):
        self.slots, self.waiting, self.running = slots, [], {}
        self.steps = self.read = 0  # read: tokens of the cache, in all steps

    def submit(self, key, problem) -> None:
        self.waiting.append((key, long_tailed(random.Random(f"length/{key}"), FULL.typical,
                                              FULL.longest)))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list:
        while self.waiting and len(self.running) < self.slots:
            key, length = self.waiting.pop(0)
            self.running[key] = 0, length
        self.steps += 1
        self.read += sum(FULL.prompt + done for done, _ in self.running.values())
        self.running = {key: (done + 1, length) for key, (done, length) in self.running.items()}
        ended = [key for key, (done, length) in self.running.items() if done == length]
        return [(key, SimpleNamespace(token_ids=range(self.running.pop(key)[1]))) for key in ended]


def step_seconds() -> dict[str, tuple]:
    """Card -> seconds of sampling, training and sync in a step of 32 prompts."""
    config = Config()
    engine = Slots(config.engine_sequences)
    groups = collect([None] * FULL.prompts, config, engine, coins(FULL.prompts))
    kept = sum(FULL.prompt + len(s.rollout.token_ids) for group in groups for s in group.kept)
    head = a_pass(1, 1, 10 * CHUNK)[1] / (10 * CHUNK)
    bytes_read = 2 * WEIGHTS * engine.steps + TOKEN * engine.read
    bytes_trained = kept * (LAYERS * moved() + head)
    found = {}
    for card, (memory, arithmetic) in CARDS.items():
        memory, arithmetic = SHARE["bytes"] * memory, SHARE["flops"] * arithmetic
        sampling = engine.steps * HOST + bytes_read / memory
        found[card] = sampling, bytes_trained / memory + 6 * WEIGHTS * kept / arithmetic, SYNC
    return found


def report() -> str:
    layer = ", ".join(f"{how} {moved(how) / 1e6:.1f}" for how in ("float32", "bfloat16", "none"))
    cards = ", ".join(f"{card} {s:.0f} + {t:.0f} + {sync:.0f} s, {(s + t + sync) / 18:.0f} h"
                      for card, (s, t, sync) in step_seconds().items())
    return (f"MB per token of a layer that the trainer moves, by the adapter: {layer}\n"
            f"GiB that it needs, checkpointing on / off: {needed():.1f} / "
            f"{needed(checkpointing=False):.0f}\n"
            f"A step (sampling + training + sync), and 200 of them: {cards}")


if __name__ == "__main__":
    print(report())
