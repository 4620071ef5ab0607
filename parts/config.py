"""Every setting of a training run and of an evaluation: default, range, meaning, contradictions.

`parse` (minirl.py) and `parse_eval` (eval.py) turn flags into a Config or an EvalConfig. Defaults
that depend on the model or the machine are filled in there.
"""
import contextlib
import os
import re
import signal
import sys
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from ada_sampler import RULES, SamplerConfig
from parts.data import HELD_OUT, default_data, default_eval_data, default_template, is_own
from parts.folder import checkpoints
from parts.grader import require_function
from parts.machine import (build_for_cpu, default_dtype, default_micro_tokens, default_sync,
                           require_effect)
from parts.models import TINY, is_small, resolve_model
from parts.provenance import MERGED, as_model, base_of, find_adapter, run_named, settings
from parts.text import is_text, listed, quiet_end, shown

OBJECTIVES = {  # name -> advantage, length normalisation (MiniRL section 2.3, appendix A)
    "minirl": ("pool-mean", "constant"),
    "grpo": ("group-std", "response"),
    "cispo": ("group-std", "batch"),
}
# The page of explore.py reads these too.
CLIPS = {  # what --clip bounds: which tokens have a gradient (the mask), their terms, their weights
    "minirl": "mask",
    "grpo": "term",
    "cispo": "weight",
}
ICEPOP_BOUNDS = (0.5, 5.0)  # of pi_old/mu, this project's choice; the upper one is MiniRL's cap
DPPO_DELTA = 0.2  # how far a token's probability may move, about as in DPPO's paper

AUTO = {  # what 0 stands for: with the built-in models, and with real ones
    "max_prompt_tokens": (256, 1024),
    "max_tokens": (64, 3000),
    "batch_prompts": (24, 32),
    "lr": (1e-3, 2e-5),
    "steps": (100, 200),
    "micro_tokens": (4096, 0),  # with real ones by the memory: see `resolve`
}

SMALL = dict(  # what a real model of less than 500 M parameters has instead, if no flag says more
    max_tokens=40, max_prompt_tokens=256, batch_prompts=16, M=4, lr=3e-4, warmup_steps=2, steps=20,
    eval_every=10, eval_questions=72, eval_k=4)
ROOM = dict(max_tokens=160, max_prompt_tokens=640)  # and for problems that are not its own

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


# ------------------------------------------------------------- settings of both, run and evaluation
@dataclass
class ProblemSettings:
    """What is asked and how, and who says whether an answer is right."""

    data: str = "auto"
    """benchmarks, hub ids, files (.jsonl, .json, .parquet, .csv) or builtin problems, by commas"""
    columns: str = ""
    """QUESTION,ANSWER: the columns with problem and correct answer, if not found by themselves"""
    reward: str = ""
    """FILE.py:FUNCTION gives the reward instead of math-verify; then no answers are needed"""
    template: str = "auto"
    """a .jinja or .json file, or reinforce-ada, qwen25-math-cot, qwen-boxed, llama, three-examples,
    chat, none"""
    max_prompt_tokens: int = 0
    """longer prompts are dropped and counted; 0 = auto"""
    max_tokens: int = 0
    """longest response, in tokens; 0 = auto"""
    stop: str = ""
    """TOKEN,...: further tokens that end a response, besides those that the model itself names"""


@dataclass
class EngineSettings:
    """What it runs on."""

    sync: Literal["auto", "adapter", "merge"] = "auto"
    """the engine gets new weights as an adapter (auto on a GPU) or merged (auto on a CPU)"""
    engine_memory: float = 0.45
    """share of the GPU's memory for the engine"""
    engine_sequences: int = 256
    """most responses that are written at the same time"""


# ------------------------------------------------------------------------------ settings of a run
@dataclass
class ModelSettings:
    """What is trained."""

    model: str = "tiny"
    """tiny, tiny-moe, tiny-skills, or a model: Qwen2.5-Math-1.5B, a hub id (org/name), a folder; or
    runs/NAME, to begin from what that run has trained"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """precision of the frozen weights; auto: float32 on a CPU, bfloat16 or float16 on a GPU"""
    lora_rank: int = 16
    """rank of the adapter, on all linear layers but the head (mixture of experts: attention)"""
    lora_alpha: int = 32
    """the adapter is scaled by lora_alpha / lora_rank"""


@dataclass
class SamplingSettings(SamplerConfig):
    """Which prompts get how many samples, and what a sample is compared with."""

    batch_prompts: int = 0
    """prompts per step; 0 = auto"""
    temperature: float = 1.0
    """sampling temperature, of trainer and engine alike"""
    advantage: Literal["auto", "pool-mean", "leave-one-out", "group-std", "positives-only"] = "auto"
    """what a reward is compared with; auto: pool-mean, or group-std for grpo and cispo"""


@dataclass
class ObjectiveSettings:
    """What the update maximises. mu is the engine, pi_old the trainer with the same weights, and
    pi_theta the trainer as it is now.
    """

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
    length_norm: Literal["auto", "constant", "response", "batch"] = "auto"
    """divide token sums by: constant (minirl's auto), response (grpo's), batch (cispo's) lengths"""
    replay: Literal["auto", "none", "r2", "r3"] = "auto"
    """experts reused from trainer (r2) or engine (r3); auto: none, r2, r3 for 1, 2, more steps"""


@dataclass
class OptimizerSettings:
    """How far the update goes."""

    mini_batches: int = 1
    """optimizer steps per sampled batch (N in MiniRL's paper); 1 = on-policy"""
    lr: float = 0.0
    """learning rate of AdamW on the LoRA weights; 0 = auto"""
    warmup_steps: int = 5
    """the learning rate rises over so many optimizer steps, then stays constant; 0 = off"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm (rare: the loss is divided by max_tokens); 0 = off"""


@dataclass
class RunSettings:
    """How long it goes on, and what it leaves behind."""

    steps: int = 0
    """training steps; 0 = auto"""
    seed: int = 0
    """decides the order of the data, the adapter's start and what is sampled"""
    name: str = ""
    """the run's folder is runs/NAME; empty = made of model, sampler and seed"""
    resume: bool = False
    """continue the run of this name from its last checkpoint, if there is one"""
    keep_every: int = 0
    """each step is saved and the newest two stay; this keeps every so many-th for good; 0 = none"""
    report_to: Literal["none", "trackio", "wandb"] = "none"
    """a tracker that shows the run's logs"""


@dataclass
class HeldOutSettings:
    """The problems that are never trained on."""

    eval_data: str = "auto"
    """held-out problems, named like --data; or held-out: a share of your own file (auto there)"""
    eval_questions: int = 100
    """held-out problems used, of each set of --eval-data"""
    eval_k: int = 8
    """samples per held-out problem"""


@dataclass
class WatchSettings:
    """What is looked at on the way."""

    eval_every: int = 20
    """steps between evaluations; one follows the last step in any case; 0 = none between"""
    eval_first: bool = True
    """evaluate before step 1; otherwise the run cannot say at its end whether it is better"""
    train_anyway: bool = False
    """go on although the first steps have nothing to learn from"""
    log_groups: int | Literal["all"] = 2
    """prompts of each step whose samples are logged for explore.py: a number, or all"""


@dataclass
class HardwareSettings(EngineSettings):
    """What it runs on. Nothing here changes what is optimised, except lower precision."""

    rollout_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    """precision of the engine's weights; auto: the same as --dtype"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """precision of the engine's cache of keys and values; auto: that of its weights"""
    sleep: bool = False
    """the engine gives up its GPU memory during the update"""
    micro_tokens: int = 0
    """tokens per forward and backward pass, padding included; 0 = auto"""


@dataclass
class Config(ModelSettings, ProblemSettings, SamplingSettings, ObjectiveSettings, OptimizerSettings,
             RunSettings, HeldOutSettings, WatchSettings, HardwareSettings):
    """Every flag of `python minirl.py`. Zero or "auto" is filled in by `__post_init__` (from the
    objective), `resolve` (the model's name, the machine) or `find_model` (the model's files).
    """

    resumable = RESUMABLE
    less_memory = ("lower --micro-tokens (now {micro_tokens}), --max-tokens or --engine-memory, or "
                   "try --sleep")

    def __post_init__(self):
        advantage, length_norm = OBJECTIVES.get(self.objective, OBJECTIVES["minirl"])
        if self.advantage == "auto":
            self.advantage = advantage
        if self.length_norm == "auto":
            self.length_norm = length_norm

    def validate(self) -> None:
        """Raises ValueError, one sentence, for what cannot work. Needs no model and no data."""
        check_sampler(self)  # and all numbers
        refuse(what_cannot_work(self))


# ------------------------------------------------------------------------------ what cannot work
LIMITS = {  # least and most of a number that is not 0; of all others USUAL
    "engine_memory": (0.01, 0.99), "lora_rank": (1, 512), "temperature": (0.01, 100.0),
    "threshold": (-1e9, 1e9), "weight_cap": (1.0, 1e9), "max_grad_norm": (1e-3, 1e9),
    "seed": (1, 2**32 - 1)}
USUAL = {int: (1, 10**6), float: (1e-9, 1e9)}
MAY_BE_ZERO = (
    "weight_cap", "max_grad_norm", "warmup_steps", "eval_every", "temperature", "log_groups")


def check_numbers(config) -> None:
    """Raises ValueError, one sentence, for a number that is too small, too large or not finite.

    0 is none, but means auto or off where it is the default, and in MAY_BE_ZERO.
    """
    for f in fields(config):
        value, kind = getattr(config, f.name), type(f.default)
        zero_is_fine = f.default == 0 or f.name in MAY_BE_ZERO
        if kind not in USUAL or value == "all" or value == 0 and zero_is_fine:
            continue
        least, most = LIMITS.get(f.name, USUAL[kind])
        if not least <= value <= most:
            zero = "0, or " if zero_is_fine and least > 0 else ""
            raise ValueError(f"{f.name} must be {zero}from {least} to {most}, not {value}")


def check_sampler(config: SamplerConfig) -> None:
    """Raises ValueError for sizes that cannot work, and for what only other samplers read."""
    check_numbers(config)
    SamplerConfig.validate(config)
    foreign, rule = f"has no effect with sampler {config.sampler}: leave it out", config.rule
    keeps_all = not rule.allocates and rule.round_size * rule.max_rounds == rule.rows_per_prompt
    refuse([
        *((given(config, name), f"{name} {foreign}") for name in sorted(unread(config.sampler))),
        (config.weighting == "unbiased" and keeps_all,
         "weighting unbiased has no effect where all draws are kept: every weight is 1"),
        (config.max_rounds_all_correct >= config.N,
         f"max_rounds_all_correct = {config.max_rounds_all_correct} has no effect: there are only "
         f"N = {config.N} rounds"),
    ])


def unread(sampler: str) -> set[str]:
    """The settings that only other samplers read."""
    return {name for row in RULES.values() for name in row.reads} - {*RULES[sampler].reads}


def given(config, *names: str) -> bool:
    """Whether one of these settings is not the default."""
    return any(getattr(config, name) != getattr(type(config), name) for name in names)


def refuse(found: list[tuple[bool, str]]) -> None:
    """Raises ValueError with the first sentence that is so."""
    for so, sentence in found:
        if so:
            raise ValueError(sentence)


def what_cannot_work(c: Config) -> list[tuple[bool, str]]:
    """[(is it so?, a sentence)]: settings without effect, and values that contradict each other."""
    one = c.mini_batches == 1
    return [
        (c.objective != "minirl" and given(c, "importance", "weight_cap", "mask"),
         f"importance, weight_cap and mask have no effect with objective {c.objective}"),
        (c.importance == "none" and given(c, "weight_cap"),
         "weight_cap has no effect with importance none: every token weighs 1"),
        (one and given(c, "clip", "eps_low", "eps_high"),
         "clip, eps_low and eps_high have no effect with one mini-batch: pi_theta is pi_old, so "
         "nothing has moved"),
        (one and c.replay == "r2",
         "replay r2 has no effect with one mini-batch: there is no pi_old pass to repeat"),
        (not c.clip and given(c, "eps_low", "eps_high", "mask"),
         "eps_low, eps_high and mask have no effect without clip"),
        (c.mask == "dppo" and given(c, "eps_low", "eps_high"),
         "eps_low and eps_high have no effect with mask dppo, which looks at differences"),
        (not c.reward and not 0 <= c.threshold < 1,
         f"threshold must be at least 0 and below 1, not {c.threshold}: math-verify gives 0 or 1"),
        (c.columns and not is_own(f"{c.data},{c.eval_data}"),
         f"columns has no effect: those of {c.data} and {c.eval_data} are known"),
        (c.temperature == 0,
         "temperature 0 writes the same answer every time: nothing could be learnt from it"),
        (0 < c.batch_prompts < c.mini_batches,
         f"mini_batches = {c.mini_batches} is more than the {c.batch_prompts} prompts of a step, "
         "and each takes whole groups"),
    ]


# ------------------------------------------------------------------------------ defaults by model
def resolve(config: Config) -> Config:
    """Fill in the defaults that depend on the model's name and the machine."""
    require_effect(config)
    base, on_cpu = base_of(config.model), build_for_cpu()
    tiny = base in TINY
    numbers = {name: values[not tiny] for name, values in AUTO.items()}
    if not (tiny or on_cpu):  # on a CPU `fit_in_memory` knows, once the model is there
        numbers["micro_tokens"] = default_micro_tokens()
    dtype = default_dtype() if config.dtype == "auto" else config.dtype
    config = fill_in(
        config, dtype=dtype, rollout_dtype=dtype, sync=default_sync(dtype),
        data=default_data(base if tiny else resolve_model(base)),
        template=default_template(base, config.reward), **numbers)
    config.name = name_of(config)
    return fill_in(config, eval_data=default_eval_data(config.data))


def fill_in(config, **defaults):
    """A copy, with these defaults in the place of 0 and "auto"."""
    left_open = {name: value for name, value in defaults.items()
                 if getattr(config, name) in ("auto", 0)}
    return replace(config, **left_open)


def name_of(config: Config) -> str:
    """The run's name: as it was given, or made of model, sampler and seed.

    Raises ValueError if runs/NAME cannot be a folder in runs.
    """
    prefix, model = getattr(config, "prefix", ""), Path(config.model).name
    if run := run_named(config.model):
        model = f"from-{run.name}" + f"-{model}" * (model != run.name)
    name = config.name or f"{prefix}{model}-{config.sampler}-seed{config.seed}"
    if not re.fullmatch(r"\w[\w.+-]*", name) or len(name.encode()) > 255:
        raise ValueError(f"name {name[:80]!r} must be a plain folder name of at most 255 bytes, "
                         "for it becomes runs/NAME: choose another --name")
    return name


def small_defaults(config, taken=()) -> dict:
    """The settings of a small model where no flag says otherwise; {} for any other model.

    Without those that are `taken` from a run.
    """
    if not is_small(base_of(config.model)):
        return {}
    known = SMALL | (ROOM if config.data not in ("auto", "builtin-words") else {})
    if getattr(config, "sampler", Config.sampler) != Config.sampler:
        known |= dict(M=Config.M)
    known = {name: value for name, value in known.items()
             if hasattr(config, name) and name not in taken}
    taken = {name: value for name, value in known.items()
             if getattr(config, name) == getattr(type(config), name)}  # others are given
    if taken:
        print("this model is small, so its settings are", listed(taken))
    return known


def as_before(config) -> dict:
    """The settings of the run that --model names where no flag says otherwise; {} if it names none.

    `config`: what the flags say. Other problems have other columns and are held out anew.
    """
    run = run_named(config.model)
    found = settings(run) if run else {}
    same = config.data in ("auto", found.get("data"))
    other = set() if same else {"data", "columns", "eval_data"}
    other |= {"threshold"} if config.reward or not found.get("reward") else set()
    return {name: found[name] for name in BEGUN
            if found.get(name, "") != "" and name not in other}


# ------------------------------------------------------------------------------ flags
def parse_flags(cls: type, argv: list[str] | None, prog: str, description: str, defaults=()):
    """An instance of the dataclass `cls`, filled from the flags `argv` (None: of this process).

    Each dataclass that `cls` inherits from is a group in --help, whose title is its docstring.
    `defaults` {field: value} take the place of the class's own. Ends the program with code 0 after
    --help, and with code 2 where a flag or a value is none.
    """
    for text in sys.argv[1:] if argv is None else argv:
        if not is_text(text):
            raise ValueError(f"{shown(text)} is no text in UTF-8")
    groups = [base for base in cls.__bases__ if is_dataclass(base)] or [cls]
    names = [group.__name__.removesuffix("Settings").removesuffix("Config") for group in groups]
    nested = make_dataclass("Flags", zip(names, groups))
    usual = {f.name: f.default for f in fields(cls)} | dict(defaults)
    start = nested(*(group(**{f.name: usual[f.name] for f in fields(group)}) for group in groups))
    parsed = tyro.cli(nested, args=argv, prog=prog, description=description, default=start,
                      config=(tyro.conf.OmitArgPrefixes,))
    return cls(**{f.name: getattr(getattr(parsed, name), f.name)
                  for name, group in zip(names, groups) for f in fields(group)})


@contextlib.contextmanager
def in_one_sentence(prog: str):
    """A ValueError inside ends the program as a wrong flag does: its sentence, and code 2."""
    try:
        yield
    except ValueError as problem:
        print(f"{prog}: {problem}", file=sys.stderr)
        raise SystemExit(2) from None


# ------------------------------------------------------------------------------ a run's flags
def parse(argv: list[str] | None = None, cls: type = Config, flags: type = Config,
          about=("minirl.py", "MiniRL with Reinforce-Ada sampling. Without any flag: the tiny "
                              "model")) -> Config:
    """Flags to Config. With --resume the run's own config.json gives the defaults.

    Ends the program with code 2 and one sentence if they cannot work. Another program has a `cls`
    of its own, and in `flags` those of its settings that can be set (recipes/trl_ada.py).
    """
    with in_one_sentence(about[0]):
        config = parse_flags(flags, argv, *about)
        known = settings(Path("runs", name_of(config))) if config.resume else {}
        taken = {} if known else as_before(config)
        config = parse_flags(
            flags, argv, *about, known or small_defaults(config, taken) | taken)
        if run_named(config.model):  # its name, too, is that of the flag and not of the step
            config.name = name_of(config)
            config.model = as_model(config.model, known.get("model", ""))
        taken = {name: value for name, value in taken.items() if getattr(config, name) == value}
        if taken:
            print(f"--model is {shown(config.model)}; where no flag says otherwise, the settings "
                  f"of its run are used: {listed(taken)}")
        if known and checkpoints(Path("runs", config.name)):  # without one nothing is lost
            fixed = vars(cls()).keys() - vars(config).keys()
            given = {name: known[name] for name in known.keys() - fixed}
            require_unchanged(config, given, cls.resumable)
        config = resolve(cls(**vars(config)))
        config.validate()
    require_function(config.reward)
    return config


def parse_before_torch() -> Config:
    """`parse` as the first thing that the program does: --help and a wrong flag answer at once.

    What has to be set before torch is imported, too: Ctrl-C ends the imports without a traceback,
    and the built-in models get one thread, for they are so small that more only wait.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with quiet_end():  # minirl.py --help | head
        config = parse()
    if base_of(config.model) in TINY:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return config


def require_unchanged(config, known: dict, resumable: frozenset) -> None:
    """Raises ValueError for another value of a setting that decides what the logs mean.

    Also for a setting that only the version knew with which the run was started, or only this one.
    """
    now = vars(config)
    for name in sorted((known.keys() | now.keys()) - resumable):
        flag = f"--{name.replace('_', '-')}"
        if name not in known or name not in now:
            knows = "does not know" if name in now else "alone knows"
            raise ValueError(
                f"another version has started run {config.name}: it {knows} {flag}. Resume the "
                "run with that version, or choose another --name")
        if known[name] != now[name]:
            raise ValueError(
                f"run {config.name} was started with {flag} {shown(known[name])}, not "
                f"{shown(now[name])}: resume it without this flag, or choose another --name")


# ------------------------------------------------------------------------------ an evaluation
@dataclass
class EvaluatedSettings:
    """What is evaluated, and where the results go."""

    model: str = "tiny"
    """tiny, a name such as Qwen2.5-Math-1.5B, a hub id, a folder, or runs/NAME (merged)"""
    adapter: str = ""
    """LoRA adapter: a PEFT folder, or a run (its last checkpoint)"""
    base: bool = False
    """with --adapter: --model without the adapter answers the same problems, for comparison"""
    out: str = ""
    """folder of this evaluation; empty = runs/eval-MODEL-DATA-kK"""
    against: str = ""
    """folder of a finished evaluation of the same problems"""


@dataclass
class ProtocolSettings:
    """How: numbers are comparable only where this, problems and prompt are equal."""

    k: int = 32
    """samples per problem"""
    limit: int = 0
    """only the first so many problems of each set; 0 = all"""
    temperature: float = 1.0
    """sampling temperature; 0 = greedy, with --k 1"""
    threshold: float = 0.7
    """with --reward: one above it is correct, for pass@k"""
    seed: int = 0
    """decides the samples"""


@dataclass
class EvalConfig(EvaluatedSettings, ProblemSettings, ProtocolSettings, EngineSettings):
    """Every flag of `python eval.py`. Zero or "auto" is filled in by `parse_eval`."""

    engine_memory: float = 0.85  # no trainer wants its share

    def validate(self) -> None:
        """Raises ValueError, one sentence, for what cannot work."""
        check_numbers(self)
        refuse([
            (not self.reward and given(self, "threshold"),
             "threshold has no effect without reward: math-verify gives 0 or 1"),
            (self.temperature == 0 and self.k > 1,
             "temperature 0 gives k equal samples: use --k 1, or a temperature above 0"),
            (self.columns and self.data != HELD_OUT and not is_own(self.data),
             f"columns has no effect: those of {self.data} are known"),
            (self.sync != "auto" and not self.adapter, "sync has no effect without adapter"),
            (self.base and not self.adapter,
             "base has no effect without adapter: name a run by --adapter, to compare it with its "
             "base model"),
            (self.base and bool(self.against),
             "base and against both name what to compare with: leave one out"),
        ])


def parse_eval(argv: list[str] | None = None) -> EvalConfig:
    """Flags to EvalConfig, with what depends on the model filled in.

    Ends the program with code 2 and one sentence if they cannot work.
    """
    about = "eval.py", "avg@k and pass@k with 95 % intervals, on benchmarks, files or built-in ones"
    with in_one_sentence("eval.py"):
        first = parse_flags(EvalConfig, argv, *about)
        adapter = first.adapter and find_adapter(first.adapter)
        model = as_model(first.model)
        known = as_in_its_run(adapter or model, first.data)
        known = small_defaults(first, known) | known
        config = parse_flags(EvalConfig, argv, *about, known)
        if config.reward != known.pop("reward", ""):  # the run's threshold is for its own reward
            known.pop("threshold", None)
            config = parse_flags(EvalConfig, argv, *about, known)
        config.model = as_model(config.model, model)
        config.validate()
        require_effect(config)
    base = base_of(config.model)
    real = base not in TINY
    config = fill_in(
        config, data=default_data(base, for_training=False),
        template=default_template(base, config.reward),
        max_tokens=AUTO["max_tokens"][real], max_prompt_tokens=AUTO["max_prompt_tokens"][real])
    require_function(config.reward)
    data = [Path(part).stem for part in config.data.split(",")]
    models = Path(config.model).parts[-3 if run_named(config.model) else -1:]
    parts = [*models, *Path(adapter).parts[-3:], *data, f"k{config.k}"]
    name = "-".join(part for part in parts if part not in ("runs", "checkpoints", MERGED, "/"))
    return replace(config, adapter=adapter, out=config.out or f"runs/eval-{name[:150]}")


def as_in_its_run(checkpoint: str, data: str) -> dict:
    """The settings of a checkpoint's run that its evaluation has too, where no flag says otherwise.

    It is evaluated on what the run was evaluated on, as often, unless `data` is named.
    Its --reward judges a file too, but no benchmark, whose results others must be able to compare.
    """
    folder = run_named(checkpoint)
    run = settings(folder)
    names = "template max_prompt_tokens max_tokens stop temperature".split()
    if Path(checkpoint, "adapter_config.json").exists():
        names.insert(0, "model")  # whose adapter it is
    own = dict(limit="eval_questions", k="eval_k") if data == "auto" else {}
    if data == "auto":
        data = run.get("eval_data", data)
    if data == HELD_OUT or is_own(data):
        names.append("columns")
    if data == HELD_OUT or all(map(is_own, data.split(","))):
        names += ["reward", "threshold"] * bool(run.get("reward"))
    elif run.get("reward"):
        print(f"{shown(folder)} was trained with --reward {shown(run['reward'])}: here math-verify "
              "judges, unless --reward names it")
    known = {name: run[name] for name in names if run.get(name, "") != ""}
    known |= {name: run[other] for name, other in own.items() if other in run}
    if known:
        print(f"where no flag says otherwise, the settings of {shown(folder)} are used: "
              f"{listed(known)}")
    return known | dict(data=data)
