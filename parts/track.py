"""Sends a run's logs to a tracker: trackio, Weights & Biases or TensorBoard.

    python minirl.py --report-to trackio        # while it runs
    python -m parts.track runs/NAME trackio     # afterwards, or to send what did not arrive

A tracker gets each step once: metrics as train/..., evaluations as held_out/... (held_out/SET/...
if there are several sets), and the kept samples of the recorded prompts as a table.
`runs/NAME/tracker/KIND.json` holds the name of the tracked run and the last step sent, so that a
resumed run goes on in the same one. A tracker that fails costs a warning, never the run.
"""
import contextlib
import json
import os
import secrets
import sys
from pathlib import Path

from tqdm import tqdm

from parts.files import lock, read_json, row_of, shown, write_safely
from parts.folder import settings
from parts.plot import is_number

LOGS = ("metrics.jsonl", "eval.jsonl", "groups.jsonl")
COLUMNS = ["step", "prompt", "gold", "completion", "reward", "status", "advantage"]
PROJECT = "minirl"


# ------------------------------------------------------------------------------ the trackers
# Each opens a tracked run and returns what has log(numbers, step), Table(columns, data), finish().
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
        self.writer.add_text("settings", self.Table(list(known), [list(known.values())]))

    def log(self, numbers: dict, step: int) -> None:
        for name, value in numbers.items():
            add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
            add(name, value, step)
        self.writer.flush()

    def Table(self, columns: list, data: list) -> str:
        """A block of Markdown code: four spaces before each line show every character as it is."""
        rows = [json.dumps(dict(zip(columns, row)), indent=1) for row in data]
        return "\n".join("    " + line for row in rows for line in row.splitlines())

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


def table_of(groups: list[dict]) -> list[list]:
    """The kept samples of recorded groups: one row each, in the order of COLUMNS."""
    rows = [[group["step"], group["prompt"], group["gold"], s["text"], s["reward"], s["status"],
             s["advantage"]] for group in groups for s in group["pool"] if s["kept"]]
    return [[sendable(cell) for cell in row] for row in rows]


def sendable(value):
    """A text without lone surrogates, which a model can write and no tracker can store."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


class Tracker:
    """Reads a run's logs and sends what is new in them.

    Raises SystemExit, one sentence, if the tracker does not start.
    """

    def __init__(self, run: Path, kind: str, known: dict):
        self.run, self.kind, self.failures = run, kind, 0
        self.read = dict.fromkeys(LOGS, 0)  # bytes of each log that have been read
        self.waiting = {}  # step -> {log: its rows that are not sent yet}
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

    def send(self) -> None:
        """Send what is new, in order of steps. What fails stays waiting for the next call."""
        for log in LOGS:
            self.read_on(log)
        with self.tolerant():
            for step in sorted(self.waiting):
                self.tracker.log(self.as_sent(self.waiting[step]), step=step)
                self.state["sent"] |= dict.fromkeys(self.waiting.pop(step), step)
            write_safely(self.file, json.dumps(self.state))

    def read_on(self, log: str) -> None:
        """Put the new rows of a log into `waiting`. Half a line is left for the next time."""
        if not (self.run / log).exists():
            return
        with open(self.run / log, "rb") as file:
            file.seek(self.read[log])
            lines = [line for line in file if line.endswith(b"\n")]
        self.read[log] += sum(map(len, lines))
        for line in lines:
            row = row_of(line.decode(errors="replace"))
            if row and row["step"] > self.state["sent"][log]:
                self.waiting.setdefault(row["step"], {}).setdefault(log, []).append(row)

    def as_sent(self, rows: dict[str, list[dict]]) -> dict:
        """What the logs say of one step."""
        found = {}
        for row in rows.get("metrics.jsonl", []):
            found |= numbers_of("train", row)
        evaluations = rows.get("eval.jsonl", [])
        for row in evaluations:
            several = len(evaluations) > 1
            found |= numbers_of(f"held_out/{row['data']}" if several else "held_out", row)
        table = table_of(rows.get("groups.jsonl", []))
        if table:
            found["completions"] = self.tracker.Table(columns=COLUMNS, data=table)
        return found

    def close(self) -> None:
        """Wait until everything has arrived, and say so if something has not."""
        with self.tolerant():
            self.tracker.finish()
        if self.waiting:
            print(f"The last steps did not reach {self.kind}: send them with "
                  f"`python -m parts.track {self.run} {self.kind}`")

    @contextlib.contextmanager
    def tolerant(self):
        """Count whatever a tracker raises and warn the first time, so that the run goes on."""
        try:
            yield
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                tqdm.write(f"WARNING: {self.kind} failed ({type(error).__name__}: {shown(error)}); "
                           f"the run goes on, and its logs in {self.run} have everything")


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
    if tracker.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
