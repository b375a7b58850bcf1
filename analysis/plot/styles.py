"""The styles of a timeline as Matplotlib takes them, on a light background."""

from typing import Any

from ebbtide.analysis.timeline.styles import COLORS, AreaStyle, BoxStyle, LineStyle

# Text and borders between iterations.
TEXT_COLOR, NOTE_COLOR, BORDER_COLOR, OUTLINE_COLOR = "#222222", "#444444", "#999999", "#777777"

_HATCHES = {"rising": "////", "falling": "\\\\\\\\", "dots": "....", "cross": "xxxx", "horizontal": "----"}
_HATCH_COLOR, _HATCH_OPACITY = "#ffffff", 0.55


def line_properties(style: LineStyle, width_factor: float = 1.0) -> dict[str, Any]:
    """Return the properties of a line; Matplotlib counts dashes in line widths too."""
    dash: Any = (0, style.dash) if style.dash else "solid"
    return {"color": COLORS[style.color].light, "lw": style.width * width_factor, "ls": dash}


def box_properties(style: BoxStyle) -> dict[str, Any]:
    return {"fc": COLORS[style.fill].light, "ec": COLORS[style.edge].light, "lw": style.edge_width}


def area_properties(style: AreaStyle) -> dict[str, Any]:
    """Return the properties of an area of a stack, behind lines and in front of phases."""
    hatch = {"hatch": _HATCHES[style.hatch], "ec": (_HATCH_COLOR, _HATCH_OPACITY)} if style.hatch else {}
    return {"fc": COLORS[style.color].light, "lw": 0, "zorder": 0.8, **hatch}
