"""Merges a trained adapter into its base: a model folder for other programs.

    python -m recipes.export runs/NAME my-model

The adapter alone needs no export, because every folder in runs/NAME/checkpoints is one
(docs/after_training.md).
"""
import argparse
from pathlib import Path
from shlex import quote

from parts.data import HELD_OUT
from parts.files import replacing
from parts.models import Model, find_model
from parts.run_folder import find_adapter, read_config, require_same, run_of
from parts.text import shown


def export(place: str, out: Path, dtype: str = "") -> None:
    """Write a run's newest checkpoint, or the one given. `dtype` empty: as in training.

    The run's folder may come from somebody else. The name of the base model is printed, and no
    other file that the run names is opened.
    """
    if out.is_file() or out.exists() and any(out.iterdir()):
        raise SystemExit(f"{shown(out)} exists already: name another folder.")
    adapter = find_adapter(place)
    run = run_of(adapter)
    if not run:
        raise SystemExit(f"{shown(adapter)} is no checkpoint of a run: its base is not known.")
    config, ends = read_config(run)["config"], read_config(run)["end_tokens"]
    base = find_model(config["model"])
    require_same(run, dict(model=base.digest))
    dtype = dtype or config["dtype"]
    print(f"{shown(out)}: the model {shown(base.path)}, which the run names, with the adapter "
          f"{shown(adapter)}, in {shown(dtype)}")
    write_merged(base, adapter, config, ends, out, dtype)
    own = config["eval_data"] == HELD_OUT  # then the whole file would be mostly trained problems
    flags = dict(model=out, data="FILE" if own else config["eval_data"], k=config["eval_k"]) | {
        name: config[name] for name in ("template", "max_prompt_tokens", "max_tokens")}
    print("evaluate it with: python eval.py " + " ".join(
        f"--{name.replace('_', '-')} {quote(shown(value))}" for name, value in flags.items()))
    if own:
        print(f"FILE must have other problems than {shown(config['data'])}, because the run was "
              "trained on most of these. For those that it held out: python eval.py --adapter "
              f"{quote(place)}")


def write_merged(base: Model, adapter: str, trained_with: dict, ends: list[int], out: Path,
                 dtype: str) -> None:
    """Write the model of a run's checkpoint, W + scale * B A for every adapted W, to a new folder.

    PEFT adds in float32. Then the sum is rounded once, to `dtype`. The folder has the tokenizer of
    the base model and all end tokens.
    """
    import torch
    from transformers import GenerationConfig

    from parts.policy import load_adapter

    policy, _ = load_adapter(base.path, adapter, trained_with["dtype"])
    policy.float()
    say_what_is_left(policy, dtype)
    model = policy.merge_and_unload().to(getattr(torch, dtype))
    ends = ends if len(ends) > 1 else ends[0]  # some programs read only one
    model.config.eos_token_id = ends
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=base.tokenizer.pad_token_id, do_sample=True, top_k=0,
        temperature=trained_with["temperature"], max_new_tokens=trained_with["max_tokens"])
    save_model(model, base.tokenizer, out)


def say_what_is_left(policy, dtype: str) -> None:
    """Print how much of the update is left when W + dW is rounded: <rounded - W, dW> / <dW, dW>."""
    if dtype == "float32":
        return
    import torch

    left, whole = 0.0, 0.0
    for module in policy.base_model.model.modules():
        if hasattr(module, "get_delta_weight"):
            base, update = module.get_base_layer().weight, module.get_delta_weight("default")
            rounded = (base + update).to(getattr(torch, dtype)).float()
            left += ((rounded - base) * update).sum().item()
            whole += update.square().sum().item()
    share = left / whole if whole else 1.0
    advice = "; --dtype float32 keeps all of it" if share < 0.95 else ""
    print(f"{share:.1%} of the update is left in {dtype}{advice}")


def save_model(model, tokenizer, out: Path) -> None:
    """Write the folder completely or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as writing:
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m recipes.export", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="runs/NAME, or runs/NAME/checkpoints/step-000100")
    parser.add_argument("out", help="the new folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="",
                        help="precision of the weights; default: as in training")
    flags = parser.parse_args()
    export(flags.run, Path(flags.out).resolve(), flags.dtype)
