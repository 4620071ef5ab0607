"""Every setting of an evaluation: its default, its meaning, what contradicts what."""
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ada_sampler import check_ranges, limited
from parts.adapter import find_adapter
from parts.data import default_data, default_template
from parts.flags import in_one_sentence, parse_flags
from parts.hardware import require_effect
from parts.models import TINY
from parts.own_reward import require_function
from parts.prompts import require_template
from parts.sources import require_files

ABOUT = "avg@k and pass@k with 95 % intervals, on named benchmarks, files or the built-in problems."


@dataclass
class ModelSettings:
    """What is evaluated."""

    model: str = "tiny"
    """tiny, a name such as Qwen2.5-Math-1.5B, a hub id or a folder"""
    adapter: str = ""
    """LoRA adapter: a PEFT folder, or a run (its last checkpoint)"""


@dataclass
class DataSettings:
    """On what."""

    data: str = "auto"
    """benchmarks, reinforce-ada, hub ids, files, builtin; joined by commas"""
    problem_key: str = ""
    """column with the problem, if it is not found by itself"""
    answer_key: str = ""
    """column with the gold answer, if it is not found by itself"""
    reward: str = ""
    """FILE.py:FUNCTION gives the reward, in the place of math-verify; no gold answers are needed"""
    threshold: float = limited(0.7, least=-10**6, most=10**6)
    """with --reward: one above it is correct, for pass@k"""
    limit: int = limited(0, least=0, most=10**9)
    """only the first so many problems of each set; 0 = all"""


@dataclass
class ProtocolSettings:
    """How: numbers are comparable only where all of this is equal."""

    k: int = limited(32, least=1, most=10**5)
    """samples per problem"""
    template: str = "auto"
    """a .jinja or .json file, or reinforce-ada, qwen25-math-cot, qwen-boxed, llama, chat, none"""
    system: str = ""
    """the prompt's system turn, in the place of the template's own"""
    temperature: float = limited(1.0, least=0, most=100)
    """sampling temperature; 0 = greedy, with --k 1"""
    max_tokens: int = limited(0, least=0, most=10**6)
    """longest response; 0 = auto"""
    max_prompt_tokens: int = limited(0, least=0, most=10**6)
    """longer prompts are dropped; 0 = auto"""
    stop: str = "auto"
    """tokens that end a response, besides the model's own end"""
    seed: int = limited(0, least=0, most=2**32 - 1)
    """decides the samples"""


@dataclass
class OutputSettings:
    """Where the results go."""

    out: str = ""
    """folder of this evaluation; empty = runs/eval-MODEL-DATA-kK"""
    against: str = ""
    """folder of a finished evaluation of the same problems"""


@dataclass
class HardwareSettings:
    """What it runs on."""

    sync: Literal["auto", "adapter", "merge"] = "auto"
    """how the engine gets the adapter; auto: adapter on a GPU, merge on a CPU"""
    engine_memory: float = limited(0.85, above=0, below=1)
    """share of the GPU's memory for the engine"""
    engine_sequences: int = limited(256, least=1, most=10**4)
    """responses written at the same time"""
    graders: int = limited(2, least=1, most=256)
    """worker processes that run math-verify"""


@dataclass
class Config(ModelSettings, DataSettings, ProtocolSettings, OutputSettings, HardwareSettings):
    """Every flag of `python eval.py`. Zero or "auto" means: what fits the model, see `parse`."""

    def validate(self) -> None:
        """Raises ValueError, one sentence, for what cannot work."""
        check_ranges(self)
        if self.temperature == 0 and self.k > 1:
            raise ValueError(
                "temperature 0 gives k equal samples: use --k 1, or a temperature above 0")
        if 0 < self.temperature < 0.01:
            raise ValueError("temperature must be 0 (greedy) or at least 0.01, "
                             f"not {self.temperature}: vLLM would take 0.01")
        if not self.reward and self.threshold != Config.threshold:
            raise ValueError("threshold has no effect without reward: math-verify gives 0 or 1")
        if self.reward and self.answer_key:
            raise ValueError("answer_key has no effect with reward, which is given every column")
        for name in ("model", "data", "template", "stop"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")


def parse(argv: list[str] | None = None) -> Config:
    """Flags to Config, with what depends on the model filled in.

    Ends the program with code 2 and one sentence if they cannot work.
    """
    with in_one_sentence("eval.py"):
        config = parse_flags(Config, argv, prog="eval.py", description=ABOUT)
        config.validate()
        require_effect(config)
    tiny, adapter = config.model in TINY, find_adapter(config.adapter)
    auto = dict(
        data=default_data(config.model, for_training=False),
        template=default_template(config.model, config.reward),
        max_tokens=64 if tiny else 3000,
        max_prompt_tokens=256 if tiny else 1024)
    unset = [name for name in auto if getattr(config, name) in ("auto", 0)]
    config = replace(config, **{name: auto[name] for name in unset})
    require_files(config.data)
    require_function(config.reward)
    require_template(config.template)
    data = [Path(part).stem for part in config.data.split(",")]
    parts = [Path(config.model).name, *Path(adapter).parts[-3:], *data, f"k{config.k}"]
    name = "-".join(part for part in parts if part not in ("runs", "checkpoints", "/"))
    return replace(config, adapter=adapter, out=config.out or f"runs/eval-{name[:150]}")
