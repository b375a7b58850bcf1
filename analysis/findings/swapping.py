"""Finds a host that swaps or runs out of memory."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text

# Some pages of every process are in swap.
_MIN_SWAP_BYTES = 64 << 20
_FULL_SHARE = 0.97


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Check swap and host memory: with offloaded state in swap, every update reads from disk."""
    swap = metrics.pool_peak("swap")
    capacity = metrics.trace.meta.host.cpu.capacity_bytes
    used = metrics.pool_peak("host")
    if swap is not None and swap >= _MIN_SWAP_BYTES:
        return Finding(
            "swapping",
            "The host swaps",
            None,
            (f"up to {bytes_text(swap)} of a rank's memory are in swap",),
            "use less host memory: fewer ranks a host, fewer bytes of state, no pinned copies of the state",
        )
    if used is not None and capacity and used >= _FULL_SHARE * capacity:
        return Finding(
            "swapping",
            "The host's memory is full",
            None,
            (f"{bytes_text(used)} of {bytes_text(capacity)} are in use",),
            "use less host memory before the host begins to swap",
        )
    if swap is None and used is None and metrics.is_recorded:
        return Unknown("swapping", "does the host swap?", "record with `ebbtide profile`, which reads each rank's swap")
    return None
