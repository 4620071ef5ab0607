"""What the lists of mutants quote is there."""
import pytest

from helpers import ROOT, lines


@pytest.mark.parametrize("page", ["course/mutants.jsonl", "course/answers/bugs.jsonl"])
def test_what_mutants_quote_is_there_once_and_so_are_their_tests(page):
    """The hunts in test_course.py show that such a test fails on the broken code only."""
    for line, mutant in enumerate(lines(ROOT / page), 1):
        assert (ROOT / mutant["file"]).read_text().count(mutant["old"]) == 1, (
            f"{page}, line {line}: copy the changed line of {mutant['file']} into `old` and break "
            f"it in `new`; if it occurs twice, put a line next to it into both: {mutant}")
        file, _, name = mutant.get("test", "").partition("::")
        assert not file or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), (
            f"{page}, line {line}: name the test that notices it now: {mutant}")
