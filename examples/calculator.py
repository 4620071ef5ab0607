"""Counts an answer as right if a calculator would get the gold from a sum that it contains.

This score tells problems that were misread from sums that were calculated wrongly.

    python eval.py --adapter runs/NAME --data svamp --k 2 --reward examples/calculator.py:score \
        --out runs/calculator

The samples are the same as those of this command without the last two flags, so both scores judge
the same answers.
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
