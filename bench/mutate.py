"""Checks that a named test fails if a line of the code is broken on purpose.

    python bench/mutate.py                  # every mutant
    python bench/mutate.py --only minirl    # those of minirl.py, after a change of its tests
    python bench/mutate.py --prune          # runs nothing, deletes mutants whose line is gone

A mutant is a line of bench/mutants.jsonl: {"file": "minirl.py", "old": "...", "new": "...", "why":
"...", "test": "tests/test_minirl.py::test_..."}. `old` must occur once in its file. A mutant whose
line or test is gone is listed and not tried. A mutant that changes nothing that a test could detect
has "equivalent" with the reason.

Each test runs in a fork of this process, which has done the slow imports. It must fail on the
broken code and pass on the original. A test that takes too long has failed.
"""
import argparse
import contextlib
import functools
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".git", ".venv", "runs", "__pycache__", ".pytest_cache")
WARM = ("pytest", "peft", "transformers.models.mixtral.modeling_mixtral",
        "transformers.models.olmoe.modeling_olmoe", "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3_moe.modeling_qwen3_moe")
LIMIT = 120  # seconds of CPU time for a test, so that a busy machine fails none
WAITING = 10  # times as many by the clock: a test that waits takes no CPU time


# ---------------------------------------------------------------------------------- a broken copy
def mutated(text: str, mutant: dict) -> str:
    """A file's text with the mutant's line instead of the original."""
    times = text.count(mutant["old"])
    if times != 1:
        raise SystemExit(
            f"{mutant['file']} has {mutant['old']!r} {times} times, not once: {mutant}")
    return text.replace(mutant["old"], mutant["new"])


def mutate(place: Path, mutant: dict) -> str:
    """Apply a mutant to the copy in `place`; returns the file's text as it was."""
    file = place / mutant["file"]
    text = file.read_text(encoding="utf-8")
    file.write_text(mutated(text, mutant), encoding="utf-8")
    return text


# ------------------------------------------------------------------------------- tests in a fork
def passes(place: Path, test: str) -> bool:
    """Whether a test, or a function of tests with all its parameters, passes in the copy."""
    if not (child := os.fork()):
        be_pytest(place, test)
    try:
        _, status = os.waitpid(child, 0)
    finally:  # also after Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the test has left
    return os.waitstatus_to_exitcode(status) == 0


def be_pytest(place: Path, test: str) -> None:
    """In the fork: forget the project's modules, take the copy's, and end as the test does."""
    import pytest

    code = 99
    try:
        os.setsid()
        with open(place.with_suffix(".out"), "w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.chdir(place)
        own = {file.stem for file in [*place.iterdir(), *place.glob("tests/*.py")]}
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]
        sys.modules["__main__"] = type(sys)("__main__")  # which no process of a test must import
        others = [path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "bench"))]
        sys.path[:] = [str(place), str(place / "tests"), *others]
        end = int(time.process_time()) + LIMIT
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        signal.alarm(WAITING * LIMIT)
        code = pytest.main([test, "-q", "-x", "--rootdir=.", "-p", "no:cacheprovider"])
    finally:
        os._exit(code)


is_sound = functools.cache(passes)  # in the copy while nothing is broken


def is_killed(place: Path, mutant: dict) -> bool:
    """Whether the named test fails on the broken code and passes on the original."""
    before = mutate(place, mutant)
    passed = passes(place, mutant["test"])
    (place / mutant["file"]).write_text(before, encoding="utf-8")
    if passed:
        return False
    if not is_sound(place, mutant["test"]):
        print(f"on the original code this fails too: {mutant['test']}")
        return False
    return True


def try_all(mutants: list[dict]):
    """Yields for each mutant whether its test kills it."""
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # what the forks leave goes with it
        place = Path(folder, "copy")
        shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for mutant in mutants:
            yield is_killed(place, mutant)


# ------------------------------------------------------------------------------------------ all
def is_there(mutant: dict) -> bool:
    """Whether the mutant's file has its line once, and the file of its test the test."""
    file, _, test = mutant.get("test", "").partition("::")
    function = f"def {test.partition('[')[0]}("
    return text_of(mutant["file"]).count(mutant["old"]) == 1 and (
        "equivalent" in mutant or function in text_of(file))


@functools.cache
def text_of(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def warm_up() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.dont_write_bytecode = True  # a patch within the same second would be overlooked
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"  # as the tests do, but they do not come first here
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half a second of each test
    for module in WARM:
        importlib.import_module(module)


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks that tests fail if a line is wrong.")
    parser.add_argument("list", nargs="?", type=Path, default=ROOT / "bench" / "mutants.jsonl")
    parser.add_argument("--only", default="", help="the mutants of this module")
    parser.add_argument("--prune", action="store_true", help="delete mutants whose line is gone")
    args = parser.parse_args()
    rows = args.list.read_text(encoding="utf-8").splitlines(keepends=True)
    present = [row for row in rows if is_there(json.loads(row))]
    lost = [json.loads(row) for row in rows if row not in present]
    tried = [mutant for mutant in map(json.loads, present) if "equivalent" not in mutant
             and args.only in ("", Path(mutant["file"]).stem)]
    survived = []
    for mutant, killed in zip(tried, [] if args.prune else try_all(tried)):
        word = mutant["test"] if killed else "SURVIVED"
        print(f"{mutant['file']}: {mutant['why']}: {word}", flush=True)
        survived += [] if killed else [mutant]
    for word, those in (("survived", survived), ("its line or its test is gone", lost)):
        for mutant in those:
            print(f"{mutant['file']}: {mutant['why']}: {word}\n"
                  f"    - {mutant['old']}\n    + {mutant['new']}")
    if args.prune:
        args.list.write_text("".join(present), encoding="utf-8")
    else:
        print(f"{len(tried) - len(survived)} of {len(tried)} killed; {len(lost)} not found")


if __name__ == "__main__":
    main()
