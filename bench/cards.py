"""What the trainer of Qwen2.5-Math-1.5B moves and needs on a card, counted without one.

    python bench/cards.py

Its own code runs on tensors without contents (torch's device "meta"). What a step takes on a card
is estimated by bench/scale_out.py.
"""
import functools
import weakref
from unittest.mock import patch

from measure import SIZE_1_5B  # and one thread, and the path

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parts import logprobs, models, policy

LAYERS = SIZE_1_5B["num_hidden_layers"]
CHUNK = logprobs.CHUNK_BYTES // (4 * SIZE_1_5B["vocab_size"])  # tokens of the head at a time
CONTEXT = 4024  # a row of full length: 1,024 tokens of prompt, 3,000 of response
ROWS = 4  # such rows in a pass of 16,384 tokens
HOW = dict(adapter="bfloat16", checkpointing=True)  # the adapter as in a run


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

    config = Qwen2Config(max_position_embeddings=4096, tie_word_embeddings=True,
                         attn_implementation="sdpa", **SIZE_1_5B | dict(num_hidden_layers=layers))
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


def a_pass(layers: int, rows: int, length: int, **how) -> tuple[int, int]:
    """(bytes that `layers` layers move forward and backward, peak bytes)."""
    with (torch.device("meta"), Count() as count,
          patch.object(logprobs, "float32_product", card_product),
          patch.object(functional, "scaled_dot_product_attention", fused)):
        made = trainer(layers, **HOW | how)
        model, count.moved = made.get_base_model(), 0
        ids = torch.zeros((rows, length), dtype=torch.long)
        states = model.model.embed_tokens(ids).requires_grad_()
        h = model.model(inputs_embeds=states, attention_mask={"full_attention": None})
        forward = count.moved
        lp_T, _ = logprobs.ChunkedLogprobs.apply(
            h.last_hidden_state.flatten(0, 1), logprobs.head_of(model), ids.flatten(), 1.0, CHUNK)
        count.moved = 0
        lp_T.sum().backward()
        return forward + count.moved, count.peak


@functools.cache
def moved(adapter="bfloat16") -> float:
    """Bytes per token of a layer."""
    one, two = (a_pass(n, 1, 1024, adapter=adapter)[0] for n in (1, 2))
    return (two - one) / 1024


def needed(**how) -> float:
    """GiB of the trainer in a pass. Every layer adds the same."""
    one, two = (a_pass(n, ROWS, CONTEXT, **how)[1] for n in (1, 2))
    adapters = 12 * 18.5e6  # gradient and AdamW's two, in float32
    return (one + (LAYERS - 1) * (two - one) + adapters) / 2**30


def report() -> str:
    layer = ", ".join(f"{how} {moved(how) / 1e6:.1f}" for how in ("float32", "bfloat16", "none"))
    return (f"MB per token of a layer that the trainer moves, by the adapter: {layer}\n"
            f"GiB that it needs, checkpointing on / off: {needed():.1f} / "
            f"{needed(checkpointing=False):.0f}")


if __name__ == "__main__":
    print(report())
