"""Draws the pages of two studies whose runs have cells: objective, and precision.

The study objective has the paper's ablations of MiniRL on an MoE model. As in the paper, the
mini-batch is fixed and the batch consists of N of them, so every cell has the same number of
gradient steps and answers. N is the age of the last ones. bench/results/objective.md explains the
flags in a cell's name, such as low-N4-r3-clip-is.
"""
from functools import partial
from statistics import mean, median

import store
from compare import picture
from store import Study, fisher, interval, is_lost, markdown, sign_test, table

from explorer.panels import series

BOTH = "{none,r3}"  # the runs of both cells
COMPARED = [  # cells, and those of their rivals
    ("stress-N4-r3-clip-is", "stress-N4-r2-clip-is"),
    ("stress-N4-r2-clip-is", "stress-N4-none-clip-is"),
    ("stress-N4-r3-clip-is", "stress-N4-none-clip-is"),
    ("mask-N8-none-cispo-is", "mask-N8-none-clip-is"),
    (f"coarse1-N1-{BOTH}-clip-nois", f"coarse1-N1-{BOTH}-clip-is"),
    ("coarse1-N1-r3-clip-nois", "coarse1-N1-r3-clip-is")]


def by_cell(lines: list[dict]) -> dict[str, list]:
    """{cell: the lines of its runs, by seed}."""
    return store.by_arm([line | dict(arm=line["cell"]) for line in lines],
                        dict.fromkeys(line["cell"] for line in lines))


# ------------------------------------------------------------------------------------------- tables
def last(run: dict) -> float:
    return run["evals"][-1]["avg"]


def at_the_end(mine: list[dict]) -> str:
    """The mean and range of last accuracies. A failed run counts with its last evaluation."""
    ends = list(map(last, mine))
    spread = f" ({min(ends):.1%} to {max(ends):.1%})" if len(ends) > 1 else ""
    return f"{mean(ends):.1%}{spread}"


def logged(form: str, *keys: str, share: int = 1, measure=mean):
    """A cell: the sum of these metrics' means, over all steps or the last 1/share of them.

    A step without gradient has no number. The cell is "" if nothing was logged.
    """
    def cell(mine):
        rows = [row for run in mine
                for row in run["metrics"][-max(1, len(run["metrics"]) // share):]]
        found = [[row[key] for row in rows if key in row] for key in keys]
        return format(sum(map(measure, found)), form) if all(found) else ""

    return cell


def beyond(mine: list[dict]) -> str:
    """The share of weights above 2 and below 1/2; "" if the objective has no weight."""
    ratios = logged(".2%", "weight_over_2", "weight_under_half")
    return "" if "nois" in mine[0]["cell"] else ratios(mine)


def in_an_exact_engine(mine: list[dict]) -> str:
    """The accuracy of the last policy in an exact engine."""
    policies = [run["policy"] for run in mine if "policy" in run]
    return f"{mean(policies):.1%}" if policies else ""


COLUMNS = {
    "seeds": lambda mine: str(len(mine)),
    "broke": lambda mine: str(sum(bool(run["broke"]) for run in mine)),
    "lost": lambda mine: str(sum(is_lost(run, last(run)) for run in mine)),
    "accuracy at the end (range)": at_the_end,
    "best": store.average(".1%", lambda run: max(row["avg"] for row in run["evals"])),
    "entropy, last quarter": logged(".3f", "entropy_trained", share=4),
    "KL(mu ‖ pi_old), k3": logged(".1e", "kl_k3"),
    "its median": logged(".0e", "kl_k3", measure=median),
    "routes agree": logged(".1%", "routes_agree_all"),
    "clipped": logged(".2%", "clipped_positive", "clipped_negative"),
    "ratio beyond 2 or 1/2": beyond, "in an exact engine": in_an_exact_engine}


def runs_of(name: str, found: dict) -> list[dict]:
    """The runs of a cell, or of both cells."""
    cells = dict.fromkeys(name.replace(BOTH, replay) for replay in ("none", "r3"))
    return [run for cell in cells for run in found[cell]]


def comparisons(found: dict) -> str:
    """Differences of two arms with the same seeds, and the number of collapsed runs."""
    rows = [["cells", "minus", "points, paired by seed", "ahead", "sign test", "lost",
             "of these half-way", "the best of these in an exact engine", "Fisher"]]
    for names in COMPARED:
        ours, theirs = (runs_of(name, found) for name in names)
        pairs = list(zip(ours, theirs))  # of the same seeds; one may have more
        gaps = [100 * (last(a) - last(b)) for a, b in pairs]
        centre, half = interval(gaps)
        lost, behind = ([run for run in side if is_lost(run, last(run))] for side in zip(*pairs))
        exact = [run["policy"] for run in lost if "policy" in run]
        early = sum(is_lost(run, run["evals"][len(run["evals"]) // 2]["avg"]) for run in lost)
        ahead = sum(gap > 0 for gap in gaps)
        rows.append([
            *names, f"{centre:+.0f} ± {half:.0f}", f"{ahead} of {len(gaps)}",
            f"p = {sign_test(ahead, len(gaps)):.2f}", f"{len(lost)} against {len(behind)}",
            str(early), f"{max(exact):.1%}" if exact else "",
            f"p = {fisher(len(lost), len(behind), len(gaps)):.2f}"])
    return markdown(rows)


def tables(lines: list[dict]) -> dict[str, str]:
    found = by_cell(lines)
    return {"Cells": table(found, COLUMNS, "cell"), "Arms compared": comparisons(found)}


# ------------------------------------------------------------------------------------------ picture
OLD = "N = {}, learning rate 0.003"
PICTURES = {  # a column for the cells that begin like this, and its title
    "": {
        "low-N1-": "N = 1, learning rate 0.002", "long-N1-": "the same, longer",
        **{f"stress-N{N}-": OLD.format(N) for N in (2, 4, 8)}},
    "-masks": {f"mask-N{N}-": OLD.format(N) for N in (4, 8)},
    "-weight": {
        "eight-N1-none-": "The engine's weights: fp8, 4 bits", "coarse2-N1-none-": "2 bits",
        "coarse1-N1-none-": "1 bit", "coarse1-N1-r3-": "1 bit, and R3"}}
ROWS = {
    "avg": "held-out accuracy", "entropy_trained": "entropy, nats per token",
    "kl_k3": r"KL($\mu$ ‖ $\pi_{old}$), k3, nats per token",
    "weight_over_2": "share of tokens with a weight above 2"}


def draw(lines: list[dict], name: str) -> None:
    found = by_cell(lines)
    measures = {label: partial(curve, key) for key, label in ROWS.items()}
    for about, titles in PICTURES.items():
        columns = {title: ("gradient steps", "step", {
            label(cell): runs for cell, runs in found.items() if cell.startswith(start)})
            for start, title in titles.items()}
        picture(store.RESULTS / f"{name}{about}.png", (4 * len(columns), 12), measures, columns)


def label(cell: str) -> str:
    """Without precision and N, in words."""
    words = dict(
        none="no replay", noclip="no mask", nois="no weight", length="length-normalised")
    return ", ".join(words.get(part, part) for part in cell.split("-")[2:] if part != "is")


def curve(key: str, run: dict, x: str) -> tuple:
    if key == "weight_over_2" and "nois" in run["cell"]:  # it is 1 everywhere
        return [], []
    N = int(run["cell"].split("-")[1][1:])
    steps, values = series(run["evals" if key == "avg" else "metrics"], key, x)
    return [N * step for step in steps], values


# ---------------------------------------------------------------------------------------- precision
def precision(lines: list[dict]) -> dict[str, str]:
    """Of the first step of each run, on its responses; and on the probe's texts."""
    return {"Engine and trainer in one precision": table(by_cell(lines), {
        "k3": logged(".1e", "kl_k3"),
        "mean difference, nats": logged(".0e", "probe_gap_mean")}, "model, weights, logits")}


STUDIES = dict(objective=Study(tables, draw), precision=Study(precision))
