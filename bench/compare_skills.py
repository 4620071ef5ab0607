"""Where does adaptive sampling pay? Nine ways of sampling on skills of very different pass rates.

    python bench/compare_skills.py --processes 2   # all; resumable
    python bench/compare_skills.py --draw          # only tables and pictures, from what is stored

What is compared, at which costs, and what counts as which answer was written down before the first
run: docs/sampling_plan.md. Names here are the plan's.

A run lives in runs/skills. When it is done it becomes a line of bench/results/skills.jsonl (see
study.py), from which skills.md and two pictures are drawn. A line has, besides the evaluations,
what had been spent by then, `solved`: each letter's first right answer, in draws, and `letters`:
how often each was met, drawn, answered right, and silent.
"""
import argparse
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

import study

from parts import problems

RUNS = study.ROOT / "runs" / "skills"

DRAWS = 16_000  # the budget of the primary measure
STEPS = 40  # of the comparison at equal steps
ALL_STEPS = 60  # which every run of the hypotheses' arms has, but for uniform-4-wide
FIRST_DRAWS = 4_000  # within which a letter counts as solved
STILL_STEPS, STILL_RATE = 90, 1e-9  # of the runs that count draws and signal by letter
SEEDS, TUNING_SEEDS = range(5), (100, 101)
NEW_SEEDS = range(5, 12)  # of the plan's second sample, for the arms of its hypotheses
NEW_ARMS = ("uniform-4", "uniform-4-wide", "uniform-16", "ada-balance")
RATES = (0.001, 0.002, 0.004)
BEYOND = {0.001: 0.0005, 0.004: 0.008}  # where an arm is best at either end
QUESTIONS = 192  # held out, and the training problems of the regime "few"; four of each letter
REGIMES = ("stream", "few")
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
COLORS = ("#999999", "#56B4E9", "#000000", "#D55E00", "#E69F00", "#F0E442", "#0072B2", "#009E73",
          "#CC79A7")
COMMON = ["--model", "tiny-skills", "--eval-data", "builtin-skills", "--max-tokens", "16",
          "--eval-questions", str(QUESTIONS), "--log-groups", "all", "--checkpoint-every", "0"]
LETTER = re.compile(r"\d([A-Za-z])\d=\?")
# Student's t by the number of seeds
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 10: 2.26, 12: 2.20}
TOKENS = 8  # of every response
EQUAL = 0.03  # an interval around 0 within this is called equal


# ------------------------------------------------------------------------------------------ running
def train(arm: str, regime: str, lr: float, seed: int) -> None:
    """One run through the command line, resumed if it was interrupted; then a line of the study."""
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


def train_until(draws: int, name: str, flags: list[str], steps: int, every: int,
                script: str = "minirl.py") -> float:
    """Train or resume a run, at first for `steps` steps; returns its seconds of a core.

    While it has drawn less than `draws`, as an adaptive rule that met few hard prompts, it goes on.
    """
    log = RUNS / "runs" / name / "metrics.jsonl"
    if every and log.exists():  # it was going on when it was interrupted
        steps = max(steps, -(-read(log)[-1]["step"] // every) * every)
    if "--batch-prompts" not in flags:
        flags = [*flags, "--batch-prompts", "16"]
    flags = [*COMMON, *flags, "--eval-every", str(every), "--name", name, "--resume"]
    seconds = launch([*flags, "--steps", str(steps)], name, script)
    while draws and (done := read(log)[-1]["samples_total"]) < draws:
        missing = (draws - done) / done * steps  # a start costs as much as 60 steps
        steps += every * max(1, int(missing / every))
        seconds += launch([*flags, "--steps", str(steps)], name, script)
    return seconds


def launch(flags: list[str], name: str, script: str) -> float:
    """Run or resume through the command line; returns its seconds of a core."""
    command = [sys.executable, str(study.ROOT / script), *flags]
    with open(RUNS / f"{name}.log", "a") as output:
        process = subprocess.Popen(command, cwd=RUNS, stdout=output, stderr=output,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{name} failed: see {RUNS / name}.log")
    return usage.ru_utime + usage.ru_stime


def run_name(arm: str, regime: str, lr: float, seed: int) -> str:
    return f"{arm}-{regime}-{lr}-seed{seed}"


def write_few() -> None:
    """The fixed training problems of the regime "few". Once: a run might read half a file."""
    rows = problems.skills("train", QUESTIONS)
    (RUNS / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fold(run: Path) -> dict:
    """A finished run's evaluations, with what had been spent by then, and when letters were solved.

    engine_steps: of the sampling; trained: response tokens of samples with a coefficient. `solved`
    counts draws prompt by prompt: by whole steps, rules with large steps would have fewer draws.
    """
    metrics, evaluations = read(run / "metrics.jsonl"), read(run / "eval.jsonl")
    found = []
    for row in evaluations:
        past = [step for step in metrics if step["step"] <= row["step"]]
        found.append(dict(
            step=row["step"], avg=row["avg"], samples=row["samples_total"],
            tokens=row["tokens_total"], seconds=row["seconds_total"],
            engine_steps=sum(step["engine_steps"] for step in past),
            trained=sum(step.get("tokens_trained", 0) for step in past)))
    drawn, solved, letters = 0, {}, {}
    for group in read(run / "groups.jsonl"):
        letter, pool = LETTER.search(group["prompt"])[1], group["pool"]
        drawn += len(pool)
        if any(sample["reward"] for sample in pool):
            solved.setdefault(letter, drawn)
        signal = any(sample.get("coefficient") for sample in pool)
        facts = 1, len(pool), sum(bool(sample["reward"]) for sample in pool), not signal
        letters[letter] = [a + b for a, b in zip(letters.get(letter, [0] * 4), facts)]
    silent = mean(step["zero_signal"] for step in metrics)
    return dict(solved=solved, letters=letters, zero_signal=silent, metrics={},
                evals=study.columns(found))


def read(path: Path) -> list[dict]:
    """The rows of a log; without a last one that a kill has cut short."""
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def run_all(plan: list[tuple], processes: int) -> None:
    stored = {line["run"] for line in study.load("skills")}
    missing = [job for job in plan if run_name(*job) not in stored]
    print(f"{len(plan) - len(missing)} of {len(plan)} runs are stored", flush=True)
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda job: train(*job), missing))


def tuning(rates=RATES, arms=tuple(ARMS)) -> list[tuple]:
    return [(arm, "stream", lr, seed) for seed in TUNING_SEEDS for lr in rates for arm in arms]


def best_rates(lines: list[dict]) -> dict[str, float]:
    """Each arm's learning rate: the highest mean of the primary measure over the tuning seeds."""
    return {arm: max(found, key=found.get) for arm, found in tuned_means(lines).items()}


def tuned_means(lines: list[dict]) -> dict[str, dict[float, float]]:
    """Arm -> learning rate -> the mean of the primary measure over the tuning seeds."""
    found = {arm: {} for arm in ARMS}
    for line in lines:
        if line["seed"] in TUNING_SEEDS and line["regime"] == "stream":
            found[line["arm"]].setdefault(line["lr"], []).append(at(line, "samples", DRAWS))
    return {arm: {lr: mean(values) for lr, values in sorted(rates.items())}
            for arm, rates in found.items()}


# ----------------------------------------------------------------------------------------- measures
def at(line: dict, cost: str, budget: float) -> float:
    """Held-out accuracy of a run when it had spent `budget`. ValueError if it never did."""
    rows = [row | modelled(row) for row in line["evals"]]
    if rows[-1][cost] < budget:
        raise ValueError(f"{line['run']} spent only {rows[-1][cost]} {cost} of {budget}")
    return at_budget(rows, cost, budget)


def at_budget(evaluations: list[dict], cost: str, budget: float) -> float:
    """Held-out accuracy when a run had spent `budget`: straight lines between evaluations."""
    return interpolate(budget, evaluations, cost, "avg")


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


def budgets(lines: list[dict]) -> dict[str, float]:
    """What is compared at: the plan's draws and steps, else the most that every run had spent
    within DRAWS."""
    found = {"samples": DRAWS, "step": STEPS}
    for cost in list(COSTS)[2:]:
        spent = []
        for line in lines:
            rows = [row | modelled(row) for row in line["evals"]]
            spent.append(interpolate(DRAWS, rows, "samples", cost))
        found[cost] = min(spent)
    return found


def interpolate(x: float, rows: list[dict], key: str, other: str) -> float:
    import numpy as np

    return float(np.interp(x, [row[key] for row in rows], [row[other] for row in rows]))


def ever_solved(line: dict, lowest: float = 0, highest: float = 0.05,
                within: int = FIRST_DRAWS) -> float:
    """Share of the letters with such a belief whose right answer was drawn in so many draws."""
    letters = [x for x in problems.LETTERS if lowest <= problems.belief(x) < highest]
    return mean(line["solved"].get(x, math.inf) <= within for x in letters)


# ----------------------------------------------------------------------------------------- verdicts
def interval(values: list[float], quantiles: dict = T_95) -> tuple[float, float]:
    """Mean and half its interval (Student's t), by default that of 95 %."""
    return mean(values), quantiles[len(values)] * stdev(values) / len(values) ** 0.5


def compare(lines: list[dict], regime: str, first: str, second: str, measure,
            quantiles: dict = T_95) -> tuple:
    """(mean of the paired differences first - second, half its interval, the plan's word)."""
    def of(arm):
        mine = [line for line in lines if (line["arm"], line["regime"]) == (arm, regime)]
        return {line["seed"]: measure(line) for line in mine}

    one, other = of(first), of(second)
    centre, half = interval([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())],
                            quantiles)
    word = "ahead" if centre > half else "behind" if centre < -half else "open"
    if word == "open" and abs(centre) + half <= EQUAL:
        word = "equal"
    return centre, half, word


def verdicts(lines: list[dict]) -> str:
    """The plan's hypotheses, each with its differences in both regimes."""
    asked = [  # what is compared at, and is it held that the first is ahead?
        ("1", "ada-balance", "uniform-4", "step", True),
        ("2", "ada-balance", "uniform-16", "samples", True),
        ("3", "ada-balance", "uniform-4-wide", "samples", False),
        ("4", "ada-balance", "uniform-4-wide", "r2", True),
        ("5", "ada-balance", "uniform-4", "solved", True),
        ("6", "ada-balance", "uniform-16", "engine_steps", False)]
    found = [["hypothesis", "difference", "at equal", *REGIMES, "confirmed"]]
    for number, first, second, cost, wanted in asked:
        cells, agreeing = [], 0
        for regime in REGIMES:
            budget = budgets([line for line in lines if line["regime"] == regime])
            measure = ever_solved if cost == "solved" else (
                lambda line, b=budget: at(line, cost, b[cost]))
            centre, half, word = compare(lines, regime, first, second, measure)
            cells.append(f"{100 * centre:+.1f} ± {100 * half:.1f} points: {word}")
            agreeing += (word == "ahead") == wanted
        label = COSTS.get(cost, f"draws: share of letters solved in {FIRST_DRAWS:,}")
        answer = ("not", "in part", "yes")[agreeing]
        found.append([number, f"{first} - {second}", label, *cells, answer])
    return study.markdown(found)


def not_in_the_plan(lines: list[dict]) -> str:
    """Differences that a reader of the results asked for. Seen, not tested."""
    found = [["difference", "at equal", *REGIMES]]

    def add(first, second, label, measure_of):
        cells = []
        for regime in REGIMES:
            mine = [line for line in lines if line["regime"] == regime]
            centre, half, _ = compare(lines, regime, first, second, measure_of(mine))
            cells.append(f"{100 * centre:+.1f} ± {100 * half:.1f}")
        found.append([f"{first} - {second}", label, *cells])

    for draws in (DRAWS // 2, DRAWS * 3 // 4, DRAWS):
        add("ada-balance", "uniform-4-wide", f"{draws:,} draws",
            lambda mine: lambda line: at(line, "samples", draws))
    add("ada-balance", "uniform-4", f"{DRAWS:,} draws",
        lambda mine: lambda line: at(line, "samples", DRAWS))
    for arm, steps in [("uniform-4", STEPS), ("uniform-4", ALL_STEPS), ("uniform-16", STEPS),
                       ("uniform-16", ALL_STEPS), ("uniform-4-wide", STEPS)]:
        add("ada-balance", arm, f"{steps} training steps",
            lambda mine: lambda line: at(line, "step", steps))
    for arm in NEW_ARMS[:3]:
        add("ada-balance", arm, "tokens trained",
            lambda mine: lambda line: at(line, "trained", trained_by_all(mine)))
    add("ada-balance", "uniform-4", f"{2 * FIRST_DRAWS:,} draws: letters below 0.05 drawn right",
        lambda mine: lambda line: ever_solved(line, within=2 * FIRST_DRAWS))
    return study.markdown(found)


def behind_it(lines: list[dict]) -> str:
    """What the arms had seen and done by the primary measure, and how steep their curves are."""
    found = [["arm", "regime", "letters drawn right", "rows trained", "steps",
              "points per 1,000 draws, from 14,000 to 16,000"]]
    for arm in NEW_ARMS:
        for regime in REGIMES:
            mine = [line for line in lines if (line["arm"], line["regime"]) == (arm, regime)]
            spent = [mean(interpolate(DRAWS, line["evals"], "samples", cost) for line in mine)
                     for cost in ("trained", "step")]
            gains = [at(line, "samples", DRAWS) - at(line, "samples", DRAWS - 2000)
                     for line in mine]
            letters = mean(ever_solved(line, 0, 1, DRAWS) for line in mine)
            found.append([arm, regime, f"{letters:.0%}", f"{spent[0] / TOKENS:,.0f}",
                          f"{spent[1]:.0f}", f"{100 * mean(gains) / 2:.1f}"])
    return study.markdown(found)


def trained_by_all(lines: list[dict]) -> float:
    """The most tokens that every one of these runs had trained on within DRAWS."""
    return min(interpolate(DRAWS, line["evals"], "samples", "trained") for line in lines)


# ------------------------------------------------------------------------------------------- tables
def shown(values: list[float]) -> str:
    centre, half = interval(values)
    return f"{centre:.1%} ± {half:.1%}"


def table(lines: list[dict], regime: str) -> str:
    """Every arm at every cost."""
    budget = budgets([line for line in lines if line["regime"] == regime])
    head = ["arm", "learning rate", "draws per step", "no signal"]
    head += [f"at {budget[cost]:,.0f} {label}" for cost, label in COSTS.items()]
    head += ["letters below 0.05 ever solved", "lost: below the start"]
    found = [head]
    for arm in ARMS:
        mine = [line for line in lines if (line["arm"], line["regime"]) == (arm, regime)]
        last = [line["evals"][-1] for line in mine]
        draws = mean(row["samples"] / row["step"] for row in last)
        cells = [arm, str(mine[0]["lr"]), f"{draws:.0f}",
                 f"{mean(line['zero_signal'] for line in mine):.0%}"]
        cells += [shown([at(line, cost, budget[cost]) for line in mine]) for cost in COSTS]
        cells += [shown([ever_solved(line) for line in mine])]
        lost = sum(at(line, "samples", DRAWS) < line["evals"][0]["avg"] for line in mine)
        cells += [f"{lost} of {len(mine)}"]
        found.append(cells)
    return study.markdown(found)


def against(lines: list[dict]) -> str:
    """ada-balance against each arm at equal draws; only two of these are hypotheses."""
    found = [["ada-balance - arm, at equal draws", *REGIMES]]
    for arm in ARMS:
        if arm != "ada-balance":
            cells = [compare(lines, regime, "ada-balance", arm,
                             lambda line: at(line, "samples", DRAWS)) for regime in REGIMES]
            found.append([arm, *(f"{100 * centre:+.1f} ± {100 * half:.1f}: {word}"
                                 for centre, half, word in cells)])
    return study.markdown(found)


def solved(lines: list[dict]) -> str:
    """Share of the letters of each belief that were solved in FIRST_DRAWS, both regimes."""
    found = [["arm", *map(str, problems.BELIEF)]]
    for arm in ARMS:
        cells = []
        for belief in problems.BELIEF:
            shares = [ever_solved(line, belief, 1.01 * belief)
                      for line in lines if line["arm"] == arm]
            cells.append(f"{mean(shares):.0%}")
        found.append([arm, *cells])
    return study.markdown(found)


def tuned(lines: list[dict]) -> str:
    rates = sorted((*RATES, *BEYOND.values()))
    found = [["arm", *(f"learning rate {lr}" for lr in rates)]]
    for arm, means in tuned_means(lines).items():
        found.append([arm, *(f"{means[lr]:.1%}" if lr in means else "" for lr in rates)])
    return study.markdown(found)


def report(lines: list[dict]) -> str:
    """All tables: verdicts, arms at every cost, what was tuned, theory against counts."""
    from skills_figures import predicted

    tested, new = ([line for line in lines if line["seed"] in seeds and line["regime"] in REGIMES]
                   for seeds in (SEEDS, NEW_SEEDS))
    again = {"Again, by seven new seeds": verdicts(new),
             "By all twelve seeds": verdicts(tested + new),
             "Not in the plan, by the seven new seeds": not_in_the_plan(new),
             f"Behind it: the seven new seeds after {DRAWS:,} draws": behind_it(new)} if new else {}
    seconds = sum(line["cpu_seconds"] for line in lines)
    parts = {
        "The plan's hypotheses": verdicts(tested), **again,
        **{f"Regime {regime}": table(tested, regime) for regime in REGIMES},
        "ada-balance against each arm": against(tested),
        f"Letters solved in {FIRST_DRAWS:,} draws, by belief": solved(tested),
        "Learning rates: mean of two other seeds, at equal draws": tuned(lines),
        "Theory and counts, of runs that stand still": predicted(lines)}
    text = "".join(f"## {title}\n\n{part}\n" for title, part in parts.items())
    return f"{text}{len(lines)} runs, {seconds / 3600:.1f} hours of one core.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    if not args.draw:
        RUNS.mkdir(parents=True, exist_ok=True)
        write_few()
        run_all(tuning(), args.processes)
        best = best_rates(study.load("skills"))
        beyond = [job for arm in ARMS if best[arm] in BEYOND
                  for job in tuning([BEYOND[best[arm]]], [arm])]
        run_all(beyond, args.processes)
        run_all([(arm, "still", STILL_RATE, TUNING_SEEDS[0]) for arm in ARMS], args.processes)
        rates = best_rates(study.load("skills"))
        run_all([(arm, regime, rates[arm], seed)
                 for seed in SEEDS for regime in REGIMES for arm in ARMS], args.processes)
        run_all([(arm, regime, rates[arm], seed)
                 for seed in NEW_SEEDS for regime in REGIMES for arm in NEW_ARMS], args.processes)
    lines = study.load("skills")
    if not lines:
        raise SystemExit("Nothing is stored yet: run without --draw first.")
    from skills_figures import draw

    draw(lines)
    text = report(lines)
    (study.RESULTS / "skills.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
