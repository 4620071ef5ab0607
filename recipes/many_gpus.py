"""Several GPUs, one run: `torchrun --nproc-per-node 8 recipes/many_gpus.py FLAGS`.

FLAGS are those of minirl.py. Each process (rank) has its own GPU, engine and policy, and all ranks
take the same batch. A rank samples every WORLD-th prompt and sends its groups to the others. From
there all ranks compute the same: mini-batches, the scale of a token, whether there is a gradient.
Each rank then works on its part of a mini-batch, and the gradients are summed. So the adapters stay
equal, bit by bit. Only the first rank writes files. docs/many_gpus.md says what all this brings.

The program is minirl.py's. `table` lists its functions in whose place others are called here; what
else differs is in `main`: some settings are refused, and a second signal is ignored. Functions are
replaced by name: parameters for all this would stand in the way of readers with one GPU.

vLLM must not find torchrun's variables: it would join the processes to one engine. So `join` takes
them away, and the processes talk over a gloo group of their own, in main memory. gloo also notices
when a process dies.
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
STORE = GROUP = None  # a small dictionary that all ranks see; the group that exchanges data
PATIENCE = timedelta(hours=2)  # the slowest rank may sample for long after the first is done
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "GROUP_", "LOCAL_", "ROLE_", "TORCHELASTIC_")


def table() -> list[tuple]:
    """What is called in the place of which function: [(module, function, instead)]."""
    return [
        # One step. A rank works on its own part, and has everything afterwards.
        ("ada_sampler", "collect", split_prompts),
        ("eval", "evaluate", split_questions),
        ("minirl", "old_logprobs", split_rows),
        ("minirl", "accumulate", split_rows),
        ("minirl", "optimizer_step", sum_gradients_first),
        ("minirl", "sync", report_largest_gap),  # of what the probes of all ranks found
        ("parts.run", "record", share_signal),  # a signal to one rank stops all
        # What must be the same everywhere.
        ("parts.run", "before_the_engine", first_rank_first),  # downloads come once
        ("parts.run", "resume", take_state_of_first),  # only the first has the logs cut back
        # Only the first rank writes files, ...
        ("parts.folder", "claim", only_first),
        ("parts.files", "append", only_first),
        ("parts.files", "write_safely", only_first),
        ("parts.files", "keep_rows", only_first),
        ("parts.checkpoint", "save", only_first),
        ("parts.plot", "draw_run", only_first),
        ("parts.track", "open_tracker", only_first),
        ("parts.held_out", "forget_drawn", only_first),
        # ... except for what the other ranks alone know.
        ("parts.held_out", "write_down", into_own_draws),
        ("parts.run", "note_error", into_own_error),
        # Start and end.
        ("parts.folder", "this_start", add_process_count),  # for config.json
        ("parts.run", "program", name_torchrun),  # "continue with: ..."
        ("parts.run", "finish", exit_code_of_first),
    ]


def replace_functions() -> None:
    """Replace the functions of the table, in every module that has imported them.

    What is called in their place gets the original as its first argument.
    """
    for module, name, instead in table():
        original = getattr(importlib.import_module(module), name)
        wrapped = functools.partial(instead, original)
        for each in list(sys.modules.values()):
            if getattr(each, "__dict__", {}).get(name) is original:
                setattr(each, name, wrapped)


def main(argv: list[str] | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does where it starts several
    join()
    from parts.config import parse

    with one_error_message():
        with first_alone("flags"):
            config = parse(argv)
            require_shareable(config)
        import minirl

        replace_functions()
        ignore_second_signal(minirl.Stop)
        with minirl.last_words(config):
            minirl.main(config)


# ------------------------------------------------------------------------------ the start
def join() -> None:
    """Take this process's GPU and place, before torch touches a GPU and before tqdm is imported."""
    global RANK, WORLD, STORE, GROUP
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise SystemExit("Start this with torchrun --nproc-per-node 8 recipes/many_gpus.py, where "
                         "8 is the number of GPUs; for one, take python minirl.py.")
    RANK = int(os.environ["RANK"])
    if RANK:  # one progress bar and one line per step; errors of all ranks show
        os.environ["TQDM_DISABLE"] = "1"
        sys.stdout = open(os.devnull, "w")
    import torch.distributed as dist

    STORE, RANK, WORLD = next(dist.rendezvous("env://", timeout=PATIENCE))
    with one_error_message():
        claim_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    for name in [name for name in os.environ if name.startswith(OF_TORCHRUN)]:
        del os.environ[name]
    GROUP = dist.ProcessGroupGloo(STORE, RANK, WORLD, PATIENCE)


def claim_gpu(place: int, count: int) -> None:
    """Show this process, number `place` of `count` on this machine, one GPU only.

    Raises SystemExit if there are too few. Without any GPU nothing changes.
    """
    import torch

    gpus = torch.cuda.device_count()
    if gpus and count > gpus:
        raise SystemExit(f"torchrun has started {count} processes here, and this machine shows "
                         f"{gpus} GPU(s): each needs one, so use --nproc-per-node {gpus}.")
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place]


def require_shareable(config) -> None:
    """Raises SystemExit, one sentence, for settings that several processes cannot share out."""
    part = f"the whole batch, and {WORLD} processes each see a part of it"
    wrong = ""
    if WORLD > 1 and config.sampler in ("gvm", "dapo"):
        wrong = (f"sampler {config.sampler} decides over {part}: use ada-balance, ada-pos, ada-est "
                 "or uniform, or one process")
    elif config.batch_prompts < WORLD:
        wrong = (f"batch_prompts = {config.batch_prompts} leaves some of {WORLD} processes without "
                 "a prompt: raise it")
    if wrong:
        raise SystemExit(f"many_gpus.py: {wrong}")


@contextlib.contextmanager
def first_alone(phase: str):
    """The first rank goes ahead, the others follow when it is done.

    So an error is reported once, and a download comes once. If the first rank ends, all do.
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


@contextlib.contextmanager
def one_error_message():
    """When several ranks fail, only the first to fail says why.

    Who ends with a mere number has nothing to say, and must not count: it may be faster than the
    first rank, for which it has waited and which has the sentence.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            raise
        failures = 0
        with contextlib.suppress(RuntimeError):  # torchrun itself has ended
            failures = STORE.add("failed", 1)
        if failures > 1:
            raise SystemExit(1) from None
        raise


# ------------------------------------------------------------------------------ talking
@contextlib.contextmanager
def in_touch():
    """Turns the closed connection to a process that has ended into a ConnectionError."""
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


# ------------------------------------------------------------------------------ sampling
class SeededEngine:
    """An engine that draws each sample from its own seed, whichever rank draws it.

    The seed is made of torch's state (`reseed` sets it, the same everywhere), the prompt's place in
    the whole batch and the sample's number.
    """

    def __init__(self, engine):
        import torch

        self.engine, self.step, self.state = engine, engine.step, torch.initial_seed()

    def submit(self, key, *request, **how) -> None:
        place = RANK + WORLD * key[0]
        seed = random.Random(f"{self.state}/{place}/{key[1]}").getrandbits(63)
        self.engine.submit(key, *request, **how, seed=seed)

    @property
    def busy(self) -> bool:
        return self.engine.busy


def split_prompts(collect, problems, config, engine, grader, *, estimator, **others) -> list:
    """Each rank samples its part of the batch and gets the groups of all."""
    parts = gather_unless_interrupted(lambda: collect(
        problems, config, SeededEngine(engine), grader, estimator=estimator,
        part=slice(RANK, None, WORLD), **others))
    groups = interleave(parts)
    for place, group in enumerate(groups):
        group.index = place
    settle_all(groups, config, estimator)
    return groups


def split_questions(evaluate, engine, grader, problems, k, *args, **kwargs) -> list:
    """Each rank answers its part of the questions and gets the rows of all."""
    parts = gather_unless_interrupted(lambda: evaluate(
        engine, grader, problems[RANK::WORLD], k, *args, **kwargs))
    return interleave(parts, each=k)


def gather_unless_interrupted(work) -> list:
    """What `work()` returns on every rank. Raises Interrupted if one of them was stopped."""
    import minirl

    try:
        own = work()
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
def split_rows(work, policy, mini, config) -> float:
    """Each rank works on its part of a mini-batch, and gets what the others left on their rows.

    Returns the sum of the losses (`old_logprobs` has none).
    """
    rows = part_of(mini, RANK)
    loss = work(policy, rows, config) if rows else None
    found = gather((loss or 0.0, [results_on(row) for row in rows]))
    for rank, (_, results) in enumerate(found):
        for row, values in zip(part_of(mini, rank), results):
            if rank != RANK:
                vars(row).update(values)
    return sum(loss for loss, _ in found)


def part_of(mini: list, rank: int) -> list:
    """A rank's rows of a mini-batch, about as long as the others'."""
    return sorted(mini, key=lambda row: len(row.ids))[rank::WORLD]


def results_on(row) -> dict:
    """What the work has left on a row, as copies in main memory: pickling a slice would send the
    whole tensor it was cut from.
    """
    names = ("old", "agrees", "theta", "mask", "weight", "entropy")
    known = {name: getattr(row, name) for name in names if getattr(row, name) is not None}
    return {name: value.cpu().clone() for name, value in known.items()}


def sum_gradients_first(optimizer_step, policy, *others) -> float:
    """A step along the gradient of the whole mini-batch."""
    sum_gradients(policy)
    return optimizer_step(policy, *others)


def sum_gradients(policy) -> None:
    """A sum and not a mean: `set_scales` has seen the whole batch."""
    import torch

    weights = [p for p in policy.parameters() if p.requires_grad]
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
    flat = torch.cat([gradient.flatten() for gradient in own]).cpu()
    with in_touch():
        GROUP.allreduce([flat]).wait()
    for p, part in zip(weights, flat.split([p.numel() for p in weights])):
        p.grad = part.view_as(p).to(p.device)


def report_largest_gap(sync, run) -> dict:
    return max(gather(sync(run)), key=lambda found: found["probe_gap_max"])


def share_signal(record, step, groups, metrics, run) -> None:
    """After a step, every rank knows the signal that one of them was sent.

    If one of them has ended instead, the step is saved: this is outside the phases, which do that.
    """
    import minirl
    from parts.run import save

    record(step, groups, metrics, run)
    try:
        minirl.Stop.requested = max(gather(minirl.Stop.requested))
    except ConnectionError:
        if run.saved < step:
            save(run)
        raise


# ------------------------------------------------------------------------------ files, and the end
def only_first(write, place, *args, **kwargs):
    """The first rank writes, the others do not, except into their own files."""
    own = getattr(place, "name", "").startswith(f"rank-{RANK}.")
    return write(place, *args, **kwargs) if own or not RANK else None


def into_own_draws(write_down, rows, run) -> None:
    """Every rank writes down what it has drawn for an evaluation."""
    write_down(rows, run, name=f"rank-{RANK}.jsonl")


def into_own_error(note_error, folder) -> Path:
    return note_error(folder, name=f"rank-{RANK}.error.txt" if RANK else "error.txt")


def first_rank_first(before_the_engine, config, grader):
    """Raises SystemExit unless all ranks find the same settings, problems and checkpoint."""
    with first_alone("before the engine"):
        found = before_the_engine(config, grader)
    facts = config, found.inputs, found.newest
    if any(other != facts for other in gather(facts)):
        raise SystemExit("The processes do not see the same settings, problems and checkpoints: "
                         "start all with the same flags, in a folder that all machines share.")
    return found


def take_state_of_first(resume, run, newest) -> None:
    resume(run, newest)
    run.state = gather(run.state)[0]


def add_process_count(this_start) -> dict:
    return this_start() | dict(processes=WORLD)


def name_torchrun(program) -> str:
    return "torchrun (as before) recipes/many_gpus.py"


def exit_code_of_first(finish, run) -> None:
    """For torchrun a code other than 0 is a failure: it would kill the first while that saves."""
    with contextlib.suppress(SystemExit) if RANK else contextlib.nullcontext():
        finish(run)


def ignore_second_signal(stop) -> None:
    """Schedulers signal every process, and torchrun passes its own signal on: two are usual.

    torchrun kills what has not ended after --shutdown-timeout seconds.
    """
    stop.second = signal.SIG_IGN
    stop.words = b"" if RANK else b"\nstopping with a checkpoint ...\n"


if __name__ == "__main__":
    main()
