"""What a study keeps of its runs is enough for its table and picture."""
import json
import shutil
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import ablate_objective  # noqa: E402
import compare_samplers  # noqa: E402
import study  # noqa: E402


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty folder in the place of bench/results."""
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def finished(tmp_path):
    """The folder of a finished run. Step 2 had no signal, so it has no entropy."""
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    starts = [dict(versions=dict(torch="2"))]
    stored = dict(config=dict(model="tiny", data="builtin"), starts=starts)
    (run / "config.json").write_text(json.dumps(stored))
    spent = dict(samples_total=8, tokens_total=80, seconds_total=1.0)
    metrics = [dict(step=1, entropy=1 / 3, reward_first_round=0.5, spent={"all": 8}, **spent),
               dict(step=2, reward_first_round=0.5, spent={"none": 8}, **spent)]
    held_out = [dict(step=2, avg=2 / 3, ci_low=0.6, ci_high=0.7, data="builtin", k=8, **spent)]
    for name, rows in (("metrics.jsonl", metrics), ("eval.jsonl", held_out)):
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_run_comes_back_as_it_was_logged(results, finished):
    study.add("some", study.fold(finished, run="mine"))
    (line,) = study.load("some")
    first, second = line["metrics"]
    assert first["entropy"] == 0.333333 and first["spent"] == {"all": 8}
    assert "entropy" not in second and second["spent"] == {"none": 8} and second["step"] == 2
    assert line["evals"][0]["avg"] == 0.666667 and line["run"] == "mine"


def test_only_the_columns_asked_for_are_kept(results, finished):
    line = study.fold(finished, ("step", "avg"), run="mine")
    assert line["metrics"] == dict(step=[1, 2]) and line["evals"] == dict(step=[2], avg=[0.666667])


@pytest.mark.slow
def test_a_study_of_whole_runs_is_filled_told_and_drawn(results, finished, monkeypatch, capsys):
    """By the command line: one run has all panels, several share a page."""
    other = shutil.copytree(finished, finished.with_name("other"))
    for arguments in (["--add", str(finished)], ["--draw", str(results / "one.png")],
                      ["--add", str(other)], ["--draw", str(results / "both.png")]):
        monkeypatch.setattr(sys, "argv", ["study.py", "some", *arguments])
        study.main()
    assert "step 2: 66.7% [60.0%, 70.0%], 1 s, 8 samples, 80 tokens" in capsys.readouterr().out
    for name in ("one.png", "both.png"):
        assert (results / name).read_bytes().startswith(b"\x89PNG")


def test_an_unknown_run_gets_one_sentence(results, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["study.py", "none-such"])
    with pytest.raises(SystemExit, match="no such run in .*none-such.jsonl"):
        study.main()


@pytest.mark.parametrize("name, script", [
    ("samplers", compare_samplers), ("objective", ablate_objective)])
def test_the_committed_table_is_the_one_of_the_committed_runs(name, script):
    assert script.table(script.load()) == (study.RESULTS / f"{name}.md").read_text()
