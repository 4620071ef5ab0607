"""What recipes/trl_ada.py adds to parts/engine.py and parts/probe.py so that they serve TRL."""
import importlib.metadata
import os
import random
import warnings

TESTED = "1.16.0"

installed = next((trl.version for trl in importlib.metadata.distributions(name="trl")), "none")
if installed != TESTED:
    raise SystemExit(f"recipes/trl_ada.py replaces private methods of TRL {TESTED}, and "
                     f"installed is {installed}: pip install --no-deps trl=={TESTED}")

import torch
from accelerate.utils import is_peft_model

from parts import engine as core
from parts.engine import EngineForSampler, configure_vllm
from parts.logprobs import Sequence
from parts.machine import build_for_cpu
from parts.policy import merged, sent_layers
from parts.probe import Probe, tolerances
from parts.routing_replay import is_supported

configure_vllm(build_for_cpu())  # before TRL imports it
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func: the version is pinned
warnings.filterwarnings("ignore", "TRL currently supports vLLM")  # it does not drive it here
TEXTS, LONGEST = 8, 256  # of the probe; tokens of a text


def start_beside_others(model: str, options: dict, start=core.start):
    """vLLM; in one of several processes, on the GPU of this process's number. Clusters and
    notebooks may set LOCAL_RANK for a single process, too, but it has no group.
    """
    if "LOCAL_RANK" in os.environ and torch.distributed.is_initialized():
        options |= dict(distributed_executor_backend="external_launcher")
    return start(model, options)


core.start = start_beside_others


class SeededEngine(EngineForSampler):
    """Gives every sample a seed of its own, made of what it is: it does not depend on which process
    draws it, and no two processes draw the same.
    """

    def __init__(self, engine, config, step: int):
        super().__init__(engine, config.max_tokens)
        self.when = f"{config.seed}/{step}"

    def submit(self, key, problem) -> None:
        place = f"{self.when}/{problem.id}/{key[1]}"
        super().submit(key, problem, seed=random.Random(place).getrandbits(63))


@torch.no_grad()
def trained_weights(model, gather):
    """Yields (name in the model's files, weight) of what is trained; of an adapter W + scale B A.

    What FSDP2 or ZeRO-3 (`gather`) has cut up is put together, one layer at a time: all processes
    must ask for all layers.
    """
    if is_peft_model(model):
        for name, layer in sent_layers(model):
            with gather(list(layer.parameters())):
                for part, weight in merged(name, layer):
                    yield part, whole(weight)
        return
    # duplicates: vLLM's CPU build has a copy of its own of a head that shares its weight
    for name, weight in model.named_parameters(remove_duplicate=False):
        with gather([weight]):
            yield name, whole(weight)


def whole(weight):
    """A copy, put together from its shards if it is of FSDP2: ZeRO-3 takes its own back at once."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()


class PromptProbe(Probe):
    """parts/probe.py's, of a few prompts: all processes have the same, and nothing is drawn.

    One pass for each, through the whole of the trainer's model, as FSDP wants it.
    """

    def __init__(self, trainer):
        config, self.trl, self.engine = trainer.config, trainer, trainer.engine
        self.gap, self.rest = tolerances(config.dtype, config.rollout_dtype, config.kv_cache_dtype,
                                     is_supported(trainer.model.config))
        self.rows = [Sequence(problem.prompt_ids[:LONGEST], prompt_length=1)
                     for problem in trainer.problems[:TEXTS]]
        self.start = self.trainer(), self.of_engine()

    @torch.no_grad()
    def trainer(self):
        """log pi [T] of all tokens of the texts but their first, at temperature 1."""
        logprobs = []
        for row in self.rows:
            ids_T = torch.tensor(row.ids, device=self.trl.args.device)
            with self.trl.accelerator.autocast():
                logits_T = self.trl.model(input_ids=ids_T[None]).logits[0, :-1].float()
            logprobs.append(logits_T.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].cpu())
        return torch.cat(logprobs)
