"""The held-out problems while a run trains: when they are asked, and what is logged of it.

Samples are written to `evaluating/` as they are drawn, so an interruption costs little of a long
evaluation: --resume draws the rest.
"""
import shutil
from pathlib import Path

from tqdm import tqdm

from eval import evaluate, report_by_set, with_rewards
from parts import files
from parts.files import shown
from parts.run import EVALUATING, Run, every, phase, unit_of


def evaluate_if_due(run: Run) -> None:
    """avg@k on the held-out problems: before step 1, every --eval-every steps, after the last one.

    Raises Interrupted when a stop is wanted.
    """
    config, step = run.config, run.state["step"]
    due = every(config.eval_every, step) or step == 0 or step >= config.steps
    if not due or run.state["evaluated"] == step:
        return
    with phase(run, "evaluation", {}):
        rows = evaluate(
            run.engine, run.grader, run.held_out, config.eval_k, config.max_tokens,
            done=left_over(run), on_rows=lambda rows: write_down(rows, run),
            temperature=config.temperature, seed=f"{config.seed}/{step}",
            progress="  evaluating")
    # A resumed run starts without this cache, and keys from a cache round differently.
    run.engine.clear_cache()
    rows = with_rewards(rows)
    record_answers(rows, run)
    record_evaluation(report_by_set(rows, config.eval_data), run)
    if step >= config.steps:
        show_change(run.folder / "answers.jsonl")


# ------------------------------------------------------------------------------ interrupted
def left_over(run: Run) -> list[dict]:
    """The samples that an interrupted evaluation of this step has drawn."""
    logs = (run.folder / EVALUATING).glob("*.jsonl")
    rows = [row for log in logs for row in files.read_rows(log)]
    return [row for row in rows if row["step"] == run.state["step"]]


def write_down(rows: list[dict], run: Run, name: str = "0.jsonl") -> None:
    """Keep what an evaluation has drawn so far."""
    (run.folder / EVALUATING).mkdir(parents=True, exist_ok=True)
    files.append(run.folder / EVALUATING / name,
                 *(row | dict(step=run.state["step"]) for row in rows))


def forget_drawn(run: Run) -> None:
    """The evaluation is complete and logged: its samples are no longer needed."""
    shutil.rmtree(run.folder / EVALUATING, ignore_errors=True)


# ------------------------------------------------------------------------------ logged
def record_answers(rows: list[dict], run: Run) -> None:
    """A line of answers.jsonl for each problem: how many answers are right, and the first one."""
    k = run.config.eval_k
    for q, problem in enumerate(run.held_out):
        own = rows[q * k:(q + 1) * k]
        right = sum(row["status"] == "correct" for row in own)
        files.append(run.folder / "answers.jsonl", dict(
            step=run.state["step"], id=problem.id, level=problem.level, problem=problem.problem,
            gold=problem.answer, right=right, k=k, status=own[0]["status"], text=own[0]["text"]))


def record_evaluation(results: dict[str, dict], run: Run) -> None:
    """Log the `eval.report` of each held-out set: a line of eval.jsonl and one on the screen."""
    config, state = run.config, run.state
    totals = {key: value for key, value in state.items() if key.endswith("_total")}
    files.append(run.folder / "eval.jsonl", *(
        dict(step=state["step"], **totals, data=name, temperature=config.temperature, **result)
        for name, result in results.items()))
    forget_drawn(run)
    if run.tracker:
        run.tracker.send()
    for name, result in results.items():
        tqdm.write(evaluation_line(f" on {shown(name)}" * (len(results) > 1), result, run))
    state |= dict(evaluated=state["step"],
                  accuracy={name: result["avg"] for name, result in results.items()})


def evaluation_line(where: str, result: dict, run: Run) -> str:
    """`where` names the set, if there are several."""
    config, state, unit = run.config, run.state, unit_of(run.config)
    above = f", {result['correct']:.1%} above the threshold" if config.reward else ""
    return (f"step {state['step']:5d}   held-out avg@{config.eval_k}{where} {result['avg']:6{unit}}"
            f" [{result['ci_low']:{unit}}, {result['ci_high']:{unit}}]{above}   "
            f"{state['samples_total']:,} samples, {state['seconds_total']:,.0f} s of training")


def show_change(answers: Path, problems: int = 3) -> None:
    """Print what the training has changed: the first evaluation against the last one.

    Prints the share of right answers by level, and some problems whose first answer was mended.
    """
    by_step = {}
    for row in files.read_rows(answers):
        by_step.setdefault(row["step"], {})[row["id"]] = row
    if len(by_step) < 2:
        return
    first, last = min(by_step), max(by_step)
    before, after = by_step[first], by_step[last]
    levels = dict.fromkeys(row["level"] for row in after.values())
    if 1 < len(levels) <= 20:
        tqdm.write(f"right answers by level of difficulty, at step {first} and at step {last}:")
        for level in levels:
            rates = share_right(before, level), share_right(after, level)
            tqdm.write(f"  {level:24} {rates[0]:4.0%}  {rates[1]:4.0%}")
    mended = [name for name in before.keys() & after.keys()
              if before[name]["status"] != "correct" == after[name]["status"]]
    mended.sort(key=lambda name: (before[name]["right"] - after[name]["right"], name))
    for name in mended[:problems]:
        tqdm.write(f"{shown(before[name]['problem'], 300)}\n"
                   f"  before: {in_lines(before[name]['text'])}\n"
                   f"  after:  {in_lines(after[name]['text'])}")


def in_lines(text: str, longest: int = 300) -> str:
    """An answer as a reader would read it, indented below the label."""
    cut = "..." if len(text) > longest else ""
    return "\n          ".join(map(shown, text[:longest].splitlines())) + cut


def share_right(rows: dict, level: str) -> float:
    own = [row for row in rows.values() if row["level"] == level]
    return sum(row["right"] for row in own) / max(1, sum(row["k"] for row in own))
