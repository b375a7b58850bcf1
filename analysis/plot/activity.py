"""Draws what the GPU does: a lane each for compute, communication, copies and idle time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from ebbtide.analysis.metrics.activity.busy_time import BusyTime, busy_time
from ebbtide.analysis.metrics.missing import NO_KERNELS
from ebbtide.analysis.plot.views import View
from ebbtide.analysis.timeline.panels import Scale
from ebbtide.analysis.timeseries.intervals import gaps, overlap_ns
from ebbtide.errors import TraceError

# Columns of the picture; the height of a lane in each is the share of its time.
_COLUMNS = 1100
_LANE_HEIGHT = 0.86
# Lanes from the bottom, with colours that also differ in grey.
_LANES = {"idle": "#b9bfc6", "copy": "#d99a2b", "communication": "#8856a7", "compute": "#1b4f72"}


@dataclass(frozen=True)
class ActivityPanel:
    """Lanes of activity of a rank's GPU; see `PlotPanel`."""

    view: View
    busy: BusyTime
    height: float
    name: str = "activity"
    largest: float = 1.0
    level: float | None = None
    level_required: bool = False
    on_gpu: bool = True
    remarks: Sequence[str] = ("height of a lane: share of the time",)

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        axis = self.view.axis
        edges = np.linspace(axis.start_ns, axis.end_ns, _COLUMNS + 1).astype(np.int64)
        length = np.maximum(np.diff(edges), 1)
        times = {"copy": self.busy.copy, "communication": self.busy.communication, "compute": self.busy.compute}
        times["idle"] = gaps(self.busy.all)
        shares = {lane: overlap_ns(edges[:-1], edges[1:], time) / length for lane, time in times.items()}
        for number, (lane, color) in enumerate(_LANES.items()):
            values = number + _LANE_HEIGHT * shares[lane]
            axes.stairs(values, axis.x(edges), baseline=number, fill=True, color=color, lw=0)
            axes.axhline(number, color="#7b8794", lw=0.4)
        axes.set_ylim(0, len(_LANES))
        axes.set_yticks(np.arange(len(_LANES)) + _LANE_HEIGHT / 2, labels=[*_LANES])
        axes.tick_params(axis="y", length=0)
        return []


def activity_panels(view: View, height: float) -> list[ActivityPanel]:
    """Return the panel of a view.

    Raises:
        TraceError: Kernels were not recorded.
    """
    busy = busy_time(view.trace, view.rank)
    if busy is None:
        raise TraceError(f"rank {view.rank} of {view.trace.path}: {NO_KERNELS}")
    return [ActivityPanel(view, busy, height)]
