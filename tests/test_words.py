"""Word problems: their arithmetic read from the text again, kinds, two splits."""
import re

import pytest

from parts import words
from parts.data import load_train_and_held_out

SIGNS = {"add": "a+b", "subtract": "a-b", "compare": "a-b", "multiply": "a*b", "divide": "a//b",
         "two steps": "a+b-c"}


def numbers(row) -> dict:
    return dict(zip("abc", map(int, re.findall(r"\d+", row["problem"]))))


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_answer_follows_from_the_numbers_in_the_text(split):
    for row in words.problems(split, 2000):
        kind = row["level"].removesuffix(" (large)")
        found = numbers(row)
        if kind == "times and more":
            expected = found["a"] * found["b"] + found["c"]
        else:
            expected = eval(SIGNS[kind], found)
        if kind == "divide":
            assert found["a"] % found["b"] == 0
        assert expected == int(row["answer"]) >= 0, row


def test_kinds_come_in_turn_and_no_text_twice_or_in_both_splits():
    train, test = words.problems("train", 6000), words.problems("test", 2000)
    texts = [row["problem"] for row in train + test]
    assert len(set(texts)) == len(texts)
    assert [row["level"] for row in test[:24]] == 2 * list(words.KINDS) and len(words.KINDS) == 12
    assert train == words.problems("train", 6000)  # the same at every start
    assert not re.search("[{}]", "".join(texts))


def test_they_are_a_set_of_the_program():
    train, held_out = load_train_and_held_out("builtin-words", "builtin-words", eval_questions=72)
    assert len(held_out) == 72 and len(train) == 6000 and held_out[7].level == "add (large)"
