"""Finds device memory that torch's allocator does not count: CUDA context, NCCL buffers, other processes."""

from __future__ import annotations

from ebbtide.analysis.findings.common import record_memory, scope_text
from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text

# Less than this, and less than this share of the device, is not reported.
_MIN_BYTES = 2**30
_MIN_SHARE = 0.05


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Check the gap `outside torch`: `device` minus `reserved`."""
    if not metrics.has_gpu:
        return None
    gaps, capacity = metrics.min_gap_bytes("outside torch"), metrics.capacity_bytes
    if not gaps or capacity is None:
        return Unknown(
            "memory-outside-torch",
            "how much device memory is used outside torch?",
            "record with `ebbtide profile` (NVML and torch's allocator)"
            if capacity is not None or not gaps
            else record_memory(metrics),
        )
    largest = max(gaps)
    if largest < _MIN_BYTES or largest < _MIN_SHARE * capacity:
        return None
    return Finding(
        "memory-outside-torch",
        "Device memory is in use outside torch",
        None,
        (
            f"{scope_text(metrics)} never less than {bytes_text(largest)} of {bytes_text(capacity)} is in use on the "
            "device beyond what torch has reserved",
        ),
        "look for other processes on the card (nvidia-smi), NCCL buffers (NCCL_BUFFSIZE) and libraries with workspaces",
    )
