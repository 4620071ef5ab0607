"""Does the lead of "more prompts" over ada-balance reverse at larger budgets?

    python bench/longer_skills.py --processes 2   # all, the primary pair first; resumable
    python bench/longer_skills.py --draw          # only tables and picture, from what is stored

What is compared and what counts was written down before the first run: bench/plan.md, "The
longer study". Names are the plan's. All runs are in its regime stream; `regime` here is "long", or
the one factor that is changed.

A run becomes a line of bench/results/longer_skills.jsonl. Besides what skills.py keeps, a tested
run has `held_out`: how many of its held-out answers each letter had right, an entry per evaluation;
and `letters_by_draws` (see `by_draws`). Then its groups.jsonl is removed.
"""
from pathlib import Path

import skills
import study
from compare_skills import COLORS
from skills import LETTER, at, run_name
from study import T_95, T_99, of, shown

from parts import problems
from parts.folder import read_rows
from parts.metrics import PATIENCE

STUDY = "longer_skills"
PRIMARY = 46_000  # draws
GOAL = 48_000  # draws that every run goes to
FURTHER = 60_000  # draws of the primary pair's tested runs
CROSSING = 30_000
WINDOW = 4_000
SEEDS, TUNING_SEEDS, SOME_SEEDS = range(12, 22), range(102, 105), range(12, 15)
RATES = (0.0005, 0.001, 0.002, 0.004, 0.008)
PAIR = ("ada-balance", "uniform-4-wide")
ARMS = {  # name -> flags, prompts a step, steps to begin with, steps between evaluations
    "ada-balance": (["--sampler", "ada-balance"], 16, 140, 10),
    "uniform-4-wide": (["--sampler", "uniform", "--n", "4"], 74, 163, 10),
    "ada-balance-cap": (["--sampler", "ada-balance", "--max-rounds-all-correct", "1"], 16, 160, 15),
    "ada-pos": (["--sampler", "ada-pos"], 16, 160, 15),
    "uniform-16": (["--sampler", "uniform", "--n", "16"], 16, 188, 12),
    "uniform-4": (["--sampler", "uniform", "--n", "4"], 16, 750, 50),
    "dapo": (["--sampler", "dapo", "--n", "4"], 16, 240, 15),
}
SLOWER = {"ada-pos-slower": 0.001, "ada-balance-cap-slower": 0.001}  # added later: nothing tuned
ARMS |= {arm: ARMS[arm.removesuffix("-slower")] for arm in SLOWER}
LADDER = {"half": 0.5, "double": 2, "fourfold": 4}  # prompts a step, times this
FACTORS = (*LADDER, "four-minis", "sgd")  # exploratory: changed in both arms of the pair
SGD_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)  # sgd.py takes ten times as much
SECONDARY = [  # first, second, draws
    ("ada-balance-cap", "uniform-4-wide", PRIMARY), ("ada-pos", "uniform-4-wide", PRIMARY),
    ("ada-balance", "uniform-16", PRIMARY), ("ada-balance", "uniform-4", PRIMARY),
    ("ada-balance", "uniform-4-wide", CROSSING)]
AFTERWARDS = [*((arm, rival, PRIMARY) for arm in SLOWER for rival in reversed(PAIR)),
              ("ada-balance", "dapo", PRIMARY)]


# ------------------------------------------------------------------------------------------ running
def train(arm: str, regime: str, lr: float, seed: int) -> None:
    """One run, resumed if it was interrupted; then a line of the study."""
    name, is_tested = run_name(arm, regime, lr, seed), seed in SEEDS and regime == "long"
    goal = FURTHER if arm in PAIR and is_tested else GOAL
    folder = skills.RUNS / "runs" / name
    seconds, broken = train_or_break(goal, arm, regime, lr, seed)
    line = dict(run=name, arm=arm, regime=regime, lr=lr, seed=seed, broken=broken,
                cpu_seconds=round(seconds, 1))
    line |= skills.fold(folder)
    if broken:  # the run is over, and counts 0
        for cost, values in line["evals"].items():
            values.append(0.0 if cost == "avg" else max(values[-1], goal))
    if is_tested:
        line |= dict(held_out=by_evaluation(folder), letters_by_draws=by_draws(folder))
    study.add(STUDY, line)
    (folder / "groups.jsonl").unlink()
    print(f"{name}: {line['evals']['avg'][-1]}", flush=True)


def train_or_break(goal: int, arm: str, regime: str, lr: float, seed: int) -> tuple[float, bool]:
    """(seconds of a core, whether it ended by three gradients in a row that were not finite)."""
    flags, prompts, steps, every = ARMS[arm]
    times, name = LADDER.get(regime, 1), run_name(arm, regime, lr, seed)
    if regime == "four-minis":
        flags = [*flags, "--mini-batches", "4"]
    flags = [*flags, "--batch-prompts", str(int(prompts * times)), "--lr", str(lr),
             "--seed", str(seed)]
    script = "bench/sgd.py" if regime == "sgd" else "minirl.py"
    try:
        return skills.train_until(goal, name, flags, int(steps / times), int(every / times),
                                  script), False
    except SystemExit:
        last = list(read_rows(skills.RUNS / "runs" / name / "metrics.jsonl"))[-PATIENCE:]
        if not last or not all(row["skipped_steps"] for row in last):
            raise
        return 0.0, True


def by_evaluation(folder: Path) -> dict[str, list[int]]:
    """Letter -> its right answers in each held-out evaluation, of 4 problems x 8."""
    counts = {}
    for row in read_rows(folder / "answers.jsonl"):
        of_step = counts.setdefault(row["step"], dict.fromkeys(problems.LETTERS, 0))
        of_step[LETTER.search(row["problem"])[1]] += row["right"]
    return {letter: [of_step[letter] for of_step in counts.values()] for letter in problems.LETTERS}


def by_draws(folder: Path) -> dict[str, list]:
    """Letter -> a row for each window of WINDOW draws, of the prompts met in it:

    [prompts, silent and wrong, silent and right, answers of first rounds, right ones of these]

    Nobody chose first rounds, so their share of right answers is the pass rate.
    """
    drawn, found = 0, {letter: [] for letter in problems.LETTERS}
    for group in read_rows(folder / "groups.jsonl"):
        windows = found[LETTER.search(group["prompt"])[1]]
        first = [sample for sample in group["pool"] if sample["round"] == 0]
        silent = not any(sample.get("coefficient") for sample in group["pool"])
        right = any(sample["reward"] for sample in group["pool"])
        facts = (1, silent and not right, silent and right, len(first),
                 sum(bool(sample["reward"]) for sample in first))
        while len(windows) <= drawn // WINDOW:
            windows.append([0] * len(facts))
        windows[-1] = [a + b for a, b in zip(windows[-1], facts)]
        drawn += len(group["pool"])
    return found


def train_all(processes: int) -> None:
    """The primary pair first, then the other arms, then one factor at a time in both of the pair.
    """
    def train_missing(jobs):
        study.train_missing(STUDY, {run_name(*job): job for job in jobs}, train, processes)
        return study.load(STUDY)

    rates = {}
    for arms in (PAIR, *([arm] for arm in ARMS if arm not in PAIR)):
        if arms[0] in SLOWER:
            rates |= SLOWER
        else:
            rates |= skills.tune(train_missing, arms, RATES, TUNING_SEEDS, "long", PRIMARY)
        train_missing([(arm, "long", rates[arm], seed) for seed in SEEDS for arm in arms])
    for factor in FACTORS:
        if factor == "sgd":  # it needs rates of its own
            seed = TUNING_SEEDS[0]
            lines = train_missing([(arm, factor, lr, seed) for lr in SGD_RATES for arm in PAIR])
            rates = {arm: skills.best(lines, arm, [seed], factor, PRIMARY) for arm in PAIR}
        train_missing([(arm, factor, rates[arm], seed) for seed in SOME_SEEDS for arm in PAIR])


# ------------------------------------------------------------------------------------------- tables
def difference(lines, first, second, draws, regime="long", seeds=SEEDS, quantiles=T_95) -> str:
    """Points by which `first` is ahead, with the plan's word."""
    mine = of(lines, seeds, regime=regime)
    one, other = ({line["seed"] for line in of(mine, arm=arm)} for arm in (first, second))
    if len(one & other) < 2:
        return "not run"
    return skills.in_points(*skills.compare(
        mine, first, second, lambda line: at(line, "samples", draws), quantiles))


def verdicts(lines: list[dict]) -> str:
    found = [["", "difference", "at equal draws", "points"],
             ["primary", " - ".join(PAIR), f"{PRIMARY:,}", difference(lines, *PAIR, PRIMARY)]]
    for first, second, draws in SECONDARY:
        found.append(["secondary, 99 %", f"{first} - {second}", f"{draws:,}",
                      difference(lines, first, second, draws, quantiles=T_99)])
    for first, second, draws in AFTERWARDS:
        found.append(["afterwards, 95 %", f"{first} - {second}", f"{draws:,}",
                      difference(lines, first, second, draws)])
    return study.markdown(found)


def factors(lines: list[dict]) -> str:
    """The pair with one thing changed: accuracies seed by seed; no verdict, says the plan."""
    found = [["changed", *(f"{arm}: rate, seeds 12, 13, 14" for arm in PAIR), "difference, points"]]
    for regime in ("long", *FACTORS):
        points = difference(lines, *PAIR, PRIMARY, regime, SOME_SEEDS).split(" points")[0]
        runs = [sorted(of(lines, SOME_SEEDS, arm=arm, regime=regime), key=lambda line: line["seed"])
                for arm in PAIR]
        cells = [", ".join([str(mine[0]["lr"]), *(f"{at(line, 'samples', PRIMARY):.0%}"
                                                  for line in mine)]) if mine else ""
                 for mine in runs]
        found.append(["nothing" if regime == "long" else regime, *cells, points])
    return study.markdown(found)


def tested(lines: list[dict], arm: str) -> list[dict]:
    return of(lines, SEEDS, arm=arm, regime="long")


def curves(lines: list[dict]) -> str:
    """Accuracy by draws: mean over the seeds, with the interval."""
    marks = sorted([*range(6_000, GOAL + 1, 6_000), PRIMARY, FURTHER])
    found = [["arm", "learning rate", *(f"{draws:,}" for draws in marks), "lost"]]
    for arm in ARMS:
        if not (mine := tested(lines, arm)):
            continue
        reached = min(line["evals"][-1]["samples"] for line in mine)
        cells = [shown([at(line, "samples", draws) for line in mine])
                 if draws <= reached else "" for draws in marks]
        found.append([arm, str(mine[0]["lr"]), *cells, skills.lost(mine, PRIMARY)])
    return study.markdown(found)


def by_budget(lines: list[dict]) -> str:
    """The pair's difference where one stops earlier or later. Seen, not tested."""
    budgets = (16_000, 24_000, CROSSING, 36_000, PRIMARY, 52_000, FURTHER)
    cells = [difference(lines, *PAIR, draws).split(" points")[0] for draws in budgets]
    return study.markdown([["draws", *(f"{draws:,}" for draws in budgets)],
                           [" - ".join(PAIR), *cells]])


def plateau(lines: list[dict]) -> str:
    """What an arm gains late, and whether letters have fallen silent or are known by then."""
    found = [["arm", "gain from 30,000 to 46,000 draws", "from 46,000 to 60,000",
              "of the last prompts: all wrong", "all right"]]
    for arm in PAIR:
        mine = tested(lines, arm)
        gains = [shown([at(line, "samples", end) - at(line, "samples", start) for line in mine])
                 for start, end in ((CROSSING, PRIMARY), (PRIMARY, FURTHER))]
        whole = FURTHER // WINDOW - 1  # the last window that every run has filled
        late = [windows[whole] for line in mine for windows in line["letters_by_draws"].values()
                if len(windows) > whole]  # else the letter was not met so late
        met, wrong, right, *_ = (sum(values) for values in zip(*late))
        found.append([arm, *gains, f"{wrong / met:.0%}", f"{right / met:.0%}"])
    return study.markdown(found)


def report(lines: list[dict]) -> str:
    rates = {arm: skills.tuned(lines, arm, TUNING_SEEDS, "long", PRIMARY) for arm in ARMS}
    tried = {arm: means for arm, means in rates.items() if means}
    return skills.as_page({
        "Verdicts": verdicts(lines), "Accuracy by draws": curves(lines),
        "The pair's difference, ± half the 95 % interval": by_budget(lines),
        "Does the curve stand still?": plateau(lines),
        "One factor at a time, at 46,000 draws (exploratory; sgd: rates times ten)": factors(lines),
        "Learning rates: mean of three other seeds at 46,000 draws": skills.rates_tried(tried)},
        lines)


def draw(lines: list[dict]) -> None:
    """Accuracy against draws: every run, and the mean of an arm."""
    import numpy as np

    figure, axis = study.panels(figsize=(5.5, 3))
    arms = (*PAIR, "uniform-16", "ada-pos-slower")
    for arm in [arm for arm in arms if tested(lines, arm)]:
        color = COLORS[arm.removesuffix("-slower")]
        grid = np.arange(0, (FURTHER if arm in PAIR else GOAL) + 1, 500)
        runs = [skills.spending(line) for line in tested(lines, arm)]
        curves = [[skills.interpolate(x, rows, "samples", "avg") for x in grid] for rows in runs]
        axis.plot(grid, np.transpose(curves), color=color, lw=0.5, alpha=0.5)
        axis.plot(grid, np.mean(curves, 0), color=color, lw=2, label=arm)
    axis.set(xlabel="draws", ylabel="held-out avg@8", ylim=(0, 1))
    axis.legend(frameon=False, fontsize=8)
    study.save(figure, STUDY)


def main() -> None:
    args = study.parser(__doc__).parse_args()
    if not args.draw:
        train_all(args.processes)
    lines = study.load(STUDY)
    if not tested(lines, PAIR[1]):
        raise SystemExit("The pair of the primary measure is not stored yet: run without --draw.")
    draw(lines)
    text = report(lines)
    (study.RESULTS / f"{STUDY}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
