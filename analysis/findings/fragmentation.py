"""Finds memory that torch has reserved and no tensor uses."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import UPDATE
from ebbtide.units import bytes_text

# Less than this, or less than this share of the device, is not reported.
_MIN_BYTES = 2**30
_MIN_SHARE = 0.05


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Check the gap `fragmentation`: `reserved` minus `allocated`, over the iteration.

    Where state is offloaded only the update counts: torch keeps room for activations then, which the next forward uses.
    """
    if not metrics.has_gpu or not metrics.iteration_ms:
        return None
    phase = UPDATE if metrics.offloaded else None
    gaps, capacity = metrics.min_gap_bytes("fragmentation", phase), metrics.capacity_bytes
    if not gaps or capacity is None:
        return Unknown(
            "fragmentation",
            "how much of what torch has reserved holds no tensor?",
            "record with `ebbtide profile`; a monitor file alone does not have torch's counts",
        )
    largest = max(gaps)
    if largest < max(_MIN_BYTES, _MIN_SHARE * capacity):
        return None
    return Finding(
        "fragmentation",
        "Torch has reserved memory that no tensor holds",
        None,
        (
            f"in the median {phase or 'iteration'} never less than {bytes_text(largest)} of {bytes_text(capacity)} is "
            "reserved without holding a tensor",
        ),
        "try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        + ("; empty_cache() before the update frees it for the state" if phase else ""),
    )
