"""The trace format: schema, typed metadata, reader, builder, merge, spool recovery."""

from ebbtide.errors import TraceError, UserError
from ebbtide.profiler.trace.builder import RankBuilder, TraceBuilder
from ebbtide.profiler.trace.files import open_trace
from ebbtide.profiler.trace.trace import Trace

__all__ = [
    "RankBuilder",
    "Trace",
    "TraceBuilder",
    "TraceError",
    "UserError",
    "open_trace",
]
