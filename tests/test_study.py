"""Studies: the stored data of a run are enough for its page."""
import random
from statistics import stdev

import mpmath
import pytest

import forest
import store
import study
from helpers import ROOT
from parts.files import append

PAGES = sorted(file.stem for file in (ROOT / "bench/results").glob("*.jsonl"))


def line(arm: str, seed: int, end: float = 1.0):
    """A run of one step with 100 draws."""
    evals = [dict(step=i, avg=avg, samples=100 * i) for i, avg in enumerate((0.0, end))]
    return dict(run=f"{arm}{seed}", arm=arm, seed=seed, evals=evals)


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


@pytest.mark.parametrize("differences, word", [
    ([0.05, 0.06, 0.07], "ahead"), ([-0.05, -0.06, -0.07], "behind"),
    ([0.06, 0.01, 0.05], "open"), ([0.01, 0.02, 0.03], "open"), ([0.001, -0.001, 0.0], "equal")])
def test_words_follow_the_plan(differences, word):
    """Runs are paired by seed, so what both arms of a seed share is no noise."""
    lines = [line("b", seed=9)]
    for seed, difference in enumerate(differences):
        lines += [line("a", seed, 0.1 * seed + difference), line("b", seed, 0.1 * seed)]
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
