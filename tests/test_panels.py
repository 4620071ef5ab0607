"""Curves are complete at any stage of a run, seeds are grouped, and missing data are skipped."""
import os
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

import compare
from explorer import panels
from helpers import ROOT
from parts.files import append
from parts.grader import NO_VERDICT
from test_explore import make


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 10_000


def titles(*rows, evals=()) -> list[str]:
    run = dict(metrics=[dict(step=i, **row) for i, row in enumerate(rows, 1)], evals=[*evals])
    return [title for _, title, _, _ in panels.panels_of([run])]


@pytest.mark.parametrize("row, drawn", [
    (dict(weight_min=1.0, weight_max=1.0), False), (dict(weight_min=1.0, weight_max=1.1), True),
    (dict(weight_min=1.0, weight_max=1.0, clipped_positive=0.1), True)])
def test_what_was_not_logged_or_is_flat_has_no_panel(row, drawn):
    """A panel is flat if no token is masked and all weights are 1 except for rounding. (Without the
    importance weight they are exactly 1, and tokens are masked all the same.)"""
    assert ("Importance weights before the cap" in titles(row, {})) == drawn
    assert titles(dict(samples=8)) == ["Sampled answers"]
    evals = [dict(step=0)]
    assert titles(evals=evals) == ["Accuracy on held-out problems"]
    assert titles(dict(clipped_negative=0.1)) == ["Masked tokens"]


def test_a_run_without_evaluations_is_drawn_under_its_name(tmp_path, monkeypatch):
    folder = make(tmp_path / "mine", name="one")
    (folder / "eval.jsonl").unlink()
    monkeypatch.chdir(folder)
    run = panels.read_run(".")
    assert run["name"] == "mine"
    scales = {ax.get_title(): ax.get_yscale() for ax in panels.figure_of(run).axes}
    assert "Reward while training" in scales and "Accuracy on held-out problems" not in scales
    assert [title for title, scale in scales.items() if scale == "log"] == [
        "Engine compared with trainer"]


def test_no_backend_of_a_notebook_ends_a_training(tmp_path):
    """A notebook gives its children a backend that they may lack. Names are drawn as they are."""
    run = make(tmp_path / r"a$\frac$")
    code = "import sys, pathlib\nfrom explorer.panels import draw_run\n"
    inline = dict(MPLBACKEND="module://matplotlib_inline.backend_inline")
    ended = subprocess.run(
        [sys.executable, "-c", code + "draw_run(pathlib.Path(sys.argv[1]))", run],
        env=os.environ | inline, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended
    assert is_picture(run / "curves.png")


def test_a_picture_that_cannot_be_drawn_is_one_line(tmp_path, capsys, monkeypatch):
    """The old picture stays. A folder in its place stands for a disk that refuses to write."""
    run = make(tmp_path / "run")
    picture = run / "curves.png"
    picture.write_bytes(b"old")
    with monkeypatch.context() as broken:
        broken.setattr(panels, "smooth", lambda values: 1 / 0)
        panels.draw_run(run)
    said = "curves.png was not drawn: ZeroDivisionError: division by zero\n"
    assert capsys.readouterr().out == said
    assert picture.read_bytes() == b"old"
    picture.unlink()
    (picture / "full").mkdir(parents=True)
    panels.draw_run(run)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("curves.png was not drawn: ") and "directory" in line


@pytest.mark.parametrize("spoil, why", [
    (lambda config: config.write_text("{"), "config.json cannot be read"),  # as an editor saves it
    (lambda config: config.unlink(), "no folder of a run"),
    (lambda config: config.write_text('{"config": 1}'), "'int' object")])
def test_a_config_that_was_changed_while_a_run_is_going_on_costs_its_picture_only(
        tmp_path, capsys, spoil, why):
    run = make(tmp_path / "run")
    spoil(run / "config.json")
    panels.draw_run(run)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("curves.png was not drawn: ") and why in line


def test_every_panel_is_explained_under_its_title():
    explained = (ROOT / "docs" / "learning.md").read_text()
    assert [title for _, title, _, _ in panels.PANELS if f"| {title} |" not in explained] == []


@pytest.mark.parametrize("names, drawn", [
    (["a"], None), (["a", "$b"], ["a", r"\$b"]),
    ("abcdefghi", [*"abcdefghi"])])  # more than there are colours
def test_parts_of_the_reward_have_a_panel_if_there_are_several(names, drawn):
    rows = [dict(step=1, samples=4), *(dict({f"reward/{name}": 1.0}, step=2) for name in names)]
    run = dict(metrics=rows, evals=[])
    parts = [keys for kind, *_, keys in panels.panels_of([run]) if kind == "parts"]
    assert parts == [{f"reward/{name}": name for name in names}] * bool(drawn)
    for keys in parts:
        ax = Figure().subplots()
        panels.draw_lines(ax, rows, keys)
        assert ax.get_legend_handles_labels()[1] == drawn


@pytest.mark.parametrize("status", NO_VERDICT)
def test_whatever_made_the_grader_fail_is_in_the_curve(tmp_path, status):
    append(tmp_path / "log", dict(step=3, verdicts={status: 60, "no_box": 20, "wrong": 20}))
    assert panels.drawn_rows(tmp_path / "log") == [
        dict(step=3, share_no_box=0.2, share_no_verdict=0.6)]


def test_what_was_not_finite_is_passed_over(tmp_path):
    append(tmp_path / "log", dict(step=1, loss=float("nan"), samples=4), dict(step=2, data="d"))
    assert panels.drawn_rows(tmp_path / "log") == [dict(step=1, samples=4), dict(step=2, data="d")]


def test_smoothing_keeps_constants_and_length():
    assert list(panels.smooth([3.0] * 40)) == pytest.approx([3.0] * 40)
    assert list(panels.smooth([*range(11), 0])) == [*range(11), 0]
    assert panels.smooth([*range(13)])[0] == 1
    smoothed = panels.smooth([*range(20), 0, 10])
    assert smoothed[5] == 5 and smoothed[0] == 1  # over 2 steps to both sides, or what is there
    assert smoothed[-1] == pytest.approx(29 / 3) and smoothed[-3] == pytest.approx(64 / 5)


def test_numbers_below_zero_are_in_the_panel():
    """On a log scale by their size."""
    left, middle, right = Figure().subplots(1, 3)
    rows = [dict(step=i, avg=avg, data="d", k=2, ci_low=avg, ci_high=avg)
            for i, avg in enumerate((-.5, 0, 2))]
    panels.draw_lines(left, rows, dict(avg="a"))
    panels.draw_accuracy(middle, rows)
    panels.draw_lines(right, rows, dict(avg=""), log_scale=True)
    assert left.get_ylim()[0] <= -.5 and middle.get_ylim()[0] <= -.5
    assert [*right.lines[0].get_ydata()] == [.5, 2]


def test_each_held_out_set_has_its_curve_its_start_its_interval_and_its_legend():
    ax = Figure().subplots()
    evals = [dict(step=i, data=data, avg=avg, k=2, ci_low=avg - .1, ci_high=avg + .1)
             for i, both in enumerate(((.1, .6), (.5, .7), (.3, .9)))
             for data, avg in zip("de", both)]
    panels.draw_accuracy(ax, evals)
    assert ax.get_legend_handles_labels()[1] == ["d, avg@2: 0.10 → 0.30", "e, avg@2: 0.60 → 0.90"]
    curves = [[*line.get_ydata()] for line in ax.lines]
    assert curves == [[.1, .5, .3], [.1] * 2, [.6, .7, .9], [.6] * 2]
    bands = [band.get_paths()[0].vertices[:, 1] for band in ax.collections]
    assert [{*ys.round(1)} for ys in bands] == [{0, .2, .4, .6}, {.5, .6, .7, .8, 1}]
    ax = Figure().subplots()
    panels.draw_accuracy(ax, [dict(step=20, data="d", avg=.4, k=2, ci_low=.3, ci_high=.5)])
    assert len(ax.lines) == 1  # it is not known where it began


def test_mean_line_covers_the_common_range():
    ax = Figure().subplots()
    curves = [([0, 2, 4], [0.0, 2.0, 4.0]), ([0, 2], [2.0, 4.0]), ([], [])]
    compare.draw_group(ax, curves, "k", "two")
    *_, mean = ax.lines
    assert len(ax.lines) == 3 and mean.get_label() == "two"
    assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([0, 2], [1.0, 3.0])


def test_seeds_share_a_line_and_names_are_drawn_as_they_are():
    names = ["a/mine", r"b/a$\frac$", "b/mine", "bal-seed10", "bal-seed11", "_bare"]
    runs = [dict(name=name, config=dict(seed=name, sampler=name.partition("-seed")[0]))
            for name in names[:-1]] + [dict(name="_bare", config={})]
    assert [*compare.group_by_seed(runs)] == [
        "a/mine", r"b/a\$\frac\$", "b/mine", "bal-seed10 (mean of 2)", " _bare"]


def test_the_last_number_of_each_curve_is_printed():
    first = dict(step=0, data="builtin", avg=0.23, ci_low=0.2, ci_high=0.26)
    last = first | dict(step=20, avg=0.581, ci_low=0.51, ci_high=0.65)
    runs = [dict(name=f"runs/{name}", config=config, evals=evals) for name, config, evals in (
        ("a0", dict(seed=0, lr=1), [first, last]),
        ("own", dict(reward="mine.py:score"), [first | dict(avg=-2.5)]),
        ("new", {}, [first | dict(data="other")]))]
    assert compare.numbers(runs, "builtin") == [
        "runs/a0: 58.1% [51.0%, 65.0%] at step 20", "runs/own: -2.5 [0.2, 0.26] at step 0",
        "runs/new: no evaluation on builtin"]


@pytest.mark.parametrize("one, other, said", [
    (("held-out", 8, "a"), ("held-out", 8, "a"), ""),
    (("held-out", 8, "a"), ("held-out", 8, "b"),
     "held-out problems (held out of a (8); held out of b (8))"),
    (("held-out", 8, "a"), ("gsm8k", 8), "problems (gsm8k (8); held out of a (8))"),
    (("gsm8k", 8), ("gsm8k", 9), "problems (gsm8k (8); gsm8k (9))"),
    (("gsm8k", 8), ("gsm8k", 8, "", "my.py:f"), "rewards (math-verify; my.py:f)"),
    (("gsm8k", 8), (None, 8), "")])
def test_runs_that_mean_other_things_are_named(one, other, said):
    def run(asked, questions, data="", reward=""):
        row = dict(data=asked, questions=questions)
        return dict(config=dict(data=data, reward=reward), evals=[row] * 2 if asked else [])

    sentences = panels.what_differs([run(*one), run(*one), run(*other)])
    assert said in "".join(sentences) and len(sentences) == bool(said)
