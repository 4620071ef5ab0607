"""The fate of a prompt under its run's rule is the recorded one; under others, `collect`'s."""
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ada_sampler import RULES, Rule, SamplerConfig
from conftest import ROOT
from parts import what_if
from sampler_oracles import coins, run

RECORDED = ROOT / "tests" / "explore_run"
RULES_OF_ONE_PROMPT = ("uniform", "dapo", "ada-pos", "ada-balance")


def recorded_run(name, **changes):
    config = json.loads((RECORDED / name / "config.json").read_text())["config"] | changes
    groups = [json.loads(line) for line in (RECORDED / name / "groups.jsonl").open()]
    return dict(config=config, groups=groups)


def pool_of(rewards):
    return [dict(reward=reward, status="scored") for reward in rewards]


@pytest.mark.parametrize("name", ["four", "one"])
def test_under_its_own_rule_each_prompt_ends_as_it_did(name):
    run = recorded_run(name)
    what_if.add_to(run)
    assert run["groups"]
    for group in run["groups"]:
        fate = group["what_if"][run["config"]["sampler"]]
        kept = [i for i, s in enumerate(group["pool"]) if s["kept"]]
        assert (fate["outcome"], fate["draws"]) == (group["outcome"], len(group["pool"]))
        assert fate["kept"] == kept and fate["baseline"] == group["baseline"]
        assert fate["coefficients"] == [group["pool"][i]["coefficient"] for i in kept]
        assert fate["rounds"] == 1 + max(s["round"] for s in group["pool"])


@given(st.data(), st.sampled_from(RULES_OF_ONE_PROMPT), st.sampled_from((0, 0.05, 0.3, 0.7, 1)))
def test_under_another_rule_it_ends_as_if_that_rule_had_sampled_it(data, rule, p):
    """The stand-in engine writes the same n-th answer to a prompt, whoever asks for it."""
    drawn = data.draw(st.integers(4, 40), "draws that were recorded")
    wide = dict(sampler="uniform", n=drawn)
    group, = run(coins([p]), SamplerConfig(**wide))
    pool = pool_of([s.reward for s in group.pool])
    n = data.draw(st.sampled_from((2, 4)), "n")
    config = SamplerConfig(
        sampler=rule, n=n, M=data.draw(st.integers(n, 8), "M"), N=data.draw(st.integers(1, 4), "N"),
        drop_unresolved=data.draw(st.booleans(), "drop"),
        max_rounds_all_correct=data.draw(st.integers(0, 2), "rounds without a wrong one"),
        advantage=data.draw(st.sampled_from(("pool-mean", "leave-one-out")), "advantage"),
        weighting=data.draw(st.sampled_from(("none", "inv_p")), "weighting"))
    wanted = run(coins([p]), config)[0]
    fate = what_if.replayed(pool, config)
    if len(wanted.pool) > drawn:
        assert fate is None
        return
    assert fate == dict(
        outcome=wanted.outcome, rounds=wanted.rounds, draws=len(wanted.pool),
        baseline=wanted.baseline, kept=[s.index for s in wanted.kept],
        coefficients=[coefficient for _, coefficient in wanted.rows()])


# ------------------------------------------------------------------------------ what a log holds
def test_an_answer_without_a_verdict_is_not_right_however_low_the_threshold():
    for broken in (dict(reward=0.0, status="raised"), dict(reward=0.0, status=None),
                   dict(reward=None, status="scored"), dict(status="scored")):
        wide = SamplerConfig(sampler="uniform", n=3, threshold=-0.5)
        fate = what_if.replayed([broken, *pool_of([0.0, -2.0])], wide)
        assert fate["coefficients"] == pytest.approx([-2 / 3, 4 / 3, -2 / 3])  # as if all wrong


def test_sizes_that_the_sampler_refuses_are_refused_in_its_words():
    run = recorded_run("four")
    what_if.add_to(run, dict(n=8, M=4))
    reasons = run["what_if"]["rules"]
    assert run["what_if"]["sizes"] == dict(n=8, M=4, N=run["config"]["N"])
    assert reasons == {rule: "a round of 4 is below n = 8: raise M or lower n" * (rule[:3] == "ada")
                       for rule in RULES_OF_ONE_PROMPT}
    assert all(not reasons[rule] for group in run["groups"] for rule in group["what_if"])


@pytest.mark.parametrize("damage", [
    dict(n="8"), dict(n=2.5), dict(n=None), dict(N=True), dict(threshold="x"), dict(sampler=[1])])
def test_a_damaged_setting_counts_as_its_default(damage):
    run = recorded_run("four", **damage)
    what_if.add_to(run)
    assert set(run["groups"][0]["what_if"]) >= {"uniform"}


def test_a_new_rule_needs_no_word_here_and_one_that_shares_out_draws_is_left_out(monkeypatch):
    rule = RULES["ada-pos"]
    monkeypatch.setitem(RULES, "ada-neg", lambda c: rule(c)._replace(min_correct=0, min_wrong=1))
    for sampler, own in (("gvm", None), ("ada-balance", RULES["ada-balance"])):
        run = recorded_run("four", sampler=sampler)
        what_if.add_to(run)
        assert set(run["what_if"]["rules"]) == {*RULES_OF_ONE_PROMPT, "ada-neg"}
        assert run["rule"] == (own and own(SamplerConfig(**{
            size: run["config"][size] for size in ("n", "M", "N")}))._asdict())


def test_what_the_page_asks_of_a_rule_is_there():
    asked = re.findall(r"\brule\??\.(\w+)", (ROOT / "parts" / "explore.html").read_text())
    assert set(asked) and set(asked) <= set(Rule._fields)
