"""Advice, limits and texts that several rules share."""

from __future__ import annotations

from ebbtide.analysis.metrics.trace_metrics import TraceMetrics

# A cause that costs less than this share of an iteration is not reported.
MIN_SHARE = 0.01
RECORD_COPIES = "record each copy: ebbtide profile --transfers"
ENABLE_ENGINE = '`ebbtide.interleave.deepspeed.enable(policy="adaptive")`'


def scope_text(metrics: TraceMetrics, phase: str | None = None) -> str:
    """Return the time that figures are of: the median iteration or one of its phases, or the whole trace."""
    return "in the whole trace" if metrics.iteration_ms is None else f"in the median {phase or 'iteration'}"


def record_memory(metrics: TraceMetrics) -> str:
    """Return how to make free memory known: by its capacity, where only that is missing."""
    if metrics.free_pool is not None and metrics.capacity_bytes is None:
        return "the capacity of the device is not known: import with --capacity 80GB"
    return "record on a machine with NVML, or import with --capacity and a monitor file"
