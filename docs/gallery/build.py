"""Make the pages and the pictures of this gallery.

    python docs/gallery/build.py            # today's parts/explore.html around each page's data
    python docs/gallery/build.py --train    # train the two small runs first: 10 minutes

A page is made anew where its run's folder exists (that of real.html is `make real`'s). Another
processor draws other answers: then links and quotes in README.md have to follow, and tests name
them. Pictures need playwright and chromium (make extras); without them the old ones stay.
"""
import base64
import gzip
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import explore

RUNS = {  # page: its run, and how to train it
    "mask": ("gallery-mask", "--mini-batches 4"),
    "experts": ("gallery-experts", "--model tiny-moe --mini-batches 4 --replay r3 "
                                   "--rollout-dtype bfloat16 --kv-cache-dtype fp8"),
    "real": ("real-0", None),
}
SHOWN = r"\[!\[([^]]*)\]\((\w+\.png)\)\]\((\w+\.html)(#[^)]+)\)"  # a picture that links to its view


def train(name: str, flags: str) -> None:
    command = [sys.executable, "minirl.py", "--name", name, "--steps", "20", "--eval-every", "5",
               "--log-groups", "all", "--resume", *flags.split()]
    ended = subprocess.run(command, cwd=ROOT).returncode
    if ended:
        raise SystemExit(ended)  # it has said why


def refill(page: Path) -> None:
    """Today's template around the data that the page has."""
    packed = re.search('id="data">([^<]*)<', page.read_text(encoding="utf-8"))[1]
    data = json.loads(gzip.decompress(base64.b64decode(packed)))
    page.write_text(explore.page_of(explore.with_what_follows(data)), encoding="utf-8")


def pictures() -> None:
    """A screenshot of each view that README.md shows; of a curve whose title it names, its panel.
    """
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = shutil.which("chromium")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for words, picture, page, address in re.findall(SHOWN, (HERE / "README.md").read_text()):
            view = browser.new_page(viewport=dict(width=860, height=720))
            view.goto((HERE / page).as_uri() + address)
            view.wait_for_selector("body[data-ready]")
            panel = view.locator(".panel", has_text=words)
            shot = panel.screenshot() if panel.count() else view.screenshot()
            image = Image.open(io.BytesIO(shot)).convert("RGB")
            image.quantize(256).save(HERE / picture, optimize=True)
        browser.close()


def main(flags: list[str]) -> None:
    for page, (name, how) in RUNS.items():
        if "--train" in flags and how:
            train(name, how)
        folder, file = ROOT / "runs" / name, HERE / f"{page}.html"
        if folder.exists():
            explore.main(explore.PageConfig(run=str(folder)))
            shutil.copy(folder / "explore.html", file)
        else:
            refill(file)
    try:
        pictures()
    except ImportError as error:
        print(f"The pictures stay as they are: {error}.")


if __name__ == "__main__":
    main(sys.argv[1:])
