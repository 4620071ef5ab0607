"""A trained model for other programs: base and adapter merged, with a model card, and to a hub.

    python -m parts.export runs/NAME my-model                    # a folder that anything can load
    python -m parts.export runs/NAME my-model --push org/name    # and into a private repository

The adapter alone needs no export: every folder in runs/NAME/checkpoints is one. docs/export.md says
how vLLM, PEFT and llama.cpp load either of them.
"""
import argparse
import os
import re
from collections import deque
from pathlib import Path

from parts.checkpoint import complete, damage, newest_sound, step_of
from parts.files import quiet_end, read_rows as read_log, replacing, shown
from parts.folder import require_same, settings, weights_of
from parts.models import fetch_model, load_tokenizer, resolve_model
from parts.plot import read_rows

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
        if place not in complete(place.parent.parent):
            raise SystemExit(f"{shown(place)} is no finished checkpoint, as step-000100 is: give "
                             "one, or the folder of a run.")
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


def settings_for_export(run: Path) -> dict:
    """The run's settings. SystemExit if they do not say what base and adapter are."""
    config = settings(run)
    if config is None:
        raise SystemExit(f"{shown(run)} has no config.json, which says what the base model is.")
    odd = [key for key in ("model", "data", "template", "dtype")
           if not isinstance(config.get(key), str) or not config[key]]
    odd += ["dtype"] * (config.get("dtype") not in PRECISIONS)
    if odd:
        raise SystemExit(f"{shown(run / 'config.json')} does not say the {odd[0]} of the run: it "
                         "is damaged, and the model cannot be put together.")
    return config


def merge(policy, dtype: str):
    """(The Hugging Face model with W + scale * B A in the place of every adapted W, the share of
    the update that arrives in this precision).

    Added in float64 and rounded once. The share is 1 - |rounding error|^2 / |scale * B A|^2, over
    all weights: of a change that is below half a step of `dtype` nothing arrives.
    """
    import torch

    lost = wanted = 0.0
    for module in policy.modules():
        if hasattr(module, "get_delta_weight"):
            weight = module.get_base_layer().weight.data
            before, update = weight.double(), module.get_delta_weight("default").double()
            weight.copy_(before + update)
            lost += (weight.double() - before - update).square().sum().item()
            wanted += update.square().sum().item()
    model = policy.unload()
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise SystemExit(f"The merged model has weights that are no finite numbers "
                         f"({shown(broken[0])}): the base has them too, or {dtype} cannot hold "
                         "them; try --dtype float32.")
    return model, 1 - lost / wanted if wanted else 1.0


def recorded_texts(run: Path) -> list[str]:
    """Some of what the training has written last; of a run that recorded nothing, a card."""
    groups = deque(read_log(run / "groups.jsonl"), maxlen=4)
    texts = [group["prompt"] + group["pool"][-1]["text"] for group in groups
             if isinstance(group.get("prompt"), str) and is_pool(group.get("pool"))]
    return texts or [CARD]


def is_pool(pool) -> bool:
    return bool(pool) and isinstance(pool, list) and isinstance(pool[-1], dict) and (
        isinstance(pool[-1].get("text"), str))


def logprobs(model, texts: list[str], tokenizer):
    """log p of the tokens of these texts (of each the first 256), one after the other. [T]"""
    import torch

    found = []
    for text in texts:
        ids = torch.tensor([tokenizer(text).input_ids[:256]])
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        found.append(scores.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


def merged(checkpoint: Path, path: str, trained: str, dtype: str, texts: list[str]):
    """(the model of base + adapter in `dtype`, a sentence on what the rounding has cost).

    `trained`: the training's precision. The trainer's policy is base and adapter apart.
    """
    from parts.policy import load_adapter

    tokenizer = load_tokenizer(path)
    policy, _ = load_adapter(path, str(checkpoint), trained)
    trainer = logprobs(policy, texts, tokenizer)
    with policy.disable_adapter():
        learnt = (trainer - logprobs(policy, texts, tokenizer)).abs().mean()
    if dtype != trained:
        policy, _ = load_adapter(path, str(checkpoint), dtype)
    model, share = merge(policy, dtype)
    off = (logprobs(model, texts, tokenizer) - trainer).abs().mean()
    cost = (f"{share:.1%} of the update arrive in {dtype}; log-probs of {len(trainer)} tokens are "
            f"{off:.2g} from the trainer's on average, which are {learnt:.2g} from the base's")
    if share < 0.99 and dtype != "float32":
        cost += "; --dtype float32 keeps all of it"
    return model, tokenizer, cost


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
    """The first and the last evaluation of each set. (avg is a share, or a mean of own rewards.)"""
    if not evaluations:
        return "This run was not evaluated."
    unit, by_set = ".3g" if config.get("reward") else ".1%", {}
    lines = ["| after step | held-out problems | mean reward | 95 % interval |",
             "|---|---|---|---|"]
    for one in evaluations:
        by_set.setdefault(one["data"], []).append(one)
    for one in [row for own in by_set.values() for row in own[:1] + own[1:][-1:]]:
        what = f"{one['questions']} of {shown(public(one['data']))}"
        lines.append(f"| {one['step']} | {what} | avg@{one['k']} {one['avg']:{unit}} | "
                     f"{one['ci_low']:{unit}} to {one['ci_high']:{unit}} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------ written, uploaded
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
    except (OSError, RuntimeError, SafetensorError) as error:  # what three libraries call full
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
    config = settings_for_export(run)
    path = fetch_model(config["model"], context=0)
    require_same(run, weights_of(path))  # on others the adapter means nothing
    dtype = dtype or config["dtype"]
    model, tokenizer, cost = merged(
        checkpoint, path, config["dtype"], dtype, recorded_texts(run))
    step = step_of(checkpoint)
    evaluations = [row for row in read_rows(run / "eval.jsonl", ("data", "step"))
                   if row["step"] <= step and is_result(row)]
    write(out, model, tokenizer, card(name or out.name, config, step, evaluations))
    print(f"{shown(out)}: {shown(public(path))} with the adapter of {shown(checkpoint)}, in "
          f"{dtype}, and its card README.md\n{cost}")


def is_result(row: dict) -> bool:
    """Whether a row of eval.jsonl has what the card tells of it."""
    numbers = [row.get(key) for key in ("questions", "k", "avg", "ci_low", "ci_high")]
    return isinstance(row.get("data"), str) and all(isinstance(x, int | float) for x in numbers)


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
    try:
        export(Path(flags.run), Path(os.path.abspath(flags.out)), flags.dtype, flags.push)
    except OSError as error:  # such as a name that is too long
        raise SystemExit(f"{shown(error)}: name another folder.") from None
    if flags.push:
        print(push(Path(flags.out), flags.push))


if __name__ == "__main__":
    with quiet_end():
        main()
