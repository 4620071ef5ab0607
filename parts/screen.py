"""What reaches the screen: a stranger's text without its terminal commands, and a quiet end."""
import contextlib
import os
import sys


def shown(text, longest: int = 200) -> str:
    r"""`text` on one line, fit to be printed: control characters and lone surrogates as `\x1b`.

    What a data file, a model folder or an adapter says about itself may set a terminal's title,
    clear it or overwrite the line above. Of a text over `longest` characters the beginning is
    shown.
    """
    text = str(text)
    cut = "..." if len(text) > longest else ""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:longest]) + cut


def is_text(text: str) -> bool:
    """Whether it can be written and tokenized.

    Half of a UTF-16 pair cannot. JSON may hold one, and a flag in another encoding becomes some.
    """
    return not any("\ud800" <= char <= "\udfff" for char in text)


@contextlib.contextmanager
def quiet_end():
    """Around a whole program: `python eval.py | head -1` ends as `cat` would, with no traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # Python flushes once more when it exits, and would complain again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
