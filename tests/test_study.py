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
import probes
import sampling
import store
import study
from helpers import ROOT
from helpers import lines as rows_of
from parts.config import parse
from parts import probe
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
                                    truncated=0.01, **{"pass": {"1": 0.6, "8": 0.9}}, **spent))
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
    if name == "probe":  # whose rows are no runs
        told = probes.tables(rows_of(store.RESULTS / "probe.jsonl"), ["earlier", "new"])
        assert [row for row in told.splitlines() if row not in page.splitlines()] == []
        return
    lines = store.load(name)
    tables = study.STUDIES.get(name, study.SINGLE).tables(lines)
    assert store.page(name, tables, lines) == page


def test_two_versions_of_the_probe_can_be_compared(tmp_path):
    """Of which the earlier may call its tolerances limits."""
    (tmp_path / "earlier.py").write_text(
        "from parts.probe import Probe as Now, tolerances as limits\n"
        "def Probe(*args, limits, **options):\n"
        "    return Now(*args, tolerances=limits, **options)\n")
    for module in (probe, probes.load_earlier(tmp_path / "earlier.py")):
        rows = probes.outcomes(module, 0.01, 0)
        assert [next(rows), next(rows)] == [("none", False, 0), ("layer 0", True, 1)]


@pytest.mark.slow
def test_finished_runs_become_a_study_that_is_told_and_drawn(
        results, finished, monkeypatch, capsys):
    """By the command lines: a run alone has all panels, several share a page."""
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
    with pytest.raises(SystemExit, match="none-such.jsonl lacks all of the runs"):
        study.main()
    store.add("objective", dict(run="some", command="minirl.py", metrics={}, evals={}))
    monkeypatch.setattr(sys, "argv", ["study.py", "objective", "--into", "half", "--draw"])
    with pytest.raises(SystemExit, match="half.jsonl lacks 1 of the runs"):
        study.main()
    monkeypatch.setattr(sys, "argv", ["study.py", "some", "--into", "anew"])  # made one by one
    with pytest.raises(SystemExit, match="some.jsonl stores no commands of its runs"):
        study.main()


# ----------------------------------------------------------------------------------------- its runs
def test_what_is_missing_is_trained_and_only_a_known_end_is_a_result(
        results, monkeypatch, tmp_path):
    """Started to be resumed; how it ended decides."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "script.py").write_text(
        "import os, sys; print(sys.argv[1:]); os.makedirs(f'runs/{sys.argv[-2]}')\n"
        "open(f'runs/{sys.argv[-2]}/groups.jsonl', 'w')\n"
        "sys.exit('diverged' if '--lr' in sys.argv else 0)")

    def run(name, flags=""):
        return dict(run=name, seed=7, command=f"script.py 5 {flags}--name {name}")

    table = [run("a"), run("b", "--lr 9 "), run("stored")]
    store.add("some", dict(run="stored", metrics={}, evals={}))

    def keep(folder, end):
        (folder / "groups.jsonl").read_text()
        return dict(metrics={}, evals=dict(avg=[0.5]))

    asked = store.Study(keep, None, endings=("diverged",))
    study.train_missing("some", asked, table[::2], processes=2)
    study.train_missing("some", asked, table, processes=2)
    _, a, b = store.load("some")
    assert (a["run"], a["seed"], a["broke"], b["run"], b["broke"]) == ("a", 7, "", "b", "diverged")
    said = (tmp_path / "runs/some/b.log").read_text().splitlines()[0]
    assert said == str("5 --lr 9 --name b --resume".split())
    assert store.runs_of_file("some") == table[:2]
    asked.endings = ()
    with pytest.raises(SystemExit, match="c failed: see .*c.log"):
        study.train_missing("some", asked, [run("c", "--lr 9 ")], processes=1)


def all_runs(name: str) -> list[dict]:
    planned = study.STUDIES[name].planned
    return planned() if planned else store.runs_of_file(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(study.STUDIES.keys() - {"real_model", "qwen_cpu"}))
def test_minirl_takes_the_flags_of_every_run_of_a_study(name, monkeypatch):
    """Of runs whose flags differ in numbers alone, the first. Two studies have single runs."""
    monkeypatch.chdir(ROOT / "bench/results")  # as deep as runs/STUDY
    seen = set()
    for run in all_runs(name):
        command = re.sub(r"\.\./(words-135M|Qwen\S*)", "SmolLM2-135M-Instruct", run["command"])
        flags = command.split()
        flags = flags[next(i for i, flag in enumerate(flags) if flag.startswith("--")):]
        words = [flag for flag in flags if flag not in (str(run["seed"]), run["run"])]
        alike = tuple("a number" if re.match(r"-?\d", word) else word for word in words)
        if alike not in seen:
            found = parse(flags)
            assert (found.name, found.seed) == (run["run"], run["seed"])
            seen.add(alike)
    assert len(seen) >= 3 or name == "real_race"


def test_the_plan_names_what_the_program_runs():
    """Of the study whose runs are those of a table: an arm's flags and prompts."""
    plan = (ROOT / "bench" / "plan.md").read_text().partition("## Where hits are rare")[2]
    for run in all_runs("human"):
        flags, prompts = re.search(rf"\| {run['arm']} \| `(.*?)` \| (\d+) \|", plan).groups()
        assert f" {flags} --batch-prompts {prompts} " in run["command"]


# ---------------------------------------------------------------------------- what is kept of a run
def group(letter, *rewards, coefficient=0.0):
    """A prompt with its answers; the coefficient is that of all of them."""
    pool = [dict(reward=reward, coefficient=coefficient) for reward in rewards]
    return dict(step=1, prompt=f"<|user|>1{letter}2=?", pool=pool)


def test_a_run_is_kept_with_what_it_had_spent(tmp_path):
    spent = dict(tokens_total=0, seconds_total=0.0)
    usual = dict(engine_steps=7, zero_signal=0.5)
    append(tmp_path / "metrics.jsonl", dict(step=1, samples_total=10, **usual),
           dict(step=2, samples_total=20, tokens_trained=3, **usual))
    append(tmp_path / "eval.jsonl", *(
        dict(step=i, avg=0.1 * i, samples_total=10 * i, **spent) for i in (0, 2)))
    solved = group("F", 1.0, 0.0, coefficient=0.5)
    append(tmp_path / "groups.jsonl", group("F", 0.0, 0.0, 0.0), solved,
           group("G", 0.0, 0.0, 0.0), solved)
    found = sampling.keep_letters(tmp_path, "")
    assert found["solved"] == {"F": 5} and found["zero_signal"] == 0.5
    assert found["letters"] == {"F": [3, 7, 2, 1], "G": [1, 3, 0, 1]}
    assert found["evals"]["engine_steps"] == [0, 14] and found["evals"]["trained"] == [0, 3]
    broken = sampling.keep_letters(tmp_path, "gradient that is not finite")
    assert broken["evals"]["avg"] == [0.0, 0.2, 0.0]
    assert broken["evals"]["samples"] == [0, 20, sampling.FURTHER]


def test_letters_are_counted_by_draws(monkeypatch):
    monkeypatch.setattr(sampling, "WINDOW", 4)
    found = sampling.letters_of([
        group("F", 0.0, 0.0), group("F", 1.0, 0.0, 0.0, coefficient=0.5), group("G", 1.0, 1.0),
        group("F", 0.0, 0.0, 1.0, 1.0)])["letters_by_draws"]
    assert found["F"] == [[2, 1, 0], [1, 0, 1]] and found["A"] == []
    assert found["G"] == [[0] * 3, [1, 0, 1]]


def test_several_held_out_sets_count_by_their_mean(tmp_path):
    spent = dict(tokens_total=9, seconds_total=2.0)
    append(tmp_path / "metrics.jsonl",
           dict(step=1, samples_total=10, engine_steps=7, zero_signal=0.5))
    append(tmp_path / "eval.jsonl", *(
        dict(step=step, data=data, avg=avg, samples_total=10 * step, **spent)
        for step in (0, 1) for data, avg in (("words", 0.5), ("svamp", 0.1))))
    kept = sampling.keep_real(tmp_path, "")
    assert kept["evals"]["avg"] == [0.3, 0.3]
    assert kept["evals"]["sets"][1] == dict(words=0.5, svamp=0.1)


# --------------------------------------------------------------------------------------- statistics
@pytest.mark.parametrize("differences, word", [
    ([0.05, 0.06, 0.07], "ahead"), ([-0.05, -0.06, -0.07], "behind"),
    ([0.06, 0.01, 0.05], "open"), ([0.01, 0.02, 0.03], "open"), ([0.001, -0.001, 0.0], "equal")])
def test_words_follow_the_plan(differences, word):
    """Pairs by seed: what both arms of a seed share is no noise."""
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


@pytest.mark.parametrize("level, quantiles", [(0.95, store.T_95), (0.99, store.T_99)])
def test_the_quantiles_are_students(level, quantiles):
    """So much lies within: Student's t is an incomplete beta function, which mpmath has."""
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
