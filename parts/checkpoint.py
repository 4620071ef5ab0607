"""Checkpoints: written completely or not at all, and checked before they are trusted.

A checkpoint is written into a hidden folder, flushed to the disk, and only then renamed to
`step-000100`. Its files:

    adapter_model.safetensors, adapter_config.json   PEFT's layout: `PeftModel.from_pretrained` and
                                                     `vllm serve --lora-modules` can load it
    optimizer.pt     AdamW, learning-rate schedule, loss scale; loaded without pickled code
    state.json       step, position in the data, totals, what ada-est remembers
    manifest.json    size and hash of each of these files

If a file is not what the manifest says, the checkpoint is reported as damaged and the one before it
is used.
"""
import json
import re
from pathlib import Path

from parts import files
from parts.files import remove, replacing, seal

FILES = ("adapter_model.safetensors", "optimizer.pt", "state.json")  # none may be missing


# ------------------------------------------------------------------------------ writing
def save(folder: Path, policy, optimizer, schedule, state: dict, keep: int) -> Path:
    """Write checkpoints/step-XXXXXX of the run in `folder`, and keep only the newest `keep`.

    Returns its path. Raises SystemExit when the disk is full; older checkpoints stay as they are.
    """
    from safetensors import SafetensorError

    final = folder / "checkpoints" / f"step-{state['step']:06d}"
    if final in complete(folder) and not damage(final):
        return final  # a step that failed right after --resume has nothing new to save
    final.parent.mkdir(parents=True, exist_ok=True)
    for left_by_a_crash in final.parent.glob(".*.writing"):
        remove(left_by_a_crash)
    try:
        with replacing(final) as writing:
            write(writing, policy, optimizer, schedule, state)
            remove(final)  # a damaged one of the same step
    except (OSError, RuntimeError, SafetensorError) as error:  # how three libraries say: full
        raise SystemExit(f"Could not write the checkpoint of step {state['step']} ({error}): free "
                         f"some space; {saved_so_far(folder)}") from error
    prune(folder, final, keep)
    return final


def write(folder: Path, policy, optimizer, schedule, state: dict) -> None:
    import torch

    folder.mkdir()
    policy.save_pretrained(folder, save_embedding_layers=False)
    learnt = dict(optimizer=optimizer.state_dict(), schedule=schedule.state_dict(),
                  loss_scale=policy.loss_scale.state_dict())
    torch.save(learnt, folder / "optimizer.pt")
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all but the newest `keep`, and damaged ones of later steps than `newest`."""
    found = complete(folder)
    now = found.index(newest) + 1
    for other in found[:now][:-keep] + found[now:]:
        remove(other)


# ------------------------------------------------------------------------------ finding, reading
def complete(folder: Path) -> list[Path]:
    """All finished checkpoints of a run, oldest first; they may be links to another disk.

    A user's own copies and notes beside them (`step-000100-best`) do not count.
    """
    found = (folder / "checkpoints").glob("step-*")
    return sorted((path for path in found
                   if re.fullmatch("step-[0-9]{6,}", path.name) and path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def damage(checkpoint: Path) -> str:
    """What is wrong with it, in words; empty if it is sound."""
    problem = files.damage(checkpoint, FILES)
    if problem:
        return problem
    step = files.read_json(checkpoint / "state.json").get("step")
    return "" if step == step_of(checkpoint) else f"it is a copy of step {step}"


def saved_so_far(folder: Path) -> str:
    """The sentence that says what a run has saved and how to continue it."""
    saved = complete(folder)
    if not saved:
        return "nothing was saved yet: start again."
    return f"everything up to step {step_of(saved[-1])} is saved: continue with --resume."


def newest_sound(folder: Path) -> Path | None:
    """The newest undamaged checkpoint; None if the run has not saved any.

    Raises SystemExit if there is none left that can be used: a run that has learnt something must
    not silently start anew.
    """
    for checkpoint in reversed(complete(folder)):
        problem = damage(checkpoint)
        if not problem:
            return checkpoint
        print(f"warning: {checkpoint} is damaged ({problem}); trying the one before it")
    if any((folder / "checkpoints").glob("step-[0-9]*")):
        raise SystemExit(f"No checkpoint in {folder / 'checkpoints'} can be used: put one back, or "
                         "start again with another --name.")
    return None


def restore(checkpoint: Path, policy, optimizer, schedule) -> dict:
    """Load adapter, optimizer and schedule in place; returns the state that `save` was given.

    Learning rate and weight decay stay as they are in `optimizer`: --resume may change them.
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
