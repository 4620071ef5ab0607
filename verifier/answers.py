r"""Finds the kind of a normalized answer: a number, words, a choice, named values, a list.

All functions work on strings only, in time linear in their length, because they run in the
trainer's process on text that a model wrote.
"""
import functools
import re
from fractions import Fraction

from verifier.spelling import TEXT, squeeze

# --------------------------------------------------------------------------------------- boxes
BOX = re.compile(r"""
    \\(?:boxed|fbox) (?![A-Za-z]) \s*
    (?: (\{)                                                       # a group
      | ( [-+]?\.?\d[^\s$\\]* | \\(?:d?frac|sqrt|pi)[^\s$]* ))     # \boxed 7, \boxed\frac12
    """, re.VERBOSE)
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # also matches escaped ones, to skip them


def closing_braces(text: str, start: int) -> dict[int, int]:
    """{position of each opening brace after `start`: position of its closing brace}."""
    opened, closing = [], {}
    for brace in BRACE.finditer(text, start):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def find_boxes(text: str) -> list[tuple[int, int, str | None]]:
    """(start, end, content) of the outermost boxes; content is None if a box is never closed.

    One pass with a stack, so 20,000 unclosed braces take linear time. Escaped ones do not count.
    """
    boxes = list(BOX.finditer(text))
    closing = closing_braces(text, boxes[0].start()) if boxes else {}
    outermost, inside = [], 0
    for box in boxes:
        if box.start() < inside:  # within the box before
            continue
        if not box[1]:  # \boxed 7 has no braces
            content, inside = box[2], box.end()
        elif box.start(1) in closing:
            end = closing[box.start(1)]
            content, inside = text[box.end():end], end + 1
        else:
            content, inside = None, box.end()
        outermost.append((box.start(), inside, content))
    return outermost


# ------------------------------------------------------------------------------------- numbers
DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
EXACT = re.compile(rf"""
    (-?)
    (?: (\d+(?=\\frac\{{\d+\}}\{{\d+\}}))?                                    # 5\frac{{1}}{{2}}
        \\frac\{{(-?{DECIMAL})\}}\{{(-?{DECIMAL})\}}
      | ({DECIMAL}) (?: /({DECIMAL}) )? (?: \\times10\^\{{(-?\d{{1,3}})\}} )? # 3/4, 6\times10^{{3}}
      | (\d*)\.(\d*) \\(?:overline|bar|dot)\{{(\d+)\}}                        # 0.1\overline{{6}}
    ) (\\%)?""", re.VERBOSE | re.ASCII)


@functools.lru_cache(4096)
def exact(text: str) -> tuple[Fraction, bool, bool] | None:
    r"""(value, has a decimal point, is a percentage) of `3/4`, `5\frac{1}{2}`, `0.\overline{6}`"""
    match = EXACT.fullmatch(squeeze(text))
    if not match or Fraction(match[4] or match[6] or 1) == 0:
        return None
    (sign, whole, top, bottom, number, divisor, power,
     integer, head, period, percent) = match.groups()
    if top:
        value = Fraction(whole or 0) + Fraction(top) / Fraction(bottom)
    elif period:
        tail = Fraction(head or 0) + Fraction(int(period), 10 ** len(period) - 1)
        value = Fraction(integer or 0) + tail / 10 ** len(head)
    else:
        value = Fraction(number) / Fraction(divisor or 1) * Fraction(10) ** int(power or 0)
    return (-value if sign else value), "." in (number or "") and not divisor, bool(percent)


def equal_numbers(gold: tuple, answer: tuple, style: str = "") -> bool:
    """Equal, exactly or (with a decimal point) once rounded to 6 decimals, as in math-verify.

    Rounding may not make tiny numbers or a whole gold equal to others. 10% is 10 or 0.1, but 0.5 is
    not 0.5%. "minerva" is Qwen's rule, a relative tolerance of 1e-4, also times or divided by 100.
    """
    (g, g_decimal, g_percent), (a, a_decimal, a_percent) = gold, answer
    hundredth, relative = Fraction(1, 100), abs(g) / 10 ** 4
    if style == "minerva":
        return any(abs(a * scale - g) <= relative for scale in (1, 100, hundredth))
    if g_percent == a_percent:
        scales = [1]
    elif g_percent:
        scales = [1, 100]
    elif abs(g) < 1:
        scales = [hundredth]
    else:
        scales = [1, hundredth]
    if any(a * scale == g for scale in scales):
        return True
    rounded = (g_decimal or a_decimal) and g.denominator > 1
    return rounded and any(round(a * scale, 6) == round(g, 6) and abs(a * scale - g) <= relative
                           for scale in scales)


# --------------------------------------------------------------------------- words and choices
CONNECTIVE = re.compile(r"\\l(?:and|or)(?![A-Za-z])")
ARTICLE = re.compile(r"^(?:(?:an?|the) (?=[a-z]{2})|option |choice )")  # but "a b" is two letters
BRACKETED = re.compile(r"^\((.*)\)$")
WORD = re.compile(r"[A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff '\-]*\.?")
LOOKS_LIKE_WORDS = re.compile(r"\\text|[A-Za-z]{3}|^(?i:no|up)$|[\u4e00-\u9fff]")
SURELY_WORDS = re.compile(r"\\(?:text|land|lor)|[A-Za-z]{4}|[A-Za-z]{2} +[A-Za-z]{2}|^[Nn]o$"
                          r"|[\u4e00-\u9fff]")
MARKUP = re.compile(r"\\(?:begin|end)\{\w*\}|\\[A-Za-z]+")
NONE = re.compile(r"(?i)n/?a|nan|tbd|[-\d.,/]+( +[a-z]{2,3}|[ghlms])|.*\\sqrt.*\} [a-z]")  # 3h
STATEMENT = re.compile(r"\\(?:neg|implies|iff|forall|exists)(?![A-Za-z])|\([^()=]*\\l(?:and|or)")
A_CHOICE = re.compile(r"(?:\\text\{)?\(?[A-J]\)?\}?")
CHOICE_AND_VALUE = re.compile(r"""
    (?: (?: \\text\{\s*\( | \( ) ([A-J]) \)[.:]?\s*\}?[.:]?\s*         # \text{(C)} or (C)
      | \\text\{\s*([A-J]) (?: [.:)]\s*\} | \s*\}[.:)] | \s*\}(?=\s) )\s* # \text{C.}, \text{C} 42
      | ([A-J]) [.:)]\s )                                             # C. 42
    (?! \\(?:cdot|times|div|pm|mp|text|land|lor)(?![A-Za-z]) )       # \text{E} \times 2: a product
    ( [\d\\].* | (?<=\s)-.+ )                                        # 42
    """, re.VERBOSE)
CHOICE_AND_TEXT = re.compile(r"""
    (?:\\text\{)?\s* (?:(?i:option|choice)\s+)?                    # option (C)
    (?: \(([A-Ja-j])\) | ([A-Ja-j])[.:)] | ([A-Ja-j])\}?$ ) (?: [\s}].* )?
    """, re.VERBOSE)  # (C) a cat, \text{C. a cat}, c
A_MARK = re.compile(r"\(?\b[A-Ja-j][):.]|\\l(?:and|or)")


def words(text: str) -> str | None:
    r"""The words of a textual answer in lower case, sorted if there are several; None for others.

    `\text{(C)}`, `(C)` and `C.` are "c"; `\text{an ellipse}` is "ellipse"; `p \lor q` is "p|q".
    Words outside \text need three letters, because `AB` and `ab` may be products.
    """
    textual = LOOKS_LIKE_WORDS.search(CONNECTIVE.sub("", text))
    letter = re.compile("[A-Za-z]" if CONNECTIVE.search(text) else "[A-J]")
    alternatives = []
    for alternative in TEXT.sub(r" \1 ", text).split("\\lor"):
        parts = [BRACKETED.sub(r"\1", part.strip(" .:"))
                 for part in CONNECTIVE.sub(",", alternative).split(",")]
        if not all((WORD if textual else letter).fullmatch(part) for part in parts):
            return None
        parts = [ARTICLE.sub("", " ".join(part.lower().split())) for part in parts]
        alternatives.append(",".join(sorted(parts)))
    return "|".join(sorted(alternatives))


def take_choice(gold: str, answer: str) -> str:
    r"""The letter or the value of `\textbf{(C)}\ 42`, whichever kind the gold is."""
    if A_CHOICE.fullmatch(gold):
        chosen = CHOICE_AND_TEXT.fullmatch(answer) or CHOICE_AND_VALUE.match(answer)
        several = A_MARK.findall(answer)[1:] or CONNECTIVE.search(answer)
        return next(filter(None, chosen.groups())).upper() if chosen and not several else answer
    both = CHOICE_AND_VALUE.match(answer)
    return both[4] if both else answer


# ----------------------------------------------------------------------------- lists and relations
PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-z])")
NO_SIGN = re.compile(r"(^|=|\\ne)\s*\+")
RELATION = re.compile(r"[<>]|\\(?:[lg]e|ne)(?![A-Za-z])")
SET_BRACES = re.compile(r"^\\\{(?!\s*\\emptyset)((?:(?!\\[{}]).)+)\\\}$")  # a set of sets stays
INNER = r"(?:[^()\[\]]|\([^()]*\)|\[[^\[\]]*\])*"
TUPLE = re.compile(rf"\({INNER},{INNER}\)")


def split_top(text: str, separators: str) -> list[str]:
    """Split at separators outside all brackets, but not at the `=` of `<=`, `>=`, `:=`."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character in separators and depth == 0 and text[max(i - 1, 0)] not in "<>:=":
            parts.append(text[start:i].strip())
            start = i + 1
    return parts + [text[start:].strip()]


def is_list(text: str) -> bool:
    """Whether a text lists values. An interval or a union of intervals does not."""
    elements = split_top(CONNECTIVE.sub(",", without_set_braces(text)), ",;")
    return len(elements) > 1 and not any(each.startswith(("(", "[", "]")) for each in elements)


def without_set_braces(text: str) -> str:
    r"""`\{2, 2, 1\}` -> `2, 1`"""
    match = SET_BRACES.match(text)
    return ", ".join(dict.fromkeys(split_top(match[1], ",;"))) if match else text


def expand_signs(text: str) -> str:
    r"""`\frac{-1\pm\sqrt5}{2}` -> both values as a list, as math-verify does only between terms."""
    if not PLUS_MINUS.search(text):
        return text
    elements = []
    for element in split_top(text, ",;"):
        upper = PLUS_MINUS.sub(lambda m: "+" if m[1] == "pm" else "-", element)
        lower = PLUS_MINUS.sub(lambda m: "-" if m[1] == "pm" else "+", element)
        elements += dict.fromkeys(NO_SIGN.sub(r"\1 ", each).strip() for each in (upper, lower))
    return ", ".join(elements)


DOMAIN = re.compile(r"""
    (?: [\s,;:(] | \\text\{[^{}]*\} | (?<![A-Za-z])(?:for|where|with|any|all)(?![A-Za-z]) )+
    ([a-z]) \s* (?: \\in\s*(\\mathbb\{[A-Z]\}(?:[\^_]\s*(?:\{[^{}]*\}|\S))?)
                  | (?:\\text\{)?\s*is\ an(?:y)?\ integer\s*\}? ) \s* \)? \s*$
    """, re.VERBOSE)
LETTER_OR_COMMAND = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


def rename(text: str, old: str, new: str) -> str:
    """`text` with another letter for a variable; "" if this letter already has a meaning there."""
    is_other = old != new and new in LETTER_OR_COMMAND.findall(text)
    return "" if is_other else LETTER_OR_COMMAND.sub(lambda m: new if m[0] == old else m[0], text)


def take_domain(gold: str, answer: str) -> tuple[str, str] | None:
    r"""Both without `k \in \mathbb{Z}` and with the same parameter letter; None if domains differ.

    A domain that only one of the two mentions makes no difference.
    """
    g, a = DOMAIN.search(gold), DOMAIN.search(answer)
    left, right = (text[:match.start()] if match else text
                   for text, match in ((gold, g), (answer, a)))
    if not (g and a):
        return left, right
    domains = {squeeze(match[2] or "\\mathbb{Z}") for match in (g, a)}
    return (left, rename(right, a[1], g[1]) or right) if len(domains) == 1 else None


# ---------------------------------------------------------------------------- names and equations
# `x=5` names a value, `2+3=5` states a number twice, and the equation `x+y=5` has no value. The
# first two are called claims, which are tuples (name or "", the sides that are values).

WRAPPED = re.compile(r"""
    \\(?:text|mathbb|overline|vec|hat|bar|widehat|angle|triangle|det)(?![A-Za-z]) | m(?=\s*\\angle)
    | [\s{}|\[\]]""", re.VERBOSE)
ARGUMENT = r"\((?:[^()]|\([^()]*\))*\)"
GREEK = r"\\(?i:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|(?:var)?phi|omega)"
NAME = rf"(?:[A-Za-z]|[A-Z]{{2,4}}|{GREEK})'*(?:_\w+)?(?:\^-1)?(?:{ARGUMENT})?"
PLAIN_NAME = re.compile(rf"{NAME}(?::{NAME})*|[A-Za-z]{{4,}}")  # x, f(2), AB, V_1:V_2, Area
IN_WORDS = re.compile(r"\s*\\text\{[^{}]*[A-Za-z]{3}[^{}]*\}[A-Z\s]*")
PRODUCT = re.compile(r"\s*[a-z](?:\s*[a-z]){1,2}\s*")
INDEX_OR_ARGUMENT = re.compile(rf"_\w+|\^-1|(?<=[A-Za-z']){ARGUMENT}")
OF_A_VARIABLE = re.compile(r"([A-Za-z]'*)(?:\(([a-z])\)|_([a-z]))")  # f(x), a_n
CLAIM = re.compile(r"\d|[<>,]|\\(?:le|ge|ne|approx|infty|pi)(?![A-Za-z])")
OTHER_VALUE = re.compile(r"""(?i)                                     # 5 is not what -x=5 names
    ^\s*- | \b (?: not | negative | minus | half | twice | double | triple | dozen | hundred
               | thousand | million | squared? | cubed? | root | inverse | reciprocal ) s? \b
    """, re.VERBOSE)


def name_of(text: str, computed: bool = False) -> str:
    r"""The text if it is a name such as `x`, `f(2)`, `\angle ABC`; if `computed`, also `m+n`.

    "" for other texts, because `xy` is a product, and `2x` or `x^2` must be solved first.
    """
    bare = WRAPPED.sub("", text)
    without = INDEX_OR_ARGUMENT.sub("", bare)
    if OTHER_VALUE.search(text):
        return ""
    if IN_WORDS.fullmatch(text) or PLAIN_NAME.fullmatch(bare):
        return bare
    is_formula = computed and not CLAIM.search(without) and not PRODUCT.fullmatch(text)
    return bare if is_formula and re.search("[A-Za-z]", without) else ""


def has_letters(text: str) -> bool:
    return bool(re.search("[A-Za-z]", MARKUP.sub("", text)))


def claim_of(element: str, lenient: bool) -> tuple[str, list[str]] | None:
    r"""`x=2+3=5` -> ("x", ["2+3", "5"]); None for an equation that no value replaces.

    `(y,x)=(2,1)` is sorted by name. If `lenient`, the name may be computed (`m+n=5`, but no name
    has the value 0: `x+y=0` is an equation), and all sides of another equation are values.
    """
    sides = split_top(element, "=")
    points = [split_top(side[1:-1], ",") for side in sides if TUPLE.fullmatch(side)]
    if len(points) == len(sides) == 2 and len(points[0]) == len(points[1]):
        names, values = zip(*sorted(zip(map(name_of, points[0]), points[1])))
        return f"({','.join(names)})", [f"({', '.join(values)})"]
    computed = lenient and (exact(sides[-1]) or [1])[0] != 0
    names = [name_of(side, computed and i == 0) for i, side in enumerate(sides)]
    values = [side for side, name in zip(sides, names) if not name] or sides[-1:]
    named = "=".join(sorted(name for side, name in zip(sides, names) if side not in values))
    if len(named) == 1 and any(named in MARKUP.sub("", value) for value in values):
        named, values = "", sides  # x=x+1 is a claim about x
    if named and not has_letters(values[-1]) and values[-1] != "0":  # A = bh = 10
        values = [value for value in values if not has_letters(value)]
    is_value = named or lenient or len(sides) == 1 or not any(map(has_letters, sides))
    return (named, values) if is_value else None


def solutions(text: str, lenient: bool) -> list[list[tuple[str, list[str]]]] | None:
    r"""The claims of each alternative: `x=1, y=2 \lor x=3, y=4` has two. None for equations."""
    cases, name = [], ""
    for alternative in text.split("\\lor"):
        cases.append([])
        for element in split_top(CONNECTIVE.sub(",", alternative), ",;"):
            claim = claim_of(element, lenient)
            if claim is None:
                return None
            name = claim[0] or name  # x = 2, 3
            cases[-1].append((name, claim[1]))
    names = {tuple(sorted({name for name, _ in claims})) for claims in cases}
    if len(names) > 1:
        return None
    return cases if len(*names) > 1 else [sum(cases, [])]  # x=1 or x=2: one list
