"""What to watch: a line of the log, what sampling cost and whether the update was healthy."""
from collections import Counter
from statistics import fmean
from typing import Any

import torch


# ------------------------------------------------------------------------------ the sampling
def summarize(groups: list) -> dict[str, Any]:
    """One step's sampling as plain JSON: shares in [0, 1], means in their own units.

    reward_first_round is the curve to watch: every prompt counts once and nothing was chosen.
    reward_kept is about 1/2 by construction, whatever the model can do. Shares of prompts count all
    that were tried. The mean of nothing is left out.
    """
    pool = [s for group in groups for s in group.pool]
    averages = dict(
        reward_first_round=[first_round_reward(group) for group in groups if group.pool],
        reward_pool=[s.reward for s in pool],
        reward_kept=[s.reward for group in groups for s in group.kept],
        response_length=[len(s.rollout.token_ids) for s in pool],
        truncated=[getattr(s.rollout, "finish_reason", "") == "length" for s in pool],
        zero_signal=[group.zero_signal for group in groups],
        unresolved=[group.outcome != "resolved" for group in groups],
        unresolved_no_correct=[group.outcome == "no correct" for group in groups],
        unresolved_no_wrong=[group.outcome == "no wrong" for group in groups],
        unresolved_out_of_budget=[group.outcome == "out of budget" for group in groups],
    )
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
        **{name: fmean(values) for name, values in averages.items() if values},
    )


def mean_surprisal(groups: list) -> float:
    """-log mu, averaged over every token that was drawn: an unbiased estimate of mu's entropy."""
    drawn = [x for group in groups for s in group.pool for x in s.rollout.logprobs]
    return -sum(drawn) / len(drawn)


def first_round_reward(group) -> float:
    return fmean(s.reward for s in group.pool if s.round == 0)


def band(p_hat: float) -> str:
    """Where draws went, by the pass rate of their own pool: none, 0.0 (up to 0.2), ... 0.8, all."""
    if p_hat == 0:
        return "none"
    if p_hat == 1:
        return "all"
    return f"{min(int(p_hat * 5), 4) / 5:.1f}"


# ------------------------------------------------------------------------------ the update
def diagnostics(facts: list[dict], config) -> dict:
    """Metrics of one update, over its trained tokens: those of samples with a coefficient.

    These are no fair sample of mu, for the sampler chose them: `entropy_trained` is theirs, and
    `entropy`, of `mean_surprisal`, that of everything drawn. k1 and k3 are two estimates of
    KL(mu || pi_old) on the trained tokens, in nats per token. Shares are of trained tokens.

    facts: for each mini-batch log pi_old, log mu, advantage, mask, weight and entropy, each [T],
    and of a mixture of experts where engine and trainer agree, [T, MoE layers].
    """
    seen = {name: torch.cat([one[name] for one in facts]).double() for name in facts[0]}
    gap_T, weight_T = seen["mu"] - seen["old"], seen["weight"]
    values = dict(
        entropy_trained=seen["entropy"].mean(),
        kl_k1=gap_T.mean(),  # noisy and sometimes negative
        kl_k3=((-gap_T).exp() - 1 + gap_T).mean(),  # never negative
        logprob_gap=gap_T.abs().max(),
        weight_min=weight_T.min(),
        weight_mean=weight_T.mean(),
        weight_max=weight_T.max(),
        weight_over_2=share(weight_T > 2),
        weight_under_half=share(weight_T < 0.5),
    )
    values |= cut_off(seen, config)
    if "agrees" in seen:  # counted among the layers that have experts
        for layer, agrees_T in enumerate(seen["agrees"].T):
            values[f"routes_agree_{layer}"] = agrees_T.mean()
        values["routes_agree_all"] = share(seen["agrees"].bool().all(1))
    values = {name: value.item() for name, value in values.items()}
    return dict(tokens_trained=len(weight_T)) | values


def cut_off(seen: dict, config) -> dict:
    """What the objective stopped or bounded; nothing is reported that it does not do."""
    weight_T, stopped_T, up_T = seen["weight"], seen["mask"] == 0, seen["advantage"] > 0
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
