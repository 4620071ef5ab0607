"""A run's logs: one JSON object per line, cut back to the checkpoint from which a run goes on."""
import contextlib
import json
import math
from pathlib import Path

from parts.checkpoint import replace


def append(path: Path, row: dict) -> None:
    """Add one line to a .jsonl file. JSON knows no NaN and no infinity: they become null.

    The line is ASCII: whatever a model writes, `cat` shows it and a crash can cut it anywhere.
    """
    row = {key: None if is_no_number(value) else value for key, value in row.items()}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def is_no_number(value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def cut_back(path: Path, step: int) -> list[dict]:
    """Keep the rows of a .jsonl file up to `step`, and return them.

    What was logged after the checkpoint will be logged again. Half lines, which a crash leaves, and
    lines that are no row of a log are dropped.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    kept, lines = [], []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            row = json.loads(line)
            if row["step"] <= step:
                lines.append(json.dumps(row) + "\n")
                kept.append(row)
    replace(path, "".join(lines))
    return kept
