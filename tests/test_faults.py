"""Every fault is really made: what is left on the disk, what the user reads (docs/faults.md)."""
import ast
import json
import math
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parts import checkpoint, folder, hardware, stop
import minirl
from conftest import ROOT
from minirl import Config
from parts import run as running
from parts.config import parse, resolve
from parts.policy import loss_scale
from parts.run import learner
from small_policy import gradients_of, random_groups, tiny_policy

sys.path.insert(0, str(ROOT / "bench"))
import crash_test  # noqa: E402

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"  # sets a terminal's title, clears it, colours it


def weights(policy):
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def same(a, b):
    """Bit by bit, NaN equal to NaN."""
    return all(torch.equal(a[name].nan_to_num(7e7), b[name].nan_to_num(7e7)) for name in a)


def first_adapter_weight(policy):
    return next(p for name, p in policy.named_parameters() if "lora_B" in name)


# ---------------------------------------------------------------------------- numbers that are none
@pytest.mark.parametrize("broken", ["weight", "logprob of the engine"])
def test_nan_skips_the_step_and_changes_nothing(broken):
    policy, groups, config = tiny_policy(), random_groups(
        4, seed=0), Config(max_tokens=20, micro_tokens=4096, lr=0.1)
    optimizer, schedule = learner(policy, config)
    right = first_adapter_weight(policy)[0, 0].item()
    if broken == "weight":
        first_adapter_weight(policy).data[0, 0] = math.nan
    else:
        next(s for g in groups for s, a in g.rows() if a).rollout.logprobs[0] = math.nan
    before = weights(policy)
    metrics = minirl.update(policy, optimizer, schedule, groups, config, random.Random(0))
    assert (metrics["optimizer_steps"], metrics["skipped_steps"]) == (0, 1)
    assert math.isnan(metrics["grad_norm"])
    assert same(weights(policy), before) and not optimizer.state_dict()["state"]
    assert schedule.last_epoch == 0
    assert all(p.grad is None for p in policy.parameters())
    first_adapter_weight(policy).data[0, 0] = right  # and the next step is as good as ever
    metrics = minirl.update(policy, optimizer, schedule, random_groups(4, seed=1), config,
                            random.Random(0))
    assert (metrics["optimizer_steps"], metrics["skipped_steps"]) == (1, 0)
    assert not same(weights(policy), before)


def test_three_bad_steps_in_a_row_stop_the_run_with_the_batch(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(running, "save", lambda run: saved.append(dict(run.state)))
    policy = SimpleNamespace(loss_scale=loss_scale("float32", "cpu"))
    run = SimpleNamespace(folder=tmp_path, policy=policy, state=dict(skipped_in_a_row=0))
    groups = random_groups(2, seed=0)
    for step in (4, 5):
        running.stop_if_broken(step, groups, dict(loss=math.nan, skipped_steps=1), run)
    assert not list(tmp_path.iterdir()) and not saved
    with pytest.raises(
        SystemExit, match="3 steps in a row.*broken_batch.json.*step 6 is saved.*--resume.*--lr"):
        running.stop_if_broken(6, groups, dict(loss=math.nan, skipped_steps=1), run)
    batch = json.loads((tmp_path / "broken_batch.json").read_text())
    assert saved == [dict(skipped_in_a_row=0)]  # no bad step was taken: what was learnt is sound
    assert batch["step"] == 6 and batch["loss"] == "nan" and len(batch["rows"]) == 8
    assert batch["rows"][0]["token_ids"] == groups[0].rows()[0][0].rollout.token_ids


# ------------------------------------------------------------------------------------ out of memory
def no_memory():
    torch.empty(2**46, dtype=torch.uint8)  # 64 TiB: the allocator's own error


def test_out_of_memory_is_recognised():
    with pytest.raises(RuntimeError) as real:
        no_memory()
    assert hardware.out_of_memory(real.value)
    assert hardware.out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not hardware.out_of_memory(RuntimeError("shapes differ"))


def test_out_of_memory_halves_the_micro_batch_and_not_the_gradient(monkeypatch, capsys):
    policy, groups = tiny_policy(), random_groups(6, seed=2)
    (whole,), _ = gradients_of(policy, groups)
    calls, real, still_held = 0, minirl.token_logprobs, []

    def short_of_memory(policy, micro, temperature):
        nonlocal calls
        calls += 1
        if calls == 2:  # the second micro-batch: the gradient of the first is there already
            activations = torch.ones(1)
            still_held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")
        if calls == 3:
            still_held.append(still_held.pop()())
        return real(policy, micro, temperature)

    monkeypatch.setattr(minirl, "token_logprobs", short_of_memory)
    config = Config(max_tokens=20, micro_tokens=128)
    monkeypatch.setattr(minirl, "optimizer_step", lambda *_: 0.0)
    minirl.update(policy, SimpleNamespace(param_groups=[{"lr": 0}]), None, groups, config,
                  random.Random(0))
    assert config.micro_tokens == 64
    assert "out of memory: going on with --micro-tokens 64" in capsys.readouterr().out
    # the failed attempt's tensors are free before the second one starts
    assert still_held == [None]
    for name, p in policy.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, whole[name], rtol=1e-5, atol=1e-9)


def test_rehearsal_names_the_settings_to_lower(monkeypatch):
    engine = SimpleNamespace(sleep=lambda: None, wake=lambda: awake.append(True))
    awake, run = [], SimpleNamespace(config=Config(micro_tokens=900, max_prompt_tokens=100,
                                                   max_tokens=200), policy=tiny_policy(),
                                     engine=engine)
    seen = []
    monkeypatch.setattr(minirl, "accumulate",
                        lambda policy, rows, config: seen.append([len(row.ids) for row in rows]))
    minirl.rehearse(run)
    assert seen == [[300] * 3] and awake == [True]
    monkeypatch.setattr(minirl, "accumulate", lambda *_: no_memory())
    with pytest.raises(SystemExit, match="Out of memory for a micro-batch of 3 x 300 tokens: "
                                         "lower --micro-tokens .*900.*--max-tokens"):
        minirl.rehearse(run)
    assert awake == [True, True]


# ----------------------------------------------------------------------------------------- the disk
@pytest.fixture(scope="module")
def learning():
    policy = tiny_policy()
    return policy, *learner(policy, Config(lr=0.1))


def one_step(policy, optimizer, schedule):
    for p in policy.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    schedule.step()


@pytest.mark.parametrize("file",
                         ["adapter_config.json", "adapter_model.safetensors", "optimizer.pt"])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, learning, file):
    """No file may grow past a limit: the real writers of PEFT, safetensors and torch meet it."""
    def save(step):
        one_step(*learning)
        return checkpoint.save(tmp_path, *learning, dict(step=step), keep=2)

    first = save(2)
    sizes = {path.name: path.stat().st_size for path in first.iterdir()}
    size = sizes[file] - 100
    assert sizes["adapter_config.json"] < sizes["adapter_model.safetensors"]
    assert sizes["adapter_model.safetensors"] < sizes["optimizer.pt"] - 100
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        with pytest.raises(SystemExit,
                           match="Could not write the checkpoint of step 4 .*intact.*--resume"):
            save(4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "checkpoints").iterdir()) == [first] and not checkpoint.damage(first)
    assert checkpoint.newest_sound(save(4).parents[1]).name == "step-000004"


def test_a_damaged_checkpoint_does_not_push_out_a_sound_one(tmp_path, learning):
    for step in (2, 4, 6):
        checkpoint.save(tmp_path, *learning, dict(step=step), keep=3)
    (tmp_path / "checkpoints/step-000006/state.json").write_text("{")
    checkpoint.save(tmp_path, *learning, dict(step=5), keep=1)  # as after a resume from step 4
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step-000005"]


def test_the_same_step_again_does_not_touch_what_is_sound(tmp_path, learning):
    saved = checkpoint.save(tmp_path, *learning, dict(step=2), keep=1)
    before = saved.stat().st_ino
    assert checkpoint.save(tmp_path, *learning, dict(step=2), keep=1).stat().st_ino == before
    (saved / "state.json").write_text("{")
    assert checkpoint.save(tmp_path, *learning, dict(step=2), keep=1).stat().st_ino != before
    assert not checkpoint.damage(saved)


# ------------------------------------------------------------------------------------- the verifier
HARD = [(rf"\sqrt{{{i}}}+1", rf"so \boxed{{1+\sqrt{{{i + i % 2}}}}}", float(i % 2 == 0))
        for i in range(2, 42)]


@pytest.fixture(scope="module")
def grader():
    from rewards import Grader

    with Grader(workers=2, timeout=3.0) as made:
        made.grade([(r"\sqrt{7}+2", r"\boxed{2+\sqrt{7}}")] * 2)
        yield made


@pytest.mark.slow
def test_killed_verifiers_are_replaced_and_asked_again(grader):
    for i, (gold, completion, _) in enumerate(HARD):
        grader.submit(i, gold, completion)
    assert grader.result(0).reward == HARD[0][2]
    killed = [worker.process.pid for worker in grader.workers]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    verdicts = [grader.result(i) for i in range(1, len(HARD))]
    assert [v.reward for v in verdicts] == [reward for *_, reward in HARD[1:]], verdicts
    assert {v.status for v in verdicts} == {"correct", "wrong"}
    assert not {worker.process.pid for worker in grader.workers} & set(killed)


@pytest.mark.slow
def test_a_verifier_that_hangs_is_cut_off(grader):
    for worker in grader.workers:
        os.kill(worker.process.pid, signal.SIGSTOP)
    started = time.time()
    first, second, third = grader.grade([(r"\sqrt{50}+i", r"\boxed{i+5\sqrt{2}}"),
                                         (r"\sqrt{51}+i", r"\boxed{2}"),
                                         (r"\sqrt{52}+i", r"\boxed{i+2\sqrt{13}}")])
    assert (first.status, second.status, third.status) == ("timeout", "timeout", "correct")
    assert time.time() - started < 60


# ---------------------------------------------------------------------------------- untrusted input
@pytest.mark.slow
def test_code_in_data_rows_stays_text(tmp_path, grader, capsys):
    from parts import tiny
    from parts.data import load_problems
    from parts.prompts import TEMPLATES, add_prompts

    touch = f"__import__('os').mkdir('{tmp_path}/owned')"
    texts = [touch, "{{ 7*7 }}", "{% for x in 'ab' %}x{% endfor %}", "{problem}",
             f"$(mkdir {tmp_path}/owned)", "%s {0} \\boxed{3}",
             f"what is 1+1? {ESCAPE}"]
    golds = [touch, rf"\boxed{{{touch}}}", f"lambda: {touch}", "1/0", "9**9**9**9", "10^{10^{10}}!",
             ESCAPE]
    rows = [dict(problem=text, answer=gold) for text, gold in zip(texts, golds)]
    (tmp_path / "evil.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = add_prompts(load_problems(str(tmp_path / "evil.jsonl")), tiny.build_tokenizer(),
                           "chat", 400)
    assert [p.problem for p in problems] == [text.strip() for text in texts] and "chat" in TEMPLATES
    assert all(p.problem in p.prompt for p in problems)
    problems = running.drop_odd_golds(problems, grader)
    for p in problems:
        for completion in (touch, rf"\boxed{{{touch}}}", rf"\boxed{{{p.answer}}}",
                           rf"\boxed{{$(mkdir {tmp_path}/owned)}}"):
            assert grader.grade([(p.answer, completion)])[0].reward in (0, 1)
    assert not (tmp_path / "owned").exists()
    printed = capsys.readouterr()
    assert not set("\x1b\x07\x9b") & set(printed.out + printed.err)


@pytest.mark.parametrize("name", ["..", ".", "../up", "/tmp/there", "a/b", "a\\b", ".hidden",
                                  "a\nb", "a\x1b[2J", "~", "-x y", "a\x00"])
def test_a_name_cannot_leave_the_runs_folder(name, capsys):
    with pytest.raises(SystemExit):
        parse([f"--name={name}"])
    assert "\x1b" not in capsys.readouterr().err


def test_a_checkpoint_with_code_in_it_is_refused(tmp_path, learning):
    """Even one whose manifest fits: no pickle is loaded."""
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    saved = checkpoint.save(tmp_path, *learning, dict(step=2), keep=1)
    (saved / "optimizer.pt").write_bytes(pickle.dumps(dict(optimizer=Evil(), schedule={})))
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.restore(saved, *learning)
    assert not (tmp_path / "owned").exists()


@pytest.mark.slow
@pytest.mark.parametrize("flags, sentence", [
    (["--lora-rank", "3"], "run mine was started with --lora-rank 16, not 3"),
    (["--sampler", "uniform"], "started with --sampler ada-balance, not uniform"),
    (["--temperature", "0.5"], "started with --temperature 1.0, not 0.5"),
    (["--eval-k", "3"], "started with --eval-k 8, not 3"),
])
def test_what_decides_a_run_cannot_change_when_it_is_resumed(
        tmp_path, monkeypatch, capsys, flags, sentence):
    monkeypatch.chdir(tmp_path)
    stored = parse(["--name", "mine"])
    folder.claim(Path("runs/mine"), resume=False).close()
    folder.note_start(Path("runs/mine"), running.settings_of(stored), 0, "")
    Path("runs/mine/metrics.jsonl").write_text("{}\n")
    before = Path("runs/mine/config.json").read_bytes()
    slower = parse(["--name", "mine", "--resume", "--lr", "0.5"])
    assert slower == replace(stored, resume=True, lr=0.5)
    with pytest.raises(SystemExit):
        parse(["--name", "mine", "--resume", *flags])
    assert sentence in capsys.readouterr().err
    assert Path("runs/mine/config.json").read_bytes() == before


def said(cwd, *flags, **environment):
    """(code, text, seconds) of a minirl.py that ends by itself before an engine is started."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(ROOT / "minirl.py"), *flags], cwd=cwd, text=True, timeout=100,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | environment)
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout, time.perf_counter() - start


@pytest.fixture
def started(tmp_path):
    """A place with a run that was started and has no step yet."""
    run = tmp_path / "runs" / "mine"
    folder.claim(run, resume=False).close()
    folder.note_start(run, running.settings_of(resolve(Config(name="mine"))), 0, "")
    (run / "metrics.jsonl").write_text("{}\n")
    return tmp_path


def test_a_refused_resumption_answers_at_once(started):
    code, text, seconds = said(started, "--name", "mine", "--resume", "--template", "none")
    assert code == 2 and "--template chat, not none" in text, text
    assert seconds < 5  # 0.3 s on an idle machine


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"config": {"lr": 1}, "starts": [{}]}'])
def test_a_broken_config_json_is_named(started, text):
    (started / "runs/mine/config.json").write_text(text)
    code, sentence, _ = said(started, "--name", "mine", "--resume")
    assert code in (1, 2) and ("config.json" in sentence or "another version" in sentence)
    assert (started / "runs/mine/config.json").read_text() == text


@pytest.mark.parametrize("flags", [["x" * 300], ["x" * 300, "--resume"], ["\u6570" * 200]])
def test_a_name_that_no_folder_can_have(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        parse(["--name", *flags])
    assert "too long" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_where_the_runs_folder_should_be(tmp_path, monkeypatch, resume):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/mine").write_text("a note")
    parse(["--name", "mine", *["--resume"] * resume])
    with pytest.raises(SystemExit, match="runs/mine is a file: .*--name"):
        running.prepare(Config(name="mine", resume=resume), None)
    assert Path("runs/mine").read_text() == "a note"


def test_where_nothing_can_be_written_nothing_is_said_to_be_safe(tmp_path, monkeypatch):
    """Nothing has begun yet, so there is nothing to resume."""
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("a file")
    with pytest.raises(SystemExit) as ended, running.last_words(Config(name="mine")):
        folder.claim(Path("runs/mine"), resume=False)
    sentence = str(ended.value)
    assert "runs/mine" in sentence and "nothing was saved yet" in sentence
    assert "--resume" not in sentence and "\n" not in sentence


@pytest.mark.parametrize("saved", [False, True])
def test_a_full_disk_promises_only_what_is_saved(tmp_path, monkeypatch, saved):
    monkeypatch.chdir(tmp_path)
    for step in (9, 12) if saved else ():
        Path(f"runs/mine/checkpoints/step-{step:06d}").mkdir(parents=True)
    with pytest.raises(SystemExit) as ended, running.last_words(Config(name="mine")):
        raise OSError(28, "No space left on device", "runs/mine/metrics.jsonl")
    sentence = str(ended.value)
    assert "No space left on device" in sentence and "\n" not in sentence
    promise = "everything up to step 12 is saved: continue with --resume"
    assert (promise in sentence) == ("--resume" in sentence) == saved
    assert ("nothing was saved yet" in sentence) != saved


NOBODY_READS = """
import sys; sys.path.insert(0, sys.argv[1])
from parts import run; from parts.config import Config
with run.last_words(Config(name="mine")):
    while True:
        print("x" * 1000)
"""


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_program_in_one_sentence(tmp_path):
    """`python minirl.py | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-c", NOBODY_READS, str(ROOT)], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(20) == 1 and len(errors.splitlines()) == 1, errors
    assert "Nobody reads the output" in errors and "nothing was saved yet" in errors


HOLDS_THE_FOLDER = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path; from parts.folder import claim
held = claim(Path("runs/mine"), True); print("mine", flush=True); input(); print("still mine")
"""


@pytest.mark.slow
def test_the_second_process_on_a_run_ends_in_one_sentence(started):
    """The first is a real process that has the folder; what is in it stays as it is."""
    run, command = started / "runs/mine", [sys.executable, "-c", HOLDS_THE_FOLDER, str(ROOT)]
    first = subprocess.Popen(
        command, cwd=started, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout.readline() == "mine\n"
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    code, text, _ = said(started, "--name", "mine", "--resume")
    assert code == 1 and "Another program is writing to runs/mine" in text, text
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert first.communicate("\n")[0] == "still mine\n" and first.returncode == 0


def test_no_model_brings_code_of_its_own():
    """transformers asks whether to run it, and `yes |` would answer: every loader is told no."""
    loaders = {}
    for file in [*ROOT.glob("*.py"), *(ROOT / "parts").glob("*.py")]:
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and ".from_pretrained" in ast.unparse(call.func):
                if ast.unparse(call.func).startswith("Auto"):
                    told = {word.arg: ast.unparse(word.value) for word in call.keywords}
                    loaders[f"{file.name}:{call.lineno}"] = told.get("trust_remote_code")
    assert len(loaders) >= 4 and set(loaders.values()) == {"False"}, loaders


# ---------------------------------------------------------------------------- stopping, being alive
def test_a_long_phase_says_that_it_is_alive(capsys):
    seconds = {}
    with stop.timed(seconds, "sample", every=0.05):
        time.sleep(0.3)
    out = capsys.readouterr().out
    assert "... sample: running for 0 s (kill -USR1" in out and 0.3 <= seconds["seconds_sample"] < 2
    time.sleep(0.15)
    assert not capsys.readouterr().out  # and no longer


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_the_program_at_once(second):
    code = f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from parts.stop import Stop; "
    code += "Stop.install(); print(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    lines = process.stderr.readline() + process.stderr.readline()
    assert "stopping after this phase with a checkpoint (once more: at once)" in lines
    assert process.poll() is None
    process.send_signal(second)
    assert process.wait(5) == -second


# --------------------------------------------------------------------------- real runs, real engine
engine_test = pytest.mark.engine
FLAGS = [*crash_test.SMALL, "--steps", "6"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return crash_test.workplace(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def reference(place):
    return crash_test.untouched(place, FLAGS)


def program(cwd, *flags, before="", limit=None):
    """minirl.py as a user runs it, with some lines of Python before it, and a limit on the size of
    a file."""
    code = (f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['minirl.py', "
            f"*sys.argv[1:]]\n{before}\n"
            f"runpy.run_path({str(ROOT / 'minirl.py')!r}, run_name='__main__')")
    preexec = limit and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    return subprocess.Popen([sys.executable, "-c", code, *flags], cwd=cwd, text=True,
                            stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, preexec_fn=preexec)


def result(process, seconds=300):
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    out, _ = process.communicate()
    timer.cancel()
    return process.returncode, out


ENGINE_DIES = """
import pathlib, sys; from parts import engine
real, log = engine.Engine.step, pathlib.Path("runs/faulty/metrics.jsonl")
def step(self):
    # by run.WatchedEngine.step, neither for the probe nor for an evaluation, in the fourth step
    sampling = sys._getframe(1).f_code.co_name == "step" and log.exists()
    if sampling and len(log.read_text().splitlines()) == 3 and self.steps % 7 == 0:
        raise ValueError("the cache is on fire")
    return real(self)
engine.Engine.step = step
"""


@engine_test
def test_a_run_that_meets_everything_ends_the_same(place, reference):
    """Runs that meet them all, each time resumed. bench/crash_test.py kills twenty times,
    at random moments."""
    moment = SimpleNamespace(choice=lambda steps: steps[-1], uniform=lambda low, high: high / 4)
    for kind in ("step", "write"):
        assert crash_test.strike(place, reference, FLAGS, kind, moment) == ""

    # the faults whose step matters need a run of their own: where a killed one stands depends on
    # the moment
    run, newest = place / "runs/faulty", place / "runs/faulty/checkpoints/step-000003"
    code, out = result(program(place, "--name", "faulty", *FLAGS, before=ENGINE_DIES))
    assert code == 1 and "Traceback" not in out, out
    assert "The sampling failed: ValueError: the cache is on fire" in out
    assert "step 3 is saved; continue with --resume" in out
    # step 3 is none of every second
    assert "in step" in (run / "error.txt").read_text() and not checkpoint.damage(newest)

    flip(newest / "optimizer.pt")
    code, out = result(program(place, "--name", "faulty", "--resume", limit=600_000))
    assert code == 1 and "Traceback" not in out, out
    assert "step-000003 is damaged (optimizer.pt is not what was written); trying the one" in out
    assert "continuing after step 2" in out and "Could not write the checkpoint of step 4" in out
    assert [p.name for p in checkpoint.complete(run)] == ["step-000002", "step-000003"]

    os.truncate(newest / "adapter_model.safetensors", 1000)
    code, out = result(program(place, "--name", "faulty", "--resume"))
    assert code == 0 and "step-000003 is damaged" in out and "continuing after step 2" in out, out
    assert crash_test.difference(run, reference, 6) == ""


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


ENGINE_HANGS = """
import pathlib, time; from parts import engine, stop
stop.timed.__wrapped__.__defaults__ = (0.5,)  # a heartbeat that does not take a minute
real, released = engine.Engine.step, pathlib.Path("released")
log = pathlib.Path("runs/evil/metrics.jsonl")
def step(self):
    while log.exists() and len(log.read_text().splitlines()) == 3 and not released.exists():
        time.sleep(0.01)
    return real(self)
engine.Engine.step = step
"""


@engine_test
def test_a_hanging_engine_hostile_rows_and_sigterm(place):
    """A data set that nobody can solve, with escape sequences in it; an engine that hangs in step
    4; SIGTERM meanwhile."""
    rows = [dict(problem=f"{i}+{i}{ESCAPE}", answer=str(10**6 + i)) for i in range(1, 30)]
    (place / "evil.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--name", "evil", "--data", "evil.jsonl", *crash_test.SMALL, "--steps", "1000", "--N",
             "1", "--eval-every", "100"]
    process, log = program(place, *flags, before=ENGINE_HANGS), place / "runs/evil/metrics.jsonl"
    deadline = time.time() + 200
    while len(crash_test.rows(log)) < 3:
        assert time.time() < deadline and process.poll() is None, result(process)
        time.sleep(0.05)
    code, text, _ = said(place, "--name", "evil", "--resume")  # meanwhile somebody else
    assert code == 1 and "Another program is writing to runs/evil" in text, text
    time.sleep(2.5)  # drawing is over, it hangs, and says so
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None  # not in the middle of an engine step
    (place / "released").touch()
    code, out = result(process)
    assert code == 0 and "continue with: python minirl.py --name evil --resume" in out, out
    assert re.search(r"\.\.\. sample: running for \d+ s \(kill -USR1", out), out
    stacks = out.partition("Current thread")[2]
    assert out.count("Thread 0x") >= 2 and "in train_step" in stacks and "in sample" in stacks
    assert repr(ESCAPE)[1:-1] in out
    assert not any(sign in out for sign in ("\x1b]", "\x07", "\x1b[2J", "\x9b"))
    metrics = crash_test.rows(log)
    assert len(metrics) == 3  # the fourth was only being sampled: it will be sampled again
    assert all((row["zero_signal"], row["optimizer_steps"]) == (1, 0) and "loss" not in row
               for row in metrics)
    assert checkpoint.newest_sound(place / "runs/evil").name == "step-000003"


# -------------------------------------------------------------------------- one engine, many faults
@pytest.fixture(scope="module")
def run(place):
    """A run before its first step, in this process, with adapters swapped into the engine."""
    from rewards import Grader

    config = resolve(Config(name="inside", sync="adapter", batch_prompts=4, max_tokens=16,
                            eval_questions=4, eval_k=2,
                                   steps=1000, eval_every=7, N=2))
    back = os.getcwd()
    os.chdir(place)
    try:
        with Grader(1) as grader:
            made = running.prepare(config, grader)
            yield made
            made.engine.close()
    finally:
        os.chdir(back)


def verdicts_of(groups):
    return [[(s.rollout.token_ids, s.status, s.reward) for s in g.pool] for g in groups]


@engine_test
def test_a_verifier_killed_while_sampling_changes_no_verdict(run, monkeypatch):
    found, cursor = [], run.stream.cursor
    for murder in (False, True):
        run.stream.cursor, run.grader.cache = cursor, type(run.grader.cache)()
        monkeypatch.setattr(run.engine, "step", lambda: kill_now_and_then(run)
                            if murder else type(run.engine).step(run.engine))
        running.reseed(0, "murder")
        found.append(verdicts_of(minirl.sample(run)))
        monkeypatch.undo()
    assert found[0] == found[1]


def kill_now_and_then(run):
    if run.engine.steps % 5 == 0:
        for worker in run.grader.workers:
            if worker.process.poll() is None:
                worker.process.kill()
    return type(run.engine).step(run.engine)


@engine_test
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_step_without_signal_is_logged_and_changes_nothing(run, reward):
    verdict = SimpleNamespace(reward=reward, status="correct" if reward else "wrong")
    real, run.grader = run.grader, SimpleNamespace(submit=lambda *_: None,
                                                   result=lambda key: verdict)
    before = weights(run.policy)
    try:
        groups, metrics = minirl.train_step(1, run)
    finally:
        run.grader = real
    running.log(1, groups, metrics, run)
    row = crash_test.rows(run.folder / "metrics.jsonl")[-1]
    assert (row["zero_signal"], row["optimizer_steps"], row["skipped_steps"]) == (1, 0, 0)
    assert same(weights(run.policy), before)


@engine_test
def test_a_nan_in_a_real_step_keeps_the_engine_as_it_was(run):
    weight, good = first_adapter_weight(
        run.policy), first_adapter_weight(run.policy).detach().clone()
    adapter = run.engine._adapter
    weight.data[0, 0] = math.nan
    try:
        metrics = next(m for m in (minirl.train_step(step, run)[1] for step in range(1, 9))
                       if m["kept"] and m["zero_signal"] < 1)
    finally:
        weight.data.copy_(good)
    assert metrics["skipped_steps"] == 1 and metrics["optimizer_steps"] == 0
    assert run.engine._adapter is adapter
    assert run.probe.check()["probe_gap_max"] < 1e-4


@engine_test
def test_an_error_while_evaluating_saves_first_and_is_made_up_for(run, monkeypatch):
    def dies():
        raise RuntimeError("no more KV blocks")

    monkeypatch.setattr(run.engine, "step", dies)
    run.state["step"] = 7
    with pytest.raises(SystemExit, match="The evaluation failed: RuntimeError: no more KV blocks "
                                         ".*step 7 is saved"):
        minirl.evaluate_if_due(run)
    run.engine.abort()
    monkeypatch.undo()
    assert checkpoint.newest_sound(run.folder).name == "step-000007"
    resumed = replace(run, config=replace(run.config, resume=True), state=dict(run.state))
    running.resume(resumed, checkpoint.newest_sound(run.folder))
    for _ in range(2):  # not twice
        minirl.evaluate_if_due(resumed)
    assert [row["step"] for row in crash_test.rows(run.folder / "eval.jsonl")] == [7]
    running.resume(resumed, checkpoint.newest_sound(run.folder))
    assert resumed.state["evaluated"] == 7


def holdings():
    """What this process holds: (open files, threads, adapter folders, memory in GB)."""
    folders = sum(len(list(Path(where).glob("minirl-adapter-*")))
                  for where in ("/dev/shm", os.environ.get("TMPDIR", "/tmp")))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), folders, hardware.memory_gb()


@engine_test
def test_steps_leave_nothing_behind(run):
    """`MEMORY_STEPS=300` for the long version of it;
    docs/faults.md has the numbers of whole runs."""
    steps, seen = int(os.environ.get("MEMORY_STEPS", 32)), []
    for step in range(1, steps + 1):
        groups, metrics = minirl.train_step(step, run)
        running.log(step, groups, metrics, run)
        if step in (steps // 4, steps):
            seen.append(holdings())
    (files, threads, folders, memory), (files_end, threads_end, folders_end, memory_end) = seen
    assert files_end <= files + 2 and threads_end <= threads + 1, seen
    assert memory_end < 1.03 * memory, seen
    assert folders_end <= folders + 1  # others may be running on this machine


@engine_test
def test_new_shapes_leave_nothing_behind(run):
    """Every number of running requests is another shape: another kernel that oneDNN keeps, another
    size of the heap's gaps."""
    ids, seen = run.held_out[0].prompt_ids, []
    for count in range(1, 131):
        run.engine.generate([ids], n=count, max_tokens=2)
        if count in (60, 130):
            run.engine.sync(run.policy)
            seen.append(hardware.memory_gb())
    assert seen[1] < 1.02 * seen[0], seen


def test_the_table_of_faults_names_tests_that_exist():
    table, tests = (ROOT / "docs/faults.md").read_text(), {}
    for file in (ROOT / "tests").glob("test_*.py"):
        tests |= dict.fromkeys(part.split("(")[0] for part in file.read_text().split("def ")[1:])
    named = [word.strip("`.,") for word in table.split()
             if word.strip("`.,|").startswith("test_") and "/" not in word]
    assert len(named) > 15 and not [name for name in named if name not in tests]
