"""Several processes are one run: torchrun recipes/many_gpus.py, on gloo.

docs/many_gpus.md says what is promised."""
import contextlib
import functools
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sampler_oracles as oracles
from helpers import HANG, Program, lines, run_program
from ada_sampler import Estimator, SamplerConfig, collect
from conftest import ROOT
from parts import files
from parts.config import Config
from parts.stop import Interrupted
from recipes import many_gpus as ranks
from whole_runs import rows

NAME = "tiny-ada-balance-seed0"


def facts(folder: Path, log: str) -> list[dict]:
    """Without what the clock says, and the engine steps: fewer where several share a batch."""
    return [{key: value for key, value in row.items() if key != "engine_steps"}
            for row in rows(folder / log)]


def nearly(value):
    """For comparing logs: numbers within 1e-6 and a thousandth."""
    if isinstance(value, dict):
        return {key: nearly(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [nearly(inner) for inner in value]
    return pytest.approx(value, abs=1e-6, rel=1e-3) if isinstance(value, float) else value


def same_gradients(ours: list, theirs: list) -> bool:
    """Within 1e-6, and within a thousandth of the largest entry."""
    return len(ours) == len(theirs) > 0 and all(
        (a - b).abs().max() <= min(1e-6, 1e-3 * b.abs().max()) for a, b in zip(ours, theirs))


# ------------------------------------------------------------------- without an engine: all faults
@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Every scene of small_ranks.py, played: the folder, and name -> what happened."""
    folder = tmp_path_factory.mktemp("small")
    done = run_program("tests/small_ranks.py", folder)
    assert done.returncode == 0, done.stdout[-3000:]
    return folder, json.loads((folder / "found.json").read_text())


def gradients(small, scene: str, rank: int = 0, again: str = "") -> list:
    return torch.load(small[0] / scene / f"gradients-{rank}{again}.pt")


def run_of(small, scene: str) -> Path:
    folder, = (small[0] / scene / "runs").iterdir()
    return folder


def last_adapter(small, scene: str) -> bytes:
    return (run_of(small, scene) / "checkpoints/step-000006/adapter_model.safetensors").read_bytes()


def said(small, scene: str, sentence: str) -> int:
    """How many processes said it."""
    return sum(bool(re.search(sentence, text, re.M)) for text in small[1][scene]["texts"])


@pytest.mark.slow
@pytest.mark.parametrize("several, one", [
    ("whole", "one"), ("few", "few alone"), ("experts", "experts alone")])
def test_several_processes_train_as_one_does(small, several, one):
    logs = {}
    for scene in (several, one):
        logs[scene] = facts(run_of(small, scene), "metrics.jsonl")
        logs[f"{scene}, evaluated"] = facts(run_of(small, scene), "eval.jsonl")
    assert logs[several] == nearly(logs[one])
    assert logs[f"{several}, evaluated"] == nearly(logs[f"{one}, evaluated"])
    assert same_gradients(gradients(small, several), gradients(small, one))
    assert all(map(torch.equal, gradients(small, several), gradients(small, several, 1)))


@pytest.mark.slow
def test_the_scenes_are_what_they_are_named_after(small):
    starts = json.loads((run_of(small, "whole") / "config.json").read_text())["starts"]
    assert [start["processes"] for start in starts] == [2]
    # never more than two rows with a gradient, for three processes, and steps without any
    few = lines(run_of(small, "few") / "metrics.jsonl")
    assert {row["optimizer_steps"] for row in few} == {0, 1}
    experts = lines(run_of(small, "experts") / "metrics.jsonl")
    assert 0 < experts[0]["routes_agree_all"] < 1


@pytest.mark.slow
def test_the_explorer_gets_the_tokens_of_rows_that_others_have_trained_on(small):
    def pools(scene):
        return [[{key: value for key, value in s.items() if key not in ("submit", "finish")}
                 for s in row["pool"]] for row in lines(run_of(small, scene) / "groups.jsonl")]

    assert pools("whole") == nearly(pools("one"))
    places = [row["place"] for row in lines(run_of(small, "whole") / "groups.jsonl")]
    assert places == [0, 1] * 6
    trained = [s for pool in pools("whole") for s in pool if s.get("coefficient")]
    assert len(trained) > 20 and all("theta" in s and "mini" in s for s in trained)


@pytest.mark.slow
@pytest.mark.parametrize("scene, failed", [
    ("sampling", "The sampling failed.*"), ("updating", "The update failed.*"),
    ("syncing", "The sync failed.*"), ("recording", "^")])
def test_a_killed_process_ends_all_with_one_sentence_and_what_was_learnt(small, scene, failed):
    assert small[1][scene]["hung"] == []
    step = 3 if scene == "syncing" else 4  # the step whose weights did not arrive is undone
    assert said(small, scene, f"{failed}another process.*; everything up to step {step}"
                              " is saved: continue with --resume") == 1
    assert said(small, scene, "Traceback") == 0


@pytest.mark.slow
def test_when_the_first_is_killed_another_speaks_and_promises_what_is_on_the_disk(small):
    """It was sampling for step 4, and saves every second step."""
    assert small[1]["the first"]["hung"] == []
    assert said(small, "the first", "failed.*another process.*; everything up to step 2 is saved: "
                                    "continue with --resume") == 1
    assert said(small, "the first", "step [34] is saved|Traceback") == 0


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["all told", "one told"])
def test_a_signal_while_one_waits_for_the_others_stops_all_of_them_saved(small, scene):
    assert small[1][scene]["hung"] == []
    assert said(small, scene, "stopped after step 4; continue with: torchrun") == 1
    assert said(small, scene, "failed|Traceback") == 0
    assert said(small, scene, "stopping with a checkpoint") == (scene == "all told")


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["sampling", "syncing", "the first", "all told"])
def test_what_two_go_on_with_is_bit_by_bit_what_was_never_stopped(small, scene):
    assert said(small, f"{scene}, resumed", "continuing after step [234]") == 1
    assert last_adapter(small, scene) == last_adapter(small, "whole")
    log = facts(run_of(small, scene), "metrics.jsonl")
    assert log == facts(run_of(small, "whole"), "metrics.jsonl")


@pytest.mark.slow
def test_what_two_have_saved_one_goes_on_with(small):
    after = gradients(small, "updating", again="-again")
    assert same_gradients(after, gradients(small, "whole")[-len(after):])
    starts = json.loads((run_of(small, "updating") / "config.json").read_text())["starts"]
    assert [start.get("processes", 1) for start in starts] == [2, 1]


@pytest.mark.slow
def test_one_that_is_short_of_memory_ends_all_with_its_sentence(small):
    assert small[1]["memory"]["hung"] == []
    assert said(small, "memory", "Out of memory in the update: lower --micro-tokens") == 1
    assert said(small, "memory", "failed|Traceback") == 0


@pytest.mark.slow
@pytest.mark.parametrize("scene, sentence", [
    ("refused", "sampler gvm decides over the whole batch"),
    ("other problems", "do not see the same settings, problems and checkpoints")])
def test_what_is_wrong_is_said_once_and_before_an_engine_starts(small, scene, sentence):
    assert small[1][scene]["hung"] == []
    assert said(small, scene, sentence) == 1 and said(small, scene, "Traceback") == 0


# ------------------------------------------------------------------------------ single parts
@pytest.mark.parametrize("settings, sentence", [
    (dict(sampler="gvm"), "gvm decides over the whole batch"),
    (dict(sampler="dapo"), "dapo decides over the whole batch"),
    (dict(batch_prompts=7), "some of 8 processes without a prompt"),
    (dict(sampler="ada-est"), "")])
def test_what_cannot_be_shared_out_is_refused(monkeypatch, settings, sentence):
    config = Config(**dict(batch_prompts=8) | settings)
    ranks.require_shareable(config)  # of one process it can
    monkeypatch.setattr(ranks, "WORLD", 8)
    refused = pytest.raises(SystemExit, match=sentence) if sentence else contextlib.nullcontext()
    with refused:
        ranks.require_shareable(config)


@pytest.mark.parametrize("gpus, visible, place, own", [
    (2, "", 0, "0"), (2, "", 1, "1"), (2, "4,6", 1, "6"), (2, "GPU-aa,GPU-bb", 0, "GPU-aa"),
    (0, "", 1, "")])
def test_every_process_of_a_machine_sees_a_gpu_of_its_own(monkeypatch, gpus, visible, place, own):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    ranks.claim_gpu(place, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="started 3 processes here.*2 GPU.*--nproc-per-node 2"):
        ranks.claim_gpu(0, 3)


class Sharing(oracles.Engine):
    """Takes the seed from `SeededEngine`; its draws depend on the prompt and the sample only."""

    def submit(self, key, problem, seed):
        super().submit(key, problem)


def steps_of(rank, world, monkeypatch, cfg):
    """What a rank knows after three steps in which all sample their parts, one after the other.

    world 0: without any of it."""
    def sampled(of_rank):
        monkeypatch.setattr(ranks, "RANK", of_rank)
        return collect(problems, cfg, ranks.SeededEngine(Sharing(step)), oracles.Grader(),
                       estimator=estimator, part=slice(of_rank, None, world))

    problems, estimator, found = oracles.mixed(9), Estimator(cfg), []
    for step in range(3):
        if world:
            parts = [sampled(of_rank) for of_rank in range(world)]
            monkeypatch.setattr(ranks, "RANK", rank)
            monkeypatch.setattr(ranks, "gather", lambda own: parts)
            groups = ranks.split_prompts(
                lambda *_, **__: parts[rank], problems, cfg, Sharing(step), None,
                estimator=estimator)
        else:
            groups = collect(problems, cfg, oracles.Engine(step), oracles.Grader(),
                             estimator=estimator)
        found.append([(g.index, g.rows(), oracles.outcomes([g])) for g in groups])
    return found, estimator.state_dict()


@pytest.mark.parametrize("rule", ["ada-est", "ada-balance"])
def test_every_rank_settles_and_remembers_the_prompts_of_all(monkeypatch, rule):
    cfg, seen = SamplerConfig(sampler=rule), []
    for world in (0, 1, 2, 3):
        monkeypatch.setattr(ranks, "WORLD", world)
        seen += [steps_of(rank, world, monkeypatch, cfg) for rank in range(world or 1)]
    assert all(one == seen[0] for one in seen)
    assert len(seen[0][1]) == (9 if rule == "ada-est" else 0)


def test_a_sample_has_the_seed_of_its_place_in_the_batch_whoever_draws_it(monkeypatch):
    def seeds(rank, world):
        monkeypatch.setattr(ranks, "RANK", rank)
        monkeypatch.setattr(ranks, "WORLD", world)
        found = {}
        inner = SimpleNamespace(step=None, submit=lambda key, seed: found.update({key: seed}))
        for key in itertools.product(range(4 // world), range(2)):
            ranks.SeededEngine(inner).submit(key)
        return {(rank + world * prompt, s): seed for (prompt, s), seed in found.items()}

    alone = seeds(0, 1)
    assert len(set(alone.values())) == 8 and seeds(0, 2) | seeds(1, 2) == alone


def test_whoever_has_no_row_of_a_mini_batch_gets_the_gradient_of_the_others(monkeypatch):
    others = torch.arange(6.0)
    monkeypatch.setattr(ranks, "GROUP", SimpleNamespace(
        allreduce=lambda own: SimpleNamespace(wait=lambda: own[0].add_(others))))
    idle, working = (torch.nn.ParameterList([torch.zeros(2, 2), torch.zeros(2)]) for _ in range(2))
    working[1].grad = torch.ones(2)
    for policy, more in ((idle, 0), (working, 1)):
        ranks.sum_gradients(policy)
        assert policy[0].grad.tolist() == [[0, 1], [2, 3]]
        assert policy[1].grad.tolist() == [4 + more, 5 + more]


def test_everybody_stops_an_evaluation_when_one_does(monkeypatch):
    def interrupted(*_):
        raise Interrupted

    for work, other in ((interrupted, [2]), (lambda *_: [1], None)):
        monkeypatch.setattr(ranks, "gather", lambda value: [value, other])
        with pytest.raises(Interrupted):
            ranks.split_questions(work, None, None, [1, 2], 1)


def test_every_function_of_the_table_is_there():
    for module, name, _ in ranks.table():
        assert callable(getattr(importlib.import_module(module), name)), (module, name)


def test_nothing_but_the_recipe_knows_of_several_processes():
    own = [ROOT / "minirl.py", ROOT / "eval.py", *(ROOT / "parts").glob("*.py")]
    for file in own:
        assert not re.search(r"torchrun|many_gpus|distributed|\bRANK\b", file.read_text()), file


def test_who_has_nothing_to_say_does_not_silence_who_has(monkeypatch):
    """The second rank, which waits for the first one's flags, may be counted before it."""
    numbers, said = itertools.count(1), []
    monkeypatch.setattr(ranks, "STORE", SimpleNamespace(add=lambda *_: next(numbers)))
    for code in (1, "why", "why"):
        with pytest.raises(SystemExit) as ended, ranks.one_error_message():
            raise SystemExit(code)
        said.append(ended.value.code)
    assert said == [1, "why", 1]


def test_it_wants_to_be_started_by_torchrun():
    with pytest.raises(SystemExit, match="Start this with torchrun"):
        ranks.main([])


def test_the_first_writes_and_the_others_only_into_files_of_their_own(monkeypatch, tmp_path):
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "RANK", rank)
        append = functools.partial(ranks.only_first, files.append)

        def note(folder, name):
            append(folder / name, dict(step=rank))

        append(tmp_path / "log", dict(step=rank))
        ranks.into_own_error(note, tmp_path)
    found = {path.name: [row["step"] for row in files.read_rows(path)]
             for path in tmp_path.iterdir()}
    assert found == {"log": [0], "error.txt": [0], "rank-1.error.txt": [1]}


# ---------------------------------------------------------------------- torchrun, the real engine
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
def real(tmp_path_factory):
    """What one and what two processes have drawn and computed; see real_ranks.py."""
    found = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp("real")
        together(world, "tests/real_ranks.py", folder, cwd=folder)
        found[world] = torch.load(folder / "noted.pt")
    return found


@pytest.mark.engine
@pytest.mark.slow
def test_two_engines_draw_what_one_draws_and_learn_what_one_learns(real):
    assert real[1]["evaluation"] == real[2]["evaluation"] and len(real[1]["evaluation"]) == 14
    for one, two in zip(real[1]["steps"], real[2]["steps"], strict=True):
        assert one["pools"] == two["pools"] and one["kept"] == two["kept"] and two["equal"]
        assert len(one["pools"]) == 24 and any(coefficient for rows in one["kept"]
                                               for _, coefficient in rows)
        assert len(two["gradients"]) == 4 and same_gradients(two["gradients"], one["gradients"])


@pytest.mark.engine
@pytest.mark.slow
def test_torchrun_shows_one_bar_and_ends_when_a_process_is_killed(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", "--shutdown-timeout", str(HANG), ROOT / "recipes/many_gpus.py",
               "--batch-prompts", "4", "--eval-questions", "2", "--eval-k", "1", "--name", "mine"]
    log = tmp_path / "runs/mine/metrics.jsonl"
    with open(tmp_path / "out", "w") as out:
        agent = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out)
    try:
        # by step 2 the bar has moved: one that has not is drawn again at its end
        while agent.poll() is None and not (log.exists() and '"step": 2,' in log.read_text()):
            time.sleep(0.1)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        assert agent.wait(timeout=HANG) != 0
    finally:
        agent.kill()
    text = (tmp_path / "out").read_text()
    # whichever comes first: the closed connection, or the signal that torchrun sends to the others
    ends = "another process of this run has ended|stopped after step"
    assert len(re.findall(ends, text)) == 1, text[-3000:]
    assert text.count("mine:   0%") == 1 and text.count("held-out avg@1") == 1
    saved, = (tmp_path / "runs/mine/checkpoints").iterdir()
    assert saved.name == f"step-{lines(tmp_path / 'runs/mine/metrics.jsonl')[-1]['step']:06d}"
