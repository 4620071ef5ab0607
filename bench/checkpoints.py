"""What a checkpoint costs: seconds for an adapter and its AdamW, of made-up numbers.

    python bench/checkpoints.py                 # 18.5 M weights, as of a 1.5 B model with rank 16
    python bench/checkpoints.py --millions 40.4 # of a 7 B model

A run logs the same of itself as seconds_save. It is written where the program is started: on the
disk that the runs would be on.
"""
import argparse
import tempfile
from pathlib import Path
from statistics import median

from common import positive, seconds


def made_up(millions: float):
    """(policy, optimizer, schedule) with so many million weights, in 392 tensors like 1.5B's."""
    import torch
    from safetensors.torch import save_file

    from parts.config import Config
    from parts.policy import loss_scale
    from parts.run import make_optimizer

    policy = torch.nn.ParameterList(torch.randn(int(millions * 1e6 / 392)) for _ in range(392))
    policy.loss_scale = loss_scale("float32", "cpu")
    policy.save_pretrained = lambda folder, **_: save_file(
        {name: p.detach() for name, p in policy.named_parameters()},
        folder / "adapter_model.safetensors")
    optimizer, schedule = make_optimizer(policy, Config(lr=1e-5))
    for p in policy:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return policy, optimizer, schedule


def main() -> None:
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--millions", type=float, default=18.5)
    parser.add_argument("--repeats", type=positive, default=5)
    args = parser.parse_args()
    learnt = made_up(args.millions)
    from parts import folder

    with tempfile.TemporaryDirectory(dir=".") as place:
        taken = [seconds(folder.save, Path(place), *learnt, dict(step=step))
                 for step in range(args.repeats)]
        size = sum(file.stat().st_size for file in folder.checkpoints(Path(place))[-1].iterdir())
    print(f"{size / 1e6:.0f} MB: {median(taken):.2f} s (of {args.repeats}: "
          f"{min(taken):.2f} to {max(taken):.2f})")


if __name__ == "__main__":
    main()
