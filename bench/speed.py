"""How fast are rollouts? One step through the sampler, grading included, against vLLM alone.

    python bench/speed.py                                    # the built-in model, a few minutes
    OMP_NUM_THREADS=2 python bench/speed.py --model SmolLM2-135M-Instruct --repeats 3  # a dozen

vLLM's own `LLM.generate` does the same work: the same prompts, as many samples of the same lengths,
all of which is known to it beforehand and asked for at once.

The built-in model is also sampled in half as many rounds of twice the size, and in a single round:
the first shows what our code costs, the rest is what rounds cost. Settings are minirl.py's defaults
for the model.
"""
import argparse
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from common import middle_ratio, positive, project, save, seconds


# ------------------------------------------------------------------------------------ measurements
def rollouts(model: str, repeats: int) -> dict:
    from parts.config import parse

    with project(**asdict(parse(["--model", model, "--name", "bench"]))) as p:
        runs = dict(default=p)
        if model == "tiny":
            c = p.config
            runs |= dict(two_rounds=replace(p, config=replace(c, M=2 * c.M, N=c.N // 2)),
                         single_round=replace(p, config=replace(c, sampler="uniform", n=2 * c.M)))
        return {name: against_vllm(run, repeats) for name, run in runs.items()}


def against_vllm(p, repeats: int) -> dict:
    """Tokens per second of both sides, and how many engine steps the sampler took.

    Both do everything once before they are timed: oneDNN makes a kernel for every new number of
    running requests, and whoever came first would pay for both.
    """
    facts, rates = [], dict(sampler=[], generate=[])
    for step in range(repeats):
        cursor = p.stream.cursor
        groups = draw(p, step, cursor)
        work = lengths_of(groups)
        bare_generate(p.engine, work)
        taken = dict(sampler=seconds(draw, p, step, cursor),
                     generate=seconds(bare_generate, p.engine, work))
        for side, value in taken.items():
            rates[side].append(sum(length for _, length in work) / value)
        steps = max(s.rollout.finished for g in groups for s in g.pool)
        alone = seconds(bare_generate, p.engine, [(work[0][0], 40)]) / 40
        facts.append(dict(samples=len(work), engine_steps=steps, step_seconds=alone))
    return {key: median(row[key] for row in facts) for key in facts[0]} | dict(
        tokens_per_second={side: median(values) for side, values in rates.items()},
        ratio=middle_ratio(rates["sampler"], rates["generate"]), raw=rates)


def draw(p, step: int, cursor: int) -> list:
    """The same problems and the same random state: the same samples."""
    import minirl

    p.stream.cursor = cursor
    minirl.reseed("bench", step)
    return minirl.sample(p)


def lengths_of(groups) -> list[tuple]:
    """(prompt ids, tokens of the response) of every sample."""
    return [(g.problem.prompt_ids, len(s.rollout.token_ids)) for g in groups for s in g.pool]


def bare_generate(engine, work: list[tuple]) -> None:
    """In one call, with log-probs of the tokens; no text is decoded and nothing is graded."""
    from vllm import SamplingParams

    params = [SamplingParams(temperature=1, max_tokens=length, ignore_eos=True, logprobs=0,
                             detokenize=False)
              for _, length in work]
    engine.llm.generate([dict(prompt_token_ids=ids) for ids, _ in work], params, use_tqdm=False)


# ---------------------------------------------------------------------------------------- the table
def show(found: dict) -> None:
    for name, x in found.items():
        print(f"{name}: {x['samples']:.0f} samples in {x['engine_steps']:.0f} engine steps, one of "
              f"which takes {1000 * x['step_seconds']:.1f} ms for a single response")
        for side, rate in x["tokens_per_second"].items():
            print(f"    {side:12}{rate:8,.0f} tokens/s")
        print(f"    the sampler's speed is {x['ratio']:.2f} x that of generate")


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts against bare generation.")
    parser.add_argument("--model", default="tiny", help="as for minirl.py (default: tiny)")
    parser.add_argument("--repeats", type=positive, default=5,
                        help="of every measurement; medians are shown (default: 5)")
    args = parser.parse_args()
    found = rollouts(args.model, args.repeats)
    save(f"speed-{Path(args.model).name}", dict(rollouts=found))
    show(found)


if __name__ == "__main__":
    main()
