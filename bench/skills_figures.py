"""Pictures of bench/compare_skills.py, and its problem and theory: what the rules should do.

skills.png        accuracy against each cost, a row for each regime
skills_rates.png  the problem's pass@k and pass rates beside the paper's; letters solved by draws
skills_theory.png signal per draw, per prompt and per trained row, by pass rate
"""
import functools
import math
import sys
from statistics import mean

import compare_skills as skills_study
import study
from compare_skills import ARMS, COLORS, COSTS, FIRST_DRAWS, REGIMES, at_budget, modelled

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
THEORY = {  # the rules whose pools have a closed law
    "uniform-4": dict(sampler="uniform", n=4), "uniform-16": dict(sampler="uniform", n=16),
    "ada-pos": dict(sampler="ada-pos"), "ada-balance": dict(sampler="ada-balance")}


# -------------------------------------------------------------------------------------- the problem
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
    rates = [p for row in pass_rates().values() for p in row]
    return mean(1 - (1 - p) ** k for p in rates)


def draw_problem(left, right) -> None:
    left.plot(PAPER_K, PAPER_PASS, "o--", color="#999999", label="Qwen2.5-Math-1.5B (paper)")
    left.plot(PAPER_K, [pass_at(k) for k in PAPER_K], "o-", color="#0072B2", label="tiny-skills")
    left.set(xscale="log", xlabel="k", ylabel="pass@k", title="pass@k before training",
             ylim=(0, 1))
    left.legend(frameon=False)
    rates = [mean(row) for row in pass_rates().values()]
    edges = [i / 20 for i in range(21)]
    right.hist(rates, edges, weights=[1 / len(rates)] * len(rates), color="#0072B2",
               label="tiny-skills, letters")
    total = sum(PAPER_BANDS.values())
    right.plot(list(PAPER_BANDS), [n / total for n in PAPER_BANDS.values()], "D", color="#E69F00",
               label="paper's 5,000 hard prompts:\nbands at their mean pass rate")
    right.set(xlabel="pass rate", ylabel="share of prompts", title="Pass rates before training")
    right.legend(frameon=False)


def draw_solved(axis, lines: list[dict], regime: str) -> None:
    """Share of the letters below 0.05 whose right answer has been drawn, by draws."""
    rare = [letter for letter in problems.LETTERS if problems.belief(letter) < 0.05]
    for arm, color in zip(ARMS, COLORS):
        mine = [line for line in lines if (line["arm"], line["regime"]) == (arm, regime)]
        firsts = sorted(line["solved"].get(x, math.inf) for line in mine for x in rare)
        shares = [(i + 1) / len(firsts) for i in range(len(firsts))]
        axis.step(firsts, shares, where="post", color=color, label=arm)
    axis.axvline(FIRST_DRAWS, color="#cccccc", zorder=0)
    axis.set(xlabel="draws", xlim=(0, 8000), ylim=(0, 1), ylabel="share of the letters below 0.05",
             title=f"First right answer drawn, regime {regime}")
    axis.legend(frameon=False, fontsize=8)


# --------------------------------------------------------------------------------------- the theory
def predicted(lines: list[dict]) -> str:
    """Draws and silence of a prompt by belief: expected exactly, and counted without training."""
    still = {line["arm"]: line["letters"] for line in lines if line["regime"] == "still"}
    found = [["belief", "pass rate", *(f"{arm}: {what}" for arm in THEORY
                                       for what in ("draws", "no signal"))]]
    for belief in problems.BELIEF:
        letters = [x for x in problems.LETTERS if problems.belief(x) == belief]
        rates = [p for x in letters for p in pass_rates()[x]]
        cells = [str(belief), f"{mean(rates):.4f}"]
        for arm, rule in THEORY.items():
            wanted = [law(round(p, 4), arm) for p in rates]
            visits, draws, _, silent = map(sum, zip(*(still[arm][x] for x in letters)))
            cells.append(f"{mean(y.draws for y in wanted):.1f} / {draws / visits:.1f}")
            cells.append(f"{mean(y.silent for y in wanted):.2f} / {silent / visits:.2f}")
        found.append(cells)
    return "Expected / counted, of a prompt.\n\n" + study.markdown(found)


@functools.cache
def law(p: float, arm: str):
    return expected_yield(p, SamplerConfig(**THEORY[arm]))


def draw_theory(axes) -> None:
    """Signal over noise, squared; 1: the best that one draw can give (course/notes, session 4)."""
    grid = [1 / (1 + math.exp(7 - i / 5)) for i in range(71)]
    for arm, rule in THEORY.items():
        config, color = SamplerConfig(**rule), dict(zip(ARMS, COLORS))[arm]
        per_draw = [efficiency(p, config) for p in grid]
        per_row = [efficiency(p, config, "trained") for p in grid]
        per_prompt = [y * law(round(p, 6), arm).draws for y, p in zip(per_draw, grid)]
        for axis, ys in zip(axes, (per_draw, per_prompt, per_row)):
            axis.plot(grid, ys, color=color, label=arm)
    titles = ("per draw", "per prompt of a step", "per trained row")
    for axis, title in zip(axes, titles):
        axis.set(xscale="logit", xlabel="pass rate p", title=f"Signal {title}")
    axes[0].set(ylim=(0, 1.02), ylabel="1 = the best that one draw can give")
    axes[2].set(yscale="log")
    axes[0].legend(frameon=False)


# -------------------------------------------------------------------------------------------- runs
def draw_accuracy(axis, lines: list[dict], cost: str) -> None:
    """Mean over seeds, band from the lowest to the highest, up to where every seed has come."""
    import numpy as np

    for arm, color in zip(ARMS, COLORS):
        mine = [[row | modelled(row) for row in line["evals"]]
                for line in lines if line["arm"] == arm]
        if not mine:
            continue
        grid = np.linspace(0, min(rows[-1][cost] for rows in mine), 60)
        curves = np.array([[at_budget(rows, cost, x) for x in grid] for rows in mine])
        axis.plot(grid, curves.mean(0), color=color, label=arm)
        axis.fill_between(grid, curves.min(0), curves.max(0), color=color, alpha=0.08, lw=0)
    axis.set(xlabel=COSTS[cost])


def save(figure, name: str) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(study.RESULTS / f"{name}.png", dpi=100)


def draw(lines: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tested = [line for line in lines if line["seed"] in skills_study.SEEDS]
    figure, axes = plt.subplots(len(REGIMES), len(COSTS), figsize=(25, 10), layout="constrained",
                                sharex="col", sharey=True)
    for row, regime in zip(axes, REGIMES):
        for axis, cost in zip(row, COSTS):
            draw_accuracy(axis, [line for line in tested if line["regime"] == regime], cost)
        row[0].set_ylabel(f"held-out avg@8, regime {regime}")
    axes[0, 0].legend(frameon=False)
    axes[0, 1].set_xlim(0, 100)
    save(figure, "skills")
    figure, axes = plt.subplots(1, 4, figsize=(22, 5), layout="constrained")
    draw_problem(*axes[:2])
    for axis, regime in zip(axes[2:], REGIMES):
        draw_solved(axis, tested, regime)
    save(figure, "skills_rates")
    figure, axes = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    draw_theory(axes)
    save(figure, "skills_theory")
    plt.close("all")


if __name__ == "__main__":
    sys.exit("It is drawn by bench/compare_skills.py --draw.")
