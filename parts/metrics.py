"""Computes the numbers that are logged of a step.

metrics.jsonl has a line per step (`summarize`, `diagnostics`). groups.jsonl has a line per recorded
prompt, with every answer and the numbers of its tokens (docs/runs.md explains the columns).
"""
import functools
import math
from collections import Counter
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from ada_sampler import RESOLVED, TOO_FEW_CORRECT, TOO_FEW_WRONG
from parts.grader import NO_VERDICT, mean_parts
from parts.text import shown

DECIMALS = 7  # of a log-prob, so that a token's term of Eq. 7 can be recomputed to 1e-6
PATIENCE = 3  # steps in a row with a gradient that is not finite
MANY_FAILED = 0.02  # share of answers without a verdict


# ------------------------------------------------------------------------------ the sampling
def summarize(groups: list) -> dict[str, Any]:
    """One step's sampling as plain JSON: shares in [0, 1], means in their own units.

    reward_first_round is the curve to watch, because every prompt counts once and no answer was
    selected. In reward_kept the sampler often keeps as many right as wrong answers. Shares of
    prompts count all that were tried. A mean over nothing is left out.
    The parts of a reward (reward/NAME) are averaged like reward_first_round.
    """
    pool = [s for group in groups for s in group.pool]
    firsts = [[s for s in group.judged if s.round == 0] for group in groups]
    averages = dict(
        reward_first_round=[fmean(s.reward for s in answers) for answers in firsts if answers],
        reward_pool=[s.reward for group in groups for s in group.judged],
        reward_kept=[s.reward for group in groups for s in group.kept],
        response_length=[len(s.rollout.token_ids) for s in pool],
        truncated=[s.rollout.finish_reason == "length" for s in pool],
        zero_signal=[group.zero_signal for group in groups])
    parts = [mean_parts([s.parts for s in answers]) for answers in firsts if answers]
    rounds = Counter(group.rounds for group in groups)
    outcomes = Counter(group.outcome for group in groups)
    return dict(
        prompts=len(groups),
        samples=len(pool),
        tokens=sum(averages["response_length"]),
        engine_steps=max(s.rollout.finished for s in pool),
        kept=len(averages["reward_kept"]),
        rounds_histogram=[rounds[r] for r in range(1, max(rounds) + 1)],
        verdicts=dict(sorted(Counter(s.status for s in pool).items())),
        unresolved=(len(groups) - outcomes[RESOLVED]) / len(groups),
        unresolved_too_few_correct=outcomes[TOO_FEW_CORRECT] / len(groups),
        unresolved_too_few_wrong=outcomes[TOO_FEW_WRONG] / len(groups),
        **{name: fmean(values) for name, values in averages.items() if values},
        **mean_parts(parts))


def mean_surprisal(groups: list) -> float:
    """Mean of -log mu over all sampled tokens, an estimate of the entropy per token in nats."""
    drawn = [x for group in groups for s in group.pool for x in s.rollout.logprobs]
    return -sum(drawn) / len(drawn)


# ------------------------------------------------------------------------------ the update
def diagnostics(rows: list, config) -> dict:
    """Metrics of one update over the tokens of all rows that it trained on.

    The sampler selected these tokens, so they are not a fair sample of mu. `entropy_trained` is
    their mean entropy, and `entropy` (`mean_surprisal`) that of all tokens. k1 and k3 estimate
    KL(mu || pi_old) in nats per token, so they show how well engine and trainer agree.
    """
    old_T, mask_T, weight_T, entropy_T = (
        torch.cat([getattr(row, name).cpu() for row in rows]).double()
        for name in ("old_logprobs", "mask", "weight", "entropy"))
    mu_T = torch.tensor([x for row in rows for x in row.mu_logprobs]).double()
    up_T = torch.tensor([row.coefficient > 0 for row in rows for _ in row.mu_logprobs])
    gap_T = mu_T - old_T
    values = dict(
        entropy_trained=entropy_T.mean(),
        kl_k1=gap_T.mean(),  # large variance, sometimes negative
        kl_k3=((-gap_T).exp() - 1 + gap_T).mean(),  # never negative
        weight_min=weight_T.min(),
        weight_mean=weight_T.mean(),
        weight_max=weight_T.max(),
        # Effective sample size over sample size: 1 for equal weights, 1/N if one dominates.
        weight_ess=weight_T.sum().square() / (len(weight_T) * weight_T.square().sum()),
        weight_over_2=share(weight_T > 2),
        weight_under_half=share(weight_T < 0.5))
    values |= cut_off(weight_T, mask_T == 0, up_T, config)
    if rows[0].agrees is not None:
        agrees = torch.cat([row.agrees for row in rows])  # [T, layers with experts]
        values["routes_agree_all"] = share(agrees.all(1))
    values = {name: value.item() for name, value in values.items()}
    return dict(tokens_trained=len(weight_T)) | values


def cut_off(weight_T, stopped_T, up_T, config) -> dict:
    """Shares of tokens that the objective masked or whose weight it bounded, if it does so."""
    values = {}
    if config.objective == "minirl" and config.weight_cap:
        values["weight_truncated"] = share(weight_T > config.weight_cap)
    if config.clip and config.objective == "cispo":  # which bounds the weights
        outside_T = (weight_T < 1 - config.eps_low) | (weight_T > 1 + config.eps_high)
        values["weight_truncated"] = share(outside_T)
    elif config.clip:
        values["clipped_positive"] = share(stopped_T & up_T)
        values["clipped_negative"] = share(stopped_T & ~up_T)
    return values


def share(true_T) -> torch.Tensor:
    return true_T.double().mean()


# ------------------------------------------------------------------------------ groups.jsonl
def group_row(step: int, group, tokenizer) -> dict:
    """A prompt of one step, with its answers in the order in which they were sampled."""
    updates = {s.index: (a, a * w) for s, a, w in zip(group.kept, group.advantages, group.weights)}
    return dict(
        step=step, place=group.index, refill=group.refill, id=group.problem.id,
        problem=group.problem.problem, prompt=group.problem.prompt, gold=group.problem.answer,
        outcome=group.outcome, baseline=group.baseline, p_hat=group.p_hat,
        pool=[sample_row(s, updates.get(s.index), tokenizer) for s in group.pool])


def sample_row(s, update: tuple[float, float] | None, tokenizer) -> dict:
    """One answer. `update`: its advantage and coefficient, or None if it was not kept."""
    rollout = s.rollout
    row = dict(
        round=s.round, submit=rollout.submitted, finish=rollout.finished, reward=s.reward,
        status=s.status, reason=s.why, finish_reason=rollout.finish_reason, text=rollout.text,
        length=len(rollout.token_ids), kept=update is not None) | s.parts
    if update:
        row |= dict(advantage=update[0], coefficient=update[1])
    if s.row is not None and s.row.theta_logprobs is not None:
        row |= token_columns(s.row, rollout.token_ids, tokenizer)
    return row


def token_columns(row, token_ids: list[int], tokenizer) -> dict:
    """What the update computed for each token. pi_old is left out if it equals pi_theta."""
    columns = dict(scale=row.norm, mini=row.mini_batch, ids=token_ids,
                   tokens=pieces(token_ids, tokenizer), mu=rounded(row.mu_logprobs),
                   theta=rounded(row.theta_logprobs.tolist()))
    if not torch.equal(row.old_logprobs, row.theta_logprobs):
        columns["old"] = rounded(row.old_logprobs.tolist())
    columns |= dict(
        mask="".join("1" if x else "0" for x in row.mask.tolist()),
        weight=rounded(row.weight.tolist()),
        entropy=rounded(row.entropy.tolist(), 4))
    if row.agrees is not None:  # [T, MoE layers]
        columns["agrees"] = rounded(row.agrees.float().mean(1).tolist(), 4)
    return columns


def pieces(token_ids: list[int], tokenizer) -> list[str]:
    """The text that each token adds to the one before it, special tokens included.

    Decoded alone, a token would not have the space that some tokenizers put in front of it. A
    character that consists of several tokens shows as U+FFFD.
    """
    return [piece(tokenizer, *token_ids[max(i - 1, 0):i + 1]) for i in range(len(token_ids))]


@functools.lru_cache(maxsize=200_000)  # else decoding would take half of the recording time
def piece(tokenizer, *ids: int) -> str:
    """What the last of these one or two tokens adds to the text."""
    return tokenizer.decode(ids)[len(tokenizer.decode(ids[:-1])):]


def rounded(values: list[float], decimals: int = DECIMALS) -> list[float]:
    return [round(value, decimals) for value in values]


# ------------------------------------------------------------------------------ what goes wrong
def warn(row: dict, groups: list) -> None:
    """Print what is odd about a step, by its line of metrics.jsonl."""
    step, pool = f"WARNING, step {row['step']}:", [s for group in groups for s in group.pool]
    failed = [s for s in pool if s.status in NO_VERDICT]
    if len(failed) > MANY_FAILED * len(pool):  # as if the model did not learn
        tqdm.write(f"{step} {len(failed)} of {len(pool)} answers got no verdict, such as "
                   f"{failed[0].rollout.text[-120:]!r}: {failed[0].status}, {shown(failed[0].why)}")
    if "loss" not in row:
        text, gold = pool[0].rollout.text[:1000], groups[0].problem.answer
        first = f", and the first is {text!r} (gold {gold!r})" if row["step"] == 1 else ""
        no_box = row["verdicts"].get("no_box", 0) / len(pool)
        tqdm.write(f"{step} no prompt has a gradient. Of {len(pool)} answers "
                   f"{row['truncated']:.0%} are truncated, {no_box:.0%} have no box, and "
                   f"{fmean(s.correct for s in pool):.0%} are right{first}: docs/learning.md says "
                   "what helps")


def why_broken(history, loss_scale) -> str:
    """Why a run has to end after PATIENCE steps in a row whose gradient was not finite, or "".

    Such a gradient was not applied, so the weights are intact. A gradient that overflowed float16
    does not count, because the loss scale is lower now.
    """
    row = history[-1]
    if not row["skipped_steps"]:
        return ""
    overflow = (loss_scale.is_enabled() and loss_scale.get_scale() >= 1
                and math.isfinite(row["loss"]))
    tqdm.write(f"step {row['step']}: {row['skipped_steps']} optimizer step(s) skipped, because the "
               f"gradient is {'too large for float16' if overflow else 'not finite'}")
    last = [earlier.get("skipped_steps") for earlier in history][-PATIENCE:]
    if overflow or len(last) < PATIENCE or not all(last):
        return ""
    return (f"{PATIENCE} steps in a row had a gradient that is not finite; everything up to step "
            f"{row['step']} is saved: continue with --resume and a lower --lr.")
