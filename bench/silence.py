"""Silent prompts and draws of each rule: predicted from half of a run, counted in the rest.

    python minirl.py --model Qwen2.5-Math-1.5B --sampler uniform --n 32 --batch-prompts 256 \\
        --steps 1 --log-groups all --name silence
    python bench/silence.py runs/silence

Each prompt has 32 answers. A rule draws from the first 16 in many random orders, which gives the
prediction, and from the last 16 in the order in which they were drawn, which is the count. It holds
if shares differ by 0.04 at most and draws per prompt by 1 at most (bench/gpu_plan.md).
"""
import random
import sys
from pathlib import Path
from statistics import fmean

import study
from gradient_bank import RULES, coefficients

from parts.folder import read_rows

ORDERS = 50
NEAR = dict(silent=0.04, draws=1.0)


def facts(rewards: list[float], config, rng=None) -> tuple[bool, int]:
    """(silent, draws) of a rule on one prompt's stored rewards. rng None: in their own order."""
    found, draws = coefficients(rewards, config, rng)
    return not found.any(), draws


def compare(pools: list[list[float]], config) -> dict[str, tuple[float, float]]:
    """silent, draws: (predicted, counted), means over the prompts' pools of rewards."""
    rng = random.Random(0)
    predicted, counted = [], []
    for rewards in pools:
        half = len(rewards) // 2
        predicted += [facts(rewards[:half], config, rng) for _ in range(ORDERS)]
        counted.append(facts(rewards[half:], config))
    return {name: (fmean(one[i] for one in predicted), fmean(one[i] for one in counted))
            for i, name in enumerate(NEAR)}


def report(pools: list[list[float]]) -> str:
    lines = [["rule", "silent: predicted, counted", "draws per prompt: predicted, counted", ""]]
    for rule, config in RULES.items():
        found = compare(pools, config)
        holds = all(abs(a - b) <= NEAR[name] for name, (a, b) in found.items())
        (silent, seen), (draws, drawn) = found["silent"], found["draws"]
        lines.append([rule, f"{silent:.1%}, {seen:.1%}", f"{draws:.2f}, {drawn:.2f}",
                      "holds" if holds else "does not hold"])
    return study.markdown(lines)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__.split("\n\n")[1])
    pools = [[sample["reward"] for sample in group["pool"]]
             for group in read_rows(Path(sys.argv[1], "groups.jsonl"))]
    if not pools or min(map(len, pools)) < 32:
        raise SystemExit("Each prompt needs 32 answers: run the first command.")
    print(f"{len(pools)} prompts\n\n{report(pools)}")


if __name__ == "__main__":
    main()
