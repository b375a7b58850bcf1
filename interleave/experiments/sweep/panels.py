"""Draws one panel of the picture of a sweep. Colours only repeat what marks, lines and hatches show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from ebbtide.interleave.experiments.sweep.grid import Axis, Grid
from ebbtide.interleave.experiments.sweep.task import Row
from ebbtide.units import count_text

COMPUTE: dict[str, Any] = {"facecolor": "#d9d9d9", "edgecolor": "none"}
BOUND: dict[str, Any] = {"color": "#222222", "lw": 1.2, "ls": (0, (1, 1.2))}
_ADDED: dict[str, Any] = {"facecolor": "#4a7fa8", "edgecolor": "white"}
_FIGURE: dict[str, Any] = {"va": "center", "fontsize": 8, "bbox": {"fc": "white", "ec": "none", "pad": 0.8}}
# Colours that colour-blind readers can distinguish, and lines and marks that differ in grey print.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#222222", "marker": "o", "ls": "solid"},
    {"color": "#d55e00", "marker": "s", "ls": (0, (6, 1.5))},
    {"color": "#0072b2", "marker": "^", "ls": (0, (4, 1, 1, 1))},
    {"color": "#009e73", "marker": "D", "ls": (0, (3, 1))},
    {"color": "#b0517f", "marker": "v", "ls": (0, (8, 1.5, 1, 1.5))},
    {"color": "#c98500", "marker": "P", "ls": (0, (2, 1))},
    {"color": "#56a0d3", "marker": "X", "ls": "solid"},
    {"color": "#777777", "marker": "*", "ls": (0, (6, 1.5))},
)

# Times that differ by more than this factor are drawn on a logarithmic scale.
_MAX_LINEAR_RATIO = 3.0

Points = Mapping[tuple[str, Any], Row]


@dataclass(frozen=True)
class FitStyle:
    """The style that shows whether a plan fits.

    Attributes:
        name: Text in the legend.
        filled: Filled part of a mark: all, left, or none.
        hatch: Hatch of a bar.
    """

    name: str
    filled: str
    hatch: str

    def mark(self, color: str) -> dict[str, Any]:
        face = "white" if self.filled == "none" else color
        fill = "left" if self.filled == "left" else "full"
        return {"color": color, "mfc": face, "markerfacecoloralt": "white", "fillstyle": fill, "ls": "none", "ms": 6.5}

    def handle(self, axes: Axes, marks: bool) -> Artist:
        """Return the entry for the legend; `marks`: for marks of lines, not for bars."""
        if marks:
            return axes.plot([], [], label=self.name, marker="o", **self.mark("#222222"))[0]
        return Patch(label=self.name, facecolor="white", edgecolor="#222222", hatch=self.hatch)


FITS = {
    True: FitStyle("fits", "all", ""),
    False: FitStyle("does not fit", "none", "////"),
    None: FitStyle("fits: not known", "left", ".."),
}


def draw_lines(axes: Axes, grid: Grid, points: Points) -> None:
    """Draw a line per policy over the values of the swept axis, which are drawn at equal distances."""
    assert grid.axis is not None
    positions = np.arange(len(grid.ticks))
    axes.fill_between(positions, _axis_values(grid, points, "compute_ms"), lw=0, **COMPUTE)
    for policy, style in zip(grid.policies, _STYLES, strict=False):
        rows = [points.get((policy, tick)) for tick in grid.ticks]
        times = np.array([_seconds(row, "iteration_ms") for row in rows])
        axes.plot(positions, times, lw=1.3, ms=0, color=style["color"], ls=style["ls"])
        for position, seconds, row in zip(positions, times, rows, strict=True):
            if row is not None and row["error"] is None:
                axes.plot(position, seconds, marker=style["marker"], **FITS[row["fits"]].mark(style["color"]))
        is_exact = all(row["exact"] for row in rows if row is not None and row["error"] is None)
        axes.plot([], [], label=policy if is_exact else f"{policy} (not exact)", lw=1.3, ms=6, **style)
    axes.plot(positions, _least_bounds(grid, points), **BOUND)
    axes.set_xticks(
        positions, [grid.axis.text(tick) + _params_text(grid, points, tick) for tick in grid.ticks], fontsize=8.5
    )
    axes.set_xlim(-0.3, len(positions) - 0.7)


def scale_lines(row_axes: Sequence[Axes], axis: Axis) -> None:
    """Give the panels of a row the same time axis, from 0.

    Over the number of parameters it is logarithmic, so that policies are as far apart at each size.
    """
    low, high = min(axes.dataLim.minposy for axes in row_axes), max(axes.dataLim.y1 for axes in row_axes)
    for axes in row_axes:
        if axis.column != "scale_params" or not 0 < high < np.inf or high < _MAX_LINEAR_RATIO * low:
            axes.set_ylim(0, max(high, 0) * 1.05 or 1)
            continue
        axes.set_yscale("log")
        axes.set_ylim(low * 0.8, high * 1.15)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def draw_bars(axes: Axes, grid: Grid, points: Points) -> None:
    """Draw a bar per policy: the iteration without the optimizer, and the time that the optimizer adds.

    Behind it are the iteration, the memory of the device and of the host, the traffic of storage, and whether the
    policy is not exact.
    """
    positions = np.arange(len(grid.policies))
    for position, policy in enumerate(grid.policies):
        row = points.get((policy, None))
        if row is None or row["error"] is not None:
            continue
        compute, iteration = _seconds(row, "compute_ms"), _seconds(row, "iteration_ms")
        axes.barh(position, compute, height=0.7, **COMPUTE)
        hatch = FITS[row["fits"]].hatch
        axes.barh(position, iteration - compute, left=compute, height=0.7, hatch=hatch, **_ADDED)
        text = f"{iteration:.3g} s, {row['peak_device_bytes'] / 1e9:.3g} + {row['host_bytes'] / 1e9:.3g} GB"
        traffic = row["storage_read_bytes"] + row["storage_written_bytes"]
        text += f", {traffic / 1e9:.3g} GB storage" if traffic else ""
        text += "" if row["exact"] else ", not exact"
        axes.annotate(text, (iteration, position), (4, 0), textcoords="offset points", **_FIGURE)
    bound_s = _least_bound(points.values())
    if not np.isnan(bound_s):
        axes.axvline(bound_s, **BOUND)
    axes.set_yticks(positions, grid.policies, fontsize=8.5)
    axes.set_ylim(len(positions) - 0.5, -0.5)


def scale_bars(row_axes: Sequence[Axes]) -> None:
    """Give the panels of a row the same time axis, with space for the figures."""
    high = max(axes.dataLim.x1 for axes in row_axes)
    room = 1.1 + 0.026 * max((len(text.get_text()) for axes in row_axes for text in axes.texts), default=0)
    for axes in row_axes:
        axes.set_xlim(0, max(high, 0) * room or 1)


def _seconds(row: Row | None, column: str) -> float:
    """Return a figure in seconds; NaN if the row does not have it."""
    return row[column] / 1e3 if row is not None and row["error"] is None else np.nan


def _axis_values(grid: Grid, points: Points, column: str) -> Sequence[float]:
    """Return a figure in seconds at each tick, of a column that is the same for every policy."""
    values = []
    for tick in grid.ticks:
        policy_seconds = (_seconds(points.get((policy, tick)), column) for policy in grid.policies)
        values.append(next((seconds for seconds in policy_seconds if not np.isnan(seconds)), np.nan))
    return values


def _least_bounds(grid: Grid, points: Points) -> list[float]:
    """Return the bound in seconds at each tick."""
    return [_least_bound(points.get((policy, tick)) for policy in grid.policies) for tick in grid.ticks]


def _least_bound(rows: Iterable[Row | None]) -> float:
    """Return the bound in seconds of all of some rows: that with the widest overlap; NaN without any."""
    bounds = [seconds for row in rows if not np.isnan(seconds := _seconds(row, "bound_overlap_iteration_ms"))]
    return min(bounds, default=np.nan)


def _params_text(grid: Grid, points: Points, tick: float) -> str:
    """Return the number of parameters at a tick of the `scale_params` axis; empty for other axes."""
    if grid.axis is None or grid.axis.column != "scale_params":
        return ""
    rows = (row for policy in grid.policies if (row := points.get((policy, tick))) and row["error"] is None)
    return next((f"\n{count_text(row['params'])}" for row in rows), "")
