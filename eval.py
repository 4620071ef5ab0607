"""Evaluation: avg@k and pass@k with 95 % intervals, on benchmarks, files or the built-in problems.

    python eval.py                                                 # the tiny model, on a CPU too
    python eval.py --model Qwen2.5-Math-1.5B --data reinforce-ada  # the Reinforce-Ada paper's table
    python eval.py --adapter runs/NAME --against runs/eval-tiny-builtin-k32

avg@k   the mean reward of a question's k samples, averaged over questions. This measures the
        policy that is trained, not greedy decoding.
pass@k  the chance that at least one of k samples is right, by the unbiased estimator of Chen et
        al. 2021 (arXiv 2107.03374, Eq. 1)
95 %    a bootstrap over questions that keeps a question's samples together, since they are not
        independent. An interval from single samples would be several times too narrow.

A score says nothing without its protocol: the template alone moves Qwen2.5-Math-1.5B from 33 % to
62 % on MATH-500 (docs/evaluation.md). So the protocol is printed and stored with every result. The
same command continues an interrupted evaluation.

Arrays with the suffix _Q have one entry per question.
"""
import contextlib
import json
import math
import os
import random
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from ada_sampler import without_verdict
from parts.config import EvalConfig, parse_eval
from parts.data import (HELD_OUT, check_golds, count_trained, digest, keys_of, load_problems,
                        load_sets, still_held_out)
from parts.folder import (append, counted, digest_of, keep_rows, open_folder, own_files,
                          quiet_end, read_json, read_rows, require_same, run_of, shown, versions,
                          write_safely)
from parts.grader import NO_VERDICT
from parts.models import TINY, fetch_model, load_tokenizer, weights_of
from parts.prompts import add_prompts, stop_ids
from parts.sources import expand


# ----------------------------------------------------------------------------------------- sampling
def evaluate(engine, grader, problems, k: int, max_tokens: int, *, done=(),
             temperature: float = 1.0, seed: str = "", progress: str = ""):
    """Draw k samples of every problem (see prompts.py) and grade them while the engine runs.

    Yields a row per sample as soon as its verdict is there: data, id, sample, reward, status,
    finish_reason, tokens, text; level where it is known; why where the grader failed. There the
    reward is None, until `with_rewards` has seen all rows. `in_order` sorts them.

    `done` are rows from before an interruption: these samples are not drawn again. Each sample has
    its own seed, made of `seed`, its problem and its number, so it does not depend on the other
    samples or on an interruption. Otherwise resuming would keep the short answers and redraw the
    long ones. `progress` is the bar's title.
    """
    from tqdm import tqdm

    known = {sample_key(row) for row in done}
    asked = [(q, s) for q, problem in enumerate(problems) for s in range(k)
             if (problem.source, problem.id, s) not in known]
    for q, s in asked:
        name = f"{seed}/{problems[q].source}/{problems[q].id}/{s}"
        engine.submit((q, s), problems[q].prompt_ids, max_tokens, temperature=temperature,
                      seed=random.Random(name).getrandbits(63))
    arrived, quiet = [], None if progress else True  # None: no bar where nobody watches
    with tqdm(total=len(asked), desc=progress, unit="sample", leave=False, disable=quiet) as bar:
        while engine.busy or arrived:
            due, arrived = arrived, list(engine.step()) if engine.busy else []
            for (q, s), rollout in arrived:
                grader.submit(("eval", q, s), problems[q], rollout, **style_of(problems[q]))
                rollout.routes = None  # a mixture of experts records them; they are large
            for (q, s), rollout in due:  # one engine step later, so that grading has had its time
                yield as_row(problems[q], s, rollout, grader.result(("eval", q, s)))
                bar.update()


def style_of(problem) -> dict:
    """The grader's style. Minerva's golds are measured quantities, judged by closeness."""
    name = Path(problem.source).name.lower()
    return dict(style="minerva") if "minerva" in name else {}


def sample_key(row: dict) -> tuple:
    return row["data"], row["id"], row["sample"]


def in_order(rows, problems, k: int) -> list[dict]:
    """The rows of k samples of each problem, in their order. KeyError if one is missing."""
    found = {sample_key(row): row for row in rows}
    return [found[problem.source, problem.id, s] for problem in problems for s in range(k)]


def as_row(problem, s: int, rollout, verdict) -> dict:
    reward = None if math.isnan(verdict.reward) else verdict.reward  # JSON has no NaN
    row = dict(data=problem.source, id=problem.id, sample=s, reward=reward,
               status=verdict.status, finish_reason=rollout.finish_reason,
               tokens=len(rollout.token_ids), text=rollout.text)
    if verdict.status in NO_VERDICT:
        row["why"] = verdict.why
    if problem.level:
        row["level"] = problem.level
    return row


def with_rewards(rows: list[dict]) -> list[dict]:
    """The rows, with a reward also where the grader failed: 0, or the worst of all if that is less.

    Pass all rows of an evaluation: the worst of one set may be the best of all.
    """
    rewards = [math.nan if row["status"] in NO_VERDICT else row["reward"] for row in rows]
    return [row | dict(reward=reward) for row, reward in zip(rows, without_verdict(rewards))]


def is_sample(row: dict) -> bool:
    """Whether a row of eval.jsonl has what `report` needs (a reward only after a verdict)."""
    texts = all(isinstance(row.get(key), str) for key in ("data", "id", "status", "finish_reason"))
    judged = row.get("status") not in NO_VERDICT
    numbers = ("sample", "tokens", *["reward"] * judged)
    return texts and all(isinstance(row.get(key), int | float) for key in numbers)


# --------------------------------------------------------------------------------------- statistics
def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the chance that k of n samples include one of the c right ones."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(
            f"no pass@{k} from {n} samples, {c} of them right: k must be between 1 and {n}")
    # The product has a factor 0 if fewer than k are wrong.
    return 1 - math.prod((n - c - i) / (n - i) for i in range(k))


def bootstrap(sets: list, weights: list | None = None, resamples: int = 4000,
              seed: int = 0) -> dict:
    """avg: weighted mean of the means of `sets` (arrays [Q]); ci_low, ci_high: its 95 % interval.

    Questions are drawn again within each set. Given the differences of two models on the same
    questions, this is the paired interval. It is too narrow below about 30 questions, and a point
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
    """question -> the mean reward of its samples."""
    return {key: sum(row["reward"] for row in own) / len(own)
            for key, own in grouped(rows, question).items()}


def report(rows: list[dict]) -> dict:
    """The results of rows `with_rewards`: avg (avg@k), ci_low, ci_high, pass {k: pass@k}, and more.

    avg is a mean of rewards. correct and pass count right answers (status "correct"). With
    math-verify's rewards of 0 and 1, avg and correct are the same. Raises ValueError without rows,
    and for questions with different numbers of samples.
    """
    rows_Q = list(grouped(rows, question).values())
    if not rows:
        raise ValueError("nothing to report: there are no rows")
    n = len(rows_Q[0])
    if any(len(own) != n for own in rows_Q):
        raise ValueError("questions have different numbers of samples")
    right_Q = [sum(row["status"] == "correct" for row in own) for own in rows_Q]
    ks = sorted({n, *(2**i for i in range(n.bit_length()))})
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
    """A `report` of each set that `data` names. What is held out of training data is one set."""
    several = len(expand(data)) > 1
    sets = grouped(rows, lambda row: row["data"] if several else data)
    return {name: report(own) for name, own in sets.items()}


def summarize(rows: list[dict], weights: dict[str, float]) -> dict:
    """sets: {name: its report, with one per level if known}; weighted: the mean over all sets."""
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
    """Name of a set -> mean difference of avg@k (rows - others), its paired interval, counts.

    Both models met the same questions, so difficulty cancels: the interval is much narrower than
    the separate intervals suggest.
    """
    before = question_means(others)
    change = {key: mean - before[key] for key, mean in question_means(rows).items()}
    parts = {name: {name: 1} for name in weights}
    if len(weights) > 1:
        parts["weighted"] = weights
    result = {}
    for name, part in parts.items():
        values = [value for (data, _), value in change.items() if data in part]
        result[name] = weighted(change, part) | dict(
            better=sum(value > 0 for value in values), worse=sum(value < 0 for value in values))
    return result


# --------------------------------------------------------------------- everything before the engine
def sets_and_protocol(config: EvalConfig) -> tuple[dict, dict]:
    """({name: problems with prompts}, {everything that the scores depend on}).

    Whatever is wrong with the model or the data ends here in a SystemExit, before the engine
    starts.
    """
    from parts.machine import default_dtype, default_sync

    dtype = default_dtype()
    loaded = load_asked(config)
    context = config.max_prompt_tokens + config.max_tokens
    path = fetch_model(config.model, context)
    tokenizer = load_tokenizer(path)
    prompted = [add_prompts(problems, tokenizer, config.template, config.max_prompt_tokens)
                for problems in loaded]
    sets = {problems[0].source: problems for problems in prompted}
    weights = {name: weight or len(sets[name])
               for name, (_, weight) in zip(sets, expand(config.data))}
    sync = default_sync(dtype) if config.sync == "auto" else config.sync
    hashes = weights_of(path)
    if config.adapter:  # one that was trained further is another policy
        hashes["adapter"] = digest_of(Path(config.adapter, "adapter_model.safetensors"))
    return sets, asdict(config) | dict(
        path=path, files=hashes, sync=sync, dtype=dtype, context=context, weights=weights,
        versions=versions(), stop=stop_ids(tokenizer, config.stop),
        prompt=prompted[0][0].prompt, own_files=own_files(config),
        questions={name: digest(problems) for name, problems in sets.items()})


def load_asked(config: EvalConfig) -> list[list]:
    """The sets of --data; `held-out` is what the adapter's run holds out of its own data."""
    (folder, run), most = run_of(config.adapter), config.limit or None
    if config.data == HELD_OUT:
        if run.get("eval_data") != HELD_OUT:
            raise SystemExit("--data held-out needs --adapter RUN, of a run that holds out a share "
                             "of its own data: name other data.")
        held_out = still_held_out(folder, load_problems(run["data"], **keys_of(config)))
        return [[replace(problem, source=HELD_OUT) for problem in held_out[:most]]]
    loaded = load_sets(config.data, for_training=False, limit=most, **keys_of(config))
    if run:
        problems = sum(loaded, [])
        count = count_trained(folder, problems)
        known = "an unknown number" if count is None else count
        advice = "; --data held-out asks others" * (count != 0 and run["eval_data"] == HELD_OUT)
        print(f"{shown(folder)} trains on {known} of these {counted(len(problems), 'problem')}"
              f"{advice}")
    return loaded


def adapted_policy(protocol: dict) -> tuple:
    """(Base with adapter, its rank); (None, 8) without one.

    Raises SystemExit if they do not fit, or if a file of the run has changed.
    """
    if not protocol["adapter"]:
        return None, 8
    from parts.policy import load_adapter

    folder, run = run_of(protocol["adapter"])
    if run:  # it knows the base
        require_same(folder, dict(model=protocol["files"]["model"]),
                     f"the adapter was trained on --model {shown(run['model'])}")
        own = {flag: known for flag, known in protocol["own_files"].items()
               if run.get(flag) == protocol[flag]}
        require_same(folder, own, "put them back, or give the new file another name")
    return load_adapter(protocol["path"], protocol["adapter"], protocol["dtype"])


# -------------------------------------------------------------------------------------- the samples
def load_finished(folder: Path, protocol: dict, sets: dict) -> list[dict]:
    """The rows of another evaluation, to compare with.

    Raises SystemExit if it has other questions or is not finished.
    """
    other = read_json(folder / "protocol.json")
    if other.get("questions") != protocol["questions"]:
        raise SystemExit(f"{shown(folder)} has other questions: only the same --data and --limit "
                         "can be compared.")
    problems = [problem for own in sets.values() for problem in own]
    try:
        rows = in_order(read_rows(folder / "eval.jsonl", is_sample), problems, other["k"])
    except (KeyError, TypeError):
        rows = []
    if not rows or not (folder / "summary.json").exists():
        raise SystemExit(f"The evaluation in {shown(folder)} is not finished: repeat its command "
                         "to continue it.")
    deciding = ("template", "temperature", "max_tokens", "stop", "reward", "own_files")
    changed = [key for key in deciding if protocol.get(key, "") != other.get(key, "")]
    if changed:
        print(f"warning: {shown(folder)} has another {', '.join(changed)}: the difference is not "
              "due to the model alone")
    return with_rewards(rows)


# --------------------------------------------------------------------------------------- the output
def show_protocol(protocol: dict) -> None:
    own = ("reward", "threshold") if protocol["reward"] else ()
    for key in ("model", "adapter", "data", *own, "template", "temperature", "k",
                "max_tokens", "stop", "seed", "dtype", "versions"):
        print(f"{key:12} {shown(protocol[key]) if protocol[key] != '' else '-'}")
    print(f"{'prompt':12} {protocol['prompt']!r}")


def show_table(summary: dict, own_reward: bool = False) -> None:
    """The results on the terminal. Under --reward, avg@k is no share of right answers."""
    k = next(iter(summary["sets"].values()))["k"]
    unit = ".3g" if own_reward else ".1%"
    table = [["", "questions", f"avg@{k}", "95 % interval", "correct", f"pass@{k}", "no box",
              "cut off", "no verdict", "tokens"]]
    for name, one in summary["sets"].items():
        shares = (one["correct"], one["pass"][k], one["no_box"], one["truncated"],
                  one["verifier_failures"])
        table.append([shown(name), str(one["questions"]), *mean_and_interval(one, unit),
                      *(f"{share:.1%}" for share in shares), f"{one['response_length']:.0f}"])
    if len(table) > 2:
        blank = [""] * 6
        table.append(["weighted", "", *mean_and_interval(summary["weighted"], unit), *blank])
    widths = [max(map(len, column)) for column in zip(*table)]
    print()
    for name, *cells in table:
        print(name.ljust(widths[0]), *map(str.rjust, cells, widths[1:]), sep="  ")


def mean_and_interval(one: dict, unit: str) -> list[str]:
    return [f"{one['avg']:{unit}}", f"{one['ci_low']:{unit}} - {one['ci_high']:{unit}}"]


def show_comparison(changes: dict, folder: str, own_reward: bool = False) -> None:
    factor, digits, unit = (1, "+.3g", "reward") if own_reward else (100, "+.1f", "points")
    print(f"\ndifference to {shown(folder)}, question by question, in {unit}:")
    for name, one in changes.items():
        avg, low, high = (factor * one[key] for key in ("avg", "ci_low", "ci_high"))
        verdict = "no clear difference" if low <= 0 <= high else "better" if low > 0 else "worse"
        print(f"  {shown(name)}: {avg:{digits}} [{low:{digits}}, {high:{digits}}], {verdict}; "
              f"{counted(one['better'], 'question')} better, {one['worse']} worse")


def show_failures(rows: list[dict]) -> None:
    """Warn of samples on which the grader failed, so that nobody takes them for wrong answers."""
    failed = [row for row in rows if row["status"] in NO_VERDICT]
    if failed:
        first = failed[0]
        print(f"WARNING: no verdict on {len(failed)} of {len(rows)} samples, such as sample "
              f"{first['sample']} of {shown(first['id'])}: {first['status']}, "
              f"{shown(first.get('why', ''))}")


# -------------------------------------------------------------------------------------- the program
def main(argv: list[str] | None = None) -> None:
    config = parse_eval(argv)
    if config.model in TINY:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # so small that threads slow it down
    sets, protocol = sets_and_protocol(config)
    others = load_finished(Path(config.against), protocol, sets) if config.against else None
    policy, rank = adapted_policy(protocol)
    folder = Path(config.out)
    with open_folder(folder, protocol):
        show_protocol(protocol)
        rows = with_rewards(sample(sets, protocol, policy, rank, folder))
        summary = summarize(rows, protocol["weights"])
        show_table(summary, bool(config.reward))
        show_failures(rows)
        if others:
            summary["difference"] = compare(rows, others, protocol["weights"])
            show_comparison(summary["difference"], config.against, bool(config.reward))
        write_safely(folder / "summary.json", json.dumps(summary, indent=1))


def sample(sets: dict, protocol: dict, policy, rank: int, folder: Path) -> list[dict]:
    """The rows of all samples. Those that `eval.jsonl` lacks are drawn and appended to it."""
    from parts.engine import Engine
    from rewards import open_grader

    file, k = folder / "eval.jsonl", protocol["k"]
    problems = [problem for own in sets.values() for problem in own]
    keep_rows(file, is_sample)  # drops the half line that an interruption has left
    done = list(read_rows(file, is_sample))
    already = f", which has {counted(len(done), 'sample')} already" if done else ""
    print(f"results in {shown(folder)}{already}")
    known = {sample_key(row) for row in done}
    if all((problem.source, problem.id, s) in known for problem in problems for s in range(k)):
        return in_order(done, problems, k)
    with open_grader(protocol["reward"], protocol["threshold"]) as grader:
        for own in sets.values():
            if protocol["reward"]:
                grader.try_out(own)
            else:
                check_golds(own, grader)
        engine = Engine(
            protocol["path"], max_model_len=protocol["context"], dtype=protocol["dtype"],
            max_num_seqs=protocol["engine_sequences"], memory_share=protocol["engine_memory"],
            temperature=protocol["temperature"], stop_token_ids=protocol["stop"],
            seed=protocol["seed"], lora_rank=rank,
            sync_mode=protocol["sync"] if policy else "merge")
        with contextlib.closing(engine):
            if policy:
                engine.sync(policy)
            for row in evaluate(
                    engine, grader, problems, k, protocol["max_tokens"], done=list(done),
                    temperature=protocol["temperature"], seed=protocol["seed"],
                    progress="evaluation"):
                append(file, row)
                done.append(row)
    return in_order(done, problems, k)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with quiet_end():
        try:
            main()
        except KeyboardInterrupt:
            raise SystemExit("\ninterrupted: the same command continues, and draws only what is "
                             "missing") from None
