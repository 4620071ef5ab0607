"""What a run says on the screen, in its logs or in a tracker: steps, evaluations, its end."""
import contextlib
import importlib
import math
import os
import signal
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from parts.config import Config
from parts.evaluation import compare, means_Q, report_by_set, say_lost
from parts.files import append, read_rows
from parts.grader import lost
from parts.metrics import PATIENCE, group_row, warn, why_broken
from parts.run_folder import saved_so_far
from parts.text import difference, interval, shown, unit_of, verdict

STOPS = (signal.SIGINT, signal.SIGTERM)


class Log:
    """Writes metrics.jsonl, groups.jsonl, eval.jsonl and answers.jsonl of a run; prints a line."""

    def __init__(self, run):
        self.run, self.config, self.folder = run, run.config, run.folder
        self.history = deque(read_rows(run.folder / "metrics.jsonl"), maxlen=PATIENCE)
        evals = list(read_rows(run.folder / "eval.jsonl"))
        self.evaluated = evals[-1]["step"] if evals else None  # before this start
        self.tracker = None
        if run.config.report_to != "none":  # trackio or wandb, which have the same functions
            self.tracker = importlib.import_module(run.config.report_to)
            self.track("init", project="minirl", name=run.config.name, config=asdict(run.config))
        self.bar = tqdm(initial=run.state["step"], total=run.config.steps, desc=run.config.name)

    def step(self, groups, metrics: dict) -> str:
        """A line for the step, one per recorded prompt. Returns why the run has to end, or ""."""
        row = self.run.state | metrics
        self.history.append(row)
        append(self.folder / "metrics.jsonl", row)
        self.track("log", numbers_of("train", row))
        most = None if self.config.log_groups == "all" else self.config.log_groups
        for group in groups[:most]:  # the batch is shuffled, so its first groups are random
            append(self.folder / "groups.jsonl",
                   group_row(row["step"], group, self.run.engine.tokenizer))
        failed = lost(metrics["verdicts"])
        self.bar.set_postfix_str(
            f"reward {metrics.get('reward_first_round', math.nan):.2f}  "
            f"samples {metrics['samples']}  no gradient {metrics['zero_signal']:.0%}"
            + (f"  no verdict {failed}" if failed else ""), refresh=False)
        self.bar.update()
        warn(row, groups)
        return why_broken(self.history, self.run.policy.loss_scale)

    def evaluation(self, rows: list[dict]) -> None:
        """A line per held-out set in eval.jsonl, and per problem in answers.jsonl."""
        config, state, k = self.config, self.run.state, self.config.eval_k
        results = report_by_set(rows, k)
        for q, problem in enumerate(self.run.held_out):
            append(self.folder / "answers.jsonl",
                   answer_row(state["step"], problem, rows[q * k:(q + 1) * k]))
        lines = {name: state | dict(data=name, temperature=config.temperature) | result
                 for name, result in results.items()}
        append(self.folder / "eval.jsonl", *lines.values())  # last, in one write: see `restore`
        for name, result in results.items():
            of_several = name if len(results) > 1 else ""
            tqdm.write(evaluation_line(of_several, result, config, state))
            self.track("log", numbers_of(f"held_out/{name}", lines[name]))

    def track(self, function: str, *args, **how) -> None:
        """Call a function of --report-to. If it fails, the run continues."""
        try:
            if self.tracker:
                getattr(self.tracker, function)(*args, **how)
        except Exception as error:  # each package raises other kinds
            tqdm.write(f"WARNING: {self.config.report_to}.{function} failed: {shown(error)}")

    def close(self) -> None:
        """Print the change in accuracy and the next commands."""
        self.bar.close()
        show_gain(self.folder, self.run.state["step"], self.config.reward)
        python = os.path.relpath(sys.executable)  # its environment may not be active
        print(f"adapter: {self.folder / 'checkpoints'}; next: "
              f"{python} explore.py {self.folder}\n"
              f"      continue it with  {python} minirl.py --name {self.config.name} "
              f"--resume --steps {max(200, 2 * self.run.state['step'])}")
        self.track("finish")


def answer_row(step: int, problem, answers: list[dict]) -> dict:
    """A held-out problem: mean reward, number of right answers, first answer."""
    first, (reward,) = answers[0], means_Q(answers, len(answers))
    return dict(
        step=step, data=problem.source, id=problem.id, level=problem.level,
        problem=problem.problem, gold=problem.answer,
        reward=reward, right=sum(row["status"] == "correct" for row in answers), k=len(answers),
        status=first["status"], text=first["text"])


def evaluation_line(name: str, result: dict, config: Config, state: dict) -> str:
    """The printed line. `name` is one of several sets. With --reward avg@k is no share."""
    where = f" on {shown(name)}" if name else ""
    above = f", {result['correct']:.1%} above the threshold" if config.reward else ""
    failed = say_lost([result])
    failed = f", WARNING: {failed}" if failed else ""
    return (f"step {state['step']:5d}   held-out avg@{config.eval_k}{where} "
            f"{interval(result, unit_of(config.reward))}{above}{failed}   "
            f"{state['samples_total']:,} samples, {state['seconds_total']:,.0f} s of training")


def numbers_of(prefix: str, row: dict) -> dict:
    """What a tracker gets of a row."""
    return {f"{prefix}/{key}": value for key, value in row.items()
            if isinstance(value, int | float)}


@contextlib.contextmanager
def timed(seconds: dict, phase: str):
    """Store the wall time of a phase in seconds["seconds_PHASE"]."""
    start = time.perf_counter()
    yield
    seconds[f"seconds_{phase}"] = time.perf_counter() - start


# ------------------------------------------------------------------------------ ended
def show_gain(folder: Path, last: int, reward: str) -> None:
    """Print the change between the first and the last evaluation, paired by problem."""
    rows = [row for row in read_rows(folder / "answers.jsonl")
            if row["step"] in (0, last) and row["reward"] is not None]  # None: no verdict
    before = {(row["data"], row["id"]): row for row in rows if row["step"] == 0}
    after = [row for row in rows if row["step"] == last and (row["data"], row["id"]) in before]
    if not after:  # there was no evaluation before step 1
        return
    sets = dict.fromkeys((row["data"] for row in after), 1.0)
    befores = [before[row["data"], row["id"]] for row in after]
    before_Q = [row["reward"] for row in befores]
    changes = compare(after, 1, before_Q, sets)  # k = 1, because a row has the mean of its answers
    what, points = ("reward", "") if reward else ("accuracy", ", in points")
    for name in sets:
        on = f" on {shown(name)}" if len(sets) > 1 else ""
        print(f"held-out {what}{on}, last evaluation minus first, question by question{points}: "
              f"{difference(changes[name], unit_of(reward))}. "
              f"{verdict(changes[name], 'before the training')}")
    show_example(befores, after)


def show_example(before: list[dict], after: list[dict]) -> None:
    """Print two stored answers to one problem, if possible one right and one wrong answer."""
    then, now = max(zip(before, after), key=lambda pair: (
        pair[0]["status"] != pair[1]["status"], abs(pair[0]["reward"] - pair[1]["reward"])))
    print(f"for example {shown(now['problem'])}")
    for when, row in (("before:", then), ("after: ", now)):
        on_one_line = row["text"].replace("\n", "  ")
        print(f"  {when} {shown(on_one_line)}  ({row['status']})")


@contextlib.contextmanager
def say_how_to_resume(flags: Config):
    """Around the whole program. If it is stopped or fails, it prints what is saved.

    Ctrl-C and SIGTERM end the program like sys.exit, so temporary folders are removed. The exit
    code tells a scheduler that the run is not finished.
    """
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as for `minirl.py &` in a script
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except BaseException as error:
        if not isinstance(getattr(error, "code", None), str):  # a sentence for the user
            print(f"\n{saved_so_far(Path('runs', flags.name))}", file=sys.stderr)
        raise
