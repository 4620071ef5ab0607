"""Evaluation: estimators against brute force, intervals, resuming, the real engine."""
import gc
import itertools
import json
import math
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import eval as evaluation  # noqa: E402  (the module has the name of a builtin)
from eval import compare, estimate, evaluate, pass_at_k, report, summary_of  # noqa: E402
from parts import adapter as adapters  # noqa: E402
from parts import eval_folder, plot  # noqa: E402


# ------------------------------------------------------------------------------------ the stand-ins
@dataclass
class Question:
    id: str
    answer: str = "1"
    source: str = "a"
    level: str = ""
    problem: str = "?"
    prompt_ids: tuple = (1, 2)
    row: tuple = ()

    @property
    def judged_by(self):
        return self.answer


class FakeEngine:
    """Answers 0 or 1 after a few steps, in scrambled order,
    from a random state that `reseed` sets."""

    def __init__(self, interrupt_after=None):
        self.running, self.rng, self.left = [], random.Random(0), interrupt_after
        self.temperatures = set()

    def submit(self, key, prompt_ids, max_tokens, temperature=None):
        self.running.append(key)
        self.temperatures.add(temperature)

    def step(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        self.rng.shuffle(self.running)
        done, self.running = self.running[:3], self.running[3:]
        return [(key, rollout(self.rng.choice("01"), self.rng.randint(1, 9))) for key in done]

    @property
    def busy(self):
        return bool(self.running)


def rollout(text, tokens):
    reason = "length" if tokens == 9 else "stop"
    return SimpleNamespace(text=text, token_ids=[0] * tokens, finish_reason=reason)


class FakeGrader:
    def __init__(self):
        self.pending, self.styles = {}, set()

    def submit(self, key, gold, completion, style=""):
        assert key not in self.pending
        self.styles.add(style)
        self.pending[key] = float(gold == completion)

    def result(self, key):
        reward = self.pending.pop(key)
        return SimpleNamespace(reward=reward, status="correct" if reward else "wrong")


@pytest.fixture
def reseeds(monkeypatch):
    """Replaces torch's random state by the fake engine's own."""
    def reseed(engine, name):
        engine.rng = random.Random(name)
    monkeypatch.setattr(evaluation, "reseed", reseed)


def rows_of(rewards_by_question, data=None, status=None):
    """Rows as `evaluate` makes them, from lists of rewards."""
    return [dict(id=str(q), sample=s, reward=float(reward), tokens=10, finish_reason="stop",
                 status=status or ("correct"
                                   if reward else "wrong")) | ({"data": data} if data else {})
            for q, rewards in enumerate(rewards_by_question) for s, reward in enumerate(rewards)]


# --------------------------------------------------------------------------------------- estimators
@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        samples = [1] * right + [0] * (n - right)
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets),
                                                       abs=1e-12)


@pytest.mark.parametrize("n, c, k", [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses_what_cannot_be_estimated(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


def test_report_against_brute_force():
    rng = random.Random(1)
    rewards = [[rng.random() < p for _ in range(8)] for p in (0, 0.1, 0.3, 0.5, 0.9, 1)]
    result = report(rows_of(rewards))
    assert result["k"] == 8 and result["questions"] == 6 and list(result["pass"]) == [1, 2, 4, 8]
    assert result["avg"] == pytest.approx(np.mean(rewards)) == pytest.approx(result["pass"][1])
    assert result["pass"][8] == pytest.approx(np.mean([any(r) for r in rewards]))
    for k in (2, 4):
        brute = np.mean([np.mean([any(s) for s in itertools.combinations(r, k)]) for r in rewards])
        assert result["pass"][k] == pytest.approx(brute)
    assert 0 <= result["ci_low"] <= result["avg"] <= result["ci_high"] <= 1
    assert report(rows_of(rewards)) == result, "the interval must not depend on chance"
    assert json.loads(json.dumps(result))["pass"]["4"] == result["pass"][4]


def test_report_counts_what_went_wrong():
    statuses = ["no_box", "timeout", "killed", "unparseable", "empty", "wrong", "wrong", "correct"]
    rows = [dict(id="a", sample=s, reward=float(status == "correct"), status=status, tokens=s,
                 finish_reason="length" if s < 2 else "stop") for s, status in enumerate(statuses)]
    result = report(rows)
    assert result["no_box"] == 1 / 8 and result["verifier_failures"] == 2 / 8
    assert result["truncated"] == 2 / 8
    assert result["response_length"] == 3.5 and sum(result["verdicts"].values()) == 8
    assert result["avg"] == 1 / 8


def test_report_of_one_sample_and_of_all_alike():
    one = report(rows_of([[1]]))
    assert one["avg"] == one["ci_low"] == one["ci_high"] == 1 and one["pass"] == {1: 1.0}
    none = report(rows_of([[0] * 3] * 5))
    assert none["avg"] == none["ci_high"] == none["pass"][2] == 0 and list(none["pass"]) == [1, 2]
    assert report(rows_of([[0, 1, 1]]), ks=[3])["pass"] == {3: 1.0}


def test_report_refuses_nonsense():
    with pytest.raises(ValueError, match="no rows"):
        report([])
    with pytest.raises(ValueError, match="different numbers of samples"):
        report(rows_of([[1, 0], [1]]))
    with pytest.raises(ValueError, match="pass@3"):
        report(rows_of([[1, 0]]), ks=[3])


# ---------------------------------------------------------------------------------------- intervals
@pytest.mark.slow
@pytest.mark.parametrize("questions, low, high",
                         [(30, 0.88, 0.99), (100, 0.91, 0.99), (300, 0.92, 0.98)])
def test_the_interval_covers_the_truth(questions, low, high):
    rng, trials, covered = np.random.default_rng(questions), 250, 0
    for _ in range(trials):  # pass rates with the spread of a hard benchmark, 8 samples each
        rates = rng.beta(0.4, 0.8, questions)
        result = estimate([rng.binomial(8, rates) / 8], resamples=300)
        covered += result["ci_low"] <= 0.4 / 1.2 <= result["ci_high"]
    print(f"\n{questions} questions: a 95 % interval covers the truth in {covered / trials:.1%} "
          f"of {trials}")
    assert low <= covered / trials <= high


def test_the_interval_is_that_of_all_ways_to_draw_the_questions_again():
    values = [0.0, 1.0, 2.0, 5.0]
    means = [np.mean(drawn) for drawn in itertools.product(values, repeat=4)]  # equally likely
    low, high = np.percentile(means, (2.5, 97.5))
    result = estimate([values], resamples=20_000)
    assert (result["ci_low"], result["ci_high"]) == pytest.approx((low, high), abs=0.01)


def test_the_same_rows_have_the_same_interval():
    """Of values that are all different: on few values, percentiles agree whatever is drawn."""
    values = np.random.default_rng(3).random(40)
    assert estimate([values]) == estimate([values])
    assert estimate([values], seed=1)["ci_low"] != estimate([values], seed=2)["ci_low"]


def test_resampling_samples_would_be_too_narrow():
    rng = np.random.default_rng(0)
    rewards = rng.random((100, 32)) < rng.beta(0.3, 0.6, 100)[:, None]
    by_question, by_sample = estimate([rewards.mean(1)]), estimate([rewards.ravel()])
    assert width(by_question) > 3 * width(by_sample)


def width(result):
    return result["ci_high"] - result["ci_low"]


def test_the_weighted_average_uses_the_given_weights():
    result = estimate([[1, 1, 1], [0, 0], [0.5] * 9], [1, 2, 1])
    assert [result[key] for key in ("avg", "ci_low", "ci_high")] == pytest.approx([3 / 8] * 3)
    rng = np.random.default_rng(1)
    a, b = rng.random(200), rng.random(50)
    pooled = estimate([a, b], [1, 3])
    spread = 1.96 * (a.var() / 200 / 16 + b.var() / 50 * 9 / 16) ** 0.5
    assert pooled["avg"] == pytest.approx(a.mean() / 4 + 3 * b.mean() / 4)
    assert width(pooled) == pytest.approx(2 * spread, rel=0.1)


def test_a_paired_comparison_sees_what_separate_intervals_hide():
    rng, rates = np.random.default_rng(2), np.repeat(np.linspace(0, 1, 10), 20)
    before = rng.random((200, 16)) < rates[:, None] * 0.9
    after = rng.random((200, 16)) < rates[:, None]
    first, second = rows_of(after, "a"), rows_of(before, "a")
    apart, paired = report(second), compare(first, second, {"a": 200})["a"]
    assert apart["ci_high"] > report(first)["ci_low"], "the separate intervals overlap"
    assert paired["ci_low"] > 0 and width(paired) < width(apart) / 2
    assert paired["avg"] == pytest.approx(after.mean() - before.mean())
    change = after.mean(1) - before.mean(1)
    assert (paired["better"], paired["worse"]) == ((change > 0).sum(), (change < 0).sum())
    assert compare(first, first,
                   {"a": 1}) == {"a": dict(avg=0, ci_low=0, ci_high=0, better=0, worse=0)}
    both = compare(first + rows_of(before, "b"), second + rows_of(before, "b"), {"a": 1, "b": 3})
    assert both["weighted"]["avg"] == pytest.approx(paired["avg"] / 4) and both["b"]["avg"] == 0


def test_summarize_weighs_sets_and_knows_levels():
    rows = rows_of([[1, 1], [1, 0]], "a") + rows_of([[0, 0]], "b")
    for row in rows[:4]:
        row["level"] = {"0": "10", "1": "9"}[row["id"]]
    summary = summary_of(rows, {"a": 500, "b": 100})
    assert summary["sets"]["a"]["avg"] == 0.75 and summary["sets"]["b"]["avg"] == 0
    assert summary["weighted"]["avg"] == pytest.approx(0.625)
    levels = summary["sets"]["a"]["levels"]
    assert [(level, part["avg"]) for level, part in levels.items()] == [("9", 0.5), ("10", 1)]
    assert summary["sets"]["b"]["levels"] == {}


@pytest.mark.parametrize("low, high, verdict", [
    (0, 0, "no clear difference"), (-0.01, 0.02, "no clear difference"),
    (0, 0.02, "no clear difference"), (0.01, 0.02, "better"), (-0.02, -0.01, "worse")])
def test_only_an_interval_without_zero_is_called_a_difference(capsys, low, high, verdict):
    change = dict(avg=(low + high) / 2, ci_low=low, ci_high=high, better=3, worse=2)
    evaluation.show_comparison({"a": change}, "other")
    assert f"], {verdict}; 3 questions better, 2 worse" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------- sampling
def test_evaluate_returns_rows_in_order():
    problems = [Question(f"q{i}", answer=str(i % 2), level="3" * (i == 0)) for i in range(5)]
    grader = FakeGrader()
    engine = FakeEngine()
    rows = evaluate(engine, grader, problems, k=4, max_tokens=9, style="minerva", temperature=0.25)
    assert engine.temperatures == {0.25}
    assert [(row["id"], row["sample"]) for row in rows] == [(f"q{i}", s) for i in range(5)
                                                            for s in range(4)]
    for row in rows:
        assert row["reward"] == (row["text"]
                                 == str(int(row["id"][1]) % 2)) == (row["status"] == "correct")
        assert (row["finish_reason"] == "length") == (row["tokens"] == 9)
    assert not grader.pending and grader.styles == {"minerva"}
    assert rows[0]["level"] == "3" and "level" not in rows[-1] and rows[0]["data"] == "a"


def test_routes_of_experts_are_let_go_while_the_engine_runs():
    """They are megabytes per sample, and an evaluation has thousands."""
    class Routed(FakeEngine):
        seen = []

        def step(self):
            assert all(rollout.routes is None for rollout in self.seen)
            finished = super().step()
            for _, rollout in finished:
                rollout.routes = "large"
            self.seen += [rollout for _, rollout in finished]
            return finished

    evaluate(Routed(), FakeGrader(), [Question("q")], k=9, max_tokens=9)
    assert len(Routed.seen) == 9 and Routed.seen[-1].routes is None


def test_an_evaluation_does_not_follow_the_temperature_of_the_training():
    engine = FakeEngine()
    evaluate(engine, FakeGrader(), [Question("q")], k=1, max_tokens=9)
    assert engine.temperatures == {1.0}, "None would be the training's own"


# ----------------------------------------------------------------------------------------- resuming
SETS = {"a": [Question(f"a/{i}", level=str(i % 2)) for i in range(7)],
        "minerva": [Question(f"b/{i}", source="minerva") for i in range(3)]}
PROTOCOL = dict(k=4, max_tokens=9, seed=0, temperature=0.7)


def finish(file, engine=None, size=8):
    """Does what is left to do, as `main` does."""
    rows, chunks = eval_folder.resume(file, eval_folder.chunks_of(SETS, size, 4), 4)
    evaluation.run_chunks(engine or FakeEngine(), FakeGrader(), chunks, PROTOCOL, file)
    return len(rows)


def test_chunks_cover_every_question_once():
    for size in (1, 4, 9, 10**6):
        chunks = eval_folder.chunks_of(SETS, size, 4)
        assert [p for _, _, part in chunks for p in part] == SETS["a"] + SETS["minerva"]
        assert all(len(part) * 4 <= max(size, 4) for _, _, part in chunks)
        assert len({(name, number) for name, number, _ in chunks}) == len(chunks)


@pytest.mark.parametrize("steps, complete", [(0, 0), (2, 0), (3, 8), (7, 16), (11, 28), (13, 28)])
def test_resumed_equals_uninterrupted(tmp_path, reseeds, steps, complete):
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    finish(whole)
    with pytest.raises(KeyboardInterrupt):
        finish(stopped, FakeEngine(interrupt_after=steps))
    assert finish(stopped) == complete, "what was complete is not done again"
    assert stopped.read_bytes() == whole.read_bytes()
    assert finish(
        stopped) == 40 and stopped.read_bytes() == whole.read_bytes(), "nothing is left to do"


@pytest.mark.parametrize("cut", [1, 37, 900, 2000, 3000])
def test_a_half_written_line_is_mended(tmp_path, reseeds, cut):
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    finish(whole)
    stopped.write_bytes(whole.read_bytes()[:-cut])
    finish(stopped)
    assert stopped.read_bytes() == whole.read_bytes()
    stopped.write_bytes(whole.read_bytes()[:-cut] + b"\n")  # an editor completed the line
    finish(stopped)
    assert stopped.read_bytes() == whole.read_bytes()


class OwnGrader(FakeGrader):
    """In the place of --reward: an answer is worth its problem's gold, and "broken" raises."""

    def submit(self, key, gold, completion, style=""):
        self.pending[key] = gold

    def result(self, key):
        gold = self.pending.pop(key)
        if gold == "broken":
            return SimpleNamespace(reward=math.nan, status="raised", why="KeyError")
        return SimpleNamespace(reward=float(gold), status="wrong")


OWN = {name: [Question(f"{name}/{i}", gold, name) for i, gold in enumerate(golds)]
       for name, golds in (("a", ["-5", "-4", "broken", "-3"]), ("b", ["broken", "-1", "-2"]))}


def answer_own(file, size):
    chunks = eval_folder.resume(file, eval_folder.chunks_of(OWN, size, 1), 1)[1]
    evaluation.run_chunks(FakeEngine(), OwnGrader(), chunks, PROTOCOL | dict(k=1), file)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("left", [7, 4, 3, 0])
def test_a_failed_reward_is_the_worst_of_the_whole_evaluation(tmp_path, reseeds, size, left):
    """Whatever the chunks, and of a folder that was continued: nobody gains by breaking it."""
    file = tmp_path / "eval.jsonl"
    answer_own(file, size)
    file.write_text("".join(file.read_text().splitlines(True)[:left]) + '{"data": "a", "rew')
    answer_own(file, size)
    stored = [json.loads(line, parse_constant=pytest.fail) for line in file.open()]
    assert [row["reward"] for row in stored] == [-5, -4, None, -3, None, -1, -2]
    rows = evaluation.settled(eval_folder.read_rows(file)[0])
    assert [row["reward"] for row in rows] == [-5, -4, -5, -3, -5, -1, -2]
    summary = summary_of(rows, {"a": 1, "b": 1})
    assert [summary["sets"][name]["avg"] for name in "ab"] == [-17 / 4, -8 / 3]
    assert [summary["sets"][name]["verifier_failures"] for name in "ab"] == [1 / 4, 1 / 3]


def test_both_sides_of_a_comparison_are_settled(tmp_path, reseeds, monkeypatch):
    """By `main`, whose table and summary they go to; rows of an older folder had a number."""
    protocol = FINISHED | dict(k=1, reward="r.py:f", threshold=0.7, weights={"a": 1, "b": 1})
    protocol |= {key: "" for key in ("model", "adapter", "data", "system", "seed", "dtype",
                                     "versions", "prompt")}
    for name in ("new", "old"):
        eval_folder.open_folder(tmp_path / name, protocol).close()
        answer_own(tmp_path / name / "eval.jsonl", 2)
    old = tmp_path / "old" / "eval.jsonl"
    old.write_text(old.read_text().replace("null", "0.0"))
    (tmp_path / "old" / "summary.json").write_text("{}")
    config = SimpleNamespace(model="", adapter="", reward="r.py:f", chunk=2, k=1,
                             out=str(tmp_path / "new"), against=str(tmp_path / "old"))
    monkeypatch.setattr(evaluation, "parse", lambda argv: config)
    monkeypatch.setattr(evaluation, "prepare", lambda config: (OWN, protocol))
    evaluation.main([])
    summary = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert summary["sets"]["b"]["avg"] == -8 / 3
    assert {one["avg"] for one in summary["difference"].values()} == {0}


def test_a_verdict_of_math_verify_keeps_its_reward():
    rows = rows_of([[1, 0], [0, 1]]) + rows_of([[0, 0]], status="timeout")
    assert evaluation.settled(rows) == rows


def test_rows_in_the_file_can_be_reported(tmp_path, reseeds):
    finish(tmp_path / "eval.jsonl")
    rows, ends = eval_folder.read_rows(tmp_path / "eval.jsonl")
    assert ends[-1] == (tmp_path / "eval.jsonl").stat().st_size and "text" not in rows[0]
    assert "text" in json.loads((tmp_path / "eval.jsonl").read_text().splitlines()[0])
    summary = summary_of(rows, {"a": 7, "minerva": 3})
    assert set(summary["sets"]["a"]["levels"]) == {"0", "1"}
    evaluation.show(summary)
    plot.draw_evaluation(summary, tmp_path / "eval.png")
    assert (tmp_path / "eval.png").stat().st_size > 5000


def test_the_seed_of_a_chunk_does_not_depend_on_other_sets(tmp_path, reseeds, monkeypatch):
    finish(tmp_path / "both.jsonl")
    monkeypatch.setitem(globals(), "SETS", {"minerva": SETS["minerva"]})
    finish(tmp_path / "one.jsonl")
    assert (tmp_path / "both.jsonl").read_text().endswith((tmp_path / "one.jsonl").read_text())


def test_every_chunk_has_a_random_state_of_its_own(tmp_path, monkeypatch):
    """Else all chunks would draw with the same numbers, and --seed would change nothing."""
    names = {}
    for seed in (0, 1):
        names[seed] = []
        monkeypatch.setattr(evaluation, "reseed", lambda engine, name: names[seed].append(name))
        chunks, protocol = eval_folder.chunks_of(SETS, 8, 4), PROTOCOL | dict(seed=seed)
        evaluation.run_chunks(FakeEngine(), FakeGrader(), chunks, protocol, tmp_path / "x")
    assert len(set(names[0])) == len(names[0]) == len(chunks) == 6
    assert not set(names[0]) & set(names[1])


def test_a_chunk_starts_with_an_empty_cache(monkeypatch):
    drawn, cleared = [], []
    monkeypatch.setattr("parts.engine.seed_everything", lambda rng: drawn.append(rng.random()))
    engine = SimpleNamespace(clear_cache=lambda: cleared.append(True))
    for name in ("0/a/1", "0/a/2", "0/a/1"):
        evaluation.reseed(engine, name)
    assert len(cleared) == 3, "what others cached is rounded otherwise"
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("name, style", [
    ("minerva", "minerva"), ("ra-minerva", "minerva"), ("someone/MinervaMath", "minerva"),
    ("data/minervamath.jsonl", "minerva"), ("minerva/olympiad.jsonl", ""), ("math500", "")])
def test_minerva_is_graded_in_its_own_style_wherever_it_comes_from(tmp_path, reseeds, name, style):
    grader = FakeGrader()
    chunk = (name, 0, SETS["a"][:1])
    evaluation.run_chunks(FakeEngine(), grader, [chunk], PROTOCOL, tmp_path / "x")
    assert grader.styles == {style}


# --------------------------------------------------------------------------------- the command line
@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model that has learnt next to nothing."""
    from parts import tiny

    folder = tmp_path_factory.mktemp("model") / "barely"
    tiny.build(folder, progress=False, steps=20, batch=8)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file with short arithmetic in two levels."""
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [dict(problem=f"{a}+{b}=?", answer=str(a + b), level=1 + a // 4)
            for a in range(1, 8) for b in range(1, 4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def flags(model, data, out, **more):
    """The command line of a small evaluation."""
    small = dict(template="chat", k=4, max_tokens=24, max_prompt_tokens=40, chunk=32)
    wanted = dict(model=model, data=data, out=out) | small | more
    return [part for key, value in wanted.items()
            for part in ("--" + key.replace("_", "-"), str(value))]


@pytest.mark.parametrize("arguments, message", [
    ("--k 0", "k must be at least 1"),
    ("--temperature 0 --k 8", "--k 1"),
    ("--temperature -1", "at least 0"),
    ("--limit -3", "limit must be"),
    ("--sync copy", "invalid choice 'copy' for argument '--sync'"),
    ("--unknown 1", "Unrecognized options: --unknown"),
    ("--data no-such-set", "no data set 'no-such-set'"),
    ("--data no/such/file.jsonl", "No data file"),
    ("--adapter no/such/folder", "has no adapter_config.json"),
    ("--model ./nowhere", "No model folder"),
    ("{fits} --template poem", "no prompt template 'poem'"),
    ("{fits} --template chat --max-tokens 5000", "at most 1024"),
    ("{fits} --template chat --max-prompt-tokens 3", "over 3 tokens"),
    ("{fits} --template chat --stop <|nothing|>", "<|nothing|>"),
    ("{fits} --template chat --against no/such/run", "protocol.json is missing"),
])
def test_bad_input_ends_with_one_sentence(model, data, tmp_path, monkeypatch, capsys, arguments,
                                          message):
    monkeypatch.setattr("parts.engine.Engine", None)  # nothing may start it
    given = arguments.format(fits=f"--model {model} --max-tokens 9 --max-prompt-tokens 40").split()
    defaults = ["--data", str(data)] * ("--data" not in given) + ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        evaluation.main(given + defaults)
    text = str(stop.value.code) if isinstance(stop.value.code, str) else capsys.readouterr().err
    assert stop.value.code not in (0, None) and message in text and "Traceback" not in text
    assert not (tmp_path / "out").exists()


FINISHED = dict(k=4, questions={"a": "1"}, template="chat", temperature=1.0, max_tokens=9, stop=[1],
                graders=1)


def test_other_evaluations_are_not_mixed(tmp_path):
    folder = tmp_path / "a"
    eval_folder.open_folder(folder, FINISHED).close()
    eval_folder.open_folder(folder, FINISHED | {"graders": 2}).close()
    with pytest.raises(SystemExit, match="another k, stop"):
        eval_folder.open_folder(folder, FINISHED | {"k": 8, "stop": [2]})
    with pytest.raises(SystemExit, match="not finished"):
        evaluation.load_finished(folder, FINISHED, {})
    (folder / "summary.json").write_text("{}")
    assert evaluation.load_finished(folder, FINISHED, {}) == []
    with pytest.raises(SystemExit, match="other questions"):
        evaluation.load_finished(folder, FINISHED | {"questions": {"a": "2"}}, {})


def test_a_foreign_folder_is_left_alone(tmp_path):
    for name in ("summary.json", "notes.txt", "eval.jsonl"):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        (folder / name).write_text("precious")
        with pytest.raises(SystemExit, match=f"not the folder of an evaluation, it holds {name}: "
                                             "name another --out"):
            eval_folder.open_folder(folder, FINISHED)
        assert [(file.name, file.read_text()) for file in folder.iterdir()] == [(name, "precious")]
    own = tmp_path / "own"
    eval_folder.open_folder(own, FINISHED).close()
    (own / "eval.png").symlink_to(tmp_path / "notes" / "notes.txt")
    with pytest.raises(SystemExit, match="it holds eval.png"):
        eval_folder.open_folder(own, FINISHED)


def test_a_folder_that_cannot_be_used_gets_one_sentence(tmp_path):
    (tmp_path / "file").write_text("precious")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(SystemExit, match="Cannot use .*: name another --out"):
            eval_folder.open_folder(out, FINISHED)
    assert (tmp_path / "file").read_text() == "precious"


def test_two_programs_do_not_write_into_one_evaluation(tmp_path):
    """A real second process; what is left by one that was killed does not stop the next."""
    import signal
    import subprocess

    code = (
        "import sys, time; from pathlib import Path; from parts.eval_folder import open_folder\n"
        f"held = open_folder(Path(sys.argv[1]), {FINISHED}); print('mine', flush=True); "
        "time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE,
                          text=True,
                          cwd=Path(evaluation.__file__).parent) as other:
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(SystemExit, match="Another program is writing to"):
            eval_folder.open_folder(tmp_path, FINISHED)
        other.send_signal(signal.SIGKILL)
    eval_folder.open_folder(tmp_path, FINISHED).close()


ROW = dict(data="a", id="q", sample=0, reward=1.0, status="correct", finish_reason="stop", tokens=3)


@pytest.mark.parametrize("protocol, line", [
    ("[]", ""), ("", ""), ("[" * 100_000, ""), ("{}", ""), ('{"questions": {"a": "1"}}', ""),
    (None, "[]"), (None, "{}"), (None, "7"), (None, "[" * 100_000),
    (None, json.dumps(ROW | dict(reward="high"))), (None, json.dumps(ROW | dict(reward=None))),
    (None, json.dumps(ROW | dict(id=["q"]))), (None, json.dumps({**ROW, "id": "another question"})),
])
def test_an_odd_comparison_gets_one_sentence(tmp_path, protocol, line):
    """Before the engine starts: `compare` comes last, after what may have been hours."""
    (tmp_path / "protocol.json").write_text(json.dumps(FINISHED) if protocol is None else protocol)
    (tmp_path / "eval.jsonl").write_text(line + "\n")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(SystemExit, match="missing or damaged|not finished|other questions"):
        evaluation.load_finished(tmp_path, FINISHED, {"a": [Question("q")]})


def test_a_comparison_with_the_same_questions_is_taken(tmp_path):
    (tmp_path / "protocol.json").write_text(json.dumps(FINISHED))
    (tmp_path / "eval.jsonl").write_text(json.dumps(ROW | dict(text="x")) + "\n")
    (tmp_path / "summary.json").write_text("{}")
    assert evaluation.load_finished(tmp_path, FINISHED, {"a": [Question("q")]}) == [ROW]


def test_a_comparison_under_another_protocol_is_marked(tmp_path, capsys):
    eval_folder.open_folder(tmp_path, FINISHED).close()
    (tmp_path / "summary.json").write_text("{}")
    evaluation.load_finished(tmp_path, FINISHED | {"template": "none"}, {})
    assert "another template" in capsys.readouterr().out


def test_a_comparison_across_temperatures_is_marked(tmp_path, capsys):
    eval_folder.open_folder(tmp_path, FINISHED).close()
    (tmp_path / "summary.json").write_text("{}")
    evaluation.load_finished(tmp_path, FINISHED | {"temperature": 0.6, "graders": 7}, {})
    assert "another temperature: the difference" in capsys.readouterr().out


def test_a_comparison_needs_every_question(tmp_path):
    """With a summary of fewer questions, `compare` would end in a KeyError after the evaluation."""
    (tmp_path / "protocol.json").write_text(json.dumps(FINISHED))
    (tmp_path / "eval.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(SystemExit, match="not finished"):
        evaluation.load_finished(tmp_path, FINISHED, {"a": [Question("q"), Question("r")]})


def test_limits_and_folder_follow_the_model(adapter):
    tiny, real = evaluation.parse([]), evaluation.parse(["--model", "Qwen2.5-Math-1.5B"])
    assert (tiny.max_tokens, tiny.max_prompt_tokens, tiny.data) == (64, 256, "builtin")
    assert (real.max_tokens, real.max_prompt_tokens, real.data) == (3000, 1024, "math500")
    adapted = evaluation.parse(["--adapter", str(adapter[0])])
    assert tiny.out == "runs/eval-tiny-builtin-k32"
    assert adapted.out != tiny.out, "two policies, two folders"


def test_greedy_decoding_takes_one_sample():
    assert evaluation.parse(["--temperature", "0", "--k", "1"]).temperature == 0


def test_the_protocol_knows_the_weights_of_sets_and_adapter(model, adapter, data, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:3]))
    both = flags(model, f"{data},{few}", tmp_path / "out", adapter=adapter[0])
    sets, protocol = evaluation.prepare(evaluation.parse(both))
    assert protocol["weights"] == {"sums.jsonl": 21, "few.jsonl": 3} == {
        name: len(problems) for name, problems in sets.items()}
    names = [name for name, size, time in protocol["files"]]
    assert names == ["model.safetensors", "adapter_model.safetensors"]


def test_a_folder_of_a_very_long_data_set_has_a_name_of_bearable_length():
    assert len(Path(evaluation.parse(["--data", ",".join(["gsm8k"] * 900)]).out).name) < 200


def test_a_reader_that_leaves_gets_no_traceback():
    """`python eval.py --help | head -1`, and any later line."""
    import subprocess

    folder = Path(evaluation.__file__).parent
    code = "from parts.screen import quiet_end\n"
    code += "with quiet_end():\n    for i in range(99999): print(i)"
    for command in ("eval.py --help", f"-c '{code}'"):
        done = subprocess.run(["bash", "-c", f"{sys.executable} {command} | head -1"],
                              capture_output=True, text=True, cwd=folder)
        assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_importing_eval_is_light():
    import subprocess

    code = "import eval, sys; heavy = 'torch', 'vllm', 'transformers'; "
    code += "print([m for m in heavy if m in sys.modules])"
    folder = Path(evaluation.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.stdout.strip() == "[]", done.stderr


# ----------------------------------------------------------------------------------------- adapters
@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """A random LoRA adapter that changes most samples, and a model with the same adapter merged
    into it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    lora = LoraConfig(r=12, lora_alpha=24, target_modules="all-linear", task_type="CAUSAL_LM",
                      init_lora_weights=False)
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_" in name:
                weight.mul_(2)
    folder = tmp_path_factory.mktemp("adapter")
    ids = torch.arange(48, 58)[None]
    with torch.no_grad(), policy.disable_adapter():
        before = policy(ids).logits
    with torch.no_grad():
        assert (policy(ids).logits
                - before).abs().max() > 1, "an adapter without effect proves nothing"
    policy.save_pretrained(folder / "adapter")
    policy.merge_and_unload().save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "merged")
    return folder / "adapter", folder / "merged"


def test_adapter_of_a_run_and_those_that_do_not_fit(model, adapter, tmp_path):
    run = tmp_path / "run"
    for step in ("step-000020", "step-000100"):
        shutil.copytree(adapter[0], run / "checkpoints" / step)
    assert adapters.find_adapter(str(run)) == str(run / "checkpoints" / "step-000100")
    assert adapters.find_adapter(str(adapter[0])) == str(adapter[0])
    assert adapters.find_adapter("") == ""
    policy, rank = adapters.load_adapter(str(model), str(adapter[0]), "float32")
    assert rank == 12
    config = adapter[0] / "adapter_config.json"
    for change in (dict(r=4), dict(target_modules=["q_proj"]), dict(use_dora=True),
                   dict(peft_type="IA3")):
        broken = tmp_path / "-".join(map(str, change))
        shutil.copytree(adapter[0], broken)
        (broken
         / "adapter_config.json").write_text(json.dumps(json.loads(config.read_text()) | change))
        with pytest.raises(SystemExit, match="does not fit|not a plain LoRA"):
            adapters.load_adapter(str(model), str(broken), "float32")


def test_only_finished_checkpoints_of_a_run_count(adapter, tmp_path):
    run = tmp_path / "run"
    for name in ("step-000020", "step-000020-best", "step-best"):
        shutil.copytree(adapter[0], run / "checkpoints" / name)
    (run / "checkpoints" / "step-notes.txt").write_text("")
    assert adapters.find_adapter(str(run)) == str(run / "checkpoints" / "step-000020")


PATTERN = "(a|aa)+" * 20 + "$"  # takes years on a long name


@pytest.mark.parametrize("change, words", [
    ("[]", "missing or damaged"), ("{", "missing or damaged"),
    (dict(target_modules=PATTERN), "a pattern can take years"),
    (dict(target_modules=[["q"]]), "list of names"),
    (dict(exclude_modules=PATTERN), "exclude_modules"),
    (dict(rank_pattern={PATTERN: 4}), "rank_pattern"),
    (dict(layers_pattern=PATTERN), "layers_pattern"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save"),
    (dict(init_lora_weights="pissa"), "init_lora_weights"),
    (dict(layer_replication=[[0, 10**6]]), "layer_repl"),
    (dict(r=10**9), "must be 1 to 512"), (dict(r="8"), "must be 1 to 512"),
    (dict(r=True), "must be 1 to 512"),
    ({"\x1b[2Jnew": 1}, r"\\x1b\[2Jnew"),
])
def test_a_hostile_adapter_is_refused_before_it_is_loaded(adapter, tmp_path, change, words):
    config = json.loads((adapter[0] / "adapter_config.json").read_text())
    text = change if isinstance(change, str) else json.dumps(config | change)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(SystemExit, match=words) as stop:
        adapters.read_config(str(tmp_path))
    assert str(stop.value).isprintable()


def test_an_adapter_cannot_command_the_terminal(model, adapter, tmp_path, recwarn):
    shutil.copytree(adapter[0], tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    names = dict(base_model_name_or_path="\x1b]0;owned\x07", target_modules=["q_proj", "\x1b[2J"])
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    with pytest.raises(SystemExit, match="does not fit") as stop:
        adapters.load_adapter(str(model), str(tmp_path / "a"), "float32")
    assert str(stop.value).isprintable() and "owned" in str(stop.value)
    assert all(str(warning.message).isprintable() for warning in recwarn)


def test_targets_by_name_and_all_linear_are_taken(adapter, tmp_path):
    config = json.loads((adapter[0] / "adapter_config.json").read_text())
    for targets in (["q_proj", "v_proj"], "all-linear"):
        (tmp_path
         / "adapter_config.json").write_text(json.dumps(config | dict(target_modules=targets)))
        assert adapters.read_config(str(tmp_path))["r"] == 12


# ---------------------------------------------------------------------------------- the real engine
@pytest.fixture(scope="module")
def results(model, adapter, data, tmp_path_factory):
    """One policy, given to the engine in three ways; the last one also interrupted and resumed."""
    root, (folder, merged) = tmp_path_factory.mktemp("runs"), adapter
    run(merged, data, root / "merged")
    run(model, data, root / "swapped", adapter=folder, sync="adapter", against=root / "merged")
    run(model, data, root / "merging", adapter=folder, sync="merge")
    shutil.copytree(root / "merging", root / "resumed")
    written = (root / "resumed" / "eval.jsonl").read_bytes()
    (root / "resumed" / "eval.jsonl").write_bytes(written[:len(written) * 2 // 3])
    (root / "resumed" / "summary.json").unlink()
    run(model, data, root / "resumed", adapter=folder, sync="merge")
    return root


def run(*arguments, **more):
    # an engine that Python forgets only later would take the next one's process groups with it
    gc.collect()
    evaluation.main(flags(*arguments, **more))
    gc.collect()


def samples(folder):
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


@pytest.mark.engine
def test_an_evaluation_of_the_real_engine(results, data):
    rows = samples(results / "merged")
    protocol, summary = (json.loads((results / "merged" / f"{name}.json").read_text())
                         for name in ("protocol", "summary"))
    (name, result), = summary["sets"].items()
    assert [row["id"].split("/")[1] for row in rows] == [str(q) for q in range(21)
                                                         for _ in range(4)]
    assert [row["sample"] for row in rows] == [0, 1, 2, 3] * 21
    assert all(row["data"] == name and row["level"] in "12" and 1 <= row["tokens"] <= 24
               for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    assert len({row["text"] for row in rows}) > 40
    assert result["avg"] == summary["weighted"]["avg"] == np.mean([row["reward"] for row in rows])
    assert protocol["prompt"] == "<|user|>1+1=?<|assistant|>" and protocol["template"] == "chat"
    assert (results / "merged" / "eval.png").stat().st_size > 5000


@pytest.mark.engine
def test_the_real_engine_resumes_exactly(results):
    for file in ("eval.jsonl", "summary.json", "protocol.json"):
        assert (results / "resumed" / file).read_bytes() == (results / "merging"
                                                             / file).read_bytes()


@pytest.mark.engine
def test_the_real_engine_samples_each_request_at_its_own_temperature(results, model):
    """At 0 all samples are alike; the engine's own temperature is 1."""
    from parts.engine import Engine

    gc.collect()
    engine = Engine(str(model), max_model_len=64, max_num_seqs=16, dtype="float32", temperature=1.0)
    for s in range(16):
        engine.submit(s, list(range(40, 50)), 12, **dict(temperature=0.0) if s % 2 else {})
    found = {}
    while engine.busy:
        found.update(engine.step())
    greedy, free = ([tuple(found[s].token_ids) for s in range(first, 16, 2)] for first in (1, 0))
    engine.close()
    assert len(set(greedy)) == 1 and len(set(free)) > 2


@pytest.mark.engine
def test_adapter_and_merged_model_agree(results):
    ways = ("merged", "swapped", "merging")
    texts = {way: [row["text"] for row in samples(results / way)] for way in ways}
    for name in ("swapped", "merging"):
        same = np.mean([a == b for a, b in zip(texts[name], texts["merged"])])
        print(f"\n{name}: {same:.1%} of the samples are those of the merged model")
        assert same > 0.9, "rounding may turn a rare sample, a wrong weight turns nearly all"
    difference = json.loads((results / "swapped" / "summary.json").read_text())["difference"]
    assert len(difference) == 1 and all(abs(one["avg"]) < 0.05 for one in difference.values())
