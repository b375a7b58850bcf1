"""Makes traces: `Tracer` records inside a script, `TraceBuilder` takes rows from elsewhere, `open_trace` reads them.

Importing this package loads nothing else, since that happens inside training jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.profiler.memory_limits.limit import MemoryLimitExceeded, memory_limit
    from ebbtide.profiler.trace import Trace, TraceBuilder, TraceError, open_trace
    from ebbtide.profiler.tracer import Tracer

__all__ = [
    "MemoryLimitExceeded",
    "Trace",
    "TraceBuilder",
    "TraceError",
    "Tracer",
    "memory_limit",
    "open_trace",
]
_MODULES = {"Tracer": "tracer", "MemoryLimitExceeded": "memory_limits.limit", "memory_limit": "memory_limits.limit"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'trace')}"), name)
