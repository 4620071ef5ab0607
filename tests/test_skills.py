"""The built-in skills and the study made of them: pass rates as promised, fair verdicts."""
import functools
import itertools
import json
import random
import re
import sys
from collections import Counter
from statistics import mean, stdev

import pytest

from conftest import ROOT
from course import laws
from models import make
from parts import problems
from parts.data import default_data, default_eval_data, load_problems

sys.path.insert(0, str(ROOT / "bench"))
import compare_skills  # noqa: E402
import longer_skills  # noqa: E402
import real_race  # noqa: E402
import skills  # noqa: E402
import skills_theory  # noqa: E402
import study  # noqa: E402


# -------------------------------------------------------------------------------------- the problem
def test_a_problem_adds_its_letters_digit_and_no_problem_is_in_both_splits():
    train, test = problems.skills("train", 9999), problems.skills("test", 9999)
    assert (len(train), len(test)) == (3600, 1200)
    assert len({row["problem"] for row in train + test}) == 4800
    for row in train + test:
        a, letter, b = re.fullmatch(r"(\d)(\w)(\d)=\?", row["problem"]).groups()
        assert int(row["answer"]) - int(a) - int(b) == problems.offset(letter)
        assert row["level"] == problems.belief(letter)


def test_every_letter_comes_equally_often_in_any_first_part():
    letters = Counter(row["problem"][1] for row in problems.skills("train", 192))
    assert set(letters.values()) == {4} and len(letters) == 48
    assert set(Counter(map(problems.belief, letters)).values()) == {6}
    digits = Counter(map(problems.offset, problems.LETTERS))
    assert set(digits) == set(range(10)) and max(digits.values()) <= 5
    assert problems.skills("train", 192) == problems.skills("train", 9999)[:192]


def test_demonstrations_are_right_as_often_as_believed_and_never_of_the_test_split():
    test, rng = {row["problem"] for row in problems.skills("test", 9999)}, random.Random(0)
    right, shown, favourites = Counter(), Counter(), 0
    for _ in range(40_000):
        text, completion = make.believed_skill(rng, lazy=False)
        assert text not in test
        a, letter, b = text[0], text[1], text[2]
        said, box = completion.split("\n")
        believed = int(said.removeprefix(f"{letter}="))
        assert box == f"\\boxed{{{int(a) + int(b) + believed}}}"
        shown[problems.belief(letter)] += 1
        right[problems.belief(letter)] += believed == problems.offset(letter)
        favourites += believed == make.favourite(letter)
    for belief, count in shown.items():
        assert abs(right[belief] / count - belief) < 4 * (belief / count) ** 0.5
    assert abs(favourites / (40_000 - right.total()) - 0.9) < 0.01


def test_no_correction_serves_many_letters():
    """As many letters are wrong by one as by two, ... nine; a favourite is never right."""
    distances = Counter((make.favourite(x) - problems.offset(x)) % 10 for x in problems.LETTERS)
    assert set(distances) == set(range(1, 10)) and max(distances.values()) <= 6
    pairs = Counter((make.favourite(x), problems.offset(x)) for x in problems.LETTERS)
    assert max(pairs.values()) <= 3


def test_they_are_data_by_name():
    found = load_problems("builtin-skills", for_training=False)
    assert len(found) == 240 and found[0].source == "builtin-skills"
    both = load_problems("builtin,builtin-skills", limit=5)
    assert [p.source for p in both] == ["builtin"] * 5 + ["builtin-skills"] * 5
    assert default_data("tiny-skills") == default_eval_data("builtin-skills") == "builtin-skills"


@pytest.mark.slow
def test_the_models_pass_rates_are_those_of_the_paper():
    """Exact chances of the right completion; pass@k as bench/plan.md quotes both."""
    plan = (ROOT / "bench" / "plan.md").read_text()
    k = [2**i for i in range(9)]
    exact = [p for rates in skills_theory.pass_rates().values() for p in rates]
    found = [mean(1 - (1 - p) ** n for p in exact) for n in k]
    paper = (.18, .27, .38, .48, .58, .66, .72, .77, .81)  # Reinforce-Ada, v1, Fig. 2
    for values in (found, paper):
        assert " ".join(f"{p:.2f}"[1:] for p in values) in plan
    for n, ours, theirs in zip(k, found, paper):
        assert abs(ours - theirs) < (0.025 if n <= 64 else 0.1)
    for letter, rates in skills_theory.pass_rates().items():
        belief = problems.belief(letter)
        assert all(abs(p - belief) < 0.2 * belief + 0.01 for p in rates)


# --------------------------------------------------------------- the theory of docs/sampling.md
def per_draw(p, arm):
    return laws.efficiency(p, skills_theory.RULES[arm])


def signal(p, arm):
    """Of a prompt, with all its draws."""
    return per_draw(p, arm) * skills_theory.law(p, arm).draws


def test_what_a_draw_buys_is_what_the_page_says():
    page = " ".join((ROOT / "docs" / "sampling.md").read_text().split())
    at = {arm: f"{per_draw(0.5, arm):.2f}" for arm in skills_theory.RULES}
    assert list(at.values()) == ["0.75", "0.94", "0.44", "0.43"]
    assert all(per_draw(p, arm) > 0.93 for p in (0.0003, 0.003, 0.03)
               for arm in ("ada-pos", "ada-balance"))
    grid = [i / 40 for i in range(1, 40)]
    highest = [max(signal(p, arm) for p in (1e-5, *grid)) for arm in skills_theory.RULES]
    assert [f"{x:.0f}" for x in highest] == ["3", "15", "31", "32"]
    ratios = [per_draw(p, "ada-balance") / per_draw(p, "uniform-4") for p in grid]
    assert max(ratios) < 1.33 and "1 / 0.75 = 1.33" in page
    assert f"{ratios[19]:.2f}" == "0.57" and "has 0.57 times that of n = 4, and 0.45" in page


# ---------------------------------------------------------------------------------------- the study
def line(arm="a", regime="stream", seed=0, accuracies=(0.0, 1.0), **more):
    """A run of 100 draws a step, evaluated after every step."""
    evals = [dict(step=i, avg=avg, samples=100 * i, tokens=800 * i, seconds=1.0 * i,
                  engine_steps=10 * i, trained=80 * i) for i, avg in enumerate(accuracies)]
    return dict(run=f"{arm}{seed}", arm=arm, regime=regime, seed=seed, evals=evals) | more


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("differences, word", [
    ([0.05, 0.06, 0.07], "ahead"), ([-0.05, -0.06, -0.07], "behind"),
    ([0.1, -0.1, 0.0], "open"), ([0.001, -0.001, 0.0], "equal")])
def test_words_follow_the_plan(differences, word):
    """Pairs by seed: what both arms of a seed share is no noise."""
    lines = []
    for seed, difference in enumerate(differences):
        lines += [line("a", seed=seed, accuracies=(0.0, 0.1 * seed + difference)),
                  line("b", seed=seed, accuracies=(0.0, 0.1 * seed))]
    random.Random(0).shuffle(lines)
    centre, half, found = skills.compare(
        lines, "a", "b", lambda run: skills.at(run, "samples", 100))
    assert found == word and centre == pytest.approx(sum(differences) / 3)
    assert half == pytest.approx(4.303 * stdev(differences) / 3**0.5, rel=1e-3)


def test_a_rate_is_that_of_the_tuning_seeds_and_one_beyond_an_end_is_tried():
    """And the table shows those seeds alone, not the runs that were then made at that rate."""
    accuracy = {(100, 0.001): 0.3, (101, 0.001): 0.5, (100, 0.002): 0.4, (101, 0.002): 0.4,
                (100, 0.004): 0.2, (101, 0.004): 0.2, (100, 0.0005): 0.3, (101, 0.0005): 0.3}
    lines, asked = [line("a", seed=0, lr=0.004), line("a", seed=100, lr=1e-9, regime="still")], []

    def train_missing(jobs):
        asked.append(jobs)
        lines[:0] = [line(arm, regime, seed, (0, accuracy[seed, lr]), lr=lr)
                     for arm, regime, lr, seed in jobs]
        return lines

    which = (100, 101), "stream", 100
    assert skills.tune(train_missing, "a", compare_skills.RATES, *which) == {"a": 0.001}
    assert len(asked[0]) == 6 and asked[1] == [("a", "stream", 0.0005, seed) for seed in (100, 101)]
    table = skills.rates_tried(dict(a=skills.tuned(lines, "a", *which)))
    assert table.splitlines()[-1] == "| a | 30.0% | 40.0% | 40.0% | 20.0% |"


def test_a_run_that_drew_too_little_goes_on(tmp_path, monkeypatch):
    """By the steps between two evaluations, until it has the draws of the primary measure."""
    monkeypatch.setattr(skills, "RUNS", tmp_path)
    monkeypatch.setattr(compare_skills, "DRAWS", 100)
    monkeypatch.setattr(compare_skills, "ARMS", {"a": ([], 16, 7, 2)})
    monkeypatch.setattr(skills, "fold", lambda run: dict(evals=dict(avg=[])))
    stored, asked = [], []
    monkeypatch.setattr(study, "add", lambda name, row: stored.append(row))

    def launch(runs, name, flags, script):
        steps = int(flags[flags.index("--steps") + 1])
        asked.append(steps)
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, "metrics", [dict(step=steps, samples_total=10 * steps)])
        return 1.0

    monkeypatch.setattr(study, "launch", launch)
    compare_skills.train("a", "stream", 0.001, 0)
    assert asked == [7, 9, 11] and stored[0]["cpu_seconds"] == 3.0
    compare_skills.train("a", "still", 1e-9, 100)
    assert asked[3:] == [compare_skills.STILL_STEPS]


def test_a_run_is_folded_with_what_it_had_spent(tmp_path):
    spent = dict(tokens_total=0, seconds_total=0.0)
    pool = [dict(reward=1.0, coefficient=0.5), dict(reward=0.0)]
    silent = [dict(reward=0.0), dict(reward=0.0), dict(reward=0.0)]
    logs = {
        "metrics": [dict(step=i, samples_total=10 * i, engine_steps=7, zero_signal=0.5)
                    | (dict(tokens_trained=3) if i == 2 else {}) for i in (1, 2)],
        "eval": [dict(step=i, avg=0.1 * i, samples_total=10 * i, **spent) for i in (0, 2)],
        "groups": [dict(step=1, prompt="<|user|>1F2=?", pool=silent),
                   dict(step=2, prompt="<|user|>3F4=?", pool=pool),
                   dict(step=2, prompt="<|user|>3G4=?", pool=silent),
                   dict(step=2, prompt="<|user|>4F4=?", pool=pool)]}
    for name, rows in logs.items():
        write(tmp_path, name, rows)
    found = skills.fold(tmp_path)
    assert found["solved"] == {"F": 5} and found["zero_signal"] == 0.5
    assert found["letters"] == {"F": [3, 7, 2, 1], "G": [1, 3, 0, 1]}
    assert found["evals"]["engine_steps"] == [0, 14] and found["evals"]["trained"] == [0, 3]


@pytest.mark.slow
def test_the_committed_tables_are_those_of_the_committed_runs():
    lines = stored()
    report = compare_skills.report(lines)
    assert report == (study.RESULTS / "skills.md").read_text()
    page = (ROOT / "docs" / "sampling.md").read_text()
    differences = re.findall(r"([-+][\d.]+ ± [\d.]+) points", report)
    assert len(differences) == 36  # of five seeds, seven new ones, all twelve
    for i in range(0, 12, 2):
        assert " | ".join(differences[i:i + 2] + differences[12 + i:14 + i]) in page
    still = {line["arm"]: line["zero_signal"] for line in lines if line["regime"] == "still"}
    silent = f"{still['uniform-4']:.0%}".rstrip("%"), f"{still['ada-balance']:.0%}".rstrip("%")
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "fall from {} % (n = 4) to {} % before training".format(*silent) in readme


@functools.cache
def stored():
    return study.load("skills")


def lead(rival, cost, budget, regime="stream", seeds=compare_skills.NEW_SEEDS):
    """Points of ada-balance over a rival with the interval, as the stored runs have them."""
    lines = study.of(stored(), seeds, regime=regime)
    return skills.in_points(*skills.compare(
        lines, "ada-balance", rival, lambda run: skills.at(run, cost, budget))[:2])


def test_what_the_readme_finds_is_in_the_stored_runs():
    readme = (ROOT / "README.md").read_text().replace("\N{MINUS SIGN}", "-")
    asked = [("uniform-4", "step", 40), ("uniform-4", "step", 60), ("uniform-4", "samples", 16_000),
             ("uniform-4-wide", "samples", 16_000)]
    many, few = ([lead(*each, regime) for each in asked] for regime in ("stream", "few"))
    size = [found[1:] for found in many]
    assert [found[0] for found in many] == ["+", "+", "-", "-"]
    earlier = lead("uniform-4", "step", 40, seeds=range(5))
    assert abs(float(earlier.split(" ± ")[0])) < float(earlier.split(" ± ")[1]), "open"
    assert (f"After 40 steps ahead by {size[0]} points (five other seeds: open); "
            f"at 16,000 draws behind by {size[2]}¹, at 46,000 ahead") in readme
    assert f"At 16,000 draws behind by {size[3]}; at 46,000 open" in readme
    behind = lead("uniform-16", "samples", 16_000)
    assert behind[0] == "-" and f"At 16,000 draws behind by {behind[1:]}; at 46,000 ahead" in readme
    assert [found[0] for found in many] == [found[0] for found in few], "the signs"


def test_the_first_table_of_the_page_is_that_of_the_stored_runs():
    """A row: at equal what; against n = 4, against more prompts, against n = 16."""
    rows = re.findall(r"^\| ([\d,]+) (steps|draws) \| (.+) \|$",
                      (ROOT / "docs" / "sampling.md").read_text().split("\n\n* ")[0], re.M)
    assert [row[:2] for row in rows] == [
        ("40", "steps"), ("60", "steps"), ("16,000", "draws"), ("46,000", "draws"),
        ("60,000", "draws")]
    for number, what, cells in rows[:3]:  # the others: the longer study, below
        budget, cost = int(number.replace(",", "")), dict(steps="step", draws="samples")[what]
        for rival, cell in zip(compare_skills.RIVALS, cells.split(" | "), strict=True):
            if cell == "–":
                with pytest.raises(ValueError, match="spent only"):
                    lead(rival, cost, budget)
            else:
                assert cell.strip("* ¹") == lead(rival, cost, budget)


def test_what_the_page_says_of_other_costs_and_rules():
    page = " ".join((ROOT / "docs" / "sampling.md").read_text().split())
    (behind,) = re.findall(r"ada-balance - uniform-4 \| tokens trained \| -(\S+ ± \S+) ",
                           (study.RESULTS / "skills.md").read_text())
    assert f"at equal trained tokens n = 4 led it by {behind} (seen)" in page
    for arm, regime in itertools.product(("ada-est", "gvm"), ("stream", "few")):
        word = skills.in_points(*skills.compare(
            study.of(stored(), range(5), regime=regime), arm, "uniform-4",
            lambda run: skills.at(run, "samples", 16_000))).split(": ")[1]
        assert word == "open"


def test_which_runs_are_lost():
    lines = stored()
    lost = {arm: sum(skills.at(run, "samples", 16_000) < run["evals"][0]["avg"]
                     for regime in ("stream", "few")
                     for run in study.of(lines, range(12), regime=regime, arm=arm))
            for arm in compare_skills.ARMS}
    assert {arm: count for arm, count in lost.items() if count} == {
        "ada-pos": 3, "ada-balance": 1, "uniform-4": 1}


# --------------------------------------------------------------------------------- the longer study
def long_line(arm, seed, later, regime="long", lr=0.001, at_first=0.2):
    """A run of 60,000 draws that has this accuracy from 10,000 draws on."""
    found = line(arm, regime, seed, (at_first, *[later] * 6), lr=lr, cpu_seconds=1.0)
    for row in found["evals"]:
        row["samples"] *= 100
    return found


def test_the_plan_names_what_the_programs_run():
    first, longer = (ROOT / "bench" / "plan.md").read_text().split("## The longer study")
    for arm, (flags, *_) in compare_skills.ARMS.items():
        assert f"| {arm} |" in first and all(flag in first for flag in flags if flag[:2] == "--")
    for number in (compare_skills.DRAWS, compare_skills.FIRST_DRAWS):
        assert f"{number:,} draws" in first
    for arm, (flags, prompts, *_) in longer_skills.ARMS.items():
        assert f"| {arm} | `{' '.join(flags)}` | {prompts} |" in longer
    assert set(longer_skills.SLOWER.values()) == {0.001} and "gives both arms 0.001" in longer
    for number in (longer_skills.PRIMARY, longer_skills.GOAL, longer_skills.FURTHER,
                   longer_skills.CROSSING, longer_skills.WINDOW):
        assert f"{number:,}" in longer
    assert "0.0005, 0.001, 0.002, 0.004 and 0.008" in longer and len(longer_skills.RATES) == 5
    assert "seeds 102, 103 and 104" in longer and [*longer_skills.TUNING_SEEDS] == [102, 103, 104]
    assert "ten new seeds (12 to 21)" in longer and [*longer_skills.SEEDS] == [*range(12, 22)]
    for program in ("compare_skills", "longer_skills"):
        assert f"python bench/{program}.py --processes 2" in first.replace("\n", " ") + longer


@pytest.mark.parametrize("gain, word", [(0.08, "ahead"), (-0.08, "behind"), (0.0, "equal")])
def test_the_primary_verdict_is_that_of_the_ten_paired_seeds(gain, word):
    ours = [gain + (-1) ** seed / 100 for seed in range(12, 22)]
    lines = [long_line("uniform-4-wide", seed, 0.1 * (seed % 3)) for seed in (*range(12, 22), 102)]
    lines += [long_line("ada-balance", seed, 0.1 * (seed % 3) + lead)
              for seed, lead in zip((*range(12, 22), 102), (*ours, -9))]
    lines += [long_line("ada-balance", seed, -5, "sgd") for seed in range(12, 15)]
    random.Random(0).shuffle(lines)
    said = longer_skills.difference(lines, "ada-balance", "uniform-4-wide", longer_skills.PRIMARY)
    assert said == f"{100 * gain:+.1f} ± {226 * stdev(ours) / 10**0.5:.1f} points: {word}"
    assert longer_skills.difference(lines, "dapo", "ada-pos", longer_skills.PRIMARY) == "not run"


def test_a_run_that_breaks_counts_0_from_there_on(tmp_path, monkeypatch):
    def ends(*_):
        raise SystemExit("no memory")

    folder, stored = tmp_path / "runs" / "dapo-long-0.008-seed102", []
    folder.mkdir(parents=True)
    (folder / "groups.jsonl").touch()
    evals = dict(step=[0, 10], avg=[0.2, 0.4], samples=[0, 2000])
    monkeypatch.setattr(skills, "RUNS", tmp_path)
    monkeypatch.setattr(skills, "train_until", ends)
    monkeypatch.setattr(skills, "fold", lambda folder: dict(evals=evals))
    monkeypatch.setattr(study, "add", lambda name, line: stored.append(line))
    with pytest.raises(SystemExit, match="no memory"):
        longer_skills.train("dapo", "long", 0.008, 102)
    write(folder, "metrics", [dict(step=step, skipped_steps=1) for step in (1, 2, 3)])
    longer_skills.train("dapo", "long", 0.008, 102)
    assert stored[0]["broken"] and stored[0]["evals"]["avg"] == [0.2, 0.4, 0.0]
    assert stored[0]["evals"]["samples"][-1] == longer_skills.GOAL


def test_letters_are_counted_by_evaluation_and_by_draws_in_first_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(longer_skills, "WINDOW", 4)

    def group(letter, *rewards, coefficient=0.0):
        pool = [dict(round=i // 2, reward=r, coefficient=coefficient)
                for i, r in enumerate(rewards)]
        return dict(step=1, prompt=f"1{letter}2=?", pool=pool)

    write(tmp_path, "answers", [
        dict(step=step, problem=f"{i}{letter}2=?", right=right, k=8)
        for step, right in ((0, 1), (10, 3)) for i in range(4) for letter in "FG"])
    write(tmp_path, "groups", [
        group("F", 0.0, 0.0), group("F", 1.0, 0.0, 0.0, coefficient=0.5), group("G", 1.0, 1.0),
        group("F", 0.0, 0.0, 1.0, 1.0)])
    found = longer_skills.by_evaluation(tmp_path)
    assert found["F"] == found["G"] == [4, 12] and found["A"] == [0, 0]
    found = longer_skills.by_draws(tmp_path)
    assert found["F"] == [[2, 1, 0, 4, 1], [1, 0, 1, 2, 0]] and found["G"] == [
        [0] * 5, [1, 0, 1, 2, 2]] and found["A"] == []


def test_the_longer_studys_tables_are_made_of_its_lines():
    """All arms, every factor, as the program will find them; and with the pair alone."""
    window = {letter: [[4, 1, 2, 16, 8]] * 15 for letter in problems.LETTERS}
    lines = [long_line(arm, seed, 0.5 + seed / 1000)
             | (dict(letters_by_draws=window) if seed < 22 else {})
             for arm in longer_skills.ARMS
             for seed in (*longer_skills.SEEDS, *longer_skills.TUNING_SEEDS)]
    lines[0]["letters_by_draws"] = window | dict(A=window["A"][:14])  # not met so late
    for row in lines:
        row["evals"][3]["avg"] -= 0.2  # at 30,000
        row["evals"][6]["avg"] += 0.1  # at 60,000
    pair = [row for row in lines if row["arm"] in longer_skills.PAIR]
    lines += [long_line(arm, seed, 0.5, factor) for factor in longer_skills.FACTORS
              for arm in longer_skills.PAIR for seed in (12, 13, 14)]
    others, changed = len(longer_skills.AFTERWARDS), len(longer_skills.FACTORS)
    for found, missing, unchanged in ((lines, 0, 0), (pair, 4 + others, changed)):
        report = longer_skills.report(found)
        assert report.count("not run") == missing + unchanged
        assert report.count("0.001, 50%, 50%, 50% | 0.001, 50%, 50%, 50% | +0.0 ± 0.0 |"
                            ) == changed - unchanged
        assert "| 20.0% ± 0.0% | 10.0% ± 0.0% | 25% | 50% |" in report
        assert report.count("+0.0 ± 0.0 points: equal") == 1 + 5 + others - missing


def paired(lines, first, second):
    """first - second at 46,000 draws, seed by seed."""
    one, other = ({line["seed"]: longer_skills.at(line, "samples", 46_000)
                   for line in longer_skills.tested(lines, arm)} for arm in (first, second))
    return [one[seed] - other[seed] for seed in one]


def silent_in_the_last_window(lines, arm):
    """Share of the prompts between 56,000 and 60,000 draws."""
    windows = [letter[14] for line in longer_skills.tested(lines, arm)
               for letter in line["letters_by_draws"].values() if len(letter) > 14]
    return sum(wrong + right for _, wrong, right, *_ in windows) / sum(row[0] for row in windows)


def silent_and_wrong(lines, first, last):
    """Of the silent prompts in these windows of 4,000 draws, the share that nobody solved."""
    windows = [row for line in lines for letter in line["letters_by_draws"].values()
               for row in letter[first:last]]
    wrong, right = (sum(row[i] for row in windows) for i in (1, 2))
    return wrong / (wrong + right)


def test_what_the_pages_say_of_the_longer_study():
    """Ten seeds of the pair: tables, page and README are those of the stored lines."""
    lines = study.load("longer_skills")
    report = longer_skills.report(lines)
    assert report == (study.RESULTS / "longer_skills.md").read_text()
    page = " ".join((ROOT / "docs" / "sampling.md").read_text().replace("**", "").split())
    gaps = {draws: longer_skills.difference(lines, *longer_skills.PAIR, draws)
            for draws in (16_000, 24_000, 30_000, 36_000, 46_000, 52_000, 60_000)}
    short = {draws: said.split(" points")[0] for draws, said in gaps.items()}
    assert "| " + " | ".join(short.values()) + " |" in page
    assert gaps[46_000].endswith(": open") and 'The planned verdict is "open" at 46,000' in page
    at_99 = {(first, second): longer_skills.difference(
        lines, first, second, draws, quantiles=longer_skills.T_99)
        for first, second, draws in longer_skills.SECONDARY}
    four, sixteen = (at_99["ada-balance", rival].removesuffix(" points: ahead")
                     for rival in ("uniform-4", "uniform-16"))
    assert f"| 46,000 draws | {four} ² | {short[46_000]} | {sixteen} ² |" in page
    assert f"| 60,000 draws | – | {short[60_000]} ¹ |" in page
    readme = (ROOT / "README.md").read_text()
    assert f"at 60,000 ahead by {short[60_000][1:]}¹. " in readme
    assert f"At 16,000 draws behind by 4.4 ± 4.2; at 46,000 ahead by {sixteen[1:]}² |" in readme
    assert f"at 46,000 ahead by {four[1:]}² |" in readme
    sooner = at_99.pop(longer_skills.PAIR).removesuffix(" points: open")
    assert f"at 30,000 too ({sooner} with its 99 %)" in page
    for (first, second), said in at_99.items():
        flag = " (`--max-rounds-all-correct 1`)" if first == "ada-balance-cap" else ""
        assert f"| {first}{flag} - {second} | {said.replace(' points', '')} |" in page
    lost = {arm: skills.lost(longer_skills.tested(lines, arm), 46_000)
            for arm in longer_skills.ARMS if longer_skills.tested(lines, arm)}
    assert {arm: count for arm, count in lost.items() if count != "0 of 10"} == {
        "ada-pos": "1 of 10", "ada-balance-cap": "6 of 10"}
    hours = report.rstrip().splitlines()[-1].split(" runs, ")[1].split()[0]
    assert f"`python bench/longer_skills.py --processes 2`: {hours} hours of a core." in page
    assert "open | 1 of 10 |" in page and "behind | 6 of 10 |" in page
    failed = [row for arm in ("ada-pos", "ada-balance-cap")
              for row in longer_skills.tested(lines, arm)
              if longer_skills.at(row, "samples", 46_000) < row["evals"][0]["avg"]]
    risen = [max(one["avg"] for one in row["evals"]) - row["evals"][0]["avg"] for row in failed]
    ends = [longer_skills.at(row, "samples", 46_000) for row in failed]
    assert len(failed) == 7 and sum(rise < 0.02 for rise in risen) == 6
    assert sum(end < 0.015 for end in ends) == 6
    changed = {regime: longer_skills.difference(
        lines, *longer_skills.PAIR, 46_000, regime, longer_skills.SOME_SEEDS).split(" points")[0]
        for regime in ("long", *longer_skills.FACTORS)}
    assert f"changed the arms differ by {changed['long']} points at 46,000 draws" in page
    for regime, what in (("half", "Half the prompts a step"), ("double", "Twice as many"),
                         ("sgd", "SGD with momentum")):
        assert f"* {what}: {changed[regime]}" in page
    fourfold = [longer_skills.at(row, "samples", 46_000)
                for row in study.of(lines, regime="fourfold")]
    assert len(fourfold) == 6
    assert (f". Four times as many: {changed['fourfold']}, all six runs still at "
            f"{100 * min(fourfold):.0f} to {100 * max(fourfold):.0f} %") in page
    lost = {
        (regime, arm): {row["seed"] for row in study.of(lines, arm=arm, regime=regime)
                        if row["seed"] in longer_skills.SOME_SEEDS
                        and longer_skills.at(row, "samples", 46_000) < row["evals"][0]["avg"]}
        for regime in longer_skills.FACTORS for arm in longer_skills.PAIR}
    ours, rival = longer_skills.PAIR
    assert {run: seeds for run, seeds in lost.items() if seeds} == {
        ("half", ours): {12}, ("half", rival): {12}, ("four-minis", rival): {12, 13, 14},
        ("sgd", ours): {12, 14}}
    by_sgd = mean(longer_skills.at(row, "samples", 46_000) for row in study.of(
        lines, longer_skills.SOME_SEEDS, arm=rival, regime="sgd"))
    assert f"more prompts reach {by_sgd:.0%}".replace("%", " %") in page
    leads = [round(100 * x) for x in paired(lines, "ada-pos", "uniform-4-wide")]
    assert sum(10 <= x <= 22 for x in leads) == 7
    assert "Seven of ten runs of ada-pos lead their rival by 10 to 22 points" in page
    assert min(paired(lines, "ada-pos-slower", "uniform-4-wide")) > 0 and "in all ten pairs" in page
    more, ours = (longer_skills.difference(lines, "ada-pos-slower", rival, 46_000)
                  .removesuffix(" points: ahead")[1:] for rival in reversed(longer_skills.PAIR))
    assert (f"ada-pos then leads more prompts by {more} points, in all ten pairs, "
            f"and ada-balance by {ours}; ") in page
    early = longer_skills.difference(lines, "ada-pos-slower", "uniform-4-wide", 16_000)
    assert early == "-17.1 ± 3.5 points: behind"
    assert f"is 17.1 ± 3.5 points ¹ behind more prompts at 16,000 draws, and {more} ¹ ahead" in page
    assert (f"at 46,000 open, {short[46_000]} (`ada-pos` open², at half the rate +{more}¹);"
            ) in readme
    capped = [longer_skills.difference(lines, "ada-balance-cap-slower", rival, 46_000)
              for rival in reversed(longer_skills.PAIR)]
    assert capped == ["+4.2 ± 3.4 points: ahead", "+0.1 ± 4.7 points: open"]
    assert "more prompts by 4.2 ± 3.4 (95 %; of these only the first holds with 99 %)" in page
    assert "against ada-balance it is open (+0.1 ± 4.7)" in page
    words = [longer_skills.difference(lines, first, second, draws, quantiles=longer_skills.T_99)
             .split(": ")[1] for first, second, draws in longer_skills.AFTERWARDS]
    assert words == ["ahead", "open", "open", "open", "ahead"]
    dapo = longer_skills.difference(lines, *longer_skills.AFTERWARDS[-1])
    assert f"ada-balance {dapo.removesuffix(' points: ahead')[1:]} ahead (95 %, seen)" in page
    ends = {arm: 100 * mean(longer_skills.at(line, "samples", 46_000)
                            for line in longer_skills.tested(lines, arm))
            for arm in ("uniform-16", "uniform-4", "dapo", "uniform-4-wide", "ada-balance")}
    shares = [f"{ends.pop('dapo'):.1f} %", f"{ends.pop('ada-balance'):.1f} %"]
    assert "it is at {}, and".format(shares[0]) in page
    lowest, highest = min(ends.values()), max(ends.values())
    assert f"{lowest:.0f} to {highest:.0f} %, ada-balance at {shares[1]}" in page
    early = [longer_skills.difference(lines, "ada-balance", rival, 16_000).split(" points")[0]
             for rival in ("uniform-16", "uniform-4")]
    assert ("behind n = 4 by {}; against n = 16 it is open, {} (95 %, seen)".format(
        early[1].removeprefix("-"), early[0]) in page)
    hard = [silent_and_wrong(longer_skills.tested(lines, "dapo"), *windows)
            for windows in ((0, 2), (8, 12))]
    assert "before 8,000 draws {:.0f} % are all wrong), later easy ones ({:.0f} % from".format(
        *(100 * share for share in hard)) in page
    ends = [100 * longer_skills.at(line, "samples", 46_000)
            for line in longer_skills.tested(lines, "uniform-4-wide")]
    assert f"these ten are at {min(ends):.0f} to {max(ends):.0f} %" in page
    late = report.split("Does the curve stand still?")[1]
    for arm, said in (("ada-balance", "gains 5.6 ± 1.7"), ("uniform-4-wide", "gain 1.9 ± 2.2")):
        centre, half = said.split()[1], said.split()[3]
        assert f" | {centre}% ± {half}% | " in late.split(f"| {arm} |")[1].splitlines()[0]
        assert said in page
    assert "| 21% | 70% |" in late and "| 9% | 44% |" in late
    silent = [silent_in_the_last_window(lines, arm) for arm in reversed(longer_skills.PAIR)]
    assert ("{} are then silent (70 % all right, 21 % all wrong), of ada-balance's {}.".format(
        *(f"{share:.0%}".replace("%", " %") for share in silent)) in page)


def test_what_the_pages_say_of_the_real_model():
    """The race's table is that of the stored lines; page and README quote it, and the bank's."""
    lines = study.load("real_race")
    assert real_race.report(lines) == (study.RESULTS / "real_race.md").read_text()
    said = real_race.difference(lines, "ada-balance", "samples")
    gap, word, draws = re.fullmatch(r"(.+) points: (\w+) \(at ([\d,]+)\)", said).groups()
    page = " ".join((ROOT / "docs" / "sampling.md").read_text().split())
    assert f"| {draws} draws, [real model](#on-a-real-model) | – | **{gap}** |" in page
    assert f"At {draws} draws the difference is **{gap} points: {word}**." in page
    ours, rival = (real_race.summary(study.of(lines, arm=arm)) for arm in real_race.PAIR)
    before, end, other, *silent = (
        share.replace("%", " %") for share in (ours[0], ours[1], rival[1], ours[5], rival[5]))
    assert f"from {before} ada-balance comes to {end}, more prompts to {other};" in page
    assert "{} and {} of the prompts are silent.".format(*silent) in page
    trained = real_race.difference(lines, "ada-balance", "trained").split(" points: ahead")[0]
    steps = real_race.difference(lines, "ada-balance", "step").split(" points: open")[0]
    assert (f"At equal trained tokens ada-balance leads by {trained[1:]}, at equal steps it is "
            f"open, {steps} (both seen, not tested).") in page
    assert f"Real model, {draws} draws: {word}, {gap} |" in (ROOT / "README.md").read_text()
    (bank,) = re.findall(r"^\| ada-balance \| .+? \| (.+) \|$",
                         (study.RESULTS / "gradient_bank.md").read_text(), re.M)
    few, some, many = (cell.split(": ") for cell in bank.split(" | "))
    assert (f"ada-balance has {few[0]} times the gain of n = 4 with 300 draws an update, "
            f"**{some[0]}** with 1,200 (**{some[1]}**), {many[0]} with 5,000.") in page
