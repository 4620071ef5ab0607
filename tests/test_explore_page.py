"""The page of explore.py in a real browser shows what the run recorded and the code computes."""
import json
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
from explorer import panels
from parts.config import OBJECTIVES
from test_explore import HOSTILE, RECORDED, recorded_run

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
SMALL = RECORDED / "small"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make extras")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * HANG)
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium, tmp_path):
    """browse(address, data or a file): an open page. At the end: no error on the console, no
    request."""
    wrong, contexts = [], []

    def open_page(address="", data=None, file=None):
        file = file or page_of(tmp_path, data)
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


def recorded_group():
    return next(g for g in recorded_run()["groups"] if (g["step"], g["place"]) == (10, 9))


def run_of(groups, name="mine", metrics=(), **config):
    return recorded_run(**config) | dict(name=name, metrics=metrics, evals=[], groups=groups)


def small_run(number, changes):
    """The run in explore_run/small. The logs of a second one begin a row later."""
    run = panels.read_run(SMALL) | dict(name=f"run {number}")
    run["config"] |= changes
    run["groups"] = explore.read_groups(SMALL / "groups.jsonl", None, 0) * changes.get("copies", 1)
    return run | {log: run[log][number:] for log in ("metrics", "evals", "groups")}


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
        const gradient = read("why").textContent.split(" ")[1].replaceAll("−", "-");
        return [Number(read("term").dataset.value), Number(gradient)];
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
    """Its value and its gradient, for any numbers and settings."""
    group = recorded_group()
    samples = [random_tokens(0.7), random_tokens(-0.4)]
    group["pool"] = [group["pool"][5] | s for s in samples]
    page = browse(data=dict(runs=[run_of([group])]))
    for i, s in enumerate(samples):
        go(page, f"{PROMPT}/sample/{i}")
        for settings in VARIANTS:
            config = recorded_run(**settings)["config"]
            terms, pushes = by_the_objective(s, config)
            shown, gradients = zip(*page.evaluate(TERMS, config))
            assert shown == pytest.approx(terms, abs=1e-9), settings
            assert gradients == pytest.approx(pushes, rel=1e-3), settings


@pytest.mark.parametrize("weight, config, words", [
    (None, {}, None), (1.01, {}, "token 1 of answer 6 to prompt 10 of step 10: its weight is "),
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
    group = recorded_group() | dict.fromkeys(
        ("problem", "prompt", "gold", "id", "outcome"), text)
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


SAID = RECORDED / "said.txt"
LINES = """part => [...document.querySelectorAll(`:is(${part}), :is(${part}) *`)].flatMap(node => {
    const own = [...node.childNodes].map(child => child.nodeType === 3 ? child.data : "").join("");
    const kinds = ["right", "wrong", "failed", "kept", "unseen", "would", "chosen", "stopped",
        "run0", "run1", "series1", "raw"];
    const traits = ["href", "title", "aria-label", "aria-pressed", "disabled", "hidden", "style",
        "d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "min", "max", "checked", "selected"];
    const line = [...kinds.filter(kind => node.classList.contains(kind)),
        ...traits.filter(name => node.hasAttribute(name)).map(
            name => node.getAttribute(name) || name), own].join(" ").trim();
    return line ? [line.replaceAll("\\n", "↵")] : [];
})"""


@pytest.mark.core
def test_each_view_says_what_follows_from_the_log(browse, tmp_path):
    """Each paragraph of said.txt begins with an address, a part of the page, keys, clicks (@) and
    hovers (^), and the changed settings of one run or two. The address and the title to which they
    lead and what this part of the page then says must follow from explore_run/small."""
    pages, found = {}, []
    for paragraph in SAID.read_text().split("\n\n"):
        head = paragraph.splitlines()[0]
        address, part, keys, changes = head.split(" ", 3)
        if changes not in pages:
            pages[changes] = browse(data=dict(runs=[
                small_run(i, changed) for i, changed in enumerate(json.loads(changes))]))
        page = pages[changes]
        go(page, address if "?" in address else address + "?")
        for key in keys.split(",") if keys != "-" else ():
            by_mouse = {"@": page.click, "^": page.hover}.get(key[0])
            by_mouse(key[1:]) if by_mouse else page.keyboard.press(key)
            settle(page)
        end = f"{page.url.split('#')[1]} {page.title()}"
        found.append("\n".join([head, end, *page.evaluate(LINES, part)]))
    new = tmp_path / "said.txt"
    new.write_text("\n\n".join(found) + "\n")
    assert new.read_text() == SAID.read_text(), f"if all of it is right, copy {new}"


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
