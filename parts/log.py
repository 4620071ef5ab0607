"""What a run prints and logs: after a step, after an evaluation, and at its end."""
import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
from collections import deque
from pathlib import Path

from tqdm import tqdm

from parts.run_folder import saved_so_far
from parts.config import Config, settings_of
from parts.evaluation import bootstrap, report_by_set
from parts.files import append, read_rows
from parts.grader import NO_VERDICT
from parts.machine import build_for_cpu, out_of_memory
from parts.metrics import PATIENCE, group_row, watch
from parts.text import difference, direction, interval, quiet_end, shown, unit_of, verdict

STOPS = (signal.SIGINT, signal.SIGTERM)


class Log:
    """Writes metrics.jsonl, groups.jsonl, eval.jsonl and answers.jsonl of a run; prints a line."""

    def __init__(self, run):
        self.run, self.config, self.folder = run, run.config, run.folder
        self.history = deque(read_rows(run.folder / "metrics.jsonl"), maxlen=PATIENCE)
        evals = list(read_rows(run.folder / "eval.jsonl"))
        self.held_out = {row["data"]: row["avg"] for row in evals}
        self.evaluated = evals[-1]["step"] if evals else None  # the last step with an evaluation
        self.tracker = open_tracker(run.config)
        self.bar = tqdm(initial=run.state["step"], total=run.config.steps, desc=run.config.name)

    def step(self, groups, metrics: dict) -> str:
        """A line for the step, one per recorded prompt. Returns why the run has to end, or ""."""
        state, step = self.run.state, self.run.state["step"]
        for key in ("samples", "tokens", "seconds"):
            state[f"{key}_total"] += metrics[key]
        row = dict(step=step, **metrics) | totals(state)
        self.history.append(row)
        append(self.folder / "metrics.jsonl", row)
        self.track("train", row)
        most = None if self.config.log_groups == "all" else self.config.log_groups
        for group in groups[:most]:  # the batch is shuffled, so its first groups are random
            append(self.folder / "groups.jsonl",
                   group_row(step, group, self.run.engine.tokenizer))
        shares = ", ".join(f"{avg:.2f}" for avg in self.held_out.values())
        self.bar.set_postfix_str(
            f"reward {metrics['reward_first_round']:.2f}  held-out {shares}  "
            f"samples {metrics['samples']}  no gradient {metrics['zero_signal']:.0%}",
            refresh=False)
        self.bar.update()
        return watch(groups, self.history, self.run)

    def evaluation(self, rows: list[dict]) -> None:
        """A line per held-out set in eval.jsonl, and per problem in answers.jsonl."""
        config, state, k = self.config, self.run.state, self.config.eval_k
        results = report_by_set(rows, k, config.eval_data)
        for q, problem in enumerate(self.run.held_out):
            append(self.folder / "answers.jsonl",
                   answer_row(state["step"], problem, rows[q * k:(q + 1) * k], [*results]))
        lines = {name: dict(step=state["step"], **totals(state), data=name,
                            temperature=config.temperature, **result)
                 for name, result in results.items()}
        append(self.folder / "eval.jsonl", *lines.values())  # last, in one write: see `restore`
        self.evaluated = state["step"]
        for name, result in results.items():
            self.held_out[name] = result["avg"]
            where = f" on {shown(name)}" if len(results) > 1 else ""
            tqdm.write(evaluation_line(where, result, config, state))
            self.track(f"held_out/{name}" if len(results) > 1 else "held_out", lines[name])
        failed = [row for row in rows if row["status"] in NO_VERDICT]
        if failed:  # because they are no wrong answers
            tqdm.write(f"WARNING: {len(failed)} of these {len(rows)} answers got no verdict: "
                       f"{failed[0]['status']}, {shown(failed[0]['why'])}")

    def track(self, prefix: str, row: dict) -> None:
        """Send the numbers of a row to --report-to. If it fails, the run continues."""
        if not self.tracker:
            return
        numbers = {f"{prefix}/{key}": value for key, value in row.items()
                   if isinstance(value, int | float)}
        try:  # "step" is a number, too, because wandb's own step may not go back, as after a kill
            self.tracker.log(numbers)
        except Exception as error:  # each package raises other kinds
            tqdm.write(f"WARNING: {self.config.report_to} failed: {shown(error)}")

    def close(self) -> None:
        """Print the change in accuracy and the next commands."""
        self.bar.close()
        if self.tracker:
            self.tracker.finish()
        fallen = show_gain(self.folder, self.run.state["step"], self.config.reward)
        print(f"adapter: {self.folder / 'checkpoints'}; next: "
              f"{python()} explore.py {self.folder}")
        if fallen:
            print("      do not continue it, because its held-out results have clearly fallen: "
                  "start again under another --name, for example with a lower --lr than "
                  f"{self.config.lr:g}")
        else:
            print(f"      continue it with  {python()} minirl.py --name {self.config.name} "
                  f"--resume --steps {max(200, 2 * self.run.state['step'])}")


def totals(state: dict) -> dict:
    """Samples, tokens and seconds of the training so far."""
    return {key: value for key, value in state.items() if key.endswith("_total")}


def answer_row(step: int, problem, answers: list[dict], sets: list[str]) -> dict:
    """A held-out problem: mean reward, number of right answers, first answer."""
    first = answers[0]
    return dict(
        step=step, data=first["data"] if len(sets) > 1 else sets[0], id=problem.id,
        level=problem.level, problem=problem.problem, gold=problem.answer,
        reward=sum(row["reward"] for row in answers) / len(answers),
        right=sum(row["status"] == "correct" for row in answers), k=len(answers),
        status=first["status"], text=first["text"])


def evaluation_line(where: str, result: dict, config: Config, state: dict) -> str:
    """The printed line. `where` names one of several sets. With --reward avg@k is no share."""
    above = f", {result['correct']:.1%} above the threshold" if config.reward else ""
    return (f"step {state['step']:5d}   held-out avg@{config.eval_k}{where} "
            f"{interval(result, unit_of(config.reward))}{above}   "
            f"{state['samples_total']:,} samples, {state['seconds_total']:,.0f} s of training")


def open_tracker(config: Config):
    """trackio or wandb, which have the same functions init, log and finish; None if not wanted."""
    if config.report_to == "none":
        return None
    os.environ.setdefault("WANDB_RUN_ID", config.name)  # so that a resumed run goes on there
    tracker = importlib.import_module(config.report_to)
    tracker.init(project="minirl", name=config.name, config=settings_of(config), resume="allow")
    return tracker


@contextlib.contextmanager
def timed(seconds: dict, phase: str):
    """Store the wall time of a phase in seconds["seconds_PHASE"]."""
    start = time.perf_counter()
    yield
    seconds[f"seconds_{phase}"] = time.perf_counter() - start


# ------------------------------------------------------------------------------ ended
def show_gain(folder: Path, last: int, reward: str) -> bool:
    """Print the change between the first and the last evaluation, paired by problem.

    Returns whether the mean reward on a held-out set has clearly fallen (95 % interval below 0).
    """
    changes, fallen = changes_by_set(folder, last), False
    for name, values in changes.items():
        one = bootstrap([values]) | dict(questions=len(values))
        on = f" on {shown(name)}" if len(changes) > 1 else ""
        what, points = ("reward", "") if reward else ("accuracy", ", in points")
        print(f"held-out {what}{on}, last evaluation minus first, question by question{points}: "
              f"{difference(one, unit_of(reward))}. {verdict(one, 'before the training')}")
        fallen |= direction(one) == "worse"
    if not changes:
        print("whether the model has improved is not known, because answers.jsonl lacks the "
              f"evaluation before step 1 or after step {last}; {python()} eval.py --adapter "
              f"{folder} --base compares it with its base model")
    return fallen


def changes_by_set(folder: Path, last: int) -> dict[str, list[float]]:
    """Held-out set -> the change of the mean reward on each of its problems."""
    before, changes = {}, {}
    for row in read_rows(folder / "answers.jsonl"):
        problem = row["data"], row["id"]
        if row["step"] == 0:
            before[problem] = row["reward"]
        elif row["step"] == last and problem in before:
            changes.setdefault(row["data"], []).append(row["reward"] - before[problem])
    return changes


def python() -> str:
    """`python`, or the path of this Python if its environment is not active."""
    here = Path(sys.executable).is_relative_to(Path.cwd()) and "VIRTUAL_ENV" not in os.environ
    return os.path.relpath(sys.executable) if here else "python"


@contextlib.contextmanager
def say_how_to_resume(flags: Config):
    """Around the whole program. If it fails, it prints what is saved and how to continue.

    Ctrl-C and SIGTERM end the program like sys.exit, so temporary folders are removed. The exit
    code tells a scheduler that the run is not finished.
    """
    on_signal(lambda number, _: sys.exit(128 + number))
    with quiet_end():
        try:
            yield
        except (SystemExit, Exception) as error:
            on_signal(signal.SIG_IGN)  # torchrun sends SIGTERM while a process prints its error
            words, code = why_it_ended(error)
            if words:
                print(f"\n{words}; {saved_so_far(Path('runs', flags.name))}", file=sys.stderr)
            on_signal(signal.SIG_DFL)  # from here on a signal may end the program
            raise SystemExit(code) from None


def on_signal(handler) -> None:
    for number in STOPS:
        signal.signal(number, handler)


def why_it_ended(error: BaseException) -> tuple[str, object]:
    """(words for the user, exit code). For a bug the traceback is printed, too."""
    if isinstance(error, SystemExit):  # by a signal, or with a sentence for the user
        stopped = error.code in [128 + number for number in STOPS]
        return "stopped" if stopped else "", error.code
    if isinstance(error, OSError):  # a full disk, or a closed output
        return shown(error), 1
    if out_of_memory(error):
        return "Out of memory: lower --micro-tokens, then " + (
            "--engine-sequences, then --max-tokens" if build_for_cpu() else
            "--engine-memory, then --max-tokens, or try --sleep"), 1
    traceback.print_exception(error)
    return type(error).__name__, 1
