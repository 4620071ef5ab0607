"""recipes/trl_ada.py: TRL's gradient is minirl's, on one process and on two; what it refuses."""
import importlib.metadata
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from conftest import ROOT
from helpers import HANG, Program
from trl_step import one_step, pools_of

SCRIPT = ROOT / "recipes" / "trl_ada.py"
STEP = ["--batch-prompts", "6"]


def as_torchrun(rank: int, world: int, port: int) -> dict:
    """The variables that torchrun sets, where another process keeps the common dictionary."""
    return dict(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_PORT=str(port),
                LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="localhost", TORCHELASTIC_RUN_ID="test",
                TORCHELASTIC_USE_AGENT_STORE="True")


def together(world: int, script: str, *flags, cwd: Path) -> None:
    """As `torchrun --nproc-per-node WORLD script ...`, of forks."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    started = [Program(script, *flags, cwd=cwd, env=as_torchrun(rank, world, store.port))
               for rank in range(world)]
    assert [program.wait() for program in started] == [0] * world, started[0].text()[-3000:]


@pytest.fixture(scope="module")
def recipe():
    """The script, with one engine for all trainers of this file."""
    import trl_ada

    if importlib.metadata.version("trl") != trl_ada.TESTED:
        pytest.skip("another version of TRL")
    started, own = [], trl_ada.VLLMOnCpu

    def shared(model, **how):
        if not started:
            started.append(own(model, **how))
        started[0].model = model
        return started[0]

    trl_ada.VLLMOnCpu = shared
    yield trl_ada
    trl_ada.VLLMOnCpu = own


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def minirl_policy(trainer):
    """minirl.py's own model, with the trainer's adapter."""
    from parts.policy import load_policy

    config = trainer.config
    policy = load_policy(trainer.model.name_or_path, dtype="float32", rank=config.lora_rank,
                         alpha=config.lora_alpha, seed=1, device="cpu")
    theirs = dict(trainer.model.named_parameters())
    for name, p in policy.named_parameters():
        if p.requires_grad:
            p.data.copy_(theirs[name].data)
    return policy


def gradient_of(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def minirl_gradient(trainer) -> dict:
    """What minirl.accumulate makes of the trainer's weights and groups."""
    import minirl

    policy, config = minirl_policy(trainer), replace(trainer.config, mini_batches=1)
    mini, = minirl.cut(trainer.groups, config, random.Random(0))
    minirl.accumulate(policy, mini, config)
    return gradient_of(policy)


def distance(a: dict, b: dict) -> float:
    assert a.keys() == b.keys() and len(a) > 20  # tensors
    return max((a[name] - b[name]).abs().max().item() for name in a)


def size(a: dict) -> float:
    return max(p.abs().max().item() for p in a.values())


# ------------------------------------------------------------------------------ the gradient
@pytest.mark.engine
@pytest.mark.parametrize("flags", [
    ["--sampler", "ada-pos", "--weighting", "unbiased", "--micro-rows", "8"],
    ["--sampler", "uniform", "--n", "6", "--advantage", "group-std", "--temperature", "0.8"],
    ["--sampler", "ada-balance", "--advantage", "leave-one-out", "--mini-batches", "2"],
], ids=" ".join)
def test_the_gradient_is_minirls(recipe, flags):
    trainer, gradients = one_step(recipe, STEP + flags)
    assert len(gradients) == trainer.config.mini_batches
    # TRL cuts mini-batches out of shuffled rows; their gradients' mean is that of the whole batch
    mean = {name: sum(g[name] for g in gradients) / len(gradients) for name in gradients[0]}
    ours = minirl_gradient(trainer)
    assert size(ours) > 1e-4
    # the engine had the trainer's weights: one_step has moved them after it was started
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert distance(mean, ours) < 1e-6


@pytest.mark.engine
def test_off_policy_clip_and_correction_are_minirls(recipe):
    """pi_old and mu moved away at random from what they are: Eq. 7's mask and weight show."""
    import minirl
    from parts.logprobs import Row

    trainer, _ = one_step(recipe, [*STEP, "--name", "off-policy"])
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
        rows.append(Row(prompt + batch["completion_ids"][i][real].tolist(), len(prompt),
                        mu.tolist(), advantage, old=old[i][real],
                        scale=1 / (len(batch["advantages"]) * config.max_tokens)))
    policy = minirl_policy(trainer)
    minirl.accumulate(policy, rows, config)
    mask_T, weight_T = (torch.cat([getattr(row, name) for row in rows])
                        for name in ("mask", "weight"))
    assert 0 < (mask_T == 0).sum() < len(mask_T) / 2
    assert weight_T.max() < config.weight_cap  # where TRL's cap is another
    assert distance(gradient_of(trainer.model), gradient_of(policy)) < 1e-6


@pytest.mark.engine
def test_a_dropped_prompt_stays_in_the_divisor(recipe):
    trainer, (gradient,) = one_step(
        recipe, [*STEP, "--N", "1", "--drop-unresolved"])
    kept = sum(bool(group.kept) for group in trainer.groups)
    assert 0 < kept < 6
    scaled = {name: p * kept / 6 for name, p in minirl_gradient(trainer).items()}
    assert distance(gradient, scaled) < 1e-6


@pytest.mark.engine
def test_two_processes_draw_and_learn_what_one_does(recipe, tmp_path):
    flags = [*STEP, "--sampler", "ada-balance", "--weighting", "unbiased"]
    together(2, "tests/trl_step.py", tmp_path, *flags, "--name", "two", cwd=tmp_path)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    trainer, (gradient,) = one_step(recipe, flags)
    assert len(first["pools"]) == len(second["pools"]) == 3
    assert first["pools"] | second["pools"] == pools_of(trainer.groups)
    assert distance(first["gradient"], second["gradient"]) == 0
    assert distance(first["gradient"], gradient) < 1e-6


# ------------------------------------------------------------------------------ a training
def train(recipe, flags: list[str]):
    from rewards import open_grader

    config, own = recipe.parse(list(flags))
    with open_grader("", 0.7) as grader:
        trainer = recipe.make_trainer(config, own, grader)
        trainer.train(resume_from_checkpoint=config.resume)
        trainer.save_model()
    return trainer


def weights(trainer) -> dict:
    return {name: p.detach() for name, p in trainer.model.named_parameters() if "lora_B" in name}


@pytest.mark.engine
def test_a_resumed_training_goes_on_where_it_was(recipe, tmp_path):
    """Another of TRL's losses, too: --trl reaches TRL."""
    trl = ["--trl", '{"save_steps": 1, "loss_type": "cispo", "epsilon_high": 5.0}']
    flags = ["--batch-prompts", "4", "--max-tokens", "24", "--warmup-steps", "1", *trl]
    whole = train(recipe, [*flags, "--steps", "3", "--name", "whole"])
    train(recipe, [*flags, "--steps", "2", "--name", "parts"])
    parts = train(recipe, [*flags, "--steps", "3", "--name", "parts", "--resume"])
    assert whole.args.loss_type == "cispo"
    assert pools_of(parts.groups) == pools_of(whole.groups)
    assert distance(weights(parts), weights(whole)) < 1e-6
    assert size(weights(whole)) > 1e-3
    assert (tmp_path / "runs" / "whole" / "adapter_model.safetensors").exists()


# ------------------------------------------------------------------------------ what is refused
def test_another_version_of_trl_gets_one_sentence(tmp_path):
    other = tmp_path / "trl-1.15.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.15.0\n")
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=HANG)
    assert done.returncode == 1
    assert done.stderr == (
        "recipes/trl_ada.py replaces a private method of TRL 1.16.0, and installed is 1.15.0: "
        "pip install --no-deps trl==1.16.0\n")


@pytest.mark.slow  # it imports TRL
@pytest.mark.parametrize("flags, words", [
    ("--sampler ada-est", "ada-est keeps more samples of some"),
    ("--sampler gvm", "gvm keeps more samples of some"),
    ("--sampler dapo", "dapo tries other prompts in the place of silent ones"),
    ("--n 1 --sampler uniform --advantage positives-only", "at least 2 samples"),
    ("--batch-prompts 7", "batch_prompts = 7 with n = 4 cannot be cut evenly into 2 processes"),
    ("--batch-prompts 6 --mini-batches 5", "mini_batches = 5"),
    ("--batch-prompts 6 --micro-rows 5", "micro_rows = 5"),
    ("--full", "full and float16 need a GPU"),
    ("--dtype float16", "full and float16 need a GPU"),
    ("--log-groups all", "log_groups has no effect in TRL"),
])
def test_what_cannot_work_ends_in_a_sentence(recipe, monkeypatch, capsys, flags, words):
    monkeypatch.setattr(recipe, "WORLD", 2)
    with pytest.raises(SystemExit) as ended:
        recipe.parse(flags.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("trl_ada.py: ") and words in said and said.count("\n") == 1


@pytest.mark.slow  # it imports TRL
@pytest.mark.parametrize("flags, words", [
    (["--trl", '{"num_generations": 9}'], "--trl cannot set num_generations, only loss_type"),
    (["--trl", "[1]"], "--trl must be a JSON object"),
    (["--trl", "{loss"], "--trl must be a JSON object"),
    (["--resume"], "has no checkpoint"),
    (["--batch-prompts", "6000"], "5999 problems are less than one batch of 6000"),
])
def test_what_shows_later_still_ends_before_the_engine(recipe, flags, words):
    from rewards import open_grader

    config, own = recipe.parse(list(flags))
    with open_grader("", 0.7) as grader, pytest.raises(SystemExit, match=words):
        recipe.make_trainer(config, own, grader)
