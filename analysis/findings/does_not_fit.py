"""Finds predicted jobs that need more device memory than there is."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the memory that the job needs with the capacity of the device."""
    free, capacity = metrics.always_free_bytes, metrics.capacity_bytes
    if not metrics.has_gpu or free is None or capacity is None or free >= 0:
        return None
    return Finding(
        "does-not-fit",
        "The job does not fit into the device's memory",
        None,
        (
            f"it needs {bytes_text(capacity - free)} of the {bytes_text(capacity)} that it may use "
            f"({metrics.free_pool}): {bytes_text(-free)} are missing",
        ),
        f"`ebbtide plan {metrics.trace.path} --machine M` finds the least change with which it fits: offload, "
        "activation checkpointing, a smaller micro-batch, more ranks, another machine",
    )
