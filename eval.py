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
"""
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from parts.run_folder import find_adapter, require_same, run_of, settings, versions
from parts.config import (Auto, Bounds, CommonFlags, Count, CountOrOff, check_numbers,
                          common_effects, given_in, in_one_sentence, parse_flags, peek, preset,
                          require_effect, size_of)
from parts.data import (HELD_OUT, check_golds, check_readable, digest, drop_overlap, expand,
                        is_own, keys_of, load_sets, load_train_and_held_out, require_sets)
from parts.evaluation import (compare, draw_samples, in_order, is_sample, means_Q, report_all,
                              with_rewards)
from parts.files import append, digest_of, keep_rows, read_json, read_rows, take, write_json
from parts.grader import NO_VERDICT, PART, require_function
from parts.machine import Machine, this_machine
from parts.models import (TINY, Model, find_model, load_tokenizer, require_context,
                          require_weights, resolve_model)
from parts.prompts import add_prompts, read_template, require_embedded, stop_ids
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
    k: Count = 32
    """answers per problem"""
    limit: CountOrOff = 0
    """use only this many problems of each set, the first ones; 0 = all"""
    temperature: Annotated[float, Bounds(0.01, 100, off=True)] = 1.0
    """sampling temperature; 0 = greedy, with --k 1"""
    seed: Annotated[int, Bounds(0, 2**32 - 1)] = 0
    """decides which answers are sampled"""

    # ---- hardware
    sync: Auto[Literal["adapter", "merge"]] = None
    """how the engine gets an adapter: as it is (default on a GPU) or merged (on a CPU)"""
    engine_memory: Annotated[float, Bounds(0.01, 0.99)] = 0.85
    """share of the GPU's memory for the engine"""
    engine_sequences: Count = 256
    """most answers that are written at the same time"""


def parse(argv: list[str] | None = None) -> Flags:
    """The flags. Unless one is given, an adapter's run decides model, prompts, lengths, data and k.

    Ends the program with code 2 and one sentence if they cannot work.
    """
    with in_one_sentence("eval.py"):
        adapter = peek(argv, "adapter") or ""
        adapter = adapter and find_adapter(adapter)
        usual = as_in_its_run(adapter, peek(argv, "data"))
        flags = parse_flags(Flags, argv, "eval.py", "avg@k and pass@k with 95 % intervals", usual)
        flags = replace(flags, adapter=adapter)
        check(flags, vars(Flags()) | usual)
    require_function(flags.reward)
    resolve_model(flags.model)  # ends here if there is no such model
    require_sets(flags.data)
    read_template(flags.template or "none")
    return flags


def check(c: Flags, usual: dict) -> None:
    """Raises ValueError, one sentence, for flags that cannot work."""
    check_numbers(c)
    columns = c.data == HELD_OUT or bool(c.data) and is_own(c.data)
    require_effect(given_in(c, usual), common_effects(c, columns) + [
        ("sync base", bool(c.adapter), "without adapter, which names a run or a PEFT folder")])
    if c.temperature == 0 and c.k > 1:
        raise ValueError("temperature 0 gives k equal samples: use --k 1, or a temperature above 0")


def as_in_its_run(adapter: str, data: str | None) -> dict:
    """The defaults of an evaluation from the run of its adapter, without --reward.

    A run's folder may come from somebody else, and nothing that it names is ever executed.
    """
    run = settings(run_of(adapter)) if adapter else {}
    if not run:
        return {}
    names = "model template max_prompt_tokens max_tokens stop temperature".split()
    usual = {name: run[name] for name in names}
    if not data:
        usual |= dict(data=run["eval_data"], columns=run["columns"], limit=run["eval_questions"],
                      k=run["eval_k"])
    if run["reward"]:
        print(f"the run was trained with --reward {shown(run['reward'])}: give it here, too, or "
              "math-verify grades")
    print(f"unless a flag is given, the settings of the run are used: {listed(usual)}")
    return usual


def settle(flags: Flags, machine: Machine, model: Model) -> Flags:
    """The flags, with the defaults for machine and model, so that no flag is None."""
    usual = preset(model, machine, flags.data)
    data = "math500" if size_of(model, machine) == "large" else usual["data"]
    data = flags.data or data
    return replace(
        flags, data=data, out=flags.out or f"runs/{name_of(flags, data)}",
        template=flags.template or ("chat" if flags.reward else usual["template"]),
        sync=flags.sync or ("merge" if machine.on_cpu else "adapter"),
        max_tokens=flags.max_tokens or usual["max_tokens"],
        max_prompt_tokens=flags.max_prompt_tokens or usual["max_prompt_tokens"])


def name_of(flags: Flags, data: str) -> str:
    """The name of the evaluation's folder."""
    sets = [Path(part).stem for part in data.split(",")]
    parts = [Path(flags.model).name, *Path(flags.adapter).parts[-3:], *sets, f"k{flags.k}"]
    name = "-".join(part for part in parts if part not in ("runs", "checkpoints", "/"))
    return f"eval-{name[:150]}"


# --------------------------------------------------------------------- everything before the engine
def problems_and_protocol(flags: Flags) -> tuple[list, dict]:
    """(problems with prompts, all that scores depend on). SystemExit for a wrong model or data."""
    with in_one_sentence("eval.py"):
        machine = this_machine()
    model = find_model(flags.model)
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
    files = {}
    if config.adapter:  # because an adapter that was trained further is another policy
        files["adapter"] = digest_of(Path(config.adapter, "adapter_model.safetensors"))
    return every, asdict(config) | dict(
        path=model.path, files=files, versions=versions(), dtype=machine.dtype,
        context=config.max_prompt_tokens + config.max_tokens, prompt=sets[0][0].prompt,
        stop=stop_ids(model.path, tokenizer, config.template, config.stop),
        questions={problems[0].source: digest(problems) for problems in sets},
        weights={problems[0].source: weight or len(problems)
                 for problems, (_, weight) in zip(sets, expand(config.data))})


def load_asked(config: Flags) -> list[list]:
    """The sets of --data; `held-out` are the problems that the adapter's run has held out."""
    folder, most = run_of(config.adapter), config.limit or None
    run = settings(folder)
    if config.data == HELD_OUT and run.get("eval_data") != HELD_OUT:
        raise SystemExit("--data held-out needs --adapter RUN of a run that has held out a share "
                         "of its data: name other data.")
    if run and (config.data == HELD_OUT or is_own(config.data)):
        train, held_out = load_train_and_held_out(
            run["data"], run["eval_data"], eval_questions=run["eval_questions"],
            columns=run["columns"], whole=bool(config.reward))
        if config.data == HELD_OUT:
            require_same(folder, dict(data=digest(train, held_out)))
            return [[replace(problem, source=HELD_OUT) for problem in held_out][:most]]
    sets = load_sets(config.data, for_training=False, limit=most, **keys_of(config))
    if run and is_own(config.data):
        trained = sum(len(problems) - len(drop_overlap(problems, train)) for problems in sets)
        print(f"the run was trained on {trained} of these {sum(map(len, sets))} problems")
    return sets


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
    config = parse(argv)
    if config.model in TINY:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a small model is slower with more threads
    problems, protocol = problems_and_protocol(config)
    folder, unit, k = Path(protocol["out"]), unit_of(config.reward), config.k
    with take(folder):
        require_same_protocol(folder / "protocol.json", protocol)
        for key in ("model", "adapter", "data", "reward", "template", "prompt", "temperature",
                    "k", "max_tokens", "seed", "dtype", "versions"):
            print(f"{key:12} {shown(protocol[key], 1000)}")
        rows, base = draw_missing(problems, protocol, folder)
        summary = report_all(rows, k, protocol["weights"])
        if base:
            summary["base"] = report_all(base, k, protocol["weights"])
            print("\nthe base model:", end="")
            show_results(summary["base"], base, unit)
            print("\nwith the adapter:", end="")
        show_results(summary, rows, unit)
        if base:
            summary["difference"] = compare(rows, k, means_Q(base, k), protocol["weights"])
            summary["verdict"] = show_comparison(summary["difference"], unit)
        write_json(folder / "summary.json", summary)


def require_same_protocol(file: Path, protocol: dict) -> None:
    """Store what the scores depend on. SystemExit if an evaluation with another is there."""
    if not file.exists() and file.with_name("eval.jsonl").exists():
        raise SystemExit(f"{shown(file.parent)} is a run: name another folder by --out.")
    stored = read_json(file) if file.exists() else protocol
    free = ("out", "base", "engine_memory", "engine_sequences")
    changed = [key for key in protocol if key not in free and protocol[key] != stored.get(key)]
    if changed:
        raise SystemExit(f"{shown(file.parent)} holds an evaluation with another "
                         f"{', '.join(changed)}: name another folder by --out.")
    write_json(file, protocol)


def draw_missing(problems, protocol: dict, folder: Path) -> tuple[list[dict], list[dict]]:
    """(rows of all answers, with --base those of the model without its adapter).

    Answers that are missing in `eval.jsonl` (base model: `base.jsonl`) are sampled and appended.
    """
    adapted, bare = folder / "eval.jsonl", folder / "base.jsonl"
    files = [bare, adapted] if protocol["base"] else [adapted]
    for file in files:
        keep_rows(file, is_sample)  # drops an incomplete line after an interruption
    done = {file: list(read_rows(file, is_sample)) for file in files}
    print(f"results in {shown(folder)}, which already has "
          f"{counted(sum(map(len, done.values())), 'answer')}")
    if any(None in in_order(rows, problems, protocol["k"]) for rows in done.values()):
        with open_grader(protocol["reward"], protocol["threshold"]) as grader:
            if not protocol["reward"]:
                check_golds(problems, grader)
            engine, policy = start(protocol)
            for file in files:
                if policy and file == adapted:  # after the base model's answers
                    engine.sync(policy)
                for row in draw_samples(
                        engine, grader, problems, protocol["k"], protocol["max_tokens"],
                        done=done[file], temperature=protocol["temperature"],
                        seed=protocol["seed"]):
                    append(file, row)
    rows = {file: with_rewards(in_order(read_rows(file, is_sample), problems, protocol["k"]))
            for file in files}
    return rows[adapted], rows.get(bare, [])


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
    with quiet_end():
        try:
            main()
        except KeyboardInterrupt:
            raise SystemExit("\ninterrupted: the same command samples what is missing") from None
