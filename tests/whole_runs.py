"""Small runs of the real program, and whether two of them are the same."""
import json
from pathlib import Path

from parts.folder import checkpoints, step_of
from parts.problems import chains
from world import rows

SMALL = ["--batch-prompts", "8", "--max-tokens", "24", "--eval-questions", "6", "--eval-k", "2",
         "--eval-every", "3"]


def difference(run: Path, reference: Path, step: int) -> str:
    """The first thing in which two runs differ up to `step`; empty if they are equal."""
    for log in ("metrics.jsonl", "groups.jsonl", "eval.jsonl"):
        mine, other = ([row for row in rows(folder / log) if row["step"] <= step]
                       for folder in (run, reference))
        if log == "eval.jsonl" and mine == other[:-1] and other[-1]["step"] == step:
            continue  # an evaluation follows the checkpoint of its step; --resume makes up for it
        if mine != other:
            return f"{log} differs"
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        file = f"checkpoints/step-{step:06d}/{name}"
        if (run / file).read_bytes() != (reference / file).read_bytes():
            return f"{file} differs"
    return ""


def examine(run: Path, reference: Path) -> tuple[int, str]:
    """(step of the newest checkpoint, what is wrong with it) after a kill."""
    step = step_of(checkpoints(run)[-1])
    return step, difference(run, reference, step)


def workplace(folder: Path) -> Path:
    """A folder with a data file so small that a short run sees every problem several times."""
    lines = [json.dumps(dict(problem=p["problem"], answer=p["answer"]))
             for p in chains("train", 24)]
    (folder / "few.jsonl").write_text("\n".join(lines))
    return folder
