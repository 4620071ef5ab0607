"""Proof of the bug hunt: every bug in a real run, against the same run without it.

    python course/prove.py            # all of them, a quarter of an hour of CPU
    python course/prove.py 3 5        # some

Writes course/answers/proof.jsonl: for each bug the command, the diagnostic that shows it with and
without the bug, and how the run ended. A test checks that no proof is older than its patch.
"""
import collections
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean as mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.mutate import mutate  # noqa: E402
from course import bugs  # noqa: E402

PROOF = bugs.ANSWERS / "proof.jsonl"
SMALL = ["--steps", "4", "--batch-prompts", "12", "--eval-every", "0", "--eval-questions", "20",
         "--eval-k", "4", "--log-groups", "all"]


def patch_of(bug: dict) -> str:
    """A digest of what decides about a proof."""
    deciding = [bug[key] for key in ("file", "old", "new", "flags", "diagnostic")]
    return hashlib.sha256(json.dumps(deciding).encode()).hexdigest()[:12]


def run(folder: Path, flags: list[str], afresh: bool = True) -> str:
    """Train in this copy; returns the last line of its output if it did not end well."""
    if afresh:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    done = subprocess.run([sys.executable, "minirl.py", "--name", "hunt", *SMALL, *flags],
                          cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.strip().splitlines()[-1][-300:] if done.returncode else ""


def rows(folder: Path, name: str) -> list[dict]:
    file = folder / "runs" / "hunt" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def mean_of(folder: Path, *keys: str) -> float:
    """The mean over the steps of a metric, or of the sum of some."""
    return mean(sum(row[key] for key in keys) for row in rows(folder, "metrics") if keys[0] in row)


def trained(folder: Path) -> list[tuple[dict, dict]]:
    """(group, sample) for all that an update has seen."""
    return [(group, s) for group in rows(folder, "groups") for s in group["pool"]
            if s["kept"] and "mini" in s]


def split_groups(folder: Path) -> float:
    minis = collections.defaultdict(set)
    for group, s in trained(folder):
        minis[group["step"], group["place"]].add(s["mini"])
    return mean(len(found) > 1 for found in minis.values())


def repeated(folder: Path, flags: list[str]) -> float:
    """Prompts of the first step after a resumption that were also in the step before."""
    run(folder, ["--steps", "2", *flags])
    run(folder, ["--steps", "3", "--resume", *flags], afresh=False)
    ids = collections.defaultdict(set)
    for group in rows(folder, "groups"):
        ids[group["step"]].add(group["id"])
    return len(ids[2] & ids[3])


MEASURES = {  # the bug's name -> what its diagnostic is in a run's folder; others: a metric's mean
    "the mean of the kept as baseline": lambda f: mean(
        abs(s["advantage"]) == 0.5 for group, s in trained(f) if len(group["pool"]) > 8),
    "the mask looks at pi_theta/mu": lambda f: mean_of(f, "clipped_positive", "clipped_negative"),
    "samples instead of groups are dealt out to the mini-batches": split_groups,
    "mini-batches in the order of the batch": lambda f: mean(
        s["mini"] == group["place"] % 4 for group, s in trained(f)),
    "the end token is dropped": lambda f: mean(
        len(s["ids"]) - len(s["theta"]) for _, s in trained(f)),
    "the last number counts where there is no box": lambda f: mean(
        s["status"] == "no_box" for group in rows(f, "groups") for s in group["pool"]),
    "evaluation at another template": lambda f: rows(f, "eval")[0]["avg"],
}


def measure(folder: Path, bug: dict, again: bool = True) -> tuple:
    """(the diagnostic in a run of this copy, how the run ended if it did not end well).

    again: make the run, and do not look at the last one.
    """
    if bug["why"] == "a resumed run draws a problem again":
        return repeated(folder, bug["flags"]), ""
    ended = run(folder, bug["flags"]) if again else ""
    if not rows(folder, "metrics"):
        return "the probe ends the run", ended
    if bug["diagnostic"].startswith("the probe"):
        return "it trains", ended
    find = MEASURES.get(bug["why"], lambda f: mean_of(f, bug["diagnostic"]))
    return float(f"{find(folder):.4g}"), ended


def remember(row: dict) -> None:
    """Into the file, in the place of an older proof of the same bug."""
    lines = PROOF.read_text(encoding="utf-8").splitlines() if PROOF.exists() else []
    known = {old["number"]: old for old in map(json.loads, lines)} | {row["number"]: row}
    text = "".join(json.dumps(known[n], ensure_ascii=False) + "\n" for n in sorted(known))
    PROOF.write_text(text, encoding="utf-8")
    print(row, flush=True)


def main() -> None:
    wanted = [int(word) for word in sys.argv[1:]] or list(bugs.bugs())
    with tempfile.TemporaryDirectory(prefix="hunt-") as place:
        sound, last = Path(place, "sound"), None
        bugs.copy(sound)
        for number in sorted(wanted, key=lambda number: bugs.find(number)["flags"]):
            bug, planted = bugs.find(number), Path(place, f"bug-{number}")
            shutil.copytree(sound, planted, ignore=shutil.ignore_patterns("runs", "__pycache__"))
            mutate(planted, bug)
            without, _ = measure(sound, bug, again=bug["flags"] != last)
            with_it, ended = measure(planted, bug)
            last = bug["flags"] if "resumed" not in bug["why"] else None
            remember(dict(number=number, patch=patch_of(bug), diagnostic=bug["diagnostic"],
                          sound=without, planted=with_it, ended=ended,
                          command=" ".join(["python minirl.py", *SMALL, *bug["flags"]])))
            shutil.rmtree(planted)


if __name__ == "__main__":
    main()
