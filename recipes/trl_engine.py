"""TRL's vLLM as recipes/trl_ada.py uses it: it draws, gets new weights, and is asked for them."""
import ctypes
import importlib.metadata
import os
import random
import warnings

TESTED = "1.16.0"


def require_trl() -> None:
    """Raises SystemExit unless TRL is installed in the version that this was tested with."""
    try:
        found = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != TESTED:
        raise SystemExit(f"recipes/trl_ada.py replaces private methods of TRL {TESTED}, and "
                         f"installed is {found}: pip install --no-deps trl=={TESTED}")


require_trl()

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, is_peft_model

from parts.engine import Engine, configure_vllm
from parts.machine import build_for_cpu
from parts.probe import CLEAR, LONGEST, limits, rms, slope
from parts.routing_replay import is_supported

configure_vllm(build_for_cpu())  # before TRL imports it
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func: the version is pinned
if build_for_cpu():  # where TRL leaves vLLM alone
    warnings.filterwarnings("ignore", "TRL currently supports vLLM")

from trl.generation.vllm_generation import VLLMGeneration


def allow_fsdp_on_cpu() -> None:
    """Accelerate ignores FSDP on a CPU, without a word; torch has it there too."""
    usual = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **rest):
        usual(self, *args, fsdp_plugin=fsdp_plugin, **rest)
        if fsdp_plugin and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


if build_for_cpu():
    allow_fsdp_on_cpu()


# ------------------------------------------------------------------------------ samples
class BorrowedEngine(Engine):
    """parts/engine.py's submit, step and busy over TRL's vLLM.

    Every sample has a seed of its own, made of what it is: it does not depend on which process
    draws it, and no two processes draw the same.
    """

    def __init__(self, llm, stop_token_ids: list[int], config):
        self.config, self.when = config, 0
        self.drive(llm, config.temperature, stop_token_ids)

    def submit(self, key, problem) -> None:
        place = f"{self.config.seed}/{self.when}/{problem.id}/{key[1]}"
        super().submit(key, problem.prompt_ids, self.config.max_tokens,
                       seed=random.Random(place).getrandbits(63))


# ------------------------------------------------------------------------------ weights
class Colocated(VLLMGeneration):
    """TRL's vLLM in the trainer's process, with as many responses at once as --engine-sequences.

    TRL would merge an adapter into the trainer's own weights and subtract it again, at every sync:
    in 16 bits the rounding errors add up.
    """

    sequences = 256

    def _init_vllm(self) -> None:
        self.max_num_seqs = self.sequences
        super()._init_vllm()

    def _iter_named_params(self):
        yield from trained_weights(self.model, self._dist.gather_params)


class ColocatedOnCpu(Colocated):
    """TRL cannot hand weights to vLLM's CPU build: parts/engine.py starts and fills it."""

    def _init_vllm(self) -> None:
        self.llm = Engine(
            self.model.name_or_path, max_model_len=self.max_model_length,
            max_num_seqs=self.sequences, dtype=str(self.model.dtype).removeprefix("torch.")).llm

    def sync_weights(self) -> None:
        weights = dict(weights_iterator=self._iter_named_params())
        self.llm.collective_rpc("reload_weights", kwargs=weights)
        self.llm.reset_prefix_cache()
        ctypes.CDLL(None).malloc_trim(0)  # else up to 1 GB stays in gaps between buffers


@torch.no_grad()
def trained_weights(model, gather):
    """Yields (name in the model's files, weight) of what is trained; of an adapter W + scale B A.

    The sum is a new tensor. What FSDP or ZeRO-3 (`gather`) has cut up is put together, one layer
    at a time: all processes must ask for all layers.
    """
    if not is_peft_model(model):
        # vLLM's CPU build has a copy of its own of a head that shares its weight.
        for name, weight in model.named_parameters(remove_duplicate=not build_for_cpu()):
            with gather([weight]):
                yield name, whole(weight)
        return
    for name, layer in model.base_model.model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            with gather(list(layer.parameters())):
                W, bias = whole(layer.base_layer.weight), layer.base_layer.bias
                A, B = (whole(part["default"].weight) for part in (layer.lora_A, layer.lora_B))
                yield f"{name}.weight", W + (layer.scaling["default"] * (B @ A)).to(W.dtype)
                if bias is not None:  # vLLM builds a layer anew from what it is sent
                    yield f"{name}.bias", whole(bias)


def whole(weight):
    """A copy, put together from its shards if it is of FSDP2: ZeRO-3 takes its own back at once."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()


# ------------------------------------------------------------------------------ have they arrived?
class Probe:
    """Do engine and trainer give a few texts the same log-probs, and change them alike?

    `ask` it after every sync: it compares before the first step, and then until a change is clear.
    """

    def __init__(self, groups: list):
        self.texts = [group.problem.prompt_ids + sample.rollout.token_ids[:LONGEST]
                      for group in groups[:4] for sample in group.pool[:2]]
        self.before, self.answered = None, False

    def ask(self, trainer) -> None:
        """Raises SystemExit, one sentence, if the answer is no."""
        model = trainer.engine.llm.llm_engine.model_config
        bounds = limits(trainer.config.dtype, str(model.dtype).removeprefix("torch."), "auto",
                        is_supported(model.model))
        theirs = trainer.engine.prompt_logprobs(self.texts)
        now = self.of_trainer(trainer), torch.tensor(sum(theirs, []))
        gap_T = (now[0] - now[1]).abs()
        if not getattr(gap_T, bounds.statistic)() < bounds.gap:  # also when it is NaN
            raise SystemExit(f"Engine and trainer disagree, by {gap_T.mean():.1e} nats on average: "
                             "training would be wrong. Try --dtype float32.")
        self.before = self.before or now
        x_T, y_T = (after - before for after, before in zip(now, self.before))
        noise, moved = max(rms(self.before[0] - self.before[1]), 1e-5), rms(x_T)
        signal = torch.tensor([moved / noise], device=trainer.args.device)
        if trainer.accelerator.gather(signal).min() < CLEAR:
            return  # in all processes alike: those of FSDP go through the model together
        b, error = slope(x_T, y_T)
        if not abs(b - 1) <= bounds.slope + (2 * noise / moved)**2 + 5 * error:  # 5: many processes
            raise SystemExit("The new weights do not reach the engine: its log-probs changed by "
                             f"{b:.2f} +- {error:.2f} times what the trainer's did.")
        print(f"probe: the engine follows the trainer, {b:.3f} +- {error:.3f}")
        self.answered = True

    @torch.no_grad()
    def of_trainer(self, trainer):
        """log pi [T] of all tokens of the texts but their first, at temperature 1."""
        found = []
        for text in self.texts:
            ids_T = torch.tensor(text, device=trainer.args.device)
            with trainer.accelerator.autocast():
                logits_T = trainer.model(input_ids=ids_T[None]).logits[0, :-1].float()
            found.append(logits_T.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].cpu())
        return torch.cat(found)
