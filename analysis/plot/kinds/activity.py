"""Activity of the GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from ebbtide.analysis.metrics.missing import NO_KERNELS
from ebbtide.analysis.plot.kinds import Layout
from ebbtide.analysis.plot.panels import PanelDrawing, View, draw_stack
from ebbtide.analysis.timeline.activity import activity_lanes
from ebbtide.analysis.timeline.axis import PICTURE
from ebbtide.analysis.timeline.panels import Scale, TimelinePanel, TimelineStack
from ebbtide.errors import TraceError

CONTENT = "GPU activity"
_LANE_HEIGHT = 0.86
_PANEL = TimelinePanel("activity", on_gpu=True)
_REMARKS = ("height of a lane: share of the time",)


def panels(view: View, layout: Layout) -> Sequence[PanelDrawing]:
    return activity_panels(view, layout.tall, required=True)


@dataclass(frozen=True)
class ActivityDrawing(PanelDrawing):
    """Lanes of activity of a rank's GPU."""

    lanes: Mapping[str, TimelineStack]  # By name, from the bottom.

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        drawn: list[Artist] = []
        for number, (name, stack) in enumerate(self.lanes.items()):
            areas = draw_stack(axes, stack, self.view.axis, 1 / _LANE_HEIGHT, number)
            axes.axhline(number, color="#7b8794", lw=0.4)
            # A lane of one area is named by its label.
            drawn += areas if name == "idle" else []
        axes.set_ylim(0, len(self.lanes))
        axes.set_yticks(
            np.arange(len(self.lanes)) + _LANE_HEIGHT / 2, labels=list(self.lanes)
        )
        axes.tick_params(axis="y", length=0)
        return drawn


def activity_panels(view: View, height: float, required: bool) -> list[ActivityDrawing]:
    """Return the panel of a view, none where kernels were not recorded.

    Raises TraceError there if the panel is `required`."""
    lanes = activity_lanes(view.trace, view.rank, view.axis, PICTURE)
    if required and not lanes:
        raise TraceError(f"rank {view.rank} of {view.trace.path}: {NO_KERNELS}")
    return (
        [ActivityDrawing(view, height, _PANEL, lanes, remarks=_REMARKS)]
        if lanes
        else []
    )
