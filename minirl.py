"""MiniRL with Reinforce-Ada sampling: a language model learns mathematics by trial and error.

    python minirl.py                              # trains the built-in tiny model, on a CPU
    python minirl.py --model Qwen2.5-Math-1.5B    # the real thing, on one GPU

The file reads from the top down: the program, one step, its update, the objective. A step:

    sample   each prompt is sampled in rounds until it has right and wrong answers   ada_sampler.py
    grade    the answer in \\boxed{} is compared as text, or else by math-verify      rewards.py
    keep     n samples per prompt; advantage = reward - mean of all that was drawn   ada_sampler.py
    update   `objective`: MiniRL Eq. 7 on the weights of a LoRA adapter              here
    sync     the engine gets the new weights, and a probe checks that they arrived   parts/engine.py

Papers: Reinforce-Ada, arXiv 2510.04996, and MiniRL, arXiv 2512.01374. Three policies matter, and
keeping them apart is most of what small projects get wrong:

    mu         the vLLM engine: the distribution from which the tokens were drawn
    pi_old     the trainer with the same weights: differs from mu by kernels and precision only
    pi_theta   the trainer now

By default there is one optimizer step per batch of samples. Then pi_theta is pi_old, nothing is
masked, and in float32 the importance weight is 1: what is left is REINFORCE with a baseline.

A tensor with the suffix _T has one entry per response token, all responses one after the other, no
padding. What is left out: README.md.
"""
import contextlib
import math
import random

if __name__ == "__main__":
    from parts.config import parse_before_torch

    FLAGS = parse_before_torch()  # so --help and a wrong flag answer at once

import torch

from ada_sampler import collect
from eval import bootstrap, evaluate, in_order, report_by_set, with_rewards
from parts.config import Config, Flags
from parts.engine import WatchedEngine
from parts.logprobs import (Row, gvm_norms, micro_batches, store_on_rows, token_logprobs,
                            tokens_at_once)
from parts.machine import memory_gb, threads
from parts.metrics import diagnostics, mean_surprisal, summarize
from parts.routing_replay import note_routes, replaying, require_routes
from parts.run import (Run, evaluation_is_due, finish, last_words, prepare, record,
                       record_evaluation, rehearse, reseed, show, timed)
from rewards import open_grader


# ------------------------------------------------------------------------------ the program
def main(flags: Flags) -> None:
    with open_grader(flags.reward, flags.threshold) as grader:
        run = prepare(flags, grader)  # settings, data, engine, policy; or the last checkpoint
        rehearse(run)
        sync(run)
        evaluate_if_due(run)  # before the first step
        for step in run.steps():
            groups, metrics = train_step(step, run)
            record(step, groups, metrics, run)  # logs, then a checkpoint (parts/folder.py)
            evaluate_if_due(run)
            show(metrics, run)
        finish(run, bootstrap)


# ------------------------------------------------------------------------------ one step
def train_step(step: int, run: Run):
    """Sample, grade, keep, update, sync. Returns the step's groups and its metrics."""
    config, seconds = run.config, {}
    rng = reseed(config.seed, step, "training")
    with timed(seconds, "sample"):
        groups = sample(run)
    with timed(seconds, "train"):
        run.engine.sleep()
        metrics = update(run.policy, run.optimizer, run.schedule, groups, config, rng)
        run.engine.wake()
    with timed(seconds, "sync"):
        # An engine that slept has copied its weights back: send and check them in any case.
        if metrics["optimizer_steps"] or run.engine.sleeps:
            metrics |= sync(run)
        else:  # empty, as in a run that is resumed after this step
            run.engine.clear_cache()
    metrics |= summarize(groups) | dict(entropy=mean_surprisal(groups)) | seconds
    metrics |= dict(seconds=sum(seconds.values()), memory_gb=memory_gb(),
                    threads=torch.get_num_threads())
    metrics["tokens_per_second"] = metrics["tokens"] / seconds["seconds_sample"]
    return groups, metrics


def sample(run: Run) -> list:
    """One group per prompt: all that was drawn for it, what is kept, and the advantages."""
    config, stream = run.config, run.stream
    engine = WatchedEngine(run.engine, config.max_tokens)
    with contextlib.closing(engine.bar):
        groups = collect(
            stream.take(config.batch_prompts), config, engine, run.grader,
            estimator=run.estimator,  # ada-est: what earlier steps have seen of each prompt
            more=lambda: stream.take(1)[0],  # dapo: a prompt in the place of another
            # gvm: how long the gradients of each prompt's right answers are
            grad_norms=lambda groups: gvm_norms(run.policy, groups, config.temperature))
    if run.engine.routes:  # a mixture of experts
        require_routes(run.policy, groups)
    return groups


def sync(run: Run) -> dict:
    """Give the engine the weights; returns what the probe (parts/probe.py) says of them."""
    run.engine.sync(run.policy)
    return run.probe.check()


def evaluate_if_due(run: Run) -> None:
    """avg@k on the held-out problems, which `drop_overlap` (parts/data.py) keeps from training."""
    if not evaluation_is_due(run):
        return
    config = run.config
    samples = evaluate(
        run.engine, run.grader, run.held_out, config.eval_k, config.max_tokens,
        temperature=config.temperature, seed=f"{config.seed}/{run.state['step']}")
    rows = with_rewards(in_order(samples, run.held_out, config.eval_k))
    # A resumed run starts without this cache, and keys from a cache round differently.
    run.engine.clear_cache()
    record_evaluation(rows, report_by_set(rows, config.eval_k, config.eval_data), run)


# ------------------------------------------------------------------------------ the update
def update(policy, optimizer, schedule, groups, config: Config, rng: random.Random) -> dict:
    """One pass over the kept samples: `mini_batches` optimizer steps. Returns diagnostics."""
    minis = cut(groups, config, rng)
    if not minis:
        return dict(optimizer_steps=0, skipped_steps=0)
    lr = optimizer.param_groups[0]["lr"]  # the rate of the first step; each one moves the schedule
    if config.mini_batches > 1:  # with one mini-batch pi_old is pi_theta: no pass of its own
        for mini in minis:
            old_logprobs(policy, mini, config)
    losses, norms = [], []
    for number, mini in enumerate(minis):
        losses.append(accumulate(policy, mini, config))
        norms.append(optimizer_step(policy, optimizer, schedule, config))
        for row in mini:
            row.mini_batch = number
    bad = sum(not math.isfinite(norm) for norm in norms)
    return diagnostics([row for mini in minis for row in mini], config) | dict(
        loss=sum(losses) / len(minis), grad_norm=sum(norms) / len(minis),
        lr=lr, optimizer_steps=len(minis) - bad, skipped_steps=bad)


def cut(groups, config: Config, rng: random.Random) -> list[list[Row]]:
    """The kept samples as mini-batches of whole groups; each mini-batch in order of length.

    A row of coefficient 0 has no gradient, so it is left out, but it counts in the mean
    (`set_scales`). Otherwise the divisor would shrink with the batch: one useful prompt would make
    as large a step as a full batch, in a direction that is mostly noise.

    A response that was cut off at max_tokens is a row like any other. Its last box must be closed
    to count; mostly it is not, so the answer is wrong. That teaches the model to finish; masking
    such rows would take the lesson away. The log counts them as `truncated`.
    """
    rows_of = [rows_of_group(group, config) for group in groups if group.kept]
    set_scales([row for rows in rows_of for row in rows], config)
    rng.shuffle(rows_of)  # they come by prompt: no mini-batch must be all easy or all hard
    minis = []
    for i in range(config.mini_batches):
        mine = rows_of[i::config.mini_batches]
        minis.append([row for rows in mine for row in rows if row.coefficient])
    return [sorted(mini, key=lambda row: len(row.ids)) for mini in minis if mini]


def rows_of_group(group, config: Config) -> list[Row]:
    prompt, rows = group.problem.prompt_ids, []
    for s, coefficient in group.rows():
        row = Row(prompt + s.rollout.token_ids, len(prompt), s.rollout.logprobs, coefficient,
                  routes=s.rollout.routes)
        if config.replay == "r3":  # mixtures only
            row.replay = row.routes
        s.rollout.row = row  # for the log: what the update will see of this sample
        rows.append(row)
    return rows


def old_logprobs(policy, mini: list[Row], config: Config) -> None:
    """log pi_old of every row, before the first optimizer step of the batch.

    The micro-batches are those of `accumulate`: in low precision a row rounds differently beside
    other rows, and r would not start at 1.
    """
    for micro in micro_batches(mini, tokens_at_once(policy, mini, config.micro_tokens)):
        with torch.no_grad(), replaying(policy, micro):  # replaying: mixtures only
            lp_T, _ = token_logprobs(policy, micro, config.temperature)
        store_on_rows(micro, old=lp_T)
        note_routes(policy, micro, config.replay)  # mixtures only


def accumulate(policy, mini: list[Row], config: Config) -> float:
    """Add up the gradient of one mini-batch, a micro-batch at a time. Returns the loss.

    T is the number of response tokens of the micro-batch. What was computed of each token is left
    on its row, for `diagnostics` and the log.
    """
    loss = 0.0
    for micro in micro_batches(mini, tokens_at_once(policy, mini, config.micro_tokens)):
        threads().look()  # CPU only: fewer beside busy processes
        mu_T = torch.tensor([x for row in micro for x in row.mu], device=policy.device)  # [T], nats
        coefficient_T = per_token([row.coefficient for row in micro], micro, policy.device)  # [T]
        scale_T = per_token([row.scale for row in micro], micro, policy.device)  # [T]
        with replaying(policy, micro):  # mixtures only; backward too: checkpointing recomputes
            lp_T, entropy_T = token_logprobs(policy, micro, config.temperature)  # [T], [T] in nats
            if config.mini_batches == 1:
                store_on_rows(micro, old=lp_T.detach())
                note_routes(policy, micro, config.replay)  # mixtures only
            old_T = torch.cat([row.old for row in micro])  # [T], no gradient
            term_T, mask_T, weight_T = objective(lp_T, old_T, mu_T, coefficient_T, config)  # [T]
            micro_loss = -(term_T * scale_T).sum()  # a number: the sum over all tokens
            policy.loss_scale.scale(micro_loss).backward()  # scale: float16 only
        loss += micro_loss.item()
        store_on_rows(micro, theta=lp_T.detach(), mask=mask_T, weight=weight_T, entropy=entropy_T)
    return loss


def per_token(values: list[float], rows: list[Row], device):
    """A value per row -> [T], repeated for each of its tokens."""
    lengths = torch.tensor([row.length for row in rows], device=device)
    return torch.tensor(values, device=device).repeat_interleave(lengths)


def optimizer_step(policy, optimizer, schedule, config: Config) -> float:
    """Clip, step, forget the gradient. Returns its norm before clipping.

    A gradient that is not finite is skipped. `loss_scale` is for float16 (`load_policy`); in other
    precisions it does nothing.
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


# ------------------------------------------------------------------------------ the objective
def objective(lp_T, old_T, mu_T, coefficient_T, config: Config):
    """Per-token terms of the objective, to be summed over tokens and maximised.

        minirl  M_t * sg[min(pi_theta/mu, cap)] * A * log pi_theta              Eq. 7
        grpo    min(r A, clip(r) A)                      r = pi_theta/pi_old    appendix A
        cispo   sg[clip(r)] * A * log pi_theta                                  appendix A

    The weight. The samples are not from pi_theta for two reasons, and pi_theta/mu corrects for both
    (Eq. 5): pi_old/mu, the engine is not the trainer; and r, the policy has moved since.

    The mask M_t looks at r alone. It stops a token that has moved far enough in the direction in
    which its advantage pushes. One that has moved the other way keeps its gradient, or it could
    never come back. GRPO's min (PPO's) stops the same tokens; CISPO bounds its weight, stops none.

    lp_T (with gradient), old_T, mu_T: log-probs, [T] in nats. coefficient_T: A times row weight.
    Returns (term_T, mask_T: 0 where no gradient is left, weight_T before any bound).
    """
    ratio_T = (lp_T - old_T).exp()  # r
    low, high = 1 - config.eps_low, 1 + config.eps_high
    mask_T = torch.ones_like(old_T)  # for grpo it is only logged: the min stops these tokens
    if config.clip and config.objective != "cispo":
        mask_T[(coefficient_T > 0) & (ratio_T > high)] = 0
        mask_T[(coefficient_T < 0) & (ratio_T < low)] = 0
    if config.mask != "ratio":
        mask_T = other_mask(mask_T, lp_T, old_T, mu_T, coefficient_T, config)

    if config.objective == "grpo":
        bounded_T = ratio_T.clamp(low, high) if config.clip else ratio_T
        term_T = torch.minimum(ratio_T * coefficient_T, bounded_T * coefficient_T)
        return term_T, mask_T, ratio_T.detach()

    if config.objective == "cispo":
        weight_T = ratio_T.detach()
        bounded_T = weight_T.clamp(low, high) if config.clip else weight_T
        return bounded_T * coefficient_T * lp_T, mask_T, weight_T

    assert config.objective == "minirl", "add a branch to objective in minirl.py"
    weight_T = importance_weight(lp_T, old_T, mu_T, config.importance)
    bounded_T = weight_T.clamp(max=config.weight_cap) if config.weight_cap else weight_T
    return mask_T * bounded_T * coefficient_T * lp_T, mask_T, weight_T


def importance_weight(lp_T, old_T, mu_T, kind: str):
    """sg[pi_theta/mu]; or only its second factor, sg[pi_theta/pi_old]; or 1. [T], no gradient."""
    if kind == "full":
        return (lp_T - mu_T).exp().detach()
    if kind == "staleness":
        return (lp_T - old_T).exp().detach()
    return torch.ones_like(old_T)


def set_scales(rows: list[Row], config: Config) -> None:
    """Set `row.scale`, the factor of each of its tokens in the loss: 1 / (responses * length).

    MiniRL sums over tokens and averages over responses, so `length` is a constant, max_tokens. Why
    divide by a constant at all? A sum over thousands of tokens has so large a gradient that
    --max-grad-norm 1 would cut every step to the same size. After the division it hardly ever acts.

    Apart from that a constant has no effect. AdamW divides out a factor that is the same in every
    step (but for its epsilon). It does not divide out one that changes from batch to batch: so
    silent rows count in `responses` (`cut`).

    Lengths of responses in its place (--length-norm) change what is optimised: divided by its
    own length, a right answer counts more the shorter it is, a wrong one less the longer it is.
    `batch` is the mean of the whole batch, where the paper's CISPO takes one prompt's responses.

    `responses` is the average number per mini-batch, not the number in this one: ada-est and gvm
    give important prompts more rows, and dividing by the number in this mini-batch would cancel it.
    """
    responses = len(rows) / config.mini_batches
    mean_length = sum(row.length for row in rows) / max(len(rows), 1)
    for row in rows:
        length = dict(constant=config.max_tokens, response=row.length, batch=mean_length)
        row.scale = 1 / (responses * length[config.length_norm])


# ------------------------------------------------------------------------------ beyond the paper
AGREE = (0.5, 5.0)  # IcePop's bounds are this project's choice; the upper one is MiniRL's cap
DELTA = 0.2  # how far a token's probability may move, about as in DPPO's paper


def other_mask(mask_T, lp_T, old_T, mu_T, coefficient_T, config: Config):
    """Two later masks, for comparison (--mask).

    dppo     DPPO, arXiv 2602.04879. A ratio says little about how far a policy has moved: a rare
             token doubles before anything has happened. So it looks at probabilities: stopped is
             A > 0 where pi_theta - mu > DELTA, and A < 0 where it is < -DELTA.
    icepop   IcePop, Ring-1T, arXiv 2510.18855. A token on which engine and trainer disagree is
             noise: besides what `mask_T` stops, tokens with pi_old/mu outside AGREE.
    """
    if config.mask == "icepop":
        mismatch_T = (old_T - mu_T).exp()
        return mask_T * ((mismatch_T >= AGREE[0]) & (mismatch_T <= AGREE[1]))
    moved_T = lp_T.detach().exp() - mu_T.exp()
    too_far_T = torch.where(coefficient_T > 0, moved_T > DELTA, moved_T < -DELTA)
    return (~too_far_T).to(mask_T)


if __name__ == "__main__":
    with last_words(FLAGS):
        main(FLAGS)
