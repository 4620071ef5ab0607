"""The recipe of the built-in models: its demonstrations, and that it still makes them."""
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models import make
from models.problems import chains
from parts.models import TINY, find_model, tiny_folder


def test_demonstrations_are_right_unseen_in_the_test_split_and_lazier_the_longer():
    test, rng = {row["problem"] for row in chains("test", 500)}, random.Random(1)
    worked = {(lazy, length): [] for lazy in (False, True) for length in range(1, 7)}
    for i in range(4000):
        text, completion = make.worked_chain(rng, lazy=i % 2 == 0)
        *lines, last = completion.split("\n")
        assert text not in test and last == f"\\boxed{{{eval(text.removesuffix('=?'))}}}"
        for line in lines:
            left, right = line.split("=")
            assert eval(left) == int(right)
        operations = text.count("+") + text.count("-")
        assert len(lines) in (0, operations)
        worked[i % 2 == 0, operations].append(bool(lines))
    for (lazy, length), found in worked.items():
        expected = 0.6 / length if lazy else 0.8
        assert abs(sum(found) / len(found) - expected) < 0.12


@pytest.mark.parametrize("name", TINY)
def test_prompts_are_cut_into_the_tokens_of_the_warm_start(name, tmp_path):
    """AutoTokenizer would not: it gives a Qwen2 its family's, which knows no two-digit token."""
    folder = shutil.copytree(tiny_folder(name), tmp_path / "copy")  # elsewhere, as an export is
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


def test_the_warm_start_learns_answers_with_their_end_and_nothing_else():
    tokenizer, rng = make.build_tokenizer(), random.Random(0)
    shown = [make.worked_chain(rng, lazy=False) for _ in range(16)]
    ids, labels = make.training_batch(shown, tokenizer)
    for row, label in zip(ids, labels):
        learnt = label != -100
        start = learnt.nonzero()[0]
        prompt, after = tokenizer.decode(row[:start]), row[start:][~learnt[start:]]
        assert prompt.startswith("<|user|>") and prompt.endswith("=?<|assistant|>")
        assert (after == tokenizer.pad_token_id).all() and torch.equal(row[learnt], label[learnt])
        value = eval(prompt.removeprefix("<|user|>").split("=")[0])
        assert tokenizer.decode(row[learnt]).endswith(f"\\boxed{{{value}}}<|endoftext|>")


def test_same_seed_same_weights_and_the_callers_random_state_is_left_alone(tmp_path):
    state = torch.get_rng_state()
    for name, changes in dict(a={}, b={}, c=dict(seed=1)).items():
        make.build(tmp_path / name, progress=False, steps=2, batch=2, **changes)
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], c[k]) for k in a)


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
    weights = Path(tiny_folder()).parent.rglob("*.safetensors")
    assert sum(file.stat().st_size for file in weights) < 5e6
    tiny, mixture = (accuracy(tiny_folder(name)) for name in ("tiny", "tiny-moe"))
    assert 0.15 < min(tiny, mixture) and max(tiny, mixture) < 0.35
    make.build(tmp_path, progress=False)
    assert abs(accuracy(tmp_path) - tiny) < 0.08
