"""A LoRA adapter from a folder that may be a stranger's: found, looked through, loaded.

PEFT compiles some strings of an adapter's config to regular expressions, which can run for years,
and some settings change the base model, compute for hours or allocate what they like. Only what a
plain adapter needs is let through.
"""
from pathlib import Path

from parts.checkpoint import complete, misnamed
from parts.files import read_json
from parts.screen import shown

MAX_RANK = 512  # the largest that vLLM serves
MAX_ALPHA = 10**6
PLAIN = {  # what may be set; anything else must have PEFT's default, or be empty
    "task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
    "inference_mode", "r", "target_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias",
    "use_rslora", "init_lora_weights", "layers_to_transform"}


def find_adapter(name: str) -> str:
    """The adapter's folder; of a training run, its last checkpoint. SystemExit if there is none."""
    if not name:
        return ""
    checkpoints = [found for found in complete(Path(name)) if not misnamed(found)]
    folder = checkpoints[-1] if checkpoints else Path(name)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).exists():
            raise SystemExit(
                f"{shown(folder)} has no {file}: --adapter takes a PEFT folder, or a run's folder.")
    return str(folder)


def read_config(adapter: str) -> dict:
    """The adapter's own config. Raises SystemExit if it is not a plain LoRA adapter."""
    from peft import LoraConfig

    made, default = read_json(Path(adapter, "adapter_config.json")), LoraConfig().to_dict()
    strange = [key for key, value in made.items()
               if key not in PLAIN and value and value != default.get(key)]
    if made.get("peft_type") != "LORA":
        strange.append("peft_type")
    if made.get("init_lora_weights", True) not in (True, False, "gaussian"):
        strange.append("init_lora_weights")  # the others start from the base model, and change it
    if strange:
        raise SystemExit(
            f"{shown(adapter)} is not a plain LoRA adapter ({shown(', '.join(strange))}): merge it "
            "into its model and evaluate that.")
    targets, rank, alpha = (made.get(key) for key in ("target_modules", "r", "lora_alpha"))
    names = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if not names and targets != "all-linear":
        raise SystemExit(
            f"target_modules of {shown(adapter)} must be a list of names or all-linear, not "
            f"{shown(repr(targets), 80)}: a pattern can take years.")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise SystemExit(
            f"The rank of {shown(adapter)} must be 1 to {MAX_RANK}, not {shown(repr(rank), 80)}.")
    if type(alpha) not in (int, float) or not 0 < alpha <= MAX_ALPHA:  # NaN is neither
        raise SystemExit(f"lora_alpha of {shown(adapter)} must be a number above 0 and up to "
                         f"{MAX_ALPHA:,}, not {shown(repr(alpha), 80)}.")
    return made


def load_adapter(path: str, adapter: str, dtype: str):
    """(PEFT model, rank) of base and adapter, on the CPU. SystemExit when they do not fit."""
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    made = read_config(adapter)
    try:
        base = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), trust_remote_code=False)
        policy = PeftModel.from_pretrained(base, adapter)
        with safe_open(Path(adapter, "adapter_model.safetensors"), "pt") as file:
            stored = set(file.keys())
        # PEFT skips unknown layers. For embeddings it would look up the model an adapter names.
        loaded = get_peft_model_state_dict(policy, save_embedding_layers=False)
        reason = "" if stored == set(loaded) else "their layers differ"
    except Exception as error:  # torch, PEFT and safetensors have their own kinds
        reason = " ".join(str(error).split())
    if reason:
        base_name = shown(made.get("base_model_name_or_path"))
        raise SystemExit(f"The adapter {shown(adapter)} (rank {made['r']}, for {base_name}) does "
                         f"not fit the model {shown(path)}: {shown(reason)}.")
    broken = [name for name, weight in loaded.items() if not torch.isfinite(weight).all()]
    if broken:
        raise SystemExit(f"The adapter {shown(adapter)} holds weights that are no finite numbers "
                         f"({shown(broken[0])}): take an earlier checkpoint.")
    return policy, made["r"]
