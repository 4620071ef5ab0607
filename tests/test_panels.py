"""Curves are those of the log, and no picture ends a training."""
import math
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


@pytest.mark.slow
def test_no_backend_of_a_notebook_ends_a_training(tmp_path):
    """A notebook gives its children a backend that they may lack. Names are drawn as they are."""
    run = make(tmp_path / r"a$\frac$")
    code = "import sys, pathlib\nfrom explorer.panels import draw_run\n"
    inline = dict(MPLBACKEND="module://matplotlib_inline.backend_inline")
    ended = subprocess.run(
        [sys.executable, "-c", code + "draw_run(pathlib.Path(sys.argv[1]))", run],
        env=os.environ | inline, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended
    assert (run / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("spoil, why", [
    (lambda config, _: config.write_text("{"), "config.json cannot be read"),  # an editor saves it
    (lambda config, _: config.unlink(), "no folder of a run"),
    (lambda config, _: [log.unlink() for log in config.parent.glob("*.jsonl")], "finished a step"),
    (lambda config, _: config.write_text('{"config": 1}'), "'int' object"),
    (lambda _, patch: patch.setattr(Figure, "savefig", lambda _, file, **how: (
        file.write_bytes(b"half") / 0)), "ZeroDivisionError")])
def test_a_picture_that_cannot_be_drawn_is_one_line(tmp_path, capsys, monkeypatch, spoil, why):
    """The old picture stays, and of the new one nothing."""
    picture = make(tmp_path / "run") / "curves.png"
    picture.write_bytes(b"old")
    spoil(picture.with_name("config.json"), monkeypatch)
    panels.draw_run(picture.parent)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("curves.png was not drawn: ") and why in line
    assert picture.read_bytes() == b"old" and not [*picture.parent.glob(".*")]


def test_every_panel_is_explained_under_its_title():
    explained = (ROOT / "docs" / "learning.md").read_text()
    assert [title for _, title, _, _ in panels.PANELS if f"| {title} |" not in explained] == []


@pytest.mark.parametrize("status", NO_VERDICT)
def test_whatever_made_the_grader_fail_is_in_the_curve(tmp_path, status):
    """What was not finite is passed over."""
    row = dict(step=3, loss=math.nan, data="d", verdicts={status: 60, "no_box": 20, "wrong": 20})
    append(tmp_path / "log", row)
    assert panels.drawn_rows(tmp_path / "log") == [
        dict(step=3, data="d", share_no_box=0.2, share_no_verdict=0.6)]


def test_a_curve_has_its_moving_mean_and_on_a_log_scale_the_sizes():
    """A log scale has no zero. At its ends the mean is over fewer steps. Short runs have none."""
    assert [*map(panels.smoothing_reach, (12, 13, 40, 41))] == [0, 2, 2, 3]
    ax = Figure().subplots()
    rows = [dict(step=i, kl_k1=(-1) ** i * i) for i in range(41)]
    panels.draw_lines(ax, rows, dict(kl_k1="|k1|"), log_scale=True)
    means = [2, 2.5, *range(3, 39), 38.5, 39]
    assert [[*line.get_ydata()] for line in ax.lines] == [[*range(1, 41)], pytest.approx(means)]


def test_a_run_is_drawn_with_title_unit_and_lines_of_every_panel(tmp_path):
    """The axis of values begins at 0, or at a negative reward."""
    folder = make(tmp_path / "a$", model="_m", data="")
    append(folder / "metrics.jsonl", dict(step=13, reward_pool=-2, clipped_positive=0.5))
    figure = panels.figure_of(run := panels.read_run(folder))
    assert figure.get_suptitle() == r"a\$ ·  _m      (faint: every step, bold: moving mean)"
    logged = {key for row in run["metrics"] for key in row}
    assert [(ax.get_title(), ax.get_ylabel(), ax.get_yscale(), len(ax.lines))
            for ax in figure.axes] == [
        (title, unit, "log" if kind == "kl" else "linear",
         2 if kind == "accuracy" else 2 * len(logged & {*keys}))
        for kind, title, unit, keys in panels.panels_of([run])]
    reward, accuracy, samples = figure.axes[:3]
    masked = next(ax for ax in figure.axes if ax.get_title() == "Masked tokens")
    assert ("A > 0", 0.5) in [(line.get_label(), line.get_ydata()[-1]) for line in masked.lines]
    assert [t.get_text() for t in reward.get_legend().texts] == ["first round (fair)", "whole pool"]
    assert len({line.get_color() for line in reward.lines}) == 2  # faint and bold have the same
    assert samples.get_legend() is None and samples.get_xlabel() == "training steps"
    assert all(tick == int(tick) for ax in figure.axes for tick in ax.get_xticks())
    assert [ax.get_ylim()[0] for ax in (reward, accuracy, samples)] == [-2, 0, 0]


@pytest.mark.parametrize("row, kinds", [
    ({"reward/a": 1.0}, []), ({"reward/a": 1.0, "reward/b": 0.0}, ["parts"]),
    (dict(clipped_negative=0.0), []), (dict(clipped_negative=0.1), ["off-policy"]),
    (dict(clipped_positive=0.1), ["off-policy"]), (dict(weight_max=1.004, weight_min=0.995), []),
    (dict(weight_max=1.006, weight_min=0.995), ["off-policy"])])
def test_a_panel_is_there_if_it_shows_something_of_one_run(row, kinds):
    runs = [dict(metrics=[row], evals=[]), dict(metrics=[], evals=[dict(avg=0.5)])]
    _, *others = panels.panels_of(runs)
    assert [kind for kind, *_ in others] == kinds
    assert kinds != ["parts"] or others[0][1:] == (
        "Parts of the reward", "mean reward, first round", {"reward/a": "a", "reward/b": "b"})


def test_each_held_out_set_has_its_curve_its_start_its_interval_and_its_legend():
    """One that begins after step 0 has no dotted line, and one that was not judged no curve."""
    ax = Figure().subplots()
    evals = [dict(step=i, data=data, avg=avg, k=2, ci_low=avg - .1, ci_high=avg + .1)
             for data, first, values in (("d$", 0, (.1, .5, .3)), ("_e", 1, (.7, .9)))
             for i, avg in enumerate(values, first)]
    panels.draw_accuracy(ax, [dict(step=0, data="f"), *evals])
    assert ax.get_legend_handles_labels()[1] == [
        r"d\$, avg@2: 0.10 → 0.30", " _e, avg@2: 0.70 → 0.90"]
    assert [[*line.get_ydata()] for line in ax.lines] == [[.1, .5, .3], [.1] * 2, [.7, .9]]
    bands = [band.get_paths()[0].vertices[:, 1] for band in ax.collections]
    assert [{*ys.round(1)} for ys in bands] == [{0, .2, .4, .6}, {.6, .8, 1}]


def test_mean_line_covers_the_common_range():
    ax = Figure().subplots()
    curves = [([0, 2, 4], [0.0, 2.0, 4.0]), ([0, 2], [2.0, 4.0]), ([], [])]
    compare.draw_group(ax, curves, "k", "two")
    _, _, mean = ax.lines
    assert (mean.get_label(), [*mean.get_xdata()], [*mean.get_ydata()]) == ("two", [0, 2], [1, 3])


@pytest.mark.parametrize("sets, reward, said", [
    ({"b": 8, "a": 8}, "", None), ({}, "", None),
    ({"a": 8, "b": 9}, "", "held-out problems (a (8), b (8); a (8), b (9))"),
    ({"a": 8}, "", "held-out problems (a (8); a (8), b (8))"),
    ({"a": 8, "b": 8}, "my.py:f", "rewards (math-verify; my.py:f)")])
def test_runs_that_mean_other_things_are_named(sets, reward, said):
    """A run without evaluations can be compared with one that has some."""
    def run(sets, reward=""):
        rows = [dict(data=name, questions=count) for name, count in sets.items()]
        return dict(config=dict(reward=reward), evals=rows * 2)

    runs = [run({"a": 8, "b": 8})] * 2 + [run(sets, reward)]
    wanted = [f"The runs have different {said}: do not compare their curves."] if said else []
    assert panels.what_differs(runs) == wanted
