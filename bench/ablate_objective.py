"""What does each part of MiniRL buy? The paper's ablations on the built-in mixture of experts.

    python bench/ablate_objective.py                # all, five hours of one core; resumable
    python bench/ablate_objective.py --processes 2  # two at a time
    python bench/ablate_objective.py --only low-N4  # cells whose name starts like this
    python bench/ablate_objective.py --draw         # only table and picture, from what is stored

As in the paper, the mini-batch is fixed (8 prompts x 8 samples) and the batch is N of them. So
every cell takes as many gradient steps on as many samples; N says how old the last of them are.
A cell is a few flags; its name, such as low-N4-r3-clip-is, says which:

    precision   exact: engine and trainer in float32
                low: the engine in bfloat16 with its cache in fp8
                stress: low, learning rate 0.003 instead of 0.002 (the arms of the paper's figures)
                long: low, eight times as many steps (N = 1: does it collapse without the weight?)
                mask: as stress (later code: masks, and for N = 8 objectives, among themselves)
                float32, float16, bfloat16: the engine's weights, nothing else in low precision
                eight: low, the engine's weights in 8 bits too, four times as many steps
                coarse2, coarse1: low, the engine's matrices with two significant bits, or one
                    (coarse_engine.py), four times as many steps
    N           1, 2, 4, 8 mini-batches
    replay      none, r2, r3 (r2 with N = 1 is none)
    clip        clip, noclip (with N = 1 nothing is ever clipped); other masks: dppo, icepop;
                other objectives: grpo, cispo
    importance  is: the weight pi_theta/mu; nois: none
    length      N = 1 only: token sums divided by the response's length

A run lives in runs/ablate. When it is done it becomes a line of bench/results/objective.jsonl (see
study.py), from which objective.md and three pictures are drawn.
"""
from statistics import mean, median

import study

RUNS = study.ROOT / "runs" / "ablate"

GRADIENT_STEPS = dict(long=512, eight=256, coarse2=256, coarse1=256)  # 64 else
LOW = ["--rollout-dtype", "bfloat16", "--kv-cache-dtype", "fp8"]
ENGINES = ("float32", "float16", "bfloat16")
ROUGH = {("eight", "none"): "fp8, 4 bits", ("coarse2", "none"): "2 bits",
         ("coarse1", "none"): "1 bit", ("coarse1", "r3"): "1 bit, and R3"}
PRECISION = {
    "exact": [], "low": LOW, "stress": LOW, "long": LOW, "mask": LOW,
    **{dtype: ["--rollout-dtype", dtype] for dtype in ENGINES},
    "eight": ["--rollout-dtype", "fp8", "--kv-cache-dtype", "fp8"], "coarse2": LOW, "coarse1": LOW}
COMMON = ["--model", "tiny-moe", "--sampler", "uniform", "--n", "8", "--warmup-steps", "8",
          "--max-tokens", "48", "--eval-questions", "120", "--eval-k", "4"]
PARTS = {
    "clip": ["--clip"], "noclip": ["--no-clip"], "dppo": ["--mask", "dppo"],
    "icepop": ["--mask", "icepop"], "grpo": ["--objective", "grpo"],
    "cispo": ["--objective", "cispo"], "is": ["--importance", "full"],
    "nois": ["--importance", "none"], "length": ["--length-norm", "response"]}
# The paper's arms off-policy. It has no curve of the third.
PAPER = {"none-noclip-is": "no clip, no replay", "r2-noclip-is": "R2, no clip",
         "none-clip-is": "clip, no replay", "r2-clip-is": "clip, R2", "r3-clip-is": "clip, R3"}
MASKS = {"clip": "on pi_theta/pi_old (MiniRL)", "noclip": "none",
         "dppo": "on pi_theta - mu (DPPO)", "icepop": "MiniRL's, and pi_old/mu (IcePop)"}
OTHERS = {"grpo": "GRPO", "cispo": "CISPO"}  # objectives in the place of minirl, for N = 8
# A run that ends with one of these sentences is a result and not a failure.
BROKEN = ("gradient that is not finite", "Engine and trainer disagree")
KEPT = ("step", "entropy_trained", "kl_k3", "routes_agree_all", "clipped_positive",
        "clipped_negative", "weight_over_2", "weight_under_half", "grad_norm",
        "avg", "ci_low", "ci_high")


# -------------------------------------------------------------------------------------------- cells
def cells() -> list[str]:
    """Names such as low-N4-r3-clip-is: precision, N, replay, clip, weight."""
    stress = [f"stress-N1-{replay}-clip-is" for replay in ("none", "r3")]
    stress += [f"stress-N{N}-{arm}" for N in (2, 4, 8) for arm in PAPER]
    long = [f"long-N1-none-clip-{weight}" for weight in ("is", "nois")]
    masks = [f"mask-N{N}-none-{mask}-is" for N in (4, 8) for mask in MASKS]
    masks += [f"mask-N8-none-{objective}-is" for objective in OTHERS]
    engines = [f"{dtype}-N{N}-none-clip-is" for N in (1, 8) for dtype in ENGINES]
    rough = [f"{precision}-N1-{replay}-clip-{weight}" for precision, replay in ROUGH
             for weight in ("is", "nois")]
    return grid("low") + stress + long + grid("exact") + masks + engines + rough


def grid(precision: str) -> list[str]:
    """Every combination that differs from the others."""
    names = [f"N1-{replay}-clip-{weight}" for replay in ("none", "r3")
             for weight in ("is", "nois", "is-length")]
    names += [f"N{N}-{replay}-{clip}-{weight}" for N in (2, 4, 8) for replay in ("none", "r2", "r3")
              for clip in ("clip", "noclip") for weight in ("is", "nois")]
    return [f"{precision}-{name}" for name in names]


def seeds(cell: str) -> range:
    """Three for what docs/objective.md quotes, one for the rest.

    Six where three left a comparison open: of replays, and of the weight at its largest gap.
    """
    if cell in (f"mask-N8-none-{objective}-is" for objective in OTHERS):
        return range(3)
    open_question = [f"stress-N4-{replay}-clip-" for replay in ("none", "r2", "r3")]
    if cell.startswith(("stress-N8-", "mask", "coarse1", *open_question)):
        return range(6)
    return range(1 if cell.startswith(("exact", "low-N2", "low-N4", "low-N8")) else 3)


def flags(cell: str, seed: int) -> list[str]:
    precision, N, replay, *parts = cell.split("-")
    N = int(N[1:])
    steps = GRADIENT_STEPS.get(precision, 64) // N
    own = [flag for part in parts for flag in PARTS[part]]
    lr = "0.003" if precision in ("stress", "mask") else "0.002"
    return [*COMMON, *PRECISION[precision], "--lr", lr, "--mini-batches", str(N),
            "--batch-prompts", str(8 * N), "--steps", str(steps),
            "--eval-every", str(min(64, steps // 4)), "--replay", replay, *own,
            "--seed", str(seed)]


# ------------------------------------------------------------------------------------------ running
def train(cell: str, seed: int) -> None:
    """One run through the command line, resumed if it was interrupted; then a line of the study."""
    name, about = f"{cell}-seed{seed}", dict(broke="")
    script, bits = "minirl.py", []
    if cell.startswith("coarse"):
        script, bits = "bench/coarse_engine.py", [cell[len("coarse")]]
    try:
        study.launch(RUNS, name, [*bits, *flags(cell, seed)], script)
    except SystemExit:
        said = (RUNS / f"{name}.log").read_text()
        about["broke"] = next((reason for reason in BROKEN if reason in said), "")
        if not about["broke"]:
            raise
    line = study.fold(RUNS / "runs" / name, KEPT, run=name, cell=cell, seed=seed,
                      flags=flags(cell, seed), **about)
    study.add("objective", line)
    print(f"{name}: {line['evals']['avg']}", flush=True)


def train_all(only: tuple[str, ...], processes: int) -> None:
    """Seed by seed: whoever stops it has as many seeds of every cell."""
    plan = [(cell, seed) for cell in cells() for seed in seeds(cell) if cell.startswith(only)]
    plan.sort(key=lambda job: job[1])
    study.train_missing("objective", {f"{cell}-seed{seed}": (cell, seed) for cell, seed in plan},
                        train, processes)


def load() -> dict:
    """{cell: the lines of its runs, by seed}."""
    found = {cell: [] for cell in cells()}
    for line in sorted(study.load("objective"), key=lambda line: line["seed"]):
        found[line["cell"]].append(line)
    return {cell: runs for cell, runs in found.items() if runs}


# -------------------------------------------------------------------------------------------- table
def summary(runs: list[dict]) -> dict:
    """Means over seeds; `late`: over the last quarter of the steps; accuracies as shares.

    A run is lost if it ends below its start. `policy`: what an exact engine says of the last one.
    A run that broke counts with its last evaluation before it did.
    """
    every = [row for run in runs for row in run["metrics"]]
    late = [row for run in runs for row in run["metrics"][-max(1, len(run["metrics"]) // 4):]]
    curves = [[row["avg"] for row in run["evals"]] for run in runs]
    last = [curve[-1] for curve in curves]
    policies = [run["policy"] for run in runs if "policy" in run]
    return dict(
        seeds=len(runs), broke=sum(bool(run["broke"]) for run in runs),
        lost=sum(curve[-1] < curve[0] for curve in curves),
        policy=mean(policies) if policies else None,
        k3_median=median([row["kl_k3"] for row in every if "kl_k3" in row]),
        last=mean(last), low=min(last), high=max(last), best=mean(map(max, curves)),
        entropy=average(late, "entropy_trained"), k3=average(every, "kl_k3"),
        agree=average(every, "routes_agree_all"),
        clipped=average(every, "clipped_positive") + average(every, "clipped_negative"),
        beyond=average(every, "weight_over_2") + average(every, "weight_under_half"))


def average(rows: list[dict], key: str) -> float:
    """Over the rows that have a number there: a step without signal has none."""
    values = [row[key] for row in rows if key in row]
    return mean(values) if values else float("nan")


def table(found: dict) -> str:
    head = ["precision", "N", "replay", "clip", "weight", "seeds", "lost",
            "accuracy at the end (range)",
            "best", "entropy, last quarter", "KL(mu, pi_old), k3", "its median", "routes agree",
            "clipped", "ratio beyond 2 or 1/2", "in an exact engine"]
    lines = [table_cells(cell, summary(runs)) for cell, runs in found.items()]
    return study.markdown([head, *lines])


def table_cells(cell: str, s: dict) -> list[str]:
    precision, N, replay, clip, *parts = cell.split("-")
    clipped = {"clip": "yes", "noclip": "**no**"}.get(clip, clip)
    weight = {"is": "yes", "nois": "**no**"}[parts[0]]
    if "length" in parts:
        weight += ", length-normalised"
    count = f"{s['seeds']}, {s['broke']} broke" if s["broke"] else str(s["seeds"])
    spread = f" ({s['low']:.1%} to {s['high']:.1%})" if s["seeds"] > 1 else ""
    beyond = f"{s['beyond']:.2%}" if parts[0] == "is" else ""  # without a weight it is 1 everywhere
    stopped = f"{s['clipped']:.2%}" if s["clipped"] >= 0 else ""  # NaN: nothing was logged
    exact = f"{s['policy']:.1%}" if s["policy"] is not None else ""
    return [precision, N[1:], replay, "any" if N == "N1" else clipped, weight, count,
            str(s["lost"]), f"{s['last']:.1%}{spread}", f"{s['best']:.1%}", f"{s['entropy']:.3f}",
            f"{s['k3']:.1e}", f"{s['k3_median']:.0e}", f"{s['agree']:.1%}", stopped, beyond, exact]


# ------------------------------------------------------------------------------------------ picture
WEIGHT = {"none-clip-is": "MiniRL", "none-clip-nois": "no importance weight"}
ON_POLICY = WEIGHT | {
    "none-clip-is-length": "+ length normalisation", "r3-clip-is": "+ R3",
    "r3-clip-nois": "+ R3, no importance weight", "r3-clip-is-length": "+ R3, length normalisation"}
OLD = "N = {} gradient steps per batch, learning rate 0.003"
COLUMNS = [  # precision, N, arms, title
    ("low", 1, ON_POLICY, "N = 1, on-policy, learning rate 0.002"),
    ("long", 1, WEIGHT, "the same, longer"),
    *(("stress", N, PAPER, OLD.format(N)) for N in (2, 4, 8))]
MASKED = {f"none-{mask}-is": label for mask, label in MASKS.items()}
OTHER = {f"none-{objective}-is": label for objective, label in OTHERS.items()}
MASK_COLUMNS = [("mask", N, MASKED | (OTHER if N == 8 else {}),
                 f"Masks, N = {N}, learning rate 0.003") for N in (4, 8)]
ROUGH_COLUMNS = [(precision, 1, {f"{replay}-clip-is": "MiniRL",
                                 f"{replay}-clip-nois": "no importance weight"},
                  f"The engine's weights: {label}; N = 1")
                 for (precision, replay), label in ROUGH.items()]
COLORS = ("#000000", "#D55E00", "#E69F00", "#0072B2", "#CC79A7", "#009E73")
ROWS = {
    "avg": "held-out accuracy", "entropy_trained": "entropy, nats per token",
    "kl_k3": r"KL($\mu$ ‖ $\pi_{old}$), k3, nats per token",
    "weight_over_2": "share of tokens with a weight above 2"}


def draw(found: dict, columns: list, name: str, about: str) -> None:
    """A column for each precision and N, one line per arm, into bench/results/NAME.png."""
    figure, axes = study.panels(len(ROWS), len(columns), figsize=(5.2 * len(columns), 17),
                                sharex="col", sharey="row", squeeze=False)
    for column, (precision, N, arms, title) in zip(axes.T, columns):
        for color, (arm, label) in zip(COLORS, arms.items()):
            runs = found.get(f"{precision}-N{N}-{arm}", [])
            for axis, key in zip(column, ROWS):
                if not (key == "weight_over_2" and "nois" in arm):  # without a weight: 1 everywhere
                    draw_arm(axis, runs, key, N, color, label)
        column[0].set_title(title)
        column[0].legend(fontsize=9)
        column[-1].set_xlabel("gradient steps")
    for axis, label in zip(axes[:, 0], ROWS.values()):
        axis.set_ylabel(label)
    axes[2, 0].set_yscale("log")
    figure.suptitle(f"MiniRL on the built-in mixture of experts{about}:\n"
                    "mean of the seeds, band from lowest to highest")
    study.save(figure, name)


def draw_arm(axis, runs: list[dict], key: str, N: int, color: str, label: str) -> None:
    """Mean and range over the seeds; a run that broke early stays where it was."""
    import numpy as np

    logged = [run["evals"] if key == "avg" else run["metrics"] for run in runs]
    points = [[(row["step"] * N, row[key]) for row in rows if key in row] for rows in logged]
    points = [curve for curve in points if curve]
    if points:
        grid = [x for x, _ in max(points, key=len)]
        curves = [np.interp(grid, *zip(*curve)) for curve in points]
        study.band(axis, grid, curves, color, label=label, marker="." if len(grid) < 20 else "")


def main() -> None:
    parser = study.parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="cells whose names start like this")
    args = parser.parse_args()
    if not args.draw:
        train_all(tuple(args.only), args.processes)
    found = load()
    text = table(found)
    (study.RESULTS / "objective.md").write_text(text)
    low = ", engine in bfloat16 with an fp8 cache"
    draw(found, COLUMNS, "objective", low)
    draw(found, MASK_COLUMNS, "masks", low)
    draw(found, ROUGH_COLUMNS, "weight", ", where engine and trainer disagree more")
    print(text)


if __name__ == "__main__":
    main()
