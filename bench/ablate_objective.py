"""What does each part of MiniRL buy? The paper's ablations on the built-in mixture of experts, every one a few flags.

    python bench/ablate_objective.py                       # all cells, resumable; about three hours of one core
    python bench/ablate_objective.py --processes 2         # two at a time
    python bench/ablate_objective.py --only low-N4         # cells whose name starts like this
    python bench/ablate_objective.py --draw                # only the table and the page, from the committed logs

As in the paper, the mini-batch is fixed (8 prompts x 8 samples) and the batch is N of them, so every cell takes the same
number of gradient steps on the same number of samples; N says how old the last of them are. Cells:

    precision   exact: engine and trainer in float32 | low: the engine in bfloat16 with its cache in fp8 | stress: low, and a
                learning rate of 0.003 instead of 0.002 (the arms of the paper's figures only) | long: low, eight times as
                many steps (N = 1, with and without the importance weight: does it collapse later?)
    N           1, 2, 4, 8 mini-batches
    replay      none, r2, r3 (r2 with N = 1 is none)
    clip        on, off (with N = 1 nothing is ever clipped)
    importance  weight pi_theta/mu, or none
    length      N = 1 only: token sums divided by the response's length

Writes bench/results/objective/CELL-seedS.jsonl (a header, then one line per step and evaluation), objective.md, objective.png.
"""
import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "objective"
RUNS = ROOT / "runs" / "ablate"
sys.path.insert(0, str(ROOT))

GRADIENT_STEPS = dict(exact=64, low=64, stress=64, long=512)
LOW = ["--rollout-dtype", "bfloat16", "--kv-cache-dtype", "fp8"]
PRECISION = {"exact": ["--lr", "0.002"], "low": [*LOW, "--lr", "0.002"], "stress": [*LOW, "--lr", "0.003"],
             "long": [*LOW, "--lr", "0.002"]}
PAPER = ("none-noclip-is", "r2-noclip-is", "none-clip-is", "r2-clip-is", "r3-clip-is")  # off-policy; it leaves out the third
COMMON = ["--model", "tiny-moe", "--sampler", "uniform", "--n", "8", "--warmup-steps", "8", "--max-tokens", "48",
          "--eval-questions", "120", "--eval-k", "4", "--checkpoint-every", "1000"]
PARTS = {"clip": ["--clip"], "noclip": ["--no-clip"], "is": ["--importance", "full"], "nois": ["--importance", "none"],
         "length": ["--length-norm", "response"]}
BROKEN = ("gradient that is not finite", "Engine and trainer disagree")  # a run that ends like this is a result, not a failure
KEPT = ("step", "reward_first_round", "entropy", "kl_k1", "kl_k3", "routes_agree_all", "clipped_positive", "clipped_negative",
        "weight_max", "weight_over_2", "weight_under_half", "response_length", "grad_norm", "samples_total", "avg", "ci_low", "ci_high")


def cells() -> list[str]:
    """Names such as low-N4-r3-clip-is: precision, N, replay, clip, weight."""
    names = []
    for precision in ("low", "exact"):
        names += [f"{precision}-N1-{replay}-clip-{weight}" for replay in ("none", "r3") for weight in ("is", "nois", "is-length")]
        names += [f"{precision}-N{N}-{replay}-{clip}-{weight}" for N in (2, 4, 8) for replay in ("none", "r2", "r3")
                  for clip in ("clip", "noclip") for weight in ("is", "nois")]
        if precision == "low":
            names += [f"stress-N1-{replay}-clip-is" for replay in ("none", "r3")]
            names += [f"stress-N{N}-{arm}" for N in (2, 4, 8) for arm in PAPER]
            names += [f"long-N1-none-clip-{weight}" for weight in ("is", "nois")]
    return names


def seeds(cell: str) -> range:
    """Three for what the README quotes, six where three left the paper's comparison of replays open, one for the rest."""
    if cell.startswith(("stress-N8-", *(f"stress-N4-{replay}-clip-" for replay in ("none", "r2", "r3")))):
        return range(6)
    return range(3 if cell.startswith(("stress", "long", "low-N1-")) else 1)


def flags(cell: str, seed: int) -> list[str]:
    precision, N, replay, *parts = cell.split("-")
    N = int(N[1:])
    steps = GRADIENT_STEPS[precision] // N
    own = [flag for part in parts for flag in PARTS[part]]
    return [*COMMON, *PRECISION[precision], "--mini-batches", str(N), "--batch-prompts", str(8 * N), "--steps", str(steps),
            "--eval-every", str(min(64, steps // 4)), "--replay", replay, *own, "--seed", str(seed)]


def train(cell: str, seed: int) -> None:
    """One run through the command line, resumed if it was interrupted; then its logs, made small, go to bench/results."""
    log, name = RESULTS / f"{cell}-seed{seed}.jsonl", f"{cell}-seed{seed}"
    if log.exists():
        return
    RUNS.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "minirl.py"), *flags(cell, seed), "--name", name, "--resume"]
    with open(RUNS / f"{name}.log", "w") as output:
        code = subprocess.run(command, cwd=RUNS, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output).returncode
    run = RUNS / "runs" / name
    said = (RUNS / f"{name}.log").read_text()
    broke = next((reason for reason in BROKEN if reason in said), "")
    if code and not broke:
        raise SystemExit(f"{name} failed: see {RUNS / name}.log")
    rows = [dict(cell=cell, seed=seed, flags=flags(cell, seed), broke=broke)]
    for file in ("metrics.jsonl", "eval.jsonl"):
        for line in (run / file).read_text().splitlines():
            rows.append({key: value for key, value in json.loads(line).items() if key in KEPT})
    RESULTS.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{name}: {[round(row['avg'], 3) for row in rows if 'avg' in row]}", flush=True)


def load() -> dict:
    """{cell: [(steps, evaluations, why it broke or "") of each seed]} from the committed logs."""
    found = {}
    for cell in cells():
        for log in sorted(RESULTS.glob(f"{cell}-seed*.jsonl")):
            head, *rows = map(json.loads, log.read_text().splitlines())
            found.setdefault(cell, []).append(([r for r in rows if "avg" not in r], [r for r in rows if "avg" in r], head["broke"]))
    return found


def summary(runs: list) -> dict:
    """Means over seeds; `late`: over the last quarter of the steps. Accuracies as shares; of a broken run the last before it broke."""
    every = [row for steps, _, _ in runs for row in steps]
    late = [row for steps, _, _ in runs for row in steps[-max(1, len(steps) // 4):]]
    last = [evaluations[-1]["avg"] for _, evaluations, _ in runs]
    return dict(
        seeds=len(runs), broke=sum(bool(broke) for *_, broke in runs),
        last=mean(last), low=min(last), high=max(last), best=mean(max(r["avg"] for r in ev) for _, ev, _ in runs),
        entropy=average(late, "entropy"), k3=average(every, "kl_k3"), agree=average(every, "routes_agree_all"),
        clipped=average(every, "clipped_positive") + average(every, "clipped_negative"),
        beyond=average(every, "weight_over_2") + average(every, "weight_under_half"))


def average(rows: list[dict], key: str) -> float:
    """Over the rows that have a number there: a step without signal has none."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return mean(values) if values else float("nan")


def table(found: dict) -> str:
    head = ["precision", "N", "replay", "clip", "weight", "seeds", "accuracy at the end (range)", "best", "entropy, last quarter",
            "KL(mu, pi_old), k3", "routes agree", "clipped", "ratio beyond 2 or 1/2"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cell, runs in found.items():
        precision, N, replay, clip, *weight = cell.split("-")
        s = summary(runs)
        count = f"{s['seeds']}, {s['broke']} broke" if s["broke"] else str(s["seeds"])
        beyond = f"{s['beyond']:.2%}" if weight[0] == "is" else ""  # without a weight it is 1 everywhere
        weight = {"is": "yes", "nois": "**no**"}[weight[0]] + (", length-normalised" if "length" in weight else "")
        spread = f" ({s['low']:.1%} to {s['high']:.1%})" if s["seeds"] > 1 else ""
        lines.append("| " + " | ".join([
            precision, N[1:], replay, "any" if N == "N1" else "yes" if clip == "clip" else "**no**", weight, count,
            f"{s['last']:.1%}{spread}", f"{s['best']:.1%}", f"{s['entropy']:.3f}", f"{s['k3']:.1e}", f"{s['agree']:.1%}",
            f"{s['clipped']:.2%}", beyond]) + " |")
    return "\n".join(lines) + "\n"


def draw(found: dict) -> None:
    """In low precision: accuracy, entropy, KL and tokens far off, a column for each N, one line per arm of the paper's figures."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    weight = {"none-clip-is": "MiniRL", "none-clip-nois": "no importance weight"}
    on_policy = weight | {
        "none-clip-is-length": "+ length normalisation", "r3-clip-is": "+ R3", "r3-clip-nois": "+ R3, no importance weight",
        "r3-clip-is-length": "+ R3, length normalisation"}
    off_policy = {"none-noclip-is": "no clip, no replay", "r2-noclip-is": "R2, no clip", "none-clip-is": "clip, no replay",
                  "r2-clip-is": "clip, R2", "r3-clip-is": "clip, R3"}
    columns = [("low", 1, on_policy, "N = 1, on-policy, learning rate 0.002"), ("long", 1, weight, "the same, longer")]
    columns += [("stress", N, off_policy, f"N = {N} gradient steps per batch, learning rate 0.003") for N in (2, 4, 8)]
    rows = (("avg", "held-out accuracy"), ("entropy", "entropy, nats per token"), ("kl_k3", r"KL($\mu$ ‖ $\pi_{old}$), k3, nats per token"),
            ("weight_over_2", "share of tokens with a weight above 2"))
    figure, axes = plt.subplots(len(rows), len(columns), figsize=(26, 17), layout="constrained", sharex="col", sharey="row")
    colors = ("#000000", "#D55E00", "#E69F00", "#0072B2", "#CC79A7", "#009E73")
    for column, (precision, N, arms, title) in zip(axes.T, columns):
        for color, (arm, label) in zip(colors, arms.items()):
            runs = found.get(f"{precision}-N{N}-{arm}", [])
            for ax, (key, _) in zip(column, rows):
                if key == "weight_over_2" and "nois" in arm:
                    continue  # without a weight it is 1 everywhere
                curves = [[(row["step"] * N, row[key]) for row in (ev if key == "avg" else steps) if key in row] for steps, ev, _ in runs]
                curves = [curve for curve in curves if curve]
                if curves:
                    grid = [x for x, _ in max(curves, key=len)]  # one that broke early stays where it was
                    values = np.array([np.interp(grid, *zip(*curve)) for curve in curves])
                    ax.plot(grid, values.mean(0), color=color, label=label, marker="." if len(grid) < 20 else "")
                    ax.fill_between(grid, values.min(0), values.max(0), color=color, alpha=0.12, lw=0)
        column[0].set_title(title)
        column[0].legend(fontsize=9)
        column[-1].set_xlabel("gradient steps")
    for ax, (key, label) in zip(axes[:, 0], rows):
        ax.set_ylabel(label)
    axes[2, 0].set_yscale("log")
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("MiniRL on the built-in mixture of experts, engine in bfloat16 with an fp8 cache: mean of the seeds, band from lowest to highest")
    figure.savefig(RESULTS.parent / "objective.png", dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[""], help="cells whose names start like this")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    plan = [(cell, seed) for cell in cells() for seed in seeds(cell) if cell.startswith(tuple(args.only))]
    if not args.draw:
        from parts.tiny import ensure_tiny

        ensure_tiny("tiny-moe")
        with ThreadPoolExecutor(args.processes) as pool:
            list(pool.map(lambda job: train(*job), plan))
    found = load()
    if not found:
        raise SystemExit("There are no logs yet: run without --draw first.")
    (RESULTS.parent / "objective.md").write_text(table(found))
    draw(found)
    print(table(found))


if __name__ == "__main__":
    main()
