"""Would the tests notice? Breaks the code on purpose, a line at a time, and runs the tests.

    python bench/mutate.py bench/mutants.jsonl                     # every mutant; resumable
    python bench/mutate.py bench/mutants.jsonl --only minirl -n 2  # of minirl.py, two at a time
    python bench/mutate.py bench/mutants.jsonl --where             # only: which texts are gone

A mutant is a line of JSON: {"file": "minirl.py", "old": "...", "new": "...", "why": "..."}. `old`
must occur once in the file; if it does not, it is looked for in all the code, and where it occurs
once in one file, that file is broken. One that changes nothing a test could see has "equivalent":
the reason.

Tests of the module's name come first, then those that import it or test what imports it, then the
slow ones among them; those that start an engine only with --engine. A mutant is killed when a test
fails, hangs, or cannot be collected. Survivors are listed with their `why`: each is a test that is
missing. Results go to --out, a line each; what stands there is not tried again.
"""
import argparse
import contextlib
import functools
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".git", ".venv", "runs", "__pycache__", ".pytest_cache")
PASSED = 0, 5  # pytest's exit codes; the second: there is no such test
QUICK, SLOW, ENGINE = "not engine and not slow", "not engine and slow", "engine"


# ------------------------------------------------------------------------------- where a mutant is
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


@functools.cache
def code() -> dict[str, str]:
    """Path in the project -> text, of all Python but the tests."""
    files = (file.relative_to(ROOT) for file in sorted(ROOT.rglob("*.py")))
    return {str(file): (ROOT / file).read_text(encoding="utf-8") for file in files
            if file.parts[0] != "tests" and not {*file.parts} & {*LEFT_OUT}}


def located(mutant: dict) -> tuple[dict, str]:
    """(the mutant with the file in which its text is now, why there is none)."""
    if code().get(mutant["file"], "").count(mutant["old"]) == 1:
        return mutant, ""
    counts = {file: text.count(mutant["old"]) for file, text in code().items()}
    found = [file for file, times in counts.items() if times]
    if len(found) == 1 and counts[found[0]] == 1:
        return mutant | dict(file=found[0]), ""
    return mutant, f"its text is in {sum(counts.values())} places" if found else "its text is gone"


# -------------------------------------------------------------------------------------- its tests
def imports(text: str, module: str) -> bool:
    return bool(re.search(rf"^\s*(?:from|import)\b.*\b{module}\b", text, re.M))


@functools.cache
def tests_of(module: str) -> tuple[list[str], list[str]]:
    """(its own test files, those that import it or are of a module that imports it)."""
    files = sorted(ROOT.glob("tests/test_*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    importers = {Path(file).stem for file, text in code().items() if imports(text, module)}
    own = [file for file in texts if file.stem == f"test_{module}"]
    others = [file for file, text in texts.items() if file not in own
              and (imports(text, module) or file.stem.removeprefix("test_") in importers)]
    return tuple([str(file.relative_to(ROOT)) for file in files] for files in (own, others))


def commands(module: str, engine: bool) -> list[list[str]]:
    """pytest's arguments, the likeliest and quickest to kill first."""
    own, others = tests_of(module)
    stages = [(QUICK, own), (QUICK, others), (SLOW, own + others)]
    stages += [(ENGINE, own + others)] * engine
    return [["-m", marks, *files] for marks, files in stages if files]


def passes(arguments: list[str], place: Path, seconds: float) -> bool:
    """Whether these tests pass on the code in `place`, in so many seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(seconds) in PASSED
    except subprocess.TimeoutExpired:
        return False
    finally:  # also what a test has started and left
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ------------------------------------------------------------------------------------- all of them
class Trial:
    """Mutants tried in copies of the project, several at a time."""

    def __init__(self, folder: str, args: argparse.Namespace):
        self.args, self.places, self.passed_before = args, queue.Queue(), {}
        for number in range(args.n):
            place = Path(folder, f"copy-{number}")
            shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*LEFT_OUT))
            self.places.put(place)

    def __call__(self, mutant: dict) -> None:
        place, start = self.places.get(), time.perf_counter()
        killer = self.killer(place, mutant)
        self.places.put(place)
        taken = round(time.perf_counter() - start, 1)
        with open(self.args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(mutant | dict(killer=killer, seconds=taken)) + "\n")
        word = f"killed by pytest {shlex.join(killer)}" if killer else "SURVIVED"
        print(f"{taken:5.0f} s  {mutant['file']}: {mutant['why']}: {word}", flush=True)

    def killer(self, place: Path, mutant: dict) -> list[str]:
        """The first command that fails on the broken code, and passes on the sound; [] if none."""
        for arguments in commands(Path(mutant["file"]).stem, self.args.engine):
            before = mutate(place, mutant)
            passed = passes(arguments, place, self.args.seconds)
            (place / mutant["file"]).write_text(before, encoding="utf-8")
            if not passed and self.sound(arguments, place):
                return arguments
        return []

    def sound(self, arguments: list[str], place: Path) -> bool:
        """Whether these tests pass before anything is changed; else they say nothing."""
        key = tuple(arguments)
        if key not in self.passed_before:
            self.passed_before[key] = passes(arguments, place, self.args.seconds)
            if not self.passed_before[key]:
                print(f"fails without any mutant: pytest {shlex.join(arguments)}", flush=True)
        return self.passed_before[key]


def read(path: Path) -> list[dict]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def identity(mutant: dict) -> tuple:
    return mutant["old"], mutant["new"]


def report(results: list[dict], lost: list[tuple[dict, str]], equivalent: int) -> None:
    survived = [mutant for mutant in results if not mutant["killer"]]
    print(f"\n{len(results) - len(survived)} of {len(results)} killed; {equivalent} equivalent; "
          f"{len(lost)} not tried")
    for mutant in survived:
        print(f"  {mutant['file']}: {mutant['why']}\n    - {mutant['old']}\n    + {mutant['new']}")
    for mutant, why in lost:
        print(f"  {mutant['file']}: {mutant['why']}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Do the tests notice a wrong line?")
    parser.add_argument("mutants", type=Path)
    parser.add_argument("--only", default="", help="the mutants of this module")
    parser.add_argument("-n", type=int, default=1, help="so many at the same time")
    parser.add_argument("--engine", action="store_true", help="also tests that start an engine")
    parser.add_argument("--seconds", type=float, default=300,
                        help="a hanging test is a failing one")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    parser.add_argument("--where", action="store_true", help="run nothing")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asked = [located(mutant) for mutant in read(args.mutants)]
    asked = [(mutant, why) for mutant, why in asked
             if args.only in ("", Path(mutant["file"]).stem)]
    lost = [(mutant, why) for mutant, why in asked if why]
    sound = [mutant for mutant, why in asked if not why and "equivalent" not in mutant]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not args.where:
        done = set(map(identity, read(args.out)))
        todo = [mutant for mutant in sound if identity(mutant) not in done]
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            trial = Trial(folder, args)
            with ThreadPoolExecutor(args.n) as pool:
                list(pool.map(trial, todo))
    wanted = set(map(identity, sound))
    results = [result for result in read(args.out) if identity(result) in wanted]
    report(results, lost, len(asked) - len(lost) - len(sound))


if __name__ == "__main__":
    main()
