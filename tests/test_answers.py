"""What kind of answer a string is, one property at a time; all together in test_rewards.py."""
import pytest

from rewards import decide, extract_answer, judge
from verifier.answers import expand_signs, mixed_quantity, powers_of_units, take_labels_off


@pytest.mark.parametrize("completion", [
    r"\boxed{7} }", r"}} \boxed{7}}", r"\boxed{7} and {a}}", r"\boxed 7}"])
def test_a_closing_brace_too_many_is_no_error(completion):
    assert extract_answer(completion).strip("}") == "7"


@pytest.mark.parametrize("gold, answer, status", [
    ("-50", r"-50\%", "correct"), ("-50", "-5000\\%", "correct"), ("-0.5", r"-50\%", "correct"),
    ("-0.5", r"-0.5\%", "wrong"), ("-1", r"-1\%", "correct")])
def test_percentages_of_negative_numbers_are_read_as_those_of_positive_ones(gold, answer, status):
    assert decide(gold, answer)[0] == decide(gold[1:], answer[1:])[0] == status


@pytest.mark.parametrize("answer, status", [
    ("5 May 2004", "correct"), (r"\text{May 5, 2004}", "correct"),
    (r"\text{the 5th of May 2004}", "correct"), (r"\text{6 May 2004}", "wrong"),
    (r"\text{5 June 2004}", "wrong"), (r"\text{May 2004}", "wrong")])
def test_a_date_has_words_and_numbers_in_any_order(answer, status):
    assert decide(r"\text{5 of May, 2004}", answer)[0] == status


@pytest.mark.parametrize("gold", ["x_1=1, x_2=2", "x=1, x=2"])
def test_several_values_of_one_unknown_are_solutions_and_no_point(gold):
    assert take_labels_off(gold, "1, 2") == ("1, 2", ["1, 2"])
    assert take_labels_off("x=1, y=2", "(1, 2)") == ("(1, 2)", ["(1, 2)"])


@pytest.mark.parametrize("gold, answer, status", [
    ("1:2:3", "1:3:2", "wrong"), ("1:2:3", "1:6", "wrong"), ("1.5", "3:2:1", "wrong"),
    (r"1:\sqrt{3}:2", r"1:2:\sqrt{3}", "wrong"), ("1:2:3", "2:4:6", "correct"),
    ("a:b:c=2:3:4", "4 : 6 : 8", "correct"), ("3:2", "6:4", "correct"),
    ("2024-01-05", "2018", "wrong"), ("2024-01-05", "2024-05-01", "wrong"),
    ("2024-12-25", "1987", "wrong"), ("2024-10-200", "1814", "correct")])
def test_a_ratio_of_three_is_no_quotient_and_a_date_no_difference(gold, answer, status):
    assert verdict(gold, answer) == verdict(answer, gold) == status


@pytest.mark.parametrize("gold, answer, status", [
    ("-2, 3", "-2<x<3", "wrong"), (r"\{-2,3\}", r"-2\le x\le 3", "wrong"),
    ("x=0, x=1", "0<x<1", "wrong"), ("0, 1", "x>0, x<1", "wrong"),
    (r"x<2 \text{ or } x>5", r"(-\infty,2)\cup(5,\infty)", "correct"),
    ("(-2,3)", "-2<x<3", "correct"), ("1", r"\gcd(m,n)", "wrong")])
def test_a_list_of_numbers_is_not_what_lies_between_them(gold, answer, status):
    assert verdict(gold, answer) == verdict(answer, gold) == status


def verdict(gold: str, answer: str) -> str:
    status, _, gold, parts = decide(gold, answer)
    return status or judge(gold, parts)[0]


@pytest.mark.parametrize("gold, answer, status", [
    ("4 s", "4s", "correct"), ("4s", "4", "wrong"), ("5", "5A2", "wrong"), ("5", "5F", "wrong"),
    ("5", "5 F", "correct"), ("100 m2", "100", "correct"), ("5", "5万", "unparseable"),
    (r"3 \times 10^8 m", "300000000", "correct"), ("5 N/m", "5", "correct"),
    ("68 F", "68 C", "wrong"), ("5 L", "5 mL", "wrong"), ("5 L", "5 l", "correct"),
    (r"12\text{ cm}", "12 m", "wrong"), (r"12\text{ cm}", r"12\,\mathrm{cm}", "correct"),
    (r"12\%", "12 m", "wrong"), ("2 h 30 min", "2 h", "wrong"), ("3am+4", "4+3am", "correct")])
def test_a_space_makes_a_letter_a_unit_and_another_unit_is_another_answer(gold, answer, status):
    assert verdict(gold, answer) == status


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


@pytest.mark.parametrize("answer, status", [
    ("(a) 3, (b) 4", "wrong"), ("A. an area.", "correct"), ("A:B", "wrong"), ("(A)(B)", "wrong"),
    ("option (A)", "correct"), ("Choice (B)", "wrong"), ("option (A) or (B)", "wrong")])
def test_a_letter_with_its_text_is_that_letter_unless_there_are_two(answer, status):
    assert verdict("A", answer) == status
    assert verdict("42", "C) 42") == "correct", "where the gold is the text"


def test_lower_signs_are_opposite_to_upper_ones():
    assert expand_signs(r"1\pm a\mp b") == "1+ a- b, 1- a+ b"
    assert expand_signs(r"\mp 2, 3") == "- 2, 2, 3"
