"""Engine steps that sampling without a barrier between prompts takes, against waiting for everyone after each round.

    python bench/engine_steps.py         # about two minutes on one core; writes bench/results/engine_steps.json

On a GPU a decode step costs about the same at any batch size, so engine steps are seconds. Same model, prompts, rule
(ada-balance, 4 rounds of 8) and seeds for both sides. "long tail" replaces the model's own lengths by a limit per sample
drawn from a Pareto distribution (shape 1.2, 8 to 256 tokens), and its verdicts by coins with the model's pass rates.
"""
import json
import os
import random
import sys
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from parts import tiny  # noqa: E402
from ada_sampler import SamplerConfig, collect  # noqa: E402
from parts.engine import Engine  # noqa: E402
from minirl import reseed  # noqa: E402
from rewards import Grader  # noqa: E402


class Steps:
    """The engine as the sampler sees it, counting its steps."""

    def __init__(self, engine, limit):
        self.engine, self.limit, self.steps = engine, limit, 0

    def submit(self, key, problem):
        self.engine.submit(key, problem.prompt_ids, self.limit(key, problem))

    def step(self):
        self.steps += 1
        return self.engine.step()

    @property
    def busy(self):
        return self.engine.busy


def coins(seed: int):
    """A grader whose verdict on a sample is decided by prompt and place alone, so that both sides see the same."""
    def result(key):
        return SimpleNamespace(reward=float(random.Random(f"{seed} {key}").random() < (0.02, 0.2, 0.5, 0.9)[key[0] % 4]), status="coin")
    return SimpleNamespace(submit=lambda *_: None, result=result)


def steps(engine, problems, judge, seed: int, barrier: bool, early: bool, limit) -> tuple[int, int]:
    """(engine steps, samples) of one batch."""
    reseed(seed, "engine steps")
    counted = Steps(engine, limit)
    groups = collect(problems, SamplerConfig(), counted, judge, barrier=barrier, early_opening=early)
    return counted.steps, sum(len(group.pool) for group in groups)


def main() -> None:
    engine = Engine(tiny.folder(), max_model_len=512, max_num_seqs=256, dtype="float32")
    end = engine.tokenizer.eos_token_id
    table = {}
    with Grader(1) as grader:
        judge = SimpleNamespace(submit=lambda key, problem, r: grader.submit(key, problem.answer, r.text), result=grader.result)
        pareto = lambda key, problem: min(256, int(8 * random.Random(f"{key}").paretovariate(1.2)))  # noqa: E731
        for name, count, limit in (("32 prompts", 32, lambda *_: 64), ("24 prompts (default)", 24, lambda *_: 64), ("32 prompts, long tail", 32, pareto)):
            long = limit is pareto
            engine.sampling["ignore_eos"] = long
            results = []
            for seed in range(8):
                rows = tiny.problems("train", count, seed=seed)
                problems = [SimpleNamespace(prompt_ids=engine.tokenizer.encode(f"<|user|>{r['problem']}<|assistant|>"), answer=r["answer"]) for r in rows]
                who = coins(seed) if long else judge
                results.append([steps(engine, problems, who, seed, *how, limit) for how in ((True, False), (False, False), (False, True))])
            sums = [mean(r[i][0] for r in results) for i in range(3)]
            drawn = [mean(r[i][1] for r in results) for i in range(3)]
            table[name] = dict(barrier=sums[0], no_barrier=sums[1], early_opening=sums[2], ratio=sums[2] / sums[0], samples=drawn)
            print(f"{name:24} barrier {sums[0]:6.1f} steps   no barrier {sums[1]:6.1f}   and early opening {sums[2]:6.1f}   ratio {sums[2] / sums[0]:.2f}"
                  f"   samples {drawn[0]:.0f} / {drawn[2]:.0f}", flush=True)
    assert end is not None
    (ROOT / "bench/results").mkdir(exist_ok=True)
    (ROOT / "bench/results/engine_steps.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
