"""Draws the pages of the studies of adaptive sampling, which have ended.

bench/plan.md was written before the runs. It says what is compared and which result counts as what.
For each run the evaluations are stored with the cost until then, and for the skills

    solved              letter -> answers sampled until its first right one
    letters             letter -> [prompts, answers, right answers, prompts without gradient]
    letters_by_draws    letter -> for each window of WINDOW answers, of the prompts in it:
                        [prompts, all wrong, all right]
"""
import json
import math
from functools import partial
from itertools import zip_longest
from statistics import mean, stdev

import store
from compare import picture
from store import (T_95, T_99, Study, at, average, by_arm, is_lost, markdown, of, paired, points,
                   power, shown, table)

from models import problems
from explorer.panels import literal, series

OURS, WIDE = PAIR = ("ada-balance", "uniform-4-wide")
RIVALS = ("uniform-4", "uniform-4-wide", "uniform-16")
COLORS = {
    "uniform-4": "#999999",
    "uniform-4-wide": "#56B4E9",
    "uniform-16": "#000000",
    "maxrl": "#D55E00",
    "dapo": "#E69F00",
    "ada-pos": "#009E73",
    "ada-balance": "#0072B2",
    "ada-est": "#009E73",
    "gvm": "#CC79A7"}
ARMS = tuple(COLORS)
COLORS["ada-pos-slower"] = COLORS["ada-pos"]
WINDOW = 4_000  # draws
COSTS = {"samples": "draws", "step": "training steps", "engine_steps": "engine steps",
         "r0.5": "modelled s, r = 0.5", "r2": "modelled s, r = 2",
         "seconds": "s of training here, two runs at a time"}


# -------------------------------------------------------------------------------- what both share
def tuned(lines, arms, seeds, regime: str, draws: int, label: str = "") -> str:
    """arm -> learning rate -> mean accuracy over the tuning seeds."""
    def cell(lr, mine):
        values = [at(line, "samples", draws) for line in of(mine, lr=lr)]
        return f"{mean(values):.1%}" if values else ""

    tried = by_arm(lines, arms, seeds, regime=regime)
    rates = sorted({line["lr"] for mine in tried.values() for line in mine})
    return table(tried, {f"{label}{lr}": partial(cell, lr) for lr in rates})


def accuracy(cost: str, budget: float):
    """A cell: mean and interval, if all of an arm's runs have spent so much."""
    def cell(mine):
        there = all(line["evals"][-1][cost] >= budget for line in mine)
        return shown([at(line, cost, budget) for line in mine]) if there else ""

    return cell


def rate(mine: list[dict]) -> str:
    return str(mine[0]["lr"])


def lost(draws: int):
    """A cell: how many runs are below their first accuracy after `draws` answers."""
    def cell(mine):
        runs = [line for line in mine if is_lost(line, at(line, "samples", draws))]
        return f"{len(runs)} of {len(mine)}"

    return cell


def gap(lines, first: str, second: str, cost: str, budget: float, **how) -> str:
    """Points by which the first arm is ahead at equal cost."""
    measure = ever_solved if cost == "solved" else partial(at, cost=cost, budget=budget)
    return points(paired(lines, first, second, measure), **how)


def draw(pictures: dict, lines: list[dict], name: str) -> None:
    """Accuracy against what was spent."""
    for about, (size, regime, arms, seeds, axes) in pictures.items():
        found = by_arm(lines, arms, seeds, regime=regime)
        columns = {f"against {COSTS[cost]}" if len(axes) > 1 else "": (
            COSTS[cost], (cost, most), found) for cost, most in axes.items()}
        path = store.RESULTS / f"{name}{about}.png"
        picture(path, size, {"held-out avg@8": curve}, columns, COLORS)


def curve(line: dict, until: tuple) -> tuple:
    """Its accuracy until so much is spent."""
    cost, most = until
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
    ("1", "uniform-4", "step", True),
    ("2", "uniform-16", "samples", True),
    ("3", "uniform-4-wide", "samples", False),
    ("4", "uniform-4-wide", "r2", True),
    ("5", "uniform-4", "solved", True),
    ("6", "uniform-16", "engine_steps", False)]
EXPLORED = [  # in addition to the hypotheses: ada-balance's rival, what is equal, how much of it
    *((rival, "step", steps) for rival in ("uniform-4", "uniform-16") for steps in (STEPS, 60)),
    ("uniform-4-wide", "step", STEPS), ("uniform-4", "samples", DRAWS),
    *(("uniform-4-wide", "samples", draws) for draws in (8_000, 12_000, DRAWS)),
    *((rival, "trained", None) for rival in RIVALS)]  # None: the most that every run had spent
AXES = {"samples": DRAWS, "step": 60}  # of the pictures, and how far they go
PICTURES = {  # bench/results/NAME*.png -> size, regime, arms, the seeds that all have, axes
    f"-{about}": ((8, 2.9), "stream", arms, seeds, AXES) for about, arms, seeds in (
        ("uniform", RIVALS, NEW_SEEDS), ("ada-balance", (*RIVALS[:2], OURS), NEW_SEEDS),
        ("dapo", ("uniform-4", "dapo"), SEEDS), ("ada-pos", ("uniform-4", "ada-pos"), SEEDS),
        ("others", ("uniform-4", "maxrl", "ada-est", "gvm"), SEEDS))}


def modelled(row: dict) -> dict[str, float]:
    """Seconds on a GPU whose decode step takes 20 ms, and 1 + r times that for 64 responses.

    A trained token costs three times what a decoded one adds. r = 2: about the paper's share.
    """
    tokens = row["tokens"] + 3 * row["trained"]
    return {f"r{r}": 0.02 * (row["engine_steps"] + r / 64 * tokens) for r in (0.5, 2)}


def budget_of(cost: str, lines: list[dict]) -> float:
    """The answers and steps of the plan, else the most that every run had spent within DRAWS."""
    fixed = dict(samples=DRAWS, step=STEPS, solved=FIRST_DRAWS)
    return fixed.get(cost) or min(at(line, "samples", DRAWS, key=cost) for line in lines)


def ever_solved(line: dict) -> float:
    """Share of the letters below 0.05 with a right answer within FIRST_DRAWS answers."""
    letters = [x for x in problems.LETTERS if problems.belief(x) < 0.05]
    return mean(line["solved"].get(x, math.inf) <= FIRST_DRAWS for x in letters)


def by_regime(lines: list[dict]) -> list[list[dict]]:
    return [of(lines, regime=regime) for regime in REGIMES]


def in_both(lines, first: str, rival: str, cost: str, budget=None, **how) -> list[str]:
    """The difference in each regime; budget None: what `budget_of` says."""
    return [gap(mine, first, rival, cost, budget or budget_of(cost, mine), **how)
            for mine in by_regime(lines)]


def verdicts(lines: list[dict]) -> str:
    found = [["hypothesis", "difference", "at equal", *REGIMES, "confirmed"]]
    for number, rival, cost, wanted in HYPOTHESES:
        cells = in_both(lines, OURS, rival, cost)
        agreeing = sum(cell.endswith("ahead") == wanted for cell in cells)
        label = COSTS.get(cost, f"draws: share of letters solved in {FIRST_DRAWS:,}")
        said = ("not", "in part", "yes")[agreeing]
        found.append([number, f"{OURS} - {rival}", label, *cells, said])
    return markdown(found)


def explored(lines: list[dict], rows) -> str:
    found = [["difference", "at equal", *REGIMES]]
    for first, rival, cost, budget in rows:
        label = f"{budget:,} {COSTS[cost]}" if budget else "tokens trained"
        cells = in_both(lines, first, rival, cost, budget, verdict=False)
        found.append([f"{first} - {rival}", label, *cells])
    return markdown(found)


def every_cost(lines: list[dict]) -> str:
    budgets = {cost: budget_of(cost, lines) for cost in COSTS}
    return table(by_arm(lines, ARMS), {
        "learning rate": rate,
        "draws per step": average(".0f", lambda line: (
            line["evals"][-1]["samples"] / line["evals"][-1]["step"])),
        "no signal": average(".0%", lambda line: line["zero_signal"]),
        **{f"at {budgets[cost]:,.0f} {label}": accuracy(cost, budgets[cost])
           for cost, label in COSTS.items()},
        "letters below 0.05 ever solved": lambda mine: shown(list(map(ever_solved, mine))),
        "lost: below the start": lost(DRAWS)})


def skills_tables(lines: list[dict]) -> dict[str, str]:
    for row in (row for line in lines for row in line["evals"]):
        row |= modelled(row)
    tested, new = ([line for mine in by_regime(lines) for line in of(mine, seeds)]
                   for seeds in (SEEDS, NEW_SEEDS))
    return {
        "The plan's hypotheses": verdicts(tested),
        "Again, by seven new seeds": verdicts(new),
        "By all twelve seeds": verdicts(tested + new),
        "Other budgets, by the seven new seeds: points, no hypothesis": explored(
            new, [(OURS, *row) for row in EXPLORED]),
        "Other rules, by the five seeds: points, no hypothesis": explored(
            tested, [(arm, "uniform-4", "samples", DRAWS) for arm in ("ada-est", "gvm")]),
        **{f"Regime {regime}": every_cost(mine)
           for regime, mine in zip(REGIMES, by_regime(tested))},
        "Learning rates: mean of two other seeds, at equal draws": tuned(
            lines, ARMS, TUNING_SEEDS, "stream", DRAWS, label="learning rate ")}


# ------------------------------------------------------------------------------ the longer study
PRIMARY = 46_000  # draws
GOAL = 48_000  # answers that every run reached
FURTHER = 60_000  # answers of the primary pair's tested runs
CROSSING = 30_000
LONG_SEEDS, LONG_TUNING, SOME_SEEDS = range(12, 22), range(102, 105), range(12, 15)
SLOWER = ("ada-pos-slower", "ada-balance-cap-slower")  # added later: nothing tuned
LONG = (*PAIR, "ada-balance-cap", "ada-pos", "uniform-16", "uniform-4", "dapo", *SLOWER)
LONG_PICTURE = {"": ((5.5, 3), "long", (*PAIR, "uniform-16", "ada-pos-slower"), LONG_SEEDS,
                     {"samples": FURTHER})}
FACTORS = ("long", "half", "double", "fourfold", "four-minis", "sgd")  # changed in both of PAIR
COMPARED = [  # first, second, draws
    ("primary", T_95, [(*PAIR, PRIMARY)]),
    ("secondary, 99 %", T_99, [
        ("ada-balance-cap", WIDE, PRIMARY),
        ("ada-pos", WIDE, PRIMARY),
        (OURS, "uniform-16", PRIMARY),
        (OURS, "uniform-4", PRIMARY),
        (OURS, WIDE, CROSSING)]),
    ("afterwards, 95 %", T_95, [
        *((arm, rival, PRIMARY) for arm in SLOWER for rival in reversed(PAIR)),
        (OURS, "dapo", PRIMARY)])]
EARLIER = [("seen, 95 %", T_95, [
    (OURS, "uniform-4", DRAWS),
    (OURS, "uniform-16", DRAWS),
    ("ada-pos-slower", WIDE, DRAWS)])]


def differences(lines: list[dict], rows) -> str:
    return markdown([["", "difference", "at equal draws", "points"], *(
        [title, f"{first} - {second}", f"{draws:,}",
         gap(lines, first, second, "samples", draws, quantiles=quantiles)]
        for title, quantiles, pairs in rows for first, second, draws in pairs)])


def pair(draws: int):
    """The pair's difference, without a conclusion, as the plan requires."""
    return lambda mine: gap(mine, *PAIR, "samples", draws, verdict=False)


def seed_by_seed(arm: str):
    """Its learning rate, and its accuracies."""
    def cell(mine):
        mine = by_arm(mine, [arm])[arm]
        return ", ".join([rate(mine), *(f"{at(line, 'samples', PRIMARY):.0%}" for line in mine)])

    return cell


def gain(start: int, end: int):
    return lambda mine: shown(
        [at(line, "samples", end) - at(line, "samples", start) for line in mine])


def one_run(seed: int):
    """A run's accuracy at PRIMARY; for a collapsed run also its best accuracy."""
    def cell(mine):
        line, = of(mine, [seed])
        end, best = at(line, "samples", PRIMARY), max(row["avg"] for row in line["evals"])
        return f"{end:.1%} (best {best:.1%})" if is_lost(line, end) else f"{end:.1%}"

    return cell


def silence(start: int, end: int, said: str):
    """A cell: `said` of the prompts between so many draws, if all runs went so far.

    wrong, right: the share of prompts with only such answers.
    """
    def cell(mine):
        if end > min(line["evals"][-1]["samples"] for line in mine):
            return ""
        rows = [row for line in mine for windows in line["letters_by_draws"].values()
                for row in windows[start // WINDOW:end // WINDOW]]
        met, wrong, right = (sum(row[i] for row in rows) for i in range(3))  # some have more
        return said.format(wrong=wrong / met, right=right / met, silent=(wrong + right) / met,
                           of_these=wrong / (wrong + right))

    return cell


def long_tables(lines: list[dict]) -> dict[str, str]:
    tested = of(lines, LONG_SEEDS, regime="long")
    arms = by_arm(tested, LONG)
    marks = sorted([*range(6_000, GOAL + 1, 6_000), PRIMARY, FURTHER])
    budgets = (16_000, 24_000, CROSSING, 36_000, PRIMARY, 52_000, FURTHER)
    spans = ((0, 8_000), (32_000, GOAL), (FURTHER - WINDOW, FURTHER))
    changed = {factor.replace("long", "nothing"): of(lines, SOME_SEEDS, regime=factor)
               for factor in FACTORS}
    return {
        "Verdicts": differences(tested, COMPARED),
        "Accuracy by draws": table(arms, {
            "learning rate": rate, **{f"{draws:,}": accuracy("samples", draws) for draws in marks},
            "lost": lost(PRIMARY)}),
        "The pair's difference, ± half the 95 % interval": table(
            {" - ".join(PAIR): tested}, {f"{draws:,}": pair(draws) for draws in budgets}, "draws"),
        "Earlier": differences(tested, EARLIER),
        "Run by run: accuracy at 46,000 draws by seed": table(
            arms, {str(seed): one_run(seed) for seed in LONG_SEEDS}),
        "Does the curve stand still?": table({arm: arms[arm] for arm in PAIR}, {
            "gain from 30,000 to 46,000 draws": gain(CROSSING, PRIMARY),
            "from 46,000 to 60,000": gain(PRIMARY, FURTHER),
            "of the last prompts: all wrong": silence(*spans[-1], "{wrong:.0%}"),
            "all right": silence(*spans[-1], "{right:.0%}")}),
        "Silent prompts: their share, and how many of these are all wrong": table(arms, {
            f"{start:,} to {end:,} draws": silence(start, end, "{silent:.0%}, {of_these:.0%}")
            for start, end in spans}),
        "One factor at a time, at 46,000 draws (exploratory; sgd: rates times ten)": table(
            changed, {**{f"{arm}: rate, seeds 12, 13, 14": seed_by_seed(arm) for arm in PAIR},
                      "difference, points": pair(PRIMARY)}, "changed"),
        "Learning rates: mean of three other seeds at 46,000 draws": tuned(
            lines, LONG, LONG_TUNING, "long", PRIMARY)}


# ---------------------------------------------------------------------------------- a real model
HUMAN = ("ada-balance", "uniform-4", "ada-pos")
BOTH = {"templates": "builtin-words", "people's problems (SVAMP)": "svamp_test.jsonl"}
RACE_COSTS = {"draws": "samples", "tokens drawn": "tokens", "tokens trained": "trained"}
HUMAN_COSTS = {"draws": "samples", "tokens trained": "trained", "seconds": "seconds"}


def draw_sets(arms, lines: list[dict], name: str) -> None:
    """Accuracy on each held-out set against sampled answers."""
    def on(title):
        return lambda line, cost: series([row | row["sets"] for row in line["evals"]], title, cost)

    sets = lines[0]["evals"][0]["sets"]
    measures = {f"accuracy on {literal(title)}": on(title) for title in sets}
    columns = {"": ("samples drawn", "samples", by_arm(lines, arms))}
    picture(store.RESULTS / f"{name}.png", (6, 5.4), measures, columns, COLORS)


def draw_way(lines: list[dict], name: str) -> None:
    """From templates to problems that people wrote: accuracy on both."""
    def accuracy(run, x):
        line, data = run
        return series([row for row in line["evals"] if row["data"] == data], "avg", x)

    afterwards = json.loads((store.RESULTS / "transfer.json").read_text())  # of the same seeds
    stages = {"1. templates (make real)": lines + afterwards,
              "2. then problems that people wrote": store.load("human_longer")}
    columns = {title: ("training steps", "step", {
        label: [(line, data) for line in runs] for label, data in BOTH.items()})
        for title, runs in stages.items()}
    picture(store.RESULTS / f"{name}.png", (8, 3.2), {"held-out accuracy": accuracy}, columns)


def real_tables(arms, rival: str, costs: dict, lines: list[dict]) -> dict[str, str]:
    """Against `rival` at equal costs, what was spent, and what could be found."""
    arms = by_arm(lines, arms)
    against = {arm: mine for arm, mine in arms.items() if arm != rival}
    pairs = at_most(arms[rival], "samples", arms[OURS])[0]
    columns = taken(costs, lines[0]["evals"][-1].get("sets", ()))
    if lines[0]["evals"][0]["step"]:  # --no-eval-first
        del columns["before"]
    found = {
        "Differences": table(against, {
            f"at equal {cost}": partial(minus, arms[rival], key)
            for cost, key in (costs | {"steps": "step"}).items()}, corner=f"minus {rival}"),
        "What the runs took": table(arms, columns)}
    if "prompts" in lines[0]["metrics"][0]:  # two studies are older than this
        title = "Of 1,000 draws: prompts with a signal, and prompts resolved within some rounds"
        within = {f"within {rounds}": resolved(rounds) for rounds in range(1, 5)}
        found[title] = table(arms, {
            "with a signal": with_signal, **within, "by the fourth alone": resolved(4, beyond=3)})
    if len(pairs) > 1:  # not yet of a study's first seed
        title = "Power: with such differences, how many of 100 studies find a true one"
        found[title] = markdown([
            ["standard deviation", *(f"{true} points" for true in (3, 5, 8, 10))],
            [f"{100 * stdev(pairs):.1f}", *(
                f"{100 * power(true / 100, stdev(pairs), len(pairs)):.0f}"
                for true in (3, 5, 8, 10))]])
    return found


def taken(costs: dict, sets) -> dict:
    def last(key, form=",.0f"):
        return average(form, lambda line: line["evals"][-1][key])

    return {
        "runs": lambda mine: str(len(mine)),
        "before": average(".1%", lambda line: line["evals"][0]["avg"]),
        "at the end": last("avg", ".1%"),
        **{f"on {name}": average(".1%", lambda line, name=name: line["evals"][-1]["sets"][name])
           for name in sets},
        **{cost: last(key) for cost, key in costs.items()},
        "silent prompts": average(".0%", lambda line: mean(
            step["zero_signal"] for step in line["metrics"])),
        "minutes of a core": average(".0f", lambda line: line["cpu_seconds"] / 60)}


def with_signal(mine: list[dict]) -> str:
    found = sum(step["prompts"] * (1 - step["zero_signal"])
                for line in mine for step in line["metrics"])
    return f"{1_000 * found / sum(line['evals'][-1]['samples'] for line in mine):.0f}"


def resolved(rounds: int, beyond: int = 0):
    """A cell: what these rounds found, without the first `beyond`. "": a rule without rounds.

    A prompt ends before its last round only if it is resolved (plainly: with no other limit).
    """
    def cell(mine):
        steps = [step for line in mine for step in line["metrics"]]
        ended = [sum(each) for each in zip_longest(
            *(step["rounds_histogram"] for step in steps), fillvalue=0)]
        if len(ended) < max(2, rounds):
            return ""
        left = sum(step["prompts"] * step["unresolved"] for step in steps)
        found = sum(ended[beyond:rounds]) - left * (rounds == len(ended))
        asked = sum(sum(ended[r:]) for r in range(beyond, rounds))  # prompts, round by round
        M = (sum(line["evals"][-1]["samples"] for line in mine)
             / sum(r * prompts for r, prompts in enumerate(ended, 1)))
        return f"{1_000 * found / (M * asked):.0f}"

    return cell


def at_most(rival: list[dict], cost: str, ours: list[dict]) -> tuple[list[float], float]:
    """Differences where all of these runs have been, and where that is."""
    budget = min(line["evals"][-1][cost] for line in ours + rival)
    return paired(ours + rival, ours[0]["arm"], rival[0]["arm"],
                  partial(at, cost=cost, budget=budget)), budget


def minus(rival: list[dict], cost: str, mine: list[dict]) -> str:
    """Points by which an arm is ahead at equal cost, with the plan's word."""
    values, budget = at_most(rival, cost, mine)
    return f"{points(values)} (at {budget:,})"


human_tables = partial(real_tables, HUMAN, "uniform-4", HUMAN_COSTS)
STUDIES = dict(
    skills=Study(skills_tables, partial(draw, PICTURES)),
    longer_skills=Study(long_tables, partial(draw, LONG_PICTURE)),
    real_race=Study(partial(real_tables, PAIR, WIDE, RACE_COSTS)),
    human=Study(human_tables, partial(draw_sets, HUMAN)),
    human_gpu=Study(human_tables, partial(draw_sets, HUMAN)),
    qwen=Study(human_tables))
