"""What a run of Qwen2.5-Math-1.5B takes on a card, counted without one: the tables of docs/gpu.md.

    python bench/cards.py          # by card: memory, tokens, and an estimate of a step's seconds
    python bench/cards.py moved    # what the trainer moves and needs, as it is and otherwise

Bytes are counted: the trainer's own code runs on tensors without contents (torch's device "meta").
Engine steps are counted too: the real sampler draws, with the lengths and verdicts of bench/gpu.py.
Seconds are ESTIMATES: what the makers say of memory and arithmetic, times SHARE, and guesses for
what an engine step and a sync take besides. Nobody has measured any of them.
"""
import contextlib
import functools
import random
import sys
import weakref
from collections import namedtuple
from types import SimpleNamespace

from common import ROOT  # and one thread, and the path
from gpu import FULL, coins, long_tailed

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ada_sampler import collect
from parts import logprobs, machine, models, policy
from parts.config import Config

PAGE = ROOT / "docs/gpu.md"
GB = 2**30
Card = namedtuple("Card", "capability gib bytes flops")  # memory: GiB, bytes/s; dense 16-bit flop/s
CARDS = {
    "T4": Card((7, 5), 14.6, 0.32e12, 65e12), "L4": Card((8, 9), 22.0, 0.30e12, 121e12),
    "A10": Card((8, 6), 22.0, 0.60e12, 125e12), "4090": Card((8, 9), 23.6, 1.01e12, 165e12),
    "A100 40": Card((8, 0), 39.4, 1.56e12, 312e12), "A100 80": Card((8, 0), 79.2, 2.04e12, 312e12),
    "H100 80": Card((9, 0), 79.2, 3.35e12, 990e12)}
SHARE = dict(bytes=0.8, flops=0.4)  # of what the makers say
HOST, SYNC = 0.005, 2.0  # seconds of an engine step beside its reads; of a sync and its probe
LAYERS, WEIGHTS = FULL["size"]["num_hidden_layers"], 1.54e9
TOKEN = 2 * 2 * LAYERS * 2 * 128  # bytes of a token in the cache: keys and values of 2 heads, bf16
ENGINE = 4.4 * GB  # the engine's weights, its activations over 8,192 tokens, logits
DRIVER = 0.5 * GB
CHUNK = logprobs.CHUNK_BYTES // (4 * FULL["vocabulary"])  # tokens of the head at a time
MANY = 128  # prompts
CONTEXT = 4024  # a row of full length: 1,024 tokens of prompt, 3,000 of response


# --------------------------------------------------------------------- bytes, on tensors of no size
class Count(TorchDispatchMode):
    """moved: bytes that operations read and write. live, peak: bytes of tensors that exist."""

    def __init__(self):
        super().__init__()
        self.moved = self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]
                       for x in ((args, kwargs), out))
        known = {t.untyped_storage()._cdata for t in given}
        new = {t.untyped_storage()._cdata: t.untyped_storage() for t in made
               if t.untyped_storage()._cdata not in known}  # none: a view
        for storage in new.values():
            self.live += storage.nbytes()
            weakref.finalize(storage, self.forget, storage.nbytes())
        self.peak = max(self.peak, self.live)
        if (new or func._schema.is_mutable) and "empty" not in func.name():
            self.moved += sum(t.numel() * t.element_size() for t in [*given, *made])
        return out

    def forget(self, size: int) -> None:
        self.live -= size


@contextlib.contextmanager
def replaced(where, name: str, value):
    real = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, real)


def fused(q, k, v, attn_mask=None, is_causal=False, scale=None, **_):
    """As a card's fused kernels: no score is stored. They take no mask."""
    assert attn_mask is None and is_causal
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, True, scale=scale)[0]


def card_product(h_T, weight):
    """As `float32_product` on a card."""
    return torch.mm(h_T, weight.T, out_dtype=torch.float32)


def trainer(layers: int, adapter: str, checkpointing: bool):
    """The trainer's model at 1.5B's shape, with so many layers.

    adapter: bfloat16 as in a run, float32 as PEFT would, or none.
    """
    from transformers import Qwen2Config

    config = Qwen2Config(vocab_size=FULL["vocabulary"], max_position_embeddings=4096,
                         tie_word_embeddings=True, attn_implementation="sdpa",
                         **FULL["size"] | dict(num_hidden_layers=layers))
    torch.set_default_dtype(torch.bfloat16)
    model = models.own_class(config)(config)
    torch.set_default_dtype(torch.float32)
    model.to = lambda device: model
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(policy, "load_model", lambda *_: model))
        if adapter == "float32":
            stack.enter_context(replaced(policy, "adapt_in_bfloat16", lambda _: None))
        made = policy.load_policy("", dtype="bfloat16", rank=16, alpha=32, seed=0, device="cpu",
                                  checkpointing=checkpointing)
    if adapter == "none":
        made.base_model.disable_adapter_layers()
    return made


def a_pass(layers: int, rows: int, adapter="bfloat16", checkpointing=True, length=CONTEXT):
    """(bytes that `layers` layers move forward and backward, that the head moves, peak bytes)."""
    with (torch.device("meta"), Count() as count,
          replaced(logprobs, "float32_product", card_product),
          replaced(functional, "scaled_dot_product_attention", fused)):
        made = trainer(layers, adapter, checkpointing)
        model, count.moved = made.get_base_model(), 0
        ids = torch.zeros((rows, length), dtype=torch.long)
        states = model.model.embed_tokens(ids).requires_grad_()
        h = model.model(inputs_embeds=states, attention_mask={"full_attention": None})
        layers_moved, count.moved = count.moved, 0
        lp_T, _ = logprobs.ChunkedLogprobs.apply(
            h.last_hidden_state.flatten(0, 1), logprobs.head_of(model), ids.flatten(), 1.0, CHUNK)
        head_moved, count.moved = count.moved, 0
        lp_T.sum().backward()
        return layers_moved + count.moved, head_moved, count.peak


@functools.cache
def moved(adapter="bfloat16", checkpointing=True) -> float:
    """Bytes per token of a layer."""
    one, two = (a_pass(n, 1, adapter, checkpointing, 1024)[0] for n in (1, 2))
    return (two - one) / 1024


@functools.cache
def head_moved() -> float:
    """Bytes per token of the head."""
    return a_pass(1, 1, length=10 * CHUNK)[1] / (10 * CHUNK)


@functools.cache
def needed(rows: int, adapter="bfloat16", checkpointing=True) -> float:
    """GiB of the trainer with `rows` rows of full length. Every layer adds the same."""
    one, two = (a_pass(n, rows, adapter, checkpointing)[2] for n in (1, 2))
    adapters = 12 * 18.5e6  # gradient and AdamW's two, in float32
    return (one + (LAYERS - 1) * (two - one) + adapters) / GB


def show_moved() -> str:
    def pair(value):
        return " / ".join(value(on) for on in (True, False))

    layer = ", ".join(f"{how} {pair(lambda on: f'{moved(how, on) / 1e6:.1f}')}"
                      for how in ("float32", "bfloat16", "none"))
    rows = ", ".join(f"{n} {pair(lambda on: f'{needed(n, checkpointing=on):.0f}')}"
                     for n in (1, 2, 4))
    return (f"MB per token of a layer, by its adapter, checkpointing on / off: {layer}\n"
            f"MB per token of the head, {CHUNK} at a time: {head_moved() / 1e6:.1f}\n"
            f"GiB needed, by rows of {CONTEXT:,} tokens, checkpointing on / off: {rows}")


# ------------------------------------------------------------------------------ a step's rollouts
class Slots:
    """An engine that only counts: a step gives a token to every running request."""

    def __init__(self, slots: int, cache: int):
        self.slots, self.cache, self.waiting, self.running = slots, cache, [], {}
        self.steps = self.tokens = self.read = 0  # read: tokens of the cache, in all steps

    def submit(self, key, problem) -> None:
        self.waiting.append((key, long_tailed(random.Random(f"length/{key}"), FULL["typical"],
                                              FULL["longest"])))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list:
        held = sum(FULL["prompt"] + done for done, _ in self.running.values())
        while self.waiting and len(self.running) < self.slots and held < self.cache:
            key, length = self.waiting.pop(0)
            self.running[key] = 0, length
            held += FULL["prompt"]
        self.steps, self.tokens = self.steps + 1, self.tokens + len(self.running)
        self.read += held
        self.running = {key: (done + 1, length) for key, (done, length) in self.running.items()}
        ended = [key for key, (done, length) in self.running.items() if done == length]
        return [(key, SimpleNamespace(token_ids=range(self.running.pop(key)[1]))) for key in ended]


@functools.cache
def rollouts(prompts: int, slots: int, cache: int):
    """(the engine after a step's rollouts, tokens of the kept rows)."""
    engine, config = Slots(slots, cache), Config()
    groups = collect([None] * prompts, config, engine, coins(SimpleNamespace(prompts=prompts)))
    kept = [s.rollout for group in groups for s in group.kept]
    return engine, sum(FULL["prompt"] + len(rollout.token_ids) for rollout in kept)


# --------------------------------------------------------------------------------------- by card
def settings_on(card: Card) -> SimpleNamespace:
    """What the project chooses on this card, by its own functions."""
    major, minor = card.capability
    seen = SimpleNamespace(major=major, minor=minor, total_memory=card.gib * GB)
    with (replaced(machine, "card", lambda: seen),
          replaced(machine, "build_for_cpu", lambda: False)):
        return SimpleNamespace(dtype=machine.default_dtype(), tokens=machine.default_micro_tokens())


def row(name: str) -> str:
    card, config = CARDS[name], Config()
    chosen = settings_on(card)
    adapter = "bfloat16" if chosen.dtype == "bfloat16" else "float32"
    share = config.engine_memory * card.gib * GB
    cache = int((share - ENGINE) / TOKEN)
    need = needed(chosen.tokens // CONTEXT, adapter)
    left = card.gib - (share + DRIVER) / GB
    speed, arithmetic = SHARE["bytes"] * card.bytes, SHARE["flops"] * card.flops
    per_token = LAYERS * moved(adapter) + head_moved()

    def seconds(prompts):
        engine, kept = rollouts(prompts, config.engine_sequences, cache)
        sampling = engine.steps * HOST + (2 * WEIGHTS * engine.steps + TOKEN * engine.read) / speed
        training = kept * (per_token / speed + 6 * WEIGHTS / arithmetic)
        return sampling, training, engine.tokens / engine.steps

    (s, t, running), (s4, t4, running4) = seconds(32), seconds(MANY)
    gain = MANY / (s4 + t4 + SYNC) / (32 / (s + t + SYNC))
    return (f"|{name}|{chosen.tokens:,}|{share / GB:.1f}: {cache / 1000:,.0f}k|"
            f"{need:.1f} of {left:.1f}|{s:.0f} + {t:.0f} + {SYNC:.0f}|"
            f"{running:.0f}, {running4:.0f}|{gain:.1f}|")


@functools.cache
def table() -> str:
    head = ("|card|tokens per pass|engine's GiB: its cache|trainer needs, GiB|"
            f"seconds|slots busy with 32 prompts, with {MANY}|with {MANY}: times as many prompts "
            "per second|")
    return "\n".join([head, "|" + "---|" * 7, *map(row, CARDS)])


if __name__ == "__main__":
    print(show_moved() if sys.argv[1:] == ["moved"] else table())
