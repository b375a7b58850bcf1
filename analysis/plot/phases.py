"""The phases behind the lines, and the borders between iterations."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ebbtide.analysis.plot.styles import PHASE_ALPHAS, PHASE_COLORS
from ebbtide.analysis.plot.views import View

# A band that is a smaller part of the axis would not be seen: it is drawn as a line of this width in points.
_NARROW = 1 / 500
_NARROW_WIDTH = 1.1


def draw_phases(axes: Axes, view: View, on_gpu: bool) -> list[Artist]:
    """A band per phase, those of an unfinished iteration too, where there is room for them; returns what the legend is
    to explain."""
    if not view.is_wide:
        return []
    drawn: list[Artist] = []
    phases = view.phases(on_gpu)
    upright = axes.get_xaxis_transform()
    for phase, color in PHASE_COLORS.items():
        rows = phases[phases["phase"] == phase]
        if rows.empty:
            continue
        looks: dict[str, Any] = {"color": color, "alpha": PHASE_ALPHAS[phase], "lw": 0}
        left, right = (view.x(rows[column].to_numpy(np.int64)) for column in ("start_ns", "end_ns"))
        axes.broken_barh(list(zip(left, right - left, strict=True)), (0, 1), transform=upright, zorder=0, **looks)
        narrow = right - left < view.length / view.unit_ns * _NARROW
        middles = (left + right)[narrow] / 2
        axes.vlines(middles, 0, 1, transform=upright, color=color, lw=_NARROW_WIDTH, zorder=0.7)
        drawn.append(Patch(label=phase, **looks))
    for border in view.x(view.spans(on_gpu)["start_ns"].to_numpy(np.int64)[1:]):
        axes.axvline(border, color="#999999", lw=0.6, zorder=0.5)
    return drawn
