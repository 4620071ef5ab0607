"""What a study keeps of its runs is enough for its table and picture."""
import json
import math
import re
import shutil
import sys
from statistics import stdev

import pytest

from conftest import ROOT
from parts import config
from parts.config import parse

sys.path.insert(0, str(ROOT / "bench"))
import ablate_objective  # noqa: E402
import compare_skills  # noqa: E402
import longer_skills  # noqa: E402
import real_race  # noqa: E402
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


def test_what_is_stored_is_not_trained_again(results):
    trained, jobs = [], {"a": (1, 2), "b": (3, 4), "c": (5, 6)}
    study.add("some", dict(run="b", metrics={}, evals={}))
    study.train_missing("some", jobs, lambda *job: trained.append(job), processes=2)
    assert sorted(trained) == [(1, 2), (5, 6)]


def test_a_run_is_started_to_be_resumed_and_its_failure_is_not_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    script = "import sys; print(sys.argv[1:]); sys.exit('--bad' in sys.argv)"
    (tmp_path / "script.py").write_text(script)
    for flags in (["--lr", "1"], ["--lr", "2"]):
        assert study.launch(tmp_path / "runs", "mine", flags, "script.py") > 0
    assert (tmp_path / "runs" / "mine.log").read_text().splitlines() == [
        f"['--lr', '{lr}', '--name', 'mine', '--resume']" for lr in (1, 2)]
    with pytest.raises(SystemExit, match="mine failed: see .*mine.log"):
        study.launch(tmp_path / "runs", "mine", ["--bad"], "script.py")


RUNS_TO_COME = {
    ablate_objective: [(cell, 0) for cell in ablate_objective.cells()],
    compare_skills: [(arm, regime, 0.001, 0) for arm in compare_skills.ARMS
                     for regime in (*compare_skills.REGIMES, "still")],
    longer_skills: [(arm, "long", 0.001, 0) for arm in longer_skills.ARMS] + [
        (arm, factor, 0.001, 0) for arm in longer_skills.PAIR for factor in longer_skills.FACTORS],
    real_race: [(arm, 0) for arm in real_race.ARMS]}


@pytest.mark.parametrize("script", [
    pytest.param(ablate_objective, marks=pytest.mark.slow), compare_skills, longer_skills,
    real_race], ids=lambda script: script.__name__)
def test_minirl_takes_the_flags_of_every_run_of_a_study(script, monkeypatch):
    class Started(Exception):
        """The run would train now."""

    def launch(runs, name, flags, script=""):
        bits = script == "bench/coarse_engine.py"  # that script's own argument comes first
        parse([*flags[bits:], "--name", "mine"])
        raise Started

    monkeypatch.setattr(study, "launch", launch)
    monkeypatch.setattr(config, "require_files", lambda *_, **__: None)  # the few problems' file
    for job in RUNS_TO_COME[script]:
        with pytest.raises(Started):
            script.train(*job)


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


def test_the_committed_table_is_that_of_the_committed_runs():
    found = ablate_objective.table(ablate_objective.load())
    assert found == (study.RESULTS / "objective.md").read_text()


def test_the_page_quotes_the_committed_table():
    """Accuracies with their range, in text and in tables; there with the runs that were lost."""
    grid = (study.RESULTS / "objective.md").read_text()
    page = (ROOT / "docs" / "objective.md").read_text()
    told = re.findall(r"([\d.]+) % \(([\d.]+) to ([\d.]+)[;)]", page)
    rows = re.findall(r"\| (\d) of (\d) \| (.+?) \| (.+?) \|", page)
    assert len(told) >= 10 and len(rows) >= 4
    assert [x for x in told if "{}% ({}% to {}%)".format(*x) not in grid] == []
    ended = [[run["evals"][-1]["avg"] for run in ablate_objective.load()[f"mask-N8-none-{arm}-is"]]
             for arm in ("cispo", "clip")]
    centre, half = study.interval([100 * (one - other) for one, other in zip(*ended)])
    assert f"({centre:.0f} ± {half:.0f} points)" in page
    assert [x for x in rows if "| {1} | {0} | {2} | {3} |".format(*x) not in grid] == []


def ends(cell):
    """(accuracy at the start, at step 128, at the end) of a cell's runs, by seed."""
    return [(evals[0]["avg"], evals[len(evals) // 2]["avg"], evals[-1]["avg"])
            for evals in (run["evals"] for run in ablate_objective.load()[cell])]


def fisher(lost, other, runs):
    """Two-sided exact p-value of `lost` against `other` of so many runs each."""
    both = lost + other
    ways = {i: math.comb(runs, i) * math.comb(runs, both - i) for i in range(both + 1)}
    rarer = sum(way for way in ways.values() if way <= ways[lost])
    return rarer / math.comb(2 * runs, both)


def test_what_the_pages_say_of_single_runs_of_the_objective():
    """What README finds, and what docs/objective.md says beside its tables."""
    pages = " ".join((ROOT / "README.md").read_text().split()
                     + (ROOT / "docs" / "objective.md").read_text().split())
    r3, r2, none = ([end for _, _, end in ends(f"stress-N4-{replay}-clip-is")]
                    for replay in ("r3", "r2", "none"))
    assert min(map(float.__sub__, r3, r2)) == pytest.approx(0.002, abs=2e-4)
    assert "once by 0.2 points" in pages
    for one, other, said in ((r3, r2, "average by +24 ± 29"), (r2, none, "-19 ± 27"),
                             (r3, none, "+6 ± 8")):
        gaps = [100 * (x - y) for x, y in zip(one, other, strict=True)]
        half = 2.571 * stdev(gaps) / 6**0.5  # Student's t, five degrees of freedom
        assert f"{sum(gaps) / 6:+.0f} ± {half:.0f}" in said and said in pages
    assert f"{2 * 0.5**6:.2f}" == "0.03" and pages.count("p = 0.03") == 2
    cells = [f"coarse1-N1-{replay}-clip-{{}}" for replay in ("none", "r3")]
    without, having = ([[run for run in ends(cell.format(weight)) if run[2] < run[0]]
                        for cell in cells] for weight in ("nois", "is"))
    assert [len(lost) for lost in without + having] == [3, 3, 1, 0]
    assert "6 of 12 runs collapse without it, 1 with it" in pages
    early = sum(middle < start for lost in without for start, middle, _ in lost)
    assert early == 3 and "three of the six by step 128" in pages
    assert f"{fisher(6, 1, 12):.2f}" == "0.07" and "p = 0.07 (Fisher)" in pages
    assert f"{fisher(3, 0, 6):.2f}" == "0.18" and "p = 0.18 (Fisher)" in pages
    old = {line["run"]: line["evals"] for line in study.load("old_code")}
    for start in ("today", "unrounded"):
        mine = [evals for run, evals in old.items() if run.startswith(start)]
        assert [len(mine), sum(evals[-1]["avg"] < evals[0]["avg"] for evals in mine)] == [6, 1]


@pytest.mark.parametrize("level, quantiles", [(0.95, study.T_95), (0.99, study.T_99)])
def test_the_quantiles_are_students(level, quantiles):
    """So much of the density lies within; by the trapezoidal rule."""
    for count, quantile in quantiles.items():
        freedom, step = count - 1, quantile / 10_000
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / (freedom * math.pi) ** 0.5
        heights = [scale * (1 + (i * step) ** 2 / freedom) ** (-(freedom + 1) / 2)
                   for i in range(10_001)]
        inside = 2 * step * (sum(heights) - (heights[0] + heights[-1]) / 2)
        assert inside == pytest.approx(level, abs=5e-4)


def test_a_cells_summary_by_hand():
    """Two seeds, four steps each. NaN where nothing was logged."""
    def run(accuracies, k3):
        steps = [dict(step=i, kl_k3=x, entropy_trained=x) for i, x in enumerate(k3)]
        evals = [dict(step=i, avg=avg) for i, avg in enumerate(accuracies)]
        return dict(metrics=steps, evals=evals, broke="")

    s = ablate_objective.summary([run((0.3, 0.9, 0.7), (1, 1, 1, 1)),
                                  run((0.3, 0.5, 0.1), (1, 1, 2, 8))])
    assert (s["seeds"], s["broke"], s["low"], s["high"]) == (2, 0, 0.1, 0.7)
    approximately = {key: pytest.approx(value) for key, value in dict(
        last=0.4, best=0.7, k3=2, entropy=4.5).items()}
    assert {key: s[key] for key in approximately} == approximately
    assert s["clipped"] != s["clipped"]
