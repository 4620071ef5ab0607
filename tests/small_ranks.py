"""Runs of several processes without vLLM, for test_ranks.py: `python tests/small_ranks.py FOLDER`.

Everything is real (parse, prepare, the loop, checkpoints, signals, gloo) but the engine, which
writes random tokens from the seeds that it is given, and the verifier. Torch is imported once and
every process of every run is a fork: a run of six steps takes about a second.
"""
import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

import minirl  # noqa: E402
from models import make  # noqa: E402
from parts import run as running  # noqa: E402
from parts.data import Problem  # noqa: E402
from parts.engine import Rollout  # noqa: E402
from parts.stop import Stop  # noqa: E402
from recipes import many_gpus  # noqa: E402
from helpers import HANG  # noqa: E402
from test_combinations import Judge, random_policy  # noqa: E402
from test_ranks import as_torchrun  # noqa: E402

PLAIN = ["--batch-prompts", "6", "--steps", "6", "--checkpoint-every", "0", "--max-tokens", "8",
         "--eval-k", "2", "--lr", "0.01", "--eval-every", "3"]


# ------------------------------------------------------------------------------ a small world
class Writer:
    """In vLLM's place. `when(step of training, engine)` is called before every engine step."""

    on_cpu = True

    def __init__(self, routes: bool, when):
        self.routes, self.when, self.queue, self.synced = routes, when, [], 0
        self.tokenizer = make.build_tokenizer()

    def submit(self, key, prompt_ids, max_tokens, temperature=None, seed=None):
        rng = random.Random(seed)
        T = rng.randint(2, 8)
        routes = [[rng.sample(range(4), 2)] for _ in range(len(prompt_ids) + T - 1)]
        self.queue.append((key, Rollout(
            token_ids=[rng.randrange(32) for _ in range(T)], finish_reason="stop",
            logprobs=[-3.5 + rng.gauss(0, 0.3) for _ in range(T)],
            routes=torch.tensor(routes, dtype=torch.int16) if self.routes else None,
            text="right" if rng.random() < prompt_ids[1] / 16 else "wrong")))

    def step(self):
        self.when(self.synced)
        done, self.queue = self.queue[:4], self.queue[4:]
        return done

    @property
    def busy(self):
        return bool(self.queue)

    def sync(self, policy):
        self.synced += 1  # 1 before the first step

    def clear_cache(self):
        pass

    sleeps = False
    sleep = wake = close = clear_cache


class Grader(Judge):
    def __init__(self, *_):
        super().__init__()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def problems(rates) -> list:
    """`rates`: how often each is solved, in sixteenths."""
    return [Problem(str(i), "", str(i), "small", prompt=str(i), prompt_ids=[i % 32, rate])
            for i, rate in enumerate(rates)]


def patch(scene: dict, folder: Path, rank: int) -> None:
    """Put the small world in the place of the large one, in this process."""
    mixture, rates = scene.get("mixture", False), scene.get("rates", [3, 8, 13, 5, 8, 10, 1])
    when = scene.get("when", {}).get(rank, lambda step: None)
    policy = random_policy(mixture)
    running.load_policy = lambda *_, **__: policy
    running.load_data = lambda *_: (problems(rates), problems([4, 8, 12]))
    running.start_engine = lambda *_: Writer(mixture, when)
    running.Probe = lambda *_, **__: SimpleNamespace(check=check)
    running.choose_replay = lambda wanted, *_: "none" if wanted == "auto" else wanted
    running.draw_run = lambda folder: None
    minirl.open_grader = Grader
    again = "-again" if "--resume" in scene.get("flags", []) else ""
    note_gradients(folder / f"gradients-{rank}{again}.pt")
    note_exchanges(folder / f"exchanges-{rank}")
    for change in scene.get("patch", {}).get(rank, []):
        change()


def note_exchanges(file: Path) -> None:
    """A byte for every exchange with the others that this process has begun to wait for."""
    real = many_gpus.gather
    file.write_bytes(b"")

    def noted(value):
        with open(file, "ab") as log:
            log.write(b".")
        return real(value)

    many_gpus.gather = noted


def note_gradients(file: Path) -> None:
    """Append every optimizer step's gradient and the adapter after it to a list in `file`."""
    noted, real = [], torch.nn.utils.clip_grad_norm_

    def note(weights, most):
        noted.append(torch.cat([p.grad.flatten() for p in weights]).clone())
        torch.save(noted, file)
        return real(weights, most)

    torch.nn.utils.clip_grad_norm_ = note


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(step: int, do):
    """`do()` once the step, or whatever is counted, is this one."""
    return lambda now: now == step and do()


def signalled(step: int, folder: Path, all_of_them: bool):
    """This process, the second, or all get SIGTERM while it samples and the first waits for it."""
    def when(now):
        if now == step and not Stop.requested:
            exchanges = [folder / f"exchanges-{rank}" for rank in (0, 1)]
            while exchanges[0].stat().st_size <= exchanges[1].stat().st_size:
                time.sleep(0.01)
            others = folder / "pids" if all_of_them else None
            for pid in [os.getpid(), *(map(int, others.read_text().split()) if others else [])]:
                os.kill(pid, signal.SIGTERM)
            while not Stop.requested:
                time.sleep(0.01)
    return when


def after_accumulating(hook):
    """`hook(n)` after a gradient was accumulated for the n-th time."""
    def change():
        real, numbers = minirl.accumulate, itertools.count(1)

        def accumulate(*args):
            found = real(*args)
            hook(next(numbers))
            return found

        minirl.accumulate = accumulate
    return change


def short_of_memory(n: int) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def check() -> dict:
    return dict(probe_gap_max=0.0)


def probe_that_dies(step: int):
    """While the others exchange what their probes have found."""
    def change():
        numbers = itertools.count()  # 0 is before the first step

        def probe():
            return die() if next(numbers) == step else check()

        running.Probe = lambda *_, **__: SimpleNamespace(check=probe)
    return change


def record_that_dies(step: int):
    """While the others wait for what it knows of signals: outside all phases of a step."""
    def change():
        real = running.record
        running.record = minirl.record = lambda now, *rest: (
            die() if now == step else real(now, *rest))
    return change


def other_problems():
    running.load_data = lambda *_: (problems([8] * 9), problems([4]))


# ------------------------------------------------------------------------------ processes
def play(scene: dict, folder: Path) -> dict:
    """Run a scene: what its processes printed, and which of them did not end."""
    folder.mkdir(parents=True, exist_ok=True)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    world, started = scene["world"], time.monotonic()
    pids = [start(scene, folder, rank, world, store.port) for rank in range(world)]
    (folder / "pids").write_text(" ".join(map(str, pids)))
    hung = dict(enumerate(pids))
    while hung and time.monotonic() < started + HANG:
        hung = {rank: pid for rank, pid in hung.items() if not os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.02)
    for pid in hung.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    texts = [(folder / f"out-{rank}").read_text() for rank in range(world)]
    return dict(hung=list(hung), texts=texts)


def start(scene: dict, folder: Path, rank: int, world: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(folder / f"out-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        os.environ |= as_torchrun(rank, world, port)
        patch(scene, folder, rank)
        many_gpus.main([*PLAIN, *scene.get("flags", [])])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code or 0)


def scenes(folder: Path) -> list[tuple[str, Path, dict]]:
    """(name, where, scene), in the order in which they are played: some resume others."""
    shared = ["--mini-batches", "2", "--length-norm", "batch"]
    few = ["--sampler", "uniform", "--batch-prompts", "4", "--n", "2"]
    moe = ["--mini-batches", "2", "--replay", "r3"]
    found = [
        ("whole", dict(world=2, flags=shared)),
        ("one", dict(world=1, flags=shared)),
        ("sampling", dict(world=2, flags=shared, when={1: at(5, die)})),
        ("updating", dict(world=2, flags=shared, patch={1: [after_accumulating(at(9, die))]})),
        ("syncing", dict(world=2, flags=shared, patch={1: [probe_that_dies(4)]})),
        ("recording", dict(world=2, flags=shared, patch={1: [record_that_dies(4)]})),
        ("the first", dict(world=2, flags=[*shared, "--checkpoint-every", "2"],
                           when={0: at(4, die)})),
        ("all told", dict(world=2, flags=shared, when={
            1: signalled(5, folder / "all told", True)})),
        ("one told", dict(world=2, flags=shared, when={
            1: signalled(5, folder / "one told", False)})),
        ("memory", dict(world=2, flags=shared, patch={1: [after_accumulating(short_of_memory)]})),
        ("few", dict(world=3, flags=few, rates=[0, 0, 8, 0, 0, 0, 0])),
        ("few alone", dict(world=1, flags=few, rates=[0, 0, 8, 0, 0, 0, 0])),
        ("experts", dict(world=2, flags=moe, mixture=True)),
        ("experts alone", dict(world=1, flags=moe, mixture=True)),
        ("refused", dict(world=2, flags=["--sampler", "gvm"])),
        ("other problems", dict(world=2, patch={1: [other_problems]})),
    ]
    played = [(name, folder / name, scene) for name, scene in found]
    again = ["--resume", "--name", "tiny-ada-balance-seed0"]
    for name, world in (("sampling", 2), ("updating", 1), ("syncing", 2), ("the first", 2),
                        ("all told", 2)):
        scene = dict(world=world, flags=[*shared, *again])
        played.append((f"{name}, resumed", folder / name, scene))
    return played


def main() -> None:
    folder = Path(sys.argv[1])
    wanted = sys.argv[2:]
    found = {}
    for name, where, scene in scenes(folder):
        if not wanted or name in wanted:
            found[name] = play(scene, where)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
