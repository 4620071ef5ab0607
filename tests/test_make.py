"""The recipe of the built-in models: its demonstrations, and that it still makes them."""
import random
import shutil
from pathlib import Path

import pytest
import torch

from models import make
from models.problems import chains
from parts.models import TINY, find_model, MODELS


def test_demonstrations_are_right_and_unseen_in_the_test_split():
    test, rng = {row["problem"] for row in chains("test", 500)}, random.Random(1)
    for i in range(1000):
        text, completion = make.worked_chain(rng, lazy=i % 2 == 0)
        *lines, last = completion.split("\n")
        assert text not in test and last == f"\\boxed{{{eval(text.removesuffix('=?'))}}}"
        assert all(eval(line.replace("=", "==")) for line in lines)


@pytest.mark.parametrize("name", TINY)
def test_prompts_are_cut_into_the_tokens_of_the_warm_start(name, tmp_path):
    """AutoTokenizer would not: it gives a Qwen2 its family's, which knows no two-digit token."""
    folder = shutil.copytree(str(MODELS / name), tmp_path / "copy")  # elsewhere, as an export is
    loaded, built = find_model(str(folder)).tokenizer, make.build_tokenizer()
    for text in ("7+15-4=?\n\\boxed{18}", "1230 apples, 5½ each", "x<|user|>10<|endoftext|>",
                 "Zoë paid 3½ € for π\t\x00"):
        assert loaded.encode(text) == built.encode(text)
        assert built.decode(built.encode(text)) == text
    assert len(built.encode("10+99")) == 3 and len(built) <= 384
    for tokenizer in (loaded, built):
        assert tokenizer.apply_chat_template(
            [dict(role="user", content="1+2=?")], add_generation_prompt=True,
            tokenize=False) == "<|user|>1+2=?<|assistant|>"
        assert (tokenizer.eos_token, tokenizer.pad_token) == (make.END, make.PAD)


def accuracy(folder, samples=4):
    """avg@k on held-out problems with plain Hugging Face sampling."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [row for row in chains("test", 120) for _ in range(samples)]
    prompts = [f"<|user|>{row['problem']}<|assistant|>" for row in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=64, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    return sum(text.endswith(f"\\boxed{{{row['answer']}}}")
               for text, row in zip(texts, rows)) / len(rows)


@pytest.mark.long
@pytest.mark.slow
def test_the_models_are_small_and_weak_but_not_hopeless_and_the_recipe_still_makes_such(tmp_path):
    """Another processor makes other weights, and so does another version of torch; not a better or
    worse start."""
    weights = Path(str(MODELS / "tiny")).parent.rglob("*.safetensors")
    assert sum(file.stat().st_size for file in weights) < 5e6
    tiny, mixture = (accuracy(str(MODELS / name)) for name in ("tiny", "tiny-moe"))
    assert 0.15 < min(tiny, mixture) and max(tiny, mixture) < 0.35
    make.build(tmp_path, progress=False)
    assert abs(accuracy(tmp_path) - tiny) < 0.08
