"""The same sampling rules in TRL's GRPOTrainer, for models that do not fit one GPU.

    python recipes/trl_ada.py                                        # the built-in model, on a CPU
    accelerate launch --num_processes 8 recipes/trl_ada.py --model Qwen2.5-Math-1.5B
    accelerate launch --use_fsdp --fsdp_version 2 recipes/trl_ada.py --model Qwen2.5-Math-7B --full

`ada_sampler.py` decides who is sampled and what is kept. Distribution (FSDP, DeepSpeed), optimizer
and losses are TRL's. Two hooks make that possible:

    rollout_func                      TRL hands over its prompts and gets n samples of each: those
                                      that `keep` has chosen out of what `collect` has drawn
    _generate_and_score_completions   TRL would subtract the mean of the kept samples, which were
                                      chosen; its advantages are replaced by ours. The method is
                                      private, so only one version of TRL will do

docs/trl.md says what differs from minirl.py.
"""
import argparse
import importlib.metadata
import json
import os
import random
import sys
import warnings
from dataclasses import asdict, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ada_sampler import SamplerConfig, collect, keep
from parts.config import Config, in_one_sentence, parse_flags, require_all_files, resolve
from parts.machine import build_for_cpu

TESTED = "1.16.0"
WORLD = int(os.environ.get("WORLD_SIZE", "1"))  # as accelerate and torchrun tell their processes


# ------------------------------------------------------------------------------ settings
HERE = {f.name for f in fields(SamplerConfig)} | {  # minirl.py's flags that decide something here
    "model", "dtype", "lora_rank", "lora_alpha", "data", "columns", "reward",
    "eval_data", "template", "max_prompt_tokens", "max_tokens",
    "batch_prompts", "threshold", "temperature", "advantage", "mini_batches", "lr", "warmup_steps",
    "max_grad_norm", "steps", "seed", "name", "resume", "engine_memory"}


def parse(argv: list[str] | None = None) -> tuple[Config, argparse.Namespace]:
    """Flags -> (minirl.py's config, filled in; our own). What cannot work ends in a sentence."""
    parser = argparse.ArgumentParser(
        "trl_ada.py", allow_abbrev=False,
        description="Reinforce-Ada sampling in TRL's GRPOTrainer. Without any flag: the built-in "
                    "tiny model.",
        epilog="And these flags of minirl.py, whose --help explains them: "
               + " ".join(f"--{name.replace('_', '-')}" for name in sorted(HERE)))
    parser.add_argument("--full", action="store_true",
                        help="train all weights, without an adapter (needs a GPU)")
    parser.add_argument("--micro-rows", type=int, default=0,
                        help="responses per forward and backward pass of a process; default: all")
    parser.add_argument("--trl", default="{}", help="further settings of TRL's GRPOConfig, as "
                        """JSON, such as '{"loss_type": "cispo"}'""")
    own, others = parser.parse_known_args(argv)
    with in_one_sentence("trl_ada.py"):
        config = parse_flags(Config, others, "trl_ada.py", parser.description)
        config.validate()
        for name, usual in asdict(Config()).items():
            if name not in HERE and getattr(config, name) != usual:
                raise ValueError(f"{name} has no effect in TRL: leave it out")
        start = "" if config.name else "trl-"
        config = resolve(config)
        config.name = start + config.name
        refuse(config, own)
    require_all_files(config)
    return config, own


def require_trl() -> None:
    """Raises SystemExit unless TRL is installed in the version that this was tested with."""
    try:
        found = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != TESTED:
        raise SystemExit(f"recipes/trl_ada.py replaces a private method of TRL {TESTED}, and "
                         f"installed is {found}: pip install --no-deps trl=={TESTED}")


def refuse(c: Config, own) -> None:
    """Raises ValueError for what TRL's fixed n samples per prompt and equal shares cannot do."""
    rows = c.batch_prompts * c.n // WORLD  # of a process
    mini = rows // c.mini_batches
    if c.sampler in ("ada-est", "gvm"):
        raise ValueError(f"{c.sampler} keeps more samples of some prompts than of others, and TRL "
                         "takes n of each: use uniform, ada-pos or ada-balance, or minirl.py")
    if c.rule.refills:
        raise ValueError(f"{c.sampler} tries other prompts in the place of silent ones, and TRL's "
                         "batch is fixed: use uniform, ada-pos or ada-balance, or minirl.py")
    if c.n < 2:
        raise ValueError("TRL wants at least 2 samples of a prompt: raise n")
    if (c.batch_prompts % WORLD or rows % c.mini_batches
            or own.micro_rows and mini % own.micro_rows):
        raise ValueError(f"batch_prompts = {c.batch_prompts} with n = {c.n} cannot be cut evenly "
                         f"into {WORLD} processes, mini_batches = {c.mini_batches} and "
                         f"micro_rows = {own.micro_rows}")
    if build_for_cpu() and (own.full or c.dtype == "float16"):
        raise ValueError("full and float16 need a GPU")


def trl_settings(c: Config, own):
    """TRL's GRPOConfig: what the flags decide, and MiniRL's objective, which --trl may change."""
    from trl import GRPOConfig

    mini = c.batch_prompts * c.n // WORLD // c.mini_batches
    micro, on_cpu = own.micro_rows or mini, build_for_cpu()
    decided = dict(
        output_dir=str(Path("runs", c.name)), max_steps=c.steps * c.mini_batches, seed=c.seed,
        learning_rate=c.lr, warmup_steps=c.warmup_steps, weight_decay=0.0,
        max_grad_norm=c.max_grad_norm, num_generations=c.n, per_device_train_batch_size=micro,
        gradient_accumulation_steps=mini // micro, scale_rewards="none",
        steps_per_generation=mini // micro * c.mini_batches, max_completion_length=c.max_tokens,
        temperature=c.temperature, use_vllm=True, vllm_mode="colocate",
        vllm_max_model_length=c.max_prompt_tokens + c.max_tokens,
        vllm_gpu_memory_utilization=c.engine_memory, use_cpu=on_cpu,
        bf16=c.dtype == "bfloat16", fp16=c.dtype == "float16",
        model_init_kwargs=dict(dtype="float32" if own.full else c.dtype))
    left_to_user = dict(
        loss_type="dr_grpo", beta=0.0, epsilon=c.eps_low, epsilon_high=c.eps_high, delta=None,
        importance_sampling_level="token", vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=c.weight_cap, router_aux_loss_coef=0.0,
        entropy_coef=0.0, cast_lm_head_to_fp32=False, gradient_checkpointing=not on_cpu,
        optim="adamw_torch", lr_scheduler_type="constant_with_warmup", logging_steps=1,
        save_steps=20, save_total_limit=2, report_to="none")
    return GRPOConfig(**decided | left_to_user | asked(own.trl, left_to_user))


def asked(text: str, allowed: dict) -> dict:
    """What --trl says. Raises SystemExit if that is no JSON object, or has any other setting."""
    try:
        found = dict(json.loads(text))
    except (ValueError, TypeError):
        raise SystemExit("--trl must be a JSON object, such as "
                         "'{\"loss_type\": \"cispo\"}'.") from None
    for name in found.keys() - allowed:
        raise SystemExit(f"--trl cannot set {name}, only {', '.join(allowed)}.")
    return found


require_trl()

if __name__ == "__main__":  # before torch is imported: --help and a wrong flag answer at once
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    CONFIG, OWN = parse()

from parts.engine import Engine, configure_vllm

configure_vllm(build_for_cpu())
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func: the version is pinned
if build_for_cpu():  # where TRL leaves vLLM alone
    warnings.filterwarnings("ignore", "TRL currently supports vLLM")

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from parts.metrics import summarize
from parts.models import fetch_model, load_tokenizer
from parts.policy import ATTENTION
from parts.prompts import stop_ids
from parts.routing_replay import is_supported
from parts.run import load_data
from rewards import open_grader


# ------------------------------------------------------------------------------ sampling
class BorrowedEngine(Engine):
    """parts/engine.py's submit, step and busy over TRL's vLLM, which TRL starts and keeps in sync.

    Every sample has a seed of its own, made of what it is: it does not depend on which process
    draws it, and no two processes draw the same.
    """

    def __init__(self, llm, stop_token_ids: list[int], config: Config):
        self.config, self.when = config, 0
        self.drive(llm, config.temperature, stop_token_ids)

    def submit(self, key, problem) -> None:
        _, sample = key
        place = f"{self.config.seed}/{self.when}/{problem.id}/{sample}"
        super().submit(key, problem.prompt_ids, self.config.max_tokens,
                       seed=random.Random(place).getrandbits(63))


class VLLMOnCpu:
    """In the place of TRL's VLLMGeneration, which cannot hand weights to vLLM's CPU build."""

    def __init__(self, model, processing_class, max_model_length, **_):
        self.model = model
        self.engine = Engine(model.name_or_path, max_model_len=max_model_length,
                             dtype=str(model.dtype).removeprefix("torch."), sync_mode="merge",
                             stop_token_ids=stop_ids(processing_class))
        self.llm = self.engine.llm

    def sync_weights(self) -> None:
        self.engine.sync(self.model)


def rows_of(group, n: int) -> list[tuple]:
    """[(sample, coefficient)], n of them: TRL has no room for less.

    Of a prompt that dapo or --drop-unresolved drops any n will do, with coefficient 0.
    """
    return group.rows() or [(sample, 0.0) for sample in keep(group.pool, n)]


class AdaTrainer(GRPOTrainer):
    """GRPOTrainer on the samples of `ada_sampler.collect`.

    problems: parts.data.Problem's with prompts; grader: rewards.open_grader's. The rest is
    GRPOTrainer's.
    """

    def __init__(self, problems: list, grader, config: Config, **rest):
        self.problems, self.grader, self.config = problems, grader, config
        data = Dataset.from_list([dict(prompt=problem.prompt, place=place)
                                  for place, problem in enumerate(problems)])
        super().__init__(train_dataset=data, rollout_func=rollouts, reward_funcs=kept_reward,
                         **rest)
        stops = stop_ids(self.processing_class)
        self.engine = BorrowedEngine(self.vllm_generation.llm, stops, config)

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        """TRL's, with our advantages. `inputs`: a row of the data per sample, prompt by prompt."""
        self.batch = [self.problems[row["place"]] for row in inputs[::self.num_generations]]
        output = super()._generate_and_score_completions(inputs)
        coefficients = [a for group in self.groups for _, a in rows_of(group, self.num_generations)]
        output["advantages"] = torch.tensor(coefficients, device=output["advantages"].device)
        return output


def rollouts(prompts: list[str], trainer: AdaTrainer) -> dict:
    """TRL's rollout_func: draws for the prompts of this process, and returns the kept samples."""
    trainer.engine.when = trainer.state.global_step
    trainer.groups = collect(trainer.batch, trainer.config, trainer.engine, trainer.grader)
    kept = [(group, sample) for group in trainer.groups
            for sample, _ in rows_of(group, trainer.num_generations)]
    return dict(prompt_ids=[group.problem.prompt_ids for group, _ in kept],
                completion_ids=[sample.rollout.token_ids for _, sample in kept],
                logprobs=[sample.rollout.logprobs for _, sample in kept],
                reward=[sample.reward for _, sample in kept], groups=[trainer.groups] * len(kept))


def kept_reward(prompts, completions, reward, groups, log_metric, **_) -> list[float]:
    """TRL's reward function: what the grader said before. Logs what the sampling was like.

    TRL's own "reward" is of the kept samples, which were chosen: watch reward_first_round.
    """
    for name, value in summarize(groups[0]).items():
        if name in ("samples", "tokens"):
            log_metric(name, float(value * WORLD))  # TRL averages over the processes
        elif isinstance(value, float):
            log_metric(name, value)
    return reward


# ------------------------------------------------------------------------------ the program
def make_trainer(config: Config, own, grader) -> AdaTrainer:
    """Raises SystemExit, one sentence, for what cannot work, before the engine is started."""
    settings = trl_settings(config, own)
    folder = Path(settings.output_dir)
    if config.resume != any(folder.glob("checkpoint-*")):
        found = "no checkpoint: leave out" if config.resume else "checkpoints: add"
        raise SystemExit(f"{folder} has {found} --resume, or choose another --name.")
    path = fetch_model(config.model, config.max_prompt_tokens + config.max_tokens)
    tokenizer = load_tokenizer(path)
    tokenizer.padding_side = "left"
    problems, _ = load_data(config, tokenizer, grader)
    if len(problems) < config.batch_prompts:
        raise SystemExit(f"{len(problems)} problems are less than one batch of "
                         f"{config.batch_prompts}: lower --batch-prompts.")
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, task_type="CAUSAL_LM",
                      target_modules=ATTENTION if is_supported(path) else "all-linear")
    if build_for_cpu():
        grpo_trainer.VLLMGeneration = VLLMOnCpu
    return AdaTrainer(problems, grader, config, model=path, args=settings,
                      processing_class=tokenizer, peft_config=None if own.full else lora)


def main(config: Config, own) -> None:
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # the first process speaks for all
    with open_grader(config.reward, config.threshold) as grader:
        trainer = make_trainer(config, own, grader)
        trainer.train(resume_from_checkpoint=config.resume)
        trainer.save_model()
    kind = "--model" if own.full else f"--model {config.model} --adapter"
    print(f"saved; evaluate it with python eval.py {kind} {trainer.args.output_dir}")


if __name__ == "__main__":
    main(CONFIG, OWN)
