"""float16: small gradients survive, large ones cost one step, a resumed run knows its scale."""
import math
from types import SimpleNamespace

import pytest
import torch

import minirl
from minirl import Config
from models_small import policy, trained_weights
from parts import folder as folders
from parts.folder import append
from parts.logprobs import Row
from parts.metrics import why_broken
from parts.policy import START_SCALE
from parts.run import make_optimizer

REAL = dict(max_tokens=3000, micro_tokens=4096)


def rows(count=8, seed=0, responses=128):
    torch.manual_seed(seed)
    ids = [torch.randint(300, (30,)).tolist() for _ in range(count)]
    scale = 1 / (responses * 3000)  # a token's share of the loss is as small as in a real run
    return [Row(x, 10, [-6.0] * 20, (-0.5, 0.5)[i % 2], scale) for i, x in enumerate(ids)]


def gradient(trained):
    """As the optimizer gets it, in float64, all weights in one vector."""
    trained.zero_grad()
    minirl.accumulate(trained, rows(), Config(**REAL))
    weights = [p for p in trained.parameters() if p.requires_grad]
    trained.loss_scale.unscale_(torch.optim.SGD(weights))
    return torch.cat([p.grad.double().flatten() for p in weights])


def test_the_gradient_is_that_of_float32_and_without_a_scale_it_is_lost():
    wanted, trained = gradient(policy()), policy(dtype="float16")
    for scale, (least, most) in ((trained.loss_scale, (0, 0.01)),
                                 (torch.amp.GradScaler("cpu", init_scale=1.0), (0.3, 2))):
        trained.loss_scale = scale
        error = (gradient(trained) - wanted).norm() / wanted.norm()
        assert least < error < most


def test_clipping_and_the_optimizer_get_the_gradient_without_its_scale():
    trained = policy(dtype="float16")
    wanted = gradient(trained).norm().item()
    trained.zero_grad()
    _, norm = one_step(trained, *make_optimizer(trained, Config()))
    assert norm == pytest.approx(wanted, rel=1e-3)
    assert trained.loss_scale.state_dict()["_growth_tracker"] == 1  # it counts sound steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_precisions_have_no_scale(dtype):
    scale = policy(dtype=dtype).loss_scale
    assert (scale.is_enabled(), scale.get_scale(), scale.state_dict()) == (False, 1, {})


def one_step(policy, optimizer, schedule, seed=0):
    config = Config(**REAL)
    loss = minirl.accumulate(policy, rows(seed=seed), config)
    return loss, minirl.optimizer_step(policy, optimizer, schedule, config)


def equal(before: dict, after: dict) -> list[bool]:
    return [torch.equal(before[name], after[name]) for name in before]


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
    trained = policy(dtype="float16")
    optimizer, schedule = make_optimizer(trained, Config(lr=1e-3))
    trained.loss_scale._init_scale = 2.0**40
    before = trained_weights(trained)
    loss, norm = one_step(trained, optimizer, schedule)
    assert not math.isfinite(norm) and math.isfinite(loss)
    assert all(equal(before, trained_weights(trained)))
    assert not optimizer.state and schedule.last_epoch == 0
    assert trained.loss_scale.get_scale() == 2.0**39
    assert not any(said_of_steps(tmp_path, trained, loss))  # it is no broken run
    assert "too large for float16" in capsys.readouterr().out
    while not math.isfinite(norm):
        _, norm = one_step(trained, optimizer, schedule)
    assert 1 < trained.loss_scale.get_scale() < 2.0**39 and schedule.last_epoch == 1
    assert not any(equal(before, trained_weights(trained)))


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
        trained = policy(dtype="float16")
        trained.loss_scale = torch.amp.GradScaler(
            "cpu", init_scale=2.0**40, backoff_factor=2.0**-18, growth_interval=4)
        return trained, *make_optimizer(trained, config)

    straight = fresh()
    found = [one_step(*straight, seed=step)[1] for step in range(4)]
    saved = folders.save(tmp_path, *straight, dict(step=4))
    found += [one_step(*straight, seed=step)[1] for step in range(4, 7)]
    resumed = fresh()
    folders.restore(saved, *resumed)
    assert [one_step(*resumed, seed=step)[1] for step in range(4, 7)] == found[4:]
    assert all(equal(trained_weights(straight[0]), trained_weights(resumed[0])))
    assert straight[0].loss_scale.state_dict() == resumed[0].loss_scale.state_dict()
    assert not math.isfinite(found[0]) and all(map(math.isfinite, found[1:]))
    assert resumed[0].loss_scale.get_scale() == 2.0**23  # it did grow
