"""Draws what adaptive sampling gains in each study: python bench/forest.py

A row of bench/results/forest.png is a difference of two arms with its interval over pairs of seeds.
"""
from functools import partial

import grpo
import sampling
import store
from store import T_95, T_975, at, interval, of, paired


def toy(study: str, regime: str, seeds, answers: int) -> list[float]:
    """The pair's differences at so many sampled answers."""
    lines = of(store.load(study), seeds, regime=regime)
    return paired(lines, *sampling.PAIR, partial(at, cost="samples", budget=answers))


def real(study: str, first: str, second: str, cost: str = "samples") -> tuple[list[float], float]:
    """Differences at the largest cost that all runs of both arms have spent, and that cost."""
    lines = store.load(study)
    return sampling.at_most(of(lines, arm=second), cost, of(lines, arm=first))


def adaptive() -> list[tuple]:
    """(label, differences, quantiles, whether the comparison was planned) of each row."""
    facts = partial(toy, "longer_skills", "long", sampling.LONG_SEEDS)
    rows = [
        ("facts, 0.3 M, 16,000 answers",
         toy("skills", "stream", sampling.NEW_SEEDS, 16_000), T_95, True),
        ("facts, 0.3 M, 46,000 answers", facts(46_000), T_95, True),
        ("facts, 0.3 M, 60,000 answers", facts(60_000), T_95, False)]
    for label, study, rival in (
            ("templates, 135 M", "real_race", sampling.WIDE),
            ("templates and SVAMP, 135 M", "human", "uniform-4"),
            ("templates and SVAMP, 135 M", "human_gpu", "uniform-4"),
            ("SVAMP, 0.5 B", "qwen", "uniform-4")):
        values, answers = real(study, sampling.OURS, rival)
        rows.append((f"{label}, {answers:,} answers", values, T_95, True))
    return rows


def against_grpo() -> list[tuple]:
    arms = store.by_arm(store.load("grpo"), (grpo.DEFAULT, grpo.GRPO))
    if len(arms) < 2 or min(map(len, arms.values())) < 3:
        return []  # the interval of two pairs is 25 standard deviations wide
    return [(f"templates, 135 M, equal {cost}",
             real("grpo", grpo.DEFAULT, grpo.GRPO, grpo.COSTS[cost])[0], T_975, True)
            for cost in grpo.PRIMARY]


def draw(groups: dict[str, list[tuple]]) -> None:
    """A panel for each group with rows; an exploratory comparison has a hollow point."""
    from matplotlib.figure import Figure

    groups = {title: rows for title, rows in groups.items() if rows}
    heights = [len(rows) + 1 for rows in groups.values()]
    figure = Figure(figsize=(8.4, 0.6 + 0.33 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(groups), sharex=True, squeeze=False, height_ratios=heights)
    for axis, (title, rows) in zip(axes[:, 0], groups.items()):
        for y, (label, values, quantiles, planned) in enumerate(rows):
            centre, half = (100 * x for x in interval(values, quantiles))
            said = f"{centre:+.1f} ± {half:.1f}  ({len(values)} seeds)"
            print(f"{label}: {said}")
            axis.errorbar(centre, y, xerr=half, fmt="o", color="#0072B2", capsize=3,
                          markerfacecolor="#0072B2" if planned else "white")
            axis.text(1.02, y, said, transform=axis.get_yaxis_transform(), va="center")
        axis.set_yticks(range(len(rows)), [label for label, *_ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_title(title, loc="left", fontsize=10)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel("difference of held-out accuracy, points (hollow: exploratory)")
    figure.savefig(store.RESULTS / "forest.png", dpi=110)


if __name__ == "__main__":
    draw({"Adaptive minus uniform with more prompts, equal answers": adaptive(),
          "Default minus GRPO (n = 8), 97.5 % intervals": against_grpo()})
