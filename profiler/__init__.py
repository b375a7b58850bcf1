"""Makes traces by recording, predicting, building them from rows, or reading them.

`Tracer` records inside a script, `DryRun` predicts, `TraceBuilder` takes rows,
`open_trace` reads.

Importing this package loads nothing else, since that happens inside training jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.features.dryrun.session import DryRun, DryRunOptions
    from ebbtide.features.dryrun.trace_of_run import trace_of_run
    from ebbtide.features.memory.limit import MemoryLimitExceeded, memory_limit
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
    "Tracer": "recording.tracer",
    **dict.fromkeys(("Trace", "TraceBuilder", "TraceError", "open_trace"), "trace"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ebbtide.seams import public_name

    return public_name(__name__, name)
