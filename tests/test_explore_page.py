"""The page of explore.py in a real browser shows what the run recorded and the code computes.

tests/explore_run holds prompts of two real runs of the tiny model (--log-groups all, one and four
mini-batches), and in pools.txt the rewards of all their pools: a line per prompt, a word per round.
Screenshots of the main views are left in pytest's temporary folder, .../screenshots.
"""

import json
import math
import os
import random
import re
import shutil
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import explore
import minirl
from ada_sampler import Estimator, SamplerConfig, collect, without_verdict
from conftest import ROOT
from parts.grader import NO_VERDICT
from parts.simulate import as_rule

CHROMIUM = "/usr/bin/chromium"
RECORDED = ROOT / "tests" / "explore_run"
HTML = explore.TEMPLATE.read_text(encoding="utf-8")
pytestmark = pytest.mark.slow


# ---------------------------------------------- a browser and its pages
@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make extras"
    )
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium):
    """browse(file, address): an open page. At the end: no error on the console, no request."""
    wrong, contexts = [], []

    def open_page(file, address="", **settings):
        context = chromium.new_context(viewport=dict(width=1280, height=720), **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: wrong.append("a dialog") or dialog.dismiss())
        page.on(
            "request",
            lambda request: (
                request.url.split("#")[0] == file.as_uri()
                or wrong.append(f"request: {request.url[:100]}")
            ),
        )
        page.goto(file.as_uri() + address)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def run_folder(tmp_path, name="four", **settings):
    """A copy of a recorded run, with some settings changed."""
    folder = tmp_path / name
    if not folder.exists():
        shutil.copytree(RECORDED / name, folder)
    file = folder / "config.json"
    known = json.loads(file.read_text())
    known["config"] |= settings
    file.write_text(json.dumps(known))
    return folder


def page_file(tmp_path, *names, **settings):
    """explore.html of one run or two, as the command makes it."""
    folders = [str(run_folder(tmp_path, name, **settings)) for name in names or ("four",)]
    explore.main(explore.PageConfig(run=folders[0], against="".join(folders[1:])))
    return Path(folders[0]) / "explore.html"


def page_of(tmp_path, data):
    file = tmp_path / "page.html"
    file.write_text(explore.page_of(data | dict(no_verdict=NO_VERDICT), HTML))
    return file


def recorded_groups(name="four"):
    return [json.loads(line) for line in (RECORDED / name / "groups.jsonl").open()]


def recorded_group(step, place, name="four"):
    return next(g for g in recorded_groups(name) if (g["step"], g["place"]) == (step, place))


def recorded_config(**changes):
    return json.loads((RECORDED / "four" / "config.json").read_text())["config"] | changes


def settle(page):
    """Until what was asked for is drawn: changes are shown in the next frame."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def wait(page, condition, argument=None):
    """Until a condition in JavaScript holds. (The page forbids the eval of wait_for_function.)"""
    for _ in range(200):
        if page.evaluate(condition, argument):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never: {condition}")


def address(page):
    return page.evaluate("location.hash")


# ---------------------------------------------- the way through the page
def test_from_the_curves_to_the_formula_of_a_token_by_the_mouse_alone(
    browse, tmp_path, tmp_path_factory
):
    pictures = tmp_path_factory.mktemp("screenshots")
    page = browse(page_file(tmp_path))

    def look(name):
        page.screenshot(path=pictures / f"{name}.png")

    look("curves")
    box = page.locator(".panel svg[role=img]").first.bounding_box()
    page.mouse.click(
        box["x"] + box["width"] * (40 + 10 / 12 * 512) / 560, box["y"] + box["height"] / 2
    )
    page.wait_for_selector("main[data-view=prompts]")
    assert address(page) == "#/run/0/step/10"
    page.select_option("select[aria-label='sort by']", "draws")
    settle(page)
    look("prompts")
    draws = [int(text) for text in page.locator(".row .cost b").all_inner_texts()]
    assert draws == sorted(
        (len(g["pool"]) for g in recorded_groups() if g["step"] == 10), reverse=True
    )

    page.locator(".row", has_text="7+2+3=?").click()
    page.wait_for_selector("main[data-view=prompt]")
    look("prompt")
    group = recorded_group(10, 9)
    assert "It cost 16 draws and 250 tokens" in page.inner_text("#worth")
    assert page.inner_text(".exit") == "closed, resolved: it wanted 2 right and 2 wrong"
    assert page.locator(".draw .lane i").count() == 16
    assert page.locator(".draw .lane i.kept").count() == sum(s["kept"] for s in group["pool"])

    page.click(".draw[data-sample='5']")
    page.wait_for_selector("main[data-view=sample]")
    sample = group["pool"][5]
    assert "".join(page.locator(".tokens .token").all_inner_texts()).replace("↵", "\n") == "".join(
        sample["tokens"]
    )
    page.hover(".token[data-t='10']")
    look("sample")
    assert sample["mask"][10] == "0" and page.inner_text("#why").startswith(
        "Gradient 0: the mask stops it."
    )
    assert (
        "Â wants to lower this token, and it is already unlikelier: 0.359 times"
        in page.inner_text("#why")
    )
    page.hover(".token[data-t='2']")
    assert page.inner_text("#why").startswith("Gradient −0.")
    page.locator(".crumbs a", has_text="curves").click()
    page.wait_for_selector("main[data-view=curves]")


def test_bars_stand_where_the_engine_steps_say(browse, tmp_path):
    page = browse(page_file(tmp_path), "#/run/0/step/10/prompt/9")
    pool = recorded_group(10, 9)["pool"]
    lane = page.locator(".draw .lane").first.bounding_box()
    end = max(s["finish"] for s in pool)
    for bar, s in zip(page.locator(".draw .lane i").all(), pool):
        box = bar.bounding_box()
        assert box["x"] - lane["x"] == pytest.approx(s["submit"] / end * lane["width"], abs=1.5)
        assert box["width"] == pytest.approx(
            (s["finish"] - s["submit"]) / end * lane["width"], abs=1.5
        )
        assert ("right" in bar.get_attribute("class")) == (s["reward"] > 0.7)


def test_filters_sorts_and_search_choose_what_their_names_say(browse, tmp_path):
    groups = [g for g in recorded_groups() if g["step"] == 10]
    page = browse(page_file(tmp_path), "#/run/0/step/10")

    def places():
        settle(page)
        return [int(row.get_attribute("data-place")) for row in page.locator(".row").all()]

    def having(test):
        return {g["place"] for g in groups if test([s["reward"] for s in g["pool"]], g)}

    wanted = {
        "never": having(lambda r, g: not any(r)),
        "always": having(lambda r, g: all(r)),
        "mixed": having(lambda r, g: 0 < sum(r) < len(r)),
        "unresolved": having(lambda r, g: g["outcome"] != "resolved"),
        "silent": having(lambda r, g: len(set(r)) == 1),
    }
    assert any(wanted.values())
    for only, expected in wanted.items():
        page.click(f"[data-only={only}]")
        assert set(places()) == expected, only
        assert page.inner_text(f"[data-only={only}]").endswith(f" {len(expected)}")
    page.click("[data-only=all]")

    tilt = {
        g["place"]: abs(g["pool_mean"] - sum(s["reward"] for s in g["pool"] if s["kept"]) / 4)
        for g in groups
    }
    gap = {
        g["place"]: max(
            [
                abs(a - b)
                for s in g["pool"]
                if "mu" in s
                for a, b in zip(s["mu"], s.get("old", s["theta"]))
            ]
            or [0]
        )
        for g in groups
    }
    stopped = {g["place"]: sum(s.get("mask", "").count("0") for s in g["pool"]) for g in groups}
    assert any(stopped.values())
    for sort, worth in (("tilt", tilt), ("gap", gap), ("stopped", stopped)):
        page.select_option("select[aria-label='sort by']", sort)
        assert [worth[place] for place in places()] == sorted(worth.values(), reverse=True), sort

    page.fill("#find", "\\boxed{11}")
    wait(page, "document.querySelectorAll('.row').length < 7")
    assert set(places()) == {
        g["place"] for g in groups if any("\\boxed{11}" in s["text"] for s in g["pool"])
    }


# ---------------------------------------------- Eq. 7 with a token's numbers
OBJECTIVES = [
    dict(),
    dict(weight_cap=1.0),
    dict(weight_cap=0.0),
    dict(clip=False),
    dict(importance="staleness"),
    dict(importance="none"),
    dict(mask="dppo", delta=0.05),
    dict(mask="icepop"),
    dict(objective="grpo", eps_low=0.05, eps_high=0.05),
    dict(objective="grpo", clip=False),
    dict(objective="cispo", eps_low=0.05, eps_high=0.05),
]


def by_the_objective(sample, **settings):
    """(terms, mask, the gradient's coefficients) of a recorded sample by minirl.objective."""
    config = SimpleNamespace(**recorded_config(**settings))
    theta = torch.tensor(sample["theta"], dtype=torch.float64, requires_grad=True)
    old = torch.tensor(sample.get("old", sample["theta"]), dtype=torch.float64)
    mu = torch.tensor(sample["mu"], dtype=torch.float64)
    advantage = torch.full_like(mu, sample["coefficient"])
    term, mask, _ = minirl.objective(theta, old, mu, advantage, config)
    (push,) = torch.autograd.grad(term.sum(), theta)
    return term.tolist(), mask.tolist(), push.tolist()


@pytest.mark.parametrize(
    "settings", OBJECTIVES, ids=lambda s: ",".join(map(str, s.values())) or "default"
)
def test_the_formula_of_the_token_under_the_mouse_has_the_value_of_the_objective(
    settings, browse, tmp_path
):
    file = page_file(tmp_path, **settings)
    for place, index in ((9, 5), (6, 8)):
        sample = recorded_group(10, place)["pool"][index]
        page = browse(file, f"#/run/0/step/10/prompt/{place}/sample/{index}")
        terms, _, pushes = by_the_objective(sample, **settings)
        for t in [*range(0, len(terms), 4), len(terms) - 1]:
            page.hover(f".token[data-t='{t}']")
            assert float(page.get_attribute("#term", "data-value")) == pytest.approx(
                terms[t], abs=1e-6
            ), t
        pushed = page.evaluate(
            """([place, index]) => {
            const run = DATA.runs[0], group = run.steps.get(10).find(g => g.place === place);
            const s = group.pool[index];
            return s.theta.map((theta, t) => objective(
                theta, s.old[t], s.mu[t], s.coefficient, run.config, maskSettings(run)).push)}""",
            [place, index],
        )
        assert pushed == pytest.approx(pushes, abs=1e-9)  # what it says of the gradient


ON_RANDOM_TOKENS = """([tokens, cases]) => cases.map(([config, m]) => tokens.map(token => {
    const found = objective(...token, config, m);
    return [found.term, found.mask, found.push];
}))"""


def test_term_mask_and_gradient_are_the_objectives_on_any_numbers(browse, tmp_path):
    rng = random.Random(0)
    tokens = []
    for _ in range(400):
        old = -rng.expovariate(1.0)
        theta, mu = (min(old + rng.gauss(0, spread), 0.0) for spread in (0.3, 0.5))
        tokens.append([theta, old, mu, rng.choice((-1, 1)) * rng.uniform(0.1, 1)])
    theta, old, mu, advantage = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens)
    )
    cases = [
        dict(eps_low=low, eps_high=high) | more
        for low, high in ((0.2, 0.27), (0.05, 0.6))
        for more in OBJECTIVES
    ]
    configs = [recorded_config(**case) for case in cases]
    page = browse(page_file(tmp_path))
    masks = page.evaluate("configs => configs.map(recordedMask)", configs)
    found = page.evaluate(ON_RANDOM_TOKENS, [tokens, list(zip(configs, masks))])
    for config, ours in zip(configs, found):
        lp = theta.clone().requires_grad_()
        term, mask, _ = minirl.objective(lp, old, mu, advantage, SimpleNamespace(**config))
        (push,) = torch.autograd.grad(term.sum(), lp)
        theirs = [*zip(term.tolist(), mask.tolist(), push.tolist())]
        assert [tuple(row) for row in ours] == [pytest.approx(row, abs=1e-12) for row in theirs], (
            config
        )


def test_the_recorded_numbers_are_shown_as_they_are(browse, tmp_path):
    sample = recorded_group(10, 9)["pool"][5]
    page = browse(page_file(tmp_path), "#/run/0/step/10/prompt/9/sample/5/token/10")
    shown = page.inner_text("#numbers").replace("\n", " ")
    for value in (sample["mu"][10], sample["old"][10], sample["theta"][10]):
        assert f"{value:.4f}".replace("-", "−") in shown
    assert f"token id {sample['ids'][10]}" in shown and "mask, recorded 0" in shown
    assert f"{sample['entropy'][10]:.3g}" in shown


# ---------------------------------------------- sliders
def stopped(page):
    settle(page)
    return {int(t.get_attribute("data-t")) for t in page.locator(".tokens .token.stopped").all()}


def expected_stopped(sample, **settings):
    return {t for t, m in enumerate(by_the_objective(sample, **settings)[1]) if m == 0}


def test_a_slider_stops_the_tokens_that_the_objective_would_stop(browse, tmp_path):
    file, seen = page_file(tmp_path), set()
    for place, index in ((9, 5), (16, 0), (3, 0)):
        group = recorded_group(10, place)
        sample = group["pool"][index]
        page = browse(file, f"#/run/0/step/10/prompt/{place}/sample/{index}")
        assert stopped(page) == {t for t, m in enumerate(sample["mask"]) if m == "0"}
        for eps in (0.01, 0.02, 0.05, 0.1, 0.6):
            for name in ("eps_low", "eps_high"):
                page.locator(f"input[type=range][name={name}]").fill(str(eps))
            found = expected_stopped(sample, eps_low=eps, eps_high=eps)
            assert stopped(page) == found, eps
            seen.add(len(found))
        page.click("#recorded-mask")
        assert stopped(page) == {t for t, m in enumerate(sample["mask"]) if m == "0"}
        for kind, delta in (("dppo", 0.02), ("dppo", 0.3), ("icepop", 0.2)):
            page.select_option("#masks select", kind)
            if kind == "dppo":
                page.fill("input[type=number][aria-label=delta]", str(delta))
            assert stopped(page) == expected_stopped(sample, mask=kind, delta=delta), (kind, delta)
    assert len(seen) >= 3  # a slider that did nothing would not pass


def test_the_keys_move_a_slider_and_the_counts_are_those_of_the_whole_step(browse, tmp_path):
    page = browse(page_file(tmp_path), "#/run/0/step/10?eps_low=0.1&eps_high=0.1")
    trained = [s for g in recorded_groups() if g["step"] == 10 for s in g["pool"] if "theta" in s]

    def count():
        settle(page)
        return int(page.locator("#masks [data-stopped]").first.get_attribute("data-stopped"))

    assert count() == sum(len(expected_stopped(s, eps_low=0.1, eps_high=0.1)) for s in trained) > 5
    page.focus("input[type=range][name=eps_low]")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert count() == sum(len(expected_stopped(s, eps_low=0.05, eps_high=0.1)) for s in trained)
    assert "eps_low=0.05" in address(page)


def test_a_run_of_one_mini_batch_says_why_no_slider_stops_anything(browse, tmp_path):
    page = browse(page_file(tmp_path, "one"), "#/run/0/step/10?eps_low=0.01&eps_high=0.01")
    assert "is trained before anything has moved: no ε stops any" in page.inner_text("#masks")
    assert page.locator("#masks [data-stopped]").first.get_attribute("data-stopped") == "0"


# ---------------------------------------------- the sampler, on recorded pools
class PoolEnds(Exception):
    pass


class Replay:
    """In the engine's and the grader's place: gives out a recorded pool, in its order."""

    def __init__(self, rewards):
        self.rewards, self.queue, self.busy = rewards, [], False

    def submit(self, key, problem, rollout=None):
        if rollout is None:
            if key[1] >= len(self.rewards):
                raise PoolEnds
            self.queue.append((key, SimpleNamespace(token_ids=())))
            self.busy = True

    def step(self):
        finished, self.queue, self.busy = self.queue, [], False
        return finished

    def result(self, key):
        return SimpleNamespace(reward=self.rewards[key[1]], status="")


def by_the_sampler(rewards, config):
    """[outcome, draws, kept, coefficients] by ada_sampler.collect; ["unknown"]: the pool ends."""
    engine = Replay(rewards)
    try:
        (group,) = collect(
            [SimpleNamespace(id=0)], config, engine, engine, estimator=Estimator(config)
        )
    except PoolEnds:
        return ["unknown"]
    rows = group.rows()
    return [group.outcome, len(group.pool), [s.index for s, _ in rows], [c for _, c in rows]]


def rules(rule, **settings):
    """The settings under one rule, as far as it reads them; None if ada_sampler refuses them."""
    try:
        config = as_rule(SamplerConfig(**settings), rule)
        config.validate()
    except ValueError:
        return None
    return config


REPLAY = """([pools, settings]) => settings.map(c => pools.map(rewards => {
    const pool = rewards.map((reward, index) => ({ reward, index, correct: reward > 0.7 }));
    const f = counterfactual(pool, c);
    if (f.outcome === "unknown") return ["unknown"];
    return [f.outcome, f.drawn, f.kept.map(s => s.index), f.coefficients];
}))"""
SETTINGS = [dict(n=n, M=M, N=N) for n, M, N in product((2, 3, 4, 5, 8), (4, 8), (1, 2, 4, 6))] + [
    dict(M_first=5),
    dict(M_first=16, N=2),
    dict(k_pos=2),
    dict(k_pos=5, N=3),
    dict(drop_unresolved=True),
    dict(max_rounds_all_correct=1),
    dict(max_rounds_all_correct=2, n=5),
    dict(advantage="leave-one-out"),
    dict(advantage="group-std"),
    dict(advantage="positives-only", n=1),
    dict(weighting="unbiased"),
    dict(weighting="log", drop_unresolved=True),
    dict(weighting="inv_p", n=3),
]
RULES = ("uniform", "dapo", "ada-pos", "ada-balance")


def test_the_counterfactual_sampler_is_the_sampler(browse, tmp_path):
    words = (RECORDED / "pools.txt").read_text().split("\n")
    pools = sorted({line.replace(" ", "") for line in words if line})
    pools = [[float(reward) for reward in pool] for pool in pools[::6]]
    pools += [
        [0.25, 0.9, 0.1, 0.9, 0.75, -1.0, 0.3, 2.0],
        [1.0],
        [0.0, 1.0],
    ]  # a reward of one's own; short ones
    cases = [(rule, settings) for settings in SETTINGS for rule in RULES]
    cases = [(config, vars(config)) for config in (rules(rule, **s) for rule, s in cases) if config]
    page = browse(page_file(tmp_path))
    found = page.evaluate(REPLAY, [pools, [settings for _, settings in cases]])
    outcomes = set()
    for (config, settings), ours in zip(cases, found):
        for rewards, mine in zip(pools, ours):
            theirs = by_the_sampler(rewards, config)
            assert mine[:3] == theirs[:3], (settings, rewards)
            if len(theirs) > 3:
                assert mine[3] == pytest.approx(theirs[3], abs=1e-12), (settings, rewards)
            outcomes.add(mine[0])
    assert outcomes == {"unknown", "resolved", "no correct", "no wrong"}


OWN_REWARDS = """([pools, threshold, settings]) => pools.map(pool => {
    const group = { pool };
    prepareGroup(group, threshold, DATA.no_verdict);
    return [pool.map(s => s.correct), settings.map(c => {
        const f = counterfactual(pool, c);
        if (f.outcome === "unknown") return ["unknown"];
        return [f.outcome, f.drawn, f.kept.map(s => s.index), f.coefficients];
    })];
})"""


@pytest.mark.parametrize("threshold", [-0.5, 0.7])
def test_the_page_judges_rewards_of_ones_own_as_the_sampler_does(browse, tmp_path, threshold):
    """Above a negative threshold lies also the 0 that is logged where --reward failed."""
    rng = random.Random(3)
    pools = [rng.choices([math.nan, -2.0, -0.6, -0.25, 0.9], k=16) for _ in range(40)]
    rows = [
        [
            dict(reward=logged, status="raised" if math.isnan(reward) else "scored", round=0)
            for reward, logged in zip(pool, without_verdict(pool))
        ]
        for pool in pools
    ]
    configs = [rules(rule, threshold=threshold, n=4, M=4) for rule in RULES]
    page = browse(page_file(tmp_path))
    found = page.evaluate(OWN_REWARDS, [rows, threshold, [vars(config) for config in configs]])
    for pool, (correct, replayed) in zip(pools, found):
        assert correct == [reward > threshold for reward in pool]
        for config, mine in zip(configs, replayed):
            theirs = by_the_sampler(pool, config)
            assert mine[:3] == theirs[:3], (config, pool)
            if len(theirs) > 3:
                assert mine[3] == pytest.approx(theirs[3], abs=1e-12), (config, pool)


def test_the_page_refuses_the_settings_that_the_sampler_refuses(browse, tmp_path):
    page = browse(page_file(tmp_path))
    grid = [
        dict(n=n, M=M, N=N, M_first=f, k_pos=k, max_rounds_all_correct=r, advantage=a, weighting=w)
        for n, M, N, f, k, r, (a, w) in product(
            (1, 4, 8),
            (2, 4),
            (1, 3),
            (0, 6),
            (1, 9),
            (0, 2),
            (("pool-mean", "none"), ("group-std", "log"), ("positives-only", "none")),
        )
    ]
    cases = []
    for rule, settings in product(RULES, grid):
        config = as_rule(SamplerConfig(**settings), rule)  # without what other rules read
        refused = rules(rule, **settings) is None
        cases.append((vars(config) | dict(sampler=rule), refused))
    found = page.evaluate("cases => cases.map(c => refused(c) !== '')", [case for case, _ in cases])
    assert [case for (case, no), mine in zip(cases, found) if no != mine] == []
    assert 0 < sum(found) < len(found)


def test_the_panel_tells_what_another_rule_would_have_kept(browse, tmp_path):
    group = recorded_group(10, 9)
    rewards = [s["reward"] for s in group["pool"]]
    page = browse(page_file(tmp_path), "#/run/0/step/10/prompt/9")
    page.fill("#sampler input[name=n]", "6")
    page.click("tr[data-rule=ada-pos]")
    settle(page)
    outcome, drawn, kept, coefficients = by_the_sampler(rewards, rules("ada-pos", n=6))
    cells = page.locator("tr[data-rule=ada-pos] td").all_inner_texts()
    right = sum(rewards[i] > 0.7 for i in kept)
    assert cells[1:3] == [str(drawn), f"{right} ✓ {len(kept) - right} ✗"]
    assert cells[3] == ", ".join(
        f"{a:+.3g}".replace("-", "−") for a in sorted(set(coefficients), reverse=True)
    )
    marked = page.evaluate(
        "[...document.querySelectorAll('.would')].map(e => Number(e.textContent) - 1)"
    )
    assert marked == kept
    page.fill("#sampler input[name=n]", "8")
    settle(page)
    assert (
        page.inner_text("tr[data-rule=ada-balance]").split("\t")[1]
        == "unknown: wants 24, the pool ends at 16"
    )
    page.fill("#sampler input[name=M]", "4")
    settle(page)
    assert "a round of 4 is below n = 8" in page.inner_text("tr[data-rule=ada-pos]")


def test_the_recorded_settings_give_back_what_was_recorded(browse, tmp_path):
    page = browse(page_file(tmp_path))
    same = page.evaluate("""DATA.runs[0].groups.map(g => {
        const f = counterfactual(g.pool, samplerSettings(g.run, "ada-balance"));
        const kept = g.pool.filter(s => s.kept);
        const places = samples => String(samples.map(s => s.index));
        return f.outcome === g.outcome && places(f.kept) === places(kept)
          && f.coefficients.every((c, i) => Math.abs(c - kept[i].coefficient) < 1e-12)})""")
    assert same == [True] * len(recorded_groups())


# ---------------------------------------------- what a model may write
HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "<!-- <script>",
    "<img src=x onerror='window.hacked = 1'>",
    "\u202eright to left\u2066",
    "a" * 100_000,
    "\ud800 \udc00\ud800",
    "${window.hacked = 1}",
    "</div></main><h1>",
    "\x00\x07\x1b[31m",
    "javascript:window.hacked=1",
]


def hostile_data(text):
    group = recorded_group(10, 9)
    group |= dict(prompt=text, gold=text, id=text, outcome=text)
    for s in group["pool"]:
        s |= dict(text=text, reason=text, status=text, answer=text, finish_reason=text)
        if "tokens" in s:
            s["tokens"] = [text] + s["tokens"][1:]
    again = json.loads(json.dumps(group)) | dict(step=11)
    config = recorded_config(name=text, model=text)
    run = dict(
        name=text,
        config=config,
        metrics=[dict(step=10, samples=16, prompts=1)],
        evals=[],
        groups=[group, again],
    )
    return dict(left_out=text, runs=[run, run | dict(groups=[group])])


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_model_wrote_is_only_text(text, browse, tmp_path):
    file = page_of(tmp_path, hostile_data(text))
    if "<" in text:
        assert text not in file.read_text()
    page = browse(file)
    elements = {}
    for view in (
        "#/curves",
        "#/run/0/all",
        "#/run/0/step/10/prompt/9",
        "#/run/0/step/10/prompt/9/sample/5",
        "#/run/0/step/10/prompt/9/sample/1",
    ):
        page.evaluate("view => { location.hash = view }", view)
        wait(
            page,
            "view => location.hash.startsWith(view) && document.querySelector('main').children[0]",
            view,
        )
        settle(page)
        counts = page.evaluate("""() => [window.hacked, document.scripts.length,
            document.querySelectorAll('img, main main').length,
            document.documentElement.scrollWidth <= innerWidth]""")
        assert counts == [None, 1, 0, True], view
        elements[view] = page.evaluate("document.querySelector('main').textContent")
    if text.startswith("<") and len(text) < 1000:
        assert all(text in seen for seen in elements.values())
    if "\u202e" in text:
        assert (
            not any("\u202e" in seen for seen in elements.values())
            and "U+202E" in elements["#/run/0/all"]
        )


def test_nothing_in_the_template_reads_text_as_html_or_knows_a_network():
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\(|Function\(|srcdoc",
        HTML,
    )
    assert set(re.findall(r"https?://[^\"'\s]+", HTML)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1998/Math/MathML",
    }  # names, never fetched
    assert HTML.count(explore.PLACE) == 1 and "default-src 'none'" in HTML


def test_even_code_on_the_page_cannot_reach_a_network(chromium, tmp_path):
    page = chromium.new_page()
    page.goto(page_file(tmp_path).as_uri())
    assert (
        page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', error => error.name)")
        == "TypeError"
    )
    assert (
        page.evaluate("""new Promise(done => {
        document.addEventListener("securitypolicyviolation", e => done(e.effectiveDirective));
        setTimeout(() => done("nothing was forbidden"), 2000);
        fetch("http://127.0.0.1:9/").catch(() => 0) })""")
        == "connect-src"
    )
    page.close()


# ---------------------------------------------- keys, links, looks
def test_the_keyboard_leads_everywhere(browse, tmp_path):
    page = browse(page_file(tmp_path), "#/run/0/step/10")

    def press(*keys):
        for key in keys:
            page.keyboard.press(key)
            settle(page)
        return address(page)

    places = [g["place"] for g in recorded_groups() if g["step"] == 10]
    assert press("ArrowDown", "ArrowDown", "Enter") == f"#/run/0/step/10/prompt/{places[1]}"
    assert press("ArrowRight") == f"#/run/0/step/10/prompt/{places[2]}"
    assert (
        press("ArrowLeft", "ArrowDown", "Enter") == f"#/run/0/step/10/prompt/{places[1]}/sample/0"
    )
    assert press("ArrowDown").endswith("/sample/1") and press("ArrowUp").endswith("/sample/0")
    assert press("Escape") == f"#/run/0/step/10/prompt/{places[1]}"
    assert press("Escape") == "#/run/0/step/10"
    assert press("ArrowRight") == "#/run/0/step/11"
    assert press("Escape") == "#/curves"
    assert press("ArrowLeft", "ArrowLeft", "Enter") == "#/run/0/step/11"
    press("/")
    page.keyboard.type("no such words t ?")
    wait(page, "location.hash.includes('find=')")
    settle(page)
    assert page.locator(".row").count() == 0 and page.locator("dialog[open]").count() == 0
    page.keyboard.press("Escape")  # leaves the search
    press("?")
    assert "search prompts and answers" in page.inner_text("dialog[open]")
    press("Escape")
    assert page.locator("dialog[open]").count() == 0


def test_keys_walk_over_the_tokens_and_change_their_colours(browse, tmp_path):
    page = browse(page_file(tmp_path), "#/run/0/step/10/prompt/9/sample/5/token/3")
    page.keyboard.press("ArrowRight")
    assert address(page).endswith("/token/4") and page.inner_text("#formula h2").startswith(
        "Eq. 7 for token 5,"
    )
    colours = set()
    for _ in range(6):
        page.keyboard.press("c")
        settle(page)
        colours.add(
            page.evaluate(
                "[...document.querySelectorAll('.token')].map(t => t.style.cssText).join()"
            )
        )
    assert len(colours) == 6 and "colour=" in address(page)


@pytest.mark.parametrize(
    "where",
    [
        "#/curves",
        "#/run/0/step/10?sort=draws&only=mixed&find=boxed",
        "#/run/0/all?rule=ada-pos&n=2",
        "#/run/0/step/10/prompt/9?rule=uniform",
        "#/run/0/step/10/prompt/9/sample/5/token/10?colour=entropy&eps_low=0.05",
    ],
)
def test_a_link_opens_the_view_it_was_copied_from(where, browse, tmp_path):
    file = page_file(tmp_path)
    page = browse(file, where)
    assert address(page) == where
    page.evaluate("location.hash = '#/run/0/step/11'")
    wait(page, "document.querySelector('h1').textContent === 'Step 11'")
    page.go_back()
    settle(page)
    again = browse(file, where)
    words = "document.querySelector('main').innerText"
    assert page.evaluate(words) == again.evaluate(words) and len(again.evaluate(words)) > 300


def test_a_link_to_what_is_not_there_says_so(browse, tmp_path):
    page = browse(page_file(tmp_path), "#/run/0/step/10/prompt/999")
    assert "Nothing is recorded here" in page.inner_text("main")
    page.evaluate("location.hash = '#/run/7/step/5000'")
    wait(page, "document.querySelector('h1').textContent === 'Step 5000'")
    assert "The nearest step with some is step 11" in page.inner_text("main")


def test_light_and_dark_follow_the_system_and_the_button(browse, tmp_path):
    def brightness(page):
        colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765

    light = browse(page_file(tmp_path), color_scheme="light")
    dark = browse(page_file(tmp_path), color_scheme="dark")
    assert brightness(light) > 0.9 and brightness(dark) < 0.15
    dark.click("#theme")
    assert brightness(dark) > 0.9
    dark.keyboard.press("t")
    assert brightness(dark) < 0.15


# ---------------------------------------------- two runs, and what may be missing
def test_two_runs_stand_side_by_side(browse, tmp_path):
    page = browse(page_file(tmp_path, "four", "one"), "#/run/0/step/10/prompt/9")
    assert page.locator(".beside > div").count() == 2
    assert [page.locator(".beside h2").nth(i).inner_text()[:6] for i in (0, 3)] == [
        "A: fou",
        "B: one",
    ]
    pools = [recorded_group(10, 9, name)["pool"] for name in ("four", "one")]
    assert page.locator(".draw").count() == len(pools[0]) + len(pools[1])
    assert page.locator("#visits tr").count() == 3
    page.click("#beside")
    assert page.locator(".beside").count() == 0 and page.locator(".draw").count() == len(pools[0])
    page.click("#other-run")
    settle(page)
    assert address(page).startswith("#/run/1/step/10/prompt/9") and page.locator(
        ".draw"
    ).count() == len(pools[1])
    page.evaluate("location.hash = '#/curves'")
    page.wait_for_selector(".panel path.line.run1")
    assert "four against one" in page.inner_text("h1")


def test_one_prompt_is_followed_over_the_steps(browse, tmp_path):
    first = recorded_group(10, 9)
    later = [json.loads(json.dumps(first)) | dict(step=step) for step in (30, 57)]
    run = dict(
        name="epochs", config=recorded_config(), metrics=[], evals=[], groups=[first, *later]
    )
    page = browse(page_of(tmp_path, dict(left_out="", runs=[run])), "#/run/0/step/10/prompt/9")
    assert page.locator("#visits a").all_inner_texts() == ["step 10", "step 30", "step 57"]
    page.click("#visits a:has-text('step 57')")
    wait(page, "document.querySelector('h1').textContent.endsWith('step 57')")


def test_a_prompt_on_which_the_grader_failed_is_found(browse, tmp_path):
    statuses = ["correct", "wrong", "no_box", *NO_VERDICT, "unparseable"]
    groups = [recorded_group(10, 9) | dict(place=place) for place in range(len(statuses))]
    for group, status in zip(groups, statuses):
        group["pool"][0] |= dict(status=status)
    run = dict(name="own", config=recorded_config(), metrics=[], evals=[], groups=groups)
    page = browse(page_of(tmp_path, dict(left_out="", runs=[run])), "#/run/0/step/10?only=trouble")
    assert page.inner_text("[data-only=trouble]") == "no verdict 5"
    found = page.evaluate("[...document.querySelectorAll('.row')].map(e => e.dataset.place)")
    assert sorted(found) == [str(place) for place in range(3, 8)]


def test_what_was_left_out_is_said_where_it_is_missed(browse, tmp_path):
    group = recorded_group(10, 9)
    for s in group["pool"]:
        for name in (*explore.OF_TOKENS, *explore.OF_TEXTS):
            s.pop(name, None)
    run = dict(name="bare", config=recorded_config(), metrics=[], evals=[], groups=[group])
    page = browse(page_of(tmp_path, dict(left_out="7 prompts did not fit.", runs=[run])))
    assert page.inner_text("#left-out") == "7 prompts did not fit."
    for index, words in ((5, "its tokens are not in this page"), (3, "Its gradient is 0.")):
        page.evaluate(f"location.hash = '#/run/0/step/10/prompt/9/sample/{index}'")
        page.wait_for_selector("#untrained")
        wait(
            page, "words => document.querySelector('#untrained').textContent.includes(words)", words
        )
        assert "Its text is not in this page." in page.inner_text("main")


def test_a_run_without_recorded_prompts_has_its_curves(browse, tmp_path):
    folder = run_folder(tmp_path)
    (folder / "groups.jsonl").unlink()
    page = browse(page_file(tmp_path), "#/curves")
    assert page.locator(".panel").count() >= 8
    page.evaluate("location.hash = '#/run/0/step/10'")
    wait(
        page, "document.querySelector('main').textContent.includes('This run recorded no prompts')"
    )


def test_a_curve_shows_no_number_of_another_step(browse, tmp_path):
    def run(name, steps, reward):
        of_step = dict(reward_first_round=reward, samples=430)
        metrics = [dict(step=s, **of_step) for s in range(1, steps + 1)]
        evals = [dict(step=s, avg=reward + s / 100) for s in range(0, steps + 1, 6)]
        return dict(name=name, config=recorded_config(), metrics=metrics, evals=evals, groups=[])

    runs = [run("short", 6, 0.25), run("long", 12, 0.5)]
    page = browse(page_of(tmp_path, dict(left_out="", runs=runs)), "#/curves")
    reward, held_out, samples = (page.locator(".panel").nth(i) for i in range(3))
    assert all(number in reward.locator("p").inner_text() for number in ("0.25", "0.5"))
    marks = samples.locator("svg[role=img] text").all_text_contents()
    assert marks[:3] == ["0", "200", "400"]  # and not 215, rounded
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    words = [" ".join(panel.locator("p").inner_text().split()) for panel in (reward, held_out)]
    assert words[0] == "step 11 first round (fair) 0.5"
    assert words[1] == "step 11 avg@k 0.31 (step 6) 0.56 (step 6)"


def test_the_bare_template_says_what_fills_it(chromium):
    page = chromium.new_page()
    page.goto(explore.TEMPLATE.as_uri())
    assert "python explore.py runs/NAME fills it with a run" in page.inner_text("main")
    page.close()


def test_numbers_of_a_broken_update_are_shown_as_missing(browse, tmp_path):
    group = recorded_group(10, 9)
    group["pool"][5]["theta"] = [None] * len(group["pool"][5]["theta"])
    run = dict(name="broken", config=recorded_config(), metrics=[], evals=[], groups=[group])
    page = browse(
        page_of(tmp_path, dict(left_out="", runs=[run])),
        "#/run/0/step/10/prompt/9/sample/5/token/3",
    )
    assert page.inner_text("#why").startswith("Not a number")


# ---------------------------------------------- size and speed
def seconds_of_cpu():
    """CPU time of this process's children and theirs: the same on a busy machine, nearly."""
    seen = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        seen[int(entry.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    ours, grown = set(), {os.getpid()}
    while grown:
        ours |= grown
        grown = {pid for pid, (parent, _) in seen.items() if parent in ours} - ours
    return sum(seen[pid][1] for pid in ours - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def large_run():
    """200 steps of 32 prompts, 30 samples each, 4 of them trained; the recorded ones, repeated."""
    pool = [s for g in recorded_groups() for s in g["pool"]]
    trained, plain = ([s for s in pool if ("theta" in s) == has] for has in (True, False))
    base = []
    for place in range(32):
        draws = [plain[(30 * place + i) % len(plain)] | dict(round=i // 8) for i in range(26)]
        draws += [trained[(4 * place + i) % len(trained)] | dict(round=3) for i in range(4)]
        base.append(
            recorded_groups()[place % 8] | dict(place=place, id=f"problem {place}", pool=draws)
        )
    groups = [group | dict(step=step) for step in range(1, 201) for group in base]
    metrics = [
        dict(step=step, samples=960, prompts=32, reward_first_round=0.5) for step in range(1, 201)
    ]
    return dict(name="large", config=recorded_config(), metrics=metrics, evals=[], groups=groups)


def spent(started):
    """Seconds since `started`, by the clock or of CPU, the lesser: the machine may be busy."""
    return min(now - then for now, then in zip((time.monotonic(), seconds_of_cpu()), started))


def test_a_large_run_opens_in_three_seconds_and_scrolls_smoothly(browse, tmp_path):
    small = dict(left_out="", runs=[dict(large_run(), groups=recorded_groups())])
    page = browse(page_of(tmp_path, small), "#/run/0/all")  # the browser is warm
    file = page_of(tmp_path, dict(left_out="", runs=[large_run()]))
    assert file.stat().st_size < 20e6
    started = time.monotonic(), seconds_of_cpu()
    page.reload()
    page.wait_for_selector("body[data-ready]")
    settle(page)
    assert spent(started) < 3
    assert page.evaluate("DATA.runs[0].groups.length") == 6400
    started = time.monotonic(), seconds_of_cpu()
    for down in range(20):
        page.evaluate(f"scrollTo(0, {down} / 19 * document.documentElement.scrollHeight)")
        settle(page)
        assert 5 < page.locator(".row").count() < 60  # however long the list is
    assert spent(started) / 40 < 0.05  # of one frame; 40 were drawn
    assert "step 200" in page.locator(".row").last.inner_text()
