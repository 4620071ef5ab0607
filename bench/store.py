"""Has what all studies need of stored runs: their file, intervals, words and tables.

The file is bench/results/STUDY.jsonl, with a line for each run. A line says how the run was made
(`command`, or the whole `config`) and has the logs by columns, with six significant digits:

    {"run": "demo", "command": "minirl.py --name demo", "metrics": {"step": [1, 2], "entropy":
     [0.33, 0.42]}, "evals": {"step": [0, 20], "avg": [0.23, 0.46]}}
"""
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, mean, stdev

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT))

from parts.files import append, read_rows  # noqa: E402

WRITING = threading.Lock()  # runs may finish at the same time
# Student's t by the number of seeds: intervals of 95, 99 and 97.5 %
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 12: 2.20}
T_99 = {2: 63.66, 3: 9.92, 4: 5.84, 5: 4.60, 6: 4.03, 7: 3.71, 8: 3.50, 9: 3.36, 10: 3.25}
T_975 = {2: 25.45, 3: 6.21, 4: 4.18, 5: 3.50, 6: 3.16, 7: 2.97, 8: 2.84, 9: 2.75, 10: 2.69}
EQUAL = 0.03  # an interval around 0 within this is called equal


@dataclass
class Study:
    """What the page of a study shows, and for a study that still trains also its runs."""

    tables: Callable  # tables(lines): {title: table}
    draw: Callable = lambda lines, name: None  # writes pictures bench/results/NAME*.png
    planned: Callable = list  # planned(): the runs, each with its name and command
    keep: Callable | None = None  # keep(folder): what is stored of a finished run


# --------------------------------------------------------------------------------------- its file
def columns(rows, kept=None) -> dict[str, list]:
    """[{key: value}] -> {key: [values]} for the keys in `kept`, or all; None: missing in a row."""
    rows = list(rows)
    keys = dict.fromkeys(key for row in rows for key in row if not kept or key in kept)
    return {key: [row.get(key) for row in rows] for key in keys}


def rows(table: dict[str, list]) -> list[dict]:
    """The reverse of `columns`; what is None is left out of its row."""
    cells = (zip(table, values) for values in zip(*table.values()))
    return [{key: value for key, value in row if value is not None} for row in cells]


def keep(metrics: tuple, folder: Path) -> dict:
    """Of a finished run these metrics, and its evaluations with what had been spent by then."""
    rows = list(read_rows(folder / "metrics.jsonl"))
    return dict(metrics=columns(rows, metrics), evals=columns(spent(folder, rows)))


def load(study: str) -> list[dict]:
    """The lines of a study, with rows instead of columns; empty if there is no such file."""
    path = RESULTS / f"{study}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line | {log: rows(line.get(log, {})) for log in ("metrics", "evals")} for line in lines]


def add(study: str, line: dict) -> None:
    short = json.loads(json.dumps(line), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    with WRITING:
        append(RESULTS / f"{study}.jsonl", short)


def of(lines: list[dict], seeds=None, **wanted) -> list[dict]:
    return [line for line in lines if (seeds is None or line["seed"] in seeds)
            and all(line[key] == value for key, value in wanted.items())]


def by_arm(lines: list[dict], arms, seeds=None, **wanted) -> dict[str, list]:
    """arm -> its runs by seed, of those arms that have any."""
    lines = sorted(of(lines, seeds, **wanted), key=lambda line: line["seed"])
    return {arm: mine for arm in arms if (mine := of(lines, arm=arm))}


def spent(folder: Path, metrics: list[dict]):
    """Yields a row for each evaluation, on one set of problems.

    engine_steps: of the sampling; trained: response tokens of samples with a coefficient.
    """
    for row in read_rows(folder / "eval.jsonl"):
        past = [each for each in metrics if each["step"] <= row["step"]]
        yield dict(step=row["step"], avg=row["avg"], samples=row["samples_total"],
                   tokens=row["tokens_total"], seconds=row["seconds_total"],
                   engine_steps=sum(step["engine_steps"] for step in past),
                   trained=sum(step.get("tokens_trained", 0) for step in past))


# ----------------------------------------------------------------------------------------- measures
def at(line: dict, cost: str, budget: float, key: str = "avg") -> float:
    """Held-out accuracy of a run when it had spent `budget`. ValueError if it never did."""
    import numpy as np

    rows = line["evals"]
    if rows[-1][cost] < budget:
        raise ValueError(f"{line['run']} spent only {rows[-1][cost]} {cost} of {budget}")
    return float(np.interp(budget, [row[cost] for row in rows], [row[key] for row in rows]))


def is_lost(line: dict, end: float) -> bool:
    """Whether a run has collapsed, which means that it ends below its first accuracy."""
    return end < line["evals"][0]["avg"]


def paired(lines: list[dict], first: str, second: str, measure) -> list[float]:
    """Differences first - second of two arms, by seed."""
    one, other = ({line["seed"]: measure(line) for line in of(lines, arm=arm)}
                  for arm in (first, second))
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def interval(values: list[float], quantiles: dict = T_95) -> tuple[float, float]:
    """Mean and half-width of its interval over seeds, by default of 95 %."""
    return mean(values), quantiles[len(values)] * stdev(values) / len(values) ** 0.5


def word(centre: float, half: float) -> str:
    """What the plan calls a difference."""
    if abs(centre) > half:
        return "ahead" if centre > 0 else "behind"
    return "equal" if abs(centre) + half <= EQUAL else "open"


def power(true: float, deviation: float, seeds: int) -> float:
    """The probability that the interval of a true difference is above 0 (the word ahead).

    The mean of the pairs has a normal distribution, their spread s a chi distribution.
    """
    freedom, step = seeds - 1, 0.002
    density = 2 * (freedom / 2) ** (freedom / 2) / math.gamma(freedom / 2)
    chance = 0.0
    for s in (step * i for i in range(1, 2000)):
        ahead = NormalDist().cdf(true / deviation * seeds**0.5 - T_95[seeds] * s)
        chance += step * density * s ** (freedom - 1) * math.exp(-freedom * s * s / 2) * ahead
    return chance


def fisher(lost: int, other: int, runs: int) -> float:
    """Two-sided exact p-value of `lost` against `other` collapsed runs, of `runs` runs each."""
    both = lost + other
    ways = {i: math.comb(runs, i) * math.comb(runs, both - i) for i in range(both + 1)}
    rarer = sum(way for way in ways.values() if way <= ways[lost])
    return rarer / math.comb(2 * runs, both)


def sign_test(ahead: int, pairs: int) -> float:
    """Two-sided p-value, if either side is ahead with probability 1/2."""
    most = max(ahead, pairs - ahead)
    return min(1.0, 2 * sum(math.comb(pairs, i) for i in range(most, pairs + 1)) / 2**pairs)


# -------------------------------------------------------------------------------------------- pages
def markdown(lines: list[list[str]]) -> str:
    """A table; the first line is its head."""
    head, *others = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *others]) + "\n"


def table(arms: dict[str, list], columns: dict, corner: str = "arm") -> str:
    """A row for each arm, a cell for each column: what its function says of the arm's runs."""
    rows = [[arm, *(cell(mine) for cell in columns.values())] for arm, mine in arms.items()]
    return markdown([[corner, *columns], *rows])


def average(form: str, fact):
    """A cell: the mean of fact(line) over an arm's runs."""
    return lambda mine: format(mean(map(fact, mine)), form)


def shown(values: list[float]) -> str:
    centre, half = interval(values)
    return f"{centre:.1%} ± {half:.1%}"


def points(values: list[float], quantiles: dict = T_95, verdict: bool = True) -> str:
    """Mean difference with its interval, and the plan's word."""
    if not values:
        return "not run"
    if len(values) == 1:  # then there is no interval
        return f"{100 * values[0]:+.1f} points: one pair"
    centre, half = interval(values, quantiles)
    said = f" points: {word(centre, half)}" if verdict else ""
    return f"{100 * centre:+.1f} ± {100 * half:.1f}{said}"


def page(name: str, tables: dict[str, str], lines: list[dict]) -> str:
    """bench/results/NAME.md with these tables.

    What somebody wrote above the first title stays, and so does a section with another title.
    """
    path = RESULTS / f"{name}.md"
    hours = sum(line.get("cpu_seconds", 0) for line in lines) / 3600
    end = f"{len(lines)} runs, {hours:.1f} hours of one core.\n" if hours else ""
    old = path.read_text() if path.exists() else ""
    above, *sections = re.split(r"^## ", old.removesuffix(end), flags=re.M)
    others = [text for text in sections if text.partition("\n")[0] not in tables]
    made = [f"{title}\n\n{table}\n" for title, table in tables.items()]
    return "## ".join([above, *made, *others]) + end
