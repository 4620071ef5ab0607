"""The notebook has the results of a run in it, and runs from top to bottom, also alone.

After a change, `jupyter execute --inplace walkthrough.ipynb` stores new results.
"""
import json
import re

import pytest

from helpers import HANG, ROOT, lines

FILE = ROOT / "walkthrough.ipynb"
CELLS = json.loads(FILE.read_text())["cells"]
TEXTS = ["".join(cell["source"]) for cell in CELLS]


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
    stored = json.dumps([cell.get("outputs") for cell in CELLS])
    assert not re.search(r"stderr|Warning|NUMA|%\||/tmp|/home|/root|/work|rror:", stored)


def test_what_the_text_says_of_the_stored_run_is_in_it():
    (remark,) = [text for text in TEXTS if text.startswith("In the stored run it is answer 13")]
    said = printed(CELLS)
    assert "answer 13: " in said and "prompt: 1+7+4+8+6-5=?" in said
    assert all(step in said for step in re.findall(r"`([\d+=-]+)`", remark))
    assert said.count("the project says") == 4


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
    for fresh, stored in zip(notebook.cells, CELLS, strict=True):
        if fresh.cell_type == "code":
            assert shape(fresh) == shape(stored), stored["id"]
    evaluations = lines(tmp_path / "runs/walkthrough/eval.jsonl")
    assert [row["step"] for row in evaluations] == [0, 8]
    assert evaluations[1]["ci_low"] > evaluations[0]["ci_high"]  # it has learnt
