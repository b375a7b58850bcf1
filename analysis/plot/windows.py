"""The panels of free windows: boxes between the memory line and the capacity, and how idle the link is in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from ebbtide.analysis.metrics.devices import capacity_bytes, main_pool
from ebbtide.analysis.plot.boxes import Boxes, free_boxes, guaranteed_boxes
from ebbtide.analysis.plot.fitting import label_boxes
from ebbtide.analysis.plot.memory import MemoryPanel, shown_line
from ebbtide.analysis.plot.panels import Panel, Scale
from ebbtide.analysis.plot.styles import GUARANTEED, LINK_FILLS, WINDOW
from ebbtide.analysis.plot.views import View
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.units import bytes_text

# left, right, bottom and top of boxes.
Edges = tuple[Floats, Floats, Floats, Floats]
# Of more boxes than these the longest are drawn.
_MOST_BOXES = 10_000


@dataclass(frozen=True)
class WindowsPanel:
    """The line that windows are found by, and the windows above it."""

    memory: MemoryPanel
    boxes: Boxes
    guaranteed: Boxes
    min_bytes: int
    capacity: float
    remarks: Sequence[str]
    name: str = "memory"
    whole: bool = True
    on_gpu: bool = False

    @property
    def view(self) -> View:
        return self.memory.view

    @property
    def largest(self) -> float:
        return self.memory.largest

    @property
    def level(self) -> float | None:
        return self.capacity

    @property
    def height(self) -> float:
        return self.memory.height

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        drawn = self.memory.draw(axes, scale)
        if len(self.boxes.free):
            drawn.append(self._draw(axes, scale, self.boxes, f"≥ {bytes_text(self.min_bytes)} free", WINDOW))
        if len(self.guaranteed.free):
            drawn.append(self._draw(axes, scale, self.guaranteed, "free in every iteration", GUARANTEED))
        return drawn

    def _draw(self, axes: Axes, scale: Scale, boxes: Boxes, label: str, looks: dict[str, Any]) -> Artist:
        edges = self._edges(boxes, scale)
        if not self.view.is_wide:
            # Outlines would hide what they surround.
            looks = {**looks, "ec": "face", "lw": 0.1}
        return axes.add_collection(PolyCollection(_corners(*edges), label=label, zorder=0.8, **looks))

    def annotate(self, axes: Axes, scale: Scale) -> None:
        """Say the least free bytes in each box that has room for it, once the layout stands."""
        label_boxes(axes, *self._edges(self.boxes, scale), [bytes_text(int(free)) for free in self.boxes.free])

    def _edges(self, boxes: Boxes, scale: Scale) -> Edges:
        """From the peak of each window up to the capacity."""
        free = boxes.free.astype(np.float64)
        top = np.full(len(free), self.capacity / scale.size)
        return self.view.x(boxes.starts), self.view.x(boxes.ends), (self.capacity - free) / scale.size, top


@dataclass(frozen=True)
class IdlePanel:
    """A row per direction, in which the box of each window is filled as far as the link is idle."""

    view: View
    boxes: Boxes
    rows: Sequence[str]
    name: str = "idle link"
    largest: float = 0.0
    level: float | None = None
    whole: bool = False
    on_gpu: bool = False
    remarks: Sequence[str] = ()

    @property
    def height(self) -> float:
        return 0.32 * len(self.rows) + 0.1

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        left, right = self.view.x(self.boxes.starts), self.view.x(self.boxes.ends)
        for row, direction in enumerate(self.rows):
            shares, (low, high) = self.boxes.idle[direction], self._row(row)
            known = ~np.isnan(shares)
            bottom, top = np.full(len(shares), low), np.full(len(shares), high)
            outline = _corners(left[known], right[known], bottom[known], top[known])
            axes.add_collection(PolyCollection(outline, fc="white", ec="#777777", lw=0.5 * self.view.is_wide))
            filled = bottom + shares * (high - low)
            corners = _corners(left[known], right[known], bottom[known], filled[known])
            axes.add_collection(PolyCollection(corners, fc=LINK_FILLS[direction], lw=0))
        axes.set_ylim(0, len(self.rows))
        middles = [sum(self._row(row)) / 2 for row in range(len(self.rows))]
        axes.set_yticks(middles, [f"{direction} idle" for direction in self.rows])
        axes.tick_params(axis="y", length=0, labelsize=8)
        return [Patch(fc="#c4c4c4", label="share of the window, in %")]

    def _row(self, row: int) -> tuple[float, float]:
        """(bottom, top) of a row: the first is the upper one."""
        bottom = len(self.rows) - 1 - row + 0.08
        return bottom, bottom + 0.84

    def annotate(self, axes: Axes, scale: Scale) -> None:
        left, right = self.view.x(self.boxes.starts), self.view.x(self.boxes.ends)
        for row, direction in enumerate(self.rows):
            low, high = (np.full(len(left), edge) for edge in self._row(row))
            texts = ["" if np.isnan(share) else f"{100 * share:.0f} %" for share in self.boxes.idle[direction]]
            label_boxes(axes, left, right, low, high, texts)


def windows_panels(view: View, height: float, min_bytes: int) -> list[Panel]:
    """Raises TraceError where the trace has no memory line or no capacity."""
    boxes = free_boxes(view, min_bytes)
    remarks = []
    if not len(boxes.free):
        remarks.append(f"never {bytes_text(min_bytes)} free")
    if len(boxes.free) > _MOST_BOXES:
        remarks.append(f"{len(boxes.free) - _MOST_BOXES:,} shorter windows are not drawn")
    boxes, guaranteed = boxes.longest(_MOST_BOXES), guaranteed_boxes(view, min_bytes).longest(_MOST_BOXES)
    pool = main_pool(view.trace) or ""
    line = shown_line(view, pool)
    capacity = capacity_bytes(view.trace, view.rank)
    memory = MemoryPanel(view, "memory", {} if line is None else {pool: line}, capacity, height)
    remarks += memory.remarks
    panels: list[Panel] = [WindowsPanel(memory, boxes, guaranteed, min_bytes, float(capacity or 0), remarks)]
    rows = [direction for direction, shares in boxes.idle.items() if not np.isnan(shares).all()]
    if rows:
        panels.append(IdlePanel(view, boxes, rows))
    return panels


def _corners(left: Floats, right: Floats, bottom: Floats, top: Floats) -> list[Floats]:
    """The four corners of each box: 4 x 2."""
    x = np.stack([left, left, right, right], axis=1)
    y = np.stack([bottom, top, top, bottom], axis=1)
    return list(np.stack([x, y], axis=2))
