"""Files that survive a crash, may be damaged or a stranger's, or in another program's use."""
import contextlib
import fcntl
import hashlib
import json
import math
import os
from pathlib import Path

from parts.ranks import writer
from parts.screen import shown


# ------------------------------------------------------------------------------ small files
def flush(path: Path) -> None:
    """Make sure that a file, or a folder's list of names, has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_new(path: Path, mode: str = "w"):
    """Open a file that nobody else has, for writing: what had its name before is gone.

    A link that lies there, in a folder from elsewhere, is removed and not written through.
    """
    path.unlink(missing_ok=True)  # or what a crash has left
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    how = {} if "b" in mode else dict(encoding="utf-8", errors="backslashreplace")
    return open(os.open(path, flags, 0o666), mode, **how)


def write_safely(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old text or the new one."""
    write_lines_safely(path, [text])


@writer
def write_lines_safely(path: Path, lines) -> None:
    """Likewise a file of any size, from an iterable of texts."""
    temporary = path.with_suffix(".new")
    with open_new(temporary) as file:
        file.writelines(lines)
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def digest_of(file) -> str:
    """The first half of the SHA-256 of a file's bytes, in hex."""
    with open(Path(file).expanduser(), "rb") as opened:  # weights may be larger than memory
        return hashlib.file_digest(opened, "sha256").hexdigest()[:32]


def read_json(file: Path) -> dict:
    """The JSON object in a small file. Raises SystemExit if it is missing or damaged."""
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SystemExit(f"{shown(file)} is missing or damaged: is this the right folder?")
    return found


def lock(folder: Path, instead: str):
    """The folder is this process's until the returned file is closed, or the process has ended.

    Raises SystemExit, which advises `instead`, if another process has it.
    """
    handle = os.open(Path(folder, ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    file = open(handle, "r+")  # through no link, and nothing in it is overwritten
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SystemExit(f"Another program is writing to {shown(folder)}: wait for its end, or "
                         f"{instead}.") from None
    return file


# ------------------------------------------------------------------------------ logs: .jsonl
@writer
def append(path: Path, *rows: dict) -> None:
    """Add lines to a .jsonl file, all at once. JSON knows no NaN and no infinity: they become null.

    They are ASCII: whatever a model writes, `cat` shows it and a crash can cut it anywhere.
    """
    lines = [json.dumps({key: None if is_no_number(value) else value for key, value in row.items()})
             for row in rows]
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))


def is_no_number(value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def cut_back(path: Path, step: int) -> dict | None:
    """Keep the rows of a .jsonl file up to `step`. Returns the last one; None if there is none.

    What was logged after the checkpoint will be logged again. Half lines, which a crash leaves, and
    lines that are no row of a log are dropped. One line at a time: a log may be larger than memory.
    """
    last = None

    def kept():
        nonlocal last
        for row in read_rows(path):
            if row is not None and row["step"] <= step:
                last = row
                yield json.dumps(row) + "\n"

    write_lines_safely(path, kept())
    return last


def read_rows(path: Path):
    """The rows of a log, one after the other; None for a line that is no row of a log."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            yield row_of(line)


def row_of(line: str) -> dict | None:
    """A line of a log: an object with its "step"."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row
    return None
