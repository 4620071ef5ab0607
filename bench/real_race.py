"""Do adaptive rounds help a real model? Four sampling rules train SmolLM2-135M-Instruct.

    python bench/real_race.py --processes 2   # the pair first; resumable; 10 hours of a core
    python bench/real_race.py --draw          # only tables, from what is stored

What is compared and what counts was written down before the first run: bench/plan.md, "A
real model". A run becomes a line of bench/results/real_race.jsonl (see study.py), its evaluations
with what had been spent by then.
"""
import skills
import study

from parts.folder import read_rows

STUDY = "real_race"
SEEDS = range(40, 45)
PAIR = ("ada-balance", "uniform-4-wide")
ARMS = {  # name -> flags, prompts a step, steps: about 4,300 draws each
    "ada-balance": (["--sampler", "ada-balance"], 16, 20),
    "uniform-4-wide": (["--sampler", "uniform", "--n", "4"], 54, 20),
    "ada-balance-cap": (["--sampler", "ada-balance", "--max-rounds-all-correct", "1"], 16, 24),
    "uniform-16": (["--sampler", "uniform", "--n", "16"], 16, 17),
}
RUNS = study.ROOT / "runs" / "real_race"
COSTS = {"draws": "samples", "tokens drawn": "tokens", "tokens trained": "trained"}


def train(arm: str, seed: int) -> None:
    """One run, resumed if it was interrupted; then a line of the study."""
    flags, prompts, steps = ARMS[arm]
    name = f"{arm}-seed{seed}"
    seconds = study.launch(RUNS, name, [
        "--model", "SmolLM2-135M-Instruct", *flags, "--batch-prompts", str(prompts), "--steps",
        str(steps), "--eval-every", "5", "--log-groups", "0", "--seed", str(seed)])
    folder = RUNS / "runs" / name
    metrics = list(read_rows(folder / "metrics.jsonl"))
    evals = [skills.spent(row, metrics) for row in read_rows(folder / "eval.jsonl")]
    silent = [step["zero_signal"] for step in metrics]
    study.add(STUDY, dict(run=name, arm=arm, seed=seed, cpu_seconds=round(seconds, 1),
                          metrics=study.columns([dict(zero_signal=share) for share in silent]),
                          evals=study.columns(evals)))
    print(f"{name}: {evals[-1]['avg']}", flush=True)


def train_all(processes: int) -> None:
    """The primary pair with all its seeds; then the others, a seed at a time."""
    plan = [(arm, seed) for seed in SEEDS for arm in PAIR]
    plan += [(arm, seed) for seed in SEEDS for arm in ARMS if arm not in PAIR]
    study.train_missing(STUDY, {f"{arm}-seed{seed}": (arm, seed) for arm, seed in plan}, train,
                        processes)


def difference(lines: list[dict], arm: str, cost: str) -> str:
    """Points by which the arm is ahead of uniform-4-wide at equal cost, with the plan's word."""
    budget = min(line["evals"][-1][cost] for line in lines if line["arm"] in (arm, PAIR[1]))
    found = skills.compare(lines, arm, PAIR[1], lambda line: skills.at(line, cost, budget))
    return skills.in_points(*found) + f" (at {budget:,})"


def report(lines: list[dict]) -> str:
    rivals = [arm for arm in ARMS if arm != PAIR[1]
              and len(study.of(lines, SEEDS, arm=arm)) > 1]
    verdicts = [["minus uniform-4-wide", *(f"at equal {cost}" for cost in COSTS), "at equal steps"]]
    for arm in rivals:
        cells = [difference(lines, arm, cost) for cost in COSTS.values()]
        verdicts.append([arm, *cells, difference(lines, arm, "step")])
    spent = [["arm", "runs", "before", "at the end", "draws", "tokens drawn", "tokens trained",
              "silent prompts", "minutes of a core"]]
    for arm in ARMS:
        if mine := study.of(lines, SEEDS, arm=arm):
            spent.append([arm, str(len(mine)), *summary(mine)])
    return skills.as_page({"Differences": study.markdown(verdicts),
                           "What the runs took": study.markdown(spent)}, lines)


def summary(lines: list[dict]) -> list[str]:
    """The cells of an arm: means over its runs."""
    def mean(values):
        values = list(values)
        return sum(values) / len(values)

    first, last = ([line["evals"][i] for line in lines] for i in (0, -1))
    costs = [f"{mean(row[cost] for row in last):,.0f}" for cost in COSTS.values()]
    silent = mean(step["zero_signal"] for line in lines for step in line["metrics"])
    return [f"{mean(row['avg'] for row in first):.1%}", f"{mean(row['avg'] for row in last):.1%}",
            *costs, f"{silent:.0%}", f"{mean(line['cpu_seconds'] for line in lines) / 60:.0f}"]


def main() -> None:
    args = study.parser(__doc__).parse_args()
    if not args.draw:
        train_all(args.processes)
    text = report(study.load(STUDY))
    (study.RESULTS / f"{STUDY}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
