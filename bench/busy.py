"""What does a busy machine cost? A fixed piece of a real model's step, beside other processes.

    python bench/busy.py    # ten minutes; nothing else may run

A round samples 8 prompts 4 times and trains on 8 of the answers. It is timed with all threads, and
with as many as parts/machine.py chooses, beside nothing and beside endless loops, all in one
process. Each time is the mean of a minute of rounds, after a first round that does not count.
"""
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

from common import project, save, seconds

del os.environ["OMP_NUM_THREADS"]  # common's default; torch is not imported yet

BESIDE = {  # what runs beside it -> the priority of each loop
    "nothing": (), "one loop at nice 10": (10,), "one loop": (0,), "two loops": (0, 0)}
MINUTE = 60
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
    from speed import draw

    draw(p, 0, 0)
    minirl.accumulate(p.policy, rows, p.config)
    p.policy.zero_grad(set_to_none=True)


def mean_seconds(p, rows: list, fixed: bool) -> float:
    """Of a round, with all threads (`fixed`) or with those that are chosen."""
    import torch
    from parts.machine import threads

    threads().fixed = fixed
    torch.set_num_threads(threads().most)
    one_round(p, rows)
    times, start = [], time.perf_counter()
    while time.perf_counter() < start + MINUTE:
        times.append(seconds(one_round, p, rows))
    return sum(times) / len(times)


def measure(p) -> dict:
    """{what runs beside it: (seconds with all threads, seconds with those that are chosen)}"""
    import minirl
    from speed import draw

    rows = [row for group in draw(p, 0, 0)[:2] for row in minirl.rows_of_group(group, p.config)]
    found = {}
    for name, priorities in BESIDE.items():
        with loops(priorities):
            found[name] = [mean_seconds(p, rows, fixed) for fixed in (True, False)]
    return found


def main() -> None:
    from parts.config import parse

    with project(**asdict(parse(WORK))) as p:
        found = measure(p)
    idle = found["nothing"][0]
    print("| beside | all threads | as many as are chosen |\n|---|---|---|")
    for name, times in found.items():
        print(f"| {name} | " + " | ".join(f"{t:.1f} s, {t / idle:.2f} x" for t in times) + " |")
    save("busy", dict(seconds=found))


if __name__ == "__main__":
    main()
