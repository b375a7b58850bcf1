"""Stacks of areas of a timeline in the units of their axes, as the page draws them and lists their areas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.timeline.activity import activity_lanes
from ebbtide.analysis.timeline.axis import TimeAxis
from ebbtide.analysis.timeline.reduction import Resolution
from ebbtide.analysis.timeline.stack import TimelineStack
from ebbtide.analysis.timeline.styles import AreaStyle
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

# Steps of all lanes: a few per dot of a screen.
_MAX_SLOTS = 8000


@dataclass(frozen=True)
class ChartArea:
    """An area of a stack; a value holds until the next one.

    Attributes:
        key: Name of its glyph, unique on the timeline.
        label: Name in the list of areas.
        top: Upper border; the lower one is that of the area below, or 0.
        style: Colour and hatch.
    """

    key: str
    label: str
    top: Floats
    style: AreaStyle


@dataclass(frozen=True)
class ChartStack:
    """Areas one above the other, from the bottom, with their common times."""

    x: Floats
    areas: Sequence[ChartArea]


@dataclass(frozen=True)
class ChartLane:
    """A lane of the activity of the GPU: its name, and areas in percent of the time."""

    name: str
    stack: ChartStack


@dataclass(frozen=True)
class ChartLanes:
    """The lanes of activity from the top, and a remark on how they are drawn."""

    lanes: Sequence[ChartLane]
    notes: Sequence[str]

    @property
    def areas(self) -> list[ChartArea]:
        """Areas of all lanes, in the order in which the page lists them."""
        return [area for lane in self.lanes for area in lane.stack.areas]


def chart_stack(name: str, stack: TimelineStack, axis: TimeAxis, size: float) -> ChartStack:
    """Return a stack in the units of its axes.

    Args:
        name: Name of the panel or lane.
        stack: The areas.
        axis: The time axis.
        size: Value of one unit of the value axis.
    """
    tops = [np.append(border, border[-1]) / size for border in stack.borders[1:]]
    areas = [
        ChartArea(f"{name}/category {layer.name}", layer.name, top, layer.style)
        for layer, top in zip(stack.layers, tops, strict=True)
    ]
    return ChartStack(axis.x(stack.edges), areas)


def chart_lanes(trace: Trace, rank: int, axis: TimeAxis, max_points: int) -> ChartLanes | None:
    """Return the lanes of a rank's GPU; None where kernels were not recorded.

    Args:
        trace: The trace.
        rank: The rank.
        axis: The time axis.
        max_points: Most points of all areas together.
    """
    slots = max(1, min(max_points // 8, _MAX_SLOTS))
    lanes = activity_lanes(trace, rank, axis, Resolution(slots, steps_per_slot=1))
    if not lanes:
        return None
    slot_ns = lanes[0].stack.slot_ns
    note = [] if slot_ns is None else [f"activity: shares of {ms_text(slot_ns / 1e6)} each"]
    return ChartLanes(
        [ChartLane(lane.name, chart_stack(f"activity/{lane.name}", lane.stack, axis, 0.01)) for lane in lanes[::-1]],
        note,
    )
