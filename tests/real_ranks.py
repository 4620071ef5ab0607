"""Steps of training with the real engine, for test_ranks.py: `torchrun tests/real_ranks.py OUT`.

Every variant starts from the same weights and problems and makes two steps. OUT/noted.pt has what
each step has drawn and computed; the first rank writes it. Then an evaluation, whose rows it adds.
"""
import os
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes import many_gpus as ranks  # noqa: E402

ranks.join()

import torch  # noqa: E402

import eval  # noqa: E402
import minirl  # noqa: E402
from ada_sampler import Estimator  # noqa: E402
from parts.config import parse  # noqa: E402
from parts.run import make_optimizer, prepare, reseed  # noqa: E402
from rewards import Grader  # noqa: E402

VARIANTS = dict(balance={}, four=dict(mini_batches=4, length_norm="batch"))


def start_again(run, start: list, settings: dict) -> None:
    run.config = replace(run.config, **settings)
    weights = [p for p in run.policy.parameters() if p.requires_grad]
    for p, value in zip(weights, start):
        p.data.copy_(value)
    run.optimizer, run.schedule = make_optimizer(run.policy, run.config)
    run.stream.cursor, run.estimator = 0, Estimator(run.config)
    run.engine.sync(run.policy)


def note_gradients(into: list) -> None:
    real = torch.nn.utils.clip_grad_norm_

    def note(weights, most):
        into.append(torch.cat([p.grad.flatten() for p in weights]).clone())
        return real(weights, most)

    torch.nn.utils.clip_grad_norm_ = note


def steps(run, count: int, gradients: list) -> list[dict]:
    noted = []
    for step in range(1, count + 1):
        gradients.clear()
        groups, metrics = minirl.train_step(step, run)
        adapter = b"".join(p.detach().numpy().tobytes() for p in run.policy.parameters()
                           if p.requires_grad)
        noted.append(dict(
            pools=[[s.rollout.token_ids for s in group.pool] for group in groups],
            kept=[[(s.index, coefficient) for s, coefficient in group.rows()] for group in groups],
            gradients=list(gradients), equal=len(set(ranks.gather(adapter))) == 1,
            metrics={key: value for key, value in metrics.items() if "second" not in key}))
    return noted


def main(out: Path) -> None:
    os.chdir(out)
    ranks.replace_functions()
    config = parse(["--eval-questions", "7", "--eval-k", "2"])
    gradients, found = [], {}
    note_gradients(gradients)
    with Grader(1) as grader:
        run = prepare(config, grader)
        plain = run.config
        start = [p.detach().clone() for p in run.policy.parameters() if p.requires_grad]
        for name, settings in VARIANTS.items():
            run.config = plain
            start_again(run, start, settings)
            found[name] = steps(run, 2, gradients)
        start_again(run, start, {})
        reseed(0, "evaluation")
        found["evaluation"] = eval.evaluate(run.engine, grader, run.held_out, 2, 64)
        run.engine.close()
    if ranks.RANK == 0:
        torch.save(found, "noted.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
