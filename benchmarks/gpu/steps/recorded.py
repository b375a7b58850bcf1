"""`ebbtide profile` of a GPT of 1.5 G parameters in plain torch, held against what the job itself knows.

Of the job: phases by its own CUDA events, copies of known bytes, torch's own peaks. Each must be found in the trace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from step import STEPS, Step, arguments, begin, ebbtide, fresh

from ebbtide.profiler import open_trace
from ebbtide.profiler.trace import Trace

JOB = STEPS / "gpt_job.py"
TINY = ["--layers", "2", "--width", "128", "--heads", "4", "--context", "128", "--batch", "4", "--steps", "12"]
# Steps that warm up.
SKIP = 3
# Of the counters' lag, on both sides of copies.
LAG_NS = 400_000_000


def phases(trace: Trace, own_ms: dict[str, list[float]]) -> dict[str, Any]:
    """By phase the median over steps of recorded over own time, and the farthest one; on the device's clock where the
    trace has its times."""
    rows = trace.phases(0)
    found = {}
    for phase, own in own_ms.items():
        of = rows[rows["phase"] == phase]
        on_device = bool(of["gpu_end_ns"].notna().all())
        begin, end = ("gpu_start_ns", "gpu_end_ns") if on_device else ("start_ns", "end_ns")
        lengths = (of[end] - of[begin]).to_numpy(float) / 1e6
        entry: dict[str, Any] = {"recorded": len(lengths), "own": len(own), "on_device": on_device, "ratio": None}
        if len(lengths) == len(own):
            ratios = [ours / theirs for ours, theirs in zip(lengths, own, strict=True)][SKIP:]
            entry |= {"ratio": median(ratios), "least": min(ratios), "most": max(ratios), "own_ms": median(own[SKIP:])}
        found[phase] = entry
    return found


def link_bytes(trace: Trace, way: str, begin: int, end: int) -> float | None:
    """What the sampled counter says passed between two times; None without samples there."""
    link = trace.link(0)
    rows = link[(link["t_ns"] >= begin) & (link["t_ns"] <= end) & link[f"{way}_bytes_per_s"].notna()]
    if len(rows) < 2:
        return None
    # A sample stands for the time since the one before, whatever part of it the card looked at.
    return float((rows[f"{way}_bytes_per_s"].to_numpy()[1:] * np.diff(rows["t_ns"]) / 1e9).sum())


def copies(trace: Trace, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = trace.transfers(0)
    found = []
    for copy in known:
        alike = rows[(rows["direction"] == copy["way"]) & (rows["bytes"] == copy["bytes"])]
        passed = link_bytes(trace, copy["way"], copy["start_ns"] - LAG_NS, copy["end_ns"] + LAG_NS)
        nbytes = copy["bytes"] * copy["count"]
        inside = alike[(alike["end_ns"] > copy["start_ns"]) & (alike["start_ns"] < copy["end_ns"])]
        found.append(
            {
                "way": copy["way"],
                "count": copy["count"],
                "found": len(inside),
                "pinned": bool((inside["host_memory"] == "pinned").all()),
                "bytes": nbytes,
                "bytes_by_counters": passed,
                "bytes_per_s": nbytes / (copy["end_ns"] - copy["start_ns"]) * 1e9,
                "source": next(iter(trace.link(0)["source"]), None),
            }
        )
    return found


def memory(trace: Trace, peaks: dict[str, int]) -> dict[str, Any]:
    """By pool the highest byte count recorded, and torch's own peak."""
    rows = trace.memory(0)
    highest = rows.groupby("pool")["bytes"].max()
    pools = {pool: {"recorded": int(highest.get(pool, 0)), "torch": peak} for pool, peak in peaks.items()}
    return {**pools, "device": {"recorded": int(highest.get("device", 0)), "torch": None}}


def compare(step: Step, trace: Trace, own: dict[str, Any]) -> None:
    found = phases(trace, own["phases_ms"])
    step.tell(params=own["params"], phases=found, notes=trace.notes)
    ratios = [entry["ratio"] for entry in found.values()]
    near = all(ratio is not None and abs(ratio - 1) < 0.01 for ratio in ratios)
    # Phases of a tiny job are as short as what stands between its marks and the recorder's.
    step.check("phases agree within 1 %", None if step.rehearse else near)
    if own["peaks"] is None:
        for name in ("known copies are found", "counters agree with copies within 10 %", "peaks agree with torch's"):
            step.check(name, None)
        return
    there, pools = copies(trace, own["copies"]), memory(trace, own["peaks"])
    step.tell(copies=there, memory=pools)
    step.check("known copies are found", all(copy["found"] == copy["count"] and copy["pinned"] for copy in there))
    passed = [copy["bytes_by_counters"] for copy in there]
    right = all(p is not None and abs(p / c["bytes"] - 1) < 0.1 for p, c in zip(passed, there, strict=True))
    step.check("counters agree with copies within 10 %", right)
    exact, held = pools["requested"], pools["device"]["recorded"]
    step.check(
        "peaks agree with torch's", exact["recorded"] == exact["torch"] and held >= pools["reserved"]["recorded"]
    )


def main() -> None:
    step = begin(arguments(__doc__).parse_args())
    path, told = fresh(step.out / "profile.ebb"), step.out / "profile.told.json"
    job: list[str | Path] = [sys.executable, JOB, *(TINY if step.rehearse else []), "--told", told]
    ebbtide("profile", "--transfers", "--force", "-o", path, "--", *job)
    trace = open_trace(path)
    compare(step, trace, json.loads(told.read_text()))
    told.unlink()
    step.tell(summary=json.loads(ebbtide("summary", path, "--json")))
    step.tell(windows=json.loads(ebbtide("windows", path, "--min-bytes", "1GiB", "--json")))
    ebbtide("report", path, "--force", "-o", step.out / "profile.html")


if __name__ == "__main__":
    main()
