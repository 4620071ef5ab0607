"""A run that goes wrong: warnings, and the reasons for which it ends before it costs an hour."""
import json
import math
from collections import Counter
from typing import Any, NamedTuple

from tqdm import tqdm

from ada_sampler import RULES
from parts import files
from parts.files import shown
from parts.grader import NO_VERDICT


# ------------------------------------------------------------------------------ warnings
def warn_of_weights(step: int, metrics: dict, least: float = 0.3) -> None:
    """Say so when a few tokens of large weight decide about the update."""
    if metrics.get("weight_ess", 1.0) < least:
        tqdm.write(f"WARNING, step {step}: the importance weights leave {metrics['weight_ess']:.0%}"
                   " of the trained tokens' worth (weight_ess): the policy has moved too far from "
                   "what was sampled; take fewer --mini-batches or a lower --lr")


def warn_of_verifier(step: int, groups, most: float = 0.02) -> None:
    """Say so when the verifier (or --reward) fails on more than this share of the samples.

    It would reward nobody, and the curve would only look as if the model did not learn.
    """
    pool = [(group.problem, s) for group in groups for s in group.pool]
    failed = [(problem, s) for problem, s in pool if s.status in NO_VERDICT]
    if len(failed) > most * len(pool):
        problem, s = failed[0]
        tqdm.write(f"WARNING, step {step}: the verifier gave no verdict on {len(failed)} of "
                   f"{len(pool)} samples, such as gold {problem.answer[:60]!r}, completion "
                   f"ending in {s.rollout.text[-120:]!r}: {s.status}, {shown(s.why)}")


def warn_of_threshold(step: int, groups, config) -> None:
    """Say so when rewards of several values all lie on one side of the threshold."""
    draws = draws_of(groups)
    if is_blind(draws, config):
        tqdm.write(f"WARNING, step {step}: {of_threshold(draws, config)}")


# ------------------------------------------------------------------------------ broken
def broken(step: int, groups, metrics: dict, run, patience: int = 3) -> str:
    """After a step with a gradient that was not finite, and not stepped: why the run has to end.

    Empty if it goes on. `patience` such steps in a row end it: something is broken for good then,
    and broken_batch.json has what it takes to find out what. A gradient that has only overflowed
    float16 is another matter: the loss scale is lower now.
    """
    scale = run.policy.loss_scale
    if scale.is_enabled() and scale.get_scale() >= 1 and math.isfinite(metrics["loss"]):
        tqdm.write(f"step {step}: a gradient too large for float16 was skipped, and the loss scale "
                   f"lowered to {scale.get_scale():g}")
        return ""
    run.state["skipped_in_a_row"] += 1
    tqdm.write(f"step {step}: the gradient is not finite, "
               f"{metrics['skipped_steps']} optimizer step(s) skipped")
    if run.state["skipped_in_a_row"] < patience:
        return ""
    run.state["skipped_in_a_row"] = 0  # for a resumption: the weights are sound, none was stepped
    rows = [dict(prompt_ids=group.problem.prompt_ids, token_ids=s.rollout.token_ids,
                 logprobs=s.rollout.logprobs, advantage=coefficient)
            for group in groups for s, coefficient in group.rows()]
    file = run.folder / "broken_batch.json"
    files.write_safely(file, json.dumps(dict(step=step, loss=str(metrics["loss"]), rows=rows)))
    anew = " (or anew, in another --dtype)" if scale.is_enabled() else ""
    return (f"{patience} steps in a row had a gradient that is not finite. The last batch is in "
            f"{file}; everything up to step {step} is saved: continue with --resume and a lower "
            f"--lr{anew}.")


# ------------------------------------------------------------------------------ hopeless
def hopeless(run, draws: list, silent: bool, patience: int = 3) -> str:
    """Why a run that cannot learn has to end, with the likely cause; empty if it goes on.

    It looks at `draws` of the evaluation before step 1 and of the first steps. Silence, no learning
    signal in them, ends it after `patience` looks, or at once where most are cut off. (A task may
    honestly start at zero, and a sampler that goes on drawing has hits where a few draws have none.
    Many answers cut off, but some right, are a warning only: a model can learn to be brief.) From
    the first signal of a step on nobody looks any more: state["silent"] is None.
    """
    state, step = run.state, run.state["step"]
    if run.config.train_anyway:
        state["silent"] = None
    if state["silent"] is None or not draws:
        return ""
    cut, silent = are_cut_off(draws), silent or is_blind(draws, run.config)
    if silent:
        state["silent"] += 1
    elif step:
        state["silent"] = None
    if not (cut or silent):
        return ""
    first, cause = draws[0], likely_cause(draws, run.config)
    tqdm.write(f"the first answer (gold {shown(first.problem.answer)!r}, {first.status}, "
               f"{first.finish_reason}): {shown(first.text, 1000)}")
    if not silent or state["silent"] < patience and not cut:
        tqdm.write(f"WARNING, step {step}: {cause}")
        return ""
    resume = "--resume " * bool(step)
    return (f"Nothing to learn from, so this run ends before step {step + 1}: {cause}. To go on "
            f"all the same: {resume}--train-anyway.")


class Draw(NamedTuple):
    """An answer of training or evaluation."""

    problem: Any
    reward: float
    status: str
    finish_reason: str
    text: str


def draws_of(groups, first_round: bool = False) -> list[Draw]:
    """All of a step; or the first round's, in which every prompt counts the same."""
    return [Draw(group.problem, s.reward, s.status, s.rollout.finish_reason, s.rollout.text)
            for group in groups for s in group.pool if not (first_round and s.round)]


def draws_of_evaluation(rows: list[dict], problems: list) -> list[Draw]:
    """Of the rows that eval.evaluate returns: as many for each problem, in the same order."""
    k = len(rows) // max(len(problems), 1)
    return [Draw(problems[i // k], *(row[name] for name in Draw._fields[1:]))
            for i, row in enumerate(rows)]


def are_cut_off(draws: list[Draw]) -> bool:
    """Most of them, at max_tokens."""
    return sum(draw.finish_reason == "length" for draw in draws) > len(draws) / 2


def is_blind(draws: list[Draw], config) -> bool:
    """Whether rewards differ, but not in what decides who is sampled, kept and weighted."""
    if config.sampler == "uniform" and config.weighting == "none":
        return False  # there nothing does
    sides = {draw.reward > config.threshold for draw in draws}
    return len(sides) == 1 and len({draw.reward for draw in draws}) > 1


def of_threshold(draws: list[Draw], config) -> str:
    rewards = [draw.reward for draw in draws]
    side = "above" if rewards[0] > config.threshold else "not above"
    return (f"all rewards ({min(rewards):g} to {max(rewards):g}) are {side} --threshold "
            f"{config.threshold:g}, so {config.sampler} cannot tell right from wrong: start again "
            "with a threshold between them")


def likely_cause(draws: list[Draw], config) -> str:
    """Why such answers teach nothing, and which flag to change. The first that fits."""
    count, statuses = len(draws), Counter(draw.status for draw in draws)
    cut = sum(draw.finish_reason == "length" for draw in draws)
    failed = sum(statuses[status] for status in NO_VERDICT)
    if failed > count / 2:
        usual = max(NO_VERDICT, key=lambda status: statuses[status])
        judge = "--reward" if config.reward else "this machine's load and memory"
        return f"{failed} of {count} answers got no verdict ({usual}): look into {judge}"
    if cut > count / 2:
        return (f"{cut} of {count} answers are cut off at --max-tokens {config.max_tokens}: raise "
                "it, or take a --template with which the model ends its answers")
    if statuses["no_box"] > count / 2:
        return (f"{statuses['no_box']} of {count} answers have no \\boxed{{}}: take a --template "
                "or --system that asks for one")
    rewards = {draw.reward for draw in draws}
    if len(rewards) > 1 and config.advantage == "positives-only" and max(rewards) <= 0:
        return ("no reward is above 0, and advantage positives-only learns from no other: start "
                "again with another --advantage")
    if is_blind(draws, config):
        return of_threshold(draws, config)
    if len(rewards) > 1:
        size = "n" if RULES[config.sampler].first == "n" else "M"  # not all have an n
        other = ("--N" if config.sampler == "ada-balance"
                 else "take a --sampler that goes on drawing (ada-balance)")
        return (f"no prompt that is kept has both right and wrong answers: raise --{size}, or "
                f"{other}")
    if config.reward:
        return f"every answer gets the same reward, {draws[0].reward:g}: look into --reward"
    if draws[0].reward:
        return "all answers are right: take harder problems (--data)"
    return (f"all {count} answers are wrong: compare the one above with its gold answer "
            "(--answer-key); if that is sound, the problems are too hard for this model (--data)")
