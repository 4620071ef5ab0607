"""Word problems for a small language model: texts of one or two steps, from templates.

Made for a model of 135 M parameters: it solves sums of small numbers every other time, and two
steps with large ones never, so pass rates by kind spread from hopeless to easy, as those of large
models do on hard mathematics. Numbers, names, things and phrasing make millions of different texts;
a text's hash decides whether it is for training or held out.
"""
import hashlib
import random

NAMES = ("Tom Mia Ali Sara Ben Lena Omar Ivy Raj Zoe Max Nina Leo Amy Kofi Eva Sam Lin Joe Ana "
         "Paul Rosa Ken Maya").split()
THINGS = ("apples books coins pens marbles stickers cookies cards stamps shells beads balloons "
          "pencils flowers eggs oranges buttons toys stones candles").split()
BOXES = "boxes bags jars baskets drawers".split()
TEMPLATES = {  # kind -> (its texts, the answer); a and b are numbers, c is smaller than both
    "add": (("{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?",
             "{n} finds {a} {t} in the morning and {b} {t} in the evening. How many {t} does {n} "
             "find in all?",
             "There are {a} {t} on the table. {n} puts {b} more {t} there. How many {t} are on the "
             "table now?"), lambda a, b, c: a + b),
    "subtract": (("{n} had {a} {t} and gave {c} of them to {m}. How many {t} does {n} have left?",
                  "There were {a} {t} in a shop, and {c} of them were sold. How many {t} are left?",
                  "{n} has {a} {t} and loses {c} of them. How many {t} does {n} still have?"),
                 lambda a, b, c: a - c),
    "compare": (("{n} has {a} {t} and {m} has {c} {t}. How many more {t} does {n} have than {m}?",
                 "{n} needs {a} {t} and has only {c}. How many {t} are missing?"),
                lambda a, b, c: a - c),
    "multiply": (("{n} has {a} {x} with {c} {t} in each. How many {t} does {n} have?",
                  "{n} buys {c} {t} every day. How many {t} does {n} buy in {a} days?"),
                 lambda a, b, c: a * c),
    "divide": (("{n} shares {ac} {t} equally among {c} friends. How many {t} does each friend get?",
                "{n} puts {ac} {t} into {x}, {c} {t} in each. How many {x} are full?"),
               lambda a, b, c: a),
    "two steps": (("{n} has {a} {t}. {m} has {b} more {t} than {n}. Then {m} loses {c} {t}. How "
                   "many {t} does {m} have now?",
                   "{n} had {a} {t}, bought {b} more and gave {c} {t} to {m}. How many {t} does "
                   "{n} have now?"), lambda a, b, c: a + b - c),
    "times and more": (("{n} has {a} {x} with {c} {t} in each, and {b} more {t}. How many {t} does "
                        "{n} have in all?",), lambda a, b, c: a * c + b),
}
SIZES = {"": (3, 12), " (large)": (13, 60)}  # the range of a and b
LARGE = ("add", "subtract", "compare", "multiply", "two steps")  # kinds that also come in large
KINDS = (*TEMPLATES, *(f"{kind} (large)" for kind in LARGE))


def make(rng: random.Random, level: str) -> tuple[str, int]:
    """One problem of this kind: its text and its answer."""
    kind = level.removesuffix(" (large)")
    low, high = SIZES[level.removeprefix(kind)]
    texts, answer = TEMPLATES[kind]
    a, b = rng.randint(low, high), rng.randint(low, high)
    # a factor stays small: nobody multiplies two large numbers in the head
    most = 9 if kind in ("multiply", "divide", "times and more") else min(a, b) - 1
    c = rng.randint(2, max(2, most))
    (n, m), t, x = rng.sample(NAMES, 2), rng.choice(THINGS), rng.choice(BOXES)
    text = rng.choice(texts).format(a=a, b=b, c=c, ac=a * c, n=n, m=m, t=t, x=x)
    return text, answer(a, b, c)


def problems(split: str, count: int, seed: int = 0) -> list[dict]:
    """`count` problems, all kinds in turn, no text twice. A text's hash decides its split."""
    rng, found = random.Random(f"words/{split}/{seed}"), {}
    while len(found) < count:
        level = KINDS[len(found) % len(KINDS)]
        text, answer = make(rng, level)
        if in_test_split(text) == (split == "test") and text not in found:
            found[text] = dict(problem=text, answer=str(answer), level=level,
                               id=f"words/{split}/{len(found)}")
    return list(found.values())


def in_test_split(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 64  # a quarter of all texts
