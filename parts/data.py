r"""The problems of a run: read, sifted, held out or trained on, and in which order.

    train, held_out = load_data(config, tokenizer, grader)    # with prompts
    problems = load_problems("gsm8k")     # or org/name:config@split, my.jsonl, builtin, ...

A file is .jsonl, .json (a list), .csv or .parquet; other names are data sets on the hub, of which
no code is run. A row's problem and gold are in the first column of PROBLEM_KEYS and ANSWER_KEYS
that is not empty, or in those of --columns. A printed line per set says what was read and dropped.
"""
import csv
import hashlib
import json
import os
import random
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from models.problems import BUILTIN
from parts.models import SMOLLM, TINY, ask_hub
from parts.prompts import add_prompts
from parts.text import FEW, counted, shown
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
GROUPS = {  # one name for several sets, with the weights of the published weighted average
    "reinforce-ada": {
        "ra-math500": 500, "ra-minerva": 272, "ra-olympiadbench": 675, "ra-aime-like": 230},
}
FILES = (".jsonl", ".json", ".csv", ".parquet")
MEASURED = ("minerva", "ra-minerva")  # their golds are measured values, so close answers are right
HELD_OUT = "held-out"  # as --eval-data, for a share of the training data
HELD_OUT_SHARE = 0.1
BUILTIN_COUNT = {"train": 6000, "test": 240}
PROBLEM_KEYS = ("problem", "question", "prompt", "messages")
ANSWER_KEYS = ("gt", "answer", "final_answer", "reward_model.ground_truth", "solution")
SHORT = 30  # letters and digits; with fewer, two different problems may have the same ones
# Published sets put one of these around a problem; they are ignored when problems are compared.
INSTRUCTIONS = re.compile("|".join(map(re.escape, (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
    "Let's think step by step and output the final answer within \\boxed{}.",
    "Please reason step by step, and put your final answer within \\boxed{}."))))


@dataclass
class Problem:
    problem: str  # the text as the data has it
    answer: str  # gold; may be empty if --reward needs none
    id: str  # source/split/row, unique among all problems of a run
    source: str  # its data set
    level: str = ""  # difficulty, if the data set has it
    prompt: str = ""  # the model's input, set by prompts.add_prompts
    prompt_ids: list[int] = field(default_factory=list)
    row: dict = field(default_factory=dict)  # all columns, if --reward needs them


def load_data(config, tokenizer, grader) -> tuple[list[Problem], list[Problem], str]:
    """(training problems, held-out problems, their digest). The two share no problem."""
    train, held_out = load_train_and_held_out(
        config.data, config.eval_data, eval_questions=config.eval_questions, **keys_of(config))
    digest_of_both = digest(train, held_out)
    check_readable(config.model, train, refuse=not config.reward)
    train, held_out = (
        add_prompts(problems, tokenizer, config.template, config.max_prompt_tokens)
        for problems in (train, held_out))
    if not config.reward:
        check_golds(held_out, grader)
        train = check_golds(train, grader, drop=True)
    if config.batch_prompts > len(train):
        print(f"data: a step takes {config.batch_prompts} prompts (--batch-prompts), but only "
              f"{len(train)} are there to train on, so a step repeats some of them")
    print(f"the first prompt, as the model sees it: {train[0].prompt!r}")
    print(f"held out: {counted(len(held_out), 'problem')}, {counted(config.eval_k, 'answer')} "
          f"each; avg@{config.eval_k} is their mean reward, with its 95 % interval in brackets"
          + (" (too few to see progress)" if len(held_out) < FEW else ""))
    return train, held_out, digest_of_both


# --------------------------------------------------------------------------------------- rows
def expand(names: str) -> list[tuple[str, int | None]]:
    """`gsm8k,reinforce-ada` -> [(gsm8k, None), (ra-math500, 500), ...]; None: weight = size."""
    return [pair for name in names.split(",") for pair in GROUPS.get(name, {name: None}).items()]


def is_file(name: str) -> bool:
    return Path(name).suffix.lower() in FILES


def is_own(names: str) -> bool:
    """Whether one of these sets is a file or on the hub, so that --columns can apply to it."""
    return any(name not in (HELD_OUT, *BUILTIN, *BENCHMARKS) for name, _ in expand(names))


def require_sets(*flags: str | None) -> None:
    """Raises SystemExit for a missing file, and for a name that no set can have. Reads no rows."""
    for name, _ in (pair for flag in filter(None, flags) for pair in expand(flag)):
        if is_file(name):
            if not os.path.isfile(name):
                raise SystemExit(f"There is no file {shown(name)}.")
        elif name not in (HELD_OUT, *BUILTIN):
            hub_id(name)


def read_file(name: str) -> list[dict]:
    """All rows of a file."""
    path = Path(name)
    try:
        if path.suffix.lower() == ".parquet":
            from pyarrow.parquet import read_table

            return read_table(path).to_pylist()
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".csv":
                return list(map(require_whole, csv.DictReader(file, strict=True)))
            if path.suffix.lower() == ".json":
                return json.load(file)
            return [json.loads(line) for line in file if line.strip()]
    except Exception as error:  # Arrow's errors have no common class
        raise SystemExit(f"Cannot read {shown(name)}: {shown(error, 400)}") from None


def require_whole(row: dict) -> dict:
    """A row of a .csv. With an unquoted comma in a problem, its gold would be another column."""
    if None in row:
        raise ValueError(f"more cells than the header in {row}: quote texts with a comma")
    return row


def read_hub(name: str, for_training: bool):
    """The rows of a benchmark or `org/name[:config][@split]`, from the hub or its cache."""
    import datasets

    repo, config, split = hub_id(name)
    ask_hub(repo)
    try:
        stored = datasets.load_dataset(repo, config or None)
    except Exception as error:
        raise SystemExit(f"{repo} could not be loaded: {shown(error, 400)}") from None
    splits = [split] if split else ["train"] if for_training else ["test", "train"]
    for split in splits:
        if split in stored:
            return stored[split]
    raise SystemExit(f"{repo} has no split {' or '.join(splits)}, only {', '.join(stored)}: name "
                     f"one as {repo}@SPLIT.")


def hub_id(name: str) -> tuple[str, str, str]:
    """(org/name, config, split) of a benchmark or hub data set; "" for a part that is not given."""
    full, _, split = BENCHMARKS.get(name, name).partition("@")
    repo, _, config = full.partition(":")
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repo):
        raise SystemExit(
            f"There is no data set '{shown(name, 80)}': give a file ({', '.join(FILES)}), "
            f"a hub id (org/name), or one of {', '.join([*BUILTIN, *BENCHMARKS, *GROUPS])}.")
    return repo, config, split


# --------------------------------------------------------------------------------- problem and gold
def find(row: dict, keys, text_of) -> tuple[str, str]:
    """(column, text) of the first of these columns that is not empty. a.b is nested."""
    for key in keys:
        value = row
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if text := text_of(value):
            return key, text
    return "", ""


def problem_text(value) -> str:
    """The text of a problem; of a list of chat turns the last one of the user."""
    if isinstance(value, list):
        value = next((turn["content"] for turn in reversed(value) if turn["role"] == "user"), "")
    return value if isinstance(value, str) and value.strip() else ""


def gold_text(value) -> str:
    r"""`so #### 12` -> 12; `hence \boxed{x}.` -> x; `$\pi$.` -> \pi; 27.0 -> 27; [a, b] -> a, b."""
    if isinstance(value, list):
        return ", ".join(filter(None, map(gold_text, value)))
    if isinstance(value, float):  # a float32 of a .parquet is 1234.56 again, not 1234.56005859375
        value = str(np.float32(value)) if np.float32(value) == value else str(value)
        return value.removesuffix(".0")
    text = str(value).strip() if isinstance(value, str | int) else ""
    boxed = extract_answer(text)
    if boxed is not None:
        return boxed
    text = text.rpartition("####")[2].strip() if "####" in text else text
    return "" if "\n" in text else text.strip("$").rstrip(".").strip("$")


def problem_of(row: dict, place: str, source: str, columns: str, whole: bool) -> tuple:
    """(the problem of a row, names of its two columns)."""
    question, _, answer = columns.partition(",")
    asked, problem = find(row, [question] if question else PROBLEM_KEYS, problem_text)
    given, gold = find(row, [answer] if answer else ANSWER_KEYS, gold_text)
    if asked == "question" and row.get("Body"):  # SVAMP has its story in another column
        problem = f"{row['Body'].strip()} {problem}"
    level = str(row.get("level", row.get("difficulty", "")))
    return Problem(problem, gold, f"{source}/{place}", source, level,
                   row=json.loads(json.dumps(row, default=str)) if whole else {}), (asked, given)


# ---------------------------------------------------------------------------------------- sets
def keys_of(config) -> dict:
    """columns: "QUESTION,ANSWER" of files and hub data sets, because those of other sets are fixed.
    whole: each problem keeps all its columns for the reward, and needs no gold.
    """
    return dict(columns=config.columns, whole=bool(config.reward))


def load_problems(name: str, **how) -> list[Problem]:
    """All problems of `load_sets`, one set after the other."""
    return sum(load_sets(name, **how), [])


def load_sets(name: str, *, for_training: bool = True, limit: int | None = None,
              columns: str = "", whole: bool = False) -> list[list[Problem]]:
    """Each set of `name`: benchmarks, groups, hub data sets, files or "builtin", joined by commas.

    `for_training` chooses the default split, which is train, or test for evaluation (train if there
    is no test). In training, a problem of an earlier set is dropped from a later one. `limit`: take
    only this many problems of each set, the first ones.
    """
    split, seen, sets, sources = "train" if for_training else "test", {}, [], Counter()
    for part, _ in expand(name):
        if part in BUILTIN:  # they have no flaws, and short texts may repeat
            rows = BUILTIN[part](split, limit or BUILTIN_COUNT[split])
            sets.append([replace(problem_of(row, "", part, "", whole)[0], id=row["id"])
                         for row in rows])
            continue
        rows = read_file(part) if is_file(part) else read_hub(part, for_training)
        source = Path(part).name if is_file(part) else part  # wherever the file lies
        sources[source] += 1
        source += f"#{sources[source]}" if sources[source] > 1 else ""
        sets.append(sift(rows, source, split, columns if is_own(part) else "", limit,
                         seen if for_training else {}, whole))
    return sets


def sift(rows, source: str, split: str, columns: str, limit, seen: dict,
         whole: bool) -> list[Problem]:
    """The rows' problems. Prints how many were dropped, and which columns nobody reads."""
    problems, dropped, read, names = [], Counter(), {""}, {}
    for place, row in enumerate(rows):
        problem, used = problem_of(row, f"{split}/{place}", source, columns, whole)
        names |= dict.fromkeys(row)
        read |= {key.partition(".")[0] for key in used}
        if reason := flaw(problem, seen):
            dropped[reason] += 1
        else:
            problems.append(problem)
        if len(problems) == limit:
            break
    why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    columns = shown(", ".join(map(str, names)), 400)
    if not problems:
        raise SystemExit(f"No row of {shown(source)} can be used ({why or 'it has none'}). Its "
                         f"columns are {columns}: use --columns QUESTION,ANSWER (a nested one as "
                         "parent.child); without golds, use --reward FILE.py:FUNCTION.")
    print(f"data: {shown(source)}: {counted(len(problems), 'problem')}"
          f"{f' (dropped {why})' if why else ''}, from the columns "
          f"{', '.join(sorted(read - {''}))} of {columns}")
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
def load_train_and_held_out(
    data: str, eval_data: str, *, eval_questions: int = 100, **keys,
) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) problems, which have no problem and no id in common.

    `eval_data`: HELD_OUT, or sets, of which the first `eval_questions` problems each are taken.
    """
    train = load_problems(data, **keys)
    if eval_data == HELD_OUT:
        train, held_out = hold_out(train, eval_questions)
        print(f"data: {len(held_out)} of the {len(train) + len(held_out)} problems held out for "
              "evaluation, by a hash of their texts: about a tenth, and at most --eval-questions "
              "(--eval-data names another set instead)")
    else:
        held_out = load_problems(eval_data, for_training=False, limit=eval_questions, **keys)
    apart = drop_overlap(train, held_out)
    if len(apart) < len(train):
        print(f"data: dropped {counted(len(train) - len(apart), 'training problem')} that the "
              "held-out set contains, too (compared by letters and digits)")
    if not apart:
        raise SystemExit(f"Nothing is left of {shown(data)} to train on, because all of it is in "
                         "the held-out set, too. Name another set with --eval-data.")
    return apart, held_out


def hold_out(problems: list[Problem], most: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out): about a tenth is held out, at least one problem and at most `most`.

    A hash of each text decides. If rows are added, no trained problem becomes held out. As long as
    fewer than `most` are held out, no held-out problem becomes trained (but in a set of a few
    problems, of which none has a low hash, a new one can take the place of the only one).
    """
    ranked = sorted(problems, key=fingerprint)
    count = sum(int(fingerprint(problem), 16) < HELD_OUT_SHARE * 2**256 for problem in ranked)
    held_out = ranked[:max(1, min(count, most))]
    chosen = {problem.id for problem in held_out}
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
    return [problem for problem in train if not held & likenesses(problem)]


def digest(*sets: list[Problem]) -> str:
    """Equal for the same questions and golds in the same order, whatever the prompts."""
    rows = [[(p.id, p.problem, p.answer) for p in problems] for problems in sets]
    counts = " + ".join(str(len(problems)) for problems in sets)
    return f"{counts} problems, {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]}"


# ----------------------------------------------------------------------- what cannot be learnt from
def check_golds(problems: list[Problem], grader, drop: bool = False) -> list[Problem]:
    """Count golds that math-verify cannot read. For training they are `drop`ped, if others are
    left. In an evaluation all stay, and only the same string is right."""
    readable = grader.check_golds([problem.answer for problem in problems])
    odd = [problem.answer for problem, is_sound in zip(problems, readable) if not is_sound]
    if odd:
        print(f"data: {len(odd)} of {counted(len(problems), 'gold')} cannot be read by "
              f"math-verify, such as {shown(repr(odd[0]), 80)}")
    sound = [problem for problem, is_sound in zip(problems, readable) if is_sound]
    return sound if drop and sound else problems


def check_readable(model: str, problems: list[Problem], refuse: bool) -> None:
    """Refuse (or warn of) problems if most have characters that a built-in model does not know."""
    if model not in TINY:
        return
    built_in = "builtin-skills" if model == "tiny-skills" else "builtin"
    known = {*"".join(row["problem"] for row in BUILTIN[built_in]("train", 500))}
    foreign = [p.problem for p in problems if not {*p.problem.strip()} <= known]
    if 2 * len(foreign) > len(problems):
        why = (f"{model} reads only problems of --data {built_in}, and not such as "
               f"{shown(repr(foreign[0]), 80)}: use --model {SMOLLM} or another real model.")
        if refuse:
            raise SystemExit(why)
        print(f"WARNING: {why}")


# ---------------------------------------------------------------------------------------- the order
class Stream:
    """An endless stream of problems. Seed and epoch decide the order in each epoch.

    A resumed run only needs `cursor`, the number of problems taken so far.
    """

    def __init__(self, problems: list, seed: int):
        self.problems, self.seed, self.cursor = problems, seed, 0
        self.epoch, self.order = None, []

    def take(self, count: int) -> list:
        taken = []
        for place in range(self.cursor, self.cursor + count):
            epoch, position = divmod(place, len(self.problems))
            if epoch != self.epoch:
                rng = random.Random(f"order {self.seed} {epoch}")
                self.epoch, self.order = epoch, rng.sample(self.problems, len(self.problems))
            taken.append(self.order[position])
        self.cursor += count
        return taken

    def next(self):
        return self.take(1)[0]
