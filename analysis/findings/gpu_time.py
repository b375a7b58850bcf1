"""GPU time that the rules on idle and communication time read: of the median iteration, or of a whole trace."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from ebbtide.analysis.findings.finding import clamp_gain
from ebbtide.analysis.metrics.activity.activity import gpu_activity
from ebbtide.analysis.metrics.activity.iteration_activity import iteration_activity
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import ITERATION_PARTS
from ebbtide.units import ms_text


class GpuTime(NamedTuple):
    """Time of the GPU of each rank.

    Attributes:
        by_rank: A row per rank with recorded kernels, in ms: `total`, `compute`, and `cause_` with each cause of time
            without compute.
        whole_trace: Whether it is of the whole trace, which has no iterations, and not of the median iteration.
    """

    by_rank: pd.DataFrame
    whole_trace: bool

    def gain(self, milliseconds: float) -> float | None:
        """Return a time as a gain per iteration; None of a whole trace."""
        return None if self.whole_trace else clamp_gain(milliseconds)

    def worst(self, causes: list[str]) -> tuple[int, float, float]:
        """Return the rank on which some causes have the largest share, their ms there, and its total ms."""
        times = self.by_rank[[f"cause_{cause}" for cause in causes]].sum(axis=1)
        rank = int((times / self.by_rank["total"]).idxmax())
        return rank, float(times[rank]), float(self.by_rank.loc[rank, "total"])


def gpu_time(metrics: TraceMetrics) -> GpuTime | None:
    """Return the time of the GPUs; None where no kernels were recorded."""
    trace, iteration = metrics.trace, metrics.iteration_ms
    if iteration is not None:
        activity = iteration_activity(trace)
        return GpuTime(activity.assign(total=iteration), False) if len(activity) and iteration else None
    rows = {}
    for rank in trace.ranks:
        activity = gpu_activity(trace, rank)
        if activity.total.span_ms:
            causes = {f"cause_{cause}": ms for cause, ms in activity.without_compute.items()}
            rows[rank] = {"total": activity.total.span_ms, "compute": activity.total.compute_ms, **causes}
    return GpuTime(pd.DataFrame.from_dict(rows, orient="index"), True) if rows else None


def phase_times_text(metrics: TraceMetrics, rank: int, column: str) -> str:
    """Return the time of a column of `phase_activity` in each phase, as in `forward 3.2 ms`; empty without one."""
    total = metrics.iteration_ms
    if total is None:
        return ""
    times = {phase: float(iteration_activity(metrics.trace, phase).loc[rank, column]) for phase in ITERATION_PARTS}
    return ", ".join(f"{phase} {ms_text(ms)}" for phase, ms in times.items() if ms > 0.01 * total)
