"""What does each part of MiniRL buy? The study objective: the paper's ablations on a mixture.

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

All of it takes five hours of one core; --only low-N4 is a part.
"""
import re
from itertools import product
from math import comb
from statistics import mean, median

import store
from compare import picture
from store import Run, Study, fisher, interval, markdown

from parts.plot import series

CELLS = [  # seeds, cells. Six seeds where three left a comparison open
    (3, "low-N1-{none,r3}-clip-{is,nois,is-length}"),
    (1, "low-N{2,4,8}-{none,r2,r3}-{clip,noclip}-{is,nois}"),
    (3, "stress-N1-{none,r3}-clip-is"),
    (3, "stress-N2-{none-noclip,r2-noclip,none-clip,r2-clip,r3-clip}-is"),
    (3, "stress-N4-{none,r2}-noclip-is"),
    (6, "stress-N4-{none,r2,r3}-clip-is"),
    (6, "stress-N8-{none-noclip,r2-noclip,none-clip,r2-clip,r3-clip}-is"),
    (3, "long-N1-none-clip-{is,nois}"),
    (1, "exact-N1-{none,r3}-clip-{is,nois,is-length}"),
    (1, "exact-N{2,4,8}-{none,r2,r3}-{clip,noclip}-{is,nois}"),
    (6, "mask-N{4,8}-none-{clip,noclip,dppo,icepop}-is"),
    (3, "mask-N8-none-{grpo,cispo}-is"),
    (3, "{float32,float16,bfloat16}-N1-none-clip-is"),
    (3, "{float32,float16,bfloat16}-N8-none-clip-is"),
    (3, "{eight,coarse2}-N1-none-clip-{is,nois}"),
    (6, "coarse1-N1-{none,r3}-clip-{is,nois}")]
COMMON = ("--model tiny-moe --sampler uniform --n 8 --warmup-steps 8 --max-tokens 48 "
          "--eval-questions 120 --eval-k 4")
LOW = "--rollout-dtype bfloat16 --kv-cache-dtype fp8"
FLAGS = {  # part of a cell's name -> its flags
    **dict.fromkeys(("low", "stress", "long", "mask", "coarse2", "coarse1"), LOW), "exact": "",
    **{dtype: f"--rollout-dtype {dtype}" for dtype in ("float32", "float16", "bfloat16")},
    "eight": "--rollout-dtype fp8 --kv-cache-dtype fp8",
    **{replay: f"--replay {replay}" for replay in ("none", "r2", "r3")},
    "clip": "--clip", "noclip": "--no-clip", "dppo": "--mask dppo", "icepop": "--mask icepop",
    "grpo": "--objective grpo", "cispo": "--objective cispo", "is": "--importance full",
    "nois": "--importance none", "length": "--length-norm response"}
GRADIENT_STEPS = dict(long=512, eight=256, coarse2=256, coarse1=256)  # 64 else
KEPT = ("step", "entropy_trained", "kl_k3", "routes_agree_all", "clipped_positive",
        "clipped_negative", "weight_over_2", "weight_under_half", "grad_norm",
        "avg", "ci_low", "ci_high")
COMPARED = [  # cells, and those of their rivals
    ("stress-N4-r3-clip-is", "stress-N4-r2-clip-is"),
    ("stress-N4-r2-clip-is", "stress-N4-none-clip-is"),
    ("stress-N4-r3-clip-is", "stress-N4-none-clip-is"),
    ("mask-N8-none-cispo-is", "mask-N8-none-clip-is"),
    ("coarse1-N1-{none,r3}-clip-nois", "coarse1-N1-{none,r3}-clip-is"),
    ("coarse1-N1-r3-clip-nois", "coarse1-N1-r3-clip-is")]


# -------------------------------------------------------------------------------------------- cells
def expand(pattern: str) -> list[str]:
    """As a shell does: a{b,c}d is abd and acd."""
    parts = re.split(r"\{(.*?)\}", pattern)
    return list(map("".join, product(*(part.split(",") for part in parts))))


def cells() -> list[str]:
    return [cell for _, pattern in CELLS for cell in expand(pattern)]


def runs() -> list[Run]:
    """Seed by seed: whoever stops it has as many seeds of every cell."""
    jobs = [(cell, seed) for count, pattern in CELLS for cell in expand(pattern)
            for seed in range(count)]
    return [run(cell, seed) for cell, seed in sorted(jobs, key=lambda job: job[1])]


def run(cell: str, seed: int) -> Run:
    precision, N, *parts = cell.split("-")
    N = int(N[1:])
    steps = GRADIENT_STEPS.get(precision, 64) // N
    lr = 0.003 if precision in ("stress", "mask") else 0.002
    own = " ".join(FLAGS[part] for part in (precision, *parts))
    flags = (f"{COMMON} {own} --lr {lr} --mini-batches {N} --batch-prompts {8 * N} "
             f"--seed {seed}").split()
    coarse = ["bench/coarse_engine.py", precision[-1]]
    return Run(f"{cell}-seed{seed}", dict(cell=cell, seed=seed, flags=flags), flags, steps,
               every=min(64, steps // 4),
               script=coarse if precision.startswith("coarse") else ["minirl.py"])


def keep(folder, run: Run, end: str) -> dict:
    return dict(broke=end) | store.logs_of(folder, KEPT)


# -------------------------------------------------------------------------------------------- table
def by_cell(lines: list[dict]) -> dict[str, list]:
    """{cell: the lines of its runs, by seed}."""
    found = {cell: [] for cell in cells()}
    for line in sorted(lines, key=lambda line: line["seed"]):
        found[line["cell"]].append(line)
    return {cell: mine for cell, mine in found.items() if mine}


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
        lost=sum(map(is_lost, runs)), policy=mean(policies) if policies else None,
        k3_median=median([row["kl_k3"] for row in every if "kl_k3" in row]),
        last=mean(last), low=min(last), high=max(last), best=mean(map(max, curves)),
        entropy=average(late, "entropy_trained"), k3=average(every, "kl_k3"),
        agree=average(every, "routes_agree_all"),
        clipped=average(every, "clipped_positive") + average(every, "clipped_negative"),
        beyond=average(every, "weight_over_2") + average(every, "weight_under_half"))


def is_lost(run: dict, at: int = -1) -> bool:
    return run["evals"][at]["avg"] < run["evals"][0]["avg"]


def average(rows: list[dict], key: str) -> float:
    """Over the rows that have a number there: a step without signal has none."""
    values = [row[key] for row in rows if key in row]
    return mean(values) if values else float("nan")


def table(found: dict) -> str:
    head = ["precision", "N", "replay", "clip", "weight", "seeds", "lost",
            "accuracy at the end (range)",
            "best", "entropy, last quarter", "KL(mu, pi_old), k3", "its median", "routes agree",
            "clipped", "ratio beyond 2 or 1/2", "in an exact engine"]
    return markdown([head, *(table_cells(cell, summary(mine)) for cell, mine in found.items())])


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


def comparisons(found: dict) -> str:
    """Two arms with the same seeds: differences, and how many runs are lost."""
    rows = [["cells", "minus", "points, paired by seed", "ahead", "sign test", "lost",
             "of these half-way", "the best of these in an exact engine", "Fisher"]]
    for names in COMPARED:
        ours, theirs = ([run for cell in expand(name) for run in found[cell]] for name in names)
        pairs = list(zip(ours, theirs))  # of the same seeds; one may have more
        gaps = [100 * (a["evals"][-1]["avg"] - b["evals"][-1]["avg"]) for a, b in pairs]
        centre, half = interval(gaps)
        lost, behind = ([run for run in side if is_lost(run)] for side in zip(*pairs))
        exact = [run["policy"] for run in lost if "policy" in run]
        early = sum(is_lost(run, len(run["evals"]) // 2) for run in lost)
        ahead = sum(gap > 0 for gap in gaps)
        rows.append([
            *names, f"{centre:+.0f} ± {half:.0f}", f"{ahead} of {len(gaps)}",
            f"p = {sign_test(ahead, len(gaps)):.2f}", f"{len(lost)} against {len(behind)}",
            str(early), f"{max(exact):.1%}" if exact else "",
            f"p = {fisher(len(lost), len(behind), len(gaps)):.2f}"])
    return markdown(rows)


def sign_test(ahead: int, pairs: int) -> float:
    """Two-sided p-value, if either side were ahead with a chance of 1/2."""
    most = max(ahead, pairs - ahead)
    return min(1.0, 2 * sum(comb(pairs, i) for i in range(most, pairs + 1)) / 2**pairs)


def report(lines: list[dict]) -> str:
    found = by_cell(lines)
    return f"{table(found)}\n## Arms compared\n\n{comparisons(found)}"


# ------------------------------------------------------------------------------------------ picture
OLD = "N = {}, learning rate 0.003"
PICTURES = {  # a column for the cells that begin like this, and its title
    "": {
        "low-N1-": "N = 1, learning rate 0.002", "long-N1-": "the same, longer",
        **{f"stress-N{N}-": OLD.format(N) for N in (2, 4, 8)}},
    "-masks": {f"mask-N{N}-": OLD.format(N) for N in (4, 8)},
    "-weight": {
        "eight-N1-none-": "The engine's weights: fp8, 4 bits", "coarse2-N1-none-": "2 bits",
        "coarse1-N1-none-": "1 bit", "coarse1-N1-r3-": "1 bit, and R3"}}
ROWS = {
    "avg": "held-out accuracy", "entropy_trained": "entropy, nats per token",
    "kl_k3": r"KL($\mu$ ‖ $\pi_{old}$), k3, nats per token",
    "weight_over_2": "share of tokens with a weight above 2"}


def draw(lines: list[dict], name: str) -> None:
    found = by_cell(lines)
    for about, columns in PICTURES.items():
        panels = {}
        for start, title in columns.items():
            own = {cell: runs for cell, runs in found.items() if cell.startswith(start)}
            panels[title] = "gradient steps", [
                {label(cell): curves(cell, runs, key) for cell, runs in own.items()}
                for key in ROWS]
        picture(name + about, (4 * len(columns), 12), [*ROWS.values()], panels)


def label(cell: str) -> str:
    """Without precision and N, in words."""
    words = dict(none="no replay", noclip="no mask", nois="no weight", length="length-normalised")
    return ", ".join(words.get(part, part) for part in cell.split("-")[2:] if part != "is")


def curves(cell: str, runs: list[dict], key: str) -> list[tuple]:
    if key == "weight_over_2" and "nois" in cell:  # it is 1 everywhere
        return []
    N = int(cell.split("-")[1][1:])
    logged = [series(run["evals" if key == "avg" else "metrics"], key) for run in runs]
    return [([N * step for step in steps], values) for steps, values in logged]


STUDIES = dict(objective=Study(
    runs, keep, report, draw,
    endings=("gradient that is not finite", "Engine and trainer disagree")))
