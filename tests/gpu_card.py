"""What vLLM would do on a GPU, decided by vLLM's own code on a machine without one.

    python tests/gpu_card.py MAJOR MINOR GIB [OPTION=VALUE ...] [/ MAJOR MINOR GIB ...]

Its CPU and its GPU build have the same Python. Here the platform is a stand-in of vLLM's CUDA
platform, that answers as a card of capability MAJOR.MINOR with GIB of memory would; compiled
kernels are left out. The project's Engine makes its options, and vLLM its configuration of them,
for a model of Qwen2.5-Math-1.5B's shape without weights. Prints a line of JSON for each card, which
is a fork of this process: the imports take longest.
"""
import json
import os
import sys
import tempfile
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

for kernels in ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C"):
    sys.modules[f"vllm.{kernels}"] = types.ModuleType(kernels)  # as if they were compiled

import vllm  # noqa: E402
import vllm.config.vllm  # noqa: E402
import vllm.platforms  # noqa: E402
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class Configured(Exception):
    """Raised in the place of a start."""


def card(major: int, minor: int, gib: float):
    class Card(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(major, minor)

        @classmethod
        def get_device_name(cls, device_id=0):
            return "H100" if major == 9 else "a card"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return int(gib * 2**30)

        @classmethod
        def log_warnings(cls):
            """Asks the driver."""

    return Card()


def configure(model, **options):
    """vllm.LLM, until the configuration is made."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    options.pop("use_tqdm_on_load")
    args = EngineArgs(model=model, **options)
    raise Configured(args.create_engine_config(UsageContext.LLM_CLASS))


def summary(config) -> dict:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend

    model, scheduler, lora = config.model_config, config.scheduler_config, config.lora_config
    with set_current_vllm_config(config):
        attention = get_attn_backend(model.get_head_size(), model.dtype,
                                     config.cache_config.cache_dtype)
        version = get_flash_attn_version(head_size=model.get_head_size())
    return dict(
        dtype=str(model.dtype).split(".")[1], head=str(model.head_dtype).split(".")[1],
        runner=2 if config.use_v2_model_runner else 1, ahead=scheduler.async_scheduling,
        tokens=scheduler.max_num_batched_tokens, slots=scheduler.max_num_seqs,
        graphs=config.compilation_config.cudagraph_mode.name,
        attention=attention.get_name(), flash=version,
        prefix_cache=config.cache_config.enable_prefix_caching,
        logprobs=model.logprobs_mode, lora=lora and lora.max_lora_rank,
        lora_layers=lora and sorted(lora.target_modules))


def main(major: str, minor: str, gib: str, *options: str) -> None:
    from models.make import build_tokenizer
    from parts import engine, machine
    from transformers import Qwen2Config

    vllm.platforms._current_platform = card(int(major), int(minor), float(gib))
    vllm.config.vllm.HAS_TRITON = True
    vllm.LLM = configure
    for module in (engine, machine):
        module.build_for_cpu = lambda: False
    machine.capability = lambda: (int(major), int(minor))
    asked = dict(option.split("=") for option in options)
    dtype = asked.get("dtype", machine.default_dtype())
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer().save_pretrained(folder)
        Qwen2Config(vocab_size=151936, hidden_size=1536, intermediate_size=8960,
                    num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
                    max_position_embeddings=4096, architectures=["Qwen2ForCausalLM"],
                    tie_word_embeddings=True).save_pretrained(folder)
        try:
            engine.Engine(folder, max_model_len=4024, max_num_seqs=256, temperature=1.0,
                          dtype=dtype, stop_token_ids=[0], lora_rank=16,
                          sync_mode=asked.get("sync", machine.default_sync(dtype)))
        except Configured as made:
            print(json.dumps(summary(made.args[0])))


if __name__ == "__main__":
    for asked in " ".join(sys.argv[1:]).split(" / "):
        if not (fork := os.fork()):
            main(*asked.split())
            sys.exit()
        if code := os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]):
            sys.exit(code)
