"""Makes the tokens around an answer: the prompt before it, the end token after it.

    problems = add_prompts(problems, model, "reinforce-ada", max_prompt_tokens=1024)

The template alone changes Qwen2.5-Math-1.5B from 33 % to 62 % on MATH-500 (docs/after_training.md).
It is one of TEMPLATES or a file (docs/data.md). A .json file has turns for the tokenizer's chat
template, like TEMPLATES, and a .jinja file makes the whole prompt.
"""
import json
from dataclasses import replace
from datetime import date
from pathlib import Path

from parts.files import read_json
from parts.text import counted, shown

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
STEP_BY_STEP = "Let's think step by step and output the final answer within \\boxed{}."
TEMPLATES = {  # (role, text) turns for the tokenizer's chat template; None = only the problem
    "reinforce-ada": [("system", BOXED), ("user", "{problem} " + STEP_BY_STEP)],
    "qwen25-math-cot": [("system", BOXED), ("user", "{problem}")],
    "qwen-boxed": [("system", "You are a helpful assistant."), ("user", "{problem}\n" + BOXED)],
    "llama": [("user", "{problem}\n" + BOXED + "\n\n")],
    # for small models, which use a box more often after examples than after an instruction
    "three-examples": [
        ("user", "Tom has 7 apples and buys 5 more. How many apples does he have now?"),
        ("assistant", "7 + 5 = 12. The answer is \\boxed{12}."),
        ("user", "There are 15 birds on a tree. 6 of them fly away. How many birds are left on the "
                 "tree?"),
        ("assistant", "15 - 6 = 9. The answer is \\boxed{9}."),
        ("user", "A box holds 4 pens. How many pens are in 3 boxes?"),
        ("assistant", "4 * 3 = 12. The answer is \\boxed{12}."),
        ("user", "{problem}")],
    "chat": [("user", "{problem}")],
    "none": None,
}
DAY = date(2026, 1, 1)  # the date for templates that show one, so that prompts stay the same
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")
SLICE = 1000  # prompts per call of a tokenizer, which needs 12 kB for each


def add_prompts(problems: list, model, template: str, max_prompt_tokens: int) -> list:
    """The problems with `prompt` and `prompt_ids`. Too long ones are dropped and counted.

    Raises SystemExit for a template that cannot be used, and if no problem of a set is left.
    """
    tokenizer = model.tokenizer
    prompts = make_prompts(tokenizer, template, [problem.problem for problem in problems])
    start, ids = start_ids(tokenizer, template, prompts[0]), []
    for i in range(0, len(prompts), SLICE):
        bare = tokenizer(prompts[i:i + SLICE], add_special_tokens=False)["input_ids"]
        ids += [start + tokens for tokens in bare]
    short = [replace(problem, prompt=prompt, prompt_ids=tokens)
             for problem, prompt, tokens in zip(problems, prompts, ids)
             if len(tokens) <= max_prompt_tokens]
    if len(short) < len(problems):
        print(f"data: dropped {len(problems) - len(short)} of {len(problems)} problems with a "
              f"prompt over {max_prompt_tokens} tokens (longest: {max(map(len, ids))})")
    if gone := {problem.source for problem in problems} - {problem.source for problem in short}:
        raise SystemExit(f"Every prompt of {shown(min(gone))} is over {max_prompt_tokens} tokens: "
                         "raise --max-prompt-tokens.")
    special = tokenizer.all_special_tokens
    marked = [p.problem for p in short if any(token in p.problem for token in special)]
    if marked:
        print(f"WARNING: {counted(len(marked), 'problem')} with control tokens of the model, such "
              f"as {shown(repr(marked[0]), 80)}")
    require_embedded(short, model)
    return short


def require_embedded(problems: list, model) -> None:
    """Raises SystemExit if a prompt has a token for which the model's embedding has no row."""
    for problem in problems:
        largest = max(problem.prompt_ids, default=0)
        if largest >= model.embedded:
            raise SystemExit(
                f"The prompt of {shown(repr(problem.problem), 80)} has the token "
                f"{in_words(model.tokenizer, [largest])} (id {largest}), but the model's embedding "
                f"has {model.embedded} rows: use the tokenizer that belongs to the model.")


def start_ids(tokenizer, template: str, prompt: str) -> list[int]:
    """The ids of the tokenizer's start token, unless the chat template or .jinja file writes it.

    An end token that a fine-tuned tokenizer appends (`add_eos_token`) is left out, because the
    prompt would then end before the answer.
    """
    start, (turns, source) = tokenizer.bos_token, read_template(template)
    if turns and not source or start and prompt.startswith(start):
        return []
    first = tokenizer("1")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


# --------------------------------------------------------------------------------------- templates
def make_prompts(tokenizer, template: str, texts: list[str]) -> list[str]:
    """The prompt of each text. Raises SystemExit if the template fails or shows no problem.

    Templates are programs by other people, which transformers renders in a sandbox.
    """
    turns, source = read_template(template)
    if turns is None:
        return texts
    try:
        prompts = [tokenizer.apply_chat_template(
            [dict(role=role, content=turn.replace("{problem}", text)) for role, turn in turns],
            tokenize=False, add_generation_prompt=True, problem=text, strftime_now=DAY.strftime,
            chat_template=source) for text in texts]
    except Exception as error:  # any error of Jinja, or of Python inside a template
        raise SystemExit(f"--template {shown(template)} cannot be rendered ({shown(error)}): use "
                         "none, which needs no chat template, or chat, which has no system turn."
                         ) from None
    if texts[0].strip() not in prompts[0]:
        raise SystemExit(f"--template {shown(template)} does not show the problem.")
    return prompts


def read_template(template: str) -> tuple[list[tuple[str, str]] | None, str | None]:
    """((role, text) turns, or None for only the problem; the text of a .jinja file or None)."""
    if template in TEMPLATES:
        return TEMPLATES[template], None
    try:
        text = Path(template).read_text(encoding="utf-8-sig")  # with or without a mark
        if template.endswith(".jinja"):  # it may use `messages` or `problem`
            return TEMPLATES["chat"], text + "\n"  # Jinja drops the last newline
        return [(turn["role"], turn["content"]) for turn in json.loads(text)], None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SystemExit(
            f"--template cannot read {shown(template, 80)} ({shown(error)}): it takes "
            f"{', '.join(TEMPLATES)}, a .jinja file, or a .json file with "
            '[{"role": "user", "content": "{problem}"}].') from None


# --------------------------------------------------------------------------- the end of an answer
def stop_ids(model, template: str, more: str = "") -> list[int]:
    """Ids of all tokens that end an answer. Prints their names.

    Phi-3.5 has its <|end|> only in generation_config.json, and Qwen2.5-Math its <|im_end|> only in
    its chat template. So this is the union of all places, END_TOKENS and `more` (--stop, separated
    by commas), without tokens for which the model's embedding has no row.
    Raises SystemExit if `more` has an unknown token.
    """
    tokenizer = model.tokenizer
    vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if i < model.embedded}
    names = {tokenizer.eos_token, end_of_turn(tokenizer, template), *END_TOKENS}
    ends = {vocabulary[name] for name in names if name in vocabulary}
    ends |= {i for i in ends_in_configs(model) if i < model.embedded}
    for token in filter(None, more.split(",")):
        if token not in vocabulary:
            raise SystemExit(f"--stop: the model has no token {shown(repr(token), 80)}; known "
                             f"ends: {in_words(tokenizer, sorted(ends))}.")
        ends.add(vocabulary[token])
    where = in_words(tokenizer, sorted(ends)) or "no token, so name one with --stop TOKEN"
    print(f"an answer ends at {where}")
    return sorted(ends)


def in_words(tokenizer, ids: list[int]) -> str:
    """The tokens of these ids. An id that the tokenizer does not have is shown as a number."""
    return ", ".join(shown(tokenizer.convert_ids_to_tokens(i) or i) for i in ids)


def end_of_turn(tokenizer, template: str) -> str | None:
    """The special token that the chat template in use writes right after an assistant's turn."""
    turns, source = read_template(template)
    if turns is None:
        return None
    chat = [dict(role="user", content="QUESTION"), dict(role="assistant", content="ANSWER")]
    try:
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, problem="QUESTION", chat_template=source)
    except Exception:  # a template for prompts only may refuse an answer
        return None
    _, answer, after = text.rpartition("ANSWER")
    tokens = [token for token in tokenizer.get_added_vocab() if after.lstrip().startswith(token)]
    return max(tokens, key=len, default=None) if answer else None


def ends_in_configs(model) -> set[int]:
    """The end tokens of generation_config.json and config.json, also those of a nested text model.

    The files are read directly, because transformers invents an end token if a config has none (2
    for a Llama, which is "#" in Llama 3).
    """
    ends = set()
    for file in (model.folder / "generation_config.json", model.folder / "config.json"):
        stored = read_json(file) if file.exists() else {}
        for part in (stored, stored.get("text_config") or {}):
            ids = part.get("eos_token_id")
            ends |= {i for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
    return ends
