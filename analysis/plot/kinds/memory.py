"""Memory of the device, and of the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from ebbtide.analysis.metrics.missing import NO_MEMORY
from ebbtide.analysis.plot.kinds import Layout
from ebbtide.analysis.plot.panels import (
    PanelDrawing,
    View,
    draw_level,
    draw_stack,
    line_properties,
)
from ebbtide.analysis.timeline.axis import PICTURE
from ebbtide.analysis.timeline.memory import device_memory_panel, host_memory_panel
from ebbtide.analysis.timeline.panels import Scale
from ebbtide.errors import TraceError

CONTENT = "memory"
_HOST_HEIGHT = 1.1
# Lines of many short iterations would cover each other.
_NARROW_WIDTH_FACTOR = 0.6
_BAND_OPACITY = 0.2


def panels(view: View, layout: Layout) -> Sequence[PanelDrawing]:
    if not (drawn := memory_panels(view, layout.tall, with_host=True)):
        raise TraceError(f"rank {view.rank} of {view.trace.path}: {NO_MEMORY}")
    return drawn


@dataclass(frozen=True)
class MemoryDrawing(PanelDrawing):
    """Lines of memory pools, and the stack of categories behind them."""

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        drawn: list[Artist] = []
        width_factor = 1.0 if self.view.has_room_for_phases else _NARROW_WIDTH_FACTOR
        for line in self.panel.lines:
            edges, sizes = (
                self.view.axis.x(line.edges),
                np.asarray(line.values / scale.size),
            )
            style = line_properties(line.style, width_factor)
            drawn.append(
                axes.stairs(sizes, edges, baseline=None, label=line.label, **style)
            )
            if line.lowest is not None:
                lowest = line.lowest / scale.size
                axes.stairs(
                    sizes,
                    edges,
                    baseline=lowest,
                    fill=True,
                    color=style["color"],
                    alpha=_BAND_OPACITY,
                    lw=0,
                )
        if self.panel.stack is not None:
            drawn += draw_stack(axes, self.panel.stack, self.view.axis, scale.size)
        if self.panel.level is not None:
            drawn += draw_level(
                axes, self.view, self.panel.level, scale, self.panel.level_label
            )
        axes.set_ylim(0, scale.top / scale.size)
        axes.set_ylabel(f"{self.name} ({scale.unit})")
        return drawn


def memory_panels(view: View, height: float, with_host: bool) -> list[MemoryDrawing]:
    """Return the panel of the device's memory, and below it the panel of the host's.

    Only memory that was recorded has a panel. Host memory is included `with_host`, and
    always without memory of the device.
    """
    device = device_memory_panel(view.trace, view.rank, view.axis, PICTURE)
    host = host_memory_panel(view.trace, view.rank, view.axis, PICTURE)
    panels = [] if device.is_empty else [MemoryDrawing(view, height, device)]
    if host is not None and (with_host or device.is_empty):
        panels.append(MemoryDrawing(view, _HOST_HEIGHT if panels else height, host))
    return panels
