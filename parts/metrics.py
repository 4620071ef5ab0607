"""What a step writes to the logs: what sampling cost, and whether the update was healthy.

metrics.jsonl has a line per step (`summarize`, `diagnostics`). groups.jsonl has a line per recorded
prompt, with every sample and its tokens' numbers (docs/explore.md explains the columns). To read
some of it without the page:

    jq '.prompt, (.pool[] | {reward, kept, text})' runs/NAME/groups.jsonl
"""
import functools
import math
from collections import Counter
from statistics import fmean
from typing import Any

import torch

DECIMALS = 7  # of a log-prob: enough to compute a token's term of Eq. 7 again to 1e-6


# ------------------------------------------------------------------------------ the sampling
def summarize(groups: list) -> dict[str, Any]:
    """One step's sampling as plain JSON: shares in [0, 1], means in their own units.

    reward_first_round is the curve to watch: every prompt counts once, and nothing was selected.
    reward_kept is not, for the sampler selects what is kept, often half of it right. Shares of
    prompts count all that were tried. A mean of nothing is left out.
    """
    pool, outcomes = [s for group in groups for s in group.pool], [g.outcome for g in groups]
    averages = dict(
        reward_first_round=[first_round_reward(group) for group in groups if group.pool],
        reward_pool=[s.reward for s in pool],
        reward_kept=[s.reward for group in groups for s in group.kept],
        response_length=[len(s.rollout.token_ids) for s in pool],
        truncated=[getattr(s.rollout, "finish_reason", "") == "length" for s in pool],
        zero_signal=[group.zero_signal for group in groups],
        unresolved=[outcome != "resolved" for outcome in outcomes],
        unresolved_too_few_correct=[outcome == "too few correct" for outcome in outcomes],
        unresolved_too_few_wrong=[outcome == "too few wrong" for outcome in outcomes],
        unresolved_out_of_budget=[outcome == "out of budget" for outcome in outcomes])
    rounds, spent = Counter(group.rounds for group in groups), Counter()
    for group in groups:
        spent[band(group.p_hat)] += len(group.pool)
    return dict(
        prompts=len(groups),
        samples=len(pool),
        tokens=sum(averages["response_length"]),
        engine_steps=max((getattr(s.rollout, "finished", 0) for s in pool), default=0),
        kept=len(averages["reward_kept"]),
        rounds_histogram=[rounds[r] for r in range(1, max(rounds, default=0) + 1)],
        spent_by_pass_rate=dict(sorted(spent.items())),
        verdicts=dict(sorted(Counter(s.status for s in pool).items())),
        **{name: fmean(values) for name, values in averages.items() if values})


def mean_surprisal(groups: list) -> float:
    """-log mu, averaged over every token that was drawn: an unbiased estimate of mu's entropy."""
    drawn = [x for group in groups for s in group.pool for x in s.rollout.logprobs]
    return -sum(drawn) / len(drawn)


def first_round_reward(group) -> float:
    return fmean(s.reward for s in group.pool if s.round == 0)


def band(p_hat: float) -> str:
    """A pool's pass rate in words: none, 0.0 (up to 0.2), 0.2, 0.4, 0.6, 0.8, all."""
    if p_hat == 0:
        return "none"
    if p_hat == 1:
        return "all"
    return f"{min(int(p_hat * 5), 4) / 5:.1f}"


# ------------------------------------------------------------------------------ the update
def diagnostics(rows: list, config) -> dict:
    """Metrics of one update over the tokens of the rows that it trained.

    The sampler selected them, so they are not a fair sample of mu: `entropy_trained` is their mean,
    `entropy` (`mean_surprisal`) that of everything drawn. k1 and k3 are two estimates of
    KL(mu || pi_old) in nats per token: does the engine sample what the trainer thinks?
    """
    seen = {name: torch.cat([getattr(row, name).cpu() for row in rows]).double()
            for name in ("old", "mask", "weight", "entropy")}
    seen["mu"] = torch.tensor([x for row in rows for x in row.mu]).double()
    seen["coefficient"] = torch.tensor([row.coefficient for row in rows for _ in row.mu])
    if rows[0].agrees is not None:  # [T, MoE layers]
        seen["agrees"] = torch.cat([row.agrees for row in rows]).double()
    gap_T, weight_T = seen["mu"] - seen["old"], seen["weight"]
    values = dict(
        entropy_trained=seen["entropy"].mean(),
        kl_k1=gap_T.mean(),  # noisy and sometimes negative
        kl_k3=((-gap_T).exp() - 1 + gap_T).mean(),  # never negative
        logprob_gap=gap_T.abs().max(),
        weight_min=weight_T.min(),
        weight_mean=weight_T.mean(),
        weight_max=weight_T.max(),
        weight_ess=effective_share(weight_T),
        weight_over_2=share(weight_T > 2),
        weight_under_half=share(weight_T < 0.5))
    values |= cut_off(seen, config)
    if "agrees" in seen:  # counted among the layers that have experts
        for layer, agrees_T in enumerate(seen["agrees"].T):
            values[f"routes_agree_{layer}"] = agrees_T.mean()
        values["routes_agree_all"] = share(seen["agrees"].bool().all(1))
    values = {name: value.item() for name, value in values.items()}
    return dict(tokens_trained=len(weight_T)) | values


def cut_off(seen: dict, config) -> dict:
    """Shares of tokens that the objective masked or whose weight it bounded, where it does so."""
    weight_T, stopped_T, up_T = seen["weight"], seen["mask"] == 0, seen["coefficient"] > 0
    values = {}
    if config.objective == "minirl" and config.weight_cap:
        values["weight_truncated"] = share(weight_T > config.weight_cap)
    if config.objective == "cispo" and config.clip:
        outside_T = (weight_T < 1 - config.eps_low) | (weight_T > 1 + config.eps_high)
        values["weight_truncated"] = share(outside_T)
    if config.objective != "cispo" and config.clip:
        values["clipped_positive"] = share(stopped_T & up_T)
        values["clipped_negative"] = share(stopped_T & ~up_T)
    return values


def share(true_T) -> torch.Tensor:
    return true_T.double().mean()


def effective_share(weight_T) -> torch.Tensor:
    """Effective sample size over sample size, (sum w)^2 / (N sum w^2).

    Equal weights give 1, weights 0 and 1 give 1/2, one dominating weight gives 1/N.
    """
    return weight_T.sum().square() / (len(weight_T) * weight_T.square().sum())


# ------------------------------------------------------------------------------ groups.jsonl
def recorded(groups: list, count: str) -> list:
    """The groups that are logged: "all", or the first so many of the batch.

    The batch is shuffled, so the first ones are a fair choice. (dapo's replacements come last.)
    """
    return groups if count == "all" else groups[:int(count)]


def group_row(step: int, group, tokenizer) -> dict:
    """A prompt of one step, with its samples in the order of drawing."""
    kept = {s.index: (a, a * w) for s, a, w in zip(group.kept, group.advantages, group.weights)}
    rewards = [s.reward for s in group.pool]
    return dict(
        step=step, place=group.index, refill=group.refill, id=group.problem.id,
        prompt=group.problem.prompt, gold=group.problem.answer, outcome=group.outcome,
        pool_mean=sum(rewards) / len(rewards) if rewards else None,
        baseline=group.baseline, p_hat=group.p_hat,
        opened=group.pool[0].rollout.submitted if group.pool else None,
        pool=[sample_row(s, kept.get(s.index), tokenizer) for s in group.pool])


def sample_row(s, kept: tuple[float, float] | None, tokenizer) -> dict:
    """A sample. `kept`: its advantage and coefficient, or None if it was not kept."""
    rollout = s.rollout
    row = dict(
        round=s.round, submit=rollout.submitted, finish=rollout.finished, reward=s.reward,
        status=s.status, reason=s.why, finish_reason=rollout.finish_reason, text=rollout.text,
        length=len(rollout.token_ids), kept=kept is not None)
    if kept:
        row |= dict(advantage=kept[0], coefficient=kept[1])
    if rollout.row is not None and rollout.row.theta is not None:
        row |= token_columns(rollout.row, rollout.token_ids, tokenizer)
    return row


def token_columns(row, token_ids: list[int], tokenizer) -> dict:
    """What the update computed for each token. pi_old only where it differs from pi_theta."""
    columns = dict(scale=row.scale, mini=row.mini_batch, ids=token_ids,
                   tokens=pieces(token_ids, tokenizer), mu=numbers(row.mu),
                   theta=numbers(row.theta.tolist()))
    if not torch.equal(row.old, row.theta):
        columns["old"] = numbers(row.old.tolist())
    columns |= dict(
        mask="".join("1" if x else "0" for x in row.mask.tolist()),
        weight=numbers(row.weight.tolist()),
        entropy=numbers(row.entropy.tolist(), 4))
    if row.agrees is not None:  # [T, MoE layers]
        columns["agrees"] = numbers(row.agrees.float().mean(1).tolist(), 4)
    return columns


def pieces(token_ids: list[int], tokenizer) -> list[str]:
    """The text that each token adds to the one before it, special tokens included.

    Decoded alone, a token would lose the space that some tokenizers put in front of it. A character
    made of several tokens shows as U+FFFD.
    """
    pairs = [tuple(token_ids[max(i - 1, 0):i + 1]) for i in range(len(token_ids))]
    return [piece(tokenizer, pair) for pair in pairs]


@functools.lru_cache(maxsize=200_000)  # decoding would be half of what recording costs
def piece(tokenizer, pair: tuple[int, ...]) -> str:
    """What the last token of the pair (or the only one) adds to the text."""
    before = tokenizer.decode(list(pair[:-1]))
    return tokenizer.decode(list(pair))[len(before):]


def numbers(values: list[float], decimals: int = DECIMALS) -> list[float | None]:
    """Rounded. None where JSON has no number, as for the log-probs of a broken update."""
    return [round(value, decimals) if math.isfinite(value) else None for value in values]
