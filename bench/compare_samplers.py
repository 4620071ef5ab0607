"""What does each way of sampling buy at equal cost? Every sampler trains the built-in model.

    python bench/compare_samplers.py             # all, about 45 minutes of one idle core; resumable
    python bench/compare_samplers.py --only gvm  # a part
    python bench/compare_samplers.py --draw      # only table and picture, from what is stored

Everything but the sampler is the same: model, optimizer, clipping, schedule, lengths, batch of
prompts, temperature. The advantage is reward minus the mean of the prompt's pool, for all.

A run lives in runs/compare. When it is done it becomes a line of bench/results/samplers.jsonl (see
study.py), from which samplers.md and samplers.png are drawn.
"""
import argparse
import json
import os
import subprocess
import sys
from statistics import mean, stdev

import study

RUNS = study.ROOT / "runs" / "compare"

ARMS = {  # name -> flags; n = 4 is what the adaptive rules keep, n = 16 about what they draw
    "uniform-4": ["--sampler", "uniform", "--n", "4"],
    "uniform-16": ["--sampler", "uniform", "--n", "16"],
    "dapo": ["--sampler", "dapo", "--n", "4"],
    "ada-pos": ["--sampler", "ada-pos"],
    "ada-balance": ["--sampler", "ada-balance"],
    "ada-est": ["--sampler", "ada-est", "--M", "8"],
    "gvm": ["--sampler", "gvm", "--M", "8"],
}
COLORS = ("#999999", "#000000", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7")
COMMON = ["--steps", "60", "--eval-every", "10", "--eval-questions", "120",
          "--batch-prompts", "16", "--lr", "0.001"]
COSTS = {  # key in the logs -> label
    "step": "training steps", "samples_total": "samples drawn",
    "tokens_total": "tokens generated", "seconds_total": "seconds of training"}
PANELS = {
    "zero_signal": "Share of prompts without signal", "samples": "Samples per step",
    "entropy_trained": "Entropy (nats per token)"}
KEPT = (*COSTS, *PANELS, "reward_first_round", "spent_by_pass_rate", "avg", "ci_low", "ci_high")


# ------------------------------------------------------------------------------------------ running
def train(arm: str, seed: int) -> None:
    """One run through the command line, resumed if it was interrupted; then a line of the study."""
    name = f"{arm}-seed{seed}"
    if any(line["run"] == name for line in study.load("samplers")):
        return
    RUNS.mkdir(parents=True, exist_ok=True)
    flags = [*COMMON, *ARMS[arm], "--seed", str(seed), "--name", name]
    command = [sys.executable, str(study.ROOT / "minirl.py"), *flags, "--resume"]
    subprocess.run(command, cwd=RUNS, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    run = RUNS / "runs" / name
    versions = json.loads((run / "config.json").read_text())["starts"][0]["versions"]
    about = dict(run=name, arm=arm, seed=seed, flags=flags, versions=versions)
    study.add("samplers", study.fold(run, KEPT, **about))


def load() -> dict:
    """{arm: [(metrics, evaluations) of each seed]}, rows of each."""
    lines = sorted(study.load("samplers"), key=lambda line: line["seed"])
    found = {}
    for arm in ARMS:
        seeds = [(line["metrics"], line["evals"]) for line in lines if line["arm"] == arm]
        if seeds:
            found[arm] = seeds
    return found


# -------------------------------------------------------------------------------------------- table
def at_budget(evaluations: list[dict], x: str, budget: float) -> float:
    """Held-out accuracy when a run had spent `budget`: straight lines between evaluations."""
    import numpy as np

    spent, accuracy = [row[x] for row in evaluations], [row["avg"] for row in evaluations]
    return float(np.interp(budget, spent, accuracy))


def spread(values: list[float]) -> str:
    """Mean and half the 95 % interval over seeds (Student's t)."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values))
    if t is None:
        return f"{mean(values):.1%}"
    return f"{mean(values):.1%} ± {t * stdev(values) / len(values) ** 0.5:.1%}"


def table(found: dict) -> str:
    """Accuracy at the end, and at the largest budget that every run reached."""
    units = {"samples_total": "samples", "tokens_total": "tokens", "seconds_total": "s"}
    last = [evals[-1] for seeds in found.values() for _, evals in seeds]
    budgets = {x: min(row[x] for row in last) for x in units}
    at = [f"at {budget:,.0f} {units[x]}" for x, budget in budgets.items()]
    lines = [["sampler", "seeds", "at the last step", *at, "samples per step", "no signal"]]
    for arm, seeds in found.items():
        cells = [arm, str(len(seeds)), spread([evals[-1]["avg"] for _, evals in seeds])]
        for x, budget in budgets.items():
            cells.append(spread([at_budget(evals, x, budget) for _, evals in seeds]))
        steps = [row for metrics, _ in seeds for row in metrics]
        cells.append(f"{mean(row['samples'] for row in steps):.0f}")
        cells.append(f"{mean(row['zero_signal'] for row in steps):.0%}")
        lines.append(cells)
    return study.markdown(lines)


# ------------------------------------------------------------------------------------------ picture
def draw(found: dict) -> None:
    """Held-out accuracy against steps, samples, tokens and seconds; signal and cost per step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(21, 9), layout="constrained")
    for ax, x in zip(axes[0], COSTS):
        draw_accuracy(ax, found, x)
    axes[0, 0].legend(fontsize=9)
    for ax, key in zip(axes[1], PANELS):
        draw_per_step(ax, found, key)
    draw_spending(axes[1, 3], found)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Samplers on the built-in model: "
                    "mean of the seeds, band from the lowest to the highest")
    figure.savefig(study.RESULTS / "samplers.png", dpi=110)


def colors(found: dict) -> list[str]:
    """Every sampler keeps its colour, also where others are missing."""
    return [color for arm, color in zip(ARMS, COLORS) if arm in found]


def draw_accuracy(ax, found: dict, x: str) -> None:
    import numpy as np
    from matplotlib.ticker import EngFormatter

    for color, (arm, seeds) in zip(colors(found), found.items()):
        grid = np.linspace(0, min(evals[-1][x] for _, evals in seeds), 40)
        curves = np.array([[at_budget(evals, x, g) for g in grid] for _, evals in seeds])
        ax.plot(grid, curves.mean(0), color=color, label=arm)
        ax.fill_between(grid, curves.min(0), curves.max(0), color=color, alpha=0.12, lw=0)
    ax.set(xlabel=COSTS[x], ylabel="held-out accuracy (avg@8)")
    ax.set_title(f"Accuracy against {COSTS[x]}")
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_per_step(ax, found: dict, key: str) -> None:
    import numpy as np

    for color, (arm, seeds) in zip(colors(found), found.items()):
        values = np.nanmean([[row.get(key, np.nan) for row in metrics] for metrics, _ in seeds], 0)
        smooth = np.convolve(values, np.ones(9) / 9, "valid")
        ax.plot(range(5, 5 + len(smooth)), smooth, color=color, label=arm)
    ax.set(xlabel="training steps (mean of 9)", title=PANELS[key], ylim=(0, None))


def draw_spending(ax, found: dict) -> None:
    """Where the samples went, by the pass rate that their prompt's pool showed."""
    import matplotlib.pyplot as plt

    bands = {"none": "0", "0.0": "up to 0.2", "0.2": "0.2-0.4", "0.4": "0.4-0.6", "0.6": "0.6-0.8",
             "0.8": "0.8 and more", "all": "1"}
    shades = plt.get_cmap("cividis")([0, 0.17, 0.33, 0.5, 0.67, 0.83, 1.0])
    left = dict.fromkeys(found, 0.0)
    for (band, label), color in zip(bands.items(), shades):
        share = {}
        for arm, seeds in found.items():
            steps = [row["spent_by_pass_rate"] for metrics, _ in seeds for row in metrics]
            whole = sum(sum(step.values()) for step in steps)
            share[arm] = sum(step.get(band, 0) for step in steps) / whole
        ax.barh(list(found), list(share.values()), left=list(left.values()), color=color,
                label=label)
        left = {arm: left[arm] + share[arm] for arm in found}
    ax.set(title="Share of samples by the pass rate of their pool", xlim=(0, 1))
    ax.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.06))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=ARMS, default=list(ARMS), help="some samplers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    plan = [(arm, seed) for seed in range(args.seeds) for arm in args.only]
    for i, (arm, seed) in enumerate(plan if not args.draw else []):
        print(f"[{i + 1}/{len(plan)}] {arm}, seed {seed}", flush=True)
        train(arm, seed)
    found = load()
    if not found:
        raise SystemExit("Nothing is stored yet: run without --draw first.")
    (study.RESULTS / "samplers.md").write_text(table(found))
    draw(found)
    print(table(found))


if __name__ == "__main__":
    main()
