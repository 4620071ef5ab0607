"""How many verdicts a second: distinct ones from cold, then the same ones again.

    python bench/verdicts.py [--workers 2] [--cases tests/reward_cases.jsonl]

The pairs are those of the verifier's own table, in a proportion that is typical for training: of
500 real answers of a small model, 423 were settled as strings, fractions or words, and the others
needed math-verify.
CPU seconds are this process's and its workers'; on a busy machine they say more than the clock.
"""
import argparse
import json
import random
import resource
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from parts.answers import exact  # noqa: E402
from parts.spelling import normalize, plain_characters  # noqa: E402
from rewards import Grader, decide, extract_answer  # noqa: E402


def typical(cases: list[dict], share: float) -> list[tuple[str, str]]:
    """(gold, completion) pairs, no two alike, of which `share` go to a worker."""
    pairs = {(case["gold"], case["completion"]): None for case in cases}
    hard = [pair for pair in pairs if needs_worker(*pair)]
    easy = [pair for pair in pairs if pair not in set(hard)]
    wanted = min(len(hard), int(len(easy) * share / (1 - share)))
    chosen = easy + random.Random(0).sample(hard, wanted)
    random.Random(1).shuffle(chosen)
    return chosen


def needs_worker(gold: str, completion: str) -> bool:
    answer = extract_answer(completion)
    return bool(answer) and decide(gold, answer)[0] is None


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.15, help="of pairs that need math-verify")
    parser.add_argument("--cases", default=str(ROOT / "tests/reward_cases.jsonl"))
    args = parser.parse_args()
    cases = [json.loads(line) for line in open(args.cases, encoding="utf-8")]
    pairs = typical(cases, args.share)
    for cached in (normalize, plain_characters, exact):
        cached.cache_clear()
    cpu, times = cpu_seconds(), [time.perf_counter()]
    with Grader(args.workers) as grader:
        for worker in grader.workers:
            worker.start()
        for _ in range(2):
            times.append(time.perf_counter())
            grader.grade(pairs)
        times.append(time.perf_counter())
    start, cold, warm = (later - earlier for earlier, later in zip(times, times[1:]))
    print(f"workers ready after {start:.1f} s; {cpu_seconds() - cpu:.1f} CPU seconds in all")
    print(f"{len(pairs)} distinct pairs: {len(pairs) / cold:.0f} a second")
    print(f"the same again: {len(pairs) / warm:.0f} a second")


if __name__ == "__main__":
    main()
