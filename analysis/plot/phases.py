"""Draws phases as bands behind the lines, and the borders between iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ebbtide.analysis.plot.styles import BORDER_COLOR
from ebbtide.analysis.plot.views import View
from ebbtide.analysis.timeline.panels import Scale
from ebbtide.analysis.timeline.styles import PHASE_COLORS, PHASE_OPACITY

# A band that is a smaller share of the axis would be invisible: it is drawn as a line of this width in points.
_MIN_BAND_SHARE = 1 / 500
_NARROW_WIDTH = 1.1


def draw_phases(axes: Axes, view: View, on_gpu: bool) -> list[Artist]:
    """Draw a band per phase, also of an unfinished iteration, where there is room for them.

    Returns:
        The artists that the legend lists.
    """
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
class PhasesPanel:
    """Phases alone, of a trace without anything else to draw; see `PlotPanel`."""

    view: View
    height: float
    name: str = "phases"
    largest: float = 1.0
    level: float | None = None
    level_required: bool = False
    on_gpu: bool = False
    remarks: Sequence[str] = ()

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        axes.set_yticks([])
        axes.set_ylabel("phases")
        return []
