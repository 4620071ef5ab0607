"""What a run's logs say, shown by a tracker: trackio, Weights & Biases or TensorBoard.

    python minirl.py --report-to trackio        # while it runs
    python -m parts.track runs/NAME trackio     # afterwards; or what did not arrive at the time

The JSON lines in runs/NAME stay the truth. A tracker is sent their rows, each step once: metrics as
train/..., evaluations as held_out/... (of several sets held_out/SET/...), and the kept samples of
the recorded prompts as a table.
`runs/NAME/tracker/KIND.json` remembers the tracked run and how far it has come, so that a resumed
run goes on in the same one. Steps that a resumed run does again are not sent again. A tracker that
fails costs a warning, never the run.
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
    """Into the SQLite file of this machine, or wherever TRACKIO_SPACE_ID says."""
    import trackio

    trackio.init(PROJECT, name=name, config=known, resume="allow", embed=False,
                 auto_log_cpu=False, auto_log_gpu=False)
    return trackio


def open_wandb(folder: Path, name: str, known: dict):
    """To its server; with WANDB_MODE=offline into `folder`, from where `wandb sync` uploads it."""
    import wandb

    wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), id=name, name=name, dir=folder,
               config=known, allow_val_change=True, resume="allow",
               settings=wandb.Settings(console="off"))
    return wandb


class TensorBoard:
    """Into event files in `folder`: `tensorboard --logdir runs` shows them."""

    def __init__(self, folder: Path, name: str, known: dict):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder)
        self.writer.add_text("settings", code_block(json.dumps(known, indent=1)))

    def log(self, numbers: dict, step: int) -> None:
        for name, value in numbers.items():
            add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
            add(name, value, step)
        self.writer.flush()

    def Table(self, columns: list, data: list) -> str:
        return code_block("\n".join(json.dumps(dict(zip(columns, row)), indent=1) for row in data))

    def finish(self) -> None:
        self.writer.close()


def code_block(text: str) -> str:
    """As Markdown that shows every character as it is."""
    return "\n".join("    " + line for line in text.splitlines())


TRACKERS = {"trackio": open_trackio, "wandb": open_wandb, "tensorboard": TensorBoard}


# ------------------------------------------------------------------------------ what is sent
def numbers_of(prefix: str, row: dict) -> dict:
    """The numbers of a row of a log, by name: {"train/loss": 0.1, "train/verdicts/correct": 7}."""
    found = {}
    for key, value in row.items():
        if isinstance(value, list):
            value = dict(enumerate(value, 1))  # of rounds_histogram: by the number of rounds
        if isinstance(value, dict):
            found |= numbers_of(f"{prefix}/{key}", value)
        elif is_number(value) and key != "step":
            found[f"{prefix}/{key}"] = value
    return found


def table_of(groups: list[dict]) -> list[list]:
    """The kept samples of recorded groups, a row each, in the order of COLUMNS."""
    rows = []
    for group in groups:
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # a damaged one
            texts = [sendable(group["prompt"]), sendable(group["gold"])]
            rows += [[group["step"], *texts, sendable(s["text"]), s["reward"], s["status"],
                      s["advantage"]] for s in group["pool"] if s["kept"]]
    return rows


def sendable(text: str) -> str:
    """Without lone surrogates, which a model can write and no tracker can store."""
    return text.encode("utf-8", "backslashreplace").decode()


def rows_after(log: Path, start: int) -> tuple[list[dict], int]:
    """The rows of a log from a byte on, and where they end: before half a line, if there is one."""
    lines = []
    if log.exists():
        with open(log, "rb") as file:
            file.seek(start)
            lines = [line for line in file if line.endswith(b"\n")]
    rows = [row_of(line.decode(errors="replace")) for line in lines]
    return [row for row in rows if row], start + sum(map(len, lines))


class Tracker:
    """Reads a run's logs and sends what is new in them.

    Raises SystemExit, one sentence, if the tracker does not start.
    """

    def __init__(self, run: Path, kind: str, known: dict):
        self.run, self.kind, self.failures, self.all_sent = run, kind, 0, True
        self.read = dict.fromkeys(LOGS, 0)  # bytes of which all is sent
        folder = run / "tracker"
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{kind}.json"
        self.state = read_json(self.file) if self.file.exists() else new_state(run)
        try:
            self.tracker = TRACKERS[kind](folder, self.state["id"], known)
            write_safely(self.file, json.dumps(self.state))
        except Exception as error:  # each of them has its own kinds
            raise SystemExit(f"{kind} did not start ({shown(error)}): install it with `pip install "
                             f"{kind}` or mend what it says, or leave --report-to out.") from error

    def send(self) -> None:
        """Send what is new, in order of steps. What fails is tried again with the next ones."""
        self.all_sent = False
        with self.tolerant():
            ends, new = {}, {}  # of the logs that were read; step -> {log: its rows}
            for name in LOGS:
                rows, ends[name] = rows_after(self.run / name, self.read[name])
                for row in rows:
                    if row["step"] > self.state["sent"][name]:
                        new.setdefault(row["step"], {}).setdefault(name, []).append(row)
            for step in sorted(new):
                self.tracker.log(self.as_sent(new[step]), step=step)
                self.state["sent"] |= dict.fromkeys(new[step], step)
            self.read, self.all_sent = ends, True
            write_safely(self.file, json.dumps(self.state))

    def as_sent(self, rows: dict[str, list[dict]]) -> dict:
        """What all logs say of a step."""
        found = {}
        for row in rows.get("metrics.jsonl", []):
            found |= numbers_of("train", row)
        evaluations = rows.get("eval.jsonl", [])
        for row in evaluations:
            of_set = f"/{row.get('data')}" * (len(evaluations) > 1)
            found |= numbers_of(f"held_out{of_set}", row)
        table = table_of(rows.get("groups.jsonl", []))
        if table:
            found["completions"] = self.tracker.Table(columns=COLUMNS, data=table)
        return found

    def close(self) -> None:
        """Wait until all has arrived, and say so if something has not."""
        with self.tolerant():
            self.tracker.finish()
        if not self.all_sent:
            print(f"The last steps did not reach {self.kind}: send them with "
                  f"`python -m parts.track {self.run} {self.kind}`")

    @contextlib.contextmanager
    def tolerant(self):
        """Whatever a tracker raises is counted, and said the first time: the run goes on."""
        try:
            yield
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                tqdm.write(f"WARNING: {self.kind} failed ({type(error).__name__}: {shown(error)}); "
                           f"the run goes on, and its logs in {self.run} have everything")


def open_tracker(run: Path, kind: str, known: dict) -> Tracker | None:
    return None if kind == "none" else Tracker(run, kind, known)


def new_state(run: Path) -> dict:
    """The tracked run's name, which no other has, and the last step of each log that it knows."""
    name = f"{run.resolve().name[:50]}-{secrets.token_hex(3)}"
    return dict(id=name, sent=dict.fromkeys(LOGS, -1))


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
