"""Shows the sampler in another training loop, without a model and without torch.

    python examples/own_loop.py

A problem is a pass rate here, and an answer is right with that probability. `examples/README.md`
says what an engine and a grader have to do.
"""
import random
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # not needed once it is installed

from ada_sampler import SamplerConfig, collect, set_advantages  # noqa: E402


class Engine:  # it decides at random whether an answer is right
    asked = []
    busy = property(lambda self: bool(self.asked))

    def submit(self, key, problem):
        self.asked.append((key, problem))

    def step(self):
        done, self.asked = self.asked, []
        return [(key, SimpleNamespace(token_ids=[random.random() < p])) for key, p in done]


class Grader(dict):
    def submit(self, key, problem, rollout):
        self[key] = SimpleNamespace(reward=float(rollout.token_ids[0]), status="judged")

    result = dict.pop


config = SamplerConfig(sampler="ada-balance", n=4, M=8, N=4)
for group in collect([0.05, 0.5, 0.95], config, Engine(), Grader()):
    set_advantages(group, config)  # keeps n answers; reward - mean of the whole pool
    print(f"p = {group.problem}: {len(group.pool)} answers, {group.outcome}, "
          f"baseline {group.baseline:.2f}")
    for sample, coefficient in group.rows():  # n of them; coefficient = advantage * weight
        pass  # loss -= coefficient * log_prob(sample.rollout)
