"""The built-in problems: their arithmetic read from the text again, levels in turn, two splits."""
import hashlib
import json
import re

import pytest

from parts.problems import BUILTIN, KINDS, OPERATIONS, TOP, chains, words

SIGNS = {"add": "a+b", "subtract": "a-b", "compare": "a-b", "multiply": "a*b", "divide": "a//b",
         "two steps": "a+b-c", "times and more": "a*b+c"}  # of the numbers in the order of the text


@pytest.mark.parametrize("name, split, digest", [
    ("builtin", "train", "97505660cc6c"),
    ("builtin", "test", "1811964bf828"),
    ("builtin-skills", "train", "f44151dc1a97"),
    ("builtin-skills", "test", "3c28fc0d5298"),
    ("builtin-words", "train", "a2bdd02f385a"),
    ("builtin-words", "test", "8d5d4ef6d711")])
def test_they_are_the_same_at_every_start_and_with_every_version(name, split, digest):
    """Else no figure of the documentation would hold, and no run could be resumed."""
    rows = BUILTIN[name](split, 6000 if split == "train" else 240)
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12] == digest
    assert BUILTIN[name](split, 50) == rows[:50]


def test_chains_are_right_and_spread_over_all_levels():
    found = chains("train", 600)
    for row in found:
        assert eval(row["problem"].removesuffix("=?")) == int(row["answer"])  # our own text
        assert len(re.findall("[+-]", row["problem"])) == row["level"]
        assert 0 <= int(row["answer"]) <= TOP
    assert found[:50] != chains("train", 50, seed=1)


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_words_answer_follows_from_the_numbers_in_the_text(split):
    for row in words(split, 2000):
        kind = row["level"].removesuffix(" (large)")
        found = dict(zip("abc", map(int, re.findall(r"\d+", row["problem"]))))
        assert eval(SIGNS[kind], found) == int(row["answer"]) >= 0, row
        assert kind != "divide" or found["a"] % found["b"] == 0
        assert not re.search("[{}]", row["problem"])


@pytest.mark.parametrize("make, levels", [(chains, OPERATIONS), (words, KINDS)])
def test_levels_come_in_turn_and_no_text_in_both_splits(make, levels):
    """`limit` takes the first so many: they must not be easy ones by chance."""
    train, test = make("train", 6000), make("test", 2000)
    assert [row["level"] for row in test[:2 * len(levels)]] == 2 * list(levels)
    texts = [{row["problem"] for row in rows} for rows in (train, test)]
    assert not texts[0] & texts[1]
    assert make is chains or [*map(len, texts)] == [6000, 2000]  # a short chain may come twice
