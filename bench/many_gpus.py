"""How a step's time falls with the number of GPUs: measured in engine steps, modelled in seconds.

    python bench/many_gpus.py --measure   # 16 slots, 1, 2, 4 ranks: about five minutes on one core
    python bench/many_gpus.py             # the tables of docs/many_gpus.md

A rank's samples have their own seeds, so one engine can draw the ranks' shares one after the other.
A line of bench/results/many_gpus.jsonl is one share. The rank with the most engine steps decides:
all wait for it.

The model replays lengths and verdicts through `collect`, with an engine that has a number of slots
and takes a step per token. At 1, 2 and 4 ranks it is compared with the measurement. For 1.5 B
parameters lengths and pass rates are drawn, and COSTS turn steps and tokens into seconds: these are
assumptions, for nothing here was measured on several GPUs.
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
FILE = ROOT / "bench" / "results" / "many_gpus.jsonl"
sys.path.insert(0, str(ROOT))

from ada_sampler import SamplerConfig, collect  # noqa: E402
from recipes import many_gpus as ranks  # noqa: E402

SLOTS, PROMPTS, SEEDS = 16, 24, (0, 1)
MEASURED = [(PROMPTS, 1), (PROMPTS, 2), (PROMPTS, 4), (2 * PROMPTS, 2), (4 * PROMPTS, 4)]
GPUS, BATCHES = (1, 2, 4, 8, 16, 32, 64), (32, 128, 512, 2048)
# 1.5 B: tokens of a response, (median, sigma) of a lognormal, at most 3,000; Beta of pass rates
LENGTHS, LONGEST, RATES = (600, 0.6), 3000, (0.6, 1.2)
COSTS = dict(  # seconds, of one GPU of 80 GB
    engine_step=0.008,      # a decode step, whatever is in it
    engine_token=1.5e-5,    # and for each of its tokens
    update_token=6e-5,      # forward, backward and their log-probs
    fixed=3.0,              # sync, probe, logs
    gather=0.6)             # groups, and 74 MB of gradients through main memory (from 2 ranks on)


# ------------------------------------------------------------------------------ measuring
def measure() -> list[dict]:
    """A line per share: its engine steps, and (prompt, sample, length, reward) of each sample."""
    from parts.engine import Engine
    from parts.models import tiny_folder
    from parts.problems import chains
    from rewards import Grader

    engine = Engine(tiny_folder(), max_model_len=512, max_num_seqs=SLOTS, dtype="float32")
    lines = []
    with Grader(1) as grader:
        for seed in SEEDS:
            rows = chains("train", max(prompts for prompts, _ in MEASURED), seed=seed)
            random.Random(seed).shuffle(rows)  # they come by level
            problems = [SimpleNamespace(judged_by=row["answer"], prompt_ids=engine.tokenizer.encode(
                f"<|user|>{row['problem']}<|assistant|>")) for row in rows]
            for prompts, world in MEASURED:
                for rank in range(world):
                    share = draw_share(problems[:prompts], rank, world, seed, engine, grader)
                    lines.append(dict(seed=seed, prompts=prompts, world=world, rank=rank) | share)
    return lines


def draw_share(problems: list, rank: int, world: int, seed: int, engine, grader) -> dict:
    import torch

    from parts.engine import WatchedEngine

    torch.manual_seed(seed)
    ranks.RANK, ranks.WORLD = rank, world
    watched = WatchedEngine(engine, max_tokens=64)
    groups = collect(problems, SamplerConfig(), ranks.SeededEngine(watched), grader,
                     part=slice(rank, None, world))
    return dict(steps=watched.steps, samples=[
        [rank + world * group.index, s.index, len(s.rollout.token_ids), s.reward]
        for group in groups for s in group.pool])


# ------------------------------------------------------------------------------ the model
class Slots:
    """An engine that writes a token for each of its first `slots` responses in every step, and the
    grader of these responses. length(prompt, sample), reward(prompt, sample).
    """

    def __init__(self, rank: int, world: int, slots: int, length, reward):
        self.rank, self.world, self.slots = rank, world, slots
        self.length_of, self.reward_of = length, reward
        self.waiting, self.running = deque(), []  # a heap of (its last step, key)
        self.steps, self.tokens, self.news = 0, 0, False

    def submit(self, key, problem, rollout=None):
        if rollout is None:  # asked as an engine
            self.waiting.append(key)

    def result(self, key):
        return SimpleNamespace(reward=self.reward_of(self.place(key), key[1]), status="")

    def place(self, key) -> int:
        return self.rank + self.world * key[0]

    def step(self):
        while self.waiting and len(self.running) < self.slots:
            key = self.waiting.popleft()
            length = self.length_of(self.place(key), key[1])
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


def replay(prompts: int, world: int, slots: int, length, reward) -> list[Slots]:
    """The engines of all ranks after a batch."""
    engines = [Slots(rank, world, slots, length, reward) for rank in range(world)]
    for engine in engines:
        collect([None] * prompts, SamplerConfig(), engine, engine,
                part=slice(engine.rank, None, world))
    return engines


def slowest(lines: list[dict], prompts: int, world: int) -> list[int]:
    """Engine steps of the slowest rank, per seed."""
    return [max(line["steps"] for line in lines if line["seed"] == seed
                and (line["prompts"], line["world"]) == (prompts, world)) for seed in SEEDS]


def replayed(lines: list[dict], prompts: int, world: int) -> list[int]:
    """The same by the model, with the recorded lengths and verdicts."""
    found = []
    for seed in SEEDS:
        known = {(place, s): (length, reward) for line in lines if line["seed"] == seed
                 for place, s, length, reward in line["samples"]}
        engines = replay(prompts, world, SLOTS, lambda *key: known[key][0],
                         lambda *key: known[key][1])
        found.append(max(engine.steps for engine in engines))
    return found


@functools.cache
def rate(place: int) -> float:
    return random.Random(f"0/{place}").betavariate(*RATES)


def drawn_length(place: int, s: int) -> int:
    length = random.Random(f"0/{place}/{s}/length").lognormvariate(math.log(LENGTHS[0]), LENGTHS[1])
    return max(20, min(LONGEST, int(length)))


def drawn_reward(place: int, s: int) -> float:
    return float(random.Random(f"0/{place}/{s}").random() < rate(place))


def seconds(prompts: int, world: int) -> float:
    """Of one step with 1.5 B parameters and 256 slots."""
    c = COSTS
    engines = replay(prompts, world, 256, drawn_length, drawn_reward)
    sample = max(engine.steps * c["engine_step"] + engine.tokens * c["engine_token"]
                 for engine in engines)
    trained = prompts * SamplerConfig().n / world * LENGTHS[0] * math.exp(LENGTHS[1] ** 2 / 2)
    return sample + trained * c["update_token"] + c["fixed"] + c["gather"] * (world > 1)


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


def model_table(found: dict) -> str:
    """`found`: (prompts, GPUs) -> seconds of a step."""
    from study import markdown

    cells = [["prompts per step", *(f"{world} GPU{'s' * (world > 1)}" for world in GPUS)]]
    for prompts in BATCHES:
        times = [found.get((prompts, world)) for world in GPUS]
        cells.append([str(prompts), *(f"{time:.0f} s ({prompts / time:.1f}/s)" if time else "-"
                                      for time in times)])
    return markdown(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="draw the samples anew")
    if parser.parse_args().measure:
        FILE.write_text("".join(
            json.dumps(line, separators=(",", ":")) + "\n" for line in measure()))
    print(table([json.loads(line) for line in FILE.read_text().splitlines()]))
    found = {(prompts, world): seconds(prompts, world)
             for prompts in BATCHES for world in GPUS if world <= prompts}
    print(model_table(found))


if __name__ == "__main__":
    main()
