"""Lab 6: what one token counts, and how a mini-batch is cut to fit into memory.

    python course/check.py 6
    python course/train.py --with lab_6
"""


def set_scales(rows: list, config) -> None:
    """Set row.scale, the weight of each of its tokens in the loss -sum(term_T * scale_T).

    rows: all kept samples of a step; row.length is the number of response tokens. They will be cut
    into config.mini_batches optimizer steps. Each step's loss is a mean over responses, divided by
    a length that config.length_norm names:

        constant   config.max_tokens: the sum over tokens, up to one constant factor (MiniRL)
        response   the response's own length: the mean over its tokens (GRPO)
        batch      the mean length of all rows: the mean over all tokens

    Divide by the responses of an *average* mini-batch, len(rows) / config.mini_batches, not by
    those of the row's own: some samplers give important prompts more rows, and dividing by the own
    count would cancel that. No rows: nothing to set.
    """
    raise NotImplementedError


def micro_batches(rows: list, tokens: int, padding: float = 0.05) -> list[list]:
    """Cut the rows into micro-batches for the forward pass.

    A micro-batch is a rectangle: rows x longest row (len(row.ids), prompt included).
    1. Every row is in exactly one.
    2. No rectangle is larger than `tokens`, except that of a single row that is too long.
    3. Of all rectangles together at most a share `padding` is padding.
    4. There are roughly as few as this allows: rows of equal length fill their rectangles.
    No rows: no micro-batches. Leave the list `rows` as it is. Divide by nothing here: `set_scales`
    has done it, so the gradient does not depend on the cut.
    """
    raise NotImplementedError
