"""Draws traces as pictures with Matplotlib: memory, link and windows of free memory over time."""

from __future__ import annotations

from ebbtide.analysis.plot.figure import draw, save
from ebbtide.analysis.timeline.styles import LINK_COLORS, PHASE_COLORS, POOL_STYLES

__all__ = ["LINK_COLORS", "PHASE_COLORS", "POOL_STYLES", "draw", "save"]
