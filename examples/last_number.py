"""A reward without a box: the last number of the answer must be the gold.

    python minirl.py --model SmolLM2-135M-Instruct --reward examples/last_number.py:score
"""
import re


def score(problem: dict, completion: str) -> float:
    """1 if the last number in the text is the problem's answer, else 0."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", completion)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(problem["answer"]))
