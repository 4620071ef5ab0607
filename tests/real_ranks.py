"""Steps of training with the real engine, for test_ranks.py: `torchrun tests/real_ranks.py OUT`.

An evaluation, and two steps of four mini-batches. OUT/noted.pt has the evaluation's rows, and what
each step has drawn and computed; the first rank writes it.
"""
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes import many_gpus as ranks  # noqa: E402

ranks.join()

import torch  # noqa: E402

import eval  # noqa: E402
import minirl  # noqa: E402
from parts.config import parse  # noqa: E402
from parts.run import prepare, reseed  # noqa: E402
from rewards import Grader  # noqa: E402


def note_gradients(into: list) -> None:
    real = torch.nn.utils.clip_grad_norm_

    def note(weights, most):
        into.append(torch.cat([p.grad.flatten() for p in weights]).clone())
        return real(weights, most)

    torch.nn.utils.clip_grad_norm_ = note


def noted_step(step: int, run, gradients: list) -> dict:
    gradients.clear()
    groups, _ = minirl.train_step(step, run)
    adapter = b"".join(p.detach().numpy().tobytes() for p in run.policy.parameters()
                       if p.requires_grad)
    return dict(
        pools=[[s.rollout.token_ids for s in group.pool] for group in groups],
        kept=[[(s.index, coefficient) for s, coefficient in group.rows()] for group in groups],
        gradients=list(gradients), equal=len(set(ranks.gather(adapter))) == 1)


def main(out: Path) -> None:
    os.chdir(out)
    ranks.replace_functions()
    config = parse(["--eval-questions", "7", "--eval-k", "2", "--mini-batches", "4",
                    "--length-norm", "batch"])
    gradients = []
    note_gradients(gradients)
    with Grader(1) as grader:
        run = prepare(config, grader)
        reseed(0, "evaluation")
        found = dict(evaluation=eval.evaluate(run.engine, grader, run.held_out, 2, 64))
        run.engine.sync(run.policy)
        found["steps"] = [noted_step(step, run, gradients) for step in (1, 2)]
        run.engine.close()
    if ranks.RANK == 0:
        torch.save(found, "noted.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
