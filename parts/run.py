"""A run from its flags to its last printed line, without the steps themselves (minirl.py).

A run may be killed at any moment (folder.py). On a CPU, in float32 and with a fixed number of
threads, resuming is exact (docs/runs.md).
"""
import contextlib
import faulthandler
import importlib
import os
import random
import signal
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO

import torch
from tqdm import tqdm

from ada_sampler import Estimator
from explorer.panels import draw_run
from parts.config import Flags, Settings, settings_of
from parts.data import (Problem, Stream, check_golds, check_readable, count_trained, digest,
                        digest_of_prompts, keys_of, load_train_and_held_out, remember)
from parts.engine import Engine, seed_everything
from parts.folder import (LOGS, append, checkpoints, claim, has_step, keep_rows, read_rows, restore,
                          save, saved_so_far, similar, step_of)
from parts.grader import NO_VERDICT, ForkingGrader
from parts.logprobs import Sequence, token_logprobs
from parts.machine import build_for_cpu, out_of_memory
from parts.metrics import PATIENCE, group_row, watch
from parts.models import Model, load_tokenizer, require_weights
from parts.policy import load_policy
from parts.probe import Probe, tolerances
from parts.prompts import add_prompts, is_jinja, require_embedded, stop_ids
from parts.provenance import (base_of, note_start, own_files, read_config, require_same,
                              run_named)
from parts.routing_replay import is_supported
from parts.settle import settle_here
from parts.sources import expand
from parts.text import (FEW, counted, difference, direction, duration, interval, quiet_end, shown,
                        unit_of, verdict)


FRESH_STATE = dict(step=0, samples_total=0, tokens_total=0, seconds_total=0.0)
STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Run:
    """The objects that a run needs from its beginning to its end."""

    folder: Path  # runs/NAME
    lock: IO  # an open file, so that no other process writes to the folder
    config: Settings
    engine: Engine
    policy: torch.nn.Module  # the trainer's model: frozen base weights and a LoRA adapter
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR  # of the learning rate
    grader: ForkingGrader
    held_out: list[Problem]
    stream: Stream  # the training problems, shuffled again in each epoch
    estimator: Estimator  # the pass rates that ada-est remembers
    probe: Probe
    tracker: ModuleType | None = None  # --report-to
    state: dict = field(default_factory=FRESH_STATE.copy)  # state.json of a checkpoint
    accuracy: dict = field(default_factory=dict)  # held-out set -> avg@k of the last evaluation
    evaluated: int = -1  # the step of that evaluation
    after_step: int = 0  # the step after which this process began
    seconds_save: float = 0.0  # duration of the last checkpoint
    history: deque = field(default_factory=lambda: deque(maxlen=PATIENCE))  # last rows of metrics
    bar: tqdm | None = None

    def steps(self):
        """The remaining steps, with a progress bar."""
        done, last = self.state["step"], self.config.steps
        todo = range(done + 1, last + 1)
        self.bar = tqdm(todo, initial=done, total=last, desc=self.config.name)
        return self.bar


# ------------------------------------------------------------------ before the first step
def prepare(flags: Flags, grader) -> Run:
    """Everything before the first step. With --resume the run has the state of its last checkpoint.

    Raises SystemExit, one sentence, for mistakes of the user, mostly before the engine starts.
    """
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)  # kill -USR1 PID shows the threads
    start = before_the_engine(flags, grader)  # settings, folder, problems, checkpoint
    config, path = start.config, start.model.path
    tracker = open_tracker(start.folder, config)
    engine = start_engine(config, start.model, start.stops)
    policy = load_policy(
        path, dtype=config.dtype, rank=config.lora_rank, alpha=config.lora_alpha,
        seed=config.seed, device="cpu" if engine.on_cpu else "cuda",
        checkpointing=not engine.on_cpu)  # of activations, or 1.5 B needs 80 GB for two rows
    optimizer, schedule = make_optimizer(policy, config)
    probe = start_probe(config, engine, policy, start.held_out)
    run = Run(start.folder, start.lock, config, engine, policy, optimizer, schedule, grader,
              start.held_out, Stream(start.train, config.seed), Estimator(), probe, tracker)
    resume(run, start.newest)
    return run


def before_the_engine(flags: Flags, grader) -> SimpleNamespace:
    """Settings, folder, model files, problems and newest checkpoint of the run."""
    folder = Path("runs", flags.name)
    lock = claim(folder, flags.resume) if folder.exists() else None
    config, model = settle_here(flags)
    if config.resume and not checkpoints(folder):
        near = similar(folder, checkpoints)
        print(f"no checkpoint of {config.name}: this starts a new run with --model "
              f"{shown(config.model)}, --data {shown(config.data)} and --steps {config.steps}"
              + (f"; {shown(near)} has a similar name" if near else ""))
    tokenizer = load_tokenizer(model.path)
    stops = stop_ids(model.path, tokenizer, config.template, config.stop)
    train, held_out = load_data(config, tokenizer, grader)
    require_embedded(model.path, tokenizer, train + held_out)
    if begun := run_named(config.model):
        count_trained(begun, held_out)
    lock = lock or claim(folder, config.resume)  # now, so that a wrong flag leaves no folder
    newest = next(reversed(checkpoints(folder)), None)
    remember_inputs(folder, config, model, train, held_out, newest)
    remember(folder, train, held_out, begun)
    return SimpleNamespace(folder=folder, lock=lock, config=config, model=model,
                           tokenizer=tokenizer, stops=stops, train=train, held_out=held_out,
                           newest=newest)


def remember_inputs(folder: Path, config: Settings, model: Model, train, held_out, newest) -> None:
    """Record this start in config.json. SystemExit if data or files are not those of the run."""
    prompts = digest_of_prompts(train + held_out)
    inputs = own_files(config) | dict(data=f"{digest(train)}, held out: {digest(held_out)}")
    if is_jinja(config.template):  # it can use columns that `digest` leaves out
        inputs["data"] += f", prompts: {prompts}"
    require_same(folder, inputs)
    require_weights(model.path)
    if read_config(folder).get("inputs", {}).get("prompts", prompts) != prompts:
        print("WARNING: the prompts have changed since the run started, because the model's chat "
              "template or tokenizer has changed")
    inputs["prompts"] = prompts
    after_step = step_of(newest) if newest else 0
    if changed := note_start(folder, settings_of(config), after_step, inputs):
        print("from here on", ", ".join(
            f"--{name.replace('_', '-')} is {shown(now)} (it was {shown(before)})"
            for name, (before, now) in sorted(changed.items())))


def load_data(config: Settings, tokenizer, grader) -> tuple[list, list]:
    """(training problems, held-out problems), with prompts. The two share no problem."""
    train, held_out = load_train_and_held_out(
        config.data, config.eval_data, eval_questions=config.eval_questions, **keys_of(config))
    check_readable(base_of(config.model), train, refuse=not (config.reward or config.train_anyway))
    train, held_out = (
        add_prompts(problems, tokenizer, config.template, config.max_prompt_tokens)
        for problems in (train, held_out))
    if not config.reward:
        check_golds(held_out, grader)
        train = check_golds(train, grader, drop=True)
    if config.batch_prompts > len(train):
        print(f"data: a step takes {config.batch_prompts} prompts (--batch-prompts), but only "
              f"{len(train)} are there to train on, so a step repeats some of them")
    print(f"the first prompt, as the model sees it: {train[0].prompt!r}")
    answers = counted(config.eval_k, "answer")
    print(f"held out: {counted(len(held_out), 'problem')}, {answers} each; "
          f"avg@{config.eval_k} is their mean reward, and its 95 % interval is in brackets")
    if len(held_out) < FEW:
        print("          these are too few to see progress: name a larger set with --eval-data")
    return train, held_out


def start_engine(config: Settings, model: Model, stops: list[int]) -> Engine:
    """vLLM with the model, whose answers end at `stops`."""
    # 2, because the probe's texts have at least one answer token, and vLLM adds another.
    return Engine(
        model.path, max_model_len=config.max_prompt_tokens + max(2, config.max_tokens),
        max_num_seqs=config.engine_sequences, temperature=config.temperature,
        dtype=config.rollout_dtype, kv_cache_dtype=config.kv_cache_dtype,
        lora_rank=config.lora_rank, sync_mode=config.sync, memory_share=config.engine_memory,
        sleep=config.sleep, stop_token_ids=stops, seed=config.seed,
        routes=is_supported(model.config) and (build_for_cpu() or config.replay == "r3"),
        architecture=model.config)


def make_optimizer(policy, config: Settings):
    """AdamW on the adapter's weights, and the schedule of its learning rate.

    The rate rises linearly over `warmup_steps` optimizer steps, because AdamW's averages are
    unreliable at first. Then it is constant, because `--resume --steps` can change the last step.
    """
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.lr, weight_decay=0.0)
    warmup = max(config.warmup_steps, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup))
    return optimizer, schedule


def start_probe(config: Settings, engine: Engine, policy, held_out: list) -> Probe:
    """The probe, with texts that the engine writes now, from the base weights."""
    seed_all(config.seed, "probe")
    bounds = tolerances(
        config.dtype, config.rollout_dtype, config.kv_cache_dtype, bool(policy.routing))
    # - 1, because vLLM adds a token to a text that it scores.
    return Probe(engine, policy, held_out[:64], tolerances=bounds,
                 max_tokens=max(1, config.max_tokens - 1), temperature=config.temperature)


def try_largest_batch(run: Run) -> None:
    """Run the largest possible micro-batch, so that a lack of memory shows up now."""
    config = run.config
    context = config.max_prompt_tokens + config.max_tokens
    count = max(1, config.micro_tokens // context)
    rows = [Sequence([0] * context, prompt_length=1) for _ in range(count)]
    run.engine.sleep()
    lp_T, _ = token_logprobs(run.policy, rows, config.temperature)
    run.policy.loss_scale.scale(lp_T.mean()).backward()
    run.policy.zero_grad(set_to_none=True)
    run.engine.wake()


def seed_all(*parts) -> random.Random:
    """Seed torch and numpy from (seed, step, phase), so that no phase depends on an earlier one.

    Returns a generator for Python's own random choices.
    """
    rng = random.Random("/".join(map(str, parts)))
    seed_everything(rng)
    return rng


# ------------------------------------------------------------------ after a step
def log_and_save(step: int, groups, metrics: dict, run: Run) -> None:
    """Log a finished step, then save it. Raises SystemExit, one sentence, if the run must end."""
    state = run.state
    state["step"] = step
    for key in ("samples", "tokens", "seconds"):
        state[f"{key}_total"] += metrics[key]
    # seconds_save is of the previous checkpoint, because this step is saved after its log.
    row = dict(step=step, **metrics) | totals(state) | dict(seconds_save=run.seconds_save)
    run.history.append(row)
    log(row, groups, run)
    why = watch(groups, run)
    checkpoint(run)
    if why:
        raise SystemExit(why)
    if step == run.after_step + 1 and step < run.config.steps:
        tqdm.write(estimate(step, metrics["seconds"], run.config))


def totals(state: dict) -> dict:
    """Samples, tokens and seconds of the training so far, for the logs."""
    return {key: value for key, value in state.items() if key.endswith("_total")}


def estimate(step: int, seconds: float, config: Settings) -> str:
    """A line with the time of the remaining steps if each takes as long as this one."""
    left = config.steps - step
    others = f"{left} steps" if left > 1 else "step"
    evaluations = sum(is_evaluated(later, config) for later in range(step, config.steps + 1))
    return (f"estimated from step {step} alone: the other {others} will take about "
            f"{duration(left * seconds)}, not counting {counted(evaluations, 'evaluation')}")


def log(row: dict, groups, run: Run) -> None:
    """One line of metrics.jsonl, and one of groups.jsonl for every prompt that is recorded."""
    append(run.folder / "metrics.jsonl", row)
    track(run, "train", row["step"], row)
    most = None if run.config.log_groups == "all" else run.config.log_groups
    for group in groups[:most]:  # the batch is shuffled, so its first groups are a random choice
        append(run.folder / "groups.jsonl", group_row(row["step"], group, run.engine.tokenizer))


def checkpoint(run: Run) -> None:
    """Write a checkpoint of everything on which later steps depend."""
    start = time.perf_counter()
    run.state |= dict(cursor=run.stream.cursor, estimator=run.estimator.state_dict())
    save(run.folder, run.policy, run.optimizer, run.schedule, run.state, run.config.keep_every)
    run.seconds_save = time.perf_counter() - start


def update_bar(metrics: dict, run: Run) -> None:
    """Show the numbers of the step next to the progress bar."""
    averages = ", ".join(f"{avg:.2f}" for avg in run.accuracy.values())
    held_out = f"held-out {averages}  " if averages else ""
    run.bar.set_postfix_str(
        f"reward {metrics['reward_first_round']:.2f}  {held_out}"
        f"samples {metrics['samples']}  no gradient {metrics['zero_signal']:.0%}", refresh=False)


@contextlib.contextmanager
def timed(seconds: dict, phase: str):
    """Store the wall time of a phase in seconds["seconds_PHASE"]."""
    start = time.perf_counter()
    yield
    seconds[f"seconds_{phase}"] = time.perf_counter() - start


# ------------------------------------------------------------------ after an evaluation
def evaluation_is_due(run: Run) -> bool:
    """Whether an evaluation follows the last step and has not been made yet."""
    step = run.state["step"]
    return is_evaluated(step, run.config) and run.evaluated != step


def is_evaluated(step: int, config: Settings) -> bool:
    """Whether an evaluation follows `step`; 0 is before step 1, unless --no-eval-first."""
    if step == 0:
        return config.eval_first
    return step == config.steps or config.eval_every > 0 and step % config.eval_every == 0


def record_evaluation(rows: list[dict], results: dict[str, dict], run: Run) -> None:
    """Log an evaluation. `rows`: its answers; `results`: the `eval.report` of each held-out set."""
    step, several = run.state["step"], len(results) > 1
    record_answers(rows, [*results], run)
    for name, result in results.items():
        append(run.folder / "eval.jsonl", dict(
            step=step, **totals(run.state), data=name, temperature=run.config.temperature,
            **result))
        run.accuracy[name] = result["avg"]
        tqdm.write(evaluation_line(f" on {shown(name)}" * several, result, run))
        track(run, f"held_out/{name}" if several else "held_out", step, result)
    run.evaluated = step
    failed = [row for row in rows if row["status"] in NO_VERDICT]
    if failed:  # because they are no wrong answers
        tqdm.write(f"WARNING: {len(failed)} of these {len(rows)} answers got no verdict: "
                   f"{failed[0]['status']}, {shown(failed[0]['why'])}")
    if step:
        draw_run(run.folder)


def record_answers(rows: list[dict], sets: list[str], run: Run) -> None:
    """Write a line of answers.jsonl for each problem: mean reward, number of right answers, first
    answer. Problems that are held out of the training data are one set, whatever their sources are.
    """
    k = run.config.eval_k
    for q, problem in enumerate(run.held_out):
        answers = rows[q * k:(q + 1) * k]
        first = answers[0]
        append(run.folder / "answers.jsonl", dict(
            step=run.state["step"], data=first["data"] if len(sets) > 1 else sets[0],
            id=problem.id, level=problem.level, problem=problem.problem, gold=problem.answer,
            reward=sum(row["reward"] for row in answers) / k,
            right=sum(row["status"] == "correct" for row in answers), k=k,
            status=first["status"], text=first["text"]))


def evaluation_line(where: str, result: dict, run: Run) -> str:
    """The printed line. `where` names one of several sets. With --reward avg@k is no share."""
    config, state = run.config, run.state
    above = f", {result['correct']:.1%} above the threshold" if config.reward else ""
    return (f"step {state['step']:5d}   held-out avg@{config.eval_k}{where} "
            f"{interval(result, unit_of(config.reward))}{above}   "
            f"{state['samples_total']:,} samples, {state['seconds_total']:,.0f} s of training")


# ------------------------------------------------------------------ a tracker, if one is wanted
def open_tracker(folder: Path, config: Settings) -> ModuleType | None:
    """The package of --report-to. Both packages have the same functions init, log and finish.

    Raises SystemExit, one sentence, if it does not start.
    """
    if config.report_to == "none":
        return None
    first_start = read_config(folder)["starts"][0]["time"]
    name = f"{config.name}-{first_start}".replace(":", "")  # also if the run is resumed
    os.environ.setdefault("WANDB_RUN_ID", name)
    try:
        tracker = importlib.import_module(config.report_to)
        tracker.init(project="minirl", name=name, config=settings_of(config), resume="allow")
        if config.report_to == "wandb":  # its step may not go back, as after a kill
            tracker.define_metric("*", step_metric="step")
    except Exception as error:  # each package raises other kinds
        raise SystemExit(f"{config.report_to} did not start ({shown(error)}): install or fix it, "
                         "or leave --report-to out.") from error
    return tracker


def track(run: Run, prefix: str, step: int, row: dict) -> None:
    """Send the numbers of a log row. If the tracker fails, the run continues with a warning."""
    if not run.tracker:
        return
    numbers = {f"{prefix}/{key}": value for key, value in row.items()
               if isinstance(value, int | float) and key != "step"}
    try:
        if run.config.report_to == "wandb":
            run.tracker.log(numbers | dict(step=step))
        else:
            run.tracker.log(numbers, step=step)
    except Exception as error:
        tqdm.write(f"WARNING: step {step} did not reach {run.config.report_to} "
                   f"({type(error).__name__}: {shown(error)}); the run's own logs have it")


# ------------------------------------------------------------------ resumed
def resume(run: Run, newest: Path | None) -> None:
    """Load the newest checkpoint, if there is one, and cut the logs back to it.

    An evaluation follows the checkpoint of its step. An unfinished evaluation is repeated.
    """
    if newest is None:
        return
    run.state |= restore(newest, run.policy, run.optimizer, run.schedule)
    run.stream.cursor = run.state["cursor"]
    run.estimator.load_state_dict(run.state["estimator"])
    last = run.after_step = run.state["step"]
    done = f": all of --steps {run.config.steps} are done" * (last >= run.config.steps)
    print(f"continuing after step {last}{done}")
    evaluated = [row["step"] for row in read_rows(run.folder / "eval.jsonl")]
    finished = evaluated.count(last) == len(expand(run.config.eval_data))
    for log in LOGS:
        upto = last if finished or log in ("metrics.jsonl", "groups.jsonl") else last - 1
        keep_rows(run.folder / log, lambda row: has_step(row) and row["step"] <= upto)
    run.history.extend(read_rows(run.folder / "metrics.jsonl"))
    for row in read_rows(run.folder / "eval.jsonl"):
        run.evaluated = row["step"]
        run.accuracy[row["data"]] = row["avg"]


# ------------------------------------------------------------------ ended
def close_run(run: Run, bootstrap) -> None:
    """End the tracker, and print the change in accuracy and the next commands.

    `bootstrap` is that of eval.py, which gives the interval of a mean.
    """
    if run.tracker:
        run.tracker.finish()
    fallen = show_gain(run, bootstrap)
    print(f"curves: {run.folder / 'curves.png'}; adapter: {run.folder / 'checkpoints'}\n"
          f"next: view the run with {python()} explore.py {run.folder}")
    if fallen:
        print("      do not continue it, because its held-out results have clearly fallen: start "
              f"again under another --name, for example with a lower --lr than {run.config.lr:g}")
    else:
        print(f"      continue it with  {python()} minirl.py --name {run.config.name} --resume "
              f"--steps {max(200, 2 * run.state['step'])}")


def show_gain(run: Run, bootstrap) -> bool:
    """Print the change between the first and the last evaluation, paired by problem.

    Returns whether the mean reward on a held-out set has clearly fallen (95 % interval below 0).
    """
    changes, reward, fallen = changes_by_set(run), run.config.reward, False
    for name, values in changes.items():
        one = bootstrap([values]) | dict(questions=len(values))
        on = f" on {shown(name)}" if len(changes) > 1 else ""
        what, points = ("reward", "") if reward else ("accuracy", ", in points")
        print(f"held-out {what}{on}, last evaluation minus first, question by question{points}: "
              f"{difference(one, unit_of(reward))}. {verdict(one, 'before the training')}")
        fallen |= direction(one) == "worse"
    if not changes:
        first = any(row["step"] == 0 for row in read_rows(run.folder / "answers.jsonl"))
        lacking = f"after step {run.state['step']}" if first else "before step 1 (--no-eval-first)"
        print("whether the model has improved is not known, because "
              f"answers.jsonl has no evaluation {lacking}; "
              f"{python()} eval.py --adapter {run.folder} --base compares it with its base model")
    return fallen


def changes_by_set(run: Run) -> dict[str, list[float]]:
    """Held-out set -> the change of the mean reward on each of its problems."""
    before, changes = {}, {}
    for row in read_rows(run.folder / "answers.jsonl", {"step", "data", "id", "reward"}.issubset):
        problem = row["data"], row["id"]
        if row["reward"] is None:
            continue
        if row["step"] == 0:
            before[problem] = row["reward"]
        elif row["step"] == run.state["step"] and problem in before:
            changes.setdefault(row["data"], []).append(row["reward"] - before[problem])
    return changes


def python() -> str:
    """`python`, or the path of this Python if its environment is not active."""
    here = Path(sys.executable).is_relative_to(Path.cwd()) and "VIRTUAL_ENV" not in os.environ
    return os.path.relpath(sys.executable) if here else "python"


@contextlib.contextmanager
def say_how_to_resume(flags: Flags):
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
        return "stopped" * stopped, error.code
    if isinstance(error, OSError):  # a full disk, or a closed output
        return shown(error), 1
    if out_of_memory(error):
        return "Out of memory: lower --micro-tokens, then " + (
            "--engine-sequences, then --max-tokens" if build_for_cpu() else
            "--engine-memory, then --max-tokens, or try --sleep"), 1
    traceback.print_exception(error)
    return type(error).__name__, 1
