"""What another sampling rule would have made of recorded draws, for the page of explore.py.

ada_sampler.py itself is asked: it gets the same answers in the same order. A rule that wants more
draws than were recorded is unknown. The rules that share out a step's draws among its prompts are
left out, for a log need not hold all prompts of a step.
"""
from dataclasses import fields, replace
from types import SimpleNamespace

from ada_sampler import RULES, Collector, SamplerConfig, fill_missing, set_advantages
from parts.grader import NO_VERDICT
from parts.plot import is_number


class PoolEnds(Exception):
    """The rule wants more draws than were recorded."""


class Replay:
    """Stands in for the engine and the grader: its answers are those of a recorded pool."""

    def __init__(self, pool: list[dict]):
        self.pool, self.queue = pool, []

    @property
    def busy(self) -> bool:
        return bool(self.queue)

    def submit(self, key, problem, rollout=None) -> None:
        """Of the engine: one more draw. Of the grader (with a rollout): its verdict is known."""
        if rollout is None and key[1] >= len(self.pool):
            raise PoolEnds
        if rollout is None:
            self.queue.append((key, SimpleNamespace(token_ids=())))

    def step(self) -> list[tuple]:
        finished, self.queue = self.queue, []
        return finished

    def result(self, key) -> SimpleNamespace:
        sample = self.pool[key[1]]
        status, reward = sample.get("status"), sample.get("reward")
        failed = status is None or status in NO_VERDICT or not is_number(reward)
        return SimpleNamespace(reward=float("nan") if failed else reward, status=str(status))


def replayed(pool: list[dict], config: SamplerConfig) -> dict | None:
    """A prompt's fate under these settings; None if its pool ends before.

    `kept` lists places in the pool, `coefficients` what their gradients would be multiplied by.
    """
    replay = Replay(pool)
    collector = Collector(config, replay, replay)
    try:
        collector.add(None, config.rule.round_size)
        collector.drive()
    except PoolEnds:
        return None
    (group,) = collector.groups
    for s, reward in zip(group.pool, fill_missing([s.reward for s in group.pool])):
        s.reward = reward
    set_advantages(group, config)
    rows = group.rows()
    return dict(
        outcome=group.outcome, rounds=group.rounds, draws=len(group.pool),
        baseline=group.baseline, kept=[sample.index for sample, _ in rows],
        coefficients=[coefficient for _, coefficient in rows])


def sampler_settings(config: dict) -> SamplerConfig:
    """Those of a run's settings that are the sampler's. What is missing or damaged: the default."""
    return SamplerConfig(**{one.name: config[one.name] for one in fields(SamplerConfig)
                            if type(config.get(one.name)) is type(one.default)})


def add_to(run: dict, sizes: dict | None = None) -> None:
    """Add to a run of the page the fates of its prompts under each rule, with other n, M, N on
    request.

    run["rule"]      the run's own rule, in numbers; None if it cannot be replayed
    run["what_if"]   the sizes; of each rule why ada_sampler.py refuses them, or ""
    group["what_if"] {rule: its fate}
    """
    own = sampler_settings(run["config"])
    rules = [name for name in RULES if not replace(own, sampler=name).rule.allocates]
    run["rule"] = own.rule._asdict() if own.sampler in rules else None
    sizes = {size: getattr(own, size) for size in ("n", "M", "N")} | (sizes or {})
    configs = {name: sampler_settings(run["config"] | sizes | dict(sampler=name)) for name in rules}
    refused = {name: refusal(config) for name, config in configs.items()}
    run["what_if"] = dict(sizes=sizes, rules=refused)
    for group in run["groups"]:
        fates = {name: replayed(group["pool"], config) for name, config in configs.items()
                 if not refused[name]}
        group["what_if"] = {name: fate for name, fate in fates.items() if fate}


def refusal(config: SamplerConfig) -> str:
    try:
        config.validate()
    except ValueError as reason:
        return str(reason)
    return ""
