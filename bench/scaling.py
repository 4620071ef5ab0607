"""Seconds per step against batch, samples, length and model size, with the limits of this machine drawn in.

    python bench/scaling.py     # about four minutes on one core; results/scaling.json and scaling.png

Every point is one phase of a step on made-up models (common.set_lengths) whose responses all but reach the limit: rollouts by
the engine, and an update on them. The limits are what the phase would take if it did nothing but the arithmetic of its
matrix products at the speed of a large one, or (rollouts) nothing but reading the weights once per engine step at the speed
of a large copy. Both speeds are measured here first.
"""
import argparse
import random
import tempfile
from types import SimpleNamespace

from common import RESULTS, alternate, load, median, parameters, project, random_model, save, set_lengths

BASE = dict(prompts=8, samples=8, length=32, layers=4, hidden=128)
SWEEPS = dict(
    prompts=[dict(prompts=n) for n in (2, 4, 8, 16, 32)],
    samples=[dict(samples=n) for n in (2, 4, 8, 16, 32)],
    length=[dict(length=n) for n in (16, 32, 64, 128, 256)],
    parameters=[dict(hidden=n, layers=m, prompts=4, samples=4) for n, m in ((96, 4), (192, 4), (320, 6), (512, 8), (704, 8))])


def speeds() -> dict:
    """FLOP/s of a large float32 matrix product, bytes/s of reading and writing a large array."""
    import torch

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    big, copy = torch.randn(2**25), torch.empty(2**25)
    taken = alternate(5, product=lambda: a @ b, copy=lambda: copy.copy_(big))
    return dict(flops=2 * 1024**3 / median(taken["product"]), bandwidth=2 * big.nbytes / median(taken["copy"]))


def measure(point: dict, repeats: int, limits: dict) -> dict:
    """Medians of rollouts and update for one setting, and their limits."""
    x = SimpleNamespace(**BASE | point)
    size = dict(hidden_size=x.hidden, intermediate_size=11 * x.hidden // 4, num_hidden_layers=x.layers,
                num_attention_heads=x.hidden // 32, num_key_value_heads=x.hidden // 32, tie_word_embeddings=False)
    with tempfile.TemporaryDirectory() as folder:
        random_model(size, folder)
        set_lengths(folder, [(1.0, 100 * x.length)])
        with project(folder, sampler="uniform", n=x.samples, batch_prompts=x.prompts, max_tokens=x.length, lr=1e-12,
                     max_prompt_tokens=64, micro_tokens=4096, eval_questions=4) as run:
            return dict(point=vars(x)) | phases(run, repeats, limits)


def phases(run, repeats: int, limits: dict) -> dict:
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
    return dict(
        parameters=weights, tokens=tokens, rollouts=median(taken["rollouts"]), update=median(taken["update"]),
        rollouts_limit=max(2 * weights * tokens / limits["flops"], 4 * weights * steps / limits["bandwidth"]),
        update_limit=4 * weights * tokens / limits["flops"], raw=taken)  # frozen weights: no weight gradient


def draw(result: dict, path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    panels = figure.subplots(1, len(SWEEPS), sharey=True)
    names = dict(prompts="prompts per step", samples="samples per prompt", length="tokens per response",
                 parameters="parameters of the model")
    for axes, (sweep, points) in zip(panels, result["sweeps"].items()):
        x = [p["parameters"] if sweep == "parameters" else p["point"][sweep] for p in points]
        for phase, colour in dict(rollouts="tab:blue", update="tab:orange").items():
            axes.loglog(x, [p[phase] for p in points], "o-", color=colour, label=phase)
            axes.loglog(x, [p[f"{phase}_limit"] for p in points], ":", color=colour, label=f"{phase}: limit")
        axes.set_xlabel(names[sweep])
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("seconds")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="How the time of a step grows.")
    parser.add_argument("--only", nargs="*", default=SWEEPS, choices=SWEEPS, help="keep the others' results")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="", help="folder of the result (default: bench/results)")
    args = parser.parse_args()
    limits, known = speeds(), load("scaling").get("sweeps", {})
    print(f"matrix product {limits['flops'] / 1e9:.0f} GFLOP/s, copy {limits['bandwidth'] / 1e9:.1f} GB/s", flush=True)
    for sweep in args.only:
        known[sweep] = []
        for point in SWEEPS[sweep]:
            known[sweep].append(found := measure(point, args.repeats, limits))
            print(f"{sweep:10} {found['parameters'] / 1e6:6.2f} M   {found['tokens']:6,} tokens   rollouts {found['rollouts']:7.3f} s "
                  f"(limit {found['rollouts_limit']:.3f})   update {found['update']:7.3f} s (limit {found['update_limit']:.3f})", flush=True)
    result = dict(limits=limits, sweeps={sweep: known[sweep] for sweep in SWEEPS if sweep in known})
    save("scaling", result, args.out)
    draw(result, (RESULTS if not args.out else __import__("pathlib").Path(args.out)) / "scaling.png")


if __name__ == "__main__":
    main()
