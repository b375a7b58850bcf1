"""Panels of a timeline: lines of one quantity, and the scale of their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ebbtide.analysis.timeline.stack import TimelineStack
from ebbtide.analysis.timeline.styles import LineStyle
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.units import bytes_unit, ms_text

# A level (capacity, peak) more than this many times above the highest line would press all lines flat: its value is
# in the legend then, and it is off the scale.
_MAX_LEVEL_RATIO = 4.0
# Room above the highest line and above a level.
_LINE_HEADROOM, _LEVEL_HEADROOM = 1.12, 1.08
_RATE_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))


@dataclass(frozen=True)
class TimelineLine:
    """A step function of one panel."""

    name: str  # Memory pool, or direction of the link.
    edges: Ints  # Start of each value and the end of the last one, ns; one more than `values`.
    values: Floats | Ints  # Bytes or bytes/s; NaN where unknown.
    style: LineStyle  # Colour, width and dash.
    # Smallest value of each step of a band, whose largest values are in `values`; None for a plain line.
    lowest: Floats | Ints | None = None
    detail: str = ""  # Addition to the name in legends, such as " pinned".
    # Times of rates above the link's peak, which are impossible.
    above_peak_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    slot_ns: float | None = None  # Length of the slots of a reduced line; None where every step is drawn.

    @property
    def label(self) -> str:
        """Name and detail."""
        return self.name + self.detail


@dataclass(frozen=True)
class TimelinePanel:
    """Lines of one quantity over time."""

    name: str  # `memory`, `host memory` or `link`.
    lines: Sequence[TimelineLine]  # In drawing order; the lines of a link are of both directions.
    level: float | None = None  # Capacity (bytes) or peak (bytes/s), a line across the panel; None where unknown.
    level_label: str = ""  # Name and value of the level.
    # Pool whose line free memory is above, up to the level; None in panels without free memory.
    free_pool: str | None = None
    stack: TimelineStack | None = None  # Areas behind the lines; None in panels without.

    @property
    def is_empty(self) -> bool:
        """Whether the panel has neither lines nor areas."""
        return not self.lines and self.stack is None

    @property
    def is_link(self) -> bool:
        """Whether values are rates: h2d is drawn upwards, d2h downwards, so that neither hides the other."""
        return self.name == "link"

    @property
    def largest(self) -> float:
        """Largest value that sets the scale; impossible rates above the link's peak do not."""
        tops = [] if self.stack is None else [self.stack.borders[-1]]
        values = np.concatenate([[0.0], *(line.values for line in self.lines), *tops])
        values = values[~np.isnan(values)]
        limit = self.level if self.is_link and self.level is not None else np.inf
        return float(values[values <= limit].max())

    @property
    def reduction_note(self) -> str | None:
        """Remark on how reduced lines are drawn; None where every step is drawn."""
        slots = [line.slot_ns for line in self.lines if line.slot_ns is not None]
        notes = []
        if slots:
            how = "means" if self.is_link else "smallest to largest"
            notes.append(f"{self.name}: {how} over {ms_text(max(slots) / 1e6)} each")
        if self.stack is not None and self.stack.slot_ns is not None:
            notes.append(f"categories: at the largest sum in {ms_text(self.stack.slot_ns / 1e6)} each")
        return "; ".join(notes) or None


class Scale(NamedTuple):
    """Scale of a panel's values."""

    top: float  # End of the axis, bytes or bytes/s.
    size: float  # Bytes or bytes/s per unit.
    unit: str  # Name of the unit.


def value_scale(largest: float, levels: Sequence[float], required: Sequence[float] = (), rates: bool = False) -> Scale:
    """Choose the scale of one panel, or of several that share it; values are bytes, or `rates`, bytes/s."""
    top = largest * _LINE_HEADROOM
    limit = _MAX_LEVEL_RATIO * top if top else float("inf")
    shown = [*(level for level in levels if level < limit), *required]
    top = max([top, *(level * _LEVEL_HEADROOM for level in shown)]) or 1.0
    size, unit = next((rate for rate in _RATE_UNITS if top >= rate[0]), (1.0, "B/s")) if rates else bytes_unit(top)
    return Scale(top, size, unit)
