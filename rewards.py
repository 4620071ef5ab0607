r"""The reward: is the boxed answer of a completion the same mathematics as the gold answer?

    python rewards.py FILE.jsonl --out verdicts.jsonl         # one {"gold": ..., "completion": ...} per line
    python rewards.py --gold '\frac12' --completion '\boxed{1/2}'  # one verdict, explained step by step

1. `extract_answer` takes the last closed box. Text outside boxes never counts.
2. `decide` settles most pairs in the parent, without sympy: equal strings, equal fractions, equal words. What
   the guards against known false accepts leave over is a pair of LaTeX strings.
3. `judge` lets math-verify compare that pair, in a worker process that `Grader` limits in CPU time, clock
   time and memory, and kills when it overruns. Completions are untrusted: nothing here runs them as code.

The reward is 1.0 or 0.0. Its status says why: correct, wrong, no_box (none, or the last one is not closed),
empty, unparseable (math-verify cannot read answer or gold), timeout, killed (out of memory, or died twice).
"""
import argparse
import contextlib
import functools
import itertools
import json
import os
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
import zlib
from collections import Counter, OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 1000        # longer answers are compared as strings only
MAX_DEPTH = 14          # of nested brackets; honest answers stay below 8
CACHE = 100_000         # verdicts kept, keyed by (gold, answer, style)
RECYCLE = 5000          # jobs after which a worker is replaced: sympy's caches grow


@dataclass(frozen=True)
class Verdict:
    """`reward` 1.0 or 0.0, `status` (see the top of the file), `seconds` it took to judge, `why` in words."""
    reward: float
    status: str
    seconds: float
    why: str = ""


# ---------------------------------------------------------------------------------------------- 1. the box

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(\{)|([-+]?\.?\d[^\s$\\]*|\\(?:d?frac|sqrt|pi)[^\s$]*))")
# What may stand between the boxes of one list: "x=\boxed{1}, y=\boxed{2}", "$\boxed{1}$ and $\boxed{2}$"
GAP = re.compile(r"(?:[\s,;.&$~*…]|\\[,;:! ()\[\]\\]|\\q?quad|\\[lc]?dots|\\text\{\s*,?\s*(?:and|or)?\s*\}"
                 r"|\band\b|\bor\b|\(?\b[a-z\d]\)|[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?\s*=)*")
LAST_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+|\s*\\times\s*10\^\{?-?\d+\}?)?")


def find_boxes(text: str) -> list[tuple[int, int, str | None]]:
    """(start, end, content) of the outermost boxes of `text`; content is None when the box is never closed.

    One pass with a stack, so that 20,000 open braces take linear time. Escaped braces do not count.
    """
    boxes, stack, closing, inside, found = list(BOX.finditer(text)), [], {}, 0, []
    for token in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, boxes[0].start()) if boxes else ():
        if token[0] == "{":
            stack.append(token.start())
        elif token[0] == "}" and stack:
            closing[stack.pop()] = token.start()
    for box in boxes:
        if box.start() >= inside:
            end = closing.get(box.start(1)) if box[1] else box.end()
            inside = box.end() if end is None else end + bool(box[1])
            found.append((box.start(), inside, box[2] or (None if end is None else text[box.end():end])))
    return found


def extract_answer(completion: str, style: str = "") -> str | None:
    r"""The last closed box of `completion`; boxes with only list punctuation between them are a list "1, 2".

    None: no box, or the last one is open (a truncated `\boxed{4` says nothing). "": the last box is empty.
    `style="minerva"` takes the last number of the text when there is no box, as the papers do on that set.
    """
    boxes = find_boxes(completion)
    if not boxes or boxes[-1][2] is None:
        numbers = LAST_NUMBER.findall(completion[-5000:]) if style == "minerva" and not boxes else []
        return numbers[-1].rstrip(",") if numbers else None
    parts = [boxes[-1][2].strip()]
    for (_, end, content), (start, _, _) in zip(boxes[-2::-1], boxes[:0:-1]):
        if not parts[0] or content is None or start - end > 80 or not GAP.fullmatch(completion, end, start):
            break
        if content.strip() and content.strip() not in parts:
            parts.append(content.strip())
    return ", ".join(reversed(parts))


# ----------------------------------------------------------------------------------- 2. one spelling for all

UNICODE = {ord(pair[0]): pair[1:] + " " * pair[-1].isalpha() for pair in (
    r"−- –- —- ×\times ·\cdot ⋅\cdot ∙\cdot ÷\div ⁄/ ∕/ ∶: ≤\le ≥\ge ⩽\le ⩾\ge ≠\ne ≈\approx ±\pm ∓\mp "
    r"√\sqrt π\pi θ\theta α\alpha β\beta γ\gamma λ\lambda μ\mu φ\varphi ϕ\phi ω\omega Ω\Omega ∞\infty "
    r"∪\cup ∩\cap ∈\in ∖\setminus ∅\emptyset ℝ\mathbb{R} ℤ\mathbb{Z} ℕ\mathbb{N} ℚ\mathbb{Q} ℂ\mathbb{C} "
    r"∛\sqrt[3] °^\circ ∠\angle …\ldots ′' ∣| ∨, 。. ⟨\langle ⟩\rangle ½\frac{1}{2} ⅓\frac{1}{3} ⅔\frac{2}{3} "
    r"¼\frac{1}{4} ¾\frac{3}{4} ⅕\frac{1}{5}").split()}
UNICODE |= dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"), "")         # of no width
NUMBER_WORDS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
                "fifteen sixteen seventeen eighteen nineteen twenty").split()
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|log|ln|exp|sqrt|pi|gcd|lcm"
POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
# `42 \text{ or 43}`, `\text{not } 42`, `10:30 \text{ p.m.}`, `2\text{x}`: this text is part of the answer
NOT_A_UNIT = re.compile(
    r"(?<!\^)(?<!\^-)\d|[=<>]|^\s*[abefijknopqrtuvwxyzBDEGIMOPQRSUXYZ]\s*$|(?i:\b(?:no|not|non|neither|nor|if"
    r"|maybe|either|otherwise|vs|but|except|wrong|guess|wait|first|is|was|more|less|[ap]\.?m)\b)")
UNIT = re.compile(r"(?<=[\w})])\s*(?:\\cdot|/)?\s*\\text\{([^{}]*)\}" + POWER
                  + r"(?=\s*(?:\.?$|[,;/]|\\cdot\s*\\text|\\text))")
BARE_UNIT = re.compile(
    r"(?<=[\d}])(?:\s*(cm|mm|km|kg|mg|ml|in|ft|yd|lbs?|oz|hrs?|mins?|secs?|mph|km/hr?|m/s|ft/s|rad|USD)"
    rf"|\s+((?!(?:{FUNCTIONS}|and|or|mod)\b)[A-Za-z]{{3,}}(?:[ ]+[A-Za-z]{{2,}})*)){POWER}\s*$")
OUTER = re.compile(r"^\s*(?:\{([^{}]*)\}|\(([^(),;]*)\))\s*$")

RULES = [(re.compile(pattern.replace("§", "(?![A-Za-z])")), new) for pattern, new in [  # §: a command ends
    # What is not seen (`\phantom{42}`), typography, separators of thousands, and one name for each command
    (r"\\[hv]?phantom\s*\{[^{}]*\}|\\(?:label|tag|[hv]space)\*?\{[^{}]*\}|\\color\{\w*\}", ""),
    (r"\\(?:displaystyle|limits|textstyle|hfill|left|right|[bB]igg?[lrm]?|[lL]arge|huge|small|rm|bf|it"
     r"|therefore|checkmark)§\.?|^\s*(?:=|\\approx)", ""),
    (r"\\overline(?=\s*\{[A-Z]{2}\})|\\hat(?=\s*\{[ijk]\})|\\(?:boxed|fbox|textcolor\{\w*\}|underline"
     r"|ensuremath|math(?:bf|it|sf|cal)|boldsymbol|bm)(?=\s*\{)", ""),
    (r"(?<!\\)\\!\s*|(?<=\d)\{,\}(?=\d)|(?<!\\)\\[()\[\]]|\\\$|\$|[€£¥¢₹`“”\"]|\*\*", ""),
    (r"(?:(?<!\\)\\[,;: ]|\\(?:q?quad|thinspace|enspace)§|~|\s)+", " "),
    (r"\\(?:text(?:bf|it|rm|sf|up|normal)|math(?:rm|normal)|[mh]box|operatorname\*?)\s*(?=\{)", r"\\text"),
    (r"\\(?:text|math)rm\s+([A-Za-z])", r"\\text{\1}"), (r"\\[dtc](frac|binom)§", r"\\\1"),
    (r"\\([lg])eq?(?:q|slant)?§", r"\\\1e "), (r"<=", r"\\le "), (r">=", r"\\ge "), (r"\\equiv§|:=", "="),
    (r"\\neq§|\\not\s*=|!=", r"\\ne "), (r"\\varnothing", r"\\emptyset"), (r"\\l(?:or|and)§", ","),
    (r"\\lbrace§", r"\\{"), (r"\\rbrace§", r"\\}"), (r"\\langle", "("), (r"\\rangle", ")"),
    (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\(?\\([bp])mod§\s*\{?\s*(\w+)\s*\}?\)?", r"\\\1mod{\2}"), (r"\\bmod", r"\\mod "),
    (r"\\begin\{array\}\s*\{[^{}]*\}|\\begin\{[bp]?(?:small)?matrix\}", r"\\begin{pmatrix}"),
    (r"\\end\{(?:array|[bp]?(?:small)?matrix)\}", r"\\end{pmatrix}"),
    (r"(?<=\\\\)\s*\[[^\]]*\]|\\\\\s*(?=\\end\{)|[(\[]\s*(?=\\begin\{pm)|(?<=\\end\{pmatrix\})\s*[)\]]", ""),
    # Words: "the answer is 12", "2 \text{ and } 3", "\text{28 percent}", "10th", "five", 1-1/\mathrm{e}
    (r"(?i)(^\s*\\text\{|^)\s*(?:the |final |correct )*(?:answer|result|solution)s?\s*(?:is|are|:)\s*:?\s*"
     r"(?=\S)", r"\1"), (r"^\s*\\text\{[A-Za-z ]*(?:\bis|\bare|:)\s*\}\s*(?=\S)", ""),
    (r"\\text\{\s*([-+]?\d[\d.,]*)\s*([^{}\d]*)\}", r"\1\\text{\2}"),
    (r"\\text\{([^{}]*?),?\s*\b(?:and|or)\b\s*([^{}]*)\}", r"\\text{\1},\\text{\2}"),
    (r",?\s*(?<![A-Za-z\\])(?:and|or)§\s*,?", ","), (r"\\text\{\s*,?\s*\}", " "), (r",(?:\s*,)+", ","),
    (r"\\text\{\s*([ei]|[-+\d.,]+)\s*\}", r" \1 "), (rf"\\text\{{\s*({FUNCTIONS})\s*\}}", r"\\\1 "),
    (r"\\frac\{\\text\{([^{}]*)\}\}\{\\text\{([^{}]*)\}" + POWER + r"\}", r"\\text{\1/\2}"),
    (r"\\text\{\s*(?:\\?%|percent(?:age)?|pct)\s*\}|(?<=[\d}\s])(?:percent(?:age)?|pct)\b|\\?%", r"\\%"),
    (r"(?<=\d)(?: ?\^? ?\{? ?\\text\{\s*(?:st|nd|rd|th)\s*\} ?\}?|(?:st|nd|rd|th)\b)", ""),
    (r"(?i)(?<![A-Za-z\\])(?:infinity|\\text\{\s*infinity\s*\}|inf)§", r"\\infty "),
    (r"\+\s*\\infty", r"\\infty"),
    (r"\\text\{([^{}]*=[^{}]*)\}", r"\1"), (r"(?<=\d)\s*(?:\\text\{\s*to\s*\}|\bto\b)\s*(?=\d)", ":"),
    (r"\s*(?:\\text\{\s*)?\(?\b(?:in )?base (\d+)\)?\s*\}?", r"_{\1}"),
    (rf"(?i)(?:^|\\text\{{|(?<=_)\{{)\s*({'|'.join(NUMBER_WORDS)})\s*(?:\}}|$)",
     lambda m: str(NUMBER_WORDS.index(m[1].lower()))),
    # Numbers: 1\ 000 and 1,234/2, 5 1/2, .5, 6\cdot10^3, 4.5e33, 52_{10}
    (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])", lambda m: m[0].replace(" ", "")),
    (r"(?<![\d.,(\[])(?<!\\\{)[1-9]\d{0,2}(?:,\d{3})+(?!\d|\s*[,)\]]|\\\})", lambda m: m[0].replace(",", "")),
    (r"(?<![A-Za-z\\\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\d.])\.(?=\d)", "0."), (r"(?<![\w.}])(\d+)/(\d+) (?=[A-Za-z\\(])", r"\\frac{\1}{\2} "),
    (r"(?<=\d)\s*(?:\*|\\cdot|\\times|x)\s*10\s*\^\s*[({]?\s*(-?\d+)\s*[)}]?", r"\\times 10^{\1}"),
    (r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\d.A-Za-z])", r"\1\\times 10^{\2}"),
    (r"^\(?(\d+)\)?\s*_\s*\{?10\}?$", r"\1"),
    # Calculator notation and missing braces: 2*sqrt(3), x^(1/3), \frac43, \sqrt3, \frac\pi2
    (rf"(?<![A-Za-z\\])({FUNCTIONS})§", r"\\\1 "), (r"\*", r"\\cdot "),
    (r"\^\s*\(((?:[^()]|\([^()]*\))*)\)", r"^{\1}"), (r"\\sqrt\s*\(((?:[^()]|\([^()]*\))*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*(\[[^\]]*\])?\s*(\d+|[A-Za-z])", r"\\sqrt\1{\2}"),
    (r"\\frac\s*([\dA-Za-z]|\\pi)", r"\\frac{\1}"),
    (r"\\frac\s*(\{(?:[^{}]|\{[^{}]*\})*\})\s*([\dA-Za-z]|\\pi)", r"\\frac\1{\2}"),
    # Degrees (radians inside trigonometry), set builders \{x \mid x>3\}, memberships x \in [0,1], all of R
    (r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d+)\s*\^\s*\{?\s*\\circ\s*\}?\s*[)}]?",
     r"\\\1(\\frac{\2\\pi}{180})"),
    (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?\s*(?:\\text\{\s*[CF]\s*\}|[CF]\b)?|\\degree§", ""),
    (r"^\s*\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:)(.*)\\\}\s*$", r"\1"),
    (r"^\s*[A-Za-z]\s*\\in§\s*", ""),
    (r"(?:, ?)?(?:\\text\{[^{}]*\} ?|for |where )?\b[a-z]\s*\\in\s*\\mathbb\{[ZN]\}\s*$", ""),
    (r"(?i)^\s*(?:\\text\{)?\s*all real(?: number)?s\s*\}?\s*$|^\s*\(\s*-\s*\\infty\s*,\s*\\infty\s*\)\s*$",
     r"\\mathbb{R}"),
]]


def _drop_unit(m: re.Match) -> str:
    """Nothing for ` \\text{ cm}^2` after a number; the text itself where it says more than a unit."""
    return m[0] if NOT_A_UNIT.search(m[1]) or not re.search(r"\d|\\(?!text)", m.string[:m.start()]) else ""


@functools.lru_cache(4096)
def normalize(text: str) -> str:
    r"""One spelling for what looks the same: `10{,}080\,\text{cm}^2.` and `10,080` both become `10080`."""
    for run, mark in (("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "^"), ("₀₁₂₃₄₅₆₇₈₉", "_")):
        text = re.sub(f"[{run}]+", lambda m: mark + "{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = unicodedata.normalize("NFKC", text.translate(UNICODE)).translate(UNICODE)
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)                               # commands escaped twice
    for pattern, new in RULES:
        text = pattern.sub(new, text)
    text = UNIT.sub(_drop_unit, text)
    for _ in range(3):
        text = re.sub(r"(?<!\.)\.$|\\+$", "", text.strip(" ,;:"))
        unit, outer = BARE_UNIT.search(text), OUTER.match(text)
        if unit and not NOT_A_UNIT.search(unit[1] or unit[2]):
            text = text[:unit.start()]
        elif outer:
            text = outer[1] or outer[2] or ""
    return text.removeprefix("+").strip()


def squeeze(text: str) -> str:
    """`text` without the spaces and braces that do not matter, to compare strings."""
    return re.sub(r"(?<=[\^_])\{(\w)\}", r"\1", re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text))


# ------------------------------------------------------------------------------------------ 3. the fast path

DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
EXACT = re.compile(rf"(-?)(?:(\d*)\\frac\{{(-?{DECIMAL})\}}\{{(-?{DECIMAL})\}}|({DECIMAL})(?:/({DECIMAL}))?"
                   r"(?:\\times10\^\{(-?\d{1,3})\})?|(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\})(\\%)?")


@functools.lru_cache(4096)                                       # a gold is compared with many answers, and they repeat
def exact(text: str) -> tuple[Fraction, bool, bool] | None:
    r"""(value, has a decimal point, is a percentage) of a fraction, mixed number, `0.1\overline{6}`..."""
    m = EXACT.fullmatch(squeeze(text))
    if not m or Fraction(m[4] or m[6] or 1) == 0:
        return None
    sign, whole, top, bottom, number, divisor, power, integer, head, period, percent = m.groups()
    if top:
        value = Fraction(whole or 0) + Fraction(top) / Fraction(bottom)
    elif period:
        tail = Fraction(head or 0) + Fraction(int(period), 10 ** len(period) - 1)
        value = Fraction(integer or 0) + tail / 10 ** len(head)
    else:
        value = Fraction(number) / Fraction(divisor or 1) * Fraction(10) ** int(power or 0)
    return (-value if sign else value), "." in (number or ""), bool(percent)


def equal_numbers(gold: tuple, answer: tuple, style: str = "") -> bool:
    """Equal, or equal once rounded to 6 decimals as in math-verify, but never so for tiny or whole numbers.

    10% is 10 or 0.1, but 0.5 is not 0.5%. "minerva" is Qwen's rule: 1e-4 relative, x100 and /100 allowed.
    """
    (g, g_decimal, g_percent), (a, a_decimal, a_percent) = gold, answer
    hundredth = Fraction(1, 100)
    if style == "minerva":
        return any(abs(a * scale - g) <= abs(g) / 10 ** 4 for scale in (1, 100, hundredth))
    scales = (1,) if g_percent == a_percent else (1, 100) if g_percent else (1, hundredth)[abs(g) < 1:]
    rounded = (g_decimal or a_decimal) and g.denominator > 1
    return any(a * scale == g or rounded and round(a * scale, 6) == round(g, 6)
               and abs(a * scale - g) <= abs(g) / 10 ** 4 for scale in scales)


def compare_numbers(gold: str, parts: list[str], style: str) -> tuple[str, str, str, list[str]]:
    equal = all(equal_numbers(exact(gold), exact(part), style) for part in parts)
    return "correct" if equal else "wrong", "compared as exact fractions", gold, parts


def words(text: str) -> str | None:
    r"""The lower-case words of a textual answer, sorted when they form a list; None for mathematics.

    `\text{(C)}`, `(C)` and `C.` are "c"; `\text{an ellipse}` is "ellipse". Other bare words need three
    letters, since `AB` and `ab` may be products.
    """
    plain = re.sub(r"\\text\{([^{}]*)\}", lambda m: " " + re.sub(r"[()]", " ", m[1]) + " ", text)
    parts = [re.sub(r"^\((.*)\)$", r"\1", part.strip(" .:")) for part in plain.split(",")]
    textual = "\\text" in text or re.search(r"[A-Za-z]{3}|^[Nn]o$", plain)
    if not all(re.fullmatch(r"[A-Za-z][A-Za-z '\-]*\.?" if textual else "[A-J]", part) for part in parts):
        return None
    parts = [re.sub(r"^(?:an?|the|option|choice) ", "", " ".join(part.lower().split())) for part in parts]
    return ",".join(sorted(parts))


def split_top(text: str, separators: str) -> list[str]:
    """Split at separators outside all brackets; `=` of `<=`, `>=`, `!=`, `:=` does not count."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c in separators and depth == 0 and text[max(i - 1, 0)] not in "<>!:=":
            parts.append(text[start:i].strip())
            start = i + 1
    return parts + [text[start:].strip()]


def is_label(text: str, plain: bool) -> bool:
    r"""A name such as `x`, `f(2)`, `\angle ABC`; unless `plain`, also `m+n`. Never a claim about numbers."""
    text = re.sub(r"_\{[^{}]*\}|_\w|\\text\{[^{}]*\}|\\(?:angle|triangle|vec|overline|hat|mathbb)(?![A-Za-z])"
                  r"|\^\{?-1\}?", "n", text)
    text = re.sub(r"(?<=[A-Za-z'])\s*\([^()]*\)", "", text)
    computed = r"[-+*/^]|\\(?:cdot|times|frac|div|lim|sum|int|" + FUNCTIONS + r")(?![A-Za-z])"
    claim = r"\d|[<>]|\\(?:le|ge|ne|approx|infty|pi)(?![A-Za-z])" + ("|" + computed if plain else "")
    return bool(re.search("[A-Za-z]", text)) and not re.search(claim, text)


def unlabel(text: str) -> tuple[list[str], list[str]] | None:
    """`x=1, y=2` -> (["x", "y"], ["1", "2"]); None if an element is more than one label and a value."""
    names, values = [], []
    for element in split_top(text, ",;"):
        *left, value = split_top(element, "=")
        if len(left) > 1 or left and not is_label(left[0], plain=True):
            return None
        names += [squeeze(re.sub(r"_\{?\w+\}?", "", name)) for name in left]
        values.append(value)
    return names, values


def reduce_equations(gold: str, answer: str) -> tuple[str, list[str]]:
    r"""Take labels off. The answer becomes parts that must all equal the gold: math-verify looks only at the
    last one and would take `41=42` and `1=2=42` for 42, and `x^2-1=0` for 0."""
    g, a = unlabel(gold), unlabel(answer)
    if "=" not in gold:
        if a and a[0] and len(a[1]) > 1:                                              # x=1, y=2 for (1,2)
            values = ", ".join(a[1])
            return gold, [f"({values})" if gold.startswith("(") and len(set(a[0])) > 1 else values]
        parts, zero = split_top(answer, "="), exact(gold) is not None and exact(gold)[0] == 0
        kept = [part for part in parts[:-1] if not is_label(part, zero)]
        return gold, kept if kept and is_label(parts[-1], True) else kept + parts[-1:]     # 5 = x
    if g and a and "=" not in answer:
        values = ", ".join(g[1])
        return f"({values})" if len(set(g[0])) > 1 else values, [answer]
    one_name = g and a and len(set(g[0])) == len(set(a[0])) == 1
    if one_name and (g[0][0] == a[0][0] or max(map(len, g[0] + a[0])) > 1):                # x=5 is not y=5
        return ", ".join(g[1]), [", ".join(a[1])]
    return gold, [answer]


def expand_signs(text: str) -> str:
    r"""`\frac{-1\pm\sqrt5}{2}` -> both values as a list; math-verify reads `\pm` only between whole terms."""
    if not re.search(r"\\pm(?![a-z])", text):
        return text
    both = [[re.sub(r"\\(pm|mp)(?![a-z])", lambda m: signs[m[1] == "mp"], e).removeprefix("+").strip()
             for signs in ("+-", "-+")] for e in split_top(text, ",;")]
    return ", ".join(e for pair in both for e in dict.fromkeys(pair))


STRING_ONLY = re.compile(r"\\[lcdv]?dots|\.\.\.|\d\)?\s*_|^\d+:0\d|\\pmod")      # 1,2,\ldots,n   52_8   10:05
BOMB = re.compile(r"\d{401}|\d{5,}\s*[)}]*\s*!|!\s*[)}]*\s*!|\^\s*\{?\s*\d{7}|(?:\^[\s{(]*\d+[\s})]*){3}"
                  r"|\\(?:binom|Gamma)[\s{(]*(?:\d{5}|\d+\^)")
CHOICE = re.compile(r"(?:\\text\{\s*\(?|\()([A-J])\)?[.:]?\s*(?:\)|\}|\)\})[.:]?\s*(?=[\d\\-])(.+)")
SET, TUPLE = re.compile(r"\\\{\s*[^(\s]"), re.compile(r"\([^(),]*,[^(),]*\)")


def is_bomb(text: str) -> bool:
    """Cheap signs of an answer that would only run into the limits: towers, factorials, deep nesting."""
    depth = itertools.accumulate((c in "([{") - (c in ")]}") for c in text)
    return bool(BOMB.search(text)) or max(depth, default=0) > MAX_DEPTH or text.count(",") > 200


def decide(gold: str, answer: str, style: str = "") -> tuple[str | None, str, str, list[str]]:
    """(status, why, gold, parts). Status None: math-verify must find every one of `parts` equal to `gold`."""
    if squeeze(gold) == squeeze(answer):
        return "correct", "the same string", gold, [answer]
    if len(gold) + len(answer) < 50 and exact(gold) and exact(answer):
        return compare_numbers(gold, [answer], style)
    if max(len(gold), len(answer)) > MAX_CHARS:
        return "unparseable", f"longer than {MAX_CHARS} characters, so compared as a string", gold, [answer]
    gold, answer = normalize(gold), normalize(answer)
    if ("\\pmod" in gold) != ("\\pmod" in answer):
        gold, answer = (re.sub(r"\s*\\pmod\{\w+\}", "", text) for text in (gold, answer))
    choice = CHOICE.match(answer)                                # \textbf{(C)}\ 42 states letter and value
    if choice:
        answer = choice[1] if re.fullmatch(r"(?:\\text\{)?\(?[A-J]\)?\}?", gold) else choice[2]
    if not answer or not gold:
        return "empty" if gold else "unparseable", "nothing is left of it", gold, [answer]
    if squeeze(gold) == squeeze(answer):
        return "correct", "the same after normalization", gold, [answer]
    if STRING_ONLY.search(gold) or STRING_ONLY.search(answer):
        equal = len({re.sub(r"[{}()\s]", "", text).lower() for text in (gold, answer)}) == 1
        return "correct" if equal else "wrong", "number bases and dots are compared as text", gold, [answer]
    if SET.match(gold) and TUPLE.fullmatch(answer) or SET.match(answer) and TUPLE.fullmatch(gold):
        return "wrong", "a set is no tuple and no interval", gold, [answer]
    gold, answer = (re.sub(r"^\\\{((?:(?!\\[{}]).)+)\\\}$", r"\1", text).strip() for text in (gold, answer))
    gold_words, is_text = words(gold), "\\text" in gold
    as_text = f"\\text{{{answer}}}" if is_text and "\\" not in answer else answer
    if gold_words and gold_words == words(as_text):
        return "correct", "the same words", gold, [answer]
    if gold_words and (is_text or re.search(r"[A-Za-z]{4}|[A-Za-z]{2} +[A-Za-z]{2}", gold)):
        return "wrong", "the gold is a word, compared as text", gold, [answer]
    gold, parts = reduce_equations(expand_signs(gold), expand_signs(answer))
    if exact(gold):
        parts = [re.sub(r"(?<=\d)\s*[msghLNJWVAK](?:\^\{?[23]\}?)?$", "", part) for part in parts]   # 5 m
        if all(map(exact, parts)):
            return compare_numbers(gold, parts, style)
    if any(map(is_bomb, parts)):
        return "unparseable", "too large to parse", gold, parts
    return None, "not settled by strings, fractions or words", gold, parts


# ------------------------------------------------------------- 4. math-verify, in a worker process of its own

@functools.lru_cache(1024)
def parse(latex: str):
    """LaTeX -> sympy with math-verify's parser, keeping the case of variables (3r^2 is not 3R^2).

    "x<1, x>3" becomes the union of both, "x>1, x<3" the intersection. Raises whatever the parser raises.
    """
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify.grader import is_relation, should_treat_as_complex
    parsed = latex2sympy(latex, is_real=not should_treat_as_complex(latex), normalization_config=None,
                         conversion_config=ConversionConfig(lowercase_symbols=False))
    if isinstance(parsed, sympy.FiniteSet) and all(is_relation(x) and not x.has(sympy.Eq) for x in parsed):
        sets = [x.as_set() for x in parsed]
        return sympy.Union(*sets) if sympy.Union(*sets) != sympy.S.Reals else sympy.Intersection(*sets)
    return parsed


def sampled(expression) -> list:
    """`expression` at three fixed positive points, 30 digits, with `i` the imaginary unit and exact zeros."""
    import sympy
    points, names = [], sorted(expression.free_symbols, key=str)
    for k in range(3 if names else 1):
        at = {s: sympy.Rational(1 + zlib.crc32(f"{s.name}{k}".encode()) % 2000, 997) for s in names}
        at |= {s: sympy.I for s in names if s.name == "i"}
        value = expression.subs(at).doit().evalf(30)
        floats = value.atoms(sympy.Float)
        points.append(sympy.S.Zero if floats and all(f._prec == 1 for f in floats) else value)
    return points


def same_values(gold, answer, tolerance: float, scale=1) -> bool | None:
    """Relative agreement at every point (math-verify's is absolute); None where it cannot be computed."""
    try:
        for g, a in zip(sampled(gold * scale), sampled(answer)):
            if not (g.is_finite and a.is_finite) or g != a and not \
                    bool(abs(g - a).evalf(30) <= tolerance * max(abs(g).evalf(30), abs(a).evalf(30))):
                return False
        return True
    except MemoryError:
        raise
    except Exception:
        return None


def same(gold, answer, style: str = "") -> bool:
    """math-verify's `verify` on two parsed answers, with guards against false accepts and second chances."""
    import sympy
    from math_verify import verify
    from math_verify.grader import is_relation
    if gold == answer:
        return not gold.has(sympy.nan, sympy.zoo)
    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        rest = list(answer.args)                   # verify pairs the sorted elements; try every pair instead
        for g in gold.args:
            match = next((a for a in rest if same(g, a)), None)
            if match is None:
                return False
            rest.remove(match)
        return not rest
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        if not gold.free_symbols:                    # verify calls all equations without a solution equal
            return same(gold.lhs, answer.lhs) and same(gold.rhs, answer.rhs)
        ratios = sampled((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))                 # 2x^2=8 is x^2=4
        proportional = ratios[0].is_finite and all(abs(r - ratios[0]) < 1e-12 * abs(r) for r in ratios)
        return bool(proportional or verify(gold, answer, timeout_seconds=None) and sympy.solve(gold))
    numbers = isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)
    if numbers and style == "minerva" and not (gold + answer).free_symbols:
        return any(same_values(gold, answer, 1e-4, sympy.Rational(*s)) for s in ((1, 1), (100, 1), (1, 100)))
    if numbers and not (gold + answer).has(sympy.UnevaluatedExpr):                         # not a percentage
        tolerance = 1e-4 if (gold + answer).has(sympy.Float) else 1e-10
        if same_values(gold, answer, tolerance) is False:                               # 10^-20 is not 10^-30
            return False
    if verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None):
        return all(same(*pair) for pair in zip(entries(gold), entries(answer)))
    if is_relation(gold) and is_relation(answer) and gold.free_symbols == answer.free_symbols:
        return gold.as_set() == answer.as_set()                                            # |x|<3 and -3<x<3
    numbers = numbers and not (gold + answer).has(sympy.Abs)
    return bool(numbers and same_values(gold, answer, 1e-12))                              # (1+i)^2 is 2i


def entries(parsed) -> list:
    """What a tuple, matrix or interval holds; nothing for all else."""
    import sympy
    if isinstance(parsed, sympy.Interval):
        return [parsed.start, parsed.end]
    return list(parsed) if isinstance(parsed, (sympy.Tuple, sympy.MatrixBase)) else []


def judge(gold: str, parts: list[str], style: str = "") -> tuple[str, str]:
    """(status, why): is every part equal to `gold`?"""
    try:
        g, answers = parse(gold), [parse(part) for part in parts]
        unequal = next((a for a in answers if not same(g, a, style)), None)
    except MemoryError:
        return "killed", "out of memory"
    except Exception as error:
        return "unparseable", f"{type(error).__name__}: not read as mathematics"
    if unequal is not None:
        return "wrong", f"math-verify: {g} is not {unequal}"
    return "correct", f"math-verify: {g} is {', '.join(map(str, answers))}"


def work(cpu_seconds: float, memory: int) -> None:
    """The worker: jobs in on stdin, verdicts out on stdout, a JSON value per line. Limits precede sympy.

    When a job runs out of CPU time, SIGPROF's default action ends the process at once, even inside a long C
    call. CPU time, unlike the clock, gives the same verdict on a busy machine.
    """
    replies, requests, null = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0)), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)                                    # nothing else can write into the protocol
    sys.path.pop(0)                                              # the folder of this script
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        import math_verify  # noqa: F401
        judge("x<5", ["(1,5)"])                                  # loads what sympy loads late
        hello = "ready"
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))        # from here on it cannot write a file
    except Exception as error:
        hello = f"{type(error).__name__}: {error}"
    print(json.dumps(hello), file=replies, flush=True)
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        status, why = judge(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps((status, why[:500])), file=replies, flush=True)


class Worker:
    """A child process running `work`: started with a fresh interpreter (never forked from a process that
    holds CUDA), in an empty folder, without the environment's secrets. It ends when its parent does, however
    that happens: its input ends, or the CPU limit stops what it was doing."""

    def __init__(self, timeout: float, memory_gb: float):
        self.folder = tempfile.TemporaryDirectory(prefix="rewards-")
        self.timeout, self.hello, self.jobs, self.since = timeout, "", 0, 0.0
        names = "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME"
        environment = {name: os.environ[name] for name in names if name in os.environ}
        limits = [str(timeout * 3 / 8), str(int(memory_gb * 2 ** 30))]
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", *limits], text=True, cwd=self.folder.name,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,                              # the terminal's Ctrl-C is for the parent, which still needs it
            env=environment | {"PYTHONHASHSEED": "0", "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"})

    def _cpu(self) -> float:
        """CPU seconds the process has used (Linux derives a clock from the process id); nan if unknown."""
        try:
            return time.clock_gettime((~self.process.pid << 3) | 2)
        except OSError:
            return float("nan")

    def _receive(self, timeout: float):
        """The next line from the process, None if it died. TimeoutError past the clock or the CPU limit."""
        poll, line, start = select.poll(), None, self._cpu()
        poll.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        for _ in range(3):                                       # more time if others took most of the CPU
            if poll.poll(timeout * 1000):
                line = self.process.stdout.readline()
            if line is not None or not self._cpu() - start < timeout * 3 / 16:
                break
        if line is None or not line.endswith("\n") and self.process.wait() == -signal.SIGPROF:
            raise TimeoutError
        return json.loads(line or "null")

    def start(self) -> None:
        """Wait until math-verify is loaded; RuntimeError if it cannot be."""
        self.hello = self.hello or self._receive(120) or "died"
        if self.hello not in ("ready", "died"):
            raise RuntimeError(f"the verifier cannot start ({self.hello}): pip install -r requirements.txt")

    def ask(self, job: tuple) -> tuple[str, str]:
        """(status, why) of one job; status "killed" when the process has died."""
        try:
            self.start()                                         # does not count against the limits
            self.jobs, self.since = self.jobs + 1, time.perf_counter()
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            return tuple(self._receive(self.timeout) or ("killed", "the worker died"))
        except TimeoutError:
            return "timeout", "past the time limit"
        except (OSError, ValueError):
            return "killed", "the worker died"

    def kill(self) -> None:
        with contextlib.suppress(OSError), self.process:
            self.process.kill()
        self.folder.cleanup()


class Grader:
    """Grades completions on `workers` processes; any thread may call it. Use it in a `with`, or `close` it.

    timeout: wall-clock seconds an answer may take in a worker. CPU time is limited to 3/8 of that (honest
    answers take up to 0.3 s), and a worker that others starve gets up to three times the clock time, so that
    a busy machine gives the same verdicts. memory_gb: address space of a worker.
    """

    def __init__(self, workers: int = 2, timeout: float = 4.0, memory_gb: float = 1.0):
        self.limits, self.closed, self.lock = (timeout, memory_gb), False, threading.Lock()
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.cache: OrderedDict[tuple, Future] = OrderedDict()
        self.pending: dict = {}
        self.workers = [Worker(*self.limits) for _ in range(workers)]
        self.threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(workers)]
        for thread in self.threads:
            thread.start()

    def submit(self, key, gold: str, completion: str, style: str = "") -> None:
        """Start grading and return at once. `key`: any hashable, handed to `result` later."""
        start, answer = time.perf_counter(), extract_answer(completion, style)
        status, why = ("no_box", "no closed box at the end") if answer is None else ("empty", "an empty box")
        if answer:
            try:
                status, why, gold, parts = decide(gold, answer, style)
            except Exception as error:                          # a strange answer must not end a training run
                status, why = "unparseable", f"{type(error).__name__} in the fast path"
        future = Future() if status else self._judge((gold, tuple(parts), style))
        if status:
            future.set_result(Verdict(float(status == "correct"), status, time.perf_counter() - start, why))
        self.pending[key] = future

    def _judge(self, question: tuple) -> Future:
        """The verdict of a worker, cached if the same question has been asked before, time-outs included."""
        with self.lock:
            if question not in self.cache:
                self.cache[question] = Future()
                self.jobs.put((self.cache[question], question))
            self.cache.move_to_end(question)
            if len(self.cache) > CACHE:
                self.cache.popitem(last=False)
            return self.cache[question]

    def result(self, key) -> Verdict:
        """Wait for the verdict of `key`, and forget the key."""
        return self.pending.pop(key).result()

    def grade(self, pairs: list[tuple[str, str]], style: str = "") -> list[Verdict]:
        """The verdicts of (gold, completion) pairs, in their order."""
        keys = [object() for _ in pairs]
        for key, (gold, completion) in zip(keys, pairs):
            self.submit(key, gold, completion, style)
        return [self.result(key) for key in keys]

    def check_golds(self, golds: list[str]) -> list[bool]:
        """For each gold: can it be graded? Words, numbers with a base and the like can, as strings; any other
        gold must parse: one that does not scores with the identical string only."""
        checked = []
        for gold in golds:
            status, _, left, _ = decide(gold, "x")
            asked = not status and not exact(left)
            checked.append(self._judge((left, (left,), "")) if asked else status or "wrong")
        checked = [known if isinstance(known, str) else known.result().status for known in checked]
        return [status in ("correct", "wrong") for status in checked]

    def _serve(self, i: int) -> None:
        """The life of one thread: it owns worker `i`, and replaces it when it overran, died or wore out."""
        while True:
            with contextlib.suppress(Exception):                 # `ask` reports it
                self.workers[i].start()                          # a worker takes a job only when it can begin
            future, question = self.jobs.get()
            if future is None:
                return
            for _ in range(2):                                 # killed from outside? ask a fresh worker again
                worker, start = self.workers[i], time.perf_counter()
                try:
                    status, why = worker.ask(question)
                    seconds = time.perf_counter() - (worker.since or start)
                    verdict = Verdict(float(status == "correct"), status, seconds, why)
                except Exception as error:
                    status, verdict = "killed", error
                if status in ("timeout", "killed") or worker.jobs >= RECYCLE:
                    worker.kill()
                    self.workers[i] = worker if self.closed else Worker(*self.limits)
                if status != "killed" or self.closed:
                    break
            if status == "killed":
                with self.lock:
                    self.cache.pop(question, None)            # perhaps not its doing: judge it anew next time
            (future.set_exception if isinstance(verdict, Exception) else future.set_result)(verdict)

    def close(self) -> None:
        """End the workers. Verdicts still under way become "killed"."""
        self.closed = True
        for worker in self.workers:
            worker.process.kill()
            self.jobs.put((None, None))
        for thread in self.threads:
            thread.join(10)
        for worker in self.workers:
            worker.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# -------------------------------------------------------------------------------------------- 5. command line

def explain(gold: str, completion: str, style: str = "") -> None:
    """Print each step from the completion to the verdict."""
    answer = extract_answer(completion, style)
    print("box        ", repr(answer) if answer else "none that is closed" if answer is None else "empty")
    if answer:
        status, why, left, parts = decide(gold, answer, style)
        print(f"gold        {gold!r} -> {normalize(gold)!r}\nanswer      {answer!r} -> {normalize(answer)!r}")
        print(f"fast path   {status or 'undecided'}: {why}")
        print("compared   ", repr(left), "with", " and with ".join(map(repr, parts)))
    with Grader(workers=1) as grader:
        verdict = grader.grade([(gold, completion)], style)[0]
    print(f"verdict     {verdict.status}, reward {verdict.reward}, {verdict.seconds:.4f} s: {verdict.why}")


def read_rows(path: str) -> list[dict]:
    """The rows of a JSON Lines file; SystemExit names the file and the line that cannot be used."""
    rows = []
    try:
        for n, line in enumerate(open(path, encoding="utf-8"), 1):
            row = json.loads(line) if line.strip() else {"gold": "", "completion": ""}
            if not isinstance(row, dict) or {type(row.get(k)) for k in ("gold", "completion")} != {str}:
                raise SystemExit(f'{path} line {n}: every row needs the strings "gold" and "completion"')
            rows += [row] if line.strip() else []
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"cannot read {path}: {error}")
    except json.JSONDecodeError as error:
        raise SystemExit(f"{path} line {n} is not JSON ({error}): write one object per line")
    return rows or sys.exit(f"{path} has no rows")


def grade_file(path: str, out: str | None, workers: int, style: str) -> None:
    """Grade a file, write a verdict per line to `out`, print a summary."""
    rows, start = read_rows(path), time.perf_counter()
    with Grader(workers) as grader:
        bad_golds = grader.check_golds([row["gold"] for row in rows]).count(False)
        graded = list(zip(rows, grader.grade([(row["gold"], row["completion"]) for row in rows], style)))
    if out:
        with open(out, "w", encoding="utf-8") as file:
            for n, (row, v) in enumerate(graded):
                line = {"id": row.get("id", n), "reward": v.reward, "status": v.status, "seconds": v.seconds}
                file.write(json.dumps(line) + "\n")
    seconds = sorted(v.seconds for _, v in graded)
    print(f"{len(rows)} graded in {time.perf_counter() - start:.1f} s; golds that do not parse: {bad_golds}")
    print("status     ", ", ".join(f"{s} {n}" for s, n in Counter(v.status for _, v in graded).most_common()))
    print(f"seconds     median {seconds[len(seconds) // 2]:.5f}, p99 {seconds[int(len(seconds) * .99)]:.3f}, "
          f"slowest {seconds[-1]:.3f}")
    known = [(row, v) for row, v in graded if row.get("expected") is not None]
    for name, reward in (("false accept", 1.0), ("false reject", 0.0)) if known else ():
        wrong = [(row, v) for row, v in known if v.reward == reward != float(row["expected"])]
        print(f"{name}s {len(wrong)} of {len(known)}")
        for row, v in wrong[:20]:
            tail = row["completion"][-80:]
            print(f"  gold {row['gold'][:80]!r}, completion ...{tail!r}: {v.status}, {v.why[:120]}")


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return work(float(sys.argv[2]), int(sys.argv[3]))
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("file", nargs="?", help='rows of "gold", "completion", optional "expected", "id"')
    parser.add_argument("--out", help="write the verdicts there, one per line")
    parser.add_argument("--gold", help="explain one verdict: the gold answer")
    parser.add_argument("--completion", help="explain one verdict: the completion")
    parser.add_argument("--style", default="", choices=["", "minerva"], help="minerva: 1e-4, x100, /100")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if args.gold is not None and args.completion is not None:
        explain(args.gold, args.completion, args.style)
    elif args.file:
        grade_file(args.file, args.out, args.workers, args.style)
    else:
        parser.error("give a file, or both --gold and --completion")


if __name__ == "__main__":
    main()
