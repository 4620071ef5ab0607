r"""Lab 7: a verifier for numbers"""
from fractions import Fraction

import rewards
from course.checks import must_be

BOXES = [
    (r"\boxed{4}", "4"), (r"so it is \boxed{12}.", "12"), ("no box: 4", None), ("", None),
    ("unboxed{4}", None), (r"\boxed{}", ""),
    (r"\boxed{3}, since" + " the sum of both of them is 3" * 6, "3")]
NESTED = [
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{a{b}c}", "a{b}c"), (r"\boxed{\}}", r"\}"),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\boxed{\{1\}}", r"\{1\}"), (r"\boxed{{4}} and }", "{4}"),
    ("\\boxed{1 +\n2}", "1 +\n2")]  # a box may have two lines
LAST = [
    (r"\boxed{1}, no wait, that was wrong, so now it must be the other one: \boxed{2}", "2"),
    (r"\boxed{7} is what I said, which is wrong since its last digit was off; \boxed{", None),
    (r"\boxed{4", None),
    (r"\boxed{1} hm, let me think about it once more and begin anew: \boxed{2", None),
    (r"\boxed{1, no, that was wrong, so I close the next one: \boxed{2}", "2")]
NUMBERS = [  # text, value; it has a decimal point exactly if there is one in the text
    ("3", "3"), ("-12", "-12"), (" 4 ", "4"), ("3.5", "7/2"), (".5", "1/2"), ("3.", "3"),
    ("-0.25", "-1/4"), ("0", "0"), ("-.5", "-1/2"), ("1/4", "1/4"), ("-3/4", "-3/4"),
    ("1 / 4", "1/4"), ("- 1 / 4", "-1/4"), ("3 .5", "7/2"), ("6/3", "2"), ("0/7", "0"),
    ("12/35", "12/35"), ("-98/70", "-7/5"),
    ("0.1", "1/10"), ("-12.3", "-123/10"),  # these two and the next ones are no float
    ("0.1234567890123456789", "0.1234567890123456789"),
    ("12345678901234567891", "12345678901234567891")]
FRACTIONS = [
    (r"\frac{1}{2}", "1/2"), (r"-\frac{1}{2}", "-1/2"), (r"\frac{1}{3}", "1/3"),
    (r"\frac{ 3 }{ 4 }", "3/4"), (r"5\frac{1}{2}", "11/2"), (r"-5\frac{1}{2}", "-11/2"),
    (r"10 \frac{2}{3}", "32/3"), (r"-0\frac{1}{2}", "-1/2")]
PERCENT = [
    (r"50\%", "50"), (r"12.5\%", "25/2"), (r"0.7\%", "7/10"), (r"-5 \%", "-5"),
    (r"\frac{1}{2}\%", "1/2"), (r"1/4\%", "1/4"), (r"5\frac{1}{2}\%", "11/2")]
NO_NUMBERS = [
    "x", "2+3", "1,000", "", "1/0", r"\frac{1}{0}", r"5\frac{1}{0}", "--3", "1/2/3", "3 apples",
    "x = 3", "3x", "1e3", ".", "-", r"\%", "+5", "50%", r"5\%\%", r"\dfrac{1}{2}", "1.2.3",
    "1/00", r"\frac{1}{00}", r"2.5\frac{1}{2}", r".5\frac{1}{2}", "1/-4", "1 000", "3 4", "1_000",
    "٣", "1/٣", r"\frac{1}{2}\frac{1}{2}", r"\frac{1}{2}{3}", "infinity",
    r"\frac{1}{2", r"\frac{}{2}", r"\%5", "3..", " ", "²"]


def ask_box(completion, right):
    must_be(f"extract_answer({completion!r})", rewards.extract_answer(completion), right)


def ask_number(text, value):
    found = rewards.exact(text)
    if found is not None:
        found = found[0], bool(found[1]), bool(found[2])
    must_be(f"exact({text!r}): (value, has_decimal_point, is_percentage)", found,
               (Fraction(value), "." in text, "%" in text))


def ask_no_number(text):
    must_be(f"exact({text!r})", rewards.exact(text), None)


CHECKS = [
    (1, 'what is in the box; None without one, and "" for an empty one', ask_box, BOXES),
    (2, "braces nest, and escaped ones do not count", ask_box, NESTED),
    (2, "the last box counts, and one that is never closed says nothing", ask_box, LAST),
    (2, "whole numbers, decimals, a/b, exactly", ask_number, NUMBERS),
    (1, r"\frac, with a sign and with a whole number before it", ask_number, FRACTIONS),
    (1, "a percentage is noted, not divided out", ask_number, PERCENT),
    (1, "anything else is None: nothing is guessed", ask_no_number,
     [*zip(NO_NUMBERS)])]
