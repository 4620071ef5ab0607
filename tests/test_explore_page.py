"""The page of explore.py in a real browser shows what the run recorded and the code computes."""
import random
import re
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import explore
import minirl
from helpers import HANG, ROOT
from explorer import what_if
from parts.config import OBJECTIVES
from test_explore import HOSTILE, make, recorded_run

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chromium():
    reason = "playwright is not installed: make extras"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * HANG)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The page of `four`, as the command makes it."""
    place = make(tmp_path_factory.mktemp("runs") / "four")
    explore.main(explore.PageConfig(str(place)))
    return place / "explore.html"


@pytest.fixture
def browse(chromium, recorded, tmp_path):
    """browse(address): an open page of the recorded run, of `data`, or of a `file`.
    At the end: no error on the console, no request."""
    wrong, contexts = [], []

    def open_page(address="", data=None, file=None):
        file = file or (page_of(tmp_path, data) if data else recorded)
        contexts.append(chromium.new_context(viewport=dict(width=1280, height=720)))
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
    file.write_text(explore.page_of(explore.data_of(data["runs"], {}) | data))
    return file


def recorded_group(place=9, name="four"):
    """Of step 10."""
    return next(g for g in recorded_run(name)["groups"] if (g["step"], g["place"]) == (10, place))


def run_of(groups=(), name="mine", metrics=(), evals=(), **config):
    return recorded_run(**config) | dict(
        name=name, metrics=list(metrics), evals=list(evals), groups=list(groups))


PROMPT = "#/run/0/step/10/prompt/9"  # of which most tests look at answer 6, sample/5


def settle(page):
    """Until what was asked for is drawn: changes are shown in the next frame."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def go(page, view):
    """To another address, until it is drawn."""
    page.evaluate("""view => new Promise(done => {
        if (location.hash === view) done();
        addEventListener("hashchange", () => requestAnimationFrame(done), { once: true });
        location.hash = view;
    })""", view)


@pytest.mark.core
def test_from_the_curves_to_the_formula_of_a_token(browse):
    """By the mouse alone. A click on another rule shows what it would have kept."""
    page = browse()

    def on(view, found, **where):
        found.click(**where)
        page.wait_for_selector(f"main[data-view={view}]")

    curve = page.locator(".panel svg[role=img]").first
    box, across = curve.bounding_box(), (40 + 10 / 12 * (560 - 48)) / 560  # to step 10
    on("prompts", curve, position=dict(x=box["width"] * across, y=box["height"] / 2))
    assert page.url.endswith("#/run/0/step/10")
    assert page.locator(".row").first.get_attribute("data-place") == "0"  # the first of the batch
    on("prompt", page.locator(".row", has_text="7+2+3=?"))
    group = recorded_group()
    said = page.locator(".baseline").get_attribute("aria-label")
    assert said == "pool mean 0.813, kept mean 0.5"  # 13 of 16, and 2 of 4
    kinds = [bar.get_attribute("class") for bar in page.locator(".draw .lane i").all()]
    assert [("right" in kind, "kept" in kind) for kind in kinds] == [
        (s["reward"] > 0.7, s["kept"]) for s in group["pool"]]

    what_if.add_to(run_of([group]), {})
    fate = group["what_if"]["ada-pos"]
    page.click("tr[data-rule=ada-pos] button")
    settle(page)
    assert page.locator("tr[data-rule=ada-pos] td").nth(1).inner_text() == str(fate["draws"])
    would = page.evaluate("[...document.querySelectorAll('.would')].map(e => +e.textContent - 1)")
    assert would == fate["kept"]

    on("sample", page.locator(".draw[data-sample='5']"))
    sample = group["pool"][5]
    texts = page.locator(".tokens .token").all_inner_texts()
    assert "".join(texts).replace("↵", "\n") == "".join(sample["tokens"])
    on("sample", page.locator(".token[data-t='10']"))
    why = page.inner_text("#why")
    assert sample["mask"][10] == "0" and why.startswith("Gradient 0 by the mask.")
    on("sample", page.locator(".token[data-t='2']"))  # nothing lies above it
    assert page.inner_text("#why").startswith("Gradient −0.")


VARIANTS = [
    dict(), dict(weight_cap=1.0), dict(weight_cap=0.0), dict(clip=False),
    dict(importance="staleness"), dict(importance="none"),
    *(dict(objective=name, eps_low=0.05, eps_high=0.05) for name in OBJECTIVES),
    *(dict(objective=name, clip=False) for name in OBJECTIVES)]
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
    """(terms, the gradient's coefficients) of a sample's tokens by minirl.objective."""
    columns = s["theta"], s.get("old", s["theta"]), s["mu"]
    theta, old, mu = (torch.tensor(column, dtype=torch.float64) for column in columns)
    theta.requires_grad_()
    term, _, _ = minirl.objective(theta, old, mu, torch.full_like(mu, s["coefficient"]),
                                  SimpleNamespace(**config))
    (push,) = torch.autograd.grad(term.sum(), theta)
    return term.tolist(), push.tolist()


def random_tokens(coefficient, count=200):
    """Of a sample whose tokens have moved far, and which engine and trainer see differently."""
    rng = random.Random(coefficient)
    olds = [-rng.expovariate(1.0) for _ in range(count)]
    moved = {name: [min(old + rng.gauss(0, spread), 0.0) for old in olds]
             for name, spread in (("theta", 0.3), ("mu", 0.5))}
    columns = dict(ids=[7], tokens=["x"], mask="1", weight=[1.0], entropy=[0.5])
    return moved | {name: column * count for name, column in columns.items()} | dict(
        old=olds, coefficient=coefficient)


def test_the_formula_of_the_token_under_the_mouse_is_the_objectives(browse):
    """Its value, and whether there is a gradient, for any numbers and settings."""
    group = recorded_group()
    samples = [random_tokens(0.7), random_tokens(-0.4)]
    group["pool"] = [group["pool"][5] | s for s in samples]
    page = browse(data=dict(runs=[run_of([group])]))
    for i, s in enumerate(samples):
        go(page, f"{PROMPT}/sample/{i}")
        for settings in VARIANTS:
            config = recorded_run(**settings)["config"]
            terms, pushes = by_the_objective(s, config)
            shown, why = zip(*page.evaluate(TERMS, config))
            assert shown == pytest.approx(terms, abs=1e-9), settings
            assert [words.startswith("Gradient 0") for words in why] == [p == 0 for p in pushes]


@pytest.mark.parametrize("weight, config, words", [
    (None, {}, None), (9.0, {}, "its weight is "),
    (None, dict(eps_low=0.9, eps_high=9.0), "its mask is 1 here and 0 in the log"),
    (None, dict(objective="own"), "does not know the objective own of mine")])
def test_a_banner_says_where_the_pages_terms_are_not_those_that_were_logged(
        browse, weight, config, words):
    """There is none where they agree, up to rounding."""
    group = recorded_group()
    sample = group["pool"][5]
    if weight:
        sample["weight"] = [weight] * len(sample["tokens"])
    page = browse("#/run/0/step/10", data=dict(runs=[run_of([group], **config)]))
    banner = page.locator("#differences")
    assert banner.is_visible() == bool(words) and (words or "") in banner.inner_text()


def test_what_a_model_wrote_is_only_text(browse, tmp_path):
    text = " ".join(hostile[:1000] for hostile in HOSTILE)
    group = recorded_group() | dict.fromkeys(("prompt", "gold", "id", "outcome"), text)
    for s in group["pool"]:
        s |= dict.fromkeys(("text", "reason", "status", "answer", "finish_reason"), text)
        if "tokens" in s:
            s["tokens"] = [text] + s["tokens"][1:]
    run = run_of([group, group | dict(step=11)], name=text, model=text,
                 metrics=[dict(step=10, samples=16, prompts=1)])
    page = browse(data=dict(notes=[text], runs=[run, run | dict(groups=[group])]))
    written = (tmp_path / "page.html").read_text()
    assert not any(hostile in written for hostile in HOSTILE if "<" in hostile)
    for view in ("#/curves", "#/run/0/all", PROMPT, f"{PROMPT}/sample/5", f"{PROMPT}/sample/1"):
        go(page, view)
        found = page.evaluate("""[window.hacked, document.scripts.length,
            document.querySelectorAll("img, main main").length,
            document.documentElement.scrollWidth <= innerWidth]""")
        assert found == [None, 1, 0, True], view
        words = page.evaluate("document.querySelector('main').textContent")
        assert all(hostile in words for hostile in HOSTILE if hostile.startswith("<")), view
        assert "\u202e" not in words and "U+202E" in words


def test_two_runs_stand_side_by_side(browse):
    evals = [dict(step=step, data=data, questions=8, avg=0.5, ci_low=0.1, ci_high=0.9)
             for step in (0, 6) for data in ("easy", "hard")]
    runs = [run_of(recorded_run(name)["groups"], name, evals=evals) for name in ("four", "one")]
    page = browse(PROMPT, data=dict(runs=runs))
    draws = [len(recorded_group(name=name)["pool"]) for name in ("four", "one")]
    assert page.locator(".draw").count() == sum(draws)
    go(page, "#/curves")
    chart = page.locator("svg[aria-label='Accuracy on held-out problems']")
    assert chart.locator("path.line").count() == 4  # each run on each set


def test_what_a_failed_update_or_grader_leaves_is_said_where_it_matters(browse):
    """An answer without a verdict is neither right nor wrong."""
    broken, unjudged = recorded_group(), recorded_group() | dict(step=11, outcome="too few wrong")
    broken["pool"][5]["theta"] = [None] * 16
    unjudged["pool"][3] |= dict(reward=None, status="raised")
    page = browse(f"{PROMPT}/sample/5/token/3", data=dict(runs=[run_of([broken, unjudged])]))
    assert page.inner_text("#why").startswith("Not a number")
    go(page, "#/run/0/all?only=failed")
    settle(page)
    (row,) = page.locator(".row").all_inner_texts()
    assert all(x in row for x in ("step 11", "12 of 16 right", "pool 0.8 ", "no verdict on 1"))
    go(page, "#/run/0/step/11/prompt/9/sample/3")
    assert "the grader gave no verdict on it" in page.inner_text("#untrained")
    go(page, "#/run/0/step/11/prompt/9")
    assert ("16 answers: 12 right, 3 wrong, 1 without a verdict, unresolved: too few wrong answers"
            in page.inner_text("#timeline"))


def test_each_view_of_the_gallery_says_what_its_guide_quotes(browse):
    docs = ROOT / "docs"
    rows = [line for line in (docs / "runs.md").read_text().splitlines() if "[![" in line]
    assert len(rows) >= 2
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
