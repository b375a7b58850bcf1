"""Sums figures over a whole trace, whether or not it has iterations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.activity.busy_time import busy_time
from ebbtide.analysis.metrics.devices import capacity_bytes, free_pool, memory_timeline
from ebbtide.analysis.metrics.link_throughput import traffic
from ebbtide.analysis.timeseries.step_functions import length
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class Totals:
    """Figures of a whole trace, its warm-up included; None for figures that were not recorded."""

    span_ms: float | None  # From its first to its last record.
    h2d_bytes: int | None  # Bytes moved to the device, summed over ranks, from copies or else from sampled counters.
    d2h_bytes: int | None  # Bytes moved to the host.
    min_free_bytes: int | None  # Least free memory of any rank (capacity - `Summary.free_pool`).
    compute_ms: float | None  # Time in which compute kernels run, summed over ranks.
    communication_ms: float | None  # Time in which collectives run, summed over ranks.
    copy_ms: float | None  # Time in which copies run, summed over ranks with recorded kernels.
    # Time between the first and the last activity of a GPU in which nothing runs on it, summed over ranks.
    idle_ms: float | None


def whole_trace(trace: Trace) -> Totals:
    """Sum the figures of a trace."""
    span = trace.span_ns()
    busy = [times for rank in trace.ranks if (times := busy_time(trace, rank)) is not None]
    idle = [length(times.recorded) - length(times.all) for times in busy]
    return Totals(
        span_ms=None if span is None else (span[1] - span[0]) / 1e6,
        h2d_bytes=_moved(trace, "h2d"),
        d2h_bytes=_moved(trace, "d2h"),
        min_free_bytes=_min_free(trace),
        compute_ms=_sum_ms([length(times.compute) for times in busy]),
        communication_ms=_sum_ms([length(times.communication) for times in busy]),
        copy_ms=_sum_ms([length(times.copy) for times in busy]),
        idle_ms=_sum_ms(idle),
    )


def _moved(trace: Trace, direction: str) -> int | None:
    sizes = []
    for rank in trace.ranks:
        moved, span = traffic(trace, rank, direction), trace.span_ns(rank)
        if moved is None or span is None:
            continue
        starts, ends = (np.array([moment], np.int64) for moment in span)
        size = float(moved.total(ends)[0] - moved.total(starts)[0])
        sizes += [] if np.isnan(size) else [size]
    return round(sum(sizes)) if sizes else None


def _sum_ms(lengths_ns: list[int]) -> float | None:
    return sum(lengths_ns) / 1e6 if lengths_ns else None


def _min_free(trace: Trace) -> int | None:
    pool, sizes = free_pool(trace), []
    for rank in trace.ranks:
        _, used = memory_timeline(trace, rank, pool or "")
        capacity = capacity_bytes(trace, rank)
        if len(used) and capacity is not None:
            sizes.append(capacity - int(used.max()))
    return max(min(sizes), 0) if sizes else None
