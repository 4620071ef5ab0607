"""What a run leaves for `explore.py`: whole pools, and what the update saw of every token.

`group_row` makes a line of runs/NAME/groups.jsonl of a prompt and all that was drawn for it in one
step. docs/explore.md explains the columns. To read some of it without the page:

    jq '.prompt, (.pool[] | {reward, kept, text})' runs/NAME/groups.jsonl
"""
import functools
import math

import torch

from parts.screen import shown

# Log-probs of float32 have about seven digits. With these decimals a token's term of the objective
# can be computed again to 1e-6, and a page can show what the update did.
DECIMALS = 7


def recorded(groups: list, count: str) -> list:
    """The groups that are logged: "all", or the first so many of the batch.

    The batch comes in shuffled order, so the first are no choice. (Under a limit of samples or
    tokens per step they are: what is left of it is offered in the order of the batch.) dapo's
    further prompts follow behind the batch.
    """
    return groups if count == "all" else groups[:int(count)]


def group_row(step: int, group, tokenizer) -> dict:
    """A prompt of one step: its pool in the order of drawing, and how it was judged and closed."""
    kept = {s.index: (a, a * w) for s, a, w in zip(group.kept, group.advantages, group.weights)}
    rewards = [s.reward for s in group.pool]
    return dict(
        step=step, place=group.index, refill=group.refill, id=group.problem.id,
        prompt=group.problem.prompt, gold=group.problem.answer, outcome=group.outcome,
        pool_mean=sum(rewards) / len(rewards) if rewards else None,
        baseline=group.baseline, p_hat=group.p_hat,
        opened=group.pool[0].rollout.submitted if group.pool else None,
        pool=[sample_row(s, kept.get(s.index), tokenizer) for s in group.pool])


def sample_row(s, kept: tuple[float, float] | None, tokenizer) -> dict:
    """A draw; `kept`: its advantage and its coefficient, None if the update did not get it."""
    rollout = s.rollout
    row = dict(
        round=s.round, submit=rollout.submitted, finish=rollout.finished, reward=s.reward,
        status=s.status, reason=s.why, finish_reason=rollout.finish_reason, text=rollout.text,
        length=len(rollout.token_ids), kept=kept is not None)
    if kept:
        row |= dict(advantage=kept[0], coefficient=kept[1])
    if rollout.row is not None and rollout.row.seen:
        row |= token_columns(rollout.row, rollout.token_ids, tokenizer)
    return row


def token_columns(row, token_ids: list[int], tokenizer) -> dict:
    """What the update saw of a sample, an entry per token. pi_old only where it is not pi_theta."""
    columns = dict(scale=row.scale, mini=row.mini, ids=token_ids,
                   tokens=pieces(token_ids, tokenizer), mu=numbers(row.mu),
                   theta=numbers(row.seen["theta"].tolist()))
    if not torch.equal(row.old, row.seen["theta"]):
        columns["old"] = numbers(row.old.tolist())
    columns |= dict(
        mask="".join("1" if x else "0" for x in row.seen["mask"].tolist()),
        weight=numbers(row.seen["weight"].tolist()),
        entropy=numbers(row.seen["entropy"].tolist(), 4))
    if row.agrees is not None:  # [T, MoE layers]
        columns["agrees"] = numbers(row.agrees.float().mean(1).tolist(), 4)
    return columns


def pieces(token_ids: list[int], tokenizer) -> list[str]:
    """The text that each token adds to the one before it, special tokens included.

    Decoded on its own, a token would lose the space that some tokenizers put in front of it. A
    character that is made of several tokens shows as U+FFFD.
    """
    pairs = [tuple(token_ids[max(i - 1, 0):i + 1]) for i in range(len(token_ids))]
    return [piece(tokenizer, pair) for pair in pairs]


@functools.lru_cache(maxsize=200_000)  # decoding would be half of what recording costs
def piece(tokenizer, pair: tuple[int, ...]) -> str:
    """What the last token of the pair adds to the first's text; of one alone, its text."""
    before = tokenizer.decode(list(pair[:-1]))
    return tokenizer.decode(list(pair))[len(before):]


def numbers(values: list[float], decimals: int = DECIMALS) -> list[float | None]:
    """Rounded; None for what JSON has no number for, such as the log-probs of a broken update."""
    return [round(value, decimals) if math.isfinite(value) else None for value in values]


# ------------------------------------------------------------------------------ held-out answers
def show_change(rows, problems: int = 3) -> None:
    """What the first and the last evaluation say: right answers by level, some problems' answers.

    `rows`: those of answers.jsonl, one per evaluation and held-out problem.
    """
    by_step = {}
    for row in filter(None, rows):
        by_step.setdefault(row["step"], {})[row["id"]] = row
    if len(by_step) < 2:
        return
    before, after = by_step[min(by_step)], by_step[max(by_step)]
    levels = dict.fromkeys(row["level"] for row in after.values())
    if 1 < len(levels) <= 20:
        print(f"right answers by level, at step {min(by_step)} and at step {max(by_step)}:")
        for level in levels:
            rates = share_right(before, level), share_right(after, level)
            print(f"  {level:24} {rates[0]:4.0%}  {rates[1]:4.0%}")
    for name in most_changed(before, after)[:problems]:
        print(f"{shown(before[name]['problem'], 300)}\n"
              f"  before: {shown(before[name]['text'], 300)!r}\n"
              f"  after:  {shown(after[name]['text'], 300)!r}")


def share_right(rows: dict, level: str) -> float:
    own = [row for row in rows.values() if row["level"] == level]
    return sum(row["right"] for row in own) / max(1, sum(row["k"] for row in own))


def most_changed(before: dict, after: dict) -> list[str]:
    """Problems whose answer was wrong and is right now, those with the largest gain first."""
    mended = [name for name in before.keys() & after.keys()
              if before[name]["status"] != "correct" == after[name]["status"]]
    return sorted(mended, key=lambda name: (before[name]["right"] - after[name]["right"], name))
