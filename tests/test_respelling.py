"""Golds that people wrote: spelled otherwise they must be right, and changed they must be wrong.

bench/results/verifier/golds.txt has the answers of 500 exercises (bench/results/verifier/
NOTICE.md names the books). Nobody who wrote a rule of the verifier chose them.
"""
import re

import pytest

from helpers import ROOT
from rewards import Grader, exact, split

GOLDS = sorted({*(ROOT / "bench/results/verifier/golds.txt").read_text().splitlines()})
WORDS = re.compile(r"\\(?:text|mathrm|operatorname)|(?<![\\A-Za-z])[A-Za-z]{3}")
OPENING = re.compile(r"(?<!\\left)(?<!\\)[(\[]")
CLOSING = re.compile(r"(?<!\\right)(?<!\\)[)\]]")


def respelled(gold: str) -> dict[str, str]:
    """{kind: the same answer in another spelling}"""
    spaced = re.sub(r"(?<=[+=])|(?<=,)(?!\d{3})", r"\\, ", gold)
    found = {"dollars": f"${gold}$", "point": f"{gold}.", "spaces": spaced,
             "dfrac": gold.replace(r"\frac", r"\dfrac"),
             "answer": rf"\text{{The answer is }}{gold}",
             "left": CLOSING.sub(r"\\right\g<0>", OPENING.sub(r"\\left\g<0>", gold))}
    if "left" in gold or len(OPENING.findall(gold)) != len(CLOSING.findall(gold)):
        del found["left"]
    parts = split(re.sub(r"(?<=\d),(?=\d{3})", "", gold))
    if len(parts) > 1 and gold[0] not in "([" and not WORDS.search(gold):
        found["reversed"] = ", ".join(reversed(parts))
        found["set"] = rf"\{{{gold}\}}" if "=" not in gold else gold
    if len(parts) == 1 and not re.search(r"[=<>]|\\[lg]e|\\cup|\\in|\\text", gold) and (
            not WORDS.search(gold)):
        found["name"] = f"x={gold}" if "x" not in gold else f"y = {gold}"
    if exact(gold):
        found |= {"unit": rf"{gold}\text{{ cm}}", "unit in TeX": rf"{gold}~\mathrm{{m}}^{{2}}",
                  "bare unit": f"{gold} dollars", "currency": rf"\${gold}"}
    if gold.isdigit() and len(gold) > 3:
        found |= {"thousands": f"{int(gold):,}", "TeX": f"{int(gold):,}".replace(",", "{,}")}
    return {kind: text for kind, text in found.items() if text != gold or kind == "dollars"}


def changed(gold: str) -> dict[str, str]:
    """{kind: an answer that is wrong}."""
    digits = list(re.finditer(r"(?<![\d_])\d(?![^ ]*mathrm|\}?$(?<=\}\^\{\d\}))", gold))
    found = {}
    for name, place in (("first digit", digits[:1]), ("last digit", digits[-1:])):
        for digit in place:
            other = str((int(digit[0]) + 1) % 10 or 1)
            found[name] = gold[:digit.start()] + other + gold[digit.end():]
    if re.match(r"[\d\\]", gold) and exact(gold) and exact(gold)[0]:
        found["sign"] = f"-{gold}"
    if re.search(r"\w\s*[-+]", gold) and not re.search(r"\\pm|[=<>]", gold):
        found["sign within"] = re.sub(r"(\w\s*)([-+])", lambda m: m[1] + "-+"[m[2] == "-"], gold,
                                      count=1)
    if re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", gold):
        found["bracket"] = {"(": "[", "[": "("}[gold[0]] + gold[1:]
        parts = split(gold[1:-1])
        if parts[0] != parts[-1]:
            found["order"] = gold[0] + ", ".join(reversed(parts)) + gold[-1]
    return {kind: text for kind, text in found.items() if text != gold}


@pytest.mark.slow
def test_spellings_of_golds_are_right_and_changed_golds_wrong():
    with Grader() as grader:
        readable = grader.check_golds(GOLDS)
        golds = [gold for gold, is_readable in zip(GOLDS, readable) if is_readable]
        for vary, right in ((respelled, True), (changed, False)):
            asked = [(gold, kind, text) for gold in golds for kind, text in vary(gold).items()]
            found = grader.grade([(gold, f"\\boxed{{{text}}}") for gold, _, text in asked])
            faults = [one for one, v in zip(asked, found) if (v.status == "correct") != right]
            assert (len(asked), len(faults)) == ((2466, 0) if right else (1004, 3)), faults
