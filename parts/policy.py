"""The policy: a frozen model with a LoRA adapter, which is trained, stored, loaded or merged."""
import functools
from pathlib import Path

import torch
from torch.nn import functional

from parts.files import read_json
from parts.machine import computes_in_bfloat16
from parts.models import load_model
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


def make_optimizer(policy, config):
    """AdamW on the adapter's weights, and the schedule of its learning rate.

    The rate rises linearly over `warmup_steps` optimizer steps, because AdamW's averages are
    unreliable at first. Then it is constant, because `--resume --steps` can change the last step.
    """
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.lr, weight_decay=0.0)
    warmup = max(config.warmup_steps, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup))
    return optimizer, schedule


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

    PEFT 0.21 would copy the input of each layer to float32, so forward and backward would move 1.8
    times as many bytes. With `torch.autocast` it would be 1.4 times, and 1.2 times without these
    copies. Log-probs and gradients would be as close to float32 as here. If PEFT renames what
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
    if device != "cpu" and (dtype == "float32" or not computes_in_bfloat16()):
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
    named = str(made.get("base_model_name_or_path") or path)
    if Path(named).name != Path(path).name:  # layers of the same sizes would fit
        print(f"WARNING: this adapter names {shown(named)} as its model, not {shown(path)}")
    try:
        policy = PeftModel.from_pretrained(load_model(path, dtype), adapter)
        reason = misfit(policy, adapter)
    except Exception as error:  # torch, PEFT and safetensors raise other kinds
        reason = " ".join(str(error).split())
    if reason:
        raise SystemExit(f"The adapter {shown(adapter)} of rank {shown(made.get('r'))} does not "
                         f"fit the model {shown(path)}: {shown(reason)}.")
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
