"""recipes/trl_ada.py: TRL's gradient is minirl's on any number of processes; what it refuses."""
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext as nothing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", "1.16.0")

from conftest import ROOT
from helpers import HANG, lines, run_program
from trl_step import one_step, pools_of

SCRIPT, TINY = ROOT / "recipes/trl_ada.py", str(ROOT / "models/tiny")
SHORT = ["--batch-prompts", "4", "--max-tokens", "24", "--warmup-steps", "1", "--eval-questions",
         "4", "--eval-k", "2"]


@pytest.fixture(scope="module")
def recipe():
    """The script, with one engine for all trainers of this file."""
    import trl_ada

    started, own = [], trl_ada.ColocatedOnCpu

    class Shared(own):
        def _init_vllm(self):
            if not started:
                super()._init_vllm()
                started.append(self.llm)
            self.llm = started[0]

    trl_ada.ColocatedOnCpu = Shared
    yield trl_ada
    trl_ada.ColocatedOnCpu = own


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------------------ the gradient
def minirl_gradient(trainer, config=None, rows=None) -> dict:
    """What minirl.accumulate makes of the trainer's weights and groups (or of these rows)."""
    import minirl
    from parts.policy import load_policy

    own = trainer.config
    policy = load_policy(trainer.model.name_or_path, dtype="float32", rank=own.lora_rank,
                         alpha=own.lora_alpha, seed=1, device="cpu")
    theirs, full = dict(trainer.model.named_parameters()), own.full
    for name, p in policy.named_parameters():
        if full:
            p.requires_grad = "lora_" not in name
        elif p.requires_grad:
            p.data.copy_(theirs[name].data)
    config = config or replace(own, mini_batches=1)
    rows = rows or minirl.cut(trainer.groups, config, random.Random(0))[0]
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


def size(a: dict) -> float:
    return max(p.abs().max().item() for p in a.values())


@pytest.mark.engine
@pytest.mark.parametrize("flags", [
    "--sampler ada-pos --weighting unbiased --micro-rows 8",
    "--sampler uniform --n 6 --advantage group-std --temperature 0.8",
    "--sampler ada-balance --advantage leave-one-out --mini-batches 2",
    "--full"])
def test_the_gradient_is_minirls(recipe, flags):
    trainer, gradients = one_step(recipe, flags.split())
    assert len(gradients) == trainer.config.mini_batches and len(pools_of(trainer.groups)) == 6
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
    from parts.logprobs import Row

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
        rows.append(Row(prompt + batch["completion_ids"][i][real].tolist(), len(prompt),
                        mu.tolist(), advantage, old=old[i][real],
                        scale=1 / (len(batch["advantages"]) * config.max_tokens)))
    ours = minirl_gradient(trainer, config, rows)
    mask_T, weight_T = (torch.cat([getattr(row, name) for row in rows])
                        for name in ("mask", "weight"))
    assert 0 < (mask_T == 0).sum() < len(mask_T) / 2
    assert weight_T.max() < config.weight_cap  # where TRL's cap is another
    assert distance(gradient_of(trainer.model), ours) < 1e-6


@pytest.mark.engine
def test_a_dropped_prompt_stays_in_the_divisor(recipe):
    trainer, (gradient,) = one_step(recipe, ["--N", "1", "--drop-unresolved"])
    kept = sum(bool(group.kept) for group in trainer.groups)
    assert 0 < kept < 6
    scaled = {name: p * kept / 6 for name, p in minirl_gradient(trainer).items()}
    assert distance(gradient, scaled) < 1e-6


# ------------------------------------------------------------------------------ several processes
def launch(kind: str, *command, machine: int = 0, port: int = 0) -> subprocess.Popen:
    """`accelerate launch` with a file of recipes/launch, but two processes in all."""
    accelerate = Path(sys.executable).with_name("accelerate")
    return subprocess.Popen(
        [accelerate, "launch", "--config_file", ROOT / f"recipes/launch/{kind}.yaml",
         "--num_processes", "2", "--machine_rank", str(machine), "--main_process_ip", "127.0.0.1",
         "--main_process_port", str(port), *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.engine
@pytest.mark.parametrize("kind, flags", [
    ("two_machines", "--sampler ada-balance --weighting unbiased"), ("fsdp2", ""),
    ("fsdp2", "--full")])
def test_two_processes_draw_and_learn_what_one_does(recipe, tmp_path, kind, flags):
    step = [ROOT / "tests/trl_step.py", tmp_path, *flags.split(), "--name", "two"]
    port = free_port()
    started = [launch(kind, *step, machine=machine, port=port)
               for machine in range(1 + (kind == "two_machines"))]
    for program in started:
        said, _ = program.communicate(timeout=HANG)
        assert program.returncode == 0, said[-3000:]
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    trainer, (gradient,) = one_step(recipe, flags.split())
    assert len(first["pools"]) == len(second["pools"]) == 3
    assert first["pools"] | second["pools"] == pools_of(trainer.groups)
    assert distance(first["gradient"], second["gradient"]) == 0
    assert first["gradient"].keys() == gradient.keys()
    assert distance(first["gradient"], gradient) < 1e-6


# ------------------------------------------------------------------------------ a training
def train(recipe, *flags):
    from rewards import open_grader

    config = recipe.parse([*SHORT, *map(str, flags)])
    with open_grader("", 0.7) as grader:
        trainer = recipe.make_trainer(config, grader)
        trainer.train(resume_from_checkpoint=trainer.newest)
    return trainer


def weights(trainer) -> dict:
    return {name: p.detach() for name, p in trainer.model.named_parameters() if "lora_B" in name}


@pytest.mark.engine
def test_a_process_that_is_killed_ends_all_and_one_process_goes_on(recipe, tmp_path):
    """Two processes, one killed: the run is resumed by one, and ends as if nothing had happened."""
    trl = ["--trl", '{"loss_type": "cispo", "epsilon_high": 5.0}']  # it reaches TRL
    two = launch("one_machine", SCRIPT, *SHORT, *trl, "--name", "parts", "--steps", "999")
    saved = tmp_path / "runs/parts/checkpoints"
    while not (saved / "step-000002").exists():
        assert two.poll() is None, two.communicate()
        time.sleep(0.1)
    children = Path(f"/proc/{two.pid}/task/{two.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    said, _ = two.communicate(timeout=HANG)
    assert two.returncode != 0 and "is saved: continue with --resume" in said
    last = max(int(path.name[-6:]) for path in saved.glob("step-*"))
    whole = train(recipe, *trl, "--name", "whole", "--steps", last + 1, "--keep-every", 1)
    parts = train(recipe, "--name", "parts", "--steps", last + 1, "--resume")
    assert parts.args.loss_type == "cispo"
    assert pools_of(parts.groups) == pools_of(whole.groups)
    assert distance(weights(parts), weights(whole)) < 1e-5 < 1e-3 < size(weights(whole))
    rewards = [[row["reward_pool"] for row in lines(f"runs/{name}/metrics.jsonl")]
               for name in ("whole", "parts")]
    assert len(rewards[0]) == last + 1 and rewards[1] == pytest.approx(rewards[0])
    kept = [{path.name for path in Path(f"runs/{name}/checkpoints").iterdir()} - {"README.md"}
            for name in ("whole", "parts")]
    assert kept == [{f"step-{i + 1:06d}" for i in range(last + 1)},
                    {f"step-{i + 1:06d}" for i in (last - 1, last)}]
    evaluated(recipe.evaluation(parts.config, saved / f"step-{last + 1:06d}"))


def evaluated(command: str) -> None:
    """The command works, on four questions of two samples."""
    _, script, *flags = shlex.split(command)
    done = run_program(script, *flags, "--out", "out")
    assert done.returncode == 0, done.stdout
    assert len(lines("out/eval.jsonl")) == 8


@pytest.mark.engine
def test_all_weights_are_saved_and_evaluated(recipe):
    trainer = train(recipe, "--full", "--steps", 3, "--keep-every", 2, "--name", "full")
    saved = sorted(Path("runs/full/checkpoints").glob("step-*"))
    assert [path.name for path in saved] == ["step-000002", "step-000003"]  # the last one, too
    evaluated(recipe.evaluation(trainer.config, saved[0]))


# ------------------------------------------------------------------------------ the probe
@pytest.mark.slow  # it imports TRL
@pytest.mark.parametrize("off, follows, words", [
    (0, 1, ""), (0, 0, "changed by 0.00"), (0.01, 0.5, "changed by 0.50"), (1, 1, "disagree, by")])
def test_the_probe_sees_weights_that_do_not_arrive(recipe, off, follows, words):
    from recipes.trl_engine import Probe

    moves = iter([torch.zeros(300), 0.1 * torch.randn(300)])
    engine = SimpleNamespace(prompt_logprobs=lambda texts: [(off + follows * move).tolist()],
                             llm=SimpleNamespace(llm_engine=SimpleNamespace(
                                 model_config=SimpleNamespace(dtype=torch.bfloat16, model=TINY))))
    trainer = SimpleNamespace(
        engine=engine, config=SimpleNamespace(dtype="bfloat16"), args=SimpleNamespace(device="cpu"),
        accelerator=SimpleNamespace(gather=lambda x: x))
    probe = Probe([])
    probe.of_trainer = lambda trainer: move
    with pytest.raises(SystemExit, match=words) if words else nothing():
        for move in moves:
            probe.ask(trainer)
    assert probe.answered == (not words)


# ------------------------------------------------------------------------------ what is refused
def test_another_version_of_trl_gets_one_sentence(tmp_path):
    other = tmp_path / "trl-1.15.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.15.0\n")
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=HANG)
    assert done.returncode == 1
    assert done.stderr == (
        "recipes/trl_ada.py replaces private methods of TRL 1.16.0, and installed is 1.15.0: "
        "pip install --no-deps trl==1.16.0\n")


@pytest.mark.slow  # it imports TRL
@pytest.mark.parametrize("flags, words", [
    ("--sampler ada-est", "ada-est needs more samples of some prompts, or other"),
    ("--sampler gvm", "gvm needs more"),
    ("--sampler dapo", "dapo needs more"),
    ("--n 1 --sampler uniform --advantage positives-only", "at least 2 samples"),
    ("--batch-prompts 7", "batch_prompts = 7 with n = 4 cannot be cut evenly into 2 processes"),
    ("--batch-prompts 6 --mini-batches 5", "mini_batches = 5"),
    ("--batch-prompts 6 --micro-rows 5", "micro_rows = 5"),
    ("--full --data sums.jsonl", "name other problems as eval_data"),
    ("--dtype float16", "float16"), ("--sync adapter", "TRL hands merged weights over"),
    ("--log-groups all", "nrecognized option"),
])
def test_what_cannot_work_ends_in_a_sentence(recipe, monkeypatch, capsys, flags, words):
    Path("sums.jsonl").write_text(json.dumps(dict(problem="1+1", answer="2")))
    monkeypatch.setattr(recipe, "WORLD", 2)
    with pytest.raises(SystemExit) as ended:
        recipe.parse(flags.split())
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert words in said.err + said.out


@pytest.mark.slow  # it imports TRL
@pytest.mark.parametrize("flags, words", [
    (["--trl", '{"num_generations": 9}'], "--trl cannot set num_generations"),
    (["--trl", "[1]"], "--trl must be a JSON object"),
    (["--trl", '{"los": 1}'], "unexpected keyword argument 'los'"),
    (["--batch-prompts", "6000"], "5999 problems are less than one batch of 6000"),
])
def test_what_shows_later_still_ends_before_the_engine(recipe, flags, words):
    from rewards import open_grader

    with open_grader("", 0.7) as grader, pytest.raises(SystemExit, match=words):
        recipe.make_trainer(recipe.parse(flags), grader)
