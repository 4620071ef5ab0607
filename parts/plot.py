"""Metrics in, pictures out.

    python -m parts.plot runs/a                            # one run, all of it: runs/a/curves.png
    python -m parts.plot runs/a-seed0 runs/a-seed1 runs/b  # several, against what they cost
    python -m parts.plot runs/a runs/b --against tokens --out compare.pdf

Reinforce-Ada draws more samples per step than GRPO does, so a comparison against steps alone
flatters it: the page for several runs shows steps, samples, tokens and time side by side. Runs that
differ only in the seed, by their config.json, share a colour and get a mean line. What was not
logged is left out.
"""
import argparse
import contextlib
import io
import itertools
import json
import math
import os
import re
from pathlib import Path

from parts import files
from parts.grader import NO_VERDICT
from parts.ranks import writer

COLORS = (  # Okabe and Ito's
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
AXES = {  # --against -> key in both files, label, factor
    "steps": ("step", "training steps", 1),
    "samples": ("samples_total", "samples drawn", 1),
    "tokens": ("tokens_total", "tokens generated", 1),
    "seconds": ("seconds_total", "minutes", 1 / 60),
}
# kind of drawing, title, unit, {key in metrics.jsonl: label}; docs/curves.md explains each title
PANELS = (
    ("lines", "Reward while training", "mean reward",
     {"reward_first_round": "first round (fair)", "reward_pool": "whole pool"}),
    ("accuracy", "Accuracy on held-out problems", "avg@k, 95 % interval", {}),
    ("lines", "Samples drawn", "samples per step", {"samples": ""}),
    ("lines", "Tokens generated", "tokens per step", {"tokens": ""}),
    ("lines", "Prompts without signal", "share of prompts",
     {"zero_signal": "no signal", "unresolved_too_few_correct": "unresolved: too few correct",
      "unresolved_too_few_wrong": "unresolved: too few wrong"}),
    ("kl", "Engine against trainer", r"KL($\mu$ ‖ $\pi_{old}$), nats per token",
     {"kl_k1": "|k1|", "kl_k3": "k3"}),
    ("lines", "Entropy of the policy", "nats per token", 
     {"entropy": "of all that was drawn", "entropy_trained": "of trained tokens"}),
    ("off-policy", "Tokens clipped or far off-policy", "share of tokens",
     {"clipped_positive": "clipped, A > 0", "clipped_negative": "clipped, A < 0",
      "weight_truncated": "weight cut at its cap", "weight_over_2": "weight > 2",
      "weight_under_half": "weight < ½"}),
    ("off-policy", "Importance weights before the cap", r"$\pi_\theta/\mu$",
     {"weight_max": "largest", "weight_mean": "mean", "weight_min": "smallest"}),
    ("off-policy", "What the importance weights leave", "effective share of tokens",
     {"weight_ess": ""}),
    ("routes", "Experts on which engine and trainer agree", "share of tokens",
     {"routes_agree_all": "in all layers"}),
    ("stack", "Where the time goes", "seconds per step",
     {"seconds_sample": "sample", "seconds_train": "train", "seconds_sync": "sync"}),
    ("lines", "Length of the answers", "tokens per answer", {"response_length": ""}),
    ("failures", "Answers that cannot score", "share of answers",
     {"truncated": "cut at the length limit", "share_no_box": "no box",
      "share_timeout": "time-out", "share_killed": "grader killed",
      "share_raised": "--reward raised", "share_no_number": "--reward gave no number"}),
    ("lines", "Size of the update", "gradient norm", {"grad_norm": ""}),
)
SAME_BUT_SEED = ("seed", "name", "resume")  # runs that differ in nothing else are one curve


# ----------------------------------------------------------------------------------------- reading
def read_rows(path: Path, keys=("step",)) -> list[dict]:
    """Rows by step, the last of equal `keys` (a resumed run repeats some), without broken lines."""
    rows = {}
    for row in files.read_rows(path):
        with contextlib.suppress(ValueError, TypeError):  # verdicts that are no counts
            counts = dict(row.get("verdicts") or {})
            rows[tuple(row.get(key) for key in keys)] = row | shares(counts)
    return sorted(rows.values(), key=lambda row: row["step"])


def shares(counts: dict) -> dict:
    """Of a step's verdicts, the shares that cannot score; `counts` lists only what occurred."""
    if not counts:
        return {}
    total, statuses = max(1, sum(counts.values())), ("no_box", *NO_VERDICT)
    return {f"share_{status}": counts.get(status, 0) / total for status in statuses}


def read_run(run: str | Path) -> dict:
    """name, config, metrics and evals of a run's folder. ValueError if nothing was logged."""
    run = Path(run)
    metrics = read_rows(run / "metrics.jsonl")
    evals = read_rows(run / "eval.jsonl", ("data", "step"))
    if not metrics and not evals:
        reason = "there is no such folder"
        if run.is_dir():
            reason = "it has no metrics.jsonl with a finished step"
        raise ValueError(f"Nothing to draw for {run}: {reason}; give the folder of a run, such as "
                         "runs/NAME.")
    stored = files.read_json(run / "config.json") if (run / "config.json").is_file() else {}
    config = stored.get("config", stored)
    if not isinstance(config, dict):
        raise ValueError(f"{run / 'config.json'} is damaged: it holds no settings.")
    return dict(name=run.resolve().name, config=config, metrics=metrics, evals=evals)


def series(rows: list[dict], x: str, y: str) -> tuple[list[float], list[float]]:
    """(x, y) of the rows in which both are finite numbers; x in the units of AXES."""
    key, _, factor = AXES[x]
    pairs = [(row.get(key), row.get(y)) for row in rows]
    pairs = [p for p in pairs if all(isinstance(v, (int, float)) and math.isfinite(v) for v in p)]
    return [a * factor for a, _ in pairs], [b for _, b in pairs]


def smooth(values):
    """Centred moving mean over a tenth of the run (less at its ends); a short run stays."""
    import numpy as np

    kernel = np.ones(max(1, len(values) // 10 if len(values) >= 20 else 1))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def is_flat(run, keys) -> bool:
    """Whether each of these series stays where it began, within a thousandth.

    So it is by construction with one mini-batch in float32: all three policies are the same, every
    weight is 1, and nothing is clipped.
    """
    found = [series(run["metrics"], "steps", key)[1] for key in keys]
    return all(max(ys) - min(ys) < 1e-3 for ys in found if ys)


def plain(text) -> str:
    """A name as it is: no dollar begins a formula, and no underscore keeps it out of a legend."""
    text = str(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


# ----------------------------------------------------------------------------------------- panels
def draw_lines(ax, run, x, keys) -> None:
    """One line per key: every step (faint) and the moving mean."""
    for color, (key, label) in zip(COLORS, keys.items()):
        xs, ys = series(run["metrics"], x, key)
        if xs:
            marker = "." if len(xs) < 20 else ""
            ax.plot(xs, ys, color=color, alpha=0.25, linewidth=1)
            ax.plot(xs, smooth(ys), color=color, linewidth=1.8, marker=marker, label=label)
    labels = len(ax.get_legend_handles_labels()[1])
    low, high = ax.dataLim.y0, ax.get_ylim()[1]
    high += 0.08 * labels * abs(high)  # headroom for the legend
    ax.set_ylim(min(low, 0), max(high, 0) or 1)  # a reward of one's own may be negative


def draw_failures(ax, run, x, keys) -> None:
    """Without a line at 0 for each way in which the grader never failed, as --reward's where there
    is none.
    """
    occurred = {key for row in run["metrics"] for key in row if row[key]}
    never = {f"share_{status}" for status in NO_VERDICT} - occurred
    draw_lines(ax, run, x, {key: label for key, label in keys.items() if key not in never})


def draw_kl(ax, run, x, keys) -> None:
    """Engine-trainer mismatch, log scale: in bf16 healthy below about 1e-3, wrong above 1e-2."""
    # The size of k1, which may be negative; and no zeros on a log scale.
    sizes = [row | {key: abs(row[key]) if row.get(key) else None for key in keys}
             for row in run["metrics"]]
    draw_lines(ax, dict(metrics=sizes), x, keys)
    every = [value for key in keys for value in series(sizes, x, key)[1]]
    low = min([1e-5, *(value / 10 for value in every)])
    high = max([1e-1, *(value * 3 for value in every)])
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    bands = ((low, 1e-3, COLORS[2], "healthy in bf16"), (1e-2, high, COLORS[1], "alarm"))
    for start, end, color, text in bands:
        ax.axhspan(start, end, color=color, alpha=0.1, linewidth=0)
        ax.annotate(text, (0.015, start), xycoords=("axes fraction", "data"), xytext=(0, 3),
                    textcoords="offset points", fontsize=8, color="#444444")


def draw_routes(ax, run, x, keys) -> None:
    """One line per mixture-of-experts layer.

    About nine in ten agree in a healthy bf16 run of a large model (R3 paper).
    """
    logged = {key for row in run["metrics"] for key in row}
    layers = [key for key in logged if re.fullmatch(r"routes_agree_\d+", key)]
    layers.sort(key=lambda key: int(key[13:]))
    named = {key: f"layer {key[13:]}" for key in layers} if len(layers) < len(COLORS) else {}
    draw_lines(ax, run, x, keys | named)
    for key in () if named else layers:
        ax.plot(*series(run["metrics"], x, key), color="#555555", alpha=0.2, linewidth=0.8)
    every = [value for key in [*keys, *layers] for value in series(run["metrics"], x, key)[1]]
    ax.set_ylim(min([0.85, *every]), 1.01)
    ax.axhspan(0.9, 1.01, color=COLORS[2], alpha=0.1, linewidth=0)
    ax.annotate("healthy in bf16", (0.015, 0.9), xycoords=("axes fraction", "data"),
                xytext=(0, 3), textcoords="offset points", fontsize=8, color="#444444")


def draw_stack(ax, run, x, keys) -> None:
    rows = [row for row in run["metrics"] if series([row], x, AXES[x][0])[0]]
    parts = {label: smooth([row.get(key) or 0 for row in rows]) for key, label in keys.items()}
    parts = {label: values for label, values in parts.items() if any(values)}
    xs, _ = series(rows, x, AXES[x][0])
    ax.stackplot(xs, *parts.values(), labels=parts, colors=COLORS, linewidth=0, step="mid")


def draw_flat(ax, run, panels) -> None:
    """In the place of panels that would be straight lines: a note that says where each line is."""
    text = []
    for _, title, _, keys in panels:
        last = {label: series(run["metrics"], "steps", key)[1][-1:] for key, label in keys.items()}
        values = [f"  {label}: {ys[0]:.3g}" for label, ys in last.items() if ys]
        text.append("\n".join([title, *values]))
    ax.axis("off")
    ax.set_title("Flat in this run", fontsize=11)
    ax.text(0.02, 0.95, "\n\n".join(text), transform=ax.transAxes, va="top", fontsize=9,
            linespacing=1.5)


def draw_accuracy(ax, run, x, keys) -> None:
    """One line per data set with its interval; the dotted line is where it started."""
    sets = dict.fromkeys(row.get("data") for row in run["evals"])
    for color, data in zip(itertools.cycle(COLORS), sets):
        rows = [row for row in run["evals"] if row.get("data") == data]
        xs, ys = series(rows, x, "avg")
        if xs:
            label = f"{plain(data)}, avg@{rows[0].get('k', '?')}: {ys[0]:.2f} → {ys[-1]:.2f}"
            ax.plot(xs, ys, color=color, linewidth=1.8, marker="o", markersize=4, label=label)
            ax.axhline(ys[0], color=color, linestyle=":", linewidth=1)
            draw_interval(ax, rows, x, color)
    ax.set_ylim(bottom=min(0, ax.dataLim.y0))  # a reward of one's own may be negative


def draw_interval(ax, rows, x, color) -> None:
    rows = [row for row in rows if "ci_low" in row and "ci_high" in row]
    (xs, low), (_, high) = series(rows, x, "ci_low"), series(rows, x, "ci_high")
    ax.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)


def label_panel(ax, title, unit, x) -> None:
    """Titles, units, tick format and legend, alike on every panel."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    ax.set_title(title, fontsize=11)
    ax.set_ylabel(unit, fontsize=9)
    ax.set_xlabel(AXES[x][1], fontsize=9)
    right = max(1, ax.get_xlim()[1])
    ax.set_xlim(-0.015 * right, right)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=x == "steps"))
    if right >= 1000:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if ax.get_yscale() == "linear" and ax.get_ylim()[1] >= 1000:
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))


def save(figure, out: Path) -> Path:
    """The whole picture at once: nobody ever opens half of one."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format=out.suffix[1:])
    files.write_safely(out, picture.getvalue())
    return out


# ----------------------------------------------------------------------------------------- pages
@writer
def draw_run(run_dir: str | Path, out: str | Path | None = None, against: str = "steps") -> Path:
    """All panels of one run, at any moment of it, into `curves.png` of its folder (or `out`).

    Raises ValueError if nothing was logged yet. Uses no pyplot: no display, no open figures, any
    thread.
    """
    from matplotlib.figure import Figure

    run = read_run(run_dir)
    logged = {key for row in run["metrics"] for key in row}
    panels = [p for p in PANELS if (run["evals"] if p[0] == "accuracy" else logged & set(p[3]))]
    flat = [p for p in panels if p[0] == "off-policy" and is_flat(run, p[3])]
    panels = [p for p in panels if p not in flat]
    count = len(panels) + bool(flat)
    columns = 4 if count <= 12 else 5
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(4.7 * columns, 3.8 * rows + 0.6), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)
    for number, (kind, title, unit, keys) in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, number)
        KINDS[kind](ax, run, against, keys)
        label_panel(ax, title, unit, against)
        if any(ax.get_legend_handles_labels()[1]):
            ax.legend(fontsize=8, framealpha=0.8, reverse=kind == "stack")
    if flat:
        draw_flat(figure.add_subplot(rows, columns, len(panels) + 1), run, flat)
    known = [run["config"][key] for key in ("model", "data") if run["config"].get(key)]
    about = map(plain, [run["name"], *known])
    figure.suptitle(" · ".join(about) + "      (faint: every step, bold: moving mean)", fontsize=12)
    return save(figure, Path(out or Path(run_dir) / "curves.png"))


KINDS = {"lines": draw_lines, "off-policy": draw_lines, "failures": draw_failures, "kl": draw_kl,
         "routes": draw_routes, "stack": draw_stack, "accuracy": draw_accuracy}


def draw_comparison(run_dirs: list, out: str | Path, against: str | None = None) -> Path:
    """Held-out accuracy and first-round reward of several runs against all that they cost."""
    from matplotlib.figure import Figure

    groups = group_by_seed([read_run(run) for run in run_dirs])
    evals = [row for runs in groups.values() for run in runs for row in run["evals"]]
    data = evals[0].get("data") if evals else None
    axes = [against] if against else list(AXES)
    figure = Figure(figsize=(4.8 * len(axes) + (3 if against else 0), 8.4), layout="constrained")
    panels = figure.subplots(2, len(axes), sharex="col", sharey="row", squeeze=False)
    for (top, bottom), x in zip(panels.T, axes):
        for color, (label, runs) in zip(COLORS * len(groups), groups.items()):
            evals = [[row for row in run["evals"] if row.get("data") == data] for run in runs]
            label = plain(label)
            draw_group(top, [series(rows, x, "avg") for rows in evals], color, label, marker="o")
            if len(runs) == 1:
                draw_interval(top, evals[0], x, color)
            rewards = [series(run["metrics"], x, "reward_first_round") for run in runs]
            draw_group(bottom, [(xs, smooth(ys)) for xs, ys in rewards if xs], color, label)
        label_panel(bottom, "", "reward of the first round (moving mean)", x)
        held_out = plain(data or "held-out problems")
        label_panel(top, f"against {AXES[x][1]}", f"accuracy on {held_out}", x)
    for ax in panels.flat:
        ax.label_outer()
    handles = {label: line for ax in panels.flat
               for line, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=4, fontsize=10)
    return save(figure, Path(out))


def draw_evaluation(summary: dict, out: Path) -> Path:
    """What `eval.summary_of` says: pass@k curves and, where levels are known, accuracy by level."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, one in summary["sets"].items():
        left.plot(list(one["pass"]), list(one["pass"].values()), "o-", label=plain(name))
        if one["levels"]:
            levels = one["levels"].values()
            avg = [level["avg"] for level in levels]
            below = [level["avg"] - level["ci_low"] for level in levels]
            above = [level["ci_high"] - level["avg"] for level in levels]
            right.errorbar(list(one["levels"]), avg, [below, above], fmt="o-", capsize=3,
                           label=plain(name))
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:g}")  # 8, not 2 to the 3
    left.set(xlabel="k", ylabel="pass@k", ylim=(0, 1), title="one of k samples is right")
    right.set(xlabel="level", ylabel="avg@k", title="by difficulty, where it is known")
    if 0 <= right.dataLim.y0 and right.dataLim.y1 <= 1:
        right.set_ylim(0, 1)
    left.legend(frameon=False)
    return save(figure, out)


def draw_group(ax, curves, color, label, marker="") -> None:
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
    marker = marker if len(grid) <= len(curves[0][0]) else ""  # only where every run was measured
    ax.plot(grid, mean, color=color, linewidth=2, marker=marker, markersize=4, label=label)


def group_by_seed(runs: list[dict]) -> dict[str, list[dict]]:
    """label -> runs whose configurations are the same but for the seed and the name."""
    groups, labelled = {}, {}
    for run in runs:
        config = {key: value for key, value in run["config"].items() if key not in SAME_BUT_SEED}
        same = json.dumps(config, sort_keys=True) if config else run["name"]
        groups.setdefault(same, []).append(run)
    for same in groups.values():
        prefix = os.path.commonprefix([run["name"] for run in same])
        prefix = re.sub(r"[-_. ]*(seed\d*|s)?[-_. ]*$", "", prefix)
        label = same[0]["name"]
        if len(same) > 1:
            label = f"{prefix or label} (mean of {len(same)})"
        labelled[label if label not in labelled else f"{label} [{len(labelled)}]"] = same
    return labelled


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw one run, or compare several.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, such as runs/NAME")
    parser.add_argument(
        "--out", help="picture to write (.png .pdf .svg); RUN/curves.png or compare.png")
    parser.add_argument(
        "--against", choices=AXES, help="x axis; default steps, or all four for several runs")
    args = parser.parse_args(arguments)
    try:
        if len(args.runs) == 1:
            print(draw_run(args.runs[0], args.out, args.against or "steps"))
        else:
            print(draw_comparison(args.runs, args.out or "compare.png", args.against))
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
