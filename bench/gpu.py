"""What one GPU does with a model of Qwen2.5-Math-1.5B's shape: python bench/gpu.py  (about six minutes, no network)

Needs no weights: the model is randomly initialised, its lengths are set by token limits. Everything printed is measured
here and now; the settings recommended at the end are the largest whose measured memory fits. What could not be measured is
reported as such. Three processes, one after the other, so that none inherits another's memory:

    merge      an engine that gets merged weights: rollouts before and after, seconds of a sync, log-prob gap, sleep levels
    adapter    an engine that swaps the LoRA adapter: the same; and the sampler with and without a barrier
    training   forward and backward alone: tokens/s, share of this machine's matrix speed, memory against --micro-tokens

On a CPU the same code runs on a small model in a minute: only to see that it works.
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
from types import SimpleNamespace

from common import alternate, machine, median, memory_now, on_gpu, parameters, peak_memory, random_model, save, seconds

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PARTS = ("training", "adapter", "merge")
CARDS = (16, 24, 48, 80)  # GB
FULL = dict(  # Qwen2.5-Math-1.5B and the default lengths
    size=dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
              num_key_value_heads=2),
    vocabulary=151_936, positions=4096, dtype="bfloat16", prompt=200, response=256, sequences=256, prompts=32,
    repeats=3, sampler=(120, 800),
    rows=96, typical=500, longest=3000, micro_tokens=16384, memory_points=(4096, 8192), matrix=8192)
SMALL = dict(
    size=dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=1),
    vocabulary=512, positions=512, dtype="float32", prompt=16, response=16, sequences=32, prompts=4, repeats=2, sampler=(12, 64),
    rows=16, typical=24, longest=128, micro_tokens=512, memory_points=(4096, 8192), matrix=512)


def long_tailed(rng: random.Random, typical: int, longest: int) -> int:
    """A response's length: log-normal with median `typical`; a few per cent come near `longest`."""
    return max(2, min(longest, int(typical * 2.718 ** rng.gauss(0, 0.8))))


# ------------------------------------------------------------------------------------------------------ the engine
def engine_part(mode: str, model: str, s: SimpleNamespace) -> dict:
    """Rollouts, sync, memory and log-prob gap with one kind of sync."""
    from parts.engine import Engine
    from parts.policy import load_policy

    memory = dict(start=memory_now())
    engine = Engine(model, max_model_len=s.prompt + s.longest, max_num_seqs=s.sequences, dtype=s.dtype, sync_mode=mode,
                    memory_share=0.45, sleep=True)
    engine.sampling["ignore_eos"] = True  # lengths are what the limits say, whatever random weights would like
    memory["engine"] = memory_now()
    policy = load_policy(model, dtype=s.dtype, rank=16, alpha=32, seed=0, device="cuda" if on_gpu() else "cpu")
    memory["engine and trainer"] = memory_now()
    prompts = [[random.Random(i).randrange(9, 200) for _ in range(s.prompt)] for i in range(s.sequences)]
    found = dict(engine=engine.version, memory_gb=memory, cache_gb=cache_gb(engine))
    if mode == "merge":
        found["tokens_per_second_base"] = rate(engine, prompts, s)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.02)  # a policy that has moved
    found["sync_seconds"] = median(alternate(s.repeats, sync=lambda: engine.sync(policy))["sync"])
    found["tokens_per_second"] = rate(engine, prompts, s)
    memory["engine and trainer, after sampling"] = memory_now()
    found |= logprob_gap(engine, policy, prompts[:16], s)
    if mode == ("adapter" if on_gpu() else "merge"):  # what is the default there
        found["sampler"] = {name: sampler(engine, s, **how) for name, how in {
            "a barrier after every round": dict(barrier=True), "no barrier": dict(early_opening=False),
            "no barrier, early opening (default)": {}}.items()}
    levels = (1, 2) if mode == "merge" else (1,)  # level 2 with LoRA has crashed
    for level in levels if engine.sleeps else ():
        found[f"sleep_level_{level}_seconds"] = seconds(lambda: engine.llm.sleep(level=level))
        memory[f"engine asleep (level {level}) and trainer"] = memory_now()
        if level == 1:  # level 2 drops the weights: nothing to wake up for
            found["wake_seconds"] = seconds(engine.llm.wake_up)
    engine.close()
    return found


def cache_gb(engine) -> float:
    """The engine's key-value cache, of the memory that it has taken."""
    vllm = engine.llm.llm_engine.vllm_config
    c, hf = vllm.cache_config, vllm.model_config.hf_config
    width = hf.num_key_value_heads * hf.hidden_size // hf.num_attention_heads
    return c.num_gpu_blocks * c.block_size * 2 * hf.num_hidden_layers * width * vllm.model_config.dtype.itemsize / 1e9


def rate(engine, prompts, s) -> float:
    """Generated tokens per second, all prompts at once; median after a warm-up."""
    taken = alternate(s.repeats, rollouts=lambda: engine.generate(prompts, n=1, max_tokens=s.response))["rollouts"]
    return len(prompts) * s.response / median(taken)


def logprob_gap(engine, policy, prompts, s) -> dict:
    """|log mu - log pi_old| in nats over sampled tokens: engine and trainer with the same weights."""
    import torch

    from parts.logprobs import token_logprobs
    from parts.policy import Row

    rollouts = engine.generate(prompts, n=1, max_tokens=s.response)
    rows = [Row(ids + r.token_ids, len(ids), r.logprobs, 0.0) for ids, (r,) in zip(prompts, rollouts)]
    mine, theirs = [], []
    with torch.no_grad():
        for row in rows:
            mine.append(token_logprobs(policy, [row])[0].cpu())
            theirs += row.mu
    gap = (torch.cat(mine) - torch.tensor(theirs)).abs()
    return dict(gap_mean=gap.mean().item(), gap_max=gap.max().item(), gap_tokens=len(theirs))


def sampler(engine, s, **how) -> dict:
    """One batch through ada_sampler.collect with drawn lengths and verdicts: the same work whatever the schedule."""
    from ada_sampler import SamplerConfig, collect

    def draw(*key):
        return random.Random("/".join(map(str, key)))

    problems = [SimpleNamespace(id=p, p=(p + 0.5) / s.prompts, ids=[9 + p % 200] * s.prompt) for p in range(s.prompts)]
    script = SimpleNamespace(submit=lambda key, problem: engine.submit(
        key, problem.ids, long_tailed(draw("length", *key), *s.sampler)), step=engine.step)
    grader = SimpleNamespace(submit=lambda *_: None, result=lambda key: SimpleNamespace(
        reward=float(draw("verdict", *key).random() < problems[key[0]].p), status="drawn"))
    world = type("World", (SimpleNamespace,), {"busy": property(lambda _: engine.busy)})(**vars(script))
    before, found = engine.steps, []
    taken = seconds(lambda: found.extend(collect(problems, SamplerConfig(), world, grader, **how)))
    tokens = sum(len(x.rollout.token_ids) for group in found for x in group.pool)
    return dict(steps=engine.steps - before, seconds=taken, samples=sum(len(g.pool) for g in found), tokens=tokens)


# ----------------------------------------------------------------------------------------------------- the trainer
def training_part(mode: str, model: str, s: SimpleNamespace) -> dict:
    """Forward and backward of a batch with long-tailed lengths, without and with gradient checkpointing."""
    from parts.policy import load_policy

    found = dict(matrix_flops=matrix_speed(s), gradient_checkpointing={})
    for checkpointing in ("off", "on"):
        policy = load_policy(model, dtype=s.dtype, rank=16, alpha=32, seed=0, device="cuda" if on_gpu() else "cpu",
                             checkpointing=checkpointing == "on")
        found["parameters"] = parameters(policy)
        found["gradient_checkpointing"][checkpointing] = training_speed(policy, s, found["matrix_flops"]) | dict(peak_gb={
            tokens: peak_memory(lambda: train(policy, [s.positions] * (tokens // s.positions), tokens))
            for tokens in s.memory_points})
        del policy
    return found


def matrix_speed(s) -> float:
    """FLOP/s of a large matrix product in the model's precision: what the share of FLOPs is measured against."""
    import torch

    a, b = (torch.randn(s.matrix, s.matrix, device="cuda" if on_gpu() else "cpu", dtype=getattr(torch, s.dtype)) for _ in "ab")
    return 2 * s.matrix**3 / median(alternate(10, product=lambda: a @ b)["product"])


def train(policy, lengths: list[int], micro_tokens: int, prompt: int = 1) -> None:
    """minirl's own forward and backward over rows of random tokens with these lengths (prompt included)."""
    import minirl

    rng = random.Random(0)
    rows = [minirl.Row([rng.randrange(9, 200) for _ in range(n)], prompt, [-1.0] * (n - prompt), rng.choice((-0.5, 0.5)))
            for n in lengths]
    minirl.accumulate(policy, rows, minirl.Config(micro_tokens=micro_tokens, max_tokens=max(lengths)))
    policy.zero_grad(set_to_none=True)


def training_speed(policy, s, matrix_flops: float) -> dict:
    """Tokens per second (no padding counted) at the default --micro-tokens, and the model's share of the matrix speed."""
    rng = random.Random(0)
    lengths = [s.prompt + long_tailed(rng, s.typical, s.longest) for _ in range(s.rows)]
    try:
        taken = alternate(s.repeats, train=lambda: train(policy, lengths, s.micro_tokens, s.prompt))["train"]
    except RuntimeError as error:  # out of memory
        return dict(why=str(error).splitlines()[0][:100])
    flops = model_flops(policy, lengths, s.prompt) / median(taken)
    return dict(tokens_per_second=sum(lengths) / median(taken), model_flops_share=flops / matrix_flops, seconds=taken)


def model_flops(policy, lengths: list[int], prompt: int) -> float:
    """FLOPs that the mathematics asks for; recomputing under checkpointing does not count.

    Frozen weights: 2 per weight and token forward and 2 backward (no weight gradient; the adapter's own are left out, about
    1 %). Head: the same, at response positions only. Attention: 2 products of length x head size forward and 4 backward per
    head, half of them behind the causal mask.
    """
    c = policy.get_base_model().config
    head, width = c.vocab_size * c.hidden_size, c.num_hidden_layers * c.hidden_size
    body = parameters(policy) - head  # tied: counted once
    return sum(4 * body * n + 4 * head * (n - prompt) + 6 * width * n * n for n in lengths)


# -------------------------------------------------------------------------------------------------- recommendation
def recommend(r: dict, card: float, context: int = 4024, cache: float = 2.0) -> str:
    """The fastest setting whose measured memory fits on a card of so many GB, with 8 % kept free.

    The trainer's peak grows linearly with --micro-tokens: two measured points give the line, and one response of full
    length must fit. `cache`: the least key-value cache in GB that is worth having (2 GB: about 70,000 tokens of this model).
    """
    m = r["adapter"]["memory_gb"]  # the default on a GPU
    trainer = m["engine and trainer"] - m["engine"]
    awake, asleep = m["engine"] - r["adapter"]["cache_gb"] + cache, m["engine asleep (level 1) and trainer"] - trainer
    for sleep, engine in ((False, awake), (True, asleep)):
        for checkpointing in ("off", "on"):
            points = r["training"]["gradient_checkpointing"][checkpointing]["peak_gb"]
            (t0, gb0), (t1, gb1) = sorted((int(tokens), gb) for tokens, gb in points.items())
            peaks = {tokens: gb0 + (gb1 - gb0) / (t1 - t0) * (tokens - t0) for tokens in (context, 8192, 16384, 32768)}
            fitting = [tokens for tokens, peak in peaks.items() if peak <= 0.92 * card - engine]
            if fitting and awake + trainer <= 0.92 * card:
                peak = peaks[fitting[-1]]
                share = 0.92 - (trainer if sleep else peak) / card
                return (f"--gradient-checkpointing {checkpointing} --micro-tokens {fitting[-1]} --engine-memory {share:.2f}"
                        f"{' --sleep' * sleep}   (trainer's peak {peak:.1f} GB)")
    return "too small for this model at these lengths"


# --------------------------------------------------------------------------------------------------------- program
def run_part(part: str, model: str, small: bool, limit: float) -> dict:
    """A part in a process of its own: its result, or {"failed": why}."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        command = [sys.executable, __file__, "--part", part, "--model", model, "--json", str(out)] + ["--small"] * small
        with open(log, "w") as file:
            try:
                subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=max(limit, 1))
            except subprocess.TimeoutExpired:
                return dict(failed="out of time")
        lines = log.read_text(errors="replace").splitlines()
        return json.loads(out.read_text()) if out.exists() else dict(failed=next(
            (line for line in reversed(lines) if "Error" in line), "ended without a result")[:300], log=lines[-60:])


def lines(r: dict) -> list[tuple]:
    """(what, value) for every number that was measured, and for every part that was not."""
    rows = [(part, f"NOT MEASURED: {x['failed']}") for part, x in r.items() if "failed" in x]
    for mode in ("merge", "adapter"):
        if "memory_gb" in r.get(mode, {}):
            rows += engine_lines(mode, r[mode])
    if "matrix_flops" in r.get("training", {}):
        rows += training_lines(r["training"])
    return rows


def engine_lines(mode: str, x: dict) -> list[tuple]:
    rows = []
    if mode == "merge":
        rows.append((f"rollouts, base model ({x['engine']})", f"{x['tokens_per_second_base']:,.0f} tokens/s"))
    rows.append((f"rollouts, {mode}", f"{x['tokens_per_second']:,.0f} tokens/s"))
    rows.append((f"sync, {mode}", f"{x['sync_seconds']:.3f} s"))
    rows.append((f"|log mu - log pi_old|, {mode}, {x['gap_tokens']:,} tokens of random weights",
                 f"mean {x['gap_mean']:.2e}, max {x['gap_max']:.2e} nats"))
    for key, value in x.items():
        if key.startswith(("sleep_", "wake_")):
            rows.append((f"{key.removesuffix('_seconds').replace('_', ' ')}, {mode}", f"{value:.2f} s"))
    for phase, gb in x["memory_gb"].items():
        rows.append((f"memory, {mode}: {phase}", f"{gb:.2f} GB"))
    rows.append((f"memory, {mode}: key-value cache, of the engine's", f"{x['cache_gb']:.2f} GB"))
    for name, y in x.get("sampler", {}).items():
        rows.append((f"sampler, {name}", f"{y['steps']:,} engine steps, {y['seconds']:.2f} s, {y['tokens']:,} tokens"))
    return rows


def training_lines(x: dict) -> list[tuple]:
    rows = [("matrix product in the model's precision", f"{x['matrix_flops'] / 1e12:.2f} TFLOP/s")]
    for name, y in x["gradient_checkpointing"].items():
        what = f"training, {x['parameters'] / 1e6:,.1f} M parameters, checkpointing {name}"
        if "why" in y:
            rows.append((what, f"NOT MEASURED: {y['why']}"))
        else:
            share = f"{y['model_flops_share']:.1%} of the matrix product"
            rows.append((what, f"{y['tokens_per_second']:,.0f} tokens/s, {share}"))
        for tokens, gb in y["peak_gb"].items():
            what = f"memory, training, checkpointing {name}, {int(tokens):,} tokens at once"
            rows.append((what, f"{gb:.2f} GB at the peak"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts, sync, training and memory on one GPU.")
    parser.add_argument("--small", action="store_true", help="a small model; the default without a GPU")
    parser.add_argument("--minutes", type=float, default=6, help="time limit (default: 6)")
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--out", default="", help="folder of the result (default: bench/results)")
    for hidden in ("--part", "--model", "--json"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    start, small = time.monotonic(), args.small or not on_gpu()
    s = SimpleNamespace(**SMALL if small else FULL)
    if args.part:
        result = (training_part if args.part == "training" else engine_part)(args.part, args.model, s)
        Path(args.json).write_text(json.dumps(result))
        return
    found, hardware = {}, machine()["hardware"]
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(s.size, folder, vocabulary=s.vocabulary, positions=s.positions, dtype=s.dtype)
        for part in args.only:
            print(f"{time.monotonic() - start:5.0f} s   {part} ...", flush=True)
            found[part] = run_part(part, model, small, 60 * args.minutes - (time.monotonic() - start))
            save("gpu-small" if small else "gpu", found, args.out)
    print(f"\n{hardware}{', a small model: no measure of anything but that it works' if small else ''}")
    for what, value in lines(found):
        print(f"{what:72} {value}")
    if not small and all("failed" not in found.get(part, {"failed": ""}) for part in ("training", "adapter")):
        for card in CARDS:
            print(f"{card} GB: {recommend(found, card)}")
    for part, x in found.items():
        if "log" in x:
            print(f"\nlast lines of {part}:", *x["log"], sep="\n  ")
    if any("failed" in x for x in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
