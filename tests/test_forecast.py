"""Whether a run fits into the memory of a CPU, against what a pass really keeps; and the most time
that a step can take, against steps of stored runs.
"""
import json
import re

import pytest
import torch

from helpers import ROOT
from models_small import policy
from parts import forecast
from parts import settle as settling
from parts.config import Flags
from parts.forecast import Speeds, longest_step, seconds_of_step, worst_case
from parts.logprobs import Sequence, token_logprobs
from parts.machine import GB, Machine
from parts.models import empty_model, tiny_folder
from world import CPU, known_model, settled

# ------------------------------------------------------------------------------ will it fit?
@pytest.fixture
def fit(monkeypatch):
    """fit(free, **settings): the tokens of a pass of SmolLM2 where so many GiB are free."""
    def tokens(free: float, cache="1", **flags):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", cache)
        here = Machine(card="", memory=free * GB, dtype="float32")
        return settled(here, **dict(model="SmolLM2-135M-Instruct") | flags).micro_tokens

    return tokens


@pytest.mark.parametrize("free, settings, least, most", [
    (64, {}, 896, 896), (7, {}, 896, 896), (5.5, {}, 620, 680),
    (5.5, dict(dtype="bfloat16"), 896, 896), (5.5, dict(lora_rank=64), 460, 520),
    (6.61, dict(cache="2"), 620, 680), (5.71, dict(engine_sequences=512), 620, 680),
    (5.22, dict(rollout_dtype="bfloat16"), 620, 680),
    (16, dict(micro_tokens=3000), 3000, 3000)])
def test_tokens_per_pass_come_from_what_is_free(fit, free, settings, least, most):
    assert least <= fit(free, **settings) <= most


@pytest.mark.parametrize("free, settings, sentence", [
    (4.6, {}, "with a pass over 296 tokens, and 4.1 GiB are free for it, enough for 2"),
    (4, {}, "enough for 0 tokens: .*or take a smaller --model"),
    (16, dict(micro_tokens=16384), "enough for 5,.*lower --micro-tokens"),
    (16, dict(micro_tokens=100, max_tokens=16100), "a pass over 16,356 tokens")])  # one row fits
def test_what_does_not_fit_is_refused(fit, free, settings, sentence):
    with pytest.raises(SystemExit, match=sentence):
        fit(free, **settings)


def kept_by_a_pass(trained, rows) -> int:
    """Bytes that autograd keeps for the backward pass, besides the model's own weights."""
    own = {p.untyped_storage().data_ptr() for p in [*trained.parameters(), *trained.buffers()]}
    seen = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(trained, rows)
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-skills"])
def test_a_pass_keeps_what_the_weights_foretell(name):
    trained = policy(tiny_folder(name), rank=16)
    rows = [Sequence([7] * 128, 1) for _ in range(4)]
    model = empty_model(trained.get_base_model().config)
    _, foreseen = forecast.bytes_needed(
        settled(max_tokens=64), model)
    assert 0.4 < kept_by_a_pass(trained, rows) / (4 * 128) / foreseen < 0.75  # memory has gaps


# ------------------------------------------------------------------------------ will it end?
ONE_CORE = Speeds(flops=60e9, bytes=10e9)  # as the machine may have had, on which they ran
QWEN = [  # samples a step of Qwen2.5-Coder-0.5B on SVAMP: tokens, engine steps, trained, seconds
    (5570, 194, 1152, 233.0), (3408, 98, 913, 135.6), (3853, 95, 354, 145.0),
    (4060, 88, 269, 110.7), (4520, 149, 515, 127.4), (4856, 65, 1647, 216.0),
    (3574, 64, 2210, 246.0), (3674, 64, 1771, 183.3), (3391, 55, 449, 118.2),
    (3443, 55, 931, 126.4)]


def test_the_time_of_a_step_is_that_of_stored_runs_within_a_factor_of_two():
    """With the tokens that they had. Their speeds were not measured when they ran."""
    for *tokens, seconds in QWEN:
        assert 0.5 < seconds_of_step(494e6, *tokens, ONE_CORE) / seconds < 2
    for line in (ROOT / "bench/results/real_model.jsonl").read_text().splitlines():
        logged = json.loads(line)["metrics"]
        forecast_of_run = sum(seconds_of_step(134.5e6, *tokens, ONE_CORE) for tokens in zip(
            logged["tokens"], logged["engine_steps"], logged["tokens_trained"]))
        seconds = sum(logged["seconds_sample"]) + sum(logged["seconds_train"])
        assert 0.5 < forecast_of_run / seconds < 2


@pytest.mark.parametrize("flags, sampled, engine_steps, trained", [
    (dict(), 24 * 32 * 64 + 24 * 256, 3 * 64, 24 * 4 * 320),  # 768 answers, 256 at once
    (dict(sampler="uniform", batch_prompts=2), 2 * 4 * 64 + 2 * 256, 64, 2 * 4 * 320),
    (dict(sampler="dapo", batch_prompts=2), 4 * (2 * 4 * 64 + 2 * 256), 64, 2 * 4 * 320),
    (dict(sampler="gvm", batch_prompts=2), 2 * 16 * 64 + 2 * 256, 64, 2 * 8 * 320)])
def test_the_longest_step_takes_all_rounds_and_all_tokens(flags, sampled, engine_steps, trained):
    assert worst_case(settled(**flags)) == (sampled, engine_steps, trained)


def test_the_line_names_the_time_and_the_flags_to_lower():
    c = settled(max_tokens=64, batch_prompts=2, sampler="uniform")
    said = longest_step(c, 10**9, Speeds(flops=1e12, bytes=1e12))
    assert "up to 18 seconds, if it samples all of 1,024 tokens and trains on 2,560" in said
    for flag in re.findall(r"--([\w-]+)", said):
        assert hasattr(c, flag.replace("-", "_"))


@pytest.mark.parametrize("model, flags, machine, timed, small", [
    ("Qwen2.5-Math-1.5B", {}, CPU, True, False), ("Qwen2.5-0.5B", {}, CPU, False, True),
    ("Qwen2.5-0.5B", dict(max_tokens=300), CPU, True, True), ("tiny", {}, CPU, False, False),
    ("Qwen2.5-0.5B", {}, Machine("H100", 80 * GB, "bfloat16"), False, False)])
def test_what_the_size_of_a_model_means_is_said_before_the_engine_starts(
        monkeypatch, capsys, model, flags, machine, timed, small):
    monkeypatch.setattr(settling, "measured_speeds", lambda: ONE_CORE)
    asked, known = Flags(model=model, **flags), known_model(model)
    settling.say_settings(asked, settled(machine, model=model, **flags), machine, known)
    said = capsys.readouterr().out
    assert ("on this CPU a step can take up to " in said) == timed
    assert ("this model is small, so its settings are" in said and "steps = 20" in said) == small
    assert "max_tokens = " not in said or "max_tokens" not in flags  # what is given is not listed


def test_speeds_are_measured_by_work_that_is_done_at_least_once():
    assert all(speed > 0 for speed in forecast.measured_speeds(seconds=0.0))
