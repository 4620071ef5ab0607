"""What the log of whole pools costs: seconds of a step and bytes of a run.

    python bench/recording.py                  # 200 steps of the built-in model, in runs/recording
    python bench/recording.py --mini-batches 4 # other flags go to the trainer

Every prompt is recorded once and timed by itself, so one run measures both every prompt and the
default of two.
"""
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import minirl  # noqa: E402
from parts import files  # noqa: E402
from parts import run as running  # noqa: E402
from parts.config import parse  # noqa: E402

DEFAULT = 2
seconds, sizes = {"2": 0.0, "all": 0.0}, {"2": 0, "all": 0}


def timed(step, groups, metrics, run) -> None:
    """In place of run.log: the same, with a clock around what a recorded prompt costs."""
    kept, run.config.log_groups = run.config.log_groups, "0"
    original(step, groups, metrics, run)
    run.config.log_groups = kept
    file = run.folder / "groups.jsonl"
    for group in groups:
        before, start = file.stat().st_size if file.exists() else 0, time.perf_counter()
        files.append(file, running.group_row(step, group, run.engine.tokenizer))
        spent, size = time.perf_counter() - start, file.stat().st_size - before
        for which in ("all", "2") if group.index < DEFAULT else ("all",):
            seconds[which] += spent
            sizes[which] += size


def main() -> None:
    config = parse(["--name", "recording", "--steps", "200", "--eval-every", "0",
                    "--log-groups", "all", *sys.argv[1:]])
    with running.last_words(config):
        minirl.main(config)
    rows = list(files.read_rows(Path("runs", config.name, "metrics.jsonl")))
    steps, whole = len(rows), sum(row["seconds"] for row in rows)
    for which in ("2", "all"):
        print(f"--log-groups {which:3}: {sizes[which] / 1e6:6.1f} MB in {steps} steps, "
              f"{1000 * seconds[which] / steps:6.2f} ms a step, "
              f"{seconds[which] / whole:.2%} of it")


original, running.log = running.log, timed
if __name__ == "__main__":
    main()
