"""One step of training, the loop around it, and float16, with an engine of random tokens."""
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch

import minirl
from helpers import lines
from models_small import policy, second, trained_weights
from parts import logprobs
from parts.config import Config
from parts.metrics import summarize
from parts.models import find_model
from parts.policy import make_optimizer
from parts.prompts import stop_ids
from parts.routing_replay import note_routes
from parts.run_folder import checkpoints, step_of
from world import WHOLE, Engine, Grader, by_text, ready, settled, silent, small_run, stand_in


# ------------------------------------------------------------------------------ before the first
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_run_is_made_of_its_settings_and_samples_from_the_weights_that_it_has_restored(
        tmp_path, monkeypatch, on_cpu):
    """The probe comes before them, with the base weights."""
    made, served, probed, real = {}, {}, [], minirl.load_policy
    engine, on_a_cpu = Engine(seed=None), dict(device="cpu", checkpointing=False)
    stand_in(monkeypatch.setattr)
    monkeypatch.setattr(engine, "on_cpu", on_cpu)
    monkeypatch.setattr("parts.engine.Engine", lambda path, **how: served.update(how) or engine)
    monkeypatch.setattr(minirl, "load_policy",
                        lambda path, **how: made.update(how) or real(path, **how | on_a_cpu))
    monkeypatch.setattr("parts.policy.spare_attention", lambda *how: engine.events.append(how))
    monkeypatch.setattr(minirl, "restore", lambda run: engine.events.append("restore"))
    monkeypatch.setattr(minirl, "start_probe", lambda *given: probed.extend(given) or (
        SimpleNamespace(check=lambda: engine.events.append("probe"))))
    flags = WHOLE | dict(seed=3, lora_rank=4, lora_alpha=12, stop="?")
    run = minirl.set_up(tmp_path, Config(**flags), Grader())
    assert engine.events == [("float32", "cpu"), "restore", "sleep", "wake", "sync", "probe"]
    assert probed == [run.config, engine, run.policy, run.held_out]
    assert made == dict(dtype="float32", rank=4, alpha=12, seed=3, checkpointing=not on_cpu,
                        device="cpu" if on_cpu else "cuda")
    ends = json.loads((tmp_path / "config.json").read_text())["end_tokens"]
    assert ends == served["stop_token_ids"] == stop_ids(find_model("tiny"), "chat", "?")
    assert run.stream.seed == 3 and run.held_out[0] not in run.stream.problems


# ------------------------------------------------------------------------------ one step
def test_the_engine_sleeps_during_the_update_and_is_synced_and_probed_after_it(monkeypatch):
    run, real = ready(sampler="ada-est"), minirl.accumulate
    monkeypatch.setattr(minirl, "accumulate", lambda *a: run.events.append("loss") or real(*a))
    monkeypatch.setattr(minirl, "optimizer_step", lambda *a: run.events.append("step") or 1.0)
    start = time.perf_counter()
    groups, metrics = minirl.train_step(1, run)
    assert run.events == ["sleep", "loss", "step", "wake", "sync", "probe"]
    assert {asked.max_tokens for asked in run.engine.asked.values()} == {run.config.max_tokens}
    drawn = [x for g in groups for s in g.pool for x in s.rollout.logprobs]
    parts = [metrics[f"seconds_{phase}"] for phase in ("sample", "train", "sync")]
    assert min(*parts, metrics["memory_gb"]) > 0 and sum(parts) <= time.perf_counter() - start
    assert metrics == metrics | summarize(groups) | dict(
        optimizer_steps=1, skipped_steps=0, probe_gap_max=0.25, grad_norm=1.0,
        lr=run.config.lr / run.config.warmup_steps, seconds=pytest.approx(sum(parts)),
        entropy=pytest.approx(-sum(drawn) / len(drawn)))
    assert len(run.estimator.counts) == run.config.batch_prompts  # known to the next step
    assert run.state == dict(step=0) | {
        f"{name}_total": metrics[name] for name in ("samples", "tokens", "seconds")}


@pytest.mark.parametrize("judge, spoil, skipped", [
    (silent, lambda p: None, 0),  # nothing is learnt
    (by_text, lambda p: p.data.fill_(math.nan), 1),
    # clipping would make it 0 or NaN
    (by_text, lambda p: p.register_hook(lambda grad: torch.full_like(grad, math.inf)), 1)])
def test_without_a_finite_gradient_no_weight_moves_and_the_warm_up_waits(judge, spoil, skipped):
    """The engine is synced anyway: sleeping may have spoilt its weights (vLLM #53888)."""
    run = ready(judge=judge)
    for p in second(run.policy).values():
        spoil(p)
    before = trained_weights(run.policy)
    _, metrics = minirl.train_step(1, run)
    assert (metrics["optimizer_steps"], metrics["skipped_steps"]) == (0, skipped)
    assert run.events == ["sleep", "wake", "sync", "probe"]
    assert run.schedule.last_epoch == 0 and not run.optimizer.state
    torch.testing.assert_close(trained_weights(run.policy), before, rtol=0, atol=0, equal_nan=True)


def test_a_step_draws_the_same_when_it_is_done_again_and_no_other_step_does(monkeypatch):
    """Rollouts follow the global state, the split into mini-batches the `rng` of the step."""
    drawn = []
    monkeypatch.setattr(minirl, "split_into_mini_batches", lambda groups, _, rng: drawn.append(
        ([s.rollout.token_ids for g in groups for s in g.pool], rng.random())) or [])
    for seed, step in ((1, 12), (11, 2), (1, 12), (11, 12)):
        run = ready(seed=seed, sampler="uniform")
        torch.manual_seed(len(drawn))  # whatever has happened before
        minirl.train_step(step, run)
    for one, other, again, third in zip(*drawn):
        assert one == again != other and third not in (one, other)


def test_routes_are_checked_against_prompt_and_response_before_anything_is_trained():
    run = ready(mixture=True)
    minirl.sample(run)  # as long as prompt and response, less one
    real = run.engine.write

    def loses_a_row(*asked):
        rollout = real(*asked)
        rollout.routes = rollout.routes[1:]
        return rollout

    run.engine.write = loses_a_row
    with pytest.raises(ValueError, match="routes of a sequence"):
        minirl.sample(run)


@pytest.mark.parametrize("replay", ["none", "r2", "r3"])
def test_agreement_is_that_of_the_positions_that_predict_the_response(replay):
    """Row t of the routes predicts token t + 1. Under r2 the trainer's own are to be replayed."""
    used = torch.arange(4)[:, None, None].expand(4, 2, 2)  # [prompt 3 + response 2 - 1, layers, k]
    own = used.clone()
    own[2, 0] = 7  # the last prompt token's router, which predicts the response's first token
    routing = SimpleNamespace(
        recorded=lambda rows: [own for _ in rows], agreement=lambda a, b: (a == b).all(-1))
    kept = dict(ids=[1, 2, 3, 4, 5], prompt_length=3, mu_logprobs=[-1.0, -1.0], coefficient=1.0)
    row = minirl.Row(**kept, routes=used, replay=used)
    bare = minirl.Row(**kept)  # of a GPU's engine, which records them for r3 alone
    note_routes(SimpleNamespace(routing=routing), [row, bare], replay)
    assert row.agrees.tolist() == [[False, True], [True, True]] and bare.agrees is None
    assert [row.replay, bare.replay] == ([own, own] if replay == "r2" else [used, None])


# ------------------------------------------------------------------------------ the loop
def test_an_evaluation_has_draws_of_its_own(monkeypatch):
    """Another run's are others, and another step's."""
    run, asked = ready(steps=8, eval_every=7, seed=3, eval_k=5), []
    run.held_out, run.state["step"] = ["a problem"], 7
    monkeypatch.setattr(minirl, "evaluate", lambda *given, **how: asked.extend([given, how]) or 1)
    monkeypatch.setattr(minirl, "draw_run", run.events.append)
    minirl.evaluate_if_due(run, SimpleNamespace(evaluated=None, evaluation=run.events.append))
    assert asked == [(run.engine, run.grader, ["a problem"], 5, run.config.max_tokens),
                     dict(seed="3/7")]
    assert run.events == ["clear", 1, run.folder]  # a resumed run has an empty cache


@pytest.mark.parametrize("first, every, wanted", [
    (False, 2, [2, 3]), (True, 3, [0, 3]), (True, 0, [0, 3])])
def test_a_run_has_the_evaluations_and_the_adapters_of_its_flags(
        tmp_path, capsys, first, every, wanted):
    flags = dict(eval_first=first, eval_every=every, lora_rank=4, lora_alpha=12, keep_every=1)
    run = small_run(tmp_path, steps=3, **flags)
    small_run(tmp_path, steps=4, resume=True, **flags)  # the last evaluation is not repeated
    assert [row["step"] for row in lines(run / "eval.jsonl")] == [*wanted, 4]
    stepped = lines(run / "metrics.jsonl")
    assert [row["step"] for row in stepped] == [1, 2, 3, 4]
    assert stepped[-1]["samples_total"] == sum(row["samples"] for row in stepped)
    assert [step_of(one) for one in checkpoints(run)] == [1, 2, 3, 4]
    adapter = json.loads((run / "checkpoints/step-000004/adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 12)
    assert ("last evaluation minus first" in capsys.readouterr().out) == first


def test_three_steps_without_a_finite_gradient_end_a_run_after_their_checkpoint(
        tmp_path, monkeypatch):
    monkeypatch.setattr(minirl, "optimizer_step", lambda *_: math.nan)
    run = small_run(tmp_path, steps=2, eval_first=False)
    with pytest.raises(SystemExit, match="3 steps in a row .* up to step 3 is saved"):
        small_run(tmp_path, steps=9, resume=True)
    assert step_of(checkpoints(run)[-1]) == 3


def test_the_engine_sleeps_while_gvm_measures_gradients_and_is_synced_after_it(monkeypatch):
    """At this moment no answer is being written, or an engine could not sleep."""
    run = ready(sampler="gvm", temperature=0.5)
    monkeypatch.setattr(logprobs, "head_gradient_norm", lambda policy, row, temperature: (
        run.events.append((run.engine.busy, policy is run.policy, temperature)) or 1.0))
    monkeypatch.setattr(run.engine, "sleeps", True)
    minirl.sample(run)
    assert run.events[0] == "sleep" and run.events[-2:] == ["wake", "sync"]
    assert {*run.events[1:-2]} == {(False, True, 0.5)}


@pytest.mark.parametrize("micro_tokens, count", [(900, 3), (299, 1)])
def test_the_largest_micro_batch_is_tried_and_leaves_no_gradient(micro_tokens, count):
    run = ready(micro_tokens=micro_tokens, max_prompt_tokens=100, max_tokens=200)
    run.policy.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: run.events.append(ids[0].shape))
    [*second(run.policy).values()][0].register_hook(lambda _: run.events.append("backward"))
    logprobs.try_largest_batch(run)
    assert run.events == ["sleep", (count, 300), "backward", "wake"]
    assert all(p.grad is None for p in run.policy.parameters())


# ------------------------------------------------------------------------------ float16
REAL = settled(max_tokens=3000, micro_tokens=4096)


def rows():
    torch.manual_seed(0)
    ids = [torch.randint(300, (30,)).tolist() for _ in range(8)]
    norm = 1 / (128 * 3000)  # a token's share of the loss is as small as in a run of 128 responses
    return [minirl.Row(ids=x, prompt_length=10, mu_logprobs=[-6.0] * 20, norm=norm,
                       coefficient=(-0.5, 0.5)[i % 2]) for i, x in enumerate(ids)]


def one_step(policy, optimizer, schedule):
    loss = minirl.accumulate(policy, rows(), REAL)
    return loss, minirl.optimizer_step(policy, optimizer, schedule, REAL)


@pytest.mark.slow
@pytest.mark.core
def test_an_overflow_skips_one_step_lowers_the_scale_and_changes_nothing_else():
    """Clipping and the optimizer then get the gradient without its scale."""
    trained = policy(dtype="float16")
    optimizer, schedule = make_optimizer(trained, settled(lr=1e-3))
    trained.loss_scale._init_scale = 2.0**40
    before = trained_weights(trained)
    loss, norm = one_step(trained, optimizer, schedule)
    assert not math.isfinite(norm) and math.isfinite(loss)
    assert not optimizer.state and schedule.last_epoch == 0
    assert trained.loss_scale.get_scale() == 2.0**39
    while not math.isfinite(norm):
        _, norm = one_step(trained, optimizer, schedule)
    assert 1 < trained.loss_scale.get_scale() < 2.0**39 and schedule.last_epoch == 1
    assert not any(torch.equal(p, before[name]) for name, p in trained_weights(trained).items())
    exact = policy()
    _, wanted = one_step(exact, *make_optimizer(exact, settled(lr=1e-3)))
    assert norm == pytest.approx(wanted, rel=0.02)
