"""A trained model for other programs: base and adapter merged, with a model card, and to a hub.

    python -m parts.export runs/NAME my-model                    # a folder that anything can load
    python -m parts.export runs/NAME my-model --push org/name    # and into a private repository

The adapter alone needs no export: every folder in runs/NAME/checkpoints is one. docs/export.md says
how vLLM, PEFT and llama.cpp load either of them.
"""
import argparse
import os
import re
import shutil
from pathlib import Path

from parts.adapter import load_adapter
from parts.checkpoint import damage, newest_sound, step_of
from parts.files import flush
from parts.folder import settings
from parts.models import fetch_model, load_tokenizer, resolve_model
from parts.plot import read_rows
from parts.screen import quiet_end, shown

PRECISIONS = ("float32", "bfloat16", "float16")
IN_THE_CARD = ("reward", "objective", "sampler", "n", "M", "N", "mini_batches", "lr", "lora_rank",
               "lora_alpha", "batch_prompts", "max_tokens", "temperature", "template", "seed")
CARD = """\
{head}

# {name}

{base}, trained with reinforcement learning for {step} steps: the objective of
[MiniRL](https://arxiv.org/abs/2512.01374) with the sampling of
[Reinforce-Ada](https://arxiv.org/abs/2510.04996). The LoRA adapter is merged into the weights.

## Results

{results}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

The prompts of the training were made with the template `{template}`: another prompt is another
task.

## Settings

Trained on {data}.

{settings}

The license of the base model holds for this one too.
"""


# ------------------------------------------------------------------------------ what is exported
def find_checkpoint(place: Path) -> tuple[Path, Path]:
    """(run, checkpoint) of a run's folder, by its newest sound checkpoint, or of a checkpoint's.

    Raises SystemExit if there is none, or if it is damaged.
    """
    if place.parent.name == "checkpoints":
        problem = damage(place)
        if problem:
            raise SystemExit(f"{shown(place)} is damaged ({shown(problem)}): export another "
                             "checkpoint of this run.")
        return place.parent.parent, place
    checkpoint = newest_sound(place)
    if checkpoint is None:
        raise SystemExit(f"{shown(place)} has no checkpoint: give the folder of a run that has "
                         "been trained, such as runs/NAME.")
    return place, checkpoint


def merged(checkpoint: Path, path: str, dtype: str):
    """The Hugging Face model of base + adapter: W + scale * B A in the place of every adapted W."""
    policy, _ = load_adapter(path, str(checkpoint), dtype)
    return policy.merge_and_unload()


# ------------------------------------------------------------------------------ the model card
def card(name: str, config: dict, step: int, evaluations: list[dict]) -> str:
    """README.md of the exported model, from config.json and eval.jsonl.

    Of files and folders it names the last part only: where they lie is nobody's business.
    """
    chosen = {key: config[key] for key in IN_THE_CARD if config.get(key) not in (None, "")}
    rows = [f"| {key} | {shown(public(value))} |" for key, value in chosen.items()]
    return CARD.format(
        head=front_matter(config, evaluations), name=shown(name), step=step,
        base=shown(public(resolve_model(config["model"]))), results=results(config, evaluations),
        template=shown(public(config["template"])), data=shown(public(config["data"])),
        settings="\n".join(["| setting | |", "|---|---|", *rows]))


def front_matter(config: dict, evaluations: list[dict]) -> str:
    """What a hub reads of a card. Base and data are named if they are on the hub themselves."""
    from huggingface_hub import ModelCardData

    base, data = resolve_model(config["model"]), config["data"].split(",")
    known = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation",
        tags=["reinforcement-learning", "minirl", "reinforce-ada"],
        base_model=base if on_hub(base) else None,
        datasets=[re.split("[:@]", name)[0] for name in data if on_hub(name)] or None)
    return f"---\n{known.to_yaml()}\n---"


def on_hub(name: str) -> bool:
    """Whether a model or data set is called as those on the hub are: org/name."""
    return name.count("/") == 1 and not os.path.exists(os.path.expanduser(name)) and (
        name[0] not in "./~")


def public(value):
    """Of a path its last part; anything else as it is."""
    if isinstance(value, str) and "/" in value and not on_hub(value):
        return ", ".join(Path(part).name for part in value.split(","))
    return value


def results(config: dict, evaluations: list[dict]) -> str:
    """The first and the last evaluation as a table. (avg is a share, or a mean of own rewards.)"""
    if not evaluations:
        return "This run was not evaluated."
    unit = ".3g" if config.get("reward") else ".1%"
    lines = ["| after step | held-out problems | mean reward | 95 % interval |",
             "|---|---|---|---|"]
    for one in evaluations[:1] + evaluations[1:][-1:]:
        what = f"{one['questions']} of {shown(public(one['data']))}"
        lines.append(f"| {one['step']} | {what} | avg@{one['k']} {one['avg']:{unit}} | "
                     f"{one['ci_low']:{unit}} to {one['ci_high']:{unit}} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------ written, uploaded
def write(out: Path, model, tokenizer, readme: str) -> None:
    """The folder, complete or not there at all. Raises SystemExit if it cannot be written."""
    from safetensors import SafetensorError

    writing = out.with_name(f".{out.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir(parents=True)
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
        (writing / "README.md").write_text(readme, encoding="utf-8")
        for file in writing.iterdir():
            flush(file)
        os.rename(writing, out)
    except (OSError, RuntimeError, SafetensorError) as error:  # what three libraries call full
        shutil.rmtree(writing, ignore_errors=True)
        raise SystemExit(f"Could not write {shown(out)} ({shown(error)}): the run is untouched, "
                         "and nothing half-written is left; mend that and repeat the command."
                         ) from error


def refuse_existing(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise SystemExit(f"{shown(out)} exists already, and nothing of it is overwritten: name "
                         "another folder.")


def check_push(name: str) -> None:
    """Raises SystemExit if nothing could be uploaded under this name. Needs no network."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise SystemExit(f"--push {shown(name)}: {shown(error)}") from None
    if not get_token():
        raise SystemExit("--push needs a login at the hub: run `hf auth login`, or set HF_TOKEN.")


def push(folder: Path, name: str) -> str:
    """Upload the folder into a private repository, made if there is none. Returns its address."""
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        address = hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Merged model")
    except Exception as error:  # the hub's client, and the network below it, have their own kinds
        raise SystemExit(f"{shown(folder)} is complete, but was not uploaded ({shown(error)}): try "
                         f"again with `hf upload {name} {shown(folder)}`.") from error
    return str(address)


# ------------------------------------------------------------------------------ the program
def export(place: Path, out: Path, dtype: str = "", name: str = "") -> None:
    """A run's newest checkpoint, or the one given, as a model folder of its own.

    `dtype` of the weights: the training's if empty. `name` in the card: the folder's if empty.
    """
    refuse_existing(out)
    run, checkpoint = find_checkpoint(place)
    config = settings(run)
    if config is None:
        raise SystemExit(f"{shown(run)} has no config.json, which says what the base model is.")
    path = fetch_model(config["model"], context=0)
    model = merged(checkpoint, path, dtype or config["dtype"])
    step = step_of(checkpoint)
    evaluations = [row for row in read_rows(run / "eval.jsonl") if row["step"] <= step]
    readme = card(name or out.name, config, step, evaluations)
    write(out, model, load_tokenizer(path), readme)
    print(f"{out}: {shown(public(path))} with the adapter of {checkpoint}, in "
          f"{str(model.dtype).removeprefix('torch.')}, and its card README.md")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parts.export", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="runs/NAME, or runs/NAME/checkpoints/step-000100")
    parser.add_argument("out", help="the new folder")
    parser.add_argument("--dtype", choices=PRECISIONS, default="",
                        help="of the weights; default: that of the training")
    parser.add_argument("--push", metavar="ORG/NAME", default="",
                        help="upload it to the hub, as a private repository")
    flags = parser.parse_args()
    if flags.push:
        check_push(flags.push)
    export(Path(flags.run), Path(flags.out), flags.dtype, flags.push)
    if flags.push:
        print(push(Path(flags.out), flags.push))


if __name__ == "__main__":
    with quiet_end():
        main()
