"""The checks of the labs. Students need not read them: what is wrong is said in numbers.

A check is a function with a title as its docstring. It calls the student's functions where the
project would, and raises `Wrong`.
"""
import math
from fractions import Fraction


class Wrong(Exception):
    """A counterexample, ready to be printed."""


def spelled(value) -> str:
    """A number, a list or a tensor, short enough to be read."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        more = ", ..." if len(value) > 8 else ""
        return "[" + ", ".join(map(spelled, value[:8])) + more + "]"
    if isinstance(value, Fraction):
        return f"Fraction({value})"
    if isinstance(value, (str, int)):
        return repr(value)
    if hasattr(value, "ids"):
        return f"Row(ids={spelled(value.ids)}, prompt_length={value.prompt_length})"
    if hasattr(value, "index"):
        return f"Sample({value.index}, {'right' if value.correct else 'wrong'})"
    if hasattr(value, "sampler"):
        return f"{value.sampler} with n={value.n}"
    return type(value).__name__


def numbers(value) -> list[float]:
    """All numbers in it, one after the other; anything else is NaN."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in numbers(item)]
    if isinstance(value, (bool, int, float)):
        return [float(value)]
    return [math.nan]


def shape(value):
    """Lists within lists, without the numbers in them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [shape(item) for item in value] if isinstance(value, (list, tuple)) else None


def must_be(call: str, yours, right, tolerance: float = 1e-9, why: str = "") -> None:
    """Raises Wrong unless the numbers are equal up to `tolerance`, absolute and relative, and the
    shapes are: [T, 1] minus [T] is [T, T].
    """
    a, b = numbers(yours), numbers(right)
    near = shape(yours) == shape(right) and all(
        x == y or abs(x - y) <= tolerance * max(1, abs(y)) for x, y in zip(a, b))
    if not near:
        raise differs(call, yours, right, why)


def must_equal(call: str, yours, right, why: str = "") -> None:
    """Likewise for what is no number: equal, and of the same kind (1 is not True, nor 1.0)."""
    if yours != right or spelled(yours) != spelled(right):
        raise differs(call, yours, right, why)


def differs(call: str, yours, right, why: str) -> Wrong:
    because = f"\n{why}" if why else ""
    return Wrong(f"{call}: yours is {spelled(yours)}, and it must be {spelled(right)}{because}")
