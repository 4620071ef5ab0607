"""The built-in problems: right answers, levels in turn, and two splits."""
import hashlib
import json
import re

import pytest

from models.problems import BUILTIN, KINDS, OPERATIONS, TOP, chains, words

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
