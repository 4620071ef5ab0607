"""Make the pages of this gallery, and the pictures of them that docs/runs.md shows.

    python docs/gallery/build.py            # today's explorer/page.html around each page's data
    python docs/gallery/build.py --train    # train the two small runs first: 10 minutes
    python docs/gallery/build.py --check    # write nothing: is it all as it would be written?

A page is made anew where its run's folder exists (that of real.html is `make real`'s, and that of
qwen.html is a run of bench/qwen_plan.md, of which one prompt is stored). Another
processor draws other answers: then links and quotes in runs.md have to follow, and --check
names them. Pictures need playwright and chromium (make extras); without them the old ones stay.
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
    "qwen": ("gallery-qwen", None),  # one prompt of a run with a 0.5 B model
}
DATA = 'id="data">([^<]*)<'
GUIDE = "runs.md"  # beside this folder; its pictures link to the views that they show
SHOWN = r"\[!\[([^]]*)\]\(gallery/(\w+\.png)\)\]\(gallery/(\w+\.html)(#[^)]+)\)"


def train(name: str, flags: str) -> None:
    command = [sys.executable, "minirl.py", "--name", name, "--steps", "20", "--eval-every", "5",
               "--log-groups", "all", "--resume", *flags.split()]
    ended = subprocess.run(command, cwd=ROOT).returncode
    if ended:
        raise SystemExit(ended)  # it has said why


def data_in(page: str) -> dict:
    packed = re.search(DATA, page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def refilled(page: str) -> str:
    """Today's template around the runs that the page has, and what today's code makes of them."""
    return explore.page_of(explore.data_of(data_in(page)["runs"], {}))


def check() -> None:
    """Raises SystemExit, which names what `build.py` would write otherwise, or what leads nowhere.
    """
    guide = (HERE.parent / GUIDE).read_text(encoding="utf-8")
    pages = {name: (HERE / f"{name}.html").read_text(encoding="utf-8") for name in RUNS}
    wrong = [f"{name}.html is of another template or code: run `python docs/gallery/build.py`"
             for name, page in pages.items() if not same(page, refilled(page))]
    for name, address in re.findall(r"\]\(gallery/(\w+)\.html#/run/0/([^)]*)\)", guide):
        if not is_recorded(data_in(pages[name])["runs"][0]["groups"], address):
            wrong.append(f"{GUIDE} links to nothing in {name}.html: {address}")
    shown = {picture for _, picture, _, _ in re.findall(SHOWN, guide)}
    if shown != {picture.name for picture in HERE.glob("*.png")}:
        wrong.append(f"{GUIDE} shows other pictures than there are")
    if wrong:
        raise SystemExit("\n".join(wrong))


def same(page: str, other: str) -> bool:
    """But for how the data are packed, which depends on the machine's zlib."""
    return re.sub(DATA, "", page) == re.sub(DATA, "", other) and data_in(page) == data_in(other)


def is_recorded(groups: list[dict], address: str) -> bool:
    """Whether step/S, step/S/prompt/P/sample/I and so on leads to something."""
    place = dict(zip(*[iter(address.split("?")[0].split("/"))] * 2))
    found = [group for group in groups if group["step"] == int(place["step"])
             and int(place.get("prompt", group["place"])) == group["place"]]
    number, token = int(place.get("sample", 0)), int(place.get("token", -1))
    return any(number < len(group["pool"])
               and token < len(group["pool"][number].get("tokens", [])) for group in found)


def pictures() -> None:
    """A screenshot of each view that GUIDE shows; of a curve whose title it names, its panel."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = shutil.which("chromium")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for words, picture, page, address in re.findall(SHOWN, (HERE.parent / GUIDE).read_text()):
            view = browser.new_page(viewport=dict(width=860, height=720))
            view.goto((HERE / page).as_uri() + address)
            view.wait_for_selector("body[data-ready]")
            panel = view.locator(".panel", has_text=words)
            shot = panel.screenshot() if panel.count() else view.screenshot()
            image = Image.open(io.BytesIO(shot)).convert("RGB")
            image.quantize(256).save(HERE / picture, optimize=True)
        browser.close()


def main(flags: list[str]) -> None:
    if "--check" in flags:
        return check()
    for page, (name, how) in RUNS.items():
        if "--train" in flags and how:
            train(name, how)
        folder, file = ROOT / "runs" / name, HERE / f"{page}.html"
        if folder.exists():
            explore.main(explore.PageConfig(run=str(folder)))
            shutil.copy(folder / "explore.html", file)
        else:
            file.write_text(refilled(file.read_text(encoding="utf-8")), encoding="utf-8")
    try:
        pictures()
    except ImportError as error:
        print(f"The pictures stay as they are: {error}.")


if __name__ == "__main__":
    main(sys.argv[1:])
