"""What the page shows of one rank: its timeline, windows, iterations and link."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ebbtide.analysis.metrics.iteration_stats import Iterations
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link import Link
from ebbtide.analysis.metrics.substeps.breakdown import sub_steps
from ebbtide.analysis.metrics.substeps.operations import follow_each_other, named_ops
from ebbtide.analysis.metrics.windows import Windows, find_windows
from ebbtide.analysis.report import tooltips
from ebbtide.analysis.report.boxes import Choice, guaranteed_boxes, op_boxes, phase_boxes, window_boxes
from ebbtide.analysis.report.columns import Table
from ebbtide.analysis.report.lines import Panel, clock, panels
from ebbtide.analysis.report.tables import iteration_table, link_tables, step_tables, window_tables
from ebbtide.analysis.report.timeline import Drawing, Strip, timeline
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text


@dataclass(frozen=True)
class RankView:
    """timeline: what Bokeh embeds, None where nothing was recorded that could be drawn. windows: their tables;
    windows_line says what they are, or why there are none. steps: of the update, where its sub-steps are known."""

    rank: int
    timeline: dict[str, Any] | None
    unit: str
    panels: list[Panel]
    timeline_notes: list[str]
    windows: list[Table]
    windows_line: str
    steps: list[Table]
    iterations: Table | None
    link: list[Table]


def rank_view(
    trace: Trace, rank: int, spread: Iterations, link: Link, min_bytes: int, points: int, boxes: int, rows: int
) -> RankView:
    """points: of all lines; boxes: of each kind; rows: of each table; the most to show."""
    found: Windows | None = None
    try:
        found = find_windows(trace, min_bytes, [rank])
        line = _windows_line(found, min_bytes)
    except TraceError as error:
        line = str(error)
    drawn = _drawing(trace, rank, found, min_bytes, points, boxes)
    return RankView(
        rank=rank,
        timeline=timeline(drawn[0]) if drawn else None,
        unit=drawn[0].clock.unit if drawn else "s",
        panels=list(drawn[0].panels) if drawn else [],
        timeline_notes=drawn[1] if drawn else [],
        windows=window_tables(found.windows, found.guaranteed, rows) if found and found.windows else [],
        windows_line=line,
        steps=_steps(trace, rank, rows),
        iterations=iteration_table(spread, rank, rows),
        link=link_tables(link, rank),
    )


def _steps(trace: Trace, rank: int, rows: int) -> list[Table]:
    try:
        return step_tables(sub_steps(trace, [rank]), rows)
    except TraceError:
        return []


def _windows_line(found: Windows, min_bytes: int) -> str:
    least = bytes_text(min_bytes)
    if not found.windows:
        return f"Never are {least} free: try a smaller --min-bytes."
    line = f"When at least {least} of {bytes_text(found.capacity_bytes)} are free (--min-bytes)"
    if not found.guaranteed and any(window.iteration is not None for window in found.windows):
        return f"{line}; no place of the iteration has that in every iteration."
    return f"{line}."


def _drawing(
    trace: Trace, rank: int, found: Windows | None, min_bytes: int, points: int, boxes: int
) -> tuple[Drawing, list[str]] | None:
    at = clock(trace, rank)
    if at is None:
        return None
    shown = panels(trace, rank, at, points)
    some, always = (found.windows, found.guaranteed) if found else ([], [])
    choose = Choice(trace, rank, len(some), len(always), boxes)
    strips = []
    if len(trace.phases(rank)):
        strips.append(Strip("phases", phase_boxes(trace, rank, at, choose), tooltips.PHASE))
    if trace.phases(rank)["gpu_start_ns"].notna().any():
        strips.append(Strip("on GPU", phase_boxes(trace, rank, at, choose, on_gpu=True), tooltips.PHASE))
    each = Choice(trace, rank, len(trace.ops(rank)), 0, boxes)
    for resource, rows in _lanes(trace, rank):
        strips.append(Strip(resource, op_boxes(rows, at, each), tooltips.OP))
    if always:
        free = guaranteed_boxes(trace, rank, at, min_bytes, choose)
        strips.append(Strip("always free", {"window": free}, tooltips.GUARANTEED, 0.5))
    if not strips and not shown:
        return None
    windows = window_boxes(trace, rank, at, some, choose) if some else None
    notes = [note for panel in shown for note in panel.notes]
    if choose.step > 1:
        notes.append(f"phases and windows are drawn for one iteration in {choose.step}")
    if choose.left_out:
        notes.append(f"the {choose.left_out:,} shortest phases and windows are not drawn")
    if each.step > 1 or each.left_out:
        notes.append("not all sub-steps are drawn (`ebbtide export` has all)")
    spans = intervals(trace, rank, device_times=False).spans
    starts, ends = at(spans["start_ns"].to_numpy()), at(spans["end_ns"].to_numpy())
    numbers = list(zip(map(int, spans["iteration"]), map(float, starts), map(float, ends), strict=True))
    return Drawing(at, strips, shown, numbers, windows), notes


def _lanes(trace: Trace, rank: int) -> Iterator[tuple[str, pd.DataFrame]]:
    """(name, sub-steps) of each lane: DeepSpeed's follow each other, a schedule's run on all resources at once."""
    rows = named_ops(trace, rank)
    if follow_each_other(rows):
        yield "sub-steps", rows
        return
    for resource in ("host", "cpu", "gpu", "h2d", "d2h"):
        if (rows["resource"] == resource).any():
            yield resource, rows[rows["resource"] == resource]
