"""Determines the time zone of a DeepSpeed log's clock."""

from __future__ import annotations

from ebbtide.profiler.importers.nvml_monitor.monitor import Coverage
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.text_log import overlap, zone_by_overlap
from ebbtide.profiler.trace import TraceBuilder


def clock_offset_ns(
    source: Source, builder: TraceBuilder, zone: int | None, span: tuple[int, int], monitors: Coverage | None
) -> int:
    """Return how far the log's clock is ahead of UTC in ns.

    Args:
        source: The log.
        builder: The trace, which receives a note for each assumption.
        zone: The offset that the log itself states; None if it states none.
        span: First and last time of the log in ns.
        monitors: What monitor files of the same run cover; None if there are none with dates.

    Raises:
        SourceError: The log and the monitor files do not overlap in time.
    """
    if monitors is None:
        if zone is None:
            builder.note("the log has local times without a time zone: they are read as UTC")
        return zone or 0
    match = (zone, True) if zone is not None else zone_by_overlap(span, monitors.span_ns)
    share = overlap(span, monitors.span_ns, match[0]) if match is not None else 0.0
    if match is None or share <= 0:
        raise SourceError(f"{source} and {monitors.name} do not overlap in time: they are not from one run")
    offset_ns, unique = match
    if share < 0.95:
        builder.note(f"{monitors.name} covers only {share:.0%} of the time of the log")
    if not unique:
        builder.note(f"the time zone of the log is a guess ({_zone_name(offset_ns)}): {monitors.name} fits several")
    elif zone is None and offset_ns:
        builder.note(f"the clock of the log is assumed to be {_zone_name(offset_ns)}, by the times of {monitors.name}")
    return offset_ns


def _zone_name(offset_ns: int) -> str:
    return f"UTC{offset_ns / 3.6e12:+.4g} h"
