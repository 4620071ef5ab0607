"""Files that a crash cannot leave half-written, logs of JSON lines, and locks on folders."""
import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from pathlib import Path

from parts.text import shown


# ------------------------------------------------------------------------------ written
@contextlib.contextmanager
def replacing(path: Path):
    """Yields a hidden name next to `path`, where the block writes a file or a folder.

    This is renamed to `path` after all of it has reached the disk, so a crash at any moment leaves
    the old content or the new one. If the block fails, nothing changes.
    """
    writing = path.with_name(f".{path.name}.writing")
    remove(writing)  # a crash may have left one
    try:
        yield writing
        rename(writing, path)
    finally:
        remove(writing)


def rename(written: Path, path: Path) -> Path:
    """Give a file or a folder its name after all of it has reached the disk. Returns `path`."""
    for part in (*written.rglob("*"), written):
        flush(part)
    os.replace(written, path)
    flush(path.parent)
    return path


def remove(path: Path) -> None:
    """Remove a file, a whole folder, or a link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, has reached the disk."""
    # Some disks (CIFS, FUSE) have no such call for folders, and write the names without it.
    ignored = (OSError,) if path.is_dir() else ()
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(*ignored):
            os.fsync(handle)
    finally:
        os.close(handle)


def write_safely(path: Path, content: str) -> None:
    """Write a small file. A crash leaves the old content or the new one."""
    with replacing(path) as writing:
        writing.write_text(content, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, content: dict) -> None:
    write_safely(path, json.dumps(content, indent=1))


def read_json(file: Path) -> dict:
    """The JSON object in a small file. Raises SystemExit if it is missing or damaged."""
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{shown(file)} cannot be read: {shown(error)}") from None


def digest_of(file) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(file, "rb") as opened:  # weights may be larger than memory
        return hashlib.file_digest(opened, "sha256").hexdigest()


# ------------------------------------------------------------------------------ logs: .jsonl
def append(path: Path, *rows: dict) -> None:
    """Add lines to a .jsonl file, in a single write.

    NaN and infinity become null, because JSON has neither. The lines are ASCII, whatever the model
    writes, so `cat` is safe and a crash cannot cut a character in half.
    """
    def finite(value):
        return None if isinstance(value, float) and not math.isfinite(value) else value

    lines = [json.dumps({key: finite(value) for key, value in row.items()}) for row in rows]
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))


def has_step(row: dict) -> bool:
    return isinstance(row.get("step"), int)


def read_rows(path: Path, is_row=has_step):
    """Yields the rows of a .jsonl file one at a time, because a log may be larger than memory.

    Skips every line that is not a row, such as an incomplete line after a crash.
    """
    if path.exists():
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            yield from filter(None, (row_of(line, is_row) for line in file))


def row_of(line: str, is_row=has_step) -> dict | None:
    """The row in a line; None if the line holds no row."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and is_row(row):
            return row
    return None


def keep_rows(path: Path, is_row) -> None:
    """Remove from a .jsonl file all lines for which `is_row` is false."""
    with replacing(path) as writing, open(writing, "x", encoding="utf-8") as file:
        for row in read_rows(path, is_row):
            file.write(json.dumps(row) + "\n")


# ------------------------------------------------------------------------------ who may write
def take(folder: Path):
    """Make a folder, or take an existing one. Returns the lock on it, which is an open file.

    The lock ends when this file is closed, or with the process. Raises SystemExit if another
    program has it. On a disk without locks (Lustre, some NFS) it prints a warning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"Another program is writing to {shown(folder)}.") from None
    except OSError:
        print(f"the disk of {shown(folder)} cannot lock files, so do not start a second program "
              "that writes to this folder")
    return lock
