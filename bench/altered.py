"""Runs minirl.py with one change, for the studies: python bench/altered.py WHAT FLAGS

WHAT is sgd, rounded, or 1 to 24. FLAGS are those of minirl.py.

sgd     SGD (momentum 0.9, ten times --lr) instead of AdamW. The steps of AdamW are about equally
        long whatever the gradient, but those of SGD grow with the gradient.
rounded logits in the precision of the weights, in engine and trainer, as in most other projects.
1, ...  an engine whose weights have only this many significant bits: float32 has 24, bfloat16 8,
        fp8 (e4m3) 4. With 1 or 2, engine and trainer differ more than with any number format. The
        probe would refuse such an engine, so it is switched off.
"""
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))


def use_sgd() -> None:
    import torch

    torch.optim.AdamW = lambda weights, lr, weight_decay: torch.optim.SGD(
        weights, lr=10 * lr, momentum=0.9, weight_decay=weight_decay)


def round_logits() -> None:
    import vllm
    from parts import logprobs

    whole = vllm.LLM
    logprobs.float32_product = lambda h_T, W: (h_T @ W.T).float()
    vllm.LLM = lambda *a, **options: whole(*a, **options | dict(hf_overrides={}))


def coarse(w, bits: int):
    """`w` rounded to the nearest number with `bits` significant bits; ties go to the even one."""
    import torch

    mantissa, exponent = torch.frexp(w)  # 0.5 <= |mantissa| < 1
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


def make_coarse(bits: int) -> None:
    """Give the engine only rounded matrices, routers included, at its start and at syncs."""
    from parts import engine
    from safetensors.torch import load_file, save_file

    start, merged = engine.start, engine.merged_weights

    def coarse_start(model, options):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(model, folder, dirs_exist_ok=True)
            for file in Path(folder).glob("*.safetensors"):
                weights = {name: coarse(w, bits) if w.dim() > 1 else w
                           for name, w in load_file(file).items()}
                save_file(weights, file, metadata=dict(format="pt"))
            return start(folder, options)

    def coarse_merged(policy):
        for name, w in merged(policy):
            yield name, coarse(w, bits) if name.endswith("weight") else w

    engine.start, engine.merged_weights = coarse_start, coarse_merged


CHANGES = dict(sgd=use_sgd, rounded=round_logits)


def main() -> None:
    if sys.argv[1:2] not in [[what] for what in (*CHANGES, *map(str, range(1, 25)))]:
        raise SystemExit(__doc__)
    what = sys.argv.pop(1)
    import minirl
    from parts import run
    from parts.config import parse

    config = parse()
    if what in CHANGES:
        CHANGES[what]()
    elif config.sync == "adapter":
        raise SystemExit("Only merged weights can be rounded: --sync merge.")
    else:
        make_coarse(int(what))
        run.start_probe = lambda *_: SimpleNamespace(check=dict)
    with minirl.say_how_to_resume(config):
        minirl.main(config)


if __name__ == "__main__":
    main()
