"""How a step's engine steps fall with the number of GPUs, measured with one engine on a CPU.

    python bench/many_gpus.py --measure   # 16 slots, 1, 2, 4 ranks: about five minutes on one core
    python bench/many_gpus.py             # the table of docs/many_gpus.md

A rank's samples have their own seeds, so one engine can draw the ranks' shares one after the other.
A line of bench/results/many_gpus.jsonl is one share: its engine steps, and (prompt, sample, length,
reward) of each sample. The rank with the most engine steps decides: all wait for it.
"""
import argparse
import json
import os
import random
import sys
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


# ------------------------------------------------------------------------------ the table
def slowest(lines: list[dict], prompts: int, world: int) -> list[int]:
    """Engine steps of the slowest rank, per seed."""
    return [max(line["steps"] for line in lines if line["seed"] == seed
                and (line["prompts"], line["world"]) == (prompts, world)) for seed in SEEDS]


def table(lines: list[dict]) -> str:
    from study import markdown

    one = mean(slowest(lines, PROMPTS, 1))
    cells = [["ranks", "prompts", "engine steps of the slowest", "of one rank's"]]
    for prompts, world in MEASURED:
        steps = slowest(lines, prompts, world)
        cells.append([str(world), str(prompts), ", ".join(map(str, steps)),
                      f"{mean(steps) / one:.2f}"])
    return markdown(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="draw the samples anew")
    if parser.parse_args().measure:
        FILE.write_text("".join(
            json.dumps(line, separators=(",", ":")) + "\n" for line in measure()))
    print(table([json.loads(line) for line in FILE.read_text().splitlines()]))


if __name__ == "__main__":
    main()
