"""Turns the logs of a run into one HTML page, which needs no server and no network.

    python explore.py runs/NAME                            # writes runs/NAME/explore.html
    python explore.py runs/NAME --against runs/OTHER       # two runs side by side
    python explore.py runs/NAME --steps 1 50 --groups 2    # a smaller page of a long run
    python explore.py runs/NAME --n 2 --N 1                # "what if" with other sizes

The page shows the curves, the rounds of every recorded prompt, and for every trained token its
three probabilities and Eq. 7 with its numbers. The flag --log-groups of minirl.py decides which
prompts are recorded, in groups.jsonl (docs/runs.md).

The page holds the data as gzipped JSON in base64. This takes a seventh of their size, and no text
of a model can become HTML.
"""
import base64
import gzip
import json
import math
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated

import tyro

from explorer import what_if
from explorer.panels import panels_of, read_run, smoothing_reach, what_differs
from parts.files import read_rows, write_safely
from parts.text import prepare_streams
from rewards import extract_answer

TEMPLATE = Path(__file__).parent / "explorer" / "page.html"
PLACE = "/*DATA*/"  # the data replace this in the template


@dataclass
class PageConfig:
    """The content of the page."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """folder of a run, such as runs/NAME"""
    against: str = ""
    """folder of another run, to show next to it"""
    steps: tuple[int, int] | None = None
    """only the prompts of these steps, such as 1 50; the curves show every step"""
    groups: int = 0
    """only this many prompts of each step, the first that were recorded; 0 = all"""
    n: int = 0
    """what if: kept answers per prompt; 0 = as in the run"""
    M: int = 0
    """what if: answers per round; 0 = as in the run"""
    N: int = 0
    """what if: largest number of rounds; 0 = as in the run"""


def main(config: PageConfig) -> None:
    folders = [Path(name) for name in (config.run, config.against) if name]
    runs = [read_run(folder) for folder in folders]
    same_name = len({run["name"] for run in runs}) < len(runs)
    for run, folder in zip(runs, folders):
        run["name"] = str(folder) if same_name else run["name"]
        run["groups"] = read_groups(folder / "groups.jsonl", config.steps, config.groups)
    sizes = {name: getattr(config, name) for name in ("n", "M", "N") if getattr(config, name)}
    data = data_of(runs, sizes)
    file, page = folders[0] / "explore.html", page_of(data)
    write_safely(file, page)
    megabytes = len(page) / 1e6
    print(*data["notes"], f"{file} ({megabytes:.1f} MB): open it in a browser", sep="\n")


# ------------------------------------------------------------------------------ the data
def read_groups(log: Path, steps: tuple[int, int] | None, most: int) -> list[dict]:
    """The first `most` prompts of each step (0: all), with the contents of each answer's box."""
    first, last = steps or (0, math.inf)
    wanted = (row for row in read_rows(log) if first <= row["step"] <= last)
    groups = [group for _, of_step in groupby(wanted, key=lambda row: row["step"])
              for group in islice(of_step, most or None)]
    for group in groups:
        for sample in group["pool"]:
            sample["answer"] = extract_answer(sample["text"])
    return groups


def data_of(runs: list[dict], sizes: dict) -> dict:
    """All that the page reads. `sizes`: other n, M, N for the what-if."""
    for run in runs:
        what_if.add_to(run, sizes)
    last = max((row["step"] for run in runs for row in run["metrics"]), default=0)
    return dict(runs=runs, notes=what_differs(runs), panels=panels_of(runs),
                reach=smoothing_reach(last))


# ------------------------------------------------------------------------------ the page
def page_of(data: dict) -> str:
    """The template with the data as gzipped JSON in base64, which no text can break out of."""
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, base64.b64encode(packed).decode())


def parse(argv: list[str] | None = None) -> PageConfig:
    return tyro.cli(PageConfig, args=argv, prog="explore.py",
                    description="Turns the logs of a run into one HTML page.")


if __name__ == "__main__":
    prepare_streams()
    main(parse())
