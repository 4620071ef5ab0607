"""Applies other sampling rules to recorded answers, for the page of explore.py.

The exit test and the choice of answers are those of ada_sampler.py. The rules that allocate answers
to the prompts of a step are left out, because a log need not hold all prompts of a step.
"""
import math
from dataclasses import fields, replace

from ada_sampler import RULES, Group, Sample, SamplerConfig, exit_test, set_advantages


def add_to(run: dict, sizes: dict) -> None:
    """Add to a run the result of each rule for its prompts. `sizes` may replace its n, M, N.

    run["rule"]      the run's rule, in numbers; None if it cannot be replayed
    run["what_if"]   the sizes; for each rule why ada_sampler.py refuses them, or ""
    group["what_if"] {rule: the result of `replayed`}
    """
    names = {one.name for one in fields(SamplerConfig)} & run["config"].keys()
    recorded = SamplerConfig(**{name: run["config"][name] for name in names})
    other = replace(recorded, **sizes)
    configs = {name: replace(other, sampler=name) for name in RULES}
    configs = {name: config for name, config in configs.items() if not config.rule.allocates}
    refused = {name: refusal(config) for name, config in configs.items()}
    run["rule"] = recorded.rule._asdict() if recorded.sampler in configs else None
    run["what_if"] = dict(sizes=dict(n=other.n, M=other.M, N=other.N), rules=refused)
    for group in run["groups"]:
        fates = {name: replayed(group["pool"], config) for name, config in configs.items()
                 if not refused[name]}
        group["what_if"] = {name: fate for name, fate in fates.items() if fate}


def refusal(config: SamplerConfig) -> str:
    """Why the sampler cannot work with these settings, or ""."""
    try:
        config.validate()
    except ValueError as reason:
        return str(reason)
    return ""


def replayed(pool: list[dict], config: SamplerConfig) -> dict | None:
    """The result for a prompt; None if the rule needs more answers than the pool has.

    `kept` lists places in the pool, `coefficients` the factors of their gradients.
    """
    group = Group(index=0, problem=None)
    while not group.outcome:
        group.rounds += 1
        draws = group.rounds * config.rule.round_size
        if draws > len(pool):
            return None
        group.pool = [as_sample(i, pool[i], config) for i in range(draws)]
        correct = sum(s.correct for s in group.judged)
        wrong = len(group.judged) - correct
        group.outcome = exit_test(correct, wrong, group.rounds, config)
    set_advantages(group, config)
    rows = group.rows()
    return dict(
        outcome=group.outcome, rounds=group.rounds, draws=draws, baseline=group.baseline,
        kept=[sample.index for sample, _ in rows],
        coefficients=[coefficient for _, coefficient in rows])


def as_sample(index: int, logged: dict, config: SamplerConfig) -> Sample:
    """The sample of a log's row, where null stands for the NaN of an answer without a verdict."""
    reward = math.nan if logged["reward"] is None else logged["reward"]
    return Sample(index=index, round=0, reward=reward, correct=reward > config.threshold)
