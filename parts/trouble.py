"""A run that goes wrong: warnings, and the two reasons for which a run ends by itself.

A run ends when its gradients stay broken (`why_broken`), or when its first steps show nothing to
learn from (`why_hopeless`). Both return a sentence for the user; an empty one lets the run go on.
"""
import json
import math
from collections import Counter

from tqdm import tqdm

from parts import files
from parts.data import made_for_others
from parts.files import shown
from parts.grader import NO_VERDICT

PATIENCE = 3  # steps with a broken gradient; silent looks


# ------------------------------------------------------------------------------ warnings
def warn_of_weights(step: int, metrics: dict, least: float = 0.3) -> None:
    """Warn when a few tokens with large importance weights dominate the update."""
    if metrics.get("weight_ess", 1.0) < least:
        tqdm.write(f"WARNING, step {step}: the importance weights leave {metrics['weight_ess']:.0%}"
                   " of the trained tokens' worth (weight_ess): the policy has moved too far from "
                   "what was sampled; take fewer --mini-batches or a lower --lr")


def warn_of_verifier(step: int, groups, reward: str = "", most: float = 0.02) -> None:
    """Warn when more than this share of the samples got no verdict.

    They earn no reward, so the curve would look as if the model did not learn.
    """
    pool = [(group.problem, s) for group in groups for s in group.pool]
    failed = [(problem, s) for problem, s in pool if s.status in NO_VERDICT]
    if len(failed) > most * len(pool):
        problem, s = failed[0]
        judge, asked, text = (("--reward", "problem", problem.problem) if reward else
                              ("the verifier", "gold", problem.answer))
        tqdm.write(f"WARNING, step {step}: {judge} gave no verdict on {len(failed)} of "
                   f"{len(pool)} samples, such as {asked} {text[:60]!r}, completion "
                   f"ending in {s.rollout.text[-120:]!r}: {s.status}, {shown(s.why)}")


# ------------------------------------------------------------------------------ broken
def why_broken(step: int, groups, metrics: dict, run) -> str:
    """Why a run has to end after PATIENCE steps in a row whose gradient was not finite.

    Such a gradient was not applied, so the weights are sound. broken_batch.json gets the last
    batch. A gradient that overflowed float16 does not count: the loss scale is lower now.
    """
    scale, state = run.policy.loss_scale, run.state
    if not metrics["skipped_steps"]:
        state["skipped_in_a_row"] = 0
        return ""
    if scale.is_enabled() and scale.get_scale() >= 1 and math.isfinite(metrics["loss"]):
        tqdm.write(f"step {step}: a gradient too large for float16 was skipped, and the loss scale "
                   f"lowered to {scale.get_scale():g}")
        return ""
    state["skipped_in_a_row"] += 1
    tqdm.write(f"step {step}: the gradient is not finite, "
               f"{metrics['skipped_steps']} optimizer step(s) skipped")
    if state["skipped_in_a_row"] < PATIENCE:
        return ""
    state["skipped_in_a_row"] = 0  # a resumed run counts from the beginning
    rows = [dict(prompt_ids=group.problem.prompt_ids, token_ids=s.rollout.token_ids,
                 logprobs=s.rollout.logprobs, coefficient=coefficient)
            for group in groups for s, coefficient in group.rows()]
    file = run.folder / "broken_batch.json"
    files.write_safely(file, json.dumps(dict(step=step, loss=str(metrics["loss"]), rows=rows)))
    anew = " (or anew, in another --dtype)" if scale.is_enabled() else ""
    return (f"{PATIENCE} steps in a row had a gradient that is not finite. The last batch is in "
            f"{file}; everything up to step {step} is saved: continue with --resume and a lower "
            f"--lr{anew}.")


# ------------------------------------------------------------------------------ hopeless
def first_round(groups) -> list[dict]:
    """A step's answers, without later rounds: in those, hard prompts are more frequent."""
    return [dict(reward=s.reward, status=s.status, finish_reason=s.rollout.finish_reason,
                 text=s.rollout.text)
            for group in groups for s in group.pool if s.round == 0]


def why_hopeless(run, draws: list[dict], problems: list, silent: bool) -> str:
    """Why a run has to end that has found nothing to learn from, with the likely cause.

    `draws` are rows of the evaluation before step 1, or a step's `first_round`, in the order of
    `problems`; `silent` says that they show no learning signal. PATIENCE silent looks in a row end
    the run, or a single one where most answers are cut off. After the first step with a signal
    this check is off: state["learns"].
    """
    state, step = run.state, run.state["step"]
    if run.config.train_anyway or state["learns"] or not draws:
        return ""
    silent = silent or is_blind([draw["reward"] for draw in draws], run.config)
    cut_off = sum(draw["finish_reason"] == "length" for draw in draws) > len(draws) / 2
    state["silent_looks"] += silent
    state["learns"] = bool(step) and not silent
    if not (silent or cut_off):
        return ""
    first, cause = draws[0], likely_cause(draws, run.config)
    if other := made_for_others(run.config.model, run.config.data):
        cause += f"; {other}"
    tqdm.write(f"the first answer (gold {shown(problems[0].answer)!r}, {first['status']}, "
               f"{first['finish_reason']}): {shown(first['text'], 1000)}")
    if silent and (cut_off or state["silent_looks"] >= PATIENCE):
        resume = "--resume " * bool(step)
        return (f"Nothing to learn from, so this run ends before step {step + 1}: {cause}. To go "
                f"on all the same: {resume}--train-anyway.")
    tqdm.write(f"WARNING, step {step}: {cause}")
    return ""


def likely_cause(draws: list[dict], config) -> str:
    """Why such answers teach nothing, and which flag to change. The first that fits."""
    count, statuses = len(draws), Counter(draw["status"] for draw in draws)
    cut_off = sum(draw["finish_reason"] == "length" for draw in draws)
    rewards = [draw["reward"] for draw in draws]
    if sum(statuses[status] for status in NO_VERDICT) > count / 2:
        usual = max(NO_VERDICT, key=lambda status: statuses[status])
        judge = "--reward" if config.reward else "this machine's load and memory"
        return f"most of {count} answers got no verdict ({usual}): look into {judge}"
    if cut_off > count / 2:
        return (f"--max-tokens {config.max_tokens} cuts off {cut_off} of {count} answers: "
                "raise it, or take a --template with which the model ends its answers")
    if statuses["no_box"] > count / 2:
        return (f"{statuses['no_box']} of {count} answers have no \\boxed{{}}: take a --template "
                "or --system that asks for one")
    if is_blind(rewards, config):
        above = rewards[0] > config.threshold
        side, other = ("above", "was wrong") if above else ("not above", "was right")
        return (f"all rewards ({min(rewards):g} to {max(rewards):g}) are {side} --threshold "
                f"{config.threshold:g}, so {config.sampler} cannot tell right from wrong: start "
                f"again with a threshold between them, or no answer {other} yet (--data)")
    if len(set(rewards)) > 1:
        return ("no prompt has both right and wrong answers: draw more of each (--M and --N, or "
                "--n with uniform and dapo)")
    if config.reward:
        return f"every answer gets the same reward, {rewards[0]:g}: look into --reward"
    if rewards[0]:
        return "all answers are right: take harder problems (--data)"
    return (f"all {count} answers are wrong: compare the one above with its gold answer "
            "(--answer-key); if that is sound, the problems are too hard for this model (--data)")


def is_blind(rewards: list[float], config) -> bool:
    """Whether the sampler sees no difference between rewards that do differ."""
    if config.sampler == "uniform" and config.weighting == "none":
        return False  # these never ask whether a reward is above the threshold
    sides = {reward > config.threshold for reward in rewards}
    return len(sides) == 1 and len(set(rewards)) > 1
