"""The real vLLM beside the trainer's policy, and how far the two are apart."""
import contextlib
import gc
import random

import pytest
import torch
from transformers import AutoConfig

from parts import models
from parts.engine import Engine, configure_vllm
from minirl import Row
from parts.logprobs import token_logprobs
from parts.machine import build_for_cpu


def inspect_here() -> None:
    """vLLM asks a new process what a class of models can do, which takes 15 seconds for each."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda ask: ask()


@contextlib.contextmanager
def serve(folder, **options):
    """An engine that ends before the next one starts, as vLLM's groups belong to the process."""
    configure_vllm(build_for_cpu())  # before vllm is imported
    inspect_here()
    if options.get("routes"):  # an engine before it may have been dense: no group for experts
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    usual = dict(max_model_len=128, max_num_seqs=64, dtype="float32",
                 architecture=AutoConfig.from_pretrained(str(folder)))
    engine = Engine(str(folder), **usual | options)
    try:
        yield engine
    finally:
        del engine.llm, engine
        gc.collect()


def smollm() -> str:
    """SmolLM2's folder, made once into the project's own cache; the test is skipped without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "ask_hub", lambda *_: None)
        try:
            return models.fetch_smollm()
        except SystemExit as reason:
            pytest.skip(str(reason))


def rows_of(prompts: list, rollouts: list) -> list[Row]:
    """The samples of each prompt (token ids) as the trainer sees them."""
    return [Row(ids=ids + r.token_ids, prompt_length=len(ids), mu_logprobs=r.logprobs,
                coefficient=0.0, routes=r.routes)
            for ids, group in zip(prompts, rollouts) for r in group]


def gap(policy, rows: list[Row], temperature: float = 1.0):
    """|log mu - log pi| of every token of these rows [T]."""
    with torch.no_grad():
        pi_T = token_logprobs(policy, rows, temperature)[0]
    return (pi_T - torch.tensor([x for row in rows for x in row.mu_logprobs])).abs()


def random_ids(count: int, seed: int = 0, words: int = 300) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(words) for _ in range(count)]
