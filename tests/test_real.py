"""SmolLM2-135M-Instruct with its real weights: a real tokenizer, a tied head, whole runs.
Skipped, with a sentence, if neither its folder nor the package with its weights is available."""
import shutil
from types import SimpleNamespace

import pytest
import torch

from engines import gap, rows_of, serve, smollm
from helpers import lines, run_program
from models_small import plain_logprobs, policy
from parts.data import load_problems
from parts.logprobs import Sequence, head_of, shared_tokens, token_logprobs
from parts.models import SMOLLM, find_model
from parts.policy import load_adapter
from parts.prompts import add_prompts, stop_ids
from world import difference

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SHORT = ("--model", SMOLLM, "--name", "short", "--steps", 2, "--batch-prompts", 2, "--N", 1,
         "--max-tokens", 16, "--eval-questions", 2, "--eval-k", 2,
         "--warmup-steps", 1)
QUICK_PROBE = "from parts import probe; probe.TOKENS = 1"  # a single text


@pytest.fixture(scope="module")
def folder():
    return smollm()


def problems_in(folder, template: str) -> list:
    asked = load_problems("builtin-words", limit=2)
    return add_prompts(asked, find_model(folder), template, 256)


def test_template_ends_and_the_tied_head(folder):
    known, trained = find_model(folder), policy(folder, moved=0)
    tokenizer = known.tokenizer
    problems = problems_in(folder, "three-examples")
    text = problems[0].prompt
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith(f"{problems[0].problem}<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("\\boxed{") == 3 and tokenizer.decode(problems[0].prompt_ids) == text
    ends = tokenizer.convert_ids_to_tokens(stop_ids(known, "chat"))
    assert ends == ["<|endoftext|>", "<|im_end|>"]
    model = trained.get_base_model()
    assert head_of(model).weight is model.model.embed_tokens.weight
    answer = tokenizer.encode("3 + 4 = 7. The answer is \\boxed{7}.<|im_end|>")
    rows = [Sequence(p.prompt_ids + answer, len(p.prompt_ids)) for p in problems]
    assert shared_tokens(trained, rows) > 150
    with torch.no_grad():
        found, _ = token_logprobs(trained, rows, temperature=0.7)
        for row, own in zip(rows, found.split(len(answer))):
            wanted = plain_logprobs(trained, row, 0.7)
            torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-4)


def odd_length(problem, completion) -> float:
    """A reward that eight draws on any machine have both values of: the steps have a gradient."""
    return len(completion) % 2 == 1


def train(*flags, cwd):
    return run_program("minirl.py", *SHORT, *flags, "--reward", f"{__file__}:odd_length", cwd=cwd,
                       before=QUICK_PROBE)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """Two steps of the program without a flag of the model's own."""
    cwd = tmp_path_factory.mktemp("real")
    return SimpleNamespace(cwd=cwd, folder=cwd / "runs/short", out=train(cwd=cwd))


def test_two_steps_and_a_resumed_run_is_the_same_to_the_bit(run, tmp_path):
    assert "defaults for a small model" in run.out and "probe:" in run.out
    assert len(lines(run.folder / "answers.jsonl")) == 2 * 2  # before and after
    assert all(row["optimizer_steps"] for row in lines(run.folder / "metrics.jsonl"))
    again = tmp_path / "runs/short"
    shutil.copytree(run.folder, again)
    shutil.rmtree(again / "checkpoints/step-000002")  # as if it had been killed in that step
    assert "continuing after step 1" in train("--resume", cwd=tmp_path)
    assert difference(again, run.folder, 2) == ""


def test_the_export_is_a_model_for_transformers_and_vllm(run, folder):
    from transformers import AutoModelForCausalLM

    run_program("recipes.export", "runs/short", "made", "--dtype", "float32", cwd=run.cwd)
    made = AutoModelForCausalLM.from_pretrained(run.cwd / "made", dtype=torch.float32)
    prompts = [p.prompt_ids for p in problems_in(folder, "none")]
    trained, _ = load_adapter(folder, str(run.folder / "checkpoints/step-000002"), "float32")
    ids = torch.tensor(prompts[:1])
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, trained(ids).logits, atol=1e-3, rtol=1e-3)
    with serve(run.cwd / "made") as engine:
        assert gap(trained, rows_of(prompts, engine.generate(prompts, 8, 24))).max() < 1e-3
