r"""The reward: whether the last boxed answer of a completion equals the gold answer.

    python rewards.py --gold '\frac12' --completion 'so \boxed{1/2}'    # a verdict, with every step

1. `extract_answer` takes the last box, which has to be closed. Text outside boxes does not count.
2. `clean` gives gold and answer one spelling, and removes units.
3. `same` compares words, numbers, lists and tuples as strings and fractions. If the gold is a plain
   number, so must be the answer: `7+5-4` is not 8, because it may be copied from the question.
4. `equal` compares the rest with math-verify. It may take for ever, and completions are untrusted,
   so `judge` runs in a process with limits (parts/grader.py). Nothing runs a completion as code.
"""
import argparse
import functools
import itertools
import re
import unicodedata
from fractions import Fraction

from parts.grader import NO_VERDICT, WORKERS, ForkingGrader, OwnReward, Verdict, decide
from parts.text import shown

MAX_CHARS = 1000  # longer answers are compared as strings only
EXAMPLES = [(each, rf"\boxed{{{each}+0}}") for each in (  # judged by each worker at its start
    r"\frac{x^{2}-1}{3}\sqrt{2};(x-2)e^{x};\pi\sin(\frac{\pi}{7});3-4i;y=2x+1"
    r";\log_{2}(x);2\sqrt[3]{5};|x-1|;(-\infty,2]\cup[3,4);0<x<5;\frac{1+\sqrt{5}}{2}".split(";"))]


# ------------------------------------------------------------------------------------ 1. the box
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # also matches escaped ones, to skip them
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+|\s*\\times\s*10\^\{?-?\d+\}?)?")


def extract_answer(completion: str, style: str = "") -> str | None:
    """The content of the last box that is in no other box; None if this box is not closed."""
    boxes = [box.end() for box in BOX.finditer(completion)]
    if not boxes:  # with --style minerva the last number, as in the papers' evaluations
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
        if start > end:  # in no other box
            end = closing.get(start, start)
            answer = completion[start:end].strip() if start in closing else None
    return answer


# ------------------------------------------------------------------------------ 2. one spelling
SPELLINGS = r"""
DELETED \! \left \right \big \Big \bigl \bigr \displaystyle \textstyle \rm \bf \large \boxed
DELETED \fbox \underline \mathbf \boldsymbol \mathtt \checkmark ✓ ​ ⁠
\text \textbf \textit \textrm \texttt \textnormal \mathrm \mbox \hbox \emph | \times ×
\frac \dfrac \tfrac \cfrac | \to → \rightarrow \Rightarrow \implies \therefore | = := | / ⁄
\le ≤ <= \leq \leqslant | \ge ≥ >= \geq \geqslant | \ne ≠ \neq | - − – | . 。 | \sqrt √
\ldots … ... \dots \cdots | \cdot · ⋅ | \emptyset ∅ \varnothing | ( \langle | ) \rangle | \pm ±
\pi π | \theta θ | \infty ∞ | \approx ≈ | ^\circ ° | \cup ∪ | \in ∈ | \mathbb{R} ℝ | \frac{1}{2} ½
\frac{1}{4} ¼ | \frac{3}{4} ¾ | \frac{1}{3} ⅓ | \frac{2}{3} ⅔
""".replace("\n", "|").replace("DELETED", "\0").split("|")
SAME = {old: new.strip("\0") + " " * (not old.isascii() and new[-1].isalpha())  # 2πr -> 2\pi r
        for new, *olds in filter(None, map(str.split, SPELLINGS)) for old in olds}
SIGN = re.compile(r"\\(?:[A-Za-z]+|!)|[<>:]=|\.\.\.|[^\x00-\x7f]")
REWRITES = [  # (what it is for, pattern, replacement); a § is the end of a command
    ("invisible commands", r"\\(?:phantom|hspace|tag|(?:text)?color(?:box)?)\s*\{[^{}]*\}", ""),
    ("spaces", r"(?:(?<!\\)\\(?:[,;: ]|q?quad§)|~|\s)+", " "),
    ("signs of money, bold text", r"\\?\$|\*\*|[\"“”`€£¥₹¢]|(?<!\\)\\[()\[\]]", ""),
    ("currencies", r"(?<![A-Za-z])(?:\\text\{\s*)?(?:USD?|EUR|Rs)\.?\s*\}?\s*(?=[\d.])", ""),
    ("functions", r"\\operatorname\*?\{(\w+)\}|(?<![A-Za-z\\])(pi|theta|alpha|beta|sin|cos|tan"
     r"|log|ln|exp|sqrt)§", r"\\\1\2 "),
    ("announcements", r"(?i)^\s*(?:=|\\to§|(\\text\{)?\s*(?:the |final )*(?:answer|ans)"
     r"(?: is|\.?\s*[:=]|\.)\s*(?=[^\s}]|\}.))", r"\1"),
    ("i, e and empty text", r"\\text\{\s*([ie]?)\s*\}", r"\1"),
    ("infinity", r"\+\s*\\infty|(?<![A-Za-z\\])infinity|\\text\{infinity\}", r"\\infty "),
    ("no solution", r"(?i)^(?:\\text\{)?\s*(?:there (?:is|are) )?no (?:real )?solutions?\.?\}?$",
     r"\\emptyset"),
    ("comma in braces", r"(?<=\d)\{([,:])\}(?=\d)", r"\1"),
    ("ordinals", r"(?<=\d)\s*(?:\^?\{?\\text\{\s*(?:st|nd|rd|th)\s*\}\}?|(?:st|nd|rd|th)\b)", ""),
    ("numbers in text", r"\\text\{\s*(-?[\d.,/]+)\s*([^{}\d]*)\}", r"\1\\text{\2}"),
    ("percent", r"\\text\{\s*(?:\\?%|percent)\s*\}|\bpercent(?:age)?\b|\\?%", r"\\%"),
    ("and, or", r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)§),?", " , "),
    ("thousands", r"(?<![\d.,(\[])(?<!\\\{)\d{1,3}([, ])\d{3}(?:\1\d{3})*(?![\d,])",
     lambda match: re.sub("[, ]", "", match[0])),
    ("first arguments", r"\\(frac|binom|sqrt|mathbb)\s*(\w|\\(?:pi|theta|alpha)§)", r"\\\1{\2}"),
    ("second arguments", r"\\(frac|binom)\s*(\{(?:[^{}]|\{[^{}]*\})*\})\s*(\w|\\pi§)",
     r"\\\1\2{\3}"),
    ("exponents", r"\^\s*\(([^()]*)\)|\^(-\d+|-[a-z])", r"^{\1\2}"),
    ("degrees", r"\s*\^\s*\{?[\s^]*\\circ\s*\}?\s*(?:\\text\{\s*[CF]\s*\}|[CF]\b)?", ""),
    ("powers of ten", r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)(?:\s*(?:[xX]|\\cdot|\\times)\s*10\s*\^"
     r"\{?(-?\d+)\}?|[eE]([-+]?\d{1,3})(?![\w.]))", r"\1\\times10^{\2\3}"),
    ("mixed numbers", r"(?<![A-Za-z\\\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    ("environments", r"\\begin\{(aligned|align\*?|cases|gathered|split)\}(.*?)\\end\{\1\}",
     lambda match: re.sub(r",(?=\s*=)", "", match[2].replace("&", "").replace(r"\\", ","))),
]

# Any words after a value are its unit, unless one of these changes the value or is mathematics.
NO_UNIT = re.compile(r"""(?ix) \b(?: half | halves | thirds? | quarters? | (?!months?\b)\w+ths?
    | tens | dozens? | pairs? | scores? | hundreds? | thousands? | \w+illions? | lakhs? | crores?
    | percent\w* | (?<![a-z]\ )(?:squared | cubed) | factorial | base | binary | recurring | not?
    | or | and | than | mod | over | minus | plus | double | twice | negative | less | more
    | below | about | least | most | wrong | maybe | if | except | is | was | [ap]\.?m | (?-i:k | M)
    | gamma | delta | lambda | phi | omega | theta | i | e )\b | [<>=\\?!\d万亿千百十半倍]""")
EXPONENT = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
WORD = rf"[^\W\d_]+(?:{EXPONENT}|(?<=m)[23])"
TEXT_UNIT = re.compile(  # \text{ m}/\text{s}^2
    r"(?:(?<=[\d}])|(?<=\\pi)|(?<=[^A-Za-z][a-z]))"
    rf"(?:\s?(?:(?:/|\\cdot)\s?)?\\text\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}{EXPONENT})+\s?(?=[,;]|$)")
BARE_UNIT = re.compile(  # cm^2, km/h
    rf"(?:(?<=[\d}}])|(?<=\\pi)(?=\s))(\s*)/?({WORD}(?:[ ./*-]+{WORD})*)\.?\s?(?=[,;]|$)")
SHORT_UNITS = set("m s g h l L N J W V C K A F H T cm mm km kg mg ft in mi hr mL nm".split())


def drop_unit(match: re.Match) -> str:
    r"""Without \text, short words may be variables: `5 m` has a unit, `5m` and `5 m n` do not."""
    words = re.sub(rf"\\text|\\cdot|{EXPONENT}", "", match[0])
    is_unit = match.re is TEXT_UNIT
    if not is_unit:
        first, *others = re.findall(r"[^\W\d_]+", words)
        one_letter = match[1] and not match.string[match.start() - 1].isalpha()
        is_symbol = len(first) > 1 or one_letter and ("/" in words or not others)
        is_word = len(first) >= (3 if match[1] else 4) or not first.isascii()
        is_unit = is_word or first in SHORT_UNITS and is_symbol
        words = re.sub(r"\d", "", words)
    return "" if is_unit and not NO_UNIT.search(words) else match[0]


@functools.lru_cache(4096)  # a gold is compared with many answers
def clean(text: str) -> str:
    """`text` in one spelling, without units."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", r"^{\g<0>}", re.sub("[₀₁₂₃₄₅₆₇₈₉]+", r"_{\g<0>}", text))
    text = SIGN.sub(lambda match: SAME.get(match[0], match[0]), text)
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"(?![0-9])\d", lambda match: str(unicodedata.digit(match[0])), text)
    if len(text) > 2 * MAX_CHARS:  # one character can become eighteen
        return ""
    for _, pattern, new in REWRITES:
        text = re.sub(pattern.replace("§", "(?![A-Za-z])"), new, text.strip())
    for _ in range(2):  # layers around the answer
        text = re.sub(r"(?<![.\\])\.$|\\+$", "", text.strip(" ,;:")).strip()
        text = BARE_UNIT.sub(drop_unit, TEXT_UNIT.sub(drop_unit, text)).strip()
        if is_group(text) and (text[0] == "{" or len(split(text[1:-1])) == 1):
            text = text[1:-1]
    return text.removeprefix("+").strip()


def squeeze(text: str) -> str:
    """`text` without unimportant spaces and braces, to compare strings."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|(?<=[\^_])\{(\w)\}", r"\1", text)


def open_brackets(text: str) -> list[int]:
    return list(itertools.accumulate((c in "([{") - (c in ")]}") for c in text))


def split(text: str, separators: str = ",;") -> list[str]:
    """The parts between separators outside brackets."""
    cuts = [i for i, n in enumerate(open_brackets(text)) if n == 0 and text[i] in separators]
    return [text[i + 1:j].strip() for i, j in zip([-1, *cuts], [*cuts, len(text)])]


def is_group(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    return text[:1] in tuple("([{") and open_brackets(text)[-1] == 0 not in open_brackets(text)[:-1]


# -------------------------------------------------------------- 3. words, numbers, lists, tuples
DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
EXACT = re.compile(rf"""(-?)
    (?: (\d+(?=\\frac\{{\d+\}}\{{\d+\}}))?                                  # 5\frac{{1}}{{2}}
        \\frac\{{(-?{DECIMAL})\}}\{{(-?{DECIMAL})\}}
      | ({DECIMAL}) (?: /({DECIMAL}) )? (?: \\times10\^\{{(-?\d{{1,3}})\}} )?  # 6\times10^{{3}}
      | 10\^\{{?(-?\d{{1,3}})\}}?
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
    is_same = g_percent != a_percent and g == a and abs(g) >= 1
    g, a = g / (100 if g_percent else 1), a / (100 if a_percent else 1)
    is_rounded = (g_decimal or a_decimal) and g.denominator > 1
    return is_same or abs(a - g) <= (min(Fraction("5e-7"), abs(g) / 10**4) if is_rounded else 0)


CHOICE = re.compile(r"(?:\\text\{\s*)?(?:[Oo]ption |[Cc]hoice )?\(?([A-Ja-j])\)?[.:]?\s*\}?[.:]?")
WITH_VALUE = re.compile(r"""(?:\\text\{\s*)? (?: \(([A-J])\) | ([A-J])(?:\)|[.:](?=\s)|(?=\})) )
    [.:]?\s*+ \}?+ [.:]?\s* (?![-+*/^=(,]|\\cdot|\\times|\\sqrt) (?!.*\([A-J]\)) (\S.*)
    """, re.VERBOSE)


def choice(text: str) -> tuple[str, str]:
    r"""(letter, value) of `\text{(B)} 36`; either may be empty."""
    if letter := CHOICE.fullmatch(text):
        return letter[1], ""
    both = WITH_VALUE.fullmatch(text)
    return (both[1] or both[2], both[3]) if both else ("", text)


MARKUP = re.compile(r"\\(?:begin|end)\{\w+\}|\\(?!text(?![A-Za-z]))[A-Za-z]+")
RELATION = re.compile(r"[<>]|\\(?:[lg]e|ne)(?![A-Za-z])")
AS_TEXT = re.compile(r"\d\)?\s*_|\d:|\\ldots|\\pmod|\d\s+[A-Za-z]+\s+\d"  # would be misread
                     r"|(?<![_^\w.])\d[\d.]*\s+[\d.]|'|\\infty\s*\]|^\d+(?:-\d+)+ ;")
NAME = re.compile(r"(?:\\[A-Za-z]+|[A-Za-z]|[A-Za-z]{4,})'*"  # x, f(2), \theta, Area, AB, (x, y)
                  r"(?:_\{?\w+\}?)?(?:\^\{-1\})?(?:\([^=]*\))?"
                  r"|\\text\{[^{}]*\}|[A-Z]{2,3}|\([A-Za-z, \\_\d{}]*\)|[a-z](?:\+[a-z])+")
# `x+2=3` and `\sqrt{x}=3` have to be solved. `P(X<2)=0.5` says what a value is.
UNSOLVED = re.compile(r"(?=.*[a-z])(?:\\(?:sqrt|sin|cos|tan|log|ln|frac|cdot)|[-+a-z\d^{}()|\s/])*")


def has_word(text: str, letters: int = 3) -> bool:
    return bool(re.search(rf"\\text|[^\W\d_]{{{letters}}}|^(?i:no)$", MARKUP.sub(" ", text)))


def words(text: str) -> str:
    r"""`\text{An ellipse.}` -> `ellipse`"""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).lower().replace(".", " ")
    return re.sub(r"^(?:an?|the) (?=\w\w)", "", " ".join(text.split()))


def is_tuple(text: str) -> bool:
    return is_group(text) and text[0] != "{" and len(split(text[1:-1])) > 1


def elements(text: str) -> list[str]:
    r"""`\{1, 2\}` and `1, 2` -> [1, 2]; `1 \pm 2` -> [1+2, 1-2]"""
    parts = filter(None, split(re.sub(r"^\\\{(.*)\\\}$", r"\1", text)))
    signed = [re.sub(r"\\pm(?!od)", sign, part)
              for part in parts for sign in ("+-" if re.search(r"\\pm(?!od)", part) else "+")]
    return [re.sub(r"(^|=)\s*\+", r"\1", part).strip() for part in signed]


def named(text: str) -> tuple[str, list[str]]:
    """("x", ["2+3", "5"]) of `x = 2+3 = 5`; the name may be empty."""
    sides = split(text, "=")
    names = [side for side in sides if len(sides) > 1 and NAME.fullmatch(squeeze(side))]
    values = [side for side in sides if side not in names]
    return squeeze(names[0]) if names else "", values or sides[-1:]


def as_point(text: str) -> str:
    r"""`(r,\theta) = (1, 2)` and `r=1, \theta=2` -> `(1, 2)`. Of `b=2, a=1` the order is clear."""
    sides, pairs = split(text, "="), [split(part, "=") for part in split(text)]
    if len(sides) == 2 and is_tuple(sides[0]) and is_tuple(sides[1]):
        return sides[1]
    names = {pair[0] for pair in pairs if len(pair) == 2 and NAME.fullmatch(squeeze(pair[0]))}
    if not len(names) == len(pairs) > 1:
        return text
    is_clear = "".join(sorted(names)) in "abcdefghijklmnopqrstuvwxyz"
    return "(%s)" % ", ".join(value for _, value in (sorted(pairs) if is_clear else pairs))


def same(gold: str, answer: str, compare) -> bool | None:
    """Whether two cleaned answers are equal; None if `compare` cannot read one of them."""
    same_words = (has_word(gold) or has_word(answer)) and words(gold) == words(answer)
    if same_words or squeeze(gold) == squeeze(answer):
        return True
    gold, answer = as_point(gold), as_point(answer)
    golds, answers = elements(gold), elements(answer)
    if len(golds) == len(answers) == 1:
        return same_element(golds[0], answers[0], compare)
    if RELATION.search(gold) or RELATION.search(answer):
        return (len(golds) == len(answers) or "infty" in gold + answer) and compare(gold, answer)
    if is_tuple(gold) != is_tuple(answer) and r"\{" not in (gold[:2], answer[:2]):  # 1, 2 is (1, 2)
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
    if len({each[0] for each in map(exact, answers) if each}) > 1 or "" in answers:
        return False  # 41 = 42
    unsolved = len(answers) > 1 and UNSOLVED.fullmatch(answers[0]) and (
        not other or golds == ["0"])
    is_value = len(golds) == 1 or not any(has_word(side, 1) for side in golds)
    alike = not (name and other) or name == other or "y" in (name, other) and "(" in name + other
    if is_value and alike and not unsolved:
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


# ----------------------------------------------------------------------------- 4. math-verify
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
    """A sympy object. Case matters. Units are gone: math-verify would remove the c of `5-5c`."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex
    parts, names = split(text), set(re.findall("[a-z]", MARKUP.sub("", text)))
    if len(parts) > 1 == len(names) and all(map(RELATION.search, parts)):  # x<1, x>3
        sets = [read(part).as_set() for part in parts]
        union, common = sympy.Union(*sets), sympy.Intersection(*sets)
        return common if union == sympy.S.Reals else union
    text = re.sub(r"(?<![A-Za-z\\])([EeI])(?=\s*_)", r"\\Xi_\1", text)  # no constant
    how = NormalizationConfig(malformed_operators=True, boxed="none")
    return latex2sympy(text, is_real=not should_treat_as_complex(text), normalization_config=how,
                       conversion_config=ConversionConfig(lowercase_symbols=False))


def equal_at_points(g, a, up_to_a_factor: bool = False) -> bool:
    """Whether values are equal at some points: exact ones in 50 digits, decimals in 6 decimals.

    Unlike simplify this takes milliseconds. Roots are compared at positive points, and are real.
    """
    import sympy
    names = sorted(g.free_symbols | a.free_symbols, key=str)
    sign = 1 if any(p.exp.is_integer is False for e in (g, a) for p in e.atoms(sympy.Pow)) else -1
    for k, scale in enumerate((1, 50, 100) if names else [1]):
        at = {name: sympy.Rational(scale * (1009 + 217 * i * k), 500 + 31 * i)
              * sign ** (k // 2 * (i + 1)) for i, name in enumerate(names)}
        at |= {name: sympy.I for name in names if name.name == "i"}
        there, here = g.subs(at).doit(), a.subs(at).doit()
        if up_to_a_factor:
            g, up_to_a_factor = g * here / there, False
        elif there.is_Rational and here.is_Rational:
            if there != here:
                return False
        else:
            digits = 4 if g.has(sympy.Float) or a.has(sympy.Float) else 50
            if not abs((there - here).evalf(60)) <= min(5e-7, abs(there.evalf(60)) / 10**digits):
                return False
    return True


# ------------------------------------------------------------------------------- 5. the verdict
def judge(gold: str, completion: str, style: str = "", compare=equal) -> tuple[str, str]:
    """(status, why). The status is correct, wrong, no_box, empty or unparseable."""
    answer = extract_answer(completion, style)
    if not answer:
        return ("empty", "an empty box") if answer == "" else ("no_box", "no closed box at the end")
    if squeeze(gold) == squeeze(answer):
        return "correct", "the same string"
    if max(len(gold), len(answer)) > MAX_CHARS:
        return "unparseable", f"longer than {MAX_CHARS} characters, so compared as a string"
    gold, answer = clean(gold), clean(answer)
    (letter, value), (chosen, other) = choice(gold), choice(answer)
    is_letter, agree = letter.isupper() and (chosen or not value), chosen.upper() == letter
    if is_letter and not (agree and value and other):
        return "correct" if agree else "wrong", "compared as a choice"
    gold, answer = value or gold, other or answer
    if not gold or not answer:
        return "unparseable", "nothing is left of it"
    right = same(gold, answer, compare)
    if style == "minerva" and exact(answer) and exact(gold) and exact(gold)[0]:  # was measured
        ratio = exact(answer)[0] / exact(gold)[0]
        right = right or any(abs(ratio * k - 1) * 10**4 <= 1 for k in (1, 100, Fraction(1, 100)))
    return {True: "correct", False: "wrong", None: "unparseable"}[right], f"{gold} and {answer}"


class Grader(ForkingGrader):
    def __init__(self, workers: int = WORKERS, **limits: float):
        super().__init__(f"{__file__}:judge", examples=EXAMPLES, workers=workers, **limits)
        self.known = {}  # (gold, box, style) -> verdict: many answers to a problem are equal

    def submit(self, key, problem, rollout, style: str = "") -> None:
        self.pending[key] = self.ask(problem.answer, rollout.text, style)

    def ask_worker(self, gold: str, completion: str, style: str = "") -> Verdict:
        key = gold, extract_answer(completion, style), style
        found = self.known.get(key) or super().ask_worker(gold, completion, style)
        if found.status not in NO_VERDICT:
            self.known[key] = found
        return found

    def check_golds(self, golds: list[str]) -> list[bool]:
        """Whether each gold can be read, so that it can be compared with another answer."""
        found = self.grade([(gold, r"\boxed{x_{0}}") for gold in golds])
        return [each.status in ("correct", "wrong") for each in found]


def open_grader(reward: str, threshold: float) -> ForkingGrader:
    return OwnReward(reward, threshold) if reward else Grader()


def main() -> None:
    parser = argparse.ArgumentParser(description="Shows how an answer is judged.")
    parser.add_argument("--gold", required=True, help="write a negative one as --gold='-1/2'")
    parser.add_argument("--completion", required=True, help="what the model wrote")
    parser.add_argument("--style", default="", choices=["", "minerva"], help="for rounded golds")
    gold, completion, style = question = tuple(vars(parser.parse_args()).values())
    answer = extract_answer(completion, style)
    print(f"box      {answer!r}")
    print(f"gold     {gold!r} -> {clean(gold)!r}\nanswer   {answer!r} -> {clean(answer or '')!r}")
    print("path    ", "strings and fractions" if decide(judge, question) else "math-verify")
    with Grader(workers=1) as grader:
        found, = grader.grade([question])
    print(f"verdict  {found.status}, reward {found.reward}: {shown(found.why, 600)}")


if __name__ == "__main__":
    main()
