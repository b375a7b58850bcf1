"""Builds traces to draw, and reads figures that were drawn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from ebbtide.analysis.plot import PHASE_COLORS
from ebbtide.profiler.trace import RankBuilder, Trace, TraceBuilder

MS = 10**6
MIB = 2**20
PEAK = 5e10
GPU = {"device": "cuda:0", "kind": "cuda", "name": "a GPU", "capacity_bytes": 100 * MIB}
LINKED = {**GPU, "link": {"peak_bytes_per_s": PEAK}}


def train(rank: RankBuilder, iterations: int = 3, size: int = 60 * MIB) -> RankBuilder:
    """Add iterations of 10 ms: forward 4 ms, backward 4 ms (with `size` bytes, the
    peak), update 2 ms."""
    for number in range(iterations):
        begin = number * 10 * MS
        rank.phase("forward", begin, begin + 4 * MS, number)
        rank.phase("backward", begin + 4 * MS, begin + 8 * MS, number)
        rank.phase("update", begin + 8 * MS, begin + 10 * MS, number)
        rank.memory(begin, size // 2).memory(begin + 4 * MS, size).memory(
            begin + 8 * MS, size // 3
        )
    return rank


def trained(
    iterations: int = 3, size: int = 60 * MIB, name: str = "trained", **meta: object
) -> Trace:
    """Build a trace of one rank that trains."""
    builder = TraceBuilder()
    train(builder.rank(0, **{"devices": [GPU], **meta}), iterations, size)
    return builder.build(f"{name}.ebb")


def with_counters(iterations: int = 3, name: str = "counted") -> Trace:
    """Build a trace of one rank that trains, with link counters sampled every 5 ms."""
    builder = TraceBuilder()
    rank = train(builder.rank(0, devices=[LINKED]), iterations)
    for t in range(5, 10 * iterations + 1, 5):
        rank.link(t * MS, 5 * MS, "gpm", h2d_bytes_per_s=4e10, d2h_bytes_per_s=1e9)
    return builder.build(f"{name}.ebb")


def labels(axes: Axes) -> list[str]:
    """Return the labels of the legend."""
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def steps(axes: Axes, label: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return (edges, values) of a step function as drawn, in the units of the axes."""
    (patch,) = [patch for patch in axes.patches if patch.get_label() == label]
    values, edges, _ = cast(StepPatch, patch).get_data()
    return np.asarray(edges), np.asarray(values)


def value_at(axes: Axes, label: str, time: float) -> float:
    """Return the value that is drawn at a time other than an edge; NaN in a gap, before
    and after the line."""
    edges, values = steps(axes, label)
    index = int(np.searchsorted(edges, time, side="right")) - 1
    return float(values[index]) if 0 <= index < len(values) else np.nan


def line(axes: Axes, start: str) -> tuple[list[float], list[float]]:
    """Return (x, y) of the line across, or of the marks, whose label begins with
    `start`."""
    (drawn,) = [
        line for line in axes.get_lines() if str(line.get_label()).startswith(start)
    ]
    return np.asarray(drawn.get_xdata(), float).tolist(), np.asarray(
        drawn.get_ydata(), float
    ).tolist()


def boxes(axes: Axes, start: str) -> list[tuple[float, float, float, float]]:
    """Return (left, right, bottom, top) of each box of the collection whose label
    begins with `start`."""
    (drawn,) = [
        collection
        for collection in axes.collections
        if str(collection.get_label()).startswith(start)
    ]
    return [
        (b.x0, b.x1, b.y0, b.y1)
        for b in (path.get_extents() for path in drawn.get_paths())
    ]


def bands(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """Return (start, end) of each band, per phase."""
    by_phase: dict[str, list[tuple[float, float]]] = {}
    handles = {
        text.get_text(): patch
        for text, patch in _legend(axes)
        if text.get_text() in PHASE_COLORS
    }
    for phase, handle in handles.items():
        color = tuple(handle.get_facecolor())
        drawn = [
            c
            for c in axes.collections
            if len(c.get_facecolor()) and tuple(c.get_facecolor()[0]) == color
        ]
        extents = [
            path.get_extents()
            for collection in drawn
            for path in collection.get_paths()
        ]
        by_phase[phase] = [(box.x0, box.x1) for box in extents]
    return by_phase


def _legend(axes: Axes) -> list[tuple[Text, Any]]:
    legend = axes.get_legend()
    return (
        list(zip(legend.get_texts(), legend.legend_handles, strict=True))
        if legend
        else []
    )


def numbers(axes: Axes) -> list[int]:
    """Return the numbers of iterations above the axes."""
    return [int(text.get_text()) for text in axes.texts if text.get_text().isdecimal()]


def notes(axes: Axes) -> str:
    """Return the line below the name of a trace."""
    return next((t.get_text() for t in axes.texts if t.get_fontsize() == 8.5), "")


def shown_texts(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Yield every visible text and its bounds."""
    for axes in figure.axes:
        ticks = [
            label
            for axis, (low, high), index in (
                (axes.xaxis, axes.get_xlim(), 0),
                (axes.yaxis, axes.get_ylim(), 1),
            )
            for label in axis.get_ticklabels()
            if low <= label.get_position()[index] <= high
            and axis.get_tick_params()[("labelbottom", "labelleft")[index]]
        ]
        titles = [axes.title, cast(Any, axes)._left_title]
        legend = axes.get_legend()
        others = [
            axes.xaxis.label,
            axes.yaxis.label,
            *titles,
            *axes.texts,
            *(legend.get_texts() if legend else []),
        ]
        for text in (*ticks, *others):
            if text.get_text() and text.get_visible():
                yield text.get_text(), text.get_window_extent()


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Return the pairs of texts that overlap by more than a dot."""
    figure.draw_without_rendering()
    texts = [(text, box.padded(-1)) for text, box in shown_texts(figure)]
    return [
        (a, b)
        for (a, one), (b, other) in itertools.combinations(texts, 2)
        if one.overlaps(other)
    ]


def outside(figure: Figure) -> list[str]:
    """Return the texts that cross the edge of the figure."""
    right, top = figure.bbox.x1, figure.bbox.y1
    return [
        text
        for text, box in shown_texts(figure)
        if box.x0 < 0 or box.y0 < 0 or box.x1 > right or box.y1 > top
    ]
