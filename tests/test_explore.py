"""The logs of a run become a page, completely or as far as they fit. No text of a model becomes
HTML. Another rule on the page gives the same as `collect` with this rule."""
import base64
import gzip
import json
import math
import random
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import explore
from ada_sampler import RULES, SamplerConfig
from explore import ABSENT, OF_TOKENS, WHOLE, PageConfig, choose, main
from explorer import panels, what_if
from helpers import ROOT
from parts.grader import NO_VERDICT
from rewards import extract_answer
from test_ada_sampler import coins, run

RECORDED = ROOT / "tests" / "explore_run"  # prompts of two real runs (--log-groups all)
HOSTILE = [
    "<script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 1'>",
    "javascript:window.hacked=1", "${window.hacked = 1}", "</script><h1>", "<!-- <script>", "]]>",
    "\u2028\u2029\x85",
    "\ud800 alone", "\udc00\ud83d", "\u202eright to left", "a" * 100_000, "\x00\x1b[2J",
    "/*DATA*/", "'\"\\`", "&lt;&amp;", "😀é", "\\boxed{</script>}", "\r\n\t"]


def recorded_run(name="four", **changes):
    """One or four mini-batches: its config, with changes, and its prompts."""
    config = json.loads((RECORDED / name / "config.json").read_text())["config"] | changes
    groups = [json.loads(line) for line in (RECORDED / name / "groups.jsonl").open()]
    return dict(config=config, groups=groups)


def sample(text="\\boxed{7}", **more):
    return dict(text=text, tokens=[text[:5]], reward=0.0, status="wrong") | more


def group(step, place=0, pool=(sample(), sample("no"))):
    return dict(step=step, place=place, prompt="<|user|>3+4=?", outcome="resolved", pool=[*pool])


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


@pytest.mark.parametrize("name", ["four", "one"])
def test_the_page_has_all_that_was_logged(tmp_path, capsys, name):
    """And under its own rule each prompt ends as it did."""
    folder = make(tmp_path / "mine", name=name)
    data, logged = page_of(folder), recorded_run(name)
    run, = data["runs"]
    assert run == run | panels.read_run(folder)  # see test_panels.py
    assert data["panels"] == [list(panel) for panel in panels.panels_of(run["metrics"])]
    for row, was in zip(run["groups"], logged["groups"], strict=True):
        fate, pool = row.pop("what_if")[run["config"]["sampler"]], was["pool"]
        trained = {i: s["coefficient"] for i, s in enumerate(pool) if s["kept"]}
        assert dict(zip(fate["kept"], fate["coefficients"], strict=True)) == trained
        assert (fate["outcome"], fate["draws"]) == (was["outcome"], len(pool))
        assert f"<|user|>{row.pop('question')}<|assistant|>" == row["prompt"]
        for s in row["pool"]:
            assert s.pop("answer") == extract_answer(s["text"])
        assert row == was
    assert data["left_out"] == "" and data["no_verdict"] == list(NO_VERDICT)
    assert str(folder / "explore.html") in capsys.readouterr().out


def test_two_runs_are_in_one_page_and_told_apart(tmp_path, capsys):
    """It says where their curves mean other things. Another size is for both."""
    rows = [group(step) for step in range(1, 6)]
    one, other = (make(tmp_path / place / "demo", rows, reward=reward)
                  for place, reward in zip("ab", ("a.py:f", "")))
    with open(other / "groups.jsonl", "a") as log:
        log.write("{")
    data = page_of(one, against=str(other), n=2, M=6, N=1)
    assert [run["name"] for run in data["runs"]] == [str(one), str(other)]  # as they were typed
    for each in data["runs"]:
        assert each["what_if"]["sizes"] == dict(n=2, M=6, N=1)
        fates = [set(group["what_if"]) for group in each["groups"]]
        assert len(fates) == 5
        for rules in fates:  # a round of M needs 6 draws
            assert {"uniform", "dapo"} <= rules and not {"ada-pos", "ada-balance"} & rules
    printed = capsys.readouterr().out
    for words in (f"Damaged lines of {other}/groups.jsonl", "rewards (a.py:f; math-verify): "):
        assert words in data["left_out"] and words in printed
    assert not (other / "explore.html").exists()


@pytest.mark.parametrize("steps, wanted", [
    ("", [1, 2, 3, 4, 5]), ("2-4", [2, 3, 4]), ("5", [5]), ("8-9", [])])
def test_only_the_prompts_of_the_wanted_steps(tmp_path, steps, wanted):
    """Each with its own tokens, and curves stay whole."""
    rows = [group(step, 0, [sample(str(step))]) for step in range(1, 6)]
    data = page_of(make(tmp_path / "mine", rows), steps=steps)
    shown = [(row["step"], *row["pool"][0]["tokens"]) for row in data["runs"][0]["groups"]]
    assert shown == [(step, str(step)) for step in wanted]
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
    pool = [sample(text, coefficient=math.inf) for text in [*HOSTILE, "QQ"]]
    folder = make(tmp_path / "hostile", [group(1, 0, pool) | dict(prompt=" ".join(HOSTILE))])
    log = folder / "groups.jsonl"
    log.write_bytes(log.read_bytes().replace(b"QQ", b"Q\xff"))
    shown, = page_of(folder)["runs"][0]["groups"]
    assert shown["prompt"] == " ".join(HOSTILE)
    assert [s["text"] for s in shown["pool"]] == [*HOSTILE, "Q\ufffd"]
    assert {s["coefficient"] for s in shown["pool"]} == {None}


def test_damaged_lines_are_left_out_and_counted(tmp_path, capsys):
    """And a run that recorded nothing has its curves."""
    folder = make(tmp_path / "mine")
    log = folder / "groups.jsonl"
    whole = log.read_bytes()
    strange = [b'{"step": 3, "place": 7, "po', b"\xff\xfe", b"[]", b"[" * 100_000, b'{"step": 3}',
               b'{"step": ' + b"9" * 5000 + b', "pool": []}']
    strange += [json.dumps(group(3) | change).encode() for change in (
        dict(step=None), dict(pool=5), dict(pool=["x"]), dict(pool=[sample() | dict(text=None)]))]
    log.write_bytes(b"\n".join([*strange, whole.strip(), *strange]))
    data = page_of(folder)
    assert len(data["runs"][0]["groups"]) == 8 and "--log-groups" not in data["left_out"]
    said = f"left out (a crash leaves one): {2 * len(strange)}."
    assert said in data["left_out"] and said in capsys.readouterr().out
    for name in ("eval.jsonl", "groups.jsonl"):
        (folder / name).unlink()
    data = page_of(folder)
    assert len(data["runs"][0]["metrics"]) == 6 and "--log-groups" in data["left_out"]


def test_a_page_never_exceeds_its_limit_and_says_what_it_left_out(tmp_path, monkeypatch):
    """All prompts are there before any has its tokens. Half of these bytes are tokens."""
    rng = random.Random(0)

    def pool():
        columns = {name: [rng.randbytes(4).hex() for _ in range(30)] for name in OF_TOKENS}
        return [sample(rng.randbytes(1500).hex(), **columns), sample()]

    rows = [group(step, place, pool()) for step in range(1, 9) for place in range(6)]
    folder, bare = make(tmp_path / "long", rows), explore.TEMPLATE.stat().st_size
    for most, all_texts, tokens in ((10**9, True, True), (200_000, True, True),
                                    (60_000, False, False)):
        monkeypatch.setattr(explore, "MOST_BYTES", bare + most)
        data = page_of(folder)
        size = (folder / "explore.html").stat().st_size - bare
        assert size <= most and (size > 0.7 * most or most == 10**9)
        shown = [row["pool"][0] for row in data["runs"][0]["groups"]]
        whole = sum(set(OF_TOKENS) <= s.keys() for s in shown)
        assert whole == sum("ids" in s for s in shown)
        assert (len(shown) == 48, whole > 0) == (all_texts, tokens)
        said = f"{len(shown) - whole} are here without their tokens and {48 - len(shown)} are not"
        assert (said in data["left_out"]) == (whole < 48) == (most < 10**9)


def test_each_steps_first_prompt_comes_first_and_steps_are_spread(tmp_path):
    rows = [group(step, place) for step in range(1, 9) for place in range(6)]
    groups, _ = explore.read_groups(make(tmp_path / "run", rows) / "groups.jsonl", None)
    for one in groups:
        one.sizes = (0, 10, 30)

    def whole(room):
        return [(one.row["step"], one.row["place"])
                for one, level in zip(groups, choose(groups, room)) if level == WHOLE]

    assert whole(48 * 10 + 4 * 20 + 19) == [(2, 0), (4, 0), (6, 0), (8, 0)]
    firsts = [(step, 0) for step in range(1, 9)]
    assert whole(48 * 10 + 9 * 20) == sorted([*firsts, (8, 1)])
    assert choose(groups, 0) == [ABSENT] * 48 and set(choose(groups, 10**9)) == {WHOLE}
    runs = explore.data_of([dict(groups=groups)] * 2, [ABSENT] * 48 + [WHOLE] * 48, [])["runs"]
    assert [len(run["groups"]) for run in runs] == [0, 48]  # each run has levels of its own
    groups[0].sizes = (0, 100, 101)  # its texts do not fit, so nothing of it does
    assert choose(groups[:1], 50) == [ABSENT]


RULES_OF_ONE_PROMPT = [name for name in RULES if not SamplerConfig(name).rule.allocates]


@settings(max_examples=100)  # of few the pool is long enough and has a signal
@given(st.data(), st.sampled_from(RULES_OF_ONE_PROMPT), st.sampled_from((0, 0.05, 0.3, 0.7, 1)))
def test_under_another_rule_it_ends_as_if_that_rule_had_sampled_it(data, rule, p):
    drawn = data.draw(st.integers(4, 40), "draws that were recorded")
    group, = run(coins([p]), SamplerConfig(sampler="uniform", n=drawn))
    pool = [dict(reward=s.reward, status="scored") for s in group.pool]
    n = data.draw(st.sampled_from((2, 4)), "n")
    config = SamplerConfig(
        sampler=rule, n=n, M=data.draw(st.integers(n, 8), "M"), N=data.draw(st.integers(1, 4), "N"),
        drop_unresolved=data.draw(st.booleans(), "drop"),
        max_rounds_all_correct=data.draw(st.integers(0, 2), "rounds without a wrong one"),
        advantage=data.draw(st.sampled_from(("pool-mean", "leave-one-out")), "advantage"),
        weighting=data.draw(st.sampled_from(("inv_p", "log")), "weighting"))
    wanted = run(coins([p]), config)[0]
    fate = what_if.replayed(pool, config)
    assert fate == (None if len(wanted.pool) > drawn else dict(
        outcome=wanted.outcome, rounds=wanted.rounds, draws=len(wanted.pool),
        baseline=wanted.baseline, kept=[s.index for s in wanted.kept],
        coefficients=[coefficient for _, coefficient in wanted.rows()]))


@pytest.mark.parametrize("unjudged, coefficients", [
    (dict(reward=-2.0, status="raised"), [-2 / 3, 4 / 3, -2 / 3]),
    (dict(reward=-5.0, status="raised"), [-8 / 3, 7 / 3, 1 / 3]),  # another prompt had the lowest
    (dict(reward=-2.0, status=None), [-2 / 3, 4 / 3, -2 / 3]),
    (dict(reward=None, status="scored"), [-2 / 3, 4 / 3, -2 / 3]),
    (dict(), [-2 / 3, 4 / 3, -2 / 3])])
def test_an_answer_without_a_verdict_has_the_reward_of_its_run_and_is_never_right(
        unjudged, coefficients):
    """A run gives it the lowest reward of its step. A damaged row gets the lowest of its prompt."""
    scored = [dict(reward=reward, status="scored") for reward in (0.0, -2.0)]
    fate = what_if.replayed([unjudged, *scored], SamplerConfig(sampler="uniform", n=3))
    assert fate["coefficients"] == pytest.approx(coefficients)
    low = SamplerConfig(n=2, M=4, N=1, threshold=-9.0)  # every reward is above it
    found = what_if.replayed([*scored, scored[0], unjudged], low)
    assert 3 in found["kept"] and found["outcome"] == "resolved"


def test_sizes_that_are_refused_and_rules_that_share_out_draws_have_no_fates():
    """The words are the sampler's."""
    logged = recorded_run("four")
    what_if.add_to(logged, dict(n=8, M=4))
    reasons = logged["what_if"]["rules"]
    assert logged["what_if"]["sizes"] == dict(n=8, M=4, N=logged["config"]["N"])
    assert [*reasons] == RULES_OF_ONE_PROMPT and reasons["uniform"] == ""
    assert reasons["ada-pos"] == "a round of 4 is below n = 8: raise M or lower n"
    assert not any(reasons[rule] for group in logged["groups"] for rule in group["what_if"])
    assert logged["rule"]["rows_per_prompt"] == logged["config"]["n"]  # its own
    shared = recorded_run("four", sampler="gvm")
    what_if.add_to(shared)
    assert [*shared["what_if"]["rules"]] == RULES_OF_ONE_PROMPT and shared["rule"] is None
