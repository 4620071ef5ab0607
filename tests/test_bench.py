"""The benchmarks' own arithmetic, and bench/gpu.py end to end on the CPU, on a small model."""
import json
import math
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT
from helpers import HANG, run_program

sys.path.insert(0, str(ROOT / "bench"))
import coarse_engine  # noqa: E402
import common  # noqa: E402
import gpu  # noqa: E402
import gpu_parts  # noqa: E402
import speed  # noqa: E402
import trl_baseline  # noqa: E402

SIZE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4)


def test_alternate_takes_turns_and_drops_the_warm_up():
    order = []
    taken = common.alternate(2, a=lambda: order.append("a"), b=lambda: order.append("b"))
    assert order == list("ababab") and len(taken["a"]) == len(taken["b"]) == 2
    assert common.middle_ratio([2, 30, 4], [1, 10, 1]) == 3


def test_lengths_can_be_set(tmp_path):
    """After a prompt's token the classes have their shares;
    within a class the end has probability 1/mean."""
    from transformers import Qwen2ForCausalLM

    small = dict(hidden_size=64, intermediate_size=64, tie_word_embeddings=False)
    common.random_model(SIZE | small, str(tmp_path))
    common.set_lengths(str(tmp_path), [(0.75, 15), (0.25, 300)])
    model = Qwen2ForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        p = model(torch.tensor([[5, 6, 7, 25, 45]])).logits.softmax(-1)[0]
    end = model.config.eos_token_id
    assert math.isclose(p[2, 20:40].sum(), 0.75, rel_tol=1e-3)
    assert math.isclose(p[2, 40:60].sum(), 0.25, rel_tol=1e-3)
    assert math.isclose(p[3, end], 1 / 15, rel_tol=1e-3)
    assert math.isclose(p[4, end], 1 / 300, rel_tol=1e-3)
    assert p[3, 20:40].sum() + p[3, end] > 0.999  # it stays in its class


def test_model_flops_are_what_torch_counts(tmp_path):
    from torch.utils.flop_counter import FlopCounterMode

    from parts.policy import load_policy

    common.random_model(SIZE, str(tmp_path), vocabulary=2048)
    policy = load_policy(str(tmp_path), dtype="float32", rank=1, alpha=1, seed=0, device="cpu")
    with FlopCounterMode(display=False) as counted:
        # short: torch does not count the CPU's attention
        gpu_parts.train(policy, [32] * 32, micro_tokens=1024)
    assert counted.get_total_flops() == pytest.approx(
        gpu_parts.model_flops(policy, [32] * 32, prompt=1), rel=0.1)


def test_lengths_are_drawn_with_a_long_tail():
    lengths = sorted(gpu_parts.long_tailed(random.Random(i), 100, 1000) for i in range(2000))
    assert 90 < lengths[1000] < 110 and lengths[1900] > 250 and lengths[-1] == 1000


def measured(engine=60.0, cache=55.0, slope=1e-3):
    """What gpu.py might have measured of a model of 3 GB."""
    points = {name: dict(peak_gb={4096: 3.5 + 4096 * s, 8192: 3.5 + 8192 * s})
              for name, s in (("off", 3 * slope), ("on", slope))}
    memory = {"engine": engine, "engine and trainer": engine + 3, "engine asleep and trainer": 4.5}
    return dict(adapter=dict(memory_gb=memory, cache_gb=cache),
                training=dict(gradient_checkpointing=points))


def test_recommended_settings_grow_with_the_card():
    found = {card: gpu.recommend(measured(), card) for card in (8, 16, 24, 48, 80)}
    assert "too small" in found[8]
    flags = {card: text.split() for card, text in found.items() if card > 8}
    tokens = [int(flag[flag.index("--micro-tokens") + 1]) for flag in flags.values()]
    assert tokens[0] >= 4024
    assert "checkpointing on" in found[16] and "checkpointing off" in found[80], found
    for card, flag in flags.items():
        share = float(flag[flag.index("--engine-memory") + 1])
        # the engine's weights and its smallest cache fit
        assert 5 + 2 <= share * card + 0.5 and share < 0.92


@pytest.mark.slow
def test_log_probs_stay_within_their_memory():
    assert speed.logprob_memory(1024) < 1.5


def test_the_table_shows_every_stored_target():
    rows = speed.table(common.load("speed") | dict(trl=common.load("trl")))
    speed.show(rows)
    assert {number for number, *_ in rows} == {"", *"123456"}
    assert all(target for _, _, _, target, met in rows if met is not None)
    missed = [what for _, what, _, _, met in rows if met is False]
    assert len(missed) == 1 and missed[0].startswith("sampler and grading / LLM.generate")


def test_seconds_to_a_level_are_read_off_a_smoothed_curve():
    """Both sides learn alike per step, 2 points each,
    and one of them takes twice as long over it."""
    noise = [0, 0.01, -0.01, 0.01, 0.01, -0.01, 0.0]
    curve = [dict(step=i, ours=0.3 + 0.02 * i + x, trl=0.3 + 0.02 * i - x, ours_seconds=10.0 * i,
                  trl_seconds=20.0 * i)
             for i, x in enumerate(noise)]
    found = trl_baseline.reached(curve)
    assert found["level"] == pytest.approx(0.3 + 0.8 * 0.1, abs=0.01)
    assert found["seconds_to_level"]["trl"] / found["seconds_to_level"]["ours"] == pytest.approx(
        2, rel=0.3)
    flat = [point | dict(ours=0.3, trl=0.3) for point in curve]
    assert trl_baseline.reached(flat)["seconds_to_level"] == dict(ours=0.0, trl=0.0)


def test_trl_baseline_without_trl_says_so():
    if common.installed("trl"):
        pytest.skip("TRL is installed here")
    done = subprocess.run([sys.executable, ROOT / "bench/trl_baseline.py", "--steps", "1"],
                          capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1 and "pip install --no-deps trl" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.engine
def test_gpu_benchmark_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Every part that a CPU can run, through the code that a GPU would run; a failed one is tried
    again, others are not."""
    def forked(command, stdout, **_):
        assert command[:2] == [sys.executable, gpu.__file__]
        stdout.write(run_program("bench/gpu.py", *command[2:]).stdout)

    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(
        run=forked, STDOUT=None, TimeoutExpired=subprocess.TimeoutExpired))
    parts = ["training", "merge", "steps-merge", "endings", "temperature", "routes"]
    (tmp_path / "gpu-small.json").write_text(json.dumps({"training": {"failed": "out of time"},
                                                         "fp8": {"gap_max": 1}}))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--size", "small", "--only", *parts, "fp8",
                                      "--out", str(tmp_path)])
    gpu.main()
    said = capsys.readouterr().out
    assert "fp8 ..." not in said and "NOT MEASURED" not in said
    found = json.loads((tmp_path / "gpu-small.json").read_text())
    assert found["fp8"] == {"gap_max": 1}
    assert found["merge"]["gap_max"] < 1e-4 and found["temperature"]["gap_max"] < 1e-4
    assert found["merge"]["sync_seconds"] > 0
    steps = {name: x["steps"] for name, x in found["merge"]["sampler"].items()}
    assert steps["no barrier, early opening (default)"] <= steps["no barrier"]
    assert steps["no barrier"] < steps["a barrier after every round"]
    for name in ("off", "on"):
        assert found["training"]["gradient_checkpointing"][name]["tokens_per_second"] > 0
    endings = found["endings"]
    assert endings["ended_by_themselves"] > 0 and endings["same_seed_same_samples"]
    assert endings["another_seed_others"]
    assert found["routes"]["routes_fit"] and len(found["steps-merge"]["steps"]) == 2


def test_a_part_that_fails_loses_no_other(tmp_path, monkeypatch):
    results = dict(training=dict(failed="RuntimeError: CUDA out of memory", log=["a", "b"]),
                   endings=dict(responses=3))
    gpu.show(results)  # no recommendation without both sides, and no error
    assert gpu.recommend(measured(), 24)
    lost = measured()
    # did not fit where it was measured
    lost["training"]["gradient_checkpointing"]["off"]["peak_gb"][8192] = None
    assert "checkpointing on" in gpu.recommend(lost, 80)


def test_the_program_itself_never_touches_the_card():
    """What torch takes on a GPU for its first question, half a gigabyte and more,
    the parts would miss."""
    code = "import sys; sys.path.insert(0, 'bench'); import gpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_coarse_weights_are_those_of_the_formats_with_as_many_bits():
    w = torch.cat([torch.randn(2000), torch.tensor([0.0, 1.0, -1.5, 0.75])])
    assert torch.equal(coarse_engine.coarse(w, 24), w)
    assert torch.equal(coarse_engine.coarse(w, 8), w.bfloat16().float())
    normal = w[(w.abs() >= 2**-6) | (w == 0)]  # e4m3 has fewer bits below
    assert torch.equal(coarse_engine.coarse(normal, 4), normal.to(torch.float8_e4m3fn).float())
    powers = coarse_engine.coarse(w[w != 0], 1).abs().log2()
    assert torch.equal(powers, powers.round())


def test_a_coarse_engine_starts_with_rounded_matrices_and_is_sent_no_others(monkeypatch, tmp_path):
    """Vectors (norms, biases) stay as they are, and so does the trainer's model."""
    from parts import engine
    from safetensors.torch import load_file, save_file

    w, b = torch.randn(4, 4), torch.randn(4)
    file = tmp_path / "model.safetensors"
    save_file(dict(w=w, b=b), file)
    monkeypatch.setattr(engine, "start", lambda model, options, dtype: load_file(
        f"{model}/model.safetensors"))
    monkeypatch.setattr(engine, "merged_weights", lambda policy: iter(policy.items()))
    coarse_engine.make_coarse(2)
    started = engine.start(str(tmp_path), {}, "float32")
    sent = dict(engine.merged_weights({"q.weight": w, "q.bias": b}))
    rounded = coarse_engine.coarse(w, 2)
    assert not torch.equal(rounded, w)
    assert torch.equal(started["w"], rounded) and torch.equal(sent["q.weight"], rounded)
    assert torch.equal(started["b"], b) and torch.equal(sent["q.bias"], b)
    assert torch.equal(load_file(file)["w"], w)
