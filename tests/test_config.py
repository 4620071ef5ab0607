"""What a user can get wrong ends within seconds, before the engine loads, in one sentence."""
import json
import os
import re
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from ada_sampler import SamplerConfig
from conftest import ROOT
from parts import run as running
from parts.run import every, prepare
from parts.config import (RESUMABLE, Config, check_name, name_of, parse, parse_eval,
                          resolve)


@pytest.mark.parametrize("flags, sentence", [
    (["--M", "2", "--N", "1", "--n", "4"], "n = 4"),
    (["--M", "2"], "n = 4"),
    (["--top-p", "0.9"], "top_p must stay 1"),
    (["--temperature", "0"], "temperature must be at least 0.01, not 0"),
    (["--mini-batches", "50", "--batch-prompts", "8"], "8 prompts cannot be cut into 50"),
    (["--mini-batches", "25"], "24 prompts cannot be cut into 25"),
    (["--lora-rank", "0"], "lora_rank must be at least 1"),
    (["--name", "../elsewhere"], "plain folder name"),
    (["--name", "x" * 256], "256 bytes of 255"),
    (["--name", "ü" * 128], "256 bytes of 255"),
    (["--model", ""], "model must not be empty"),
    (["--data", "x" * 4097], "data is longer than any path: 4,097 characters"),
    (["--objective", "grpo", "--importance", "none"], "grpo has a weight of its own"),
    (["--objective", "cispo", "--weight-cap", "4"], "weight_cap belongs to the objective minirl"),
    (["--weight-cap", "0.5"], "weight_cap must be 0 (no cap) or at least 1"),
    (["--importance", "none", "--weight-cap", "4"], "no effect with importance none"),
    (["--importance", "staleness"], "the same as none"),
    (["--no-clip", "--eps-low", "0.1", "--mini-batches", "2"], "no effect without clip"),
    (["--no-clip", "--eps-high", "0.1", "--mini-batches", "2"], "no effect without clip"),
    (["--eps-low", "0.1"], "no effect with one mini-batch"),
    (["--eps-high", "0.1"], "no effect with one mini-batch"),
    (["--no-clip"], "no effect with one mini-batch"),
    (["--mask", "icepop", "--objective", "grpo"], "mask belongs to the objective minirl"),
    (["--mask", "dppo", "--no-clip", "--mini-batches", "2"], "mask has no effect without clip"),
    (["--delta", "0.3"], "no effect but with mask dppo"),
    (["--mask", "dppo", "--eps-low", "0.1", "--mini-batches", "2"], "which looks at delta"),
    (["--replay", "r2"], "the same as none"),
    (["--problem-key", "question"], "builtin problems have no columns"),
    (["--answer-key", "a"], "builtin problems have no columns"),
    (["--lr", "1e-10"], "lr must be 0 (auto) or at least 1e-9"),
    (["--eval-temperature", "0"], "set eval_k to 1"),
    (["--eval-temperature", "0", "--eval-k", "2"], "set eval_k to 1"),
    (["--eval-temperature", "0.009"], "0 (greedy) or at least 0.01"),
    (["--eval-temperature", "-0.5"], "-1 (the training's), 0 (greedy)"),
    (["--max-grad-norm", "1e-4"], "max_grad_norm must be 0 (off) or at least 0.001"),
    (["--warmup-steps", "101"], "more than the 100 optimizer steps"),
    (["--warmup-steps", "8", "--steps", "3", "--mini-batches", "2"], "more than the 6 optimizer"),
])
def test_what_cannot_work_is_refused_in_one_sentence(flags, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and sentence in error
    assert error.startswith("minirl.py: ") and error.count("\n") == 1


@pytest.mark.parametrize("program", ["minirl", "eval"])
@pytest.mark.parametrize("flag", ["--system", "--data", "--name"])
def test_a_byte_that_is_no_text_is_refused(program, flag, capsys):
    """As `--system $'caf\\xe9'` arrives where the terminal is set to another encoding."""
    read = parse if program == "minirl" else parse_eval
    with pytest.raises(SystemExit) as ended:
        read([flag, os.fsdecode(b"caf\xe9")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{program}.py: caf\\udce9 is no text in UTF-8\n"


@pytest.mark.parametrize("settings", [
    dict(weight_cap=1.0), dict(weight_cap=0.0), dict(objective="grpo", mini_batches=2, clip=False),
    dict(objective="cispo", mini_batches=2, eps_low=0.1), dict(objective="cispo"),
    dict(importance="staleness", mini_batches=2),
    dict(importance="none"), dict(replay="r2", mini_batches=2), dict(replay="r3"), dict(lr=1e-9),
    dict(max_grad_norm=1e-3), dict(max_grad_norm=0.0), dict(warmup_steps=0),
    dict(warmup_steps=6, steps=3, mini_batches=2), dict(steps=1), dict(name="ü" * 127),
    dict(eval_temperature=0.0, eval_k=1), dict(eval_temperature=0.01),
    dict(mini_batches=24, batch_prompts=24), dict(mini_batches=5, batch_prompts=24),
    dict(data="mine.jsonl", problem_key="question"), dict(data="x" * 4096),
])
def test_what_is_near_to_it_is_not(settings):
    Config(**settings).validate()


RANGES = {  # the ends of each range: still allowed, not any more
    "lora_rank": (1, 0, 512, 513), "lora_alpha": (1, 0, 4096, 4097),
    "max_prompt_tokens": (0, -1, 10**6, 10**6 + 1), "batch_prompts": (0, -1, 10**5, 10**5 + 1),
    "max_tokens": (0, -1, 10**6, 10**6 + 1), "threshold": (0, -1e-9, 0.999, 1),
    "temperature": (0.01, 0.0099, 100, 100.1), "top_p": (1, 0, 1, 1.1),
    "mini_batches": (1, 0, 10**5, 10**5 + 1), "weight_cap": (0, -1e-9, 1e9, 1.1e9),
    "eps_low": (1e-9, 0, 1, 1.01), "eps_high": (1e-9, 0, 1e6, 1.1e6),
    "delta": (1e-9, 0, 1, 1.01),
    "lr": (0, -1e-9, 1, 1.01), "warmup_steps": (0, -1, 10**6, 10**6 + 1),
    "weight_decay": (0, -1e-9, 1, 1.01), "max_grad_norm": (0, -1e-9, 1e9, 1.1e9),
    "steps": (0, -1, 10**6, 10**6 + 1), "seed": (0, -1, 2**32 - 1, 2**32),
    "eval_every": (0, -1, 10**6, 10**6 + 1), "eval_questions": (0, -1, 10**6, 10**6 + 1),
    "eval_k": (1, 0, 10**4, 10**4 + 1), "eval_temperature": (-1, -1.1, 100, 100.1),
    "checkpoint_every": (0, -1, 10**6, 10**6 + 1),
    "keep_checkpoints": (1, 0, 10**6, 10**6 + 1), "engine_memory": (1e-9, 0, 0.999, 1),
    "engine_sequences": (1, 0, 10**4, 10**4 + 1), "micro_tokens": (0, -1, 10**8, 10**8 + 1),
    "graders": (1, 0, 256, 257)}


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_every_range(name):
    least, below, most, above = RANGES[name]
    others = dict(eps_low=dict(mini_batches=2), eps_high=dict(mini_batches=2),
                  delta=dict(mask="dppo"),
                  eval_temperature=dict(eval_k=1)).get(name, {})
    for value in (least, most):
        Config(**others | {name: value}).validate()
    for value in (below, above):
        with pytest.raises(ValueError, match=f"^{name} must be "):
            Config(**others | {name: value}).validate()


def test_every_number_of_a_run_has_a_range():
    own = {f.name for f in fields(Config)} - {f.name for f in fields(SamplerConfig)}
    hints = get_type_hints(Config)
    assert own | {"threshold"} >= RANGES.keys()
    assert {name for name in own if hints[name] in (int, float)} | {"threshold"} == RANGES.keys()


# ------------------------------------------------------------------------------ defaults
def test_the_defaults_are_those_that_the_page_explains():
    page = (ROOT / "docs" / "defaults.md").read_text()
    stated = dict(re.findall(r"^\| (.+?) \| (.+?) \|", page, re.M))
    tiny, real, small = (parse(["--model", model])
                         for model in ("tiny", "Qwen2.5-Math-1.5B", "SmolLM2-135M-Instruct"))
    for config in (tiny, real, small):
        for flag in ("--lora-rank", "--lora-alpha", "--weight-decay", "--max-grad-norm"):
            assert float(stated[f"`{flag}`"]) == getattr(config, flag[2:].replace("-", "_"))
        assert stated["schedule"].startswith(f"{config.warmup_steps} optimizer steps")
    rates = [float(stated[f"`--lr`, {kind}"]) for kind in (
        "built-in models", "real models", "models below 500 M parameters")]
    assert rates == [tiny.lr, real.lr, small.lr]
    rounds = f"{real.n}, {real.M}, {real.N}; {real.eps_low}, {real.eps_high}; {real.weight_cap:g}"
    assert stated["`--n`, `--M`, `--N`, ε, the cap of 5"] == rounds


@pytest.mark.parametrize("objective, advantage, length_norm", [
    ("minirl", "pool-mean", "constant"), ("grpo", "group-std", "response"),
    ("cispo", "group-std", "batch")])
def test_each_objective_has_the_advantage_and_the_lengths_of_its_paper(
        objective, advantage, length_norm):
    config = Config(objective=objective)
    assert (config.advantage, config.length_norm) == (advantage, length_norm)
    given = Config(objective=objective, advantage="leave-one-out", length_norm="response")
    assert (given.advantage, given.length_norm) == ("leave-one-out", "response")


@pytest.mark.parametrize("settings, held_out", [
    (dict(), "builtin"), (dict(model="Qwen2.5-Math-1.5B"), "math500"),
    (dict(data="mine.jsonl"), "held-out"), (dict(model="Qwen3-4B", data="builtin"), "builtin")])
def test_the_held_out_problems_fit_the_training_data(settings, held_out):
    assert resolve(Config(**settings)).eval_data == held_out


def test_what_is_given_is_not_replaced():
    given = dict(max_prompt_tokens=7, max_tokens=8, batch_prompts=9, lr=0.5, steps=11,
                 eval_questions=12, micro_tokens=13, data="a.jsonl", eval_data="b.jsonl",
                 template="none", name="mine", eval_every=3, checkpoint_every=4)
    found = asdict(resolve(Config(**given)))
    assert given == {name: found[name] for name in given}


def test_zero_is_never_but_at_the_ends_also_when_a_run_goes_on():
    """A number in its place would stay when `steps` grows."""
    config = resolve(Config(steps=30, eval_every=0, checkpoint_every=0))
    assert (config.eval_every, config.checkpoint_every) == (0, 0)
    assert [step for step in range(9) if every(0, step)] == []
    assert [step for step in range(9) if every(4, step)] == [0, 4, 8]


@pytest.mark.parametrize("settings, name", [
    (dict(sampler="balance", seed=3), "tiny-ada-balance-seed3"),
    (dict(model="org/name", sampler="grpo"), "name-uniform-seed0"),
    (dict(model="/models/my model (2)/"), "my_model_2_-ada-balance-seed0"),
    (dict(model=".hidden"), "hidden-ada-balance-seed0"),
    (dict(model="/"), "model-ada-balance-seed0"),
    (dict(model="x" * 300), "x" * 50 + "-ada-balance-seed0"),
    (dict(name="mine"), "mine")])
def test_a_run_without_a_name_gets_one_that_is_a_folder(settings, name):
    config = Config(**settings)
    assert name_of(config) == name
    check_name(name)


def test_only_what_leaves_the_meaning_of_the_logs_alone_may_change_on_resume():
    assert RESUMABLE < {f.name for f in fields(Config)}
    assert {"steps", "lr", "micro_tokens", "graders", "sync", "eval_every"} <= RESUMABLE
    deciding = {"model", "dtype", "data", "seed", "temperature", "objective", "mini_batches",
                "rollout_dtype", "kv_cache_dtype", "eval_k", "max_grad_norm", "warmup_steps"}
    assert not RESUMABLE & (deciding | {f.name for f in fields(SamplerConfig)})


# ------------------------------------------------------------------------------ the program
@pytest.mark.parametrize("flags, sentences", [
    (["--model", "NoSuchModel"], ["Unknown model 'NoSuchModel'", "--model tiny"]),
    (["--replay", "r3", "--mini-batches", "2"], ["--replay r3 is for mixtures of experts"]),
    (["--eval-data", "builtin,missing.csv"], ["No data file missing.csv"]),
    (["--data", "odd.jsonl"], ["alpha", "--problem-key", "--answer-key"]),
    (["--data", "long.jsonl"], ["over 256 tokens", "--max-prompt-tokens"]),
])
def test_wrong_model_or_data(flags, sentences, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.jsonl").write_text('{"alpha": "1+1", "beta": 2}\n')
    long = [json.dumps(dict(problem=f"{n}+" * 500 + "1", answer=str(500 * n + 1))) for n in (1, 2)]
    (tmp_path / "long.jsonl").write_text("\n".join(long))
    with pytest.raises(SystemExit) as ended:
        prepare(parse(flags), SimpleNamespace(check_golds=lambda golds: [True for _ in golds]))
    text = str(ended.value)
    assert all(sentence in text for sentence in sentences), text
    assert ended.value.code not in (0, None) and not (tmp_path / "runs").exists()


def test_a_run_is_known_by_its_training_and_its_held_out_problems(tmp_path, monkeypatch, capsys):
    """Other ones under the same name are told apart, before an engine is started.

    And a batch that is larger than the data is announced.
    """
    monkeypatch.chdir(tmp_path)
    known = []
    monkeypatch.setattr(running, "require_same",
                        lambda folder, inputs: known.append(inputs["problems"]))
    monkeypatch.setattr(running, "start_engine", lambda *_: 1 / 0)  # far enough
    grader = SimpleNamespace(check_golds=lambda golds: [True for _ in golds])
    for i, (train, held_out) in enumerate([(2, 3), (2, 3), (2, 4), (5, 3)]):
        for name, b in (("train", train), ("held", held_out)):
            row = dict(problem=f"{name} 1+{b}=?", answer=str(1 + b))
            Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(ZeroDivisionError):
            prepare(parse(["--data", "train.jsonl", "--eval-data", "held.jsonl", "--name",
                           f"mine{i}"]), grader)
    assert known[0] == known[1] and len({*known}) == 3
    said = "data: a step takes 24 prompts (--batch-prompts) of 1 to train on, so some are in it"
    assert capsys.readouterr().out.count(said) == 4


def test_an_existing_run_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    (tmp_path / "runs" / "mine" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="exists already.*--resume.*--name"):
        prepare(parse(["--name", "mine"]), grader=None)
