"""A profiler of GPU memory and the PCIe link in training, and an optimizer that uses it to offload its state.

`open_trace` opens a trace, `TraceAnalysis` explains it, `ebbtide.profiler.Tracer` records one from a
script, `metrics` gives a recorded job its own figures, `ebbtide.interleave.InterleavedAdamW` runs the offloaded
optimizer. Importing this module does not import its packages.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.analysis.trace_analysis import TraceAnalysis
    from ebbtide.profiler.recording.live.job_metrics import metrics
    from ebbtide.profiler.trace import Trace, TraceError, open_trace

__version__ = "0.2.0"
__all__ = ["Trace", "TraceAnalysis", "TraceError", "__version__", "metrics", "open_trace"]


def __getattr__(name: str) -> Any:
    if name in ("Trace", "TraceError", "open_trace"):
        from ebbtide.profiler import trace

        return getattr(trace, name)
    if name == "TraceAnalysis":
        from ebbtide.analysis.trace_analysis import TraceAnalysis

        return TraceAnalysis
    if name == "metrics":
        from ebbtide.profiler.recording.live.job_metrics import metrics

        return metrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
