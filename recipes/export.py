"""Merges a trained adapter into its base: a model folder for other programs.

    python -m recipes.export runs/NAME my-model

The adapter alone needs no export, because every folder in runs/NAME/checkpoints is one
(docs/after_training.md).
"""
import argparse
from pathlib import Path

from parts.data import HELD_OUT
from parts.policy import write_merged
from parts.provenance import find_adapter, run_named, settings
from parts.text import shown


def export(place: str, out: Path, dtype: str = "") -> None:
    """Write a run's newest checkpoint, or the one given. `dtype` empty: as in training."""
    if out.is_file() or out.exists() and any(out.iterdir()):
        raise SystemExit(f"{shown(out)} exists already: name another folder.")
    adapter = find_adapter(place)
    run = settings(run_named(adapter))
    if not run:
        raise SystemExit(f"{shown(adapter)} is no checkpoint of a run: its base is not known.")
    write_merged(adapter, out, dtype or run["dtype"])
    own = run["eval_data"] == HELD_OUT  # then the whole file would be mostly trained problems
    asked = f"--template {run['template']} --max-prompt-tokens {run['max_prompt_tokens']}"
    print(f"evaluate it with: python eval.py --model {shown(out)} "
          f"--data {'FILE' if own else shown(run['eval_data'])} "
          f"{shown(asked)} --max-tokens {run['max_tokens']} --k {run['eval_k']}")
    if own:
        print(f"FILE must have other problems than {shown(run['data'])}, because the run was "
              "trained on most of these. For those that it held out: python eval.py --adapter "
              f"{shown(place)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m recipes.export", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="runs/NAME, or runs/NAME/checkpoints/step-000100")
    parser.add_argument("out", help="the new folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="",
                        help="precision of the weights; default: as in training")
    flags = parser.parse_args()
    export(flags.run, Path(flags.out).resolve(), flags.dtype)
