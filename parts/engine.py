"""The rollout engine, which is vLLM in this process, driven one engine step at a time.

Requests may be added between any two engine steps, so the next round of a prompt starts as soon as
it is needed. Every sampled token comes with log mu(y_t), its log-prob under the distribution from
which it was sampled, after the temperature (vLLM's default is before). Top-p and top-k are off,
because they would renormalise mu and bias pi/mu on every token.
"""
import ctypes
import itertools
import logging
import os
import random
import tempfile
import warnings
from dataclasses import dataclass

import numpy
import torch
from tqdm import tqdm

from parts.machine import build_for_cpu
from parts.policy import adapted_layers, merged_weights
from parts.routing_replay import ROUTERS, CpuRecorder
from parts.text import shown

MEANT = ("vLLM did not start ({}). Its gpu_memory_utilization is --engine-memory (on a CPU: "
         "VLLM_CPU_KVCACHE_SPACE, in GiB), its max_num_seqs --engine-sequences, its max_model_len "
         "the sum of --max-prompt-tokens and --max-tokens, its dtype minirl.py's --rollout-dtype.")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM has space for one of these


@dataclass
class Rollout:
    """One sampled answer of T tokens."""

    token_ids: list[int]  # [T], with the end token if it was sampled
    logprobs: list[float]  # [T], log mu(y_t) in nats
    finish_reason: str  # "stop": complete, "length": truncated at max_tokens
    text: str  # decoded, without special tokens
    raw: str = ""  # decoded, with them, for functions of --reward
    routes: object = None  # [prompt + T - 1, layers, k], experts per token (routing_replay.py)
    submitted: int = 0  # engine step of this training step, for the log
    finished: int = 0  # also an engine step


def configure_vllm(on_cpu: bool) -> None:
    """Set the environment variables that vLLM reads at its import, unless the user has set them."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # it is driven step by step from here
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)  # vLLM's own
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else log-probs compile for 7-30 s
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's cores too
        # oneDNN would keep kernels for 1,024 tensor shapes, one for each number of running
        # requests, which takes hundreds of MB and looks like a leak.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")


def seed_all(*parts) -> random.Random:
    """Seed torch and numpy from (seed, step, phase), so that no phase depends on an earlier one.

    Thereby it decides which tokens vLLM samples. Returns a generator for Python's own choices.
    """
    rng = random.Random("/".join(map(str, parts)))
    state = rng.getrandbits(63)
    torch.manual_seed(state)  # its CPU build samples from torch's global state
    numpy.random.seed(state % 2**32)  # on a GPU numpy gives the seed of each request
    return rng


class Engine:
    """vLLM with the model folder or hub id `model`, on the same machine as the trainer.

    `sync_mode`: "merge" reloads merged weights in place, because vLLM's LoRA kernels decode 2.7
    times slower on a CPU. "adapter" swaps the LoRA adapter, so no update is rounded into a base of
    16 bits.
    `dtype`: float32, bfloat16, float16, or fp8 (8 bits for the linear layers' weights, bfloat16 for
    the rest). `kv_cache_dtype`: auto or fp8. `routes`: record the experts of every rollout.
    `architecture`: the model's config, which --sync adapter needs.
    """

    def __init__(self, model: str, *, max_model_len: int, max_num_seqs: int = 256,
                 dtype: str = "auto", kv_cache_dtype: str = "auto", temperature: float = 1.0,
                 lora_rank: int = 16, sync_mode: str = "merge", memory_share: float = 0.5,
                 sleep: bool = False, stop_token_ids: list[int] = (), seed: int = 0,
                 routes: bool = False, architecture=None):
        require_original_context(architecture, max_model_len)
        self.on_cpu = build_for_cpu()
        configure_vllm(self.on_cpu)
        options = dict(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, seed=seed,
            dtype="bfloat16" if dtype == "fp8" else dtype, kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=not (routes and self.on_cpu))  # the recorder needs every token
        options |= (cpu_options(max_model_len) if self.on_cpu else
                    gpu_options(memory_share, sleep, routes, max_num_seqs))
        if sync_mode == "adapter":
            options |= adapter_options(architecture, lora_rank, dtype, self.on_cpu, routes)
        if dtype == "fp8":
            options |= fp8_linears(self.on_cpu)
        self.llm = start(model, options)
        self.recorder = CpuRecorder(self.llm) if routes and self.on_cpu else None
        self.sync_mode, self.routes = sync_mode, routes
        self.sleeps = sleep and not self.on_cpu
        self.tokenizer = self.llm.get_tokenizer()
        from vllm import SamplingParams  # only now: `start` has imported it
        from vllm.sampling_params import RequestOutputKind

        self.sampling = dict(
            temperature=temperature, stop_token_ids=list(stop_token_ids), detokenize=False,
            ignore_eos=bool(stop_token_ids),  # or vLLM would add other end tokens
            logprobs=0, flat_logprobs=True,  # of the sampled tokens only, as one list
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True)  # `submit` makes new parameters each time
        self._params = SamplingParams
        self._adapter, self._folder = None, None
        self._counter = itertools.count(1)
        self._keys = {}  # vLLM's request id -> the caller's key

    def submit(self, key, prompt_ids: list[int], max_tokens: int, seed: int | None = None) -> None:
        """Request one answer. `step` returns it with its `key` (any hashable).

        seed None: the seed comes from `seed_all`.
        """
        self._add(key, prompt_ids, self._params(max_tokens=max_tokens, seed=seed, **self.sampling))

    def step(self) -> list[tuple[object, Rollout]]:
        """One engine step, a token for every running request. Returns [(key, finished rollout)]."""
        finished = [out for out in self.llm.llm_engine.step() if out.finished]
        ids = [out.outputs[0].token_ids for out in finished]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        raws = self.tokenizer.batch_decode(ids)  # takes 12 us for an answer of 35 tokens
        return [(self._keys.pop(out.request_id), self._rollout(out, text, raw))
                for out, text, raw in zip(finished, texts, raws)]

    def _rollout(self, out, text: str, raw: str) -> Rollout:
        sampled = out.outputs[0]
        return Rollout(list(sampled.token_ids), list(sampled.logprobs.logprobs),
                       sampled.finish_reason, text, raw, self._routes(out))

    def _routes(self, out):
        if self.recorder:
            return self.recorder.routes_of(out.request_id)
        native = getattr(out.outputs[0], "routed_experts", None)  # numpy, unsigned
        return None if native is None else torch.from_numpy(native.astype("int16"))

    @property
    def busy(self) -> bool:
        """Whether answers are unfinished, or a batch has run ahead. On a GPU vLLM schedules the
        next batch while one is computed, so a step may also return nothing.
        """
        engine = self.llm.llm_engine
        # vLLM 0.32 has no public name for that batch. If `batch_queue` goes, each sync fails here.
        return engine.has_unfinished_requests() or bool(engine.engine_core.engine_core.batch_queue)

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int) -> list[list[Rollout]]:
        """n answers to each prompt (token ids), [prompts][n], for probe, benchmarks and tests."""
        rollouts = {(p, s): None for p in range(len(prompts)) for s in range(n)}
        for p, s in rollouts:
            self.submit((p, s), prompts[p], max_tokens)
        while self.busy:
            rollouts.update(self.step())
        return [[rollouts[p, s] for s in range(n)] for p in range(len(prompts))]

    def prompt_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """log mu of every token except the first of given sequences, at temperature 1, in nats."""
        for i, ids in enumerate(sequences):
            self._add(i, ids, self._params(max_tokens=1, prompt_logprobs=0, detokenize=False))
        scores = {}
        while self.busy:
            for out in filter(lambda out: out.finished, self.llm.llm_engine.step()):
                self._routes(out)  # or the recorder would keep them
                tokens = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:])
                scores[self._keys.pop(out.request_id)] = [row[id].logprob for id, row in tokens]
        return [scores[i] for i in range(len(sequences))]

    def _add(self, key, prompt_ids, params) -> None:
        request_id = str(next(self._counter))
        self._keys[request_id] = key
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt_ids)}, params,
                                        lora_request=self._adapter)

    def sync(self, policy) -> None:
        """Give the engine the weights of `policy`, a PEFT model. Empties the cache."""
        self.clear_cache()  # first, or a batch that ran ahead would use two sets of weights
        if self.sync_mode == "merge":
            self.reload(merged_weights(policy))
        else:
            self.load_adapter(policy)
        if self.on_cpu:  # return free memory between buffers to the system, which can be 1 GB
            ctypes.CDLL(None).malloc_trim(0)

    def reload(self, weights) -> None:
        """Replace the weights by these (Hugging Face name, tensor) pairs, after `clear_cache`."""
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))

    def clear_cache(self) -> None:
        """Drop cached keys and values. Raises RuntimeError if vLLM does not drop them."""
        while self.busy and not self._keys:
            self.llm.llm_engine.step()
        if self._keys or not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its cache, which belongs to the old weights "
                               f"({len(self._keys)} answers are still being written)")

    def load_adapter(self, policy) -> None:
        """Swap the adapter. vLLM caches by name, id and path, so each sync uses new ones."""
        from vllm.lora.request import LoRARequest

        number, folder = next(self._counter), tempfile.TemporaryDirectory(prefix="minirl-adapter-")
        policy.save_pretrained(folder.name, save_embedding_layers=False)  # "auto" queries the hub
        self._adapter = LoRARequest(f"policy-{number}", number, folder.name)
        self._folder = folder  # vLLM may read it until the next swap; then Python removes it

    def sleep(self) -> None:
        """Free GPU memory for the trainer. The weights go to the host, the cache is dropped."""
        if self.sleeps:
            self.clear_cache()
            self.llm.sleep(level=1)  # level 2 would drop the weights, and with LoRA it has crashed

    def wake(self) -> None:
        if self.sleeps:
            self.llm.wake_up()


def start(model: str, options: dict):
    """`vllm.LLM`. If it refuses a setting, its error becomes a SystemExit with one sentence."""
    import vllm

    try:
        return vllm.LLM(
            model, trust_remote_code=False, disable_log_stats=True, use_tqdm_on_load=False,
            # The trainer reads these files, and vLLM would prefer Mistral's if a folder has both.
            config_format="hf", tokenizer_mode="hf",
            load_format="safetensors",  # other kinds of files can run code
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # else the model's default top-p or top-k would apply
            hf_overrides={"head_dtype": "float32"},  # logits in float32, as in the trainer
            **options)
    except (ValueError, RuntimeError, NotImplementedError, AttributeError,
            AssertionError) as error:  # AssertionError: another process released GPU memory
        reason = shown(" ".join(str(error).split()) or type(error).__name__, 400)
        raise SystemExit(MEANT.format(reason)) from error


def require_original_context(architecture, max_model_len: int) -> None:
    """Raises SystemExit if texts may go beyond the original context of a model with LongRoPE.

    Beyond it, vLLM takes the long factors for every text, but transformers for long ones only.
    """
    rope = getattr(architecture, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and max_model_len > (
            longest := rope["original_max_position_embeddings"]):
        raise SystemExit(f"Prompt and answer may have {max_model_len} tokens, but at most "
                         f"{longest} work with this model: lower --max-prompt-tokens or "
                         "--max-tokens.")


def cpu_options(max_model_len: int) -> dict:
    # Prompts share only whole blocks of the cache, and few have vLLM's 128 tokens in common. A
    # prompt is read in one step, because vLLM 0.32 fails if a request with a seed is read in parts
    # ("CPU Generator does not use offset").
    return dict(enforce_eager=True, block_size=32, enable_chunked_prefill=False,
                max_num_batched_tokens=max(4096, max_model_len))


def gpu_options(memory_share: float, sleep: bool, routes: bool, max_num_seqs: int) -> dict:
    # vLLM records graphs of its kernels for each of these numbers of tokens at every start, and
    # pads a batch to the next one. By itself it would record three times as many. A batch has a
    # token for each running answer, and in a few steps also those of new prompts.
    sizes = {1, 2, 4, 8, 16, 32, 48, 64, *range(96, max_num_seqs, 32), max_num_seqs,
             max_num_seqs * 3 // 2, max_num_seqs * 2}
    # On cards of 70 GiB vLLM would reserve memory for 16,384 tokens, which its cache can use.
    return dict(gpu_memory_utilization=memory_share, enable_sleep_mode=sleep,
                enable_return_routed_experts=routes,
                compilation_config=dict(cudagraph_capture_sizes=sorted(sizes)),
                max_num_batched_tokens=8192)


def adapter_options(architecture, rank: int, dtype: str, on_cpu: bool, routes: bool) -> dict:
    """vLLM's options for serving the trainer's adapter. Raises SystemExit if vLLM cannot."""
    if on_cpu and routes or dtype == "float32" and not on_cpu:
        raise SystemExit("vLLM cannot serve an adapter of an MoE model on a CPU, or in float32 on "
                         "a GPU: use --sync merge.")
    return dict(enable_lora=True, max_loras=1,
                max_lora_rank=next(fitting for fitting in LORA_RANKS if fitting >= rank),
                lora_target_modules=adapted_layers(architecture))


def fp8_linears(on_cpu: bool) -> dict:
    """vLLM's options for linear layers in 8 bits, quantised at the start and at every sync."""
    routers = dict(ignore=["*.mlp.gate"])  # routers stay in bfloat16
    if on_cpu:  # experts, too, because vLLM has no kernel for them there
        return dict(quantization="online",
                    quantization_config=dict(linear="fp8_per_channel") | routers)
    return dict(quantization="fp8_per_tensor", quantization_config=routers)


class EngineForSampler:
    """The engine with a progress bar. Records the engine steps in which a rollout was written."""

    def __init__(self, engine, max_tokens: int):
        self.engine, self.max_tokens = engine, max_tokens
        self.steps, self.submitted = 0, {}
        self.bar = tqdm(total=0, desc="  sampled, of those begun", leave=False,
                        unit="sample", delay=2, position=1, disable=None)  # as in eval.py

    def submit(self, key, problem, **how) -> None:
        self.bar.total += 1
        self.submitted[key] = self.steps
        self.engine.submit(key, problem.prompt_ids, self.max_tokens, **how)

    def step(self) -> list:
        finished = self.engine.step()
        self.steps += 1
        for key, rollout in finished:
            rollout.submitted, rollout.finished = self.submitted.pop(key), self.steps
        self.bar.update(len(finished))
        return finished

    @property
    def busy(self) -> bool:
        return self.engine.busy


def start_engine(config, model, stops: list[int]) -> Engine:
    """vLLM with the model, whose answers end at `stops`."""
    # 2, because the probe's texts have at least one answer token, and vLLM adds another.
    return Engine(
        model.path, max_model_len=config.max_prompt_tokens + max(2, config.max_tokens),
        max_num_seqs=config.engine_sequences, temperature=config.temperature,
        dtype=config.rollout_dtype, kv_cache_dtype=config.kv_cache_dtype,
        lora_rank=config.lora_rank, sync_mode=config.sync, memory_share=config.engine_memory,
        sleep=config.sleep, stop_token_ids=stops, seed=config.seed,
        routes=model.config.model_type in ROUTERS and (build_for_cpu() or config.replay == "r3"),
        architecture=model.config)
