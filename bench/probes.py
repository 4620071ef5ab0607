"""Draws the page of the study probe, which compared two versions of the probe.

bench/results/probe.md was written before the comparison. A row of probe.jsonl with the part
"faults" tells whether a fault was noticed at the start, and after how many steps later (0: never).
Any other row is a check in a run with vLLM. `alarm` is the sentence with which it ended the run.
"""
from store import Study, markdown, of

VERSIONS = ("earlier", "new")
FAULTS = ("none", "layer 0", "layer 1", "layer 2", "half of the layers", "half of the change",
          "the step before")
NOISES = (0.01, 0.04)  # nats on each of the engine's log-probs
RUNS = ("smollm", "fp8", "fp8_cache", "moe")


def noticed(rows: list[dict]) -> str:
    """How many of ten seeds ended."""
    times = [(version, when) for version in VERSIONS for when in ("start", "later")]
    titles = dict(start="at the start", later="later")
    table = [["fault", "noise", *(f"{version}: {titles[when]}" for version, when in times)]]
    for fault in FAULTS:
        for noise in NOISES:
            cells = []
            for version, when in times:
                tried = of(rows, part="faults", fault=fault, noise=noise, probe=version)
                cells.append(f"{sum(bool(row[when]) for row in tried)} of {len(tried)}")
            table.append([fault, str(noise), *cells])
    return markdown(table)


def sound(rows: list[dict]) -> str:
    table = [["run", "probe", "checks", "alarms", "slopes", "largest mean gap"]]
    for run in RUNS:
        for version in VERSIONS:
            checks = of(rows, part=run, probe=version)
            slopes = [x for row in checks if (x := row.get("probe_slope")) and x == x]  # no nan
            gap = max(row.get("probe_gap_mean", 0) for row in checks)
            table.append([
                run, version, str(len(checks)), str(sum(bool(row["alarm"]) for row in checks)),
                f"{len(slopes)}, {min(slopes):.3f} to {max(slopes):.3f}", f"{gap:.1e}"])
    return markdown(table)


def tables(rows: list[dict]) -> dict[str, str]:
    return {
        "Faults without vLLM": (
            'How many of ten seeds ended. In the rows "none" nothing was broken, so each number '
            f"would be a false alarm.\n\n{noticed(rows)}"),
        "Sound runs with vLLM": (
            "The probe's texts answered four held-out problems, and both versions read the same "
            "ones. A slope counts once the change is larger than the noise.\n\n"
            f"{sound(rows)}")}


STUDIES = dict(probe=Study(tables))
