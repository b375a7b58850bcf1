"""Kernels of a GPU by name."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.analysis.metrics.activity.busy_time import main_kernels
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class KernelTime:
    """All kernels of one name on the first device of a rank, over the whole trace.

    Attributes:
        name: Name of the kernel.
        kind: `compute` or `communication`.
        count: Number of runs.
        time_ms: Sum of their times.
        mean_us: Mean time of one run.
        share: `time_ms` as a share of the sum over all kernels.
    """

    name: str
    kind: str
    count: int
    time_ms: float
    mean_us: float
    share: float


def top_kernels(trace: Trace, rank: int, count: int) -> list[KernelTime]:
    """Return the kernels with most time, the largest first, at most `count`; empty where none were recorded."""
    rows = main_kernels(trace, rank)
    rows = rows[rows["kind"].isin(["compute", "communication"])]
    length = rows["end_ns"] - rows["start_ns"]
    total = int(length.sum())
    sums = length.groupby([rows["name"], rows["kind"]], observed=True).agg(["size", "sum"])
    sums = sums.sort_values("sum", ascending=False, kind="stable").head(count)
    return [
        KernelTime(
            name=str(name),
            kind=str(kind),
            count=int(runs),
            time_ms=time / 1e6,
            mean_us=time / runs / 1e3,
            share=time / total if total else 0.0,
        )
        for (name, kind), runs, time in zip(sums.index, sums["size"], sums["sum"], strict=True)
    ]
