"""A student's functions in place of the project's.

The labs have no solutions of their own: their functions *are* functions of the project, with the
same names and arguments. The student's version replaces the project's, and then the checks
(check.py) or a whole training run (train.py) use the project as usual.
"""
import ast
import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from unittest import mock

from parts.folder import shown

ROOT = Path(__file__).resolve().parent.parent
LABS = ROOT / "course" / "labs"

HOMES = {  # lab -> its functions, each with the module (and class) that has the project's own
    "lab_1": {"bandit_gradient": "course.checks.lab_1", "advantages": "ada_sampler"},
    "lab_2": {"response_states": "parts.logprobs", "token_logprobs": "parts.logprobs"},
    "lab_3": {"exit_test": "ada_sampler", "keep": "ada_sampler"},
    "lab_4": {"row_weights": "ada_sampler", "allocate_gvm": "ada_sampler"},
    "lab_5": {"importance_weight": "minirl", "objective": "minirl", "set_scales": "minirl"},
    "lab_6": {"hook": "parts.routing_replay:RoutingReplay",
              "agreement": "parts.routing_replay:RoutingReplay"},
    "lab_7": {"extract_answer": "rewards", "exact": "verifier.answers"},
    "lab_8": {"pass_at_k": "eval", "bootstrap": "eval"},
}


def home(place: str):
    """The module or class that "module" or "module:Class" names."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def load(lab: str, file: Path | None = None) -> dict:
    """name -> function, from the lab's file. SystemExit, one sentence, if it has none of that name.
    """
    file = file or LABS / f"{lab}.py"
    if not file.is_file():
        raise SystemExit(f"There is no file {file}.")
    spec = importlib.util.spec_from_file_location(f"student_{lab}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line = getattr(error, "lineno", None) or line_in(file, error)
        what = f"{type(error).__name__}: {shown(error)}"
        raise SystemExit(f"{file}, line {line}: {what}") from None
    for name in HOMES[lab]:
        if not callable(getattr(module, name, None)):
            raise SystemExit(f"{file} has no function {name}: restore it from the original.")
    return {name: getattr(module, name) for name in HOMES[lab]}


def line_in(file: Path, error: BaseException) -> int | None:
    """The last line of `file` that the error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((one.lineno for one in reversed(frames) if one.filename == str(file)), None)


def is_empty(function) -> bool:
    """Whether the function is only a docstring and `raise NotImplementedError`."""
    body = ast.parse(inspect.getsource(function)).body[0].body
    return len(body) <= 2 and "NotImplementedError" in ast.unparse(body[-1])


@contextlib.contextmanager
def in_place(lab: str, functions: dict):
    """The project uses these functions for a while, also where it had imported its own by name."""
    with contextlib.ExitStack() as stack:
        for name, new in functions.items():
            owner = home(HOMES[lab][name])
            old = vars(owner)[name]
            for place in (owner, *sys.modules.values()):
                if getattr(place, "__dict__", {}).get(name) is old:
                    stack.enter_context(mock.patch.object(place, name, new))
        yield
