"""The policy: a frozen model with a LoRA adapter, which is trained, stored, loaded or merged."""
import functools
import shutil
import tempfile
from pathlib import Path

import torch
from torch.nn import functional

from parts.folder import digest_of, read_json, rename, step_of
from parts.machine import BFLOAT16_CARD, capability
from parts.models import fetch_model, load_model, load_tokenizer, require_weights
from parts.prompts import stop_ids
from parts.provenance import MERGED, run_named, settings
from parts.routing_replay import ROUTERS, RoutingReplay
from parts.text import listed, shown

START_SCALE = 2.0**20  # about the divisor, answers * max_tokens (docs/settings.md)
PLAIN = {  # settings that an adapter may change; others need PEFT's default or no value
    "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
    "inference_mode", "r", "target_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out",
    "use_rslora", "layers_to_transform"}


# ------------------------------------------------------------------------------ the trainer's model
def load_policy(path: str, *, dtype: str, rank: int, alpha: int, seed: int, device: str,
                checkpointing: bool = False):
    """The trainer's model, W + alpha / rank * B A, with frozen W in `dtype`, A and B in float32.

    `routing` records and replays the choice of experts (routing_replay.py); None: a dense model.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)  # B starts at zero and A at random
    spare_attention(dtype, device)
    model = load_model(path, dtype).to(device)
    model.config.use_cache = False
    lora = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, task_type="CAUSAL_LM",
                      target_modules=adapted_layers(model.config))
    policy = get_peft_model(model, lora)
    if dtype == "bfloat16":
        adapt_in_bfloat16(policy)
    policy.routing = RoutingReplay(model) if model.config.model_type in ROUTERS else None
    policy.loss_scale = loss_scale(dtype, device)
    if checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy.train()


def adapted_layers(config) -> list[str]:
    """The last names of the layers with an adapter, which are all linear layers in a decoder layer.

    With adapters on attention only, LoRA learns less, even with as many parameters (LoRA Without
    Regret, Schulman et al. 2025). In MoE models only attention is adapted, because engines serve
    adapters of stacked experts badly. The head stays frozen, because `token_logprobs` computes no
    gradient for it, and vLLM serves no adapter on a large head.
    """
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if config.model_type in ROUTERS:
        return attention
    if config.model_type == "phi3":  # here several layers are one
        return ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    return [*attention, "gate_proj", "up_proj", "down_proj"]


def adapt_in_bfloat16(policy) -> None:
    """Let every adapted layer compute in bfloat16, as the engine does. A and B stay float32.

    PEFT 0.21 would copy the input of each layer to float32 and multiply there, which moves twice
    as many bytes. Log-probs and gradients are as close to float32 as before. If PEFT renames what
    `adapted` uses, tests/test_policy.py fails.
    """
    for layer in policy.modules():
        if hasattr(layer, "get_delta_weight"):
            layer.forward = functools.partial(adapted, layer)


def adapted(layer, x):
    """W x + alpha / rank * B A x for a PEFT layer. The sum is rounded once."""
    base = layer.base_layer(x)
    if layer.disable_adapters:
        return base
    A, B = (part["default"].weight.to(x.dtype) for part in (layer.lora_A, layer.lora_B))
    low = functional.linear(x, A) * layer.scaling["default"]
    return torch.addmm(base.flatten(0, -2), low.flatten(0, -2), B.T).view_as(base)


def spare_attention(dtype: str, device: str) -> None:
    """Keep a GPU's attention from storing every score, 14 bytes each: 2.5 GiB for a long row.

    transformers lets torch share a key among several queries. On a GPU only flash attention can do
    this, with 16 bits and compute capability 8.0; otherwise torch would use the plain formula. With
    repeated keys it uses its memory-efficient kernel. transformers 5.19 has no setting for this,
    but calls a function. If this function goes, tests/test_policy.py fails.
    """
    if device != "cpu" and (dtype == "float32" or capability() < BFLOAT16_CARD):
        from transformers.integrations import sdpa_attention

        sdpa_attention.use_gqa_in_sdpa = lambda *tensors: False


def loss_scale(dtype: str, device: str) -> torch.amp.GradScaler:
    """The factor on the loss with which float16 can hold its gradients; 1 in other precisions.

    A token's share of the loss is 1 / (answers * max_tokens), and float16 has no numbers below
    6e-8. The factor is halved if a gradient overflows (this step is skipped), and doubled after 200
    steps without overflow.
    """
    return torch.amp.GradScaler(device, init_scale=START_SCALE, growth_interval=200,
                                enabled=dtype == "float16")


def merged_weights(policy):
    """Yields (Hugging Face name, tensor) for every adapted layer, W + scale * B A and its bias, and
    for the linear layers next to it.

    vLLM rebuilds a layer from the tensors that it gets, and one of its layers holds several of
    Hugging Face's (queries, keys, values). So the bias and neighbours without adapter are sent,
    too. Other layers may not be sent, because vLLM 0.32 would overwrite the experts that its CPU
    kernels have repacked.
    """
    for name, layer in sent_layers(policy):
        yield from merged(name, layer)


def sent_layers(policy) -> list[tuple]:
    """[(name, layer)] of the layers that `merged_weights` yields."""
    modules = dict(policy.base_model.model.named_modules())
    adapted = {name for name, module in modules.items() if hasattr(module, "get_delta_weight")}
    blocks = {name.rpartition(".")[0] for name in adapted}
    return [(name, module) for name, module in modules.items()
            if name.rpartition(".")[0] in blocks
            and (name in adapted or isinstance(module, torch.nn.Linear))]


@torch.no_grad()
def merged(name: str, layer):
    """Yields (name, tensor) of weight and bias of one layer.

    The sum is a new tensor. Merging in place and unmerging would leave rounding errors in the base
    weights, and a resumed run would differ.
    """
    base = layer.get_base_layer() if hasattr(layer, "get_delta_weight") else layer
    weight = base.weight
    if base is not layer:
        weight = weight + layer.get_delta_weight("default").to(weight.dtype)
    yield f"{name}.weight", weight
    if base.bias is not None:
        yield f"{name}.bias", base.bias


# ------------------------------------------------------------------------------ a stored adapter
def load_adapter(path: str, adapter: str, dtype: str):
    """(PEFT model, rank) of base and adapter, on the CPU. SystemExit if they do not fit.

    Another program may have made the adapter. It must be plain LoRA, because some settings of PEFT
    change base weights, which the engine would not get.
    """
    from peft import LoraConfig, PeftModel

    made, default = read_json(Path(adapter, "adapter_config.json")), LoraConfig().to_dict()
    odd = {key: value for key, value in made.items()
           if key not in PLAIN and value and value != default.get(key)}
    if odd:
        raise SystemExit(f"{shown(adapter)} is not a plain LoRA adapter ({shown(listed(odd))}): "
                         "merge it into its model and evaluate that.")
    try:
        policy = PeftModel.from_pretrained(load_model(path, dtype), adapter)
        reason = misfit(policy, adapter)
    except Exception as error:  # torch, PEFT and safetensors raise other kinds
        reason = " ".join(str(error).split())
    if reason:
        base = shown(made.get("base_model_name_or_path"))
        raise SystemExit(f"The adapter {shown(adapter)} (rank {shown(made.get('r'))}, for {base}) "
                         f"does not fit the model {shown(path)}: {shown(reason)}.")
    return policy, made["r"]


def misfit(policy, adapter: str) -> str:
    """What is wrong with a stored adapter for this model; "" if nothing."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(Path(adapter, "adapter_model.safetensors"), "pt") as file:
        stored = set(file.keys())
    # PEFT skips unknown layers. For embeddings it would query the hub for the base model.
    loaded = get_peft_model_state_dict(policy, save_embedding_layers=False)
    if stored != set(loaded):
        return "their layers differ"
    outside = [name for name in stored if ".layers." not in name]
    if outside:  # vLLM would ignore it, or change tied embeddings, too
        return f"{min(outside)} is outside of the layers"
    if not all(weight.isfinite().all() for weight in loaded.values()):
        return "it holds numbers that are not finite, so take an earlier checkpoint"
    return ""


# ------------------------------------------------------------------------------ merged
def merged_model(name: str) -> str:
    """`name`. runs/NAME/merged/step-XXXXXX is first made from this checkpoint, once, in float32.

    Raises SystemExit if the run now has another checkpoint of this step, because runs that started
    from the merged one would have another base.
    """
    out = Path(name)
    if out.parent.name != MERGED or not (run := run_named(name)):
        return name
    checkpoint = run / "checkpoints" / out.name
    if not out.exists():
        if not checkpoint.exists():
            raise SystemExit(f"{shown(out)} is gone, and so is the checkpoint that it came "
                             "from: restore one of them.")
        write_merged(str(checkpoint), out, "float32", read_in=settings(run)["dtype"])
    adapter, made = checkpoint / "adapter_model.safetensors", read_json(out / "config.json")
    if adapter.exists() and made["minirl"]["adapter"] != digest_of(adapter):
        raise SystemExit(f"{shown(out)} was made from another adapter of step {step_of(out)}: "
                         "remove it, unless another run has started from it.")
    return name


def write_merged(adapter: str, out: Path, dtype: str, read_in: str = "") -> None:
    """Write the model of a run's checkpoint, W + scale * B A for every adapted W, to a new folder.

    PEFT adds in float32. Then the sum is rounded once, here to `dtype` or later to `read_in`. The
    folder has the tokenizer of the base, all end tokens, and the lengths of the training. Raises
    SystemExit if it cannot be written; then nothing of it is left.
    """
    from transformers import GenerationConfig

    trained_with = settings(run_named(adapter))
    path = fetch_model(merged_model(trained_with["model"]))
    require_weights(path)
    tokenizer = load_tokenizer(path)
    ends = stop_ids(path, tokenizer, trained_with["template"], trained_with.get("stop", ""))
    policy, _ = load_adapter(path, adapter, trained_with["dtype"])
    policy.float()
    say_what_is_left(policy, read_in or dtype)
    model = policy.merge_and_unload().to(getattr(torch, dtype))
    ends = ends if len(ends) > 1 else ends[0]  # some programs read only one
    model.config.eos_token_id = ends
    model.config.minirl = dict(
        max_prompt_tokens=trained_with["max_prompt_tokens"], max_tokens=trained_with["max_tokens"],
        adapter=digest_of(Path(adapter, "adapter_model.safetensors")))
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0,
        temperature=trained_with["temperature"], max_new_tokens=trained_with["max_tokens"])
    save_model(model, tokenizer, out)
    print(f"{shown(out)}: the base model with the adapter of {shown(adapter)}, in {dtype}")


def say_what_is_left(policy, dtype: str) -> None:
    """Print how much of the update is left when W + dW is rounded: <rounded - W, dW> / <dW, dW>."""
    if dtype == "float32":
        return
    left, whole = 0.0, 0.0
    for module in policy.base_model.model.modules():
        if hasattr(module, "get_delta_weight"):
            base, update = module.get_base_layer().weight, module.get_delta_weight("default")
            rounded = (base + update).to(getattr(torch, dtype)).float()
            left += ((rounded - base) * update).sum().item()
            whole += update.square().sum().item()
    share = left / whole if whole else 1.0
    advice = "; --dtype float32, with a new folder or --name, keeps all of it" * (share < 0.95)
    print(f"{share:.1%} of the update is left in {dtype}{advice}")


def save_model(model, tokenizer, out: Path) -> None:
    """Write the folder completely or not at all. Raises SystemExit if it cannot be written."""
    from safetensors import SafetensorError

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".") as place:
            writing = Path(place, out.name)
            model.save_pretrained(writing)
            tokenizer.save_pretrained(writing)
            for weights in writing.glob("*.safetensors"):  # only their owner could read them
                shutil.copymode(writing / "config.json", weights)
            if not (out / "config.json").exists():  # else another program has written it
                rename(writing, out)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, in three libraries
        raise SystemExit(f"Could not write {shown(out)} ({shown(error)}): no incomplete folder is "
                         "left, and the run is unchanged.") from error
