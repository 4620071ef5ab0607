"""Extends parts/engine.py and parts/probe.py for TRL, for recipes/trl_ada.py."""
import importlib.metadata
import os
import random
import warnings

TESTED = "1.16.0"

installed = next((trl.version for trl in importlib.metadata.distributions(name="trl")), "none")
if installed != TESTED:
    raise SystemExit(f"recipes/trl_ada.py replaces private methods of TRL {TESTED}, but "
                     f"{installed} is installed: pip install --no-deps trl=={TESTED}")

import torch
from accelerate.utils import is_peft_model

from parts import engine as core
from parts.engine import EngineForSampler, configure_vllm
from parts.logprobs import Sequence
from parts.machine import build_for_cpu
from parts.policy import merged, sent_layers
from parts.probe import Probe, tolerances
from parts.routing_replay import ROUTERS

configure_vllm(build_for_cpu())  # before TRL imports it
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # for rollout_func; the version is pinned
warnings.filterwarnings("ignore", "TRL currently supports vLLM")  # TRL does not drive vLLM here
TEXTS, LONGEST = 8, 256  # number of the probe's texts, tokens of a text


def start_beside_others(model: str, options: dict, start=core.start):
    """vLLM, and with several processes on the GPU with the number of this process. Clusters and
    notebooks may set LOCAL_RANK for a single process, too, but then there is no group.
    """
    if "LOCAL_RANK" in os.environ and torch.distributed.is_initialized():
        options |= dict(distributed_executor_backend="external_launcher")
    return start(model, options)


core.start = start_beside_others


class SeededEngine(EngineForSampler):
    """Gives every answer a seed made of run, step, problem and number, so it does not depend on the
    process, and no two processes sample the same answer.
    """

    def __init__(self, engine, config, step: int):
        super().__init__(engine, config.max_tokens)
        self.when = f"{config.seed}/{step}"

    def submit(self, key, problem) -> None:
        place = f"{self.when}/{problem.id}/{key[1]}"
        super().submit(key, problem, seed=random.Random(place).getrandbits(63))


@torch.no_grad()
def trained_weights(model, gather):
    """Yields (name in the model's files, weight) of trained weights; for an adapter W + scale B A.

    Weights that FSDP2 or ZeRO-3 (`gather`) has split are joined one layer at a time, so all
    processes must request all layers.
    """
    if is_peft_model(model):
        for name, layer in sent_layers(model):
            with gather(list(layer.parameters())):
                for part, weight in merged(name, layer):
                    yield part, whole(weight)
        return
    # with duplicates, because vLLM's CPU build copies a head that shares its weight
    for name, weight in model.named_parameters(remove_duplicate=False):
        with gather([weight]):
            yield name, whole(weight)


def whole(weight):
    """A copy, joined from its shards with FSDP2. ZeRO-3 splits its weight again at once."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()


class PromptProbe(Probe):
    """The probe with a few prompts, the same ones in all processes, without sampling.

    Each takes one pass through the whole model of the trainer, as FSDP needs it.
    """

    def __init__(self, trainer):
        config, self.trl, self.engine = trainer.config, trainer, trainer.engine
        self.gap, self.rest = tolerances(config.dtype, config.rollout_dtype, config.kv_cache_dtype,
                                     trainer.model.config.model_type in ROUTERS)
        self.rows = [Sequence(problem.prompt_ids[:LONGEST], prompt_length=1)
                     for problem in trainer.problems[:TEXTS]]
        self.start = self.trainer(), self.of_engine()

    @torch.no_grad()
    def trainer(self):
        """log pi [T] of all tokens of the texts except the first ones, at temperature 1."""
        logprobs = []
        for row in self.rows:
            ids_T = torch.tensor(row.ids, device=self.trl.args.device)
            with self.trl.accelerator.autocast():
                logits_T = self.trl.model(input_ids=ids_T[None]).logits[0, :-1].float()
            logprobs.append(logits_T.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].cpu())
        return torch.cat(logprobs)
