"""The same sampling rules in TRL's GRPOTrainer, for models that do not fit one GPU.

    accelerate launch --config_file recipes/launch/fsdp2.yaml recipes/trl_ada.py --full ...

`ada_sampler.py` decides who is sampled and what is kept, and parts/engine.py draws: a vLLM in each
process. Distribution (FSDP, DeepSpeed), optimizer and losses are TRL's. It is reached in three
places:

    rollout_func                      TRL hands over its prompts and gets n samples of each: those
                                      that `keep` has chosen out of what `collect` has drawn
    _generate_and_score_completions   TRL would subtract the mean of the kept samples, which were
                                      chosen; its advantages are replaced by ours
    VLLMGeneration                    TRL would start an engine that cannot draw in rounds, and
                                      merge an adapter in place, at every sync: errors add up

The last two are private, so only one version of TRL will do. More: docs/elsewhere.md.
"""
import contextlib
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ada_sampler import collect, keep, set_advantages
from parts import config as settings
from parts import folder as folders
from parts.machine import build_for_cpu

WORLD = int(os.environ.get("WORLD_SIZE", "1"))  # as accelerate and torchrun tell their processes
FIRST = os.environ.get("RANK", "0") == "0"  # this process writes, and speaks for all
SHARDED = next((kind for kind in ("FSDP", "DEEPSPEED")
                if os.environ.get(f"ACCELERATE_USE_{kind}") == "true"), "nothing")


# ------------------------------------------------------------------------------ settings
@dataclass
class TRLSettings:
    """What TRL does."""

    full: bool = False
    """train all weights, without an adapter; saved every --keep-every steps, and at the end"""
    micro_rows: int = 0
    """responses per forward and backward pass of a process; 0 = all of its share"""
    trl: str = "{}"
    """further settings of TRL's GRPOConfig, as JSON, such as '{"loss_type": "cispo"}'"""

    prefix = "trl-"  # of a run that was given no name


@dataclass
class Flags(settings.ModelSettings, settings.ProblemSettings, settings.SamplingSettings,
            settings.OptimizerSettings, settings.RunSettings, settings.HeldOutSettings,
            settings.EngineSettings, TRLSettings):
    """Groups of minirl.py's flags, as they are, and TRL's."""

    sync: Literal["merge"] = "merge"  # FSDP and DeepSpeed have no whole adapter to hand over


@dataclass
class Config(settings.Config, TRLSettings):
    """All settings. Those of minirl.py's that are no flag here have their defaults."""

    sync: Literal["merge"] = "merge"
    replay: Literal["none"] = "none"
    resumable = settings.RESUMABLE - {"lr", "keep_every"}  # TRL takes them from the checkpoint
    less_memory = "lower --engine-memory, or start anew with a lower --micro-rows or --max-tokens"

    def validate(self) -> None:
        """Raises ValueError, one sentence, for what cannot work."""
        super().validate()
        settings.refuse(what_trl_cannot(self))


def parse(argv: list[str] | None = None) -> Config:
    return settings.parse(argv, Config, Flags, ("trl_ada.py", "Reinforce-Ada sampling in TRL"))


def what_trl_cannot(c: Config) -> list[tuple[bool, str]]:
    """[(is it so?, a sentence)]: TRL takes n samples of each prompt, and equal shares."""
    rows = c.batch_prompts * c.n // WORLD  # of a process
    mini = rows // c.mini_batches
    return [
        (bool(c.rule.allocates or c.rule.refills),
         f"{c.sampler} needs more samples of some prompts, or other prompts, and TRL takes n of "
         "each: use uniform, ada-pos or ada-balance, or minirl.py"),
        (c.n < 2, "TRL wants at least 2 samples of a prompt: raise n"),
        (bool(c.batch_prompts % WORLD or rows % c.mini_batches
              or c.micro_rows and mini % c.micro_rows),
         f"batch_prompts = {c.batch_prompts} with n = {c.n} cannot be cut evenly into {WORLD} "
         f"processes, mini_batches = {c.mini_batches} and micro_rows = {c.micro_rows}"),
        (c.full and c.lora_rank != Config.lora_rank, "lora_rank has no effect with full"),
        (build_for_cpu() and c.dtype == "float16", "float16 needs a GPU"),
        (build_for_cpu() and SHARDED != "nothing",
         f"{SHARDED} needs a GPU: on a CPU Accelerate leaves it out without a word"),
    ]


def trl_settings(c: Config):
    """TRL's GRPOConfig: what the flags decide, and MiniRL's objective, which --trl may change."""
    from trl import GRPOConfig

    mini = c.batch_prompts * c.n // WORLD // c.mini_batches
    micro, on_cpu = c.micro_rows or mini, build_for_cpu()
    save_every = c.keep_every or c.steps if c.full else 1  # an adapter is small
    decided = dict(
        output_dir=f"runs/{c.name}/checkpoints", max_steps=c.steps * c.mini_batches, seed=c.seed,
        learning_rate=c.lr, warmup_steps=c.warmup_steps, weight_decay=0.0,
        max_grad_norm=c.max_grad_norm, num_generations=c.n, per_device_train_batch_size=micro,
        gradient_accumulation_steps=mini // micro, scale_rewards="none",
        steps_per_generation=mini // micro * c.mini_batches, max_completion_length=c.max_tokens,
        temperature=c.temperature, use_vllm=True, use_cpu=on_cpu, bf16=c.dtype == "bfloat16",
        fp16=c.dtype == "float16", model_init_kwargs=dict(dtype="float32" if c.full else c.dtype),
        logging_steps=1, save_strategy="steps", save_steps=save_every * c.mini_batches,
        report_to=c.report_to, ddp_find_unused_parameters=False,
        num_iterations=1)  # else --steps would count something else
    # else FSDP2 would keep whole gradients on each GPU until the last micro-batch
    accumulation = dict(sync_each_batch=SHARDED == "FSDP")
    left_to_user = dict(
        accelerator_config=dict(gradient_accumulation_kwargs=accumulation), loss_type="dr_grpo",
        epsilon=c.eps_low, epsilon_high=c.eps_high,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=c.weight_cap, router_aux_loss_coef=0.0,
        gradient_checkpointing=not on_cpu, optim="adamw_torch",
        lr_scheduler_type="constant_with_warmup")
    try:
        return GRPOConfig(**decided, **left_to_user | json.loads(c.trl))
    except (ValueError, TypeError) as error:
        raise SystemExit("--trl must be a JSON object of settings of TRL's GRPOConfig that no flag "
                         f"decides, such as '{{\"loss_type\": \"cispo\"}}' ({error}).") from None


if __name__ == "__main__":  # before torch is imported: --help and a wrong flag answer at once
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    CONFIG = parse()

from recipes.trl_engine import PromptProbe, SeededEngine, trained_weights  # before TRL

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, TrainerCallback
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from parts.data import HELD_OUT, is_own
from parts.metrics import summarize
from parts.policy import ATTENTION
from parts.routing_replay import is_supported
from parts.run import before_the_engine, find_model, last_words, load_data, python, start_engine
from rewards import open_grader


# ------------------------------------------------------------------------------ the trainer
class AdaTrainer(GRPOTrainer):
    """GRPOTrainer on the samples of `ada_sampler.collect`.

    problems: parts.data.Problem's with prompts; grader: rewards.open_grader's.
    """

    probe = None

    def __init__(self, config: Config, engine, problems: list, grader, **rest):
        self.config, self.engine, self.problems, self.grader = config, engine, problems, grader
        data = Dataset.from_list([dict(prompt=problem.prompt, place=place)
                                  for place, problem in enumerate(problems)])
        grpo_trainer.VLLMGeneration = lambda **_: self  # of it TRL wants `sync_weights` alone
        super().__init__(train_dataset=data, rollout_func=rollouts, reward_funcs=kept_reward,
                         **rest)

    def sync_weights(self) -> None:
        """TRL calls it before it asks for rollouts, when the weights have changed."""
        self.engine.clear_cache()
        self.engine.reload(trained_weights(self.model, self._dist.gather_params))
        self.probe = self.probe or PromptProbe(self)
        self.probed = self.probe.check()

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        """TRL's, with our advantages. `inputs`: a row of the data per sample, prompt by prompt."""
        self.batch = [self.problems[row["place"]] for row in inputs[::self.num_generations]]
        output = super()._generate_and_score_completions(inputs)
        ours = torch.tensor([row["coefficient"] for row in inputs])  # of `rollouts`
        return output | dict(advantages=ours.to(output["advantages"]))


def rollouts(prompts: list[str], trainer: AdaTrainer) -> dict:
    """TRL's rollout_func: draws for the prompts of this process, and returns the kept samples."""
    engine = SeededEngine(trainer.engine, trainer.config, trainer.state.global_step)
    with contextlib.closing(engine.bar):
        trainer.groups = collect(trainer.batch, trainer.config, engine, trainer.grader)
    for group in trainer.groups:
        set_advantages(group, trainer.config)
    rows = [(group.problem, *row) for group in trainer.groups
            for row in rows_of(group, trainer.num_generations)]
    return dict(prompt_ids=[problem.prompt_ids for problem, *_ in rows],
                completion_ids=[sample.rollout.token_ids for _, sample, _ in rows],
                logprobs=[sample.rollout.logprobs for _, sample, _ in rows],
                reward=[sample.reward for _, sample, _ in rows],
                coefficient=[coefficient for *_, coefficient in rows],
                found=summarize(trainer.groups) | trainer.probed)


def rows_of(group, n: int) -> list[tuple]:
    """[(sample, coefficient)], n of them: TRL has no room for less.

    Of a prompt that --drop-unresolved drops any n will do, with coefficient 0.
    """
    return group.rows() or [(sample, 0.0) for sample in keep(group.pool, n)]


def kept_reward(prompts, completions, reward, found, log_metric, **_) -> list[float]:
    """TRL's reward function: what the grader said before. Logs what `rollouts` has found.

    TRL's own "reward" is of the kept samples, which were chosen: watch reward_first_round.
    """
    for name, value in found[0].items():
        if name in ("samples", "tokens"):
            log_metric(name, float(value * WORLD))  # TRL averages over what all processes log
        elif isinstance(value, float):  # a mean over prompts or kept samples, or over all drawn
            of_all_drawn = name in ("reward_pool", "response_length", "truncated")
            for _ in range(found[0]["samples"] if of_all_drawn else 1):
                log_metric(name, value)
    return reward


# ------------------------------------------------------------------------------ the run's folder
class Keeper(TrainerCallback):
    """Logs each step. Names a checkpoint step-XXXXXX once all processes have written it: one that
    a crash cuts short has no such name. The newest two stay, and every --keep-every-th.
    """

    def __init__(self, config: Config):
        self.config, self.folder = config, Path("runs", config.name)

    def on_log(self, args, state, control, logs, **_) -> None:
        if FIRST and "loss" in logs:
            folders.append(self.folder / "metrics.jsonl", dict(step=self.step(state), **logs))

    def on_save(self, args, state, control, **_) -> None:
        PartialState().wait_for_everyone()
        if FIRST:
            step, every = self.step(state), self.config.keep_every
            written = Path(args.output_dir, f"checkpoint-{state.global_step}")
            named = folders.rename(written, written.with_name(f"step-{step:06d}"))
            folders.drop_older(self.folder, every)
            if step == self.config.steps or every and not step % every:
                print(f"saved; evaluate it with {evaluation(self.config, named)}")

    def step(self, state) -> int:
        """Batches that were sampled so far: TRL counts optimizer steps."""
        return -(-state.global_step // self.config.mini_batches)


def evaluation(c: Config, checkpoint: Path) -> str:
    """The command that evaluates a checkpoint on the problems that were held out.

    It finds the other settings in the run's config.json.
    """
    flags = {"model" if c.full else "adapter": checkpoint, "data": c.eval_data,
             "limit": c.eval_questions, "k": c.eval_k, "reward": c.reward,
             "columns": c.columns if c.eval_data == HELD_OUT or is_own(c.eval_data) else ""}
    if c.reward:  # also a threshold of 0
        flags["threshold"] = c.threshold
    words = [f"--{name}={value}" for name, value in flags.items() if value != ""]
    return shlex.join([python(), "eval.py", *words])


def before_training(c: Config, grader) -> SimpleNamespace:
    """Model files, problems and newest checkpoint. The first process takes the folder.

    Raises SystemExit, one sentence, for what cannot work, before the engine is started.
    """
    if FIRST:
        found = before_the_engine(c, grader)
        last = folders.step_of(found.newest) if found.newest else 0
        folders.keep_rows(found.folder / "metrics.jsonl",
                          lambda row: folders.has_step(row) and row["step"] <= last)
    else:
        path, tokenizer, stops = find_model(c)
        found = SimpleNamespace(path=path, tokenizer=tokenizer, stops=stops, newest=None,
                                train=load_data(c, tokenizer, grader)[0])
    [found.newest] = broadcast_object_list([found.newest])  # the first's, for which all wait
    require_resumable(found.newest, c.steps)
    if len(found.train) < c.batch_prompts:
        raise SystemExit(f"{len(found.train)} problems are less than one batch of "
                         f"{c.batch_prompts}: lower --batch-prompts.")
    return found


def require_resumable(newest: Path | None, steps: int) -> None:
    """Raises SystemExit, one sentence, unless there is something to be done from here."""
    if newest and folders.step_of(newest) >= steps:
        print(f"all of --steps {steps} are done")
        raise SystemExit(0)
    holds = dict(FSDP="optimizer.bin", DEEPSPEED="latest", nothing="optimizer.pt")[SHARDED]
    if newest and not (newest / holds).exists():
        raise SystemExit(f"{newest} was sharded in another way, or is on another machine (it has "
                         f"no {holds}): share the folder runs, and resume with the file of "
                         "recipes/launch that the run was started with.")


# ------------------------------------------------------------------------------ the program
def make_trainer(c: Config, grader) -> AdaTrainer:
    args, found = trl_settings(c), before_training(c, grader)
    engine = start_engine(c, found.path, found.stops)
    architecture = AutoConfig.from_pretrained(found.path, trust_remote_code=False)
    lora = LoraConfig(r=c.lora_rank, lora_alpha=c.lora_alpha, task_type="CAUSAL_LM",
                      target_modules=ATTENTION if is_supported(architecture) else "all-linear")
    torch.manual_seed(c.seed)  # the adapter's start, in all processes alike
    trainer = AdaTrainer(
        c, engine, found.train, grader, model=found.path, args=args, callbacks=[Keeper(c)],
        processing_class=found.tokenizer, peft_config=None if c.full else lora)
    trainer.eos_token_ids = found.stops  # TRL knows fewer, and counts answers that are cut off
    if c.full:  # the weights are saved with these
        trainer.model.generation_config.eos_token_id = found.stops
        trainer.model.config.eos_token_id = found.stops
    trainer.newest = found.newest and str(found.newest)
    trainer.found = found  # so that its lock on the folder lives as long
    return trainer


def main(config: Config) -> None:
    if not FIRST:
        sys.stdout = open(os.devnull, "w")
    with open_grader(config.reward, config.threshold) as grader:
        trainer = make_trainer(config, grader)
        trainer.train(resume_from_checkpoint=trainer.newest)


if __name__ == "__main__":
    with last_words(CONFIG):
        main(CONFIG)
