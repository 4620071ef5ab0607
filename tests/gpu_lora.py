"""vLLM's LoRA kernels of a GPU, run by Triton's interpreter on a CPU: shrink, then expand.

    TRITON_INTERPRET=1 python tests/gpu_lora.py      # where Triton 3.7.1 can be imported

Tokens of one adapter stand beside tokens without one, at the shapes of Qwen2.5-Math-1.5B's queries,
keys and values. Prints the largest difference from x A^T B^T, relative to its largest value.
(In bfloat16 the interpreter itself rounds wrongly, so this is float16.)
"""
import json
from types import SimpleNamespace

import torch
from triton.backends import backends

driver = SimpleNamespace(is_active=lambda: True)
backends["cpu"] = SimpleNamespace(driver=driver)  # else vLLM's CPU build leaves Triton out

from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink  # noqa: E402

HIDDEN, OUT, RANK, TOKENS = 1536, (1536, 256, 256), 16, 40


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN).half()
    a = [torch.randn(1, RANK, HIDDEN).half() / HIDDEN**0.5 for _ in OUT]
    b = [torch.randn(1, size, RANK).half() for size in OUT]
    adapter_of = torch.tensor([0, 0, 0, -1] * (TOKENS // 4), dtype=torch.int32)  # -1: none
    meta = LoRAKernelMeta.make(max_loras=1, max_num_tokens=TOKENS, device="cpu")
    meta.prepare_tensors(adapter_of)
    where = meta.meta_args(TOKENS, True)

    shrunk = torch.zeros(len(OUT), TOKENS, RANK)
    lora_shrink(x, a, shrunk, *where, 1.0)
    found = torch.zeros(TOKENS, sum(OUT)).half()
    lora_expand(shrunk, b, found, *where, add_inputs=True)

    expected = torch.cat([x.float() @ A[0].float().T @ B[0].float().T for A, B in zip(a, b)], dim=1)
    expected[adapter_of < 0] = 0
    error = (found.float() - expected).abs().max() / expected.abs().max()
    print(json.dumps(dict(error=error.item(), without=found[adapter_of < 0].abs().max().item())))


if __name__ == "__main__":
    main()
