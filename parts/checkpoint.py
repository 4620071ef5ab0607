"""How a run survives: what it leaves on disk, how it stops, how it shows that it is alive.

A run lives in runs/NAME, with its metrics, samples and checkpoints; nothing half-written is ever trusted.

A checkpoint is written into a hidden folder, listed with sizes and hashes in manifest.json, flushed to the disk and only
then renamed to `step-000100`. A crash at any moment leaves either the old state or the new one. On loading, every file is
compared with the manifest; a damaged checkpoint is reported and the one before it is used.

Files: adapter_model.safetensors and adapter_config.json (PEFT's layout: loadable with `PeftModel.from_pretrained` and with
`vllm serve --lora-modules`), optimizer.pt (read with weights_only=True: no pickled code), state.json (step, data cursor,
totals, estimator).
"""
import contextlib
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

from tqdm import tqdm


def save(folder: Path, policy, optimizer, schedule, state: dict, keep: int) -> Path:
    """Write checkpoints/step-XXXXXX (XXXXXX: state["step"]) under the run `folder`, prune all but the newest `keep`; returns its path.

    Raises SystemExit when the disk is full; older checkpoints are untouched then.
    """
    import torch
    from safetensors import SafetensorError

    step, writing = state["step"], folder / "checkpoints" / ".writing"
    final = folder / "checkpoints" / f"step-{step:06d}"
    if final.exists() and not damage(final):
        return final  # an error in the first step after a resume: nothing is new
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    try:
        policy.save_pretrained(writing, save_embedding_layers=False)
        torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, writing / "optimizer.pt")
        (writing / "state.json").write_text(json.dumps(state))
        files = sorted(path for path in writing.iterdir() if path.is_file())
        (writing / "manifest.json").write_text(json.dumps({path.name: fingerprint(path) for path in files}))
        for path in [*files, writing / "manifest.json", writing]:
            flush(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # what a full disk is to open, torch.save and safetensors
        shutil.rmtree(writing, ignore_errors=True)
        raise SystemExit(f"Could not write the checkpoint of step {step} ({error}); the ones before it in {final.parent} "
                         "are intact: free some space and continue with --resume.") from error
    shutil.rmtree(final, ignore_errors=True)  # the same step, but damaged
    os.rename(writing, final)
    flush(final.parent)
    known = complete(folder)
    now = known.index(final) + 1  # later ones were damaged, or this run would have continued from them
    for other in known[:now][:-keep] + known[now:]:
        shutil.rmtree(other)
    return final


def complete(folder: Path) -> list[Path]:
    """All finished checkpoints of a run, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*"))


def fingerprint(path: Path) -> list:
    """[size in bytes, sha256]."""
    data = path.read_bytes()
    return [len(data), hashlib.sha256(data).hexdigest()]


def flush(path: Path) -> None:
    """Make sure that a file, or a folder's list of names, has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint; empty if nothing is."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        return next((f"{name} is not what was written" for name, known in manifest.items()
                     if fingerprint(checkpoint / name) != known), "")
    except (OSError, ValueError) as error:
        return str(error)


def newest_sound(folder: Path) -> Path | None:
    """The newest undamaged checkpoint; None if the run has none yet. Damaged ones are reported on the way.

    Raises SystemExit if there are checkpoints but all are damaged.
    """
    found = complete(folder)
    for checkpoint in reversed(found):
        problem = damage(checkpoint)
        if not problem:
            return checkpoint
        print(f"warning: {checkpoint} is damaged ({problem}); trying the one before it")
    if found:
        raise SystemExit(f"All checkpoints in {found[0].parent} are damaged: start again with another --name.")
    return None


def restore(checkpoint: Path, policy, optimizer, schedule) -> dict:
    """Load adapter, optimizer and schedule in place; returns the state that `save` was given.

    Learning rate and weight decay stay those of the optimizer given: a lower one can be the reason to resume.
    """
    import torch
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(policy, load_file(checkpoint / "adapter_model.safetensors"))
    stored = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    optimizer.load_state_dict(stored["optimizer"] | dict(param_groups=optimizer.state_dict()["param_groups"]))
    schedule.load_state_dict(stored["schedule"] | dict(base_lrs=schedule.base_lrs))
    for group, lr, share in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas):
        group["lr"] = lr * share(schedule.last_epoch)
    return json.loads((checkpoint / "state.json").read_text())


def append(path: Path, row: dict) -> None:
    """Add one line to a .jsonl file. JSON knows no NaN and no infinity: they become null."""
    row = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
    with open(path, "a", encoding="utf-8") as file:  # in ASCII: whatever a model writes, `cat` shows and a crash can cut it
        file.write(json.dumps(row) + "\n")


def cut_back(path: Path, step: int) -> list[dict]:
    """Keep the rows of a .jsonl file up to `step`, and return them: what was logged after the checkpoint will be logged again."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the half line of a crash
            row = json.loads(line)
            if row["step"] <= step:
                kept.append(row)
    replace(path, "".join(json.dumps(row) + "\n" for row in kept))
    return kept


def replace(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old text or the new one."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


# -------------------------------------------------------------------------------------------- stopping, and being alive
class Stop:
    """Ctrl-C or SIGTERM: finish what cannot be left half done, save, leave. A second one ends the program at once."""

    requested = False

    @classmethod
    def install(cls) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, cls.request)

    @classmethod
    def request(cls, number, frame) -> None:
        cls.requested = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        # not print: it fails where the signal comes while something else is being printed
        os.write(2, b"\nstopping after this phase with a checkpoint (once more: at once) ...\n")


class Interrupted(Exception):
    """Raised out of the sampling phase: nothing was learnt from its samples yet, so they can be drawn again."""


@contextlib.contextmanager
def timed(seconds: dict, phase: str, every: float = 60.0):
    """Adds the wall time of a phase to seconds["seconds_PHASE"]; a phase that takes minutes says that it is still alive."""
    start, done = time.perf_counter(), threading.Event()

    def heartbeat():
        while not done.wait(every):
            tqdm.write(f"... {phase}: running for {time.perf_counter() - start:.0f} s (kill -USR1 {os.getpid()} shows where)")

    threading.Thread(target=heartbeat, daemon=True).start()
    try:
        yield
    finally:
        done.set()
        seconds[f"seconds_{phase}"] = seconds.get(f"seconds_{phase}", 0.0) + time.perf_counter() - start


def memory_gb() -> float:
    """GPU memory of the trainer at its peak; without a GPU, what this process holds now (engine included)."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30


def out_of_memory(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # GPU or CPU
