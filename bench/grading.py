"""What does grading cost? CPU time, with all processes, per 1,000 of the labelled answers.

    python bench/grading.py      # of another commit: with this file and the answers copied into it

all         answers of every kind: strings and fractions tell of most
symbolic    golds that no fraction tells, with their answers and with four others: math-verify
            reads and compares nearly all
"""
import json
import random
import resource
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(questions: list[tuple]) -> float:
    """Seconds per 1,000, with the start of the processes and their end."""
    from rewards import Grader

    before = cpu_seconds()
    with Grader() as grader:
        grader.grade(questions)
    return (cpu_seconds() - before) / len(questions) * 1000


def main() -> None:
    from verifier.answers import exact
    from verifier.spelling import normalize

    cases = list(map(json.loads, (ROOT / "tests/reward_cases.jsonl").read_text().splitlines()))
    random.Random(0).shuffle(cases)
    questions = [(case["gold"], case["completion"]) for case in cases]
    symbolic = [(gold, text) for gold, text in questions if "\\" in gold
                and "\\text" not in gold and not exact(normalize(gold))]
    others = [(gold, f"\\boxed{{{other}}}") for ahead in range(1, 5)
              for (gold, _), (other, _) in zip(symbolic, symbolic[ahead:])]
    for name, asked in dict(all=questions, symbolic=symbolic + others).items():
        print(f"{name:10} {len(asked):5} questions {measure(asked):6.1f} s of CPU per 1,000")


if __name__ == "__main__":
    main()
