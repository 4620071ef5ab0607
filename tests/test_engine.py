"""The real vLLM against plain Hugging Face: every log-prob, before and after an update, with both kinds of sync."""
import random
from types import SimpleNamespace

import pytest
import torch

from parts import run as running
from parts import tiny
from ada_sampler import SamplerConfig, collect
from parts.logprobs import token_logprobs
from parts.policy import Row, load_policy
from parts.probe import Probe

pytestmark = pytest.mark.engine
EXACT = ("max", 1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A briefly trained tiny model: its responses end by themselves now and then, and are cut off now and then."""
    path = tmp_path_factory.mktemp("model")
    tiny.build(path, progress=False, steps=60, batch=16)
    return str(path)


@pytest.fixture(scope="module", params=["merge", "adapter"])
def engine(request, folder):
    from parts.engine import Engine

    engine = Engine(folder, max_model_len=128, max_num_seqs=64, dtype="float32", sync_mode=request.param)
    yield engine
    engine.close()
    del engine.llm


def policy_for(folder, seed=0, moved=0.0):
    policy = load_policy(folder, dtype="float32", rank=8, alpha=16, seed=seed, device="cpu")
    move(policy, moved, seed)
    return policy


def move(policy, size, seed=0):
    """A stand-in for optimizer steps: a random change of the adapter."""
    torch.manual_seed(seed)
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            p.data += size * torch.randn_like(p)


def prompts(engine, count=8):
    return [engine.tokenizer.encode(f"<|user|>{p['problem']}<|assistant|>") for p in tiny.problems("train", count)]


def gap(engine, policy, rollouts, ids):
    """max |log mu - log pi| over all tokens of all rollouts."""
    rows = [Row(p + r.token_ids, len(p), r.logprobs, 0.0) for p, group in zip(ids, rollouts) for r in group]
    with torch.no_grad():
        pi = token_logprobs(policy, rows)[0]
    return (pi - torch.tensor([x for row in rows for x in row.mu])).abs().max().item()


def test_logprobs_agree_before_and_after_updates(engine, folder):
    policy, ids = policy_for(folder), prompts(engine)
    for step in range(3):
        engine.sync(policy)
        rollouts = engine.generate(ids, n=8, max_tokens=12)
        reasons = {r.finish_reason for group in rollouts for r in group}
        assert reasons == {"stop", "length"}  # with the end token, and cut off
        end = engine.tokenizer.eos_token_id
        for r in (r for group in rollouts for r in group):
            assert (r.token_ids[-1] == end) == (r.finish_reason == "stop") and end not in r.token_ids[:-1]
            assert len(r.token_ids) == len(r.logprobs) <= 12
        assert gap(engine, policy, rollouts, ids) < 1e-4
        move(policy, 0.05, seed=step)
        assert gap(engine, policy, rollouts, ids) > 1e-2  # the policy did move, so a sync that does nothing would show


def probe_for(engine, policy, folder):
    """The probe is made while the engine has the base weights."""
    engine.sync(policy_for(folder))
    return Probe(engine, policy, [SimpleNamespace(prompt_ids=p) for p in prompts(engine, 4)], tolerance=EXACT, max_tokens=12)


def test_the_probe_catches_weights_that_did_not_arrive(engine, folder, monkeypatch):
    policy = policy_for(folder)
    probe = probe_for(engine, policy, folder)
    engine.sync(policy)
    assert probe.check()["probe_gap_max"] < 1e-4
    move(policy, 1e-5)  # too little for the tolerance: the engine's answers must have changed at all
    with pytest.raises(SystemExit, match="did not reach the engine"):
        probe.tolerance = ("mean", 5e-2)  # as in bf16, where small updates hide in the noise
        probe.check()
    engine.sync(policy)
    probe.check()
    move(policy, 0.05)
    probe.tolerance = EXACT
    with pytest.raises(SystemExit):
        probe.check()
    engine.sync(policy)
    probe.check()


def test_the_probe_catches_a_corrupted_reload(engine, folder):
    policy = policy_for(folder, moved=0.05)
    probe = probe_for(engine, policy, folder)
    engine.sync(policy)
    probe.check()
    broken = policy_for(folder, moved=0.05)
    for name, p in broken.named_parameters():
        if "layers.1.mlp.down_proj.lora_B" in name:
            p.data[:16] = 0
    engine.sync(broken)
    with pytest.raises(SystemExit, match="disagree"):
        probe.check()
    engine.sync(policy)


def test_same_random_state_same_rollouts(engine, folder):
    engine.sync(policy_for(folder))
    ids, found = prompts(engine), []
    for _ in range(2):
        running.reseed(0, 1, "test")
        found.append(engine.generate(ids, n=4, max_tokens=12))
    assert found[0] == found[1]
    running.reseed(0, 2, "test")
    assert engine.generate(ids, n=4, max_tokens=12) != found[0]


def test_syncing_many_times_leaves_the_trainer_untouched(engine, folder):
    policy = policy_for(folder, moved=0.05)
    before = {n: p.clone() for n, p in policy.named_parameters()}
    for _ in range(5):
        engine.sync(policy)
    assert all(torch.equal(before[n], p) for n, p in policy.named_parameters())


class PromptEcho:
    """Grades by the prompt: correct with a probability that differs between prompts, and notes what came home where."""

    def __init__(self, engine):
        self.engine, self.rng, self.verdicts = engine, random.Random(0), {}

    def submit(self, key, problem, rollout):
        self.verdicts[key] = SimpleNamespace(reward=float(self.rng.random() < problem.p), status="wrong")

    def result(self, key):
        return self.verdicts.pop(key)


@pytest.mark.parametrize("sampler", ["ada-balance", "ada-pos", "uniform"])
def test_results_stay_with_their_own_prompt_when_few_remain(engine, folder, sampler):
    """Most prompts close at once, three never do: whatever comes back for them must have been written for them."""
    policy = policy_for(folder, moved=0.05)
    engine.sync(policy)
    problems = [SimpleNamespace(prompt_ids=p, p=0.0 if i in (1, 8, 13) else 0.5) for i, p in enumerate(prompts(engine, 16))]
    rollouts = running.WatchedEngine(engine, 12)
    groups = collect(problems, SamplerConfig(sampler=sampler, n=4, M=8, N=4), rollouts, PromptEcho(engine))
    rollouts.bar.close()
    assert [g.problem for g in groups] == problems
    if sampler != "uniform":
        assert [len(groups[i].pool) for i in (1, 8, 13)] == [32, 32, 32]
    # log-probs under the group's own prompt equal the engine's: another prompt's sample would not pass
    assert gap(engine, policy, [[s.rollout for s in g.pool] for g in groups], [p.prompt_ids for p in problems]) < 1e-4
    other = [problems[i - 1].prompt_ids for i in range(16)]
    assert gap(engine, policy, [[s.rollout for s in g.pool] for g in groups], other) > 0.1


def test_temperature_is_in_the_logprobs(folder):
    """At temperature 0.7 the engine reports the log-probs it sampled from, and the trainer reproduces them."""
    from parts.engine import Engine

    engine = Engine(folder, max_model_len=128, max_num_seqs=64, dtype="float32", temperature=0.7)
    policy, ids = policy_for(folder), prompts(engine)
    engine.sync(policy)
    rollouts = engine.generate(ids, n=4, max_tokens=12)
    rows = [Row(p + r.token_ids, len(p), r.logprobs, 0.0) for p, group in zip(ids, rollouts) for r in group]
    mu = torch.tensor([x for row in rows for x in row.mu])
    with torch.no_grad():
        assert (token_logprobs(policy, rows, temperature=0.7)[0] - mu).abs().max() < 1e-4
        assert (token_logprobs(policy, rows, temperature=1.0)[0] - mu).abs().mean() > 0.05


def test_bfloat16_engine_and_trainer_agree_on_average(folder):
    from parts.engine import Engine

    engine = Engine(folder, max_model_len=128, max_num_seqs=64, dtype="bfloat16")
    policy = load_policy(folder, dtype="bfloat16", rank=8, alpha=16, seed=0, device="cpu", checkpointing=True)
    problems = [SimpleNamespace(prompt_ids=p) for p in prompts(engine, 4)]
    probe = Probe(engine, policy, problems, tolerance=("mean", 5e-2), max_tokens=12)
    move(policy, 0.05)
    engine.sync(policy)
    gaps = probe.check()
    assert 1e-6 < gaps["probe_gap_mean"] < 5e-2


def test_a_precision_without_a_kernel_is_refused_in_one_sentence(folder, monkeypatch):
    """What vLLM raises where a kernel is missing names internals; other errors are not covered up."""
    import vllm
    from parts.engine import Engine

    def no_kernel(*_, **options):
        raise NotImplementedError("'_C' object has no attribute 'dynamic_per_token_scaled_fp8_quant'\nmore")

    monkeypatch.setattr(vllm, "LLM", no_kernel)
    with pytest.raises(SystemExit, match="cannot run this model with rollouts in fp8.*--rollout-dtype bfloat16"):
        Engine(folder, max_model_len=64, dtype="fp8")
    with pytest.raises(NotImplementedError):
        Engine(folder, max_model_len=64, dtype="bfloat16")
    monkeypatch.undo()
    with pytest.raises(SystemExit, match="use --sync merge"):
        Engine(folder, max_model_len=64, sync_mode="adapter", routes=True)


@pytest.mark.parametrize("options", [dict(dtype="bfloat16", kv_cache_dtype="fp8"), dict(dtype="fp8")])
def test_low_precision_rollouts_stay_near_the_full_precision_trainer(folder, options):
    from parts.engine import Engine

    engine = Engine(folder, max_model_len=64, max_num_seqs=8, **options)
    ids = prompts(engine, 3)
    policy = policy_for(folder, moved=0.05)
    engine.sync(policy)
    rollouts = engine.generate(ids, n=2, max_tokens=6)
    assert 1e-4 < gap(engine, policy, rollouts, ids) < 1.0  # another precision, the same policy
