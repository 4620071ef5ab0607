"""No combination of settings ends in a traceback or in a run that learns nothing: it is refused in
one sentence, or it makes a real step in the small world."""
import itertools
import math
from typing import get_args, get_type_hints

import pytest
import torch

from minirl import train_step
from models_small import trained_weights
from parts.config import Config, check
from world import SMALL, ready, settled

HINTS = {name: get_args(hint)[0] if type(None) in get_args(hint) else hint
         for name, hint in get_type_hints(Config).items()}  # of `int | None` the int


def check_that_it_trains(**settings) -> None:
    """One real step. It must move the adapter, with a gradient that is finite and not zero."""
    run = ready(mixture=settings.get("replay") in ("r2", "r3"), **settings)
    start = trained_weights(run.policy)
    _, metrics = train_step(1, run)
    assert metrics["optimizer_steps"] >= 1 and metrics["skipped_steps"] == 0, metrics
    assert 0 < metrics["grad_norm"] < math.inf and math.isfinite(metrics["loss"]), metrics
    after = trained_weights(run.policy)
    assert any(not torch.equal(after[name], start[name]) for name in start)
    assert all(p.isfinite().all() for p in after.values())


def refusal(**settings) -> str | None:
    """The sentence with which these settings are refused; None if a run would start."""
    try:
        settings = SMALL | dict(name="mine") | settings
        check(Config(**settings), vars(Config()))
        settled(**settings)
    except (ValueError, SystemExit) as end:
        sentence = str(end)
        assert type(end) in (ValueError, SystemExit) and 10 < len(sentence) < 300, repr(end)
        assert "\n" not in sentence and "Traceback" not in sentence
        return sentence
    return None


def choices(*names: str) -> dict[str, list]:
    return {name: [value for value in get_args(HINTS[name])] for name in names}


def cannot_work(c: dict) -> bool:
    """What must be refused, in this test's own words."""
    std, est = c["advantage"] == "group-std", c["sampler"] == "ada-est"
    twice = (est or std) and c["weighting"] != "none" or est and std
    idle = c["mini_batches"] == 1 and c["replay"] == "r2"
    whole = c["sampler"] in ("uniform", "dapo") and c["weighting"] == "unbiased"
    of_minirl = c.get("importance", "full") != "full"
    return twice or idle or whole or c["objective"] != "minirl" and of_minirl


@pytest.mark.slow
@pytest.mark.parametrize("axes", [
    choices("sampler", "objective", "advantage", "weighting", "replay"),
    choices("objective", "importance", "length_norm", "replay") | dict(
        sampler=["ada-balance", "ada-est"], advantage=["pool-mean"], weighting=["none"])])
def test_whatever_is_accepted_trains(axes):
    """Every combination that cannot work is refused, and every other accepted. Of these so many
    train that any two values are together in one of them."""
    met, trained, axes = set(), 0, axes | dict(mini_batches=[1, 2])
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values))
        sentence = refusal(**settings)
        assert bool(sentence) == cannot_work(settings), (
            f"{settings}: refused with {sentence!r}; what your own rule or objective cannot be "
            "combined with belongs into cannot_work of tests/test_combinations.py")
        pairs = set(itertools.combinations(settings.items(), 2))
        if not sentence and not pairs <= met:
            met |= pairs
            trained += 1
            check_that_it_trains(**settings)
    assert trained > 8
