"""Draws several runs on one page against their costs.

    python bench/compare.py runs/a-seed0 runs/a-seed1 runs/b --out compare.pdf

Reinforce-Ada samples more answers per step than GRPO, so a comparison against steps alone favours
it. The page shows steps, answers, tokens and time side by side. Runs whose config.json differs only
in the seed share a colour, the name of the first run and a mean line.
"""
import argparse
import itertools
import json
from pathlib import Path

import store  # noqa: F401, and the path

from explorer.panels import COLORS, literal, read_run, series, smooth, what_differs

COSTS = {  # key in both logs -> label
    "step": "training steps",
    "samples_total": "sampled answers",
    "tokens_total": "generated tokens",
    "seconds_total": "seconds of training",
}
SAME_BUT_SEED = ("seed", "name", "resume")  # runs that differ only in these share a curve


# ------------------------------------------------------------------------------------------ curves
def draw_group(ax, curves, color, label) -> None:
    """Draw runs that differ only in the seed: each one faint, their mean where all have values."""
    import numpy as np

    curves = [(xs, ys) for xs, ys in curves if len(xs)]
    if not curves:
        return
    for xs, ys in curves if len(curves) > 1 else []:
        ax.plot(xs, ys, color=color, alpha=0.35, linewidth=1)
    start, end = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    grid = np.array(sorted({v for xs, _ in curves for v in xs if start <= v <= end}))
    mean = np.mean([np.interp(grid, xs, ys) for xs, ys in curves], axis=0)
    marker = "o" if len(grid) == 1 else ""
    ax.plot(grid, mean, color=color, linewidth=2, marker=marker, markersize=4, label=label)


def picture(out: Path, size: tuple, measures: dict, columns: dict, colors={}) -> None:
    """A panel for each measure in each column.

    columns: title -> (label of x, x, {arm: runs}); measures: label of y -> measure(run, x), which
    returns a curve (xs, ys).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(measures), len(columns), sharey="row", squeeze=False)
    for column, (title, (of_x, x, arms)) in zip(axes.T, columns.items()):
        for axis, measure in zip(column, measures.values()):
            for color, (arm, runs) in zip(itertools.cycle(COLORS), arms.items()):
                curves = [measure(run, x) for run in runs]
                draw_group(axis, curves, colors.get(arm, color), arm)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        column[0].set_title(title)
        column[0].legend(frameon=False, fontsize=8)
        column[-1].set_xlabel(of_x)
    for axis, label in zip(axes[:, 0], measures):
        axis.set_ylabel(label)
        axis.set_yscale("log" if "KL" in label else "linear")
    figure.savefig(out, dpi=90)


# ------------------------------------------------------------------------------- runs on one page
def group_by_seed(runs: list[dict]) -> dict[str, list[dict]]:
    """label -> runs whose configurations differ only in SAME_BUT_SEED."""
    groups = {}
    for run in runs:
        config = run["config"].items()
        kept = {key: value for key, value in config if key not in SAME_BUT_SEED}
        same = json.dumps(kept, sort_keys=True) if kept else run["name"]
        groups.setdefault(same, []).append(run)
    return {label_of(same): same for same in groups.values()}


def label_of(same: list[dict]) -> str:
    name = literal(same[0]["name"])
    return f"{name} (mean of {len(same)})" if len(same) > 1 else name


def main() -> None:
    """Draw held-out accuracy and first-round reward of several runs against all costs."""
    parser = argparse.ArgumentParser(description="Draws several runs on one page.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs/NAME")
    parser.add_argument("--out", default="compare.png", help="picture to write (.png .pdf .svg)")
    args = parser.parse_args()
    runs = [read_run(place) | dict(name=place) for place in args.runs]
    for sentence in what_differs(runs):
        print(sentence)
    data = next((row.get("data") for run in runs for row in run["evals"]), None)

    def accuracy(run, x):
        return series([row for row in run["evals"] if row.get("data") == data], "avg", x)

    def reward(run, x):
        xs, ys = series(run["metrics"], "reward_first_round", x)
        return xs, smooth(ys) if ys else ys

    groups = group_by_seed(runs)
    columns = {f"against {label}": (label, x, groups) for x, label in COSTS.items()}
    measures = {f"accuracy on {literal(data or 'held-out problems')}": accuracy,
                "reward of the first round (moving mean)": reward}
    picture(args.out, (4.8 * len(columns), 8.4), measures, columns)
    print(args.out)


if __name__ == "__main__":
    main()
