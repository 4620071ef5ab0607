"""Several runs on one page, against what they cost.

    python bench/compare.py runs/a-seed0 runs/a-seed1 runs/b
    python bench/compare.py runs/a runs/b --against tokens --out compare.pdf
    python bench/compare.py real_model --against seconds    # what bench/results/ has stored

Reinforce-Ada draws more samples per step than GRPO does, so a comparison against steps alone
flatters it: the page shows steps, samples, tokens and time side by side. Runs that differ only in
the seed, by their config.json, share a colour, the first one's name and a mean line.
"""
import argparse
import itertools
import json
from pathlib import Path

import store

from parts.plot import COLORS, plain, read_run, series, smooth, what_differs

AXES = {  # --against -> key in both logs, label
    "steps": ("step", "training steps"),
    "samples": ("samples_total", "samples drawn"),
    "tokens": ("tokens_total", "tokens generated"),
    "seconds": ("seconds_total", "seconds of training"),
}
SAME_BUT_SEED = ("seed", "name", "resume")  # runs that differ in nothing else are one curve


# ------------------------------------------------------------------------------------------ curves
def curve(line: dict, cost: str, most: float) -> tuple:
    """The accuracy of a stored run until so much is spent."""
    rows = [row for row in line["evals"] if row[cost] < most]
    if len(rows) < len(line["evals"]):
        rows.append({cost: most, "avg": store.at(line, cost, most)})
    return series(rows, "avg", cost)


def draw_group(ax, curves, color, label) -> None:
    """Runs that differ only in the seed: each one faint, their mean where all of them have been."""
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


def picture(out: Path, size: tuple, labels: list[str], columns: dict, colors={}) -> Path:
    """A panel for each label in each column.

    columns: title -> (label of x, [panel, ...]); a panel: arm -> curves, a curve: (xs, ys).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(labels), len(columns), sharey="row", squeeze=False)
    for column, (title, (of_x, panels)) in zip(axes.T, columns.items()):
        for axis, panel in zip(column, panels):
            for color, (arm, curves) in zip(itertools.cycle(COLORS), panel.items()):
                draw_group(axis, curves, colors.get(arm, color), arm)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        column[0].set_title(title)
        column[0].legend(frameon=False, fontsize=8)
        column[-1].set_xlabel(of_x)
    for axis, label in zip(axes[:, 0], labels):
        axis.set_ylabel(label)
        axis.set_yscale("log" if "KL" in label else "linear")
    figure.savefig(out, dpi=90)
    return out


# ------------------------------------------------------------------------------- runs on one page
def read_runs(asked: list) -> list[dict]:
    """Folders as `plot.read_run` reads them, or STUDY or STUDY/RUN of bench/results; they are named
    as they were asked for. Raises ValueError if there is none."""
    runs = []
    for place in map(str, asked):
        study, _, name = place.partition("/")
        lines = [] if Path(place).exists() else store.load(study)
        stored = [line | dict(name=f"{study}/{line['run']}") for line in lines
                  if name in ("", line["run"]) and "config" in line]
        runs += stored or [read_run(place) | dict(name=place)]
    return runs


def group_by_seed(runs: list[dict]) -> dict[str, list[dict]]:
    """label -> runs whose configurations are the same but for the seed and the name."""
    groups = {}
    for run in runs:
        config = run["config"].items()
        kept = {key: value for key, value in config if key not in SAME_BUT_SEED}
        same = json.dumps(kept, sort_keys=True) if kept else run["name"]
        groups.setdefault(same, []).append(run)
    return {same[0]["name"] + f" (mean of {len(same)})" * (len(same) > 1): same
            for same in groups.values()}


def draw_comparison(asked: list, out: str | Path, against: str | None = None) -> Path:
    """Held-out accuracy and first-round reward of several runs against all that they cost."""
    runs = read_runs(asked)
    for sentence in what_differs(runs):
        print(sentence)
    groups = group_by_seed(runs)
    evals = [row for runs in groups.values() for run in runs for row in run["evals"]]
    data = evals[0].get("data") if evals else None

    def accuracy(run, x):
        return series([row for row in run["evals"] if row.get("data") == data], "avg", x)

    def reward(run, x):
        xs, ys = series(run["metrics"], "reward_first_round", x)
        return xs, smooth(ys) if ys else ys

    columns = {f"against {label}": (label, [
        {plain(name): [measure(run, x) for run in runs] for name, runs in groups.items()}
        for measure in (accuracy, reward)])
        for x, label in ([AXES[against]] if against else AXES.values())}
    labels = [f"accuracy on {plain(data or 'held-out problems')}",
              "reward of the first round (moving mean)"]
    return picture(Path(out), (4.8 * len(columns), 8.4), labels, columns)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Several runs on one page.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs/NAME, STUDY or STUDY/RUN")
    parser.add_argument("--out", default="compare.png", help="picture to write (.png .pdf .svg)")
    parser.add_argument("--against", choices=AXES, help="one x axis; default all four")
    args = parser.parse_args(arguments)
    try:
        print(draw_comparison(args.runs, args.out, args.against))
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
