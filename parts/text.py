"""Makes text safe to print, with the same words for the same results everywhere."""
import sys

FEW = 30  # with fewer problems an interval is hardly informative


def shown(text, longest: int = 200) -> str:
    r"""The first `longest` characters of `text`, on one line and safe to print.

    Control characters and lone surrogates become escapes such as `\x1b`, because a data file could
    otherwise clear the terminal or overwrite the line above.
    """
    text = str(text)
    cut = "..." if len(text) > longest else ""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:longest]) + cut


def counted(count: int, thing: str) -> str:
    """`1 gold`, `2 golds`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def listed(settings: dict) -> str:
    return ", ".join(f"{name} = {shown(value)}" for name, value in settings.items())


def unit_of(reward: str) -> str:
    """The format of a mean reward, which is a share of right answers without --reward."""
    return ".3g" if reward else ".1%"


def interval(one: dict, unit: str) -> str:
    """An average with its 95% interval, which is a point if all problems have the same result."""
    if one["ci_low"] == one["ci_high"]:
        return f"{one['avg']:{unit}} (no interval, because all problems have the same result)"
    return f"{one['avg']:{unit}} [{one['ci_low']:{unit}}, {one['ci_high']:{unit}}]"


def difference(one: dict, unit: str) -> str:
    """A paired difference as `interval` shows it, with signs, in points instead of percent."""
    return interval(one, f"+{unit}").replace("%", "")


def direction(one: dict) -> str:
    """`better`, `worse`, or `no clear difference` if the 95% interval contains 0."""
    if one["ci_low"] > 0:
        return "better"
    return "worse" if one["ci_high"] < 0 else "no clear difference"  # also if nothing was judged


def verdict(one: dict, than: str) -> str:
    """A paired difference in words."""
    outcome = direction(one)
    if one["questions"] < FEW:
        return f"Little can be concluded from {counted(one['questions'], 'problem')}."
    if outcome == "no clear difference":
        return f"There is {outcome} from {than}, because the 95% interval contains 0."
    side = "above" if outcome == "better" else "below"
    return f"The model is {outcome} than {than}, because the whole 95% interval is {side} 0."


def prepare_streams() -> None:
    """Print characters that the terminal's encoding lacks as escapes.

    Raises SystemExit if the shell has closed a standard stream, as `>&-` does. The next file that
    is opened would get its number, and with it what is printed.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):
        raise SystemExit("A standard stream is closed: redirect it to /dev/null.")
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has no encoding
        sys.stdout.reconfigure(errors="backslashreplace")
