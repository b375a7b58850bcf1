"""What a panel is, and the one scale that panels of the same name share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from ebbtide.analysis.plot.styles import LEVEL
from ebbtide.analysis.plot.views import View
from ebbtide.units import bytes_unit

# A level (capacity, peak) more than this many times above the highest line would press all lines flat: it is said
# then, not drawn.
_MOST_ABOVE = 4.0
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))


@dataclass(frozen=True)
class Scale:
    """top: where the axis ends, bytes or bytes/s. size: of one unit."""

    top: float
    size: float
    unit: str


class Panel(Protocol):
    """A picture of one kind for one view.

    name: panels of one name share a scale. largest: the highest value of its lines; level: of the line across, None
    where not known; whole: whether the level must be on the scale. Both bytes or bytes/s. height: inches. on_gpu:
    whether its times are the GPU's. remarks: what is to be said above it.
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
    def whole(self) -> bool: ...
    @property
    def height(self) -> float: ...
    @property
    def on_gpu(self) -> bool: ...
    @property
    def remarks(self) -> Sequence[str]: ...

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        """Draw all but the phases; returns what the legend is to explain."""
        ...


def draw_level(axes: Axes, view: View, level: float, scale: Scale, text: str) -> list[Artist]:
    """A line across at a level, as long as the view, or only its entry for the legend where it is off the scale."""
    if abs(level) > scale.top:
        return list(axes.plot([], [], label=f"{text}, off scale", **LEVEL))
    return list(axes.plot([0, (view.end - view.start) / view.unit_ns], [level / scale.size] * 2, label=text, **LEVEL))


def shared_scale(panels: Sequence[Panel]) -> Scale:
    """The scale of panels of one name."""
    top = max(panel.largest for panel in panels) * 1.12
    near = _MOST_ABOVE * top if top else float("inf")
    levels = [panel.level for panel in panels if panel.level is not None and (panel.whole or panel.level < near)]
    top = max([top, *(level * 1.08 for level in levels)]) or 1.0
    if panels[0].name == "link":
        size, unit = next((rate for rate in _RATES if top >= rate[0]), (1.0, "B/s"))
    else:
        size, unit = bytes_unit(top)
    return Scale(top, size, unit)
