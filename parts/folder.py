"""Files and folders on the disk that a crash cannot leave half-written.

A run can be killed at any moment, and then only the running step is repeated, for four reasons:

* A file or a folder gets its name after all of it is on the disk (`replacing`).
* Every step ends with a checkpoint (`save`), which holds everything on which later steps depend.
* A log is only appended to, and --resume cuts it back to the newest checkpoint (`keep_rows`).
* Only one program writes to a folder (`take`).

A checkpoint `checkpoints/step-000100` holds

    adapter_model.safetensors, adapter_config.json   PEFT's layout: `PeftModel.from_pretrained` and
                                                     `vllm serve --lora-modules` can load it
    optimizer.pt     AdamW, learning-rate schedule, loss scale; loaded without pickled code
    state.json       step, position in the data, totals, what ada-est remembers
"""
import contextlib
import difflib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path

from parts.text import shown

LOGS = ("metrics.jsonl", "groups.jsonl", "answers.jsonl", "eval.jsonl")
NO_VERDICT = (  # statuses in the logs that mean that the grader failed, not the answer
    "timeout", "killed", "raised", "no_number")
PART = "reward/"  # precedes the name of a part of the reward in all logs
MARKS = {  # kind of folder: (its file, a key in this file, the flag for its name)
    "run": ("config.json", "starts", "--name"),
    "evaluation": ("protocol.json", "k", "--out")}
FREE = (  # settings of an evaluation that may change when it is continued
    "out", "against", "base", "trained", "engine_memory", "engine_sequences")
LAST_STEPS = 10  # a crash may have left one checkpoint too many among these


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


def read_json(file: Path) -> dict:
    """The JSON object in a small file. Raises SystemExit if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    raise SystemExit(f"{shown(file)} is missing or damaged: is this the right folder?")


def digest_of(file) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(Path(file).expanduser(), "rb") as opened:  # weights may be larger than memory
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


# ------------------------------------------------------------------------------ what is not there
def similar(folder: Path, wanted=Path.is_dir) -> Path | None:
    """The neighbour of `folder` with the most similar name, of those that are `wanted`."""
    neighbours = {path.name: path for path in folder.parent.glob("*")}
    names = difflib.get_close_matches(folder.name, neighbours, n=len(neighbours) or 1)
    return next((neighbours[name] for name in names if wanted(neighbours[name])), None)


def require_folder(folder: Path) -> None:
    """Raises SystemExit, which names a similar folder, if this one does not exist."""
    if not os.path.exists(folder):  # Path.exists raises for a name that is too long
        near = similar(folder)
        hint = f"; did you mean {shown(near)}?" if near else "."
        raise SystemExit(f"There is no folder {shown(folder)}{hint}")


# ------------------------------------------------------------------------------ who may write
def take(folder: Path, kind: str):
    """Make the folder of a run or an evaluation, or take an existing one. Returns the lock on it.

    Raises SystemExit if the folder cannot be used, is in use, or holds something else. The lock is
    an open file. It ends when this file is closed, or with the process.
    """
    mark, key, flag = MARKS[kind]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        if not names or mark in names and key in read_json(folder / mark):
            lock = open(folder / ".lock", "a")
            if can_lock(lock, folder):
                return lock
            why = "another program is writing to it"
        else:
            why = f"it holds {shown(min(names))} but no {kind}"
    except OSError as error:
        why = error.strerror
    raise SystemExit(f"Cannot use {shown(folder)} ({why}): name another folder by {flag}.")


def can_lock(file, folder: Path) -> bool:
    """Lock an open file. Returns False if another program has locked it.

    On a disk without locks (Lustre, some NFS) it prints a warning and returns True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        print(f"the disk of {shown(folder)} cannot lock files, so do not start a second program "
              "that writes to this folder")
    return True


def claim(folder: Path, resume: bool):
    """Make the folder of a run, or take the one that is to be resumed. Returns the lock on it.

    A run without a checkpoint starts again from step 1, with any settings. Raises SystemExit like
    `take`, for a run with checkpoints if `resume` is False, and for a run that has logs but no
    checkpoints any more, because a trained run must not start again unnoticed.
    """
    lock, saved, why = take(folder, "run"), checkpoints(folder), ""
    if saved and not resume:
        why = "exists already: add --resume to continue it"
    elif not saved and any(row["step"] > 1 for row in read_rows(folder / "metrics.jsonl")):
        why = "has logs but no checkpoint: put one back"
    if why:
        raise SystemExit(f"{folder} {why}, or choose another --name.")
    if not saved:
        for name in ("config.json", "problems.json", *LOGS):
            remove(folder / name)
    return lock


def open_folder(folder: Path, protocol: dict):
    """Begin an evaluation, or continue the one with the same protocol. Returns the folder's lock.

    Raises SystemExit like `take`, and if the folder has another protocol.
    """
    lock = take(folder, "evaluation")
    file = folder / "protocol.json"
    if not file.exists():
        write_safely(file, json.dumps(protocol, indent=1))
        return lock
    stored = read_json(file)
    changed = [key for key in protocol if key not in FREE and protocol[key] != stored.get(key)]
    if changed:
        raise SystemExit(f"{shown(folder)} holds an evaluation with another {', '.join(changed)}: "
                         "name another folder by --out, or remove this one.")
    return lock


# ------------------------------------------------------------------------------ checkpoints
def save(folder: Path, policy, optimizer, schedule, state: dict, keep_every: int = 0) -> Path:
    """Write checkpoints/step-XXXXXX of the run in `folder`. Returns its path.

    The newest two are kept, and those of every `keep_every`-th step permanently (0: none). Raises
    SystemExit if the disk is full; then older checkpoints stay as they are.
    """
    import torch
    from safetensors import SafetensorError

    final = folder / "checkpoints" / f"step-{state['step']:06d}"
    learnt = dict(optimizer=optimizer.state_dict(), schedule=schedule.state_dict(),
                  loss_scale=policy.loss_scale.state_dict())
    try:
        with replacing(final) as writing:
            writing.mkdir(parents=True)
            policy.save_pretrained(writing, save_embedding_layers=False)
            torch.save(learnt, writing / "optimizer.pt")
            (writing / "state.json").write_text(json.dumps(state))
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, in three libraries
        raise SystemExit(f"Could not write the checkpoint of step {state['step']} "
                         f"({shown(error)}): free some space, or make the folder writable; "
                         f"{saved_so_far(folder)}") from error
    drop_older(folder, keep_every)
    return final


def drop_older(folder: Path, keep_every: int) -> None:
    """Remove checkpoints of the last steps, except the newest two and every `keep_every`-th.

    Older ones stay, because an earlier start with another --keep-every may have kept them.
    """
    *others, newest = checkpoints(folder)
    for older in others[:-1]:
        for_good = keep_every and step_of(older) % keep_every == 0
        if not for_good and step_of(older) > step_of(newest) - LAST_STEPS:
            remove(older)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; they may be links to another disk.

    Copies and notes of the user next to them (`step-000100-best`) do not count.
    """
    return sorted((path for path in (folder / "checkpoints").glob("step-*")
                   if re.fullmatch("step-[0-9]{6,}", path.name) and path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def saved_so_far(folder: Path) -> str:
    """The end of a sentence: what a run has saved and how to continue it."""
    saved = checkpoints(folder)
    if not saved:
        return "nothing was saved yet: start again."
    return (f"everything up to step {step_of(saved[-1])} is saved: continue with "
            f"--name {folder.name} --resume.")


def restore(checkpoint: Path, policy, optimizer, schedule) -> dict:
    """Load adapter, optimizer and schedule in place; returns the state that `save` was given.

    The learning rate of `optimizer` stays, because --resume may change it. Raises SystemExit if a
    file is damaged.
    """
    import torch
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    try:
        weights = load_file(checkpoint / "adapter_model.safetensors")
        stored = torch.load(checkpoint / "optimizer.pt", weights_only=True, map_location="cpu")
        state = json.loads((checkpoint / "state.json").read_text())
        set_peft_model_state_dict(policy, weights)
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(stored["optimizer"] | dict(param_groups=groups))
        schedule.load_state_dict(stored["schedule"] | dict(base_lrs=schedule.base_lrs))
        policy.loss_scale.load_state_dict(stored["loss_scale"])
    except Exception as error:  # torch, PEFT, safetensors and pickle raise other kinds
        raise SystemExit(f"{checkpoint} is damaged ({type(error).__name__}: {shown(error)}): "
                         "remove it, and --resume continues from the one before.") from None
    for group, lr, share in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas):
        group["lr"] = lr * share(schedule.last_epoch)
    return state
