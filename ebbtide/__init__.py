"""A profiler of GPU memory and the PCIe link in training, and an optimizer.

The optimizer uses the profile to offload its state.

`open_trace` opens a trace, `TraceAnalysis` explains it, `ebbtide.profiler.Tracer`
records one from a script, `metrics` gives a recorded job its own figures, `step` names
parts of its cycles,
`ebbtide.interleave.InterleavedAdamW` runs the offloaded optimizer. Importing this
module does not import its packages.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.features.cycles.marks import step
    from ebbtide.features.live.recording.job_metrics import metrics
    from ebbtide.profiler.trace import Trace, TraceError, open_trace
    from ebbtide.trace_analysis import TraceAnalysis

__version__ = "0.3.0"
__all__ = [
    "Trace",
    "TraceAnalysis",
    "TraceError",
    "__version__",
    "metrics",
    "open_trace",
    "step",
]


# Modules that the names are loaded from when they are first used.
_MODULES = {
    "TraceAnalysis": "ebbtide.trace_analysis",
    **dict.fromkeys(("Trace", "TraceError", "open_trace"), "ebbtide.profiler.trace"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ebbtide.seams import public_name

    # A job may use a name often.
    loaded = globals()[name] = public_name(__name__, name)
    return loaded


def __dir__() -> list[str]:
    return __all__
