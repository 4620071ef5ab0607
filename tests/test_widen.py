"""models/widen.py on small GGUF files."""
import json

import pytest
import torch
from helpers import ROOT
from models_small import model_folder
from transformers import AutoTokenizer

from models import widen
from parts.models import find_model, load_model

gguf = pytest.importorskip("gguf")
BYTES = gguf.GGMLQuantizationType.Q8_0
NAMES = {  # Hugging Face -> GGUF
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers": "blk"}
TURN = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"


def interleaved(weight, heads: int):
    """How llama.cpp stores the rows of Llama's query and key weights."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write(file, family: str, lacks: str = "") -> dict:
    """A GGUF file of a small model of this family. Returns the weights that it holds."""
    model = load_model(model_folder(family), "float32")
    config, tokens = model.config, AutoTokenizer.from_pretrained(ROOT / "models" / "tiny")
    words = sorted(tokens.get_vocab(), key=tokens.get_vocab().get)
    merges = json.loads((ROOT / "models/tiny/tokenizer.json").read_text())["model"]["merges"]
    writer, held = gguf.GGUFWriter(file, family), {}
    for what, value in dict(
            block_count=config.num_hidden_layers, context_length=256,
            embedding_length=config.hidden_size, feed_forward_length=config.intermediate_size,
            head_count=config.num_attention_heads, head_count_kv=config.num_key_value_heads,
            layer_norm_rms_eps=config.rms_norm_eps, vocab_size=config.vocab_size,
            tokenizer_model="gpt2", eos_token_id=tokens.eos_token_id, chat_template=TURN,
            token_list=words + [f"<unused{i}>" for i in range(len(words), config.vocab_size)],
            token_merges=[" ".join(pair) for pair in merges]).items():
        getattr(writer, f"add_{what}")(value)
    for name, value in model.state_dict().items():
        value, there = value.numpy(), name
        for old, new in NAMES.items():
            there = there.replace(old, new)
        if there == lacks:
            continue
        held[name] = value
        if there.endswith(("norm.weight", "bias")):
            writer.add_tensor(there, value)
            continue
        held[name] = gguf.quants.dequantize(gguf.quants.quantize(value, BYTES), BYTES)
        kind = there.rpartition("attn_")[2]
        if family == "llama" and kind in ("q.weight", "k.weight"):
            heads = config.num_attention_heads if kind[0] == "q" else config.num_key_value_heads
            value = interleaved(value, heads)
        writer.add_tensor(there, gguf.quants.quantize(value, BYTES), raw_dtype=BYTES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_folder_holds_the_files_weights_and_its_chat_template(tmp_path, capsys, family):
    held = write(tmp_path / "small.gguf", family)
    widen.main([str(tmp_path / "small.gguf"), str(tmp_path / "made")])
    assert "sha256" in capsys.readouterr().out
    model = load_model(str(tmp_path / "made"), "bfloat16")
    assert model.config.model_type == family
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, torch.tensor(held[name]).bfloat16()), name
    asked = [dict(role="user", content="7+5=?")]
    tokenizer = find_model(str(tmp_path / "made")).tokenizer
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "<|user|>7+5=?<|assistant|>"


def test_what_cannot_be_read_ends_in_one_sentence_and_leaves_no_folder(tmp_path):
    made, good = tmp_path / "made", tmp_path / "good.gguf"
    write(good, "qwen2")
    write(tmp_path / "lacks.gguf", "qwen2", lacks="blk.1.ffn_up.weight")
    whole = good.read_bytes()
    for name, content, reason in (
            ("absent.gguf", b"", "cannot read"),
            ("lacks.gguf", b"", "no weights for .*1.mlp.up_proj"),  # as in one of several parts
            ("cut.gguf", whole[:len(whole) // 2], "cannot read"),
            ("odd.gguf", whole.replace(b"qwen2", b"qwen9"), "cannot read.*qwen9")):
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit, match=reason):
            widen.main([str(tmp_path / name), str(made)])
        assert not made.exists()
    made.mkdir()
    with pytest.raises(SystemExit, match="exists already"):
        widen.main([str(good), str(made)])
