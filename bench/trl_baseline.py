"""Plain GRPO, ours against TRL's GRPOTrainer: seconds per step, and to the same held-out accuracy.

    .venv/bin/pip install --no-deps trl==1.16.0     # only this script needs it; not part of the
                                                    project's requirements
    .venv/bin/python bench/trl_baseline.py          # about six minutes on one core

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

In the last two the weights are made up (common.set_lengths) and stay as they are (learning rate
1e-12), so that lengths stay the same on both sides; a response is right if its number of characters
is even.
"""
import argparse
import contextlib
import sys
import tempfile
import time
from types import SimpleNamespace

from common import load, median, middle_ratio, project, random_model, save, set_lengths

SMALL = dict(hidden_size=128, intermediate_size=288, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2)
LARGE = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
             num_key_value_heads=4)
CELLS = {
    "tiny": dict(target=1.3, steps=20, eval_every=4, prompts=24, max_tokens=64),
    "long tail": dict(target=2.0, steps=5, prompts=8, max_tokens=512, size=SMALL,
                      lengths=[(0.7, 15), (0.2, 60), (0.1, 300)]),
    "25 M": dict(target=2.0, steps=5, prompts=8, max_tokens=64, size=LARGE, lengths=[(1.0, 30)]),
}
SAMPLES = 8  # per prompt


class Even:
    """A grader for models that cannot do sums: right is an even number of characters.
    Costs nothing."""

    def __init__(self):
        self.verdicts = {}

    def submit(self, key, gold, text) -> None:
        self.verdicts[key], = self.grade([(gold, text)])

    def result(self, key):
        return self.verdicts.pop(key)

    def grade(self, pairs):
        return [SimpleNamespace(reward=float(len(text) % 2 == 0), status="correct"
                                if len(text) % 2 == 0 else "wrong")
                for _, text in pairs]


@contextlib.contextmanager
def our_side(cell: dict, folder: str):
    """A parts.run.Run for plain GRPO of this cell."""
    import torch

    model = "tiny"
    if "size" in cell:
        model = folder
        random_model(cell["size"] | dict(tie_word_embeddings=False), folder)
        set_lengths(folder, cell["lengths"])
    settings = dict(sampler="uniform", n=SAMPLES, batch_prompts=cell["prompts"],
                    max_tokens=cell["max_tokens"],
                    max_prompt_tokens=256, lr=1e-12 if "size" in cell else 1e-3, warmup_steps=1,
                    micro_tokens=4096)
    # an adapter that stays next to 0 has denormal gradients, which slow either side down
    torch.set_flush_denormal(True)
    with project(model, **settings) as run:
        if "size" in cell:
            run.grader = Even()
        yield run


def their_trainer(run, cell: dict, model: str, folder: str, on_step, **options):
    """A GRPOTrainer for the same work, which calls `on_step(step)` after each of its steps."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Turn(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            on_step(state.global_step)

    def reward(prompts, completions, answer, **_):
        return [verdict.reward for verdict in run.grader.grade(list(zip(answer, completions)))]

    config = run.config
    samples = cell["prompts"] * SAMPLES
    settings = GRPOConfig(**dict(
        output_dir=folder, max_steps=cell["steps"] + 1, per_device_train_batch_size=samples,
        num_generations=SAMPLES,
        max_completion_length=config.max_tokens, temperature=1.0, beta=0.0, loss_type="dr_grpo",
        scale_rewards="none",
        epsilon=config.eps_low, epsilon_high=config.eps_high, learning_rate=config.lr,
        lr_scheduler_type="constant",
        max_grad_norm=config.max_grad_norm, weight_decay=0.0, use_cpu=True, bf16=False, fp16=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, seed=0)
        | options)
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear",
                      task_type="CAUSAL_LM")
    problems = run.stream.problems[:cell["prompts"] * (cell["steps"] + 1)]
    data = Dataset.from_list([dict(prompt=p.prompt, answer=p.answer) for p in problems])
    trainer = GRPOTrainer(model=AutoModelForCausalLM.from_pretrained(model), reward_funcs=reward,
                          args=settings,
                       train_dataset=data, processing_class=AutoTokenizer.from_pretrained(
                           model, padding_side="left"),
                       peft_config=lora, callbacks=[Turn()])
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(name: str, cell: dict, **options) -> dict:
    """Both sides step in turn; the first step of each is for warming up."""
    import minirl
    from parts.models import fetch_model

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as rest, our_side(
        cell, folder) as run:
        ours, theirs, generating, curve = [], [], [], []
        clock = SimpleNamespace(start=0.0, generating=0.0)

        def evaluate_both(step):
            curve.append(dict(step=step, ours=accuracy(run, run.policy),
                              trl=accuracy(run, trainer.model),
                              ours_seconds=sum(m["seconds"] for m in ours),
                              trl_seconds=sum(theirs)))
            run.engine.sync(run.policy)

        def turn(step):
            theirs.append(time.perf_counter() - clock.start)
            generating.append(clock.generating)
            ours.append(minirl.train_step(step, run)[1])
            if "eval_every" in cell and step % cell["eval_every"] == 0:
                evaluate_both(step)
            clock.start, clock.generating = time.perf_counter(), 0.0

        trainer = their_trainer(run, cell, folder if "size" in cell else fetch_model("tiny", 0),
                                rest, turn, **options)
        generate = trainer._generate_single_turn

        def timed(*args, **kwargs):
            start = time.perf_counter()
            found = generate(*args, **kwargs)
            clock.generating += time.perf_counter() - start
            return found

        trainer._generate_single_turn = timed
        if "eval_every" in cell:
            evaluate_both(0)
        clock.start = time.perf_counter()
        trainer.train()
    own = [m["seconds"] for m in ours[1:]]
    logged = [x for x in trainer.state.log_history if "completions/mean_length" in x]
    result = dict(
        name=name, target=cell["target"], ratio=middle_ratio(theirs[1:], own),
        samples=cell["prompts"] * SAMPLES,
        ours=dict(seconds=median(own), generating=median(m["seconds_sample"] for m in ours[1:]),
                  training=median(m["seconds_train"] for m in ours[1:]),
                  response_length=median(m["response_length"] for m in ours)),
        trl=dict(seconds=median(theirs[1:]), generating=median(generating[1:]),
                 response_length=median(x["completions/mean_length"] for x in logged)),
        raw=dict(ours=own, trl=theirs[1:]))
    return result | (dict(curve=curve) if curve else {}) | (reached(curve)
                                                            if len(curve) > 4 else {})


def accuracy(run, policy) -> float:
    """Held-out avg@8 of either side's adapter, by our engine and grader;
    not counted in anyone's time."""
    from eval import evaluate, report

    run.engine.sync(policy)
    return report(evaluate(run.engine, run.grader, run.held_out, 8, run.config.max_tokens))["avg"]


def reached(curve: list[dict]) -> dict:
    """Seconds of training until each side had made 80 % of the progress that the weaker of the two
    made in the end.

    A single evaluation is off by a point or two, so an accuracy here is the mean of three in a row.
    Before the end it is close to flat, where a point of accuracy is many steps: at 80 % it still
    climbs, and the time is better defined.
    """
    sides = {side: smooth([point[f"{side}_seconds"] for point in curve],
                          [point[side] for point in curve])
             for side in ("ours", "trl")}
    start = (curve[0]["ours"] + curve[0]["trl"]) / 2  # the same model
    level = start + 0.8 * (min(points[-1][1] for points in sides.values()) - start)
    return dict(level=level,
                seconds_to_level={side: first_at(points, level) for side, points in sides.items()})


def smooth(seconds: list[float], values: list[float]) -> list[tuple]:
    """[(seconds, mean of the value, the one before and the one after)]; the first as it is."""
    means = [sum(values[i - 1:i + 2]) / 3 for i in range(1, len(values) - 1)]
    return [(seconds[0], values[0]), *zip(seconds[1:], means)]


def first_at(points: list[tuple], level: float) -> float:
    """Seconds at which the line through `points` first reaches `level`."""
    for (t0, a0), (t1, a1) in zip(points, points[1:]):
        if a1 >= level:
            return t0 + (t1 - t0) * max(level - a0, 0) / max(a1 - a0, 1e-9)
    return points[-1][0]


def show(cell: dict) -> None:
    ours, trl = cell["ours"], cell["trl"]
    print(f"{cell['name']:10} {cell['samples']} samples of {ours['response_length']:.0f} tokens "
          "(TRL: "
          f"{trl['response_length']:.0f})")
    print(f"{'':10} ours {ours['seconds']:.2f} s (sampling {ours['generating']:.2f})   TRL "
          f"{trl['seconds']:.2f} s (sampling "
          f"{trl['generating']:.2f})   TRL/ours {cell['ratio']:.2f}, target {cell['target']}")
    gained = trl["seconds"] - ours["seconds"]
    print(f"{'':10} share of the difference that is sampling: "
          f"{(trl['generating'] - ours['generating']) / gained:.0%}")
    if "level" in cell:
        taken = cell["seconds_to_level"]
        print(f"{'':10} to {cell['level']:.0%} held-out: ours {taken['ours']:.0f} s, TRL "
              f"{taken['trl']:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Plain GRPO: seconds per step of this project and of TRL.")
    parser.add_argument("--only", nargs="*", default=CELLS, choices=CELLS,
                        help="keep the others' results")
    parser.add_argument("--steps", type=int, default=0,
                        help="steps of every cell (default: as many as it needs)")
    parser.add_argument("--out", default="", help="folder of the result (default: bench/results)")
    args = parser.parse_args()
    try:
        import trl  # noqa: F401
    except ImportError:
        sys.exit("TRL is not installed, so there is nothing to compare with: pip install "
                 "--no-deps trl==1.16.0")
    cells = {cell["name"]: cell for cell in load("trl").get("cells", [])}
    for name in args.only:
        cells[name] = measure(name, CELLS[name] | (dict(steps=args.steps) if args.steps else {}))
        show(cells[name])
        save("trl", dict(cells=[cells[name] for name in CELLS if name in cells]), args.out)


if __name__ == "__main__":
    main()
