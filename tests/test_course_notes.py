"""The lecture notes: what course/laws.py computes, against exact enumeration or the project's own
functions; the numbers in the text; the figures; the pages for lecturers."""
import itertools
import json
import math
import re
import shlex

import numpy as np
import pytest
import torch
import tyro
from matplotlib.figure import Figure

import minirl
from ada_sampler import SamplerConfig, advantages, allocate_gvm
from course import figures, laws, quiz_sheet
from helpers import ROOT
from parts.config import Config

COURSE = ROOT / "course"
NOTES = sorted((COURSE / "notes").glob("*.md"))
PAGES = [*NOTES, COURSE / "README.md", COURSE / "symbols.md", COURSE / "exercises.md",
         *sorted((COURSE / "answers").glob("*.md"))]
RATES = (0.02, 0.05, 0.3, 0.5, 0.9)


# ------------------------------------------------------------------------------------ the pages
NUMBER = r"`([^`\n]*[\w)\]])`\s+=\s+(-?[\d.]*\d)"  # `laws.silent(0.05, 4)` = 0.815


def test_numbers_in_the_text_are_what_their_expression_gives():
    text = "".join(page.read_text() for page in PAGES)
    found = re.findall(NUMBER, text)
    assert len(found) == len(re.findall(r"`\s+=\s+-?[\d.]", text)) >= 30  # in no other form
    for expression, said in found:
        digits = len(said.partition(".")[2])
        assert round(eval(expression, dict(laws=laws)), digits) == float(said), expression


def test_every_quiz_has_an_answer_and_a_page_for_the_lecturer():
    answers = (COURSE / "answers" / "quiz.md").read_text()
    for number, page in enumerate(NOTES, 1):
        option = re.search(rf"\n\*\*{number}\.\*\* \*\*(\(\w\)), ", answers)[1]
        lecturer = (COURSE / "answers" / f"session_{number}.md").read_text()
        options = re.findall(r"^\* (\(\w\)) ", page.read_text().split("## Quiz")[1], re.M)
        assert f"## Quiz: the expected answer is {option}, " in lecturer and option in options
        assert options == re.findall(r"^\| (\(\w\)) ", lecturer, re.M), f"session_{number}.md"


def test_the_walkthroughs_cells_are_those_that_the_readme_names():
    cells = json.loads((ROOT / "walkthrough.ipynb").read_text())["cells"]
    named = re.findall(r"^\| \d \| (\d+) to (\d+)[^|]* \| (.*) \|$",
                       (COURSE / "README.md").read_text(), re.M)
    assert [int(end) + 1 for _, end, _ in named][:-1] == [int(start) for start, _, _ in named][1:]
    for start, end, words in named:
        assert "".join(cells[int(start) - 1]["source"]).lstrip("# ").startswith(words), (
            "number the cells of the table in course/README.md again")
        assert cells[int(end) - 1]["cell_type"] == "code"


def test_the_commands_of_the_notebook_for_colab_have_known_flags():
    cells = json.loads((ROOT / "examples/colab.ipynb").read_text())["cells"]
    code = "".join("".join(cell["source"]) + "\n" for cell in cells)
    first, resumed = (tyro.cli(Config, args=shlex.split(line))
                      for line in re.findall(r"python minirl\.py (.*)", code))
    assert resumed.resume and resumed.name == first.name


def test_the_printed_quizzes_have_every_option_and_no_answer():
    for page in NOTES:
        parts = quiz_sheet.quiz_of(page.read_text())
        assert sum(part.startswith("(") for part in parts) >= 2 and not parts[-1].startswith("(")


@pytest.mark.parametrize("draw, page, stated", [
    (figures.stale, 6, r"masks more tokens, namely (.*) % without replay"),
    (figures.evaluation, 8, r"30 questions and .* = (.*)\n")])
def test_a_figures_first_curve_has_the_values_that_its_page_states(draw, page, stated):
    left, right = Figure().subplots(1, 2)
    draw(left, right)
    values = re.search(stated, NOTES[page - 1].read_text())[1].split(", ")
    assert {*values} <= {f"{y:.1f}" for y in left.lines[0].get_ydata()}


# -------------------------------------------------------------------- session 1: a bandit, exactly
def bandit(theta, rewards, m):
    """Every sequence of m draws: (chance, scores [m, K], rewards [m]); and the true gradient."""
    pi = torch.softmax(theta, 0)
    score = torch.eye(len(theta), dtype=theta.dtype) - pi
    draws = [(pi[list(ys)].prod(), score[list(ys)], rewards[list(ys)])
             for ys in itertools.product(range(len(theta)), repeat=m)]
    return draws, pi * (rewards - pi @ rewards)


THETA = torch.tensor([0.3, -0.5, 0.1, 0.8], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("kind, n, factor", [
    ("pool-mean", 4, 3 / 4), ("pool-mean", 2, 3 / 4), ("leave-one-out", 4, 1)])
def test_the_mean_of_m_draws_shrinks_the_gradient_by_m_minus_1_over_m(kind, n, factor):
    """Also of n kept, if the rewards have no say in who is kept: here the first n."""
    draws, truth = bandit(THETA, REWARDS, m=4)
    found = sum(q * torch.tensor(advantages(r[:n].tolist(), r.tolist(), kind)).double() @ s[:n] / n
                for q, s, r in draws)
    assert torch.allclose(found, factor * truth)


def test_noise_of_one_draw_with_and_without_baseline():
    theta, G2 = torch.zeros(4, dtype=torch.float64), 3 / 4  # all scores have |s|^2 = 1 - 1/4
    draws, _ = bandit(theta, torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), m=3)
    for b in (0.0, 0.25, 0.7):
        found = sum(q * (r[0] - b) ** 2 * (s[0] @ s[0]) for q, s, r in draws)
        assert found / G2 == pytest.approx(laws.variance_per_draw(0.25, b))
    found = sum(q * (r[0] - r[1:].mean()) ** 2 * (s[0] @ s[0]) for q, s, r in draws)
    assert found / G2 == pytest.approx(laws.variance_leave_one_out(0.25, 3))


def test_one_step_on_a_group_is_a_step_along_its_policy_gradient():
    pi, answers, rewards = torch.tensor([0.2, 0.5, 0.3]).double(), [0, 1, 1, 2], [1, 0, 0, 0]
    theta = pi.log().requires_grad_()
    advantage = torch.tensor(advantages(rewards, rewards, "pool-mean"), dtype=torch.float64)
    (advantage * theta.log_softmax(0)[answers]).mean().backward()
    after = torch.softmax(theta.detach() + theta.grad, 0).tolist()
    assert laws.after_step(pi.tolist(), answers, rewards) == pytest.approx(after)
    assert laws.after_step(pi.tolist(), [1, 1, 1, 2], [0, 0, 0, 0]) == pytest.approx(pi.tolist())


# ------------------------------------------------------------------------ session 2: log-probs
def test_the_score_of_another_temperature_has_a_mean():
    logits = torch.tensor([0.4, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    sampled = torch.softmax(logits.detach() / 0.7, 0)
    (found,) = torch.autograd.grad((sampled * logits.log_softmax(0)).sum(), logits)
    assert found.tolist() == pytest.approx(laws.drift(logits.tolist(), 0.7))
    assert laws.drift(logits.tolist(), 1.0) == pytest.approx([0, 0, 0])


# --------------------------------------------------------------------- session 3: laws of drawing
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.8])
def test_balanced_groups_of_large_pools_have_the_weight_of_the_notes(p):
    """All three of its assumptions: n even, resolved, and a pool so large that p_hat is p."""
    config = SamplerConfig(M=400, N=1)
    assert laws.expected_yield(p, config).weight == pytest.approx(laws.w_pool(p), rel=0.005)
    def f(x):
        return math.log(x / (1 - x)) / 2 - x
    assert (f(p + 1e-6) - f(p - 1e-6)) / 2e-6 == pytest.approx(laws.w_pool(p))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_mean_of_the_kept_has_another_weight_and_more_noise(p):
    group = laws.group_of(p, 500, 500, "resolved", SamplerConfig())
    kept = [s.reward for s in group.kept]
    group.advantages = advantages(kept, kept, "pool-mean")
    assert laws.effective_weight(group, SamplerConfig()) == pytest.approx(laws.w_kept(p))
    pool_squares = (4 / 2) * (p**2 + (1 - p) ** 2)
    kept_squares = sum(a * a for a in group.advantages)
    gain = (laws.w_pool(p) ** 2 / pool_squares) / (laws.w_kept(p) ** 2 / kept_squares)
    assert gain == pytest.approx(2 * (p**2 + (1 - p) ** 2))


def test_the_table_of_three_rules_has_the_values_of_expected_yield():
    rows = re.findall(r"^\| ([\d.]+) \| (\S+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
                      NOTES[2].read_text(), re.M)
    assert len(rows) == 12
    for p, sampler, *said in rows:
        found = laws.expected_yield(float(p), SamplerConfig(sampler=sampler))
        values = [f"{found.draws:.1f}", f"{found.silent:.3f}", f"{found.weight:.2f}"]
        assert values == said, f"note 3 has other numbers for {sampler} at p = {p}"


# ------------------------------------------------------------------------------ session 4: budgets
@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("p", RATES)
def test_a_draw_of_uniform_sampling_is_worth_one_minus_one_over_n(n, p):
    """Silent groups included: that they are silent is no loss per draw."""
    assert laws.efficiency(p, SamplerConfig(sampler="uniform", n=n)) == pytest.approx(1 - 1 / n)


def test_gvm_allocates_where_the_variance_is_least():
    p, norms, total = [0.05, 0.2, 0.5, 0.9], [1.0, 0.5, 2.0, 1.0], 4000
    sizes = allocate_gvm(p, norms, total, alpha=0, beta=2)
    assert laws.gvm_variance(p, norms, sizes) == pytest.approx(
        laws.gvm_least(p, norms, total), rel=1e-5)


# ------------------------------------------------------------------------------- session 5: MiniRL
@pytest.mark.parametrize("sigma, cap", [(0.5, 2.0), (1.0, 5.0), (1.5, 1.2)])
def test_mean_and_variance_of_a_capped_weight(sigma, cap):
    x = np.linspace(-12, 12, 200_001)
    density = np.exp(-x**2 / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    w = np.minimum(np.exp(sigma * x - sigma**2 / 2), cap)
    first = (w * density).sum()
    assert laws.capped(sigma, cap) == pytest.approx((first, (w**2 * density).sum() - first**2))


def test_the_table_of_note_5_has_what_the_programs_objective_gives():
    rows = re.findall(r"^\| [1-4] \|(.*)\|$", NOTES[4].read_text(), re.M)
    A, old, now, mu, r, w, mask, used, factor = torch.tensor(
        [[float(cell.replace("$", "")) for cell in row.split("|")] for row in rows]).T
    lp = now.log().requires_grad_()
    term, mask_T, weight_T = minirl.objective(lp, old.log(), mu.log(), A, Config())
    term.sum().backward()
    assert len(rows) == 4 and mask.tolist() == mask_T.tolist() == [1, 0, 1, 0]
    assert torch.allclose(r, now / old) and torch.allclose(w, weight_T)
    assert torch.allclose(used, w.clamp(max=5)) and torch.allclose(factor, lp.grad)


# ---------------------------------------------------------------- session 6: routers change experts
def test_an_error_changes_the_experts_as_often_as_the_note_says():
    """The gap is exponential with density kappa at 0; sigma is small against its mean 1 / kappa."""
    kappa, sigma = 0.5, 0.01
    gaps = np.linspace(0, 10 * sigma, 100_001)
    larger = np.array([1 - laws.Phi(gap / sigma) for gap in gaps])
    found = np.trapezoid(larger * kappa * np.exp(-kappa * gaps), gaps)
    assert laws.flip(kappa, sigma) == pytest.approx(found, rel=0.01)


# ----------------------------------------------------------------------------- session 7: loophole
@pytest.mark.parametrize("p, h, prompts", [(0.2, 0.002, 50), (0.2, 0.008, 50), (0.3, 0.001, 20)])
def test_the_loophole_wins_exactly_above_the_threshold(p, h, prompts):
    path = laws.reward_flow(p, h, prompts, time=400, steps=40_000)
    rewards, accuracy = [row[1] for row in path], path[-1][2]
    assert rewards[-1] > 0.97 and rewards == sorted(rewards)
    assert accuracy < 0.05 or accuracy > 0.9
    assert (accuracy < 0.05) == (prompts * h > p)


# --------------------------------------------------------------------------- session 8: evaluation
def test_the_variance_of_avg_at_k_by_enumeration():
    population, k = [0.1, 0.5, 0.9], 2  # one question, drawn from three
    spread = np.var(population)
    within = np.mean([p * (1 - p) for p in population])
    outcomes = [(math.comb(k, c) * p**c * (1 - p) ** (k - c) / 3, c / k)
                for p in population for c in range(k + 1)]
    average = sum(q * x for q, x in outcomes)
    found = sum(q * (x - average) ** 2 for q, x in outcomes)
    assert laws.avg_variance(spread, within, 1, k) == pytest.approx(found)
