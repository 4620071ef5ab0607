"""Plain GRPO, ours against TRL's GRPOTrainer: seconds per step.

    .venv/bin/pip install --no-deps trl==1.16.0     # only for this script and recipes/trl_ada.py
    .venv/bin/python bench/trl_baseline.py          # about two minutes on one core

Both sides take turns in one process, a step each: same model folder, prompts, number of samples,
length limit, LoRA (rank, alpha, all linear layers), optimizer, and the same mathematics: reward
minus the group's mean, summed over tokens, divided by a constant (TRL: loss_type="dr_grpo",
scale_rewards="none"). TRL is given our grader, no gradient checkpointing, and its fastest way of
generating that runs on a CPU: Hugging Face `generate` on one static batch. (Tried with vLLM 0.32:
its continuous batching took ten times as long, and its colocated vLLM fails on a CPU when it loads
the weights.)
"""
import argparse
import tempfile
import time

from common import installed, load, median, middle_ratio, project, save

PROMPTS, SAMPLES = 24, 8  # a step, and of each prompt


def their_trainer(run, steps: int, folder: str, callback):
    """A GRPOTrainer that does what `run` does."""
    from datasets import Dataset
    from parts.models import fetch_model
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    def reward(prompts, completions, answer, **_):
        return [verdict.reward for verdict in run.grader.grade(list(zip(answer, completions)))]

    config, model = run.config, fetch_model(run.config.model, 0)
    settings = GRPOConfig(
        output_dir=folder, max_steps=steps, num_generations=SAMPLES, temperature=1.0,
        per_device_train_batch_size=PROMPTS * SAMPLES, beta=0.0, loss_type="dr_grpo",
        scale_rewards="none", max_completion_length=config.max_tokens, epsilon=config.eps_low,
        epsilon_high=config.eps_high, learning_rate=config.lr, lr_scheduler_type="constant",
        max_grad_norm=config.max_grad_norm, weight_decay=0.0, use_cpu=True, bf16=False, fp16=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, seed=0)
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear",
                      task_type="CAUSAL_LM")
    data = [dict(prompt=p.prompt, answer=p.answer) for p in run.stream.problems[:PROMPTS * steps]]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model), reward_funcs=reward, args=settings,
        train_dataset=Dataset.from_list(data), peft_config=lora, callbacks=[callback],
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"))
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(steps: int) -> dict:
    """Both sides step in turn; the first step of each is for warming up."""
    import minirl
    from transformers import TrainerCallback

    ours, theirs = [], []

    class Turn(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            theirs.append(time.perf_counter() - self.start)
            ours.append(minirl.train_step(state.global_step, run)[1])

    with (tempfile.TemporaryDirectory() as folder,
          project(sampler="uniform", n=SAMPLES, batch_prompts=PROMPTS, warmup_steps=1) as run):
        trainer = their_trainer(run, steps + 1, folder, Turn())
        trainer.train()
    logged = [x["completions/mean_length"] for x in trainer.state.log_history
              if "completions/mean_length" in x]
    own, theirs = [step["seconds"] for step in ours[1:]], theirs[1:]
    return dict(
        name="tiny", ratio=middle_ratio(theirs, own), samples=PROMPTS * SAMPLES,
        ours=dict(seconds=median(own),
                  response_length=median(step["response_length"] for step in ours)),
        trl=dict(seconds=median(theirs), response_length=median(logged)),
        raw=dict(ours=own, trl=theirs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="of either side (default: 20)")
    parser.add_argument("--out", default="", help="folder of the result (default: bench/results)")
    args = parser.parse_args()
    if not installed("trl"):
        raise SystemExit("TRL is not installed, so there is nothing to compare with: pip install "
                         "--no-deps trl==1.16.0")
    found = measure(args.steps)
    others = [cell for cell in load("trl").get("cells", []) if cell["name"] != found["name"]]
    save("trl", dict(cells=[found, *others]), args.out)
    for side in ("ours", "trl"):
        x = found[side]
        print(f"{side:5}{x['seconds']:6.2f} s a step, responses of {x['response_length']:.0f} "
              "tokens")
    print(f"ours is {found['ratio']:.1f} times as fast")


if __name__ == "__main__":
    main()
