"""Records a GPT of 1.5 G parameters with `ebbtide profile`, and compares the trace with
measurements of the job itself.

The job measures its phases by its own CUDA events, makes copies of known size, and
reads the memory peaks of torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from step import STEPS, StepContext, argument_parser, ebbtide, removed, start

from ebbtide.profiler import open_trace
from ebbtide.profiler.trace import Trace

JOB = STEPS / "gpt_job.py"
TINY = [
    "--layers",
    "2",
    "--width",
    "128",
    "--heads",
    "4",
    "--context",
    "128",
    "--batch",
    "4",
    "--steps",
    "12",
]
# Steps for warm-up.
SKIP = 3
# Lag of the counters, added on both sides of copies.
LAG_NS = 400_000_000


def phases(trace: Trace, own_ms: dict[str, list[float]]) -> dict[str, Any]:
    """Return for each phase the median, minimum and maximum of recorded time over own
    time.

    Recorded times are those of the device if the trace has them.
    """
    rows = trace.phases(0)
    comparisons = {}
    for phase, own in own_ms.items():
        phase_rows = rows[rows["phase"] == phase]
        on_device = bool(phase_rows["gpu_end_ns"].notna().all())
        begin, end = (
            ("gpu_start_ns", "gpu_end_ns") if on_device else ("start_ns", "end_ns")
        )
        lengths = (phase_rows[end] - phase_rows[begin]).to_numpy(float) / 1e6
        entry: dict[str, Any] = {
            "recorded": len(lengths),
            "own": len(own),
            "on_device": on_device,
            "ratio": None,
        }
        if len(lengths) == len(own):
            ratios = [
                recorded_ms / measured_ms
                for recorded_ms, measured_ms in zip(lengths, own, strict=True)
            ][SKIP:]
            entry |= {
                "ratio": median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "own_ms": median(own[SKIP:]),
            }
        comparisons[phase] = entry
    return comparisons


def link_bytes(trace: Trace, direction: str, begin: int, end: int) -> float | None:
    """Return the bytes between two times by the sampled counter; None without samples
    there."""
    link = trace.link(0)
    rows = link[
        (link["t_ns"] >= begin)
        & (link["t_ns"] <= end)
        & link[f"{direction}_bytes_per_s"].notna()
    ]
    if len(rows) < 2:
        return None
    # A sample counts for the whole time since the one before, even if the card measured
    # only part of it.
    return float(
        (
            rows[f"{direction}_bytes_per_s"].to_numpy()[1:]
            * np.diff(rows["t_ns"])
            / 1e9
        ).sum()
    )


def copies(trace: Trace, own_copies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the copies of the job with the recorded ones and with the counters."""
    rows = trace.transfers(0)
    comparisons = []
    for copy in own_copies:
        same_size = rows[
            (rows["direction"] == copy["way"]) & (rows["bytes"] == copy["bytes"])
        ]
        counted = link_bytes(
            trace, copy["way"], copy["start_ns"] - LAG_NS, copy["end_ns"] + LAG_NS
        )
        nbytes = copy["bytes"] * copy["count"]
        inside = same_size[
            (same_size["end_ns"] > copy["start_ns"])
            & (same_size["start_ns"] < copy["end_ns"])
        ]
        comparisons.append(
            {
                "way": copy["way"],
                "count": copy["count"],
                "found": len(inside),
                "pinned": bool((inside["host_memory"] == "pinned").all()),
                "bytes": nbytes,
                "bytes_by_counters": counted,
                "bytes_per_s": nbytes / (copy["end_ns"] - copy["start_ns"]) * 1e9,
                "source": next(iter(trace.link(0)["source"]), None),
            }
        )
    return comparisons


def memory(trace: Trace, peaks: dict[str, int]) -> dict[str, Any]:
    """Return for each pool the highest recorded byte count and the peak of torch."""
    rows = trace.memory(0)
    highest = rows.groupby("pool")["bytes"].max()
    pools = {
        pool: {"recorded": int(highest.get(pool, 0)), "torch": peak}
        for pool, peak in peaks.items()
    }
    return {
        **pools,
        "device": {"recorded": int(highest.get("device", 0)), "torch": None},
    }


def compare(step: StepContext, trace: Trace, own: dict[str, Any]) -> None:
    phase_times = phases(trace, own["phases_ms"])
    step.add(params=own["params"], phases=phase_times, notes=trace.notes)
    ratios = [entry["ratio"] for entry in phase_times.values()]
    near = all(ratio is not None and abs(ratio - 1) < 0.01 for ratio in ratios)
    # Phases of a tiny job are as short as the time between its marks and those of the
    # recorder.
    step.check("phases agree within 1 %", None if step.rehearse else near)
    if own["peaks"] is None:
        for name in (
            "known copies are found",
            "counters agree with copies within 10 %",
            "peaks agree with torch's",
        ):
            step.check(name, None)
        return
    recorded, pools = copies(trace, own["copies"]), memory(trace, own["peaks"])
    step.add(copies=recorded, memory=pools)
    step.check(
        "known copies are found",
        all(copy["found"] == copy["count"] and copy["pinned"] for copy in recorded),
    )
    counted = [copy["bytes_by_counters"] for copy in recorded]
    right = all(
        p is not None and abs(p / c["bytes"] - 1) < 0.1
        for p, c in zip(counted, recorded, strict=True)
    )
    step.check("counters agree with copies within 10 %", right)
    requested, device_bytes = pools["requested"], pools["device"]["recorded"]
    step.check(
        "peaks agree with torch's",
        requested["recorded"] == requested["torch"]
        and device_bytes >= pools["reserved"]["recorded"],
    )


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument("--steps", type=int, default=20, help="steps of the job")
    args = flags.parse_args()
    step = start(args)
    path, results = removed(step.out / "profile.ebb"), step.out / "profile.results.json"
    job: list[str | Path] = [
        sys.executable,
        JOB,
        *(TINY if step.rehearse else ["--steps", str(args.steps)]),
        "--results",
        results,
    ]
    # With an end of the iterations the slices have no pauses: all known copies are in
    # one.
    ebbtide(
        "profile",
        "--transfers",
        "--iterations",
        "0:1000",
        "--force",
        "-o",
        path,
        "--",
        *job,
    )
    trace = open_trace(path)
    compare(step, trace, json.loads(results.read_text()))
    results.unlink()
    step.add(summary=json.loads(ebbtide("summary", path, "--json")))
    step.add(
        windows=json.loads(ebbtide("windows", path, "--min-bytes", "1GiB", "--json"))
    )
    ebbtide("report", path, "--force", "-o", step.out / "profile.html")


if __name__ == "__main__":
    main()
