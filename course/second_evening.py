"""Both papers in one file, with the real engine. Read course/first_evening.py before this file.

    python course/second_evening.py       # a toy model on a CPU: from 21 to 57 % in three minutes
    python course/second_evening.py Qwen/Qwen2.5-Math-1.5B train.jsonl   # one GPU (not tested)

Each line of train.jsonl is {"problem": ..., "answer": ...}. In one step, vLLM answers each prompt
in rounds, until the prompt has right and wrong answers (Reinforce-Ada, arXiv 2510.04996).
math-verify grades them, a LoRA adapter takes a MiniRL step (arXiv 2512.01374, Eq. 7), and the
engine gets the adapter. A real model on a CPU is slow, for SmolLM2 writes 38 tokens per second.

Three policies:  mu        the engine, which sampled the tokens
                 pi_old    the trainer with the same weights; it differs from mu by rounding
                 pi_theta  the trainer now; it is pi_old until the first optimizer step of a batch
A name with the suffix _T has one entry per token of one answer.
"""
import json
import logging
import os
import random
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Libraries read these on import. vLLM runs in this process, and on a CPU it takes 1 GiB.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
               "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "TORCH_CPP_LOG_LEVEL": "ERROR"}
logging.disable(logging.WARNING)  # of all libraries, so that only this file's lines are printed
warnings.simplefilter("ignore")
import torch

GPU = torch.cuda.is_available()
os.environ["TORCHDYNAMO_DISABLE"] = "0" if GPU else "1"  # on a CPU nothing is compiled
from math_verify import LatexExtractionConfig, parse, verify
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, utils
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from ada_sampler import SamplerConfig, collect, keep
from models.problems import chains  # "7+5-4=?", with the answer "8"

utils.logging.disable_progress_bar()
TOY = len(sys.argv) == 1
MODEL, FILE = (str(ROOT / "models/tiny"), "") if TOY else sys.argv[1:]
DTYPE, DEVICE = (torch.bfloat16, "cuda") if GPU else (torch.float32, "cpu")
STEPS, PROMPTS = (20, 24) if TOY else (200, 32)  # PROMPTS per step
MAX_PROMPT, MAX_TOKENS = (64, 48) if TOY else (1024, 1000)  # tokens of a prompt, of an answer
RATE = 1e-3 if TOY else 2e-5  # learning rate
MINI_BATCHES = 1  # optimizer steps per batch; the mask (see `objective`) acts from the second on
EPS_LOW, EPS_HIGH, CAP = 0.2, 0.27, 5.0  # MiniRL's bounds of the mask and of the weight
ROUNDS = SamplerConfig(sampler="ada-balance", n=4, M=8, N=4)  # at most N rounds of M; keep n


class Engine:
    """vLLM as `collect` uses it. A new answer can begin between any two steps of the others."""

    def __init__(self):
        self.llm = LLM(MODEL, dtype=DTYPE, max_model_len=MAX_PROMPT + MAX_TOKENS, enable_lora=True,
                       gpu_memory_utilization=0.45,  # the rest of the memory is the trainer's
                       enforce_eager=not GPU, async_scheduling=False, use_tqdm_on_load=False,
                       seed=0)  # seeds torch, too
        self.tokenizer = (PreTrainedTokenizerFast if TOY else AutoTokenizer).from_pretrained(MODEL)
        self.count, self.keys = 0, {}
        # vLLM stops at the model's own end token. In a base model the chat template has another.
        end = self.tokenizer.get_vocab().get("<|im_end|>", self.tokenizer.eos_token_id)
        self.sampling = SamplingParams(
            temperature=1.0,  # and no top-p: mu is the whole distribution, as pi in `log_probs`
            logprobs=0,  # log mu of the sampled token, and of no other token
            max_tokens=MAX_TOKENS, stop_token_ids=[end])

    def submit(self, key, problem: dict) -> None:
        turns = [dict(role="system", content="Put your final answer within \\boxed{}."),
                 dict(role="user", content=problem["problem"])]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.count += 1
        self.keys[str(self.count)] = key
        self.llm.llm_engine.add_request(
            str(self.count), dict(prompt_token_ids=ids), self.sampling, lora_request=self.adapter)

    def step(self) -> list:
        """Write one token of each answer. Returns (key, answer) of those that end with it."""
        ended = []
        for request in self.llm.llm_engine.step():
            if request.finished:
                out = request.outputs[0]
                ids = list(out.token_ids)  # what the trainer reads: no text is tokenized again
                mu = [choice[i].logprob for choice, i in zip(out.logprobs, ids)]  # [T], log mu
                answer = SimpleNamespace(prompt_ids=request.prompt_token_ids, token_ids=ids, mu=mu,
                                         text=self.tokenizer.decode(ids, skip_special_tokens=True))
                ended.append((self.keys.pop(request.request_id), answer))
        return ended

    @property
    def busy(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def sync(self, policy) -> None:
        self.count += 1
        self.folder = tempfile.TemporaryDirectory()  # the one before is removed
        policy.save_pretrained(self.folder.name, save_embedding_layers=False)  # "auto" asks the hub
        # vLLM caches weights and prompts by the adapter's name and number, so both are new.
        self.adapter = LoRARequest(f"adapter-{self.count}", self.count, self.folder.name)


class Grader:
    """math-verify without limits. An answer can make it hang, so parts/grader.py sets limits."""

    def __init__(self):
        self.verdicts = {}

    def submit(self, key, problem: dict, answer) -> None:
        """Reward 1 if the last box holds the right answer in some form. Only a box counts."""
        _, box, rest = answer.text.rpartition("\\boxed{")
        only_boxes = [LatexExtractionConfig(boxed_match_priority=0)]
        given = parse(box + rest, only_boxes, fallback_mode="no_fallback") if box else []
        right = verify(parse(f"\\boxed{{{problem['answer']}}}"), given)
        self.verdicts[key] = SimpleNamespace(reward=float(right), status="graded")

    def result(self, key):
        return self.verdicts.pop(key)


def log_probs(policy, answer) -> torch.Tensor:
    """log pi of each token of the answer, given all tokens before it: [T], with gradient."""
    ids = torch.tensor([answer.prompt_ids + answer.token_ids], device=DEVICE)
    # The logits at a token predict the next one, so those of the last token are not needed.
    logits = policy(ids, logits_to_keep=len(answer.token_ids) + 1).logits[0, :-1]  # [T, vocab]
    return logits.float().log_softmax(-1).gather(1, ids[0, len(answer.prompt_ids):, None])[:, 0]


def objective(lp_T, old_T, mu_T, A: float) -> torch.Tensor:
    """Eq. 7 per token: M sg[min(pi_theta/mu, CAP)] A log pi_theta, where sg[] has no gradient."""
    with torch.no_grad():
        # The tokens are from mu, not from pi_theta: engine and trainer differ (pi_old/mu), and the
        # policy has moved since (pi_theta/pi_old). The weight corrects for both.
        weight_T = (lp_T - mu_T).exp().clamp(max=CAP)
        # The mask M drops a token that has moved far enough in the direction of its advantage A.
        # A token that has moved the other way keeps its gradient, or it could never come back.
        ratio_T = (lp_T - old_T).exp()
        mask_T = ratio_T <= 1 + EPS_HIGH if A > 0 else ratio_T >= 1 - EPS_LOW
    return mask_T * weight_T * A * lp_T


def update(policy, optimizer, kept: list[list]) -> float:
    """Optimizer steps on `kept`, which has the list of (answer, advantage A) of each prompt.
    Returns the largest |log pi_old - log mu| of a token."""
    batches = [[(answer, A) for prompt in kept[i::MINI_BATCHES] for answer, A in prompt if A]
               for i in range(MINI_BATCHES)]
    with torch.no_grad():  # before the first optimizer step
        old = [[log_probs(policy, answer) for answer, _ in batch] for batch in batches]
    # MiniRL sums over tokens and averages over answers. Answers with A = 0 have no gradient, but
    # they count, so a batch with little to learn from makes a small step. The constant MAX_TOKENS
    # keeps the gradient below the norm 1, above which it is scaled down.
    divisor = sum(map(len, kept)) / MINI_BATCHES * MAX_TOKENS
    gap = 0.0
    for batch, old_of_batch in zip(batches, old):
        for (answer, A), old_T in zip(batch, old_of_batch):
            lp_T = log_probs(policy, answer)  # log pi_theta
            mu_T = torch.tensor(answer.mu, device=DEVICE)
            loss = -objective(lp_T, old_T, mu_T, A).sum() / divisor
            loss.backward()  # adds to the gradient
            gap = max(gap, (old_T - mu_T).abs().max().item())
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return gap


if __name__ == "__main__":
    engine, grader = Engine(), Grader()
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=DTYPE, use_cache=False).to(DEVICE)
    # Backward computes activations again. Stored, they would take 8 GB for 2,024 tokens of 1.5 B.
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    policy = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    policy.train()  # without this, transformers would store the activations
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0)
    train, held_out = chains("train", STEPS * PROMPTS), chains("test", 100)
    if not TOY:
        rows = [json.loads(line) for line in open(FILE, encoding="utf-8")]
        random.shuffle(rows)  # files are often in order of difficulty
        train, held_out = rows[100:], rows[:100]
    for step in range(STEPS + 1):
        engine.sync(policy)
        if step in (0, STEPS // 2, STEPS):
            groups = collect(held_out, SamplerConfig(sampler="uniform", n=4), engine, grader)
            right = [s.correct for group in groups for s in group.pool]
            print(f"step {step:3}: {sum(right) / len(right):.1%} of held-out answers are right")
        if step < STEPS:
            groups, kept = collect(random.sample(train, PROMPTS), ROUNDS, engine, grader), []
            for group in groups:
                # Half of the kept are right by choice, so the baseline is the mean of the pool.
                baseline = sum(s.reward for s in group.pool) / len(group.pool)
                kept.append([(s.rollout, s.reward - baseline) for s in keep(group.pool, ROUNDS.n)])
            gap = update(policy, optimizer, kept)
            print(f"step {step + 1:3}: {sum(len(group.pool) for group in groups)} answers, "
                  f"log mu and log pi_old differ by {gap:.0e}", flush=True)

# What is missing here                                  and where it is
#   other rules of sampling; how the rounds work        ada_sampler.py
#   many answers at once, no [T, vocabulary] tensor     parts/logprobs.py
#   merged weights, so that a CPU samples faster        parts/engine.py
#   a check that the adapter has arrived                parts/probe.py
#   mixtures of experts                                 parts/routing_replay.py
#   warm-up, logs, checkpoints, resuming                parts/log.py, parts/run_folder.py
