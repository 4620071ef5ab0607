"""Where does adaptive sampling pay? Nine ways of sampling on skills of very different pass rates.

    python bench/compare_skills.py --processes 2   # all; resumable
    python bench/compare_skills.py --draw          # only tables and picture, from what is stored

What is compared, at which costs, and what counts as which answer was written down before the first
run: bench/plan.md. Names are the plan's. Results: bench/results/skills.{jsonl,md}
and a picture for each sampler.
"""
import json
import math
from statistics import mean

import skills
import skills_theory
import study
from skills import QUESTIONS, at, compare, in_points, interpolate, run_name
from study import of, shown

from parts import problems

DRAWS = 16_000  # the budget of the primary measure
STEPS = 40  # of the comparison at equal steps
FIRST_DRAWS = 4_000  # within which a letter counts as solved
STILL_STEPS, STILL_RATE = 90, 1e-9  # of the runs that count draws and signal by letter
SEEDS, TUNING_SEEDS = range(5), (100, 101)
NEW_SEEDS = range(5, 12)  # of the plan's second sample, for the arms of its hypotheses
RATES = (0.001, 0.002, 0.004)
REGIMES = ("stream", "few")
OURS = "ada-balance"
RIVALS = ("uniform-4", "uniform-4-wide", "uniform-16")
ARMS = {  # name -> flags, prompts a step, steps that mostly reach DRAWS, steps between evaluations
    "uniform-4": (["--sampler", "uniform", "--n", "4"], 16, 250, 40),
    "uniform-4-wide": (["--sampler", "uniform", "--n", "4"], 74, 55, 10),
    "uniform-16": (["--sampler", "uniform", "--n", "16"], 16, 63, 10),
    "maxrl": (["--sampler", "uniform", "--n", "16", "--weighting", "log"], 16, 63, 10),
    "dapo": (["--sampler", "dapo", "--n", "4"], 16, 90, 15),
    "ada-pos": (["--sampler", "ada-pos"], 16, 75, 15),
    "ada-balance": (["--sampler", "ada-balance"], 16, 60, 10),
    "ada-est": (["--sampler", "ada-est", "--M", "8"], 16, 128, 20),
    "gvm": (["--sampler", "gvm", "--M", "8"], 16, 66, 10),
}
COLORS = dict(zip(ARMS, ("#999999", "#56B4E9", "#000000", "#D55E00", "#E69F00", "#009E73",
                         "#0072B2", "#009E73", "#CC79A7")))
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
COSTS = {"samples": "draws", "step": "training steps", "engine_steps": "engine steps",
         "r0.5": "modelled s, r = 0.5", "r2": "modelled s, r = 2",
         "seconds": "s of training here, two runs at a time"}


# ------------------------------------------------------------------------------------------ running
def train(arm: str, regime: str, lr: float, seed: int) -> None:
    """One run, resumed if it was interrupted; then a line of the study."""
    flags, prompts, steps, every = ARMS[arm]
    if regime == "still":
        steps, every = STILL_STEPS, 0
    name = run_name(arm, regime, lr, seed)
    data = str(skills.RUNS / "few.jsonl") if regime == "few" else "builtin-skills"
    flags = [*flags, "--batch-prompts", str(prompts), "--data", data, "--lr", str(lr),
             "--seed", str(seed)]
    seconds = skills.train_until(DRAWS if every else 0, name, flags, steps, every)
    line = dict(run=name, arm=arm, regime=regime, lr=lr, seed=seed, cpu_seconds=round(seconds, 1))
    line |= skills.fold(skills.RUNS / "runs" / name)
    study.add("skills", line)
    print(f"{name}: {line['evals']['avg']}", flush=True)


def train_all(processes: int) -> None:
    """Rates by the tuning seeds; runs that stand still; then the tests."""
    def train_missing(jobs):
        study.train_missing("skills", {run_name(*job): job for job in jobs}, train, processes)
        return study.load("skills")

    write_few()
    rates = skills.tune(train_missing, ARMS, RATES, TUNING_SEEDS, "stream", DRAWS)
    train_missing([(arm, "still", STILL_RATE, TUNING_SEEDS[0]) for arm in ARMS])
    for seeds, arms in ((SEEDS, ARMS), (NEW_SEEDS, (*RIVALS, OURS))):
        train_missing([(arm, regime, rates[arm], seed)
                       for seed in seeds for regime in REGIMES for arm in arms])


def write_few() -> None:
    """The fixed training problems of the regime "few". Once: a run might read half a file."""
    rows = problems.skills("train", QUESTIONS)
    skills.RUNS.mkdir(parents=True, exist_ok=True)
    (skills.RUNS / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ----------------------------------------------------------------------------------------- measures
def equal(cost: str, lines: list[dict]):
    """The measure of a run at equal cost."""
    budget = cost != "solved" and budget_of(cost, lines)
    return ever_solved if cost == "solved" else lambda line: at(line, cost, budget)


def budget_of(cost: str, lines: list[dict]) -> float:
    """What is compared at: the plan's draws and steps, else the most that every run had spent
    within DRAWS."""
    fixed = dict(samples=DRAWS, step=STEPS)
    return fixed.get(cost) or min(interpolate(DRAWS, skills.spending(line), "samples", cost)
                                  for line in lines)


def ever_solved(line: dict) -> float:
    """Share of the letters below 0.05 whose right answer was drawn within FIRST_DRAWS."""
    letters = [x for x in problems.LETTERS if problems.belief(x) < 0.05]
    return mean(line["solved"].get(x, math.inf) <= FIRST_DRAWS for x in letters)


# ------------------------------------------------------------------------------------------- tables
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


def explored(lines: list[dict]) -> str:
    """Differences at other budgets, of the seven new seeds."""
    found = [["difference", "at equal", *REGIMES]]
    for rival, cost, budget in EXPLORED:
        cells = []
        for mine in (of(lines, regime=regime) for regime in REGIMES):
            spent = budget or budget_of(cost, mine)
            difference = compare(mine, OURS, rival, lambda line: at(line, cost, spent))
            cells.append(in_points(*difference[:2]))
        label = f"{budget:,} {COSTS[cost]}" if budget else "tokens trained"
        found.append([f"{OURS} - {rival}", label, *cells])
    return study.markdown(found)


def table(lines: list[dict]) -> str:
    """Every arm at every cost, in one regime."""
    budget = {cost: budget_of(cost, lines) for cost in COSTS}
    found = [["arm", "learning rate", "draws per step", "no signal",
              *(f"at {budget[cost]:,.0f} {label}" for cost, label in COSTS.items()),
              "letters below 0.05 ever solved", "lost: below the start"]]
    for arm in ARMS:
        mine = of(lines, arm=arm)
        draws = mean(line["evals"][-1]["samples"] / line["evals"][-1]["step"] for line in mine)
        silent = mean(line["zero_signal"] for line in mine)
        accuracies = [shown([at(line, cost, budget[cost]) for line in mine]) for cost in COSTS]
        solved = shown([ever_solved(line) for line in mine])
        found.append([arm, str(mine[0]["lr"]), f"{draws:.0f}", f"{silent:.0%}", *accuracies,
                      solved, skills.lost(mine, DRAWS)])
    return study.markdown(found)


def report(lines: list[dict]) -> str:
    """All tables: verdicts, arms at every cost, what was tuned, theory against counts."""
    tested, new = ([line for regime in REGIMES for line in of(lines, seeds, regime=regime)]
                   for seeds in (SEEDS, NEW_SEEDS))
    still = {line["arm"]: line["letters"] for line in of(lines, regime="still")}
    rates = {arm: skills.tuned(lines, arm, TUNING_SEEDS, "stream", DRAWS) for arm in ARMS}
    return skills.as_page({
        "The plan's hypotheses": verdicts(tested),
        "Again, by seven new seeds": verdicts(new),
        "By all twelve seeds": verdicts(tested + new),
        "Other budgets, by the seven new seeds: points, no hypothesis": explored(new),
        **{f"Regime {regime}": table(of(tested, regime=regime)) for regime in REGIMES},
        "Learning rates: mean of two other seeds, at equal draws": skills.rates_tried(
            rates, "learning rate "),
        "Theory and counts, of runs that stand still": skills_theory.predicted(still)}, lines)


# ----------------------------------------------------------------------------------------- picture
def draw(lines: list[dict], name: str, arms: tuple, seeds) -> None:
    """Accuracy in the regime stream against draws and steps: every run, and the mean of an arm."""
    import numpy as np

    figure, axes = study.panels(1, 2, figsize=(8, 2.9), sharey=True)
    for axis, cost, most in zip(axes, ("samples", "step"), (DRAWS, 60)):
        for arm in arms:
            mine = [skills.spending(x) for x in of(lines, seeds, regime="stream", arm=arm)]
            grid = np.linspace(0, most, 60)
            curves = [[interpolate(x, rows, cost, "avg") for x in grid] for rows in mine]
            axis.plot(grid, np.transpose(curves), color=COLORS[arm], lw=0.5, alpha=0.5)
            axis.plot(grid, np.mean(curves, 0), color=COLORS[arm], lw=2, label=arm)
        axis.set(xlabel=COSTS[cost], ylim=(0, 0.75))
    axes[0].set_ylabel("held-out avg@8")
    axes[1].legend(frameon=False, fontsize=8)
    study.save(figure, f"skills-{name}")


def main() -> None:
    args = study.parser(__doc__).parse_args()
    if not args.draw:
        train_all(args.processes)
    lines = study.load("skills")
    for name, (arms, seeds) in PICTURES.items():
        draw(lines, name, arms, seeds)
    text = report(lines)
    (study.RESULTS / "skills.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
