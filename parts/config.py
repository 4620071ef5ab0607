"""Every setting of a training run: its meaning, default and range, and what contradicts what.

`parse` turns the command line into Flags before torch is imported. In Flags, None stands for a
default that depends on the model or the machine. Only `settle` (parts/settle.py) fills in such
defaults. It makes the Settings of the run, which nothing changes afterwards.
"""
import contextlib
import os
import re
import signal
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from ada_sampler import ADVANTAGES, RULES, SamplerConfig
from parts.data import is_own
from parts.folder import checkpoints
from parts.grader import require_function
from parts.machine import build_for_cpu
from parts.models import TINY, resolve_model
from parts.prompts import read_template
from parts.provenance import as_model, base_of, run_named, settings
from parts.sources import require_sets
from parts.text import listed, quiet_end, shown

OBJECTIVES = {  # name -> advantage, length normalisation (MiniRL section 2.3, appendix A)
    "minirl": ("pool-mean", "constant"),
    "grpo": ("group-std", "response"),
    "cispo": ("group-std", "batch"),
}
# What --clip bounds: the mask (which tokens have a gradient), the terms, or the weights.
CLIPS = {"minirl": "mask", "grpo": "term", "cispo": "weight"}
ICEPOP_BOUNDS = (0.5, 5.0)  # bounds of pi_old/mu, this project's choice; the upper is MiniRL's cap
DPPO_DELTA = 0.2  # how far a token's probability may move, about as in DPPO's paper

# Settings that a run takes from the run whose model it trains further, unless a flag is given. With
# the same problems and the same number held out, no held-out problem was trained on before.
BEGUN = ("data", "columns", "eval_data", "eval_questions", "eval_k", "reward", "threshold",
         "template", "stop", "max_prompt_tokens", "max_tokens", "temperature", "dtype", "lr",
         "batch_prompts")

# Flags that may change with --resume. They decide how long, how fast and where a run continues and
# how often it is evaluated, but not what its logs mean. Any other would mix two runs in one log.
RESUMABLE = frozenset({
    "name", "resume", "steps", "lr", "eval_every", "keep_every", "sync", "engine_memory", "sleep",
    "engine_sequences", "micro_tokens", "log_groups", "report_to", "train_anyway"})
EDITION = 5  # of config.json; only the edition that started a run can resume it


# ------------------------------------------------------------------------------ the flags
T = TypeVar("T")
# A flag whose default depends on the model or the machine; its help text states the default
Auto = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True)
class CommonFlags:
    """Flags of both minirl.py and eval.py: the model, its problems, and the form of the prompts."""

    model: str = "tiny"
    """tiny, tiny-moe or tiny-skills; or Qwen2.5-Math-1.5B, a hub id (org/name) or a folder; or
    runs/NAME, the model that this run has trained"""
    data: Auto[str] = None
    """comma-separated benchmarks, hub ids, files (.jsonl .json .parquet .csv), builtin problems"""
    columns: str = ""
    """QUESTION,ANSWER: the columns with problem and right answer, if not found by themselves"""
    reward: str = ""
    """FILE.py:FUNCTION replaces math-verify as reward; the data then needs no answers"""
    template: Auto[str] = None
    """a .jinja or .json file, or reinforce-ada, qwen25-math-cot, qwen-boxed, llama, three-examples,
    chat, none"""
    max_prompt_tokens: Auto[int] = None
    """longer prompts are dropped and counted; default: 256, of larger models 1024, of small ones
    640 with any --data other than builtin-words"""
    max_tokens: Auto[int] = None
    """longest answer, in tokens; default: 64, of larger models 3000, of small ones 40, or 160 with
    any --data other than builtin-words"""
    stop: str = ""
    """TOKEN,...: further tokens that end an answer, besides those that the model itself names"""


@dataclass(frozen=True)
class Flags(SamplerConfig, CommonFlags):
    """Every flag of `python minirl.py`: CommonFlags, those of the sampler, and these."""

    # ---- what is trained
    dtype: Auto[Literal["float32", "bfloat16", "float16"]] = None
    """precision of the frozen weights; default: float32 on a CPU, bfloat16 or float16 on a GPU"""
    lora_rank: int = 16
    """rank of the adapter, on all linear layers but the head (MoE models: attention only)"""
    lora_alpha: int = 32
    """the adapter is scaled by lora_alpha / lora_rank"""

    # ---- which problems are held out
    eval_data: Auto[str] = None
    """held-out problems, named like --data; or held-out: a share of --data (default for most)"""
    eval_questions: Auto[int] = None
    """held-out problems used, of each set of --eval-data; default: 100, with small models 72"""
    eval_k: Auto[int] = None
    """answers per held-out problem; default: 8, with small models 4"""

    # ---- which prompts get how many answers, and what an answer is compared with
    batch_prompts: Auto[int] = None
    """prompts per step; default: 24, with small models 16, with larger ones 32"""
    M: Auto[int] = None
    """answers per round (ada-est, gvm: per prompt, on average); default: 8, or 4 for small models
    with ada-balance"""
    temperature: float = 1.0
    """sampling temperature, used by both engine and trainer"""
    advantage: Auto[Literal[ADVANTAGES]] = None
    """what a reward is compared with; default: pool-mean, or group-std for grpo and cispo"""

    # ---- what the update maximises; mu: engine, pi_old: trainer with its weights, pi_theta: now
    objective: Literal[tuple(OBJECTIVES)] = "minirl"
    """minirl; or, for comparison, grpo or cispo as in the appendix of MiniRL's paper"""
    importance: Literal["full", "staleness", "none"] = "full"
    """minirl's weight of a token: full (pi_theta/mu), staleness (pi_theta/pi_old), none"""
    weight_cap: float = 5.0
    """largest weight of a token (minirl); 0 = no cap"""
    clip: bool = True
    """mask tokens whose pi_theta/pi_old has moved too far (cispo: bound this ratio instead)"""
    eps_low: float = 0.2
    """with a negative advantage, too far means a ratio below 1 - eps_low"""
    eps_high: float = 0.27
    """with a positive advantage, too far means a ratio above 1 + eps_high"""
    mask: Literal["ratio", "dppo", "icepop"] = "ratio"
    """what --clip bounds (minirl): ratio; dppo: pi_theta - mu; icepop: the ratio and pi_old/mu"""
    length_norm: Auto[Literal["constant", "response", "batch"]] = None
    """divisor of token sums: constant (max_tokens), response (own length), batch (mean length)"""
    replay: Auto[Literal["none", "r2", "r3"]] = None
    """MoE: the trainer repeats its own earlier experts (r2) or the engine's (r3); default: none,
    r2, r3 for 1, 2, 3 or more --mini-batches"""

    # ---- how far the update goes
    mini_batches: int = 1
    """optimizer steps per sampled batch (N in MiniRL's paper); 1 = on-policy"""
    lr: Auto[float] = None
    """learning rate of AdamW on the LoRA weights; default: 1e-3, small models 3e-4, larger 2e-5"""
    warmup_steps: Auto[int] = None
    """optimizer steps over which the rate rises; 0 = off; default: 5, with small models 2"""
    max_grad_norm: float = 1.0
    """larger gradients are scaled to this norm (rare: max_tokens divides the loss); 0 = off"""

    # ---- how long the run lasts, and what it saves
    steps: Auto[int] = None
    """training steps; default: 100, of small models 20, of larger ones 200"""
    seed: int = 0
    """decides the order of the data, the adapter's initial weights and the sampled answers"""
    name: Auto[str] = None
    """the run's folder is runs/NAME; default: composed of model, sampler and seed"""
    resume: bool = False
    """continue the run of this name from its last checkpoint, if there is one"""
    keep_every: int = 0
    """keep every K-th checkpoint permanently; the newest two are always kept; 0 = no others"""
    report_to: Literal["none", "trackio", "wandb"] = "none"
    """also send the logs to this tracker"""

    # ---- what is evaluated and recorded during the run
    eval_every: Auto[int] = None
    """steps between evaluations; 0 = only the first and the last; default: 20, small models 10"""
    eval_first: bool = True
    """evaluate before step 1; without it the run cannot report at its end what has changed"""
    train_anyway: bool = False
    """continue even if the first steps give no gradient"""
    log_groups: int | Literal["all"] = 2
    """prompts of each step whose answers are logged for explore.py: a number, or all"""

    # ---- hardware: of these flags only the lower precisions change what is optimised
    sync: Auto[Literal["adapter", "merge"]] = None
    """how the engine gets weights: adapter (default), or merge (default on a CPU and in float32)"""
    engine_memory: float = 0.45
    """share of the GPU's memory for the engine"""
    engine_sequences: int = 256
    """most answers that are written at the same time"""
    rollout_dtype: Auto[Literal["float32", "bfloat16", "float16", "fp8"]] = None
    """precision of the engine's weights; default: the same as --dtype"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """precision of the engine's cache of keys and values; auto: the same as its weights"""
    sleep: bool = False
    """the engine gives up its GPU memory during the update"""
    micro_tokens: Auto[int] = None
    """tokens per forward and backward pass, padding included; default: 16384 on a GPU, 8192 below
    20 GB, 4096 for the built-in models, estimated on a CPU"""


@dataclass(frozen=True)
class Settings(Flags):
    """The settings of a run. They are those of Flags, but none of them is None."""


def name_of(flags: Flags) -> str:
    """The run's name, which is --name or is composed of model, sampler and seed.

    Raises ValueError if runs/NAME cannot be a folder in runs.
    """
    model = Path(flags.model).name
    if run := run_named(flags.model):
        model = f"from-{run.name}" + f"-{model}" * (model != run.name)
    name = f"{model}-{flags.sampler}-seed{flags.seed}" if flags.name is None else flags.name
    if not re.fullmatch(r"\w[\w.+-]*", name) or len(name.encode()) > 255:
        raise ValueError(f"name {name[:80]!r} must be a plain folder name of at most 255 bytes, "
                         "because it becomes runs/NAME: choose another --name")
    return name


# ------------------------------------------------------------------------------ what cannot work
RANGES = {  # smallest and largest value if it is not 0; USUAL_RANGES hold for all others
    "engine_memory": (0.01, 0.99), "lora_rank": (1, 512), "temperature": (0.01, 100.0),
    "threshold": (-1e9, 1e9), "weight_cap": (1.0, 1e9), "max_grad_norm": (1e-3, 1e9),
    "seed": (1, 2**32 - 1)}
USUAL_RANGES = {int: (1, 10**6), float: (1e-9, 1e9)}
MAY_BE_ZERO = (  # here 0 means off, none or all
    "weight_cap", "max_grad_norm", "warmup_steps", "eval_every", "log_groups", "keep_every", "seed",
    "threshold", "max_rounds_all_correct", "micro_rows", "limit")


def check_numbers(config) -> None:
    """Raises ValueError, one sentence, for a number that is too small, too large or not finite."""
    for name, value in vars(config).items():
        if type(value) not in USUAL_RANGES or value == 0 and name in MAY_BE_ZERO:
            continue
        least, most = RANGES.get(name, USUAL_RANGES[type(value)])
        if not least <= value <= most:
            zero = "0, or " if name in MAY_BE_ZERO and least > 0 else ""
            raise ValueError(f"{name} must be {zero}from {least} to {most}, not {value}")


def require_effect(given: set[str], effects: list[tuple[str, bool, str]]) -> None:
    """Raises ValueError for a setting that was given and has no effect.

    effects: [(names of settings, whether they have an effect, why they have none)].
    """
    for names, has_effect, why in effects:
        useless = given & set(names.split())
        if useless and not has_effect:
            raise ValueError(f"{min(useless)} has no effect {why}: leave it out")


def sampler_effects(c: SamplerConfig) -> list[tuple[str, bool, str]]:
    keeps_all = not c.rule.allocates and (
        c.rule.round_size * c.rule.max_rounds == c.rule.rows_per_prompt)
    return [
        (" ".join(unread(c)), False, f"with sampler {c.sampler}"),
        ("weighting", not (keeps_all and c.weighting == "unbiased"),
         "where all answers are kept, because every weight is 1"),
        ("max_rounds_all_correct", c.max_rounds_all_correct < c.N, f"with only N = {c.N} rounds")]


def unread(c: SamplerConfig) -> set[str]:
    """The settings that only other samplers read."""
    return {name for row in RULES.values() for name in row.reads} - {*RULES[c.sampler].reads}


def common_effects(c: CommonFlags, columns: bool) -> list[tuple[str, bool, str]]:
    """The effects that eval.py checks, too. `columns`: whether some data has unknown columns."""
    return [
        ("threshold", bool(c.reward), "without reward, because math-verify gives 0 or 1"),
        ("columns", columns, "with data whose columns are known"),
        ("engine_memory sleep", not build_for_cpu(),
         "without a GPU, where VLLM_CPU_KVCACHE_SPACE sets the engine's cache")]


def effects(c: Flags) -> list[tuple[str, bool, str]]:
    """When a setting has an effect, and why it has none. Needs no model and no data."""
    data = ",".join(name for name in (c.data, c.eval_data) if name)
    return common_effects(c, bool(data) and is_own(data)) + [
        ("importance weight_cap mask", c.objective == "minirl", f"with objective {c.objective}"),
        ("clip eps_low eps_high", CLIPS.get(c.objective) != "nothing",
         f"with objective {c.objective}"),
        ("weight_cap", c.importance != "none", "with importance none, as all weights are 1"),
        ("clip eps_low eps_high", c.mini_batches > 1 or c.mask != "ratio",
         "with one mini-batch, because pi_theta is still pi_old"),
        ("replay", c.mini_batches > 1 or c.replay != "r2",
         "with one mini-batch, because there is no pi_old pass to repeat"),
        ("eps_low eps_high mask", c.clip, "without clip"),
        ("eps_low eps_high", c.mask != "dppo", "with mask dppo, which bounds differences")]


def check_sampler(c: SamplerConfig) -> None:
    """Raises ValueError for sizes that cannot work and for settings that this sampler ignores."""
    check_numbers(c)
    c.validate()
    require_effect(given_in(c, vars(SamplerConfig())), sampler_effects(c))


def given_in(config, usual: dict) -> set[str]:
    """The names of the settings whose values differ from the usual ones."""
    return {name for name, value in vars(config).items() if value != usual[name]}


def check(flags: Flags, usual: dict) -> None:
    """Raises ValueError, one sentence, for flags that cannot work, whatever the model is."""
    check_numbers(flags)
    advantage = flags.advantage or OBJECTIVES[flags.objective][0]
    sampler = replace(flags, M=flags.M or SamplerConfig.M, advantage=advantage)
    sampler.validate()
    require_effect(given_in(flags, usual), sampler_effects(sampler) + effects(flags))


# ------------------------------------------------------------------------------ the command line
def parse_flags(cls: type, argv: list[str] | None, prog: str, description: str, defaults=()):
    """An instance of the dataclass `cls`, filled from the flags `argv` (None: of this process).

    `defaults` {field: value} replace those of the class. The program ends with code 0 after --help,
    and with code 2 if there is no such flag or value.
    """
    names = {f.name for f in fields(cls)}
    usual = {name: value for name, value in dict(defaults).items() if name in names}
    return tyro.cli(cls, args=argv, prog=prog, description=description, default=cls(**usual),
                    config=(tyro.conf.DisallowNone,))


@contextlib.contextmanager
def in_one_sentence(prog: str):
    """A ValueError inside ends the program like a wrong flag: with its sentence and code 2."""
    try:
        yield
    except ValueError as problem:
        print(f"{prog}: {problem}", file=sys.stderr)
        raise SystemExit(2) from None


def parse(argv: list[str] | None = None) -> Flags:
    """The flags of a run. They are parsed twice if --resume or --model names a run with defaults.

    Ends the program with code 2 and one sentence if they cannot work.
    """
    about = "minirl.py", "MiniRL with Reinforce-Ada sampling. Without flags: the tiny model"
    with in_one_sentence(about[0]):
        flags = parse_flags(Flags, argv, *about)
        resolve_model(base_of(flags.model))  # ends here if there is no such model
        name = name_of(flags)
        stored = settings(Path("runs", name)) if flags.resume else {}
        usual = stored or of_the_run_before(flags)
        if usual:
            flags = parse_flags(Flags, argv, *about, usual)
        flags = replace(flags, name=name, model=as_model(flags.model, stored.get("model", "")))
        if stored and checkpoints(Path("runs", name)):  # without a checkpoint nothing can be mixed
            require_unchanged(flags, stored)
        if usual and not stored:
            taken = {key: usual[key] for key in usual if getattr(flags, key) == usual[key]}
            print(f"--model is {shown(flags.model)}; unless a flag is given, the settings of its "
                  f"run are used: {listed(taken)}")
        # In a resumed run only the flags that may change need an effect.
        fixed = {key: usual[key] for key in usual.keys() - (stored.keys() & RESUMABLE)}
        check(flags, vars(Flags()) | fixed)
    require_function(flags.reward)
    return flags


def parse_before_torch() -> Flags:
    """`parse` before the slow imports, so --help, wrong flags and missing files end at once.

    Ctrl-C ends those imports without a traceback. The built-in models are small and get one thread.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with quiet_end():  # minirl.py --help | head
        flags = parse()
    require_sets(flags.data, flags.eval_data)
    read_template(flags.template or "none")
    if base_of(flags.model) in TINY:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return flags


# ------------------------------------------------------------------------------ earlier runs
def of_the_run_before(flags: Flags) -> dict:
    """Settings of the run that --model names, or {}; without columns if --data is another."""
    run = run_named(flags.model)
    before = settings(run) if run else {}
    same = flags.data in (None, before.get("data"))
    other = set() if same else {"data", "columns", "eval_data"}
    other |= {"threshold"} if flags.reward or not before.get("reward") else set()
    return {name: before[name] for name in BEGUN
            if before.get(name, "") != "" and name not in other}


def settings_of(config: Flags) -> dict:
    """What config.json stores at each start, which is every setting except --resume."""
    stored = asdict(config) | dict(edition=EDITION)
    del stored["resume"]
    return stored


def require_unchanged(flags: Flags, stored: dict) -> None:
    """Raises ValueError if a setting that decides what the logs mean has another value."""
    now = settings_of(flags)
    if stored.keys() != now.keys() or stored["edition"] != now["edition"]:
        raise ValueError(f"another version has started run {flags.name}: resume it with that "
                         "version, or choose another --name")
    for name in sorted(now.keys() - RESUMABLE):
        if stored[name] != now[name]:
            raise ValueError(
                f"run {flags.name} was started with --{name.replace('_', '-')} "
                f"{shown(stored[name])}, not {shown(now[name])}: resume it without this flag, or "
                "choose another --name")
