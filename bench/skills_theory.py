"""The problem of compare_skills.py beside the paper's, and what the rules should do on it.

Exact pass rates of the model before training, and draws, silence and signal by pass rate
(course/laws.py). compare_skills.py --draw makes tables and pictures of them.
"""
import functools
import math
from statistics import mean

import study

from ada_sampler import SamplerConfig
from course.laws import efficiency, expected_yield
from models import make
from parts import problems
from parts.models import tiny_folder

# Reinforce-Ada (arXiv 2510.04996): v1, Fig. 2, pass@k of Qwen2.5-Math-1.5B before training, and
# v3, Table 5, how many of 5,000 hard training prompts are how hard: (their mean pass rate, count).
PAPER_K = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAPER_PASS = (.18, .27, .38, .48, .58, .66, .72, .77, .81)
PAPER_BANDS = {0.0: 984, 0.089: 3082, 0.295: 870, 0.615: 63}
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


# ---------------------------------------------------------------------------------------- pictures
def draw_problem(left, right) -> None:
    """pass@k and pass rates before training, beside the paper's."""
    left.plot(PAPER_K, PAPER_PASS, "o--", color="#999999", label="Qwen2.5-Math-1.5B (paper)")
    left.plot(PAPER_K, [pass_at(k) for k in PAPER_K], "o-", color="#0072B2", label="tiny-skills")
    left.set(xscale="log", xlabel="k", ylabel="pass@k", title="pass@k before training",
             ylim=(0, 1))
    rates = [mean(row) for row in pass_rates().values()]
    right.hist(rates, [i / 20 for i in range(21)], weights=[1 / len(rates)] * len(rates),
               color="#0072B2", label="tiny-skills, letters")
    total = sum(PAPER_BANDS.values())
    right.plot(list(PAPER_BANDS), [n / total for n in PAPER_BANDS.values()], "D", color="#E69F00",
               label="paper's 5,000 hard prompts:\nbands at their mean pass rate")
    right.set(xlabel="pass rate", ylabel="share of prompts", title="Pass rates before training")
    for axis in (left, right):
        axis.legend(frameon=False)


def draw_signal(colors: dict[str, str]) -> None:
    """Signal over noise, squared; 1: the best that one draw can give (course/notes, session 4)."""
    figure, axes = study.panels(1, 3, figsize=(16, 5))
    grid = [1 / (1 + math.exp(7 - i / 5)) for i in range(71)]
    for arm, rule in RULES.items():
        per_draw = [efficiency(p, rule) for p in grid]
        per_prompt = [y * law(round(p, 6), arm).draws for y, p in zip(per_draw, grid)]
        per_row = [efficiency(p, rule, "trained") for p in grid]
        for axis, ys in zip(axes, (per_draw, per_prompt, per_row)):
            axis.plot(grid, ys, color=colors[arm], label=arm)
    titles = ("per draw", "per prompt of a step", "per trained row")
    for axis, title in zip(axes, titles):
        axis.set(xscale="logit", xlabel="pass rate p", title=f"Signal {title}")
    axes[0].set(ylim=(0, 1.02), ylabel="1 = the best that one draw can give")
    axes[2].set(yscale="log")
    axes[0].legend(frameon=False)
    study.save(figure, "skills_theory")
