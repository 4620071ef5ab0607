"""The pictures of walkthrough.ipynb as PNGs, which are shown even if the notebook cannot run."""
from io import BytesIO

from IPython.display import Image
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

RIGHT, WRONG, DARK = "#2a9d8f", "#c8ccd2", "#22333b"


def panel(height: float, width: float = 8.5):
    """(figure, axis), in inches."""
    figure = Figure(figsize=(width, height), dpi=72, layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def shown(figure) -> Image:
    file = BytesIO()
    figure.savefig(file, format="png")
    return Image(file.getvalue())


def question(group) -> str:
    """The prompt without the tokens that mark the turns."""
    return group.problem.prompt.removeprefix("<|user|>").removesuffix("<|assistant|>")


def rounds(groups, M: int) -> Image:
    """A row per prompt, a square per answer, a gap between rounds, frames around kept answers."""
    figure, axis = panel(0.28 * len(groups) + 0.9)
    for y, group in enumerate(groups):
        kept = {s.index for s in group.kept}
        for s in group.pool:
            x = s.index + 0.7 * (s.index // M)
            color, edge = RIGHT if s.correct else WRONG, DARK if s.index in kept else "none"
            axis.add_patch(Rectangle((x, y + 0.1), 0.8, 0.8, facecolor=color, edgecolor=edge,
                                     linewidth=1.5))
        right = sum(s.correct for s in group.pool)
        axis.text(x + 1.4, y + 0.5, f"{right} of {len(group.pool)}", va="center", fontsize=8)
    axis.set(xlim=(-0.5, 39), ylim=(len(groups), 0),
             xlabel="answers in rounds (green: right, grey: wrong, framed: kept)")
    axis.set_yticks([y + 0.5 for y in range(len(groups))], map(question, groups), fontsize=8)
    axis.set_xticks([])
    return shown(figure)


def advantages(group) -> Image:
    """Reward minus the mean of the pool for every answer. Answers that are not kept are pale."""
    figure, axis = panel(2.6)
    kept = {s.index for s in group.kept}
    for s in group.pool:
        color, alpha = RIGHT if s.correct else "#8d99ae", 1 if s.index in kept else 0.25
        axis.bar(s.index, s.reward - group.baseline, color=color, alpha=alpha)
    axis.axhline(0, color=DARK, linewidth=1)
    axis.set(xlabel="answer (pale: not kept)", ylabel="reward - mean of the pool",
             xlim=(-0.7, len(group.pool) - 0.3))
    return shown(figure)


def tokens(answers) -> Image:
    """A line per answer. Colours: pi_theta/pi_old (green up, red down). Frames: masked tokens."""
    figure, axis = panel(0.5 * len(answers), width=10)
    longest = 48
    for y, table in enumerate(answers):
        axis.text(-0.9, y, f"A = {table.A.iloc[0]:+.2f}", ha="right", va="center", fontsize=9)
        x = 0.0
        for token, r, mask in zip(table.token, table.r, table["mask"]):
            text = token.replace("\n", "\u21b5").replace("<|endoftext|>", "end")
            color = colormaps["RdYlGn"](0.5 + max(-0.35, min(0.35, (r - 1) / 2)))
            box = dict(boxstyle="round,pad=0.25", facecolor=color, linewidth=1.5,
                       edgecolor="none" if mask else DARK)
            axis.text(x + len(text) / 2, y, text, ha="center", va="center", fontsize=9,
                      family="monospace", bbox=box)
            x += len(text) + 0.9
        longest = max(longest, x)
    axis.set(xlim=(-5, longest), ylim=(len(answers) - 0.4, -0.6))
    axis.axis("off")
    return shown(figure)


def learning(metrics, held_out, guess: float) -> Image:
    """The reward of each step, the held-out accuracy before and after, and a reader's guess."""
    figure, axis = panel(3, width=6)
    axis.plot(metrics.step, metrics.reward_first_round, label="reward of first rounds")
    axis.errorbar(held_out.step, held_out.avg, fmt="o", capsize=3,
                  yerr=[held_out.avg - held_out.ci_low, held_out.ci_high - held_out.avg],
                  label="held-out avg@8, 95 % interval")
    axis.axhline(guess, linestyle=":", color=DARK, label="your guess")
    axis.set(xlabel="training step", ylabel="share of right answers", ylim=(0, 1))
    axis.legend(loc="lower right")
    return shown(figure)
