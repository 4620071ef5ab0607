"""Files that may be damaged, a stranger's, or in another program's use."""
import fcntl
import json
import os
from pathlib import Path

from parts.screen import shown


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
