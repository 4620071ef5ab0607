"""An exported model is the trained one. See also test_real.py."""
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from models_small import policy
from parts.models import find_model, MODELS
from parts.policy import load_adapter
from parts.prompts import stop_ids
from parts.run_folder import note_start
from recipes import export
from world import settled


def train_at_random(run: Path, model="tiny", size=0.01, dtype="float32", **flags):
    """A run's folder as training leaves it, with an adapter that changes a lot."""
    config, base = settled(model=model, name=run.name, dtype=dtype, **flags), find_model(model)
    trained = policy(base.path, dtype, size, rank=config.lora_rank)
    run.mkdir(parents=True)
    ends = stop_ids(base, config.template, config.stop)
    note_start(run, asdict(config), [], [], model=base.digest, end_tokens=ends)
    trained.save_pretrained(run / "checkpoints" / "step-000003")
    return run


# ------------------------------------------------------------------------------ the model
def updates(run: Path, model: str):
    """Name of each adapted weight -> (W, alpha / r * B A), from the files alone, in float64."""
    base = load_file(find_model(model).folder / "model.safetensors")
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
def test_the_merged_weights_against_their_definition(tmp_path, capsys, model, size, dtype):
    """And the log-probs against the trainer's; a line says how much is left after rounding."""
    run = train_at_random(tmp_path / "runs" / "mine", model, size=size, dtype="bfloat16")
    (tmp_path / "out").mkdir()  # an empty folder is no reason to refuse
    export.export(str(run), tmp_path / "out", dtype)
    said = capsys.readouterr().out
    found, left, whole = load_file(tmp_path / "out" / "model.safetensors"), 0.0, 0.0
    adapted, others = updates(run, model)
    assert len(adapted) >= 4 and found.keys() - adapted.keys() <= others.keys()
    for name, (weight, update) in adapted.items():
        weight = weight.bfloat16().double()  # rounded once, and not on the way
        spacing = 2**-8 if dtype == "bfloat16" else 1e-6
        torch.testing.assert_close(found[name].double(), weight + update, rtol=spacing, atol=1e-6)
        rounded = (weight + update).bfloat16().double()
        left += ((rounded - weight) * update).sum().item()
        whole += update.square().sum().item()
    for name in found.keys() - adapted.keys():
        assert torch.equal(found[name].bfloat16(), others[name].bfloat16()), f"{name} not trained"
    if dtype == "float32":  # nothing is rounded
        assert "of the update" not in said
    else:
        assert f"{left / whole:.1%} of the update is left in bfloat16" in said
        assert (left / whole < 0.95) == (size == 1e-4) == (
            "--dtype float32 keeps all of it" in said)
    trained, _ = load_adapter(find_model(model).path, run / "checkpoints/step-000003", "bfloat16")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        ids = torch.arange(100, 140)[None]
        apart = read(ids).logits.log_softmax(-1) - trained.float()(ids).logits.log_softmax(-1)
    assert apart.abs().max() < (0.2 if dtype == "bfloat16" else 1e-3)


def test_what_goes_with_the_weights(tmp_path, capsys):
    """Ends, lengths and temperature of the training, in both configs; no path; others may read."""
    base = Path(shutil.copytree(str(MODELS / "tiny"), tmp_path / "my-secrets" / "base"))
    for file in base.glob("tokenizer*.json"):  # two ends, as Qwen's base models have
        file.write_text(file.read_text().replace("<|pad|>", "<|im_end|>"))
    flags = base / "generation_config.json"  # as Qwen's, for another way of sampling
    flags.write_text(json.dumps(json.loads(flags.read_text()) | dict(repetition_penalty=1.1)))
    run = train_at_random(tmp_path / "my-secrets" / "runs" / "mine", str(base), temperature=0.9,
                          template="chat", stop="?", max_prompt_tokens=99, max_tokens=33,
                          data=f"{tmp_path}/my-secrets/some.jsonl")
    out = tmp_path / "out"
    export.export(str(run), out)
    assert " --data FILE " in capsys.readouterr().out  # most of the run's own file was trained on
    assert not [file for file in out.iterdir() if b"my-secrets" in file.read_bytes()]
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1
    tokenizer, before = map(AutoTokenizer.from_pretrained, (out, base))
    assert tokenizer.chat_template == before.chat_template
    assert tokenizer.get_vocab() == before.get_vocab()
    kept, config = GenerationConfig.from_pretrained(out), json.loads(
        (out / "config.json").read_text())
    assert kept.eos_token_id == config["eos_token_id"]
    assert {*tokenizer.convert_ids_to_tokens(kept.eos_token_id)} == {
        "<|endoftext|>", "<|im_end|>", "?"}
    assert (kept.temperature, kept.top_k, kept.do_sample) == (0.9, 0, True)
    assert kept.max_new_tokens == 33 and kept.repetition_penalty in (None, 1.0)
