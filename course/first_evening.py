"""The main idea of the project in one short program, for a first evening.

    .venv/bin/python course/first_evening.py      # after make setup: from 19 to 41 % in two minutes
    .venv/bin/python course/first_evening.py 40   # 40 steps instead of 20

This sketch of minirl.py has no engine, no flags and no files, so you can read it from top to bottom
and write it again afterwards. It samples answers with Hugging Face's `generate`, in rounds, until a
prompt has right and wrong answers (Reinforce-Ada), and takes one policy-gradient step per batch.
The model that samples is also the model that is trained, so MiniRL's two corrections, the mask and
the importance weight, are 1 here. The end says what is missing and where the project has it. `make
demo` gets further, with twice the prompts per step, and with an adapter that has ten times the
learning rate.
"""
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a small model is slower with more threads
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from models.problems import chains  # "7+5-4=?", with the answer "8"

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
PROMPTS = 12  # per step
M, N, n = 8, 4, 4  # answers per round, largest number of rounds, kept answers per prompt
MAX_TOKENS = 48

torch.manual_seed(0)
folder = Path(__file__).resolve().parent.parent / "models/tiny"
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)
train, held_out = chains("train", PROMPTS * STEPS), chains("test", 100)


def ids_of(problem: dict) -> list[int]:
    return tokenizer.encode(f"<|user|>{problem['problem']}<|assistant|>", add_special_tokens=False)


def draw(problem: dict, count: int, luck: bool = True) -> list[list[int]]:
    """`count` answers as token ids with the end token. Without luck, decoding is greedy."""
    prompt = torch.tensor([ids_of(problem)] * count)  # [count, prompt]
    whole = dict(temperature=1.0, top_k=0, top_p=1.0) if luck else {}  # the whole distribution
    drawn = policy.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=luck,
                            max_new_tokens=MAX_TOKENS, **whole)
    answers = drawn[:, prompt.shape[1]:].tolist()  # [count, longest answer]: padded at the end
    end = tokenizer.eos_token_id
    return [ids[:ids.index(end) + 1] if end in ids else ids for ids in answers]


def reward(problem: dict, answer: list[int]) -> float:
    """1 if a box holds the right number. (The project takes the last box, and math-verify.)"""
    return float(f"\\boxed{{{problem['answer']}}}" in tokenizer.decode(answer))


def log_probs(problem: dict, answer: list[int]) -> torch.Tensor:
    """log pi of each token of the answer, given all before it: [T], with gradient."""
    prompt = ids_of(problem)
    logits = policy(torch.tensor([prompt + answer])).logits[0]  # [prompt + T, vocabulary]
    before = logits[len(prompt) - 1:-1]  # [T, vocabulary]: the prediction for each token
    return before.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


example = held_out[2]
print(f"{example['problem']}  before: {tokenizer.decode(draw(example, 1, luck=False)[0])!r}")
for step in range(1, STEPS + 1):
    kept = []  # (problem, answer, advantage)
    first_round = []  # rewards; very hard and very easy problems have more rounds
    for problem in train[(step - 1) * PROMPTS:step * PROMPTS]:
        # Sample in rounds. The exit test uses the whole pool, after complete rounds only.
        pool = []  # (answer, reward)
        for _ in range(N):
            pool += [(answer, reward(problem, answer)) for answer in draw(problem, M)]
            first_round += [r for _, r in pool] if len(pool) == M else []
            right = [pair for pair in pool if pair[1] == 1]
            wrong = [pair for pair in pool if pair[1] == 0]
            if len(right) >= n // 2 and len(wrong) >= n - n // 2:
                break
        # Keep n, half of them right, or more of one kind if the other has too few. By this choice
        # half are right, so the baseline is the mean of the whole pool, which was not chosen.
        k_right = min(n // 2, len(right))
        k_wrong = min(n - k_right, len(wrong))
        chosen = right[:n - k_wrong] + wrong[:k_wrong]
        baseline = sum(r for _, r in pool) / len(pool)
        kept += [(problem, answer, r - baseline) for answer, r in chosen]
        if step in (1, STEPS) and len(kept) == n:  # show the first prompt's answers
            print(f"{problem['problem']}  {len(right)} of {len(pool)} answers are right. Kept are:")
            for answer, r in chosen:
                text = tokenizer.decode(answer)
                print(f"   advantage {r - baseline:+.3f}, reward {r:.0f}: {text!r}")

    # The gradient of -(1 / (answers * MAX_TOKENS)) sum A log pi, where each token has its answer's
    # advantage A. Answers with advantage 0 have no gradient, but count in the divisor. The loss
    # need not fall, because it does not measure progress.
    loss = 0.0
    for problem, answer, advantage in kept:
        if advantage:
            term = -advantage * log_probs(problem, answer).sum() / (len(kept) * MAX_TOKENS)
            term.backward()
            loss += term.item()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    silent = sum(not advantage for *_, advantage in kept) / len(kept)
    mean = sum(first_round) / len(first_round)
    print(f"step {step:3}: right in the first round {mean:.0%}, loss {loss:+.4f}, "
          f"kept answers without gradient {silent:.0%}", flush=True)

    if step in (1, STEPS // 2, STEPS):
        rate = sum(reward(p, draw(p, 1)[0]) for p in held_out) / len(held_out)
        print(f"          held-out problems answered right: {rate:.0%}", flush=True)

print(f"{example['problem']}  after: {tokenizer.decode(draw(example, 1, luck=False)[0])!r}")

# Change one line, predict, run again. With seed 0, of 20 steps:         right   without gradient
#   as it is                                                             41 %          4 %
#   baseline = 0: wrong answers teach nothing                            53 %         54 %
#   baseline = the mean of the kept: +-1/2 for two right, two wrong      43 %          5 %
#   N = 1: no second round                                               39 %         23 %
#   no len(kept) in the loss: AdamW divides it out, but the norm is cut  42 %          4 %
# 100 answers cannot distinguish these accuracies, but the shares without gradient differ.

# What is missing here                                 and where it is
#   all prompts and rounds at the same time             ada_sampler.py: Collector; parts/engine.py
#   other rules of sampling, budgets                    ada_sampler.py: RULES
#   several optimizer steps per batch, so a mask        minirl.py: objective, add_old_logprobs
#   engine and trainer that differ: importance weights  minirl.py: importance_weight
#   an adapter, where here all weights are trained      parts/policy.py: load_policy
#   many rows at once, and no [T, vocabulary] tensor    parts/logprobs.py
#   answers that are right in another form              rewards.py
#   mixtures of experts                                 parts/routing_replay.py
#   intervals of the accuracy                           eval.py
#   a run that can be killed, resumed and viewed        parts/run_folder.py, explore.py

# Read course/second_evening.py next, which has the engine, the mask, the weight and the adapter in
# about 200 lines. Then read minirl.py.
