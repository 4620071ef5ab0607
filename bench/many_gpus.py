"""How a step's time falls with the number of GPUs: measured in engine steps, modelled in seconds.

    python bench/many_gpus.py --measure   # 16 slots, 1, 2, 4 ranks: about five minutes on one core
    python bench/many_gpus.py             # the tables of docs/many_gpus.md, and its plot

A rank's share of a batch is drawn from seeds of its own, so it does not matter that here one engine
draws the shares one after the other: `slowest` is the number of engine steps of the rank that took
most, which is what all have to wait for. A line of bench/results/many_gpus.jsonl is one share.

The model replays lengths and verdicts through `collect`, with an engine that has a number of slots
and takes a step per token. At 1, 2 and 4 ranks it is compared with what was measured. For a model
of 1.5 B parameters lengths and pass rates are drawn (LENGTHS, RATES), and COSTS turn engine steps
and tokens into seconds. They are assumptions: nothing here was measured on several GPUs.
"""
import argparse
import functools
import heapq
import json
import math
import os
import random
import sys
from collections import deque
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT))

from ada_sampler import SamplerConfig, collect  # noqa: E402
from recipes import many_gpus as ranks  # noqa: E402

SLOTS, PROMPTS, SEEDS = 16, 24, (0, 1)
MEASURED = [(PROMPTS, 1), (PROMPTS, 2), (PROMPTS, 4), (2 * PROMPTS, 2), (4 * PROMPTS, 4)]
# 1.5 B: tokens of a response, (median, sigma) of a lognormal, at most 3,000; Beta of pass rates
LENGTHS, LONGEST, RATES = (600, 0.6), 3000, (0.6, 1.2)
COSTS = dict(  # seconds, of one GPU of 80 GB
    engine_step=0.008,      # a decode step, whatever is in it
    engine_token=1.5e-5,    # and for each of its tokens
    update_token=6e-5,      # forward, backward and their log-probs
    fixed=3.0,              # sync, probe, logs
    gather=0.6)             # groups, and 74 MB of gradients through main memory (from 2 ranks on)


# ------------------------------------------------------------------------------ measuring
class Noted:
    """The engine as `collect` sees it; notes lengths and counts steps."""

    def __init__(self, engine):
        self.engine, self.steps, self.lengths = engine, 0, {}

    def submit(self, key, problem, seed):
        self.engine.submit(key, problem.prompt_ids, 64, seed=seed)

    def step(self):
        self.steps += 1
        done = self.engine.step()
        self.lengths |= {key: len(rollout.token_ids) for key, rollout in done}
        return done

    @property
    def busy(self):
        return self.engine.busy


class Verdicts:
    """The verifier; notes what it said."""

    def __init__(self, grader):
        self.grader, self.known = grader, {}

    def submit(self, key, problem, rollout):
        self.grader.submit(key, problem.answer, rollout.text)

    def result(self, key):
        self.known[key] = self.grader.result(key).reward
        return SimpleNamespace(reward=self.known[key], status="")


def measure() -> list[dict]:
    """A line per share: (seed, prompts, world, rank), engine steps, and each sample's facts."""
    import torch

    from parts.models import tiny_folder
    from parts.problems import chains
    from parts.engine import Engine
    from rewards import Grader

    engine = Engine(tiny_folder(), max_model_len=512, max_num_seqs=SLOTS, dtype="float32")
    lines = []
    with Grader(1) as grader:
        for seed in SEEDS:
            rows = chains("train", max(prompts for prompts, _ in MEASURED), seed=seed)
            random.Random(seed).shuffle(rows)  # else levels would come in turn, ranks get their own
            problems = [SimpleNamespace(prompt_ids=engine.tokenizer.encode(
                f"<|user|>{row['problem']}<|assistant|>"), answer=row["answer"]) for row in rows]
            for prompts, world in MEASURED:
                for rank in range(world):
                    torch.manual_seed(seed)
                    noted, verdicts = Noted(engine), Verdicts(grader)
                    draw_share(problems[:prompts], rank, world, noted, verdicts)
                    samples = [[rank + world * p, s, length, verdicts.known[p, s]]
                               for (p, s), length in sorted(noted.lengths.items())]
                    lines.append(dict(seed=seed, prompts=prompts, world=world, rank=rank,
                                      steps=noted.steps, samples=samples))
                    print(f"seed {seed}  {prompts} prompts  rank {rank} of {world}: "
                          f"{noted.steps} engine steps, {len(samples)} samples", flush=True)
    return lines


def draw_share(problems: list, rank: int, world: int, noted: Noted, verdicts: Verdicts) -> None:
    """What this rank of so many draws of a batch."""
    ranks.RANK, ranks.WORLD = rank, world
    collect(problems, SamplerConfig(), ranks.SeededEngine(noted), verdicts,
            part=slice(rank, None, world))
    ranks.RANK, ranks.WORLD = 0, 1


# ------------------------------------------------------------------------------ the model
class Slots:
    """An engine that writes a token for each of its first `slots` responses in every step."""

    def __init__(self, slots: int, length, place):
        self.slots, self.length, self.place = slots, length, place
        self.waiting, self.running = deque(), []  # a heap of (its last step, key)
        self.steps, self.tokens, self.news = 0, 0, False

    def submit(self, key, problem):
        self.waiting.append(key)

    def step(self):
        while self.waiting and len(self.running) < self.slots:
            key = self.waiting.popleft()
            length = self.length(self.place(key[0]), key[1])
            self.tokens += length
            heapq.heappush(self.running, (self.steps + length, key))
        # What is finished is acted on a step later. Otherwise nothing happens until the next ends.
        self.steps = self.steps + 1 if self.news else self.running[0][0]
        done = []
        while self.running and self.running[0][0] <= self.steps:
            done.append(heapq.heappop(self.running)[1])
        self.news = bool(done)
        return [(key, SimpleNamespace(token_ids=())) for key in done]

    @property
    def busy(self):
        return bool(self.running or self.waiting)


def replay(prompts: int, world: int, slots: int, length, reward) -> list[tuple[int, int]]:
    """(engine steps, tokens) of every rank."""
    found = []
    for rank in range(world):
        def place(p):
            return rank + world * p

        engine = Slots(slots, length, place)
        judge = SimpleNamespace(
            submit=lambda *_: None,
            result=lambda key: SimpleNamespace(reward=reward(place(key[0]), key[1]), status=""))
        collect([None] * prompts, SamplerConfig(), engine, judge, part=slice(rank, None, world))
        found.append((engine.steps, engine.tokens))
    return found


def slowest(lines: list[dict], prompts: int, world: int) -> list[int]:
    """Engine steps of the slowest rank, per seed."""
    return [max(line["steps"] for line in lines if line["seed"] == seed
                and (line["prompts"], line["world"]) == (prompts, world)) for seed in SEEDS]


def replayed(lines: list[dict], prompts: int, world: int) -> list[int]:
    """Likewise by the model, with lengths and verdicts that were drawn on one rank, or on most."""
    found = []
    for seed in SEEDS:
        facts = {(place, s): (length, reward) for line in lines if line["seed"] == seed
                 for place, s, length, reward in line["samples"]}
        shares = replay(prompts, world, SLOTS, lambda place, s: facts[place, s][0],
                        lambda place, s: facts[place, s][1])
        found.append(max(steps for steps, _ in shares))
    return found


def large(seed: int):
    """Lengths and verdicts of a model of 1.5 B parameters: (length, reward) of (place, sample)."""
    @functools.cache
    def rate(place):
        return random.Random(f"{seed}/{place}").betavariate(*RATES)

    def length(place, s):
        rng = random.Random(f"{seed}/{place}/{s}/length")
        return max(20, min(LONGEST, int(rng.lognormvariate(math.log(LENGTHS[0]), LENGTHS[1]))))

    def reward(place, s):
        return float(random.Random(f"{seed}/{place}/{s}").random() < rate(place))

    return length, reward


def seconds(prompts: int, world: int, slots: int = 256, seed: int = 0) -> dict:
    """Of one step with 1.5 B parameters, by phase."""
    c = COSTS
    shares = replay(prompts, world, slots, *large(seed))
    rows = prompts * SamplerConfig().n / world
    trained = rows * LENGTHS[0] * math.exp(LENGTHS[1] ** 2 / 2)
    return dict(
        sample=max(steps * c["engine_step"] + tokens * c["engine_token"]
                   for steps, tokens in shares),
        update=trained * c["update_token"], fixed=c["fixed"] + c["gather"] * (world > 1))


# ------------------------------------------------------------------------------ what comes of it
def table(lines: list[dict]) -> str:
    from study import markdown

    one = mean(slowest(lines, PROMPTS, 1))
    cells = [["ranks", "prompts", "engine steps of the slowest", "of one rank's", "by the model"]]
    for prompts, world in MEASURED:
        steps, model = slowest(lines, prompts, world), replayed(lines, prompts, world)
        cells.append([str(world), str(prompts), ", ".join(map(str, steps)),
                      f"{mean(steps) / one:.2f}", ", ".join(map(str, model))])
    return markdown(cells)


GPUS, BATCHES = (1, 2, 4, 8, 16, 32, 64), (32, 128, 512, 2048)


def modelled() -> dict:
    """(prompts, GPUs) -> seconds of a step, summed over its phases."""
    return {(prompts, world): sum(seconds(prompts, world).values())
            for prompts in BATCHES for world in GPUS if world <= prompts}


def model_table(found: dict) -> str:
    from study import markdown

    cells = [["prompts per step", *(f"{world} GPU{'s' * (world > 1)}" for world in GPUS)]]
    for prompts in BATCHES:
        row = [str(prompts)]
        for world in GPUS:
            time = found.get((prompts, world))
            row.append(f"{time:.0f} s ({prompts / time:.1f}/s)" if time else "-")
        cells.append(row)
    return markdown(cells)


def draw(found: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for prompts in BATCHES:
        known = [world for world in GPUS if (prompts, world) in found]
        gain = [found[prompts, 1] / found[prompts, world] for world in known]
        axes.plot(known, gain, "o-", label=f"{prompts} prompts per step")
    axes.plot(GPUS, GPUS, ":", color="gray", label="as many times faster as GPUs")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(GPUS, GPUS)
    axes.set_yticks(GPUS, GPUS)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("speed-up of a step")
    axes.set_title("1.5 B parameters, by the model (not measured)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="draw the samples anew")
    args = parser.parse_args()
    file = RESULTS / "many_gpus.jsonl"
    if args.measure:
        lines = measure()
        file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    print(table(lines))
    found = modelled()
    print(model_table(found))
    draw(found, ROOT / "docs" / "many_gpus.png")


if __name__ == "__main__":
    main()
