"""The trace: what a job did, on disk and in hand."""

from ebbtide.errors import TraceError, UserError
from ebbtide.profiler.trace.builder import RankBuilder, TraceBuilder
from ebbtide.profiler.trace.reader import Trace, open_trace

__all__ = ["RankBuilder", "Trace", "TraceBuilder", "TraceError", "UserError", "open_trace"]
