"""Several processes, one run: `torchrun --nproc-per-node 8 minirl.py ...` (docs/many_gpus.md).

Each process (rank) has a GPU, an engine and a policy of its own, and all take the same batch. Of
its prompts a rank samples every WORLD-th. Then all get all groups, and compute the same from them:
mini-batches, what a token counts, whether there is anything to learn. Of a mini-batch's rows again
every rank takes its part; the gradients are summed, so the adapters stay equal, bit by bit. The
first rank alone writes.

Without torchrun nothing here does anything: one process, whose rank is 0.

vLLM must not take these processes for its own: each engine is in a world of one. So torchrun's
variables are taken away, and the processes talk over a group that torch.distributed does not know
as its default. It goes through main memory (gloo), for it also has to notice when a process dies.
"""
import contextlib
import functools
import os
import pickle
import random
import signal
import sys
from datetime import timedelta

from ada_sampler import settle_all

RANK, WORLD = 0, 1
STORE = GROUP = None  # under torchrun: a small common dictionary; who talks to whom
PATIENCE = timedelta(hours=2)  # the slowest rank may sample for long after the first is done
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "GROUP_", "LOCAL_", "ROLE_", "TORCHELASTIC_")


# ------------------------------------------------------------------------------ the start
def join() -> None:
    """Under torchrun: take this process's GPU and place. Before torch touches a GPU, and tqdm."""
    global RANK, WORLD, STORE, GROUP
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    RANK = int(os.environ["RANK"])
    speak_and_stop()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does where it starts several
    import torch.distributed as dist

    STORE, RANK, WORLD = next(dist.rendezvous("env://", timeout=PATIENCE))
    with one_voice():
        claim_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    for name in [name for name in os.environ if name.startswith(OF_TORCHRUN)]:
        del os.environ[name]
    GROUP = dist.ProcessGroupGloo(STORE, RANK, WORLD, PATIENCE)


def speak_and_stop() -> None:
    """One progress bar and one line per step: those of the first rank. Errors of all show.

    A second signal ends nobody: schedulers send one to every process, and torchrun passes its own
    on. It kills what has not ended after --shutdown-timeout seconds.
    """
    if RANK:
        os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported
        sys.stdout = open(os.devnull, "w")
    from parts.stop import Stop

    Stop.second = signal.SIG_IGN
    Stop.words = b"" if RANK else b"\nstopping after this phase with a checkpoint ...\n"


def claim_gpu(place: int, count: int) -> None:
    """Let this process, the one at `place` of `count` on this machine, see one GPU: its own.

    Raises SystemExit if there are fewer. A machine without any is left as it is.
    """
    import torch

    gpus = torch.cuda.device_count()
    if gpus and count > gpus:
        raise SystemExit(f"torchrun has started {count} processes here, and this machine shows "
                         f"{gpus} GPU(s): each needs one, so use --nproc-per-node {gpus}.")
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place]


def contradictions(config) -> list[tuple[bool, str]]:
    """(is it so?, the sentence) for settings that several processes cannot share out."""
    several, c = WORLD > 1, config
    return [
        (several and c.sampler in ("gvm", "dapo"),
         f"sampler {c.sampler} decides over the whole batch while it is sampled, and {WORLD} "
         "processes each see a part of it: use ada-balance, ada-pos, ada-est or uniform, or one "
         "process"),
        (several and bool(c.max_samples_per_step or c.max_tokens_per_step),
         f"max_samples_per_step and max_tokens_per_step are of the whole batch, and {WORLD} "
         "processes each see a part of it: leave them at 0, or use one process"),
        (0 < c.batch_prompts < WORLD,
         f"batch_prompts = {c.batch_prompts} leaves some of {WORLD} processes without a prompt: "
         "raise it"),
    ]


@contextlib.contextmanager
def first_alone(phase: str):
    """The first rank does this before the others do: whatever is wrong is said once, and what has
    to be downloaded comes once. If it ends the program, the others end too.
    """
    if RANK:
        STORE.wait([phase], PATIENCE)
        if STORE.get(phase) == b"ended":
            raise SystemExit(1)
    outcome = b"ended"
    try:
        yield
        outcome = b"done"
    finally:
        if STORE and not RANK:
            STORE.set(phase, outcome)


def require_same(*facts) -> None:
    """Raises SystemExit unless all ranks have the same settings, problems and checkpoint."""
    if any(other != facts for other in gather(facts)):
        raise SystemExit("The processes do not see the same settings, problems and checkpoints: "
                         "start all with the same flags, in a folder that all machines share.")


# ------------------------------------------------------------------------------ talking
@contextlib.contextmanager
def in_touch():
    """A rank that is gone is told by its closed connection: a ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError("another process of this run has ended, or has been silent for "
                              f"{PATIENCE}") from error


def gather(value) -> list:
    """The values of all ranks, in order, for all of them."""
    if WORLD == 1:
        return [value]
    import torch

    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(WORLD)]
    with in_touch():
        GROUP.allgather([sizes], [torch.tensor([len(data)])]).wait()
        longest = max(size.item() for size in sizes)
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(WORLD)]
        padded = torch.nn.functional.pad(data, (0, longest - len(data)))
        GROUP.allgather([found], [padded]).wait()
    return [pickle.loads(each[:size].numpy().tobytes()) for each, size in zip(found, sizes)]


def writer(write):
    """For what writes files: the first rank does it, to the others it does nothing."""
    @functools.wraps(write)
    def of_first(*args, **kwargs):
        return None if RANK else write(*args, **kwargs)

    return of_first


@contextlib.contextmanager
def one_voice():
    """Around the program: of several ranks that fail, the first to do so says why."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if STORE and (getattr(error, "code", 1) or 0) != 0 and not first_to_fail():
            raise SystemExit(1) from None
        raise


def first_to_fail() -> bool:
    try:
        return STORE.add("failed", 1) == 1
    except RuntimeError:  # torchrun itself has ended
        return True


def of_those_alive(value) -> list:
    """As `gather`, after an update: who is left completes the step.

    At the next exchange `run.nothing_lost` saves it, and ends the run.
    """
    try:
        return gather(value)
    except ConnectionError:
        return [value]


def worst(probed: dict) -> dict:
    """Of what the ranks' probes found, that with the largest gap."""
    return max(of_those_alive(probed), key=lambda found: found["probe_gap_max"])


# ------------------------------------------------------------------------------ sampling
class Seeded:
    """An engine that draws each sample from a seed of its own, whichever rank it is drawn by.

    The seed is made of the random state that `reseed` has set, which is the same everywhere, of the
    prompt's place in the whole batch and of the sample's number.
    """

    def __init__(self, engine):
        import torch

        self.engine, self.state = engine, torch.initial_seed()

    def submit(self, key, *request, **how) -> None:
        place = RANK + WORLD * key[0]
        seed = random.Random(f"{self.state}/{place}/{key[1]}").getrandbits(63)
        self.engine.submit(key, *request, **how, seed=seed)

    def step(self) -> list:
        return self.engine.step()

    @property
    def busy(self) -> bool:
        return self.engine.busy


def interleave(parts: list[list], each: int = 1) -> list:
    """The parts [RANK::WORLD] of a list back in its order; `each` entries for every item."""
    count = sum(map(len, parts)) // each
    chunks = [(parts[i % WORLD], i // WORLD * each) for i in range(count)]
    return [entry for part, start in chunks for entry in part[start:start + each]]


def collected_by_all(collect):
    """`collect`, where every rank samples its part of the batch and gets the groups of all."""
    if not STORE:
        return collect

    def together(problems, config, engine, judge, *, estimator, **others):
        from parts.stop import Interrupted

        try:
            own = collect(problems, config, Seeded(engine), judge, estimator=estimator,
                          part=slice(RANK, None, WORLD), **others)
        except Interrupted:
            own = None
        parts = gather(own)
        if None in parts:
            raise Interrupted
        groups = interleave(parts)
        for place, group in enumerate(groups):
            group.index = place
        settle_all(groups, config, estimator)
        return groups

    return together


def evaluated_by_all(evaluate):
    """Likewise `evaluate`: every rank answers its part of the questions and gets all rows."""
    if not STORE:
        return evaluate

    def together(engine, grader, problems, k, *args, **kwargs):
        from parts.stop import Interrupted

        try:
            own = evaluate(engine, grader, problems[RANK::WORLD], k, *args, **kwargs)
        except Interrupted:
            own = None
        parts = gather(own)
        if None in parts:
            raise Interrupted
        return interleave(parts, each=k)

    return together


# ------------------------------------------------------------------------------ the update
def part_of(mini: list, rank: int | None = None) -> list:
    """A rank's rows of a mini-batch (by default this one's), about as long as the others'."""
    return sorted(mini, key=lambda row: len(row.ids))[RANK if rank is None else rank::WORLD]


def on_own_rows(work_in_memory):
    """The decorated function works on this rank's rows only; where there is none, on nothing."""
    @functools.wraps(work_in_memory)
    def own(work, policy, mini, config):
        if WORLD == 1:
            return work_in_memory(work, policy, mini, config)
        rows = part_of(mini)
        return work_in_memory(work, policy, rows, config) if rows else (0.0, {})

    return own


def sum_gradients(policy) -> None:
    """The gradient of the whole mini-batch: what a token counts was decided for all of it."""
    if WORLD == 1:
        return
    import torch

    weights = [p for p in policy.parameters() if p.requires_grad]
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
    flat = torch.cat([gradient.flatten() for gradient in own]).cpu()
    with in_touch():
        GROUP.allreduce([flat]).wait()
    for p, part in zip(weights, flat.split([p.numel() for p in weights])):
        p.grad = part.view_as(p).to(p.device)


def of_all_rows(minis: list, losses: list, facts: list) -> tuple[list, list]:
    """Loss and facts of every whole mini-batch; what the update left on the other ranks' rows."""
    if WORLD == 1:
        return losses, facts
    import torch

    facts = [{name: x_T.cpu() for name, x_T in seen.items()} for seen in facts]
    left = [[left_on(row) for row in part_of(mini)] for mini in minis]
    found = gather((losses, facts, left))
    for i, mini in enumerate(minis):
        for rank, (_, _, left) in enumerate(found):
            for row, values in zip(part_of(mini, rank), left[i]):
                vars(row).update(values)
    losses = [sum(of_mini) for of_mini in zip(*(losses for losses, _, _ in found))]
    together = []
    for of_mini in zip(*(facts for _, facts, _ in found)):
        seen = [one for one in of_mini if one]
        together.append({name: torch.cat([one[name] for one in seen]) for name in seen[0]})
    return losses, together


def left_on(row) -> dict:
    """What the update leaves on a row, without the rows that it was computed with."""
    seen = {name: x_T.cpu().clone() for name, x_T in row.seen.items()}
    agrees = None if row.agrees is None else row.agrees.cpu().clone()
    return dict(old=row.old.cpu().clone(), agrees=agrees, seen=seen)
