"""The pages agree with the code: links, names, commands, quoted lines and tables. The gallery
agrees with the present build.py."""
import json
import re
import runpy
from xml.etree import ElementTree

import pytest

from ada_sampler import OPEN, RULES, Group, Sample, SamplerConfig, exit_test, set_advantages
from helpers import ROOT
from parts.config import OBJECTIVES, Config, parse

REPORTS = sorted((ROOT / "bench/results").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")),
         *sorted((ROOT / "course").rglob("*.md")), *sorted((ROOT / "bench").glob("*.md")),
         ROOT / "examples/README.md", ROOT / "recipes/README.md", *REPORTS]
README = (ROOT / "README.md").read_text()


def anchors(page) -> set[str]:
    """As GitHub makes them from headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    dead = []
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not link.startswith("http") and not (
                target.exists() and (not anchor or target.suffix == ".html"  # see `check` below
                                     or anchor in anchors(target))):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("flag, names, page, file", [
    ("sampler", RULES, "docs/method.md", "ada_sampler.py"),
    ("objective", OBJECTIVES, "docs/method.md", "minirl.py")])
def test_every_rule_and_objective_is_described(flag, names, page, file):
    text, code = (ROOT / page).read_text(), (ROOT / file).read_text()
    for name in names:
        assert f"`--{flag} {name}" in text, f"describe `--{flag} {name}` in {page}"
        assert re.search(rf"^ +{name}  ", code, re.M), (
            f"add {name} to the list of {flag}s in a docstring of {file}")


def test_every_module_says_what_would_be_lost_without_it():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.split("## What stands behind the scripts")[1].split("\n## ")[0]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.+?) \|", section, re.M)))
    modules = [file.stem for room in ("parts", "explorer") for file in (ROOT / room).glob("*.py")]
    assert sorted(named) == sorted(modules), "update this table of CONTRIBUTING.md"


def test_the_map_leads_to_functions_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split("## From paper to line")[1].split("\n## ")[0]
    code = "\n".join((ROOT / name).read_text() for name in (
        "minirl.py", "ada_sampler.py", "parts/metrics.py", "parts/routing_replay.py"))
    rows = [line.split(" | ")[-1] for line in section.splitlines() if line.startswith("| ")][1:]
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    known = set(re.findall(r"^(?:def|class) (\w+)|^    (\w+_T) = ", code, re.M))
    assert len(names) >= 12 and names - {name for pair in known for name in pair} == set(), (
        "update the last column of this table in CONTRIBUTING.md")


def test_the_readme_has_the_lengths_flags_and_defaults_of_the_code():
    """A length may differ by 5 %, so that a small change of a script is no change of the page."""
    lengths = [(file, said) for said, file in re.findall(r"(\d+)\s+lines\]\((\S+\.py)\)", README)]
    lengths += re.findall(r"\]\((\S+\.py)\) \((\d+) lines\)", README)
    assert len(lengths) >= 4
    for file, said in lengths:
        lines = len((ROOT / file).read_text().splitlines())
        assert abs(lines - int(said)) <= 0.05 * lines, f"{file} has {lines} lines"
    program = [*ROOT.glob("*.py"), *ROOT.glob("parts/*.py"), *ROOT.glob("explorer/*.py")]
    lines = sum(len(file.read_text().splitlines()) for file in program)
    assert "whole program has 5,850 lines" in README and abs(lines - 5850) <= 50
    flags = set(re.findall(r"--([a-z][\w-]*)", README))
    assert flags and flags <= {name.replace("_", "-") for name in vars(Config())}
    c = Config()
    for said in (f"M = {SamplerConfig.M} answers", f"N = {c.N} rounds", f"n = {c.n} answers",
                 f"> {1 + c.eps_high:g}", f"< {1 - c.eps_low:g}", rf"\mu}}, {c.weight_cap:g}\r"):
        assert said in README + (ROOT / "docs/method.md").read_text(), f"pages do not say {said}"


def test_the_pages_of_docs_stay_short():
    """Without code and the targets of links."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for text, most in ((README, 900), (pages, 14_000)):
        words = re.sub(r"```.*?```|\]\([^)]*\)", " ", text, flags=re.S).split()
        assert sum(bool(re.search("[A-Za-z]", word)) for word in words) <= most


def test_quoted_lines_are_lines_of_the_code():
    code = {line.split("#")[0].strip() for file in ("minirl.py", "ada_sampler.py")
            for line in (ROOT / file).read_text().splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/method.md").read_text(), re.S)
    quoted = "".join(blocks).splitlines()
    assert quoted and [line for line in quoted if line.split("#")[0].strip() not in code] == [], (
        "docs/method.md quotes these lines: copy them anew from the code")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "walkthrough.ipynb"], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    """Files in commands, targets of make, functions where the text says: `restore` in
    `parts/run_folder.py`, or `merged_weights` (`parts/engine.py`)."""
    text = page.read_text()
    files = re.findall(r"python ((?:\w+/)*\w+\.py)", text)
    files += [f"parts/{module}.py" for module in re.findall(r"python -m parts\.(\w+)", text)]
    files += re.findall(r"pytest (tests/\w+\.py)", text)
    for name, word in re.findall(r"pytest (tests/\w+\.py) -k (\w+)", text):
        assert re.search(rf"^def test_\w*{word}", (ROOT / name).read_text(), re.M)
    files += re.findall(r"`((?:parts|explorer|bench|tests)/\w+\.(?:py|jsonl?|md))`", text)
    real = [name for name in files if not name.endswith("X.py")]  # a placeholder
    assert [name for name in real if not (ROOT / name).exists()] == [], f"update {page.name}"
    made = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:^|`|&& )make ([a-z-]+)", text, re.M)) <= {*made}
    says = r"`(\w+)` (?:in |\()`((?:parts/|explorer/|tests/)?\w+\.py)`"
    wrong = [(name, file) for name, file in re.findall(says, text) if not re.search(
        rf"^(def |class |){name}\b",
        (ROOT / ("tests" if file.startswith("test_") else "") / file).read_text(), re.M)]
    assert wrong == [], f"{page.name} names functions that are no longer there: rename them in it"


def test_each_number_of_the_picture_of_the_rounds_follows_from_the_rule():
    """docs/rounds.svg: rounds, pool, kept answers and advantages, by ada_sampler.py's defaults."""
    picture = ElementTree.parse(ROOT / "docs/rounds.svg").getroot()
    config, names = SamplerConfig(), {"g": "{http://www.w3.org/2000/svg}g"}
    assert f"M = {config.M} answers" in (said := "".join(picture.itertext()))
    assert f"N = {config.N} rounds" in said and f"n = {config.n} answers are kept" in said

    def marks(part):
        return [use.get("href") == "#right" for use in part.iter(names["g"][:-1] + "use")]

    prompts = [g for g in picture.iter(names["g"]) if g.get("id")]
    assert len(prompts) == 4
    for prompt in prompts:
        parts = [(part.get("class"), part) for part in prompt.iter()]
        rounds = [marks(part) for name, part in parts if name == "round"]
        drawn = [mark for one in rounds for mark in one]
        group = Group(0, None, [Sample(i, i // 8, reward=float(right), correct=right)
                                for i, right in enumerate(drawn)], outcome=OPEN)
        for t in range(1, len(rounds) + 1):
            right = sum(drawn[:config.M * t])
            outcome = exit_test(right, config.M * t - right, t, config)
            assert len(rounds[t - 1]) == config.M and (outcome == OPEN) == (t < len(rounds))
        set_advantages(group, config)
        (pool,) = [part.text for name, part in parts if name == "pool"]
        (kept,) = [marks(part) for name, part in parts if name == "kept"]
        assert pool == f"{sum(drawn)} of {len(drawn)}"
        assert kept == [s.correct for s in group.kept]
        for name, right in (("if-right", True), ("if-wrong", False)):
            said = [float(part.text.replace("−", "-")) for key, part in parts if key == name]
            true = {round(a, 3) for s, a in zip(group.kept, group.advantages) if s.correct == right}
            assert {*said} == true
    # The sentence about uniform sampling: only the second prompt's first four answers differ.
    first = [marks(next(part for part in prompt.iter() if part.get("class") == "round"))[:4]
             for prompt in prompts]
    assert [len({*four}) for four in first] == [1, 2, 1, 1]


def test_the_sampler_runs_in_the_loop_of_its_page(capsys):
    runpy.run_path(str(ROOT / "examples/own_loop.py"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(8 <= int(re.search(r"(\d+) answers", line)[1]) <= 32
                                   for line in lines)


# ------------------------------------------------------------------------------ numbers
N = r"[+-]?\d[\d.,]*"
CLAIM = rf"{N} ± {N}|{N} % \[{N}, {N}\]|\bp = {N}"


def plain(text: str) -> str:
    return re.sub(r"[\s*`|]+", " ", text.replace("−", "-").replace("% ±", " ±"))


def test_every_difference_interval_and_p_value_of_a_page_is_in_a_report():
    """Which a command of bench/ prints. In the course p is a pass rate."""
    reports = plain("".join(file.read_text() for file in REPORTS))
    said = {claim.rstrip(".,").lstrip("+-") for page in PAGES if page not in REPORTS
            for claim in re.findall(CLAIM, plain(page.read_text()))
            if "course" not in page.parts or not claim.startswith("p =")}
    assert len(said) > 30 and {claim for claim in said if claim not in reports} == set()


# ------------------------------------------------------------------------------ the gallery
GALLERY = ROOT / "docs" / "gallery"
BUILD = runpy.run_path(str(GALLERY / "build.py"))


def test_the_runs_are_those_of_the_commands_and_name_no_place_on_the_machine_that_made_them():
    """And all is as it would be written, and every link leads to something recorded."""
    BUILD["check"]()
    guide = (GALLERY.parent / BUILD["GUIDE"]).read_text()
    for page, (name, flags) in BUILD["RUNS"].items():
        (run,) = BUILD["data_in"]((GALLERY / f"{page}.html").read_text())["runs"]
        said = json.dumps([run["name"], run["config"], run["groups"]])
        assert run["name"] == name and not re.search(r"/(work|tmp|home|root|usr|mnt)\b", said)
        if flags:
            config = vars(parse(["--name", name, "--steps", "20", *flags.split()]))
            asked = [flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", flags)]
            assert f"`python minirl.py {flags} --steps 20`" in guide
            assert [config[key] for key in asked] == [run["config"][key] for key in asked]
