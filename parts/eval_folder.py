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
# settings that decide nothing about samples
FREE = ("out", "against", "graders", "engine_memory", "engine_sequences")


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


def read_rows(file: Path) -> tuple[list[dict], int]:
    """(rows without texts, the byte where they end), up to the half line that a crash has left."""
    rows, end = [], 0
    for line in file.open("rb") if file.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not line.endswith(b"\n") or not is_row(row):
            break
        rows.append({key: value for key, value in row.items() if key != "text"})
        end += len(line)
    return rows, end


def is_row(row) -> bool:
    """Whether it has what `report` needs, as `as_row` makes it: without a verdict no reward."""
    texts, numbers = ["data", "id", "status", "finish_reason"], ["sample", "tokens"]
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in texts):
        return False
    if row["status"] not in NO_VERDICT:
        numbers.append("reward")
    return all(isinstance(row.get(key), int | float) for key in numbers)


def write_rows(file: Path, rows: list[dict]) -> None:
    """Add samples to a file. In ASCII: whatever a model writes, a crash can cut it anywhere."""
    with open(file, "a", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def resume(file: Path) -> list[dict]:
    """The rows that an interrupted evaluation has left; half a line at the end is cut off."""
    rows, end = read_rows(file)
    if file.exists():
        os.truncate(file, end)
    return rows
