"""What the sampling rules should do on the skills, beside what compare_skills.py has counted.

Exact pass rates of the model before training; from these each rule's expected draws and silence
(course/laws.py), beside the counts of runs whose weights stand still.
"""
import functools
from statistics import mean

import study

from ada_sampler import SamplerConfig
from course.laws import expected_yield
from models import make
from parts import problems
from parts.models import tiny_folder

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
    tokenizer, found = make.build_tokenizer(), {letter: [] for letter in problems.LETTERS}
    for row in problems.skills("test", 1200):
        letter = row["problem"][1]
        prompt = tokenizer.encode(f"<|user|>{row['problem']}<|assistant|>")
        right = tokenizer.encode(
            f"{letter}={problems.offset(letter)}\n\\boxed{{{row['answer']}}}{make.END}")
        with torch.no_grad():
            logits = model(torch.tensor([prompt + right])).logits[0, len(prompt) - 1:-1]
        logprobs = logits.log_softmax(-1)[range(len(right)), right]
        found[letter].append(logprobs.sum().exp().item())
    return found


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
