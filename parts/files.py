"""Files: what is written survives a crash; what is read may be damaged, or a stranger's.

What a stranger's file says may also reach the screen: `shown` takes the terminal's commands out.
"""
import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import sys
from pathlib import Path



# ------------------------------------------------------------------------------ written
@contextlib.contextmanager
def replacing(path: Path):
    """A hidden name beside `path`, where the block puts a file or a folder with files.

    What is there afterwards takes the name `path`, once all of it has reached the disk: a crash at
    any moment leaves the old content or the new one. If the block fails, nothing has changed.
    """
    writing = path.with_name(f".{path.name[:50]}.writing")
    remove(writing)  # what a crash has left, or a link in a folder that comes from elsewhere
    try:
        yield writing
        for part in (*writing.rglob("*"), writing):
            flush(part)
        os.replace(writing, path)
    except BaseException:
        remove(writing)
        raise
    flush(path.parent)


def remove(path: Path) -> None:
    """A file, a folder with all that is in it, or a link but not what it leads to; if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Make sure that a file, or a folder's list of names, has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_safely(path: Path, content: str | bytes) -> None:
    """Write a small file: a crash leaves the old content or the new one. Through no link."""
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    with replacing(path) as writing, open(writing, "xb") as file:
        file.write(content)


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


# ------------------------------------------------------------------------------ looked through
def read_json(file: Path) -> dict:
    """The JSON object in a small file. Raises SystemExit if it is missing or damaged."""
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SystemExit(f"{shown(file)} is missing or damaged: is this the right folder?")
    return found


def digest_of(file) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(Path(file).expanduser(), "rb") as opened:  # weights may be larger than memory
        return hashlib.file_digest(opened, "sha256").hexdigest()


def seal(folder: Path) -> None:
    """List the files of a folder, with sizes and hashes, in its manifest.json."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {path.name: size_and_hash(path) for path in files}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def size_and_hash(path: Path) -> list:
    return [path.stat().st_size, digest_of(path)]


def damage(folder: Path, needed: tuple[str, ...]) -> str:
    """What is wrong with a sealed folder; empty if nothing is. `needed`: files it must have."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if not isinstance(manifest, dict):
            return "manifest.json is not what was written"
        missing = [name for name in needed if name not in manifest]
        if missing:
            return f"manifest.json does not know {missing[0]}"
        for name, known in manifest.items():
            if size_and_hash(folder / name) != known:
                return f"{name} is not what was written"
    except (OSError, ValueError, RecursionError) as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------ logs: .jsonl
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


def has_step(row: dict) -> bool:
    return isinstance(row.get("step"), int)


def read_rows(path: Path, is_row=has_step):
    """The rows of a .jsonl file, one at a time: a log may be larger than memory.

    Lines that are no row are left out, such as the half one that a crash leaves.
    """
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            row = row_of(line, is_row)
            if row is not None:
                yield row


def row_of(line: str, is_row=has_step) -> dict | None:
    """The row that a line holds; None if it holds none."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and is_row(row):
            return row
    return None


def keep_rows(path: Path, is_row) -> None:
    """Leave in a .jsonl file what `is_row`, and nothing else."""
    with replacing(path) as writing, open(writing, "x", encoding="utf-8") as file:
        for row in read_rows(path, is_row):
            file.write(json.dumps(row) + "\n")


# ------------------------------------------------------------------------------ the screen
def shown(text, longest: int = 200) -> str:
    r"""`text` on one line, fit to be printed: control characters and lone surrogates as `\x1b`.

    What a data file, a model folder or an adapter says about itself may set a terminal's title,
    clear it or overwrite the line above. Of a text over `longest` characters the beginning is
    shown.
    """
    text = str(text)
    cut = "..." if len(text) > longest else ""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:longest]) + cut


def is_text(text: str) -> bool:
    """Whether it can be written and tokenized.

    Half of a UTF-16 pair cannot. JSON may hold one, and a flag in another encoding becomes some.
    """
    return not any("\ud800" <= char <= "\udfff" for char in text)


@contextlib.contextmanager
def quiet_end():
    """Around a whole program: `python eval.py | head -1` ends as `cat` would, with no traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # Python flushes once more when it exits, and would complain again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
