"""Turns the logs of a run into one HTML page, which needs no server and no network.

    python explore.py runs/NAME                         # writes runs/NAME/explore.html
    python explore.py runs/NAME --against runs/OTHER    # two runs side by side
    python explore.py runs/NAME --steps 1-50            # only these steps, for a long run
    python explore.py runs/NAME --n 2 --N 1             # "what if" with other sizes

The page shows the curves, the rounds of every recorded prompt, and for every trained token its
three probabilities and Eq. 7 with its numbers. The flag --log-groups of minirl.py decides which
prompts are recorded, in groups.jsonl (docs/runs.md).

A page has at most 20 MB. If the data do not fit, tokens are left out first, and the page and this
program say so. The page holds the data as gzipped JSON in base64. This takes a seventh of their
size, and no text of a model can become HTML.
"""
import base64
import gzip
import json
import re
from collections import Counter
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Annotated

import tyro

from explorer import what_if
from explorer.panels import panels_of, read_run, smoothing_reach, what_differs
from parts.config import CLIPS
from parts.files import as_json, row_of, write_safely
from parts.grader import NO_VERDICT
from parts.text import quiet_end, shown
from rewards import extract_answer

TEMPLATE = Path(__file__).parent / "explorer" / "page.html"
PLACE = "/*DATA*/"  # the data replace this in the template
MOST_BYTES = 20_000_000  # the size of a page
MOST_TEXT = 64_000_000  # characters of JSON that a browser opens within 3 seconds
OF_TOKENS = ("ids", "tokens", "mu", "theta", "old", "mask", "weight", "entropy", "agrees")
OF_A_GROUP = {"step", "place", "prompt", "outcome", "pool"}  # keys that the page needs
ABSENT, WITH_TEXTS, WHOLE = range(3)  # how much of a recorded prompt is on the page


@dataclass
class PageConfig:
    """The content of the page."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """folder of a run, such as runs/NAME"""
    against: str = ""
    """folder of another run, to show next to it"""
    steps: str = ""
    """only the prompts of these steps, such as 1-50 or 7; empty = all; curves show every step"""
    n: int = 0
    """what if: kept answers per prompt; 0 = as in the run"""
    M: int = 0
    """what if: answers per round; 0 = as in the run"""
    N: int = 0
    """what if: largest number of rounds; 0 = as in the run"""


def first_and_last(steps: str) -> tuple[int, int] | None:
    """(1, 50) for "1-50"; None for "". Raises SystemExit for other texts."""
    if not steps:
        return None
    span = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", steps)
    if not span or int(span[2] or span[1]) < int(span[1]):
        raise SystemExit(f"--steps takes a step such as 7 or a range such as 1-50, not "
                         f"{shown(steps, 40)}.")
    return int(span[1]), int(span[2] or span[1])


# ------------------------------------------------------------------------------ the logs
@dataclass
class Recorded:
    """A line of groups.jsonl. Its tokens are read only if they fit into the page."""

    row: dict  # without tokens
    file: object
    at: int  # where the line begins in the file, in bytes
    sizes: tuple[int, int, int]  # in characters: ABSENT, WITH_TEXTS, WHOLE
    rank: tuple[int, int]  # where not all fit, the lowest come first

    def shown_as(self, level: int) -> dict:
        """The row for the page."""
        if level == WITH_TEXTS:
            return self.row
        self.file.seek(self.at)
        whole = row_of(self.file.readline().decode(errors="replace"))
        return self.row | dict(pool=[now | s for now, s in zip(whole["pool"], self.row["pool"])])


def read_runs(folders: list[Path], span: tuple[int, int] | None) -> tuple[list[dict], list[str]]:
    """(The runs, with `Recorded` groups, and sentences about them that the page must show)."""
    runs, notes = [read_run(folder) for folder in folders], []
    same_name = len({run["name"] for run in runs}) < len(runs)
    for run, folder in zip(runs, folders):
        run["name"] = str(folder) if same_name else run["name"]
        run["groups"], damaged = read_groups(folder / "groups.jsonl", span)
        if damaged:
            notes.append(f"Damaged lines of {shown(folder)}/groups.jsonl that were left out "
                         f"(a crash leaves one): {damaged}.")
        if not run["groups"]:
            which = f"in steps {span[0]} to {span[1]}" if span else "at all"
            notes.append(f"{shown(folder)} has no recorded prompts {which}, so it has curves only "
                         "(--log-groups of minirl.py).")
    if span:
        notes.append(f"Prompts of steps {span[0]} to {span[1]} only (--steps).")
    return runs, notes + what_differs(runs)


def read_groups(file: Path, span: tuple[int, int] | None) -> tuple[list[Recorded], int]:
    """(The recorded prompts of these steps in the order of the log, how many lines are damaged)."""
    groups, damaged, at, prompts_of = [], 0, 0, Counter()
    # The log stays open, because a running program may replace the file.
    log = open(file, "rb") if file.exists() else ()
    for line in log:
        if within(line, span):
            row = row_of(line.decode(errors="replace"), is_group)
            if row:
                step = row["step"]
                prompts_of[step] += 1
                # A step's first prompt comes first. Of those, the steps that a large power of two
                # divides come first, because they are evenly spread.
                rank = (prompts_of[step], -(step & -step))
                groups.append(recorded(row, len(line), log, at, rank))
            else:
                damaged += 1
        at += len(line)
    return groups, damaged


def is_group(row: dict) -> bool:
    """Whether a row has all keys that the page needs, with values of the right types."""
    pool = row.get("pool")
    return (OF_A_GROUP <= row.keys() and isinstance(row["step"], int) and isinstance(pool, list)
            and all(isinstance(s, dict) and isinstance(s.get("text"), str) for s in pool))


def within(line: bytes, span: tuple[int, int] | None) -> bool:
    """Whether a line belongs to these steps. Its step comes first, so no parsing is needed."""
    step = re.match(rb'\{"step": (\d{1,20}),', line)
    return span is None or step is None or span[0] <= int(step[1]) <= span[1]


def recorded(row: dict, length: int, log, at: int, rank: tuple) -> Recorded:
    """A line of `length` bytes, with the contents of each answer's box added."""
    row["pool"] = [
        {name: value for name, value in s.items() if name not in OF_TOKENS}
        | dict(answer=extract_answer(s["text"])) for s in row["pool"]]
    size = len(json.dumps(row))
    return Recorded(row, log, at, (0, size, max(size, length)), rank)


# ------------------------------------------------------------------------------ what fits
def choose(groups: list[Recorded], room: int) -> list[int]:
    """One level per prompt (how much of it is on the page), within `room` characters.

    Prompts without their tokens fill the room first.
    """
    levels = [ABSENT] * len(groups)
    order = sorted(range(len(groups)), key=lambda i: groups[i].rank)
    for level in (WITH_TEXTS, WHOLE):
        for i in order:
            sizes = groups[i].sizes
            more = sizes[level] - sizes[level - 1]
            if levels[i] == level - 1 and more <= room:
                levels[i] = level
                room -= more
    return levels


def left_out(levels: list[int]) -> list[str]:
    """A sentence on what did not fit into the page; no sentence if everything did."""
    bare, absent = levels.count(WITH_TEXTS), levels.count(ABSENT)
    if not bare and not absent:
        return []
    return [f"To keep this page small, of {len(levels):,} recorded prompts {bare:,} are here "
            f"without their tokens and {absent:,} are not: --steps 1-50 shows fewer steps in full."]


def fitting_page(runs: list[dict], notes: list[str], sizes: dict) -> tuple[str, list[str]]:
    """The page, at most MOST_BYTES long, and sentences about what was left out."""
    groups, room = [one for run in runs for one in run["groups"]], MOST_TEXT
    while True:
        levels = choose(groups, room)
        said = notes + left_out(levels)
        page = page_of(with_what_follows(data_of(runs, levels, said), sizes))
        size = len(page.encode())
        if size <= MOST_BYTES or not any(levels):
            return page, said
        used = sum(one.sizes[level] for one, level in zip(groups, levels))
        room = int(0.9 * used * MOST_BYTES / size)


def data_of(runs: list[dict], levels: list[int], said: list[str]) -> dict:
    """The data that the page reads."""
    left, shown_runs = iter(levels), []  # each run takes its share of the levels
    for run in runs:
        rows = [one.shown_as(level) for one, level in zip(run["groups"], left) if level != ABSENT]
        shown_runs.append(run | dict(groups=rows))
    return dict(left_out=" ".join(said), runs=shown_runs)


# ------------------------------------------------------------------------------ the page
def with_what_follows(data: dict, sizes: dict | None = None) -> dict:
    """The data with all that is computed from them. `sizes`: other n, M, N for the what-if."""
    for run in data["runs"]:
        what_if.add_to(run, sizes)
        add_questions(run["groups"])
    rows = [row for run in data["runs"] for row in run["metrics"]]
    reach = smoothing_reach(max((row["step"] for row in rows), default=0))
    facts = dict(no_verdict=NO_VERDICT, clips=CLIPS)
    return data | facts | dict(panels=panels_of(rows), reach=reach)


def add_questions(groups: list[dict]) -> None:
    """Each prompt without the beginning and the end that all prompts of a run share."""
    prompts = {str(group["prompt"]) for group in groups}
    backwards = [prompt[::-1] for prompt in prompts]
    start = re.sub(r"[^\s>]+\Z", "", commonprefix(list(prompts))) if len(prompts) > 1 else ""
    end = re.sub(r"[^\s<]+\Z", "", commonprefix(backwards)) if len(prompts) > 1 else ""
    for group in groups:
        prompt = str(group["prompt"])
        group["question"] = prompt[len(start):len(prompt) - len(end)].strip() or prompt


def page_of(data: dict) -> str:
    """The template with the data as gzipped JSON in base64, which no text can break out of."""
    packed = gzip.compress(as_json(data, separators=(",", ":")).encode(), 6, mtime=0)
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, base64.b64encode(packed).decode())


def main(config: PageConfig) -> None:
    span = first_and_last(config.steps)
    sizes = {name: getattr(config, name) for name in ("n", "M", "N") if getattr(config, name)}
    folders = [Path(name) for name in (config.run, config.against) if name]
    path = folders[0] / "explore.html"
    try:
        runs, notes = read_runs(folders, span)
        page, notes = fitting_page(runs, notes, sizes)
        write_safely(path, page)
    except OSError as error:
        raise SystemExit(f"The page cannot be made: {shown(error)}") from None
    for sentence in notes:
        print(sentence)
    print(f"{path} ({len(page) / 1e6:.1f} MB): open it in a browser")


def parse(argv: list[str] | None = None) -> PageConfig:
    return tyro.cli(PageConfig, args=argv, prog="explore.py",
                    description="Turns the logs of a run into one HTML page.")


if __name__ == "__main__":
    with quiet_end():
        main(parse())
