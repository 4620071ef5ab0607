"""Rows of problems, each a dict, from a benchmark, a file or the hub; and what a row means.

Whatever cannot be read ends in a SystemExit of one sentence. No code from the hub is run.
"""
import csv
import io
import json
import os
import re
from datetime import datetime
from decimal import Decimal
from pathlib import Path

from parts.problems import BUILTIN
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
    # The sets of the Reinforce-Ada table; the last is AIME 24+25, HMMT 24+25, BRUMO 25, AMC 23 and
    # CMIMC 25.
    "ra-math500": "weqweasdas/math500",
    "ra-minerva": "weqweasdas/minerva_math",
    "ra-olympiadbench": "weqweasdas/olympiadbench",
    "ra-aime-like": "weqweasdas/aime_hmmt_brumo_cmimc_amc23",
}
MEASURED = ("minerva", "ra-minerva")  # their golds are measured: what is close is right
GROUPS = {  # one name for several sets, with the weights of the published weighted average
    "reinforce-ada": {
        "ra-math500": 500, "ra-minerva": 272, "ra-olympiadbench": 675, "ra-aime-like": 230},
}


def expand(names: str) -> list[tuple[str, int | None]]:
    """`gsm8k,reinforce-ada` -> [(gsm8k, None), (ra-math500, 500), ...]; None: weight = size."""
    return [pair for name in names.split(",") for pair in GROUPS.get(name, {name: None}).items()]


def is_file(name: str) -> bool:
    """Whether a set is meant to be a file, not a name or a hub id."""
    path = os.path.expanduser(name)  # os.path, since Path.is_file raises for a name too long
    known = name in BENCHMARKS  # its name wins over a file without a suffix
    return Path(path).suffix.lower() in READERS or os.path.isfile(path) and not known


# -------------------------------------------------------------------------------------------- files
def read_file(name: str) -> list[dict]:
    """All rows of a local file."""
    path = Path(os.path.expanduser(name))
    read = READERS.get(path.suffix.lower())
    if not (read and os.path.isfile(path)):
        problem = "Cannot read the" if os.path.isfile(path) else "There is no"
        raise SystemExit(f"{problem} data file {shown(name)}: --data takes a "
                         f"{', '.join(READERS)} file that exists, or a hub id.")
    try:
        return read(path)
    except (ValueError, OSError, RecursionError, MemoryError, OverflowError) as error:
        why = shown(error).rstrip(".") or type(error).__name__
        mend = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "mend it"
        raise SystemExit(
            f"Cannot read {shown(name)}: {why}; {mend} or name another --data.") from None


def read_parquet(path: Path) -> list[dict]:
    from pyarrow.lib import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(path).read()
    except ArrowException as error:  # only some of its kinds are ValueErrors
        raise ValueError(error) from None
    return list(with_short_floats(table.to_pylist(), table.schema))


def with_short_floats(rows, schema):
    """Yields rows of an Arrow table, in which Python has widened every float16 and float32.

    So a float32 that was written as 1234.56 is 1234.56 again, and not 1234.56005859375.
    """
    kinds = {column.name: column.type for column in schema if "float" in str(column.type)}
    for row in rows:
        yield row | {name: short_floats(row[name], kind) for name, kind in kinds.items()}


def short_floats(value, kind):
    """A value of the Arrow type `kind`, also a list or a nested one."""
    kind = getattr(kind, "storage_type", kind)  # of an extension
    if isinstance(value, dict):
        kinds = {inner.name: inner.type for inner in kind}
        return {name: short_floats(inner, kinds.get(name)) for name, inner in value.items()}
    kind = getattr(kind, "value_type", kind)  # of a list, or a dictionary of values
    if isinstance(value, list):
        return [short_floats(inner, kind) for inner in value]
    if value is not None and str(kind) in ("halffloat", "float"):
        return float(str(kind.to_pandas_dtype()(value)))  # numpy's text is the shortest
    return value


def read_csv(path: Path) -> list[dict]:
    """Strict: otherwise a quote that is never closed would swallow the rest of the file.

    Spreadsheets also separate cells by semicolons or tabs: the header tells.
    """
    csv.field_size_limit(10**8)  # the default refuses cells above 128 KB
    text = path.read_text(encoding="utf-8-sig")
    text = re.sub(r"\A(\s*\n)?(sep=.\n(\s*\n)?)?", "", text)  # Excel writes `sep=;` first
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv.DictReader(io.StringIO(text), delimiter=delimiter, strict=True)
    found = []
    try:
        names = [*filter(None, rows.fieldnames or ())]
        for row in rows:
            if any(row.pop(None, ())):
                raise csv.Error("more cells than the header")
            found.append(row)
    except csv.Error as error:
        raise ValueError(f"row {len(found) + 1} after the header: {error} (is a text with a comma "
                         "or a quote not in quotes, or a quote never closed?)") from None
    if len({*names}) < len(names):
        raise ValueError("two columns of the header have the same name")
    return found


def read_objects(path: Path) -> list[dict]:
    """A JSON list of objects, or an object in each line. A ValueError names the broken line."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = read_json_text(text)
        rows = [rows] if isinstance(rows, dict) else rows
    except ValueError:
        if text.lstrip().startswith("["):
            raise
        rows = read_lines(text)
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise ValueError("it must hold one JSON object per problem, with a problem and its answer")
    if len(rows) == 1 and not find_problem(rows[0]):
        for name in filter(lambda name: is_list_of_rows(rows[0][name]), rows[0]):
            raise ValueError(f"it holds one object with a list in '{name}': write each "
                             "object of that list into a line of its own in a .jsonl file")
    return rows


def read_lines(text: str) -> list:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut at U+2028 too
        try:
            rows += [read_json_text(line)] if line.strip() else []
        except ValueError as error:
            why = f": {getattr(error, 'msg', error)}"
            if why == ": Extra data":  # a comma, or a second object
                why = " goes on after its object"
            raise ValueError(f"line {number}{why}") from None
    return rows


def read_json_text(text: str):
    """What JSON means. A number with more digits than a float holds is a Decimal."""
    def number(digits: str) -> float | Decimal:
        try:
            exact, rounded = Decimal(digits), float(digits)
        except ArithmeticError:
            raise ValueError(f"{digits} has too large an exponent") from None
        return rounded if Decimal(repr(rounded)) == exact else exact

    return json.loads(text, parse_float=number)


def is_list_of_rows(value) -> bool:
    """A list of objects that are no turns of a chat."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(row, dict) and "role" not in row for row in value)


READERS = {
    ".jsonl": read_objects, ".json": read_objects, ".parquet": read_parquet, ".csv": read_csv}


# ------------------------------------------------------------------------------------------ the hub
def read_hub(name: str, for_training: bool):
    """The rows of a benchmark or `org/name[:config][@split]`, from the hub or its cache."""
    full, _, split = BENCHMARKS.get(name, name).partition("@")
    repo, _, config = full.partition(":")
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repo):
        raise SystemExit(
            f"There is no data set '{shown(name, 80)}': give a file ({', '.join(READERS)}), "
            f"a hub id (org/name), or one of {', '.join([*BUILTIN, *BENCHMARKS, *GROUPS])}.")
    ask_hub(repo)
    splits = load_from_hub(repo, config or None)
    wanted = [split] if split else ["train"] if for_training else ["test", "train"]
    found = next((name for name in wanted if name in splits), None)
    if not found:
        asked_for, there = shown(" or ".join(wanted)), shown(", ".join(splits))
        raise SystemExit(f"{repo} has no split {asked_for}, only {there}: name one, as in "
                         f"{repo}@{shown(next(iter(splits)))}.")
    rows = splits[found]
    kinds = getattr(rows, "features", None)
    return with_short_floats(rows, kinds.arrow_schema) if kinds else rows


def ask_hub(repo: str, kind: str = "dataset") -> None:
    """Raises SystemExit if the hub does not know a data set or a model.

    If it does not answer, only this machine's cache is used from here on, and a line says so: the
    hub's own libraries would try again for minutes.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        getattr(huggingface_hub.HfApi(), f"{kind}_info")(repo, timeout=10)
    except errors.RepositoryNotFoundError:
        raise SystemExit(
            f"The hub has no {kind} {repo}: check its name, or run `hf auth login`.") from None
    except errors.OfflineModeIsEnabled:  # HF_HUB_OFFLINE=1, or an earlier question failed
        pass
    except Exception as error:  # no network, no name service, time-out, busy, a proxy's page
        print(f"the hub does not answer ({shown(error) or type(error).__name__}): only what is in "
              "this machine's cache is used")
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def load_from_hub(repo: str, config: str | None) -> dict:
    """Split name -> rows."""
    import datasets

    try:
        return datasets.load_dataset(repo, config)
    except Exception as error:
        why = shown(f"{type(error).__name__}: {' '.join(str(error).split())}", 400)
        raise SystemExit(
            f"{repo} could not be loaded: {why}. (Write a config as {repo}:CONFIG. Without a hub, "
            "use your own --data file.jsonl, or --data builtin.)") from None


# --------------------------------------------------------------------------------- what a row means
# In a key, a dot reaches into a nested column; case and spaces around it make no difference.
PROBLEM_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("gt", "answer", "final_answer", "reward_model.ground_truth", "solution")
CHAT_TURN = re.compile(r"""  # (role, text) in a prompt that was already rendered for Qwen or Llama
    (?: <\|im_start\|>(\w+) | <\|start_header_id\|>(\w+)<\|end_header_id\|> ) \n+ (.*?)
    (?: <\|im_end\|> | <\|eot_id\|> | (?=<\|im_start\|>|<\|start_header_id\|>) | \Z )
    """, re.DOTALL | re.VERBOSE)
READ_TOO = ("", "id", "level", "difficulty", *ANSWER_KEYS)  # "": spreadsheets' row numbers
# Instructions around published problems, which a template may say a second time.
AT_THE_START = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.")
AT_THE_END = (
    'Remember to put your answer on its own line after "Answer:"',
    "Let's think step by step and output the final answer within \\boxed{}",
    "Please reason step by step, and put your final answer within \\boxed{}")


def find_problem(row: dict, key: str = "") -> str:
    """The first problem column (or the named one) that is not empty; or ""."""
    text = problem_text(lookup(row, problem_key(row, key)))  # as it is there
    story = "" if key else plain(lookup(row, "Body"))  # SVAMP asks its question apart
    return f"{story} {text}" if story and text else text


def problem_key(row: dict, key: str = "") -> str:
    """The name of that column."""
    keys = [key] if key else PROBLEM_KEYS
    return next((k for k in keys if problem_text(lookup(row, k)).strip()), "")


def find_gold(row: dict, key: str = "") -> str:
    """The first gold column (or the named one) that is not empty, normalised; or ""."""
    for k in [key] if key else ANSWER_KEYS:
        gold = gold_text(lookup(row, k))
        worked_out = k == "solution" and (len(gold) > 100 or "\n" in gold)  # and without a box
        if gold and not worked_out:
            return gold
    return ""


def unread_columns(row: dict, question: str = "", answer: str = "") -> list[str]:
    """The columns that hold something which is not problem, gold, level or id."""
    keys = [problem_key(row, question), answer, *READ_TOO]
    keys += [] if question else ["Body"]
    read = {name.strip().lower() for key in keys for name in (key, key.partition(".")[0])}
    return [str(name) for name, value in row.items()
            if value not in (None, "", [], {}) and str(name).strip().lower() not in read]


def shown_columns(row: dict, source: str) -> dict:
    """The columns that the text of a .jinja file names; all, if it may use others too."""
    one_column = r"""\.\s*(?!items\b|keys\b|values\b|get\b)\w | (\.\s*get\s*\(|\[)\s*['"]"""
    if re.search(rf"\brow\b (?!\s*({one_column}))", source, re.VERBOSE):
        return row
    return {name: value for name, value in row.items()
            if re.search(rf"(?<!\w){re.escape(str(name))}(?!\w)", source)}


def require_columns(names, shows: str, source: str) -> None:
    """Raises SystemExit for a column that a .jinja file names but that is not there."""
    named = re.findall(r"\brow(?:\.|\[['\"])(\w+)", shows)
    missing = [name for name in named if name not in names and not hasattr(dict, name)]
    if missing and not re.search(r"\bfor row in\b", shows):  # Jinja would show nothing
        raise SystemExit(f"--template shows row.{shown(missing[0])}, but {shown(source)} has no "
                         f"such column: its columns are {shown(', '.join(map(str, names)), 1000)}.")


def other_turns(row: dict, question: str = "") -> list[tuple[str, str]]:
    """(role, text) of the turns around the problem, where its column holds a chat."""
    turns = turns_in(lookup(row, problem_key(row, question)))
    last = max((place for place, (role, _) in enumerate(turns) if role == "user"), default=None)
    return [turn for place, turn in enumerate(turns) if place != last and turn[1].strip()]


def lookup(row: dict, key: str):
    """Value of a column or of a nested one (a.b), whatever its case; None if there is none."""
    if not key:
        return None
    names = {str(name).strip().lower(): name for name in row} | {name: name for name in row}
    name = key if key in names else key.strip().lower()
    if name in names:
        return row[names[name]]
    head, _, rest = key.partition(".")
    inner = lookup(row, head) if rest else None
    return lookup(inner, rest) if isinstance(inner, dict) else None


def plain(value) -> str:
    """`text_of` without white space around it."""
    return text_of(value).strip()


def text_of(value) -> str:
    """Text of a scalar, "" for anything else."""
    if isinstance(value, bytes):  # a parquet column of text that does not say so
        value = value.decode(errors="surrogateescape")
    if value is None or isinstance(value, (list, dict)):
        return ""
    if isinstance(value, float | Decimal):
        return number_text(str(value)) if Decimal(value).is_finite() else ""
    text = str(value)
    return text.removesuffix(" 00:00:00") if isinstance(value, datetime) else text  # a day


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
    """A string, or of a list of turns or a rendered chat the last user turn."""
    asked = [text for role, text in turns_in(value) if role == "user"]
    return [text_of(value), *asked][-1]


def without_instruction(text: str) -> str:
    """A problem's text without the instructions of published sets on how to answer."""
    text = text.strip().removeprefix(AT_THE_START).strip()
    for instruction in AT_THE_END:
        bare = text.removesuffix(".")
        if bare.endswith(instruction):
            text = bare.removesuffix(instruction).strip()
    return text


def gold_text(value) -> str:
    r"""`so #### 12` -> 12; `hence \boxed{x}.` -> x; ["a", "b"] -> a, b; `$\pi$.` -> \pi.

    After the last `####` the line counts, as in GSM8K; beside a box that is only a heading.
    """
    if isinstance(value, list):
        return ", ".join(filter(None, map(plain_gold, value)))
    return plain_gold(value)


def plain_gold(value) -> str:
    text = plain(value)
    boxes = find_boxes(text)
    if boxes:
        text = boxes[-1][2] or ""
    elif "####" in text:
        text = text.rsplit("####", 1)[1].strip().partition("\n")[0]
    if re.fullmatch(r"\\?\$\s*[\d.,]+\s*m", text):
        return text  # millions, not meters
    text = re.sub(r"\\?\$", "", text).strip().rstrip(".").strip()
    is_number = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,9}", text)  # as in a .csv file
    return number_text(text) if is_number else text
