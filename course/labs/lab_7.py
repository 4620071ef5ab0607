r"""Lab 7: a verifier for numbers.

    python course/check.py 7
    python course/train.py --with lab_7

If a wrong answer is accepted, the model learns it faster than mathematics. If a right answer is
rejected, the model cannot learn it.
"""
import re  # noqa: F401
from fractions import Fraction  # noqa: F401


def extract_answer(completion: str, style: str = "") -> str | None:
    r"""The text in the last \boxed{...} of a completion. None without a box, or if the last one is
    never closed (a truncated `\boxed{4` says nothing, whatever was boxed before).

    The last box is the one that begins last. Braces nest, so in \boxed{\frac{1}{2}} the box ends at
    the third closing brace. \{ and \} are characters, not braces. A box may have several lines. An
    empty box gives "". Ignore `style`, which other verifiers use.
    """
    raise NotImplementedError


def exact(text: str):
    r"""(value, has_decimal_point, is_percentage) of a number as it is spelled, or None.

    value: a Fraction, so that 0.1 + 0.2 = 0.3. Spellings (a digit is 0 to 9):

        12   3.5   .5   3.   1/4   \frac{1}{2}   5\frac{1}{2}
        each of them with a - before it: -12, -\frac{1}{2}
        each of them with a \% after it, which is noted but not divided out

    has_decimal_point: 3.5, .5 and 3. have one, fractions have none.
    5\frac{1}{2} is 5.5, -5\frac{1}{2} is -5.5.
    Signs are a digit, the point, -, /, a brace, \frac and \%. Spaces may stand before, after and
    between signs, but not between two digits. So - 1 / 4 and 3 .5 are numbers, and 1 000 and 3 4
    are none.

    A zero in the denominator gives None. So does anything else, for example x, 2+3, +5, 50%,
    \dfrac{1}{2}, 1,000, and the empty string, because a verifier that guesses accepts wrong
    answers. (Only for \frac{-1}{2} and \frac12 both a number and None count as right.)
    """
    raise NotImplementedError
