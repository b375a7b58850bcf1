"""Draws stacks of areas with Matplotlib."""

from __future__ import annotations

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from ebbtide.analysis.plot.styles import area_properties
from ebbtide.analysis.timeline.axis import TimeAxis
from ebbtide.analysis.timeline.stack import TimelineStack


def draw_stack(
    axes: Axes, stack: TimelineStack, axis: TimeAxis, size: float = 1.0, bottom: float = 0.0, prefix: str = ""
) -> list[Artist]:
    """Draw the areas of a stack.

    Args:
        axes: The axes.
        stack: The areas.
        axis: The time axis.
        size: Value of one unit of the axes.
        bottom: Where the stack begins, in units of the axes.
        prefix: Added before the names of layers in labels.

    Returns:
        The areas from the top, in the order in which a legend lists them.
    """
    edges, borders = axis.x(stack.edges), [bottom + border / size for border in stack.borders]
    drawn: list[Artist] = []
    for layer, low, high in zip(stack.layers, borders[:-1], borders[1:], strict=True):
        label = f"{prefix}{layer.name}"
        drawn.append(axes.stairs(high, edges, baseline=low, fill=True, label=label, **area_properties(layer.style)))
    return drawn[::-1]
