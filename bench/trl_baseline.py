"""Plain GRPO, ours against TRL's GRPOTrainer: seconds per step.

    .venv/bin/pip install --no-deps trl==1.16.0     # only for this script and recipes/trl_ada.py
    .venv/bin/python bench/trl_baseline.py          # about five minutes on one core

Both sides take turns in one process, a step each: same model folder, prompts, number of samples,
length limit, LoRA (rank, alpha, all linear layers), optimizer, and the same mathematics: reward
minus the group's mean, summed over tokens, divided by a constant (TRL: loss_type="dr_grpo",
scale_rewards="none"). TRL is given our grader, no gradient checkpointing, and its fastest way of
generating that runs on a CPU: Hugging Face `generate` on one static batch. (Tried with vLLM 0.32:
its continuous batching took ten times as long, and its colocated vLLM fails on a CPU when it loads
the weights.) Three cells:

    tiny        the built-in model at its default lengths
    long tail   a model of that size with responses of 18 tokens at the median and up to 512
    25 M        a model of 25 M parameters, up to 64 tokens

In the last two the weights are made up (`set_lengths`) and stay as they are (learning rate 1e-12),
so that lengths stay the same on both sides; a response is right if its number of characters is
even.
"""
import argparse
import contextlib
import math
import tempfile
import time
from types import SimpleNamespace

from common import installed, load, median, middle_ratio, project, random_model, save

SMALL = dict(hidden_size=128, intermediate_size=288, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2)
LARGE = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
             num_key_value_heads=4)
CELLS = {  # lengths: [(share of the responses, mean tokens)]
    "tiny": dict(target=1.3, steps=20, prompts=24, max_tokens=64),
    "long tail": dict(target=2.0, steps=5, prompts=8, max_tokens=512, size=SMALL,
                      lengths=[(0.7, 15), (0.2, 60), (0.1, 300)]),
    "25 M": dict(target=2.0, steps=5, prompts=8, max_tokens=64, size=LARGE, lengths=[(1.0, 30)]),
}
SAMPLES = 8  # per prompt


# ----------------------------------------------------------------------------- models without sense
def set_lengths(folder: str, lengths: list[tuple]) -> None:
    """Rewrite a random model so that its responses have the lengths [(share of responses, mean
    length), ...].

    Its layers pass their input on unchanged, at the full cost of computing it, so the next token
    depends on the last one only. A response's first token puts it into a class, in which every
    token is followed by the end with probability 1/mean.
    """
    import torch
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder)
    assert not model.config.tie_word_embeddings, "input and output weights must be free"
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    size, count = 20, len(lengths)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding.zero_()
        embedding[:, count] = 1  # a token of the prompt
        head.fill_(-20)
        for c, (share, mean) in enumerate(lengths):
            own = slice(20 + size * c, 20 + size * (c + 1))
            embedding[own] = torch.eye(embedding.shape[1])[c]
            head[own, count] = math.log(share / size)
            head[own, c] = math.log((1 - 1 / mean) / size)
            head[model.config.eos_token_id, c] = math.log(1 / mean)
        head /= embedding.shape[1] ** 0.5  # the final norm makes a one of length 1 this long
    model.save_pretrained(folder)


class Even:
    """A grader that costs nothing, for models that cannot do sums: an even number of characters is
    right."""

    def __init__(self):
        self.verdicts = {}

    def submit(self, key, problem, rollout) -> None:
        self.verdicts[key], = self.grade([(problem.judged_by, rollout.text)])

    def result(self, key):
        return self.verdicts.pop(key)

    def grade(self, pairs):
        even = [len(text) % 2 == 0 for _, text in pairs]
        return [SimpleNamespace(reward=float(right), status="correct" if right else "wrong")
                for right in even]


# ---------------------------------------------------------------------------------- the two sides
@contextlib.contextmanager
def our_side(cell: dict, folder: str):
    """A parts.run.Run for plain GRPO of this cell."""
    import torch

    made_up = "size" in cell
    if made_up:
        random_model(cell["size"] | dict(tie_word_embeddings=False), folder)
        set_lengths(folder, cell["lengths"])
    settings = dict(sampler="uniform", n=SAMPLES, batch_prompts=cell["prompts"],
                    max_tokens=cell["max_tokens"], max_prompt_tokens=256,
                    lr=1e-12 if made_up else 1e-3, warmup_steps=1, micro_tokens=4096)
    # an adapter that stays next to 0 has denormal gradients, which slow either side down
    torch.set_flush_denormal(True)
    with project(folder if made_up else "tiny", **settings) as run:
        if made_up:
            run.grader = Even()
        yield run


def their_trainer(run, cell: dict, model: str, folder: str, callback):
    """A GRPOTrainer for the same work."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    def reward(prompts, completions, answer, **_):
        return [verdict.reward for verdict in run.grader.grade(list(zip(answer, completions)))]

    config = run.config
    settings = GRPOConfig(
        output_dir=folder, max_steps=cell["steps"] + 1, num_generations=SAMPLES, temperature=1.0,
        per_device_train_batch_size=cell["prompts"] * SAMPLES, beta=0.0, loss_type="dr_grpo",
        scale_rewards="none", max_completion_length=config.max_tokens, epsilon=config.eps_low,
        epsilon_high=config.eps_high, learning_rate=config.lr, lr_scheduler_type="constant",
        max_grad_norm=config.max_grad_norm, weight_decay=0.0, use_cpu=True, bf16=False, fp16=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, seed=0)
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear",
                      task_type="CAUSAL_LM")
    problems = run.stream.problems[:cell["prompts"] * (cell["steps"] + 1)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model), reward_funcs=reward, args=settings,
        train_dataset=Dataset.from_list([dict(prompt=p.prompt, answer=p.answer) for p in problems]),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        peft_config=lora, callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    return trainer


def take_turns(run, cell: dict, model: str, folder: str) -> tuple[list, list, list]:
    """Train both, a step each in turn: (metrics of our steps, seconds of TRL's, what TRL logs)."""
    import minirl
    from transformers import TrainerCallback

    ours, theirs = [], []

    class Turn(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            theirs.append(time.perf_counter() - self.start)
            ours.append(minirl.train_step(state.global_step, run)[1])

    trainer = their_trainer(run, cell, model, folder, Turn())
    trainer.train()
    logged = [x for x in trainer.state.log_history if "completions/mean_length" in x]
    return ours, theirs, logged


def measure(name: str, cell: dict) -> dict:
    """The first step of each side is for warming up."""
    from parts.models import fetch_model

    with (tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as rest,
          our_side(cell, folder) as run):
        model = folder if "size" in cell else fetch_model("tiny", 0)
        ours, theirs, logged = take_turns(run, cell, model, rest)
    own, theirs = [m["seconds"] for m in ours[1:]], theirs[1:]
    return dict(
        name=name, target=cell["target"], ratio=middle_ratio(theirs, own),
        samples=cell["prompts"] * SAMPLES,
        ours=dict(seconds=median(own), generating=median(m["seconds_sample"] for m in ours[1:]),
                  response_length=median(m["response_length"] for m in ours)),
        trl=dict(seconds=median(theirs),
                 response_length=median(x["completions/mean_length"] for x in logged)),
        raw=dict(ours=own, trl=theirs))


def show(cell: dict) -> None:
    ours, trl = cell["ours"], cell["trl"]
    print(f"""{cell['name']}: {cell['samples']} samples
    ours {ours['seconds']:.2f} s, of {ours['response_length']:.0f} tokens each
    TRL {trl['seconds']:.2f} s, of {trl['response_length']:.0f} tokens each
    TRL/ours {cell['ratio']:.2f}, target {cell['target']}""")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=CELLS, choices=CELLS,
                        help="keep the others' results")
    parser.add_argument("--steps", type=int, default=0,
                        help="steps of every cell (default: as many as it needs)")
    parser.add_argument("--out", default="", help="folder of the result (default: bench/results)")
    args = parser.parse_args()
    if not installed("trl"):
        raise SystemExit("TRL is not installed, so there is nothing to compare with: pip install "
                         "--no-deps trl==1.16.0")
    cells = {cell["name"]: cell for cell in load("trl").get("cells", [])}
    for name in args.only:
        cells[name] = measure(name, CELLS[name] | (dict(steps=args.steps) if args.steps else {}))
        show(cells[name])
        save("trl", dict(cells=[cells[name] for name in CELLS if name in cells]), args.out)


if __name__ == "__main__":
    main()
