"""The fate of a prompt under its run's rule is the recorded one; under others, brute force's."""
import copy
import json
import re
from dataclasses import asdict
from itertools import product

import pytest

from ada_sampler import RULES, Rule, SamplerConfig, exit_test, mean
from conftest import ROOT
from parts import what_if

RECORDED = ROOT / "tests" / "explore_run"
RULES_OF_ONE_PROMPT = ("uniform", "dapo", "ada-pos", "ada-balance")


def recorded_run(name):
    config = json.loads((RECORDED / name / "config.json").read_text())["config"]
    groups = [json.loads(line) for line in (RECORDED / name / "groups.jsonl").open()]
    return dict(config=config, groups=groups)


def pool_of(rewards, status="scored"):
    return [dict(reward=reward, status=status) for reward in rewards]


def recorded_pools():
    """The rewards of all pools of two real runs: a line per prompt, a word per round."""
    lines = (RECORDED / "pools.txt").read_text().splitlines()
    distinct = sorted({line.replace(" ", "") for line in lines})
    return [[float(reward) for reward in line] for line in distinct]


def fate_of(pool, config=None, **settings):
    run = dict(config=asdict(config or SamplerConfig(**settings)), groups=[dict(pool=pool)])
    what_if.add_to(run)
    return run["groups"][0]["what_if"]


# ------------------------------------------------------------------------------ reality
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


# ------------------------------------------------------------------------------ brute force
def by_hand(rewards, config):
    """(outcome, rounds, draws, baseline) of the first complete round that closes the prompt."""
    drawn, rounds = config.rule.round_size, 1
    while drawn <= len(rewards):
        correct = sum(reward > config.threshold for reward in rewards[:drawn])
        outcome = exit_test(correct, drawn - correct, rounds, config)
        if outcome:
            return outcome, rounds, drawn, mean(rewards[:drawn])
        drawn, rounds = drawn + config.rule.round_size, rounds + 1
    return None


SETTINGS = [dict(n=n, M=8, N=N) for n, N in product((2, 4, 8), (1, 3))] + [
    dict(M=5), dict(drop_unresolved=True), dict(max_rounds_all_correct=1),
    dict(max_rounds_all_correct=9, N=2)]


def test_each_rule_sees_the_draws_in_their_order_until_it_closes_or_they_end():
    pools = recorded_pools()[::4] + [[0.25, 0.9, 0.1, 0.9, 0.75, -1.0, 0.3, 2.0], [1.0], []]
    outcomes = set()
    for rewards, settings, rule in product(pools, SETTINGS, RULES_OF_ONE_PROMPT):
        config = SamplerConfig(sampler=rule, **settings)
        fate = what_if.replayed(pool_of(rewards), config)
        wanted = by_hand(rewards, config)
        outcomes.add(wanted and wanted[0])
        if wanted is None:
            assert fate is None
            continue
        assert (fate["outcome"], fate["rounds"], fate["draws"], fate["baseline"]) == wanted
        dropped = wanted[0] != "resolved" and (config.drop_unresolved or rule == "dapo")
        assert len(fate["kept"]) == (0 if dropped else config.n)
        assert fate["coefficients"] == [rewards[i] - wanted[3] for i in fate["kept"]]
    assert outcomes == {None, "resolved", "too few correct", "too few wrong"}


def test_what_comes_after_a_prompt_closed_decides_nothing():
    pool = pool_of([0.0, 1.0] * 8)
    whole = fate_of(pool)
    for rule, fate in whole.items():
        draws = fate["draws"]
        assert fate_of(pool[:draws])[rule] == fate_of(pool[:draws] + pool_of([0.0]))[rule] == fate
        assert rule not in fate_of(pool[:draws - 1])
    assert set(whole) == set(RULES_OF_ONE_PROMPT)


# ------------------------------------------------------------------------------ what a log holds
def test_an_answer_without_a_verdict_is_not_right_however_low_the_threshold():
    for broken in (dict(reward=0.0, status="raised"), dict(reward=0.0, status=None),
                   dict(reward=None, status="scored"), dict(status="scored")):
        pool = [broken, *pool_of([0.0, -2.0])]
        fate = fate_of(pool, n=3, M=4, threshold=-0.5)["uniform"]
        assert fate["coefficients"] == pytest.approx([-2 / 3, 4 / 3, -2 / 3])  # as if all wrong


def test_the_runs_own_advantage_and_weighting_are_used():
    pool = pool_of([1.0, 0.0, 0.0, 0.0])
    plain = fate_of(pool)["uniform"]["coefficients"]
    assert plain == [0.75, -0.25, -0.25, -0.25]
    others = fate_of(pool, advantage="leave-one-out")["uniform"]["coefficients"]
    assert others == [1.0, -1 / 3, -1 / 3, -1 / 3]
    weighed = fate_of(pool, weighting="inv_p")["uniform"]["coefficients"]
    assert weighed == [4 * a for a in plain]


def test_sizes_that_the_sampler_refuses_are_refused_in_its_words():
    run = recorded_run("four")
    asked = copy.deepcopy(run)
    what_if.add_to(asked, dict(n=8, M=4))
    reasons = asked["what_if"]["rules"]
    assert asked["what_if"]["sizes"] == dict(n=8, M=4, N=run["config"]["N"])
    for rule, reason in reasons.items():
        try:
            SamplerConfig(sampler=rule, n=8, M=4).validate()
            assert reason == ""
        except ValueError as error:
            assert reason == str(error)
        assert all((rule in group["what_if"]) <= (reason == "") for group in asked["groups"])
    assert [rule for rule in reasons if reasons[rule]] == ["ada-pos", "ada-balance"]


@pytest.mark.parametrize("damage", [
    dict(n="8"), dict(n=2.5), dict(n=None), dict(N=True), dict(threshold="x"), dict(sampler=[1])])
def test_a_damaged_setting_counts_as_its_default(damage):
    run = recorded_run("four")
    what_if.add_to(damaged := copy.deepcopy(run) | dict(config=run["config"] | damage))
    assert set(damaged["groups"][0]["what_if"]) >= {"uniform"}


def test_a_new_rule_needs_no_word_here_and_one_that_shares_out_draws_is_left_out(monkeypatch):
    rule = RULES["ada-pos"]
    monkeypatch.setitem(RULES, "ada-neg", lambda c: rule(c)._replace(min_correct=0, min_wrong=1))
    run = recorded_run("four")
    own = run | dict(config=run["config"] | dict(sampler="gvm"))
    what_if.add_to(own)
    assert set(own["what_if"]["rules"]) == {*RULES_OF_ONE_PROMPT, "ada-neg"}
    assert own["rule"] is None
    what_if.add_to(run)
    assert run["rule"]["min_correct"] == run["config"]["n"] // 2


def test_what_the_page_asks_of_a_rule_is_there():
    asked = re.findall(r"\brule\??\.(\w+)", (ROOT / "parts" / "explore.html").read_text())
    assert set(asked) and set(asked) <= set(Rule._fields)
