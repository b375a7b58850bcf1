"""The panels of a figure, and the scale that panels of one name share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ebbtide.analysis.plot.styles import BORDER_COLOR, area_properties, line_properties
from ebbtide.analysis.plot.views import View
from ebbtide.analysis.timeline.axis import TimeAxis
from ebbtide.analysis.timeline.panels import Scale, TimelinePanel, value_scale
from ebbtide.analysis.timeline.stack import TimelineStack
from ebbtide.analysis.timeline.styles import LEVEL, PHASE_COLORS, PHASE_OPACITY

# A band that is a smaller share of the axis would be invisible: it is drawn as a line of this width in points.
_MIN_BAND_SHARE = 1 / 500
_NARROW_WIDTH = 1.1


@dataclass(frozen=True)
class PlotPanel(ABC):
    """One panel of a figure, of one view; subclasses draw it."""

    view: View  # Trace, rank and interval.
    height: float  # Inches.
    name: str = field(kw_only=True, default="")  # Panels of one name share a scale.
    level_required: bool = field(kw_only=True, default=False)  # Whether the level must be on the scale.
    remarks: Sequence[str] = field(kw_only=True, default=())  # Remarks for the line above the panel.

    @property
    def largest(self) -> float:
        """Largest value of its lines, bytes or bytes/s."""
        return 1.0

    @property
    def level(self) -> float | None:
        """Capacity in bytes or peak in bytes/s, a line across; None where unknown."""
        return None

    @property
    def on_gpu(self) -> bool:
        """Whether its times are those of the GPU."""
        return False

    @abstractmethod
    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        """Draw everything except phases; return the artists that the legend lists."""


@dataclass(frozen=True)
class ContentPanel(PlotPanel):
    """A panel that shows lines; subclasses draw them."""

    content: TimelinePanel

    @property
    def largest(self) -> float:
        return self.content.largest

    @property
    def level(self) -> float | None:
        return self.content.level

    @property
    def on_gpu(self) -> bool:
        return self.content.is_link


def content_fields(content: TimelinePanel) -> dict[str, Any]:
    """Return the fields of a `ContentPanel` that follow from its lines."""
    note = content.reduction_note
    return {"content": content, "name": content.name, "remarks": () if note is None else (note,)}


def draw_level(axes: Axes, view: View, level: float, scale: Scale, label: str) -> list[Artist]:
    """Draw a line across at a level, as long as the view; off the scale only its legend entry."""
    style = line_properties(LEVEL)
    if abs(level) > scale.top:
        return list(axes.plot([], [], label=f"{label}, off scale", **style))
    length = (view.axis.end_ns - view.axis.start_ns) / view.axis.unit_ns
    return list(axes.plot([0, length], [level / scale.size] * 2, label=label, **style))


def shared_scale(panels: Sequence[PlotPanel]) -> Scale:
    """Return the scale of panels of one name."""
    with_level = [(panel.level, panel.level_required) for panel in panels if panel.level is not None]
    return value_scale(
        max(panel.largest for panel in panels),
        [level for level, _ in with_level],
        [level for level, required in with_level if required],
        rates=panels[0].name == "link",
    )


def draw_stack(
    axes: Axes, stack: TimelineStack, axis: TimeAxis, size: float = 1.0, bottom: float = 0.0, prefix: str = ""
) -> list[Artist]:
    """Draw the areas of a stack.

    Args:
        size: Value of one unit of the axes.
        bottom: Where the stack begins, in units of the axes.

    Returns:
        The areas from the top, in the order in which a legend lists them.
    """
    edges, borders = axis.x(stack.edges), [bottom + border / size for border in stack.borders]
    drawn: list[Artist] = []
    for layer, low, high in zip(stack.layers, borders[:-1], borders[1:], strict=True):
        label = f"{prefix}{layer.name}"
        drawn.append(axes.stairs(high, edges, baseline=low, fill=True, label=label, **area_properties(layer.style)))
    return drawn[::-1]


def draw_phases(axes: Axes, view: View, on_gpu: bool) -> list[Artist]:
    """Draw a band per phase, also of an unfinished iteration, where there is room for them. Returns the artists that
    the legend lists."""
    if not view.has_room_for_phases:
        return []
    drawn: list[Artist] = []
    phases = view.phases(on_gpu)
    full_height = axes.get_xaxis_transform()
    for phase, color in PHASE_COLORS.items():
        rows = phases[phases["phase"] == phase]
        if rows.empty:
            continue
        style: dict[str, Any] = {"color": color, "alpha": PHASE_OPACITY[phase], "lw": 0}
        left, right = (view.axis.x(rows[column].to_numpy(np.int64)) for column in ("start_ns", "end_ns"))
        axes.broken_barh(list(zip(left, right - left, strict=True)), (0, 1), transform=full_height, zorder=0, **style)
        narrow = right - left < view.axis.length_ns / view.axis.unit_ns * _MIN_BAND_SHARE
        middles = (left + right)[narrow] / 2
        axes.vlines(middles, 0, 1, transform=full_height, color=color, lw=_NARROW_WIDTH, zorder=0.7)
        drawn.append(Patch(label=phase, **style))
    for border in view.axis.x(view.iteration_spans(on_gpu)["start_ns"].to_numpy(np.int64)[1:]):
        axes.axvline(border, color=BORDER_COLOR, lw=0.6, zorder=0.5)
    return drawn


@dataclass(frozen=True)
class PhasesPanel(PlotPanel):
    """Phases alone, of a trace without anything else to draw."""

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        axes.set_yticks([])
        axes.set_ylabel("phases")
        return []
