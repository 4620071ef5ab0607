"""What to watch: numbers that say whether an update was healthy."""
import torch


def diagnostics(facts: list[dict], config) -> dict:
    """Metrics of one update, over its trained tokens: those of samples with a coefficient.

    These are no fair sample of mu, for the sampler chose them: `entropy_trained` is theirs, and
    `entropy`, which `train_step` adds, that of everything drawn. k1 and k3 are two estimates of
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
    return {name: value.item() for name, value in values.items()}


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
