"""The students' copy of the project, built by the command in course/README.md: it has no answer
and no bug of the hunt, and what students run is in it."""
import io
import json
import re
import shlex
import subprocess
import sys
import tarfile

import pytest

from bench.mutate import mutated
from course import bugs
from helpers import ROOT, lines

README = (ROOT / "course" / "README.md").read_text()
ANSWERS = ROOT / "course" / "answers"
PREFIX = "minirl/"


@pytest.fixture(scope="module")
def archive() -> tarfile.TarFile:
    """As the page says, of what is committed; only the file's name and format differ."""
    words = shlex.split(re.search(rf"git archive --prefix={PREFIX} -o \S+ (.*)", README)[1])
    done = subprocess.run(["git", "archive", f"--prefix={PREFIX}", *words], cwd=ROOT,
                          capture_output=True, check=True)
    return tarfile.open(fileobj=io.BytesIO(done.stdout))


@pytest.fixture(scope="module")
def texts(archive) -> dict[str, str]:
    """Name in the copy -> its text, of every file that is text."""
    found = {}
    for member in filter(tarfile.TarInfo.isfile, archive):
        content = archive.extractfile(member).read()
        if b"\0" not in content:
            found[member.name.removeprefix(PREFIX)] = content.decode()
    return found


@pytest.fixture(scope="module")
def everything(texts) -> str:
    """All texts in one, without the ends of lines; what JSON quotes is found, too."""
    text = "\n".join(texts.values())
    return " ".join(text.replace("\\n", "\n").replace('\\"', '"').split())


def told(passages: list[str], everything: str) -> list[str]:
    return [one for one in passages if " ".join(one.split()) in everything]


def planted_lines(bug: dict) -> list[str]:
    """The lines that the bug adds to its file, without those that say nothing by themselves."""
    before = (ROOT / bug["file"]).read_text()
    known = {line.strip() for line in before.splitlines()}
    added = {line.strip() for line in mutated(before, bug).splitlines()} - known
    return [line for line in added if len(line) > 20 and line not in bug["old"]]


@pytest.mark.parametrize("bug", bugs.bugs().values(), ids=lambda bug: str(bug["number"]))
def test_no_file_has_a_bug_of_the_hunt(bug, everything, texts):
    passages = [bug["answer"], bug["source"], *bug["hints"], *planted_lines(bug)]
    if len(bug["new"].strip()) > 20 and bug["new"].strip() not in bug["old"]:
        passages.append(bug["new"])
    assert len(passages) >= 5 and told(passages, everything) == []
    if not planted_lines(bug):  # it deletes, shortens or moves: a list would quote what it changes
        kept = {line.strip() for line in bug["new"].splitlines()}
        for line in {line.strip() for line in bug["old"].splitlines()} - kept:
            quoted = line, json.dumps(line)[1:-1]
            found = [name for name, text in texts.items() if any(one in text for one in quoted)]
            assert found == [bug["file"]], line


@pytest.mark.parametrize("page", sorted(ANSWERS.glob("*.md")), ids=lambda page: page.name)
def test_no_file_has_an_answer(page, everything):
    """Every sentence of a page of answers that is long enough to mean something."""
    prose = re.sub(r"^\|.*\|$|^#.*$", "", page.read_text(), flags=re.M)
    sentences = [one for one in re.split(r"(?<=[.!?])\s+", prose) if len(one) > 40]
    assert len(sentences) > 10 and told(sentences, everything) == []


def test_no_file_has_the_solution_of_a_lab(everything):
    right = [row["code"] for row in lines(ROOT / "tests/lab_solutions.jsonl") if "right" in row]
    functions = [one for code in right for one in code.split("\ndef ") if len(one) > 100]
    assert len(functions) > 30 and told(functions, everything) == []


def test_what_only_the_teacher_has_is_not_in_it(texts):
    hidden = re.compile(r"tests/|course/answers|course/(?:bugs|grade)\.py|.*mutants\.jsonl")
    assert [name for name in texts if hidden.match(name)] == []
    assert {"course/train.py", "course/students.md", "minirl.py", "walkthrough.ipynb"} <= {*texts}


@pytest.mark.slow
def test_a_lab_is_graded_in_the_unpacked_copy(archive, tmp_path):
    """Nothing that the checker imports is left out."""
    archive.extractall(tmp_path, filter="data")
    for lab in "12345678":
        done = subprocess.run([sys.executable, "course/check.py", lab], cwd=tmp_path / PREFIX,
                              capture_output=True, text=True)
        assert done.returncode == 1 and done.stdout.endswith("\n0 of 10 points\n"), done.stderr
