"""Evaluation: avg@k and pass@k with 95 % intervals, on benchmarks, files or the built-in problems.

    python eval.py                                                 # the tiny model, on a CPU too
    python eval.py --model Qwen2.5-Math-1.5B --data reinforce-ada  # the Reinforce-Ada paper's table
    python eval.py --adapter runs/NAME --against runs/eval-tiny-builtin-k32

avg@k   mean reward of k samples, then mean over questions: the policy that is trained, not greedy
        decoding
pass@k  chance that at least one of k samples is right: unbiased estimator, Chen et al. 2021
        (arXiv 2107.03374, Eq. 1)
95 %    bootstrap of questions, all samples of one together: they are not independent, and an
        interval from single samples would be several times too narrow

A score says nothing without its protocol (the template alone moves Qwen2.5-Math-1.5B from 21 % to
62 % on MATH-500): it is printed and stored with every result. The same command continues an
interrupted evaluation.

Arrays with the suffix _Q have one entry per question.
"""
import contextlib
import json
import math
import os
import random
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ada_sampler import without_verdict
from parts.config import EvalConfig, parse_eval
from parts.data import count_odd_golds, digest, keys_of, load_sets
from parts.files import (append, digest_of, keep_rows, quiet_end, read_json, read_rows, shown,
                         write_safely)
from parts.folder import is_sample, open_folder, own_files, require_same, versions, weights_of
from parts.grader import NO_VERDICT
from parts.models import TINY, fetch_model, load_tokenizer
from parts.prompts import add_prompts, stop_ids
from parts.sources import expand

SECONDS = 30  # an interruption costs the samples of this time at most


# ----------------------------------------------------------------------------------------- sampling
def evaluate(engine, grader, problems, k: int, max_tokens: int, *, done=(), on_rows=None,
             **how) -> list[dict]:
    """k samples of every problem (with prompt_ids, see prompts.py), graded while the engine runs.

    Returns one row per sample, in order of problems: data, id, sample, reward, status,
    finish_reason, tokens, text, level where known, and why where there was no verdict. A reward of
    one's own is None there, until all rows of the evaluation are there: `with_rewards`.

    `on_rows(rows)` gets the new rows as they come, to write them down. `done` are rows from before
    an interruption: these samples are not drawn again. `how`: see `answers`.
    """
    rows = list(done)
    for new in answers(engine, grader, problems, k, max_tokens, done=rows, **how):
        if on_rows:
            on_rows(new)
        rows += new
    return in_order(rows, problems, k)


def answers(engine, grader, problems, k: int, max_tokens: int, *, done=(),
            temperature: float = 1.0, seed: str = "", progress: str = ""):
    """Yields the rows of all samples that are not `done`, some at a time, twice a minute or more.

    Each sample is drawn from a seed of its own, made of `seed`, its problem and its number. So
    neither the other samples nor an interruption decide about it: else those that are short would
    be kept, and those that are long drawn again. `progress` is the bar's title.
    """
    from tqdm import tqdm

    known = {sample_key(row) for row in done}
    asked = [(q, s) for q, problem in enumerate(problems) for s in range(k)
             if (problem.source, problem.id, s) not in known]
    for q, s in asked:
        name = f"{seed}/{problems[q].source}/{problems[q].id}/{s}"
        engine.submit((q, s), problems[q].prompt_ids, max_tokens, temperature=temperature,
                      seed=random.Random(name).getrandbits(63))
    finished, last, total = {}, time.monotonic(), len(asked)
    with tqdm(total=total, desc=progress, unit="sample", leave=False,
              disable=None if progress else True) as bar:  # None: no bar where nobody watches
        while engine.busy:
            for (q, s), rollout in engine.step():
                problem = problems[q]
                grader.submit(("eval", q, s), problem, rollout, **style_of(problem))
                rollout.routes = None  # of a mixture of experts: large, and not looked at here
                finished[q, s] = rollout
                bar.update()
            if time.monotonic() - last >= SECONDS:
                yield rows_of(finished, problems, grader)
                finished, last = {}, time.monotonic()
    yield rows_of(finished, problems, grader)


def style_of(problem) -> dict:
    """What the grader is told besides: Minerva's golds are measured, and judged by closeness."""
    name = Path(problem.source).name.lower()
    return dict(style="minerva") if "minerva" in name else {}


def rows_of(finished: dict, problems, grader) -> list[dict]:
    return [as_row(problems[q], s, rollout, grader.result(("eval", q, s)))
            for (q, s), rollout in finished.items()]


def sample_key(row: dict) -> tuple:
    return row["data"], row["id"], row["sample"]


def in_order(rows: list[dict], problems, k: int) -> list[dict]:
    """The rows of k samples of each problem. KeyError if one is missing."""
    found = {sample_key(row): row for row in rows}
    return [found[problem.source, problem.id, s] for problem in problems for s in range(k)]


def as_row(problem, s: int, rollout, verdict) -> dict:
    reward = None if math.isnan(verdict.reward) else verdict.reward  # JSON has no NaN
    row = dict(data=problem.source, id=problem.id, sample=s, reward=reward,
               status=verdict.status, finish_reason=rollout.finish_reason,
               tokens=len(rollout.token_ids), text=rollout.text)
    if verdict.status in NO_VERDICT:
        row["why"] = verdict.why
    return row | ({"level": problem.level} if problem.level else {})


def with_rewards(rows: list[dict]) -> list[dict]:
    """The rows, where samples without a verdict have the reward 0, or the worst of all if below.

    It takes all rows of an evaluation: the worst of one set may be the best of all.
    """
    rewards = [math.nan if row["status"] in NO_VERDICT else row["reward"] for row in rows]
    return [row | dict(reward=reward) for row, reward in zip(rows, without_verdict(rewards))]


# --------------------------------------------------------------------------------------- statistics
def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the chance that k of n samples, c of them right, hold one."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(
            f"no pass@{k} from {n} samples, {c} of them right: k must be between 1 and {n}")
    # The product has a factor 0 if fewer than k are wrong.
    return 1 - math.prod((n - c - i) / (n - i) for i in range(k))


def bootstrap(sets: list, weights: list | None = None, resamples: int = 4000,
              seed: int = 0) -> dict:
    """avg: weighted mean of the means of `sets` (arrays [Q]); ci_low, ci_high: its 95 % bootstrap.

    Questions are drawn again within each set. Of the differences of two models on the same
    questions this is the paired interval. Below about 30 questions it is too narrow; it is a point
    when all values are equal.
    """
    rng, total = np.random.default_rng(seed), np.zeros(resamples)
    weights = np.ones(len(sets)) if weights is None else np.array(weights, float)
    for value_Q, weight in zip(map(np.asarray, sets), weights / weights.sum()):
        Q = len(value_Q)
        means = [value_Q[rng.integers(0, Q, Q)].mean() for _ in range(resamples)]
        total += weight * np.array(means)
    avg = float(np.average([np.mean(values) for values in sets], weights=weights))
    low, high = map(float, np.percentile(total, (2.5, 97.5)))
    return dict(avg=avg, ci_low=low, ci_high=high)


def grouped(rows: list[dict], key) -> dict:
    """key(row) -> the rows that have it, in order of appearance."""
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def question(row: dict) -> tuple:
    return row.get("data"), row["id"]


def question_means(rows: list[dict]) -> dict:
    return {key: sum(row["reward"] for row in own) / len(own)
            for key, own in grouped(rows, question).items()}


def report(rows: list[dict]) -> dict:
    """What rows `with_rewards` say: avg (avg@k), ci_low, ci_high, pass {k: pass@k}, shares, length.

    avg is of rewards, correct and pass of right answers (status "correct"): of math-verify's
    rewards, 0 and 1, avg is correct. Raises ValueError without rows, and for questions with
    different numbers of samples.
    """
    rows_Q = list(grouped(rows, question).values())
    if not rows:
        raise ValueError("nothing to report: there are no rows")
    n = len(rows_Q[0])
    if any(len(own) != n for own in rows_Q):
        raise ValueError(
            "questions have different numbers of samples: evaluate all of them with the same k")
    ks = [2**i for i in range(n.bit_length())]
    right_Q = [sum(row["status"] == "correct" for row in own) for own in rows_Q]
    verdicts = Counter(row["status"] for row in rows)
    return bootstrap([list(question_means(rows).values())]) | {
        "k": n, "questions": len(rows_Q), "correct": sum(right_Q) / len(rows),
        "pass": {k: float(np.mean([pass_at_k(n, c, k) for c in right_Q])) for k in ks},
        "no_box": verdicts["no_box"] / len(rows),
        "truncated": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "verifier_failures": sum(verdicts[status] for status in NO_VERDICT) / len(rows),
        "response_length": sum(row["tokens"] for row in rows) / len(rows),
        "verdicts": dict(verdicts)}


def report_by_set(rows: list[dict], data: str) -> dict[str, dict]:
    """The `report` of each set of `data`: of several, each under its own name.

    (What is held out of the training data is one set, whatever that was put together of.)
    """
    several = len(expand(data)) > 1
    sets = grouped(rows, lambda row: row["data"] if several else data)
    return {name: report(own) for name, own in sets.items()}


def summarize(rows: list[dict], weights: dict[str, float]) -> dict:
    """sets: {name: report, and one per level where known}; weighted: the average over all sets."""
    sets = {}
    for name in weights:
        own = [row for row in rows if row["data"] == name]
        levels = grouped(own, lambda row: row.get("level", ""))
        known = sorted(filter(None, levels), key=lambda level: (len(level), level))  # 2 before 10
        sets[name] = report(own) | {"levels": {level: report(levels[level]) for level in known}}
    return dict(sets=sets, weighted=weighted(question_means(rows), weights))


def weighted(value_by_question: dict, weights: dict[str, float]) -> dict:
    """`bootstrap` of one value per (data, id)."""
    sets = [[value for (data, _), value in value_by_question.items() if data == name]
            for name in weights]
    return bootstrap(sets, list(weights.values()))


def compare(rows: list[dict], others: list[dict], weights: dict[str, float]) -> dict:
    """Name -> avg of the differences of avg@k (rows - others), paired interval, counts.

    Both met the same questions, so difficulty cancels: much narrower than the separate intervals
    suggest.
    """
    before = question_means(others)
    change = {key: mean - before[key] for key, mean in question_means(rows).items()}
    parts, result = {name: {name: 1} for name in weights}, {}
    if len(weights) > 1:
        parts["weighted"] = weights
    for name, part in parts.items():
        values = [value for (data, _), value in change.items() if data in part]
        result[name] = weighted(change, part) | dict(
            better=sum(value > 0 for value in values), worse=sum(value < 0 for value in values))
    return result


# --------------------------------------------------------------------- everything before the engine
def sets_and_protocol(config: EvalConfig) -> tuple[dict, dict]:
    """(sets {name: problems with prompts}, protocol {all that decides about the numbers}).

    Whatever is wrong with the model or the data ends here in a SystemExit, before the engine is
    started.
    """
    from parts.machine import default_dtype, default_sync

    dtype = default_dtype()
    loaded = load_sets(config.data, for_training=False, limit=config.limit or None,
                       **keys_of(config))
    context = config.max_prompt_tokens + config.max_tokens
    path = fetch_model(config.model, context)
    tokenizer = load_tokenizer(path)
    prompted = [add_prompts(problems, tokenizer, config.template, config.max_prompt_tokens,
                            config.system) for problems in loaded]
    sets = {problems[0].source: problems for problems in prompted}
    weights = {name: weight or len(sets[name])
               for name, (_, weight) in zip(sets, expand(config.data))}
    sync = default_sync(dtype) if config.sync == "auto" else config.sync
    return sets, asdict(config) | dict(
        path=path, files=weights_of(path) | adapter_of(config), sync=sync,
        dtype=dtype, context=context, weights=weights, versions=versions(),
        stop=stop_ids(tokenizer, config.stop), prompt=prompted[0][0].prompt,
        own_files=own_files(config),
        questions={name: digest(problems) for name, problems in sets.items()})


def adapter_of(config: EvalConfig) -> dict[str, str]:
    """{"adapter": hash of its weights}: one that was trained on is another policy."""
    if not config.adapter:
        return {}
    return dict(adapter=digest_of(Path(config.adapter, "adapter_model.safetensors")))


def adapted_policy(protocol: dict) -> tuple:
    """(base and adapter, its rank); (None, 8) without an adapter. SystemExit if they do not fit."""
    if not protocol["adapter"]:
        return None, 8
    from parts.policy import load_adapter

    checkpoints = Path(protocol["adapter"]).parent
    if checkpoints.name == "checkpoints":  # of a run, which knows its base
        require_same(checkpoints.parent, dict(model=protocol["files"]["model"]),
                     "name the --model that the adapter was trained on")
    return load_adapter(protocol["path"], protocol["adapter"], protocol["dtype"])


# -------------------------------------------------------------------------------------- the samples
def load_finished(folder: Path, protocol: dict, sets: dict) -> list[dict]:
    """Rows of another evaluation of the same questions. SystemExit for others, or if unfinished."""
    other = read_json(folder / "protocol.json")
    rows = with_rewards(samples_in(folder / "eval.jsonl"))
    if other.get("questions") != protocol["questions"]:
        raise SystemExit(f"{shown(folder)} has other questions: only the same --data and --limit "
                         "can be compared.")
    counts = Counter((row["data"], row["id"]) for row in rows)
    missing = [problem for name, problems in sets.items() for problem in problems
               if counts[name, problem.id] != other.get("k")]
    if missing or not (folder / "summary.json").exists():
        raise SystemExit(f"The evaluation in {shown(folder)} is not finished: repeat its command "
                         "to continue it.")
    deciding = ("template", "temperature", "max_tokens", "stop", "system", "reward", "own_files")
    changed = [key for key in deciding if protocol.get(key, "") != other.get(key, "")]
    if changed:
        print(f"warning: {shown(folder)} has another {', '.join(changed)}: the difference is not "
              "the model's alone")
    return rows


# --------------------------------------------------------------------------------------- the output
def show_protocol(protocol: dict) -> None:
    own = ("reward", "threshold") if protocol["reward"] else ()
    for key in ("model", "adapter", "data", *own, "template", "system", "temperature", "k",
                "max_tokens", "stop", "seed", "dtype", "versions"):
        print(f"{key:12} {shown(protocol[key]) if protocol[key] != '' else '-'}")
    print(f"{'prompt':12} {protocol['prompt']!r}")


def show_table(summary: dict, own_reward: bool = False) -> None:
    """The table on the terminal. A reward of one's own is no share, and has one beside it."""
    unit, title = (".3g", " correct  ") if own_reward else (".1%", "")
    k = next(iter(summary["sets"].values()))["k"]
    best = 2 ** (k.bit_length() - 1)  # the largest k of pass@k
    lines = {shown(name): one for name, one in summary["sets"].items()}
    if len(lines) > 1:
        lines["weighted"] = summary["weighted"]
    width = max(map(len, [*lines, "weighted"]))
    print(f"\n{'':{width}}  questions  {f'avg@{k}':>7}   95 % interval  {title}"
          f"{f'pass@{best}':>8}   no box  cut off  no verdict  tokens")
    for name, one in lines.items():
        line = f"{name:{width}}  {one.get('questions', ''):9}  {one['avg']:7{unit}}  "
        line += f"{one['ci_low']:6{unit}} - {one['ci_high']:6{unit}}"
        if "pass" in one and own_reward:
            line += f"{one['correct']:9.1%} "
        if "pass" in one:
            line += (f"{one['pass'][best]:9.1%}  {one['no_box']:7.1%}  {one['truncated']:7.1%}  "
                     f"{one['verifier_failures']:10.2%}  {one['response_length']:6.0f}")
        print(line)


def show_comparison(changes: dict, folder: str, own_reward: bool = False) -> None:
    factor, digits, unit = (1, "+.3g", "reward") if own_reward else (100, "+.1f", "points")
    print(f"\ndifference to {shown(folder)}, question by question, in {unit}:")
    for name, one in changes.items():
        avg, low, high = (factor * one[key] for key in ("avg", "ci_low", "ci_high"))
        verdict = "no clear difference" if low <= 0 <= high else "better" if low > 0 else "worse"
        print(f"  {shown(name)}: {avg:{digits}} [{low:{digits}}, {high:{digits}}], {verdict}; "
              f"{one['better']} questions better, {one['worse']} worse")


def show_failures(rows: list[dict]) -> None:
    """Say what happened where there was no verdict: nobody should take it for a wrong answer."""
    failed = [row for row in rows if row["status"] in NO_VERDICT]
    if failed:
        first = failed[0]
        print(f"WARNING: no verdict on {len(failed)} of {len(rows)} samples, such as sample "
              f"{first['sample']} of {shown(first['id'])}: {first['status']}, "
              f"{shown(first.get('why', ''))}")


# -------------------------------------------------------------------------------------- the program
def main(argv: list[str] | None = None) -> None:
    from parts.plot import draw_evaluation

    config = parse_eval(argv)
    if config.model in TINY:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # its threads would wait for each other
    sets, protocol = sets_and_protocol(config)
    others = load_finished(Path(config.against), protocol, sets) if config.against else None
    policy, rank = adapted_policy(protocol)
    folder = Path(config.out)
    with open_folder(folder, protocol):
        show_protocol(protocol)
        file, problems = folder / "eval.jsonl", [p for own in sets.values() for p in own]
        keep_rows(file, is_sample)  # without the half line that an interruption has left
        done = samples_in(file)
        already = f", which has {len(done)} samples already" if done else ""
        print(f"results in {shown(folder)}{already}")
        if len(done) < len(problems) * config.k:
            sample(sets, done, protocol, policy, rank, file)
        rows = with_rewards(in_order(samples_in(file), problems, config.k))
        summary = summarize(rows, protocol["weights"])
        show_table(summary, bool(config.reward))
        show_failures(rows)
        if others:
            summary["difference"] = compare(rows, others, protocol["weights"])
            show_comparison(summary["difference"], config.against, bool(config.reward))
        write_safely(folder / "summary.json", json.dumps(summary, indent=1))
        draw_evaluation(summary, folder / "eval.png")


def samples_in(file: Path) -> list[dict]:
    """Without their texts, which may be larger than memory."""
    return [{key: value for key, value in row.items() if key != "text"}
            for row in read_rows(file, is_sample)]


def sample(sets: dict, done: list, protocol: dict, policy, rank: int, file: Path) -> None:
    """Start verifier and engine, and add the samples to `file` that are not `done`."""
    from parts.engine import Engine
    from rewards import open_grader

    own = protocol["reward"]
    with open_grader(own, protocol["threshold"], protocol["graders"]) as grader:
        for problems in sets.values():
            if own:
                grader.try_out(problems)
            else:
                count_odd_golds(problems, grader)
        engine = Engine(
            protocol["path"], max_model_len=protocol["context"], dtype=protocol["dtype"],
            max_num_seqs=protocol["engine_sequences"], memory_share=protocol["engine_memory"],
            temperature=protocol["temperature"], stop_token_ids=protocol["stop"],
            seed=protocol["seed"], lora_rank=rank,
            sync_mode=protocol["sync"] if policy else "merge")
        with contextlib.closing(engine):
            if policy:
                engine.sync(policy)
            problems = [p for own in sets.values() for p in own]
            for rows in answers(engine, grader, problems, protocol["k"], protocol["max_tokens"],
                                done=done, temperature=protocol["temperature"],
                                seed=protocol["seed"], progress="evaluation"):
                append(file, *rows)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with quiet_end():
        try:
            main()
        except KeyboardInterrupt:
            raise SystemExit(
                "\ninterrupted: the samples are kept (but those of the last half minute), the same "
                "command continues") from None
