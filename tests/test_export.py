"""An exported model is the trained one to every other program; a failed export harms nothing."""
import hashlib
import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import serve
from helpers import files_of_at_most
from parts import export
from parts import folder as folders
from parts.config import Config, resolve
from parts.data import Problem
from parts.folder import append, note_start
from parts.models import fetch_model, load_tokenizer, weights_of
from parts.policy import load_policy
from parts.prompts import add_prompts
from parts.run import make_optimizer, settings_of


def train_at_random(run: Path, model="tiny", steps=(3,), size=0.01, dtype="float32") -> Path:
    """A run's folder as training leaves it, with an adapter that changes a lot."""
    config = resolve(Config(model=model, name=run.name, dtype=dtype))
    policy = load_policy(fetch_model(model, 0), dtype=dtype, rank=config.lora_rank,
                         alpha=config.lora_alpha, seed=0, device="cpu")
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, size)
    run.mkdir(parents=True)
    note_start(run, settings_of(config), 0, weights_of(fetch_model(model, 0)))
    for step in steps:
        append(run / "eval.jsonl", dict(
            step=step, data=config.eval_data, questions=100, k=8, avg=step / 10, ci_low=.1,
            ci_high=.9))
        folders.save(run, policy, *make_optimizer(policy, config), dict(step=step))
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return train_at_random(tmp_path_factory.mktemp("made") / "runs" / "mine", steps=(3, 6))


def contents(folder: Path) -> dict:
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def copy(made, tmp_path):
    """The same run, to be spoilt."""
    return Path(shutil.copytree(made, tmp_path / "runs" / "copy"))


def spoil_adapter(run: Path, weights=lambda w: w, **settings) -> None:
    """Of the newest checkpoint."""
    folder = folders.checkpoints(run)[-1]
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file({name: weights(w) for name, w in load_file(file).items()}, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))


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


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_the_merged_weights_against_their_definition(tmp_path, model):
    run = train_at_random(tmp_path / "runs" / "mine", model)
    export.export(run, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    adapted, others = updates(run, model)
    assert len(adapted) >= 4 and found.keys() - adapted.keys() <= others.keys()
    for name, (weight, update) in adapted.items():
        torch.testing.assert_close(found[name].double(), weight + update, rtol=1e-6, atol=1e-7)
        assert update.abs().max() > 1e-3
    for name in found.keys() - adapted.keys():
        assert torch.equal(found[name], others[name]), f"{name} was not trained"


def test_how_far_the_log_probs_are_from_the_trainers_is_said(tmp_path, capsys, monkeypatch):
    """In 16 bits rounding moves them; in float32 the export is the trained policy."""
    from transformers import AutoModelForCausalLM

    asked, log_probs = [], export.log_probs
    monkeypatch.setattr(export, "log_probs", lambda *call: (
        asked.append((call[1], log_probs(*call))) or asked[-1][1]))
    run = train_at_random(tmp_path / "runs" / "mine", size=0.05, dtype="bfloat16")
    gaps, shares = [], []
    for dtype in ("bfloat16", "float32"):
        export.export(run, tmp_path / dtype, dtype)
        said = capsys.readouterr().out
        gaps.append(float(re.search(r"trainer's by at most (\S+) in an answer", said)[1]))
        shares.append(float(re.search(r"(\S+)% of the update has arrived", said)[1]))
        assert ("--dtype float32 keeps all" in said) == (gaps[-1] > 0.05 and dtype != "float32")
        (ids, trained), _ = asked[-2:]
        read = log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / dtype), ids)
        assert f"by at most {(read - trained).abs().max():.2g} in" in said
    assert gaps[0] > 1e-3 and shares[1] == 100
    adapted, _ = updates(run, "tiny")
    for dtype, half_a_spacing in (("bfloat16", 2**-8), ("float32", 1e-6)):
        found = load_file(tmp_path / dtype / "model.safetensors")
        for name, (weight, update) in adapted.items():
            wanted = weight.bfloat16().double() + update  # rounded once, and not on the way
            torch.testing.assert_close(
                found[name].double(), wanted, rtol=half_a_spacing, atol=1e-6)


def test_log_probs_that_are_no_numbers_are_no_good_export(made, tmp_path, capsys, monkeypatch):
    """As of a model whose activations float16 cannot hold."""
    monkeypatch.setattr(export, "log_probs", lambda model, ids: torch.tensor([math.nan]))
    export.export(made, tmp_path / "out", "float16")
    assert "--dtype float32 keeps all" in capsys.readouterr().out


def test_what_goes_with_the_weights(tmp_path):
    """The ends of the training's responses, but no path; twice the same; others may read it."""
    from transformers import AutoTokenizer, GenerationConfig

    base = Path(shutil.copytree(fetch_model("tiny", 0), tmp_path / "my-secrets" / "base"))
    for file in base.glob("tokenizer*.json"):  # two ends, as Qwen's base models have
        file.write_text(file.read_text().replace("<|pad|>", "<|im_end|>"))
    flags = base / "generation_config.json"  # transformers reads this, but will not write it
    flags.write_text(json.dumps(json.loads(flags.read_text()) | dict(temperature=0.6)))
    run = train_at_random(tmp_path / "my-secrets" / "runs" / "mine", str(base))
    for place in ("one", "two"):
        export.export(run, tmp_path / place / "model")
    out = tmp_path / "one" / "model"
    assert contents(out) == contents(tmp_path / "two" / "model")
    assert not [file for file in out.iterdir() if b"my-secrets" in file.read_bytes()]
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1
    tokenizer, before = map(AutoTokenizer.from_pretrained, (out, base))
    assert tokenizer.chat_template == before.chat_template
    assert tokenizer.get_vocab() == before.get_vocab()
    kept = GenerationConfig.from_pretrained(out)
    ends = tokenizer.convert_ids_to_tokens(kept.eos_token_id)
    assert ends == ["<|endoftext|>", "<|im_end|>"] and (kept.temperature, kept.do_sample) == (
        0.6, True)


def test_how_much_of_a_small_update_is_rounded_away_is_said(tmp_path, capsys):
    """Its log-probs hardly differ from the trainer's, yet most of what was learnt may be gone."""
    run = train_at_random(tmp_path / "runs" / "mine", size=1e-4, dtype="bfloat16")
    export.export(run, tmp_path / "out")
    said = capsys.readouterr().out
    found, left, whole = load_file(tmp_path / "out" / "model.safetensors"), 0.0, 0.0
    for name, (weight, update) in updates(run, "tiny")[0].items():
        left += ((found[name].double() - weight.bfloat16().double()) * update).sum().item()
        whole += update.square().sum().item()
    assert left / whole < 0.95
    assert f"{left / whole:.1%} of the update" in said and "--dtype float32 keeps all" in said


@pytest.mark.engine
def test_plain_transformers_and_vllm_read_the_merged_folder(made, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export.export(made, tmp_path / "out")
    ids = torch.randint(0, 300, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(input_ids=ids).logits
    wanted = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0]
    with serve(tmp_path / "out") as engine:
        found = torch.tensor(engine.prompt_logprobs(ids.tolist()))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "1+2=?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>1+2=?"


# ------------------------------------------------------------------------------ which checkpoint
def test_the_newest_checkpoint_is_exported_or_the_one_that_is_named(made, tmp_path, capsys):
    export.export(made, tmp_path / "newest")
    export.export(made / "checkpoints" / "step-000003", tmp_path / "named")
    out = capsys.readouterr().out
    named = [line for line in out.splitlines() if "with the adapter of" in line]
    assert "step-000006" in named[0] and "step-000003" in named[1]
    cards = [(tmp_path / name / "README.md").read_text() for name in ("newest", "named")]
    assert "for 6 steps" in cards[0] and "| 6 | 100 of builtin | avg@8 60.0% |" in cards[0]
    assert "for 3 steps" in cards[1] and "60.0%" not in cards[1]


def test_a_damaged_checkpoint_is_not_exported(copy, tmp_path):
    weights = copy / "checkpoints" / "step-000006" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="step-000006 .*does not fit"):
        export.export(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def spoil_config(change):
    def spoil(run):
        found = json.loads((run / "config.json").read_text())
        found["config"] = {k: v for k, v in (found["config"] | change).items() if v is not None}
        (run / "config.json").write_text(json.dumps(found))

    return spoil


def rename(name):
    return lambda run: (run / "checkpoints" / "step-000006").rename(run / "checkpoints" / name)


def bad_weights(value):
    return lambda run: spoil_adapter(run, lambda w: torch.full_like(w, value))


ODD = {
    "no such run": ("nothing", "has no checkpoint", None),
    "no such checkpoint": ("nothing/checkpoints/step-000003", "no checkpoint", None),
    "half a checkpoint": ("runs/copy/checkpoints/.writing", "no checkpoint", rename(".writing")),
    "a copy": ("runs/copy/checkpoints/step-000006-best", "no checkpoint",
               rename("step-000006-best")),
    "a long name": ("x" * 300, "too long.*name another folder|has no checkpoint", None),
    "no model": ("runs/copy", "does not say the model", spoil_config(dict(model=None))),
    "no template": ("runs/copy", "does not say the template", spoil_config(dict(template=None))),
    "another base": ("runs/copy", "weights of --model are not those",
                     spoil_config(dict(model="tiny-skills"))),
    "alpha below 0": ("runs/copy", "lora_alpha", lambda run: spoil_adapter(run, lora_alpha=-32)),
    "NaN": ("runs/copy", "holds weights that are no finite", bad_weights(math.nan)),
    "too large": ("runs/copy", "merged model has weights that are no", bad_weights(1e30)),
}


@pytest.mark.parametrize("place, sentence, spoil", ODD.values(), ids=ODD)
def test_what_cannot_be_exported_is_one_sentence(
        copy, tmp_path, monkeypatch, place, sentence, spoil):
    if spoil:
        spoil(copy)
    with pytest.raises(SystemExit, match=sentence) as ended:
        run_main(monkeypatch, tmp_path / place, tmp_path / "out")
    assert "\n" not in str(ended.value) and not (tmp_path / "out").exists()


def test_the_folder_may_be_the_one_that_one_is_in(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_main(monkeypatch, made, ".")
    assert tmp_path.name in (tmp_path / "README.md").read_text()


# ------------------------------------------------------------------------------ nothing is lost
def test_an_existing_folder_is_left_as_it_is(made, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="exists already, and nothing of it is overwritten"):
        export.export(made, out)
    assert contents(out).keys() == {"thesis.txt"}
    with pytest.raises(SystemExit, match="exists already"):
        export.export(made, out / "thesis.txt")
    (tmp_path / "empty").mkdir()
    export.export(made, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_full_disk_leaves_neither_half_a_model_nor_a_changed_run(made, tmp_path):
    before = contents(made)
    with files_of_at_most(10**6), pytest.raises(SystemExit) as ended:
        export.export(made, tmp_path / "out")
    sentence = str(ended.value)
    assert "Could not write" in sentence and "the run is untouched" in sentence
    assert "\n" not in sentence
    assert list(tmp_path.iterdir()) == [] and contents(made) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="Could not write"):
        export.export(made, tmp_path / "file" / "out")
    export.export(made, tmp_path / "out")


# ------------------------------------------------------------------------------ the card
def test_the_card_is_read_by_the_hubs_own_library_and_tells_no_paths(tmp_path):
    from huggingface_hub import ModelCard

    known = settings_of(resolve(Config(
        model="Qwen2.5-Math-1.5B", data="org/problems@train,/home/me/secret/mine.jsonl",
        eval_data="/home/me/secret/exam.jsonl", template="chat")))
    tokenizer = load_tokenizer(fetch_model("tiny", 0))

    def card(known):
        return export.card("mine", tmp_path, known, 20, tokenizer)

    assert "not evaluated" in card(known)
    row = dict(data=known["eval_data"], questions=50, k=8, avg=.5, ci_low=.4, ci_high=.6)
    append(tmp_path / "eval.jsonl", dict(row, step=0, avg=.2), dict(row, step=20), dict(step=20),
           dict(row, step=20, data="other.jsonl", avg=.25))
    text = card(known)
    found = ModelCard(text).data
    assert found.base_model == "Qwen/Qwen2.5-Math-1.5B" and found.library_name == "transformers"
    assert found.datasets == ["org/problems"] and 'from_pretrained("mine")' in text
    assert "| after step | held-out problems | avg@k: mean reward of k answers |" in text
    assert "| 0 | 50 of exam.jsonl | avg@8 20.0% | 40.0% to 60.0% |" in text
    assert "| 20 | 50 of exam.jsonl | avg@8 50.0% |" in text and "secret" not in text
    assert "| 20 | 50 of other.jsonl | avg@8 25.0% |" in text and text.count("avg@8") == 3
    own = card(known | dict(reward="/home/me/secret/mine.py:score"))
    gone = card(known | dict(template="/home/me/secret/gone.jinja"))
    assert "'7+5-4=?'  # not the training's prompt" in gone and "secret" not in gone
    assert "avg@8 0.5 | 0.4 to 0.6" in own and "| reward | mine.py:score |" in own


def program_of(card: str) -> str:
    return re.search(r"```python\n(.*?)```", card, re.S)[1]


def test_the_cards_program_asks_as_the_training_did_and_prints_an_answer(
        tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    export.export(train_at_random(tmp_path / "runs" / "mine"), tmp_path / "out")
    capsys.readouterr()
    torch.manual_seed(0)
    made = {}
    exec(program_of((tmp_path / "out" / "README.md").read_text()), made)
    tokenizer = load_tokenizer(fetch_model("tiny", 0))
    asked = add_prompts([Problem("7+5-4=?", "8", "", "")], tokenizer, "chat", 99)[0]
    assert made["prompt"] == asked.prompt == "<|user|>7+5-4=?<|assistant|>"
    assert made["ids"][0].tolist() == asked.prompt_ids
    assert 0 < made["answer"].shape[1] - len(asked.prompt_ids) <= 64
    assert "\\boxed{" in capsys.readouterr().out


@pytest.mark.parametrize("template", ["three-examples", "reinforce-ada", "none", "own.jinja"])
def test_the_card_shows_the_whole_prompt_of_any_template(tmp_path, monkeypatch, template):
    monkeypatch.chdir(tmp_path)
    Path("own.jinja").write_text("Be brief.\nQ: '{{ problem }}'\n\"A\":")
    tokenizer, made = load_tokenizer(fetch_model("tiny", 0)), {}
    tokenizer.chat_template = (  # tiny's own has no system turn
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>")
    known = settings_of(resolve(Config())) | dict(template=template)
    code = program_of(export.card("mine", tmp_path, known, 20, tokenizer))
    exec(code[code.index("prompt = ("):code.index("answer =")], dict(tokenizer=tokenizer), made)
    asked = add_prompts([Problem("7+5-4=?", "8", "", "")], tokenizer, template, 9999)[0]
    assert (made["prompt"], made["ids"][0].tolist()) == (asked.prompt, asked.prompt_ids)


def run_main(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["export", *map(str, flags)])
    export.main()
