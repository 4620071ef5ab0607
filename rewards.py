r"""The reward: whether the last boxed answer of a completion equals the gold answer.

    python rewards.py --gold '\frac12' --completion 'so \boxed{1/2}'    # a verdict, with every step

1. `extract_answer` takes the last box, which has to be closed. Text outside boxes does not count.
2. `clean` gives gold and answer one spelling, and removes units.
3. `same` compares words, numbers, lists and tuples as strings and fractions. If the gold is a plain
   number, so must be the answer: `7+5-4` is not 8, because it may be copied from the question.
4. `equal` compares the rest with math-verify and its parser.

Completions are untrusted, and sympy may take forever, so `judge` runs in a process with limits of
time and memory (parts/grader.py). Nothing here runs a completion as code.
"""
import argparse
import functools
import re
import unicodedata
from concurrent.futures import Future
from fractions import Fraction

from parts.grader import NO_VERDICT, WORKERS, ForkingGrader, OwnReward, Verdict
from parts.text import shown

MAX_CHARS = 1000  # longer answers are compared as strings only
EXAMPLES = [  # judged at the start of a worker: the first time is slow
    (r"\sqrt{2}", r"\boxed{\frac{\sqrt{3}}{2}}")]


# ------------------------------------------------------------------------------------ 1. the box
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
LAST_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+|\s*\\times\s*10\^\{?-?\d+\}?)?")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # also matches escaped ones, to skip them


def extract_answer(completion: str, style: str = "") -> str | None:
    """The content of the last box, without boxes in it; None if the last box is not closed.

    With `style="minerva"` and no box it is the last number, as in the papers' evaluations.
    """
    boxes = [box.end() for box in BOX.finditer(completion)]
    if not boxes:
        numbers = LAST_NUMBER.findall(completion[-5000:]) if style == "minerva" else []
        return numbers[-1] if numbers else None
    closing, opened = {}, []
    for brace in BRACE.finditer(completion, boxes[0] - 1):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    answer, end = None, 0
    for start in boxes:
        if start > end:  # in no other box
            end = closing.get(start, start)
            answer = completion[start:end].strip() if start in closing else None
    return answer


# ------------------------------------------------------------------------------ 2. one spelling
CHARACTERS = r"""
− -  – -  × \times  · \cdot  ⋅ \cdot  ÷ \div  √ \sqrt  π \pi  θ \theta  ∞ \infty  ≤ \le  ≥ \ge
≠ \ne  ≈ \approx  ° ^\circ  ∪ \cup  ∈ \in  ± \pm  ∅ \emptyset  。 .
""".split()
UNICODE = {ord(a): b + " " * b[-1].isalpha() for a, b in zip(CHARACTERS[::2], CHARACTERS[1::2])}
SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
NAMES = "pi|theta|alpha|beta|sin|cos|tan|log|ln|exp|sqrt"
REWRITES = [  # (why, pattern, replacement); a § is the end of a command
    ("negative space", r"\\!\s*", ""),
    ("spaces", r"(?<!\\)\\(?:[,;: ]|q?quad§)|~|\s+", " "),
    ("fonts", r"\\(?:(?:display|text|script)style|[lL]arge|huge|small|rm|bf)§|\\color\{\w*\}", ""),
    ("layout", r"\\(?:left|right|[bB]igg?[lr]?)§\.?|(?<!\\)\\[()\[\]]|\\?\$|\*\*|[\"“”`€£¥₹]", ""),
    ("boxes", r"\\(?:boxed|fbox|underline|mathbf|boldsymbol|textcolor\{\w*\})(?=\s*\{)", ""),
    ("fractions", r"\\[dtc]frac", r"\\frac"),
    ("text", r"\\(?:text(?:bf|it|rm|normal)|math(?:rm|it|sf)|[mh]box|emph)\s*(?=\{)", r"\\text"),
    ("text in text", r"\\text\{\s*\\text\{([^{}]*)\}\s*\}", r"\\text{\1}"),
    ("functions", rf"\\operatorname\*?\{{(\w+)\}}|(?<![A-Za-z\\])({NAMES})§", r"\\\1\2 "),
    ("i and e", r"\\text\{\s*([ie])\s*\}", r"\1"),
    ("relations", r"\\(le|ge|ne)q?(?:slant)?§", r"\\\1"),
    ("relations", "<=", r"\\le "),
    ("relations", ">=", r"\\ge "),
    ("dots", r"\\[cd]ots§|\.\.\.", r"\\ldots"),
    ("relations", r"\\approx§|:=", "="),
    ("announcements", r"(?i)^\s*(?:=|\\(?:implies|therefore|to)§|(?:\\text\{\s*)?(?:the )?"
     r"(?:final )?answer(?: is|\}?\s*[:=])\s*\}?(?=\s*\S))", ""),
    ("products", r"(?<=[\w)}])\s*\*\s*(?=[\w(\\])", r"\\cdot "),
    ("infinity", r"\+\s*\\infty|(?<![A-Za-z\\])infinity|\\text\{infinity\}", r"\\infty "),
    ("no solution", r"(?i)^(?:\\text\{)?\s*(?:there (?:is|are) )?no (?:real )?solutions?\.?\s*\}?$"
     r"|\\varnothing", r"\\emptyset"),
    ("comma in braces", r"(?<=\d)\{([,:])\}(?=\d)", r"\1"),
    ("ordinals", r"(?<=\d)\s*\^?\{?\s*\\text\{\s*(?:st|nd|rd|th)\s*\}\}?"
     r"|(?<=\d)(?:st|nd|rd|th)\b", ""),
    ("numbers in text", r"\\text\{\s*(-?[\d.,/]+)\s*([^{}\d]*)\}", r"\1\\text{\2}"),
    ("percent", r"\\text\{\s*(?:\\?%|percent)\s*\}|\bpercent(?:age)?\b|\\?%", r"\\%"),
    ("and, or", r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)§),?", " , "),
    ("thousands", r"(?<![\d.,(\[])(?<!\\\{)\d{1,3}(?:,\d{3})+(?![\d,])",
     lambda match: match[0].replace(",", "")),
    ("thousands", r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])",
     lambda match: match[0].replace(" ", "")),
    ("roots", r"\\sqrt\s*(?:\(([^()]*)\)|(\d+))", r"\\sqrt{\1\2}"),
    ("arguments", r"\\(frac|sqrt(?:\[\d\])?|mathbb)\s*(\w|\\(?:pi|theta|alpha)§)", r"\\\1{\2}"),
    ("arguments", r"\\frac\s*(\{(?:[^{}]|\{[^{}]*\})*\})\s*(\w|\\pi§)", r"\\frac\1{\2}"),
    ("arguments", r"(\\sqrt|\^)\s*(\\frac\{[^{}]*\}\{[^{}]*\})", r"\1{\2}"),
    ("exponents", r"\^\s*\(([^()]*)\)|\^(-\d+|-[a-z])", r"^{\1\2}"),
    ("degrees", r"\\(sin|cos|tan)\s*[({]?\s*(\d+)\s*\^\s*\{?\s*\\circ\s*\}?\s*[)}]?",
     r"\\\1(\\frac{\2\\pi}{180})"),
    ("degrees", r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{\s*[CF]\s*\}|[CF]\b)?", ""),
    ("empty text", r"\\text\{\s*\}", " "),
    ("powers of ten", r"(?<=\d)\s*(?:[xX]|\\cdot|\\times)\s*10\s*\^", r"\\times 10^"),
    ("powers of ten", r"10\^(\d+)", r"10^{\1}"),
    ("powers of ten", r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\d.A-Za-z])",
     r"\1\\times 10^{\2}"),
    ("mixed numbers", r"(?<![A-Za-z\\\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    ("set builder", r"^\s*\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:)"
     r"(.*)\\\}\s*$", r"\1"),
    ("member", r"^\s*[a-z]\s*\\in§\s*(?=[\[(\\])", ""),
    ("all real numbers", r"(?i)^(?:\\text\{)?\s*(?:the set of )?all real(?: number)?s\s*\}?\.?$",
     r"\\mathbb{R}"),
    ("environments", r"\\begin\{(aligned|cases)\}(.*?)\\end\{\1\}",
     lambda match: match[2].replace("&", "").replace(r"\\", ",")),
]
PATTERNS = [(re.compile(pattern.replace("§", "(?![A-Za-z])")), new)
            for _, pattern, new in REWRITES]

# Any words after a value are its unit, unless one of these changes the value or is mathematics.
NO_UNIT = re.compile(r"""(?ix) \b(?: half | halves | thirds? | quarters? | (?!months?\b)\w+ths?
    | dozens? | hundreds? | thousands? | \w+illions? | percent\w* | squared | factorial | base
    | binary | octal | recurring | repeating | not? | or | and | to | than | mod | over | minus
    | plus | times | double | twice | negative | less | more | below | about | least | most | wrong
    | maybe | if | except | is | was | [ap]\.?m | (?-i:k)
    | gamma | delta | epsilon | lambda | phi | omega | i | e )\b
    | [<>=\\?!\d万亿千百十半倍]""")
EXPONENT = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
UNIT = re.compile(rf"""                                         # \text{{ m}}/\text{{s}}^2
    (?: (?<=[\d}})]) | (?<=\\pi) | (?<=[^A-Za-z][a-z]) )
    (?: \s?(?:(?:/|\\cdot)\s?)? \\text\{{ (?:[^{{}}]|\{{[^{{}}]*\}})* \}}{EXPONENT} )+ \s?(?=[,;]|$)
    """, re.VERBOSE)
BARE_UNIT = re.compile(rf"""                                    # cm^2, km/h
    (?: (?<=[\d}}])(?<!\^\{{\d\}}) | (?<=\\pi)(?=\s) ) (\s*)/?
    ([^\W\d_]+ (?:[ ./*-]+[^\W\d_]+)*){EXPONENT}\.?\s?(?=[,;]|$)""", re.VERBOSE)
SHORT_UNITS = set("m s g h l L N J W V C K cm mm km kg mg ft in mi hr mL".split())


def drop_unit(match: re.Match) -> str:
    words = re.sub(rf"\\text|\\cdot|{EXPONENT}", "", match[0])
    return match[0] if NO_UNIT.search(words) else ""


def drop_bare_unit(match: re.Match) -> str:
    r"""Without \text, short words may be variables: `5 m` has a unit, `5m` and `5 m n` do not."""
    words = re.findall(r"[^\W\d_]+", match[2])
    first, shortest = words[0], 3 if match[1] else 4
    is_symbol = first in SHORT_UNITS and (len(first) > 1 or len(words) == 1 and match[1])
    is_unit = is_symbol or len(first) >= shortest or not first.isascii()
    return "" if is_unit and not NO_UNIT.search(match[2]) else match[0]


@functools.lru_cache(4096)  # a gold is compared with many answers
def clean(text: str) -> str:
    """`text` in one spelling, without units."""
    nfkc = functools.partial(unicodedata.normalize, "NFKC")
    text = SUPERSCRIPTS.sub(lambda match: "^{%s}" % nfkc(match[0]), text)
    text = nfkc(text.translate(UNICODE)).translate(UNICODE)
    if len(text) > 2 * MAX_CHARS:  # one character can become eighteen
        return ""
    for pattern, new in PATTERNS:
        text = pattern.sub(new, text)
    for _ in range(2):  # layers around the answer
        text = re.sub(r"(?<![.\\])\.$|\\+$", "", text.strip(" ,;:")).strip()
        text = BARE_UNIT.sub(drop_bare_unit, UNIT.sub(drop_unit, text)).strip()
        if is_group(text) and (text[0] == "{" or len(split(text[1:-1])) == 1):
            text = text[1:-1]
    return text.removeprefix("+").strip()


def squeeze(text: str) -> str:
    """`text` without unimportant spaces and braces, to compare strings."""
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return re.sub(r"(?<=[\^_])\{(\w)\}", r"\1", text)


def split(text: str, separators: str = ",;") -> list[str]:
    """Split at separators outside brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character in separators and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return parts + [text[start:].strip()]


def is_group(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return 0 < i == len(text) - 1
    return False


# ---------------------------------------------------------------------- 3. numbers, words, lists
DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
EXACT = re.compile(rf"""(-?)
    (?: (\d+(?=\\frac\{{\d+\}}\{{\d+\}}))?                                  # 5\frac{{1}}{{2}}
        \\frac\{{(-?{DECIMAL})\}}\{{(-?{DECIMAL})\}}
      | ({DECIMAL}) (?: /({DECIMAL}) )? (?: \\times10\^\{{(-?\d{{1,3}})\}} )?  # 6\times10^{{3}}
      | 10\^\{{(-?\d{{1,3}})\}}
    ) (\\%)?""", re.VERBOSE | re.ASCII)


def exact(text: str) -> tuple[Fraction, bool, bool] | None:
    """(value, has a decimal point, is a percentage) of a plain number; None for anything else."""
    match = EXACT.fullmatch(re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text))
    if not match or Fraction(match[4] or match[6] or 1) == 0:
        return None
    sign, whole, top, bottom, decimal, divisor, power, ten, percent = match.groups()
    if top:
        value = Fraction(whole or 0) + Fraction(top) / Fraction(bottom)
    else:
        value = Fraction(decimal or 1) / Fraction(divisor or 1)
    value *= Fraction(10) ** int(power or ten or 0)
    return (-value if sign else value), "." in (decimal or "") and not divisor, bool(percent)


def equal_numbers(gold: tuple, answer: tuple) -> bool:
    """Equal, exactly or (with a decimal point) in 6 decimals. If one is a percentage, 10% is 10."""
    (g, g_decimal, g_percent), (a, a_decimal, a_percent) = gold, answer
    g, a = g / (100 if g_percent else 1), a / (100 if a_percent else 1)
    is_rounded = (g_decimal or a_decimal) and g.denominator > 1
    tolerance = min(Fraction(1, 2 * 10**6), abs(g) / 10**4) if is_rounded else 0
    hundredfold = g_percent != a_percent and 100 in (g and a / g, a and g / a)
    return abs(a - g) <= tolerance or hundredfold and max(abs(g), abs(a)) >= 1


CHOICE = re.compile(r"(?:\\text\{\s*)?(?:[Oo]ption |[Cc]hoice )?\(?([A-Ja-j])\)?[.:]?\s*\}?[.:]?")
WITH_VALUE = re.compile(r"(?:\\text\{\s*)?(?:\(([A-J])\)|([A-J])(?:[.:)]|(?=\})))[.:]?\s*\}?[.:]?"
                        r"\s*(?![-+*/^=(,]|\\cdot|\\times)(\S.*)")


def choice(text: str) -> tuple[str, str]:
    r"""(letter, value) of `\text{(B)} 36`; either may be empty."""
    if letter := CHOICE.fullmatch(text):
        return letter[1].upper(), ""
    both = WITH_VALUE.fullmatch(text)
    return (both[1] or both[2], both[3]) if both else ("", text)


MARKUP = re.compile(r"\\(?:begin|end)\{\w+\}|\\(?!text(?![A-Za-z]))[A-Za-z]+")
RELATION = re.compile(r"[<>]|\\(?:[lg]e|ne)(?![A-Za-z])")
AS_TEXT = re.compile(r"\d\)?\s*_|\d:|\\ldots|\\pmod|\d\s+[A-Za-z]+\s+\d")  # would be misread
NAME = re.compile(r"(?:\\[A-Za-z]+|[A-Za-z]|[A-Za-z]{4,})'*"  # x, f(2), \theta, Area, AB, (x, y)
                  r"(?:_\{?\w+\}?)?(?:\^\{-1\})?(?:\([^=]*\))?"
                  r"|\\text\{[^{}]*\}|[A-Z]{2,3}|\([A-Za-z, \\_\d{}]*\)|[a-z](?:\+[a-z])+")
POLYNOMIAL = re.compile(r"[-+a-z\d^{}()\s]*")  # `x+2=3` is no name for 3, but must be solved


def has_words(text: str) -> bool:
    return bool(re.search(r"\\text|[^\W\d_]{3}", MARKUP.sub(" ", text)))


def words(text: str) -> str:
    r"""`\text{An ellipse.}` -> `ellipse`"""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).lower().replace(".", " ")
    return re.sub(r"^(?:an?|the) (?=\w\w)", "", " ".join(text.split()))


def elements(text: str) -> list[str]:
    r"""`\{1, 2\}` and `1, 2` -> [1, 2]; `1 \pm 2` -> [1+2, 1-2]"""
    found = re.fullmatch(r"\\\{(.*)\\\}", text)
    parts = []
    for part in split(found[1] if found else text):
        signs = "+-" if re.search(r"\\pm(?![a-z])", part) else "+"
        each = [re.sub(r"\\pm(?![a-z])", sign, part) for sign in signs]
        parts += [re.sub(r"(^|=)\s*\+", r"\1", one).strip() for one in each if part]
    return parts


def is_tuple(text: str) -> bool:
    return is_group(text) and text[0] != "{" and len(split(text[1:-1])) > 1


def same(gold: str, answer: str, compare) -> bool | None:
    """Whether two cleaned answers are equal; None if math-verify cannot read one of them."""
    if squeeze(gold) == squeeze(answer):
        return True
    if has_words(gold) or has_words(answer) and words(gold) == words(answer):
        return words(gold) == words(answer)
    golds, answers = elements(gold), elements(answer)
    if len(golds) == len(answers) == 1:
        return same_value(*without_names(golds[0], answers[0]), compare)
    relations = [bool(RELATION.search(text)) for text in (gold, answer)]
    if any(relations):
        return compare(gold, answer) if all(relations) else False
    if len(golds) == 1 and is_tuple(gold) and answer[:2] != r"\{":  # x=1, y=2 is (1, 2)
        values = ", ".join(split(each, "=")[-1] for each in answers)
        return same_value(gold, f"({values})", compare)
    if len(answers) == 1 and is_tuple(answer) and gold[:2] != r"\{":
        values = ", ".join(split(each, "=")[-1] for each in golds)
        return same_value(f"({values})", answer, compare)
    for each in golds:  # in any order
        found = next((other for other in answers if same(each, other, compare)), None)
        if found is None:
            return False
        answers.remove(found)
    return not answers


def without_names(gold: str, answer: str) -> tuple[str, str]:
    """`x = 5` -> `5` if the other is a value or has the same name."""
    golds, answers = split(gold, "="), split(answer, "=")
    names = [squeeze(sides[0]) * (len(sides) > 1) for sides in (golds, answers)]
    named = [bool(NAME.fullmatch(name)) for name in names]
    if len(golds) == 1 and len(answers) > 1:  # 41 = 42 is no answer, but P(X<2) = 0.5 is one
        numbers = {exact(side) for side in answers} - {None}
        is_named = named[1] and not (gold == "0" and "+" in names[1])
        is_named |= not POLYNOMIAL.fullmatch(names[1]) and gold != "0"
        is_named |= not re.search("[a-z]", names[1])  # 2+3 = 5
        return (gold, answers[-1]) if is_named and len(numbers) < 2 else (gold, answer)
    alike = names[0] == names[1] or "y" in names and any("(" in name for name in names)
    if named[0] and (len(answers) == 1 or named[1] and alike):
        return golds[-1], answers[-1]
    return gold, answer


def same_value(gold: str, answer: str, compare) -> bool | None:
    if squeeze(gold) == squeeze(answer):
        return True
    g, a = exact(gold), exact(answer)
    if g:
        return bool(a) and equal_numbers(g, a)
    if is_tuple(gold) and is_tuple(answer):
        golds, answers = split(gold[1:-1]), split(answer[1:-1])
        brackets = gold[0] + gold[-1] == answer[0] + answer[-1]
        alike = brackets and len(golds) == len(answers)
        return alike and all(same(g, a, compare) for g, a in zip(golds, answers))
    if AS_TEXT.search(f"{gold} ; {answer}") or has_words(answer):
        return False
    if len(split(gold, "=")) != len(split(answer, "=")):
        return False
    return compare(gold, answer)


# ----------------------------------------------------------------------------- 4. math-verify
def equal(gold: str, answer: str) -> bool | None:
    """Whether math-verify's parser reads equal objects; None if it cannot read one."""
    import sympy
    from math_verify import verify
    try:
        g, a = read(gold), read(answer)
    except MemoryError:
        raise
    except Exception:
        return None
    matrix = sympy.MatrixBase, sympy.MatrixExpr
    scalars = all(isinstance(each, sympy.Expr) and not isinstance(each, matrix) for each in (g, a))
    alike = equal_at_points(g, a) if scalars else None
    if alike is None:
        return verify(g, a, timeout_seconds=None, allow_set_relation_comp=True)
    return alike


def read(text: str):
    """A sympy object. Case matters. Units are gone: math-verify would remove the c of `5-5c`."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex
    how = NormalizationConfig(malformed_operators=True, boxed="none")
    return latex2sympy(text, is_real=not should_treat_as_complex(text), normalization_config=how,
                       conversion_config=ConversionConfig(lowercase_symbols=False))


def equal_at_points(g, a) -> bool | None:
    """Whether the values are equal at some points; None if sympy cannot tell.

    Unlike simplify this takes milliseconds, and it is exact: 2^100 is not 2^100 + 1. Expressions
    with roots are compared at positive points only, where the roots are real.
    """
    import sympy
    if g == a:
        return not g.has(sympy.nan, sympy.zoo)
    names = sorted(g.free_symbols | a.free_symbols, key=str)
    roots = any(power.exp.is_integer is False for each in (g, a) for power in each.atoms(sympy.Pow))
    points = [(1, 1)] if not names else [(1, 1), (50, 1)] if roots else [(1, 1), (50, -1), (-1, 1)]
    try:
        for scale, flip in points:
            at = {name: sympy.Rational(scale * flip ** i * (1009 + 217 * i), 500 + 31 * i)
                  for i, name in enumerate(names)}
            at |= {name: sympy.I for name in names if name.name == "i"}
            if not close(g.subs(at).doit(), a.subs(at).doit()):
                return False
        return True
    except MemoryError:
        raise
    except Exception:
        return None


def close(g, a) -> bool:
    """Exact values must be equal in 40 digits; decimals as in math-verify, in 6 decimals."""
    import sympy
    if g.is_Rational and a.is_Rational or g.is_finite is False or a.is_finite is False:
        return g == a
    is_decimal = g.has(sympy.Float) or a.has(sympy.Float)
    g, a = g.evalf(60), a.evalf(60)
    digits = min(sympy.Float("5e-7"), abs(g) / 10**4) if is_decimal else abs(g) / 10**40
    return bool(abs(g - a) <= digits)


# ------------------------------------------------------------------------------- 5. the verdict
class Undecided(Exception):
    """Only math-verify can tell."""


def ask_nobody(gold: str, answer: str) -> bool | None:
    raise Undecided


def decide(*question) -> tuple[str, str] | None:
    """`judge` by strings and fractions alone; None if math-verify has to compare."""
    try:
        return judge(*question, compare=ask_nobody)
    except Undecided:
        return None


def judge(gold: str, completion: str | None, style: str = "", compare=equal) -> tuple[str, str]:
    """(status, why). The status is correct, wrong, no_box, empty or unparseable.

    Without a completion it says whether a gold can be read, which is checked when data are loaded.
    """
    if completion is None:
        return "correct" if is_readable(clean(gold), compare) else "unparseable", "the gold alone"
    answer = extract_answer(completion, style)
    if not answer:
        return ("empty", "an empty box") if answer == "" else ("no_box", "no closed box at the end")
    if squeeze(gold) == squeeze(answer):
        return "correct", "the same string"
    if max(len(gold), len(answer)) > MAX_CHARS:
        return "unparseable", f"longer than {MAX_CHARS} characters, so compared as a string"
    gold, answer = clean(gold), clean(answer)
    (letter, value), (chosen, answer_value) = choice(gold), choice(answer)
    if letter and (chosen or not value) and not (value and answer_value and chosen == letter):
        return "correct" if chosen == letter else "wrong", "compared as a choice"
    gold, answer = value or gold, answer_value or answer
    if not gold or not answer:
        return "unparseable", "nothing is left of it"
    right = same(gold, answer, compare)
    if style == "minerva" and not right and is_close(exact(gold), exact(answer)):
        return "correct", f"{answer} is close to {gold}"
    return {True: "correct", False: "wrong", None: "unparseable"}[right], f"{gold} and {answer}"


def is_readable(gold: str, compare) -> bool:
    """Whether answers can be compared with this gold."""
    if not gold or len(gold) > MAX_CHARS:
        return False
    easy = exact(gold) or has_words(gold) or choice(gold)[0]
    return bool(easy) or all(compare(each, each) is not None for each in elements(gold))


def is_close(gold: tuple | None, answer: tuple | None) -> bool:
    """Minerva's golds are measured: a relative error of 1e-4 and a factor of 100 are allowed."""
    scales = (1, 100, Fraction(1, 100)) if gold and answer else ()
    return any(abs(answer[0] * scale - gold[0]) <= abs(gold[0]) / 10**4 for scale in scales)


class Grader(ForkingGrader):
    """Grades (gold, completion) pairs in its workers."""

    def __init__(self, workers: int = WORKERS, **limits: float):
        super().__init__(f"{__file__}:judge", examples=EXAMPLES, workers=workers, **limits)
        self.known = {}  # (gold, box, style) -> verdict: many answers to a problem are equal

    def submit(self, key, problem, rollout, style: str = "") -> None:
        """Start judging an answer. `key` is any hashable, and `result(key)` gives the verdict."""
        self.pending[key] = self.ask(problem.answer, rollout.text, style)

    def ask(self, gold: str, completion: str | None, style: str = "") -> Future:
        """A Future of the verdict."""
        return self.threads.submit(self.look_up, gold, completion, style)

    def look_up(self, gold: str, completion: str | None, style: str) -> Verdict:
        box = completion is not None and extract_answer(completion, style)
        known = self.known.get((gold, box, style)) or self.ask_worker(gold, completion, style)
        if known.status not in NO_VERDICT and len(self.known) < 100_000:
            self.known[gold, box, style] = known
        return known

    def check_golds(self, golds: list[str]) -> list[bool]:
        """Whether each gold can be read."""
        return [found.status == "correct" for found in self.grade([(gold, None) for gold in golds])]


def open_grader(reward: str, threshold: float) -> ForkingGrader:
    """The grader of a program, which is math-verify or the function of --reward."""
    return OwnReward(reward, threshold) if reward else Grader()


# --------------------------------------------------------------------------- 6. the command line
def explain(gold: str, completion: str, style: str = "") -> None:
    """Print each step from the completion to the verdict."""
    answer = extract_answer(completion, style)
    print("box      ", repr(answer))
    if answer:
        print(f"gold      {gold!r} -> {clean(gold)!r}")
        print(f"answer    {answer!r} -> {clean(answer)!r}")
        path = "strings and fractions" if decide(gold, completion, style) else "math-verify"
        print("path     ", path)
    with Grader(workers=1) as grader:
        found, = grader.grade([(gold, completion, style)])
    print(f"verdict   {found.status}, reward {found.reward}: {shown(found.why, 600)}")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--gold", required=True, help="write a negative one as --gold='-1/2'")
    parser.add_argument("--completion", required=True, help="what the model wrote")
    parser.add_argument("--style", default="", choices=["", "minerva"],
                        help="minerva: relative tolerance 1e-4, also x100 and /100")
    explain(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
