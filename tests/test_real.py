"""SmolLM2-135M-Instruct, with its own weights: a real tokenizer, a tied head, 30 layers.

Skipped, with a sentence, where neither its folder nor the package with its weights can be had.
"""
import random
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import engines
from engines import policy_for, rows_of
from helpers import lines, run_program
from parts import models
from parts.data import load_problems
from parts.engine import merged_weights, seed_everything
from parts.logprobs import Row, head_of, shared_tokens, token_logprobs
from parts.models import SMOLLM, fetch_smollm, load_tokenizer
from parts.probe import Probe, limits
from parts.prompts import add_prompts, stop_ids
from whole_runs import difference

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SHORT = ("--model", SMOLLM, "--name", "short", "--steps", 2, "--batch-prompts", 2, "--N", 1,
         "--max-tokens", 16, "--eval-questions", 2, "--eval-k", 2,
         "--warmup-steps", 1, "--train-anyway")
# One text, and no passes without a layer: 30 layers take a minute. The whole probe is tried below.
QUICK_PROBE = ("from parts import probe; probe.ON_CPU = 256; "
               "probe.Probe.without_each_layer = lambda self: {}")


@pytest.fixture(scope="module")
def folder():
    """Made once, into the project's own cache; from the package also where a hub answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "ask_hub", lambda *_: None)
        try:
            return fetch_smollm()
        except SystemExit as reason:
            pytest.skip(str(reason))


def problems_in(folder, template: str) -> list:
    asked = load_problems("builtin-words", limit=2)
    return add_prompts(asked, load_tokenizer(folder), template, 256)


@pytest.fixture(scope="module")
def problems(folder):
    """Bare: an eighth of the tokens with examples, and so of the time."""
    return problems_in(folder, "none")


def serve(folder, **options):
    return engines.serve(folder, max_num_seqs=16, temperature=0.7, **options,
                         stop_token_ids=stop_ids(load_tokenizer(folder)))


def test_template_ends_and_the_tied_head(folder):
    tokenizer, policy = load_tokenizer(folder), policy_for(folder, rank=16)
    problems = problems_in(folder, "three-examples")
    text = problems[0].prompt
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith(f"{problems[0].problem}<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("\\boxed{") == 3 and tokenizer.decode(problems[0].prompt_ids) == text
    ends = tokenizer.convert_ids_to_tokens(stop_ids(tokenizer))
    assert ends == ["<|endoftext|>", "<|im_end|>"]
    model = policy.get_base_model()
    assert head_of(model).weight is model.model.embed_tokens.weight
    answer = tokenizer.encode("3 + 4 = 7. The answer is \\boxed{7}.<|im_end|>")
    rows = [Row(p.prompt_ids + answer, len(p.prompt_ids), [], 0.0) for p in problems]
    assert shared_tokens(policy, rows) > 150
    with torch.no_grad():
        found, _ = token_logprobs(policy, rows, temperature=0.7)
        for row, own in zip(rows, found.split(len(answer))):
            logits = policy(input_ids=torch.tensor([row.ids])).logits[0, row.prompt_length - 1:-1]
            plain = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
            torch.testing.assert_close(own, plain, atol=1e-4, rtol=1e-4)


def k3(engine, policy, problems) -> float:
    """The mean of r - 1 - log r, r = pi/mu, of 16 answers: about the KL of engine and trainer."""
    seed_everything(random.Random(0))
    rollouts = engine.generate([p.prompt_ids for p in problems], n=8, max_tokens=24)
    rows = rows_of([p.prompt_ids for p in problems], rollouts)
    with torch.no_grad():
        pi_T = token_logprobs(policy, rows, 0.7)[0]
    log_r_T = pi_T - torch.tensor([x for row in rows for x in row.mu])
    return (log_r_T.exp() - 1 - log_r_T).mean().item()


@pytest.mark.parametrize("dtype, sync, limit", [
    ("float32", "merge", 1e-7), ("float32", "adapter", 1e-7), ("bfloat16", "merge", 5e-3)])
def test_the_engine_holds_the_same_policy_and_a_lost_layer_is_seen(
        folder, problems, dtype, sync, limit, monkeypatch):
    """Both have the same log-probs; then a sync forgets layer 17, and the probe sees it."""
    policy = policy_for(folder, rank=16)
    with serve(folder, dtype=dtype, sync_mode=sync) as engine:
        bounds = limits("float32", dtype, "auto", mixture=False)
        monkeypatch.setattr("parts.probe.PASSES", 1)  # one text for the 30 passes
        probe = Probe(engine, policy, problems, limits=bounds, temperature=0.7)
        assert probe.rehearsed["lost"] == [] and len(probe.rehearsed["layers"]) == 30
        found = k3(engine, policy, problems)
        print(f"{dtype}, {sync}: k3 {found:.1e}")
        assert found < limit
        if sync == "merge":
            monkeypatch.setattr("parts.engine.merged_weights", lambda policy: (
                (name, w) for name, w in merged_weights(policy) if ".layers.17." not in name))
            named = r"in doubt: \[.*17.*\]" if dtype == "float32" else "weights reach it in part"
            with pytest.raises(SystemExit, match=named):
                Probe(engine, policy, problems, limits=bounds, temperature=0.7)


def odd_length(problem, completion) -> float:
    """A reward that eight draws on any machine have both values of: the steps have a gradient."""
    return len(completion) % 2 == 1


def train(*flags, cwd):
    done = run_program("minirl.py", *SHORT, *flags, "--reward", f"{__file__}:odd_length", cwd=cwd,
                       before=QUICK_PROBE)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """Two steps of the program without a flag of the model's own."""
    cwd = tmp_path_factory.mktemp("real")
    return SimpleNamespace(cwd=cwd, folder=cwd / "runs/short", out=train(cwd=cwd))


def test_two_steps_and_a_resumed_run_is_the_same_to_the_bit(run, tmp_path):
    assert "small model" in run.out and "probe:" in run.out
    assert len(lines(run.folder / "answers.jsonl")) == 2 * 2  # before and after
    assert all(row["optimizer_steps"] for row in lines(run.folder / "metrics.jsonl"))
    again = tmp_path / "runs/short"
    shutil.copytree(run.folder, again)
    shutil.rmtree(again / "checkpoints/step-000002")  # as if it had been killed in that step
    assert "continuing after step 1" in train("--resume", cwd=tmp_path)
    assert difference(again, run.folder, 2) == ""


def test_the_export_is_a_model_for_transformers_and_vllm_and_the_evaluation_runs(
        run, folder, problems):
    from transformers import AutoModelForCausalLM

    done = run_program("recipes.export", "runs/short", "made", "--dtype", "float32", cwd=run.cwd)
    assert done.returncode == 0, done.stdout
    made = AutoModelForCausalLM.from_pretrained(run.cwd / "made", dtype=torch.float32)
    policy = policy_for(folder, rank=16)
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    newest = run.folder / "checkpoints/step-000002/adapter_model.safetensors"
    set_peft_model_state_dict(policy, load_file(newest))
    ids = torch.tensor([problems[0].prompt_ids])
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, policy(input_ids=ids).logits, atol=1e-3,
                                   rtol=1e-3)
    with serve(run.cwd / "made") as engine:
        assert k3(engine, policy, problems) < 1e-7
    done = run_program("eval.py", "--model", SMOLLM, "--adapter", "runs/short", "--limit", 2,
                       "--k", 2, "--max-tokens", 16, cwd=run.cwd)
    assert done.returncode == 0 and "builtin-words" in done.stdout, done.stdout


# ------------------------------------------------------------------------------ Qwen2's tokenizer
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = ("{% if messages[0].role != 'system' %}<|im_start|>system\nPlease reason step by step, "
          "and put your final answer within \\boxed{}.<|im_end|>\n{% endif %}"
          "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Qwen's byte pairs, 151,643 of them, as the package dashscope carries them for tiktoken."""
    cwd = tmp_path_factory.mktemp("qwen")
    ask = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1",
           "dashscope==2.0.2"]
    done = subprocess.run(ask, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no Qwen tokenizer: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(*cwd.glob("*.whl")) as wheel:
        return wheel.extract("dashscope/resources/qwen.tiktoken", cwd)


def test_the_tokenizer_of_qwen2_and_its_chat(ranks, tmp_path):
    """Made by transformers as a Qwen2 folder, and compared with tiktoken's own reading of it."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from transformers import PreTrainedTokenizerFast, Qwen2Config
    from transformers.convert_slow_tokenizer import TikTokenConverter

    made = TikTokenConverter(vocab_file=ranks, pattern=SPLIT, extra_special_tokens=SPECIAL)
    whole = PreTrainedTokenizerFast(tokenizer_object=made.converted(), eos_token="<|endoftext|>",
                                    pad_token="<|endoftext|>", chat_template=CHATML)
    whole.save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert type(tokenizer).__name__.startswith("Qwen2")
    ids = {token: 151643 + i for i, token in enumerate(SPECIAL)}
    assert stop_ids(tokenizer) == [ids["<|endoftext|>"], ids["<|im_end|>"]]

    authority = tiktoken.Encoding("qwen", pat_str=SPLIT, special_tokens=ids,
                                  mergeable_ranks=load_tiktoken_bpe(ranks))
    asked = load_problems("builtin-words", limit=20)
    asked += [replace(asked[0], problem=text) for text in (
        "What is 1234 + 5.6?\n\n  $\\frac{1}{2}$", "日本 Ünïcödé \u00a0é",
        "DON'T we'll \t\r\n x")]
    for template in ("reinforce-ada", "qwen25-math-cot", "qwen-boxed", "chat", "three-examples"):
        for problem in add_prompts(asked, tokenizer, template, 1024):
            assert problem.prompt_ids == authority.encode(problem.prompt, allowed_special="all")
            assert problem.prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
            assert problem.prompt.count("<|im_start|>system") == 1
    digits = tokenizer.encode("\\boxed{-1234}")
    assert [tokenizer.decode([i]) for i in digits] == ["\\", "boxed", "{-", "1", "2", "3", "4", "}"]
