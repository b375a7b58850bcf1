"""Windows of free memory, and how idle the link is in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from ebbtide.analysis.metrics.devices import free_memory_text
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.analysis.plot.kinds import Layout
from ebbtide.analysis.plot.kinds.memory import MemoryDrawing
from ebbtide.analysis.plot.panels import (
    OUTLINE_COLOR,
    PanelDrawing,
    View,
    box_properties,
)
from ebbtide.analysis.plot.text import label_boxes
from ebbtide.analysis.timeline.axis import PICTURE, PICTURE_BOXES, BoxSampler
from ebbtide.analysis.timeline.boxes import clip_boxes, recurring_boxes, window_boxes
from ebbtide.analysis.timeline.memory import free_memory_panel
from ebbtide.analysis.timeline.panels import Scale, TimelinePanel
from ebbtide.analysis.timeline.styles import COLORS, RECURRING, WINDOW, BoxStyle
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.errors import TraceError
from ebbtide.units import bytes_text

CONTENT = "windows of free memory"
_SHARE_COLOR = "#c4c4c4"


class BoxEdges(NamedTuple):
    """Edges of boxes in the units of the axes, one value per box."""

    left: Floats
    right: Floats
    bottom: Floats
    top: Floats

    @property
    def corners(self) -> list[Floats]:
        """The four corners of each box, 4 x 2."""
        x = np.stack([self.left, self.left, self.right, self.right], axis=1)
        y = np.stack([self.bottom, self.top, self.top, self.bottom], axis=1)
        return list(np.stack([x, y], axis=2))


@dataclass(frozen=True)
class WindowsDrawing(MemoryDrawing):
    """The line that free memory is computed from, with the windows above it."""

    windows: pd.DataFrame
    recurring: pd.DataFrame
    min_bytes: int

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        drawn = super().draw(axes, scale)
        for boxes, label, style in (
            (self.windows, f"≥ {bytes_text(self.min_bytes)} free", WINDOW),
            (self.recurring, "free in every iteration", RECURRING),
        ):
            if len(boxes):
                drawn.append(self._draw_boxes(axes, scale, boxes, label, style))
        return drawn

    def _draw_boxes(
        self, axes: Axes, scale: Scale, boxes: pd.DataFrame, label: str, style: BoxStyle
    ) -> Artist:
        properties = box_properties(style)
        if not self.view.has_room_for_phases:
            # Outlines would hide the boxes.
            properties |= {"ec": "face", "lw": 0.1}
        corners = self._edges(boxes, scale).corners
        return axes.add_collection(
            PolyCollection(corners, label=label, zorder=0.8, **properties)
        )

    def annotate(self, axes: Axes, scale: Scale) -> None:
        """Write the least free bytes into each box that has room for it. Needs the
        final layout."""
        label_boxes(
            axes,
            *self._edges(self.windows, scale),
            [bytes_text(free) for free in self.windows["free_bytes"]],
        )

    def _edges(self, boxes: pd.DataFrame, scale: Scale) -> BoxEdges:
        """Return boxes from the peak of each window up to the capacity."""
        capacity = self.panel.level or 0.0
        bottom = (capacity - boxes["free_bytes"].to_numpy(np.float64)) / scale.size
        return BoxEdges(
            *_horizontal_edges(self.view, boxes),
            bottom,
            np.full(len(boxes), capacity / scale.size),
        )


@dataclass(frozen=True)
class IdleDrawing(PanelDrawing):
    """A row per direction, with the windows' boxes.

    The box of each window is filled to the share in which the link is idle.
    """

    windows: pd.DataFrame
    directions: Sequence[str]
    shows_phases = False

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        for direction, shares, edges in self._rows():
            recorded = ~np.isnan(shares)
            outline = BoxEdges(*(edge[recorded] for edge in edges))
            axes.add_collection(
                PolyCollection(
                    outline.corners,
                    fc="white",
                    ec=OUTLINE_COLOR,
                    lw=0.5 * self.view.has_room_for_phases,
                )
            )
            idle = outline._replace(
                top=outline.bottom + shares[recorded] * (outline.top - outline.bottom)
            )
            axes.add_collection(
                PolyCollection(idle.corners, fc=COLORS[f"{direction}-fill"].light, lw=0)
            )
        axes.set_ylim(0, len(self.directions))
        middles = [
            sum(self._row_bounds(row)) / 2 for row in range(len(self.directions))
        ]
        axes.set_yticks(middles, [f"{direction} idle" for direction in self.directions])
        axes.tick_params(axis="y", length=0, labelsize=8)
        return [Patch(fc=_SHARE_COLOR, label="share of the window, in %")]

    def annotate(self, axes: Axes, scale: Scale) -> None:
        """Write the shares into the boxes that have room for them. Needs the final
        layout."""
        for _, shares, edges in self._rows():
            label_boxes(
                axes,
                *edges,
                ["" if np.isnan(share) else f"{100 * share:.0f} %" for share in shares],
            )

    def _rows(self) -> Iterator[tuple[str, Floats, BoxEdges]]:
        """Yield (direction, idle shares, whole boxes) of each row."""
        left, right = _horizontal_edges(self.view, self.windows)
        for row, direction in enumerate(self.directions):
            bottom, top = (np.full(len(left), bound) for bound in self._row_bounds(row))
            yield (
                direction,
                self.windows[f"{direction}_idle_share"].to_numpy(),
                BoxEdges(left, right, bottom, top),
            )

    def _row_bounds(self, row: int) -> tuple[float, float]:
        """Return (bottom, top) of a row, counted from above."""
        bottom = len(self.directions) - 1 - row + 0.08
        return bottom, bottom + 0.84


def panels(view: View, layout: Layout) -> Sequence[PanelDrawing]:
    """Return the panel of windows, and the one of the idle link where it was recorded.
    Raises TraceError where no memory was recorded, or the capacity is not known."""
    min_bytes = layout.min_bytes
    free = find_windows(view.trace, min_bytes, [view.rank])
    if free.pool is None or not (free.known_ranks or free.unrecorded_ranks):
        raise TraceError(f"{view.trace.path}: {free.missing[0]}")
    windows = clip_boxes(window_boxes(view.trace, view.rank, free.windows), view.axis)
    recurring = windows.iloc[:0]
    if free.guaranteed:
        recurring = clip_boxes(
            recurring_boxes(view.trace, view.rank, min_bytes), view.axis
        )
    remarks = [f"free memory: {free_memory_text(view.trace)}"]
    if free.unrecorded_ranks:
        remarks.append(f"no {free.pool} memory was recorded for this rank")
    elif not len(windows):
        remarks.append(f"never {bytes_text(min_bytes)} free")
    starts = (
        intervals(view.trace, view.rank, device_times=False)
        .spans["start_ns"]
        .to_numpy(np.int64)
    )
    sampler = BoxSampler(starts, max(len(windows), len(recurring)), PICTURE_BOXES)
    windows, recurring = sampler.sample(windows), sampler.sample(recurring)
    if sampler.stride > 1:
        remarks.append(f"windows of one iteration in {sampler.stride} are drawn")
    if sampler.dropped:
        remarks.append(f"{sampler.dropped:,} shorter windows are not drawn")
    drawn: list[PanelDrawing] = [
        WindowsDrawing(
            view=view,
            height=layout.tall,
            panel=free_memory_panel(view.trace, view.rank, view.axis, PICTURE),
            windows=windows,
            recurring=recurring,
            min_bytes=min_bytes,
            level_required=True,
            remarks=remarks,
        )
    ]
    directions = [d for d in DIRECTIONS if windows[f"{d}_idle_share"].notna().any()]
    if directions:
        drawn.append(
            IdleDrawing(
                view,
                0.32 * len(directions) + 0.1,
                TimelinePanel("idle link"),
                windows,
                directions,
            )
        )
    return drawn


def _horizontal_edges(view: View, boxes: pd.DataFrame) -> tuple[Floats, Floats]:
    return view.axis.x(boxes["start_ns"].to_numpy(np.int64)), view.axis.x(
        boxes["end_ns"].to_numpy(np.int64)
    )
