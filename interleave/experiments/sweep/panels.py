"""One panel of a sweep's picture. Nothing is told by colour alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
# Colours that differ to colour-blind eyes, and lines and marks that differ in print.
_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#222222", "marker": "o", "ls": "solid"},
    {"color": "#d55e00", "marker": "s", "ls": (0, (6, 1.5))},
    {"color": "#0072b2", "marker": "^", "ls": (0, (4, 1, 1, 1))},
    {"color": "#009e73", "marker": "D", "ls": (0, (3, 1))},
    {"color": "#b0517f", "marker": "v", "ls": (0, (8, 1.5, 1, 1.5))},
    {"color": "#c98500", "marker": "P", "ls": (0, (2, 1))},
    {"color": "#56a0d3", "marker": "X", "ls": "solid"},
    {"color": "#777777", "marker": "*", "ls": (0, (6, 1.5))},
)

# Times that differ by more than this stand on a scale of factors.
_MOST_LINEAR = 3.0

Points = Mapping[tuple[str, Any], Row]


@dataclass(frozen=True)
class Fit:
    """How it looks whether a plan fits: of a mark what is filled, of a bar its hatch."""

    name: str
    filled: str
    hatch: str

    def mark(self, color: str) -> dict[str, Any]:
        face = "white" if self.filled == "none" else color
        fill = "left" if self.filled == "left" else "full"
        return {"color": color, "mfc": face, "markerfacecoloralt": "white", "fillstyle": fill, "ls": "none", "ms": 6.5}

    def handle(self, axes: Axes, marks: bool) -> Artist:
        """What the legend is to explain."""
        if marks:
            return axes.plot([], [], label=self.name, marker="o", **self.mark("#222222"))[0]
        return Patch(label=self.name, facecolor="white", edgecolor="#222222", hatch=self.hatch)


FITS = {
    True: Fit("fits", "all", ""),
    False: Fit("does not fit", "none", "////"),
    None: Fit("fits: not known", "left", ".."),
}


def draw_lines(axes: Axes, grid: Grid, points: Points) -> None:
    """A line per policy over the values of the swept axis, which stand at equal distances."""
    assert grid.axis is not None
    places = np.arange(len(grid.ticks))
    axes.fill_between(places, _over(grid, points, "compute_ms"), lw=0, **COMPUTE)
    for policy, look in zip(grid.policies, _LOOKS, strict=False):
        rows = [points.get((policy, tick)) for tick in grid.ticks]
        times = np.array([_seconds(row, "iteration_ms") for row in rows])
        axes.plot(places, times, lw=1.3, ms=0, color=look["color"], ls=look["ls"])
        for place, seconds, row in zip(places, times, rows, strict=True):
            if row is not None and row["error"] is None:
                axes.plot(place, seconds, marker=look["marker"], **FITS[row["fits"]].mark(look["color"]))
        axes.plot([], [], label=policy, lw=1.3, ms=6, **look)
    axes.plot(places, _over(grid, points, "bound_iteration_ms"), **BOUND)
    axes.set_xticks(places, [grid.axis.text(tick) + _params(grid, points, tick) for tick in grid.ticks], fontsize=8.5)
    axes.set_xlim(-0.3, len(places) - 0.7)


def scale_lines(line: Sequence[Axes], axis: Axis) -> None:
    """The same times for panels side by side, from 0; over sizes by factors, so that policies stand as far apart at
    each."""
    low, high = min(axes.dataLim.minposy for axes in line), max(axes.dataLim.y1 for axes in line)
    for axes in line:
        if axis.column != "scale_params" or not 0 < high < np.inf or high < _MOST_LINEAR * low:
            axes.set_ylim(0, max(high, 0) * 1.05 or 1)
            continue
        axes.set_yscale("log")
        axes.set_ylim(low * 0.8, high * 1.15)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def draw_bars(axes: Axes, grid: Grid, points: Points) -> None:
    """A bar per policy: the iteration without the optimizer, and what that adds."""
    places = np.arange(len(grid.policies))
    for place, policy in enumerate(grid.policies):
        row = points.get((policy, None))
        if row is None or row["error"] is not None:
            continue
        compute, whole = _seconds(row, "compute_ms"), _seconds(row, "iteration_ms")
        axes.barh(place, compute, height=0.7, **COMPUTE)
        hatch = FITS[row["fits"]].hatch
        axes.barh(place, whole - compute, left=compute, height=0.7, hatch=hatch, **_ADDED)
        axes.annotate(f"{whole:.3g} s", (whole, place), (4, 0), textcoords="offset points", **_FIGURE)
    bounds = [_seconds(row, "bound_iteration_ms") for row in points.values() if row["error"] is None]
    if bounds:
        axes.axvline(bounds[0], **BOUND)
    axes.set_yticks(places, grid.policies, fontsize=8.5)
    axes.set_ylim(len(places) - 0.5, -0.5)


def scale_bars(line: Sequence[Axes]) -> None:
    """The same times for panels side by side, with room for the figures."""
    high = max(axes.dataLim.x1 for axes in line)
    for axes in line:
        axes.set_xlim(0, max(high, 0) * 1.2 or 1)


def _seconds(row: Row | None, column: str) -> float:
    """NaN where there is no such figure."""
    return row[column] / 1e3 if row is not None and row["error"] is None else np.nan


def _over(grid: Grid, points: Points, column: str) -> Sequence[float]:
    """Seconds by value of the axis, of what is the same for every policy."""
    found = []
    for tick in grid.ticks:
        known = (_seconds(points.get((policy, tick)), column) for policy in grid.policies)
        found.append(next((seconds for seconds in known if not np.isnan(seconds)), np.nan))
    return found


def _params(grid: Grid, points: Points, tick: float) -> str:
    """What a factor comes to."""
    if grid.axis is None or grid.axis.column != "scale_params":
        return ""
    known = (row for policy in grid.policies if (row := points.get((policy, tick))) and row["error"] is None)
    return next((f"\n{count_text(row['params'])}" for row in known), "")
