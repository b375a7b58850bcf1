"""When a trace begins and ends, computed rank by rank: reading all tables of a large job for it takes minutes."""

from __future__ import annotations

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.profiler.trace import Trace


@once_per_trace
def rank_span_ns(trace: Trace, rank: int) -> tuple[int, int] | None:
    """Return the first and the last time of anything recorded of a rank; None if nothing was."""
    return trace.span_ns(rank)


def trace_span_ns(trace: Trace) -> tuple[int, int] | None:
    """Return the first and the last time of anything recorded of all ranks; None if nothing was."""
    spans = [span for rank in trace.ranks if (span := rank_span_ns(trace, rank)) is not None]
    return (min(start for start, _ in spans), max(end for _, end in spans)) if spans else None
