"""The trace format: schema, typed metadata, reader, builder, merge, spool recovery."""

from typing import TYPE_CHECKING, Any

from ebbtide.errors import TraceError, UserError
from ebbtide.profiler.trace.files import open_trace
from ebbtide.profiler.trace.trace import Trace

if TYPE_CHECKING:
    from ebbtide.profiler.trace.builder import RankBuilder, TraceBuilder

__all__ = [
    "RankBuilder",
    "Trace",
    "TraceBuilder",
    "TraceError",
    "UserError",
    "open_trace",
]


def __getattr__(name: str) -> Any:
    # Readers need no builder.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ebbtide.profiler.trace import builder

    return getattr(builder, name)
