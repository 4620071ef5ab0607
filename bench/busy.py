"""What does a busy machine cost? A fixed piece of a real model's step, beside other processes.

    python bench/busy.py    # ten minutes; nothing else may run

A round samples 8 prompts 4 times and trains on 8 of the answers. It is timed with all threads, and
with as many as parts/machine.py chooses, in turn (A B A B ...), for the machine itself drifts: what
counts is the ratio of two neighbours. Beside nothing and beside endless loops, in one process.
"""
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from statistics import mean, median

from common import project, save, seconds
from speed import draw
from store import markdown

del os.environ["OMP_NUM_THREADS"]  # common's default; torch is not imported yet

BESIDE = {  # what runs beside it -> the priority of each loop
    "nothing": (), "one loop at nice 10": (10,), "one loop": (0,), "two loops": (0, 0)}
PAIRS, PIECE = 5, 15  # seconds of rounds with each kind of threads
WORK = ["--model", "SmolLM2-135M-Instruct", "--name", "bench", "--sampler", "uniform", "--n", "4",
        "--batch-prompts", "8", "--max-tokens", "16"]


@contextlib.contextmanager
def loops(priorities: tuple):
    """Started by a shell that ends at once: as children of this process they would count as its own
    work.
    """
    endless = f"'{sys.executable}' -c 'while True: pass' > /dev/null & echo $!"
    started = [int(subprocess.check_output(["sh", "-c", f"nice -n{nice} {endless}"]))
               for nice in priorities]
    try:
        yield
    finally:
        for process in started:
            os.kill(process, signal.SIGKILL)


def one_round(p, rows: list) -> None:
    import minirl

    draw(p, 0, 0)
    minirl.accumulate(p.policy, rows, p.config)
    p.policy.zero_grad(set_to_none=True)


def round_seconds(p, rows: list, fixed: bool) -> float:
    """Mean of a piece of rounds, with all threads (`fixed`) or those that are chosen."""
    import torch
    from parts.machine import threads

    threads().fixed = fixed
    torch.set_num_threads(threads().most)
    one_round(p, rows)  # threads are chosen within it
    times, start = [], time.perf_counter()
    while time.perf_counter() < start + PIECE:
        times.append(seconds(one_round, p, rows))
    return mean(times)


def measure(p) -> dict[str, list]:
    """{what runs beside it: pairs of seconds, with all threads and with those that are chosen}"""
    import minirl

    rows = [row for group in draw(p, 0, 0)[:2] for row in minirl.rows_of_group(group, p.config)]
    found = {}
    for name, priorities in BESIDE.items():
        with loops(priorities):
            found[name] = [[round_seconds(p, rows, fixed) for fixed in (True, False)]
                           for _ in range(PAIRS)]
    return found


def table(found: dict[str, list]) -> str:
    lines = [["beside", "all threads", "as many as are chosen", "ratio, pair by pair",
              "median (range)"]]
    for name, pairs in found.items():
        fixed, chosen = map(median, zip(*pairs))
        ratios = [a / b for a, b in pairs]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append([name, f"{fixed:.1f} s", f"{chosen:.1f} s", each,
                      f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"])
    return markdown(lines)


def main() -> None:
    from parts.config import parse

    with project(**asdict(parse(WORK))) as p:
        found = measure(p)
    print(table(found))
    save("busy", dict(seconds=found))


if __name__ == "__main__":
    main()
