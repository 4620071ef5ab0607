"""The notebook has the results of a run in it, asks for a prediction in each part, and runs from
top to bottom, alone or inside a clone.

After a change, `jupyter execute --inplace walkthrough.ipynb` stores new results.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import HANG, ROOT, lines

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
FILE = ROOT / "walkthrough.ipynb"
CELLS = json.loads(FILE.read_text())["cells"]
TEXTS = ["".join(cell["source"]) for cell in CELLS]
CODE = [text for cell, text in zip(CELLS, TEXTS) if cell["cell_type"] == "code"]


def printed(cells) -> str:
    return "".join("".join(output.get("text", "")) for cell in cells
                   for output in cell.get("outputs", []))


def shape(cell):
    """What a cell shows, without what depends on the machine: the kinds of its outputs, and its
    printed lines without their numbers; where a model's words are among them, the first line."""
    outputs = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    kinds = {kind for output in outputs for kind in output.get("data", [output.get("name")])}
    lines = [" ".join(re.sub(r"[\d.,+=?%e-]*\d[\d.,+=?%e-]*", "#", line).split())
             for line in printed([dict(outputs=outputs)]).splitlines() if line]
    return kinds, lines[:1] if "boxed{" in printed([cell]) else set(lines)


def test_it_can_be_read_where_it_cannot_be_run():
    shows = re.compile(r"print\(|^(picture|shown|pd\.|table)", re.M)
    for cell, text in zip(CELLS, TEXTS):
        assert cell["cell_type"] != "code" or cell["outputs"] or not shows.search(text), text
    assert sum("image/png" in output.get("data", {}) for cell in CELLS
               for output in cell.get("outputs", [])) == 4
    assert FILE.stat().st_size < 250_000 and "OWNER" not in "".join(TEXTS)  # no dead address
    stored = json.dumps([cell.get("outputs") for cell in CELLS])
    assert not re.search(r"stderr|Warning|NUMA|%\||/tmp|/home|/root|/work|rror:", stored)
    assert not any(cell["metadata"] for cell in CELLS)  # nor when each cell was run


def test_what_the_text_says_of_the_stored_run_is_in_it():
    (remark,) = [text for text in TEXTS if text.startswith("In the stored run it is answer 13")]
    said = printed(CELLS)
    assert "answer 13: " in said and "prompt: 1+7+4+8+6-5=?" in said
    assert all(step in said for step in re.findall(r"`([\d+=-]+)`", remark))
    assert said.count("the project says") == 4


def test_an_interval_is_drawn_from_its_lower_to_its_upper_end(monkeypatch):
    pytest.importorskip("IPython", reason="IPython is not installed: make extras")
    import pandas as pd

    from course import pictures

    monkeypatch.setattr(pictures, "shown", lambda figure: figure)
    held_out = pd.DataFrame(dict(step=[0], avg=0.5, ci_low=0.375, ci_high=0.75))
    metrics = pd.DataFrame(dict(step=[1], reward_first_round=0.5))
    (axis,) = pictures.learning(metrics, held_out, 0.5).axes
    assert axis.collections[0].get_segments()[0].tolist() == [[0, 0.375], [0, 0.75]]


def first_cell(folder: Path, repository: str = "", say: str = "", path: str = ""):
    """Run it as a fresh kernel in `folder` would, by a Python without packages; then say it."""
    source = CODE[0].replace('REPOSITORY = ""', f'REPOSITORY = "{repository}"')
    return subprocess.run(
        [os.path.join(sys.base_prefix, "bin", VERSION), "-I", "-c", f"{source}\nprint({say})"],
        cwd=folder, text=True, capture_output=True,
        env=os.environ | dict(PATH=f"{path}:{os.environ['PATH']}"))


def test_alone_it_asks_for_an_address_clones_and_gets_the_packages(tmp_path):
    """As in Colab, in a kernel that has none. `make` is a fake, which leaves what `make setup`
    leaves: an environment in .venv."""
    asked = first_cell(tmp_path)
    assert asked.returncode and "Put the project's address" in asked.stderr
    source, alone, make = tmp_path / "source", tmp_path / "alone", tmp_path / "bin" / "make"
    for folder in (source, alone, make.parent):
        folder.mkdir()
    (source / "minirl.py").write_text("")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm all"):
        subprocess.run(["git", *command.split()], cwd=source, check=True)
    packages = alone / "minirl" / ".venv" / "lib" / VERSION / "site-packages"
    make.write_text(f"#!/bin/sh\necho $@ >> asked\nmkdir -p {packages}\ntouch {packages}/vllm.py\n")
    make.chmod(0o755)
    found = "importlib.util.find_spec('vllm').origin, os.environ['PYTHONPATH'], Path.cwd().name"
    for _ in range(2):  # and again, after a restart of the kernel
        done = first_cell(alone, str(source), found, path=str(make.parent))
        assert done.stdout.split() == [str(packages / "vllm.py"), str(packages), "minirl"], done
    assert (alone / "minirl" / "asked").read_text().startswith("setup PYTHON=/")


@pytest.mark.engine
@pytest.mark.slow
def test_from_top_to_bottom_in_a_kernel(tmp_path):
    """As it stands, but 8 steps in the place of 20, for the time that it takes."""
    for name in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(name, reason=f"{name} is not installed: make extras")
    import nbclient
    import nbformat

    for entry in ("minirl.py", "ada_sampler.py", "rewards.py", "eval.py", "parts",
                  "explorer", "models", "course"):
        (tmp_path / entry).symlink_to(ROOT / entry)  # its runs/ must not be the user's
    notebook = nbformat.read(FILE, as_version=4)
    (prepare,) = [cell for cell in notebook.cells if "STEPS = 20" in cell.source]
    prepare.source = prepare.source.replace("STEPS = 20", "STEPS = 8")
    waits = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), HANG)
    nbclient.NotebookClient(notebook, kernel_name="python3", **waits,
                            resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    said = printed(notebook.cells)
    for fresh, stored in zip(notebook.cells, CELLS, strict=True):
        if fresh.cell_type == "code":
            assert shape(fresh) == shape(stored), stored["id"]
    assert "NUMA" not in said and "%|" not in said
    evaluations = lines(tmp_path / "runs/walkthrough/eval.jsonl")
    assert [row["step"] for row in evaluations] == [0, 8]
    assert evaluations[1]["ci_low"] > evaluations[0]["ci_high"]  # it has learnt
