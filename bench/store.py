"""What studies are made of: runs, a file, differences with an interval and a word, tables.

The file is bench/results/STUDY.jsonl, with a line for each run. A line holds what is needed to run
it again (`flags`, or the whole `config`) and, by columns, what was logged; numbers keep six
significant digits:

    {"run": "demo", "flags": [...], "metrics": {"step": [1, 2], "entropy": [0.33, 0.42]},
     "evals": {"step": [0, 20], "avg": [0.23, 0.46]}}
"""
import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, mean, stdev

from common import RESULTS

from parts.folder import read_rows

WRITING = threading.Lock()  # runs may finish at the same time
# Student's t by the number of seeds: intervals of 95 %, and of 99 %
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 10: 2.26, 12: 2.20}
T_99 = {2: 63.66, 3: 9.92, 4: 5.84, 5: 4.60, 6: 4.03, 7: 3.71, 8: 3.50, 9: 3.36, 10: 3.25}
EQUAL = 0.03  # an interval around 0 within this is called equal
LOGS = dict(metrics="metrics.jsonl", evals="eval.jsonl")


@dataclass
class Run:
    """One training. `about` comes first in its line."""

    name: str
    about: dict
    flags: list[str]
    steps: int
    every: int = 0  # steps between two evaluations
    script: list[str] = field(default_factory=lambda: ["minirl.py"])  # with arguments of its own


@dataclass
class Study:
    """A table of runs, and what is made of them."""

    runs: Callable  # runs(): a list of Run, in the order in which they are trained
    keep: Callable  # keep(folder, run, end): what the line of a finished run has besides `about`
    report: Callable  # report(lines): the page
    draw: Callable = lambda lines, name: None  # writes pictures bench/results/NAME*.png
    parts: bool = False  # whether the page can be made of a part of the runs
    endings: tuple = ()  # words with which a failed run is a result; `end` is those words, or ""


# --------------------------------------------------------------------------------------- its file
def short(value):
    """Six significant digits of every float, in lists and dicts as well."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    return [short(inner) for inner in value] if isinstance(value, list) else value


def columns(rows, kept=None) -> dict[str, list]:
    """[{key: value}] -> {key: [values]}, of the keys in `kept`, or all; None: not in that row."""
    rows = list(rows)
    keys = dict.fromkeys(key for row in rows for key in row if not kept or key in kept)
    return {key: [short(row.get(key)) for row in rows] for key in keys}


def rows(table: dict[str, list]) -> list[dict]:
    """The reverse of `columns`; what is None is left out of its row."""
    cells = (zip(table, values) for values in zip(*table.values()))
    return [{key: value for key, value in row if value is not None} for row in cells]


def logs_of(folder: Path, kept=None) -> dict:
    """The columns `kept` of a finished run's logs."""
    return {key: columns(read_rows(folder / log), kept) for key, log in LOGS.items()}


def unfold(line: dict, folder: Path) -> Path:
    """The run's folder as parts/plot.py reads it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config=line["config"], starts=[])))
    for key, log in LOGS.items():
        (folder / log).write_text("".join(json.dumps(row) + "\n" for row in line[key]))
    return folder


def load(study: str) -> list[dict]:
    """The lines of a study, with rows in the place of columns; empty if there is no such file."""
    path = RESULTS / f"{study}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line | dict(metrics=rows(line["metrics"]), evals=rows(line["evals"])) for line in lines]


def add(study: str, line: dict) -> None:
    with WRITING, open(RESULTS / f"{study}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def of(lines: list[dict], seeds=None, **wanted) -> list[dict]:
    """The runs with these seeds that have these values."""
    return [line for line in lines if (seeds is None or line["seed"] in seeds)
            and all(line[key] == value for key, value in wanted.items())]


# ----------------------------------------------------------------------------------------- measures
def at(line: dict, cost: str, budget: float) -> float:
    """Held-out accuracy of a run when it had spent `budget`. ValueError if it never did."""
    rows = line["evals"]
    if rows[-1][cost] < budget:
        raise ValueError(f"{line['run']} spent only {rows[-1][cost]} {cost} of {budget}")
    return interpolate(budget, rows, cost, "avg")


def interpolate(x: float, rows: list[dict], key: str, other: str) -> float:
    import numpy as np

    return float(np.interp(x, [row[key] for row in rows], [row[other] for row in rows]))


def paired(lines: list[dict], first: str, second: str, measure) -> list[float]:
    """Differences first - second of two arms, by seed."""
    one, other = ({line["seed"]: measure(line) for line in of(lines, arm=arm)}
                  for arm in (first, second))
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def interval(values: list[float], quantiles: dict = T_95) -> tuple[float, float]:
    """Mean and half its interval over seeds, by default that of 95 %."""
    return mean(values), quantiles[len(values)] * stdev(values) / len(values) ** 0.5


def word(centre: float, half: float) -> str:
    """What the plan calls a difference."""
    if abs(centre) > half:
        return "ahead" if centre > 0 else "behind"
    return "equal" if abs(centre) + half <= EQUAL else "open"


def power(true: float, deviation: float, seeds: int) -> float:
    """The chance that a true difference gets the word ahead: the interval lies above 0.

    The mean of the pairs is drawn from their normal law, their spread s from its own, a chi.
    """
    freedom, step = seeds - 1, 0.002
    density = 2 * (freedom / 2) ** (freedom / 2) / math.gamma(freedom / 2)
    chance = 0.0
    for s in (step * i for i in range(1, 2000)):
        ahead = NormalDist().cdf(true / deviation * seeds**0.5 - T_95[seeds] * s)
        chance += step * density * s ** (freedom - 1) * math.exp(-freedom * s * s / 2) * ahead
    return chance


def fisher(lost: int, other: int, runs: int) -> float:
    """Two-sided exact p-value of `lost` against `other` of so many runs each."""
    both = lost + other
    ways = {i: math.comb(runs, i) * math.comb(runs, both - i) for i in range(both + 1)}
    rarer = sum(way for way in ways.values() if way <= ways[lost])
    return rarer / math.comb(2 * runs, both)


# -------------------------------------------------------------------------------------------- pages
def markdown(lines: list[list[str]]) -> str:
    """A table; the first line is its head."""
    head, *others = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *others]) + "\n"


def shown(values: list[float]) -> str:
    centre, half = interval(values)
    return f"{centre:.1%} ± {half:.1%}"


def points(values: list[float], quantiles: dict = T_95, verdict: bool = True) -> str:
    """Mean difference with its interval, and the plan's word."""
    if len(values) < 2:
        return "not run"
    centre, half = interval(values, quantiles)
    said = f" points: {word(centre, half)}" if verdict else ""
    return f"{100 * centre:+.1f} ± {100 * half:.1f}{said}"


def as_page(parts: dict[str, str], lines: list[dict]) -> str:
    """Titles and tables, and what the runs took."""
    hours = sum(line["cpu_seconds"] for line in lines) / 3600
    text = "".join(f"## {title}\n\n{part}\n" for title, part in parts.items())
    return f"{text}{len(lines)} runs, {hours:.1f} hours of one core.\n"
