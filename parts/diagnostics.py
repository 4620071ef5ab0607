"""What to watch: numbers that say whether an update was healthy."""
import torch


def diagnostics(facts: list[dict], config) -> dict:
    """Metrics of one update, over all tokens that had a gradient; shares are shares of those.

    facts: for each mini-batch log pi_old, log mu, advantage, mask, weight and entropy, each [T],
    and of a mixture of experts where engine and trainer agree, [T, MoE layers].
    """
    seen = {name: torch.cat([one[name] for one in facts]).double() for name in facts[0]}
    gap_T = seen["mu"] - seen["old"]  # log mu/pi_old of tokens drawn from mu
    weight_T, clipped_T, up_T = seen["weight"], seen["mask"] == 0, seen["advantage"] > 0
    values = dict(
        entropy=seen["entropy"].mean(),
        kl_k1=gap_T.mean(),  # KL(mu || pi_old): unbiased, but noisy and sometimes negative
        kl_k3=((-gap_T).exp() - 1 + gap_T).mean(),  # the same in expectation, never negative
        logprob_gap=gap_T.abs().max(),
        weight_min=weight_T.min(),
        weight_mean=weight_T.mean(),
        weight_max=weight_T.max(),
        weight_truncated=share(weight_T > config.weight_cap),
        weight_over_2=share(weight_T > 2),
        weight_under_half=share(weight_T < 0.5),
        clipped_positive=share(clipped_T & up_T),
        clipped_negative=share(clipped_T & ~up_T),
    )
    if "agrees" in seen:  # counted among the layers that have experts
        for layer, agrees_T in enumerate(seen["agrees"].T):
            values[f"routes_agree_{layer}"] = agrees_T.mean()
        values["routes_agree_all"] = share(seen["agrees"].bool().all(1))
    return {name: value.item() for name, value in values.items()}


def share(true_T) -> torch.Tensor:
    return true_T.double().mean()
