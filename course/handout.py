"""The project for a class, without what gives solutions away.

    python course/handout.py ~/class        # a new folder, to be zipped or pushed

Left out: course/answers and the bug hunt, which needs them (plant the bugs, and hand those folders
out); course/mutants.jsonl, which lists what students get wrong; the tests. The project's own
functions stay: without them nothing trains. README.md says why that does little harm.
"""
import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.mutate import LEFT_OUT  # noqa: E402
from course import place  # noqa: E402

TELLS = ("answers", "bugs.py", "prove.py", "mutants.jsonl", "handout.py", "tests")


def main() -> None:
    parser = argparse.ArgumentParser(description="A copy without solutions.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if folder.exists() or folder.resolve().is_relative_to(ROOT):
        raise SystemExit(f"{folder} exists, or is within the project: name a new folder outside.")
    for lab in place.HOMES:
        for name, function in place.load(lab).items():
            if not place.is_empty(function):
                raise SystemExit(f"course/labs/{lab}.py has a solution, {name}: put the original "
                                 "back (git checkout course/labs).")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT, *TELLS))
    print(f"The project without solutions is in {folder}.")


if __name__ == "__main__":
    main()
