"""The engine: its answers have the right key, temperature, weights and random state."""
import contextlib
import json
import os
import shutil
import sys
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch

import models_small
from ada_sampler import SamplerConfig, collect
from engines import gap, rows_of, serve
from models import make
from models.problems import chains
from parts import engine as engines
from parts.engine import Engine, EngineForSampler, Rollout, configure_vllm, seed_all
from parts.grader import Verdict
from parts.models import MODELS, find_model
from world import known_model, settled

FOLDER = str(MODELS / "tiny")
STOP = make.build_tokenizer().convert_tokens_to_ids("1")  # ends an answer, as do 12 tokens


@pytest.mark.engine
def test_results_stay_with_their_own_prompt_when_few_remain():
    """Most prompts end after their first round, and three take all rounds."""
    policy, verdicts, never = models_small.policy(FOLDER, rank=8), {}, (1, 8, 13)
    grader = SimpleNamespace(
        submit=lambda key, *_: verdicts.update({key: float(key[0] not in never and key[1] % 2)}),
        result=lambda key: Verdict("wrong", reward=verdicts.pop(key)))
    with serve(FOLDER, sync_mode="adapter", temperature=0.7, max_num_seqs=8,
               stop_token_ids=[STOP]) as engine:
        engine.sync(policy)
        ids = [engine.tokenizer.encode(f"<|user|>{p['problem']}<|assistant|>")
               for p in chains("train", 16)]
        problems = [SimpleNamespace(prompt_ids=prompt) for prompt in ids]
        rollouts = EngineForSampler(engine, 12)
        groups = collect(problems, SamplerConfig(n=4, M=8, N=4), rollouts, grader)
        rollouts.bar.close()
        end = engine.tokenizer.eos_token_id
    from vllm.engine.arg_utils import EngineArgs

    assert {*ALWAYS, *ON_CARD, *FP8} <= {field.name for field in fields(EngineArgs)}
    assert [g.problem for g in groups] == problems
    assert [i for i, group in enumerate(groups) if len(group.pool) == 32] == [*never]
    # under another prompt the log-probs would not be the engine's
    pools = [[s.rollout for s in g.pool] for g in groups]
    assert gap(policy, rows_of(ids, pools), 0.7).max() < 1e-4
    assert gap(policy, rows_of(ids[1:] + ids[:1], pools), 0.7).max() > 0.1
    # only the given tokens end an answer, and not the one in the model's config
    samples = [r for pool in pools for r in pool]
    assert {r.finish_reason for r in samples} == {"stop", "length"}
    assert any(end in r.token_ids[:-1] for r in samples)
    for r in samples:
        assert (r.token_ids[-1] == STOP) == (r.finish_reason == "stop")
        assert STOP not in r.token_ids[:-1] and len(r.token_ids) == len(r.logprobs) <= 12


# ------------------------------------------------------------------------------- without an engine
@pytest.fixture
def vllm(monkeypatch):
    """It replaces the package, and notes what it is asked to do."""
    llm = mock.MagicMock(get_tokenizer=make.build_tokenizer)
    llm.llm_engine.has_unfinished_requests.return_value = False
    llm.llm_engine.engine_core.engine_core.batch_queue = []
    package = mock.Mock(SamplingParams=dict, LLM=mock.Mock(return_value=llm))
    package.RequestOutputKind.FINAL_ONLY = "at the end"
    for name in ("vllm", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(engines, "CpuRecorder", lambda llm: "recorder")
    monkeypatch.setattr(engines, "build_for_cpu", lambda: True)
    return package


ALWAYS = dict(
    trust_remote_code=False, disable_log_stats=True, use_tqdm_on_load=False, config_format="hf",
    tokenizer_mode="hf", load_format="safetensors", logprobs_mode="processed_logprobs",
    generation_config="vllm", hf_overrides=dict(head_dtype="float32"), max_model_len=300,
    max_num_seqs=250, seed=3, dtype="float16", kv_cache_dtype="auto", enable_prefix_caching=True)
ON_CPU = dict(enforce_eager=True, block_size=32, enable_chunked_prefill=False,
              max_num_batched_tokens=4096)
SIZES = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 250, 375, 500]
ON_CARD = dict(gpu_memory_utilization=0.4, enable_sleep_mode=False, max_num_batched_tokens=8192,
               enable_return_routed_experts=False,
               compilation_config=dict(cudagraph_capture_sizes=SIZES))
LORA = dict(enable_lora=True, max_loras=1, max_lora_rank=8,
            lora_target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])  # of a Phi-3
FP8 = dict(dtype="bfloat16", quantization="online",
           quantization_config=dict(linear="fp8_per_channel", ignore=["*.mlp.gate"]))


@pytest.mark.parametrize("on_cpu, how, wanted", [
    (True, dict(max_model_len=5000, routes=True, kv_cache_dtype="fp8"), ON_CPU | dict(
        max_model_len=5000, max_num_batched_tokens=5000, enable_prefix_caching=False,
        kv_cache_dtype="fp8")),
    (True, dict(dtype="fp8", sync_mode="adapter", lora_rank=8), ON_CPU | LORA | FP8),
    (False, dict(sleep=True, sync_mode="adapter", lora_rank=9, routes=True), ON_CARD | LORA | dict(
        enable_sleep_mode=True, max_lora_rank=16, enable_return_routed_experts=True)),
    (False, dict(dtype="fp8", routes=True), ON_CARD | FP8 | dict(
        enable_return_routed_experts=True, quantization="fp8_per_tensor",
        quantization_config=dict(ignore=["*.mlp.gate"]))),
    (False, dict(dtype="float32", sync_mode="adapter"), None),
    (True, dict(routes=True, sync_mode="adapter"), None)])
def test_vllm_is_started_with_these_options(vllm, monkeypatch, on_cpu, how, wanted):
    monkeypatch.setattr(engines, "build_for_cpu", lambda: on_cpu)
    usual = dict(max_model_len=300, max_num_seqs=250, seed=3, dtype="float16", memory_share=0.4,
                 architecture=SimpleNamespace(model_type="phi3"))
    with contextlib.nullcontext() if wanted else pytest.raises(SystemExit, match="--sync merge"):
        assert bool(Engine("a model", **usual | how).recorder) == (on_cpu and "routes" in how)
        assert vllm.LLM.call_args_list == [mock.call("a model", **ALWAYS | wanted)]


@pytest.mark.parametrize("error, reason", [(AssertionError(), "AssertionError"), *(
    (kind("no\n room\a"), "no room\\x07") for kind in (ValueError, RuntimeError, AttributeError))])
def test_what_vllm_refuses_is_one_sentence(vllm, error, reason):
    vllm.LLM = mock.Mock(side_effect=error)
    with pytest.raises(SystemExit) as ended:
        Engine("a model", max_model_len=9)
    assert str(ended.value).startswith(
        f"vLLM did not start ({reason}). Its gpu_memory_utilization is --engine-memory (on a CPU: "
        "VLLM_CPU_KVCACHE_SPACE, in GiB), its max_num_seqs --engine-sequences, its max_model_len "
        "the sum of --max-prompt-tokens and --max-tokens, its dtype minirl.py's --rollout-dtype.")


@pytest.mark.parametrize("family, rope", [
    ("phi3", dict(type="longrope")),  # published files say it so
    ("llama", dict(rope_type="longrope", original_max_position_embeddings=64, rope_theta=1e4))])
def test_with_longrope_only_the_original_context_can_be_used(tmp_path, family, rope):
    folder = shutil.copytree(models_small.model_folder(family), tmp_path / "model")
    rope |= dict(short_factor=[1.0] * 16, long_factor=[4.0] * 16)
    config = json.loads((folder / "config.json").read_text()) | {
        "original_max_position_embeddings": 64, "max_position_embeddings": 256,
        "rope_scaling" if family == "phi3" else "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(config))
    architecture = find_model(str(folder)).config
    engines.require_original_context(architecture, 64)
    with pytest.raises(SystemExit, match="65 tokens, but at most 64 work"):
        Engine("a model", max_model_len=65, architecture=architecture)


def test_the_environment_of_vllm_is_set_where_the_user_has_not_set_it():
    always = dict(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    on_cpu = dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
                  TORCHDYNAMO_DISABLE="1", ONEDNN_PRIMITIVE_CACHE_CAPACITY="256")
    for usual in (always, always | on_cpu):
        for users in ({}, dict.fromkeys(usual, "mine")):
            with mock.patch.dict(os.environ, users, clear=True):
                configure_vllm(on_cpu="TORCHDYNAMO_DISABLE" in usual)
                found = dict(os.environ)
            assert found == usual | users | dict(VLLM_ENABLE_V1_MULTIPROCESSING="0")


def test_the_engine_of_a_run_has_its_settings_and_records_experts_that_are_replayed(monkeypatch):
    made = []
    monkeypatch.setattr(engines, "Engine", lambda path, **how: made.append(how))
    for name, replay, on_cpu in (("tiny-moe", "r3", False), ("tiny-moe", "r2", False),
                                 ("tiny-moe", "r2", True), ("tiny", None, True)):
        monkeypatch.setattr(engines, "build_for_cpu", lambda on_cpu=on_cpu: on_cpu)
        model = known_model(name)
        config = settled(model=name, replay=replay, mini_batches=2, temperature=0.5, seed=3,
                         rollout_dtype="bfloat16", lora_rank=4, engine_sequences=9, max_tokens=1,
                         kv_cache_dtype="fp8", engine_memory=0.3, sleep=True)
        engines.start_engine(config, model, [7])
        assert made.pop() == dict(
            temperature=0.5, seed=3, dtype="bfloat16", kv_cache_dtype="fp8", lora_rank=4,
            max_num_seqs=9, stop_token_ids=[7], sync_mode="merge", max_model_len=256 + 2,
            memory_share=0.3, sleep=True, architecture=model.config,
            routes=replay == "r3" or on_cpu and name == "tiny-moe")


def test_a_phase_draws_the_same_again_and_no_other_phase_draws_it():
    def drawn(*phase):
        rng = seed_all(*phase)  # on a GPU numpy decides what vLLM samples, on a CPU torch
        return rng.random(), numpy.random.rand(), torch.rand(1).item()

    phases = (1, 23, "a"), (12, 3, "a"), (1, 2, "a"), (1, 23, "b")
    assert drawn(*phases[0]) == drawn(*phases[0])
    assert all(len({*numbers}) == 4 for numbers in zip(*(drawn(*phase) for phase in phases)))


def test_a_cache_that_is_not_dropped_is_an_error(vllm, monkeypatch):
    """On a GPU vLLM runs ahead. What it has begun is finished before the weights change."""
    trim = mock.Mock()
    monkeypatch.setattr(engines.ctypes, "CDLL", lambda _: trim)
    engine, llm = Engine("a model", max_model_len=9), vllm.LLM.return_value
    queue = llm.llm_engine.engine_core.engine_core.batch_queue
    queue.append("a batch")
    llm.llm_engine.step = lambda: queue.clear() or []
    llm.reset_prefix_cache = mock.Mock(side_effect=lambda: not queue)
    assert engine.busy
    engine.sync(None)
    assert llm.collective_rpc.call_args.args == ("reload_weights",) and not engine.busy
    assert trim.mock_calls == [mock.call.malloc_trim(0)]
    engine.submit("half-way", [1], 5)
    with pytest.raises(RuntimeError, match="1 answers are still"):
        engine.sync(None)
    engine._keys.clear()
    llm.reset_prefix_cache = lambda: False
    with pytest.raises(RuntimeError):
        engine.sync(None)
    assert llm.collective_rpc.call_count == 1


@pytest.mark.parametrize("on_cpu, sleeps", [(True, True), (False, False), (False, True)])
def test_only_an_engine_that_sleeps_drops_its_cache_and_then_goes_to_sleep(
        vllm, monkeypatch, on_cpu, sleeps):
    monkeypatch.setattr(engines, "build_for_cpu", lambda: on_cpu)
    engine = Engine("a model", max_model_len=9, sleep=sleeps)
    engine.sleep()
    engine.wake()
    done = [call for call in vllm.LLM.return_value.mock_calls if "." not in call[0]]
    assert done == ([] if on_cpu or not sleeps else [
        mock.call.reset_prefix_cache(), mock.call.sleep(level=1), mock.call.wake_up()])


def test_a_request_asks_for_what_it_should_and_its_answer_has_the_tokens_that_were_sampled(vllm):
    """The tokens 1 and 8 stay two, although the text 18 is one token. The end token is included."""
    engine = Engine("a model", max_model_len=9, temperature=0.7, stop_token_ids=[7])
    engine.submit("one", (1, 2), 5)
    engine.submit("other", [3], 6, seed=4)
    usual = dict(temperature=0.7, stop_token_ids=[7], detokenize=False, ignore_eos=True, logprobs=0,
                 flat_logprobs=True, output_kind="at the end", skip_clone=True)
    inner = vllm.LLM.return_value.llm_engine
    assert inner.add_request.call_args_list == [
        mock.call(name, dict(prompt_token_ids=ids), usual | own, lora_request=None)
        for name, ids, own in (
            ("1", [1, 2], dict(max_tokens=5, seed=None)), ("2", [3], dict(max_tokens=6, seed=4)))]
    tags = dict(additional_special_tokens=["<think>", "</think>"])  # as some models mark them
    engine.tokenizer.add_special_tokens(tags)
    ids = engine.tokenizer.convert_tokens_to_ids(["<think>", "1", "</think>", "8", make.END])
    assert len(engine.tokenizer.encode("18")) == 1
    output = SimpleNamespace(
        token_ids=ids, logprobs=SimpleNamespace(logprobs=[-1.0] * 5), finish_reason="stop",
        routed_experts=numpy.full((9, 2, 1), 255, "uint16"))  # as on a GPU
    inner.step.return_value = [SimpleNamespace(request_id="2", finished=True, outputs=[output]),
                               SimpleNamespace(request_id="1", finished=False)]
    ((key, rollout),) = engine.step()
    assert key == "other" and [*engine._keys] == ["1"]
    assert rollout.routes.shape == (9, 2, 1) and rollout.routes.max() == 255
    assert replace(rollout, routes=None) == Rollout(
        ids, [-1.0] * 5, "stop", "18", raw="<think>1</think>8<|endoftext|>")  # for --reward
