"""float16: small gradients survive, large ones cost one step, a resumed run knows its scale."""
import math
from types import SimpleNamespace

import pytest
import torch

import minirl
from helpers import lines, run_program
from minirl import Config
from parts import folder as folders
from parts.folder import append
from parts.logprobs import Row
from parts.metrics import why_broken
from parts.policy import START_SCALE
from parts.run import make_optimizer
from test_policy import small_policy

REAL = dict(max_tokens=3000, micro_tokens=4096)
START = dict(dtype="float16")


def rows(count=8, seed=0, responses=128):
    torch.manual_seed(seed)
    ids = [torch.randint(300, (30,)).tolist() for _ in range(count)]
    scale = 1 / (responses * 3000)  # a token's share of the loss is as small as in a real run
    return [Row(x, 10, [-6.0] * 20, (-0.5, 0.5)[i % 2], scale) for i, x in enumerate(ids)]


def gradient(policy, batch):
    """As the optimizer gets it, in float64, all weights in one vector."""
    policy.zero_grad()
    minirl.accumulate(policy, batch, Config(**REAL))
    weights = [p for p in policy.parameters() if p.requires_grad]
    policy.loss_scale.unscale_(torch.optim.SGD(weights))
    return torch.cat([p.grad.double().flatten() for p in weights])


def test_the_gradient_is_that_of_float32_and_without_a_scale_it_is_lost(tmp_path):
    wanted = gradient(small_policy(tmp_path), rows())
    policy = small_policy(tmp_path, **START)

    def error():
        return ((gradient(policy, rows()) - wanted).norm() / wanted.norm()).item()

    assert error() < 0.01
    policy.loss_scale = torch.amp.GradScaler("cpu", init_scale=1.0)
    assert error() > 0.3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_precisions_have_no_scale(tmp_path, dtype):
    policy = small_policy(tmp_path, dtype=dtype)
    assert not policy.loss_scale.is_enabled() and policy.loss_scale.get_scale() == 1
    assert policy.loss_scale.state_dict() == {}


def one_step(policy, optimizer, schedule, seed=0):
    config = Config(**REAL)
    loss = minirl.accumulate(policy, rows(seed=seed), config)
    return loss, minirl.optimizer_step(policy, optimizer, schedule, config)


def weights_of(policy):
    return [p.detach().clone() for p in policy.parameters() if p.requires_grad]


def said_of_steps(folder, policy, loss):
    """What ends a run after each of three steps with a skipped gradient."""
    said, run = [], SimpleNamespace(folder=folder, policy=policy)
    for step in (1, 2, 3):
        metrics = dict(step=step, loss=loss, skipped_steps=1)
        append(folder / "metrics.jsonl", metrics)
        said.append(why_broken(step, metrics, run))
    return said


@pytest.mark.slow
def test_an_overflow_skips_one_step_lowers_the_scale_and_changes_nothing_else(tmp_path, capsys):
    policy = small_policy(tmp_path, **START)
    optimizer, schedule = make_optimizer(policy, Config(lr=1e-3))
    policy.loss_scale._init_scale = 2.0**40
    before = weights_of(policy)
    loss, norm = one_step(policy, optimizer, schedule)
    assert not math.isfinite(norm) and math.isfinite(loss)
    assert all(map(torch.equal, before, weights_of(policy)))
    assert not optimizer.state and schedule.last_epoch == 0
    assert policy.loss_scale.get_scale() == 2.0**39
    assert not any(said_of_steps(tmp_path, policy, loss))  # it is no broken run
    assert "too large for float16" in capsys.readouterr().out
    while not math.isfinite(norm):
        _, norm = one_step(policy, optimizer, schedule)
    assert 1 < policy.loss_scale.get_scale() < 2.0**39 and schedule.last_epoch == 1
    assert not any(map(torch.equal, before, weights_of(policy)))


@pytest.mark.parametrize("scale, loss", [(0.5, 1.0), (START_SCALE, math.nan)])
def test_what_no_scale_can_mend_is_a_broken_run(tmp_path, scale, loss):
    """Gradients that overflow even undiminished, and a loss that is no number itself."""
    policy = SimpleNamespace(loss_scale=torch.amp.GradScaler("cpu", init_scale=scale))
    said = said_of_steps(tmp_path, policy, loss)
    assert said[:2] == ["", ""]
    assert "3 steps in a row" in said[2] and "another --dtype" in said[2]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_scale_bit_by_bit(tmp_path):
    """The checkpoint lies between an overflow and the step at which the scale grows again."""
    config = Config(lr=1e-3, warmup_steps=2)

    def fresh():
        policy = small_policy(tmp_path / "model", **START)
        policy.loss_scale = torch.amp.GradScaler(
            "cpu", init_scale=2.0**40, backoff_factor=2.0**-18, growth_interval=4)
        return policy, *make_optimizer(policy, config)

    straight = fresh()
    found = [one_step(*straight, seed=step)[1] for step in range(4)]
    saved = folders.save(tmp_path, *straight, dict(step=4))
    found += [one_step(*straight, seed=step)[1] for step in range(4, 7)]
    resumed = fresh()
    folders.restore(saved, *resumed)
    assert [one_step(*resumed, seed=step)[1] for step in range(4, 7)] == found[4:]
    assert all(map(torch.equal, weights_of(straight[0]), weights_of(resumed[0])))
    assert straight[0].loss_scale.state_dict() == resumed[0].loss_scale.state_dict()
    assert not math.isfinite(found[0]) and all(map(math.isfinite, found[1:]))
    assert resumed[0].loss_scale.get_scale() == 2.0**23  # it did grow


# ----------------------------------------------------------------------------- the real engine
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    ["--dtype", "float16", "--sync", "adapter", "--kv-cache-dtype", "fp8"],
    ["--dtype", "float16", "--model", "tiny-moe", "--replay", "r3"]])
def test_it_trains_with_every_way_to_the_engine(flags, tmp_path):
    """minirl.py itself, and its probe judges every sync."""
    done = run_program("minirl.py", *flags, "--name", "run", "--batch-prompts", 6,
                       "--eval-questions", 8, "--eval-k", 1, "--warmup-steps", 1, "--steps", 2,
                       cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    steps = lines(tmp_path / "runs/run/metrics.jsonl")
    assert [(row["optimizer_steps"], row["skipped_steps"]) for row in steps] == [(1, 0)] * 2
    limit = 1e-2 if "fp8" in flags else 1e-3
    assert max(row["kl_k3"] for row in steps) < limit
