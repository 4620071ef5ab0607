"""Evaluation: reports against their raw rows, resuming, the real engine."""
import contextlib
import json
import math
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from statistics import fmean as mean

import pytest
from transformers import AutoTokenizer

import eval as evaluation  # the module has the name of a builtin
from parts.evaluation import (bootstrap, compare, draw_samples, evaluate, in_order, pass_at_k,
                              report, report_all, say_lost)
from helpers import ROOT, lines, run_program
from models_small import policy
from parts import files
from parts.data import GROUPS, Problem, digest, hold_out, load_problems
from parts.models import MODELS
from parts.prompts import stop_ids
from parts.run_folder import run_of, versions
from parts.text import difference, interval, shown
from world import CARD, CPU, Engine, Grader, by_text, known_model, small_run


def question(name: str, answer="1", source="a", level=""):
    return Problem("?", answer, name, source, level, prompt_ids=[1, 2])


def rows_of(rewards_by_question, data="a"):
    """Rows as `evaluate` makes them, from lists of rewards."""
    return [dict(data=data, id=str(q), sample=s, reward=float(reward), tokens=10,
                 finish_reason="stop", status="correct" if reward else "wrong")
            for q, rewards in enumerate(rewards_by_question) for s, reward in enumerate(rewards)]


A = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
B = [[0, 1, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("weights", [dict(a=4, b=3), dict(b=2, a=7)])
def test_a_summary_has_a_report_of_each_set_and_their_weighted_mean(capsys, weights):
    """Also if the sets are mixed, as a share of several files is."""
    sets = dict(a=rows_of(A, "a"), b=rows_of(B, "b"))
    for row in sets["b"]:
        row["reward/part"] = row["reward"] / 2
    for s in range(2):
        sets["b"][s] = dict(sets["a"][s], data="b", status="timeout", reward=None, why="too\nslow")
    sets["b"][0]["finish_reason"] = "length"
    sets["b"][2] |= dict(status="no_box", tokens=22)
    rows = sorted(sum(sets.values(), []), key=lambda row: row["id"])
    summary = evaluation.show_results("title", rows, dict(k=4, reward="", weights=weights))
    assert summary["sets"] == {name: report(rows, 4) for name, rows in sets.items()}
    means = dict(a=[0, 1 / 4, 3 / 4, 1], b=[0, 3 / 4, 1])
    assert summary["weighted"] == bootstrap([means[name] for name in weights], [*weights.values()])
    a, b, weighted = (interval(one, ".1%") for one in (
        summary["sets"]["a"], summary["sets"]["b"], summary["weighted"]))
    assert a.startswith("50.0% [") and b.startswith("58.3% [")
    assert capsys.readouterr().out == f"""
title
a, 4 questions: avg@4 {a}
  pass@4 75.0%, correct 50.0%, no_box 0.0%, truncated 0.0%, verifier_failures 0.0%, 10 tokens
b, 3 questions: avg@4 {b}
  pass@4 66.7%, correct 70.0%, no_box 10.0%, truncated 8.3%, verifier_failures 16.7%, 11 tokens
  reward/part 35.0%
weighted: {weighted}
WARNING: no verdict on 2 of 28 answers, such as answer 0 of 0: timeout, too\\nslow
"""
    assert say_lost([dict(verdicts=dict(wrong=2, killed=1))] * 2) == "no verdict on 2 of 6 answers"
    assert say_lost([dict(verdicts=dict(wrong=2))]) == ""


# ---------------------------- estimators (pass@k and bootstrap are proved by the checks of lab 8)
STATUSES = ["correct", "wrong", "wrong", "no_box", "empty", "unparseable", "timeout", "killed"]
LOST = ("timeout", "killed", "raised", "no_number")


@pytest.mark.parametrize("k", [1, 3])
def test_a_report_against_its_raw_rows(k):
    """Also with rewards of one's own: right is the verdict, and not the sign of the reward.
    Whatever has no verdict counts for nothing, and a question without any is left out."""
    rng = random.Random(k)
    rows = [row | dict(reward=rng.uniform(-1, 1), status=rng.choice(STATUSES),
                       tokens=rng.randint(1, 9), finish_reason=rng.choice(["stop", "length"]))
            for row in rows_of([[0] * k] * 9)]
    for row in rows:
        row["reward"] = None if row["status"] in LOST else row["reward"]
    own = [[row for row in rows[i:i + k] if row["status"] not in LOST] for i in range(0, 9 * k, k)]
    judged = sum(own, [])
    assert 0 < len(judged) < len(rows) and (k > 1 or [] in own)
    right = [(len(one), sum(row["status"] == "correct" for row in one)) for one in own if one]
    passed = {j: mean(pass_at_k(n, c, min(j, n)) for n, c in right)
              for j in {1, 2, 4, 8, k} if j <= k}

    def share(rows, key, *values):
        return mean(row[key] in values for row in rows)

    means = [sum(row["reward"] for row in one) / len(one) for one in own if one]
    assert report(rows, k) == bootstrap([means]) | {"pass": pytest.approx(passed)} | dict(
        k=k, questions=9, left_out=own.count([]), correct=share(judged, "status", "correct"),
        no_box=share(judged, "status", "no_box"), truncated=share(rows, "finish_reason", "length"),
        verifier_failures=share(rows, "status", *LOST),
        response_length=mean(row["tokens"] for row in rows),
        verdicts=Counter(row["status"] for row in rows))


# ---------------------------------------------------------------------------------------- intervals
@pytest.mark.parametrize("weights", [dict(a=1, b=3), dict(b=3, a=1)])
def test_two_evaluations_are_compared_question_by_question(capsys, weights):
    """Of several sets, with other numbers of samples: the interval is of the differences. What has
    no verdict, now or before, counts as if it had not been asked for."""
    now, before = rows_of(A, "a") + rows_of([*B, A[1], A[1]], "b"), [  # avg@k
        0.5, 0.25, 0.75, 1, 0.25, 0.5, 1, None, 0.5]
    for row in now[-4:]:
        row["reward"] = None
    change = dict(a=[-0.5, 0, 0, 0], b=[0, 0.25, 0])  # 0 is an end of both intervals
    found = compare(now, 4, before, weights)
    for name, values in change.items():
        assert found[name] == bootstrap([values]) | dict(
            better=sum(value > 0 for value in values), worse=sum(value < 0 for value in values),
            questions=len(values))
    pooled = bootstrap([change[name] for name in weights], list(weights.values()))
    assert found["weighted"] == pooled | dict(better=1, worse=1, questions=7)
    assert pooled["avg"] == pytest.approx((mean(change["a"]) + 3 * mean(change["b"])) / 4)
    with pytest.raises(ValueError):  # of other questions
        compare(now, 4, before[1:], weights)
    verdict = "Little can be concluded from 7 problems."
    counts = dict(a="0 questions better, 1 worse", b="1 question better, 0 worse",
                  weighted="1 question better, 1 worse")
    for unit, points in ((".1%", ", in points"), (".3g", "")):
        assert evaluation.show_comparison(found, unit) == verdict
        assert capsys.readouterr().out.splitlines() == [
            "", f"difference to the base model, question by question{points}:",
            *(f"  {name}: {difference(found[name], unit)}, no clear difference; {counts[name]}"
              for name in [*weights, "weighted"]), verdict]


# ----------------------------------------------------------------------------------------- sampling
STYLES = {"minerva": "minerva", "ra-minerva": "minerva", "my-minerva-notes.jsonl": "", "a": ""}


def test_evaluate_yields_every_sample_one_engine_step_after_it_has_finished():
    """So little is lost when the program dies, and the grader has had the time of a step. Each is
    graded in its benchmark's style. A failed reward is no number. Routes of experts, which are
    megabytes per sample, are let go while the engine runs."""
    problems = [question("q", level="3" * (name == "a"), source=name) for name in STYLES]
    grader = Grader(lambda key, problem, rollout: (
        math.nan if problem.source == "minerva" else by_text(key, problem, rollout)))
    engine, seen, rows = Engine(slots=3, routes=True), [], []
    real = engine.step

    def step():
        assert all(rollout.routes is None for rollout in seen)
        finished = real()
        seen.extend(rollout for _, rollout in finished)
        return finished

    engine.step = step
    for row in draw_samples(engine, grader, problems, 4, 9):
        rows.append(row)
        assert len(seen) - len(rows) < 2 * engine.slots
    assert len(rows) == len(seen) == 16 and not grader.open
    rows, written = in_order(rows, problems, 4), {rollout.text: rollout for rollout in seen}
    assert grader.styles == {("eval", q, s): style for q, style in enumerate(STYLES.values())
                             for s in range(4)}
    for i, row in enumerate(rows):
        rollout, right = written[row["text"]], row["text"].startswith("right")
        failed = dict(reward=None, status="raised")
        judged = {"reward": right, "status": "correct" if right else "wrong",
                  "reward/half": right / 2, "reward/rest": right / 2}
        source = [*STYLES][i // 4]
        assert row == (failed if source == "minerva" else judged) | dict(
            data=source, id="q", level="3" * (source == "a"), gold="1", sample=i % 4,
            text=rollout.text, tokens=len(rollout.token_ids), why="because",
            finish_reason="length" if len(rollout.token_ids) == 9 else "stop")


def test_a_model_that_computes_no_numbers_is_not_evaluated_as_wrong():
    """NaN in the weights, or overflow in float16: vLLM then writes token 0 (`!!!!`) for ever."""
    for finite in (1, 0):  # one token that overflowed does not end it
        engine = Engine()
        real = engine.write

        def write(*how):
            rollout = real(*how)
            rollout.logprobs[finite:] = [math.nan] * len(rollout.logprobs[finite:])
            return rollout

        engine.write = write
        with contextlib.nullcontext() if finite else pytest.raises(
                SystemExit, match="damaged or too large for float16"):
            evaluate(engine, Grader(), [question("p")], 4, 9)


def seeds_of(problems, k=2, seed=0):
    """(set, question, sample) -> the seed that it is drawn from."""
    engine = Engine()
    evaluate(engine, Grader(), problems, k, 9, seed=seed)
    return {(problems[q].source, problems[q].id, s): asked.seed
            for (q, s), asked in engine.asked.items()}


def test_every_sample_has_a_seed_that_nothing_else_decides():
    """Neither the other questions, nor how many samples: the same are drawn again."""
    problems = [question("x"), question("x1"), question("x", source="b")]
    all_of_them = seeds_of(problems, k=11)  # x, 10 is not x1, 0
    assert len(set(all_of_them.values())) == 33
    assert seeds_of(problems[1:2], k=1).items() <= all_of_them.items()
    assert seeds_of(problems[::-1], k=12).items() >= all_of_them.items()
    assert not set(seeds_of(problems, k=11, seed=1).values()) & set(all_of_them.values())


# ----------------------------------------------------------------------------------------- resuming
PROBLEMS = [*(question(f"a/{i}", answer=str(i)) for i in range(7)),
            *(question(f"b/{i}", source="minerva") for i in range(3))]


@pytest.mark.parametrize("policy, sync, reward", [
    (None, "merge", ""), (SimpleNamespace(config="its config"), "adapter", "mine.py:score")])
def test_what_is_left_to_do_is_done_and_only_an_adapter_is_served_as_one(
        tmp_path, monkeypatch, policy, sync, reward):
    """Half a line goes, and a row that is there twice does not hide that one is missing. The golds
    are looked at, unless a reward of one's own needs none."""
    grader, engine, loaded, started, checked = Grader(), Engine(), [], [], []
    grader.check_golds = lambda golds: checked.extend(golds) or [True] * len(golds)
    monkeypatch.setattr("parts.engine.Engine", lambda *path, **how: (
        started.append((*path, how)) or engine))
    monkeypatch.setattr("parts.policy.load_adapter", lambda *how: loaded.append(how) or (policy, 9))
    monkeypatch.setattr(evaluation, "open_grader", lambda *how: loaded.append(how) or grader)
    protocol = dict(k=4, reward=reward, threshold=0.6, path="any", context=90, sync="adapter",
                    dtype="auto", engine_sequences=1, engine_memory=0.5, temperature=0.3, stop=[2],
                    seed=3, max_tokens=9, base=False, adapter="some" if policy else "")
    first = evaluate(whole := Engine(), Grader(), PROBLEMS, 4, 9, seed=3)[0]
    there, file = json.dumps(first) + "\n", tmp_path / "eval.jsonl"
    file.write_text(2 * there + '{"data": "mine", "id')
    evaluation.sample_missing(PROBLEMS, protocol, tmp_path)
    assert loaded == [(reward, 0.6)] + [("any", "some", "auto")] * bool(policy)
    assert started == [("any", dict(
        max_model_len=90, dtype="auto", max_num_seqs=1, memory_share=0.5, temperature=0.3,
        stop_token_ids=[2], seed=3, lora_rank=9 if policy else 8, sync_mode=sync,
        architecture=policy and "its config"))]
    assert checked == ([] if reward else [problem.answer for problem in PROBLEMS])
    assert engine.events == ["sync"] * bool(policy)
    assert engine.asked.items() < whole.asked.items()
    assert len(engine.asked) == 39 and None not in in_order(lines(file), PROBLEMS, 4)


# --------------------------------------------------------------------------------- the command line
MODEL = str(MODELS / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file with short arithmetic in two levels."""
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    files.append(file, *(dict(problem=f"{a}+{b}=?", answer=str(a + b), level=1 + a // 4)
                           for a in range(1, 8) for b in range(1, 4)))
    return file


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A random LoRA adapter that changes most samples, and the model into which it is merged."""
    trained, folder = policy(MODEL, moved=0.2, rank=12), tmp_path_factory.mktemp("adapter")
    trained.save_pretrained(folder / "checkpoints" / "adapter")
    trained.merge_and_unload().save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder / "merged")
    return folder / "checkpoints" / "adapter", folder / "merged"


# ------------------------------------------------------------------------------ an adapter's run
KEYS = dict(columns="frage,loesung")
SCORE = f"{ROOT}/examples/people.py:score"  # which may need any column


def own_run(folder, **settings):
    """A run of one step on a file of its own: its checkpoint, the file."""
    file = folder / "mine.jsonl"
    files.append(file, *(dict(frage=f"{i}+{i}=?", loesung=str(2 * i)) for i in range(40)))
    run = small_run(folder, name="own", steps=1, data=str(file), max_tokens=33, temperature=0.9,
                    eval_questions=9, max_prompt_tokens=99, **KEYS, **settings)
    return str(run / "checkpoints" / "step-000001"), str(file)


def settled(*argv) -> evaluation.Flags:
    flags = evaluation.parse([*argv])
    return evaluation.settle(flags, CPU, known_model(flags.model))


def test_without_flags_the_tiny_model_is_evaluated():
    assert vars(settled()) == dict(
        model="tiny", data="builtin", columns="", reward="", template="chat",
        max_prompt_tokens=256, max_tokens=64, stop="", seed=0, sync="merge", engine_sequences=256,
        adapter="", base=False, out="runs/eval-tiny-builtin-k32", threshold=0.7, k=32, limit=0,
        temperature=1.0, engine_memory=0.85)
    large = evaluation.settle(
        evaluation.Flags(model="Qwen2.5-Math-1.5B"), CARD, known_model("large"))
    assert (large.data, large.sync) == ("math500", "adapter")
    other = evaluation.Flags(model="a/b", adapter="/my/lora", data="c/sums.jsonl,gsm8k", k=3)
    assert evaluation.name_of(other) == "eval-b-my-lora-sums-gsm8k-k3"
    for flags in (dict(temperature=0, k=1), dict(temperature=0.01)):
        evaluation.check(evaluation.Flags(**flags))
    with pytest.raises(ValueError, match="sync has no effect without adapter"):
        evaluation.check(evaluation.Flags(sync="merge"))


def test_an_adapter_is_evaluated_as_its_run_if_no_flag_says_otherwise(tmp_path, adapter, capsys):
    """Lengths, temperature, template and k are the run's, and so are the problems."""
    place, _ = own_run(tmp_path, template="none", stop="?", model="tiny-skills",
                       eval_data="builtin,builtin-skills")
    of_run = dict(model="tiny-skills", template="none", max_prompt_tokens=99, max_tokens=33,
                  stop="?", temperature=0.9)
    config, elsewhere, plain = (vars(settled("--adapter", *argv)) for argv in (
        (place, "--max-tokens", "9"), (place, "--data", "builtin"), (str(adapter[0]),)))
    assert config.items() >= (of_run | dict(max_tokens=9, data="held-out", k=2)).items()
    assert elsewhere.items() >= (of_run | dict(data="builtin", k=32)).items()
    # an adapter of another program
    assert (plain["max_tokens"], plain["data"], plain["temperature"]) == (64, "builtin", 1)
    assert ("unless a flag is given, model and settings are those of the run: model = tiny-skills, "
            "template = none, max_prompt_tokens = 99, max_tokens = 33, stop = ?, "
            "temperature = 0.9, data = held-out, k = 2\n") in capsys.readouterr().out
    limited = settled("--adapter", place, "--limit", "2")  # of each set
    assert [p.source for p in evaluation.load_asked(limited, run_of(place))] == [
        "builtin"] * 2 + ["builtin-skills"] * 2


def test_the_held_out_problems_of_a_run_are_asked_even_if_its_data_has_gone(tmp_path, capsys):
    def asked(*arguments) -> list:
        flags = settled(*arguments)
        return evaluation.load_asked(flags, run_of(flags.adapter))

    place, file = own_run(tmp_path)
    held_out = hold_out(load_problems(file, **KEYS), 100)[1]
    found = asked("--adapter", place, "--data", file, "--columns", KEYS["columns"])
    assert len(found) == 40 and "trained on 37 of these 40" in capsys.readouterr().out
    found = asked("--adapter", place, "--data", file, "--columns", "frage", "--reward", SCORE)
    assert found[1].row == dict(frage="1+1=?", loesung="2")
    with pytest.raises(SystemExit, match="did not keep the columns of its held-out problems"):
        asked("--adapter", place, "--reward", SCORE)
    Path(file).unlink()
    assert asked("--adapter", place) == held_out


FREE = ("out", "base", "engine_memory", "engine_sequences")  # no score depends on these


def test_answers_of_another_protocol_are_not_mixed_with_those_that_are_there(tmp_path):
    """Of all that is stored, only what is FREE may change."""
    file = tmp_path / "protocol.json"
    protocol = vars(evaluation.Flags()) | dict.fromkeys(
        ("contents", "prompt", "dtype", "versions", "stop", "weights"), 1)
    for name in protocol:
        file.unlink(missing_ok=True)
        evaluation.require_same_protocol(file, protocol)
        with contextlib.nullcontext() if name in FREE else pytest.raises(
                SystemExit, match=f"differs in {name}: name another folder"):
            evaluation.require_same_protocol(file, protocol | {name: "another"})
        assert (json.loads(file.read_text())[name] == "another") == (name in FREE)


def test_the_protocol_has_all_that_decides_a_score(data, monkeypatch):
    """A set has the weight of its number of problems."""
    monkeypatch.setitem(GROUPS, "both", ["builtin", "builtin-skills"])
    argv = f"--data=both,{data} --limit=3 --max-tokens=9 --stop=?".split()
    flags, model = evaluation.parse(argv), known_model("tiny")
    problems, protocol = evaluation.problems_and_protocol(flags)
    assert [replace(problem, prompt="", prompt_ids=[]) for problem in problems] == load_problems(
        flags.data, for_training=False, limit=3)
    sets = {"builtin": problems[:3], "builtin-skills": problems[3:6], "sums.jsonl": problems[6:]}
    assert protocol == vars(settled(*argv)) | dict(
        path=model.path, contents=dict(model=model.digest), versions=versions(), dtype="float32",
        context=256 + 9, stop=stop_ids(model, "chat", "?"), prompt=problems[0].prompt,
        questions={name: digest(of_set) for name, of_set in sets.items()},
        weights=dict.fromkeys(sets, 3))


class Learnt(Engine):
    """All that it writes is right once it has been synced."""

    def write(self, *how):
        rollout = super().write(*how)
        if "sync" in self.events:
            rollout.text = "right"
        return rollout


@pytest.mark.parametrize("reward, unit", [("", ".1%"), (SCORE, ".3g")], ids=["share", "own"])
def test_a_run_is_compared_with_its_base_model_on_the_same_problems(
        tmp_path, monkeypatch, capsys, reward, unit):
    """With one start of the engine. An interrupted comparison asks only what is missing, and one
    that is finished starts no engine."""
    _, file = own_run(tmp_path, reward=reward)
    made = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr("parts.engine.Engine", lambda *_, **__: made.append(Learnt()) or made[-1])
    monkeypatch.setattr(evaluation, "open_grader", lambda *_: Grader())
    out = Path("runs/eval-tiny-own-step-000001-held-out-k2")

    def summary(*flags) -> dict:
        evaluation.main(["--adapter", "runs/own", "--reward", reward, *flags])
        return json.loads((out / "summary.json").read_text())

    first, said = summary("--base"), capsys.readouterr().out
    base, now = (lines(out / f"{name}.jsonl") for name in ("base", "eval"))
    held_out = hold_out(load_problems(file, **KEYS), 100)[1]
    assert len(base) == len(now) == 2 * len(held_out) and len(made) == 1
    before = [mean(row["reward"] for row in base if row["id"] == p.id) for p in held_out]
    assert 0 < mean(before) < 1 and {row["reward"] for row in now} == {1}
    change, = first["difference"].values()
    assert change == bootstrap([[1 - one for one in before]]) | dict(
        better=sum(one < 1 for one in before), worse=0, questions=len(held_out))
    of_base = first["base"]["sets"]["mine.jsonl"]
    assert of_base["avg"] == pytest.approx(mean(before))
    assert f"avg@2 {interval(of_base, unit)}\n" in said and first["verdict"] in said
    assert change["avg"] > 0 and ("question, in points:\n" in said) != bool(reward)
    protocol = json.loads((out / "protocol.json").read_text())
    for name in ("model", "adapter", "contents", "data", "reward", "template", "prompt",
                 "temperature", "k", "max_tokens", "seed", "dtype", "versions"):
        assert f"\n{name:12} {shown(protocol[name], 1000)}\n" in said
    assert said.index("\nthe base model\n") < said.index("\nwith the adapter\n")
    assert "weighted" not in said  # there is one set
    assert said.endswith(f"all of it is in {out}\n") and os.environ.pop("OMP_NUM_THREADS") == "3"
    for path, left in ((out / "base.jsonl", 1), (out / "eval.jsonl", 2)):
        path.write_text("".join(path.read_text().splitlines(True)[:left]) + '{"data": "held')
    assert summary("--base") == first and sum(map(len, made[1].log)) == 2 * len(base) - 3
    assert summary("--base") == first and "difference" not in summary() and len(made) == 2
    assert os.environ["OMP_NUM_THREADS"] == "1"  # the model is small, and the user has not said


# ---------------------------------------------------------------------------------- the real engine
@pytest.fixture(scope="module")
def merged(adapter, data, tmp_path_factory) -> Path:
    return run(adapter[1], data, tmp_path_factory.mktemp("runs") / "merged")


def run(model, data, out, *more) -> Path:
    small = "--template chat --k 4 --max-tokens 24 --max-prompt-tokens 40".split()
    run_program("eval.py", "--model", model, "--data", data, "--out", out, *small, *more, cwd=ROOT)
    return out


def samples(folder, name="eval"):
    """The rows in the order of questions: in the file they are as they came."""
    return sorted(lines(folder / f"{name}.jsonl"),
                  key=lambda row: (int(row["id"].split("/")[-1]), row["sample"]))


@pytest.mark.engine
@pytest.mark.core
def test_an_evaluation_of_the_real_engine(merged):
    rows = samples(merged)
    protocol, summary = (json.loads((merged / f"{name}.json").read_text())
                         for name in ("protocol", "summary"))
    assert [(row["id"].split("/")[-1], row["sample"]) for row in rows] == [
        (str(q), s) for q in range(21) for s in range(4)]
    assert all(row["level"] in "12" and 1 <= row["tokens"] <= 24 for row in rows)
    assert len({row["text"] for row in rows}) > 25
    assert summary == json.loads(json.dumps(report_all(rows, 4, protocol["weights"])))
    assert 0 < summary["weighted"]["avg"] < summary["sets"]["sums.jsonl"]["pass"]["4"] <= 1
    assert protocol["prompt"] == "<|user|>1+1=?<|assistant|>" and protocol["template"] == "chat"


@pytest.mark.engine
def test_adapter_and_merged_model_agree(merged, adapter, data, tmp_path):
    def alike(one, other) -> float:
        return mean(a["text"] == b["text"] for a, b in zip(one, other, strict=True))

    bases = []
    for sync in ("adapter", "merge"):  # in one start the base model answers, then the adapter
        out = run(MODEL, data, tmp_path / sync, "--base", "--adapter", adapter[0], "--sync", sync)
        # rounding may turn a rare sample, a wrong weight turns nearly all
        assert alike(samples(out), samples(merged)) > 0.9
        assert alike(samples(out), samples(out, "base")) < 0.7
        bases.append(samples(out, "base"))
    assert alike(*bases) > 0.9
