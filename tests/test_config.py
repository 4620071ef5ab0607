"""Settings: their ranges, their defaults, names that become folders."""
import math
import re
from dataclasses import fields
from typing import get_type_hints

import pytest

from helpers import ROOT
from parts import config as config_module
from parts.config import (LIMITS, MAY_BE_ZERO, USUAL, Config, EvalConfig, check_numbers, name_of,
                          parse)


@pytest.mark.parametrize("settings", [
    dict(weight_cap=1.0), dict(weight_cap=0.0), dict(objective="grpo", mini_batches=2, clip=False),
    dict(objective="cispo", mini_batches=2, eps_low=0.1), dict(importance="staleness"),
    dict(replay="r3"), dict(replay="r2", mini_batches=2), dict(threshold=0),
    dict(mini_batches=24, batch_prompts=24), dict(mini_batches=5, batch_prompts=24),
    dict(data="mine.jsonl", columns="question"),
    dict(data="gsm8k", eval_data="mine.jsonl", columns="question"),
    dict(sampler="ada-pos", drop_unresolved=True), dict(sampler="ada-est", M=32),
    dict(sampler="ada-est", M=2), dict(sampler="gvm", advantage="positives-only", M=1),
    dict(sampler="uniform", n=16), dict(sampler="uniform", n=1, advantage="positives-only"),
    dict(n=8, M=8),
])
def test_what_is_near_to_it_is_not(settings):
    Config(**settings).validate()


@pytest.mark.parametrize("cls", [Config, EvalConfig])
def test_every_number_has_a_range_of_which_both_ends_are_allowed(cls):
    numbers = [f for f in fields(cls) if type(f.default) in USUAL]
    assert {f.name for f in numbers} - {"log_groups"} == {
        name for name, hint in get_type_hints(cls).items() if hint in (int, float)}
    for f in numbers:
        least, most = LIMITS.get(f.name, USUAL[type(f.default)])
        zero = [0] * (least < 0 or f.default == 0 or f.name in MAY_BE_ZERO)
        for value in (f.default, least, most, *zero):
            check_numbers(cls(**{f.name: value}))
        odd = [least - abs(least) / 2, -most - 1, 2 * most, math.nan, math.inf, -math.inf]
        for value in odd if zero else [0, *odd]:
            with pytest.raises(ValueError, match=f"^{f.name} must be (0, or )?from .* to .*, not "):
                check_numbers(cls(**{f.name: value}))


# ------------------------------------------------------------------------------ defaults
def test_the_defaults_are_those_that_the_page_explains():
    page = (ROOT / "docs" / "defaults.md").read_text()
    stated = {row: [float(number) for number in re.findall(r"\d[\d.e-]*", default)]
              for row, default in re.findall(r"^\| (.+?) \| (.+?) \|", page, re.M)}
    tiny, c, small = (parse(["--model", model])
                      for model in ("tiny", "Qwen2.5-Math-1.5B", "SmolLM2-135M-Instruct"))
    found = {
        "`--lora-rank`": [c.lora_rank], "`--lora-alpha`": [c.lora_alpha], "`--n`": [c.n],
        "`--lr`, real models": [c.lr], "`--lr`, built-in models": [tiny.lr],
        "`--lr`, models below 500 M parameters": [small.lr],
        "schedule": [c.warmup_steps, 500, small.warmup_steps],
        "`--max-grad-norm`": [c.max_grad_norm],
        "`--M`, `--N`, ε, the cap of 5": [c.M, c.N, c.eps_low, c.eps_high, c.weight_cap]}
    assert {row: stated[row] for row in found} == found


@pytest.mark.parametrize("settings, name", [
    (dict(seed=3), "tiny-ada-balance-seed3"),
    (dict(model="org/name", sampler="uniform"), "name-uniform-seed0"),
    (dict(model="/models/mine/"), "mine-ada-balance-seed0"),
    (dict(name="mine"), "mine"), (dict(name="ü" * 127), "ü" * 127)])
def test_a_run_without_a_name_gets_one_that_is_a_folder(settings, name):
    config = Config(**settings)
    assert name_of(config) == name_of(Config(name=name)) == name


@pytest.mark.parametrize("settings", [dict(model=".hidden"), dict(model="/"), *(
    dict(name=name) for name in (
        "..", ".", "../up", "/tmp/there", "a/b", "a\\b", ".hidden", "a\nb", "a\x1b[2J", "~", "-x y",
        "a\x00", "x" * 256, "ü" * 128))])
def test_a_name_that_leaves_the_runs_folder_or_is_too_long_is_refused(settings):
    with pytest.raises(ValueError, match="must be a plain folder name") as refused:
        name_of(Config(**settings))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("given, model, threads", [
    (None, "tiny", "1"), ("2", "tiny", "2"), (None, "org/name", None)])
def test_a_built_in_model_gets_one_thread_unless_the_user_says_more(
        monkeypatch, given, model, threads):
    found = {} if given is None else dict(OMP_NUM_THREADS=given)
    monkeypatch.setattr(config_module.os, "environ", found)
    monkeypatch.setattr(config_module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(config_module, "parse", lambda: Config(model=model))
    assert config_module.parse_before_torch().model == model
    assert found.get("OMP_NUM_THREADS") == threads
