"""What is drawn of a run: the panels, and their numbers as the logs have them.

explorer/page.html and parts/plot.py draw them.
"""
import math
from pathlib import Path

from parts.folder import NO_VERDICT, PART, read_rows, settings
from parts.text import shown

# (kind of drawing, title, unit, {key in metrics.jsonl: label}); docs/runs.md explains each title
PANELS = (
    ("lines", "Reward while training", "mean reward",
     {"reward_first_round": "first round (fair)", "reward_pool": "whole pool"}),
    ("accuracy", "Accuracy on held-out problems", "avg@k, 95 % interval", {}),
    ("parts", "Parts of the reward", "mean reward, first round", {}),  # see `panels_of`
    ("lines", "Samples drawn", "samples per step", {"samples": ""}),
    ("lines", "Tokens generated", "tokens per step", {"tokens": ""}),
    ("lines", "Prompts without signal", "share of prompts",
     {"zero_signal": "no signal", "unresolved_too_few_correct": "unresolved: too few correct",
      "unresolved_too_few_wrong": "unresolved: too few wrong"}),
    ("kl", "Engine against trainer", "KL(μ ‖ π_old), nats per token",
     {"kl_k1": "|k1|", "kl_k3": "k3"}),
    ("lines", "Entropy of the policy", "nats per token",
     {"entropy": "of all that was drawn", "entropy_trained": "of trained tokens"}),
    ("off-policy", "Tokens stopped by the mask", "share of tokens",
     {"clipped_positive": "A > 0", "clipped_negative": "A < 0"}),
    ("off-policy", "Tokens far off-policy", "share of tokens",
     {"weight_truncated": "weight cut at its cap", "weight_over_2": "weight > 2",
      "weight_under_half": "weight < ½"}),
    ("off-policy", "Importance weights before the cap", "π_θ/μ",
     {"weight_max": "largest", "weight_mean": "mean", "weight_min": "smallest"}),
    ("off-policy", "Effective sample size", "share of tokens", {"weight_ess": ""}),
    ("routes", "Experts alike in engine and trainer", "share of tokens",
     {"routes_agree_all": "in all layers"}),
    ("lines", "Where the time goes", "seconds per step",
     {"seconds_sample": "sample", "seconds_train": "train", "seconds_sync": "sync"}),
    ("lines", "Length of the answers", "tokens per answer", {"response_length": ""}),
    ("lines", "Answers that cannot score", "share of answers",
     {"truncated": "cut at the length limit", "share_no_box": "no box",
      "share_no_verdict": "no verdict: the grader failed"}),
    ("lines", "Size of the update", "gradient norm", {"grad_norm": ""}),
)


def panels_of(rows: list[dict]) -> list[tuple]:
    """PANELS; that of the reward's parts has a line for each, and is left out if there is one."""
    parts = {key: key.removeprefix(PART) for row in rows for key in row if key.startswith(PART)}
    return [(*panel[:3], parts) if panel[0] == "parts" else panel for panel in PANELS
            if panel[0] != "parts" or len(parts) > 1]


def smoothing_reach(steps: int) -> int:
    """Steps to both sides of the moving mean: a fortieth of the run, and one more.

    A run of at most 12 steps stays as it is.
    """
    return math.ceil(steps / 40) + 1 if steps > 12 else 0


# ----------------------------------------------------------------------------------------- reading
def read_run(folder: str | Path) -> dict:
    """name, config, metrics and evals of a run. Raises SystemExit if there is nothing to see."""
    folder = Path(folder)
    config = settings(folder)
    metrics, evals = drawn_rows(folder / "metrics.jsonl"), drawn_rows(folder / "eval.jsonl")
    if not config or not (metrics or evals):
        raise SystemExit(f"{shown(folder)} is no folder of a run that has finished a step, such as "
                         "runs/NAME.")
    return dict(name=folder.resolve().name, config=config, metrics=metrics, evals=evals)


def drawn_rows(path: Path) -> list[dict]:
    """Of each row of a log the numbers and the data set. Broken lines are left out."""
    return [{key: value for key, value in row.items()
             if is_number(value) or key == "data" and isinstance(value, str)}
            | shares(row.get("verdicts"))
            for row in read_rows(path) if is_number(row["step"])]


def is_number(value) -> bool:
    """Whether a value can be drawn. NaN cannot, nor can an integer larger than every float."""
    return isinstance(value, int | float) and abs(value) < 1e300


def shares(counts) -> dict:
    """The shares of a step's verdicts that cannot score; `counts` lists only what occurred."""
    if not counts or not isinstance(counts, dict) or not all(map(is_number, counts.values())):
        return {}
    total = max(1, sum(counts.values()))
    failed = sum(counts.get(status, 0) for status in NO_VERDICT)
    return dict(share_no_box=counts.get("no_box", 0) / total, share_no_verdict=failed / total)


# ------------------------------------------------------------------------------------- several runs
def what_differs(runs: list[dict]) -> list[str]:
    """A sentence where curves mean other things: other rewards, other held-out problems."""
    rewards = {run["config"].get("reward") or "math-verify" for run in runs}
    problems = {measured_on(run) for run in runs} - {""}
    return [f"The runs have different {kind} ({shown('; '.join(sorted(names)))}): do not compare "
            "their curves."
            for kind, names in (("rewards", rewards), ("held-out problems", problems))
            if len(names) > 1]


def measured_on(run: dict) -> str:
    """`gsm8k (100)`; a share that was held out of the run's own data is named by these data."""
    names = set()
    for row in run["evals"]:
        name, count = row.get("data", ""), row.get("questions")
        if name == "held-out":
            name = f"held out of {run['config'].get('data')}"
        names.add(f"{name} ({count})" if name and count else name)
    return ", ".join(sorted(names - {""}))
