"""Sends a run's logs to a tracker: trackio, Weights & Biases or TensorBoard.

    python minirl.py --report-to trackio        # while it runs
    python -m parts.track runs/NAME trackio     # afterwards, or to send what did not arrive

A tracker gets the numbers of each step once (docs/tracking.md). `runs/NAME/tracker/KIND.json` holds
the name of the tracked run and the last step sent, so that a resumed run goes on in the same one.
A tracker that fails costs a warning, never the run.
"""
import contextlib
import itertools
import json
import os
import secrets
import sys
from pathlib import Path

from tqdm import tqdm

from parts.files import lock, read_json, read_rows, shown, write_safely
from parts.folder import settings
from parts.plot import is_number

LOGS = {"metrics.jsonl": "train", "eval.jsonl": "held_out"}  # log -> first part of its names
PROJECT = "minirl"


# ------------------------------------------------------------------------------ the trackers
# Each opens a tracked run and returns what has log(numbers, step) and finish().
def open_trackio(folder: Path, name: str, known: dict):
    """Writes to this machine's SQLite file, or wherever TRACKIO_SPACE_ID says."""
    import trackio

    trackio.init(PROJECT, name=name, config=known, resume="allow", embed=False,
                 auto_log_cpu=False, auto_log_gpu=False)
    return trackio


def open_wandb(folder: Path, name: str, known: dict):
    """Sends to its server. With WANDB_MODE=offline it writes to `folder`, for `wandb sync`."""
    import wandb

    wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), id=name, name=name, dir=folder,
               config=known, allow_val_change=True, resume="allow",
               settings=wandb.Settings(console="off"))
    return wandb


class TensorBoard:
    """Writes event files to `folder`; `tensorboard --logdir runs` shows them."""

    def __init__(self, folder: Path, name: str, known: dict):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder)
        lines = json.dumps(known, indent=1).splitlines()
        self.writer.add_text("settings", "\n".join("    " + line for line in lines))  # Markdown

    def log(self, numbers: dict, step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


TRACKERS = {"trackio": open_trackio, "wandb": open_wandb, "tensorboard": TensorBoard}


# ------------------------------------------------------------------------------ what is sent
def numbers_of(prefix: str, row: dict) -> dict:
    """The numbers of a row of a log, by name: {"train/loss": 0.1, "train/verdicts/correct": 7}."""
    found = {}
    for key, value in row.items():
        if isinstance(value, list):
            value = dict(enumerate(value, 1))  # rounds_histogram, by the number of rounds
        if isinstance(value, dict):
            found |= numbers_of(f"{prefix}/{key}", value)
        elif is_number(value) and key != "step":
            found[f"{prefix}/{key}"] = value
    return found


class Tracker:
    """Reads a run's logs and sends what is new in them.

    Raises SystemExit, one sentence, if the tracker does not start.
    """

    def __init__(self, run: Path, kind: str, known: dict):
        self.run, self.kind, self.failed = run, kind, False
        self.file = run / "tracker" / f"{kind}.json"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        name = f"{run.resolve().name[:50]}-{secrets.token_hex(3)}"  # no other run has it
        fresh = dict(id=name, sent=dict.fromkeys(LOGS, -1))
        self.state = read_json(self.file) if self.file.exists() else fresh
        try:
            self.tracker = TRACKERS[kind](self.file.parent, self.state["id"], known)
            write_safely(self.file, json.dumps(self.state))
        except Exception as error:  # each package raises its own kinds
            raise SystemExit(f"{kind} did not start ({shown(error)}): install it with `pip install "
                             f"{kind}` or mend what it says, or leave --report-to out.") from error

    def unsent(self) -> list[tuple[int, str, dict]]:
        """(step, log, row) of what has not been sent, in order of steps."""
        found = [(row["step"], log, row) for log in LOGS for row in read_rows(self.run / log)
                 if row["step"] > self.state["sent"][log]]
        return sorted(found, key=lambda each: each[0])

    def send(self) -> None:
        """Send what is new. What fails is tried again in the next call."""
        with self.tolerant():
            for (step, log), new in itertools.groupby(self.unsent(), key=lambda each: each[:2]):
                rows, numbers = [row for *_, row in new], {}
                for row in rows:
                    several = log == "eval.jsonl" and len(rows) > 1
                    name = f"{LOGS[log]}/{row['data']}" if several else LOGS[log]
                    numbers |= numbers_of(name, row)
                self.tracker.log(numbers, step=step)  # all sets at once: none is lost if it fails
                self.state["sent"][log] = step
            write_safely(self.file, json.dumps(self.state))

    def close(self) -> None:
        """Wait until everything has arrived, and say so if something has not."""
        with self.tolerant():
            self.tracker.finish()
        if self.unsent():
            print(f"The last steps did not reach {self.kind}: send them with "
                  f"`python -m parts.track {self.run} {self.kind}`")

    @contextlib.contextmanager
    def tolerant(self):
        """Whatever a tracker raises, the run goes on; the first time a warning says so."""
        try:
            yield
        except Exception as error:
            if not self.failed:
                tqdm.write(f"WARNING: {self.kind} failed ({type(error).__name__}: {shown(error)}); "
                           f"the run goes on, and its logs in {self.run} have everything")
            self.failed = True


def open_tracker(run: Path, kind: str, known: dict) -> Tracker | None:
    return None if kind == "none" else Tracker(run, kind, known)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[2] not in TRACKERS:
        raise SystemExit(f"usage: python -m parts.track runs/NAME {{{','.join(TRACKERS)}}}")
    run, kind = Path(sys.argv[1]), sys.argv[2]
    known = settings(run)
    if known is None:
        raise SystemExit(f"{shown(run)} is no training run: it has no config.json.")
    with lock(run, "send it then"):
        tracker = Tracker(run, kind, known)
        tracker.send()
        tracker.close()
    if tracker.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
