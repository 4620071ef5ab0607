"""Merges a trained adapter into its base: a model folder for other programs, with a short card.

    python -m recipes.export runs/NAME my-model

The adapter alone needs no export: every folder in runs/NAME/checkpoints is one (docs/export.md).
"""
import argparse
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

from parts.folder import (find_adapter, read_json, read_rows, replacing, require_same, run_of,
                          shown, step_of)
from parts.models import fetch_model, load_model, load_tokenizer, resolve_model, weights_of
from parts.policy import load_adapter
from parts.prompts import is_jinja, make_prompts, stop_ids
from parts.sources import is_file

PROBLEM = "7+5-4=?"
CARD = """---
base_model: {base}
tags: [reinforcement-learning, minirl, reinforce-ada]
---
# {name}

{base} after {step} steps of [MiniRL](https://arxiv.org/abs/2512.01374) on {data}, sampled as by
[Reinforce-Ada](https://arxiv.org/abs/2510.04996). The LoRA adapter is merged into the weights.

{results}
The prompt is part of the task. Of the training, for {problem}:

    {prompt!r}

`eval.py` asks so with `--template {template} --max-prompt-tokens {longest} --max-tokens {tokens}`.

The license of the base model holds for this one too.
"""


def merge(policy, dtype: str):
    """The Hugging Face model with W + scale * B A for every adapted W, rounded once, to `dtype`."""
    model = policy.float().merge_and_unload().to(getattr(torch, dtype))
    if not all(p.isfinite().all() for p in model.parameters()):
        raise SystemExit(f"The merged weights are no finite numbers: the base has such, or {dtype} "
                         "cannot hold them; try --dtype float32.")
    return model


def share_that_arrives(policy, dtype: str) -> float:
    """How much of the update is left when W + dW is rounded: <rounded - W, dW> / <dW, dW>."""
    left, whole = 0.0, 0.0
    for module in policy.base_model.model.modules():
        if hasattr(module, "get_delta_weight"):
            base = module.get_base_layer().weight.detach().float()
            update = module.get_delta_weight("default").detach().float()
            rounded = (base + update).to(getattr(torch, dtype)).float()
            left += ((rounded - base) * update).sum().item()
            whole += update.square().sum().item()
    return left / whole if whole else 1.0


@torch.no_grad()
def log_probs(model, ids):
    """log pi [T - 1] of the tokens `ids` [1, T] after the first."""
    logits = model(input_ids=ids).logits.float()
    return logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]


def card(name: str, run: Path, config: dict, step: int, tokenizer) -> str:
    """README.md: what the model is, how it did in evaluations up to `step`, and its prompt."""
    try:
        prompt = make_prompts(tokenizer, config["template"], [PROBLEM])[0]
    except SystemExit as why:  # such as: the template's file is gone
        print(f"the card lacks the training's prompt: {why}")
        prompt = ""
    evals = [f"* avg@{row['k']} {row['avg']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}] after "
             f"step {row['step']}, on {row['questions']} problems of {public(row['data'])}\n"
             for row in read_rows(run / "eval.jsonl") if row["step"] <= step]
    return CARD.format(
        name=shown(name), base=public(resolve_model(config["model"])), step=step, problem=PROBLEM,
        data=", ".join(map(public, config["data"].split(","))), results="".join(evals),
        template=public(config["template"]), longest=config["max_prompt_tokens"],
        tokens=config["max_tokens"], prompt=prompt)


def public(name: str) -> str:
    """A name as it may be published: of a path only the last part."""
    is_path = (name.startswith(("/", "~", ".")) or is_file(name) or is_jinja(name)
               or Path(name).exists())  # of files also those that have moved
    return shown(Path(name).name if is_path else name)


def write(out: Path, model, tokenizer, readme: str) -> None:
    """The folder, complete or not at all. Raises SystemExit if it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as writing:
            writing.mkdir()
            model.save_pretrained(writing)
            tokenizer.save_pretrained(writing)
            (writing / "README.md").write_text(readme, encoding="utf-8")
            for weights in writing.glob("*.safetensors"):  # written for their owner's eyes only
                shutil.copymode(writing / "README.md", weights)
    except (OSError, RuntimeError, SafetensorError) as error:  # three libraries' words for full
        raise SystemExit(f"Could not write {shown(out)} ({shown(error)}): nothing half-written is "
                         "left, and the run is untouched.") from error


def export(place: str, out: Path, dtype: str = "") -> None:
    """Write a run's newest checkpoint, or the one given. `dtype` empty: as in training."""
    if out.is_file() or out.exists() and any(out.iterdir()):
        raise SystemExit(f"{shown(out)} exists already: name another folder.")
    adapter = find_adapter(place)
    run, config = run_of(adapter)
    if not config:
        raise SystemExit(f"{shown(adapter)} is no checkpoint of a run: its base is not known.")
    dtype, path = dtype or config["dtype"], fetch_model(config["model"], context=0)
    require_same(run, weights_of(path), "put back what the adapter was trained on")
    state = Path(adapter, "state.json")  # which TRL's checkpoints have not
    step = read_json(state)["step"] if state.exists() else step_of(state.parent)
    policy, _ = load_adapter(path, adapter, config["dtype"])
    tokenizer = load_tokenizer(path)
    asked = tokenizer(PROBLEM, return_tensors="pt", add_special_tokens=False).input_ids
    ids = policy.generate(input_ids=asked, do_sample=False, max_new_tokens=64, pad_token_id=0)
    trained, share = log_probs(policy, ids), share_that_arrives(policy, dtype)
    model = merge(policy, dtype)
    model.generation_config = GenerationConfig(  # as in training, not as the base suggests
        eos_token_id=stop_ids(tokenizer), pad_token_id=tokenizer.pad_token_id, do_sample=True,
        temperature=config["temperature"], top_k=0)
    write(out, model, tokenizer, card(out.name, run, config, step, tokenizer))
    del policy, model  # what is read back is the folder, and has the place in memory
    gap = (log_probs(load_model(str(out), dtype), ids) - trained).abs().max()
    print(f"{shown(out)}: {public(path)} with the adapter of {shown(adapter)}, in {dtype}, and its "
          f"card README.md\nIts log-probs differ from the trainer's by at most {gap:.2g} in an "
          f"answer that it wrote. {share:.1%} of the update has arrived.")
    if not (gap <= 0.05 and share >= 0.95) and dtype != "float32":
        print("The rest is rounding: --dtype float32 keeps all of the update.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m recipes.export", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="runs/NAME, or runs/NAME/checkpoints/step-000100")
    parser.add_argument("out", help="the new folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="",
                        help="of the weights; default: that of the training")
    flags = parser.parse_args()
    export(flags.run, Path(flags.out).resolve(), flags.dtype)
