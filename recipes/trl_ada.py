"""uniform, ada-pos and ada-balance in TRL's GRPOTrainer, for training on several GPUs.

    accelerate launch --config_file recipes/launch/fsdp2.yaml recipes/trl_ada.py --full ...

`ada_sampler.py` decides how many answers are sampled and which are kept, and parts/engine.py runs a
vLLM in each process. TRL distributes the model (FSDP, DeepSpeed) and has optimizer and losses. This
recipe changes TRL in three places:

    rollout_func                      TRL passes its prompts and gets n answers to each, which
                                      `keep` has selected from the answers of `collect`
    _generate_and_score_completions   TRL would subtract the mean of the kept answers, which were
                                      selected, so its advantages are replaced by ours
    VLLMGeneration                    TRL would start an engine that cannot sample in rounds, and
                                      merge an adapter in place at every sync, so errors add up

The last two are private, so only one version of TRL will do. More: recipes/README.md.
"""
import contextlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from ada_sampler import collect, set_advantages
from parts import config as minirl_flags
from parts import files
from parts.config import Config, check_numbers, in_one_sentence, require_effect, settle
from parts.machine import build_for_cpu
from parts.run_folder import checkpoints, claim, drop_older, note_start, settings, step_of

WORLD = int(os.environ.get("WORLD_SIZE", "1"))  # set by accelerate and torchrun
FIRST = os.environ.get("RANK", "0") == "0"  # this process writes and prints for all
SHARDED = next((kind for kind in ("FSDP", "DEEPSPEED")
                if os.environ.get(f"ACCELERATE_USE_{kind}") == "true"), "nothing")
UNREAD = (  # flags of minirl.py that TRL has in another form or not at all
    "objective importance clip eps_low eps_high weight_cap length_norm replay log_groups "
    "eval_every eval_first rollout_dtype kv_cache_dtype sleep micro_tokens")


# ------------------------------------------------------------------------------ settings
@dataclass(frozen=True)
class TRL:
    """The flags of this recipe in addition to those of `python minirl.py --help`."""

    full: bool = False
    """train all weights without an adapter; saved every --keep-every steps and at the end"""
    micro_rows: int = 0
    """answers per forward and backward pass of a process; 0 = its whole share"""
    trl: str = "{}"
    """further settings of TRL's GRPOConfig, as JSON, such as '{"loss_type": "cispo"}'"""


def parse(argv: list[str] | None = None) -> tuple[TRL, Config]:
    """The recipe's flags and those of minirl.py. A resumed run has its earlier ones.

    FSDP and DeepSpeed split the adapter, so the engine gets merged weights.
    """
    recipe, others = tyro.cli(
        TRL, args=argv, return_unknown_args=True, prog="trl_ada.py",
        description="Reinforce-Ada sampling in TRL; has minirl.py's flags, too")
    flags = minirl_flags.parse(["--sync", "merge", *others])
    folder, before = Path("runs", flags.name), {}
    with in_one_sentence("trl_ada.py"):
        if flags.resume and checkpoints(folder):
            before = settings(folder)
            stored = TRL(**files.read_json(folder / "trl.json"))
            recipe = stored if recipe == TRL() else recipe
            if recipe != stored or any(
                    getattr(flags, name) != before[name] for name in ("lr", "keep_every")):
                raise ValueError("lr, keep_every, full, micro_rows and trl cannot change with "
                                 "--resume, because TRL takes them from the checkpoint")
        check(recipe, flags, vars(Config()) | before)
    return recipe, flags


def check(recipe: TRL, flags: Config, usual: dict) -> None:
    """Raises ValueError, one sentence, for flags that TRL cannot use, whatever the model is."""
    check_numbers(recipe)
    require_effect(flags, usual, [
        (UNREAD, False, "in TRL, which has its settings in --trl"),
        ("lora_rank lora_alpha", not recipe.full, "with full")])
    if flags.sync != "merge":
        raise ValueError("sync must be merge")
    if flags.n < 2 or flags.rule.allocates or flags.rule.refills:
        raise ValueError("TRL takes n answers per prompt, at least 2, and "
                         f"{flags.sampler} with n = {flags.n} does not: use uniform, ada-pos or "
                         "ada-balance, or minirl.py")
    if build_for_cpu() and needs_gpu(flags):
        raise ValueError("float16, FSDP and DEEPSPEED need a GPU, because on a CPU Accelerate "
                         "ignores the last two without a message")


def needs_gpu(flags: Config) -> bool:
    return flags.dtype == "float16" or SHARDED != "nothing"


def require_shares(recipe: TRL, c: Config) -> None:
    """Raises SystemExit if the processes would get unequal shares of a step."""
    rows = c.batch_prompts * c.n // WORLD  # of a process
    mini = rows // c.mini_batches
    if (c.batch_prompts % WORLD or rows % c.mini_batches
            or recipe.micro_rows and mini % recipe.micro_rows):
        raise SystemExit(
            f"batch_prompts = {c.batch_prompts} with n = {c.n} cannot be split evenly into {WORLD} "
            f"processes, mini_batches = {c.mini_batches} and micro_rows = {recipe.micro_rows}")


def trl_settings(recipe: TRL, c: Config):
    """TRL's GRPOConfig, from the flags and with MiniRL's objective, which --trl may change."""
    from trl import GRPOConfig

    mini = c.batch_prompts * c.n // WORLD // c.mini_batches
    micro, on_cpu = recipe.micro_rows or mini, build_for_cpu()
    save_every = c.keep_every or c.steps if recipe.full else 1  # an adapter is small
    decided = dict(
        output_dir=f"runs/{c.name}/checkpoints", max_steps=c.steps * c.mini_batches, seed=c.seed,
        learning_rate=c.lr, warmup_steps=c.warmup_steps, weight_decay=0.0,
        max_grad_norm=c.max_grad_norm, num_generations=c.n, per_device_train_batch_size=micro,
        gradient_accumulation_steps=mini // micro, scale_rewards="none",
        steps_per_generation=mini // micro * c.mini_batches, max_completion_length=c.max_tokens,
        temperature=c.temperature, use_vllm=True, use_cpu=on_cpu, bf16=c.dtype == "bfloat16",
        fp16=c.dtype == "float16",
        model_init_kwargs=dict(dtype="float32" if recipe.full else c.dtype),
        logging_steps=1, save_strategy="steps", save_steps=save_every * c.mini_batches,
        report_to=c.report_to, ddp_find_unused_parameters=False,
        num_iterations=1)  # else --steps would have another meaning
    # or FSDP2 would keep whole gradients on each GPU until the last micro-batch
    accumulation = dict(sync_each_batch=SHARDED == "FSDP")
    left_to_user = dict(
        accelerator_config=dict(gradient_accumulation_kwargs=accumulation), loss_type="dr_grpo",
        epsilon=c.eps_low, epsilon_high=c.eps_high,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=c.weight_cap, router_aux_loss_coef=0.0,
        gradient_checkpointing=not on_cpu, optim="adamw_torch",
        lr_scheduler_type="constant_with_warmup")
    try:
        return GRPOConfig(**decided, **left_to_user | json.loads(recipe.trl))
    except (ValueError, TypeError) as error:
        raise SystemExit("--trl must be a JSON object of settings of TRL's GRPOConfig that no flag "
                         f"decides, such as '{{\"loss_type\": \"cispo\"}}' ({error}).") from None


if __name__ == "__main__":  # before the import of torch, so that a wrong flag ends at once
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    OWN, FLAGS = parse()

from recipes.trl_engine import PromptProbe, SeededEngine, trained_weights  # before TRL

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from parts.data import HELD_OUT, load_data
from parts.engine import start_engine
from parts.metrics import summarize
from parts.policy import adapted_layers
from parts.routing_replay import ROUTERS
from parts.prompts import stop_ids
from parts.log import say_how_to_resume
from rewards import open_grader


# ------------------------------------------------------------------------------ the trainer
class AdaTrainer(GRPOTrainer):
    """GRPOTrainer with the answers of `ada_sampler.collect`.

    problems: list of parts.data.Problem with prompts. grader: from rewards.open_grader.
    """

    probe = None

    def __init__(self, config: Config, engine, problems: list, grader, **rest):
        self.config, self.engine, self.problems, self.grader = config, engine, problems, grader
        data = Dataset.from_list([dict(prompt=problem.prompt, place=place)
                                  for place, problem in enumerate(problems)])
        grpo_trainer.VLLMGeneration = lambda **_: self  # TRL only calls its `sync_weights`
        super().__init__(train_dataset=data, rollout_func=rollouts, reward_funcs=kept_reward,
                         **rest)

    def sync_weights(self) -> None:
        """TRL calls this before rollouts if the weights have changed."""
        self.engine.clear_cache()
        self.engine.reload(trained_weights(self.model, self._dist.gather_params))
        self.probe = self.probe or PromptProbe(self)
        self.probed = self.probe.check()

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        """TRL's, with our advantages. `inputs`: a row of the data per answer, prompt by prompt."""
        self.batch = [self.problems[row["place"]] for row in inputs[::self.num_generations]]
        output = super()._generate_and_score_completions(inputs)
        ours = torch.tensor([row["coefficient"] for row in inputs])  # of `rollouts`
        return output | dict(advantages=ours.to(output["advantages"]))


def rollouts(prompts: list[str], trainer: AdaTrainer) -> dict:
    """TRL's rollout_func: samples for the prompts of this process, returns the kept answers."""
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
                reward=[0.0 if math.isnan(sample.reward) else sample.reward
                        for _, sample, _ in rows],
                coefficient=[coefficient for *_, coefficient in rows],
                step_metrics=summarize(trainer.groups) | trainer.probed)


def rows_of(group, n: int) -> list[tuple]:
    """[(answer, coefficient)], n of them, because TRL cannot take fewer.

    Other answers with coefficient 0 fill up a prompt that --drop-unresolved drops, or one with too
    few verdicts.
    """
    kept = {sample.index for sample in group.kept}
    others = [(sample, 0.0) for sample in group.pool if sample.index not in kept]
    return (group.rows() + others)[:n]


def kept_reward(prompts, completions, reward, step_metrics, log_metric, **_) -> list[float]:
    """TRL's reward function, which returns known rewards. Logs the metrics of `rollouts`.

    TRL's "reward" is the mean of the kept, selected answers, so watch reward_first_round.
    """
    for name, value in step_metrics[0].items():
        if name in ("samples", "tokens"):
            log_metric(name, float(value * WORLD))  # TRL averages over all processes
        elif isinstance(value, float):  # a mean over prompts or kept answers, or all answers
            of_all_drawn = name in ("reward_pool", "response_length", "truncated")
            for _ in range(step_metrics[0]["samples"] if of_all_drawn else 1):
                log_metric(name, value)
    return reward


# ------------------------------------------------------------------------------ the run's folder
class Keeper(TrainerCallback):
    """Logs each step. Names a checkpoint step-XXXXXX after all processes have written it, so an
    incomplete one has no such name. Keeps the newest two and every --keep-every-th.
    """

    def __init__(self, recipe: TRL, config: Config):
        self.recipe, self.config, self.folder = recipe, config, Path("runs", config.name)

    def on_log(self, args, state, control, logs, **_) -> None:
        if FIRST and "loss" in logs:
            files.append(self.folder / "metrics.jsonl", dict(step=self.step(state), **logs))

    def on_save(self, args, state, control, **_) -> None:
        PartialState().wait_for_everyone()
        if FIRST:
            step, every = self.step(state), self.config.keep_every
            written = Path(args.output_dir, f"checkpoint-{state.global_step}")
            size = (self.folder / "metrics.jsonl").stat().st_size
            (written / "log.size").write_text(str(size))
            named = files.rename(written, written.with_name(f"step-{step:06d}"))
            drop_older(self.folder, every)
            if step == self.config.steps or every and not step % every:
                print(f"saved; evaluate it with python eval.py {self.asked(named)}")

    def asked(self, named: Path) -> str:
        """Flags of eval.py. An adapter has its run's, but a whole model is like any other."""
        if not self.recipe.full:
            return f"--adapter {named}"
        c = self.config
        data = "FILE" if c.eval_data == HELD_OUT else c.eval_data  # else most were trained on
        return (f"--model {named} --data {data} --k {c.eval_k} --limit {c.eval_questions} "
                f"--template {c.template} --max-prompt-tokens {c.max_prompt_tokens} "
                f"--max-tokens {c.max_tokens}")

    def step(self, state) -> int:
        """The number of sampled batches so far, because TRL counts optimizer steps."""
        return -(-state.global_step // self.config.mini_batches)


def newest_checkpoint(folder: Path, steps: int) -> str | None:
    """Where to go on; the log is cut back to it. Raises SystemExit if that is not possible."""
    newest = next(reversed(checkpoints(folder)), None) if FIRST else None
    [newest] = broadcast_object_list([newest])  # from the first process
    if not newest:
        return None
    if step_of(newest) >= steps:
        print(f"all of --steps {steps} are done")
        raise SystemExit(0)
    holds = dict(FSDP="optimizer.bin", DEEPSPEED="latest", nothing="optimizer.pt")[SHARDED]
    if not (newest / holds).exists():
        raise SystemExit(f"{newest} was sharded in another way, or is on another machine (it has "
                         f"no {holds}): share the folder runs, and resume with the file of "
                         "recipes/launch that the run was started with.")
    if FIRST:  # what was logged after this checkpoint is repeated
        os.truncate(folder / "metrics.jsonl", int((newest / "log.size").read_text()))
    return str(newest)


# ------------------------------------------------------------------------------ the program
def make_trainer(recipe: TRL, flags: Config, grader) -> AdaTrainer:
    """Everything before the first step. Only the first process locks and writes the folder."""
    PartialState(cpu=build_for_cpu())  # joins the processes, or no broadcast reaches them
    folder = Path("runs", flags.name)
    lock = claim(folder, flags.resume) if FIRST else None
    c, model = settle(flags)
    require_shares(recipe, c)
    train, held_out = load_data(c, model, grader)
    if len(train) < c.batch_prompts:
        raise SystemExit(f"{len(train)} problems are fewer than one batch of "
                         f"{c.batch_prompts}: lower --batch-prompts.")
    stops = stop_ids(model, c.template, c.stop)
    if FIRST:
        note_start(folder, asdict(c), train, held_out, model=model.digest, end_tokens=stops)
        files.write_safely(folder / "trl.json", json.dumps(asdict(recipe)))
    newest = newest_checkpoint(folder, c.steps)
    args, engine = trl_settings(recipe, c), start_engine(c, model, stops)
    mixture = model.config.model_type in ROUTERS
    layers = adapted_layers(model.config) if mixture else "all-linear"
    lora = LoraConfig(r=c.lora_rank, lora_alpha=c.lora_alpha, task_type="CAUSAL_LM",
                      target_modules=layers)
    torch.manual_seed(c.seed)  # the same initial adapter in all processes
    trainer = AdaTrainer(
        c, engine, train, grader, model=model.path, args=args, callbacks=[Keeper(recipe, c)],
        processing_class=model.tokenizer, peft_config=None if recipe.full else lora)
    trainer.eos_token_ids = stops  # TRL knows fewer, but counts truncated answers
    if recipe.full:  # the weights are saved with these
        trainer.model.generation_config.eos_token_id = stops
        trainer.model.config.eos_token_id = stops
    trainer.newest, trainer.lock = newest, lock  # the lock holds as long as the trainer
    return trainer


def main(recipe: TRL, flags: Config) -> None:
    if not FIRST:
        sys.stdout = open(os.devnull, "w")
    with open_grader(flags.reward, flags.threshold) as grader:
        trainer = make_trainer(recipe, flags, grader)
        trainer.train(resume_from_checkpoint=trainer.newest)


if __name__ == "__main__":
    with say_how_to_resume(FLAGS):
        main(OWN, FLAGS)
