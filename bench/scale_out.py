"""What a step costs on one card or on many, on paper; docs/elsewhere.md has some of the rows.

    python bench/scale_out.py               # 32 prompts for each GPU
    python bench/scale_out.py --formulas    # each column's formula

ESTIMATES: counted bytes and operations, over what the makers say of a card times SHARE. Nobody has
measured any of them.
"""
import inspect
import sys
from collections import namedtuple

Model = namedtuple("Model", "P layers width mlp kv")  # parameters; the widths of a layer's linears
MODELS = {  # Qwen2.5-1.5B and -7B, Llama-3-70B
    "1.5B": Model(1.54e9, 28, 1536, 8960, 2 * 128), "7B": Model(7.6e9, 28, 3584, 18944, 4 * 128),
    "70B": Model(70.6e9, 80, 8192, 28672, 8 * 128)}
Card = namedtuple("Card", "memory reads flops")  # bytes, bytes/s, dense 16-bit flop/s
CARDS = {"L4": Card(24e9, 0.30e12, 121e12), "A10": Card(24e9, 0.60e12, 125e12),
         "4090": Card(24e9, 1.01e12, 165e12), "H100": Card(79e9, 3.35e12, 990e12)}
NVLINK, NETWORK = 450e9, 50e9  # bytes/s of a GPU each way: within a machine of eight, beyond it
SHARE = dict(reads=0.8, flops=0.4, links=0.7)  # of what the makers say
OVERHEAD = 0.005  # seconds of an engine step beside its reads
PROMPT, LENGTH, LONGEST = 200, 900, 3000  # tokens: a prompt, a mean response, the longest
PROMPTS, DRAWN, KEPT, ROUNDS = 32, 14, 4, 4  # of a GPU; samples of a prompt on average; n; N
RANK, SLOTS = 16, 256  # of the adapter; --engine-sequences
ROWS = 4  # --micro-rows: responses per pass


# ------------------------------------------------------------------------------ the formulas
def adapter(m: Model) -> float:
    """Parameters of a LoRA: r (in + out) of q, k, v, o, gate, up and down of every layer."""
    q_o, k_v, mlp = 2 * 2 * m.width, 2 * (m.width + m.kv), 3 * (m.width + m.mlp)
    return m.layers * RANK * (q_o + k_v + mlp)


def resident(m: Model, G: int, full: bool) -> float:
    """Bytes of a GPU without cache and activations: engine 2P; trainer 2P, or with --full 16P/G
    (float32 weights, gradients and AdamW, cut up by FSDP2 or ZeRO-3); an adapter's 16A."""
    return 2 * m.P + (16 * m.P / G if full else 2 * m.P + 16 * adapter(m))


def slots(m: Model, G: int, full: bool, card: Card) -> float:
    """Responses at once: what is left of 0.9 of the memory, over 4 layers kv (prompt + length)."""
    free = 0.9 * card.memory - resident(m, G, full)
    return max(0.0, min(SLOTS, free / (4 * m.layers * m.kv * (PROMPT + LENGTH))))


def engine_step(m: Model, running: float, card: Card) -> float:
    """Seconds: (2P + cache read of the running) / memory speed + overhead."""
    cache = running * 4 * m.layers * m.kv * (PROMPT + LENGTH / 2)
    return (2 * m.P + cache) / (card.reads * SHARE["reads"]) + OVERHEAD


def chain(m: Model, card: Card) -> float:
    """Seconds of the longest chain: N rounds, each as long as the longest response, nearly alone.
    With many prompts there is always one, so more GPUs do not shorten it."""
    return ROUNDS * LONGEST * engine_step(m, 1, card)


def drawing(m: Model, G: int, full: bool, card: Card) -> float:
    """Seconds: the larger of the chain and drawn tokens of a GPU / tokens per second."""
    running = slots(m, G, full, card)
    tokens = PROMPTS * DRAWN * LENGTH
    return max(chain(m, card), tokens * engine_step(m, running, card) / running)


def arithmetic(m: Model, full: bool, card: Card) -> float:
    """Seconds: 8P operations per kept token with an adapter (pi_old 2, forward 2, again for
    checkpointing 2, backward 2), 10P with --full (backward 4)."""
    tokens = PROMPTS * KEPT * (PROMPT + LENGTH)
    return (10 if full else 8) * m.P * tokens / (card.flops * SHARE["flops"])


def sent(m: Model, G: int, full: bool) -> float:
    """Bytes of a GPU in a step. Adapter: its gradient's all-reduce, 2 * 4A (G-1)/G. --full:
    weights gathered for three passes of each micro-batch (2P each), gradients scattered (2P), and
    gathered once more for the engine (4P): (8P * micro-batches + 4P) (G-1)/G. Both: TRL's
    gather of kept texts for its log, 4 bytes a token of all others."""
    micro = max(1.0, PROMPTS * KEPT / ROWS)
    weights = 8 * m.P * micro + 4 * m.P if full else 2 * 4 * adapter(m)
    texts = 4 * PROMPTS * G * KEPT * (PROMPT + LENGTH)
    return (weights + texts) * (G - 1) / G


def link(G: int) -> float:
    """Bytes per second: NVLink within a machine of eight GPUs, the network beyond."""
    return SHARE["links"] * (NVLINK if G <= 8 else NETWORK)


# ------------------------------------------------------------------------------ the tables
def row(name: str, G: int, full: bool) -> str:
    m, card, kind = MODELS[name], CARDS["H100"], "full" if full else "LoRA"
    head = f"| {name} {kind} | {G} | {PROMPTS * G:,} "
    if slots(m, G, full, card) < 8:
        return f"{head}| | | | | | {resident(m, G, full) / 1e9:,.0f} GB do not fit |"
    times = {"drawing": drawing(m, G, full, card), "arithmetic": arithmetic(m, full, card),
             "sending": sent(m, G, full) / link(G)}
    worst = max(times, key=times.get)
    if times[worst] == chain(m, card):
        worst = "chain of rounds"
    rate = PROMPTS * DRAWN * LENGTH / sum(times.values())
    cells = sent(m, G, full) / 1e9, chain(m, card), *times.values(), rate
    one, *others = (f"{cell:,.{digits}f}" for cell, digits in zip(cells, (1, 0, 0, 0, 0, 0)))
    return f"{head}| {' | '.join([one, *others])}, {worst} |"


def one_card(name: str) -> str:
    """A step of the 1.5 B model with an adapter, and 200 of them."""
    m, card = MODELS["1.5B"], CARDS[name]
    times = drawing(m, 1, False, card), arithmetic(m, False, card)
    return f"{name} {times[0]:.0f} + {times[1]:.0f} s, {sum(times) / 18:.0f} h"


def main() -> None:
    if sys.argv[1:] == ["--formulas"]:
        for formula in (adapter, resident, slots, engine_step, chain, drawing, arithmetic, sent):
            print(f"{formula.__name__}: {' '.join(inspect.getdoc(formula).split())}")
        return
    print("A step (drawing + arithmetic), and 200 of them:", ", ".join(map(one_card, CARDS)))
    print("\n| model | GPUs | prompts | sent by each, GB | chain, s | drawing, s | arithmetic, s | "
          "sending, s | tokens/s per GPU, bottleneck |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, full in ((name, full) for name in MODELS for full in (False, True)):
        some = any(slots(MODELS[name], G, full, CARDS["H100"]) >= 8 for G in (1, 8, 64, 512))
        for G in (1, 8, 64, 512) if some else (512,):  # what fits nowhere, once
            print(row(name, G, full))


if __name__ == "__main__":
    main()
