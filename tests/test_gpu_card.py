"""What vLLM decides on a card, from our options: a change of its defaults shows here first.

Run by vLLM's own code with a stand-in for the card (gpu_card.py); docs/gpu.md says what follows.
"""
import json
import os
import subprocess
import sys

import pytest

from helpers import ROOT

pytestmark = pytest.mark.slow

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
ALWAYS = dict(  # the second model runner, a batch ahead, prompts read 8,192 tokens at once
    head="float32", runner=2, ahead=True, tokens=8192, slots=256, graphs="FULL_AND_PIECEWISE",
    prefix_cache=True, logprobs="processed_logprobs")
ADAPTER = dict(lora=16, lora_layers=LINEAR)
MERGE = dict(lora=None, lora_layers=None)
CARDS = {
    "H100": (["9", "0", "80"],
             dict(dtype="bfloat16", attention="FLASH_ATTN", flash=3, **ADAPTER)),
    "4090": (["8", "9", "24"],
             dict(dtype="bfloat16", attention="FLASH_ATTN", flash=2, **ADAPTER)),
    "T4": (["7", "5", "16"],
           dict(dtype="float16", attention="TRITON_ATTN", flash=None, **ADAPTER)),
    "A100 in float32": (["8", "0", "40", "dtype=float32"],
                        dict(dtype="float32", attention="TRITON_ATTN", flash=2, **MERGE))}


@pytest.fixture(scope="module")
def found():
    """Card -> what vLLM makes of our options on it."""
    asked = " / ".join(" ".join(words) for words, _ in CARDS.values())
    done = subprocess.run([sys.executable, "tests/gpu_card.py", *asked.split()], cwd=ROOT,
                          text=True, capture_output=True,
                          env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(CARDS, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("card", CARDS)
def test_what_vllm_makes_of_our_options_on(card, found):
    assert found[card] == ALWAYS | CARDS[card][1]
