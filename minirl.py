"""MiniRL with Reinforce-Ada sampling. A language model learns mathematics by trial and error.

    python minirl.py                              # trains the built-in tiny model, on a CPU
    python minirl.py --model Qwen2.5-Math-1.5B    # trains a model of 1.5 B parameters, on one GPU

The differences from PPO, from GRPO or from both, and the reasons:

 1. There is no critic. The baseline is a mean of rewards, because an answer is judged at its end.
 2. The number of answers per prompt is not fixed. A prompt is sampled in up to N rounds, until it
    has right and wrong answers (ada_sampler.py), because equal rewards give no gradient.
 3. The baseline is the mean of all sampled answers to the prompt, not of the n that are kept for
    the update. Half of the kept are right wherever possible, so their mean says nothing.
 4. The advantage is not divided by std, because a single right answer among 512 would get 22.6.
 5. The loss sums over tokens and divides by a constant. If it divided by the length of each answer,
    a right answer would count more the shorter it is, and a wrong one less the longer it is.
 6. The importance weight is pi_theta/mu (Eq. 5, 7), without gradient and at most 5. PPO divides by
    pi_old, but the vLLM engine, which sampled, gives other probabilities with the same weights.
 7. A mask replaces PPO's min. It is 0 for tokens whose pi_theta/pi_old has moved too far (Eq. 7).
    PPO's min masks the same tokens, but its weight is pi_theta/pi_old, which does not contain mu.
 8. By default each batch gives one optimizer step. Then pi_theta is pi_old, no token is masked, and
    in float32 the weight is 1, so the update is REINFORCE with a baseline.
 9. There is no KL penalty, reference model or entropy bonus (1e-4 in one paper, but 0 in its code).
10. In a mixture-of-experts (MoE) model the trainer can repeat the engine's choice of experts,
    because a small difference would send a token through other weights (parts/routing_replay.py).

Three policies matter, and small projects often confuse them:
    mu         the vLLM engine: the distribution from which the tokens were sampled
    pi_old     the trainer with the same weights; it differs from mu by kernels and precision only
    pi_theta   the trainer with its present weights

`policy` is the trainer's model: frozen weights with a LoRA adapter (parts/policy.py). A tensor with
the suffix _T has one entry per answer token of a row or micro-batch, without padding. Read first
course/first_evening.py and course/second_evening.py. Papers: arXiv 2510.04996 and 2512.01374.
"""
import contextlib
import math
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path

if __name__ == "__main__":
    from parts.config import parse_before_torch

    # before the import of torch, which takes 6 s, so that --help and a wrong flag end at once
    FLAGS = parse_before_torch()

import torch

from ada_sampler import Estimator, collect, set_advantages
from explorer.panels import draw_run
from parts.config import Config, settle
from parts.data import Problem, Stream, load_data
from parts.engine import Engine, EngineForSampler, seed_all, start_engine
from parts.evaluation import evaluate
from parts.grader import ForkingGrader
from parts.log import Log, say_how_to_resume, timed
from parts.logprobs import (Sequence, gvm_grad_norms, micro_batches, split_by_row,
                            token_logprobs, try_largest_batch)
from parts.machine import memory_gb
from parts.metrics import diagnostics, mean_surprisal, summarize
from parts.policy import load_policy, make_optimizer
from parts.probe import Probe, start_probe
from parts.prompts import stop_ids
from parts.routing_replay import note_routes, replaying, require_routes
from parts.run_folder import claim, note_start, restore, save
from rewards import open_grader


# ------------------------------------------------------------------------------ the program
def main(flags: Config) -> None:
    folder = Path("runs", flags.name)
    with claim(folder, flags.resume), open_grader(flags.reward, flags.threshold) as grader:
        run = set_up(folder, flags, grader)
        log = Log(run)
        evaluate_if_due(run, log)  # before the first step, or what a kill has interrupted
        for step in range(run.state["step"] + 1, run.config.steps + 1):
            run.state["step"] = step
            groups, metrics = train_step(step, run)
            broken = log.step(groups, metrics)
            save(run, run.config.keep_every)
            if broken:
                raise SystemExit(broken)
            evaluate_if_due(run, log)
        log.close()  # prints the change in accuracy


@dataclass
class Run:
    """What the steps of a run need."""

    folder: Path  # runs/NAME
    config: Config
    engine: Engine  # vLLM: mu
    policy: torch.nn.Module  # PyTorch: pi_theta, frozen base weights and a LoRA adapter
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR  # of the learning rate
    probe: Probe  # do engine and policy have the same weights?
    grader: ForkingGrader  # Grader (rewards.py), or OwnReward (parts/grader.py)
    held_out: list[Problem]
    stream: Stream  # the training problems, shuffled again in each epoch
    estimator: Estimator = field(default_factory=Estimator)  # the pass rates of ada-est
    state: dict = field(default_factory=lambda: dict(
        step=0, samples_total=0, tokens_total=0, seconds_total=0.0))


def set_up(folder: Path, flags: Config, grader) -> Run:
    """Everything before the first step. With --resume in the state of the last checkpoint."""
    config, model = settle(flags)  # `model`: a record of its files, no network
    train, held_out = load_data(config, model, grader)  # with prompts; no overlap
    stops = stop_ids(model, config.template, config.stop)  # the tokens that end an answer
    note_start(folder, asdict(config), train, held_out,
               model=model.digest, end_tokens=stops)  # config.json, problems.json

    engine = start_engine(config, model, stops)
    policy = load_policy(
        model.path, dtype=config.dtype, rank=config.lora_rank, alpha=config.lora_alpha,
        seed=config.seed, device="cpu" if engine.on_cpu else "cuda",
        checkpointing=not engine.on_cpu)  # of activations, or 1.5 B needs 80 GB for two rows
    optimizer, schedule = make_optimizer(policy, config)
    probe = start_probe(config, engine, policy, held_out)  # now, while B is 0

    run = Run(folder, config, engine, policy, optimizer, schedule, probe, grader, held_out,
              Stream(train, config.seed))
    restore(run)  # if there is a checkpoint to continue from
    try_largest_batch(run)  # so that a lack of memory shows up now, not in an hour
    sync(run)
    return run


# ------------------------------------------------------------------------------ one step
def train_step(step: int, run: Run) -> tuple[list, dict]:
    """Sample, set advantages, update, sync. Returns the step's groups and metrics."""
    config, policy, seconds = run.config, run.policy, {}
    rng = seed_all(config.seed, step, "training")  # seeds torch and numpy, and with them vLLM
    with timed(seconds, "sample"):  # sets seconds["seconds_sample"]
        groups = sample(run)
        for group in groups:
            # Keeps n answers. Their advantage is the reward minus the mean of the whole pool.
            set_advantages(group, config)
    with timed(seconds, "train"):  # with --sleep the engine frees its GPU memory
        run.engine.sleep()
        mini_batches = split_into_mini_batches(groups, config, rng)
        if config.mini_batches > 1:  # with one, pi_old is pi_theta
            for rows in mini_batches:
                add_old_logprobs(policy, rows, config)
        lr = run.optimizer.param_groups[0]["lr"]  # before the schedule changes it
        losses, grad_norms = [], []
        for rows in mini_batches:
            losses.append(accumulate(policy, rows, config))  # minus Eq. 7, and its gradient
            grad_norms.append(optimizer_step(policy, run.optimizer, run.schedule, config))
        run.engine.wake()
    with timed(seconds, "sync"):
        probed = sync(run)
    skipped = sum(not math.isfinite(grad_norm) for grad_norm in grad_norms)
    metrics = summarize(groups) | probed | seconds | dict(
        optimizer_steps=len(grad_norms) - skipped, skipped_steps=skipped,
        entropy=mean_surprisal(groups), seconds=sum(seconds.values()),
        memory_gb=memory_gb())
    if mini_batches:  # else no prompt had a gradient
        metrics |= diagnostics([row for rows in mini_batches for row in rows], config) | dict(
            lr=lr, loss=sum(losses) / len(losses), grad_norm=sum(grad_norms) / len(grad_norms))
    for key in ("samples", "tokens", "seconds"):
        run.state[f"{key}_total"] += metrics[key]
    return groups, metrics


def sample(run: Run) -> list:
    """One group per prompt. Its pool has all answers that were sampled for it, with rewards."""
    config, stream = run.config, run.stream
    engine = EngineForSampler(run.engine, config.max_tokens)
    with contextlib.closing(engine.bar):
        groups = collect(
            stream.take(config.batch_prompts), config, engine, run.grader,
            estimator=run.estimator,  # ada-est: the pass rates of earlier epochs
            more=stream.next,  # dapo: a prompt instead of one without gradient
            # gvm: the mean gradient norm of each prompt's right answers
            grad_norms=lambda groups: gvm_grad_norms(run, groups))
    if run.engine.routes:  # MoE only
        require_routes(run.policy, groups)
    return groups


def sync(run: Run) -> dict:
    """Give the engine the weights. Returns what the probe (parts/probe.py) measures."""
    run.engine.sync(run.policy)  # this also empties its prefix cache
    return run.probe.check()


def evaluate_if_due(run: Run, log: Log) -> None:
    """avg@k on the held-out problems, which `drop_overlap` (parts/data.py) keeps from training."""
    config, step = run.config, run.state["step"]
    regular = config.eval_every and step % config.eval_every == 0
    due = config.eval_first if step == 0 else regular or step == config.steps
    if not due or log.evaluated == step:
        return
    rows = evaluate(
        run.engine, run.grader, run.held_out, config.eval_k, config.max_tokens,
        seed=f"{config.seed}/{step}")
    run.engine.clear_cache()  # or a resumed run, whose cache is empty, would round differently
    log.evaluation(rows)
    draw_run(run.folder)  # curves.png; if this fails, it prints a line


# ------------------------------------------------------------------------------ the update
@dataclass(kw_only=True)
class Row(Sequence):
    """A kept answer: `ids`, `prompt_length`, `length` (T) of Sequence, and the update's numbers."""

    mu_logprobs: list[float]  # [T] in nats, the engine's
    coefficient: float  # advantage times row weight: the factor of grad log pi
    norm: float = 1.0  # the factor of its tokens in the loss: see `set_norms`
    mini_batch: int = 0  # the optimizer step in which it is trained
    old_logprobs: torch.Tensor | None = None  # [T], log pi_old
    theta_logprobs: torch.Tensor | None = None  # [T], log pi_theta
    mask: torch.Tensor | None = None  # [T]
    weight: torch.Tensor | None = None  # [T]
    entropy: torch.Tensor | None = None  # [T] in nats, of pi_theta at each token
    # MoE only: the engine's experts, those that the trainer has to use, and did pi_old agree?
    routes: torch.Tensor | None = None  # [len(ids) - 1, layers, k]
    replay: torch.Tensor | None = None  # [len(ids) - 1, layers, k]
    agrees: torch.Tensor | None = None  # [T, layers]


def split_into_mini_batches(groups, config: Config, rng: random.Random) -> list[list[Row]]:
    """The kept answers as mini-batches of whole groups, one for each optimizer step.

    A row of coefficient 0 has no gradient, so it is left out, but `set_norms` counts it. Otherwise
    the step of one useful prompt, mostly variance, would be as large as that of a full batch.
    """
    rows_by_group = [rows_of_group(group, config) for group in groups if group.kept]
    set_norms([row for rows in rows_by_group for row in rows], config)
    rng.shuffle(rows_by_group)  # else a mini-batch might be all easy or all hard
    mini_batches = []
    for i in range(config.mini_batches):
        groups_here = rows_by_group[i::config.mini_batches]
        useful = [row for rows in groups_here for row in rows if row.coefficient]
        for row in useful:
            row.mini_batch = len(mini_batches)
        if useful:
            mini_batches.append(useful)
    return mini_batches


def rows_of_group(group, config: Config) -> list[Row]:
    """The rows of a group's kept answers. Each answer also gets its row as `.row`, for the log."""
    prompt = group.problem.prompt_ids
    rows = []
    for sample, coefficient in group.rows():
        rollout = sample.rollout
        sample.row = Row(
            ids=prompt + rollout.token_ids, prompt_length=len(prompt),
            mu_logprobs=rollout.logprobs, coefficient=coefficient,
            routes=rollout.routes,  # MoE only
            replay=rollout.routes if config.replay == "r3" else None)
        rows.append(sample.row)
    return rows


def set_norms(rows: list[Row], config: Config) -> None:
    """Set `row.norm` to 1 / (answers * length). docs/method.md#the-divisor says why these two."""
    # The batch's average, because ada-est and gvm give some prompts more rows on purpose.
    answers = len(rows) / config.mini_batches
    mean_length = sum(row.length for row in rows) / max(len(rows), 1)
    for row in rows:
        lengths = dict(constant=config.max_tokens, batch=mean_length, response=row.length)
        row.norm = 1 / (answers * lengths[config.length_norm])


def add_old_logprobs(policy, rows: list[Row], config: Config) -> None:
    """log pi_old of every row, before the first optimizer step of the batch."""
    # Uses the micro-batches of `accumulate`, or r would not start at 1 in low precision.
    for micro in micro_batches(rows, config.micro_tokens, policy=policy):
        with torch.no_grad(), replaying(policy, micro):  # replaying: MoE only
            lp_T, _ = token_logprobs(policy, micro, config.temperature)  # [T] in nats
        for row, logprobs in zip(micro, split_by_row(lp_T, micro)):
            row.old_logprobs = logprobs
        note_routes(policy, micro, config.replay)  # MoE only


def accumulate(policy, rows: list[Row], config: Config) -> float:
    """Add up the gradient of one mini-batch, a micro-batch of T tokens at a time. Returns the loss.

    The numbers of each token are stored in its row, for `diagnostics` and the log.
    """
    loss, device = 0.0, policy.device
    for micro in micro_batches(rows, config.micro_tokens, policy=policy):
        mu_T = torch.tensor([x for row in micro for x in row.mu_logprobs], device=device)  # [T]
        lengths = torch.tensor([row.length for row in micro], device=device)  # [rows]
        factors = torch.tensor([(row.coefficient, row.norm) for row in micro], device=device)
        advantage_T, norm_T = factors.repeat_interleave(lengths, dim=0).unbind(1)  # A, 1/divisor
        with replaying(policy, micro):  # MoE only; also backward, which recomputes
            lp_T, entropy_T = token_logprobs(policy, micro, config.temperature)  # in nats
            if config.mini_batches == 1:
                old_T = lp_T.detach()
                note_routes(policy, micro, config.replay)  # MoE only
            else:
                old_T = torch.cat([row.old_logprobs for row in micro])  # [T]
            term_T, mask_T, weight_T = objective(lp_T, old_T, mu_T, advantage_T, config)  # [T]
            micro_loss = -(term_T * norm_T).sum()  # a number
            policy.loss_scale.scale(micro_loss).backward()  # the scale is for float16
        loss += micro_loss.item()
        of_tokens = torch.stack([old_T, lp_T.detach(), mask_T, weight_T, entropy_T])  # [5, T]
        for row, of_row in zip(micro, split_by_row(of_tokens, micro)):
            row.old_logprobs, row.theta_logprobs, row.mask, row.weight, row.entropy = of_row
    return loss


def optimizer_step(policy, optimizer, schedule, config: Config) -> float:
    """Clip, step, clear the gradient. Returns its norm before clipping; no step if not finite."""
    policy.loss_scale.unscale_(optimizer)  # for float16 only
    weights = [p for p in policy.parameters() if p.requires_grad]
    grad_norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm or math.inf).item()
    if math.isfinite(grad_norm):
        optimizer.step()
        schedule.step()
    policy.loss_scale.update()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


# ------------------------------------------------------------------------------ the objective
def objective(lp_T, old_T, mu_T, advantage_T, config: Config):
    """Per-token terms of the objective, to be summed over tokens and maximised.

        minirl  M_t * sg[min(pi_theta/mu, cap)] * A * log pi_theta              Eq. 7 with its cap
                M_t = 0 if A > 0 and r > 1 + eps_high, or A < 0 and r < 1 - eps_low; else 1
        grpo    min(r A, clip(r) A)                      r = pi_theta/pi_old    appendix A
        cispo   sg[clip(r)] * A * log pi_theta                                  appendix A

    sg[x] is x without gradient (`detach`). A is the advantage times the row weight.
    lp_T (log pi_theta, with gradient), old_T, mu_T: [T] in nats; advantage_T: A, [T].
    Returns (term_T, mask_T: 0 where no gradient is left, weight_T before any bound).
    """
    ratio_T = (lp_T - old_T).exp()  # r
    low, high = 1 - config.eps_low, 1 + config.eps_high
    clipped_T = ratio_T.clamp(low, high) if config.clip else ratio_T  # clip(r)

    if config.objective == "grpo":
        term_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
        mask_T = (clipped_T * advantage_T >= ratio_T * advantage_T).to(term_T)
        return term_T, mask_T, ratio_T.detach()

    if config.objective == "cispo":
        return clipped_T.detach() * advantage_T * lp_T, torch.ones_like(old_T), ratio_T.detach()

    if config.objective != "minirl":
        raise ValueError(f"objective {config.objective} needs a branch in minirl.objective")
    # M_t masks a token that has moved far enough in the direction in which its advantage pushes.
    # A token that has moved the other way keeps its gradient, or it could never come back.
    mask_T = torch.ones_like(old_T)
    if config.clip:
        mask_T[(advantage_T > 0) & (ratio_T > high)] = 0
        mask_T[(advantage_T < 0) & (ratio_T < low)] = 0
    weight_T = importance_weight(lp_T, old_T, mu_T, config.importance)
    capped_T = weight_T.clamp(max=config.weight_cap) if config.weight_cap else weight_T
    return mask_T * capped_T * advantage_T * lp_T, mask_T, weight_T


def importance_weight(lp_T, old_T, mu_T, kind: str):
    """full: sg[pi_old/mu * pi_theta/pi_old] (Eq. 5); staleness: the second factor; none: 1. [T]"""
    if kind == "full":
        return (lp_T - mu_T).exp().detach()
    if kind == "staleness":
        return (lp_T - old_T).exp().detach()
    return torch.ones_like(old_T)


if __name__ == "__main__":
    with say_how_to_resume(FLAGS):
        main(FLAGS)
