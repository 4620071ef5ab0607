"""The study grpo: is the default better than GRPO on a real model? bench/plan.md has its plan.

    python bench/study.py grpo --processes 2    # trains missing runs, draws page and picture
    python bench/study.py grpo --draw           # the same without training
"""
import store
from compare import picture
from sampling import at_most, taken
from store import T_95, T_975, Study, by_arm, keep, points, table

from explorer.panels import series
from parts.files import read_rows

DEFAULT, GRPO, WIDE_GROUPS = "default", "grpo-8", "grpo-16"
ARMS = {  # arm -> flags, prompts a step: about 210 answers a step
    DEFAULT: ("--sampler ada-balance", 16),
    GRPO: ("--sampler uniform --n 8 --objective grpo", 27),
    WIDE_GROUPS: ("--sampler uniform --n 16 --objective grpo", 13)}
SEEDS = range(70, 76)
COSTS = {"answers": "samples", "tokens trained": "trained", "steps": "step", "seconds": "seconds"}
PRIMARY = ("answers", "tokens trained")
COLORS = {DEFAULT: "#0072B2", GRPO: "#D55E00", WIDE_GROUPS: "#E69F00"}


def planned() -> list[dict]:
    """The pairs, seed by seed, then the arm with n = 16. The longer run of a pair is first."""
    return [dict(run=f"{arm}-seed{seed}", arm=arm, seed=seed, command=(
        f"minirl.py --model SmolLM2-135M-Instruct {flags} --batch-prompts {prompts} --log-groups 0 "
        f"--seed {seed} --steps 20 --eval-every 4 --name {arm}-seed{seed}"))
        for arms in ((GRPO, DEFAULT), (WIDE_GROUPS,))
        for seed in SEEDS for arm in arms for flags, prompts in [ARMS[arm]]]


def keep_run(folder) -> dict:
    """What other studies keep of a run, and of each evaluation pass@4 and the answers' length."""
    kept = keep(("zero_signal", "prompts", "response_length"), folder)
    evaluations = list(read_rows(folder / "eval.jsonl"))
    kept["evals"] |= dict(
        pass_4=[row["pass"]["4"] for row in evaluations],
        length=[row["response_length"] for row in evaluations])
    return kept


def difference(rival, cost: str, quantiles: dict, verdict: bool, mine) -> str:
    """Points by which the default is ahead of `rival` at equal cost."""
    values, budget = at_most(rival, COSTS[cost], mine)
    return f"{points(values, quantiles, verdict)} (at {budget:,.0f})"


def tables(lines: list[dict]) -> dict[str, str]:
    arms = by_arm(lines, ARMS, SEEDS)
    mine = arms[DEFAULT]
    rivals = {arm: runs for arm, runs in arms.items() if arm != DEFAULT}

    def compared(arms, costs, quantiles, verdict):
        return table({f"default - {arm}": rival for arm, rival in arms.items()}, {
            f"at equal {cost}": lambda rival, cost=cost: difference(
                rival, cost, quantiles, verdict, mine) for cost in costs}, "pair")

    def last(key, form):
        return store.average(form, lambda line: line["evals"][-1][key])

    facts = taken({cost: key for cost, key in COSTS.items() if cost != "steps"}, ()) | {
        "pass@4 at the end": last("pass_4", ".1%"),
        "tokens of an answer at the end": last("length", ".1f")}
    return {
        "Primary, 97.5 % intervals": compared({GRPO: rivals[GRPO]}, PRIMARY, T_975, True),
        "Secondary, 95 % intervals, no verdict": compared(rivals, COSTS, T_95, False),
        "What the runs took, and what they reached": table(arms, facts)}


def draw(lines: list[dict], name: str) -> None:
    """Held-out accuracy against answers and against tokens trained, a thin line for each run."""
    arms = by_arm(lines, ARMS, SEEDS)
    columns = {f"against {cost}": (cost, COSTS[cost], arms) for cost in PRIMARY}
    picture(store.RESULTS / f"{name}.png", (8, 3),
            {"held-out avg@4": lambda line, cost: series(line["evals"], "avg", cost)},
            columns, COLORS)


STUDIES = dict(grpo=Study(tables, draw, planned, keep_run))
