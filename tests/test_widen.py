"""models/widen.py on GGUF files that are written here."""
import json

import pytest
import torch
from helpers import ROOT
from models_small import model_folder
from transformers import AutoTokenizer

from models import widen
from parts.models import find_model, load_model

gguf = pytest.importorskip("gguf")
TURN = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"


def write(file) -> dict:
    """A GGUF file of a small Qwen2. Returns its weights."""
    model = load_model(model_folder(), "float32")
    config, tokens = model.config, AutoTokenizer.from_pretrained(ROOT / "models" / "tiny")
    words = sorted(tokens.get_vocab(), key=tokens.get_vocab().get)
    merges = json.loads((ROOT / "models/tiny/tokenizer.json").read_text())["model"]["merges"]
    writer = gguf.GGUFWriter(file, "qwen2")
    for what, value in dict(
            block_count=config.num_hidden_layers, context_length=256,
            embedding_length=config.hidden_size, feed_forward_length=config.intermediate_size,
            head_count=config.num_attention_heads, head_count_kv=config.num_key_value_heads,
            layer_norm_rms_eps=config.rms_norm_eps, vocab_size=config.vocab_size,
            tokenizer_model="gpt2", eos_token_id=tokens.eos_token_id, chat_template=TURN,
            token_list=words + [f"<unused{i}>" for i in range(len(words), config.vocab_size)],
            token_merges=[" ".join(pair) for pair in merges]).items():
        getattr(writer, f"add_{what}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.state_dict()


def test_the_folder_holds_the_files_weights_and_its_chat_template(tmp_path):
    held = write(tmp_path / "small.gguf")
    widen.main([str(tmp_path / "small.gguf"), str(tmp_path / "made")])
    model = load_model(str(tmp_path / "made"), "bfloat16")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, held[name].bfloat16()), name
    asked = [dict(role="user", content="7+5=?")]
    tokenizer = find_model(str(tmp_path / "made")).tokenizer
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "<|user|>7+5=?<|assistant|>"
