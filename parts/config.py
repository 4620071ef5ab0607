"""Every setting of a training run: its meaning, default and range, and what contradicts what.

`parse` turns the command line into Flags, before torch is imported. In Flags None stands for a
default that depends on the model or the machine. `settle` (parts/settle.py) is the only place that
fills in such defaults: it makes the Settings of the run, which nothing changes afterwards.
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
from parts.provenance import as_model, base_of, run_named, settings
from parts.text import listed, quiet_end, shown

OBJECTIVES = {  # name -> advantage, length normalisation (MiniRL section 2.3, appendix A)
    "minirl": ("pool-mean", "constant"),
    "grpo": ("group-std", "response"),
    "cispo": ("group-std", "batch"),
}
# What --clip bounds: which tokens have a gradient (the mask), terms, weights, or nothing.
CLIPS = {
    "minirl": "mask",
    "grpo": "term",
    "cispo": "weight",
}
ICEPOP_BOUNDS = (0.5, 5.0)  # of pi_old/mu, this project's choice; the upper one is MiniRL's cap
DPPO_DELTA = 0.2  # how far a token's probability may move, about as in DPPO's paper

# What a run that begins from a run takes from it, if no flag says otherwise. With the same problems
# and as many held out, no problem is held out that was trained on before.
BEGUN = ("data", "columns", "eval_data", "eval_questions", "eval_k", "reward", "threshold",
         "template", "stop", "max_prompt_tokens", "max_tokens", "temperature", "dtype", "lr",
         "batch_prompts")

# Flags that --resume takes anew: they change how long, how fast and where a run goes on and how
# often it is looked at, but not what its logs mean. Any other would mix two runs in one log.
RESUMABLE = frozenset({
    "name", "resume", "steps", "lr", "eval_every", "keep_every", "sync", "engine_memory", "sleep",
    "engine_sequences", "micro_tokens", "log_groups", "report_to", "train_anyway"})
EDITION = 5  # of config.json: a run is resumed by the edition that has started it


# ------------------------------------------------------------------------------ the flags
T = TypeVar("T")
# A flag whose default depends on the model or the machine, as its help says
Auto = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True)
class CommonFlags:
    """What minirl.py and eval.py both have: the model, its problems, and how they are asked."""

    model: str = "tiny"
    """tiny, tiny-moe, tiny-skills, or a model: Qwen2.5-Math-1.5B, a hub id (org/name), a folder; or
    runs/NAME, which is what that run has trained"""
    data: Auto[str] = None
    """benchmarks, hub ids, files (.jsonl, .json, .parquet, .csv) or builtin problems, by commas"""
    columns: str = ""
    """QUESTION,ANSWER: the columns with problem and right answer, if not found by themselves"""
    reward: str = ""
    """FILE.py:FUNCTION gives the reward instead of math-verify; then no answers are needed"""
    template: Auto[str] = None
    """a .jinja or .json file, or reinforce-ada, qwen25-math-cot, qwen-boxed, llama, three-examples,
    chat, none"""
    max_prompt_tokens: Auto[int] = None
    """longer prompts are dropped and counted; default: 256, of larger models 1024, of small ones
    with problems of your own 640"""
    max_tokens: Auto[int] = None
    """longest answer, in tokens; default: 64, of larger models 3000, of small ones 40, or 160 with
    problems of your own"""
    stop: str = ""
    """TOKEN,...: further tokens that end an answer, besides those that the model itself names"""


@dataclass(frozen=True)
class Flags(SamplerConfig, CommonFlags):
    """Every flag of `python minirl.py`: CommonFlags, the sampler's, and these."""

    # ---- what is trained
    dtype: Auto[Literal["float32", "bfloat16", "float16"]] = None
    """precision of the frozen weights; default: float32 on a CPU, bfloat16 or float16 on a GPU"""
    lora_rank: int = 16
    """rank of the adapter, on all linear layers but the head (mixture of experts: attention)"""
    lora_alpha: int = 32
    """the adapter is scaled by lora_alpha / lora_rank"""

    # ---- which problems are held out
    eval_data: Auto[str] = None
    """held-out problems, named like --data; or held-out: a share of your own file (its default)"""
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
    """sampling temperature, of trainer and engine alike"""
    advantage: Auto[Literal[ADVANTAGES]] = None
    """what a reward is compared with; default: pool-mean, or group-std for grpo and cispo"""

    # ---- what the update maximises, of mu (engine), pi_old (trainer, same weights), pi_theta (now)
    objective: Literal[tuple(OBJECTIVES)] = "minirl"
    """minirl, or for comparison grpo or cispo as in the appendix of MiniRL's paper"""
    importance: Literal["full", "staleness", "none"] = "full"
    """minirl's weight of a token: full (pi_theta/mu), staleness (pi_theta/pi_old), none"""
    weight_cap: float = 5.0
    """largest weight of a token (minirl); 0 = no cap"""
    clip: bool = True
    """mask tokens whose pi_theta/pi_old has already moved too far"""
    eps_low: float = 0.2
    """with a negative advantage, too far is below 1 - eps_low"""
    eps_high: float = 0.27
    """with a positive advantage, too far is above 1 + eps_high"""
    mask: Literal["ratio", "dppo", "icepop"] = "ratio"
    """what --clip looks at (minirl): ratio; dppo: pi_theta - mu; icepop: ratio, and pi_old/mu"""
    length_norm: Auto[Literal["constant", "response", "batch"]] = None
    """what token sums are divided by: constant, response (grpo's) or batch (cispo's) lengths"""
    replay: Auto[Literal["none", "r2", "r3"]] = None
    """experts reused from trainer (r2) or engine (r3); default: none, r2, r3 for 1, 2, 3+ steps"""

    # ---- how far the update goes
    mini_batches: int = 1
    """optimizer steps per sampled batch (N in MiniRL's paper); 1 = on-policy"""
    lr: Auto[float] = None
    """learning rate of AdamW on the LoRA weights; default: 1e-3, small models 3e-4, larger 2e-5"""
    warmup_steps: Auto[int] = None
    """the rate rises over so many optimizer steps; 0 = off; default: 5, with small models 2"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm (rare: the loss is divided by max_tokens); 0 = off"""

    # ---- how long it goes on, and what it leaves behind
    steps: Auto[int] = None
    """training steps; default: 100, of small models 20, of larger ones 200"""
    seed: int = 0
    """decides the order of the data, the adapter's start and what is sampled"""
    name: Auto[str] = None
    """the run's folder is runs/NAME; default: made of model, sampler and seed"""
    resume: bool = False
    """continue the run of this name from its last checkpoint, if there is one"""
    keep_every: int = 0
    """each step is saved and the newest two stay; this keeps every so many-th for good; 0 = none"""
    report_to: Literal["none", "trackio", "wandb"] = "none"
    """a tracker that shows the run's logs"""

    # ---- what is looked at on the way
    eval_every: Auto[int] = None
    """steps between evaluations; 0 = only the first and the last; default: 20, small models 10"""
    eval_first: bool = True
    """evaluate before step 1; otherwise the run cannot say at its end whether it is better"""
    train_anyway: bool = False
    """go on although the first steps have nothing to learn from"""
    log_groups: int | Literal["all"] = 2
    """prompts of each step whose answers are logged for explore.py: a number, or all"""

    # ---- what it runs on: nothing here changes what is optimised, except lower precision
    sync: Auto[Literal["adapter", "merge"]] = None
    """the engine gets new weights as an adapter (default on a GPU) or merged (default on a CPU)"""
    engine_memory: float = 0.45
    """share of the GPU's memory for the engine"""
    engine_sequences: int = 256
    """most answers that are written at the same time"""
    rollout_dtype: Auto[Literal["float32", "bfloat16", "float16", "fp8"]] = None
    """precision of the engine's weights; default: the same as --dtype"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """precision of the engine's cache of keys and values; auto, for vLLM, is that of its weights"""
    sleep: bool = False
    """the engine gives up its GPU memory during the update"""
    micro_tokens: Auto[int] = None
    """tokens per forward and backward pass, padding included; default: 16384 on a GPU, 8192 below
    20 GB, 4096 for the built-in models, estimated on a CPU"""


@dataclass(frozen=True)
class Settings(Flags):
    """The settings of a run: those of Flags, but none of them is None."""


def name_of(flags: Flags) -> str:
    """The run's name: as it was given, or made of model, sampler and seed.

    Raises ValueError if runs/NAME cannot be a folder in runs.
    """
    model = Path(flags.model).name
    if run := run_named(flags.model):
        model = f"from-{run.name}" + f"-{model}" * (model != run.name)
    name = f"{model}-{flags.sampler}-seed{flags.seed}" if flags.name is None else flags.name
    if not re.fullmatch(r"\w[\w.+-]*", name) or len(name.encode()) > 255:
        raise ValueError(f"name {name[:80]!r} must be a plain folder name of at most 255 bytes, "
                         "for it becomes runs/NAME: choose another --name")
    return name


# ------------------------------------------------------------------------------ what cannot work
RANGES = {  # least and most of a number that is not 0; of all others USUAL_RANGES
    "engine_memory": (0.01, 0.99), "lora_rank": (1, 512), "temperature": (0.01, 100.0),
    "threshold": (-1e9, 1e9), "weight_cap": (1.0, 1e9), "max_grad_norm": (1e-3, 1e9),
    "seed": (1, 2**32 - 1)}
USUAL_RANGES = {int: (1, 10**6), float: (1e-9, 1e9)}
MAY_BE_ZERO = (  # where 0 means off, none or all
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
         "where all draws are kept, because every weight is 1"),
        ("max_rounds_all_correct", c.max_rounds_all_correct < c.N, f"with only N = {c.N} rounds")]


def unread(c: SamplerConfig) -> set[str]:
    """The settings that only other samplers read."""
    return {name for row in RULES.values() for name in row.reads} - {*RULES[c.sampler].reads}


def common_effects(c: CommonFlags, columns: bool) -> list[tuple[str, bool, str]]:
    """Those that eval.py has too. `columns`: whether there are columns that are not known."""
    return [
        ("threshold", bool(c.reward), "without reward, because math-verify gives 0 or 1"),
        ("columns", columns, "where the columns of all problems are known"),
        ("engine_memory sleep", not build_for_cpu(),
         "without a GPU, where VLLM_CPU_KVCACHE_SPACE sets the engine's cache")]


def effects(c: Flags) -> list[tuple[str, bool, str]]:
    """When a setting has an effect, and why it has none. Needs no model and no data."""
    data = ",".join(name for name in (c.data, c.eval_data) if name)
    return common_effects(c, bool(data) and is_own(data)) + [
        ("importance weight_cap mask", c.objective == "minirl", f"with objective {c.objective}"),
        ("clip eps_low eps_high", CLIPS.get(c.objective) != "nothing",
         f"with objective {c.objective}"),
        ("weight_cap", c.importance != "none", "with importance none: every token weighs 1"),
        ("clip eps_low eps_high", c.mini_batches > 1,
         "with one mini-batch, because pi_theta is pi_old and nothing has moved"),
        ("replay", c.mini_batches > 1 or c.replay != "r2",
         "with one mini-batch, because there is no pi_old pass to repeat"),
        ("eps_low eps_high mask", c.clip, "without clip"),
        ("eps_low eps_high", c.mask != "dppo", "with mask dppo, which looks at differences")]


def check_sampler(c: SamplerConfig) -> None:
    """Raises ValueError for sizes that cannot work, and for what only other samplers read."""
    check_numbers(c)
    c.validate()
    require_effect(given_in(c, vars(SamplerConfig())), sampler_effects(c))


def given_in(config, usual: dict) -> set[str]:
    """The names of the settings that are not as usual."""
    return {name for name, value in vars(config).items() if value != usual[name]}


def check(flags: Flags, usual: dict) -> None:
    """Raises ValueError, one sentence, for flags that cannot work, whatever the model is."""
    check_numbers(flags)
    advantage = flags.advantage or OBJECTIVES[flags.objective][0]
    sampler = replace(flags, M=flags.M or SamplerConfig.M, advantage=advantage)
    sampler.validate()
    require_effect(given_in(flags, usual), sampler_effects(sampler) + effects(flags))


# ------------------------------------------------------------------------------ from the command
def parse_flags(cls: type, argv: list[str] | None, prog: str, description: str, defaults=()):
    """An instance of the dataclass `cls`, filled from the flags `argv` (None: of this process).

    `defaults` {field: value} take the place of the class's own. Ends the program with code 0 after
    --help, and with code 2 where a flag or a value is none.
    """
    names = {f.name for f in fields(cls)}
    usual = {name: value for name, value in dict(defaults).items() if name in names}
    return tyro.cli(cls, args=argv, prog=prog, description=description, default=cls(**usual),
                    config=(tyro.conf.DisallowNone,))


@contextlib.contextmanager
def in_one_sentence(prog: str):
    """A ValueError inside ends the program as a wrong flag does: its sentence, and code 2."""
    try:
        yield
    except ValueError as problem:
        print(f"{prog}: {problem}", file=sys.stderr)
        raise SystemExit(2) from None


def parse(argv: list[str] | None = None) -> Flags:
    """The flags of a run, parsed again if --resume or --model names a run that gives the defaults.

    Ends the program with code 2 and one sentence if they cannot work.
    """
    about = "minirl.py", "MiniRL with Reinforce-Ada sampling. Without any flag: the tiny model"
    with in_one_sentence(about[0]):
        flags = parse_flags(Flags, argv, *about)
        resolve_model(base_of(flags.model))  # ends here if there is no such model
        name = name_of(flags)
        stored = settings(Path("runs", name)) if flags.resume else {}
        usual = stored or of_the_run_before(flags)
        if usual:
            flags = parse_flags(Flags, argv, *about, usual)
        flags = replace(flags, name=name, model=as_model(flags.model, stored.get("model", "")))
        if stored and checkpoints(Path("runs", name)):  # without one nothing is lost
            require_unchanged(flags, stored)
        if usual and not stored:
            taken = {key: usual[key] for key in usual if getattr(flags, key) == usual[key]}
            print(f"--model is {shown(flags.model)}; where no flag says otherwise, the settings of "
                  f"its run are used: {listed(taken)}")
        # Of a run that is resumed only what can be given anew needs an effect.
        fixed = {key: usual[key] for key in usual.keys() - (stored.keys() & RESUMABLE)}
        check(flags, vars(Flags()) | fixed)
    require_function(flags.reward)
    return flags


def parse_before_torch() -> Flags:
    """`parse` as the first thing that the program does: --help and a wrong flag answer at once.

    What has to be set before torch is imported, too: Ctrl-C ends the imports without a traceback,
    and the built-in models get one thread, for they are so small that more only wait.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with quiet_end():  # minirl.py --help | head
        flags = parse()
    if base_of(flags.model) in TINY:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return flags


# ------------------------------------------------------------------------------ of earlier runs
def of_the_run_before(flags: Flags) -> dict:
    """The settings of the run that --model names; {} if it names none.

    Other problems have other columns and are held out anew.
    """
    run = run_named(flags.model)
    before = settings(run) if run else {}
    same = flags.data in (None, before.get("data"))
    other = set() if same else {"data", "columns", "eval_data"}
    other |= {"threshold"} if flags.reward or not before.get("reward") else set()
    return {name: before[name] for name in BEGUN
            if before.get(name, "") != "" and name not in other}


def settings_of(config: Flags) -> dict:
    """What config.json remembers of a start: every setting but --resume."""
    stored = asdict(config) | dict(edition=EDITION)
    del stored["resume"]
    return stored


def require_unchanged(flags: Flags, stored: dict) -> None:
    """Raises ValueError for another value of a setting that decides what the logs mean."""
    now = settings_of(flags)
    if stored.keys() != now.keys():
        raise ValueError(f"another version has started run {flags.name}: resume it with that "
                         "version, or choose another --name")
    for name in sorted(now.keys() - RESUMABLE):
        if stored[name] != now[name]:
            raise ValueError(
                f"run {flags.name} was started with --{name.replace('_', '-')} "
                f"{shown(stored[name])}, not {shown(now[name])}: resume it without this flag, or "
                "choose another --name")
