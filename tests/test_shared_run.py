"""A run's folder from somebody else: it is data, and nothing that it names is executed or read.

The adapter's base model is the one exception. It is named on the screen, and its files are data.
"""
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

import eval as evaluation  # the module has the name of a builtin
from parts.config import parse
from parts.models import MODELS
from recipes import export
from rewards import open_grader
from world import Engine, Grader, small_run

NICE = Path("runs/nice")
LAST = NICE / "checkpoints/step-000001"
PROGRAM = "open('{}/executed', 'w').close()\nclass It: pass\nscore = It\n"


class Payload:
    """Executes PROGRAM when it is unpickled."""

    def __reduce__(self):
        return exec, (PROGRAM.format(os.getcwd()),)


def change(file: Path, **values) -> None:
    content = json.loads(file.read_text())
    inner = content["config"] if file == NICE / "config.json" else content
    inner |= values
    file.write_text(json.dumps(content))


def configured(**values):
    return lambda: change(NICE / "config.json", **values)


def rewarded(name: str):
    """The run had this reward, so its held-out problems have their columns."""
    def spoil():
        content = json.loads((NICE / "problems.json").read_text())
        for problem in content["held_out"]:
            problem["row"] = dict(a=1)
        (NICE / "problems.json").write_text(json.dumps(content))
        change(NICE / "config.json", reward=name)
    return spoil


def adapted(**values):
    return lambda: change(LAST / "adapter_config.json", **values)


def pickled(file: Path, instead: Path | None = None):
    def spoil():
        torch.save(Payload(), file)
        if instead:
            instead.unlink()
    return spoil


def asked(**values):
    """The first held-out problem has these values."""
    def spoil():
        content = json.loads((NICE / "problems.json").read_text())
        content["held_out"][0] |= values
        (NICE / "problems.json").write_text(json.dumps(content))
    return spoil


def with_model(weights: bool = True, **values):
    """The run names a model with Python code, and perhaps without other weights than pickles."""
    def spoil():
        change(Path("model/config.json"), **values)
        if not weights:
            torch.save(Payload(), "model/pytorch_model.bin")
            Path("model/model.safetensors").unlink()
        change(NICE / "config.json", model="model")
    return spoil


HOSTILE = dict(
    reward_elsewhere=rewarded("elsewhere/program.py:score"),
    reward_inside=rewarded("runs/nice/program.py:score"),
    reward_at_home=rewarded("~/program.py:score"),
    template_absolute=lambda: configured(template=os.path.abspath("elsewhere/evil.jinja"))(),
    template_relative=configured(template="runs/nice/../../elsewhere/turns.json"),
    data=configured(data="elsewhere/data.jsonl", eval_data="elsewhere/data.jsonl"),
    data_held_out=configured(data="elsewhere/data.jsonl", eval_data="held-out"),
    base_of_adapter=adapted(base_model_name_or_path="model"),
    class_of_adapter=adapted(auto_mapping=dict(
        parent_library="elsewhere.program", base_model_class="It")),
    module_of_adapter=adapted(megatron_config=dict(a=1), megatron_core="elsewhere.program"),
    pickled_adapter=pickled(LAST / "adapter_model.bin", LAST / "adapter_model.safetensors"),
    both_adapters=pickled(LAST / "adapter_model.bin"),
    pickled_optimizer=pickled(LAST / "optimizer.pt"),
    path_in_state=lambda: change(LAST / "state.json", logs={"../../elsewhere/data.jsonl": 0}),
    model_with_code=with_model(),
    model_of_code=with_model(model_type="of_its_own"),
    model_of_pickles=with_model(weights=False),
    problem_as_template=asked(problem="{{ ''.__class__.__mro__ }}{% include 'elsewhere/data' %}"),
    problem_with_row=asked(row=dict(problem="elsewhere/data.jsonl"), source="elsewhere/data.jsonl"))
OF_DATA = [HOSTILE[name] for name in ("data", "data_held_out")]
WATCHED, OPENED = [], []  # a folder, and the files in it that were opened
sys.addaudithook(lambda event, values: event == "open" and WATCHED and OPENED.extend(
    name for name in [str(values[0])]
    if os.path.realpath(name).startswith(WATCHED[0]) or name.endswith("program.py")))


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder with runs/nice, and with what a hostile folder would like to execute or to read."""
    place = tmp_path_factory.mktemp("shared")
    small_run(place, name="nice", steps=1, data="builtin")
    (place / "elsewhere").mkdir()
    for folder in (place / "elsewhere", place / NICE):
        (folder / "program.py").write_text(PROGRAM)
    (place / "elsewhere/evil.jinja").write_text("{{ messages }}")
    (place / "elsewhere/turns.json").write_text('[{"role": "user", "content": "{problem}"}]')
    (place / "elsewhere/data.jsonl").write_text('{"problem": "secret", "answer": "1"}\n' * 9)
    shutil.copytree(str(MODELS / "tiny"), place / "model")
    (place / "model/program.py").write_text(PROGRAM)
    code = {name: "program.It" for name in ("AutoConfig", "AutoModelForCausalLM")}
    tokens = {"AutoTokenizer": ["program.It", None]}
    for name, names in (("config", code), ("tokenizer_config", tokens)):
        change(place / f"model/{name}.json", auto_map=names)
    return place


def evaluate(flags=()) -> None:
    evaluation.main(["--adapter", str(NICE), "--out=out", *flags])


def make_model() -> None:
    export.export(str(NICE), Path("made"))


def go_on() -> None:
    small_run(Path(), **vars(parse(["--name=nice", "--resume", "--steps=2"])))


@pytest.mark.parametrize("spoil", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("program", [evaluate, make_model, go_on])
def test_nothing_of_a_shared_folder_is_executed_and_no_other_file_is_read(
        shared, tmp_path, monkeypatch, spoil, program):
    place = shutil.copytree(shared, tmp_path / "place")
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place / "elsewhere"))
    monkeypatch.syspath_prepend(place)
    (place / "executed").unlink(missing_ok=True)
    for file in place.rglob("program.py"):
        file.write_text(PROGRAM.format(place))
    monkeypatch.setattr("parts.engine.Engine", lambda *_, **__: Engine())
    monkeypatch.setattr(evaluation, "open_grader", lambda reward, threshold: open_grader(
        reward, threshold) if reward else Grader())
    spoil()
    before = (place / "elsewhere/data.jsonl").read_bytes()
    OPENED.clear()
    WATCHED[:] = [str(place / "elsewhere")]
    try:
        program()
    except SystemExit as ended:  # a sentence
        assert ended.code
    finally:
        WATCHED.clear()
    assert not (place / "executed").exists()
    if spoil not in OF_DATA or program != go_on:  # who resumes a run wants its data
        assert OPENED == []
    assert (place / "elsewhere/data.jsonl").read_bytes() == before


def test_the_payloads_would_work(shared, tmp_path, monkeypatch):
    """Otherwise the test above could not fail."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Payload()))
    assert Path("executed").exists()
