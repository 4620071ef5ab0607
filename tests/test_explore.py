"""A run's logs become a page: all of them, or what fits. Nothing that a model wrote breaks out.
And what another rule had done is what `collect` does under it."""
import base64
import gzip
import json
import math
import random
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import explore
from ada_sampler import RULES, SamplerConfig
from explore import ABSENT, OF_TOKENS, WHOLE, PageConfig, choose, main
from helpers import ROOT
from parts import what_if
from parts.folder import append
from parts.grader import NO_VERDICT
from parts.plot import PANELS, drawn_rows
from rewards import extract_answer
from test_ada_sampler import coins, run

HOSTILE = [
    "<script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 1'>",
    "javascript:window.hacked=1", "${window.hacked = 1}", "</script><h1>", "<!-- <script>", "]]>",
    "\u2028\u2029\x85",
    "\ud800 alone", "\udc00\ud83d", "\u202eright to left", "a" * 100_000, "\x00\x1b[2J",
    "/*DATA*/", "'\"\\`", "&lt;&amp;", "😀é", "\\boxed{</script>}", "\r\n\t"]


RECORDED = ROOT / "tests" / "explore_run"  # prompts of two real runs (--log-groups all)


def recorded_run(name="four", **changes):
    """One or four mini-batches: its config, with changes, and its prompts."""
    config = json.loads((RECORDED / name / "config.json").read_text())["config"] | changes
    groups = [json.loads(line) for line in (RECORDED / name / "groups.jsonl").open()]
    return dict(config=config, groups=groups)


def sample(text="\\boxed{7}", **more):
    return dict(text=text, tokens=[text[:5]], reward=0.0, status="wrong") | more


def group(step, place=0, pool=None):
    return dict(step=step, place=place, prompt="<|user|>3+4=?", outcome="resolved",
                pool=pool or [sample(), sample("no")])


def make(folder, groups=(), name="four", **changes):
    """A copy of a recorded run's folder, with other prompts if there are any."""
    shutil.copytree(RECORDED / name, folder)
    config = dict(config=recorded_run(name, **changes)["config"])
    (folder / "config.json").write_text(json.dumps(config))
    if groups:
        (folder / "groups.jsonl").write_text("".join(json.dumps(row) + "\n" for row in groups))
    return folder


def data_in(folder) -> dict:
    """The page is the template, and in its place for data nothing but letters of base64."""
    page, template = (file.read_text(encoding="utf-8")
                      for file in (folder / "explore.html", explore.TEMPLATE))
    before, after = template.split(explore.PLACE)
    assert page.startswith(before) and page.endswith(after)
    packed = page[len(before):len(page) - len(after)]
    return json.loads(gzip.decompress(base64.b64decode(packed, validate=True)))


def page_of(folder, **flags) -> dict:
    main(PageConfig(run=str(folder), **flags))
    return data_in(folder)


# ------------------------------------------------------------------------------ what is in it
def test_several_rewards_have_a_panel_on_the_page(tmp_path):
    folder = make(tmp_path / "mine", name="one")
    usual = [title for kind, title, *_ in PANELS if kind != "parts"]
    assert [title for _, title, *_ in page_of(folder)["panels"]] == usual
    append(folder / "metrics.jsonl", {"step": 99, "reward/a": 1, "reward/b": 0.5})
    panel, = (panel for panel in page_of(folder)["panels"] if panel[1] not in usual)
    assert panel[3] == {"reward/a": "a", "reward/b": "b"}


@pytest.mark.parametrize("name", ["four", "one"])
def test_the_page_has_all_that_was_logged(tmp_path, capsys, name):
    """And under its own rule each prompt ends as it did."""
    folder = make(tmp_path / "mine", name=name)
    data, logged = page_of(folder), recorded_run(name)
    run, = data["runs"]
    assert run["name"] == "mine" and run["config"] == logged["config"]
    assert run["metrics"] == drawn_rows(folder / "metrics.jsonl")  # see test_plot.py
    assert run["evals"] == drawn_rows(folder / "eval.jsonl")
    for row, was in zip(run["groups"], logged["groups"], strict=True):
        fate, pool = row.pop("what_if")[run["config"]["sampler"]], was["pool"]
        kept = [i for i, s in enumerate(pool) if s["kept"]]
        assert fate == dict(
            outcome=was["outcome"], draws=len(pool), kept=kept, baseline=was["baseline"],
            rounds=1 + max(s["round"] for s in pool),
            coefficients=[pool[i]["coefficient"] for i in kept])
        assert f"<|user|>{row.pop('question')}<|assistant|>" == row["prompt"]
        for s in row["pool"]:
            assert s.pop("answer") == extract_answer(s["text"])
        assert row == was
    assert data["left_out"] == "" and data["no_verdict"] == list(NO_VERDICT)
    assert str(folder / "explore.html") in capsys.readouterr().out


@pytest.mark.parametrize("rewards, said", [
    (("a.py:f", ""), "different rewards (a.py:f; math-verify): "), (("a.py:f", "a.py:f"), "")])
def test_two_runs_are_in_one_page_and_told_apart(tmp_path, capsys, rewards, said):
    """And not compared in silence where their rewards differ. Another size is for both."""
    rows = [group(step) for step in range(1, 6)]
    one, other = (make(tmp_path / place / "demo", rows, reward=reward)
                  for place, reward in zip("ab", rewards))
    with open(other / "groups.jsonl", "a") as log:
        log.write("{")
    data = page_of(one, against=str(other), n=2, M=6, N=1)
    assert [run["name"] for run in data["runs"]] == [str(one), str(other)]  # as they were typed
    assert [run["what_if"]["sizes"] for run in data["runs"]] == 2 * [dict(n=2, M=6, N=1)]
    fates = [group["what_if"] for run in data["runs"] for group in run["groups"]]
    assert len(fates) == 10
    assert all(set(fate) == {"uniform", "dapo"} for fate in fates)  # a round of M needs 6 draws
    assert f"Damaged lines of {other}/groups.jsonl" in data["left_out"]
    assert ("different rewards" in data["left_out"]) == bool(said) and said in data["left_out"]
    assert said in capsys.readouterr().out and not (other / "explore.html").exists()


@pytest.mark.parametrize("steps, wanted", [
    ("", [1, 2, 3, 4, 5]), ("2-4", [2, 3, 4]), ("5", [5]), ("0-99", [1, 2, 3, 4, 5]), ("8-9", [])])
def test_only_the_prompts_of_the_wanted_steps(tmp_path, steps, wanted):
    """Each with its own tokens, and curves stay whole."""
    rows = [group(step, 0, [sample(str(step))]) for step in range(1, 6)]
    data = page_of(make(tmp_path / "mine", rows), steps=steps)
    shown = [(row["step"], s["text"], s["tokens"][0]) for row in data["runs"][0]["groups"]
             for s in row["pool"]]
    assert shown == [(step, str(step), str(step)) for step in wanted]
    assert len(data["runs"][0]["metrics"]) == 6
    assert ("--steps" in data["left_out"]) == bool(steps)
    assert ("no recorded prompts in steps 8 to 9, " in data["left_out"]) == (not wanted)


@pytest.mark.parametrize("around", [
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "Solve this.\n\n{}\n", "{}"])
def test_a_question_is_the_prompt_without_what_all_share(around):
    questions = ["Mia had 2 pens.", "Mia had 3 cups and more pens.", "Max has 20 tens."]
    groups = [dict(prompt=around.format(question)) for question in questions]
    explore.add_questions(groups)
    assert [group["question"] for group in groups] == questions
    explore.add_questions(groups[:1])  # what is shared cannot be known from one
    assert groups[0]["question"] == groups[0]["prompt"].strip()


def test_whatever_a_model_writes_is_in_the_page_as_it_was(tmp_path):
    """But what JSON cannot hold: infinity, and bytes that are no text."""
    rows = [group(1, place, [sample(text), sample(text, coefficient=math.inf)])
            | dict(prompt=text, gold=text) for place, text in enumerate([*HOSTILE, "QQ"])]
    folder = make(tmp_path / "hostile", rows)
    log = folder / "groups.jsonl"
    log.write_bytes(log.read_bytes().replace(b"QQ", b"Q\xff"))
    data = page_of(folder)
    for row, text in zip(data["runs"][0]["groups"], [*HOSTILE, "Q\ufffd"], strict=True):
        assert [s["text"] for s in row["pool"]] == [text, text]
        assert row["prompt"] == row["gold"] == text
        assert row["pool"][0]["tokens"][0] == text[:5] and row["pool"][1]["coefficient"] is None


# ------------------------------------------------------------------------------ damage
def test_damaged_lines_are_left_out_and_counted(tmp_path, capsys):
    """And a run that recorded nothing has its curves."""
    folder = make(tmp_path / "mine")
    log = folder / "groups.jsonl"
    whole = log.read_bytes()
    strange = [b'{"step": 3, "place": 7, "po', b"\xff\xfe", b"[]", b"{}", b"[" * 100_000,
               b'{"step": 3}', b'{"step": ' + b"9" * 5000 + b', "pool": []}']
    strange += [json.dumps(group(3) | change).encode() for change in (
        dict(step=None), dict(step=[1]), dict(pool=5), dict(pool=["x"]), dict(pool=[{}]),
        dict(pool=[sample() | dict(text=None)]))]
    log.write_bytes(b"\n".join([*strange, whole.strip(), *strange]))
    data = page_of(folder)
    assert len(data["runs"][0]["groups"]) == 8
    said = f"left out (a crash leaves one): {2 * len(strange)}."
    assert said in data["left_out"] and said in capsys.readouterr().out
    for name in ("eval.jsonl", "groups.jsonl"):
        (folder / name).unlink()
        data = page_of(folder)
        assert len(data["runs"][0]["metrics"]) == 6
        assert ("--log-groups" in data["left_out"]) == (name == "groups.jsonl")


# ------------------------------------------------------------------------------ what fits
def long_run(tmp_path, steps=8, prompts=6):
    """Texts and tokens that do not compress: half of the bytes are tokens."""
    rng = random.Random(0)

    def noise(size):
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(size))

    def pool():
        columns = {name: [round(rng.random(), 7) for _ in range(30)] for name in OF_TOKENS}
        columns["tokens"] = [noise(8) for _ in range(30)]
        return [sample(noise(600), **columns), sample(noise(600))]

    groups = [group(step, place, pool()) for step in range(1, steps + 1)
              for place in range(prompts)]
    return make(tmp_path / "long", groups)


def test_a_page_never_exceeds_its_limit_and_says_what_it_left_out(tmp_path, monkeypatch, capsys):
    folder, before = long_run(tmp_path), None
    bare = explore.TEMPLATE.stat().st_size
    for most in (10**9, 100_000, 60_000, 6000):
        monkeypatch.setattr(explore, "MOST_BYTES", bare + most)
        data = page_of(folder)
        size = (folder / "explore.html").stat().st_size - bare
        assert size <= most and (size > 0.8 * most or most not in (100_000, 60_000))
        there = [row["pool"][0] for row in data["runs"][0]["groups"]]
        whole = [all(name in s for name in OF_TOKENS) for s in there]
        assert not any(set(OF_TOKENS) & s.keys() for s, full in zip(there, whole) if not full)
        assert len(there) == 48 or not any(whole)  # all are there before any has its tokens
        assert before is None or len(there) <= before
        before = len(there)
        said = (f"{len(there) - sum(whole)} are here without their tokens and {48 - before} are "
                "not: --steps")
        assert (said in data["left_out"]) == (most < 10**9) == (sum(whole) < 48)
    assert before < 48


def test_each_steps_first_prompt_comes_first_and_steps_are_spread(tmp_path):
    groups, _ = explore.read_groups(long_run(tmp_path) / "groups.jsonl", None)
    bare = sum(one.sizes[WHOLE - 1] for one in groups)
    token = groups[0].sizes[WHOLE] - groups[0].sizes[WHOLE - 1]

    def whole(room):
        return [(one.row["step"], one.row["place"])
                for one, level in zip(groups, choose(groups, room)) if level == WHOLE]

    assert whole(bare + int(4.5 * token)) == [(2, 0), (4, 0), (6, 0), (8, 0)]
    firsts = [(step, 0) for step in range(1, 9)]
    assert whole(bare + int(9.5 * token)) == sorted([*firsts, (8, 1)])
    wordy = replace(groups[0], sizes=(0, 100, 101))  # its texts do not fit, so nothing of it does
    assert choose([wordy], 50) == [ABSENT]
    assert choose(groups, 0) == [ABSENT] * 48 and set(choose(groups, 10**9)) == {WHOLE}
    runs = explore.data_of([dict(groups=groups)] * 2, [ABSENT] * 48 + [WHOLE] * 48, [])["runs"]
    assert [len(run["groups"]) for run in runs] == [0, 48]  # each run has levels of its own


# ------------------------------------------------------------------------------ another rule
RULES_OF_ONE_PROMPT = [name for name in RULES if not SamplerConfig(name).rule.allocates]


def pool_of(rewards):
    return [dict(reward=reward, status="scored") for reward in rewards]


@settings(max_examples=100)  # of few the pool is long enough and has a signal
@given(st.data(), st.sampled_from(RULES_OF_ONE_PROMPT), st.sampled_from((0, 0.05, 0.3, 0.7, 1)))
def test_under_another_rule_it_ends_as_if_that_rule_had_sampled_it(data, rule, p):
    """The stand-in engine writes the same n-th answer to a prompt, whoever asks for it."""
    drawn = data.draw(st.integers(4, 40), "draws that were recorded")
    wide = dict(sampler="uniform", n=drawn)
    group, = run(coins([p]), SamplerConfig(**wide))
    pool = pool_of([s.reward for s in group.pool])
    n = data.draw(st.sampled_from((2, 4)), "n")
    config = SamplerConfig(
        sampler=rule, n=n, M=data.draw(st.integers(n, 8), "M"), N=data.draw(st.integers(1, 4), "N"),
        drop_unresolved=data.draw(st.booleans(), "drop"),
        max_rounds_all_correct=data.draw(st.integers(0, 2), "rounds without a wrong one"),
        advantage=data.draw(st.sampled_from(("pool-mean", "leave-one-out")), "advantage"),
        weighting=data.draw(st.sampled_from(("inv_p", "log")), "weighting"))
    wanted = run(coins([p]), config)[0]
    fate = what_if.replayed(pool, config)
    if len(wanted.pool) > drawn:
        assert fate is None
        return
    assert fate == dict(
        outcome=wanted.outcome, rounds=wanted.rounds, draws=len(wanted.pool),
        baseline=wanted.baseline, kept=[s.index for s in wanted.kept],
        coefficients=[coefficient for _, coefficient in wanted.rows()])


def test_an_answer_without_a_verdict_is_not_right_however_low_the_threshold():
    for broken in (dict(reward=0.0, status="raised"), dict(reward=0.0, status=None),
                   dict(reward=None, status="scored"), dict(status="scored")):
        wide = SamplerConfig(sampler="uniform", n=3, threshold=-0.5)
        fate = what_if.replayed([broken, *pool_of([0.0, -2.0])], wide)
        assert fate["coefficients"] == pytest.approx([-2 / 3, 4 / 3, -2 / 3])  # as if all wrong


def test_sizes_that_the_sampler_refuses_are_refused_in_its_words():
    run = recorded_run("four")
    what_if.add_to(run, dict(n=8, M=4))
    reasons = run["what_if"]["rules"]
    assert run["what_if"]["sizes"] == dict(n=8, M=4, N=run["config"]["N"])
    assert reasons == {rule: "a round of 4 is below n = 8: raise M or lower n" * (rule[:3] == "ada")
                       for rule in RULES_OF_ONE_PROMPT}
    assert all(not reasons[rule] for group in run["groups"] for rule in group["what_if"])


def test_a_rule_that_shares_out_draws_is_left_out():
    for sampler in ("gvm", "ada-balance"):
        run = recorded_run("four", sampler=sampler)
        what_if.add_to(run)
        assert set(run["what_if"]["rules"]) == {*RULES_OF_ONE_PROMPT}
        config = SamplerConfig(sampler, **{size: run["config"][size] for size in ("n", "M", "N")})
        assert run["rule"] == (None if config.rule.allocates else config.rule._asdict())
