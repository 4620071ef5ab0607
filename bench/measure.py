"""What things cost here, part by part; a part's first lines say what it measures.

    python bench/measure.py rollouts                       # the built-in model, a few minutes
    OMP_NUM_THREADS=2 python bench/measure.py rollouts --model SmolLM2-135M-Instruct  # a dozen
    python bench/measure.py busy          # ten minutes; nothing else may run
    python bench/measure.py grading
    python bench/measure.py checkpoints
    python bench/measure.py precision     # three minutes
    python bench/measure.py gpu --sync merge               # flags of minirl.py

One thread, unless OMP_NUM_THREADS says otherwise: on a small machine two threads mostly wait for
each other. What is compared is measured in turn in one process, and the ratio is that of
neighbours in time: slow drifts of the machine cancel. A table becomes bench/results/PART.md.
"""
import argparse
import contextlib
import gc
import json
import os
import platform
import random
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from unittest.mock import patch

from store import RESULTS, ROOT, markdown  # and one thread, and the path


# ---------------------------------------------------------------------------------- what all share
def seconds(call, *args) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def alternate(repeats: int, **sides) -> dict[str, list]:
    """What every side (a function without arguments) returns, `repeats` times in turn, after a
    first time that does not count: what slows one slows all."""
    found = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, call in sides.items():
            found[name].append(call())
    return {name: values[1:] for name, values in found.items()}


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below)]


@contextlib.contextmanager
def project(*flags: str):
    """What minirl.main has before its first step (a parts.run.Run), in a folder that is removed."""
    from parts.config import parse
    from parts.run import prepare
    from rewards import Grader

    config = parse([*flags, "--name", "bench"])
    with tempfile.TemporaryDirectory() as folder, Grader() as grader, contextlib.chdir(folder):
        # afterwards the server has loaded math-verify
        grader.grade([("1", "\\boxed{2}"), ("\\frac12", "\\boxed{0.25+x}")])
        run = prepare(config, grader)
        yield run
        run.engine.close()


def draw(run, **settings) -> list:
    """A step's samples: each time the same problems and the same random state."""
    import minirl
    from dataclasses import replace

    run.stream.cursor = 0
    minirl.reseed("bench")
    return minirl.sample(replace(run, config=replace(run.config, **settings)))


# ------------------------------------------------------------------------------------------- parts
def rollouts(model: str) -> list[list[str]]:
    """One step through the sampler, grading included, against vLLM's own LLM.generate of as many
    samples of the same lengths, known beforehand and asked for at once. Also in half as many rounds
    of twice the size, and in a single round: the first shows what our code costs, the rest is what
    rounds cost."""
    found = [["rounds", "samples", "engine steps", "a step of one response", "sampler, tokens/s",
              "generate, tokens/s", "ratio"]]
    with project("--model", model) as run:
        M, N = run.config.M, run.config.N
        for name, settings in {f"{N} of {M}": {}, f"{N // 2} of {2 * M}": dict(M=2 * M, N=N // 2),
                               "one": dict(sampler="uniform", n=2 * M)}.items():
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
    rates = {side: f"{tokens / median(taken[side]):,.0f}" for side in ("sampler", "generate")}
    return [str(len(work)), str(steps), f"{1000 * median(taken['alone']):.1f} ms",
            *rates.values(), f"{median(ratios(taken['generate'], taken['sampler'])):.2f} x"]


def bare_generate(engine, work: list[tuple]) -> None:
    """(prompt ids, tokens) in one call, with log-probs; nothing is decoded, nothing graded."""
    from vllm import SamplingParams

    params = [SamplingParams(temperature=1, max_tokens=length, ignore_eos=True, logprobs=0,
                             detokenize=False)
              for _, length in work]
    engine.llm.generate([dict(prompt_token_ids=ids) for ids, _ in work], params, use_tqdm=False)


BESIDE = {  # what runs beside it -> the priority of each loop
    "nothing": (), "one loop at nice 10": (10,), "one loop": (0,), "two loops": (0, 0)}
PAIRS, PIECE = 5, 15  # seconds of rounds with each kind of threads


def busy() -> list[list[str]]:
    """A real model's step (8 prompts, 4 answers each, 8 of them trained), with all threads and
    with as many as parts/machine.py chooses, beside nothing and beside endless loops."""
    import minirl

    os.environ.pop("OMP_NUM_THREADS")  # torch is not imported yet
    found = [["beside", "all threads", "as many as are chosen", "ratio, pair by pair",
              "median (range)"]]
    with project(*"--model SmolLM2-135M-Instruct --sampler uniform --n 4 --batch-prompts 8 "
                 "--max-tokens 16".split()) as run:
        rows = [row for group in draw(run)[:2] for row in minirl.rows_of_group(group, run.config)]
        for name, priorities in BESIDE.items():
            with loops(priorities):
                found.append([name, *busy_row(alternate(
                    PAIRS, fixed=lambda: piece(run, rows, fixed=True),
                    chosen=lambda: piece(run, rows, fixed=False)))])
    return found


@contextlib.contextmanager
def loops(priorities: tuple):
    """Started by a shell that ends at once: as children of this process they would count as its own
    work."""
    endless = f"'{sys.executable}' -c 'while True: pass' > /dev/null & echo $!"
    started = [int(subprocess.check_output(["sh", "-c", f"nice -n{nice} {endless}"]))
               for nice in priorities]
    try:
        yield
    finally:
        for process in started:
            os.kill(process, signal.SIGKILL)


def piece(run, rows: list, fixed: bool) -> float:
    """Seconds of a round, the mean of a piece, with all threads or those that are chosen."""
    import minirl
    import torch
    from parts.machine import threads

    def one_round():
        draw(run)
        minirl.accumulate(run.policy, rows, run.config)
        run.policy.zero_grad(set_to_none=True)

    threads().fixed = fixed
    torch.set_num_threads(threads().most)
    one_round()  # threads are chosen within it
    times, start = [], time.perf_counter()
    while time.perf_counter() < start + PIECE:
        times.append(seconds(one_round))
    return mean(times)


def busy_row(taken: dict[str, list]) -> list[str]:
    pairs = ratios(taken["fixed"], taken["chosen"])
    return [*(f"{median(values):.1f} s" for values in taken.values()),
            ", ".join(f"{ratio:.2f}" for ratio in pairs),
            f"{median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"]


def grading() -> list[list[str]]:
    """CPU time of all processes per 1,000 of the labelled answers, with start and end. Of all
    kinds, which strings and fractions mostly tell; and symbolic ones, with four other answers
    each: math-verify reads and compares nearly all."""
    from rewards import Grader
    from verifier.answers import exact
    from verifier.spelling import normalize

    cases = list(map(json.loads, (ROOT / "tests/reward_cases.jsonl").read_text().splitlines()))
    random.Random(0).shuffle(cases)
    questions = [(case["gold"], case["completion"]) for case in cases]
    symbolic = [(gold, text) for gold, text in questions if "\\" in gold
                and "\\text" not in gold and not exact(normalize(gold))]
    symbolic += [(gold, f"\\boxed{{{other}}}") for ahead in range(1, 5)
                 for (gold, _), (other, _) in zip(symbolic, symbolic[ahead:])]
    found = [["answers", "questions", "s of CPU per 1,000"]]
    for name, asked in dict(all=questions, symbolic=symbolic).items():
        before = cpu_seconds()
        with Grader() as grader:
            grader.grade(asked)
        taken = (cpu_seconds() - before) / len(asked) * 1000
        found.append([name, str(len(asked)), f"{taken:.1f}"])
    return found


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def checkpoints() -> list[list[str]]:
    """Seconds for an adapter and its AdamW, of made-up numbers, on the disk of the folder where
    this is started. A run logs the same of itself as seconds_save."""
    from parts import folder

    found = [["million weights, as of", "MB", "seconds, of 5", "range"]]
    for name, millions in {"18.5, a 1.5 B model with rank 16": 18.5, "40.4, of 7 B": 40.4}.items():
        learnt = made_up(millions)
        with tempfile.TemporaryDirectory(dir=".") as place:
            taken = [seconds(folder.save, Path(place), *learnt, dict(step=step))
                     for step in range(5)]
            files = folder.checkpoints(Path(place))[-1].iterdir()
            size = sum(file.stat().st_size for file in files)
        found.append([name, f"{size / 1e6:.0f}", f"{median(taken):.2f}",
                      f"{min(taken):.2f} to {max(taken):.2f}"])
    return found


def made_up(millions: float) -> tuple:
    """(policy, optimizer, schedule) with so many million weights, in 392 tensors like 1.5B's."""
    import torch
    from safetensors.torch import save_file

    from parts.config import Config
    from parts.policy import loss_scale
    from parts.run import make_optimizer

    policy = torch.nn.ParameterList(torch.randn(int(millions * 1e6 / 392)) for _ in range(392))
    policy.loss_scale = loss_scale("float32", "cpu")
    policy.save_pretrained = lambda folder, **_: save_file(
        {name: p.detach() for name, p in policy.named_parameters()},
        folder / "adapter_model.safetensors")
    optimizer, schedule = make_optimizer(policy, Config(lr=1e-5))
    for p in policy:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return policy, optimizer, schedule


def precision() -> list[list[str]]:
    """k3, an estimate of KL(mu || pi_old), on 512 responses of the built-in models, engine and
    trainer in one precision: with float32 logits, as they are, and with logits rounded to the
    weights' precision, as engines and trainers usually have them."""
    found = [["model", "weights", "logits", "k3", "mean difference, nats"]]
    for model in ("tiny", "tiny-moe"):
        for dtype in ("float32", "float16", "bfloat16"):
            for rounded in (False, True)[:1 + (dtype != "float32")]:
                k3, gap = disagreement(model, dtype, rounded)
                found.append([model, dtype, "16 bits" if rounded else "float32", f"{k3:.1e}",
                              f"{gap:.0e}"])
    return found


def disagreement(model: str, dtype: str, rounded: bool) -> tuple[float, float]:
    """Mean of k3, and of the absolute difference of log-probs."""
    import torch
    import vllm

    from parts import engine as engines
    from parts import logprobs, models, policy, problems

    path, whole = models.tiny_folder(model), vllm.LLM
    product = (lambda h_T, weight: (h_T @ weight.T).float()) if rounded else (
        logprobs.float32_product)
    changed = dict(hf_overrides={}) if rounded else {}
    with (patch.object(logprobs, "float32_product", product),
          patch.object(vllm, "LLM", lambda *a, **options: whole(*a, **options | changed))):
        engine = engines.Engine(path, max_model_len=128, max_num_seqs=256, dtype=dtype)
        trainer = policy.load_policy(path, dtype=dtype, rank=8, alpha=16, seed=0, device="cpu")
        engines.seed_everything(random.Random(0))
        prompts = [engine.tokenizer.encode(f"<|user|>{row['problem']}<|assistant|>")
                   for row in problems.chains("test", 32)]
        rows = [logprobs.Row(ids + r.token_ids, len(ids), r.logprobs, 0.0)
                for ids, drawn in zip(prompts, engine.generate(prompts, n=16, max_tokens=64))
                for r in drawn]
        with torch.no_grad():
            old_T = logprobs.token_logprobs(trainer, rows)[0].double()
    engine.close()
    gc.collect()
    gap_T = torch.tensor([x for row in rows for x in row.mu]).double() - old_T
    return ((-gap_T).exp() - 1 + gap_T).mean().item(), gap_T.abs().mean().item()


# --------------------------------------------------------------------------------------- on a GPU
SIZE_1_5B = dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                 num_attention_heads=12, num_key_value_heads=2, vocab_size=151_936)
COIN = """
import random

def coin(problem, completion):
    return float(random.Random(f"{problem}{completion}").random() < 0.5)
"""


def gpu(flags: list[str]) -> None:
    """minirl.py itself, with FLAGS, on a randomly initialised model of Qwen2.5-Math-1.5B's shape:
    no network and no weights are needed. Verdicts are coins, and every answer has 900 tokens.
    Its log has seconds, memory, k3 and the probe's numbers: runs/gpu/metrics.jsonl."""
    import torch

    small = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, vocab_size=512)  # only to show that it works
    on_gpu = torch.cuda.is_available()
    usual = ["--max-tokens", "900", "--steps", "3"] if on_gpu else (
        "--max-tokens 24 --batch-prompts 4 --eval-questions 4 --steps 2".split())
    with tempfile.TemporaryDirectory() as model:
        Path(model, "coin.py").write_text(COIN)
        random_model(SIZE_1_5B if on_gpu else small, model, "bfloat16" if on_gpu else "float32")
        sys.argv = [str(ROOT / "minirl.py"), *(
            f"--model {model} --data builtin --eval-data builtin --template chat --lr 2e-5 "
            f"--name gpu --reward {model}/coin.py:coin").split(), *usual, *flags]
        runpy.run_path(sys.argv[0], run_name="__main__")


def random_model(size: dict, folder: str, dtype: str) -> None:
    """Fills `folder` with a Qwen2 of this size and the built-in tokenizer, which need not know
    every token of the vocabulary."""
    import torch
    from models import make
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make.build_tokenizer()
    config = Qwen2Config(max_position_embeddings=4096, bos_token_id=None,
                         eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
                         pad_token_id=tokenizer.pad_token_id, **size)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))  # never a float32 copy: 6 GB of 1.5 billion
    Qwen2ForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    tokenizer.save_pretrained(folder)


# ----------------------------------------------------------------------------------------- program
TABLES = dict(rollouts=rollouts, busy=busy, grading=grading, checkpoints=checkpoints,
              precision=precision)


def machine() -> str:
    """What the numbers were measured on."""
    from importlib.metadata import version

    cpu = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())
    return (f"{cpu}, {os.cpu_count()} cores, OMP_NUM_THREADS="
            f"{os.environ.get('OMP_NUM_THREADS', '')}, load {os.getloadavg()[0]:.1f}, torch "
            f"{version('torch')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=[*TABLES, "gpu"])
    parser.add_argument("--model", default="tiny", help="of rollouts (default: tiny)")
    args, flags = parser.parse_known_args()
    if args.part == "gpu":
        return gpu(flags)
    if flags:
        parser.error(f"{args.part} knows no {' '.join(flags)}")
    of_model = [args.model] if args.part == "rollouts" else []
    text = f"{markdown(TABLES[args.part](*of_model))}\n{machine()}\n"
    name = "-".join([args.part, *(Path(model).name for model in of_model)])
    (RESULTS / f"{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
