"""The verifier: labelled tables, boxes, hostile answers, and verdicts that are remembered.

tests/reward_cases.jsonl holds whole completions: gold, completion, expected reward and its reason,
`verdict`, the status that is pinned here, and what math-verify 0.9.0 alone says with the gold as it
is (`plain`) and inside a box (`plain_boxed`). tests/answer_pairs.jsonl holds which answers are
`correct` and `wrong` beside a gold, which right ones are `missed` and which wrong ones `accepted`,
and which answer is found in completions. `decision` says why an answer counts as it does:

1  only the last box counts, and boxes are not joined into lists
2  a gold that is a number needs an answer that is one, and a chain counts by its last side
5  in tuples with names the written order is kept
6  number words, repeating decimals, dates, times, moduli, domains of parameters, renamed variables
   and ratios are read as they are written, and "and" is not told from "or"
"""
import contextlib
import os
import random
import re
from types import SimpleNamespace

import pytest

import rewards
from course.submission import Overtime, time_limit
from helpers import ROOT, lines
from parts.grader import NO_VERDICT, ForkingGrader, Verdict, decide
from rewards import MAX_CHARS, REWRITES, SPELLED, Grader, clean, extract_answer, judge

CASES = lines(ROOT / "tests" / "reward_cases.jsonl")
PAIRS = lines(ROOT / "tests" / "answer_pairs.jsonl")


def pairs(key: str) -> list:
    return [pytest.param(row, id=f"{row['why']}: {row[key]}") for row in PAIRS if key in row]


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


def boxed(answer: str) -> str:
    return f"So the answer is \\boxed{{{answer}}}."


def quickly(*question) -> tuple[str, str] | None:
    """The verdict without math-verify, if that is enough."""
    return decide(judge, question)


def score(grader, gold: str, completion: str, *style) -> float:
    return grader.grade([(gold, completion, *style)])[0].reward


# ------------------------------------------------------------------------------------ the table
@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_the_table_gets_the_pinned_verdicts(grader, step):
    """All that strings decide, and a tenth or all of what math-verify has to."""
    quick = [(case, quickly(case["gold"], case["completion"])) for case in CASES]
    undecided = [case for case, found in quick if not found][::step]
    found = [(case, status[0]) for case, status in quick if status]
    verdicts = grader.grade([(case["gold"], case["completion"]) for case in undecided])
    found += [(case, one.status) for case, one in zip(undecided, verdicts)]
    changed = [(case, status) for case, status in found if status != case["verdict"]]
    assert not changed, "a verdict is not the pinned one: a new error, or one less (then pin that)"
    assert len(found) > 1300


@pytest.mark.parametrize("row", pairs("gold"))
def test_right_answers_are_told_from_wrong_ones(row, grader):
    """With `either`, also with gold and answer in each other's place. What is known to be misjudged
    is `missed` or `accepted`: a rule that mends it moves it to the other lists."""
    asked = {}
    for key, right in (("correct", True), ("wrong", False), ("missed", False), ("accepted", True)):
        for answer in row.get(key, ()):
            asked[row["gold"], boxed(answer), row.get("style", "")] = right
            if "either" in row:
                asked[answer, boxed(row["gold"]), row.get("style", "")] = right
    found = [one.status == "correct" for one in grader.grade(list(asked))]
    assert dict(zip(asked, found)) == asked


def accepted() -> dict[tuple[str, str], bool]:
    """{(gold, completion): whether it is accepted} for all answers of both tables."""
    found = {(case["gold"], case["completion"]): case["verdict"] == "correct" for case in CASES}
    for row in PAIRS:
        for key in ("correct", "wrong", "missed", "accepted") if "gold" in row else ():
            for answer in row.get(key, ()) if "style" not in row else ():
                found[row["gold"], boxed(answer)] = key in ("correct", "accepted")
    return found


def spelled(pair: tuple[str, str]) -> tuple[str, str]:
    return clean(pair[0]), clean(extract_answer(pair[1]) or "")


@pytest.mark.long
def test_without_any_spelling_or_rewrite_a_verdict_changes(monkeypatch):
    """Each is removed in turn. Most verdicts that change need no math-verify, so they are first."""
    before = {pair: (*spelled(pair), right) for pair, right in accepted().items()}
    useless = []
    for one in [*SPELLED, *REWRITES]:
        with monkeypatch.context() as without:
            if one in SPELLED:
                without.delitem(SPELLED, one)
            else:
                without.setattr(rewards, "REWRITES", [other for other in REWRITES if other != one])
            clean.cache_clear()
            others = [pair for pair, (*was, _) in before.items()
                      if (one not in SPELLED or one in "".join(pair)) and spelled(pair) != (*was,)]
            others.sort(key=lambda pair: not quickly(*pair))
            if not any((judge(*pair)[0] == "correct") != before[pair][-1] for pair in others):
                useless.append(one)
    clean.cache_clear()
    assert not useless


# ------------------------------------------------------------------------------------ the parts
@pytest.mark.parametrize("row", pairs("answer"))
def test_the_last_closed_box_is_the_answer(row):
    for completion in row["completions"]:
        assert extract_answer(completion) == row["answer"], completion


def test_the_last_number_counts_in_minerva_style_and_only_the_last(grader):
    text = "We had 41.5 and then 1,200, so 7 of 9"
    assert extract_answer(text, "minerva") == "9"
    for number in ("-4.5e33", r"4.5\times10^{33}"):
        assert extract_answer(f"{text}, i.e. {number} or so", "minerva") == number
    assert extract_answer("7" + " " * 6000, "minerva") is None  # only the end is looked at
    assert extract_answer(r"\boxed{5} and 9", "minerva") == "5"
    problem, rollout = SimpleNamespace(answer="42"), SimpleNamespace(text="First 41, finally 42.")
    for style, reward in (("minerva", 1), ("", 0)):
        grader.submit("any key", problem, rollout, style=style)
        assert grader.result("any key").reward == reward
    assert score(grader, "1.4142135", boxed("1.4142"), "minerva") == 1
    assert score(grader, "0", boxed("1"), "minerva") == 0
    assert score(grader, "(1,2),(3,4)", boxed("x=1, y=2, x=3")) == 0
    assert score(grader, "1000000000", boxed("1,000,000,000")) == 1
    assert score(grader, "1.4142135", boxed("1.4142")) == 0
    assert extract_answer(r"42, so \boxed{4", "minerva") is None


def test_golds_are_checked_at_load_time(grader):
    golds = ["42", r"\sqrt{2}", "x=5", "no solution", r"x=\sqrt{36}=6", r"\text{(C)}", r"\foo{", ""]
    assert grader.check_golds([*golds, "1+" * 600 + "1"]) == [True] * 6 + [False] * 3
    assert score(grader, r"\foo{1", r"\boxed{1}") == score(grader, "", r"\boxed{0}") == 0


def test_a_lack_of_memory_is_not_called_unreadable(monkeypatch):
    monkeypatch.setattr(rewards, "read", lambda text: bytearray(2**60))
    with pytest.raises(MemoryError):
        judge("x", r"\boxed{x+0}")


# ------------------------------------------------------------------------------------ the spelling
UNITS = ("cm, Hours, km per hour, kPa, zorkmids, ripe pears in a basket, months, minutes, mm, "
         "essays, orders, thetas, mg, ft, in, mi, hr, mL, nm")
NO_UNITS = (  # they change the value, take it back, or are mathematics
    "half, halves, third, thirds, quarter, quarters, sevenths, thousandth, tens, dozen, dozens, "
    "pair, pairs, hundred, hundreds, thousand, thousands, billion, trillions, lakh, lakhs, "
    "percentage, double, twice, squared, cubed, factorial, base, mod, over, minus, plus, negative, "
    "less, more, below, about, least, most, than, not, no, wrong, maybe, if, except, is, was, "
    "a.m., pm, p.m., k, M, theta, e, million years, k dollars, degrees below zero, minus four, "
    "not sure, of the sort that is wrong, 万, 亿, 千, 百, 十, 半, 倍, x = m, x < m, m!, why?")


def test_any_words_are_a_unit_unless_they_change_the_value():
    for words in (UNITS + ", " + NO_UNITS).split(", "):
        for text in (f"5 {words}", rf"5 \text{{ {words}}}", rf"5\,\mathrm{{({words})}}"):
            assert (clean(text) == "5") == (words in UNITS.split(", ")), text


def test_every_step_is_shown(grader, monkeypatch, capsys):
    monkeypatch.setattr(rewards, "Grader", lambda workers: contextlib.nullcontext(grader))
    for gold, path in (("x+1", "math-verify"), ("7" * 300, "strings and fractions")):
        argv = ["rewards.py", "--gold", gold, "--completion", r"so \boxed{\frac12+x}"]
        monkeypatch.setattr("sys.argv", argv)
        rewards.main()
        assert capsys.readouterr().out.splitlines() == [
            r"box      '\\frac12+x'", f"gold     '{gold}' -> '{gold}'",
            r"answer   '\\frac12+x' -> '\\frac{1}{2}+x'", f"path     {path}",
            rf"verdict  wrong, reward 0.0: {gold} and \frac{{1}}{{2}}+x"]
    monkeypatch.setattr("sys.argv", "rewards.py --gold 7 --completion 7 --style minerva".split())
    rewards.main()
    said = capsys.readouterr().out
    assert said.startswith("box      '7'\n") and "\nverdict  correct" in said


# ------------------------------------------------------------------ what was asked before
@pytest.mark.parametrize("status", NO_VERDICT)
def test_only_a_verdict_is_remembered(monkeypatch, status):
    verdicts = iter([Verdict(status), Verdict("correct")])
    monkeypatch.setattr(ForkingGrader, "ask_worker", lambda *question: next(verdicts))
    with Grader(workers=1) as grader:
        found = [grader.ask_worker("7", r"\boxed{7.0}").status for _ in range(3)]
        assert [*grader.known] == [("7", "7.0", "")]
    assert found == [status, "correct", "correct"]


# ---------------------------------------------------------------------------------- hostile answers
def nested(left: str, right: str, n: int, core: str = "1") -> str:
    return left * n + core + right * n


BOMBS = [      # many would run for minutes
    "10^{10^{10}}", "9^{9^{9^9}}", r"2^{10^{12}} \bmod 7", "100000000!", "((9!)!)!",
    r"\binom{10^8}{5\cdot10^7}", r"\Gamma(10^9)", nested(r"\frac{1}{1+", "}", 13, "x"),
    nested("(", ")", 200), nested("{", "}", 5000), nested("2^{", "}", 30, "2"),
    r"\sum_{k=2}^{24} \log_k(x^{k+1}+k)", r"\int_0^1 \frac{\sin(x^3)}{e^{x^2}+\ln(x+2)}dx",
    r"\{" + ",".join(map(str, range(3000))) + r"\}", ",".join(map(str, range(190))),
    "0." + "1234567890" * 2000, "(x+y+z)^{200}=1", "+".join(f"a_{{{i}}}" for i in range(2000)),
    r"\begin{pmatrix}" + r"\\".join("&".join("1" * 60) for _ in range(60)) + r"\end{pmatrix}",
    r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{1000000000}", r"\frac{" * 150, "1" + "!" * 50,
    "x^" * 400 + "2", "|x" * 300 + "|" * 300, "1=" * 400 + "1", "x<" * 200 + "x",
    "(1," * 100 + "1" + ")" * 100, "\\text{a" * 100, "\\pm 1" * 180, "1 cm" + " cm" * 200,
    "1 000 " * 150, "a and " * 150, "\x00" * 500, "\ud800" * 300, "42\ud800", "4\x002", "\u202e42",
    "4\u03362\u0336", "a" + "\u0301" * 900, "½" * 300, "√" * 300, "\\" * 999, "°" * 500,
    "1e999999999", "1e-999999999", "nan", r"\infty-\infty", r"\frac{0}{0}", "0^0", r"\ln 0", "True"]
LONG = [
    "a" * 100_000, "$x$, " * 20_000, " " * 100_000, "\\" * 100_000, "\\(" * 50_000,
    "1 " * 50_000, "\\boxed{" * 20_000, "\\boxed{" + "9" * 99_000 + "}",
    " ".join(f"\\boxed{{{k}}}" for k in range(7000)), "\\boxed 1" * 14_000, "{" * 100_000,
    "\\boxed{" + "\\frac{1}{" * 9000 + "}" * 9001, "\\boxed{" * 14_000 + "}" * 14_000,
    "^(" * 50_000, "\\boxed{" + "a\u0301" * 50_000 + "}", "\x00" * 100_000, "",
    "\\boxed{41} is wrong, since. " * 3500, "\n" * 100_000, "½√²≤" * 25_000,
]


@pytest.mark.slow
def test_hostile_answers_score_zero_and_do_not_disturb_the_others():
    pairs = [(gold, boxed(bomb)) for gold in ("42", r"\sqrt{2}") for bomb in BOMBS]
    pairs += [("42", text) for text in LONG]
    with Grader(cpu_seconds=0.3) as grader:
        for pair, verdict in zip(pairs, grader.grade(pairs)):
            assert verdict.status != "correct", (pair[1][:80], verdict)
        assert score(grader, r"\sqrt{12}", boxed(r"2\sqrt{3}")) == 1


RUN = "__import__('os').system('touch MARK')"
INJECTIONS = [
    RUN, f"1 if {RUN} else 42", f"eval(\"{RUN}\")", f"[x for x in [{RUN}]]", f"S(\"{RUN}\")",
    f"f({RUN})", f"'''+{RUN}+'''", f"\\text{{{RUN}}}", f"\\operatorname{{{RUN}}}",
    "open('MARK','w').write('x')", "\\write18{touch MARK}", "\\input{MARK}", "$(touch MARK)",
    "`touch MARK`", f"lambda: {RUN}", f"sympify(\"{RUN}\")", f"x_{{{RUN}}}", f"\\sqrt{{{RUN}}}"]


def test_code_in_an_answer_is_never_run(grader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    injections = [text.replace("MARK", str(tmp_path / "MARK")) for text in INJECTIONS] + INJECTIONS
    texts = [wrapped for text in injections
             for wrapped in (text, boxed(text), f"${text}$ \\boxed{{41}}")]
    verdicts = grader.grade([(gold, text) for gold in ("42", "x+1") for text in texts])
    assert all(verdict.status != "correct" for verdict in verdicts)
    grader.check_golds(injections)
    for text in injections:  # once more without what comes before math-verify's parser
        rewards.equal("42", text)
        rewards.equal(text, "42")
    assert os.listdir(tmp_path) == []


def test_characters_that_unfold_into_many_are_compared_as_strings():
    assert judge("42", boxed("\ufdfa" * MAX_CHARS))[0] == "unparseable"  # each is 18


PIECES = ["1", "a", " ", "{", "}", "\\", "(", ",", "\\text{", "^", "\\frac{", "=", "and ", "m", "/",
          "5 cm", "\\%", "$", "1,000", "\\text{m}", "^2", "-", "x in ", "m2 ", "\\pi "]


def test_no_text_makes_a_pattern_backtrack():
    """The square of 3,000 steps takes a tenth of a second, and their cube minutes."""
    rng = random.Random(3)
    texts = PIECES + ["".join(rng.choices(PIECES, k=3)) for _ in range(25)]
    patterns = [re.compile(one.replace("§", "(?![A-Za-z])")) for _, one, _ in REWRITES]
    patterns += [one for one in vars(rewards).values() if isinstance(one, re.Pattern)]
    assert len(patterns) > 30
    found = [(one.pattern, text) for one in patterns for text in texts if backtracks(one, text)]
    assert found == []
    for one, text in ((r"(a+)+b", "a"), (r"\s*x?\s*y?\s*z", " ")):
        assert backtracks(re.compile(one), text)


def backtracks(pattern: re.Pattern, text: str) -> bool:
    try:
        with time_limit(5):
            for _ in pattern.finditer((text * 3000)[:3000]):
                pass
    except Overtime:
        return True
    return False


def test_long_honest_completions_keep_their_reward(grader):
    for filler in LONG:
        for gold, answer in [("42", "42"), (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2")]:
            said = f"{filler} so it is $\\boxed{{{answer}}}$."
            assert score(grader, gold, said) == 1, filler[:20]
