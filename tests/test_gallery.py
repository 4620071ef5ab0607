"""The gallery is what its build.py would write today, and what its README says of it."""
import json
import re
import runpy
import shutil

import pytest

from conftest import ROOT
from parts.config import parse

GALLERY = ROOT / "docs" / "gallery"
BUILD = runpy.run_path(str(GALLERY / "build.py"))


def test_everything_is_as_it_would_be_written_and_every_link_leads_to_something_recorded():
    BUILD["check"]()


def test_what_does_not_fit_is_named(tmp_path, monkeypatch):
    copy = shutil.copytree(GALLERY, tmp_path / "gallery")
    for file, old, new in (("mask.html", "<title>", "<title >"),
                           ("README.md", "mask.html#/run/0/step/", "mask.html#/run/0/step/9"),
                           ("README.md", ".png)](real", ".jpg)](real")):
        (copy / file).write_text((copy / file).read_text().replace(old, new))
    monkeypatch.setitem(BUILD["check"].__globals__, "HERE", copy)
    with pytest.raises(SystemExit) as said:
        BUILD["check"]()
    for words in ("mask.html is of another template", "to nothing in mask.html", "other pictures"):
        assert words in str(said.value)


def test_the_runs_are_those_of_the_commands_and_name_no_place_on_the_machine_that_made_them():
    readme = (GALLERY / "README.md").read_text()
    for page, (name, flags) in BUILD["RUNS"].items():
        (run,) = BUILD["data_in"]((GALLERY / f"{page}.html").read_text())["runs"]
        said = json.dumps([run["name"], run["config"], run["groups"]])
        assert run["name"] == name and not re.search(r"/(work|tmp|home|root|usr|mnt)\b", said)
        if flags:
            config = vars(parse(["--name", name, "--steps", "20", *flags.split()]))
            asked = [flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", flags)]
            assert f"`python minirl.py {flags} --steps 20`" in readme
            assert [config[key] for key in asked] == [run["config"][key] for key in asked]
