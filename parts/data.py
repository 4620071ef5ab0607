r"""Turns the rows of files, data sets or built-in generators into the problems of a run.

    train, held_out = load_data(config, model, grader)    # with prompts
    problems = load_problems("gsm8k")     # or org/name:config@split, my.jsonl, builtin, ...

A file is .jsonl, .json (a list), .csv or .parquet. Other names are data sets on the hub, of which
no code is run. A row's problem and gold are in the first column of PROBLEM_KEYS and ANSWER_KEYS
that is not empty, or in those of --columns. A printed line per set says what was read and dropped.
"""
import ast
import contextlib
import csv
import hashlib
import json
import math
import random
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from models.problems import BUILTIN
from parts.models import SMOLLM, TINY, ask_hub
from parts.prompts import BOXED, STEP_BY_STEP, add_prompts
from parts.text import counted, shown
from rewards import extract_answer

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
GROUPS = {"reinforce-ada": ["ra-math500", "ra-minerva", "ra-olympiadbench", "ra-aime-like"]}
FILES = (".jsonl", ".json", ".csv", ".parquet")
MEASURED = ("minerva", "ra-minerva")  # their golds are measured values, so close answers are right
HELD_OUT = "held-out"  # as --eval-data, for a share of the training data
HELD_OUT_SHARE = 0.1
BUILTIN_COUNT = {"train": 6000, "test": 240}
PROBLEM_KEYS = ("problem", "question", "prompt", "messages")
ANSWER_KEYS = ("gt", "answer", "final_answer", "reward_model.ground_truth", "solution")
LONGEST = 200  # characters; a longer text without a box is a solution, but no gold
SHORT = 30  # letters and digits; with fewer, two different problems may have the same ones
# Published sets put one of these around a problem; they are ignored when problems are compared.
INSTRUCTIONS = re.compile("|".join(map(re.escape, (
    BOXED, STEP_BY_STEP, 'Remember to put your answer on its own line after "Answer:".',
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."))))
# What JSON makes of a single backslash. Here, too, `\theta` means a tab and `heta`. The last two
# lines count only in a formula, because in a sound text a line may begin with `u = 3`.
BROKEN_TEX = re.compile(r"""
    (?P<surely> [\x00-\x08\x0b\x0c\x0e-\x1f\x7f]
        | (?: \theta | \times | \text(bf|it|rm|tt|style)? | \tau | \t(frac|binom) | \tag(?=\{)
            | \triangle(left|right)?(eq)? | \tilde | \therefore | \thinspace
            | \neq | \nabla | \not(in|ag)? | \n(geq|leq)(slant)? | \nsubseteq | \nonumber | \natural
            | \newline
            | \rho | \right(arrow|leftharpoons)? | \rfloor | \rceil | \rbrac[ek] | \r[vV]ert
          ) (?![A-Za-z]))
    | (?: \tanh? | \to | \top | \nu | \ne | \neg | \nmid | \nsim | \ncong | \ngtr
        | \rangle | \root | \rm ) (?![A-Za-z])
    """, re.VERBOSE)
DOLLAR = re.compile(r"(?<!\\)\$")  # that begins or ends a formula
HTML_ENTITY = re.compile(r"&(?:#\d+|#x[0-9a-fA-F]+|[A-Za-z]{2,}\d*);")
POWER_OF_TEN = re.compile(r"([-+]?[\d.]+)[eE]([-+]?\d+)")
TEXT_OF_A_LIST = re.compile(
    r"""\[\s*(?: ["'].*["'] | [^\s,]* | [-+.\d]+(\s+[-+.\d]+)+ )\s*\]""", re.DOTALL | re.VERBOSE)


@dataclass
class Problem:
    problem: str  # the text as the data has it
    answer: str  # gold; may be empty if --reward needs none
    id: str  # such as source/split/row, unique among all problems of a run
    source: str  # its data set
    level: str = ""  # difficulty, if the data set has it
    prompt: str = ""  # the model's input, set by prompts.add_prompts
    prompt_ids: list[int] = field(default_factory=list)
    row: dict = field(default_factory=dict)  # all columns, if --reward needs them


def load_data(config, model, grader) -> tuple[list[Problem], list[Problem]]:
    """(training problems, held-out problems), with prompts. The two share no problem and no id."""
    columns, whole = config.columns, bool(config.reward)
    train = load_problems(config.data, columns=columns, whole=whole)
    if config.eval_data == HELD_OUT:
        train, held_out = hold_out(train, config.eval_questions)
    else:
        held_out = load_problems(config.eval_data, for_training=False, columns=columns,
                                 limit=config.eval_questions, whole=whole)
    train = drop_overlap(train, held_out)
    if not train:
        raise SystemExit(f"All of {shown(config.data)} is held out: use another --eval-data.")
    train, held_out = (
        add_prompts(problems, model, config.template, config.max_prompt_tokens)
        for problems in (train, held_out))
    if not config.reward:
        check_golds(held_out, grader)
        train = check_golds(train, grader, drop=True)
        if config.model in TINY and re.search(r"[^\W\d_]{3}", train[0].problem):  # a word
            raise SystemExit(
                f"{config.model} reads only problems of --data builtin and builtin-skills, and not "
                f"{shown(repr(train[0].problem), 80)}: use --model {SMOLLM} or another real model.")
    print(f"the first prompt, as the model sees it: {train[0].prompt!r}")
    return train, held_out


# ----------------------------------------------------------------------------------- names of sets
def expand(names: str) -> list[str]:
    """`gsm8k,reinforce-ada` -> [gsm8k, ra-math500, ...]. Raises OSError if a file is missing."""
    sets = [each for name in names.split(",") for each in GROUPS.get(name, [name])]
    for file in filter(is_file, sets):
        Path(file).stat()
    return sets


def is_file(name: str) -> bool:
    return Path(name).suffix.lower() in FILES


def is_own(names: str) -> bool:
    """Whether one of these sets is a file or on the hub, so that --columns can apply to it."""
    return any(name not in (HELD_OUT, *BUILTIN, *BENCHMARKS) for name in expand(names))


# --------------------------------------------------------------------------------------------- rows
def read_file(name: str) -> list[dict]:
    """All rows of a file. SystemExit with the line and the words of its reader if it cannot."""
    path, rows, line = Path(name), [], 0
    try:
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet  # the labs of the course work without it

            return rows_of_table(parquet.read_table(path))
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".csv":
                reader = csv.DictReader(file, strict=True)
                for row in reader:
                    line = reader.line_num
                    if None in row:  # its gold may stand in another column
                        raise ValueError("more cells than the header: quote texts with a comma")
                    rows.append(row)
            elif path.suffix.lower() == ".json":
                rows = json.load(file)
            else:
                for line, text in enumerate(file, 1):
                    rows += [json.loads(text)] if text.strip() else []
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("every problem must be a JSON object")
        return rows
    except Exception as error:  # Arrow's errors have no common class
        where = f" at line {line}" if line else ""
        words = getattr(error, "msg", error) if line else error  # JSON would say "line 1"
        raise SystemExit(f"Cannot read {shown(name)}{where}: {type(error).__name__}, "
                         f"{shown(words, 400)}") from None


def rows_of_table(table) -> list[dict]:
    """The rows of an Arrow table. A float32 of 1234.56 would become 1234.56005859375 in Python."""
    for i, column in enumerate(table.schema):
        if str(column.type) == "float":
            table = table.set_column(i, column.name, table[i].cast("string").cast("float64"))
    return table.to_pylist()


def read_hub(name: str, for_training: bool) -> list[dict]:
    """The rows of a benchmark or `org/name[:config][@split]`, from the hub or its cache."""
    full, _, split = BENCHMARKS.get(name, name).partition("@")
    repo, _, config = full.partition(":")
    if repo.count("/") != 1:
        raise SystemExit(
            f"There is no data set '{shown(name, 80)}': give a file ({', '.join(FILES)}), "
            f"a hub id (org/name), or one of {', '.join([*BUILTIN, *BENCHMARKS, *GROUPS])}.")
    ask_hub(repo)
    import datasets  # only now, because it reads HF_HUB_OFFLINE when it is imported

    try:
        stored = datasets.load_dataset(repo, config or None)
    except Exception as error:
        raise SystemExit(f"{repo} could not be loaded: {shown(error, 400)}") from None
    splits = [split] if split else ["train"] if for_training else ["test", "train"]
    for split in splits:
        if split in stored:
            return rows_of_table(stored[split].with_format("arrow")[:])
    raise SystemExit(f"{repo} has no split {' or '.join(splits)}, only {', '.join(stored)}: name "
                     f"one as {repo}@SPLIT.")


# ------------------------------------------------------------------------------------------- a row
def problem_of(row: dict, id: str, source: str, columns: str = "", whole: bool = False) -> Problem:
    """The problem of a row. Raises ValueError for broken TeX."""
    question, _, answer = columns.partition(",")
    problem = find(row, [question] if question else PROBLEM_KEYS, problem_text)
    gold = find(row, [answer] if answer else ANSWER_KEYS, gold_text)
    story = find(row, ["Body"], problem_text)  # as in SVAMP
    if problem and story and not question:
        problem = f"{story.strip()} {problem}"
    level = str(row.get("level", ""))
    all_columns = json.loads(json.dumps(row, default=str)) if whole else {}
    return Problem(problem, gold, id, source, level, row=all_columns)


def find(row: dict, keys, text_of) -> str:
    """The text of the first of these columns that is not empty. a.b is nested.

    Upper and lower case are the same, because SVAMP and others begin names with a capital.
    """
    for key in keys:
        value = row
        for name in key.lower().split("."):
            columns = value if isinstance(value, dict) else {}
            value = {str(column).lower(): columns[column] for column in columns}.get(name)
        if text := text_of(value):
            return text
    return ""


def problem_text(value) -> str:
    """The text of a problem; of a list of chat turns the last one of the user."""
    if isinstance(value, list):
        turns = [turn for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
        value = turns[-1].get("content") if turns else ""
    return require_sound(value) if isinstance(value, str) and value.strip() else ""


def gold_text(value) -> str:
    r"""`so #### 12` -> 12; `hence \boxed{x}.` -> x; `$\pi$.` -> \pi; 27.0 -> 27; [a, b] -> a, b.

    A number such as 1e+23 becomes 1 \times 10^{23}, because no answer is written so.
    """
    value = as_list(value) if isinstance(value, str) else value
    if isinstance(value, list):
        return ", ".join(filter(None, map(gold_text, value)))
    if isinstance(value, float):
        value = str(value).removesuffix(".0") if math.isfinite(value) else ""
    text = str(value) if isinstance(value, str | int) else ""
    if (boxed := extract_answer(text)) is not None:  # it has lost white space, as the \f of \frac
        boxed = re.findall(rf"\{{(\s*{re.escape(boxed)})", text)[-1]
        return require_sound(boxed, is_formula=True).strip()
    text = text.rpartition("####")[2]
    text = require_sound(text, is_formula="\n" not in text.strip()).strip()
    if "\n" in text or len(text) > LONGEST:
        return ""
    text = text.strip("$").rstrip(".").strip("$")
    if number := POWER_OF_TEN.fullmatch(text):
        return rf"{number[1]} \times 10^{{{int(number[2])}}}"
    return text


def as_list(text: str) -> str | list:
    """The list `['70']` or `[np.float64(70.0)]`, as pandas writes it to a CSV file, or `['7' '8']`
    or `[7 8]`, as numpy writes it. Another text stays: `[0, 1]` is an interval.
    """
    plain = re.sub(r"\bnp\.\w+\(([^()]*)\)", r"\1", text.strip())
    if TEXT_OF_A_LIST.fullmatch(plain):
        texts = "'" in plain or '"' in plain
        gap = r"""(?<=["'])\s+(?=["'])""" if texts else r"(?<=[\d.])\s+(?=[-+.\d])"
        with contextlib.suppress(ValueError, SyntaxError):
            return ast.literal_eval(re.sub(gap, ", ", plain))
    return text


def require_sound(text: str, is_formula: bool = False) -> str:
    """`text`. Raises ValueError if it has a control character, or TeX with a single backslash."""
    for match in BROKEN_TEX.finditer(text):
        in_formula = is_formula or len(DOLLAR.findall(text, 0, match.start())) % 2
        if match["surely"] or in_formula or match.start() == 0:
            raise ValueError(f"has {match[0]!r} in {shown(repr(text), 80)}: write each backslash "
                             "of TeX twice in JSON (\\\\frac), and no other control characters")
    return text


# -------------------------------------------------------------------------------------------- sets
def load_problems(names: str, *, for_training: bool = True, limit: int | None = None,
                  columns: str = "", whole: bool = False) -> list[Problem]:
    """The problems of all sets: benchmarks, groups, hub data sets, files or "builtin", with commas.

    for_training: read the split train, otherwise test (train if there is no test). In training, a
    problem of an earlier set is dropped from a later one. limit: take only this many problems of
    each set, the first ones. columns: "QUESTION,ANSWER" of files and hub data sets, because those
    of other sets are fixed. whole: keep all columns for --reward, which needs no gold.
    """
    split, seen, problems, sources = "train" if for_training else "test", {}, [], Counter()
    for name in expand(names):
        if name in BUILTIN:  # they have no flaws
            rows = BUILTIN[name](split, limit or BUILTIN_COUNT[split])
            problems += [problem_of(row, row["id"], name, whole=whole) for row in rows]
            continue
        rows = read_file(name) if is_file(name) else read_hub(name, for_training)
        source = Path(name).name if is_file(name) else name  # wherever the file lies
        sources[source] += 1
        if sources[source] > 1:
            source += f"#{sources[source]}"
        problems += sift(rows, source, split, columns if is_own(name) else "", whole, limit,
                         seen if for_training else {})
    return problems


def sift(rows, source: str, split: str, columns: str, whole: bool, limit: int | None,
         seen: dict[str, str]) -> list[Problem]:
    """The problems of the rows. Prints how many are dropped, and a gold.

    Broken TeX in a file ends the program. In a data set on the hub nobody can mend it.
    """
    problems, dropped, row = [], Counter(), {}
    for place, row in enumerate(rows):
        try:
            problem = problem_of(row, f"{source}/{split}/{place}", source, columns, whole)
            reason = flaw(problem, seen)
        except ValueError as error:
            if is_file(source.partition("#")[0]):
                raise SystemExit(f"Row {place + 1} of {shown(source)} {error}.") from None
            reason = "with control characters"
        if reason:
            dropped[reason] += 1
            continue
        problems.append(problem)
        if len(problems) == limit:
            break
    why = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none"
    if not problems:
        columns = shown(", ".join(map(str, row)), 400) or "none"
        raise SystemExit(f"No row of {shown(source)} can be used (dropped: {why}). Its "
                         f"columns are {columns}: use --columns QUESTION,ANSWER (a nested one as "
                         "parent.child); without golds, use --reward FILE.py:FUNCTION.")
    print(f"data: {shown(source)}: {counted(len(problems), 'problem')} (dropped {why}); the first "
          f"gold is {shown(repr(problems[0].answer), 80)}")
    if odd := [match[0] for p in problems if (match := HTML_ENTITY.search(p.problem))]:
        print(f"WARNING: {counted(len(odd), 'problem')} of {shown(source)} with HTML entities, "
              f"such as {odd[0]}, which the model sees as they are")
    return problems


def flaw(problem: Problem, seen: dict[str, str]) -> str:
    """Why a problem is dropped; "" if it is not. `seen`: texts and their golds, extended here.

    Several published sets have each problem 32 or 100 times, so avg@32 would become avg@1024.
    """
    if not problem.problem:
        return "without a problem"
    if not (problem.answer or problem.row):
        return "without a gold answer"
    text = asked(problem)
    if text in seen:
        return "double" if seen[text] == problem.answer else "with another gold than before"
    seen[text] = problem.answer
    return ""


# ----------------------------------------------------------------------------------------- held out
def hold_out(problems: list[Problem], most: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out): about a tenth is held out, at least one problem and at most `most`.

    A hash of each text decides. If rows are added, no trained problem becomes held out. As long as
    fewer than `most` are held out, no held-out problem becomes trained, either.
    """
    ranked = sorted(problems, key=fingerprint)
    low = [p for p in ranked if int(fingerprint(p), 16) < HELD_OUT_SHARE * 2**256]
    held_out = low[:most] or ranked[:1]
    chosen = {problem.id for problem in held_out}
    print(f"data: {len(held_out)} of the {len(problems)} problems held out for evaluation, by a "
          "hash of their texts (--eval-data names another set instead)")
    return [problem for problem in problems if problem.id not in chosen], held_out


def fingerprint(problem: Problem) -> str:
    """A hash of the text alone, in hex, so that a corrected gold does not change the split.

    In a long text only letters and digits count, because a formula can be typeset in many ways. In
    a short text all signs count, or `7+15-4` and `71-5+4` would be the same.
    """
    text = letters_of(problem)
    if len(text) < SHORT:
        text += "=" + "".join(asked(problem).split())
    return hashlib.sha256(text.encode()).hexdigest()


def letters_of(problem: Problem) -> str:
    return "".join(char for char in asked(problem).casefold() if char.isalnum())


def asked(problem: Problem) -> str:
    """The text by which problems are compared: without instructions and double white space."""
    text = unicodedata.normalize("NFC", problem.problem)  # accents, as a Mac writes them
    return " ".join(INSTRUCTIONS.sub("", text).split())


def drop_overlap(train: list[Problem], held_out: list[Problem]) -> list[Problem]:
    """`train` without the problems that are also in `held_out`, even if they are typeset
    differently. For a short text, equal letters, digits and golds are enough."""
    def likenesses(problem: Problem) -> set[str]:
        return {fingerprint(problem), problem.answer and f"{letters_of(problem)}={problem.answer}"}

    held = {key for problem in held_out for key in likenesses(problem)} - {""}
    apart = [problem for problem in train if not held & likenesses(problem)]
    if len(apart) < len(train):
        print(f"data: dropped {counted(len(train) - len(apart), 'training problem')} that the "
              "held-out set contains, too (compared by letters and digits)")
    return apart


def digest(*sets: list[Problem]) -> str:
    """Equal for the same questions, golds and prompts in the same order."""
    rows = [[(p.id, p.problem, p.answer, p.prompt) for p in problems] for problems in sets]
    counts = " + ".join(str(len(problems)) for problems in sets)
    return f"{counts} problems, {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]}"


# ----------------------------------------------------------------------- what cannot be learnt from
def check_golds(problems: list[Problem], grader, drop: bool = False) -> list[Problem]:
    """Count golds that math-verify cannot read. For training they are `drop`ped, if others are
    left. In an evaluation all stay, and only the same string is right."""
    readable = grader.check_golds([problem.answer for problem in problems])
    odd = [problem.answer for problem, is_sound in zip(problems, readable) if not is_sound]
    if odd:
        drop &= len(odd) < len(problems)
        what_follows = "not trained on" if drop else "only the same string is right"
        print(f"data: {len(odd)} of {counted(len(problems), 'gold')} cannot be read by "
              f"math-verify, such as {shown(repr(odd[0]), 80)} ({what_follows})")
    return [problem for problem, is_sound in zip(problems, readable) if is_sound or not drop]


# ---------------------------------------------------------------------------------------- the order
class Stream:
    """An endless stream of problems. Seed and epoch decide the order in each epoch.

    A resumed run only needs `cursor`, the number of problems taken so far.
    """

    def __init__(self, problems: list, seed: int):
        self.problems, self.seed, self.cursor = problems, seed, 0
        self.epoch, self.order = None, []

    def next(self):
        epoch, position = divmod(self.cursor, len(self.problems))
        if epoch != self.epoch:
            rng = random.Random(f"order {self.seed} {epoch}")
            self.epoch, self.order = epoch, rng.sample(self.problems, len(self.problems))
        self.cursor += 1
        return self.order[position]

    def take(self, count: int) -> list:
        return [self.next() for _ in range(count)]
