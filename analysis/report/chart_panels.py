"""The panels of a timeline in the units of their axes, as the page draws them and lists their lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.timeline.activity import activity_lanes
from ebbtide.analysis.timeline.axis import SCREEN_STEPS, Resolution, TimeAxis
from ebbtide.analysis.timeline.link import link_panel
from ebbtide.analysis.timeline.memory import device_memory_panel, host_memory_panel
from ebbtide.analysis.timeline.panels import Scale, TimelineLine, TimelinePanel, TimelineStack, value_scale
from ebbtide.analysis.timeline.styles import HOST_MEMORY_DASHES, LineStyle
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

# Steps of all lanes: a few per dot of a screen.
_MAX_SLOTS = 8000
_MIN_LINE_WIDTH = 1.0


# Lanes of the activity of the GPU by name, from the top: shares of the time.
ChartLanes = Mapping[str, TimelineStack]


def chart_lanes(trace: Trace, rank: int, axis: TimeAxis, max_points: int) -> tuple[ChartLanes, list[str]]:
    """Return the lanes of a rank's GPU, none where kernels were not recorded, and remarks on how they are drawn. All
    areas have at most `max_points` together."""
    slots = max(1, min(max_points // 8, _MAX_SLOTS))
    lanes = activity_lanes(trace, rank, axis, Resolution(slots, steps_per_slot=1))
    slots_ns = {stack.slot_ns for stack in lanes.values() if stack.slot_ns is not None}
    notes = [f"activity: shares of {ms_text(slot_ns / 1e6)} each" for slot_ns in slots_ns]
    return {name: lanes[name] for name in reversed(lanes)}, notes


@dataclass(frozen=True)
class ChartLine:
    """A step function in the units of its axes; a value holds until the next one."""

    key: str  # Name of its glyph, unique on the timeline.
    label: str  # Name in the list of lines.
    x: Floats  # Times.
    y: Floats  # Values, with the sign.
    sign: int  # -1 for a line that is drawn downwards, else 1.
    lowest: Floats | None  # Smallest values of a band; None for a plain line.
    above_peak: Floats  # Times of rates above the link's peak.
    style: LineStyle  # Colour, width and dash.

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
    """Lines of one unit, and areas behind them."""

    name: str  # `memory`, `host memory` or `link`.
    lines: Sequence[ChartLine]
    scale: Scale  # Unit and end of the value axis.
    level: float | None  # Capacity or peak in the unit; None where unknown.
    level_label: str  # Name and value of the level.
    free_pool: str | None  # Pool whose line free memory is above, up to the level; None where there is no such line.
    notes: Sequence[str]  # Remarks on how the lines are drawn.
    stack: TimelineStack | None = None  # Areas behind the lines, bytes; None where there are none.

    @property
    def unit(self) -> str:
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
    def is_level_off_scale(self) -> bool:
        """Whether the level is above the end of the axis."""
        return self.level is not None and self.level > self.top


def chart_panels(trace: Trace, rank: int, axis: TimeAxis, max_points: int) -> list[ChartPanel]:
    """Return the panels that data was recorded for: memory of the device and of the host, the link. All lines have at
    most `max_points` together."""
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
        stack=panel.stack,
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
