"""The sampler against exact results, without a model.

The checks of labs 1, 3 and 4 test advantages, exit test, kept answers, row weights and allocation.
"""
import contextlib
import itertools
import math
import random
from dataclasses import fields
from statistics import fmean, stdev
from unittest import mock

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import ada_sampler as ada
from ada_sampler import (ADVANTAGES, RULES, WEIGHTINGS, Collector, Estimator, Group, Sample,
                         SamplerConfig, collect, set_advantages)
from course import laws
from course.simulate import Coin, effective_weight, simulate
from parts.config import unread
from world import Engine, Grader, by_text


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
    """Calls collect() with what every rule may need. Each answer and each verdict is used once."""
    engine, grader = engine or Engine(), grader or Grader()
    spare = dict(estimator=Estimator(), more=lambda: Coin(f"spare {len(engine.asked)}", 0.4))
    with mock.patch.object(ada, "Collector", way):
        groups = collect(problems, cfg, engine, grader, **spare | more)
    for group in groups:
        set_advantages(group, cfg)
    assert not grader.open and not engine.busy
    assert len(engine.asked) == sum(map(len, engine.log)) == sum(len(g.pool) for g in groups)
    return groups


def outcomes(groups):
    return [(g.problem.id, g.outcome, g.rounds, [s.correct for s in g.pool],
             [s.index for s in g.kept]) for g in groups]


def test_allocation_of_ada_est():
    rng = random.Random(0)
    for _ in range(300):
        p = [rng.choice((0.0, 1.0, rng.random(), rng.random() ** 6))
             for _ in range(rng.randint(1, 40))]
        low, high = rng.randint(1, 4), rng.randint(6, 64)
        total = rng.randint(low * len(p), high * len(p))
        sizes = ada.allocate_est(p, total, 0.01, low, high)
        assert sum(sizes) == total and low <= min(sizes) and max(sizes) <= high
        # where no bound bites it is proportional to 1/sqrt(p + eps)
        free = [(s, (x + 0.01) ** -0.5) for x, s in zip(p, sizes) if low + 1 < s < high - 1]
        for (s, w), (t, v) in zip(free, free[1:]):
            assert abs(s / w - t / v) <= 1 / w + 1 / v + 1e-9
    assert ada.allocate_est([0.3] * 5, 40, 0.01, 2, 32) == [8] * 5
    assert ada.allocate_est([], 0, 0.01, 2, 32) == []


def short_if_correct(rng, correct):
    """With these lengths a decision in the order of finishing would be biased."""
    return rng.randint(1, 3) if correct else rng.randint(4, 6)


RATES = st.sampled_from((0.0, 0.02, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0))
SETTINGS = dict(
    n=st.integers(1, 6), M=st.integers(6, 12), N=st.integers(1, 5),
    threshold=st.sampled_from([0.0, 0.7]), max_rounds_all_correct=st.integers(0, 6),
    drop_unresolved=st.booleans(), advantage=st.sampled_from(ADVANTAGES),
    weighting=st.sampled_from(WEIGHTINGS))


@st.composite
def accepted(draw, rule) -> SamplerConfig:
    """Any settings that are accepted. Settings without effect have their defaults."""
    own = dict(M=st.integers(2, 12), weighting=st.just("none")) if rule == "ada-est" else {}
    cfg = config(rule, **{name: draw(values) for name, values in (SETTINGS | own).items()
                          if name not in unread(config(rule))})
    try:
        cfg.validate()
    except ValueError:
        reject()  # see test_what_would_train_on_nonsense_is_refused
    return cfg


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=15)
@given(st.data(), st.lists(RATES, min_size=1, max_size=12), st.sampled_from([1, 7, 64, 10**9]),
       st.booleans(), st.integers(0, 99))
def test_barrier_early_opening_and_order_change_nothing_but_the_time(
        rule, data, rates, slots, biased, seed):
    """Answer s to prompt p is the same in all runs, so the pools must be identical. Every answer
    stays with its prompt, and every row has a finite weight."""
    cfg, problems = data.draw(accepted(rule)), coins(rates)
    how = dict(length=short_if_correct) if biased else {}

    def engine():
        return Engine(seed, slots, **how)

    engines = [engine() for _ in WAYS]
    found = [run(problems, cfg, own, way=way) for own, way in zip(engines, WAYS)]
    places = len(problems)  # dapo's others are tried in the order in which prompts close
    one, two, three = (outcomes(groups[:places]) for groups in found)
    assert one == two == three
    for groups in found:
        assert [g.problem for g in groups[:places]] == problems
        assert len(groups) == places or rule == "dapo"
    for g in itertools.chain(*found):
        for place, s in enumerate(g.pool):
            assert s.rollout.prompt == g.problem.id and s.index == place
            assert s.correct == s.rollout.correct == (s.status == "correct")
        assert len(g.kept) == len(g.advantages) == len(g.weights)
        assert all(math.isfinite(c) for _, c in g.rows()) and all(w >= 0 for w in g.weights)
        assert not (cfg.drop_unresolved and g.kept) or g.outcome == "resolved"
    other = engine()
    other.shuffle.seed(seed + 1)  # of the samples that finish in one step
    assert outcomes(run(problems, cfg, other)) == outcomes(found[-1])
    assert other.log == engines[-1].log


JUDGES = dict(
    right_or_wrong=by_text,
    of_ones_own=lambda key, problem, rollout: 2.0 if rollout.correct else -0.5,
    at_the_threshold=lambda key, problem, rollout: 0.7 + rollout.correct,
    failing=lambda key, problem, _: math.nan if problem.p == 0.5 else -1.0 - key[1],
    partly=lambda key, _, rollout: math.nan if key[1] % 3 else by_text(key, _, rollout))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("rule", RULES)
def test_what_a_group_says_follows_from_its_pool(rule, judge, weighting):
    """The threshold is strict and only for counting. An answer on which the grader fails counts
    for nothing. ada-est weighs by the pass rate, because a mean reward may be negative."""
    cfg = config(rule, weighting="none" if rule == "ada-est" else weighting)
    groups = run(mixed(24), cfg, grader=Grader(JUDGES[judge]))
    if cfg.rule.allocates and judge not in ("failing", "partly"):  # gvm: not where nothing is right
        assert sum(s.round > 0 or rule == "ada-est" for g in groups for s in g.pool) == cfg.M * 24
    for g in groups:
        judged = [s for s in g.pool if s.status != "raised"]
        right = sum(s.reward > cfg.threshold for s in judged)
        assert right == sum(s.correct for s in g.pool)
        assert not {s.index for s in g.kept} - {s.index for s in judged}
        if not cfg.rule.allocates:
            resolved = right >= cfg.rule.min_correct and len(judged) - right >= cfg.rule.min_wrong
            assert resolved == (g.outcome == "resolved")
        counted = [s for s in judged if s.round or rule != "gvm"]  # pilots are not
        assert counted or g.zero_signal and not g.kept
        assert g.p_hat == (fmean(s.correct for s in counted or judged) if judged else 0)
        assert not counted or g.baseline == pytest.approx(fmean(s.reward for s in counted))
        if rule == "ada-est":
            assert g.weights == pytest.approx([(g.p_hat + 0.01) ** -0.5] * len(judged))
        if cfg.weighting == "unbiased" and {s.correct for s in g.kept} == {True, False}:
            assert math.isclose(sum(g.weights), cfg.rule.rows_per_prompt)


def opened(p, cfg, *lengths, way=Collector) -> list[int]:
    """The engine steps before which rounds begin. All but the first answers have length 2."""
    rest = iter(lengths)
    run(coins([p]), cfg, engine := Engine(length=lambda *_: next(rest, 2)), way=way)
    return [step for step, keys in enumerate(engine.log) if keys]


@pytest.mark.parametrize("cfg, p", [(config(N=2), 0), (config(N=2), 1), (config(n=5, N=2), 0)])
def test_a_round_opens_early_exactly_when_it_is_certain(cfg, p):
    """One answer is late, and two answers of the other kind are missing, so a round is certain."""
    assert opened(p, cfg, *[2] * 7, 50) == [0, 3]  # finished in step 2, graded during step 3
    assert opened(p, cfg, *[2] * 7, 50, way=WithoutEarlyOpening) == [0, 50]  # the engine is idle
    assert opened(p, cfg, *[2] * 6, 50, 50) == [0, 50]  # two stragglers could still resolve it


@pytest.mark.parametrize("hopeless", [False, True])
def test_dapo_refills_and_drops(hopeless):
    """It tries at most three other prompts per place, as long as there are any."""
    problems = coins([0.0] * 6 if hopeless else [0.0, 0.5, 1.0, 0.5, 0.0, 0.5])
    rate = 0.0 if hopeless else 0.4
    groups = run(problems, config("dapo", n=8), more=lambda: Coin(random.random(), rate))
    full = [g for g in groups if g.kept]
    assert len(full) == (0 if hopeless else 6) and max(g.refill for g in groups) <= 3
    assert all(0 < sum(s.correct for s in g.pool) < 8 and not g.zero_signal for g in full)
    for g in groups:
        assert g.kept or (g.zero_signal and g.outcome in ("too few correct", "too few wrong"))
    if hopeless:
        assert len(groups) == 6 * 4
        for nothing in (None, lambda: None):  # no stream, or an empty one
            assert len(run(problems, config("dapo"), more=nothing)) == 6


def test_the_estimator_forgets_slowly_and_its_counts_are_its_state():
    estimator, problem = Estimator(), Coin(3, 0.5)  # a number, which JSON makes a text
    assert estimator.pass_rate(problem) == 0.5
    for right, drawn in ((2, 8), (5, 10)):
        pool = [Sample(i, 0, reward=1.0, correct=i < right) for i in range(drawn)]
        estimator.update(Group(0, problem, [*pool, Sample(drawn, 0)]))  # the last has no verdict
    T, K = 0.9 * 8 + 10, 0.9 * 2 + 5
    assert math.isclose(estimator.pass_rate(problem), (K + 0.5) / (T + 1))
    assert estimator.counts == {"3": pytest.approx([T, K])}  # a checkpoint has them in JSON


def test_ada_est_samples_more_in_the_next_epoch_where_less_was_right():
    estimator, problems = Estimator(), coins([0.0, 1.0] * 4)
    first, second = (run(problems, config("ada-est"), estimator=estimator) for _ in range(2))
    assert [len(g.pool) for g in first] == [8] * 8
    # p is 0.5/9 or 8.5/9, and 16 / (1 + sqrt((0.5/9 + 0.01) / (8.5/9 + 0.01))) is 12.7
    assert [len(g.pool) for g in second] == [13, 3] * 4
    assert [estimator.sizes(problems, M) for M in (2, 32)] == [[2] * 8, [32] * 8]  # the bounds


@pytest.mark.parametrize("weighting, weight", [("inv_p", 16), ("log", 15)])
def test_a_prompt_without_a_right_answer_counts_as_if_half_an_answer_were(weighting, weight):
    """Rewards of one's own may differ below the threshold, so such a prompt has a gradient."""
    judged = [Sample(i, 0, reward=-1.0 - i, status="wrong") for i in range(8)]
    group = Group(0, None, [*judged, Sample(8, 0)])  # the last has no verdict
    set_advantages(group, config(weighting=weighting))
    assert group.weights == pytest.approx([weight] * 4)


@pytest.mark.parametrize("norms", [None, lambda groups: [g.index % 3 for g in groups]])
def test_gvm_with_raft_and_log_is_the_estimator_of_its_paper(norms):
    """Pilots are drawn first, and only what is drawn after them is trained on."""
    cfg = config("gvm", advantage="positives-only", weighting="log")
    groups = run(mixed(40), cfg, grad_norms=norms)
    p_P = [fmean(s.correct for s in g.pool[:8]) for g in groups]
    G_P = norms(groups) if norms else [1] * 40
    w_P = [G / math.sqrt(p + 0.001 / p) if p else 0 for p, G in zip(p_P, G_P)]  # Prop. 1
    for g, p, w in zip(groups, p_P, w_P):
        assert g.kept == g.pool[8:] == [s for s in g.pool if s.round]
        assert abs(len(g.kept) - cfg.M * 40 * w / sum(w_P)) < 1
        assert w or (g.outcome, g.p_hat) == ("out of budget" if p else "too few correct", p)
        assert not g.kept or g.baseline == ada.mean([s.reward for s in g.kept])
        for s, c in g.rows():  # 1/(n_i p_i) for accepted ones, over M rows per prompt on average
            assert math.isclose(c / cfg.M, 1 / (len(g.kept) * g.p_hat)) if s.correct else c == 0


RAFT, LEAST = dict(advantage="positives-only"), "must be at least 1, and max_rounds_all_correct 0"


@pytest.mark.parametrize("words, changes", [
    *((f"{name} must be one of", {name: "nope"}) for name in ("sampler", "advantage", "weighting")),
    (LEAST, dict(sampler="uniform", M=0)), (LEAST, dict(N=0)),
    (LEAST, dict(sampler="uniform", n=0) | RAFT), (LEAST, dict(max_rounds_all_correct=-1)),
    ("a round of 8 is below n = 16", dict(n=16, M=8)),
    *(("set n to 2 or more", dict(n=1) | how) for how in ({}, RAFT, dict(sampler="dapo") | RAFT)),
    ("set M to 2 or more", dict(sampler="gvm", M=1)),
    *(("ada-est samples 2 to 32", dict(sampler="ada-est", M=M) | RAFT) for M in (1, 33)),
    *(("choose only one of them", changes) for changes in (
        dict(sampler="ada-est", weighting="log"), dict(sampler="ada-est", advantage="group-std"),
        dict(advantage="group-std", weighting="unbiased"))),
    *((None, dict(sampler="ada-est", M=M)) for M in (2, 32)), (None, dict(n=8, M=8)),
    (None, dict(sampler="uniform", n=1) | RAFT), (None, dict(sampler="gvm", n=9, M=2))])
def test_what_would_train_on_nonsense_is_refused(words, changes):
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
        collect([], SamplerConfig(**changes), Engine(), Grader(), estimator=Estimator())


def test_an_answer_that_never_comes_back_is_no_silent_loss():
    engine = Engine()
    real = engine.step
    engine.step = lambda: [(key, rollout) for key, rollout in real() if key != (1, 3)]
    with pytest.raises(RuntimeError, match=r"these prompts never came back: \[1\]$"):
        collect(coins([0.5] * 3), config("uniform"), engine, Grader())


CHANGED = dict(  # a value other than the default
    n=6, M=7, N=2, threshold=0.9, max_rounds_all_correct=1, drop_unresolved=True,
    advantage="leave-one-out", weighting="log")


def three_visits(cfg):
    """What the trainer and the log see of three steps, with rewards 0 and 0.8."""
    estimator, seen = Estimator(), []
    for seed in range(3):
        grader = Grader(lambda _, problem, rollout: 0.8 * rollout.correct)
        groups = run(mixed(20), cfg, Engine(seed), grader, estimator=estimator)
        seen.append([(outcomes([g]), [c for _, c in g.rows()]) for g in groups])
    return seen


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", [f.name for f in fields(SamplerConfig)][1:])
def test_a_setting_changes_something_exactly_if_the_sampler_reads_it(rule, setting):
    cfg = config(rule, **{setting: CHANGED[setting]})
    assert ("drop_unresolved" in unread(cfg)) == (rule not in ("ada-pos", "ada-balance"))
    if (rule, setting) != ("ada-est", "weighting"):  # the test above refuses both together
        changed = three_visits(cfg) != three_visits(config(rule))
        assert changed == (setting not in unread(cfg))


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("rule, n, weighting", [
    *(("ada-balance", 4, weighting) for weighting in WEIGHTINGS), ("ada-pos", 4, "none"),
    ("uniform", 16, "none")])
def test_oracles_through_collect(p, rule, n, weighting):
    cfg = config(rule, n=n, weighting=weighting)
    exact, groups = laws.expected_yield(p, cfg), simulate(cfg, [p] * 400, seed=round(1000 * p) + n)
    found = dict(weight=[effective_weight(g, cfg) for g in groups],
                 draws=[len(g.pool) for g in groups], silent=[g.zero_signal for g in groups])
    for name, values in found.items():
        error = stdev(values) / math.sqrt(400)
        assert abs(fmean(values) - getattr(exact, name)) <= 3 * error + 1 / 400, name
