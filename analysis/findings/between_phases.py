"""Finds time in which neither forward, backward nor update runs: loading data, logging, evaluation."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import OTHER
from ebbtide.units import ms_text

# Every job does something between the phases. More than this share of the iteration is much.
_MIN_OTHER_SHARE = 0.15


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the time outside phases with the iteration."""
    other, iteration = metrics.phase_ms(OTHER), metrics.iteration_ms
    if not other or not iteration or other < _MIN_OTHER_SHARE * iteration:
        return None
    return Finding(
        "between-phases",
        "Much of the iteration is outside forward, backward and update",
        clamp_gain(other),
        (f"{ms_text(other)} of {ms_text(iteration)} ({100 * other / iteration:.0f} %) belong to no phase",),
        "look at data loading (workers, pinned batches), logging, and synchronising calls such as loss.item()",
    )
