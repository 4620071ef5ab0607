"""Evaluation: avg@k and pass@k with 95 % intervals, on benchmarks, files or the built-in problems.

    python eval.py                                                 # the tiny model, on a CPU too
    python eval.py --model Qwen2.5-Math-1.5B --data reinforce-ada  # the Reinforce-Ada paper's table
    python eval.py --adapter runs/NAME --base                      # compares it with its base

avg@k   the mean reward of a question's k answers, averaged over questions. This measures the
        policy that is trained, not greedy decoding.
pass@k  the probability that at least one of k answers is right; unbiased (arXiv 2107.03374, Eq. 1)
95 %    a bootstrap over questions that keeps a question's answers together, since they are not
        independent. An interval from single answers would be several times too narrow.

A score says nothing without its protocol: Qwen2.5-Math-1.5B has 33 % or 62 % on MATH-500, depending
on the template (docs/after_training.md). So the protocol is printed and stored with every result,
and has digests of the files of model and adapter. The same command continues an interrupted
evaluation.

An adapter's run decides model, lengths, temperature and k, and its held-out problems are asked. The
run may come from somebody else, so no program or template that it names is opened.
"""
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from parts.config import (NO_NONE, Auto, Bounds, CommonFlags, Count, CountOrOff, check_numbers,
                          common_effects, in_one_sentence, preset, require_effect, require_named)
from parts.data import HELD_OUT, Problem, check_golds, digest, fingerprint, load_problems
from parts.evaluation import compare, draw_samples, in_order, means_Q, report_all, say_lost
from parts.files import append, keep_rows, read_json, read_rows, take, write_json
from parts.grader import NO_VERDICT, PART, require_function
from parts.machine import Machine, this_machine
from parts.models import TINY, Model, digest_of_model, find_model
from parts.prompts import add_prompts, read_template, stop_ids
from parts.run_folder import (digests_of_files, find_adapter, require_same, run_of, settings,
                              versions)
from parts.text import (counted, difference, direction, interval, listed, prepare_streams, shown,
                        unit_of, verdict)
from rewards import open_grader


# ----------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class Flags(CommonFlags):
    """Every flag of `python eval.py`: CommonFlags and these.

    Results are comparable only if template, lengths, stop, k, limit, temperature and problems are
    equal.
    """

    # ---- which policy is evaluated
    adapter: str = ""
    """LoRA adapter: a PEFT folder, or a run (its last checkpoint)"""
    base: bool = False
    """with --adapter: also evaluate the model without the adapter, for comparison"""
    out: Auto[str] = None
    """folder of this evaluation; default: runs/eval-MODEL-DATA-kK"""

    # ---- the answers
    threshold: Annotated[float, Bounds(-1e9, 1e9)] = 0.7
    """with --reward: an answer with a reward above this number is right in pass@k"""
    k: Count[int] = 32
    """answers per problem"""
    limit: CountOrOff[int] = 0
    """use only this many problems of each set, the first ones; 0 = all"""
    temperature: Annotated[float, Bounds(0, 100)] = 1.0
    """sampling temperature; 0 = greedy, with --k 1"""
    engine_memory: Annotated[float, Bounds(0.01, 0.99)] = 0.85
    """share of the GPU's memory for the engine"""


def parse(argv: list[str] | None = None) -> Flags:
    """The flags, with those of the adapter's run as defaults.

    Ends the program with code 2 and one sentence if they cannot work.
    """
    with in_one_sentence("eval.py"):
        given = tyro.cli(Flags, args=argv, prog="eval.py", config=NO_NONE,
                         description="avg@k and pass@k with 95 % intervals")
        adapter = find_adapter(given.adapter) if given.adapter else ""
        usual = as_in_its_run(adapter, given)
        flags = tyro.cli(Flags, args=argv, default=Flags(**usual), config=NO_NONE)
        flags = replace(flags, adapter=adapter)  # of a run its last checkpoint
        check(flags)
    require_function(flags.reward)
    read_template(flags.template or "none")
    return flags


def check(c: Flags) -> None:
    """Raises ValueError, one sentence, for flags that cannot work."""
    check_numbers(c)
    require_effect(c, vars(Flags()), common_effects(c, c.data) + [
        ("sync base", bool(c.adapter), "without adapter, which names a run or a PEFT folder")])
    if 0 < c.temperature < 0.01:
        raise ValueError("vLLM takes a temperature below 0.01 for 0.01: use 0, or at least 0.01")
    if c.temperature == 0 and c.k > 1:
        raise ValueError("temperature 0 gives k equal samples: use --k 1, or a temperature above 0")


def as_in_its_run(adapter: str, given: Flags) -> dict:
    """The defaults of an evaluation from the run of its adapter: only names and numbers."""
    run = settings(run_of(adapter))
    if not run:
        return {}
    require_named(run, given)
    names = "model template max_prompt_tokens max_tokens stop temperature".split()
    usual = {name: run[name] for name in names}
    if not given.data:
        usual |= dict(data=HELD_OUT, k=run["eval_k"])
    print(f"unless a flag is given, model and settings are those of the run: {listed(usual)}")
    return usual


def settle(flags: Flags, machine: Machine, model: Model) -> Flags:
    """The flags, with the defaults for machine and model, so that no flag is None."""
    usual = preset(model, machine, flags)
    usual |= dict(data=usual["eval_data"], sync="merge" if machine.on_cpu else "adapter")
    unset = [name for name, value in vars(flags).items() if value is None and name != "out"]
    config = replace(flags, **{name: usual[name] for name in unset})
    return replace(config, out=config.out or f"runs/{name_of(config)}")


def name_of(config: Flags) -> str:
    """The name of the evaluation's folder."""
    sets = [Path(part).stem for part in config.data.split(",")]
    parts = [Path(config.model).name, *Path(config.adapter).parts[-3:], *sets, f"k{config.k}"]
    name = "-".join(part for part in parts if part not in ("runs", "checkpoints", "/"))
    return f"eval-{name}"


# ----------------------------------------------------------------------------- what is evaluated
def problems_and_protocol(flags: Flags) -> tuple[list[Problem], dict]:
    """(problems with prompts, all that scores depend on). SystemExit for a wrong model or data."""
    with in_one_sentence("eval.py"):
        machine = this_machine()
    model = find_model(flags.model)
    config = settle(flags, machine, model)
    run, contents = run_of(config.adapter), dict(model=model.digest)
    if run:
        require_same(run, contents)
    if config.adapter:
        contents["adapter"] = digest_of_model(config.adapter)
    problems = add_prompts(
        load_asked(config, run), model, config.template, config.max_prompt_tokens)
    sets = by_set(problems)
    return problems, asdict(config) | dict(
        path=model.path, contents=contents | digests_of_files(asdict(config)), versions=versions(),
        dtype=machine.dtype, context=config.max_prompt_tokens + config.max_tokens,
        stop=stop_ids(model, config.template, config.stop),
        prompt=problems[0].prompt, questions={name: digest(sets[name]) for name in sets},
        weights={name: len(of_set) for name, of_set in sets.items()})


def load_asked(config: Flags, run: Path | None) -> list[Problem]:
    """The problems of --data. `held-out` are those that the adapter's run has held out."""
    most, stored = config.limit or None, read_json(run / "problems.json") if run else {}
    if not run or config.data != HELD_OUT:
        problems = load_problems(config.data, for_training=False, limit=most,
                                 columns=config.columns, whole=bool(config.reward))
        if run:
            trained = {*stored["trained"]}
            count = sum(fingerprint(problem)[:16] in trained for problem in problems)
            print(f"the run was trained on {count} of these {len(problems)} problems")
        return problems
    problems = [Problem(**row) for row in stored["held_out"]]
    if config.reward and not all(problem.row for problem in problems):
        raise SystemExit(f"{shown(run)} was trained without --reward, so it did not keep the "
                         "columns of its held-out problems: name other data.")
    return [problem for of_set in by_set(problems).values() for problem in of_set[:most]]


def by_set(problems: list[Problem]) -> dict[str, list[Problem]]:
    names = dict.fromkeys(problem.source for problem in problems)
    return {name: [one for one in problems if one.source == name] for name in names}


# ----------------------------------------------------------------------------------------- results
def show_results(title: str, rows: list[dict], protocol: dict) -> dict:
    """Prints and returns the summary of one policy's answers."""
    unit, k = unit_of(protocol["reward"]), protocol["k"]
    summary = report_all(rows, k, protocol["weights"])
    print(f"\n{title}")
    for name, one in summary["sets"].items():
        shares = ", ".join(f"{key} {one[key]:.1%}" for key in (
            "correct", "no_box", "truncated", "verifier_failures"))
        print(f"{shown(name)}, {counted(one['questions'], 'question')}: avg@{k} "
              f"{interval(one, unit)}\n  pass@{k} {one['pass'][k]:.1%}, {shares}, "
              f"{one['response_length']:.0f} tokens")
        if parts := ", ".join(f"{key} {one[key]:{unit}}" for key in one if key.startswith(PART)):
            print(f"  {parts}")
    if len(summary["sets"]) > 1:
        print(f"weighted: {interval(summary['weighted'], unit)}")
    for row in [row for row in rows if row["status"] in NO_VERDICT][:1]:
        print(f"WARNING: {say_lost(summary['sets'].values())}, such as answer {row['sample']} of "
              f"{shown(row['id'])}: {row['status']}, {shown(row['why'])}")
    return summary


def show_comparison(changes: dict, unit: str) -> str:
    """Prints the paired differences to the base model. Returns the verdict in words."""
    points = ", in points" if unit.endswith("%") else ""
    print(f"\ndifference to the base model, question by question{points}:")
    for name, one in changes.items():
        print(f"  {shown(name)}: {difference(one, unit)}, {direction(one)}; "
              f"{counted(one['better'], 'question')} better, {one['worse']} worse")
    *_, whole = changes.values()  # with several sets the last is their weighted mean
    said = verdict(whole, "the base model")
    print(said)
    return said


# -------------------------------------------------------------------------------------- the program
def main(argv: list[str] | None = None) -> None:
    flags = parse(argv)
    if flags.model in TINY:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a small model is slower with more threads
    problems, protocol = problems_and_protocol(flags)
    folder, k = Path(protocol["out"]), flags.k
    with take(folder, "protocol.json", "--out"):
        require_same_protocol(folder / "protocol.json", protocol)
        sample_missing(problems, protocol, folder)
        rows = stored(folder / "eval.jsonl", problems, k)
        if flags.base:
            of_base = stored(folder / "base.jsonl", problems, k)
            base = show_results("the base model", of_base, protocol)
        summary = show_results("with the adapter" if flags.adapter else "results", rows, protocol)
        if flags.base:
            changes = compare(rows, k, means_Q(of_base, k), protocol["weights"])
            said = show_comparison(changes, unit_of(flags.reward))
            summary |= dict(base=base, difference=changes, verdict=said)
        write_json(folder / "summary.json", summary)
        print(f"all of it is in {shown(folder)}")


def require_same_protocol(file: Path, protocol: dict) -> None:
    """Store what the scores depend on. SystemExit if an evaluation with another is there."""
    stored = read_json(file) if file.exists() else protocol
    free = ("out", "base", "engine_memory", "engine_sequences")
    changed = [key for key in protocol if key not in free and protocol[key] != stored.get(key)]
    if changed:
        raise SystemExit(f"{shown(file.parent)} holds an evaluation that differs in "
                         f"{', '.join(changed)}: name another folder by --out.")
    write_json(file, protocol)
    for key in ("model", "adapter", "contents", "data", "reward", "template", "prompt",
                "temperature", "k", "max_tokens", "seed", "dtype", "versions"):
        print(f"{key:12} {shown(protocol[key], 1000)}")


def sample_missing(problems, protocol: dict, folder: Path) -> None:
    """Append missing answers to eval.jsonl, and with --base those of the base to base.jsonl."""
    base, adapted = folder / "base.jsonl", folder / "eval.jsonl"
    files = [base, adapted] if protocol["base"] else [adapted]
    for file in files:
        keep_rows(file)  # an interruption may have cut the last line
    if not any(None in stored(file, problems, protocol["k"]) for file in files):
        return
    how = {name: protocol[name] for name in ("k", "max_tokens", "seed")}
    with open_grader(protocol["reward"], protocol["threshold"]) as grader:
        if not protocol["reward"]:
            check_golds(problems, grader)
        engine, policy = start(protocol)
        for file in files:
            if policy and file == adapted:
                engine.sync(policy)
            done = read_rows(file)
            for row in draw_samples(engine, grader, problems, done=done, **how):
                append(file, row)


def stored(file: Path, problems, k: int) -> list[dict | None]:
    """The rows of all answers in a file, in order; None for those that are missing."""
    return in_order(read_rows(file), problems, k)


def start(protocol: dict) -> tuple:
    """(engine with the base weights, PEFT model with the adapter or None)."""
    from parts.engine import Engine
    from parts.policy import load_adapter

    policy, rank = None, 8
    if protocol["adapter"]:
        policy, rank = load_adapter(protocol["path"], protocol["adapter"], protocol["dtype"])
    return Engine(
        protocol["path"], max_model_len=protocol["context"], dtype=protocol["dtype"],
        max_num_seqs=protocol["engine_sequences"], memory_share=protocol["engine_memory"],
        temperature=protocol["temperature"], stop_token_ids=protocol["stop"],
        seed=protocol["seed"], lora_rank=rank, architecture=policy and policy.config,
        sync_mode=protocol["sync"] if policy else "merge"), policy


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    prepare_streams()
    main()
