"""bench/gradient_bank.py: sketches are gradients, rules draw as from an engine."""
import random

import numpy as np
import pytest
import torch

import gradient_bank
from ada_sampler import SamplerConfig
from course.laws import expected_yield
from models_small import policy, random_groups
from parts.logprobs import Sequence, token_logprobs


def test_a_sketch_is_the_gradient_times_random_signs():
    """Against autograd on the sum over the row's tokens."""
    learner = policy()
    sketch = gradient_bank.Sketch(learner, width=3)
    prompt, response = next((group.problem.prompt_ids, s.rollout.token_ids)
                            for group in random_groups(2, seed=0) for s, _ in group.rows())
    row = Sequence(prompt + response, len(prompt))
    found, wanted = sketch(row), []
    token_logprobs(learner, [row])[0].sum().backward()
    for name, P in sketch.signs.items():
        grad = learner.get_parameter(name).grad
        wanted.append((P.T @ grad.T if "lora_A" in name else grad.T @ P).flatten())
    assert len(found) == sketch.size and np.allclose(found, torch.cat(wanted))


def test_what_is_stored_is_what_every_rows_own_sketch_gives(tmp_path, monkeypatch):
    """With equal answers among them, and without any gradient where all rewards are equal."""
    monkeypatch.setattr(gradient_bank, "BANK", tmp_path)
    begin, rng = list(range(5, 45)), random.Random(0)  # long enough to be shared
    rows = [Sequence(begin + rng.choices(range(60), k=rng.randint(2, 9)), 40) for _ in range(6)]
    rows += rows[1:4]
    sketch = gradient_bank.Sketch(policy(), width=3)
    wanted = np.stack([sketch(row) for row in rows])
    rewards = np.array([1, 0, 0, 1, 0, 1, 1, 0, 0.5])
    for name, given in (("train-0", rewards), ("held-0", rewards), ("train-1", 0 * rewards)):
        gradient_bank.store(name, rows, given, sketch)
    found = {name: np.load(tmp_path / f"{name}.npz")["sketch"]
             for name in ("train-0", "held-0", "train-1")}
    assert np.allclose(found["train-0"], wanted, rtol=1e-4, atol=1e-6)
    assert np.allclose(found["held-0"], (rewards - rewards.mean()) @ wanted / 8, rtol=1e-3,
                       atol=1e-5)
    assert found["train-1"].shape == wanted.shape and not found["train-1"].any()


@pytest.mark.parametrize("p", [0.125, 0.5, 0.875])
def test_rules_draw_from_the_bank_as_the_theory_says(p):
    """512 stored answers: so many that drawing none twice hardly matters."""
    rewards = np.arange(512) < 512 * p
    for name, config in gradient_bank.RULES.items():
        tries = [gradient_bank.coefficients(rewards, config, rng)
                 for rng in map(random.Random, range(400))]
        draws = np.array([draws for _, draws in tries])
        squares = np.array([(c**2).sum() for c, _ in tries]) / config.n**2
        exact = expected_yield(p, config)
        for values, wanted in ((draws, exact.draws), (squares, exact.noise)):
            assert abs(values.mean() - wanted) <= 4 * values.std() / 20 + 0.01 * wanted, name


def test_equal_rules_are_equal_and_a_rule_that_learns_nothing_is_behind(monkeypatch):
    """The answers' gradients are orthogonal, and only right ones help on the held-out problems."""
    monkeypatch.setattr(gradient_bank, "RESAMPLES", 40)
    rng = np.random.default_rng(0)
    bank = []
    for p in rng.uniform(0.1, 0.9, 12):
        rewards = (rng.random(64) < p).astype(float)
        bank.append(dict(rewards=rewards, along=np.outer(rewards, np.ones(5)),
                         short=rng.standard_normal((64, 128)) / 128**0.5))
    uniform = gradient_bank.outcomes(SamplerConfig(sampler="uniform", n=4), bank)
    silent = uniform | dict(along=0 * uniform["along"])
    found = gradient_bank.ratios({"uniform-4": uniform, "same": uniform, "silent": silent}, 300)
    assert gradient_bank.verdict(*found["same"][1:]) == "equal"
    assert found["silent"] == (0, 0, 0) and gradient_bank.verdict(0, 0) == "behind"
