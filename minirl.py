"""MiniRL with Reinforce-Ada sampling: a language model learns mathematics by trial and error.

    python minirl.py                              # trains the built-in tiny model, on a CPU
    python minirl.py --model Qwen2.5-Math-1.5B    # the real thing, on one GPU of 24 GB or more

One step of training, in the order of `train_step`:

    sample   prompts are sampled in rounds until they have shown right and wrong     ada_sampler.py
    grade    math-verify judges the answer in \\boxed{}                               rewards.py
    keep     n samples per prompt; advantage = reward - mean of all that was drawn   ada_sampler.py
    update   `objective`: MiniRL Eq. 7 on the weights of a LoRA adapter              here
    sync     the engine gets the new weights, and a probe checks that they arrived   parts/engine.py

Papers: Reinforce-Ada, arXiv 2510.04996, and MiniRL, arXiv 2512.01374. Three policies matter, and
keeping them apart is most of what small projects get wrong:

    mu         the engine, with the rollout weights: what really sampled the tokens
    pi_old     the trainer, with the same weights: differs from mu by kernels and precision only
    pi_theta   the trainer, now

Suffix _T: one entry per generated token, all responses one after the other, no padding.

What is left out, and why: README.md.
"""
import contextlib
import functools
import math
import os
import random
import signal
from dataclasses import replace

if __name__ == "__main__":  # before torch is imported: --help and a wrong flag answer at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from parts.config import parse
    from parts.models import TINY

    CONFIG = parse()
    if CONFIG.model in TINY:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # its threads would wait for each other

import torch
from tqdm import tqdm

from ada_sampler import collect
from parts.config import Config
from parts.engine import WatchedEngine
from parts.held_out import evaluate_if_due
from parts.logprobs import gvm_norms, token_logprobs, tokens_at_once
from parts.machine import memory_gb, out_of_memory
from parts.metrics import diagnostics, mean_surprisal, summarize
from parts.policy import Row, micro_batches, store_on_rows
from parts.routing_replay import replaying
from parts.run import finish, last_words, nothing_lost, prepare, record, reseed, show
from parts.stop import Interrupted, Stop, timed
from rewards import open_grader


# ------------------------------------------------------------------------------ the objective
def objective(lp_T, old_T, mu_T, coefficient_T, config: Config):
    """Per-token terms of the objective, to be summed over tokens and maximised.

        minirl  M_t * sg[min(pi_theta/mu, cap)] * A * log pi_theta              Eq. 7
        grpo    min(r A, clip(r) A)                      r = pi_theta/pi_old    appendix A
        cispo   sg[clip(r)] * A * log pi_theta                                  appendix A

    MiniRL's weight corrects for both reasons why the samples are not from pi_theta (Eq. 5):
    pi_old/mu, the engine is not the trainer, and r = pi_theta/pi_old, the policy has moved since.
    Its mask M_t looks at r only: it stops tokens that have already moved far enough in the
    direction in which their advantage pushes them. GRPO's min does exactly that, with r as the
    weight; CISPO bounds the weight and stops nobody. Neither of these two uses mu. By default, with
    one mini-batch, r is 1 and nothing is stopped: in float32 the plain policy gradient is left.

    lp_T = log pi_theta (with gradient), old_T = log pi_old, mu_T = log mu, all [T] in nats;
    coefficient_T: A, the advantage times the row's weight (`row_weights`, mostly 1).
    Returns (term_T, M_T: 0 where no gradient is left, weight_T before any bound).
    """
    ratio_T = (lp_T - old_T).exp()  # r
    low, high = 1 - config.eps_low, 1 + config.eps_high
    mask_T = torch.ones_like(old_T)  # of grpo it is only reported: its min stops the same tokens
    if config.clip and config.objective != "cispo":
        mask_T[(coefficient_T > 0) & (ratio_T > high)] = 0
        mask_T[(coefficient_T < 0) & (ratio_T < low)] = 0
    if config.mask != "ratio":  # --mask dppo, icepop
        mask_T = other_mask(mask_T, lp_T, old_T, mu_T, coefficient_T, config)

    if config.objective == "grpo":
        bounded_T = ratio_T.clamp(low, high) if config.clip else ratio_T
        term_T = torch.minimum(ratio_T * coefficient_T, bounded_T * coefficient_T)
        return term_T, mask_T, ratio_T.detach()

    if config.objective == "cispo":
        weight_T = ratio_T.detach()
        bounded_T = weight_T.clamp(low, high) if config.clip else weight_T
        return bounded_T * coefficient_T * lp_T, mask_T, weight_T

    weight_T = importance_weight(lp_T, old_T, mu_T, config.importance)
    bounded_T = weight_T.clamp(max=config.weight_cap) if config.weight_cap else weight_T
    return mask_T * bounded_T * coefficient_T * lp_T, mask_T, weight_T


AGREE = (0.5, 5.0)  # IcePop's bounds are this project's choice; the upper one is MiniRL's cap


def other_mask(mask_T, lp_T, old_T, mu_T, coefficient_T, config: Config):
    """Two later answers to the question which tokens to stop, for comparison.

    DPPO (arXiv 2602.04879): a ratio says little about how far a policy has moved; a rare token has
    doubled before anything has happened. It stops A > 0 where pi_theta - mu > delta, and A < 0
    where that is < -delta. IcePop (Ring-1T, arXiv 2510.18855): a token on which engine and trainer
    disagree is noise. It stops what `mask_T` does, and where pi_old/mu is outside AGREE.
    """
    if config.mask == "icepop":
        mismatch_T = (old_T - mu_T).exp()
        return mask_T * ((mismatch_T >= AGREE[0]) & (mismatch_T <= AGREE[1]))
    moved_T = lp_T.detach().exp() - mu_T.exp()
    too_far_T = torch.where(coefficient_T > 0, moved_T > config.delta, moved_T < -config.delta)
    return (~too_far_T).to(mask_T)


def importance_weight(lp_T, old_T, mu_T, kind: str):
    """sg[pi_theta/mu]; or only its second factor, sg[pi_theta/pi_old]; or 1. [T], no gradient."""
    if kind == "full":
        return (lp_T - mu_T).exp().detach()
    if kind == "staleness":
        return (lp_T - old_T).exp().detach()
    return torch.ones_like(old_T)


def set_scales(rows: list[Row], config: Config) -> None:
    """What one token of each row counts in the loss: `row.scale`.

    MiniRL sums over tokens and averages over responses. Here the sum is also divided by a constant,
    max_tokens, which changes nothing but where the clipping of gradients begins (AdamW divides by
    the gradient's size): at 3,000 tokens --max-grad-norm 1 hardly ever acts. Dividing by lengths
    instead is an ablation: it changes what is optimised. (The paper's CISPO divides by the lengths
    of one prompt's responses; here it is the mean of the whole batch.)

    All is divided by the responses of an *average* mini-batch. ada-est and gvm say how important a
    prompt is by its number of rows; a division by the rows of its own mini-batch would cancel that.
    If fewer prompts remain than mini-batches, some steps are skipped and the rest scaled up; the
    total stays the same.
    """
    responses = len(rows) / config.mini_batches
    mean_length = sum(row.length for row in rows) / max(len(rows), 1)
    for row in rows:
        length = dict(constant=config.max_tokens, response=row.length, batch=mean_length)
        row.scale = 1 / (responses * length[config.length_norm])


# ------------------------------------------------------------------------------ the update
def update(policy, optimizer, schedule, groups, config: Config, rng: random.Random) -> dict:
    """One pass over the kept samples: `mini_batches` optimizer steps. Returns diagnostics."""
    minis = cut(groups, config, rng)
    if not minis:
        return dict(optimizer_steps=0, skipped_steps=0)
    lr = optimizer.param_groups[0]["lr"]  # of the first of these steps: each one moves the schedule
    if config.mini_batches > 1:  # with one, pi_old is pi_theta itself: no pass of its own
        for mini in minis:
            in_memory(old_logprobs, policy, mini, config)
    losses, facts, norms = [], [], []
    for mini in minis:
        loss, seen = in_memory(accumulate, policy, mini, config)
        for row in mini:
            row.mini_batch = len(norms)
        losses.append(loss)
        facts.append(seen)
        norms.append(optimizer_step(policy, optimizer, schedule, config))
    bad = sum(not math.isfinite(norm) for norm in norms)
    return diagnostics(facts, config) | dict(
        loss=sum(losses) / len(minis), grad_norm=sum(norms) / len(minis),
        lr=lr, optimizer_steps=len(minis) - bad, skipped_steps=bad)


def cut(groups, config: Config, rng: random.Random) -> list[list[Row]]:
    """The kept samples as mini-batches of whole groups; without those that have no gradient.

    A row of coefficient 0 skips the forward pass, but it counts in the mean (`set_scales`). That
    keeps the size of a step honest: divided by the useful rows alone, a batch with one useful
    prompt would make as large a step as a full one, in a direction that is mostly noise.

    A response that was cut off at max_tokens is a row like any other, judged by its last box
    (which must be closed), as in the released code. It is mostly wrong, and that is what teaches
    the model to finish.
    A mask would take that lesson away. `truncated` in the log says how many there are.
    """
    rows_of = [rows_of_group(group, config) for group in groups if group.kept]
    set_scales([row for rows in rows_of for row in rows], config)
    rng.shuffle(rows_of)  # they come by prompt: no mini-batch must be all easy or all hard
    minis = []
    for i in range(config.mini_batches):
        mine = rows_of[i::config.mini_batches]
        minis.append([row for rows in mine for row in rows if row.coefficient])
    return [mini for mini in minis if mini]


def rows_of_group(group, config: Config) -> list[Row]:
    prompt, rows = group.problem.prompt_ids, []
    for s, coefficient in group.rows():
        row = Row(prompt + s.rollout.token_ids, len(prompt), s.rollout.logprobs, coefficient,
                  routes=s.rollout.routes)
        if config.replay == "r3":
            row.replay = row.routes
        s.rollout.row = row  # for the log: what the update will see of this sample
        rows.append(row)
    return rows


def old_logprobs(policy, mini: list[Row], config: Config) -> None:
    """log pi_old of every row, before the first optimizer step of the batch.

    Cut up as in `accumulate`: in low precision a row that is batched with other rows rounds
    differently, and r would not start at 1.
    """
    if config.replay == "r2":
        for row in mini:
            row.replay = None  # a first attempt may have been short of memory half-way
    for micro in micro_batches(mini, tokens_at_once(policy, mini, config.micro_tokens)):
        with torch.no_grad(), replaying(policy, micro):
            lp_T, _ = token_logprobs(policy, micro, config.temperature)
            remember_old(policy, micro, lp_T, config)


def remember_old(policy, micro: list[Row], old_T, config: Config) -> None:
    """What the pass that computes log pi_old leaves on its rows.

    For a mixture of experts also whether trainer and engine chose the same experts (under R3, with
    earlier layers already forced), and for R2 what the trainer chose, to be replayed.
    """
    for row, old in zip(micro, old_T.split([row.length for row in micro])):
        row.old = old
    routing = getattr(policy, "routing", None)
    if not routing:
        return
    for row, own in zip(micro, routing.recorded(micro)):
        if row.routes is not None:
            row.agrees = routing.agreement(own, row.routes)[row.prompt_length - 1:]
        if config.replay == "r2":
            row.replay = own


def accumulate(policy, mini: list[Row], config: Config):
    """The gradient of one mini-batch, a micro-batch at a time: (loss, what `diagnostics` reads)."""
    loss, facts = 0.0, []
    for micro in micro_batches(mini, tokens_at_once(policy, mini, config.micro_tokens)):
        mu_T = torch.tensor([x for row in micro for x in row.mu], device=policy.device)
        coefficient_T = per_token([row.coefficient for row in micro], micro, policy.device)
        scale_T = per_token([row.scale for row in micro], micro, policy.device)
        with replaying(policy, micro):  # the backward pass too: checkpointing runs forward again
            lp_T, entropy_T = token_logprobs(policy, micro, config.temperature)
            if config.mini_batches == 1:
                remember_old(policy, micro, lp_T.detach(), config)
            old_T = torch.cat([row.old for row in micro])
            term_T, mask_T, weight_T = objective(lp_T, old_T, mu_T, coefficient_T, config)
            micro_loss = -(term_T * scale_T).sum()
            policy.loss_scale.scale(micro_loss).backward()
        loss += micro_loss.item()
        seen = dict(old=old_T, mu=mu_T, coefficient=coefficient_T, mask=mask_T, weight=weight_T,
                    entropy=entropy_T)
        store_on_rows(micro, theta=lp_T.detach(), mask=mask_T, weight=weight_T, entropy=entropy_T)
        agrees = [row.agrees for row in micro if row.agrees is not None]
        facts.append(seen | (dict(agrees=torch.cat(agrees)) if agrees else {}))
    return loss, {name: torch.cat([seen[name] for seen in facts]) for name in facts[0]}


def per_token(values: list[float], rows: list[Row], device):
    """A value per row -> [T], repeated for each of its tokens."""
    lengths = torch.tensor([row.length for row in rows], device=device)
    return torch.tensor(values, device=device).repeat_interleave(lengths)


def in_memory(work, policy, mini: list[Row], config: Config):
    """`work(policy, mini, config)`; out of memory, again with half as many tokens at a time.

    How a mini-batch is cut up does not change its gradient. (In low precision it moves the last
    bits: pi_old was computed with other neighbours, and r starts off that much beside 1, once.)
    Raises MemoryError when even one row at a time is too much.
    """
    longest = max(len(row.ids) for row in mini)
    while True:
        try:
            return work(policy, mini, config)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        # Not in the except clause: there, the traceback still holds what had been allocated.
        policy.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        if config.micro_tokens <= longest:
            raise MemoryError(f"not even one response of {longest} tokens fits")
        config.micro_tokens //= 2  # from now on
        tqdm.write(f"out of memory: going on with --micro-tokens {config.micro_tokens}")


def optimizer_step(policy, optimizer, schedule, config: Config) -> float:
    """Clip, step, forget the gradient. Returns its norm before clipping.

    A gradient that is not finite is not stepped. In float16 the loss was scaled up; `unscale_`
    undoes that, and `update` adapts the scale (`load_policy`).
    """
    policy.loss_scale.unscale_(optimizer)
    weights = [p for p in policy.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm or math.inf).item()
    if math.isfinite(norm):
        optimizer.step()
        schedule.step()
    policy.loss_scale.update()
    optimizer.zero_grad(set_to_none=True)
    return norm


# ------------------------------------------------------------------------------ one step
def train_step(step: int, run):
    """Sample, grade, keep, update, sync. Returns the step's groups and its metrics.

    Raises Interrupted while sampling.
    """
    config, seconds = run.config, {}
    rng = reseed(config.seed, step, "training")
    with timed(seconds, "sample"), nothing_lost(run, "sampling"):
        groups = sample(run)
    with timed(seconds, "train"), nothing_lost(run, "update"):
        run.engine.sleep()
        metrics = update(run.policy, run.optimizer, run.schedule, groups, config, rng)
        run.engine.wake()
    with timed(seconds, "sync"), nothing_lost(run, "sync"):
        if metrics["optimizer_steps"] or run.engine.sleeps:  # a wake-up may spoil the weights
            metrics |= sync(run)
    metrics |= summarize(groups) | dict(entropy=mean_surprisal(groups)) | seconds
    metrics |= dict(seconds=sum(seconds.values()), memory_gb=memory_gb())
    metrics["tokens_per_second"] = metrics["tokens"] / seconds["seconds_sample"]
    return groups, metrics


def sync(run) -> dict:
    """The engine gets the weights; returns what the probe says of their arrival."""
    run.engine.sync(run.policy)
    return run.probe.check()


def sample(run) -> list:
    """The groups of one step: prompts, all that was drawn for them, what is kept, advantages."""
    stream, config = run.stream, run.config
    pilot_norms = functools.partial(gvm_norms, run.policy, temperature=config.temperature)
    engine = WatchedEngine(run.engine, config.max_tokens)
    with contextlib.closing(engine.bar):
        groups = collect(
            stream.take(config.batch_prompts), config, engine, run.grader, estimator=run.estimator,
            more=lambda: stream.take(1)[0],
            grad_norms=pilot_norms if config.gvm_norms == "head" else None)
    if run.engine.routes:
        drawn = [(s.rollout, len(g.problem.prompt_ids)) for g in groups for s in g.pool]
        run.policy.routing.check([rollout.routes for rollout, _ in drawn],
                                 [prompt + len(rollout.token_ids) for rollout, prompt in drawn])
    return groups


# ------------------------------------------------------------------------------ the program
def main(config: Config) -> None:
    with open_grader(config.reward, config.threshold, config.graders) as grader:
        with timed({}, "start"):  # says now and then that it is alive; its seconds are not kept
            run = prepare(config, grader)  # data, engine, policy; with --resume the last checkpoint
        rehearse(run)
        sync(run)
        Stop.install()
        with contextlib.suppress(Interrupted):
            evaluate_if_due(run)  # before the first step; or what a crash has cut short
            for step in run.steps():
                groups, metrics = train_step(step, run)
                record(step, groups, metrics, run)
                if Stop.requested and step < config.steps:
                    break
                evaluate_if_due(run)
                show(metrics, run)
        finish(run)


def rehearse(run) -> None:
    """The largest micro-batch that can come, so that short memory shows now and not in an hour."""
    config = run.config
    context = config.max_prompt_tokens + config.max_tokens
    count = max(1, config.micro_tokens // context)
    rows = [Row([0] * context, prompt_length=1, mu=[0.0] * (context - 1), coefficient=1.0)
            for _ in range(count)]
    try:
        run.engine.sleep()
        accumulate(run.policy, rows, replace(config, mini_batches=1))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise SystemExit(
            f"Out of memory for a micro-batch of {count} x {context} tokens: lower --micro-tokens "
            f"(now {config.micro_tokens}), --max-tokens or --engine-memory, or try --sleep."
        ) from None
    finally:
        run.policy.zero_grad(set_to_none=True)
        run.engine.wake()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with last_words(CONFIG):
        main(CONFIG)
