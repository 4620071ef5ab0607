"""Rows of problems, each a dict, from where they are: a named benchmark, a file, or the hub.

Whatever cannot be read ends in a SystemExit of one sentence. No code from the hub is run.
"""
import csv
import io
import json
import os
import re
import sys
from pathlib import Path

from parts.screen import shown

BUILTIN = ("builtin", "builtin-skills", "builtin-words")  # made by tiny.py, skills.py, words.py
BENCHMARKS = {  # the name on the command line -> hub id[:config]
    "math500": "HuggingFaceH4/MATH-500",
    "minerva": "math-ai/minervamath",
    "olympiadbench": "math-ai/olympiadbench",
    "aime24": "HuggingFaceH4/aime_2024",
    "aime25": "math-ai/aime25",
    "amc23": "math-ai/amc23",
    "gsm8k": "openai/gsm8k",
    "svamp": "ChilleD/SVAMP",
    # The sets of the Reinforce-Ada table; the last is AIME 24+25, HMMT 24+25, BRUMO 25, AMC 23 and
    # CMIMC 25.
    "ra-math500": "weqweasdas/math500",
    "ra-minerva": "weqweasdas/minerva_math",
    "ra-olympiadbench": "weqweasdas/olympiadbench",
    "ra-aime-like": "weqweasdas/aime_hmmt_brumo_cmimc_amc23",
}
GROUPS = {  # one name for several sets, with the weights of the published weighted average
    "reinforce-ada": {
        "ra-math500": 500, "ra-minerva": 272, "ra-olympiadbench": 675, "ra-aime-like": 230},
}
CONFIGS = {  # of hub data sets that cannot be loaded without one; several are read in turn
    "openai/gsm8k": "main",
    "opencompass/AIME2025": "AIME2025-I,AIME2025-II",
    "Hothan/OlympiadBench": "OE_TO_maths_en_COMP",
    "open-r1/DAPO-Math-17k-Processed": "en",
    "EleutherAI/hendrycks_math": "algebra,counting_and_probability,geometry,intermediate_algebra,"
                                 "number_theory,prealgebra,precalculus",
}
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
MOST_VALUES = 10**8  # of a .parquet file, all columns together
BEYOND = "beyond the header"  # where a row of a .csv has more cells than there are columns


def expand(names: str) -> list[tuple[str, int | None]]:
    """`gsm8k,reinforce-ada` -> [(gsm8k, None), (ra-math500, 500), ...]; None: weight = size."""
    return [pair for name in names.split(",") for pair in GROUPS.get(name, {name: None}).items()]


def is_file(name: str) -> bool:
    """Whether a set is meant to be a file, not a name or a hub id."""
    path = os.path.expanduser(name)  # os.path, since Path.exists raises for a name that is too long
    return Path(path).suffix.lower() in SUFFIXES or os.path.exists(path)


# -------------------------------------------------------------------------------------------- files
def require_files(names: str) -> None:
    """Raises SystemExit if one of these sets is a file that is not there. Imports nothing large."""
    for name, _ in expand(names):
        if is_file(name):
            require_file(Path(os.path.expanduser(name)))


def require_file(path: Path) -> None:
    if os.path.isfile(path) and path.suffix.lower() in SUFFIXES:
        return
    exists, name = os.path.exists(path), shown(path)
    what = f"{name} is no data file" if exists else f"No data file {name}"
    raise SystemExit(f"{what}: --data takes a {', '.join(SUFFIXES)} file, or a hub id.")


def read_file(path: Path) -> list[dict | None]:
    """All rows of a local file; None in the place of a line that is nested too deep."""
    require_file(path)
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            return read_parquet(path)
        text = path.read_text(encoding="utf-8-sig")
        if suffix == ".csv":
            return read_csv(text)
        rows = json.loads(text) if text.lstrip().startswith("[") else read_lines(text)
    except RecursionError:
        raise SystemExit(
            f"Cannot read {shown(path)}: it is nested too deep to be a list of problems.") from None
    except MemoryError:
        raise SystemExit(
            f"Cannot read {shown(path)}: it is too large for the memory of this machine.") from None
    except (ValueError, OSError) as error:  # json's and pyarrow's errors are among these
        raise SystemExit(
            f"Cannot read {shown(path)}: {shown(error)}; mend it or name another --data.") from None
    if not all(isinstance(row, dict | None) for row in rows):
        raise SystemExit(
            f"{shown(path)} must hold one JSON object per problem, with a problem and its answer.")
    return rows


def read_parquet(path: Path) -> list[dict]:
    """Raises ValueError for more than MOST_VALUES: few kilobytes can hold a billion equal rows."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path)
    parts = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    values = sum(part.column(i).num_values for part in parts for i in range(part.num_columns))
    if values > MOST_VALUES:
        raise ValueError(f"it holds {values:,} values, and {MOST_VALUES:,} is the most")
    return file.read().to_pylist()


def read_csv(text: str) -> list[dict]:
    """Raises ValueError with the line in which a broken row begins.

    Strictly read: a quote that is never closed would swallow the rest of the file.
    """
    csv.field_size_limit(10**8)  # the default refuses cells above 128 KB
    table = csv.DictReader(io.StringIO(text), restkey=BEYOND, strict=True)
    rows, line = [], 1
    try:
        for row in table:
            rows.append(row)
            line = table.line_num + 1
    except csv.Error as error:
        at_the_end = str(error) == "unexpected end of data"
        why = "a quote is opened there and never closed" if at_the_end else error
        raise ValueError(f"the row that begins in line {line}: {why}") from None
    return rows


def read_lines(text: str) -> list:
    """JSON lines. Raises ValueError with the number of the first line that is none."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut at a U+2028 too
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except RecursionError:
            rows.append(None)
        except ValueError as error:
            raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from None
    return rows


# ------------------------------------------------------------------------------------------ the hub
def read_hub(name: str, split: str | None, for_training: bool):
    """Yields the rows of a benchmark or `org/name[:config][@split]`, from the hub or its cache."""
    full, _, named_split = BENCHMARKS.get(name, name).partition("@")
    repo, _, config = full.partition(":")
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repo):
        raise SystemExit(
            f"There is no data set '{shown(name, 80)}': give a file ({', '.join(SUFFIXES)}), "
            f"a hub id (org/name), or one of {', '.join([*BUILTIN, *BENCHMARKS, *GROUPS])}.")
    go_offline_if_unreachable(repo)
    asked = split or named_split
    wanted = [asked] if asked else ["train"] if for_training else ["test", "train"]
    for config in (config or CONFIGS.get(repo, "")).split(","):
        splits = load_from_hub(repo, config or None)
        found = next((s for s in wanted if s in splits), None)
        if not found:
            asked_for, there = shown(" or ".join(wanted)), shown(", ".join(splits))
            raise SystemExit(f"{repo} has no split {asked_for}, only {there}: name one, as in "
                             f"{repo}@{shown(next(iter(splits)))}.")
        yield from splits[found]


def go_offline_if_unreachable(repo: str, kind: str = "dataset"):
    """What the hub knows of a data set or model; None if it is busy, or cannot be reached.

    If nobody answers twice, only caches are used from now on, and a line says so.
    The hub's libraries would ask silence again for minutes. A busy hub is not offline (429, "too
    many requests", or 503): with that they have patience, and a cache may be out of date.
    """
    import huggingface_hub
    from huggingface_hub import errors

    for seconds in (4, 8):
        try:
            return getattr(huggingface_hub.HfApi(), f"{kind}_info")(repo, timeout=seconds)
        except errors.RepositoryNotFoundError:
            raise SystemExit(
                f"The hub has no {kind} {repo}: check its name, or run `hf auth login`.") from None
        except errors.OfflineModeIsEnabled:  # HF_HUB_OFFLINE=1, or nobody has answered before
            break
        except Exception as error:  # no network, no name service, time-out, a proxy's page or 403
            status = getattr(getattr(error, "response", None), "status_code", 0)
            if status == 429 or status >= 500:
                print(f"the hub is busy: {shown(error)}")
                return None
            silence = f"the hub does not answer ({shown(error) or type(error).__name__})"
    else:
        print(f"{silence}: only what is in this machine's cache is used")
    os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def load_from_hub(repo: str, config: str | None) -> dict:
    """Split name -> rows."""
    import datasets

    try:
        return datasets.load_dataset(repo, config)
    except Exception as error:
        configs = re.search(r"onfig.*\[(.+?)\]", str(error), re.DOTALL)
        if configs:
            names = shown(configs.group(1).replace("'", ""))
            first = names.split(",")[0]
            reason = f"{repo} has the configs {names}: name one, as in {repo}:{first}."
        elif datasets.config.HF_HUB_OFFLINE:
            reason = (f"The model hub cannot be reached and {repo} is not in the local cache: use "
                      "your own --data file.jsonl, or what is built in with --model tiny.")
        else:
            kind = type(error).__name__
            reason = f"{repo} could not be loaded: {kind}: {shown(str(error).strip())}"
        raise SystemExit(reason) from None
