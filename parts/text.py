"""Makes text safe to print, with the same words for the same results everywhere."""
import os
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
    outcome, few = direction(one), one["questions"] < FEW
    said = f"The model {'looks' if few else 'is'} {outcome} than {than}"
    if outcome == "no clear difference":
        said = f"There is {outcome} from {than}"
    if few:
        return f"{said}, but little can be concluded from {counted(one['questions'], 'problem')}."
    sides = dict(better="whole 95% interval is above", worse="whole 95% interval is below")
    return f"{said}, because the {sides.get(outcome, '95% interval contains')} 0."


def prepare_streams() -> None:
    """Let nothing that is printed end a program, or reach a file that was not meant.

    Characters that the terminal's encoding lacks are printed as escapes. A standard stream that the
    shell has closed, as `>&-` does, becomes /dev/null. Otherwise the next file that is opened would
    get its number, and with it what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number
            setattr(sys, name, open(number, "w" if number else "r"))
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has no encoding
        sys.stdout.reconfigure(errors="backslashreplace")
