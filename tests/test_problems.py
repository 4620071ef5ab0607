"""The built-in problems: right answers, levels in turn, two splits, no shortcut for the skills."""
import hashlib
import json
import re
from statistics import mean

import pytest

from helpers import ROOT
from models import make
from models.problems import (
    BUILTIN, KINDS, LETTERS, OPERATIONS, TOP, belief, chains, offset, skills, words)
from parts.models import tiny_folder

SIGNS = {"add": "a+b", "subtract": "a-b", "compare": "a-b", "multiply": "a*b", "divide": "a//b",
         "two steps": "a+b-c", "times and more": "a*b+c"}  # of the numbers in the order of the text


@pytest.mark.parametrize("name, train, test", [
    ("builtin", "97505660cc6c", "081b3187f9ea"),
    ("builtin-skills", "f44151dc1a97", "3c28fc0d5298"),
    ("builtin-words", "a2bdd02f385a", "8d5d4ef6d711")])
def test_they_are_the_same_at_every_start_and_with_every_version(name, train, test):
    """Else no figure of the documentation would hold, and no run could be resumed."""
    for split, count, digest in (("train", 6000, train), ("test", 240, test)):
        rows = BUILTIN[name](split, count)
        assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12] == digest
        assert BUILTIN[name](split, 50) == rows[:50]


def test_chains_are_right_and_spread_over_all_levels():
    for row in chains("train", 600):
        assert eval(row["problem"].removesuffix("=?")) == int(row["answer"])  # our own text
        assert len(re.findall("[+-]", row["problem"])) == row["level"]
        assert 0 <= int(row["answer"]) <= TOP


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_words_answer_follows_from_the_numbers_in_the_text(split):
    for row in words(split, 2000):
        kind = row["level"].removesuffix(" (large)")
        numbers = dict(zip("abc", map(int, re.findall(r"\d+", row["problem"]))))
        assert eval(SIGNS[kind], numbers) == int(row["answer"]) >= 0, row
        assert kind != "divide" or numbers["a"] % numbers["b"] == 0
        assert not re.search("[{}]", row["problem"])


@pytest.mark.parametrize("make, levels", [(chains, OPERATIONS), (words, KINDS)])
def test_levels_come_in_turn_and_no_text_in_both_splits(make, levels):
    """`limit` takes the first so many: they must not be easy ones by chance."""
    train, test = make("train", 6000), make("test", 2000)
    assert [row["level"] for row in test[:2 * len(levels)]] == 2 * list(levels)
    trained, held_out = ({row["problem"] for row in rows} for rows in (train, test))
    assert not trained & held_out
    assert len(held_out) == 2000  # the bootstrap takes them for independent
    assert make is chains or len(trained) == 6000  # a short chain may come twice


# ------------------------------------------------------------------------------ the skills
def test_a_problem_adds_its_letters_digit_and_no_problem_is_in_both_splits():
    train, test = skills("train", 9999), skills("test", 9999)
    assert (len(train), len(test)) == (3600, 1200)
    assert len({row["problem"] for row in train + test}) == 4800
    for row in train + test:
        a, letter, b = re.fullmatch(r"(\d)(\w)(\d)=\?", row["problem"]).groups()
        assert int(row["answer"]) - int(a) - int(b) == offset(letter)
        assert row["level"] == belief(letter)


def pass_rates() -> dict[str, list[float]]:
    """Letter -> the exact probabilities of the right completions of its held-out problems."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder("tiny-skills"), dtype=torch.float32)
    tokenizer, found = make.build_tokenizer(), {letter: [] for letter in LETTERS}
    for row in skills("test", 1200):
        letter = row["problem"][1]
        prompt = tokenizer.encode(f"<|user|>{row['problem']}<|assistant|>")
        right = tokenizer.encode(
            f"{letter}={offset(letter)}\n\\boxed{{{row['answer']}}}{make.END}")
        with torch.no_grad():
            logits = model(torch.tensor([prompt + right])).logits[0, len(prompt) - 1:-1]
        logprobs = logits.log_softmax(-1)[range(len(right)), right]
        found[letter].append(logprobs.sum().exp().item())
    return found


@pytest.mark.slow
def test_the_models_pass_rates_are_those_of_the_paper():
    """Exact chances of the right completion; pass@k as bench/plan.md quotes both."""
    plan = (ROOT / "bench" / "plan.md").read_text()
    k = [2**i for i in range(9)]
    by_letter = pass_rates()
    exact = [p for rates in by_letter.values() for p in rates]
    ours = [mean(1 - (1 - p) ** n for p in exact) for n in k]
    paper = (.18, .27, .38, .48, .58, .66, .72, .77, .81)  # Reinforce-Ada, v1, Fig. 2
    for values in (ours, paper):
        assert " ".join(f"{p:.2f}"[1:] for p in values) in plan
    for n, one, other in zip(k, ours, paper):
        assert abs(one - other) < (0.025 if n <= 64 else 0.1)
    for letter, rates in by_letter.items():
        share = belief(letter)
        assert all(abs(p - share) < 0.2 * share + 0.01 for p in rates)
