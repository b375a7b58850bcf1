"""Draws what the GPU does: a lane each for compute, communication, copies and idle time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from ebbtide.analysis.metrics.missing import NO_KERNELS
from ebbtide.analysis.plot.stacks import draw_stack
from ebbtide.analysis.plot.views import View
from ebbtide.analysis.timeline.activity import ActivityLane, activity_lanes
from ebbtide.analysis.timeline.panels import Scale
from ebbtide.analysis.timeline.reduction import PICTURE
from ebbtide.errors import TraceError

_LANE_HEIGHT = 0.86


@dataclass(frozen=True)
class ActivityPanel:
    """Lanes of activity of a rank's GPU; see `PlotPanel`."""

    view: View
    lanes: Sequence[ActivityLane]
    height: float
    name: str = "activity"
    largest: float = 1.0
    level: float | None = None
    level_required: bool = False
    on_gpu: bool = True
    remarks: Sequence[str] = ("height of a lane: share of the time",)

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        drawn: list[Artist] = []
        for number, lane in enumerate(self.lanes):
            areas = draw_stack(axes, lane.stack, self.view.axis, 1 / _LANE_HEIGHT, number)
            axes.axhline(number, color="#7b8794", lw=0.4)
            # A lane of one area is named by its label.
            drawn += areas if lane.name == "idle" else []
        axes.set_ylim(0, len(self.lanes))
        names = [lane.name for lane in self.lanes]
        axes.set_yticks(np.arange(len(names)) + _LANE_HEIGHT / 2, labels=names)
        axes.tick_params(axis="y", length=0)
        return drawn


def activity_panels(view: View, height: float, required: bool) -> list[ActivityPanel]:
    """Return the panel of a view; no panel where kernels were not recorded.

    Args:
        view: Trace, rank and interval.
        height: Inches.
        required: Raise if there is no panel.

    Raises:
        TraceError: There is no panel, and one is required.
    """
    lanes = activity_lanes(view.trace, view.rank, view.axis, PICTURE)
    if required and not lanes:
        raise TraceError(f"rank {view.rank} of {view.trace.path}: {NO_KERNELS}")
    return [ActivityPanel(view, lanes, height)] if lanes else []
