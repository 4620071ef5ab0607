"""The checks of the labs. Students need not read them: they report mistakes in numbers.

The CHECKS of a lab are (points, title, ask, rows). `ask` is called with each row: it calls the
student's functions where the project would, and raises `Wrong`.
"""
import inspect
from dataclasses import fields, is_dataclass
from fractions import Fraction


class Wrong(Exception):
    """A counterexample, ready to be printed."""


class Raised(Wrong):
    """The student's function raised an exception of this kind."""

    def __init__(self, said: str, kind: str):
        super().__init__(said)
        self.kind = kind


class Asked:
    """asked.NAME(...) calls a function or a scene of this name in the student's process."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.ask(name, args, kwargs)


asked = Asked()  # `grade` in course/check.py sets asked.ask


def plain(value):
    """A tensor or array as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def spelled(value) -> str:
    """A value, short enough to be read."""
    value = plain(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        more = ", ..." if len(value) > 12 else ""
        return "[" + ", ".join(map(spelled, value[:12])) + more + "]"
    if isinstance(value, (str, int, Fraction, type(None))):
        return repr(value)
    if hasattr(value, "ids"):
        kind, ids = type(value).__name__, spelled(value.ids)
        return f"{kind}(ids={ids}, prompt_length={value.prompt_length})"
    if is_dataclass(value):  # what is not the default
        own = [f"{f.name}={getattr(value, f.name)!r}" for f in fields(value)
               if f.name == "sampler" or getattr(value, f.name) != f.default]
        return f"{type(value).__name__}({', '.join(own)})"
    return type(value).__name__


def called(function, *args, **kwargs) -> str:
    """The call with the names of its arguments, where the function has names for them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    names = [f"{one.name}=" for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(names) < len(args):
        names = [""] * len(args)
    said = [name + spelled(value) for name, value in zip(names, args)]
    said += [f"{key}={spelled(value)}" for key, value in kwargs.items()]
    return f"{function.__name__}({', '.join(said)})"


def near(yours, right, tolerance: float) -> bool:
    """Lists of the same shape; numbers up to the tolerance; what is not a number, equal and of the
    same kind: 1 is not True. (A [T, 1] minus a [T] would be [T, T].)
    """
    yours, right = plain(yours), plain(right)
    if isinstance(right, (list, tuple)):
        return isinstance(yours, (list, tuple)) and len(yours) == len(right) and all(
            near(x, y, tolerance) for x, y in zip(yours, right))
    if type(right) in (int, float):
        return isinstance(yours, (bool, int, float)) and (
            yours == right or abs(yours - right) <= tolerance * max(1, abs(right)))
    return yours == right and spelled(yours) == spelled(right)


def flat(value) -> list:
    """All numbers of a nested list."""
    value = plain(value)
    return [x for one in value for x in flat(one)] if isinstance(value, (list, tuple)) else [value]


def must_be(call: str, yours, right, tolerance: float = 1e-5, why: str = "",
            causes: dict = {}) -> None:
    """Raises Wrong unless yours is near. The tolerance is relative for large numbers. It lets
    float32 pass, and a number that it does not let pass is spelled differently from the right one.

    why explains the right value. causes has sentences, each with what this mistake gives. A
    sentence is printed only if yours is that and no other one fits, because a false cause misleads.
    """
    if near(yours, right, tolerance):
        return
    found = [said for said, mistaken in causes.items() if near(yours, mistaken, tolerance)]
    cause = found[0] if len(found) == 1 else ""
    if near(flat(yours), flat(right), tolerance):
        cause = "The numbers are right, but the shape is another one."
    said = f"{call}: yours is {spelled(yours)}, and it must be {spelled(right)}"
    raise Wrong("\n".join(filter(None, [said, why, cause])))


def has_gradient(value) -> bool:
    return getattr(value, "requires_grad", False)


def results(function, names: str, *args):
    """What the function returns, if that is a tuple with one value for each of the names."""
    found = function(*args)
    if isinstance(found, (tuple, list)) and len(found) == len(names.split()):
        return found
    raise Wrong(f"{function.__name__} must return ({', '.join(names.split())}), and yours returns "
                f"{type(found).__name__} {spelled(found)}")


def must_give(right, function, *args, why: str = "", causes: dict = {}, **kwargs) -> None:
    """The function must return this."""
    must_be(called(function, *args, **kwargs), function(*args, **kwargs), right, why=why,
            causes=causes)
