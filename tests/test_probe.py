"""The probe sees weights that arrive in part or late, and lets sound runs pass."""
import contextlib
import copy
import math
import random
from types import SimpleNamespace

import pytest
import torch

import models_small
from engines import random_ids
from models_small import move, second, trained_weights
from parts.logprobs import Row, token_logprobs
from parts.probe import LONGEST, TEXTS, TRIAL, Probe, limits, slope

EXACT = limits("float32", "float32", "auto", mixture=False)
HALF = limits("bfloat16", "bfloat16", "auto", mixture=False)
EIGHT = limits("bfloat16", "bfloat16", "fp8", mixture=False)
MANY = [8] * 24  # prompts, of so many tokens
BREAKS = ("layer 0", "layer 1", "layer 2", "half of the layers", "half of the change",
          "the step before")


# --------------------------------------------------------------------------------- how it is broken
def broken(policy, how: str, before: dict):
    """A copy of the policy as it would arrive in a sync that is broken like this."""
    other = copy.deepcopy(policy)
    for name, p in second(other).items():
        layer = int(name.split("layers.")[1].split(".")[0])
        if how == f"layer {layer}" or (how == "half of the layers" and layer % 2 == 0):
            p.data.zero_()
        elif how == "half of the change":
            p.data.mul_(0.5)
        elif how == "the step before":
            p.data.copy_(before[name])
    return other


def small_policy():
    """Of three layers, as a run begins."""
    return models_small.policy(moved=0, rank=8, num_hidden_layers=3)


def logprobs_of(policy, rows: list[Row], temperature=1.0) -> list[list[float]]:
    """Of the responses, row by row."""
    with torch.no_grad():
        found = token_logprobs(policy, rows, temperature)[0]
    return [x.tolist() for x in found.split([row.length for row in rows])]


class NoisyEngine:
    """An engine that is a copy of the policy, with Gaussian noise on its log-probs: any noise, no
    vLLM. It starts with the base weights. `how` its syncs are broken; `temperature` of sampling.
    """

    def __init__(self, policy, noise=0.0, temperature=1.0):
        self.held, self.noise, self.how = copy.deepcopy(policy), noise, ""
        self.temperature, self.rng = temperature, random.Random(0)
        self.before = trained_weights(policy)
        for p in second(self.held).values():
            p.data.zero_()

    def sync(self, policy):
        self.held = broken(policy, self.how, self.before)
        self.before = trained_weights(policy)

    def generate(self, prompts, n, max_tokens):
        rows = [Row(ids + [self.rng.randrange(300) for _ in range(max_tokens)], len(ids), [], 0.0)
                for ids in prompts]
        mu = logprobs_of(self.held, rows, self.temperature)
        return [[SimpleNamespace(token_ids=row.ids[row.prompt_length:], logprobs=x)]
                for row, x in zip(rows, mu)]

    def prompt_logprobs(self, sequences):
        found = logprobs_of(self.held, [Row(ids, 1, [], 0.0) for ids in sequences])
        return [[x + self.rng.gauss(0, self.noise) for x in own] for own in found]


def probed(engine, policy, bounds=EXACT, prompts=[8] * 4, made=Probe, **options) -> Probe:
    """A probe with prompts of such lengths."""
    problems = [SimpleNamespace(prompt_ids=random_ids(length, seed=i))
                for i, length in enumerate(prompts)]
    return made(engine, policy, problems, limits=bounds, **dict(max_tokens=12) | options)


def bare(bounds=HALF, noise: float = 0.0, tokens: int = 500) -> Probe:
    """Without engine and policy, whose base weights give such log-probs: 0 and `noise`."""
    probe = object.__new__(Probe)
    probe.gap, probe.rest = bounds
    probe.start = torch.zeros(tokens), torch.full((tokens,), noise)
    return probe


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------ the statistic
def test_the_slope_is_unbiased_and_its_error_is_honest():
    """Over many tries the slope is off by two errors in about one of twenty."""
    generator = torch.Generator().manual_seed(0)
    tries = []
    for _ in range(400):
        x = torch.randn(200, generator=generator) * torch.rand(200, generator=generator)
        y = 0.7 * x + 0.5 * x.abs() * torch.randn(200, generator=generator)
        tries.append(slope(x, y))
    b, error = torch.tensor(tries).T
    assert abs(b.mean() - 0.7) < 0.01 and 0.8 < error.mean() / b.std() < 1.3
    assert 5 <= ((b - 0.7).abs() > 2 * error).sum() <= 40


def test_a_single_token_does_not_decide():
    """A tie between two experts that falls the other way; and least squares would say 0.75."""
    x = torch.full((100,), 0.1)
    x[7] = 1.0
    y = x.clone()
    y[7] = 0.5
    assert (x * y).sum() / (x * x).sum() < 0.76
    assert slope(x, y)[0] == pytest.approx(1, abs=0.08)


# ---------------------------------------------------------------------------------------- no engine
@pytest.mark.slow
@pytest.mark.parametrize("how, noise, bounds", [
    *((how, 0.01, HALF) for how in BREAKS), ("layer 2", 1e-6, EXACT),
    ("half of the change", 1e-6, EXACT), ("half of the change", 0.04, EIGHT)])
def test_a_trial_adapter_shows_what_never_arrives(how, noise, bounds):
    policy = small_policy()
    engine = NoisyEngine(policy, noise)
    probed(engine, policy, bounds, MANY).check()
    for held in (policy, engine.held):
        assert not any(p.any() for p in second(held).values())  # as before the trial
    engine.how = how
    with pytest.raises(SystemExit, match="do not hold the same policy.*other --sync"):
        probed(engine, policy, bounds, MANY)


@pytest.mark.parametrize("how", [
    "layer 0", "half of the change", pytest.param("half of the layers", marks=pytest.mark.slow)])
def test_what_breaks_later_is_seen_within_three_steps(how):
    """With noise a quarter of a step."""
    policy = small_policy()
    engine = NoisyEngine(policy, noise=0.01)
    probe = probed(engine, policy, HALF, MANY)
    for step in range(6):
        move(policy, 3e-3, step)
        engine.sync(policy)
        found = probe.check()
    assert abs(found["probe_slope"] - 1) < 0.05
    engine.how = how
    with pytest.raises(SystemExit, match=r"changed by 0.\d\d \+- 0.\d\d times"):
        for step in range(6, 9):
            move(policy, 3e-3, step)
            engine.sync(policy)
            probe.check()


def test_the_trial_moves_the_trainer_far_and_not_out_of_reach(monkeypatch):
    policy, moved = small_policy(), []
    engine = NoisyEngine(policy)
    true = Probe.compare
    monkeypatch.setattr(Probe, "compare", lambda *given: moved.append(
        true(*given)["probe_moved"]) or dict(probe_gap_max=0))
    probed(engine, policy)
    assert moved[0] == 0 and TRIAL <= moved[1] < 3 * TRIAL


def test_responses_are_compared_token_by_token_whatever_their_order():
    """The trainer computes them by length, some rows at a time."""
    policy, lengths = small_policy(), [30, 4, 17, 9] * 3
    probe = probed(NoisyEngine(policy), policy, prompts=lengths, max_tokens=99)
    assert sorted(row.prompt_length for row in probe.rows) == sorted(lengths[:TEXTS])
    assert {row.length for row in probe.rows} == {LONGEST}
    assert len(probe.trainer()) == TEXTS * LONGEST
    torch.testing.assert_close(probe.of_engine(), probe.trainer(), atol=1e-5, rtol=0)


def test_log_probs_of_sampling_are_compared_at_the_temperature_of_sampling():
    policy = small_policy()
    probed(NoisyEngine(policy, temperature=0.7), policy, temperature=0.7).check()  # a prefill's: 1
    with pytest.raises(SystemExit, match="do not hold the same policy"):
        probed(NoisyEngine(policy, temperature=0.7), policy)


def test_no_update_is_no_alarm_and_a_sync_that_does_nothing_is_one():
    policy = small_policy()
    engine = NoisyEngine(policy)
    probe = probed(engine, policy)
    found = probe.check()
    assert found["probe_moved"] == 0 and math.isnan(found["probe_slope"])
    for step in range(2):
        move(policy, 4e-3, seed=step)
        with pytest.raises(SystemExit):
            probe.check()
        engine.sync(policy)
        found = probe.check()
    assert found["probe_moved"] > 0.01 and found["probe_slope"] == pytest.approx(1, abs=1e-3)


# ------------------------------------------------------------------------------ what is judged
@pytest.mark.parametrize("bounds", [EXACT, HALF, EIGHT])
def test_a_number_that_is_none_ends_the_run(bounds):
    """NaN is not smaller than a limit, and not larger either."""
    good, bad = torch.zeros(3), torch.tensor([0.0, math.nan, 0.0])
    for mine_T, theirs_T in ((bad, good), (good, bad), (bad, bad)):
        with pytest.raises(SystemExit, match="is nan on average .*weights are damaged"):
            bare(bounds, tokens=3).compare(mine_T, theirs_T)


@pytest.mark.parametrize("bounds, noise, mine, theirs, sound", [
    (EXACT, 0, 1e-6, 0, True),  # the last digits are no change
    (EXACT, 0, 1e-3, 0, False), (HALF, 1e-3, 1e-3, 0, True),  # what noise hides is not judged
    (HALF, 1e-3, 3e-3, 0, False), (HALF, 1e-3, 0.1, 0.094, True), (HALF, 1e-3, 0.1, 0.08, False),
    (HALF, 1e-3, 0.1, 0.12, False),
    (EIGHT, 1e-3, 0.5, 0.93 * 0.5, True)])  # a sound mixture behind an fp8 cache had 0.93
def test_a_change_is_judged_by_its_slope(bounds, noise, mine, theirs, sound):
    x = normal(500)
    with contextlib.nullcontext() if sound else pytest.raises(SystemExit, match="changed by"):
        found = bare(bounds, noise).compare(mine * x, theirs * x + noise)
        assert found["probe_moved"] == pytest.approx(mine, rel=0.1)
        assert found["probe_gap_max"] == pytest.approx(
            ((mine - theirs) * x - noise).abs().max().item(), rel=1e-3)
        slopes = [found["probe_slope"]] if mine > 2 * max(noise, 1e-5) else []
        assert slopes in ([], [pytest.approx(theirs / mine, abs=1e-3)])


def test_noise_on_both_sides_is_no_alarm_whatever_the_change():
    """Noise in x makes the slope smaller: a change as small as its noise has 0.5 or less."""
    generator = torch.Generator().manual_seed(0)
    for change in (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3):
        for _ in range(50):
            noise = 0.02 * torch.randn((4, 500), generator=generator)
            x, probe = change * torch.randn(500, generator=generator), bare()
            probe.start = noise[0], noise[1]
            probe.compare(x + noise[2], x + noise[3])


def test_the_trials_rest_is_judged_beside_the_noise():
    x = normal(500)
    for missing, noise, sound in ((0.15, 0, True), (0.3, 0, False), (0.3, 0.1, True)):
        part = (torch.arange(500) % 2 * 2 - 1) * missing * x  # the slope stays 1
        with contextlib.nullcontext() if sound else pytest.raises(SystemExit, match="do not hold"):
            bare((9, 0.2), noise).compare(x, x + part + noise, largest_rest=0.2)


def test_limits_are_as_loose_as_the_precisions_and_no_looser():
    assert EXACT[0] <= 1e-4
    assert limits("float32", "float32", "auto", mixture=True) == HALF  # experts may be tied
    assert limits("float32", "bfloat16", "auto", mixture=False) == HALF
    for engine_dtype, cache in (("fp8", "auto"), ("float32", "fp8"), ("bfloat16", "fp8")):
        assert limits("float32", engine_dtype, cache, mixture=False) == EIGHT
    assert all(a < b < c for a, b, c in zip(EXACT, HALF, EIGHT))
