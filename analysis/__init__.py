"""Explains traces by metrics per phase, free memory, findings, plots and reports.

Free memory means windows of free memory.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide import TraceAnalysis

__all__ = ["TraceAnalysis"]


def __getattr__(name: str) -> Any:
    # Commands import single modules of this package and should not load all others.
    if name == "TraceAnalysis":
        import ebbtide

        return ebbtide.TraceAnalysis
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
