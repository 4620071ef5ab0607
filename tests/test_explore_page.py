"""The page of explore.py in a real browser shows what the run recorded and the code computes.

tests/explore_run holds prompts of two real runs of the tiny model (--log-groups all, one and four
mini-batches).
"""
import json
import random
import re
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import explore
import minirl
from conftest import ROOT
from helpers import HANG
from parts import what_if
from parts.grader import NO_VERDICT
from test_explore import HOSTILE

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
RECORDED = ROOT / "tests" / "explore_run"
DESKTOP = dict(viewport=dict(width=1280, height=720))
PHONE = dict(viewport=dict(width=390, height=844), has_touch=True, is_mobile=True)
pytestmark = pytest.mark.slow


# ---------------------------------------------- a browser and its pages
@pytest.fixture(scope="module")
def chromium():
    reason = "playwright is not installed: make extras"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(  # however long it takes on a busy machine
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * HANG)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """[the page of `four`, the page of `four` against `one`], as the command makes them."""
    pages = []
    for against in ("", "one"):
        place = tmp_path_factory.mktemp("runs")
        shutil.copytree(RECORDED, place, dirs_exist_ok=True)
        other = against and str(place / against)
        explore.main(explore.PageConfig(run=str(place / "four"), against=other))
        pages.append(place / "four" / "explore.html")
    return pages


@pytest.fixture
def browse(chromium, recorded, tmp_path):
    """browse(address): an open page of the recorded run, or both; of `data`; of a `file`.

    At the end: no error on the console, no request.
    """
    wrong, contexts = [], []

    def open_page(address="", runs=1, data=None, file=None, **settings):
        file = file or (page_of(tmp_path, data) if data else recorded[runs - 1])
        contexts.append(chromium.new_context(**DESKTOP | settings))
        page = contexts[-1].new_page()
        page.set_default_timeout(1000 * HANG)
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: wrong.append("a dialog") or dialog.dismiss())
        page.on("request", lambda request: request.url.split("#")[0] == file.as_uri()
                or wrong.append(f"request: {request.url[:100]}"))
        page.goto(file.as_uri() + address)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def page_of(folder, data):
    file = folder / "page.html"
    data = explore.with_what_follows(dict(left_out="") | data, None)
    file.write_text(explore.page_of(data))
    return file


def recorded_groups(name="four", step=None):
    rows = [json.loads(line) for line in (RECORDED / name / "groups.jsonl").open()]
    return [row for row in rows if step in (None, row["step"])]


def recorded_group(step, place, name="four"):
    return next(g for g in recorded_groups(name, step) if g["place"] == place)


def recorded_config(**changes):
    return json.loads((RECORDED / "four" / "config.json").read_text())["config"] | changes


def run_of(groups=(), name="mine", metrics=(), evals=(), **config):
    return dict(name=name, config=recorded_config(**config), metrics=list(metrics),
                evals=list(evals), groups=list(groups))


PROMPT = "#/run/0/step/10/prompt/9"  # of which most tests look at answer 6, sample/5


def settle(page):
    """Until what was asked for is drawn: changes are shown in the next frame."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def wait(page, condition):
    """Until a condition in JavaScript holds. (The page forbids the eval of wait_for_function.)"""
    page.evaluate(f"""new Promise((done, fail) => {{
        const look = () => ({condition}) ? done() : requestAnimationFrame(look);
        setTimeout(() => fail("never"), {1000 * HANG});
        look();
    }})""")


def go(page, view):
    """To another address, until it is drawn."""
    page.evaluate("""view => new Promise(done => {
        if (location.hash === view) done();
        addEventListener("hashchange", () => requestAnimationFrame(done), { once: true });
        location.hash = view;
    })""", view)


def address(page):
    return page.evaluate("location.hash")


# ---------------------------------------------- the way through the page
@pytest.mark.parametrize("screen, press, width", [
    pytest.param(DESKTOP, "click", 560, marks=pytest.mark.core), (PHONE, "tap", 360)])
def test_from_the_curves_to_the_formula_of_a_token(browse, screen, press, width):
    """By the mouse alone, or by a finger."""
    page = browse(**screen)

    def on(found, **where):
        getattr(found, press)(**where)

    curve = page.locator(".panel svg[role=img]").first
    box, across = curve.bounding_box(), (40 + 10 / 12 * (width - 48)) / width  # to step 10
    on(curve, position=dict(x=box["width"] * across, y=box["height"] / 2))
    page.wait_for_selector("main[data-view=prompts]")
    assert address(page) == "#/run/0/step/10" and page.title() == "step 10 · curves · four"
    on(page.locator(".row", has_text="7+2+3=?"))
    page.wait_for_selector("main[data-view=prompt]")
    group = recorded_group(10, 9)
    assert "It cost 16 draws and 250 tokens" in page.inner_text("#worth")
    assert page.inner_text(".exit") == "closed, resolved: it wanted 2 right and 2 wrong"
    said = page.locator(".baseline").get_attribute("aria-label")
    assert said == "pool mean 0.813, kept mean 0.5"  # 13 of 16, and 2 of 4
    kinds = [bar.get_attribute("class") for bar in page.locator(".draw .lane i").all()]
    assert [("right" in kind, "kept" in kind) for kind in kinds] == [
        (s["reward"] > 0.7, s["kept"]) for s in group["pool"]]

    on(page.locator(".draw[data-sample='5']"))
    page.wait_for_selector("main[data-view=sample]")
    sample = group["pool"][5]
    texts = page.locator(".tokens .token").all_inner_texts()
    assert "".join(texts).replace("↵", "\n") == "".join(sample["tokens"])
    on(page.locator(".token[data-t='10']"))
    why = page.inner_text("#why")
    assert sample["mask"][10] == "0" and why.startswith("Gradient 0: the mask stops it.")
    assert "Â wants to lower this token, and it is already unlikelier: 0.359 times" in why
    on(page.locator(".token[data-t='2']"))  # nothing lies above it
    assert page.inner_text("#why").startswith("Gradient −0.")
    in_sight = page.evaluate("""(() => {
        const box = document.getElementById("why").getBoundingClientRect();
        return box.top > 0 && box.bottom <= innerHeight })()""")
    assert in_sight, "the sentence on the token"
    on(page.locator(".crumbs a", has_text="curves"))
    page.wait_for_selector("main[data-view=curves]")


def places(page):
    settle(page)
    return [int(row.get_attribute("data-place")) for row in page.locator(".row").all()]


def test_filters_sorts_and_the_search_choose_what_they_say(browse):
    """The search is over all steps, from everywhere; Esc ends it."""
    groups = recorded_groups(step=10)
    page = browse("#/run/0/step/10")

    tests = dict(
        never=lambda r: not any(r), always=all, mixed=lambda r: 0 < sum(r) < len(r),
        silent=lambda r: len(set(r)) == 1)
    for only, test in tests.items():
        expected = {g["place"] for g in groups if test([s["reward"] for s in g["pool"]])}
        page.click(f"[data-only={only}]")
        assert set(places(page)) == expected, only
        assert page.inner_text(f"[data-only={only}]").endswith(f" {len(expected)}")
    page.click("[data-only=all]")
    worths = dict(draws=lambda g: len(g["pool"]),
                  stopped=lambda g: sum(s.get("mask", "").count("0") for s in g["pool"]))
    for sort, worth in worths.items():
        page.select_option("select[aria-label='sort by']", sort)
        of = {g["place"]: worth(g) for g in groups}
        assert [of[place] for place in places(page)] == sorted(of.values(), reverse=True), sort

    found = [g for g in recorded_groups() if any("\\boxed{0}" in s["text"] for s in g["pool"])]
    assert {g["step"] for g in found} > {10}
    for level in ("", "/prompt/9", "/prompt/9/sample/5"):
        go(page, f"#/run/0/step/10{level}?")
        page.keyboard.press("/")
        page.keyboard.type("\\boxed{0}")
        wait(page, "location.hash.startsWith('#/run/0/all?find=')")
        assert sorted(places(page)) == sorted(g["place"] for g in found)
        page.keyboard.press("Escape")
        assert len(places(page)) == len(recorded_groups())
        assert address(page) == "#/run/0/all" and page.input_value("#find") == ""


# ---------------------------------------------- Eq. 7 with a token's numbers
OBJECTIVES = [
    dict(), dict(weight_cap=1.0), dict(weight_cap=0.0), dict(clip=False),
    dict(importance="staleness"), dict(importance="none"),
    dict(mask="dppo", delta=0.05), dict(mask="icepop"),
    dict(objective="grpo", eps_low=0.05, eps_high=0.05), dict(objective="grpo", clip=False),
    dict(objective="cispo", eps_low=0.05, eps_high=0.05)]
TERMS = """config => {
    const run = DATA.runs[0], own = run.config, read = id => document.getElementById(id);
    run.config = config;
    const shown = [...document.querySelectorAll(".token[data-t]")].map(span => {
        span.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
        return [Number(read("term").dataset.value), read("why").textContent];
    });
    run.config = own;
    return shown;
}"""


def by_the_objective(s, config):
    """(terms, masks, the gradient's coefficients) of a sample's tokens by minirl.objective."""
    columns = s["theta"], s.get("old", s["theta"]), s["mu"]
    theta, old, mu = (torch.tensor(column, dtype=torch.float64) for column in columns)
    theta.requires_grad_()
    with mock.patch.object(minirl, "DELTA", config.get("delta", minirl.DELTA)):
        term, mask, _ = minirl.objective(theta, old, mu, torch.full_like(mu, s["coefficient"]),
                                         SimpleNamespace(**config))
    (push,) = torch.autograd.grad(term.sum(), theta)
    return term.tolist(), mask.tolist(), push.tolist()


def with_random_tokens(s, coefficient, count=200):
    """A sample whose tokens have moved far, and which engine and trainer see differently."""
    rng = random.Random(coefficient)
    s["old"] = [-rng.expovariate(1.0) for _ in range(count)]
    for name, spread in (("theta", 0.3), ("mu", 0.5)):
        s[name] = [min(old + rng.gauss(0, spread), 0.0) for old in s["old"]]
    s |= dict(coefficient=coefficient, tokens=["x"] * count)
    for name in ("ids", "entropy", "weight", "mask", "agrees"):
        s.pop(name, None)


def test_the_formula_of_the_token_under_the_mouse_is_the_objectives(browse):
    """Its value, and whether there is a gradient, for any numbers and settings."""
    group = recorded_group(10, 9)
    real = json.loads(json.dumps(group["pool"][5]))
    trained = [i for i, s in enumerate(group["pool"]) if "theta" in s and i != 5][:2]
    for i, coefficient in zip(trained, (0.7, -0.4)):
        with_random_tokens(group["pool"][i], coefficient)
    page = browse(data=dict(runs=[run_of([group])]))
    for i in trained:
        go(page, f"{PROMPT}/sample/{i}")
        for settings in OBJECTIVES:
            config = recorded_config(**settings)
            terms, _, pushes = by_the_objective(group["pool"][i], config)
            shown, why = zip(*page.evaluate(TERMS, config))
            assert shown == pytest.approx(terms, abs=1e-9), settings
            assert [words.startswith("Gradient 0") for words in why] == [p == 0 for p in pushes]
    go(page, f"{PROMPT}/sample/5/token/10")
    shown = page.inner_text("#numbers").replace("\n", " ")
    for name in ("mu", "old", "theta"):
        assert f"{real[name][10]:.4f}".replace("-", "−") in shown
    assert f"token id {real['ids'][10]}" in shown and "mask, recorded 0" in shown
    assert f"{real['entropy'][10]:.3g}" in shown


# ---------------------------------------------- sliders
def stopped(page):
    settle(page)
    return {int(t.get_attribute("data-t")) for t in page.locator(".tokens .token.stopped").all()}


def expected_stopped(sample, **settings):
    _, mask, _ = by_the_objective(sample, recorded_config(**settings))
    return {t for t, m in enumerate(mask) if m == 0}


def test_a_slider_stops_the_tokens_that_the_objective_would_stop(browse):
    """Also moved by keys; and on the page of a step it counts those of the whole step."""
    page, seen = browse(runs=2), set()
    for place in (16, 3):
        sample = recorded_group(10, place)["pool"][0]
        recorded = {t for t, m in enumerate(sample["mask"]) if m == "0"}
        go(page, f"#/run/0/step/10/prompt/{place}/sample/0")
        assert stopped(page) == recorded
        for eps in (0.01, 0.05, 0.6):
            for name in ("eps_low", "eps_high"):
                page.locator(f"input[type=range][name={name}]").fill(str(eps))
            assert stopped(page) == expected_stopped(sample, eps_low=eps, eps_high=eps), eps
            seen.add(len(stopped(page)))
        page.click("#recorded-mask")
        assert stopped(page) == recorded
        for kind in ("dppo", "icepop"):
            page.select_option("#masks select", kind)
            assert stopped(page) == expected_stopped(sample, mask=kind), kind
        page.click("#recorded-mask")
    assert len(seen) >= 2  # a slider that did nothing would not pass

    go(page, "#/run/0/step/10?eps_low=0.1&eps_high=0.1")
    trained = [s for g in recorded_groups(step=10) for s in g["pool"] if "theta" in s]

    def count():
        settle(page)
        return int(page.locator("#masks [data-stopped]").first.get_attribute("data-stopped"))

    page.focus("input[type=range][name=eps_low]")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    wanted = sum(len(expected_stopped(s, eps_low=0.05, eps_high=0.1)) for s in trained)
    assert count() == wanted > 5 and "eps_low=0.05" in address(page)
    go(page, "#/run/1/step/10?eps_low=0.01&eps_high=0.01")
    assert "is trained before anything has moved, so no ε stops any" in page.inner_text("#masks")
    assert count() == 0


# ---------------------------------------------- another sampler
def test_the_panel_tells_what_another_rule_would_have_kept(browse):
    group = recorded_group(10, 9)
    what_if.add_to(run_of([group]))
    fate, rewards = group["what_if"]["ada-pos"], [s["reward"] for s in group["pool"]]
    page = browse(PROMPT)
    page.click("tr[data-rule=ada-pos]")
    settle(page)
    right = sum(rewards[i] > 0.7 for i in fate["kept"])
    values = [f"{a:+.3g}".replace("-", "−")
              for a in sorted(set(fate["coefficients"]), reverse=True)]
    cells = page.locator("tr[data-rule=ada-pos] td").all_inner_texts()
    assert cells[1:] == [str(fate["draws"]), f"{right} ✓ {len(fate['kept']) - right} ✗",
                         ", ".join(values)]
    marked = page.evaluate("[...document.querySelectorAll('.would')].map(e => +e.textContent - 1)")
    assert marked == fate["kept"]


# ---------------------------------------------- what a model may write
def hostile_group(text, place):
    group = recorded_group(10, 9) | dict(place=place, prompt=text, gold=text, id=text, outcome=text)
    for s in group["pool"]:
        s |= dict(text=text, reason=text, status=text, answer=text, finish_reason=text)
        if "tokens" in s:
            s["tokens"] = [text] + s["tokens"][1:]
    return group


def test_what_a_model_wrote_is_only_text(browse, tmp_path):
    groups, again = ([hostile_group(text, place) | dict(step=step)
                      for place, text in enumerate(HOSTILE)] for step in (10, 11))
    everything = " ".join(text for text in HOSTILE if len(text) < 1000)
    run = run_of(groups + again, name=everything, metrics=[dict(step=10, samples=16, prompts=1)],
                 model=everything)
    file = page_of(tmp_path, dict(left_out=everything, runs=[run, run | dict(groups=groups)]))
    assert not any(text in file.read_text() for text in HOSTILE if "<" in text)
    page = browse(file=file)

    def seen(view):
        go(page, view)
        found = page.evaluate("""[window.hacked, document.scripts.length,
            document.querySelectorAll("img, main main").length,
            document.documentElement.scrollWidth <= innerWidth]""")
        assert found == [None, 1, 0, True], view
        return page.evaluate("document.querySelector('main').textContent")

    for place, text in enumerate(HOSTILE):
        prompt = f"#/run/0/step/10/prompt/{place}"
        for view in (prompt, f"{prompt}/sample/5", f"{prompt}/sample/1"):
            words = seen(view)
            assert text in words or not text.startswith("<")
    for words in (seen("#/curves"), seen("#/run/0/all")):
        assert all(text in words for text in HOSTILE if text.startswith("<"))
        assert "\u202e" not in words and "U+202E" in words


# ---------------------------------------------- keys, links
def test_the_keyboard_leads_everywhere(browse):
    page = browse("#/run/0/step/10")

    def press(*names):
        for name in names:
            page.keyboard.press(name)
            settle(page)
        return address(page)

    def focused():
        return page.evaluate("document.activeElement.getAttribute('href')")

    groups = [f"#/run/0/step/10/prompt/{g['place']}" for g in recorded_groups(step=10)]
    press("ArrowDown", "ArrowDown")
    assert focused() == groups[1] and press("Enter") == groups[1]
    assert press("ArrowRight", "ArrowLeft", "ArrowDown", "Enter") == f"{groups[1]}/sample/0"
    assert press("ArrowDown").endswith("/sample/1")
    assert press("Escape") == groups[1] and focused() == f"{groups[1]}/sample/1"
    assert press("Escape") == "#/run/0/step/10" and focused() == groups[1]
    assert press("ArrowRight") == "#/run/0/step/11" and press("Escape") == "#/curves"
    press("?")
    assert "search prompts and answers" in page.inner_text("dialog[open]")
    press("Escape")
    go(page, f"{PROMPT}/sample/5/token/3")
    assert press("ArrowRight").endswith("/token/4")
    assert page.inner_text("#formula h2").startswith("Eq. 7 for token 5,")
    stops = page.locator(".token[tabindex='0']")
    assert stops.get_attribute("data-t") == "4"  # Tab stops at one, and arrows lead to the others


def test_a_link_opens_the_view_it_was_copied_from_or_what_is_left_of_it(browse):
    page = browse()
    for where in ("#/curves?", "#/run/0/step/10?sort=draws&only=mixed&find=boxed",
                  "#/run/0/all?rule=ada-pos", f"{PROMPT}?rule=uniform",
                  f"{PROMPT}/sample/5/token/10?colour=entropy&eps_low=0.05"):
        go(page, where)
        page.reload()
        page.wait_for_selector("body[data-ready]")
        assert address(page) == where.removesuffix("?")
        words, title = page.inner_text("main"), page.title()
        go(page, "#/run/0/step/11")
        assert page.title() != title
        page.go_back()
        wait(page, "document.querySelector('h1').textContent !== 'Step 11'")
        settle(page)
        assert page.inner_text("main") == words and len(words) > 300 and page.title() == title
    for where, title in (("0/step/10/prompt/999", "Nothing is recorded here"),
                         ("7/step/5000", "Step 5000"),
                         ("0/step/10/prompt/9/sample/5/token/1.5", "Answer 6 of 16"),
                         ("0/all?only=toString&sort=valueOf", "All recorded steps")):
        go(page, f"#/run/{where}")
        assert page.inner_text("h1") == title


# ---------------------------------------------- looks: a phone, light and dark, contrast
LEVELS = ["#/curves", "#/run/0/step/10?rule=ada-pos&only=mixed", PROMPT,
          f"{PROMPT}/sample/5/token/10?colour=mask", "#/run/0/step/10/prompt/99"]
TOO_WIDE = """[...document.querySelectorAll("header, header *, main, main *")].filter(
    e => e.getBoundingClientRect().right > 391 && !e.closest("#visits")).map(e => e.outerHTML)"""


# Every text: [contrast with what is behind it, the text], by WCAG's formula.
CONTRASTS = """() => {
    const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
        .getContext("2d", { willReadFrequently: true });
    const paint = colours => {
        pen.clearRect(0, 0, 1, 1);
        for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = rgb => {
        const [r, g, b] = rgb.map(v => v / 255).map(
            v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim(), e = walker.currentNode.parentElement;
        if (!text || !e.checkVisibility() || e.closest("script, option, :disabled")) continue;
        const behind = [];
        for (let at = e; at; at = at.parentElement) {
            behind.unshift(getComputedStyle(at).backgroundColor);
        }
        const style = getComputedStyle(e), ink = e.closest("svg") ? style.fill : style.color;
        const [a, b] = [light(paint(behind)), light(paint([...behind, ink]))];
        found.push([Math.max(a, b) / Math.min(a, b), text]);
    }
    return found;
}"""


@pytest.mark.parametrize("system, screen", [("light", PHONE), ("dark", DESKTOP)])
def test_everything_can_be_read_and_on_a_phone_nothing_is_cut_off(browse, system, screen):
    page = browse(runs=2, color_scheme=system, **screen)
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (int(re.findall(r"\d+", paper)[0]) > 128) == (system == "light")
    for where in LEVELS:
        go(page, where)
        found = page.evaluate(CONTRASTS)
        assert len(found) > 5 and [one for one in found if one[0] < 4.5] == [], where
        if screen is PHONE:
            assert page.evaluate("document.documentElement.scrollWidth") == 390, where
            assert page.evaluate(TOO_WIDE) == [], where


# ---------------------------------------------- two runs
def test_two_runs_stand_side_by_side(browse):
    page = browse(PROMPT, runs=2)
    headings = [page.locator(".beside h2").nth(i).inner_text() for i in (0, 3)]
    assert [words[:6] for words in headings] == ["A: fou", "B: one"]
    draws = [len(recorded_group(10, 9, name)["pool"]) for name in ("four", "one")]
    assert page.locator(".draw").count() == sum(draws)
    page.click("#beside")
    page.click("#other-run")
    wait(page, "location.hash.startsWith('#/run/1/step/10/prompt/9')")
    settle(page)
    assert page.locator(".draw").count() == draws[1]
    go(page, "#/curves")
    assert page.locator(".panel path.line.run1").count()
    assert "four against one" in page.inner_text("h1")


def test_a_curve_is_in_its_picture_and_shows_no_number_of_another_step(browse):
    """Whatever the rewards are; each held-out set has a line."""
    def run(name, steps, reward):
        metrics = [dict(step=s, reward_first_round=reward) for s in range(1, steps + 1)]
        evals = [dict(step=s, data=data, avg=0.5, ci_low=0.1, ci_high=0.9)
                 for s in range(0, steps + 1, 6) for data in ("easy", "hard")]
        return run_of(name=name, metrics=metrics, evals=evals)

    page = browse("#/curves", data=dict(runs=[run("short", 6, -3.0), run("long", 12, 5.0)]))
    reward = page.locator(".panel", has=page.locator("h2", has_text="Reward"))
    said = " ".join(" ".join(reward.locator("p").all_inner_texts()).split())
    assert said == "first round (fair) −3 (step 6) 5"
    for line in ("run0", "run1"):
        path = reward.locator(f"path.line.{line}:not(.raw)").get_attribute("d")
        assert all(12 <= float(y) <= 130 for y in re.findall(r" (\d+\.\d+)", path))
    chart = page.locator("svg[aria-label='Accuracy on held-out problems']")
    assert chart.locator("path.line").count() == 4


# ---------------------------------------------- what a log may hold, and what may be missing
def group_at(step, place, **of_answer_6):
    """The prompt at another place, under a name of its own, its sixth answer changed."""
    group = recorded_group(10, 9) | dict(step=step, place=place, id=f"{step}/{place}")
    group["pool"][5] |= of_answer_6
    return group


STATUSES = ["correct", "wrong", "no_box", *NO_VERDICT, "unparseable"]
def test_whatever_a_log_holds_or_lacks_is_said_where_it_matters(browse):
    visits = [recorded_group(10, 9) | dict(step=step) for step in (10, 30, 57)]
    broken = visits[1]["pool"][5]
    broken["theta"] = [None] * len(broken["theta"])  # as an update leaves it that was not made
    trouble = [group_at(11, i, status=status) for i, status in enumerate(STATUSES)]
    ended = group_at(12, 0, finish_reason="length", answer=None)
    bare = group_at(13, 0)
    for s in bare["pool"]:
        for name in explore.OF_TOKENS:
            s.pop(name, None)
    run = run_of([*visits, *trouble, ended, bare])
    page = browse(PROMPT, data=dict(left_out="7 prompts did not fit.", runs=[run]))
    assert page.locator("#visits a").all_inner_texts() == ["step 10", "step 30", "step 57"]
    go(page, "#/run/0/step/30/prompt/9/sample/5/token/3")
    assert page.inner_text("#why").startswith("Not a number")

    go(page, "#/run/0/step/11?only=trouble")
    assert page.inner_text("[data-only=trouble]") == f"no verdict {len(NO_VERDICT) + 1}"
    assert sorted(places(page)) == list(range(3, len(STATUSES)))

    go(page, "#/run/0/step/12/prompt/0/sample/5")
    cut = "Cut off at max_tokens, 16 tokens: its last \\boxed{} is missing or open."
    assert page.inner_text("#cut").startswith(cut)

    for index, words in ((5, "its tokens are not in this page"), (3, "Its gradient is 0.")):
        go(page, f"#/run/0/step/13/prompt/0/sample/{index}")
        assert words in page.inner_text("#untrained")
    go(page, "#/curves")
    assert page.inner_text("#left-out") == "7 prompts did not fit."


def test_of_a_long_list_and_a_long_answer_a_part_is_made_at_once(browse):
    """However large a run is, what a page draws when it opens is not."""
    group = recorded_group(10, 9)
    sample = group["pool"][5]
    for name in explore.OF_TOKENS:
        if name in sample:
            sample[name] = (sample[name] * 375)[:6000]
    others = [dict(group, place=10 + i, id=str(i), pool=group["pool"][:1]) for i in range(900)]
    page = browse("#/run/0/all", data=dict(runs=[run_of([group, *others]), run_of()]))
    assert page.locator(".row").count() == 200
    page.click("text=… 701 more")
    assert page.locator(".row").count() == 400
    go(page, f"{PROMPT}/sample/5")
    assert page.locator(".token[data-t]").count() == 5000
    page.click("text=… 1,000 more")
    assert page.locator(".token[data-t]").count() == 6000
    go(page, "#/run/1/step/10")
    assert "This run recorded no prompts" in page.inner_text("main")


# ---------------------------------------------- the gallery
def test_each_view_of_the_gallery_says_what_its_guide_quotes(browse):
    docs = ROOT / "docs"
    rows = [line for line in (docs / "explore.md").read_text().splitlines() if "[![" in line]
    assert len(rows) >= 6
    pages = defaultdict(dict)
    for row in rows:
        file, view = re.search(r"\]\((gallery/\w+\.html)(#[^)]+)\)", row).groups()
        pages[file][view] = re.findall("“(.+?)”", row)
    for file, views in pages.items():
        page = browse(file=docs / file)
        for view, quotes in views.items():
            go(page, view)
            words = re.sub(r"[\s·]", "", page.inner_text("main"))  # a space of a token is a dot
            assert quotes and all(quote.replace(" ", "") in words for quote in quotes), view
