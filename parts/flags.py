"""Flags from a dataclass: one per field, in a group per base class, explained by docstrings."""
import contextlib
import sys
from dataclasses import fields, is_dataclass, make_dataclass

import tyro

from parts.screen import is_text, shown


def parse_flags(cls: type, argv: list[str] | None, prog: str, description: str, defaults=()):
    """An instance of the dataclass `cls`, filled from the flags `argv` (None: of this process).

    M_first becomes --M-first, a bool clip becomes --clip and --no-clip. If `cls` inherits from
    several dataclasses and has no fields of its own, each of them is a group in --help, whose
    title is its docstring. `defaults` {field: value} take the place of the class's own.

    Ends the program with code 0 after --help, and with code 2 where a flag or a value is none.
    """
    given = sys.argv[1:] if argv is None else argv
    for text in given:
        if not is_text(text):
            raise ValueError(f"{shown(text)} is no text in UTF-8")
    groups = [base for base in cls.__bases__ if is_dataclass(base)] or [cls]
    names = [group.__name__.removesuffix("Settings").removesuffix("Config") for group in groups]
    nested = make_dataclass("Flags", zip(names, groups))
    known = dict(defaults)
    start = nested(*(
        group(**{f.name: known[f.name] for f in fields(group) if f.name in known})
        for group in groups))
    parsed = tyro.cli(nested, args=argv, prog=prog, description=description, default=start,
                      config=(tyro.conf.OmitArgPrefixes,))
    return cls(**{f.name: getattr(getattr(parsed, name), f.name)
                  for name, group in zip(names, groups) for f in fields(group)})


@contextlib.contextmanager
def in_one_sentence(prog: str):
    """A ValueError inside ends the program as a wrong flag does: its sentence, and code 2."""
    try:
        yield
    except ValueError as problem:
        print(f"{prog}: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
