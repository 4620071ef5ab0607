"""The program as a user runs it: it learns, its adapter loads elsewhere, it resumes exactly."""
import pytest
import torch

from helpers import SMALL, lines, run_program
from models.problems import chains
from parts.files import append
from parts.models import MODELS
from explorer.panels import PANELS, drawn_rows

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A real run of the real tiny model, with the default settings."""
    cwd = tmp_path_factory.mktemp("run")
    out = run_program("minirl.py", "--name", "learns", "--steps", 8, "--eval-every", 8,
                      "--keep-every", 4, cwd=cwd, curves=True)
    return cwd / "runs" / "learns", out


@pytest.mark.core
def test_a_short_run_learns_and_leaves_what_its_reader_needs(learnt):
    run, out = learnt
    before, after = lines(run / "eval.jsonl")
    assert (before["step"], after["step"]) == (0, 8)
    assert 0.15 < before["avg"] < 0.35
    assert after["ci_low"] > before["ci_high"], f"{before['avg']:.3f} -> {after['avg']:.3f}"
    assert "held-out avg@8" in out
    metrics = lines(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 9))
    drawn = {name for *_, names in PANELS for name in names} - {"routes_agree_all"}
    assert all(drawn <= row.keys() for row in drawn_rows(run / "metrics.jsonl"))
    # in float32 the engine is the trainer
    assert all(row["kl_k3"] < 1e-8 and abs(row["weight_mean"] - 1) < 1e-3 for row in metrics)
    groups = lines(run / "groups.jsonl")
    assert [row["step"] for row in groups] == [step for step in range(1, 9) for _ in range(2)]
    assert all(row["prompt"].startswith("<|user|>") and s["reward"] in (0, 1) for row in groups
               for s in row["pool"])
    assert (run / "curves.png").stat().st_size > 10_000
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved == ["step-000004", "step-000007", "step-000008"]


@pytest.mark.core
def test_what_is_recorded_of_a_token_is_what_the_saved_adapter_says_of_it(learnt):
    """Step 5 begins with the adapter that step 4 has saved. Here PEFT alone loads this adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = learnt
    base = AutoModelForCausalLM.from_pretrained(str(MODELS / "tiny"))
    policy = PeftModel.from_pretrained(base, run / "checkpoints" / "step-000004")
    tokenizer = AutoTokenizer.from_pretrained(str(MODELS / "tiny"))
    recorded = [(tokenizer.encode(row["prompt"]), s) for row in lines(run / "groups.jsonl")
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


def test_the_path_of_a_real_model_in_bfloat16(tmp_path):
    """This run has the model folder, file, precision and adapter swap of a run on a GPU."""
    append(tmp_path / "mine.jsonl", *(
        dict(question=p["problem"], final_answer=[p["answer"]]) for p in chains("train", 48)))
    flags = ("--data mine.jsonl --eval-data builtin --template chat --dtype bfloat16 --steps 3 "
             "--sync adapter --name bf16 --max-prompt-tokens 64 --lr 0.001 --micro-tokens 2048")
    out = run_program("minirl.py", "--model", MODELS / "tiny", *flags.split(), *SMALL, cwd=tmp_path)
    assert "data: mine.jsonl: 48 problems" in out
    metrics = lines(tmp_path / "runs/bf16/metrics.jsonl")
    assert [row["optimizer_steps"] for row in metrics] == [1, 1, 1]
    assert all(1e-7 < row["kl_k3"] < 1e-2 for row in metrics)  # bf16: close, not equal
    assert all(0 < row["probe_gap_mean"] < 5e-2 for row in metrics)
