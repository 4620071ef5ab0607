"""Simulates the sampling rules on prompts with a fixed pass rate, without a model, in 2 seconds.

    python course/simulate.py --pass-rate 0.05        # every prompt has it
    python course/simulate.py --pass-rate 0.05 0.5    # half of the prompts have each

For other settings call `simulate` and `report`. The first three columns are per place in the batch.
The update of a prompt is w(p) grad p, where w is the effective weight. With w = 1 it is gradient
ascent on p, and with w = 1/p on log p.
"""
import argparse
import math
import random
import sys
from collections import namedtuple
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ada_sampler import RULES, Estimator, Group, SamplerConfig, collect, set_advantages
from course.laws import Coin, effective_weight

Flip = namedtuple("Flip", "reward status token_ids")  # rollout and verdict in one
PROMPTS = 2000
WRONG, CORRECT = Flip(0.0, "wrong", ()), Flip(1.0, "correct", ())


# ---------------------------------------------------------------------------------- the simulation
class CoinEngine:
    """Replaces the language model. An answer is right with probability p, after one step."""

    def __init__(self, seed: int = 0):
        self.random, self.queue = random.Random(seed).random, []

    def submit(self, key, coin: Coin) -> None:
        self.queue.append((key, CORRECT if self.random() < coin.p else WRONG))

    @property
    def busy(self) -> bool:
        return bool(self.queue)

    def step(self) -> list[tuple]:
        finished, self.queue = self.queue, []
        return finished


def simulate(config: SamplerConfig, p_P: list[float], seed=0, visits: int = 4) -> list[Group]:
    """One step of the real `collect`, with one prompt per pass rate.

    ada-est has no counts in its first epoch, so the last of several is returned.
    """
    config.validate()
    coins = [Coin(i, p) for i, p in enumerate(p_P)]
    verdicts, draw = {}, random.Random(seed + 1)
    grader = SimpleNamespace(
        submit=lambda key, coin, flip: verdicts.update({key: flip}), result=verdicts.pop)
    estimator, engine = Estimator(), CoinEngine(seed)
    for _ in range(visits if config.sampler == "ada-est" else 1):
        groups = collect(
            coins, config, engine, grader, estimator=estimator, more=lambda: draw.choice(coins))
    for group in groups:
        set_advantages(group, config)
    return groups


# ----------------------------------------------------------------------------------- what they show
def report(groups: list[Group], config: SamplerConfig, places: int) -> tuple:
    """(samples, unresolved, without gradient, effective weight, its standard error).

    The first three are per place in the batch. dapo may try several prompts for a place. Then their
    samples add up, the place is unresolved if all fail, and weights are multiplied by the tries.
    """
    tries = len(groups) / places
    weights_P = [tries * effective_weight(group, config) for group in groups]
    error = stdev(weights_P) / len(groups) ** 0.5 if len(groups) > 1 else 0.0
    draws = sum(len(group.pool) for group in groups) / places
    unresolved = 1 - sum(group.outcome == "resolved" for group in groups) / places
    silent = 1 - sum(not group.zero_signal for group in groups) / places
    return draws, unresolved, silent, fmean(weights_P), error


# --------------------------------------------------------------------------------- command line
def main(argv: list[str] | None = None) -> None:
    """Print a line per rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pass-rate", type=float, nargs="+", default=[0.05, 0.2, 0.5, 0.8, 0.95],
                        metavar="P", help="pass rates; the same number of prompts has each")
    rates = parser.parse_args(argv).pass_rate
    if not all(0 <= p <= 1 for p in rates):
        raise SystemExit("--pass-rate takes numbers from 0 to 1.")
    p_P = rates * math.ceil(PROMPTS / len(rates))
    print(f"{len(p_P)} prompts, pass rate {fmean(p_P):.3g} on average")
    print(f"{'':16}{'samples':>8}{'unresolved':>12}{'no gradient':>12}{'effective weight':>20}")
    for rule in RULES:
        config = SamplerConfig(sampler=rule)
        draws, unresolved, silent, weight, error = report(simulate(config, p_P), config, len(p_P))
        print(f"{rule:16}{draws:8.2f}{unresolved:12.3f}{silent:12.3f}{weight:11.2f} +- {error:.2f}")


if __name__ == "__main__":
    main()
