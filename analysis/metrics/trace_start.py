"""When a trace begins, computed rank by rank: reading all tables of a large job for it takes minutes."""

from __future__ import annotations

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.profiler.trace import Trace


@once_per_trace
def rank_start_ns(trace: Trace, rank: int) -> int | None:
    """Return the first time of anything recorded of a rank; None if nothing was."""
    span = trace.span_ns(rank)
    return None if span is None else span[0]


def trace_start_ns(trace: Trace) -> int | None:
    """Return the first time of anything recorded of all ranks; None if nothing was."""
    starts = (rank_start_ns(trace, rank) for rank in trace.ranks)
    return min((start for start in starts if start is not None), default=None)
