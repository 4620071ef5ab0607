"""A step of minirl.py beside one of TRL's GRPOTrainer with Hugging Face's generation, on a CPU.

    python bench/against_trl.py                                  # the built-in model, a few minutes
    OMP_NUM_THREADS=2 python bench/against_trl.py --model SmolLM2-135M-Instruct --steps 3

Both have the same model in float32, prompts, samples a prompt, lengths, LoRA, GRPO loss and grader,
and take turns in one process; the learning rate is next to 0, so that they go on drawing from the
same policy. The first pair does not count. TRL has what is quickest for it on a CPU: nothing is
computed twice to save memory, and all of a batch is generated and trained on at once, or
--micro-rows answers where no more fit (fewer were slower). A page of bench/results is written.
"""
import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from measure import machine, project
from store import RESULTS, markdown
from study import positive

GRPO = ["--sampler", "uniform", "--n", "8", "--objective", "grpo", "--lr", "1e-9"]


def take_turns(run, trainer) -> dict[str, list[tuple]]:
    """Seconds of sampling, of the update and of the new weights in the engine, and tokens that
    were drawn, for each step of each side."""
    import minirl
    from transformers import TrainerCallback

    found = {"minirl.py": [], "TRL": []}
    score = trainer._generate_and_score_completions

    def timed(inputs):
        start = time.perf_counter()
        output = score(inputs)
        trainer.sampled = time.perf_counter() - start
        trainer.drawn = int(output["completion_mask"].sum())
        return output

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            whole = time.perf_counter() - self.start
            found["TRL"].append((trainer.sampled, whole - trainer.sampled, 0.0, trainer.drawn))
            _, ours = minirl.train_step(state.global_step, run)
            found["minirl.py"].append((ours["seconds_sample"], ours["seconds_train"],
                                       ours["seconds_sync"], ours["tokens"]))

    trainer._generate_and_score_completions = timed
    trainer.add_callback(Turns())
    trainer.train()
    return {side: rows[1:] for side, rows in found.items()}


def trl_trainer(run, path: str, folder: str, steps: int, micro_rows: int):
    from recipes import trl_engine  # noqa: F401  refuses another version of TRL
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    c = run.config
    rows = c.batch_prompts * c.n
    micro = min(micro_rows, rows)
    problems = run.stream.take(c.batch_prompts * (steps + 1))
    run.stream.cursor = 0  # both sides begin with the first problem

    def reward(prompts, completions, gold, **_):
        verdicts = run.grader.grade(list(zip(gold, completions)))
        return [verdict.reward for verdict in verdicts]

    settings = GRPOConfig(
        output_dir=folder, max_steps=steps + 1, learning_rate=c.lr, num_generations=c.n,
        per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro,
        max_completion_length=c.max_tokens, temperature=c.temperature, loss_type="grpo",
        epsilon=c.eps_low, epsilon_high=c.eps_high, shuffle_dataset=False, use_cpu=True,
        bf16=False, gradient_checkpointing=False, optim="adamw_torch", save_strategy="no",
        report_to="none", model_init_kwargs=dict(dtype="float32"), disable_tqdm=True)
    lora = LoraConfig(r=c.lora_rank, lora_alpha=c.lora_alpha, task_type="CAUSAL_LM",
                      target_modules="all-linear")
    return GRPOTrainer(
        path, reward, args=settings, peft_config=lora, train_dataset=Dataset.from_list(
            [dict(prompt=problem.prompt, gold=problem.answer) for problem in problems]))


def table(found: dict[str, list[tuple]]) -> str:
    lines = [["", "a step, s", "sampling, s", "update, s", "new weights and probe, s",
              "drawn tokens", "sampling, tokens/s", "whole step, tokens/s"]]
    for side, rows in found.items():
        parts = [median(column) for column in zip(*rows)]
        whole = median(sum(row[:3]) for row in rows)
        lines.append([side, f"{whole:.2f}", *(f"{part:.2f}" for part in parts[:3]),
                      f"{parts[3]:,.0f}", f"{median(row[3] / row[0] for row in rows):,.0f}",
                      f"{median(row[3] / sum(row[:3]) for row in rows):,.0f}"])
    ratio = median(sum(b[:3]) * a[3] / sum(a[:3]) / b[3]
                   for a, b in zip(found["minirl.py"], found["TRL"]))
    return f"{markdown(lines)}\nTokens a second of whole steps, ratio of neighbours: {ratio:.2f}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=positive, default=5)
    parser.add_argument("--micro-rows", type=positive, default=256,
                        help="answers in a pass of TRL's, if no more fit (default: 256)")
    args = parser.parse_args()
    from parts.models import fetch_model

    with project("--model", args.model, *GRPO) as run, tempfile.TemporaryDirectory() as folder:
        path = fetch_model(args.model, run.config.max_prompt_tokens + run.config.max_tokens)
        trainer = trl_trainer(run, path, folder, args.steps, args.micro_rows)
        c, found = run.config, take_turns(run, trainer)
    micro = trainer.args.per_device_train_batch_size
    text = (f"{table(found)}\n{c.batch_prompts} prompts, {c.n} samples each, at most {c.max_tokens}"
            f" tokens; {args.steps} steps; TRL {micro} answers a pass; {machine()}\n")
    (RESULTS / f"trl-{Path(args.model).name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
