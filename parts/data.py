"""Problems in: a benchmark, file or hub data set becomes a list of `Problem` with clean golds.

    problems = load_problems("gsm8k")                  # a named benchmark
    problems = load_problems("org/name:config@split")  # a hub data set; config, split are optional
    problems = load_problems("my.jsonl")               # or .json, .parquet, .csv; several by commas
    problems = load_problems("builtin")                # made by the program, see problems.py
    train, held_out = load_train_and_held_out("my.jsonl", eval_data="held-out")

Where rows come from and what their columns mean is in sources.py, how a prompt is made of a problem
in prompts.py. What was dropped is counted and printed in one line per data set.
Whatever a user can get wrong ends in a SystemExit of one sentence. Heavy libraries are imported
where they are needed: a local .jsonl needs none.
"""
import hashlib
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from parts.files import is_text, shown
from parts.models import TINY, is_small
from parts.problems import BUILTIN
from parts.sources import (
    BENCHMARKS, BEYOND, expand, find_gold, find_problem, is_file, plain, read_file, read_hub)

HELD_OUT = "held-out"  # as --eval-data: a share of the training data
HELD_OUT_SHARE = 0.1
BUILTIN_COUNT = {"train": 6000, "test": 240}
MADE_FOR_MATH_MODELS = ("RLHFlow/reinforce_ada", "agentica-org/DeepScaleR")  # evaluated on MATH-500
NO_PROBLEM, NO_GOLD = "without a problem", "without a gold answer"


@dataclass
class Problem:
    problem: str  # the text, without any instruction around it
    answer: str  # gold, normalised; empty only where --reward needs none
    id: str  # unique among all problems that were loaded together
    source: str  # the data set it came from
    level: str = ""  # difficulty, where the data set knows it
    prompt: str = ""  # what the model sees, after prompts.add_prompts
    prompt_ids: list[int] = field(default_factory=list)
    row: dict = field(default_factory=dict)  # all columns, where --reward is to have them

    @property
    def judged_by(self) -> str | dict:
        """What a grader has to know of it: the gold answer; a function of one's own the row."""
        return self.row or self.answer


# -------------------------------------------------------------------------------- defaults by model
def default_data(model: str, for_training: bool = True) -> str:
    """The data set a model is trained (or evaluated) on when none is named."""
    if model in TINY:
        return "builtin-skills" if model == "tiny-skills" else "builtin"
    if is_small(model):
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


def default_template(model: str, reward: str = "") -> str:
    """The prompt template that fits a model when none is named.

    With a reward of one's own nothing is asked for but the problem: no steps and no box.
    """
    if model in TINY or reward:
        return "chat"
    return "three-examples" if is_small(model) else "reinforce-ada"


# ------------------------------------------------------------------------------------------ loading
def load_problems(name: str, **how) -> list[Problem]:
    """All problems of `load_sets`, one set after the other."""
    return [problem for problems in load_sets(name, **how) for problem in problems]


def load_sets(
    name: str, *, split: str | None = None, problem_key: str | None = None,
    answer_key: str | None = None, for_training: bool = True, limit: int | None = None,
    whole_rows: bool = False,
) -> list[list[Problem]]:
    """Each set of `name`: benchmarks, groups, hub data sets, files or "builtin", joined by commas.

    `for_training` chooses the split where none is named: train, or for evaluation test (train if
    there is no test), and whether problems of an earlier set are dropped: in an evaluation each set
    stays whole. `limit` keeps the first so many of each set. The keys name columns (see sources.py)
    of files and hub data sets; the columns of a named benchmark are known.
    `whole_rows`: each problem takes all columns along, and needs no gold.
    """
    names = [part for part, _ in expand(name)]
    keys = dict(problem_key=problem_key or None, answer_key=answer_key or None)
    if any(keys.values()) and not has_own_columns(name):
        raise SystemExit(f"The columns of {shown(name)} are known: leave out --problem-key and "
                         "--answer-key.")
    sets = []
    for part, source in zip(names, short_names(names)):
        if part in BUILTIN:
            own_split = split or ("train" if for_training else "test")
            sets.append(builtin(part, own_split, limit, whole_rows))
            continue
        if is_file(part):
            rows = read_file(Path(os.path.expanduser(part)))
        else:
            rows = read_hub(part, split, for_training)
        own = keys if has_own_columns(part) else {}
        sets.append(rows_to_problems(rows, source, limit=limit, whole_rows=whole_rows, **own))
    if for_training:
        sets = without_doubles(sets)
    make_ids_unique([problem for problems in sets for problem in problems])
    return sets


def without_doubles(sets: list[list[Problem]]) -> list[list[Problem]]:
    """Each set without the problems of those before it: ada-est remembers each problem once."""
    earlier, kept = set(), []
    for problems in sets:
        texts = [one_spaced(problem.problem) for problem in problems]
        new = [problem for problem, text in zip(problems, texts) if text not in earlier]
        if len(new) < len(problems):
            print(f"data: {shown(problems[0].source)}: dropped {len(problems) - len(new)} double, "
                  f"also in a set before it: {len(new)} problems are left")
        earlier.update(texts)
        kept.append(new)
    return kept


def one_spaced(text: str) -> str:
    """Equal for texts that differ in spaces and line breaks alone."""
    return " ".join(text.split())


def has_own_columns(name: str) -> bool:
    """Whether one of the sets joined in `name` is the user's own, whose columns a key may name."""
    return any(part not in (*BUILTIN, *BENCHMARKS) for part, _ in expand(name))


def short_names(names: list[str]) -> list[str]:
    """One name per set, all different: a file's name, or its path where two files share a name."""
    files = [Path(name).name if is_file(name) else name for name in names]
    short = [file if files.count(file) == 1 else name for file, name in zip(files, names)]
    return [name if short.index(name) == i else f"{name}#{short[:i].count(name) + 1}"
            for i, name in enumerate(short)]


def builtin(name: str, split: str, limit: int | None, whole_rows: bool = False) -> list[Problem]:
    """One of the sets that the program makes. Raises ValueError for a split but train and test."""
    if split not in BUILTIN_COUNT:
        raise ValueError(f"the built-in problems have the splits train and test, not {split!r}")
    rows = BUILTIN[name](split, limit or BUILTIN_COUNT[split])
    return [Problem(row["problem"], row["answer"], row["id"], name, str(row["level"]),
                    row=row if whole_rows else {})
            for row in rows]


def rows_to_problems(
    rows, source, problem_key=None, answer_key=None, limit=None, whole_rows=False,
) -> list[Problem]:
    """Problem and gold of each row; strange rows, those without either, and doubles are counted.

    Doubles matter: several published sets hold every problem 32 or 100 times; avg@32 would become
    avg@1024.
    """
    kept, texts, dropped, columns = [], set(), Counter(), {}
    for index, row in enumerate(rows):
        columns.update(dict.fromkeys(row or ()))
        text, gold, whole, reason = read_row(row, problem_key, answer_key, whole_rows)
        words = one_spaced(text)
        if reason or words in texts:
            dropped[reason or "double"] += 1
            continue
        own = scalar(row.get("id") or row.get("unique_id"))
        own = own if own and not own.isdigit() else f"{source}/{index}"
        level = scalar(row.get("level", row.get("difficulty")))
        kept.append(Problem(text, gold, own, source, level, row=whole))
        texts.add(words)
        if len(kept) == limit:
            break
    if not kept:
        raise SystemExit(explain_nothing_kept(source, dropped, columns, problem_key, answer_key))
    lost, total = f" (dropped {counts(dropped)})" if dropped else "", len(kept) + dropped.total()
    first = "the first " if len(kept) == limit else ""  # how many follow, a hub's set may not know
    print(f"data: {shown(source)}: {len(kept)} problems of {first}{total} rows{lost}")
    return kept


def counts(dropped: Counter) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items())


def read_row(row: dict | None, problem_key, answer_key, whole_rows=False) -> tuple:
    """(problem, gold, all columns if wanted, why the row has to be dropped: "" if it need not).

    With all its columns a row needs no gold.
    """
    try:
        if row is None:
            raise RecursionError
        text, gold = find_problem(row, problem_key), find_gold(row, answer_key)
        whole = json.loads(json.dumps(row, default=str)) if whole_rows else {}
    except RecursionError:
        return "", "", {}, "nested too deep"
    if any(row.get(BEYOND) or ()):  # a comma without quotes: every cell may be another column's
        return text, gold, whole, "with more cells than columns"
    if not text:
        return text, gold, whole, NO_PROBLEM
    if not gold and not whole:
        return text, gold, whole, NO_GOLD
    return text, gold, whole, "" if is_text(text + gold) else "with broken characters"


def scalar(value) -> str:
    """A row's own id or level; "" where it is nothing that can be written."""
    text = plain(value)
    return text if is_text(text) else ""


def explain_nothing_kept(source, dropped, columns, problem_key, answer_key) -> str:
    if not dropped:
        return f"{shown(source)} is empty: it has no rows."
    if not dropped[NO_GOLD] and not dropped[NO_PROBLEM]:
        return f"No row of {shown(source)} can be used: {counts(dropped)}."
    what, key = ("gold answer", answer_key) if dropped[NO_GOLD] else ("problem", problem_key)
    where = f"the column {shown(key)}" if key else "a column I know"
    names = shown(", ".join(map(str, columns)) or "none", 1000)
    return (f"No row of {shown(source)} has a {what} in {where}; its columns are {names}: name the "
            "right ones with --problem-key and --answer-key (a nested column as parent.child).")


def make_ids_unique(problems: list[Problem]) -> None:
    """A number behind every id that was there before, in place: pass rates are kept by id."""
    taken, numbers = set(), Counter()
    for problem in problems:
        name = problem.id
        while problem.id in taken:
            numbers[name] += 1
            problem.id = f"{name}#{numbers[name] + 1}"
        taken.add(problem.id)


# ----------------------------------------------------------------------------------------- held out
def load_train_and_held_out(
    data: str, eval_data: str, *, problem_key: str | None = None, answer_key: str | None = None,
    eval_questions: int = 100, whole_rows: bool = False,
) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) problems: no problem is in both, and no id.

    `eval_data`: any name as for `load_sets`, of which the first `eval_questions` of each set are
    taken, or HELD_OUT for a share of `data` (see `hold_out`). The keys reach both, as far as they
    are the user's own. `whole_rows` as for `load_sets`.
    """
    keys = dict(problem_key=problem_key, answer_key=answer_key)
    own = keys if has_own_columns(data) or not has_own_columns(eval_data) else {}
    train = load_problems(data, for_training=True, whole_rows=whole_rows, **own)
    if eval_data == HELD_OUT:
        train, held_out = hold_out(train, eval_questions)
        total = len(train) + len(held_out)
        print(f"data: {len(held_out)} of the {total} problems are held out for evaluation "
              "(--eval-data names others)")
    else:
        own = keys if has_own_columns(eval_data) else {}
        held_out = load_problems(eval_data, for_training=False, limit=eval_questions,
                                 whole_rows=whole_rows, **own)
    train, doubles = drop_overlap(train, held_out)
    if doubles:
        print(f"data: {doubles} training problems are also in the held-out set and were dropped")
    if not train:
        raise SystemExit(
            f"Nothing is left of {shown(data)} to train on: all of it is in the held-out set too.")
    make_ids_unique(train + held_out)
    return train, held_out


def hold_out(problems: list[Problem], most: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out): about a tenth is held out, at least one problem and at most `most`.

    Chosen by a hash of each problem's own text. So when rows are added (or put in another order),
    no problem that was trained on before is held out now, and up to `most` none that was held out
    is trained on.
    """
    if len(problems) < 2:
        raise SystemExit("One problem is not enough to hold some out: name a held-out set with "
                         "--eval-data.")
    ranked = sorted(problems, key=place)
    count = sum(place(problem) < HELD_OUT_SHARE for problem in ranked)
    held_out = ranked[:max(1, min(count, most))]
    chosen = {problem.id for problem in held_out}
    return [problem for problem in problems if problem.id not in chosen], held_out


def place(problem: Problem) -> float:
    """A number in [0, 1) that only the letters and digits of the problem decide."""
    digest = hashlib.sha256(fingerprint(problem).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def drop_overlap(train: list[Problem], held_out: list[Problem]) -> tuple[list[Problem], int]:
    """`train` without the problems that are also in `held_out`, and how many those were."""
    held = set(map(fingerprint, held_out))
    kept = [problem for problem in train if fingerprint(problem) not in held]
    return kept, len(train) - len(kept)


def digest(problems: list[Problem]) -> str:
    """Equal for the same questions and golds (or rows) in the same order, whatever the prompts."""
    asked = [(p.id, p.problem, p.answer) for p in problems]
    text = json.dumps(asked + [p.row for p in problems if p.row])
    return f"{len(problems)} questions, {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def fingerprint(problem: Problem) -> str:
    """Equal for texts with the same letters and digits: a formula can be typeset in many ways.

    Short texts must share the gold as well, because without their signs `7+15-4` and `71-5+4` would
    be the same; where there is no gold, the very text.
    """
    letters = "".join(char for char in problem.problem.casefold() if char.isalnum())
    return letters if len(letters) >= 30 else f"{letters}={problem.answer or problem.problem}"


# ---------------------------------------------------------------------------------------- the order
class Stream:
    """Problems without end: a new order in every epoch, decided by seed and epoch.

    `cursor` (problems taken so far) is all that a resumed run has to know.
    """

    def __init__(self, problems: list, seed: int):
        self.problems, self.seed, self.cursor = problems, seed, 0
        self.epoch, self.order = None, []

    def take(self, count: int) -> list:
        return [self.next() for _ in range(count)]

    def next(self):
        epoch, place = divmod(self.cursor, len(self.problems))
        if epoch != self.epoch:
            rng = random.Random(f"order {self.seed} {epoch}")
            self.epoch, self.order = epoch, rng.sample(self.problems, len(self.problems))
        self.cursor += 1
        return self.order[place]
