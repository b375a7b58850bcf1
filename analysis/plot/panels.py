"""The interface of the panels of a figure, and the scale that panels of one name share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from ebbtide.analysis.plot.styles import line_properties
from ebbtide.analysis.plot.views import View
from ebbtide.analysis.timeline.panels import Scale, TimelinePanel, value_scale
from ebbtide.analysis.timeline.styles import LEVEL


class PlotPanel(Protocol):
    """One panel of a figure, of one view.

    Attributes:
        view: Trace, rank and interval.
        name: Panels of one name share a scale.
        largest: Largest value of its lines, bytes or bytes/s.
        level: Capacity in bytes or peak in bytes/s, a line across; None where unknown.
        level_required: Whether the level must be on the scale.
        height: Inches.
        on_gpu: Whether its times are those of the GPU.
        remarks: Remarks for the line above the panel.
    """

    @property
    def view(self) -> View: ...
    @property
    def name(self) -> str: ...
    @property
    def largest(self) -> float: ...
    @property
    def level(self) -> float | None: ...
    @property
    def level_required(self) -> bool: ...
    @property
    def height(self) -> float: ...
    @property
    def on_gpu(self) -> bool: ...
    @property
    def remarks(self) -> Sequence[str]: ...

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        """Draw everything except phases; return the artists that the legend lists."""
        ...


@dataclass(frozen=True)
class ContentPanel:
    """The part of a `PlotPanel` that follows from the lines it shows; subclasses draw them."""

    view: View
    content: TimelinePanel
    height: float
    level_required: bool = False

    @property
    def name(self) -> str:
        return self.content.name

    @property
    def largest(self) -> float:
        return self.content.largest

    @property
    def level(self) -> float | None:
        return self.content.level

    @property
    def on_gpu(self) -> bool:
        return self.content.is_link

    @property
    def remarks(self) -> Sequence[str]:
        note = self.content.reduction_note
        return () if note is None else (note,)


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
