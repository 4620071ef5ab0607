"""MiniRL's objective (Eq. 7) against autograd, PPO's clipped loss, and itself in other batches."""
import math
import random
from dataclasses import replace
from collections import Counter

import pytest
import torch

import minirl
from minirl import Row, objective
from models_small import gradients_of, plain_logprobs, policy, random_groups, tiny_policy, update
from parts import logprobs
from parts.config import OBJECTIVES, Config
from parts.logprobs import Sequence
from parts.metrics import diagnostics
from parts.policy import make_optimizer
from world import settled


def tokens(count: int, seed: int, spread: float = 0.3):
    """Log-probs of tokens under pi_theta (leaf with gradient), pi_old and mu, and advantages."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(count, generator=g, dtype=torch.float64) * 3
    lp = (old + spread * torch.randn(count, generator=g, dtype=torch.float64)).requires_grad_()
    mu = old + spread * torch.randn(count, generator=g, dtype=torch.float64)
    advantage = torch.randn(count, generator=g, dtype=torch.float64)
    return lp, old, mu, advantage


def by_the_papers(theta, old, mu, A, c: Config):
    """(term, its slope, mask, weight) of one token. The formulas are written anew here."""
    r = math.exp(theta - old)
    bounded = min(max(r, 1 - c.eps_low), 1 + c.eps_high) if c.clip else r
    stopped = c.clip and c.objective != "cispo" and r * A > bounded * A  # on the advantage's side
    if c.objective == "grpo":
        return min(r * A, bounded * A), (not stopped) * r * A, not stopped, r
    assert c.objective in ("minirl", "cispo"), (
        f"write the formula of --objective {c.objective} into by_the_papers of this file")
    weight = dict(full=math.exp(theta - mu), staleness=r, none=1.0)[c.importance]
    used = min(weight, c.weight_cap) if c.weight_cap else weight
    if c.objective == "cispo":
        weight, used = r, bounded
    slope = (not stopped) * used * A
    return slope * theta, slope, not stopped, weight


SETTINGS = [
    *(dict(objective=name, clip=clip) for name in OBJECTIVES for clip in (True, False)),
    dict(eps_low=0.6, eps_high=0.05), dict(importance="staleness"), dict(importance="none"),
    dict(weight_cap=1.5), dict(weight_cap=0)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_gradient_is_mask_times_weight_times_advantage(settings):
    """GRPO's min masks the same tokens as MiniRL, and CISPO masks none."""
    config = settled(**settings)
    lp, old, mu, A = tokens(1000, seed=0, spread=0.8)
    term, mask, weight = objective(lp, old, mu, A, config)
    (gradient,) = torch.autograd.grad(term.sum(), lp)
    found = torch.stack([term, gradient, mask, weight], 1)
    columns = (x.tolist() for x in (lp, old, mu, A))
    wanted = [by_the_papers(*token, config) for token in zip(*columns)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    assert not weight.requires_grad
    if config.clip and config.objective in ("minirl", "grpo"):
        assert 0 < mask.sum() < len(mask)  # or this would show little


def test_each_objective_brings_its_advantage_and_length_normalisation():
    configs = {name: settled(objective=name) for name in OBJECTIVES}
    found = {name: (config.advantage, config.length_norm) for name, config in configs.items()}
    assert found == OBJECTIVES | dict(minirl=("pool-mean", "constant"),
                                      grpo=("group-std", "response"), cispo=("group-std", "batch"))
    with pytest.raises(ValueError, match="objective mine needs a branch in minirl.objective"):
        objective(*tokens(1, seed=0), replace(configs["grpo"], objective="mine"))


def test_an_update_is_finite():
    """test_course.py runs this test with each bug of the course's hunt."""
    steps, metrics = gradients_of(policy(), random_groups(4, seed=1), mini_batches=2)
    numbers = [metrics["loss"], *(g.norm().item() for step in steps for g in step.values())]
    assert len(steps) == 2 and all(map(math.isfinite, numbers))


@pytest.mark.parametrize("micro_tokens", [1, 40, 4096])
def test_update_equals_the_plain_computation(micro_tokens):
    """The plain computation takes one answer at a time and all its logits."""
    policy, groups = tiny_policy(), random_groups(5, seed=2)
    (ours,), metrics = gradients_of(policy, groups, micro_tokens=micro_tokens)
    count, loss = sum(len(g.kept) for g in groups), 0
    for g in groups:
        for s, A in g.rows():
            prompt = g.problem.prompt_ids
            log_pi = plain_logprobs(policy, Sequence(prompt + s.rollout.token_ids, len(prompt)))
            weight = (log_pi - torch.tensor(s.rollout.logprobs)).exp().clamp(max=5).detach()
            loss = loss - (weight * A * log_pi).sum() / (count * 20)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    plain = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    # our logits are float32 from the head on, these are float64
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_mini_batch_is_the_on_policy_case_bit_for_bit(name):
    """Without the pass for pi_old, the gradient is exactly the one with it."""
    policy, groups = tiny_policy().float(), random_groups(6, seed=2)
    (short,), _ = gradients_of(policy, groups, objective=name)
    config = settled(max_tokens=20, micro_tokens=4096, objective=name)
    (rows,) = minirl.split_into_mini_batches(groups, config, random.Random(0))
    config = replace(config, mini_batches=2)  # `accumulate` takes pi_old from the rows
    minirl.add_old_logprobs(policy, rows, config)
    minirl.accumulate(policy, rows, config)
    long = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    assert short.keys() == long.keys() and all(torch.equal(short[n], long[n]) for n in short)


def test_which_groups_share_a_mini_batch_is_drawn_and_none_is_split():
    """The batch has an order, and a mini-batch must not be all easy or all hard."""
    config, groups = settled(mini_batches=4, max_tokens=20), random_groups(9, seed=9)
    for i, group in enumerate(groups):  # as ada-est, gvm and dapo leave them: two are empty
        group.kept[:] = group.kept[:i % 5]

    def dealt(seed):
        split = minirl.split_into_mini_batches(groups, config, random.Random(seed))
        return [Counter(tuple(row.ids[:row.prompt_length]) for row in rows) for rows in split]

    assert dealt(0) == dealt(0) != dealt(1)
    assert all(len(counts) <= 2 for seed in range(9) for counts in dealt(seed))  # 7 in 4
    rows = [(tuple(g.problem.prompt_ids), sum(a != 0 for _, a in g.rows())) for g in groups]
    assert sorted(pair for counts in dealt(0) for pair in counts.items()) == sorted(
        pair for pair in rows if pair[1])
    for group in groups[4:]:  # then there may be no optimizer step between two
        group.kept[:] = [(sample, 0.0) for sample, _ in group.kept]
    for seed in range(9):
        split = minirl.split_into_mini_batches(groups, config, random.Random(seed))
        assert all(row.mini_batch == i for i, rows in enumerate(split) for row in rows)


def trained(mu, coefficient, **of_tokens) -> Row:
    """A row as an update leaves it."""
    return Row(ids=[0] * (1 + len(mu)), prompt_length=1, mu_logprobs=mu, coefficient=coefficient,
               **{name: torch.tensor(values) for name, values in of_tokens.items()})


def test_diagnostics_by_hand_and_only_of_what_the_objective_does():
    rows = [trained([-1.5], 1.0, old_logprobs=[-1.0], mask=[0.0], weight=[6.0], entropy=[1.0],
                    agrees=[[True, False]]),
            trained([-1.0] * 3, -1.0, old_logprobs=[-2.0, -1.0, -1.0], mask=[1.0, 0.0, 1.0],
                    weight=[0.4, 0.5, 2.0], entropy=[2.0, 3.0, 2.0],
                    agrees=[[True, True], [False, False], [True, True]])]
    wanted = dict(
        kl_k1=0.5 / 4, kl_k3=(math.exp(0.5) - 1.5 + math.exp(-1)) / 4, weight_min=0.4,
        weight_max=6, weight_mean=8.9 / 4, weight_truncated=1 / 4,
        weight_over_2=1 / 4, weight_under_half=1 / 4,  # 2 is not above, and 0.5 not below
        weight_ess=8.9**2 / (4 * (6**2 + 0.4**2 + 0.5**2 + 2**2)), clipped_positive=1 / 4,
        clipped_negative=1 / 4, entropy_trained=2, routes_agree_all=2 / 4,
        tokens_trained=4)  # one that is stopped goes forward and backward as well
    assert diagnostics(rows, Config()) == pytest.approx(wanted)
    cispo, bounds = dict(objective="cispo"), dict(eps_low=0.5, eps_high=5.0)
    for settings, truncated, clipped in (
            (dict(weight_cap=6.0), 0, 1 / 4), (dict(weight_cap=0, clip=False), None, None),
            (dict(objective="grpo"), None, 1 / 4), (cispo | bounds, 1 / 4, None),
            (cispo | dict(clip=False), None, None)):
        found = diagnostics(rows, settled(**settings))
        assert (found.get("weight_truncated"), found.get("clipped_negative")) == (
            truncated, clipped)


def learning(**changes):
    config = settled(max_tokens=20, micro_tokens=4096, lr=0.01, warmup_steps=4, **changes)
    policy = tiny_policy()
    return policy, *make_optimizer(policy, config), config


def test_the_pi_old_pass_samples_at_the_same_temperature(monkeypatch):
    gaps, real, batches, real_micro = [], minirl.objective, [], minirl.micro_batches

    def watched(lp, old, *rest):
        gaps.append((lp - old).abs().max().item())
        return real(lp, old, *rest)

    monkeypatch.setattr(minirl, "objective", watched)
    monkeypatch.setattr(logprobs, "tokens_at_once", lambda *_: 57)  # as with shared tokens
    monkeypatch.setattr(minirl, "micro_batches", lambda *rows, **how: (
        batches.append(real_micro(*rows, **how)) or batches[-1]))
    gradients_of(tiny_policy(), random_groups(4, seed=10), temperature=0.5, mini_batches=2)
    assert gaps and max(gaps) < 1e-5  # the weights stay: pi_theta is pi_old
    sizes = [[len(micro) for micro in of_a_mini_batch] for of_a_mini_batch in batches]
    assert sizes[:2] == sizes[2:]  # in the same passes, so that 16 bits round alike
    assert all(sum(len(row.ids) for row in micro) <= 57 for micro in sum(batches, []))


@pytest.mark.parametrize("most, larger", [(1e-3, 1), (0, 1e4)])
def test_gradients_are_clipped_to_the_norm_that_was_asked_for_or_not_at_all(most, larger):
    policy, optimizer, schedule, config = learning(max_grad_norm=most)
    groups, taken = random_groups(4, seed=11), []
    for group in groups:
        group.kept[:] = [(s, larger * a) for s, a in group.kept]
    optimizer.step = lambda: taken.append(torch.cat([
        p.grad.flatten() for p in policy.parameters() if p.grad is not None]).norm().item())
    norm = update(policy, optimizer, schedule, groups, config)["grad_norm"]
    assert taken == [pytest.approx(most or norm, rel=1e-3)] and norm > (10 if larger > 1 else 1e-2)
    assert all(p.grad is None for p in policy.parameters())  # the next step begins with none


def test_the_learning_rate_warms_up_a_step_at_a_time_and_is_logged_as_used():
    """The optimizer has only the adapter's weights and no weight decay."""
    policy, optimizer, schedule, config = learning(mini_batches=2)
    (group,) = optimizer.param_groups
    assert {*map(id, group["params"])} == {id(p) for p in policy.parameters() if p.requires_grad}
    assert group["weight_decay"] == 0
    used, real = [], optimizer.step
    optimizer.step = lambda *a, **k: (used.append(optimizer.param_groups[0]["lr"]), real(*a, **k))
    logged = [update(policy, optimizer, schedule, random_groups(4, seed), config)["lr"]
              for seed in (12, 13, 14)]
    assert logged == used[::2] == pytest.approx([0.0025, 0.0075, 0.01])  # steps 1, 3, 5; 4 warm up


@pytest.mark.parametrize("norms, mean, skipped", [
    ([2.0, 6.0], 4.0, 0), ([math.inf, math.inf, 4.0], math.inf, 2)])
def test_loss_and_gradient_norm_are_means_over_the_mini_batches(monkeypatch, norms, mean, skipped):
    """Each norm that is not finite is a skipped step, not only the last one."""
    losses, left, real = iter([1.0, 3.0, 2.0]), iter(norms), minirl.accumulate
    monkeypatch.setattr(minirl, "accumulate", lambda *a: (next(losses), real(*a))[0])
    monkeypatch.setattr(minirl, "optimizer_step", lambda *_: next(left))
    policy, optimizer, schedule, config = learning(mini_batches=len(norms))
    groups = random_groups(4, seed=15)
    metrics = update(policy, optimizer, schedule, groups, config)
    assert (metrics["loss"], metrics["grad_norm"]) == (2.0, mean)
    assert metrics["skipped_steps"] == skipped == len(norms) - metrics["optimizer_steps"]
    assert metrics["tokens_trained"] == sum(
        len(s.rollout.token_ids) for group in groups for s, a in group.rows() if a)
