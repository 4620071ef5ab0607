"""The built-in sets of problems: chains, skills, words.

**Chains** of additions and subtractions such as `7+15-4=?`, for `tiny` and `tiny-moe`. Every link
must be right, so the number of operations (1 to 6) spreads pass rates over the whole range.

**Skills** have 48 letters, each of which hides a digit. The answer to `7F4=?` is 7 + 4 + the digit
of F, which no problem reveals. `tiny-skills` writes down its digit for F: `F=5\\n\\boxed{16}`.
BELIEF makes its pass@k close to that of Qwen2.5-Math-1.5B in Reinforce-Ada's paper (v1, Fig. 2).

**Words** are texts of one or two steps from templates, for a model of 135 M parameters. Its pass
rates differ between kinds, like those of large models on hard mathematics.

Each set is a function (split, count) -> rows with problem, answer, id and level. Every prefix of
the rows has each level about equally often (hard words in training half as often).
"""
import functools
import hashlib
import random
import string


def in_test_split(text: str) -> bool:
    """Decides by a hash of the text. A quarter of all chains and word problems is held out."""
    return hashlib.sha256(text.encode()).digest()[0] < 64


# ------------------------------------------------------------------------------------------- chains
OPERATIONS = (1, 2, 3, 4, 5, 6)  # a chain's level is its number of operations
LARGEST = 9  # largest number in a chain
TOP = 30  # largest intermediate result; none is below 0


def chains(split: str, count: int, seed: int = 0) -> list[dict]:
    """`count` chains, all levels in turn. Only in the split train a text may occur twice."""
    rng, rows, place = random.Random(f"{split}/{seed}"), {}, 0
    while len(rows) < count:
        level = OPERATIONS[place % len(OPERATIONS)]
        text, _, answer = chain(rng, level)
        if in_test_split(text) == (split == "test"):
            key = text if split == "test" else place  # the held-out problems are different ones
            rows.setdefault(key, dict(problem=text, answer=str(answer),
                                      id=f"builtin/{split}/{place}", level=level))
            place += 1
    return list(rows.values())


def chain(rng: random.Random, operations: int) -> tuple[str, list[str], int]:
    """One chain: its text, the lines of its worked solution, its answer."""
    value = rng.randint(1, LARGEST)
    text, lines = str(value), []
    for _ in range(operations):
        term, plus = rng.randint(1, LARGEST), rng.random() < 0.5
        if not 0 <= (value + term if plus else value - term) <= TOP:
            plus = not plus
        result = value + term if plus else value - term
        sign = "+" if plus else "-"
        text += f"{sign}{term}"
        lines.append(f"{value}{sign}{term}={result}")
        value = result
    return text + "=?", lines, value


# ------------------------------------------------------------------------------------------- skills
LETTERS = string.ascii_uppercase + string.ascii_lowercase[:22]
BELIEF = (0.7, 0.4, 0.2, 0.1, 0.045, 0.01, 0.003, 0.0003)  # in the right digit; six letters each


def skills(split: str, count: int) -> list[dict]:
    """The first `count` problems, or all (train: 3,600, test: 1,200), letters in turn."""
    rounds = zip(*(numbers(letter, split) for letter in LETTERS))
    pairs = [(letter, *pair) for each in rounds for letter, pair in zip(LETTERS, each)]
    return [dict(problem=f"{a}{letter}{b}=?", answer=str(a + b + offset(letter)),
                 id=f"builtin-skills/{split}/{i}", level=belief(letter))
            for i, (letter, a, b) in enumerate(pairs[:count])]


@functools.cache
def offset(letter: str) -> int:
    """The digit that a letter hides; all ten digits are about equally frequent."""
    digits = [i % 10 for i in range(len(LETTERS))]
    random.Random("offsets").shuffle(digits)
    return digits[LETTERS.index(letter)]


def belief(letter: str) -> float:
    """The probability of the right offset of a letter in the warm start."""
    return BELIEF[LETTERS.index(letter) % len(BELIEF)]


@functools.cache
def numbers(letter: str, split: str) -> list[tuple[int, int]]:
    """The pairs (a, b) of a letter's problems: a quarter of the 100 are in the test split.

    Each letter has other pairs there, so every sum occurs in training.
    """
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(f"numbers of {letter}").shuffle(pairs)
    return pairs[:25] if split == "test" else pairs[25:]


# -------------------------------------------------------------------------------------------- words
NAMES = ("Tom Mia Ali Sara Ben Lena Omar Ivy Raj Zoe Max Nina Leo Amy Kofi Eva Sam Lin Joe Ana "
         "Paul Rosa Ken Maya").split()
THINGS = ("apples books coins pens marbles stickers cookies cards stamps shells beads balloons "
          "pencils flowers eggs oranges buttons toys stones candles").split()
BOXES = "boxes bags jars baskets drawers".split()
TEXTS = {  # kind -> (its texts, the answer); a and b are numbers, c is smaller (or 2 to 9)
    "add": ((
        "{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?",
        "{n} finds {a} {t} in the morning and {b} {t} in the evening. How many {t} does {n} find "
        "in all?",
        "There are {a} {t} on the table. {n} puts {b} more {t} there. How many {t} are on the "
        "table now?"), lambda a, b, c: a + b),
    "subtract": ((
        "{n} had {a} {t} and gave {c} of them to {m}. How many {t} does {n} have left?",
        "There were {a} {t} in a shop, and {c} of them were sold. How many {t} are left?",
        "{n} has {a} {t} and loses {c} of them. How many {t} does {n} still have?"),
        lambda a, b, c: a - c),
    "compare": ((
        "{n} has {a} {t} and {m} has {c} {t}. How many more {t} does {n} have than {m}?",
        "{n} needs {a} {t} and has only {c}. How many {t} are missing?"), lambda a, b, c: a - c),
    "multiply": ((
        "{n} has {a} {x} with {c} {t} in each. How many {t} does {n} have?",
        "{n} buys {c} {t} every day. How many {t} does {n} buy in {a} days?"),
        lambda a, b, c: a * c),
    "divide": ((
        "{n} shares {ac} {t} equally among {c} friends. How many {t} does each friend get?",
        "{n} puts {ac} {t} into {x}, {c} {t} in each. How many {x} are full?"), lambda a, b, c: a),
    "two steps": ((
        "{n} has {a} {t}. {m} has {b} more {t} than {n}. Then {m} loses {c} {t}. How many {t} does "
        "{m} have now?",
        "{n} had {a} {t}, bought {b} more and gave {c} {t} to {m}. How many {t} does {n} have "
        "now?"), lambda a, b, c: a + b - c),
    "times and more": ((
        "{n} has {a} {x} with {c} {t} in each, and {b} more {t}. How many {t} does {n} have in "
        "all?",), lambda a, b, c: a * c + b),
}
SIZES = {"": (3, 12), " (large)": (13, 60)}  # the range of a and b
LARGE = ("add", "subtract", "compare", "multiply", "two steps")  # kinds that also come in large
KINDS = (*TEXTS, *(f"{kind} (large)" for kind in LARGE))
HARD = ("divide", "times and more", "multiply (large)", "two steps (large)")
WITHIN_REACH = tuple(kind for kind in KINDS if kind not in HARD)


def words(split: str, count: int) -> list[dict]:
    """`count` problems, no text twice, all kinds in turn; hard ones half as often in training."""
    rng, rows = random.Random(f"words/{split}/0"), {}
    turn = KINDS if split == "test" else (*KINDS, *WITHIN_REACH)
    while len(rows) < count:
        level = turn[len(rows) % len(turn)]
        text, answer = word_problem(rng, level)
        if in_test_split(text) == (split == "test") and text not in rows:
            rows[text] = dict(problem=text, answer=str(answer), level=level,
                              id=f"words/{split}/{len(rows)}")
    return list(rows.values())


def word_problem(rng: random.Random, level: str) -> tuple[str, int]:
    """One problem of this kind: its text and its answer."""
    kind = level.removesuffix(" (large)")
    low, high = SIZES[level.removeprefix(kind)]
    texts, answer = TEXTS[kind]
    a, b = rng.randint(low, high), rng.randint(low, high)
    # Nobody multiplies two large numbers in the head, so one factor stays small.
    most = 9 if kind in ("multiply", "divide", "times and more") else min(a, b) - 1
    c = rng.randint(2, max(2, most))
    (n, m), t, x = rng.sample(NAMES, 2), rng.choice(THINGS), rng.choice(BOXES)
    text = rng.choice(texts).format(a=a, b=b, c=c, ac=a * c, n=n, m=m, t=t, x=x)
    return text, answer(a, b, c)


BUILTIN = {"builtin": chains, "builtin-skills": skills, "builtin-words": words}  # by name as --data
