r"""Decides whether two answers are equal. math-verify's parser reads them, and sympy compares.

Lists, tuples and relations are split here, because math-verify ignores the order of a list, the
variable of a relation, and the difference of "and" and "or". Exact expressions must be equal
exactly (2^100 - 1 is not 2^100), at fixed points if they have variables. A tolerance is used only
if one has a decimal point, or in Minerva's style. Only workers import this: sympy may take long.
"""
import functools
import re
import zlib

import sympy
from antlr4 import PredictionMode
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean

from verifier.answers import TUPLE, split_top

INDEXED = re.compile(r"(?<![A-Za-z\\])([EeI])(?=\s*_)")  # with an index it is no constant
RENAMED = {"E": r"\Xi", "e": r"\xi", "I": r"\Upsilon"}


def judge(gold: str, parts: list[str], style: str = "") -> tuple[str, str]:
    """(status, why): whether every part equals `gold`."""
    try:
        g, answers = read(gold), [read(part) for part in parts]
        unequal = next((a for a in answers if not same(g, a, style)), None)
        if unequal is not None:
            return "wrong", f"math-verify: {g} is not {unequal}"[:500]
        return "correct", f"math-verify: {g} is {', '.join(map(str, answers))}"[:500]
    except MemoryError:
        raise
    except Exception as error:
        return "unparseable", f"{type(error).__name__}: not read as mathematics"


class HastyParser(_Latex2Sympy):
    """Parses without context, which is faster and gives the same tree or raises."""

    def create_parser(self, latex: str):
        parser = super().create_parser(latex)
        parser._interp.predictionMode = PredictionMode.SLL
        return parser


def from_latex(latex: str):
    """The sympy object of one expression. Case matters, so 3r^2 is not 3R^2."""
    latex = INDEXED.sub(lambda match: RENAMED[match[1]], latex)
    how = dict(is_real=not should_treat_as_complex(latex),
               config=ConversionConfig(lowercase_symbols=False))
    try:
        return HastyParser(**how).parse(latex)
    except Exception:
        return _Latex2Sympy(**how).parse(latex)


@functools.lru_cache(1024)
def read(text: str):
    """A sympy object, or a list of them if `text` has several elements.

    Tuples of any length become sympy's. "x<1, x>3" becomes one statement about x.
    """
    text = re.sub(r"^\{([^{}]*)\}$", r"\1", text)
    if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit():
        return sympy.Integer(text)  # most golds; the parser takes milliseconds
    for connective, join in (("or", sympy.Or), ("and", sympy.And)):
        parts = re.split(rf"\\l{connective}(?![A-Za-z])", text)
        if len(parts) > 1:
            return joined([read(part.strip()) for part in parts], join)
    elements, sides = split_top(text, ",;"), split_top(text, "=")
    if len(elements) > 1:
        return joined(list(map(read, elements)))
    if TUPLE.fullmatch(text):
        return sympy.Tuple(*map(read, split_top(text[1:-1], ",")))
    if len(sides) > 2:
        return [read(f"{sides[0]}={side}") for side in sides[1:]]
    parsed = from_latex(text)
    if isinstance(parsed, (sympy.Set, sympy.MatrixBase, sympy.MatrixExpr)):
        parsed = parsed.doit()
    chain = isinstance(parsed, sympy.And) and len(parsed.free_symbols) > 1  # a<b<c
    return list(parsed.args) if chain or isinstance(parsed, sympy.FiniteSet) else parsed


def joined(parts: list, join=None):
    """One relation if all are relations of one variable; otherwise the list of parts.

    Without "or", "x<1, x>3" is the union. For "x>1, x<3" this would be all numbers, so it is "and".
    """
    if not all(isinstance(part, Boolean) for part in parts):
        return sum((part if isinstance(part, list) else [part] for part in parts), [])
    symbols = set().union(*(part.free_symbols for part in parts))
    if join is sympy.Or and len(symbols) > 1:
        return sympy.Or(*parts, evaluate=False)
    if len(symbols) != 1 or not join and any(part.has(sympy.Eq) for part in parts):
        return parts
    either, both = (each(*parts, evaluate=False) for each in (sympy.Or, sympy.And))
    is_union = join is sympy.Or or not join and either.as_set() != sympy.S.Reals
    return either if is_union else both


# ---------------------------------------------------------------------------------- comparing
verified = functools.partial(verify, timeout_seconds=None)
NOT_SMOOTH = (sympy.Abs, sympy.Max, sympy.Min, sympy.sign, sympy.Piecewise, sympy.floor,
              sympy.ceiling, sympy.Mod)


def same(gold, answer, style: str = "") -> bool:
    """Whether two results of `read` are equal."""
    if isinstance(gold, list) or isinstance(answer, list):
        return isinstance(gold, list) and isinstance(answer, list) and same_lists(gold, answer)
    if gold == answer:
        return not gold.has(sympy.nan, sympy.zoo)
    if isinstance(gold, Boolean) and isinstance(answer, Boolean):
        return same_relations(gold, answer)
    if isinstance(gold, sympy.Tuple) and isinstance(answer, sympy.Tuple):
        return len(gold) == len(answer) and all(map(same, gold, answer))
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return gold.shape == answer.shape and all(map(same, gold, answer))
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return same_expressions(gold, answer, style)
    g, a = pieces(gold), pieces(answer)
    return None not in (*g, *a) and same_lists(g, a)


def same_lists(gold: list, answer: list) -> bool:
    """Whether both have equal elements, in any order."""
    rest = list(answer)
    for g in gold:
        match = next((i for i, a in enumerate(rest) if same(g, a)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def pieces(values) -> list:
    """Intervals as (start, end, is left open, is right open), and numbers; None for other parts."""
    if isinstance(values, Boolean) and len(values.free_symbols) == 1:
        values = values.as_set()
    if isinstance(values, sympy.Tuple) and len(values) == 2:
        values = sympy.Interval.open(*values)
    if isinstance(values, sympy.Union):
        return sum(map(pieces, values.args), [])
    if isinstance(values, sympy.Interval):
        open_ends = (sympy.Integer(bool(end)) for end in (values.left_open, values.right_open))
        return [sympy.Tuple(values.start, values.end, *open_ends)]
    return list(values) if isinstance(values, sympy.FiniteSet) else [None]


def same_relations(gold, answer) -> bool:
    """Whether the solutions are equal (one variable), or the sides up to a factor (several)."""
    if gold.free_symbols != answer.free_symbols:
        return False
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        return proportional(gold.lhs - gold.rhs, answer.lhs - answer.rhs)
    if len(gold.free_symbols) == 1:
        return same_lists(pieces(gold), pieces(answer))
    if isinstance(gold, sympy.Or) or isinstance(answer, sympy.Or):
        return gold.func == answer.func and same_lists(list(gold.args), list(answer.args))
    gold, answer = gold.canonical, answer.canonical
    return gold.func == answer.func and proportional(
        gold.lhs - gold.rhs, answer.lhs - answer.rhs, positive=gold.func is not sympy.Ne)


def same_expressions(gold, answer, style: str) -> bool:
    """Exact values must be equal; decimals must be close relative to their size."""
    # f(0) has no value to compute with, so it becomes a variable named f(0)
    functions = gold.atoms(AppliedUndef) | answer.atoms(AppliedUndef)
    gold, answer = (each.xreplace({f: sympy.Symbol(str(f)) for f in functions})
                    for each in (gold, answer))
    both = gold + answer
    if style == "minerva" and not both.free_symbols:
        scales = (1, 100, sympy.Rational(1, 100))
        return any(alike_at_points(gold * scale, answer, 1e-4) for scale in scales)
    if both.has(sympy.Float):
        if alike_at_points(gold, answer, 1e-4) is False:  # 10^-20 is not 10^-30
            return False
        return verified(gold, answer) or bool(alike_at_points(gold, answer, 1e-12))
    equal = alike_at_points(gold, answer)
    variables = {symbol.name for symbol in both.free_symbols} - {"i"}
    if equal and not (variables and both.has(*NOT_SMOOTH)):  # (1+i)^2 is 2i
        return True
    return equal is not False and verified(gold, answer)


# ---------------------------------------------------------------------- the values of expressions
CONSTANT, SMALL, WHOLE, LARGE, NEGATIVE, MIXED = range(6)  # kinds of points to compare at


def points(names) -> list[tuple[dict, int]]:
    """[(values of the variables, kind of point)], the same in every process.

    Some values are whole and some large, because floor(n/2) is floor(n/3) for small n. In the last
    two points some are negative, because x is max(x, 0) elsewhere. Mixed signs tell xy from |x||y|.
    """
    names = sorted(names, key=str)
    kinds = range(SMALL, MIXED + 1) if names else [CONSTANT]
    return [({name: value_of(name.name, kind, i % 2 == 0) for i, name in enumerate(names)}, kind)
            for kind in kinds]


def value_of(name: str, kind: int, first: bool):
    """A value for the variable `name`, a fraction or (WHOLE) an integer; `i` is imaginary."""
    if name == "i":
        return sympy.I
    noise = zlib.crc32(f"{name}{kind}".encode())
    if kind == WHOLE:
        return sympy.Integer(3 + noise % 10)
    is_large = kind in (LARGE, MIXED)
    size = sympy.Rational(20_000 + noise % 80_000 if is_large else 1 + noise % 2000, 997)
    return -size if kind == NEGATIVE or kind == MIXED and first else size


def equal_constants(g, a, kind: int) -> bool:
    """Whether all digits are equal. For example, 1 + e^-1000 differs from 1 in the 435th digit."""
    if g.is_Rational and a.is_Rational:
        return g == a
    if not (g.evalf(5).is_finite and a.evalf(5).is_finite):
        return False
    if kind == CONSTANT:
        difference = (g - a).evalf(5, maxn=2000)
        return all(part == 0 or part._prec == 1 for part in difference.as_real_imag())
    return near(g, a, 1e-50, at_least=1)


def near(g, a, tolerance: float, at_least: int = 0) -> bool:
    g, a = g.evalf(60, maxn=200), a.evalf(60, maxn=200)
    exist = g.is_finite and a.is_finite
    return bool(exist and abs(g - a) <= tolerance * max(at_least, abs(g), abs(a)))


def stays_real(expression, at: dict) -> bool:
    """Whether all roots and logarithms are real; otherwise sqrt(x) sqrt(y) may not be sqrt(xy)."""
    parts = [expression, *expression.atoms(sympy.Pow, sympy.Function)]
    return all(part.subs(at).doit().evalf(15).is_extended_real for part in parts)


def alike_at_points(gold, answer, tolerance: float = 0) -> bool | None:
    """Whether values are equal at all points where both exist; None if sympy cannot decide.

    The tolerance is relative (that of math-verify is absolute).
    """
    try:
        for at, kind in points(gold.free_symbols | answer.free_symbols):
            if kind >= NEGATIVE and not (stays_real(gold, at) and stays_real(answer, at)):
                continue
            g, a = gold.subs(at).doit(), answer.subs(at).doit()
            if not (near(g, a, tolerance) if tolerance else equal_constants(g, a, kind)):
                return False
        return True
    except MemoryError:
        raise
    except Exception:  # sympy and mpmath raise various errors if there is no value
        return None


def proportional(gold, answer, positive: bool = False) -> bool:
    """Whether one is a (`positive`) constant times the other: 2x > 8 is x > 4, not -x > -4."""
    at = points(gold.free_symbols | answer.free_symbols)[0][0]
    g, a = gold.subs(at).doit(), answer.subs(at).doit()
    if not (g.is_finite and a.is_finite) or 0 in (g, a) or positive and g * a < 0:
        return False
    return alike_at_points(gold * a, answer * g) is True
