"""What one GPU does with a model of Qwen2.5-Math-1.5B's shape: python bench/gpu.py   (no network)

Needs no weights: the model is randomly initialised, its lengths are set by token limits. Every part
is a process of its own, so that none inherits another's memory or ends with it; its result is
written at once, and a part that has one is not run again (--again runs it). On a GPU allow 5
minutes for each of the first three parts, 2 for each other one, most of it compilation: nobody has
measured that yet.

    training       forward and backward alone: tokens/s, share of the matrix speed, memory by
                   --micro-tokens
    adapter, merge an engine with this kind of sync: rollouts, sync, gap, sleep; the sampler's
        engine steps
    steps-*        training steps: sampler, update, sync and probe, with coins in the place of
                   verdicts
    endings        responses that end by themselves, the batch that vLLM leaves in its queue, seeds
    float16, fp8, fp8-cache, float32, temperature    rollouts and gap
    routes         a mixture of experts: routes, also of preempted requests
    run-*          minirl.py, --resume, eval.py with the adapter

On a CPU the same code runs on a small model: only to see that it works.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import gpu_parts
from common import RESULTS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
CARDS = (16, 24, 48, 80)  # GB
FULL = dict(  # Qwen2.5-Math-1.5B and the default lengths
    size=dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
              num_attention_heads=12, num_key_value_heads=2),
    vocabulary=151_936, positions=4096, dtype="bfloat16", prompt=200, response=256, sequences=256,
    prompts=32, repeats=3, sampler=(120, 800), rows=96, typical=500, longest=3000,
    micro_tokens=16384, memory_points=(4096, 8192), matrix=8192, steps=5, probe_texts=64)
SMALL = dict(
    size=dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=1),
    vocabulary=512, positions=512, dtype="float32", prompt=16, response=16, sequences=32,
    prompts=4, repeats=2, sampler=(12, 64), rows=16, typical=24, longest=128,
    micro_tokens=512, memory_points=(512, 1024), matrix=512, steps=2, probe_texts=16)
SHAPE = FULL | dict(  # the real shape and little work: for the parts steps-* on a CPU
    prompt=64, response=16, sequences=32, prompts=2, repeats=1, sampler=(8, 16), rows=4,
    typical=8, longest=16, micro_tokens=512, memory_points=(512, 1024), matrix=512, steps=2,
    probe_texts=8)
SIZES = dict(full=FULL, small=SMALL, shape=SHAPE)
PARTS = {  # name -> (function of gpu_parts.py, what it is told)
    "training": (gpu_parts.training_part, {}),
    "adapter": (gpu_parts.engine_part, dict(mode="adapter")),
    "merge": (gpu_parts.engine_part, dict(mode="merge")),
    "steps-adapter": (gpu_parts.steps_part, dict(mode="adapter")),
    "steps-merge": (gpu_parts.steps_part, dict(mode="merge")),
    "endings": (gpu_parts.endings_part, {}),
    "float16": (gpu_parts.precision_part, dict(dtype="float16", trainer="float16")),
    "fp8": (gpu_parts.precision_part, dict(dtype="fp8")),
    "fp8-cache": (gpu_parts.precision_part, dict(kv_cache_dtype="fp8")),
    "float32": (gpu_parts.precision_part, dict(dtype="float32", trainer="float32")),
    "temperature": (gpu_parts.precision_part, dict(temperature=0.7)),
    "routes": (gpu_parts.routes_part, {}),
    "run-adapter": (gpu_parts.run_part, dict(mode="adapter")),
    "run-merge": (gpu_parts.run_part, dict(mode="merge")),
}


# ----------------------------------------------------------------------------------- recommendation
def recommend(r: dict, card: float, context: int = 4024, cache: float = 2.0) -> str:
    """The fastest setting whose measured memory fits on a card of so many GB, with 8 % kept free.

    The trainer's peak grows linearly with --micro-tokens: two measured points give the line, and
    one response of full length must fit. `cache`: the least key-value cache in GB that is worth
    having (2 GB: about 70,000 tokens of this model).
    """
    m = r["adapter"]["memory_gb"]  # the default on a GPU
    trainer = m["engine and trainer"] - m["engine"]
    awake = m["engine"] - r["adapter"]["cache_gb"] + cache
    asleep = m["engine asleep and trainer"] - trainer
    for sleep, engine in ((False, awake), (True, asleep)):
        for checkpointing in ("off", "on"):
            points = r["training"]["gradient_checkpointing"][checkpointing]["peak_gb"]
            if None in points.values():  # more than the card that it was measured on has
                continue
            (t0, gb0), (t1, gb1) = sorted((int(tokens), gb) for tokens, gb in points.items())
            peaks = {tokens: gb0 + (gb1 - gb0) / (t1 - t0) * (tokens - t0)
                     for tokens in (context, 8192, 16384, 32768)}
            fitting = [tokens for tokens, peak in peaks.items() if peak <= 0.92 * card - engine]
            if fitting and awake + trainer <= 0.92 * card:
                peak = peaks[fitting[-1]]
                share = 0.92 - (trainer if sleep else peak) / card
                return (f"--gradient-checkpointing {checkpointing} --micro-tokens {fitting[-1]} "
                        f"--engine-memory {share:.2f}"
                        f"{' --sleep' * sleep}   (trainer's peak {peak:.1f} GB)")
    return "too small for this model at these lengths"


# ------------------------------------------------------------------------------------------ program
def run_part(part: str, model: str, size: str, minutes: float) -> dict:
    """A part in a process of its own: its result, or {"failed": why}."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        command = [sys.executable, __file__, "--part", part, "--model", model, "--json", str(out),
                   "--size", size]
        with open(log, "w") as file:
            try:
                subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=60 * minutes)
            except subprocess.TimeoutExpired:
                return dict(failed=f"not finished after {minutes:g} minutes")
        if out.exists():
            return json.loads(out.read_text())
        lines = log.read_text(errors="replace").splitlines()
        why = next((line for line in reversed(lines) if "Error" in line),
                   (lines or ["ended without a word"])[-1])
        return dict(failed=why[:300], log=lines[-60:])


def has_gpu() -> bool:
    """Asked of another process: torch's answer in this one would keep memory on the card."""
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", ask]).returncode == 0


def flat(found: dict, name: str = ""):
    """("name, name", value) for every number in it, but not layer by layer: the file has those."""
    for key, value in found.items():
        if key == "layers":
            continue
        label = f"{name}, {key}" if name else str(key)
        if isinstance(value, dict):
            yield from flat(value, label)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from flat(value[-1], f"{label}[-1]")
        else:
            yield label.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else value


def show(results: dict) -> None:
    for part, found in results.items():
        if "failed" in found:
            print(f"\n{part}: NOT MEASURED: {found['failed']}", *found.get("log", []), sep="\n    ")
        else:
            print(f"\n{part}", *(f"{label:70} {value}" for label, value in flat(found)),
                  sep="\n    ")
    if all("failed" not in results.get(part, {"failed": ""}) for part in ("training", "adapter")):
        for card in CARDS:
            print(f"{card} GB: {recommend(results, card)}")


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rollouts, sync, training and memory on one GPU.")
    parser.add_argument("--size", choices=list(SIZES),
                        help="full, the default on a GPU; small, the default without one; "
                        "shape: the full model with short responses")
    parser.add_argument("--minutes", type=float, default=10,
                        help="time limit of each part (default: 10)")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS),
                        metavar="PART")
    parser.add_argument("--again", action="store_true", help="also the parts that have a result")
    parser.add_argument("--out", default=str(RESULTS),
                        help="folder of the result (default: bench/results)")
    for hidden in ("--part", "--model", "--json"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = flags()
    if args.part:  # this is the process of one part
        measure, how = PARTS.get(args.part, (gpu_parts.model_part, {}))
        found = measure(args.model, SimpleNamespace(**SIZES[args.size]), **how)
        Path(args.json).write_text(json.dumps(found))
        return
    start, size = time.monotonic(), args.size or ("full" if has_gpu() else "small")
    file = Path(args.out, "gpu.json" if size == "full" else f"gpu-{size}.json")
    results = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as model:
        for part in ["model", *args.only]:
            stored = "failed" not in results.get(part, {"failed": ""})
            if stored and part != "model" and not args.again:
                continue
            print(f"{time.monotonic() - start:5.0f} s   {part} ...", flush=True)
            results[part] = run_part(part, model, size, args.minutes)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results, indent=1) + "\n")
    show({part: found for part, found in results.items() if part in ("model", *args.only)})
    if any("failed" in results[part] for part in args.only):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
