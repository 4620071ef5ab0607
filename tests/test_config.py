"""What a user can get wrong ends within seconds, before the engine loads, in one sentence that says what to do."""
import json
import os
import subprocess
import sys
import time

import pytest

from conftest import ROOT
from parts.config import Config, parse


def run(*flags, cwd, seconds=60, env=None):
    """(exit code, stderr + stdout, seconds) of `python minirl.py *flags`."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, str(ROOT / "minirl.py"), *flags], cwd=cwd, capture_output=True, text=True,
                          timeout=seconds, env=os.environ | (env or {}))
    return done.returncode, done.stdout + done.stderr, time.perf_counter() - start


def test_help_explains_every_field_at_once(tmp_path):
    code, text, seconds = run("--help", cwd=tmp_path)
    assert code == 0 and seconds < 5
    for field in Config.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in text
    assert text.count("(default:") >= len(Config.__dataclass_fields__)


@pytest.mark.parametrize("flags, sentence", [
    (["--M", "2", "--N", "1", "--n", "4"], "n = 4"),
    (["--M", "2"], "n = 4"),
    (["--top-p", "0.9"], "top_p must stay 1"),
    (["--temperature", "0"], "temperature must be above 0"),
    (["--sampler", "magic"], "sampler must be one of"),
    (["--mini-batches", "50", "--batch-prompts", "8"], "8 prompts cannot be cut into 50 mini-batches"),
    (["--lora-rank", "0"], "lora_rank must be at least 1"),
    (["--name", "../elsewhere"], "plain folder name"),
    (["--dtype", "float8"], "dtype must be one of"),
    (["--objective", "ppo"], "objective must be one of"),
    (["--objective", "grpo", "--importance", "none"], "grpo has a weight of its own"),
    (["--replay", "r2"], "the same as none"),
    (["--problem-key", "question"], "builtin problems have no columns"),
    (["--lr", "fast"], "invalid float value"),
    (["--learning-rate", "1"], "unrecognized arguments"),
])
def test_wrong_flags(flags, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_wrong_flags_answer_before_torch_is_imported(tmp_path):
    code, text, seconds = run("--top-p", "0.9", cwd=tmp_path)
    assert code == 2 and "top_p must stay 1" in text and "Traceback" not in text and seconds < 5


@pytest.mark.parametrize("flags, sentences", [
    (["--model", "NoSuchModel"], ["Unknown model 'NoSuchModel'", "--model tiny"]),
    (["--model", "./missing"], ["No model folder"]),
    (["--replay", "r3", "--mini-batches", "2"], ["--replay r3 is for mixtures of experts"]),
    (["--data", "missing.jsonl"], ["missing.jsonl"]),
    (["--data", "odd.jsonl"], ["alpha", "--problem-key", "--answer-key"]),
    (["--data", "empty.jsonl"], ["empty.jsonl"]),
    (["--data", "broken.jsonl"], ["broken.jsonl", "2"]),
    (["--data", "long.jsonl"], ["over 256 tokens", "--max-prompt-tokens"]),
])
def test_wrong_model_or_data(flags, sentences, tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"alpha": "1+1", "beta": 2}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n{"problem": \n')
    long = [json.dumps(dict(problem=f"{n}+" * 500 + "1", answer=str(500 * n + 1))) for n in (1, 2)]
    (tmp_path / "long.jsonl").write_text("\n".join(long))
    code, text, seconds = run(*flags, cwd=tmp_path)
    assert code not in (0, None) and "Traceback" not in text, text
    assert all(sentence in text for sentence in sentences), text
    assert seconds < 40   # 3 to 5 s on an idle machine
    assert not (tmp_path / "runs").exists()


def test_unreachable_hub_names_the_ways_out(tmp_path):
    """Whatever is between us and the hub: here a port on which nobody answers."""
    blocked = dict(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hf"))
    code, text, seconds = run("--data", "some/dataset", cwd=tmp_path, env=blocked)
    assert code == 1 and "--data file.jsonl" in text and seconds < 40 and "Traceback" not in text, text
    code, text, seconds = run("--model", "Qwen2.5-Math-1.5B", "--data", "builtin", cwd=tmp_path, env=blocked, seconds=60)
    assert code == 1 and "Qwen/Qwen2.5-Math-1.5B" in text and "--model tiny" in text and seconds < 40, text
    assert "Traceback" not in text


def test_an_existing_run_is_not_overwritten(tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    code, text, _ = run("--name", "mine", cwd=tmp_path)
    assert code == 1 and "exists already" in text and "--resume" in text and "--name" in text


def test_gpu_build_without_a_gpu(monkeypatch):
    from parts import engine

    monkeypatch.setattr(engine, "_is_installed", lambda name: name == "vllm")
    with pytest.raises(SystemExit, match="no GPU is visible.*requirements-cpu.txt"):
        engine.build_for_cpu()
    monkeypatch.setattr(engine, "_is_installed", lambda name: False)
    with pytest.raises(SystemExit, match="vLLM is not installed"):
        engine.build_for_cpu()
