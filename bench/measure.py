"""Measures times and speeds on this machine, part by part. See the docstring of each part.

    python bench/measure.py rollouts                       # the built-in model, a few minutes
    OMP_NUM_THREADS=2 python bench/measure.py rollouts --model SmolLM2-135M-Instruct  # a dozen
    python bench/measure.py verifier runs/NAME runs/eval-NAME     # needs no model

Other flags are those of minirl.py. One thread is used, unless OMP_NUM_THREADS is set. The compared
sides take turns in one process, and a ratio is that of neighbours in time, so that slow drifts of
the machine cancel. The table becomes bench/results/PART.md, with the command.
"""
import argparse
import contextlib
import os
import platform
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from store import RESULTS, markdown  # and one thread, and the path


# ---------------------------------------------------------------------------------- what all share
def seconds(call, *args) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def alternate(repeats: int, **sides) -> dict[str, list]:
    """The results of the sides (functions) in turn, without the first round."""
    found = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, call in sides.items():
            found[name].append(call())
    return {name: values[1:] for name, values in found.items()}


def ratio(above: list[float], below: list[float]) -> str:
    """The median and the range of the ratios of neighbours."""
    found = [a / b for a, b in zip(above, below)]
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


@contextlib.contextmanager
def project(*flags: str):
    """The state of minirl.main before its first step, in runs/bench, which has no checkpoint."""
    from parts.config import parse
    import minirl
    from rewards import open_grader

    config, folder = parse([*flags, "--name", "bench"]), Path("runs/bench")
    with minirl.claim(folder, False), open_grader(config.reward, config.threshold) as grader:
        # afterwards the server has loaded math-verify
        grader.grade([("1", "\\boxed{2}"), ("\\frac12", "\\boxed{0.25+x}")])
        yield minirl.set_up(folder, config, grader)


def draw(run, **settings) -> list:
    """Sampling of a step, each time with the same problems and random state."""
    import minirl

    run.stream.cursor = 0
    minirl.seed_all("bench")
    return minirl.sample(replace(run, config=replace(run.config, **settings)))


# ------------------------------------------------------------------------------ beside vLLM
def rollouts(*flags: str) -> list[list[str]]:
    """One step through the sampler, with grading, against a plain LLM.generate call for the same
    number of answers with the same lengths. A single round shows the cost of our code, and more
    rounds show the cost of rounds."""
    found = [["rounds", "samples", "engine steps", "a step of one response", "sampler, tokens/s",
              "generate, tokens/s", "ratio (range)"]]
    with project(*flags, "--sampler", "ada-balance") as run:
        M, N = run.config.M, run.config.N
        rounds = {
            f"{N} of {M}": {},
            f"{max(1, N // 2)} of {2 * M}": dict(M=2 * M, N=max(1, N // 2)),
            "one": dict(sampler="uniform", n=2 * M)}
        for name, settings in rounds.items():
            found.append([name, *against_vllm(run, settings)])
    return found


def against_vllm(run, settings: dict) -> list[str]:
    samples = [(group.problem.prompt_ids, sample.rollout)
               for group in draw(run, **settings) for sample in group.pool]
    work = [(ids, len(rollout.token_ids)) for ids, rollout in samples]
    taken = alternate(5, sampler=lambda: seconds(lambda: draw(run, **settings)),
                      generate=lambda: seconds(bare_generate, run.engine, work),
                      alone=lambda: seconds(bare_generate, run.engine, [(work[0][0], 40)]) / 40)
    tokens, steps = sum(length for _, length in work), max(r.finished for _, r in samples)
    said = [f"{tokens / median(taken[side]):,.0f}" for side in ("sampler", "generate")]
    return [str(len(work)), str(steps), f"{1000 * median(taken['alone']):.1f} ms",
            *said, ratio(taken["generate"], taken["sampler"])]


def bare_generate(engine, work: list[tuple]) -> None:
    """(prompt ids, tokens) in one call, with log-probs; nothing is decoded, nothing graded."""
    from vllm import SamplingParams

    fixed = dict(temperature=1, ignore_eos=True, logprobs=0, detokenize=False)
    params = [SamplingParams(max_tokens=length, **fixed) for _, length in work]
    prompts = [dict(prompt_token_ids=ids) for ids, _ in work]
    engine.llm.generate(prompts, params, use_tqdm=False)


# ---------------------------------------------------------------------------------- the verifier
def verifier(*runs: str) -> list[list[str]]:
    """The verdicts of this project's verifier and of plain math-verify on the answers in the logs
    of `runs`. Every difference is printed, and the first forty are below the table."""
    from rewards import Grader, extract_answer

    answers = list(dict.fromkeys(answer for run in runs for answer in logged_answers(Path(run))))
    with Grader() as grader:
        grader.grade([("x+1", r"\boxed{1+x}")] * 2)  # loading it takes seconds
        start = time.perf_counter()
        asked = [grader.ask(gold, text, style) for _, gold, text, style in answers]
        here = [future.result().status for future in asked]
        each = 1000 * (time.perf_counter() - start) / max(1, len(answers))
    there = [plain_verdict(gold, text) for _, gold, text, _ in answers]
    table, differences = [["run, data", "different answers", "with a closed box", "right here",
                           "right for math-verify", "only here", "only for math-verify"]], []
    for data in dict.fromkeys(row[0] for row in answers):
        pairs = [(one == "correct", other) for row, one, other in zip(answers, here, there)
                 if row[0] == data]
        boxed = sum(extract_answer(row[2]) is not None for row in answers if row[0] == data)
        counts = [len(pairs), boxed, sum(one for one, _ in pairs), sum(other for _, other in pairs),
                  pairs.count((True, False)), pairs.count((False, True))]
        table.append([data, *map(str, counts)])
    for (data, gold, text, _), one, other in zip(answers, here, there):
        if (one == "correct") != other:
            print(f"{data}: gold {gold!r}, here {one}, math-verify {other}: {text[-200:]!r}")
            end = " ".join(text[-60:].replace("|", "¦").split())
            differences.append([data, f"gold `{gold}`", f"`{end}`", f"here {one}", "", "", ""])
    print(f"{each:.2f} ms an answer, {len(differences)} differences in {len(answers)} answers")
    return table + ([[""] * 7] if differences else []) + differences[:40]


def logged_answers(run: Path) -> list[tuple[str, str, str, str]]:
    """(run and data, gold, text, style) of the answers in a run's or an evaluation's logs."""
    from parts.files import read_rows
    from parts.data import MEASURED

    found = [(row["id"].rsplit("/", 2)[0], row["gold"], sample["text"])  # source/split/row
             for row in read_rows(run / "groups.jsonl") for sample in row["pool"]]
    found += [(row["data"], row["gold"], row["text"])
              for log in ("eval.jsonl", "answers.jsonl")  # of eval.py, and of minirl.py
              for row in read_rows(run / log) if "text" in row]
    return [(f"{run.name}, {data}", gold, text, "minerva" if data in MEASURED else "")
            for data, gold, text in found if gold]


def plain_verdict(gold: str, text: str) -> bool:
    """math-verify's verdict, with the gold in a box, on the last box if this is closed."""
    from math_verify import parse, verify
    from rewards import extract_answer

    answer = extract_answer(text)
    if answer is None:
        return False
    return verify(*(parse(rf"\boxed{{{each}}}") for each in (gold, answer)))


# ----------------------------------------------------------------------------------------- program
PARTS = dict(rollouts=rollouts, verifier=verifier)


def machine() -> str:
    """The machine of the measurement, in words."""
    from importlib.metadata import version

    cpu = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())
    return (f"{cpu}, {os.cpu_count()} cores, OMP_NUM_THREADS="
            f"{os.environ.get('OMP_NUM_THREADS', '')}, load {os.getloadavg()[0]:.1f}, torch "
            f"{version('torch')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    args, flags = parser.parse_known_args()
    text = markdown(PARTS[args.part](*flags))
    text += f"\n`bench/measure.py {shlex.join(sys.argv[1:])}`: {machine()}\n"
    with open(RESULTS / f"{args.part}.md", "a") as page:  # below what was said of others
        page.write(f"\n{text}")
    print(text)


if __name__ == "__main__":
    main()
