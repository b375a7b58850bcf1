"""The interactive timeline of a rank, drawn by Bokeh in the reader's browser.

Colours are the page's: what has a tag is painted by the CSS variable of that name (templates/timeline.js), so that a
dark page has a dark timeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.layouts import column
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CrosshairTool,
    FixedTicker,
    GlyphRenderer,
    HoverTool,
    LinearAxis,
    NoOverlap,
    PanTool,
    Quad,
    Range1d,
    Step,
    WheelZoomTool,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from ebbtide.analysis.report.boxes import Boxes
from ebbtide.analysis.report.lines import Clock, Panel
from ebbtide.analysis.report.tooltips import WINDOW

# More borders between iterations than these would be a surface.
_MOST_BORDERS = 400
_HEIGHTS = {"memory": 300, "host memory": 130, "link": 170}
# Beside the frames, so that those of all panels stand under each other.
_LEFT, _RIGHT = 72, 12


@dataclass(frozen=True)
class Strip:
    """A row of boxes above the panels. name: what stands beside it. boxes: by the name of their colour. fill: how
    opaque they are."""

    name: str
    boxes: dict[str, Boxes]
    tooltip: str
    fill: float = 1.0


@dataclass(frozen=True)
class Drawing:
    """All that a timeline shows; there is a strip or a panel. iterations: (number, where it begins, where it ends).
    windows: the boxes and their least free bytes; they hang from the level of the first panel."""

    clock: Clock
    strips: Sequence[Strip]
    panels: Sequence[Panel]
    iterations: Sequence[tuple[int, float, float]]
    windows: tuple[Boxes, Any] | None


def timeline(drawing: Drawing) -> dict[str, Any]:
    """What Bokeh.embed.embed_item takes: plain JSON."""
    clock = drawing.clock
    first, last, start, end = clock(np.array([clock.first, clock.last, *clock.shown], np.int64))
    margin = (last - first) / 100
    x_range = Range1d(start=start, end=end, bounds=(first - margin, last + margin), min_interval=(last - first) / 1e6)
    crosshair = Span(dimension="height", line_width=1, line_dash="dotted", tags=["muted"])
    plots = [_strips(drawing, x_range)] if drawing.strips else []
    plots += [_panel(panel, drawing, x_range) for panel in drawing.panels]
    borders = np.array([begins for _, begins, _ in drawing.iterations[1:]])
    for plot in plots:
        if 0 < len(borders) <= _MOST_BORDERS:
            plot.vspan(borders, line_width=1, tags=["rule"], level="underlay")
        pan, zoom = PanTool(dimensions="width"), WheelZoomTool(dimensions="width", maintain_focus=False)
        plot.add_tools(pan, zoom, BoxZoomTool(), CrosshairTool(overlay=crosshair))
        plot.toolbar.active_drag, plot.toolbar.active_scroll = pan, zoom
    since = "since the first iteration began " if drawing.iterations else ""
    below = plots[-1].below[0]
    below.visible, below.axis_label = True, f"time {since}({clock.unit})"
    plots[-1].height += 44
    return dict(json_item(column(*plots, sizing_mode="stretch_width")))


def _figure(name: str, height: int, x_range: Range1d, y_range: Range1d) -> Any:
    plot = figure(
        name=name,
        height=height,
        x_range=x_range,
        y_range=y_range,
        tools="",
        toolbar_location=None,
        sizing_mode="stretch_width",
        min_border_left=_LEFT,
        min_border_right=_RIGHT,
        min_border_top=8,
        min_border_bottom=8,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_alpha=0,
    )
    plot.xaxis.visible = False
    plot.xgrid.visible = False
    return plot


def _strips(drawing: Drawing, x_range: Range1d) -> Any:
    """A row for each strip, and above them the iterations' numbers where those have room."""
    rows = len(drawing.strips)
    step = next(s for s in _round_numbers() if len(drawing.iterations) <= s * _MOST_BORDERS)
    numbers = [iteration for iteration in drawing.iterations if iteration[0] % step == 0]
    names = {rows - row - 0.5: strip.name for row, strip in enumerate(drawing.strips)}
    if numbers:
        names[rows + 0.4] = "iteration"
    plot = _figure("strips", 26 * len(names) + 16, x_range, Range1d(start=0, end=len(names)))
    plot.ygrid.visible = False
    plot.yaxis.ticker = FixedTicker(ticks=list(names))
    plot.yaxis.major_label_overrides = names
    plot.yaxis.axis_line_alpha = plot.yaxis.major_tick_line_alpha = 0
    for row, strip in enumerate(drawing.strips):
        bottom, top = rows - row - 0.9, rows - row - 0.1
        drawn = [_quads(plot, color, boxes, bottom, top, strip.fill) for color, boxes in strip.boxes.items()]
        _hover(plot, drawn, strip.tooltip)
    if numbers:
        middles = {(begins + ends) / 2: str(number) for number, begins, ends in numbers}
        plot.add_layout(LinearAxis(fixed_location=rows, axis_line_alpha=0, major_tick_line_alpha=0), "above")
        (axis,) = plot.above
        axis.ticker = FixedTicker(ticks=list(middles))
        axis.major_label_overrides = middles
        axis.major_label_policy = NoOverlap(min_distance=6)
        axis.major_label_standoff = 0
    return plot


def _round_numbers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ..."""
    return (first * 10**power for power in itertools.count() for first in (1, 2, 5))


def _panel(panel: Panel, drawing: Drawing, x_range: Range1d) -> Any:
    plot = _figure(panel.name, _HEIGHTS[panel.name], x_range, Range1d(start=0, end=panel.top, bounds=(0, None)))
    plot.yaxis.axis_label = f"{panel.name} ({panel.unit})"
    plot.yaxis.ticker.desired_num_ticks = 5
    plot.yaxis.minor_tick_line_alpha = plot.xaxis.minor_tick_line_alpha = 0
    if panel.name == "memory" and drawing.windows is not None and panel.level is not None:
        boxes, free = drawing.windows
        bottom = (panel.level - free / panel.scale).astype(np.float32)
        boxes = replace(boxes, facts=boxes.facts | {"bottom": bottom})
        _hover(plot, [_quads(plot, "window", boxes, "bottom", panel.level, 0.16)], WINDOW)
    for line in panel.lines:
        source = ColumnDataSource({"x": line.x, "y": line.y.astype(np.float32)})
        width = 1.2 if panel.name == "link" else 1.6
        step = Step(x="x", y="y", mode="after", line_width=width, line_dash=line.dash)
        _draw(plot, f"{panel.name}/{line.name}", line.color, source, step)
    if panel.level is not None:
        plot.add_layout(Span(location=panel.level, dimension="width", line_width=1.2, line_dash="dashed", tags=["ink"]))
    return plot


def _quads(plot: Any, color: str, boxes: Boxes, bottom: float | str, top: float, fill: float) -> GlyphRenderer:
    source = ColumnDataSource({"left": boxes.left, "right": boxes.right, **boxes.facts})
    sides = {"left": "left", "right": "right", "bottom": bottom, "top": top}
    return _draw(
        plot,
        color,
        color,
        source,
        Quad(**sides, fill_alpha=fill, line_alpha=0),
        Quad(**sides, fill_alpha=min(2 * fill, 1), line_alpha=1),
    )


def _hover(plot: Any, drawn: list[GlyphRenderer], tooltip: str) -> None:
    plot.add_tools(HoverTool(renderers=drawn, tooltips=tooltip, point_policy="follow_mouse", show_arrow=False))


def _draw(plot: Any, name: str, color: str, source: ColumnDataSource, glyph: Any, hover: Any = None) -> GlyphRenderer:
    """Add a renderer to a plot.

    `plot.quad` and `plot.step` would make three more glyphs for each, which nothing shows and which take time.
    """
    renderer = GlyphRenderer(data_source=source, glyph=glyph, hover_glyph=hover, name=name, tags=[color])
    plot.renderers.append(renderer)
    return renderer
