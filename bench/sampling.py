"""Where does adaptive sampling pay? The studies skills, longer_skills, real_race, human.

What is compared, at which costs, and what counts as which answer was written down before the first
runs: bench/plan.md. Names are the plan's. A line of the skills' studies has

    evals     the evaluations, each with what had been spent by then
    solved    letter -> draws until its first right answer
    letters   letter -> [prompts met, draws, right answers, silent prompts]
"""
import functools
import json
import math
import os
import re
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev

import skills_theory
import store
from common import ROOT
from compare import picture
from store import (T_95, T_99, Run, Study, as_page, at, interpolate, interval, markdown, of,
                   paired, points, power, shown, word)

from parts import problems
from parts.folder import read_rows
from parts.plot import series

RULES = {  # arm -> flags, prompts a step
    "uniform-4": ("--sampler uniform --n 4", 16),
    "uniform-4-wide": ("--sampler uniform --n 4", 74),
    "uniform-16": ("--sampler uniform --n 16", 16),
    "maxrl": ("--sampler uniform --n 16 --weighting log", 16),
    "dapo": ("--sampler dapo --n 4", 16),
    "ada-pos": ("--sampler ada-pos", 16),
    "ada-balance": ("--sampler ada-balance", 16),
    "ada-balance-cap": ("--sampler ada-balance --max-rounds-all-correct 1", 16),
    "ada-est": ("--sampler ada-est --M 8", 16),
    "gvm": ("--sampler gvm --M 8", 16),
}
COLORS = dict(zip(RULES, ("#999999", "#56B4E9", "#000000", "#D55E00", "#E69F00", "#009E73",
                          "#0072B2", "#0072B2", "#009E73", "#CC79A7")))
OURS, WIDE = PAIR = ("ada-balance", "uniform-4-wide")
RIVALS = ("uniform-4", "uniform-4-wide", "uniform-16")
LETTER = re.compile(r"\d([A-Za-z])\d=\?")
COSTS = {"samples": "draws", "step": "training steps", "engine_steps": "engine steps",
         "r0.5": "modelled s, r = 0.5", "r2": "modelled s, r = 2",
         "seconds": "s of training here, two runs at a time"}


# --------------------------------------------------------------------------- a run of the skills
PROMPTS = {"half": 0.5, "double": 2, "fourfold": 4}  # a step, times this


def again(line: dict) -> Run:
    """The run that became this line, whose last step was found as it went on.

    regime "few": 192 problems over and over; "half" to "sgd" (which takes ten times the rate): one
    factor of the longer study is changed.
    """
    arm, regime, lr, seed = (line[key] for key in ("arm", "regime", "lr", "seed"))
    flags, prompts = RULES[arm.removesuffix("-slower")]
    steps = [row["step"] for row in line["evals"]]
    flags = (f"--model tiny-skills --eval-data builtin-skills --eval-questions 192 {flags} "
             f"--max-tokens 16 --log-groups all --lr {lr} --seed {seed} "
             f"--batch-prompts {int(prompts * PROMPTS.get(regime, 1))} --data "
             f"{few() if regime == 'few' else 'builtin-skills'}").split()
    flags += ["--mini-batches", "4"] if regime == "four-minis" else []
    return Run(line["run"], dict(arm=arm, regime=regime, lr=lr, seed=seed), flags,
               steps[-1], every=steps[1],
               script=["bench/sgd.py"] if regime == "sgd" else ["minirl.py"])


@functools.cache
def few() -> Path:
    """The fixed training problems of the regime "few"."""
    file = ROOT / "runs/skills/few.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in problems.skills("train", 192)))
    return file


def keep_letters(folder, run=None, end="") -> dict:
    metrics = list(read_rows(folder / "metrics.jsonl"))
    return dict(metrics={}, evals=store.columns(spent(folder, metrics)),
                zero_signal=mean(step["zero_signal"] for step in metrics),
                **letters_of(read_rows(folder / "groups.jsonl")))


def spent(folder, metrics: list[dict]):
    """The evaluations, with what had been spent by then.

    avg: of several held-out sets the mean. engine_steps: of the sampling; trained: response tokens
    of samples with a coefficient.
    """
    for step, sets in groupby(read_rows(folder / "eval.jsonl"), lambda row: row["step"]):
        row, *others = sets
        past = [each for each in metrics if each["step"] <= step]
        yield dict(step=step, avg=mean(one["avg"] for one in (row, *others)),
                   samples=row["samples_total"],
                   tokens=row["tokens_total"], seconds=row["seconds_total"],
                   engine_steps=sum(step["engine_steps"] for step in past),
                   trained=sum(step.get("tokens_trained", 0) for step in past),
                   **(dict(sets={one["data"]: one["avg"] for one in (row, *others)})
                      if others else {}))


def letters_of(groups) -> dict:
    """`solved` counts draws prompt by prompt: counted by whole steps, rules with large steps would
    have fewer."""
    drawn, solved, letters = 0, {}, {}
    for group in groups:
        letter, pool = LETTER.search(group["prompt"])[1], group["pool"]
        drawn += len(pool)
        right = sum(bool(sample["reward"]) for sample in pool)
        if right:
            solved.setdefault(letter, drawn)
        facts = 1, len(pool), right, is_silent(pool)
        letters[letter] = [a + b for a, b in zip(letters.get(letter, [0] * 4), facts)]
    return dict(solved=solved, letters=letters)


def is_silent(pool: list[dict]) -> bool:
    return not any(sample.get("coefficient") for sample in pool)


# -------------------------------------------------------------------------------- what both share
def rates_tried(lines: list[dict], arms, seeds, regime: str, draws: int, label: str = "") -> str:
    """A table of arm -> learning rate -> mean accuracy over the tuning seeds."""
    found = {}
    for line in of(lines, seeds, regime=regime):
        own = found.setdefault(line["arm"], {})
        own.setdefault(line["lr"], []).append(at(line, "samples", draws))
    rates = sorted({lr for means in found.values() for lr in means})
    rows = [[arm, *(f"{mean(found[arm][lr]):.1%}" if lr in found[arm] else "" for lr in rates)]
            for arm in arms if arm in found]
    return markdown([["arm", *(f"{label}{lr}" for lr in rates)], *rows])


def by_arm(arms: dict[str, list], columns: dict) -> str:
    """A row for each arm, a cell for each column: what its function says of the arm's runs."""
    rows = [[arm, *(cell(mine) for cell in columns.values())] for arm, mine in arms.items()]
    return markdown([["arm", *columns], *rows])


def runs_of(lines: list[dict], arms, seeds, **wanted) -> dict[str, list]:
    """arm -> its runs by seed, of those arms that have any."""
    lines = sorted(of(lines, seeds, **wanted), key=lambda line: line["seed"])
    return {arm: mine for arm in arms if (mine := of(lines, arm=arm))}


def accuracy(cost: str, budget: float):
    """A cell: mean and interval, if all of an arm's runs have spent so much."""
    return lambda mine: shown([at(line, cost, budget) for line in mine]) if all(
        line["evals"][-1][cost] >= budget for line in mine) else ""


def average(form: str, fact):
    """A cell: the mean of fact(line) over an arm's runs."""
    return lambda mine: format(mean(map(fact, mine)), form)


def rate(mine: list[dict]) -> str:
    return str(mine[0]["lr"])


def lost(draws: int):
    """How many runs are below their start after so many draws."""
    return lambda mine: "{} of {}".format(
        sum(at(line, "samples", draws) < line["evals"][0]["avg"] for line in mine), len(mine))


def gap(lines: list[dict], first: str, second: str, cost: str, budget: float, **how) -> str:
    """Points by which the first arm is ahead."""
    return points(paired(lines, first, second, lambda line: at(line, cost, budget)), **how)


def curves(arms: dict[str, list], cost: str, most: float) -> dict[str, list]:
    return {arm: [curve(line, cost, most) for line in mine] for arm, mine in arms.items()}


def curve(line: dict, cost: str, most: float) -> tuple:
    """Accuracy until so much is spent."""
    rows = [row for row in line["evals"] if row[cost] < most]
    if len(rows) < len(line["evals"]):
        rows.append({cost: most, "avg": at(line, cost, most)})
    return series(rows, "avg", cost)


# ---------------------------------------------------------------------------------------- skills
DRAWS = 16_000  # the budget of the primary measure
STEPS = 40  # of the comparison at equal steps
FIRST_DRAWS = 4_000  # within which a letter counts as solved
SEEDS, TUNING_SEEDS = range(5), (100, 101)
NEW_SEEDS = range(5, 12)  # of the plan's second sample, for the arms of its hypotheses
REGIMES = ("stream", "few")
HYPOTHESES = [  # number, ada-balance's rival, what is equal, is ada-balance held to be ahead?
    ("1", "uniform-4", "step", True), ("2", "uniform-16", "samples", True),
    ("3", "uniform-4-wide", "samples", False), ("4", "uniform-4-wide", "r2", True),
    ("5", "uniform-4", "solved", True), ("6", "uniform-16", "engine_steps", False)]
EXPLORED = [  # beside the hypotheses: ada-balance's rival, what is equal, how much of it
    *((rival, "step", steps) for rival in ("uniform-4", "uniform-16") for steps in (STEPS, 60)),
    ("uniform-4-wide", "step", STEPS), ("uniform-4", "samples", DRAWS),
    *(("uniform-4-wide", "samples", draws) for draws in (8_000, 12_000, DRAWS)),
    *((rival, "trained", None) for rival in RIVALS)]  # None: the most that every run had spent
PICTURES = {  # bench/results/skills-NAME.png -> its arms, and the seeds that all of them have
    "uniform": (RIVALS, NEW_SEEDS), "dapo": (("uniform-4", "dapo"), SEEDS),
    "ada-pos": (("uniform-4", "ada-pos"), SEEDS), "ada-balance": ((*RIVALS[:2], OURS), NEW_SEEDS),
    "others": (("uniform-4", "maxrl", "ada-est", "gvm"), SEEDS)}


def modelled(row: dict) -> dict[str, float]:
    """Seconds on a GPU whose decode step takes 20 ms, and 1 + r times that for 64 responses.

    A trained token (forward and backward) costs three times what a decoded one adds. r = 2: about
    the share in the paper's runs. r = 0, a GPU so empty that only its steps count, is engine steps.
    """
    return {f"r{r}": 0.02 * (row["engine_steps"] + r / 64 * (row["tokens"] + 3 * row["trained"]))
            for r in (0.5, 2)}


def equal(cost: str, lines: list[dict]):
    """The measure of a run at equal cost."""
    budget = cost != "solved" and budget_of(cost, lines)
    return ever_solved if cost == "solved" else lambda line: at(line, cost, budget)


def budget_of(cost: str, lines: list[dict]) -> float:
    """What is compared at: the plan's draws and steps, else the most that every run had spent
    within DRAWS."""
    fixed = dict(samples=DRAWS, step=STEPS)
    return fixed.get(cost) or min(interpolate(DRAWS, line["evals"], "samples", cost)
                                  for line in lines)


def ever_solved(line: dict) -> float:
    """Share of the letters below 0.05 whose right answer was drawn within FIRST_DRAWS."""
    letters = [x for x in problems.LETTERS if problems.belief(x) < 0.05]
    return mean(line["solved"].get(x, math.inf) <= FIRST_DRAWS for x in letters)


def verdicts(lines: list[dict]) -> str:
    """The plan's hypotheses, each with its differences in both regimes."""
    found = [["hypothesis", "difference", "at equal", *REGIMES, "confirmed"]]
    for number, rival, cost, wanted in HYPOTHESES:
        differences = [paired(mine, OURS, rival, equal(cost, mine))
                       for mine in (of(lines, regime=regime) for regime in REGIMES)]
        agreeing = sum((word(*interval(values)) == "ahead") == wanted for values in differences)
        label = COSTS.get(cost, f"draws: share of letters solved in {FIRST_DRAWS:,}")
        found.append([number, f"{OURS} - {rival}", label, *map(points, differences),
                      ("not", "in part", "yes")[agreeing]])
    return markdown(found)


def explored(lines: list[dict], rows) -> str:
    """Differences at other budgets."""
    found = [["difference", "at equal", *REGIMES]]
    for first, rival, cost, budget in rows:
        cells = [gap(mine, first, rival, cost, budget or budget_of(cost, mine), verdict=False)
                 for mine in (of(lines, regime=regime) for regime in REGIMES)]
        label = f"{budget:,} {COSTS[cost]}" if budget else "tokens trained"
        found.append([f"{first} - {rival}", label, *cells])
    return markdown(found)


def every_cost(lines: list[dict], regime: str) -> str:
    lines = of(lines, regime=regime)
    budgets = {cost: budget_of(cost, lines) for cost in COSTS}
    return by_arm(runs_of(lines, RULES, SEEDS), {
        "learning rate": rate,
        "draws per step": average(".0f", lambda line: (
            line["evals"][-1]["samples"] / line["evals"][-1]["step"])),
        "no signal": average(".0%", lambda line: line["zero_signal"]),
        **{f"at {budgets[cost]:,.0f} {label}": accuracy(cost, budgets[cost])
           for cost, label in COSTS.items()},
        "letters below 0.05 ever solved": lambda mine: shown(list(map(ever_solved, mine))),
        "lost: below the start": lost(DRAWS)})


def skills_report(lines: list[dict]) -> str:
    for row in (row for line in lines for row in line["evals"]):
        row |= modelled(row)
    tested, new = ([line for regime in REGIMES for line in of(lines, seeds, regime=regime)]
                   for seeds in (SEEDS, NEW_SEEDS))
    still = {line["arm"]: line["letters"] for line in of(lines, regime="still")}
    return as_page({
        "The plan's hypotheses": verdicts(tested),
        "Again, by seven new seeds": verdicts(new),
        "By all twelve seeds": verdicts(tested + new),
        "Other budgets, by the seven new seeds: points, no hypothesis": explored(
            new, [(OURS, *row) for row in EXPLORED]),
        "Other rules, by the five seeds: points, no hypothesis": explored(
            tested, [(arm, "uniform-4", "samples", DRAWS) for arm in ("ada-est", "gvm")]),
        **{f"Regime {regime}": every_cost(tested, regime) for regime in REGIMES},
        "Learning rates: mean of two other seeds, at equal draws": rates_tried(
            lines, RULES, TUNING_SEEDS, "stream", DRAWS, label="learning rate "),
        "Theory and counts, of runs that stand still": skills_theory.predicted(still),
        "Theory: the signal of a draw": skills_theory.per_draw()}, lines)


def skills_draw(lines: list[dict], name: str) -> None:
    """Accuracy in the regime stream against draws and steps."""
    for about, (arms, seeds) in PICTURES.items():
        mine = runs_of(lines, arms, seeds, regime="stream")
        columns = {f"against {COSTS[cost]}": (COSTS[cost], [curves(mine, cost, most)])
                   for cost, most in (("samples", DRAWS), ("step", 60))}
        picture(f"{name}-{about}", (8, 2.9), ["held-out avg@8"], columns, COLORS)


# ------------------------------------------------------------------------------ the longer study
PRIMARY = 46_000  # draws
GOAL = 48_000  # draws that every run went to
FURTHER = 60_000  # draws of the primary pair's tested runs
CROSSING = 30_000
WINDOW = 4_000
LONG_SEEDS, LONG_TUNING, SOME_SEEDS = range(12, 22), range(102, 105), range(12, 15)
SLOWER = ("ada-pos-slower", "ada-balance-cap-slower")  # added later: nothing tuned
LONG = (*PAIR, "ada-balance-cap", "ada-pos", "uniform-16", "uniform-4", "dapo", *SLOWER)
FACTORS = (*PROMPTS, "four-minis", "sgd")  # exploratory: changed in both arms of the pair
COMPARED = [  # first, second, draws
    ("primary", T_95, [(*PAIR, PRIMARY)]),
    ("secondary, 99 %", T_99, [
        ("ada-balance-cap", WIDE, PRIMARY), ("ada-pos", WIDE, PRIMARY),
        (OURS, "uniform-16", PRIMARY), (OURS, "uniform-4", PRIMARY), (OURS, WIDE, CROSSING)]),
    ("afterwards, 95 %", T_95, [
        *((arm, rival, PRIMARY) for arm in SLOWER for rival in reversed(PAIR)),
        (OURS, "dapo", PRIMARY)])]
EARLIER = [("seen, 95 %", T_95, [
    (OURS, "uniform-4", DRAWS), (OURS, "uniform-16", DRAWS), ("ada-pos-slower", WIDE, DRAWS)])]


def keep_long(folder, run: Run, end: str) -> dict:
    line = dict(broken=bool(end)) | keep_letters(folder)
    if end:  # the run is over, and counts 0
        for cost, values in line["evals"].items():
            values.append(0.0 if cost == "avg" else max(values[-1], FURTHER))
    if run.about["regime"] == "long" and run.about["seed"] in LONG_SEEDS:
        line |= dict(letters_by_draws=by_draws(folder))
    return line


def by_draws(folder) -> dict[str, list]:
    """Letter -> a row for each window of WINDOW draws, of the prompts met in it:

    [prompts, silent and wrong, silent and right, answers of first rounds, right ones of these]

    Nobody chose first rounds, so their share of right answers is the pass rate.
    """
    drawn, found = 0, {letter: [] for letter in problems.LETTERS}
    for group in read_rows(folder / "groups.jsonl"):
        windows, pool = found[LETTER.search(group["prompt"])[1]], group["pool"]
        first = [bool(sample["reward"]) for sample in pool if sample["round"] == 0]
        silent, right = is_silent(pool), any(sample["reward"] for sample in pool)
        facts = 1, silent and not right, silent and right, len(first), sum(first)
        while len(windows) <= drawn // WINDOW:
            windows.append([0] * len(facts))
        windows[-1] = [a + b for a, b in zip(windows[-1], facts)]
        drawn += len(pool)
    return found


def difference(lines, first, second, draws, regime="long", seeds=LONG_SEEDS, **how) -> str:
    return gap(of(lines, seeds, regime=regime), first, second, "samples", draws, **how)


def differences(lines: list[dict], rows) -> str:
    return markdown([["", "difference", "at equal draws", "points"], *(
        [title, f"{first} - {second}", f"{draws:,}",
         difference(lines, first, second, draws, quantiles=quantiles)]
        for title, quantiles, pairs in rows for first, second, draws in pairs)])


def by_budget(lines: list[dict]) -> str:
    """The pair's difference where one stops earlier or later. Seen, not tested."""
    budgets = (16_000, 24_000, CROSSING, 36_000, PRIMARY, 52_000, FURTHER)
    cells = [difference(lines, *PAIR, draws, verdict=False) for draws in budgets]
    return markdown([["draws", *(f"{draws:,}" for draws in budgets)], [" - ".join(PAIR), *cells]])


def factors(lines: list[dict]) -> str:
    """The pair with one thing changed: accuracies seed by seed; no verdict, says the plan."""
    found = [["changed", *(f"{arm}: rate, seeds 12, 13, 14" for arm in PAIR), "difference, points"]]
    for factor in ("long", *FACTORS):
        mine = runs_of(lines, PAIR, SOME_SEEDS, regime=factor)
        cells = [", ".join([rate(mine[arm]), *(f"{at(line, 'samples', PRIMARY):.0%}"
                                               for line in mine[arm])]) if arm in mine else ""
                 for arm in PAIR]
        found.append(["nothing" if factor == "long" else factor, *cells, difference(
            lines, *PAIR, PRIMARY, factor, SOME_SEEDS, verdict=False)])
    return markdown(found)


def gain(start: int, end: int):
    return lambda mine: shown(
        [at(line, "samples", end) - at(line, "samples", start) for line in mine])


def reached(mine: list[dict]) -> float:
    """Draws of the shortest run."""
    return min(line["evals"][-1]["samples"] for line in mine)


def one_run(seed: int):
    """Its accuracy at PRIMARY; of a lost one also the best that it ever had."""
    def cell(mine):
        line, = of(mine, [seed])
        end, start = at(line, "samples", PRIMARY), line["evals"][0]["avg"]
        best = max(row["avg"] for row in line["evals"])
        return f"{end:.1%}" + f" (best {best:.1%})" * (end < start)

    return cell


def counted(mine: list[dict], start: int, end: int) -> tuple:
    """Of these runs' prompts between so many draws: all, silent and wrong, silent and right."""
    rows = [row for line in mine for windows in line["letters_by_draws"].values()
            for row in windows[start // WINDOW:end // WINDOW]]
    return tuple(sum(row[i] for row in rows) for i in range(3))


def silence(start: int, end: int, said):
    """A cell: said(prompts, silent and wrong, silent and right), if all runs went so far."""
    return lambda mine: said(*counted(mine, start, end)) if end <= reached(mine) else ""


def long_report(lines: list[dict]) -> str:
    arms = runs_of(lines, LONG, LONG_SEEDS, regime="long")
    if WIDE not in arms:
        raise SystemExit("The pair of the primary measure is not stored yet: run without --draw.")
    marks = sorted([*range(6_000, GOAL + 1, 6_000), PRIMARY, FURTHER])
    spans = ((0, 8_000), (32_000, GOAL), (FURTHER - WINDOW, FURTHER))
    return as_page({
        "Verdicts": differences(lines, COMPARED),
        "Accuracy by draws": by_arm(arms, {
            "learning rate": rate, **{f"{draws:,}": accuracy("samples", draws) for draws in marks},
            "lost": lost(PRIMARY)}),
        "The pair's difference, ± half the 95 % interval": by_budget(lines),
        "Earlier": differences(lines, EARLIER),
        "Run by run: accuracy at 46,000 draws by seed": by_arm(
            arms, {str(seed): one_run(seed) for seed in LONG_SEEDS}),
        "Does the curve stand still?": by_arm({arm: arms[arm] for arm in PAIR}, {
            "gain from 30,000 to 46,000 draws": gain(CROSSING, PRIMARY),
            "from 46,000 to 60,000": gain(PRIMARY, FURTHER),
            "of the last prompts: all wrong": silence(
                *spans[-1], lambda met, wrong, right: f"{wrong / met:.0%}"),
            "all right": silence(*spans[-1], lambda met, wrong, right: f"{right / met:.0%}")}),
        "Silent prompts: their share, and how many of these are all wrong": by_arm(
            arms, {f"{start:,} to {end:,} draws": silence(
                start, end, lambda met, wrong, right: (
                    f"{(wrong + right) / met:.0%}, {wrong / (wrong + right):.0%}"))
                for start, end in spans}),
        "One factor at a time, at 46,000 draws (exploratory; sgd: rates times ten)": factors(lines),
        "Learning rates: mean of three other seeds at 46,000 draws": rates_tried(
            lines, LONG, LONG_TUNING, "long", PRIMARY)}, lines)


def long_draw(lines: list[dict], name: str) -> None:
    arms = runs_of(lines, (*PAIR, "uniform-16", "ada-pos-slower"), LONG_SEEDS, regime="long")
    picture(name, (5.5, 3), ["held-out avg@8"],
            {"": ("draws", [curves(arms, "samples", FURTHER)])},
            COLORS | {"ada-pos-slower": COLORS["ada-pos"]})


# ---------------------------------------------------------------------------------- a real model
RACE = {  # arm -> prompts a step, steps: about 4,300 draws each
    "ada-balance": (16, 20), "uniform-4-wide": (54, 20), "ada-balance-cap": (16, 24),
    "uniform-16": (16, 17)}
RACE_COSTS = {"draws": "samples", "tokens drawn": "tokens", "tokens trained": "trained"}
HUMAN = {"ada-balance": (16, 40), "uniform-4": (58, 40), "ada-pos": (16, 48)}  # 9,300 draws each
HUMAN_COSTS = {"draws": "samples", "tokens trained": "trained", "seconds": "seconds"}


def real(arm: str, seed: int, table: dict, every: int, *flags) -> Run:
    prompts, steps = table[arm]
    flags = [*flags, *RULES[arm][0].split(), "--batch-prompts", str(prompts), "--log-groups", "0",
             "--seed", str(seed)]
    return Run(f"{arm}-seed{seed}", dict(arm=arm, seed=seed), flags, steps, every)


def race_runs() -> list[Run]:
    """The primary pair with all its seeds; then the others, a seed at a time."""
    return [real(arm, seed, RACE, 5, "--model", "SmolLM2-135M-Instruct")
            for arms in (PAIR, ("ada-balance-cap", "uniform-16"))
            for seed in range(40, 45) for arm in arms]


def human_runs() -> list[Run]:
    """Problems that people wrote, for the model that has learnt the templates (bench/plan.md).

    SVAMP: a folder with svamp_train.jsonl and svamp_test.jsonl; else they come from the hub.
    """
    folder = os.environ.get("SVAMP")
    train, test = (f"{folder}/svamp_{part}.jsonl" if folder else "svamp"
                   for part in ("train", "test"))
    return [real(arm, seed, HUMAN, 10, "--model", str(ROOT / "runs/words-135M"), "--data", train,
                 "--eval-data", f"builtin-words,{test}", "--eval-questions", "100", "--eval-k", "4",
                 "--template", "three-examples", "--max-tokens", "40", "--max-prompt-tokens", "320")
            for seed in range(50, 55) for arm in HUMAN]


def keep_real(folder, run: Run, end: str) -> dict:
    metrics = list(read_rows(folder / "metrics.jsonl"))
    return dict(metrics=store.columns(metrics, ("zero_signal",)),
                evals=store.columns(spent(folder, metrics)))


def real_report(table: dict, rival: str, costs: dict):
    """The page of a race against `rival`: at equal costs, what was spent, what could be found."""
    def report(lines: list[dict]) -> str:
        arms = runs_of(lines, table, None)
        against = {arm: mine for arm, mine in arms.items() if arm != rival}
        pairs = paired_at_most(arms[OURS], arms[rival], "samples")[0]
        return as_page({
            "Differences": by_arm(against, {
                f"at equal {cost}": minus(arms[rival], key)
                for cost, key in (costs | {"steps": "step"}).items()}).replace(
                    "| arm |", f"| minus {rival} |", 1),
            "What the runs took": by_arm(arms, taken(costs, lines[0]["evals"][-1].get("sets", ()))),
            "Power: with such differences, how many of 100 studies find a true one": markdown([
                ["standard deviation", *(f"{true} points" for true in (3, 5, 8, 10))],
                [f"{100 * stdev(pairs):.1f}", *(
                    f"{100 * power(true / 100, stdev(pairs), len(pairs)):.0f}"
                    for true in (3, 5, 8, 10))]])}, lines)

    return report


def taken(costs: dict, sets) -> dict:
    return {
        "runs": lambda mine: str(len(mine)),
        "before": average(".1%", lambda line: line["evals"][0]["avg"]),
        "at the end": average(".1%", lambda line: line["evals"][-1]["avg"]),
        **{f"on {name}": average(".1%", lambda line, name=name: line["evals"][-1]["sets"][name])
           for name in sets},
        **{cost: average(",.0f", lambda line, key=key: line["evals"][-1][key])
           for cost, key in costs.items()},
        "silent prompts": average(".0%", lambda line: mean(
            step["zero_signal"] for step in line["metrics"])),
        "minutes of a core": average(".0f", lambda line: line["cpu_seconds"] / 60)}


def paired_at_most(ours: list[dict], rival: list[dict], cost: str) -> tuple[list[float], float]:
    """Differences where all of these runs have been, and where that is."""
    budget = min(line["evals"][-1][cost] for line in ours + rival)
    values = paired(ours + rival, ours[0]["arm"], rival[0]["arm"],
                    lambda line: at(line, cost, budget))
    return values, budget


def minus(rival: list[dict], cost: str):
    """Points by which an arm is ahead at equal cost, with the plan's word."""
    def cell(mine):
        values, budget = paired_at_most(mine, rival, cost)
        return f"{points(values)} (at {budget:,})"

    return cell


def stored(study: str):
    """The table of a study whose rates were tuned as it went on: the runs that it has."""
    return lambda: [again(line) for line in store.load(study)]


STUDIES = dict(
    skills=Study(stored("skills"), keep_letters, skills_report, skills_draw),
    longer_skills=Study(stored("longer_skills"), keep_long, long_report, long_draw,
                        parts=True, endings=("gradient that is not finite",)),
    real_race=Study(race_runs, keep_real, real_report(RACE, WIDE, RACE_COSTS), parts=True),
    human=Study(human_runs, keep_real, real_report(HUMAN, "uniform-4", HUMAN_COSTS),
                parts=True))
