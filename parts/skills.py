"""Built-in problems of very different difficulty: 48 skills, each a letter that hides an offset.

`7F4=?` asks for 7 + 4 + the offset of F, a digit that nothing in the problem gives away. The model
`tiny-skills` writes down what it believes F to be, and adds: `F=5\\n\\boxed{16}`. Of each letter it
believes the right offset with another probability. So the pass rates are chosen and not found:
BELIEF spreads them so that pass@k from k = 1 to 256 is close to what Reinforce-Ada's paper
(v1, Fig. 2) shows for Qwen2.5-Math-1.5B. Many prompts are then solved once in twenty or fifty draws
or less. That is what adaptive sampling is made for, and what the chains of tiny.py, a change of
habit that is learnt from few samples, are not.

Letters have nothing in common, neither what is right nor what is mostly believed instead. So what
is learnt of one says nothing about another; with some numbers, it holds for all numbers.

    python minirl.py --model tiny-skills               # trains on them
    python -m parts.tiny tiny-skills FOLDER            # repeats the recipe of models/tiny-skills
"""
import functools
import random
import string

LETTERS = string.ascii_uppercase + string.ascii_lowercase[:22]
BELIEF = (0.7, 0.4, 0.2, 0.1, 0.045, 0.01, 0.003, 0.0003)  # in the right offset; six letters each
WARM_START = dict(steps=6000, batch=64, lr=3e-3, seed=0)
SIZES = dict(num_hidden_layers=2, intermediate_size=192)


@functools.cache
def offset(letter: str) -> int:
    """What a letter hides: a digit, from a shuffled row in which all ten are about as frequent."""
    digits = [i % 10 for i in range(len(LETTERS))]
    random.Random("offsets").shuffle(digits)
    return digits[LETTERS.index(letter)]


@functools.cache
def favourite(letter: str) -> int:
    """A letter's usual error. Its distance from the offset tells nothing of other letters'."""
    distances = [1 + i % 9 for i in range(len(LETTERS))]
    random.Random("favourites").shuffle(distances)
    return (offset(letter) + distances[LETTERS.index(letter)]) % 10


def belief(letter: str) -> float:
    """How often the warm start shows the right offset of a letter."""
    return BELIEF[LETTERS.index(letter) % len(BELIEF)]


@functools.cache
def numbers(letter: str, split: str) -> list[tuple[int, int]]:
    """The pairs (a, b) of a letter's problems: of the 100, about a quarter are in the test split.

    Which ones differs from letter to letter, so every sum is met in training.
    """
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(f"numbers of {letter}").shuffle(pairs)
    return pairs[:25] if split == "test" else pairs[25:]


def problems(split: str, count: int) -> list[dict]:
    """The first `count` problems, or all there are (train: 3,600, test: 1,200); letters in turn."""
    pairs = {letter: numbers(letter, split) for letter in LETTERS}
    found = []
    for i in range(min(count, sum(map(len, pairs.values())))):
        round_, place = divmod(i, len(LETTERS))
        letter = LETTERS[place]
        a, b = pairs[letter][round_]
        found.append(dict(problem=f"{a}{letter}{b}=?", answer=str(a + b + offset(letter)),
                          id=f"builtin-skills/{split}/{i}", level=belief(letter)))
    return found


def demonstration(rng: random.Random, lazy: bool) -> tuple[str, str]:
    """One (problem, completion) pair of the warm start, never from the test split.

    The offset is right as often as `belief` says. Else it is, nine times in ten, the letter's
    `favourite` error: a model that is wrong is sure of it. `lazy`, which the chains know, has no
    meaning here.
    """
    letter = rng.choice(LETTERS)
    a, b = rng.choice(numbers(letter, "train"))
    right = believed = offset(letter)
    if rng.random() > belief(letter):
        errors = [digit for digit in range(10) if digit not in (right, favourite(letter))]
        believed = favourite(letter) if rng.random() < 0.9 else rng.choice(errors)
    return f"{a}{letter}{b}=?", f"{letter}={believed}\n\\boxed{{{a + b + believed}}}"
