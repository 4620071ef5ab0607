"""The built-in models: a Qwen2 of 0.5 M parameters, its mixture of experts, and their arithmetic.

`python minirl.py` trains `tiny`, so the whole project can be run, read and tested on a laptop
without a GPU and without a model hub. Nothing else is special about it: models/tiny is a folder in
Hugging Face format, vLLM serves it, PEFT adapts it, math-verify grades its \\boxed{} answers.
`tiny-moe` is the same with 8 experts in every layer, of which a token takes 2 (Qwen3-MoE, 1.1 M
parameters): small enough to see on a CPU what routing replay is for.

`tiny-skills` is smaller still and has problems of its own, see skills.py.

**The problems** are chains of additions and subtractions such as `7+15-4=?`. The number of
operations (1 to 6) sets the difficulty: a chain is right only if every link is, so pass rates
spread over the whole range.

**The warm start** (`python -m parts.tiny tiny FOLDER` repeats it) is a short supervised phase on
worked solutions of two kinds: most answer at once (`\\boxed{18}`), some write the intermediate
results down first. The first kind cannot be learnt for long chains, the second can. So the model
starts weak but not hopeless, and reinforcement learning has something to find: that working it out
pays, and how to do it without slips.
"""
import hashlib
import random
import sys
from pathlib import Path

from parts import skills
from parts.checkpoint import damage, seal
from parts.models import TINY

OPERATIONS = (1, 2, 3, 4, 5, 6)  # a problem's level is its number of operations
LARGEST = 9  # largest number in a problem; intermediate results stay within 0..99
TOP = 30
END, PAD, USER, ASSISTANT, BOX = "<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>", "\\boxed{"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODELS = Path(__file__).resolve().parent.parent / "models"
FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
WARM_START = dict(steps=1000, batch=16, lr=3e-3, seed=0)
SIZES = dict(hidden_size=128, intermediate_size=288, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, head_dim=32,
               norm_topk_prob=True, router_aux_loss_coef=0.01)
# The last is for the warm start only: without it a few experts would do all the work.


# ------------------------------------------------------------------------------ the problems
def chain(rng: random.Random, operations: int) -> tuple[str, list[str], int]:
    """One problem: its text, the lines of its worked solution, its answer."""
    value = rng.randint(1, LARGEST)
    text, lines = str(value), []
    for _ in range(operations):
        term, plus = rng.randint(1, LARGEST), rng.random() < 0.5
        if not 0 <= (value + term if plus else value - term) <= TOP:
            plus = not plus
        result = value + term if plus else value - term
        sign = "+" if plus else "-"
        text += f"{sign}{term}"
        lines.append(f"{value}{sign}{term}={result}")
        value = result
    return text + "=?", lines, value


def problems(split: str, count: int, seed: int = 0) -> list[dict]:
    """`count` problems of all levels in turn. A problem's hash decides in which split it is."""
    rng, found = random.Random(f"{split}/{seed}"), []
    while len(found) < count:
        level = OPERATIONS[len(found) % len(OPERATIONS)]
        text, _, answer = chain(rng, level)
        if in_test_split(text) == (split == "test"):
            name = f"builtin/{split}/{len(found)}"
            found.append(dict(problem=text, answer=str(answer), id=name, level=level))
    return found


def in_test_split(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 64  # a quarter of all problems


def demonstration(rng: random.Random, lazy: bool) -> tuple[str, str]:
    """One (problem, completion) pair of the warm start, never from the test split.

    Diligent ones are worked out four times in five. Lazy ones the less often, the longer the chain
    would be.
    """
    while True:
        operations = rng.choice(OPERATIONS)
        text, lines, answer = chain(rng, operations)
        if not in_test_split(text):
            worked = rng.random() < (0.6 / operations if lazy else 0.8)
            return text, "".join(line + "\n" for line in lines if worked) + f"{BOX}{answer}}}"


# ------------------------------------------------------------------------------ the model
def build_tokenizer():
    """Bytes as tokens, so that any text can be encoded; 10 to 99 are one token each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [(a, b) for a in "123456789" for b in "0123456789"]  # 10..99 are one token each
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
    """Randomly initialised; torch's random state decides the weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = SIZES | skills.SIZES if name == "tiny-skills" else SIZES
    common = dict(
        vocab_size=384, max_position_embeddings=1024, tie_word_embeddings=True, **sizes,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    if name == "tiny-moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **EXPERTS))
    return Qwen2ForCausalLM(Qwen2Config(**common))


def warm_start(
    model, tokenizer, *, steps, batch, lr, seed, demonstrate=demonstration, progress=True,
) -> float:
    """Plain supervised learning on demonstrations, loss on the completion only.

    Returns the last mean loss in nats.
    """
    import torch
    from tqdm import tqdm

    rng = random.Random(f"warm start {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=steps, pct_start=0.1)
    model.train()
    balance = {}
    if hasattr(model.config, "num_experts"):
        balance = {"output_router_logits": True}  # adds the load-balancing loss
    bar = tqdm(range(steps), desc="warm start", disable=not progress, mininterval=1)
    for step in bar:
        shown = [demonstrate(rng, lazy=step > 0.8 * steps) for _ in range(batch)]
        ids, labels = training_batch(shown, tokenizer)
        loss = model(input_ids=ids, labels=labels, **balance).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()
    return loss.item()


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
def folder(name: str = "tiny") -> str:
    """The built-in model's folder, an ordinary one in Hugging Face format.

    Raises SystemExit if a file in it is not what `build` has written.
    """
    found = MODELS / name
    problem = damage(found, FILES)
    if problem:
        raise SystemExit(f"The built-in model in {found} is damaged ({problem}): "
                         "restore it with `git checkout models`.")
    return str(found)


def build(folder, name: str = "tiny", progress: bool = True, **changes) -> None:
    """Make tokenizer and model from a seed and save them: what is in models/ was made so.

    On one thread, so that a machine always makes the same weights. Another kind of processor rounds
    differently and makes others, which is why the weights are files of this repository.
    """
    import torch
    from transformers.utils import logging

    recipe = WARM_START | changes
    if name == "tiny-skills":
        recipe = dict(demonstrate=skills.demonstration) | skills.WARM_START | changes
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
        model.bfloat16()  # half the bytes; everybody loads it in the precision of the run
    model.save_pretrained(folder)
    seal(Path(folder))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in TINY:
        raise SystemExit(f"usage: python -m parts.tiny {{{','.join(TINY)}}} FOLDER")
    build(sys.argv[2], sys.argv[1])
