"""Every setting of a training run: its default, its meaning, what contradicts what.

`parse` reads the flags, `resolve` fills in what depends on the model and the machine.
"""
import argparse
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ada_sampler import SamplerConfig, add_flags, from_flags, option
from parts.folder import settings

OBJECTIVES = {  # name -> the advantage and the length normalisation that belong to it (MiniRL section 2.3 and appendix A)
    "minirl": ("pool-mean", "none"), "grpo": ("group-std", "response"), "cispo": ("group-std", "batch")}

# What may be another on --resume: it changes how long, how fast and where a run goes on, and how
# often it is looked at, but not what its logs mean. Everything else would make them two runs.
RESUMABLE = frozenset({
    "name", "resume", "steps", "lr", "eval_every", "checkpoint_every", "keep_checkpoints",
    "sync", "engine_memory", "sleep", "engine_sequences", "micro_tokens",
    "gradient_checkpointing", "graders"})


@dataclass
class Config(SamplerConfig):
    """Every flag of `python minirl.py`; those of the sampler are in ada_sampler.SamplerConfig.

    Zero or "auto" is filled in by `__post_init__` (what belongs to the objective), `resolve` (to the model) or `prepare`
    (replay: only the model's own config says whether it has experts).
    """

    model: str = option("tiny", "tiny, tiny-moe, a name such as Qwen2.5-Math-1.5B, a hub id (org/name) or a folder", "model")
    dtype: str = option("auto", "of the frozen weights: float32 or bfloat16; auto: float32 on a CPU", "model")
    lora_rank: int = option(16, "rank of the adapter on every linear layer (mixture of experts: of the attention)", "model")
    lora_alpha: int = option(32, "the adapter is scaled by alpha / rank", "model")

    data: str = option("auto", "training problems: hub id, .jsonl/.json/.parquet/.csv file, or builtin", "data")
    eval_data: str = option("auto", "held-out problems, likewise; benchmark names as in eval.py", "data")
    problem_key: str = option("", "column with the problem, if it is not found by itself", "data")
    answer_key: str = option("", "column with the gold answer, if it is not found by itself", "data")
    template: str = option("auto", "prompt: reinforce-ada, qwen25-math-cot, qwen-boxed, llama, chat, none", "data")
    keep_odd_golds: bool = option(False, "keep problems whose gold answer math-verify cannot read", "data")
    max_prompt_tokens: int = option(0, "longer prompts are dropped and counted; 0 = auto", "data")

    batch_prompts: int = option(0, "prompts per step; 0 = auto", "sampling")
    max_tokens: int = option(0, "longest response; 0 = auto", "sampling")
    temperature: float = option(1.0, "sampling temperature; trainer and engine both use it", "sampling")
    top_p: float = option(1.0, "must stay 1 in training: anything less makes pi/mu biased", "sampling")

    objective: str = option("minirl", "minirl, or for comparison grpo or cispo as in the paper's appendix", "objective")
    advantage: str = option("auto", "pool-mean (auto for minirl), group-std (auto for grpo, cispo), leave-one-out, positives-only "
                            "(raft)", "objective")
    mini_batches: int = option(1, "optimizer steps per sampled batch (N of MiniRL); 1 = on-policy", "objective")
    importance: str = option("full", "minirl's token weight: full (pi_theta/mu), staleness (pi_theta/pi_old), none", "objective")
    weight_cap: float = option(5.0, "minirl's token weight is cut off here", "objective")
    clip: bool = option(True, "mask tokens whose pi_theta/pi_old has moved too far already", "objective")
    eps_low: float = option(0.2, "clip below 1 - eps_low where the advantage is negative", "objective")
    eps_high: float = option(0.27, "clip above 1 + eps_high where the advantage is positive", "objective")
    length_norm: str = option("auto", "divide token sums by: none (a constant; auto for minirl), response (auto for grpo), batch "
                              "(lengths; auto for cispo)", "objective")
    replay: str = option("auto", "mixture of experts: none, r2 (the trainer's experts), r3 (the engine's); auto: none for 1 "
                         "mini-batch, r2 for 2, r3 for more", "objective")

    lr: float = option(0.0, "learning rate of AdamW on the LoRA weights; 0 = auto", "optimizer")
    warmup_steps: int = option(5, "optimizer steps until the learning rate is reached; constant after", "optimizer")
    weight_decay: float = option(0.0, "of AdamW", "optimizer")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", "optimizer")

    steps: int = option(0, "training steps; 0 = auto", "run")
    seed: int = option(0, "decides data order, adapter and sampling", "run")
    name: str = option("", "the run's folder is runs/NAME; empty = made of model, sampler and seed", "run")
    resume: bool = option(False, "continue the run of this name from its last checkpoint, if there is one", "run")
    eval_every: int = option(20, "steps between evaluations; also before the first and after the last step", "run")
    eval_questions: int = option(0, "held-out problems used; 0 = auto", "run")
    eval_k: int = option(8, "samples per held-out problem", "run")
    checkpoint_every: int = option(20, "steps between checkpoints", "run")
    keep_checkpoints: int = option(2, "older checkpoints are removed", "run")

    sync: str = option("auto", "how the engine gets new weights: adapter (GPU) or merge (CPU)", "hardware")
    rollout_dtype: str = option("auto", "of the engine's weights: float32, bfloat16, fp8; auto: the same as dtype", "hardware")
    kv_cache_dtype: str = option("auto", "of the engine's cache of keys and values: auto or fp8", "hardware")
    engine_memory: float = option(0.45, "share of the GPU's memory for the engine", "hardware")
    sleep: bool = option(False, "the engine gives up its GPU memory during the update", "hardware")
    engine_sequences: int = option(256, "responses that are written at the same time", "hardware")
    micro_tokens: int = option(0, "tokens per forward and backward pass, padding included; 0 = auto", "hardware")
    gradient_checkpointing: str = option("auto", "on or off: less memory for more time", "hardware")
    graders: int = option(2, "worker processes that run math-verify", "hardware")

    def __post_init__(self):
        advantage, length_norm = OBJECTIVES.get(self.objective, ("pool-mean", "none"))
        self.advantage = advantage if self.advantage == "auto" else self.advantage
        self.length_norm = length_norm if self.length_norm == "auto" else self.length_norm

    def validate(self) -> None:
        """Raises ValueError with one sentence for each contradiction; needs no model, no data and no library."""
        choices = dict(
            objective=OBJECTIVES, dtype=("auto", "float32", "bfloat16"), sync=("auto", "adapter", "merge"),
            importance=("full", "staleness", "none"), length_norm=("none", "response", "batch"),
            replay=("auto", "none", "r2", "r3"), rollout_dtype=("auto", "float32", "bfloat16", "fp8"),
            kv_cache_dtype=("auto", "fp8"), gradient_checkpointing=("auto", "on", "off"), gvm_norms=("head", "one"))
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} must be one of {', '.join(allowed)}, not {getattr(self, key)!r}")
        super().validate()
        if self.objective != "minirl" and self.importance != "full":
            raise ValueError(f"importance belongs to the objective minirl: {self.objective} has a weight of its own, "
                             "pi_theta/pi_old")
        if self.replay == "r2" and self.mini_batches == 1:
            raise ValueError("replay r2 repeats the trainer's own routes of the pi_old pass, and with one mini-batch there is none: "
                             "it would be the same as none")
        if self.top_p != 1:
            raise ValueError("top_p must stay 1 in training: the importance weight pi/mu would be biased on every token")
        if self.data == "builtin" and (self.problem_key or self.answer_key):
            raise ValueError("the builtin problems have no columns: leave problem_key and answer_key out, or name a file with data")
        if self.temperature <= 0:
            raise ValueError("temperature must be above 0: greedy decoding gives n equal samples and no signal")
        for key in ("lora_rank", "mini_batches", "eval_every", "checkpoint_every", "keep_checkpoints", "graders"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.batch_prompts and self.mini_batches > self.batch_prompts:
            raise ValueError(f"{self.batch_prompts} prompts cannot be cut into {self.mini_batches} mini-batches of whole groups")
        if not re.fullmatch(r"[\w][\w.+-]*|", self.name):
            raise ValueError(f"name {self.name!r} must be a plain folder name, it becomes runs/NAME")


def resolve(config: Config) -> Config:
    """Fill in the defaults that depend on the model's name and the machine."""
    from parts.data import default_data, default_eval_data, default_template
    from parts.engine import build_for_cpu
    from parts.models import TINY, resolve_model

    tiny = config.model in TINY
    real = dict(max_prompt_tokens=1024, max_tokens=3000, batch_prompts=32, lr=2e-5, steps=200, eval_questions=100,
                micro_tokens=16384)
    small = dict(max_prompt_tokens=256, max_tokens=64, batch_prompts=24, lr=1e-3, steps=100, eval_questions=100,
                 micro_tokens=4096)
    auto = {key: value for key, value in (small if tiny else real).items() if not getattr(config, key)}
    on_cpu = build_for_cpu()
    auto |= {key: value for key, value in dict(
        dtype="float32" if on_cpu else "bfloat16", sync="merge" if on_cpu else "adapter",
        gradient_checkpointing="off" if on_cpu else "on").items() if getattr(config, key) == "auto"}
    if config.data == "auto":
        auto["data"] = default_data(config.model if tiny else resolve_model(config.model))
    if config.eval_data == "auto":
        auto["eval_data"] = default_eval_data(auto.get("data", config.data))
    if config.template == "auto":
        auto["template"] = default_template(config.model)
    if not config.name:
        auto["name"] = f"{Path(config.model).name}-{config.sampler}-seed{config.seed}"
    return replace(config, **auto)


def refuse_changes(config: Config, known: dict) -> None:
    """Raises ValueError if a setting differs from the run's and is not among those that may.

    "auto" is what the run has made of it.
    """
    now = {name: value for name, value in asdict(config).items() if name != "resume"}
    if now.keys() != known.keys():
        odd = min(now.keys() ^ known.keys())
        raise ValueError(f"run {config.name} is of another version of this program, which differs "
                         f"in the setting {odd}: choose another --name")
    for name, value in now.items():
        if value == "auto":
            setattr(config, name, known[name])
        elif name not in RESUMABLE and value != known[name]:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"run {config.name} was started with {flag} {known[name]}, not {value}: "
                             "resume it without this flag, or choose another --name")


def parse(argv: list[str] | None = None) -> Config:
    """Flags to Config. With --resume the run's own config.json gives the defaults."""
    summary = "Reinforcement learning with MiniRL and Reinforce-Ada sampling. Without any flag: the built-in tiny model."
    usage = "python minirl.py [--flag value ...]   (--help explains every flag)"
    parser = argparse.ArgumentParser(prog="minirl.py", usage=usage, description=summary, allow_abbrev=False)
    add_flags(parser, Config)
    config = from_flags(parser.parse_args(argv), Config)
    try:
        config.validate()
        config = resolve(config)
        known = settings(Path("runs", config.name)) if config.resume else None
        if known is not None:
            parser.set_defaults(**known)
            config = resolve(from_flags(parser.parse_args(argv), Config))
            refuse_changes(config, known)
        config.validate()
    except ValueError as problem:
        parser.error(str(problem))
    return config

