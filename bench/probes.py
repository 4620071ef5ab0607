"""Compares two versions of the probe: which faults they detect, which correct runs they end.

    git show 4f5fdfb:parts/probe.py > /tmp/earlier.py     # the version to compare with
    python bench/probes.py faults --earlier /tmp/earlier.py     # ten minutes
    python bench/probes.py moe --earlier /tmp/earlier.py        # RUNS below: some minutes each

The faults, errors and sizes below were fixed before the first comparison. A fault is tried at the
start of a run, and after SOUND steps of a correct run, where the probe has BROKEN more steps to
detect it. Every row goes into bench/results/probe.jsonl, whose tables are in probe.md.
"""
import argparse
import copy
import importlib.util
import json
import sys

from store import RESULTS, ROOT, markdown  # and one thread, and the path

sys.path.insert(0, str(ROOT / "tests"))

FAULTS = ("layer 0", "layer 1", "layer 2", "half of the layers", "half of the change",
          "the step before")  # `broken` in tests/test_probe.py
NOISES = (0.01, 0.04)  # nats on each of the engine's log-probs; one step moves them by about 0.04
SEEDS, SOUND, BROKEN, SIZE = range(10), 6, 3, 3e-3
PROMPTS, ANSWER = [8] * 24, 12  # tokens
SMALL = "--eval-every 0 --no-eval-first --eval-questions 4 --eval-k 1 --warmup-steps 1".split()
COIN = ["--reward", f"{ROOT}/bench/coin.py:coin"]  # whatever the model knows, there is a gradient
RUNS = dict(  # flags of minirl.py; correct runs in which both versions check every sync
    smollm=["--model", "SmolLM2-135M-Instruct", "--dtype", "bfloat16", "--steps", "20",
            "--batch-prompts", "2", "--N", "1", "--max-tokens", "16", *COIN, *SMALL],
    fp8=["--rollout-dtype", "fp8", "--steps", "20", "--batch-prompts", "8", *SMALL],
    fp8_cache=["--rollout-dtype", "bfloat16", "--kv-cache-dtype", "fp8", "--steps", "20",
               "--batch-prompts", "8", *SMALL],
    moe=["--model", "tiny-moe", "--mini-batches", "4", "--replay", "r3", "--steps", "10", *SMALL])


def seen(call) -> tuple[dict, str]:
    """The result of a probe, or the sentence with which it ends the run."""
    try:
        return call(), ""
    except SystemExit as error:
        return {}, str(error)


def add(**row) -> None:
    with open(RESULTS / "probe.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


# -------------------------------------------------------------------------- faults, without vLLM
def faults(probes: dict) -> None:
    for noise in NOISES:
        for seed in SEEDS:
            for name, module in probes.items():
                for fault, start, later in outcomes(module, noise, seed):
                    add(part="faults", probe=name, noise=noise, seed=seed, fault=fault,
                        start=start, later=later)


def outcomes(module, noise: float, seed: int):
    """Yields (fault, seen at the start?, after how many broken steps seen later; 0: never).

    For the fault "none" both are false alarms.
    """
    policy, engine, probe = sound_start(module, noise, seed)
    alarm = "probe" if probe is None else ""
    for step in range(SOUND):
        alarm = alarm or probe and later(engine, policy, probe, range(step, step + 1), seed)
    yield "none", probe is None, alarm and SOUND
    for fault in FAULTS:
        start = sound_start(module, noise, seed, fault)[2] is None
        one = copy.deepcopy((engine, policy, probe))  # they refer to each other
        one[0].how = fault
        yield fault, start, probe and later(*one, range(SOUND, SOUND + BROKEN), seed)


def sound_start(module, noise: float, seed: int, fault: str = ""):
    """(policy, engine, probe); the probe is None if it ended the run."""
    import models_small
    from test_probe import NoisyEngine, probed

    policy = models_small.policy(moved=0, rank=8, num_hidden_layers=3, seed=seed)
    engine = NoisyEngine(policy, noise)
    engine.rng.seed(seed)
    engine.how = fault
    bounds = module.tolerances("bfloat16", "bfloat16", "auto", mixture=False)
    made, said = seen(lambda: probed(engine, policy, bounds, PROMPTS, module.Probe,
                                     max_tokens=ANSWER))
    return policy, engine, None if said else made


def later(engine, policy, probe, steps: range, seed: int) -> int:
    """The number of steps after which the probe ends the run; 0 if it does not."""
    from models_small import move

    for count, step in enumerate(steps, 1):
        move(policy, SIZE, 1000 * seed + step)
        engine.sync(policy)
        if seen(probe.check)[1]:
            return count
    return 0


# ---------------------------------------------------------------------------- runs, with vLLM
def run(name: str, probes: dict) -> None:
    """A correct run of minirl.py, with the results of each version before step 1 and at syncs."""
    import minirl
    from parts.engine import seed_all
    from parts.config import parse

    class Both:
        """In the probe's place. Each version reads its own texts."""

        def __init__(self, config, engine, policy, held_out):
            mixture = bool(policy.routing)
            self.made = {}
            for version, module in probes.items():
                seed_all(config.seed, "probe")
                bounds = module.tolerances(
                    config.dtype, config.rollout_dtype, config.kv_cache_dtype, mixture)
                made, said = seen(lambda: module.Probe(
                    engine, policy, held_out[:64], tolerances=bounds,
                    max_tokens=max(1, config.max_tokens - 1), temperature=config.temperature))
                add(part=name, probe=version, check=0, alarm=said)
                self.made |= {} if said else {version: made}
            engine.sync(policy)
            self.checks = 0

        def check(self) -> dict:
            self.checks += 1
            for version, probe in self.made.items():
                found, said = seen(probe.check)
                add(part=name, probe=version, check=self.checks, alarm=said, **found)
            return {}

    minirl.start_probe = Both
    minirl.draw_run = lambda folder: None
    minirl.main(parse([*RUNS[name], "--name", f"probe-{name}"]))


# -------------------------------------------------------------------------------------- the tables
def tables(rows: list[dict], probes: list[str]) -> str:
    """Tables of how often each fault was detected, and of the results for correct runs."""
    tried = [row for row in rows if row["part"] == "faults"]
    table = [["fault", "noise", *(f"{name}: {when}" for name in probes
                                  for when in ("at the start", "later"))]]
    for fault in ("none", *FAULTS):
        for noise in NOISES:
            cells = []
            for name in probes:
                own = [row for row in tried if (row["fault"], row["noise"], row["probe"])
                       == (fault, noise, name)]
                cells += [f"{sum(bool(row[when]) for row in own)} of {len(own)}"
                          for when in ("start", "later")]
            table.append([fault, str(noise), *cells])
    sound = [["run", "probe", "checks", "alarms", "slopes", "largest mean gap"]]
    for name in RUNS:
        for version in probes:
            own = [row for row in rows if (row["part"], row["probe"]) == (name, version)]
            slopes = [x for row in own if (x := row.get("probe_slope")) and x == x]
            sound.append([
                name, version, str(len(own)), str(sum(bool(row["alarm"]) for row in own)),
                f"{len(slopes)}, {min(slopes):.3f} to {max(slopes):.3f}" if slopes else "none",
                f"{max((row.get('probe_gap_mean', 0) for row in own), default=0):.1e}"])
    return f"{markdown(table)}\n{markdown(sound)}"


def load_earlier(file: str):
    """The module of another version. Some versions called the tolerances limits."""
    spec = importlib.util.spec_from_file_location("earlier_probe", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "limits"):
        made, module.tolerances = module.Probe, module.limits
        module.Probe = lambda *args, tolerances, **options: made(
            *args, limits=tolerances, **options)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["faults", *RUNS, "tables"])
    parser.add_argument("--earlier", help="the file of the other version")
    args = parser.parse_args()
    from parts import probe

    if args.part == "tables":
        rows = [json.loads(line) for line in (RESULTS / "probe.jsonl").open()]
        print(tables(rows, ["earlier", "new"]))
        return
    if not args.earlier:
        parser.error("--earlier FILE is missing: the file of the other version of parts/probe.py")
    probes = dict(earlier=load_earlier(args.earlier), new=probe)
    if args.part == "faults":
        faults(probes)
    else:
        run(args.part, probes)


if __name__ == "__main__":
    main()
