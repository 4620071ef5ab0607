"""Model families end to end, with tiny random weights: trainer against Hugging Face and the engine.

They differ in the way from the last hidden state to the logits, in the names of their linear
layers, and in whether vLLM has a model of its own for the family. Mixtures of experts:
test_routing_replay.py.
"""
from types import SimpleNamespace

import pytest
import torch

from engines import gap, move, policy_for, rows_of, serve
from models import make
from parts import models
from parts.logprobs import Row, head_of, token_logprobs
from parts.models import check_family, own_class
from parts.routing_replay import ROUTERS

SIZES = dict(vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128)
WIDE = dict(head_dim=32)  # else it does not follow from the other sizes
FAMILIES = dict(
    qwen2={}, qwen3=WIDE, llama={}, mistral=dict(sliding_window=None), olmo2={}, phi3={},
    gemma=WIDE,
    gemma2=WIDE | dict(final_logit_softcapping=2.0, attn_logit_softcapping=1.0,
                       query_pre_attn_scalar=32),
    gemma3_text=WIDE | dict(final_logit_softcapping=2.0), phi={}, smollm3={})
# Adapters: where the layers' names differ, or vLLM has no model of its own. Above 258,048 words
# vLLM refuses an adapter on the head; ours has none there.
ADAPTERS = dict(olmo2={}, phi3={}, phi={}, smollm3={}, gemma3_text=dict(vocab_size=262_144))


def build(family, folder, **changes) -> str:
    """A random model of this family in Hugging Face format; biases too are random."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    end = make.build_tokenizer()
    ids = dict(bos_token_id=None, eos_token_id=end.eos_token_id, pad_token_id=end.pad_token_id)
    config = AutoConfig.for_model(
        family, **SIZES | ids | dict(initializer_range=0.15) | FAMILIES[family] | changes)
    model = own_class(config)(config)  # an engine before this one may have changed the shared class
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.5)
    model.save_pretrained(folder)
    make.build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_plain_hugging_face(family, tmp_path):
    folder = build(family, tmp_path)
    policy = policy_for(folder, moved=0.1)
    row = Row(torch.randint(300, (20,)).tolist(), 5, [], 0.0)
    ids = torch.tensor([row.ids])
    log_p = policy(input_ids=ids).logits[0, 4:-1].div(0.8).log_softmax(-1)
    wanted = log_p.gather(1, ids[0, 5:, None])[:, 0]
    found = token_logprobs(policy, [row], temperature=0.8)[0]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    upstream, adapter = torch.randn(len(wanted)), [p for p in policy.parameters()
                                                   if p.requires_grad]
    for mine, theirs in zip(torch.autograd.grad(found, adapter, upstream),
                            torch.autograd.grad(wanted, adapter, upstream)):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    head = head_of(policy.get_base_model())
    assert head.cap == (2.0 if family in ("gemma2", "gemma3_text") else None)
    assert (head.bias is not None) == (family == "phi")
    # the model without its adapter, loaded by others: nothing of the family was lost on the way
    config = policy.get_base_model().config
    plain = own_class(config).from_pretrained(folder, attn_implementation="eager")
    with policy.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(policy(input_ids=ids).logits, plain(input_ids=ids).logits,
                                   atol=1e-4, rtol=1e-4)


def test_the_families_that_were_compared_are_taken_and_others_are_refused_by_name():
    assert set(models.FAMILIES) == {*FAMILIES, *ROUTERS}
    check_family(SimpleNamespace(model_type="qwen2"))
    for family in ("gpt2", "granite", "gemma3", "qwen2_moe"):
        with pytest.raises(SystemExit, match=f"family {family} cannot be trained.*Take a Qwen"):
            check_family(SimpleNamespace(model_type=family))


def test_what_was_done_to_hugging_faces_class_does_not_reach_the_trainer(tmp_path, monkeypatch):
    """vLLM changes the class of a family that it serves with Hugging Face's code."""
    from transformers import Olmo2Model

    def refuse(*_, **__):
        raise AssertionError("Current vLLM config is not set")

    folder = build("olmo2", tmp_path)
    monkeypatch.setattr(Olmo2Model, "__init__", refuse)
    monkeypatch.setattr(Olmo2Model, "__call__", refuse)
    token_logprobs(policy_for(folder), [Row([1, 2, 3, 4], 2, [], 0.0)])


# ---------------------------------------------------------------------------------- the engine
@pytest.mark.engine
@pytest.mark.parametrize("family, sync, changes", [
    *((family, "merge", {}) for family in FAMILIES),
    *((family, "adapter", changes) for family, changes in ADAPTERS.items())])
def test_engine_and_trainer_agree_before_and_after_an_update(family, sync, changes, tmp_path):
    prompts = [[5, 6, 7, 8], [90, 91, 92]]
    folder = build(family, tmp_path, **changes)
    with serve(folder, sync_mode=sync, lora_rank=8) as engine:
        def drawn():
            return rows_of(prompts, engine.generate(prompts, n=3, max_tokens=6))

        policy = policy_for(folder)
        engine.sync(policy)
        rows = drawn()
        assert gap(policy, rows).max() < 2e-5
        move(policy, 0.1)
        assert gap(policy, rows).max() > 1e-2  # so a sync that does nothing would show
        engine.sync(policy)
        assert gap(policy, drawn()).max() < 2e-5
