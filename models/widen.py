"""A GGUF file, as Ollama and LM Studio store a model, becomes a folder in Hugging Face format.

    pip install gguf==0.19.0
    python models/widen.py FILE.gguf FOLDER      # then: python minirl.py --model FOLDER

vLLM serves a GGUF file with kernels that read its 4-bit weights, and the trainer would need weights
of 16 or 32 bits. Then engine and trainer would round differently. So transformers reads the file
once, and the weights are written in bfloat16, which holds a 4-bit weight with an error below 0.4 %.
The result is no better than the file: its figures cannot be compared with those of the model from
which the file was made.
"""
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parts.files import replacing  # noqa: E402
from parts.text import shown  # noqa: E402


def widen(file: Path, folder: Path) -> None:
    """Write `folder`, which is complete or not there at all. SystemExit if the file cannot be read.

    A model that transformers has loaded from GGUF refuses to be saved, so a new model of the same
    class takes its weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = dict(pretrained_model_name_or_path=str(file.parent), gguf_file=file.name,
                  trust_remote_code=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            dtype=torch.float32, output_loading_info=True, **source)
        if report["missing_keys"]:  # transformers has filled them at random
            raise ValueError(f"it has no weights for {min(report['missing_keys'])}")
    except Exception as error:  # transformers, tokenizers and gguf raise many kinds
        why = shown(" ".join(str(error).split()) or type(error).__name__, 300)
        raise SystemExit(f"transformers cannot read {shown(file)}: {why}") from None
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = "bfloat16"
    model = type(loaded)(config).bfloat16()
    model.load_state_dict(loaded.state_dict())
    with replacing(folder) as writing:
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise SystemExit("usage: python models/widen.py FILE.gguf FOLDER")
    file, folder = Path(argv[0]).expanduser(), Path(argv[1]).expanduser().absolute()
    if folder.exists():
        raise SystemExit(f"{shown(folder)} exists already: name another folder.")
    widen(file, folder)
    with open(file, "rb") as opened:
        print(f"{folder}, made of {file.name} "
              f"(sha256 {hashlib.file_digest(opened, 'sha256').hexdigest()})")


if __name__ == "__main__":
    main(sys.argv[1:])
