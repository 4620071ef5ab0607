"""Grades a class: a text for each student, with a table of points.

    python course/grade.py class                 # writes graded/points.csv and graded/ann.txt, ...
    python course/grade.py class --out week-3    # writes into the folder week-3 instead

A submission is a .py file with lab_N in its name, and its student is the folder below `class` that
contains it. A file that lies in `class` itself has the student in its name, for example
lab_3_dan.py. A text has all that check.py says about the student's files. In points.csv each
student has a row and each lab a column, and an empty cell means that there is no file. Of two files
for one lab the better one counts.

Who would cheat is a student who has read this program, and all there is to win is the points of a
lab. So a submission runs in a process of its own, which gets calls and returns plain values, while
expected values and points are in this one, which never runs a student's code. What is left is to
call or copy the project's own functions, and to do harm, because the code has your rights: ask each
student about one function, and use a separate account or a container.
"""
import argparse
import csv
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from course import check


def submissions(folder: Path) -> dict[str, list[tuple[str, Path]]]:
    """student -> (lab, file) of each file; a name that does not say both is printed."""
    found = defaultdict(list)
    for file in sorted(folder.rglob("[!.]*.*")):
        first, *below = file.relative_to(folder).parts
        lab = check.lab_in(file.name)
        if file.suffix != ".py":
            if lab and file.is_file():  # such as a notebook or a zip
                print(f"{file} is not graded, because its name does not end with .py.")
            continue
        rest = re.sub(check.LAB, "", file.stem)
        rest = re.sub(r"\(\d+\)$", "", rest).strip(" _-")  # the (1) of a second download
        student = first if below else rest
        if lab and student:
            found[student].append((lab, file))
        else:
            missing = "the student" if lab else "the lab (lab_1 to lab_8)"
            print(f"{file} is not graded, because its name does not say {missing}.")
    return found


def graded(lab: str, file: Path) -> tuple[int, str]:
    """(points, everything that check.py says about the file)."""
    points, said = 0, []
    try:
        points, _ = check.grade_file(lab, file, say=said.append, output=subprocess.DEVNULL)
    except SystemExit as refused:
        said.append(str(refused))
    return points, "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description="Points and texts for a class.")
    parser.add_argument("folder", type=Path, help="the folder with all submissions")
    parser.add_argument("--out", type=Path, default=Path("graded"),
                        help="where the results are written; default: graded")
    args = parser.parse_args()
    if not args.folder.is_dir():
        raise SystemExit(f"There is no folder {args.folder}.")
    args.out.mkdir(parents=True, exist_ok=True)
    rows, handed_in = [], submissions(args.folder.resolve())
    for lab in {lab for files in handed_in.values() for lab, _ in files}:
        importlib.import_module(f"course.checks.{lab}")  # before a submission could change the file
    for student, files in sorted(handed_in.items()):
        row, text = dict(student=student), ""
        for lab, file in files:
            points, said = graded(lab, file)
            print(f"{student} {file.name}: {said.rstrip().splitlines()[-1]}", flush=True)
            row[lab] = max(points, row.get(lab, 0))
            text += f"{file.name}\n\n{said}\n\n"
        (args.out / f"{student}.txt").write_text(text, encoding="utf-8")
        rows.append(row)
    # utf-8-sig: without the mark Excel misreads a name such as Björn.
    with open(args.out / "points.csv", "w", newline="", encoding="utf-8-sig") as file:
        table = csv.DictWriter(file, ["student", *check.HOMES])
        table.writeheader()
        table.writerows(rows)
    print(f"{args.out / 'points.csv'} has {len(rows)} students.")


if __name__ == "__main__":
    main()
