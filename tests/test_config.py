"""Settings: their ranges, their defaults, names that become folders."""
import math
import re
from typing import get_args, get_type_hints

import pytest

import eval as evaluation  # the module has the name of a builtin
from helpers import ROOT
from parts import config as config_module
from parts.config import PRESETS, Config, bounds_of, check, check_numbers, name_of
from parts.models import SMOLLM
from world import CPU, known_model, settled


@pytest.mark.parametrize("settings", [
    dict(threshold=0.5), dict(columns="a,b"), dict(sampler="uniform", M=9),
    dict(sampler="uniform", weighting="unbiased"), dict(max_rounds_all_correct=4),
    dict(objective="grpo", importance="none"), dict(objective="cispo", weight_cap=2.0),
    dict(importance="none", weight_cap=2.0), dict(clip=False), dict(eps_low=0.1),
    dict(replay="r2"), dict(mini_batches=2, clip=False, eps_high=0.1)])
def test_a_setting_without_effect_is_refused(settings):
    """Else somebody would take its value for the reason of a result."""
    with pytest.raises(ValueError, match=" has no effect "):
        check(Config(**settings), vars(Config()))


SAMPLERS = {"n", "M", "N", "threshold", "max_rounds_all_correct"}  # SamplerConfig.validate


@pytest.mark.parametrize("cls", [Config, evaluation.Flags])
def test_every_number_has_a_range_of_which_both_ends_are_allowed(cls):
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if not (bounds := bounds_of(hint)):
            assert not {int, float} & {hint, *get_args(hint)} or name in SAMPLERS, name
            continue
        (least, most), = bounds
        for value in (least, most):
            check_numbers(cls(**{name: value}))
        for value in (least - abs(least) / 2 - 1e-9, -most - 1, 2 * most, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"^{name} must be from .* to .*, not "):
                check_numbers(cls(**{name: value}))
    check_numbers(cls())


@pytest.mark.parametrize("flags, words", [
    (dict(mini_batches=25), "mini_batches = 25 is more than the 24 prompts"),
    (dict(model=SMOLLM, n=6), "a round of 4 is below n = 6"),  # as M follows from the model
    (dict(model="Qwen2.5-0.5B", batch_prompts=3, mini_batches=4), "more than the 3 prompts")])
def test_what_only_the_model_can_tell_is_refused_too(flags, words):
    with pytest.raises(ValueError, match=words):
        settled(**flags)


# ------------------------------------------------------------------------------ defaults
def test_the_page_of_settings_has_every_flag_with_its_default():
    page = (ROOT / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `--([\w-]+)`( ↻)? \| (.+?) \|", page, re.M)
    stated = {flag.replace("-", "_"): cell for flag, _, cell in rows}
    anew = {flag.replace("-", "_") for flag, mark, _ in rows if mark}
    assert len(rows) == len(stated) and anew == config_module.RESUMABLE
    found = vars(evaluation.Flags()) | vars(Config())
    by_size = [vars(settled(model=model)) for model in ("tiny", SMOLLM, "Qwen2.5-Math-1.5B")]
    found |= {name: [c[name] for c in by_size] for name in PRESETS["tiny"]
              if name not in ("data", "eval_data", "template")}
    assert stated.keys() == found.keys(), "docs/settings.md has a row for each flag"
    wrong = [name for name, value in found.items()
             if value is not None and written(stated[name]) != written(value)]
    assert wrong == [], "docs/settings.md has other defaults of these flags than the program"


def written(value) -> list:
    """A default as the page has it: off, –, or one value for each size of model."""
    words = {False: "off", True: "on", "": "–"} if isinstance(value, bool | str) else {}
    values = value if isinstance(value, list) else str(words.get(value, value)).split(", ")
    return [float(x) if re.fullmatch(r"[\d.e-]+", str(x)) else x for x in values]


def test_flags_go_before_what_a_small_model_has(tmp_path):
    own = settled(model=SMOLLM, lr=1e-4, max_tokens=64)
    assert (own.lr, own.steps, own.max_tokens, own.M, own.n) == (1e-4, 20, 64, 4, 4)
    assert settled(model=SMOLLM, data="builtin-words") == settled(model=SMOLLM)
    assert {settled(model=SMOLLM, sampler=rule).M for rule in ("gvm", "ada-pos", "uniform")} == {8}
    elsewhere = settled(model=SMOLLM, data="mine.jsonl")
    assert (elsewhere.eval_data, elsewhere.max_tokens) == ("held-out", 160)
    off = dict(clip=False, eval_every=0, warmup_steps=0, weight_cap=0.0, eval_first=False)
    assert off.items() <= vars(settled(model=SMOLLM, mini_batches=2, **off)).items()


def test_a_reward_of_ones_own_gets_the_bare_problem():
    for model in (SMOLLM, "Qwen2.5-Math-1.5B"):
        assert settled(model=model, reward="mine.py:score").template == "chat"
        flags = evaluation.Flags(model=model, reward="mine.py:score")
        assert evaluation.settle(flags, CPU, known_model(model)).template == "chat"


def test_what_a_mixture_of_experts_replays():
    for mini_batches, replay in {1: "none", 2: "r2", 4: "r3", 8: "r3"}.items():
        assert settled(model="tiny-moe", mini_batches=mini_batches).replay == replay
        assert settled(mini_batches=mini_batches).replay == "none"


@pytest.mark.parametrize("settings", [dict(model=".hidden"), dict(model="/"), *(
    dict(name=name) for name in ("..", "a/b", ".a", "a\x1b[2J", "-x y", "."))])
def test_a_name_that_leaves_the_runs_folder_or_is_too_long_is_refused(settings):
    with pytest.raises(ValueError, match="must be a plain folder name") as refused:
        name_of(Config(**settings))
    assert str(refused.value).isprintable()
