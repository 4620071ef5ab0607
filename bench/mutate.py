"""Would the tests notice? Breaks the code on purpose, a line at a time: a named test must fail.

    python bench/mutate.py                        # every mutant
    python bench/mutate.py --only minirl          # those of minirl.py, after a change of its tests
    python bench/mutate.py --only minirl --find   # names a test where there is none that fails
    python bench/mutate.py --where                # runs nothing: whose text is gone?

A mutant is a line of bench/mutants.jsonl: {"file": "minirl.py", "old": "...", "new": "...", "why":
"...", "test": "tests/test_minirl.py::test_..."}. `old` must occur once in its file. A mutant that
changes nothing a test could see has "equivalent": the reason.

Each test runs in a fork of this process, which has done the slow imports. It must pass on the
sound code and fail on the broken; taking too long is failing. --find tries the tests of the
module's name, then those that speak of it; quick ones, then slow ones, and those that start an
engine only with --engine.
"""
import argparse
import compileall
import contextlib
import functools
import importlib
import json
import os
import py_compile
import re
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
STAGES = ["not engine and not slow", "not engine and slow", "engine"]
QUICK, LONG = 20, 300  # seconds of CPU time for a test, so that a busy machine fails none
WAITING = 10  # times as many by the clock: a test that waits takes no CPU time
PASSED = 0, 5  # pytest's exit codes; the second: there is no such test


# ---------------------------------------------------------------------------------- a broken copy
def mutated(text: str, mutant: dict) -> str:
    """A file's text with the mutant's line in the place of the original."""
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


def copy(place: Path) -> Path:
    """The project, compiled once: bytecode that is checked by content overlooks no patch."""
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*LEFT_OUT))
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(place, quiet=1, invalidation_mode=by_content)
    return place


# ------------------------------------------------------------------------------- tests in a fork
class Watch:
    """A plugin of pytest: which tests run, for how long at most, and how they end.

    asked: ids of tests, of functions (with all parameters), or files. log: gets the id of each
    test that starts, and "failed ID" if it fails.
    """

    def __init__(self, asked: set[str], log: Path):
        self.asked, self.log = asked, open(log, "w", buffering=1, encoding="utf-8")

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if self.asked & {
            item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]}]

    def pytest_runtest_setup(self, item):
        self.log.write(f"{item.nodeid}\n")
        long = item.get_closest_marker("slow") or item.get_closest_marker("engine")
        seconds = LONG if long else QUICK
        end = int(time.process_time()) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        signal.alarm(WAITING * seconds)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.log.write(f"failed {report.nodeid}\n")


def run(place: Path, asked, *flags: str) -> tuple[int, list[str]]:
    """pytest's exit code for tests of the copy, and the log of what started and what failed."""
    log = place.with_suffix(".log")
    log.write_text("")
    if not (child := os.fork()):
        be_pytest(place, set(asked), log, flags)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests have left
    return os.waitstatus_to_exitcode(status), log.read_text(encoding="utf-8").splitlines()


def be_pytest(place: Path, asked: set[str], log: Path, flags) -> None:
    """In the fork: forget the project's modules, take the copy's, and end as their tests do."""
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
        files = sorted({test.partition("::")[0] for test in asked})
        code = pytest.main([*filter(os.path.exists, files), "-q", "--rootdir=.",
                            "-p", "no:cacheprovider", *flags], plugins=[Watch(asked, log)])
    finally:
        os._exit(code)


# ------------------------------------------------------------------------------ which test kills
@functools.cache
def sound(place: Path, asked: tuple[str, ...], marks: str = "") -> list[str]:
    """The tests that pass where nothing is broken."""
    code, said = run(place, asked, "--continue-on-collection-errors", "-m", marks)
    if code not in (*PASSED, 1):  # the process has ended in its last test
        said.append(f"failed {said[-1]}")
    failed = {line.removeprefix("failed ") for line in said if line.startswith("failed ")}
    return [test for test in said if not test.startswith("failed ") and test not in failed]


def killer(place: Path, mutant: dict, tests: list[str]) -> str:
    """The first of these sound tests that fails on the broken code; "" if all pass."""
    before = mutate(place, mutant)
    code, said = run(place, tests, "-x")
    (place / mutant["file"]).write_text(before, encoding="utf-8")
    if code in PASSED:
        return ""
    return said[-1].removeprefix("failed ") if said else tests[0]  # which cannot be imported


def find(place: Path, mutant: dict, marks: str) -> str:
    """A test that fails on the broken code, also when it runs alone."""
    module = Path(mutant["file"]).stem
    files = sorted(ROOT.glob("tests/test_*.py"), key=lambda file: file.stem != f"test_{module}")
    for file in files:
        if re.search(rf"\b{module}\b", file.read_text(encoding="utf-8")):
            tests = sound(place, (f"tests/{file.name}",), marks)
            test = tests and killer(place, mutant, tests)
            if test and killer(place, mutant, [test]):
                return test
    return ""


def try_all(mutants: list[dict], stages: list[str]):
    """Yields for each mutant the test that kills it: the named one, or one found; "" if none."""
    warm_up()
    named = tuple({mutant["test"] for mutant in mutants if "test" in mutant})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = copy(Path(folder, "copy"))
        unbroken = sound(place, named) if named else []
        for mutant in mutants:
            test = mutant.get("test")
            tests = [one for one in unbroken if test in (one, one.partition("[")[0])]
            if not tests or not killer(place, mutant, tests):
                found = (find(place, mutant, marks) for marks in stages)
                test = next(filter(None, found), "")
            yield test


# ------------------------------------------------------------------------------------------ all
def warm_up() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"  # as the tests do, but they do not come first here
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half a second of each test
    for module in WARM:
        importlib.import_module(module)


def is_there(mutant: dict) -> bool:
    file = ROOT / mutant["file"]
    return file.is_file() and file.read_text(encoding="utf-8").count(mutant["old"]) == 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Do the tests notice a wrong line?")
    parser.add_argument("list", nargs="?", type=Path, default=ROOT / "bench" / "mutants.jsonl")
    parser.add_argument("--only", default="", help="the mutants of this module")
    parser.add_argument("--find", action="store_true", help="a test for those that have none")
    parser.add_argument("--engine", action="store_true", help="also tests that start an engine")
    parser.add_argument("--where", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.list.is_file():
        parser.error(f"there is no file {args.list}")
    mutants = [json.loads(line) for line in args.list.read_text(encoding="utf-8").splitlines()]
    asked = [mutant for mutant in mutants if args.only in ("", Path(mutant["file"]).stem)]
    lost = [mutant for mutant in asked if not is_there(mutant)]
    tried = [] if args.where else [
        mutant for mutant in asked if is_there(mutant) and "equivalent" not in mutant]
    stages = STAGES[:2 + args.engine] if args.find else []
    survived = []
    for mutant, test in zip(tried, try_all(tried, stages)):
        print(f"{mutant['file']}: {mutant['why']}: {test or 'SURVIVED'}", flush=True)
        survived += [] if test else [mutant]
        if args.find and test:
            mutant["test"] = test
            lines = [json.dumps(mutant) + "\n" for mutant in mutants]
            args.list.write_text("".join(lines), encoding="utf-8")
    for word, those in (("survived", survived), ("its text is not in its file once", lost)):
        for mutant in those:
            print(f"{mutant['file']}: {mutant['why']}: {word}\n"
                  f"    - {mutant['old']}\n    + {mutant['new']}")
    print(f"{len(tried) - len(survived)} of {len(tried)} killed; {len(lost)} not found")


if __name__ == "__main__":
    main()
