"""No setting ends in a traceback or in a run that learns nothing: it trains, or it is refused.

Every flag with every odd value, and every combination of the settings that decide what is
optimised, is either refused in one sentence or makes a real step: the real `sample` and `update`,
with an engine that draws random tokens and a grader that flips coins in the place of vLLM and
math-verify, and a random policy of one layer.
"""
import itertools
import math
import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ada_sampler import Estimator
from minirl import sample, update
from parts.config import Config, parse_flags, resolve
from parts.engine import Rollout
from parts.policy import loss_scale
from parts.routing_replay import RoutingReplay
from parts.run import make_optimizer

WORDS = 32
SIZES = dict(vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_attention_heads=1,
             num_key_value_heads=1, num_hidden_layers=1, initializer_range=0.3, bos_token_id=None)
EXPERTS = dict(head_dim=16, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
RATES = [0.15, 0.3, 0.5, 0.7, 0.85, 0.5]  # how often each problem is solved
SMALL = dict(batch_prompts=len(RATES), max_tokens=8, data="builtin", lr=0.01)
HINTS = get_type_hints(Config)


# ------------------------------------------------------------------------------ a small world
class RandomWriter:
    """In vLLM's place: random tokens, and a word that says whether the answer is right."""

    def __init__(self, routes: bool):
        self.routes, self.rng, self.queue = routes, random.Random(0), []

    def submit(self, key, prompt_ids, max_tokens) -> None:
        right = self.rng.random() < RATES[prompt_ids[0]]
        T = self.rng.choice((2, 5))  # few lengths: few micro-batches
        length = len(prompt_ids) + T - 1
        self.queue.append((key, Rollout(
            token_ids=[self.rng.randrange(WORDS) for _ in range(T)],
            logprobs=[-math.log(WORDS) + self.rng.gauss(0, 0.3) for _ in range(T)],
            routes=torch.tensor([[[0, 1]]] * length) if self.routes else None,
            text="right" if right else "wrong", finish_reason="stop")))

    @property
    def busy(self) -> bool:
        return bool(self.queue)

    def step(self) -> list:
        done, self.queue = self.queue, []
        return done


class Judge:
    """In math-verify's place."""

    def __init__(self):
        self.texts = {}

    def submit(self, key, problem, rollout) -> None:
        self.texts[key] = rollout.text

    def result(self, key):
        reward = float(self.texts.pop(key) == "right")
        return SimpleNamespace(reward=reward, status="correct" if reward else "wrong")


class Problems:
    def __init__(self):
        self.at = itertools.count()

    def take(self, count: int) -> list:
        places = [next(self.at) % len(RATES) for _ in range(count)]
        return [SimpleNamespace(id=str(i), prompt=f"<{i}>", answer="", judged_by="",
                                prompt_ids=[i, 3])
                for i in places]


def random_policy(mixture: bool):
    torch.manual_seed(0)
    model = (Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)) if mixture
             else Qwen2ForCausalLM(Qwen2Config(**SIZES)))
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    policy = get_peft_model(model, lora).train()
    policy.routing = RoutingReplay(model) if mixture else None
    policy.loss_scale = loss_scale("float32", "cpu")
    return policy


def adapter_of(policy) -> dict:
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def policies():
    """mixture? -> (a random policy, its adapter at the start)"""
    made = {}
    for mixture in (False, True):
        policy = random_policy(mixture)
        made[mixture] = policy, {n: p.detach().clone() for n, p in adapter_of(policy).items()}
    return made


def check_that_it_trains(config: Config, policies) -> None:
    """One real step. It must move the adapter, with a gradient that is finite and not zero."""
    policy, start = policies[config.replay in ("r2", "r3")]
    with torch.no_grad():
        for name, p in adapter_of(policy).items():
            p.copy_(start[name])
    run = SimpleNamespace(
        config=config, engine=RandomWriter(routes=policy.routing is not None), grader=Judge(),
        stream=Problems(), estimator=Estimator(), policy=policy)
    groups = sample(run)
    metrics = update(policy, *make_optimizer(policy, config), groups, config, random.Random(0))
    assert metrics["optimizer_steps"] >= 1 and metrics["skipped_steps"] == 0, metrics
    assert 0 < metrics["grad_norm"] < math.inf and math.isfinite(metrics["loss"]), metrics
    after = adapter_of(policy)
    assert any(not torch.equal(after[name], start[name]) for name in start), "nothing was learnt"
    assert all(p.isfinite().all() for p in after.values())


def refusal(**settings) -> str | None:
    """The sentence with which these settings are refused; None if a run would start."""
    try:
        config = Config(**SMALL | settings)
        config.validate()
        resolve(config).validate()
    except (ValueError, SystemExit) as end:
        sentence = str(end)
        assert type(end) in (ValueError, SystemExit) and 10 < len(sentence) < 300, repr(end)
        assert "\n" not in sentence and "Traceback" not in sentence
        return sentence
    return None


def complete(**settings) -> Config:
    config = resolve(Config(**SMALL | settings))
    config.validate()
    return config


# ------------------------------------------------------------------------------ every flag
ODD = {  # as they are typed; what is of another type tyro refuses
    int: ("0", "-1", "1000000000", "1" + 30 * "0", "1.5", "", "many"),
    float: ("0", "-1", "1e300", "inf", "nan", "1e-300", "", "much"),
    str: ("", "x" * 100_000),
    Literal: ("", "None", "x" * 100_000),
}
# Texts whose sense only the disk or the model can tell: test_config.py, test_data.py and
# test_own_reward.py try them.
ELSEWHERE = ("model", "data", "eval_data", "columns", "reward", "template", "name")


def kind_of(name: str):
    if name == "log_groups":  # or all
        return int
    return Literal if get_origin(HINTS[name]) is Literal else HINTS[name]


@pytest.mark.parametrize("name", [f.name for f in fields(Config) if kind_of(f.name) is not bool])
def test_an_odd_value_is_refused_or_trains(name, policies, capsys):
    refused, flag = 0, "--" + name.replace("_", "-")
    for value in ODD[kind_of(name)]:
        try:
            given = getattr(parse_flags(Config, [flag, value], "minirl.py", ""), name)
        except SystemExit as end:
            assert end.code == 2 and flag in capsys.readouterr().err
            refused += 1
            continue
        sentence = refusal(**{name: given})
        if sentence:
            refused += 1
            assert name in sentence, sentence
        elif name not in ELSEWHERE:
            check_that_it_trains(complete(**{name: given}), policies)
    assert refused or name in ELSEWHERE, "nothing is wrong here?"


# ------------------------------------------------------------------------------ combinations
def choices(name: str, without=()) -> list:
    return [value for value in get_args(HINTS[name]) if value not in without]


RULES = ["uniform", "dapo", "ada-pos", "ada-balance", "ada-est", "gvm"]
COMBINED = dict(
    advantage=choices("advantage", without=("auto",)),
    weighting=choices("weighting"),
    replay=choices("replay", without=("auto",)),
    mini_batches=[1, 2],
)


def cannot_work(c: dict) -> bool:
    """What must be refused, in this test's own words."""
    std, est = c["advantage"] == "group-std", c["sampler"] == "ada-est"
    twice = (est or std) and c["weighting"] != "none" or est and std
    idle = c["mini_batches"] == 1 and c["replay"] == "r2"
    of_minirl = c.get("importance", "full") != "full" or c.get("mask", "ratio") != "ratio"
    foreign = c["objective"] != "minirl" and of_minirl
    return twice or idle or foreign


def walk(policies, **axes) -> None:
    """Every combination of `axes` that cannot work is refused, and every other accepted.

    Of the accepted ones so many train that any two values are together in one of them, with the
    one of the axis that has only one.
    """
    met, trained = set(), 0
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values))
        sentence = refusal(**settings)
        assert bool(sentence) == cannot_work(settings), (settings, sentence)
        pairs = set(itertools.combinations(settings.items(), 2))
        if not sentence and not pairs <= met:
            met |= pairs
            trained += 1
            check_that_it_trains(complete(**settings), policies)
    assert trained > 8


@pytest.mark.parametrize("sampler", RULES)
def test_every_rule_trains_as_it_is(sampler, policies):
    check_that_it_trains(complete(sampler=sampler), policies)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", RULES)
def test_whatever_is_accepted_trains(sampler, policies):
    walk(policies, sampler=[sampler], objective=choices("objective"), **COMBINED)


@pytest.mark.slow
@pytest.mark.parametrize("objective", choices("objective"))
def test_whatever_is_accepted_trains_with_every_weight_and_length(objective, policies):
    walk(policies, objective=[objective], sampler=["ada-balance", "ada-est"], weighting=["none"],
         advantage=["pool-mean"], importance=choices("importance"),
         length_norm=choices("length_norm"), replay=choices("replay"), mask=choices("mask"),
         mini_batches=[1, 2])
