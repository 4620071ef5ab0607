"""The built-in model and its problems: reproducible, honest, solvable."""
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from parts import tiny
from parts.models import TINY, load_tokenizer


def test_problems_are_right_and_spread_over_all_levels():
    found = tiny.problems("train", 600)
    for p in found:
        # our own text: digits, + and -
        assert eval(p["problem"].removesuffix("=?")) == int(p["answer"])
        assert p["problem"].count("+") + p["problem"].count("-") == p["level"]
        assert 0 <= int(p["answer"]) <= tiny.TOP
    assert {p["level"] for p in found} == set(tiny.OPERATIONS)
    assert found == tiny.problems("train", 600) and found[:100] == tiny.problems("train", 100)
    assert found[:50] != tiny.problems("train", 50, seed=1)


def test_any_first_part_of_the_problems_has_every_level_equally_often():
    """`limit` takes the first so many: they must not be easy ones by chance."""
    assert [p["level"] for p in tiny.problems("test", 14)] == [1, 2, 3, 4, 5, 6] * 2 + [1, 2]


def test_no_problem_is_in_both_splits_nor_in_the_warm_start():
    test = {p["problem"] for p in tiny.problems("test", 500)}
    assert not test & {p["problem"] for p in tiny.problems("train", 3000)}
    rng = random.Random(0)
    assert not test & {tiny.demonstration(rng, lazy=i % 2 == 0)[0] for i in range(3000)}


def test_demonstrations_are_right_and_laziness_grows_with_length():
    rng, worked = random.Random(1), {True: [], False: []}
    for i in range(2000):
        lazy = i % 2 == 0
        text, completion = tiny.demonstration(rng, lazy)
        *lines, last = completion.split("\n")
        assert last == f"\\boxed{{{eval(text.removesuffix('=?'))}}}"
        for line in lines:
            left, right = line.split("=")
            assert eval(left) == int(right)
        operations = text.count("+") + text.count("-")
        assert len(lines) in (0, operations)
        worked[lazy].append((operations, bool(lines)))
    share = {lazy: [sum(w for n, w in rows if n == level) / sum(n == level for n, _ in rows)
                    for level in (1, 6)]
             for lazy, rows in worked.items()}
    assert all(abs(x - 0.8) < 0.1 for x in share[False])
    assert abs(share[True][0] - 0.6) < 0.12 and abs(share[True][1] - 0.1) < 0.08


def test_tokenizer_encodes_any_text_and_gives_it_back():
    tokenizer = tiny.build_tokenizer()
    for text in ("7+15=22\n\\boxed{22}", "Zoë paid 3½ € for π\t\x00", "\\boxed{\\frac{1}{2}}",
                 "x<|user|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "1+2=?"}],
                                           add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>1+2=?<|assistant|>"
    assert len(tokenizer.encode("10+99")) == 3 and len(tokenizer) <= 384


@pytest.mark.parametrize("name", TINY)
def test_prompts_are_cut_into_the_tokens_of_the_warm_start(name):
    """AutoTokenizer would not: it gives a Qwen2 its family's, which knows no two-digit token."""
    loaded, built = load_tokenizer(tiny.folder(name)), tiny.build_tokenizer()
    for text in ("7+15-4=?\n\\boxed{18}", "1230 apples, 5½ each", "x<|user|>10<|endoftext|>"):
        assert loaded.encode(text) == built.encode(text)
    chat = dict(conversation=[{"role": "user", "content": "1+2=?"}], add_generation_prompt=True)
    assert loaded.apply_chat_template(**chat) == built.apply_chat_template(**chat)
    assert (loaded.eos_token, loaded.pad_token) == (built.eos_token, built.pad_token)


def test_the_warm_start_learns_answers_with_their_end_and_nothing_else():
    tokenizer = tiny.build_tokenizer()
    rng = random.Random(0)
    shown = [tiny.demonstration(rng, lazy=False) for _ in range(16)]
    ids, labels = tiny.training_batch(shown, tokenizer)
    for row, label in zip(ids, labels):
        learnt = label != -100
        start = learnt.nonzero()[0]
        prompt, after = tokenizer.decode(row[:start]), row[start:][~learnt[start:]]
        assert prompt.startswith("<|user|>") and prompt.endswith("=?<|assistant|>")
        assert (after == tokenizer.pad_token_id).all() and torch.equal(row[learnt], label[learnt])
        value = eval(prompt.removeprefix("<|user|>").split("=")[0])
        assert tokenizer.decode(row[learnt]).endswith(f"\\boxed{{{value}}}<|endoftext|>")


@pytest.mark.slow
def test_same_seed_same_weights_other_seed_other_weights(tmp_path):
    from safetensors.torch import load_file

    for name, changes in dict(a={}, b={}, c=dict(seed=1)).items():
        tiny.build(tmp_path / name, progress=False, steps=5, batch=8, **changes)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], c[k]) for k in a)
    assert 0.5e6 < sum(t.numel() for t in a.values()) < 2e6


def accuracy(folder, samples=4):
    """avg@k on held-out problems with plain Hugging Face sampling."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [p for p in tiny.problems("test", 120) for _ in range(samples)]
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": p["problem"]}],
                                             add_generation_prompt=True, tokenize=False)
               for p in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=64, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    return sum(text.endswith(f"\\boxed{{{p['answer']}}}")
               for text, p in zip(texts, rows)) / len(rows)


@pytest.mark.slow
def test_the_models_of_the_repository_are_small_and_weak_but_not_hopeless():
    assert sum(file.stat().st_size for file in Path(tiny.folder()).parent.rglob("*")) < 5e6
    for name in ("tiny", "tiny-moe"):
        assert 0.15 < accuracy(tiny.folder(name)) < 0.35


@pytest.mark.slow
def test_the_recipe_still_makes_an_equally_good_model(tmp_path):
    """Another processor makes other weights, and so does another version of torch; not a better or
    worse start."""
    tiny.build(tmp_path, progress=False)
    assert abs(accuracy(tmp_path) - accuracy(tiny.folder())) < 0.08


def test_building_leaves_the_callers_random_state_alone(tmp_path):
    torch.manual_seed(7)
    wanted = torch.rand(1)
    torch.manual_seed(7)
    tiny.build(tmp_path / "m", progress=False, steps=1, batch=2)
    assert torch.equal(torch.rand(1), wanted)


@pytest.mark.parametrize("name", tiny.FILES)
def test_a_damaged_model_is_noticed_before_it_is_loaded(tmp_path, monkeypatch, name):
    copy = shutil.copytree(tiny.folder(), tmp_path / "tiny")
    monkeypatch.setattr(tiny, "MODELS", tmp_path)
    good, known = (copy / name).read_bytes(), (copy / "manifest.json").read_text()

    def refused():
        with pytest.raises(SystemExit, match=f"damaged .*{name}.*git checkout models"):
            tiny.folder()

    (copy / name).write_bytes(good[:99] + bytes([good[99] ^ 1]) + good[100:])
    refused()
    (copy / name).unlink()
    refused()
    (copy / name).write_bytes(good)
    assert tiny.folder() == str(copy)
    lacking = {file: entry for file, entry in json.loads(known).items() if file != name}
    (copy / "manifest.json").write_text(json.dumps(lacking))  # nobody vouches for it
    refused()
