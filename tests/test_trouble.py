"""What is said of a run that goes wrong, and for which reasons it ends."""
import json
import math
from types import SimpleNamespace

import pytest
import torch

from parts.config import Config
from parts.trouble import warn_of_verifier, warn_of_weights, why_broken, why_hopeless


def run(folder=None, **settings):
    scale = torch.amp.GradScaler("cpu", enabled=False)
    return SimpleNamespace(config=Config(**settings), folder=folder,
                           policy=SimpleNamespace(loss_scale=scale),
                           state=dict(step=0, silent_looks=0, learns=False, skipped_in_a_row=0))


# ------------------------------------------------------------------------------ warnings
@pytest.mark.parametrize("status, failed, warned", [
    ("timeout", 2, False), ("timeout", 3, True), ("killed", 3, True), ("unparseable", 100, False)])
def test_a_verifier_that_fails_on_more_than_a_fiftieth_is_reported(capsys, status, failed, warned):
    pool = [SimpleNamespace(status=status if i < failed else "wrong", why="",
                            rollout=SimpleNamespace(text=f"...{i}")) for i in range(100)]
    groups = [SimpleNamespace(problem=SimpleNamespace(answer=f"gold {i}"), pool=pool[i:i + 50])
              for i in (0, 50)]
    warn_of_verifier(3, groups)
    out = capsys.readouterr().out
    assert ("the verifier gave no" in out) == warned
    assert ("WARNING, step 3" in out) == warned
    assert (f"{failed} of 100 samples" in out and "gold 'gold 0'" in out) == warned


def test_a_function_of_ones_own_that_fails_is_not_blamed_on_the_verifier(capsys):
    nan = SimpleNamespace(status="no_number", why="it returned nan",
                          rollout=SimpleNamespace(text="7"))
    group = SimpleNamespace(problem=SimpleNamespace(problem="Rhyme!", answer=""), pool=[nan])
    warn_of_verifier(3, [group], "mine.py:score")
    out = capsys.readouterr().out
    assert "--reward gave no verdict on 1 of 1 samples, such as problem 'Rhyme!'" in out
    assert "verifier" not in out and "it returned nan" in out


@pytest.mark.parametrize("share, warned", [(0.29, True), (0.31, False), (None, False)])
def test_a_warning_comes_when_few_weights_decide(share, warned, capsys):
    warn_of_weights(3, {} if share is None else dict(weight_ess=share))
    out = capsys.readouterr().out
    assert ("WARNING, step 3" in out and "29%" in out and "--lr" in out) == warned == bool(out)


# ------------------------------------------------------------------------------ broken
def test_only_broken_steps_in_a_row_end_a_run_and_leave_their_batch(tmp_path):
    sample = SimpleNamespace(rollout=SimpleNamespace(token_ids=[1, 2], logprobs=[-0.1, -0.2]))
    group = SimpleNamespace(problem=SimpleNamespace(prompt_ids=[7, 8]),
                            rows=lambda: [(sample, 1.0)])
    made, batch = run(tmp_path), tmp_path / "broken_batch.json"
    for step, skipped in enumerate([1, 1, 0, 1, 1], 1):
        assert not why_broken(step, [group], dict(skipped_steps=skipped, loss=math.nan), made)
    assert not batch.exists()
    why = why_broken(6, [group], dict(skipped_steps=1, loss=math.nan), made)
    assert "3 steps in a row" in why and "up to step 6" in why
    assert "--dtype" not in why  # another precision than float32 would not help
    assert json.loads(batch.read_text()) == dict(
        step=6, loss="nan",
        rows=[dict(prompt_ids=[7, 8], token_ids=[1, 2], logprobs=[-0.1, -0.2], coefficient=1.0)])
    assert made.state["skipped_in_a_row"] == 0  # a resumed run counts anew


# ------------------------------------------------------------------------------ hopeless
GOLD = SimpleNamespace(answer="12\x1b[2J")


def answers(rewards, status="wrong", end="stop"):
    return [dict(reward=reward, status=status, finish_reason=end, text="so \\boxed{3}\x07")
            for reward in rewards]


@pytest.mark.parametrize("draws, settings, causes", [
    (answers([0] * 9, end="length") + answers([0, 1]), {},
     ["--max-tokens 64 cuts off 9 of 11 answers: raise it"]),
    (answers([0] * 9, "no_box"), {},
     ["9 of 9 answers have no \\boxed{}", "--template", "--system"]),
    (answers([0] * 9, "timeout"), {}, ["most of 9 answers got no verdict (timeout)"]),
    (answers([0.1, 0.2]), dict(reward="own.py:f"),
     ["(0.1 to 0.2) are not above --threshold 0.7", "between them, or no answer was right yet"]),
    (answers([3, 2]), dict(reward="own.py:f"),
     ["(2 to 3) are above --threshold 0.7", "or no answer was wrong yet"]),
    (answers([0, 0]), dict(data="words.csv"), ["all 2 answers are wrong", "tiny can read only",
                                               "--model SmolLM2-135M-Instruct. To go on"]),
    (answers([2, 2]), dict(reward="own.py:f"), ["the same reward, 2: look into --reward"]),
    (answers([1, 1]), {}, ["all answers are right: take harder problems"]),
    (answers([0, 0]), {}, ["all 2 answers are wrong: ", "gold answer", "too hard"]),
    (answers([0, 1]), {}, ["no prompt has both right and wrong answers: draw more", "--M"]),
])
def test_a_run_that_cannot_learn_ends_with_an_answer_and_its_likely_cause(
        capsys, draws, settings, causes):
    made = run(max_tokens=64, **settings)
    made.state |= dict(step=3, silent_looks=2)
    why = why_hopeless(made, draws, [GOLD], silent=True)
    assert all(cause in why for cause in causes), why
    assert "before step 4" in why and why.endswith("all the same: --resume --train-anyway.")
    out = capsys.readouterr().out
    assert "\\boxed{3}" in out and not {"\x1b", "\x07"} & set(out) and draws[0]["status"] in out


@pytest.mark.parametrize("looks, last", [
    ("eSSS", 3), ("ESSS", 2), ("EsSSSS", None), ("ESsSSS", None), ("esSSSS", None),
    ("eSSsSSSS", None), ("C", 0), ("eC", 1), ("eSC", 2), ("esC", None), ("ccSSS", None),
    ("cSSS", 3)])
def test_silence_has_to_last_and_a_hit_of_the_sampler_is_hope(looks, last):
    """Evaluation and steps, silent in capitals; c: mostly cut off, as SmolLM2's answers at first.
    """
    made, ended = run(), None
    for step, look in enumerate(looks):
        made.state["step"] = step
        draws = answers([0, 1], end="length" if look in "cC" else "stop")
        if why_hopeless(made, draws, [GOLD], silent=look.isupper()):
            ended = step
            break
    assert ended == last


def test_whoever_wants_to_go_on_does():
    made = run(train_anyway=True)
    for made.state["step"] in range(9):
        assert not why_hopeless(made, answers([0], end="length"), [GOLD], silent=True)
