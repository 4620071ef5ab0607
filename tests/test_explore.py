"""The logs of a run become a page. No text of a model becomes HTML. Another rule on the page gives
the same as `collect` with this rule."""
import base64
import gzip
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import explore
from ada_sampler import RULES, SamplerConfig
from explore import PageConfig, main
from explorer import panels, what_if
from helpers import ROOT
from parts.files import append
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
    return dict(step=step, place=place, prompt=f"<|user|>+{step}", outcome="resolved", pool=[*pool])


RULES_OF_ONE_PROMPT = [name for name in RULES if not SamplerConfig(name).rule.allocates]


def make(folder, groups=(), name="four", **changes):
    """A copy of a recorded run's folder, with other prompts if there are any."""
    shutil.copytree(RECORDED / name, folder)
    config = dict(config=recorded_run(name, **changes)["config"])
    (folder / "config.json").write_text(json.dumps(config))
    if groups:
        (folder / "groups.jsonl").unlink()
        append(folder / "groups.jsonl", *groups)
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


@pytest.mark.parametrize("name, missing", [("four", "eval.jsonl"), ("one", "metrics.jsonl")])
def test_the_page_has_all_that_was_logged(tmp_path, name, missing):
    """And under its own rule each prompt ends as it did. One of the two logs is enough."""
    folder = make(tmp_path / "mine", name=name)
    (folder / missing).unlink()
    data, logged = page_of(folder), recorded_run(name)
    run, = data["runs"]
    assert run == run | panels.read_run(folder)
    for row, was in zip(run["groups"], logged["groups"], strict=True):
        fate, pool = row.pop("what_if")[run["config"]["sampler"]], was["pool"]
        trained = {i: s["coefficient"] for i, s in enumerate(pool) if s["kept"]}
        assert dict(zip(fate["kept"], fate["coefficients"], strict=True)) == trained
        assert (fate["outcome"], fate["draws"]) == (was["outcome"], len(pool))
        for s in row["pool"]:
            assert s.pop("answer") == extract_answer(s["text"])
        assert row == was
    assert data["notes"] == []


def test_two_runs_are_in_one_page_and_told_apart(tmp_path, capsys):
    """It says where their curves mean other things. Another size is for both."""
    rows = [group(step, place) for step in (1, 2, 3, 4) for place in (0, 1)]
    one, other = (make(tmp_path / place / "demo", rows, reward=reward)
                  for place, reward in zip("ab", ("a.py:f", "")))
    append(other / "metrics.jsonl", dict(step=100))
    data = page_of(one, against=str(other), n=2, M=6, N=1, steps=(2, 3), groups=1)
    assert [run["name"] for run in data["runs"]] == [str(one), str(other)]  # as they were typed
    for each in data["runs"]:
        assert [(g["place"], g["step"]) for g in each["groups"]] == [(0, 2), (0, 3)]
        assert each["rule"]["round_size"] == 8 and each["what_if"] == dict(
            sizes=dict(n=2, M=6, N=1), rules=dict.fromkeys(RULES_OF_ONE_PROMPT, ""))
        rules = set(each["groups"][0]["what_if"])  # a round of M needs 6 draws
        assert {"uniform", "dapo"} <= rules and not {"ada-pos", "ada-balance"} & rules
    note = "The runs have different rewards (a.py:f; math-verify): do not compare their curves."
    assert data["notes"] == [note] and data["reach"] == 4  # the mean of 9 of 100 steps
    page = one / "explore.html"
    assert capsys.readouterr().out == f"{note}\n{page} (0.1 MB): open it in a browser\n"


def test_whatever_a_model_writes_is_in_the_page_as_it_was(tmp_path, monkeypatch):
    """A line that a crash has cut is left out. A rule that cannot be replayed has no numbers."""
    pool = [sample(text) for text in HOSTILE]
    folder = make(tmp_path / "hostile", [group(1, 0, pool) | dict(prompt=" ".join(HOSTILE))],
                  sampler="gvm", M=2)
    with open(folder / "groups.jsonl", "a") as log:
        log.write('{"step": 3, "place": 7, "po')
    monkeypatch.chdir(folder)
    (run,) = page_of(Path())["runs"]
    (shown,) = run["groups"]
    assert run["name"] == "hostile" and shown["prompt"] == " ".join(HOSTILE)
    assert [s["text"] for s in shown["pool"]] == HOSTILE
    small = "a round of 2 is below n = 4: raise M or lower n"
    assert run["rule"] is None and shown["what_if"].keys() == {"uniform", "dapo"}
    assert run["what_if"]["rules"] == {
        "uniform": "", "dapo": "", "ada-pos": small, "ada-balance": small}


@settings(max_examples=100)  # of few the pool is long enough and has a signal
@given(st.data(), st.sampled_from(RULES_OF_ONE_PROMPT), st.sampled_from((0, 0.05, 0.3, 0.7, 1)))
def test_under_another_rule_it_ends_as_if_that_rule_had_sampled_it(data, rule, p):
    drawn = data.draw(st.integers(4, 40), "draws that were recorded")
    group, = run(coins([p]), SamplerConfig(sampler="uniform", n=drawn))
    pool = [dict(reward=s.reward) for s in group.pool]
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


def test_an_answer_without_a_verdict_counts_for_nothing():
    pool = [dict(reward=reward) for reward in (None, 0.0, 1.0, 1.0)]
    fate = what_if.replayed(pool, SamplerConfig(sampler="uniform", n=4))
    assert fate["kept"] == [1, 2, 3]
    assert fate["coefficients"] == pytest.approx([-2 / 3, 1 / 3, 1 / 3])
    high = SamplerConfig(n=4, M=4, N=1, threshold=1.0)  # no reward is above it
    assert what_if.replayed(pool, high)["outcome"] == "too few correct"
