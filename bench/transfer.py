"""What has a run learnt for other problems? Its model before and after, by the run's own protocol.

    python bench/transfer.py runs/real-0 --data svamp          # from the hub, or a file
    python bench/transfer.py runs/real-0 --data mine.jsonl --limit 200

Any other flag of eval.py goes to both evaluations; the second prints the paired difference.
"""
import argparse
import subprocess
import sys
from pathlib import Path

from store import ROOT

from parts.folder import settings

KEYS = ("template", "max_tokens", "max_prompt_tokens", "temperature")


def commands(run: str, flags: list[str]) -> list[list[str]]:
    """Both evaluations: eval.py's flags."""
    config = settings(Path(run))
    if not config:
        raise SystemExit(f"{run} is no folder of a run, such as runs/real-0.")
    both = [f"--{key.replace('_', '-')}={config[key]}" for key in KEYS] + flags
    before = f"{run}-before"
    return [[f"--model={config['model']}", f"--out={before}", *both],
            [f"--adapter={run}", f"--out={run}-after", f"--against={before}", *both]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="runs/NAME")
    args, flags = parser.parse_known_args()
    for command in commands(args.run, flags):
        subprocess.run([sys.executable, ROOT / "eval.py", *command], check=True)


if __name__ == "__main__":
    main()
