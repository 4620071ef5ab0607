"""Are two answers the same mathematics? math-verify reads and compares them, with guards around it.

Exact values must be equal exactly: 2^100 - 1 is not 2^100. Expressions with variables are compared
at fixed points. There is a tolerance only if one of the two has a decimal point.

Only workers import this: sympy may take any time and any memory.
"""
import functools
import zlib

import sympy
from antlr4 import PredictionMode
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from math_verify import verify
from math_verify.grader import is_relation, should_treat_as_complex
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

POSITIVE, SIGNED = range(3), range(3, 6)  # the numbers of the sample points
FEW_DIGITS, MAX_DIGITS, GUARD = 50, 20_000, 10
SCALES = (sympy.Integer(1), sympy.Integer(100), sympy.Rational(1, 100))


class HastyParser(_Latex2Sympy):
    """ANTLR without regard to context: in a third of the time the same tree, or an exception.

    That is what ANTLR promises of this mode. `x^2+y^2` is one of the few that need the context.
    """

    def create_parser(self, latex: str):
        parser = super().create_parser(latex)
        parser._interp.predictionMode = PredictionMode.SLL
        return parser


@functools.lru_cache(1024)
def from_latex(latex: str):
    """The sympy object of an answer, by math-verify's parser; case counts: 3r^2 is not 3R^2.

    "x<1, x>3" becomes the union of both, "x>1, x<3" the intersection.
    """
    if latex.removeprefix("-").isascii() and latex.removeprefix("-").isdigit():
        return sympy.Integer(latex)  # most golds; the parser takes milliseconds
    how = dict(is_real=not should_treat_as_complex(latex),
               config=ConversionConfig(lowercase_symbols=False))
    try:
        parsed = HastyParser(**how).parse(latex)
    except Exception:
        parsed = _Latex2Sympy(**how).parse(latex)
    if not isinstance(parsed, sympy.FiniteSet):
        return parsed
    if not all(is_relation(element) and not element.has(sympy.Eq) for element in parsed):
        return parsed
    sets = [relation.as_set() for relation in parsed]
    union = sympy.Union(*sets)
    return union if union != sympy.S.Reals else sympy.Intersection(*sets)


def same(gold, answer, style: str = "") -> bool:
    """math-verify's `verify` of two parsed answers, with guards and second chances."""
    if gold == answer:
        return not gold.has(sympy.nan, sympy.zoo)
    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        return same_sets(gold, answer)
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        return same_equations(gold, answer)
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return same_expressions(gold, answer, style)
    if not verified(gold, answer):
        return same_inequalities(gold, answer)
    return all(same(*pair) for pair in zip(entries(gold), entries(answer)))


def verified(gold, answer) -> bool:
    return verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)


def same_sets(gold, answer) -> bool:
    """math-verify pairs the sorted elements; here every pair is tried."""
    rest = list(answer.args)
    for g in gold.args:
        match = next((a for a in rest if same(g, a)), None)
        if match is None:
            return False
        rest.remove(match)
    return not rest


def same_equations(gold, answer) -> bool:
    """The same sides up to a factor, or the same solutions."""
    if not gold.free_symbols:  # verify calls all equations without a solution equal
        return same(gold.lhs, answer.lhs) and same(gold.rhs, answer.rhs)
    if proportional(gold.lhs - gold.rhs, answer.lhs - answer.rhs):
        return True
    if gold.free_symbols != answer.free_symbols or not verified(gold, answer):
        return False
    unknown = min(gold.free_symbols, key=str)
    solutions = [sympy.FiniteSet(*sympy.solve(each, unknown)) for each in (gold, answer)]
    return bool(solutions[0]) and same(*solutions)


def same_expressions(gold, answer, style: str) -> bool:
    """Exact values must be equal; decimals must be close relative to their size."""
    gold, answer = unknowns(gold), unknowns(answer)
    both = gold + answer
    if style == "minerva" and not both.free_symbols:
        return any(equal_within(gold * scale, answer) for scale in SCALES)
    if both.has(sympy.UnevaluatedExpr):  # a percentage: 9% is 9 or 0.09
        compare = equal_within if both.has(sympy.Float) else equal_exactly
        return verified(gold, answer) and any(
            compare(gold * scale, answer) is not False for scale in SCALES)
    if both.has(sympy.Float):
        if equal_within(gold, answer) is False:  # 10^-20 is not 10^-30
            return False
        return verified(gold, answer) or bool(equal_within(gold, answer, 1e-12))
    equal = equal_exactly(gold, answer)
    pieces = (sympy.Abs, sympy.Max, sympy.Min, sympy.sign, sympy.Piecewise)
    if equal and not (both.free_symbols and both.has(*pieces)):  # (1+i)^2 is 2i
        return True
    return equal is not False and verified(gold, answer)


def unknowns(expression):
    """f(0) has no value to compute with, so it becomes a variable named f(0)."""
    return expression.xreplace({f: sympy.Symbol(str(f)) for f in expression.atoms(AppliedUndef)})


def same_inequalities(gold, answer) -> bool:
    """|x|<3 and -3<x<3"""
    both = is_relation(gold) and is_relation(answer)
    return both and gold.free_symbols == answer.free_symbols and gold.as_set() == answer.as_set()


def entries(parsed) -> list:
    """Parts that must be the same one by one, even if math-verify finds the whole the same."""
    if is_relation(parsed) and len(parsed.free_symbols) == 1:
        parsed = parsed.as_set()
    if isinstance(parsed, sympy.Interval):
        return [parsed.start, parsed.end]
    if isinstance(parsed, Relational):
        return [sympy.Eq(parsed.lhs, parsed.rhs, evaluate=False)]
    if isinstance(parsed, (sympy.Tuple, sympy.MatrixBase, sympy.Union)):
        return list(parsed.args if isinstance(parsed, sympy.Union) else parsed)
    return []


# ---------------------------------------------------------------------- the values of expressions

def points(names) -> list[tuple[dict, bool]]:
    """(values of the variables, are all of them positive?), the same in every process.

    Positive points come first. At others an expression may leave its domain, as sqrt(x) does, but
    only there x differs from max(x, 0). `i` is the imaginary unit.
    """
    names = sorted(names, key=str)
    numbers = [*POSITIVE, *SIGNED] if names else POSITIVE[:1]
    return [({name: sample(name.name, k) for name in names}, k in POSITIVE) for k in numbers]


def sample(name: str, k: int):
    """The value of the variable `name` at point `k`: a fraction between -3 and 3."""
    if name == "i":
        return sympy.I
    noise = zlib.crc32(f"{name}{k}".encode())
    size = sympy.Rational(1 + noise % 2000, 997)
    negative = k == SIGNED[0] or k in SIGNED and (noise >> 16) % 2 == k % 2
    return -size if negative else size


def equal_constants(g, a) -> bool:
    """Fractions are compared exactly, others to as many digits as they could differ in.

    1 + e^-1000 differs from 1 in the 435th digit, so every part adds its magnitude to the digits.
    """
    if not (g.is_finite and a.is_finite):
        return False
    if g.is_Rational and a.is_Rational:
        return g == a
    if not agree(g, a, FEW_DIGITS):
        return False
    digits = FEW_DIGITS
    for part in [*sympy.preorder_traversal(g), *sympy.preorder_traversal(a)]:
        digits += 2 * magnitude(part) if part.is_number else 0
    return digits == FEW_DIGITS or digits <= MAX_DIGITS and agree(g, a, digits)


def magnitude(number) -> int:
    """About |log10| of its absolute value; 0 for 0 and if it has no value."""
    size = abs(number).evalf(5)
    if not size.is_Float or size == 0 or size._prec == 1:
        return 0
    return abs(int(sympy.log(size, 10).evalf(5)))


def agree(g, a, digits: int) -> bool:
    """Do two constants agree to so many digits?"""
    g, a = g.evalf(digits, maxn=2 * digits), a.evalf(digits, maxn=2 * digits)
    largest = max(1, abs(g), abs(a))
    return bool(abs(g - a) <= largest * sympy.Rational(10) ** (GUARD - digits))


def stays_real(expression, at: dict) -> bool:
    """No root or logarithm leaves the reals here, where sqrt(x) sqrt(y) is no longer sqrt(xy)."""
    parts = [expression, *expression.atoms(sympy.Pow, sympy.Function)]
    return all(part.subs(at).doit().evalf(15).is_extended_real for part in parts)


def equal_exactly(gold, answer) -> bool | None:
    """Are the values equal at every point where both have one? None if that cannot be computed."""
    return alike_at_points(gold, answer, equal_constants)


def equal_within(gold, answer, tolerance: float = 1e-4) -> bool | None:
    """Do they agree relative to their size (math-verify's bound is absolute)? None as above."""
    def near(g, a) -> bool:
        g, a = g.evalf(30), a.evalf(30)
        if not (g.is_finite and a.is_finite):
            return False
        return bool(abs(g - a) <= tolerance * max(abs(g), abs(a)))

    return alike_at_points(gold, answer, near)


def alike_at_points(gold, answer, alike) -> bool | None:
    """Does `alike` hold for the values at all points? None where sympy cannot compute them."""
    try:
        for at, positive in points(gold.free_symbols | answer.free_symbols):
            if not positive and not (stays_real(gold, at) and stays_real(answer, at)):
                continue
            if not alike(gold.subs(at).doit(), answer.subs(at).doit()):
                return False
        return True
    except MemoryError:
        raise
    except Exception:  # sympy and mpmath raise all kinds if there is no value
        return None


def proportional(gold, answer) -> bool:
    """Is one a constant multiple of the other? 2x^2 - 8 and x^2 - 4 have the same zeros."""
    at = points(gold.free_symbols | answer.free_symbols)[0][0]
    g, a = gold.subs(at).doit(), answer.subs(at).doit()
    if not (g.is_finite and a.is_finite) or 0 in (g, a):
        return False
    if gold.has(sympy.Float) or answer.has(sympy.Float):
        return equal_within(gold * a, answer * g, 1e-12) is True
    return equal_exactly(gold * a, answer * g) is True
