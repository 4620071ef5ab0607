"""Engine steps of a batch: with and without a barrier, and against what no scheduler can beat.

    python bench/engine_steps.py     # about two minutes on one core; writes
                                     bench/results/engine_steps.json

On a GPU a decode step costs about the same at any batch size, so engine steps are seconds. Same
model, prompts, rule (ada-balance, 4 rounds of 8) and seeds on all sides.

critical path   (of each rule; with a barrier, its own) a prompt's next round depends on its last
                one, so a batch takes at least as many steps as the longest chain of rounds of one
                prompt, each as long as its longest response (or, with early opening, as long as it
                takes until the next round is certain). That is what an engine with a slot for
                everybody and verdicts without delay would need: `Replay` is that engine, with the
                very lengths and verdicts of the real run.
"long tail"     in the place of the model's own lengths, a limit per sample drawn from a Pareto
                distribution (shape 1.2, 8 to 256 tokens), and coins for verdicts.
"few slots"     the same with 64 responses at a time: there, work waits for slots, not for rounds.
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

from ada_sampler import SamplerConfig, collect  # noqa: E402
from parts.models import tiny_folder  # noqa: E402
from parts.problems import chains  # noqa: E402

WAYS = {"barrier": dict(barrier=True), "no barrier": dict(early_opening=False), "early opening": {}}
PASS_RATES = (0.02, 0.2, 0.5, 0.9)


class Counted:
    """The engine as the sampler sees it: counts its steps, notes every response's length."""

    def __init__(self, engine, limit):
        self.engine, self.limit = engine, limit
        self.steps, self.lengths = 0, {}

    def submit(self, key, problem):
        self.engine.submit(key, problem.prompt_ids, self.limit(key))

    def step(self):
        self.steps += 1
        finished = self.engine.step()
        self.lengths |= {key: len(rollout.token_ids) for key, rollout in finished}
        return finished

    @property
    def busy(self):
        return self.engine.busy


class Replay:
    """An engine with a slot for every response, which takes as many steps as it did in the real
    run.

    It waits for the sampler: the real one decodes on while the sampler judges, so that a round
    begins a step late. Such a wait is no step.
    """

    def __init__(self, lengths: dict):
        self.lengths, self.left, self.steps, self.waits = lengths, {}, 0, False

    def submit(self, key, problem):
        self.left[key] = self.lengths[key]

    def step(self):
        if self.waits:
            self.waits = False
            return []
        self.steps += 1
        self.left = {key: left - 1 for key, left in self.left.items()}
        finished = [key for key, left in self.left.items() if left == 0]
        for key in finished:
            del self.left[key]
        self.waits = bool(finished)
        return [(key, SimpleNamespace(token_ids=[0] * self.lengths[key], text=""))
                for key in finished]

    @property
    def busy(self):
        return bool(self.left)


class Remembered:
    """A judge that notes its verdicts; without another to ask, it repeats them."""

    def __init__(self, judge=None, verdicts=None):
        self.judge, self.verdicts = judge, {} if verdicts is None else verdicts

    def submit(self, key, problem, rollout):
        if self.judge:
            self.judge.submit(key, problem, rollout)

    def result(self, key):
        if self.judge:
            self.verdicts[key] = self.judge.result(key)
        return self.verdicts[key]


def coins(seed: int):
    """Verdicts decided by prompt and place alone, so that all sides see the same."""
    def result(key):
        rate = PASS_RATES[key[0] % len(PASS_RATES)]
        return SimpleNamespace(reward=float(random.Random(f"{seed} {key}").random() < rate),
                               status="coin")

    return SimpleNamespace(submit=lambda *_: None, result=result)


def measure(engine, problems, judge, seed: int, limit, **way) -> dict:
    """One batch: engine steps, those of its critical path, samples."""
    from parts.engine import seed_everything

    seed_everything(random.Random(f"engine steps {seed}"))
    counted, judge = Counted(engine, limit), Remembered(judge)
    groups = collect(problems, SamplerConfig(), counted, judge, **way)
    least = critical_path(problems, counted.lengths, judge.verdicts, **way)
    return dict(steps=counted.steps, critical_path=least,
                samples=sum(len(group.pool) for group in groups))


def critical_path(problems, lengths: dict, verdicts: dict, **way) -> int:
    """Steps of the same batch on an engine that never lets a response wait."""
    ideal = Replay(lengths)
    collect(problems, SamplerConfig(), ideal, Remembered(verdicts=verdicts), **way)
    return ideal.steps


def problems_of(engine, count: int, seed: int) -> list:
    return [SimpleNamespace(
        prompt_ids=engine.tokenizer.encode(f"<|user|>{row['problem']}<|assistant|>"),
        answer=row["answer"]) for row in chains("train", count, seed=seed)]


def pareto(key) -> int:
    return min(256, int(8 * random.Random(f"{key}").paretovariate(1.2)))


def main() -> None:
    from parts.engine import Engine
    from rewards import Grader

    table = {}
    with Grader(1) as grader:
        verifier = SimpleNamespace(result=grader.result,
                                   submit=lambda key, problem, rollout: grader.submit(
            key, problem.answer, rollout.text))
        for slots in (256, 64):
            engine = Engine(tiny_folder(), max_model_len=512, max_num_seqs=slots, dtype="float32")
            batches = {"24 prompts (default)": 24, "32 prompts": 32, "32 prompts, long tail": 32}
            for name, count in batches.items():
                long = "long tail" in name
                engine.sampling["ignore_eos"] = long
                found = {way: [] for way in WAYS}
                for seed in range(8):
                    problems = problems_of(engine, count, seed)
                    for way, how in WAYS.items():
                        found[way].append(measure(engine, problems, coins(seed)
                                                  if long else verifier, seed,
                                                  pareto if long else lambda key: 64, **how))
                report(table, name + (", few slots" if slots < 256 else ""), found)
    (ROOT / "bench/results/engine_steps.json").write_text(json.dumps(table, indent=1) + "\n")


def report(table: dict, name: str, found: dict) -> None:
    """Means over seeds into `table`, and on the screen."""
    table[name] = {way: {key: mean(row[key] for row in rows) for key in rows[0]}
                   for way, rows in found.items()}
    for way, row in table[name].items():
        row["ratio"] = row["steps"] / row["critical_path"]
        row["of_barrier"] = row["steps"] / table[name]["barrier"]["steps"]
        print(f"{name:36} {way:14} {row['steps']:7.1f} steps, {row['of_barrier']:.2f} of those "
              "with a barrier; "
              f"critical path {row['critical_path']:7.1f}, ratio {row['ratio']:.3f}; "
              f"{row['samples']:.0f} samples",
              flush=True)


if __name__ == "__main__":
    main()
