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
import importlib.util
import json
import os
import secrets
import sys
from pathlib import Path

from tqdm import tqdm

from parts.files import lock, read_json, shown, write_safely
from parts.folder import settings
from parts.ranks import writer

LOGS = ("metrics.jsonl", "eval.jsonl", "groups.jsonl")
COLUMNS = ["step", "prompt", "gold", "completion", "reward", "status", "advantage"]
PROJECT = "minirl"


# ------------------------------------------------------------------------------ the trackers
class Trackio:
    """Into the SQLite file of this machine, or wherever TRACKIO_SPACE_ID says."""

    def __init__(self, folder: Path, name: str, known: dict):
        import trackio

        self.trackio = trackio
        trackio.init(PROJECT, name=name, config=known, resume="allow", embed=False,
                     auto_log_cpu=False, auto_log_gpu=False)

    def log(self, step: int, numbers: dict, table: list[list]) -> None:
        if table:
            numbers = numbers | dict(completions=self.trackio.Table(columns=COLUMNS, data=table))
        self.trackio.log(numbers, step=step)

    def close(self) -> None:
        self.trackio.finish()


class Wandb:
    """To its server; with WANDB_MODE=offline into `folder`, from where `wandb sync` uploads it."""

    def __init__(self, folder: Path, name: str, known: dict):
        import wandb

        self.table = wandb.Table
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), id=name, name=name, resume="allow",
            dir=folder, config=known, allow_val_change=True, settings=wandb.Settings(console="off"))

    def log(self, step: int, numbers: dict, table: list[list]) -> None:
        if table:
            numbers = numbers | dict(completions=self.table(columns=COLUMNS, data=table))
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Into event files in `folder`: `tensorboard --logdir runs` shows them."""

    def __init__(self, folder: Path, name: str, known: dict):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder)
        self.writer.add_text("settings", code_block(json.dumps(known, indent=1)))

    def log(self, step: int, numbers: dict, table: list[list]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        if table:
            rows = [json.dumps(dict(zip(COLUMNS, row)), indent=1) for row in table]
            self.writer.add_text("completions", code_block("\n".join(rows)), step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def code_block(text: str) -> str:
    """As Markdown that shows every character as it is."""
    return "\n".join("    " + line for line in text.splitlines())


TRACKERS = {"trackio": Trackio, "wandb": Wandb, "tensorboard": TensorBoard}


def require(kind: str) -> None:
    """Raises SystemExit if this tracker is not installed, or wants a login that there is not."""
    if kind == "none":
        return
    if importlib.util.find_spec(kind) is None:
        raise SystemExit(f"--report-to {kind} needs the package {kind}: `pip install {kind}`, or "
                         "leave the flag out.")
    if kind == "wandb" and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        if not wandb.login(prompt=False, verify=False):
            raise SystemExit(
                "wandb is not logged in: run `wandb login`, or set WANDB_MODE=offline, which keeps "
                "everything on this machine until `wandb sync`.")


# ------------------------------------------------------------------------------ what is sent
def numbers_of(prefix: str, row: dict) -> dict:
    """The numbers of a row of a log, by name: {"train/loss": 0.1, "train/verdicts/correct": 7}."""
    found = {}
    for key, value in row.items():
        if isinstance(value, list):
            value = dict(enumerate(value, 1))  # of rounds_histogram: by the number of rounds
        if isinstance(value, dict):
            found |= numbers_of(f"{prefix}/{key}", value)
        elif isinstance(value, int | float) and key != "step":
            found[f"{prefix}/{key}"] = value
    return found


def table_of(groups: list[dict]) -> list[list]:
    """The kept samples of recorded groups, a row each, in the order of COLUMNS."""
    rows = []
    for group in groups:
        for s in group["pool"]:
            if s["kept"]:
                texts = [sendable(group["prompt"]), sendable(group["gold"]), sendable(s["text"])]
                rows.append([group["step"], *texts, s["reward"], s["status"], s["advantage"]])
    return rows


def sendable(text: str) -> str:
    """Without lone surrogates, which a model can write and no tracker can store."""
    return text.encode("utf-8", "backslashreplace").decode()


class Tracker:
    """Reads a run's logs and sends what is new in them.

    Raises SystemExit, one sentence, if the tracker does not start.
    """

    def __init__(self, run: Path, kind: str, known: dict):
        self.run, self.kind, self.failures = run, kind, 0
        self.waiting = {}  # step -> {log: its rows that are not sent yet}
        self.read = dict.fromkeys(LOGS, 0)  # bytes
        folder = run / "tracker"
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{kind}.json"
        self.state = read_json(self.file) if self.file.exists() else new_state(run)
        try:
            self.tracker = TRACKERS[kind](folder, self.state["id"], known)
            write_safely(self.file, json.dumps(self.state))
        except Exception as error:  # each of them has its own kinds
            raise SystemExit(f"{kind} did not start ({shown(error)}): mend that, or leave "
                             "--report-to out.") from error

    def send(self) -> None:
        """Send the new rows, in order of steps. What fails is tried again with the next ones."""
        with self.tolerant():
            self.read_new_rows()
            for step in sorted(self.waiting):
                rows = self.waiting[step]
                self.send_step(step, rows)
                self.state["sent"] |= dict.fromkeys(rows, step)
                del self.waiting[step]
            write_safely(self.file, json.dumps(self.state))

    def send_step(self, step: int, rows: dict[str, list[dict]]) -> None:
        numbers = {}
        for row in rows.get("metrics.jsonl", []):
            numbers |= numbers_of("train", row)
        evaluations = rows.get("eval.jsonl", [])
        for row in evaluations:
            of_set = f"/{row.get('data')}" * (len(evaluations) > 1)
            numbers |= numbers_of(f"held_out{of_set}", row)
        self.tracker.log(step, numbers, table_of(rows.get("groups.jsonl", [])))

    def read_new_rows(self) -> None:
        """What was added to the logs, into `waiting`; not what the tracker knows already."""
        for name in LOGS:
            sent = self.state["sent"][name]
            for row in self.new_lines(name):
                if row["step"] > sent:
                    of_step = self.waiting.setdefault(row["step"], {})
                    of_step.setdefault(name, []).append(row)

    def new_lines(self, name: str):
        """The rows of a log from where it was last read, up to a half line at its end."""
        file = self.run / name
        if not file.exists():
            return
        with open(file, "rb") as log:
            log.seek(self.read[name])
            for line in log:
                if not line.endswith(b"\n"):
                    return
                self.read[name] += len(line)
                yield json.loads(line)

    def close(self) -> None:
        """Wait until all has arrived, and say so if something has not."""
        with self.tolerant():
            self.tracker.close()
        if self.waiting:
            print(f"{len(self.waiting)} steps did not reach {self.kind}: send them with "
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


@writer
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
    require(kind)
    with lock(run, "send it then"):
        tracker = Tracker(run, kind, known)
        tracker.send()
        tracker.close()
    if tracker.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
