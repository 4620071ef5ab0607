"""Lab 6: what one token counts, and how a mini-batch is cut"""
import itertools
import random

import minirl
from course.checks import Wrong, must_be, spelled
from parts import logprobs
from parts.config import Config
from parts.logprobs import Row

LENGTHS = ((4,), (2, 6), (3, 3, 3, 3), (1, 2, 9), (1, 2, 3, 4, 5))


def row_of(prompt, response):
    return Row([0] * (prompt + response), prompt, [0.0] * response, 1.0)


def check_scales(norm: str, right):
    """Scales of rows with responses of these lengths; right(lengths, N, max_tokens) says which."""
    for lengths, N, longest in itertools.product(LENGTHS, (1, 2), (10, 64)):
        settings = dict(length_norm=norm, mini_batches=N, max_tokens=longest)
        rows = [row_of(2 + i, n) for i, n in enumerate(lengths)]  # with different prompts
        minirl.set_scales(rows, Config(**settings))
        said = ", ".join(f"{name}={value}" for name, value in settings.items())
        must_be(f"scales of rows with {spelled(lengths)} response tokens, {said}",
                [row.scale for row in rows], right(lengths, N, longest))


def check_constant():
    """constant: a sum over tokens and a mean over responses, divided by max_tokens"""
    check_scales("constant", lambda lengths, N, most: [N / len(lengths) / most] * len(lengths))


def check_response():
    """response: each response's tokens add up to the same, however long it is"""
    check_scales("response", lambda lengths, N, _: [N / len(lengths) / n for n in lengths])


def check_batch():
    """batch: every token counts the same, and all of them 1 (by mini-batch); no rows, no error"""
    check_scales("batch", lambda lengths, N, _: [N / sum(lengths)] * len(lengths))
    for norm in ("constant", "response", "batch"):
        minirl.set_scales([], Config(length_norm=norm))


def cut(rows, tokens, padding=0.05):
    """(call, the micro-batches) of rows, each given as (prompt, response)."""
    rows = [row_of(*lengths) for lengths in rows]
    given = list(rows)
    batches = logprobs.micro_batches(given, tokens, padding)
    lengths = [f"{row.prompt_length}+{row.length}" for row in rows]
    call = (f"micro_batches of rows with {', '.join(lengths)} tokens (prompt+response), "
            f"tokens={tokens}, padding={padding}: yours is {picture(batches)}")
    if sorted(id(row) for batch in batches for row in batch) != sorted(map(id, rows)):
        raise Wrong(f"{call}: rows are missing or doubled")
    if list(map(id, given)) != list(map(id, rows)):
        raise Wrong(f"{call}, and the list that was given has changed: leave it as it is")
    if not all(batches):
        raise Wrong(f"{call}: one of them is empty")
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
    """no rectangle is larger than the budget, except that of a single long row"""
    known = [([(2, 50), (2, 48)], 102), ([(40, 12), (2, 48)], 102)]  # 104, by sums 102
    drawn = [(rows, tokens) for rows in random_rows() for tokens in (5, 12, 30, 120)]
    for rows, tokens in drawn + known:
        call, batches = cut(rows, tokens)
        for batch in batches:
            if area(batch) > tokens and len(batch) > 1:
                raise Wrong(f"{call}, and {len(batch)} rows x longest "
                            f"{max(len(row.ids) for row in batch)} = {area(batch)} tokens")


def check_padding():
    """at most the share `padding` of all rectangles is padding"""
    barely = [[(2, 98), (2, 87)], [(50, 50), (3, 92), (3, 80)]]  # 5.5 % and 6 %, all in one
    for rows in itertools.chain(random_rows(), barely):
        for padding in (0.0, 0.05, 0.3):
            call, batches = cut(rows, 1000, padding)
            whole = sum(map(area, batches))
            empty = whole - sum(map(sum, rows))
            if empty > padding * whole + 1e-9:
                raise Wrong(f"{call}, {whole} tokens, of which {empty} are padding "
                            f"({empty / whole:.0%})")


def check_full():
    """rows of equal length fill their rectangles, and a little padding saves a batch"""
    for count, tokens in ((4, 12), (5, 12), (9, 30)):
        call, batches = cut([(1 + i % 5, 5 - i % 5) for i in range(count)], tokens)  # 6 each
        must_be(f"{call}: how many", len(batches), -(-count // (tokens // 6)))
    for rows, right in (([(2, 40), (2, 41)], 1), ([(2, 50), (2, 48)], 1),  # 1 of 86, 2 of 104
                        ([(2, 40), (2, 1), (2, 40)], 2), ([(40, 2), (1, 3), (2, 40)], 2)):
        call, batches = cut(rows, 1000)
        must_be(f"{call}: how many (sort the rows, prompts included)", len(batches), right)


CHECKS = [(2, check_constant), (2, check_response), (1, check_batch), (1, check_once),
          (1, check_budget), (2, check_padding), (1, check_full)]
