"""What a run will need on a CPU, in bytes and in seconds, told before its engine starts."""
import math
import time
from typing import NamedTuple

from parts.machine import GB, cpu_cache
from parts.text import duration

# ------------------------------------------------------------------------------ memory
# On a CPU no allocation fails: when memory runs out, the kernel kills the process without a word.
# So what a run will need is compared with what is free before it is allocated.
BYTES = dict(float32=4, bfloat16=2, float16=2, fp8=1)
LIBRARIES = 1.3 * GB  # torch, vLLM and what they set up; the trainer's logits, a chunk of them
KEPT = 3  # numbers per token that a pass keeps of each row of weights
MOST = 896  # tokens per pass: more are hardly faster on a CPU
SPARE = 0.9  # share of the free memory that a run may take; graders and others need the rest


def fit_in_memory(settings, model, free: int) -> int:
    """Tokens per pass: --micro-tokens, or as many as `free` bytes allow, up to MOST.

    `model` may be empty. Raises SystemExit, one sentence, if the run would not fit.
    """
    context = settings.max_prompt_tokens + settings.max_tokens  # one row has to fit in any case
    (fixed, token), free = bytes_needed(settings, model), SPARE * free
    room = max(0, int((free - fixed) / token))
    micro_tokens = settings.micro_tokens or max(context, min(MOST, room))
    tokens = max(context, micro_tokens)
    if tokens > room:
        raise SystemExit(
            f"This run would need about {(fixed + tokens * token) / GB:.1f} GiB with a pass over "
            f"{tokens:,} tokens, and {free / GB:.1f} GiB are free for it, enough for {room:,} "
            "tokens: lower --micro-tokens, --max-prompt-tokens and --max-tokens, or take a "
            "smaller --model.")
    return micro_tokens


def bytes_needed(settings, model) -> tuple[float, float]:
    """(of engine and trainer between two passes, what a pass keeps per token to go back)."""
    config = model.config
    # A and B have 2 * rank / hidden as many; they come with their gradient and AdamW's two.
    adapter = 4 * BYTES["float32"] * 2 * settings.lora_rank / config.hidden_size
    per_weight = BYTES[settings.rollout_dtype] + BYTES[settings.dtype] + adapter
    logits = 4 * BYTES["float32"] * config.vocab_size * settings.engine_sequences
    passed = getattr(config, "num_experts_per_tok", 1)  # of stacked experts [experts, out, in]
    layers = sum(p[0].numel() * passed if p.dim() == 3 else p.numel()
                 for name, p in model.named_parameters() if ".layers." in name)
    fixed = LIBRARIES + cpu_cache() * GB + logits + per_weight * model.num_parameters()
    return fixed, KEPT * layers / config.hidden_size * max(BYTES[settings.dtype], 3)


# ------------------------------------------------------------------------------ time
class Speeds(NamedTuple):
    """What the threads of this process can do in a second."""

    flops: float  # floating-point operations of a matrix product
    bytes: float  # of weights that are read once, as for each token of an answer


def measured_speeds(seconds: float = 1.0) -> Speeds:
    """Measured in half of the time each; other programs slow it down as they will slow the run."""
    import torch

    square, tall = torch.ones(1024, 1024), torch.ones(16384, 4096)
    row = torch.ones(4096)
    products = repeats(lambda: square @ square, seconds / 2)
    readings = repeats(lambda: tall @ row, seconds / 2)
    return Speeds(products * 2 * 1024**3, readings * tall.nbytes)


def repeats(work, seconds: float) -> float:
    """How often `work` can be done in a second."""
    start, count = time.perf_counter(), 0
    while not count or time.perf_counter() < start + seconds:
        work()
        count += 1
    return count / (time.perf_counter() - start)


def seconds_of_step(parameters: int, sampled: int, engine_steps: int, trained: int,
                    speeds: Speeds, bytes_per_weight: int = 4) -> float:
    """Time of a step in which so many tokens are sampled and trained on.

    A token costs 2 operations per parameter in the engine and 6 in the trainer, and each step of
    the engine reads all weights.
    """
    operations = parameters * (2 * sampled + 6 * trained)
    read = engine_steps * parameters * bytes_per_weight
    return operations / speeds.flops + read / speeds.bytes


def worst_case(c) -> tuple[int, int, int]:
    """(tokens sampled, engine steps, tokens trained) of the longest step that settings `c` allow.

    Then every prompt takes all its rounds, and every prompt and answer is as long as it may be.
    """
    rule, tries = c.rule, 1 + c.rule.refills
    answers = c.batch_prompts * rule.round_size * rule.max_rounds * tries
    answers += c.batch_prompts * c.M * (rule.allocates == "by pilots")
    at_once = min(answers, c.engine_sequences)
    prompts = c.batch_prompts * tries * c.max_prompt_tokens  # each is read once
    rows = c.batch_prompts * rule.rows_per_prompt
    return (answers * c.max_tokens + prompts, math.ceil(answers / at_once) * c.max_tokens,
            rows * (c.max_prompt_tokens + c.max_tokens))


def longest_step(c, parameters: int, speeds: Speeds) -> str:
    """The line that says how long a step can take at most, and which flags make it shorter."""
    sampled, engine_steps, trained = worst_case(c)
    seconds = seconds_of_step(parameters, sampled, engine_steps, trained, speeds,
                              BYTES[c.rollout_dtype])
    return (f"on this CPU a step can take up to {duration(seconds)}, if it samples all of "
            f"{sampled:,} tokens and trains on {trained:,}: lower --max-tokens, --batch-prompts, "
            "--M, --N or --n, or take a smaller --model")
