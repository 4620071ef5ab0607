"""Pages come out whole for any stage of a run; seeds are grouped; what is missing is skipped."""
import json
import math
import random
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import compare  # noqa: E402
from parts import plot  # noqa: E402
from parts.grader import NO_VERDICT  # noqa: E402

PNG = b"\x89PNG\r\n"


def make_run(folder, steps=30, seed=0, evals=True, leave_out=(), **config):
    """A run's folder with plausible, noisy metrics."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    config = dict(model="tiny", data="builtin", seed=seed, name=folder.name) | config
    (folder / "config.json").write_text(json.dumps(dict(config=config, starts=[])))
    for step in range(steps + 1):
        p = 0.7 - 0.4 * math.exp(-step / 10) + rng.gauss(0, 0.03)
        totals = dict(step=step, samples_total=200 * step, tokens_total=4000 * step,
                      seconds_total=3.0 * step)
        row = totals | dict(
            samples=200, tokens=4000, seconds=3.0, seconds_sample=1.5, seconds_train=1.2,
            seconds_sync=0.1, reward_first_round=p, reward_pool=p, zero_signal=0.2,
            unresolved_too_few_correct=0.1, entropy=0.3, kl_k1=rng.gauss(0, 1e-4),
            kl_k3=0.0 if step == 3 else 1e-4, response_length=20.0, truncated=0.0,
            verdicts=dict(correct=100, wrong=90, no_box=10), rounds_histogram=[5, 3],
            grad_norm=None if step == 2 else 0.5, clipped_positive=0.0, weight_max=math.nan)
        if step:
            write(folder / "metrics.jsonl",
                  {key: value for key, value in row.items() if key not in leave_out})
        if evals and step % 10 == 0:
            write(folder / "eval.jsonl", totals | dict(
                data="builtin", k=8, avg=p, ci_low=p - .05, ci_high=p + .05))
    return folder


def write(log, row):
    with open(log, "a") as file:
        file.write(json.dumps(row) + "\n")


def is_picture(path):
    return path.read_bytes().startswith(PNG) and path.stat().st_size > 10_000


@pytest.fixture
def few_panels(monkeypatch):
    """One panel of each kind: drawing all twelve takes a second."""
    monkeypatch.setattr(plot, "PANELS",
                        list({panel[0]: panel for panel in plot.PANELS[:-1]}.values()))


def test_one_run(tmp_path):
    run = make_run(tmp_path / "a")
    path = plot.draw_run(run)
    assert path == run / "curves.png" and is_picture(path)
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "curves.png", "eval.jsonl",
                                                     "metrics.jsonl"]


def test_a_run_that_has_just_begun(tmp_path, few_panels):
    only_eval, first = make_run(tmp_path / "a",
                                steps=0), make_run(tmp_path / "b", steps=1, evals=False)
    (only_eval / "config.json").unlink()
    assert plot.draw_run(only_eval).read_bytes().startswith(PNG)
    assert is_picture(plot.draw_run(first))


def test_missing_metrics_leave_out_their_panels(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", evals=False,
                   leave_out=("kl_k1", "kl_k3", "entropy", "verdicts", "truncated"))
    titles = titles_of(lambda: plot.draw_run(run), monkeypatch)
    assert "Reward while training" in titles and "Where the time goes" in titles
    assert not {"Engine against trainer", "Entropy of the policy",
                "Accuracy on held-out problems"} & set(titles)


def titles_of(figure_of, monkeypatch):
    """Titles of the panels that are drawn while `figure_of` runs."""
    titles, label = [], plot.label_panel
    monkeypatch.setattr(plot, "label_panel",
                        lambda ax, title, *rest: (titles.append(title), label(ax, title, *rest)))
    figure_of()
    return titles


@pytest.mark.parametrize("settings, drawn", [
    ({}, False), (dict(mini_batches=4), True), (dict(rollout_dtype="bfloat16"), True)])
def test_what_is_flat_by_construction_is_not_drawn(tmp_path, monkeypatch, settings, drawn):
    """With one mini-batch in float32 no token is clipped and all weights are 1."""
    run = make_run(tmp_path / "a", **dict(mini_batches=1, dtype="float32") | settings)
    titles = titles_of(lambda: plot.draw_run(run), monkeypatch)
    assert "Reward while training" in titles
    assert drawn == ("Tokens stopped by the mask" in titles)


def test_every_panel_is_explained_under_its_title():
    explained = (ROOT / "docs" / "curves.md").read_text()
    assert [title for _, title, _, _ in plot.PANELS if f"| {title} |" not in explained] == []


def test_whatever_made_the_grader_fail_is_in_the_curve(tmp_path):
    for status in NO_VERDICT:
        log = tmp_path / f"{status}.jsonl"
        log.write_text(json.dumps(dict(step=3, verdicts={status: 60, "no_box": 20, "wrong": 20})))
        assert plot.drawn_rows(log) == [dict(step=3, share_no_box=0.2, share_no_verdict=0.6)]


def test_a_half_written_line_is_passed_over(tmp_path):
    run = make_run(tmp_path / "a", steps=3)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "sam')
    rows = plot.drawn_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["share_no_box"] == 0.05 and rows[0]["share_no_verdict"] == 0


@pytest.mark.parametrize("odd", ["text", {"a": 1}, None, 10**400, math.inf], ids=range(5))
def test_what_is_no_number_is_passed_over(tmp_path, few_panels, odd):
    run = make_run(tmp_path / "a", steps=2)
    for name in ("metrics.jsonl", "eval.jsonl"):
        rows = [json.loads(line) for line in (run / name).open()]
        spoilt = [dict.fromkeys(rows[-1], odd) | changes
                  for changes in (dict(step=3), dict(step=4, data="builtin"), {})]
        with open(run / name, "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in spoilt) + "[]\n7\n" + "[" * 10**5)
    assert is_picture(plot.draw_run(run))
    assert plot.series(plot.read_run(run)["metrics"], "samples") == ([1, 2], [200, 200])
    assert is_picture(compare.draw_comparison([run], tmp_path / "compare.png"))


def test_smoothing_keeps_constants_and_length():
    assert list(plot.smooth([3.0] * 40)) == pytest.approx([3.0] * 40)
    assert list(plot.smooth([1.0, 5.0, 2.0])) == [1.0, 5.0, 2.0]
    smoothed = plot.smooth([*range(20), 0, 10])
    assert smoothed[5] == 5 and smoothed[0] == 1  # over 2 steps to both sides, or what is there
    assert smoothed[-1] == pytest.approx(29 / 3) and smoothed[-3] == pytest.approx(64 / 5)


def test_seeds_share_a_label_and_others_do_not(tmp_path):
    runs = [make_run(tmp_path / f"bal-seed{s}", steps=1, seed=s, sampler="balance")
            for s in (10, 11)]
    runs += [make_run(tmp_path / "uni-seed0", steps=1, sampler="uniform"),
             make_run(tmp_path / "bare", steps=1)]
    (tmp_path / "bare" / "config.json").unlink()
    groups = compare.group_by_seed(compare.read_runs(runs))
    assert {label: len(same)
            for label, same in groups.items()} == {"bal (mean of 2)": 2, "uni-seed0": 1, "bare": 1}


def test_mean_line_covers_the_common_range():
    class Axes:
        def __init__(self):
            self.lines = []

        def plot(self, xs, ys, label=None, **_):
            self.lines.append((list(xs), list(ys), label))

    ax = Axes()
    curves = [([0, 2, 4], [0.0, 2.0, 4.0]), ([0, 2], [2.0, 4.0]), ([], [])]
    compare.draw_group(ax, curves, "k", "two")
    assert len(ax.lines) == 3 and ax.lines[-1] == ([0, 2], [1.0, 3.0], "two")


@pytest.mark.slow
def test_comparison_page(tmp_path, monkeypatch, capsys):
    runs = [str(make_run(tmp_path / f"bal-seed{s}", seed=s, sampler="balance")) for s in (0, 1)]
    runs += [str(make_run(tmp_path / "grpo", steps=20, sampler="uniform", evals=False))]
    monkeypatch.chdir(tmp_path)
    compare.main(runs)
    assert is_picture(tmp_path / "compare.png") and "compare.png" in capsys.readouterr().out
    compare.main([*runs, "--against", "tokens", "--out", "one.pdf"])
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("prepare", [
    lambda run: None, lambda run: run.mkdir(),
    lambda run: (run.mkdir(), (run / "metrics.jsonl").write_text('{"st'))])
def test_nothing_to_draw_gets_one_sentence(tmp_path, prepare):
    prepare(tmp_path / "gone")
    with pytest.raises(ValueError, match="gone is no folder of a run with a finished step"):
        plot.draw_run(tmp_path / "gone")


def test_two_runs_of_one_name_are_called_as_they_were_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("a/demo", "b/demo", "b/other"):
        make_run(tmp_path / place, steps=1, sampler=place)
    names = [run["name"] for run in compare.read_runs(["a/demo", "b/demo", "b/other"])]
    assert names == ["a/demo", "b/demo", "other"]


def test_minutes_are_of_training(tmp_path):
    run, = compare.read_runs([make_run(tmp_path / "a", steps=40)])
    assert run["metrics"][-1]["minutes"] == run["evals"][-1]["minutes"] == 2


def test_a_name_is_drawn_as_it_is_whatever_it_is_made_of(tmp_path, few_panels, monkeypatch):
    legends = []
    monkeypatch.setattr("matplotlib.figure.Figure.legend",
                        lambda figure, lines, labels, **_: legends.extend(labels))
    runs = [make_run(tmp_path / name, steps=2, sampler=name) for name in ("_mine", r"a$\frac$")]
    for run in runs:
        log = run / "eval.jsonl"
        log.write_text(log.read_text().replace("builtin", "cost_$5_$6"))
        assert is_picture(plot.draw_run(run))
    assert is_picture(compare.draw_comparison(runs, tmp_path / "compare.png"))
    assert legends == [" _mine", r"a\$\frac\$"]


def test_a_negative_k1_is_drawn_by_its_size():
    from matplotlib.figure import Figure

    ax, metrics = Figure().subplots(), [dict(step=i, kl_k1=(-1)**i * 1e-4) for i in range(3)]
    plot.draw_kl(ax, dict(config={}, metrics=metrics), {"kl_k1": "|k1|"})
    assert all(list(line.get_ydata()) == [1e-4] * 3 for line in ax.lines)


def test_each_of_many_held_out_sets_has_its_line():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    evals = [dict(step=step, data=f"set {i}", avg=step / 10) for i in range(9) for step in (0, 5)]
    plot.draw_accuracy(ax, dict(evals=evals), {})
    labels = ax.get_legend_handles_labels()[1]
    assert len(labels) == 9 and all(label.endswith("0.00 → 0.50") for label in labels)
