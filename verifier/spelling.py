r"""One spelling for LaTeX: a table of rules that give what looks alike one spelling.

`10{,}080\,\text{cm}^2.` and `10,080` both become `10080`. The rules are applied one after another,
so their order matters. Every rule says why it is there and has an example, which a test checks. In
a pattern, § stands for "here a command ends". No pattern may backtrack far: a model writes the
answers, and could make it hang.
"""
import functools
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|log|ln|exp|sqrt|pi|gcd|lcm"
NUMBER_WORDS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen "
                "fourteen fifteen sixteen seventeen eighteen nineteen twenty").split()
LARGE = dict(dozen=12, hundred=100, thousand=10**3, million=10**6, billion=10**9, trillion=10**12)
MONTHS = ("january|february|march|april|may|june|july|august|september|october|november|december"
          "|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec")
CURRENCY = r"(?:US|USD|EUR|GBP|INR|CNY|RMB|JPY|Rs)\.?"
FLAT_GROUP = r"\{[^{}]*\}"  # braces without braces inside
GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"  # ... with one level of them
PARENTHESES = r"\(((?:[^()]|\([^()]*\))*)\)"  # likewise; catches the inside
POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"  # of a unit: cm^2, s^{-1}


@dataclass(frozen=True)
class Rule:
    """Replace `pattern` by `new`, because of `why`; `before` becomes `after`."""
    why: str
    pattern: re.Pattern
    new: str | Callable[[re.Match], str]
    before: str
    after: str

    def apply(self, text: str) -> str:
        return self.pattern.sub(self.new, text)


def rule(why: str, pattern: str, new: str | Callable, before: str, after: str) -> Rule:
    return Rule(why, re.compile(pattern.replace("§", "(?![A-Za-z])")), new, before, after)


# ---------------------------------------------------------------------------------- characters

CHARACTERS = r"""
− -     – -     — -     × \times     · \cdot     ⋅ \cdot     ∙ \cdot     ÷ \div
⁄ /     ∕ /     ∶ :
≤ \le   ≥ \ge   ⩽ \le   ⩾ \ge   ≠ \ne   ≈ \approx   ± \pm   ∓ \mp   √ \sqrt   ∛ \sqrt[3]   ∞ \infty
π \pi   θ \theta   α \alpha   β \beta   γ \gamma   λ \lambda   μ \mu   φ \varphi   ϕ \phi   ω \omega
Ω \Omega   ∪ \cup   ∩ \cap   ∈ \in   ∖ \setminus   ∅ \emptyset   ∠ \angle   ° ^\circ   … \ldots
ℝ \mathbb{R}   ℤ \mathbb{Z}   ℕ \mathbb{N}   ℚ \mathbb{Q}   ℂ \mathbb{C}   ⟨ \langle   ⟩ \rangle
′ '   ∣ |   ∨ ,   。 .   ½ \frac{1}{2}   ⅓ \frac{1}{3}   ⅔ \frac{2}{3}
¼ \frac{1}{4}   ¾ \frac{3}{4}   ⅕ \frac{1}{5}
""".split()
INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad"  # of no width
UNICODE = {ord(character): command + " " * command[-1].isalpha()
           for character, command in zip(CHARACTERS[::2], CHARACTERS[1::2])}
UNICODE |= dict.fromkeys(map(ord, INVISIBLE), "")
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

BRACKETS = {r"\lbrace": r"\{", r"\rbrace": r"\}", r"\langle": "(", r"\rangle": ")"}


def digits_together(match: re.Match) -> str:
    return match[0].replace(" ", "").replace(",", "")


def time_of_day(match: re.Match) -> str:
    return f"{match[1].removesuffix(':00')}\\text{{{match[2].lower()}m}}"


def number_for_word(match: re.Match) -> str:
    return str(NUMBER_WORDS.index(match[1].lower()))


def written_out(match: re.Match) -> str:
    product = (Decimal(match[1]) * LARGE[match[3].lower()]).normalize()
    unit_follows = match[2] and not match[4]
    return f"{product:f}" + r"\text{" * bool(unit_follows)


UNSEEN = [
    rule("phantoms, labels, tags, spaces and colours show nothing of the answer",
         rf"\\(?:[hv]?phantom|label|tag|[hv]space|color)\*?\s*{FLAT_GROUP}", "",
         r"\color{red}7\tag{1}", "7"),
    rule("an answer that begins with a relation: what is left of it is outside the box",
         r"^\s*(?:=|\\approx)", "", "= 7", " 7"),
    rule("sizes, fonts as switches, \\therefore and check marks",
         r"\\(?:displaystyle|limits|textstyle|hfill|left|right|[bB]igg?[lrm]?|[lL]arge|huge"
         r"|small|rm|bf|it|therefore|checkmark)§\.?", "", r"\displaystyle\left.7\right|", "7|"),
    rule("a bar over a segment's two ends, and a unit vector's hat",
         r"\\(?:overline(?=\s*\{[A-Z]{2}\})|hat(?=\s*\{[ijk]\}))", "", r"2\hat{i}", "2{i}"),
    rule("boxes in boxes, colours, lines and fonts around a group",
         r"\\(?:boxed|fbox|textcolor\{\w*\}|underline|ensuremath|math(?:bf|it|sf|cal)|boldsymbol"
         r"|bm)(?=\s*\{)", "", r"\mathbf{v}+\boxed{7}", "{v}+{7}"),
    rule("negative space, as in 10,\\!000",
         r"(?<!\\)\\!\s*", "", r"10,\!000", "10,000"),
    rule("a comma in braces separates thousands",
         r"(?<=\d)\{,\}(?=\d)", "", "10{,}000", "10000"),
    rule("a colon in braces has no spaces around it",
         r"\{:\}", ":", "3{:}00", "3:00"),
    rule("the signs that begin and end a formula",
         r"(?<!\\)\\[()\[\]]", "", r"\(7\)", "7"),
    rule("m after a sum of money is a million, not a meter",
         r"((?:\\\$|[€£¥₹]|^\$)\s*\d[\d.,]*)\s*m(?![a-zA-Z]|\s*\$)", r"\1\\text{million}", r"\$5m",
         r"\$5\text{million}"),
    rule("currencies, dollars around formulas, and quotation marks",
         r"\\?\$|[€£¥¢₹`“”\"]", "", r"\$7, “$8$”", "7, 8"),
    rule("two asterisks between values are a power",
         r"(?<=[\w)}\]])(?:\*\*|\s+\*\*\s+)(?:\(([^()]*)\)|(-?(?:\d+(?:\.\d+)?|[A-Za-z])))",
         r"^{\1\2}", "2**10", "2^{10}"),
    rule("elsewhere they are bold in Markdown",
         r"\*\*", "", "**7**", "7"),
    rule("quotation marks around everything",
         r"^\s*'([^']*)'\s*$", r"\1", "'13'", "13"),
    rule("every space is one space",
         r"(?:(?<!\\)\\[,;: ]|\\(?:q?quad|thinspace|enspace)§|~|\s)+", " ", r"7\,\quad  8", "7 8"),
]

SYNONYMS = [
    rule("all that sets upright text is \\text",
         r"\\(?:text(?:bf|it|rm|sf|up|normal)|math(?:rm|normal)|[mh]box|operatorname\*?)\s*(?=\{)",
         r"\\text", r"\mathrm{cm}", r"\text{cm}"),
    rule("upright text of one letter, without braces",
         r"\\(?:text|math)rm\s+([A-Za-z])", r"\\text{\1}", r"\mathrm e", r"\text{e}"),
    rule("the size of a fraction or a binomial",
         r"\\[dtc](frac|binom)§", r"\\\1", r"\dfrac{1}{2}", r"\frac{1}{2}"),
    rule("\\leq and \\leqslant are \\le",
         r"\\([lg])eq?(?:q|slant)?§", r"\\\1e ", r"x\leqslant 2", r"x\le  2"),
    rule("definitions and congruences are read as equations",
         r"\\equiv§|:=", "=", "x:=2", "x=2"),
    rule("the two signs for the empty set",
         r"\\varnothing", r"\\emptyset", r"\varnothing", r"\emptyset"),
    rule("logical connectives separate a list",
         r"\\l(?:or|and)§", ",", r"1 \lor 2", "1 , 2"),
    rule("brackets by name: braces are those of sets, vectors in angles are tuples",
         r"\\(?:[lr]brace|[lr]angle)§", lambda match: BRACKETS[match[0]],
         r"\langle 1,2\rangle", "( 1,2)"),
    rule("\\choose is \\binom",
         r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}", r"{5\choose 2}", r"\binom{5}{ 2}"),
    rule("the modulus stands in braces",
         r"\(?\\([bp])mod§\s*\{?\s*(\w+)\s*\}?\)?", r"\\\1mod{\2}",
         r"3 \pmod 7", r"3 \pmod{7}"),
    rule("a blackboard letter stands in braces",
         r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}", r"\mathbb R", r"\mathbb{R}"),
    rule("\\bmod is \\mod",
         r"\\bmod", r"\\mod ", r"10 \bmod{7}", r"10 \mod {7}"),
    rule("extra height between the rows of a matrix",
         r"(?<=\\\\)\s*\[[^\]]*\]", "", r"1\\[3pt]2", r"1\\2"),
]

WORDS = [
    rule("currencies by name before the amount",
         rf"(?<![A-Za-z])(?:{CURRENCY}\s*(?=[\d.])|\\text\{{\s*{CURRENCY}\s*\}}\s*)", "",
         r"\text{USD } 5, Rs. 5", "5, 5"),
    rule("a time of day in words, with hours and minutes",
         r"(?i)(?:\\text\{\s*)?(\d{1,2}:\d\d)\s*(?:\\text\{)?\s*([ap])\.?\s?m\b\.?\s*\}?",
         time_of_day, r"4:30 \text{ P.M.}", r"4:30\text{pm}"),
    rule("a full hour, if it is all of the answer: elsewhere 3am is a product",
         r"(?i)^\s*(?:\\text\{\s*)?(\d{1,2})\s*(?:\\text\{)?\s*([ap])\.?\s?m\b\.?\s*\}?\s*$",
         time_of_day, "3 PM", r"3\text{pm}"),
    rule("a quotient and its remainder",
         r"(?i)^\s*(\d+)\s*,?\s*(?:\\text\{\s*)?(?:(?:with|and) )?(?:an? )?r(?:em(?:ainder)?)?\.?"
         r"(?: of)?\s*\}?\s*(\d+)\s*$",
         r"\1\\text{remainder}\2", "7 R 2", r"7\text{remainder}2"),
    rule("no solution, and the empty set, in words",
         r"(?i)^\s*(?:\\text\{\s*)?(?:(?:there (?:is|are) )?no (?:real )?solutions?"
         r"|(?:the )?empty set)\.?\s*\}?\s*$", r"\\emptyset", r"\text{no solutions}", r"\emptyset"),
    rule("numbers and signs without letters are no words",
         r"\\text\{(?=[^{}]*\d)(?=[^{}]*[-+*/:=()])([^{}A-Za-z\\]*)\}", r" \1 ",
         r"\text{2/3}", " 2/3 "),
    rule("a sum of single letters is no words either",
         r"\\text\{((?![^{}]*[A-Za-z]{2})[^{}\\]*[\w)]\s*\+\s*[\w(][^{}\\]*)\}", r" \1 ",
         r"\text{x+1}", " x+1 "),
    rule("an announcement of the answer",
         r"(?i)(^\s*\\text\{|^)\s*(?:ans\.|(?:the |final |correct )*"
         r"(?:ans|answer|result|solution|total)s?\s*(?:is|are|:))\s*:?\s*(?=\S)",
         r"\1", r"\text{The answer is 12}", r"\text{12}"),
    rule("a number does not belong in \\text, its unit does",
         r"\\text\{\s*([-+]?\d[\d.,]*)\s*([^{}\d]*)\}", r"\1\\text{\2}",
         r"\text{28 cm}", r"28\text{cm}"),
    rule("'and' and 'or' within \\text separate a list",
         r"\\text\{([^{}]*?),?\s*\b(?:and|or)\b\s*([^{}]*)\}", r"\\text{\1},\\text{\2}",
         r"\text{Al and Bo}", r"\text{Al},\text{Bo}"),
    rule("'and' and 'or' outside \\text too",
         r",?\s*(?<![A-Za-z\\])(?:and|or)§\s*,?", ",", "2, and 3", "2,3"),
    rule("\\text that holds nothing but a comma",
         r"\\text\{\s*,?\s*\}", " ", r"2\text{ , }3", "2 3"),
    rule("one comma is enough",
         r",(?:\s*,)+", ",", "2, , 3", "2, 3"),
    rule("the numbers e and i, set upright; numbers in \\text",
         r"\\text\{\s*([ei]|[-+\d.,]+)\s*\}", r" \1 ", r"1-1/\text{e}", "1-1/ e "),
    rule("functions set as text",
         rf"\\text\{{\s*({FUNCTIONS})\s*\}}", r"\\\1 ", r"\text{sin}x", r"\sin x"),
    rule("a fraction of units is a unit",
         rf"\\frac\{{\\text\{{([^{{}}]*)\}}\}}\{{\\text\{{([^{{}}]*)\}}({POWER})\}}",
         r"\\text{\1/\2}\3", r"9\frac{\text{m}}{\text{s}^2}", r"9\text{m/s}^2"),
    rule("percent is a sign: in \\text, in words, bare",
         r"\\text\{\s*(?:\\?%|percent(?:age)?|pct)\s*\}|(?<=[\d}\s])(?:percent(?:age)?|pct)\b|\\?%",
         r"\\%", "28 percent", r"28 \%"),
    rule("ordinals are numbers",
         r"(?<=\d)(?: ?\^? ?\{? ?\\text\{\s*(?:st|nd|rd|th)\s*\} ?\}?|(?:st|nd|rd|th)\b)", "",
         r"10^{\text{th}}", "10"),
    rule("infinity as a word",
         r"(?i)(?<![A-Za-z\\])(?:infinity|\\text\{\s*infinity\s*\}|inf)§", r"\\infty ",
         "(2, infinity)", r"(2, \infty )"),
    rule("an equation in \\text is an equation",
         r"\\text\{([^{}]*=[^{}]*)\}", r"\1", r"\text{x=5}", "x=5"),
    rule("'3 to 5' is the ratio 3:5",
         r"(?<=\d)\s*(?:\\text\{\s*to\s*\}|\bto\b)\s*(?=\d)", ":", "3 to 5", "3:5"),
    rule("a base in words is a subscript",
         r"\s*(?:\\text\{\s*)?\(?\b(?:in )?base (\d+)\)?\s*\}?", r"_{\1}", r"52 \text{ in base 8}",
         "52_{8}"),
    rule("numbers up to twenty, as words",
         rf"(?i)(?:^|\\text\{{|(?<=_)\{{)\s*({'|'.join(NUMBER_WORDS)})\s*(?:\}}|\.?$)",
         number_for_word, r"\text{Twelve}", "12"),
]

NUMBERS = [
    rule("an index comes before an exponent: v^2_0 has no number with a base",
         r"([A-Za-z])\s*\^\s*(\{[^{}]*\}|\w)\s*_\s*(\{[^{}]*\}|\w)", r"\1_\3^\2",
         "v^2_0", "v_0^2"),
    rule("spaces separate thousands",
         r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])", digits_together, "1 000 000", "1000000"),
    rule("commas separate thousands, unless they separate the elements of a list",
         r"(?<![\d.,(\[])(?<!\\\{)[1-9]\d{0,2}(?:,\d{3})+(?!\d|\s*[,)\]]|\\\})", digits_together,
         "1,234/2", "1234/2"),
    rule("a word multiplies the number before it",
         rf"(?i)(?<![\w.,/^])(\d{{1,20}}(?:\.\d{{1,20}})?)\s*(\\text\{{\s*)?({'|'.join(LARGE)})s?\b"
         r"(?(2)(\s*\})?)", written_out, r"2.5\text{ million}", "2500000"),
    rule("5 1/2 is a mixed number",
         r"(?<![A-Za-z\\\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", "5 1/2",
         r"5\frac{1}{2}"),
    rule("1/2 x is half of x",
         r"(?<![\w.}])(\d+)/(\d+) (?=[A-Za-z\\(])", r"\\frac{\1}{\2} ", "1/2 x", r"\frac{1}{2} x"),
    rule("the letter x before a power of ten is a times sign",
         r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times ", "3.0 x 10^8", r"3.0\times 10^8"),
    rule("the calculator's notation for a power of ten",
         r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\d.A-Za-z])", r"\1\\times 10^{\2}",
         "4.5e33", r"4.5\times 10^{33}"),
    rule("base ten goes without saying",
         r"^\(?(\d+)\)?\s*_\s*\{?10\}?$", r"\1", "52_{10}", "52"),
]

CALCULATOR = [
    rule("functions without a backslash",
         rf"(?<![A-Za-z\\])({FUNCTIONS})§", r"\\\1 ", "2sqrt(3)", r"2\sqrt (3)"),
    rule("an exponent in parentheses",
         rf"\^\s*{PARENTHESES}", r"^{\1}", "x^(1/3)", "x^{1/3}"),
    rule("a radicand in parentheses",
         rf"\\sqrt\s*{PARENTHESES}", r"\\sqrt{\1}", r"\sqrt (3)", r"\sqrt{3}"),
    rule("a radicand without braces",
         r"\\sqrt\s*(\[[^\]]*\])?\s*(\d+|[A-Za-z])", r"\\sqrt\1{\2}", r"\sqrt3", r"\sqrt{3}"),
    rule("a numerator without braces",
         r"\\frac\s*([\dA-Za-z]|\\pi)", r"\\frac{\1}", r"\frac43", r"\frac{4}3"),
    rule("a denominator without braces",
         rf"\\frac\s*({GROUP})\s*([\dA-Za-z]|\\pi)", r"\\frac\1{\2}", r"\frac{4}3", r"\frac{4}{3}"),
]

FORMS = [
    rule("degrees within a trigonometric function are radians",
         r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d+)\s*\^\s*\{?\s*\\circ\s*\}?\s*[)}]?",
         r"\\\1(\\frac{\2\\pi}{180})", r"\sin 30^\circ", r"\sin(\frac{30\pi}{180})"),
    rule("degrees elsewhere are a unit, of angles or temperature",
         r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?\s*(?:\\text\{\s*[CF]\s*\}|[CF]\b)?|\\degree§", "",
         r"90^{\circ}", "90"),
    rule("a set builder is its condition",
         r"^\s*\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:)(.*)\\\}\s*$", r"\1",
         r"\{x \mid x>3\}", " x>3"),
    rule("what the solution is a member of is the answer",
         r"^\s*[A-Za-z]\s*\\in§\s*", "", r"x \in [0,1]", "[0,1]"),
    rule("a parameter that runs over the integers may go unmentioned",
         rf"(?:, ?)?(?:\\text{FLAT_GROUP} ?|for |where )?\b[a-z]\s*\\in\s*\\mathbb\{{[ZN]\}}\s*$",
         "", r"2k\pi, k\in\mathbb{Z}", r"2k\pi"),
    rule("all real numbers, in words",
         r"(?i)^\s*(?:\\text\{)?\s*all real(?: number)?s\s*\}?\s*$", r"\\mathbb{R}",
         r"\text{all real numbers}", r"\mathbb{R}"),
]

REWRITES = UNSEEN + SYNONYMS + WORDS + NUMBERS + CALCULATOR + FORMS


# --------------------------------------------------------------------------------------- units

HAN = "[\u4e00-\u9fff]"
UNIT_IN_TEXT = re.compile(rf"""
    (?<=[\w}})]) \s* (?:\\cdot|/)?\s*                      # after a value: perhaps "per"
    \\text\{{([^{{}}]*)\}} ({POWER})                       # the unit and its power
    (?= \s* (?: \.?$ | [,;/] | \\cdot\s*\\text | \\text))  # at the end, or before another one
    """, re.VERBOSE)
BARE_UNIT = re.compile(rf"""                          # in letters, at the end: 5 cm^2, 5 m^2/s, 5元
    (?<=[\d}}]) \s*
    ((?:[A-Za-z]{{2}} | [mgLNJW](?:\^\d)?/ | {HAN})     # a variable is one letter
     (?:{HAN} | [A-Za-z\ /.] | \^\d/)*)
    ({POWER} | [23]) \s*$                             # 5 cm2, too
    """, re.VERBOSE)
SYMBOLS = set("m cm mm km g kg mg l L ml mL s h N J W V A C F kW kWh Hz Pa mol in ft yd mi mph rpm "
              "oz lb lbs hr hrs min mins sec secs yr yrs gal rad USD EUR GBP INR CNY RMB JPY Rs "
              "K ms nm eV keV MeV GeV erg ergs dyne kJ MW kV mA mV kHz MHz GHz kPa MPa atm AU pc "
              "kpc Mpc arcsec".split())
MEASURES = set("""
    meter metre centimeter centimetre millimeter kilometer kilometre inch foot feet yard mile acre
    gram milligram kilogram ton tonne pound ounce liter litre milliliter gallon quart pint
    second minute hour day week month year degree celsius fahrenheit kelvin radian newton joule watt
    volt amp ampere
    dollar cent euro yuan yen rupee mole calorie unit point byte
    元 块 角 分 米 厘米 毫米 千米 公里 克 千克 公斤 吨 升 毫升 平方米 平方厘米 立方米 立方厘米 度
    秒 分钟 小时 时 天 日 周 月 年 岁""".split())
COUNTED = set("""
    people person child children man men woman women boy girl student friend member player guest
    apple orange banana cookie cake candy candies egg tree flower bird fish dog cat animal book page
    card coin marble ticket pencil pen bottle cup can bag box piece slice ball car game row
    way time solution value number integer term divisor factor triangle side edge face vertices
    diagonal arrangement permutation combination outcome subset path
    approx approximately checked exactly each total left altogether
    个 只 人 名 位 本 张 支 枝 条 件 次 页 棵 辆 头 箱 瓶 杯 组 种 双 盒 袋 朵 题 根 颗 间 层
    """.split())
NEVER_SQUARED = {"mL", "ml", "mg"}  # mL^2 is a mass times a length squared
BEFORE_UNITS = {"square", "cubic", "sq", "cu", "per", "a", "an", "of", "in"}
AFTER_UNITS = {"squared", "cubed"}
POWERS_AND_SIGNS = re.compile(r"\^\{?-?[123]\}?|[\s./()*-]+")
A_VALUE = re.compile(r"\d|\\(?!text)")
OUTER = re.compile(r"^\s*(?:\{([^{}]*)\}|\(([^(),;]*)\))\s*$")
TRAILING = re.compile(r"(?<!\.)\.$|\\+$")
UNNEEDED_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
UNNEEDED_BRACES = re.compile(r"(?<=[\^_])\{(\w)\}")


def singular(word: str) -> set[str]:
    word = word.lower()
    return {word, word.removesuffix("s"), word.removesuffix("es")}


def is_measure(word: str) -> bool:
    return word in SYMBOLS or bool(singular(word) & MEASURES)


def is_unit(text: str, power: str = "") -> bool:
    """Such as `cm`, `square feet`, `(meters per second)`, `apples`. Any other word may change the
    value before it: `thousand`, `squared`, `or 43`, `p.m.`"""
    *others, last = POWERS_AND_SIGNS.sub(" ", text).split() or [""]
    if others and last in AFTER_UNITS:
        *others, last, power = *others, last
    if power and last in NEVER_SQUARED:
        return False
    if not is_measure(last) and (power or not singular(last) & COUNTED):
        return False
    known = BEFORE_UNITS | COUNTED
    return all(is_measure(word) or singular(word) & known for word in others)


def drop_unit(match: re.Match) -> str:
    r"""Nothing for ` \text{ cm}^2` after a number; the text itself if it is more than a unit."""
    before = match.string[:match.start()]
    return "" if A_VALUE.search(before) and is_unit(match[1], match[2]) else match[0]


def strip_outside(text: str) -> str:
    """Remove one layer: punctuation at the ends, then a bare unit or braces around all."""
    text = TRAILING.sub("", text.strip(" ,;:"))
    unit, outer = BARE_UNIT.search(text), OUTER.match(text)
    if unit and is_unit(unit[1], unit[2]):
        return text[:unit.start()]
    if outer:
        return outer[1] or outer[2] or ""
    return text


@functools.lru_cache(4096)
def spell(text: str) -> str:
    """`text` in the one spelling: plain characters, then every rule in turn."""
    text = plain_characters(text)
    for each in REWRITES:
        text = each.apply(text)
    return text


@functools.lru_cache(4096)
def normalize(text: str) -> str:
    """`text` in the one spelling, without units."""
    text = UNIT_IN_TEXT.sub(drop_unit, spell(text))
    for _ in range(3):
        text = strip_outside(text)
    return text.removeprefix("+").strip()


def squeeze(text: str) -> str:
    """`text` without spaces and braces that do not matter, to compare strings."""
    single_spaces = " ".join(text.split())
    return UNNEEDED_BRACES.sub(r"\1", UNNEEDED_SPACE.sub("", single_spaces))
