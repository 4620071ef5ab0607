"""What does each way of sampling buy at equal cost? Trains the built-in model with every sampler, several seeds each.

    python bench/compare_samplers.py                    # all; continues where it stopped (about 45 minutes on one idle core)
    python bench/compare_samplers.py --only gvm         # a part
    python bench/compare_samplers.py --draw             # only the table and the page, from the committed logs

Everything but the sampler is the same: model, optimizer, clipping, schedule, lengths, batch of prompts, temperature. The
advantage is reward minus the mean of the prompt's pool, without division by the standard deviation, for all.

Writes bench/results/samplers/NAME-seedS.jsonl (a header, then one line per step and evaluation), samplers.md, samplers.png.
"""
import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "samplers"
RUNS = ROOT / "runs" / "compare"
sys.path.insert(0, str(ROOT))

ARMS = {  # name -> flags; n = 4 is what the adaptive rules keep, n = 16 about what they draw
    "uniform-4": ["--sampler", "uniform", "--n", "4"],
    "uniform-16": ["--sampler", "uniform", "--n", "16"],
    "dapo": ["--sampler", "dapo", "--n", "4"],
    "ada-pos": ["--sampler", "ada-pos"],
    "ada-balance": ["--sampler", "ada-balance"],
    "ada-est": ["--sampler", "ada-est", "--M", "8"],
    "gvm": ["--sampler", "gvm", "--M", "8"],
}
COMMON = ["--steps", "60", "--eval-every", "10", "--eval-questions", "120", "--batch-prompts", "16", "--lr", "0.001"]
KEPT = ("step", "samples", "samples_total", "tokens_total", "seconds_total", "reward_first_round", "zero_signal", "unresolved",
        "spent_by_pass_rate", "response_length", "entropy", "grad_norm", "avg", "ci_low", "ci_high")


def train(arm: str, seed: int) -> None:
    """One run through the command line, resumed if it was interrupted; then its logs, made small, go to bench/results."""
    log = RESULTS / f"{arm}-seed{seed}.jsonl"
    if log.exists():
        return
    name = f"{arm}-seed{seed}"
    RUNS.mkdir(parents=True, exist_ok=True)
    flags = [*COMMON, *ARMS[arm], "--seed", str(seed), "--name", name, "--resume"]
    subprocess.run([sys.executable, str(ROOT / "minirl.py"), *flags], cwd=RUNS, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    keep_log(arm, seed, flags)


def keep_log(arm: str, seed: int, flags: list[str]) -> None:
    """The small part of a finished run's logs that the table and the page need."""
    run, log = RUNS / "runs" / f"{arm}-seed{seed}", RESULTS / f"{arm}-seed{seed}.jsonl"
    rows = [dict(arm=arm, seed=seed, flags=flags, versions=json.loads((run / "config.json").read_text())["versions"])]
    for file in ("metrics.jsonl", "eval.jsonl"):
        for line in (run / file).read_text().splitlines():
            rows.append({key: value for key, value in json.loads(line).items() if key in KEPT})
    RESULTS.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))


def load() -> dict:
    """{arm: [(steps, evaluations) of each seed]} from the committed logs."""
    found = defaultdict(list)
    for arm in ARMS:
        for log in sorted(RESULTS.glob(f"{arm}-seed*.jsonl")):
            _, *rows = map(json.loads, log.read_text().splitlines())
            found[arm].append(([row for row in rows if "avg" not in row], [row for row in rows if "avg" in row]))
    return found


def at_budget(evaluations: list[dict], x: str, budget: float) -> float:
    """Held-out accuracy when a run had spent `budget`, between its evaluations by straight lines."""
    import numpy as np

    return float(np.interp(budget, [row[x] for row in evaluations], [row["avg"] for row in evaluations]))


def spread(values: list[float]) -> str:
    """Mean and half the 95 % interval over seeds (Student's t)."""
    from statistics import mean, stdev

    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values))
    return f"{mean(values):.1%} ± {t * stdev(values) / len(values) ** 0.5:.1%}" if t else f"{mean(values):.1%}"


def table(found: dict) -> str:
    """Accuracy at the end, and at the largest budget of samples, tokens and seconds that every run reached."""
    budgets = {x: min(ev[-1][x] for seeds in found.values() for _, ev in seeds)
               for x in ("samples_total", "tokens_total", "seconds_total")}
    head = ["sampler", "seeds", "at the last step", f"at {budgets['samples_total']:,.0f} samples",
            f"at {budgets['tokens_total']:,.0f} tokens", f"at {budgets['seconds_total']:,.0f} s", "samples per step", "no signal"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for arm, seeds in found.items():
        steps = [row for metrics, _ in seeds for row in metrics]
        cells = [arm, str(len(seeds)), spread([ev[-1]["avg"] for _, ev in seeds])]
        cells += [spread([at_budget(ev, x, budget) for _, ev in seeds]) for x, budget in budgets.items()]
        cells += [f"{sum(r['samples'] for r in steps) / len(steps):.0f}", f"{sum(r['zero_signal'] for r in steps) / len(steps):.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(found: dict) -> None:
    """Held-out accuracy against steps, samples, tokens and seconds; signal and cost per step."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, axes = plt.subplots(2, 4, figsize=(21, 9), layout="constrained")
    colors = dict(zip(ARMS, ("#999999", "#000000", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7")))
    for ax, (x, label) in zip(axes.flat, (("step", "training steps"), ("samples_total", "samples drawn"),
                                          ("tokens_total", "tokens generated"), ("seconds_total", "seconds of training"))):
        for arm, seeds in found.items():
            end = min(ev[-1][x] for _, ev in seeds)
            grid = np.linspace(0, end, 40)
            curves = np.array([[at_budget(ev, x, g) for g in grid] for _, ev in seeds])
            ax.plot(grid, curves.mean(0), color=colors[arm], label=arm)
            ax.fill_between(grid, curves.min(0), curves.max(0), color=colors[arm], alpha=0.12, lw=0)
        ax.set(xlabel=label, ylabel="held-out accuracy (avg@8)", title=f"Accuracy against {label}")
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.flat[0].legend(fontsize=9)
    panels = (("zero_signal", "Share of prompts without signal"), ("samples", "Samples per step"), ("entropy", "Entropy (nats per token)"))
    for ax, (key, title) in zip(axes.flat[4:], panels):
        for arm, seeds in found.items():
            values = np.nanmean([[row.get(key, np.nan) for row in metrics] for metrics, _ in seeds], 0)
            smooth = np.convolve(values, np.ones(9) / 9, "valid")
            ax.plot(range(5, 5 + len(smooth)), smooth, color=colors[arm], label=arm)
        ax.set(xlabel="training steps (mean of 9)", title=title, ylim=(0, None))
    draw_spending(axes.flat[7], found)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Samplers on the built-in model: mean of the seeds, band from the lowest to the highest")
    figure.savefig(RESULTS.parent / "samplers.png", dpi=110)


def draw_spending(ax, found: dict) -> None:
    """Where the samples went, by the pass rate that their prompt's pool showed."""
    import matplotlib.pyplot as plt

    bands = {"none": "0", "0.0": "up to 0.2", "0.2": "0.2-0.4", "0.4": "0.4-0.6", "0.6": "0.6-0.8", "0.8": "0.8 and more", "all": "1"}
    left = dict.fromkeys(found, 0.0)
    for (band, label), color in zip(bands.items(), plt.get_cmap("cividis")([0, 0.17, 0.33, 0.5, 0.67, 0.83, 1.0])):
        share = {}
        for arm, seeds in found.items():
            steps = [row["spent_by_pass_rate"] for metrics, _ in seeds for row in metrics]
            share[arm] = sum(step.get(band, 0) for step in steps) / sum(sum(step.values()) for step in steps)
        ax.barh(list(found), [share[arm] for arm in found], left=[left[arm] for arm in found], color=color, label=label)
        left = {arm: left[arm] + share[arm] for arm in found}
    ax.set(title="Share of samples by the pass rate of their pool", xlim=(0, 1))
    ax.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.06))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=ARMS, default=list(ARMS), help="train these samplers only")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    plan = [(arm, seed) for seed in range(args.seeds) for arm in args.only]
    for i, (arm, seed) in enumerate(plan if not args.draw else []):
        print(f"[{i + 1}/{len(plan)}] {arm}, seed {seed}", flush=True)
        train(arm, seed)
    found = load()
    if not found:
        raise SystemExit("There are no logs yet: run without --draw first.")
    (RESULTS.parent / "samplers.md").write_text(table(found))
    draw(found)
    print(table(found))


if __name__ == "__main__":
    main()
