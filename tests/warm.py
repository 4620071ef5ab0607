"""What the warm process of helpers.py imports, with vLLM's environment as the engine sets it."""
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from parts.engine import configure_vllm

configure_vllm(on_cpu=True)

import math_verify
import matplotlib.pyplot
import peft
import transformers
import vllm
from vllm import LLM, LLMEngine

import minirl
import explorer.panels
import vllm.v1.worker.cpu_worker
from engines import inspect_here
from transformers.models.qwen2 import modeling_qwen2

inspect_here()
gc.collect()
gc.freeze()  # vLLM's start collects six times: not what was imported, which is no garbage
