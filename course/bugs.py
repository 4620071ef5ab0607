"""The bug hunt: real bugs of this field, planted into a copy of the project.

    python course/bugs.py list
    python course/bugs.py plant 3 ~/hunt-3        # a copy with bug 3, and its symptom
    python course/bugs.py hint 3                  # and hint 3 2, hint 3 3: nearer each time
    python course/bugs.py check 3 minirl.py:123   # is it this line?
    python course/bugs.py answer 3                # what it was, who had it, which test catches it

Every bug has been somebody's: a link is in the answer. In the copy the program runs (two bugs end
it at the start, which is a symptom too). Its numbers are what you have: metrics.jsonl and
groups.jsonl of a run, `python explore.py runs/NAME`, the curves. The copy has no tests and no
course, for they would tell, and comparing it with the original is no hunt. Nor is looking into
course/answers/, where the answers are.
"""
import json
import re
import shlex
import shutil
import sys
from difflib import SequenceMatcher
from pathlib import Path

import tyro
from tyro.conf import Positional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.mutate import LEFT_OUT, mutate, mutated  # noqa: E402

ANSWERS = ROOT / "course" / "answers"
NOT_IN_THE_COPY = (*LEFT_OUT, "tests", "course", "bench", "docs", ".gitignore")
LONG = "long.jsonl"
PREFIX = ("Work out the following chain of additions and subtractions from left to right, one link "
          "at a time, and write the last result into a box, please: ")


def bugs() -> dict[int, dict]:
    lines = (ANSWERS / "bugs.jsonl").read_text(encoding="utf-8").splitlines()
    return {bug["number"]: bug for bug in map(json.loads, lines)}


def find(number: int) -> dict:
    known = bugs()
    if number not in known:
        raise SystemExit(f"There is no bug {number}: choose one of 1 to {len(known)}.")
    return known[number]


def command_of(bug: dict, folder: Path) -> str:
    """The same in the copy and in the project: files that only the copy has are named in full."""
    flags = [str(folder.resolve() / LONG) if flag == LONG else flag for flag in bug["flags"]]
    return shlex.join(["python", "minirl.py", "--steps", "20", "--name", "hunt", *flags])


def long_prompts() -> list[dict]:
    """For the bug that shows only on long prompts that begin alike.

    The tiny model has never seen any so long. It rambles, and a box with a 0 is its only luck.
    """
    return [dict(problem=f"{PREFIX}{x}-{x}=?", answer="0") for x in range(1, 301)]


def copy(folder: Path, left_out=NOT_IN_THE_COPY) -> None:
    """The project, with the long prompts that one of the bugs needs."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_out))
    lines = [json.dumps(row) + "\n" for row in long_prompts()]
    (folder / LONG).write_text("".join(lines), encoding="utf-8")


def planted_lines(bug: dict) -> range:
    """The lines of the planted file (from 1) that have the bug.

    Of a deletion: all lines of the function that lacks something, since none of them is wrong.
    """
    before = (ROOT / bug["file"]).read_text(encoding="utf-8")
    after = mutated(before, bug)
    pieces = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    changed = [(first, end) for kind, _, _, first, end in pieces.get_opcodes() if kind != "equal"]
    first, end = changed[0][0], changed[-1][1]
    return range(first + 1, end + 1) or function_at(after, first)


def function_at(text: str, line: int) -> range:
    """The lines (from 1) of the function or class that a line is in, up to the next one."""
    starts = [n for n, found in enumerate(text.splitlines(), 1)
              if re.match(r"\s*(?:def|class) \w", found)]
    return range(max([n for n in starts if n <= line], default=1),
                 min([n for n in starts if n > line], default=text.count("\n") + 2))


def verdict(bug: dict, where: str) -> str:
    """How near `where`, "file:line" of the planted copy, is."""
    file, _, line = where.rpartition(":")
    if not line.isdigit():
        raise SystemExit(f"{where} is not of the form file:line, such as minirl.py:123.")
    if Path(file).name != Path(bug["file"]).name:
        return "No: that file is sound."
    lines = planted_lines(bug)
    if int(line) in lines:
        return f"Yes! `answer {bug['number']}` tells its story."
    text = mutated((ROOT / bug["file"]).read_text(encoding="utf-8"), bug)
    if int(line) in function_at(text, lines[0]):
        return "Nearly: the function is right, the line is not."
    return "No: the file is right, the function is not."


# ------------------------------------------------------------------------------ the commands
def list_bugs() -> None:
    """What the users complain of."""
    for number, bug in bugs().items():
        print(f"{number:3}  {bug['symptom']}")


def plant(number: Positional[int], folder: Positional[Path]) -> None:
    """A copy with a bug."""
    bug = find(number)
    if folder.exists():
        raise SystemExit(f"{folder} exists already: name a new folder.")
    if folder.resolve().is_relative_to(ROOT):
        raise SystemExit(f"{folder} is within the project: name a folder outside.")
    copy(folder)
    mutate(folder, bug)
    print(f"Bug {number} is in {folder}. What its user says:\n\n    {bug['symptom']}\n\n"
          f"See it with, in that folder,\n\n    {command_of(bug, folder)}\n\n"
          f"and compare with the same command here, where the bug is not.")


def hint(number: Positional[int], which: Positional[int] = 1) -> None:
    """A hint, nearer by its number."""
    hints = find(number)["hints"]
    if not 1 <= which <= len(hints):
        raise SystemExit(f"There are hints 1 to {len(hints)}.")
    print(hints[which - 1])
    if which < len(hints):
        print(f"(nearer: hint {number} {which + 1})")


def check(number: Positional[int], where: Positional[str]) -> None:
    """Is it this line (file:line)?"""
    print(verdict(find(number), where))


def answer(number: Positional[int]) -> None:
    """What it was."""
    bug = find(number)
    lines = planted_lines(bug)
    proof = [json.loads(line) for line in (ANSWERS / "proof.jsonl").read_text().splitlines()]
    (seen,) = [row for row in proof if row["number"] == number]
    print(f"{bug['why']}: {bug['file']}, line {lines[0]}\n\n{bug['answer']}\n")
    print("planted:\n" + "".join(f"  - {line}\n" for line in bug["old"].strip("\n").split("\n"))
          + "".join(f"  + {line}\n" for line in bug["new"].strip("\n").split("\n") if line))
    print(f"who had it: {bug['source']}\n  {bug['url']}\n")
    print(f"what shows it: {bug['diagnostic']}\n  in a sound run {seen['sound']}, with the bug "
          f"{seen['planted']}\n  ({seen['command']})")
    print(f"what catches it: {bug['test']}")


def main() -> None:
    commands = dict(list=list_bugs, plant=plant, hint=hint, check=check, answer=answer)
    tyro.extras.subcommand_cli_from_dict(commands, prog="python course/bugs.py",
                                         description="Real bugs to find.")


if __name__ == "__main__":
    main()
