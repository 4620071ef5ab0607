r"""The reward: whether the last boxed answer of a completion equals the gold answer.

    python rewards.py --gold '\frac12' --completion 'so \boxed{1/2}'    # shows every step

A gold that is a number needs an answer that is one. A sum such as `7+5-4` may be copied.
math-verify may take for ever, so `judge` runs in a process with limits.
"""
import argparse
import functools
import itertools
import re
import string
import unicodedata
from fractions import Fraction

from parts.grader import NO_VERDICT, WORKERS, ForkingGrader, OwnReward, Verdict, decide
from parts.text import shown

MAX_CHARS = 1000  # longer answers are compared as strings only


# ------------ 1. the box
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # escaped ones, too
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+|\s*\\times\s*10\^\{?-?\d+\}?)?")


def extract_answer(completion: str, style: str = "") -> str | None:
    """What the last box holds that is in no other box; None if it is not closed."""
    boxes = [box.end() for box in BOX.finditer(completion)]
    if not boxes:  # as the papers evaluate Minerva
        numbers = NUMBER.findall(completion[-5000:]) if style == "minerva" else []
        return numbers[-1] if numbers else None
    closing, opened = {}, []
    for brace in BRACE.finditer(completion, boxes[0] - 1):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    answer, end = None, 0
    for start in boxes:
        if start > end:
            end = closing.get(start, start)
            answer = completion[start:end].strip() if start in closing else None
    return answer


# ------------ 2. one spelling
SPELLINGS = r"""
\text \textbf \textit \textrm \textsf \textsc \texttt \textnormal \mathrm \mbox \emph
\to → \rightarrow \Rightarrow \longrightarrow \Longrightarrow \implies \therefore
\le ≤ <= \leq \leqslant | \ge ≥ >= \geq \geqslant | \ne ≠ \neq
= \equiv | \frac \dfrac \tfrac \cfrac | \sqrt √ | - − –
\times × | \cdot · ⋅ | \pm ± | \{ \lbrace | \} \rbrace | ( \langle | ) \rangle
. 。 | \ldots … ... \dots \cdots | ^\circ ° \degree | \pi π | \theta θ
\infty ∞ | \in ∈ | \emptyset \varnothing | \mathbb{R} ℝ
"""
SPELLED = {old: f"{new} " if new[-1].isalpha() and not old.isascii() else new
           for new, *others in map(str.split, re.split(r"\n|\|", SPELLINGS.strip()))
           for old in others}
SIGN = re.compile(r"\\[A-Za-z]+|[<>]=|\.\.\.|[^\x00-\x7f]")
REWRITES = [  # (what it is for, pattern, replacement); a § ends a command
    ("layout", r"[\u200b\u2060]|\\(?:!|(?:text)?color(?:box)?\s*\{[^{}]*\}|(?:left|right|bf|large"
     r"|boxed|checkmark|displaystyle|fbox|u(?:nder)?line|bold(?:symbol)?|math(?:bf|sf|tt))§)", ""),
    ("spaces", r"(?:(?<!\\)\\(?:[,;: ]|q?quad§)|~|\s)+", " "),
    ("money, bold text", r"\\?\$|\*\*|[\"“”`€£¥₹¢]|(?<!\\)\\[()\[\]]", ""),
    ("functions", r"(?<![A-Za-z\\])(pi|sin|cos|tan|log|ln|exp|sqrt)§", r"\\\1 "),
    ("announcements", r"(?i)^\s*(?:=|\\(?:to|approx)§|(\\text\{)?\s*(?:the )?(?:final )?"
     r"ans(?:wer)?(?: is|\.?\s*[:=]|\.)\s*(?=[^\s}]|\}.))", r"\1"),
    ("numbers in text", r"\\text\{\s*([a-z] = )?(-?[\d.,/]+)\s*([^{}\d]*)\}", r"\1\2\\text{\3}"),
    ("text", r"\\text\{\s*(|[ie]|,?\s?(?:and|or)|percent|\\?%|[snrt][tdh])\s*\}", r" \1 "),
    ("currencies", r"(?<![A-Za-z])(?:\\text\{)?(?:USD?|EUR|Rs)\.? ?\}? ?(?=[\d.])", ""),
    ("no solution", r"(?i)^(?:\\text\{)?no (?:real )?solutions?\.?\}?$", r"\\emptyset"),
    ("comma in braces", r"(?<=\d)\{([,:])\}(?=\d)", r"\1"),
    ("ordinals", r"(?<=\d)(?:\^\{? +| *)(?:st|nd|rd|th)\b *\}?", ""),
    ("percent", r"\bpercent(?:age)?\b|\\?%", r"\\%"),
    ("and, or", r",?\s*(?<![A-Za-z\\])(?:and|or)§,?\s*", " , "),
    ("thousands", r"(?<![\d.,(\[])(?<!\\\{)\d{1,3}([, ])\d{3}(?:\1\d{3})*(?![\d,])",
     lambda match: re.sub("[, ]", "", match[0])),
    ("first arguments", r"\\(frac|binom|sqrt|mathbb)\s*(\w|\\pi§)", r"\\\1{\2}"),
    ("second arguments", r"(\\(?:frac|binom)\{(?:[^{}]|\{[^{}]*\})*\})\s*(\w|\\pi§)", r"\1{\2}"),
    ("unit fractions", r"\\frac\{(\\text\{[^{}]*\})\}\{(\\text\{[^{}]*\}[\^{}\d]*)\}", r"\1/\2"),
    ("exponents", r"\^(-\d+|-[a-z])", r"^{\1}"),
    ("degrees", r"\s*\^\s*\{?[\s^]*\\circ\s*\}?", " "),
    ("powers of ten", r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)(?:\s*(?:[xX*]|\\cdot|\\times)\s*10\s*\^"
     r"\{?(-?\d+)\}?|[eE]([-+]?\d{1,3})(?![\w.]))", r"\1\\times10^{\2\3}"),
    ("mixed numbers", r"(?<![A-Za-z\\\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    ("bracketed products", r"^-\s*\(([^-+,()]*)\)$", r"-\1"),
    ("sets", r"^\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid§|[|:])(.*)\\\}$", r"\1"),
    ("environments", r"\\begin\{(aligned|align\*?|cases|gathered|split)\}(.*?)\\end\{\1\}",
     lambda match: re.sub(r",(?=\s*=)", "", match[2].replace("&", "").replace(r"\\", ","))),
]
# Words after a value are its unit, unless one of these changes it or is mathematics.
NO_UNIT = re.compile(r"""(?ix) \b(?:
    half | halves | thirds? | quarters? | (?!months?\b)\w+ths? | tens | dozens? | pairs?
    | hundreds? | thousands? | \w+illions? | lakhs? | percent\w* | double | twice
    | (?<![a-z]\ )(?:squared | cubed) | factorial | base | mod | over | minus | plus | negative
    | less | more | below | about | least | most | than | not? | or | and | wrong | maybe | if
    | except | is | was | [ap]\.?m | (?-i:k | M) | theta | e )\b | [<>=\\?!\d万亿千百十半倍]""")
EXPONENT = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?|(?<=m)[23])?"
TEXT_UNIT = re.compile(  # \text{ m}/\text{s}^2
    r"(?:(?<=[\d}])|(?<=\\pi))(?:\s?(?:(?:/|\\cdot)\s?)?\\text\{(?:[^{}]|\{[^{}]*\})*\}"
    rf"{EXPONENT})+\s?(?=[,;]|$)")
BARE_UNIT = re.compile(rf"""(?x) (?: (?<=[\d}}]) | (?<=\\pi)(?=\s) )
    (?: \s?/? (?: [^\W\d_]{{4,}} | [^\W_ -~]+ | [ckm]m | [km]?g | ft | in | mi | hr | mL | nm )
      | \s/? (?: [^\W\d_]{{3,}} | (?<!\\pi\s)[msghlLNJWVCKAFH](?={EXPONENT}(?:/|\.?\s?(?:[,;]|$))) )
    ) {EXPONENT} (?: [ ./*-]+[^\W\d_]+{EXPONENT} )* \.?\s?(?=[,;]|$)""")


def drop_unit(match: re.Match) -> str:
    """`5 m` has a unit, but `5m` and `5 m n` may have variables."""
    words = re.sub(rf"\\text|\\cdot|{EXPONENT}", "", match[0])
    return match[0] if NO_UNIT.search(words) else ""


@functools.lru_cache(4096)
def clean(text: str) -> str:
    """`text` in one spelling, without units."""
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", r"_{\g<0>}", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", r"^{\g<0>}", text)
    text = re.sub("[¼½¾⅐-⅞]", r" \g<0>", text)  # 2½ is 2 1/2
    text = SIGN.sub(lambda match: SPELLED.get(match[0], match[0]), text)
    text = unicodedata.normalize("NFKC", text).replace("⁄", "/")
    if len(text) > 2 * MAX_CHARS:  # one character can become eighteen
        return ""
    for _, pattern, new in REWRITES:
        text = re.sub(pattern.replace("§", "(?![A-Za-z])"), new, text.strip())
    for _ in range(2):
        text = re.sub(r"(?<![.\\])\.$|\\+$", "", text.strip(" ,;:")).strip()
        text = BARE_UNIT.sub(drop_unit, TEXT_UNIT.sub(drop_unit, text)).strip()
        if is_group(text) and (text[0] == "{" or len(split(text[1:-1])) == 1):
            text = text[1:-1]
    return " ".join(text.split())


def squeeze(text: str) -> str:
    """`text` without unimportant spaces and braces."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|(?<=[\^_])\{(\w)\}", r"\1", text)


def open_brackets(text: str) -> list[int]:
    """How many brackets are open after each character."""
    return list(itertools.accumulate((c in "([{") - (c in ")]}") for c in text))


def split(text: str, separators: str = ",;") -> list[str]:
    """The parts between separators outside brackets."""
    depths = open_brackets(text)
    cuts = [i for i, depth in enumerate(depths) if depth == 0 and text[i] in separators]
    starts = [0, *(i + 1 for i in cuts)]
    return [text[i:j].strip() for i, j in zip(starts, [*cuts, len(text)])]


def is_group(text: str) -> bool:
    """Whether the last character closes the first bracket."""
    depths = open_brackets(text)
    return text[:1] in ("(", "[", "{") and depths[-1] == 0 and 0 not in depths[:-1]


# ------------ 3. words, numbers, lists, tuples
DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
EXACT = re.compile(rf"""(-?)
    (?: (\d+(?=\\frac\{{\d+\}}\{{\d+\}}))?  # 5\frac{{1}}{{2}}
        \\frac\{{(-?{DECIMAL})\}}\{{(-?{DECIMAL})\}}
      | ({DECIMAL}) (?: /({DECIMAL}) )? (?: \\times10\^\{{(-?\d{{1,3}})\}} )?  # 6\times10^{{3}}
      | 10\^\{{?(-?\d{{1,3}})\}}?
    ) (\\%)?""", re.VERBOSE | re.ASCII)
CHOICE = re.compile(r"(?:[Oo]ption |[Cc]hoice )?\(?([A-Ja-j])\)?[.:]?\s*[.:]?")
WITH_VALUE = re.compile(r"(?:\(([A-J])\)|([A-J])(?:\)|[.:](?=\s)))[.:]?\s*+[.:]?\s*"
                        r"(?![-+*/^=(,]|\\cdot|\\times|\\sqrt)(?!.*\([A-J]\))(\S.*)")
TEXT = re.compile(r"\\text\{([^{}]*)\}")
MARKUP = re.compile(r"\\(?:begin|end)\{\w+\}|\\(?!text(?![A-Za-z]))[A-Za-z]+")
RELATION = re.compile(r"[<>]|\\(?:[lg]e|ne)(?![A-Za-z])")
AS_TEXT = re.compile(  # would be misread
    r"\d\)?\s*_|\d:|\\ldots|\\pmod|\d\s+[A-Za-z]+\s+\d|^\d+(?:-\d+)+ ;|\\infty\s*\]")
NAME = re.compile(r"(?:\\[A-Za-z]+|[A-Za-z]|[A-Za-z]{4,})'*"  # x, f(2), \theta, Area, AB, (x, y)
                  r"(?:_\{?\w+\}?)?(?:\^\{-1\})?(?:\([^=]*\))?"
                  r"|\\text\{[^{}]*\}|[A-Z]{2,3}|\([A-Za-z, \\_\d{}]*\)"
                  r"|[a-z](?:\+[a-z])+|\\frac\{[a-z]\}\{[a-z]\}")
# `x+2=3` and `\sqrt{x}=3` have to be solved. `P(X<2)=0.5` says what a value is.
UNSOLVED = re.compile(r"(?=.*(?<![a-z\\])[a-z])(?!.*\\text)[-+a-z\\\d^{}()|\s/]*")


def exact(text: str) -> tuple[Fraction, bool, bool] | None:
    """(value, has a decimal point, is a percentage) of a plain number, or None."""
    match = EXACT.fullmatch(re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text))
    if not match or Fraction(match[4] or match[6] or 1) == 0:
        return None
    sign, whole, top, bottom, decimal, divisor, power, ten, percent = match.groups()
    if top:
        value = Fraction(whole or 0) + Fraction(top) / Fraction(bottom)
    else:
        value = Fraction(decimal or 1) / Fraction(divisor or 1)
    value *= Fraction(10) ** int(power or ten or 0)
    has_point = "." in (decimal or "") and not divisor
    return (-value if sign else value), has_point, bool(percent)


def equal_numbers(gold: tuple, answer: tuple) -> bool:
    """Equal, or equal to 6 decimals if one is a decimal. 10% is 10 and 0.1."""
    if gold[2] != answer[2] and gold[0] == answer[0] and abs(gold[0]) >= 1:
        return True
    g, a = (value / 100 if percent else value for value, _, percent in (gold, answer))
    is_rounded = (gold[1] or answer[1]) and g.denominator > 1
    tolerance = min(Fraction("5e-7"), abs(g) / 10**4) if is_rounded else 0
    return abs(a - g) <= tolerance


def choice(text: str) -> tuple[str, str]:
    r"""(letter, value) of `\text{(B)} 36`; either may be empty."""
    plain = re.sub(r"^\\text\{([^{}]*)\}", r"\1 ", text).strip()
    if letter := CHOICE.fullmatch(plain):
        return letter[1], ""
    both = WITH_VALUE.fullmatch(plain)
    return (both[1] or both[2], both[3]) if both else ("", text)


def has_word(text: str) -> bool:
    return bool(re.search(r"\\text|[^\W\d_]{3}|^(?i:no)$", MARKUP.sub(" ", text)))


def words(text: str) -> str:
    r"""`\text{An Ellipse.}` -> `an ellipse`"""
    return " ".join(TEXT.sub(r" \1 ", text).lower().replace(".", " ").split())


def is_tuple(text: str) -> bool:
    return is_group(text) and text[0] != "{" and len(split(text[1:-1])) > 1


def elements(text: str) -> list[str]:
    r"""`\{1, 2\}` and `1, 2` -> [1, 2]; `1 \pm 2` -> [1+2, 1-2]"""
    parts = filter(None, split(re.sub(r"^\\\{(.*)\\\}$", r"\1", text)))
    both = r"\\pm(?!od)"
    signed = [re.sub(both, sign, part)
              for part in parts for sign in ("+-" if re.search(both, part) else "+")]
    return [re.sub(r"(^|=)\s*\+", r"\1", part).strip() for part in signed]


def named(text: str) -> tuple[str, list[str]]:
    """("x", ["2+3", "5"]) of `x = 2+3 = 5`; the name may be empty."""
    sides = split(text, "=")
    names = [side for side in sides if len(sides) > 1 and NAME.fullmatch(squeeze(side))]
    values = [side for side in sides if side not in names]
    return squeeze(names[0]) if names else "", values or sides[-1:]


def as_points(text: str) -> str:
    r"""`r=1, \theta=2` -> `(1, 2)`. Of `b=2, a=1` the order is clear."""
    pairs = [split(part, "=") for part in split(text)]
    if not all(len(pair) == 2 and NAME.fullmatch(squeeze(pair[0])) for pair in pairs):
        return text
    names = list(dict.fromkeys(name for name, _ in pairs))
    n = len(names)
    points = [dict(pairs[i:i + n]) for i in range(0, len(pairs), n)]
    if n == 1 or any(len(point) < n for point in points):
        return text
    if "".join(sorted(names)) in string.ascii_lowercase:
        names.sort()
    return ", ".join("(%s)" % ", ".join(map(point.get, names)) for point in points)


def same(gold: str, answer: str, compare) -> bool | None:
    """Whether two cleaned answers are equal; None if `compare` cannot read one of them."""
    same_words = (has_word(gold) or has_word(answer)) and words(gold) == words(answer)
    if same_words or squeeze(gold) == squeeze(answer):
        return True
    gold, answer = as_points(gold), as_points(answer)
    golds, answers = elements(gold), elements(answer)
    if len(golds) == len(answers) == 1:
        return same_element(golds[0], answers[0], compare)
    both = gold + answer
    if RELATION.search(both):
        return (len(golds) == len(answers) or "infty" in both) and compare(gold, answer)
    if is_tuple(gold) != is_tuple(answer) and not re.search(r"\\\{|=", both):
        gold, answer = (each if is_tuple(each) else f"({each})" for each in (gold, answer))
        return same_value(gold, answer, compare)
    for each in golds:  # in any order
        found = next((other for other in answers if same(each, other, compare)), None)
        if found is None:
            return False
        answers.remove(found)
    return not answers


def same_element(gold: str, answer: str, compare) -> bool | None:
    """The same for two values or equations. A chain `x = 2+3 = 5` counts by its last side."""
    before, _, after = answer.rpartition(r"\approx")
    if before and "." not in gold and not NAME.fullmatch(squeeze(before)):
        answer = before  # 8\pi \approx 25.1
    (name, golds), (other, answers) = named(gold), named(answer.replace(r"\approx", "="))
    numbers = list(filter(None, map(exact, answers)))
    if "" in answers or not all(equal_numbers(numbers[0], number) for number in numbers):
        return False  # 41 = 42
    if any(map(NO_UNIT.search, TEXT.findall("=".join(answers[:-1])))):
        return False  # \text{twice } x = 42
    unsolved = len(answers) > 1 and UNSOLVED.fullmatch(answers[0])
    is_value = len(golds) == 1 or not re.search(r"\\text|[^\W\d_]", MARKUP.sub("", gold))
    is_function = "y" in (name, other) and "(" in name + other
    alike = not (name and other) or name == other or is_function
    if is_value and alike and not (unsolved and (not other or golds == ["0"])):
        return same_value(golds[-1], answers[-1], compare)
    are_equations = "=" in gold and "=" in answer and not (exact(golds[-1]) and name and other)
    return are_equations and compare(gold, answer)


def same_value(gold: str, answer: str, compare) -> bool | None:
    if squeeze(gold) == squeeze(answer):
        return True
    if exact(gold):
        return exact(answer) is not None and equal_numbers(exact(gold), exact(answer))
    if is_tuple(gold) and is_tuple(answer):
        golds, answers = split(gold[1:-1]), split(answer[1:-1])
        alike = gold[0] + gold[-1] == answer[0] + answer[-1] and len(golds) == len(answers)
        return alike and all(same(g, a, compare) for g, a in zip(golds, answers))
    if AS_TEXT.search(f"{gold} ; {answer}") or has_word(gold) or has_word(answer):
        return False
    return compare(gold, answer)


# ------------ 4. math-verify
def equal(gold: str, answer: str) -> bool | None:
    """Whether math-verify's parser reads equal objects; None if it cannot read one."""
    import sympy
    from math_verify import verify
    try:
        g, a = read(gold), read(answer)
        if isinstance(g, sympy.Eq) and isinstance(a, sympy.Eq):
            return equal_at_points(g.lhs - g.rhs, a.lhs - a.rhs, up_to_a_factor=True)
        if all(isinstance(each, sympy.Expr) and not each.is_Matrix for each in (g, a)):
            return equal_at_points(g, a)
        return verify(g, a, timeout_seconds=None, allow_set_relation_comp=True)
    except MemoryError:
        raise
    except Exception:
        return None


def read(text: str):
    """A sympy object. Case matters, and the c of `5-5c` is no unit."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex
    parts, names = split(text), set(re.findall("[a-z]", MARKUP.sub("", text)))
    if len(parts) > 1 == len(names) and all(map(RELATION.search, parts)):  # x<1, x>3
        sets = [read(part).as_set() for part in parts]
        union, common = sympy.Union(*sets), sympy.Intersection(*sets)
        return common if union == sympy.S.Reals else union
    text = re.sub(r"(?<![A-Za-z\\])([EeI])(?=\s*_)", r"\\Xi_\1", text)  # E_1 is no constant
    how = NormalizationConfig(malformed_operators=True, boxed="none")
    return latex2sympy(text, is_real=not should_treat_as_complex(text), normalization_config=how,
                       conversion_config=ConversionConfig(lowercase_symbols=False))


def equal_at_points(g, a, up_to_a_factor: bool = False) -> bool:
    """Whether values are equal at some points, because simplify may take for ever."""
    import sympy
    names = sorted(g.free_symbols | a.free_symbols, key=str)
    has_roots = any(p.exp.is_integer is False for p in g.atoms(sympy.Pow) | a.atoms(sympy.Pow))
    for k, scale in enumerate((1, 50, 100) if names else [1]):
        sign = -1 if k == 2 and not has_roots else 1
        at = {name: sympy.Rational(scale * (1009 + 217 * i * k), 500 + 31 * i) * sign ** (i + 1)
              for i, name in enumerate(names)}
        at |= {name: sympy.I for name in names if name.name == "i"}
        there, here = g.subs(at).doit(), a.subs(at).doit()
        if up_to_a_factor:
            g, up_to_a_factor = g * here / there, False
            continue
        digits = 4 if g.has(sympy.Float) or a.has(sympy.Float) else 70
        tolerance = min(5e-7, abs(there.evalf(80)) / 10**digits)
        if not abs((there - here).evalf(80)) <= tolerance:
            return False
    return True


# ------------ 5. the verdict
def judge(gold: str, completion: str, style: str = "", compare=equal) -> tuple[str, str]:
    """(status, why). The status is correct, wrong, no_box, empty or unparseable."""
    answer = extract_answer(completion, style)
    if answer is None:
        return "no_box", "no closed box at the end"
    if not answer:
        return "empty", "an empty box"
    is_same = squeeze(gold) == squeeze(answer)
    if is_same or max(len(gold), len(answer)) > MAX_CHARS:
        return "correct" if is_same else "unparseable", "compared as strings"
    gold, answer = clean(gold), clean(answer)
    (letter, value), (chosen, other) = choice(gold), choice(answer)
    agree = chosen.upper() == letter
    if letter.isupper() and (chosen or not value) and not (agree and value and other):
        return "correct" if agree else "wrong", "compared as a choice"
    gold, answer = value or gold, other or answer
    if not gold or not answer:
        return "unparseable", "nothing is left of it"
    right = same(gold, answer, compare)
    if style == "minerva" and exact(answer) and exact(gold) and exact(gold)[0]:
        ratio = exact(answer)[0] / exact(gold)[0]
        right = right or any(abs(ratio * k - 1) * 10**4 <= 1 for k in (1, 100, Fraction(1, 100)))
    return {True: "correct", False: "wrong", None: "unparseable"}[right], f"{gold} and {answer}"


class Grader(ForkingGrader):
    FIRST = [  # the first time is slow
        r"e^{x}\sqrt{2}+\log_{2}(x)-\sin(\frac{\pi}{7})", r"(-\infty,2]\cup[3,4)",
        r"(x-2)\sqrt[3]{5}", "0<|x|<5", "y=2x+1", "3-4i"]

    def __init__(self, workers: int = WORKERS, **limits: float):
        examples = [(each, rf"\boxed{{{each}+0}}") for each in self.FIRST]
        super().__init__(f"{__file__}:judge", examples=examples, workers=workers, **limits)
        self.known = {}  # (gold, box, style) -> verdict

    def submit(self, key, problem, rollout, style: str = "") -> None:
        self.pending[key] = self.ask(problem.answer, rollout.text, style)

    def ask_worker(self, gold: str, completion: str, style: str = "") -> Verdict:
        key = gold, extract_answer(completion, style), style
        found = self.known.get(key) or super().ask_worker(gold, completion, style)
        if found.status not in NO_VERDICT:
            self.known[key] = found
        return found

    def check_golds(self, golds: list[str]) -> list[bool]:
        found = self.grade([(gold, r"\boxed{x_{0}}") for gold in golds])
        return [each.status in ("correct", "wrong") for each in found]


def open_grader(reward: str, threshold: float) -> ForkingGrader:
    return OwnReward(reward, threshold) if reward else Grader()


def main() -> None:
    parser = argparse.ArgumentParser(description="Shows how an answer is judged.")
    parser.add_argument("--gold", required=True, help="write a negative one as --gold='-1/2'")
    parser.add_argument("--completion", required=True)
    parser.add_argument("--style", default="", choices=["", "minerva"])
    flags = parser.parse_args()
    question = flags.gold, flags.completion, flags.style
    answer = extract_answer(flags.completion, flags.style)
    print(f"box      {answer!r}")
    for name, text in (("gold", flags.gold), ("answer", answer or "")):
        print(f"{name:8} {text!r} -> {clean(text)!r}")
    print("path    ", "strings and fractions" if decide(judge, question) else "math-verify")
    with Grader(workers=1) as grader:
        found, = grader.grade([question])
    print(f"verdict  {found.status}, reward {found.reward}: {shown(found.why, 600)}")


if __name__ == "__main__":
    main()
