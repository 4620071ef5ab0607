"""A study is a handful of runs that answer one question: one file, with a line for each run.

    python bench/study.py three_seeds                                   # its evaluations
    python bench/study.py three_seeds --draw docs/three_seeds.png       # its runs on one page
    python bench/study.py three_seeds --draw one.png --only xeon-seed0  # one run, all panels
    python bench/study.py mine --add runs/a runs/b                      # finished runs into a study

The file is bench/results/STUDY.jsonl. A line holds what is needed to run it again (`flags`, or the
whole `config`) and, by columns, what was logged; numbers keep six significant digits:

    {"run": "demo", "flags": [...], "metrics": {"step": [1, 2], "entropy": [0.33, 0.42]},
     "evals": {"step": [0, 20], "avg": [0.23, 0.46]}}
"""
import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT))

WRITING = threading.Lock()  # runs may finish at the same time


# ------------------------------------------------------------------------------ rows and columns
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


# --------------------------------------------------------------------------------- a study's file
def fold(folder: Path, kept=None, **about) -> dict:
    """A finished run's folder as one line of a study, with the columns `kept` of its logs."""
    def read(name):
        logged = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        return columns(logged, kept)

    return about | dict(metrics=read("metrics.jsonl"), evals=read("eval.jsonl"))


def load(study: str) -> list[dict]:
    """The lines of a study, with rows in the place of columns; empty if there is no such file."""
    path = RESULTS / f"{study}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line | dict(metrics=rows(line["metrics"]), evals=rows(line["evals"])) for line in lines]


def add(study: str, line: dict) -> None:
    """Append a run to a study."""
    with WRITING, open(RESULTS / f"{study}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def markdown(lines: list[list[str]]) -> str:
    """A table; the first line is its head."""
    head, *others = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *others]) + "\n"


# ----------------------------------------------------------------------------------- command line
def unfold(line: dict, folder: Path) -> Path:
    """A run's folder as parts/plot.py reads it."""
    run = folder / line["run"]
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(dict(config=line["config"])))
    for name, logged in (("metrics.jsonl", line["metrics"]), ("eval.jsonl", line["evals"])):
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in logged))
    return run


def draw(lines: list[dict], out: str) -> None:
    """All panels of one run, or several runs on one page."""
    from parts.plot import draw_comparison, draw_run

    with tempfile.TemporaryDirectory() as folder:
        runs = [unfold(line, Path(folder)) for line in lines]
        print(draw_run(runs[0], out) if len(runs) == 1 else draw_comparison(runs, out))


def show(line: dict) -> str:
    """Accuracies of a run, with 95 % intervals and what had been spent."""
    text = line["run"]
    for row in line["evals"]:
        accuracy = f"{row['avg']:.1%} [{row['ci_low']:.1%}, {row['ci_high']:.1%}]"
        spent = f"{row['samples_total']:,} samples, {row['tokens_total']:,} tokens"
        text += f"\n    step {row['step']}: {accuracy}, {row['seconds_total']:.0f} s, {spent}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("study", help="bench/results/STUDY.jsonl")
    parser.add_argument("--add", nargs="*", default=[], metavar="RUN", help="folders of runs")
    parser.add_argument("--draw", metavar="FILE", help="picture to write")
    parser.add_argument("--only", nargs="*", metavar="RUN", help="names of runs in the study")
    args = parser.parse_args()
    for folder in map(Path, args.add):
        stored = json.loads((folder / "config.json").read_text())
        versions = stored["starts"][0]["versions"]
        about = dict(run=folder.name, config=stored["config"], versions=versions)
        add(args.study, fold(folder, **about))
    lines = [line for line in load(args.study) if not args.only or line["run"] in args.only]
    if not lines:
        file = RESULTS / f"{args.study}.jsonl"
        raise SystemExit(f"There is no such run in {file}: add one with --add runs/NAME.")
    if args.draw:
        draw(lines, args.draw)
    else:
        print("\n".join(map(show, lines)))


if __name__ == "__main__":
    main()
