"""The project's own targets of speed and memory, as a table (about five minutes on a CPU).

1  rollouts    one batch through the sampler, grading included, against bare `LLM.generate` of the
   same prompts, with the
               same number of samples of the same lengths, all known beforehand and asked for at
               once
2  training    minirl.update against the plainest loop over the same samples: sort by length, pad,
   full logits, log_softmax
3  memory      log-probs and entropy of 8,192 tokens at a vocabulary of 151,936 in float32, forward
   and backward
4  sync        handing over the weights, as a share of a step
6  start-up    from `python minirl.py` to the first answers

Target 5 has a script of its own, trl_baseline.py; the table shows its newest result.
"""
import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from common import (
    ROOT, alternate, load, median, middle_ratio, process_memory, project, save, seconds)

VOCABULARY = 151_936  # of Qwen2.5


# --------------------------------------------------------------------------------------- 1 rollouts
def rollouts(p, repeats: int) -> dict:
    """The default sampler; the same with half as many rounds of twice the size; and one that draws
    as much as the default in a single round: what our code costs, and what rounds cost."""
    two = replace(p, config=replace(p.config, M=2 * p.config.M, N=p.config.N // 2))
    single = replace(p, config=replace(p.config, sampler="uniform", n=2 * p.config.M))
    return {name: against_generate(run, repeats)
            for name, run in dict(default=p, two_rounds=two, single_round=single).items()}


def against_generate(p, repeats: int) -> dict:
    """Tokens per second of the sampler and of bare generation of the very same work; engine steps
    of both.

    Rounds take more engine steps than the longest response has tokens, with ever fewer responses in
    each: `extra_steps`, at `step_seconds` each, what a step takes with a single response in it.
    `ratio_steps_free` is the ratio without that time.

    Both sides do everything once before they are timed: oneDNN makes a kernel for every new number
    of running requests, and the side that came first would pay for both.
    """
    import minirl

    def draw(step, cursor):  # the same problems and the same random state: the same samples
        p.stream.cursor = cursor
        minirl.reseed("bench", step)
        return minirl.sample(p)

    rates = dict(sampler=[], generate=[], generate_without_logprobs=[])
    samples, steps, extra, alone, free = [], [], [], [], []
    for step in range(repeats + 1):
        cursor = p.stream.cursor
        groups = draw(step, cursor)
        bare_generate(p.engine, groups, 0)
        before = p.engine.steps
        taken, steps_taken = [seconds(draw, step, cursor)], p.engine.steps - before
        taken += [seconds(bare_generate, p.engine, groups, logprobs) for logprobs in (0, None)]
        lengths = [len(s.rollout.token_ids) for g in groups for s in g.pool]
        single = SimpleNamespace(problem=groups[0].problem, pool=[
            SimpleNamespace(rollout=SimpleNamespace(token_ids=[0] * 40))])
        one = seconds(bare_generate, p.engine, [single], 0) / 40
        if step:  # the first round is for warming up
            samples.append(len(lengths))
            steps.append(steps_taken)
            extra.append(steps_taken - max(lengths))
            alone.append(one)
            free.append(taken[1] / (taken[0] - one * extra[-1]))
            for side, value in zip(rates.values(), taken):
                side.append(sum(lengths) / value)
    return dict(tokens_per_second={name: median(values) for name, values in rates.items()},
                samples=median(samples),
                engine_steps=median(steps), extra_steps=median(extra), step_seconds=median(alone),
                ratio=middle_ratio(rates["sampler"], rates["generate"]),
                ratio_steps_free=median(free),
                ratio_without_logprobs=middle_ratio(rates["sampler"],
                                                    rates["generate_without_logprobs"]), raw=rates)


def bare_generate(engine, groups, logprobs) -> None:
    """As many samples of each prompt, of the same lengths, in one call; no text is decoded and
    nothing is graded."""
    from vllm import SamplingParams

    work = [(dict(prompt_token_ids=g.problem.prompt_ids), len(s.rollout.token_ids)) for g in groups
            for s in g.pool]
    params = [SamplingParams(temperature=1, max_tokens=length, ignore_eos=True, logprobs=logprobs,
                             detokenize=False)
              for _, length in work]
    engine.llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)


# --------------------------------------------------------------------------------------- 2 training
def training(p, repeats: int) -> dict:
    """Seconds of one update on one sampled batch, and of the plain loop at its best batch size."""
    import random

    import minirl

    groups = minirl.sample(p)
    rows = [minirl.Row(g.problem.prompt_ids + s.rollout.token_ids, len(g.problem.prompt_ids),
                       s.rollout.logprobs, weight)
            for g in groups for s, weight in g.rows() if weight]
    plain = {f"plain_{size}": lambda size=size: plain_update(p, rows, size)
             for size in (8, 16, 32, 64)}
    ours = lambda: minirl.update(p.policy, p.optimizer, p.schedule, groups, p.config,
                                 random.Random(0))  # noqa: E731
    taken = alternate(repeats, ours=ours, **plain)
    best = min(plain, key=lambda name: median(taken[name]))
    tokens = sum(len(row.ids) for row in rows)
    micros = minirl.micro_batches(rows, p.config.micro_tokens)
    padded = sum(len(micro) * max(len(row.ids) for row in micro) for micro in micros)
    return dict(tokens=tokens,
                tokens_per_second={name: tokens / median(values) for name, values in taken.items()},
                ratio=middle_ratio(taken[best], taken["ours"]), best_plain=best,
                padding=1 - tokens / padded, raw=taken)


def plain_update(p, rows, size: int) -> None:
    """REINFORCE in its plainest form: batches of `size` rows, sorted by length, one full logits
    tensor each."""
    import minirl
    import torch

    rows = sorted(rows, key=lambda row: len(row.ids))
    for batch in (rows[i:i + size] for i in range(0, len(rows), size)):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.ids) for row in batch],
                                              batch_first=True)
        logprobs = p.policy(
            input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        place = torch.arange(1, ids.shape[1])
        mask = torch.stack([(place >= row.prompt_length) & (place < len(row.ids)) for row in batch])
        advantage = torch.tensor([row.coefficient for row in batch])[:, None]
        (-(logprobs * advantage * mask).sum() / len(rows)).backward()
    minirl.optimizer_step(p.policy, p.optimizer, p.schedule, p.config)


# ----------------------------------------------------------------------------------------- 3 memory
def logprob_memory(tokens: int, hidden: int = 128) -> float:
    """GB that log-probs and entropy of `tokens` tokens need at their peak, forward and backward,
    inputs not counted.

    In a process of its own, for the system's count of a process's peak never goes down. `hidden` is
    small so that it ends soon; what grows with it is 2 x tokens x hidden numbers (the saved slope
    and the gradient).
    """
    command = [sys.executable, __file__, "--logprob-memory", str(tokens), str(hidden)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_logprob_memory(tokens: int, hidden: int) -> None:
    chunked(*logprob_inputs(64, hidden), tokens_at_once=8)  # libraries have been loaded
    inputs = logprob_inputs(tokens, hidden)
    before = process_memory("VmRSS")
    chunked(*inputs)
    print(process_memory("VmHWM") - before)


def logprob_inputs(tokens: int, hidden: int):
    import torch

    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, hidden) / hidden**0.5
    return torch.randn(tokens, hidden,
                       requires_grad=True), weight, torch.randint(VOCABULARY, (tokens,))


def chunked(h_T, weight, target_T, tokens_at_once: int = 0) -> None:
    """As logprobs.token_logprobs calls it."""
    from parts.logprobs import ChunkedLogprobs, Head

    chunk = tokens_at_once or max(1, 2**27 // (4 * len(weight)))
    ChunkedLogprobs.apply(h_T, Head(weight), target_T, 1.0, chunk)[0].sum().backward()


def unchunked(h_T, weight, target_T) -> None:
    """The same two results from one full logits tensor, by autograd."""
    logp = (h_T @ weight.T).log_softmax(-1)
    entropy_T = -(logp.detach().exp() * logp.detach()).sum(-1)
    logp.gather(-1, target_T[:, None]).sum().backward()
    assert len(entropy_T) == len(h_T)


def logprobs(repeats: int) -> dict:
    """Peak memory at several numbers of tokens,
    and seconds against the unchunked computation of 512."""
    from functools import partial

    inputs = logprob_inputs(512, 128)
    taken = alternate(repeats, chunked=partial(chunked, *inputs),
                      unchunked=partial(unchunked, *inputs))
    return dict(gb={tokens: logprob_memory(tokens) for tokens in (8192, 16384)},
                slower=middle_ratio(taken["chunked"], taken["unchunked"]), raw=taken)


# ---------------------------------------------------------------------------------- 4 sync, 6 start
def sync(p, repeats: int) -> dict:
    """Share of whole training steps that goes into the sync,
    with and without the probe that checks it."""
    import minirl

    steps = [minirl.train_step(step, p)[1] for step in range(1, repeats + 2)][1:]
    alone = alternate(repeats, sync=lambda: p.engine.sync(p.policy))["sync"]
    total = median(m["seconds"] for m in steps)
    phases = {key: median(m[key] for m in steps) for key in steps[0] if key.startswith("seconds_")}
    return dict(step=total, phases=phases,
                with_probe=median(m["seconds_sync"] / m["seconds"] for m in steps),
                sync=median(alone) / total)


def start_up(repeats: int) -> dict:
    """Seconds until --help has answered, a wrong flag was refused, and the first evaluation (of one
    answer) is on disk."""
    def run(*flags):
        return subprocess.run([sys.executable, str(ROOT / "minirl.py"), *flags],
                              capture_output=True)

    taken = alternate(repeats, help=lambda: run("--help"), wrong_flag=lambda: run("--top-p", "0.9"))
    return {name: median(values) for name, values in taken.items()} | dict(
        first_token=median(first_answer() for _ in range(3)))


def first_answer() -> float:
    """An upper bound for the first token: the first whole answer,
    graded and written to eval.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        found, start = Path(folder, "runs/start/eval.jsonl"), time.perf_counter()
        flags = ["--name", "start", "--steps", "1", "--eval-questions", "1", "--eval-k", "1"]
        process = subprocess.Popen([sys.executable, str(ROOT / "minirl.py"), *flags], cwd=folder,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not found.exists() and process.poll() is None:
                time.sleep(0.02)
            taken = time.perf_counter() - start
        finally:
            process.terminate()
            process.wait()
        if not found.exists():
            raise SystemExit(
                "minirl.py ended before its first evaluation: run it once by hand to see why.")
        return taken


# ---------------------------------------------------------------------------------------- the table
def table(r: dict) -> list[tuple]:
    """(number, what, measured, target, met) of every target that was measured,
    now or in the stored results."""
    rows = []
    if "rollouts" in r:
        x, two, one = (r["rollouts"][name] for name in ("default", "two_rounds", "single_round"))
        rate = (f"{x['tokens_per_second']['sampler']:,.0f} tokens/s in "
                f"{x['engine_steps']:.0f} engine steps")
        rows += [("1", f"sampler and grading / LLM.generate ({rate})", f"{x['ratio']:.2f}",
                  "at least 0.90", x["ratio"] >= 0.9),
                 ("", f"without the time of {x['extra_steps']:.0f} more engine steps than the "
                      "longest response has tokens, "
                  f"{1000 * x['step_seconds']:.1f} ms each", f"{x['ratio_steps_free']:.2f}", "",
                  None),
                 ("", "--M 16 --N 2, so up to as many samples in fewer rounds "
                      f"({two['engine_steps']:.0f} engine steps, "
                  f"{two['samples'] / x['samples'] - 1:+.0%} samples)", f"{two['ratio']:.2f}", "",
                  None),
                 ("", f"the same work in a single round ({one['engine_steps']:.0f} engine steps)",
                  f"{one['ratio']:.2f}",
                  "at least 0.90", one["ratio"] >= 0.9)]
    if "training" in r:
        x = r["training"]
        rows += [("2", f"update / plain loop at its best ({x['tokens_per_second']['ours']:,.0f} "
                       "tokens/s)",
                  f"{x['ratio']:.2f}", "at least 0.90", x["ratio"] >= 0.9),
                 ("", "padding", f"{x['padding']:.1%}", "below 5 %", x["padding"] < 0.05)]
    if "logprobs" in r:
        x = r["logprobs"]
        gb = {int(tokens): value for tokens, value in x["gb"].items()}
        rows += [("3", "log-probs of 8,192 tokens x 151,936 words, peak", f"{gb[8192]:.2f} GB",
                  "below 1.50 GB", gb[8192] < 1.5),
                 ("", "twice as many tokens: more memory", f"{gb[16384] - gb[8192]:+.2f} GB", "",
                  None),
                 ("", "time / unchunked time", f"{x['slower']:.2f}", "at most 1.15",
                  x["slower"] <= 1.15)]
    if "sync" in r:
        x = r["sync"]
        rows += [("4", f"sync / step of {x['step']:.2f} s", f"{x['sync']:.1%}", "below 2 %",
                  x["sync"] < 0.02),
                 ("", "sync and its probe / step", f"{x['with_probe']:.1%}", "", None)]
    for cell in r.get("trl", {}).get("cells", []):
        rows.append(("5", f"TRL / ours, seconds per step: {cell['name']}", f"{cell['ratio']:.2f}",
                     f"at least {cell['target']:.1f}", cell["ratio"] >= cell["target"]))
        if "level" in cell:
            taken = cell["seconds_to_level"]
            rows.append(("", f"TRL / ours, seconds to {cell['level']:.0%} held-out "
                             f"({taken['trl']:.0f} s, {taken['ours']:.0f} s)",
                         f"{taken['trl'] / taken['ours']:.2f}", "", None))
    if "start_up" in r:
        x = r["start_up"]
        rows += [("6", "--help", f"{x['help']:.2f} s", "within 1 s", x["help"] < 1),
                 ("", "wrong flag", f"{x['wrong_flag']:.2f} s", "within 2 s", x["wrong_flag"] < 2),
                 ("", "first answer", f"{x['first_token']:.1f} s", "within 30 s",
                  x["first_token"] < 30)]
    return rows


def show(rows: list[tuple]) -> None:
    for number, what, measured, target, met in rows:
        print(f"{number:2} {what:76} {measured:>12}   {target:14} "
              f"{'' if met is None else 'met' if met else 'MISSED'}")


def main() -> None:
    parts = ("rollouts", "training", "logprobs", "sync", "start_up")
    parser = argparse.ArgumentParser(description="Targets of speed and memory, measured.")
    parser.add_argument("--only", nargs="*", default=parts, choices=parts,
                        help="measure these, keep the others' results")
    parser.add_argument("--repeats", type=int, default=5,
                        help="of every measurement; medians are shown (default: 5)")
    parser.add_argument("--out", default="", help="folder of the result (default: bench/results)")
    parser.add_argument("--logprob-memory", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.logprob_memory:
        return measure_logprob_memory(*args.logprob_memory)
    result = {name: found for name, found in load("speed").items() if name in parts}

    def keep(name, found):
        result[name] = found
        save("speed", result, args.out)

    if {"rollouts", "training", "sync"} & set(args.only):
        with project() as p:
            for name, measure in dict(rollouts=rollouts, training=training, sync=sync).items():
                if name in args.only:
                    keep(name, measure(p, args.repeats))
    if "logprobs" in args.only:
        keep("logprobs", logprobs(min(args.repeats, 5)))
    if "start_up" in args.only:
        keep("start_up", start_up(5))
    print()
    show(table(result | dict(trl=load("trl"))))


if __name__ == "__main__":
    main()
