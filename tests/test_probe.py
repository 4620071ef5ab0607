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
from parts import probe as probe_module
from parts.logprobs import Sequence, token_logprobs
from parts.probe import Limits, Probe, limits, slope

EXACT = limits("float32", "float32", "auto", mixture=False)
HALF = limits("bfloat16", "bfloat16", "auto", mixture=False)
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


def logprobs_of(policy, rows: list[Sequence], temperature=1.0) -> list[list[float]]:
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
        rows = [Sequence(ids + [self.rng.randrange(300) for _ in range(max_tokens)], len(ids))
                for ids in prompts]
        mu = logprobs_of(self.held, rows, self.temperature)
        return [[SimpleNamespace(token_ids=row.ids[row.prompt_length:], logprobs=x)]
                for row, x in zip(rows, mu)]

    def prompt_logprobs(self, sequences):
        found = logprobs_of(self.held, [Sequence(ids, 1) for ids in sequences])
        return [[x + self.rng.gauss(0, self.noise) for x in own] for own in found]


def probed(engine, policy, bounds=EXACT, prompts=[8] * 4, **options) -> Probe:
    """A probe with prompts of such lengths."""
    problems = [SimpleNamespace(prompt_ids=random_ids(length, seed=i))
                for i, length in enumerate(prompts)]
    return Probe(engine, policy, problems, limits=bounds, **dict(max_tokens=12) | options)


def bare(bounds: Limits, noise: float = 0.0, tokens: int = 500) -> Probe:
    """Without engine and policy, whose base weights give such log-probs: 0 and `noise`."""
    probe = object.__new__(Probe)
    probe.limits = bounds
    probe.begin(torch.zeros(tokens), torch.full((tokens,), noise))
    return probe


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------ the statistic
def test_the_slope_is_unbiased_and_its_error_is_honest():
    """Over many draws the slope is off by two errors in about one of twenty."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(400):
        x = torch.randn(200, generator=generator) * torch.rand(200, generator=generator)
        y = 0.7 * x + 0.5 * x.abs() * torch.randn(200, generator=generator)
        found.append(slope(x, y))
    b, error = torch.tensor(found).T
    assert abs(b.mean() - 0.7) < 0.01 and 0.8 < error.mean() / b.std() < 1.3
    assert 5 <= ((b - 0.7).abs() > 2 * error).sum() <= 40


def test_a_single_token_does_not_decide():
    """A tie between two experts that falls the other way: all else says 1, so no alarm. And where
    the token that changed most is followed by half, least squares would say 0.75 for all of them.
    """
    x = torch.full((100,), 0.02)
    y = x.clone()
    y[7] = 1.3
    b, error = slope(x, y)
    assert abs(b - 1) < 4 * error
    x = torch.full((100,), 0.1)
    x[7] = 1.0
    y = x.clone()
    y[7] = 0.5
    assert (x * y).sum() / (x * x).sum() < 0.76
    assert slope(x, y)[0] == pytest.approx(1, abs=0.08)


def test_a_tokens_residual_is_from_a_fit_without_it():
    """Where few tokens changed, each one draws the fit towards itself."""
    x, y = torch.tensor([0.1, 0.1, 0.1, 0.2]), torch.tensor([0.1, 0.1, 0.1, 0.0])
    w = x.clamp(max=x.square().mean().sqrt())
    others = [torch.arange(4) != t for t in range(4)]
    fits = torch.stack([(w[at] * y[at]).sum() / (w[at] * x[at]).sum() for at in others])
    wanted = (w * (y - fits * x)).square().sum().sqrt() / (w * x).sum()
    assert slope(x, y)[1] == pytest.approx(wanted.item())


# ---------------------------------------------------------------------------------------- no engine
@pytest.mark.slow
@pytest.mark.parametrize("how, noise, bounds, words", [
    *((how, 0.01, HALF, "weights reach it in part only") for how in BREAKS[:5]),
    *((how, 1e-6, EXACT, "in part only") for how in ("layer 2", "half of the change")),
    # as with a cache in 8 bits: noise hides it from the rest, whose limit is above everything then
    *((f"layer {i}", 0.05, Limits("mean", 1.0, 0.9), rf"in doubt: \[.*{i}.*\]") for i in range(3))])
def test_the_rehearsal_sees_what_never_arrives(how, noise, bounds, words):
    policy = small_policy()
    engine, kept = NoisyEngine(policy, noise), trained_weights(policy)
    probe = probed(engine, policy, bounds, MANY)
    found = probe.rehearsed
    assert 0.3 < found["moved"] < 2 and abs(found["slope"] - 1) < 0.05 and not found["lost"]
    assert all(abs(b - 1) < 4 * error + 0.01 and error < 0.3
               for b, error in found["layers"].values())
    probe.check()
    engine.how = how
    with pytest.raises(SystemExit, match=words):
        probed(engine, policy, bounds, MANY)
    assert all(torch.equal(p, kept[name]) for name, p in second(policy).items())  # as it was


@pytest.mark.parametrize("how", [
    "layer 0", "half of the change", "the step before",
    pytest.param("half of the layers", marks=pytest.mark.slow)])
def test_what_breaks_later_is_seen_within_three_steps(how):
    """With noise a quarter of a step."""
    policy = small_policy()
    engine = NoisyEngine(policy, noise=0.01)
    probe = probed(engine, policy, HALF, MANY)
    for step in range(6):
        move(policy, 3e-3, step)
        engine.sync(policy)
        found = probe.check()
    assert abs(found["probe_slope"] - 1) < 0.05 and abs(found["probe_slope_last"] - 1) < 0.3
    engine.how = how
    with pytest.raises(SystemExit, match="in part or late"):
        for step in range(6, 9):
            move(policy, 3e-3, step)
            engine.sync(policy)
            probe.check()


@pytest.mark.parametrize("b, error, lost", [
    (1.0, 0.0, False), (0.81, 0.0, False), (0.79, 0.0, True), (1.21, 0.0, True), (0.0, 0.29, True),
    (-2.0, 0.29, True), (-2.0, 0.31, False)])  # the last one's noise hides whatever has arrived
def test_a_layer_is_lost_where_its_slope_is_clearly_not_one(monkeypatch, b, error, lost):
    monkeypatch.setattr(probe_module, "slope", lambda *_: (b, error))
    found = bare(EXACT, tokens=3).parts(torch.ones(3), {7: torch.zeros(3)}, torch.ones(3))
    assert found["lost"] == [7] * lost and found["limit"] == pytest.approx(EXACT.rest)  # no noise


@pytest.mark.parametrize("bounds", [EXACT, HALF, Limits("median", 1.0, 0.5)])
def test_a_number_that_is_none_ends_the_run(bounds):
    """NaN is not smaller than a limit, and not larger either."""
    policy = small_policy()
    engine = NoisyEngine(policy)
    probe = probed(engine, policy, bounds)
    for p in second(policy).values():
        p.data.fill_(math.nan)
    engine.sync(policy)
    with pytest.raises(SystemExit):
        probe.check()
    bad, good = torch.tensor([0.0, math.nan, 0.0]), torch.zeros(3)
    for theirs_T, mine_T in ((bad, good), (good, bad)):
        with pytest.raises(SystemExit, match="disagree.*weights are damaged"):
            probe.require_close(theirs_T, mine_T)


def test_responses_are_compared_in_the_order_of_the_texts_and_long_ones_do_not_pile_up(monkeypatch):
    """The trainer computes them by length, some rows at a time. One text always, however long."""
    policy, lengths = small_policy(), [30, 4, 17, 9]
    monkeypatch.setattr(probe_module, "AT_ONCE", 45)
    for most, kept in ((50, 2), (10, 1), (4096, 4)):
        monkeypatch.setattr(probe_module, "MOST_TOKENS", most)
        probe = probed(NoisyEngine(policy), policy, prompts=lengths, max_tokens=8)
        assert [row.prompt_length for row in probe.rows] == lengths[:kept]
        assert len(probe.trainer()) == kept * 8
        torch.testing.assert_close(probe.of_engine(), probe.trainer(), atol=1e-5, rtol=0)
    engine = NoisyEngine(policy)
    probe = probed(engine, policy, prompts=lengths, max_tokens=99)
    assert {row.length for row in probe.rows} == {probe_module.LONGEST}
    monkeypatch.setattr(probe_module, "ON_CPU", 40)  # a deep model's layers: by the first texts
    probe.tokens = probe_module.ON_CPU
    assert {len(lp_T) for lp_T in probe.without_each_layer().values()} == {2 * probe_module.LONGEST}
    engine.how = "layer 1"
    with pytest.raises(SystemExit, match=r"in doubt: \[1\]"):
        probe.rehearse()


def test_log_probs_of_sampling_are_compared_at_the_temperature_of_sampling():
    policy = small_policy()
    probed(NoisyEngine(policy, temperature=0.7), policy, temperature=0.7).check()  # a prefill's: 1
    with pytest.raises(SystemExit, match="disagree"):
        probed(NoisyEngine(policy, temperature=0.7), policy)


def test_a_resumed_policy_is_compared_with_the_base_weights_and_then_with_its_own():
    policy = small_policy()
    move(policy, 0.02, seed=3)
    engine = NoisyEngine(policy)
    probe = probed(engine, policy)
    assert all(torch.equal(p, second(policy)[name]) for name, p in second(engine.held).items())
    found = probe.check()
    assert found["probe_moved"] > 0.01 and abs(found["probe_slope"] - 1) < 1e-3


def test_no_update_is_no_alarm_and_a_sync_that_does_nothing_is_called_by_its_name():
    """Also after others that did."""
    policy = small_policy()
    engine = NoisyEngine(policy)
    probe = probed(engine, policy)
    for _ in range(3):
        found = probe.check()
    assert found["probe_moved"] == 0 and math.isnan(found["probe_slope"])
    assert math.isnan(found["probe_slope_last"])
    move(policy, 4e-3, seed=0)
    engine.sync(policy)
    probe.check()
    move(policy, 4e-3, seed=1)
    with pytest.raises(SystemExit, match="did not reach the engine"):
        probe.check()


# ------------------------------------------------------------------------------ what is judged
def test_the_last_digits_are_no_change_even_where_both_sides_agreed_to_the_bit():
    found = bare(EXACT).compare(*(1e-6 * normal(2, 500)))
    assert math.isnan(found["probe_slope"]) and math.isnan(found["probe_slope_last"])


def test_one_slope_is_since_the_start_and_one_since_the_last_sync():
    x, probe = normal(500), bare(HALF, noise=1e-3)
    changes = (  # the trainer's, the engine's; the second is hardly more than noise
        (5e-4, 0), (1.5e-3, 1e-3), (1, 1.0), (2, 1.94), (2.002, 1.942), (2.004, 1.944))
    seen = [probe.compare(mine * x, theirs * x) for mine, theirs in changes]
    slopes = [(found["probe_slope"], found["probe_slope_last"]) for found in seen]
    assert slopes[2:4] == [(pytest.approx(1, abs=1e-3),) * 2,
                           (pytest.approx(0.97, abs=1e-3), pytest.approx(0.94, abs=1e-3))]
    assert all(math.isnan(slopes[i][1]) for i in (0, 1, 4))  # too small to be judged yet
    assert slopes[5][1] == pytest.approx(1, abs=0.01)  # small ones add up
    assert seen[5]["probe_moved"] == pytest.approx(2.004 * probe_module.rms(x))
    assert seen[5]["probe_gap_max"] == pytest.approx(0.06 * x.abs().max().item(), rel=1e-3)


def test_a_slope_that_is_off_by_many_of_its_errors_is_no_noise():
    x, noise = normal(2, 500)
    with pytest.raises(SystemExit, match=r"changed by 0\.\d\d \+- 0.0[12] times"):
        bare(Limits("mean", 1.0, 0.5)).compare(x, 0.8 * x + 0.3 * noise)


def test_limits_are_as_loose_as_the_precisions_and_no_looser():
    exact, tied = (limits("float32", "float32", "auto", mixture=mixture)
                   for mixture in (False, True))
    assert (exact.statistic, tied.statistic) == ("mean", "median") and exact.gap == tied.gap <= 1e-4
    half = limits("bfloat16", "bfloat16", "auto", mixture=False)
    assert limits("float32", "bfloat16", "auto", mixture=False) == half
    assert half.rest < limits("bfloat16", "bfloat16", "auto", mixture=True).rest
    for engine_dtype, cache in (("fp8", "auto"), ("float32", "fp8"), ("bfloat16", "fp8")):
        eight = limits("float32", engine_dtype, cache, mixture=False)
        assert exact.gap < half.gap < eight.gap and exact.rest < half.rest < eight.rest


@pytest.mark.parametrize("cache, arrives, sound", [
    ("fp8", 0.93, True), ("fp8", 0.8, False), ("auto", 0.93, False)])
def test_in_8_bits_a_far_change_may_arrive_less_than_wholly(cache, arrives, sound):
    """A sound sync of a mixture of experts behind an fp8 cache once had a slope of 0.93."""
    x, bounds = normal(500), limits("float32", "bfloat16", cache, mixture=True)
    with contextlib.nullcontext() if sound else pytest.raises(SystemExit, match="in part or late"):
        found = bare(bounds, noise=1e-3).compare(x, arrives * x)
        assert found["probe_slope"] == pytest.approx(arrives, abs=1e-3)
