"""Checks windows of free memory: activations fill the card, and `adaptive` parks state
on it while memory is free.

Three runs of one job: all updates on the CPU; `adaptive` with the memory that is always
free; `adaptive` with the free memory of each phase. Each is recorded: NVML must always
show less memory in use than the card has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from step import STEPS, StepContext, argument_parser, ebbtide, removed, start

from ebbtide.profiler import open_trace
from ebbtide.profiler.trace import Trace

FIRST = "adaptive, by phase"
RUNS = {
    FIRST: ["--policy", "adaptive", "--by-phase"],
    "zero-offload": ["--policy", "zero-offload"],
    "adaptive, always free": ["--policy", "adaptive"],
}
TINY = [
    "--layers",
    "4",
    "--width",
    "128",
    "--heads",
    "4",
    "--context",
    "1024",
    "--steps",
    "8",
]
# Steps for warm-up, until plans and phases are stable.
SKIP = 4


def card_memory(trace: Trace) -> dict[str, Any]:
    """Return the capacity of the card, and the highest use by NVML (None without a
    GPU)."""
    rows = trace.memory(0)
    used = rows[rows["pool"] == "device"]["bytes"]
    capacity = trace.rank(0).main_device.capacity_bytes
    max_bytes = None if used.empty else int(used.max())
    return {"capacity_bytes": capacity, "most_bytes": max_bytes, "readings": len(used)}


def run_job(step: StepContext, name: str, options: list[str]) -> dict[str, Any]:
    """Record one run of the job and return its results. Raises SystemExit if it
    fails."""
    machine, results = step.out / "machine.json", step.out / "windows.results"
    trace = removed(step.out / f"windows-{'-'.join(name.replace(',', '').split())}.ebb")
    machine_options: list[str | Path] = (
        ["--machine", machine] if machine.exists() else []
    )
    job: list[str | Path] = [
        sys.executable,
        STEPS / "long_job.py",
        *options,
        *machine_options,
        "--results",
        results,
        *(TINY if step.rehearse else []),
    ]
    ebbtide("profile", "-o", trace, "--", *job)
    run: dict[str, Any] = json.loads(results.read_text())
    results.unlink()
    run["median_iteration_ms"] = median(run["iteration_ms"][SKIP:])
    run["card"] = card_memory(open_trace(trace))
    return run


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument(
        "--run", action="append", choices=list(RUNS), help="only this one; repeatable"
    )
    args = flags.parse_args()
    step = start(args)
    runs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in args.run or RUNS:
        try:
            runs[name] = run_job(step, name, RUNS[name])
        except SystemExit as error:
            failed[name] = str(error)
        step.add(runs=runs, failed=failed)
    step.check("every run ended", not failed)
    if not runs:
        raise SystemExit("no run ended")
    step.check(
        "the same losses to the bit",
        len({json.dumps(run["losses"]) for run in runs.values()}) == 1,
    )
    parked = runs.get(FIRST, {}).get("parked", 0) > 0
    # Whether parking pays off for a tiny job depends on the load of its cores.
    step.check("state was parked in windows", None if step.rehearse else parked)
    cards = [
        run["card"] for run in runs.values() if run["card"]["most_bytes"] is not None
    ]
    below = all(card["most_bytes"] < card["capacity_bytes"] for card in cards)
    step.check(
        "memory in use by NVML stays below the capacity", below if cards else None
    )
    retries = [
        run["allocator_retries"] for run in runs.values() if "allocator_retries" in run
    ]
    step.check(
        "the allocator never had to release its cache",
        not any(retries) if retries else None,
    )


if __name__ == "__main__":
    main()
