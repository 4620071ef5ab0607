"""An exported model is the trained one; a failed export harms nothing. See also test_real.py."""
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from helpers import contents, files_of_at_most
from models_small import policy
from parts.config import Config, resolve
from parts.folder import append, note_start
from parts.models import fetch_model, load_tokenizer, weights_of
from parts.prompts import make_prompts
from recipes import export


def train_at_random(run: Path, model="tiny", steps=(3,), size=0.01, dtype="float32", **flags):
    """A run's folder as training leaves it, with an adapter that changes a lot."""
    config = resolve(Config(model=model, name=run.name, dtype=dtype, **flags))
    trained = policy(fetch_model(model, 0), dtype, size, rank=config.lora_rank)
    run.mkdir(parents=True)
    note_start(run, asdict(config), 0, weights_of(fetch_model(model, 0)))
    for step in steps:
        append(run / "eval.jsonl", dict(
            step=step, data=config.eval_data, questions=100, k=8, avg=step / 10, ci_low=.1,
            ci_high=.9))
        checkpoint = run / "checkpoints" / f"step-{step:06d}"
        trained.save_pretrained(checkpoint)
        if step != 6:  # which is like TRL's
            (checkpoint / "state.json").write_text(json.dumps(dict(step=step)))
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return train_at_random(tmp_path_factory.mktemp("made") / "runs" / "mine", steps=(3, 6))


# ------------------------------------------------------------------------------ the model
def updates(run: Path, model: str):
    """Name of each adapted weight -> (W, alpha / r * B A), from the files alone, in float64."""
    base = load_file(Path(fetch_model(model, 0)) / "model.safetensors")
    folder = run / "checkpoints" / "step-000003"
    adapter = load_file(folder / "adapter_model.safetensors")
    made = json.loads((folder / "adapter_config.json").read_text())
    found = {}
    for name, a in adapter.items():
        if ".lora_A." in name:
            b = adapter[name.replace("lora_A", "lora_B")]
            layer = name.removeprefix("base_model.model.").replace("lora_A.", "")
            found[layer] = (base.pop(layer).double(),
                            made["lora_alpha"] / made["r"] * b.double() @ a.double())
    return found, base


@pytest.mark.parametrize("model, size, dtype", [
    ("tiny", 0.05, "bfloat16"), ("tiny-moe", 0.05, "float32"), ("tiny", 0.05, "float32"),
    ("tiny", 1e-4, "bfloat16")])  # most of this one is rounded away
def test_the_merged_weights_against_their_definition(
        tmp_path, capsys, monkeypatch, model, size, dtype):
    """And it is said how much has arrived, and how far the log-probs are."""
    asked, log_probs = [], export.log_probs
    monkeypatch.setattr(export, "log_probs", lambda *call: (
        asked.append((call[1], log_probs(*call))) or asked[-1][1]))
    run = train_at_random(tmp_path / "runs" / "mine", model, size=size, dtype="bfloat16")
    (tmp_path / "out").mkdir()  # an empty folder is no reason to refuse
    export.export(str(run), tmp_path / "out", dtype)
    said = capsys.readouterr().out
    (ids, trained), _ = asked
    read = log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), ids)
    gap = (read - trained).abs().max()
    assert f"by at most {gap:.2g} in an answer" in said
    found, left, whole = load_file(tmp_path / "out" / "model.safetensors"), 0.0, 0.0
    adapted, others = updates(run, model)
    assert len(adapted) >= 4 and found.keys() - adapted.keys() <= others.keys()
    for name, (weight, update) in adapted.items():
        weight = weight.bfloat16().double()  # rounded once, and not on the way
        spacing = 2**-8 if dtype == "bfloat16" else 1e-6
        torch.testing.assert_close(found[name].double(), weight + update, rtol=spacing, atol=1e-6)
        left += ((found[name].double() - weight) * update).sum().item()
        whole += update.square().sum().item()
    for name in found.keys() - adapted.keys():
        assert torch.equal(found[name].bfloat16(), others[name].bfloat16()), f"{name} not trained"
    assert f"{left / whole:.1%} of the update" in said and (left / whole < 0.95) == (size == 1e-4)
    lacking = dtype != "float32" and (gap > 0.05 or left / whole < 0.95)
    assert ("--dtype float32 keeps all" in said) == lacking


def test_what_goes_with_the_weights(tmp_path):
    """The ends and the temperature of the training; no path; others may read it. A card of the
    hub's kind, also where the training's template is gone."""
    base = Path(shutil.copytree(fetch_model("tiny", 0), tmp_path / "my-secrets" / "base"))
    for file in base.glob("tokenizer*.json"):  # two ends, as Qwen's base models have
        file.write_text(file.read_text().replace("<|pad|>", "<|im_end|>"))
    flags = base / "generation_config.json"  # as Qwen's, for another way of sampling
    flags.write_text(json.dumps(json.loads(flags.read_text()) | dict(repetition_penalty=1.1)))
    template = str(tmp_path / "my-secrets" / "own.jinja")
    run = train_at_random(tmp_path / "my-secrets" / "runs" / "mine", str(base), temperature=0.9,
                          template=template, data="org/problems,my-secrets/new.jsonl,"
                                                  f"{tmp_path}/my-secrets/some.jsonl")
    out = tmp_path / "out"
    export.export(str(run), out)
    assert not [file for file in out.iterdir() if b"my-secrets" in file.read_bytes()]
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "base" and "`--template own.jinja --max-" in card.content
    assert "on org/problems, new.jsonl, some.jsonl" in card.content
    tokenizer, before = map(AutoTokenizer.from_pretrained, (out, base))
    assert tokenizer.chat_template == before.chat_template
    assert tokenizer.get_vocab() == before.get_vocab()
    kept = GenerationConfig.from_pretrained(out)
    ends = tokenizer.convert_ids_to_tokens(kept.eos_token_id)
    assert ends == ["<|endoftext|>", "<|im_end|>"] and kept.repetition_penalty in (None, 1.0)
    assert (kept.temperature, kept.top_k, kept.do_sample) == (0.9, 0, True)


# ------------------------------------------------------------------------------ which, and the card
def test_the_newest_checkpoint_is_exported_or_the_one_that_is_named(made, tmp_path, capsys):
    export.export(str(made), tmp_path / "newest")
    assert "step-000006, in float32" in capsys.readouterr().out
    export.export(str(made / "checkpoints" / "step-000003"), tmp_path / "named")
    cards = [(tmp_path / name / "README.md").read_text() for name in ("newest", "named")]
    assert "after 6 steps" in cards[0] and "avg@8 0.600 [0.100, 0.900] after step 6" in cards[0]
    assert "after 3 steps" in cards[1] and "0.600" not in cards[1]
    prompts = make_prompts(load_tokenizer(fetch_model("tiny", 0)), "chat", [export.PROBLEM])
    assert all(repr(prompts[0]) in card for card in cards)


def test_a_full_disk_leaves_neither_half_a_model_nor_a_changed_run(made, tmp_path):
    before = contents(made)
    with files_of_at_most(10**6), pytest.raises(SystemExit) as ended:
        export.export(str(made), tmp_path / "out")
    sentence = str(ended.value)
    assert re.match("Could not write .*the run is untouched", sentence) and "\n" not in sentence
    assert list(tmp_path.iterdir()) == [] and contents(made) == before
