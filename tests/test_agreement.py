"""Trainer and engine have the same policy: every model, in each precision, with each kind of sync,
with the real vLLM. They agree. After an update they differ until a sync, and the probe detects a
sync without one layer. For every family the second reference is Hugging Face."""
from types import SimpleNamespace

import pytest
import torch

from engines import gap, rows_of, serve, smollm
from models_small import DENSE, FAMILIES, model_folder, move, plain_logprobs, policy, second
from models.problems import chains
from parts import models
from parts.engine import seed_all
from parts.logprobs import Sequence, token_logprobs
from parts.models import SMOLLM, TINY, check_family, own_class, MODELS
from parts.probe import Probe, tolerances


def cell(model, dtype="float32", sync="merge", cache="auto", trainer="float32", marks=(), **config):
    """A model in an engine of this dtype and cache. config: changes to a random model's config."""
    return pytest.param(model, dtype, sync, cache, trainer, config, marks=marks,
                        id=f"{model}-{dtype}-{sync}")


FP8_CACHE = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM has no fp8 cache on this processor")
CELLS = [
    cell("tiny"), cell("tiny", sync="adapter"), cell("tiny", "fp8"), cell("tiny-moe"),
    cell("tiny", "bfloat16", "adapter", trainer="bfloat16"),
    cell("tiny", "float16", "adapter", "fp8", trainer="float16", marks=FP8_CACHE),
    *(cell(family) for family in DENSE if family != "qwen2"),  # which tiny is
    # where the layers' names differ, or vLLM has no model of its own for the family
    *(cell(family, sync="adapter") for family in ("olmo2", "phi3", "smollm3")),
    # above 258,048 words vLLM refuses an adapter on the head; ours has none there
    cell("gemma3_text", sync="adapter", vocab_size=262_144),
    cell(SMOLLM, sync="adapter", marks=pytest.mark.slow)]


def folder_of(model: str, config: dict) -> str:
    if model == SMOLLM:
        return smollm()
    return str(MODELS / model) if model in TINY else model_folder(model, **config)


def forgetful(engine, layer: int):
    """A sync that does not hand over what the adapter does to this layer."""
    sound = engine.sync

    def sync(policy):
        kept = {p: p.detach().clone() for name, p in second(policy).items()
                if f".layers.{layer}." in name}
        for p in kept:
            p.data.zero_()
        sound(policy)
        for p, value in kept.items():
            p.data.copy_(value)

    return sync


@pytest.mark.engine
@pytest.mark.parametrize("model, dtype, sync, cache, trainer, config", CELLS)
def test_they_agree_again_after_each_sync_and_a_lost_layer_is_seen(
        model, dtype, sync, cache, trainer, config):
    folder, mixture = folder_of(model, config), model == "tiny-moe"
    bounds = tolerances(trainer, dtype, cache, mixture)
    exact = bounds[0] < 1e-3
    # With 0.03 in 8 bits, an engine one update behind was noticed on some processors only.
    margin, size = (0.05, 0.03) if exact else (0.3, 0.1)
    large = model == SMOLLM or config  # a large head
    with serve(folder, dtype=dtype, sync_mode=sync, kv_cache_dtype=cache, lora_rank=8) as engine:
        trained = policy(folder, trainer, moved=0, rank=8)
        prompts = [engine.tokenizer.encode(f"<|user|>{problem['problem']}<|assistant|>")
                   for problem in chains("test", 3 if large else 24)]
        problems = [SimpleNamespace(prompt_ids=ids) for ids in prompts]

        def probed():
            """As the program does: the engine has the base weights."""
            return Probe(engine, trained, problems, tolerances=bounds, max_tokens=12)

        judge = probed()
        for step in range(2 if model in TINY else 1):
            move(trained, size, seed=step)
            with pytest.raises(SystemExit):
                judge.check()
            engine.sync(trained)
            found = judge.check()
        assert abs(found["probe_slope"] - 1) < margin
        seed_all(0)
        rows = rows_of(prompts, engine.generate(prompts[:6], n=4, max_tokens=12))
        assert gap(trained, rows).max() < 1e-4 or not exact
        layer = 0 if "fp8" in (dtype, cache) else trained.config.num_hidden_layers // 2
        for p in second(trained).values():
            p.data.zero_()
        engine.sync(trained)
        engine.sync = forgetful(engine, layer)
        with pytest.raises(SystemExit, match="trainer disagree"):
            probed()


@pytest.mark.engine
def test_an_adapter_of_some_layers_is_merged_into_the_engine():
    """By default PEFT adapts only queries and values of many families."""
    from peft import LoraConfig, get_peft_model

    folder = folder_of("tiny", {})
    trained = get_peft_model(models.load_model(folder, "float32"), LoraConfig(
        target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"))
    move(trained, 0.1)
    with serve(folder) as engine:
        engine.sync(trained)
        prompts = [engine.tokenizer.encode(f"<|user|>{n}+5=?<|assistant|>") for n in range(9)]
        rows = rows_of(prompts, engine.generate(prompts, n=2, max_tokens=12))
    assert gap(trained, rows).max() < 1e-4


# ----------------------------------------------------------------------------- without an engine
@pytest.mark.parametrize("family", DENSE)
def test_logprobs_and_gradients_are_those_of_plain_hugging_face(family):
    trained = policy(family, moved=0.1, rank=8)
    row = Sequence(torch.randint(300, (20,)).tolist(), 5)
    wanted = plain_logprobs(trained, row, 0.8)
    found = token_logprobs(trained, [row], temperature=0.8)[0]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    upstream = torch.randn(len(wanted))
    adapter = [p for p in trained.parameters() if p.requires_grad]
    for mine, theirs in zip(torch.autograd.grad(found, adapter, upstream),
                            torch.autograd.grad(wanted, adapter, upstream)):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    # the model without its adapter, loaded by others: nothing of the family was lost on the way
    config = trained.get_base_model().config
    plain = own_class(config).from_pretrained(model_folder(family), attn_implementation="eager")
    with trained.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(plain_logprobs(trained, row), plain_logprobs(plain, row),
                                   atol=1e-4, rtol=1e-4)


def test_the_families_that_were_compared_are_taken_and_others_are_refused_by_name():
    assert set(models.FAMILIES) == {*FAMILIES}
    with pytest.raises(SystemExit, match="gemma3 cannot be trained here"):
        check_family(SimpleNamespace(model_type="gemma3"))
