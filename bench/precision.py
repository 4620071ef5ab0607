"""How far engine and trainer are apart in each precision: python bench/precision.py   (3 minutes)

KL(mu || pi_old) per token, as `kl_k3` in a run's log estimates it, on 512 responses of a built-in
model; both sides in the same precision, with their logits in float32 as they are, and with logits
rounded to the weights' precision as engines and trainers usually have them.
"""
import gc
import json
import random
import sys

from common import RESULTS

ROWS = [("float32", False), ("float16", False), ("float16", True), ("bfloat16", False),
        ("bfloat16", True)]


def rounded_product(h_T, weight, words=0):
    """Logits as 16-bit matrices give them by themselves."""
    return (h_T @ weight.T).float()


def measure(model: str, dtype: str, rounded: bool) -> dict:
    """Mean of k3, and of the absolute difference, in nats per token."""
    import torch
    import vllm
    from parts import engine as engines
    from parts import logprobs, tiny
    from parts.policy import Row, load_policy

    folder, whole, product = tiny.folder(model), vllm.LLM, logprobs.float32_product
    if rounded:
        logprobs.float32_product = rounded_product
        vllm.LLM = lambda *a, **options: whole(*a, **options | dict(hf_overrides={}))
    try:
        engine = engines.Engine(folder, max_model_len=128, max_num_seqs=256, dtype=dtype)
        policy = load_policy(folder, dtype=dtype, rank=8, alpha=16, seed=0, device="cpu")
        engines.seed_everything(random.Random(0))
        prompts = [engine.tokenizer.encode(f"<|user|>{p['problem']}<|assistant|>")
                   for p in tiny.problems("test", 32)]
        drawn = engine.generate(prompts, n=16, max_tokens=64)
        rows = [Row(ids + r.token_ids, len(ids), r.logprobs, 0.0)
                for ids, group in zip(prompts, drawn) for r in group]
        mu_T = torch.tensor([x for row in rows for x in row.mu]).double()
        with torch.no_grad():
            old_T = logprobs.token_logprobs(policy, rows)[0].double()
    finally:
        vllm.LLM, logprobs.float32_product = whole, product
    del engine.llm, engine
    gc.collect()
    gap_T = mu_T - old_T
    return dict(k3=((-gap_T).exp() - 1 + gap_T).mean().item(), mean=gap_T.abs().mean().item(),
                most=gap_T.abs().max().item(), tokens=len(mu_T))


def main() -> None:
    from parts.engine import configure_vllm

    configure_vllm(on_cpu=True)
    found = {}
    for model in sys.argv[1:] or ("tiny", "tiny-moe"):
        for dtype, rounded in ROWS:
            row = measure(model, dtype, rounded)
            found[f"{model} {dtype}{' rounded' * rounded}"] = row
            logits = dtype if rounded else "float32"
            print(f"| {model} | {dtype} | {logits} | {row['k3']:.1e} | {row['mean']:.1e} | "
                  f"{row['most']:.1e} |", flush=True)
    (RESULTS / "precision.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
