"""recipes/trl_ada.py: its gradient is that of minirl.py on any number of processes."""
import json
import math
import random
import shlex
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("trl", "1.16.0")

import minirl
from ada_sampler import Group, Sample, set_advantages
from helpers import HANG, ROOT, lines, run_program
from parts.config import Config
from parts.engine import Engine
from parts.files import append
from parts.policy import load_policy
from parts.run_folder import note_start
from rewards import open_grader
from trl_step import one_step, pools_of
from world import settled

SHORT = ["--batch-prompts", "4", "--max-tokens", "24", "--warmup-steps", "1", "--eval-questions",
         "4", "--eval-k", "2"]


@pytest.fixture(scope="module")
def recipe():
    """The script, with one engine for all trainers of this file."""
    import trl_ada

    started, own = [], trl_ada.start_engine

    def shared(config, model, stops):
        started.extend([] if started else [own(config, model, stops)])
        started[0].sampling |= dict(temperature=config.temperature, stop_token_ids=stops)
        # --full has left other weights, and a head
        files = load_file(Path(model.path, "model.safetensors"))
        files["lm_head.weight"] = files["model.embed_tokens.weight"]
        weights = dict(weights_iterator=iter(files.items()))
        started[0].llm.collective_rpc("reload_weights", kwargs=weights)
        return started[0]

    trl_ada.start_engine = shared
    yield trl_ada
    trl_ada.start_engine = own


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------------------ the gradient
def minirl_gradient(trainer, config=None, rows=None) -> dict:
    """What minirl.accumulate makes of the trainer's weights and groups (or of these rows)."""
    own = trainer.config
    policy = load_policy(trainer.model.name_or_path, dtype="float32", rank=own.lora_rank,
                         alpha=own.lora_alpha, seed=1, device="cpu")
    theirs, full = dict(trainer.model.named_parameters()), not hasattr(trainer.model, "peft_config")
    for name, p in policy.named_parameters():
        if full:
            p.requires_grad = "lora_" not in name
        elif p.requires_grad:
            p.data.copy_(theirs[name].data)
    config = config or replace(own, mini_batches=1)
    rows = rows or minirl.split_into_mini_batches(trainer.groups, config, random.Random(0))[0]
    minirl.accumulate(policy, rows, config)
    found = gradient_of(policy)
    return {name.removeprefix("base_model.model.").replace(".base_layer", "") if full else name: p
            for name, p in found.items() if "embed_tokens" not in name}  # it is the head, too


def gradient_of(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(a: dict, b: dict) -> float:
    """The largest difference, of what is in `b`."""
    assert a.keys() >= b.keys() and len(b) > 20  # tensors
    return max((a[name] - p).abs().max().item() for name, p in b.items())


@pytest.mark.engine
@pytest.mark.parametrize("flags", [
    "--sampler ada-pos --weighting unbiased --micro-rows 8",
    "--sampler uniform --n 6 --advantage group-std --temperature 0.8",
    "--sampler ada-balance --advantage leave-one-out --mini-batches 2",
    "--full", "--N 1 --drop-unresolved"])
def test_the_gradient_is_minirls(recipe, flags):
    """But for the divisor, in which a dropped prompt stays."""
    trainer, gradients = one_step(recipe, flags.split())
    assert len(gradients) == trainer.config.mini_batches and len(pools_of(trainer.groups)) == 6
    logged = lines(f"runs/{trainer.config.name}/metrics.jsonl")
    assert [row["step"] for row in logged] == [1] * len(gradients)
    # TRL cuts mini-batches out of shuffled rows; their gradients' mean is that of the whole batch
    mean = {name: sum(g[name] for g in gradients) / len(gradients) for name in gradients[0]}
    kept = sum(bool(group.kept) for group in trainer.groups) / 6
    assert 0 < kept < 1 if "drop" in flags else kept == 1
    ours = {name: kept * p for name, p in minirl_gradient(trainer).items()}
    assert max(p.abs().max() for p in ours.values()) > 1e-4
    # the engine had the trainer's weights: one_step has moved them after it was started
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert distance(mean, ours) < 1e-6


@pytest.mark.engine
def test_off_policy_clip_and_correction_are_minirls(recipe):
    """pi_old and mu moved away at random from what they are: Eq. 7's mask and weight show."""
    trainer, _ = one_step(recipe, ["--name", "off-policy"])
    batch = trainer._buffered_inputs[0]
    noise = torch.Generator().manual_seed(0)
    shape = batch["old_per_token_logps"].shape
    old = batch["old_per_token_logps"] + 0.25 * torch.randn(shape, generator=noise)
    old_over_mu = (0.25 * torch.randn(shape, generator=noise)).exp()
    trainer.model.zero_grad()
    moved = batch | dict(old_per_token_logps=old, importance_sampling_ratio=old_over_mu)
    trainer._compute_loss(trainer.model, moved).backward()

    config, rows = replace(trainer.config, mini_batches=2), []
    for i, advantage in enumerate(batch["advantages"].tolist()):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        real = batch["completion_mask"][i].bool()
        mu = old[i][real] - old_over_mu[i][real].log()
        rows.append(minirl.Row(
            ids=prompt + batch["completion_ids"][i][real].tolist(), prompt_length=len(prompt),
            mu_logprobs=mu.tolist(), coefficient=advantage, old_logprobs=old[i][real],
            norm=1 / (len(batch["advantages"]) * config.max_tokens)))
    ours = minirl_gradient(trainer, config, rows)
    mask_T, weight_T = (torch.cat([getattr(row, name) for row in rows])
                        for name in ("mask", "weight"))
    assert 0 < (mask_T == 0).sum() < len(mask_T) / 2
    assert weight_T.max() < config.weight_cap  # where TRL's cap is another
    assert distance(gradient_of(trainer.model), ours) < 1e-6


def test_a_sample_has_a_seed_of_its_own():
    """Also where its prompt comes back in a later step, and whichever process draws it."""
    from recipes.trl_engine import SeededEngine

    seeds, engine = [], SimpleNamespace(submit=lambda *_, seed: seeds.append(seed))
    for seed, step, name, place in "70a0", "80a0", "71a0", "70b0", "70a1", "70a0":
        problem = SimpleNamespace(id=name, prompt_ids=[1])
        SeededEngine(engine, Config(seed=seed), step).submit((len(seeds), place), problem)
    assert len({*seeds}) == 5 and seeds[0] == seeds[5]


# ------------------------------------------------------------------------------ several processes
def launch(kind: str, *flags) -> None:
    """Run trl_step.py in two processes by a file of recipes/launch.
    On two machines each process has a launcher of its own."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [Path(sys.executable).with_name("accelerate"), "launch",
               "--config_file", ROOT / f"recipes/launch/{kind}.yaml", "--num_processes", "2",
               "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    started = [subprocess.Popen(
        [*command, "--machine_rank", str(machine), ROOT / "tests/trl_step.py", ".", *flags])
        for machine in range(1 + (kind == "two_machines"))]
    assert not any([program.wait(HANG) for program in started])


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("kind, flags", [
    ("two_machines", "--sampler ada-balance --weighting unbiased"),
    ("fsdp2", "--micro-rows 6"), ("fsdp2", "--full --micro-rows 6")])
def test_two_processes_draw_and_learn_what_one_does(recipe, kind, flags):
    launch(kind, *flags.split(), "--name", "two")
    first, second = (torch.load(f"rank-{rank}.pt") for rank in (0, 1))
    trainer, (gradient,) = one_step(recipe, flags.split())
    assert len(first["pools"]) == len(second["pools"]) == 3
    assert first["pools"] | second["pools"] == pools_of(trainer.groups)
    assert distance(first["gradient"], second["gradient"]) == 0
    assert first["gradient"].keys() == gradient.keys()
    assert distance(first["gradient"], gradient) < 1e-6


# ------------------------------------------------------------------------------ a training
def train(recipe, *flags):
    """In this process alone."""
    with open_grader("", 0.7) as grader:
        trainer = recipe.make_trainer(*recipe.parse([*SHORT, *map(str, flags)]), grader)
        trainer.train(resume_from_checkpoint=trainer.newest)
    trainer.lock.close()
    return trainer


@pytest.mark.engine
def test_a_resumed_run_ends_as_if_nothing_had_happened(recipe):
    flags = ["--trl", '{"loss_type": "cispo", "epsilon_high": 5.0}']  # what TRL alone knows
    train(recipe, *flags, "--name", "whole", "--steps", 4)
    train(recipe, *flags, "--name", "run", "--steps", 2)
    append(Path("runs/run/metrics.jsonl"), dict(step=3))  # logged, but not saved
    resumed = train(recipe, "--name", "run", "--steps", 4, "--resume")
    assert resumed.args.loss_type == "cispo"
    whole, parts = (lines(f"runs/{name}/metrics.jsonl") for name in ("whole", "run"))
    assert [row["step"] for row in parts] == [1, 2, 3, 4]
    for name in ("samples", "reward_pool", "grad_norm"):
        assert [row[name] for row in parts] == pytest.approx([row[name] for row in whole], 1e-3)
    before, undisturbed, after = (saved(f"runs/{path}") for path in (
        "whole/checkpoints/step-000003", "whole/checkpoints/step-000004",
        "run/checkpoints/step-000004"))
    # the norm: AdamW divides by a gradient's own size, so one next to 0 makes rounding large
    assert (undisturbed - after).norm() < 1e-2 * (undisturbed - before).norm()


def saved(checkpoint: str):
    """All weights of the adapter, in one vector."""
    weights = load_file(Path(checkpoint, "adapter_model.safetensors"))
    return torch.cat([weight.flatten() for _, weight in sorted(weights.items())])


@pytest.mark.engine
def test_what_is_kept_is_evaluated(recipe, capsys):
    train(recipe, "--full", "--steps", 3, "--keep-every", 2, "--name", "run", "--stop", "?")
    kept = sorted(Path("runs/run/checkpoints").glob("step-*"))
    assert [path.name for path in kept] == ["step-000002", "step-000003"]
    command = capsys.readouterr().out.rpartition("evaluate it with ")[2]
    for folder in kept:
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        assert ends == [30, 346]  # "?" and <|endoftext|>
    run_program(*shlex.split(command.splitlines()[0])[1:], "--out", "out")
    assert len(lines("out/eval.jsonl")) == 8  # as many problems and samples as in the run
    assert json.loads(Path("out/protocol.json").read_text())["stop"] == [30, 346]


@pytest.mark.engine
@pytest.mark.parametrize("method, broken, words, steps", [
    ("prompt_logprobs", lambda engine, texts: [[-1.0] * (len(ids) - 1) for ids in texts],
     "Engine and trainer disagree: .log mu - log pi_old. is [1-9]", 0),
    ("reload", lambda *_: None, "log-probs changed by -?0.00", 2)])  # the first one's rate is 0
def test_an_engine_with_other_weights_ends_the_run(
        recipe, monkeypatch, method, broken, words, steps):
    monkeypatch.setattr(Engine, method, broken)
    with pytest.raises(SystemExit, match=words):
        train(recipe, "--steps", "3", "--name", "run")
    assert len(list(Path("runs/run/checkpoints").glob("step-*"))) == steps


@pytest.mark.slow  # it imports TRL
def test_what_trl_restores_cannot_be_changed(recipe):
    Path("runs/r/checkpoints/step-000001").mkdir(parents=True)
    started = settled(name="r", sync="merge")
    note_start(Path("runs/r"), asdict(started), [], [])
    Path("runs/r/trl.json").write_text("{}")
    assert recipe.parse("--name r --resume --steps 9".split())[1].steps == 9
    for changed in ("--lr 0.1", "--keep-every 9", "--full"):
        with pytest.raises(SystemExit):
            recipe.parse(f"--name r --resume {changed}".split())


@pytest.mark.slow  # it imports TRL
def test_a_prompt_has_n_rows_whatever_its_verdicts_are(recipe):
    pool = [Sample(i, 0, reward=reward) for i, reward in enumerate([math.nan, 0.0, math.nan, 0.0])]
    pool.append(Sample(4, 0, reward=1.0, correct=True))
    for config, coefficients in (
            (Config(n=4, M=5), [-1 / 3, -1 / 3, 2 / 3, 0.0]),
            (Config(n=4, M=5, drop_unresolved=True), [0.0] * 4)):
        group = Group(0, None, pool, rounds=1, outcome="too few wrong")
        set_advantages(group, config)
        assert [c for _, c in recipe.rows_of(group, 4)] == pytest.approx(coefficients)


# ------------------------------------------------------------------------------ what is refused
@pytest.mark.slow  # it imports TRL
@pytest.mark.parametrize("flags, words", [
    ("--sampler ada-est", "TRL takes n answers per prompt"),
    ("--batch-prompts 6 --micro-rows 5", "micro_rows = 5"),
    ("--full --lora-rank 8", "lora_rank has no effect with full"),
    ("--sync adapter", "sync must be merge"),
    ("--log-groups all", "log_groups has no effect in TRL"),
    ('--trl {"num_generations":9}', "multiple values for keyword argument 'num_generations'")])
def test_what_cannot_work_ends_in_a_sentence(recipe, monkeypatch, capsys, flags, words):
    monkeypatch.setattr(recipe, "WORLD", 2)
    monkeypatch.setattr(recipe, "start_engine", lambda *_: pytest.fail("an engine was started"))
    with open_grader("", 0.7) as grader, pytest.raises(SystemExit) as ended:
        recipe.make_trainer(*recipe.parse(flags.split()), grader)
    said = capsys.readouterr()
    assert words in f"{said.err}{said.out}{ended.value}" and ended.value.code
