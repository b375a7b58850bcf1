"""Draws the interactive timeline of a rank with Bokeh, in the reader's browser.

Glyphs have no colours: the tags of a renderer are the CSS variables that
templates/timeline.js paints it with, first for the fill, second (if any) for the
outline. So a dark page has a dark timeline.
"""

import itertools
from typing import Any

import numpy as np
from bokeh import __version__ as bokeh_version
from bokeh import models
from bokeh.document import Document
from bokeh.layouts import column
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from ebbtide.analysis.report.page_panels import Lanes
from ebbtide.analysis.report.timeline_content import (
    WINDOW_TOOLTIP,
    ChartBoxes,
    TimelineContent,
)
from ebbtide.analysis.timeline.axis import TimeAxis
from ebbtide.analysis.timeline.panels import TimelineLine, TimelinePanel, TimelineStack
from ebbtide.analysis.timeline.styles import (
    COLORS,
    LEVEL,
    PHASE_OPACITY,
    RECURRING,
    WINDOW,
)

# Boxes of phases have no lines in front of them: the strongest is opaque.
STRIP_OPACITY = {
    phase: round(opacity / max(PHASE_OPACITY.values()), 2)
    for phase, opacity in PHASE_OPACITY.items()
}
_BAND_OPACITY = 0.2
_HATCHES = {
    "rising": "right_diagonal_line",
    "falling": "left_diagonal_line",
    "dots": "dot",
    "cross": "diagonal_cross",
    "horizontal": "horizontal_line",
}
# Pixels between the lines of a hatch.
_HATCH_SCALE = 7
# Outlines of more boxes than these would hide them.
_MAX_OUTLINED = 400
_OUTLINED = {style.fill: style for style in (WINDOW, RECURRING)}


def color_styles() -> str:
    """Return the style sheet: a variable per colour, for light and dark pages, and
    fills of phases and categories."""
    light = " ".join(f"--{name}: {color.light};" for name, color in COLORS.items())
    dark = " ".join(f"--{name}: {color.dark};" for name, color in COLORS.items())
    fills = "\n".join(
        f".{name} {{ fill: var(--{name}); fill-opacity: {STRIP_OPACITY.get(name, 1)}; "
        f"--key: var(--{name});"
        f" --key-opacity: {STRIP_OPACITY.get(name, 1)}; }}"
        for name in (*STRIP_OPACITY, "other")
    )
    dark_style = (
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )
    return f":root {{ {light} }}\n{dark_style}\n{fills}\n"


def draw_line(
    plot: Any, panel: TimelinePanel, line: TimelineLine, axis: TimeAxis
) -> None:
    """Draw a step function, the area of a band or below a rate, and marks for
    impossible rates. The renderer of a line is named by its key, the renderer of
    its area `KEY/area`."""
    key, size = panel.key(line), panel.scale.size
    y = _until_end(line.sign * line.values / size)
    columns = {"x": axis.x(line.edges), "y": y}
    area = None
    if line.lowest is not None:
        columns["lowest"] = _until_end(line.lowest / size)
        area = models.VAreaStep(
            x="x", y1="lowest", y2="y", step_mode="after", fill_alpha=_BAND_OPACITY
        )
    elif line.style.fill is not None:
        # Areas have no gaps: an unknown rate is an area without height.
        columns["filled"] = np.nan_to_num(y)
        area = models.VAreaStep(x="x", y1=0, y2="filled", step_mode="after")
    source = models.ColumnDataSource(columns)
    if area is not None:
        _add_renderer(
            plot, f"{key}/area", [line.style.fill or line.style.color], source, area
        )
    width, dash = line.style.on_screen
    step = models.Step(x="x", y="y", mode="after", line_width=width, line_dash=dash)
    _add_renderer(plot, key, [line.style.color], source, step)
    if len(line.above_peak_ns):
        times = axis.x(line.above_peak_ns)
        marks = models.ColumnDataSource(
            {"x": times, "y": np.full(len(times), line.sign * panel.scale.units)}
        )
        marker = models.Scatter(
            x="x",
            y="y",
            size=7,
            marker="triangle" if line.sign > 0 else "inverted_triangle",
        )
        _add_renderer(plot, f"{key}/above peak", [line.style.color], marks, marker)


def _until_end(values: Any) -> Any:
    """Return the values of steps, and again the last one for the end of its step."""
    return np.append(values, values[-1]).astype(np.float32)


def draw_stack(
    plot: Any,
    name: str,
    stack: TimelineStack,
    axis: TimeAxis,
    size: float,
    y_range: str = "default",
) -> None:
    """Draw areas named `NAME/category LAYER`.

    `size` is the value of one unit of the plot.
    """
    borders = [np.append(border, border[-1]) / size for border in stack.borders]
    columns = {
        f"border {number}": border.astype(np.float32)
        for number, border in enumerate(borders)
    }
    source = models.ColumnDataSource({"x": axis.x(stack.edges), **columns})
    for layer, (low, high) in zip(
        stack.layers, itertools.pairwise(columns), strict=True
    ):
        glyph = models.VAreaStep(
            x="x", y1=low, y2=high, step_mode="after", fill_alpha=1
        )
        hatch = layer.style.hatch
        if hatch is not None:
            glyph.update(
                hatch_pattern=_HATCHES[hatch],
                hatch_scale=_HATCH_SCALE,
                hatch_color="white",
                hatch_alpha=0.6,
            )
        renderer = _add_renderer(
            plot, f"{name}/category {layer.name}", [layer.style.color], source, glyph
        )
        renderer.y_range_name = y_range


def draw_boxes(
    plot: Any, color: str, boxes: ChartBoxes, bottom: float | str, top: float
) -> models.GlyphRenderer:
    source = models.ColumnDataSource(
        {"left": boxes.left, "right": boxes.right, **boxes.columns}
    )
    sides = {"left": "left", "right": "right", "bottom": bottom, "top": top}
    style = _OUTLINED.get(color)
    opacity = STRIP_OPACITY.get(color, 1.0)
    has_outline = style is not None and len(boxes.left) <= _MAX_OUTLINED
    outline = {
        "line_alpha": 1.0 if has_outline else 0.0,
        "line_width": max(1.0, style.edge_width if style else 0.0),
    }
    return _add_renderer(
        plot,
        color,
        [color, style.edge] if style is not None else [color],
        source,
        models.Quad(**sides, fill_alpha=opacity, **outline),
        models.Quad(
            **sides, fill_alpha=min(2 * opacity, 1.0), line_alpha=1, line_width=1.5
        ),
    )


def add_tooltip(
    plot: Any, renderers: list[models.GlyphRenderer], template: str
) -> None:
    """Show a tooltip while the pointer is on one of the renderers' boxes."""
    plot.add_tools(
        models.HoverTool(
            renderers=renderers,
            tooltips=template,
            point_policy="follow_mouse",
            show_arrow=False,
        )
    )


def _add_renderer(
    plot: Any,
    name: str,
    colors: list[str],
    source: models.ColumnDataSource,
    glyph: Any,
    hover: Any = None,
) -> models.GlyphRenderer:
    """Add a renderer to a plot. `plot.quad` and `plot.step` would make three more
    glyphs for each, which take time."""
    renderer = models.GlyphRenderer(
        data_source=source, glyph=glyph, hover_glyph=hover, name=name, tags=colors
    )
    plot.renderers.append(renderer)
    return renderer


# More borders between iterations than these would be a surface.
_MAX_BORDERS = 400
_HEIGHTS = {"memory": 300, "host memory": 150, "link": 200}
_STRIP_HEIGHT, _LANE_HEIGHT, _TIME_LABELS_HEIGHT = 26, 40, 44
# Share of the height of a lane that 100 % takes.
_LANE_FILL = 0.85
# The same for all plots, so that their frames are aligned.
_LEFT, _RIGHT = 72, 12
_LEVEL_DASH = [round(length) for length in LEVEL.dash]


def timeline_json(content: TimelineContent) -> dict[str, Any]:
    """Return the argument of Bokeh.embed.embed_item: plain JSON."""
    axis = content.axis
    first, last, start, end = axis.x(
        np.array([axis.start_ns, axis.end_ns, *content.initial], np.int64)
    )
    margin = (last - first) / 100
    x_range = models.Range1d(
        start=start,
        end=end,
        bounds=(first - margin, last + margin),
        min_interval=(last - first) / 1e6,
    )
    crosshair = Span(
        dimension="height", line_width=1, line_dash="dotted", tags=["muted"]
    )
    plots = [_strips_plot(content, x_range)] if content.strips else []
    plots += [_lanes_plot(content.lanes, axis, x_range)] if content.lanes else []
    plots += [_panel_plot(panel, content, x_range) for panel in content.panels]
    borders = np.array([label.start for label in content.iterations[1:]])
    for plot in plots:
        if 0 < len(borders) <= _MAX_BORDERS:
            plot.vspan(borders, line_width=1, tags=["rule"], level="underlay")
        pan, zoom = (
            models.PanTool(dimensions="width"),
            models.WheelZoomTool(dimensions="width", maintain_focus=False),
        )
        # Strips and lanes have rows, not values.
        box = models.BoxZoomTool(
            dimensions="both" if plot.yaxis.axis_label else "width"
        )
        plot.add_tools(pan, zoom, box, models.CrosshairTool(overlay=crosshair))
        plot.toolbar.active_drag, plot.toolbar.active_scroll = pan, zoom
    since = "since the start of the first iteration " if content.iterations else ""
    time_axis = plots[-1].below[0]
    time_axis.visible, time_axis.axis_label = True, f"time {since}({axis.unit})"
    plots[-1].height += _TIME_LABELS_HEIGHT
    # What `bokeh.embed.json_item` returns, which walks all models five times more and
    # imports Bokeh's server.
    document = Document()
    document.title = ""
    document.add_root(column(*plots, sizing_mode="stretch_width"))
    content_json = document.to_json(deferred=False)
    root_id = content_json["roots"][0]["id"]
    return {
        "target_id": None,
        "root_id": root_id,
        "doc": dict(content_json),
        "version": bokeh_version,
    }


def _figure(
    name: str, height: int, x_range: models.Range1d, y_range: models.Range1d
) -> Any:
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


def _rows_plot(
    name: str, height: int, x_range: models.Range1d, rows: dict[float, str]
) -> Any:
    """Return a plot with rows of a height instead of values.

    `rows` has the name of each at its place.
    """
    plot = _figure(
        name, height * len(rows) + 16, x_range, models.Range1d(start=0, end=len(rows))
    )
    plot.ygrid.visible = False
    plot.yaxis.ticker = models.FixedTicker(ticks=list(rows))
    plot.yaxis.major_label_overrides = rows
    plot.yaxis.axis_line_alpha = plot.yaxis.major_tick_line_alpha = 0
    return plot


def _strips_plot(content: TimelineContent, x_range: models.Range1d) -> Any:
    """Draw a row for each strip, and above the numbers of iterations that have room."""
    rows = len(content.strips)
    strides = (first * 10**power for power in itertools.count() for first in (1, 2, 5))
    stride = next(
        stride for stride in strides if len(content.iterations) <= stride * _MAX_BORDERS
    )
    labels = [label for label in content.iterations if label.number % stride == 0]
    names = {rows - row - 0.5: strip.name for row, strip in enumerate(content.strips)}
    if labels:
        names[rows + 0.4] = "iteration"
    plot = _rows_plot("strips", _STRIP_HEIGHT, x_range, names)
    for row, strip in enumerate(content.strips):
        bottom, top = rows - row - 0.9, rows - row - 0.1
        renderers = [
            draw_boxes(plot, color, boxes, bottom, top)
            for color, boxes in strip.boxes.items()
        ]
        add_tooltip(plot, renderers, strip.tooltip)
    if labels:
        middles = {(label.start + label.end) / 2: str(label.number) for label in labels}
        plot.add_layout(
            models.LinearAxis(
                fixed_location=rows, axis_line_alpha=0, major_tick_line_alpha=0
            ),
            "above",
        )
        (axis,) = plot.above
        axis.ticker = models.FixedTicker(ticks=list(middles))
        axis.major_label_overrides = middles
        axis.major_label_policy = models.NoOverlap(min_distance=6)
        axis.major_label_standoff = 0
    return plot


def _lanes_plot(lanes: Lanes, axis: TimeAxis, x_range: models.Range1d) -> Any:
    """Draw a lane for each kind of activity.

    The values of each are percent, on a range of its own.
    """
    rows, full = len(lanes), 100 / _LANE_FILL
    names = {rows - row - 1 + _LANE_FILL / 2: name for row, name in enumerate(lanes)}
    plot = _rows_plot("activity", _LANE_HEIGHT, x_range, names)
    for row, (name, stack) in enumerate(lanes.items()):
        below = rows - row - 1
        plot.extra_y_ranges[name] = models.Range1d(
            start=-below * full, end=(rows - below) * full
        )
        draw_stack(plot, f"activity/{name}", stack, axis, 0.01, name)
        plot.add_layout(
            Span(location=below, dimension="width", line_width=1, tags=["rule"])
        )
    return plot


def _panel_plot(
    panel: TimelinePanel, content: TimelineContent, x_range: models.Range1d
) -> Any:
    scale = panel.scale
    bottom = -scale.units if panel.is_link else 0.0
    y_range = models.Range1d(start=bottom, end=scale.units, bounds=(bottom, None))
    # Host memory is the main panel of a job without a GPU.
    kind = (
        "memory"
        if panel is content.panels[0] and panel.name == "host memory"
        else panel.name
    )
    plot = _figure(panel.name, _HEIGHTS[kind], x_range, y_range)
    plot.yaxis.axis_label = f"{panel.name} ({scale.unit})"
    plot.yaxis.ticker.desired_num_ticks = 5
    plot.yaxis.minor_tick_line_alpha = plot.xaxis.minor_tick_line_alpha = 0
    levels = [] if panel.level is None else [panel.level / scale.size]
    if panel is content.panels[0] and content.windows is not None and levels:
        add_tooltip(
            plot,
            [draw_boxes(plot, "window", content.windows, "bottom", levels[0])],
            WINDOW_TOOLTIP,
        )
    if panel.stack is not None:
        draw_stack(plot, panel.name, panel.stack, content.axis, scale.size)
    for line in panel.lines:
        draw_line(plot, panel, line, content.axis)
    if panel.is_link:
        # Rates of both directions: their labels are without a sign
        # (templates/timeline.js).
        plot.yaxis.tags = ["unsigned"]
        plot.add_layout(
            Span(location=0, dimension="width", line_width=1, tags=["level"])
        )
        levels += [-level for level in levels]
    for level in levels:
        plot.add_layout(
            Span(
                location=level,
                dimension="width",
                line_width=1.2,
                line_dash=_LEVEL_DASH,
                tags=["level"],
            )
        )
    return plot
