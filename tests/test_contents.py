"""Contents: other weights, tokens or files under the same name are noticed by every program."""
import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest

import eval as evaluation  # the module has the name of a builtin
from models_small import policy
from parts.models import Model, digest_of_model, MODELS
from recipes import export
from world import Engine, Grader, small_run


# ------------------------------------------------------------------------------ ways to change it
def weight(folder: Path) -> None:
    """A byte deep inside, and neither the size nor the time of the file tells it."""
    file = folder / "model.safetensors"
    before, content = file.stat(), bytearray(file.read_bytes())
    content[before.st_size // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def end_token(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[347, 346])


def tokenizer(folder: Path) -> None:
    """Two digits are exchanged."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    file.write_text(json.dumps(content))


def chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def rope(folder: Path) -> None:
    change(folder / "config.json", rms_norm_eps=1e-3)


def change(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """A model of the user's in ./base."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(str(MODELS / "tiny"), "base"))


# ------------------------------------------------------------------------------ the digest
@pytest.mark.parametrize("spoil", [weight, end_token, tokenizer, chat_template, rope])
def test_the_digest_of_a_model_changes_with_whatever_decides_its_answers(base, spoil):
    before = digest_of_model("base")
    (base / "README.md").write_text("Nothing of this matters.")
    (base / "weights.bin").write_bytes(b"nor this, which nobody reads")
    shutil.copytree(base, "copy")
    assert digest_of_model("base") == before == digest_of_model("copy")
    spoil(base)
    assert digest_of_model("base") != before == digest_of_model("copy")


def test_a_name_on_the_hub_stands_for_the_files_that_it_has_now(base, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download",
                        lambda name, **how: asked.append(name) or "base")
    before = Model("org/name", "org/name", None).digest
    assert before == digest_of_model("base") and asked == ["org/name"]
    weight(base)  # main has moved
    assert Model("org/name", "org/name", None).digest != before


# ------------------------------------------------------------------------------ an evaluation
def evaluate(monkeypatch, *flags) -> int:
    """Evaluates two problems in ./out. Returns how often an engine was started."""
    started = []
    monkeypatch.setattr("parts.engine.Engine", lambda *_, **__: started.append(1) or Engine())
    monkeypatch.setattr(evaluation, "open_grader", lambda *_: Grader())
    evaluation.main(["--model=base", "--data=builtin", "--limit=2", "--k=2", "--template=chat",
                     "--out=out", *flags])
    return len(started)


@pytest.mark.parametrize("spoil, flags", [
    (weight, []),
    (lambda _: change(Path("adapter/adapter_config.json"), lora_alpha=9), ["--adapter=adapter"]),
    (lambda _: Path("judge.py").write_text("score = len"), ["--reward=judge.py:score"]),
    (lambda _: change_turns(" Be brief."), ["--template=turns.json"])])
def test_old_answers_are_not_shown_as_those_of_a_changed_model(base, monkeypatch, spoil, flags):
    policy("base", moved=0.1).save_pretrained("adapter")
    Path("judge.py").write_text("score = abs")
    change_turns("")
    assert evaluate(monkeypatch, *flags) == 1
    assert evaluate(monkeypatch, *flags) == 0  # all answers are there
    file = Path("out/eval.jsonl")
    file.write_text("".join(file.read_text().splitlines(True)[:3]))  # interrupted
    before = file.read_text()
    spoil(base)
    with pytest.raises(SystemExit, match="^out holds an evaluation that differs in .*contents"):
        evaluate(monkeypatch, *flags)
    assert file.read_text() == before


def change_turns(more: str) -> None:
    Path("turns.json").write_text(json.dumps([dict(role="user", content="{problem}" + more)]))


# ------------------------------------------------------------------------------ a run
def run(**flags) -> Path:
    return small_run(Path(), model="base", data="builtin", template="chat", name="mine",
                     max_prompt_tokens=40, **flags)


@pytest.mark.parametrize("spoil", [weight, tokenizer])
def test_a_run_does_not_go_on_with_another_base_model(base, monkeypatch, spoil):
    """And neither an evaluation nor an export puts its adapter on one."""
    run(steps=1)
    spoil(base)
    said = "^runs/mine was started with other contents of model .*: put them back"
    with pytest.raises(SystemExit, match=said.replace("model", "(model|data)")):  # or of prompts
        run(steps=2, resume=True)
    with pytest.raises(SystemExit, match=said):
        evaluate(monkeypatch, "--adapter=runs/mine")
    with pytest.raises(SystemExit, match=said):
        export.export("runs/mine", Path("made"))
    assert not Path("made").exists() and not Path("out").exists()
