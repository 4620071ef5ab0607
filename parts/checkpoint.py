"""Checkpoints: complete or not there at all, and checked before they are trusted.

A checkpoint is written into a hidden folder, listed with sizes and hashes in manifest.json, flushed
to the disk and only then renamed to `step-000100`. On loading, every file is compared with the
manifest; a damaged checkpoint is reported and the one before it is used.

Files: adapter_model.safetensors and adapter_config.json (PEFT's layout: loadable with
`PeftModel.from_pretrained` and with `vllm serve --lora-modules`), optimizer.pt (read with
weights_only=True: no pickled code), state.json (step, data cursor, totals, estimator).
"""
import contextlib
import json
import re
from pathlib import Path

from parts import files
from parts.files import remove, replacing, seal

FILES = ("adapter_model.safetensors", "optimizer.pt", "state.json")  # none may be missing


# ------------------------------------------------------------------------------ writing
def save(folder: Path, policy, optimizer, schedule, state: dict, keep: int) -> Path:
    """Write checkpoints/step-XXXXXX (state["step"]) of the run `folder`; returns its path.

    All but the newest `keep` are removed. Raises SystemExit when the disk is full; older
    checkpoints are untouched then.
    """
    from safetensors import SafetensorError

    final = folder / "checkpoints" / f"step-{state['step']:06d}"
    if final in complete(folder) and not damage(final):
        return final  # an error in the first step after a resume: nothing is new
    final.parent.mkdir(parents=True, exist_ok=True)
    for left_by_a_crash in final.parent.glob(".*.writing"):
        remove(left_by_a_crash)
    try:
        with replacing(final) as writing:
            write(writing, policy, optimizer, schedule, state)
            remove(final)  # the same step, but damaged, or a copy of another
    except (OSError, RuntimeError, SafetensorError) as error:  # what three libraries call full
        raise SystemExit(f"Could not write the checkpoint of step {state['step']} ({error}): free "
                         f"some space; {saved_so_far(folder)}") from error
    prune(folder, final, keep)
    return final


def write(folder: Path, policy, optimizer, schedule, state: dict) -> None:
    """All files of a checkpoint."""
    import torch

    folder.mkdir()
    policy.save_pretrained(folder, save_embedding_layers=False)
    learnt = dict(optimizer=optimizer.state_dict(), schedule=schedule.state_dict(),
                  loss_scale=policy.loss_scale.state_dict())
    torch.save(learnt, folder / "optimizer.pt")
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all but the newest `keep`, and what is later than `newest`.

    Later ones were damaged, or this run would have continued from them. What is a link stays.
    """
    own = [checkpoint for checkpoint in complete(folder) if not checkpoint.is_symlink()]
    now = own.index(newest) + 1
    for other in own[:now][:-keep] + own[now:]:
        remove(other)


# ------------------------------------------------------------------------------ finding, reading
def complete(folder: Path) -> list[Path]:
    """All finished checkpoints of a run, oldest first: what `save` has named, or a link of that
    name to where a checkpoint was moved.

    A user's own copies and notes beside them (`step-000100-best`) are left alone, also those that
    have another step's name. What cannot be read counts: it is reported as damaged.
    """
    found = (folder / "checkpoints").glob("step-*")
    named = [path for path in found
             if re.fullmatch("step-([0-9]{6}|[1-9][0-9]{6,})", path.name)
             and (path.is_dir() or path.is_symlink())]
    return sorted((path for path in named if not is_copy(path)), key=step_of)


def is_copy(checkpoint: Path) -> bool:
    """Whether its name is not that of the step in it."""
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        step = json.loads((checkpoint / "state.json").read_text())["step"]
        return step != step_of(checkpoint)
    return False


def step_of(checkpoint: Path) -> int:
    """After which step it was written; its name says it."""
    return int(checkpoint.name.removeprefix("step-"))


def damage(checkpoint: Path) -> str:
    """What is wrong with it; empty if nothing is."""
    return files.damage(checkpoint, FILES)


def saved_so_far(folder: Path) -> str:
    """What to say when a run ends without a word of its own."""
    saved = complete(folder)
    if not saved:
        return "nothing was saved yet: start again."
    return f"everything up to step {step_of(saved[-1])} is saved: continue with --resume."


def newest_sound(folder: Path) -> Path | None:
    """The newest undamaged checkpoint; None if the run has none yet.

    Damaged ones are reported on the way. Raises SystemExit if there are only damaged ones, or
    copies under other names: a run that has learnt is not started anew.
    """
    for checkpoint in reversed(complete(folder)):
        problem = damage(checkpoint)
        if not problem:
            return checkpoint
        print(f"warning: {checkpoint} is damaged ({problem}); trying the one before it")
    if any((folder / "checkpoints").glob("step-[0-9]*")):
        raise SystemExit(f"The checkpoints in {folder / 'checkpoints'} are damaged, or are copies "
                         "under other names: put one back, or start again with another --name.")
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
