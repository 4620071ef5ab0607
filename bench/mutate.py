"""Would the tests notice? Breaks the code on purpose, a line at a time, and runs the tests.

    python bench/mutate.py bench/mutants.jsonl                 # every mutant, tests of its module
    python bench/mutate.py bench/mutants.jsonl --only minirl   # those of minirl.py

A mutant is a line of JSON: {"file": "minirl.py", "old": "...", "new": "...", "why": "..."}: `old`
must occur exactly once in the file. One that changes nothing a test could see has "equivalent": the
reason. A mutant is killed when a test fails, hangs, or cannot be collected. Survivors are listed
with their `why`: each is a test that is missing. Tests that need the engine are left out.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".git", ".venv", "runs", "__pycache__", ".pytest_cache")
ALSO = {  # further tests that look at a module, besides tests/test_<module>.py
    "minirl": ["objective", "float16", "combinations", "routing_replay", "faults", "record"],
    "config": ["flags", "faults", "combinations", "hardware"],
    "ada_sampler": ["simulate", "own_reward", "ranks"],
    "policy": ["logprobs", "objective", "families", "record", "eval"],
    "gvm": ["logprobs"],
    "logprobs": ["policy", "families", "models"],
    "checkpoint": ["faults", "float16"],
    "run": ["faults", "float16", "config"],
    "files": ["checkpoint", "data", "eval"],
    "folder": ["eval", "faults", "own_reward"],
    "metrics": ["objective", "record"],
    "masks": ["objective"],
    "coarse_engine": ["bench"],
    "compare_skills": ["skills"],
    "longer_skills": ["skills"],
    "ablate_objective": ["study"],
    "rewards": ["grader", "spelling"],
    "answers": ["rewards", "spelling"],
    "equality": ["rewards"],
    "spelling": ["rewards"],
    "grader": ["rewards", "own_reward"],
    "data": ["own_reward", "sources"],
    "engine": ["hardware"],
    "flags": ["config"],
    "eval_config": ["eval", "flags"],
    "stop": ["faults"],
}


def tests_of(module: str) -> list[str]:
    names = [module, *ALSO.get(module, [])]
    files = [f"tests/test_{name}.py" for name in names]
    return [file for file in files if (ROOT / file).exists()]


def survives(place: Path, tests: list[str], seconds: float) -> bool:
    """Whether all of these tests pass on the code in `place`."""
    passed = 0, 5  # the second: there is no such test
    for marks in ("not engine and not slow", "not engine and slow"):
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                   "-m", marks, *tests]
        try:
            done = subprocess.run(command, cwd=place, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode not in passed:
            return False
    return True


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Do the tests notice a wrong line?")
    parser.add_argument("mutants", type=Path)
    parser.add_argument("--only", default="", help="the mutants of this module")
    parser.add_argument("--seconds", type=float, default=300,
                        help="a hanging test is a failing one")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mutants = [json.loads(line) for line in args.mutants.read_text(encoding="utf-8").splitlines()]
    mutants = [m for m in mutants if Path(m["file"]).stem == args.only or not args.only]
    killed, survived = 0, []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder, "copy")
        shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for module in {Path(mutant["file"]).stem for mutant in mutants}:
            if not tests_of(module) or not survives(place, tests_of(module), args.seconds):
                raise SystemExit(f"{module} has no tests, or they fail before anything is changed")
        for mutant in mutants:
            if "equivalent" in mutant:
                continue
            start, before = time.perf_counter(), mutate(place, mutant)
            alive = survives(place, tests_of(Path(mutant["file"]).stem), args.seconds)
            (place / mutant["file"]).write_text(before, encoding="utf-8")
            word = "SURVIVED" if alive else "killed"
            print(
                f"{word:9} {time.perf_counter() - start:5.0f} s  {mutant['file']}: {mutant['why']}",
                flush=True)
            killed += not alive
            survived += [mutant] * alive
    equivalent = sum("equivalent" in m for m in mutants)
    print(f"\n{killed} of {killed + len(survived)} killed; {equivalent} equivalent")
    for mutant in survived:
        print(f"  {mutant['file']}: {mutant['why']}\n    - {mutant['old']}\n    + {mutant['new']}")


if __name__ == "__main__":
    main()
