"""Will it fit? On a CPU nobody refuses memory: the kernel kills the process, without a word.

So what a run will need is foreseen from the model's config and compared with what is free, before
any of it is allocated. The figures are of LoRA on every linear layer, without checkpointing
(docs/real_model.md has the measurements).
"""
import os
import resource
from pathlib import Path

from parts.logprobs import CHUNK_BYTES
from parts.policy import own_class

GB = 2**30
BYTES = dict(float32=4, bfloat16=2, float16=2, fp8=1)
LIBRARIES = 0.8 * GB  # torch, vLLM and what they set up, whatever the model
SPARE = 0.9  # of what is free; the rest is for graders, caches and whoever else is there
MOST = 1024  # tokens per pass: more are hardly faster on a CPU
GAPS = 1.6  # what the process holds of a pass, by what the pass keeps: C's allocator leaves gaps


def free_memory() -> float:
    """Bytes that this process can still take: of the machine, of its group (a container), and of
    what `ulimit -v` or `ulimit -d` leaves it.
    """
    known = dict(line.split(":") for line in read("/proc/meminfo").splitlines())
    free = [1024 * int(known["MemAvailable"].split()[0]), *group_limits()]
    status = dict(line.split(":", 1) for line in read("/proc/self/status").splitlines())
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            free.append(limit - 1024 * int(status[used].split()[0]))
    return min(free)


def group_limits() -> list[float]:
    """What each control group around this process has left, in bytes; both versions of them."""
    left = []
    for line in read("/proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if kinds else "/sys/fs/cgroup")
        limit, used = (("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds
                       else ("memory.max", "memory.current"))
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            most = read(folder / limit).strip()
            if most.isdigit() and int(most) < 2**60:
                left.append(int(most) - int(read(folder / used)) + reclaimable(folder))
    return left


def reclaimable(folder: Path) -> int:
    """Files that the group has read and the kernel would drop: they count as used."""
    stat = dict(line.split() for line in read(folder / "memory.stat").splitlines())
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def read(file) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""


# ------------------------------------------------------------------------------ what is needed
def per_token(config, rank: int, dtype: str) -> float:
    """Bytes that a forward pass keeps for each token until the backward pass.

    Of a layer: input and normed input of attention and of the feed-forward part (4 hidden),
    queries, keys, values, what attention gives, and that once more in order (5 heads * size), gate,
    its activation, the other half and their product (4 intermediate; of all experts that a token
    passes), and what each A makes (7 rank).
    """
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    wide = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    passed = getattr(config, "num_experts_per_tok", None) or 1
    kept = 4 * config.hidden_size + 5 * heads * head + 4 * wide * passed + 7 * rank
    return GAPS * config.num_hidden_layers * kept * max(BYTES[dtype], 3)


def needs(config, settings, parameters: int) -> tuple[float, float]:
    """Bytes of the engine, with its cache and its logits, and of the trainer between two passes."""
    rollouts = settings.dtype if settings.rollout_dtype == "auto" else settings.rollout_dtype
    cache = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 1)) * GB
    logits = 4 * config.vocab_size * settings.engine_sequences
    engine = LIBRARIES + parameters * BYTES[rollouts] + cache + 4 * logits
    adapter = 16 * adapter_size(config, settings.lora_rank)  # weights, gradient, AdamW's two
    head = 4 * CHUNK_BYTES  # logits, their exponentials, their gradient
    return engine, parameters * BYTES[settings.dtype] + adapter + head


def adapter_size(config, rank: int) -> int:
    """Parameters of a LoRA adapter on every linear layer, about."""
    wide = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return config.num_hidden_layers * rank * (11 * config.hidden_size + 3 * wide)


def parameters_of(config) -> int:
    """How many weights a model has: it is built without them."""
    import torch

    with torch.device("meta"):
        return sum(p.numel() for p in own_class(config)(config).parameters())


def fit(settings, config) -> None:
    """Choose `micro_tokens` where nobody has (0): as many as what is free allows, up to MOST.

    Raises SystemExit, one sentence with the flag to lower, where the run would not fit.
    """
    text, free = config.get_text_config(), SPARE * free_memory()
    fixed = sum(needs(text, settings, parameters_of(config)))
    token = per_token(text, settings.lora_rank, settings.dtype)
    context = settings.max_prompt_tokens + settings.max_tokens  # one row has to fit in any case
    room = max(0, int((free - fixed) / token))
    settings.micro_tokens = settings.micro_tokens or max(context, min(MOST, room))
    tokens = max(context, settings.micro_tokens)
    if tokens <= room:
        return
    if not room:
        advice = "take a smaller --model, or a machine with more memory"
    elif context > room:
        advice = f"lower --max-prompt-tokens and --max-tokens, to {room:,} together"
    else:
        advice = f"lower --micro-tokens, to {room:,}"
    raise SystemExit(
        f"This run would need about {(fixed + tokens * token) / GB:.1f} GiB ({fixed / GB:.1f} for "
        f"engine and trainer, {tokens * token / GB:.1f} for a pass over {tokens:,} tokens), and "
        f"{free / GB:.1f} GiB are free for it: {advice}.")
