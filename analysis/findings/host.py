"""A host that runs out of memory."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.trace_metrics import Study
from ebbtide.units import bytes_text

# Some pages of a process always lie in swap.
_LEAST_SWAP = 64 << 20
_FULL = 0.97


def swapping(study: Study) -> Finding | Unknown | None:
    """Host memory that was swapped out, or is full: offloaded state that is swapped makes every update a disk read."""
    swap = study.pool_peak("swap")
    capacity = ((study.trace.meta.get("host") or {}).get("cpu") or {}).get("capacity_bytes")
    used = study.pool_peak("host")
    if swap is not None and swap >= _LEAST_SWAP:
        return Finding(
            "swapping",
            "The host swaps",
            None,
            (f"up to {bytes_text(swap)} of a rank's memory lie in swap",),
            "use less host memory: fewer ranks a host, fewer bytes of state, no pinned copies beside the state",
        )
    if used is not None and capacity and used >= _FULL * capacity:
        return Finding(
            "swapping",
            "The host's memory is full",
            None,
            (f"{bytes_text(used)} of {bytes_text(capacity)} are in use",),
            "use less host memory before the host begins to swap",
        )
    if swap is None and used is None:
        return Unknown("swapping", "does the host swap?", "record with `ebbtide profile`, which reads each rank's swap")
    return None
