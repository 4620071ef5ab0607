"""Lab 6: what one token counts, and how a mini-batch is cut"""
import itertools
import random

import minirl
from course.checks import Wrong, must_be, spelled
from parts import policy
from parts.config import Config
from parts.policy import Row


def row_of(prompt, response):
    return Row([0] * (prompt + response), prompt, [0.0] * response, 1.0)


def scales(responses, **settings):
    """(call, one scale per row) of rows with responses of these lengths; max_tokens is 10."""
    settings = dict(max_tokens=10) | settings
    rows = [row_of(2 + i, n) for i, n in enumerate(responses)]  # of different prompts
    minirl.set_scales(rows, Config(**settings))
    said = "".join(f", {name}={value}" for name, value in settings.items())
    lengths = spelled(list(responses))
    call = f"scales of rows with {lengths} response tokens{said}"
    return call, [row.scale for row in rows]


def check_constant():
    """constant: a sum over tokens and a mean over responses, divided by max_tokens"""
    for lengths, right in (((5,), [1 / 10]), ((2, 6), [1 / 20] * 2), ((1, 1, 9), [1 / 30] * 3)):
        call, yours = scales(lengths)
        must_be(call, yours, right, why="Every token counts the same, however long its response.")
    call, yours = scales((2, 6), max_tokens=64)
    must_be(call, yours, [1 / 128] * 2)


def check_mini_batches():
    """the mean of a mini-batch: an average one, as the rows come in mini_batches"""
    for lengths, N in itertools.product(((2, 6), (3, 3, 3, 3), (1, 2, 3, 4, 5)), (1, 2)):
        call, yours = scales(lengths, mini_batches=N)
        must_be(call, yours, [N / len(lengths) / 10] * len(lengths))


def check_response():
    """response: each response's tokens add up to the same, however long it is"""
    for lengths, N in (((4,), 1), ((2, 6), 1), ((2, 6), 2), ((1, 2, 9), 2)):
        call, yours = scales(lengths, length_norm="response", mini_batches=N)
        must_be(f"{call}: scale times tokens", [s * n for s, n in zip(yours, lengths)],
                [N / len(lengths)] * len(lengths), why="The prompt is no part of the response.")


def check_batch():
    """batch: every token counts the same, and all of them 1 (by mini-batch)"""
    for lengths, N in (((4,), 1), ((2, 6), 1), ((2, 6), 2), ((1, 2, 9), 2)):
        call, yours = scales(lengths, length_norm="batch", mini_batches=N)
        must_be(call, yours, [N / sum(lengths)] * len(lengths))
    call, yours = scales((), length_norm="batch")
    must_be(call, yours, [])


def cut(rows, tokens, padding=0.05):
    """(call, the micro-batches) of rows, each given as (prompt, response)."""
    rows = [row_of(*lengths) for lengths in rows]
    given = list(rows)
    batches = policy.micro_batches(given, tokens, padding)
    lengths = [f"{row.prompt_length}+{row.length}" for row in rows]
    call = (f"micro_batches of rows with {', '.join(lengths)} tokens (prompt+response), "
            f"tokens={tokens}, padding={padding}")
    if sorted(id(row) for batch in batches for row in batch) != sorted(map(id, rows)):
        raise Wrong(f"{call}: yours is {picture(batches)}: rows are missing or doubled")
    if len(given) < len(rows):
        raise Wrong(f"{call}: the list has {len(given)} rows afterwards, and they are needed "
                    "again: leave it as it is")
    if not all(batches):
        raise Wrong(f"{call}: yours is {picture(batches)}: one of them is empty")
    return call, batches


def picture(batches) -> str:
    return spelled([[len(row.ids) for row in batch] for batch in batches])


def area(batch) -> int:
    return len(batch) * max(len(row.ids) for row in batch)


def random_rows():
    """Lists of rows as (prompt, response), the short ones first, then long prompts among short."""
    rng = random.Random(0)
    for longest in (9, 60):
        for count in (1, 2, 3, 5, 8, 20):
            for _ in range(4):
                yield [(rng.randint(1, longest), rng.randint(1, 9)) for _ in range(count)]


def check_once():
    """every row is in exactly one micro-batch; no rows, none"""
    call, batches = cut([], 10)
    must_be(f"{call}: how many", len(batches), 0)
    for rows in random_rows():
        for tokens in (5, 12, 100):
            cut(rows, tokens)


def check_budget():
    """no rectangle is larger than the budget, but that of a single long row"""
    known = [([(2, 50), (2, 48)], 102), ([(40, 12), (2, 48)], 102)]  # 104, by sums 102
    drawn = [(rows, tokens) for rows in random_rows() for tokens in (5, 12, 30, 120)]
    for rows, tokens in drawn + known:
        call, batches = cut(rows, tokens)
        for batch in batches:
            if area(batch) > tokens and len(batch) > 1:
                raise Wrong(f"{call}: yours is {picture(batches)}, and {len(batch)} rows x "
                            f"longest {max(len(row.ids) for row in batch)} = {area(batch)} tokens")


def check_padding():
    """at most the share `padding` of all rectangles is padding"""
    barely = [[(2, 98), (2, 87)], [(50, 50), (3, 92), (3, 80)]]  # 5.5 % and 6 %, all in one
    for rows in itertools.chain(random_rows(), barely):
        for padding in (0.0, 0.05, 0.3):
            call, batches = cut(rows, 1000, padding)
            whole = sum(map(area, batches))
            empty = whole - sum(map(sum, rows))
            if empty > padding * whole + 1e-9:
                raise Wrong(f"{call}: yours is {picture(batches)}, {whole} tokens, of which "
                            f"{empty} are padding ({empty / whole:.0%})")


def check_full():
    """rows of equal length fill their rectangles, and a little padding saves a batch"""
    for count, tokens in ((4, 12), (5, 12), (9, 30)):
        call, batches = cut([(1 + i % 5, 5 - i % 5) for i in range(count)], tokens)  # 6 each
        must_be(f"{call}: how many", len(batches), -(-count // (tokens // 6)))
    for rows, why in (([(2, 40), (2, 41)], "1 token of 86 is padding"),
                      ([(2, 50), (2, 48)], "2 tokens of 104 are padding")):
        call, batches = cut(rows, 1000)
        must_be(f"{call}: how many ({why})", len(batches), 1)
    for rows in ([(2, 40), (2, 1), (2, 40)], [(40, 2), (1, 3), (2, 40)]):
        call, batches = cut(rows, 1000)
        must_be(f"{call}: how many (sort them first, prompts included)", len(batches), 2)


CHECKS = [(1, check_constant), (2, check_mini_batches), (1, check_response), (1, check_batch),
          (1, check_once), (1, check_budget), (2, check_padding), (1, check_full)]
