"""The panels of a timeline in the units of their axes, as the page draws them and lists their lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.report.chart_stacks import ChartArea, ChartStack, chart_stack
from ebbtide.analysis.timeline.axis import TimeAxis
from ebbtide.analysis.timeline.link import link_panel
from ebbtide.analysis.timeline.memory import device_memory_panel, host_memory_panel
from ebbtide.analysis.timeline.panels import Scale, TimelineLine, TimelinePanel, value_scale
from ebbtide.analysis.timeline.reduction import SCREEN_STEPS, Resolution
from ebbtide.analysis.timeline.styles import HOST_MEMORY_DASHES, LineStyle
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.profiler.trace import Trace

_MIN_LINE_WIDTH = 1.0


@dataclass(frozen=True)
class ChartLine:
    """A step function in the units of its axes; a value holds until the next one.

    Attributes:
        key: Name of its glyph, unique on the timeline.
        label: Name in the list of lines.
        x: Times.
        y: Values, with the sign.
        sign: -1 for a line that is drawn downwards, else 1.
        lowest: Smallest values of a band; None for a plain line.
        above_peak: Times of rates above the link's peak.
        style: Colour, width and dash.
    """

    key: str
    label: str
    x: Floats
    y: Floats
    sign: int
    lowest: Floats | None
    above_peak: Floats
    style: LineStyle

    @property
    def width(self) -> float:
        """Width in pixels."""
        return max(self.style.width, _MIN_LINE_WIDTH)

    @property
    def dash(self) -> list[int]:
        """Lengths of dashes and gaps in pixels; empty for a solid line."""
        return [max(1, round(length * self.width)) for length in self.style.dash]


@dataclass(frozen=True)
class ChartPanel:
    """Lines of one unit, and areas behind them.

    Attributes:
        name: `memory`, `host memory` or `link`.
        lines: Its lines.
        scale: Unit and end of the value axis.
        level: Capacity or peak in the unit; None where unknown.
        level_label: Name and value of the level.
        free_pool: Pool whose line free memory is above, up to the level; None where there is no such line.
        notes: Remarks on how the lines are drawn.
        stack: Areas behind the lines; None where there are none.
    """

    name: str
    lines: Sequence[ChartLine]
    scale: Scale
    level: float | None
    level_label: str
    free_pool: str | None
    notes: Sequence[str]
    stack: ChartStack | None = None

    @property
    def unit(self) -> str:
        """Unit of the values."""
        return self.scale.unit

    @property
    def top(self) -> float:
        """End of the value axis in its unit."""
        return self.scale.top / self.scale.size

    @property
    def bottom(self) -> float:
        """Start of the value axis in its unit."""
        return -self.top if self.name == "link" else 0.0

    @property
    def areas(self) -> Sequence[ChartArea]:
        """Areas from the top, in the order in which the page lists them."""
        return () if self.stack is None else self.stack.areas[::-1]

    @property
    def is_level_off_scale(self) -> bool:
        """Whether the level is above the end of the axis."""
        return self.level is not None and self.level > self.top


def chart_panels(trace: Trace, rank: int, axis: TimeAxis, max_points: int) -> list[ChartPanel]:
    """Return the panels that data was recorded for: memory of the device and of the host, the link.

    Args:
        trace: The trace.
        rank: The rank.
        axis: The time axis.
        max_points: Most points of all lines together.
    """
    kinds = min(trace.transfers(rank)["host_memory"].nunique(dropna=False), len(HOST_MEMORY_DASHES))
    line_count = trace.memory(rank)["pool"].nunique() + len(DIRECTIONS) * max(1, kinds)
    # An area takes half the bytes of a line: its times are those of the whole stack.
    resolution = Resolution(slots=max(1, min(max_points // line_count, SCREEN_STEPS)), steps_per_slot=1)
    panels = (
        device_memory_panel(trace, rank, axis, resolution),
        host_memory_panel(trace, rank, axis, resolution),
        link_panel(trace, rank, axis, resolution),
    )
    return [_chart_panel(panel, axis) for panel in panels if panel is not None and not panel.is_empty]


def _chart_panel(panel: TimelinePanel, axis: TimeAxis) -> ChartPanel:
    levels = [] if panel.level is None else [panel.level]
    scale = value_scale(panel.largest, levels, rates=panel.is_link)
    lines = [_chart_line(panel, line, axis, scale) for line in panel.lines]
    notes = []
    if panel.reduction_note is not None:
        notes.append(f"{panel.reduction_note} (`ebbtide plot --iterations` draws every sample of some iterations)")
    for direction in DIRECTIONS:
        times = [line.above_peak_ns for line in panel.lines if line.name == direction]
        count = len(np.unique(np.concatenate([np.empty(0, np.int64), *times])))
        if count:
            notes.append(f"{count:,} × {direction} above the link's peak, which is impossible: marked at the edge")
    has_free_pool = any(line.name == panel.free_pool for line in panel.lines)
    return ChartPanel(
        name=panel.name,
        lines=lines,
        scale=scale,
        level=None if panel.level is None else panel.level / scale.size,
        level_label=panel.level_label,
        free_pool=panel.free_pool if has_free_pool else None,
        notes=notes,
        stack=None if panel.stack is None else chart_stack(panel.name, panel.stack, axis, scale.size),
    )


def _chart_line(panel: TimelinePanel, line: TimelineLine, axis: TimeAxis, scale: Scale) -> ChartLine:
    sign = -1 if line.name == "d2h" and panel.is_link else 1
    return ChartLine(
        key=f"{panel.name}/{line.label}",
        label=line.label,
        x=axis.x(line.edges),
        y=sign * np.append(line.values, line.values[-1]) / scale.size,
        sign=sign,
        lowest=None if line.lowest is None else np.append(line.lowest, line.lowest[-1]) / scale.size,
        above_peak=axis.x(line.above_peak_ns),
        style=line.style,
    )
