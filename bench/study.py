"""Writes the page of a study from its stored runs.

    python bench/study.py skills --draw             # page and pictures from stored runs
    python bench/study.py grpo --processes 2        # trains first what is missing

The runs are the lines of bench/results/STUDY.jsonl (see store.py), and the page is
bench/results/STUDY.md. A study that is not in STUDIES is a table of runs that were made one by one.
A study that has ended trains nothing: its page names the commit that can train its runs again.
"""
import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

import ablations
import grpo
import probes
import sampling
import store
from store import ROOT, Study


# ------------------------------------------------------------------------------------------ running
def train_missing(name: str, study: Study, processes: int) -> None:
    """Trains and stores the planned runs that are not stored yet."""
    stored = {line["run"] for line in store.load(name)}
    runs = study.planned()
    missing = [run for run in runs if run["run"] not in stored]
    print(f"{len(runs) - len(missing)} of {len(runs)} planned runs are stored", flush=True)
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda run: finish(name, study, run), missing))


def finish(name: str, study: Study, run: dict) -> None:
    """Trains a run, or resumes it, and stores it as a line. Raises SystemExit if it fails."""
    place = ROOT / "runs" / name
    place.mkdir(parents=True, exist_ok=True)
    log = place / f"{run['run']}.log"
    failed, seconds = launch(run["command"], place, log)
    if failed:
        raise SystemExit(f"{run['run']} failed: see {log}")
    kept = study.keep(place / "runs" / run["run"])
    store.add(name, run | dict(cpu_seconds=round(seconds, 1)) | kept)
    print(f"{run['run']}: {kept['evals']['avg'][-1]}", flush=True)


def launch(command: str, place: Path, log: Path) -> tuple[int, float]:
    """The exit status of a run in this folder, and its seconds of a core."""
    script, *flags = shlex.split(command)
    with open(log, "a") as output:
        process = subprocess.Popen([sys.executable, ROOT / script, *flags, "--resume"], cwd=place,
                                   stdout=output, stderr=output,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    return status, usage.ru_utime + usage.ru_stime


# ------------------------------------------------------------------------------ runs made singly
def evaluations(lines: list[dict]) -> dict[str, str]:
    """Accuracies with 95 % intervals, what was cut off, and what had been spent."""
    found = [["run", "step", "on", "accuracy", "pass@k", "cut off", "seconds", "samples", "tokens"]]
    for line in lines:
        for row in line["evals"]:
            accuracy, low, high = (f"{100 * row[key]:.1f}" for key in ("avg", "ci_low", "ci_high"))
            best = [*row["pass"].values()][-1]
            found.append([
                line["run"], str(row["step"]), row["data"],
                f"{accuracy} % [{low}, {high}]", f"{best:.1%}", f"{row['truncated']:.1%}",
                *(f"{row[f'{what}_total']:,.0f}" for what in ("seconds", "samples", "tokens"))])
    return {"Evaluations": store.markdown(found)}


def seeds(lines: list[dict]) -> dict[str, str]:
    """Of runs that eval.py has evaluated with --base: before, after, and what the training took."""
    def percent(report, form=".1f"):
        middle, low, high = (f"{100 * report[key]:{form}}" for key in ("avg", "ci_low", "ci_high"))
        return f"{middle} [{low}, {high}]"

    found = [["run", "before, %", "after, %", "difference, points", "better, worse",
              "pass@k before, after", "core-hours", "samples", "tokens sampled", "tokens trained",
              "peak memory", "prompts without a gradient, last five steps"]]
    for line in lines:
        evaluation, steps = line["evaluation"], line["metrics"]
        (after,), (before,) = (each["sets"].values() for each in (evaluation, evaluation["base"]))
        (difference,) = evaluation["difference"].values()
        solved = [f"{100 * [*report['pass'].values()][-1]:.1f} %" for report in (before, after)]
        found.append([
            line["run"], percent(before), percent(after), percent(difference, form="+.1f"),
            f"{difference['better']}, {difference['worse']}", ", ".join(solved),
            f"{line['cpu_seconds'] / 3600:.2f}",
            *(f"{sum(step[key] for step in steps):,}"
              for key in ("samples", "tokens", "tokens_trained")),
            f"{line['peak_gb']:.1f} GB",
            f"{mean(step['zero_signal'] for step in steps[-5:]):.0%}"])
    if len(lines) > 1:
        ends = [100 * next(iter(line["evaluation"]["sets"].values()))["avg"] for line in lines]
        middle, half = store.interval(ends)
        found.append(["mean ± 95 % interval over runs", "", f"{middle:.1f} ± {half:.1f}"]
                     + [""] * (len(found[0]) - 3))
    return {"Before and after": store.markdown(found)}


def draw_both(lines: list[dict], name: str) -> None:
    """The accuracy of two models on SVAMP before and after each training: a point for each run."""
    from matplotlib.figure import Figure

    def reports(runs, step):
        return [row for run in runs for row in run["evals"]
                if (row["step"], row["data"]) == (step, "svamp_test.jsonl")]

    def sets(evaluations):
        return [next(iter(each["sets"].values())) for each in evaluations]

    templates = json.loads((store.RESULTS / "transfer.json").read_text())
    longer = store.load("human_longer")
    found = [line["evaluation"] for line in lines]
    points = {
        "SmolLM2-135M, untrained": reports(templates, 0),
        "trained on templates": reports(templates, 20),
        "then on SVAMP": reports(longer, 40),
        "Qwen2.5-Coder-0.5B, untrained": sets([found[0]["base"]]),
        "trained on SVAMP": sets(found)}
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axis = figure.subplots()
    for y, (title, those) in enumerate(points.items()):
        color = "C0" if y < 3 else "C1"
        for i, one in enumerate(those):
            accuracy, low, high = (100 * one[key] for key in ("avg", "ci_low", "ci_high"))
            axis.errorbar(accuracy, y + (i - (len(those) - 1) / 2) / 5, fmt="o", color=color,
                          xerr=[[accuracy - low], [high - accuracy]], markersize=4)
    axis.set_yticks(range(len(points)), points)
    axis.invert_yaxis()
    axis.set_xlim(0, 65)
    axis.set_xlabel("right answers to problems of SVAMP, % (95 % intervals)")
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(store.RESULTS / f"{name}.png", dpi=110)


SINGLE = Study(evaluations)  # any other name: runs that were made one by one
STUDIES = sampling.STUDIES | ablations.STUDIES | probes.STUDIES | grpo.STUDIES | dict(
    real_model=Study(evaluations, sampling.draw_way), qwen_cpu=Study(seeds, draw_both))


# ------------------------------------------------------------------------------------- command line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("study", help="bench/results/STUDY.jsonl")
    parser.add_argument("--processes", type=int, default=1, choices=range(1, 65),
                        metavar="N", help="runs at the same time")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    name, study = args.study, STUDIES.get(args.study, SINGLE)
    if not args.draw and study.planned():
        train_missing(name, study, args.processes)
    lines = store.load(name)
    if not lines:
        raise SystemExit(f"{store.RESULTS / name}.jsonl has no runs.")
    page = store.page(name, study.tables(lines), lines)
    (store.RESULTS / f"{name}.md").write_text(page)
    print(page)
    study.draw(lines, name)


if __name__ == "__main__":
    main()
