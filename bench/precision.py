"""How far are engine and trainer apart in each precision? python bench/precision.py (3 minutes)

k3, an estimate of KL(mu || pi_old) in nats per token, on 512 responses of the built-in models, both
sides in one precision: with float32 logits, as they are, and with logits rounded to the weights'
precision, as engines and trainers usually have them.
"""
import gc
import random
from unittest.mock import patch

from common import RESULTS  # and one thread, and the path
from store import markdown

DTYPES = ("float32", "float16", "bfloat16")


def rounded_product(h_T, weight):
    """Logits as 16-bit matrices give them by themselves."""
    return (h_T @ weight.T).float()


def measure(model: str, dtype: str, rounded: bool) -> tuple[float, float]:
    """Mean of k3, and of the absolute difference of log-probs."""
    import torch
    import vllm

    from parts import engine as engines
    from parts import logprobs, models, policy, problems

    path, whole = models.tiny_folder(model), vllm.LLM
    product = rounded_product if rounded else logprobs.float32_product
    changed = dict(hf_overrides={}) if rounded else {}
    with (patch.object(logprobs, "float32_product", product),
          patch.object(vllm, "LLM", lambda *a, **options: whole(*a, **options | changed))):
        engine = engines.Engine(path, max_model_len=128, max_num_seqs=256, dtype=dtype)
        trainer = policy.load_policy(path, dtype=dtype, rank=8, alpha=16, seed=0, device="cpu")
        engines.seed_everything(random.Random(0))
        prompts = [engine.tokenizer.encode(f"<|user|>{row['problem']}<|assistant|>")
                   for row in problems.chains("test", 32)]
        rows = [logprobs.Row(ids + r.token_ids, len(ids), r.logprobs, 0.0)
                for ids, drawn in zip(prompts, engine.generate(prompts, n=16, max_tokens=64))
                for r in drawn]
        with torch.no_grad():
            old_T = logprobs.token_logprobs(trainer, rows)[0].double()
    engine.close()
    gc.collect()
    gap_T = torch.tensor([x for row in rows for x in row.mu]).double() - old_T
    return ((-gap_T).exp() - 1 + gap_T).mean().item(), gap_T.abs().mean().item()


def main() -> None:
    lines = [["model", "weights", "logits", "k3", "mean difference, nats"]]
    for model in ("tiny", "tiny-moe"):
        for dtype in DTYPES:
            for rounded in (False, True)[:1 + (dtype != "float32")]:
                k3, gap = measure(model, dtype, rounded)
                lines.append([model, dtype, "16 bits" if rounded else "float32", f"{k3:.1e}",
                              f"{gap:.0e}"])
    text = markdown(lines)
    (RESULTS / "precision.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
