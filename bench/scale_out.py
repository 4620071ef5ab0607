"""What a step costs on one card or on many, on paper; docs/elsewhere.md has some of the rows.

    python bench/scale_out.py

ESTIMATES: counted bytes and operations, over what the makers say of a card times SHARE, for 32
prompts on each GPU. Nobody has measured any of them. `step` has the formulas.
"""
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
GPUS = (1, 8, 64, 512)


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


def step(m: Model, G: int, full: bool, card: Card) -> dict[str, float]:
    """Seconds of the longest chain of rounds and of a step's parts, and bytes that a GPU sends."""
    def engine_step(running):  # the weights and the cache of the running are read
        cache = running * 4 * m.layers * m.kv * (PROMPT + LENGTH / 2)
        return (2 * m.P + cache) / (card.reads * SHARE["reads"]) + OVERHEAD

    # N rounds, each as long as the longest response, nearly alone. With many prompts there is
    # always one, so more GPUs do not shorten it.
    chain = ROUNDS * LONGEST * engine_step(1)
    running = slots(m, G, full, card)
    drawing = max(chain, PROMPTS * DRAWN * LENGTH * engine_step(running) / running)
    # operations per kept token: pi_old 2P, forward 2P, again for checkpointing 2P, backward 2P or,
    # of all weights, 4P
    tokens = PROMPTS * KEPT * (PROMPT + LENGTH)
    arithmetic = (10 if full else 8) * m.P * tokens / (card.flops * SHARE["flops"])
    # --full: weights gathered for three passes of each micro-batch (2P each) and gradients
    # scattered (2P), and weights once more for the engine (4P). Adapter: its gradient's all-reduce.
    # Both: TRL gathers the kept texts for its log, 4 bytes a token of all others.
    weights = 8 * m.P * max(1, PROMPTS * KEPT / ROWS) + 4 * m.P if full else 2 * 4 * adapter(m)
    sent = (weights + 4 * tokens * G) * (G - 1) / G
    link = SHARE["links"] * (NVLINK if G <= 8 else NETWORK)
    return dict(sent=sent, chain=chain, drawing=drawing, arithmetic=arithmetic, sending=sent / link)


# ------------------------------------------------------------------------------ the tables
def row(name: str, G: int, full: bool) -> str:
    m, card, kind = MODELS[name], CARDS["H100"], "full" if full else "LoRA"
    head = f"| {name} {kind} | {G} | {PROMPTS * G:,} "
    if slots(m, G, full, card) < 8:
        return f"{head}| | | | | | {resident(m, G, full) / 1e9:,.0f} GB do not fit |"
    found = step(m, G, full, card)
    times = {part: found[part] for part in ("drawing", "arithmetic", "sending")}
    worst = max(times, key=times.get)
    if times[worst] == found["chain"]:
        worst = "chain of rounds"
    rate = PROMPTS * DRAWN * LENGTH / sum(times.values())
    parts = " | ".join(f"{seconds:,.0f}" for seconds in (found["chain"], *times.values()))
    return f"{head}| {found['sent'] / 1e9:,.1f} | {parts} | {rate:,.0f}, {worst} |"


def one_card(name: str) -> str:
    """A step of the 1.5 B model with an adapter, and 200 of them."""
    found = step(MODELS["1.5B"], 1, False, CARDS[name])
    hours = 200 * (found["drawing"] + found["arithmetic"]) / 3600
    return f"{name} {found['drawing']:.0f} + {found['arithmetic']:.0f} s, {hours:.0f} h"


def main() -> None:
    print("A step (drawing + arithmetic), and 200 of them:", ", ".join(map(one_card, CARDS)))
    print("\n| model | GPUs | prompts | sent by each, GB | chain, s | drawing, s | arithmetic, s | "
          "sending, s | tokens/s per GPU, bottleneck |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, full in ((name, full) for name in MODELS for full in (False, True)):
        some = any(slots(MODELS[name], G, full, CARDS["H100"]) >= 8 for G in GPUS)
        for G in GPUS if some else GPUS[-1:]:  # what fits nowhere, once
            print(row(name, G, full))


if __name__ == "__main__":
    main()
