"""Makes the settings of a run from its flags, with the defaults for its model and machine."""
from types import SimpleNamespace

from ada_sampler import SamplerConfig
from parts.config import OBJECTIVES, Flags, Settings, in_one_sentence, require_effect
from parts.data import default_data, default_eval_data, default_template
from parts.machine import (Machine, fit_in_memory, in_one_line, longest_step, measured_speeds,
                           this_machine)
from parts.models import TINY, Model, check_family, find_model, require_context
from parts.provenance import base_of
from parts.text import listed, shown

DEFAULTS = {  # for built-in models, small models, all others
    "max_prompt_tokens": (256, 256, 1024),
    "max_tokens": (64, 40, 3000),
    "batch_prompts": (24, 16, 32),
    "M": (8, 4, 8),
    "lr": (1e-3, 3e-4, 2e-5),
    "warmup_steps": (5, 2, 5),
    "steps": (100, 20, 200),
    "eval_every": (20, 10, 20),
    "eval_questions": (100, 72, 100),
    "eval_k": (8, 4, 8),
}
BUILT_IN, SMALL, LARGE = range(3)
ROOM = dict(max_tokens=160, max_prompt_tokens=640)  # a small model on other data
LONG_ANSWER = 256  # tokens, beyond which a CPU may need minutes for a step


def settle_here(flags: Flags) -> tuple[Settings, Model]:
    """The run's settings and what is known of its model, on this machine."""
    from parts.policy import merged_model  # which imports torch

    model = find_model(base_of(flags.model), merged_model(flags.model))
    check_family(model.config)
    with in_one_sentence("minirl.py"):
        machine = this_machine()
        config = settle(flags, machine, model)
    require_context(model, config.max_prompt_tokens, config.max_tokens)
    say_settings(flags, config, machine, model)
    return config, model


def say_settings(flags: Flags, config: Settings, machine: Machine, model: Model) -> None:
    """Print the settings that follow from the size of the model and from the machine."""
    if size_of(model, machine) == SMALL:
        chosen = {name: getattr(config, name) for name in by_size(flags.data, SMALL)
                  if getattr(flags, name) is None}
        if chosen:
            print(f"this model is small, so its settings are {listed(chosen)}")
    print(in_one_line(config, machine))
    long = size_of(model, machine) == LARGE or config.max_tokens > LONG_ANSWER
    if machine.on_cpu and model.base not in TINY and long:
        print(longest_step(config, model.empty.num_parameters(), measured_speeds()))


def settle(flags: Flags, machine: Machine, model: Model) -> Settings:
    """The settings of a run: the flags that were given, else defaults for machine and model.

    Raises ValueError, one sentence, for settings that contradict each other, and SystemExit if the
    run would not fit into the memory.
    """
    from parts.routing_replay import is_supported  # which imports torch

    mixture = is_supported(model.config)
    values = defaults_of(flags, machine, model)
    if mixture:  # MoE: the best in MiniRL's paper (section 4)
        values["replay"] = {1: "none", 2: "r2"}.get(flags.mini_batches, "r3")
    values |= {name: value for name, value in vars(flags).items() if value is not None}
    if machine.on_cpu:
        values["micro_tokens"] = fit_in_memory(
            SimpleNamespace(**values), model.empty, machine.memory)
    config = Settings(**values)
    config.validate()
    if config.batch_prompts < config.mini_batches:
        raise ValueError(f"mini_batches = {config.mini_batches} is more than the "
                         f"{config.batch_prompts} prompts of a step, and each needs at least one")
    require_effect({"replay"}, [(
        "replay", config.replay == "none" or mixture,
        f"with {shown(model.path)}, which is no MoE model that can be replayed")])
    return config


def defaults_of(flags: Flags, machine: Machine, model: Model) -> dict:
    """The defaults that follow from objective, machine and model."""
    size, dtype = size_of(model, machine), flags.dtype or machine.dtype
    values = by_size(flags.data, size)
    if flags.sampler != SamplerConfig.sampler:
        values["M"] = SamplerConfig.M
    values["advantage"], values["length_norm"] = OBJECTIVES[flags.objective]
    data = default_data(model.base, size == SMALL)
    return values | dict(
        replay="none", data=data, eval_data=default_eval_data(flags.data or data),
        template=default_template(model.base, size == SMALL, flags.reward),
        dtype=dtype, rollout_dtype=dtype,
        sync="merge" if machine.on_cpu or dtype == "float32" else "adapter",
        micro_tokens=4096 if model.base in TINY else machine.micro_tokens)


def size_of(model: Model, machine: Machine) -> int:
    """BUILT_IN, SMALL or LARGE, by the number of parameters.

    Billions are rounded as in models' names, because Qwen2.5-0.5B has 0.494. On a CPU, SMALL
    includes Qwen3-0.6B, because 3,000 tokens per answer would take weeks there.
    """
    if model.base in TINY:
        return BUILT_IN
    billions = round(model.empty.num_parameters() / 1e9, 1)
    return SMALL if billions < 0.5 or machine.on_cpu and billions <= 0.7 else LARGE


def by_size(data: str | None, size: int) -> dict:
    """The DEFAULTS for models of this size, with this --data."""
    values = {name: of_sizes[size] for name, of_sizes in DEFAULTS.items()}
    return values | (ROOM if size == SMALL and data not in (None, "builtin-words") else {})
