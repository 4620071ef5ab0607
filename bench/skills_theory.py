"""The expected results of the sampling rules on the skills (course/laws.py) and the counts."""
import functools
from statistics import mean

from store import markdown

from ada_sampler import SamplerConfig
from course.laws import efficiency, expected_yield
from models import make
from models import problems
from parts.models import tiny_folder

RULES = {  # their pools have a known distribution
    "uniform-4": SamplerConfig(sampler="uniform", n=4),
    "uniform-16": SamplerConfig(sampler="uniform", n=16),
    "ada-pos": SamplerConfig(sampler="ada-pos"),
    "ada-balance": SamplerConfig(sampler="ada-balance")}


@functools.cache
def pass_rates() -> dict[str, list[float]]:
    """Letter -> the exact probabilities of the right completions of its held-out problems."""
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
    """Answers and share without gradient by belief: exact expectations, counts without training.

    still: arm -> letter -> [prompts, answers, right answers, prompts without gradient].
    """
    found = [["belief", "pass rate", *(f"{arm}: {what}" for arm in RULES
                                       for what in ("draws", "no signal"))]]
    of_belief = {str(belief): [x for x in problems.LETTERS if problems.belief(x) == belief]
                 for belief in problems.BELIEF}
    for belief, letters in (of_belief | {"all": problems.LETTERS}).items():
        rates = [p for x in letters for p in pass_rates()[x]]
        cells = [belief, f"{mean(rates):.4f}"]
        for arm in RULES:
            wanted = [law(round(p, 4), arm) for p in rates]
            met, draws, _, silent = map(sum, zip(*(still[arm][x] for x in letters)))
            cells.append(f"{mean(y.draws for y in wanted):.1f} / {draws / met:.1f}")
            cells.append(f"{mean(y.silent for y in wanted):.2f} / {silent / met:.2f}")
        found.append(cells)
    return "Expected / counted, of a prompt.\n\n" + markdown(found)


def per_draw() -> str:
    """Of the best possible signal, by pass rate."""
    found = [["pass rate", *RULES, "ada-balance / uniform-4", "ada-balance / uniform-16"]]
    for p in (0.0003, 0.003, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97):
        share = {arm: efficiency(p, config) for arm, config in RULES.items()}
        ratios = [share["ada-balance"] / share[arm] for arm in ("uniform-4", "uniform-16")]
        found.append([str(p), *(f"{x:.2f}" for x in (*share.values(), *ratios))])
    return markdown(found)
