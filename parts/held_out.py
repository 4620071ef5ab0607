"""The held-out problems while a run trains: when they are asked, and what is logged of it.

An evaluation may take long, so what it draws is written down as it comes: an interruption costs
little of it, and --resume goes on where it was.
"""
import shutil

from tqdm import tqdm

from eval import evaluate, report_by_set, with_rewards
from parts import files
from parts.engine import StoppableEngine
from parts.files import shown
from parts.run import EVALUATING, Run, every, give_up, nothing_lost, unit_of
from parts.stop import timed
from parts.trouble import draws_of_evaluation, hopeless


def evaluate_if_due(run: Run) -> None:
    """avg@k on the held-out problems. Not twice for the same step.

    Raises Interrupted when a stop is wanted; --resume goes on with what was drawn until then.
    """
    config, step = run.config, run.state["step"]
    due = every(config.eval_every, step) or step == 0 or step >= config.steps
    if not due or run.state["evaluated"] == step:
        return
    with timed({}, "evaluation"), nothing_lost(run, "evaluation"):
        rows = evaluate(
            StoppableEngine(run.engine), run.grader, run.held_out, config.eval_k, config.max_tokens,
            done=left_over(run), on_rows=lambda rows: write_down(rows, run),
            temperature=config.eval_temperature, seed=f"{config.seed}/{step}",
            progress="  evaluating")
    # Clear it: a resumed run starts without this cache, and cached keys round differently.
    run.engine.clear_cache()
    rows = with_rewards(rows)
    record_answers(rows, run)
    record_evaluation(report_by_set(rows, config.eval_data), run)
    if step == 0:
        draws = draws_of_evaluation(rows, run.held_out)
        why = hopeless(run, draws, silent=len({draw.reward for draw in draws}) == 1)
        if why:
            give_up(run, why)


def left_over(run: Run) -> list[dict]:
    """What an interrupted evaluation of this step has drawn."""
    logs = (run.folder / EVALUATING).glob("*.jsonl")
    rows = [row for log in logs for row in files.read_rows(log)]
    return [row for row in rows if row["step"] == run.state["step"]]


def write_down(rows: list[dict], run: Run, name: str = "0.jsonl") -> None:
    """Write down what an evaluation has drawn so far."""
    (run.folder / EVALUATING).mkdir(parents=True, exist_ok=True)
    files.append(run.folder / EVALUATING / name,
                 *(row | dict(step=run.state["step"]) for row in rows))


def forget_drawn(run: Run) -> None:
    """The evaluation is complete, and its result in the log."""
    shutil.rmtree(run.folder / EVALUATING, ignore_errors=True)


def record_answers(rows: list[dict], run: Run) -> None:
    """A line of answers.jsonl for each held-out problem: how many are right, and the first."""
    k = run.config.eval_k
    for q, problem in enumerate(run.held_out):
        own = rows[q * k:(q + 1) * k]
        right = sum(row["status"] == "correct" for row in own)
        files.append(run.folder / "answers.jsonl", dict(
            step=run.state["step"], id=problem.id, level=problem.level, problem=problem.problem,
            gold=problem.answer, right=right, k=k, status=own[0]["status"], text=own[0]["text"]))


def record_evaluation(results: dict[str, dict], run: Run) -> None:
    """What `eval.report` says of each held-out set at this step: to eval.jsonl and the screen."""
    config, state = run.config, run.state
    totals = {key: value for key, value in state.items() if key.endswith("_total")}
    files.append(run.folder / "eval.jsonl", *(
        dict(step=state["step"], **totals, data=name, temperature=config.eval_temperature, **result)
        for name, result in results.items()))
    forget_drawn(run)
    if run.tracker:
        run.tracker.send()
    for name, result in results.items():
        tqdm.write(evaluation_line(f" on {shown(name)}" * (len(results) > 1), result, run))
    state |= dict(evaluated=state["step"],
                  accuracy={name: result["avg"] for name, result in results.items()})


def evaluation_line(where: str, result: dict, run: Run) -> str:
    """`where`: the set, if there are several. Says its temperature if it is not the training's."""
    config, state, unit = run.config, run.state, unit_of(run.config)
    if config.eval_temperature != config.temperature:
        where += (f" at temperature {config.eval_temperature:g} (training: "
                  f"{config.temperature:g})")
    above = f", {result['correct']:.1%} above the threshold" if config.reward else ""
    return (f"step {state['step']:5d}   held-out avg@{config.eval_k}{where} {result['avg']:6{unit}}"
            f" [{result['ci_low']:{unit}}, {result['ci_high']:{unit}}]{above}   "
            f"{state['samples_total']:,} samples, {state['seconds_total']:,.0f} s of training")
