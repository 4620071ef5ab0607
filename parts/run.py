"""A run: where model, optimizer and data come from, and how a run is logged, saved and ended.

`prepare` makes everything before the first step, and its helpers follow it in that order. The
second half sees to it that nothing is lost when a run fails. Why a resumed run is
the same run, bit by bit: docs/faults.md.
"""
import contextlib
import faulthandler
import io
import os
import random
import signal
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import torch
from tqdm import tqdm
from transformers import AutoConfig

from ada_sampler import Estimator
from parts import checkpoint, files
from parts.config import Config, small_in_one_line
from parts.data import (Problem, Stream, check_golds, digest, keys_of,
                        load_train_and_held_out, remember)
from parts.engine import Engine, seed_everything
from parts.files import quiet_end, shown
from parts.folder import claim, note_start, own_files, require_same, weights_of
from parts.grader import WorkerPool
from parts.logprobs import Row, token_logprobs
from parts.machine import (build_for_cpu, fit_in_memory, in_one_line, out_of_memory,
                           parameters_of)
from parts.metrics import group_row, recorded, watch
from parts.models import check_family, fetch_model, is_small, load_tokenizer, loading
from parts.plot import draw_run
from parts.policy import load_policy
from parts.probe import Probe, limits
from parts.prompts import add_prompts, show_prompts, stop_ids
from parts.routing_replay import choose_replay, is_supported
from parts.stop import Interrupted, Stop, timed
from parts.track import Tracker, open_tracker

LOGS = ("metrics.jsonl", "groups.jsonl", "answers.jsonl", "eval.jsonl")
EVALUATING = "evaluating"  # the folder with the samples of an unfinished evaluation
LOGGED_AS = dict(sampling="sample", update="train")  # seconds_sample, seconds_train


def fresh_state() -> dict:
    """What a checkpoint remembers besides weights and optimizer; plain JSON."""
    return dict(step=0, evaluated=-1, accuracy={}, samples_total=0, tokens_total=0,
                seconds_total=0.0)


@dataclass
class Run:
    """Everything that lives as long as the run."""

    folder: Path  # runs/NAME
    lock: IO  # an open file: no other process may write to the folder
    config: Config
    engine: Engine
    policy: torch.nn.Module  # the trainer's model: frozen base weights and a LoRA adapter
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR  # of the learning rate
    grader: WorkerPool
    held_out: list[Problem]
    stream: Stream  # the training problems, shuffled anew in each epoch
    estimator: Estimator  # the pass rates that ada-est remembers
    probe: Probe
    tracker: Tracker | None = None  # --report-to
    saved: int = 0  # the step of the newest checkpoint
    state: dict = field(default_factory=fresh_state)
    bar: tqdm | None = None
    before: bytes = b""  # a snapshot of the run before the current step

    def steps(self):
        """The steps that are still to be done, with a progress bar."""
        done, last = self.state["step"], self.config.steps
        todo = range(done + 1, last + 1)
        self.bar = tqdm(todo, initial=done, total=last, desc=self.config.name)
        return self.bar


# ------------------------------------------------------------------ before the first step
def prepare(config: Config, grader) -> Run:
    """Everything before the first step; with --resume the run is as its last checkpoint left it.

    A user's mistakes end here in a SystemExit with one sentence, mostly before the engine starts.
    """
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)  # kill -USR1 PID shows the threads
    found = before_the_engine(config, grader)  # folder, model files, problems, checkpoint
    tracker = open_tracker(found.folder, config.report_to, settings_of(config))
    engine = start_engine(config, found.path, found.tokenizer)
    policy = load_policy(
        found.path, dtype=config.dtype, rank=config.lora_rank, alpha=config.lora_alpha,
        seed=config.seed, device="cpu" if engine.on_cpu else "cuda",
        checkpointing=not engine.on_cpu)  # without it two rows of a 1.5 B model need 80 GB
    optimizer, schedule = make_optimizer(policy, config)
    probe = start_probe(config, engine, policy, found.held_out)
    run = Run(found.folder, found.lock, config, engine, policy, optimizer, schedule, grader,
              found.held_out, Stream(found.train, config.seed), Estimator(), probe, tracker)
    after_step = checkpoint.step_of(found.newest) if found.newest else 0
    note_start(found.folder, settings_of(config), after_step, found.inputs)
    remember(found.folder, found.train, found.held_out)
    resume(run, found.newest)
    return run


def before_the_engine(config: Config, grader) -> SimpleNamespace:
    """The run's folder, the model's files, the problems and the newest checkpoint."""
    folder = Path("runs", config.name)
    lock = claim(folder, config.resume) if folder.exists() else None
    path, tokenizer = find_model(config)
    train, held_out = load_data(config, tokenizer, grader)
    lock = lock or claim(folder, config.resume)  # only now: a wrong flag leaves no empty folder
    inputs = dict(problems=f"{digest(train)}, held out: {digest(held_out)}")
    inputs |= own_files(config) | weights_of(path)
    require_same(folder, inputs)
    return SimpleNamespace(
        folder=folder, lock=lock, path=path, tokenizer=tokenizer, train=train, held_out=held_out,
        inputs=inputs, newest=checkpoint.newest_sound(folder))


def find_model(config: Config):
    """(folder or hub id of the model, its tokenizer). Sets what only the model's files can tell."""
    path = fetch_model(config.model, config.max_prompt_tokens + config.max_tokens)
    architecture = AutoConfig.from_pretrained(path, trust_remote_code=False)
    check_family(architecture)
    with loading("model", path):
        parameters_of(architecture)  # a config of which no model can be made ends here
    if build_for_cpu():
        fit_in_memory(config, architecture)
    config.replay = choose_replay(config.replay, path, config.mini_batches)
    return path, load_tokenizer(path)


def load_data(config: Config, tokenizer, grader) -> tuple[list, list]:
    """(training problems, held-out problems), with prompts. The two share no problem."""
    train, held_out = load_train_and_held_out(
        config.data, config.eval_data, eval_questions=config.eval_questions, **keys_of(config))
    train, held_out = (
        add_prompts(problems, tokenizer, config.template, config.max_prompt_tokens)
        for problems in (train, held_out))
    if not config.reward:
        check_golds(held_out, grader)
        train = check_golds(train, grader, drop=True)
    if config.batch_prompts > len(train):
        print(f"data: a step takes {config.batch_prompts} prompts (--batch-prompts) of "
              f"{len(train)} to train on, so some are in it twice or more")
    show_prompts(train)
    if config.reward:
        grader.try_out(train)
    return train, held_out


def start_engine(config: Config, path: str, tokenizer) -> Engine:
    """vLLM with the model. Prints what ends a response, and what follows from the machine."""
    stops = stop_ids(tokenizer)
    print(in_one_line(config))
    if is_small(config.model):
        print(small_in_one_line(config))
    print(f"a response ends at {tokenizer.convert_ids_to_tokens(stops)}")
    # 2: the probe scores a prompt with at least one token, and vLLM adds another.
    return Engine(
        path, max_model_len=config.max_prompt_tokens + max(2, config.max_tokens),
        max_num_seqs=config.engine_sequences, temperature=config.temperature,
        dtype=rollout_dtype(config), kv_cache_dtype=config.kv_cache_dtype,
        lora_rank=config.lora_rank, sync_mode=config.sync, memory_share=config.engine_memory,
        sleep=config.sleep, stop_token_ids=stops, seed=config.seed,
        routes=is_supported(path) and (build_for_cpu() or config.replay == "r3"))


def rollout_dtype(config: Config) -> str:
    return config.dtype if config.rollout_dtype == "auto" else config.rollout_dtype


def make_optimizer(policy, config: Config):
    """AdamW on the adapter's weights, and the schedule of its learning rate.

    The rate rises linearly over the first `warmup_steps` optimizer steps, because AdamW's running
    averages are unreliable at first, and then stays constant. A decay would need to know the last
    step, which `--resume --steps` can change.
    """
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.lr, weight_decay=0.0)
    warmup = max(config.warmup_steps, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup))
    return optimizer, schedule


def start_probe(config: Config, engine: Engine, policy, held_out: list) -> Probe:
    """The probe, with texts that the engine writes now, from the base weights."""
    reseed(config.seed, "probe")
    bounds = limits(
        config.dtype, rollout_dtype(config), config.kv_cache_dtype, bool(policy.routing))
    # - 1: vLLM adds a token to a text that it scores.
    return Probe(engine, policy, held_out[:64], limits=bounds,
                 max_tokens=max(1, config.max_tokens - 1), temperature=config.temperature)


def rehearse(run: Run) -> None:
    """Run the largest micro-batch that can come, so that a lack of memory shows up now.

    Raises SystemExit, which names the flags to lower, if memory is short.
    """
    config = run.config
    context = config.max_prompt_tokens + config.max_tokens
    count = max(1, config.micro_tokens // context)
    rows = [Row([0] * context, prompt_length=1, mu=[], coefficient=1.0) for _ in range(count)]
    try:
        run.engine.sleep()
        lp_T, _ = token_logprobs(run.policy, rows, config.temperature)
        run.policy.loss_scale.scale(lp_T.mean()).backward()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise SystemExit(
            f"Out of memory for a micro-batch of {count} x {context} tokens: lower --micro-tokens "
            f"(now {config.micro_tokens}), --max-tokens or --engine-memory, or try --sleep."
        ) from None
    finally:
        run.policy.zero_grad(set_to_none=True)
        run.engine.wake()


def reseed(*parts) -> random.Random:
    """Seed every generator from (seed, step, phase), so that no phase depends on an earlier one."""
    rng = random.Random("/".join(map(str, parts)))
    seed_everything(rng)
    return rng


def settings_of(config: Config) -> dict:
    """What config.json remembers of a start: every setting but --resume."""
    return {name: value for name, value in asdict(config).items() if name != "resume"}


# ------------------------------------------------------------------ after a step
def record(step: int, groups, metrics: dict, run: Run) -> None:
    """Log a finished step and save a checkpoint if one is due. Ends a run that goes wrong."""
    config, state = run.config, run.state
    log(step, groups, metrics, run)
    if run.tracker:
        run.tracker.send()
    state["step"] = step
    why = watch(step, groups, metrics, run)
    if why:
        give_up(run, why)
    if every(config.checkpoint_every, step) or step == config.steps or Stop.requested:
        save(run)


def every(count: int, step: int) -> bool:
    """Whether this step is one of every `count`; never, if that is 0."""
    return count > 0 and step % count == 0


def log(step: int, groups, metrics: dict, run: Run) -> None:
    """One line of metrics.jsonl, and one of groups.jsonl for every prompt that is recorded."""
    for key in ("samples", "tokens", "seconds"):
        run.state[f"{key}_total"] += metrics[key]
        metrics[f"{key}_total"] = run.state[f"{key}_total"]
    files.append(run.folder / "metrics.jsonl", dict(step=step, **metrics))
    for group in recorded(groups, run.config.log_groups):
        row = group_row(step, group, run.engine.tokenizer)
        files.append(run.folder / "groups.jsonl", row)


def show(metrics: dict, run: Run) -> None:
    """Put the step's numbers beside the progress bar, and draw the curves with every checkpoint.

    (With the last checkpoint `finish` draws them.)
    """
    if run.saved == run.state["step"] < run.config.steps:
        draw_run(run.folder)
    run.bar.set_postfix_str(
        f"reward {metrics['reward_first_round']:.2f}  held-out {accuracy(run, '.2f')}  "
        f"samples {metrics['samples']}  no signal {metrics['zero_signal']:.0%}", refresh=False)


def accuracy(run: Run, unit: str) -> str:
    """avg@k of the last evaluation, of each held-out set."""
    known = run.state["accuracy"].items()
    names = {name: f"{shown(name)} " for name, _ in known} if len(known) > 1 else {}
    return ", ".join(f"{names.get(name, '')}{avg:{unit}}" for name, avg in known) or "not known yet"


def unit_of(config: Config) -> str:
    """How avg@k is printed: as a share of right answers, or with --reward as a mean."""
    return ".3g" if config.reward else ".1%"


# ------------------------------------------------------------------ nothing is lost
@contextlib.contextmanager
def phase(run: Run, name: str, seconds: dict):
    """Around the sampling, update and sync of a step, and around an evaluation: takes its time, and
    undoes a step or evaluation that breaks off.

    Its problems can then be drawn again. After a failure the run is saved as it was before the
    step, and ends with a sentence. Ctrl-C (Interrupted) is passed on.
    """
    if name in ("sampling", "evaluation"):
        run.before = snapshot(run)
    try:
        with timed(seconds, LOGGED_AS.get(name, name)):
            yield
    except Interrupted:
        put_back(run)
        raise
    except (Exception, SystemExit) as error:
        put_back(run)
        if run.state["step"]:  # a checkpoint of step 0 would hold nothing
            save(run)
        why = sentence(error, name, run).removesuffix(".")
        raise SystemExit(f"{why}; {checkpoint.saved_so_far(run.folder)}") from error


def snapshot(run: Run) -> bytes:
    """A copy, in main memory, of all that a step changes."""
    copied = io.BytesIO()
    torch.save(dict(
        cursor=run.stream.cursor, estimator=run.estimator.state_dict(),
        adapter=[p.detach() for p in run.policy.parameters() if p.requires_grad],
        others=[part.state_dict() for part in optimizer_parts(run)]), copied)
    return copied.getvalue()


def put_back(run: Run) -> None:
    """Make the run what it was when `run.before` was taken."""
    before = torch.load(io.BytesIO(run.before), weights_only=True, map_location="cpu")
    run.stream.cursor = before["cursor"]
    run.estimator.load(before["estimator"])
    weights = [p for p in run.policy.parameters() if p.requires_grad]
    for p, value in zip(weights, before["adapter"]):
        p.data.copy_(value)
    for part, state in zip(optimizer_parts(run), before["others"]):
        part.load_state_dict(state)


def optimizer_parts(run: Run) -> tuple:
    return run.optimizer, run.schedule, run.policy.loss_scale


def sentence(error: BaseException, phase: str, run: Run) -> str:
    """What has ended the phase; error.txt gets the traceback of an unexpected error."""
    if isinstance(error, SystemExit):  # such as the probe's
        return str(error)
    if out_of_memory(error):
        return (f"Out of memory in the {phase}: lower --micro-tokens (now "
                f"{run.config.micro_tokens}) or --engine-memory")
    return (f"The {phase} failed: {type(error).__name__}: {shown(error)} "
            f"(see {note_error(run.folder)})")


def note_error(folder: Path, name: str = "error.txt") -> Path:
    """Write down the traceback of the current exception."""
    files.write_safely(folder / name, traceback.format_exc())
    return folder / name


# ------------------------------------------------------------------ saved, resumed, ended
def save(run: Run) -> None:
    """Write a checkpoint of everything that decides what happens next."""
    run.state |= dict(cursor=run.stream.cursor, estimator=run.estimator.state_dict())
    checkpoint.save(run.folder, run.policy, run.optimizer, run.schedule, run.state,
                    run.config.keep_checkpoints)
    run.saved = run.state["step"]


def resume(run: Run, newest: Path | None) -> None:
    """Load the newest checkpoint, if there is one, and cut the logs back to it."""
    if newest:
        run.state |= checkpoint.restore(newest, run.policy, run.optimizer, run.schedule)
        run.stream.cursor = run.state["cursor"]
        run.estimator.load(run.state["estimator"])
        print(f"continuing after step {run.state['step']}")
    last = run.state["step"] if newest else -1
    for log in (*(run.folder / name for name in LOGS), *run.folder.glob(f"{EVALUATING}/*.jsonl")):
        files.keep_rows(log, lambda row: files.has_step(row) and row["step"] <= last)
    done = list(files.read_rows(run.folder / "eval.jsonl"))
    if done:  # an evaluation follows the checkpoint of its step, so only the log knows of it
        run.state["evaluated"] = done[-1]["step"]
    run.state["accuracy"] = {row["data"]: row["avg"] for row in done}
    run.saved = run.state["step"]


def close(run: Run) -> None:
    """Save what is not saved yet, close engine and tracker, draw the curves."""
    if run.state["step"] > run.saved:
        save(run)
    run.engine.close()
    if run.tracker:
        run.tracker.close()
    if run.state["step"]:
        draw_run(run.folder)


def give_up(run: Run, why: str) -> None:
    close(run)
    raise SystemExit(why)


def finish(run: Run) -> None:
    """Close the run and say how to go on.

    Raises SystemExit when steps are left to do; its code is that of the signal.
    """
    close(run)
    config, step = run.config, run.state["step"]
    go_on = f"{program()} --name {config.name} --resume"
    complete = step >= config.steps and run.state["evaluated"] == step
    if not complete:
        print(f"stopped after step {step}; continue with: {go_on}")
    at = run.state["evaluated"]
    of_step = f" (step {at})" if 0 <= at < step else ""
    print(f"held-out avg@{config.eval_k}: {accuracy(run, unit_of(config))}{of_step}; "
          f"curves: {run.folder / 'curves.png'}; adapter: {run.folder / 'checkpoints'}")
    if not complete:
        raise SystemExit(128 + (Stop.requested or signal.SIGTERM))  # so a scheduler sees: not done
    print(f"next: look into it with {python()} explore.py {run.folder}\n"
          f"      go on with        {go_on} --steps {max(200, 2 * step)}")


def program() -> str:
    """The command that starts a run from here."""
    return f"{python()} minirl.py"


def python() -> str:
    """`python`, or the path of this Python where its environment is not active."""
    here = Path(sys.executable).is_relative_to(Path.cwd()) and "VIRTUAL_ENV" not in os.environ
    return os.path.relpath(sys.executable) if here else "python"


@contextlib.contextmanager
def last_words(config: Config):
    """Around the whole program: a full disk ends it in a sentence that says what is saved."""
    folder = Path("runs", config.name)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a KeyboardInterrupt again
    with quiet_end():
        try:
            yield
        except KeyboardInterrupt:  # before `Stop` takes care of it
            raise SystemExit("stopped before the first step: nothing is lost") from None
        except BrokenPipeError:
            print("Nobody reads the output any more, so this program ends; "
                  f"{checkpoint.saved_so_far(folder)}", file=sys.stderr)
            raise
        except OSError as error:
            raise SystemExit(f"{shown(error)}; {checkpoint.saved_so_far(folder)}") from error
