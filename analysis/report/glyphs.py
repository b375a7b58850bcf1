"""Bokeh glyphs for the lines and boxes of a timeline.

Glyphs have no colours of their own: the tags of a renderer are the CSS variables that templates/timeline.js paints it
with, first for the fill, second (if any) for the outline. So a dark page has a dark timeline.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, GlyphRenderer, HoverTool, Quad, Scatter, Step, VAreaStep

from ebbtide.analysis.report.chart_boxes import ChartBoxes
from ebbtide.analysis.report.chart_panels import ChartLine, ChartStack
from ebbtide.analysis.timeline.styles import CATEGORY_STYLES, COLORS, PHASE_OPACITY, RECURRING, WINDOW

# Boxes of phases have no lines in front of them: the strongest is opaque.
STRIP_OPACITY = {phase: round(opacity / max(PHASE_OPACITY.values()), 2) for phase, opacity in PHASE_OPACITY.items()}
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
    """Return the style sheet: a variable per colour, for light and dark pages, and fills of phases and categories."""
    light = " ".join(f"--{name}: {color.light};" for name, color in COLORS.items())
    dark = " ".join(f"--{name}: {color.dark};" for name, color in COLORS.items())
    fills = "\n".join(
        f".{name} {{ fill: var(--{name}); fill-opacity: {STRIP_OPACITY.get(name, 1)}; --key: var(--{name});"
        f" --key-opacity: {STRIP_OPACITY.get(name, 1)}; }}"
        for name in (*STRIP_OPACITY, "other")
    )
    frames = "\n".join(f".stacks .{name} rect {{ fill: var(--{s.color}); }}" for name, s in CATEGORY_STYLES.items())
    dark_style = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f":root {{ {light} }}\n{dark_style}\n{fills}\n{frames}\n"


def draw_line(plot: Any, line: ChartLine, edge: float) -> None:
    """Draw a step function, the area of a band or below a rate, and marks for impossible rates. The renderer of a line
    has its key as name, that of the area `KEY/area`."""
    y = line.y.astype(np.float32)
    columns = {"x": line.x, "y": y}
    area = None
    if line.lowest is not None:
        columns["lowest"] = line.lowest.astype(np.float32)
        area = VAreaStep(x="x", y1="lowest", y2="y", step_mode="after", fill_alpha=_BAND_OPACITY)
    elif line.style.fill is not None:
        # Areas have no gaps: an unknown rate is an area without height.
        columns["filled"] = np.nan_to_num(y)
        area = VAreaStep(x="x", y1=0, y2="filled", step_mode="after")
    source = ColumnDataSource(columns)
    if area is not None:
        _add(plot, f"{line.key}/area", [line.style.fill or line.style.color], source, area)
    step = Step(x="x", y="y", mode="after", line_width=line.width, line_dash=line.dash)
    _add(plot, line.key, [line.style.color], source, step)
    if len(line.above_peak):
        marks = ColumnDataSource({"x": line.above_peak, "y": np.full(len(line.above_peak), line.sign * edge)})
        marker = Scatter(x="x", y="y", size=7, marker="triangle" if line.sign > 0 else "inverted_triangle")
        _add(plot, f"{line.key}/above peak", [line.style.color], marks, marker)


def draw_stack(plot: Any, stack: ChartStack, y_range: str = "default") -> None:
    """Draw areas one above the other."""
    tops = {f"top {number}": area.top.astype(np.float32) for number, area in enumerate(stack.areas)}
    source = ColumnDataSource({"x": stack.x, "bottom": np.zeros(len(stack.x), np.float32), **tops})
    for area, low, high in zip(stack.areas, ["bottom", *tops], tops, strict=False):
        glyph = VAreaStep(x="x", y1=low, y2=high, step_mode="after", fill_alpha=1)
        if area.style.hatch is not None:
            glyph.update(
                hatch_pattern=_HATCHES[area.style.hatch], hatch_scale=_HATCH_SCALE, hatch_color="white", hatch_alpha=0.6
            )
        renderer = _add(plot, area.key, [area.style.color], source, glyph)
        renderer.y_range_name = y_range


def draw_boxes(plot: Any, color: str, boxes: ChartBoxes, bottom: float | str, top: float) -> GlyphRenderer:
    """Draw boxes of one colour."""
    source = ColumnDataSource({"left": boxes.left, "right": boxes.right, **boxes.columns})
    sides = {"left": "left", "right": "right", "bottom": bottom, "top": top}
    style = _OUTLINED.get(color)
    opacity = STRIP_OPACITY.get(color, 1.0)
    has_outline = style is not None and len(boxes.left) <= _MAX_OUTLINED
    outline = {"line_alpha": 1.0 if has_outline else 0.0, "line_width": max(1.0, style.edge_width if style else 0.0)}
    return _add(
        plot,
        color,
        [color, style.edge] if style is not None else [color],
        source,
        Quad(**sides, fill_alpha=opacity, **outline),
        Quad(**sides, fill_alpha=min(2 * opacity, 1.0), line_alpha=1, line_width=1.5),
    )


def add_tooltip(plot: Any, renderers: list[GlyphRenderer], template: str) -> None:
    """Show a tooltip while the pointer is on one of the renderers' boxes."""
    plot.add_tools(HoverTool(renderers=renderers, tooltips=template, point_policy="follow_mouse", show_arrow=False))


def _add(
    plot: Any, name: str, colors: list[str], source: ColumnDataSource, glyph: Any, hover: Any = None
) -> GlyphRenderer:
    """Add a renderer to a plot.

    `plot.quad` and `plot.step` would make three more glyphs for each, which nothing shows and which take time.
    """
    renderer = GlyphRenderer(data_source=source, glyph=glyph, hover_glyph=hover, name=name, tags=colors)
    plot.renderers.append(renderer)
    return renderer
