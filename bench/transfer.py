"""Evaluates the model of a run before and after training on other problems.

    python bench/transfer.py runs/real-0 --data svamp          # from the hub, or a file
    python bench/transfer.py runs/real-0 --data mine.jsonl --limit 200

Other flags of eval.py go to both evaluations. The second one prints the paired difference.
"""
import argparse
import subprocess
import sys
from pathlib import Path

from store import ROOT

from parts.data import is_own
from parts.provenance import settings

KEYS = ("template", "max_tokens", "max_prompt_tokens", "temperature")


def commands(run: str, data: str, flags: list[str]) -> list[list[str]]:
    """Both evaluations: eval.py's flags. Their folders are named after run and data."""
    config = settings(Path(run))
    if not config:
        raise SystemExit(f"{run} is no folder of a run, such as runs/real-0.")
    keys = KEYS + ("columns",) * is_own(data)  # as eval.py does it with the adapter
    if config.get("stop"):
        keys += ("stop",)
    if config["reward"] and all(map(is_own, data.split(","))):
        keys += ("reward", "threshold")
    both = [f"--data={data}", *(f"--{key.replace('_', '-')}={config[key]}" for key in keys), *flags]
    before, after = (f"{Path(run)}-{when}-{'-'.join(Path(one).stem for one in data.split(','))}"
                     for when in ("before", "after"))
    return [[f"--model={config['model']}", f"--out={before}", *both],
            [f"--adapter={run}", f"--out={after}", f"--against={before}", *both]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="runs/NAME")
    parser.add_argument("--data", required=True, help="as for eval.py")
    args, flags = parser.parse_known_args()
    for command in commands(args.run, args.data, flags):
        ended = subprocess.run([sys.executable, ROOT / "eval.py", *command]).returncode
        if ended:
            raise SystemExit(ended)  # it has said why


if __name__ == "__main__":
    main()
