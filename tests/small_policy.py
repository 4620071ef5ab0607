"""A policy small enough for hundreds of updates, groups of random rows."""
import copy
import functools
import random
from types import SimpleNamespace

import torch

import minirl
from minirl import Config, update
from parts.policy import loss_scale


def tiny_policy(seed=0):
    """A LoRA policy in float64, of the built-in model's architecture but smaller, on 300 tokens.

    A new one at each call, and torch's random state as if it had just been built.
    """
    policy, state = built_policy(seed)
    torch.set_rng_state(state)
    return copy.deepcopy(policy)


@functools.cache
def built_policy(seed):
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=300, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(Qwen2Config(**shape)).double()
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    for name, p in policy.named_parameters():
        if "lora_B" in name:  # zero at the start, which would hide the gradient of A
            p.data.normal_(0, 0.05)
    policy.loss_scale = loss_scale("float64", "cpu")
    return policy, torch.get_rng_state()


def random_groups(count: int, seed: int):
    """Groups as the sampler returns them, with responses of 1 to 20 random tokens."""
    rng, groups = random.Random(seed), []
    for _ in range(count):
        rows = []
        for _ in range(4):
            ids = [rng.randrange(300) for _ in range(rng.randint(1, 20))]
            rollout = SimpleNamespace(
                token_ids=ids, logprobs=[-5.8 + 0.2 * rng.random() for _ in ids], routes=None)
            rows.append((SimpleNamespace(rollout=rollout), rng.choice([-0.5, 0.5, 0.0])))
        problem = SimpleNamespace(prompt_ids=[rng.randrange(300) for _ in range(rng.randint(2, 9))])
        groups.append(SimpleNamespace(problem=problem, kept=rows, rows=lambda rows=rows: rows))
    return groups


def gradients_of(policy, groups, **changes):
    """The gradient that `update` computes (the optimizer only records it)."""
    recorded = []

    def record(policy, *_):
        recorded.append({n: p.grad.clone() for n, p in policy.named_parameters()
                         if p.grad is not None})
        policy.zero_grad()
        return 0.0

    config = Config(**dict(max_tokens=20, micro_tokens=4096) | changes)
    original, minirl.optimizer_step = minirl.optimizer_step, record
    try:
        optimizer = SimpleNamespace(param_groups=[{"lr": 0}])
        metrics = update(policy, optimizer, None, groups, config, random.Random(0))
    finally:
        minirl.optimizer_step = original
    return recorded, metrics


def close(a, b, tolerance=1e-9):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=tolerance, msg=name)
