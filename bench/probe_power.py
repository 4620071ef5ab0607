"""What the probe sees: weights that arrive in part or late, on purpose, and its verdicts on them.

    python bench/probe_power.py            # every run of the table in docs/gpu.md, about an hour
    python bench/probe_power.py --only tiny-bf16 --steps 20

A run trains as always (default learning rate, 6 prompts a step), and after every sync both sides'
log-probs of the probe's texts go on a tape. After steps 1 to 5 and 21 to 25 the engine is also
given wrong weights, one kind after the other, and its answers go on the tape too. Then the tape is
played to the probe: the right answers, where an alarm is a false one; and each kind of wrong ones,
as if it had been so since step 1, or since step 21.
"""
import argparse
import contextlib
import copy
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from common import RESULTS, project

KINDS = ("first layer", "middle layer", "last layer", "half of the layers",
         "half of the change", "the step before")
LATE = 21  # the step from which on syncs are broken in the second round
WRONG = (*range(1, 6), *range(LATE, LATE + 5))
RUNS = {
    "tiny-float32": dict(),
    "tiny-bf16": dict(dtype="bfloat16"),
    "tiny-bf16-adapter": dict(dtype="bfloat16", sync="adapter"),
    "tiny-float16": dict(dtype="float16"),
    "tiny-fp8-cache": dict(kv_cache_dtype="fp8"),
    "tiny-fp8": dict(rollout_dtype="fp8"),
    "moe-float32": dict(model="tiny-moe"),
    "moe-bf16": dict(model="tiny-moe", dtype="bfloat16"),
    "moe-fp8-cache": dict(model="tiny-moe", kv_cache_dtype="fp8"),
}


# ------------------------------------------------------------------------------ broken on purpose
def learnt(policy) -> dict:
    """A copy of all that is trained."""
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}


def layer_of(name: str) -> int:
    return int(name.split("layers.")[1].split(".")[0])


@contextlib.contextmanager
def arriving(policy, kind: str, before: dict):
    """The policy as an engine gets it when a sync is broken like this; afterwards as it was."""
    kept = learnt(policy)
    layers = 1 + max(map(layer_of, kept))
    try:
        for name, p in policy.named_parameters():
            if kind == "the step before" and name in before:
                p.data.copy_(before[name])
            elif "lora_B" in name:
                p.data.mul_(share(kind, layer_of(name), layers))
        yield
    finally:
        for name, p in policy.named_parameters():
            if name in kept:
                p.data.copy_(kept[name])


def share(kind: str, layer: int, layers: int) -> float:
    """How much of a layer's change arrives."""
    missing = {"first layer": 0, "middle layer": layers // 2, "last layer": layers - 1}
    if kind in missing:
        return float(layer != missing[kind])
    if kind == "half of the layers":
        return float(layer % 2)
    return 0.5 if kind == "half of the change" else 1.0


def answer(run, kind: str, before: dict):
    """The engine's log-probs of the probe's texts after a sync that is broken like this."""
    with arriving(run.policy, kind, before):
        run.engine.sync(run.policy)
    return run.probe.of_engine()


# ---------------------------------------------------------------------------------- what is seen
def rehearsal(run) -> dict:
    """The rest of the trial adapter for each kind, and whether that is above the limit."""
    found = {}
    with run.probe.random_adapter():
        mine, without = run.probe.trainer(), run.probe.without_each_layer()
        for kind in KINDS[:-1]:
            seen = run.probe.compare(mine, without, answer(run, kind, {}))
            found[kind] = seen | dict(caught=bool(seen["lost"]) or seen["rest"] > seen["limit"])
    run.engine.sync(run.policy)
    return dict(sound=run.probe.rehearsed, broken=found)


def seen_now(run, earlier, before: dict) -> dict:
    """For each kind, whether the probe as it was `earlier` would end the run if the last sync had
    been broken like this; its slope else (None: too little has changed).
    """
    found, mine = {}, run.probe.trainer()
    for kind in KINDS:
        theirs = answer(run, kind, before)
        try:
            slope = copy.copy(earlier).judge((mine, theirs))["probe_slope"]
            found[kind] = None if math.isnan(slope) else slope
        except SystemExit:
            found[kind] = "caught"
    run.engine.sync(run.policy)
    return found


def record(steps: int, settings: dict) -> dict:
    """A run of so many steps: its tape, what the rehearsal sees, what a probe needs to judge."""
    import minirl

    defaults = dict(seed=2, steps=steps, batch_prompts=6, eval_questions=64, eval_every=0)
    with project(**defaults | settings) as run:
        tape, probe = [], run.probe
        found = dict(rehearsal=rehearsal(run), limits=tuple(probe.limits),
                     start=probe.start, tape=tape)
        # here nothing ends the run
        probe.judge = lambda now: tape.append(dict(right=now)) or dict(probe_gap_max=0.0)
        for step in range(1, steps + 1):
            before = learnt(run.policy)
            minirl.train_step(step, run)
            if step in WRONG and len(tape) == step:
                tape[-1]["wrong"] = {kind: answer(run, kind, before) for kind in KINDS}
                run.engine.sync(run.policy)
    return found


# ---------------------------------------------------------------------------------- and is judged
def probe_of(recorded: dict):
    """The probe as it was before the first step, without engine and policy."""
    from parts.probe import Limits, Probe

    probe = Probe.__new__(Probe)
    probe.limits = Limits(*recorded["limits"])
    probe.begin(*recorded["start"])
    return probe


def verdict(recorded: dict) -> dict:
    """Alarms on the right answers, slopes there, and when each kind of wrong ones is caught."""
    probe, rows, alarms, late = probe_of(recorded), [], [], None
    for step, sound in enumerate(recorded["tape"], 1):
        if step == LATE:
            late = copy.copy(probe)
        try:
            rows.append(probe.judge(sound["right"]))
        except SystemExit as alarm:
            alarms.append([step, str(alarm)])
    found = dict(steps=len(recorded["tape"]), noise=probe.noise, alarms=alarms,
                 rehearsal=recorded["rehearsal"])
    for first, as_it_was in ((1, probe_of(recorded)), (LATE, late)):
        if as_it_was:
            found[f"since_{first}"] = {kind: caught(recorded, kind, copy.copy(as_it_was), first)
                                       for kind in KINDS}
    return found | slopes_of(rows)


def caught(recorded: dict, kind: str, probe, first: int) -> int:
    """In which step, counted from `first`, the probe ends a run whose syncs are broken since then;
    0: in none of five.
    """
    for step in range(first, first + 5):
        recording = recorded["tape"][step - 1] if step <= len(recorded["tape"]) else {}
        if "wrong" not in recording:
            return 0
        try:
            probe.judge((recording["right"][0], recording["wrong"][kind]))
        except SystemExit:
            return step - first + 1
    return 0


def slopes_of(rows: list[dict]) -> dict:
    """[least, most, how many] of both slopes where they were judged; that since the start, from
    step 21 on.
    """
    found = {}
    for name, some in (("probe_slope", rows[20:]), ("probe_slope_last", rows)):
        values = [row[name] for row in some if not math.isnan(row[name])]
        found[name] = [min(values), max(values), len(values)] if values else []
    return found


def line(name: str, found: dict) -> str:
    """A row of the table in docs/gpu.md."""
    rounds = [found[since] for since in ("since_1", f"since_{LATE}") if since in found]
    seen = ["/".join(str(round[kind] or "-") for round in rounds) for kind in KINDS]
    tried = [f"{found['rehearsal']['broken'][kind]['rest']:.2f}"
             + "*" * found["rehearsal"]["broken"][kind]["caught"] for kind in KINDS[:-1]]
    sound = found["rehearsal"]["sound"]
    return (f"| {name} | {found['steps']} | {len(found['alarms'])} | {found['noise']:.1e} | "
            f"{' | '.join(seen)} |\n        rehearsal: sound {sound['rest']:.3f}, limit "
            f"{sound['limit']:.3f}: {', '.join(tried)}   "
            f"slopes {found['probe_slope']} {found['probe_slope_last']} {found['alarms'][:2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS), metavar="RUN")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tapes", default="",
                        help="folder of the tapes; those that are there are judged only")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:  # vLLM's groups belong to the process: an engine in each
        import torch

        torch.save(record(args.steps, RUNS[args.part]), Path(args.tapes, args.part + ".pt"))
        return
    file = RESULTS / "probe_power.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            results[name] = verdict(tape_of(name, args.steps, Path(args.tapes or folder)))
            print(line(name, results[name]), flush=True)
            file.write_text(json.dumps(results, indent=1) + "\n")


def tape_of(name: str, steps: int, folder: Path) -> dict:
    """What `record` recorded, in a process of its own, or before."""
    import torch

    file = folder / f"{name}.pt"
    if not file.exists():
        command = [sys.executable, __file__, "--part", name, "--steps", str(steps), "--tapes",
                   str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return torch.load(file, weights_only=True)


if __name__ == "__main__":
    main()
