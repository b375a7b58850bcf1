"""Traces as pictures: memory, link and free windows over time."""

from __future__ import annotations

from ebbtide.analysis.plot.figure import draw, save
from ebbtide.analysis.plot.styles import LINK_COLORS, PHASE_COLORS, POOL_STYLES

__all__ = ["LINK_COLORS", "PHASE_COLORS", "POOL_STYLES", "draw", "save"]
