"""What a step costs on many GPUs, on paper; docs/elsewhere.md has some of the rows.

    python bench/scale_out.py                      # 32 prompts for each GPU
    python bench/scale_out.py --prompts 512        # 512 in all, however many GPUs
    python bench/scale_out.py --formulas           # each column's formula

ESTIMATES: counted bytes and operations, over what the makers say of an H100 times SHARE. Nobody has
measured any of them.
"""
import argparse
import inspect
from collections import namedtuple

Model = namedtuple("Model", "P layers width mlp kv")  # parameters; the widths of a layer's linears
MODELS = {  # Qwen2.5-1.5B and -7B, Llama-3-70B
    "1.5B": Model(1.54e9, 28, 1536, 8960, 2 * 128), "7B": Model(7.6e9, 28, 3584, 18944, 4 * 128),
    "70B": Model(70.6e9, 80, 8192, 28672, 8 * 128)}
GPUS = (1, 8, 64, 512)
MEMORY, READS, FLOPS = 79e9, 3.35e12, 990e12  # of an H100: bytes, bytes/s, dense 16-bit flop/s
NVLINK, NETWORK = 450e9, 50e9  # bytes/s of a GPU each way: within a machine of eight, beyond it
SHARE = dict(reads=0.8, flops=0.4, links=0.7)  # of what the makers say
OVERHEAD = 0.005  # seconds of an engine step beside its reads
PROMPT, LENGTH, LONGEST = 200, 900, 3000  # tokens: a prompt, a mean response, the longest
DRAWN, KEPT, ROUNDS = 14, 4, 4  # samples of a prompt on average; n; N
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


def slots(m: Model, G: int, full: bool) -> float:
    """Responses at once: what is left of 0.9 of the memory, over 4 layers kv (prompt + length)."""
    free = 0.9 * MEMORY - resident(m, G, full)
    return max(0.0, min(SLOTS, free / (4 * m.layers * m.kv * (PROMPT + LENGTH))))


def engine_step(m: Model, running: float) -> float:
    """Seconds: (2P + cache read of the running) / memory speed + overhead."""
    cache = running * 4 * m.layers * m.kv * (PROMPT + LENGTH / 2)
    return (2 * m.P + cache) / (READS * SHARE["reads"]) + OVERHEAD


def chain(m: Model) -> float:
    """Seconds of the longest chain: N rounds, each as long as the longest response, nearly alone.
    With many prompts there is always one, so more GPUs do not shorten it."""
    return ROUNDS * LONGEST * engine_step(m, 1)


def sampling(m: Model, G: int, full: bool, prompts: float) -> float:
    """Seconds: the larger of the chain and drawn tokens of a GPU / tokens per second."""
    running = slots(m, G, full)
    return max(chain(m), prompts / G * DRAWN * LENGTH * engine_step(m, running) / running)


def update(m: Model, G: int, full: bool, prompts: float) -> float:
    """Seconds of arithmetic: 8P per kept token with an adapter (pi_old 2, forward 2, again for
    checkpointing 2, backward 2), 10P with --full (backward 4)."""
    tokens = prompts / G * KEPT * (PROMPT + LENGTH)
    return (10 if full else 8) * m.P * tokens / (FLOPS * SHARE["flops"])


def travelling(m: Model, G: int, full: bool, prompts: float) -> float:
    """Bytes that a GPU sends in a step. Adapter: its gradient's all-reduce, 2 * 4A (G-1)/G. --full:
    weights gathered for three passes of each micro-batch (2P each), gradients scattered (2P), and
    gathered once more for the engine (4P): (8P * micro-batches + 4P) (G-1)/G. Both: TRL's
    gather of kept texts for its log, 4 bytes a token of all others."""
    micro = max(1.0, prompts / G * KEPT / ROWS)
    weights = 8 * m.P * micro + 4 * m.P if full else 2 * 4 * adapter(m)
    texts = 4 * prompts * KEPT * (PROMPT + LENGTH)
    return (weights + texts) * (G - 1) / G


def link(G: int) -> float:
    """Bytes per second: NVLink within a machine of eight GPUs, the network beyond."""
    return SHARE["links"] * (NVLINK if G <= 8 else NETWORK)


# ------------------------------------------------------------------------------ the table
def row(name: str, G: int, full: bool, prompts: float) -> str:
    m, kind = MODELS[name], "full" if full else "LoRA"
    head = f"| {name} {kind} | {G} | {prompts:,.0f} "
    if slots(m, G, full) < 8:
        return f"{head}| | | | | | {resident(m, G, full) / 1e9:,.0f} GB do not fit |"
    times = {
        "chain of rounds": chain(m), "drawing": sampling(m, G, full, prompts),
        "arithmetic": update(m, G, full, prompts),
        "sending": travelling(m, G, full, prompts) / link(G)}
    total = times["drawing"] + times["arithmetic"] + times["sending"]
    worst = max(("sending", "arithmetic", "drawing"), key=times.get)
    if worst == "drawing" and times["chain of rounds"] == times["drawing"]:
        worst = "chain of rounds"
    rate = prompts * DRAWN * LENGTH / G / total
    sent = travelling(m, G, full, prompts) / 1e9
    return (f"{head}| {sent:,.1f} | {times['chain of rounds']:,.0f} | {times['drawing']:,.0f} | "
            f"{times['arithmetic']:,.0f} | {times['sending']:,.0f} | {rate:,.0f}, {worst} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, help="of a step, in all; default: 32 per GPU")
    parser.add_argument("--formulas", action="store_true")
    asked = parser.parse_args()
    if asked.formulas:
        for formula in (adapter, resident, slots, engine_step, chain, sampling, update, travelling):
            print(f"{formula.__name__}: {' '.join(inspect.getdoc(formula).split())}")
        return
    print("| model | GPUs | prompts | sent by each, GB | chain, s | drawing, s | arithmetic, s | "
          "sending, s | tokens/s per GPU, bottleneck |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in MODELS:
        for full in (False, True):
            some = any(slots(MODELS[name], G, full) >= 8 for G in GPUS)
            for G in GPUS if some else GPUS[-1:]:  # what fits nowhere, once
                print(row(name, G, full, asked.prompts or 32 * G))


if __name__ == "__main__":
    main()
