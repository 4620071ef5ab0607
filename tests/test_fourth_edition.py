"""A run of the fourth edition is opened by what reads runs, and not resumed.

tests/fourth_edition is `minirl.py --steps 3 --mini-batches 2 --batch-prompts 4 --lora-rank 1
--max-tokens 32 --log-groups 1 --eval-questions 8 --eval-k 2` of the last commit of that edition,
without what none of these programs needs, such as most lines of problems.json.
"""
import shutil

import pytest

import explore
import parts.config
from explorer.panels import draw_run
from helpers import ROOT, contents
from test_explore import data_in


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(ROOT / "tests" / "fourth_edition", tmp_path / "runs" / "fourth")


def test_its_page_and_its_curves_are_made(run):
    explore.main(explore.PageConfig("runs/fourth"))
    (shown,), left_out = (data_in(run)[name] for name in ("runs", "left_out"))
    assert left_out == "" and len(shown["metrics"]) == 3 and len(shown["evals"]) == 2
    assert [group["step"] for group in shown["groups"]] == [1, 2, 3]
    for group in shown["groups"]:
        kept = [i for i, s in enumerate(group["pool"]) if s["kept"]]
        assert group["what_if"]["ada-balance"]["kept"] == kept
        assert group["what_if"]["ada-balance"]["outcome"] == group["outcome"]
    assert draw_run(run).stat().st_size > 100_000


def test_resuming_it_is_refused_in_one_sentence(run, capsys):
    before = contents(run)
    with pytest.raises(SystemExit) as ended:
        parts.config.parse(["--name", "fourth", "--resume"])
    said = capsys.readouterr().err or ended.value.code
    assert "another version has started run fourth" in said
    assert said.rstrip("\n").isprintable() and contents(run) == before
