"""Collects the content of a rank's timeline: strips of boxes, panels of lines, windows, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.windows import Windows
from ebbtide.analysis.report.chart_boxes import (
    PHASE_TOOLTIP,
    RECURRING_TOOLTIP,
    SUBSTEP_TOOLTIP,
    ChartBoxes,
    phase_chart_boxes,
    recurring_chart_boxes,
    substep_chart_boxes,
    window_chart_boxes,
)
from ebbtide.analysis.report.chart_panels import ChartLanes, ChartPanel, chart_lanes, chart_panels
from ebbtide.analysis.timeline.axis import BoxSampler, TimeAxis, recorded_interval
from ebbtide.analysis.timeline.boxes import phase_boxes, recurring_boxes, substep_lanes, window_boxes
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.profiler.trace import Trace


class IterationLabel(NamedTuple):
    """The number of an iteration, with its start and end in the unit of the time axis."""

    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Strip:
    """A row of boxes above the panels."""

    name: str  # Label of the row.
    boxes: dict[str, ChartBoxes]  # Boxes by colour.
    tooltip: str  # Template of what hovering shows.


@dataclass(frozen=True)
class TimelineContent:
    """Everything that a timeline shows; it has at least one strip, panel or lane."""

    axis: TimeAxis  # The time axis. 0 is the start of the first iteration, or of the trace where it has none.
    initial: tuple[int, int]  # Start and end of what is shown at first, ns: the iterations.
    strips: Sequence[Strip]  # Rows of boxes, from the top.
    activity: ChartLanes | None  # Lanes of the GPU's activity, below the strips; None where kernels were not recorded.
    panels: Sequence[ChartPanel]  # Panels of lines, from the top.
    iterations: Sequence[IterationLabel]  # Numbers of iterations.
    windows: ChartBoxes | None  # Windows of free memory, boxes of the first panel; None where there are none.
    notes: Sequence[str]  # Remarks on what is drawn, and how.


class DetailLimits(NamedTuple):
    """Limits on what the page shows of a rank: points of all lines, boxes of each kind, rows of each table."""

    points: int
    boxes: int
    rows: int


def timeline_content(trace: Trace, rank: int, windows: Windows | None, limits: DetailLimits) -> TimelineContent | None:
    """Collect the content of a rank's timeline; None where nothing was recorded that it could show. `windows` is None
    where they are unknown."""
    recorded = recorded_interval(trace, rank)
    if recorded is None:
        return None
    spans = intervals(trace, rank, device_times=False).spans
    starts, ends = (spans[column].to_numpy(np.int64) for column in ("start_ns", "end_ns"))
    initial = (int(starts.min()), int(ends.max())) if len(spans) else recorded
    start, end = recorded[0], max(recorded[1], recorded[0] + 1)
    axis = TimeAxis(initial[0], start, end, end - start)
    panels = chart_panels(trace, rank, axis, limits.points)
    activity = chart_lanes(trace, rank, axis, limits.points)
    builder = _BoxBuilder(trace, rank, axis, windows, starts, limits.boxes)
    strips = builder.strips()
    if not strips and not panels and activity is None:
        return None
    labels = zip(map(int, spans["iteration"]), map(float, axis.x(starts)), map(float, axis.x(ends)), strict=True)
    return TimelineContent(
        axis=axis,
        initial=initial,
        strips=strips,
        activity=activity,
        panels=panels,
        iterations=[IterationLabel(*label) for label in labels],
        windows=builder.windows(panels[0]) if panels else None,
        notes=[
            *(activity.notes if activity is not None else ()),
            *(note for panel in panels for note in panel.notes),
            *builder.notes(),
        ],
    )


class _BoxBuilder:
    """Builds the boxes of a rank, within the limit on their number."""

    def __init__(
        self, trace: Trace, rank: int, axis: TimeAxis, windows: Windows | None, starts: Ints, max_boxes: int
    ) -> None:
        self._trace = trace
        self._rank = rank
        self._axis = axis
        self._windows = windows
        phases = trace.phases(rank)
        self._has_gpu_times = bool(phases["gpu_start_ns"].notna().any())
        counts = [len(phases) * (2 if self._has_gpu_times else 1)]
        if windows is not None:
            counts += [len(windows.windows), len(windows.guaranteed) * len(starts)]
        self._sampler = BoxSampler(starts, max(counts), max_boxes)
        self._substep_sampler = BoxSampler(starts, len(trace.ops(rank)), max_boxes)

    def strips(self) -> list[Strip]:
        strips = []
        if len(self._trace.phases(self._rank)):
            strips.append(self._phases("phases", on_gpu=False))
        if self._has_gpu_times:
            strips.append(self._phases("on GPU", on_gpu=True))
        for name, rows in substep_lanes(self._trace, self._rank):
            boxes = self._substep_sampler.sample(rows)
            strips.append(Strip(name, substep_chart_boxes(boxes, self._axis), SUBSTEP_TOOLTIP))
        if self._windows is not None and self._windows.guaranteed:
            recurring = recurring_boxes(self._trace, self._rank, self._windows.min_bytes)
            boxes = recurring_chart_boxes(self._sampler.sample(recurring), self._axis)
            strips.append(Strip("always free", {"recurring": boxes}, RECURRING_TOOLTIP))
        return strips

    def _phases(self, name: str, on_gpu: bool) -> Strip:
        rows = self._sampler.sample(phase_boxes(self._trace, self._rank, on_gpu))
        return Strip(name, phase_chart_boxes(rows, self._axis), PHASE_TOOLTIP)

    def windows(self, panel: ChartPanel) -> ChartBoxes | None:
        if self._windows is None or not self._windows.windows or panel.level is None:
            return None
        rows = self._sampler.sample(window_boxes(self._trace, self._rank, self._windows.windows))
        return window_chart_boxes(rows, self._axis, panel.level, panel.scale.size)

    def notes(self) -> list[str]:
        notes = []
        if self._sampler.stride > 1:
            notes.append(f"phases and windows of one iteration in {self._sampler.stride} are drawn")
        if self._sampler.dropped:
            notes.append(f"the {self._sampler.dropped:,} shortest phases and windows are not drawn")
        if self._substep_sampler.stride > 1 or self._substep_sampler.dropped:
            notes.append("not all sub-steps are drawn (`ebbtide export` has all)")
        return notes
