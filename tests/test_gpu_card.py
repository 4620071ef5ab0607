"""vLLM's choices on a card for our options, so that a change of its defaults shows here first.

vLLM's code makes them without a GPU, because both builds have the same Python code. This file is
also the program that runs it, with a mock of vLLM's CUDA platform.
"""
import json
import sys
import types

import pytest
from transformers import Qwen2Config

from helpers import ROOT, run_program
from models import make
from parts import engine, machine

pytestmark = pytest.mark.slow

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
ALWAYS = dict(  # the second model runner, a batch ahead, prompts read 8,192 tokens at once
    head="float32", runner=2, ahead=True, tokens=8192, slots=250, graphs="FULL_AND_PIECEWISE",
    sizes=16, load="safetensors", config="hf", tokenizer="hf", defaults="vllm", foreign_code=False,
    prefix_cache=True, logprobs="processed_logprobs", share=0.4)
ADAPTER = dict(lora=16, lora_layers=LINEAR)
MERGE = dict(lora=None, lora_layers=None)
CARDS = {  # (major, minor, GiB) and perhaps --dtype; what vLLM makes of it
    "H100": ((9, 0, 80), dict(dtype="bfloat16", attention="FLASH_ATTN", **ADAPTER)),
    "T4": ((7, 5, 16), dict(dtype="float16", attention="TRITON_ATTN", **ADAPTER)),
    "A100 in float32": ((8, 0, 40, "float32"),
                        dict(dtype="float32", attention="TRITON_ATTN", **MERGE))}


@pytest.mark.parametrize("card", CARDS)
def test_what_vllm_makes_of_our_options_on(card, tmp_path):
    make.build_tokenizer().save_pretrained(tmp_path)
    Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, max_position_embeddings=4096,
        architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True).save_pretrained(tmp_path)
    asked, wanted = CARDS[card]
    printed = run_program("tests/test_gpu_card.py", tmp_path, *asked)
    (said,) = [line for line in printed.splitlines() if line.startswith("{")]
    assert json.loads(said) == ALWAYS | wanted


def test_the_lock_of_the_gpu_environment_has_the_versions_that_are_asked_for():
    asked, lock = ([line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
                   for name in ("requirements.txt", "requirements-gpu-lock.txt"))
    assert {line for line in asked if line} <= {*lock}


class Configured(Exception):
    """It is raised instead of a start."""


def stand_in(major: int, minor: int, gib: int) -> None:
    """The program's platform is this card."""
    import vllm.config.vllm
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Card(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda *_, **__: DeviceCapability(major, minor))
        get_device_name = classmethod(lambda *_, **__: "H100" if major == 9 else "a card")
        get_device_total_memory = classmethod(lambda *_, **__: gib * 2**30)
        log_warnings = classmethod(lambda _: None)  # which asks the driver

    vllm.platforms._current_platform = Card()
    vllm.config.vllm.HAS_TRITON = True
    vllm.LLM = configure
    for module in (engine, machine):
        module.build_for_cpu = lambda: False
    machine.card = lambda: types.SimpleNamespace(
        name="a card", major=major, minor=minor, total_memory=gib * machine.GB)


def configure(model, use_tqdm_on_load, **options):
    """Does what vllm.LLM does until the configuration is made."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    raise Configured(EngineArgs(model, **options).create_engine_config(UsageContext.LLM_CLASS))


def summary(config) -> dict:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model, scheduler, lora = config.model_config, config.scheduler_config, config.lora_config
    with set_current_vllm_config(config):
        attention = get_attn_backend(model.get_head_size(), model.dtype,
                                     config.cache_config.cache_dtype)
    return dict(
        dtype=str(model.dtype).split(".")[1], head=str(model.head_dtype).split(".")[1],
        runner=2 if config.use_v2_model_runner else 1, ahead=scheduler.async_scheduling,
        tokens=scheduler.max_num_batched_tokens, slots=scheduler.max_num_seqs,
        graphs=config.compilation_config.cudagraph_mode.name,
        sizes=len(config.compilation_config.cudagraph_capture_sizes),
        attention=attention.get_name(),
        load=config.load_config.load_format, config=model.config_format,
        tokenizer=model.tokenizer_mode, defaults=model.generation_config,
        foreign_code=model.trust_remote_code,
        share=config.cache_config.gpu_memory_utilization,
        prefix_cache=config.cache_config.enable_prefix_caching,
        logprobs=model.logprobs_mode, lora=lora and lora.max_lora_rank,
        lora_layers=lora and sorted(lora.target_modules))


def decide(folder: str, major: int, minor: int, gib: int, dtype: str = "") -> None:
    """Prints what vLLM makes of our options on a card, as a line of JSON."""
    stand_in(major, minor, gib)
    dtype = dtype or machine.this_machine().dtype
    try:
        engine.Engine(folder, max_model_len=4024, max_num_seqs=250, dtype=dtype, lora_rank=16,
                      memory_share=0.4, architecture=Qwen2Config.from_pretrained(folder),
                      sync_mode="merge" if dtype == "float32" else "adapter")
    except Configured as made:
        print(json.dumps(summary(made.args[0])), flush=True)


if __name__ == "__main__":
    for kernels in ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C",
                    "vllm_flash_attn._vllm_fa3_C"):  # as if they were compiled
        sys.modules[f"vllm.{kernels}"] = types.ModuleType(kernels)
    card = [int(part) if part.isdigit() else part for part in sys.argv[2:]]
    decide(sys.argv[1], *card)
