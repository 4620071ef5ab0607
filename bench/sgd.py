"""minirl.py with SGD (momentum 0.9) in AdamW's place: python bench/sgd.py --lr 0.1 ...

Is it Adam that decides what the longer study finds? Its steps are about equally long whatever the
gradient; those of SGD grow with the signal. The rate is ten times --lr, which is at most 1.
"""
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def sgd(weights, lr, weight_decay):
    return torch.optim.SGD(weights, lr=10 * lr, momentum=0.9, weight_decay=weight_decay)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.argv[0] = str(ROOT / "minirl.py")
    torch.optim.AdamW = sgd
    runpy.run_path(sys.argv[0], run_name="__main__")
