"""Do two sympy expressions have the same values? Runs in a worker only: sympy may take any time."""
import zlib


def sampled(expression) -> list:
    """`expression` at three fixed positive points, 30 digits, with `i` the imaginary unit."""
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
    """Relative agreement at every point (math-verify's is absolute); None if not computable."""
    try:
        for g, a in zip(sampled(gold * scale), sampled(answer)):
            if not (g.is_finite and a.is_finite):
                return False
            largest = max(abs(g).evalf(30), abs(a).evalf(30))
            if g != a and not bool(abs(g - a).evalf(30) <= tolerance * largest):
                return False
        return True
    except MemoryError:
        raise
    except Exception:
        return None
