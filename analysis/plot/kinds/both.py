"""Memory of the device and the link; without memory, activity of the GPU."""

from collections.abc import Sequence

from ebbtide.analysis.plot.kinds import Layout
from ebbtide.analysis.plot.kinds.activity import activity_panels
from ebbtide.analysis.plot.kinds.link import link_panels
from ebbtide.analysis.plot.kinds.memory import memory_panels
from ebbtide.analysis.plot.panels import PanelDrawing, PhasesDrawing, View
from ebbtide.analysis.timeline.panels import TimelinePanel

CONTENT = "memory and link"


def panels(
    view: View, layout: Layout, with_all: bool = False
) -> Sequence[PanelDrawing]:
    """Return the panels of what was recorded.

    `with_all`: also of host memory, and of activity in any case.
    """
    memory = memory_panels(view, layout.tall, with_host=with_all)
    drawn: list[PanelDrawing] = [
        *memory,
        *link_panels(view, layout.low if memory else layout.middle, required=False),
    ]
    if with_all or not memory:
        drawn += activity_panels(view, layout.middle, required=False)
    return drawn or [PhasesDrawing(view, layout.low / 2, TimelinePanel("phases"))]
