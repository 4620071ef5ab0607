"""Draws the panels of a run's curves from its logs to curves.png. page.html has the same panels."""
import itertools
import math
import os
from pathlib import Path

import numpy as np

from parts.files import read_rows, replacing
from parts.grader import PART, lost
from parts.run_folder import settings
from parts.text import shown

COLORS = (  # Okabe and Ito's
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
# (kind of drawing, title, unit, {key in metrics.jsonl: label}); titles: docs/learning.md
PANELS = (
    ("lines", "Reward while training", "mean reward",
     {"reward_first_round": "first round (fair)", "reward_pool": "whole pool"}),
    ("accuracy", "Accuracy on held-out problems", "avg@k, 95 % interval", {}),
    ("parts", "Parts of the reward", "mean reward, first round", {}),  # see `panels_of`
    ("lines", "Sampled answers", "answers per step", {"samples": ""}),
    ("lines", "Tokens generated", "tokens per step", {"tokens": ""}),
    ("lines", "Prompts without gradient", "share of prompts",
     {"zero_signal": "no gradient", "unresolved_too_few_correct": "unresolved: too few correct",
      "unresolved_too_few_wrong": "unresolved: too few wrong"}),
    ("kl", "Engine compared with trainer", "KL(μ ‖ π_old), nats per token",
     {"kl_k1": "|k1|", "kl_k3": "k3"}),
    ("lines", "Entropy of the policy", "nats per token",
     {"entropy": "of all sampled tokens", "entropy_trained": "of trained tokens"}),
    ("off-policy", "Masked tokens", "share of tokens",
     {"clipped_positive": "A > 0", "clipped_negative": "A < 0"}),
    ("off-policy", "Tokens far off-policy", "share of tokens",
     {"weight_truncated": "weight above the cap", "weight_over_2": "weight > 2",
      "weight_under_half": "weight < ½"}),
    ("off-policy", "Importance weights before the cap", "π_θ/μ",
     {"weight_max": "largest", "weight_mean": "mean", "weight_min": "smallest"}),
    ("off-policy", "Effective sample size", "share of tokens", {"weight_ess": ""}),
    ("routes", "Same experts in engine and trainer", "share of tokens",
     {"routes_agree_all": "in all layers"}),
    ("lines", "Time of a step", "seconds per step",
     {"seconds_sample": "sample", "seconds_train": "train", "seconds_sync": "sync"}),
    ("lines", "Length of the answers", "tokens per answer", {"response_length": ""}),
    ("lines", "Truncated or unparseable answers", "share of answers",
     {"truncated": "truncated at the length limit", "share_no_box": "no box",
      "share_no_verdict": "no verdict: the grader failed"}),
    ("lines", "Size of the update", "gradient norm", {"grad_norm": ""}),
)


def panels_of(runs: list[dict]) -> list[tuple]:
    """The panels for which something was logged. Parts of the reward have one if there are several.

    Panels of kind "off-policy" are left out if no token is masked and all importance weights are 1
    except for rounding, as with one mini-batch in float32. Then all their lines are flat.
    """
    rows = [row for run in runs for row in run["metrics"]]
    logged = dict.fromkeys(key for row in rows for key in row)
    parts = {key: key.removeprefix(PART) for key in logged if key.startswith(PART)}
    off_policy = any(row.get("weight_max", 1) - row.get("weight_min", 1) >= 0.01
                     or row.get("clipped_positive") or row.get("clipped_negative")
                     for row in rows)
    evaluated = any(run["evals"] for run in runs)
    wanted = {"accuracy": evaluated, "parts": len(parts) > 1, "off-policy": off_policy}
    panels = [(*panel[:3], parts if panel[0] == "parts" else panel[3]) for panel in PANELS]
    return [panel for panel in panels if wanted.get(panel[0], True)
            and (panel[0] == "accuracy" or logged.keys() & panel[3])]


def smoothing_reach(steps: int) -> int:
    """Steps to both sides of the moving mean. A run of at most 12 steps is not smoothed."""
    return math.ceil(steps / 40) + 1 if steps > 12 else 0


# ----------------------------------------------------------------------------------------- reading
def read_run(folder: str | Path) -> dict:
    """name, config, metrics and evals of a run. Raises SystemExit if there is nothing to show."""
    folder = Path(folder)
    config = settings(folder)
    metrics, evals = drawn_rows(folder / "metrics.jsonl"), drawn_rows(folder / "eval.jsonl")
    if not config or not (metrics or evals):
        raise SystemExit(f"{shown(folder)} is no folder of a run that has finished a step, such as "
                         "runs/NAME.")
    return dict(name=folder.resolve().name, config=config, metrics=metrics, evals=evals)


def drawn_rows(log: Path) -> list[dict]:
    """The numbers and the data set of each row of a log, without null for what was not finite."""
    return [{key: value for key, value in row.items()
             if isinstance(value, int | float) or key == "data"} | shares(row.get("verdicts"))
            for row in read_rows(log)]


def shares(counts: dict | None) -> dict:
    """The shares of no_box and of no verdict in a step. `counts` has statuses that occurred."""
    if not counts:
        return {}
    total = sum(counts.values())
    return dict(share_no_box=counts.get("no_box", 0) / total,
                share_no_verdict=lost(counts) / total)


def what_differs(runs: list[dict]) -> list[str]:
    """A sentence for each difference (rewards, held-out problems) that forbids a comparison."""
    rewards = {run["config"].get("reward") or "math-verify" for run in runs}
    problems = {held_out_of(run) for run in runs if run["evals"]}
    return [f"The runs have different {kind} ({shown('; '.join(sorted(names)))}): do not compare "
            "their curves."
            for kind, names in (("rewards", rewards), ("held-out problems", problems))
            if len(names) > 1]


def held_out_of(run: dict) -> str:
    """The held-out sets, such as `gsm8k (100)`."""
    sets = {(row["data"], row["questions"]) for row in run["evals"]}
    return ", ".join(sorted(f"{name} ({count})" for name, count in sets))


# ----------------------------------------------------------------------------------------- drawing
def draw_run(folder: Path) -> None:
    """Draw `curves.png` in the folder of a run, also while it runs.

    If this fails, it prints one line, because a picture must not end a night of training.
    """
    # A notebook names a backend for its children that they may lack, and matplotlib refuses it.
    os.environ["MPLBACKEND"] = "agg"
    try:
        figure = figure_of(read_run(folder))
        with replacing(folder / "curves.png") as writing:  # so nobody opens an incomplete file
            figure.savefig(writing, dpi=110, format="png")
    except (Exception, SystemExit) as error:  # of the disk, a font, matplotlib, or `read_run`
        print(f"curves.png was not drawn: {type(error).__name__}: {shown(error)}")


def figure_of(run: dict):
    """A figure of all panels of a run."""
    from matplotlib.figure import Figure  # without pyplot, which may need a display

    panels = panels_of([run])
    rows = math.ceil(len(panels) / 4)
    figure = Figure(figsize=(19, 4 * rows), layout="constrained")
    for number, (kind, title, unit, keys) in enumerate(panels, 1):
        ax = figure.add_subplot(rows, 4, number)
        if kind == "accuracy":
            draw_accuracy(ax, run["evals"])
        else:
            draw_lines(ax, run["metrics"], keys, log_scale=kind == "kl")
        label_panel(ax, title, unit)
    names = [run["name"], *(run["config"].get(key) for key in ("model", "data"))]
    about = " · ".join(literal(name) for name in names if name)
    figure.suptitle(about + "      (faint: every step, bold: moving mean)", fontsize=12)
    return figure


def draw_lines(ax, rows, keys, log_scale=False) -> None:
    """Two lines per key: every step (faint) and the moving mean. A log scale shows |values|."""
    for color, (key, label) in zip(itertools.cycle(COLORS), keys.items()):
        xs, ys = series([row for row in rows if row.get(key) or not log_scale], key)
        if xs:
            ys = np.abs(ys) if log_scale else ys
            ax.plot(xs, ys, color=color, alpha=0.25, linewidth=1)
            ax.plot(xs, smooth(ys), color=color, linewidth=1.8, marker=".", markersize=3,
                    label=literal(label))
    if log_scale:
        ax.set_yscale("log")


def draw_accuracy(ax, evals) -> None:
    """One line per data set with its interval. The dotted line is its first value."""
    sets = dict.fromkeys(row["data"] for row in evals if "avg" in row)  # else nothing was judged
    for color, data in zip(itertools.cycle(COLORS), sets):
        rows = [row for row in evals if row["data"] == data]
        xs, ys = series(rows, "avg")
        label = f"{literal(data)}, avg@{rows[0]['k']}: {ys[0]:.2f} → {ys[-1]:.2f}"
        ax.plot(xs, ys, color=color, linewidth=1.8, marker="o", markersize=4, label=label)
        if xs[0] == 0:  # not with --no-eval-first
            ax.axhline(ys[0], color=color, linestyle=":", linewidth=1)
        low, high = series(rows, "ci_low")[1], series(rows, "ci_high")[1]
        ax.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)


def label_panel(ax, title, unit) -> None:
    """Title, unit, legend and axes, the same on every panel."""
    from matplotlib.ticker import MaxNLocator

    ax.set_title(title, fontsize=11)
    ax.set_ylabel(unit, fontsize=9)
    ax.set_xlabel("training steps", fontsize=9)
    if ax.get_yscale() == "linear":
        ax.set_ylim(bottom=min(0, ax.dataLim.y0))  # a user's reward may be negative
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if any(ax.get_legend_handles_labels()[1]):
        ax.legend(fontsize=8)


def series(rows: list[dict], y: str, x: str = "step") -> tuple[list[float], list[float]]:
    """The values of x and of y, from the rows that have both."""
    rows = [row for row in rows if x in row and y in row]
    return [row[x] for row in rows], [row[y] for row in rows]


def smooth(values):
    """Centred moving mean; at both ends over the steps that exist."""
    kernel = np.ones(2 * smoothing_reach(len(values)) + 1)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def literal(text) -> str:
    """A name that matplotlib shows unchanged, though `$` begins a formula and `_` hides a label."""
    text = str(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
