"""The project's own targets of speed and memory, as a table (about five minutes on a CPU).

    python bench/speed.py                                    # all, of the built-in model
    OMP_NUM_THREADS=2 python bench/speed.py --model SmolLM2-135M-Instruct --repeats 3

1  rollouts    one batch through the sampler, grading included, against bare `LLM.generate` of the
               same prompts, with the same number of samples of the same lengths, all known
               beforehand and asked for at once
2  training    minirl.update against the plainest loop over the same samples: sort by length, pad,
               full logits, log_softmax
3  memory      log-probs and entropy of 8,192 tokens at a vocabulary of 151,936 in float32, forward
               and backward
4  sync        handing over the weights, as a share of a step

Target 5 has a script of its own, trl_baseline.py; the table shows its newest result. --model takes
number 1 of another model, with minirl.py's defaults for it, also against Hugging Face's `generate`.
"""
import argparse
import random
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from common import alternate, load, median, middle_ratio, process_memory, project, save, seconds

VOCABULARY = 151_936  # of Qwen2.5


# --------------------------------------------------------------------------------------- 1 rollouts
def rollouts(p, repeats: int) -> dict:
    """The default sampler; the same with half as many rounds of twice the size; and one that draws
    as much as the default in a single round: what our code costs, and what rounds cost."""
    two = replace(p, config=replace(p.config, M=2 * p.config.M, N=p.config.N // 2))
    single = replace(p, config=replace(p.config, sampler="uniform", n=2 * p.config.M))
    return {name: against_generate(run, repeats)
            for name, run in dict(default=p, two_rounds=two, single_round=single).items()}


def against_generate(p, repeats: int, **others) -> dict:
    """Tokens per second of the sampler, and of bare generation and `others` (functions of a list
    from `lengths_of`) that do the very same work.

    Every side does everything once before it is timed: oneDNN makes a kernel for every new number
    of running requests, and the side that came first would pay for all.
    """
    sides = dict(generate=partial(bare_generate, p.engine, 0),
                 generate_without_logprobs=partial(bare_generate, p.engine, None), **others)
    facts, rates = [], {name: [] for name in ("sampler", *sides)}
    for step in range(repeats + 1):
        cursor = p.stream.cursor
        groups = draw(p, step, cursor)
        work = lengths_of(groups)
        steps = max(s.rollout.finished for g in groups for s in g.pool)
        for side in sides.values():
            side(work)
        taken = [seconds(draw, p, step, cursor)]
        taken += [seconds(side, work) for side in sides.values()]
        alone = seconds(bare_generate, p.engine, 0, [(work[0][0], 40)]) / 40
        if step:  # the first round is for warming up
            facts.append(dict(samples=len(work), engine_steps=steps, step_seconds=alone))
            for side, value in zip(rates.values(), taken):
                side.append(sum(length for _, length in work) / value)
    return {key: median(row[key] for row in facts) for key in facts[0]} | dict(
        tokens_per_second={name: median(values) for name, values in rates.items()},
        ratios={name: middle_ratio(rates["sampler"], rates[name]) for name in sides}, raw=rates)


def draw(p, step: int, cursor: int) -> list:
    """The same problems and the same random state: the same samples."""
    import minirl

    p.stream.cursor = cursor
    minirl.reseed("bench", step)
    return minirl.sample(p)


def lengths_of(groups) -> list[tuple]:
    """(prompt ids, tokens of the response) of every sample."""
    return [(g.problem.prompt_ids, len(s.rollout.token_ids)) for g in groups for s in g.pool]


def bare_generate(engine, logprobs, work: list[tuple]) -> None:
    """As many samples of each prompt, of the same lengths, in one call; no text is decoded and
    nothing is graded."""
    from vllm import SamplingParams

    params = [SamplingParams(temperature=1, max_tokens=length, ignore_eos=True, logprobs=logprobs,
                             detokenize=False)
              for _, length in work]
    engine.llm.generate([dict(prompt_token_ids=ids) for ids, _ in work], params, use_tqdm=False)


def rollouts_of(model: str, repeats: int) -> dict:
    """The default sampler of another model, also against Hugging Face's own `generate`."""
    from parts.config import parse
    from parts.models import fetch_model

    with project(**asdict(parse(["--model", model, "--name", "bench"]))) as p:
        plain = plain_model(fetch_model(model, 0), p)
        return against_generate(p, repeats, hugging_face=partial(hf_generate, plain))


def plain_model(path: str, p):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=p.config.dtype)
    return model.to(p.policy.device).eval()


def hf_generate(model, work: list[tuple], at_once: int = 64) -> None:
    """The same work in batches of `at_once`, sorted by length, which nobody would know beforehand.

    A response that is shorter than the longest of its batch would be cut off afterwards.
    """
    import torch

    work = sorted(work, key=lambda item: item[1])
    for batch in (work[i:i + at_once] for i in range(0, len(work), at_once)):
        padding = max(len(ids) for ids, _ in batch)
        ids = [[0] * (padding - len(ids)) + ids for ids, _ in batch]
        seen = [[0] * (padding - len(ids)) + [1] * len(ids) for ids, _ in batch]
        longest = batch[-1][1]
        model.generate(torch.tensor(ids, device=model.device), max_new_tokens=longest,
                       attention_mask=torch.tensor(seen, device=model.device),
                       min_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                       pad_token_id=0)


# --------------------------------------------------------------------------------------- 2 training
def training(p, repeats: int) -> dict:
    """Seconds of one update on one sampled batch, and of the plain loop at its best batch size."""
    import minirl

    groups = minirl.sample(p)
    rows = [minirl.Row(g.problem.prompt_ids + s.rollout.token_ids, len(g.problem.prompt_ids),
                       s.rollout.logprobs, weight)
            for g in groups for s, weight in g.rows() if weight]

    def ours():
        minirl.update(p.policy, p.optimizer, p.schedule, groups, p.config, random.Random(0))

    plain = {f"plain_{size}": partial(plain_update, p, rows, size) for size in (8, 16, 32, 64)}
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
        logprobs = p.policy(input_ids=ids).logits[:, :-1].log_softmax(-1)
        logprobs = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        place = torch.arange(1, ids.shape[1])
        mask = torch.stack([(place >= row.prompt_length) & (place < len(row.ids)) for row in batch])
        coefficient = torch.tensor([row.coefficient for row in batch])[:, None]
        (-(logprobs * coefficient * mask).sum() / len(rows)).backward()
    minirl.optimizer_step(p.policy, p.optimizer, p.schedule, p.config)


# ----------------------------------------------------------------------------------------- 3 memory
def logprobs(repeats: int) -> dict:
    """GB at the peak of two numbers of tokens, and time against the unchunked computation of 512.

    Memory is measured in processes of their own: the system's count of a peak never goes down.
    """
    inputs = logprob_inputs(512)
    taken = alternate(repeats, chunked=partial(chunked, *inputs),
                      unchunked=partial(unchunked, *inputs))
    return dict(gb={tokens: logprob_memory(tokens) for tokens in (8192, 16384)},
                slower=middle_ratio(taken["chunked"], taken["unchunked"]), raw=taken)


def logprob_memory(tokens: int) -> float:
    command = [sys.executable, __file__, "--logprob-memory", str(tokens)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_logprob_memory(tokens: int) -> None:
    """Prints the GB that forward and backward need at their peak, inputs not counted."""
    chunked(*logprob_inputs(64), tokens_at_once=8)  # libraries have been loaded
    inputs = logprob_inputs(tokens)
    before = process_memory("VmRSS")
    chunked(*inputs)
    print(process_memory("VmHWM") - before)


def logprob_inputs(tokens: int, hidden: int = 128):
    """`hidden` is small so that it ends soon: 2 x tokens x hidden numbers are all that grows with
    it (the saved slope and the gradient)."""
    import torch

    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, hidden) / hidden**0.5
    h_T = torch.randn(tokens, hidden, requires_grad=True)
    return h_T, weight, torch.randint(VOCABULARY, (tokens,))


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


# ------------------------------------------------------------------------------------------- 4 sync
def sync(p, repeats: int) -> dict:
    """Share of whole training steps that goes into the sync, without and with its probe."""
    import minirl

    steps = [minirl.train_step(step, p)[1] for step in range(1, repeats + 2)][1:]
    alone = alternate(repeats, sync=lambda: p.engine.sync(p.policy))["sync"]
    total = median(m["seconds"] for m in steps)
    return dict(step=total, sync=median(alone) / total,
                with_probe=median(m["seconds_sync"] / m["seconds"] for m in steps))


# ---------------------------------------------------------------------------------------- the table
def table(r: dict) -> list[tuple]:
    """(number, what, measured, target, met) of every target that is in the results."""
    rows = of_rollouts(**r["rollouts"]) if "rollouts" in r else []
    if "training" in r:
        x = r["training"]
        rate = f"{x['tokens_per_second']['ours']:,.0f} tokens/s"
        rows += [row("2", f"update / plain loop at its best ({rate})", x["ratio"], least=0.9),
                 row("", "padding", x["padding"], "{:.1%}", most=0.05)]
    if "logprobs" in r:
        gb = {int(tokens): value for tokens, value in r["logprobs"]["gb"].items()}
        rows += [row("3", f"log-probs of 8,192 tokens x {VOCABULARY:,} words, peak", gb[8192],
                     "{:.2f} GB", most=1.5),
                 row("", "twice as many tokens: more memory", gb[16384] - gb[8192], "{:+.2f} GB"),
                 row("", "time / unchunked time", r["logprobs"]["slower"], most=1.15)]
    if "sync" in r:
        x = r["sync"]
        rows += [row("4", f"sync / step of {x['step']:.2f} s", x["sync"], "{:.1%}", most=0.02),
                 row("", "sync and its probe / step", x["with_probe"], "{:.1%}")]
    for cell in r["trl"].get("cells", []):
        rows.append(row("5", f"TRL / ours, seconds per step: {cell['name']}", cell["ratio"],
                        least=cell["target"]))
    return rows


def of_rollouts(default: dict, two_rounds: dict, single_round: dict) -> list[tuple]:
    def label(text, x):
        return f"{text} ({x['engine_steps']:.0f} engine steps, {x['samples']:.0f} samples)"

    ratio, ratio_of_two, ratio_of_one = (
        x["ratios"]["generate"] for x in (default, two_rounds, single_round))
    return [row("1", label("sampler and grading / LLM.generate", default), ratio, least=0.9),
            row("", label("--M 16 --N 2", two_rounds), ratio_of_two),
            row("", label("a single round", single_round), ratio_of_one, least=0.9),
            row("", "an engine step with a single response", 1000 * default["step_seconds"],
                "{:.1f} ms")]


def of_model(found: dict) -> list[tuple]:
    names = dict(sampler="the sampler, grading included", generate="LLM.generate",
                 generate_without_logprobs="LLM.generate without log-probs",
                 hugging_face="Hugging Face's generate")
    rates = found["tokens_per_second"]
    return [row("", names[name], rate, "{:,.0f} tokens/s") for name, rate in rates.items()] + [
        row("", f"the sampler / {names[name]}", ratio) for name, ratio in found["ratios"].items()]


def row(number: str, what: str, value: float, form="{:.2f}", least=None, most=None) -> tuple:
    target, met = "", None
    if least is not None:
        target, met = f"at least {form.format(least)}", value >= least
    elif most is not None:
        target, met = f"at most {form.format(most)}", value <= most
    return number, what, form.format(value), target, met


def show(rows: list[tuple]) -> None:
    for number, what, measured, target, met in rows:
        print(f"{number:2} {what:76} {measured:>12}   {target:16} "
              f"{'' if met is None else 'met' if met else 'MISSED'}")


def main() -> None:
    parts = ("rollouts", "training", "logprobs", "sync")
    parser = argparse.ArgumentParser(description="Targets of speed and memory, measured.")
    parser.add_argument("--only", nargs="*", default=parts, choices=parts,
                        help="measure these, keep the others' results")
    parser.add_argument("--repeats", type=int, default=5,
                        help="of every measurement; medians are shown (default: 5)")
    parser.add_argument("--model", help="measure the rollouts of this model, and nothing else")
    parser.add_argument("--out", default="", help="folder of the result (default: bench/results)")
    parser.add_argument("--logprob-memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.logprob_memory:
        return measure_logprob_memory(args.logprob_memory)
    if args.model:
        found = rollouts_of(args.model, args.repeats)
        save(f"speed-{Path(args.model).name}", found, args.out)
        return show(of_model(found))
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
        keep("logprobs", logprobs(args.repeats))
    show(table(result | dict(trl=load("trl"))))


if __name__ == "__main__":
    main()
