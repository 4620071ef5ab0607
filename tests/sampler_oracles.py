"""For the sampler's tests: other ways to drive it. The exact laws of its rules: course/laws.py."""
import random
from unittest import mock

import ada_sampler as ada
from ada_sampler import Collector, Estimator, Sample, SamplerConfig, collect
from course.simulate import Coin
from world import Engine, Grader

ADVANTAGES = ("pool-mean", "leave-one-out", "group-std", "positives-only")
WEIGHTINGS = ("none", "unbiased", "log", "inv_p")
RULES = ("uniform", "dapo", "ada-pos", "ada-balance", "ada-est", "gvm")


def coins(rates):
    return [Coin(f"prompt {i}", p) for i, p in enumerate(rates)]


def mixed(count, seed=0):
    rng = random.Random(seed)
    return coins(rng.choice((0.0, 0.03, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0)) for _ in range(count))


def config(rule="ada-balance", **changes):
    return SamplerConfig(sampler=rule, **changes)


class WithBarrier(Collector):
    """Decides only when no prompt has an unfinished round, as the papers' code does."""

    waiting = frozenset()

    def advance(self, group):
        self.waiting |= {group.index}
        if any(s.rollout is None for group in self.groups for s in group.pool):
            return
        complete, self.waiting = sorted(self.waiting), frozenset()
        for index in complete:
            super().advance(self.groups[index])


class WithoutEarlyOpening(Collector):
    """Opens a prompt's next round only when its last one is complete."""

    def next_round_is_certain(self, group, missing):
        return False


WAYS = (WithBarrier, WithoutEarlyOpening, Collector)


def run(problems, cfg, engine=None, grader=None, way=Collector, **more):
    """collect() with what every rule may need. No draw is asked for twice, no verdict left over."""
    engine, grader = engine or Engine(), grader or Grader()
    spare = dict(estimator=Estimator(), more=lambda: Coin(f"spare {len(engine.asked)}", 0.4))
    with mock.patch.object(ada, "Collector", way):
        groups = collect(problems, cfg, engine, grader, **spare | more)
    assert not grader.open and not engine.busy
    assert len(engine.asked) == sum(map(len, engine.log)) == sum(len(g.pool) for g in groups)
    return groups


def outcomes(groups):
    return [
        (g.problem.id, g.outcome, g.rounds, [s.correct for s in g.pool], [s.index for s in g.kept])
        for g in groups
    ]


def sample(index, correct, reward=None):
    return Sample(index, 0, reward=float(correct) if reward is None else reward, status="",
                  correct=correct)


# effective weights of balance with n=4, M=8, N=4; the number of digits is the precision
WEIGHTS = {
    0.02: dict(none="7.2", inv_p="169", unbiased="1.13", log="23.1"),
    0.05: dict(none="5.9", inv_p="96.7", unbiased="1.21", log="15.6"),
    0.10: dict(none="3.95", inv_p="41.4", unbiased="1.19", log="9.3"),
    0.30: dict(none="1.35", inv_p="5.1", unbiased="0.97", log="3.2"),
    0.50: dict(none="1.00", inv_p="2.2", unbiased="0.91", log="2.0"),
    0.90: dict(none="3.95", inv_p="4.6", unbiased="1.19", log="1.5"),
    0.95: dict(none="5.86", inv_p="6.5", unbiased="1.21", log="1.4"),
}
