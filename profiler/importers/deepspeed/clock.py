"""What a DeepSpeed log's clock is ahead of UTC."""

from __future__ import annotations

from ebbtide.profiler.importers.nvml_monitor.importer import Coverage
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.text_log import overlap, zone_by_overlap
from ebbtide.profiler.trace import TraceBuilder


def ahead_ns(
    source: Source, builder: TraceBuilder, zone: int | None, span: tuple[int, int], beside: Coverage | None
) -> int:
    """ns to take off the log's times. zone: what the log itself tells of that; span: from its first time to its last.

    Raises SourceError where it does not meet the monitor files.
    """
    if beside is None:
        if zone is None:
            builder.note("the log tells local times without their zone: they are taken as UTC")
        return zone or 0
    found = (zone, True) if zone is not None else zone_by_overlap(span, beside.span_ns)
    share = overlap(span, beside.span_ns, found[0]) if found is not None else 0.0
    if found is None or share <= 0:
        raise SourceError(f"{source} and {beside.name} do not meet in time: they are not of one run")
    shift, only = found
    if share < 0.95:
        builder.note(f"{beside.name} covers only {share:.0%} of the time of the log")
    if not only:
        builder.note(f"the time zone of the log is a guess ({_utc(shift)}): {beside.name} covers several")
    elif zone is None and shift:
        builder.note(f"the log's clock is taken to be {_utc(shift)}, by the times of {beside.name}")
    return shift


def _utc(shift: int) -> str:
    return f"UTC{shift / 3.6e12:+.4g} h"
