"""Routing replay: exact at unchanged weights, with exact gradients and the engine's real routes.
The checks of lab 6 test the hook alone and the agreement of routes."""
import itertools
import json
import random

import pytest
import torch

import minirl
import models_small
from engines import gap, random_ids, rows_of, serve
from helpers import lines, run_program
from models_small import gradients_of, model_folder, random_groups
from parts.policy import make_optimizer
from parts.logprobs import micro_batches, token_logprobs
from parts.routing_replay import replaying
from world import settled

VARIANTS = {  # family and changes to its config
    "qwen3_moe": ("qwen3_moe", {}), "olmoe": ("olmoe", {}), "mixtral": ("mixtral", {}),
    "11 layers, not normalised": ("qwen3_moe", dict(norm_topk_prob=False, num_hidden_layers=11)),
    "qwen3_moe, dense first layer": ("qwen3_moe", dict(mlp_only_layers=[0]))}
DEEP = dict(num_hidden_layers=3)


def deep(variant: str = "qwen3_moe"):
    """The trainer's policy of such a model. Its routers have gradients, though none is trained."""
    family, changes = VARIANTS[variant]
    policy = models_small.policy(family, **DEEP | changes)
    for name, p in policy.named_parameters():
        p.requires_grad |= name.endswith("gate.weight")
    return policy


def some_rows(count: int = 5, alike: int = 0) -> list[minirl.Row]:
    """Rows whose prompts begin with `alike` equal tokens."""
    rng, start = random.Random(0), random_ids(alike, seed=99)
    return [minirl.Row(ids=start + random_ids(rng.randint(6, 20), seed=i),
                       prompt_length=alike + rng.randint(1, 5), mu_logprobs=[], coefficient=1.0)
            for i in range(count)]


def logprobs(policy, rows):
    """The log-probs [T] under the routes that the rows replay."""
    with torch.no_grad(), replaying(policy, rows):
        return token_logprobs(policy, rows)[0]


def record(policy, rows):
    """Make `rows` replay what the routers choose now. Returns their log-probs [T]."""
    natural = logprobs(policy, rows)
    for row, route in zip(rows, policy.routing.recorded(rows)):
        row.replay = route
    return natural


def gradients(policy, rows) -> dict:
    policy.zero_grad()
    with replaying(policy, rows):
        token_logprobs(policy, rows)[0].sum().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("family", VARIANTS)
def test_record_then_replay_at_unchanged_weights_changes_nothing(family):
    """But after an update the experts are still those from before it."""
    policy, rows = deep(family), some_rows(alike=20)  # which a dense model would compute only once
    natural, before = gradients(policy, rows), record(policy, rows)
    assert torch.equal(logprobs(policy, rows), before)
    replayed = gradients(policy, rows)
    assert all(torch.allclose(natural[name], replayed[name], atol=1e-5, rtol=1e-4)
               for name in natural)
    learning = [name for name, g in replayed.items() if name.endswith("gate.weight") and g.any()]
    assert len(learning) == len(policy.routing.chosen)  # the routers learn
    assert policy.routing.forced is None  # what runs next must find the routers as they were
    models_small.move(policy, 0.3)
    natural = token_logprobs(policy, rows)[0]
    assert (logprobs(policy, rows) - natural).abs().max() > 1e-2


@pytest.mark.parametrize("spoil", [
    lambda route: route.where(route < route.max(), 8),  # there are the experts 0 to 7
    lambda route: route[:-1], lambda route: route[:, :2], lambda route: None, torch.zeros_like,
    lambda route: route.index_fill(0, torch.arange(3), 0)])  # one expert twice
def test_routes_that_cannot_be_right_are_refused(spoil):
    policy, (row,) = deep(), some_rows(1)
    record(policy, [row])
    policy.routing.check(row.replay, len(row.ids))
    with pytest.raises(ValueError, match="wrong routes"):
        policy.routing.check(spoil(row.replay), len(row.ids))


def groups_for() -> list:
    """Random groups whose engine used other experts than the trainer would."""
    generator, groups = torch.Generator().manual_seed(3), random_groups(4, seed=3)
    for group in groups:
        for sample, _ in group.kept:
            tokens = len(group.problem.prompt_ids) + len(sample.rollout.token_ids) - 1
            random_T = torch.rand((tokens, 3, 8), generator=generator)
            sample.rollout.routes = random_T.topk(2).indices.to(torch.int16)
    return groups


def test_gradient_checkpointing_changes_nothing_under_replay():
    """The routers run again in the backward pass, which must be replayed too."""
    plain, again = (
        gradients_of(models_small.policy("qwen3_moe", checkpointing=checkpointing, **DEEP),
                     groups_for(), replay="r3")[0][0] for checkpointing in (False, True))
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("replay", ["none", "r2", "r3"])
def test_ratios_under_each_replay(replay, monkeypatch):
    """r is exactly 1 in the first mini-batch whatever is replayed; pi_old is computed with the
    engine's routes under r3 only."""
    policy = models_small.policy("qwen3_moe", moved=0, **DEEP)
    first, seen, forced = [], [], []
    true = minirl.objective

    def watched(lp, old, *rest):
        own = torch.stack([policy.routing.chosen[layer] for layer in range(3)], 1)
        seen.append((lp.detach(), old))
        forced.append(None if policy.routing.forced is None else (policy.routing.forced, own))
        return true(lp, old, *rest)

    monkeypatch.setattr(minirl, "objective", watched)
    monkeypatch.setattr(minirl, "micro_batches",  # one per mini-batch
                        lambda rows, tokens, **_: micro_batches(rows, tokens, padding=1.0))
    config = settled(max_tokens=16, mini_batches=2, replay=replay, micro_tokens=4096, lr=0.05,
                     warmup_steps=0)
    groups = groups_for()
    for group in groups:
        rows = [row for row in minirl.rows_of_group(group, config) if row.coefficient]
        first += logprobs(policy, rows).tolist()
    metrics = models_small.update(policy, *make_optimizer(policy, config), groups, config)
    (lp, old), (later, later_old) = seen
    assert torch.equal(lp, old)
    assert (later - later_old).abs().max() > 1e-3
    torch.testing.assert_close(torch.cat([old, later_old]).sort().values,
                               torch.tensor(first).sort().values, atol=1e-5, rtol=1e-5)
    if replay == "none":
        assert forced == [None, None]
    else:  # r2: what the trainer chose before the first optimizer step; r3: the engine's, random
        same = [(wanted == own)[wanted >= 0].double().mean() for wanted, own in forced]
        assert same[0] == 1 > same[1] if replay == "r2" else max(same) < 0.3, same
    assert 0 <= metrics["routes_agree_all"] < 0.3


def rollouts_as_rows(engine, dropping: bool = False, count: int = 12):
    """dropping: twice all running answers are begun anew, as if vLLM's cache were full."""
    rng, steps = random.Random(0), 0
    prompts = [random_ids(rng.randint(2, 50), seed=i) for i in range(count)]  # a block has 32
    waiting, found = list(itertools.product(range(count), range(6))), {}
    rng.shuffle(waiting)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    while waiting or engine.busy:
        for key in [waiting.pop() for _ in range(min(3, len(waiting)))]:
            engine.submit(key, prompts[key[0]], rng.randint(2, 40))
        found.update(engine.step())
        steps += 1
        if dropping and steps in (8, 15):
            assert scheduler.running
            scheduler.reset_prefix_cache(reset_running_requests=True)
            assert not scheduler.running
    return rows_of(prompts, [[found[p, i] for i in range(6)] for p in range(count)])


def require_own_routes(policy, rows) -> None:
    """In float32 the trainer chooses exactly the engine's experts, so a mix-up would show. A tie
    may be decided differently, so one choice in a thousand is free."""
    for row in rows:
        policy.routing.check(row.routes, len(row.ids))
    gap_when(policy, rows, replay=False)
    agrees = torch.cat([policy.routing.agreement(own, row.routes).flatten()
                        for own, row in zip(policy.routing.recorded(rows), rows)])
    assert agrees.float().mean() > 0.999
    assert gap_when(policy, rows, replay=True).square().mean() < 2e-7


def gap_when(policy, rows, replay: bool):
    """|log mu - log pi| of every token [T], of engine and trainer."""
    for row in rows:
        row.replay = row.routes if replay else None
    with replaying(policy, rows):
        return gap(policy, rows)


@pytest.mark.engine
@pytest.mark.parametrize("variant", ["qwen3_moe, dense first layer", "olmoe", "mixtral"])
def test_routes_belong_to_their_own_sequence_and_survive_syncs(variant):
    family, changes = VARIANTS[variant]
    folder = model_folder(family, **DEEP, **changes)
    policy = models_small.policy(folder, moved=0)
    with serve(folder, max_num_seqs=48, routes=True) as engine:
        for step in range(2):
            require_own_routes(policy, rollouts_as_rows(engine, dropping=step == 1))
            models_small.move(policy, 0.05, seed=step)
            engine.sync(policy)
        engine.prompt_logprobs([[1, 2, 3], [4, 5]])
        (after,), = engine.generate([[1, 2, 3]], n=1, max_tokens=4)
        policy.routing.check(after.routes, 3 + len(after.token_ids))
        assert not engine.recorder.routes  # nothing is kept of what was not asked for


@pytest.mark.engine
@pytest.mark.core
def test_a_run_off_policy_replays_the_engines_experts(tmp_path):
    run_program("minirl.py", "--model", "tiny-moe", "--mini-batches", 4, "--steps", 2,
                "--eval-questions", 6, "--eval-k", 1, "--name", "moe", "--batch-prompts", 8,
                "--rollout-dtype", "bfloat16", cwd=tmp_path)
    run = tmp_path / "runs" / "moe"
    assert json.loads((run / "config.json").read_text())["config"]["replay"] == "r3"
    stepped = [row for row in lines(run / "metrics.jsonl") if row["optimizer_steps"]]
    assert stepped, "a model this weak may miss, but not in every group of two steps"
    for row in stepped:
        assert row["skipped_steps"] == 0 and 0 < row["kl_k3"] < 0.1
        assert 0.5 < row["routes_agree_all"] <= 1
