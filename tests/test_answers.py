"""What kind of answer a string is, one property at a time; all together in test_rewards.py."""
import pytest

from rewards import decide, extract_answer, judge
from verifier.answers import expand_signs, mixed_quantity, powers_of_units, take_labels_off


def verdict(gold: str, answer: str) -> str:
    status, _, gold, parts = decide(gold, answer)
    return status or judge(gold, parts)[0]


@pytest.mark.parametrize("completion", [
    r"\boxed{7} }", r"}} \boxed{7}}", r"\boxed{7} and {a}}", r"\boxed 7}"])
def test_a_closing_brace_too_many_is_no_error(completion):
    assert extract_answer(completion).strip("}") == "7"


@pytest.mark.parametrize("gold, right, wrong", [
    # a percentage of a negative number is read as that of a positive one
    ("-50", r"-50\% ; -5000\%", ""), ("-0.5", r"-50\%", r"-0.5\%"), ("-1", r"-1\%", ""),
    ("50", r"50\% ; 5000\%", ""), ("0.5", r"50\%", r"0.5\%"), ("1", r"1\%", ""),
    # a date has words and numbers in any order
    (r"\text{5 of May, 2004}", r"5 May 2004 ; \text{May 5, 2004} ; \text{the 5th of May 2004}",
     r"\text{6 May 2004} ; \text{5 June 2004} ; \text{May 2004}"),
    # a space makes a letter a unit, and another unit is another answer
    ("4 s", "4s", ""), ("4s", "", "4"), ("5", "5 F", "5A2 ; 5F"), ("100 m2", "100", ""),
    (r"3 \times 10^8 m", "300000000", ""), ("5 N/m", "5", ""), ("68 F", "", "68 C"),
    ("5 L", "5 l", "5 mL"), (r"12\text{ cm}", r"12\,\mathrm{cm}", "12 m"),
    (r"12\%", "", "12 m"), ("2 h 30 min", "", "2 h"), ("3am+4", "4+3am", ""),
    # a letter with its text is that letter, unless there are two; or where the gold is the text
    ("A", "A. an area. ; option (A)",
     "(a) 3, (b) 4 ; A:B ; (A)(B) ; Choice (B) ; option (A) or (B)"),
    ("42", "C) 42", ""), ("A, C", "AC", "AB ; A"), ("AC", r"\text{A and C} ; CA", "B, C"),
    # a word is no product of its letters; letters in the order of the alphabet are
    ("cat", "Cat", "act"), ("No", "no", "on"), ("dog", "", "god"), ("ab", "ba", ""),
    ("mgh", "ghm", ""),
    # a dozen multiplies
    ("60", "5 dozen eggs", "5 dozen and one"), ("5 dozen", "60", "5")])
def test_what_is_right_and_what_is_wrong(gold, right, wrong):
    for answers, status in ((right, "correct"), (wrong, "wrong")):
        for answer in filter(None, answers.split(" ; ")):
            assert verdict(gold, answer) == status, answer
    assert verdict("5", "5万") == "unparseable"


@pytest.mark.parametrize("one, other, status", [
    # a ratio of three is no quotient
    ("1:2:3", "1:3:2", "wrong"), ("1:2:3", "1:6", "wrong"), ("1.5", "3:2:1", "wrong"),
    (r"1:\sqrt{3}:2", r"1:2:\sqrt{3}", "wrong"), ("1:2:3", "2:4:6", "correct"),
    ("a:b:c=2:3:4", "4 : 6 : 8", "correct"), ("3:2", "6:4", "correct"),
    # a set is no tuple and no interval
    (r"\{1,2\}", "(1,2)", "wrong"), (r"\{1,3\}", "(1,3)", "wrong"), (r"\{2,1\}", "(1,2)", "wrong"),
    # a date is no difference
    ("2024-01-05", "2018", "wrong"), ("2024-01-05", "2024-05-01", "wrong"),
    ("2024-12-25", "1987", "wrong"), ("2024-10-200", "1814", "correct"),
    ("7-5", "2", "correct"),
    # a time of day is no ratio
    ("1:15", "2:30", "wrong"), ("12:30", "10:25", "wrong"), ("20:30", "2:3", "correct"),
    # a list of numbers is not what lies between them
    ("-2, 3", "-2<x<3", "wrong"), (r"\{-2,3\}", r"-2\le x\le 3", "wrong"),
    ("x=0, x=1", "0<x<1", "wrong"), ("0, 1", "x>0, x<1", "wrong"),
    (r"x<2 \text{ or } x>5", r"(-\infty,2)\cup(5,\infty)", "correct"),
    ("(-2,3)", "-2<x<3", "correct"), ("1", r"\gcd(m,n)", "wrong")])
def test_in_either_order(one, other, status):
    assert verdict(one, other) == verdict(other, one) == status


def test_a_range_is_no_difference():
    assert [verdict("5-7", answer) for answer in ("5–7", "-2")] == ["correct", "wrong"]


@pytest.mark.parametrize("gold", ["x_1=1, x_2=2", "x=1, x=2"])
def test_several_values_of_one_unknown_are_solutions_and_no_point(gold):
    assert take_labels_off(gold, "1, 2") == ("1, 2", ["1, 2"])
    assert take_labels_off("x=1, y=2", "(1, 2)") == ("(1, 2)", ["(1, 2)"])


@pytest.mark.parametrize("text, powers", [
    ("m/s^2", {"m": 1, "s": -2}), ("meters per second squared", {"m": 1, "s": -2}),
    ("sq. ft", {"ft": 2}), ("cm3", {"cm": 3}), ("mL", {"cm": 3}), ("Newtons", powers_of_units("N")),
    ("J/kg K", powers_of_units("J/(kg K)")), ("degree C", {"C": 1}), ("degree", {"degree": 1}),
    ("yrs", {"yr": 1}), ("Hz", {"s": -1}), ("apples", None), ("M", None), ("h + 1", None),
    ("", None)])
def test_a_unit_is_names_with_powers(text, powers):
    assert powers_of_units(text) == powers


@pytest.mark.parametrize("text, mixed", [
    ("2 h 30 min", True), ("5 feet 6 inches", True), ("2 m 3 s", False), ("2 h 3 h", False),
    ("2 h", False), ("2 h 30", False)])
def test_a_mixed_quantity_has_different_units_of_one_kind(text, mixed):
    assert bool(mixed_quantity(text)) is mixed


def test_lower_signs_are_opposite_to_upper_ones():
    assert expand_signs(r"1\pm a\mp b") == "1+ a- b, 1- a+ b"
    assert expand_signs(r"\mp 2, 3") == "- 2, 2, 3"
