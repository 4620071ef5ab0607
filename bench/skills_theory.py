"""The problem of compare_skills.py beside the paper's, and what the rules should do on it.

Exact pass rates of the model before training; draws and silence by pass rate (course/laws.py),
beside what runs that stand still have counted: the last table of compare_skills.py.
"""
import functools
from statistics import mean

import study

from ada_sampler import SamplerConfig
from course.laws import expected_yield
from models import make
from parts import problems
from parts.models import tiny_folder

# Reinforce-Ada (arXiv 2510.04996, v1, Fig. 2): pass@k of Qwen2.5-Math-1.5B before training
PAPER_K = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAPER_PASS = (.18, .27, .38, .48, .58, .66, .72, .77, .81)
RULES = {  # whose pools have a closed law
    "uniform-4": SamplerConfig(sampler="uniform", n=4),
    "uniform-16": SamplerConfig(sampler="uniform", n=16),
    "ada-pos": SamplerConfig(sampler="ada-pos"),
    "ada-balance": SamplerConfig(sampler="ada-balance")}


@functools.cache
def pass_rates() -> dict[str, list[float]]:
    """Letter -> the exact chance of the right completion, for each of its held-out problems."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder("tiny-skills"), dtype=torch.float32)
    tokenizer, texts = make.build_tokenizer(), {}
    for row in problems.skills("test", 1200):
        letter = row["problem"][1]
        prompt = tokenizer.encode(f"<|user|>{row['problem']}<|assistant|>")
        right = tokenizer.encode(
            f"{letter}={problems.offset(letter)}\n\\boxed{{{row['answer']}}}{make.END}")
        texts.setdefault((len(prompt), len(right)), []).append((letter, prompt + right))
    found = {letter: [] for letter in problems.LETTERS}
    for (start, _), rows in texts.items():
        ids = torch.tensor([text for _, text in rows])
        with torch.no_grad():
            logprobs = model(ids).logits[:, start - 1:-1].log_softmax(-1)
        chances = logprobs.gather(2, ids[:, start:, None]).sum((1, 2)).exp()
        for (letter, _), chance in zip(rows, chances.tolist()):
            found[letter].append(chance)
    return found


def pass_at(k: int) -> float:
    return mean(1 - (1 - p) ** k for rates in pass_rates().values() for p in rates)


@functools.cache
def law(p: float, arm: str):
    return expected_yield(p, RULES[arm])


def predicted(still: dict[str, dict]) -> str:
    """Draws and silence of a prompt by belief: expected exactly, and counted without training.

    still: arm -> letter -> [prompts met, draws, right answers, silent prompts].
    """
    found = [["belief", "pass rate", *(f"{arm}: {what}" for arm in RULES
                                       for what in ("draws", "no signal"))]]
    for belief in problems.BELIEF:
        letters = [x for x in problems.LETTERS if problems.belief(x) == belief]
        rates = [p for x in letters for p in pass_rates()[x]]
        cells = [str(belief), f"{mean(rates):.4f}"]
        for arm in RULES:
            wanted = [law(round(p, 4), arm) for p in rates]
            met, draws, _, silent = map(sum, zip(*(still[arm][x] for x in letters)))
            cells.append(f"{mean(y.draws for y in wanted):.1f} / {draws / met:.1f}")
            cells.append(f"{mean(y.silent for y in wanted):.2f} / {silent / met:.2f}")
        found.append(cells)
    return "Expected / counted, of a prompt.\n\n" + study.markdown(found)
