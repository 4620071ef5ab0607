"""Where does adaptive sampling pay? Nine ways of sampling on skills of very different pass rates.

    python bench/compare_skills.py --processes 2   # all; resumable
    python bench/compare_skills.py --draw          # only tables and picture, from what is stored

What is compared, at which costs, and what counts as which answer was written down before the first
run: docs/sampling_plan.md. Names here are the plan's.

A run lives in runs/skills. When it is done it becomes a line of bench/results/skills.jsonl (see
study.py), from which skills.md and skills.png are drawn. A line has, besides the evaluations,
what had been spent by then, `solved`: each letter's first right answer, in draws, and `letters`:
how often each was met, drawn, answered right, and silent.
"""
import json
import math
import re
from pathlib import Path
from statistics import mean

import skills_theory
import study
from study import of, shown

from parts import problems
from parts.files import read_rows

RUNS = study.ROOT / "runs" / "skills"

DRAWS = 16_000  # the budget of the primary measure
STEPS = 40  # of the comparison at equal steps
ALL_STEPS = 60  # which every run of the hypotheses' arms has, but for uniform-4-wide
FIRST_DRAWS = 4_000  # within which a letter counts as solved
STILL_STEPS, STILL_RATE = 90, 1e-9  # of the runs that count draws and signal by letter
SEEDS, TUNING_SEEDS = range(5), (100, 101)
NEW_SEEDS = range(5, 12)  # of the plan's second sample, for the arms of its hypotheses
RATES = (0.001, 0.002, 0.004)
BEYOND = {0.001: 0.0005, 0.004: 0.008}  # where an arm is best at either end
QUESTIONS = 192  # held out, and the training problems of the regime "few"; four of each letter
REGIMES = ("stream", "few")
OURS = "ada-balance"
RIVALS = ("uniform-4", "uniform-4-wide", "uniform-16")
ARMS = {  # name -> flags, steps that mostly reach DRAWS, steps between evaluations
    "uniform-4": (["--sampler", "uniform", "--n", "4"], 250, 40),
    "uniform-4-wide": (["--sampler", "uniform", "--n", "4", "--batch-prompts", "74"], 55, 10),
    "uniform-16": (["--sampler", "uniform", "--n", "16"], 63, 10),
    "maxrl": (["--sampler", "uniform", "--n", "16", "--weighting", "log"], 63, 10),
    "dapo": (["--sampler", "dapo", "--n", "4"], 90, 15),
    "ada-pos": (["--sampler", "ada-pos"], 75, 15),
    "ada-balance": (["--sampler", "ada-balance"], 60, 10),
    "ada-est": (["--sampler", "ada-est", "--M", "8"], 128, 20),
    "gvm": (["--sampler", "gvm", "--M", "8"], 66, 10),
}
HYPOTHESES = [  # number, ada-balance's rival, what is equal, is ada-balance held to be ahead?
    ("1", "uniform-4", "step", True), ("2", "uniform-16", "samples", True),
    ("3", "uniform-4-wide", "samples", False), ("4", "uniform-4-wide", "r2", True),
    ("5", "uniform-4", "solved", True), ("6", "uniform-16", "engine_steps", False)]
COLORS = dict(zip(ARMS, ("#999999", "#56B4E9", "#000000", "#D55E00", "#E69F00", "#F0E442",
                         "#0072B2", "#009E73", "#CC79A7")))
COMMON = ["--model", "tiny-skills", "--eval-data", "builtin-skills", "--max-tokens", "16",
          "--eval-questions", str(QUESTIONS), "--log-groups", "all", "--checkpoint-every", "0"]
LETTER = re.compile(r"\d([A-Za-z])\d=\?")
TOKENS = 8  # of every response
EQUAL = 0.03  # an interval around 0 within this is called equal


# ------------------------------------------------------------------------------------------ running
def train(arm: str, regime: str, lr: float, seed: int) -> None:
    """One run, resumed if it was interrupted; then a line of the study."""
    own, steps, every = ARMS[arm]
    if regime == "still":
        steps, every = STILL_STEPS, 0
    name = run_name(arm, regime, lr, seed)
    data = str(RUNS / "few.jsonl") if regime == "few" else "builtin-skills"
    flags = [*own, "--data", data, "--lr", str(lr), "--seed", str(seed)]
    seconds = train_until(DRAWS if every else 0, name, flags, steps, every)
    line = dict(run=name, arm=arm, regime=regime, lr=lr, seed=seed, cpu_seconds=round(seconds, 1))
    line |= fold(RUNS / "runs" / name)
    study.add("skills", line)
    print(f"{name}: {line['evals']['avg']}", flush=True)


def run_name(arm: str, regime: str, lr: float, seed: int) -> str:
    return f"{arm}-{regime}-{lr}-seed{seed}"


def train_until(draws: int, name: str, flags: list[str], steps: int, every: int,
                script: str = "minirl.py") -> float:
    """Train or resume a run, at first for `steps` steps; returns its seconds of a core.

    While it has drawn less than `draws`, as an adaptive rule that met few hard prompts, it goes on.
    """
    log = RUNS / "runs" / name / "metrics.jsonl"
    if every and log.exists():  # it was going on when it was interrupted
        steps = max(steps, -(-last_row(log)["step"] // every) * every)
    if "--batch-prompts" not in flags:
        flags = [*flags, "--batch-prompts", "16"]
    flags = [*COMMON, *flags, "--eval-every", str(every)]
    seconds = study.launch(RUNS, name, [*flags, "--steps", str(steps)], script)
    while draws and (done := last_row(log)["samples_total"]) < draws:
        missing = (draws - done) / done * steps  # a start costs as much as 60 steps
        steps += every * max(1, int(missing / every))
        seconds += study.launch(RUNS, name, [*flags, "--steps", str(steps)], script)
    return seconds


def last_row(log: Path) -> dict:
    return list(read_rows(log))[-1]


def write_few() -> None:
    """The fixed training problems of the regime "few". Once: a run might read half a file."""
    rows = problems.skills("train", QUESTIONS)
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fold(run: Path) -> dict:
    """A finished run's evaluations, with what had been spent by then, and its letters."""
    metrics = list(read_rows(run / "metrics.jsonl"))
    evals = [spent(row, metrics) for row in read_rows(run / "eval.jsonl")]
    silent = mean(step["zero_signal"] for step in metrics)
    return dict(metrics={}, evals=study.columns(evals), zero_signal=silent,
                **letters_of(read_rows(run / "groups.jsonl")))


def spent(row: dict, metrics: list[dict]) -> dict:
    """engine_steps: of the sampling; trained: response tokens of samples with a coefficient."""
    past = [step for step in metrics if step["step"] <= row["step"]]
    return dict(step=row["step"], avg=row["avg"], samples=row["samples_total"],
                tokens=row["tokens_total"], seconds=row["seconds_total"],
                engine_steps=sum(step["engine_steps"] for step in past),
                trained=sum(step.get("tokens_trained", 0) for step in past))


def letters_of(groups) -> dict:
    """`solved` counts draws prompt by prompt: by whole steps, rules with large steps would have
    fewer."""
    drawn, solved, letters = 0, {}, {}
    for group in groups:
        letter, pool = LETTER.search(group["prompt"])[1], group["pool"]
        drawn += len(pool)
        right = sum(bool(sample["reward"]) for sample in pool)
        if right:
            solved.setdefault(letter, drawn)
        silent = not any(sample.get("coefficient") for sample in pool)
        facts = 1, len(pool), right, silent
        letters[letter] = [a + b for a, b in zip(letters.get(letter, [0] * 4), facts)]
    return dict(solved=solved, letters=letters)


def train_all(processes: int) -> None:
    """Rates by the tuning seeds, once more beyond the end where one is best; then the tests."""
    def train_missing(jobs):
        study.train_missing("skills", {run_name(*job): job for job in jobs}, train, processes)

    write_few()
    train_missing(tuning(RATES, ARMS))
    best = best_rates(study.load("skills"))
    for arm in ARMS:
        if best[arm] in BEYOND:
            train_missing(tuning([BEYOND[best[arm]]], [arm]))
    train_missing([(arm, "still", STILL_RATE, TUNING_SEEDS[0]) for arm in ARMS])
    best = best_rates(study.load("skills"))
    for seeds, arms in ((SEEDS, ARMS), (NEW_SEEDS, (*RIVALS, OURS))):
        train_missing([(arm, regime, best[arm], seed)
                       for seed in seeds for regime in REGIMES for arm in arms])


def tuning(rates, arms) -> list[tuple]:
    return [(arm, "stream", lr, seed) for seed in TUNING_SEEDS for lr in rates for arm in arms]


def best_rates(lines: list[dict]) -> dict[str, float]:
    """Each arm's learning rate: the highest mean of the primary measure over the tuning seeds."""
    return {arm: best_of(tuned(tuning_runs(lines, arm), DRAWS)) for arm in ARMS}


def tuning_runs(lines: list[dict], arm: str) -> list[dict]:
    return of(lines, TUNING_SEEDS, arm=arm, regime="stream")


def tuned(lines: list[dict], draws: int) -> dict[float, float]:
    """Learning rate -> mean accuracy of its runs after so many draws."""
    found = {}
    for line in lines:
        found.setdefault(line["lr"], []).append(at(line, "samples", draws))
    return {lr: mean(values) for lr, values in sorted(found.items())}


def best_of(means: dict[float, float]) -> float:
    return max(means, key=means.get)  # of equal ones the lowest


# ----------------------------------------------------------------------------------------- measures
def at(line: dict, cost: str, budget: float) -> float:
    """Held-out accuracy of a run when it had spent `budget`. ValueError if it never did."""
    rows = spending(line)
    if rows[-1][cost] < budget:
        raise ValueError(f"{line['run']} spent only {rows[-1][cost]} {cost} of {budget}")
    return interpolate(budget, rows, cost, "avg")


def spending(line: dict) -> list[dict]:
    return [row | modelled(row) for row in line["evals"]]


def modelled(row: dict) -> dict[str, float]:
    """Seconds on a GPU whose decode step takes 20 ms, and 1 + r times that for 64 responses.

    A trained token (forward and backward) costs three times what a decoded one adds. r = 0: the
    GPU is so empty that only its steps count; r = 2: about the share in the paper's runs.
    """
    return {f"r{r}": 0.02 * (row["engine_steps"] + r / 64 * (row["tokens"] + 3 * row["trained"]))
            for r in (0, 0.5, 2)}


COSTS = {"samples": "draws", "step": "training steps", "engine_steps": "engine steps",
         "r0.5": "modelled s, r = 0.5", "r2": "modelled s, r = 2",  # r = 0: engine steps
         "seconds": "s of training here, two runs at a time"}


def budget_of(cost: str, lines: list[dict]) -> float:
    """What is compared at: the plan's draws and steps, else the most that every run had spent
    within DRAWS."""
    fixed = dict(samples=DRAWS, step=STEPS)
    return fixed.get(cost) or min(interpolate(DRAWS, spending(line), "samples", cost)
                                  for line in lines)


def interpolate(x: float, rows: list[dict], key: str, other: str) -> float:
    import numpy as np

    return float(np.interp(x, [row[key] for row in rows], [row[other] for row in rows]))


def ever_solved(line: dict, lowest: float = 0, highest: float = 0.05,
                within: int = FIRST_DRAWS) -> float:
    """Share of the letters with such a belief whose right answer was drawn in so many draws."""
    letters = [x for x in problems.LETTERS if lowest <= problems.belief(x) < highest]
    return mean(line["solved"].get(x, math.inf) <= within for x in letters)


# ----------------------------------------------------------------------------------------- verdicts
def compare(lines: list[dict], first: str, second: str, measure, quantiles=study.T_95) -> tuple:
    """(mean of the differences first - second, paired by seed, half its interval, the plan's word).
    """
    one, other = ({line["seed"]: measure(line) for line in of(lines, arm=arm)}
                  for arm in (first, second))
    pairs = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    centre, half = study.interval(pairs, quantiles)
    word = "ahead" if centre > half else "behind" if centre < -half else "open"
    if word == "open" and abs(centre) + half <= EQUAL:
        word = "equal"
    return centre, half, word


def in_points(centre: float, half: float, word: str = "") -> str:
    return f"{100 * centre:+.1f} ± {100 * half:.1f}" + (f" points: {word}" if word else "")


def verdicts(lines: list[dict]) -> str:
    """The plan's hypotheses, each with its differences in both regimes."""
    found = [["hypothesis", "difference", "at equal", *REGIMES, "confirmed"]]
    for number, rival, cost, wanted in HYPOTHESES:
        differences = [compare(mine, OURS, rival, equal(cost, mine))
                       for mine in (of(lines, regime=regime) for regime in REGIMES)]
        agreeing = sum((word == "ahead") == wanted for *_, word in differences)
        label = COSTS.get(cost, f"draws: share of letters solved in {FIRST_DRAWS:,}")
        found.append([number, f"{OURS} - {rival}", label, *(in_points(*x) for x in differences),
                      ("not", "in part", "yes")[agreeing]])
    return study.markdown(found)


def equal(cost: str, lines: list[dict], budget: float = 0):
    """The measure of a run at equal cost."""
    budget = budget or (cost != "solved" and budget_of(cost, lines))
    return ever_solved if cost == "solved" else lambda line: at(line, cost, budget)


def not_in_the_plan(lines: list[dict]) -> str:
    """Differences that a reader of the results asked for. Seen, not tested."""
    wide = "uniform-4-wide"
    asked = [(wide, "samples", DRAWS // 2), (wide, "samples", DRAWS * 3 // 4),
             (wide, "samples", DRAWS), ("uniform-4", "samples", DRAWS),
             ("uniform-4", "step", STEPS), ("uniform-4", "step", ALL_STEPS),
             ("uniform-16", "step", STEPS), ("uniform-16", "step", ALL_STEPS),
             (wide, "step", STEPS)]
    found = [["difference", "at equal", *REGIMES]]

    def add(rival, label, measure_of):
        cells = [compare(mine, OURS, rival, measure_of(mine))[:2]
                 for mine in (of(lines, regime=regime) for regime in REGIMES)]
        found.append([f"{OURS} - {rival}", label, *(in_points(*cell) for cell in cells)])

    for rival, cost, budget in asked:
        add(rival, f"{budget:,} {COSTS[cost]}", lambda mine: equal(cost, mine, budget))
    for rival in RIVALS:
        add(rival, "tokens trained", lambda mine: equal("trained", mine))
    add("uniform-4", f"{2 * FIRST_DRAWS:,} draws: letters below 0.05 drawn right",
        lambda mine: lambda line: ever_solved(line, within=2 * FIRST_DRAWS))
    return study.markdown(found)


# ------------------------------------------------------------------------------------------- tables
def behind_it(lines: list[dict]) -> str:
    """What the arms had seen and done by the primary measure, and how steep their curves are."""
    found = [["arm", "regime", "letters drawn right", "rows trained", "steps",
              "points per 1,000 draws, from 14,000 to 16,000"]]
    for arm in (*RIVALS, OURS):
        for regime in REGIMES:
            mine = of(lines, arm=arm, regime=regime)
            tokens, steps = (mean(interpolate(DRAWS, line["evals"], "samples", cost)
                                  for line in mine) for cost in ("trained", "step"))
            gain = mean(at(line, "samples", DRAWS) - at(line, "samples", DRAWS - 2000)
                        for line in mine)
            letters = mean(ever_solved(line, 0, 1, DRAWS) for line in mine)
            found.append([arm, regime, f"{letters:.0%}", f"{tokens / TOKENS:,.0f}",
                          f"{steps:.0f}", f"{100 * gain / 2:.1f}"])
    return study.markdown(found)


def table(lines: list[dict]) -> str:
    """Every arm at every cost, in one regime."""
    budget = {cost: budget_of(cost, lines) for cost in COSTS}
    found = [["arm", "learning rate", "draws per step", "no signal",
              *(f"at {budget[cost]:,.0f} {label}" for cost, label in COSTS.items()),
              "letters below 0.05 ever solved", "lost: below the start"]]
    for arm in ARMS:
        mine = of(lines, arm=arm)
        last = [line["evals"][-1] for line in mine]
        draws = mean(row["samples"] / row["step"] for row in last)
        silent = mean(line["zero_signal"] for line in mine)
        accuracies = [shown([at(line, cost, budget[cost]) for line in mine]) for cost in COSTS]
        solved = shown([ever_solved(line) for line in mine])
        found.append([arm, str(mine[0]["lr"]), f"{draws:.0f}", f"{silent:.0%}", *accuracies,
                      solved, lost(mine, DRAWS)])
    return study.markdown(found)


def lost(lines: list[dict], draws: int) -> str:
    """How many runs are below their start after so many draws."""
    below = sum(at(line, "samples", draws) < line["evals"][0]["avg"] for line in lines)
    return f"{below} of {len(lines)}"


def rates_tried(found: dict[str, dict], label: str = "") -> str:
    """A table of arm -> learning rate -> mean accuracy."""
    rates = sorted({lr for means in found.values() for lr in means})
    rows = [[arm, *(f"{means[lr]:.1%}" if lr in means else "" for lr in rates)]
            for arm, means in found.items()]
    return study.markdown([["arm", *(f"{label}{lr}" for lr in rates)], *rows])


def as_page(parts: dict[str, str], lines: list[dict]) -> str:
    """Titles and tables, and what the runs took."""
    hours = sum(line["cpu_seconds"] for line in lines) / 3600
    text = "".join(f"## {title}\n\n{part}\n" for title, part in parts.items())
    return f"{text}{len(lines)} runs, {hours:.1f} hours of one core.\n"


def report(lines: list[dict]) -> str:
    """All tables: verdicts, arms at every cost, what was tuned, theory against counts."""
    tested, new = ([line for regime in REGIMES for line in of(lines, seeds, regime=regime)]
                   for seeds in (SEEDS, NEW_SEEDS))
    still = {line["arm"]: line["letters"] for line in of(lines, regime="still")}
    return as_page({
        "The plan's hypotheses": verdicts(tested),
        "Again, by seven new seeds": verdicts(new),
        "By all twelve seeds": verdicts(tested + new),
        "Not in the plan, by the seven new seeds": not_in_the_plan(new),
        f"Behind it: the seven new seeds after {DRAWS:,} draws": behind_it(new),
        **{f"Regime {regime}": table(of(tested, regime=regime)) for regime in REGIMES},
        "Learning rates: mean of two other seeds, at equal draws": rates_tried(
            {arm: tuned(tuning_runs(lines, arm), DRAWS) for arm in ARMS}, "learning rate "),
        "Theory and counts, of runs that stand still": skills_theory.predicted(still)}, lines)


# ----------------------------------------------------------------------------------------- picture
def draw_accuracy(axis, lines: list[dict], cost: str) -> None:
    """Of each arm up to where every seed has come."""
    import numpy as np

    for arm, color in COLORS.items():
        mine = [spending(line) for line in of(lines, arm=arm)]
        grid = np.linspace(0, min(rows[-1][cost] for rows in mine), 60)
        curves = [[interpolate(x, rows, cost, "avg") for x in grid] for rows in mine]
        study.band(axis, grid, curves, color, label=arm)
    axis.set(xlabel=COSTS[cost])


def draw(lines: list[dict]) -> None:
    by_regime = {regime: of(lines, SEEDS, regime=regime) for regime in REGIMES}
    figure, axes = study.panels(2, len(COSTS), figsize=(25, 10), sharex="col", sharey=True)
    for row, (regime, mine) in zip(axes, by_regime.items()):
        for axis, cost in zip(row, COSTS):
            draw_accuracy(axis, mine, cost)
        row[0].set_ylabel(f"held-out avg@8, regime {regime}")
    axes[0, 0].legend(frameon=False)
    axes[0, 1].set_xlim(0, 100)
    study.save(figure, "skills")


def main() -> None:
    args = study.parser(__doc__).parse_args()
    if not args.draw:
        train_all(args.processes)
    lines = study.load("skills")
    draw(lines)
    text = report(lines)
    (study.RESULTS / "skills.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
