"""Problems in: a benchmark, file or hub data set becomes a list of `Problem` with clean golds.

    problems = load_problems("gsm8k")     # or org/name:config@split, my.jsonl, builtin; by commas
    train, held_out = load_train_and_held_out("my.jsonl", eval_data="held-out")

sources.py reads rows and says what their columns mean; prompts.py turns problems into prompts. One
line per set says what was dropped and why. A user's mistakes end in a SystemExit of one sentence.
"""
import hashlib
import json
import random
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

from parts.folder import read_json, write_safely
from parts.models import SMOLLM, TINY
from parts.problems import BUILTIN
from parts.prompts import shown_by
from parts.sources import (
    BENCHMARKS, expand, find_gold, find_problem, is_file, other_turns, plain, problem_key,
    read_file, read_hub, require_columns, shown_columns, unread_columns, without_instruction)
from parts.text import counted, is_text, shown
from verifier.answers import is_one_value
from verifier.spelling import normalize

HELD_OUT = "held-out"  # as --eval-data: a share of the training data
HELD_OUT_SHARE = 0.1
OTHER_GOLD = "with another gold than the same text before"
NO_GOLD = "without a gold answer"
SHORT = 30  # letters and digits: below that, two problems may have the same by chance
BUILTIN_COUNT = {"train": 6000, "test": 240}
MADE_FOR_MATH_MODELS = ("RLHFlow/reinforce_ada", "agentica-org/DeepScaleR")  # evaluated on MATH-500


@dataclass
class Problem:
    problem: str  # the text as the data has it
    answer: str  # gold, normalised; may be empty where --reward needs none
    id: str  # source/split/row: unique among all problems of a run
    source: str  # the data set it came from
    level: str = ""  # difficulty, where the data set knows it
    prompt: str = ""  # what the model sees, after prompts.add_prompts
    prompt_ids: list[int] = field(default_factory=list)
    row: dict = field(default_factory=dict)  # with all columns, where --reward needs it
    shown: dict = field(default_factory=dict)  # the columns that a .jinja template shows

    @property
    def judged_by(self) -> str | dict:
        """What the grader is given: the whole row with --reward, otherwise the gold answer."""
        return self.row or self.answer


# -------------------------------------------------------------------------------- defaults by model
def default_data(model: str, small: bool, for_training: bool = True) -> str:
    """The data set a model is trained (or evaluated) on when none is named."""
    if model in TINY:
        return "builtin-skills" if model == "tiny-skills" else "builtin"
    if small:
        return "builtin-words"
    if not for_training:
        return "math500"
    if model.endswith("Qwen2.5-Math-1.5B"):  # it solves each of these in 1 to 5 of 16 attempts
        return "RLHFlow/reinforce_ada_simple_prompt_1-5b"
    return "agentica-org/DeepScaleR-Preview-Dataset"


def default_eval_data(data: str) -> str:
    """What a policy trained on `data` is evaluated on when nothing is named."""
    if data in BUILTIN:
        return data
    for_math = all(name.startswith(MADE_FOR_MATH_MODELS) for name in data.split(","))
    return "math500" if for_math else HELD_OUT


def default_template(model: str, small: bool, reward: str = "") -> str:
    """The prompt template that fits a model when none is named.

    With a user's own reward the prompt is the bare problem: it asks for no steps and no box.
    """
    if model in TINY or reward:
        return "chat"
    return "three-examples" if small else "reinforce-ada"


# ------------------------------------------------------------------------------------ several sets
def keys_of(config) -> dict:
    """columns: "QUESTION,ANSWER" of files and hub data sets; those of other sets are known.

    whole_rows: each problem keeps all its columns for the reward, and needs no gold.
    shows: the text of a .jinja template, for which each problem keeps the columns that it names.
    """
    return dict(columns=config.columns, whole_rows=bool(config.reward),
                shows=shown_by(config.template))


def load_problems(name: str, **how) -> list[Problem]:
    """All problems of `load_sets`, one set after the other."""
    return sum(load_sets(name, **how), [])


def load_sets(name: str, *, for_training: bool = True, limit: int | None = None,
              columns: str = "", **rows_for) -> list[list[Problem]]:
    """Each set of `name`: benchmarks, groups, hub data sets, files or "builtin", joined by commas.

    `for_training` chooses the split where none is named: train, or for evaluation test (train if
    there is no test). In training, a problem of an earlier set is dropped from a later one; in an
    evaluation each set stays whole. `limit`: at most so many problems, the first, of each set.
    `rows_for`: whole_rows and shows, as in `keys_of`.
    """
    sets, sources, seen, split = [], Counter(), {}, "train" if for_training else "test"
    for part, _ in expand(name):
        if part in BUILTIN:
            rows = BUILTIN[part](split, limit or BUILTIN_COUNT[split])
            require_columns(rows[0], rows_for.get("shows", ""), part)
            sets.append([replace(problem_of(row, part, **rows_for), id=row["id"])
                         for row in rows])  # made without flaws; a short text may come twice
            continue
        rows = read_file(part) if is_file(part) else read_hub(part, for_training)
        source = Path(part).name if is_file(part) else part
        sources[source] += 1  # of a second file of this name, reports and ids say so
        source += f"#{sources[source]}" * (sources[source] > 1)
        own = columns if is_own(part) else ""
        known = seen if for_training else {}
        sets.append(sift(rows, source, split, own, limit, known, **rows_for))
    return sets


def is_own(names: str) -> bool:
    """Whether one of these sets is a file or on the hub: --columns may name its columns."""
    known = ("auto", HELD_OUT, *BUILTIN, *BENCHMARKS)
    return any(name not in known for name, _ in expand(names))


# ---------------------------------------------------------------------------------- rows of one set
def sift(rows, source: str, split: str = "train", columns: str = "", limit: int | None = None,
         seen: dict | None = None, whole_rows: bool = False, shows: str = "") -> list[Problem]:
    """The rows' problems; a line says how many rows were dropped. SystemExit if none is left.

    `seen`: the problems that are there already (see `double_of`).
    """
    kept, dropped, names, seen = [], Counter(), {}, {} if seen is None else seen
    unread, turns, (question, _, answer) = {}, [], columns.partition(",")
    for index, row in enumerate(rows):
        names.update(dict.fromkeys(row))
        problem = problem_of(row, source, f"{split}/{index}", columns, whole_rows, shows)
        reason = flaw(problem) or double_of(problem, seen)
        if reason:
            dropped[reason] += 1
            continue
        kept.append(problem)
        unread.update(dict.fromkeys(unread_columns(row, question, answer)))
        turns.append((problem_key(row, question), other_turns(row, question)))
        if len(kept) == limit:
            break
    why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    if not kept:
        raise SystemExit(nothing_usable(source, why, dropped, names, columns))
    require_columns(names, shows, source)
    first = "the first " if len(kept) == limit else ""  # the rows after these were not read
    print(f"data: {shown(source)}: {counted(len(kept), 'problem')} of {first}"
          f"{counted(len(kept) + dropped.total(), 'row')}{f' (dropped {why})' if why else ''}")
    if source not in BENCHMARKS:
        seen = shown_columns(names, shows)
        report_unseen(source, [name for name in unread if not whole_rows and name not in seen],
                      [turn for turn in turns if turn[0].partition(".")[0] not in seen])
    return kept


def nothing_usable(source: str, why: str, dropped: Counter, names: dict, columns: str) -> str:
    """The sentence for a set without a problem that can be used."""
    if not why:
        return f"{shown(source)} is empty: it has no rows."
    sentence = f"No row of {shown(source)} can be used: {why}. "
    if set(dropped) <= {"double", OTHER_GOLD}:
        return sentence + "A set before it has all of its problems: leave it out."
    if " " in columns.strip() and "," not in columns:
        sentence += (f"--columns {shown(columns)} is one name: for two columns write "
                     "QUESTION,ANSWER with a comma. ")
    advice = "name the right ones with --columns QUESTION,ANSWER (a nested one as parent.child)"
    if NO_GOLD in dropped:
        advice += ", or judge without golds: --reward FILE.py:FUNCTION"
    return f"{sentence}Its columns are {shown(', '.join(map(str, names)), 1000)}: {advice}."


def report_unseen(source: str, unread: list[str], turns: list[tuple[str, list]]) -> None:
    """Prints the columns and the turns that do not reach the model, if there are any."""
    advice = "if it needs them, a .jinja file as --template can show {{ row.%s }} (docs/data.md)"
    if unread:
        word = "columns" if len(unread) > 1 else "column"
        print(f"data: {shown(source)}: the model does not see the {word} "
              f"{shown(', '.join(unread))}; {advice % shown(unread[0])}")
    others = [(key, found) for key, found in turns if found]
    if others:
        (key, found), *_ = others
        roles = Counter(shown(role, 20) for _, each in others for role, _ in each)
        counts = ", ".join(f"{count} {role}" for role, count in roles.items())
        print(f"data: {shown(source)}: the model does not see the other turns of "
              f"{counted(len(others), 'problem')} ({counts}), such as {shown(found[0][0], 20)}: "
              f"{shown(repr(found[0][1]), 80)}; {advice % shown(key)}")


def problem_of(row: dict, source: str, place: str = "", columns: str = "",
               whole_rows: bool = False, shows: str = "") -> Problem:
    """What a row means, whatever may be wrong with it."""
    question, _, answer = columns.partition(",")
    whole = json.loads(json.dumps(row, default=in_json)) if whole_rows or shows else {}
    return Problem(
        find_problem(row, question), find_gold(row, answer), f"{source}/{place}", source,
        plain(row.get("level", row.get("difficulty"))),
        row=whole if whole_rows else {}, shown=shown_columns(whole, shows))


def in_json(value) -> str | float:
    return float(value) if isinstance(value, Decimal) else plain(value)


def flaw(problem: Problem) -> str:
    """Why a problem cannot be used; "" if it can."""
    if not without_instruction(problem.problem):
        return "without a problem"
    if not problem.judged_by:
        return NO_GOLD
    text = problem.problem + problem.answer + problem.level
    return "" if is_text(text) else "with broken characters"


def double_of(problem: Problem, seen: dict[str, str]) -> str:
    """Why a problem is there already; "" if it is new. `seen`: texts and their golds, extended.

    Several published sets hold every problem 32 or 100 times, and avg@32 would become avg@1024;
    ada-est remembers each problem once.
    """
    text, gold = asked(problem), problem.answer  # white space makes no difference
    if seen.get(text, gold) != gold:
        return OTHER_GOLD
    alike = "".join(text.casefold().split()) + f"={gold or text}"  # nor does case, with this gold
    if text in seen or alike in seen:
        return "double"
    seen |= {text: gold, alike: gold}
    return ""


# ----------------------------------------------------------------------------------------- held out
def load_train_and_held_out(
    data: str, eval_data: str, *, eval_questions: int = 100, **keys,
) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) problems: no problem is in both, and no id.

    `eval_data`: names as for `load_sets`, of which the first `eval_questions` of each set are
    taken, or HELD_OUT for a share of `data` (see `hold_out`).
    """
    train = load_problems(data, **keys)
    if eval_data == HELD_OUT:
        train, held_out = hold_out(train, eval_questions)
        total = len(train) + len(held_out)
        print(f"data: {len(held_out)} of the {total} problems held out for evaluation: a hash of "
              "each text decides, with a chance of a tenth (--eval-data names another set instead)")
    else:
        held_out = load_problems(eval_data, for_training=False, limit=eval_questions, **keys)
    train, doubles = drop_overlap(train, held_out)
    if doubles:
        print(f"data: dropped {counted(doubles, 'training problem')} that the held-out set has "
              "too, by letters and digits")
    if not train:
        raise SystemExit(f"Nothing is left of {shown(data)} to train on: all of it is in the "
                         "held-out set too. Name another with --eval-data.")
    return train, held_out


def hold_out(problems: list[Problem], most: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out): about a tenth is held out, at least one problem and at most `most`.

    A hash of each text decides. When rows are added, nothing that was trained on is held out; and
    as long as there are fewer than `most`, nothing that was held out is trained on.
    """
    ranked = sorted(problems, key=fingerprint)
    count = sum(int(fingerprint(problem), 16) < HELD_OUT_SHARE * 2**256 for problem in ranked)
    held_out = ranked[:max(1, min(count, most))]
    chosen = {problem.id for problem in held_out}
    return [problem for problem in problems if problem.id not in chosen], held_out


def fingerprint(problem: Problem) -> str:
    """A hash of the text alone, in hex: a gold that is corrected later must not move a split.

    Of a long text letters and digits count: a formula can be typeset in many ways. In a short one
    all signs count, or `7+15-4` and `71-5+4` would be the same.
    """
    text = letters_of(problem)
    if len(text) < SHORT:
        text += "=" + "".join(asked(problem).split())
    return hashlib.sha256(text.encode()).hexdigest()


def letters_of(problem: Problem) -> str:
    return "".join(char for char in asked(problem).casefold() if char.isalnum())


def asked(problem: Problem) -> str:
    """What tells problems apart: the text, without white space and instructions on how to answer,
    and the columns that a template shows with it.
    """
    columns = " " + json.dumps(problem.shown) if problem.shown else ""
    return spaced(without_instruction(problem.problem)) + columns


def spaced(text: str) -> str:
    """With one space for any white space, and each accent in one character with its letter.

    A Mac writes an accent as a character that follows its letter.
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def drop_overlap(train: list[Problem], held_out: list[Problem]) -> tuple[list[Problem], int]:
    """`train` without the problems that are also in `held_out`, and how many those were.

    Short texts count as the same also if letters, digits and gold are: typesetting may differ.
    """
    def likenesses(problem: Problem) -> set[str]:
        return {fingerprint(problem), problem.answer and f"{letters_of(problem)}={problem.answer}"}

    held = {key for problem in held_out for key in likenesses(problem)} - {""}
    kept = [problem for problem in train if not held & likenesses(problem)]
    return kept, len(train) - len(kept)


def digest(problems: list[Problem]) -> str:
    """Equal for the same questions and golds (or rows) in the same order, whatever the prompts."""
    asked = [(p.id, p.problem, p.answer) for p in problems]
    text = json.dumps(asked + [p.row for p in problems if p.row])
    return f"{len(problems)} questions, {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def digest_of_prompts(problems: list[Problem]) -> str:
    """Equal for the same prompts: the template, and what the tokenizer made of it."""
    text = json.dumps([problem.prompt_ids for problem in problems])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------- what a run remembers
def remember(folder: Path, train: list[Problem], held_out: list[Problem],
             begun: Path | None = None) -> None:
    """Write problems.json of a run's folder: an evaluation may find the data changed.

    `begun`: the run from which this one begins. What that one has trained on counts here too.
    """
    trained = {*read_json(begun / "problems.json")["trained"]} if begun else set()
    trained |= {fingerprint(problem)[:16] for problem in train}
    trained |= {f"text {fingerprint_of_text(problem)}" for problem in train if problem.shown}
    write_safely(folder / "problems.json", json.dumps(dict(
        trained=sorted(trained), held_out=[asked(problem) for problem in held_out])))


def fingerprint_of_text(problem: Problem) -> str:
    return fingerprint(replace(problem, shown={}))[:16]


def count_trained(folder: Path, problems: list[Problem]) -> int:
    """Says how many of these problems the run was trained on, even if its data has changed since.

    Columns that a template shows tell problems apart if the run and this program both show some.
    """
    trained, count = {*read_json(folder / "problems.json")["trained"]}, 0
    for problem in problems:
        whole, text = fingerprint(problem)[:16], fingerprint_of_text(problem)
        count += bool({whole, text, f"text {whole}"} & trained)
    print(f"{shown(folder)} was trained on {count} of these {counted(len(problems), 'problem')}")
    return count


def still_held_out(folder: Path, today: list[Problem]) -> list[Problem]:
    """Those of today's problems that the run holds out, with their golds of today, as a set.

    No other problem is taken in the place of one that is gone: it may have been trained on.
    """
    texts = read_json(folder / "problems.json")["held_out"]
    there = {asked(problem): problem for problem in today}
    found = [replace(there[text], source=HELD_OUT) for text in texts if text in there]
    print(f"{shown(folder)} holds out {counted(len(texts), 'problem')}: {len(found)} still there")
    if not found:
        raise SystemExit(f"Nothing that {shown(folder)} held out is left in its data: name other "
                         "--data, or take its --template if that shows columns of a row.")
    return found


# --------------------------------------------------------------------------------------- odd golds
def check_golds(problems: list[Problem], grader, drop: bool = False) -> list[Problem]:
    """Counts golds that math-verify cannot read or that hardly any answer equals, as `about 5`.

    For training it `drop`s the former, and raises SystemExit if nothing is left. In an evaluation
    they stay: a score counts all questions of its set.
    """
    sound = grader.check_golds([problem.answer for problem in problems])
    kept = [problem for problem, ok in zip(problems, sound) if ok]
    odd = [problem.answer for problem, ok in zip(problems, sound) if not ok]
    unlikely = [problem.answer for problem in kept if problem.source not in BENCHMARKS
                and not is_one_value(normalize(problem.answer))]
    decimals = any(re.fullmatch(r"-?\d+,\d\d?", gold) for gold in unlikely)
    comma = " (1,5 is read as a list: for a decimal write 1.5)" if decimals else ""
    example = f"\\boxed{{{unlikely[0]}}}" if unlikely else ""
    of_all = f"of {counted(len(problems), 'gold')} to {'train' if drop else 'evaluate'} on"
    for golds, flaw, fate in (
            (odd, "cannot be read by math-verify",
             "dropped" if drop else "only the same string is right"),
            (unlikely, "are no single number or formula",
             "an answer must repeat the words, or give all of the values, as in "
             f"{shown(example, 80)}{comma}")):
        if golds:
            examples = ", ".join(shown(repr(gold), 80) for gold in [*dict.fromkeys(golds)][:3])
            print(f"data: {len(golds)} {of_all} {flaw}, such as {examples}: {fate}")
    if drop and not kept:
        raise SystemExit("Nothing is left to train on: mend the golds, name their column "
                         "(--columns QUESTION,ANSWER), or judge by --reward FILE.py:FUNCTION.")
    return kept if drop else problems


# ----------------------------------------------------------------- problems of a built-in model
def check_readable(model: str, problems: list[Problem], refuse: bool) -> None:
    """Refuses problems of which a built-in model cannot read most, or warns of them.

    It has only ever read the characters of its own problems.
    """
    if model not in TINY:
        return
    known = [row["problem"] for row in BUILTIN[default_data(model, small=False)]("train", 500)]
    foreign = [p for p in problems if not set(p.problem.strip()) <= set("".join(known))]
    if 2 * len(foreign) <= len(problems):
        return
    why = (f"{model} reads only problems like {known[1]}, but {len(foreign)} of {len(problems)} "
           f"are of another kind, such as {shown(repr(foreign[0].problem), 80)}: for English take "
           f"--model {SMOLLM} or another real model.")
    if refuse:
        raise SystemExit(why)
    print(f"WARNING: {why}")


# ---------------------------------------------------------------------------------------- the order
class Stream:
    """Problems without end: a new order in every epoch, decided by seed and epoch.

    `cursor` (problems taken so far) is all that a resumed run has to know.
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
