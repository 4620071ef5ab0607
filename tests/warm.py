"""What the warm process of helpers.py imports, with vLLM's environment as the engine sets it."""
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from parts.engine import configure_vllm

configure_vllm(on_cpu=True)

import math_verify  # noqa: E402
import matplotlib.pyplot  # noqa: E402
import peft  # noqa: E402
import transformers  # noqa: E402
import vllm  # noqa: E402
from vllm import LLM, LLMEngine  # noqa: E402

import minirl  # noqa: E402
import parts.plot  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402
from engines import inspect_here  # noqa: E402
from transformers.models.qwen2 import modeling_qwen2  # noqa: E402

inspect_here()
gc.collect()
gc.freeze()  # vLLM's start collects six times: not what was imported, which is no garbage
