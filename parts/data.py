"""Problems in, prompts out: any source of math problems becomes a list of `Problem` with clean gold answers.

    problems = load_problems("gsm8k")                     # a named benchmark
    problems = load_problems("org/name:config@split")     # any hub data set; config and split are optional
    problems = load_problems("my.jsonl")                  # or .json, .parquet, .csv
    problems = load_problems("builtin")                   # arithmetic from tiny.py, offline
    problems = add_prompts(problems, tokenizer, "reinforce-ada", max_prompt_tokens=1024)

Training and evaluation both come through here, so a model is evaluated on the prompt it was trained on. The
template is part of every result: it alone moves Qwen2.5-Math-1.5B from about 20 % to about 60 % on MATH-500.

What was dropped is counted and printed in one line per data set. Whatever a user can get wrong ends in a
SystemExit of one sentence. Heavy libraries are imported where they are needed: a local .jsonl needs none.
"""
import csv
import io
import json
import math
import os
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

# ----------------------------------------------------------------------------------------- names and defaults
BENCHMARKS = {  # the name on the command line -> hub id[:config]
    "math500": "HuggingFaceH4/MATH-500",
    "minerva": "math-ai/minervamath",
    "olympiadbench": "math-ai/olympiadbench",
    "aime24": "HuggingFaceH4/aime_2024",
    "aime25": "math-ai/aime25",
    "amc23": "math-ai/amc23",
    "gsm8k": "openai/gsm8k",
    "svamp": "ChilleD/SVAMP",
    # The sets of the Reinforce-Ada table; the last is AIME 24+25, HMMT 24+25, BRUMO 25, AMC 23 and CMIMC 25.
    "ra-math500": "weqweasdas/math500",
    "ra-minerva": "weqweasdas/minerva_math",
    "ra-olympiadbench": "weqweasdas/olympiadbench",
    "ra-aime-like": "weqweasdas/aime_hmmt_brumo_cmimc_amc23",
}
GROUPS = {  # one name for several sets, with the weights of the published weighted average
    "reinforce-ada": {"ra-math500": 500, "ra-minerva": 272, "ra-olympiadbench": 675, "ra-aime-like": 230},
}
CONFIGS = {  # for hub data sets that cannot be loaded without one; several are read one after the other
    "openai/gsm8k": "main",
    "opencompass/AIME2025": "AIME2025-I,AIME2025-II",
    "Hothan/OlympiadBench": "OE_TO_maths_en_COMP",
    "open-r1/DAPO-Math-17k-Processed": "en",
    "EleutherAI/hendrycks_math": "algebra,counting_and_probability,geometry,intermediate_algebra,"
                                 "number_theory,prealgebra,precalculus",
}
FAMILIES = {"qwen": "Qwen", "qwq": "Qwen", "llama": "meta-llama", "meta-llama": "meta-llama"}
TINY = ("tiny", "tiny-moe")
BUILTIN_COUNT = {"train": 6000, "test": 240}

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
STEP_BY_STEP = "Let's think step by step and output the final answer within \\boxed{}."
TEMPLATES = {  # (role, text) turns, rendered by the tokenizer's own chat template; None = the bare problem
    "reinforce-ada": [("system", BOXED), ("user", "{problem} " + STEP_BY_STEP)],
    "qwen25-math-cot": [("system", BOXED), ("user", "{problem}")],
    "qwen-boxed": [("system", "You are a helpful assistant."), ("user", "{problem}\n" + BOXED)],
    "llama": [("user", "{problem}\n" + BOXED + "\n\n")],
    "chat": [("user", "{problem}")],
    "none": None,
}


@dataclass
class Problem:
    problem: str  # the text, without any instruction around it
    answer: str  # gold, normalised, never empty
    id: str  # unique within a data set
    source: str  # the data set it came from
    level: str = ""  # difficulty, where the data set knows it
    prompt: str = ""  # what the model sees, after add_prompts
    prompt_ids: list[int] = field(default_factory=list)


def resolve_model(name: str) -> str:
    """`Qwen2.5-Math-1.5B` -> `Qwen/Qwen2.5-Math-1.5B`; a folder, `org/name` and `tiny` stay as they are."""
    if name in TINY or Path(name).expanduser().is_dir():
        return str(Path(name).expanduser())
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SystemExit(f"No model folder {name} exists: give one, a hub id (org/name), or --model tiny.")
    owner = next((owner for start, owner in FAMILIES.items() if name.lower().startswith(start)), None)
    if "/" not in name and not owner:
        raise SystemExit(f"Unknown model {name!r}: write org/name, give a folder, or use --model tiny.")
    return name if "/" in name else f"{owner}/{name}"


def fetch_model(name: str, context: int) -> str:
    """A folder or hub id that transformers and vLLM can load. Raises SystemExit before anything heavy is started."""
    if name in TINY:
        from parts import tiny

        return tiny.folder(name)
    path = resolve_model(name)
    if not Path(path).is_dir():
        go_offline_if_unreachable(path, "model")
    from transformers import AutoConfig

    try:
        longest = getattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "max_position_embeddings", context)
    except (OSError, ValueError) as error:
        raise SystemExit(f"Cannot load the model {path}: {str(error).splitlines()[0]} Check the name and the connection to "
                         "the hub, or use --model tiny, which needs neither.") from None
    if context > longest:
        raise SystemExit(f"{path} reads at most {longest} tokens, but --max-prompt-tokens and --max-tokens add up to {context}.")
    return path


def default_data(model: str, for_training: bool = True) -> str:
    """The data set a model is trained (or evaluated) on when none is named."""
    if model in TINY or not for_training:
        return "builtin" if model in TINY else "math500"
    if model.endswith("Qwen2.5-Math-1.5B"):  # prompts that this very model solves 1 to 5 times out of 16
        return "RLHFlow/reinforce_ada_simple_prompt_1-5b"
    return "agentica-org/DeepScaleR-Preview-Dataset"


def default_template(model: str) -> str:
    """The prompt template that fits a model when none is named."""
    return "chat" if model in TINY else "reinforce-ada"


def expand(names: str) -> list[tuple[str, int | None]]:
    """`gsm8k,reinforce-ada` -> [(gsm8k, None), (ra-math500, 500), ...]; None: weigh the set by its size."""
    return [pair for name in names.split(",") for pair in GROUPS.get(name, {name: None}).items()]


# ----------------------------------------------------------------------------------------- problems
def load_problems(
    name: str, *, split: str | None = None, problem_key: str | None = None, answer_key: str | None = None,
    for_training: bool = True, limit: int | None = None,
) -> list[Problem]:
    """Problems of a benchmark or group, a hub data set, a file, or "builtin"; several joined by commas.

    `for_training` chooses the split where none is named: train, or for evaluation test (train if there is no
    test). `limit` keeps the first so many of each set. In a key, dots reach into nested columns
    (`reward_model.ground_truth`) and a plus joins two columns (`Body+Question`).
    """
    keys = dict(problem_key=problem_key, answer_key=answer_key, limit=limit)
    if len(parts := expand(name)) > 1:
        loaded = [load_problems(part, split=split, for_training=for_training, **keys) for part, _ in parts]
        return [problem for problems in loaded for problem in problems]
    if name == "builtin":
        from parts import tiny

        split = split or ("train" if for_training else "test")
        rows = tiny.problems(split, limit or BUILTIN_COUNT.get(split, 0))
        return [Problem(r["problem"], r["answer"], r["id"], "builtin", str(r["level"])) for r in rows]
    path = Path(name).expanduser()
    if path.suffix.lower() in SUFFIXES or path.exists():
        return rows_to_problems(read_file(path), path.name, **keys)
    return rows_to_problems(read_hub(name, split, for_training), name, **keys)


def rows_to_problems(rows, source, problem_key=None, answer_key=None, limit=None) -> list[Problem]:
    """Finds problem and gold in each row (a dict); drops and counts rows without either, and doubles.

    Doubles matter: several published sets hold every problem 32 or 100 times; avg@32 would become avg@1024.
    """
    kept, texts, ids, dropped, columns = [], set(), set(), Counter(), {}
    for index, row in enumerate(rows):
        columns.update(dict.fromkeys(row))
        text, gold = find_problem(row, problem_key), find_gold(row, answer_key)
        words = " ".join(text.split())
        if not text or not gold or words in texts:
            dropped[NO_PROBLEM if not text else NO_GOLD if not gold else "double"] += 1
            continue
        own = plain(row.get("id") or row.get("unique_id"))
        own = own if own and not own.isdigit() and own not in ids else f"{source}/{index}"
        kept.append(Problem(text, gold, own, source, plain(row.get("level", row.get("difficulty")))))
        texts.add(words)
        ids.add(own)
        if len(kept) == limit:
            break
    if not kept:
        raise SystemExit(explain_nothing_kept(source, dropped, columns, problem_key, answer_key))
    lost = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    print(f"data: {source}: {len(kept)} problems" + (f" (dropped {lost})" if lost else ""))
    return kept


def explain_nothing_kept(source, dropped, columns, problem_key, answer_key) -> str:
    if not columns:
        return f"{source} is empty: it has no rows."
    what, key = ("gold answer", answer_key) if dropped[NO_GOLD] else ("problem", problem_key)
    where, names = f"the column {key}" if key else "a column I know", ", ".join(map(str, columns))
    return (f"No row of {source} has a {what} in {where}; its columns are {names}: name the right ones with "
            f"--problem-key and --answer-key (a nested column as parent.child).")


def drop_overlap(train: list[Problem], held_out: list[Problem]) -> tuple[list[Problem], int]:
    """`train` without the problems that are also in `held_out`, and how many those were.

    Two texts are the same if their letters and digits are: one formula can be typeset in many ways. Short
    texts must share the gold as well, because without their signs `7+15-4` and `71-5+4` would be the same.
    """
    def fingerprint(problem):
        letters = "".join(char for char in problem.problem.casefold() if char.isalnum())
        return letters if len(letters) >= 30 else f"{letters}={problem.answer}"

    held = set(map(fingerprint, held_out))
    kept = [problem for problem in train if fingerprint(problem) not in held]
    return kept, len(train) - len(kept)


# ----------------------------------------------------------------------------------------- one row
USER = ("user", "human")
NO_PROBLEM, NO_GOLD = "without a problem", "without a gold answer"
PROBLEM_KEYS = ("problem", "question", "Problem", "extra_info.raw_problem", "prompt", "input",
                "Body+Question")  # the last is SVAMP
ANSWER_KEYS = ("gt", "answer", "final_answer", "Answer", "reward_model.ground_truth", "ground_truth",
               "target", "expected_answer", "solution")
CHAT_TURN = re.compile(  # a user's turn in a prompt that was already rendered for Qwen or Llama
    r"(?:<\|im_start\|>user|<\|start_header_id\|>user<\|end_header_id\|>)\n+"
    r"(.*?)(?:<\|im_end\|>|<\|eot_id\|>|\Z)", re.DOTALL)
WRAPPER = re.compile(  # instructions that our own template would double
    r"\A\s*Solve the following math problem step by step\. The last line.{0,200}?the problem\.\s+"
    r"|\s*Remember to put your answer on its own line after \"Answer:\"[^\n]*\Z"
    r"|\s*Let's think step by step and output the final answer within \\boxed\{\}\.?\s*\Z"
    r"|\s*Please reason step by step, and put your final answer within \\boxed\{\}\.?\s*\Z", re.DOTALL)


def find_problem(row: dict, key: str | None = None) -> str:
    """The first non-empty problem column (or the named one), cleaned; "" if there is none."""
    return next(filter(None, (problem_text(lookup(row, k)) for k in ([key] if key else PROBLEM_KEYS))), "")


def find_gold(row: dict, key: str | None = None) -> str:
    """The first non-empty gold (or the named one), normalised; "" if there is none."""
    for k in [key] if key else ANSWER_KEYS:
        gold = gold_text(lookup(row, k))
        worked = k == "solution" and (len(gold) > 100 or "\n" in gold)  # a worked solution without a box
        if gold and not worked:
            return gold
    return ""


def problem_text(value) -> str:
    """A string, a rendered chat, or turns ({role, content} or {from, value}): the last user turn counts."""
    if isinstance(value, list):
        turns = [t for t in value if isinstance(t, dict) and t.get("role", t.get("from")) in USER]
        value = turns[-1].get("content", turns[-1].get("value")) if turns else None
    text = plain(value)
    return WRAPPER.sub("", (CHAT_TURN.findall(text) or [text])[-1]).strip()


def gold_text(value) -> str:
    r"""`so #### 1,234` -> 1234; `hence \boxed{x}.` -> x; ["a", "b"] -> a, b; 27.0 -> 27; `$\pi$.` -> \pi."""
    if isinstance(value, list):
        return ", ".join(filter(None, map(gold_text, value)))
    text = plain(value)
    if "####" in text:
        text = text.rsplit("####", 1)[1].replace(",", "")
    box = last_boxed(text)
    text = re.sub(r"\\?\$", "", text if box is None else box).strip()
    return re.sub(r"(?<!\\right)\.+\Z", "", text).strip()  # the dot of `\right.` belongs to it


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...}, \fbox{...} or \boxed x; None without one, "" if never closed."""
    boxes = list(re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*", text))
    if not boxes:
        return None
    rest, depth = text[boxes[-1].end():], 0
    if not rest.startswith("{"):
        return re.match(r"[^\s$]*", rest).group()
    for token in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # `\\.` takes escaped braces out of the count
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return rest[1:token.start()].strip()
    return ""


def lookup(row: dict, key: str):
    """The value of a column, of a nested one (a.b) or of two joined (a+b); None if it is not there."""
    if key in row:
        return decoded(row[key])
    if "+" in key:
        return " ".join(plain(row.get(part)) for part in key.split("+"))
    head, _, rest = key.partition(".")
    inner = decoded(row.get(head))
    return lookup(inner, rest) if rest and isinstance(inner, dict) else None


def decoded(value):
    """CSV files and some hub sets hold nested columns as JSON text; `[1, 2]` stays text (an interval)."""
    if isinstance(value, str) and value.lstrip().startswith(('{"', "[{", '["')):
        try:
            return json.loads(value)
        except ValueError:
            pass
    return value


def plain(value) -> str:
    """Text of a scalar: "" for nothing, 27 for 27.0 (AMC golds come as a float column)."""
    if value is None or isinstance(value, float) and not math.isfinite(value):
        return ""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


# ----------------------------------------------------------------------------------------- files and the hub
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def read_file(path: Path) -> list[dict]:
    """All rows of a local file."""
    suffix, line = path.suffix.lower(), ""
    if not path.is_file() or suffix not in SUFFIXES:
        what = f"{path} is no data file" if path.exists() else f"No data file {path}"
        raise SystemExit(f"{what}: --data takes a {', '.join(SUFFIXES)} file, or a hub id.")
    try:
        if suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        text = path.read_text(encoding="utf-8-sig")
        if suffix == ".csv":
            csv.field_size_limit(10**8)  # the default refuses cells above 128 KB
            return list(csv.DictReader(io.StringIO(text), restkey="beyond the header"))
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:  # JSON lines, under either name
            rows = []
            for number, content in enumerate(text.split("\n"), 1):
                line = f"line {number} of "
                rows += [json.loads(content)] if content.strip() else []
    except (ValueError, OSError, csv.Error) as error:  # json's and pyarrow's errors are among these
        raise SystemExit(f"Cannot read {line}{path}: {error}; mend it or name another --data.") from None
    if not all(isinstance(row, dict) for row in rows):
        raise SystemExit(f"{path} must hold one JSON object per problem, with a problem and its answer.")
    return rows


def read_hub(name: str, split: str | None, for_training: bool):
    """Yields the rows of a benchmark or of `org/name[:config][@split]`, from the hub or its local cache."""
    full, _, named_split = BENCHMARKS.get(name, name).partition("@")
    repo, _, config = full.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise SystemExit(f"There is no data set {name!r}: give a file ({', '.join(SUFFIXES)}), a hub id "
                         f"(org/name), or one of builtin, {', '.join([*BENCHMARKS, *GROUPS])}.")
    go_offline_if_unreachable(repo)
    asked = split or named_split
    wanted = [asked] if asked else ["train"] if for_training else ["test", "train"]
    for config in (config or CONFIGS.get(repo, "")).split(","):
        splits = load_from_hub(repo, config or None)
        found = next((s for s in wanted if s in splits), None)
        if not found:
            raise SystemExit(f"{repo} has no split {' or '.join(wanted)}, only {', '.join(splits)}: "
                             f"name one, as in {repo}@{next(iter(splits))}.")
        yield from splits[found]


def go_offline_if_unreachable(repo: str, kind: str = "dataset") -> None:
    """One quick question to the hub; without an answer only caches are used (its libraries retry for long)."""
    import huggingface_hub

    try:
        getattr(huggingface_hub.HfApi(), f"{kind}_info")(repo, timeout=4)
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise SystemExit(f"The hub has no {kind} {repo}: check its name, or run `hf auth login`.") from None
    except Exception:  # no network, no name service, time-out, a proxy's error page, HF_HUB_OFFLINE=1
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def load_from_hub(repo: str, config: str | None) -> dict:
    """Split name -> rows. No code from the hub is run."""
    import datasets

    try:
        return datasets.load_dataset(repo, config)
    except Exception as error:
        configs = re.search(r"onfig.*\[(.+?)\]", str(error), re.DOTALL)
        if configs:
            names = configs.group(1).replace("'", "")
            reason = f"{repo} has the configs {names}: name one, as in {repo}:{names.split(',')[0]}."
        elif datasets.config.HF_HUB_OFFLINE:
            reason = (f"The model hub cannot be reached and {repo} is not in the local cache: use your own "
                      f"--data file.jsonl, or the built-in model and problems with --model tiny.")
        else:
            reason = f"{repo} could not be loaded: {type(error).__name__}: {str(error).strip()[:200]}"
        raise SystemExit(reason) from None


# ----------------------------------------------------------------------------------------- prompts
def add_prompts(problems: list[Problem], tokenizer, template: str, max_prompt_tokens: int) -> list[Problem]:
    """The problems with `prompt` and `prompt_ids`; those over `max_prompt_tokens` are dropped and counted."""
    if template not in TEMPLATES:
        raise SystemExit(f"There is no prompt template {template!r}; choose one of {', '.join(TEMPLATES)}.")
    prompts, turns = [problem.problem for problem in problems], TEMPLATES[template]
    if turns:
        if not getattr(tokenizer, "chat_template", None):
            raise SystemExit(f"The tokenizer has no chat template for {template}: use --template none.")
        chats = [[{"role": role, "content": text.replace("{problem}", p)} for role, text in turns]
                 for p in prompts]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    # A chat template writes its own start token; a bare problem gets the tokenizer's, if any (Llama has one).
    ids = tokenizer(prompts, add_special_tokens=not turns)["input_ids"]
    kept = [replace(problem, prompt=prompt, prompt_ids=list(tokens))
            for problem, prompt, tokens in zip(problems, prompts, ids) if len(tokens) <= max_prompt_tokens]
    if len(kept) < len(problems):
        print(f"data: dropped {len(problems) - len(kept)} of {len(problems)} problems with a prompt over "
              f"{max_prompt_tokens} tokens (longest: {max(map(len, ids))})")
    if not kept:
        raise SystemExit(f"Every prompt is over {max_prompt_tokens} tokens: raise --max-prompt-tokens.")
    return kept


class Stream:
    """Problems without end: a new order in every epoch, decided by seed and epoch. `cursor`: problems taken so far."""

    def __init__(self, problems: list, seed: int):
        self.problems, self.seed, self.cursor, self.epoch, self.order = problems, seed, 0, None, []

    def take(self, count: int) -> list:
        return [self.next() for _ in range(count)]

    def next(self):
        epoch, place = divmod(self.cursor, len(self.problems))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, random.Random(f"order {self.seed} {epoch}").sample(self.problems, len(self.problems))
        self.cursor += 1
        return self.order[place]
