"""Makes traces: `Tracer` records inside a script, `DryRun` predicts, `TraceBuilder` takes rows, `open_trace` reads.

Importing this package loads nothing else, since that happens inside training jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.profiler.dryrun.session import DryRun, DryRunOptions
    from ebbtide.profiler.dryrun.trace_of_run import trace_of_run
    from ebbtide.profiler.memory_limits.limit import MemoryLimitExceeded, memory_limit
    from ebbtide.profiler.recording.spools.recovery import unfinished_trace as unfinished_trace
    from ebbtide.profiler.recording.tracer import Tracer
    from ebbtide.profiler.trace import Trace, TraceBuilder, TraceError, open_trace

__all__ = [
    "DryRun",
    "DryRunOptions",
    "MemoryLimitExceeded",
    "Trace",
    "TraceBuilder",
    "TraceError",
    "Tracer",
    "memory_limit",
    "open_trace",
    "trace_of_run",
]
_MODULES = {
    # Not for users: the reader of traces asks for it here, since the format does not know its recorder.
    "unfinished_trace": "recording.spools.recovery",
    "DryRun": "dryrun.session",
    "DryRunOptions": "dryrun.session",
    "Tracer": "recording.tracer",
    "MemoryLimitExceeded": "memory_limits.limit",
    "memory_limit": "memory_limits.limit",
    "trace_of_run": "dryrun.trace_of_run",
}


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'trace')}"), name)
