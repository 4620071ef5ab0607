r"""Rules that rewrite LaTeX, so that equal answers have one spelling, and that remove units.

`10{,}080\,\text{cm}^2.` and `10,080` both become `10080`. The rules of `REWRITES` are applied one
after another, so their order matters. A test checks that only this rule turns its example `before`
into `after`. No pattern may backtrack far, because a model's answer could make it hang.
"""
import functools
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

FUNCTIONS = ("arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|log|ln|exp|sqrt|pi|gcd|lcm"
             r"|(?:max|min)(?=\s*\}?\s*\()")
NUMBER_WORDS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen "
                "fourteen fifteen sixteen seventeen eighteen nineteen twenty").split()
LARGE = dict(dozen=12, hundred=100, thousand=10**3, million=10**6, billion=10**9, trillion=10**12)
CURRENCY = r"(?:US|USD|EUR|GBP|INR|CNY|RMB|JPY|Rs)\.?"
GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"  # braces with one level of braces inside
PARENTHESES = r"\(((?:[^()]|\([^()]*\))*)\)"  # likewise; catches the inside
POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"  # of a unit: cm^2, s^{-1}
LETTER = (r"(?:[A-Za-z\d]|\\(?!(?:d?frac|binom|sqrt|text|left|right|circ|begin|end|ldots|bar"
          r"|overline|dot)§)[A-Za-z]+)")  # an argument without braces: a, 2, \alpha


class Rule(NamedTuple):
    before: str
    after: str
    why: str
    pattern: re.Pattern
    new: str | Callable[[re.Match], str]


def rule(before: str, after: str, why: str, pattern: str, new: str | Callable) -> Rule:
    """Replaces matches of `pattern` by `new`. In a pattern § means the end of a command."""
    return Rule(before, after, why, re.compile(pattern.replace("§", "(?![A-Za-z])")), new)


CHARACTERS = r"""
− -     – -     — -     ‐ -     ‑ -     × \times     · \cdot     ⋅ \cdot     ∙ \cdot     ÷ \div
⁄ /     ∕ /     ∶ :     ≤ \le   ≥ \ge   ⩽ \le   ⩾ \ge   ≠ \ne   ≈ \approx   ± \pm   ∓ \mp
√ \sqrt   ∛ \sqrt[3]   ∞ \infty   π \pi   θ \theta   α \alpha   β \beta   γ \gamma   λ \lambda
μ \mu   φ \varphi   ϕ \phi   ω \omega   Ω \Omega   ∪ \cup   ∩ \cap   ∈ \in   ∖ \setminus
∅ \emptyset   ∠ \angle   ° ^\circ   … \ldots   ⋯ \ldots   ∨ \lor   ∧ \land   ¬ \neg   ⇒ \implies
⌊ \lfloor   ⌋ \rfloor   ⌈ \lceil   ⌉ \rceil   ⟨ \langle   ⟩ \rangle   ′ '   ∣ |   。 .   、 ,
ℝ \mathbb{R}   ℤ \mathbb{Z}   ℕ \mathbb{N}   ℚ \mathbb{Q}   ℂ \mathbb{C}   → \to
½ \frac{1}{2}   ⅓ \frac{1}{3}   ⅔ \frac{2}{3}   ¼ \frac{1}{4}   ¾ \frac{3}{4}   ⅕ \frac{1}{5}
""".split()
UNICODE = dict.fromkeys([0xad, 0x200b, 0x200c, 0x200d, 0x2060, 0xfeff], "")  # of no width
UNICODE |= {ord(character): command + " " * command[-1].isalpha()
            for character, command in zip(CHARACTERS[::2], CHARACTERS[1::2])}
SUPERSCRIPTS, SUBSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
COMMAND_ESCAPED_TWICE = re.compile(r"\\\\(?=[A-Za-z])")


@functools.lru_cache(4096)  # a gold is compared with many answers, and they repeat
def plain_characters(text: str) -> str:
    r"""`x²` -> `x^{2}`, `２` -> `2`, `π` -> `\pi `, and `\\frac` -> `\frac` outside matrices."""
    text = SUPERSCRIPTS.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = SUBSCRIPTS.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(UNICODE)).translate(UNICODE)
    return text if "\\begin" in text else COMMAND_ESCAPED_TWICE.sub(r"\\", text)


# ----------------------------------------------------------------------------------- the rules
SAME = dict(pair.split() for pair in r"""
\leq \le | \leqslant \le | \leqq \le | \geq \ge | \geqslant \ge | \geqq \ge | \neq \ne
\equiv = | := = | \varnothing \emptyset | \bmod \mod | \dfrac \frac | \tfrac \frac | \cfrac \frac
\dbinom \binom | \tbinom \binom | \cdots \ldots | \dots \ldots | \dotsc \ldots | \dotsb \ldots
... \ldots | \lbrace \{ | \rbrace \} | \langle ( | \rangle )
""".strip().replace("\n", "|").split("|"))


def written_out(match: re.Match) -> str:
    product = (Decimal(match[1]) * LARGE[match[3].lower()]).normalize()
    return f"{product:f}" + (r"\text{" if match[2] and not match[4] else "")  # a unit follows


REWRITES = [
    rule(r"\color{red}7\tag{1}", "7", "phantoms, labels, tags, spaces, colours",
         r"\\(?:[hv]?phantom|label|tag|[hv]space|color)\*?\s*\{[^{}]*\}", ""),
    rule(r"\implies 7", " 7", "a relation or an arrow at the start",
         r"^\s*(?:=|\\(?:approx|implies|to|(?:[lL]ong)?[rR]ightarrow|therefore)§|####)", ""),
    rule(r"\displaystyle\left.7\right|", "7|", "sizes, fonts as switches, and check marks",
         r"\\(?:displaystyle|limits|textstyle|hfill|left|right|[bB]igg?[lrm]?|[lL]arge|huge"
         r"|small|rm|bf|it|checkmark)§\.?", ""),
    rule(r"2\hat{i}", "2{i}", "a bar over a segment's two ends, and a unit vector's hat",
         r"\\(?:overline(?=\s*\{[A-Z]{2}\})|hat(?=\s*(?:\{[ijk]\}|[ijk]§)))", ""),
    rule(r"\mathbf{v}+\boxed{7}", "{v}+{7}", "boxes, colours, fonts around a group",
         r"\\(?:boxed|fbox|textcolor\{\w*\}|underline|uline|ensuremath|math(?:bf|it|sf|tt|cal)"
         r"|bold|boldsymbol|bm)(?=\s*\{)", ""),
    rule(r"10,\!000", "10,000", "negative space, as in 10,\\!000",
         r"(?<!\\)\\!\s*", ""),
    rule("10{,}000", "10,000", "a comma or a colon in braces has no spaces around it",
         r"(?<=\d)\{([,:])\}(?=\d)", r"\1"),
    rule("2**10", "2^{10}", "two asterisks between values are a power",
         r"(?<=[\w)}\]])(?:\*\*|\s+\*\*\s+)(?:\(([^()]*)\)|(-?(?:\d+(?:\.\d+)?|[A-Za-z])))",
         r"^{\1\2}"),
    rule(r"\(\$7\), **8**", "7, 8",
         "currencies, quotation marks, stars of Markdown, ends of formulas",
         r"\\?\$|[€£¥¢₹`“”\"]|\*\*|(?<!\\)\\[()\[\]]", ""),
    rule(r"7\,\quad  8", "7 8", "every space is one space",
         r"(?:(?<!\\)\\[,;: ]|\\(?:q?quad|thinspace|enspace)§|~|\s)+", " "),
    rule(r"a\leqslant\dfrac12", r"a\le\frac12", "one command for each meaning",
         r"\\[A-Za-z]+|:=|\.\.\.", lambda match: SAME.get(match[0], match[0])),
    rule(r"x\not= 2", r"x\ne  2", "a crossed equals sign; 5!=120 has a factorial",
         r"\\not\s*=|(?<=[A-Za-z])\s*!=|\s!=", r"\\ne "),
    rule(r"\mathrm{cm}", r"\text{cm}", "all that sets upright or slanted text is \\text",
         r"\\(?:text(?:bf|it|rm|sf|tt|sc|up|normal)|math(?:rm|normal)|[mh]box|emph"
         r"|operatorname\*?)\s*(?=\{)", r"\\text"),
    rule("]1,2[", "(1,2)", "brackets turned around are open ends of an interval",
         r"^\s*([\[\]])([^\[\](){}]*,[^\[\](){}]*)([\[\]])\s*$",
         lambda match: "[("[match[1] == "]"] + match[2] + "])"[match[3] == "["]),
    rule(r"\mathbb{R}-\{1\}", r"\mathbb{R} \setminus \{1\}", "a minus before a set",
         r"(?<=\\mathbb\{[A-Z]\})\s*(?:-|\\backslash§)\s*(?=\\\{)", r" \\setminus "),
    rule("C(5,2)", r"\binom{5}{2}", "\\choose is \\binom, and so is C(5,2)",
         r"\{([^{}]*)\\choose([^{}]*)\}|(?<![A-Za-z])(?:C|\\text\{C\})\((\d+), ?(\d+)\)",
         r"\\binom{\1\3}{\2\4}"),
    rule(r"\mathbb R", r"\mathbb{R}", "a blackboard letter, or one with a hat, stands in braces",
         r"\\(mathbb|hat|vec|bar|tilde)\s+([A-Za-z])", r"\\\1{\2}"),
    rule(r"1\\[3pt]2", r"1\\2", "extra height between the rows of a matrix",
         r"(?<=\\\\)\s*\[[^\]]*\]", ""),
    # ---- words
    rule(r"\text{USD } 5, Rs. 5", "5, 5", "currencies by name before the amount",
         rf"(?<![A-Za-z])(?:{CURRENCY}\s*(?=[\d.])|\\text\{{\s*{CURRENCY}\s*\}}\s*)", ""),
    rule(r"4:30 \text{ p.m.}", r"4:30\text{pm}", "half of the day",
         r"(?i)(?:\\text\{\s*)?(\d\d?:\d\d)\s*(?:\\text\{\s*)?([ap])\.?\s?m\b\.?\s*\}?",
         r"\1\\text{\2m}"),
    rule(r"\text{no solutions}", r"\emptyset", "no solution, and the empty set, in words",
         r"(?i)^\s*(?:\\text\{\s*)?(?:(?:there (?:is|are) )?no (?:real )?solutions?"
         r"|(?:the )?empty set)\.?\s*\}?\s*$", r"\\emptyset"),
    rule(r"\text{The answer is 12}", r"\text{12}", "an announcement of the answer",
         r"(?i)(^\s*\\text\{|^)\s*(?:ans\.|(?:the |final |correct )*"
         r"(?:ans|answer|result|solution|total)s?\s*(?:is|are|:))\s*:?\s*(?=\S)", r"\1"),
    rule(r"\text{Al or Bo}", r"\text{Al} \lor \text{Bo}", "'and' and 'or' connect two texts",
         r",?\s*\b(and|or)\b\s*,?\s*(?=[^{}]*\})", r"} \\l\1 \\text{"),
    rule("2 and 3", r"2  \land  3", "'and' and 'or' outside \\text are connectives, too",
         r"(?<![A-Za-z\\])(and|or)§", r" \\l\1 "),
    rule(r"2\text{ , }3", "2 3", "\\text that holds nothing but a comma",
         r"\\text\{\s*,?\s*\}", " "),
    rule(r"2, \land 3", r"2 \land 3", "a connective needs no commas and one space on each side",
         r"(?:\s*,)?\s*\\l(and|or)§\s*(?:,\s*)?", r" \\l\1 "),
    rule(r"\text{28 cm}", r"28\text{cm}", "a number does not belong in \\text, its unit does",
         r"\\text\{\s*([-+]?\d[\d.,]*)\s*([^{}\d]*[A-Za-z][^{}\d]*)\}", r"\1\\text{\2}"),
    rule(r"1-1/\text{e}", "1-1/ e ", "text without a word of two letters is mathematics, or a unit",
         r"\\text\{\s*([ei]|(?![^{}]*[A-Za-z]{2})[^{}\\]*?(?<!\^)[\d=+][^{}\\]*?)\s*\}", r" \1 "),
    rule(r"9\frac{\text{m}}{\text{s}^2}", r"9\text{m/s}^2", "a fraction of units is a unit",
         rf"\\frac\{{\\text\{{([^{{}}]*)\}}\}}\{{\\text\{{([^{{}}]*)\}}({POWER})\}}",
         r"\\text{\1/\2}\3"),
    rule("51 (trucks)", r"51\text{trucks}", "words in parentheses after a number are words",
         r"(?<=[\d}])(?:\s*\(([A-Za-z]{4}[A-Za-z .,-]*)\)|\s+\(([A-Za-z][A-Za-z /.,^\d-]*)\))\s*$",
         r"\\text{\1\2}"),
    rule("28 percent", r"28 \%", "percent is a sign: in \\text, in words, bare",
         r"\\text\{\s*(?:\\?%|percent(?:age)?|pct)\s*\}|(?<=[\d}\s])(?:percent(?:age)?|pct)\b|\\?%",
         r"\\%"),
    rule(r"10^{\text{th}}", "10", "ordinals are numbers",
         r"(?<=\d)(?: ?\^? ?\{? ?\\text\{\s*(?:st|nd|rd|th)\s*\} ?\}?|(?:st|nd|rd|th)\b)", ""),
    rule("(2, infinity)", r"(2, \infty )", "infinity as a word",
         r"(?i)(?<![A-Za-z\\])(?:infinity|\\text\{\s*infinity\s*\}|inf)§", r"\\infty "),
    rule(r"\text{Twelve}", "12", "numbers up to twenty, as words",
         rf"(?i)(?:^|\\text\{{|(?<=_)\{{)\s*({'|'.join(NUMBER_WORDS)})\s*(?:\}}|\.?$)",
         lambda match: str(NUMBER_WORDS.index(match[1].lower()))),
    # ---- numbers
    rule("v^2_0", "v_0^2", "an index comes before an exponent: v^2_0 has no number with a base",
         r"([A-Za-z])\s*\^\s*(\{[^{}]*\}|\w)\s*_\s*(\{[^{}]*\}|\w)", r"\1_\3^\2"),
    rule("1 000 000", "1000000", "spaces separate thousands",
         r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])", lambda match: match[0].replace(" ", "")),
    rule("1,234/2", "1234/2", "commas separate thousands, unless there may be a list",
         r"(?<![\d.,(\[])(?<!\\\{)[1-9]\d{0,2}(?:,\d{3})+(?!\d|\s*[,)\]]|\\\})",
         lambda match: match[0].replace(",", "")),
    rule(r"2.5\text{ million}", "2500000", "a word multiplies the number before it",
         rf"(?i)(?<![\w.,/^])(\d{{1,20}}(?:\.\d{{1,20}})?)\s*(\\text\{{\s*)?({'|'.join(LARGE)})s?\b"
         r"(?(2)(\s*\})?)", written_out),
    rule("5 1/2", r"5\frac{1}{2}", "5 1/2 is a mixed number",
         r"(?<![A-Za-z\\\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    rule("3.0 x 10^8", r"3.0\times 10^8", "the letter x before a power of ten is a times sign",
         r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
    rule("4.5e33", r"4.5\times 10^{33}", "the calculator's notation for a power of ten",
         r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\d.A-Za-z])", r"\1\\times 10^{\2}"),
    # ---- forms of answers
    rule("2sqrt(3)", r"2\sqrt (3)", "functions without a backslash",
         rf"(?<![A-Za-z\\])({FUNCTIONS})§", r"\\\1 "),
    rule(r"\sin 30^\circ", r"\sin(\frac{30\pi}{180})", "degrees in trigonometry",
         r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d+)\s*\^\s*\{?\s*\\circ\s*\}?\s*[)}]?",
         r"\\\1(\\frac{\2\\pi}{180})"),
    rule(r"90^{\circ}", "90", "degrees elsewhere are a unit, of angles or temperature",
         r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?\s*(?:\\text\{\s*[CF]\s*\}|[CF]\b)?|\\degree§", ""),
    rule(r"\{x \mid x>3\}", " x>3", "a set builder is its condition",
         r"^\s*\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:)(.*)\\\}\s*$", r"\1"),
    rule(r"x \in [0,1]", "[0,1]", "what the solution is a member of is the answer",
         r"^\s*(?:[A-Za-z]|\([a-z](?:, ?[a-z])+\))\s*\\in§\s*", ""),
    rule(r"\text{all real numbers}", r"\mathbb{R}", "all real numbers, in words",
         r"(?i)^\s*(?:\\text\{)?\s*all real(?: number)?s\s*\}?\s*$", r"\\mathbb{R}"),
]

BRACES = [
    rule(r"0.\bar3", r"0.\overline{3}", "a bar or dots over the period of a decimal",
         r"(?<=[.\d])\\(?:bar|dot|overline)\s*(\d)", r"\\overline{\1}"),
    rule(r"\sqrt\pi", r"\sqrt{\pi}", "a radicand without braces, or in parentheses",
         rf"\\sqrt\s*(\[[^\]]*\])?\s*(?:{PARENTHESES}|(\d+|\\frac\s*{GROUP}\s*{GROUP}|{LETTER}))",
         r"\\sqrt\1{\2\3}"),
    rule(r"\binom52", r"\binom{5}2", "a numerator, or what is chosen from, without braces",
         rf"\\(frac|binom)\s*({LETTER})", r"\\\1{\2}"),
    rule(r"\frac{4}3", r"\frac{4}{3}", "a denominator, or how many are chosen, without braces",
         rf"\\(frac|binom)\s*({GROUP})\s*({LETTER})", r"\\\1\2{\3}"),
    rule("x^(1/3)", "x^{1/3}", "an exponent in parentheses, a fraction or a root without braces",
         rf"\^\s*(?:\{{\s*{PARENTHESES}\s*\}}|{PARENTHESES}"
         rf"|(-?\s*(?:\\frac\s*{GROUP}\s*{GROUP}|\\sqrt\s*{GROUP})))", r"^{\1\2\3}"),
    rule("10^-5", "10^{-5}", "an exponent or an index of several characters without braces",
         r"([\^_])\s*(-\s*(?:\d+|\\?[A-Za-z]+)|\d{2,})", r"\1{\2}"),
]

REWRITES += BRACES

# --------------------------------------------------------------------------------------- units
# Units never count: `5 cm` is `5`. Any words after a value are taken for its unit, unless one of
# them changes the value (`5 thousandths`) or takes it back (`5 is wrong`).

CHANGES = set("""
    dozen hundred thousand million billion trillion lakh crore score pair gross
    half halve third quarter fourth fifth sixth seventh eighth ninth tenth eleventh twelfth
    twentieth hundredth thousandth millionth billionth thirty forty fifty sixty seventy eighty
    ninety percent percentage pct percentile squared cubed factorial mod modulo
    remainder inverse reciprocal negative minus plus over divided multiplied less fewer more
    greater least most below above under twice double triple except but excluding without instead
    between either neither nor not no never none wrong incorrect false maybe perhaps possibly
    probably guess unsure is isn was are were may might could should would if unless when
    than and or out versus vs am pm bc bce
    january february march april june july august september october november december
    jan feb mar apr jun jul aug sep sept oct nov dec
    万 亿 千 百 十 半 倍 成 打 不 非 或 负
    """.split()) | set(NUMBER_WORDS)
SYMBOLS = set("sq cu cm mm km kg mg ml mL in ft yd mi mph rpm oz lb lbs hr hrs min sec pt pts "
              "yr yrs gal rad USD EUR GBP INR CNY RMB JPY Rs ms nm eV keV MeV GeV erg kJ "
              "MW kV mA mV Hz kHz MHz GHz Pa kPa MPa kW kWh atm AU pc kpc Mpc mol".split())
LENGTHS = {"cm", "mm", "km", "in", "ft", "yd", "mi"}  # hr and ml may be products of variables
LETTERS = "msghLlNJWVACFKTH"
HAN = "[\u4e00-\u9fff]"
A_WORD = re.compile(rf"{HAN}+|[A-Za-z]+")
TEXT = re.compile(r"\\text\{([^{}]*)\}")
ELEMENTS = re.compile(r"[,;=]|\\l(?:and|or)(?![A-Za-z])")
UNIT = re.compile(rf"""                      # 5 cm^2, 5\text{{ m}}\cdot\text{{s}}^{{-1}}
    (?: (?<=[\d}})]) | (?<=[A-Za-z])(?=[\s\\]) ) (\s*)
    ( (?: (?:\\cdot\s*|/)? \\text\{{[^{{}}]*\}} | [A-Za-z] | {HAN} )
      (?: \\text\{{[^{{}}]*\}} | [A-Za-z\s/.*-] | {HAN} | \\cdot(?![a-z])
        | \^\s*\{{?\s*-?\d\s*\}}? | (?<=m)[23](?!\d) )* )
    (?= $ | [,;] | \\l(?:and|or) )""", re.VERBOSE)
A_VALUE = re.compile(r"\d|\\(?!text)")
OTHER_WORDS = re.compile(r"\\text\{[^{}]*\}[^\\{}^]*\d|(?<![\\A-Za-z])[A-Za-z]{2}")  # 5 ft 6
PLAIN_NUMBER = re.compile(r"(?:[-+\d.,/{}^\s]|\\frac|\\times)*\d\}?\s*")
MATHEMATICS = re.compile(r"[?!=<>\\]|(?<![\^\-m])\d")  # m^2, s^-1 and m2 are units
OUTER = re.compile(rf"^\s*(?:\{{((?:[^{{}}]|{GROUP})*)\}}|\(([^(),;]*)\))\s*$")
TRAILING = re.compile(r"(?<!\.)\.$|\\+$")
UNNEEDED_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
UNNEEDED_BRACES = re.compile(r"(?<=[\^_])\{(\w)\}")


def changes_value(words: list[str]) -> bool:
    """Whether one of the words changes the value, such as `thousandths` or `wrong`."""
    for word in words:
        lower = word.lower()
        forms = {lower, lower.removesuffix("s"), lower.removesuffix("ves") + "f"}
        if len(word) == 1 and word.isascii() and word not in LETTERS + "a":  # k, M
            return True
        is_power = lower in {"squared", "cubed"} and len(words) > 1 and "value" not in words
        if forms & CHANGES and not is_power or any(c in CHANGES for c in word if c > "z"):
            return True
    return False


def is_noun(word: str) -> bool:
    r"""Words outside \text: three letters may be a product such as `abc` or `xyz`."""
    may_be_product = len(word) < 3 or sorted(word) == list(word) or not re.search("[aeiou]", word)
    return len(word) > 3 or word in SYMBOLS or not may_be_product or bool(re.match(HAN, word))


def drop_unit(match: re.Match) -> str:
    r"""Nothing for ` \text{ cm}^2` after a value; the text itself if it may be more than a unit.

    Outside \text these are units: ` cm^2`, ` m/s`, ` big apples`, and one letter after a space.
    """
    element, unit = ELEMENTS.split(match.string[:match.start()])[-1], match[2]
    inside = " ".join(TEXT.findall(unit)).replace(".", "")
    bare = A_WORD.findall(TEXT.sub(" ", unit).replace(r"\cdot", ""))
    words, nouns = A_WORD.findall(inside) + bare, [word for word in bare if is_noun(word)]
    if element[-1:].isalpha():
        nouns = [word for word in nouns if len(word) > 3 or word in LENGTHS]
    if not A_VALUE.search(element) or OTHER_WORDS.search(element) or MATHEMATICS.search(inside):
        return match[0]
    small = {*LETTERS, "a", "an", "of"} if nouns else {*LETTERS}
    if not words or len(words) > 8 or changes_value(words) or {*bare} - {*nouns} - small:
        return match[0]
    is_near = match[1] or unit[1:2] == "/" or nouns and element[-1:] != "}"
    one_letter = match[1] and len(bare) == 1 and PLAIN_NUMBER.fullmatch(element)
    return "" if inside or is_near and (nouns or "/" in unit or one_letter) else match[0]


@functools.lru_cache(4096)
def normalize(text: str) -> str:
    """`text` in one spelling, without units."""
    text = plain_characters(text)
    for each in REWRITES + BRACES:  # BRACES once more: they reach nested braces
        text = each.pattern.sub(each.new, text)
    for _ in range(3):  # layers around the answer: punctuation at the ends, units, braces
        text = UNIT.sub(drop_unit, TRAILING.sub("", text.strip(" ,;:")))
        outer = OUTER.match(text)
        text = outer[1] or outer[2] or "" if outer else text
    return text.removeprefix("+").strip()


def squeeze(text: str) -> str:
    """`text` without unimportant spaces and braces, to compare strings."""
    single_spaces = " ".join(text.split())
    return UNNEEDED_BRACES.sub(r"\1", UNNEEDED_SPACE.sub("", single_spaces))
