"""Draws one panel of the lines of a sweep. Colours only repeat what marks and lines show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from ebbtide.interleave.experiments.sweep.grid import Axis, Grid
from ebbtide.interleave.experiments.sweep.task import Row
from ebbtide.units import count_text

COMPUTE: dict[str, Any] = {"facecolor": "#d9d9d9", "edgecolor": "none"}
BOUND: dict[str, Any] = {"color": "#222222", "lw": 1.2, "ls": (0, (1, 1.2))}
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


class Quantity(NamedTuple):
    """A figure that panels of lines show: its label with the unit, its value in a row, and the relative height."""

    label: str
    value: Callable[[Row], float]
    height: float


ITERATION = Quantity("iteration (s)", lambda row: row["iteration_ms"] / 1e3, 2.4)
_BYTES = (
    Quantity("device\nmemory (GB)", lambda row: row["peak_device_bytes"] / 1e9, 1.0),
    Quantity("host\nmemory (GB)", lambda row: row["host_bytes"] / 1e9, 1.0),
    Quantity(
        "storage\ntraffic (GB)", lambda row: (row["storage_read_bytes"] + row["storage_written_bytes"]) / 1e9, 1.0
    ),
)


@dataclass(frozen=True)
class FitStyle:
    """The style that shows whether a plan fits.

    Attributes:
        name: Text in the legend.
        filled: Filled part of a mark: all, left, or none.
    """

    name: str
    filled: str

    def mark(self, color: str) -> dict[str, Any]:
        face = "white" if self.filled == "none" else color
        fill = "left" if self.filled == "left" else "full"
        return {"color": color, "mfc": face, "markerfacecoloralt": "white", "fillstyle": fill, "ls": "none", "ms": 6.5}

    def handle(self, axes: Axes) -> Artist:
        """Return the entry for the legend."""
        return axes.plot([], [], label=self.name, marker="o", **self.mark("#222222"))[0]


FITS = {
    True: FitStyle("fits", "all"),
    False: FitStyle("does not fit", "none"),
    None: FitStyle("fits: not known", "left"),
}


def byte_quantities(rows: Iterable[Row]) -> list[Quantity]:
    """Return what is drawn below the iterations: each kind of bytes that is not 0 in every row."""
    shown = [row for row in rows if row["error"] is None]
    return [quantity for quantity in _BYTES if any(map(quantity.value, shown))]


def draw_lines(axes: Axes, grid: Grid, points: Points, quantity: Quantity) -> None:
    """Draw a line per policy over the values of the swept axis, which are drawn at equal distances.

    Behind the iterations are the time without the optimizer, and the bound.
    """
    assert grid.axis is not None
    positions = np.arange(len(grid.ticks))
    if quantity is ITERATION:
        axes.fill_between(positions, _axis_values(grid, points, "compute_ms"), lw=0, **COMPUTE)
    for policy, style in zip(grid.policies, _STYLES, strict=False):
        rows = [points.get((policy, tick)) for tick in grid.ticks]
        values = np.array([quantity.value(row) if has_figures(row) else np.nan for row in rows])
        axes.plot(positions, values, lw=1.3, ms=0, color=style["color"], ls=style["ls"])
        for position, value, row in zip(positions, values, rows, strict=True):
            if has_figures(row):
                axes.plot(position, value, marker=style["marker"], **FITS[row["fits"]].mark(style["color"]))
        is_exact = all(row["exact"] for row in rows if has_figures(row))
        axes.plot([], [], label=policy if is_exact else f"{policy} (not exact)", lw=1.3, ms=6, **style)
    if quantity is ITERATION:
        axes.plot(positions, _least_bounds(grid, points), **BOUND)
    axes.set_xticks(
        positions, [grid.axis.text(tick) + _params_text(grid, points, tick) for tick in grid.ticks], fontsize=8.5
    )
    axes.set_xlim(-0.3, len(positions) - 0.7)


def scale_lines(row_axes: Sequence[Axes], axis: Axis, quantity: Quantity) -> None:
    """Give the panels of a row the same vertical axis, from 0.

    Times over the number of parameters have a logarithmic one, so that policies are as far apart at each size.
    """
    low, high = min(axes.dataLim.minposy for axes in row_axes), max(axes.dataLim.y1 for axes in row_axes)
    for axes in row_axes:
        is_time = quantity is ITERATION
        if not is_time or axis.column != "scale_params" or not 0 < high < np.inf or high < _MAX_LINEAR_RATIO * low:
            axes.set_ylim(0, max(high, 0) * (1.05 if is_time else 1.15) or 1)
            continue
        axes.set_yscale("log")
        axes.set_ylim(low * 0.8, high * 1.15)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def has_figures(row: Row | None) -> TypeGuard[Row]:
    """Return whether there is a row, and it has figures instead of an error."""
    return row is not None and row["error"] is None


def least_bound(rows: Iterable[Row | None]) -> float:
    """Return the bound in seconds of all of some rows: that with the widest overlap; NaN without any."""
    bounds = [seconds for row in rows if not np.isnan(seconds := _seconds(row, "bound_overlap_iteration_ms"))]
    return min(bounds, default=np.nan)


def _seconds(row: Row | None, column: str) -> float:
    """Return a figure in seconds; NaN if the row does not have it."""
    return row[column] / 1e3 if has_figures(row) else np.nan


def _axis_values(grid: Grid, points: Points, column: str) -> Sequence[float]:
    """Return a figure in seconds at each tick, of a column that is the same for every policy."""
    values = []
    for tick in grid.ticks:
        policy_seconds = (_seconds(points.get((policy, tick)), column) for policy in grid.policies)
        values.append(next((seconds for seconds in policy_seconds if not np.isnan(seconds)), np.nan))
    return values


def _least_bounds(grid: Grid, points: Points) -> list[float]:
    """Return the bound in seconds at each tick."""
    return [least_bound(points.get((policy, tick)) for policy in grid.policies) for tick in grid.ticks]


def _params_text(grid: Grid, points: Points, tick: float) -> str:
    """Return the number of parameters at a tick of the `scale_params` axis; empty for other axes."""
    if grid.axis is None or grid.axis.column != "scale_params":
        return ""
    rows = (row for policy in grid.policies if has_figures(row := points.get((policy, tick))))
    return next((f"\n{count_text(row['params'])}" for row in rows), "")
