"""The arithmetic of the benchmarks, and the GPU part end to end on the CPU with a small model."""
import json

import pytest

import measure
from helpers import ROOT, lines, run_program


# ------------------------------------------------------------------------------ speed and memory
def test_alternate_takes_turns_and_drops_the_warm_up():
    order = []
    taken = measure.alternate(2, a=lambda: order.append("a") or len(order),
                              b=lambda: order.append("b") or len(order))
    assert order == list("ababab") and taken == dict(a=[3, 5], b=[4, 6])
    assert measure.ratio([2, 30, 4], [1, 10, 1]) == "3.00 (2.00 to 4.00)"


@pytest.mark.engine
def test_the_sampler_is_measured_beside_vllm(tmp_path):
    """Both sides write equally many answers, and the table becomes a page."""
    elsewhere = (f"import sys; sys.path[:0] = ['{ROOT}/bench']\n"
                 f"import pathlib, store; store.RESULTS = pathlib.Path('{tmp_path}')")
    run_program("bench/measure.py", "rollouts", "--batch-prompts", "2", "--max-tokens", "8",
                cwd=tmp_path, before=elsewhere)
    rows = [row.strip("| ").split(" | ") for row in
            (tmp_path / "rollouts.md").read_text().splitlines() if row.startswith("| ")]
    assert [row[0] for row in rows] == ["rounds", "4 of 8", "2 of 16", "one"]
    assert rows[3][1:3] == ["32", "8"]  # 2 prompts with 16 answers each, one token in a step


@pytest.mark.engine
def test_the_gpus_part_runs_on_a_cpu(tmp_path):
    small = "--sync merge --max-tokens 24 --batch-prompts 4 --eval-questions 4 --steps 2"
    run_program("bench/measure.py", "gpu", *small.split(), cwd=tmp_path)
    first, second = lines(tmp_path / "runs/gpu/metrics.jsonl")
    assert first["probe_gap_max"] < 1e-4 and first["response_length"] == 24
    assert 0.1 < first["reward_first_round"] < 0.9


# ------------------------------------------------------------------------------ the verifier
@pytest.mark.slow
def test_the_verifier_is_compared_with_math_verify_on_the_answers_in_logs(tmp_path, capsys):
    """It reads an evaluation's eval.jsonl and a run's groups.jsonl. Equal answers count once."""
    answers = [("1", r"\boxed{1 foot}."), ("0", r"\boxed{x^2=0}"), ("5", r"\boxed{5}"),
               ("5", r"\boxed{5}"), ("5", r"\boxed{5}, so \boxed{5"), ("5", "5")]
    rows = [dict(data="some", gold=gold, text=text) for gold, text in answers]
    (tmp_path / "eval.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    table = measure.verifier(str(tmp_path), str(ROOT / "tests/explore_run/one"))
    assert table[1] == [f"{tmp_path.name}, some", "5", "3", "2", "2", "1", "1"]
    assert table[2][0] == "one, builtin" and table[2][5:] == ["0", "0"]
    assert [row[1] for row in table[4:]] == ["gold `1`", "gold `0`"]
    said = capsys.readouterr().out
    assert "gold '0', here wrong, math-verify True" in said and "2 differences in" in said


# ------------------------------------------------------------------------------ mutants
@pytest.mark.parametrize("page", ["course/mutants.jsonl", "course/answers/bugs.jsonl"])
def test_what_mutants_quote_is_there_once_and_so_are_their_tests(page):
    """The hunts in test_course.py show that such a test fails on the broken code only."""
    for line, mutant in enumerate(lines(ROOT / page), 1):
        assert (ROOT / mutant["file"]).read_text().count(mutant["old"]) == 1, (
            f"{page}, line {line}, must quote a line of {mutant['file']} that occurs once: copy "
            "the changed line into `old` and break it in `new`; if it now occurs twice, put a line "
            f"next to it into both; if it is gone, delete the row: {mutant}")
        file, _, name = mutant.get("test", "").partition("::")
        assert not file or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), (
            f"{page}, line {line}: name the test that notices it now: {mutant}")
