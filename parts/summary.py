"""What one step's sampling cost and showed, as one line of the log."""
from collections import Counter
from statistics import fmean
from typing import Any


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
        kept=len(averages["reward_kept"]),
        rounds_histogram=[rounds[r] for r in range(1, max(rounds, default=0) + 1)],
        spent_by_pass_rate=dict(sorted(spent.items())),
        verdicts=dict(sorted(Counter(s.status for s in pool).items())),
        **{name: fmean(values) for name, values in averages.items() if values},
    )


def first_round_reward(group) -> float:
    return fmean(s.reward for s in group.pool if s.round == 0)


def band(p_hat: float) -> str:
    """Where draws went, by the pass rate of their own pool: none, 0.0 (up to 0.2), ... 0.8, all."""
    if p_hat == 0:
        return "none"
    if p_hat == 1:
        return "all"
    return f"{min(int(p_hat * 5), 4) / 5:.1f}"
