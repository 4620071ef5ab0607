"""Turns the command line into the settings of a training run.

`parse` turns the command line into a Config before torch is imported. `settle` then fills in the
defaults that depend on the model (PRESETS) and on the machine. Nothing changes a Config afterwards.
"""
import contextlib
import importlib.util
import os
import re
import sys
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_type_hints

import tyro

from ada_sampler import ADVANTAGES, SamplerConfig
from parts.run_folder import settings
from parts.data import BUILTIN, HELD_OUT, is_own
from parts.grader import require_function
from parts.machine import Machine, build_for_cpu, fit_in_memory, in_one_line, this_machine
from parts.models import TINY, Model, check_family, find_model
from parts.prompts import TEMPLATES, read_template
from parts.text import listed, prepare_streams, shown

OBJECTIVES = {  # name -> advantage, length normalisation (MiniRL section 2.3, appendix A)
    "minirl": ("pool-mean", "constant"),
    "grpo": ("group-std", "response"),
    "cispo": ("group-std", "batch"),
}

PRESETS = {  # defaults by the size of the model (`size_of`)
    "tiny": dict(
        data="builtin", eval_data="builtin", template="chat", max_prompt_tokens=256,
        max_tokens=64, batch_prompts=24, M=8, lr=1e-3, warmup_steps=5, steps=100,
        eval_every=20, eval_questions=100, eval_k=8),
    "small": dict(
        data="builtin-words", eval_data="builtin-words", template="three-examples",
        max_prompt_tokens=256, max_tokens=40, batch_prompts=16, M=4, lr=3e-4, warmup_steps=2,
        steps=20, eval_every=10, eval_questions=72, eval_k=4),
    "large": dict(
        data="agentica-org/DeepScaleR-Preview-Dataset", eval_data="math500",
        # 64 prompts: in most engine steps few answers are left, and twice as many prompts give
        # about 1.5 times the tokens per second (an estimate for a 24 GB card, docs/gpu.md).
        template="reinforce-ada", max_prompt_tokens=1024, max_tokens=3000, batch_prompts=64, M=8,
        lr=2e-5, warmup_steps=5, steps=100, eval_every=20, eval_questions=100, eval_k=8),
}
OF_MODELS = {  # for single models, instead of those
    "tiny-skills": dict(data="builtin-skills", eval_data="builtin-skills"),
    # it solves each of these in 1 to 5 of 16 attempts
    "Qwen2.5-Math-1.5B": dict(data="RLHFlow/reinforce_ada_simple_prompt_1-5b"),
}
ROOM = dict(max_tokens=160, max_prompt_tokens=640)  # a small model on other data

# Flags that may change with --resume. They decide how long, how fast and where a run continues and
# how often it is evaluated, but not what its logs mean. Any other would mix two runs in one log.
RESUMABLE = frozenset({
    "name", "resume", "steps", "lr", "eval_every", "keep_every", "sync", "engine_memory", "sleep",
    "engine_sequences", "micro_tokens", "log_groups", "report_to"})


# ------------------------------------------------------------------------------ the flags
Bounds = namedtuple("Bounds", "least most")  # the smallest and largest value of a setting
T = TypeVar("T")
NO_NONE = (tyro.conf.DisallowNone,)  # no flag takes the word None
# A flag whose default depends on the model or the machine; its help text states the default
Auto = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]
Count = Annotated[T, Bounds(1, 10**6)]
CountOrOff = Annotated[T, Bounds(0, 10**6)]
Positive = Annotated[T, Bounds(1e-9, 1e9)]


@dataclass(frozen=True)
class CommonFlags:
    """Flags of both minirl.py and eval.py: the model, its problems and prompts, and the engine."""

    model: str = "tiny"
    """tiny, tiny-moe or tiny-skills; or Qwen2.5-Math-1.5B, a hub id (org/name) or a folder"""
    data: Auto[str] = None
    """comma-separated benchmarks, hub ids, files (.jsonl .json .parquet .csv), builtin problems"""
    columns: str = ""
    """QUESTION,ANSWER: the columns with problem and right answer, if not found by themselves"""
    reward: str = ""
    """FILE.py:FUNCTION replaces math-verify as reward; the data then needs no answers"""
    template: Auto[str] = None
    """a .jinja or .json file, or reinforce-ada, qwen25-math-cot, qwen-boxed, llama, three-examples,
    chat, none"""
    max_prompt_tokens: Count[Auto[int]] = None
    """longer prompts are dropped and counted; default: 256 to 1024, by model and --data"""
    max_tokens: Count[Auto[int]] = None
    """longest answer, in tokens; default: 40 to 3000, by model and --data"""
    stop: str = ""
    """TOKEN,...: further tokens that end an answer, besides those that the model itself names"""
    seed: Annotated[int, Bounds(0, 2**32 - 1)] = 0
    """decides the order of the data, the adapter's initial weights and the sampled answers"""
    sync: Auto[Literal["adapter", "merge"]] = None
    """how the engine gets weights: adapter (default), or merge (default on a CPU and in float32)"""
    engine_sequences: Count[int] = 256
    """most answers that are written at the same time"""


@dataclass(frozen=True)
class Config(SamplerConfig, CommonFlags):
    """The settings of a run: CommonFlags, those of the sampler, and these.

    `parse` leaves None where the default depends on the model or the machine, `settle` does not.
    """

    # ---- what is trained
    dtype: Auto[Literal["float32", "bfloat16", "float16"]] = None
    """precision of the frozen weights; default: float32 on a CPU, bfloat16 or float16 on a GPU"""
    lora_rank: Annotated[int, Bounds(1, 512)] = 16
    """rank of the adapter, on all linear layers but the head (MoE models: attention only)"""
    lora_alpha: Count[int] = 32
    """the adapter is scaled by lora_alpha / lora_rank"""

    # ---- which problems are held out
    eval_data: Auto[str] = None
    """held-out problems, named like --data; or held-out: a share of --data (default for most)"""
    eval_questions: Count[Auto[int]] = None
    """held-out problems used, of each set of --eval-data; default: 100, with small models 72"""
    eval_k: Count[Auto[int]] = None
    """answers per held-out problem; default: 8, with small models 4"""

    # ---- which prompts get how many answers, and what an answer is compared with
    batch_prompts: Count[Auto[int]] = None
    """prompts per step; default: 24, with small models 16, with larger ones 64"""
    M: Count[Auto[int]] = None
    """answers per round (ada-est, gvm: mean per prompt); default: 8, small with ada-balance: 4"""
    temperature: Annotated[float, Bounds(0.01, 100)] = 1.0
    """sampling temperature, used by both engine and trainer"""
    advantage: Auto[Literal[ADVANTAGES]] = None
    """what a reward is compared with; default: pool-mean, or group-std for grpo and cispo"""

    # ---- what the update maximises; mu: engine, pi_old: trainer with its weights, pi_theta: now
    objective: Literal[tuple(OBJECTIVES)] = "minirl"
    """minirl; or, for comparison, grpo or cispo as in the appendix of MiniRL's paper"""
    importance: Literal["full", "staleness", "none"] = "full"
    """minirl's weight of a token: full (pi_theta/mu), staleness (pi_theta/pi_old), none"""
    weight_cap: Annotated[float, Bounds(0, 1e9)] = 5.0
    """largest weight of a token (minirl); 0 = no cap"""
    clip: bool = True
    """mask tokens whose pi_theta/pi_old has moved too far (cispo: bound this ratio instead)"""
    eps_low: Positive[float] = 0.2
    """with a negative advantage, too far means a ratio below 1 - eps_low"""
    eps_high: Positive[float] = 0.27
    """with a positive advantage, too far means a ratio above 1 + eps_high"""
    length_norm: Auto[Literal["constant", "response", "batch"]] = None
    """divisor of token sums: constant (max_tokens), response (own length), batch (mean length)"""
    replay: Auto[Literal["none", "r2", "r3"]] = None
    """MoE: repeat the trainer's experts (r2) or the engine's (r3); default: by --mini-batches"""

    # ---- how far the update goes
    mini_batches: Count[int] = 1
    """optimizer steps per sampled batch (N in MiniRL's paper); 1 = on-policy"""
    lr: Positive[Auto[float]] = None
    """learning rate of AdamW on the LoRA weights; default: 1e-3, small models 3e-4, larger 2e-5"""
    warmup_steps: CountOrOff[Auto[int]] = None
    """optimizer steps over which the rate rises; 0 = off; default: 5, with small models 2"""
    max_grad_norm: Annotated[float, Bounds(0, 1e9)] = 1.0
    """larger gradients are scaled to this norm (rare: max_tokens divides the loss); 0 = off"""

    # ---- how long the run lasts, and what it saves
    steps: Count[Auto[int]] = None
    """training steps; default: 100, of small models 20"""
    name: Auto[str] = None
    """the run's folder is runs/NAME; default: composed of model, sampler and seed"""
    resume: bool = False
    """continue the run of this name from its last checkpoint, if there is one"""
    keep_every: CountOrOff[int] = 0
    """keep every K-th checkpoint permanently; the newest two are always kept; 0 = no others"""
    report_to: Literal["none", "trackio", "wandb"] = "none"
    """also send the logs to this tracker"""

    # ---- what is evaluated and recorded during the run
    eval_every: CountOrOff[Auto[int]] = None
    """steps between evaluations; 0 = only the first and the last; default: 20, small models 10"""
    eval_first: bool = True
    """evaluate before step 1; without it the run cannot report at its end what has changed"""
    log_groups: CountOrOff[int | Literal["all"]] = 2
    """prompts of each step whose answers are logged for explore.py: a number, or all"""

    # ---- hardware: of these flags only the lower precisions change what is optimised
    engine_memory: Annotated[float, Bounds(0.01, 0.99)] = 0.45
    """share of the GPU's memory for the engine"""
    rollout_dtype: Auto[Literal["float32", "bfloat16", "float16", "fp8"]] = None
    """precision of the engine's weights; default: the same as --dtype"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """precision of the engine's cache of keys and values; auto: the same as its weights"""
    sleep: bool = False
    """the engine gives up its GPU memory during the update"""
    micro_tokens: Count[Auto[int]] = None
    """tokens per forward and backward pass, with padding; default: 4096 to 16384, by machine"""


# ------------------------------------------------------------------------------ the command line
def parse(argv: list[str] | None = None) -> Config:
    """The settings of a run, from the command line. A resumed run has those of its config.json.

    Ends the program with code 2 and one sentence if they cannot work.
    """
    with in_one_sentence("minirl.py"):
        given = tyro.cli(
            Config, args=argv, prog="minirl.py", config=NO_NONE,
            description="MiniRL with Reinforce-Ada sampling. Without flags: the tiny model")
        if given.resume and not given.name:
            raise ValueError("--resume needs the --name of the run")
        stored = settings(Path("runs", given.name)) if given.resume else {}
        if stored and stored.keys() != vars(given).keys():
            raise ValueError(f"another version has started run {given.name}: resume it with that "
                             "version, or choose another --name")
        require_named(stored, given)
        config = tyro.cli(Config, args=argv, default=Config(**stored), config=NO_NONE)
        require_unchanged(config, stored)
        config = replace(config, name=name_of(config))
        check(config, vars(Config()) | stored)
        if config.report_to != "none" and not importlib.util.find_spec(config.report_to):
            raise ValueError(f"--report-to needs a package: pip install {config.report_to}")
    require_function(config.reward)
    read_template(config.template or "none")
    return config


def parse_before_torch() -> Config:
    """`parse` before the slow imports, so --help and wrong flags end at once.

    The built-in models are small and get one thread.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    prepare_streams()
    config = parse()
    if config.model in TINY:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return config


@contextlib.contextmanager
def in_one_sentence(prog: str):
    """An error inside ends the program like a wrong flag: with its sentence and code 2."""
    try:
        yield
    except (ValueError, OSError) as problem:
        print(f"{prog}: {problem}", file=sys.stderr)
        raise SystemExit(2) from None


def require_named(stored: dict, given: CommonFlags) -> None:
    """Raises ValueError if only the folder of a run, which may be shared, names a file to open."""
    for flag, built_in in dict(reward=[""], template=TEMPLATES).items():
        if stored and stored[flag] not in built_in and not getattr(given, flag):
            raise ValueError(f"no file that a run names is opened, and this one names --{flag} "
                             f"{shown(stored[flag])}: give this flag again")


def require_unchanged(config: Config, stored: dict) -> None:
    """Raises ValueError if a setting that decides what the logs mean has another value."""
    for name, value in stored.items():
        if name not in RESUMABLE and getattr(config, name) != value:
            raise ValueError(f"run {config.name} was started with --{name.replace('_', '-')} "
                             f"{shown(value)}: resume it with the same, or choose another --name")


def name_of(config: Config) -> str:
    """The run's name, which is --name or is composed of model, sampler and seed."""
    name = config.name or f"{Path(config.model).name}-{config.sampler}-seed{config.seed}"
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError(f"name {name[:80]!r} must be a plain folder name: it becomes runs/NAME")
    return name


# ------------------------------------------------------------------------------ the defaults
def settle(config: Config) -> tuple[Config, Model]:
    """The settings with all defaults, and what is known of the model. Prints what follows from it.

    Raises SystemExit for settings that contradict each other or do not fit into the memory.
    """
    model = find_model(config.model)
    check_family(model.config)
    with in_one_sentence("minirl.py"):
        machine = this_machine()
        settled = with_defaults(config, model, machine)
    chosen = {name: value for name, value in vars(settled).items()
              if name in PRESETS["small"] and getattr(config, name) is None}
    if chosen:
        print(f"defaults for a {size_of(model, machine)} model: {listed(chosen)}")
    print(in_one_line(settled, machine))
    return settled, model


def with_defaults(config: Config, model: Model, machine: Machine) -> Config:
    """The settings that were given, else the PRESETS of the model's size, else the machine's."""
    from parts.routing_replay import ROUTERS  # which imports torch

    mixture, dtype = model.config.model_type in ROUTERS, config.dtype or machine.dtype
    values = preset(model, machine, config)
    if config.sampler != SamplerConfig.sampler:
        values["M"] = SamplerConfig.M
    if config.data:
        values["eval_data"] = config.data if config.data in BUILTIN else HELD_OUT
    advantage, length_norm = OBJECTIVES[config.objective]
    replay = {1: "none", 2: "r2"}.get(config.mini_batches, "r3")  # MiniRL section 4
    values |= dict(
        advantage=advantage, length_norm=length_norm, replay=replay if mixture else "none",
        dtype=dtype, rollout_dtype=dtype,
        micro_tokens=4096 if model.base in TINY else machine.micro_tokens,
        sync="merge" if machine.on_cpu or dtype == "float32" else "adapter")
    config = replace(config, **{
        name: value for name, value in values.items() if getattr(config, name) is None})
    if machine.on_cpu:
        config = replace(
            config, micro_tokens=fit_in_memory(config, model.empty, machine.memory))
    config.validate()
    if config.batch_prompts < config.mini_batches:
        raise ValueError(f"mini_batches = {config.mini_batches} is more than the "
                         f"{config.batch_prompts} prompts of a step, and each needs at least one")
    if config.replay != "none" and not mixture:
        raise ValueError(f"replay has no effect with {shown(model.path)}, which is no MoE model")
    return config


def preset(model: Model, machine: Machine, flags: CommonFlags) -> dict:
    """The defaults that depend on the model, with this --data and --reward."""
    size = size_of(model, machine)
    values = PRESETS[size] | OF_MODELS.get(Path(model.base).name, {})
    if size == "small" and flags.data not in (None, "builtin-words"):
        values |= ROOM
    if flags.reward:
        values["template"] = "chat"  # then the prompt is only the problem
    return values


def size_of(model: Model, machine: Machine) -> str:
    """A key of PRESETS, by the number of parameters.

    Billions are rounded as in models' names, because Qwen2.5-0.5B has 0.494. On a CPU, small
    includes Qwen3-0.6B, because 3,000 tokens per answer would take weeks there.
    """
    if model.base in TINY:
        return "tiny"
    billions = round(model.empty.num_parameters() / 1e9, 1)
    return "small" if billions < 0.5 or machine.on_cpu and billions <= 0.7 else "large"


# ------------------------------------------------------------------------------ what cannot work
def check(config: Config, usual: dict) -> None:
    """Raises ValueError, one sentence, for flags that cannot work, whatever the model is."""
    check_numbers(config)
    advantage = config.advantage or OBJECTIVES[config.objective][0]
    filled = replace(config, M=config.M or SamplerConfig.M, advantage=advantage)
    filled.validate()
    require_effect(config, usual, effects(filled))


def check_numbers(config) -> None:
    """Raises ValueError, one sentence, for a number that is too small, too large or not finite."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        for bounds in bounds_of(hint):
            if isinstance(value, int | float) and not bounds.least <= value <= bounds.most:
                raise ValueError(f"{name} must be from {bounds.least:g} to {bounds.most:g}, "
                                 f"not {value}")


def bounds_of(hint) -> list[Bounds]:
    return [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Bounds)]


def require_effect(config, usual: dict, effects: list[tuple[str, bool, str]]) -> None:
    """Raises ValueError for a setting that is not as usual and has no effect.

    effects: [(names of settings, whether they have an effect, why they have none)].
    """
    given = {name for name, value in vars(config).items() if value != usual[name]}
    for names, has_effect, why in effects:
        useless = given & set(names.split())
        if useless and not has_effect:
            raise ValueError(f"{min(useless)} has no effect {why}: leave it out")


def common_effects(c: CommonFlags, *data: str | None) -> list[tuple[str, bool, str]]:
    """The effects that eval.py checks, too."""
    return [
        ("threshold", bool(c.reward), "without reward, because math-verify gives 0 or 1"),
        ("columns", any(map(is_own, filter(None, data))), "with data whose columns are known"),
        ("engine_memory sleep", not build_for_cpu(),
         "without a GPU, where VLLM_CPU_KVCACHE_SPACE sets the engine's cache")]


def effects(c: Config) -> list[tuple[str, bool, str]]:
    """When a setting has an effect, and why it has none. Needs no model and no data."""
    rule, several = c.rule, c.mini_batches > 1
    keeps_all = not rule.allocates and rule.round_size * rule.max_rounds == rule.rows_per_prompt
    return common_effects(c, c.data, c.eval_data) + [
        (" ".join(unread(c)), False, f"with sampler {c.sampler}"),
        ("weighting", not (keeps_all and c.weighting == "unbiased"),
         "where all answers are kept, because every weight is 1"),
        ("max_rounds_all_correct", c.max_rounds_all_correct < c.N, f"with only N = {c.N} rounds"),
        ("importance weight_cap", c.objective == "minirl", f"with objective {c.objective}"),
        ("weight_cap", c.importance != "none", "with importance none, as all weights are 1"),
        ("clip eps_low eps_high", several, "with one mini-batch, because pi_theta is still pi_old"),
        ("replay", several or c.replay != "r2",
         "with one mini-batch, because there is no pi_old pass to repeat"),
        ("eps_low eps_high", c.clip, "without clip")]


def unread(c: SamplerConfig) -> set[str]:
    """The settings that only other samplers read: with another value the rule is the same."""
    names = ("n", "M", "N", "drop_unresolved", "max_rounds_all_correct")
    return {name for name in names if replace(c, **{name: getattr(c, name) + 1}).rule == c.rule}
