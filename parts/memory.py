"""How much memory is in use, and what it looks like when there is too little."""
import resource
from pathlib import Path


def memory_gb() -> float:
    """Memory in GiB, for the log.

    On a GPU: the most that torch's tensors have taken at a time in this process, the trainer's and
    the engine's (its weights, its cache of keys and values), because both live in one process.
    Without a GPU: what the whole process holds now, the engine included.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that memory is short, on a GPU or on a CPU."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
