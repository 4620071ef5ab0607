"""Lab 6: what one token counts, and how a mini-batch is cut"""
import itertools
import random

import minirl
from course.checks import Wrong, must_be, spelled
from parts import policy
from parts.config import Config
from parts.policy import Row


def rows_of(*responses, prompt=2):
    return [Row([0] * (prompt + n), prompt, [0.0] * n, 1.0) for n in responses]


def scales(responses, **settings):
    """(call, one scale per row) of rows with responses of these lengths."""
    rows = rows_of(*responses)
    minirl.set_scales(rows, Config(max_tokens=10, **settings))
    said = "".join(f", {name}={value}" for name, value in settings.items())
    lengths = spelled(list(responses))
    call = f"scales of rows with {lengths} response tokens, max_tokens=10{said}"
    return call, [row.scale for row in rows]


def check_constant(functions):
    """constant: a sum over tokens and a mean over responses, divided by max_tokens"""
    for lengths, right in (((5,), [1 / 10]), ((2, 6), [1 / 20] * 2), ((1, 1, 9), [1 / 30] * 3)):
        call, yours = scales(lengths)
        must_be(call, yours, right, why="Every token counts the same, however long its response.")


def check_mini_batches(functions):
    """the mean of a mini-batch: an average one, as the rows come in mini_batches"""
    for lengths, N in itertools.product(((2, 6), (3, 3, 3, 3)), (1, 2)):
        call, yours = scales(lengths, mini_batches=N)
        must_be(call, yours, [N / len(lengths) / 10] * len(lengths))


def check_response(functions):
    """response: each response's tokens add up to the same, however long it is"""
    for lengths, N in (((4,), 1), ((2, 6), 1), ((2, 6), 2)):
        call, yours = scales(lengths, length_norm="response", mini_batches=N)
        must_be(f"{call}: scale times tokens", [s * n for s, n in zip(yours, lengths)],
                [N / len(lengths)] * len(lengths), why="The prompt is no part of the response.")


def check_batch(functions):
    """batch: every token counts the same, and all of them 1 (by mini-batch)"""
    for lengths, N in (((4,), 1), ((2, 6), 1), ((2, 6), 2)):
        call, yours = scales(lengths, length_norm="batch", mini_batches=N)
        must_be(call, yours, [N / sum(lengths)] * len(lengths))


def cut(responses, tokens, padding=0.05, prompt=2):
    rows = rows_of(*responses, prompt=prompt)
    batches = policy.micro_batches(rows, tokens, padding)
    call = (f"micro_batches of rows with {spelled([n + prompt for n in responses])} tokens, "
            f"tokens={tokens}, padding={padding}")
    return call, rows, batches


def picture(batches) -> str:
    return spelled([[len(row.ids) for row in batch] for batch in batches])


def random_lengths():
    """Lists of lengths, the short ones first."""
    rng = random.Random(0)
    for count in (1, 2, 3, 5, 8, 20):
        for _ in range(4):
            yield [rng.randint(1, 9) for _ in range(count)]


def check_once(functions):
    """every row is in exactly one micro-batch; no rows, none"""
    call, _, batches = cut([], 10)
    must_be(f"{call}: how many", len(batches), 0)
    for lengths in random_lengths():
        for tokens in (5, 12, 100):
            call, rows, batches = cut(lengths, tokens)
            found = sorted(id(row) for batch in batches for row in batch)
            if found != sorted(map(id, rows)):
                raise Wrong(f"{call}: yours is {picture(batches)}: rows are missing or doubled")
            if any(not batch for batch in batches):
                raise Wrong(f"{call}: yours is {picture(batches)}: one of them is empty")


def check_budget(functions):
    """no rectangle is larger than the budget, but that of a single long row"""
    for lengths in random_lengths():
        for tokens in (5, 12, 30):
            call, _, batches = cut(lengths, tokens)
            for batch in batches:
                area = len(batch) * max(len(row.ids) for row in batch)
                if area > tokens and len(batch) > 1:
                    raise Wrong(f"{call}: yours is {picture(batches)}, and {len(batch)} rows x "
                                f"longest {max(len(row.ids) for row in batch)} = {area} tokens")


def check_padding(functions):
    """at most the share `padding` of all rectangles is padding"""
    for lengths in random_lengths():
        for padding in (0.0, 0.05, 0.3):
            call, rows, batches = cut(lengths, 1000, padding)
            area = sum(len(batch) * max(len(row.ids) for row in batch) for batch in batches)
            real = sum(len(row.ids) for row in rows)
            if area - real > padding * area + 1e-9:
                raise Wrong(f"{call}: yours is {picture(batches)}, {area} tokens, of which "
                            f"{area - real} are padding ({(area - real) / area:.0%})")


def check_full(functions):
    """rows of equal length fill their rectangles, and a little padding saves a batch"""
    for count, tokens in ((4, 12), (5, 12), (9, 30)):
        call, _, batches = cut([4] * count, tokens)  # 6 tokens each
        must_be(f"{call}: how many", len(batches), -(-count // (tokens // 6)))
    call, _, batches = cut([40, 41], 1000)
    must_be(f"{call}: how many (1 token of 86 is padding)", len(batches), 1)
    call, _, batches = cut([40, 1, 40], 1000)
    must_be(f"{call}: how many (sort them first)", len(batches), 2)


CHECKS = [(1, check_constant), (2, check_mini_batches), (1, check_response), (1, check_batch),
          (1, check_once), (1, check_budget), (2, check_padding), (1, check_full)]
