"""One row of any published data set -> the text of its problem and its gold answer.

    find_problem(row), find_gold(row)    the first known column that is not empty, or a named one

In a key, a dot reaches into a nested column (`reward_model.ground_truth`), and a plus joins two
columns (`Body+Question`).
"""
import json
import math
import re

PROBLEM_KEYS = (
    "problem", "question", "Problem", "extra_info.raw_problem", "prompt",
    "Body+Question",  # SVAMP
    "Question", "query",
    "instruction+input",  # Alpaca: the input may be missing or empty
    "input", "messages", "conversations")
ANSWER_KEYS = (
    "gt", "answer", "final_answer", "Answer", "reward_model.ground_truth", "ground_truth", "target",
    "expected_answer", "solution", "response", "output", "messages", "conversations")
WORKED = ("solution", "response", "output")  # may hold a worked solution instead of an answer

USER = ("user", "human")
ASSISTANT = ("assistant", "gpt")
CHAT_TURN = re.compile(  # a user's turn in a prompt that was already rendered for Qwen or Llama
    r"(?:<\|im_start\|>user|<\|start_header_id\|>user<\|end_header_id\|>)\n+"
    r"(.*?)(?:<\|im_end\|>|<\|eot_id\|>|\Z)", re.DOTALL)
THOUSANDS = re.compile(  # one number, alone or with a unit; no list, no brackets
    r"[^\w,()\[\]{}]*\d{1,3}(?:,\d{3})+(?:[^\d,()\[\]{}][^,()\[\]{}]*)?")

# Instructions that our own template would double. The first two are DAPO's, around the problem.
BEFORE = re.compile(
    r"Solve the following math problem step by step\. The last line.{0,200}?the problem\.\s+",
    re.DOTALL)
AFTER = 'Remember to put your answer on its own line after "Answer:"'
AT_THE_END = (
    "Let's think step by step and output the final answer within \\boxed{}",
    "Please reason step by step, and put your final answer within \\boxed{}")


# --------------------------------------------------------------------------------- problem and gold
def find_problem(row: dict, key: str | None = None) -> str:
    """The first problem column (or the named one) that is not empty, cleaned; or ""."""
    for k in [key] if key else PROBLEM_KEYS:
        text = problem_text(lookup(row, k))
        if text:
            return text
    return ""


def find_gold(row: dict, key: str | None = None) -> str:
    """The first gold column (or the named one) that is not empty, normalised; or ""."""
    for k in [key] if key else ANSWER_KEYS:
        gold = gold_text(lookup(row, k))
        unboxed_solution = k in WORKED and (len(gold) > 100 or "\n" in gold)
        if gold and not unboxed_solution:
            return gold
    return ""


def problem_text(value) -> str:
    """A string, a rendered chat, or turns ({role, content}, {from, value}): the last user turn."""
    text = last_turn(value, USER) if isinstance(value, list) else plain(value)
    rendered = CHAT_TURN.findall(text)
    return without_instructions(rendered[-1] if rendered else text)


def without_instructions(text: str) -> str:
    """The problem alone. By hand: `\\s*` before a pattern takes quadratic time on many spaces."""
    text = text.strip()
    if start := BEFORE.match(text):
        text = text[start.end():]
    problem, found, rest = text.rpartition(AFTER)
    if found and "\n" not in rest:
        text = problem.strip()
    for instruction in AT_THE_END:
        bare = text.removesuffix(".")
        if bare.endswith(instruction):
            text = bare.removesuffix(instruction).strip()
    return text


def gold_text(value) -> str:
    r"""`so #### 1,234` -> 1234; `hence \boxed{x}.` -> x; ["a", "b"] -> a, b; `$\pi$.` -> \pi.

    Of a chat, only what the assistant marked in its last turn counts: the box, or what follows
    `####`.
    """
    if is_chat(value):
        text = last_turn(value, ASSISTANT, until=USER)  # what came before answers another question
        marked = "####" in text or last_boxed(text) is not None
        return gold_text(text) if marked else ""
    if isinstance(value, list):
        return ", ".join(filter(None, map(gold_text, value)))
    text = plain(value)
    box = last_boxed(text)
    if box is not None:  # beside it, `#### Step 2` is a heading
        text = box
    elif "####" in text:
        text = after_mark(text)
    return without_dots(re.sub(r"\\?\$", "", text).strip())


def after_mark(text: str) -> str:
    """The line after the last `####`, as in GSM8K; `1,234` and `$5,000.50 a day` without commas.

    Other commas mean something: (3,4) is no 34. In sets made from GSM8K a sentence may follow on
    the next line.
    """
    tail = text.rsplit("####", 1)[1].strip().partition("\n")[0]
    return tail.replace(",", "") if THOUSANDS.fullmatch(tail) else tail


def without_dots(text: str) -> str:
    r"""Without the dots at the end of a sentence; the dot of `\right.` belongs to it."""
    bare = text.rstrip(".")
    if bare.endswith("\\right") and bare != text:
        return bare + "."
    return bare.strip()


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...}, \fbox{...} or \boxed x; None without, "" if not closed."""
    boxes = list(re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*", text))
    if not boxes:
        return None
    rest, depth = text[boxes[-1].end():], 0
    if not rest.startswith("{"):
        return re.match(r"[^\s$]*", rest).group()
    for token in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # `\\.`: escaped braces do not count
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return rest[1:token.start()].strip()
    return ""


# -------------------------------------------------------------------------------- chats and columns
def is_chat(value) -> bool:
    """Whether it is a list of turns, each a dict that says whose it is."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in value)


def last_turn(turns: list, roles: tuple, until: tuple = ()) -> str:
    """Text of the last turn of one of `roles`, if it comes after the last one of `until`; or ""."""
    for turn in reversed(turns):
        who = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        if who in roles:
            return plain(turn.get("content", turn.get("value")))
        if who in until:
            break
    return ""


def lookup(row: dict, key: str):
    """Value of a column, of a nested (a.b) or of joined ones (a+b: a must be there); or None."""
    if key in row:
        return decoded(row[key])
    first, *others = key.split("+")
    if others:
        values = [plain(row.get(part)) for part in [first, *others]]
        return " ".join(values).strip() if values[0] else None
    head, _, rest = key.partition(".")
    inner = decoded(row.get(head))
    return lookup(inner, rest) if rest and isinstance(inner, dict) else None


def decoded(value):
    """CSV files and some hub sets nest columns as JSON; `[1, 2]` stays text (an interval)."""
    if isinstance(value, str) and value.lstrip().startswith(('{"', "[{", '["')):
        try:
            return json.loads(value)
        except ValueError:
            pass
    return value


def plain(value) -> str:
    """Text of a scalar, "" for anything else; 27 for 27.0 (AMC golds are a float column)."""
    if value is None or isinstance(value, (list, dict)):
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()
