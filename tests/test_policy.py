"""The trainer's model: its adapted layers and precisions, and adapters from other programs."""
import contextlib
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from models_small import FAMILIES, MIXTURES, model, policy, second, trained_weights
from parts import policy as policy_module
from parts.logprobs import Sequence, shared_tokens, token_logprobs
from parts.models import load_model, MODELS

ROWS = [Sequence(list(range(start, start + 20)), 5) for start in (10, 50, 90)]


def gradients(trained) -> dict:
    token_logprobs(trained, ROWS)[0].sum().backward()
    return {name: p.grad for name, p in trained.named_parameters() if p.requires_grad}


def test_weights_are_handed_over_with_their_biases_in_the_engines_precision():
    """Qwen2's queries, keys and values have a bias, and vLLM uses only what it is sent."""
    trained = policy(str(MODELS / "tiny"), "bfloat16", moved=0.1)
    base = {name: p.clone() for name, p in trained.base_model.model.state_dict().items()}
    sent = dict(policy_module.merged_weights(trained))
    assert all(torch.equal(base[name], p)  # nothing is rounded away by merging and taking back
               for name, p in trained.base_model.model.state_dict().items())
    assert {name.split(".")[-2] for name in sent if name.endswith("bias")} == {
        "q_proj", "k_proj", "v_proj"}
    for name, value in sent.items():
        layer, _, kind = name.rpartition(".")
        same = torch.equal(value, base[f"{layer}.base_layer.{kind}"])
        assert same == (kind == "bias") and value.dtype == torch.bfloat16


def test_gradient_checkpointing_computes_layers_again_and_changes_no_gradient():
    found, calls = [], []
    for checkpointing in (False, True):
        trained = policy(checkpointing=checkpointing)
        trained.get_base_model().model.layers[0].mlp.register_forward_pre_hook(
            lambda *_: calls.append(checkpointing))
        found.append(gradients(trained))
        assert not trained.config.use_cache  # the keys and values of a pass are not kept, either
        assert bool(shared_tokens(trained, [Sequence([1] * 30, 20)] * 2)) != checkpointing
    assert calls == [False, True, True]  # again in the backward pass, instead of being kept
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_gradient_in_bfloat16_is_as_good_as_with_pefts_float32(monkeypatch):
    """The base weights have 16 bits, the adapter and the log-probs have 32."""
    def gradient(**how):
        trained = policy(**how)
        assert {p.dtype for p in trained_weights(trained).values()} == {torch.float32}
        assert token_logprobs(trained, ROWS)[0].dtype == torch.float32
        return torch.cat([gradient.flatten() for gradient in gradients(trained).values()])

    wanted, ours = gradient(), gradient(dtype="bfloat16", checkpointing=True)
    monkeypatch.setattr(policy_module, "adapt_in_bfloat16", lambda policy: None)
    theirs = gradient(dtype="bfloat16")
    error, pefts = ((found - wanted).norm() / wanted.norm() for found in (ours, theirs))
    assert 0 < error < 1.5 * pefts + 0.01 and error < 0.1 and not torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_but_the_head_is_adapted_and_of_a_mixture_only_the_attention(family):
    """Experts are stacked and have no linear layers, and engines serve their adapters badly."""
    made = model(family)
    linear = {name.split(".")[-1] for name, layer in made.named_modules()
              if isinstance(layer, torch.nn.Linear)}
    assert {*policy_module.adapted_layers(made.config)} == linear - {"lm_head"}
    assert ("o_proj" in linear) and (family in MIXTURES) == ("down_proj" not in linear)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_the_adapter_is_scaled_by_alpha_over_rank_begins_as_nothing_and_follows_the_seed(
        dtype, error):
    """In bfloat16 the error stays below the steps of bfloat16 itself."""
    trained = policy(dtype=str(dtype).removeprefix("torch."), rank=4, alpha=12)
    layer = trained.get_base_model().model.layers[0].mlp.down_proj
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert A.shape[0] == B.shape[1] == 4
    x = torch.randn(2, 30, A.shape[1]).to(dtype)
    ours, base = layer(x), layer.base_layer(x)
    wanted = base + 12 / 4 * x.float() @ A.T @ B.T
    assert ours.dtype == dtype and ours.shape == base.shape and not torch.equal(ours, base)
    assert (ours - wanted).abs().max() <= error * wanted.abs().max()
    with trained.disable_adapter():
        assert torch.equal(layer(x), base)
    assert not any(B.any() for B in second(policy(moved=0)).values())
    a, b, other = (trained_weights(policy(seed=seed)) for seed in (1, 1, 2))
    for name in (name for name in a if "lora_A" in name):
        assert torch.equal(a[name], b[name]) and not torch.equal(a[name], other[name])


@pytest.mark.parametrize("dtype, device, ampere, shares", [
    ("float16", "cuda", False, False), ("float32", "cuda", True, False),
    ("bfloat16", "cuda", True, True), ("float32", "cpu", False, True)])
def test_keys_are_shared_only_where_flash_attention_can_do_it(
        dtype, device, ampere, shares, monkeypatch):
    """Flash needs 16 bits, capability 8.0 and no mask. Elsewhere torch 2.13 would store every score
    if keys were shared. Rows of two lengths, so that a mask for the padding would be seen, too."""
    from transformers.integrations import sdpa_attention

    attention, asked = functional.scaled_dot_product_attention, []

    def watched(q, k, v, attn_mask=None, enable_gqa=False, **how):
        asked.append((attn_mask is None, enable_gqa or k.shape[1] != q.shape[1]))
        return attention(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa, **how)

    trained = policy(dtype=dtype)
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(policy_module, "computes_in_bfloat16", lambda: ampere)
    policy_module.spare_attention(dtype, device)
    token_logprobs(trained, ROWS[:1] + [Sequence(list(range(9)), 5)])
    assert {*asked} == {(True, shares)}


NOT_PLAIN = dict(modules_to_save=["lm_head"], init_lora_weights="pissa", use_dora=True,
                 bias="lora_only", peft_type="IA3", new=1)


@pytest.mark.parametrize("layer, change, said", [
    *(("v_proj", {name: value}, f"is not a plain LoRA adapter .*{name} = ")
      for name, value in NOT_PLAIN.items()),
    # the engine would merge it into the embeddings too if they share weights
    ("lm_head", {}, r"of rank 3 does not fit .*lm_head\S+ is outside of the layers\.$"),
    ("v_proj", {}, ""), ("v_proj", dict(base_model_name_or_path="org/tiny"), "")])
def test_only_plain_lora_of_the_layers_is_loaded(tmp_path, capsys, layer, change, said):
    tiny, file = str(MODELS / "tiny"), tmp_path / "adapter_config.json"
    made = LoraConfig(
        target_modules=["q_proj", layer], task_type="CAUSAL_LM", r=3, lora_alpha=5, revision="v2",
        lora_dropout=0.1, use_rslora=True, layers_to_transform=[1])
    get_peft_model(load_model(tiny, "float32"), made).save_pretrained(
        tmp_path, save_embedding_layers=False)
    change = dict(base_model_name_or_path="org/other") | change
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(SystemExit, match=said) if said else contextlib.nullcontext():
        loaded, rank = policy_module.load_adapter(tiny, str(tmp_path), "float32")
        sent = dict(policy_module.merged_weights(loaded))
        assert rank == 3 and any("k_proj" in name for name in sent)  # next to the adapted q_proj
    warned = f"WARNING: this adapter names org/other as its model, not {tiny}\n"
    assert capsys.readouterr().out == warned * (change == dict(base_model_name_or_path="org/other"))


def test_the_scale_of_the_loss_is_for_float16_only():
    scale = policy_module.loss_scale("float16", "cpu")
    assert scale.state_dict() == dict(scale=2.0**20, growth_factor=2.0, backoff_factor=0.5,
                                      growth_interval=200, _growth_tracker=0)
    assert not any(policy_module.loss_scale(dtype, "cpu").is_enabled()
                   for dtype in ("float32", "bfloat16"))
