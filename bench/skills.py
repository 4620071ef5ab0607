"""What the two studies of the skills share: their runs, what is kept of them, measures, verdicts.

compare_skills.py and longer_skills.py ask, by the plans in bench/plan.md. A run lives in
runs/skills. When it is done it becomes a line of its study's file (see study.py), with:

    evals     the evaluations, each with what had been spent by then
    solved    letter -> draws until its first right answer
    letters   letter -> [prompts met, draws, right answers, silent prompts]
"""
import re
from pathlib import Path
from statistics import mean

import study
from study import of

from parts.folder import read_rows

RUNS = study.ROOT / "runs" / "skills"
QUESTIONS = 192  # held out: four of each letter
COMMON = ["--model", "tiny-skills", "--eval-data", "builtin-skills", "--max-tokens", "16",
          "--eval-questions", str(QUESTIONS), "--log-groups", "all"]
LETTER = re.compile(r"\d([A-Za-z])\d=\?")
EQUAL = 0.03  # an interval around 0 within this is called equal


# ------------------------------------------------------------------------------------------ running
def run_name(arm: str, regime: str, lr: float, seed: int) -> str:
    return f"{arm}-{regime}-{lr}-seed{seed}"


def train_until(draws: int, name: str, flags: list[str], steps: int, every: int,
                script: str = "minirl.py") -> float:
    """Train or resume a run, at first for `steps` steps; returns its seconds of a core.

    It goes on while it has drawn less than `draws`, as an adaptive rule that met few hard prompts.
    """
    log = RUNS / "runs" / name / "metrics.jsonl"
    if every and log.exists():  # it was going on when it was interrupted
        steps = max(steps, -(-last_row(log)["step"] // every) * every)
    flags = [*COMMON, *flags, "--eval-every", str(every)]
    seconds = study.launch(RUNS, name, [*flags, "--steps", str(steps)], script)
    while draws and (done := last_row(log)["samples_total"]) < draws:
        missing = (draws - done) / done * steps  # a start costs as much as 60 steps
        steps += every * max(1, int(missing / every))
        seconds += study.launch(RUNS, name, [*flags, "--steps", str(steps)], script)
    return seconds


def last_row(log: Path) -> dict:
    return list(read_rows(log))[-1]


def fold(run: Path) -> dict:
    """What is kept of a finished run."""
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
    """`solved` counts draws prompt by prompt: counted by whole steps, rules with large steps would
    have fewer."""
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


# ------------------------------------------------------------------------------------------- tuning
def tune(train_missing, arms, rates, seeds, regime: str, draws: int) -> dict[str, float]:
    """Each arm's rate: the best of `rates`, and of one beyond them if that is at either end.

    train_missing(jobs) trains jobs (arm, regime, rate, seed) and returns what is stored then.
    """
    def best_of(tried):
        lines = train_missing([(arm, regime, lr, seed) for seed in seeds for arm, lr in tried])
        return {arm: best(lines, arm, seeds, regime, draws) for arm in arms}

    beyond = {rates[0]: rates[0] / 2, rates[-1]: 2 * rates[-1]}
    found = best_of([(arm, lr) for lr in rates for arm in arms])
    return best_of([(arm, beyond[lr]) for arm, lr in found.items() if lr in beyond])


def tuned(lines: list[dict], arm: str, seeds, regime: str, draws: int) -> dict[float, float]:
    """Learning rate -> mean accuracy over the tuning seeds after so many draws."""
    found = {}
    for line in of(lines, seeds, arm=arm, regime=regime):
        found.setdefault(line["lr"], []).append(at(line, "samples", draws))
    return {lr: mean(values) for lr, values in sorted(found.items())}


def best(lines: list[dict], *which) -> float:
    """The rate with the highest mean; of equal ones the lowest."""
    means = tuned(lines, *which)
    return max(means, key=means.get)


# ---------------------------------------------------------------------------- measures and verdicts
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

    A trained token (forward and backward) costs three times what a decoded one adds. r = 2: about
    the share in the paper's runs. r = 0, a GPU so empty that only its steps count, is engine steps.
    """
    return {f"r{r}": 0.02 * (row["engine_steps"] + r / 64 * (row["tokens"] + 3 * row["trained"]))
            for r in (0.5, 2)}


def interpolate(x: float, rows: list[dict], key: str, other: str) -> float:
    import numpy as np

    return float(np.interp(x, [row[key] for row in rows], [row[other] for row in rows]))


def lost(lines: list[dict], draws: int) -> str:
    """How many runs are below their start after so many draws."""
    below = sum(at(line, "samples", draws) < line["evals"][0]["avg"] for line in lines)
    return f"{below} of {len(lines)}"


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


# ------------------------------------------------------------------------------------------- tables
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
