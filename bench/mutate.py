"""Would the tests notice? Breaks the code on purpose, a line at a time, and runs the tests.

    python bench/mutate.py bench/mutants.jsonl                     # every mutant; resumable
    python bench/mutate.py bench/mutants.jsonl --only minirl -n 2  # of minirl.py, two at a time
    python bench/mutate.py bench/mutants.jsonl --where             # only: whose text is gone?

A mutant is a line of JSON: {"file": "minirl.py", "old": "...", "new": "...", "why": "..."}. `old`
must occur once in its file, or else once in all the code. A mutant that changes nothing a test
could see has "equivalent": the reason.

Tests of the module's name come first, then those that import it or test what imports it, then the
slow ones among them; those that start an engine only with --engine. A mutant is killed when a test
fails, hangs, or cannot be collected. Survivors are listed: each is a test that is missing. Results
go to --out, a line each; what stands there is not tried again.
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


def located(mutant: dict) -> dict:
    """The mutant with the file in which its text is now, or with `lost`: why there is none."""
    counts = {file: text.count(mutant["old"]) for file, text in code().items()}
    if counts.get(mutant["file"]) == 1:
        return mutant
    found = [file for file, times in counts.items() if times]
    if len(found) == 1 and counts[found[0]] == 1:
        return mutant | dict(file=found[0])
    times = sum(counts.values())
    return mutant | dict(lost=f"its text is in {times} places" if times else "its text is gone")


# -------------------------------------------------------------------------------------- its tests
def imports(text: str, module: str) -> bool:
    return bool(re.search(rf"^\s*(?:from|import)\b.*\b{module}\b", text, re.M))


def commands(module: str, engine: bool) -> list[list[str]]:
    """pytest's arguments, the likeliest and quickest to kill first."""
    importers = {Path(file).stem for file, text in code().items() if imports(text, module)}
    own, others = [], []
    for file in sorted(ROOT.glob("tests/test_*.py")):
        tested = file.stem.removeprefix("test_")
        if tested == module:
            own.append(f"tests/{file.name}")
        elif tested in importers or imports(file.read_text(encoding="utf-8"), module):
            others.append(f"tests/{file.name}")
    stages = [(QUICK, own), (QUICK, others), (SLOW, own + others)]
    stages += [(ENGINE, own + others)] * engine
    return [["-m", marks, *files] for marks, files in stages if files]


def passes(arguments: list[str], place: Path, seconds: float) -> bool:
    """Whether these tests pass on the code in `place`, in so many seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    # No bytecode: a file that is broken and mended within a second would keep that of the broken.
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True,
                               env=os.environ | dict(PYTHONDONTWRITEBYTECODE="1"))
    try:
        return process.wait(seconds) in PASSED
    except subprocess.TimeoutExpired:
        return False
    finally:  # also what a test has started and left
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ------------------------------------------------------------------------------------- all of them
def try_all(mutants: list[dict], args: argparse.Namespace) -> None:
    """Try mutants in copies of the project, `args.n` at a time; a line of args.out for each."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        places = queue.Queue()
        for number in range(args.n):
            ignored = shutil.ignore_patterns(*LEFT_OUT)
            places.put(shutil.copytree(ROOT, Path(folder, f"copy-{number}"), ignore=ignored))

        def attempt(mutant):
            place = places.get()
            killer = killed_by(mutant, place, args)
            places.put(place)
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(mutant | dict(killer=killer)) + "\n")
            word = f"killed by pytest {shlex.join(killer)}" if killer else "SURVIVED"
            print(f"{mutant['file']}: {mutant['why']}: {word}", flush=True)

        with ThreadPoolExecutor(args.n) as pool:
            list(pool.map(attempt, mutants))


def killed_by(mutant: dict, place: Path, args: argparse.Namespace) -> list[str]:
    """The first command that fails on the broken code, and passes on the sound; [] if none."""
    for arguments in commands(Path(mutant["file"]).stem, args.engine):
        before = mutate(place, mutant)
        passed = passes(arguments, place, args.seconds)
        (place / mutant["file"]).write_text(before, encoding="utf-8")
        if not passed and passes_unbroken(place, args.seconds, *arguments):
            return arguments
    return []


@functools.cache
def passes_unbroken(place: Path, seconds: float, *arguments: str) -> bool:
    """The same before anything is changed; tests that fail then say nothing."""
    passed = passes(arguments, place, seconds)
    if not passed:
        print(f"fails without any mutant: pytest {shlex.join(arguments)}", flush=True)
    return passed


def read(path: Path) -> list[dict]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def identity(mutant: dict) -> tuple:
    return mutant["old"], mutant["new"]


def report(asked: list[dict], results: list[dict]) -> None:
    lost = [mutant for mutant in asked if "lost" in mutant]
    survived = [mutant for mutant in results if not mutant["killer"]]
    equivalent = sum("equivalent" in mutant for mutant in asked)
    print(f"\n{len(results) - len(survived)} of {len(results)} killed; {equivalent} equivalent; "
          f"{len(lost)} not found")
    for mutant in survived:
        print(f"  {mutant['file']}: {mutant['why']}\n    - {mutant['old']}\n    + {mutant['new']}")
    for mutant in lost:
        print(f"  {mutant['file']}: {mutant['why']}: {mutant['lost']}\n    - {mutant['old']}")


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
    if not args.mutants.is_file() or args.n < 1:
        parser.error(f"there is no file {args.mutants}, or -n is below 1")
    asked = [mutant for mutant in map(located, read(args.mutants))
             if args.only in ("", Path(mutant["file"]).stem)]
    sound = [mutant for mutant in asked if not {"lost", "equivalent"} & mutant.keys()]
    if not args.where:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        done = set(map(identity, read(args.out)))
        try_all([mutant for mutant in sound if identity(mutant) not in done], args)
    wanted = set(map(identity, sound))
    report(asked, [result for result in read(args.out) if identity(result) in wanted])


if __name__ == "__main__":
    main()
