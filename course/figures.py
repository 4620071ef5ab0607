"""Draws the figures of the lecture notes into course/figures/.

    python course/figures.py            # all of them, some seconds
    python course/figures.py weights    # one
"""
import json
import math
import sys
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ada_sampler import SamplerConfig, allocate_gvm
from course import laws
from explorer.panels import COLORS

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "course" / "figures"
RATES = [i / 100 for i in range(1, 100)]
RULES = {
    "uniform, n = 4": SamplerConfig(sampler="uniform", n=4),
    "uniform, n = 16": SamplerConfig(sampler="uniform", n=16),
    "ada-pos": SamplerConfig(sampler="ada-pos"),
    "ada-balance": SamplerConfig(),
}


def lines(axis, xs, curves: dict, style="-", xlabel="pass rate p", **labels) -> None:
    """One line per curve: its name, and a y for each x or a function of x."""
    for color, (name, ys) in zip(COLORS, curves.items()):
        ys = [ys(x) for x in xs] if callable(ys) else ys
        axis.plot(xs, ys, style, label=name, color=color)
    axis.set(xlabel=xlabel, **labels)
    axis.legend(frameon=False, fontsize=8)


def bars(axis, places: list[str], groups: dict, **labels) -> None:
    """A group of bars at each place: groups holds a name, and a height for each place."""
    width = 0.8 / len(groups)
    for i, (color, (name, heights)) in enumerate(zip(COLORS, groups.items())):
        xs = [x + (i - (len(groups) - 1) / 2) * width for x in range(len(places))]
        axis.bar(xs, heights, width, label=name, color=color)
    axis.set(xticks=range(len(places)), xticklabels=places, **labels)
    axis.legend(frameon=False, fontsize=8)


def by_rule(value) -> dict:
    """A curve for each rule: value(p, its settings) at each pass rate p."""
    return {name: [value(p, rule) for p in RATES] for name, rule in RULES.items()}


def logged(cell: str, key: str, study: str = "objective") -> list[list[float]]:
    """A metric of a study's runs: one list of values per seed."""
    text = (ROOT / "bench" / "results" / f"{study}.jsonl").read_text()
    runs = [json.loads(line) for line in text.splitlines()]
    return [run["metrics"][key] for run in runs if run["cell"] == cell]


def mean(values) -> float:
    values = [value for value in values if value is not None and math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


# ------------------------------------------------------------------------------------- the figures
def baselines(left, right) -> None:
    """Session 1: what a baseline saves; how many groups have no gradient."""
    lines(left, RATES, {
        "no baseline": lambda p: laws.variance_per_draw(p, 0),
        "the others' mean, m = 4": lambda p: laws.variance_leave_one_out(p, 4),
        "b = p": lambda p: laws.variance_per_draw(p, p),
    }, title="second moment of one sample's gradient", ylabel="E[(r - b)² |s|²] / G²")
    lines(right, RATES, {f"n = {n}": [laws.silent(p, n) for p in RATES] for n in (4, 8, 16)},
          title="groups without gradient", ylabel="probability")


def one_step(left, right) -> None:
    """Session 1: a policy with three answers before and after one step."""
    names, pi = ["A (right)", "B (wrong)", "C (wrong)"], [0.2, 0.5, 0.3]
    for axis, sampled, rewards in ((left, "ABBC", [1, 0, 0, 0]), (right, "BBBC", [0, 0, 0, 0])):
        after = laws.after_step(pi, ["ABC".index(answer) for answer in sampled], rewards)
        bars(axis, names, {"before the step": pi, "after the step": after}, ylim=(0, 0.7),
             title=f"sampled: {', '.join(sampled)}", ylabel="probability of the answer")


def temperature(left, right) -> None:
    """Session 2: the drift of a wrong temperature; k3 in three precisions."""
    logits = [i / 20 for i in range(-100, 101)]
    xs = [laws.softmax([z, 0])[0] for z in logits]
    lines(left, xs, {f"sampled at τ = {tau}": [laws.drift([z, 0], tau)[0] for z in logits]
                     for tau in (0.7, 1.0, 1.4)},
          title="push on a token's logit without any reward", xlabel="its probability at τ = 1",
          ylabel="expected gradient, advantage 1")
    precisions = ["float32", "float16", "bfloat16"]
    studied = {"logits in float32": "float32", "logits in 16 bits": "16 bits"}
    k3 = {name: [mean(sum(logged(f"tiny, {precision}, {logits}", "kl_k3", "precision"), []))
                 for precision in precisions] for name, logits in studied.items()}
    lines(right, precisions, k3, style="o", yscale="log", xlabel="precision of the weights",
          ylabel="k3, nats per token", ylim=(1e-14, 1e-3), title="KL(engine ‖ trainer)")


def draws(left, right) -> None:
    """Session 3: how many samples the rules take, and how often in vain."""
    lines(left, RATES, by_rule(lambda p, rule: laws.expected_yield(p, rule).draws),
          title="expected number of samples (M = 8, N = 4)", ylabel="samples per prompt")
    lines(right, RATES, by_rule(lambda p, rule: laws.expected_yield(p, rule).silent),
          title="prompts without gradient", ylabel="probability")


def weights(left, right) -> None:
    """Session 3: what balanced groups optimise."""
    def exact(**rule):
        return lambda p: laws.expected_yield(p, SamplerConfig(**rule)).weight

    lines(left, RATES, {
        "balance, in the limit: w(p)": laws.w_pool,
        "balance, M = 8, N = 4 (exact)": exact(),
        "mean of the kept as baseline, in the limit": laws.w_kept,
        "uniform, n = 4": exact(sampler="uniform"),
    }, title="effective weight: the update is w(p) ∇p", yscale="log")
    lines(right, RATES, {
        "none": exact(),
        "unbiased": exact(weighting="unbiased"),
        "log": exact(weighting="log"),
        "the target of log: 1/p": lambda p: 1 / p,
    }, title="ada-balance with --weighting (exact)", yscale="log")


def budgets(left, right) -> None:
    """Session 4: the value of a sample, and of an answer that is trained on."""
    best = "1 = best possible per sample"
    lines(left, RATES, by_rule(laws.efficiency), title="value of a sample",
          ylabel=best, ylim=(0, 1.05))
    lines(right, RATES, by_rule(lambda p, rule: laws.efficiency(p, rule, "trained")),
          title="value of an answer that is trained on", ylabel=best, yscale="log")


def shares(left, right) -> None:
    """Session 4: how the rules divide 100 samples among four prompts."""
    rates = [0.02, 0.2, 0.5, 0.9]

    def in_rounds(rule):
        samples = [laws.expected_yield(p, rule).draws for p in rates]
        return [100 * one / sum(samples) for one in samples]

    def by_variance(alpha):
        return allocate_gvm(rates, [1.0] * len(rates), 100, alpha, beta=2)

    labels = dict(xlabel="pass rate of the prompt", ylabel="samples of 100", ylim=(0, 70))
    names = ("uniform, n = 4", "ada-pos", "ada-balance")
    bars(left, rates, {name: in_rounds(RULES[name]) for name in names},
         title="rules with rounds", **labels)
    bars(right, rates, {"p^(-1/2): ada-est, GVM without penalty": by_variance(0),
                        "GVM, α = 0.001, β = 2": by_variance(1e-3)},
         title="rules that allocate by pass rate", **labels)


def cap(left, right) -> None:
    """Session 5: what a cap costs and saves; two masks."""
    caps, sigmas = [1 + i / 20 for i in range(1, 181)], (0.5, 1.0, 1.5)
    lines(left, caps, {f"bias, σ = {sigma}": [1 - laws.capped(sigma, c)[0] for c in caps]
                       for sigma in sigmas})
    lines(left, caps, {f"standard deviation, σ = {sigma}":
                       [laws.capped(sigma, c)[1] ** 0.5 for c in caps] for sigma in sigmas},
          style=":", title="min(w, cap), log w ~ N(-σ²/2, σ²)", xlabel="cap", yscale="log",
          ylim=(1e-4, 5))
    left.axvline(5, color="0.7", linewidth=1)
    lines(right, RATES, {
        "ratio: masked above 1.27 π_old": lambda p: min(1, 1.27 * p),
        "dppo: masked above μ + 0.2": lambda p: min(1, p + 0.2),
    }, title="two masks, advantage > 0, π_old = μ", xlabel="probability when sampled",
        ylabel="probability now")
    right.plot([0, 1], [0, 1], color="0.7", linewidth=1)


def surrogate(left, right) -> None:
    """Session 5: PPO's objective of one token, and where the mask is 0."""
    ratios = [i / 100 for i in range(251)]

    def clipped(r):
        return min(max(r, 0.8), 1.27)

    for axis, A, masked in ((left, 1, (1.27, 2.5)), (right, -1, (0, 0.8))):
        axis.axvspan(*masked, color="0.9", label="mask = 0, no gradient")
        axis.plot(ratios, [r * A for r in ratios], "--", label="r A", color="0.5")
        lines(axis, ratios, {"min(r A, clip(r) A)": lambda r: min(r * A, clipped(r) * A)},
              title=f"A = {A}", xlabel="r = π_θ / π_old", ylabel="PPO's objective", xlim=(0, 2.5))


def flips(left, right) -> None:
    """Session 6: two router logits with errors; how often experts change."""
    xs = [0.7 + i / 500 for i in range(251)]
    lines(left, xs, {
        f"true value {mean}": lambda x, mean=mean: NormalDist(mean, 0.05).pdf(x)
        for mean in (1.0, 0.9)
    }, title="two router logits with errors (σ = 0.05)", xlabel="computed logit",
        ylabel="density", ylim=(0, 11))
    sigmas = [10 ** (i / 20 - 4) for i in range(61)]
    lines(right, sigmas, {
        f"{layers} layers" if layers > 1 else "1 layer":
            [1 - (1 - laws.flip(0.5, sigma)) ** layers for sigma in sigmas]
        for layers in (1, 24, 48)
    }, title="a token changes experts in at least one layer (κ = 0.5)", xlabel="σ of the error",
        ylabel="probability", xscale="log", yscale="log")
    right.title.set_fontsize(9)


def stale(left, right) -> None:
    """Session 6: old data in the committed runs."""
    counts = (2, 4, 8)

    def per_cent(cell, keys):
        return 100 * len(keys) * mean(
            value for key in keys for seed in logged(cell, key) for value in seed)

    masked, far = ("clipped_positive", "clipped_negative"), ("weight_over_2", "weight_under_half")
    for axis, keys, title in ((left, masked, "masked tokens"),
                              (right, far, "tokens with π_θ/μ beyond 2 or ½")):
        lines(axis, counts, {
            f"replay {replay}": [per_cent(f"stress-N{N}-{replay}-clip-is", keys) for N in counts]
            for replay in ("none", "r2", "r3")
        }, style="o-", title=title, xlabel="mini-batches per sampled batch", ylabel="per cent",
            xticks=counts)
        axis.set_ylim(0, None)


def hack(left, right) -> None:
    """Session 7: a loophole below and above the threshold."""
    for axis, h in ((left, 0.002), (right, 0.008)):
        path = laws.reward_flow(0.2, h, prompts=50, time=30)
        ts, rewards, accuracies = zip(*path[::20])
        lines(axis, ts, {"expected reward": rewards, "share of right answers": accuracies},
              title=f"loophole at h = {h}, threshold {0.2 / 50}", xlabel="time", ylim=(0, 1.05))


def paths(left, right) -> None:
    """Session 7: how right answers and loophole move together, from several starts."""
    for axis, prompts in ((left, 50), (right, 500)):
        for p, h in ((0.1, 1e-3), (0.1, 4e-3), (0.4, 4e-3), (0.4, 2e-2), (0.2, 1e-4)):
            _, rewards, rates = zip(*laws.reward_flow(p, h, prompts, time=60))
            axis.plot(rates, [reward - rate for reward, rate in zip(rewards, rates)],
                      color=COLORS[prompts * h > p], linewidth=1)
            axis.plot(p, h, "o", color=COLORS[prompts * h > p], markersize=4)
        axis.plot(RATES, [p / prompts for p in RATES], color="0.6", linestyle="--")
        axis.set(title=f"{prompts} prompts, threshold h = p / {prompts}", yscale="log",
                 xlabel="p, share of right answers", ylabel="h, share of the loophole",
                 xlim=(0, 1), ylim=(1e-5, 1.5))


def evaluation(left, right) -> None:
    """Session 8: half-width of an interval against k; the bias of the plug-in pass@k."""
    ks = [2**i for i in range(9)]
    lines(left, ks, {
        f"{questions} questions":
            [196 * laws.avg_variance(0.09, 0.16, questions, k) ** 0.5 for k in ks]
        for questions in (30, 90, 500)
    }, title="half-width of the 95 % interval of avg@k", xlabel="k", ylabel="points", xscale="log",
        xticks=ks, xticklabels=ks)
    left.set(ylim=(0, None))
    sizes, rates = list(range(8, 65)), (0.02, 0.1, 0.3)
    lines(right, sizes, {f"plug-in, p = {p}": [laws.plug_in(p, n, 8) for n in sizes]
                         for p in rates}, style="--")
    lines(right, sizes, {f"unbiased, p = {p}": [1 - (1 - p) ** 8] * len(sizes) for p in rates},
          title="expected pass@8 from n samples", xlabel="n", ylim=(0, 1.4))
    right.legend(frameon=False, fontsize=7, ncols=2, loc="upper right")


DRAWN = (baselines, one_step, temperature, draws, weights, budgets, shares, surrogate, cap, flips,
         stale, hack, paths, evaluation)


def draw(function) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    function(*figure.subplots(1, 2))
    path = FIGURES / f"{function.__name__}.png"
    figure.savefig(path, dpi=75, metadata={"Software": None}, pil_kwargs=dict(optimize=True))
    return path


def main() -> None:
    known = {function.__name__: function for function in DRAWN}
    for name in sys.argv[1:] or known:
        if name not in known:
            raise SystemExit(f"There is no figure {name}: choose from {', '.join(known)}.")
        print(draw(known[name]).relative_to(ROOT))


if __name__ == "__main__":
    main()
