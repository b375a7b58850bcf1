"""Finds a GPU that waits for the host to launch the next kernel."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.findings.gpu_time import gpu_time
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import ms_text

_MIN_SHARE = 0.05


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the gaps before late launches with the iteration, of the rank that waits most; without iterations, with
    the time from the first to the last activity."""
    times = gpu_time(metrics)
    if times is None:
        return None
    rank, late, total = times.worst(["late_launch"])
    if late < _MIN_SHARE * total:
        return None
    evidence = (
        f"rank {rank}: the GPU waits {ms_text(late)} of {ms_text(total)} ({100 * late / total:.0f} %) for kernels that "
        "the host launches up to 0.1 ms late",
        f"its compute kernels run for {ms_text(float(times.by_rank.loc[rank, 'compute']))}",
    )
    return Finding(
        "launch-bound",
        "The host launches kernels more slowly than the GPU runs them",
        times.gain(late),
        evidence,
        'launch fewer, longer kernels: torch.compile (mode="reduce-overhead" uses CUDA graphs), a fused or foreach '
        "optimizer, a larger micro-batch",
    )
