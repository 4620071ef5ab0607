"""Checkpoints: complete or not there at all, and checked before they are trusted.

A checkpoint is written into a hidden folder, listed with sizes and hashes in manifest.json, flushed
to the disk and only then renamed to `step-000100`. A crash at any moment leaves either the old
state or the new one. On loading, every file is compared with the manifest; a damaged checkpoint is
reported and the one before it is used.

Files: adapter_model.safetensors and adapter_config.json (PEFT's layout: loadable with
`PeftModel.from_pretrained` and with `vllm serve --lora-modules`), optimizer.pt (read with
weights_only=True: no pickled code), state.json (step, data cursor, totals, estimator).
"""
import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from parts.files import flush
from parts.ranks import writer

FILES = ("adapter_model.safetensors", "optimizer.pt", "state.json")  # none may be missing


# ------------------------------------------------------------------------------ writing
@writer
def save(folder: Path, policy, optimizer, schedule, state: dict, keep: int) -> Path:
    """Write checkpoints/step-XXXXXX (state["step"]) of the run `folder`; returns its path.

    All but the newest `keep` are removed. Raises SystemExit when the disk is full; older
    checkpoints are untouched then.
    """
    from safetensors import SafetensorError

    step, writing = state["step"], folder / "checkpoints" / ".writing"
    final = folder / "checkpoints" / f"step-{step:06d}"
    if final.exists() and not (damage(final) or misnamed(final)):
        return final  # an error in the first step after a resume: nothing is new
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir(parents=True)
        write(writing, policy, optimizer, schedule, state)
    except (OSError, RuntimeError, SafetensorError) as error:  # what three libraries call full
        shutil.rmtree(writing, ignore_errors=True)
        raise SystemExit(could_not_write(step, error, complete(folder))) from error
    shutil.rmtree(final, ignore_errors=True)  # the same step, but damaged
    os.rename(writing, final)
    flush(final.parent)
    prune(folder, final, keep)
    return final


def write(folder: Path, policy, optimizer, schedule, state: dict) -> None:
    """All files of a checkpoint; when this returns, they are on the disk."""
    import torch

    policy.save_pretrained(folder, save_embedding_layers=False)
    learnt = dict(optimizer=optimizer.state_dict(), schedule=schedule.state_dict(),
                  loss_scale=policy.loss_scale.state_dict())
    torch.save(learnt, folder / "optimizer.pt")
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)


def seal(folder: Path) -> None:
    """List the files of a folder in its manifest.json, and make sure that all are on the disk."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {path.name: size_and_hash(path) for path in files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for path in [*files, folder / "manifest.json", folder]:
        flush(path)


def could_not_write(step: int, error: Exception, older: list[Path]) -> str:
    reason = f"Could not write the checkpoint of step {step} ({error})"
    if not older:
        return f"{reason}, and there is none before it: free some space and start again."
    return (f"{reason}; the ones before it in {older[0].parent} are intact: free some space and "
            "continue with --resume.")


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all but the newest `keep`, and what is later than `newest`.

    Later ones were damaged, or this run would have continued from them. Copies stay.
    """
    known = [checkpoint for checkpoint in complete(folder) if not misnamed(checkpoint)]
    now = known.index(newest) + 1
    for other in known[:now][:-keep] + known[now:]:
        shutil.rmtree(other)


def size_and_hash(path: Path) -> list:
    """[size in bytes, sha256]."""
    data = path.read_bytes()
    return [len(data), hashlib.sha256(data).hexdigest()]


# ------------------------------------------------------------------------------ finding, reading
def complete(folder: Path) -> list[Path]:
    """All finished checkpoints of a run, oldest first: the folders that `save` has named.

    A user's own copies, notes and links beside them (`step-000100-best`) are left alone.
    """
    parent = folder / "checkpoints"
    names = os.listdir(parent) if parent.is_dir() else []
    steps = re.compile("step-([0-9]{6}|[1-9][0-9]{6,})")
    found = [parent / name for name in names if steps.fullmatch(name)]
    own = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(own, key=step_of)


def misnamed(checkpoint: Path) -> str:
    """What is wrong with a copy under another step's name, such as step-999999; or empty."""
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        step = json.loads((checkpoint / "state.json").read_text())["step"]
        if step != step_of(checkpoint):
            return f"it is a copy of step {step}"
    return ""  # what cannot be read is `damage`


def step_of(checkpoint: Path) -> int:
    """After which step it was written; its name says it."""
    return int(checkpoint.name.removeprefix("step-"))


def damage(folder: Path, needed: tuple[str, ...] = FILES) -> str:
    """What is wrong with a sealed folder; empty if nothing is."""
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


def newest_sound(folder: Path) -> Path | None:
    """The newest undamaged checkpoint; None if the run has none yet.

    Damaged ones are reported on the way. Raises SystemExit if all are damaged.
    """
    found = complete(folder)
    for checkpoint in reversed(found):
        problem = damage(checkpoint) or misnamed(checkpoint)
        if not problem:
            return checkpoint
        print(f"warning: {checkpoint} is damaged ({problem}); trying the one before it")
    if found:
        raise SystemExit(f"All checkpoints in {found[0].parent} are damaged: start again with "
                         "another --name.")
    return None


def restore(checkpoint: Path, policy, optimizer, schedule) -> dict:
    """Load adapter, optimizer and schedule in place; returns the state that `save` was given.

    Learning rate and weight decay stay those of the optimizer given: a lower one can be the reason
    to resume.
    """
    import torch
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(policy, load_file(checkpoint / "adapter_model.safetensors"))
    stored = torch.load(checkpoint / "optimizer.pt", weights_only=True, map_location="cpu")
    own = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(stored["optimizer"] | dict(param_groups=own))
    schedule.load_state_dict(stored["schedule"] | dict(base_lrs=schedule.base_lrs))
    policy.loss_scale.load_state_dict(stored["loss_scale"])
    for group, lr, share in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas):
        group["lr"] = lr * share(schedule.last_epoch)
    return json.loads((checkpoint / "state.json").read_text())
