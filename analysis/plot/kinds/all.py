"""Memory, link and activity of the GPU, as far as they were recorded."""

from collections.abc import Sequence

from ebbtide.analysis.plot.kinds import Layout, both
from ebbtide.analysis.plot.panels import PanelDrawing, View

CONTENT = "memory, link and GPU activity"


def panels(view: View, layout: Layout) -> Sequence[PanelDrawing]:
    return both.panels(view, layout, with_all=True)
