"""Counts an answer as right if one of its sums, calculated correctly, gives the gold.

This score distinguishes misread problems from wrong calculations.

    python eval.py --adapter runs/NAME --data svamp --k 2 --reward examples/calculator.py:score \
        --out runs/calculator

The command without the last two flags samples the same answers, so both scores grade the same
answers.
"""
import operator
import re

NUMBER = r"(\d+(?:\.\d+)?)"
SUM = re.compile(rf"{NUMBER} *([-+*/]) *{NUMBER} *=")
DO = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def score(problem: dict, completion: str) -> float:
    """1 if one of the sums in the completion, calculated correctly, gives the gold answer."""
    sums = [(float(a), sign, float(b)) for a, sign, b in SUM.findall(completion)]
    results = [DO[sign](a, b) for a, sign, b in sums if b or sign != "/"]
    gold = float(problem["answer"] if "answer" in problem else problem["Answer"])  # the hub's name
    return float(any(abs(result - gold) < 1e-6 for result in results))
