"""The program as a user runs it: it learns, and its adapter loads elsewhere."""
import pytest
import torch

from helpers import lines, run_program
from parts.models import MODELS
from explorer.panels import PANELS, drawn_rows

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A real run of the real tiny model, with the default settings."""
    cwd = tmp_path_factory.mktemp("run")
    run_program("minirl.py", "--name", "learns", "--steps", 8, "--eval-every", 8,
                "--keep-every", 4, cwd=cwd, curves=True)
    return cwd / "runs" / "learns"


@pytest.mark.core
def test_a_short_run_learns_and_leaves_what_its_reader_needs(learnt):
    before, after = lines(learnt / "eval.jsonl")
    assert (before["step"], after["step"]) == (0, 8)
    assert 0.15 < before["avg"] < 0.35
    assert after["ci_low"] > before["ci_high"], f"{before['avg']:.3f} -> {after['avg']:.3f}"
    metrics = lines(learnt / "metrics.jsonl")
    drawn = {name for *_, names in PANELS for name in names} - {"routes_agree_all"}
    assert all(drawn <= row.keys() for row in drawn_rows(learnt / "metrics.jsonl"))
    # in float32 the engine is the trainer
    assert all(row["kl_k3"] < 1e-8 and abs(row["weight_mean"] - 1) < 1e-3 for row in metrics)
    assert (learnt / "curves.png").stat().st_size > 10_000


@pytest.mark.core
def test_what_is_recorded_of_a_token_is_what_the_saved_adapter_says_of_it(learnt):
    """Step 5 begins with the adapter that step 4 has saved. Here PEFT alone loads this adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(str(MODELS / "tiny"))
    policy = PeftModel.from_pretrained(base, learnt / "checkpoints" / "step-000004")
    tokenizer = AutoTokenizer.from_pretrained(str(MODELS / "tiny"))
    recorded = [(tokenizer.encode(row["prompt"]), s) for row in lines(learnt / "groups.jsonl")
                if row["step"] == 5 for s in row["pool"] if "theta" in s]
    assert recorded
    for prompt, s in recorded:
        ids = torch.tensor(prompt + s["ids"])
        with torch.no_grad():
            logp = policy(input_ids=ids[None]).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        of_tokens = logp.gather(1, ids[len(prompt):, None])[:, 0]
        wanted = dict(theta=of_tokens, mu=of_tokens, entropy=-(logp.exp() * logp).sum(-1))
        for name, value in wanted.items():
            atol = 1e-5 if name == "theta" else 1e-4
            torch.testing.assert_close(torch.tensor(s[name]), value, atol=atol, rtol=0)
        assert "old" not in s and set(s["mask"]) == {"1"}  # on-policy
