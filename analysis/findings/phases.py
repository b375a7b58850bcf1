"""Reports traces without phases, which most rules need."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Unknown
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics


def check(metrics: TraceMetrics) -> Unknown | None:
    """Return what to record where the trace has no finished iteration."""
    if metrics.iteration_ms is not None:
        return None
    return Unknown(
        "phases",
        "which phases does an iteration have, and how long are they?",
        "record the job with `ebbtide profile`, or import its DeepSpeed log or torch.profiler trace",
    )
