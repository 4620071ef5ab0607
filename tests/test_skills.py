"""The built-in skills: every letter as hard as promised, and no trick that serves many."""
import random
import re
import sys
from collections import Counter
from statistics import mean

import pytest

from conftest import ROOT
from models import make
from parts import problems
from parts.data import default_data, default_eval_data, load_problems

sys.path.insert(0, str(ROOT / "bench"))
import skills_theory  # noqa: E402


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
