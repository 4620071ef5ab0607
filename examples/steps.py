"""A reward for the built-in model that counts written steps, whether the answer is right or not.

    python minirl.py --reward examples/steps.py:score --threshold 0.9

A problem such as `7+5-4=?` has as many steps as operations. Each line with "=" before the box earns
its share of the reward, even if the line is wrong.
"""


def score(problem: dict, completion: str) -> float:
    """The share of the problem's steps that are written down: 0 to 1."""
    steps = problem["level"]  # a column of the built-in problems: the number of operations
    before_the_box = completion.partition("\\boxed")[0]
    written = [line for line in before_the_box.splitlines() if "=" in line]
    return min(len(written), steps) / steps
