"""Exports a trained model for other programs: base and adapter merged, with a model card.

    python -m parts.export runs/NAME my-model      # a folder
    hf upload org/name my-model --private          # and to a hub

The adapter alone needs no export: every folder in runs/NAME/checkpoints is one. docs/export.md says
how vLLM, PEFT and llama.cpp load either of them.
"""
import argparse
import os
import re
import shutil
from pathlib import Path

from parts.folder import (checkpoints, counted, quiet_end, replacing, require_same, settings,
                          shown, step_of)
from parts.models import fetch_model, load_tokenizer, resolve_model, weights_of
from parts.plot import rows_by_step
from parts.prompts import make_prompts, needs_start, stop_ids

PRECISIONS = ("float32", "bfloat16", "float16")
NEEDED = {"model", "data", "template", "dtype"}
IN_THE_CARD = ("reward", "objective", "sampler", "n", "M", "N", "mini_batches", "lr", "lora_rank",
               "lora_alpha", "batch_prompts", "max_tokens", "temperature", "template", "seed")
CARD = Path(__file__).with_name("card.md")
EXAMPLE = "7+5-4=?"


# ------------------------------------------------------------------------------ what is exported
def find_checkpoint(place: Path) -> Path:
    """`place` is a checkpoint, or a run, whose newest one is meant. SystemExit if there is none."""
    found = [place] if place in checkpoints(place.parent.parent) else checkpoints(place)
    if not found:
        raise SystemExit(f"{shown(place)} has no checkpoint: give the folder of a run that has "
                         "been trained, such as runs/NAME, or one in runs/NAME/checkpoints.")
    return found[-1]


def settings_for_export(run: Path) -> dict:
    """The run's settings. SystemExit if they do not say what base and adapter are."""
    config = settings(run) or {}
    if not NEEDED <= config.keys():
        missing = min(NEEDED - config.keys())
        raise SystemExit(f"{shown(run / 'config.json')} does not say the {missing} of the run: it "
                         "is damaged, and the model cannot be put together.")
    return config


def merge(policy, dtype: str):
    """The Hugging Face model with W + scale * B A for every adapted W, rounded once, to `dtype`.

    Raises SystemExit if a weight is not finite then.
    """
    import torch

    model = policy.float().merge_and_unload().to(getattr(torch, dtype))
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise SystemExit(f"The merged model has weights that are no finite numbers "
                         f"({shown(broken[0])}): the base has them too, or {dtype} cannot hold "
                         "them; try --dtype float32.")
    return model


def share_that_arrives(policy, dtype: str) -> float:
    """How much of the update is left when W + dW is rounded: <rounded - W, dW> / <dW, dW>."""
    import torch

    left, whole = 0.0, 0.0
    for module in policy.base_model.model.modules():
        if hasattr(module, "get_delta_weight"):
            base = module.get_base_layer().weight.detach().float()
            update = module.get_delta_weight("default").detach().float()
            rounded = (base + update).to(getattr(torch, dtype)).float()
            left += ((rounded - base) * update).sum().item()
            whole += update.square().sum().item()
    return left / whole if whole else 1.0


def settle_generation(found, tokenizer) -> None:
    """Responses end where those of the training did. Flags of the base stay, and are made valid."""
    found.eos_token_id = stop_ids(tokenizer)
    try:
        found.validate(strict=True)
    except ValueError:  # a temperature without do_sample, which transformers reads but never writes
        found.do_sample = True


def log_probs(model, ids):
    """log pi [T - 1] of the tokens `ids` [1, T] after the first."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=ids).logits.float()
    return logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]


# ------------------------------------------------------------------------------ the model card
def card(name: str, run: Path, config: dict, step: int, tokenizer) -> str:
    """README.md of the exported model, from config.json and eval.jsonl.

    It names only the last part of paths, so that it can be published.
    """
    from huggingface_hub import ModelCardData

    base, data = resolve_model(config["model"]), config["data"].split(",")
    head = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation",
        tags=["reinforcement-learning", "minirl", "reinforce-ada"],
        base_model=base if on_hub(base) else None,
        datasets=[re.split("[:@]", name)[0] for name in data if on_hub(name)] or None)
    chosen = {key: config[key] for key in IN_THE_CARD if config.get(key) not in (None, "")}
    prompt, start = example(tokenizer, config["template"])
    return CARD.read_text(encoding="utf-8").format(
        head=head.to_yaml(), name=shown(name), steps=counted(step, "step"), prompt=prompt,
        base=shown(public(base)), start=start, temperature=config.get("temperature", 1.0),
        longest=config.get("max_tokens", 1000),
        results=results(run, step, bool(config.get("reward"))),
        template=shown(public(config["template"])), data=shown(public(config["data"])),
        settings="\n".join(f"| {key} | {shown(public(chosen[key]))} |" for key in chosen))


def example(tokenizer, template: str) -> tuple[str, bool]:
    """(Python strings, one per line of a problem's prompt; does the tokenizer add its start token?)
    """
    try:
        prompt = make_prompts(tokenizer, template, [EXAMPLE])[0]
    except SystemExit as why:  # such as: the template's file is gone
        print(f"the card has no prompt of the training: {why}")
        return f"    {EXAMPLE!r}  # not the training's prompt, which could not be made", False
    lines = [f"    {line!r}" for line in prompt.splitlines(keepends=True)]
    return "\n".join(lines), needs_start(tokenizer, template, prompt)


def on_hub(name: str) -> bool:
    """Whether a model or data set is called as those on the hub are: org/name."""
    return name.count("/") == 1 and not os.path.exists(os.path.expanduser(name)) and (
        name[0] not in "./~")


def public(value):
    """The last part of a path; anything else as it is."""
    if isinstance(value, str) and "/" in value and not on_hub(value):
        return ", ".join(Path(part).name for part in value.split(","))
    return value


def results(run: Path, step: int, own_reward: bool) -> str:
    """A table of the evaluations up to a step."""
    told = {"data", "questions", "k", "avg", "ci_low", "ci_high"}
    unit = ".3g" if own_reward else ".1%"
    lines = ["| after step | held-out problems | avg@k: mean reward of k answers | 95 % interval |",
             "|---|---|---|---|"]
    for one in rows_by_step(run / "eval.jsonl", ("data", "step")):
        if one["step"] <= step and told <= one.keys():
            what = f"{one['questions']} of {shown(public(one['data']))}"
            lines.append(f"| {one['step']} | {what} | avg@{one['k']} {one['avg']:{unit}} | "
                         f"{one['ci_low']:{unit}} to {one['ci_high']:{unit}} |")
    return "\n".join(lines) if lines[2:] else "This run was not evaluated."


# ------------------------------------------------------------------------------ the program
def write(out: Path, model, tokenizer, readme: str) -> None:
    """The folder, complete or not there at all. Raises SystemExit if it cannot be written."""
    from safetensors import SafetensorError

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
        raise SystemExit(f"Could not write {shown(out)} ({shown(error)}): the run is untouched, "
                         "and nothing half-written is left; mend that and repeat the command."
                         ) from error


def export(place: Path, out: Path, dtype: str = "") -> None:
    """Write a run's newest checkpoint, or the one given, as a model folder.

    `dtype` is that of the weights; empty: as in training.
    """
    from parts.models import load_model
    from parts.policy import load_adapter

    if out.is_file() or out.exists() and any(out.iterdir()):
        raise SystemExit(f"{shown(out)} exists already, and nothing of it is overwritten: name "
                         "another folder.")
    checkpoint = find_checkpoint(place)
    run, step = checkpoint.parent.parent, step_of(checkpoint)
    config = settings_for_export(run)
    dtype = dtype or config["dtype"]
    path = fetch_model(config["model"], context=0)
    require_same(run, weights_of(path), "put back what the adapter was trained on")
    policy, _ = load_adapter(path, str(checkpoint), config["dtype"])
    tokenizer = load_tokenizer(path)
    asked = tokenizer(EXAMPLE, return_tensors="pt", add_special_tokens=False).input_ids
    ids = policy.generate(input_ids=asked, do_sample=False, max_new_tokens=64, pad_token_id=0)
    trained = log_probs(policy, ids)
    share = share_that_arrives(policy, dtype)
    model = merge(policy, dtype)
    settle_generation(model.generation_config, tokenizer)
    write(out, model, tokenizer, card(out.name, run, config, step, tokenizer))
    del policy, model  # what is read back is the folder, and has the place in memory
    gap = (log_probs(load_model(str(out), dtype), ids) - trained).abs().max()
    print(f"{shown(out)}: {shown(public(path))} with the adapter of {shown(checkpoint)}, in "
          f"{dtype}, and its card README.md\nIts log-probs differ from the trainer's by at most "
          f"{gap:.2g} in an answer that it wrote. {share:.1%} of the update has arrived.")
    if not (gap <= 0.05 and share >= 0.95) and dtype != "float32":
        print("The rest is rounding: --dtype float32 keeps all of the update.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parts.export", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="runs/NAME, or runs/NAME/checkpoints/step-000100")
    parser.add_argument("out", help="the new folder")
    parser.add_argument("--dtype", choices=PRECISIONS, default="",
                        help="of the weights; default: that of the training")
    flags = parser.parse_args()
    try:
        export(Path(flags.run), Path(os.path.abspath(flags.out)), flags.dtype)
    except OSError as error:  # such as a name that is too long
        raise SystemExit(f"{shown(error)}: name another folder.") from None


if __name__ == "__main__":
    with quiet_end():
        main()
