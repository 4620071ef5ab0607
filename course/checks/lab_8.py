r"""Lab 8: a verifier for numbers"""
import random
from fractions import Fraction

import rewards
from course.checks import must_equal
from verifier import answers

BOXES = [
    (r"\boxed{4}", "4"), (r"so it is \boxed{12}.", "12"), ("no box: 4", None), ("", None),
    (r"\boxed{}", "")]
NESTED = [
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{a{b}c}", "a{b}c"), (r"\boxed{\}}", r"\}"),
    (r"\boxed{\{1\}}", r"\{1\}"), (r"\boxed{{4}} and }", "{4}")]
LAST = [
    (r"\boxed{1}, no wait, that was wrong, so now it must be the other one: \boxed{2}", "2"),
    (r"\boxed{7} is what I said, which is wrong since its last digit was off; \boxed{", None),
    (r"\boxed{4", None),
    (r"\boxed{1} hm, let me think about it once more and begin anew: \boxed{2", None),
    (r"\boxed{1, no, that was wrong, so I close the next one: \boxed{2}", "2")]
NUMBERS = [
    ("3", Fraction(3), False), ("-12", Fraction(-12), False), (" 4 ", Fraction(4), False),
    ("3.5", Fraction(7, 2), True), (".5", Fraction(1, 2), True), ("3.", Fraction(3), True),
    ("-0.25", Fraction(-1, 4), True), ("0", Fraction(0), False), ("-.5", Fraction(-1, 2), True),
    ("1/4", Fraction(1, 4), False), ("-3/4", Fraction(-3, 4), False),
    ("1 / 4", Fraction(1, 4), False), ("- 1 / 4", Fraction(-1, 4), False),
    ("6/3", Fraction(2), False), ("0/7", Fraction(0), False),
    ("0.1", Fraction(1, 10), True), ("-12.3", Fraction(-123, 10), True),  # no float is these
    ("0.1234567890123456789", Fraction(1234567890123456789, 10**19), True),
    ("12345678901234567891", Fraction(12345678901234567891), False)]
FRACTIONS = [
    (r"\frac{1}{2}", Fraction(1, 2)), (r"-\frac{1}{2}", Fraction(-1, 2)),
    (r"\frac{1}{3}", Fraction(1, 3)), (r"\frac{ 3 }{ 4 }", Fraction(3, 4)),
    (r"5\frac{1}{2}", Fraction(11, 2)), (r"-5\frac{1}{2}", Fraction(-11, 2)),
    (r"10 \frac{2}{3}", Fraction(32, 3))]
PERCENT = [
    (r"50\%", Fraction(50), False), (r"12.5\%", Fraction(25, 2), True),
    (r"0.7\%", Fraction(7, 10), True), (r"-5 \%", Fraction(-5), False),
    (r"\frac{1}{2}\%", Fraction(1, 2), False)]
NO_NUMBERS = [
    "x", "2+3", "1,000", "", "1/0", r"\frac{1}{0}", r"5\frac{1}{0}", "--3", "1/2/3", "3 apples",
    "x = 3", "3x", "1e3", ".", "-", r"\%", "+5", "50%", r"5\%\%", r"\dfrac{1}{2}", "1.2.3",
    "1/00", r"\frac{1}{00}", r"2.5\frac{1}{2}", r".5\frac{1}{2}", "1/-4", "1 000", "3 4", "1_000",
    "٣", "1/٣", r"\frac{1}{2}\frac{1}{2}", r"\frac{1}{2}{3}", "infinity"]


def box(completion, right):
    must_equal(f"extract_answer({completion!r})", rewards.extract_answer(completion), right)


def check_boxes():
    """what is in the box; None without one, and "" of an empty one"""
    for completion, right in BOXES:
        box(completion, right)


def check_nested():
    """braces nest, and escaped ones do not count"""
    for completion, right in NESTED:
        box(completion, right)


def check_last():
    """the last box counts, and one that is never closed says nothing"""
    for completion, right in LAST:
        box(completion, right)


def number(text, value, decimal, percent=False):
    found = answers.exact(text)
    if found is not None:
        found = found[0], bool(found[1]), bool(found[2])
    must_equal(f"exact({text!r}): (value, has_decimal_point, is_percentage)", found,
               (value, decimal, percent))


def check_numbers():
    """whole numbers, decimals, a/b, exactly"""
    for text, value, decimal in NUMBERS:
        number(text, value, decimal)
    rng = random.Random(0)
    for _ in range(50):
        top, below = rng.randint(-99, 99), rng.randint(1, 99)
        number(f"{top}/{below}", Fraction(top, below), False)


def check_fractions():
    r"""\frac, with a sign and with a whole number before it"""
    for text, value in FRACTIONS:
        number(text, value, False)


def check_percent():
    """a percentage is noted, not divided out"""
    for text, value, decimal in PERCENT:
        number(text, value, decimal, True)


def check_rest():
    """whatever else it is, it is None: nothing is guessed"""
    for text in NO_NUMBERS:
        must_equal(f"exact({text!r})", answers.exact(text), None)


CHECKS = [(1, check_boxes), (2, check_nested), (2, check_last), (2, check_numbers),
          (1, check_fractions), (1, check_percent), (1, check_rest)]
