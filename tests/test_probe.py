"""The probe detects weights that arrive incomplete, late or not at all; correct runs pass."""
import contextlib
import copy
import math
import random
from types import SimpleNamespace

import pytest
import torch

import models_small
from engines import random_ids
from models_small import move, second
from parts import probe
from parts.logprobs import Sequence, token_logprobs
from parts.probe import LONGEST, TOKENS, Probe, slope
from world import settled

EXACT, HALF, EIGHT = (1e-4, 0.05), (0.2, 0.2), (1.0, 0.6)  # bounds by the engine's precision


def broken(policy, how: str):
    """A copy of the policy as it would arrive in a sync that is broken like this."""
    other = copy.deepcopy(policy)
    for name, p in second(other).items():
        layer = int(name.split("layers.")[1].split(".")[0])
        if how == f"layer {layer}":
            p.data.zero_()
        elif how == "half of the change":
            p.data.mul_(0.5)
    return other


class NoisyEngine:
    """An engine that is a copy of the policy, with Gaussian noise on its log-probs."""

    def __init__(self, policy, noise=0.0, temperature=1.0, how=""):
        self.held, self.noise, self.how = copy.deepcopy(policy), noise, how
        self.temperature, self.rng = temperature, random.Random(0)

    def sync(self, policy):
        self.held = broken(policy, self.how)

    def generate(self, prompts, n, max_tokens):
        sequences = [ids + [self.rng.randrange(300) for _ in range(max_tokens)] for ids in prompts]
        scores = self.logprobs(sequences, self.temperature)
        return [[SimpleNamespace(token_ids=ids[-max_tokens:], logprobs=mu[-max_tokens:])]
                for ids, mu in zip(sequences, scores)]

    def prompt_logprobs(self, sequences):
        return [[x + self.rng.gauss(0, self.noise) for x in mu] for mu in self.logprobs(sequences)]

    @torch.no_grad()
    def logprobs(self, sequences, temperature=1.0):
        rows = [Sequence(ids, 1) for ids in sequences]
        lp_T = token_logprobs(self.held, rows, temperature)[0]
        return [x.tolist() for x in lp_T.split([row.length for row in rows])]


def small_policy():
    """A policy of three layers whose B is 0, as at the start of a run."""
    return models_small.policy(moved=0, rank=8, num_hidden_layers=3)


def probed(engine, policy, bounds=HALF, prompts=[8] * 24, **options) -> Probe:
    """A probe whose prompts have these lengths."""
    problems = [SimpleNamespace(prompt_ids=random_ids(length, seed=i))
                for i, length in enumerate(prompts)]
    return Probe(engine, policy, problems, tolerances=bounds, **dict(max_tokens=12) | options)


def bare(bounds=HALF, base=(0.0, 0.0), tokens: int = 500) -> Probe:
    """A probe without engine and policy. `base`: the log-probs that both gave at its start."""
    probe = object.__new__(Probe)
    probe.gap, probe.rest = bounds
    probe.start = tuple(x + torch.zeros(tokens) for x in base)
    return probe


def judged(sound: bool, words: str = "disagree"):
    return contextlib.nullcontext() if sound else pytest.raises(SystemExit, match=words)


@pytest.mark.slow
@pytest.mark.parametrize("how, noise, bounds", [
    ("layer 0", 0.01, HALF), ("layer 2", 1e-6, EXACT), ("half of the change", 0.04, EIGHT)])
def test_a_trial_adapter_shows_what_never_arrives(how, noise, bounds):
    policy = small_policy()
    probed(NoisyEngine(policy, noise), policy, bounds).check()
    with judged(False):
        probed(NoisyEngine(policy, noise, how=how), policy, bounds)


@pytest.mark.parametrize("how", ["layer 0", "half of the change"])
def test_what_breaks_later_is_seen_within_three_steps(how):
    """The engine's noise is a quarter of what a step changes."""
    policy = small_policy()
    engine = NoisyEngine(policy, noise=0.01)
    probe = probed(engine, policy)
    for sound, seeds in ((True, range(6)), (False, range(6, 9))):
        engine.how = "" if sound else how
        with judged(sound):
            for seed in seeds:
                move(policy, 3e-3, seed)
                engine.sync(policy)
                assert abs(probe.check()["probe_slope"] - 1) < 0.1


def test_a_resumed_run_is_probed_with_the_texts_of_its_first_start(monkeypatch):
    """The engine draws them from torch's global state. The lowest precision decides the bounds."""
    asked, drawn, held_out = [], [], [*range(70)]
    monkeypatch.setattr(probe, "Probe", lambda *how, **more: (
        asked.append((how, more)) or drawn.append(torch.rand(1).item())))
    for flags, routing, bounds in (
            (dict(seed=1), None, EXACT), (dict(seed=1, max_tokens=1), "replay", (0.2, 0.05)),
            (dict(rollout_dtype="bfloat16", temperature=0.7), None, HALF),
            (dict(dtype="float16", rollout_dtype="float32"), "replay", HALF),
            (dict(rollout_dtype="fp8"), None, EIGHT), (dict(kv_cache_dtype="fp8"), None, EIGHT)):
        config, policy = settled(**flags), SimpleNamespace(routing=routing)
        probe.start_probe(config, "engine", policy, held_out)
        assert asked.pop() == (("engine", policy, held_out[:64]), dict(
            tolerances=bounds, max_tokens=max(1, config.max_tokens - 1),
            temperature=config.temperature))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("bounds, tokens", [(HALF, TOKENS), (EXACT, TOKENS // 2)])
def test_responses_are_compared_token_by_token_at_the_temperature_of_sampling(
        bounds, tokens, monkeypatch, capsys):
    """The trainer sorts the texts by length. Later checks are at temperature 1."""
    policy, lengths = small_policy(), [30, 4, 17, 9] * 20
    engine = NoisyEngine(policy, temperature=0.7)
    made = probed(engine, policy, bounds, lengths, temperature=0.7, max_tokens=99)
    count = len(made.rows)
    assert sorted(row.prompt_length for row in made.rows) == sorted(lengths[:count])
    assert tokens - 62 < sum(len(row.ids) for row in made.rows) <= tokens
    assert {row.length for row in made.rows} == {LONGEST}
    torch.testing.assert_close(made.of_engine(), made.trainer(), atol=1e-5, rtol=0)
    assert capsys.readouterr().out == (
        f"probe: trainer and engine agree on {count} texts and a trial change of weights\n")
    with judged(False):
        probed(engine, policy, EXACT, lengths)
    monkeypatch.setattr(probe, "TOKENS", 1)  # one text is looked at in any case
    assert [row.length for row in probed(engine, policy, bounds, temperature=0.7).rows] == [12]


def test_no_update_is_no_alarm_and_a_sync_that_does_nothing_is_one():
    policy = small_policy()
    engine = NoisyEngine(policy, temperature=0.7)
    probe = probed(engine, policy, EXACT, temperature=0.7)
    for held in (policy, engine.held):
        assert not any(p.any() for p in second(held).values())  # the trial adapter is gone
    found = probe.check()
    assert found["probe_moved"] == 0 and math.isnan(found["probe_slope"])
    move(policy, 4e-3)
    with judged(False):
        probe.check()
    engine.sync(policy)
    assert probe.check()["probe_slope"] == pytest.approx(1, abs=1e-3)


def test_the_slope_is_unbiased_and_off_by_two_errors_in_about_one_of_twenty_tries():
    generator, tries = torch.Generator().manual_seed(0), []
    for _ in range(400):
        x, noise = torch.randn((2, 200), generator=generator) * torch.rand(200, generator=generator)
        tries.append(slope(x, 0.7 * x + 0.5 * noise))
    b, error = torch.tensor(tries).T
    assert abs(b.mean() - 0.7) < 0.01 and 0.8 < error.mean() / b.std() < 1.3
    assert 5 <= ((b - 0.7).abs() > 2 * error).sum() <= 40


def test_a_single_token_does_not_decide():
    """A tie of two experts can change one token much. Least squares would give a slope of 0.75."""
    x, y = torch.full((2, 100), 0.1)
    x[7], y[7] = 1.0, 0.5
    assert slope(x, y)[0] == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize("bounds, noise, mine, theirs, sound", [
    (EXACT, 0, 1e-6, 0, True),  # the last digits are no change
    (EXACT, 0, 5e-5, 0, False), (EXACT, 0, 1e-3, 0, False), (HALF, 1e-3, 1e-3, 1e-5, True),
    (EXACT, 0, 10.6, 10.6 * 1.00018, True),  # what a sound 0.5 B model's trial adapter gave
    (EXACT, 0, 0.1, 0.0997, False),  # the same gap after a small change is no rounding
    (HALF, 1e-3, 3e-3, 0, False), (HALF, 1e-3, 0.1, 0.094, True), (HALF, 1e-3, 0.1, 0.08, False),
    (HALF, 1e-3, 0.1, 0.12, False), (EIGHT, 1e-3, 0.5, 0.93 * 0.5, True),  # an fp8 cache had 0.93
    (EIGHT, 0.3, 1e-4, 0, False),  # no change at all is no noise
    (EIGHT, 0, math.nan, 0, False), (EIGHT, 0, 0, math.nan, False)])  # no number is no match
def test_a_change_is_judged_by_its_slope_unless_noise_hides_it(bounds, noise, mine, theirs, sound):
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    gap_T = (theirs * x + noise - mine * x).abs()
    gaps = [gap_T.mean().item(), gap_T.max().item()]
    with judged(sound, "is {:.1e} on average and {:.1e} at most".format(*gaps)):
        found = bare(bounds, (0.0, noise)).compare(mine * x, theirs * x + noise)
        assert found["probe_moved"] == pytest.approx(mine, rel=0.1)
        assert [found["probe_gap_mean"], found["probe_gap_max"]] == pytest.approx(gaps, rel=1e-3)
        if mine > 0.01:
            assert found["probe_slope"] == pytest.approx(theirs / mine, abs=1e-3)


def test_noise_on_both_sides_is_no_alarm_whatever_the_change():
    """Noise in x lowers the slope, to 0.5 if the change is as small as the noise."""
    generator = torch.Generator().manual_seed(0)
    for change in (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3):
        for _ in range(50):
            noise = 0.02 * torch.randn((4, 500), generator=generator)
            x = change * torch.randn(500, generator=generator)
            bare(base=noise[:2]).compare(x + noise[2], x + noise[3])
