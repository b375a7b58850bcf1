"""Windows for real: activations fill the card, and `adaptive` parks state on it while there is room.

Three runs of one job: everything updated on the CPU; `adaptive` with the memory that is free all the time; `adaptive`
with what is free phase by phase. Each is recorded: NVML must show less than the card has, all the time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from step import STEPS, Step, arguments, begin, ebbtide, fresh

from ebbtide.profiler import open_trace
from ebbtide.profiler.trace import Trace

FIRST = "adaptive, by phase"
RUNS = {
    FIRST: ["--policy", "adaptive", "--by-phase"],
    "zero-offload": ["--policy", "zero-offload"],
    "adaptive, always free": ["--policy", "adaptive"],
}
TINY = ["--layers", "4", "--width", "128", "--heads", "4", "--context", "1024", "--steps", "8"]
# Steps in which plans and phases settle.
SKIP = 4


def card(trace: Trace) -> dict[str, Any]:
    """What the card has, and the most in use by NVML's count; None without a GPU."""
    rows = trace.memory(0)
    used = rows[rows["pool"] == "device"]["bytes"]
    capacity = trace.rank(0)["devices"][0]["capacity_bytes"]
    most = None if used.empty else int(used.max())
    return {"capacity_bytes": capacity, "most_bytes": most, "readings": len(used)}


def ran(step: Step, name: str, options: list[str]) -> dict[str, Any]:
    """One run of the job, recorded. Raises SystemExit where it fails."""
    machine, told = step.out / "machine.json", step.out / "windows.told"
    trace = fresh(step.out / f"windows-{'-'.join(name.replace(',', '').split())}.ebb")
    known: list[str | Path] = ["--machine", machine] if machine.exists() else []
    job: list[str | Path] = [
        sys.executable,
        STEPS / "long_job.py",
        *options,
        *known,
        "--told",
        told,
        *(TINY if step.rehearse else []),
    ]
    ebbtide("profile", "-o", trace, "--", *job)
    run: dict[str, Any] = json.loads(told.read_text())
    told.unlink()
    run["median_iteration_ms"] = median(run["iteration_ms"][SKIP:])
    run["card"] = card(open_trace(trace))
    return run


def main() -> None:
    step = begin(arguments(__doc__).parse_args())
    runs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, options in RUNS.items():
        try:
            runs[name] = ran(step, name, options)
        except SystemExit as error:
            failed[name] = str(error)
        step.tell(runs=runs, failed=failed)
    step.check("every run ended", not failed)
    if not runs:
        raise SystemExit("no run ended")
    step.check("the same losses to the bit", len({json.dumps(run["losses"]) for run in runs.values()}) == 1)
    parked = runs.get(FIRST, {}).get("parked", 0) > 0
    # Whether it pays for a tiny job depends on what else its two cores do.
    step.check("state was parked in windows", None if step.rehearse else parked)
    lines = [run["card"] for run in runs.values() if run["card"]["most_bytes"] is not None]
    below = all(line["most_bytes"] < line["capacity_bytes"] for line in lines)
    step.check("the NVML line stays under the capacity", below if lines else None)
    retries = [run["allocator_retries"] for run in runs.values() if "allocator_retries" in run]
    step.check("the allocator never had to give back its cache", not any(retries) if retries else None)


if __name__ == "__main__":
    main()
