"""An update's metrics; most are tested with the objective that they watch: test_objective.py."""
import pytest
import torch

from parts.config import Config
from parts.diagnostics import diagnostics


@pytest.mark.parametrize("gaps", [(0.25, -2.0, 0.5), (-0.25, 2.0, -0.5)])
def test_the_largest_gap_counts_in_either_direction(gaps):
    """An engine that finds a token far less likely than the trainer is as wrong as the opposite."""
    one, old = torch.ones(3), torch.full((3,), -3.0)
    facts = dict(old=old, mu=old + torch.tensor(gaps), advantage=one, mask=one, weight=one,
                 entropy=one)
    assert diagnostics([facts], Config())["logprob_gap"] == 2.0
