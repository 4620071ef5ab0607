"""Evaluation: avg@k and pass@k with 95 % intervals, on benchmarks, files or the built-in problems.

    python eval.py                                                 # the tiny model, on a CPU too
    python eval.py --model Qwen2.5-Math-1.5B --data reinforce-ada  # the Reinforce-Ada paper's table
    python eval.py --adapter runs/NAME --base                      # compares it with its base

avg@k   the mean reward of a question's k answers, averaged over questions. This measures the
        policy that is trained, not greedy decoding.
pass@k  the probability that at least one of k answers is right; unbiased (arXiv 2107.03374, Eq. 1)
95 %    a bootstrap over questions that keeps a question's answers together, since they are not
        independent. An interval from single answers would be several times too narrow.

A score says nothing without its protocol. For example, Qwen2.5-Math-1.5B has 33 % or 62 % on
MATH-500, depending on the template (docs/after_training.md). So the protocol is printed and stored
with every result. The same command continues an interrupted evaluation.

Results are computed from rows `in_order`, k answers per question. _Q: one entry per question.
"""
import json
import math
import os
import random
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from ada_sampler import fill_missing
from parts.config import (Auto, CommonFlags, check_numbers, common_effects, given_in,
                          in_one_sentence, parse_flags, require_effect)
from parts.data import (HELD_OUT, check_golds, check_readable, count_trained, default_data,
                        default_template, digest, digest_of_prompts, is_own, keys_of,
                        load_problems, load_sets, still_held_out)
from parts.folder import (FREE, append, digest_of, keep_rows, open_folder, read_json, read_rows,
                          require_folder, write_safely)
from parts.grader import NO_VERDICT, PART, mean_parts, require_function
from parts.machine import Machine, this_machine
from parts.models import (TINY, Model, find_model, load_tokenizer, require_context,
                          require_weights, resolve_model)
from parts.prompts import add_prompts, read_template, require_embedded, stop_ids
from parts.provenance import (MERGED, as_model, base_of, find_adapter, own_files, require_same,
                              run_named, settings, versions)
from parts.settle import SMALL, by_size, size_of
from parts.sources import MEASURED, expand, require_sets
from parts.text import (counted, difference, direction, interval, listed, quiet_end, shown, unit_of,
                        verdict)
from rewards import open_grader


# ----------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Flags(CommonFlags):
    """Every flag of `python eval.py`: CommonFlags and these.

    Results are comparable only if template, lengths, stop, k, limit, temperature and problems are
    equal.
    """

    # ---- which policy is evaluated, and with which one it is compared
    adapter: str = ""
    """LoRA adapter: a PEFT folder, or a run (its last checkpoint)"""
    base: bool = False
    """with --adapter: also evaluate the model without the adapter, for comparison"""
    against: str = ""
    """folder of a finished evaluation of the same problems, to compare with"""
    out: Auto[str] = None
    """folder of this evaluation; default: runs/eval-MODEL-DATA-kK"""

    # ---- the answers
    threshold: float = 0.7
    """with --reward: an answer with a reward above this number is right in pass@k"""
    k: int = 32
    """answers per problem"""
    limit: int = 0
    """use only this many problems of each set, the first ones; 0 = all"""
    temperature: float = 1.0
    """sampling temperature; 0 = greedy, with --k 1"""
    seed: int = 0
    """decides which answers are sampled"""

    # ---- hardware
    sync: Auto[Literal["adapter", "merge"]] = None
    """how the engine gets an adapter: as it is (default on a GPU) or merged (on a CPU)"""
    engine_memory: float = 0.85
    """share of the GPU's memory for the engine"""
    engine_sequences: int = 256
    """most answers that are written at the same time"""


def parse(argv: list[str] | None = None) -> Flags:
    """The flags. They are parsed twice if the run of a checkpoint gives the defaults.

    Ends the program with code 2 and one sentence if they cannot work.
    """
    about = "eval.py", "avg@k and pass@k with 95 % intervals, on benchmarks, files or built-in ones"
    with in_one_sentence("eval.py"):
        flags = parse_flags(Flags, argv, *about)
        adapter, model = flags.adapter and find_adapter(flags.adapter), as_model(flags.model)
        usual = as_in_its_run(adapter or model, flags)
        if usual:
            flags = parse_flags(Flags, argv, *about, usual)
        flags = replace(flags, adapter=adapter, model=as_model(flags.model, model))
        check(flags, vars(Flags()) | usual)
    if not flags.reward:  # the threshold of a run belongs to its reward
        flags = replace(flags, threshold=Flags.threshold)
    require_function(flags.reward)
    resolve_model(base_of(flags.model))  # ends here if there is no such model
    return flags


def check(c: Flags, usual: dict) -> None:
    """Raises ValueError, one sentence, for flags that cannot work."""
    check_numbers(replace(c, temperature=c.temperature or 1.0))  # 0 is greedy here
    columns = c.data == HELD_OUT or bool(c.data) and is_own(c.data)
    require_effect(given_in(c, usual), common_effects(c, columns) + [
        ("sync base", bool(c.adapter), "without adapter, which names a run or a PEFT folder")])
    if c.temperature == 0 and c.k > 1:
        raise ValueError("temperature 0 gives k equal samples: use --k 1, or a temperature above 0")
    if c.base and c.against:
        raise ValueError("base and against cannot be used together: leave one out")


def as_in_its_run(checkpoint: str, flags: Flags) -> dict:
    """The default settings of an evaluation that come from the run of its checkpoint.

    Unless `flags` names data, problems and k are those of the run's evaluations. The run's --reward
    also grades files, but no benchmark, because results on benchmarks must be comparable.
    """
    folder = run_named(checkpoint)
    run = settings(folder)
    data = flags.data or run.get("eval_data")
    names = "template max_prompt_tokens max_tokens stop temperature".split()
    if Path(checkpoint, "adapter_config.json").exists():
        names.insert(0, "model")  # the adapter belongs to it
    if data and (data == HELD_OUT or is_own(data)):
        names.append("columns")
    if run.get("reward") and data and (data == HELD_OUT or all(map(is_own, data.split(",")))):
        names += ["reward", "threshold"] * (flags.reward in ("", run["reward"]))
    elif run.get("reward"):
        print(f"{shown(folder)} was trained with --reward {shown(run['reward'])}, but here "
              "math-verify grades, unless you give --reward")
    usual = {name: run[name] for name in names if run.get(name, "") != ""}
    if data and not flags.data:
        usual |= dict(data=data, limit=run["eval_questions"], k=run["eval_k"])
    if usual:
        print(f"unless a flag is given, the settings of {shown(folder)} are used: "
              f"{listed(usual)}")
    return usual


def settle(flags: Flags, machine: Machine, model: Model) -> Flags:
    """The flags, with the defaults for machine and model, so that no flag is None."""
    size = size_of(model, machine)
    data = flags.data or default_data(model.base, size == SMALL, for_training=False)
    lengths = by_size(flags.data, size)
    return replace(
        flags, data=data, out=flags.out or f"runs/{name_of(flags, data)}",
        template=flags.template or default_template(model.base, size == SMALL, flags.reward),
        sync=flags.sync or ("merge" if machine.on_cpu else "adapter"),
        **{name: getattr(flags, name) or lengths[name]
           for name in ("max_tokens", "max_prompt_tokens")})


def name_of(flags: Flags, data: str) -> str:
    """The name of the evaluation's folder."""
    models = Path(flags.model).parts[-3 if run_named(flags.model) else -1:]
    sets = [Path(part).stem for part in data.split(",")]
    parts = [*models, *Path(flags.adapter).parts[-3:], *sets, f"k{flags.k}"]
    name = "-".join(part for part in parts if part not in ("runs", "checkpoints", MERGED, "/"))
    return f"eval-{name[:150]}"


# ----------------------------------------------------------------------------------------- sampling
def evaluate(engine, grader, problems, k: int, max_tokens: int, **how) -> list[dict]:
    """k answers to every problem, in order and with rewards. `how`: see `draw_samples`."""
    samples = draw_samples(engine, grader, problems, k, max_tokens, **how)
    return with_rewards(in_order(samples, problems, k))


def draw_samples(engine, grader, problems, k, max_tokens, *, done=(), temperature=1.0, seed=""):
    """Sample k answers to every problem (see prompts.py) and grade them while the engine runs.

    Yields a row per answer (`as_row`) as soon as it is graded. `done` are rows from before an
    interruption, which are not sampled again. Each answer has a separate seed, which is made of
    `seed`, its problem and its number. So it does not depend on other answers or interruptions.
    Otherwise a resumed evaluation would keep the short answers and sample new long ones.
    """
    asked = [divmod(i, k) for i, row in enumerate(in_order(done, problems, k)) if row is None]
    for q, s in asked:
        name = f"{seed}/{problems[q].source}/{problems[q].id}/{s}"
        engine.submit((q, s), problems[q].prompt_ids, max_tokens, temperature=temperature,
                      seed=random.Random(name).getrandbits(63))
    arrived = []
    with tqdm(total=len(asked), desc="  evaluating", unit="sample", leave=False,
              disable=None) as bar:  # None: no bar without a terminal
        while engine.busy or arrived:
            due, arrived = arrived, list(engine.step()) if engine.busy else []
            for (q, s), rollout in arrived:
                require_numbers(rollout)
                style = "minerva" if problems[q].source in MEASURED else ""
                grader.submit(("eval", q, s), problems[q], rollout, style=style)
                rollout.routes = None  # only MoE models have them, and they are large
            for (q, s), rollout in due:  # one engine step later, so that grading had time
                yield as_row(problems[q], s, rollout, grader.result(("eval", q, s)))
                bar.update()


def require_numbers(rollout) -> None:
    """Raises SystemExit if the model computed no finite log-prob for a whole answer.

    Then vLLM writes token 0, which is `!` in many tokenizers, and this would be graded as wrong.
    """
    if not any(map(math.isfinite, rollout.logprobs)):
        raise SystemExit("The model computes no finite numbers, because its weights are damaged or "
                         "too large for float16 (then use a card that computes in bfloat16).")


def as_row(problem, s: int, rollout, verdict) -> dict:
    """A line of eval.jsonl. The reward is NaN if the grader failed; then `why` says how."""
    row = dict(data=problem.source, id=problem.id, sample=s, gold=problem.answer,
               reward=verdict.reward,
               status=verdict.status, finish_reason=rollout.finish_reason,
               tokens=len(rollout.token_ids), text=rollout.text) | verdict.parts
    if verdict.status in NO_VERDICT:
        row["why"] = verdict.why
    if problem.level:
        row["level"] = problem.level
    return row


def is_sample(row: dict) -> bool:
    return row.keys() >= {"data", "id", "sample", "reward", "status", "finish_reason", "tokens"}


def in_order(rows, problems, k: int) -> list[dict | None]:
    """The rows of all answers, k per question, in order; None if a row is missing."""
    drawn = {(row["data"], row["id"], row["sample"]): row for row in rows}
    return [drawn.get((problem.source, problem.id, s)) for problem in problems for s in range(k)]


def with_rewards(rows: list[dict]) -> list[dict]:
    """The rows. If the grader failed, the reward is 0, or the lowest of all if this is negative."""
    rewards = [math.nan if row["status"] in NO_VERDICT else row["reward"] for row in rows]
    return [row | dict(reward=reward) for row, reward in zip(rows, fill_missing(rewards))]


# --------------------------------------------------------------------------------------- statistics
def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k), the probability that k of n answers include one of c right ones."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"no pass@{k} from {n} answers, {c} of them right")
    # The product has a factor 0 if fewer than k are wrong.
    return 1 - math.prod((n - c - i) / (n - i) for i in range(k))


def bootstrap(sets: list, weights: list | None = None, resamples=4000, seed=0) -> dict:
    """avg: weighted mean of the means of `sets` (arrays [Q]); ci_low, ci_high: its 95 % interval.

    Questions are resampled within each set. For differences of two models on the same questions,
    this is the paired interval. With fewer than about 30 questions it is too narrow, and if all
    values are equal it is a point.
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


def means_Q(rows: list[dict], k: int) -> list[float]:
    """avg@k of each question."""
    return [sum(row["reward"] for row in rows[i:i + k]) / k for i in range(0, len(rows), k)]


def report(rows: list[dict], k: int) -> dict:
    """The results of some questions: avg (avg@k), ci_low, ci_high, pass {j: pass@j}, and more.

    avg is a mean of rewards, and reward/NAME is the mean of one of their parts. correct and pass
    count answers with the status "correct". With rewards of 0 and 1, avg and correct are equal.
    """
    right = [row["status"] == "correct" for row in rows]
    right_Q = [sum(right[i:i + k]) for i in range(0, len(rows), k)]
    js = sorted({k, *(2**i for i in range(k.bit_length()))})
    verdicts = Counter(row["status"] for row in rows)
    return bootstrap([means_Q(rows, k)]) | {
        "k": k, "questions": len(right_Q), "correct": sum(right) / len(rows),
        "pass": {j: float(np.mean([pass_at_k(k, c, j) for c in right_Q])) for j in js},
        "no_box": verdicts["no_box"] / len(rows),
        "truncated": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "verifier_failures": sum(verdicts[status] for status in NO_VERDICT) / len(rows),
        "response_length": sum(row["tokens"] for row in rows) / len(rows),
        "verdicts": dict(verdicts)} | mean_parts(rows)


def report_by_set(rows: list[dict], k: int, data: str) -> dict[str, dict]:
    """A `report` of each set that `data` names. Held-out problems of training data are one set."""
    if len(expand(data)) == 1:
        return {data: report(rows, k)}
    sets = groupby(rows, lambda row: row["data"])
    return {name: report(list(of_set), k) for name, of_set in sets}


def report_all(rows: list[dict], k: int, weights: dict[str, float]) -> dict:
    """sets: {name: report, with reports per level if known}; weighted: the mean over all sets."""
    sets, means = {}, []
    for name in weights:
        of_set = [row for row in rows if row["data"] == name]
        levels = {row["level"] for row in of_set if "level" in row}
        sets[name] = report(of_set, k) | {"levels": {
            level: report([row for row in of_set if row.get("level") == level], k)
            for level in sorted(levels, key=lambda level: (len(level), level))}}  # 2 before 10
        means.append(means_Q(of_set, k))
    return dict(sets=sets, weighted=bootstrap(means, list(weights.values())))


def compare(rows: list[dict], k: int, before_Q: list[float], weights: dict[str, float]) -> dict:
    """Name of a set -> mean change of avg@k since `before_Q`, its paired interval, counts.

    Both models have the same questions, so the difficulty cancels, and the interval is much
    narrower than the separate intervals suggest.
    """
    changes = {name: [] for name in weights}
    for row, after, before in zip(rows[::k], means_Q(rows, k), before_Q, strict=True):
        changes[row["data"]].append(after - before)
    results = {name: bootstrap([values]) for name, values in changes.items()}
    if len(results) > 1:
        results["weighted"] = bootstrap(list(changes.values()), list(weights.values()))
        changes["weighted"] = sum(changes.values(), [])
    for name, values in changes.items():
        results[name] |= dict(better=sum(value > 0 for value in values),
                            worse=sum(value < 0 for value in values), questions=len(values))
    return results


# --------------------------------------------------------------------- everything before the engine
def problems_and_protocol(flags: Flags) -> tuple[list, dict]:
    """(problems with prompts, all that scores depend on). SystemExit for a wrong model or data."""
    from parts.policy import merged_model

    model = find_model(base_of(flags.model), merged_model(flags.model))
    with in_one_sentence("eval.py"):
        machine = this_machine()
    config = settle(flags, machine, model)
    require_context(model, config.max_prompt_tokens, config.max_tokens)
    loaded = load_asked(config)
    check_readable(model.base, sum(loaded, []), refuse=False)
    tokenizer = load_tokenizer(model.path)
    sets = [add_prompts(problems, tokenizer, config.template, config.max_prompt_tokens)
            for problems in loaded]
    every = sum(sets, [])
    require_embedded(model.path, tokenizer, every)
    require_weights(model.path)
    files, run = {}, run_named(config.adapter or config.model)
    if config.adapter:  # because an adapter that was trained further is another policy
        require_folder(Path(config.adapter))  # its run may have deleted it meanwhile
        files["adapter"] = digest_of(Path(config.adapter, "adapter_model.safetensors"))
    return every, asdict(config) | dict(
        path=model.path, files=files, own_files=own_files(config), versions=versions(),
        dtype=machine.dtype, context=config.max_prompt_tokens + config.max_tokens,
        trained=count_trained(run, every) if run else 0,
        prompt=sets[0][0].prompt, prompts=digest_of_prompts(every),
        stop=stop_ids(model.path, tokenizer, config.template, config.stop),
        questions={problems[0].source: digest(problems) for problems in sets},
        weights={problems[0].source: weight or len(problems)
                 for problems, (_, weight) in zip(sets, expand(config.data))})


def load_asked(config: Flags) -> list[list]:
    """The sets of --data; `held-out` are the problems that the checkpoint's run has held out."""
    folder, most = run_named(config.adapter or config.model), config.limit or None
    run = settings(folder)
    if config.data == HELD_OUT:
        if run.get("eval_data") != HELD_OUT:
            raise SystemExit("--data held-out needs --adapter RUN or --model RUN, and this run "
                             "must have held out a share of its data: name other data.")
        return [still_held_out(folder, load_problems(run["data"], **keys_of(config)))[:most]]
    return load_sets(config.data, for_training=False, limit=most, **keys_of(config))


def adapted_policy(protocol: dict) -> tuple:
    """(base with adapter, rank). SystemExit if they do not fit or files of the run have changed."""
    from parts.policy import load_adapter

    if folder := run_named(protocol["adapter"]):
        run = settings(folder)
        files = {flag: sha for flag, sha in protocol["own_files"].items()
               if run.get(flag) == protocol[flag]}  # other flags mean another reward or template
        require_same(folder, files, "the adapter was trained with its files as they were")
    return load_adapter(protocol["path"], protocol["adapter"], protocol["dtype"])


def load_finished(folder: Path, protocol: dict, problems: list) -> list[float]:
    """avg@k of each question in another evaluation. SystemExit if they are not comparable."""
    require_folder(folder)
    other = read_json(folder / "protocol.json")
    here, there = protocol["questions"], other.get("questions", {})
    if here != there:
        raise SystemExit(f"{shown(folder)} has other questions ({listed(there)}) than this "
                         f"evaluation ({listed(here)}): use the same --data, --limit and --reward, "
                         "or compare an adapter with its base model by --base.")
    rows = in_order(read_rows(folder / "eval.jsonl", is_sample), problems, other["k"])
    if None in rows:
        raise SystemExit(f"{shown(folder)} is not finished: repeat its command to continue it.")
    free = (*FREE, "model", "adapter", "path", "files")  # the two policies may differ
    changed = [key for key in protocol if key not in free and protocol[key] != other.get(key)]
    if changed:
        print(f"warning: {shown(folder)} also differs in {', '.join(changed)}, so the difference "
              "may not be due to the model alone")
    return means_Q(with_rewards(rows), other["k"])


# ----------------------------------------------------------------------------------------- results
def show_results(summary: dict, rows: list[dict], unit: str) -> None:
    for name, one in summary["sets"].items():
        shares = ", ".join(f"{key} {one[key]:.1%}" for key in (
            "correct", "no_box", "truncated", "verifier_failures"))
        print(f"\n{shown(name)}, {counted(one['questions'], 'question')}: avg@{one['k']} "
              f"{interval(one, unit)}\n  pass@{one['k']} {one['pass'][one['k']]:.1%}, {shares}, "
              f"{one['response_length']:.0f} tokens")
        if parts := ", ".join(f"{key} {one[key]:{unit}}" for key in one if key.startswith(PART)):
            print(f"  {parts}")
    if len(summary["sets"]) > 1:
        print(f"\nweighted: {interval(summary['weighted'], unit)}")
    failed = [row for row in rows if row["status"] in NO_VERDICT]
    for row in failed[:1]:  # because they are no wrong answers
        print(f"WARNING: no verdict on {len(failed)} of {len(rows)} answers, such as answer "
              f"{row['sample']} of {shown(row['id'])}: {row['status']}, {shown(row['why'])}")


def show_comparison(changes: dict, than: str, unit: str) -> None:
    points = ", in points" * unit.endswith("%")
    print(f"\ndifference to {than}, question by question{points}:")
    for name, one in changes.items():
        print(f"  {shown(name)}: {difference(one, unit)}, {direction(one)}; "
              f"{counted(one['better'], 'question')} better, {one['worse']} worse")


# -------------------------------------------------------------------------------------- the program
def main(argv: list[str] | None = None) -> None:
    config = parse(argv)
    require_sets(config.data)  # now, because other mistakes in data show up after slow imports
    read_template(config.template or "none")
    if base_of(config.model) in TINY:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a small model is slower with more threads
    problems, protocol = problems_and_protocol(config)
    before_Q = config.against and load_finished(Path(config.against), protocol, problems)
    policy, rank = adapted_policy(protocol) if config.adapter else (None, 8)
    unit = unit_of(config.reward)
    with open_folder(Path(protocol["out"]), protocol):
        for key in ("model", "adapter", "data", "reward", "template", "prompt", "temperature",
                    "k", "max_tokens", "seed", "dtype", "versions"):
            said = "math-verify" if (key, protocol[key]) == ("reward", "") else protocol[key]
            print(f"{key:12} {shown(said, 1000)}")
        rows, *of_base = map(with_rewards, draw_missing(
            problems, protocol, policy, rank, Path(protocol["out"])))
        summary = report_all(rows, config.k, protocol["weights"])
        than, trained = shown(config.against), protocol["trained"]
        for base in of_base:
            than, before_Q = f"the base model ({shown(config.model)})", means_Q(base, config.k)
            summary["base"] = report_all(base, config.k, protocol["weights"])
            print(f"\n{than}:", end="")
            show_results(summary["base"], base, unit)
            print("\nwith the adapter:", end="")
        show_results(summary, rows, unit)
        if config.against:  # on questions of either training
            other = read_json(Path(config.against, "protocol.json"))
            trained = max(trained, other.get("trained", 0))
        if before_Q:
            changes = compare(rows, config.k, before_Q, protocol["weights"])
            show_comparison(changes, than, unit)
            *_, whole = changes.values()  # with several sets the last is their weighted mean
            summary |= dict(difference=changes, verdict=verdict(whole, than, trained))
            print(summary["verdict"])
        write_safely(Path(protocol["out"], "summary.json"), json.dumps(summary, indent=1))


def draw_missing(problems, protocol: dict, policy, rank: int, folder: Path) -> list[list[dict]]:
    """The rows of all answers, and with --base those of the model without its adapter.

    Answers that are missing in `eval.jsonl` (base model: `base.jsonl`) are sampled and appended.
    """
    from parts.engine import Engine

    k, files = protocol["k"], [folder / "eval.jsonl"]
    if protocol["base"]:
        files.append(folder / "base.jsonl")
    for file in files:
        keep_rows(file, is_sample)  # drops an incomplete line after an interruption
    done = [list(read_rows(file, is_sample)) for file in files]
    print(f"results in {shown(folder)}, which already has {counted(sum(map(len, done)), 'answer')}")
    samples = [in_order(rows, problems, k) for rows in done]
    if not any(None in rows for rows in samples):
        return samples
    with open_grader(protocol["reward"], protocol["threshold"]) as grader:
        if not protocol["reward"]:
            check_golds(problems, grader)
        engine = Engine(
            protocol["path"], max_model_len=protocol["context"], dtype=protocol["dtype"],
            max_num_seqs=protocol["engine_sequences"], memory_share=protocol["engine_memory"],
            temperature=protocol["temperature"], stop_token_ids=protocol["stop"],
            seed=protocol["seed"], lora_rank=rank, architecture=policy and policy.config,
            sync_mode=protocol["sync"] if policy else "merge")
        for file, rows in reversed([*zip(files, done)]):  # first without adapter
            if policy and file == files[0]:
                engine.sync(policy)
            for row in draw_samples(
                    engine, grader, problems, k, protocol["max_tokens"], done=rows,
                    temperature=protocol["temperature"], seed=protocol["seed"]):
                append(file, row)
    return [in_order(read_rows(file, is_sample), problems, k) for file in files]


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with quiet_end():
        try:
            main()
        except KeyboardInterrupt:
            raise SystemExit("\ninterrupted: the same command samples what is missing") from None
