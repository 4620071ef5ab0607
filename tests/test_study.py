"""Studies: the stored data of a run are enough for its page, and any run can be repeated."""
import json
import random
import re
import shutil
import sys
from statistics import stdev

import mpmath
import pytest

import compare
import forest
import grpo
import store
import study
from helpers import ROOT
from parts.config import parse
from parts.files import append

PAGES = sorted(file.stem for file in (ROOT / "bench/results").glob("*.jsonl"))


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty folder in the place of bench/results."""
    monkeypatch.setattr(store, "RESULTS", tmp_path)
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
    append(run / "metrics.jsonl",
           dict(step=1, entropy=1 / 3, reward_first_round=0.5, spent={"all": 8}, **spent),
           dict(step=2, reward_first_round=0.5, spent={"none": 8}, **spent))
    append(run / "eval.jsonl", dict(step=2, avg=2 / 3, ci_low=0.6, ci_high=0.7, data="builtin", k=8,
                                    questions=9, truncated=0.01, **spent,
                                    **{"pass": {"1": 0.6, "8": 0.9}}))
    return run


def line(arm="a", regime="stream", seed=0, accuracies=(0.0, 1.0), **more):
    """A run of 100 draws a step, evaluated after every step."""
    evals = [dict(step=i, avg=avg, samples=100 * i) for i, avg in enumerate(accuracies)]
    return dict(run=f"{arm}{seed}", arm=arm, regime=regime, seed=seed, evals=evals) | more


# ---------------------------------------------------------------------------------------- its file
@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_that_of_the_committed_runs(name):
    page = (store.RESULTS / f"{name}.md").read_text()
    assert "## " in page
    lines = store.load(name)
    tables = study.STUDIES.get(name, study.SINGLE).tables(lines)
    assert store.page(name, tables, lines) == page


@pytest.mark.slow
def test_the_rows_of_the_forest_are_on_the_pages():
    pages = ["skills", "longer_skills", "longer_skills", "real_race", "human", "human_gpu", "qwen"]
    for (label, values, quantiles, _), name in zip(forest.adaptive(), pages, strict=True):
        said = store.points(values, quantiles, verdict=False)
        assert f" {said} " in (store.RESULTS / f"{name}.md").read_text(), label


def test_two_pairs_of_the_study_grpo_are_in_the_forest(results):
    """At the answers that all runs have sampled, and at the tokens that they have trained on."""
    for seed in (70, 71):
        assert forest.against_grpo() == []
        for arm, end, trained in ((grpo.DEFAULT, 0.5, 10), (grpo.GRPO, 0.3 + seed / 1000, 40)):
            evals = dict(avg=[0.1, end], samples=[0, 100], trained=[0, trained])
            store.add("grpo", dict(run=f"{arm}{seed}", arm=arm, seed=seed, evals=evals))
    (_, answers, *_), (_, tokens, quantiles, _) = forest.against_grpo()
    assert answers == pytest.approx([0.13, 0.129]) and quantiles == store.T_975
    # after 10 of its 40 tokens a run of GRPO has a quarter of its gain
    assert tokens == pytest.approx([0.4 - 0.27 / 4, 0.4 - 0.271 / 4])


@pytest.mark.slow
def test_finished_runs_become_a_study_that_is_told_and_drawn(
        results, finished, monkeypatch, capsys):
    """A run alone is drawn with all panels, and several share a page."""
    other = shutil.copytree(finished, finished.with_name("other"))
    monkeypatch.setattr(sys, "argv", ["study.py", "some", "--add", str(finished), str(other)])
    study.main()
    row = "| mine | 2 | builtin | 66.7 % [60.0, 70.0] | 90.0% | 1.0% | 1 | 8 | 80 |"
    assert row in capsys.readouterr().out
    first, second = store.load("some")[0]["metrics"]  # as they were logged, to six digits
    assert first["entropy"] == 0.333333 and first["spent"] == {"all": 8}
    assert "entropy" not in second and second["spent"] == {"none": 8} and second["step"] == 2
    with pytest.raises(SystemExit, match="some.jsonl has a run mine already."):
        study.main()
    for runs in ("some", str(finished)):
        compare.main([runs, "--out", str(results / "drawn.png")])
        assert (results / "drawn.png").read_bytes().startswith(b"\x89PNG")
        (results / "drawn.png").unlink()
    with pytest.raises(SystemExit, match="gone is no folder of a run"):
        compare.main(["gone"])
    monkeypatch.setattr(sys, "argv", ["study.py", "none-such"])
    with pytest.raises(SystemExit, match="none-such.jsonl has no runs"):
        study.main()


# ----------------------------------------------------------------------------------------- its runs
def test_what_is_missing_is_trained_and_stored(results, monkeypatch, tmp_path):
    """A run is started so that it resumes, and a run that fails is not stored."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "script.py").write_text(
        "import sys; print(sys.argv[1:]); sys.exit('--lr' in sys.argv)")

    def run(name, flags=""):
        return dict(run=name, seed=7, command=f"script.py 5 {flags}--name {name}")

    planned = [run("a"), run("b"), run("c", "--lr 9 ")]
    store.add("some", dict(run="b", metrics={}, evals={}))
    asked = store.Study(None, planned=lambda: planned,
                        keep=lambda folder: dict(metrics={}, evals=dict(avg=[0.5])))
    with pytest.raises(SystemExit, match="c failed: see .*c.log"):
        study.train_missing("some", asked, processes=2)
    assert [line["run"] for line in store.load("some")] == ["b", "a"]
    said = (tmp_path / "runs/some/a.log").read_text().splitlines()
    assert said == ["['5', '--name', 'a', '--resume']"]


@pytest.mark.parametrize("name", [name for name in study.STUDIES if study.STUDIES[name].planned()])
def test_minirl_takes_the_flags_of_the_planned_runs_and_the_plan_names_them(name):
    plan = (ROOT / "bench" / "plan.md").read_text()
    for run in study.STUDIES[name].planned():
        found = parse(run["command"].split()[1:])
        assert (found.name, found.seed) == (run["run"], run["seed"])
        arms = re.findall(rf"\| {run['arm']} \| `(.*?)` \| (\d+) \|", plan)
        assert any(f" {flags} --batch-prompts {prompts} " in run["command"]
                   for flags, prompts in arms)


# ---------------------------------------------------------------------------- what is kept of a run
def test_a_run_is_kept_with_what_it_had_spent(tmp_path):
    spent = dict(tokens_total=9, seconds_total=2.0)
    step = dict(engine_steps=7, zero_signal=0.5, others=1)
    append(tmp_path / "metrics.jsonl", dict(step=1, **step),
           dict(step=2, tokens_trained=3, **step), dict(step=3, tokens_trained=3, **step))
    append(tmp_path / "eval.jsonl", *(
        dict(step=i, avg=0.1 * i, samples_total=10 * i, **spent) for i in (0, 2)))
    kept = store.keep(("zero_signal",), tmp_path)
    assert kept["metrics"] == {"zero_signal": [0.5] * 3}
    assert kept["evals"] == dict(
        step=[0, 2], avg=[0.0, 0.2], samples=[0, 20], tokens=[9, 9], seconds=[2.0, 2.0],
        engine_steps=[0, 14], trained=[0, 3])


# --------------------------------------------------------------------------------------- statistics
@pytest.mark.parametrize("differences, word", [
    ([0.05, 0.06, 0.07], "ahead"), ([-0.05, -0.06, -0.07], "behind"),
    ([0.06, 0.01, 0.05], "open"), ([0.01, 0.02, 0.03], "open"), ([0.001, -0.001, 0.0], "equal")])
def test_words_follow_the_plan(differences, word):
    """Runs are paired by seed, so what both arms of a seed share is no noise."""
    lines = [line("b", seed=9)]
    for seed, difference in enumerate(differences):
        lines += [line("a", seed=seed, accuracies=(0.0, 0.1 * seed + difference)),
                  line("b", seed=seed, accuracies=(0.0, 0.1 * seed))]
    random.Random(0).shuffle(lines)
    values = store.paired(lines, "a", "b", lambda run: store.at(run, "samples", 100))
    assert values == pytest.approx(differences)
    centre, half = sum(differences) / 3, 4.30 * stdev(differences) / 3**0.5
    said = store.points(values).replace("-0.0", "+0.0")
    assert said == f"{100 * centre + 1e-9:+.1f} ± {100 * half:.1f} points: {word}"
    assert store.points(values[:1]) == f"{100 * values[0]:+.1f} points: one pair"
    assert store.points([]) == "not run"
    assert store.at(lines[0], "samples", 50) == pytest.approx(lines[0]["evals"][1]["avg"] / 2)
    with pytest.raises(ValueError, match="spent only 100 samples of 101"):
        store.at(lines[0], "samples", 101)


@pytest.mark.parametrize("level, quantiles", [
    (0.95, store.T_95), (0.99, store.T_99), (0.975, store.T_975)])
def test_the_quantiles_are_students(level, quantiles):
    """Student's t is an incomplete beta function, which mpmath has."""
    for count, quantile in quantiles.items():
        freedom = count - 1
        outside = mpmath.betainc(
            freedom / 2, 1 / 2, 0, freedom / (freedom + quantile**2), regularized=True)
        assert float(1 - outside) == pytest.approx(level, abs=5e-4)


def test_power_is_the_share_of_studies_that_find_a_difference():
    rng, ahead = random.Random(0), 0
    for _ in range(4000):
        centre, half = store.interval([rng.gauss(0.05, 0.05) for _ in range(5)])
        ahead += centre > half
    assert store.power(0.05, 0.05, 5) == pytest.approx(ahead / 4000, abs=0.02)
    assert store.power(0, 0.05, 5) == pytest.approx(0.025, abs=0.001)


def test_exact_p_values_by_hand():
    """Of the 20 ways to lose 3 of 6 runs two are as uneven as 3 against 0."""
    assert store.fisher(3, 0, 3) == pytest.approx(2 / 20) and store.fisher(1, 1, 3) == 1
    assert store.sign_test(0, 6) == store.sign_test(6, 6) == 2 / 64
    assert store.sign_test(3, 6) == 1
