"""Finds a GPU that waits for the host to launch the next kernel."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.activity.iteration_activity import iteration_activity
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import ms_text

_MIN_SHARE = 0.05


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the gaps before late launches with the iteration, of the rank that waits most."""
    activity, iteration = iteration_activity(metrics.trace), metrics.iteration_ms
    if activity.empty or not iteration:
        return None
    rank = int(activity["cause_late_launch"].idxmax())
    late, compute = (float(activity.loc[rank, column]) for column in ("cause_late_launch", "compute"))
    if late < _MIN_SHARE * iteration:
        return None
    evidence = (
        f"rank {rank}: the GPU waits {ms_text(late)} of {ms_text(iteration)} ({100 * late / iteration:.0f} %) for "
        "kernels that the host launches up to 0.1 ms late",
        f"its compute kernels run for {ms_text(compute)}",
    )
    return Finding(
        "launch-bound",
        "The host launches kernels more slowly than the GPU runs them",
        clamp_gain(late),
        evidence,
        'launch fewer, longer kernels: torch.compile (mode="reduce-overhead" uses CUDA graphs), a fused or foreach '
        "optimizer, a larger micro-batch",
    )
