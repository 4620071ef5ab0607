"""An evaluation, for minirl.py or eval.py: k answers to each problem, from engine to statistics.

Results are computed from rows `in_order`, k per question. _Q: one entry per question.
An answer without a verdict is no sample of the policy, so it counts for nothing.
"""
import math
import random
from collections import Counter

import numpy as np
from tqdm import tqdm

from parts.data import MEASURED
from parts.files import finite
from parts.grader import lost, mean_parts


# ----------------------------------------------------------------------------------------- sampling
def evaluate(engine, grader, problems, k: int, max_tokens: int, **how) -> list[dict]:
    """k answers to every problem, in order. `how`: see `draw_samples`."""
    return in_order(draw_samples(engine, grader, problems, k, max_tokens, **how), problems, k)


def draw_samples(engine, grader, problems, k, max_tokens, *, done=(), seed=""):
    """Sample k answers to every problem (see prompts.py) and grade them while the engine runs.

    Yields a row per answer (`as_row`) as soon as it is graded. `done` are rows from before an
    interruption, which are not sampled again. Each answer has a separate seed, which is made of
    `seed`, its problem and its number. So it does not depend on other answers or interruptions.
    Otherwise a resumed evaluation would keep the short answers and sample new long ones.
    """
    asked = [divmod(i, k) for i, row in enumerate(in_order(done, problems, k)) if row is None]
    for q, s in asked:
        name = f"{seed}/{problems[q].source}/{problems[q].id}/{s}"
        engine.submit((q, s), problems[q].prompt_ids, max_tokens,
                      seed=random.Random(name).getrandbits(63))
    arrived = []
    with tqdm(total=len(asked), desc="  evaluating", unit="sample", leave=False,
              disable=None) as bar:  # None: no bar without a terminal
        while engine.busy or arrived:
            due, arrived = arrived, list(engine.step()) if engine.busy else []
            for (q, s), rollout in arrived:
                require_numbers(rollout)
                style = "minerva" if problems[q].source in MEASURED else ""
                grader.submit(("eval", q, s), problems[q], rollout, style=style)
                rollout.routes = None  # only MoE models have them, and they are large
            for (q, s), rollout in due:  # one engine step later, so that grading had time
                yield as_row(problems[q], s, rollout, grader.result(("eval", q, s)))
                bar.update()


def require_numbers(rollout) -> None:
    """Raises SystemExit if the model computed no finite log-prob for a whole answer.

    Then vLLM writes token 0, which is `!` in many tokenizers, and this would be graded as wrong.
    """
    if not any(map(math.isfinite, rollout.logprobs)):
        raise SystemExit("The model computes no finite numbers, because its weights are damaged or "
                         "too large for float16 (then use a card that computes in bfloat16).")


def as_row(problem, s: int, rollout, verdict) -> dict:
    """A line of eval.jsonl. The reward is None if the grader failed."""
    return dict(
        data=problem.source, id=problem.id, level=problem.level, gold=problem.answer,
        sample=s, text=rollout.text, tokens=len(rollout.token_ids),
        finish_reason=rollout.finish_reason,
        reward=finite(verdict.reward), status=verdict.status,
        why=verdict.why) | verdict.parts


def in_order(rows, problems, k: int) -> list[dict | None]:
    """The rows of all answers, k per question, in order; None if a row is missing."""
    drawn = {(row["data"], row["id"], row["sample"]): row for row in rows}
    return [drawn.get((problem.source, problem.id, s)) for problem in problems for s in range(k)]


# --------------------------------------------------------------------------------------- statistics
def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k), the probability that k of n answers include one of c right ones."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"no pass@{k} from {n} answers, {c} of them right")
    # The product has a factor 0 if fewer than k are wrong.
    return 1 - math.prod((n - c - i) / (n - i) for i in range(k))


def bootstrap(sets: list, weights: list | None = None, resamples=4000, seed=0) -> dict:
    """avg: weighted mean of the means of `sets` (arrays [Q]); ci_low, ci_high: its 95 % interval.

    Questions are resampled within each set. For differences of two models on the same questions,
    this is the paired interval. With fewer than about 30 questions it is too narrow.
    None counts for nothing; if a set has nothing else, all is NaN.
    """
    sets = [[value for value in values if value is not None] or [math.nan] for values in sets]
    rng, total = np.random.default_rng(seed), np.zeros(resamples)
    weights = np.ones(len(sets)) if weights is None else np.array(weights, float)
    for value_Q, weight in zip(map(np.asarray, sets), weights / weights.sum()):
        Q = len(value_Q)
        means = [value_Q[rng.integers(0, Q, Q)].mean() for _ in range(resamples)]
        total += weight * np.array(means)
    avg = float(np.average([np.mean(values) for values in sets], weights=weights))
    low, high = map(float, np.percentile(total, (2.5, 97.5)))
    return dict(avg=avg, ci_low=low, ci_high=high)


def judged_Q(rows: list[dict], k: int) -> list[list[dict]]:
    """Of each question, the answers with a verdict."""
    return [[row for row in rows[i:i + k] if row["reward"] is not None]
            for i in range(0, len(rows), k)]


def means_Q(rows: list[dict], k: int) -> list[float | None]:
    """avg@k of each question; None if no answer to it has a verdict."""
    return [sum(row["reward"] for row in answers) / len(answers) if answers else None
            for answers in judged_Q(rows, k)]


def report(rows: list[dict], k: int) -> dict:
    """The results of some questions: avg (avg@k), ci_low, ci_high, pass {j: pass@j}, and more.

    avg is a mean of rewards, and reward/NAME that of one of their parts. correct and pass
    count answers with the status "correct".
    A question without any verdict is left out. If none has one, the means are NaN.
    """
    answers_Q = [answers for answers in judged_Q(rows, k) if answers]
    judged, questions = sum(answers_Q, []), len(rows) // k
    count = len(judged) or math.nan
    right_Q = [sum(row["status"] == "correct" for row in answers) for answers in answers_Q]

    def pass_at(j: int) -> float:
        of_Q = [pass_at_k(len(answers), right, min(j, len(answers)))  # it may have fewer verdicts
                for answers, right in zip(answers_Q, right_Q)]
        return float(np.mean(of_Q or math.nan))

    js = sorted({k, *(2**i for i in range(k.bit_length()))})
    verdicts = Counter(row["status"] for row in rows)
    return bootstrap([means_Q(rows, k)]) | {
        "k": k, "questions": questions, "left_out": questions - len(answers_Q),
        "correct": sum(right_Q) / count, "pass": {j: pass_at(j) for j in js},
        "no_box": verdicts["no_box"] / count,
        "truncated": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "verifier_failures": lost(verdicts) / len(rows),
        "response_length": sum(row["tokens"] for row in rows) / len(rows),
        "verdicts": dict(verdicts)} | mean_parts(judged)


def say_lost(reports: list[dict]) -> str:
    """`no verdict on 3 of 64 answers`; "" if there is a verdict on each."""
    failed = sum(lost(one["verdicts"]) for one in reports)
    asked = sum(sum(one["verdicts"].values()) for one in reports)
    return f"no verdict on {failed} of {asked} answers" if failed else ""


def report_by_set(rows: list[dict], k: int) -> dict[str, dict]:
    """{name of a set: its `report`}."""
    names = dict.fromkeys(row["data"] for row in rows)
    return {name: report([row for row in rows if row["data"] == name], k) for name in names}


def report_all(rows: list[dict], k: int, weights: dict[str, float]) -> dict:
    """sets: {name: report}; weighted: the mean over all sets."""
    means = [means_Q([row for row in rows if row["data"] == name], k)
             for name in weights]
    weighted = bootstrap(means, list(weights.values()))
    return dict(sets=report_by_set(rows, k), weighted=weighted)


def compare(rows: list[dict], k: int, before_Q: list, weights: dict[str, float]) -> dict:
    """Name of a set -> mean change of avg@k since `before_Q`, its paired interval, counts.

    The questions are the same, so the difficulty cancels, and the interval is narrower than the
    separate intervals suggest. A question without a verdict, now or before, is left out.
    """
    changes = {name: [] for name in weights}
    for row, after, before in zip(rows[::k], means_Q(rows, k), before_Q, strict=True):
        if after is not None and before is not None:
            changes[row["data"]].append(after - before)
    results = {name: bootstrap([values]) for name, values in changes.items()}
    if len(results) > 1:
        results["weighted"] = bootstrap(list(changes.values()), list(weights.values()))
        changes["weighted"] = sum(changes.values(), [])
    for name, values in changes.items():
        results[name] |= dict(better=sum(value > 0 for value in values),
                            worse=sum(value < 0 for value in values), questions=len(values))
    return results
