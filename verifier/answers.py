r"""What kind of answer a normalized string is: a number, words, a labelled value, a choice.

Everything here looks at strings only, in time linear in their length, because it runs in the
trainer's own process on what a model wrote.
"""
import functools
import re
from fractions import Fraction

from verifier.spelling import (CURRENCY, FUNCTIONS, MONTHS, SYMBOLS, plain_characters, singular,
                               spell, squeeze)

# --------------------------------------------------------------------------------------- boxes

BOX = re.compile(r"""
    \\(?:boxed|fbox) (?![A-Za-z]) \s*
    (?: (\{)                                                       # a group
      | ( [-+]?\.?\d[^\s$\\]* | \\(?:d?frac|sqrt|pi)[^\s$]* ))     # \boxed 7, \boxed\frac12
    """, re.VERBOSE)
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped one, to skip it
# What may stand between the boxes of one list: "x=\boxed{1}, y=\boxed{2}", "\boxed1 and \boxed2"
BETWEEN_BOXES = re.compile(r"""
    (?: [\s,;.&$~*…] | \\[,;:!\ ()\[\]\\] | \\q?quad | \\[lc]?dots
      | \\text\{\s*,?\s*(?:and|or)?\s*\}
      | \b and \b | \b or \b
      | \(?\b[a-z\d]\)                                             # (a)  b)  2)
      | [A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?\s*= )*               # x=  x_1=  f(x)=
    """, re.VERBOSE)
LAST_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+|\s*\\times\s*10\^\{?-?\d+\}?)?")


def closing_braces(text: str, start: int) -> dict[int, int]:
    """Positions: every opening brace after `start` -> the brace that closes it."""
    opened, closing = [], {}
    for brace in BRACE.finditer(text, start):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def find_boxes(text: str) -> list[tuple[int, int, str | None]]:
    """(start, end, content) of the outermost boxes; content is None when a box is never closed.

    One pass with a stack, so that 20,000 open braces take linear time. Escaped braces do not count.
    """
    boxes = list(BOX.finditer(text))
    closing = closing_braces(text, boxes[0].start()) if boxes else {}
    found, inside = [], 0
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
        found.append((box.start(), inside, content))
    return found


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
    r"""(value, has a decimal point, is a percentage) of `3/4`, `5\frac12`, `0.1\overline{6}`..."""
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

    Rounding must not make tiny numbers or a whole gold equal to others. 10% is 10 or 0.1, but 0.5
    is not 0.5%. "minerva" is Qwen's rule: within 1e-4 relatively, also times or divided by 100.
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


# --------------------------------------------------------------------------------------- units

LETTERS = "msghLNJWVA"
SQUARED = r"(?:(?<=m)(?:\^\{?[23]\}?|[23]))?"  # m^2, m2
UNIT_OF_ONE_LETTER = re.compile(rf"(?<=\d)(?:\s[{LETTERS}lFC]|m(?=[\^23])){SQUARED}$")
# In a gold K is kelvin. In an answer it may be a thousand: data sets write thousands out.
UNIT_OF_GOLD = rf"[{LETTERS}lFCKTH]{SQUARED}"
UNIT_OF_ELEMENT = re.compile(rf"(?<=[\d}}])\s*{UNIT_OF_GOLD}\s*(?=,|$)")
SCIENTIFIC = r"[-+]?\d[\d.,/]*(?:\s*(?:\\times|x)\s*10\^\{?-?\d+\}?)?"
FRACTION = r"-?\\[dt]?frac\s*(?:\d|\{\d+\})\s*(?:\d|\{\d+\})"
LABEL = r"(?:[A-Za-z]\w*\s*=|[Aa]ns(?:wer)?\s*:)"
QUANTITY = rf"(?:{LABEL}\s*)?(?:{SCIENTIFIC}|{FRACTION})(?:\\[,; ]|[~\s])+{UNIT_OF_GOLD}"
QUANTITIES = re.compile(rf"\s*{QUANTITY}(?:\s*,\s*{QUANTITY})*\s*\.?\s*")

# One name for each unit: `5 hr` is `5 hours`. Those that are products of others are written out.
NAMES = """
m meter metre 米 | cm centimeter centimetre 厘米 | mm millimeter millimetre 毫米
km kilometer kilometre 千米 公里 | in inch | ft foot feet | yd yard | mi mile
g gram 克 | kg kilogram 千克 公斤 | mg milligram | t ton tonne 吨 | lb lbs pound GBP £ | oz ounce
L l liter litre 升 | mL ml milliliter millilitre 毫升 | gal gallon
s sec secs second 秒 | min mins minute 分钟 | h hr hrs hour 小时 时
day 天 日 | week 周 | month 月 | yr yrs year 年 | erg ergs
N newton | J joule | W watt | V volt | A amp ampere | K kelvin | C celsius | F fahrenheit
degree 度 | rad radian | percent
$ dollar US USD | cent ¢ | € euro EUR | ₹ rupee INR Rs | ¥ yuan yen CNY RMB JPY 元 块
""".replace("\n", "|").split("|")
NAME = {name: names.split()[0] for names in NAMES for name in names.split()}
PRODUCTS = {"mph": "mi/h", "kWh": "kW h", "mL": "cm^3", "N": "kg m/s^2", "J": "N m", "W": "J/s",
            "Pa": "N/m^2", "Hz": "/s",
            "平方米": "m^2", "平方厘米": "cm^2", "立方米": "m^3", "立方厘米": "cm^3"}
OF_ONE_KIND = [set(kind.split()) for kind in
               ("yr month week day h min s", "mi yd ft in", "km m cm mm", "lb oz", "kg g mg",
                "L mL", "$ cent")]  # those of `5 ft 6 in`
PREFIXES = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
AMOUNT = r"\d(?:[\d.,]|\\!|\{,\})*"
MONEY_FIRST = re.compile(rf"""
    (?: (?:US)?\\\$ | ^\s*(?:US)?\$ | ([€£¥¢₹]) | (?:\\text\{{\s*)? \b({CURRENCY})\s*\}}? )
    \s* ({AMOUNT}) (?=\s*(?:,\s|;|\.?\s*$))""", re.VERBOSE)
MONEY_LAST = re.compile(r"(?<=\d)\s*(?:\\(\$)|([€£¥¢₹])|(\$)$)")
DEGREES = re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])")
UPRIGHT = re.compile(r"\\text\{([^{}]*)\}")
VALUE_AND_UNIT = re.compile(r"""
    ( (?: [^A-Za-z\\$€£¥¢₹\u4e00-\u9fff] | \\(?:frac|sqrt|pi|times|cdot)(?![A-Za-z]) )* ) (.*)
    """, re.VERBOSE)
PIECE = re.compile(r"""
    \s* (?: ([A-Za-z]+|[\u4e00-\u9fff]+|[$€£¥¢₹]) (?: \s*\^\s*\{?\s*(-?\d)\s*\}? | ([23])(?!\d) )?
          | ([/.*()]|\\cdot) ) \s*""", re.VERBOSE)
NUMBER_AND_UNIT = re.compile(r"\s*([-+]?\d[\d./]*)\s*([A-Za-z]+)\.?\s*")


def without_letter_unit(text: str) -> str:
    """`5 m` -> `5`. Only if the gold is a number: otherwise the letter may be a variable."""
    return UNIT_OF_ONE_LETTER.sub("", text)


def without_unit_of_gold(written: str, gold: str, answer: str) -> tuple[str, str]:
    """Gold and answer without units, if the gold was `written` as `5 m` or `5 m, 10 m`.

    The space tells: `5m` may be five times m.
    """
    if not QUANTITIES.fullmatch(plain_characters(written)):
        return gold, answer
    return UNIT_OF_ELEMENT.sub("", gold), UNIT_OF_ELEMENT.sub("", answer)


def with_units_in_text(text: str) -> str:
    r"""The one spelling of `text`, but with its units: `\$5` is `5 $`, and `20^\circ` `20 degree`.

    Without \text and without labels.
    """
    text = plain_characters(text)
    text = MONEY_FIRST.sub(lambda m: f"{m[3]}\\text{{ {word_of_money(m[1] or m[2])}}}", text)
    text = MONEY_LAST.sub(lambda m: f"\\text{{ {word_of_money(m[2])}}}", text)
    text = spell(DEGREES.sub(r"\\text{ degree }", text))
    return UPRIGHT.sub(r" \1 ", text).replace(r"\%", " percent ")


def word_of_money(sign: str | None) -> str:
    """A word for a sign, because the spelling has no currencies."""
    words = {"€": "euro", "£": "pound", "¥": "yuan", "¢": "cent", "₹": "rupee"}
    return words.get(sign, (sign or "dollar").rstrip("."))


def name_of_unit(word: str) -> str | None:
    if word in NAME or word in SYMBOLS or word in {"T", "H"}:
        return NAME.get(word, word)
    known = [NAME[each] for each in singular(word) if each in NAME and len(word) > 2]
    return known[0] if known else None  # but M is no meter


def powers_of_units(text: str) -> dict[str, int] | None:
    """`m/s^2` -> {"m": 1, "s": -2}; None if it holds anything but units.

    After a slash all is below it: J/kg K is J/(kg K).
    """
    powers, sign, factor, last, end = {}, 1, 1, None, 0
    while end < len(text):
        piece = PIECE.match(text, end)
        if not piece:
            return None
        end, word = piece.end(), piece[1]
        if piece[4] == "/" or word == "per":
            sign = -1
        elif word in {"squared", "cubed"} and last:
            powers[last] *= PREFIXES[word]
        elif word in PREFIXES:
            factor = PREFIXES[word]
        elif word:
            parts = powers_of_word(word)
            if parts is None:
                return None
            for last, power in parts.items():
                power *= sign * factor * int(piece[2] or piece[3] or 1)
                powers[last] = powers.get(last, 0) + power
            factor = 1
    if len(powers) > 1:
        powers.pop("degree", None)  # degrees Celsius
    return powers or None


def powers_of_word(word: str) -> dict[str, int] | None:
    name = word if word in PRODUCTS else name_of_unit(word)
    if name in PRODUCTS:
        return powers_of_units(PRODUCTS[name])
    return {name: 1} if name else None


def quantities(text: str) -> tuple[list[tuple[str, dict | None]], bool]:
    """((value, powers of its units or None) of each element, is one mixed as `5 ft 6 in`?)."""
    found, is_mixed = [], False
    for element in split_top(with_units_in_text(text), ",;"):
        element = split_top(element, "=")[-1].rstrip(" .")
        mixed = mixed_quantity(element)
        is_mixed = is_mixed or bool(mixed)
        value, unit = VALUE_AND_UNIT.match(element).groups()
        has_value = DIGIT.search(value) and value.rstrip()[-1:] not in set("^_+-/({")
        found += mixed or [(value, powers_of_units(unit) if has_value else None)]
    return found, is_mixed


def mixed_quantity(element: str) -> list[tuple[str, dict]]:
    """`5 ft 6 in` -> both quantities; [] unless there are two, of different units of one kind."""
    found, end = [], 0
    while end < len(element):
        pair = NUMBER_AND_UNIT.match(element, end)
        name = name_of_unit(pair[2]) if pair else None
        if not name:
            return []
        found.append((pair[1], {name: 1}))
        end = pair.end()
    names = {name for _, unit in found for name in unit}
    is_one = len(found) > 1 and len(names) == len(found)
    return found if is_one and any(names <= kind for kind in OF_ONE_KIND) else []


def compare_units(gold: str, answer: str) -> tuple[str, str] | None:
    """Where both have units, other units are another answer; None if the numbers must tell.

    `5 ft 6 in` is compared quantity by quantity: 6 ft 5 in has the same product.
    """
    (g, g_mixed), (a, a_mixed) = quantities(gold), quantities(answer)
    if g_mixed or a_mixed:
        same = pairs(g) == pairs(a)
        return "correct" if same else "wrong", "compared number by number and unit by unit"
    units = [{key(unit) for _, unit in each if unit} for each in (g, a)]
    if not all(units):
        return None
    degrees = key({"degree": 1})
    if units[0] != units[1] and not any(
            one == {degrees} and other <= {key({"C": 1}), key({"F": 1})}
            for one, other in (units, units[::-1])):
        return "wrong", "another unit"
    several = len(units[0]) > 1 and all(unit for _, unit in g + a)
    return ("wrong", "another unit") if several and pairs(g) != pairs(a) else None


def key(unit: dict | None) -> tuple:
    return tuple(sorted((unit or {}).items()))


def pairs(found: list[tuple[str, dict | None]]) -> list[tuple[str, tuple]]:
    """(number, unit) of each quantity, in one order and as far as possible in one notation."""
    return sorted((str((exact(value.strip()) or [squeeze(value)])[0]), key(unit))
                  for value, unit in found)


# --------------------------------------------------------------------------- words and choices

TEXT = re.compile(r"\\text\{([^{}]*)\}")
ARTICLE = re.compile(r"^(?:(?:an?|the) (?=[a-z]{2})|option |choice )")  # but "a b" is two letters
BRACKETED = re.compile(r"^\((.*)\)$")
MONTH = re.compile(rf"(?i)(?<![A-Za-z])(?:{MONTHS})(?![A-Za-z])")
COMMAND, DIGIT = re.compile(r"\\[A-Za-z]+"), re.compile(r"\d")
WORD_OR_NUMBER = re.compile(r"[a-z]+|\d+")
WORD, LETTER = re.compile(r"[A-Za-z][A-Za-z '\-]*\.?"), re.compile("[A-J]")
LOOKS_LIKE_WORDS = re.compile(r"[A-Za-z]{3}|^[Nn]o$")
SHORT_WORD = re.compile(r"[A-Za-z]?[a-z]{1,2}")
LETTERS_OF_CHOICES = re.compile(r"[A-J](?:\s*,?\s*[A-J])+")
SURELY_WORDS = re.compile(r"[A-Za-z]{4}|[A-Za-z]{2} +[A-Za-z]{2}")
MARKUP = re.compile(r"\\(?:begin|end)\{\w*\}|\\[A-Za-z]+")
NONE = re.compile(r"(?i)n/?a|nan|tbd|[-\d.,/]+ +[a-z]{2,3}|.*\\sqrt.*\} [a-z]")  # 5 pcs, \sqrt{2} m
A_CHOICE = re.compile(r"(?:\\text\{)?\(?[A-J]\)?\}?")
CHOICE_AND_VALUE = re.compile(r"""
    (?: (?: \\text\{\s*\( | \( ) ([A-J]) \)[.:]?\s*\}?[.:]?\s*         # \text{(C)} or (C)
      | \\text\{\s*([A-J]) (?: [.:)]\s*\} | \s*\}[.:)] | \s*\}(?=\s) )\s* # \text{C.}, \text{C} 42
      | ([A-J]) [.:)]\s                                               # C. 42
    )
    (?! \\(?:cdot|times|div|pm|mp|text)(?![A-Za-z]) )        # \text{E} \times 2 is a product
    ( [\d\\].* | (?<=\s)-.+ )                                        # 42
    """, re.VERBOSE)
CHOICE_AND_TEXT = re.compile(r"""
    (?:\\text\{)?\s* (?:(?i:option|choice)\s+)?                    # option (C)
    (?: \(([A-Ja-j])\) | ([A-Ja-j])[.:)] | ([A-Ja-j])\}?$ ) (?: [\s}].* )?
    """, re.VERBOSE)  # (C) a cat, \text{C. a cat}, c
A_MARK = re.compile(r"\(?\b[A-Ja-j][):.]")


def words(text: str) -> str | None:
    r"""The lower-case words of a textual answer, sorted if they form a list; None for mathematics.

    `\text{(C)}`, `(C)` and `C.` are "c"; `\text{an ellipse}` is "ellipse". Words outside \text need
    three letters, since `AB` and `ab` may be products.
    """
    plain = TEXT.sub(lambda m: " " + m[1].replace("(", " ").replace(")", " ") + " ", text)
    textual = "\\text" in text or LOOKS_LIKE_WORDS.search(plain)
    parts = []
    for part in plain.split(","):
        part = BRACKETED.sub(r"\1", part.strip(" .:"))
        if not (WORD if textual else LETTER).fullmatch(part):
            return None
        parts.append(ARTICLE.sub("", " ".join(part.lower().split())))
    return ",".join(sorted(parts))


def date(text: str) -> list[str] | None:
    """The words and numbers of a date in any order: `May 5, 2004`, `5th of May 2004`."""
    if not (MONTH.search(text) and DIGIT.search(text)):
        return None
    return sorted(set(WORD_OR_NUMBER.findall(COMMAND.sub(" ", text).lower())) - {"of", "the", "th"})


def is_surely_text(text: str) -> bool:
    r"""`\text{odd}` and `undefined`, but not `AB`."""
    return "\\text" in text or bool(SURELY_WORDS.search(text))


def is_anagram(gold: str, answer: str) -> bool:
    """Has `answer` the letters of the word `gold` in another order, as `act` for `cat`?

    `ba` is the same product as `ab`, and `am` as `ma`. Read as a word is what has an o, which names
    no variable, and of three letters what has a vowel and is not in the order of the alphabet.
    """
    word, other = gold.lower(), answer.lower()
    if not SHORT_WORD.fullmatch(gold) or word == other or sorted(word) != sorted(other):
        return False
    in_order = sorted(word) == list(word)
    return "o" in word or len(word) == 3 and not in_order and bool({*word} & {*"aeiu"})


def same_choices(gold: str, answer: str) -> bool:
    """`AC` for `A, C`; both with or without commas are compared elsewhere."""
    plain = [TEXT.sub(r"\1", text) for text in (gold, answer)]
    if not all(map(LETTERS_OF_CHOICES.fullmatch, plain)):
        return False
    one, other = (sorted(LETTER.findall(text)) for text in plain)
    return one == other and ("," in gold) != ("," in answer)


def is_one_value(gold: str) -> bool:
    """Whether a gold is a number or a formula. `about 5`, `n/a` and `2,5` (a list) are not."""
    return not (SURELY_WORDS.search(MARKUP.sub(" ", gold)) or is_list(gold) or NONE.fullmatch(gold))


def take_stated(gold: str, answer: str) -> tuple[str, str]:
    """A gold `(A) 42` is met by `A`, by `42` and by both."""
    both, stated = CHOICE_AND_VALUE.match(gold), CHOICE_AND_VALUE.match(answer)
    if not both or len(A_MARK.findall(gold)) > 1:
        return gold, answer
    letter, other = (next(filter(None, each.groups())) if each else None for each in (both, stated))
    if A_CHOICE.fullmatch(answer) or stated and letter != other:
        return letter, answer
    return both[4], answer


def take_choice(gold: str, answer: str) -> str:
    r"""`\textbf{(C)}\ 42` states a letter and a value: the one that the gold asks for."""
    if A_CHOICE.fullmatch(gold):
        chosen = CHOICE_AND_TEXT.fullmatch(answer) or CHOICE_AND_VALUE.match(answer)
        several = len(A_MARK.findall(answer)) > 1
        return next(filter(None, chosen.groups())).upper() if chosen and not several else answer
    both = CHOICE_AND_VALUE.match(answer)
    return both[4] if both else answer


# ---------------------------------------------------------------------------- labels and lists

COMMAND_IN_NAME = re.compile(r"""
    _\{[^{}]*\} | _\w | \\text\{[^{}]*\} | \^\{?-1\}?                # x_1, \text{Area}, f^{-1}
    | \\(?:angle|triangle|vec|overline|hat|mathbb)(?![A-Za-z])""", re.VERBOSE)
ARGUMENT = re.compile(r"(?<=[A-Za-z'])\s*\([^()]*\)")
CLAIM = re.compile(r"\d|[<>]|\\(?:le|ge|ne|approx|infty|pi)(?![A-Za-z])")
OTHER_VALUE = re.compile(r"""(?i)                                     # 5 is not what -x=5 names
    ^\s*- | \b (?: not | negative | minus | half | twice | double | triple | dozen | hundred
               | thousand | million | squared? | cubed? | root | inverse | reciprocal ) s? \b
    """, re.VERBOSE)
COMPUTED = re.compile(rf"[-+*/^]|\\(?:cdot|times|frac|div|lim|sum|int|{FUNCTIONS})(?![A-Za-z])")
INDEX = re.compile(r"_\{?\w+\}?")
PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-z])")
SET = re.compile(r"\\\{\s*[^(\s]")
TUPLE = re.compile(r"\([^(),]*,[^(),]*\)")
INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])")
SET_BRACES = re.compile(r"^\\\{((?:(?!\\[{}]).)+)\\\}$")
MODULUS = re.compile(r"\s*\\pmod\{\w+\}")
UNKNOWN = re.compile(r"^\s*[A-Za-z]\s*=\s*")


def split_top(text: str, separators: str) -> list[str]:
    """Split at separators outside all brackets, but not at the `=` of `<=`, `>=`, `!=`, `:=`."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character in separators and depth == 0 and text[max(i - 1, 0)] not in "<>!:=":
            parts.append(text[start:i].strip())
            start = i + 1
    return parts + [text[start:].strip()]


def is_label(text: str, plain: bool) -> bool:
    r"""A name such as `x`, `f(2)`, `\angle ABC`; unless `plain`, also `m+n`. Never a number."""
    if OTHER_VALUE.search(text):
        return False
    text = ARGUMENT.sub("", COMMAND_IN_NAME.sub("n", text))
    if CLAIM.search(text) or plain and COMPUTED.search(text):
        return False
    return any(character.isascii() and character.isalpha() for character in text)


def names_its_value(name: str, value: str) -> bool:
    """`x=5`, but not `x=x+1`: that is a claim about x."""
    return len(name) > 1 or name not in COMMAND.sub("", value)


def unlabel(text: str) -> tuple[list[str], list[str]] | None:
    """`x=1, y=2` -> (["x", "y"], ["1", "2"]); None unless each label is one plain name."""
    names, values = [], []
    for element in split_top(text, ",;"):
        *left, value = split_top(element, "=")
        if len(left) > 1:
            return None
        if left and not (is_label(left[0], plain=True) and names_its_value(left[0], value)):
            return None
        names += [squeeze(INDEX.sub("", name)) for name in left]
        values.append(value)
    return names, values


def as_tuple_if_named(names: list[str], values: list[str]) -> str:
    """`x=1, y=2` is the point (1, 2); `x=1, x=2` are two solutions."""
    listed = ", ".join(values)
    return f"({listed})" if len(set(names)) > 1 else listed


def take_value(gold: str, answer: str) -> list[str]:
    r"""The parts of `answer` that must equal a gold without `=`.

    math-verify looks only at the last part: it would take `1=2=42` for 42, and `x^2-1=0` for 0.
    """
    labelled = unlabel(answer)
    if labelled and labelled[0] and len(labelled[1]) > 1:  # x=1, y=2 for (1,2)
        names, values = labelled
        return [as_tuple_if_named(names, values) if gold.startswith("(") else ", ".join(values)]
    parts = split_top(answer, "=")
    number = exact(gold)
    is_zero = number is not None and number[0] == 0
    kept = [part for part in parts[:-1]
            if not (is_label(part, plain=is_zero) and names_its_value(part, parts[-1]))]
    if kept and is_label(parts[-1], plain=True):  # 5 = x
        return kept
    return kept + parts[-1:]


def is_chain(text: str) -> bool:
    return any(len(split_top(element, "=")) > 2 for element in split_top(text, ",;"))


def equations_of(text: str) -> str:
    """`x=y=2` -> `x=y, x=2`: math-verify takes a chain for its last equation."""
    equations = []
    for element in split_top(text, ",;"):
        first, *others = split_top(element, "=")
        equations += [f"{first}={other}" for other in others] or [first]
    return ", ".join(equations)


def take_labels_off(gold: str, answer: str) -> tuple[str, list[str]]:
    """(gold, parts of the answer that must all equal it), both without labels that agree."""
    if "=" not in gold:
        return gold, take_value(gold, answer)
    if is_chain(gold):
        return equations_of(gold), [equations_of(answer)]
    if is_chain(answer):  # x=1=2=5 is x=1, x=2 and x=5
        equations = split_top(equations_of(answer), ",;")
        taken = [take_labels_off(gold, equation) for equation in equations]
        if len({left for left, _ in taken}) > 1:
            return gold, equations
        return taken[0][0], [part for _, parts in taken for part in parts]
    g, a = unlabel(gold), unlabel(answer)
    if g and a and "=" not in answer:
        return as_tuple_if_named(*g), [answer]
    if g and a and len(set(g[0])) == len(set(a[0])) == 1:
        same_name = g[0][0] == a[0][0]
        longer_names = max(map(len, g[0] + a[0])) > 1
        if same_name or longer_names:  # x=5 is not y=5
            return ", ".join(g[1]), [", ".join(a[1])]
    return gold, [answer]


def expand_signs(text: str) -> str:
    r"""`\frac{-1\pm\sqrt5}{2}` -> both values as a list: math-verify does it only between terms."""
    if not PLUS_MINUS.search(text):
        return text
    elements = []
    for element in split_top(text, ",;"):
        upper = PLUS_MINUS.sub(lambda m: "+" if m[1] == "pm" else "-", element)
        lower = PLUS_MINUS.sub(lambda m: "-" if m[1] == "pm" else "+", element)
        both = [each.removeprefix("+").strip() for each in (upper, lower)]
        elements += dict.fromkeys(both)
    return ", ".join(elements)


def are_unlike(gold: str, answer: str) -> str:
    """Why such answers cannot be equal, although math-verify accepts them; "" if they can be."""
    for one, other in ((gold, answer), (answer, gold)):
        if SET.match(one) and TUPLE.fullmatch(other):
            return "a set is no tuple and no interval"
        if INEQUALITY.search(one) and not INEQUALITY.search(other) and is_list(other):
            return "a list is no inequality"  # -2 < x < 3 is more than -2, 3
    return ""


def is_list(text: str) -> bool:
    """Whether it lists values. An interval or a union of intervals does not."""
    elements = split_top(without_set_braces(text), ",;")
    return len(elements) > 1 and not any(each.startswith(("(", "[", "]")) for each in elements)


def shares(text: str) -> str:
    r"""`1:2:3` -> its parts over the last. math-verify would divide twice, and read 1:6."""
    parts = split_top(text, ":")
    if len(parts) < 3:
        return text
    return "(" + ", ".join(f"\\frac{{{part}}}{{{parts[-1]}}}" for part in parts) + ")"


def without_set_braces(text: str) -> str:
    return SET_BRACES.sub(r"\1", text).strip()


def without_lone_modulus(gold: str, answer: str) -> tuple[str, str]:
    """`3 (mod 7)` and `3` may answer the same question; `3 (mod 7)` and `3 (mod 5)` may not.

    `x = 3 (mod 7)` answers it too, when the other does not name the unknown.
    """
    if ("\\pmod" in gold) != ("\\pmod" in answer):
        return MODULUS.sub("", gold), MODULUS.sub("", answer)
    if "\\pmod" in gold and bool(UNKNOWN.match(gold)) != bool(UNKNOWN.match(answer)):
        return UNKNOWN.sub("", gold), UNKNOWN.sub("", answer)
    return gold, answer


# ------------------------------------------------------------------------- what must not be parsed

COMPARED_AS_TEXT = re.compile(r"""
    \\[lcdv]?dots | \.\.\.                         # 1,2,\ldots,n
    | \d\)?\s*_                                   # 52_8: the base is part of it, 52 is wrong
    | ^\d+:0\d | ^\d{1,2}(?::\d\d)?\\text\{[ap]m\}  # 10:05 is no ratio, 4:30 p.m. no product
    | ^[12]\d{3}-[01]\d-[0-3]\d(?!\d)                # 2024-01-05 is no difference
    | \\text\{remainder\}                          # 7 R 2 is neither 2 R 7 nor 14
    | \\pmod
    | \\(?:gcd|lcm)\s*[({][^(){}]*[A-Za-z]          # sympy takes variables for coprime polynomials
    | \d' | \\infty\s*\]                           # 42' is not 42; no interval ends in infinity]
    """, re.VERBOSE)
TIME = re.compile(r"(?:1?\d|2[0-4]):[0-5]\d")
RANGE = re.compile(r"(\d+)-(\d+)")
HOUR_OR_PRODUCT = re.compile(r"\s*\d+(?:[ap]m|[rR]\d+)\s*")
UNIMPORTANT_IN_TEXT = re.compile(r"[{}()\s]")


def as_product(written: str, spelled: str, other: str) -> str:
    """`3am` is an hour, and `7r2` a remainder, but products where the other is none of these."""
    if HOUR_OR_PRODUCT.fullmatch(written) and "\\text" not in other:
        return written.strip()
    return spelled


def is_range(gold: str) -> bool:
    """`5-7`: nobody writes a difference for -2."""
    ends = RANGE.fullmatch(gold)
    return bool(ends) and int(ends[1]) < int(ends[2])


def same_text(gold: str, answer: str) -> bool | None:
    """Compares number bases, dots, times of day, which math-verify misreads; None for the rest."""
    times = TIME.fullmatch(gold) and TIME.fullmatch(answer)  # 2:30 is not 1:15, 20:30 may be 2:3
    as_text = COMPARED_AS_TEXT.search(gold) or COMPARED_AS_TEXT.search(answer)
    if not (times or as_text or is_range(gold)):
        return None
    bare = [UNIMPORTANT_IN_TEXT.sub("", text).lower() for text in (gold, answer)]
    return bare[0] == bare[1]
