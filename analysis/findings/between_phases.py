"""Finds time in which neither forward, backward nor update runs: loading data, logging, evaluation."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.activity.iteration_activity import iteration_activity
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import BACKWARD, FORWARD, OTHER
from ebbtide.units import ms_text

# Causes of time without compute that lie with the host, or with its copies.
_WAITING = [f"cause_{cause}" for cause in ("copy", "memset", "late_launch", "host_busy", "queue", "unknown")]
# Every job does something between the phases. More than this share of the iteration is much.
_MIN_OTHER_SHARE = 0.15


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the time outside phases with the iteration. Where kernels were recorded, without the time in which the
    GPU computes or communicates: it does not wait for the host then."""
    other, iteration = metrics.phase_ms(OTHER), metrics.iteration_ms
    activity = iteration_activity(metrics.trace, OTHER)
    if other and len(activity):
        other = min(other, float(activity[_WAITING].sum(axis=1).max()))
    if not other or not iteration or other < _MIN_OTHER_SHARE * iteration:
        return None
    if metrics.phase_ms(FORWARD) is None or metrics.phase_ms(BACKWARD) is None:
        # The time of a phase that was not recorded counts as other.
        return None
    busy = ", and the GPU neither computes nor communicates then" if len(activity) else ""
    return Finding(
        "between-phases",
        "Much of the iteration is outside forward, backward and update",
        clamp_gain(other),
        (f"{ms_text(other)} of {ms_text(iteration)} ({100 * other / iteration:.0f} %) belong to no phase" + busy,),
        "look at data loading (workers, pinned batches), logging, and synchronising calls such as loss.item()",
    )
