"""A model's name, and its folder: what is found, and what is broken in a sentence."""
import json
import re
import shutil
from types import SimpleNamespace

import pytest

from conftest import ROOT
from parts import models
from parts.logprobs import check_family

TINY = ROOT / "models" / "tiny"


def load(folder):
    models.fetch_model(str(folder), 9)
    models.load_tokenizer(str(folder))


def refusal(folder) -> str:
    with pytest.raises(SystemExit) as end:
        load(folder)
    sentence = str(end.value)
    assert sentence.isprintable() and sentence.endswith(".") and str(folder) in sentence
    return sentence


@pytest.fixture
def folder(tmp_path):
    """A sound one, which a test may break."""
    return shutil.copytree(TINY, tmp_path / "model")


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


@pytest.mark.parametrize("name", [
    "mystery-7b", "/gone", "./gone", "runs/a/checkpoints/step-1", "x" * 5000, "~nobody/x", "a\0b"])
def test_a_name_that_is_none_gets_one_sentence(name):
    with pytest.raises(SystemExit, match="--model tiny") as end:
        models.resolve_model(name)
    assert len(str(end.value)) < 700 and str(end.value).isprintable()


# ----------------------------------------------------------------------------------------- folders
@pytest.mark.parametrize("settings, words", [
    (dict(hidden_size=0), "config.json of"), (dict(num_attention_heads=0), "config.json of"),
    (dict(vocab_size=-1), "config.json of"), (dict(hidden_act="x"), "config.json of"),
    (dict(rope_scaling=dict(type="nonsense", factor=2.0)), "config.json of.*nonsense"),
    (dict(rope_scaling=dict(rope_type="yarn")), "rope_type'='yarn': {'factor'}"),
    (dict(hidden_size="many"), "'hidden_size' expected int, got str"),
    (dict(intermediate_size=96), "weights of.*is .128, 288. in model.safetensors, and .128, 96."),
    (dict(model_type="nothing"), "does not recognize"),
])
def test_a_config_that_fits_no_model_is_refused_with_its_cause(folder, settings, words):
    change(folder, **settings)
    sentence = refusal(folder)
    assert re.search(words, sentence), sentence
    assert "Mend or replace the folder." in sentence and "hub" not in sentence


def cut(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:len(whole) // 2])


def in_two(folder):
    """The second of two files is missing, as after a download that was broken off."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate("ab", 1)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=names)))


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_words(folder):
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize("harm, words", [
    (cut, "weights of .*incomplete metadata"), (in_two, "weights of .*00002-of-00002.safetensors"),
    (pickled, "weights of .*no model.safetensors, and files of other kinds are not read"),
    (without_words, "tokenizer .*knows no words"),
    (lambda folder: (folder / "config.json").unlink(), "model .*Unrecognized"),
    (lambda folder: (folder / "config.json").write_text("[]"), "Cannot load the model"),
    (lambda folder: (folder / "config.json").write_text("{"), "Cannot load the model"),
])
def test_files_that_are_broken_or_missing_are_named(folder, harm, words):
    load(folder)  # it was sound
    harm(folder)
    assert re.search(words, refusal(folder))


def test_a_model_that_the_hub_has_as_pickles_only_is_refused(monkeypatch):
    """Before a byte of it is here; where the hub cannot be asked, nothing is refused."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(TINY)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: config)
    on_hub = dict(old=["config.json", "pytorch_model.bin"], new=["model.safetensors", "x.bin"],
                  large=["model.safetensors.index.json", "model-00001-of-00002.safetensors"])
    known = {f"a/{name}": SimpleNamespace(siblings=[SimpleNamespace(rfilename=n) for n in names])
             for name, names in on_hub.items()}
    monkeypatch.setattr(models, "go_offline_if_unreachable", lambda repo, _: known.get(repo))
    for name in ("a/new", "a/large", "a/unknown"):
        assert models.fetch_model(name, 9) == name
    with pytest.raises(SystemExit, match="a/old: there is no model.safetensors.*connection to the"):
        models.fetch_model("a/old", 9)


def test_quantized_weights_are_not_trained(folder):
    change(folder, quantization_config=dict(quant_method="gptq", bits=4))
    from transformers import AutoConfig

    with pytest.raises(SystemExit, match="quantized.*take the model that they were made of"):
        check_family(AutoConfig.from_pretrained(folder))


def test_a_model_that_reads_too_little_is_refused(folder):
    with pytest.raises(SystemExit, match="at most 1024 tokens.*--max-tokens add up to 1025"):
        models.fetch_model(str(folder), 1025)
    assert models.fetch_model(str(folder), 1024) == str(folder)


def test_code_of_a_model_is_never_run(tmp_path, capsys):
    """transformers would ask "run the custom code? [y/N]", and `yes |` would answer."""
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'owned')!r}, 'w')\nclass C: pass\nclass T: pass\n")
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="evil",
                                                          auto_map=dict(AutoConfig="evil.C"))))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(dict(auto_map=dict(AutoTokenizer=["evil.T", None]))))
    for read in (lambda path: models.fetch_model(path, 9), models.load_tokenizer):
        with pytest.raises(SystemExit, match="Python code of its own, which is never run"):
            read(str(tmp_path))
    assert not (tmp_path / "owned").exists() and "[y/N]" not in capsys.readouterr().out
