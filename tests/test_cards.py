"""What attention stores on a card, counted without one.
A library that falls back to a wasteful path shows here, not on somebody's card.
"""
import weakref

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parts.policy
from models_small import policy
from parts.logprobs import Row, token_logprobs

pytestmark = pytest.mark.slow
ATTENTION = functional.scaled_dot_product_attention
LENGTH = 384


class Count(TorchDispatchMode):
    """live, peak: bytes of the tensors that exist."""

    live = peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known, made = ({t.untyped_storage()._cdata: t.untyped_storage() for t in tree_leaves(x)
                        if isinstance(t, torch.Tensor)} for x in ((args, kwargs), out))
        for place in made.keys() - known.keys():  # others are views
            self.live += made[place].nbytes()
            weakref.finalize(made[place], self.forget, made[place].nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def forget(self, size: int) -> None:
        self.live -= size


def as_on_a_card(capability, asked: list):
    """torch's attention with the kernel that a card of this capability would take.

    As torch 2.13 chooses: flash needs 16 bits, capability 8.0 and no mask, and knows shared keys;
    the memory-efficient kernel takes the rest, unless keys are shared: then the plain formula.
    """
    def attention(q, k, v, attn_mask=None, enable_gqa=False, **how):
        flash = capability >= (8, 0) and q.dtype != torch.float32 and attn_mask is None
        shared = enable_gqa or k.shape[1] != q.shape[1]
        asked.append("fused" if flash or not shared else "every score")
        kernel = SDPBackend.FLASH_ATTENTION if asked[-1] == "fused" else SDPBackend.MATH
        with sdpa_kernel(kernel):  # on a CPU the fused kernel has this name
            return ATTENTION(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa, **how)
    return attention


def bytes_per_score(dtype, capability, monkeypatch, spared=True):
    """(live bytes per score at the peak of a pass, which kernels were taken).

    Twice as long a row has twice of everything else, and four times as many scores.
    """
    from transformers.integrations import sdpa_attention

    asked = []
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    monkeypatch.setattr(parts.policy, "capability", lambda: capability)
    learner = policy(dtype=dtype, checkpointing=True, max_position_embeddings=1024)
    if spared:
        parts.policy.spare_attention(dtype, "cuda")
    monkeypatch.setattr(functional, "scaled_dot_product_attention", as_on_a_card(capability, asked))
    peaks = []
    for longest in (LENGTH, 2 * LENGTH):
        rows = [Row([7 + i % 300 for i in range(n)], 5, [], 1.0) for n in (longest, longest // 2)]
        with Count() as count:
            token_logprobs(learner, rows)[0].sum().backward()
        peaks.append(count.peak)
        learner.zero_grad(set_to_none=True)
    scores = len(rows) * learner.config.num_attention_heads * LENGTH**2  # of the shorter pass
    return (peaks[1] - 2 * peaks[0]) / (2 * scores), {*asked}


@pytest.mark.parametrize("card, dtype, capability", [
    ("T4", "float16", (7, 5)), ("H100", "bfloat16", (9, 0)), ("4090", "bfloat16", (8, 9)),
    ("A100 in float32", "float32", (8, 0)), ("T4 in float32", "float32", (7, 5))])
def test_no_card_stores_every_score(card, dtype, capability, monkeypatch):
    """Rows of two lengths, so that a mask for the padding would be seen as well."""
    found, kernels = bytes_per_score(dtype, capability, monkeypatch)
    assert kernels == {"fused"}
    monkeypatch.undo()
    stored, kernels = bytes_per_score("float32", (8, 0), monkeypatch, spared=False)
    assert kernels == {"every score"}  # what happens without `spare_attention`
    assert found < 1 and stored > 10, (found, stored)
