r"""Lab 8: a verifier for numbers.

    python course/check.py 8
    python course/train.py --with lab_8

Every answer that is wrong and accepted is a lesson that the model will learn faster than
mathematics. Every right answer that is rejected is one that it cannot learn.
"""
import re  # noqa: F401
from fractions import Fraction  # noqa: F401


def extract_answer(completion: str, style: str = "") -> str | None:
    r"""What stands in the last \boxed{...} of a completion; None if there is none, or if the last
    one is never closed (a truncated `\boxed{4` says nothing, whatever was boxed before).

    Braces nest: in \boxed{\frac{1}{2}} the box ends at the third closing brace. \{ and \} are
    characters and no braces. An empty box gives "". Leave `style` alone: it is Minerva's.
    """
    raise NotImplementedError


def exact(text: str):
    r"""(value, has_decimal_point, is_percentage) of a number as it is spelled, or None.

    value: a Fraction, so that 0.1 + 0.2 = 0.3. Spellings (a digit is 0 to 9):

        12   3.5   .5   3.   1/4   \frac{1}{2}   5\frac{1}{2}
        each of them with a - before it: -12, -\frac{1}{2}
        each of them with a \% behind it, which is noted and not divided out

    has_decimal_point: 3.5, .5 and 3. have one, fractions have none.
    5\frac{1}{2} is 5.5, -5\frac{1}{2} is -5.5.
    Spaces may stand anywhere but between two digits: - 1 / 4 is a number, 1 000 and 3 4 are none.

    A zero below the line, and anything else (x, 2+3, +5, 50%, \dfrac{1}{2}, 1,000, the empty
    string), is None: a verifier that guesses accepts what is wrong. (The project's own also reads
    what is not in this list, such as \frac{-1}{2}: yours may or may not.)
    """
    raise NotImplementedError
