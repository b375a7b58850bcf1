"""Draws memory, link and windows of free memory of a trace over time with
Matplotlib."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.analysis.plot.figure import draw, save
    from ebbtide.analysis.timeline.styles import LINK_COLORS, PHASE_COLORS, POOL_STYLES

__all__ = ["LINK_COLORS", "PHASE_COLORS", "POOL_STYLES", "draw", "save"]


def __getattr__(name: str) -> Any:
    # The command line lists the kinds of pictures without Matplotlib.
    if name in ("draw", "save"):
        from ebbtide.analysis.plot import figure

        return getattr(figure, name)
    if name in __all__:
        from ebbtide.analysis.timeline import styles

        return getattr(styles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
