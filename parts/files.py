"""Writes files that neither a crash nor a second program can damage."""
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
    """Yields a hidden name, where the block writes a file or a folder, which is then renamed.

    A crash at any moment leaves the old content or the new one.
    """
    writing = path.with_name(f".{path.name}.writing")
    remove(writing)  # a crash may have left one
    try:
        yield writing
        rename(writing, path)
    finally:
        remove(writing)


def rename(written: Path, path: Path) -> Path:
    """Give a file or a folder its name after all of it has reached the disk. Returns `path`.

    Whoever may read the folder may read its files. Those of safetensors are only for their owner.
    """
    readers = written.stat().st_mode & 0o666
    for part in [written, *written.rglob("*")]:
        part.chmod(part.stat().st_mode | readers)
        if part.is_file():
            with open(part, "rb") as file:
                os.fsync(file.fileno())
    os.replace(written, path)
    return path


def remove(path: Path) -> None:
    """Remove a file, a whole folder, or a link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_safely(path: Path, content: str) -> None:
    """Write a small file."""
    with replacing(path) as writing:
        writing.write_text(content, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, content: dict) -> None:
    write_safely(path, as_json(content, indent=1))


def as_json(value, **how) -> str:
    """`value` in JSON, with null for every NaN and infinity, which JSON has not."""
    return json.dumps(finite(value), allow_nan=False, **how)


def finite(value):
    """The same value with None in the place of every NaN and infinity, however deep inside."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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

    The lines are ASCII, whatever the model writes, so `cat` is safe and a crash cannot cut a
    character in half.
    """
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(as_json(row) + "\n" for row in rows))


def read_rows(path: Path):
    """Yields the rows of a .jsonl file, without lines that are none, as a crash may leave one."""
    if path.exists():
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)


def keep_rows(path: Path) -> None:
    """Write a .jsonl file anew without lines that are no rows. Makes it if it does not exist."""
    with replacing(path) as writing:
        append(writing, *read_rows(path))


# ------------------------------------------------------------------------------ who may write
def take(folder: Path, mark: str, flag: str):
    """Make a folder, or take one that has a file `mark`. Returns the lock on it, an open file.

    The lock ends when this file is closed, or with the process. Raises SystemExit if another
    program has it, and if the folder holds something else, such as the logs of another program. On
    a disk without locks (Lustre, some NFS) it prints a warning.
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
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if names and mark not in names:
        raise SystemExit(f"{shown(folder)} holds something else: choose another {flag}.")
    return lock
