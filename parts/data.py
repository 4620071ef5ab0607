"""The problems of a run: which ones are trained on or held out, and in which order.

    problems = load_problems("gsm8k")     # or org/name:config@split, my.jsonl, builtin, ...
    train, held_out = load_train_and_held_out("my.jsonl", eval_data="held-out")

A printed line per set says what was dropped. Mistakes of the user raise SystemExit, one sentence.
"""
import hashlib
import json
import random
import unicodedata
from collections import Counter
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

from models.problems import BUILTIN
from parts.folder import read_json, write_safely
from parts.models import SMOLLM, TINY
from parts.prompts import shown_by
from parts.sources import (
    BENCHMARKS, HELD_OUT, expand, find_gold, find_problem, is_file, plain, read_file, read_hub,
    require_columns, shown_columns, unread_columns, without_instruction)
from parts.text import counted, is_text, shown
from verifier.answers import is_one_value
from verifier.spelling import normalize

HELD_OUT_SHARE = 0.1
SHORT = 30  # letters and digits; with fewer, two different problems may have the same ones
BUILTIN_COUNT = {"train": 6000, "test": 240}
MADE_FOR_MATH_MODELS = ("RLHFlow/reinforce_ada", "agentica-org/DeepScaleR")  # evaluated on MATH-500


@dataclass
class Problem:
    problem: str  # the text as the data has it
    answer: str  # gold, normalised; may be empty if --reward needs none
    id: str  # source/split/row, unique among all problems of a run
    source: str  # its data set
    level: str = ""  # difficulty, if the data set has it
    prompt: str = ""  # the model's input, set by prompts.add_prompts
    prompt_ids: list[int] = field(default_factory=list)
    row: dict = field(default_factory=dict)  # all columns, if --reward needs them
    shown: dict = field(default_factory=dict)  # the columns that a .jinja template shows


# -------------------------------------------------------------------------------- defaults by model
def default_data(model: str, small: bool, for_training: bool = True) -> str:
    """The data set for training (or evaluation) if --data is not given."""
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
    """The default of --eval-data for a policy that is trained on `data`."""
    if data in BUILTIN:
        return data
    for_math = all(name.startswith(MADE_FOR_MATH_MODELS) for name in data.split(","))
    return "math500" if for_math else HELD_OUT


def default_template(model: str, small: bool, reward: str = "") -> str:
    """The default template of a model. With --reward the prompt is only the problem."""
    if model in TINY or reward:
        return "chat"
    return "three-examples" if small else "reinforce-ada"


# ------------------------------------------------------------------------------------ several sets
def keys_of(config) -> dict:
    """columns: "QUESTION,ANSWER" of files and hub data sets, because those of other sets are fixed.
    whole_rows: each problem keeps all its columns for the reward, and needs no gold.
    shows: the text of a .jinja template. Each problem keeps the columns that this text names.
    """
    return dict(columns=config.columns, whole_rows=bool(config.reward),
                shows=shown_by(config.template))


def load_problems(name: str, **how) -> list[Problem]:
    """All problems of `load_sets`, one set after the other."""
    return sum(load_sets(name, **how), [])


def load_sets(name: str, *, for_training: bool = True, limit: int | None = None,
              columns: str = "", **rows_for) -> list[list[Problem]]:
    """Each set of `name`: benchmarks, groups, hub data sets, files or "builtin", joined by commas.

    `for_training` chooses the default split, which is train, or test for evaluation (train if there
    is no test). In training, a problem of an earlier set is dropped from a later one. `limit`: take
    only this many problems of each set, the first ones. `rows_for`: the rest of `keys_of`.
    """
    split = "train" if for_training else "test"
    sets, sources, seen = [], Counter(), {}
    for part, _ in expand(name):
        if part in BUILTIN:
            rows = BUILTIN[part](split, limit or BUILTIN_COUNT[split])
            require_columns(rows[0], rows_for.get("shows", ""), part)
            sets.append([replace(problem_of(row, part, **rows_for), id=row["id"])
                         for row in rows])  # they have no flaws, and short texts may repeat
            continue
        rows = read_file(part) if is_file(part) else read_hub(part, for_training)
        source = Path(part).name if is_file(part) else part
        sources[source] += 1  # marks a second file of this name in reports and ids
        source += f"#{sources[source]}" * (sources[source] > 1)
        named = columns if is_own(part) else ""
        before = seen if for_training else {}
        sets.append(sift(rows, source, split, named, limit, before, **rows_for))
    return sets


def is_own(names: str) -> bool:
    """Whether one of these sets is a file or on the hub, so that --columns can apply to it."""
    return any(name not in (HELD_OUT, *BUILTIN, *BENCHMARKS) for name, _ in expand(names))


# ---------------------------------------------------------------------------------- rows of one set
def sift(rows, source: str, split: str = "train", columns: str = "", limit: int | None = None,
         seen: dict | None = None, whole_rows: bool = False, shows: str = "") -> list[Problem]:
    """The rows' problems. Prints how many rows were dropped. SystemExit if none is left."""
    problems, names, unread, dropped = [], {}, {}, Counter()
    seen = {} if seen is None else seen
    for index, row in enumerate(rows):
        names |= dict.fromkeys(row)
        problem = problem_of(row, source, f"{split}/{index}", columns, whole_rows, shows)
        reason = flaw(problem) or double_of(problem, seen)
        if reason:
            dropped[reason] += 1
            continue
        problems.append(problem)
        unread |= dict.fromkeys(unread_columns(row, columns))
        if len(problems) == limit:
            break
    why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    if not problems:
        raise SystemExit(
            f"No row of {shown(source)} can be used: {why or 'it has none'}. If its columns "
            f"({shown(', '.join(map(str, names)), 1000)}) have other names than "
            f"{shown(columns) or 'usual'}, use --columns QUESTION,ANSWER (a nested one as "
            "parent.child); without golds, use --reward FILE.py:FUNCTION.")
    require_columns(names, shows, source)
    first = "the first " if len(problems) == limit else ""  # the rows after these were not read
    print(f"data: {shown(source)}: {counted(len(problems), 'problem')} of {first}"
          f"{counted(index + 1, 'row')}{f' (dropped {why})' if why else ''}")
    visible = names if source in BENCHMARKS else shown_columns(names, shows)
    hidden = [name for name in unread if name not in visible]
    if hidden:
        print(f"data: {shown(source)}: the model does not see these columns, or turns of a chat in "
              f"them: {shown(', '.join(hidden))}; if it needs them, a .jinja file as --template "
              f"can show {{{{ row.{shown(hidden[0])} }}}} (docs/data.md)")
    return problems


def problem_of(row: dict, source: str, place: str = "", columns: str = "",
               whole_rows: bool = False, shows: str = "") -> Problem:
    """The problem of a row, without any check."""
    question, _, answer = columns.partition(",")
    whole = in_json(row) if whole_rows or shows else {}
    return Problem(
        find_problem(row, question), find_gold(row, answer), f"{source}/{place}", source,
        plain(row.get("level", row.get("difficulty"))),
        row=whole if whole_rows else {}, shown=shown_columns(whole, shows))


def in_json(row: dict) -> dict:
    """A row as it is after a round trip through JSON. A number with many digits is a float."""
    return json.loads(json.dumps(row, default=lambda value: (
        float(value) if isinstance(value, Decimal) else plain(value))))


def flaw(problem: Problem) -> str:
    """Why a problem cannot be used; "" if it can."""
    if not without_instruction(problem.problem).strip():
        return "without a problem"
    if not (problem.answer or problem.row):
        return "without a gold answer"
    text = problem.problem + problem.answer + problem.level
    return "" if is_text(text) else "with broken characters"


def double_of(problem: Problem, seen: dict[str, str]) -> str:
    """Why a problem is a duplicate; "" if not. `seen`: texts and their golds, extended here.

    Several published sets have each problem 32 or 100 times, so avg@32 would become avg@1024.
    """
    text, gold = asked(problem), problem.answer  # white space is ignored
    if seen.get(text, gold) != gold:
        return "with another gold than the same text before"
    alike = "".join(text.casefold().split()) + f"={gold or text}"  # so is case, with one gold
    if text in seen or alike in seen:
        return "double"
    seen |= {text: gold, alike: gold}
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
    """The text by which problems are compared, with the columns that a template shows.

    White space and instructions on how to answer are ignored. An accent can be a character that
    follows its letter, as a Mac writes it, or a part of it.
    """
    text = unicodedata.normalize("NFC", without_instruction(problem.problem))
    return " ".join(text.split()) + (" " + json.dumps(problem.shown) if problem.shown else "")


def drop_overlap(train: list[Problem], held_out: list[Problem]) -> list[Problem]:
    """`train` without the problems that are also in `held_out`, even if they are typeset
    differently. For a short text, equal letters, digits and golds are enough."""
    def likenesses(problem: Problem) -> set[str]:
        return {fingerprint(problem), problem.answer and f"{letters_of(problem)}={problem.answer}"}

    held = {key for problem in held_out for key in likenesses(problem)} - {""}
    return [problem for problem in train if not held & likenesses(problem)]


def digest(problems: list[Problem]) -> str:
    """Equal for the same questions and golds (or rows) in the same order, whatever the prompts."""
    asked = [(p.id, p.problem, p.answer) for p in problems]
    return f"{len(problems)} questions, {hashed(asked + [p.row for p in problems if p.row])}"


def digest_of_prompts(problems: list[Problem]) -> str:
    """Equal for the same prompts, which depend on the template and the tokenizer."""
    return hashed([problem.prompt_ids for problem in problems])


def hashed(values: list) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------- what a run remembers
def remember(folder: Path, train: list[Problem], held_out: list[Problem],
             begun: Path | None = None) -> None:
    """Write problems.json in a run's folder, because the data may change before an evaluation.

    If this run continues from the run `begun`, the problems that `begun` trained on count, too.
    """
    trained = {*read_json(begun / "problems.json")["trained"]} if begun else set()
    write_safely(folder / "problems.json", json.dumps(dict(
        trained=sorted(trained | {*short_hashes(train)}), held_out=[*map(asked, held_out)])))


def short_hashes(problems: list[Problem]) -> list[str]:
    """Hashes of the texts alone, because a trained question counts whatever columns are shown."""
    return [fingerprint(replace(problem, shown={}))[:16] for problem in problems]


def count_trained(folder: Path, problems: list[Problem]) -> int:
    """Print and return how many of these problems the run trained on, even if its data changed."""
    trained = {*read_json(folder / "problems.json")["trained"]}
    count = sum(text in trained for text in short_hashes(problems))
    print(f"{shown(folder)} was trained on {count} of these {counted(len(problems), 'problem')}")
    return count


def still_held_out(folder: Path, today: list[Problem]) -> list[Problem]:
    """The problems of `today` that the run holds out, with their present golds, as a set.

    A problem that is gone is not replaced, because another may have been trained on.
    """
    texts = read_json(folder / "problems.json")["held_out"]
    there = {asked(problem): problem for problem in today}
    still = [replace(there[text], source=HELD_OUT) for text in texts if text in there]
    print(f"{shown(folder)} holds out {counted(len(texts), 'problem')}: {len(still)} still there")
    if not still:
        raise SystemExit(f"Nothing that {shown(folder)} held out is left in its data: name other "
                         "--data, or use its --template if this shows columns of a row.")
    return still


# --------------------------------------------------------------------------------------- odd golds
def check_golds(problems: list[Problem], grader, drop: bool = False) -> list[Problem]:
    """Count golds that math-verify cannot read or that few answers can equal, such as `about 5`.

    For training, unreadable golds are `drop`ped if others are left. In an evaluation all stay.
    """
    readable = grader.check_golds([problem.answer for problem in problems])
    sound = [problem for problem, is_sound in zip(problems, readable) if is_sound]
    drop = drop and bool(sound)
    odd = [problem.answer for problem, is_sound in zip(problems, readable) if not is_sound]
    unlikely = [problem.answer for problem in sound if problem.source not in BENCHMARKS
                and not is_one_value(normalize(problem.answer))]
    for golds, flaw, fate in (
            (odd, "cannot be read by math-verify",
             "dropped" if drop else "only the same string is right"),
            (unlikely, "are no single number or formula",
             "an answer must repeat the words or give all values, as in "
             + shown(f"\\boxed{{{[*unlikely, ''][0]}}}", 80))):
        if golds:
            examples = ", ".join(shown(repr(gold), 80) for gold in [*dict.fromkeys(golds)][:3])
            print(f"data: {len(golds)} of {counted(len(problems), 'gold')} {flaw}, such as "
                  f"{examples}: {fate}")
    return sound if drop else problems


# ----------------------------------------------------------------- problems of a built-in model
def check_readable(model: str, problems: list[Problem], refuse: bool) -> None:
    """Refuse (or warn of) problems if most have characters that a built-in model does not know."""
    if model not in TINY:
        return
    like = [row["problem"] for row in BUILTIN[default_data(model, small=False)]("train", 500)]
    foreign = [p for p in problems if not set(p.problem.strip()) <= set("".join(like))]
    if 2 * len(foreign) <= len(problems):
        return
    why = (f"{model} reads only problems like {like[1]}, but {len(foreign)} of {len(problems)} "
           f"are of another kind, such as {shown(repr(foreign[0].problem), 80)}: for English use "
           f"--model {SMOLLM} or another real model.")
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
