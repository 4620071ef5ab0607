"""The measurements of bench/gpu.py, each a function of model folder and sizes, in its own process.
"""
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from common import (ROOT, alternate, machine, median, memory_now, most_memory, on_gpu, parameters,
                    peak_memory, project, random_model, seconds)

from parts.stop import timed


def long_tailed(rng: random.Random, typical: int, longest: int) -> int:
    """A response's length: log-normal with median `typical`; a few per cent come near `longest`."""
    return max(2, min(longest, int(typical * 2.718 ** rng.gauss(0, 0.8))))


def model_part(model: str, s: SimpleNamespace) -> dict:
    """The random model, and what this machine is: in a process that ends, so that none of it stays
    on the card."""
    random_model(s.size, model, vocabulary=s.vocabulary, positions=s.positions, dtype=s.dtype)
    return dict(machine=machine())


# --------------------------------------------------------------------------------------- the engine
def engine_for(model: str, s: SimpleNamespace, **options):
    """An engine for responses whose lengths are what the limits say,
    whatever random weights would like."""
    from parts.engine import Engine

    engine = Engine(model, **dict(max_model_len=s.prompt + s.longest, max_num_seqs=s.sequences,
                                  dtype=s.dtype, memory_share=0.45) | options)
    engine.sampling["ignore_eos"] = True
    return engine


def policy_for(model: str, s: SimpleNamespace, **options):
    """The trainer's side, whose adapter has moved already."""
    from parts.policy import load_policy

    policy = load_policy(model, **dict(dtype=s.dtype, rank=16, alpha=32, seed=0,
                                       device=device()) | options)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.02)
    return policy


def device() -> str:
    return "cuda" if on_gpu() else "cpu"


def random_prompts(s: SimpleNamespace) -> list[list[int]]:
    return [[random.Random(i).randrange(9, 200) for _ in range(s.prompt)]
            for i in range(s.sequences)]


def engine_part(model: str, s: SimpleNamespace, mode: str) -> dict:
    """Rollouts, sync, memory and log-prob gap with one kind of sync."""
    memory = dict(start=memory_now())
    engine = engine_for(model, s, sync_mode=mode, sleep=True)
    memory["engine"] = memory_now()
    policy = policy_for(model, s)
    memory["engine and trainer"] = memory_now()
    prompts = random_prompts(s)
    found = dict(engine=engine.version, memory_gb=memory, cache_gb=cache_gb(engine),
                 tokens_per_second_base=rate(engine, prompts, s))
    found |= sync_times(engine, policy, prompts[0], s)
    found["tokens_per_second"] = rate(engine, prompts, s)
    memory["engine and trainer, after sampling"] = memory_now()
    found |= logprob_gap(engine, policy, prompts[:16], s)
    if mode == ("adapter" if on_gpu() else "merge"):  # what is the default there
        found["sampler"] = {name: sampler(engine, s, **how) for name, how in {
            "a barrier after every round": dict(barrier=True),
            "no barrier": dict(early_opening=False),
            "no barrier, early opening (default)": {}}.items()}
    found |= sleep_times(engine, prompts[:16], memory)
    engine.close()
    return found


def sync_times(engine, policy, prompt, s) -> dict:
    """Seconds of a sync, and with the first request after it, at which vLLM loads a new adapter."""
    def request():
        engine.generate([prompt], n=1, max_tokens=1)

    def used():
        engine.sync(policy)
        request()

    taken = alternate(s.repeats, sync=lambda: engine.sync(policy), used=used, request=request)
    return dict(sync_seconds=median(taken["sync"]),
                sync_and_first_request_seconds=median(taken["used"]),
                request_seconds=median(taken["request"]))


def sleep_times(engine, prompts, memory: dict) -> dict:
    """Level 1, as in training: seconds, memory, and whether log-probs are what they were."""
    if not engine.sleeps:
        return {}
    before = engine.prompt_logprobs(prompts)
    found = dict(sleep_seconds=seconds(engine.sleep))
    memory["engine asleep and trainer"] = memory_now()
    found["wake_seconds"] = seconds(engine.wake)
    after = engine.prompt_logprobs(prompts)
    found["after_sleep_gap_max"] = max(abs(a - b) for x, y in zip(before, after)
                                       for a, b in zip(x, y))
    return found


def cache_gb(engine) -> float:
    """The engine's key-value cache, of the memory that it has taken."""
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


def logprob_gap(engine, policy, prompts, s, temperature: float = 1.0) -> dict:
    rollouts = [r for r, in engine.generate(prompts, n=1, max_tokens=s.response)]
    return gap(policy, prompts, rollouts, temperature)


def gap(policy, prompts, rollouts, temperature: float = 1.0) -> dict:
    """|log mu - log pi_old| in nats over sampled tokens:
    engine and trainer with the same weights."""
    import torch

    from parts.logprobs import token_logprobs
    from parts.policy import Row

    rows = [Row(ids + r.token_ids, len(ids), r.logprobs, 0.0) for ids, r in zip(prompts, rollouts)]
    with torch.no_grad():
        mine = [token_logprobs(policy, [row], temperature)[0].cpu() for row in rows]
    theirs = torch.tensor([x for row in rows for x in row.mu])
    found = (torch.cat(mine) - theirs).abs()
    return dict(gap_mean=found.mean().item(), gap_median=found.median().item(),
                gap_max=found.max().item(), gap_tokens=len(theirs))


def precision_part(model: str, s: SimpleNamespace, trainer: str = "", temperature: float = 1.0,
                   **options) -> dict:
    """Rollouts and gap of one precision or temperature."""
    engine = engine_for(model, s, temperature=temperature, **options)
    policy, prompts = policy_for(model, s, dtype=trainer or s.dtype), random_prompts(s)
    engine.sync(policy)
    found = dict(tokens_per_second=rate(engine, prompts, s),
                 **logprob_gap(engine, policy, prompts[:16], s, temperature))
    engine.close()
    return found


def endings_part(model: str, s: SimpleNamespace) -> dict:
    """Responses that end by themselves: one token of `typical` is made an end. What is left in
    vLLM's queue, and whether the same seed draws the same."""
    from parts.engine import seed_everything

    ends = random.Random(0).sample(range(200, s.vocabulary), max(1, s.vocabulary // s.typical))
    engine = engine_for(model, s, stop_token_ids=ends)
    engine.sampling["ignore_eos"] = False
    policy, prompts, drawn, left = policy_for(model, s), random_prompts(s)[:s.prompts], [], []
    for seed in (1, 1, 2):
        engine.sync(policy)
        seed_everything(random.Random(seed))
        for p, prompt in enumerate(prompts):
            engine.submit(p, prompt, s.longest)
        found = {}
        while len(found) < len(prompts):
            found.update(engine.step())
        left.append(engine.busy)  # a batch that ran ahead; `sync` has to end it
        drawn.append([found[p].token_ids for p in range(len(prompts))])
    stopped = sum(r.finish_reason == "stop" for r in found.values())
    engine.sync(policy)
    engine.close()
    return dict(responses=len(prompts), ended_by_themselves=stopped, batches_left_behind=sum(left),
                same_seed_same_samples=drawn[0] == drawn[1],
                another_seed_others=drawn[0] != drawn[2])


def routes_part(model: str, s: SimpleNamespace) -> dict:
    """A mixture of experts: do the routes fit their sequences, also of requests that were dropped
    and begun anew?"""
    from parts.models import tiny_folder
    from parts.policy import load_policy

    folder = tiny_folder("tiny-moe")
    engine = engine_for(folder, s, max_model_len=256, max_num_seqs=32, dtype="float32",
                        routes=True, memory_share=0.2)
    policy = load_policy(folder, dtype="float32", rank=8, alpha=16, seed=0, device=device())
    prompts = [[random.Random(i).randrange(9, 200) for _ in range(3 + i)] for i in range(16)]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, 40)
    found, steps = {}, 0
    while engine.busy:
        found.update(engine.step())
        steps += 1
        if steps == 10:  # as when the cache is full
            engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    rollouts = [found[i] for i in range(16)]
    lengths = [len(p) + len(r.token_ids) for p, r in zip(prompts, rollouts)]
    policy.routing.check([r.routes for r in rollouts], lengths)
    engine.close()
    return dict(sequences=16, routes_fit=True, **gap(policy, prompts, rollouts))


# -------------------------------------------------------------------------------------- the sampler
class Scripted:
    """An engine whose responses have lengths drawn by their place, whatever weights would like."""

    def __init__(self, engine, s):
        self.engine, self.s = engine, s
        engine.sampling["ignore_eos"] = True

    def submit(self, key, prompt_ids, max_tokens):
        rng = random.Random(f"length/{key}")
        self.engine.submit(key, prompt_ids, min(max_tokens, long_tailed(rng, *self.s.sampler)))

    def __getattr__(self, name):
        return getattr(self.engine, name)


def coins(s) -> SimpleNamespace:
    """A grader whose verdicts are drawn by their place; some prompts are easy, some hard."""
    def verdict(key):
        easy = (key[0] % s.prompts + 0.5) / s.prompts
        right = random.Random(f"verdict/{key}").random() < easy
        return SimpleNamespace(reward=float(right), status="drawn")

    return SimpleNamespace(submit=lambda *_: None, result=verdict)


def sampler(engine, s, **how) -> dict:
    """One batch through ada_sampler.collect, with drawn lengths and verdicts."""
    from ada_sampler import SamplerConfig, collect
    from parts.engine import WatchedEngine

    problems = [SimpleNamespace(prompt_ids=[9 + p % 200] * s.prompt) for p in range(s.prompts)]
    watched = WatchedEngine(Scripted(engine, s), s.longest)
    groups = []
    with contextlib.closing(watched.bar):
        taken = seconds(lambda: groups.extend(
            collect(problems, SamplerConfig(), watched, coins(s), **how)))
    tokens = sum(len(x.rollout.token_ids) for group in groups for x in group.pool)
    return dict(steps=watched.steps, seconds=taken,
                samples=sum(len(g.pool) for g in groups), tokens=tokens)


# -------------------------------------------------------------------------------------- the trainer
def training_part(model: str, s: SimpleNamespace) -> dict:
    """Forward and backward of a batch with long-tailed lengths,
    without and with gradient checkpointing."""
    found = dict(matrix_flops=matrix_speed(s), gradient_checkpointing={})
    for checkpointing in ("on", "off"):
        policy = policy_for(model, s, checkpointing=checkpointing == "on")
        found["parameters"] = parameters(policy)
        speed = training_speed(policy, s, found["matrix_flops"])
        found["gradient_checkpointing"][checkpointing] = speed | dict(
            peak_gb={tokens: peak_at(policy, s, tokens) for tokens in s.memory_points})
        del policy
    return found


def peak_at(policy, s: SimpleNamespace, tokens: int) -> float | None:
    """GB at the peak of forward and backward over so many tokens;
    None if that is too much for the card."""
    try:
        return peak_memory(lambda: train(policy, [s.positions] * (tokens // s.positions), tokens))
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        policy.zero_grad(set_to_none=True)
        return None


def matrix_speed(s) -> float:
    """FLOP/s of a large matrix product in the model's precision: what the share of FLOPs is
    measured against."""
    import torch

    a, b = (torch.randn(s.matrix, s.matrix, device=device(), dtype=getattr(torch, s.dtype))
            for _ in "ab")
    return 2 * s.matrix**3 / median(alternate(10, product=lambda: a @ b)["product"])


def train(policy, lengths: list[int], micro_tokens: int, prompt: int = 1) -> None:
    """minirl's own forward and backward over rows of random tokens
    with these lengths (prompt included)."""
    import minirl

    rng = random.Random(0)
    rows = [minirl.Row([rng.randrange(9, 200) for _ in range(n)], prompt, [-1.0] * (n - prompt),
                       rng.choice((-0.5, 0.5)))
            for n in lengths]
    minirl.accumulate(policy, rows,
                      minirl.Config(micro_tokens=micro_tokens, max_tokens=max(lengths)))
    policy.zero_grad(set_to_none=True)


def training_speed(policy, s, matrix_flops: float) -> dict:
    """Tokens per second (no padding counted) at the default --micro-tokens, and the model's share
    of the matrix speed."""
    rng = random.Random(0)
    lengths = [s.prompt + long_tailed(rng, s.typical, s.longest) for _ in range(s.rows)]
    try:
        taken = alternate(s.repeats,
                          train=lambda: train(policy, lengths, s.micro_tokens, s.prompt))["train"]
    except RuntimeError as error:  # out of memory
        return dict(why=str(error).splitlines()[0][:100])
    flops = model_flops(policy, lengths, s.prompt) / median(taken)
    return dict(tokens_per_second=sum(lengths) / median(taken),
                model_flops_share=flops / matrix_flops, seconds=taken)


def model_flops(policy, lengths: list[int], prompt: int) -> float:
    """FLOPs that the mathematics asks for; recomputing under checkpointing does not count.

    Frozen weights: 2 per weight and token forward and 2 backward (no weight gradient; the adapter's
    own are left out, about 1 %). Head: the same, at response positions only. Attention: 2 products
    of length x head size forward and 4 backward per head, half of them behind the causal mask.
    """
    c = policy.get_base_model().config
    head, width = c.vocab_size * c.hidden_size, c.num_hidden_layers * c.hidden_size
    body = parameters(policy) - head  # tied: counted once
    return sum(4 * body * n + 4 * head * (n - prompt) + 6 * width * n * n for n in lengths)


# ------------------------------------------------------------------------- whole steps, whole runs
def steps_part(model: str, s: SimpleNamespace, mode: str) -> dict:
    """minirl's own training steps, from `prepare` on; lengths are drawn, verdicts are coins.

    Then the engine is given weights of which a part is missing: would the probe see it?
    """
    import minirl
    from parts.data import Stream

    settings = dict(dtype=s.dtype, sync=mode, batch_prompts=s.prompts, max_tokens=s.longest,
                    max_prompt_tokens=max(s.prompt, 64), micro_tokens=s.micro_tokens,
                    engine_sequences=s.sequences, lr=2e-5, gradient_checkpointing="on",
                    eval_questions=s.probe_texts, graders=1)
    start, found = {}, dict(steps=[])
    with contextlib.ExitStack() as stack:
        with timed(start, "start"):
            run = stack.enter_context(project(model, **settings))
        found |= start | dict(rehearsed=run.probe.rehearsed, noise=run.probe.noise)
        run.engine, run.grader = Scripted(run.engine, s), coins(s)
        problems = [SimpleNamespace(prompt_ids=ids, judged_by="") for ids in random_prompts(s)]
        run.stream = Stream(problems, 0)
        minirl.rehearse(run)
        for step in range(1, s.steps + 1):
            _, metrics = minirl.train_step(step, run)
            row = {key: value for key, value in metrics.items()
                   if key in ("kl_k3", "tokens", "memory_gb")
                   or key.startswith(("seconds_", "probe_"))}
            found["steps"].append(row | dict(card_gb=memory_now()))
            print(f"after step {step}:", found, flush=True)  # kept when the part is cut off
        found |= dict(peak_gb=most_memory(), broken=broken_syncs(run))
    return found


def broken_syncs(run) -> dict:
    """For each kind of weights that arrive in part: what the probe's rehearsal says of it."""
    found = {}
    with run.probe.random_adapter():
        mine, without = run.probe.trainer(), run.probe.without_each_layer()
        for kind in ("first layer", "middle layer", "last layer", "half of the layers",
                     "half of the change"):
            with arriving(run.policy, kind):
                run.engine.sync(run.policy)
            seen = run.probe.compare(mine, without, run.probe.of_engine())
            found[kind] = seen | dict(caught=bool(seen["lost"]) or seen["rest"] > seen["limit"])
    run.engine.sync(run.policy)
    return found


@contextlib.contextmanager
def arriving(policy, kind: str):
    """The policy as an engine gets it when a sync is broken like this; afterwards as it was."""
    second = {name: p for name, p in policy.named_parameters() if "lora_B" in name}
    layer_of = {name: int(name.split("layers.")[1].split(".")[0]) for name in second}
    kept = {name: p.detach().clone() for name, p in second.items()}
    for name, p in second.items():
        p.data.mul_(share(kind, layer_of[name], 1 + max(layer_of.values())))
    yield
    for name, p in second.items():
        p.data.copy_(kept[name])


def share(kind: str, layer: int, layers: int) -> float:
    """How much of a layer's change arrives."""
    missing = {"first layer": 0, "middle layer": layers // 2, "last layer": layers - 1}
    if kind in missing:
        return float(layer != missing[kind])
    return 0.5 if kind == "half of the change" else float(layer % 2)


def run_part(model: str, s: SimpleNamespace, mode: str) -> dict:
    """`minirl.py` as a user starts it, on the built-in model, three steps and two more with
    --resume; `eval.py`."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--dtype", "bfloat16", "--sync", mode, "--name", "first", "--batch-prompts", "8",
                 "--eval-questions", "8", "--eval-k", "2", "--checkpoint-every", "1"]
        for more in (["--steps", "3"], ["--steps", "5", "--resume"]):
            program("minirl.py", *flags, *more, cwd=folder)
        rows = [json.loads(line)
                for line in Path(folder, "runs/first/metrics.jsonl").read_text().splitlines()]
        adapter = Path(folder, "runs/first/checkpoints/step-000005")
        program("eval.py", "--model", "tiny", "--adapter", str(adapter), "--data", "builtin",
                "--limit", "8", "--k", "2", "--out", "evaluation", cwd=folder)
        return dict(steps=[row["step"] for row in rows],
                    reward=[row["reward_first_round"] for row in rows],
                    kl_k3=max(row["kl_k3"] for row in rows if "kl_k3" in row),
                    seconds=median(row["seconds"] for row in rows),
                    evaluated=Path(folder, "evaluation/summary.json").exists())


def program(script: str, *flags, cwd: str) -> None:
    """One of the user's own scripts in a process of its own.
    Raises RuntimeError with its last words."""
    done = subprocess.run([sys.executable, str(ROOT / script), *flags], cwd=cwd,
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script}: {done.stderr.strip().splitlines()[-1:]}")
