"""Finds jobs whose host memory comes close to the limit of their control group."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text

_NEAR_SHARE = 0.9
_SIGKILL = 9


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the memory in use in the job's control group, pinned memory included, with the limit."""
    meta = metrics.trace.meta
    limit, used = meta.host.memory_limit, metrics.pool_peak("cgroup")
    if not limit.bytes or used is None or used < _NEAR_SHARE * limit.bytes:
        return None
    evidence = [f"up to {bytes_text(used)} of {bytes_text(limit.bytes)} were in use ({used / limit.bytes:.0%})"]
    pinned = metrics.pool_peak("pinned")
    if pinned:
        evidence.append(f"up to {bytes_text(pinned)} of a rank's memory were pinned by torch")
    if meta.exit.signal == _SIGKILL:
        evidence.append("the job was ended by signal 9, which the kernel sends where a group reaches its limit")
    return Finding(
        "host-memory-limit",
        "Host memory is close to the limit of the job's control group",
        None,
        tuple(evidence),
        "raise the limit (memory of the container, --mem of Slurm), or use less: fewer ranks a host, fewer workers "
        "that load data, less pinned memory",
    )
