"""What one GPU does with a model of Qwen2.5-Math-1.5B's shape.

    python bench/gpu.py                          # every part
    python bench/gpu.py --only training adapter  # these two; other results are kept

No network and no weights are needed: the model is randomly initialised, and token limits decide
how long its responses are. Every part is a process of its own, so that none inherits another's
memory or ends with it. Its result is written at once, and a part that has one is not run again
(--again runs it). On a GPU allow 5 minutes for each of the first three parts and 2 for each other
one, most of it compilation: nobody has measured that yet.

    training         forward and backward alone: tokens/s, and memory by --micro-tokens
    adapter, merge   an engine with this kind of sync: rollouts, sync, sleep, log-prob gap
    steps-*          whole training steps: sampler, update, sync, probe; coins are the verdicts

On a CPU the same code runs on a small model, only to show that it works.
"""
import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from common import RESULTS, alternate, machine, on_gpu, project, random_model, seconds

os.environ.setdefault("HF_HUB_OFFLINE", "1")
FULL = dict(  # Qwen2.5-Math-1.5B and the default lengths
    size=dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
              num_attention_heads=12, num_key_value_heads=2),
    vocabulary=151_936, positions=4096, dtype="bfloat16", prompt=200, response=256, sequences=256,
    prompts=32, repeats=3, rows=96, typical=500, longest=3000, micro_tokens=16384,
    memory_points=(4096, 8192), steps=5, probe_texts=64)
SMALL = dict(
    size=dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=1),
    vocabulary=512, positions=512, dtype="float32", prompt=16, response=16, sequences=32,
    prompts=4, repeats=2, rows=16, typical=24, longest=128, micro_tokens=512,
    memory_points=(512, 1024), steps=2, probe_texts=16)
SIZES = dict(full=FULL, small=SMALL)


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


# ----------------------------------------------------------------------------------- the two sides
def model_part(model: str, s: SimpleNamespace) -> dict:
    """Makes the random model, and says what this machine is."""
    random_model(s.size, model, vocabulary=s.vocabulary, positions=s.positions, dtype=s.dtype)
    return dict(machine=machine())


def engine_for(model: str, s: SimpleNamespace, **options):
    """An engine whose responses go on until their token limit."""
    from parts.engine import Engine

    engine = Engine(model, **dict(max_model_len=s.prompt + s.longest, max_num_seqs=s.sequences,
                                  dtype=s.dtype, memory_share=0.45) | options)
    engine.sampling["ignore_eos"] = True
    return engine


def policy_for(model: str, s: SimpleNamespace, **options):
    """The trainer's side, whose adapter has moved already."""
    from parts.policy import load_policy

    device = "cuda" if on_gpu() else "cpu"
    policy = load_policy(model, **dict(dtype=s.dtype, rank=16, alpha=32, seed=0,
                                       device=device) | options)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.02)
    return policy


def random_prompts(s: SimpleNamespace) -> list[list[int]]:
    return [[random.Random(i).randrange(9, 200) for _ in range(s.prompt)]
            for i in range(s.sequences)]


def long_tailed(rng: random.Random, typical: int, longest: int) -> int:
    """A response's length: log-normal with median `typical`; a few per cent come near `longest`."""
    return max(2, min(longest, int(typical * 2.718 ** rng.gauss(0, 0.8))))


# --------------------------------------------------------------------------------------- the engine
def engine_part(model: str, s: SimpleNamespace, mode: str) -> dict:
    """Rollouts, sync, memory and log-prob gap with one kind of sync."""
    memory = dict(start=memory_now())
    engine = engine_for(model, s, sync_mode=mode, sleep=True)
    memory["engine"] = memory_now()
    policy, prompts = policy_for(model, s), random_prompts(s)
    memory["engine and trainer"] = memory_now()
    found = dict(memory_gb=memory, cache_gb=cache_gb(engine),
                 tokens_per_second_base=rate(engine, prompts, s),
                 sync_seconds=sync_seconds(engine, policy, prompts[0], s),
                 tokens_per_second=rate(engine, prompts, s))
    memory["engine and trainer, after sampling"] = memory_now()
    found |= logprob_gap(engine, policy, prompts[:16], s)
    found |= sleep_times(engine, prompts[:16], memory)
    engine.close()
    return found


def cache_gb(engine) -> float:
    """The engine's key-value cache, which is part of the memory that it has taken."""
    vllm = engine.llm.llm_engine.vllm_config
    c, hf = vllm.cache_config, vllm.model_config.hf_config
    width = hf.num_key_value_heads * hf.hidden_size // hf.num_attention_heads
    numbers = c.num_gpu_blocks * c.block_size * 2 * hf.num_hidden_layers * width
    return numbers * vllm.model_config.dtype.itemsize / 1e9


def rate(engine, prompts, s) -> float:
    """Generated tokens per second, all prompts at once; median after a warm-up."""
    taken = alternate(s.repeats, rollouts=lambda: engine.generate(
        prompts, n=1, max_tokens=s.response))["rollouts"]
    return len(prompts) * s.response / median(taken)


def sync_seconds(engine, policy, prompt, s) -> float:
    """With the first request after it, at which vLLM loads a new adapter."""
    def used():
        engine.sync(policy)
        engine.generate([prompt], n=1, max_tokens=1)

    return median(alternate(s.repeats, used=used)["used"])


def sleep_times(engine, prompts, memory: dict) -> dict:
    """Seconds, memory, and whether log-probs are afterwards what they were."""
    if not engine.sleeps:
        return {}
    before = engine.prompt_logprobs(prompts)
    sleep = seconds(engine.sleep)
    memory["engine asleep and trainer"] = memory_now()
    wake = seconds(engine.wake)
    after = engine.prompt_logprobs(prompts)
    gap = max(abs(a - b) for x, y in zip(before, after) for a, b in zip(x, y))
    return dict(sleep_seconds=sleep, wake_seconds=wake, after_sleep_gap_max=gap)


def logprob_gap(engine, policy, prompts, s) -> dict:
    """|log mu - log pi_old| in nats over sampled tokens, by engine and trainer with one policy."""
    import torch

    from parts.logprobs import Row, token_logprobs

    rollouts = [r for r, in engine.generate(prompts, n=1, max_tokens=s.response)]
    rows = [Row(ids + r.token_ids, len(ids), r.logprobs, 0.0) for ids, r in zip(prompts, rollouts)]
    with torch.no_grad():
        mine = [token_logprobs(policy, [row], temperature=1.0)[0].cpu() for row in rows]
    theirs = torch.tensor([x for row in rows for x in row.mu])
    found = (torch.cat(mine) - theirs).abs()
    return dict(gap_mean=found.mean().item(), gap_median=found.median().item(),
                gap_max=found.max().item(), gap_tokens=len(theirs))


# -------------------------------------------------------------------------------------- the trainer
def training_part(model: str, s: SimpleNamespace) -> dict:
    """Forward and backward of a batch with long-tailed lengths, with and without gradient
    checkpointing. None: it does not fit.
    """
    rng = random.Random(0)
    lengths = [s.prompt + long_tailed(rng, s.typical, s.longest) for _ in range(s.rows)]
    found = {}
    for checkpointing in ("on", "off"):
        policy = policy_for(model, s, checkpointing=checkpointing == "on")
        taken = if_it_fits(lambda: alternate(
            s.repeats, train=lambda: train(policy, lengths, s.micro_tokens, s.prompt)))
        peaks = {tokens: if_it_fits(lambda: peak_memory(
            lambda: train(policy, [s.positions] * (tokens // s.positions), tokens)))
            for tokens in s.memory_points}
        found[checkpointing] = dict(
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


def coins(s) -> SimpleNamespace:
    """A grader whose verdicts are drawn by their place; some prompts are easy, some hard."""
    def verdict(key):
        easy = (key[0] % s.prompts + 0.5) / s.prompts
        right = random.Random(f"verdict/{key}").random() < easy
        return SimpleNamespace(reward=float(right), status="drawn")

    return SimpleNamespace(submit=lambda *_: None, result=verdict)


def steps_part(model: str, s: SimpleNamespace, mode: str) -> dict:
    """minirl's own training steps, from `prepare` on; lengths are drawn, verdicts are coins."""
    import minirl
    from parts.data import Stream

    settings = dict(dtype=s.dtype, sync=mode, batch_prompts=s.prompts, max_tokens=s.longest,
                    max_prompt_tokens=max(s.prompt, 64), micro_tokens=s.micro_tokens,
                    engine_sequences=s.sequences, lr=2e-5,
                    eval_questions=s.probe_texts)
    start, steps = time.perf_counter(), []
    with project(model, **settings) as run:
        found = dict(seconds_start=time.perf_counter() - start, noise=run.probe.noise)
        run.engine, run.grader = Scripted(run.engine, s), coins(s)
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
CONTEXT = multiprocessing.get_context("spawn")  # nothing of this process goes along
PARTS = {  # name -> (function, what it is told)
    "model": (model_part, {}),
    "training": (training_part, {}),
    "adapter": (engine_part, dict(mode="adapter")),
    "merge": (engine_part, dict(mode="merge")),
    "steps-adapter": (steps_part, dict(mode="adapter")),
    "steps-merge": (steps_part, dict(mode="merge")),
}


def alone(call, *args, **how):
    """call(*args, **how) in a process of its own, which ends with it."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(call, *args, **how).result()


def measured(part: str, model: str, size: str) -> dict:
    """A part's result, or {"failed": why}."""
    measure, how = PARTS[part]
    try:
        return alone(measure, model, SimpleNamespace(**SIZES[size]), **how)
    except (Exception, SystemExit) as error:
        return dict(failed=f"{type(error).__name__}: {error}"[:300])


def show(results: dict) -> None:
    for part, found in results.items():
        print(f"\n{part} {json.dumps(found, indent=4)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts, sync, training and memory on one GPU.")
    parts = [part for part in PARTS if part != "model"]
    parser.add_argument("--size", choices=list(SIZES),
                        help="default: full on a GPU, small without one")
    parser.add_argument("--only", nargs="*", default=parts, choices=parts, metavar="PART")
    parser.add_argument("--again", action="store_true", help="also the parts that have a result")
    parser.add_argument("--out", default=str(RESULTS),
                        help="folder of the result (default: bench/results)")
    args = parser.parse_args()
    start, size = time.monotonic(), args.size or ("full" if alone(on_gpu) else "small")
    file = Path(args.out, "gpu.json" if size == "full" else f"gpu-{size}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(file.read_text()) if file.exists() else {}
    asked = ["model", *args.only]
    with tempfile.TemporaryDirectory() as model:
        for part in asked:
            stored = "failed" not in results.get(part, {"failed": ""})
            if part == "model" or args.again or not stored:
                print(f"{time.monotonic() - start:5.0f} s   {part} ...", flush=True)
                results[part] = measured(part, model, size)
                file.write_text(json.dumps(results, indent=1) + "\n")
    show({part: results[part] for part in asked})
    if any("failed" in results[part] for part in asked):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
