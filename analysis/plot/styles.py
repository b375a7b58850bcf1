"""The styles of a timeline as Matplotlib takes them, on a light background."""

from __future__ import annotations

from typing import Any

from ebbtide.analysis.timeline.styles import COLORS, BoxStyle, LineStyle

# Text and borders between iterations.
TEXT_COLOR, NOTE_COLOR, BORDER_COLOR, OUTLINE_COLOR = "#222222", "#444444", "#999999", "#777777"


def line_properties(style: LineStyle, width_factor: float = 1.0) -> dict[str, Any]:
    """Return the properties of a line; Matplotlib counts dashes in line widths too."""
    dash: Any = (0, style.dash) if style.dash else "solid"
    return {"color": COLORS[style.color].light, "lw": style.width * width_factor, "ls": dash}


def box_properties(style: BoxStyle) -> dict[str, Any]:
    """Return the properties of a box."""
    return {"fc": COLORS[style.fill].light, "ec": COLORS[style.edge].light, "lw": style.edge_width}
