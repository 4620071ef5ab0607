"""A model's name -> what transformers and vLLM can load, and its tokenizer.

No code that a model's folder brings along is ever run.
"""
import contextlib
import os
import re
from pathlib import Path

from parts import smollm
from parts.screen import shown
from parts.sources import go_offline_if_unreachable

TINY = ("tiny", "tiny-moe", "tiny-skills")  # built in, see tiny.py
FAMILIES = {"qwen": "Qwen", "qwq": "Qwen", "llama": "meta-llama", "meta-llama": "meta-llama",
            "smollm": "HuggingFaceTB"}


def is_small(name: str) -> bool:
    """Whether a model's name tells of less than 500 M parameters, as SmolLM2-135M-Instruct does."""
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
    starts = [start for start in FAMILIES if name.lower().startswith(start)]
    owner = FAMILIES[starts[0]] if starts else None
    if "/" not in name and not owner:
        raise SystemExit(
            f"Unknown model '{shown(name)}': write org/name, give a folder, or use --model tiny.")
    return name if "/" in name else f"{owner}/{name}"


def fetch_model(name: str, context: int) -> str:
    """A folder or hub id that transformers and vLLM can load.

    Raises SystemExit if there is none, if its code would have to be run, or if it reads less than
    `context` tokens.
    """
    if name in TINY:
        from parts import tiny

        return tiny.folder(name)
    path = resolve_model(name)
    if path == smollm.HUB:
        path = smollm.fetch()
    elif not os.path.isdir(path):
        go_offline_if_unreachable(path, "model")
    from transformers import AutoConfig

    with loading("model", path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    longest = getattr(config, "max_position_embeddings", context)
    if context > longest:
        raise SystemExit(f"{shown(path)} reads at most {longest} tokens, but --max-prompt-tokens "
                         f"and --max-tokens add up to {context}.")
    return path


def load_tokenizer(path: str):
    """The tokenizer of a fetched model. Raises SystemExit if it cannot be loaded."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from parts.tiny import MODELS

    # To transformers a Qwen2 has the tokenizer of that family, whatever its folder says. It would
    # split the numbers of the built-in ones into digits.
    loader = PreTrainedTokenizerFast if Path(path).parent == MODELS else AutoTokenizer
    with loading("tokenizer", path):
        return loader.from_pretrained(path, trust_remote_code=False)


@contextlib.contextmanager
def loading(what: str, path: str):
    """Turns whatever transformers, its tokenizers and the hub raise into one sentence."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise SystemExit(
                f"{shown(path)} brings Python code of its own, which is never run here: choose a "
                "model that transformers knows by itself.") from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SystemExit(
            f"Cannot load the {what} {shown(path)}: {shown(reason)} Check the name and the "
            "connection to the hub, or use --model tiny, which needs neither.") from None
