"""Settings: their ranges, their defaults, names that become folders."""
import math
import os
import re
import sys
from types import SimpleNamespace
from typing import get_args, get_type_hints
from unittest import mock

import pytest

import eval as evaluation  # the module has the name of a builtin
from helpers import ROOT
from parts import config as config_module
from parts.config import PRESETS, Config, bounds_of, check, check_numbers, name_of, size_of
from parts.models import SMOLLM
from world import CARD, CPU, known_model, settled


@pytest.mark.parametrize("settings", [
    dict(threshold=0.5), dict(columns="a,b"), dict(sampler="uniform", M=9),
    dict(sampler="uniform", weighting="unbiased"), dict(max_rounds_all_correct=4),
    dict(objective="grpo", importance="none"), dict(objective="cispo", weight_cap=2.0),
    dict(importance="none", weight_cap=2.0), dict(clip=False), dict(eps_low=0.1),
    dict(replay="r2"), dict(mini_batches=2, clip=False, eps_high=0.1), dict(sampler="gvm", n=5),
    dict(sampler="uniform", N=5), dict(sampler="ada-est", drop_unresolved=True), dict(sleep=True),
    dict(sampler="ada-pos", max_rounds_all_correct=1), dict(engine_memory=0.3), dict(eps_high=0.1),
    dict(n=8, M=8, N=1, weighting="unbiased"), dict(mini_batches=2, clip=False, eps_low=0.1)])
def test_a_setting_without_effect_is_refused(settings, monkeypatch):
    """Else somebody would take its value for the reason of a result."""
    monkeypatch.setattr(config_module, "build_for_cpu", lambda: True)
    with pytest.raises(ValueError, match=f"^{[*settings][-1]} has no effect w"):
        check(Config(**settings), vars(Config()))


@pytest.mark.parametrize("settings", [
    dict(threshold=0.5, reward="a.py:f"), dict(columns="a,b", data="org/a"), dict(weight_cap=2.0),
    dict(columns="a,b", data="math500", eval_data="org/a"), dict(max_rounds_all_correct=3),
    dict(sampler="uniform", n=9), dict(sampler="gvm", weighting="unbiased"), dict(sleep=True),
    dict(sampler="ada-pos", N=5, drop_unresolved=True), dict(sampler="uniform", weighting="log"),
    dict(n=8, M=8, weighting="unbiased"), dict(importance="none"), dict(weighting="unbiased"),
    dict(mini_batches=2, eps_low=0.1),
    dict(mini_batches=2, clip=False), dict(mini_batches=2, replay="r2"), dict(replay="r3"),
    dict(objective="grpo", advantage="pool-mean", weighting="log"), dict(engine_memory=0.3)])
def test_a_setting_with_an_effect_is_accepted(settings, monkeypatch):
    monkeypatch.setattr(config_module, "build_for_cpu", lambda: False)
    check(Config(**settings), vars(Config()))


RANGES = {  # docs/settings.md: where 0 has a meaning, it is allowed
    (1, 10**6): "max_prompt_tokens max_tokens engine_sequences lora_alpha eval_questions eval_k "
                "batch_prompts M mini_batches steps micro_tokens k",
    (0, 10**6): "warmup_steps keep_every eval_every log_groups limit",
    (1e-9, 1e9): "eps_low eps_high lr", (0, 1e9): "weight_cap max_grad_norm",
    (-1e9, 1e9): "threshold", (0.01, 0.99): "engine_memory", (1, 512): "lora_rank",
    (0.01, 100): "Config.temperature", (0, 100): "Flags.temperature", (0, 2**32 - 1): "seed"}


@pytest.mark.parametrize("cls", [Config, evaluation.Flags])
def test_every_number_has_its_range_of_which_both_ends_are_allowed(cls):
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if not (bounds := bounds_of(hint)):  # SamplerConfig.validate looks at the others
            assert not {int, float} & {hint, *get_args(hint)} or name in (
                "n", "M", "N", "threshold", "max_rounds_all_correct"), name
            continue
        (least, most), = bounds
        assert {name, f"{cls.__name__}.{name}"} & {*RANGES[least, most].split()}
        for value in (least, most):
            check_numbers(cls(**{name: value}))
        for value in (least - abs(least) / 2 - 1e-9, -most - 1, 2 * most, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"^{name} must be from .* to .*, not "):
                check_numbers(cls(**{name: value}))


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


@pytest.mark.parametrize("model, data, eval_data, template", [
    ("tiny", "builtin", "builtin", "chat"), ("tiny-skills", *["builtin-skills"] * 2, "chat"),
    (SMOLLM, "builtin-words", "builtin-words", "three-examples"),
    *((f"{owner}Qwen2.5-Math-1.5B", "RLHFlow/reinforce_ada_simple_prompt_1-5b", "math500",
       "reinforce-ada") for owner in ("", "Qwen/")),
    ("org/a", "agentica-org/DeepScaleR-Preview-Dataset", "math500", "reinforce-ada")])
def test_each_model_has_its_problems_and_its_prompt(model, data, eval_data, template):
    config = settled(model=model)
    assert (config.data, config.eval_data, config.template) == (data, eval_data, template)


@pytest.mark.parametrize("billions, on_cpu, on_card", [
    (0.449, "small", "small"), (0.494, "small", "large"), (0.74, "small", "large"),
    (0.76, "large", "large"), (1.5, "large", "large")])
def test_the_size_of_a_model_is_rounded_as_in_its_name(billions, on_cpu, on_card):
    model = SimpleNamespace(base="a", empty=SimpleNamespace(num_parameters=lambda: billions * 1e9))
    assert [size_of(model, machine) for machine in (CPU, CARD)] == [on_cpu, on_card]


@pytest.mark.parametrize("model, users, wanted", [
    ("tiny-moe", {}, dict(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")),
    (SMOLLM, {}, dict(TORCH_CPP_LOG_LEVEL="ERROR")),
    ("tiny", dict(OMP_NUM_THREADS="3", TORCH_CPP_LOG_LEVEL="INFO"), {})])
def test_a_built_in_model_gets_one_thread_if_the_user_does_not_say_otherwise(
        monkeypatch, model, users, wanted):
    monkeypatch.setattr(sys, "argv", ["minirl.py", "--model", model])
    monkeypatch.setattr(config_module, "prepare_streams", lambda: None)
    with mock.patch.dict(os.environ, users, clear=True):
        assert config_module.parse_before_torch().model == model
        assert dict(os.environ) == users | wanted


def test_a_run_prints_the_defaults_that_were_chosen_and_what_follows_from_the_machine(
        monkeypatch, capsys):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(config_module, "find_model", known_model)
    given = {name: PRESETS["tiny"][name] for name in (
        "M steps lr batch_prompts warmup_steps eval_k eval_every eval_questions template").split()}
    for config, machine in (
            (Config(model=SMOLLM, data="gsm8k", **given), CPU),
            (Config(model="Qwen2.5-Math-1.5B", data="builtin,gsm8k", **given), CARD),
            (settled(), CPU)):  # as of a resumed run, which has chosen before
        monkeypatch.setattr(config_module, "this_machine", lambda: machine)
        config_module.settle(config)
    assert capsys.readouterr().out == (
        "defaults for a small model: max_prompt_tokens = 640, max_tokens = 160, "
        "eval_data = held-out\n"
        "CPU: float32, merge sync, 896 tokens per pass, 1 GiB for the engine's cache "
        "(VLLM_CPU_KVCACHE_SPACE)\n"
        "defaults for a large model: max_prompt_tokens = 1024, max_tokens = 3000, "
        "eval_data = held-out\n"
        "a card: bfloat16, adapter sync, 16,384 tokens per pass, 36.0 of 80.0 GiB for the engine "
        "(--engine-memory 0.45)\n"
        "CPU: float32, merge sync, 4,096 tokens per pass, 1 GiB for the engine's cache "
        "(VLLM_CPU_KVCACHE_SPACE)\n")


def test_a_tracker_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit):
        config_module.parse(["--report-to", "wandb"])
    assert capsys.readouterr().err.endswith("--report-to needs a package: pip install wandb\n")


def test_flags_go_before_what_a_small_model_has():
    own = settled(model=SMOLLM, lr=1e-4, max_tokens=64)
    assert (own.lr, own.steps, own.max_tokens, own.M, own.n) == (1e-4, 20, 64, 4, 4)
    assert settled(model=SMOLLM, data="builtin-words") == settled(model=SMOLLM)
    assert {settled(model=SMOLLM, sampler=rule).M for rule in ("gvm", "ada-pos", "uniform")} == {8}
    assert settled(data="mine.jsonl").max_tokens == 64 and settled(CARD).micro_tokens == 4096
    off = dict(clip=False, eval_every=0, warmup_steps=0, weight_cap=0.0, eval_first=False)
    assert off.items() <= vars(settled(model=SMOLLM, mini_batches=2, **off)).items()


def test_a_reward_of_ones_own_gets_the_bare_problem():
    for model in (SMOLLM, "Qwen2.5-Math-1.5B"):
        assert settled(model=model, reward="mine.py:score").template == "chat"
        flags = evaluation.Flags(model=model, reward="mine.py:score")
        assert evaluation.settle(flags, CPU, known_model(model)).template == "chat"


def test_what_a_mixture_of_experts_replays():
    for mini_batches, replay in {1: "none", 2: "r2", 3: "r3", 24: "r3"}.items():
        assert settled(model="tiny-moe", mini_batches=mini_batches).replay == replay
        assert settled(mini_batches=mini_batches).replay == "none"


@pytest.mark.parametrize("settings", [dict(model=".hidden"), dict(model="/"), *(
    dict(name=name) for name in ("..", "a/b", ".a", "a\x1b[2J", "-x y", "."))])
def test_a_name_that_leaves_the_runs_folder_or_is_too_long_is_refused(settings):
    with pytest.raises(ValueError, match="must be a plain folder name") as refused:
        name_of(Config(**settings))
    assert str(refused.value).isprintable()
    assert name_of(Config(model="org/a", sampler="gvm", seed=3)) == "a-gvm-seed3"
