"""Several GPUs, one run: `torchrun --nproc-per-node 8 recipes/many_gpus.py FLAGS`.

FLAGS are those of minirl.py, and so is the program; `table` says what is different here. Each
process (rank) has a GPU, an engine and a policy of its own, and all take the same batch. Of its
prompts a rank samples every WORLD-th. Then all get all groups, and compute the same from them:
mini-batches, what a token counts, whether there is anything to learn. Of a mini-batch's rows again
every rank takes its part; the gradients are summed, so the adapters stay equal, bit by bit. The
first rank alone writes. What that brings: docs/many_gpus.md.

vLLM must not take these processes for its own: each engine is in a world of one. So torchrun's
variables are taken away, and the processes talk over a group that torch.distributed does not know
as its default. It goes through main memory (gloo), for it also has to notice when a process dies.
"""
import contextlib
import functools
import importlib
import os
import pickle
import random
import signal
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ada_sampler import settle_all  # noqa: E402

RANK, WORLD = 0, 1
STORE = GROUP = None  # a small common dictionary; who talks to whom
PATIENCE = timedelta(hours=2)  # the slowest rank may sample for long after the first is done
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "GROUP_", "LOCAL_", "ROLE_", "TORCHELASTIC_")


def table() -> list[tuple]:
    """All that is different: (module, function, what is put around it)."""
    return [
        # One step. A rank works on its own part, and has everything afterwards.
        ("ada_sampler", "collect", on_own_prompts),
        ("eval", "evaluate", on_own_questions),
        ("minirl", "old_logprobs", on_own_rows),  # of a mini-batch
        ("minirl", "accumulate", on_own_rows),
        ("minirl", "optimizer_step", on_the_summed_gradient),
        ("minirl", "sync", that_tells_the_worst),  # of what the ranks' probes found
        ("parts.run", "record", that_stops_all),  # a signal to one is a signal to all
        # What must be the same everywhere.
        ("parts.run", "before_the_engine", by_the_first_before_the_others),  # downloads come once
        ("parts.run", "resume", as_the_first_does),  # it alone has cut the logs back
        # The first rank alone writes files, ...
        ("parts.folder", "claim", by_the_first),
        ("parts.files", "append", by_the_first),
        ("parts.files", "write_safely", by_the_first),
        ("parts.files", "keep_rows", by_the_first),
        ("parts.checkpoint", "save", by_the_first),
        ("parts.plot", "draw_run", by_the_first),
        ("parts.track", "open_tracker", by_the_first),
        ("parts.held_out", "forget_drawn", by_the_first),
        # ... but for what a rank alone knows.
        ("parts.held_out", "write_down", into(".jsonl")),  # what it has drawn for an evaluation
        ("parts.run", "note_error", into(".error.txt")),
        # How it starts and ends.
        ("parts.folder", "this_start", with_their_number),  # for config.json
        ("parts.run", "program", that_is_torchrun),  # "continue with: ..."
        ("parts.run", "finish", by_the_firsts_exit_code),
        ("minirl", "Stop", that_is_patient),
    ]


def wrap() -> None:
    """Put the wrappers of the table around their functions, wherever they have been imported to."""
    for module, name, wrapper in table():
        original = getattr(importlib.import_module(module), name)
        wrapped = wrapper(original)
        for each in list(sys.modules.values()):
            if getattr(each, "__dict__", {}).get(name) is original:
                setattr(each, name, wrapped)


def main(argv: list[str] | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does where it starts several
    join()
    from parts.config import parse

    with one_voice():
        with first_alone("flags"):
            config = parse(argv)
            require_divisible(config)
        import minirl

        wrap()
        with minirl.last_words(config):
            minirl.main(config)


# ------------------------------------------------------------------------------ the start
def join() -> None:
    """Take this process's GPU and place. Before torch touches a GPU, and before tqdm."""
    global RANK, WORLD, STORE, GROUP
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise SystemExit("Start this with torchrun --nproc-per-node 8 recipes/many_gpus.py, where "
                         "8 is the number of GPUs; for one, python minirl.py does the same.")
    RANK = int(os.environ["RANK"])
    if RANK:  # one progress bar and one line per step: those of the first; errors of all show
        os.environ["TQDM_DISABLE"] = "1"
        sys.stdout = open(os.devnull, "w")
    import torch.distributed as dist

    STORE, RANK, WORLD = next(dist.rendezvous("env://", timeout=PATIENCE))
    with one_voice():
        claim_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    for name in [name for name in os.environ if name.startswith(OF_TORCHRUN)]:
        del os.environ[name]
    GROUP = dist.ProcessGroupGloo(STORE, RANK, WORLD, PATIENCE)


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


def require_divisible(config) -> None:
    """Raises SystemExit, one sentence, for settings that several processes cannot share out."""
    part = f"the whole batch, and {WORLD} processes each see a part of it"
    wrong = ""
    if WORLD > 1 and config.sampler in ("gvm", "dapo"):
        wrong = (f"sampler {config.sampler} decides over {part}: use ada-balance, ada-pos, ada-est "
                 "or uniform, or one process")
    elif WORLD > 1 and (config.max_samples_per_step or config.max_tokens_per_step):
        wrong = (f"max_samples_per_step and max_tokens_per_step are of {part}: leave them at 0, or "
                 "use one process")
    elif config.batch_prompts < WORLD:
        wrong = (f"batch_prompts = {config.batch_prompts} leaves some of {WORLD} processes without "
                 "a prompt: raise it")
    if wrong:
        raise SystemExit(f"many_gpus.py: {wrong}")


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
        if not RANK:
            STORE.set(phase, outcome)


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


def of_those_alive(value) -> list:
    """As `gather`, after an update: who is left completes the step, and saves it at the next."""
    try:
        return gather(value)
    except ConnectionError:
        return [value]


@contextlib.contextmanager
def one_voice():
    """Around the program: of several ranks that fail, the first to do so says why."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if (getattr(error, "code", 1) or 0) != 0 and not first_to_fail():
            raise SystemExit(1) from None
        raise


def first_to_fail() -> bool:
    try:
        return STORE.add("failed", 1) == 1
    except RuntimeError:  # torchrun itself has ended
        return True


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


def on_own_prompts(collect):
    """Every rank samples its part of the batch and gets the groups of all."""
    def together(problems, config, engine, judge, *, estimator, **others):
        parts = unless_interrupted(lambda: collect(
            problems, config, Seeded(engine), judge, estimator=estimator,
            part=slice(RANK, None, WORLD), **others))
        groups = interleave(parts)
        for place, group in enumerate(groups):
            group.index = place
        settle_all(groups, config, estimator)
        return groups

    return together


def on_own_questions(evaluate):
    """Likewise every rank answers its part of the questions and gets all rows."""
    def together(engine, grader, problems, k, *args, **kwargs):
        parts = unless_interrupted(lambda: evaluate(
            engine, grader, problems[RANK::WORLD], k, *args, **kwargs))
        return interleave(parts, each=k)

    return together


def unless_interrupted(own_part) -> list:
    """The parts of all ranks. Raises Interrupted if one of them was stopped before its end."""
    import minirl

    try:
        own = own_part()
    except minirl.Interrupted:
        own = None
    parts = gather(own)
    if None in parts:
        raise minirl.Interrupted
    return parts


def interleave(parts: list[list], each: int = 1) -> list:
    """The parts [RANK::WORLD] of a list back in its order; `each` entries for every item."""
    count = sum(map(len, parts)) // each
    chunks = [(parts[i % WORLD], i // WORLD * each) for i in range(count)]
    return [entry for part, start in chunks for entry in part[start:start + each]]


# ------------------------------------------------------------------------------ the update
def on_own_rows(work):
    """Each rank works on its part of a mini-batch, and gets what the others have left on theirs.

    Returns the sum of the losses (`old_logprobs` has none).
    """
    def together(policy, mini, config):
        rows = part_of(mini, RANK)
        loss = work(policy, rows, config) if rows else None
        found = gather((loss or 0.0, [left_on(row) for row in rows]))
        for rank, (_, left) in enumerate(found):
            for row, values in zip(part_of(mini, rank), left):
                if rank != RANK:
                    vars(row).update(values)
        return sum(loss for loss, _ in found)

    return together


def part_of(mini: list, rank: int) -> list:
    """A rank's rows of a mini-batch, about as long as the others'."""
    return sorted(mini, key=lambda row: len(row.ids))[rank::WORLD]


def left_on(row) -> dict:
    """What the work leaves on a row. A copy in main memory: pickle would take the whole tensor
    that a row's part was cut from.
    """
    values = {name: getattr(row, name)
              for name in ("old", "agrees", "theta", "mask", "weight", "entropy")}
    return {name: value if value is None else value.cpu().clone()
            for name, value in values.items()}


def on_the_summed_gradient(optimizer_step):
    """A step along the gradient of the whole mini-batch."""
    def together(policy, *others):
        sum_gradients(policy)
        return optimizer_step(policy, *others)

    return together


def sum_gradients(policy) -> None:
    """A sum, not a mean: what a token counts was decided for the whole batch (`set_scales`)."""
    import torch

    weights = [p for p in policy.parameters() if p.requires_grad]
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
    flat = torch.cat([gradient.flatten() for gradient in own]).cpu()
    with in_touch():
        GROUP.allreduce([flat]).wait()
    for p, part in zip(weights, flat.split([p.numel() for p in weights])):
        p.grad = part.view_as(p).to(p.device)


def that_tells_the_worst(sync):
    """Of what the ranks' probes found, that with the largest gap."""
    return lambda run: max(of_those_alive(sync(run)), key=lambda found: found["probe_gap_max"])


def that_stops_all(record):
    """After a step, every rank knows the signal that one of them was sent."""
    def together(*step):
        import minirl

        record(*step)
        if told := max(of_those_alive(minirl.Stop.requested)):
            minirl.Stop.requested = told

    return together


# ------------------------------------------------------------------------------ files, and the end
def by_the_first(write):
    """The first rank writes, the others do nothing, but to a file of their own."""
    def of_first(place, *args, **kwargs):
        own = getattr(place, "name", "").startswith(f"rank-{RANK}.")
        return write(place, *args, **kwargs) if own or not RANK else None

    return of_first


def into(ending: str):
    """The other ranks write too, into a file with their number in its name."""
    own_name = f"rank-{RANK}{ending}"
    return lambda write: functools.partial(write, name=own_name) if RANK else write


def by_the_first_before_the_others(before_the_engine):
    """Raises SystemExit unless all ranks find the same settings, problems and checkpoint."""
    def together(config, grader):
        with first_alone("before the engine"):
            found = before_the_engine(config, grader)
        facts = config, found.inputs, found.newest
        if any(other != facts for other in gather(facts)):
            raise SystemExit("The processes do not see the same settings, problems and "
                             "checkpoints: start all with the same flags, in a folder that all "
                             "machines share.")
        return found

    return together


def as_the_first_does(resume):
    def together(run, newest):
        resume(run, newest)
        run.state = gather(run.state)[0]

    return together


def with_their_number(this_start):
    return lambda: this_start() | dict(processes=WORLD)


def that_is_torchrun(program):
    return lambda: "torchrun (as before) recipes/many_gpus.py"


def by_the_firsts_exit_code(finish):
    """To torchrun another code than 0 is a failure: it would kill the first while that saves."""
    def together(run):
        with contextlib.suppress(SystemExit) if RANK else contextlib.nullcontext():
            finish(run)

    return together


def that_is_patient(stop):
    """A second signal ends nobody: schedulers send one to every process, and torchrun passes its
    own on. It kills what has not ended after --shutdown-timeout seconds.
    """
    stop.second = signal.SIG_IGN
    stop.words = b"" if RANK else b"\nstopping after this phase with a checkpoint ...\n"
    return stop


if __name__ == "__main__":
    main()
