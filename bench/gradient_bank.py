"""Measures the value of one answer for a real model: each rule combines stored gradients.

    python minirl.py --model SmolLM2-135M-Instruct --steps 10 --seed 30 --name bank   # the policy
    python bench/gradient_bank.py --fill     # hours of two cores; resumable, problem by problem
    python bench/gradient_bank.py            # the table from the stored gradients

No arm is trained. 64 answers are sampled for each problem, and the gradient of log pi of each is
stored as a sketch. A sampling rule then takes these answers instead of the engine's. Its update is
the sum of coefficient times sketch over the kept answers. The gain of such an update is its
component along the gradient of the held-out accuracy, for a step of length 1:

    gain = <g, G> / |g|       g = sum of coefficient * grad log pi      G = grad of E[reward]

bench/plan.md, "A real model", says what is compared and what counts.
"""
import argparse
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
from store import RESULTS, markdown, page

from ada_sampler import SamplerConfig, collect
from explorer.what_if import replayed

RUN = Path("runs/bank")
BANK = RUN / "bank"
TRAIN, HELD_OUT, DRAWS = 96, 48, 64  # problems, problems, answers for each
WIDTH = 4  # of a sketch, per matrix of the adapter; the other side keeps its rank
SHORT = 1024  # numbers that replace a sketch if only its length is needed
OUTCOMES = 100  # random repetitions of a rule on one problem
BUDGETS = (300, 1_200, 5_000)  # answers sampled for an update
UPDATES, RESAMPLES = 100, 400
EQUAL = 1.1  # a ratio whose interval lies between 1 / this and this is called equal
ROUNDS = dict(M=4, N=4)  # those of a small model
RULES = {
    "uniform-4": SamplerConfig(sampler="uniform", n=4),
    "uniform-16": SamplerConfig(sampler="uniform", n=16),
    "ada-pos": SamplerConfig(sampler="ada-pos", **ROUNDS),
    "ada-balance-cap": SamplerConfig(sampler="ada-balance", max_rounds_all_correct=1, **ROUNDS),
    "ada-balance": SamplerConfig(sampler="ada-balance", **ROUNDS),
}


# ------------------------------------------------------------------------------ filling the bank
def fill() -> None:
    """One file per problem: rewards [64], and sketches [64, D] or a held-out problem's gradient."""
    from parts.config import parse
    from parts.data import Stream
    from parts.run_folder import find_adapter
    import minirl
    from rewards import open_grader

    find_adapter(str(RUN))  # SystemExit if the run has no checkpoint
    config = parse(["--name", RUN.name, "--resume"])
    with open_grader(config.reward, config.threshold) as grader:
        run = minirl.set_up(RUN, config, grader)
        chosen = dict(train=Stream(run.stream.problems, seed=31).take(TRAIN),
                      held=run.held_out[:HELD_OUT])
        sketch = Sketch(run.policy, WIDTH)
        BANK.mkdir(exist_ok=True)
        for name, problem in ((f"{kind}-{i}", problem) for kind, problems in chosen.items()
                              for i, problem in enumerate(problems)):
            if not (BANK / f"{name}.npz").exists():
                store(name, *answers(problem, run), sketch)
                print(name, flush=True)


def answers(problem, run) -> tuple:
    """(rows, rewards [64]) of new answers to one problem, which decides their seed."""
    from parts.engine import EngineForSampler, seed_all
    from parts.logprobs import Sequence

    seed_all(problem.id)
    engine = EngineForSampler(run.engine, run.config.max_tokens)
    settings = replace(run.config, sampler="uniform", n=DRAWS)
    group, = collect([problem], settings, engine, run.grader)
    ids = problem.prompt_ids
    rows = [Sequence(ids + s.rollout.token_ids, len(ids)) for s in group.pool]
    return rows, np.array([s.reward for s in group.pool])


def store(name: str, rows: list, rewards, sketch) -> None:
    """Stores rewards and sketches [answers, D]; of held-out problems the gradient [D] of E[reward].

    If all rewards are equal, the coefficients of every rule are 0, so no gradient is needed.
    """
    found = np.zeros((len(rows), sketch.size), np.float32)
    if rewards.min() < rewards.max():
        own = {tuple(row.ids): row for row in rows}
        known = {ids: sketch(row) for ids, row in own.items()}
        found = np.stack([known[tuple(row.ids)] for row in rows])
    if name.startswith("held"):
        found = (rewards - rewards.mean()) @ found / (len(rows) - 1)
    partial = BANK / "partial.npz"
    np.savez(partial, rewards=rewards, sketch=found.astype(np.float32))
    partial.replace(BANK / f"{name}.npz")


class Sketch:
    """The gradient of log pi(answer) with respect to the adapter, shortened.

    Of each matrix the side that has the adapter's rank is kept, the other is multiplied by random
    signs, [size, width] / sqrt(width). So sketches have the lengths and angles of the gradients, on
    average over the signs.
    """

    def __init__(self, policy, width: int, seed: int = 0):
        import torch

        self.policy, self.signs = policy, {}
        random_bits = torch.Generator().manual_seed(seed)
        self.weights = {name: p for name, p in policy.named_parameters() if "lora_" in name}
        for name, weight in self.weights.items():
            size = weight.shape["lora_A" in name]  # A is [rank, in], B [out, rank]
            bits = torch.randint(0, 2, (size, width), generator=random_bits)
            self.signs[name] = (2 * bits - 1).to(weight.dtype) / width**0.5
        self.size = sum(width * min(weight.shape) for weight in self.weights.values())

    def __call__(self, row):
        """[D]"""
        import torch

        from parts.logprobs import token_logprobs

        token_logprobs(self.policy, [row])[0].sum().backward()
        found = []
        for name, P in self.signs.items():
            grad = self.weights[name].grad
            found.append((P.T @ grad.T if "lora_A" in name else grad.T @ P).flatten())
        self.policy.zero_grad(set_to_none=True)
        return torch.cat(found).numpy()


# ------------------------------------------------------------------------------ rules on the bank
def coefficients(rewards, config: SamplerConfig, rng) -> tuple[np.ndarray, int]:
    """(coefficient of each stored answer, number sampled) of one problem, in a random order."""
    order = list(range(len(rewards)))
    rng.shuffle(order)
    pool = [dict(status="graded", reward=float(rewards[i])) for i in order]
    fate = replayed(pool, config)
    found = np.zeros(len(rewards))
    found[[order[place] for place in fate["kept"]]] = fate["coefficients"]
    return found, fate["draws"]


def outcomes(config: SamplerConfig, bank: list[dict]) -> dict:
    """The results of the rule for each problem in 100 repetitions: answers, and the update as

    along [problems, 100, held-out problems]: its products with their gradients
    short [problems, 100, SHORT]: the sum of its answers' short sketches
    """
    rng, found = random.Random(0), dict(draws=[], along=[], short=[])
    for problem in bank:
        tries = [coefficients(problem["rewards"], config, rng) for _ in range(OUTCOMES)]
        c = np.stack([coefficient for coefficient, _ in tries])
        found["draws"].append(np.mean([draws for _, draws in tries]))
        found["along"].append(c @ problem["along"])
        found["short"].append(c @ problem["short"])
    return {key: np.array(values) for key, values in found.items()}


def read_bank() -> list[dict]:
    """A dict per training problem: rewards [64], along [64, held-out problems], short [64, SHORT].
    """
    files = {kind: sorted(BANK.glob(f"{kind}-*.npz")) for kind in ("train", "held")}
    if not all(files.values()):
        raise SystemExit(f"Nothing is stored in {BANK}: --fill comes first.")
    G = np.stack([np.load(file)["sketch"] for file in files["held"]])
    rng = np.random.default_rng(1)
    R = rng.standard_normal((G.shape[1], SHORT), np.float32) / SHORT**0.5
    stored = (np.load(file) for file in files["train"])
    return [dict(rewards=one["rewards"], along=one["sketch"] @ G.T, short=one["sketch"] @ R)
            for one in stored]


# ------------------------------------------------------------------------------ what they gain
def mean_gain(found: dict, budget: int, chosen, held, rng) -> float:
    """The mean over UPDATES updates of `budget` answers to the problems `chosen`, for `held`."""
    prompts = max(1, round(budget / found["draws"][chosen].mean()))
    at = chosen[rng.integers(0, len(chosen), (UPDATES, prompts))]
    outcome = rng.integers(0, OUTCOMES, at.shape)
    along = found["along"][at, outcome].sum(1)[:, held].mean(1)
    updates = (found["short"][a, o].sum(0) for a, o in zip(at, outcome))
    length = np.stack([np.linalg.norm(update) for update in updates])
    return float((along / np.maximum(length, 1e-30)).mean())  # an update without gradient is 0


def ratios(found: dict[str, dict], budget: int, base: str = "uniform-4") -> dict[str, tuple]:
    """rule -> (ratio of its mean gain to that of `base`, low, high), a 95 % interval by resampling
    the problems of both sets.
    """
    rng = np.random.default_rng(budget)
    train, held = (len(found[base]["along"]), found[base]["along"].shape[2])

    def gains(chosen, tested) -> dict:
        return {arm: mean_gain(own, budget, chosen, tested, rng) for arm, own in found.items()}

    seen = [gains(np.arange(train), np.arange(held)) for _ in range(20)]
    again = [gains(rng.integers(0, train, train), rng.integers(0, held, held))
             for _ in range(RESAMPLES)]
    whole = {arm: np.mean([one[arm] for one in seen]) for arm in found}
    table = {}
    for arm in found:
        spread = [one[arm] / one[base] for one in again]
        table[arm] = (whole[arm] / whole[base], *np.percentile(spread, (2.5, 97.5)))
    return table


def verdict(low: float, high: float) -> str:
    word = "ahead" if low > 1 else "behind" if high < 1 else "open"
    return "equal" if 1 / EQUAL <= low and high <= EQUAL else word


def report(found: dict[str, dict]) -> str:
    head = ["rule", "draws per prompt", *(f"{budget:,} draws an update" for budget in BUDGETS)]
    by_budget = [ratios(found, budget) for budget in BUDGETS]
    lines = [head]
    for arm, own in found.items():
        cells = [f"{ratio:.2f} [{low:.2f}, {high:.2f}]: {verdict(low, high)}"
                 for ratio, low, high in (table[arm] for table in by_budget)]
        lines.append([arm, f"{own['draws'].mean():.1f}", *cells])
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fill", action="store_true", help="sample and store what is missing")
    args = parser.parse_args()
    if args.fill:
        fill()
    bank = read_bank()
    table = report({rule: outcomes(config, bank) for rule, config in RULES.items()})
    text = page("gradient_bank", {"Gains relative to uniform-4": table}, [])
    (RESULTS / "gradient_bank.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
