"""Seconds per step against batch, samples, length and model size, and this machine's limits.

    python bench/scaling.py     # about four minutes on one core; results/scaling.json and
                                scaling.png

Every point is one phase of a step on made-up models (common.set_lengths) whose responses all but
reach the limit: rollouts by the engine, and an update on them. The limits are what the phase would
take if it did nothing but the arithmetic of its matrix products at the speed of a large one, or
(rollouts) nothing but reading the weights once per engine step at the speed of a large copy. Both
speeds are measured here first.
"""
import argparse
import contextlib
import itertools
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from common import (
    RESULTS, alternate, load, median, parameters, project, random_model, save, set_lengths)

BASE = dict(prompts=4, samples=8, length=32, layers=4, hidden=128)
SWEEPS = dict(
    prompts=[dict(prompts=n) for n in (1, 2, 4, 8, 16)],
    samples=[dict(samples=n) for n in (2, 4, 8, 16, 32)],
    length=[dict(length=n) for n in (16, 32, 64, 128, 256)],
    parameters=[dict(hidden=n, layers=m, samples=4)
                for n, m in ((96, 4), (192, 4), (320, 6), (512, 8), (704, 8))])


def speeds(known: dict) -> dict:
    """FLOP/s of a large float32 matrix product, bytes/s of reading and writing a large array; the
    best that was ever seen."""
    import torch

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    big, copy = torch.randn(2**25), torch.empty(2**25)
    taken = alternate(10, product=lambda: a @ b, copy=lambda: copy.copy_(big))
    return dict(flops=max(known.get("flops", 0), 2 * 1024**3 / min(taken["product"])),
                bandwidth=max(known.get("bandwidth", 0), 2 * big.nbytes / min(taken["copy"])))


@contextlib.contextmanager
def project_of_size(hidden: int, layers: int):
    """A parts.run.Run with a made-up model of this size, for all points that have it: to start
    takes longer than to measure."""
    size = dict(hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers,
                num_attention_heads=hidden // 32,
                num_key_value_heads=hidden // 32, tie_word_embeddings=False)
    longest = max(point["length"] for point in SWEEPS["length"])
    with tempfile.TemporaryDirectory() as folder:
        random_model(size, folder)
        set_lengths(folder, [(1.0, 100 * longest)])
        with project(folder, sampler="uniform", max_tokens=longest, lr=1e-6, max_prompt_tokens=64,
                     micro_tokens=4096,
                     eval_questions=4) as run:
            yield run


def measure(size: tuple, points: list[dict], repeats: int):
    """Yields the medians of rollouts and update, and how much work they are, for all points of one
    model.

    It lets go of the engine when it ends: the next one cannot start beside it.
    """
    with project_of_size(*size) as run:
        for point in points:
            run.config = replace(run.config, n=point["samples"], batch_prompts=point["prompts"],
                                 max_tokens=point["length"])
            yield dict(point=point) | phases(run, repeats)


def phases(run, repeats: int) -> dict:
    import minirl

    groups = []

    def rollouts():
        groups[:] = minirl.sample(run)
        for group in groups:  # a made-up model is never right: every row gets a gradient here
            group.advantages, group.weights = [0.5] * len(group.kept), [1.0] * len(group.kept)

    def update():
        minirl.update(run.policy, run.optimizer, run.schedule, groups, run.config, random.Random(0))

    before = run.engine.steps
    taken = alternate(repeats, rollouts=rollouts, update=update)
    steps = (run.engine.steps - before) / (repeats + 1)
    weights, tokens = parameters(run.policy), sum(
        len(g.problem.prompt_ids) + len(s.rollout.token_ids) for g in groups for s in g.pool)
    return dict(parameters=weights, tokens=tokens, engine_steps=steps,
                rollouts=median(taken["rollouts"]),
                update=median(taken["update"]), raw=taken)


def add_limits(point: dict, speed: dict) -> None:
    """Frozen weights: 2 FLOPs per weight and token forward, 2 backward (no weight gradient)."""
    flops = 2 * point["parameters"] * point["tokens"]
    reading = 4 * point["parameters"] * point["engine_steps"]
    point["rollouts_limit"] = max(flops / speed["flops"], reading / speed["bandwidth"])
    point["update_limit"] = 2 * flops / speed["flops"]


def draw(sweeps: dict, speed: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)[0]
    names = dict(prompts="prompts per step", samples="samples per prompt",
                 length="tokens per response",
                 parameters="M parameters (4 samples per prompt)")
    for axes, (sweep, points) in zip(panels, sweeps.items()):
        x = [p["parameters"] / 1e6 if sweep == "parameters" else p["point"][sweep] for p in points]
        for phase, colour in dict(rollouts="tab:blue", update="tab:orange").items():
            axes.loglog(x, [p[phase] for p in points], "o-", color=colour, label=phase)
            axes.loglog(x, [p[f"{phase}_limit"] for p in points], ":", color=colour,
                        label=f"{phase}, limit")
        axes.set_xticks(x, [f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in x])
        axes.minorticks_off()
        axes.set_xlabel(names[sweep])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("seconds")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    base = (f"{BASE['prompts']} prompts, {BASE['samples']} samples each of {BASE['length']} "
            "tokens, 0.9 M parameters")
    limits = (f"arithmetic at {speed['flops'] / 1e9:.0f} GFLOP/s, "
              f"reading weights at {speed['bandwidth'] / 1e9:.0f} GB/s")
    figure.suptitle(f"What is not varied: {base}. Limits: {limits}", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="How the time of a step grows.")
    parser.add_argument("--only", nargs="*", default=SWEEPS, choices=SWEEPS,
                        help="keep the others' results")
    parser.add_argument("--repeats", type=int, default=3,
                        help="of every point; medians are drawn (default: 3)")
    parser.add_argument("--out", default="", help="folder of the result (default: bench/results)")
    args = parser.parse_args()
    known, speed = load("scaling").get("sweeps", {}), speeds({})
    known |= {sweep: [] for sweep in args.only}
    todo = [BASE | point | dict(sweep=sweep) for sweep in args.only for point in SWEEPS[sweep]]
    for size, points in itertools.groupby(todo,
                                          key=lambda point: (point["hidden"], point["layers"])):
        for found in measure(size, points, args.repeats):
            sweep = found["point"]["sweep"]
            known[sweep].append(found)
            speed = speeds(speed)
            print(f"{sweep:10} {found['parameters'] / 1e6:6.2f} M parameters   "
                  f"{found['tokens']:6,} tokens   "
                  f"rollouts {found['rollouts']:7.3f} s   update {found['update']:7.3f} s",
                  flush=True)
    sweeps = {sweep: known[sweep] for sweep in SWEEPS if sweep in known}
    for point in (point for points in sweeps.values() for point in points):
        add_limits(point, speed)
    print(f"matrix product {speed['flops'] / 1e9:.0f} GFLOP/s, copy "
          f"{speed['bandwidth'] / 1e9:.1f} GB/s")
    save("scaling", dict(speed=speed, sweeps=sweeps), args.out)
    draw(sweeps, speed, Path(args.out or RESULTS, "scaling.png"))


if __name__ == "__main__":
    main()
