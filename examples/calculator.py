"""What would a calculator make of it? Tells problems that were misread from sums that went wrong.

    python eval.py --adapter runs/NAME --data svamp --k 2 --reward examples/calculator.py:score \
        --out runs/calculator

The samples are those of the same command without the last two flags: both scores are of the same
answers.
"""
import operator
import re

NUMBER = r"(\d+(?:\.\d+)?)"
SUM = re.compile(rf"{NUMBER} *([-+*/]) *{NUMBER} *=")
DO = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def score(problem: dict, completion: str) -> float:
    """1 if the right answer is what one of the sums in the completion should have come to."""
    sums = [(float(a), sign, float(b)) for a, sign, b in SUM.findall(completion)]
    results = [DO[sign](a, b) for a, sign, b in sums if b or sign != "/"]
    gold = float(problem["answer"] if "answer" in problem else problem["Answer"])  # the hub's name
    return float(any(abs(result - gold) < 1e-6 for result in results))
