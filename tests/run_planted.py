"""Each bug of the hunt in a copy of the project: does an update still run, does its test fail?

test_course.py runs `python tests/run_planted.py [NUMBER ...]`, which prints a line of JSON for each
bug. Each check is a fork of this process, which has done the slow imports.
"""
import compileall
import json
import math
import os
import py_compile
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = ("minirl", "ada_sampler", "rewards", "verifier", "eval", "parts", "helpers", "conftest",
       "sampler_oracles")
sys.path.insert(0, str(ROOT))
sys.dont_write_bytecode = True  # a patched file of the same size and second would not be noticed
CHECKED_HASH = py_compile.PycInvalidationMode.CHECKED_HASH
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half a second of each check

import peft  # noqa: E402, F401
import pytest  # noqa: E402
import torch  # noqa: E402, F401
import transformers.models.mixtral.modeling_mixtral  # noqa: E402, F401
import transformers.models.olmoe.modeling_olmoe  # noqa: E402, F401
import transformers.models.qwen2.modeling_qwen2  # noqa: E402, F401
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: E402, F401

from bench.mutate import LEFT_OUT, mutate  # noqa: E402
from course import bugs  # noqa: E402


def an_update_is_finite() -> bool:
    """One pass over random groups, with the copy's code."""
    from small_policy import gradients_of, random_groups, tiny_policy

    steps, metrics = gradients_of(tiny_policy(), random_groups(4, seed=1), mini_batches=2)
    numbers = [metrics["loss"], *(g.norm().item() for step in steps for g in step.values())]
    return len(steps) == 2 and all(map(math.isfinite, numbers))


def in_the_copy(folder: Path, test: str) -> None:
    """Ends this process with pytest's code for the test, or with 99 if no update runs."""
    for name in list(sys.modules):
        if name.split(".")[0] in OWN:
            del sys.modules[name]
    os.chdir(folder)
    sys.path[:] = [str(folder), str(folder / "tests"),
                   *(path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests")))]
    code = 99
    try:
        if an_update_is_finite():
            code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", test]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def verdict(folder: Path, bug: dict) -> dict:
    """The test's code in the copy with the bug, and the end of what it printed."""
    before, out = mutate(folder, bug), folder / "output.txt"
    child = os.fork()
    if not child:
        with open(out, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        in_the_copy(folder, bug["test"])
    _, status = os.waitpid(child, 0)
    (folder / bug["file"]).write_text(before, encoding="utf-8")
    return dict(number=bug["number"], code=os.waitstatus_to_exitcode(status),
                said=out.read_text(errors="replace")[-2000:])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="planted-") as place:
        copy = Path(place, "copy")
        bugs.copy(copy, LEFT_OUT)
        for part in (copy, *map(copy.joinpath, ("parts", "verifier", "models"))):
            # once for all; what is then patched is seen by its content and compiled anew
            compileall.compile_dir(part, maxlevels=0, quiet=1, invalidation_mode=CHECKED_HASH)
        for number in map(int, sys.argv[1:] or bugs.bugs()):
            print(json.dumps(verdict(copy, bugs.find(number))), flush=True)
