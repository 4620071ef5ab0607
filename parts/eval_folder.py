"""The folder of an evaluation: whose it is, what it holds, and what is still to do.

protocol.json (all that decides about the numbers), eval.jsonl (a row per sample), summary.json,
eval.png.
"""
import json
import os
from pathlib import Path

from parts.files import lock, read_json, write_safely
from parts.grader import NO_VERDICT
from parts.screen import shown

FILES = ("protocol.json", "eval.jsonl", "summary.json", "eval.png")
FREE = ("out", "against", "graders", "engine_memory")  # settings that decide nothing about samples


def open_folder(folder: Path, protocol: dict):
    """Begin an evaluation, or continue the one with the same protocol. Returns the folder's lock.

    Raises SystemExit if the folder cannot be used, is in use, or holds anything else: nothing
    foreign is overwritten.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = {file.name for file in folder.iterdir()} - {".lock"}
        refuse_foreign(folder, found, protocol)
        held = lock(folder, "name another --out")
        if "protocol.json" not in found:
            write_safely(folder / "protocol.json", json.dumps(protocol, indent=1))
        return held
    except OSError as error:  # a file of this name, one that is too long, a disk that is read-only
        raise SystemExit(
            f"Cannot use {shown(folder)} ({error.strerror}): name another --out.") from None


def refuse_foreign(folder: Path, found: set[str], protocol: dict) -> None:
    """SystemExit for a folder with other files, links (which lead out), or another protocol."""
    links = {name for name in FILES if (folder / name).is_symlink()}
    if links or found and "protocol.json" not in found:
        raise SystemExit(f"{shown(folder)} is not the folder of an evaluation, it holds "
                         f"{shown(min(links or found))}: name another --out.")
    stored = read_json(folder / "protocol.json") if found else protocol
    changed = [key for key in protocol if key not in FREE and protocol[key] != stored.get(key)]
    if changed:
        raise SystemExit(f"{shown(folder)} holds an evaluation with another {', '.join(changed)}: "
                         "name another --out, or remove it.")


def read_rows(file: Path) -> tuple[list[dict], list[int]]:
    """(rows without texts, the byte where each ends), up to the half line that a crash has left."""
    rows, ends = [], [0]
    for line in file.open("rb") if file.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not line.endswith(b"\n") or not is_row(row):
            break
        rows.append({key: value for key, value in row.items() if key != "text"})
        ends.append(ends[-1] + len(line))
    return rows, ends


def is_row(row) -> bool:
    """Whether it has what `report` needs, as `as_row` makes it: without a verdict no reward."""
    texts, numbers = ["data", "id", "status", "finish_reason"], ["sample", "tokens"]
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in texts):
        return False
    if row["status"] not in NO_VERDICT:
        numbers.append("reward")
    return all(isinstance(row.get(key), int | float) for key in numbers)


def chunks_of(sets: dict, size: int, k: int) -> list[tuple]:
    """(set, number, problems): the questions in portions of about `size` samples.

    Each portion starts with an idle engine, an empty cache and a random state of its own, and is
    written at once: a resumed evaluation draws the very samples that it would have drawn without
    the interruption.
    """
    step = max(1, size // k)
    return [(name, at // step, problems[at:at + step])
            for name, problems in sets.items() for at in range(0, len(problems), step)]


def resume(file: Path, chunks: list, k: int) -> tuple[list[dict], list]:
    """(rows of complete chunks, chunks still to do); what lies behind is cut off the file."""
    rows, ends = read_rows(file)
    kept = 0
    while chunks and kept + len(chunks[0][2]) * k <= len(rows):
        kept, chunks = kept + len(chunks[0][2]) * k, chunks[1:]
    if file.exists():
        os.truncate(file, ends[kept])
    return rows[:kept], chunks
