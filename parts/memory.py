"""Will it fit? On a CPU nobody refuses memory: the kernel kills the process, without a word.

So what a run will need is foreseen from the model's config and compared with what is free, before
any of it is allocated. The figures are of LoRA on every linear layer, without checkpointing
(docs/real_model.md has the measurements).
"""
import os
import resource
from pathlib import Path

GB = 2**30
BYTES = dict(float32=4, bfloat16=2, float16=2, fp8=1)
LIBRARIES = 0.8 * GB  # torch, vLLM and what they set up, whatever the model
SPARE = 0.9  # of what is free; the rest is for graders, caches and whoever else is there
MOST = 2048  # tokens per pass: more are no faster on a CPU


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
    return config.num_hidden_layers * kept * max(BYTES[dtype], 3)


def needs(config, settings, parameters: int) -> dict[str, float]:
    """Bytes by what they are for: engine, trainer, and a token of a pass (all but the last)."""
    rollouts = settings.dtype if settings.rollout_dtype == "auto" else settings.rollout_dtype
    cache = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 1)) * GB
    logits = 4 * config.vocab_size * min(settings.engine_sequences, 256)
    adapter = 16 * adapter_size(config, settings.lora_rank)  # weights, gradient, AdamW's two
    largest = 4 * config.vocab_size * config.hidden_size
    return dict(
        engine=LIBRARIES + parameters * BYTES[rollouts] + cache + 4 * logits,
        trainer=parameters * BYTES[settings.dtype] + adapter + largest + 4 * 2**25)


def adapter_size(config, rank: int) -> int:
    """Parameters of a LoRA adapter on every linear layer, about."""
    wide = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return config.num_hidden_layers * rank * (11 * config.hidden_size + 3 * wide)


def parameters_of(config) -> int:
    """How many weights a model has: it is built without them."""
    import torch

    from parts.policy import own_class

    with torch.device("meta"):
        return sum(p.numel() for p in own_class(config)(config).parameters())


def fit(settings, config) -> None:
    """Choose `micro_tokens` where nobody has, as what is free allows (a CPU's; 0 stands for auto).

    Raises SystemExit, one sentence with the flag to lower, where the run would not fit.
    """
    text, free = config.get_text_config(), SPARE * free_memory()
    fixed = sum(needs(text, settings, parameters_of(config)).values())
    token = per_token(text, settings.lora_rank, settings.dtype)
    context = settings.max_prompt_tokens + settings.max_tokens
    chosen = settings.micro_tokens
    tokens = chosen or int(max(context, min(MOST, (free - fixed) / token)))
    needed = fixed + max(tokens, context) * token
    if needed > free:
        one_row = fixed + context * token
        if fixed > free:
            advice = ("take a smaller --model, or a machine with more memory" if fixed >
                      1.3 * free else "set VLLM_CPU_KVCACHE_SPACE=0.5, or take a smaller --model")
        elif one_row > free:
            advice = "lower --max-tokens or --max-prompt-tokens"
        else:
            advice = f"lower --micro-tokens to {int((free - fixed) / token)} or less"
        raise SystemExit(
            f"This run would need about {needed / GB:.1f} GiB ({fixed / GB:.1f} for engine and "
            f"trainer, {max(tokens, context):,} tokens per pass of {token / 2**20:.2f} MiB), and "
            f"{free / GB:.1f} GiB are free for it: {advice}.")
    settings.micro_tokens = tokens
