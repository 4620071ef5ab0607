"""The bug hunt: real bugs of this field, each planted into a copy of the project.

    python course/bugs.py list                    # the complaint of each bug's user
    python course/bugs.py plant 3 ~/hunt-3        # writes a copy that has bug 3
    python course/bugs.py hint 3                  # then hint 3 2 and hint 3 3, which say more
    python course/bugs.py check 3 minirl.py:123   # is the bug in this line?
    python course/bugs.py answer 3                # what it was, who had it, which test catches it

Somebody reported each of these bugs, and the answer has the link to the report. The planted program
trains, except for two bugs that end it before the first step. Only the teacher has this file.
"""
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import tyro
from tyro.conf import Positional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.mutate import mutate, mutated

ANSWERS = ROOT / "course" / "answers"
HIDDEN = ("tests", "course", "bench", "docs", ".gitignore")  # they would show the bug
BESIDE = 2  # a line at most this far from the bug counts as found


def bugs() -> dict[int, dict]:
    lines = (ANSWERS / "bugs.jsonl").read_text(encoding="utf-8").splitlines()
    return {bug["number"]: bug for bug in map(json.loads, lines)}


def find(number: int) -> dict:
    known = bugs()
    if number not in known:
        raise SystemExit(f"There is no bug {number}: choose one of 1 to {len(known)}.")
    return known[number]


# ------------------------------------------------------------------------------ the copy
def tracked() -> list[str]:
    """The files that git knows. A student's solutions are not among them, so no copy has them."""
    try:
        names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit("A copy has the files that git tracks: plant in a git clone.") from None
    return names.split("\0")[:-1]


def copy(folder: Path) -> None:
    for name in tracked():
        if Path(name).parts[0] not in HIDDEN:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def command_of(bug: dict) -> str:
    """The command for the copy and for the project, so that the two runs can be compared.

    The run's name has the bug's number, so that a second hunt can begin in the same folder.
    """
    return shlex.join(["python", "minirl.py", "--steps", "20", "--name", f"hunt-{bug['number']}",
                       "--log-groups", "all", *bug["flags"]])


def task_of(bug: dict) -> str:
    """The text for the students, which does not show the bug."""
    run = f"runs/hunt-{bug['number']}"
    return f"""The user says:

    {bug["symptom"]}

Run this command in this folder:

    {command_of(bug)}

Then run the same command in the project without the bug, and compare {run} of
both folders. With --log-groups all, groups.jsonl has the answers to every prompt.
If the program says that {run} exists already, choose another --name or delete
that folder. You have found the bug when you can name its file and its line.
"""


# ------------------------------------------------------------------------------ where the bug is
def planted_lines(bug: dict) -> range:
    """The lines of the planted file (from 1) that have the bug, or had what it deletes."""
    before, _, _ = (ROOT / bug["file"]).read_text(encoding="utf-8").partition(bug["old"])
    first = before.count("\n") + 1
    return range(first, first + max(1, len(bug["new"].splitlines())))


def function_at(text: str, line: int) -> range:
    """The lines (from 1) from the `def` or `class` above this line to the next one below."""
    starts = [n for n, found in enumerate(text.splitlines(), 1)
              if re.match(r"\s*(?:def|class) \w", found)]
    return range(max([n for n in starts if n <= line], default=1),
                 min([n for n in starts if n > line], default=text.count("\n") + 2))


def verdict(bug: dict, where: str) -> str:
    """Whether the bug is at `where`, "file:line" of the planted copy."""
    file, _, line = where.rpartition(":")
    if not line.isdigit():
        raise SystemExit(f"{where} is not of the form file:line, such as minirl.py:123.")
    if Path(file).name != Path(bug["file"]).name:
        return "No: that file has no bug."
    lines = planted_lines(bug)
    if lines[0] - BESIDE <= int(line) <= lines[-1] + BESIDE:
        return f"Yes! `answer {bug['number']}` says who had this bug."
    planted = mutated((ROOT / bug["file"]).read_text(encoding="utf-8"), bug)
    if int(line) in function_at(planted, lines[0]):
        return f"Nearly: the function is right, but the bug is more than {BESIDE} lines away."
    return "No: the file is right, but the bug is in another function."


# ------------------------------------------------------------------------------ the commands
def list_bugs() -> None:
    """List the complaints of the users, with the session that each bug belongs to."""
    for number, bug in bugs().items():
        start = ", a good first bug" if "starter" in bug else ""
        print(f"{number:3}  session {bug['session']}{start}: {bug['symptom']}")


def plant(number: Positional[int], folder: Positional[Path]) -> None:
    """Write a copy of the project that has this bug."""
    bug = find(number)
    if folder.exists() or folder.resolve().is_relative_to(ROOT):
        raise SystemExit(f"{folder} exists already, or is inside the project, so name a new folder "
                         "outside.")
    copy(folder)
    mutate(folder, bug)
    (folder / "HUNT.txt").write_text(task_of(bug), encoding="utf-8")
    print(f"Bug {number} is in {folder}. HUNT.txt there tells the students:\n\n{task_of(bug)}")


def hint(number: Positional[int], which: Positional[int] = 1) -> None:
    """One of three hints. A higher number says more."""
    hints = find(number)["hints"]
    if not 1 <= which <= len(hints):
        raise SystemExit(f"There is no hint {which}: choose one of 1 to {len(hints)}.")
    print(hints[which - 1])


def check(number: Positional[int], where: Positional[str]) -> None:
    """Say whether the bug is in this line (file:line)."""
    print(verdict(find(number), where))


def answer(number: Positional[int]) -> None:
    """Say what the bug was, who had it, and which test catches it."""
    bug = find(number)
    seen = bug["seen"]
    print(f"{bug['why']}: {bug['file']}, line {planted_lines(bug)[0]}\n\n{bug['answer']}\n")
    print("planted:")
    for sign, text in (("-", bug["old"]), ("+", bug["new"])):
        for line in filter(None, text.split("\n")):
            print(f"  {sign} {line}")
    print(f"\nwho had it: {bug['source']}\n  {bug['url']}\n")
    print(f"what shows it: {bug['diagnostic']}\n  without the bug {seen['sound']}, with the bug "
          f"{seen['planted']}\n  ({seen['command']})")
    print(f"which test catches it: {bug['test']}")


def main() -> None:
    commands = dict(list=list_bugs, plant=plant, hint=hint, check=check, answer=answer)
    tyro.extras.subcommand_cli_from_dict(commands, prog="python course/bugs.py",
                                         description="Real bugs to find.")


if __name__ == "__main__":
    main()
