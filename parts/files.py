"""Files: a crash never leaves half of what was written; what is read may be damaged or hostile.

Text from a stranger's file may also reach the screen: `shown` makes it harmless.
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
    """Yields a hidden name beside `path`, where the block writes a file or a folder.

    It is renamed to `path` once all of it has reached the disk: a crash at any moment leaves the
    old content or the new one. If the block fails, nothing has changed.
    """
    writing = path.with_name(f".{path.name[:50]}.writing")
    remove(writing)  # a crash may have left one
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
    """Remove a file, a whole folder, or a link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_safely(path: Path, content: str | bytes) -> None:
    """Write a small file: a crash leaves the old content or the new one."""
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    with replacing(path) as writing, open(writing, "xb") as file:
        file.write(content)


def lock(folder: Path, instead: str):
    """Lock a folder for this process, until the returned file is closed or the process ends.

    Raises SystemExit, which advises `instead`, if another process holds the lock.
    """
    file = open(Path(folder, ".lock"), "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SystemExit(f"Another program is writing to {shown(folder)}: wait for its end, or "
                         f"{instead}.") from None
    return file


# ------------------------------------------------------------------------------ checked
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
    """What is wrong with a sealed folder, in words; empty if it is sound. `needed`: its files."""
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
    """Add lines to a .jsonl file, in a single write.

    NaN and infinity become null, since JSON has neither. The lines are ASCII, whatever a model
    writes, so `cat` does no harm and a crash cannot cut a character in half.
    """
    lines = [json.dumps({key: finite(value) for key, value in row.items()}) for row in rows]
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))


def finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value


def has_step(row: dict) -> bool:
    return isinstance(row.get("step"), int)


def read_rows(path: Path, is_row=has_step):
    """Yields the rows of a .jsonl file, one at a time: a log may be larger than memory.

    Skips whatever is not a row, such as the half line that a crash leaves.
    """
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            row = row_of(line, is_row)
            if row is not None:
                yield row


def row_of(line: str, is_row=has_step) -> dict | None:
    """The row in a line; None if there is none."""
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


# ------------------------------------------------------------------------------ the screen
def shown(text, longest: int = 200) -> str:
    r"""The first `longest` characters of `text`, on one line and safe to print.

    Control characters and lone surrogates become escapes such as `\x1b`: a data file's text could
    otherwise clear the terminal or overwrite the line above.
    """
    text = str(text)
    cut = "..." if len(text) > longest else ""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:longest]) + cut


def counted(count: int, thing: str) -> str:
    """`1 gold`, `2 golds`."""
    return f"{count} {thing}{'s' * (count != 1)}"


def is_text(text: str) -> bool:
    """Whether it can be encoded and tokenized: it holds no half of a UTF-16 pair, as JSON may."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


@contextlib.contextmanager
def quiet_end():
    """Around a whole program: `python eval.py | head -1` ends as `cat` does, in silence."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # Python flushes once more when it exits, and would complain again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
