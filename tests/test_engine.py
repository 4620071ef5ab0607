"""The engine: its answers have the right key, temperature, weights and random state."""
from collections import deque
from types import SimpleNamespace

import numpy
import pytest
import torch

import models_small
from ada_sampler import SamplerConfig, collect
from engines import gap, rows_of, serve
from models import make
from models_small import move
from models.problems import chains
from parts import engine as engines
from parts.engine import Engine, EngineForSampler
from parts.grader import Verdict
from parts.models import MODELS
from world import known_model, settled

FOLDER = str(MODELS / "tiny")
STOP = make.build_tokenizer().convert_tokens_to_ids("1")  # ends an answer, as do 12 tokens


@pytest.fixture(scope="module")
def engine():
    with serve(FOLDER, sync_mode="adapter", temperature=0.7, max_num_seqs=8,
               stop_token_ids=[STOP]) as engine:
        yield engine


def prompts(engine, count=8):
    return [engine.tokenizer.encode(f"<|user|>{p['problem']}<|assistant|>")
            for p in chains("train", count)]


def trainer(moved=0.0):
    return models_small.policy(FOLDER, moved=moved, rank=8)


@pytest.mark.engine
def test_results_stay_with_their_own_prompt_when_few_remain(engine):
    """Most prompts end after their first round, and three take all rounds."""
    policy = trainer(moved=0.05)
    engine.sync(policy)
    problems = [SimpleNamespace(prompt_ids=ids) for ids in prompts(engine, 16)]
    rollouts, verdicts, never = EngineForSampler(engine, 12), {}, (1, 8, 13)
    grader = SimpleNamespace(
        submit=lambda key, *_: verdicts.update({key: float(key[0] not in never and key[1] % 2)}),
        result=lambda key: Verdict("wrong", reward=verdicts.pop(key)))
    groups = collect(problems, SamplerConfig(n=4, M=8, N=4), rollouts, grader)
    rollouts.bar.close()
    assert [g.problem for g in groups] == problems
    assert [i for i, group in enumerate(groups) if len(group.pool) == 32] == [*never]
    # under another prompt the log-probs would not be the engine's
    pools, ids = [[s.rollout for s in g.pool] for g in groups], [p.prompt_ids for p in problems]
    assert gap(policy, rows_of(ids, pools), 0.7).max() < 1e-4
    assert gap(policy, rows_of(ids[1:] + ids[:1], pools), 0.7).max() > 0.1
    # only the given tokens end an answer, and not the one in the model's config
    samples, end = [r for pool in pools for r in pool], engine.tokenizer.eos_token_id
    assert {r.finish_reason for r in samples} == {"stop", "length"}
    assert any(end in r.token_ids[:-1] for r in samples)
    for r in samples:
        assert (r.token_ids[-1] == STOP) == (r.finish_reason == "stop")
        assert STOP not in r.token_ids[:-1] and len(r.token_ids) == len(r.logprobs) <= 12


# ----------------------------------------------------------------------------------------- requests
@pytest.mark.engine
def test_a_request_has_its_own_temperature_and_seed(engine):
    policy, ids, found = trainer(), prompts(engine), {}
    engine.sync(policy)
    for p, prompt in enumerate(ids):
        engine.submit((p, 0.7), prompt, 12)
        engine.submit((p, 2.0), prompt, 12, temperature=2.0)
        engine.submit((p, 0.0), prompt, 12, temperature=0.0)
        for number, seed in enumerate((5, 5, 6)):
            engine.submit((p, "seed", number), prompt, 12, seed=seed)
    while engine.busy:
        found.update(engine.step())
    for temperature, other in ((0.7, 1.0), (2.0, 0.7)):
        rows = rows_of(ids, [[found[p, temperature]] for p in range(len(ids))])
        assert gap(policy, rows, temperature).max() < 1e-4
        assert gap(policy, rows, other).mean() > 0.02
    with torch.no_grad():
        first = [policy(input_ids=torch.tensor([prompt])).logits[0, -1].argmax() for prompt in ids]
    assert [found[p, 0.0].token_ids[0] for p in range(len(ids))] == first  # greedy
    one, same, other = ([found[p, "seed", number].token_ids for p in range(len(ids))]
                        for number in range(3))
    assert one == same != other


@pytest.mark.engine
def test_a_batch_that_ran_ahead_is_finished_before_the_weights_change(engine, monkeypatch):
    """On a GPU vLLM keeps a queue of two batches, through which the CPU's engine steps here. A
    batch is left in it when the last response has ended by itself."""
    policy, left_behind, ids = trainer(), False, prompts(engine)
    core = engine.llm.llm_engine.engine_core.engine_core
    monkeypatch.setattr(core, "batch_queue_size", 2)
    monkeypatch.setattr(core, "batch_queue", deque(maxlen=2))
    monkeypatch.setattr(core, "step_fn", core.step_with_batch_queue)
    engine.sync(policy)
    for step in range(3):
        for p, prompt in enumerate(ids):
            engine.submit(p, prompt, 12)
        while engine._keys:
            engine.step()
        left_behind |= bool(core.batch_queue)
        assert engine.busy == bool(core.batch_queue)
        move(policy, 0.05, seed=step)
        engine.sync(policy)
        assert not engine.busy and not core.batch_queue
    assert left_behind
    rows = rows_of(ids, engine.generate(ids, n=2, max_tokens=12))
    assert not core.batch_queue and gap(policy, rows, 0.7).max() < 1e-4


# ------------------------------------------------------------------------------- without an engine
def bare_engine(done: list, finished: list = ()):
    """The engine around a mock of vLLM that records its calls in `done`."""
    engine, core = Engine.__new__(Engine), SimpleNamespace(batch_queue=[])
    inner = SimpleNamespace(
        step=lambda: list(finished), has_unfinished_requests=lambda: False,
        engine_core=SimpleNamespace(engine_core=core))
    engine.llm = SimpleNamespace(
        llm_engine=inner, reset_prefix_cache=lambda: done.append("cache") or True,
        collective_rpc=lambda name, kwargs: done.append(name))
    engine.on_cpu, engine.sync_mode, engine.recorder = False, "merge", None
    engine.tokenizer, engine._keys = make.build_tokenizer(), {out.request_id: 7 for out in finished}
    return engine


def test_the_engine_of_a_run_has_its_settings_and_records_experts_that_are_replayed(monkeypatch):
    made = []
    monkeypatch.setattr(engines, "Engine", lambda _, **how: made.append(how))
    monkeypatch.setattr(engines, "build_for_cpu", lambda: False)  # a CPU's records them always
    for name, replay in (("tiny-moe", "r3"), ("tiny-moe", "r2"), ("tiny", None)):
        config = settled(model=name, replay=replay, mini_batches=2, temperature=0.5, seed=3,
                         rollout_dtype="bfloat16", lora_rank=4, engine_sequences=9)
        engines.start_engine(config, known_model(name), [7])
    assert [how["routes"] for how in made] == [True, False, False]
    wanted = dict(temperature=0.5, seed=3, dtype="bfloat16", lora_rank=4, max_num_seqs=9,
                  stop_token_ids=[7], sync_mode="merge", max_model_len=256 + 64)
    assert all(how | wanted == how for how in made)


def test_a_cache_that_is_not_dropped_is_an_error():
    engine = bare_engine(done := [])
    engine.sync(None)
    assert done == ["cache", "reload_weights"]
    engine.llm.reset_prefix_cache = lambda: False
    with pytest.raises(RuntimeError):
        engine.sync(None)
    engine._keys = {"1": "half-way"}
    with pytest.raises(RuntimeError):
        engine.sync(None)
    assert len(done) == 2


def test_only_an_engine_that_sleeps_drops_its_cache_and_then_goes_to_sleep():
    for sleeps, wanted in ((False, []), (True, ["cache", 1, "awake"])):
        engine = bare_engine(done := [])
        engine.sleeps, engine.llm.sleep = sleeps, lambda level: done.append(level)
        engine.llm.wake_up = lambda: done.append("awake")
        engine.sleep()
        engine.wake()
        assert done == wanted


def test_tokens_are_those_that_were_sampled():
    """The tokens 1 and 8 stay two, although the text 18 is one token. The end token is included."""
    tokenizer = make.build_tokenizer()
    tags = dict(additional_special_tokens=["<think>", "</think>"])  # as some models mark them
    tokenizer.add_special_tokens(tags)
    ids = tokenizer.convert_tokens_to_ids(["<think>", "1", "</think>", "8", make.END])
    assert len(tokenizer.encode("18")) == 1
    output = SimpleNamespace(
        token_ids=ids, logprobs=SimpleNamespace(logprobs=[-1.0] * 5), finish_reason="stop",
        routed_experts=numpy.full((9, 2, 1), 255, "uint16"))  # as on a GPU
    engine = bare_engine([], [SimpleNamespace(request_id="1", finished=True, outputs=[output])])
    engine.tokenizer = tokenizer
    ((key, rollout),) = engine.step()
    assert (key, rollout.text) == (7, "18")
    assert rollout.raw == "<think>1</think>8<|endoftext|>"  # for --reward, which may look at tags
    assert rollout.token_ids == ids and rollout.logprobs == [-1.0] * 5
    assert rollout.routes.shape == (9, 2, 1) and rollout.routes.max() == 255
