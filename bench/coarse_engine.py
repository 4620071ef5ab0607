"""minirl.py with an engine whose weights have only so many significant bits.

    python bench/coarse_engine.py BITS FLAGS    # minirl.py's flags

float32 has 24, bfloat16 8, fp8 (e4m3) 4. With 1 or 2, engine and trainer disagree more than any
format of numbers makes them. How far may they, before training without the importance weight
collapses (ablations.py, cells coarse1 and coarse2)? The probe would refuse such an engine;
here it only measures. Routers are rounded like all other matrices.
"""
import math
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def coarse(w, bits: int):
    """`w` rounded to the nearest number of `bits` significant bits, a tie to the even one."""
    import torch

    mantissa, exponent = torch.frexp(w)  # 0.5 <= |mantissa| < 1
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


def coarse_copy(model: str, folder: str, bits: int) -> None:
    """Copy the model folder `model` to `folder`, with all matrices rounded."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, dirs_exist_ok=True)
    for file in Path(folder).glob("*.safetensors"):
        weights = {name: coarse(w, bits) if w.dim() > 1 else w
                   for name, w in load_file(file).items()}
        save_file(weights, file, metadata=dict(format="pt"))


def make_coarse(bits: int) -> None:
    """Let the engine start with rounded weights, and get rounded weights at every sync."""
    from parts import engine

    start, merged = engine.start, engine.merged_weights

    def coarse_start(model, options):
        with tempfile.TemporaryDirectory() as folder:
            coarse_copy(model, folder, bits)
            return start(folder, options)

    def coarse_merged(policy):
        for name, w in merged(policy):
            yield name, coarse(w, bits) if name.endswith("weight") else w

    engine.start, engine.merged_weights = coarse_start, coarse_merged


def only_measure() -> None:
    """Let the probe refuse nothing."""
    from parts.probe import Probe

    def require_close(self, theirs_T, mine_T) -> dict:
        gap_T = (theirs_T - mine_T).abs()
        return dict(probe_gap_mean=gap_T.mean().item(), probe_gap_max=gap_T.max().item())

    Probe.require_close = require_close
    Probe.require_news = lambda *_: None
    Probe.require_slope = lambda *_, **__: math.nan
    Probe.rehearse = lambda *_: {}


def main() -> None:
    if sys.argv[1:2] not in [[str(bits)] for bits in range(1, 25)]:  # float32 has 24
        raise SystemExit(__doc__.split("\n\n")[1].strip())
    bits = int(sys.argv.pop(1))
    import minirl
    from parts.config import parse

    config = parse()
    if config.sync != "merge":
        raise SystemExit("Only merged weights can be rounded: --sync merge.")
    make_coarse(bits)
    only_measure()
    with minirl.last_words(config):
        minirl.main(config)


if __name__ == "__main__":
    main()
