"""What one GPU does with a model of Qwen2.5-Math-1.5B's shape.

    python bench/gpu.py                  # every part
    python bench/gpu.py steps-adapter    # this one

No network and no weights are needed: the model is randomly initialised, and token limits decide
how long its responses are. Every part is a process of its own, so that none inherits another's
memory or ends with it; its result becomes a line of bench/results/gpu.jsonl at once. On a GPU allow
5 minutes for a part, most of it compilation: nobody has measured that yet.

    training                      forward and backward alone: tokens/s, memory by --micro-tokens
    steps-adapter, steps-merge    whole steps with this kind of sync, as a run logs them: sampler,
                                  update, sync, probe; lengths are drawn, verdicts are coins
    steps-sleep                   the same with --sleep

On a CPU the same code runs on a small model, only to show that it works.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from common import RESULTS, alternate, machine, on_gpu, project, random_model, seconds

os.environ.setdefault("HF_HUB_OFFLINE", "1")
FULL = SimpleNamespace(  # Qwen2.5-Math-1.5B and the default lengths
    size=dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
              num_attention_heads=12, num_key_value_heads=2),
    vocabulary=151_936, positions=4096, dtype="bfloat16", prompt=200, sequences=256,
    prompts=32, repeats=3, rows=96, typical=500, longest=3000, micro_tokens=16384,
    memory_points=(4096, 8192), steps=5, probe_texts=64)
SMALL = SimpleNamespace(
    size=dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=1),
    vocabulary=512, positions=512, dtype="float32", prompt=16, sequences=32,
    prompts=4, repeats=2, rows=16, typical=24, longest=128, micro_tokens=512,
    memory_points=(512, 1024), steps=2, probe_texts=16)


# ------------------------------------------------------------------------------------------- memory
def memory_now() -> float:
    """GB of the whole card in use: engine, trainer, CUDA itself. Without a card 0."""
    import torch

    free, total = torch.cuda.mem_get_info() if on_gpu() else (0, 0)
    return (total - free) / 1e9


def peak_memory(call) -> float:
    """GB of torch's tensors at the peak of `call`, and of all before it. Without a card 0."""
    import torch

    if on_gpu():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds(call)
    return torch.cuda.max_memory_allocated() / 1e9


def if_it_fits(call):
    """call()'s result, or None where memory is too small for it."""
    from parts.machine import out_of_memory

    try:
        return call()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise


# -------------------------------------------------------------------------------------- the trainer
def policy_for(model: str, s: SimpleNamespace, **options):
    """The trainer's side, whose adapter has moved already."""
    from parts.policy import load_policy

    policy = load_policy(model, dtype=s.dtype, rank=16, alpha=32, seed=0,
                         device="cuda" if on_gpu() else "cpu", **options)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.02)
    return policy


def long_tailed(rng: random.Random, typical: int, longest: int) -> int:
    """A response's length: log-normal with median `typical`; a few per cent come near `longest`."""
    return max(2, min(longest, int(typical * 2.718 ** rng.gauss(0, 0.8))))


def training_part(model: str, s: SimpleNamespace) -> dict:
    """Forward and backward of a batch with long-tailed lengths, with and without gradient
    checkpointing. None: it does not fit.
    """
    rng = random.Random(0)
    lengths = [s.prompt + long_tailed(rng, s.typical, s.longest) for _ in range(s.rows)]
    found = {}
    for checkpointing in (True, False):
        policy = policy_for(model, s, checkpointing=checkpointing)
        taken = if_it_fits(lambda: alternate(
            s.repeats, train=lambda: train(policy, lengths, s.micro_tokens, s.prompt)))
        peaks = {tokens: if_it_fits(lambda: peak_memory(
            lambda: train(policy, [s.positions] * (tokens // s.positions), tokens)))
            for tokens in s.memory_points}
        found["on" if checkpointing else "off"] = dict(
            tokens_per_second=taken and sum(lengths) / median(taken["train"]), peak_gb=peaks)
        policy = None  # frees its memory for the next one
    return dict(gradient_checkpointing=found)


def train(policy, lengths: list[int], micro_tokens: int, prompt: int = 1) -> None:
    """minirl's own forward and backward over rows of random tokens with these lengths."""
    import minirl
    from parts.logprobs import Row

    policy.zero_grad(set_to_none=True)
    rng = random.Random(0)
    rows = [Row([rng.randrange(9, 200) for _ in range(n)], prompt, [-1.0] * (n - prompt),
                rng.choice((-0.5, 0.5)))
            for n in lengths]
    minirl.accumulate(policy, rows,
                      minirl.Config(micro_tokens=micro_tokens, max_tokens=max(lengths)))


# -------------------------------------------------------------------------------------- whole steps
def random_prompts(s: SimpleNamespace) -> list[list[int]]:
    return [[random.Random(i).randrange(9, 200) for _ in range(s.prompt)]
            for i in range(s.sequences)]


class Scripted:
    """An engine whose responses have lengths drawn by their place, whatever weights would like."""

    def __init__(self, engine, s):
        self.engine, self.s = engine, s
        engine.sampling["ignore_eos"] = True

    def submit(self, key, prompt_ids, max_tokens):
        length = long_tailed(random.Random(f"length/{key}"), self.s.typical, self.s.longest)
        self.engine.submit(key, prompt_ids, min(max_tokens, length))

    def __getattr__(self, name):
        return getattr(self.engine, name)


def coins(prompts: int) -> SimpleNamespace:
    """A grader whose verdicts are drawn by their place; some prompts are easy, some hard."""
    def verdict(key):
        easy = (key[0] % prompts + 0.5) / prompts
        right = random.Random(f"verdict/{key}").random() < easy
        return SimpleNamespace(reward=float(right), status="drawn")

    return SimpleNamespace(submit=lambda *_: None, result=verdict)


def steps_part(model: str, s: SimpleNamespace, mode: str, sleep: bool = False) -> dict:
    """minirl's own training steps, from `prepare` on; lengths are drawn, verdicts are coins."""
    import minirl
    from parts.data import Stream

    settings = dict(dtype=s.dtype, sync=mode, batch_prompts=s.prompts, max_tokens=s.longest,
                    max_prompt_tokens=max(s.prompt, 64), micro_tokens=s.micro_tokens,
                    engine_sequences=s.sequences, lr=2e-5, eval_questions=s.probe_texts,
                    sleep=sleep)
    start, steps = time.perf_counter(), []
    with project(model, **settings) as run:
        found = dict(seconds_start=time.perf_counter() - start, noise=run.probe.noise)
        run.engine, run.grader = Scripted(run.engine, s), coins(s.prompts)
        problems = [SimpleNamespace(prompt_ids=ids, judged_by="") for ids in random_prompts(s)]
        run.stream = Stream(problems, 0)
        minirl.rehearse(run)
        for step in range(1, s.steps + 1):
            _, metrics = minirl.train_step(step, run)
            kept = ("kl_k3", "tokens", "memory_gb", "seconds_", "probe_")
            steps.append(dict(card_gb=memory_now()) | {
                key: value for key, value in metrics.items() if key.startswith(kept)})
        return found | dict(steps=steps)


# ------------------------------------------------------------------------------------------ program
PARTS = {  # name -> (function, what it is told)
    "training": (training_part, {}),
    "steps-adapter": (steps_part, dict(mode="adapter")),
    "steps-merge": (steps_part, dict(mode="merge")),
    "steps-sleep": (steps_part, dict(mode="adapter", sleep=True))}


def measure(part: str, out: Path) -> None:
    """In a process of its own: a line of `out`."""
    s = FULL if on_gpu() else SMALL
    function, told = PARTS[part]
    with tempfile.TemporaryDirectory() as model:
        random_model(s.size, model, s.vocabulary, s.positions, s.dtype)
        found = dict(part=part, machine=machine()) | function(model, s, **told)
    with open(out, "a") as file:
        file.write(json.dumps(found) + "\n")
    print(json.dumps(found, indent=4), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts, sync, training and memory on one GPU.")
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART",
                        help=", ".join(PARTS))
    parser.add_argument("--out", default=RESULTS / "gpu.jsonl", type=Path, help="result")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {' '.join(unknown)}")
    if len(args.parts) == 1:
        return measure(args.parts[0], args.out)
    ends = [subprocess.run([sys.executable, __file__, part, "--out", args.out]).returncode
            for part in args.parts]
    if any(ends):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
