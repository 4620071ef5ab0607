"""A study is a handful of runs that answer one question: one file, with a line for each run.

    python bench/study.py three_seeds                                   # its evaluations
    python bench/study.py three_seeds --draw docs/three_seeds.png       # its runs on one page
    python bench/study.py three_seeds --draw one.png --only xeon-seed0  # one run, all panels
    python bench/study.py real_model --draw docs/real_model.png --against seconds
    python bench/study.py mine --add runs/a runs/b                      # finished runs into a study

The file is bench/results/STUDY.jsonl. A line holds what is needed to run it again (`flags`, or the
whole `config`) and, by columns, what was logged; numbers keep six significant digits:

    {"run": "demo", "flags": [...], "metrics": {"step": [1, 2], "entropy": [0.33, 0.42]},
     "evals": {"step": [0, 20], "avg": [0.23, 0.46]}}

Scripts that train whole studies (compare_skills.py, longer_skills.py, ablate_objective.py) use the
functions here: runs are started through the command line, resumed, and stored when they end.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

from common import RESULTS, ROOT, positive

from parts.folder import read_json, read_rows

WRITING = threading.Lock()  # runs may finish at the same time
# Student's t by the number of seeds: intervals of 95 %, and of 99 %
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 10: 2.26, 12: 2.20}
T_99 = {2: 63.66, 3: 9.92, 4: 5.84, 5: 4.60, 6: 4.03, 7: 3.71, 8: 3.50, 9: 3.36, 10: 3.25}


# --------------------------------------------------------------------------------- a study's file
def short(value):
    """Six significant digits of every float, in lists and dicts as well."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    return [short(inner) for inner in value] if isinstance(value, list) else value


def columns(rows: list[dict], kept=None) -> dict[str, list]:
    """[{key: value}] -> {key: [values]}, of the keys in `kept`, or all; None: not in that row."""
    keys = dict.fromkeys(key for row in rows for key in row if not kept or key in kept)
    return {key: [short(row.get(key)) for row in rows] for key in keys}


def rows(table: dict[str, list]) -> list[dict]:
    """The reverse of `columns`; what is None is left out of its row."""
    cells = (zip(table, values) for values in zip(*table.values()))
    return [{key: value for key, value in row if value is not None} for row in cells]


def fold(folder: Path, kept=None, **about) -> dict:
    """A finished run's folder as one line of a study, with the columns `kept` of its logs."""
    logs = dict(metrics="metrics.jsonl", evals="eval.jsonl")
    return about | {key: columns(list(read_rows(folder / name)), kept)
                    for key, name in logs.items()}


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


# ----------------------------------------------------------------------------------- its training
def parser(about: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=about.split("\n")[0])
    found.add_argument("--processes", type=positive, default=1, help="runs at the same time")
    found.add_argument("--draw", action="store_true", help="train nothing")
    return found


def train_missing(study: str, plan: dict[str, tuple], train, processes: int) -> None:
    """Calls train(*job) for each job of the plan {run: job} whose run is not stored, in its order.
    """
    stored = {line["run"] for line in load(study)}
    missing = [job for run, job in plan.items() if run not in stored]
    print(f"{len(plan) - len(missing)} of {len(plan)} runs are stored", flush=True)
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda job: train(*job), missing))


def launch(runs: Path, name: str, flags: list[str], script: str = "minirl.py") -> float:
    """Train the run runs/`runs`/NAME, or resume it; returns its seconds of a core.

    Raises SystemExit if it fails; what it said is in NAME.log.
    """
    runs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / script), *flags, "--name", name, "--resume"]
    with open(runs / f"{name}.log", "a") as output:
        process = subprocess.Popen(command, cwd=runs, stdout=output, stderr=output,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{name} failed: see {runs / name}.log")
    return usage.ru_utime + usage.ru_stime


# ------------------------------------------------------------------------------ tables, pictures
def markdown(lines: list[list[str]]) -> str:
    """A table; the first line is its head."""
    head, *others = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *others]) + "\n"


def interval(values: list[float], quantiles: dict = T_95) -> tuple[float, float]:
    """Mean and half its interval over seeds, by default that of 95 %."""
    return mean(values), quantiles[len(values)] * stdev(values) / len(values) ** 0.5


def shown(values: list[float]) -> str:
    centre, half = interval(values)
    return f"{centre:.1%} ± {half:.1%}"


def panels(*shape: int, **how):
    """matplotlib's (figure, axes), for files only."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(*shape, layout="constrained", **how)


def band(axis, x, curves, color: str, **how) -> None:
    """Mean of the seeds' curves, and a band from the lowest to the highest."""
    import numpy as np

    values = np.array(curves)
    axis.plot(x, values.mean(0), color=color, **how)
    axis.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.12, lw=0)


def save(figure, name: str) -> None:
    """bench/results/NAME.png"""
    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / f"{name}.png", dpi=90)


# ----------------------------------------------------------------------------------- command line
def draw(lines: list[dict], out: str, against: str | None) -> None:
    """All panels of one run, or several runs on one page, against one cost or all of them."""
    from compare import draw_comparison
    from parts.plot import draw_run

    with tempfile.TemporaryDirectory() as folder:
        runs = [unfold(line, Path(folder, line["run"])) for line in lines]
        one = len(runs) == 1
        print(draw_run(runs[0], out) if one else draw_comparison(runs, out, against))


def unfold(line: dict, run: Path) -> Path:
    """A run's folder as parts/plot.py reads it."""
    run.mkdir()
    (run / "config.json").write_text(json.dumps(dict(config=line["config"], starts=[])))
    for name, logged in (("metrics.jsonl", line["metrics"]), ("eval.jsonl", line["evals"])):
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in logged))
    return run


def show(line: dict) -> None:
    """Accuracies of a run, with 95 % intervals and what had been spent."""
    print(line["run"])
    for row in line["evals"]:
        print(f"    step {row['step']}: {row['avg']:.1%} [{row['ci_low']:.1%}, "
              f"{row['ci_high']:.1%}], {row['seconds_total']:.0f} s, "
              f"{row['samples_total']:,} samples, {row['tokens_total']:,} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("study", help="bench/results/STUDY.jsonl")
    parser.add_argument("--add", nargs="*", default=[], metavar="RUN", help="folders of runs")
    parser.add_argument("--draw", metavar="FILE", help="picture to write")
    parser.add_argument("--against", choices=("steps", "samples", "tokens", "seconds"),
                        help="default: all")
    parser.add_argument("--only", nargs="*", metavar="RUN", help="names of runs in the study")
    args = parser.parse_args()
    for folder in map(Path, args.add):
        stored = read_json(folder / "config.json")
        add(args.study, fold(folder, run=folder.name, config=stored["config"],
                             versions=stored["starts"][0]["versions"]))
    lines = [line for line in load(args.study) if not args.only or line["run"] in args.only]
    if not lines:
        file = RESULTS / f"{args.study}.jsonl"
        raise SystemExit(f"There is no such run in {file}: add one with --add runs/NAME.")
    if args.draw:
        return draw(lines, args.draw, args.against)
    for line in lines:
        show(line)


if __name__ == "__main__":
    main()
