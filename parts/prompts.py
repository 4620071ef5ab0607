"""From problems to the token ids that the model sees, and the ids that end its response.

    problems = add_prompts(problems, tokenizer, "reinforce-ada", max_prompt_tokens=1024)

Training and evaluation come through here, so a model is evaluated on the prompt it was trained on.
The template alone moves Qwen2.5-Math-1.5B from 33 % to 62 % on MATH-500 (docs/evaluation.md).

A template is one of TEMPLATES, or a file (docs/data.md): .json has turns like those of TEMPLATES,
for the tokenizer's own chat template; .jinja makes the whole prompt.
"""
import contextlib
import json
import re
import statistics
from dataclasses import replace
from datetime import date
from pathlib import Path

from parts.folder import read_json
from parts.sources import without_instruction
from parts.text import counted, is_text, shown

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
STEP_BY_STEP = "Let's think step by step and output the final answer within \\boxed{}."
TEMPLATES = {  # (role, text) turns for the tokenizer's own chat template; None = the bare problem
    "reinforce-ada": [("system", BOXED), ("user", "{problem} " + STEP_BY_STEP)],
    "qwen25-math-cot": [("system", BOXED), ("user", "{problem}")],
    "qwen-boxed": [("system", "You are a helpful assistant."), ("user", "{problem}\n" + BOXED)],
    "llama": [("user", "{problem}\n" + BOXED + "\n\n")],
    # for small models: when told to use a box, they do not; after three examples they do at times
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
DAY = date(2026, 1, 1)  # for templates that write the date: no prompt changes at midnight
TURN_MARKERS = (  # of ChatML, Llama 3 and 2, Gemma, Phi and Zephyr, Mistral, DeepSeek
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
    "<<SYS>>", "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|end|>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")


def add_prompts(problems: list, tokenizer, template: str, max_prompt_tokens: int) -> list:
    """The problems with `prompt` and `prompt_ids`; over-long ones are dropped and counted.

    Raises SystemExit for a template that is unknown or broken, that the tokenizer cannot render,
    that does not show the problem, and if no problem of a set is left.
    """
    report_control_tokens(problems, tokenizer)
    rows = [problem.shown for problem in problems]
    prompts = make_prompts(tokenizer, template, without_doubled(problems, template), rows)
    for text in left_out(template, prompts[0]):
        print(f"WARNING: the model's chat template leaves out a turn: {shown(text, 80)!r}; add "
              "--template chat, which leaves the problem alone")
    start = start_ids(tokenizer) if needs_start(tokenizer, template, prompts[0]) else []
    ids = [start + tokens for tokens in tokenizer(prompts, add_special_tokens=False)["input_ids"]]
    kept = [replace(problem, prompt=prompt, prompt_ids=tokens)
            for problem, prompt, tokens in zip(problems, prompts, ids)
            if len(tokens) <= max_prompt_tokens]
    if len(kept) < len(problems):
        lost = len(problems) - len(kept)
        print(f"data: dropped {lost} of {len(problems)} problems with a prompt over "
              f"{max_prompt_tokens} tokens (longest: {max(map(len, ids))})")
    gone = {problem.source for problem in problems} - {problem.source for problem in kept}
    if gone:
        raise SystemExit(f"Every prompt of {shown(min(gone))} is over {max_prompt_tokens} tokens: "
                         "raise --max-prompt-tokens.")
    lengths = [len(problem.prompt_ids) for problem in kept]
    print(f"data: {counted(len(kept), 'prompt')} of {min(lengths)} to {max(lengths)} tokens, "
          f"median {statistics.median(lengths):g}")
    return kept


def needs_start(tokenizer, template: str, prompt: str) -> bool:
    """Whether the tokenizer has to add its start token: chat templates write it themselves."""
    if is_jinja(template):
        start = getattr(tokenizer, "bos_token", None)
        return not (start and prompt.startswith(start))
    return template == "none"


def start_ids(tokenizer) -> list[int]:
    """What the tokenizer puts before a text.

    Some tokenizers, often of fine-tuned models, also append an end token (`add_eos_token`). No
    prompt may have it, because the model would answer after its own end.
    """
    whole, bare = (tokenizer("1", add_special_tokens=special)["input_ids"]
                   for special in (True, False))
    return whole[:whole.index(bare[0])]
# ---------------------------------------------------------------------------------------- problems
def report_control_tokens(problems: list, tokenizer) -> None:
    """Counts problems with a special token of this tokenizer, or else with a marker of another."""
    own = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    pattern = re.compile("|".join(map(re.escape, [*own, *TURN_MARKERS])))
    mine, others = [], []
    for problem in problems:
        text = problem.problem
        if problem.shown:
            text += json.dumps(problem.shown, ensure_ascii=False)
        tokens = sorted(pattern.finditer(text), key=lambda token: token[0] not in own)
        for token in tokens[:1]:
            around = text[max(0, token.start() - 20):token.end() + 40]
            (mine if token[0] in own else others).append((token[0], around))
    for found, kind, so in (
            (mine, "control tokens of this model", "The model sees them as such in its prompt."),
            (others, "turn markers of another model", "Its chat template may have made them.")):
        for token, around in found[:1]:
            print(f"WARNING: there are {kind} in {len(found)} of "
                  f"{counted(len(problems), 'problem')}, such as {shown(token)} in "
                  f"{shown(repr(around))}. {so} Remove them from the data, or take --template none "
                  "if each problem is a whole prompt")


def without_doubled(problems: list, template: str) -> list[str]:
    """The problems' texts, without the instructions of published sets if the template gives one.

    With --reward (which has the row) all of the text stays: the reward may rely on it.
    """
    texts = [problem.problem for problem in problems]
    gives_one = any("\\boxed{}" in text for _, text in turns_of(template) or [])
    if not gives_one or problems[0].row:
        return texts
    short = [without_instruction(text) for text in texts]
    changed = sum(bare != text.strip() for text, bare in zip(texts, short))
    if changed:
        print(f"data: removed the instruction on how to answer from {changed} of "
              f"{counted(len(texts), 'problem')}, because --template {shown(template)} gives one")
    return [text if bare == text.strip() else bare for text, bare in zip(texts, short)]


# --------------------------------------------------------------------------------------- templates
def make_prompts(tokenizer, template: str, texts: list[str], rows: list[dict] = ()) -> list[str]:
    """The prompt of each problem's text. Raises SystemExit for a template that cannot be used.

    rows: of each problem the columns that the template shows.
    """
    whole_row = any(rows)
    asked = texts if whole_row else [*texts, "1", "2"]  # so that at least two differ
    prompts = render(tokenizer, template, asked, rows if whole_row else [{}] * len(asked))
    whole = is_jinja(template) or template == "none"
    whose = f"template {shown(template)}" if whole else "the model's chat template"
    if not all(map(is_text, prompts)):
        raise SystemExit(f"{whose} makes half a character (a lone surrogate), which is no text.")
    first = {}
    for text, prompt in zip(asked, prompts):
        other = first.setdefault(prompt, text)
        if other.split() != text.split():  # two that differ in spaces alone may be the same
            raise SystemExit(f"The prompts of {shown(repr(other), 80)} and {shown(repr(text), 80)} "
                             f"are the same: {whose} does not show the problem. Give a .jinja file "
                             "with {{ problem }} in it as --template.")
    if whole_row and texts[0].strip() not in prompts[0]:
        print(f"WARNING: {whose} does not show the problem, such as {shown(repr(texts[0]), 80)}: "
              "write {{ problem }} into it, unless a column shows the same")
    return prompts[:len(texts)]


def left_out(template: str, prompt: str) -> list[str]:
    """The turns without the problem that are not in the prompt: some models know no system turn."""
    fixed = [text.strip() for _, text in turns_of(template) or [] if "{problem}" not in text]
    return [text for text in fixed if text not in prompt]


def shown_by(template: str) -> str:
    """The text of a .jinja file that shows columns of a problem's row; "" for other templates."""
    source = read_template(template) if is_jinja(template) else ""
    return source if re.search(r"\brow\b", source) else ""


def render(tokenizer, template: str, texts: list[str], rows: list[dict]) -> list[str]:
    """The prompt of each text, in the sandbox in which transformers renders chat templates.

    A .jinja file and the tokenizer's own chat template are programs from elsewhere: if one fails or
    refuses (some allow no system turn), that becomes a SystemExit of one sentence.
    """
    turns, source = turns_of(template), None
    if turns is None:
        return texts
    if is_jinja(template):
        source = read_template(template) + "\n"  # Jinja drops one, so the file's own last stays
    elif not getattr(tokenizer, "chat_template", None):
        raise SystemExit(f"The tokenizer has no chat template for {shown(template)}: use "
                         "--template none, or a .jinja file that makes the whole prompt.")
    prompts = []
    try:
        for problem, row in zip(texts, rows):
            chat = [{"role": role, "content": text.replace("{problem}", problem)}
                    for role, text in turns]
            own = {} if source is None else dict(
                chat_template=source, problem=problem, row=row)
            prompts.append(tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True,
                strftime_now=DAY.strftime, **own))
    except Exception as error:  # jinja's own, and whatever Python raises inside a template
        where = f", line {error.lineno}" if getattr(error, "lineno", None) else ""
        why = f"({type(error).__name__}: {shown(error)})"
        advice = "." if source else (": the model's chat template refuses it. Try --template llama "
                                     "or chat, which have no system turn, or none.")
        raise SystemExit(f"{shown(template)}{where} cannot be rendered {why}{advice}") from None
    return prompts


def is_jinja(template: str) -> bool:
    return Path(template).suffix in (".jinja", ".jinja2", ".j2")


def turns_of(template: str) -> list[tuple[str, str]] | None:
    """(role, text) turns of a template; None for the bare problem. SystemExit if there is none."""
    if is_jinja(template):
        read_template(template)
        return TEMPLATES["chat"]  # it may use the messages of a chat, or the problem alone
    if template in TEMPLATES:
        return TEMPLATES[template]
    if Path(template).suffix != ".json":
        raise SystemExit(
            f"There is no prompt template '{shown(template, 80)}'; choose one of "
            f"{', '.join(TEMPLATES)}, or give a .jinja or .json file.")
    try:
        turns = [(turn["role"], turn["content"]) for turn in json.loads(read_template(template))]
    except (ValueError, TypeError, KeyError, RecursionError):
        turns = []
    texts = [part for turn in turns for part in turn]
    if not all(isinstance(text, str) for text in texts) or "{problem}" not in "".join(texts):
        raise SystemExit(f'{shown(template)} must be a list of turns such as [{{"role": "user", '
                         '"content": "{problem}"}], in JSON.')
    return turns


def read_template(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")  # with or without a mark
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise SystemExit(f"--template: cannot read {shown(file)} ({why}).") from None


# --------------------------------------------------------------------------- the end of an answer
def stop_ids(path: str, tokenizer, template: str, more: str = "") -> list[int]:
    """Ids of all tokens that end an answer; a line names them.

    Each model names its ends in another place: Phi-3.5 has <|end|> in generation_config.json alone,
    and the base model Qwen2.5-Math has <|im_end|> in its chat template alone. So this is the union
    of all places, of END_TOKENS and of `more` (--stop), whose tokens are joined by commas.

    `path`: the model's folder or hub id. A token without a row in the model's embedding is left
    out, because the model cannot write it. Raises SystemExit if `more` has an unknown token, or if
    there is no end at all.
    """
    rows = embedding_rows(path)
    vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if i < rows}
    names = {tokenizer.eos_token, end_of_turn(tokenizer, template), *END_TOKENS}
    ends = {vocabulary[name] for name in names if name in vocabulary}
    ends |= {i for i in ends_in_configs(path) if i < rows}
    added = more.split(",") if more else []
    unknown = [token for token in added if token not in vocabulary]
    if unknown:
        raise SystemExit(f"--stop: the model has no token {shown(repr(unknown[0]), 80)}; known "
                         f"ends: {in_words(tokenizer, sorted(ends))}.")
    ends |= {vocabulary[token] for token in added}
    if not ends:
        raise SystemExit("The model names no token that ends an answer, so every answer would be "
                         "cut off: name one with --stop TOKEN.")
    print(f"an answer ends at {in_words(tokenizer, sorted(ends))}")
    return sorted(ends)


def in_words(tokenizer, ids: list[int]) -> str:
    """The tokens of these ids. An id of the model that the tokenizer does not know is a number."""
    return ", ".join(shown(tokenizer.convert_ids_to_tokens(i) or i) for i in ids)


def end_of_turn(tokenizer, template: str) -> str | None:
    """The special token that the chat template in use writes right after an assistant's turn."""
    own = dict(chat_template=read_template(template)) if is_jinja(template) else {}
    chat = [dict(role="user", content="QUESTION"), dict(role="assistant", content="ANSWER")]
    text = ""
    with contextlib.suppress(Exception):  # a template that makes prompts alone may refuse an answer
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, problem="QUESTION", row={}, **own)
    _, found, after = text.rpartition("ANSWER")
    if template == "none" or not found:
        return None
    tokens = [token for token in tokenizer.get_added_vocab() if after.lstrip().startswith(token)]
    return max(tokens, key=len, default=None)


def ends_in_configs(path: str) -> set[int]:
    """The end tokens of generation_config.json and config.json, also those of a nested text model.

    Only what is written there counts: transformers would make up an end that a config does not have
    (2 for a Llama, which in Llama 3 is "#").
    """
    from transformers.utils import cached_file

    found = set()
    for name in ("generation_config.json", "config.json"):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False,
                           _raise_exceptions_for_connection_errors=False)
        stored = read_json(file) if file else {}
        for part in (stored, stored.get("text_config") or {}):
            ends = part.get("eos_token_id")
            found |= {i for i in (ends if isinstance(ends, list) else [ends]) if i is not None}
    return found


# ---------------------------------------------------------------------------- beyond the embedding
def embedding_rows(path: str) -> int:
    """For how many token ids the model has an embedding."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config().vocab_size


def require_embedded(path: str, tokenizer, problems: list) -> None:
    """Raises SystemExit if a prompt has a token for which the model's embedding has no row.

    The tokenizer itself may have more tokens than the model: that does no harm, as long as none of
    them is in a prompt.
    """
    rows = embedding_rows(path)
    for problem in problems:
        largest = max(problem.prompt_ids, default=0)
        if largest >= rows:
            raise SystemExit(
                f"The prompt of {shown(repr(problem.problem), 80)} has the token "
                f"{in_words(tokenizer, [largest])} (id {largest}), but the model's embedding has "
                f"{rows} rows, for the ids below that: resize it (resize_token_embeddings), or "
                "take the tokenizer that belongs to the model.")
