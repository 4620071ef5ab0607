"""The real vLLM against plain Hugging Face: every log-prob, before and after both kinds of sync.

What only a GPU has is tested with vLLM's own classes on the CPU, each said where it is used.
"""
import os
import random
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models import make
from parts import run as running
from ada_sampler import SamplerConfig, collect
from parts.logprobs import token_logprobs
from parts import engine as engine_module
from parts.engine import (adapted_layers, adapter_options, advice_on, new_adapter_folder,
                          remove_dead_adapters, seed_everything)
from parts.models import tiny_folder
from parts.policy import Row, load_policy
from parts.problems import chains


@pytest.fixture(scope="module")
def folder():
    """Its responses end by themselves now and then, and are cut off at 12 tokens now and then."""
    return tiny_folder()


@pytest.fixture(scope="module", params=["merge", "adapter"])
def engine(request, folder):
    from parts.engine import Engine

    engine = Engine(folder, max_model_len=128, max_num_seqs=64, dtype="float32",
                    sync_mode=request.param)
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
    return [engine.tokenizer.encode(f"<|user|>{p['problem']}<|assistant|>")
            for p in chains("train", count)]


def gap(engine, policy, rollouts, ids):
    """max |log mu - log pi| over all tokens of all rollouts."""
    rows = [Row(p + r.token_ids, len(p), r.logprobs, 0.0) for p, group in zip(ids, rollouts)
            for r in group]
    with torch.no_grad():
        pi = token_logprobs(policy, rows)[0]
    return (pi - torch.tensor([x for row in rows for x in row.mu])).abs().max().item()


@pytest.mark.engine
def test_logprobs_agree_before_and_after_updates(engine, folder):
    policy, ids = policy_for(folder), prompts(engine)
    for step in range(3):
        engine.sync(policy)
        rollouts = engine.generate(ids, n=8, max_tokens=12)
        reasons = {r.finish_reason for group in rollouts for r in group}
        assert reasons == {"stop", "length"}  # with the end token, and cut off
        end = engine.tokenizer.eos_token_id
        for r in (r for group in rollouts for r in group):
            assert (r.token_ids[-1] == end) == (r.finish_reason == "stop")
            assert end not in r.token_ids[:-1]
            assert len(r.token_ids) == len(r.logprobs) <= 12
        assert gap(engine, policy, rollouts, ids) < 1e-4
        move(policy, 0.05, seed=step)
        # the policy did move, so a sync that does nothing would show
        assert gap(engine, policy, rollouts, ids) > 1e-2


@pytest.mark.engine
def test_same_random_state_same_rollouts(engine, folder):
    engine.sync(policy_for(folder))
    ids, found = prompts(engine), []
    for _ in range(2):
        running.reseed(0, 1, "test")
        found.append(engine.generate(ids, n=4, max_tokens=12))
    assert found[0] == found[1]
    running.reseed(0, 2, "test")
    assert engine.generate(ids, n=4, max_tokens=12) != found[0]


@pytest.mark.engine
def test_syncing_many_times_leaves_the_trainer_untouched(engine, folder):
    policy = policy_for(folder, moved=0.05)
    before = {n: p.clone() for n, p in policy.named_parameters()}
    for _ in range(5):
        engine.sync(policy)
    assert all(torch.equal(before[n], p) for n, p in policy.named_parameters())


class PromptEcho:
    """Grades by the prompt: correct with a probability that differs between prompts, and notes what
    came home where."""

    def __init__(self, engine):
        self.engine, self.rng, self.verdicts = engine, random.Random(0), {}

    def submit(self, key, problem, rollout):
        self.verdicts[key] = SimpleNamespace(reward=float(self.rng.random() < problem.p),
                                             status="wrong")

    def result(self, key):
        return self.verdicts.pop(key)


@pytest.mark.engine
@pytest.mark.parametrize("sampler", ["ada-balance", "ada-pos", "uniform"])
def test_results_stay_with_their_own_prompt_when_few_remain(engine, folder, sampler):
    """Most prompts close at once, three never do: whatever comes back for them must have been
    written for them."""
    policy = policy_for(folder, moved=0.05)
    engine.sync(policy)
    problems = [SimpleNamespace(prompt_ids=p, p=0.0 if i in (1, 8, 13) else 0.5)
                for i, p in enumerate(prompts(engine, 16))]
    rollouts = running.WatchedEngine(engine, 12)
    groups = collect(problems, SamplerConfig(sampler=sampler, n=4, M=8, N=4), rollouts,
                     PromptEcho(engine))
    rollouts.bar.close()
    assert [g.problem for g in groups] == problems
    if sampler != "uniform":
        assert [len(groups[i].pool) for i in (1, 8, 13)] == [32, 32, 32]
    # log-probs under the group's own prompt equal the engine's: another prompt's sample would not
    # pass
    assert gap(engine, policy, [[s.rollout for s in g.pool] for g in groups],
               [p.prompt_ids for p in problems]) < 1e-4
    other = [problems[i - 1].prompt_ids for i in range(16)]
    assert gap(engine, policy, [[s.rollout for s in g.pool] for g in groups], other) > 0.1


@pytest.mark.engine
def test_logits_are_float32_in_a_bfloat16_engine(folder, monkeypatch):
    """Rounded to bfloat16, as is vLLM's default, they alone make up a good part of the gap."""
    import gc

    import vllm
    from parts.engine import Engine

    def mean_gap(overrides):
        with monkeypatch.context() as patch:
            if overrides is not None:
                true = vllm.LLM
                patch.setattr(vllm, "LLM", lambda
                              *a, **options: true(*a, **options | dict(hf_overrides=overrides)))
            engine = Engine(folder, max_model_len=128, max_num_seqs=64, dtype="bfloat16")
        policy = load_policy(folder, dtype="bfloat16", rank=8, alpha=16, seed=0, device="cpu")
        seed_everything(random.Random(0))
        ids = prompts(engine)
        rows = [Row(p + r.token_ids, len(p), r.logprobs, 0.0)
                for p, group in zip(ids, engine.generate(ids, n=16, max_tokens=12)) for r in group]
        with torch.no_grad():
            found = (token_logprobs(policy, rows)[0]
                     - torch.tensor([x for row in rows for x in row.mu])).abs().mean().item()
        del engine.llm, engine
        gc.collect()
        return found

    as_it_is, rounded = mean_gap(None), mean_gap({})
    print(f"mean |log mu - log pi|: {as_it_is:.2e}, with rounded logits {rounded:.2e}")
    assert as_it_is < 0.8 * rounded


@pytest.mark.engine
def test_a_precision_without_a_kernel_is_refused_in_one_sentence(folder, monkeypatch):
    """What vLLM raises where a kernel is missing names internals;
    other errors are not covered up."""
    import vllm
    from parts.engine import Engine

    def no_kernel(*_, **options):
        raise NotImplementedError(
            "'_C' object has no attribute 'dynamic_per_token_scaled_fp8_quant'\nmore")

    monkeypatch.setattr(vllm, "LLM", no_kernel)
    with pytest.raises(
        SystemExit, match="cannot run this model with rollouts in fp8.*--rollout-dtype bfloat16"):
        Engine(folder, max_model_len=64, dtype="fp8")
    with pytest.raises(NotImplementedError):
        Engine(folder, max_model_len=64, dtype="bfloat16")
    monkeypatch.undo()
    with pytest.raises(SystemExit, match="use --sync merge"):
        Engine(folder, max_model_len=64, sync_mode="adapter", routes=True)


@pytest.mark.engine
@pytest.mark.parametrize("options",
                         [dict(dtype="bfloat16", kv_cache_dtype="fp8"), dict(dtype="fp8")])
def test_low_precision_rollouts_stay_near_the_full_precision_trainer(folder, options):
    from parts.engine import Engine

    engine = Engine(folder, max_model_len=64, max_num_seqs=8, **options)
    ids = prompts(engine, 3)
    policy = policy_for(folder, moved=0.05)
    engine.sync(policy)
    rollouts = engine.generate(ids, n=2, max_tokens=6)
    assert 1e-4 < gap(engine, policy, rollouts, ids) < 1.0  # another precision, the same policy


# ----------------------------------------------------------------------------------------- requests
@pytest.mark.engine
def test_temperatures_are_in_the_log_probs_the_engines_and_those_of_single_requests(folder):
    from parts.engine import Engine

    engine = Engine(folder, max_model_len=128, max_num_seqs=64, dtype="float32", temperature=0.7)
    policy, ids = policy_for(folder), prompts(engine)
    engine.sync(policy)
    for p, prompt in enumerate(ids):
        engine.submit((p, 0.7), prompt, 12)
        engine.submit((p, 2.0), prompt, 12, temperature=2.0)
        engine.submit((p, 0.0), prompt, 12, temperature=0.0)
    found = {}
    while engine.busy:
        found.update(engine.step())
    for temperature, other in ((0.7, 1.0), (2.0, 0.7)):
        rows = [Row(ids[p] + r.token_ids, len(ids[p]), r.logprobs, 0.0)
                for (p, asked), r in found.items() if asked == temperature]
        mu_T = torch.tensor([x for row in rows for x in row.mu])
        with torch.no_grad():
            assert (token_logprobs(policy, rows, temperature)[0] - mu_T).abs().max() < 1e-4
            assert (token_logprobs(policy, rows, other)[0] - mu_T).abs().mean() > 0.02
    model = policy.get_base_model()
    with torch.no_grad():
        first = [model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax() for prompt in ids]
    assert [found[p, 0.0].token_ids[0] for p in range(len(ids))] == first  # greedy


@pytest.mark.engine
def test_a_batch_that_ran_ahead_is_finished_before_the_weights_change(folder):
    """On a GPU vLLM keeps a queue of two batches. Here the CPU's engine steps through that same
    queue (`step_with_batch_queue` of vLLM's core; only the asynchronous scheduler is missing): a
    batch is left in it when the last response has ended by itself."""
    from parts.engine import Engine

    engine = Engine(folder, max_model_len=128, max_num_seqs=8, dtype="float32")
    core = engine.llm.llm_engine.engine_core.engine_core
    core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
    core.step_fn = core.step_with_batch_queue
    policy, ids = policy_for(folder), prompts(engine)
    engine.sync(policy)
    left_behind = False
    for step in range(3):
        for p, prompt in enumerate(ids):
            engine.submit(p, prompt, 12)
        found = {}
        while engine._keys:
            found.update(engine.step())
        left_behind |= bool(core.batch_queue)
        assert engine.busy == bool(core.batch_queue)
        move(policy, 0.05, seed=step)
        engine.sync(policy)
        assert not engine.busy and not core.batch_queue
    assert left_behind, "or the test tests nothing"
    rollouts = engine.generate(ids, n=2, max_tokens=12)
    assert not core.batch_queue and gap(engine, policy, rollouts, ids) < 1e-4


@pytest.mark.engine
def test_many_long_prompts_with_seeds_of_their_own_are_read_and_answered(engine):
    """More tokens than a step takes: vLLM fails at a prompt with a seed that it reads in parts."""
    rng = random.Random(0)
    for i in range(60):
        engine.submit(i, [rng.randrange(300) for _ in range(120)], 4, seed=i)
    finished = []
    while engine.busy:
        finished += engine.step()
    assert len(finished) == 60


@pytest.mark.engine
def test_weights_do_not_change_under_a_response(engine, folder, monkeypatch):
    policy = policy_for(folder)
    engine.submit("half-way", prompts(engine)[0], 12)
    engine.step()
    with pytest.raises(RuntimeError, match="still being written"):
        engine.sync(policy)
    engine.abort()
    engine.sync(policy)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(RuntimeError, match="did not drop its cache"):
            engine.sync(policy)


# ------------------------------------------------------------------------------------- random state
@pytest.mark.slow
def test_the_seed_of_a_request_on_a_gpu_is_decided_too(monkeypatch):
    """vLLM's GPU runner draws it from numpy's global state: its own class, with plain memory for
    the GPU's."""
    pytest.importorskip("vllm")
    engine_module.configure_vllm(on_cpu=True)
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample import states

    class Plain:
        def __init__(self, size, dtype):
            self.np = torch.zeros(size, dtype=dtype).numpy()

        def copy_to_uva(self):
            pass

    monkeypatch.setattr(states, "UvaBackedTensor", Plain)

    def seeds(seed):
        seed_everything(random.Random(seed))
        drawn = states.SamplingStates(max_num_reqs=4, vocab_size=10)
        for i in range(4):
            drawn.add_request(i, SamplingParams())
        return drawn.seeds.np.tolist(), torch.rand(3).tolist()

    assert seeds(1) == seeds(1)
    assert len(set(seeds(1)[0] + seeds(2)[0])) == 8 and seeds(1)[1] != seeds(2)[1]


def test_every_phase_of_a_run_seeds_all_generators():
    import numpy

    from parts.run import reseed

    found = []
    for step in (1, 1, 2):
        reseed(0, step, "training")
        found.append((numpy.random.rand(), torch.rand(1).item()))
    assert found[0] == found[1] and found[0][0] != found[2][0] and found[0][1] != found[2][1]


# ----------------------------------------------------------------------------------------- adapters
def test_a_small_ram_disk_is_not_filled(tmp_path, monkeypatch):
    """64 MB is what a container has by default, and a 1.5B adapter of rank 16 takes 70 MiB,
    twice."""
    disk = tmp_path / "shm"
    disk.mkdir()
    monkeypatch.setattr(engine_module, "RAM_DISK", str(disk))
    free = dict(shm=64 << 20)
    monkeypatch.setattr(engine_module.shutil, "disk_usage",
                        lambda path: SimpleNamespace(free=free["shm"]))
    made = [new_adapter_folder(70 << 20)]
    free["shm"] = 256 << 20
    made.append(new_adapter_folder(70 << 20))
    on_disk = [Path(folder).parent == disk for folder in made]
    for folder in made:
        os.rmdir(folder)
    assert on_disk == [False, True]
    monkeypatch.setattr(engine_module, "RAM_DISK", str(tmp_path / "missing"))
    elsewhere = new_adapter_folder(1)
    os.rmdir(elsewhere)
    assert Path(elsewhere).parent != tmp_path / "missing"


def test_adapters_of_killed_processes_are_collected_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "RAM_DISK", str(tmp_path))
    make = "import sys; from parts import engine; engine.RAM_DISK = sys.argv[1]; "
    make += "print(engine.new_adapter_folder(1)); "
    make += "import os, signal; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", make, str(tmp_path)], capture_output=True,
                          text=True,
                          cwd=Path(engine_module.__file__).parent.parent)
    dead, own = Path(done.stdout.strip()), Path(new_adapter_folder(1))
    foreign = tmp_path / f"minirl-adapter-another.host-{dead.name.split('-')[-2]}-x"
    users = tmp_path / "minirl-adapter-of-mine"
    for folder in (foreign, users):
        folder.mkdir()
    assert dead.exists()
    remove_dead_adapters()
    assert not dead.exists() and own.exists() and foreign.exists() and users.exists()


@pytest.mark.engine
def test_a_start_collects_what_dead_processes_left(folder, tmp_path, monkeypatch):
    from parts.engine import Engine

    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(engine_module, "RAM_DISK", str(tmp_path))
    left = tmp_path / f"minirl-adapter-{engine_module.platform.node()}-{dead}-x"
    left.mkdir()
    with pytest.raises(SystemExit, match="use --sync merge"):  # it need not come up for that
        Engine(folder, max_model_len=64, sync_mode="adapter", routes=True)
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank, served", [(1, 8), (8, 8), (12, 16), (16, 16), (33, 64), (300, 320)])
def test_a_rank_that_vllm_does_not_know_is_rounded_up(rank, served, monkeypatch):
    monkeypatch.setattr(engine_module, "adapted_layers", lambda model: [])
    monkeypatch.setattr("parts.routing_replay.is_mixture", lambda model: False)
    engine_module.configure_vllm(on_cpu=True)
    assert adapter_options("any", rank, on_cpu=False, routes=False)["max_lora_rank"] == served
    with pytest.raises(SystemExit, match="up to rank 512, and this one has 1000"):
        adapter_options("any", 1000, on_cpu=False, routes=False)


@pytest.mark.slow
def test_what_vllm_adapts_is_what_peft_adapts(tmp_path):
    """Names by architecture; the head is not among them (vLLM wraps it by itself in some families,
    and fails)."""
    from transformers import (GPTNeoXConfig, LlamaConfig, OlmoeConfig, Phi3Config, PhiConfig,
                              Qwen2Config,
                              Qwen2MoeConfig, Qwen3Config)
    from transformers import AutoModelForCausalLM

    small = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                 num_attention_heads=2,
                 num_key_value_heads=2, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    for number, kind in enumerate((LlamaConfig, Qwen2Config, Qwen3Config, Phi3Config, PhiConfig,
                                   GPTNeoXConfig, OlmoeConfig)):
        folder = tmp_path / str(number)
        config = kind(**small)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        policy = load_policy(str(folder), dtype="float32", rank=2, alpha=4, seed=0, device="cpu")
        adapted = {name.split(".lora_A")[0].split(".")[-1] for name, _ in policy.named_parameters()
                   if ".lora_A" in name}
        assert adapted == set(adapted_layers(str(folder))), kind.__name__
        assert not {"lm_head", "embed_out"} & adapted
    Qwen2MoeConfig(**small).save_pretrained(tmp_path / "qwen2_moe")
    with pytest.raises(SystemExit, match="cannot serve this mixture of experts.*--sync merge"):
        adapter_options(str(tmp_path / "qwen2_moe"), 8, on_cpu=False, routes=False)


# ------------------------------------------------------------------ what is asked of it, without it
def test_what_vllm_is_asked_for(monkeypatch):
    """Log-probs of what was sampled from, no top-p of the model's own, logits in float32."""
    asked = {}
    vllm = SimpleNamespace(LLM=lambda model, **options: asked.update(options))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    engine_module.start("model", dict(kv_cache_dtype="auto"), "float32")
    assert asked["logprobs_mode"] == "processed_logprobs"
    assert asked["generation_config"] == "vllm"
    assert asked["hf_overrides"] == {"head_dtype": "float32"}
    assert asked["trust_remote_code"] is False


def bare_engine(done: list, finished: list = ()):
    """The engine around a stand-in for vLLM that notes what is asked of it in `done`."""
    engine = engine_module.Engine.__new__(engine_module.Engine)
    core = SimpleNamespace(batch_queue=[])
    inner = SimpleNamespace(
        step=lambda: list(finished), has_unfinished_requests=lambda: False,
        engine_core=SimpleNamespace(engine_core=core))
    engine.llm = SimpleNamespace(
        llm_engine=inner, reset_prefix_cache=lambda: done.append("cache") or True,
        collective_rpc=lambda name, kwargs: done.append(name))
    engine.on_cpu, engine.sync_mode, engine.recorder, engine.steps = False, "merge", None, 0
    engine.tokenizer, engine._keys = make.build_tokenizer(), {out.request_id: 7 for out in finished}
    return engine


def test_nothing_cached_survives_a_sync():
    """The keys and values of the old weights go first: a batch that ran ahead meets one policy."""
    done = []
    bare_engine(done).sync(None)
    assert done == ["cache", "reload_weights"]


def test_tokens_are_those_that_were_sampled():
    """1 and 8 are two tokens, although the text 18 would be one; the end token is one of them."""
    tokenizer = make.build_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["1", "8", make.END])
    assert len(tokenizer.encode("18")) == 1
    output = SimpleNamespace(token_ids=ids, logprobs=SimpleNamespace(logprobs=[-1.0, -2.0, -3.0]),
                             finish_reason="stop", routed_experts=None)
    engine = bare_engine([], [SimpleNamespace(request_id="1", finished=True, outputs=[output])])
    ((key, rollout),) = engine.step()
    assert (key, rollout.text) == (7, "18")
    assert rollout.token_ids == ids and rollout.logprobs == [-1.0, -2.0, -3.0]


# -------------------------------------------------------------------------------- what vLLM refuses
@pytest.mark.slow
def test_what_vllm_refuses_is_explained_in_one_sentence():
    """The messages are vLLM's own where its functions run without a GPU."""
    engine_module.configure_vllm(on_cpu=True)
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory as check
    from vllm.v1.worker.utils import request_memory

    def raised(call):
        with pytest.raises(ValueError) as error:
            call()
        return error.value

    for available in (0, 100):
        error = raised(lambda: check(available, lambda: 2**30, 4096, lambda _: 0))
        assert "raise --engine-memory" in advice_on(error, "bfloat16", "auto")
    card = SimpleNamespace(device_="cuda:0", total_memory=24 << 30, free_memory=2 << 30)
    error = raised(lambda: request_memory(card, SimpleNamespace(gpu_memory_utilization=0.45)))
    assert "end what else runs on it" in advice_on(error, "bfloat16", "auto")
    assert "does not fit" in advice_on(RuntimeError("CUDA out of memory. Tried to allocate"),
                                       "bfloat16", "auto")
    assert advice_on(ValueError("something else"), "bfloat16", "auto") == ""


@pytest.mark.slow
def test_a_vocabulary_too_large_for_adapters_gets_one_sentence():
    """vLLM's own words, should it wrap the head; it need not (`adapted_layers` leaves it out)."""
    engine_module.configure_vllm(on_cpu=True)
    from vllm.lora.layers import LogitsProcessorWithLoRA

    head = SimpleNamespace(base_layer=SimpleNamespace(vocab_size=262_144))
    with pytest.raises(ValueError) as error:
        LogitsProcessorWithLoRA.create_lora_weights(head, 1, None)
    assert "use --sync merge" in advice_on(error.value, "float32", "auto")
