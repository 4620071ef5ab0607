"""The checks of the labs. Students need not read them: they report mistakes in numbers.

A check is a function with a title as its docstring. It calls the student's functions where the
project would, and raises `Wrong`.
"""
from dataclasses import fields, is_dataclass
from fractions import Fraction


class Wrong(Exception):
    """A counterexample, ready to be printed."""


def plain(value):
    """A tensor or array as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def spelled(value) -> str:
    """A value, short enough to be read."""
    value = plain(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        more = ", ..." if len(value) > 8 else ""
        return "[" + ", ".join(map(spelled, value[:8])) + more + "]"
    if isinstance(value, Fraction):
        return f"Fraction({value})"
    if isinstance(value, (str, int, type(None))):
        return repr(value)
    if hasattr(value, "ids"):
        return f"Row(ids={spelled(value.ids)}, prompt_length={value.prompt_length})"
    if hasattr(value, "index"):
        return f"Sample({value.index}, {'right' if value.correct else 'wrong'})"
    if is_dataclass(value):  # settings: those that are not the default
        own = [f"{f.name}={getattr(value, f.name)!r}" for f in fields(value)
               if f.name == "sampler" or getattr(value, f.name) != f.default]
        return f"{type(value).__name__}({', '.join(own)})"
    return type(value).__name__


def called(function, *args, **kwargs) -> str:
    """The call, in words."""
    said = [*map(spelled, args), *(f"{key}={spelled(value)}" for key, value in kwargs.items())]
    return f"{function.__name__}({', '.join(said)})"


def near(yours, right, tolerance: float) -> bool:
    """Numbers, or lists within lists of them, of the same shape; nothing else is near."""
    yours, right = plain(yours), plain(right)
    if isinstance(right, (list, tuple)):
        return isinstance(yours, (list, tuple)) and len(yours) == len(right) and all(
            near(x, y, tolerance) for x, y in zip(yours, right))
    return isinstance(yours, (bool, int, float)) and (
        yours == right or abs(yours - right) <= tolerance * max(1, abs(right)))


def must_be(call: str, yours, right, tolerance: float = 1e-9, why: str = "") -> None:
    """Raises Wrong unless the shapes are equal, and the numbers up to `tolerance`, which is
    absolute for small and relative for large numbers. (A [T, 1] minus a [T] would be [T, T].)
    """
    if not near(yours, right, tolerance):
        raise differs(call, yours, right, why)


def must_equal(call: str, yours, right, why: str = "") -> None:
    """The same for what is not a number: equal, and of the same kind (1 is not True, nor 1.0)."""
    if yours != right or spelled(yours) != spelled(right):
        raise differs(call, yours, right, why)


def asked(title: str, ask, cases):
    """A check that asks each row of a table."""
    def check():
        for case in cases:
            ask(*case)
    check.__doc__ = title
    return check


def must_give(right, function, *args, why: str = "", **kwargs) -> None:
    """The function must return these numbers."""
    must_be(called(function, *args, **kwargs), function(*args, **kwargs), right, why=why)


def differs(call: str, yours, right, why: str) -> Wrong:
    because = f"\n{why}" if why else ""
    return Wrong(f"{call}: yours is {spelled(yours)}, and it must be {spelled(right)}{because}")
