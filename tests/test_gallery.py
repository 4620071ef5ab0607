"""The gallery's pages are of today's template, small, about what its README says, and no secrets.

After a change of parts/explore.html, `python docs/gallery/build.py` makes them anew.
"""
import base64
import gzip
import json
import re
import runpy

import pytest

import explore
from conftest import ROOT
from parts.config import Config, parse_flags

GALLERY = ROOT / "docs" / "gallery"
README = (GALLERY / "README.md").read_text(encoding="utf-8")
PAGES = sorted(GALLERY.glob("*.html"))
BUILD = "python docs/gallery/build.py"
LINKS = re.findall(r"\]\((\w+\.html)#/run/0/([^)]*)\)", README)


def data_of(page) -> dict:
    packed = re.search('id="data">([^<]*)<', page.read_text(encoding="utf-8"))[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_todays_template_around_data(page):
    before, after = explore.TEMPLATE.read_text(encoding="utf-8").split(explore.PLACE)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(before) and text.endswith(after), BUILD
    assert page.stat().st_size < 3_000_000 and data_of(page)["left_out"] == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_what_todays_code_makes_of_its_data(page):
    """Under the run's own rule each recorded prompt has the fate that it had."""
    data = data_of(page)
    assert json.loads(json.dumps(explore.with_what_follows(data_of(page)))) == data, BUILD
    (run,) = data["runs"]
    for group in run["groups"]:
        fate = group["what_if"][run["config"]["sampler"]]
        assert (fate["outcome"], fate["draws"]) == (group["outcome"], len(group["pool"]))
        assert fate["kept"] == [i for i, s in enumerate(group["pool"]) if s["kept"]]
        kept = [group["pool"][i]["coefficient"] for i in fate["kept"]]
        assert fate["coefficients"] == pytest.approx(kept, abs=1e-9)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_no_place_on_the_machine_that_made_it(page):
    said = json.dumps([[run["name"], run["config"], run["groups"]] for run in
                       data_of(page)["runs"]])
    assert not re.search(r"/(work|tmp|home|root|usr|mnt)\b", said)


def test_every_link_leads_to_something_recorded():
    assert {page for page, _ in LINKS} == {page.name for page in PAGES} and len(PAGES) == 3
    for page, address in LINKS:
        (run,) = data_of(GALLERY / page)["runs"]
        place = dict(zip(*[iter(address.split("?")[0].split("/"))] * 2))
        found = [g for g in run["groups"] if g["step"] == int(place["step"])]
        if "prompt" in place:
            (group,) = [g for g in found if g["place"] == int(place["prompt"])]
            sample = group["pool"][int(place.get("sample", 0))]
            assert int(place.get("token", -1)) < len(sample.get("tokens", []))
        assert found


def test_each_run_does_what_it_is_shown_for():
    def samples(page):
        return [s for g in data_of(GALLERY / page)["runs"][0]["groups"] for s in g["pool"]]

    assert sum("0" in s.get("mask", "") for s in samples("mask.html")) > 100
    agrees = [share for s in samples("experts.html") for share in s.get("agrees", [])]
    assert any(share < 1 for share in agrees)
    real = data_of(GALLERY / "real.html")["runs"][0]
    assert real["config"]["data"] == "builtin-words"  # problems of the project's own
    assert real["evals"][-1]["ci_low"] > real["evals"][0]["ci_high"]  # it has learnt


def test_the_commands_of_the_readme_are_those_that_train():
    runs = runpy.run_path(str(GALLERY / "build.py"))["RUNS"]
    assert {f"{page}.html" for page in runs} == {page.name for page in PAGES}
    for page, (name, flags) in runs.items():
        (run,) = data_of(GALLERY / f"{page}.html")["runs"]
        assert run["name"] == name
        if flags:
            config = vars(parse_flags(Config, ["--steps", "20", *flags.split()], "", ""))
            asked = ("model", "mini_batches", "rollout_dtype", "kv_cache_dtype", "steps")
            assert f"`python minirl.py {flags} --steps 20`" in README
            assert [config[key] for key in asked] == [run["config"][key] for key in asked]


def test_the_pictures_are_small_and_shown():
    pictures = {path.name for path in GALLERY.glob("*.png")}
    assert pictures == set(re.findall(r"!\[[^]]+\]\((\w+\.png)\)", README)) and len(pictures) >= 6
    assert all((GALLERY / name).stat().st_size < 200_000 for name in pictures)
