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


PARTS = dict(  # a file, and the parts of its content that are changed
    config=(NICE / "config.json", lambda content: [content["config"]]),
    problems=(NICE / "problems.json", lambda content: content["held_out"]),
    adapter=(LAST / "adapter_config.json", lambda content: [content]),
    state=(LAST / "state.json", lambda content: [content]),
    model=(Path("model/config.json"), lambda content: [content]))
BIN, CODE = LAST / "adapter_model.bin", dict(model="model")
HOSTILE = dict(  # values of PARTS; files that become pickles; files that are removed
    reward=dict(config=dict(reward="runs/nice/program.py:score"), problems=dict(row=dict(a=1))),
    template=dict(config=dict(template="runs/nice/../../elsewhere/turns.json")),
    data=dict(config=dict(data="elsewhere/data.jsonl", eval_data="elsewhere/data.jsonl")),
    data_held_out=dict(config=dict(data="elsewhere/data.jsonl", eval_data="held-out")),
    base_of_adapter=dict(adapter=dict(base_model_name_or_path="model")),
    class_of_adapter=dict(adapter=dict(auto_mapping=dict(
        parent_library="elsewhere.program", base_model_class="It"))),
    module_of_adapter=dict(adapter=dict(megatron_config=dict(a=1),
                                        megatron_core="elsewhere.program")),
    pickled_adapter=dict(pickled=BIN, removed=LAST / "adapter_model.safetensors"),
    both_adapters=dict(pickled=BIN),
    pickled_optimizer=dict(pickled=LAST / "optimizer.pt"),
    path_in_state=dict(state=dict(logs={"../../elsewhere/data.jsonl": 0})),
    model_with_code=dict(config=CODE),
    model_of_code=dict(config=CODE, model=dict(model_type="of_its_own")),
    model_of_pickles=dict(config=CODE, pickled="model/pytorch_model.bin",
                          removed="model/model.safetensors"),
    problem_as_template=dict(problems=dict(
        problem="{{ ''.__class__.__mro__ }}{% include 'elsewhere/data' %}")),
    problem_with_row=dict(problems=dict(row=dict(problem="elsewhere/data.jsonl"),
                                        source="elsewhere/data.jsonl")))
WATCHED, OPENED = [], []  # a folder, and the files in it that were opened
sys.addaudithook(lambda event, values: event == "open" and WATCHED and OPENED.extend(
    name for name in [str(values[0])]
    if os.path.realpath(name).startswith(WATCHED[0]) or name.endswith("program.py")))


def spoil(pickled="", removed="", **values) -> None:
    for name, changed in values.items():
        file, parts = PARTS[name]
        content = json.loads(file.read_text())
        for part in parts(content):
            part |= changed
        file.write_text(json.dumps(content))
    if pickled:
        torch.save(Payload(), pickled)
    if removed:
        Path(removed).unlink()


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder with runs/nice, and with what a hostile folder would like to execute or to read."""
    place = tmp_path_factory.mktemp("shared")
    small_run(place, name="nice", steps=1, data="builtin")
    (place / "elsewhere").mkdir()
    for folder in (place / "elsewhere", place / NICE):
        (folder / "program.py").write_text(PROGRAM)
    (place / "elsewhere/turns.json").write_text('[{"role": "user", "content": "{problem}"}]')
    (place / "elsewhere/data.jsonl").write_text('{"problem": "secret", "answer": "1"}\n' * 9)
    shutil.copytree(str(MODELS / "tiny"), place / "model")
    (place / "model/program.py").write_text(PROGRAM)
    code = {name: "program.It" for name in ("AutoConfig", "AutoModelForCausalLM")}
    tokens = {"AutoTokenizer": ["program.It", None]}
    for name, names in (("config", code), ("tokenizer_config", tokens)):
        file = place / f"model/{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | dict(auto_map=names)))
    return place


def evaluate(flags=()) -> None:
    evaluation.main(["--adapter", str(NICE), "--out=out", *flags])


def make_model() -> None:
    export.export(str(NICE), Path("made"))


def go_on() -> None:
    small_run(Path(), **vars(parse(["--name=nice", "--resume", "--steps=2"])))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("program", [evaluate, make_model, go_on])
def test_nothing_of_a_shared_folder_is_executed_and_no_other_file_is_read(
        shared, tmp_path, monkeypatch, name, program):
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
    spoil(**HOSTILE[name])
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
    if not name.startswith("data") or program != go_on:  # who resumes a run wants its data
        assert OPENED == []
    assert (place / "elsewhere/data.jsonl").read_bytes() == before


def test_the_payloads_would_work(shared, tmp_path, monkeypatch):
    """Otherwise the test above could not fail."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Payload()))
    assert Path("executed").exists()
