"""An exported model is the trained one, and a run can start from a run. See also test_real.py."""
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import eval as evaluation  # the module has the name of a builtin
import minirl
from helpers import contents, files_of_at_most, lines, run_program
from models_small import policy
from parts import config as config_module
from parts import policy as policy_module
from parts.config import Flags, name_of, parse
from parts.models import fetch_model, load_tokenizer
from parts.policy import load_adapter, merged_model
from parts.provenance import as_model, base_of, note_start, read_config
from parts.settle import settle_here
from recipes import export
from world import settle_flags, settled, small_run, stand_in


def train_at_random(run: Path, model="tiny", steps=(3,), size=0.01, dtype="float32", **flags):
    """A run's folder as training leaves it, with an adapter that changes a lot."""
    config = settled(model=model, name=run.name, dtype=dtype, **flags)
    trained = policy(fetch_model(model), dtype, size, rank=config.lora_rank)
    run.mkdir(parents=True)
    note_start(run, asdict(config), 0, {})
    (run / "problems.json").write_text(json.dumps(dict(trained=[], held_out=["1+1=?"])))
    for step in steps:
        trained.save_pretrained(run / "checkpoints" / f"step-{step:06d}")
    return run


# ------------------------------------------------------------------------------ the model
def updates(run: Path, model: str):
    """Name of each adapted weight -> (W, alpha / r * B A), from the files alone, in float64."""
    base = load_file(Path(fetch_model(model)) / "model.safetensors")
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
    if dtype == "float32":  # nothing is rounded, but by a run that begins from this one
        assert "of the update" not in said
        merged_model(as_model(str(run)))
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
    assert f"{left / whole:.1%} of the update is left in bfloat16" in said
    assert (left / whole < 0.95) == (size == 1e-4) == (
        "--dtype float32, with a new folder or --name, keeps all of it" in said)
    trained, _ = load_adapter(fetch_model(model), run / "checkpoints/step-000003", "bfloat16")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        ids = torch.arange(100, 140)[None]
        apart = read(ids).logits.log_softmax(-1) - trained.float()(ids).logits.log_softmax(-1)
    assert apart.abs().max() < (0.2 if dtype == "bfloat16" else 1e-3)


def test_what_goes_with_the_weights(tmp_path):
    """Ends, lengths and temperature of the training, in both configs; no path; others may read."""
    base = Path(shutil.copytree(fetch_model("tiny"), tmp_path / "my-secrets" / "base"))
    for file in base.glob("tokenizer*.json"):  # two ends, as Qwen's base models have
        file.write_text(file.read_text().replace("<|pad|>", "<|im_end|>"))
    flags = base / "generation_config.json"  # as Qwen's, for another way of sampling
    flags.write_text(json.dumps(json.loads(flags.read_text()) | dict(repetition_penalty=1.1)))
    run = train_at_random(tmp_path / "my-secrets" / "runs" / "mine", str(base), temperature=0.9,
                          template="chat", stop="?", max_prompt_tokens=99, max_tokens=33,
                          data=f"{tmp_path}/my-secrets/some.jsonl")
    out = tmp_path / "out"
    export.export(str(run), out)
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


def test_a_full_disk_leaves_neither_half_a_model_nor_a_changed_run(tmp_path):
    run = train_at_random(tmp_path / "made" / "runs" / "mine")
    before = contents(tmp_path)
    with files_of_at_most(10**6), pytest.raises(SystemExit) as ended:
        export.export(str(run), tmp_path / "out")
    sentence = str(ended.value)
    assert re.match("Could not write .*the run is unchanged", sentence) and "\n" not in sentence
    assert contents(tmp_path) == before


@pytest.mark.engine
@pytest.mark.slow
def test_an_exported_model_ends_its_answers_where_the_run_does(tmp_path):
    """Of a model that ends its turns with a token that generation_config.json alone names."""
    base = Path(shutil.copytree(fetch_model("tiny"), tmp_path / "base"))
    for file in base.glob("tokenizer*.json"):
        file.write_text(file.read_text().replace("<|endoftext|>", "<end_of_turn>"))
    for name, change in dict(tokenizer_config=dict(eos_token="<|pad|>"),
                             generation_config=dict(eos_token_id=[347, 346]),
                             config=dict(eos_token_id=347)).items():
        file = base / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    train_at_random(tmp_path / "runs" / "mine", str(base), size=1e-3, data="builtin",
                    template="chat", max_tokens=64, max_prompt_tokens=256)
    export.export(str(tmp_path / "runs" / "mine"), tmp_path / "made")
    same = "--data builtin --limit 40 --k 4 --template chat --max-tokens 64".split()
    found = []
    for flags in ("--adapter runs/mine", "--model made --max-prompt-tokens 256"):
        said = run_program("eval.py", *flags.split(), *same, "--out", flags[2:7], cwd=tmp_path,
                           env=dict(OMP_NUM_THREADS=1))
        assert "an answer ends at <end_of_turn>, <|pad|>" in said
        protocol = json.loads((tmp_path / flags[2:7] / "protocol.json").read_text())
        assert protocol["stop"] == [346, 347]
        found.append(lines(tmp_path / flags[2:7] / "eval.jsonl"))
    right = [sum(row["reward"] for row in rows) / len(rows) for rows in found]
    assert abs(right[0] - right[1]) < 0.05 < min(right)  # merging rounds, so few answers differ
    assert all(sum(row["finish_reason"] == "stop" for row in rows) > 100 for rows in found)


# ------------------------------------------------------------------------------ a run from a run
TAKEN = dict(data="mine.jsonl", columns="frage,n", eval_data="held-out", max_prompt_tokens=99,
             max_tokens=33, lr=0.002, temperature=0.9, eval_questions=9, batch_prompts=5,
             stop="?", template="chat", dtype="float32")


@pytest.fixture
def source(tmp_path, monkeypatch) -> str:
    """A run of the built-in model with settings of its own, on a file of its own."""
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text("".join(
        json.dumps(dict(frage=f"{i}+{i}=?", n=str(2 * i))) + "\n" for i in range(40)))
    train_at_random(Path("runs/first"), steps=(3, 6), **TAKEN)
    return "runs/first"


@pytest.mark.parametrize("place, step, name", [
    ("", 6, "from-first"), ("/", 6, "from-first"),
    ("/checkpoints/step-000003", 3, "from-first-step-000003")])
def test_a_run_from_a_run_takes_its_settings_where_no_flag_says_otherwise(
        source, capsys, place, step, name):
    config = parse(["--model", source + place])
    assert config.model == f"runs/first/merged/step-{step:06d}"
    assert {key: getattr(config, key) for key in TAKEN} == TAKEN
    assert config.name == f"{name}-ada-balance-seed0"
    assert (config.steps, config.micro_tokens) == (None, None)  # these follow from the model
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "runs/first" in line]
    assert all(f"{key} = {value}" in line for key, value in TAKEN.items())
    other = parse(["--model", source + place, "--lr", "0.1", "--data", "builtin", "--name", "x"])
    assert (other.lr, other.data, other.eval_data, other.columns) == (0.1, "builtin", None, "")
    assert (other.max_tokens, other.name) == (33, "x")
    line = capsys.readouterr().out
    assert "max_tokens = 33" in line and not re.search("lr =|data =|columns =", line)
    same = parse(["--model", source, "--data", "mine.jsonl"])
    assert (same.columns, same.eval_data) == ("frage,n", "held-out")


def test_a_run_from_a_built_in_models_run_gets_one_thread_too(source, monkeypatch):
    found = {}
    monkeypatch.setattr(config_module.os, "environ", found)
    monkeypatch.setattr(config_module.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["minirl.py", "--model", source])
    assert config_module.parse_before_torch().model == "runs/first/merged/step-000006"
    assert found["OMP_NUM_THREADS"] == "1"


def test_an_evaluation_of_a_run_as_a_model_is_as_of_its_adapter(source):
    found, adapter = (evaluation.parse([flag, source, "--k", "2"])
                      for flag in ("--model", "--adapter"))
    assert found.model == "runs/first/merged/step-000006" and not found.adapter
    free = {"model", "adapter", "out"}
    assert {key: value for key, value in asdict(found).items() if key not in free} == {
        key: value for key, value in asdict(adapter).items() if key not in free}
    assert evaluation.name_of(found, "held-out") == "eval-first-step-000006-held-out-k2"


def test_a_small_models_run_goes_on_as_a_small_model_does(source, capsys):
    note_start(Path(source), read_config(Path(source))["config"] | dict(
        model="SmolLM2-135M-Instruct", max_tokens=77), 6, {})
    config = settle_flags(parse(["--model", source]))
    assert (config.M, config.steps, config.max_tokens) == (4, 20, 77)
    assert capsys.readouterr().out.count("max_tokens = ") == 1
    assert evaluation.parse(["--model", source]).max_tokens == 77


def test_the_adapter_is_merged_once_and_the_tokenizer_is_that_of_the_base(source):
    name = as_model(source)
    folder = Path(merged_model(name))
    assert str(folder) == name == "runs/first/merged/step-000006"
    again = Path("again")  # as if another program had been faster
    shutil.copytree(folder, again)
    policy_module.write_merged(f"{source}/checkpoints/step-000003", again, "float32")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    words = load_tokenizer(name)
    assert words("12+34=?")["input_ids"] == load_tokenizer(fetch_model("tiny"))("12+34=?")[
        "input_ids"]
    trained, _ = load_adapter(fetch_model("tiny"), f"{source}/checkpoints/step-000006", "float32")
    read, ids = AutoModelForCausalLM.from_pretrained(name), torch.arange(100, 140)[None]
    assert (read(ids).logits - trained(ids).logits).abs().max() < 1e-3
    before = contents(folder)
    assert merged_model(name) == name and contents(folder) == before
    assert merged_model("tiny") == "tiny" and merged_model("org/name") == "org/name"
    shutil.rmtree(f"{source}/checkpoints/step-000006")  # the run has gone on
    assert merged_model(name) == name
    folder.rename("moved")
    with pytest.raises(SystemExit, match="step-000006 is gone, and so is the checkpoint"):
        merged_model(name)
    Path("moved").rename(folder)
    shutil.copytree(f"{source}/checkpoints/step-000003", f"{source}/checkpoints/step-000006")
    weights = Path(source, "checkpoints/step-000006/adapter_model.safetensors")
    save_file({key: 2 * w for key, w in load_file(weights).items()}, weights)
    with pytest.raises(SystemExit, match="another adapter of step 6: remove it"):
        merged_model(name)


def test_a_run_from_a_run_trains_and_is_resumed_although_the_first_has_gone_on(
        tmp_path, monkeypatch, capsys):
    """Also from a run that began from a run: the base is the built-in model all the way."""
    monkeypatch.chdir(tmp_path)
    small_run(tmp_path, name="first", steps=2)
    file = Path("runs/first/problems.json")  # it was trained on one problem more
    file.write_text(file.read_text().replace('"trained": [', '"trained": ["more", '))
    name, flags = "from-first-ada-balance-seed0", "--model runs/first --eval-k 2 --steps 2"
    stand_in(monkeypatch.setattr)
    minirl.main(parse(flags.split()))
    assert "runs/first was trained on 0 of" in capsys.readouterr().out
    assert "more" in json.loads(Path("runs", name, "problems.json").read_text())["trained"]
    stored = read_config(Path("runs", name))["config"]
    assert stored["model"] == "runs/first/merged/step-000002" and base_of(stored["model"]) == "tiny"
    small_run(tmp_path, name="first", steps=5, resume=True)
    assert not Path("runs/first/checkpoints/step-000002").exists()
    for again in (flags, f"--name {name}"):
        minirl.main(parse(f"{again} --resume --steps 3".split()))
    assert read_config(Path("runs", name))["config"]["model"] == stored["model"]
    second = parse(["--model", f"runs/{name}", "--name", "second"])
    assert base_of(second.model) == "tiny" and second.lr == stored["lr"]


def test_a_run_without_a_checkpoint_and_a_model_that_reads_less(source, monkeypatch, capsys):
    """One sentence each; the lengths are those with which an exported model was trained."""
    export.export(f"{source}/checkpoints/step-000003", Path("named"))  # and not the newest
    assert "adapter of runs/first/checkpoints/step-000003, in" in capsys.readouterr().out
    export.export(source, Path("my-model"))
    said = capsys.readouterr().out
    assert "adapter of runs/first/checkpoints/step-000006, in" in said
    assert re.search("--model my-model --data FILE .*--max-tokens 33 --k 8\\nFILE must have other.*"
                     "mine.jsonl, .*trained.*--adapter runs/first\n", said)
    real = "--model my-model --data mine.jsonl --columns frage,n --max-tokens 3000".split()
    lengths = "my-model reads 1024 .* 640 . 3000: add --max-prompt-tokens 99 --max-tokens 33"
    for read, begin_with in ((parse, settle_here),
                             (evaluation.parse, evaluation.problems_and_protocol)):
        with pytest.raises(SystemExit, match=lengths):
            begin_with(read(real))
    shutil.copytree(fetch_model("tiny"), "plain")
    with pytest.raises(SystemExit, match="plain reads 1024 .* --max-prompt-tokens 256 --max-tok"):
        settle_here(parse(["--model", "plain", "--data", "builtin", "--max-tokens", "900"]))
    shutil.rmtree(f"{source}/checkpoints")
    for read in (parse, evaluation.parse):
        with pytest.raises(SystemExit):
            read(["--model", source])
        assert "runs/first has no checkpoint" in capsys.readouterr().err
    assert name_of(Flags(model="runs/gone")) == "gone-ada-balance-seed0"  # no run
