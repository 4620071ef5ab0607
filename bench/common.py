"""What the benchmarks share: the project without its loop, models of any size, fair timing, files.

One thread, unless OMP_NUM_THREADS says otherwise: on a small machine two threads mostly wait for
each other, and every ratio here is between two sides measured in turn in one process.
"""
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT))


# -------------------------------------------------------------------------------- time and memory
def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def seconds(call, *args) -> float:
    """Wall time of one call, including the work that it left on a GPU."""
    import torch

    wait = torch.cuda.synchronize if on_gpu() else lambda: None
    wait()
    start = time.perf_counter()
    call(*args)
    wait()
    return time.perf_counter() - start


def positive(text: str) -> int:
    """For argparse: a whole number of at least 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def alternate(repeats: int, **sides) -> dict[str, list[float]]:
    """Seconds of every side (a function without arguments), `repeats` times in turn, after a first
    time that does not count: what slows one slows all."""
    taken = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, call in sides.items():
            taken[name].append(seconds(call))
    return {name: values[1:] for name, values in taken.items()}


def middle_ratio(above: list[float], below: list[float]) -> float:
    """Median of the ratios of neighbours in time: slow drifts of the machine cancel."""
    return median(a / b for a, b in zip(above, below))


# ------------------------------------------------------------------------------ models, the project
def random_model(size: dict, folder: str, vocabulary: int, positions: int, dtype: str) -> None:
    """Fills `folder` with a randomly initialised Qwen2 of this `size` (arguments of Qwen2Config)
    and the built-in tokenizer, which need not know every token of the vocabulary.
    """
    import torch
    from models import make
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make.build_tokenizer()
    config = Qwen2Config(vocab_size=vocabulary, max_position_embeddings=positions,
                         bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                         pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True, **size)
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))  # never a float32 copy: 6 GB of 1.5 billion
    try:
        Qwen2ForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(usual)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def project(model: str = "tiny", **settings):
    """What minirl.main has before its first step (a parts.run.Run), on the built-in problems, in a
    folder that is removed."""
    from parts.config import Config, resolve
    from parts.run import prepare
    from rewards import Grader

    config = resolve(Config(**dict(
        model=model, data="builtin", eval_data="builtin", template="chat", eval_questions=100,
        name="bench") | settings))
    with (tempfile.TemporaryDirectory() as folder, Grader() as grader,
          contextlib.chdir(folder)):
        # afterwards the server has loaded math-verify
        grader.grade([("1", "\\boxed{2}"), ("\\frac12", "\\boxed{0.25+x}")])
        run = prepare(config, grader)
        yield run
        run.engine.close()


# ------------------------------------------------------------------------------------------ results
def machine() -> dict:
    """What the numbers were measured on."""
    import torch

    from parts.folder import versions

    if on_gpu():
        hardware = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo").read_text()
        cpu = next((line.split(": ")[1] for line in info.splitlines()
                    if line.startswith("model name")), platform.processor())
        hardware = f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) used"
    return dict(hardware=hardware, load=os.getloadavg()[0], versions=versions())


def save(name: str, result: dict) -> None:
    """results/NAME.json"""
    text = json.dumps(dict(machine=machine()) | result, indent=1,
                      default=lambda x: float(f"{x:.6g}"))
    (RESULTS / f"{name}.json").write_text(text + "\n")
