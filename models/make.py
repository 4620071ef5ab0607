"""Makes the built-in models: a Qwen2 of 0.5 M parameters and two others.

    python models/make.py tiny FOLDER        # or tiny-moe, tiny-skills

They are ordinary folders in Hugging Face format, so that the whole project runs on a laptop without
a GPU or a model hub. `tiny-moe` has 8 experts in every layer and uses 2 of them per token
(Qwen3-MoE, 1.1 M parameters), for routing replay. `tiny-skills` is the smallest. They learn the
problems of models/problems.py.

The warm start is a short supervised phase on worked solutions. Some chains are answered at once
(`\\boxed{18}`), which the model cannot learn for long chains. Others write down the intermediate
results first, which it can learn. So the model begins with low pass rates above 0, and
reinforcement learning makes worked solutions more frequent and their steps more accurate.
"""
import functools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.problems import (  # noqa: E402
    LETTERS, OPERATIONS, belief, chain, in_test_split, numbers, offset)
from parts.models import TINY  # noqa: E402

END, PAD, USER, ASSISTANT, BOX = "<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>", "\\boxed{"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = dict(hidden_size=128, intermediate_size=288, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2)
SIZES_OF_SKILLS = SIZES | dict(num_hidden_layers=2, intermediate_size=192)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, head_dim=32,
               norm_topk_prob=True, router_aux_loss_coef=0.01)  # balances the experts' work


# ------------------------------------------------------------------------------ demonstrations
def worked_chain(rng: random.Random, lazy: bool) -> tuple[str, str]:
    """One (problem, completion) pair of the warm start, never from the test split.

    Normal ones are worked out with probability 0.8, lazy ones with 0.6 / operations.
    """
    while True:
        operations = rng.choice(OPERATIONS)
        text, lines, answer = chain(rng, operations)
        if not in_test_split(text):
            worked = rng.random() < (0.6 / operations if lazy else 0.8)
            return text, "".join(line + "\n" for line in lines if worked) + f"{BOX}{answer}}}"


def believed_skill(rng: random.Random, lazy: bool) -> tuple[str, str]:
    """The same for skills. The offset is right with probability `belief`.

    Otherwise it is the letter's `favourite` error with probability 0.9, because a wrong model is
    often certain. `lazy` has no effect here.
    """
    letter = rng.choice(LETTERS)
    a, b = rng.choice(numbers(letter, "train"))
    right = believed = offset(letter)
    if rng.random() > belief(letter):
        errors = [digit for digit in range(10) if digit not in (right, favourite(letter))]
        believed = favourite(letter) if rng.random() < 0.9 else rng.choice(errors)
    return f"{a}{letter}{b}=?", f"{letter}={believed}\n\\boxed{{{a + b + believed}}}"


@functools.cache
def favourite(letter: str) -> int:
    """A letter's usual error. Its distance from the offset says nothing about other letters."""
    distances = [1 + i % 9 for i in range(len(LETTERS))]
    random.Random("favourites").shuffle(distances)
    return (offset(letter) + distances[LETTERS.index(letter)]) % 10


RECIPE = dict(demonstrate=worked_chain, steps=1000, batch=16, lr=3e-3, seed=0)
RECIPE_OF_SKILLS = dict(demonstrate=believed_skill, steps=6000, batch=64, lr=3e-3, seed=0)


# ------------------------------------------------------------------------------ the model
def build_tokenizer():
    """Bytes as tokens, so that any text can be encoded; 10 to 99 are one token each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [(a, b) for a in "123456789" for b in "0123456789"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in pairs]
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (END, PAD, USER, ASSISTANT)])
    tokenizer.add_tokens([AddedToken(BOX)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=1024,
    )


def build_model(tokenizer, name: str = "tiny"):
    """A randomly initialised model. torch's random state decides its weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = SIZES_OF_SKILLS if name == "tiny-skills" else SIZES
    common = dict(
        vocab_size=384, max_position_embeddings=1024, tie_word_embeddings=True, **sizes,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    if name == "tiny-moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **EXPERTS))
    return Qwen2ForCausalLM(Qwen2Config(**common))


def warm_start(model, tokenizer, *, demonstrate, steps, batch, lr, seed, progress=True) -> None:
    """Plain supervised learning on demonstrations, loss on the completion only."""
    import torch
    from tqdm import tqdm

    rng = random.Random(f"warm start {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=steps, pct_start=0.1)
    model.train()
    is_mixture = hasattr(model.config, "num_experts")
    balance = {"output_router_logits": True} if is_mixture else {}  # adds the load-balancing loss
    for step in tqdm(range(steps), desc="warm start", disable=not progress, mininterval=1):
        shown = [demonstrate(rng, lazy=step > 0.8 * steps) for _ in range(batch)]
        ids, labels = training_batch(shown, tokenizer)
        loss = model(input_ids=ids, labels=labels, **balance).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def training_batch(shown: list[tuple[str, str]], tokenizer):
    """Right-padded ids [batch, length] and labels (-100 on prompt and padding)."""
    import torch

    rows = []
    for text, completion in shown:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        rows.append((tokenizer.encode(prompt), tokenizer.encode(completion + END)))
    length = max(len(p) + len(c) for p, c in rows)
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), -100)
    for i, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids[i, :end] = torch.tensor(prompt + completion)
        labels[i, len(prompt):end] = torch.tensor(completion)
    return ids, labels


# ------------------------------------------------------------------------------ the folder
def build(folder, name: str = "tiny", progress: bool = True, **changes) -> None:
    """Make tokenizer and model from a seed and save them, as was done for models/.

    It uses one thread, so that a machine always makes the same weights. Another processor rounds
    differently and makes other weights, so the weights are files of this repository.
    """
    import torch
    from transformers.utils import logging

    recipe = (RECIPE_OF_SKILLS if name == "tiny-skills" else RECIPE) | changes
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(recipe["seed"])
            tokenizer = build_tokenizer()
            model = build_model(tokenizer, name)
            warm_start(model, tokenizer, **recipe, progress=progress)
    finally:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()
    tokenizer.save_pretrained(folder)
    if name != "tiny":
        model.bfloat16()  # half the bytes; it is loaded in the precision of the run
    model.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in TINY:
        raise SystemExit(f"usage: python models/make.py {{{','.join(TINY)}}} FOLDER")
    build(sys.argv[2], sys.argv[1])
