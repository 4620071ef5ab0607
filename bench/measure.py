"""What things cost here, part by part; a part's first lines say what it measures.

    python bench/measure.py rollouts                       # the built-in model, a few minutes
    OMP_NUM_THREADS=2 python bench/measure.py rollouts --model SmolLM2-135M-Instruct  # a dozen
    python bench/measure.py trl --rows 256                 # --model, --plain, flags of minirl.py
    python bench/measure.py busy          # 35 minutes; nothing else may run
    python bench/measure.py checkpoints
    python bench/measure.py grading
    python bench/measure.py precision     # three minutes
    python bench/measure.py gpu --sync merge               # flags of minirl.py

One thread, unless OMP_NUM_THREADS says otherwise. What is compared takes turns in one process, and
a ratio is that of neighbours in time: slow drifts of the machine cancel. A table becomes
bench/results/PART.md, with the command.
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
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

from store import RESULTS, ROOT, markdown  # and one thread, and the path


COIN = f"{ROOT}/bench/coin.py:coin"  # a --reward


# ---------------------------------------------------------------------------------- what all share
def seconds(call, *args) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def alternate(repeats: int, **sides) -> dict[str, list]:
    """What each side (a function) returns in turn; the first time does not count."""
    found = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, call in sides.items():
            found[name].append(call())
    return {name: values[1:] for name, values in found.items()}


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below)]


@contextlib.contextmanager
def project(*flags: str):
    """What minirl.main has before its first step, in a folder that is removed."""
    from parts.config import parse
    from parts.run import prepare
    from rewards import open_grader

    config = parse([*flags, "--name", "bench"])
    with (tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder),
          open_grader(config.reward, config.threshold) as grader):
        # afterwards the server has loaded math-verify
        grader.grade([("1", "\\boxed{2}"), ("\\frac12", "\\boxed{0.25+x}")])
        run = prepare(config, grader)
        yield run


def draw(run, **settings) -> list:
    """A step's samples: each time the same problems and the same random state."""
    import minirl
    from dataclasses import replace

    run.stream.cursor = 0
    minirl.reseed("bench")
    return minirl.sample(replace(run, config=replace(run.config, **settings)))


# ------------------------------------------------------------------------------ beside vLLM
def rollouts(model: str) -> list[list[str]]:
    """One step through the sampler, grading included, against vLLM's own LLM.generate of as many
    samples of the same lengths, asked for at once. A single round shows what our code costs, the
    rest is what rounds cost."""
    found = [["rounds", "samples", "engine steps", "a step of one response", "sampler, tokens/s",
              "generate, tokens/s", "ratio"]]
    with project("--model", model) as run:
        M, N = run.config.M, run.config.N
        rounds = {
            f"{N} of {M}": {},
            f"{N // 2} of {2 * M}": dict(M=2 * M, N=N // 2),
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
    said = {side: f"{tokens / median(taken[side]):,.0f}" for side in ("sampler", "generate")}
    return [str(len(work)), str(steps), f"{1000 * median(taken['alone']):.1f} ms",
            *said.values(), f"{median(ratios(taken['generate'], taken['sampler'])):.2f} x"]


def bare_generate(engine, work: list[tuple]) -> None:
    """(prompt ids, tokens) in one call, with log-probs; nothing is decoded, nothing graded."""
    from vllm import SamplingParams

    fixed = dict(temperature=1, ignore_eos=True, logprobs=0, detokenize=False)
    params = [SamplingParams(max_tokens=length, **fixed) for _, length in work]
    prompts = [dict(prompt_token_ids=ids) for ids, _ in work]
    engine.llm.generate(prompts, params, use_tqdm=False)


# ------------------------------------------------------------------------------ beside TRL
GRPO = ["--sampler", "uniform", "--n", "8", "--objective", "grpo", "--lr", "1e-9"]
PLAIN = ["--reward", COIN, "--template", "none"]  # no silent prompt, no beginning that all share


def trl(model: str, rows: int, pairs: int, *flags: str) -> list[list[str]]:
    """A step of minirl.py beside one of TRL's GRPOTrainer with Hugging Face's generation: the same
    model, prompts, samples, LoRA, loss and grader. The learning rate is next to 0, so that both go
    on drawing from the same policy. Sampling includes grading; our engine is sent new weights.
    """
    with project("--model", model, *GRPO, *flags) as run, tempfile.TemporaryDirectory() as folder:
        trainer, drawn = trl_trainer(run, model, rows, pairs + 1, folder)
        taken = take_turns(run, trainer, drawn)
    found = [["", "drawn tokens", "a step", "sampling", "update", "of it new weights"]]
    for side, steps in taken.items():
        tokens, *parts, sending = map(median, zip(*steps))
        found.append([side, f"{tokens:,.0f}", *(
            f"{part:.2f} s, {tokens / part:,.0f} tokens/s" for part in parts), f"{sending:.2f} s"])
    ours, theirs = (zip(*map(rates, steps)) for steps in taken.values())
    gains = (f"{median(ratios(*both)):.2f} x" for both in zip(ours, theirs))
    return [*found, ["tokens/s, ratio of neighbours", "", *gains, ""]]


def rates(step: tuple) -> list[float]:
    """Tokens a second of each part."""
    tokens, *parts, _ = step
    return [tokens / part for part in parts]


def take_turns(run, trainer, drawn: dict) -> dict[str, list[tuple]]:
    """Drawn tokens, and seconds of step, sampling, update and of the engine's new weights, for each
    step of each side; the first does not count."""
    import minirl
    from transformers import TrainerCallback

    found = {"minirl.py": [], "TRL": []}

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            end = time.perf_counter()
            found["TRL"].append((drawn["tokens"], end - self.start,
                                 drawn["end"] - self.start, end - drawn["end"], 0.0))
            _, ours = minirl.train_step(state.global_step, run)
            whole, sampling = ours["seconds"], ours["seconds_sample"]
            found["minirl.py"].append((
                ours["tokens"], whole, sampling, whole - sampling, ours["seconds_sync"]))

    trainer.add_callback(Turns())
    trainer.train()
    return {side: steps[1:] for side, steps in found.items()}


def trl_trainer(run, model: str, most: int, steps: int, folder: str):
    """TRL's trainer with the settings of `run`, and of its latest sampling end and tokens."""
    from recipes import trl_engine  # noqa: F401  refuses another version of TRL
    from datasets import Dataset
    from parts.models import fetch_model
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    c, drawn = run.config, {}
    rows = c.batch_prompts * c.n
    micro = min(most, rows)
    problems = run.stream.take(c.batch_prompts * steps)
    run.stream.cursor = 0  # both sides begin with the first problem

    def reward(completions, completion_ids, place, **_):
        judged_by = (problems[i].judged_by for i in place)
        verdicts = run.grader.grade(list(zip(judged_by, completions)))
        drawn.update(end=time.perf_counter(), tokens=sum(map(len, completion_ids)))
        return [verdict.reward for verdict in verdicts]

    same = dict(
        learning_rate=c.lr, num_generations=c.n, temperature=c.temperature,
        max_completion_length=c.max_tokens, loss_type="grpo", optim="adamw_torch",
        epsilon=c.eps_low, epsilon_high=c.eps_high,
        model_init_kwargs=dict(dtype="float32"), bf16=False)
    quickest = dict(  # on a CPU: nothing is computed twice to save memory
        use_cpu=True, gradient_checkpointing=False,
        per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro)
    settings = GRPOConfig(
        output_dir=folder, max_steps=steps, shuffle_dataset=False,
        save_strategy="no", report_to="none", disable_tqdm=True, **same, **quickest)
    lora = LoraConfig(
        r=c.lora_rank, lora_alpha=c.lora_alpha,
        task_type="CAUSAL_LM", target_modules="all-linear")
    path = fetch_model(model, c.max_prompt_tokens + c.max_tokens)
    given = [dict(prompt=problem.prompt, place=i) for i, problem in enumerate(problems)]
    return GRPOTrainer(path, reward, args=settings, peft_config=lora,
                       train_dataset=Dataset.from_list(given)), drawn


# ------------------------------------------------------------------------------ a busy machine
BESIDE = {  # what runs beside it -> the priority of each loop
    "nothing": [],
    "one loop at nice 10": [10],
    "one loop": [0],
    "two loops": [0, 0]}
PAIRS = 3


def busy() -> list[list[str]]:
    """Seconds of a real model's step (8 prompts, 4 short answers each), with all threads and with
    as many as parts/machine.py chooses; x: times those of all threads beside nothing."""
    os.environ.pop("OMP_NUM_THREADS")  # torch is not imported yet
    found = {}
    with project("--model", "SmolLM2-135M-Instruct", "--reward", COIN, "--lr", "1e-9", *(
            "--sampler uniform --n 4 --batch-prompts 8 --max-tokens 16").split()) as run:
        for name, priorities in BESIDE.items():
            with loops(priorities):
                found[name] = alternate(PAIRS, fixed=lambda: one_step(run, fixed=True),
                                        chosen=lambda: one_step(run, fixed=False))
    alone = median(found["nothing"]["fixed"])
    table = [["beside", "all threads", "as many as are chosen", "ratio of neighbours (range)"]]
    for name, taken in found.items():
        pairs = ratios(*taken.values())
        table.append([name, *(f"{each:.1f} s, {each / alone:.2f} x"
                              for each in map(median, taken.values())),
                      f"{median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"])
    return table


@contextlib.contextmanager
def loops(priorities: list[int]):
    """Busy ones, started by a shell that ends: children would count as this program's own work."""
    endless = f"'{sys.executable}' -c 'while True: pass' > /dev/null & echo $!"
    started = [int(subprocess.check_output(["sh", "-c", f"nice -n {nice} {endless}"]))
               for nice in priorities]
    try:
        yield
    finally:
        for process in started:
            os.kill(process, signal.SIGKILL)


def one_step(run, fixed: bool) -> float:
    """Seconds of a step that is always the same."""
    import minirl
    import torch
    from parts.machine import threads

    def step():
        run.stream.cursor = 0
        minirl.train_step(1, run)

    threads().fixed = fixed
    torch.set_num_threads(threads().most)
    step()  # threads are chosen within it
    return seconds(step)


# ------------------------------------------------------------------------------ a checkpoint
RANK = 2880  # gives the built-in model as many weights to train as rank 16 gives 1.5 B


def checkpoints() -> list[list[str]]:
    """Seconds for a checkpoint of that size, on the disk of the folder where this is started. A run
    logs the same of itself as seconds_save."""
    import torch
    from parts import config, folder, models, policy, run

    trained = policy.load_policy(models.tiny_folder("tiny"), dtype="float32", rank=RANK, alpha=16,
                                 seed=0, device="cpu")
    optimizer, schedule = run.make_optimizer(trained, config.Config(lr=1e-5))
    weights = optimizer.param_groups[0]["params"]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    with tempfile.TemporaryDirectory(dir=".") as place:
        taken = [seconds(folder.save, Path(place), trained, optimizer, schedule, dict(step=step))
                 for step in range(5)]
        size = sum(file.stat().st_size for file in folder.checkpoints(Path(place))[-1].iterdir())
    return [["million weights", "MB", "seconds, median of 5", "range"],
            [f"{sum(weight.numel() for weight in weights) / 1e6:.1f}", f"{size / 1e6:.0f}",
             f"{median(taken):.2f}", f"{min(taken):.2f} to {max(taken):.2f}"]]


# ------------------------------------------------------------------------------ grading, precision
def grading() -> list[list[str]]:
    """CPU time of all processes for 1,000 of the labelled answers, with start and end."""
    from rewards import Grader

    cases = [json.loads(line) for line in (ROOT / "tests/reward_cases.jsonl").open()]
    asked = random.Random(0).sample(cases, 1000)
    before = cpu_seconds()
    with Grader() as grader:
        grader.grade([(case["gold"], case["completion"]) for case in asked])
    return [["answers", "s of CPU"], ["1,000", f"{cpu_seconds() - before:.1f}"]]


def cpu_seconds() -> float:
    everybody = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    used = map(resource.getrusage, everybody)
    return sum(each.ru_utime + each.ru_stime for each in used)


PRECISIONS = [  # weights, logits
    ("float32", "float32"),
    ("float16", "float32"),
    ("float16", "16 bits"),
    ("bfloat16", "float32"),
    ("bfloat16", "16 bits")]


def precision() -> list[list[str]]:
    """k3, an estimate of KL(mu || pi_old), on 512 responses, engine and trainer in one precision:
    with float32 logits, as they are, and with rounded ones, as others usually have them."""
    found = [["model", "weights", "logits", "k3", "mean difference, nats"]]
    for model in ("tiny", "tiny-moe"):
        for dtype, logits in PRECISIONS:
            k3, gap = disagreement(model, dtype, rounded=logits == "16 bits")
            found.append([model, dtype, logits, f"{k3:.1e}", f"{gap:.0e}"])
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
    gc.collect()
    gap_T = torch.tensor([x for row in rows for x in row.mu]).double() - old_T
    return ((-gap_T).exp() - 1 + gap_T).mean().item(), gap_T.abs().mean().item()


# --------------------------------------------------------------------------------------- on a GPU
SIZE_1_5B = dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                 num_attention_heads=12, num_key_value_heads=2, vocab_size=151_936)


def gpu(flags: list[str]) -> None:
    """minirl.py itself, with FLAGS, on a random model of Qwen2.5-Math-1.5B's shape, without
    network. Verdicts are coins, and every answer has 900 tokens: runs/gpu/metrics.jsonl."""
    import torch

    small = SIZE_1_5B | dict(  # only to show that it works
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=512)
    on_gpu = torch.cuda.is_available()
    usual = ["--max-tokens", "900", "--steps", "3"] if on_gpu else (
        "--max-tokens 24 --batch-prompts 4 --eval-questions 4 --steps 2".split())
    with tempfile.TemporaryDirectory() as model:
        random_model(SIZE_1_5B if on_gpu else small, model, "bfloat16" if on_gpu else "float32")
        sys.argv = [str(ROOT / "minirl.py"), *(
            f"--model {model} --data builtin --eval-data builtin --template chat --lr 2e-5 "
            f"--name gpu --reward {COIN}").split(), *usual, *flags]
        runpy.run_path(sys.argv[0], run_name="__main__")


def random_model(size: dict, folder: str, dtype: str) -> None:
    """Fills `folder` with a Qwen2 of this size and the built-in tokenizer."""
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
PARTS = dict(rollouts=rollouts, trl=trl, busy=busy, checkpoints=checkpoints, grading=grading,
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
    parser.add_argument("part", choices=[*PARTS, "gpu"])
    parser.add_argument("--model", default="tiny", help="of rollouts and trl (default: tiny)")
    parser.add_argument("--rows", type=int, default=16, help="trl: answers in a pass of TRL's")
    parser.add_argument("--pairs", type=int, default=5, help="trl: steps of each side")
    parser.add_argument("--plain", action="store_true",
                        help="trl: verdicts by coin, prompts that share no beginning")
    args, flags = parser.parse_known_args()
    if args.part == "gpu":
        return gpu(flags)
    if flags and args.part != "trl":
        parser.error(f"{args.part} knows no {' '.join(flags)}")
    given, about = [], [args.part]
    if args.part in ("rollouts", "trl"):
        given, about = [args.model], [args.part, Path(args.model).name]
    if args.part == "trl":
        given += [args.rows, args.pairs, *PLAIN * args.plain, *flags]
        about += ["plain"] * args.plain
    text = markdown(PARTS[args.part](*given))
    text += f"\n`bench/measure.py {shlex.join(sys.argv[1:])}`: {machine()}\n"
    (RESULTS / f"{'-'.join(about)}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
