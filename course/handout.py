"""The project for a class, without solutions.

    python course/handout.py ~/class        # a new folder, to be zipped or pushed

Left out: course/answers; the bug hunt, which needs them (hand out planted folders instead);
course/mutants.jsonl, a list of what students get wrong; the tests. The project's own functions
stay, since nothing trains without them.
"""
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.mutate import LEFT_OUT  # noqa: E402
from course import place  # noqa: E402

TELLS = ("answers", "bugs.py", "mutants.jsonl", "handout.py", "tests")


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    folder = Path(sys.argv[1])
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
