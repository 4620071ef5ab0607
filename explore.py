"""See a run: this program turns its logs into one HTML page that needs no server and no network.

    python explore.py runs/NAME                         # writes runs/NAME/explore.html
    python explore.py runs/NAME --against runs/OTHER    # two runs side by side
    python explore.py runs/NAME --steps 1-50            # of a long run, these steps in full
    python explore.py runs/NAME --n 2 --N 1             # "what if" with other sizes

The page shows the curves, the rounds of every recorded prompt, and for every trained token its
three probabilities and Eq. 7 with its numbers. A run records what --log-groups of minirl.py says,
in groups.jsonl (see docs/explore.md).

A page has at most 20 MB. What does not fit is left out, tokens first, and the page and this program
say so. The data are in the page as gzipped JSON in base64. That takes a seventh of their size, and
nothing that a model wrote can be taken for HTML.
"""
import base64
import gzip
import json
import re
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Annotated

import tyro

from parts import what_if
from parts.config import in_one_sentence, parse_flags
from parts.folder import row_of, write_safely
from parts.grader import NO_VERDICT
from parts.plot import drawn_rows, panels_of, what_differs
from parts.provenance import settings
from parts.text import quiet_end, shown
from rewards import extract_answer

TEMPLATE = Path(__file__).parent / "parts" / "explore.html"
PLACE = "/*DATA*/"  # the data replace this in the template
MOST_BYTES = 20_000_000  # the size of a page
MOST_TEXT = 64_000_000  # characters of JSON that a browser opens within 3 seconds
OF_TOKENS = ("ids", "tokens", "mu", "theta", "old", "mask", "weight", "entropy", "agrees")
OF_A_GROUP = {"step", "place", "prompt", "outcome", "pool"}  # what the page cannot do without
ABSENT, WITH_TEXTS, WHOLE = range(3)  # how much of a recorded prompt the page holds


@dataclass
class PageConfig:
    """What is shown."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")] = ""
    """folder of a run, such as runs/NAME"""
    against: str = ""
    """folder of another run, to show beside it"""
    steps: str = ""
    """only the prompts of these steps, such as 1-50 or 7; empty = all. Curves are always whole"""
    n: int = 0
    """what if: samples kept per prompt; 0 = as in the run"""
    M: int = 0
    """what if: samples per round; 0 = as in the run"""
    N: int = 0
    """what if: most rounds per prompt; 0 = as in the run"""

    def validate(self) -> None:
        """Raises ValueError, one sentence, for what cannot work."""
        if not self.run:
            raise ValueError("name the folder of a run, such as runs/NAME")
        if self.against and Path(self.run).resolve() == Path(self.against).resolve():
            raise ValueError(f"{shown(self.run)} cannot be compared with itself: name another run "
                             "with against")
        first_and_last(self.steps)
        if min(self.n, self.M, self.N) < 0:
            raise ValueError("n, M and N are at least 1, or 0 for those of the run")

    @property
    def sizes(self) -> dict:
        """The sizes of the sampler that were asked for."""
        return {name: getattr(self, name) for name in ("n", "M", "N") if getattr(self, name)}


def first_and_last(steps: str) -> tuple[int, int] | None:
    """(1, 50) of "1-50"; None of "". Raises ValueError for what is neither a step nor a range."""
    if not steps:
        return None
    found = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", steps)
    if not found or int(found[2] or found[1]) < int(found[1]):
        raise ValueError(f"steps must be a step such as 7 or a range such as 1-50, not "
                         f"{shown(steps, 40)}")
    return int(found[1]), int(found[2] or found[1])


# ------------------------------------------------------------------------------ the logs
@dataclass
class Recorded:
    """A line of groups.jsonl. Its tokens stay on the disk until it is clear that they fit."""

    row: dict  # without tokens
    file: object
    at: int  # where the line begins in the file, in bytes
    sizes: tuple[int, int, int]  # in characters: ABSENT, WITH_TEXTS, WHOLE
    rank: tuple = ()  # the lowest come first where not all fit

    def shown_as(self, level: int) -> dict:
        """The row for the page."""
        if level == WITH_TEXTS:
            return self.row
        self.file.seek(self.at)
        whole = row_of(self.file.readline().decode(errors="replace"))
        return self.row | dict(pool=[now | s for now, s in zip(whole["pool"], self.row["pool"])])


def read_run(folder: Path, span: tuple[int, int] | None) -> tuple[dict, list[str]]:
    """A run for the page, but with `Recorded` groups; and what the page must say about it.

    Raises SystemExit if the folder holds no run with a finished step, and OSError if a log cannot
    be read.
    """
    config = settings(folder) if folder.is_dir() else None
    if not config:
        raise SystemExit(f"{shown(folder)} is no folder of a training run with a config.json: name "
                         "one, such as runs/NAME.")
    metrics, notes = drawn_rows(folder / "metrics.jsonl"), []
    if not metrics:
        raise SystemExit(f"{shown(folder)} has no finished step yet: there is nothing to see.")
    groups, damaged = read_groups(folder / "groups.jsonl", span)
    if damaged:
        notes.append(f"Damaged lines of {shown(folder)}/groups.jsonl that were left out "
                     f"(a crash leaves one): {damaged}.")
    if not groups:
        which = f"in steps {span[0]} to {span[1]}" if span else "at all"
        notes.append(f"{shown(folder)} has no recorded prompts {which}, so it has curves only "
                     "(--log-groups of minirl.py).")
    evals = drawn_rows(folder / "eval.jsonl")
    return dict(config=config, metrics=metrics, evals=evals, groups=groups), notes


def read_groups(file: Path, span: tuple[int, int] | None) -> tuple[list[Recorded], int]:
    """(The recorded prompts of these steps in the order of the log, how many lines are damaged)."""
    found, damaged, at = [], 0, 0
    if not file.exists():
        return found, damaged
    log = open(file, "rb")  # stays open: a run that goes on may replace the file
    for line in log:
        if within(line, span):
            row = row_of(line.decode(errors="replace"), is_group)
            if row:
                found.append(recorded(row, len(line), log, at))
            else:
                damaged += 1
        at += len(line)
    rank(found)
    return found, damaged


def is_group(row: dict) -> bool:
    """Whether a row has what the page cannot do without, each of its kind."""
    pool = row.get("pool")
    return (OF_A_GROUP <= row.keys() and isinstance(row["step"], int) and isinstance(pool, list)
            and all(isinstance(s, dict) and isinstance(s.get("text"), str) for s in pool))


def within(line: bytes, span: tuple[int, int] | None) -> bool:
    """Whether a line belongs to these steps. It begins with its step, so it need not be parsed."""
    step = re.match(rb'\{"step": (\d{1,20}),', line)
    return span is None or step is None or span[0] <= int(step[1]) <= span[1]


def recorded(row: dict, length: int, log, at: int) -> Recorded:
    """A line of `length` bytes, with the contents of each answer's box added."""
    row["pool"] = [
        {name: value for name, value in s.items() if name not in OF_TOKENS}
        | dict(answer=extract_answer(s["text"])) for s in row["pool"]]
    size = len(json.dumps(row))
    return Recorded(row, log, at, (0, size, max(size, length)))


def rank(found: list[Recorded]) -> None:
    """Rank the prompts: each step's first prompt comes first, then each step's second.

    Among those, steps that a large power of two divides come first: they are evenly spread.
    """
    seen = {}
    for one in found:
        step = one.row["step"]
        seen[step] = seen.get(step, 0) + 1
        one.rank = (seen[step], -(step & -step))


# ------------------------------------------------------------------------------ what fits
def choose(groups: list[Recorded], room: int) -> list[int]:
    """One level per prompt, within `room` characters: how much of it the page shows.

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
    """The page, at most MOST_BYTES long, and the sentences about what is not in it."""
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
    left, shown_runs = iter(levels), []
    for run in runs:
        pairs = [(one, next(left)) for one in run["groups"]]
        rows = [one.shown_as(level) for one, level in pairs if level != ABSENT]
        shown_runs.append(run | dict(groups=rows))
    return dict(left_out=" ".join(said), runs=shown_runs)


def with_what_follows(data: dict, sizes: dict | None = None) -> dict:
    """The data, with what today's code makes of them. `sizes`: other n, M, N for the what-if."""
    for run in data["runs"]:
        what_if.add_to(run, sizes)
        add_questions(run["groups"])
    rows = [row for run in data["runs"] for row in run["metrics"]]
    return data | dict(no_verdict=NO_VERDICT, panels=panels_of(rows))


def add_questions(groups: list[dict]) -> None:
    """Each prompt without the beginning and the end that all prompts of a run share."""
    prompts = {str(group["prompt"]) for group in groups}
    backwards = [prompt[::-1] for prompt in prompts]
    start = re.sub(r"[^\s>]+\Z", "", commonprefix(list(prompts))) if len(prompts) > 1 else ""
    end = re.sub(r"[^\s<]+\Z", "", commonprefix(backwards)) if len(prompts) > 1 else ""
    for group in groups:
        prompt = str(group["prompt"])
        group["question"] = prompt[len(start):len(prompt) - len(end)].strip() or prompt


# ------------------------------------------------------------------------------ the page
def page_of(data: dict) -> str:
    """The template with the data as gzipped JSON in base64, which no text can break out of."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a browser knows no NaN and no infinity
        finite = json.loads(json.dumps(data), parse_constant=lambda name: None)
        text = json.dumps(finite, separators=(",", ":"))
    packed = gzip.compress(text.encode(), 6, mtime=0)
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace(PLACE, base64.b64encode(packed).decode())


def main(config: PageConfig) -> None:
    span = first_and_last(config.steps)
    folders = [Path(name) for name in (config.run, config.against) if name]
    try:
        read = [read_run(folder, span) for folder in folders]
    except OSError as error:
        raise SystemExit(f"The run cannot be read: {shown(error)}") from None
    notes = [note for _, some in read for note in some]
    if span:
        notes.append(f"Prompts of steps {span[0]} to {span[1]} only (--steps).")
    notes += what_differs([run for run, _ in read])
    names = [folder.resolve().name for folder in folders]
    if len({*names}) < len(names):
        names = map(str, folders)  # as they were typed
    runs = [dict(name=name) | run for name, (run, _) in zip(names, read)]
    page, said = fitting_page(runs, notes, config.sizes)
    path = folders[0] / "explore.html"
    try:
        write_safely(path, page)
    except OSError as error:
        raise SystemExit(f"The page cannot be written: {shown(error)}") from None
    for sentence in said:
        print(sentence)
    print(f"{path} ({len(page) / 1e6:.1f} MB): open it in a browser")


def parse(argv: list[str] | None = None) -> PageConfig:
    """Flags to PageConfig. Ends the program with code 2 and one sentence if they cannot work."""
    with in_one_sentence("explore.py"):
        config = parse_flags(PageConfig, argv, "explore.py", "A run's logs as one HTML page.")
        config.validate()
    return config


if __name__ == "__main__":
    with quiet_end():
        main(parse())
