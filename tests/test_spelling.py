"""The spelling: every rule of the table does what its example says, and none takes long."""
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards import decide
from verifier.spelling import REWRITES, is_unit, normalize, squeeze


@pytest.mark.parametrize("rule", REWRITES, ids=[rule.why for rule in REWRITES])
def test_every_rule_does_what_its_example_says(rule):
    assert rule.before != rule.after
    assert rule.apply(rule.before) == rule.after


@pytest.mark.parametrize("rule", REWRITES, ids=[rule.why for rule in REWRITES])
def test_without_the_rule_its_example_would_stay(rule):
    """Each example is the work of its own rule: no other one changes it in the same way."""
    others = [other for other in REWRITES if other is not rule]
    assert not any(other.apply(rule.before) == rule.after for other in others)


def test_squeezing_never_joins_two_numbers():
    assert squeeze("4  2") == squeeze("4 2") == "4 2" != squeeze("42")


@pytest.mark.parametrize("text, normal", [
    (r"10{,}080\,\text{cm}^2.", "10080"), ("10,080", "10080"), (r"\dfrac43", r"\frac{4}{3}"),
    ("２", "2"), (r"90^{\circ}", "90"), (r"\text{The answer is } 12", "12"), ("x²", "x^{2}"),
    (r"\text{28 percent}", r"28\%"), (r"52 \text{ in base 10}", "52"),    # words before numbers
    ("2**10", "2^{10}"), ("2 ** 10", "2^{10}"), ("x**(1/2)", "x^{1/2}"), ("x**-1", "x^{-1}"),
    ("**7**", "7"), ("**Answer: 7**", "7"), ("**a** b", "a b"),           # bold
    ("{(7 cm)}.", "7"), ("({7}),", "7"), ("{7 cm}", "7"), ("+7", "7"), ("(+7)", "7"),
    ("+x^2", "x^2"), (r"\\pi", r"\pi"),                                # escaped twice
    (r"\begin{pmatrix}a\\b\end{pmatrix}", r"\begin{pmatrix}a\\b\end{pmatrix}"),
    ("⅛", "1/8"), ("⅞", "7/8"), ("７＋１", "7+1"), ("2πr", r"2\pi r"),    # ⅛: 1, another slash, 8
    ("3 million km", "3000000"), (r"\$1.5m", "1500000"), ("5 thousandths", "5 thousandths"),
    (r"5\text{ thousand dollars}", "5000"), ("1/2 million", r"\frac{1}{2} million"),
    ("Four.", "4"), ("3 times", "3"),
    (r"5\text{ cm}", "5"), (r"x\text{ cm}", r"x\text{ cm}"),             # a unit follows a value
    # a comma that may separate elements stays
    ("3,100, 5", "3,100, 5"), ("(1,234]", "(1,234]"), ("[2,100, 3]", "[2,100, 3]"),
    ("2,100)", "2,100)"), (r"\{1,234\}", r"\{1,234\}")])
def test_normalize(text, normal):
    assert normalize(text) == normal


@pytest.mark.parametrize("words, unit", [
    ("cm", True), ("apples", True), ("Hours", True), ("square feet", True), ("km per hour", True),
    ("eV", True), ("kPa", True), ("erg/s", True),
    ("meters squared", True), ("slices of cake", True), ("thousandth", False), ("squared", False),
    ("square", False), ("value squared", False), ("k dollars", False), ("maybe", False),
    ("dollars thousand", False), ("half", False), ("negative", False), ("not sure", False)])
def test_only_words_from_the_list_are_units(words, unit):
    """Any other word may change the value, or take it back."""
    assert is_unit(words) == is_unit(f"({words}.)") == unit
    for text in (f"5 {words}", rf"5 \text{{ {words}}}", rf"5\,\mathrm{{({words})}}"):
        assert (normalize(text) == "5") == unit, text


def test_a_power_belongs_to_a_measure_only():
    assert normalize(r"5 \text{ cm}^2") == normalize("5 cm^2") == "5"
    assert normalize(r"5 \text{ apples}^2") != "5" != normalize("5 apples^2")


PIECES = st.lists(st.sampled_from([
    "1", "a", " ", "{", "}", "\\", "(", ",", "\\text{", "^", "\\frac{", "=", "and ", "x in ", "m",
    "5 cm", "\\%", "$", "1,000"]), min_size=1, max_size=12)


@given(PIECES)
def test_any_pieces_are_judged_in_time_and_what_is_normal_stays(pieces):
    text = ("".join(pieces) * 1000)[:990]
    start = time.thread_time()
    decide("42", text)
    assert time.thread_time() - start < 2
    once = normalize("".join(pieces))
    assert normalize(once) == once


SPELLINGS = ("{n}/{d}", "\\frac{{{n}}}{{{d}}}", "\\dfrac {{{n}}}{{{d}}}", "{n} / {d}",
             "$\\frac{{{n}}}{{{d}}}$.", "\\text{{The answer is }} {n}/{d}", "{{{n}/{d}}}",
             "\\frac{{{n}}}{{{d}}} \\text{{ cm}}")


@given(st.fractions(-50, 50, max_denominator=30), st.sampled_from(SPELLINGS), st.integers(1, 9))
def test_each_spelling_of_a_fraction_is_that_fraction(value, spelling, times):
    """Reduced or not; and once more as a decimal."""
    text = spelling.format(n=times * value.numerator, d=times * value.denominator)
    assert decide(str(value), text)[0] == "correct"
    assert decide(str(value), f"{float(value):.9f}")[0] == "correct"
    assert decide(str(value + Fraction(1, 31)), text)[0] == "wrong"
