"""Reads problems from a file, a benchmark or a data set on the hub.

Each source gives rows (dicts). The second half of this module finds problem and gold in a row. If a
source cannot be read, a SystemExit with one sentence is raised. No code from the hub is run.
"""
import csv
import io
import itertools
import json
import os
import re
from decimal import Decimal
from pathlib import Path

from models.problems import BUILTIN
from parts.text import shown
from verifier.answers import find_boxes

BENCHMARKS = {  # the name on the command line -> hub id[:config]
    "math500": "HuggingFaceH4/MATH-500",
    "minerva": "math-ai/minervamath",
    "olympiadbench": "math-ai/olympiadbench",
    "aime24": "HuggingFaceH4/aime_2024",
    "aime25": "math-ai/aime25",
    "amc23": "math-ai/amc23",
    "gsm8k": "openai/gsm8k:main",
    "svamp": "ChilleD/SVAMP",
    # for the Reinforce-Ada table; the last is AIME and HMMT 24+25, BRUMO and CMIMC 25, AMC 23
    "ra-math500": "weqweasdas/math500",
    "ra-minerva": "weqweasdas/minerva_math",
    "ra-olympiadbench": "weqweasdas/olympiadbench",
    "ra-aime-like": "weqweasdas/aime_hmmt_brumo_cmimc_amc23",
}
MEASURED = ("minerva", "ra-minerva")  # their golds are measured values, so close answers are right
HELD_OUT = "held-out"  # as --eval-data, for a share of the training data
GROUPS = {  # one name for several sets, with the weights of the published weighted average
    "reinforce-ada": {
        "ra-math500": 500, "ra-minerva": 272, "ra-olympiadbench": 675, "ra-aime-like": 230},
}


def expand(names: str) -> list[tuple[str, int | None]]:
    """`gsm8k,reinforce-ada` -> [(gsm8k, None), (ra-math500, 500), ...]; None: weight = size."""
    one_file = os.path.isfile(os.path.expanduser(names))  # a file name may have a comma
    sets = [names] if one_file else names.split(",")
    return [pair for name in sets for pair in GROUPS.get(name, {name: None}).items()]


def is_file(name: str) -> bool:
    """Whether a set is a file. A benchmark's name wins over a file without a suffix."""
    path = os.path.expanduser(name)  # os.path, since Path.is_file raises for a name too long
    is_there = os.path.isfile(path) and name not in BENCHMARKS
    return is_there or Path(path).suffix.lower() in READERS


def require_sets(*flags: str | None) -> None:
    """Raises SystemExit for a missing file, and for a name that no set can have. Reads no rows."""
    for name, _ in itertools.chain(*map(expand, filter(None, flags))):
        if name in (HELD_OUT, *BUILTIN):
            continue
        if not is_file(name):
            hub_id(name)
        elif not os.path.isfile(os.path.expanduser(name)):
            read_file(name)  # it says why the file cannot be read


# -------------------------------------------------------------------------------------------- files
def read_file(name: str) -> list[dict]:
    """All rows of a local file. Without a known suffix it is read as JSON."""
    path = Path(os.path.expanduser(name))
    read = READERS.get(path.suffix.lower(), read_objects)
    try:
        return read(path)
    except Exception as error:  # because Arrow's errors have no common class
        why = getattr(error, "strerror", None) or shown(error).rstrip(".") or type(error).__name__
    raise SystemExit(f"Cannot read the data file {shown(name)}: {why}; --data takes a "
                     f"{', '.join(READERS)} file in UTF-8, or a hub id.")


def read_parquet(path: Path) -> list[dict]:
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(path).read()
    return [short_floats(row, table.schema) for row in table.to_pylist()]


def short_floats(value, kind):
    """A value of an Arrow type, or a row of a schema. A float32 becomes 1234.56 again, which Python
    has read as 1234.56005859375."""
    if "float" not in str(kind):
        return value
    if isinstance(value, dict):
        kinds = {column.name: column.type for column in kind}
        return {name: short_floats(inner, kinds.get(name)) for name, inner in value.items()}
    kind = getattr(kind, "value_type", kind)  # of a list
    if isinstance(value, list):
        return [short_floats(inner, kind) for inner in value]
    if value is not None and str(kind) in ("halffloat", "float"):
        return float(str(kind.to_pandas_dtype()(value)))  # numpy's text is the shortest
    return value


def read_csv(path: Path) -> list[dict]:
    """All rows. Strict, because an unclosed quote would include the rest of the file."""
    csv.field_size_limit(10**8)  # the default refuses cells above 128 KB
    text = path.read_text(encoding="utf-8-sig")
    text = re.sub(r"\A(\s*\n)?(sep=.\n(\s*\n)?)?", "", text)  # Excel writes `sep=;` first
    delimiter = max(",;\t", key=text.partition("\n")[0].count)  # spreadsheets write all three
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter, strict=True)
    rows, wrong = [], ""
    try:
        unique([(name, name) for name in reader.fieldnames or () if name])
        for row in reader:
            if any(row.pop(None, ())):
                wrong = "more cells than the header"
                break
            rows.append(row)
    except csv.Error as error:
        wrong = str(error)
    if wrong:
        raise ValueError(f"row {len(rows) + 1} after the header: {wrong} (is a text with a comma "
                         "or a quote not in quotes, or a quote never closed?)")
    return rows


def read_objects(path: Path) -> list[dict]:
    """Rows of JSON: objects one after the other, a list of them, or an object with such a list."""
    rows = json_values(path.read_text(encoding="utf-8-sig"))
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    if not are_objects(rows):
        raise ValueError("it must hold one JSON object per problem, with a problem and its answer")
    if len(rows) == 1 and not find_problem(rows[0]):
        lists = [value for value in rows[0].values() if value and are_objects(value)]
        rows = lists[0] if len(lists) == 1 else rows
    return rows


def are_objects(values) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def json_values(text: str) -> list:
    """All JSON values of a text, one per line or not. A ValueError says where it is no JSON."""
    decoder = json.JSONDecoder(parse_float=exact_number, object_pairs_hook=unique)
    space = re.compile(r"\s*")
    values, place = [], space.match(text).end()
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        values.append(value)
        place = space.match(text, place).end()
    return values


def exact_number(digits: str) -> float | Decimal:
    """A float, or a Decimal if the number has more digits than a float."""
    exact, rounded = Decimal(digits), float(digits)
    return rounded if Decimal(repr(rounded)) == exact else exact


def unique(pairs: list[tuple]) -> dict:
    """A row. Raises ValueError if two columns have the same name."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"two columns have the same name among {', '.join(n for n, _ in pairs)}")
    return row


READERS = {
    ".jsonl": read_objects, ".json": read_objects, ".parquet": read_parquet, ".csv": read_csv}


# ------------------------------------------------------------------------------------------ the hub
def read_hub(name: str, for_training: bool):
    """The rows of a benchmark or `org/name[:config][@split]`, from the hub or its cache."""
    repo, config, split = hub_id(name)
    ask_hub(repo)
    usual = ["train"] if for_training else ["test", "train"]
    rows = load_from_hub(repo, config or None, [split] if split else usual)
    columns = getattr(rows, "features", None)
    return (short_floats(row, columns.arrow_schema) for row in rows) if columns else rows


def hub_id(name: str) -> tuple[str, str, str]:
    """(org/name, config, split) of a benchmark or hub data set; "" for a part that is not given."""
    full, _, split = BENCHMARKS.get(name, name).partition("@")
    repo, _, config = full.partition(":")
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repo):
        raise SystemExit(
            f"There is no data set '{shown(name, 80)}': give a file ({', '.join(READERS)}), "
            f"a hub id (org/name), or one of {', '.join([*BUILTIN, *BENCHMARKS, *GROUPS])}.")
    return repo, config, split


def ask_hub(repo: str, kind: str = "dataset") -> None:
    """Raises SystemExit if the hub has no such data set or model. If the hub does not answer, only
    the cache is used from then on, because the hub's libraries would try again for minutes."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        getattr(huggingface_hub.HfApi(), f"{kind}_info")(repo, timeout=10)
    except errors.RepositoryNotFoundError:
        raise SystemExit(
            f"The hub has no {kind} {repo}: check its name, or run `hf auth login`.") from None
    except errors.OfflineModeIsEnabled:  # HF_HUB_OFFLINE=1, or no answer before
        pass
    except Exception as error:  # no network, a time-out, a proxy's page, ...
        print(f"the hub does not answer ({shown(error) or type(error).__name__}), so only this "
              "machine's cache is used")
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def load_from_hub(repo: str, config: str | None, splits: list[str]):
    """The rows of the first of these splits that exists."""
    import datasets

    try:
        stored = datasets.load_dataset(repo, config)
        for split in splits:
            if split in stored:
                return stored[split]
        why = f"it has no split {' or '.join(splits)}, only {', '.join(stored)}"
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    raise SystemExit(f"{repo} could not be loaded: {shown(why, 400)}. (Name a config or a split as "
                     f"{repo}:CONFIG@SPLIT. Without a hub, use your own --data file.jsonl, or "
                     "--data builtin.)")


# --------------------------------------------------------------------------------- what a row means
# In a key, a dot leads into a nested column. Case and spaces around the name are ignored.
PROBLEM_KEYS = ("problem", "question", "prompt", "messages")
ANSWER_KEYS = ("gt", "answer", "final_answer", "reward_model.ground_truth", "solution")
READ_TOO = ("", "id", "level", "difficulty", *ANSWER_KEYS)  # "": row numbers of a spreadsheet
CHAT_TURN = re.compile(r"""  # (role, text) in a prompt that was already rendered for Qwen or Llama
    (?: <\|im_start\|>(\w+) | <\|start_header_id\|>(\w+)<\|end_header_id\|> ) \n+ (.*?)
    (?: <\|im_end\|> | <\|eot_id\|> | (?=<\|im_start\|>|<\|start_header_id\|>) | \Z )
    """, re.DOTALL | re.VERBOSE)
# Instructions in published problems, which a template may repeat.
AT_THE_START = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.")
AT_THE_END = (
    'Remember to put your answer on its own line after "Answer:"',
    "Let's think step by step and output the final answer within \\boxed{}",
    "Please reason step by step, and put your final answer within \\boxed{}")


def find_problem(row: dict, key: str = "") -> str:
    """The text of the first problem column (or the named one) that is not empty; or ""."""
    text = problem_text(lookup(row, problem_key(row, key)))  # unchanged
    story = "" if key else plain(lookup(row, "Body"))  # SVAMP has a separate question
    return f"{story} {text}" if story and text else text


def problem_key(row: dict, key: str = "") -> str:
    """The name of the problem column; or ""."""
    keys = [key] if key else PROBLEM_KEYS
    return next((key for key in keys if problem_text(lookup(row, key)).strip()), "")


def find_gold(row: dict, key: str = "") -> str:
    """The gold in the first gold column (or the named one) that is not empty, normalised; or ""."""
    for k in [key] if key else ANSWER_KEYS:
        gold = gold_text(lookup(row, k))
        worked_out = k == "solution" and (len(gold) > 100 or "\n" in gold)  # without a box
        if gold and not worked_out:
            return gold
    return ""


def unread_columns(row: dict, columns: str = "") -> list[str]:
    """The columns with other content than problem, gold, level or id, such as a long chat."""
    question, _, answer = columns.partition(",")
    key = problem_key(row, question)
    turns = [text for _, text in turns_in(lookup(row, key)) if text.strip()]
    keys = [answer, *READ_TOO, *([] if question else ["Body"]), *([] if turns[1:] else [key])]
    read = {name.strip().lower() for key in keys for name in (key, key.partition(".")[0])}
    return [str(name) for name, value in row.items()
            if value not in (None, "", [], {}) and str(name).strip().lower() not in read]


def shown_columns(row: dict, source: str) -> dict:
    """The columns that the text of a .jinja file names; all columns if it may use others."""
    by_name = r"""\.\s*(?!items\b|keys\b|values\b|get\b)\w | (\.\s*get\s*\(|\[)\s*['"]"""
    if re.search(rf"\brow\b (?!\s*({by_name}))", source, re.VERBOSE):
        return row
    return {name: value for name, value in row.items()
            if re.search(rf"(?<!\w){re.escape(str(name))}(?!\w)", source)}


def require_columns(names, shows: str, source: str) -> None:
    """Raises SystemExit if a .jinja file names a missing column, which Jinja would show as ""."""
    named = re.findall(r"\brow(?:\.|\[['\"])(\w+)", shows)
    missing = [name for name in named if name not in names and not hasattr(dict, name)]
    if missing and not re.search(r"\bfor row in\b", shows):
        raise SystemExit(f"--template shows row.{shown(missing[0])}, but {shown(source)} has no "
                         f"such column: its columns are {shown(', '.join(map(str, names)), 1000)}.")


def lookup(row: dict, key: str):
    """The value of a column or a nested one (a.b), ignoring case; None if there is none."""
    names = {str(name).strip().lower(): name for name in row} | {name: name for name in row}
    for name in filter(None, (key, key.strip().lower())):
        if name in names:
            return row[names[name]]
    head, _, rest = key.partition(".")
    inner = lookup(row, head) if rest else None
    return lookup(inner, rest) if isinstance(inner, dict) else None


def plain(value) -> str:
    """`text_of` without surrounding white space."""
    return text_of(value).strip()


def text_of(value) -> str:
    """The text of a scalar; "" for any other value."""
    if isinstance(value, bytes):  # a parquet column of text without that type
        value = value.decode(errors="surrogateescape")
    if value is None or isinstance(value, (list, dict)):
        return ""
    if isinstance(value, float | Decimal):
        return number_text(str(value)) if Decimal(value).is_finite() else ""
    return str(value)


def number_text(written: str) -> str:
    r"""27 for 27.0 (AMC golds are a float column), 6.022 \times 10^{23} for 6.022e+23."""
    digits, _, power = written.lower().partition("e")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    if not float(digits):
        return "0"
    return rf"{digits} \times 10^{{{int(power)}}}" if power else digits


def turns_in(value) -> list[tuple[str, str]]:
    """(role, text) of each turn, in a list of turns or a rendered chat; [] for other values."""
    if isinstance(value, list):
        turns = [turn for turn in value if isinstance(turn, dict)]
        return [(str(turn.get("role")), text_of(turn.get("content"))) for turn in turns]
    return [(one or other, text) for one, other, text in CHAT_TURN.findall(text_of(value))]


def problem_text(value) -> str:
    """The text of a value; for a list of turns or a rendered chat, the last user turn."""
    asked = [text for role, text in turns_in(value) if role == "user"]
    return [text_of(value), *asked][-1]


def without_instruction(text: str) -> str:
    """A problem's text without the instructions of published sets on how to answer."""
    bare = text.strip().removeprefix(AT_THE_START).strip()
    for instruction in AT_THE_END:
        if bare.removesuffix(".").endswith(instruction):
            bare = bare.removesuffix(".").removesuffix(instruction).strip()
    return text if bare == text.strip() else bare


def gold_text(value) -> str:
    r"""`so #### 12` -> 12; `hence \boxed{x}.` -> x; ["a", "b"] -> a, b; `$\pi$.` -> \pi."""
    values = value if isinstance(value, list) else [value]
    return ", ".join(filter(None, map(plain_gold, values)))


def plain_gold(value) -> str:
    text = plain(value)
    boxes = find_boxes(text)
    if boxes:
        text = boxes[-1][2] or ""
    elif "####" in text:  # as in GSM8K; with a box it is a heading
        text = text.rsplit("####", 1)[1].strip().partition("\n")[0]
    if re.fullmatch(r"\\?\$\s*[\d.,]+\s*m", text):
        return text  # millions, not meters
    text = re.sub(r"\\?\$", "", text).strip().rstrip(".").strip()
    is_number = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,9}", text)  # as in a .csv file
    return number_text(text) if is_number else text
